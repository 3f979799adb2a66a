"""A deployed plan takes batches of other sizes and lengths, and trains as one device does."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.runtime.step.alike import batch_by_tensor
from heterog.strategy.division import batch_shares
from heterog.strategy.layouts.tensor import team_rules
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import batch_of, capture_case, deployed, workload_of
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import ALL, SYNCS, ZERO, graph_of, homes_of, plan_of, strategy_of
from tests.runtime.test_op_rules import column_then_row
from tests.simulator.builders import with_rules
from tests.thorough import THOROUGH, one_in

SIZES = (8, 5, 8, 1, 5, 2)


def batches(name: str, sizes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Of these sizes; more samples than the planned batch has come from two of them."""
    made = []
    for step, size in enumerate(sizes):
        pair = zip(batch_of(name, step), batch_of(name, step + 50), strict=True)
        made.append(tuple(torch.cat(both)[-size:] for both in pair))
    return made


def lengths(name: str) -> list[tuple[Tensor, ...]]:
    """Shorter sequences, in between fewer of them."""
    cuts = ((8, 5), (8, 3), (5, 4), (8, 5), (8, 3))
    return [
        tuple(tensor[:size, :length] for tensor in batch_of(name, step))
        for step, (size, length) in enumerate(cuts)
    ]


def train(rank: int, name: str, path: str, every: list[Any]) -> tuple[list[float], Any]:
    step = deployed(name, path)
    losses = [float(step(batch)) for batch in every]
    return losses, step.state_dict()


def on_one_device(name: str, every: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    workload = workload_of(name)
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    for batch in every:
        loss = workload.step_loss(model, batch)
        stepper.zero_grad()
        torch.autograd.backward(loss)
        stepper.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def capture_all(name: str, every: list[Any]) -> None:
    """As ranks do, which need not then."""
    workload = workload_of(name)
    planned = capture_case(workload).graph
    for batch in every:
        shapes = tuple(map(torch.empty_like, batch))  # a part of a tensor has other strides
        capture_case(replace(workload, example_batch=shapes), planned)


def check(ranks: Ranks, folder: Path, name: str, strategy: Strategy, every: list[Any]) -> None:
    path = folder / "plan.json"
    plan_of(graph_of(name), strategy).save(path)
    wanted, weights = on_one_device(name, every)
    PARENT.call(capture_all, name, every)
    results = ranks.run(train, name, str(path), every)
    for losses, _ in results:
        assert losses == pytest.approx(wanted, rel=2e-5)
    for key, value in results[0][1].items():
        assert float((value - weights[key]).abs().max()) <= 1e-4 * max(
            float(weights[key].abs().max()), 1e-2
        ), key


CASES = {name: SYNCS[name] for name in ("ring", "uneven slices", "zero share", "server")} | {
    name: ZERO[name] for name in ("zero1", "zero2", "zero3, no slice")
}


@one_in(14)
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["gpt", "own loss"])
def test_sizes(ranks: Ranks, tmp_path: Path, name: str, case: str) -> None:
    graph = graph_of(name)
    homes = homes_of(graph, case) if case in SYNCS else None
    strategy = strategy_of(
        graph,
        [CASES[case]] * group_ops(graph).num_groups,
        homes=homes,
        bucket_bytes=600,
        step_barrier=len(case) % 2 == 0,
    )
    check(ranks, tmp_path, name, strategy, batches(name, SIZES))


@pytest.mark.distributed
def test_decisions_that_come_to_the_same_shares_keep_their_buckets(
    ranks: Ranks, tmp_path: Path
) -> None:
    """(5, 2, 1) and (4, 3, 1) are both (1, 1, 0) of two samples; slices must not move."""
    graph = graph_of("gpt")
    pair = [
        Decision(devices=ALL, shares=shares, sync=Sync.ZERO1, slices=(1, 5, 2))
        for shares in ((5, 2, 1), (4, 3, 1))
    ]
    assert batch_shares((5, 2, 1), 2) == batch_shares((4, 3, 1), 2)
    groups = group_ops(graph).num_groups
    strategy = strategy_of(graph, [pair[g % 2] for g in range(groups)], bucket_bytes=10**6)
    check(ranks, tmp_path, "gpt", strategy, batches("gpt", (8, 2, 8, 2)))


