"""What a mode does on one rank around each step, and in a rehearsal; by default nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heterog.runtime.checkpoint.boxes import Entry
    from heterog.runtime.checkpoint.contents import Contents
    from heterog.runtime.checkpoint.left_out import Kept
    from heterog.runtime.deploy import DeployedStep
    from heterog.runtime.step.collectives import Communicator
    from heterog.runtime.step.executor import StepExecutor
    from heterog.runtime.step.rank_program import RankProgram
    from heterog.runtime.step.recorder import Recorder
    from heterog.runtime.step.step_order import StepOrder
    from heterog.runtime.step.whole_model import ModelPart

MakeExecutor = Callable[["Callable[[int], Tensor] | None"], "StepExecutor"]
"""Makes an executor that reads parameters, by tensor id, by a function if one is given."""


class Reading:
    """What a mode reads of a checkpoint.

    Attributes:
        wanted: New tensors by the name under which they were saved.
    """

    def __init__(self) -> None:
        self.wanted: dict[str, Tensor] = {}

    def take_over(self) -> None:
        """Go on from what was read; the step's parameters and optimizer are loaded already."""


class RankMode:
    """What a mode does on one rank.

    Attributes:
        is_free_running: Whether ranks may be in different steps, so that nothing may make them
            wait for each other.
        is_idle: Whether this rank takes no part in training, and has no loss.
        ends_late: Whether a rank that ran ahead waits at the end: steps are timed together.
        loss_delay: Number of calls since the last ``settle`` after which a loss comes.
    """

    is_free_running = False
    is_idle = False
    ends_late = False
    loss_delay = 0

    def begin_step(self) -> None:
        """Begin a step."""

    def run(self, batch: Mapping[int, Tensor], num_steps: int) -> Tensor | None:
        """Run a step in a way of its own and return its loss; ``None`` to have it run as usual."""
        return None

    def keep(self, rows: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Take gradients of some rows of ``graph.updates`` (``Mode.takes_gradients``).

        They are this rank's part of the mean over the whole batch; no optimizer steps with them
        unless ``end_step`` does.
        """

    def end_step(self, num_steps: int) -> None:
        """End a step; so many have been made since the start of training."""

    def why_apart(self, num_steps: int) -> str:
        """Why ranks have no model in common after so many steps; empty if they have."""
        return ""

    def settle(self, num_steps: int) -> None:
        """Bring ranks together; each calls it after as many steps."""

    def take_late_losses(self) -> list[float]:
        """Losses that no call has returned."""
        return []

    def record(self, recorder: "Recorder | None", *, is_alone: bool | None = None) -> None:
        """Have a recorder notified of every task of the next steps, or nobody.

        Args:
            recorder: The recorder.
            is_alone: Whether each step ends before the next one begins; ``None`` for no change.
        """

    def close(self) -> None:
        """End what was opened; every rank calls it when all have settled."""

    def entries(self, step: "DeployedStep") -> "list[Entry]":
        """Entries of a checkpoint that this rank adds."""
        return []

    def left_out(self, step: "DeployedStep") -> "Iterator[Kept]":
        """What codecs have left out of the mode's messages."""
        yield from ()

    def reading(self, step: "DeployedStep", contents: "Contents") -> Reading:
        """What the mode reads of a checkpoint, for a step that was just deployed."""
        return Reading()


class Rehearsal:
    """A mode in a rehearsal, in which all ranks are played in one process."""

    def ordered(self, seen: "RankProgram", order: "StepOrder") -> "StepOrder":
        """Order of a step's tasks."""
        return order

    def add_rank(
        self,
        seen: "RankProgram",
        part: "ModelPart",
        communicator: "Communicator",
        make_executor: MakeExecutor,
    ) -> bool:
        """Add a rank; returns whether the mode makes the rank's executors itself."""
        return False

    def play(self) -> bool:
        """Play the steps in a way of its own; returns whether it has."""
        return False

    def after_steps(self) -> None:
        """Play what follows the steps."""


def parts_of(flat: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, one for each value and with its shape."""
    parts = torch.split(flat, [value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
