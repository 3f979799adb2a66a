"""What a balancer begins with, refuses and keeps; jobs of one rank and of two."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import heterog
from heterog.balance import BalanceError, Balancer
from heterog.balance.shares import cut_batch
from heterog.graph.grouping import group_ops
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import SYNCS, graph_of, plan_of, strategy_of

DATA = TensorDataset(torch.arange(26.0))


def first_shares(rank: int, options: dict[str, Any], size: int = 12) -> tuple[int, ...]:
    balancer = Balancer(global_batch_size=size, **options)
    balancer.loader(DATA)
    found, weights = balancer.shares, weakref.ref(balancer.weights)
    gc.disable()
    del balancer
    gc.enable()
    assert weights() is None, "its hooks end with it, not when Python collects"
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, (4, 4, 4)),
        ({"shares": (7, 0, 5)}, (7, 0, 5)),
        ({"speeds": (0.8, 0.4, 0.3)}, (7, 3, 2)),
        ({"speeds": (0.8, 0.4, 0.3), "fits": (5, None, None)}, (5, 4, 3)),
        ({"speeds": (10, 1, 1), "fits": 6}, (6, 3, 3)),
        ({"speeds": (10, 1, 1), "fits": 6, "micro_batches": True}, (10, 1, 1)),
    ],
    ids=str,
)
def test_shares_to_begin_with(
    ranks: Ranks, options: dict[str, Any], shares: tuple[int, ...]
) -> None:
    assert ranks.run(first_shares, options) == [shares] * 3


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shares": (4, 4)}, "2 shares for 3 ranks"),
        ({"shares": (4, 4, 4), "speeds": (1, 1, 1)}, "shares and speeds are given"),
        ({"speeds": (1, 1)}, "speeds of 2 ranks; 3 are running"),
        ({"speeds": (1, 1, 0)}, "rank 2 has a speed of 0"),
        ({"fits": 3}, "3 . 3 . 3 = 9 units of a global batch of 12"),
        ({"fits": 0}, "fits=0: give a number of samples of 1 or more"),
        ({"shares": (6, 6, 0), "fits": 5}, "rank 0 is given 6 samples and can hold 5"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_fit_is_refused(ranks: Ranks, options: dict[str, Any], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        ranks.run(first_shares, options)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["ring", "zero share"])
def test_shares_of_a_plan(ranks: Ranks, tmp_path: Path, case: str) -> None:
    graph = graph_of("mlp")
    strategy = strategy_of(graph, [SYNCS[case]] * group_ops(graph).num_groups)
    plan_of(graph, strategy).save(tmp_path / "plan.json")
    options = {"plan": tmp_path / "plan.json"}
    planned = SYNCS[case].shares
    assert ranks.run(first_shares, options, 8) == [planned] * 3
    assert ranks.run(first_shares, options, 80) == [tuple(10 * n for n in planned)] * 3


def test_the_public_name() -> None:
    assert heterog.Balancer is Balancer


def train_some(
    rank: int, steps: int, state: Any, shares: tuple[int, ...] = (5, 2, 1), num_workers: int = 0
) -> tuple[list[list[float]], Any]:
    """Indices that this rank saw, and the state after that many steps.

    Shares stay: eight steps of next to no work take whatever the machine has them take, and the
    two jobs that are compared would come to shares of their own.
    """
    balancer = Balancer(global_batch_size=8, shares=shares, interval=0)
    loader = balancer.loader(DATA, seed=3, num_workers=num_workers)
    if state is not None:
        balancer.load_state_dict(state)
    seen, done = [], 0
    while done < steps:
        for (batch,) in loader:
            seen.append(batch.tolist())
            done += 1
            if done == steps:
                break
    return seen, balancer.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("stop", [1, 3, 4, 6])  # an epoch has 4 steps
def test_a_state_goes_on_where_it_was_taken(ranks: Ranks, stop: int) -> None:
    whole = ranks.run(train_some, 9, None)
    first = ranks.run(train_some, stop, None)
    assert first[0][1] == first[1][1]
    rest = ranks.run(train_some, 9 - stop, first[0][1])
    for (all_seen, _), (before, _), (after, _) in zip(whole, first, rest, strict=True):
        assert before + after == all_seen


def test_workers_that_are_ahead_do_not_move_the_place() -> None:
    whole, _ = train_some(0, 9, None, (8,))
    before, state = train_some(0, 2, None, (8,), num_workers=2)
    after, _ = train_some(0, 7, state, (8,), num_workers=1)
    assert before + after == whole


def test_one_process_needs_no_group() -> None:
    model = nn.Linear(1, 1)
    balancer = Balancer(model, global_batch_size=8)
    for (batch,) in balancer.loader(DATA):
        loss = model(batch[:, None]).mean()
        weighed = balancer.weigh(loss)
        torch.autograd.backward(weighed)
        balancer.average_gradients()
        assert weighed == loss
        assert balancer.mean_loss() == pytest.approx(loss.item())


def test_a_step_without_any_token_changes_nothing() -> None:
    model = nn.Linear(1, 1)
    balancer = Balancer(model, global_batch_size=8)
    for (batch,) in balancer.loader(DATA):
        outputs = model(batch[:, None])
        targets = torch.full((len(batch),), -100)
        loss = nn.functional.cross_entropy(outputs, targets)
        assert torch.isnan(loss)
        torch.autograd.backward(balancer.weigh(loss, (targets != -100).sum()))
        assert model.weight.grad is not None
        assert not model.weight.grad.any()
        assert balancer.mean_loss() == 0


def test_calls_out_of_turn_are_refused() -> None:
    balancer = Balancer(global_batch_size=8)
    with pytest.raises(BalanceError, match=r"call balancer.loader\(dataset\) first"):
        balancer.state_dict()
    balancer.loader(DATA)
    with pytest.raises(BalanceError, match="no batch yet"):
        balancer.weigh(torch.zeros(()))
    with pytest.raises(BalanceError, match="needs the model"):
        balancer.average_gradients()


def test_batches_of_all_kinds_are_cut() -> None:
    batch = {
        "x": torch.arange(5),
        "nested": (torch.arange(10).view(5, 2), ["a", "b", "c", "d", "e"]),
    }
    parts = list(cut_batch(batch, 5, 2))
    assert [count for _, count in parts] == [3, 2]
    assert parts[1][0]["x"].tolist() == [3, 4]
    assert parts[1][0]["nested"][1] == ["d", "e"]
    padded = list(cut_batch(torch.arange(2), 2, 3))
    assert [(part.tolist(), count) for part, count in padded] == [([0], 1), ([1], 1), ([0], 0)]
    with pytest.raises(BalanceError, match="a batch of 5 samples holds something of 4"):
        list(cut_batch({"x": torch.arange(4)}, 5, 2))


def test_a_process_group_outlives_the_model(tmp_path: Path) -> None:
    """Freed by the model, after a barrier, gloo may wait for ever for a thread of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    balancer = Balancer(model, global_batch_size=4)
    dist.destroy_process_group()
    del model, balancer
    gc.collect()
    assert group() is not None
