"""A model that computes under ``torch.autocast`` is executed as it is on one device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from tests.runtime.cases import STEPS, TinyGpt, batch_of, mlp, token_loss
from tests.runtime.ranks import Ranks
from tests.simulator.builders import cluster_of, plan_by_hand

BFLOAT16_STEP = 2.0**-8
"""Relative spacing of bfloat16, to which products of parts are rounded before they are added."""


class Autocast(nn.Module):
    """Runs a model under autocast, as a user's ``forward`` does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.inner(x)
        return out.float()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mlp": functional.mse_loss,
    "gpt": token_loss,
}


def workload_of(name: str) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return Autocast(mlp() if name == "mlp" else TinyGpt())

    return Workload(seeded, batch_of(name, 0), LOSSES[name], torch.optim.SGD, {"lr": 0.1})


def train(rank: int, name: str, path: str) -> tuple[list[float], dict[str, Tensor] | None]:
    step = deploy(workload_of(name), load_plan(path))
    return [float(step(batch_of(name, number))) for number in range(STEPS)], step.state_dict()


def reference(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, weights before and weights after."""
    workload = workload_of(name)
    model = workload.make_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    for number in range(STEPS):
        stepper.zero_grad()
        loss = workload.step_loss(model, batch_of(name, number))
        torch.autograd.backward(loss)
        stepper.step()
        losses.append(float(loss.detach()))
    return losses, before, model.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("name", LOSSES)
def test_uneven_shares_under_autocast(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = capture(workload_of(name))
    kinds = [op.kind for op in graph.ops]
    assert "_to_copy.default" in kinds
    assert {"bfloat16", "float32"} <= {tensor.dtype for tensor in graph.tensors}
    cluster = cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(Decision(devices=(0, 1), shares=(5, 3)),) * group_ops(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
    )
    path = tmp_path / "plan.json"
    plan_by_hand(graph, cluster, strategy).save(path)
    results = two_ranks.run(train, name, str(path))
    losses, before, after = reference(name)
    for found, _ in results:
        assert found == pytest.approx(losses, rel=BFLOAT16_STEP)
    state = results[0][1]
    assert state is not None
    for key, wanted in after.items():
        # What the steps changed agrees, not only the weights, which hardly move.
        change = (wanted - before[key]).norm()
        assert (state[key] - wanted).norm() <= 4 * BFLOAT16_STEP * change + 1e-6, key
