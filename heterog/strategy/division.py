"""Divisions of work among devices, and the rings of devices that sum gradients.

A division says which samples of the batch, and units of other axes, each device has.
A group's devices are cut into *teams*. A team takes one range of the batch, in the order of the
teams. Inside a team, ops that follow the batch split the team's samples over its members, in the
members' order. An op with a rule (``OpRule``) runs on every member, on all samples of the team and
on the member's own units of the rule's axis. One team of all devices is plain data parallelism or
plain tensor parallelism, teams of one device are data parallelism alone, and both together are
what Megatron-LM calls a grid (Narayanan et al. 2021, section 3).

A gradient is a sum over samples. Devices that computed the same part of the sum, such as members
of a team that all run a whole op, count as one, because the part must enter once. If a parameter
lives in slices, the members of different teams that hold the same interval form a ring. Teams with
equal cuts give one ring for each position, other teams one for each interval between all cuts.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.graph.axis_plan import EVERYWHERE

IntArray = npt.NDArray[np.int32]


class Division(NamedTuple):
    """Devices with their shares, teams and parts, as in ``Decision``; groups may share one."""

    devices: tuple[int, ...]
    shares: tuple[int, ...]
    teams: tuple[tuple[int, ...], ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def all_teams(self) -> tuple[tuple[int, ...], ...]:
        """The teams; if none are given, one of all devices."""
        return self.teams or (self.devices,)

    def units(self, units: int) -> list[tuple[int, ...]]:
        """Units of an axis of each member of each team, in proportion to parts or shares."""
        weights = dict(zip(self.devices, self.parts or self.shares, strict=True))
        return [
            axis_shares(units, tuple(weights[device] for device in team))
            for team in self.all_teams
        ]


class DivisionCut(NamedTuple):
    """The samples of one division, by micro-batch and device.

    Begins of ranges count from the first sample of the micro-batch. Devices outside the division
    have zeros, and -1 as team and position.
    """

    own: IntArray  # samples of each device  # [num_micro, num_devices]
    own_begin: IntArray  # [num_micro, num_devices]
    team_samples: IntArray  # of each device's team  # [num_micro, num_devices]
    team_begin: IntArray  # [num_micro, num_devices]
    team: IntArray  # number of each device's team  # [num_devices]
    position: IntArray  # of each device in its team  # [num_devices]


def cut_division(
    division: Division,
    num_devices: int,
    micro_batches: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
) -> DivisionCut:
    """Cut the micro-batches among the devices of a division.

    Args:
        division: A division whose shares add up to the batch.
        num_devices: Number of devices of the cluster.
        micro_batches: Micro-batches of a ``Strategy``; empty if the step runs in one go.
        sizes: Number of samples of each micro-batch; ``Strategy.micro_sizes``.
    """
    own = np.zeros((max(len(sizes), 1), num_devices), np.int32)
    own[:, list(division.devices)] = micro_shares(division, micro_batches, sizes)
    own_begin, team_samples, team_begin = (np.zeros_like(own) for _ in range(3))
    team = np.full(num_devices, -1, np.int32)
    position = np.full(num_devices, -1, np.int32)
    # Devices in the order in which they take samples: team after team, member after member.
    teams = division.all_teams
    sizes_of_teams = [len(members) for members in teams]
    members = [device for each in teams for device in each]
    number = np.repeat(np.arange(len(teams)), sizes_of_teams)
    first = np.cumsum([0, *sizes_of_teams[:-1]])
    taken = own[:, members]
    begin = np.cumsum(taken, axis=1, dtype=np.int32) - taken
    own_begin[:, members] = begin
    team_begin[:, members] = begin[:, first[number]]
    team_samples[:, members] = np.add.reduceat(taken, first, axis=1)[:, number]
    team[members], position[members] = number, np.arange(len(members)) - first[number]
    return DivisionCut(own, own_begin, team_samples, team_begin, team, position)


def micro_shares(
    division: Division, micro_batches: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> IntArray:
    """Samples of each micro-batch on each device of a division.

    Rows are the strategy's own micro-batches if these add up to the division's shares. Otherwise
    each micro-batch is cut in proportion to the remaining shares, first among the teams, then
    inside each, so that every row and column adds up.

    Returns:
        # [num_micro, devices of the division]
    """
    devices, shares = division.devices, division.shares
    if not micro_batches:
        return np.array([shares], np.int32)
    own = np.array([micro_batches[device] for device in devices], np.int32).T
    if tuple(own.sum(axis=0)) == shares:
        return own
    place = {device: index for index, device in enumerate(devices)}
    columns = [[place[device] for device in team] for team in division.all_teams]
    left = np.array(shares, np.int32)
    rows = np.zeros((len(sizes), len(devices)), np.int32)
    for row, size in zip(rows, sizes, strict=True):
        of_teams = _taken(size, [int(left[team].sum()) for team in columns])
        for team, count in zip(columns, of_teams, strict=True):
            if count:
                row[team] = _taken(count, left[team].tolist())
        left -= row
    return rows


def micro_sizes(
    micro_batches: tuple[tuple[int, ...], ...], divisions: Iterable[Division], batch_size: int
) -> tuple[int, ...]:
    """Number of samples of each micro-batch of a step; empty if it runs in one go.

    The table may list samples for each device even if several divisions each have the whole batch.
    Then the sizes are those of the first division whose devices' samples add up to its shares.
    """
    sizes = _sums(micro_batches)
    if not sizes or sum(sizes) == batch_size:
        return sizes
    for division in divisions:
        own = np.array([micro_batches[device] for device in division.devices], np.int32).T
        if tuple(own.sum(axis=0)) == division.shares:
            return tuple(own.sum(axis=1).tolist())
    return sizes


@lru_cache(maxsize=256)
def _sums(micro_batches: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Samples of all devices in each micro-batch."""
    return tuple(map(sum, zip(*micro_batches, strict=True)))


