"""What is left to ``make test-all`` is the end of a list, and never all of a file."""

import re
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests import thorough
from tests.thorough import VARIABLE, cases, few_of

TESTS = Path(__file__).parent
MAKEFILE = (TESTS.parent / "Makefile").read_text()


def marked(values: list[ParameterSet | object]) -> list[tuple[object, ...]]:
    """Values of the parameters with the marker."""
    return [
        tuple(each.values)
        for each in values
        if isinstance(each, ParameterSet) and any(mark.name == "thorough" for mark in each.marks)
    ]


def test_the_first_parameters_always_run() -> None:
    assert few_of(["a", "b", "c"], 2)[:2] == ["a", "b"]
    assert marked(few_of(["a", "b", "c"], 2)) == [("c",)]
    assert marked(few_of([(1, 2), (3, 4)], 1)) == [(3, 4)], "values of two arguments"
    assert marked(few_of(["a"], 1)) == []


@pytest.mark.parametrize(("is_thorough", "number"), [(False, 5), (True, 50)])
def test_all_random_cases_are_drawn_when_asked(
    monkeypatch: pytest.MonkeyPatch, is_thorough: bool, number: int
) -> None:
    monkeypatch.setattr(thorough, "IS_THOROUGH", is_thorough)
    assert cases(50, 5) == number


def test_make_knows_the_marker_and_the_variable() -> None:
    assert '-m "not thorough"' in MAKEFILE
    assert f"{VARIABLE}=1" in MAKEFILE


def test_no_file_is_left_out_as_a_whole() -> None:
    whole = re.compile(r"^pytestmark\b.*(\n .*)*(THOROUGH|mark\.thorough)", re.MULTILINE)
    assert not [path for path in TESTS.rglob("test_*.py") if whole.search(path.read_text())]
