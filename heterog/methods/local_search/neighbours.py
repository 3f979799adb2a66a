"""Points of the local search and the random moves between them.

A row holds one candidate per group, groups in the order of the forward pass; neighbouring groups
with the same candidate are a *run*. Most moves change a run, a part of it, or all groups of one
kind. Beside the row, a point has rules of ops that do not follow the batch, and settings of the
whole step. Rules belong to groups and stay if their candidates change.

Rules by which teams divide layers (``GroupRules.of_teams``) hold for all groups at once. All
groups of such a row have teams, of one device each for data parallelism, so that moves between the
two change no rule. Every point is legal: with rules that cut across samples it has neither
micro-batches nor teams, and a group in which a slice would have several owners has no ZeRO.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import reduce
from typing import NamedTuple

import numpy as np

from heterog.graph.grouping import alike_groups, block_starts
from heterog.lowering.choice import MicroBatches
from heterog.lowering.program import IntArray
from heterog.memo import kept
from heterog.methods.local_search.group_rules import GroupRules, Place, RuleRow
from heterog.methods.planner import Problem
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.teams import (
    apart,
    has_one_owner,
    has_teams,
    host_teams,
    in_teams,
    without_teams,
)
from heterog.simulator.engine import Order
from heterog.simulator.space import StepSettings, StrategySpace
from heterog.strategy.division import is_cut_alike, split_evenly
from heterog.strategy.layouts.stages import layer_blocks
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Keeps, Sync
from heterog.strategy.sync import Sharded

BUCKETS = (0, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024, DEFAULT_BUCKET_BYTES)

# Part of the changes of rules that apply to some layers of a kind instead of all. Such a change
# makes a new rule set, which costs time in proportion to the ops of the graph.
_ONLY_SOME, _FEW_OPS = 0.75, 600
_RESCHEDULED = 0.4  # part of the changes to micro-batches
_TEAMED = 0.1  # part of all moves, if teams may pay
_BY_STAGE = 0.5  # part of the changes to recomputation that set whole layers of a run
_OTHER_LEVEL = 0.3  # part of the changes to synchronisation under ZeRO that change its stage
_PROPOSED = 0.4  # part of the changes to groups, if a policy has proposed some
_PLACED = 0.9  # part of the moves that give blocks other places, if there are only places
_BLOCKS_PLACED = 4.0  # mean number of these blocks, which lie in a row


class State(NamedTuple):
    """A point of the search: a row of candidates, and settings of the whole step."""

    row: IntArray
    bucket_bytes: int
    order: Order
    micro_batches: MicroBatches = ()
    rules: RuleRow = ()
    schedule: PipelineSchedule = AS_IT_COMES
    blocks: tuple[int, ...] = ()
    """First group of each block that recomputes as a whole; its groups have one candidate."""
    first_bucket_bytes: int = 0

    @property
    def key(self) -> "StateKey":
        """Hashable values that are equal for equal points only."""
        return (self.row.tobytes(), *self[1:])


StateKey = tuple[object, ...]


class MoveKind(IntEnum):
    """What a move changes."""

    TEAMS = 0
    RULES = 1
    BUCKETS = 2
    ORDER = 3
    MICRO_BATCHES = 4
    BOUNDARY = 5
    PROPOSAL = 6
    NEAR = 7
    SAMPLES = 8
    RECOMPUTATION = 9
    SYNCHRONISATION = 10
    ELSEWHERE = 11
    DECISION = 12
    STAGES = 13
    STRUCTURE = 14
    RECUT = 15
    SHARES = 16
    EVERYWHERE = 17
    PIPELINING = 18
    SHARDED = 19


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a point: its kind and the point that it leads to.

    Attributes:
        kind: What changes.
        state: The point, perhaps before it is made legal.
        is_legal: Whether it is legal already.
        without: The point to keep if the move turns out to be refused; ``None`` if it cannot be.
    """

    kind: MoveKind
    state: State
    is_legal: bool = False
    without: State | None = None


