"""Small graphs, clusters and strategies, made by hand or at random.

The random ones take a generator: hypothesis draws its seed and not the parts, because it prefers
short lists and small numbers, and contention needs long ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from heterog.cluster import Cluster, Device, DeviceType, Host, Link, PairLimit, device_type
from heterog.cluster.topology import ROOFLINE, Execution, Sends
from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_costs import Copies
from heterog.graph.op_graph import GraphOp, GraphTensor, OpGraph, Phase, TensorKind
from heterog.graph.placement import (
    Arg,
    L,
    OpRule,
    OpRules,
    P,
    Placement,
    R,
    S,
    Scatter,
    TensorRef,
    crosses,
)
from heterog.graph.sharding_rules import Special, legal_rules, propagate
from heterog.lowering import Choice
from heterog.lowering.channels import Channel, ChannelKind, ChannelTable
from heterog.lowering.program import FloatArray, TaskKind
from heterog.lowering.tape import make_tape
from heterog.methods.planner import Candidate
from heterog.pricing.cost_model import ChannelSeconds, CostModel, Prices
from heterog.pricing.price_table import ChannelPricer
from heterog.pricing.roofline import Roofline
from heterog.search.plan import Plan, plan_from_rows
from heterog.search.rows import MethodRow
from heterog.simulator.engine import Order, simulate
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.referee import TaskOrder, replay
from heterog.simulator.task_seconds import price_kernel
from heterog.simulator.timings import make_timings
from heterog.strategy.schedules import PipelineSchedule, device_chunks
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

GBIT_PER_S = 1e9 / 8

Rule = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""Placements of an op's inputs and outputs."""


# --- graphs -------------------------------------------------------------------------------------


class GraphBuilder:
    """Builds an ``OpGraph`` op by op; float32 tensors throughout, but for gradients if wanted.

    Step inputs come first. FLOPs and bytes follow from the shapes unless they are given.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.gradient_dtypes = ["float32"]  # of the parameters in turn
        self._tensors: list[GraphTensor] = []
        self._placements: list[Placement] = []
        self._ops: list[GraphOp] = []

    def input(self, kind: TensorKind, *shape: int, name: str = "") -> int:
        assert not self._ops, "step inputs come before ops"
        self._tensors.append(GraphTensor(shape=shape, dtype="float32", kind=kind, name=name))
        self._placements.append(S(0) if kind == TensorKind.BATCH else R)
        return len(self._tensors) - 1

    def batch(self, *shape: int) -> int:
        return self.input(TensorKind.BATCH, self.batch_size, *shape, name="x")

    def parameter(self, *shape: int, name: str = "") -> int:
        number = len(self._tensors)
        return self.input(TensorKind.PARAMETER, *shape, name=name or f"w{number}")

    def op(
        self,
        kind: str,
        inputs: Sequence[int],
        *shapes: tuple[int, ...],
        module: str,
        rule: Rule | None = None,
        args: dict[str, Arg] | None = None,
        phase: Phase = Phase.FORWARD,
        flops: float = 1e6,
        measured_s: tuple[tuple[str, float], ...] = (),
    ) -> int:
        """Add an op; returns its first output."""
        first = len(self._tensors)
        self._tensors += [GraphTensor(shape=shape, dtype="float32") for shape in shapes]
        read = sum(float(self._tensors[tensor].num_bytes) for tensor in inputs)
        written = sum(float(t.num_bytes) for t in self._tensors[first:])
        self._ops.append(
            GraphOp(
                kind=kind,
                args=args or {},
                inputs=tuple(inputs),
                num_outputs=len(shapes),
                phase=phase,
                module=module,
                flops=flops,
                bytes_read=read,
                bytes_written=written,
                rule=rule,
                measured_s=measured_s,
            )
        )
        return first

    def mm(self, first: int, second: int, *, module: str, phase: Phase = Phase.FORWARD) -> int:
        """A matrix product by the built-in rule."""
        rows, inner = self.shape(first)
        columns = self.shape(second)[1]
        return self.op(
            "mm.default",
            (first, second),
            (rows, columns),
            module=module,
            args={"self": TensorRef(0), "mat2": TensorRef(1)},
            phase=phase,
            flops=2.0 * rows * inner * columns,
        )

    def relu(self, source: int, *, module: str) -> int:
        """A pointwise op by the built-in rule."""
        return self.op(
            "relu.default",
            (source,),
            self.shape(source),
            module=module,
            args={"self": TensorRef(0)},
        )

    def weight_gradient(
        self, activation: int, above: int, parameter: int, *, module: str, place: Placement = P
    ) -> int:
        """The op that makes a parameter's gradient, a partial sum over the batch."""
        gradient = self.op(
            "weight_gradient",
            (activation, above),
            self.shape(parameter),
            module=module,
            rule=((S(0), S(0)), (place,)),
            phase=Phase.BACKWARD,
        )
        meta = self._tensors[gradient]
        dtype = self.gradient_dtypes[parameter % len(self.gradient_dtypes)]
        self._tensors[gradient] = replace(meta, dtype=dtype)
        return gradient

    def update(self, parameter: int, gradient: int, *, module: str) -> None:
        shape = self.shape(parameter)
        self.op("update", (parameter, gradient), shape, module=module, phase=Phase.UPDATE)

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self._tensors[tensor].shape

    def build(self, loss: int, *, state_ratio: float = 2.0) -> OpGraph:
        return OpGraph(
            name="tiny",
            source="tests",
            batch_size=self.batch_size,
            tensors=tuple(self._tensors),
            ops=tuple(self._ops),
            batch_placements=tuple(self._placements),
            optimizer="Adam",
            optimizer_state_ratio=state_ratio,
            loss=loss,
        )


