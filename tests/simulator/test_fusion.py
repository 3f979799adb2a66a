"""Fused kernels: counts and bytes by hand, and what holds for every graph."""

from collections.abc import Callable
from functools import cache

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
from heterog.pricing.device_models.fusion import (
    Fused,
    ResultMemory,
    fused_kernels,
    memory_of_results,
    parts_of,
)
from heterog.pricing.device_models.model import DeviceModels
from heterog.zoo import build


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


def of_pass(graph: OpGraph, fused: Fused, phase: Phase) -> tuple[float, float]:
    """Launches and bytes of a pass."""
    ops = [number for number, op in enumerate(graph.ops) if op.phase == phase]
    return float(fused.launches[ops].sum()), float(fused.num_bytes[ops].sum())


def test_a_chain_of_elementwise_ops_and_the_loss_are_one_kernel() -> None:
    graph = graph_of(Chain, torch.ones(32, 64), torch.ones(32))
    fused = fused_kernels(graph)
    # Reads 32 x 64 values and 64 scales, writes the loss; everything else stays in registers.
    assert of_pass(graph, fused, Phase.FORWARD) == (1.0, 4.0 * (32 * 64 + 64 + 1))
    # Backward computes again what it needs, and a sum over columns takes a kernel before its own.
    assert of_pass(graph, fused, Phase.BACKWARD)[0] <= 3.0


def test_a_layer_norm_between_products_is_one_kernel_with_its_relu() -> None:
    graph = graph_of(Norm, torch.ones(32, 64), torch.ones(32))
    fused = fused_kernels(graph)
    norm = {op.kind: number for number, op in enumerate(graph.ops) if op.phase == Phase.FORWARD}
    launches = [fused.launches[norm[f"{each}.default"]] for each in ("native_layer_norm", "relu")]
    assert launches == [1.0, 0.0]
    # 32 rows are read once and written once; weight and bias; mean and deviation for backward.
    assert of_pass(graph, fused, Phase.FORWARD)[0] == 2.0
    assert fused.num_bytes[norm["relu.default"]] == 4.0 * 32 * 64
    assert fused.num_bytes[norm["native_layer_norm.default"]] == 4.0 * (32 * 64 + 2 * 64 + 2 * 32)


def test_what_shows_memory_in_another_order_is_a_kernel_of_its_own() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, value: Tensor) -> Tensor:
            made = torch.tanh(value * self.scale)
            return torch.sigmoid(made + made.t())

    graph = graph_of(Turned, torch.ones(64, 64), torch.ones(64))
    assert of_pass(graph, fused_kernels(graph), Phase.FORWARD)[0] == 2.0


def test_results_are_in_registers_or_in_the_place_of_what_nobody_reads() -> None:
    graph = graph_of(Norm, torch.ones(32, 64), torch.ones(32))
    memory = memory_of_results(graph).memory
    of = {
        (op.kind.partition(".")[0], op.phase): memory[graph.outputs[number][0]]
        for number, op in enumerate(graph.ops)
        if graph.outputs[number]
    }
    assert of["native_layer_norm", Phase.FORWARD] == ResultMemory.NONE
    # Backward reads the first product, so that the activation cannot be written over it.
    assert of["addmm", Phase.FORWARD] == of["relu", Phase.FORWARD] == ResultMemory.OWN
    # Only the kernel of the norm reads it, which keeps the activation until it ends.
    assert of["threshold_backward", Phase.BACKWARD] == ResultMemory.NONE
    assert of["native_layer_norm_backward", Phase.BACKWARD] == ResultMemory.OWN


