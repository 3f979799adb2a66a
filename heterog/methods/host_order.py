"""Orders of hosts: permuted hosts of a strategy, and communities of hosts that are near.

A *place* is a host as a strategy names it; an order gives the host for each place. Hosts of one
kind (equal devices, inner links and NICs) can change places without any other change. Unlike in
``Cluster.host_kind``, lines between hosts (``Cluster.pairs``) make no kinds here, because the
order decides which host is behind which line. If rates between hosts differ, the order decides
which of them carries which traffic: the slowest pair should be one that exchanges nothing.
``HostTraffic`` estimates the cost of an order.

``communities`` and ``in_best_order`` follow FusionLLM's OP-Fence (arXiv 2410.12707), which groups
devices of similar bandwidth before it cuts a model into stages. Its code is not public; this is
our reading of it. Hosts are nodes of a graph whose edge weights are bandwidths; greedy modularity
(Louvain) finds communities. Their order is the one in which a byte passed from each community to
the next takes the fewest seconds in all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from heterog.cluster.topology import Cluster, kind_of_host
from heterog.grouped import grouped
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import FloatArray, IntArray, Program
from heterog.methods.changes import renumbered
from heterog.methods.pipette.communication import COOLED, HostRates, anneal, ring_payloads
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy

MOST_COUNTED = 2_000_000
"""Most tasks of a program whose traffic is counted, about a second's work."""


def on_hosts(strategy: Strategy, cluster: Cluster, order: Sequence[int]) -> Strategy:
    """A strategy with permuted hosts.

    Args:
        strategy: A strategy for the cluster.
        cluster: The hosts' cluster.
        order: Host for each place, with as many devices as the place has.  # [num_hosts]
    """
    device_of = [0] * cluster.num_devices
    for place, host in enumerate(order):
        pair = cluster.host_devices[place], cluster.host_devices[host]
        for before, after in zip(*pair, strict=True):
            device_of[before] = after
    return renumbered(strategy, device_of, cluster)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTraffic:
    """Bytes that a strategy sends between places in a step.

    Attributes:
        transfers_bytes: Bytes from each place to each other.  # [num_hosts, num_hosts]
        rings: For each number of members, the places of every ring, ascending, and its payload
            bytes.  # [num_rings, num_members], [num_rings]
    """

    transfers_bytes: FloatArray
    rings: tuple[tuple[IntArray, FloatArray], ...]

    @staticmethod
    def of_strategy(strategy: Strategy, evaluator: Evaluator) -> "HostTraffic | None":
        """Traffic of a strategy; ``None`` if there is none, or too much to be counted."""
        choice = evaluator.encode(strategy)
        if evaluator.tasks_of(choice) > MOST_COUNTED:
            return None
        traffic = HostTraffic.of_program(evaluator.program(choice), evaluator.cluster)
        return traffic if traffic.transfers_bytes.any() or traffic.rings else None

    @staticmethod
    def of_program(program: Program, cluster: Cluster) -> "HostTraffic":
        """Traffic of a program: transfers, and collectives as rings through their hosts."""
        sends = program.channel >= 0
        count = len(program.channels)
        payload = np.bincount(program.channel[sends], program.num_bytes[sends], count)
        transfers = np.zeros((cluster.num_hosts, cluster.num_hosts))
        rings: dict[tuple[int, ...], float] = {}
        for channel, num_bytes in zip(program.channels, payload.tolist(), strict=True):
            places = tuple(cluster.host_of[device] for device in channel.devices)
            if channel.kind == ChannelKind.POINT_TO_POINT:
                transfers[places] += num_bytes
                continue
            hosts = tuple(sorted(set(places)))
            # A reduce-scatter or all-gather sends half as much as an all-reduce in a ring. In an
            # all-to-all, each member sends only its own part of that.
            part = {
                ChannelKind.REDUCE_SCATTER: 0.5,
                ChannelKind.ALL_GATHER: 0.5,
                ChannelKind.ALL_TO_ALL: 0.5 / len(channel.devices),
            }.get(channel.kind, 1.0)
            if len(hosts) > 1:
                rings[hosts] = rings.get(hosts, 0.0) + num_bytes * part
        np.fill_diagonal(transfers, 0.0)
        by_size = sorted({len(hosts) for hosts in rings})
        return HostTraffic(
            transfers_bytes=transfers,
            rings=tuple(
                (
                    np.array([hosts for hosts in rings if len(hosts) == size], np.int32),
                    np.array([rings[hosts] for hosts in rings if len(hosts) == size]),
                )
                for size in by_size
            ),
        )

    def seconds(self, order: IntArray, rates: HostRates) -> float:
        """Seconds for which links are busy: an estimate that ranks orders, not a step time.

        The sum of the busiest pair of hosts, the slowest ring, and the means over pairs and rings;
        with the means, a slow pair counts even beside a slower one. Rings go through hosts in the
        order of the cluster.

        Args:
            order: Host for each place.  # [num_hosts]
            rates: Rates between hosts.
        """
        inverse = rates.s_per_byte
        busy = self.transfers_bytes * inverse[np.ix_(order, order)]
        seconds = float(busy.max() + busy.sum() / len(order))
        each = [
            ring_payloads(places.shape[1]) * payload * _slowest(inverse, order[places])
            for places, payload in self.rings
        ]
        if each:
            taken = np.concatenate(each)
            seconds += float(taken.max() + taken.mean())
        return seconds


