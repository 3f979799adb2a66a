"""Samples cut along space: what is sent, how long it takes, what it needs; published numbers."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import H, OpRule, R, S, Window
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import Program, TaskKind
from heterog.lowering.tables import graph_tables
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.spatial_split import UnitSplit, spatial_rules, spatial_splits
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from heterog.zoo import build
from heterog.zoo.volumes import cosmoflow, segmentation
from tests.simulator.builders import cluster_of


@cache
def cosmoflow_of(width: int) -> OpGraph:
    return capture(cosmoflow(1, width))


def split_of(graph: OpGraph, units: int) -> UnitSplit:
    return next(each for each in spatial_splits(graph) if (each.dim, each.units) == (2, units))


def strategy(graph: OpGraph, cluster: Cluster, units: int, parts: tuple[int, ...]) -> Strategy:
    devices = tuple(range(len(parts)))
    shares = (graph.batch_size, *(0,) * (len(parts) - 1))
    decision = Decision(
        devices=devices, shares=shares, teams=(devices,), parts=parts, sync=Sync.RING
    )
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(decision,) * group_ops(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
        op_rules=split_of(graph, units).op_rules,
    )


def received(graph: OpGraph, program: Program, device: int, phase: Phase) -> list[float]:
    """Bytes of each value's rows that neighbours send to a device, in the order of the values."""
    tables = graph_tables(graph, program.op_rules, program.blocks)
    found: dict[int, float] = {}
    for task in np.flatnonzero((program.kind == TaskKind.SEND) & (program.device == device)):
        slot = int(program.subject[task])
        value = int(tables.slot_value[slot])
        if tables.slot_window[slot, 3] and (
            graph.ops[int(tables.op_id[tables.value_op[value]])].phase == phase
        ):
            found[value] = found.get(value, 0.0) + float(program.num_bytes[task])
    return [found[value] for value in sorted(found)]


