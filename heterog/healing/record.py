"""What ranks are told to do, and what they tell: their journal, and the record that is made of it.

A rank that is killed, or a full disk, leaves at most one line without an end, which is not read.
"""

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heterog.healing.choices import NO_PLAN, Choice
from heterog.healing.shelf import Moment
from heterog.search.plan import Plan

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The work of a generation of ranks.

    Attributes:
        generation: Number of times the job's ranks were started before.
        plan: Path of the plan file to run.
        last: Number of the last step to train.
        moment: Snapshot to begin with, if there is one.
        checkpoint: Folder of a checkpoint to begin with instead; empty for none.
        folder: Folder of the host, with parts of snapshots and the journal.
        redundancy: Number of other hosts that hold each part, too; ``None`` where all ranks have
            one shelf.
    """

    generation: int
    plan: str
    last: int
    moment: Moment | None
    checkpoint: str
    folder: str = ""
    redundancy: int | None = None

    @property
    def journal(self) -> Path:
        """Path of the file for events."""
        return Path(self.folder, "journal.jsonl")

    @property
    def stop(self) -> Path:
        """Path of a file whose existence asks the ranks to stop after a step."""
        return Path(self.folder, f"stop{self.generation}")


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Append events to a journal, each a line of JSON that begins with its name.

    Raises:
        OSError: for example, there is no room; part of them may be there.
    """
    with path.open("a") as file:
        # A line that was begun before and has no end is not read.
        file.write("\n" + "".join(json.dumps(event) + "\n" for event in events))


def write_event(path: Path, event: str, **said: Any) -> None:
    """Append an event with the current time to a journal."""
    write_events(path, [{"event": event, "at_s": time.monotonic(), **said}])


def read_events(path: Path, at: int = 0, event: str = "") -> tuple[list[Event], int]:
    """Events of a journal, which may not exist yet, and where they end.

    Args:
        path: Path of the journal.
        at: Position from which it is read.
        event: What the events are; others are not parsed. Empty for all.
    """
    if not path.exists():
        return [], at
    with path.open("rb") as file:
        file.seek(at)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    begin = f'{{"event": "{event}'.encode()
    events: list[Event] = []
    for line in whole.splitlines():
        if line.startswith(begin):
            with suppress(ValueError):  # it has no end
                events.append(json.loads(line))
    return events, at + len(whole)


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


@dataclass(slots=True, kw_only=True)
class Trained:
    """Progress of a job so far: all that has to be known to go on with it.

    Attributes:
        generation: Number of times ranks were started before.
        running: The plan that the ranks of this generation run.
        is_running: Whether they are there already, of a job that who leads it goes on with.
        losses: Loss of each step, by step number; a repeated step counts once.
        seconds: Seconds of each step except the first of each generation, by step number.
        moves: Changes of plan in order.
        snapshot_bytes: Size of the largest part of a snapshot that rank 0 has sent.
        num_snapshots: Number of snapshots begun.
        was_kept: Whether one of them is known to have been complete.
        copy_s: Seconds that rank 0 spent copying its parts, during which training waits.
        checkpoint_ns: When the checkpoint was written that was there before the job; 0 for none.
        last_event_s: Time of the last event, by the monotonic clock.
        is_done: Whether the last step was done.
    """

    generation: int = 0
    running: Choice = NO_PLAN
    is_running: bool = False
    losses: dict[int, float | None] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    snapshot_bytes: int = 0
    num_snapshots: int = 0
    was_kept: bool = False
    copy_s: float = 0.0
    checkpoint_ns: int = 0
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
        """Update the record with an event of the ranks."""
        at_s = float(event["at_s"])
        move = self.moves[-1] if self.moves else None
        match event["event"]:
            case "taken up":
                self._forget_after(int(event["step"]))
                if move is not None:
                    move.step, move.move_s = int(event["step"]), at_s - self.last_event_s
                    self._taken_up_s = at_s
            case "step":
                number = int(event["step"])
                if move is not None and number == move.step + 1:
                    move.first_step_s = at_s - self._taken_up_s
                elif number > 1:
                    self.seconds[number] = float(event["seconds"])
                self.losses[number] = event["loss"]
            case "snapshot":
                self.num_snapshots += 1
                self.snapshot_bytes = max(self.snapshot_bytes, int(event["num_bytes"]))
                self.copy_s += float(event["copy_s"])
            case "kept":
                self.was_kept = True
            case "done":
                self.is_done = True
        self.last_event_s = at_s

    def measured(self, plan: Plan) -> dict[str, Any]:
        """What was measured of the steps, and the changes of the plan that was asked for."""
        numbers = sorted(self.losses)
        seconds = [self.seconds[number] for number in numbers if number in self.seconds]
        return {
            "model": plan.graph.name,
            "cluster": plan.cluster.name,
            "predicted_step_time_s": plan.step_time_s,
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
