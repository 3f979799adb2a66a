"""What a policy sees of the moves of a local search: features of each move, without simulating it.

All features are ratios (to the step's seconds, a device's memory or the batch) or logarithms of
ratios, so that one policy serves models and clusters of any size. A ``View`` holds the features of
the point before a move; ``MoveFeatures.of`` describes many moves from it at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from heterog.lowering.group_edges import group_edges
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import saved_values
from heterog.methods.local_search.neighbours import BUCKETS, Move, MoveKind, State
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.simulator.place_facts import DEVICE_FACTS, GROUP_FACTS, PlaceFacts
from heterog.simulator.space import StrategySpace
from heterog.strategy.strategy import Decision, Sync

Array = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.integer[Any]]

_SYNCS = tuple(Sync)
_SCALARS = 8 + len(_SYNCS)
_SIZE, _HOSTS, _TEAM, _RECOMPUTES, _KEEPS, _STATE, _RATE, _LATENCY = range(8)
NUM_GROUP_FEATURES = len(GROUP_FACTS) + 6 + 6 + len(_SYNCS) + 1
NUM_STATE_FEATURES = 24
NUM_MOVE_FEATURES = len(MoveKind) + 2 * len(GROUP_FACTS) + 25 + 11 + 2 * (6 + len(_SYNCS)) + 3

_FIRST_FACT = len(MoveKind)
_FIRST_FULL = NUM_MOVE_FEATURES - 22
TIMELINE = {
    "groups": tuple(range(len(GROUP_FACTS))),
    "whole": (*range(8), 10, 11),
    "moves": (
        *range(_FIRST_FACT, _FIRST_FACT + 2 * len(GROUP_FACTS)),
        _FIRST_FACT + 2 * len(GROUP_FACTS) + 6,
        *(_FIRST_FULL + number for number in (0, 1, 3, 4)),
        NUM_MOVE_FEATURES - 1,
    ),
}
"""Columns of features that come from a simulation of the point."""


def _log(ratio: npt.ArrayLike) -> FloatArray:
    """Half the logarithm of a ratio, clipped at 1/20,000 and 20,000."""
    return np.asarray(0.5 * np.log(np.clip(np.asarray(ratio, np.float64), 5e-5, 2e4)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Features of a point of the search.

    Attributes:
        state: The point.
        step_s: Seconds of its step.
        facts: How these seconds are spent on groups and devices.
        groups: Features of each group of ops.  # [num_groups, NUM_GROUP_FEATURES]
        whole: Features of the whole step.  # [NUM_STATE_FEATURES]
        load_s: Seconds of compute on each device, by shares alone.  # [num_devices]
        memory: Peak of each device's memory as a part of what is usable.  # [num_devices]
    """

    state: State
    step_s: float
    facts: PlaceFacts
    groups: Array
    whole: Array
    load_s: FloatArray
    memory: FloatArray


