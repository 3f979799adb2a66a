"""Loops that train as one process does, and loops that do not: a check tells them apart."""

import sys
from pathlib import Path

import pytest

from heterog import cli
from heterog.balance.check import CheckRequest, ScriptError, Verdict, check
from heterog.errors import HeterogError

pytestmark = pytest.mark.distributed
LOOPS = Path(__file__).parent / "checked_loops.py"
RIGHT = (
    *("plain", "momentum", "lbfgs", "dropout", "batch norm", "autocast", "attention"),
    *("micro-batches", "clipping", "ragged", "stream", "noise"),
)
WRONG = (
    *("advantages", "weights", "mixup", "factor", "threshold", "disguised sum", "pairs"),
    *("hook", "beside", "running", "codebook"),
)


def checked(kind: str, **options: object) -> Verdict:
    return check(CheckRequest(script=str(LOOPS), arguments=(kind,), timeout_s=60.0, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", RIGHT)
def test_right_loops_are_equal(kind: str) -> None:
    verdict = checked(kind)
    assert verdict.answer == "equal", verdict
    assert verdict.apart < verdict.allowed / 10


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_loops_differ(kind: str) -> None:
    verdict = checked(kind)
    assert verdict.answer == "differs", verdict
    assert verdict.apart > 10 * verdict.allowed
