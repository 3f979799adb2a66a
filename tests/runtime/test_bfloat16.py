"""Models in bfloat16 under any strategy, held against the same numbers in double precision.

How far gradients may be off follows from how often they were rounded. Rounding to bfloat16
changes a number by at most u = 2^-8 of it. Of n roundings in a row, whose errors are independent
and zero in the mean, the relative error stays below exp(c sqrt(n) u + n u^2 / (1 - u)) - 1 with
probability 1 - 2 exp(-c^2 (1 - u)^2 / 2) (Higham and Mary 2019, theorem 2.4). c is chosen for one
failure in a million, and n is counted: the longest path of ops from the batch to the gradients,
each of which rounds what it makes, and for each sum over devices or micro-batches on it one
rounding for each summand. Errors are compared in the norm of a tensor, as if no op made them
larger relative to it; gradients of less than a tenth of the norm of all, whose terms may cancel,
relative to that tenth.
"""

import math
import os
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.axis_plan import axis_plan
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Strategy
from tests.runtime.any_strategy import any_strategy
from tests.runtime.cases import (
    TinyGpt,
    Trained,
    batch_of,
    captured_once,
    mlp,
    run_steps,
    token_loss,
)
from tests.runtime.grids import grid_cluster
from tests.runtime.ranks import PARENT, Ranks
from tests.simulator.builders import plan_by_hand
from tests.thorough import one_in

SEED = int(os.environ.get("HETEROG_SEED", "0"))
CASES = int(os.environ.get("HETEROG_RANDOM_STRATEGIES", "1"))
UNIT_ROUNDOFF = 2.0**-8
FAILURES = 1e-6
SMALL = 0.1
"""Gradients below this part of all gradients' norm are compared with it."""


class Bfloat16(nn.Module):
    """A model whose parameters and activations are bfloat16, and whose output is not."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.inner.parameters()).dtype
        out: Tensor = self.inner(x.to(dtype) if x.is_floating_point() else x)
        return out.to(torch.promote_types(dtype, torch.float32))


def workload_of(name: str) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return Bfloat16(mlp() if name == "mlp" else TinyGpt())

    loss = functional.mse_loss if name == "mlp" else token_loss
    return Workload(seeded, batch_of(name, 0), loss, torch.optim.SGD, {"lr": 0.1}, name=name)


def train(rank: int, name: str, path: str) -> Trained:
    with captured_once(("bfloat16", name)):
        return run_steps(deploy(workload_of(name), load_plan(path)), name)


@cache
def exact(name: str, samples: int = 8) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the first step in double precision, from the same weights."""
    workload = workload_of(name)
    model = workload.make_model().double()
    x, y = (each[:samples] for each in batch_of(name, 0))
    y = y.double() if y.is_floating_point() else y
    loss = workload.step_loss(model, (x.double() if x.is_floating_point() else x, y))
    torch.autograd.backward(loss)
    found = {key: value.grad for key, value in model.named_parameters()}
    return float(loss.detach()), {key: value for key, value in found.items() if value is not None}


def num_roundings(graph: OpGraph, strategy: Strategy, num_devices: int) -> int:
    """Roundings on the longest path from the batch to a gradient."""
    plan = axis_plan(graph, strategy.op_rules)
    depth = [0] * len(graph.tensors)
    for op, node in enumerate(graph.ops):
        if node.phase == Phase.UPDATE:
            continue
        before = max((depth[tensor] for tensor in node.inputs), default=0)
        for tensor in graph.outputs[op]:
            is_sum = "P" in (plan.batch_placements[tensor].kind, plan.placements[tensor].kind)
            rounds = not graph.is_view[op] and graph.tensors[tensor].dtype == "bfloat16"
            depth[tensor] = before + (num_devices if is_sum else 1) * rounds
    gradients = max(depth[gradient] for _, _, gradient in graph.updates)
    return gradients + strategy.num_micro_batches - 1


def tolerance(roundings: int) -> float:
    """Relative error of so many roundings; see the top of the file."""
    u = UNIT_ROUNDOFF
    c = math.sqrt(2 * math.log(2 / FAILURES)) / (1 - u)
    return math.expm1(c * math.sqrt(roundings) * u + roundings * u**2 / (1 - u))


def assert_near(results: list[Trained], name: str, limit: float) -> None:
    """The first step's loss and gradients are off by no more than their roundings."""
    loss, wanted = exact(name)
    every = float(torch.stack([each.norm() for each in wanted.values()]).norm())
    for result in results:
        assert result.losses[0] == pytest.approx(loss, rel=limit)
        for key, steps in result.gradients.items():
            known = ~steps[0].isnan()
            error = float((steps[0].double() - wanted[key])[known].norm())
            assert error <= limit * max(float(wanted[key].norm()), SMALL * every), key


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_bfloat16_is_off_by_its_roundings(four_ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = PARENT.capture(("bfloat16", name), workload_of, name)
    assert {graph.tensors[parameter].dtype for _, parameter, _ in graph.updates} == {"bfloat16"}
    path = tmp_path / "plan.json"
    for seed in range(SEED, SEED + CASES):
        strategy = any_strategy(Random(f"{seed} {name}"), graph, 4)
        plan_by_hand(graph, grid_cluster(4), strategy).save(path)
        results = four_ranks.run(train, name, str(path))
        whole = {key: value.shape for key, value in exact(name)[1].items()}
        limit = tolerance(num_roundings(graph, strategy, 4))
        known = [
            each._replace(
                gradients={k: g for k, g in each.gradients.items() if g[0].shape == whole[k]}
            )
            for each in results
        ]
        assert_near(known, name, limit)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_lost_sample_would_show(name: str) -> None:
    """The tolerance is smaller than what a quarter of the batch changes."""
    graph = PARENT.capture(("bfloat16", name), workload_of, name)
    strategy = any_strategy(Random(f"{SEED} {name}"), graph, 4)
    limit = tolerance(num_roundings(graph, strategy, 4))
    loss, _ = exact(name)
    part, gradients = exact(name, samples=6)
    trained = Trained([part], {key: [value] for key, value in gradients.items()}, None)
    with pytest.raises(AssertionError):
        assert_near([trained._replace(losses=[loss])], name, limit)
