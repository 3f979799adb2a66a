import dataclasses
import itertools
from collections.abc import Iterator
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import scipy.optimize
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from heterog.cluster import Cluster, Device, DeviceType, Host, Link
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import FloatArray, GraphOp, GraphTensor, OpGraph, Phase, TensorKind
from heterog.graph.placement import P, R, S
from heterog.graph.workload import Workload
from heterog.lowering.channels import Channel
from heterog.pricing.cost_model import ChannelSeconds
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.roofline import Roofline
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import _balanced_seconds, lower_bound_s
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.simulator import builders
from tests.thorough import THOROUGH, cases

MODEL = DeviceModels()
"""What evaluators take for these clusters."""

SLOW = DeviceType(
    name="slow",
    peak_flops_per_s={"float32": 1e12},
    memory_bandwidth_bytes_per_s=1e11,
    memory_bytes=8 * 10**9,
    source="test",
)
FAST = dataclasses.replace(SLOW, name="fast", peak_flops_per_s={"float32": 3e12})
HOST = Host(
    name="A",
    nic_line_rate_bytes_per_s=10e9,
    # So quick that the bound has to hold by the compute alone.
    intra=Link(kind="nvlink", bandwidth_bytes_per_s=1e15, latency_s=0.0),
)


def cluster_of(*types: DeviceType) -> Cluster:
    devices = tuple(
        Device(name=f"A:{i}", type=t, host_index=0, usable_memory_bytes=7 * 10**9)
        for i, t in enumerate(types)
    )
    return Cluster(name="test", hosts=(HOST,), devices=devices)


def chain(num_layers: int, *, batch_size: int = 3, gflops: float = 0.5) -> OpGraph:
    """Layers ``y = f(x, w)`` forward, then per layer a weight gradient and an update.

    The last layer's gradient op does not follow the batch: it reads its input whole.
    """
    tensors = [GraphTensor(shape=(batch_size, 4), dtype="float32", kind=TensorKind.BATCH)]
    tensors += [
        GraphTensor(shape=(4, 4), dtype="float32", kind=TensorKind.PARAMETER, name=f"{i}.weight")
        for i in range(num_layers)
    ]
    placements = (S(0), *[R] * num_layers)
    ops: list[GraphOp] = []
    activations = [0]

    def add(op: GraphOp, meta: GraphTensor) -> int:
        ops.append(op)
        tensors.append(meta)
        return len(tensors) - 1

    def op(kind: str, phase: Phase, layer: int, work: float, *inputs: int) -> GraphOp:
        rules = {
            "layer": ((S(0), R), (S(0),)),
            "gradient": ((S(0), S(0)), (P,)),
            "whole": ((R, R), (R,)),
        }
        return GraphOp(
            kind=kind,
            args={},
            inputs=inputs,
            num_outputs=1,
            phase=phase,
            module=str(layer),
            flops=work * 1e9,
            bytes_read=64.0,
            bytes_written=64.0,
            rule=rules.get(kind),
        )

    activation = GraphTensor(shape=(batch_size, 4), dtype="float32")
    for i in range(num_layers):
        new = op("layer", Phase.FORWARD, i, gflops * (i + 1), activations[-1], 1 + i)
        activations.append(add(new, activation))
    for i in reversed(range(num_layers)):
        kind = "whole" if i == num_layers - 1 and num_layers > 1 else "gradient"
        new = op(kind, Phase.BACKWARD, i, 2 * gflops, activations[i], activations[i + 1])
        gradient = add(new, GraphTensor(shape=(4, 4), dtype="float32", kind=TensorKind.GRADIENT))
        add(op("update", Phase.UPDATE, i, 0.2 * gflops, 1 + i, gradient), tensors[1 + i])
    return OpGraph(
        name="chain",
        source="",
        batch_size=batch_size,
        tensors=tuple(tensors),
        ops=tuple(ops),
        batch_placements=placements,
        optimizer="SGD",
        optimizer_state_ratio=0.0,
        loss=activations[-1],
    )


def decisions_on_two(batch_size: int) -> Iterator[tuple[Decision, int]]:
    """Every (decision, home) of one group on devices 0 and 1."""
    for device in (0, 1):
        for home in (REPLICATED, 0, 1):
            yield Decision(devices=(device,), shares=(batch_size,)), home
    for share in range(batch_size + 1):
        shares = (share, batch_size - share)
        for sync in Sync:
            for home in (0, 1) if sync == Sync.PARAMETER_SERVER else (REPLICATED,):
                yield Decision(devices=(0, 1), shares=shares, sync=sync), home


