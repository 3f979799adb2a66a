"""The example scripts: a few lines apart, and each trains like one process."""

import difflib
import re
from pathlib import Path

import pytest

from tests.forked_python import ForkedPython

FOLDER = Path(__file__).parents[2] / "examples" / "balance"
SCRIPTS = ("plain_ddp", "fsdp2", "hf_accelerate", "hf_trainer", "lightning_ddp")
MOST_LINES = 5


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_five_lines_make_the_difference(name: str) -> None:
    before, after = lines_of(FOLDER / "before" / f"{name}.py"), lines_of(FOLDER / f"{name}.py")
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(changed) <= MOST_LINES, changed


def with_small_samples(text: str) -> str:
    """The same script for images, or sentences, of a sixteenth: as many steps of less work."""
    small = text.replace("torch.randn(1000, 3, 64, 64)", "torch.randn(1000, 3, 16, 16)")
    return small.replace("64", "16") if "GPT2" in text else small


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_train_like_one_process(name: str, tmp_path: Path, scripts: ForkedPython) -> None:
    """22 steps, of which every 11th is ragged; the Trainer's labels are of unequal numbers."""
    losses = []
    script = tmp_path / f"{name}.py"
    script.write_text(with_small_samples((FOLDER / f"{name}.py").read_text()))
    for num_ranks in (1, 3):
        words = scripts.run(script, num_ranks, EPOCHS="2")
        found = re.search(r"validation loss ([\d.]+)", words[0])
        assert found, words[0]
        assert "epoch 1 " in words[0]
        losses.append(float(found[1]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
