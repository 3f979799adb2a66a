"""Who sends what to whom when slices are summed or gathered: inside hosts, then between them.

Each other host sends the owner of a slice one message per piece, so that networks carry no part
twice. Before, the members of a host add up their parts of a piece at one of them, the *relay*. A
gather is the same with everything reversed: the owner sends a piece to the relay of each other
host, which forwards it to the members. On its own host the owner is the relay.

The members of a host are relays of equal parts of what another host owns if slices there are
equal. With L members here and G there, member k passes on what lies between k / L and (k + 1) / L
of the G slices, each counted as one; so with L = G each passes on one whole slice, and no other
number of messages would be smaller.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from heterog.grouped import grouped


class Message(NamedTuple):
    """Elements ``begin`` to ``end`` of a slice, on their way to another rank or from it.

    Ranks are positions in a device set.

    Attributes:
        peer: The other rank.
        owner: Owner of the slice.
        begin: First element, from the beginning of the slice.
        end: The element after the last one.
    """

    peer: int
    owner: int
    begin: int
    end: int


class Route(NamedTuple):
    """Messages of one rank when slices are summed; when they are gathered, they go backwards.

    Messages to one peer are in the order in which it expects them.

    Attributes:
        given: Inside the host: parts that this rank sends to relays.
        taken: Parts that it adds up as a relay, its own slice's among them.
        passed: Between hosts: pieces that it passes on as a relay, to their owners.
        got: Pieces of its own slice, from the relays of other hosts.
    """

    given: tuple[Message, ...]
    taken: tuple[Message, ...]
    passed: tuple[Message, ...]
    got: tuple[Message, ...]


@lru_cache(4096)
def route_of(
    rank: int, hosts: tuple[int, ...], counts: tuple[int, ...], members: tuple[int, ...]
) -> Route:
    """The messages of one rank of a device set; see the module.

    Args:
        rank: The rank, as a position in the set.
        hosts: Host of each rank.
        counts: Number of elements of each rank's slice.
        members: Ranks with a tensor to be summed, or that gather one, ascending.
    """
    neighbours, here = grouped((hosts[each], each) for each in members), hosts[rank]
    local, on_host = neighbours.get(here, []), grouped(zip(hosts, range(len(hosts)), strict=True))
    given, taken, passed = [], [], []
    for owner, count in enumerate(counts):
        if not local or not count:
            continue
        is_own, others = hosts[owner] == here, on_host[hosts[owner]]
        for relay, begin, end in (
            [(owner, 0, count)]
            if is_own
            else _relays(local, others.index(owner), len(others), count)
        ):
            if relay != rank:
                given += [Message(relay, owner, begin, end)] * (rank in local)
                continue
            taken += [Message(each, owner, begin, end) for each in local if each != rank]
            passed += [Message(owner, owner, begin, end)] * (not is_own)
    place, num = on_host[here].index(rank), len(on_host[here])
    got = [
        Message(relay, rank, begin, end)
        for host, others in neighbours.items()
        if host != here
        for relay, begin, end in _relays(others, place, num, counts[rank])
    ]
    return Route(tuple(given), tuple(taken), tuple(passed), tuple(got))


def _relays(
    members: Sequence[int], place: int, num_owners: int, count: int
) -> list[tuple[int, int, int]]:
    """Relays of one slice on a host that does not own it, with the elements that each passes on.

    Args:
        members: The host's members.
        place: Place of the slice's owner among the owners on its own host.
        num_owners: Number of these owners.
        count: Number of elements of the slice.
    """
    num = len(members)
    first, last = place * num // num_owners, -(-(place + 1) * num // num_owners)
    ends = [
        min(max(count * (k * num_owners - place * num) // num, 0), count)
        for k in range(first, last + 1)
    ]
    found = zip(members[first:last], ends, ends[1:], strict=False)
    return [(relay, begin, end) for relay, begin, end in found if begin < end]
