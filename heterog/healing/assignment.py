"""The file that tells the ranks of one generation of a job what to run, once it is decided.

Ranks are started before it is known what they will run: they import what they need while the plan
is made, and then wait for this file.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from heterog.errors import HeterogError
from heterog.files import read_json, wait_for_file, write_json
from heterog.healing.shelf import Moment
from heterog.records import parse_dataclass


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
        is_copied: Whether other hosts hold them, too.
        writers: Ranks that write the journal: rank 0, and on each other host one, whose journal
            has the steps that the host of rank 0 did not live to tell.
        why_not: Why there is nothing to run; the ranks end with this error. Empty if there is.
    """

    generation: int
    plan: str
    last: int
    moment: Moment | None
    checkpoint: str
    shelf: str
    is_copied: bool = False
    writers: tuple[int, ...] = (0,)
    why_not: str = ""

    def write(self, path: Path) -> None:
        """Write the file, on which the ranks begin."""
        write_json(path, asdict(self))


def wait_for_assignment(path: Path, timeout_s: float) -> Assignment:
    """Wait for the file and read it.

    Raises:
        HeterogError: it does not appear in time, or says why there is nothing to run.
    """
    wait_for_file(path, timeout_s, f"nobody said within {timeout_s:g} s what to run.")
    assignment = parse_dataclass(read_json(path, "assignment"), Assignment, f"assignment {path}")
    if assignment.why_not:
        raise HeterogError(assignment.why_not)
    return assignment
