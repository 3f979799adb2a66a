"""A strategy in flat arrays, the input of the lowering kernel.

Where the rows of a sparse matrix are cut, it says how many devices read of each other. Every
reader's rows are counted once from the entries of the matrix, exactly: for each column how many of
those before it are read. What it reads of any other range of rows is then a difference.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from heterog.lowering.channels import ChannelTable
from heterog.lowering.kernel_arguments import by_reference
from heterog.lowering.kernels import helper
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.recuts import Recut
from heterog.lowering.tables import Domain, GraphTables
from heterog.lowering.tape import NO_SCHEDULE, Turns, encode_turns
from heterog.modes.mode import EncodedMode
from heterog.strategy.division import (
    Division,
    DivisionCut,
    Ring,
    batch_shares,
    cut_division,
    gradient_rings,
    micro_sizes,
)
from heterog.strategy.schedules import PipelineSchedule
from heterog.strategy.strategy import Decision, Strategy

_MOST_REMEMBERED = 2**25
"""Most counts that are kept, 8 bytes each: a search needs the same ranges of rows again."""


class HasUnits(Protocol):
    """A division, with the units of each device along every axis but the batch."""

    @property
    def units(self) -> IntArray:
        """Number of units.  # [num_axes - 1, num_devices]"""

    @property
    def unit_begin(self) -> IntArray:
        """First unit.  # [num_axes - 1, num_devices]"""


