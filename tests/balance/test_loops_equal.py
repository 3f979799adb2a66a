"""Rows of ``experiments/loops_equal.py``: every kind of loop beside one process."""

import json
from pathlib import Path

import pytest

from tests.forked_python import ROOT, ForkedPython
from tests.thorough import few_of

SCRIPT = """
import sys

sys.path.insert(0, {folder!r})
import loops_equal

sys.argv[1:] = ["--json", "--only", {rows!r}]
loops_equal.main()
"""
QUICK = (
    "DDP/resume inside an epoch",
    "FSDP2/validation between",
    "DDP/unlike lengths",
    "Lightning/unlike lengths without count",
    "Accelerate/scheduler and accumulation",
    "Lightning/resume inside an epoch",
    "Lightning/limited batches",
    "Trainer/two optimizers",
    "DDP/stream",
    "Accelerate/stream with a position",
    "Lightning/stream",
)
MORE = (
    "Accelerate/validation between",
    "DDP/two optimizers",
    "DDP/frozen midway",
    "FSDP2/accumulation",
    "Trainer/ignored num_items_in_batch",
    "Trainer/resume inside an epoch",
    "Accelerate/resume inside an epoch",
    "Accelerate/ragged end",
    "Lightning/token mean",
    "Lightning/unlike lengths",
    "DDP/unlike lengths without count",
    "Lightning/validation between",
    "Lightning/two optimizers",
    "Lightning/stream with a position",
    "Accelerate/stream",
)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("rows", few_of([",".join(QUICK), ",".join(MORE)], 1), ids=["few", "more"])
def test_loops_are_equal_to_one_process(rows: str, tmp_path: Path, scripts: ForkedPython) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(ROOT / "experiments"), rows=rows))
    found = json.loads(scripts.run(script, 1)[0])
    assert len(found["rows"]) == len(rows.split(","))
    for row in found["rows"]:
        assert row["equal"] or row["refused"], row
