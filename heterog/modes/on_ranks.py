"""A mode's hooks on one rank around each step, and in a rehearsal; they do nothing by default."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heterog.runtime.checkpoint.boxes import Entry
    from heterog.runtime.checkpoint.contents import Contents
    from heterog.runtime.checkpoint.left_out import LeftOutParts
    from heterog.runtime.deploy import DeployedStep
    from heterog.runtime.step.collectives import Communicator
    from heterog.runtime.step.executor import StepExecutor
    from heterog.runtime.step.rank_program import RankProgram
    from heterog.runtime.step.recorder import Recorder
    from heterog.runtime.step.step_order import StepOrder
    from heterog.runtime.step.whole_model import ModelPart

MakeExecutor = Callable[["Callable[[int], Tensor] | None"], "StepExecutor"]
"""Makes an executor; a function, if given, returns the parameters that it reads, by tensor id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A part of reading a checkpoint: a mode's, or that of what codecs have left out.

    Attributes:
        wanted: Tensors to read into, by the name under which they were saved.
        take_over: Function that continues from the tensors read; parameters and optimizer are
            loaded already.
    """

    wanted: Mapping[str, Tensor] = field(default_factory=dict)
    take_over: Callable[[], None] = lambda: None


class RankMode:
    """A mode's hooks on one rank.

    Attributes:
        is_free_running: Whether ranks may be in different steps, so that nothing may make them
            wait for each other.
        is_idle: Whether this rank takes no part in training, and has no loss.
        ends_late: Whether a rank that ran ahead waits at the end, so that only all steps together
            can be timed.
        loss_delay: Number of calls by which losses are late after each ``settle``.
    """

    is_free_running = False
    is_idle = False
    ends_late = False
    loss_delay = 0

    def begin_step(self) -> None:
        """Begin a step."""

    def run(self, batch: Mapping[int, Tensor], num_steps: int) -> Tensor | None:
        """Run a step and return its loss; ``None`` to let it run as usual."""
        return None

    def keep(self, rows: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Take gradients of some rows of ``graph.updates`` (``Mode.takes_gradients``).

        They are this rank's part of the mean over the whole batch. No optimizer uses them unless
        ``end_step`` does.
        """

    def end_step(self, num_steps: int) -> None:
        """End a step; ``num_steps`` counts all steps since the start of training."""

    def why_apart(self, num_steps: int) -> str:
        """Why ranks have different models after a number of steps; empty if they are equal."""
        return ""

    def settle(self, num_steps: int) -> None:
        """Make the model equal on all ranks; each calls it after the same number of steps."""

    def take_late_losses(self) -> list[float]:
        """Losses that no call has returned."""
        return []

    def record(self, recorder: "Recorder | None", *, is_alone: bool | None = None) -> None:
        """Notify a recorder of every task of the next steps.

        Args:
            recorder: The recorder; ``None`` for none.
            is_alone: Whether each step ends before the next one begins; ``None`` for no change.
        """

    def close(self) -> None:
        """Release resources such as process groups; every rank calls it when all have settled."""

    def entries(self, step: "DeployedStep") -> "list[Entry]":
        """Entries of a checkpoint that this rank adds."""
        return []

    def left_out(self, step: "DeployedStep") -> "Iterator[LeftOutParts]":
        """Errors that codecs have left out of the mode's messages."""
        yield from ()

    def reading(self, step: "DeployedStep", contents: "Contents") -> Reading:
        """The mode's part of reading a checkpoint, for a freshly deployed step."""
        return Reading()


class Rehearsal:
    """A mode's hooks in a rehearsal, which runs all ranks in one process."""

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
        """Play the steps instead of the rehearsal; returns whether the mode did."""
        return False

    def after_steps(self) -> None:
        """Play the mode's work after the steps."""


def parts_of(flat: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, one for each value and with its shape."""
    parts = torch.split(flat, [value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
