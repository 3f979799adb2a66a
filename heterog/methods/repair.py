"""Repair of strategies that do not fit: the least loss of speed for the missing memory.

A greedy search in rounds. Each round applies every kind of repair to the current strategy, as
strongly as needed to fit, or as far as it goes:

- groups recompute some or all of their activations, those first that free the most bytes per
  second of recomputation on the devices that overflow; or whole layers recompute,
- there are more micro-batches, or fewer of them in flight,
- samples move to devices with room, or whole groups leave the devices that overflow,
- replicated groups shard their updates, or replicas on one host become a team.

If some repair makes the strategy fit, the fastest such strategy is the result. Otherwise the next
round starts from the strategy that lost the fewest seconds per byte of overflow removed.

The fast engine judges memory and the referee confirms it. If the referee's schedule needs more,
later repairs leave that much more room.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.batch_plan import micro_batches_refused
from heterog.lowering import resident_bytes
from heterog.lowering.program import FloatArray, TaskKind
from heterog.memo import kept
from heterog.methods.changes import moved_samples, with_decisions, without_devices
from heterog.methods.planner import Budget, Spending, TimeUp
from heterog.methods.recomputing import (
    freed_bytes,
    kinds_worth_trying,
    runs_again,
)
from heterog.methods.teams import (
    has_one_owner,
    rules_of_model,
    strategy_in_teams,
    team_sizes,
)
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator, Outcome
from heterog.strategy.division import micro_batch_table, split_evenly
from heterog.strategy.layouts.stages import layer_blocks
from heterog.strategy.strategy import REPLICATED, Decision, Keeps, Strategy, Sync

_MOST_ROUNDS = 8  # of a repair; see ``_round``
_MOST_MOVES = 6  # of samples; each follows the shortage that is left after the one before
_SHARDING = tuple(sync for sync in Sync if sync.is_sharded)
_Change = TypeVar("_Change")


def repair(evaluator: Evaluator, strategy: Strategy, order: Order, *, budget: Budget) -> Strategy:
    """Change a strategy that is out of memory until it fits.

    The result depends on nothing but the arguments if the budget is in evaluations.

    Args:
        evaluator: Evaluator of its graph and cluster.
        strategy: Any strategy; one that fits is returned unchanged.
        order: Order that it runs in.
        budget: Evaluations or seconds that may be spent.

    Returns:
        The fastest strategy found that fits, else the nearest to fitting; it never overflows by
        more than the given one.
    """
    return _Repair(evaluator, order, Spending(budget, evaluator)).run(strategy)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A strategy and the engine's results for it."""

    strategy: Strategy
    seconds: float
    peak: FloatArray  # bytes of each device


class _Step(NamedTuple):
    """A change of some groups from one kind of recomputation, or none, to another."""

    bytes_per_s: float
    groups: tuple[int, ...]
    keeps: Keeps


class _Unit(NamedTuple):
    """Groups that recompute together.

    Attributes:
        groups: The groups.
        decision: The present decision of its groups.
        options: Seconds, bytes freed and kind, the one that recomputes the least first.
    """

    groups: tuple[int, ...]
    decision: Decision
    options: tuple[tuple[float, float, Keeps], ...]

    def steps(self) -> Iterator[_Step]:
        """Ever more recomputation, in steps that free fewer and fewer bytes per second.

        A kind is skipped if one that recomputes more frees more bytes per second.
        """
        seconds = freed = 0.0
        rest = list(self.options)
        if self.decision.recompute:
            kinds = [keeps for *_, keeps in rest]
            if self.decision.keeps in kinds:
                seconds, freed, _ = rest[kinds.index(self.decision.keeps)]
            rest = [option for option in rest if option[2] < self.decision.keeps]
        while rest:
            rates = [(f - freed) / max(s - seconds, 1e-12) for s, f, _ in rest]
            best = max(range(len(rest)), key=lambda place: (rates[place], place))
            if rates[best] <= 0.0:
                if rest[-1][0] > seconds:  # the simulation may show that it frees something
                    yield _Step(0.0, self.groups, rest[-1][2])
                return
            seconds, freed, keeps = rest[best]
            yield _Step(rates[best], self.groups, keeps)
            rest = rest[best + 1 :]


