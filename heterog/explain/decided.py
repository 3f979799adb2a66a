"""What a plan decides, as facts that people can read: ranges of groups, devices, syncs.

Ranges are cut where decisions change; everything else is read from the lowered program.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from heterog.cluster.topology import Cluster
from heterog.explain.lowered import SAMPLES, SYNC_NAMES, WHOLE, Aggregation, Lowered, Split
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.strategy.lowering import lower
from heterog.strategy.pipeline_schedule import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import Decision, Strategy

__all__ = ["SYNC_NAMES", "Decided", "Range", "ranges_of", "what_was_decided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Consecutive groups on the same devices with the same shares.

    Attributes:
        first_group: number of the first one.
        num_groups: how many.
        first: module path that names the first group.
        last: module path that names the last group.
        devices: indices of the devices.
        shares: samples of the batch on each of them; what ops with rules split instead is in
            proportion to these.
        syncs: how gradients are aggregated, as in ``SYNC_NAMES``, in the order of the groups;
            empty where none are.
        units: units of the axes other than the batch (columns, heads, experts) that ops of the
            range are split along by rules, each number once.
        by_batch: whether some op of the range is split along the batch.
        splits: all axes that ops of the range are shared out along, most work first.
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
    """What a strategy decides, as its lowered program does it.

    Attributes:
        num_groups: groups of modules that share one decision each.
        ranges: all groups, cut wherever devices or shares change.
        idle: devices on which nothing runs, by index; servers of parameters have work.
        syncs: how many groups aggregate their gradients in which way, most groups first; a group
            may do so in several ways, or have nothing to aggregate.
        bucket_bytes: see ``Strategy``.
        num_recomputing: groups of which some ops run again instead of being kept.
        num_micro_batches: parts that the batch is cut into.
        step_barrier: whether a step ends with all updates.
        aggregations: all parameters by how their gradients are aggregated, or why they are not.
        micro_batch_sizes: samples of each micro-batch, on all devices together.
        schedule: in what order devices work through the micro-batches.
    """

    num_groups: int
    ranges: tuple[Range, ...]
    idle: tuple[int, ...]
    syncs: tuple[tuple[str, int], ...]
    bucket_bytes: int
    num_recomputing: int
    num_micro_batches: int
    step_barrier: bool
    aggregations: tuple[Aggregation, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    schedule: PipelineSchedule = AS_IT_COMES


def what_was_decided(strategy: Strategy, graph: OpGraph, cluster: Cluster) -> Decided:
    """Lower a strategy and read it for people."""
    names = group_ops(graph).names
    lowered = Lowered(lower(graph, cluster, strategy, num_steps=1), strategy, graph)
    aggregations = lowered.aggregations()
    return Decided(
        num_groups=len(names),
        ranges=tuple(_ranges(lowered, names)),
        idle=lowered.idle,
        syncs=tuple((each.way, each.num_groups) for each in aggregations if each.is_aggregated),
        bucket_bytes=strategy.bucket_bytes,
        num_recomputing=len(lowered.recomputing),
        num_micro_batches=strategy.num_micro_batches,
        step_barrier=strategy.step_barrier,
        aggregations=aggregations,
        micro_batch_sizes=lowered.micro_batch_sizes,
        schedule=strategy.schedule,
    )


def ranges_of(decisions: Sequence[Decision]) -> list[range]:
    """Consecutive groups with the same devices and shares, in order."""
    found: list[range] = []
    for _, run in groupby(decisions, key=lambda each: (each.devices, each.shares)):
        first = found[-1].stop if found else 0
        found.append(range(first, first + sum(1 for _ in run)))
    return found


def _ranges(lowered: Lowered, names: tuple[str, ...]) -> Iterator[Range]:
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
