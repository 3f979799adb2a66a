"""What ``make test`` leaves to ``make test-all``: repetitions, not kinds of cases.

Three words for it. ``cases(all_of_them, few)`` is a number of random cases; ``few_of`` gives all
parameters after the first ones the marker ``thorough``, with which ``make test`` runs nothing;
``one_in(n)`` gives it to all cases of a test but every n-th, for tests with several parameters.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

Value = TypeVar("Value")

VARIABLE = "HETEROG_THOROUGH"
"""Set to 1, tests draw as many random cases as they ever did."""
IS_THOROUGH = os.environ.get(VARIABLE, "") not in ("", "0")


def cases(all_of_them: int, few: int) -> int:
    """How many random cases a test draws: few, or all where ``HETEROG_THOROUGH`` is set."""
    assert 0 < few <= all_of_them
    return all_of_them if IS_THOROUGH else few


def few_of(values: Iterable[Value], few: int) -> list[ParameterSet | Value]:
    """Parameters of a test, of which ``make test`` runs the first few, ``make test-all`` all.

    Args:
        values: all of them; a tuple has the values of several arguments.
        few: how many come first and always run.
    """
    return [
        value
        if number < few
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=THOROUGH)
        for number, value in enumerate(values)
    ]


def one_in(number: int) -> pytest.MarkDecorator:
    """Of the cases of a test, ``make test`` runs the first and every n-th after it."""
    return pytest.mark.one_in(number)


def leave_out(items: list[pytest.Item]) -> None:
    """Mark what ``one_in`` leaves to ``make test-all``."""
    counts: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if counts.get(name, 0) % mark.args[0]:
                item.add_marker(THOROUGH)
            counts[name] = counts.get(name, 0) + 1


THOROUGH = pytest.mark.thorough
"""For a test, or for ``pytest.param(..., marks=THOROUGH)``."""