class _Decisions:
    """Features of the candidates that points and moves use, in arrays as long as the space."""

    def __init__(self, evaluator: Evaluator, space: StrategySpace) -> None:
        self._evaluator, self._space = evaluator, space
        devices = evaluator.cluster.num_devices
        self.shares = np.zeros((0, devices))
        self.member = np.zeros((0, devices), np.bool_)
        self.scalars = np.zeros((0, _SCALARS))
        self.described = np.zeros((0, 6 + len(_SYNCS)))  # the part that becomes group features
        self._host = np.array(evaluator.cluster.host_of)
        self._priced: dict[tuple[object, ...], tuple[float, float]] = {}
        self._is_filled = np.zeros(0, np.bool_)

    def fill(self, rows: IntArray) -> None:
        """Describe the candidates of some rows."""
        count = len(self._space.candidates)
        if count > len(self.shares):
            more = max(2 * count, 256) - len(self.shares)
            self.shares = np.pad(self.shares, ((0, more), (0, 0)))
            self.member = np.pad(self.member, ((0, more), (0, 0)))
            self.scalars = np.pad(self.scalars, ((0, more), (0, 0)))
            self.described = np.pad(self.described, ((0, more), (0, 0)))
            self._is_filled = np.pad(self._is_filled, (0, more))
        for number in set(rows[~self._is_filled[rows]].tolist()):
            self._fill(number, self._space.candidates[number])
            self._is_filled[number] = True

    def _fill(self, number: int, decision: Decision) -> None:
        devices, size = list(decision.devices), len(decision.devices)
        part = np.array(decision.shares, np.float64) / max(sum(decision.shares), 1)
        shares = self.shares[number]
        shares[devices] = part
        team = 1.0
        for members in decision.teams:
            shares[list(members)] = shares[list(members)].sum() / len(members)
            team = max(team, float(len(members)))
        self.member[number, devices] = True
        rate, latency = self._sync(decision) if size > 1 else (0.0, 0.0)
        sync = decision.sync
        state = 1.0 / size if sync.is_sharded or sync.is_served else 1.0
        row = self.scalars[number]
        row[:8] = (
            np.log2(size), len(set(self._host[devices].tolist())), np.log2(team),
            decision.recompute, int(decision.keeps) / 2.0 if decision.recompute else 0.0,
            state / team, rate, latency,
        )  # fmt: skip
        row[8 + _SYNCS.index(sync)] = size > 1
        cluster = self._evaluator.cluster
        whole = max(np.log2(cluster.num_devices), 1.0), cluster.num_hosts, 3.0, 1.0, 1.0, 1.0
        self.described[number] = (*(row[:6] / whole), *row[8:])

    def _sync(self, decision: Decision) -> tuple[float, float]:
        """Seconds per byte of gradients and of latency of a decision's synchronisation."""
        key = decision.devices, decision.sync, decision.slices, decision.teams
        if key not in self._priced:
            evaluator, rate, latency = self._evaluator, 0.0, 0.0
            if decision.sync.is_served:
                hosts = self._host[list(decision.devices)]
                counts = np.bincount(hosts)
                used = np.flatnonzero(counts)
                nic = [evaluator.cluster.nic_bandwidth_bytes_per_s[host] for host in used.tolist()]
                each = counts[used] * (len(hosts) - counts[used]) / len(hosts)
                rate = float((2.0 * each / np.array(nic)).max())
                if len(used) == 1:
                    inner = evaluator.cluster.hosts[used[0]].intra.bandwidth_bytes_per_s
                    rate = 2.0 * (len(hosts) - 1) / len(hosts) / inner
            else:
                for channel in evaluator.channels.for_decision(decision):
                    cost = evaluator.prices.pricer.seconds(evaluator.channels[channel])
                    rate += cost.seconds_per_byte
                    latency += cost.latency_s + cost.fill_s
            self._priced[key] = rate, latency
        return self._priced[key]


