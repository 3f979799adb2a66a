"""Rings: the devices that sum the gradients of a group's parameters, and which part of them.

A gradient is a sum over samples. Devices that computed the same part of the sum count as one,
or it would count several times: the members of a team that all run a whole op, say. Where a
parameter lives in slices, the members of different teams that hold the same interval form a ring;
teams that are cut alike give one ring for each position, others one for each interval between the
cuts of all teams.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from heterog.strategy.division import Division


class Ring(NamedTuple):
    """Devices that sum a part of each gradient of a group; see ``gradient_rings``."""

    devices: tuple[int, ...]
    """Members of the ring, ascending."""
    whole: tuple[int, ...]
    """Members that hold no more of the parameter than the ring sums."""
    begin: int = 0
    end: int = 0
    """Range of units of the parameter's axis that are summed; all of the parameter if equal."""
    part: float = 1.0
    is_once: bool = False
    """Whether all members of a team have the same part of the sum, which is added once."""
    slices: tuple[int, ...] = ()
    """Relative slice of each member of what the ring sums, as in ``Decision``."""

    @property
    def slice_parts(self) -> tuple[float, ...]:
        """Fraction of what the ring sums that each member owns under ZeRO; sums to 1."""
        weights = self.slices or (1,) * len(self.devices)
        return tuple(weight / sum(weights) for weight in weights)


@lru_cache(maxsize=1 << 12)
def gradient_rings(
    division: Division, axes: tuple[int, ...], within_teams: bool = False
) -> tuple[tuple[Ring, ...], ...]:
    """Find the rings of a division for each ``Domain`` of gradients.

    Args:
        division: Devices, shares and teams.
        axes: Number of units of every axis but the batch.
        within_teams: Whether no gradient is summed between teams (``Averaging``); only without op
            rules, which cannot be combined with it.

    Returns:
        Rings for ``ALL``, ``PEERS``, ``TEAM``, then for slices along each axis; without rings of
        one device.
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


def slice_rings(
    ring: Ring, slice_groups: Sequence[Sequence[int]], slice_of: Mapping[int, int]
) -> tuple[Ring, ...]:
    """Cut a ring into parts that each keep one copy in slices; without slice groups, itself.

    Args:
        ring: A ring of a decision.
        slice_groups: ``Decision.slice_groups``.
        slice_of: Relative slice of each device; none if all are equal.
    """
    parts = [tuple(device for device in ring.devices if device in each) for each in slice_groups]
    rings = [
        ring._replace(devices=part, whole=tuple(d for d in ring.whole if d in part))
        for part in parts
        if part
    ] or [ring]
    if not slice_of:
        return tuple(rings)
    slices = [tuple(slice_of[device] for device in each.devices) for each in rings]
    # Members without any elsewhere get even ones here.
    return tuple(
        each._replace(slices=own if any(own) else ())
        for each, own in zip(rings, slices, strict=True)
    )


def _interval_rings(
    teams: Sequence[tuple[int, ...]], units: Sequence[tuple[int, ...]]
) -> tuple[Ring, ...]:
    """Make a ring of the members that hold each interval between the cuts of all teams."""
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
