"""Folding: devices that do the same are lowered only once.

In today's layouts most devices have a twin: replicas run the same micro-batches of other samples,
members of a team run the same ops on other slices. A *fold* keeps one device of each class of
twins, a *column*, and lowers only the columns. So the cost of an evaluation depends on the
distinct parts of a strategy and not on how often they are repeated.

The devices of a division form a grid of *lanes* (its teams, each an interval of samples) and
*positions* (the members of a team). If divisions have different numbers of teams, several
consecutive teams are a lane, so that the number of lanes is the greatest common divisor of these
numbers. Two lanes are twins if the strategy treats them equally, on devices of one type and hosts
of one kind. Two positions are twins in the same way, if all divisions have the same positions.
Twins send at the same time, so they must send over separate links; the caller checks this
(``simulator.runs``).

Not everything can be folded. A value that goes from one lane to another has no place in a fold:
the kernel notices it (``APART``) and the caller lowers all devices. If only the first of several
devices has work (to send a sum that all of them have), the column does this work, because it is
the first of its class. So no time or memory is left out.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.lowering.choice import Choice, Rings, Teams
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tape import Turns


@dataclass(frozen=True, kw_only=True, eq=False)
class Fold:
    """Classes of devices that do the same.

    Attributes:
        columns: Devices that are lowered, ascending.  # [num_columns]
        column_of: Index in ``columns`` of each device's twin, -1 for devices without work.
            # [num_devices]
        grids: Devices by lane and position, one grid for each set of divisions over the same
            devices; all grids have the same number of lanes.  # [num_lanes, num_positions] each
        lane_twin: First twin of each lane.  # [num_lanes]
        position_twin: First twin of each position; the position itself if grids have different
            numbers of positions.  # [most positions of a grid]
    """

    columns: IntArray
    column_of: IntArray
    grids: tuple[IntArray, ...]
    lane_twin: IntArray
    position_twin: IntArray

    @cached_property
    def _places(self) -> dict[int, tuple[int, int, int]]:
        return {
            int(device): (number, lane, position)
            for number, grid in enumerate(self.grids)
            for (lane, position), device in np.ndenumerate(grid)
        }

    def lane_of(self, devices: Sequence[int]) -> int | None:
        """The lane of some devices; ``None`` if they are in several."""
        lanes = {self._places[device][1] for device in devices}
        return lanes.pop() if len(lanes) == 1 else None

    def position_of(self, devices: Sequence[int]) -> int | None:
        """The position of some devices; ``None`` if they are in several."""
        positions = {self._places[device][2] for device in devices}
        return positions.pop() if len(positions) == 1 else None

    def twins(self, devices: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """All sets of devices that do the same as the given devices, including these."""
        lane, position = self.lane_of(devices), self.position_of(devices)
        for to_lane in _alike(self.lane_twin, lane):
            for to_position in _alike(self.position_twin, position):
                yield tuple(
                    int(
                        self.grids[grid][
                            own_lane if to_lane is None else to_lane,
                            own_position if to_position is None else to_position,
                        ]
                    )
                    for grid, own_lane, own_position in map(self._places.__getitem__, devices)
                )

    def unfolded(self, of_column: FloatArray) -> FloatArray:
        """Spread a value of each column to all its devices; 0 for devices without work."""
        return np.where(self.column_of >= 0, of_column[self.column_of], 0.0)

    @property
    def stands_for(self) -> IntArray:
        """Number of devices that each column represents.  # [num_columns]"""
        active = self.column_of[self.column_of >= 0]
        return np.bincount(active, minlength=len(self.columns)).astype(np.int32)


def hardware_of(cluster: Cluster) -> IntArray:
    """Class of each device: one type and as much memory, on hosts alike.  # [num_devices]"""
    of_host = [
        (host.intra, host.nic_line_rate_bytes_per_s, host.nic_latency_s, host.collectives)
        for host in cluster.hosts
    ]
    host_class = _twins(of_host).tolist()
    return _twins(
        [
            (kind, device.usable_memory_bytes, host_class[host])
            for kind, device, host in zip(
                cluster.type_index, cluster.devices, cluster.host_of, strict=True
            )
        ]
    )


