"""Islands: unlike pipelines side by side, with stages of one kind of machines each.

On mixed clusters, a pipeline of equal stages waits for its slowest stage, and equal replicas wait
for the slowest replica. Here every kind of machines has its own division into teams and stages.
Kinds are stages of one pipeline, with layers in proportion to speed, or replicas of each other,
with samples in proportion to speed. Tangram, Sailor, HexiScale and AutoHet each have a part of
this.

First, for every way to put kinds into pools, divisions are found by descent on an estimate, one
kind after another. Each kind alone gets the whole batch without micro-batches, as replicas and in
a few numbers of stages, unless that is hopeless by its estimate. Then dynamic programming cuts the
layers, and the best compositions are simulated. In between, those of the best divisions are
varied in every respect, the most promising variant first (``Prospects``). Each of the two takes
half of the time, so that a search that is cut short has done both. The referee judges one
composition of each division that is varied; its ratio to the engine counts for all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from heterog.grouped import grouped
from heterog.methods.islands.composing import (
    OVERFLOWS,
    Composition,
    Estimator,
    Island,
    Pool,
    Structure,
    described,
    stages_of,
    strategy_of,
    structures,
)
from heterog.methods.islands.slices import Slices
from heterog.methods.islands.variants import Prospects, Variants, can_be_in_a_v, places
from heterog.methods.megatron_grid import least_bubble
from heterog.methods.planner import PointSearch, Problem, Searching
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Outcome
from heterog.strategy.layouts.layout import Recompute
from heterog.strategy.strategy import Strategy

NUM_RETURNED = 4
"""Number of strategies handed to the referee."""
NUM_CUT = 300
"""Number of estimated compositions whose layers are cut: stages of few layers are uneven, which
the estimate does not see."""
NUM_REFINED = 3
"""Number of divisions whose best compositions are refined."""
NUM_IN_STAGES = 2
"""Number of ways to cut a kind's machines into stages that are simulated before estimates."""
SCHEDULED_AFTER = 8
"""Number of compositions after which other schedules are tried for the one that may gain most."""
NEARLY = 1.1
"""Ratio to the best step up to which variants of a composition are tried."""
VARIETY = 1.04
"""Factor by which each further composition of the same structure counts as slower."""
PASSES = 2
"""Passes of a descent over all kinds."""
HOPELESS = 4.0
"""Ratio to the least estimate above which machines of one kind are not simulated on their own. An
estimate is too long by the sums of gradients, which a step hides."""
ESTIMATES_OF_ONE = 50
"""Most estimates for each evaluation of a budget: they take about as long."""
UNTIL_ESTIMATED = 0.5
"""Part of the budget after which estimates end, even if some are left."""
UNTIL_ESTIMATED_LATER = 0.1
"""The same part of a later round."""
UNTIL_PLAIN = 0.7
"""Part of the budget after which compositions that need no estimates end."""

_Vary = Callable[[Composition], Iterator[Composition]]


