"""Where Sailor's files are, and the package of experiments on the path."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "experiments"))

from sailor.inputs import Inputs, read_inputs  # noqa: E402


@pytest.fixture(scope="session")
def inputs() -> Inputs:
    """OPT-350 in Sailor's zone; tests skip where its files are not."""
    if not (DATA / "sailor").is_dir():
        pytest.skip("the shared measurements are not here")
    return read_inputs(DATA / "sailor")
