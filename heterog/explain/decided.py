"""What a strategy decides, as facts that people can read: ranges of groups, devices, syncs."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from heterog.cluster.topology import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.strategy.strategy import Decision, Strategy, Sync

SYNC_NAMES = {
    Sync.RING: "ring all-reduce",
    Sync.HIERARCHICAL: "hierarchical all-reduce",
    Sync.REDUCE_SCATTER_ALL_GATHER: "reduce-scatter and all-gather",
    Sync.PARAMETER_SERVER: "parameter servers",
    Sync.ZERO1: "ZeRO-1 (optimizer state in slices)",
    Sync.ZERO2: "ZeRO-2 (optimizer state and gradients in slices)",
    Sync.ZERO3: "ZeRO-3 (optimizer state, gradients and parameters in slices)",
}


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
            empty on a single device.
        units: units of the axes other than the batch (columns, heads, experts) that ops of the
            range are split along by rules, each number once.
        by_batch: whether some op of the range is split along the batch.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What a strategy decides.

    Attributes:
        num_groups: groups of modules that share one decision each.
        ranges: all groups, cut wherever devices or shares change.
        idle: devices without any work, by index; servers of parameters have work.
        syncs: how many groups aggregate their gradients in which way; groups on a single device
            have nothing to aggregate.
        bucket_bytes: see ``Strategy``.
        num_recomputing: groups that do not keep their activations but compute them again.
        num_micro_batches: parts that the batch is cut into.
        step_barrier: whether a step ends with all updates.
    """

    num_groups: int
    ranges: tuple[Range, ...]
    idle: tuple[int, ...]
    syncs: tuple[tuple[str, int], ...]
    bucket_bytes: int
    num_recomputing: int
    num_micro_batches: int
    step_barrier: bool


def what_was_decided(strategy: Strategy, graph: OpGraph, cluster: Cluster) -> Decided:
    """Read a strategy for people."""
    grouping = group_ops(graph)
    names = grouping.names
    syncs = Counter(
        SYNC_NAMES[decision.sync] for decision in strategy.decisions if len(decision.devices) > 1
    )
    working = {
        device
        for decision in strategy.decisions
        for device, share in zip(decision.devices, decision.shares, strict=True)
        if share > 0
    } | set(strategy.homes)
    return Decided(
        num_groups=len(names),
        ranges=tuple(
            _ranges(strategy.decisions, names, _units(strategy, graph), _by_batch(strategy, graph))
        ),
        idle=tuple(device for device in range(cluster.num_devices) if device not in working),
        syncs=tuple(syncs.most_common()),
        bucket_bytes=strategy.bucket_bytes,
        num_recomputing=sum(decision.recompute for decision in strategy.decisions),
        num_micro_batches=strategy.num_micro_batches,
        step_barrier=strategy.step_barrier,
    )


def _units(strategy: Strategy, graph: OpGraph) -> dict[int, list[int]]:
    """Units of axes other than the batch, by the group whose ops are split along them."""
    group = group_ops(graph).group
    found: dict[int, list[int]] = {}
    for op, rule in strategy.op_rules:
        is_split = any(each.kind == "S" for each in (*rule.inputs, *rule.outputs))
        if is_split and rule.units != graph.batch_size:
            found.setdefault(int(group[op]), []).append(rule.units)
    return found


def _by_batch(strategy: Strategy, graph: OpGraph) -> set[int]:
    """Groups with an op that follows the batch: without a rule, or with one that splits it."""
    group = group_ops(graph).group
    rules = dict(strategy.op_rules)
    return {
        int(group[index])
        for index in range(graph.num_ops)
        if not graph.is_view[index]
        and (index not in rules or rules[index].units == graph.batch_size)
    }


def _ranges(
    decisions: Iterable[Decision],
    names: tuple[str, ...],
    units: Mapping[int, list[int]],
    by_batch: Container[int],
) -> Iterable[Range]:
    first = 0
    for (devices, shares), run in groupby(decisions, key=lambda each: (each.devices, each.shares)):
        members = list(run)
        groups = range(first, first + len(members))
        several = [SYNC_NAMES[each.sync] for each in members if len(devices) > 1]
        yield Range(
            first_group=first,
            num_groups=len(members),
            first=names[first] or "(root)",
            last=names[groups[-1]] or "(root)",
            devices=devices,
            shares=shares,
            syncs=tuple(dict.fromkeys(several)),
            units=tuple(dict.fromkeys(n for group in groups for n in units.get(group, ()))),
            by_batch=any(group in by_batch for group in groups),
        )
        first += len(members)