def linear_chain(
    modules: Sequence[str] = ("a", "b"), *, batch_size: int = 8, width: int = 1024
) -> OpGraph:
    """y = x W_1 W_2 ... with one group per module, backward included.

    Op numbers: the products forward, then per module from last to first the weight gradient and
    (but for the first module) the input gradient, then the updates.
    """
    builder = GraphBuilder(batch_size)
    activation = builder.batch(width)
    weights = [builder.parameter(width, width, name=f"{name}.weight") for name in modules]
    activations = [activation]
    for name, weight in zip(modules, weights, strict=True):
        activations.append(builder.mm(activations[-1], weight, module=name))
    above = activations[-1]
    gradients: dict[int, int] = {}
    for index in range(len(modules) - 1, -1, -1):
        gradients[index] = builder.weight_gradient(
            activations[index], above, weights[index], module=modules[index]
        )
        if index > 0:
            above = builder.mm(above, weights[index], module=modules[index], phase=Phase.BACKWARD)
    for index, name in enumerate(modules):
        builder.update(weights[index], gradients[index], module=name)
    return builder.build(activations[-1])


def random_graph(rng: Random, batch_size: int | None = None) -> OpGraph:
    """Random steps: products, pointwise ops, partial sums, local statistics, views, unknown ops,
    constants, tied weights; backward for every product. For the same draws the ops are the same
    on any batch."""
    drawn = rng.randint(2, 7)
    batch_size = drawn if batch_size is None else batch_size
    width = rng.choice([64, 512, 2048])
    builder = GraphBuilder(batch_size)
    builder.gradient_dtypes = rng.sample(["float32", "bfloat16", "float64"], rng.randint(1, 2))
    activations = [builder.batch(width)]
    weights = [builder.parameter(width, width) for _ in range(rng.randint(2, 4))]
    table = builder.input(TensorKind.BUFFER, width)
    partials: list[int] = []
    wholes: list[int] = []
    products: list[tuple[str, int, int, int]] = []
    rule: Rule
    modules = "abcd" if width != 512 else ("h.0.a", "h.0.b", "h.1", "c")  # with layers, or without
    if rng.random() < 0.5:
        wholes.append(
            builder.op("table", (table,), (width,), module=modules[0], rule=((R,), (R,)))
        )
    full = (batch_size, width)
    for step in range(rng.randint(3, 8)):
        module = rng.choice(modules)
        source = rng.choice(activations)
        known = ["relu", "join", "total", "statistics", "slice", "mystery"]
        kind = "mm" if step == 0 else rng.choice(["mm", "mm", *known])
        if partials:
            kind = rng.choice([kind, "scale", "read partial"])
        if wholes:
            kind = rng.choice([kind, "read whole"])
        if kind == "mm":
            weight = rng.choice(weights)
            made = builder.mm(source, weight, module=module)
            products.append((module, source, made, weight))
            activations.append(made)
        elif kind == "relu":
            activations.append(builder.relu(source, module=module))
        elif kind == "join":
            other = rng.choice(activations)
            rule = ((S(0), S(0)), (S(0),))
            activations.append(builder.op("join", (source, other), full, module=module, rule=rule))
        elif kind == "total":
            partials.append(
                builder.op("total", (source,), (width, 64), module=module, rule=((S(0),), (P,)))
            )
        elif kind == "scale":
            last = partials[-1]
            rule = ((P,), (P,))
            partials.append(
                builder.op("scale", (last,), builder.shape(last), module=module, rule=rule)
            )
        elif kind in ("read partial", "read whole"):
            other = (partials if kind == "read partial" else wholes)[-1]
            rule = ((S(0), R), (S(0),))
            activations.append(builder.op("read", (source, other), full, module=module, rule=rule))
        elif kind == "statistics":
            rule = ((S(0),), (S(0), L))
            made = builder.op("norm", (source,), full, (width,), module=module, rule=rule)
            rule = ((S(0), L), (S(0),))
            activations.append(
                builder.op("renorm", (made, made + 1), full, module=module, rule=rule)
            )
        elif kind == "slice":
            rule = ((S(0),), (S(0),))
            half = builder.op(
                "slice.Tensor", (source,), (batch_size, width // 2), module=module, rule=rule
            )
            activations.append(
                builder.op("widen", (half,), full, module=rng.choice(modules), rule=rule)
            )
        else:
            wholes.append(builder.op("mystery", (source,), (width, 32), module=module))
    above = activations[-1]
    gradients: dict[int, int] = {}
    for module, source, made, weight in reversed(products):
        place = rng.choice([P, P, P, R])
        fresh = builder.weight_gradient(source, above, weight, module=module, place=place)
        if weight in gradients:
            pair = (gradients[weight], fresh)
            rule = ((P, P), (P,))
            fresh = builder.op(
                "tie", pair, builder.shape(weight), module=module, rule=rule,
                phase=Phase.BACKWARD,
            )  # fmt: skip
        gradients[weight] = fresh
        above = builder.op(
            "input_gradient", (above, weight, made), full, module=module,
            rule=((S(0), R, S(0)), (S(0),)), phase=Phase.BACKWARD,
        )  # fmt: skip
    for weight, gradient in gradients.items():
        builder.update(weight, gradient, module=modules[0])
    return builder.build(above)


# --- clusters -----------------------------------------------------------------------------------


def by_sheets(cluster: Cluster) -> Cluster:
    """The same cluster by data sheets: on GPUs, ops of very small models all wait for the host."""
    return replace(cluster, calibration=ROOFLINE)


def cluster_of(
    *hosts: tuple[float, Sequence[str]],
    latency_s: float = 20e-6,
    intra: Link | None = None,
    intra_of: Sequence[Link] = (),
    efficiency: float = 1.0,
) -> Cluster:
    """A cluster from (NIC Gbit/s, device type names) per host."""
    inner = intra or Link(kind="nvlink", bandwidth_bytes_per_s=100e9)
    made_hosts, devices = [], []
    for index, (gbit_per_s, types) in enumerate(hosts):
        name = "ABCDEFGH"[index] if index < 8 else f"H{index}"
        made_hosts.append(
            Host(
                name=name,
                nic_line_rate_bytes_per_s=gbit_per_s * GBIT_PER_S,
                nic_latency_s=latency_s,
                intra=intra_of[index] if intra_of else inner,
            )
        )
        for number, type_name in enumerate(types):
            of_type: DeviceType = device_type(type_name)
            devices.append(
                Device(
                    name=f"{name}:{number}",
                    type=of_type,
                    host_index=index,
                    usable_memory_bytes=of_type.memory_bytes,
                )
            )
    return Cluster(
        name="tiny", hosts=tuple(made_hosts), devices=tuple(devices), efficiency=efficiency
    )


_TYPES = ("V100-16GB", "P100-12GB", "GTX-1080-Ti", "A100-80GB", "T4")
_LINKS = (
    Link(kind="nvlink", bandwidth_bytes_per_s=150e9, latency_s=3e-6),
    Link(kind="pcie3", bandwidth_bytes_per_s=11e9, latency_s=7e-6),
    Link(kind="pcie3", bandwidth_bytes_per_s=9e9, latency_s=7e-6, shared=True),
)


def random_cluster(rng: Random) -> Cluster:
    """One to three hosts of one to three devices of mixed types, some with lines between them."""
    sizes = rng.choice([(1,), (2,), (1, 1), (2, 1), (3, 2), (1, 1, 1), (1, 3, 2)])
    hosts = [
        (rng.choice([10.0, 25.0, 50.0, 100.0]), [rng.choice(_TYPES) for _ in range(size)])
        for size in sizes
    ]
    links = [rng.choice(_LINKS) for _ in hosts]
    cluster = cluster_of(*hosts, intra_of=links, efficiency=0.7)
    if len(hosts) == 1 or rng.random() < 0.6:
        return cluster
    return replace(cluster, pairs=random_pairs(rng, len(hosts)))


def random_pairs(rng: Random, num_hosts: int) -> tuple[PairLimit, ...]:
    """A line with the last host, or limits of random pairs, or both."""

    def limit(sources: tuple[int, ...], targets: tuple[int, ...]) -> PairLimit:
        rate = rng.choice([0.5, 1.0, 3.0, 20.0]) * 1e9
        return PairLimit(
            sources=sources,
            targets=targets,
            bandwidth_bytes_per_s=rate,
            latency_s=rng.choice([0.0, 1e-3]),
        )

    rest, last = tuple(range(num_hosts - 1)), (num_hosts - 1,)
    pairs = [limit(rest, last), limit(last, rest)] if rng.random() < 0.7 else []
    for source in range(num_hosts):
        for target in range(num_hosts):
            if source != target and (not pairs or rng.random() < 0.4):
                pairs.append(limit((source,), (target,)))
    return tuple(pairs)


# --- strategies ---------------------------------------------------------------------------------


def strategy_of(
    graph: OpGraph,
    cluster: Cluster,
    decisions: Decision | Sequence[Decision],
    *,
    homes: int | Sequence[int] = REPLICATED,
    micro_batches: tuple[tuple[int, ...], ...] = (),
    bucket_bytes: int = 0,
    first_bucket_bytes: int = 0,
    step_barrier: bool = True,
) -> Strategy:
    """A strategy with one decision for all groups, or one per group; homes likewise."""
    if isinstance(decisions, Decision):
        decisions = [decisions] * group_ops(graph).num_groups
    if isinstance(homes, int):
        homes = [homes] * len(graph.updates)
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=tuple(decisions),
        homes=tuple(homes),
        micro_batches=micro_batches,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        step_barrier=step_barrier,
    )


