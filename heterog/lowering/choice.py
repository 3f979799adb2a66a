"""A strategy in flat arrays, the input of the lowering kernel."""

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.channels import ChannelTable
from heterog.lowering.kernels import by_reference, helper
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.sparse_tables import SparseRows
from heterog.lowering.tables import Domain, GraphTables
from heterog.lowering.tape import NO_SCHEDULE, Scratch, Tape, Turns, encode_turns
from heterog.lowering.value_reads import Recut
from heterog.modes.mode import EncodedMode
from heterog.strategy.division import (
    Division,
    Ring,
    batch_shares,
    cut_division,
    gradient_rings,
    micro_sizes,
)
from heterog.strategy.schedules import PipelineSchedule
from heterog.strategy.strategy import Decision, Strategy

BoolArray = npt.NDArray[np.bool_]
MicroBatches = tuple[tuple[int, ...], ...]
_MOST_TABLES = 256  # tables of micro-batches that an encoder remembers
_MOST_KNOWN = 4096  # decisions that an encoder remembers


@by_reference
class Teams(NamedTuple):
    """The teams of each division; see ``division``."""

    num_teams: IntArray  # [num_divisions]
    number: IntArray  # of each device's team, -1 outside  # [num_divisions, num_devices]
    position: IntArray  # of each device in its team  # [num_divisions, num_devices]
    size: IntArray  # of each device's team  # [num_divisions, num_devices]
    own_begin: IntArray  # first sample of each device  # [num_divisions, num_micro, num_devices]
    samples: IntArray  # of each device's team  # [num_divisions, num_micro, num_devices]
    begin: IntArray  # first sample of the team  # [num_divisions, num_micro, num_devices]
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
    # Rings that add up slices between slice groups follow from ``end`` to here.
    end_between: IntArray  # [num_groups, num_domains]
    first_channel: IntArray  # all-reduce or reduce-scatter  # [num_rings]
    second_channel: IntArray  # all-gather, -1 if there is none  # [num_rings]
    part: FloatArray  # fraction of each parameter that the ring adds up  # [num_rings]
    member: IntArray  # 1, or devices that a column represents  # [num_rings, num_devices]
    is_once: BoolArray  # all members of a team have the same part of the sum  # [num_rings]
    is_whole: BoolArray  # whether a member's part of the parameter is just what the ring adds up
    slice_part: FloatArray  # under ZeRO, the fraction of the ring's part that each member owns


NO_ROWS: IntArray = np.zeros((0, 0, 0, 0, 0), np.int32)
"""``Choice.sparse_rows`` if the strategy cuts no sparse matrix by rows."""


@by_reference
class Choice(NamedTuple):
    """A strategy in flat arrays.

    Groups share *divisions*. Division ``l`` along axis ``a`` of the tables is row
    ``a * num_divisions + l`` of the arrays over rows.
    """

    num_micro: int
    num_steps: int
    bucket_bytes: float
    first_bucket_bytes: float
    division: IntArray  # of each group, the last entry for constants  # [num_groups + 1]
    shares: IntArray  # samples, or units if the team has samples  # [rows, num_micro, num_devices]
    member: BoolArray  # devices that hold a division's parameters  # [num_divisions, num_devices]
    teams: Teams
    sharded: IntArray  # what replicas of each group keep in slices; see ``Sharded``
    sync_class: IntArray  # groups whose gradients may share buckets have the same number
    run: IntArray  # groups of a layer, or between two, in one chunk have the same number
    recompute: IntArray  # 0: a group keeps its activations; otherwise 1 + its ``Keeps``
    rings: Rings
    reduce_channel: IntArray  # all-reduce of values over each whole division
    gather_channel: IntArray  # all-gather of values over each whole division
    home: IntArray  # of each parameter
    stands_for: IntArray  # devices that each represents; all ones unless folded  # [num_devices]
    rule_set: int = 0  # number of its op rules in the evaluator that encoded it
    turns: Turns = NO_SCHEDULE
    # Number of rows of each owner that each reader of a sparse product reads.
    sparse_rows: IntArray = NO_ROWS  # [matrices, reading division, division, reader, owner]
    # Number of lanes of a fold that hold whole slice groups; 0: no number, -1: any number does.
    num_slice_lanes: int = -1
    modes: tuple[EncodedMode, ...] = ()  # empty when the choice is passed to kernels


class Lowering(NamedTuple):
    """What lowering reads and writes, which its helpers pass on."""

    tables: GraphTables
    choice: Choice
    scratch: Scratch
    tape: Tape


