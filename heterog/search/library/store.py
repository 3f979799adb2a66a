"""Solved plans in a folder: read as if anybody had written them, bounded, never in the way.

Each plan is a file of its own, moved into its place whole, so that several programs can use one
folder. What cannot be read is passed over; what has not been used for longest goes first.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from heterog.errors import HeterogError
from heterog.files import write_json
from heterog.methods.planner import Candidate
from heterog.records import read_record
from heterog.search.library.adapting import adapted
from heterog.search.library.entry import (
    LIKE_UNTIL,
    SCHEMA_VERSION,
    EntryRecord,
    described,
    distance,
    entry_of,
)
from heterog.search.plan import Plan
from heterog.search.seeds import SeedPlanner
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator

MOST_ENTRIES = 64
"""Most files that are kept; reading all of them takes a fraction of a second."""
MOST_ENTRY_BYTES = 1024**2
"""Most bytes of a file; the zoo's largest plan takes a tenth of that."""
MOST_SEEDS = 3
"""Most plans that a search starts from, those of the most alike cases."""
LIBRARY = "library"
"""Name of the row of these plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of looking up a case in the library.

    Attributes:
        seeds: Plans of like cases; ``None`` if there are none.
        seconds: Seconds that it took to find and adapt them.
        warning: Reason why the folder could not be read; empty if it could.
    """

    seeds: SeedPlanner | None
    seconds: float
    warning: str = ""

    @property
    def num_plans(self) -> int:
        """Number of plans that a search starts from."""
        return 0 if self.seeds is None else len(self.seeds.candidates)


class PlanLibrary:
    """The plans in a folder, which need not exist.

    Args:
        folder: Folder of the files.
        most_entries: Most files that are kept.
    """

    def __init__(self, folder: Path, *, most_entries: int = MOST_ENTRIES) -> None:
        self.folder = folder
        self._most_entries = most_entries

    def look_up(self, evaluator: Evaluator, *, step_barrier: bool = True) -> Lookup:
        """The plans of the most alike cases, adapted to this one.

        Args:
            evaluator: Evaluator of the graph and cluster.
            step_barrier: Whether a step ends with all updates.
        """
        begin = time.perf_counter()
        try:
            files = self._files()
        except OSError as error:
            return Lookup(
                seeds=None,
                seconds=time.perf_counter() - begin,
                warning=f"the library {self.folder} cannot be read ({error.strerror or error}).",
            )
        near: list[tuple[float, str, Path, EntryRecord]] = []
        case = described(evaluator) if files else {}
        for path in files[: self._most_entries]:
            entry = _read(path)
            if entry is not None:
                apart = distance(entry, case, evaluator.cluster)
                if apart <= LIKE_UNTIL:
                    near.append((apart, path.name, path, entry))
        candidates: list[Candidate] = []
        for _, _, path, entry in sorted(near, key=lambda each: each[:2]):
            strategy = adapted(entry, evaluator, step_barrier=step_barrier)
            if strategy is None:
                continue
            candidates.append(Candidate(strategy=strategy, orders=(Order[entry.order.upper()],)))
            with contextlib.suppress(OSError):  # a recently used file is kept longest
                os.utime(path)
            if len(candidates) == MOST_SEEDS:
                break
        seeds = SeedPlanner(LIBRARY, candidates) if candidates else None
        return Lookup(seeds=seeds, seconds=time.perf_counter() - begin)

    def keep(self, plan: Plan, evaluator: Evaluator) -> str:
        """Keep a plan, unless a better one of the same case is there.

        Returns:
            Reason why it could not be kept; empty if nothing is wrong.
        """
        document = entry_of(plan, evaluator)
        if document is None:
            return ""
        path = self.folder / f"{document['graph']}-{document['cluster']}.json"
        before = _read(path)
        if before is not None and before.step_time_s <= document["step_time_s"]:
            return ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(path, document)
            if path.stat().st_size > MOST_ENTRY_BYTES:
                path.unlink()
            for old in self._files()[self._most_entries :]:
                old.unlink(missing_ok=True)
        except (OSError, HeterogError) as error:
            why = str(error).rstrip(".")
            return f"the plan is not kept in the library: {why}."
        return ""

    def _files(self) -> list[Path]:
        """Files of the library, those used last first."""
        found: list[tuple[float, str, Path]] = []
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as entries:
            for each in entries:
                if each.name.endswith(".json") and not each.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):  # another program removed it
                        used_s = each.stat(follow_symlinks=False).st_mtime
                        found.append((-used_s, each.name, Path(each.path)))
        return [path for _, _, path in sorted(found)]


def _read(path: Path) -> EntryRecord | None:
    """An entry; ``None`` if the file is missing or does not hold a valid one."""
    try:
        return read_record(
            path,
            "library entry",
            EntryRecord,
            versions=(SCHEMA_VERSION,),
            most_bytes=MOST_ENTRY_BYTES,
        )
    except HeterogError:
        return None