class _Repair:
    def __init__(self, evaluator: Evaluator, order: Order, spending: Spending) -> None:
        self.evaluator = evaluator
        self.graph = evaluator.graph
        self.cluster = evaluator.cluster
        self.order = order
        self.spending = spending
        self.limits = evaluator.feasibility.usable.astype(np.float64)
        self.usable = self.limits.copy()  # less what the referee needs beyond the engine
        self.tried: dict[Strategy, _Tried] = {}

    def run(self, strategy: Strategy) -> Strategy:
        """Repair in rounds until something fits, nothing helps, or the budget is over."""
        given = self._evaluate(strategy)
        with self.spending.limits():
            if np.isfinite(given.peak).all():
                self._search(given)
        best = self._best()
        is_worse = self._shortage(best.peak) > self._shortage(given.peak)
        return strategy if is_worse else best.strategy

    def _search(self, given: _Tried) -> None:
        current: _Tried | None = given
        for _ in range(_MOST_ROUNDS):
            best = self._best()
            if self._fits(best):
                if self._is_confirmed(best):
                    return
            elif current is None:
                return
            else:
                current = self._round(current)

    def _best(self) -> _Tried:
        """The fastest strategy that fits, else the nearest to fitting."""
        return min(self.tried.values(), key=self._preference)

    # --- judging ---------------------------------------------------------------------------------

    def _try(self, strategy: Strategy) -> _Tried:
        if strategy not in self.tried and self.spending.is_over:
            raise TimeUp(self.spending)
        return self._evaluate(strategy)

    def _evaluate(self, strategy: Strategy) -> _Tried:
        if strategy not in self.tried:
            found = self.evaluator.evaluate(strategy, self.order)
            self.tried[strategy] = _Tried(strategy, found.step_time_s, self._peak(found))
        return self.tried[strategy]

    def _is_confirmed(self, tried: _Tried) -> bool:
        """Whether the referee agrees that it fits; if not, later repairs leave more room."""
        judged = self._peak(self.evaluator.referee(tried.strategy, self.order))
        if self._shortage(judged) <= 0.0:
            return True
        self.usable -= np.maximum(judged - tried.peak, 0.0)
        return False

    def _peak(self, found: Evaluation) -> FloatArray:
        """Peak bytes of each device; infinite if it is too large to simulate or cannot run."""
        if found.outcome in (Outcome.TOO_LARGE, Outcome.CANNOT_RUN):
            return np.full(len(self.limits), np.inf)
        return np.array(found.peak_memory_bytes, np.float64)

    def _shortage(self, peak: FloatArray) -> float:
        """Missing bytes of the worst device."""
        return max(float((peak - self.limits).max()), 0.0)

    def _over(self, tried: _Tried) -> FloatArray:
        """Missing bytes of each device, negative where there is room."""
        return tried.peak - self.usable

    def _fits(self, tried: _Tried) -> bool:
        return bool((self._over(tried) <= 0.0).all())

    def _missing(self, tried: _Tried) -> float:
        """Missing bytes of all devices together."""
        return float(np.maximum(self._over(tried), 0.0).sum())

    def _preference(self, tried: _Tried) -> tuple[float, float, float]:
        return max(float(self._over(tried).max()), 0.0), self._missing(tried), tried.seconds

    # --- rounds ----------------------------------------------------------------------------------

    def _round(self, current: _Tried) -> _Tried | None:
        """The best result of one kind of repair of a strategy; ``None`` if none helps."""
        found = [
            tried
            for kind in (
                self._recompute,
                self._cut_finer,
                self._hold_fewer,
                self._move_samples,
                self._move_groups,
                self._shard_updates,
                self._form_teams,
                self._recompute_less,
            )
            for tried in kind(current)
            if self._missing(tried) < self._missing(current)
        ]
        fitting = [tried for tried in found if self._fits(tried)]
        if fitting:
            return min(fitting, key=lambda tried: tried.seconds)

        def price(tried: _Tried) -> tuple[float, float]:
            saved = self._missing(current) - self._missing(tried)
            return max(tried.seconds - current.seconds, 0.0) / saved, -saved

        return min(found, key=price, default=None)

    def _fewest(
        self, make: Callable[[Sequence[_Change]], Strategy], ranked: Sequence[_Change], first: int
    ) -> Iterator[_Tried]:
        """The strategy with the fewest changes that fits, by doubling and then bisection.

        If no number of changes fits, the strategy that overflows least.

        Args:
            make: Makes a strategy with some changes.
            ranked: Changes, the best first.
            first: Number of changes to begin with.
        """
        if not ranked:
            return
        low, count = 0, min(first, len(ranked))
        tried = [self._try(make(ranked[:count]))]
        while not self._fits(tried[-1]) and count < len(ranked):
            low, count = count, min(2 * count, len(ranked))
            tried.append(self._try(make(ranked[:count])))
        if not self._fits(tried[-1]):
            yield min(tried, key=lambda each: (self._missing(each), each.seconds))
            return
        while count - low > 1:
            middle = (low + count) // 2
            attempt = self._try(make(ranked[:middle]))
            if self._fits(attempt):
                tried.append(attempt)
                count = middle
            else:
                low = middle
        yield tried[-1]

    # --- kinds of repair -------------------------------------------------------------------------

    def _recompute(
        self, current: _Tried, kinds: tuple[Keeps, ...] = (Keeps.NOTHING,)
    ) -> Iterator[_Tried]:
        """Recompute groups, or whole layers, of which only outputs to other layers are kept."""
        yield from self._make_again(current, range(len(current.strategy.decisions)), (), kinds)
        blocks = current.strategy.blocks or layer_blocks(self.graph)
        if len(blocks) < len(current.strategy.decisions):  # else every group is a layer
            yield from self._make_again(current, blocks, blocks, kinds)

    def _recompute_less(self, current: _Tried) -> Iterator[_Tried]:
        """Recompute in steps from one kind of recomputation to the next, if there are several.

        This repair comes last: under a small budget, other kinds of repair gain more.
        """
        kinds = kinds_worth_trying(self.graph)
        if len(kinds) > 1:
            yield from self._recompute(current, kinds)

    def _make_again(
        self,
        current: _Tried,
        units: Sequence[int],
        blocks: tuple[int, ...],
        kinds: tuple[Keeps, ...],
    ) -> Iterator[_Tried]:
        """Recompute as little as needed to fit: the steps that free the most per second first.

        Args:
            current: Strategy that does not fit.
            units: First group of each unit that recomputes together.
            blocks: Blocks of the strategies that are tried; empty for those of ``current``.
            kinds: Kinds of recomputation, the one that recomputes the least first.
        """
        strategy = replace(current.strategy, blocks=blocks or current.strategy.blocks)
        ranked = [
            step for unit in self._units(current, units, blocks, kinds) for step in unit.steps()
        ]
        # The last unit's outputs are read at once: it frees nothing while memory is fullest.
        last = max((step.groups for step in ranked), default=())
        # Bytes per second to three digits, so that equal layers tie and keep their order.
        ranked.sort(
            key=lambda step: (step.groups == last, -float(f"{step.bytes_per_s:.2e}"), step.groups)
        )

        def make(steps: Sequence[_Step]) -> Strategy:
            changes = {
                group: replace(strategy.decisions[group], recompute=True, keeps=step.keeps)
                for step in steps
                for group in step.groups
            }
            return with_decisions(strategy, changes)

        yield from self._fewest(make, ranked, len(ranked))

    def _units(
        self,
        current: _Tried,
        units: Sequence[int],
        blocks: tuple[int, ...],
        kinds: tuple[Keeps, ...],
    ) -> Iterator["_Unit"]:
        """Each unit with the seconds and bytes of each kind on the devices that overflow."""
        decisions, over = current.strategy.decisions, self._over(current) > 0.0
        overfull = tuple(np.flatnonzero(over).tolist())
        for first, end in pairwise((*units, len(decisions))):
            groups = tuple(range(first, end))
            if not any(
                over[device] and share
                for group in groups
                for device, share in _shares_of(decisions[group])
            ):
                continue
            options = []
            for keeps in kinds:
                known = [self._again(keeps, blocks, decisions[each], overfull) for each in groups]
                pairs = list(zip(known, groups, strict=True))
                seconds, freed = (
                    sum(float(each[column][group]) for each, group in pairs) for column in (0, 1)
                )
                options.append((seconds, freed, keeps))
            yield _Unit(groups, decisions[first], tuple(options))

    @kept
    def _again(
        self,
        keeps: Keeps,
        blocks: tuple[int, ...],
        decision: Decision,
        overfull: tuple[int, ...],
    ) -> tuple[FloatArray, FloatArray]:
        """Cost and gain of a kind of recomputation if all groups have one decision.

        Returns:
            Seconds that each group recomputes on the devices that overflow, and bytes that it
            frees there.  # [num_groups] each
        """
        tables = self.evaluator.rules.of(self.evaluator.rules.number((), blocks)).tables
        again, batch = runs_again(tables, keeps), self.graph.batch_size
        of_sample, once = freed_bytes(tables, keeps)
        seconds, freed = np.zeros(tables.num_groups), np.zeros(tables.num_groups)
        for device, share in _shares_of(decision):
            if device in overfull and share:
                kind = self.cluster.device_types[self.cluster.type_index[device]]
                row = self.evaluator.cost_model.op_seconds(self.graph, kind, batch)
                own = row[tables.op_id[again]] * (share / batch)
                seconds += np.bincount(tables.op_group[again], own, tables.num_groups)
                freed += share * of_sample + once
        return seconds, freed

    def _cut_finer(self, current: _Tried) -> Iterator[_Tried]:
        """Double the number of micro-batches until the strategy fits or doubling does not help."""
        strategy, batch = current.strategy, self.graph.batch_size
        crossing = axis_plan(self.graph, strategy.op_rules).crossing
        if crossing is not None or micro_batches_refused(self.graph, 2):
            return  # an op needs the whole batch
        if not strategy.op_rules:
            program = self.evaluator.program(self.evaluator.encode(strategy))
            if (program.kind == TaskKind.GATHER_VALUE).any():
                return
        last, count = current, strategy.num_micro_batches
        while count < batch and not self._fits(last):
            count = min(2 * count, batch)
            micro = micro_batch_table(split_evenly(batch, count), self.cluster.num_devices)
            schedule = replace(strategy.schedule, turns=())  # those of the old micro-batches
            finer = self._try(replace(strategy, micro_batches=micro, schedule=schedule))
            if self._missing(finer) >= self._missing(last):
                break
            last = finer
        yield last

    def _hold_fewer(self, current: _Tried) -> Iterator[_Tried]:
        """Halve the number of micro-batches in flight until it fits or does not help."""
        strategy, last = current.strategy, current
        cap = strategy.num_micro_batches
        devices = [decision.devices for decision in strategy.decisions]
        while cap > 1 and not self._fits(last):
            cap = (cap + 1) // 2
            schedule = replace(strategy.schedule, in_flight=((cap,),) * self.cluster.num_devices)
            capped = self._try(replace(strategy, schedule=schedule.fitted(devices)))
            if self._missing(capped) >= self._missing(last):
                break
            last = capped
        yield last

    def _move_samples(self, current: _Tried) -> Iterator[_Tried]:
        """Move samples from devices that overflow to devices of the same groups with room."""
        last = current
        for _ in range(_MOST_MOVES):
            over, rate = self._over(last), self._bytes_per_sample(last)
            takers = {d: -over[d] / rate[d] for d in range(len(over)) if over[d] < 0.0}
            changes = {
                group: moved_samples(decision, over, rate, takers)
                for group, decision in enumerate(last.strategy.decisions)
            }
            moved = self._try(with_decisions(last.strategy, changes))
            if moved.strategy == last.strategy or self._missing(moved) >= self._missing(last):
                break
            last = moved
            if self._fits(last):
                break
        yield last

    def _bytes_per_sample(self, tried: _Tried) -> FloatArray:
        """Bytes per sample on each device, from the samples that it has now."""
        evaluator = self.evaluator
        resident = resident_bytes(evaluator.tables, evaluator.encode(tried.strategy))
        samples = np.zeros(self.cluster.num_devices)
        for decision in tried.strategy.decisions:
            for device, share in _shares_of(decision):
                samples[device] = max(samples[device], share)
        used = np.maximum(tried.peak - resident, 1.0)
        most = float((used / np.maximum(samples, 1.0)).max())
        # An idle device is assumed to need as much as the one that needs most.
        return np.where(samples > 0.0, used / np.maximum(samples, 1.0), most)

    def _move_groups(self, current: _Tried) -> Iterator[_Tried]:
        """Move whole groups off the devices that overflow: the last, first or largest ones."""
        strategy, over = current.strategy, self._over(current)
        leaving = {device for device in range(len(over)) if over[device] > 0.0}
        rest = [device for device in range(len(over)) if device not in leaving]
        if not rest:
            return
        roomiest = min(rest, key=lambda device: (over[device], device))
        groups = [g for g, d in enumerate(strategy.decisions) if leaving & set(d.devices)]
        tables = self.evaluator.tables
        size = np.bincount(
            tables.parameter_group, weights=tables.parameter_bytes, minlength=tables.num_groups
        )
        by_size = sorted(groups, key=lambda group: (-size[group], group))

        def make(chosen: Sequence[int]) -> Strategy:
            return self._without(strategy, chosen, leaving, roomiest)

        for ranked in (groups[::-1], groups, by_size):
            yield from self._fewest(make, ranked, 1)

    def _without(
        self, strategy: Strategy, groups: Sequence[int], leaving: set[int], roomiest: int
    ) -> Strategy:
        """Remove devices from some groups; one left without devices moves to ``roomiest``."""
        changes = {
            group: without_devices(strategy.decisions[group], leaving, roomiest)
            for group in groups
        }
        homes = list(strategy.homes)
        for parameter, home in enumerate(homes):
            changed = changes.get(int(self.evaluator.tables.parameter_group[parameter]))
            if changed is not None and home in leaving:
                alone = len(changed.devices) == 1
                index = parameter % len(changed.devices)
                homes[parameter] = REPLICATED if alone else changed.devices[index]
        return replace(with_decisions(strategy, changes), homes=tuple(homes))

    def _shard_updates(self, current: _Tried) -> Iterator[_Tried]:
        """Shard optimizer state, then also gradients and parameters, among replicas."""
        for sync in _SHARDING:
            sliced = [
                replace(decision, sync=sync, slices=(), slice_groups=())
                for decision in current.strategy.decisions
            ]
            changes = {
                group: sliced[group]
                for group, decision in enumerate(current.strategy.decisions)
                if len(decision.devices) > 1
                and decision.sync != Sync.PARAMETER_SERVER
                and has_one_owner(sliced[group])
            }
            try:
                yield self._try(with_decisions(current.strategy, changes))
            except StrategyError:
                return  # the optimizer cannot update a part of a parameter

    def _form_teams(self, current: _Tried) -> Iterator[_Tried]:
        """Join replicas on one host into teams in groups that overflow, to divide everything."""
        strategy, over = current.strategy, self._over(current) > 0.0
        groups = [
            group
            for group, decision in enumerate(strategy.decisions)
            if any(over[device] for device in decision.devices) and not decision.teams
        ]
        speeds = self.evaluator.speeds
        for size in reversed(team_sizes(self.cluster, rules_of_model(self.graph))):
            made = strategy_in_teams(self.graph, self.cluster, strategy, groups, size, speeds)
            if made is not None and made.decisions != strategy.decisions:
                yield self._try(made)


def _shares_of(decision: Decision) -> Iterator[tuple[int, int]]:
    """Pairs (device, samples) of a decision."""
    return zip(decision.devices, decision.shares, strict=True)
