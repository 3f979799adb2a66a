"""Communities of hosts, their order, and pipelines whose stages lie in one community each."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

import pytest

from heterog.cluster import Cluster
from heterog.cluster.hardware import PairLimit
from heterog.methods.host_order import _greedy_path, _shortest_path, communities, in_best_order
from heterog.methods.pipeline import stage_sequences
from tests.simulator.builders import GBIT_PER_S, cluster_of

THREE_SITES = (0, 1, 2, 0, 1, 2, 0, 1, 2)  # of each host: files list them as they come
LINES = {(0, 1): 1.0, (1, 2): 2.0, (0, 2): 0.1}


def sites(of_host: Sequence[int], lines: dict[tuple[int, int], float]) -> Cluster:
    """Hosts of 10 Gbit/s at sites that are joined by slower lines, in Gbit/s."""
    at = {site: [h for h, own in enumerate(of_host) if own == site] for site in of_host}
    limits = [
        PairLimit(
            sources=tuple(at[one]),
            targets=tuple(at[other]),
            bandwidth_bytes_per_s=rate * GBIT_PER_S,
        )
        for pair, rate in lines.items()
        for one, other in (pair, pair[::-1])
    ]
    return replace(cluster_of(*((10.0, ["T4"]),) * len(of_host)), pairs=tuple(limits))


def test_three_sites_are_three_communities_in_the_order_of_their_lines() -> None:
    cluster = sites(THREE_SITES, LINES)
    found = communities(cluster)
    assert found == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]
    assert in_best_order(cluster, found) in (tuple(found), tuple(reversed(found)))


def test_hosts_that_are_equally_near_are_one_community() -> None:
    assert communities(cluster_of(*((10.0, ["T4"]),) * 6)) == [(0, 1, 2, 3, 4, 5)]
    assert communities(cluster_of((10.0, ["T4"]), (1.0, ["V100-16GB"]))) == [(1, 0)]


def test_pipelines_cross_slow_lines_twice() -> None:
    cluster = sites(THREE_SITES, LINES)
    site = {device: THREE_SITES[cluster.host_of[device]] for device in range(9)}
    along = [
        [site[stage[0]] for stage in stages]
        for stages in stage_sequences(cluster)
        if all(len({site[device] for device in stage}) == 1 for stage in stages)
        and len({site[device] for stage in stages for device in stage}) == 3
    ]
    assert any(sum(a != b for a, b in pairwise(each)) == 2 for each in along)
    assert any(len(each) == 3 for each in along)
    assert [0, 1, 2] in along
    assert [2, 1, 0] in along


def test_few_hosts_at_two_sites_are_not_taken_for_each_other() -> None:
    """A file that lists them in turn: a stage of each site is among the sequences."""
    found = stage_sequences(sites((0, 1, 0, 1), {(0, 1): 0.5}))
    assert ((0, 2), (1, 3)) in found
    assert ((0, 2), (1, 3)) not in stage_sequences(cluster_of(*((10.0, ["T4"]),) * 4))


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_brute_force(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(2, 6)
    seconds = [[rng.random() for _ in range(count)] for _ in range(count)]
    seconds = [[seconds[min(a, b)][max(a, b)] for b in range(count)] for a in range(count)]

    def along(order: Sequence[int]) -> float:
        return sum(seconds[a][b] for a, b in pairwise(order))

    best = min(map(along, permutations(range(count))))
    assert along(_shortest_path(seconds)) == pytest.approx(best)
    assert sorted(_greedy_path(seconds)) == list(range(count))
    assert along(_greedy_path(seconds)) >= best * (1 - 1e-12)


def test_very_many_hosts_are_left_as_they_are() -> None:
    (everybody,) = communities(cluster_of(*((float(1 + n % 2), ["T4"]) for n in range(130))))
    assert len(everybody) == 130
