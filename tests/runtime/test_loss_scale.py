"""Scaled losses: the rules of torch's scaler, and real ranks beside one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import heterog
from heterog.errors import HeterogError, StrategyError
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.runtime.step.optimizer import LossScale, op_that_begins_backward
from heterog.search.plan import load_plan
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.runtime.cases import EVERY, LOCAL
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import ALL, cluster, graph_of
from tests.simulator.builders import plan_by_hand
from tests.thorough import few_of

STEPS, BATCH = 8, 8
BAD_STEPS = (1, 4)
FLOAT16_STEP = 2.0**-10


def test_the_scale_changes_as_torch_changes_it() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = LossScale(scale=8.0, growth_interval=3)
    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    for _ in range(100):
        is_finite = bool(torch.rand((), generator=generator) < 0.8)
        ours.update(is_finite=is_finite)
        found_inf = torch.tensor(0.0 if is_finite else 1.0)
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 3)
        assert (ours.scale, ours.good_steps) == (float(scale), int(tracker))
    again = LossScale()
    again.load_state_dict(ours.state_dict())
    assert (again.scale, again.num_skipped) == (ours.scale, ours.num_skipped) != (65536.0, 0)


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}],
)
def test_scales_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(HeterogError, match=next(iter(options))[:5]):
        LossScale(**options)


@pytest.mark.parametrize(
    "name",
    few_of(["mlp", "penalty", *sorted(EVERY.keys() - LOCAL.keys() - {"mlp", "penalty"})], 2),
)
def test_every_backward_pass_begins_with_one_op(name: str) -> None:
    graph = graph_of(name)
    begin = op_that_begins_backward(graph)
    assert begin is not None
    assert graph.tensors[graph.outputs[begin][0]].shape == ()


class Half(nn.Module):
    """Two layers in float16, whose gradients vanish there unless the loss is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out: Tensor = self.layers(x)
        return out.float()


def tiny_loss(out: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients are about 1e-8: 0 in float16."""
    return 1e-6 * functional.mse_loss(out, target)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator)
    if step in BAD_STEPS:
        x[-1] = torch.inf  # on one device only
    return x, torch.randn(BATCH, 4, generator=generator)


def workload() -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return Half()

    return Workload(
        seeded, batch_of(0), tiny_loss, torch.optim.AdamW, {"lr": 0.01, "eps": 1e-12}, name="half"
    )


def reference(max_norm: float | None) -> tuple[dict[str, Tensor], float]:
    """Weights and scale on one device, with torch's own scaler."""
    work = workload()
    model = work.make_model()
    stepper = work.optimizer(model.parameters(), **dict(work.optimizer_options))
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for step in range(STEPS):
        stepper.zero_grad()
        torch.autograd.backward(scaler.scale(work.step_loss(model, batch_of(step))))
        scaler.unscale_(stepper)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(stepper)
        scaler.update()
    return model.state_dict(), scaler.get_scale()


def train(
    rank: int, path: str, max_norm: float | None
) -> tuple[dict[str, Tensor] | None, float, int]:
    scale = LossScale(growth_interval=3)
    step = heterog.deploy(workload(), load_plan(path), max_grad_norm=max_norm, loss_scale=scale)
    for number in range(STEPS):
        step(batch_of(number))
    return step.state_dict(), scale.scale, scale.num_skipped


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sync", "max_norm"),
    [(Sync.RING, None), (Sync.PARAMETER_SERVER, 1e-7), (Sync.ZERO2, 1e-7), (Sync.ZERO3, None)],
)
def test_steps_in_float16_are_those_of_torchs_scaler(
    ranks: Ranks, tmp_path: Path, sync: Sync, max_norm: float | None
) -> None:
    graph = capture(workload())
    decision = Decision(devices=ALL, shares=(5, 2, 1), sync=sync)
    homes = tuple(
        row % 3 if sync == Sync.PARAMETER_SERVER else REPLICATED
        for row in range(len(graph.updates))
    )
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster().fingerprint,
        decisions=(decision,) * group_ops(graph).num_groups,
        homes=homes,
    )
    path = tmp_path / "plan.json"
    plan_by_hand(graph, cluster(), strategy).save(path)
    found = ranks.run(train, str(path), max_norm)
    wanted, scale = reference(max_norm)
    assert {(each[1], each[2]) for each in found} == {(scale, len(BAD_STEPS))}
    before = workload().make_model().state_dict()
    weights = found[0][0]
    assert weights is not None
    for name, value in wanted.items():
        # Adam moves each weight by about its rate, whatever the size of its gradient.
        assert (value - before[name]).abs().max() > 0.01
        assert torch.allclose(weights[name], value, atol=STEPS * 0.01 * 40 * FLOAT16_STEP)


@pytest.mark.distributed
def test_blocks_with_losses_of_their_own_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("local blocks")
    assert op_that_begins_backward(graph) is None
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster().fingerprint,
        decisions=(Decision(devices=ALL, shares=(4, 2, 2)),) * group_ops(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
    )
    path = tmp_path / "plan.json"
    plan_by_hand(graph, cluster(), strategy).save(path)
    assert all("does not begin with one loss" in text for text in ranks.run(refused, str(path)))


def refused(rank: int, path: str) -> str:
    from tests.runtime.cases import workload_of

    try:
        heterog.deploy(workload_of("local blocks"), load_plan(path), loss_scale=LossScale())
    except StrategyError as error:
        return str(error)
    return ""
