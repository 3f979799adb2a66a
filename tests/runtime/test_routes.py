"""Slices are summed and gathered by host: what ranks send is what channels are priced for."""

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from heterog.cluster import Cluster
from heterog.lowering.channels import ChannelTable
from heterog.runtime.step.collectives import Communicator, slice_counts
from heterog.runtime.step.routes import Route, route_of
from tests.runtime.ranks import Ranks
from tests.simulator.builders import cluster_of
from tests.thorough import cases

_NUM = 5040
"""Elements of a tensor; divisible by every number of members."""
_Sent = Iterator[tuple[int, int, int]]
"""Source, destination and number of elements."""


def _routes(
    hosts: tuple[int, ...], counts: tuple[int, ...], members: tuple[int, ...]
) -> list[Route]:
    return [route_of(rank, hosts, counts, members) for rank in range(len(hosts))]


def _sent(routes: list[Route], level: Literal["given", "passed"]) -> _Sent:
    for rank, route in enumerate(routes):
        for peer, _, begin, end in getattr(route, level):
            yield rank, peer, end - begin


def _by_channel(
    cluster: Cluster, slices: tuple[int, ...]
) -> tuple[dict[int, float], tuple[float, ...]]:
    table = ChannelTable(cluster)
    channel = table[table.reduce_scatter(tuple(range(cluster.num_devices)), slices)]
    return channel.traffic(), channel.slices


@pytest.mark.parametrize(
    ("sizes", "of_hosts"),
    [
        ((2, 2), (1, 1)),
        ((8, 8), (1, 1)),
        ((1, 3), (1, 3)),
        ((4, 2, 3), (4, 2, 3)),
        ((2, 2, 2), (5, 3, 2)),
        ((3, 1, 2), (1, 0, 4)),
        ((1, 1, 1), (3, 2, 1)),
        ((4,), (1,)),
    ],
)
def test_links_carry_what_the_channel_says(
    sizes: tuple[int, ...], of_hosts: tuple[int, ...]
) -> None:
    """Slices are equal on a host; ``of_hosts`` are in proportion to what all of a host own."""
    cluster = cluster_of(*((10.0, ["T4"] * size) for size in sizes))
    hosts = cluster.host_of
    slices = tuple(840 * of_hosts[h] // sizes[h] for h in hosts)
    priced, parts = _by_channel(cluster, slices)
    counts = tuple(slice_counts(_NUM * sum(slices), parts))
    routes = _routes(hosts, counts, tuple(range(len(hosts))))
    carried: Counter[int] = Counter()
    for level in ("given", "passed"):
        for src, dst, number in _sent(routes, level):
            assert (hosts[src] == hosts[dst]) == (level == "given")
            for link in cluster.route(src, dst):
                carried[link] += number
    expected = {link: part for link, part in priced.items() if part}
    assert {link: number / sum(counts) for link, number in carried.items()} == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("seed", range(cases(60, 15)))
def test_each_part_is_summed_once_and_each_message_is_expected(seed: int) -> None:
    rng = Random(seed)
    hosts = tuple(rng.randrange(3) for _ in range(rng.randint(2, 7)))
    ranks = range(len(hosts))
    counts = tuple(rng.choice((0, 1, 5, 12)) for _ in ranks)
    members = tuple(sorted(rng.sample(ranks, rng.randint(1, len(hosts)))))
    routes = _routes(hosts, counts, members)
    for ways in (("given", "taken"), ("passed", "got")):
        sent, received = (
            Counter(
                (rank, m.peer, *m[1:]) if way in ("given", "passed") else (m.peer, rank, *m[1:])
                for rank, route in enumerate(routes)
                for m in getattr(route, way)
            )
            for way in ways
        )
        assert sent == received
        assert set(sent.values()) <= {1}
    for owner, count in enumerate(counts):
        parts = [[] if rank not in members else [rank] for rank in ranks]
        for element in range(count):
            summed = [Counter(each) for each in parts]
            for level in ("taken", "got"):
                before = [each.copy() for each in summed]
                for rank, route in enumerate(routes):
                    for m in getattr(route, level):
                        if m.owner == owner and m.begin <= element < m.end:
                            summed[rank] += before[m.peer]
            assert summed[owner] == Counter(members), "each member's part, once"


HOSTS = (0, 0, 1, 1)
ALL = (0, 1, 2, 3)


class _Counting(Communicator):
    """Counts the bytes that it sends to other hosts."""

    num_bytes = 0

    def _start_send(
        self,
        tensor: torch.Tensor,
        dst: int,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
    ) -> dist.Work | None:
        if HOSTS[dst] != HOSTS[self.rank]:
            self.num_bytes += tensor.nbytes
        return super()._start_send(tensor, dst, group, tag)


def exchange_in_two_levels(rank: int, size: int) -> tuple[list[bool], int]:
    """Whether sums and gathers of uneven slices are right, and bytes sent to the other host."""
    communicator = _Counting(rank, [ALL], HOSTS)
    counts = slice_counts(size, (0.4, 0.1, 0.2, 0.3))
    whole = (torch.arange(size) % 97).float()
    begin = sum(counts[:rank])
    own = slice(begin, begin + counts[rank])
    flat, some, right = whole * (rank + 1), (1, 2, 3), []
    under_way = [  # all before the first wait
        communicator.reduce_scatter(flat, ALL, counts),
        communicator.reduce_scatter_slices(
            whole * rank if rank in some else None, ALL, counts, some, like=whole
        ),
        communicator.all_gather(torch.full((rank,), float(rank)), ALL, list(ALL), torch.cat),
    ]
    summed, fewer, gathered = (each.wait() for each in under_way)
    right += [torch.equal(summed, (10 * whole)[own])]
    right += [torch.equal(fewer, (6 * whole)[own])]
    right += [gathered.tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]]
    right += [torch.equal(communicator.all_gather_slices(flat, ALL, counts).wait(), 10 * whole)]
    at_some = communicator.gather_slices(fewer, ALL, counts, some)
    assert (at_some is not None) == (rank in some)
    if at_some is not None:
        right += [torch.equal(at_some.wait(), 6 * whole)]
    communicator.flush()
    return right, communicator.num_bytes


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1000, 1 << 22], ids=["at once", "in turns"])
def test_four_ranks_on_two_hosts(four_ranks: Ranks, size: int) -> None:
    found = four_ranks.run(exchange_in_two_levels, size)
    assert all(all(right) for right, _ in found)
    # Four times each host the other's slices or its own, and 1 + 5 elements.
    assert sum(num_bytes for _, num_bytes in found) == 4 * (4 * size + 6)
