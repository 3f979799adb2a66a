"""What is given to ``heterog.plan`` and ``heterog.layout`` as something else than they take."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn, zeros
from torch.optim import SGD

import heterog
from heterog.balance.shares import BalanceError
from heterog.cluster import Cluster
from heterog.errors import BudgetError, HeterogError, InputFileError, StrategyError
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget
from heterog.simulator.compile_kernels import smallest_graph
from heterog.user_code import as_script, trusted_source


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workload": None}, "the workload is of type NoneType; give a heterog.Workload"),
        ({"cluster": "two.yaml"}, r"`cluster` is of type str; give a cluster, heterog\.Cluster"),
        ({"budget": 30}, "`budget` is of type int; give a text, '30s'"),
        ({"objective": "cheapest"}, "`objective` is of type str; give an Objective"),
        ({"seed": "x"}, "`seed` is of type str; give a whole number"),
        ({"seed": -1}, r"`seed` is -1; give a number of 0 to 2\*\*63"),
        ({"step_barrier": "no"}, "`step_barrier` is of type str; give True or False"),
        ({"method": None}, "`method` is None; give a list of texts"),
        ({"method": ["ddp", 3]}, r"`method` is \['ddp', 3\]; give a list of texts"),
        ({"order": None}, "unknown order 'none'"),
        ({"policy": ["default"]}, "`policy` is .'default'.; give a name or the path"),
    ],
)
def test_a_plan_of_something_else_is_refused_in_one_line(given: Any, words: str) -> None:
    asked = {"workload": smallest_graph(), "cluster": Cluster.load("rtx_mixed"), "method": "ddp"}
    with pytest.raises(HeterogError, match=words):
        heterog.plan(**asked | given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": "2"}, "tp is '2'; give a whole number"),
        ({"micro_batch": 0.5}, "micro_batch is 0.5; give a whole number"),
        ({"recompute": "some"}, "unknown recompute 'some'; did you mean 'none'"),
        ({"recompute": []}, r"unknown recompute '\[\]'"),
        ({"schedule": 3}, "unknown schedule 3"),
        ({"layers": 3}, "`layers` is 3; give a list of whole numbers"),
        ({"split": "encoder"}, "`split` is 'encoder'; give a list of texts"),
    ],
)
def test_a_layout_of_other_types_is_refused_in_one_line(given: Any, words: str) -> None:
    with pytest.raises(HeterogError, match=words):
        heterog.layout(smallest_graph(), Cluster.load("rtx_mixed"), **given)


@pytest.mark.parametrize(
    "given", [{}, {"seconds": "3"}, {"seconds": float("nan")}, {"evaluations": 1.5}]
)
def test_a_budget_that_is_no_amount_is_refused(given: Any) -> None:
    with pytest.raises(BudgetError, match="allows no search"):
        Budget(**given)


@pytest.mark.parametrize("text", [3, None, "9" * 400 + "e"])
def test_a_text_that_is_no_budget_is_refused(text: Any) -> None:
    with pytest.raises(BudgetError, match=r"cannot read budget|whole number of evaluations"):
        Budget.parse(text)


@pytest.mark.parametrize("path", [None, 3, b"plan.json", []])
def test_what_is_no_path_is_refused_in_one_line(path: Any) -> None:
    for call in (Cluster.load, heterog.load_plan, Cluster.load("rtx_mixed").save):
        with pytest.raises(InputFileError, match="is no path; give a text or a pathlib"):
            call(path)


def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(InputFileError, match="the folder that you work in was removed"):
        trusted_source(f"{tmp_path / 'model.py'}:workload", (), "the plan")
    with (
        pytest.raises(InputFileError, match="the folder that you work in was removed"),
        as_script(tmp_path / "model.py"),
    ):
        pass


def test_deploy_says_what_is_missing() -> None:
    step = Workload(nn.Linear(2, 2), (zeros(4, 2), zeros(4, 2)), nn.functional.mse_loss, SGD)
    with pytest.raises(StrategyError, match="the plan is of type str; give a Plan"):
        heterog.deploy(step, "plan.json")  # type: ignore[arg-type]
    plan = heterog.plan(smallest_graph(), Cluster.load("rtx_mixed"), method="ddp", budget="1e")
    with pytest.raises(StrategyError, match="no process group; call torch"):
        heterog.deploy(step, plan)


def test_a_balancer_of_no_module_is_refused() -> None:
    with pytest.raises(BalanceError, match="the model is of type str; give a torch"):
        heterog.Balancer("model", global_batch_size=8)  # type: ignore[arg-type]
