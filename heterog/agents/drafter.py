"""Draws and varies drafts of a problem, and makes points of a search of them; simulates none.

A pipeline has stages of hosts of one kind each, or of neighbouring hosts of any kind. Hosts of one
kind are taken in order, so that there are few drafts even on 1,024 devices.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from heterog.agents.drafts import (
    Devices,
    Draft,
    Shard,
    Stage,
    balanced_starts,
    before,
    canonical,
    spread_starts,
)
from heterog.agents.finishing import Finisher
from heterog.graph.batch_plan import micro_batches_refused
from heterog.grouped import cut, grouped
from heterog.lowering.program import FloatArray
from heterog.memo import kept
from heterog.methods.local_search.neighbours import State
from heterog.methods.local_search.planner import Search
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.teams import host_teams, in_teams
from heterog.methods.tuned_uniform import tuned_decision
from heterog.simulator.engine import Order
from heterog.strategy.division import split_evenly
from heterog.strategy.layouts.stages import Caps, capped, layer_blocks, stage_of_group
from heterog.strategy.schedules import PipelineSchedule
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Keeps, Sync

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_STAGES = 24
MOST_TASKS = 400_000
"""Ops of all micro-batches on all devices above which a draft has fewer micro-batches."""
_REPLICAS, _SEGMENTS = 0.25, 0.2  # parts of the drafts; the others are pipelines
_SHARDED = 0.2  # part of those without teams
_BUCKETS = (DEFAULT_BUCKET_BYTES, DEFAULT_BUCKET_BYTES, 4 << 20, 0)
_SPREAD = 0.2  # standard deviation of the noise on log seconds of stages when cuts are balanced


class Drafter:
    """Draws drafts of a problem, and makes points of a search of them; see the module.

    Args:
        search: Search whose space and rules are used.
        rng: Generator of all draws.

    Attributes:
        seconds: Seconds of the groups before each group, by type of device and number of samples
            in a pass over the model.  # [num_types, num_sizes, num_groups + 1]
        sizes: These numbers of samples, ascending.  # [num_sizes]
    """

    def __init__(self, search: Search, rng: np.random.Generator) -> None:
        self.search, self.rng = search, rng
        self.evaluator = evaluator = search.evaluator
        self.graph, self.cluster = evaluator.graph, evaluator.cluster
        self.num_groups = search.num_groups
        self.types = np.array(self.cluster.type_index)
        self.speeds = np.array(search.speeds)
        of_kind = grouped((kind, host) for host, kind in enumerate(self.cluster.host_kind))
        self.kinds = list(of_kind.values())
        self.team_sizes = Finisher(evaluator, search.space).sizes
        self.recomputations = kinds_worth_trying(self.graph)
        self.blocks = layer_blocks(self.graph)
        batch = self.graph.batch_size
        self.micro_batches = [
            count
            for count in MICRO_BATCHES
            if count <= batch and not micro_batches_refused(self.graph, count)
        ]
        self.syncs = [
            sync for sync in Sync if not sync.is_sharded or self.graph.updates_elementwise
        ]
        self.sizes = np.unique(np.geomspace(1.0, batch, 6).round())
        self.num_ops, real = evaluator.group_num_ops, evaluator.tables.op_group >= 0
        self.seconds: FloatArray = np.stack([
            np.stack([self._before(kind, int(size), real) for size in self.sizes])
            for kind in range(len(self.cluster.device_types))
        ])  # fmt: skip

    def _before(self, kind: int, samples: int, real: npt.NDArray[np.bool_]) -> FloatArray:
        seconds = self.evaluator.prices.op_seconds(kind, samples)
        groups = self.evaluator.tables.op_group[real]
        of_group = np.bincount(groups, seconds[real], self.num_groups)
        return before(of_group.astype(np.float64) + 1e-9)

    def of_samples(self, kind: int, samples: float) -> FloatArray:
        """Seconds of all groups before each group, on a device type.  # [num_groups + 1]

        They are interpolated between numbers of samples that were priced.
        """
        sizes, found = self.sizes, self.seconds[kind]
        if samples <= sizes[0]:
            return np.asarray(found[0] * max(samples / sizes[0], 0.25))
        above = int(np.searchsorted(sizes, min(samples, sizes[-1])))
        part = (samples - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return np.asarray((1.0 - part) * found[above - 1] + part * found[above])

    # --- drawing ---------------------------------------------------------------------------------

    def drawn(self, count: int) -> list[Draft]:
        """Different drafts, up to so many."""
        return list(dict.fromkeys(self.draw() for _ in range(count)))

    def draw(self) -> Draft:
        """One draft."""
        kind = self.rng.random()
        if kind < _REPLICAS:
            return self._with_settings([self._everything()])
        if kind < _REPLICAS + _SEGMENTS:
            count = min(2 + int(self.rng.random() < 0.3), self.num_groups)
            sets = [self._everything()]
            while len(sets) < count:
                sets.append(sets[-1] if self.rng.random() < 0.3 else self._everything())
            return self._with_settings(sets)
        return self._with_settings(self._pipeline())

    def _some_kinds(self) -> list[list[int]]:
        """Hosts of all or some kinds in random order; all or some hosts of each kind."""
        kinds = [self.kinds[n] for n in self.rng.permutation(len(self.kinds)).tolist()]
        if len(kinds) > 1 and self.rng.random() < 0.5:
            kinds = kinds[: int(self.rng.integers(1, len(kinds) + 1))]
        if self.rng.random() < 0.3:
            kinds = [each[: self._upto(len(each))] for each in kinds]
        return kinds

    def _upto(self, most: int) -> int:
        """A number from 1 to ``most``, uniform in its logarithm."""
        return int(np.exp(self.rng.uniform(0.0, np.log(most + 1))))

    def _everything(self) -> Devices:
        """Devices of some hosts; seldom of a part of one, or a single one."""
        hosts = [host for kind in self._some_kinds() for host in kind]
        if self.rng.random() < 0.1:
            own = self.cluster.host_devices[hosts[0]]
            return own[: self._upto(len(own))]
        return tuple(sorted(d for host in hosts for d in self.cluster.host_devices[host]))

    def _pipeline(self) -> list[Devices]:
        """Devices of each stage of a pipeline; no device has two stages."""
        kinds = self._some_kinds()
        most = min(self.num_groups, MOST_STAGES)
        stages: list[Devices] = []
        if self.rng.random() < 0.6:
            for kind in kinds[:most]:
                stages += self._parts(kind, self._upto(most // min(len(kinds), most)))
        else:
            hosts = [host for kind in kinds for host in kind]
            stages = self._parts(hosts, self._upto(most))
        return stages[:most]

    def _parts(self, hosts: Sequence[int], count: int) -> list[Devices]:
        """Devices of some hosts in parts: whole hosts if there are enough."""
        own = [self.cluster.host_devices[host] for host in hosts]
        devices = [device for each in own for device in each]
        count = min(count, len(devices))
        if count <= len(own):
            return [tuple(sorted(d for each in part for d in each)) for part in cut(own, count)]
        return [tuple(sorted(part)) for part in cut(devices, count)]

    def _with_settings(self, devices: Sequence[Devices]) -> Draft:
        sync, team, is_even = self._sync(), self._team(), self.rng.random() < 0.1
        stages = tuple(
            Stage(
                each,
                self._sync() if self.rng.random() < 0.15 else sync,
                self._team() if self.rng.random() < 0.15 else team,
                is_even,
            )
            for each in devices
        )
        draft = Draft(stages, (0,) * len(stages))
        keeps = self.recomputations[int(self.rng.integers(len(self.recomputations)))]
        draft = replace(
            draft,
            keeps=keeps if self.rng.random() < 0.35 else None,
            bucket_bytes=_BUCKETS[int(self.rng.integers(len(_BUCKETS)))],
            splits_backward=len(stages) > 1 and self.rng.random() < 0.4,
            shards=self._shards() if self.rng.random() < _SHARDED else (),
            num_micro=self._num_micro(draft),
        )
        draft = replace(draft, order=self._order(draft.num_micro), caps=self._caps(draft))
        return canonical(self._small(replace(draft, starts=self.starts_of(draft))))

    def _shards(self) -> tuple[Shard, ...]:
        """One way to shard layers, or two."""
        ways = self.search.rules.layers
        if not ways:
            return ()
        return tuple(
            Shard(
                int(self.rng.integers(len(ways))), self._everything() * (self.rng.random() < 0.4)
            )
            for _ in range(1 + (self.rng.random() < 0.3))
        )

    def _sync(self) -> Sync:
        """In a third of cases reduce-scatter with slices by NICs, the fastest if memory allows."""
        if self.rng.random() < 0.35:
            return Sync.REDUCE_SCATTER_ALL_GATHER
        return self.syncs[int(self.rng.integers(len(self.syncs)))]

    def _team(self) -> int:
        if not self.team_sizes or self.rng.random() < 0.6:
            return 1
        return self.team_sizes[int(self.rng.integers(len(self.team_sizes)))]

    def _num_micro(self, draft: Draft) -> int:
        is_pipeline = len(draft.stages) > 1 and draft.is_disjoint
        if self.rng.random() < (0.15 if is_pipeline else 0.7):
            return 1
        return self.micro_batches[int(self.rng.integers(len(self.micro_batches)))]

    def _order(self, num_micro: int) -> Order:
        orders = self.search.problem.orders
        if num_micro == 1 and Order.RANK in orders and self.rng.random() < 0.7:
            return Order.RANK
        return orders[int(self.rng.integers(len(orders)))]

    def _caps(self, draft: Draft) -> Caps:
        if draft.num_micro == 1 or len(draft.stages) == 1 or not draft.is_disjoint:
            return Caps.NONE
        return Caps(int(self.rng.integers(len(Caps))))

    def _small(self, draft: Draft) -> Draft:
        """The draft with fewer micro-batches if a simulation would take too long."""
        bounds = (*draft.starts, self.num_groups)
        total = sum(
            int(self.num_ops[first:last].sum()) * len(stage.devices)
            for stage, (first, last) in zip(draft.stages, pairwise(bounds), strict=True)
        )
        fitting = [n for n in self.micro_batches if n <= max(MOST_TASKS // max(total, 1), 1)]
        return replace(draft, num_micro=min(draft.num_micro, fitting[-1]))

    # --- variants --------------------------------------------------------------------------------

    def near(self, draft: Draft, count: int) -> list[Draft]:
        """Up to ``count`` different drafts that differ from a draft in a few words."""
        found = dict.fromkeys(self._varied(draft) for _ in range(count))
        found.pop(draft, None)
        return list(found)

    def _varied(self, draft: Draft) -> Draft:
        ways = (self._with_other_settings, self._with_other_sharing, self._with_other_stages)
        for _ in range(self._upto(3)):
            draft = ways[int(self.rng.integers(len(ways)))](draft)
        return canonical(self._small(draft))

    def _with_other_settings(self, draft: Draft) -> Draft:
        """Another setting of the whole step."""
        kind = int(self.rng.integers(7))
        if kind == 6:
            return replace(draft, shards=() if draft.shards else self._shards())
        if kind == 0:
            near = [
                n for n in self.micro_batches if draft.num_micro / 2 <= n <= 2 * draft.num_micro
            ]
            return replace(draft, num_micro=near[int(self.rng.integers(len(near)))])
        if kind == 1:
            kinds = (None, *self.recomputations)
            return replace(draft, keeps=kinds[int(self.rng.integers(len(kinds)))])
        if kind == 2:
            return replace(draft, caps=self._caps(draft))
        if kind == 3:
            return replace(
                draft, splits_backward=len(draft.stages) > 1 and not draft.splits_backward
            )
        if kind == 4:
            orders = self.search.problem.orders
            return replace(draft, order=orders[int(self.rng.integers(len(orders)))])
        return replace(draft, bucket_bytes=_BUCKETS[int(self.rng.integers(len(_BUCKETS)))])

    def _with_other_sharing(self, draft: Draft) -> Draft:
        """Another synchronisation, team or rule for shares, of one stage or all."""
        kind, sync, team = int(self.rng.integers(3)), self._sync(), self._team()
        chosen = range(len(draft.stages))
        if self.rng.random() < 0.5:
            chosen = range(at := int(self.rng.integers(len(draft.stages))), at + 1)
        stages = list(draft.stages)
        for at in chosen:
            own = stages[at]
            stages[at] = (
                replace(own, sync=sync) if kind == 0
                else replace(own, team=team) if kind == 1
                else replace(own, is_even=not own.is_even)
            )  # fmt: skip
        return replace(draft, stages=tuple(stages))

    def _with_other_stages(self, draft: Draft) -> Draft:
        """A stage left out, added, divided, joined or exchanged with another, or other cuts."""
        stages, kind = list(draft.stages), self.rng.random()
        at = int(self.rng.integers(len(stages)))
        following = min(at + 1, len(stages) - 1)
        if kind < 0.25:
            return self._with_moved_cut(draft)
        if kind < 0.4 and len(stages) > 1:
            del stages[at]
        elif kind < 0.55 and len(stages) > 1:
            stages[at], stages[following] = stages[following], stages[at]
        elif kind < 0.7 and following != at:
            both = tuple(sorted({*stages[at].devices, *stages[following].devices}))
            stages[at : at + 2] = [replace(stages[at], devices=both)]
        elif kind < 0.85 and len(stages[at].devices) > 1:
            halves = cut(stages[at].devices, 2)
            if self.rng.random() < 0.3:  # the same devices with another synchronisation
                halves = [list(stages[at].devices)] * 2
            stages[at : at + 1] = [replace(stages[at], devices=tuple(half)) for half in halves]
            if halves[0] == halves[1]:
                stages[at] = replace(stages[at], sync=self._sync())
        else:
            stages[at] = replace(stages[at], devices=self._everything())
        if len(stages) > min(self.num_groups, MOST_STAGES):
            return draft
        made = replace(draft, stages=tuple(stages))
        made = replace(
            made,
            caps=made.caps if made.is_disjoint and len(stages) > 1 else Caps.NONE,
            splits_backward=made.splits_backward and len(stages) > 1,
        )
        return replace(made, starts=self.starts_of(made))

    def _with_moved_cut(self, draft: Draft) -> Draft:
        """A cut a few groups earlier or later, or all of them made again."""
        if len(draft.stages) == 1 or self.rng.random() < 0.3:
            return replace(draft, starts=self.starts_of(draft))
        starts = np.array(draft.starts[1:])
        step = self._upto(max(self.num_groups // 8, 1))
        starts[int(self.rng.integers(len(starts)))] += step if self.rng.random() < 0.5 else -step
        return replace(draft, starts=spread_starts(np.sort(starts), self.num_groups))

    # --- cuts ------------------------------------------------------------------------------------

    def starts_of(self, draft: Draft) -> tuple[int, ...]:
        """First group of each stage: balanced cuts in a pipeline, else random ones."""
        count = len(draft.stages)
        if count == 1:
            return (0,)
        if not draft.is_disjoint:
            return self._anywhere(count)
        seconds = np.stack([
            self.stage_seconds(stage, draft.num_micro) for stage in draft.stages
        ])  # [num_stages, num_groups + 1]  # fmt: skip
        if self.rng.random() < 0.5:
            seconds = seconds * np.exp(_SPREAD * self.rng.normal(size=(count, 1)))
        return balanced_starts(seconds)

    def _anywhere(self, count: int) -> tuple[int, ...]:
        """Cuts at random places, uniform over groups, seconds or parameters."""
        kind = int(self.rng.integers(3))
        weight: FloatArray = np.ones(self.num_groups)
        if kind == 1:
            weight = np.diff(self.seconds[0, -1])
        elif kind == 2:
            tables = self.evaluator.tables
            weight = np.bincount(
                tables.parameter_group, tables.parameter_bytes, self.num_groups
            ).astype(np.float64)
        upto = np.cumsum(weight + 1e-6 * weight.sum() + 1e-12)
        places = np.searchsorted(upto, np.sort(self.rng.random(count - 1)) * upto[-1])
        return spread_starts(places, self.num_groups)

    @kept
    def stage_seconds(self, stage: Stage, num_micro: int) -> FloatArray:
        """Seconds in which a stage computes all groups before each.  # [num_groups + 1]"""
        each = [
            self.of_samples(kind, samples / num_micro)
            for kind, samples in self.samples_by_type(stage)
        ]
        return np.asarray(num_micro * np.max(each, axis=0))

    @kept
    def samples_by_type(self, stage: Stage) -> tuple[tuple[int, float], ...]:
        """(device type, most samples of a device of that type) for each type in a stage."""
        devices, batch = list(stage.devices), self.graph.batch_size
        speeds = self.speeds[devices]
        part = (
            np.full(len(devices), 1.0 / len(devices)) if stage.is_even else speeds / speeds.sum()
        )
        types = self.types[devices]
        return tuple(
            (kind, float(part[types == kind].max()) * batch) for kind in np.unique(types).tolist()
        )

    # --- points ----------------------------------------------------------------------------------

    def state(self, draft: Draft) -> State:
        """The point of a search that a draft describes."""
        space, near = self.search.space, self.search.neighbours
        bounds = np.diff([*draft.starts, self.num_groups])
        numbers = [space.add(self._decision(stage, draft.keeps)) for stage in draft.stages]
        rules = self.search.rules.of_teams if draft.has_teams else ()
        blocks = () if draft.keeps is None else tuple(sorted({*self.blocks, *draft.starts}))
        state = State(
            row=np.repeat(np.array(numbers, np.int32), bounds),
            bucket_bytes=draft.bucket_bytes,
            order=draft.order,
            micro_batches=space.micro_batches(draft.num_micro),
            rules=rules,
            blocks=blocks,
        )
        made = near.legal(self._sharded(state, draft.shards))
        return made._replace(schedule=self._schedule(draft, is_cut=bool(made.micro_batches)))

    def _sharded(self, state: State, shards: Sequence[Shard]) -> State:
        """The point with sharded layers; a shard whose rules contradict others is left out."""
        space, rules = self.search.space, self.search.rules
        for shard in shards:
            made = state.rules
            for place in rules.layers[shard.way]:
                made = rules.added(made, place)
            if rules.rule_set(made, state.blocks) is None:
                continue
            row = state.row.copy()
            for members in map(list, rules.layers[shard.way]):
                row[members] = row[members[0]]
                if shard.devices:
                    row[members] = space.add(space.decisions_on(shard.devices)[0])
            state = state._replace(row=row, rules=made)
        return state

    @kept
    def groups_of(self, way: int) -> tuple[int, ...]:
        """Groups whose ops have rules in a way to shard layers."""
        return tuple(sorted({g for place in self.search.rules.layers[way] for g in place}))

    def _decision(self, stage: Stage, keeps: Keeps | None) -> Decision:
        made = tuned_decision(self.evaluator, stage.devices, self.search.speeds)
        size = len(stage.devices)
        if size > 1:
            if stage.is_even:
                made = replace(made, shares=split_evenly(sum(made.shares), size))
            if stage.sync != made.sync:
                slices = made.slices if stage.sync.takes_slices else ()
                made = replace(made, sync=stage.sync, slices=slices)
            if stage.team > 1:
                teams = host_teams(self.cluster, stage.devices, stage.team)
                made = in_teams(made, teams, self.search.speeds, self.cluster)
        return made if keeps is None else replace(made, recompute=True, keeps=keeps)

    def _schedule(self, draft: Draft, *, is_cut: bool) -> PipelineSchedule:
        return capped(
            self.graph,
            [stage.devices for stage in draft.stages],
            stage_of_group(draft.starts[1:], self.num_groups),
            draft.caps if is_cut else Caps.NONE,
            self.cluster.num_devices,
            splits_backward=draft.splits_backward,
        )