def random_composition(rng: Random, total: int, parts: int) -> tuple[int, ...]:
    """Whole numbers of at least 0 that sum to a total."""
    cuts = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return tuple(high - low for low, high in zip([0, *cuts], [*cuts, total], strict=True))


def random_decision(rng: Random, batch_size: int, num_devices: int) -> Decision:
    """Any legal decision."""
    count = rng.randint(1, num_devices)
    devices = tuple(sorted(rng.sample(range(num_devices), count)))
    sync = rng.choice(list(Sync))
    slices: tuple[int, ...] = ()
    if (sync.takes_slices) and rng.random() < 0.5:
        slices = random_composition(rng, rng.randint(1, 20), len(devices))
    shares = random_composition(rng, batch_size, len(devices))
    return Decision(
        devices=devices, shares=shares, sync=sync, slices=slices, recompute=rng.random() < 0.3
    )


def in_random_teams(rng: Random, decision: Decision) -> Decision:
    """The same with its devices in teams, which share out units in any parts."""
    devices = list(decision.devices)
    rng.shuffle(devices)
    cuts = sorted(rng.sample(range(1, len(devices)), rng.randint(0, len(devices) - 1)))
    if len(devices) % 2 == 0 and rng.random() < 0.5:
        cuts = [len(devices) // 2]  # teams of one size have rings of their own
    bounds = [0, *cuts, len(devices)]
    teams = tuple(tuple(devices[low:high]) for low, high in pairwise(bounds))
    parts: tuple[int, ...] = ()
    if rng.random() < 0.6:
        weight = {device: rng.randint(0, 3) for device in devices}
        weight |= {rng.choice(team): rng.randint(1, 3) for team in teams}
        parts = tuple(weight[device] for device in decision.devices)
    return replace(decision, teams=teams, parts=parts)


def with_random_teams(rng: Random, strategy: Strategy) -> Strategy:
    """The same decisions in teams; alike ones stay alike."""
    made = {each: in_random_teams(rng, each) for each in dict.fromkeys(strategy.decisions)}
    return replace(strategy, decisions=tuple(made[each] for each in strategy.decisions))


def with_random_slice_groups(rng: Random, strategy: Strategy) -> Strategy:
    """Decisions on four devices or more by ZeRO, some of them in slice groups."""
    made = {each: in_random_slice_groups(rng, each) for each in dict.fromkeys(strategy.decisions)}
    return replace(strategy, decisions=tuple(made[each] for each in strategy.decisions))


def in_random_slice_groups(rng: Random, decision: Decision) -> Decision:
    """The same by ZeRO in slice groups, of whole teams where these allow it."""
    teams = decision.teams or tuple((device,) for device in decision.devices)
    counts = [
        count
        for count in range(2, len(teams) + 1)
        if len(teams) % count == 0 and len(teams) // count > 1
    ]
    if not counts or len(set(map(len, teams))) > 1:
        return decision
    count, order = rng.choice(counts), rng.sample(range(len(teams)), len(teams))
    size = len(teams) // count
    groups = [
        tuple(device for team in order[first : first + size] for device in teams[team])
        for first in range(0, len(teams), size)
    ]
    slices: tuple[int, ...] = ()
    if not decision.teams and rng.random() < 0.5:
        weights = random_composition(rng, rng.randint(1, 9), size)
        found = {d: w for group in groups for d, w in zip(sorted(group), weights, strict=True)}
        slices = tuple(found[device] for device in decision.devices)
    sync = rng.choice([each for each in Sync if each.is_sharded])
    return replace(decision, sync=sync, slices=slices, slice_groups=tuple(groups))


def random_strategy(rng: Random, graph: OpGraph, cluster: Cluster) -> Strategy:
    """Any legal strategy."""
    grouping = group_ops(graph)
    batch, count = graph.batch_size, cluster.num_devices
    # Few distinct decisions, so that neighbours often agree.
    some = [random_decision(rng, batch, count) for _ in range(rng.randint(1, 3))]
    chosen = [rng.choice(some) for _ in range(grouping.num_groups)]
    homes = []
    for op, _, _ in graph.updates:
        decision = chosen[int(grouping.group[op])]
        is_served = decision.sync.is_served
        may_move = len(decision.devices) == 1 and rng.random() < 0.5
        homes.append(rng.randint(0, count - 1) if is_served or may_move else REPLICATED)
    micro_batches: tuple[tuple[int, ...], ...] = ()
    num_micro = rng.randint(1, min(3, batch))
    if num_micro > 1:
        spare = random_composition(rng, batch - num_micro, num_micro)
        columns = [random_composition(rng, extra + 1, count) for extra in spare]
        micro_batches = tuple(zip(*columns, strict=True))
    bucket, first = rng.choice([(0, 0), (0, 0), (100_000, 0), (20_000_000, 50_000)])
    plain = strategy_of(
        graph,
        cluster,
        chosen,
        homes=homes,
        micro_batches=micro_batches,
        bucket_bytes=bucket,
        first_bucket_bytes=first,
        step_barrier=rng.random() < 0.5,
    )
    if rng.random() < (0.8 if num_micro == 1 else 0.4):
        return plain
    return replace(plain, schedule=random_schedule(rng, plain, count))


def random_schedule(rng: Random, strategy: Strategy, num_devices: int) -> PipelineSchedule:
    """Any caps, and maybe weight gradients later."""
    starts = tuple(
        group for group in range(len(strategy.decisions)) if group and rng.random() < 0.2
    )
    devices = [decision.devices for decision in strategy.decisions]
    chunks = device_chunks(devices, num_devices, starts)
    return PipelineSchedule(
        in_flight=tuple(tuple(rng.randint(0, 3) for _ in own) for own in chunks),
        splits_backward=rng.random() < 0.5,
        chunk_starts=starts,
    )


def random_rules(rng: Random, graph: OpGraph) -> OpRules:
    """For some ops any legal rule along some axis."""
    group = group_ops(graph).group
    plan = axis_plan(graph)
    rules = []
    often = rng.choice([0.2, 0.6, 1.0])
    for op, each in enumerate(graph.ops):
        follows_batch = graph.is_view[op] or each.phase == Phase.UPDATE or group[op] < 0
        places = (*plan.needed[op], *(plan.placements[t] for t in graph.outputs[op]))
        if follows_batch or L in places or rng.random() > often:
            continue
        sizes = {size for t in each.inputs for size in graph.tensors[t].shape if size > 1}
        units = rng.choice(sorted(sizes | {graph.batch_size}))
        options = legal_rules(graph.calls[op], units, (1, 2, 3))
        if options:
            rule = rng.choice(options)
            rules.append((op, OpRule(inputs=rule.inputs, outputs=rule.outputs, units=units)))
    return with_random_scatters(rng, graph, tuple(rules))


def with_random_scatters(rng: Random, graph: OpGraph, rules: OpRules) -> OpRules:
    """Some of the sums that the rules leave in parts are added up in slices, of any kind.

    Of what they leave in slices, some is exchanged for other slices, or for samples.
    """
    return tuple(
        (op, replace(rule, scatter=random_scatter(rng, graph, op, rule)))
        if (rule.outputs == (P,) and rng.random() < 0.6)
        or (len(rule.outputs) == 1 and rule.outputs[0].kind == "S" and rng.random() < 0.15)
        else (op, rule)
        for op, rule in rules
    )


def random_scatter(rng: Random, graph: OpGraph, op: int, rule: OpRule) -> Scatter | None:
    """Any way to cut anew what an op with a rule makes, if there is one."""
    (tensor,), (made,) = graph.outputs[op], rule.outputs
    along = axis_plan(graph).placements[tensor]
    found = propagate(graph.calls[op], rule.inputs, rule.units)
    is_completed = found is not None and found.special == Special.NUMBERS_OF_ROWS
    if along.kind != "S" or is_completed:
        return None
    shape = graph.tensors[tensor].shape
    to_batch = made.kind == "S" and (made, rule.units) != (along, graph.batch_size)
    if to_batch and rng.random() < 0.5:
        is_cut = crosses(along, graph.batch_size, made, rule.units)
        return None if is_cut else Scatter(place=along, units=graph.batch_size)
    options = [
        Scatter(place=S(dim, outer), units=size // (outer * inner))
        for dim, size in enumerate(shape)
        for outer in range(1, size + 1)
        if size % outer == 0
        for inner in range(1, size // outer + 1)
        if (size // outer) % inner == 0
        and not crosses(S(dim, outer), size // (outer * inner), along, graph.batch_size)
        and not crosses(S(dim, outer), size // (outer * inner), made, rule.units)
        and (made, rule.units) != (S(dim, outer), size // (outer * inner))
    ]
    return rng.choice(options) if options else None


def with_rules(
    graph: OpGraph, strategy: Strategy, rules: OpRules, *, keeps_slices: bool = False
) -> Strategy:
    """A strategy with rules; what they shard has no home, and ZeRO becomes a ring or is kept."""
    sharded = axis_plan(graph, rules).sharded
    homes = tuple(
        REPLICATED if parameter in sharded else home
        for (_, parameter, _), home in zip(graph.updates, strategy.homes, strict=True)
    )
    decisions = tuple(
        replace(each, sync=Sync.RING, slices=())
        if each.sync.is_sharded and not keeps_slices
        else each
        for each in strategy.decisions
    )
    return replace(strategy, decisions=decisions, homes=homes, op_rules=rules)


def within_samples(graph: OpGraph, rules: OpRules) -> OpRules:
    """The rules that have a meaning on a part of the batch, too."""
    while rules and (crossing := axis_plan(graph, rules).crossing) is not None:
        last = max(op for op, _ in rules if op <= crossing)  # a view follows another op's rule
        rules = tuple((op, rule) for op, rule in rules if op != last)
    return rules


def with_random_blocks(rng: Random, strategy: Strategy) -> Strategy:
    """Blocks of groups that have one decision."""
    starts = {0, *(g for g in range(len(strategy.decisions)) if rng.random() < 0.3)}
    blocks = tuple(sorted(starts))
    return replace(strategy, blocks=blocks).with_decisions(strategy.decisions)


# --- programs by hand ---------------------------------------------------------------------------


class Times(NamedTuple):
    """Starts and finishes of a program's tasks by the engine and by the referee."""

    start: FloatArray
    finish: FloatArray
    fair_start: FloatArray
    fair_finish: FloatArray


class DraggingRoofline(Roofline):
    """A roofline whose compute and communication slow each other down.

    On shared links collectives have twice the rate of transfers.

    Args:
        drag: seconds of compute that a payload byte takes from its members, by device type.
        loaded: factor of the latency while a member computes.
        overhead: seconds of compute that an operation takes from busy members, by device type.
        fill: most seconds, and seconds per byte, until the pipeline of an operation is full.
    """

    def __init__(
        self,
        drag: dict[str, float],
        loaded: float = 1.0,
        overhead: Mapping[str, float] = MappingProxyType({}),
        fill: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._drag = drag
        self._fill = fill
        self._loaded = loaded
        self._overhead = overhead

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
        """As by the roofline, with drag."""
        cost = super().channel_seconds(cluster, channel)
        loaded_latency_s = self._loaded * cost.latency_s
        return cost._replace(
            drag=self._drag,
            loaded_latency_s=loaded_latency_s,
            overhead_s=self._overhead,
            fill_s=self._fill[0],
            fill_s_per_byte=self._fill[1],
            weight=1.0 if channel.kind == ChannelKind.POINT_TO_POINT else 2.0,
        )


class Tasks:
    """A program written task by task, to be timed by the engine and the referee.

    Methods that add a task return its number; ``after`` names the tasks that it waits for.
    """

    def __init__(self, cluster: Cluster, cost_model: CostModel | None = None) -> None:
        self.cluster = cluster
        self._cost_model = cost_model or Roofline()
        self.channels = ChannelTable(cluster)
        self._tasks: list[tuple[TaskKind, int, int, float]] = []
        self._seconds: list[float] = []
        self._after: list[tuple[int, ...]] = []

    def op(self, device: int, seconds: float, *after: int) -> int:
        """An op: keeps program order on its device."""
        return self._add(TaskKind.COMPUTE, device, -1, 0.0, seconds, after)

    def update(self, device: int, seconds: float, *after: int) -> int:
        """A free task: runs when the next op of its device is not ready."""
        return self._add(TaskKind.UPDATE, device, -1, 0.0, seconds, after)

    def send(self, src: int, dst: int, num_bytes: float, *after: int) -> int:
        """A transfer."""
        channel = src * self.cluster.num_devices + dst
        return self._add(TaskKind.SEND, dst, channel, num_bytes, 0.0, after)

    def collective(self, channel: int, num_bytes: float, *after: int) -> int:
        """A collective on a channel of ``self.channels``."""
        return self._add(TaskKind.ALL_REDUCE, -1, channel, num_bytes, 0.0, after)

    def _add(
        self,
        kind: TaskKind,
        device: int,
        channel: int,
        num_bytes: float,
        seconds: float,
        after: tuple[int, ...],
    ) -> int:
        self._tasks.append((kind, device, channel, num_bytes))
        self._seconds.append(seconds)
        self._after.append(after)
        return len(self._tasks) - 1

    def run(self, order: Order = Order.FIFO) -> Times:
        """Simulate and replay; every task must run."""
        count = len(self._tasks)
        tape = make_tape(4 * count + sum(map(len, self._after)), 1, self.cluster.num_devices)
        reads = 0
        for number, (kind, device, channel, num_bytes) in enumerate(self._tasks):
            # One token per task; buffers are numbered like their makers.
            tape.tasks[number] = (
                num_bytes, number, device, 0, 0, channel, reads, number, 0, 0, 0, kind
            )  # fmt: skip
            tape.buffers[number] = (0.0, number, -1)
            for needed in self._after[number]:
                tape.reads[reads] = needed
                reads += 1
        tape.tasks[count] = (0.0, 0, 0, 0, 0, 0, reads, count, 0, 0, 0, 0)
        tape.counts[:3] = (count, count, reads)
        tape.counts[3:] = 0
        prices = self._prices()
        num_devices = self.cluster.num_devices
        timings = make_timings(count, reads, count, len(prices.channels.queue) + num_devices)
        price_kernel(tape, prices, timings.seconds)
        end, done = simulate(tape, prices, timings, num_devices, int(order), np.inf)
        assert done == count
        assert end == max(timings.finish)
        tasks = np.argsort(timings.start[:count], kind="stable").astype(np.int32)
        sequence = TaskOrder(tasks, timings.sequence)
        fair_end, fair_done, replayed = replay(tape, prices, timings, num_devices, sequence)
        assert fair_done == count
        assert fair_end == max(replayed.finish)
        return Times(timings.start, timings.finish, replayed.start, replayed.finish)

    def _prices(self) -> Prices:
        seconds = np.array([self._seconds])
        every = [self.channels[number] for number in range(len(self.channels))]
        channels = ChannelPricer(self._cost_model, self.cluster).prices(every)
        return Prices(
            type_of_device=np.zeros(self.cluster.num_devices, np.int32),
            op_seconds=seconds[None],
            has_rule=np.zeros(len(self._seconds), np.bool_),
            ruled_row=np.zeros(0, np.int32),
            ruled_number=np.zeros((0, 0, 0), np.int32),
            ruled_seconds=np.zeros((self.cluster.num_devices, 0)),
            update_seconds=seconds,
            parameter_bytes=np.ones(seconds.shape[1]),
            copy_fixed_s=np.zeros(1),
            copy_s_per_byte=np.zeros(1),
            channels=channels,
            blocks_sends=self.cluster.sends == Sends.BLOCKING,
            num_resources=len(self.cluster.resources),
        )


def random_case(rng: Random, execution: Execution = Execution.EAGER) -> tuple[Evaluator, Choice]:
    """A random strategy of a random graph on a random cluster, one to three steps unrolled."""
    graph, cluster = random_graph(rng), random_cluster(rng)
    graph = replace(graph, optimizer_step_ratios=rng.choice([(0.0, 0.0), (0.5, 0.0), (3.0, 1.0)]))
    cluster = replace(cluster, sends=rng.choice(list(Sends)), execution=execution)
    strategy = random_strategy(rng, graph, cluster)
    cost_model = Roofline()
    if rng.random() < 0.5:
        drag = {
            device_type.name: rng.choice([0.0, 1e-11, 1e-9])
            for device_type in cluster.device_types
        }
        overhead = {
            device_type.name: rng.choice([0.0, 1e-5, 1e-3]) for device_type in cluster.device_types
        }
        fill = rng.choice([0.0, 1e-5, 1e-3]), rng.choice([0.0, 1e-11, 1e-9])
        cost_model = DraggingRoofline(drag, rng.choice([1.0, 30.0]), overhead, fill)
    evaluator = Evaluator(graph, cluster, cost_model)
    choice = evaluator.encode(strategy)
    if not strategy.step_barrier:
        choice = choice._replace(num_steps=rng.randint(2, 3))
    if rng.random() < 0.5:  # kernels of some devices copy what they read or make
        num_ops = len(evaluator.tables_of(choice).op_id)
        kinds = [rng.choice([*Copies]) for _ in range(num_ops)]
        evaluator._copies[choice.rule_set] = np.array(kinds, np.int32)
        evaluator._are_cpus = np.array([rng.random() < 0.7 for _ in cluster.device_types])
    return evaluator, choice


def plan_by_hand(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Plan:
    """A plan of a strategy that nobody searched for, first come, first served."""
    evaluator = Evaluator(graph, cluster)
    evaluation = evaluator.referee(strategy, Order.FIFO)
    row = MethodRow(
        method="by hand",
        stage="baseline",
        outcome=str(evaluation.outcome),
        step_time_s=evaluation.step_time_s if evaluation.is_ok else None,
        order="fifo",
        peak_memory_bytes=evaluation.peak_memory_bytes,
        num_evaluations=1,
        search_seconds=0.0,
        candidate=Candidate(strategy=strategy, orders=(Order.FIFO,)),
    )
    return plan_from_rows(evaluator, [row])