class SparseRows:
    """Counts rows by divisions, and remembers earlier counts.

    Args:
        tables: Tables of the graph and its op rules.
    """

    def __init__(self, tables: GraphTables) -> None:
        self._tables = tables
        self._before: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}
        self._num_remembered = 0

    def of(self, divisions: Sequence[HasUnits]) -> IntArray:
        """Number of rows of each owner that each reader reads; see ``Choice.sparse_rows``."""
        unit_begin = [each.unit_begin for each in divisions]
        units = [each.units for each in divisions]
        sparse, num_divisions = self._tables.sparse, len(units)
        num_devices = units[0].shape[1]
        shape = (len(sparse.axis), num_divisions, num_divisions, num_devices, num_devices)
        found = np.zeros(shape, np.int32)
        for matrix, axis in enumerate(sparse.axis.tolist()):
            starts, ends = self._row_bounds(matrix, axis, unit_begin, units, is_made=True)
            own_starts, own_ends = self._row_bounds(matrix, axis, unit_begin, units, is_made=False)
            for reading, device in np.argwhere(ends > starts).tolist():
                begin, end = int(starts[reading, device]), int(ends[reading, device])
                before = self._read_before(matrix, begin, end)
                found[matrix, reading, :, device, :] = before[own_ends] - before[own_starts]
        return found

    def _row_bounds(
        self,
        matrix: int,
        axis: int,
        unit_begin: Sequence[IntArray],
        units: Sequence[IntArray],
        *,
        is_made: bool,
    ) -> tuple[IntArray, IntArray]:
        """First and last row of each device of each division, of the result or of the input."""
        sparse = self._tables.sparse
        size = int(sparse.num_columns[matrix])
        if is_made:
            size = int(sparse.first_row[matrix + 1] - sparse.first_row[matrix]) - 1
        inner = size // int(self._tables.axis_units[axis])
        begin = np.stack([each[axis - 1] for each in unit_begin]) * inner
        return begin, begin + np.stack([each[axis - 1] for each in units]) * inner

    def _read_before(self, matrix: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """For each column, the number of columns before it that some rows of a matrix read."""
        key = matrix, begin, end
        if key not in self._before:
            sparse = self._tables.sparse
            size = int(sparse.num_columns[matrix])
            first, row = int(sparse.first_entry[matrix]), int(sparse.first_row[matrix])
            entries = first + sparse.row_starts[[row + begin, row + end]]
            is_read = np.zeros(size, np.bool_)
            is_read[sparse.columns[entries[0] : entries[1]]] = True
            if self._num_remembered + size > _MOST_REMEMBERED:
                self._before.clear()
                self._num_remembered = 0
            self._num_remembered += size
            self._before[key] = np.concatenate([[0], np.cumsum(is_read, dtype=np.int64)])
        return self._before[key]


BoolArray = npt.NDArray[np.bool_]
MicroBatches = tuple[tuple[int, ...], ...]
_MOST_TABLES = 256  # of micro-batches that an encoder remembers
_MOST_RINGS = 4096  # of decisions whose rings it remembers


@by_reference
class Teams(NamedTuple):
    """The teams of each division; see ``division``."""

    num_teams: IntArray  # [num_divisions]
    number: IntArray  # of each device's team, -1 outside  # [num_divisions, num_devices]
    position: IntArray  # of each device in its team  # [num_divisions, num_devices]
    size: IntArray  # of each device's team  # [num_divisions, num_devices]
    own_begin: IntArray  # first sample of each device  # [num_divisions, num_micro, num_devices]
    samples: IntArray  # of each device's team  # [num_divisions, num_micro, num_devices]
    begin: IntArray  # first of them  # [num_divisions, num_micro, num_devices]
    units: IntArray  # along each axis but the batch  # [num_axes * num_divisions, num_devices]
    unit_begin: IntArray  # first unit of each device
    reduce_channel: IntArray  # all-reduce in a team, -1 if alone  # [num_divisions, num_devices]
    gather_channel: IntArray  # all-gather in a team  # [num_divisions, num_devices]
    scatter_channel: IntArray  # reduce-scatter in a team  # [num_divisions, num_devices]
    exchange_channel: IntArray  # all-to-all in a team  # [num_divisions, num_devices]


@by_reference
class Rings(NamedTuple):
    """Rings of devices that sum gradients, for each group and ``Domain``."""

    first: IntArray  # [num_groups, num_domains]
    end: IntArray  # [num_groups, num_domains]
    # Those that add up slices between slice groups follow, up to here.
    end_between: IntArray  # [num_groups, num_domains]
    first_channel: IntArray  # all-reduce or reduce-scatter  # [num_rings]
    second_channel: IntArray  # all-gather, -1 if there is none  # [num_rings]
    part: FloatArray  # of each parameter that the ring adds up  # [num_rings]
    member: IntArray  # 1, or of how many members a column stands for  # [num_rings, num_devices]
    is_once: BoolArray  # all members of a team have the same part of the sum  # [num_rings]
    is_whole: BoolArray  # whether members hold no more of it than the ring adds up
    slice_part: FloatArray  # under ZeRO, the part of the ring's part that each owns


NO_ROWS: IntArray = np.zeros((0, 0, 0, 0, 0), np.int32)
"""Value where the strategy cuts no sparse matrix by rows."""


@by_reference
class Choice(NamedTuple):
    """A strategy in flat arrays.

    Groups share *divisions*. Division ``l`` along axis ``a`` of the tables is row
    ``a * num_divisions + l`` of the arrays over rows.
    """

    num_micro: int
    num_steps: int
    bucket_bytes: float
    division: IntArray  # of each group, the last entry for constants  # [num_groups + 1]
    shares: IntArray  # samples, or units if the team has samples  # [rows, num_micro, num_devices]
    member: BoolArray  # devices that hold a division's parameters  # [num_divisions, num_devices]
    teams: Teams
    sharded: IntArray  # how replicas of each group slice; see ``Sharded``
    sync_class: IntArray  # groups whose gradients may share buckets have the same number
    run: IntArray  # groups of a layer, or between two, that are in one chunk, likewise
    recompute: IntArray  # 0: a group keeps what its forward pass makes; 1 + its ``Keeps``
    rings: Rings
    reduce_channel: IntArray  # utility all-reduce of each division
    gather_channel: IntArray  # utility all-gather of each division
    home: IntArray  # of each parameter
    stands_for: IntArray  # devices that do alike; all ones unless folded  # [num_devices]
    rule_set: int = 0  # number of its op rules at the evaluator that encoded it
    turns: Turns = NO_SCHEDULE
    # Rows that the entries of a sparse matrix make one device read of what another owns.
    sparse_rows: IntArray = NO_ROWS  # [matrices, reading division, division, reader, owner]
    # Lanes of a fold that hold whole slice groups; 0: there is none, -1: any number of them does.
    num_slice_lanes: int = -1
    modes: tuple[EncodedMode, ...] = ()  # kernels get none


class DivisionRows(NamedTuple):
    """One division in flat arrays, before it enters a ``Choice``."""

    cut: DivisionCut
    units: IntArray  # along every axis but the batch  # [num_axes - 1, num_devices]
    unit_begin: IntArray  # [num_axes - 1, num_devices]
    member: BoolArray  # [num_devices]
    size: IntArray  # of each device's team  # [num_devices]
    reduce_channel: int
    gather_channel: int
    of_team: IntArray  # the four of each device's team; see ``Teams``  # [4, num_devices]


class RingRows(NamedTuple):
    """The rings of one decision in flat arrays, before they enter a ``Choice``."""

    counts: tuple[int, ...]  # rings of each domain
    counts_between: tuple[int, ...]  # those that follow them and add up slices between groups
    first_channel: list[int]
    second_channel: list[int]
    part: list[float]
    member: IntArray  # [num_rings, num_devices]
    is_once: list[bool]
    is_whole: BoolArray
    slice_part: FloatArray


def _recomputation(decisions: Sequence[Decision]) -> IntArray:
    return np.array([each.recompute * (1 + each.keeps) for each in decisions], np.int32)


def _sync_classes(decisions: Sequence[Decision]) -> IntArray:
    """A number for each way to synchronise; groups with the same one may share buckets."""
    numbers: dict[tuple[object, ...], int] = {}
    keys = [(each.division, each.sync, each.slices, each.slice_groups) for each in decisions]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)