def folds(
    choice: Choice, cluster: Cluster, hardware: IntArray, *, minds_position: bool = False
) -> Iterator[Fold]:
    """Find the folds of a choice: of lanes and positions together, then of fewer of them.

    There are none if no two devices do the same, or if parameters have homes.

    Args:
        choice: The strategy.
        cluster: The devices.
        hardware: Their classes; see ``hardware_of``.
        minds_position: Whether members of a team do different work even with equal numbers of
            units.
    """
    grids = _grids(choice)
    if not grids or (choice.home >= 0).any():
        return
    says = _Signatures(choice, cluster, hardware, grids)
    num_lanes, num_positions = len(grids[0]), max(grid.shape[1] for grid in grids)
    lanes = says.twins_of_lanes()
    positions = np.arange(num_positions, dtype=np.int32)
    if says.have_the_same_positions and not minds_position:
        positions = says.twins_of_positions()
    seen = {num_lanes * num_positions}
    for lane_twin, position_twin in _pairs(says, lanes, positions):
        size = len(set(lane_twin)) * len(set(position_twin))
        if size not in seen:
            seen.add(size)
            yield _fold(cluster.num_devices, grids, lane_twin, position_twin)


def _pairs(
    says: "_Signatures", lanes: IntArray, positions: IntArray
) -> Iterator[tuple[IntArray, IntArray]]:
    """Twins of lanes and positions to fold together; usually the first pair can be used."""
    yield lanes, positions
    # If lanes share hosts, two lanes of one host match two lanes of another, in order.
    ranked = _twins([(int(twin), *says.rank(lanes, lane)) for lane, twin in enumerate(lanes)])
    yield ranked, positions
    apart = np.arange(len(positions), dtype=np.int32)
    yield lanes, apart
    yield ranked, apart
    yield np.arange(len(lanes), dtype=np.int32), positions


def channels_named(choice: Choice) -> tuple[IntArray, ...]:
    """Arrays of a choice with numbers of channels of collectives; -1 for none."""
    teams, rings = choice.teams, choice.rings
    return (
        *(choice.reduce_channel, choice.gather_channel),
        *(teams.reduce_channel, teams.gather_channel),
        *(teams.scatter_channel, teams.exchange_channel),
        *(rings.first_channel, rings.second_channel),
    )


def fold_choice(choice: Choice, fold: Fold) -> tuple[Choice, IntArray]:
    """Restrict a choice to the columns of a fold, and list the channels that it uses.

    Transfers between columns come first in the new numbering, then the collectives.

    Returns:
        The choice, and the number of each of its channels in the table.
    """
    columns, num_devices = fold.columns, len(fold.column_of)
    transfers = (columns[:, None] * num_devices + columns[None, :]).ravel()
    teams, rings = _folded_teams(choice.teams, columns), _folded_rings(choice.rings, fold)
    named = channels_named(choice._replace(teams=teams, rings=rings))
    collectives = np.unique(np.concatenate([each.ravel() for each in named]))
    collectives = collectives[collectives >= 0]

    def renumbered(numbers: IntArray) -> IntArray:
        places = np.searchsorted(collectives, numbers) + len(transfers)
        return np.where(numbers >= 0, places, -1).astype(np.int32)

    folded = choice._replace(
        shares=np.ascontiguousarray(choice.shares[..., columns]),
        member=np.ascontiguousarray(choice.member[:, columns]),
        teams=teams._replace(
            reduce_channel=renumbered(teams.reduce_channel),
            gather_channel=renumbered(teams.gather_channel),
            scatter_channel=renumbered(teams.scatter_channel),
            exchange_channel=renumbered(teams.exchange_channel),
        ),
        rings=rings._replace(
            first_channel=renumbered(rings.first_channel),
            second_channel=renumbered(rings.second_channel),
        ),
        reduce_channel=renumbered(choice.reduce_channel),
        gather_channel=renumbered(choice.gather_channel),
        stands_for=fold.stands_for,
        turns=_folded_turns(choice.turns, columns),
        sparse_rows=np.ascontiguousarray(choice.sparse_rows[..., columns[:, None], columns]),
    )
    return folded, np.concatenate([transfers, collectives]).astype(np.int32)


def _alike(twin: IntArray, place: int | None) -> Sequence[int | None]:
    """The twins of a lane or position; ``None``, which means several, has itself as only twin."""
    return [None] if place is None else np.flatnonzero(twin == twin[place]).tolist()


