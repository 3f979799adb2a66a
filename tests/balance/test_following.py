"""Real ranks of which one is slow: its time is told from its waits, and its share follows."""

import itertools
import re
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from heterog.balance import Balancer
from tests.balance.loops import Loop, Samples, alone, loss_of, on_ranks
from tests.runtime.ranks import Ranks
from tests.thorough import one_in

pytestmark = pytest.mark.distributed
WRAPPERS = ("ddp", "fsdp", "none")
UNIT_S = 0.001
SIZE = 24
MOST_STEPS, LONGER = 400, 48
"""Steps in which shares must have followed, and those after which all take twice as long: on a
busy machine each step waits for a core, for a time that tells nothing of a rank."""


class Slow(nn.Module):
    """Takes a rank's time for each sample, a half in each pass, however busy the machine is."""

    def __init__(self, unit_s: list[float]) -> None:
        super().__init__()
        self.unit_s = unit_s

    def forward(self, inputs: Tensor) -> Tensor:
        pause_s = self.unit_s[0] * len(inputs) / 2
        time.sleep(pause_s)
        outputs = inputs * 1.0
        if outputs.requires_grad:
            outputs.register_hook(lambda _: time.sleep(pause_s))  # type: ignore[no-untyped-call]
        return outputs


class Written(list[tuple[str, float, int]]):
    """A writer as TensorBoard's."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.append((tag, scalar_value, global_step))


def wrap(wrapper: str, model: nn.Sequential) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


Shares = list[tuple[int, ...]]
"""Of each step of a stage."""


def last_is_relieved(shares: Shares) -> bool:
    return shares[-1][2] <= 5 < 8 < shares[-1][0]


def first_is_relieved_too(shares: Shares) -> bool:
    return shares[-1][0] <= 5 < 12 <= shares[-1][1]


def stay_for_40_steps(shares: Shares) -> bool:
    return len(shares) >= 40 and all(max(each) <= 10 for each in shares[-40:])


Stage = tuple[Sequence[float], Callable[[Shares], bool]]
"""How slow each rank is, and how its shares are when the stage is over."""
SLOW: Sequence[Stage] = (
    ((1.0, 1.0, 4.0), last_is_relieved),
    ((6.0, 1.0, 4.0), first_is_relieved_too),
)
EQUAL: Sequence[Stage] = (((4.0, 4.0, 4.0), stay_for_40_steps),)


def train(
    rank: int, wrapper: str, stages: Sequence[Stage]
) -> tuple[list[Shares], list[str], Written]:
    """Shares of each stage, lines that were told, and what was written."""
    unit_s = [0.0]
    model = nn.Sequential(nn.Linear(6, 8), Slow(unit_s), nn.Linear(8, 4)).double()
    wrapped = wrap(wrapper, model)
    lines: list[str] = []
    written = Written()
    balancer = Balancer(wrapped, global_batch_size=SIZE, tell=lines.append, writer=written)
    loader = balancer.loader(Samples(Loop(wrapper=wrapper, shares=(SIZE,), num_samples=5 * SIZE)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    done: list[Shares] = []
    for factors, is_over in stages:
        done.append([])
        for batch in itertools.islice(batches, MOST_STEPS):
            shares = done[-1]
            shares.append(balancer.deal.samples)
            unit_s[0] = UNIT_S * factors[rank] * 2 ** (len(shares) // LONGER)
            torch.autograd.backward(balancer.weigh(loss_of(wrapped, batch)))
            if wrapper == "none":
                balancer.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
            if is_over(shares):  # on all ranks at once: shares are alike
                break
    return done, lines, written


@one_in(3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_shares_follow_a_rank_that_is_slow_and_one_that_becomes_slow(
    ranks: Ranks, wrapper: str
) -> None:
    found = ranks.run(train, wrapper, SLOW)
    (first, second), lines, written = found[0]
    assert all(each[0] == [first, second] for each in found), "ranks differ"
    assert first[0] == (8, 8, 8)
    assert last_is_relieved(first), first
    told = [line for line in lines if re.match(r"rank 2 is \d+ % slower than planned: \d", line)]
    assert told, lines
    assert first_is_relieved_too(second), second
    tags = {tag for tag, _, _ in written}
    assert {"balance/share/rank2", "balance/seconds/rank0", "balance/predicted_gain"} <= tags


def test_equal_ranks_keep_their_shares(ranks: Ranks) -> None:
    for (shares,), _, _ in ranks.run(train, "ddp", EQUAL):
        assert stay_for_40_steps(shares), shares


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_stays_exact_while_shares_change(ranks: Ranks, wrapper: str) -> None:
    """Shares change at every exchange, by noise alone."""
    loop = Loop(wrapper=wrapper, shares=(9, 2, 1), num_samples=100, interval=2, dead_band=-1.0)
    weights, losses, _ = alone(loop)
    for found_weights, found_losses, _ in ranks.run(on_ranks, loop):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-9)
        np.testing.assert_allclose(found_weights, weights, rtol=1e-9, atol=1e-9)


def others_are_quick(written: dict[str, float]) -> bool:
    """Whether the ranks beside the slow one need less than half of its time."""
    slow_s = written["balance/seconds/rank1"]
    return all(written[f"balance/seconds/rank{rank}"] < slow_s / 2 for rank in (0, 2))


def sums(rank: int) -> list[dict[str, float]]:
    """Ranks' own seconds when another one is slow, in and behind a wait.

    They are written every four steps, until the others are quick: on a busy machine each of them
    waits for a core.
    """
    unit_s = [UNIT_S * (20 if rank == 1 else 1)]
    model = nn.Sequential(nn.Linear(6, 8), Slow(unit_s), nn.Linear(8, 4)).double()
    wrapped = DistributedDataParallel(model)
    written = Written()
    balancer = Balancer(wrapped, global_batch_size=SIZE, writer=written, interval=4, dead_band=1e9)
    data = Samples(Loop(wrapper="ddp", shares=(SIZE,), num_samples=4 * SIZE))
    loader, found = balancer.loader(data), list[dict[str, float]]()
    while not found or (len(found) < 20 and not others_are_quick(found[-1])):
        for batch in loader:
            torch.autograd.backward(balancer.weigh(loss_of(wrapped, batch)))
            balancer.mean_loss()
        found.append({tag: value for tag, value, _ in written})
    return found


def test_waits_are_not_counted(ranks: Ranks) -> None:
    """The slow rank sleeps at least 160 ms a step; the others wait for it, which is not theirs."""
    for found in ranks.run(sums):
        assert all(written["balance/seconds/rank1"] > 0.16 for written in found)
        assert others_are_quick(found[-1]), found