class MoveFeatures:
    """Makes views of points and describes moves.

    Args:
        evaluator: Evaluator of the graph on the cluster.
        space: Space of the search's rows.
    """

    def __init__(self, evaluator: Evaluator, space: StrategySpace) -> None:
        self._evaluator, self._space = evaluator, space
        self._decisions = _Decisions(evaluator, space)
        tables, cluster = evaluator.tables, evaluator.cluster
        self._types = evaluator.prices.types
        num_groups, batch = tables.num_groups, evaluator.graph.batch_size
        self._batch = batch
        types = range(len(cluster.device_types))
        seconds = [evaluator.prices.seconds_of_groups(kind, batch) for kind in types]
        self._again, self._seconds = np.stack(seconds, axis=1)  # [num_types, num_groups] each
        speed = 1.0 / self._seconds.sum(axis=1)[self._types]
        self._bound_s = 1.0 / speed.sum()
        whole = self._seconds[self._types].mean(axis=0)
        self._compute = whole / max(whole.sum(), 1e-30)
        self._gradient = np.bincount(tables.parameter_group, tables.gradient_bytes, num_groups)
        self._state = (1.0 + tables.state_ratio) * np.bincount(
            tables.parameter_group, tables.parameter_bytes, num_groups
        )
        self._saved = self._saved_bytes()
        self._usable = np.array([each.usable_memory_bytes for each in cluster.devices], float)
        nic = cluster.nic_bandwidth_bytes_per_s
        if cluster.num_hosts == 1:
            nic = (cluster.hosts[0].intra.bandwidth_bytes_per_s,)
        self._nic = float(np.exp(np.log(nic).mean()))
        self.edges, self._edge_bytes = group_edges(self._evaluator.tables)

    def _saved_bytes(self) -> FloatArray:
        """Bytes that each group keeps for its backward pass, for the whole batch."""
        tables = self._evaluator.tables
        kept = saved_values(tables) & (tables.value_axis == 0)
        kept &= tables.op_group[tables.value_op] >= 0
        group = tables.op_group[tables.value_op[kept]]
        size = tables.value_bytes_per_unit[kept] * self._batch
        return np.bincount(group, size, tables.num_groups).astype(np.float64)

    # --- views -----------------------------------------------------------------------------------

    def view(self, state: State, found: Evaluation, facts: PlaceFacts) -> View:
        """Features of a point that was simulated."""
        row = state.row
        self._decisions.fill(row)
        load = self._load(row, np.arange(len(row)))
        peak = np.array(found.peak_memory_bytes or (0,) * len(self._usable), np.float64)
        memory = peak / self._usable
        groups = np.column_stack([
            _log(1e2 * facts.groups + 1e-2),
            self._static,
            self._decisions.described[row],
            _ruled(state),
        ])  # fmt: skip
        return View(
            state=state,
            step_s=found.step_time_s,
            facts=facts,
            groups=groups.astype(np.float32),
            whole=self._whole(state, found.step_time_s, facts, memory, load).astype(np.float32),
            load_s=load,
            memory=memory,
        )

    @cached_property
    def _static(self) -> FloatArray:
        num = len(self._compute)
        saved, gradient = self._saved, self._gradient
        return np.column_stack([
            _log(self._compute * num),
            _log(gradient / max(gradient.sum(), 1.0) * num),
            _log(saved / max(saved.sum(), 1.0) * num),
            _log(gradient / self._nic * num / self._bound_s),
            np.arange(num) / max(num - 1, 1),
            np.full(num, np.log(num) / 4.0),
        ])  # fmt: skip

    def _load(self, row: Numbers, groups: Numbers) -> FloatArray:
        """Seconds of compute of some groups on each device, by their shares."""
        numbers, of = np.unique(row[groups], return_inverse=True)
        load = np.zeros(len(self._types))
        for index, number in enumerate(numbers.tolist()):
            inside = groups[of == index]
            seconds = self._seconds[:, inside].sum(axis=1)
            if self._decisions.scalars[number, _RECOMPUTES]:
                seconds = seconds + self._again[:, inside].sum(axis=1)
            load += self._decisions.shares[number] * seconds[self._types]
        return load

    def _whole(
        self, state: State, step_s: float, facts: PlaceFacts, memory: FloatArray, load: FloatArray
    ) -> FloatArray:
        cluster, by_column = self._evaluator.cluster, facts.groups.sum(axis=0)
        micro = len(state.micro_batches[0]) if state.micro_batches else 1
        busy = facts.devices[:, DEVICE_FACTS.index("compute")]
        return np.array([
            *by_column[4:],
            _log(step_s / self._bound_s), load.max() / step_s, busy.mean(),
            facts.devices[:, -1].max(), min(memory.max(), 4.0), np.log2(micro) / 4.0,
            np.log2(cluster.num_devices) / 5.0, np.log(len(state.row)) / 4.0,
            (np.diff(state.row) != 0).sum() / 16.0, float(bool(state.rules)),
            float(state.schedule.splits_backward), float(any(map(any, state.schedule.in_flight))),
            _bucket(state), *(float(state.order == order) for order in Order),
        ])  # fmt: skip

    # --- moves -----------------------------------------------------------------------------------

    def of(self, view: View, moves: Sequence[Move]) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Features of moves from a point, and the groups that each move changes.

        Returns:
            # [num_moves, NUM_MOVE_FEATURES], [num_moves, num_groups]
        """
        old = view.state.row
        rows = np.stack([move.state.row for move in moves])
        self._decisions.fill(rows)
        count = len(rows)
        changed = changed_groups(view.state, moves)
        which, group = np.nonzero(changed)
        # Groups of a move with the same old and the same new decision are described together.
        before, after = old[group].astype(np.int64), rows[which, group].astype(np.int64)
        most = len(self._space.candidates)
        key = (which * most + before) * most + after
        unique, of = np.unique(key, return_inverse=True)
        part, pair = np.divmod(unique, most * most)
        source, target = np.divmod(pair, most)
        features = [
            _KINDS[[_SEEN_AS.get(move.kind, move.kind) for move in moves]],
            self._changed_facts(view, which, group, count),
            self._changed_load(view, (which, group, of), (part, source, target), count),
            self._changed_cuts(view, rows, count),
            self._changed_decisions(view, (which, group, of), (part, source, target), count),
            self._changed_devices(view, (part, source, target), count),
            self._changed_settings(view, moves),
            self._changed_rules(view, moves),
        ]
        return np.concatenate(features, axis=1).astype(np.float32), changed

    def _changed_facts(self, view: View, which: Numbers, group: Numbers, count: int) -> FloatArray:
        """Facts of the changed groups of each move: their sums, and parts of the whole step's."""
        facts = view.facts.groups[group]
        total = np.zeros((count, facts.shape[1]))
        np.add.at(total, which, facts)
        number = np.bincount(which, minlength=count)
        every = view.facts.groups.sum(axis=0) + 1e-9
        size = np.column_stack([
            number / len(view.state.row),
            np.bincount(which, self._compute[group], count),
            np.bincount(which, self._gradient[group], count) / max(self._gradient.sum(), 1.0),
            number == 0,
        ])  # fmt: skip
        return np.concatenate([total, total / every, size], axis=1)

    def _changed_load(
        self,
        view: View,
        places: tuple[Numbers, Numbers, Numbers],
        pairs: tuple[Numbers, Numbers, Numbers],
        count: int,
    ) -> FloatArray:
        """Compute and memory of devices after each move, by shares alone."""
        (_, group, of), (part, source, target) = places, pairs
        known = self._decisions
        by_type = np.stack([np.bincount(of, row[group], len(part)) for row in self._seconds])
        again = np.stack([np.bincount(of, row[group], len(part)) for row in self._again])

        def seconds(numbers: Numbers) -> FloatArray:
            of_types = by_type + again * known.scalars[numbers, _RECOMPUTES]
            return np.asarray(known.shares[numbers] * of_types[self._types].T)

        delta = np.zeros((count, len(self._types)))
        np.add.at(delta, part, seconds(target) - seconds(source))
        load = view.load_s + delta
        state = np.bincount(of, self._state[group], len(part))[:, None]
        saved = np.bincount(of, self._saved[group], len(part))[:, None]

        def held(numbers: Numbers) -> FloatArray:
            own = known.scalars[numbers]
            kept = np.where(own[:, _RECOMPUTES] > 0, 0.2, 1.0)[:, None]
            return np.asarray(
                state * known.member[numbers] * own[:, _STATE, None]
                + saved * kept * known.shares[numbers]
            )

        more = np.zeros((count, len(self._types)))
        np.add.at(more, part, held(target) - held(source))
        memory = view.memory + more / self._usable
        path, cost = view.facts.devices[:, 1], view.step_s
        return np.column_stack([
            np.clip((load.max(axis=1) - view.load_s.max()) / cost, -2, 2),
            np.clip(load.max(axis=1) / cost, 0, 4),
            np.clip(delta @ path / max(path.sum(), 1e-9) / cost, -2, 2),
            np.clip(delta.sum(axis=1) / len(self._types) / cost, -2, 2),
            np.clip((np.maximum(delta, 0.0)).max(axis=1) / cost, 0, 4),
            np.clip(memory.max(axis=1), 0, 4),
            np.clip(memory.max(axis=1) - view.memory.max(), -2, 2),
            memory.max(axis=1) > 1.0,
        ])  # fmt: skip

    def _changed_cuts(self, view: View, rows: Numbers, count: int) -> FloatArray:
        """Seconds of values between groups with other placements, before and after each move."""
        first, second = self.edges
        old = view.state.row
        changed = (rows[:, first] != old[first]) | (rows[:, second] != old[second])
        which, edge = np.nonzero(changed)
        most = len(self._space.candidates)
        pairs = [
            old[first[edge]].astype(np.int64) * most + old[second[edge]],
            rows[which, first[edge]].astype(np.int64) * most + rows[which, second[edge]],
        ]
        unique, of = np.unique(np.concatenate(pairs), return_inverse=True)
        left, right = np.divmod(unique, most)
        shares = self._decisions.shares
        apart = 1.0 - np.minimum(shares[left], shares[right]).sum(axis=1)
        moved = (apart[of] * np.tile(self._edge_bytes[edge], 2)).reshape(2, -1) / self._nic
        before, after = (np.bincount(which, row, count) / view.step_s for row in moved)
        cuts = [(np.diff(row) != 0).sum(axis=-1) for row in (old, rows)]
        return np.column_stack([
            np.clip(after - before, -4, 4), _log((after + 1e-3) / (before + 1e-3)),
            (cuts[1] - cuts[0]) / 4.0,
        ])  # fmt: skip

    def _changed_decisions(
        self,
        view: View,
        places: tuple[Numbers, Numbers, Numbers],
        pairs: tuple[Numbers, Numbers, Numbers],
        count: int,
    ) -> FloatArray:
        """Decisions before and after, weighted by compute, and the change of synchronisation."""
        (_, group, of), (part, source, target) = places, pairs
        weight = np.bincount(of, self._compute[group] + 1e-6, len(part))
        total = np.maximum(np.bincount(part, weight, count), 1e-12)[:, None]
        described = []
        for numbers in (source, target):
            mean = np.zeros((count, 6 + len(_SYNCS)))
            np.add.at(mean, part, self._decisions.described[numbers] * weight[:, None])
            described.append(mean / total)
        known, size = self._decisions.scalars, np.bincount(of, self._gradient[group], len(part))
        has = np.bincount(of, self._gradient[group] > 0.0, len(part))
        sync = [
            np.bincount(part, size * known[n, _RATE] + has * known[n, _LATENCY], count)
            / view.step_s
            for n in (source, target)
        ]
        return np.column_stack([
            described[0], described[1] - described[0],
            np.clip(sync[1] - sync[0], -4, 4), _log((sync[1] + 1e-3) / (sync[0] + 1e-3)),
        ])  # fmt: skip

    def _changed_devices(
        self, view: View, pairs: tuple[Numbers, Numbers, Numbers], count: int
    ) -> FloatArray:
        """How full the devices of changed groups are, before and after each move.

        The busiest link, the busiest stream and the fullest memory of any device.
        """
        part, source, target = pairs
        column = [DEVICE_FACTS.index(name) for name in ("link", "compute")]
        full = np.column_stack([view.facts.devices[:, column], np.minimum(view.memory, 4.0)])
        found = np.zeros((count, 6))
        for number, numbers in enumerate((source, target)):
            member = self._decisions.member[numbers]
            most = (member[:, :, None] * full).max(axis=1)
            np.maximum.at(found[:, 3 * number : 3 * number + 3], part, most)
        return found

    def _changed_rules(self, view: View, moves: Sequence[Move]) -> FloatArray:
        """Gradients, compute and seconds of gradients of groups that get rules or lose them."""
        worth = np.column_stack([
            self._gradient / max(self._gradient.sum(), 1.0),
            self._compute,
            view.facts.groups[:, GROUP_FACTS.index("gradients")] / view.step_s,
        ])  # fmt: skip
        before = _ruled(view.state)
        found = np.zeros((len(moves), 3))
        for row, move in zip(found, moves, strict=True):
            if move.state.rules is not view.state.rules:
                row[:] = (_ruled(move.state) - before) @ worth
        return np.clip(found, -4, 4)

    def _changed_settings(self, view: View, moves: Sequence[Move]) -> FloatArray:
        found = np.zeros((len(moves), 13))
        before = _settings(view.state)
        for row, move in zip(found, moves, strict=True):
            new, old = move.state, view.state
            if move.kind in _SETTINGS or new.rules is not old.rules:
                row[:8] = np.subtract(_settings(new), before)
                row[1] = new.micro_batches != old.micro_batches
                row[4] = new.order != old.order
                row[8:10] = before[0] / 4.0, before[2]
                row[10 + int(old.order)] = 1.0
        return found


