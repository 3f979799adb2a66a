"""Files by which a job and its ranks talk: the ranks' assignment and the journal of rank 0.

A rank that is killed leaves at most one unfinished line at the end of the journal, which is not
read.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterog.files import read_json
from heterog.healing.shelf import Moment
from heterog.records import parse_dataclass

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
        shelf: Folder of the snapshots that are read and written.
        journal: Path of the file for events.
        stop: Path of a file whose existence asks the ranks to stop after a step.
        redundancy: Number of other hosts that hold each part, too; ``None`` where all ranks have
            one shelf.
        writers: Ranks that write a journal: rank 0, and one on each other host, whose journal has
            the last steps if the host of rank 0 is lost.
    """

    generation: int
    plan: str
    last: int
    moment: Moment | None
    checkpoint: str
    shelf: str = ""
    journal: str = ""
    stop: str = ""
    redundancy: int | None = None
    writers: tuple[int, ...] = (0,)


def read_assignment(path: Path) -> Assignment:
    """Read the file."""
    return parse_dataclass(read_json(path, "assignment"), Assignment, f"assignment {path}")


def write_event(path: Path | None, event: str, **said: Any) -> None:
    """Append an event with the current time to a journal, if there is one: a line of JSON."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"event": event, "at_s": time.monotonic(), **said}) + "\n")


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
    lines = [line for line in whole.splitlines() if line.startswith(begin)]
    return [json.loads(line) for line in lines], at + len(whole)
