"""Rings: which devices add up the gradients of a group's parameters, and which part of them.

A gradient is a sum over samples. Devices that computed the same part of the sum are one holder,
or it would count several times: the members of a team that all do the whole of an op, say. Where a
parameter lives in slices, the members of different teams that hold the same interval form a ring;
teams that are cut alike give one ring for each position, others one for each interval between the
cuts of all teams.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from heterog.strategy.division import Division


class Ring(NamedTuple):
    """Devices that add up a part of each gradient of a group; see ``gradient_rings``."""

    devices: tuple[int, ...]
    """Ascending."""
    whole: tuple[int, ...]
    """Those that hold no more of the parameter than the ring adds up."""
    begin: int = 0
    end: int = 0
    """Units of the parameter's axis that are added up; all of a whole parameter if equal."""
    part: float = 1.0
    is_once: bool = False
    """All members of a team have the same part of the sum; it is added up once."""


@lru_cache(maxsize=1 << 12)
def gradient_rings(
    division: Division, axes: tuple[int, ...], within_teams: bool = False
) -> tuple[tuple[Ring, ...], ...]:
    """The rings of a division for each ``Domain`` of gradients.

    Args:
        division: devices, shares and teams.
        axes: units of every axis but the batch.
        within_teams: no gradient is summed between teams (``Averaging``); without op rules, which
            do not go with it.

    Returns:
        For ``ALL``, ``PEERS``, ``TEAM``, then for slices along each axis; rings of one device are
        left out.
    """
    everyone, teams = division.devices, division.all_teams
    all_ = [Ring(everyone, everyone)]
    inside = [Ring(tuple(sorted(team)), tuple(team)) for team in teams]
    if len({len(team) for team in teams}) == 1:
        peers = [
            Ring(ring := tuple(sorted(members)), ring) for members in zip(*teams, strict=True)
        ]
    else:
        peers = [Ring(everyone, everyone, is_once=True)]
    if len(teams) == 1 or within_teams:
        peers = []
    if within_teams:
        all_ = inside
    slices = [_interval_rings(teams, division.units(units)) if units else () for units in axes]
    return tuple(
        tuple(ring for ring in rings if len(ring.devices) > 1)
        for rings in (all_, peers, inside, *slices)
    )


def slice_rings(ring: Ring, slice_groups: Sequence[Sequence[int]]) -> tuple[Ring, ...]:
    """The parts of a ring that keep one copy in slices each; itself without slice groups.

    Args:
        ring: of a decision.
        slice_groups: of the decision; see there.
    """
    parts = [tuple(device for device in ring.devices if device in each) for each in slice_groups]
    return tuple(
        ring._replace(devices=part, whole=tuple(d for d in ring.whole if d in part))
        for part in parts
        if part
    ) or (ring,)


def _interval_rings(
    teams: Sequence[tuple[int, ...]], units: Sequence[tuple[int, ...]]
) -> tuple[Ring, ...]:
    """One ring for each interval between the cuts of all teams: the members that hold it."""
    ranges = {
        device: (sum(counts[:place]), sum(counts[: place + 1]))
        for team, counts in zip(teams, units, strict=True)
        for place, device in enumerate(team)
        if counts[place]
    }
    cuts = sorted({cut for span in ranges.values() for cut in span})
    rings = []
    for begin, end in pairwise(cuts):
        devices = tuple(sorted(d for d, (low, high) in ranges.items() if low <= begin < high))
        whole = tuple(device for device in devices if ranges[device] == (begin, end))
        rings.append(Ring(devices, whole, begin, end, (end - begin) / cuts[-1]))
    return tuple(rings)