def _grids(choice: Choice) -> list[IntArray]:
    """The grids of lanes and positions; empty if the divisions do not fit common grids."""
    teams = choice.teams
    grids: list[IntArray] = []
    grid_of = np.full(teams.number.shape[1], -1)
    for division in range(len(teams.number) - 1):  # the last one is the division of constants
        members = np.flatnonzero(teams.number[division] >= 0)
        size = int(teams.size[division, members[0]])
        if (teams.size[division, members] != size).any():
            return []
        grid = np.empty((len(members) // size, size), np.int32)
        grid[teams.number[division, members], teams.position[division, members]] = members
        known = np.unique(grid_of[members]).tolist()
        if known == [-1]:
            grid_of[members] = len(grids)
            grids.append(grid)
        elif len(known) > 1 or not np.array_equal(grids[known[0]], grid):
            return []
    num_lanes = gcd(*(len(grid) for grid in grids))
    if choice.num_slice_lanes >= 0:  # members of a slice group stay in one lane
        num_lanes = gcd(num_lanes, choice.num_slice_lanes)
        if num_lanes == 0 or choice.num_slice_lanes == 0:
            return []
    return [grid.reshape(num_lanes, -1) for grid in grids]


class _Signatures:
    """Signatures of lanes and positions: equal ones are treated equally by the strategy.

    They contain numbers of samples and units, but not which samples and units.
    """

    def __init__(
        self, choice: Choice, cluster: Cluster, hardware: IntArray, grids: Sequence[IntArray]
    ) -> None:
        self._choice, self._hardware = choice, hardware
        self._cluster = cluster
        self._grids = grids
        self._host = np.array(cluster.host_of)
        # All devices of each lane, grid by grid.  # [num_lanes, devices of a lane]
        self._lanes = np.concatenate(grids, axis=1)
        sizes = choice.teams.size[:-1]
        self.have_the_same_positions = (
            len({grid.shape for grid in grids}) == 1
            and len(np.unique(sizes[choice.teams.number[:-1] >= 0])) == 1
            and int(sizes.max(initial=1)) == grids[0].shape[1]
        )

    def twins_of_lanes(self) -> IntArray:
        """First twin of each lane, by classes of its devices and which of them share a host."""
        return _equal_rows(self._first_there(), self._class[self._lanes])

    def twins_of_positions(self) -> IntArray:
        """First twin of each position, by classes and by team members on the same hosts."""
        devices = np.concatenate(self._grids).T  # [num_positions, members]
        host = self._host[devices]
        beside = (host == host[:, None]).sum(axis=0, dtype=np.int32)
        return _equal_rows(beside, self._class[devices])

    def _first_there(self) -> IntArray:
        """For each device of a lane, the place of the lane's first device on the same host.

        # [num_lanes, devices of a lane]
        """
        num_lanes, size = self._lanes.shape
        hosts = self._host[self._lanes] + self._cluster.num_hosts * np.arange(num_lanes)[:, None]
        _, first, number = np.unique(hosts, return_index=True, return_inverse=True)
        found: IntArray = (first[number] % size).reshape(num_lanes, size).astype(np.int32)
        return found

    def rank(self, lanes: IntArray, lane: int) -> tuple[int, ...]:
        """Number of earlier twins of a lane on its hosts, and number of all twins there."""
        alike = np.flatnonzero(lanes == lanes[lane])
        there = alike[self._on_host[np.ix_(self._lane_hosts[lane], alike)].any(axis=0)]
        return int(np.searchsorted(there, lane)), len(there)

    @cached_property
    def _lane_hosts(self) -> list[IntArray]:
        """Hosts of each lane."""
        return [np.unique(self._host[lane]) for lane in self._lanes]

    @cached_property
    def _on_host(self) -> npt.NDArray[np.bool_]:
        """Whether some device of a lane is on a host.  # [num_hosts, num_lanes]"""
        found = np.zeros((self._cluster.num_hosts, len(self._lanes)), np.bool_)
        for lane, hosts in enumerate(self._lane_hosts):
            found[hosts, lane] = True
        return found

    @cached_property
    def _class(self) -> IntArray:
        """Class of each device: equal hardware that the choice treats equally.  # [num_devices]"""
        return _equal_rows(self._hardware, self._said)

    @cached_property
    def _said(self) -> npt.NDArray[np.uint8]:
        """The entries of the choice's arrays for each device, as bytes.  # [num_devices, bytes]"""
        choice = self._choice
        teams, rings, turns = choice.teams, choice.rings, choice.turns
        of_rings = _parts_added(rings)
        said = [choice.shares, teams.samples, teams.units]
        said += [turns.chunk] if len(turns.chunk) else []
        by_device = [of_rings, *(np.moveaxis(each, -1, 0) for each in said)]
        by_device += [each for each in (turns.cap, turns.closing_op, turns.turn) if len(each)]
        num_devices = len(self._host)
        rows = [np.ascontiguousarray(each).reshape(num_devices, -1) for each in by_device]
        return np.concatenate([row.view(np.uint8) for row in rows], axis=1)


def _parts_added(rings: Rings) -> FloatArray:
    """The fractions that each device adds up in all of its rings, ascending; padded with -1.

    Returns:
        # [num_devices, most rings of a device]
    """
    ring, device = np.nonzero(rings.member > 0)
    part = (rings.part[ring] * rings.slice_part[ring, device]).round(12)
    order = np.lexsort((part, device))
    count = np.bincount(device, minlength=rings.member.shape[1])
    place = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    found = np.full((len(count), int(count.max(initial=0))), -1.0)
    found[device[order], place] = part[order]
    return found


def _twins(signatures: Sequence[Hashable]) -> IntArray:
    """Index of the first signature equal to each.  # [len(signatures)]"""
    first: dict[Hashable, int] = {}
    return np.array(
        [first.setdefault(each, place) for place, each in enumerate(signatures)], np.int32
    )


def _equal_rows(*columns: npt.NDArray[np.generic]) -> IntArray:
    """Index of the first row equal to each, in all of some arrays.  # [num_rows]"""
    rows = [np.ascontiguousarray(each).reshape(len(each), -1) for each in columns]
    joined = np.concatenate([row.view(np.uint8) for row in rows], axis=1)
    return _twins(joined.view(np.dtype((np.void, joined.shape[1]))).ravel().tolist())


def _fold(
    num_devices: int, grids: Sequence[IntArray], lane_twin: IntArray, position_twin: IntArray
) -> Fold:
    twin = np.full(num_devices, -1, np.int32)
    for grid in grids:
        places = position_twin[: grid.shape[1]]
        twin[grid.ravel()] = grid[np.ix_(lane_twin, places)].ravel()
    columns = np.unique(twin[twin >= 0])
    column_of = np.where(twin >= 0, np.searchsorted(columns, twin), -1)
    return Fold(
        columns=columns.astype(np.int32),
        column_of=column_of.astype(np.int32),
        grids=tuple(grids),
        lane_twin=lane_twin,
        position_twin=position_twin,
    )


def _folded_teams(teams: Teams, columns: IntArray) -> Teams:
    """Keep only some devices of the teams; numbers, places and sizes count the whole teams."""
    kept = {
        name: np.ascontiguousarray(getattr(teams, name)[..., columns])
        for name in teams._fields
        if name != "num_teams"
    }
    return teams._replace(**kept)


def _folded_rings(rings: Rings, fold: Fold) -> Rings:
    """Rings of the columns, each with the number of members that a column represents."""
    member = rings.member[:, fold.columns]
    # Sorted by column, so that the members of each column are one run to sum up.
    by_column = np.argsort(fold.column_of, kind="stable")[(fold.column_of < 0).sum() :]
    begins = np.searchsorted(fold.column_of[by_column], np.arange(len(fold.columns)))
    counts = np.add.reduceat(rings.member[:, by_column], begins, axis=1) * (member > 0)
    kept = np.flatnonzero(member.any(axis=1))
    # Rings of a group and domain are consecutive, and the kept ones remain so.
    place = np.concatenate([[0], np.cumsum(member.any(axis=1))]).astype(np.int32)
    return Rings(
        first=place[rings.first],
        end=place[rings.end],
        end_between=place[rings.end_between],
        first_channel=rings.first_channel[kept],
        second_channel=rings.second_channel[kept],
        part=rings.part[kept],
        member=np.ascontiguousarray(counts[kept].astype(np.int32)),
        is_once=rings.is_once[kept],
        is_whole=np.ascontiguousarray(rings.is_whole[kept][:, fold.columns]),
        slice_part=np.ascontiguousarray(rings.slice_part[kept][:, fold.columns]),
    )


def _folded_turns(turns: Turns, columns: IntArray) -> Turns:
    return turns._replace(
        chunk=np.ascontiguousarray(turns.chunk[:, columns]) if len(turns.chunk) else turns.chunk,
        cap=turns.cap[columns] if len(turns.cap) else turns.cap,
        closing_op=turns.closing_op[columns] if len(turns.closing_op) else turns.closing_op,
        turn=turns.turn[columns] if len(turns.turn) else turns.turn,
    )
