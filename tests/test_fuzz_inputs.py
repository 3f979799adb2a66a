"""A share of ``fuzz_inputs.py``: no damaged file is a traceback, a hang or nonsense."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.forked_python import ForkedPython
from tests.thorough import cases

NUM_CASES = cases(300, 15)
SCRIPT = Path(__file__).parents[1] / "experiments" / "fuzz_inputs.py"


@pytest.mark.slow
def test_damaged_files_are_refused_in_a_line_or_valid(python: ForkedPython) -> None:
    done = subprocess.run(
        [python.command, SCRIPT, "--cases", str(NUM_CASES), "--seed", "17", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["cases"] == NUM_CASES
    assert found["refused"] > 0.66 * NUM_CASES
    assert found["accepted"] > NUM_CASES / 60, "a reader that refuses everything passes, too"
