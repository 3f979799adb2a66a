"""A step that each rank captures itself is the planned one, whatever ranks draw or ask for."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.capture import capture, capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import ALL, SYNCS, plan_of, strategy_of

SIZES = (8, 5)


class Shuffled(nn.Module):
    """A permutation in an attribute, whose inverse is a buffer; embeddings of all ranks."""

    inverse: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.permutation = torch.randperm(6)
        self.register_buffer("inverse", torch.argsort(self.permutation))
        self.net, self.norm = nn.Linear(6, 4), nn.SyncBatchNorm(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        apart = (x[:, self.permutation][:, self.inverse] - x).abs().sum()
        one, two = (self.norm(self.net(each)) for each in (x, y))
        if dist.is_initialized():
            gathered = [torch.zeros_like(two) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, two)
            two = torch.cat(gathered)
        return functional.cross_entropy(one @ two.T, torch.arange(len(one))) + 1e3 * apart


def batch(size: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(size)
    return torch.randn(size, 6, generator=random), torch.randn(size, 6, generator=random)


WORKLOAD = Workload(Shuffled, batch(SIZES[0]), None, torch.optim.SGD, {"lr": 0.1})


def trained(rank: int, path: str) -> list[float]:
    torch.manual_seed(rank)
    step = deploy(WORKLOAD, load_plan(path))
    losses = [float(step(batch(size))) for size in SIZES]
    step.close()
    return losses


@pytest.mark.distributed
def test_ranks_that_draw_and_ask_train_as_one_device(ranks: Ranks, tmp_path: Path) -> None:
    """The constants are those of rank 0's model, also for a batch of another size."""
    graph = capture(WORKLOAD)
    path = tmp_path / "plan.json"
    decision: Decision = SYNCS["ring"]
    plan_of(graph, strategy_of(graph, [decision] * group_ops(graph).num_groups)).save(path)
    torch.manual_seed(0)
    model = Shuffled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for size in SIZES:
        loss = model(*batch(size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    assert ranks.run(trained, str(path)) == [pytest.approx(wanted, rel=1e-4)] * len(ALL)


def test_capture_leaves_random_numbers_as_they_were() -> None:
    """The next model has the numbers that the captured one has kept as constants."""
    torch.manual_seed(3)
    kept = capture_step(WORKLOAD).module.state_dict().values()
    made = Shuffled().permutation
    assert any(torch.equal(each, made) for each in kept)
    torch.manual_seed(3)
    assert torch.equal(Shuffled().permutation, made)
