"""Where Sailor's files are."""

from pathlib import Path

import pytest
from sailor.inputs import Inputs, read_inputs

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def inputs() -> Inputs:
    """OPT-350 in Sailor's zone; tests skip where its files are not."""
    if not (DATA / "sailor").is_dir():
        pytest.skip("the shared measurements are not here")
    return read_inputs(DATA / "sailor")
