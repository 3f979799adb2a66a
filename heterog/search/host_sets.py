"""Sets of hosts worth renting: those that a rough guess puts nearest to the best trades.

A plan's money is what its hosts cost per second times its seconds, so the cheapest plan of all is
the cheapest of the fastest plans of every set of hosts. There are too many sets to search in each:
16 hosts of four kinds have 624 that differ. So seconds are guessed from speeds and links, sets are
put in order by how few others are both faster and cheaper, and searches look into the first ones.
The order does not depend on a deadline, so that a later deadline never finds a dearer plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from heterog.cluster.topology import Cluster
from heterog.methods.data_parallel import device_speeds
from heterog.search.objective import rent_per_s
from heterog.simulator.evaluator import Evaluator

MOST_SETS = 4096
"""Most sets that are guessed about; beyond, counts of a kind are thinned to 1, 2, 4, ... all."""
_MOST_SYNC = 2.0
"""Most seconds of gradient sums, in times of compute: a pipeline sends less than any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSet:
    """Some hosts with a guess of how fast they are.

    Attributes:
        hosts: Positions of the hosts, ascending.
        seconds: Guessed seconds of a step.
        rent_per_s: Rent of all of them for a second.
    """

    hosts: tuple[int, ...]
    seconds: float
    rent_per_s: float

    @property
    def cost(self) -> float:
        """Guessed cost of a step."""
        return self.seconds * self.rent_per_s


def ranked_host_sets(evaluator: Evaluator) -> list[HostSet]:
    """All sets that differ and could hold the model, the most promising ones first.

    Args:
        evaluator: Evaluator of the graph and a cluster with prices.
    """
    speeds = device_speeds(evaluator)
    cluster, graph = evaluator.cluster, evaluator.graph
    parameters_bytes = sum(int(graph.tensor_bytes[tensor]) for _, tensor, _ in graph.updates)
    least_bytes = parameters_bytes * (1.0 + graph.optimizer_state_ratio)
    found = []
    for hosts in differing_sets(cluster):
        devices = [device for host in hosts for device in cluster.host_devices(host)]
        if sum(cluster.devices[d].usable_memory_bytes for d in devices) < least_bytes:
            continue
        compute_s = graph.batch_size / sum(speeds[device] for device in devices)
        sync_s = _sync_s(cluster, hosts, len(devices), float(parameters_bytes))
        seconds = max(compute_s, min(sync_s, _MOST_SYNC * compute_s))
        found.append(HostSet(hosts=hosts, seconds=seconds, rent_per_s=rent_per_s(cluster, hosts)))
    return _by_layers(found)


def differing_sets(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Sets of hosts with the first ones of each kind and price, smallest sets first."""
    kinds: dict[tuple[int, float], list[int]] = {}
    for host, kind in enumerate(cluster.host_kind):
        kinds.setdefault((kind, cluster.host_price_per_s(host)), []).append(host)
    members = list(kinds.values())
    counts = [list(range(len(own) + 1)) for own in members]
    if math.prod(map(len, counts)) > MOST_SETS:
        counts = [[n for n in own if n & (n - 1) == 0 or n == own[-1]] for own in counts]
    if math.prod(map(len, counts)) > MOST_SETS:
        counts = _all_or_none(counts)
    for chosen in sorted(product(*counts), key=lambda numbers: (sum(numbers), numbers)):
        hosts = [h for own, count in zip(members, chosen, strict=True) for h in own[:count]]
        if hosts:
            yield tuple(sorted(hosts))


def _all_or_none(counts: Sequence[list[int]]) -> list[list[int]]:
    """Counts: all or none of a kind, for as many kinds as there is room; others are rented."""
    free = int(math.log2(MOST_SETS))
    both = [sorted({0, own[-1]}) for own in counts[:free]]
    return [*both, *([own[-1]] for own in counts[free:])]


def _sync_s(cluster: Cluster, hosts: Sequence[int], num_devices: int, num_bytes: float) -> float:
    """Seconds of a ring of all devices over the slowest link: 2 (n - 1) / n of the bytes."""
    if num_devices == 1:
        return 0.0
    if len(hosts) == 1:
        rate = cluster.hosts[hosts[0]].intra.bandwidth_bytes_per_s
    else:
        rate = min(cluster.nic_bandwidth_bytes_per_s(host) for host in hosts)
    return 2.0 * (num_devices - 1) / num_devices * num_bytes / rate


def _by_layers(sets: Sequence[HostSet]) -> list[HostSet]:
    """Sets that no other beats in both time and cost, then those that only these beat, and on."""
    left = sorted(sets, key=lambda each: (each.cost, each.seconds, len(each.hosts), each.hosts))
    ranked: list[HostSet] = []
    while left:
        layer: list[HostSet] = []
        rest: list[HostSet] = []
        fastest_s = math.inf
        for each in left:  # cheapest first, so any later one has to be faster
            (layer if each.seconds < fastest_s else rest).append(each)
            fastest_s = min(fastest_s, each.seconds)
        ranked += layer
        left = rest
    return ranked
