"""Events that rank 0 writes for the process that watches the job: one line of JSON each.

A rank that is killed leaves at most one unfinished line at the end, which is not read.
"""

import json
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """Writes events; every line is flushed.

    Args:
        path: Path of the file; an existing one is continued. ``None`` writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: str, **said: Any) -> None:
        """Append an event with the current time."""
        if self._path is None:
            return
        line = json.dumps({"event": event, "at_s": time.monotonic(), **said}) + "\n"
        with self._path.open("a") as file:
            file.write(line)


class JournalReader:
    """Reads the events added since the last read.

    Args:
        path: Path of the file, which may not exist yet.
        at: Position to begin at.

    Attributes:
        at: Position up to which it was read.
    """

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path, self.at = path, at

    def new_events(self) -> list[Event]:
        """New events whose line is complete."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self.at)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
