"""The folder of the library of solved plans, and remarks about it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.units import format_seconds

if TYPE_CHECKING:
    from heterog.planners.library.store import Lookup, PlanLibrary
    from heterog.planners.plan import Plan

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


def open_library(no_library: bool) -> "PlanLibrary | None":
    """The user's library; ``None`` if it is off."""
    from heterog.planners.library.store import PlanLibrary

    folder = None if no_library else library_folder()
    return None if folder is None else PlanLibrary(folder)


def library_remark(found: "Plan", lookup: "Lookup") -> str:
    """Remark on the better start of a search with the library, and on the time for it.

    Without the library, a search begins with the best of the methods that do not search.
    """
    from heterog.planners.given import GIVEN
    from heterog.planners.library.store import LIBRARY

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


def warn(text: str) -> None:
    """Print one line about a library that cannot be used; the plan is not affected."""
    if text:
        print(f"heterog: {text}", file=sys.stderr)
