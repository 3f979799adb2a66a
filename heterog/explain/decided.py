"""The decisions of a plan as facts that people can read: ranges of groups, devices, syncs.

Ranges are cut where decisions change; everything else is read from the lowered program.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from heterog.cluster.topology import Cluster
from heterog.explain.lowered import SAMPLES, SYNC_NAMES, WHOLE, Aggregation, Lowered, Split
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering import lower
from heterog.strategy.keeping import recomputed_words
from heterog.strategy.pipeline_schedule import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import Decision, Strategy

__all__ = ["SYNC_NAMES", "Decided", "Range", "ranges_of", "what_was_decided"]


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
    aggregations: tuple[Aggregation, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    schedule: PipelineSchedule = AS_IT_COMES
    recomputed: str = "activations"


def what_was_decided(strategy: Strategy, graph: OpGraph, cluster: Cluster) -> Decided:
    """Lower a strategy and describe it for people."""
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
        recomputed=recomputed_words(
            strategy.decisions[each].keeps for each in lowered.recomputing
        ),
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
