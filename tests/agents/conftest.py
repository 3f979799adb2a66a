"""What tests of training share."""

from functools import partial

import pytest

from heterog.agents.config import TrainingConfig
from heterog.cli import train


@pytest.fixture
def few_validation_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command validates on two pairs: sixteen take most of the time of a short training."""
    monkeypatch.setattr(train, "TrainingConfig", partial(TrainingConfig, num_validation=2))
