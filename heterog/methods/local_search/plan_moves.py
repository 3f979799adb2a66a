"""Moves that change a whole plan at once, for a search that a policy leads.

``Neighbours`` changes a few groups at a time. It reaches a pipeline, or ZeRO everywhere, only
through many points that are each slower than the one before. A move here takes all of these at
once: new stages with balanced cuts, two stages joined or one divided, the cuts of a plan balanced
again, samples moved from all busy devices to all idle ones, the same change to every decision,
other micro-batches and caps, layers sharded on their own or on other devices. Everything else
about a move is drawn at random.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby, pairwise

import numpy as np

from heterog.grouped import cut, grouped
from heterog.lowering.program import FloatArray, IntArray
from heterog.memo import kept
from heterog.methods.changes import without_devices
from heterog.methods.local_search.move_features import View
from heterog.methods.local_search.neighbours import Move, MoveKind, Neighbours, State, used
from heterog.methods.model_parallel import stage_starts
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.tuned_uniform import tuned_decision
from heterog.simulator.engine import Order
from heterog.strategy.division import split_in_proportion
from heterog.strategy.layouts.stages import Caps, capped, layer_blocks, stage_of_group
from heterog.strategy.schedules import PipelineSchedule
from heterog.strategy.strategy import Decision, Keeps, Sync

_MICRO = (1, 2, 4, 8, 16, 32)
_MOST_STAGES = 24
_MOST_TASKS = 400_000
"""Ops of all micro-batches on all devices above which a plan is not proposed."""
PLAN_PART = 0.4
"""Part of the moves that are drawn together which change a whole plan."""
_KINDS = (
    (MoveKind.STAGES, 0.3), (MoveKind.STRUCTURE, 0.15), (MoveKind.RECUT, 0.1),
    (MoveKind.SHARES, 0.15), (MoveKind.EVERYWHERE, 0.15), (MoveKind.PIPELINING, 0.15),
    (MoveKind.SHARDED, 0.25),
)  # fmt: skip
_SPREAD = 0.2  # standard deviation of the noise on log seconds of stages when cuts are balanced
Devices = tuple[int, ...]
Change = Callable[[Decision], Decision]


class PlanMoves:
    """Random changes of whole plans.

    Args:
        neighbours: The search's small moves, whose candidates, generator and rules are used.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self._near, self._space = neighbours, neighbours.space
        self._evaluator = evaluator = neighbours.problem.evaluator
        self._cluster, self._graph = evaluator.cluster, evaluator.graph
        self._num_groups = neighbours.num_groups
        kinds = range(len(evaluator.cluster.device_types))
        self._num_ops = evaluator.group_num_ops
        self._seconds: FloatArray = np.stack([
            evaluator.prices.seconds_of_groups(kind, self._graph.batch_size)[1] + 1e-9
            for kind in kinds
        ])  # [num_types, num_groups]  # fmt: skip
        self._types = np.array(self._cluster.type_index)
        self._parameters = evaluator.group_state_bytes
        self._activations = evaluator.group_saved_bytes
        self._usable = np.array([d.usable_memory_bytes for d in self._cluster.devices], float)
        self._blocks = layer_blocks(self._graph)
        self._recomputations = kinds_worth_trying(self._graph)
        self._by_kind = list(
            grouped((kind, host) for host, kind in enumerate(self._cluster.host_kind)).values()
        )
        names, weights = zip(*_KINDS, strict=True)
        self._names, self._weights = names, np.cumsum(weights) / sum(weights)
        self._make: dict[MoveKind, Callable[[State], State | None]] = {
            MoveKind.STAGES: self._staged,
            MoveKind.STRUCTURE: self._restructured,
            MoveKind.RECUT: self._recut,
            MoveKind.EVERYWHERE: self._everywhere,
            MoveKind.PIPELINING: self._pipelined,
            MoveKind.SHARDED: self._sharded,
        }

    @property
    def rng(self) -> np.random.Generator:
        """The search's generator, which environments exchange."""
        return self._near.rng

    def move(self, state: State, busy_s: FloatArray) -> Move:
        """Draw a move.

        Args:
            state: The plan.
            busy_s: Seconds that each device computes in it.  # [num_devices]
        """
        kind = self._names[int(np.searchsorted(self._weights, self.rng.random()))]
        made = self._shared(state, busy_s) if kind == MoveKind.SHARES else self._make[kind](state)
        if made is None or not self._is_small(made):
            return Move(kind, state)
        return Move(kind, made, without=state if kind == MoveKind.SHARDED else None)

    def _is_small(self, state: State) -> bool:
        """Whether a simulation is short enough, by the number of ops."""
        if not state.micro_batches:
            return True
        ops = np.bincount(state.row, self._num_ops)
        tasks = sum(len(self._space.candidates[n].devices) * int(ops[n]) for n in used(state.row))
        return len(state.micro_batches[0]) * tasks <= _MOST_TASKS

    # --- stages ----------------------------------------------------------------------------------

    def _some_devices(self) -> list[Devices]:
        """Devices of some hosts, host by host: all or some kinds, in random order."""
        kinds = [self._by_kind[n] for n in self.rng.permutation(len(self._by_kind)).tolist()]
        if len(kinds) > 1 and self.rng.random() < 0.4:
            kinds = kinds[: int(self.rng.integers(1, len(kinds)))]
        hosts = [host for kind in kinds for host in kind]
        if len(kinds) > 1 and self.rng.random() < 0.25:
            hosts = sorted(hosts) if self.rng.random() < 0.5 else sorted(hosts, reverse=True)
        if len(hosts) > 1 and self.rng.random() < 0.2:
            hosts = hosts[: int(self.rng.integers(1, len(hosts)))]
        return [self._cluster.host_devices[host] for host in hosts]

    def _staged(self, state: State) -> State | None:
        """Stages on some devices, balanced; replicas on all of them if there is one stage."""
        hosts = self._some_devices()
        everything = tuple(device for host in hosts for device in host)
        most = min(len(everything), self._num_groups, _MOST_STAGES)
        count = int(np.exp(self.rng.uniform(0.0, np.log(most + 1))))
        if count <= len(hosts):
            parts = [[d for host in part for d in host] for part in cut(hosts, count)]
        else:
            parts = cut(everything, count)
        stages = [tuple(sorted(part)) for part in parts]
        decide = self._manner()
        decisions = [decide(devices) for devices in stages]
        micro = self._num_micro(1 if count == 1 and self.rng.random() < 0.7 else 2)
        return self._on_stages(state, decisions, micro)

    def _manner(self) -> Callable[[Devices], Decision]:
        """Draw a synchronisation and a recomputation, and return what decides all stages so."""
        kind, level = self.rng.random(), self.rng.random()
        ways = [Sync.HIERARCHICAL, Sync.RING, Sync.PARAMETER_SERVER]
        if self._graph.updates_elementwise:
            ways += [Sync.ZERO1, Sync.ZERO2, Sync.ZERO3]
        sync = ways[int(level * len(ways))] if kind < 0.5 else None
        recompute = self.rng.random() < 0.3
        keeps = self._recomputations[int(self.rng.integers(len(self._recomputations)))]

        return lambda devices: self._decision(devices, sync, recompute, keeps)

    @kept
    def _decision(
        self, devices: Devices, sync: Sync | None, recompute: bool, keeps: Keeps
    ) -> Decision:
        made = tuned_decision(self._evaluator, devices, self._space.speeds)
        if sync is not None and len(devices) > 1:
            made = _synchronised(made, sync)
        return replace(made, recompute=True, keeps=keeps) if recompute else made

    def _num_micro(self, least: int) -> int:
        counts = [count for count in _MICRO if least <= count <= self._graph.batch_size] or [1]
        return counts[int(self.rng.integers(len(counts)))] if least > 1 else 1

    def _on_stages(self, state: State, decisions: Sequence[Decision], micro: int) -> State:
        numbers = [self._space.add(decision) for decision in decisions]
        starts = self._balanced(numbers)
        stages = [decision.devices for decision in decisions]
        row = self._row(numbers, starts)
        return State(
            row=row,
            bucket_bytes=state.bucket_bytes,
            first_bucket_bytes=state.first_bucket_bytes,
            micro_batches=self._space.micro_batches(micro),
            order=self._order(state, micro),
            schedule=self._schedule(stages, row, micro),
            blocks=tuple(sorted({*self._blocks, *starts}))
            if any(decision.recompute for decision in decisions)
            else (),
        )

    def _row(self, numbers: Sequence[int], starts: Sequence[int]) -> IntArray:
        """The candidate of each group, by the stage that it is in."""
        ends = (*starts[1:], self._num_groups)
        sizes = [end - first for first, end in zip(starts, ends, strict=True)]
        return np.repeat(np.array(numbers, np.int32), sizes)

    def _order(self, state: State, micro: int) -> Order:
        """A random order with micro-batches, whose best order differs from that without."""
        orders = self._near.problem.orders
        return orders[int(self.rng.integers(len(orders)))] if micro > 1 else state.order

    def _schedule(self, stages: Sequence[Devices], row: IntArray, micro: int) -> PipelineSchedule:
        used = [device for devices in stages for device in devices]
        caps = Caps.NONE
        if micro > 1 and len(stages) > 1 and len(set(used)) == len(used):
            caps = Caps(int(self.rng.integers(len(Caps))))
        return capped(
            self._graph,
            stages,
            stage_of_group(self._near.edges(row), self._num_groups),
            caps,
            self._cluster.num_devices,
            splits_backward=len(stages) > 1 and self.rng.random() < 0.3,
        )

    def _balanced(self, numbers: Sequence[int]) -> Sequence[int]:
        """First group of each stage, each with at least one."""
        seconds, memory, room = zip(*map(self._costs, numbers), strict=True)
        noise = 0.0 if self.rng.random() < 0.5 else _SPREAD
        spread = np.exp(noise * self.rng.normal(size=len(numbers)))
        limit = np.array(room) if self.rng.random() < 0.5 else np.full(len(room), np.inf)
        return stage_starts(np.array(seconds).T * spread, np.array(memory).T, limit)

    @kept
    def _costs(self, number: int) -> tuple[FloatArray, FloatArray, float]:
        """Seconds and bytes of each group under a candidate, and room on its smallest device."""
        decision = self._space.candidates[number]
        part = np.array(decision.shares) / max(sum(decision.shares), 1)
        devices = list(decision.devices)
        each = part[:, None] * self._seconds[self._types[devices]]
        seconds = each.max(axis=0) * (4 / 3 if decision.recompute else 1.0)
        stays = 0.2 if decision.recompute else 1.0
        state = 1.0 / len(devices) if decision.sync.is_sharded else 1.0
        share = self._activations * stays / len(devices)
        return seconds, self._parameters * state + share, float(self._usable[devices].min())

    def _runs(self, state: State) -> list[tuple[int, int]]:
        """First group and end of each run."""
        return list(pairwise((0, *self._near.edges(state.row), self._num_groups)))

    def _stages_of(self, state: State) -> list[Decision]:
        """A decision for each stage of a plan; successive runs on the same devices are a stage."""
        decisions = (self._space.candidates[state.row[first]] for first, _ in self._runs(state))
        return [next(alike) for _, alike in groupby(decisions, key=lambda each: each.devices)]

    def _recut(self, state: State) -> State | None:
        """The plan's stages with cuts in balance."""
        decisions = self._stages_of(state)
        if not 2 <= len(decisions) <= min(_MOST_STAGES, self._num_groups):
            return None
        numbers = [self._space.add(decision) for decision in decisions]
        starts = self._balanced(numbers)
        blocks = state.blocks and tuple(sorted({*state.blocks, *starts}))
        return state._replace(row=self._row(numbers, starts), blocks=blocks)

    def _restructured(self, state: State) -> State | None:
        """Two stages joined, exchanged, or one divided, and all cuts in balance."""
        decisions = self._stages_of(state)
        count = len(decisions)
        if count > _MOST_STAGES:
            return None
        kind, decide = self.rng.random(), self._manner()
        if count > 1 and kind < 0.4:  # join
            at = int(self.rng.integers(count - 1))
            both = sorted({*decisions[at].devices, *decisions[at + 1].devices})
            decisions[at : at + 2] = [decide(tuple(both))]
        elif count > 1 and kind < 0.6:
            first, second = self.rng.choice(count, 2, replace=False).tolist()
            decisions[first], decisions[second] = decisions[second], decisions[first]
        else:
            wide = [n for n, each in enumerate(decisions) if len(each.devices) > 1]
            if not wide or count >= self._num_groups:
                return None
            at = wide[int(self.rng.integers(len(wide)))]
            halves = [decide(tuple(part)) for part in cut(decisions[at].devices, 2)]
            decisions[at : at + 1] = halves if self.rng.random() < 0.5 else halves[::-1]
        micro = len(state.micro_batches[0]) if state.micro_batches else self._num_micro(2)
        return self._on_stages(state, decisions, micro if len(decisions) > 1 else 1)

    # --- shares ----------------------------------------------------------------------------------

    def _shared(self, state: State, busy_s: FloatArray) -> State | None:
        """Samples moved from all busy devices to all idle ones, in a run or everywhere."""
        power = float(self.rng.uniform(0.2, 1.2))
        runs = self._runs(state)
        if self.rng.random() < 0.5:
            runs = [runs[int(self.rng.integers(len(runs)))]]
        row = state.row.copy()
        for number in {int(state.row[first]) for first, _ in runs}:
            old = self._space.candidates[number]
            if len(old.devices) < 2:
                continue
            busy = busy_s[list(old.devices)]
            weights = (np.array(old.shares) + 0.25) * (
                (busy.mean() + 1e-9) / np.maximum(busy, 0.1 * busy.mean() + 1e-9)
            ) ** power
            shares = split_in_proportion(sum(old.shares), tuple(weights.tolist()))
            made = self._space.add(replace(old, shares=shares))
            for first, last in runs:
                if state.row[first] == number:
                    row[first:last] = made
        return state._replace(row=row)

    # --- changes to everything -------------------------------------------------------------------

    def _everywhere(self, state: State) -> State | None:
        """The same change to all decisions, or to all on the same devices."""
        numbers = used(state.row)
        if len(numbers) > 1 and self.rng.random() < 0.4:
            anchor = self._space.candidates[numbers[int(self.rng.integers(len(numbers)))]]
            numbers = [n for n in numbers if self._space.candidates[n].devices == anchor.devices]
        kind, blocks = self.rng.random(), state.blocks
        if kind < 0.4:
            change = self._other_synchronisation()
        elif kind < 0.6:
            change, blocks = self._other_recomputation(), blocks or self._blocks
        else:
            change = self._other_devices(joins=kind >= 0.8)
        row = state.row.copy()
        for number in numbers:
            made = self._space.add(change(self._space.candidates[number]))
            row[state.row == number] = made
        return state._replace(row=row, blocks=blocks)

    def _other_synchronisation(self) -> Change:
        ways = [sync for sync in Sync if not sync.is_sharded or self._graph.updates_elementwise]
        sync = ways[int(self.rng.integers(len(ways)))]
        return lambda old: _synchronised(old, sync)

    def _other_recomputation(self) -> Change:
        ways = [(False, Keeps.NOTHING), *((True, keeps) for keeps in self._recomputations)]
        again, keeps = ways[int(self.rng.integers(len(ways)))]
        return lambda old: replace(old, recompute=again, keeps=keeps)

    def _other_devices(self, *, joins: bool) -> Change:
        """A host, or all of a kind, joins or leaves."""
        hosts = self._by_kind[int(self.rng.integers(len(self._by_kind)))]
        if self.rng.random() < 0.6:
            hosts = [hosts[int(self.rng.integers(len(hosts)))]]
        chosen = {device for host in hosts for device in self._cluster.host_devices[host]}
        roomiest = int(self._usable.argmax())

        def changed(old: Decision) -> Decision:
            if not joins:
                return without_devices(old, chosen, roomiest)
            devices = tuple(sorted({*old.devices, *chosen}))
            if devices == old.devices or old.teams:
                return old
            sync = None if old.sync.takes_slices else old.sync
            return self._decision(devices, sync, old.recompute, old.keeps)

        return changed

    def _sharded(self, state: State) -> State | None:
        """Layers of a kind, or one of them, sharded on devices of their own, or no longer."""
        ways, rules = self._near.rules.layers, self._near.rules
        if not ways or rules.are_of_teams(state.rules):
            return None
        places = ways[int(self.rng.integers(len(ways)))]
        if self.rng.random() < 0.5:
            places = [places[int(self.rng.integers(len(places)))]]
        is_held = rules.holds(state.rules, places[0])
        change = rules.removed if is_held else rules.added
        changed = reduce(change, places, state.rules)
        if is_held:
            return state._replace(rules=changed)
        row, number = state.row.copy(), self._devices_for_shards(state)
        for members in map(list, places):
            row[members] = row[members[0]] if number is None else number
        return state._replace(row=row, rules=changed)

    def _devices_for_shards(self, state: State) -> int | None:
        """Candidate on a host, on hosts of a kind, or of another group; ``None``: no change."""
        kind = self.rng.random()
        if kind < 0.4:
            return None
        if kind < 0.6:
            return int(state.row[self.rng.integers(self._num_groups)])
        hosts = self._by_kind[int(self.rng.integers(len(self._by_kind)))]
        if kind < 0.9:
            hosts = [hosts[int(self.rng.integers(len(hosts)))]]
        devices = tuple(sorted(d for host in hosts for d in self._cluster.host_devices[host]))
        return self._space.add(self._space.decisions_on(devices)[0])

    def _pipelined(self, state: State) -> State | None:
        """Another number of micro-batches, and other caps on those in flight."""
        if not self._near.rules.may_cut(state.rules):
            return None
        micro = self._num_micro(2) if self.rng.random() < 0.9 else 1
        if state.micro_batches and self.rng.random() < 0.4:
            micro = len(state.micro_batches[0])
        stages = [decision.devices for decision in self._stages_of(state)]
        schedule = self._schedule(stages, state.row, micro)
        return state._replace(
            micro_batches=self._space.micro_batches(micro),
            order=self._order(state, micro),
            schedule=schedule,
        )


def _synchronised(old: Decision, sync: Sync) -> Decision:
    """The same devices with another synchronisation."""
    if len(old.devices) == 1 or old.sync == sync:
        return old
    slices = old.slices if sync.takes_slices else ()
    return replace(old, sync=sync, slices=slices, slice_groups=())


def drawn_moves(near: Neighbours, plans: PlanMoves, view: View, count: int) -> list[Move]:
    """Random moves from a point that change it: small ones, and a part of whole plans.

    Args:
        near: The small moves.
        plans: The moves of whole plans.
        view: Features of the point.
        count: Number of moves to draw; moves that change nothing are left out.
    """
    whole = int(PLAN_PART * count)
    moves = [near.move(view.state) for _ in range(count - whole)]
    moves += [plans.move(view.state, view.load_s) for _ in range(whole)]
    own = view.state.key
    return [move for move in moves if move.state.key != own] or moves[:1]