@lru_cache(maxsize=256)
def micro_batch_table(
    sizes: tuple[int, ...], num_devices: int, first: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Table of micro-batches of given sizes, which every group cuts in proportion to its shares.

    All samples are in the row of device ``first``. Empty for a single micro-batch.

    >>> micro_batch_table((3, 2), 3)
    ((3, 2), (0, 0), (0, 0))
    """
    if len(sizes) < 2:
        return ()
    idle = (0,) * len(sizes)
    return tuple(sizes if device == first else idle for device in range(num_devices))


def is_cut_alike(
    micro_batches: tuple[tuple[int, ...], ...], divisions: Iterable[Division], batch_size: int
) -> bool:
    """Whether all divisions have the whole batch and the same samples in each micro-batch."""
    divisions = tuple(divisions)
    sizes = micro_sizes(micro_batches, divisions, batch_size)
    return (
        sum(sizes) == batch_size
        and min(map(min, micro_batches)) >= 0
        and min(sizes) >= 1
        and (
            sum(map(sum, micro_batches)) == batch_size  # every division cuts these micro-batches
            or all(
                tuple(micro_shares(division, micro_batches, sizes).sum(axis=1)) == sizes
                for division in divisions
            )
        )
    )


def batch_shares(shares: tuple[int, ...], batch_size: int) -> tuple[int, ...]:
    """Number of samples of each device, in proportion to its shares on another batch.

    >>> batch_shares((5, 2, 1), 8), batch_shares((5, 2, 1), 4)
    ((5, 2, 1), (3, 1, 0))
    """
    return shares if sum(shares) == batch_size else split_in_proportion(batch_size, shares)


def axis_shares(units: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Number of units of an axis of each device, in proportion to weights.

    >>> axis_shares(16, (5, 2, 1)), axis_shares(EVERYWHERE, (5, 0, 3)), axis_shares(4, (0, 0))
    ((10, 4, 2), (1, 0, 1), (0, 0))
    """
    if units == EVERYWHERE:
        return tuple(int(weight > 0) for weight in weights)
    return split_in_proportion(units, weights) if any(weights) else (0,) * len(weights)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split into whole numbers as equal as possible, the larger ones first.

    >>> split_evenly(10, 4)
    (3, 3, 2, 2)
    """
    small, extra = divmod(total, parts)
    return tuple(small + (index < extra) for index in range(parts))


def split_in_proportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split into whole numbers in proportion to weights, by largest remainder; ties to the first.

    >>> split_in_proportion(10, (2.0, 1.0, 1.0))
    (5, 3, 2)
    """
    scale = total / sum(weights)
    exact = [weight * scale for weight in weights]
    counts = [int(value) for value in exact]
    if missing := total - sum(counts):
        by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
        for index in by_remainder[:missing]:
            counts[index] += 1
    return tuple(counts)


def _taken(size: int, left: list[int]) -> tuple[int, ...]:
    """Cut a size in proportion to remaining shares, and never take more than remains of one."""
    row = split_in_proportion(size, left)
    counts = [min(count, limit) for count, limit in zip(row, left, strict=True)]
    missing = size - sum(counts)
    for index, limit in enumerate(left):
        extra = min(missing, limit - counts[index])
        counts[index] += extra
        missing -= extra
    return tuple(counts)


class Ring(NamedTuple):
    """Devices that sum a part of each gradient of a group; see ``gradient_rings``."""

    devices: tuple[int, ...]
    """Members of the ring, ascending."""
    whole: tuple[int, ...]
    """Members whose part of the parameter is exactly the range that the ring sums."""
    begin: int = 0
    end: int = 0
    """Range of units of the parameter's axis that are summed; all of the parameter if equal."""
    part: float = 1.0
    is_once: bool = False
    """Whether all members of a team have the same part of the sum, which is added once."""
    slices: tuple[int, ...] = ()
    """Relative size of each member's slice of the sum, as in ``Decision``."""

    @property
    def slice_parts(self) -> tuple[float, ...]:
        """Fraction of the ring's sum that each member owns under ZeRO; sums to 1."""
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
        within_teams: Whether no gradient is summed between teams (a mode that ``trains_apart``);
            only without op rules, which cannot be combined with it.

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
    # If the slices of all members of a ring are 0, the ring is sliced evenly.
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
