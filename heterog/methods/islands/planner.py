"""Islands: unlike pipelines side by side, with stages of one kind of machines each.

On mixed clusters, a pipeline of equal stages waits for its slowest stage, and equal replicas wait
for the slowest replica. Here every kind of machines has its own division into teams and stages.
Kinds are stages of one pipeline, with layers in proportion to speed, or replicas of each other,
with samples in proportion to speed. Tangram, Sailor, HexiScale and AutoHet each have a part of
this.

First, for every way to put kinds into pools, divisions are found by descent on an estimate, one
kind after another. Each kind alone gets the whole batch without micro-batches, as replicas and in
a few numbers of stages, unless that is hopeless by its estimate. Then dynamic programming cuts the
layers, and the best compositions are simulated. In between, boundaries, samples and micro-batches
of the best so far are varied as long as that helps. Each of the two takes half of the time, so
that a search that is cut short has done both.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations, product

import numpy as np

from heterog.graph.batch_plan import micro_batches_refused
from heterog.grouped import grouped
from heterog.memo import kept
from heterog.methods.islands.composing import (
    OVERFLOWS,
    Composition,
    Estimator,
    Island,
    Pool,
    Structure,
    can_be_in_a_v,
    described,
    in_a_v,
    islands_of,
    num_copies,
    places,
    stages_of,
    strategy_of,
    structures,
    with_island,
    with_moved_layer,
)
from heterog.methods.islands.slices import Slices
from heterog.methods.megatron_grid import least_bubble
from heterog.methods.planner import PointSearch, Problem, Searching
from heterog.methods.recomputing import words_worth_trying
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
UNTIL_ESTIMATED = 0.25
"""Part of the budget after which estimates end, even if some are left."""
UNTIL_PLAIN = 0.7
"""Part of the budget after which compositions that need no estimates end."""

_Vary = Callable[[Composition], Iterator[Composition]]


class CompositionSearch(PointSearch[Composition]):
    """The compositions of a problem, with their estimates and evaluations."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.slices = Slices(self.evaluator)
        self.estimator = Estimator(self.slices)
        self.options = [islands_of(self.slices, kind) for kind in range(len(self.slices.kinds))]
        self.estimates: dict[Composition, tuple[float, tuple[int, ...]]] = {}
        self.least_s = np.inf  # of all estimates
        self.started: set[Composition] = set()  # starts of descents that have ended
        self.done: set[Structure] = set()
        # Kept for a resumed search, whose rounds may be short.
        self.num_ranked, self.ranked = 0, list[Composition]()
        self.plain: list[tuple[float, Composition]] = []
        self.refined: set[Composition] = set()
        self.beside_best: list[Composition] = []  # variants of one of these, still to simulate
        self.kinds = words_worth_trying(self.evaluator.graph)
        stages = (0, 1, 3) if self.evaluator.graph.updates_elementwise else (0,)
        self.manners = [
            (again, zero) for zero in stages for again in (Recompute.NONE, *self.kinds)
        ]

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
        found = (*self.best(2), *self._best_of_divisions(NUM_RETURNED))
        return list(dict.fromkeys(found))[:NUM_RETURNED]

    def _best_of_divisions(self, count: int) -> list[Composition]:
        """The best composition of each of the best divisions of machines, best first."""
        of_division = grouped((point.pools, point) for point in self.best(len(self.found)))
        return [best for best, *_ in of_division.values()][:count]

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
        until = UNTIL_ESTIMATED if self.least_s < OVERFLOWS else UNTIL_PLAIN
        evaluations = self.problem.budget.evaluations
        most = np.inf if evaluations is None else ESTIMATES_OF_ONE * evaluations
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

        A micro-batch has a sample for every team.
        """
        for large in (True, False):
            pools = tuple(
                tuple(self._option(kind, large=large) for kind in kinds) for kinds in structure
            )
            teams = sum(max(stage.teams for stage in stages_of(p, self.slices)) for p in pools)
            most = max(self.evaluator.graph.batch_size // teams, 1)
            for num_micro in dict.fromkeys(min(count, most) for count in (16, 64)):
                yield Composition(pools, self._bounded(num_micro), *self.manners[0])

    def _option(self, kind: int, *, large: bool) -> Island:
        """The first division of a kind into teams of the largest or the smallest size."""
        options = self.options[kind]
        members = (max if large else min)(island.members for island in options)
        return next(island for island in options if island.members == members)

    def _bounded(self, num_micro: int) -> int:
        """A power of two up to the batch; 1 if the model cannot be cut into micro-batches."""
        graph = self.evaluator.graph
        num_micro = 1 << (min(num_micro, graph.batch_size).bit_length() - 1)
        return 1 if micro_batches_refused(graph, num_micro) else num_micro

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
            for vary in (self._by_island, self._by_hosts)
        ]
        return [self._by_micro, self._by_manner, *of_places]

    def _by_micro(self, point: Composition) -> Iterator[Composition]:
        for power in range(self.evaluator.graph.batch_size.bit_length()):
            if self._bounded(1 << power) == 1 << power:
                yield replace(point, num_micro=1 << power)

    def _by_manner(self, point: Composition) -> Iterator[Composition]:
        for recompute, zero in self.manners:
            for hides in (True, False):
                yield from self.kept(
                    replace(point, recompute=recompute, zero=zero, hides_messages=hides)
                )

    def _by_island(self, point: Composition, place: tuple[int, int]) -> Iterator[Composition]:
        island = point.pools[place[0]][place[1]]
        for other in self.options[island.kind]:
            if other.hosts == island.hosts:
                yield with_island(point, place, other)

    def _by_hosts(self, point: Composition, place: tuple[int, int]) -> Iterator[Composition]:
        island = point.pools[place[0]][place[1]]
        for other in self.options[island.kind]:
            if replace(other, hosts=island.hosts) == island != other:
                yield with_island(point, place, other)

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
                cut = self._cut(replace(point, samples=samples))
                cuts |= {} if cut is None else {division: cut}
        weighted = []
        for seconds, point in sorted(cuts.values(), key=lambda pair: pair[0]):
            structure = tuple(tuple(island.kind for island in pool) for pool in point.pools)
            weighted.append((seconds * VARIETY ** seen[structure], point))
            seen[structure] += 1
        weighted.sort(key=lambda pair: pair[0])
        return weighted

    @kept
    def _cut(self, point: Composition) -> tuple[float, Composition] | None:
        """(seconds, the composition with its layers cut), computed once."""
        return self.estimator.cut(point)

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
            for island in self.options[kind]
            if island.stages > 1 and island.members == few
        ]
        fit = [each for each in found if each is not None and each[0] < OVERFLOWS]
        yield from sorted(fit, key=lambda pair: pair[0])[:NUM_IN_STAGES]

    def _in_one_go(self, pools: tuple[Pool, ...]) -> tuple[float, Composition] | None:
        """(estimated seconds, composition) of pools without micro-batches, if there is one."""
        self.spending.check()
        point = Composition(pools, 1, *self.manners[0])
        seconds, samples = self.estimator.shared_out(point)
        cut = self._cut(replace(point, samples=samples)) if samples else None
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
            for zero in sorted({zero for _, zero in self.manners if zero}):
                for point in self.kept(replace(best, zero=zero)):
                    if best.num_micro == 1 and self.spending.fraction < UNTIL_PLAIN:
                        self.simulate(point)

    def _on_fewer(self, point: Composition) -> list[Composition]:
        """A composition of one island on fewer and fewer hosts."""
        if [len(pool) for pool in point.pools] != [1]:
            return []
        most = point.pools[0][0].hosts
        return [other for other in self._by_hosts(point, (0, 0)) if other.pools[0][0].hosts < most]

    def _improves(self, other: Composition, point: Composition) -> bool:
        before, after = self.found.get(point), self.simulate(other)
        return after is not None and before is not None and after.preference < before.preference

    def _simulate_halves(self) -> None:
        """Two stages of each kind of machines, so that replicas sum half of the gradients."""
        for options in self.options:
            halves = (each for each in options if (each.members, each.stages) == (1, 2))
            island = next(halves, None)
            whole = self._in_one_go(((island,),)) if island is not None else None
            if whole is None or self.spending.is_over:
                continue
            for zero in sorted({zero for _, zero in self.manners}):
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
        lean = replace(point, zero=max(point.zero, self.manners[-1][1] and 1))
        undivided = replace(lean, splits_backward=False)
        for each in dict.fromkeys((lean, undivided, replace(undivided, hides_messages=False))):
            yield each
            yield replace(each, recompute=Recompute.FULL)

    def _simulate_cheaper(self, point: Composition) -> None:
        """Recompute less and less, as long as the composition fits."""
        for recompute in reversed(self.kinds[:-1] if point.recompute == Recompute.FULL else ()):
            evaluation = self.simulate(replace(point, recompute=recompute))
            if evaluation is None or not evaluation.is_ok:
                return

    def _simulate_scheduled(self) -> None:
        """Try other schedules of the composition that would be shortest without its bubble."""
        if self.found and not self.spending.is_over:
            for other in self.scheduled(min(self.found, key=self._without_bubble)):
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
        """Simulate one variant of a good composition; ``False`` without variants or time left.

        All variants of a composition are tried, then those of the best composition by then. As a
        rule this is one of them, which makes a descent; otherwise the descent moves elsewhere.
        """
        if self.spending.is_over:
            return False
        while not self.beside_best:
            best = self._best_of_divisions(NUM_REFINED)
            start = next((point for point in best if point not in self.refined), None)
            if start is None:
                return False
            self.refined.add(start)
            self.beside_best = [point for point in self.beside(start) if point not in self.found]
        self.simulate(self.beside_best[0])
        self.beside_best.pop(0)  # only now: a search may be cut in between
        return True

    def beside(self, point: Composition) -> Iterator[Composition]:
        """Variants: a moved layer, schedules, hosts, manners, micro-batches, moved samples."""
        yield from with_moved_layer(point)
        yield from self.scheduled(point)
        yield from self._on_other_hosts(point)
        for recompute, zero in self.manners:
            if recompute in self._worth_trying(point, zero):
                yield from self.kept(replace(point, recompute=recompute, zero=zero))
        for other in self._with_micro(point, (2, 0.5)):
            yield other
            # More micro-batches often help only together with another schedule.
            yield replace(other, splits_backward=not point.in_a_v and not point.splits_backward)
        unit = point.num_micro
        for giver, taker in permutations(range(len(point.samples)), 2):
            if point.samples[giver] > unit:
                samples = list(point.samples)
                samples[giver] -= unit
                samples[taker] += unit
                yield replace(point, samples=tuple(samples))

    def _on_other_hosts(self, point: Composition) -> Iterator[Composition]:
        """Compositions with more or fewer hosts of one kind, and samples divided again."""
        for place in places(point):
            for other in self._by_hosts(point, place):
                seconds, samples = self.estimator.shared_out(replace(other, samples=()))
                if np.isfinite(seconds):
                    yield replace(other, samples=samples)

    def kept(self, point: Composition) -> Iterator[Composition]:
        """Slices of ZeRO over all hosts and, with one pool, also a sliced copy on each host."""
        yield replace(point, copies_on_hosts=False)
        if point.zero and len(point.pools) == 1 and num_copies(point.pools[0], self.slices) > 1:
            yield replace(point, copies_on_hosts=True)

    def _worth_trying(self, point: Composition, zero: int) -> tuple[Recompute, ...]:
        """Kinds of recomputation to try with a stage of ZeRO.

        A composition that fits needs neither more recomputation nor, beside it, a higher stage.
        """
        kinds = (Recompute.NONE, *self.kinds)
        found = self.found.get(point)
        if found is None or not found.is_ok or zero < point.zero:
            return kinds
        return kinds[: kinds.index(point.recompute) + (zero > point.zero)]

    def scheduled(self, point: Composition) -> Iterator[Composition]:
        """The composition with other caps, with split backward passes, and in a V."""
        if point.in_a_v:
            return
        for hides, splits in product((True, False), (True, False)):
            yield replace(point, hides_messages=hides, splits_backward=splits)
        if can_be_in_a_v(point):
            yield from map(in_a_v, self._with_micro(point, (1, 2)))

    def _with_micro(self, point: Composition, times: Iterable[float]) -> Iterator[Composition]:
        """Variants with multiples of the micro-batches, if the model can be cut into them."""
        for factor in times:
            num_micro = int(factor * point.num_micro)
            if num_micro and num_micro == self._bounded(num_micro):
                yield replace(point, num_micro=num_micro)


class Islands(Searching):
    """Unlike pipelines of machines of one kind each; see the module docstring."""

    name = "islands"
    stage = "search"
    resumes = True
    search = CompositionSearch
