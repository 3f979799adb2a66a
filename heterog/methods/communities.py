"""Hosts that are near each other, and an order that crosses few slow links (OP-Fence).

FusionLLM (arXiv 2410.12707) groups devices of similar bandwidth before it cuts a model into
stages. Its code is not public; this is our reading of it. Hosts are nodes of a graph whose edges
weigh their bandwidth, communities are found by greedy modularity (Louvain), and they are put in
the order in which a byte that is handed from each to the next takes the fewest seconds.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

from heterog.cluster.topology import Cluster

MOST_HOSTS = 128
"""Most hosts of a cluster that is looked at: there are 8,128 pairs of them."""
_MOST_EXACT = 12
"""Most communities whose best order is found exactly, among all subsets of them."""


def communities(cluster: Cluster) -> list[tuple[int, ...]]:
    """Hosts that reach each other faster than others, each community's fastest hosts first.

    Args:
        cluster: A cluster of any size; with more than ``MOST_HOSTS`` hosts, or where all hosts
            reach each other equally fast, it is one community.
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
    """Communities in the order that hands a byte from each to the next in the fewest seconds.

    Exact up to twelve (a path through all, by dynamic programming over subsets), greedy beyond.

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
    # For each set of places passed, and the last of them: (seconds, the way there).
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
    """A path that always goes on to the nearest place left, from the nearest two."""
    left = set(range(len(seconds)))
    nearest = min(combinations(left, 2), key=lambda pair: seconds[pair[0]][pair[1]])
    way = list(nearest)
    left -= set(way)
    while left:
        way.append(min(left, key=lambda place: seconds[way[-1]][place]))
        left.remove(way[-1])
    return tuple(way)


def _bytes_per_s(cluster: Cluster, one: int, other: int) -> float:
    src, dst = cluster.host_devices(one)[0], cluster.host_devices(other)[0]
    return cluster.bottleneck_bytes_per_s(src, dst)


def _by_speed(cluster: Cluster, hosts: Iterable[int]) -> tuple[int, ...]:
    def flops(host: int) -> float:
        types = (cluster.device_types[cluster.type_index[d]] for d in cluster.host_devices(host))
        return sum(each.peak_flops_per_s["float32"] for each in types)

    return tuple(sorted(hosts, key=lambda host: (-flops(host), host)))
