"""What a person says about healing, and what became of it."""

from dataclasses import dataclass, field
from typing import Any

from heterog.errors import HeterogError


@dataclass(frozen=True, slots=True, kw_only=True)
class HealOptions:
    """How a job is protected.

    Attributes:
        redundancy: keepers of other hosts that have each part of a snapshot, too. With 0 a host
            that is lost with its keeper takes its part along.
        first_budget: of the plan that training goes on with after a loss.
        search_budget: of the search for a better one meanwhile; empty for none.
        back_after_s: seconds after a loss at which it is tried whether the device is back; twice
            as long after each further loss of it. 0 tries never.
        is_back_always: take a device that is back in although moving costs more than it saves.
        slow_factor: how many times as long as planned, beside the others, a device has to take to
            count as slow; 0 looks for none.
        most_losses: after which the job is given up.
        checkpoint: folder for checkpoints that are written beside training; empty for none.
        checkpoint_s: seconds between them.
    """

    redundancy: int = 1
    first_budget: str = "3s"
    search_budget: str = "30s"
    back_after_s: float = 60.0
    is_back_always: bool = False
    slow_factor: float = 1.5
    most_losses: int = 100
    checkpoint: str = ""
    checkpoint_s: float = 60.0

    def __post_init__(self) -> None:
        if self.redundancy < 0:
            raise HeterogError(f"the redundancy is {self.redundancy}; 0 is the least.")
        if self.slow_factor and not self.slow_factor > 1:
            raise HeterogError(
                f"a device is slow from {self.slow_factor:g} times the planned time on; give more "
                "than 1, or 0 to look for none."
            )
        if self.back_after_s < 0 or self.checkpoint_s <= 0:
            raise HeterogError("seconds cannot be negative, and between checkpoints not 0.")


@dataclass(slots=True, kw_only=True)
class Move:
    """A change of plan in the middle of training.

    Attributes:
        why: in one line.
        kind: ``"lost"``, ``"back"``, ``"slow"`` or ``"better"``.
        step: after which training went on with the new plan.
        num_ranks: of the new plan.
        method: that found it.
        plan: its file, as long as the job runs.
        steps_done_again: that were done, but were in no complete snapshot.
        detect_s: from the last thing that was heard of the ranks to their end.
        plan_s: from there until the new ranks knew what to run.
        move_s: from there until they had their state.
        first_step_s: from there until they had done a step.
        num_bytes: of state that they read.
        far_bytes: of it, from other hosts.
    """

    why: str
    kind: str
    step: int = 0
    num_ranks: int = 0
    method: str = ""
    plan: str = ""
    steps_done_again: int = 0
    detect_s: float = 0.0
    plan_s: float = 0.0
    move_s: float = 0.0
    first_step_s: float = 0.0
    num_bytes: int = 0
    far_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Trained:
    """What a job has done so far.

    Attributes:
        losses: by step; each step counts once.
        seconds: of each step but the first of each generation.
        moves: changes of plan, in their order.
        snapshot_bytes: largest part of a snapshot that rank 0 has sent.
        num_snapshots: that were begun.
        copy_s: seconds that rank 0 has taken to copy its parts out, which training waits for.
        last_event_s: when something was heard last.
        is_done: the last step was done.
    """

    losses: dict[int, float | None] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    snapshot_bytes: int = 0
    num_snapshots: int = 0
    copy_s: float = 0.0
    last_event_s: float = 0.0
    is_done: bool = False
    _taken_up_s: float = 0.0

    def hear(self, event: dict[str, Any]) -> None:
        """Take in what rank 0 wrote down."""
        at_s = float(event["at_s"])
        move = self.moves[-1] if self.moves else None
        match event["event"]:
            case "taken up":
                self._forget_after(int(event["step"]))
                if move is not None:
                    move.step, move.move_s = int(event["step"]), at_s - self.last_event_s
                    self._taken_up_s = at_s
                    move.num_bytes = int(event["num_bytes"])
                    move.far_bytes = int(event["far_bytes"])
            case "step":
                number = int(event["step"])
                is_first = move is not None and number == move.step + 1
                if is_first and move is not None:
                    move.first_step_s = at_s - self._taken_up_s
                elif number > 1:
                    self.seconds[number] = float(event["seconds"])
                self.losses[number] = event["loss"]
            case "snapshot":
                self.num_snapshots += 1
                self.snapshot_bytes = max(self.snapshot_bytes, int(event["num_bytes"]))
                self.copy_s += float(event["copy_s"])
            case "done":
                self.is_done = True
        self.last_event_s = at_s

    def _forget_after(self, step: int) -> None:
        """Steps after the one that training goes on from will be done again."""
        again = [number for number in self.losses if number > step]
        for number in again:
            del self.losses[number]
            self.seconds.pop(number, None)
        if self.moves:
            self.moves[-1].steps_done_again = len(again)
