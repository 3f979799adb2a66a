"""Rates of links and factors of collectives fitted to measurements."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import FloatArray
from heterog.lowering.channels import Channel, ChannelKind, ChannelTable
from heterog.pricing.collectives import alpha_beta
from heterog.pricing.measurements import LEAST_SECONDS, LinkMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """The fits to measurements of links and collectives.

    Attributes:
        rates: Measured bytes/s of link resources, by name.
        factors: Factors of the latency and of the bytes' time, by channel kind.
        drag: Seconds of compute lost per payload byte, by channel kind and device type.
        overhead: Seconds of compute that an operation takes from a member for each other member,
            by channel kind and device type.
        loaded: Factor of the latency while a member computes, by channel kind.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    drag: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loaded: Mapping[str, float] = field(default_factory=dict)
    overhead: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def fit_links(rows: Iterable[LinkMeasurement], cluster: Cluster) -> LinkFit:
    """Fit rates, latencies and drag to measured transfers and collectives.

    Raises:
        ClusterError: the measurements name devices that the cluster does not have.
    """
    table = ChannelTable(cluster)
    loaded: dict[str, list[float]] = {}
    overhead: dict[str, dict[str, list[float]]] = {}
    by_channel: dict[Channel, list[LinkMeasurement]] = {}
    for row in rows:
        devices = tuple(cluster.device_index(name) for name in row.devices)
        channel = measured_channel(table, ChannelKind[row.kind.upper()], devices, row.slices)
        if row.while_computing:
            loaded.setdefault(row.kind, []).append(
                row.seconds / max(channel.latency_s, LEAST_SECONDS)
            )
            for device, seconds in zip(devices, row.device_seconds, strict=True):
                overhead.setdefault(row.kind, {}).setdefault(
                    cluster.devices[device].type.name, []
                ).append(seconds / (len(devices) - 1))
            continue
        by_channel.setdefault(channel, []).append(row)
    rates = _link_rates(
        cluster,
        {
            channel: _seconds_per_byte(members)
            for channel, members in by_channel.items()
            if channel.kind == ChannelKind.POINT_TO_POINT
        },
    )
    factors: dict[str, tuple[float, float]] = {}
    drag: dict[str, dict[str, list[float]]] = {}
    by_kind: dict[ChannelKind, list[tuple[float, float, float]]] = {}
    for channel, members in by_channel.items():
        cost = alpha_beta(cluster, channel, rates)
        for row in members:
            entry = (cost.latency_s, cost.seconds_per_byte * row.num_bytes, row.seconds)
            by_kind.setdefault(channel.kind, []).append(entry)
        largest = max(members, key=lambda row: row.num_bytes)
        lost = drag.setdefault(channel.kind.name.lower(), {})
        for device, seconds in zip(channel.devices, largest.device_seconds, strict=True):
            name = cluster.devices[device].type.name
            lost.setdefault(name, []).append(seconds / largest.num_bytes)
    for kind, entries in by_kind.items():
        factors[kind.name.lower()] = _factors(*np.array(entries).T)
    return LinkFit(
        rates=rates,
        factors=factors,
        drag=_means(drag),
        overhead=_means(overhead),
        # A geometric mean, as values spread over orders of magnitude: who is stopped when varies.
        loaded={kind: float(np.exp(np.mean(np.log(values)))) for kind, values in loaded.items()},
    )


def _link_rates(cluster: Cluster, seconds_per_byte: Mapping[Channel, float]) -> dict[str, float]:
    """Bytes/s of link resources, from transfers that ran alone.

    A transfer gives only the rate of the slowest link of its route. Links that are never the
    slowest keep their nominal rate, times the mean fraction that measured links reach of theirs.
    """
    found: dict[str, list[float]] = {}
    for channel, seconds in seconds_per_byte.items():
        way = [cluster.resources[resource] for resource in channel.traffic()]
        slowest = min(link.bandwidth_bytes_per_s for link in way)
        for link in way:
            if link.bandwidth_bytes_per_s <= 1.01 * slowest:
                found.setdefault(link.name, []).append(1.0 / seconds)
    rates = {name: float(np.median(values)) for name, values in found.items()}
    nominal = {link.name: link.bandwidth_bytes_per_s for link in cluster.resources}
    if rates:
        ratio = float(np.mean([rate / nominal[name] for name, rate in rates.items()]))
        rates = {name: rates.get(name, rate * ratio) for name, rate in nominal.items()}
    return rates


def measured_as(kind: ChannelKind) -> str:
    """Name under which a kind of channel was measured.

    Both all-reduces are one call of the communication library, which chooses for itself. Ranks
    run an all-to-all by the same sends as an all-gather.
    """
    if kind == ChannelKind.ALL_REDUCE_HIERARCHICAL:
        kind = ChannelKind.ALL_REDUCE_RING
    if kind == ChannelKind.ALL_TO_ALL:
        kind = ChannelKind.ALL_GATHER
    return kind.name.lower()


def _factors(latency: FloatArray, payload: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Factors of the nominal seconds of latency and payload that fit the measurements.

    Medians, as a process that is stopped for a moment makes single measurements meaningless: the
    payload's over the large ones, then the latency's over the small ones.
    """
    is_large = payload >= 0.5 * payload.max()
    is_small = payload <= 2.0 * payload.min()
    of_payload = np.median(seconds[is_large] / payload[is_large])
    rest = seconds[is_small] - of_payload * payload[is_small]
    of_latency = np.median(rest / np.maximum(latency[is_small], LEAST_SECONDS))
    # Small messages may pass a shaper unhindered; a search would make use of it.
    return max(float(of_latency), 1.0), float(of_payload)


def measured_channel(
    table: ChannelTable, kind: ChannelKind, devices: tuple[int, ...], slices: tuple[int, ...]
) -> Channel:
    """The channel over which something was measured."""
    if kind == ChannelKind.POINT_TO_POINT:
        number = devices[0] * table.cluster.num_devices + devices[1]
    elif kind == ChannelKind.REDUCE_SCATTER:
        number = table.reduce_scatter(devices, slices)
    elif kind == ChannelKind.ALL_GATHER:
        number = table.all_gather(devices, slices)
    else:
        number = table.all_reduce(
            devices, hierarchical=kind == ChannelKind.ALL_REDUCE_HIERARCHICAL
        )
    return table[number]


def _seconds_per_byte(rows: Sequence[LinkMeasurement]) -> float:
    """Seconds per byte of the largest payload; latency is fitted later, with the factors."""
    largest = max(rows, key=lambda row: row.num_bytes)
    return largest.seconds / largest.num_bytes


def _means(by_kind: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Mean loss of each device type, at least 0: a clock may show gains, which do not exist."""
    return {
        kind: {name: max(_mean(values), 0.0) for name, values in by_type.items()}
        for kind, by_type in by_kind.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
