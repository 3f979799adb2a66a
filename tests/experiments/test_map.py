"""The map of ``experiments``: every script and folder is named, and nothing else."""

import re
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_the_map_names_what_there_is() -> None:
    named = set(re.findall(r"`([\w./]+)`", (EXPERIMENTS / "README.md").read_text()))
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in EXPERIMENTS.iterdir()
        if path.name not in ("README.md", "__pycache__") and not path.name.startswith(".")
    }
    assert named == there
