"""Own optimizers under random strategies: what one device trains, or a refusal before any step."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.errors import StrategyError
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, UpdateScope
from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator, Outcome
from heterog.strategy.schedules import AS_IT_COMES
from heterog.strategy.strategy import Strategy, scope_fault
from tests.own_optimizers import AdamW, Lookahead, Own
from tests.runtime.cases import BATCH, captured_once
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import SYNCS, ZERO, cluster, plan_of, random_strategy, strategy_of
from tests.search.asking import make_plan
from tests.thorough import cases

STEPS = 3
MADE: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "elementwise": (Own, ("momentum", "sign")),
    "replacing": (Own, ("momentum", "new memory")),
    "of parameters": (AdamW, ("momentum", "calls")),
    "counting": (Own, ("momentum", "calls in a group")),
    "lookahead": (Lookahead, ()),
    "of all": (Own, ("momentum", "norm of all", "calls")),
    "estimating": (Own, ("estimated step",)),
}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator).double(), torch.randn(
        BATCH, 4, generator=generator
    ).double()


def workload_of(name: str) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)
        ).double()

    optimizer, looks = MADE[name]
    options = {"lr": 0.02, **({"looks": looks} if looks else {})}
    if name == "estimating":
        options["lr"] = 1.0
    return Workload(seeded, batch_of(0), functional.mse_loss, optimizer, options, name=name)


@cache
def graph_of(name: str) -> OpGraph:
    return PARENT.capture(("own optimizers", name), workload_of, name)


def on_one_device(name: str) -> dict[str, Tensor]:
    workload = workload_of(name)
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    for step in range(STEPS):
        stepper.zero_grad()
        torch.autograd.backward(workload.step_loss(model, batch_of(step)))
        stepper.step()
    return model.state_dict()


def train(rank: int, name: str, paths: Sequence[str]) -> list[dict[str, Tensor] | str | None]:
    """Weights after some steps by each plan on rank 0, or the refusal."""
    found: list[dict[str, Tensor] | str | None] = []
    with captured_once(("own optimizers", name)):
        for path in paths:
            try:
                step = deploy(workload_of(name), load_plan(path))
            except StrategyError as error:
                found.append(str(error))
                continue
            for number in range(STEPS):
                step(batch_of(number))
            found.append(step.state_dict())
            step.close()
    return found


def strategies(name: str, count: int) -> list[Strategy]:
    """Random ones that the language takes, and one by servers of one home."""
    graph, rng, found = graph_of(name), Random(name), []
    served = [SYNCS["server"]] * group_ops(graph).num_groups
    for barrier in (True, False):
        homes = (1,) * len(graph.updates)
        found.append(strategy_of(graph, served, homes=homes, step_barrier=barrier))
    while len(found) < count:
        drawn = random_strategy(rng, graph)
        if graph.scope == UpdateScope.MODEL and rng.random() < 0.6:
            # Seldom drawn at random: the same devices for all groups.
            drawn = drawn.with_decisions((drawn.decisions[0],) * len(drawn.decisions))
            drawn = replace(drawn, schedule=AS_IT_COMES)
            if drawn.decisions[0].sync.is_served or any(home >= 0 for home in drawn.homes):
                continue
        with suppress(StrategyError):  # it updates slices
            drawn.check(graph, cluster())
            found.append(drawn)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", MADE)
def test_own_optimizers_train_as_on_one_device(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    graph, folder = graph_of(name), tmp_path_factory.mktemp("plans")
    drawn = strategies(name, cases(30, 6))
    evaluator = Evaluator(graph, cluster())
    paths = []
    for number, strategy in enumerate(drawn):
        paths.append(str(folder / f"{number}.json"))
        plan_of(graph, strategy).save(paths[-1])
    wanted = on_one_device(name)
    refused = 0
    for strategy, found in zip(drawn, ranks.run(train, name, paths)[0], strict=True):
        fault = scope_fault(graph, strategy, graph.scope)
        judged = evaluator.evaluate(strategy, Order.FIFO)
        assert (judged.outcome == Outcome.CANNOT_RUN) == bool(fault)
        if fault:
            assert judged.shortage == fault
            assert fault in str(found)
            refused += 1
            continue
        assert isinstance(found, dict), found
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    assert (refused > 0) == (graph.scope == UpdateScope.MODEL)
    assert refused < len(drawn)


def test_older_plans_go_by_the_name_and_are_checked_on_ranks() -> None:
    graph = graph_of("of parameters")
    by_name = replace(graph, seen_scope=None)
    groups = group_ops(graph).num_groups
    sliced = strategy_of(by_name, [ZERO["zero2"]] * groups)
    assert "updates slices of parameters" in scope_fault(by_name, sliced, graph.scope)
    assert scope_fault(by_name, sliced, by_name.scope) == ""
    ring = strategy_of(by_name, [SYNCS["ring"]] * groups)
    assert scope_fault(by_name, ring, UpdateScope.MODEL) == ""


def test_plans_let_an_optimizer_see_all_that_it_looks_at() -> None:
    """Large weights on a slow network: without the optimizer, searches cut the model in two."""
    workload = replace(
        workload_of("of all"),
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))),
        example_batch=lambda: (torch.zeros(64, 1024), torch.zeros(64, 1024)),
    )
    graph = capture(workload)
    plan = make_plan(graph, cluster(), methods=("auto",), budget="30e")
    assert scope_fault(graph, plan.strategy, graph.scope) == ""
    cut = [row for row in plan.rows if row.outcome == "cannot_run"]
    assert all("Own looks at all parameters together" in row.shortage for row in cut), cut
