"""A few model families of ``experiments/model_families.py``, chosen for unlike features."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.forked_python import ForkedPython
from tests.thorough import IS_THOROUGH

SCRIPT = Path(__file__).parents[2] / "experiments" / "model_families.py"


@pytest.mark.distributed
@pytest.mark.slow
def test_families_run_under_every_strategy_and_equal_plain_pytorch(
    python: ForkedPython,
) -> None:
    """Own loss, self loops, sparse tables, ties, noise, BatchNorm, spectral norm, a penalty.

    A buffer that is stepped in place, and gradients that a layer's backward pass adds up itself.
    """
    few = "dlrm_sparse"
    which = ["--quick"] if IS_THOROUGH else ["--only", few]
    done = subprocess.run(
        [python.command, SCRIPT, *which, "--no-search", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == (11 if IS_THOROUGH else 1)
    for row in rows:
        assert row["equal"], (row, done.stderr)
        assert {"parameter_servers", "pipeline", "zero3"} <= row["strategies"].keys()
    assert done.returncode == 0
