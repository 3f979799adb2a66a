"""Clusters with one purchase: a device, faster links, more memory; and strategies for them."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from typing import Any

from heterog.cluster.hardware import Device, PairLimit
from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.explain.decided import ranges_of
from heterog.graph.grouping import group_ops
from heterog.grouped import grouped
from heterog.lowering.channels import proportional_slices
from heterog.names import first_of
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import micro_batch_table, split_in_proportion
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

_MOST_RANGES = 8
"""Most ranges of a strategy, the longest ones, in which a new device is tried one by one."""


class ChangeKind(StrEnum):
    """The kind of purchase."""

    DEVICE = "device"
    NIC = "nic"
    PAIRS = "pairs"
    INNER_LINK = "inner_link"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCluster:
    """A cluster with one thing more or better.

    Attributes:
        kind: Kind of purchase.
        what: The purchase in words: ``"one more V100-16GB"``.
        where: Its place, in words.
        cluster: Cluster with it; devices keep their indices, and a new one comes last.
    """

    kind: ChangeKind
    what: str
    where: str
    cluster: Cluster


def possible_changes(
    cluster: Cluster, peaks_bytes: Sequence[Sequence[int]] = ()
) -> Iterator[ChangedCluster]:
    """Every purchase that a buyer may ask about.

    - One more device of each type: on a host of its own, with NIC and inner link like the host of
      that type with the fewest devices, because a card in a machine without a free slot cannot be
      bought. A cluster of a single host has no network to join: there it goes into that host.
    - Each kind of NIC (by line rate) twice as fast, on all hosts that have it.
    - Each line between hosts that several of them share twice as fast, in both directions.
    - Each kind of inner link twice as fast, on all hosts that have it and use it.
    - Twice the memory on all devices of a type, if some strategy needs more than 90 % of the
      memory of a device of this type.

    Args:
        cluster: The cluster as it is.
        peaks_bytes: Peaks of each device under the strategies that were looked at.
    """
    for number in range(len(cluster.device_types)):
        yield _one_more(cluster, number)
    if cluster.num_hosts > 1:
        for rate in sorted({host.nic_line_rate_bytes_per_s for host in cluster.hosts}):
            yield _faster_nics(cluster, rate)
    yield from _faster_lines(cluster)
    crowded = [h for h, devices in enumerate(cluster.host_devices) if len(devices) > 1]
    for link in dict.fromkeys(cluster.hosts[index].intra for index in crowded):
        chosen = [index for index in crowded if cluster.hosts[index].intra == link]
        faster = replace(link, bandwidth_bytes_per_s=2.0 * link.bandwidth_bytes_per_s)
        yield ChangedCluster(
            kind=ChangeKind.INNER_LINK,
            what=f"{link.kind} links of {link.bandwidth_bytes_per_s * 2e-9:g} instead of "
            f"{link.bandwidth_bytes_per_s * 1e-9:g} GB/s",
            where="inside " + ", ".join(cluster.hosts[index].name for index in chosen),
            cluster=_with_hosts(cluster, chosen, intra=faster),
        )
    for number in range(len(cluster.device_types)):
        devices = [d for d, each in enumerate(cluster.type_index) if each == number]
        if any(
            peaks[device] > 0.9 * cluster.devices[device].usable_memory_bytes
            for peaks in peaks_bytes
            for device in devices
            if peaks
        ):
            yield _more_memory(cluster, number)


def _one_more(cluster: Cluster, number: int) -> ChangedCluster:
    device_type = cluster.device_types[number]
    hosts = [h for h in range(cluster.num_hosts)
             if any(cluster.type_index[d] == number for d in cluster.host_devices[h])]  # fmt: skip
    model = min(hosts, key=lambda h: (len(cluster.host_devices[h]), h))
    like = next(d for d in cluster.host_devices[model] if cluster.type_index[d] == number)
    host = cluster.hosts[model]
    if cluster.num_hosts == 1:
        new_hosts, where = cluster.hosts, f"in host {host.name}"
    else:
        taken = {each.name for each in cluster.hosts}
        new_hosts = (*cluster.hosts, replace(host, name=_free_name("new", taken), num_nics=1))
        rate = host.nic_line_rate_bytes_per_s * 8e-9
        where = f"on a host of its own with a NIC of {rate:g} Gbit/s"
    taken = {each.name for each in cluster.devices}
    device = replace(
        cluster.devices[like],
        name=_free_name(f"{new_hosts[-1].name}:", taken),
        host_index=len(new_hosts) - 1,
    )
    return ChangedCluster(
        kind=ChangeKind.DEVICE,
        what=f"one more {device_type.name}",
        where=where,
        cluster=replace(
            cluster,
            hosts=new_hosts,
            devices=(*cluster.devices, device),
            pairs=_with_one_more(cluster, model, device.host_index),
        ),
    )


def _with_one_more(cluster: Cluster, model: int, host: int) -> tuple[PairLimit, ...]:
    """Shared limits between hosts, with a new host in each set that has the model host."""

    def with_it(hosts: tuple[int, ...]) -> tuple[int, ...]:
        return (*hosts, host) if model in hosts and host not in hosts else hosts

    return tuple(
        replace(limit, sources=with_it(limit.sources), targets=with_it(limit.targets))
        if limit.is_shared
        else limit
        for limit in cluster.pairs
    )


def _faster_lines(cluster: Cluster) -> Iterator[ChangedCluster]:
    """Changes that make each line between the same sets of hosts twice as fast."""
    lines = grouped(
        (frozenset((limit.sources, limit.targets)), number)
        for number, limit in enumerate(cluster.pairs)
        if limit.is_shared
    )
    for numbers in lines.values():
        pairs = list(cluster.pairs)
        for number in numbers:
            faster = 2.0 * pairs[number].bandwidth_bytes_per_s
            pairs[number] = replace(pairs[number], bandwidth_bytes_per_s=faster)
        line = cluster.pairs[numbers[0]]
        rate = line.bandwidth_bytes_per_s
        ends = [
            first_of([cluster.hosts[host].name for host in hosts], most=1)
            for hosts in (line.sources, line.targets)
        ]
        yield ChangedCluster(
            kind=ChangeKind.PAIRS,
            what=f"a line of {rate * 16e-9:.3g} instead of {rate * 8e-9:.3g} Gbit/s",
            where=f"between {ends[0]} and {ends[1]}",
            cluster=replace(cluster, pairs=tuple(pairs)),
        )


def _with_hosts(cluster: Cluster, chosen: Collection[int], **changes: Any) -> Cluster:
    """The cluster with some fields of the chosen hosts changed."""
    hosts = enumerate(cluster.hosts)
    return replace(
        cluster, hosts=tuple(replace(h, **changes) if i in chosen else h for i, h in hosts)
    )


def _free_name(stem: str, taken: set[str]) -> str:
    return next(name for n in count() if (name := f"{stem}{n}") not in taken)


def _faster_nics(cluster: Cluster, rate: float) -> ChangedCluster:
    chosen = [
        index for index, host in enumerate(cluster.hosts) if host.nic_line_rate_bytes_per_s == rate
    ]
    names = ", ".join(cluster.hosts[index].name for index in chosen)
    return ChangedCluster(
        kind=ChangeKind.NIC,
        what=f"NICs of {rate * 16e-9:g} instead of {rate * 8e-9:g} Gbit/s",
        where=f"on {names}" if len(chosen) < 6 else f"on {len(chosen)} hosts",
        cluster=_with_hosts(cluster, chosen, nic_line_rate_bytes_per_s=2.0 * rate),
    )


def _more_memory(cluster: Cluster, number: int) -> ChangedCluster:
    old = cluster.device_types[number]
    new = replace(old, memory_bytes=2 * old.memory_bytes)
    devices: list[Device] = [
        replace(
            device, type=new, usable_memory_bytes=device.usable_memory_bytes + old.memory_bytes
        )
        if device.type == old
        else device
        for device in cluster.devices
    ]
    return ChangedCluster(
        kind=ChangeKind.MEMORY,
        what=f"twice the memory on every {old.name}",
        where="",
        cluster=replace(cluster, devices=tuple(devices)),
    )


def strategies_with(
    strategy: Strategy, evaluator: Evaluator, devices: Sequence[int], speeds: Sequence[float]
) -> Iterator[Strategy]:
    """Strategies with more devices: in all ranges of groups, or in one of them.

    A device that joins a range takes a share in proportion to its speed among those that work
    there. A group that was on one device becomes replicas, synchronised by reduce-scatter and
    all-gather. Beside teams, a device that joins is a team of its own. Strategies that would not
    be legal are left out.

    Args:
        strategy: Strategy for the graph; its devices have the same indices in the cluster.
        evaluator: Evaluator of the graph and the cluster with the new devices.
        devices: Indices of the devices that join.
        speeds: Samples per second of every device.
    """
    ranges = ranges_of(strategy.decisions)
    spans = [(0, len(strategy.decisions))]
    if len(ranges) > 1:
        longest = sorted(ranges, key=lambda groups: (-len(groups), groups.start))
        spans += [(groups.start, groups.stop) for groups in longest[:_MOST_RANGES]]
    for first, last in spans:
        joined = _joined(strategy, evaluator, devices, speeds, first, last)
        try:
            joined.check(evaluator.graph, evaluator.cluster)
        except StrategyError:
            continue  # rules or schedules of other groups leave no place for the new devices
        yield joined


def _joined(
    strategy: Strategy,
    evaluator: Evaluator,
    devices: Sequence[int],
    speeds: Sequence[float],
    first: int,
    last: int,
) -> Strategy:
    changed = list(strategy.decisions)
    for group in range(first, last):
        changed[group] = _with_devices(changed[group], evaluator, devices, speeds)
    group_of = group_ops(evaluator.graph).group
    homes = tuple(
        home if changed[int(group_of[op])].sync.is_served
        or len(changed[int(group_of[op])].devices) == 1 else REPLICATED
        for (op, _, _), home in zip(evaluator.graph.updates, strategy.homes, strict=True)
    )  # fmt: skip
    return replace(
        strategy.with_decisions(tuple(changed)),
        cluster=evaluator.cluster.fingerprint,
        homes=homes,
        schedule=strategy.schedule.fitted([decision.devices for decision in changed]),
        # Sizes alone: a table of each device's part has no part for a new device.
        micro_batches=micro_batch_table(strategy.micro_sizes, evaluator.cluster.num_devices),
    )


def _with_devices(
    decision: Decision, evaluator: Evaluator, devices: Sequence[int], speeds: Sequence[float]
) -> Decision:
    share_of = dict(zip(decision.devices, decision.shares, strict=True))
    working = sum(speeds[device] for device, share in share_of.items() if share > 0)
    samples_per_speed = evaluator.graph.batch_size / working
    members = tuple(sorted({*decision.devices, *devices}))
    weights = tuple(
        speeds[device] * samples_per_speed if device in devices else float(share_of[device])
        for device in members
    )
    by_slices = decision.sync == Sync.REDUCE_SCATTER_ALL_GATHER or len(decision.devices) == 1
    # Teams of different sizes cut parameters differently, so that a slice has no single owner.
    by_slices |= bool(decision.teams) and decision.sync.is_sharded
    part_of = dict(zip(decision.devices, decision.parts or decision.shares, strict=True))
    return replace(
        decision,
        devices=members,
        teams=(*decision.teams, *((device,) for device in devices if device not in part_of))
        if decision.teams
        else (),
        parts=tuple(part_of.get(device, 1) for device in members) if decision.parts else (),
        shares=split_in_proportion(evaluator.graph.batch_size, weights),
        sync=Sync.REDUCE_SCATTER_ALL_GATHER if by_slices else decision.sync,
        slices=proportional_slices(evaluator.cluster, members) if by_slices else (),
        slice_groups=(),
    )
