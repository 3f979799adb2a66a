"""Trainers with unequal shares make the updates of a Trainer on one process, whatever the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked_python import ForkedPython
from tests.thorough import THOROUGH

SCRIPT = Path(__file__).with_name("trainer_cases.py")
FEW = [
    "sequence accumulated",
    "causal",
    "own tokens accumulated",
    "own loss",
    "own step",
    "direct step",
    "noise",
    "refused: two means",
    "unlike padding",
]
TOLD = {
    "unlike padding": "mean over elements of which samples have unlike numbers",
    "direct step": "a training step of DirectStep took no loss from compute_loss",
    "noise": "each rank draws the noise of its own samples",
}
ALL: list[str] = []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("names", "shares"),
    [
        (FEW, [6, 2]),
        pytest.param(FEW, [1, 7], marks=THOROUGH),
        pytest.param(ALL, [6, 2], marks=THOROUGH),
    ],
    ids=["few", "one sample", "all"],
)
def test_shares_do_not_change_the_update(
    names: list[str], shares: list[int], tmp_path: Path, scripts: ForkedPython
) -> None:
    one, two = (trained(names, shares, ranks, tmp_path, scripts) for ranks in (1, len(shares)))
    for name in names or one:
        if name in TOLD:
            assert TOLD[name] in two[name]
        elif name.startswith("refused"):
            assert "loss_mean_over=" in two[name], name
            assert "A sum would be" in two[name], name
        else:
            assert isinstance(two[name], torch.Tensor), (name, two[name])
            torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6, msg=name)


def trained(
    names: list[str], shares: list[int], num_ranks: int, folder: Path, scripts: ForkedPython
) -> dict[str, Any]:
    """What each case comes to on rank 0."""
    script = folder / "script.py"
    script.write_text(SCRIPT.read_text())
    scripts.run(script, num_ranks, FOLDER=str(folder), SHARES=str(shares), CASES=",".join(names))
    found: dict[str, Any] = torch.load(folder / f"found.{num_ranks}.0")
    return found
