"""The folder of the library of solved plans, and remarks about it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.units import format_seconds

if TYPE_CHECKING:
    from heterog.search.library.store import Lookup
    from heterog.search.plan import Plan
    from heterog.search.seeds import SeedPlanner
    from heterog.simulator.evaluator import Evaluator

VARIABLE = "HETEROG_LIBRARY"
OFF = "off"
NoLibraryOption = Annotated[
    bool,
    typer.Option(
        "--no-library",
        help="neither start from plans of like cases nor keep this one; so does "
        "HETEROG_LIBRARY=off",
    ),
]


def library_folder() -> Path | None:
    """Folder in which solved plans are kept; ``None`` if they are not kept.

    ``HETEROG_LIBRARY`` names a folder, or is ``off``; otherwise it is in the user's cache.
    """
    said = os.environ.get(VARIABLE, "")
    if said:
        return None if said.lower() == OFF else Path(said)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if cache and Path(cache).is_absolute():  # the specification: relative ones are ignored
        return Path(cache) / "heterog" / "library"
    try:
        return Path.home() / ".cache" / "heterog" / "library"
    except RuntimeError:  # a user without a home
        return None


class Shelf:
    """The user's library during one search; without plans if it is off.

    Args:
        evaluator: Evaluator of the graph and cluster.
        is_off: Whether it is off for this search.
        step_barrier: Whether a step ends with all updates.
    """

    def __init__(self, evaluator: "Evaluator", *, is_off: bool, step_barrier: bool) -> None:
        from heterog.search.library.store import PlanLibrary

        folder = None if is_off else library_folder()
        self._evaluator = evaluator
        self._library = self._lookup = None
        if folder is not None:
            self._library = PlanLibrary(folder)
            self._lookup = self._library.look_up(evaluator, step_barrier=step_barrier)
            _warn(self._lookup.warning)

    @property
    def seeds(self) -> "SeedPlanner | None":
        """Plans of like cases, for searches to start from."""
        return None if self._lookup is None else self._lookup.seeds

    def keep(self, plan: "Plan") -> None:
        """Keep a plan that trains exactly."""
        if self._library is not None and not plan.strategy.modes:
            _warn(self._library.keep(plan, self._evaluator))

    def remark(self, plan: "Plan") -> str:
        """What the search began with; empty if the library had nothing for it."""
        if self._lookup is None or self._lookup.seeds is None:
            return ""
        return _remark(plan, self._lookup)


def _remark(found: "Plan", lookup: "Lookup") -> str:
    """Remark on the better start of a search with the library, and on the time for it.

    Without the library, a search begins with the best of the methods that do not search.
    """
    from heterog.methods.given import GIVEN
    from heterog.search.library.store import LIBRARY

    steps = {
        row.method: row.step_time_s
        for row in found.rows
        if row.stage == "baseline" and row.step_time_s is not None and row.method != GIVEN
    }
    start_s = steps.pop(LIBRARY, None)
    count = lookup.num_plans
    plans = f"{count} plan{'s' * (count > 1)} of {'' if count > 1 else 'a '}like case"
    plans += "s" * (count > 1)
    text = f"library: {plans}, {format_seconds(lookup.seconds)}"
    if start_s is None:
        return f"{text}, none fits here"
    if not steps:
        return f"{text}, starts with {format_seconds(start_s)} where no simple method fits"
    ratio = min(steps.values()) / start_s
    return (
        f"{text}, starts {ratio:.2f}x better than without"
        if ratio > 1.0
        else (f"{text}, starts no better than without")
    )


def _warn(text: str) -> None:
    """Print one line about a library that cannot be used; the plan is not affected."""
    if text:
        print(f"heterog: {text}", file=sys.stderr)