class Decided(NamedTuple):
    """The decisions of all groups.

    Attributes:
        decisions: The distinct decisions.
        of_group: Number of each group's decision.  # [num_groups]
    """

    decisions: Sequence[Decision]
    of_group: IntArray


class Encoder:
    """Converts decisions to the kernel's arrays, and remembers earlier conversions.

    Args:
        tables: Tables of the graph and its op rules.
        channels: Table in which the channels of divisions and rings are registered.
    """

    def __init__(self, tables: GraphTables, channels: ChannelTable) -> None:
        self._tables = tables
        self._channels = channels
        self._num_devices = channels.cluster.num_devices
        self._has_scatters = bool((tables.op_recut == Recut.SUMMED).any())
        self._has_exchanges = bool((tables.op_recut == Recut.EXCHANGED).any())
        self._axes = tuple(int(units) for units in tables.axis_units[1:])
        self._rings: dict[tuple[object, ...], RingRows] = {}
        self._rows: dict[MicroBatches, dict[Division, DivisionRows]] = {}
        self._sparse_rows = SparseRows(tables)

    def encode(
        self,
        decided: Decided,
        *,
        micro_batches: MicroBatches,
        schedule: PipelineSchedule,
        home: IntArray,
        bucket_bytes: int,
        num_steps: int,
        within_teams: bool = False,
    ) -> Choice:
        """Convert a strategy to arrays; arguments without explanation are as in ``Strategy``.

        Args:
            decided: Decisions of all groups.
            micro_batches: See ``Strategy``.
            schedule: See ``Strategy``.
            home: Home of each parameter.
            bucket_bytes: See ``Strategy``.
            num_steps: Number of training steps to unroll.
            within_teams: Whether gradients are summed inside teams only.
        """
        decisions, of_group = decided
        divisions: dict[Division, int] = {}
        of_decision = [divisions.setdefault(each.division, len(divisions)) for each in decisions]
        sizes = micro_sizes(micro_batches, divisions, self._tables.batch_size)
        if len(self._rows) > _MOST_TABLES:
            self._rows.clear()
        known = self._rows.setdefault(micro_batches, {})
        for division in divisions.keys() - known.keys():
            known[division] = self._division(division, micro_batches, sizes)
        rows = [known[division] for division in divisions]
        rows += [self._constants(rows)]
        shares = [row.cut.own for row in rows]
        for axis in range(len(self._axes)):
            shares += [row.units[axis] * (row.cut.team_samples > 0) for row in rows]
        row_of_group = np.append(np.array(of_decision)[of_group], len(divisions)).astype(np.int32)
        all_shares = np.stack(shares).astype(np.int32)
        devices = [decisions[number].devices for number in of_group]
        return Choice(
            num_micro=len(sizes) or 1,
            num_steps=num_steps,
            bucket_bytes=float(bucket_bytes),
            division=row_of_group,
            shares=all_shares,
            member=np.stack([row.member for row in rows]),
            teams=self._teams(rows),
            sharded=np.array([int(each.sync.sharded) for each in decisions], np.int32)[of_group],
            sync_class=_sync_classes(decisions)[of_group],
            run=self._runs(schedule.chunk_starts),
            recompute=_recomputation(decisions)[of_group],
            rings=self._all_rings(decisions, of_group, within_teams),
            reduce_channel=np.array([row.reduce_channel for row in rows], np.int32),
            gather_channel=np.array([row.gather_channel for row in rows], np.int32),
            home=home,
            stands_for=np.ones(self._num_devices, np.int32),
            turns=encode_turns(schedule, self._tables, devices, row_of_group, all_shares),
            sparse_rows=self._sparse_rows.of(rows),
            num_slice_lanes=_num_slice_lanes(decisions),
        )

    def _runs(self, chunk_starts: Sequence[int]) -> IntArray:
        """See ``Choice.run``."""
        run = self._tables.group_run
        if not chunk_starts:
            return run
        chunk = np.searchsorted(sorted(chunk_starts), np.arange(len(run)), side="right")
        return (run + len(run) * chunk).astype(np.int32)

    def _teams(self, rows: Sequence[DivisionRows]) -> Teams:
        units = [np.zeros(self._num_devices, np.int32) for _ in rows]
        unit_begin = list(units)
        for axis in range(len(self._axes)):
            units += [row.units[axis] for row in rows]
            unit_begin += [row.unit_begin[axis] for row in rows]
        channels = np.stack([row.of_team for row in rows], axis=1)
        return Teams(
            num_teams=np.array([row.cut.team.max() + 1 for row in rows], np.int32),
            number=np.stack([row.cut.team for row in rows]),
            position=np.stack([row.cut.position for row in rows]),
            size=np.stack([row.size for row in rows]),
            own_begin=np.stack([row.cut.own_begin for row in rows]),
            samples=np.stack([row.cut.team_samples for row in rows]),
            begin=np.stack([row.cut.team_begin for row in rows]),
            units=np.stack(units),
            unit_begin=np.stack(unit_begin),
            reduce_channel=channels[0],
            gather_channel=channels[1],
            scatter_channel=channels[2],
            exchange_channel=channels[3],
        )

    def _division(
        self, division: Division, micro_batches: MicroBatches, sizes: tuple[int, ...]
    ) -> DivisionRows:
        num_devices, channels = self._num_devices, self._channels
        samples = division._replace(shares=batch_shares(division.shares, self._tables.batch_size))
        cut = cut_division(samples, num_devices, micro_batches, sizes)
        units = np.zeros((len(self._axes), num_devices), np.int32)
        begin = np.zeros_like(units)
        size = np.zeros(num_devices, np.int32)
        of_team = np.full((4, num_devices), -1, np.int32)
        for team in division.all_teams:
            members = list(team)
            size[members] = len(team)
            if len(team) > 1:
                ordered = tuple(sorted(team))
                own = channels.of_values(
                    ordered, scatters=self._has_scatters, exchanges=self._has_exchanges
                )
                of_team[:, members] = np.array(own)[:, None]
        for axis, total in enumerate(self._axes):
            for team, counts in zip(division.all_teams, division.units(total), strict=True):
                units[axis, list(team)] = counts
                begin[axis, list(team)] = np.cumsum(counts) - counts
        several = len(division.devices) > 1
        everyone = channels.of_values(division.devices) if several else (-1, -1)
        return DivisionRows(
            cut=cut,
            units=units,
            unit_begin=begin,
            member=np.isin(np.arange(num_devices), division.devices),
            size=size,
            reduce_channel=everyone[0],
            gather_channel=everyone[1],
            of_team=of_team,
        )

    def _constants(self, rows: Sequence[DivisionRows]) -> DivisionRows:
        """The division of constants, which every device that computes anything computes."""
        own = np.zeros_like(rows[0].cut.own)
        for row in rows:
            own |= row.cut.own > 0
            if len(self._axes):  # a device without samples may own units of another axis
                own |= (row.cut.team_samples > 0) & row.units.any(axis=0)
        nothing = np.zeros(self._num_devices, np.int32)
        units = np.tile(own.any(axis=0).astype(np.int32), (len(self._axes), 1))
        none = np.full(self._num_devices, -1, np.int32)
        return DivisionRows(
            cut=DivisionCut(own, np.zeros_like(own), own, np.zeros_like(own), none, none),
            units=units,
            unit_begin=np.zeros_like(units),
            member=np.asarray(own.any(axis=0)),
            size=nothing,
            reduce_channel=-1,
            gather_channel=-1,
            of_team=np.tile(none, (4, 1)),
        )

    def _all_rings(
        self, decisions: Sequence[Decision], of_group: IntArray, within_teams: bool
    ) -> Rings:
        num_domains = Domain.SLICES + len(self._axes)
        first = np.zeros((len(decisions), num_domains), np.int32)
        end, end_between = np.zeros_like(first), np.zeros_like(first)
        found = [self._rings_of(decision, within_teams) for decision in decisions]
        begin = 0
        for number, rows in enumerate(found):
            ends = begin + np.cumsum(np.add(rows.counts, rows.counts_between))
            end_between[number] = ends
            end[number] = ends - rows.counts_between
            first[number] = end[number] - rows.counts
            begin = int(ends[-1])
        return Rings(
            first=first[of_group],
            end=end[of_group],
            end_between=end_between[of_group],
            first_channel=np.array([c for rows in found for c in rows.first_channel], np.int32),
            second_channel=np.array([c for rows in found for c in rows.second_channel], np.int32),
            part=np.array([part for rows in found for part in rows.part], np.float64),
            member=np.concatenate([rows.member for rows in found]),
            is_once=np.array([once for rows in found for once in rows.is_once], np.bool_),
            is_whole=np.concatenate([rows.is_whole for rows in found]),
            slice_part=np.concatenate([rows.slice_part for rows in found]),
        )

    def _rings_of(self, decision: Decision, within_teams: bool) -> RingRows:
        key = (
            decision.division,
            decision.sync,
            decision.slices,
            decision.slice_groups,
            within_teams,
        )
        if key not in self._rings:
            if len(self._rings) >= _MOST_RINGS:
                self._rings.clear()
            self._rings[key] = self._new_rings(decision, within_teams)
        return self._rings[key]

    def _new_rings(self, decision: Decision, within_teams: bool) -> RingRows:
        domains = gradient_rings(decision.division, self._axes, within_teams)
        if decision.sync.is_served:
            domains = ((),) * Domain.SLICES + domains[Domain.SLICES :]
        copies = [[decision.slice_rings(ring) for ring in of] for of in domains]
        inside = [[ring for rings in of for ring in rings] for of in copies]
        between = [[ring for rings in of for ring in _rings_between(rings)] for of in copies]
        rings = [ring for pair in zip(inside, between, strict=True) for of in pair for ring in of]
        are_between = [
            is_between
            for pair in zip(inside, between, strict=True)
            for of, is_between in zip(pair, (False, True), strict=True)
            for _ in of
        ]
        shape = (len(rings), self._num_devices)
        member, is_whole = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        slice_part = np.zeros(shape)
        channels = []
        for number, ring in enumerate(rings):
            member[number, list(ring.devices)] = 1
            is_whole[number, list(ring.whole)] = True
            if are_between[number]:
                channels.append((self._channels.value_reduce(ring.devices), -1))
                continue
            channels.append(self._channels.of_sync(ring.devices, decision.sync, ring.slices))
            if decision.sync.is_sharded:
                slice_part[number, list(ring.devices)] = ring.slice_parts
        return RingRows(
            counts=tuple(map(len, inside)),
            counts_between=tuple(map(len, between)),
            first_channel=[first for first, _ in channels],
            second_channel=[second for _, second in channels],
            part=[ring.part for ring in rings],
            member=member,
            is_once=[ring.is_once for ring in rings],
            is_whole=is_whole,
            slice_part=slice_part,
        )


