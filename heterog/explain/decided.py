"""The decisions of a plan as facts that people can read: ranges of groups, devices, syncs.

Ranges are cut where decisions change. The work of each device and the aggregation of gradients
are read from the lowered program, because the decisions alone do not give them: rules split ops
along other axes than the batch, and parameters that live in slices are not aggregated, whatever
the decision of their group.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import BATCH_AXIS, EVERYWHERE, AxisPlan, axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.lowering import lower
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import FIRST_LINK_KIND, Program, TaskKind
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.strategy.keeping import recomputed_words
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import Decision, Strategy
from heterog.strategy.sync import Sync

SYNC_NAMES = {sync.words for sync in Sync}
IN_SLICES = "in slices"
"""Each device keeps and updates its own slice of a parameter: nothing is aggregated."""
MADE_WHOLE = "made whole"
"""Each replica makes or gets the whole gradient as a value: nothing is aggregated."""
ELSEWHERE = "elsewhere"
"""The only replica sends its gradient to the device that updates the parameter."""
ALONE = "alone"
"""The only replica updates the parameter."""

SAMPLES = "samples"
WHOLE = "whole"
_ORDER = ("columns", "rows", "heads", "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Ops that are divided along one axis.

    Attributes:
        axis: ``"samples"`` of the batch; ``"columns"`` of weights (each device makes a part of the
            outputs), ``"rows"`` (each makes a summand of all), ``"heads"``, ``"experts"`` or
            several of these joined by ``"and"``; ``"units"`` of another axis; ``"whole"``: every
            device that takes part does all.
        units: Number of units of the axis; 0 for ``"whole"``.
        shares: Units of each device; for ``"whole"`` 1 on those that take part.
        work: Part of the FLOPs of the range that is divided this way.
    """

    axis: str
    units: int
    shares: tuple[int, ...]
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedParameters:
    """The way in which the gradients of some parameters become the same everywhere.

    Attributes:
        way: One of ``SYNC_NAMES``, or the reason why nothing is aggregated: ``IN_SLICES``,
            ``MADE_WHOLE``, ``ELSEWHERE``, ``ALONE``.
        num_groups: Number of groups with such parameters.
        num_parameters: Number of parameters.
        num_bytes: Bytes of these parameters.
        num_buckets: Number of pieces in which their gradients are sent; 0 if sent as they are.
        largest_bucket_bytes: Bytes of the largest piece.
        servers: Indices of the devices that update them for others.
    """

    way: str
    num_groups: int
    num_parameters: int
    num_bytes: float
    num_buckets: int = 0
    largest_bucket_bytes: float = 0.0
    servers: tuple[int, ...] = ()

    @property
    def is_aggregated(self) -> bool:
        """Whether gradients of several replicas are summed."""
        return self.way in SYNC_NAMES