def strategies_on_two(graph: OpGraph, cluster: Cluster) -> Iterator[Strategy]:
    num_groups = group_ops(graph).num_groups
    assert num_groups == len(graph.updates)
    group = group_ops(graph).group
    for choice in itertools.product(tuple(decisions_on_two(graph.batch_size)), repeat=num_groups):
        for micro_batches in ((), ((1, 1), (0, 1))):
            yield Strategy(
                graph=graph.fingerprint,
                cluster=cluster.fingerprint,
                decisions=tuple(decision for decision, _ in choice),
                homes=tuple(choice[int(group[op])][1] for op, _, _ in graph.updates),
                micro_batches=micro_batches,
            )


@pytest.mark.parametrize(
    ("num_layers", "types"),
    [
        (1, (FAST, SLOW)),
        pytest.param(1, (SLOW, SLOW), marks=THOROUGH),
        (2, (FAST, SLOW)),
        pytest.param(2, (SLOW, SLOW), marks=THOROUGH),
    ],
)
def test_no_strategy_is_below_the_bound(num_layers: int, types: tuple[DeviceType, ...]) -> None:
    graph, cluster = chain(num_layers), cluster_of(*types)
    bound = lower_bound_s(graph, cluster, Roofline())
    evaluator = Evaluator(graph, cluster)
    fastest = min(
        evaluator.evaluate(choice, order).step_time_s
        for strategy in strategies_on_two(graph, cluster)
        for choice in [evaluator.encode(strategy)]
        for order in Order
    )
    # Above it, but not by far: a bound that is never near is no bound worth having.
    assert bound.seconds <= fastest <= 2.0 * bound.seconds


def test_the_best_split_of_one_op_reaches_the_compute_bound() -> None:
    graph, cluster = chain(1, batch_size=4), cluster_of(SLOW, SLOW)
    without_update = dataclasses.replace(
        graph, ops=graph.ops[:1], tensors=graph.tensors[:3], loss=2
    )
    bound = lower_bound_s(without_update, cluster, Roofline())
    # 0.5 GFLOP at 0.6 x 1 TFLOP/s: half of it on each device. The best throughput is that of the
    # full batch, whose launch of 10 us is then halved as well.
    assert bound.compute_s == pytest.approx(0.5 * (10e-6 + 0.5e9 / 0.6e12), rel=1e-8)
    # One sample of four on one device.
    assert bound.path_s == pytest.approx(10e-6 + 0.125e9 / 0.6e12, rel=1e-8)
    assert bound.seconds == bound.compute_s


def test_one_device_reaches_the_bound() -> None:
    graph, cluster = chain(2), cluster_of(SLOW)
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(Decision(devices=(0,), shares=(3,)),) * 2,
        homes=(REPLICATED, REPLICATED),
    )
    seconds = Evaluator(graph, cluster).evaluate(strategy).step_time_s
    bound = lower_bound_s(graph, cluster, MODEL)
    assert bound.seconds < seconds
    assert bound.seconds == pytest.approx(seconds, rel=1e-8)


def test_without_barrier_the_compute_bound_still_holds() -> None:
    graph, cluster = chain(2), cluster_of(SLOW, FAST)
    bound = lower_bound_s(graph, cluster, MODEL)
    evaluator = Evaluator(graph, cluster)
    for strategy in itertools.islice(strategies_on_two(graph, cluster), 0, None, 7):
        overlapping = dataclasses.replace(strategy, step_barrier=False)
        seconds = evaluator.evaluate(overlapping, Order.RANK).step_time_s
        assert seconds >= bound.compute_s


@pytest.fixture(scope="module")
def captured() -> OpGraph:
    model = nn.Sequential(
        nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8)
    )
    batch = (torch.zeros(12, 64), torch.zeros(12, dtype=torch.int64))
    return capture(Workload(model, batch, nn.functional.cross_entropy, torch.optim.Adam))


def random_strategy(graph: OpGraph, cluster: Cluster, random: np.random.Generator) -> Strategy:
    decisions = []
    for _ in range(group_ops(graph).num_groups):
        size = int(random.integers(1, cluster.num_devices + 1))
        devices = sorted(random.choice(cluster.num_devices, size, replace=False).tolist())
        shares = random.multinomial(graph.batch_size, random.dirichlet(np.ones(size)))
        decisions.append(
            Decision(
                devices=tuple(devices),
                shares=tuple(shares.tolist()),
                sync=tuple(Sync)[int(random.choice([0, 1, 2, 4, 5, 6]))],
            )
        )
    counts = random.multinomial(graph.batch_size - 2, np.ones(2 * cluster.num_devices) / 8.0)
    table = counts.reshape(cluster.num_devices, 2)
    table[0] += 1
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=tuple(decisions),
        homes=(REPLICATED,) * len(graph.updates),
        micro_batches=tuple(map(tuple, table.tolist())) if random.random() < 0.5 else (),
        bucket_bytes=int(random.choice([0, 10**6])),
    )