def annealed_order(
    traffic: HostTraffic,
    rates: HostRates,
    order: IntArray,
    hosts: IntArray,
    rng: np.random.Generator,
    *,
    is_over: Callable[[], bool],
) -> IntArray:
    """An order with little estimated traffic, in which some hosts have changed places.

    Args:
        traffic: Traffic of a strategy.
        rates: Rates between hosts.
        order: Host for each place, to start from.  # [num_hosts]
        hosts: Places among which hosts change.
        rng: Generator of everything random.
        is_over: Function called before each step; it returns whether to end.
    """
    whole = order.copy()

    def cost_of(part: IntArray) -> float:
        whole[hosts] = part
        return traffic.seconds(whole, rates)

    found = anneal(cost_of, order[hosts], rng, num_steps=COOLED, is_over=is_over)
    whole[hosts] = found
    return whole


def _slowest(inverse: FloatArray, members: IntArray) -> FloatArray:
    """Seconds per byte of the slowest link of each ring.  # [num_rings]"""
    ring = np.sort(members, axis=1)
    worst: FloatArray = inverse[ring, np.roll(ring, -1, axis=1)].max(axis=1)
    return worst


def hosts_by_kind(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Hosts of each kind, kinds in order of their first host."""
    kinds = grouped(
        (kind_of_host(cluster.hosts[index], (cluster.devices[d] for d in devices)), index)
        for index, devices in enumerate(cluster.host_devices)
    )
    return tuple(map(tuple, kinds.values()))


MOST_HOSTS = 128
"""Most hosts of a cluster that is divided into communities: they have 8,128 pairs."""
_MOST_EXACT = 12
"""Most communities whose best order is found exactly, by dynamic programming over subsets."""


def communities(cluster: Cluster) -> list[tuple[int, ...]]:
    """Communities: hosts that reach each other faster than others, the fastest hosts first.

    Args:
        cluster: A cluster of any size. It is one community if it has more than ``MOST_HOSTS``
            hosts, or if all hosts reach each other equally fast.
    """
    hosts = range(cluster.num_hosts)
    everybody = [_by_speed(cluster, hosts)]
    if not 2 < cluster.num_hosts <= MOST_HOSTS:
        return everybody
    weights = {pair: _bytes_per_s(cluster, *pair) for pair in combinations(hosts, 2)}
    if len(set(weights.values())) == 1:
        return everybody
    import networkx  # type: ignore[import-untyped]  # takes 0.1 s; few who import this need it

    graph = networkx.Graph()
    graph.add_weighted_edges_from((*pair, weight) for pair, weight in weights.items())
    found = networkx.community.louvain_communities(graph, seed=0)
    return [_by_speed(cluster, sorted(each)) for each in sorted(found, key=min)]


def in_best_order(
    cluster: Cluster, groups: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Communities in the order that passes a byte from each to the next in the fewest seconds.

    Exact up to ``_MOST_EXACT`` communities, greedy beyond.

    Args:
        cluster: Cluster of their hosts.
        groups: Hosts of each community.
    """
    seconds = [
        [min(1.0 / _bytes_per_s(cluster, a, b) for a in one for b in other) for other in groups]
        if len(groups) > 1
        else [0.0]
        for one in groups
    ]
    order = _shortest_path(seconds) if len(groups) <= _MOST_EXACT else _greedy_path(seconds)
    return tuple(groups[place] for place in order)


def _shortest_path(seconds: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Places in the order of the shortest path through all of them (Held and Karp)."""
    count = len(seconds)
    # For each set of visited places, and the last of them: (seconds, path).
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]]
    best = {(1 << place, place): (0.0, (place,)) for place in range(count)}
    for _ in range(count - 1):
        longer: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (behind, last), (taken, way) in best.items():
            for place in range(count):
                if not behind >> place & 1:
                    key = behind | 1 << place, place
                    tried = taken + seconds[last][place], (*way, place)
                    longer[key] = min(longer.get(key, tried), tried)
        best = longer
    return min(best.values())[1]


def _greedy_path(seconds: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """A path from the nearest two places, always on to the nearest place that is left."""
    left = set(range(len(seconds)))
    nearest = min(combinations(left, 2), key=lambda pair: seconds[pair[0]][pair[1]])
    way = list(nearest)
    left -= set(way)
    while left:
        way.append(min(left, key=lambda place: seconds[way[-1]][place]))
        left.remove(way[-1])
    return tuple(way)


def _bytes_per_s(cluster: Cluster, one: int, other: int) -> float:
    src, dst = cluster.host_devices[one][0], cluster.host_devices[other][0]
    return cluster.bottleneck_bytes_per_s(src, dst)


def _by_speed(cluster: Cluster, hosts: Iterable[int]) -> tuple[int, ...]:
    def flops(host: int) -> float:
        types = (cluster.device_types[cluster.type_index[d]] for d in cluster.host_devices[host])
        return sum(each.peak_flops_per_s["float32"] for each in types)

    return tuple(sorted(hosts, key=lambda host: (-flops(host), host)))
