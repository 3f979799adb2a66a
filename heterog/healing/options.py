"""Settings of healing, and the record of what happened."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from heterog.errors import HeterogError
from heterog.records import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class HealOptions:
    """Settings that protect a job against lost and slow devices.

    Attributes:
        redundancy: Number of further hosts that also hold each part of a snapshot; with 0, losing
            a host loses its part. Ranks of one machine have one memory.
        first_budget: Search budget for the plan that training goes on with after a loss.
        search_budget: Budget of the search for a better plan meanwhile; empty for none.
        back_after_s: Seconds after a loss before a device is tried again; doubles with each
            further loss of the device. 0 never tries.
        slow_factor: Factor over its planned time, relative to the other devices, from which a
            device counts as slow; 0 turns the check off.
        most_losses: Number of losses after which the job is given up.
        checkpoint: Folder of checkpoints written beside training; empty for none.
        checkpoint_s: Seconds between checkpoints.
        num_trials: Number of plans near the running one that are tried on the job's own steps.
    """

    __pydantic_config__: ClassVar = STRICT

    redundancy: int = 1
    first_budget: str = "3s"
    search_budget: str = "30s"
    back_after_s: float = 60.0
    slow_factor: float = 1.5
    most_losses: int = 100
    checkpoint: str = ""
    checkpoint_s: float = 60.0
    num_trials: int = 0

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
        why: The reason in one line.
        kind: ``"lost"``, ``"leaving"``, ``"back"``, ``"slow"``, ``"quick"``, ``"better"``,
            ``"tried"`` or ``"taken back"``.
        step: Number of the last step before the new plan.
        num_ranks: Number of ranks of the new plan.
        method: Name of the method that found the plan.
        steps_done_again: Number of steps repeated because no complete snapshot had them.
        detect_s: Seconds from the last event of the ranks to the end of their generation.
        plan_s: Seconds from there until the new ranks knew what to run.
        move_s: Seconds from there until they had their state.
        first_step_s: Seconds from there until they had done a step.
        num_bytes: Bytes of state that they read.
        far_bytes: Bytes of those that came from other hosts.
    """

    why: str
    kind: str
    step: int = 0
    num_ranks: int = 0
    method: str = ""
    steps_done_again: int = 0
    detect_s: float = 0.0
    plan_s: float = 0.0
    move_s: float = 0.0
    first_step_s: float = 0.0
    num_bytes: int = 0
    far_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Trained:
    """Progress of a job so far.

    Attributes:
        losses: Loss of each step, by step number; a repeated step counts once.
        seconds: Seconds of each step except the first of each generation, by step number.
        moves: Changes of plan in order.
        snapshot_bytes: Size of the largest part of a snapshot that rank 0 has sent.
        num_snapshots: Number of snapshots begun.
        has_snapshot: Whether one of them is known to be complete.
        copy_s: Seconds that rank 0 spent copying its parts, during which training waits.
        last_event_s: Time of the last event, by the monotonic clock.
        is_done: Whether the last step was done.
    """

    losses: dict[int, float | None] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    snapshot_bytes: int = 0
    num_snapshots: int = 0
    has_snapshot: bool = False
    copy_s: float = 0.0
    last_event_s: float = 0.0
    is_done: bool = False
    _taken_up_s: float = 0.0

    def begin_move(self, kind: str, why: str, at_s: float) -> Move:
        """Add a change of plan, for which the last generation has ended at this time."""
        self.moves.append(Move(kind=kind, why=why, detect_s=at_s - self.last_event_s))
        self.last_event_s = at_s
        return self.moves[-1]

    def planned(self, method: str, num_ranks: int, at_s: float) -> None:
        """Complete the last change, if there is one, by the plan that is known at this time."""
        if self.moves:
            move = self.moves[-1]
            move.method, move.num_ranks = method, num_ranks
            move.plan_s = at_s - self.last_event_s
            self.last_event_s = at_s

    def hear(self, event: dict[str, Any]) -> None:
        """Update the record with an event of rank 0."""
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
                self.has_snapshot |= bool(event["is_settled"])
                self.snapshot_bytes = max(self.snapshot_bytes, int(event["num_bytes"]))
                self.copy_s += float(event["copy_s"])
            case "done":
                self.is_done = True
        self.last_event_s = at_s

    def measured(self) -> dict[str, Any]:
        """What was measured of the steps, and the changes of plan."""
        numbers = sorted(self.losses)
        seconds = [self.seconds[number] for number in numbers if number in self.seconds]
        return {
            "step_time_s": statistics.median(seconds) if seconds else 0.0,
            "step_time_min_s": min(seconds, default=0.0),
            "step_time_max_s": max(seconds, default=0.0),
            "step_times_s": seconds,
            "losses": [self.losses[number] for number in numbers],
            "steps": numbers,
            "moves": [asdict(move) for move in self.moves],
        }

    def _forget_after(self, step: int) -> None:
        """Drop the steps after the one that training resumes from; they will be repeated."""
        again = [number for number in self.losses if number > step]
        for number in again:
            del self.losses[number]
            self.seconds.pop(number, None)
        if self.moves:
            self.moves[-1].steps_done_again = len(again)