class DivisionRows(NamedTuple):
    """One division in flat arrays; the arrays of a ``Choice`` are joined from these."""

    # Own samples, first own sample, samples of the team, first sample of the team.
    micro: IntArray  # [4, 1, num_micro, num_devices]
    # Team, position, size of the team, membership, then the four channels of each device's team.
    places: IntArray  # [8, 1, num_devices]
    units: IntArray  # units, and the first one  # [2, num_axes - 1, 1, num_devices]
    whole: IntArray  # number of teams, ``reduce_channel`` and ``gather_channel``  # [3, 1]


class RingRows(NamedTuple):
    """The rings of one decision in flat arrays, before they enter a ``Choice``."""

    # Number of rings of each domain, and of the rings after them between slice groups.
    counts: IntArray  # [2, 1, num_domains]
    channels: IntArray  # first and second  # [2, num_rings]
    part: FloatArray
    member: IntArray  # [num_rings, num_devices]
    is_once: BoolArray
    is_whole: BoolArray
    slice_part: FloatArray


class _Known(NamedTuple):
    """A converted decision; holds the decision, so that no other object gets its id."""

    decision: Decision
    division: int  # number of its division; equal divisions have the same number
    sync: int  # number of its way to synchronise
    rings: IntArray  # numbers of its rings
    sharded: int
    recompute: int


class _Stack:
    """Arrays of equal shapes but for one axis, joined along it in an array that grows by doubling.

    Args:
        axis: Axis along which they are stacked.
    """

    def __init__(self, axis: int) -> None:
        self._axis, self._size = axis, 0
        self._room: npt.NDArray[Any] | None = None

    def add(self, array: npt.NDArray[Any]) -> int:
        """Add an array; returns its first place."""
        first, axis = self._size, self._axis
        self._size += array.shape[axis]
        if self._room is None or self._size > self._room.shape[axis]:
            shape = (*array.shape[:axis], max(2 * self._size, 16), *array.shape[axis + 1 :])
            old, self._room = self._room, np.zeros(shape, array.dtype)
            if old is not None:
                self._room[self._at(slice(first))] = old[self._at(slice(first))]
        self._room[self._at(slice(first, self._size))] = array
        return first

    def _at(self, places: slice) -> tuple[slice, ...]:
        return (*[slice(None)] * self._axis, places)

    def take(self, places: Sequence[int] | IntArray) -> npt.NDArray[Any]:
        """The entries at some places, joined."""
        assert self._room is not None
        return self._room.take(places, axis=self._axis)


class _Cuts:
    """Divisions cut into the same micro-batches; the first is the division of constants."""

    def __init__(self) -> None:
        self.place: dict[int, int] = {}  # of each division's number
        self._stacks = _Stack(1), _Stack(1), _Stack(2), _Stack(1)

    def add(self, number: int, rows: DivisionRows) -> None:
        """Add a division."""
        if not self.place:
            none = np.array([-1, -1, 0, 0, -1, -1, -1, -1], np.int32)[:, None, None]
            self._add(DivisionRows(
                micro=np.zeros_like(rows.micro),
                places=np.zeros_like(rows.places) + none,
                units=np.zeros_like(rows.units),
                whole=np.array([[0], [-1], [-1]], np.int32),
            ))  # fmt: skip
        self.place[number] = self._add(rows)

    def _add(self, rows: DivisionRows) -> int:
        return max(stack.add(array) for stack, array in zip(self._stacks, rows, strict=True))

    def joined(self, numbers: Iterable[int]) -> DivisionRows:
        """Some divisions and the division of constants, which every computing device makes."""
        places = [*map(self.place.__getitem__, numbers), 0]
        micro, of_device, units, whole = (stack.take(places) for stack in self._stacks)
        own = (micro[0] > 0).any(axis=0)  # [num_micro, num_devices]
        if len(units[0]):  # a device without samples may own units of another axis
            own |= ((micro[2] > 0) & units[0].any(axis=0)[:, None]).any(axis=0)
        micro[0, -1] = micro[2, -1] = own
        of_device[3, -1] = units[0, :, -1] = own.any(axis=0)
        return DivisionRows(micro, of_device, units, whole)