class Neighbours:
    """Random moves.

    Args:
        problem: Problem of the search.
        space: Space with the candidates of the rows.
        rules: Rules of groups.
        rng: Generator of everything random.

    Attributes:
        may_shard: Whether moves may give rules to ops that have none.
        may_team: Whether moves may cut devices into teams.
    """

    def __init__(
        self, problem: Problem, space: StrategySpace, rules: GroupRules, rng: np.random.Generator
    ) -> None:
        self.problem = problem
        self.space = space
        self.rules = rules
        self.rng = rng
        self.may_shard = False
        self.may_team = False
        self.num_named = len(space.candidates)
        self.proposals = [
            np.array([space.add(decision) for decision in proposal], np.int32)
            for proposal in problem.proposals
        ]
        graph = problem.evaluator.graph
        self.alike = alike_groups(graph)
        self.num_groups = len(self.alike)
        self._block_starts = block_starts(graph) if problem.has_only_places else None
        self._places: list[int] = []  # only if there is nothing to divide
        if problem.has_only_places:
            alone = (n for n, each in enumerate(space.candidates) if len(each.devices) == 1)
            self._places.extend(alone)
        self._kinds = kinds_worth_trying(graph)
        self._layer_blocks = layer_blocks(graph)
        self._last_row: IntArray | None = None
        self._last_edges: list[int] = []

    def of(self, state: State) -> State:
        """A random move: of some groups' decisions, or of a setting of the whole step."""
        return self.after(self.move(state))

    def after(self, move: Move) -> State:
        """The point that a move leads to."""
        state = move.state
        if move.is_legal:
            return state
        if move.without and self.rules.rule_set(state.rules, state.blocks) is None:
            return move.without
        return self.legal(state)

    def move(self, state: State) -> Move:
        """Draw a move; the work that ``after`` does for it is deterministic."""
        if self.may_team and self.rng.random() < _TEAMED:
            return Move(MoveKind.TEAMS, self._teamed(state))
        if self._places and self.rng.random() < _PLACED:
            return Move(MoveKind.DECISION, self._placed(state))
        kind = self.rng.random()
        if kind < 0.05:
            if kind >= 0.03 and (self.may_shard or state.rules):
                return Move(MoveKind.RULES, self._resharded(state), without=state)
            bucket_bytes = BUCKETS[self.rng.integers(len(BUCKETS))]
            first = state.first_bucket_bytes if state.first_bucket_bytes < bucket_bytes else 0
            other = state._replace(bucket_bytes=bucket_bytes, first_bucket_bytes=first)
            return Move(MoveKind.BUCKETS, other, is_legal=True)
        if kind < 0.08:
            order = self.problem.orders[self.rng.integers(len(self.problem.orders))]
            return Move(MoveKind.ORDER, state._replace(order=order), is_legal=True)
        if kind < 0.12:
            if self.rules.may_cut(state.rules):
                return Move(MoveKind.MICRO_BATCHES, self._recut(state), is_legal=True)
            return Move(MoveKind.RULES, self._resharded(state), without=state)
        row = state.row.copy()
        if kind < 0.32:
            self._shift_boundary(state.row, row)
            return Move(MoveKind.BOUNDARY, state._replace(row=row))
        chosen = self._some_groups(state.row)
        what = MoveKind.DECISION
        if self.proposals and self.rng.random() < _PROPOSED:
            what = MoveKind.PROPOSAL
            row[chosen] = self.proposals[self.rng.integers(len(self.proposals))][chosen]
        elif kind < 0.50:  # a neighbour's decision: moves or removes boundaries
            what = MoveKind.NEAR
            near = chosen[0] - 1 if self.rng.random() < 0.5 else chosen[-1] + 1
            row[chosen] = row[min(max(near, 0), self.num_groups - 1)]
        elif kind < 0.65:
            what = MoveKind.SAMPLES
            self._move_samples(row, chosen)
        elif kind < 0.69:
            what = MoveKind.RECOMPUTATION
            if self.rng.random() < _BY_STAGE:
                return Move(what, self._stage_recomputed(state))
            row[chosen] = self._recomputed(row[chosen])
        elif kind < 0.82:  # another synchronisation or share rule on the same devices
            what = MoveKind.SYNCHRONISATION
            row[chosen] = self.space.add(self._synchronised(row[chosen[0]]))
        elif kind < 0.90:  # a decision that is used elsewhere
            what = MoveKind.ELSEWHERE
            row[chosen] = row[self.rng.integers(self.num_groups)]
        else:
            row[chosen] = self.rng.integers(self.num_named)
        return Move(what, state._replace(row=row))

    def _placed(self, state: State) -> State:
        """Give some blocks in a row the decision of a neighbour, or a device.

        Blocks begin at the same groups in every move, so no move leaves single groups behind.
        """
        row, starts = state.row.copy(), self._block_starts
        assert starts is not None
        first = int(self.rng.integers(len(starts) - 1))
        last = min(first + int(self.rng.geometric(1.0 / _BLOCKS_PLACED)), len(starts) - 1)
        begin, end = int(starts[first]), int(starts[last])
        if self.rng.random() < 0.5:
            row[begin:end] = row[begin - 1 if begin else min(end, self.num_groups - 1)]
        else:
            row[begin:end] = self._places[self.rng.integers(len(self._places))]
        return state._replace(row=row)

    def legal(self, state: State) -> State:
        """A state that ranks can execute, in a form that is the same for equal states."""
        rules, row = state.rules, state.row
        micro_batches = state.micro_batches
        if not self.rules.may_cut(rules):
            micro_batches = ()
            row = self._said(row, without_teams)
        elif self.rules.are_of_teams(rules):
            row = self._said(row, apart)
            if not any(has_teams(self.space.candidates[n]) for n in used(row)):
                rules = ()
        if not rules:
            row = self._said(row, without_teams)
        row, blocks = self._said(row, _with_one_owner), state.blocks
        if not any(self.space.candidates[n].recompute for n in used(row)):
            blocks = ()
        if blocks:
            starts = np.array(blocks)
            row = row[starts[np.searchsorted(starts, np.arange(self.num_groups), "right") - 1]]
        if not self._is_cut_alike(row, micro_batches):
            micro_batches = self.space.micro_batches(len(micro_batches[0]))
        made = state._replace(row=row, micro_batches=micro_batches, rules=rules, blocks=blocks)
        return made._replace(schedule=self._fitted(made, state.schedule))

    def settings(self, state: State) -> StepSettings:
        """The settings of the whole step in a state, whose rules are legal."""
        rule_set = self.rules.rule_set(state.rules, state.blocks)
        assert rule_set is not None, "moves refuse rules that exclude each other"
        return StepSettings(
            state.bucket_bytes,
            state.first_bucket_bytes,
            state.micro_batches,
            state.schedule,
            rule_set,
        )

    def completed(self, state: State) -> State:
        """A state whose rules of teams are in some groups only, completed to all groups."""
        whole = self.rules.of_teams if state.rules else ()
        pairs = zip(state.rules, whole, strict=True) if whole else ()
        rest = [own == 0 for own, every in pairs if own in (0, every)]
        if len(rest) < self.num_groups or all(rest):
            return state
        # A group without rules has no teams, so its devices become teams of one.
        row = np.where(rest, self._said(state.row, apart), state.row).astype(np.int32)
        return self.legal(state._replace(row=row, rules=whole))

    def _said(self, row: IntArray, change: Callable[[Decision], Decision]) -> IntArray:
        """A row with one change applied to all its decisions."""
        numbers = used(row)
        changed = [self._changed(number, change) for number in numbers]
        if changed == numbers:
            return row
        return np.array(changed, np.int32)[np.searchsorted(numbers, row)]

    @kept
    def _changed(self, number: int, change: Callable[[Decision], Decision]) -> int:
        return self.space.add(change(self.space.candidates[number]))

    def _fitted(self, state: State, schedule: PipelineSchedule) -> PipelineSchedule:
        """A schedule for the chunks that devices have in a state."""
        if schedule.is_default:
            return schedule
        if not state.micro_batches:
            return AS_IT_COMES
        devices = [self.space.candidates[number].devices for number in state.row]
        return schedule.fitted(devices)

    # --- teams -----------------------------------------------------------------------------------

    def in_teams(self, state: State, size: int, groups: IntArray | None = None) -> State:
        """A state whose devices are cut into teams inside hosts; size 1 means no teams.

        Args:
            state: Any state.
            size: Most devices of a team.
            groups: Groups whose devices are cut; all by default.
        """
        return self.legal(self._cut_into_teams(state, size, groups))

    def _cut_into_teams(self, state: State, size: int, groups: IntArray | None) -> State:
        chosen = np.arange(self.num_groups) if groups is None else groups
        row = state.row.copy()
        for number in used(row[chosen]):
            row[chosen[row[chosen] == number]] = self._in_teams(number, size)
        return state._replace(row=row, rules=self.rules.of_teams)

    @kept
    def _in_teams(self, number: int, size: int) -> int:
        decision, cluster = self.space.candidates[number], self.space.cluster
        teams = host_teams(cluster, decision.devices, size)
        return self.space.add(in_teams(decision, teams, self.space.speeds, cluster))

    def _teamed(self, state: State) -> State:
        """Cut the devices of a run of groups, or of some, into other teams, or into none."""
        sizes = (1, *self.rules.team_sizes)
        size = sizes[self.rng.integers(len(sizes))]
        groups = None if self.rng.random() < 0.3 else self._some_groups(state.row)
        return self._cut_into_teams(state, size, groups)

    def _synchronised(self, number: int) -> Decision:
        """The same devices and teams, with another synchronisation or rule for shares."""
        old = self.space.candidates[number]
        if old.sync.is_sharded and self.rng.random() < _OTHER_LEVEL:
            levels = [sync for sync in Sync if sync.is_sharded]
            return replace(old, sync=levels[self.rng.integers(len(levels))])
        others = self.space.decisions_on(old.devices)
        other = others[self.rng.integers(len(others))]
        if not old.teams:
            return other
        return replace(old, sync=other.sync, slices=other.slices, slice_groups=())

    # --- rules of ops ----------------------------------------------------------------------------

    def sharded(self, state: State, places: list[Place]) -> State | None:
        """A state with the layers at some places sharded; ``None`` if its rules forbid that."""
        rules = reduce(self.rules.added, places, state.rules)
        if self.rules.rule_set(rules, state.blocks) is None:
            return None
        return self.legal(state._replace(rules=rules))

    def _resharded(self, state: State) -> State:
        """Shard the layers of a kind or stop sharding them, or drop the rules of some groups."""
        row, rules = state.row.copy(), state.rules
        only_some = self.rng.random() < min(
            _ONLY_SOME, _FEW_OPS / self.problem.evaluator.graph.num_ops
        )
        chosen = set(self._some_groups(state.row).tolist())
        if rules and only_some and self.rng.random() < 0.5:
            rules = self.rules.without(rules, chosen)
        elif self.rules.layers:
            places = self.rules.layers[self.rng.integers(len(self.rules.layers))]
            some = [place for place in places if only_some and min(place) in chosen] or places
            change = self.rules.removed if self.rules.holds(rules, some[0]) else self.rules.added
            for place in some:
                rules = change(rules, place)
                row[list(place)] = row[min(place)]
        return state._replace(row=row, rules=rules)

    # --- micro-batches ---------------------------------------------------------------------------

    def _recut(self, state: State) -> State:
        """Halve or double the micro-batches, or move samples between those of two devices.

        Or change the caps on micro-batches in flight, or the time of weight gradients.
        """
        cut = state.micro_batches
        if self.rng.random() < _RESCHEDULED:
            return self._rescheduled(state)
        num_micro = len(cut[0]) if cut else 1
        if cut == self.space.micro_batches(num_micro):
            near = (
                max(num_micro // 2, 1),
                min(2 * num_micro, self.problem.evaluator.graph.batch_size),
            )
            number = near[self.rng.integers(2)]
            return self._with_cut(state, self.space.micro_batches(number))
        kind = self.rng.random()
        if kind < 0.5:
            return self._moved_between_cuts(state)
        if kind < 0.75:
            cut = tuple(_merged(counts) for counts in cut) if num_micro > 2 else ()
        else:
            cut = tuple(
                tuple(half for count in counts for half in split_evenly(count, 2))
                for counts in cut
            )
        return self._with_cut(state, cut)

    def _with_cut(self, state: State, cut: MicroBatches, row: IntArray | None = None) -> State:
        """Other micro-batches under the same caps; unchanged if groups would cut differently."""
        cut_state = state._replace(micro_batches=cut, row=state.row if row is None else row)
        if not self._is_cut_alike(cut_state.row, cut):
            return state
        return cut_state._replace(schedule=self._fitted(cut_state, state.schedule))

    def _is_cut_alike(self, row: IntArray, cut: MicroBatches) -> bool:
        """Whether all groups have the same samples in each micro-batch, and none is empty."""
        if not cut:
            return True
        divisions = [self.space.candidates[number].division for number in used(row)]
        batch = self.problem.evaluator.graph.batch_size
        return is_cut_alike(cut, dict.fromkeys(divisions), batch)

    def _is_reduced_by_micro(self, state: State) -> bool:
        """Whether replicas keep gradients in slices, which a schedule may reduce once a step."""
        chosen = (self.space.candidates[number] for number in used(state.row))
        return any(each.sync.sharded >= Sharded.GRADIENTS for each in chosen)

    def _rescheduled(self, state: State) -> State:
        """Change the cap of one or all devices, or the time of weight gradients.

        Without micro-batches, only weight gradients can be delayed, which helps devices that wait
        for each other's values.
        """
        num_devices, schedule = self.space.cluster.num_devices, state.schedule
        kind = self.rng.random() if state.micro_batches else 0.0
        if kind < 0.15 and state.micro_batches and self._is_reduced_by_micro(state):
            once = not schedule.gathers_once
            return state._replace(schedule=replace(schedule, gathers_once=once, turns=()))
        if kind < 0.3:
            late = not schedule.splits_backward
            return state._replace(schedule=replace(schedule, splits_backward=late, turns=()))
        cap = int(self.rng.integers(len(state.micro_batches[0]) + 1))  # 0: none
        least = list(schedule.device_caps)
        least += [0] * (num_devices - len(least))
        if kind < 0.65:
            least[self.rng.integers(num_devices)] = cap
        else:
            least = [cap] * num_devices
        capped = replace(schedule, in_flight=tuple((cap,) for cap in least), turns=())
        return state._replace(schedule=self._fitted(state, capped))

    def _moved_between_cuts(self, state: State) -> State:
        """Move samples from one device's micro-batch to another's, for groups that follow them.

        Groups whose shares are the sums of micro-batches keep following them. In a pipeline, where
        the devices of each stage share the whole batch, samples stay in their stage and in their
        micro-batch.
        """
        cut = np.array(state.micro_batches, np.int32)  # [num_devices, num_micro]
        givers = np.argwhere(cut > 0)
        giver, from_micro = givers[self.rng.integers(len(givers))]
        takers: Sequence[int] = range(len(cut))
        in_stages = cut.sum() != self.problem.evaluator.graph.batch_size
        if in_stages:
            sets = [self.space.candidates[number].devices for number in used(state.row)]
            takers = next((devices for devices in sets if giver in devices), (giver,))
        taker = takers[int(self.rng.integers(len(takers)))]
        to_micro = int(self.rng.integers(cut.shape[1]))
        if in_stages:
            to_micro = from_micro
        amount = int(self.rng.integers(1, max(1, cut[giver, from_micro] // 4) + 1))
        before = cut.sum(axis=1)
        cut[giver, from_micro] -= amount
        cut[taker, to_micro] += amount
        after = cut.sum(axis=1)
        moved = tuple(tuple(counts) for counts in cut.tolist())
        row = state.row.copy()
        for number in np.unique(row):
            old = self.space.candidates[number]
            devices = list(old.devices)
            if old.shares == tuple(before[devices].tolist()) and after[devices].sum() == sum(
                old.shares
            ):
                changed = replace(old, shares=tuple(after[devices].tolist()))
                row[state.row == number] = self.space.add(changed)
        return self._with_cut(state, moved, row)

    # --- recomputation ---------------------------------------------------------------------------

    def _stage_recomputed(self, state: State) -> State:
        """Make a whole run recompute layer by layer, or keep its activations."""
        row = state.row.copy()
        anchor = int(self.rng.integers(self.num_groups))
        run = self._run(state.row, anchor)
        row[run] = self._recomputed(row[run])
        return state._replace(row=row, blocks=state.blocks or self._layer_blocks)

    # --- groups ----------------------------------------------------------------------------------

    def _recomputed(self, numbers: IntArray) -> IntArray:
        """The same decisions, with a kind of recomputation that the first one does not have."""
        first = self.space.candidates[numbers[0]]
        ways = [(False, Keeps.NOTHING), *((True, keeps) for keeps in self._kinds)]
        others = [way for way in ways if way != (first.recompute, first.keeps)]
        chosen = self.rng.integers(len(others)) if len(others) > 1 else 0
        recompute, keeps = others[chosen]
        changed = {
            number: self.space.add(
                replace(self.space.candidates[number], recompute=recompute, keeps=keeps)
            )
            for number in dict.fromkeys(numbers.tolist())
        }
        return np.array([changed[number] for number in numbers.tolist()], np.int32)

    def _some_groups(self, row: IntArray) -> IntArray:
        """A range of groups, a whole run, or all groups of one kind in a run."""
        kind = self.rng.random()
        if kind < 0.5:
            return self._range(self.num_groups)
        anchor = int(self.rng.integers(self.num_groups))
        run = self._run(row, anchor)
        if kind < 0.7:
            return run
        if kind < 0.85:
            return run[self._range(len(run))]
        alike: IntArray = run[self.alike[run] == self.alike[anchor]]
        return alike

    def _run(self, row: IntArray, anchor: int) -> IntArray:
        """The groups of the run that a group is in."""
        edges = self.edges(row)
        after = bisect_right(edges, anchor)
        first = edges[after - 1] if after else 0
        last = edges[after] if after < len(edges) else self.num_groups
        return np.arange(first, last, dtype=np.int32)

    def edges(self, row: IntArray) -> list[int]:
        """First group of each run but the first; cached, as many moves are drawn from a point."""
        if row is not self._last_row:
            self._last_row = row
            self._last_edges = (np.flatnonzero(row[1:] != row[:-1]) + 1).tolist()
        return self._last_edges

    def _range(self, size: int) -> IntArray:
        """A random range below ``size``; short ones are as likely as long ones."""
        length = min(max(int(math.exp(self.rng.uniform(0.0, math.log(size + 1)))), 1), size)
        first = int(self.rng.integers(size - length + 1))
        return np.arange(first, first + length, dtype=np.int32)

    def _shift_boundary(self, old: IntArray, row: IntArray) -> None:
        """Move a boundary between two runs of a point by a few groups, in a copy of its row."""
        edges = self.edges(old)
        if not edges:
            return
        edge = edges[self.rng.integers(len(edges))]
        step = int(self.rng.geometric(0.5))
        if self.rng.random() < 0.5:
            row[max(edge - step, 0) : edge] = row[edge]
        else:
            row[edge : edge + step] = row[edge - 1]

    def _move_samples(self, row: IntArray, chosen: IntArray) -> None:
        """Move one or a few samples between two devices of the first group's decision."""
        old = self.space.candidates[row[chosen[0]]]
        if len(old.devices) < 2:
            return
        giver, taker = self.rng.choice(len(old.devices), 2, replace=False)
        most = max(1, old.shares[giver] // 4)
        amount = min(int(self.rng.integers(1, most + 1)), old.shares[giver])
        shares = list(old.shares)
        shares[giver] -= amount
        shares[taker] += amount
        same = chosen[row[chosen] == row[chosen[0]]]
        row[same] = self.space.add(replace(old, shares=tuple(shares)))


def used(row: IntArray) -> list[int]:
    """The different candidates of a row, ascending; for short rows faster than numpy's."""
    return sorted(set(row.tolist()))


def _with_one_owner(decision: Decision) -> Decision:
    """A decision without ZeRO if a slice of a parameter would have several owners."""
    if has_one_owner(decision):
        return decision
    return replace(decision, sync=Sync.REDUCE_SCATTER_ALL_GATHER, slice_groups=())


def _merged(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Counts with every two micro-batches merged."""
    return tuple(sum(counts[first : first + 2]) for first in range(0, len(counts), 2))