class CompositionSearch(PointSearch[Composition]):
    """The compositions of a problem, with their estimates and evaluations."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.slices = Slices(self.evaluator)
        self.estimator = Estimator(self.slices)
        self.variants = Variants(self.estimator)
        self.estimates: dict[Composition, tuple[float, tuple[int, ...]]] = {}
        self.least_s = np.inf  # of all estimates
        self.started: set[Composition] = set()  # starts of descents that have ended
        self.done: set[Structure] = set()
        # Kept for a resumed search, whose rounds may be short.
        self.num_ranked, self.ranked = 0, list[Composition]()
        self.plain: list[tuple[float, Composition]] = []
        self.prospects = Prospects(self.estimator.seconds)
        # The referee's seconds over the engine's, for each division that has been judged.
        self.judged: dict[tuple[object, ...], float] = {}
        self.mean_ratio = 1.0

    @property
    def why_nothing(self) -> str:
        """See ``PointSearch``."""
        if self.spending.is_over:
            return ""
        return "no machines can share out the samples and layers of this model"

    def in_words(self, point: Composition) -> str:
        """See ``PointSearch``."""
        return described(point, self.slices, self.evaluator.cluster)

    def orders(self, point: Composition) -> tuple[Order, ...]:
        """See ``PointSearch``."""
        return self.problem.orders

    def search(self) -> None:
        """Estimate compositions, simulate plain ones and the best others, refine the best.

        A plain one comes before all estimates, so that a search that is cut short has an answer.
        """
        if not self.found:
            for _, point in self._plain():
                self._simulate_in_manners(point)
                break
        self.estimate()
        self._simulate_plain()
        if len(self.estimates) != self.num_ranked:
            self.num_ranked, self.ranked = len(self.estimates), self.promising()
        for number, point in enumerate(self.ranked, 1):
            begin = self.spending.fraction
            self._simulate_in_manners(point)
            if number % SCHEDULED_AFTER == 0:
                self._simulate_scheduled()
            if number == SCHEDULED_AFTER:
                self._simulate_halves()
            now = self.spending.fraction
            while self.spending.fraction - now < now - begin and self._refine():
                pass
        while self._refine():
            pass

    def returned(self) -> list[Composition]:
        """The best, and the best of other divisions: the referee may judge links differently."""
        found = (*self._best_judged()[:2], *self._best_of_divisions(NUM_RETURNED))
        return list(dict.fromkeys(found))[:NUM_RETURNED]

    def _best_of_divisions(self, count: int) -> list[Composition]:
        """The best composition of each of the best divisions of machines, best first."""
        of_division = grouped((point.pools, point) for point in self._best_judged())
        return [best for best, *_ in of_division.values()][:count]

    def _best_judged(self) -> list[Composition]:
        """All points, best first by what the referee is expected to say."""
        return sorted(self.found, key=self._expected)

    def _expected(self, point: Composition) -> tuple[float, float]:
        """(missing bytes, the engine's seconds times the referee's ratio to them).

        The ratio is that of the division, or the mean if none of it has been judged.
        """
        missing, seconds = self.found[point].preference
        return missing, seconds * self.judged.get(_division(point), self.mean_ratio)

    # --- estimates -------------------------------------------------------------------------------

    def estimate(self) -> None:
        """Descend for each structure until a part of the budget is spent, longer if none fits."""
        for structure in self._structures():
            if structure in self.done:
                continue
            for start in self._starts(structure):
                if start in self.started:
                    continue
                if self._has_estimated:
                    return
                self._descend(start)
                self.started.add(start)
            self.done.add(structure)

    @property
    def _has_estimated(self) -> bool:
        """Whether enough of the budget went to estimates, which a count does not include."""
        until = UNTIL_ESTIMATED if not self.num_ranked else UNTIL_ESTIMATED_LATER
        until = until if self.least_s < OVERFLOWS else UNTIL_PLAIN
        most = ESTIMATES_OF_ONE * self.problem.budget.most_evaluations
        return self.spending.fraction >= until or len(self.estimates) >= most

    def _structures(self) -> list[Structure]:
        """All structures by the estimates of their starts.

        So a search that is cut short has descended for the most promising ones.
        """
        kinds = self.slices.kinds
        roomy = sorted(range(len(kinds)), key=lambda kind: -kinds[kind].usable_bytes)
        return sorted(dict.fromkeys(structures(roomy)), key=self._start_s)

    def _start_s(self, structure: Structure) -> float:
        """The least estimate of a structure's starts."""
        self.spending.check()
        return min(map(self._estimated, self._starts(structure)))

    def _starts(self, structure: Structure) -> Iterator[Composition]:
        """Large teams or single devices, in few stages, with some numbers of micro-batches.

        They are on all hosts, or on one of each kind: between these a descent may stop at slow
        links. A micro-batch has a sample for every team.
        """
        starts = dict.fromkeys(
            tuple(
                tuple(self._option(kind, large=large, on_one=on_one) for kind in kinds)
                for kinds in structure
            )
            for on_one, large in product((False, True), (True, False))
        )
        for pools in starts:
            teams = sum(max(stage.teams for stage in stages_of(p, self.slices)) for p in pools)
            most = max(self.evaluator.graph.batch_size // teams, 1)
            for num_micro in dict.fromkeys(min(count, most) for count in (16, 64)):
                yield Composition(
                    pools, self.variants.bounded(num_micro), *self.variants.manners[0]
                )

    def _option(self, kind: int, *, large: bool, on_one: bool = False) -> Island:
        """The first division of a kind into teams of the largest or the smallest size."""
        options = self.variants.options[kind]
        if on_one:
            fewest = min(island.hosts for island in options)
            options = [island for island in options if island.hosts == fewest]
        members = (max if large else min)(island.members for island in options)
        return next(island for island in options if island.members == members)

    def _descend(self, start: Composition) -> None:
        """Improve the micro-batches, the manner and each kind's division, one after another."""
        point, seconds = start, self._estimated(start)
        for _ in range(PASSES):
            before = seconds
            for vary in self._variables(point):
                for other in vary(point):
                    self.spending.check()
                    estimate = self._estimated(other)
                    if estimate < seconds:
                        point, seconds = other, estimate
            if seconds == before:
                return

    def _variables(self, point: Composition) -> list[_Vary]:
        """Functions that vary a composition in one respect each."""
        of_places = [
            partial(vary, place=place)
            for place in places(point)
            for vary in (self.variants.by_island, self._by_hosts)
        ]
        return [self._by_micro, self._by_manner, *of_places]

    def _by_micro(self, point: Composition) -> Iterator[Composition]:
        for power in range(self.evaluator.graph.batch_size.bit_length()):
            if self.variants.bounded(1 << power) == 1 << power:
                yield replace(point, num_micro=1 << power)

    def _by_hosts(self, point: Composition, place: tuple[int, int]) -> Iterator[Composition]:
        """Variants on more or fewer hosts, also with about as many samples at once on each."""
        before = sum(island.hosts for pool in point.pools for island in pool)
        for other in self.variants.by_hosts(point, place):
            yield other
            after = sum(island.hosts for pool in other.pools for island in pool)
            num_micro = -(-point.num_micro * before // after)
            yield replace(other, num_micro=self.variants.bounded(2 * num_micro - 1))

    def _by_manner(self, point: Composition) -> Iterator[Composition]:
        for recompute, zero in self.variants.manners:
            for hides in (True, False):
                yield from self.variants.kept(
                    replace(point, recompute=recompute, zero=zero, hides_messages=hides)
                )

    def _estimated(self, point: Composition) -> float:
        if point not in self.estimates:
            self.estimates[point] = self.estimator.shared_out(point)
            self.least_s = min(self.least_s, self.estimates[point][0])
        return self.estimates[point][0]

    def promising(self) -> list[Composition]:
        """Compositions with the least estimates, with their samples and layers.

        An estimate may be wrong for a whole structure, so each further composition of the same
        structure is ranked as if it were slower, by ``VARIETY``, and the best of each kind on its
        own come second.
        """
        weighted = self.weighted(NUM_CUT)
        alone: dict[int, Composition] = {}
        for seconds, point in weighted:  # the best of each kind on its own
            kinds = {island.kind for pool in point.pools for island in pool}
            if len(kinds) == 1 and seconds <= HOPELESS * self.least_s:
                alone.setdefault(kinds.pop(), point)
        ranked = [point for _, point in weighted]
        return list(dict.fromkeys((*ranked[:1], *alone.values(), *ranked)))

    def weighted(self, most: int) -> list[tuple[float, Composition]]:
        """(ranked seconds, composition) with the least estimates, sorted; see ``promising``.

        Args:
            most: Most compositions whose layers are cut.
        """
        ranked = sorted(self.estimates.items(), key=lambda item: item[1][0])
        seen: Counter[Structure] = Counter()
        cuts: dict[tuple[tuple[Pool, ...], int, bool], tuple[float, Composition]] = {}
        for point, (seconds, samples) in ranked:
            if not np.isfinite(seconds) or len(cuts) >= most:
                break
            # Only the best manner of a division is kept, one with full recomputation apart.
            division = point.pools, point.num_micro, point.recompute == Recompute.FULL
            self.spending.check()
            if division not in cuts:  # points that do not fit are tried in other manners
                cut = self.estimator.cut(replace(point, samples=samples))
                cuts |= {} if cut is None else {division: cut}
        weighted = []
        for seconds, point in sorted(cuts.values(), key=lambda pair: pair[0]):
            structure = tuple(tuple(island.kind for island in pool) for pool in point.pools)
            weighted.append((seconds * VARIETY ** seen[structure], point))
            seen[structure] += 1
        weighted.sort(key=lambda pair: pair[0])
        return weighted

    def _plain(self) -> Iterator[tuple[float, Composition]]:
        """The batch without micro-batches: on each kind of machines, the fastest kinds, and all.

        Each with its estimate in seconds.

        Replicas are hard to beat, but the estimate ranks them too low: it adds the sums of
        gradients to the step, while data parallelism hides them. Stages of one kind wait for each
        other's values but compute their weight gradients at the same time. This helps if ops are
        short, because a step then takes as long as a host needs to issue its ops.
        """
        speeds, kinds = self.evaluator.speeds, self.slices.kinds
        fast = sorted(range(len(kinds)), key=lambda kind: -speeds[kinds[kind].devices[0][0]])
        fastest = (tuple(sorted(fast[:count])) for count in range(2, len(kinds) + 1))
        for some in (*((kind,) for kind in fast), *fastest):
            found = self._in_one_go(tuple((self._option(kind, large=False),) for kind in some))
            if found is not None and found[0] < OVERFLOWS:
                yield found
            if len(some) == 1:
                yield from self._in_stages(*some)

    def _in_stages(self, kind: int) -> Iterator[tuple[float, Composition]]:
        """The most promising pipelines of one kind's devices without micro-batches."""
        few = self._option(kind, large=False).members
        found = [
            self._in_one_go(((island,),))
            for island in self.variants.options[kind]
            if island.stages > 1 and island.members == few
        ]
        fit = [each for each in found if each is not None and each[0] < OVERFLOWS]
        yield from sorted(fit, key=lambda pair: pair[0])[:NUM_IN_STAGES]

    def _in_one_go(self, pools: tuple[Pool, ...]) -> tuple[float, Composition] | None:
        """(estimated seconds, composition) of pools without micro-batches, if there is one."""
        self.spending.check()
        point = Composition(pools, 1, *self.variants.manners[0])
        seconds, samples = self.estimator.shared_out(point)
        cut = self.estimator.cut(replace(point, samples=samples)) if samples else None
        return None if cut is None else (seconds, cut[1])

    # --- simulation ------------------------------------------------------------------------------

    def _simulate_plain(self) -> None:
        """Simulate the compositions of ``_plain``, and slices of ZeRO for the best of them."""
        self.plain = self.plain or list(self._plain())
        for seconds, point in self.plain:
            if seconds > HOPELESS * self.least_s:
                continue
            self._simulate_in_manners(point, UNTIL_PLAIN)
            for other in self._on_fewer(point):
                if self.spending.fraction >= UNTIL_PLAIN or not self._improves(other, point):
                    break
                point = other
        for best in self.best(1):
            for zero in sorted({zero for _, zero in self.variants.manners if zero}):
                for point in self.variants.kept(replace(best, zero=zero)):
                    if best.num_micro == 1 and self.spending.fraction < UNTIL_PLAIN:
                        self.simulate(point)

    def _on_fewer(self, point: Composition) -> list[Composition]:
        """A composition of one island on fewer and fewer hosts."""
        if [len(pool) for pool in point.pools] != [1]:
            return []
        most = point.pools[0][0].hosts
        return [
            other
            for other in self.variants.by_hosts(point, (0, 0))
            if other.pools[0][0].hosts < most
        ]

    def _improves(self, other: Composition, point: Composition) -> bool:
        before, after = self.found.get(point), self.simulate(other)
        return after is not None and before is not None and after.preference < before.preference

    def _simulate_halves(self) -> None:
        """Two stages of each kind of machines, so that replicas sum half of the gradients."""
        for options in self.variants.options:
            halves = (each for each in options if (each.members, each.stages) == (1, 2))
            island = next(halves, None)
            whole = self._in_one_go(((island,),)) if island is not None else None
            if whole is None or self.spending.is_over:
                continue
            for zero in sorted({zero for _, zero in self.variants.manners}):
                found = self.simulate(replace(whole[1], zero=zero))
                if found is None or not self._is_near(found):
                    break

    def _is_near(self, found: Evaluation) -> bool:
        """Whether a composition is nearly as good as the best one; its variants may be better."""
        missing, seconds = self.found[self.best(1)[0]].preference
        return found.preference <= (missing, NEARLY * seconds)

    def _simulate_in_manners(self, point: Composition, until: float = 1.0) -> None:
        """Simulate a composition in ever leaner manners until one fits.

        It ends when the part ``until`` of the budget is spent.
        """
        for manner in self.until_it_fits(point):
            if self.found and self.spending.fraction >= until:
                return
            evaluation = self.simulate(manner)
            while evaluation is not None and evaluation.outcome == Outcome.TOO_LARGE:
                if manner.num_micro == 1:
                    return
                manner = replace(manner, num_micro=manner.num_micro // 2)
                evaluation = self.simulate(manner)
            if evaluation is not None and evaluation.is_ok:
                self._simulate_cheaper(manner)
            if evaluation is None or evaluation.is_ok:
                return

    def until_it_fits(self, point: Composition) -> Iterator[Composition]:
        """A composition, then variants that need less and less memory."""
        yield point
        lean = replace(point, zero=max(point.zero, self.variants.manners[-1][1] and 1))
        undivided = replace(lean, splits_backward=False)
        for each in dict.fromkeys((lean, undivided, replace(undivided, hides_messages=False))):
            yield each
            yield replace(each, recompute=Recompute.FULL)

    def _simulate_cheaper(self, point: Composition) -> None:
        """Recompute less and less, as long as the composition fits."""
        for recompute in reversed(
            self.variants.kinds[:-1] if point.recompute == Recompute.FULL else ()
        ):
            evaluation = self.simulate(replace(point, recompute=recompute))
            if evaluation is None or not evaluation.is_ok:
                return

    def _simulate_scheduled(self) -> None:
        """Try other schedules of the composition that would be shortest without its bubble."""
        if self.found and not self.spending.is_over:
            for other in self.variants.scheduled(min(self.found, key=self._without_bubble)):
                self.simulate(other)

    def _without_bubble(self, point: Composition) -> tuple[float, float]:
        """(bytes that are missing, seconds of a step less what a V of chunks can save)."""
        found = self.found[point]
        bubble = (max(map(len, point.layers)) - 1) / point.num_micro
        least = least_bubble(bubble, in_a_v=can_be_in_a_v(point))
        return found.preference[0], found.step_time_s * (1.0 + least) / (1.0 + bubble)

    def simulate(self, point: Composition) -> Evaluation | None:
        """Simulate a composition; ``None`` if it makes no sense."""
        # Explicit turns may deadlock if other values than outputs of layers cross stages.
        return self.evaluate(point, self.problem.first_order)

    def strategy_of(self, point: Composition) -> Strategy:
        """See ``PointSearch``."""
        return strategy_of(point, self.slices, self.evaluator, self.problem.step_barrier)

    def _refine(self) -> bool:
        """Simulate the variant that looks best; ``False`` without variants or time left.

        Variants are those of the best composition of each of the best divisions.
        """
        if self.spending.is_over:
            return False
        self._judge_best()
        for start in self._best_of_divisions(NUM_REFINED):
            if start not in self.prospects.varied:
                own = self.found[start]
                variants = self.variants.beside(start, fits=own.is_ok)
                self.prospects.vary(start, self._expected(start)[1], variants)
        point = self.prospects.next(lambda each: each in self.found or each in self.refused)
        if point is None:
            return False
        best_s, found = self._best_s, self.simulate(point)
        if found is not None and not found.is_ok and found.step_time_s < best_s:
            self._simulate_leaner(point, best_s)
        return True

    def _simulate_leaner(self, point: Composition, limit_s: float) -> None:
        """Simulate leaner manners of a composition until one fits or takes too long."""
        for manner in self.until_it_fits(point):
            found = self.simulate(manner)
            if found is None or found.is_ok or found.step_time_s >= limit_s:
                return

    def _judge_best(self) -> None:
        """Let the referee judge the best division, until one that was judged is the best.

        The engine is too quick where stages share NICs, by about the same part for all
        compositions of a division.
        """
        while self.found:
            best = min(self.found, key=self._expected)
            if _division(best) in self.judged:
                return
            found, ratio = self.found[best], 1.0
            if found.is_ok:
                self.spending.check()
                judged = self.evaluator.referee(self.strategy_of(best), found.order)
                ratio = judged.step_time_s / found.step_time_s if judged.is_ok else 1.0
            self.judged[_division(best)] = ratio
            self.mean_ratio = sum(self.judged.values()) / len(self.judged)


def _division(point: Composition) -> tuple[object, ...]:
    """What the referee's ratio to the engine depends on."""
    return point.pools, point.in_a_v


class Islands(Searching):
    """Unlike pipelines of machines of one kind each; see the module docstring."""

    name = "islands"
    stage = "search"
    resumes = True
    least_part = 0.15
    search = CompositionSearch