_SEEN_AS = {MoveKind.PROPOSAL: MoveKind.DECISION}
"""Kinds that policies see as another kind: proposals are no property of a plan."""
_SETTINGS = (
    MoveKind.TEAMS, MoveKind.RULES, MoveKind.BUCKETS, MoveKind.ORDER, MoveKind.MICRO_BATCHES,
    MoveKind.STAGES, MoveKind.STRUCTURE, MoveKind.EVERYWHERE, MoveKind.PIPELINING,
    MoveKind.SHARDED,
)  # fmt: skip


_KINDS = np.eye(len(MoveKind))


def _ruled(state: State) -> FloatArray:
    """Whether each group has rules, as numbers."""
    return np.array(state.rules or (0,) * len(state.row)).clip(max=1).astype(np.float64)


def changed_groups(state: State, moves: Sequence[Move]) -> npt.NDArray[np.bool_]:
    """Groups whose decision or rules each move changes.  # [num_moves, num_groups]"""
    changed: npt.NDArray[np.bool_] = np.stack([move.state.row for move in moves]) != state.row
    none = (0,) * len(state.row)
    for row, move in zip(changed, moves, strict=True):
        if move.state.rules is not state.rules:
            row |= np.not_equal(move.state.rules or none, state.rules or none)
    return changed


def _bucket(state: State) -> float:
    return float(np.searchsorted(BUCKETS, state.bucket_bytes)) / 4.0


def _settings(state: State) -> tuple[float, ...]:
    """Settings of the whole step, as numbers."""
    micro = len(state.micro_batches[0]) if state.micro_batches else 1
    most = max(map(max, filter(None, state.schedule.in_flight)), default=0)
    return (
        float(np.log2(micro)), 0.0, _bucket(state),
        float(state.order), 0.0, float(state.schedule.splits_backward), most / micro,
        (len(state.rules) - state.rules.count(0)) / len(state.row),
    )  # fmt: skip
