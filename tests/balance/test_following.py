"""Real ranks of which one is slow: its time is told from its waits, and its share follows."""

import itertools
import time
from typing import Any

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


def train(
    rank: int, wrapper: str, factors: list[list[float]], num_steps: int
) -> tuple[list[tuple[int, ...]], list[str], Written]:
    """Shares of each step, lines that were told, and what was written.

    Args:
        rank: of this process.
        wrapper: of the model.
        factors: of each stage of the run, how slow each rank is.
        num_steps: of each stage.
    """
    unit_s = [0.0]
    model = nn.Sequential(nn.Linear(6, 8), Slow(unit_s), nn.Linear(8, 4)).double()
    wrapped = wrap(wrapper, model)
    lines: list[str] = []
    written = Written()
    balancer = Balancer(wrapped, global_batch_size=SIZE, tell=lines.append, writer=written)
    loader = balancer.loader(Samples(Loop(wrapper=wrapper, shares=(SIZE,), num_samples=5 * SIZE)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    shares: list[tuple[int, ...]] = []
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        stage = len(shares) // num_steps
        if stage == len(factors):
            break
        unit_s[0] = UNIT_S * factors[stage][rank]
        shares.append(balancer.deal.samples)
        torch.autograd.backward(balancer.weigh(loss_of(wrapped, batch)))
        if wrapper == "none":
            balancer.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return shares, lines, written


@one_in(3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_shares_follow_a_rank_that_is_slow_and_one_that_becomes_slow(
    ranks: Ranks, wrapper: str
) -> None:
    found = ranks.run(train, wrapper, [[1.0, 1.0, 4.0], [6.0, 1.0, 4.0]], 24)
    shares, lines, written = found[0]
    assert all(each[0] == shares for each in found), "ranks differ"
    assert shares[0] == (8, 8, 8)
    assert shares[23][2] <= 5 < 8 < shares[23][0], shares
    assert lines[0].startswith("rank 2 is "), lines
    assert " % slower than planned: 8 -> " in lines[0], lines
    # The other one is taken in within 20 steps, and what is left is the first's.
    assert shares[24 + 20][0] <= 5 < 12 <= shares[24 + 20][1], shares
    tags = {tag for tag, _, _ in written}
    assert {"balance/share/rank2", "balance/seconds/rank0", "balance/predicted_gain"} <= tags


def test_equal_ranks_keep_their_shares(ranks: Ranks) -> None:
    for shares, _, _ in ranks.run(train, "ddp", [[4.0, 4.0, 4.0]], 40):
        assert set(map(max, shares)) <= {8, 9, 10}, shares


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_stays_exact_while_shares_change(ranks: Ranks, wrapper: str) -> None:
    """Shares change at every exchange, by noise alone."""
    loop = Loop(wrapper=wrapper, shares=(9, 2, 1), num_samples=100, interval=2, dead_band=-1.0)
    weights, losses, _ = alone(loop)
    for found_weights, found_losses, _ in ranks.run(on_ranks, loop):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-9)
        np.testing.assert_allclose(found_weights, weights, rtol=1e-9, atol=1e-9)


def sums(rank: int) -> Any:
    """A rank's own seconds when another one is slow, in and behind a wait."""
    unit_s = [UNIT_S * (20 if rank == 1 else 1)]
    model = nn.Sequential(nn.Linear(6, 8), Slow(unit_s), nn.Linear(8, 4)).double()
    wrapped = DistributedDataParallel(model)
    written = Written()
    balancer = Balancer(wrapped, global_batch_size=SIZE, writer=written, interval=4, dead_band=1e9)
    data = Samples(Loop(wrapper="ddp", shares=(SIZE,), num_samples=4 * SIZE))
    for batch in balancer.loader(data):
        torch.autograd.backward(balancer.weigh(loss_of(wrapped, batch)))
        balancer.mean_loss()
    return {tag: value for tag, value, _ in written}


def test_waits_are_not_counted(ranks: Ranks) -> None:
    """The slow rank sleeps at least 160 ms a step; the others wait for it, which is not theirs."""
    for written in ranks.run(sums):
        assert written["balance/seconds/rank1"] > 0.16
        for rank in (0, 2):
            assert written[f"balance/seconds/rank{rank}"] < written["balance/seconds/rank1"] / 2
