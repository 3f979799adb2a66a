"""Fused kernels: counts and bytes by hand, what holds for every graph, and inductor itself."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster.catalog import device_type
from heterog.cluster.topology import Execution
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.pricing.device_models.fusion.fused import Fused, Kernel, fused_kernels
from heterog.pricing.device_models.model import DeviceModels
from heterog.zoo import build
from tests.thorough import THOROUGH, few_of


def graph_of(model: Callable[[], nn.Module], *batch: Tensor) -> OpGraph:
    """One step whose loss is the sum of the squares of what the model makes."""

    def loss(made: Tensor, _: Tensor) -> Tensor:
        return (made * made).sum()

    return capture(Workload(model, batch, loss, torch.optim.SGD, name="small"))


@cache
def zoo_graph(name: str, batch_size: int) -> OpGraph:
    return capture(build(name, batch_size))


class Chain(nn.Module):
    """A scale and five elementwise ops, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(value * self.scale) + 1.0) * 2.0 - value


class Norm(nn.Module):
    """A layer norm between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.after = nn.Linear(64, 64)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.after(functional.relu(self.norm(self.before(value))))
        return made


def made_by_compiler(fused: Fused, phase: Phase) -> list[Kernel]:
    return [each for each in fused.kernels if each.phase == phase and not each.is_own]


def test_a_chain_of_elementwise_ops_and_the_loss_are_one_kernel() -> None:
    graph = graph_of(Chain, torch.ones(32, 64), torch.ones(32))
    fused = fused_kernels(graph)
    (forward,) = made_by_compiler(fused, Phase.FORWARD)
    # Reads 32 x 64 values and 64 scales, writes the loss; everything else stays in registers.
    assert forward.num_bytes == 4.0 * (32 * 64 + 64 + 1)
    # Backward computes all of it again from the same inputs, and sums over rows of columns.
    (backward,) = made_by_compiler(fused, Phase.BACKWARD)
    assert sum(backward.writes.values()) == 4.0 * 64
    assert fused.launches.sum() == 2.0


def test_a_layer_norm_between_products_is_one_kernel_with_its_relu() -> None:
    graph = graph_of(Norm, torch.ones(32, 64), torch.ones(32))
    fused = fused_kernels(graph)
    norm, loss = made_by_compiler(fused, Phase.FORWARD)
    # Of 32 rows: read once, written once; weight and bias; mean and deviation for backward.
    assert norm.num_bytes == 4.0 * (2 * 32 * 64 + 2 * 64 + 2 * 32)
    assert loss.num_bytes == 4.0 * (32 * 64 + 1)
    names = {graph.ops[op].kind for loop in norm.loops for op in loop.ops}
    assert names == {"native_layer_norm.default", "relu.default"}


@pytest.mark.parametrize("name", few_of(["gpt2", "resnet50", "mobilenet_v2"], 2))
def test_kernels_run_in_an_order_and_every_value_is_made_before_it_is_read(name: str) -> None:
    fused = fused_kernels(zoo_graph(name, 4))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        kernels = [each for each in fused.kernels if each.phase == phase]
        maker = {value: n for n, kernel in enumerate(kernels) for value in kernel.writes}
        before = [{maker[v] for v in each.reads if v in maker} for each in kernels]
        done: set[int] = set()
        while len(done) < len(kernels):
            ready = {n for n in range(len(kernels)) if n not in done and before[n] <= done}
            assert ready, "kernels wait for each other in a circle"
            done |= ready


def test_all_bytes_and_launches_of_kernels_are_shared_out() -> None:
    graph = zoo_graph("gpt2", 4)
    fused = fused_kernels(graph)
    made = [each for each in fused.kernels if not each.is_own]
    assert fused.launches.sum() == len(made)
    assert fused.num_bytes.sum() == pytest.approx(sum(each.num_bytes for each in made))
    assert fused.num_bytes.sum() < 0.5 * graph.bytes_moved[fused.is_fused].sum()


def test_a_compiled_step_takes_its_kernels_bytes_and_launches() -> None:
    graph, kind = zoo_graph("gpt2", 4), device_type("A100-80GB")
    compiled, eager = DeviceModels(Execution.COMPILED), DeviceModels()
    seconds = compiled.op_seconds(graph, kind, 4)
    fused = fused_kernels(graph)
    assert (
        seconds[fused.is_fused & (fused.launches == 0.0) & (fused.num_bytes == 0.0)] == 0
    ).all()
    assert seconds.sum() < eager.op_seconds(graph, kind, 4).sum()
    # Products and the optimizer stay what they are, but for the host that issues them.
    rest = ~fused.is_fused
    assert seconds[rest].sum() == pytest.approx(
        eager.op_seconds(graph, kind, 4)[rest].sum(), rel=0.25
    )


@THOROUGH
def test_kernels_are_as_many_as_inductor_compiles_and_runs() -> None:
    """Inductor on this CPU; ``docs/notebook/compiled.md`` says what differs on a GPU."""
    script = Path(__file__).parents[2] / "experiments" / "compiled_kernels.py"
    command = [sys.executable, str(script), "--models", "mlp,residual net", "--json"]
    printed = subprocess.run(command, capture_output=True, check=True, timeout=900).stdout
    for row in json.loads(printed)["rows"]:
        # Convolutions on a CPU want other strides: three copies at most, and a mask by itself.
        assert sum(row["heterog"]) == pytest.approx(sum(row["scheduled"]), rel=0.25)


def test_more_samples_never_take_less() -> None:
    graph, kind = zoo_graph("resnet50", 4), device_type("V100-32GB")
    model = DeviceModels(Execution.COMPILED)
    seconds = np.array([model.op_seconds(graph, kind, samples) for samples in range(1, 5)])
    assert (np.diff(seconds, axis=0) >= -1e-12).all()