class LoweredStrategy:
    """A program of one training step, with facts derived from it.

    Args:
        program: Program of the strategy, with one step.
        strategy: Strategy that was lowered.
        graph: Graph that it was lowered from.
    """

    def __init__(self, program: Program, strategy: Strategy, graph: OpGraph) -> None:
        assert program.num_steps == 1
        self.program = program
        self.strategy = strategy
        self.graph = graph
        self.tables: GraphTables = graph_tables(graph, program.op_rules, program.blocks)
        self.plan: AxisPlan = axis_plan(graph, program.op_rules)

    @cached_property
    def _units(self) -> npt.NDArray[np.int64]:
        """Units that every op runs on each device, all micro-batches.  # [num_ops, num_devices]"""
        program = self.program
        units = np.zeros((len(self.tables.op_id), program.num_devices), np.int64)
        ops = program.kind == TaskKind.COMPUTE
        where = program.subject[ops], program.device[ops]
        ruled = program.units[ops] > 0  # the same in every micro-batch
        np.add.at(units, where, np.where(ruled, 0, program.samples[ops]))
        np.maximum.at(units, where, program.units[ops])
        return units

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices on which no task runs."""
        program = self.program
        working = set(program.device[program.kind < FIRST_LINK_KIND].tolist())
        return tuple(device for device in range(program.num_devices) if device not in working)

    @property
    def recomputing(self) -> set[int]:
        """Groups with an op that runs again before the backward pass."""
        again = self.program.kind == TaskKind.RECOMPUTE
        return set(self.tables.op_group[self.program.subject[again]].tolist())

    def splits(self, groups: range, devices: Sequence[int]) -> tuple[Split, ...]:
        """Axes along which the ops of consecutive groups are divided, most work first.

        Args:
            groups: Groups with the same devices and shares.
            devices: Devices of these groups.
        """
        tables = self.tables
        rows = np.flatnonzero((tables.op_group >= groups.start) & (tables.op_group < groups.stop))
        # Plus one, so that ops without FLOPs have a weight, too.
        work = self.graph.flops[tables.op_id[rows]] + 1.0
        found = []
        for axis in np.unique(tables.op_axis[rows]).tolist():
            mine = tables.op_axis[rows] == axis
            shares = self._units[rows[mine]][:, list(devices)]
            assert (shares == shares[0]).all(), "ops of one layout and axis share alike"
            found.append(
                Split(
                    axis=self._axis_name(axis, rows[mine]),
                    units=int(tables.axis_units[axis]),
                    shares=tuple(shares[0].tolist()),
                    work=float(work[mine].sum() / work.sum()),
                )
            )
        return tuple(sorted(found, key=lambda each: -each.work))

    def _axis_name(self, axis: int, rows: npt.NDArray[np.int64]) -> str:
        if axis == BATCH_AXIS:
            return SAMPLES
        if self.tables.axis_units[axis] == EVERYWHERE:
            return WHOLE
        names = {name for row in rows.tolist() for name in self._names_of(row)}
        return " and ".join(name for name in _ORDER if name in names) or "units"

    def _names_of(self, row: int) -> Iterable[str]:
        """Names of an op's axis, by the weights that it reads in slices."""
        tables, graph = self.tables, self.graph
        op = int(tables.op_id[row])
        kind = graph.ops[op].kind
        if kind.startswith("attention"):
            yield "heads"
        if tables.op_is_backward[row]:
            return
        first, last = tables.parameter_read_start[row : row + 2]
        for parameter in tables.parameter_read[first:last].tolist():
            if tables.parameter_axis[parameter] < 0:
                continue
            shape = graph.tensors[int(tables.parameter_tensor[parameter])].shape
            placed = self.plan.placements[graph.outputs[op][0]]
            if len(shape) == 3 and "convolution" not in kind:
                yield "experts"
            else:
                yield "rows" if placed.kind == "P" else "columns"

    @cached_property
    def ways(self) -> tuple[str, ...]:
        """Aggregation of each parameter's gradient, as in ``AggregatedParameters``."""
        return tuple(self._way(parameter) for parameter in range(len(self._updated_on)))

    @cached_property
    def _updated_on(self) -> list[set[int]]:
        """Devices that update each parameter, or a slice of it."""
        found: list[set[int]] = [set() for _ in self.graph.updates]
        program = self.program
        for task in np.flatnonzero(program.kind == TaskKind.UPDATE).tolist():
            found[int(program.subject[task])].add(int(program.device[task]))
        return found

    @cached_property
    def _tasks_about(self) -> dict[tuple[int, int], int]:
        """One link task for each (kind, subject)."""
        program = self.program
        links = np.flatnonzero(program.kind >= FIRST_LINK_KIND).tolist()
        return {(int(program.kind[task]), int(program.subject[task])): task for task in links}

    def _way(self, parameter: int) -> str:
        about, tables = self._tasks_about, self.tables
        decision = self.strategy.decisions[int(tables.parameter_group[parameter])]
        if tables.parameter_axis[parameter] >= 0:
            return IN_SLICES
        bucket = int(self.program.bucket[parameter])
        if decision.sync.is_sharded and (TaskKind.REDUCE_SCATTER, bucket) in about:
            return decision.sync.words  # slice groups also add up what was scattered
        if (TaskKind.ALL_REDUCE, bucket) in about:
            channel = self.program.channel[about[TaskKind.ALL_REDUCE, bucket]]
            if self.program.codecs and self.program.codec[about[TaskKind.ALL_REDUCE, bucket]]:
                return decision.sync.words  # gathered in messages, not reduced
            is_ring = self.program.channels[channel].kind == ChannelKind.ALL_REDUCE_RING
            return (Sync.RING if is_ring else Sync.HIERARCHICAL).words
        if (TaskKind.ALL_GATHER, bucket) in about:
            return Sync.REDUCE_SCATTER_ALL_GATHER.words
        if (TaskKind.REDUCE_SCATTER, bucket) in about:
            return decision.sync.words
        travels = any((kind, parameter) in about for kind in (TaskKind.PUSH, TaskKind.PULL))
        if len(self._updated_on[parameter]) > 1:
            return MADE_WHOLE
        if not travels:
            return ALONE
        return ELSEWHERE if len(decision.devices) == 1 else Sync.PARAMETER_SERVER.words

    def aggregations(self) -> tuple[AggregatedParameters, ...]:
        """All parameters by the aggregation of their gradients, most groups first."""
        by_way = grouped((way, parameter) for parameter, way in enumerate(self.ways))
        found = [self._aggregation(way, parameters) for way, parameters in by_way.items()]
        return tuple(sorted(found, key=lambda each: -each.num_groups))

    def _aggregation(self, way: str, parameters: list[int]) -> AggregatedParameters:
        sizes = self.tables.gradient_bytes
        in_bucket = np.array(parameters)[self.program.bucket[parameters] >= 0]
        buckets = self.program.bucket[in_bucket]
        is_served = way in (Sync.PARAMETER_SERVER.words, ELSEWHERE)
        servers = {device for p in parameters if is_served for device in self._updated_on[p]}
        return AggregatedParameters(
            way=way,
            num_groups=len(set(self.tables.parameter_group[parameters].tolist())),
            num_parameters=len(parameters),
            num_bytes=float(sizes[parameters].sum()),
            num_buckets=len(set(buckets.tolist())),
            largest_bucket_bytes=float(np.bincount(buckets, sizes[in_bucket]).max(initial=0.0)),
            servers=tuple(sorted(servers)),
        )

    def ways_of(self, groups: range) -> tuple[str, ...]:
        """The aggregations of some groups' gradients, each once, in their order."""
        pairs = sorted(
            (group, way)
            for group, way in zip(self.tables.parameter_group.tolist(), self.ways, strict=True)
            if group in groups and way in SYNC_NAMES
        )
        return tuple(dict.fromkeys(way for _, way in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Consecutive groups on the same devices with the same shares.

    Attributes:
        first_group: Number of the first group.
        num_groups: Number of groups.
        first: Module path that names the first group.
        last: Module path that names the last group.
        devices: Indices of the devices.
        shares: Samples of the batch on each device; ops with rules split other units in proportion
            to these.
        syncs: Aggregations of gradients, as in ``SYNC_NAMES``, in the order of the groups; empty
            if there are none.
        units: Units of the axes other than the batch (columns, heads, experts) along which rules
            split ops of the range, each number once.
        by_batch: Whether some op of the range is split along the batch.
        splits: All axes along which ops of the range are divided, most work first.
    """

    first_group: int
    num_groups: int
    first: str
    last: str
    devices: tuple[int, ...]
    shares: tuple[int, ...]
    syncs: tuple[str, ...] = ()
    units: tuple[int, ...] = ()
    by_batch: bool = True
    splits: tuple[Split, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decisions of a strategy, as its lowered program carries them out.

    Attributes:
        num_groups: Number of groups of modules, each with one decision.
        ranges: All groups, cut wherever devices or shares change.
        idle: Indices of devices on which nothing runs; servers of parameters have work.
        syncs: Number of groups by aggregation of their gradients, most groups first; a group may
            use several, or have nothing to aggregate.
        bucket_bytes: Bytes of a bucket, see ``Strategy``.
        num_recomputing: Number of groups of which some ops run again instead of being kept.
        recomputed: What these groups make again, in words.
        num_micro_batches: Number of parts that the batch is cut into.
        step_barrier: Whether a step ends with all updates.
        aggregations: All parameters by the aggregation of their gradients, or why there is none.
        micro_batch_sizes: Samples of each micro-batch, on all devices together.
        schedule: Order in which devices work through the micro-batches.
    """

    num_groups: int
    ranges: tuple[Range, ...]
    idle: tuple[int, ...]
    syncs: tuple[tuple[str, int], ...]
    bucket_bytes: int
    num_recomputing: int
    num_micro_batches: int
    step_barrier: bool
    aggregations: tuple[AggregatedParameters, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    schedule: PipelineSchedule = AS_IT_COMES
    recomputed: str = "activations"


def what_was_decided(strategy: Strategy, graph: OpGraph, cluster: Cluster) -> Decided:
    """Lower a strategy and describe it for people."""
    names = group_ops(graph).names
    lowered = LoweredStrategy(lower(graph, cluster, strategy, num_steps=1), strategy, graph)
    aggregations = lowered.aggregations()
    return Decided(
        num_groups=len(names),
        ranges=tuple(_ranges(lowered, names)),
        idle=lowered.idle,
        syncs=tuple((each.way, each.num_groups) for each in aggregations if each.is_aggregated),
        bucket_bytes=strategy.bucket_bytes,
        num_recomputing=len(lowered.recomputing),
        recomputed=recomputed_words(
            strategy.decisions[each].keeps for each in lowered.recomputing
        ),
        num_micro_batches=strategy.num_micro_batches,
        step_barrier=strategy.step_barrier,
        aggregations=aggregations,
        micro_batch_sizes=strategy.micro_sizes or (graph.batch_size,),
        schedule=strategy.schedule,
    )


def ranges_of(decisions: Sequence[Decision]) -> list[range]:
    """Consecutive groups with the same devices and shares, in order."""
    found: list[range] = []
    for _, run in groupby(decisions, key=lambda each: (each.devices, each.shares)):
        first = found[-1].stop if found else 0
        found.append(range(first, first + sum(1 for _ in run)))
    return found


def _ranges(lowered: LoweredStrategy, names: tuple[str, ...]) -> Iterator[Range]:
    decisions = lowered.strategy.decisions
    for groups in ranges_of(decisions):
        decision = decisions[groups.start]
        splits = lowered.splits(groups, decision.devices)
        others = [each for each in splits if each.axis not in (SAMPLES, WHOLE)]
        yield Range(
            first_group=groups.start,
            num_groups=len(groups),
            first=names[groups.start] or "(root)",
            last=names[groups[-1]] or "(root)",
            devices=decision.devices,
            shares=decision.shares,
            syncs=lowered.ways_of(groups),
            units=tuple(dict.fromkeys(each.units for each in others)),
            by_batch=any(each.axis == SAMPLES for each in splits) or not splits,
            splits=splits,
        )
