"""The example scripts: a few lines apart, and each trains like one process."""

import difflib
import re
import sys
from pathlib import Path

import pytest

from heterog.runtime.launch import run_commands

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


def said(name: str, num_ranks: int, folder: Path) -> dict[int, str]:
    """What each rank of a script prints."""
    run_commands(
        ["-m", f"examples.balance.{name}"],
        num_ranks,
        wrap=lambda rank, command: [
            *("/bin/sh", "-c", 'exec "$@" > "$0"', str(folder / f"{num_ranks}.{rank}")),
            *command,
        ],
        environment=lambda rank: {
            "EPOCHS": "2",
            "LOCAL_RANK": str(rank),
            "PYTHONPATH": f"{FOLDER.parents[1]}:{':'.join(sys.path)}",
        },
    )
    return {rank: (folder / f"{num_ranks}.{rank}").read_text() for rank in range(num_ranks)}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_train_like_one_process(name: str, tmp_path: Path) -> None:
    """22 steps, of which every 11th is ragged; the Trainer's labels are of unequal numbers."""
    losses = []
    for num_ranks in (1, 3):
        words = said(name, num_ranks, tmp_path)
        found = re.search(r"validation loss ([\d.]+)", words[0])
        assert found, words[0]
        assert "epoch 1 " in words[0]
        losses.append(float(found[1]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