def _rings_between(copies: Sequence[Ring]) -> list[Ring]:
    """Rings of the devices of all slice groups that have the same slice of a ring's sum."""
    if len(copies) == 1:
        return []
    first = copies[0]._replace(whole=(), is_once=False, slices=())
    return [
        first._replace(devices=tuple(sorted(alike)), part=first.part * part)
        for part, *alike in zip(
            copies[0].slice_parts, *(each.devices for each in copies), strict=True
        )
        if part > 0.0
    ]


def _num_slice_lanes(decisions: Sequence[Decision]) -> int:
    """Number of lanes into which a fold may cut devices so that each holds whole slice groups."""
    found = 0
    for decision in decisions:
        groups, teams = decision.slice_groups, decision.division.all_teams
        if not groups:
            continue
        run = len(teams) // len(groups)
        runs = {
            frozenset(sum(teams[at : at + run], ())) for at in range(0, len(teams), max(run, 1))
        }
        if runs != set(map(frozenset, groups)):
            return 0
        found = gcd(found, len(groups))
    return found or -1


def encode(
    strategy: Strategy,
    tables: GraphTables,
    channels: ChannelTable,
    *,
    num_steps: int,
    encoder: Encoder | None = None,
) -> Choice:
    """Convert a strategy to the kernel's flat arrays.

    Args:
        strategy: The strategy.
        tables: Tables of the graph and the strategy's op rules.
        channels: Table in which its channels are registered.
        num_steps: Number of training steps to unroll.
        encoder: Encoder of these tables and channels that has converted others before.
    """
    schedule = strategy.schedule
    for mode in strategy.modes:
        schedule = mode.schedule(strategy, channels.cluster.num_devices)
    encoder = encoder or Encoder(tables, channels)
    choice = encoder.encode(
        _numbered(strategy.decisions),
        micro_batches=strategy.micro_batches,
        schedule=schedule,
        home=np.array(strategy.homes, np.int32),
        bucket_bytes=strategy.bucket_bytes,
        num_steps=num_steps,
        within_teams=strategy.trains_apart,
    )
    if not strategy.modes:
        return choice
    return choice._replace(
        modes=tuple(mode.encode(strategy, tables, channels) for mode in strategy.modes)
    )


def _numbered(decisions: Sequence[Decision]) -> Decided:
    """Number the distinct decisions."""
    numbers: dict[Decision, int] = {}
    of_object: dict[int, int] = {}  # groups share objects; to compare those takes no time
    for decision in decisions:
        if id(decision) not in of_object:
            of_object[id(decision)] = numbers.setdefault(decision, len(numbers))
    of_group = np.array([of_object[id(decision)] for decision in decisions], np.int32)
    return Decided(list(numbers), of_group)


@helper
def is_first(choice: Choice, row: int, micro: int, device: int) -> bool:
    """Whether a device is the first of its team that computes anything of a row."""
    teams, division = choice.teams, row % len(choice.member)
    for other in range(choice.member.shape[1]):
        if (
            teams.number[division, other] == teams.number[division, device]
            and teams.position[division, other] < teams.position[division, device]
            and choice.shares[row, micro, other] > 0
        ):
            return False
    return bool(choice.shares[row, micro, device] > 0)