class Gated(nn.Module):
    """A product whose factors are both made by products, as in SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.last(functional.silu(self.first(value)) * self.second(value))
        return made


def test_what_two_results_are_made_of_is_not_written_over() -> None:
    graph = graph_of(Gated, torch.ones(32, 64), torch.ones(32))
    memory, runs = memory_of_results(graph)
    kinds = [op.kind if op.phase == Phase.BACKWARD else "" for op in graph.ops]
    first, other = (n for n in range(kinds.index("mm.default"), len(kinds)) if "mul" in kinds[n])
    last = kinds.index("silu_backward.default")
    # The gradients of both factors come from one kernel, in which that of the activation stays.
    assert runs[first] == runs[other] == runs[last]
    made = [memory[graph.outputs[op][0]] for op in (first, other, last)]
    assert made == [ResultMemory.OWN, ResultMemory.NONE, ResultMemory.OWN]


@pytest.mark.parametrize(("samples", "is_first"), [(4096, True), (64, False)])
def test_a_gradient_of_a_weight_comes_first_if_it_is_smaller_than_what_it_is_made_of(
    samples: int, is_first: bool
) -> None:
    layers = (nn.Linear(256, 256) for _ in range(3))
    model = nn.Sequential(*(each for layer in layers for each in (layer, nn.GELU())))
    graph = graph_of(lambda: model, torch.zeros(samples, 256), torch.zeros(samples))
    products = [op for op in range(graph.num_ops) if graph.ops[op].kind == "mm.default"]
    runs = memory_of_results(graph).runs
    passed, weights = products[:4:2], products[1:4:2]  # of the last two layers
    assert runs[passed].tolist() == (weights if is_first else passed)
    assert runs[weights].tolist() == (passed if is_first else weights)
    # With micro-batches a part ends with each.
    apart = memory_of_results(graph, accumulates=True).runs
    assert apart[products].tolist() == products
    # That of the first layer has nothing to pass on.
    assert runs[products[4:]].tolist() == products[4:]


@pytest.mark.parametrize("name", ["gpt2", "mobilenet_v2"])
def test_what_takes_no_memory_is_read_in_its_part_alone(name: str) -> None:
    graph = zoo_graph(name, 4)
    (memory, runs), part = memory_of_results(graph), parts_of(graph)
    assert (np.diff(part[part >= 0]) >= 0).all()
    assert (part[fused_kernels(graph).kernel >= 0] >= 0).all()
    # A kernel runs where one of its ops does, or two products change places.
    assert ((runs[runs] == runs) | (runs[runs] == np.arange(len(runs)))).all()
    assert (part[runs] == part).all()
    for op in range(graph.num_ops):  # what a kernel reads is there, and nobody waits for it
        made = [int(graph.producer[graph.storage[tensor]]) for tensor in graph.ops[op].inputs]
        assert all(runs[each] <= runs[op] for each in made if each >= 0)
    for tensor in np.flatnonzero(memory != ResultMemory.OWN).tolist():
        maker = int(graph.producer[tensor])
        if memory[tensor] == ResultMemory.NONE:
            assert {runs[each] for each in graph.readers(tensor)} == {runs[maker]}
            continue
        read = {
            int(graph.storage[each])
            for op in np.flatnonzero(runs == runs[maker]).tolist()
            for each in graph.ops[op].inputs
        }
        free = [each for each in read if max(runs[list(graph.readers(each))]) == runs[maker]]
        own = [each for each in free if part[graph.producer[each]] == part[maker]]
        assert graph.tensor_bytes[tensor] in graph.tensor_bytes[own]
    assert (memory == ResultMemory.NONE).any()
    assert (memory == ResultMemory.OF_INPUT).any()


def test_with_micro_batches_a_part_ends_with_each_gradient() -> None:
    graph = zoo_graph("gpt2", 4)
    part = parts_of(graph, accumulates=True)
    assert part.max() > parts_of(graph).max()
    for _, _, gradient in graph.updates:
        maker = int(graph.producer[graph.storage[gradient]])
        assert not (part[maker + 1 :] == part[maker]).any()
    results = memory_of_results(graph, accumulates=True)
    assert (part[results.runs] == part).all()


def test_fusing_saves_launches_and_bytes() -> None:
    graph = zoo_graph("gpt2", 4)
    fused = fused_kernels(graph)
    assert fused.launches.sum() < 0.5 * fused.is_fused.sum()
    assert fused.num_bytes.sum() < 0.5 * graph.bytes_moved[fused.is_fused].sum()
    assert (fused.launches[~fused.is_fused] == 0.0).all()


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


def test_more_samples_never_take_less() -> None:
    graph, kind = zoo_graph("resnet50", 4), device_type("V100-32GB")
    model = DeviceModels(Execution.COMPILED)
    seconds = np.array([model.op_seconds(graph, kind, samples) for samples in range(1, 5)])
    assert (np.diff(seconds, axis=0) >= -1e-12).all()