@THOROUGH
@pytest.mark.distributed
def test_a_pipeline_with_fewer_samples_than_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("own loss")
    groups = group_ops(graph).num_groups
    stages = [Decision(devices=(3 * g // groups,), shares=(8,)) for g in range(groups)]
    strategy = strategy_of(graph, stages, micro_batches=((3, 2), (0, 2), (1, 0)))
    check(ranks, tmp_path, "own loss", strategy, batches("own loss", (8, 5, 2, 11)))
    strategy = strategy_of(graph, stages, micro_batches=((2, 2, 2, 2), (0,) * 4, (0,) * 4))
    check(ranks, tmp_path, "own loss", strategy, batches("own loss", (8, 3, 8)))


@pytest.mark.distributed
def test_rules_of_ops_keep_their_slices(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("mlp")
    decision = Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.RING)
    plain = strategy_of(graph, [decision] * group_ops(graph).num_groups)
    strategy = with_rules(graph, plain, column_then_row(graph))
    check(ranks, tmp_path, "mlp", strategy, batches("mlp", (8, 5, 11, 2)))


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("case", ["ring", "server", "one device"])
def test_lengths(ranks: Ranks, tmp_path: Path, case: str) -> None:
    graph = graph_of("language")
    decisions = [SYNCS[case]] * group_ops(graph).num_groups
    strategy = strategy_of(graph, decisions, homes=homes_of(graph, case))
    check(ranks, tmp_path, "language", strategy, lengths("language"))


@pytest.mark.distributed
def test_rules_over_positions_take_other_sizes_and_lengths(ranks: Ranks, tmp_path: Path) -> None:
    """Positions lie behind the batch in one dimension, and there are as many as the text has."""
    graph = graph_of("gpt")
    decision = Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.RING)
    groups = group_ops(graph).num_groups
    plain = strategy_of(graph, [decision] * groups)
    rules = team_rules(graph, tuple(range(groups)), sequence_parallel=True).op_rules
    plan = axis_plan(graph, rules)
    assert plan.scattered
    strategy = with_rules(graph, plain, rules)
    check(ranks, tmp_path, "gpt", strategy, batches("gpt", (8, 5, 11)))


FEW = 2
"""Shapes that are kept in the test: each of them is captured by each rank."""


def many_sizes(rank: int, path: str) -> tuple[int, str, str]:
    step = deployed("mlp", path)
    few = mock.patch("heterog.runtime.deploy.MAX_OTHER_SHAPES", FEW)
    with few:
        for size in range(2, FEW + 6):
            step(batches("mlp", (size,))[0])
    texts = []
    for bad in ((torch.zeros(8, 6),), (torch.zeros(8, 7), torch.zeros(8, 4))):
        try:
            step(bad)
        except StrategyError as error:
            texts.append(str(error))
    step.close()
    missing, other = texts
    return len(step._by_shape), missing, other


@THOROUGH
@pytest.mark.distributed
def test_few_shapes_are_kept_and_wrong_batches_are_told(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("mlp")
    path = tmp_path / "plan.json"
    plan_of(graph, strategy_of(graph, [SYNCS["ring"]] * group_ops(graph).num_groups)).save(path)
    for kept, missing, other in ranks.run(many_sizes, str(path)):
        assert kept == FEW + 1
        assert "the batch has 1 tensors" in missing
        assert "cannot be captured" in other


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        out: Tensor = (self.layer(first) - second).square().mean()
        return out


def test_tensors_of_a_dict_are_found_by_key() -> None:
    """Both have the same shape: by position they would be swapped without a word."""
    first, second = torch.zeros(6, 4), torch.ones(6, 4)
    batch = {"first": first, "second": second}
    graph = capture(Workload(Keyed, batch, None, torch.optim.SGD, {"lr": 0.1}))
    for given in (batch, {"second": second, "first": first}):
        found = batch_by_tensor(graph, given)
        names = {graph.tensors[tensor].name: value for tensor, value in found.items()}
        assert names["batch.first"] is first
        assert names["batch.second"] is second
