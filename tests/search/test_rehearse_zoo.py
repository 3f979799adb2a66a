"""Every method's strategy for models of the zoo can be executed; all models: the experiment."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from heterog.cluster import Cluster
from heterog.methods.planner import Budget
from tests.thorough import cases, few_of


def experiment() -> ModuleType:
    path = Path(__file__).parents[2] / "experiments" / "rehearse_zoo.py"
    spec = importlib.util.spec_from_file_location("rehearse_zoo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("model", few_of(["mobilenet_v2", "gpt2"], 0))
def test_every_method(model: str) -> None:

    cluster = Cluster.load("paper_8gpu")
    rows = experiment().rows_of(model, cluster, Budget(evaluations=cases(20, 5)))
    assert [row for row in rows if row["outcome"] == "cannot_run"] == []
    assert any(row["is_rehearsed"] for row in rows)