class DistinctDecisions(NamedTuple):
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
        self._divisions: list[Division] = []
        self._division_numbers: dict[Division, int] = {}
        self._cuts: dict[MicroBatches, _Cuts] = {}
        self._sparse_rows = SparseRows(tables.sparse, tables.axis_units)
        self._forget()

    def _forget(self) -> None:
        self._known: dict[tuple[int, bool], _Known] = {}
        self._syncs: dict[tuple[object, ...], tuple[int, IntArray]] = {}
        self._counts, self._channels_of_rings = _Stack(1), _Stack(1)
        self._rings = tuple(_Stack(0) for _ in range(5))  # the other fields of ``RingRows``

    def encode(
        self,
        decided: DistinctDecisions,
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
        if len(self._known) >= _MOST_KNOWN:
            self._forget()
        if len(self._cuts) > _MOST_TABLES:
            self._cuts.clear()
        known = [self._of_decision(each, within_teams) for each in decisions]
        numbers: dict[int, int] = {}  # place in the choice of each division's number
        of_decision = [numbers.setdefault(each.division, len(numbers)) for each in known]
        syncs: dict[int, int] = {}  # number in the choice of each way to synchronise
        sync_class = [syncs.setdefault(each.sync, len(syncs)) for each in known]
        divisions = [self._divisions[number] for number in numbers]
        sizes = micro_sizes(micro_batches, divisions, self._tables.batch_size)
        cuts = self._cuts.setdefault(micro_batches, _Cuts())
        for number, own in zip(numbers, divisions, strict=True):
            if number not in cuts.place:
                cuts.add(number, self._division(own, micro_batches, sizes))
        rows = cuts.joined(numbers)
        division = np.empty(len(of_group) + 1, np.int32)
        division[:-1], division[-1] = np.array(of_decision)[of_group], len(numbers)
        shares, _, team_samples, _ = rows.micro
        if self._axes:
            units = (each[:, None] * (team_samples > 0) for each in rows.units[0])
            shares = np.concatenate([shares, *units])
        return Choice(
            num_micro=len(sizes) or 1,
            num_steps=num_steps,
            bucket_bytes=float(bucket_bytes),
            first_bucket_bytes=float(bucket_bytes),
            division=division,
            shares=shares,
            member=rows.places[3] > 0,
            teams=self._teams(rows),
            sharded=np.array([each.sharded for each in known], np.int32)[of_group],
            sync_class=np.array(sync_class, np.int32)[of_group],
            recompute=np.array([each.recompute for each in known], np.int32)[of_group],
            run=self._runs(schedule.chunk_starts),
            rings=self._joined_rings(known, of_group),
            reduce_channel=rows.whole[1],
            gather_channel=rows.whole[2],
            home=home,
            stands_for=np.ones(self._num_devices, np.int32),
            turns=self._turns(schedule, decided, division, shares),
            sparse_rows=self._sparse_rows.of(*rows.units),
            num_slice_lanes=_num_slice_lanes(decisions),
        )

    def _teams(self, rows: DivisionRows) -> Teams:
        _, own_begin, samples, begin = rows.micro
        number, position, size, _, *channels = rows.places
        return Teams(
            num_teams=rows.whole[0],
            number=number,
            position=position,
            size=size,
            own_begin=own_begin,
            samples=samples,
            begin=begin,
            units=self._by_row(rows.units[0]),
            unit_begin=self._by_row(rows.units[1]),
            reduce_channel=channels[0],
            gather_channel=channels[1],
            scatter_channel=channels[2],
            exchange_channel=channels[3],
        )

    def _runs(self, chunk_starts: Sequence[int]) -> IntArray:
        """Make ``Choice.run``."""
        run = self._tables.group_run
        if not chunk_starts:
            return run
        chunk = np.searchsorted(sorted(chunk_starts), np.arange(len(run)), side="right")
        return (run + len(run) * chunk).astype(np.int32)

    def _of_decision(self, decision: Decision, within_teams: bool) -> _Known:
        """Convert a decision, or look it up by identity, because comparing decisions is slow."""
        key = id(decision), within_teams
        if key not in self._known:
            division, sync = decision.division, decision.sync
            of_rings = division, sync, decision.slices, decision.slice_groups, within_teams
            if of_rings not in self._syncs:
                self._syncs[of_rings] = self._add_rings(self._new_rings(decision, within_teams))
            number, rings = self._syncs[of_rings]
            if division not in self._division_numbers:
                self._division_numbers[division] = len(self._divisions)
                self._divisions.append(division)
            self._known[key] = _Known(
                decision=decision,
                division=self._division_numbers[division],
                sync=number,
                rings=rings,
                sharded=int(sync.sharded),
                recompute=int(decision.recompute * (1 + decision.keeps)),
            )
        return self._known[key]

    def _add_rings(self, rows: RingRows) -> tuple[int, IntArray]:
        """Add the rings of a way to synchronise; returns its number and the rings' numbers."""
        others: Sequence[npt.NDArray[Any]] = rows[2:]
        first, count = self._channels_of_rings.add(rows.channels), rows.channels.shape[1]
        for stack, array in zip(self._rings, others, strict=True):
            stack.add(array)
        return self._counts.add(rows.counts), np.arange(first, first + count, dtype=np.int32)

    def _joined_rings(self, known: Sequence[_Known], of_group: IntArray) -> Rings:
        """The rings of all decisions, ordered by decision and domain."""
        counts, between = self._counts.take([each.sync for each in known])
        ends = np.cumsum(counts + between, dtype=np.int32).reshape(counts.shape)
        numbers = np.concatenate([each.rings for each in known])
        first_channel, second_channel = self._channels_of_rings.take(numbers)
        part, member, is_once, is_whole, slice_part = (each.take(numbers) for each in self._rings)
        return Rings(
            first=(ends - between - counts)[of_group],
            end=(ends - between)[of_group],
            end_between=ends[of_group],
            first_channel=first_channel,
            second_channel=second_channel,
            part=part,
            member=member,
            is_once=is_once,
            is_whole=is_whole,
            slice_part=slice_part,
        )

    def _by_row(self, units: IntArray) -> IntArray:
        """Units of every axis by row; the rows of the batch, which come first, are 0.

        Args:
            units: Units of the other axes.  # [num_axes - 1, num_divisions, num_devices]
        """
        padded = np.zeros((len(units) + 1, *units.shape[1:]), np.int32)
        padded[1:] = units
        return padded.reshape(-1, self._num_devices)

    def _turns(
        self,
        schedule: PipelineSchedule,
        decided: DistinctDecisions,
        division: IntArray,
        shares: IntArray,
    ) -> Turns:
        if schedule.is_default:
            return NO_SCHEDULE
        devices = [decided.decisions[number].devices for number in decided.of_group]
        return encode_turns(schedule, self._tables, devices, division, shares)

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
        places = np.stack([cut.team, cut.position, size, cut.team >= 0, *of_team])
        return DivisionRows(
            micro=np.stack([cut.own, cut.own_begin, cut.team_samples, cut.team_begin])[:, None],
            places=places.astype(np.int32)[:, None],
            units=np.stack([units, begin])[:, :, None],
            whole=np.array([[cut.team.max() + 1], [everyone[0]], [everyone[1]]], np.int32),
        )

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
        counts = [list(map(len, of)) for of in (inside, between)]
        return RingRows(
            counts=np.array(counts, np.int32)[:, None],
            channels=np.ascontiguousarray(np.array(channels, np.int32).reshape(-1, 2).T),
            part=np.array([ring.part for ring in rings], np.float64),
            member=member,
            is_once=np.array([ring.is_once for ring in rings], np.bool_),
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
    """Number of lanes of a fold so that each holds whole slice groups; see ``num_slice_lanes``."""
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
    if strategy.first_bucket_bytes:
        choice = choice._replace(first_bucket_bytes=float(strategy.first_bucket_bytes))
    if not strategy.modes:
        return choice
    return choice._replace(
        modes=tuple(mode.encode(strategy, tables, channels) for mode in strategy.modes)
    )


def _numbered(decisions: Sequence[Decision]) -> DistinctDecisions:
    """Number the distinct decisions."""
    numbers: dict[Decision, int] = {}
    of_object: dict[int, int] = {}  # by identity, because groups share objects
    for decision in decisions:
        if id(decision) not in of_object:
            of_object[id(decision)] = numbers.setdefault(decision, len(numbers))
    of_group = np.array([of_object[id(decision)] for decision in decisions], np.int32)
    return DistinctDecisions(list(numbers), of_group)


@helper
def is_first(choice: Choice, row: int, micro: int, device: int) -> bool:
    """Whether a device is the first of its team with a share of a row."""
    teams, division = choice.teams, row % len(choice.member)
    for other in range(choice.member.shape[1]):
        if (
            teams.number[division, other] == teams.number[division, device]
            and teams.position[division, other] < teams.position[division, device]
            and choice.shares[row, micro, other] > 0
        ):
            return False
    return bool(choice.shares[row, micro, device] > 0)