def test_halo_bytes_of_cosmoflow_are_the_published_ones() -> None:
    """The first convolution reads the batch, which every rank has; then pool1, conv2, ..."""
    graph = cosmoflow_of(512)
    cluster = cluster_of((1.0, ["V100-16GB"] * 8))
    program = lower(graph, cluster, strategy(graph, cluster, 8, (1,) * 8))
    forward = received(graph, program, 3, Phase.FORWARD)
    assert [round(size / 1e6, 2) for size in forward[:4]] == [16.78, 8.39, 8.39, 4.19]
    # 51.3 MB in all: with conv1's own 2.10, and with the last pooling, whose 4 rows are not cut.
    assert (sum(forward) + 2 * 512**2 * 4 + 256 * 8**2 * 4) / 1e6 == pytest.approx(51.3, abs=0.05)
    # Gradients: two rows of what each convolution but the first has made, one row of what each
    # pooling that is cut has made. The halos of the forward pass are kept for the weights.
    channels, sizes = (16, 32, 64, 128, 256, 256, 256), (512, 256, 128, 64, 32, 16, 8)
    layers = list(zip(channels, sizes, strict=True))
    wanted = sum(2 * depth * size**2 for depth, size in layers[1:])
    wanted += sum(depth * (size // 2) ** 2 for depth, size in layers[:-1])
    assert sum(received(graph, program, 3, Phase.BACKWARD)) == 4 * wanted


class OneConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 1, bias=False)
        self.second = nn.Conv3d(4, 4, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def test_a_halo_costs_its_bytes_over_the_link_by_hand() -> None:
    """Two equal devices: each gets one row of the other's 8 forward, and one of its gradients."""
    batch = torch.rand(1, 1, 8, 64, 64), torch.rand(1, 4, 8, 64, 64)
    graph = capture(Workload(OneConvolution, batch, functional.mse_loss, torch.optim.SGD))
    slow = 1e6
    cluster = cluster_of((slow * 8 / 1e9, ["T4"]), (slow * 8 / 1e9, ["T4"]))
    program = lower(graph, cluster, strategy(graph, cluster, 8, (1, 1)), num_steps=1)
    sends = program.kind == TaskKind.SEND
    row = 4 * 64 * 64 * 4
    assert program.num_bytes[sends].tolist() == [row] * 4
    evaluator = Evaluator(graph, cluster)
    cut = evaluator.evaluate(strategy(graph, cluster, 8, (1, 1)), Order.FIFO)
    wider = cluster_of((slow * 16 / 1e9, ["T4"]), (slow * 16 / 1e9, ["T4"]))
    faster = Evaluator(graph, wider).evaluate(strategy(graph, wider, 8, (1, 1)), Order.FIFO)
    assert faster.step_time_s < cut.step_time_s
    # What is sent one after the other takes at least its bytes over the rate, each way.
    assert cut.step_time_s > 2 * row / slow


def test_memory_falls_with_the_number_of_parts() -> None:
    graph = cosmoflow_of(128)
    peaks = []
    for count in (2, 4, 8):
        cluster = cluster_of((1.0, ["V100-16GB"] * count))
        chosen = strategy(graph, cluster, 8, (1,) * count)
        peaks.append(max(Evaluator(graph, cluster).evaluate(chosen, Order.FIFO).peak_memory_bytes))
    assert peaks[0] > peaks[1] > peaks[2]


def test_every_convolution_of_a_unet_is_cut() -> None:
    graph = capture(segmentation(1, 16, ((2, 2), (2, 4), (4, 4))))
    (coarsest, *_) = spatial_splits(graph)
    assert (coarsest.dim, coarsest.units) == (2, 4)
    rules = dict(coarsest.op_rules)
    for index, op in enumerate(graph.ops):
        if op.kind in ("convolution.default", "native_batch_norm.default", "cat.default"):
            assert rules[index].inputs[0].is_split, op.kind
    # The loss is a sum of parts as well: nothing of the volume's size is ever gathered.
    (loss,) = [i for i, op in enumerate(graph.ops) if op.kind.startswith("nll_loss2d_forward")]
    assert all(place.is_split for place in rules[loss].inputs)


def test_a_network_without_convolutions_has_no_such_cut() -> None:
    batch = torch.rand(2, 4), torch.rand(2, 4)
    graph = capture(Workload(lambda: nn.Linear(4, 4), batch, functional.mse_loss, torch.optim.SGD))
    assert spatial_splits(graph) == ()


def test_windows_are_read_and_written() -> None:
    graph = cosmoflow_of(32)
    cluster = cluster_of((1.0, ["T4", "T4"]))
    chosen = strategy(graph, cluster, 4, (3, 1))
    assert strategy_from_dict(strategy_to_dict(chosen)) == chosen
    assert str(H(2, Window(4, 1, -1))) == "H(2,4,1,-1)"
    record = strategy_to_dict(chosen)
    record["rules"][0]["inputs"][0] = "H(2,4)"
    with pytest.raises(StrategyError, match=r"or H\(dim,step,before,after\) for an input"):
        strategy_from_dict(record)


def test_a_window_that_is_too_small_is_refused() -> None:
    graph = cosmoflow_of(32)
    cluster = cluster_of((1.0, ["T4", "T4"]))
    (first, rule), *others = spatial_rules(graph, 2, 4)
    narrow = OpRule(inputs=(H(2, Window(8, 0, 0)), R, R), outputs=(S(2),), units=rule.units)
    rules = ((first, narrow), *others)
    chosen = replace(strategy(graph, cluster, 4, (1, 1)), op_rules=rules)
    with pytest.raises(StrategyError, match=r"cannot run as H\(2,8,0,0\), R, R -> S\(2,1\)"):
        chosen.check(graph, cluster)


def test_cosmoflow_of_the_zoo() -> None:
    assert build("cosmoflow_512").name == "cosmoflow_512"