def test_random_strategies_of_a_captured_step(captured: OpGraph) -> None:
    cluster = cluster_of(FAST, FAST, SLOW, SLOW)
    bound = lower_bound_s(captured, cluster, Roofline())
    evaluator = Evaluator(captured, cluster)
    random = np.random.default_rng(0)
    for _ in range(cases(100, 15)):
        strategy = random_strategy(captured, cluster, random)
        assert evaluator.evaluate(strategy).step_time_s >= bound.seconds


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=cases(100, 8), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_strategies_of_random_graphs(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = builders.random_graph(rng), builders.random_cluster(rng)
    bound = lower_bound_s(graph, cluster, MODEL)
    evaluator = Evaluator(graph, cluster)
    for _ in range(5):
        strategy = builders.random_strategy(rng, graph, cluster)
        seconds = evaluator.evaluate(strategy).step_time_s
        assert seconds >= (bound.seconds if strategy.step_barrier else bound.compute_s)


def test_more_devices_never_raise_the_bound(captured: OpGraph) -> None:
    types: list[DeviceType] = []
    previous = np.inf
    for new in (SLOW, SLOW, FAST, SLOW, FAST):
        types.append(new)
        bound = lower_bound_s(captured, cluster_of(*types), MODEL)
        assert bound.seconds <= previous
        previous = bound.seconds


def primal_seconds(whole: FloatArray, counts: npt.NDArray[np.int64]) -> float:
    """(a) as it is written down: one variable per op and device, and T."""
    times = np.repeat(whole, counts, axis=1)
    num_ops, num_devices = times.shape
    busy = np.zeros((num_devices, num_ops * num_devices + 1))
    whole_op = np.zeros((num_ops, num_ops * num_devices + 1))
    for op, device in np.ndindex(num_ops, num_devices):
        busy[device, op * num_devices + device] = times[op, device]
        whole_op[op, op * num_devices + device] = 1.0
    busy[:, -1] = -1.0
    objective = np.zeros(num_ops * num_devices + 1)
    objective[-1] = 1.0
    result = scipy.optimize.linprog(
        objective,
        A_ub=busy,
        b_ub=np.zeros(num_devices),
        A_eq=whole_op,
        b_eq=np.ones(num_ops),
        method="highs",
    )
    assert result.fun is not None
    return float(result.fun)


@pytest.mark.parametrize("seed", range(5))
def test_merged_dual_equals_the_linear_program(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 4, size=3)
    rows = random.uniform(0.1, 3.0, size=(6, 3))
    rows[0, 1] = 0.0
    whole = np.concatenate([rows, rows[:4], rows[:2]])
    expected = primal_seconds(whole, counts)
    assert _balanced_seconds(whole, counts) == pytest.approx(expected, rel=1e-7)
    # In microseconds the solver's absolute tolerances must not matter.
    assert _balanced_seconds(whole * 1e-6, counts) == pytest.approx(1e-6 * expected, rel=1e-7)


def test_graph_of_nothing_but_views_takes_no_time() -> None:
    assert _balanced_seconds(np.zeros((3, 2)), np.array([1, 2])) == 0.0


class Sawtooth:
    """A cost model that likes shares of a multiple of 8, as padded kernels do."""

    name = "sawtooth"

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        return 0.0

    def op_seconds(self, graph: OpGraph, device_type: DeviceType, samples: int) -> FloatArray:
        seconds = 1e-3 * (-(-samples // 8)) * 3e12 / device_type.peak_flops_per_s["float32"]
        return np.where(graph.is_view, 0.0, np.full(graph.num_ops, seconds))

    def work_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        raise NotImplementedError  # only the batch is split here

    def in_teams(self, members: int) -> "Sawtooth":
        return self

    def alone(self) -> "Sawtooth":
        return self

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        return 0.0, 0.0

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
        return ChannelSeconds(0.0, 0.0, {})


def test_the_best_share_is_found_wherever_it_lies() -> None:
    graph = chain(1, batch_size=12)
    bound = lower_bound_s(graph, cluster_of(FAST), Sawtooth())
    # Two ops follow the batch, at best in eights: 12 samples cost 1.5 ms; the update runs once,
    # priced at the full batch of two eights.
    assert bound.compute_s == pytest.approx((2 * 1.5 + 2.0) * 1e-3, rel=1e-8)
    assert bound.path_s == pytest.approx((2 * 1.0 + 2.0) * 1e-3, rel=1e-8)


def test_large_batches_are_priced_in_steps_and_stay_below() -> None:
    graph, cluster = chain(2, batch_size=5000), cluster_of(SLOW)
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(Decision(devices=(0,), shares=(5000,)),) * 2,
        homes=(REPLICATED, REPLICATED),
    )
    seconds = Evaluator(graph, cluster).evaluate(strategy).step_time_s
    bound = lower_bound_s(graph, cluster, MODEL).seconds
    assert 0.999 * seconds <= bound <= seconds
