"""Variants of compositions: what a search may try after a good one, and which of it comes next.

The variants of a few good compositions wait, each with a predicted step time: that of the
composition that it varies, times the ratio of both estimates. The one with the least predicted
step comes next (``Prospects``).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np

from heterog.graph.batch_plan import micro_batches_refused
from heterog.methods.islands.composing import (
    OVERFLOWS,
    Composition,
    Estimator,
    Island,
    islands_of,
    num_copies,
)
from heterog.methods.recomputing import words_worth_trying
from heterog.strategy.layouts.layout import Recompute

MOVED_PART = 8
"""One in so many of a pool's samples goes to another pool at once, or one for each micro-batch."""
NUM_DIVIDED = 4
"""Number of other divisions of a kind that are variants of a composition."""


class Variants:
    """Variants of the compositions of a graph on a cluster.

    Args:
        estimator: Estimates, by which layers and samples are divided again.

    Attributes:
        options: Divisions of each kind of machines.
        kinds: Kinds of recomputation that differ for this model.
        manners: Pairs of a kind of recomputation and a stage of ZeRO.
    """

    def __init__(self, estimator: Estimator) -> None:
        self.estimator, self.slices = estimator, estimator.slices
        self.graph = self.slices.evaluator.graph
        self.options = [islands_of(self.slices, kind) for kind in range(len(self.slices.kinds))]
        self.kinds = words_worth_trying(self.graph)
        stages = (0, 1, 3) if self.graph.updates_elementwise else (0,)
        self.manners = [
            (again, zero) for zero in stages for again in (Recompute.NONE, *self.kinds)
        ]

    def beside(self, point: Composition, *, fits: bool) -> Iterator[Composition]:
        """All variants of a composition: every one of its attributes, and its division.

        Args:
            point: The composition.
            fits: Whether it fits into memory.
        """
        yield from with_moved_layer(point)
        yield from self.scheduled(point)
        yield from self._on_other_hosts(point)
        for recompute, zero in self.manners:
            if recompute in self._worth_trying(point, zero, fits):
                yield from self.kept(replace(point, recompute=recompute, zero=zero))
        for other in self.with_micro(point, (2, 0.5)):
            yield other
            # More micro-batches often help only together with another schedule.
            yield replace(other, splits_backward=not point.in_a_v and not point.splits_backward)
        for giver, taker in permutations(range(len(point.samples)), 2):
            given = point.samples[giver] // MOVED_PART // point.num_micro
            for units in {1, given} - {0}:
                samples = list(point.samples)
                samples[giver] -= units * point.num_micro
                samples[taker] += units * point.num_micro
                if samples[giver] > 0:
                    yield replace(point, samples=tuple(samples))
        yield from self._divided_otherwise(point)

    def _divided_otherwise(self, point: Composition) -> Iterator[Composition]:
        """Compositions with another division of one kind, without it, or with one more kind.

        Of each of these the ones with the least estimates, with samples and layers cut again.
        """
        plain = replace(
            point,
            samples=(),
            layers=(),
            in_a_v=False,
            splits_backward=False,
            copies_on_hosts=False,
        )
        alike: list[list[Composition]] = []
        for place in places(point):
            alike += [list(vary(plain, place)) for vary in (self.by_island, self.by_hosts)]
        alike.append([each for place in places(point) for each in _without(plain, place)])
        present = {island.kind for pool in point.pools for island in pool}
        for kind in set(range(len(self.options))) - present:
            most = len(self.slices.kinds[kind].hosts)
            islands = [each for each in self.options[kind] if each.hosts == most]
            alike.append([each for new in islands for each in _with_more_stages(plain, new)])
            alike.append([replace(plain, pools=(*plain.pools, (new,))) for new in islands])
        for some in alike:
            found = [(*self.estimator.shared_out(each), each) for each in some]
            fitting = sorted((one for one in found if one[0] < OVERFLOWS), key=lambda one: one[0])
            for _, samples, each in fitting[:NUM_DIVIDED]:
                cut = self.estimator.cut(replace(each, samples=samples))
                if cut is not None:
                    yield cut[1]
                    if point.in_a_v and can_be_in_a_v(cut[1]):
                        yield in_a_v(cut[1])

    def _on_other_hosts(self, point: Composition) -> Iterator[Composition]:
        """Compositions with more or fewer hosts of one kind, and samples divided again."""
        for place in places(point):
            for other in self.by_hosts(point, place):
                seconds, samples = self.estimator.shared_out(replace(other, samples=()))
                if np.isfinite(seconds):
                    has_copies = num_copies(other.pools[0], self.slices) > 1
                    copies = point.copies_on_hosts and has_copies
                    yield replace(other, samples=samples, copies_on_hosts=copies)

    def kept(self, point: Composition) -> Iterator[Composition]:
        """Slices of ZeRO over all hosts and, with one pool, also a sliced copy on each host."""
        yield replace(point, copies_on_hosts=False)
        if point.zero and len(point.pools) == 1 and num_copies(point.pools[0], self.slices) > 1:
            yield replace(point, copies_on_hosts=True)

    def _worth_trying(self, point: Composition, zero: int, fits: bool) -> tuple[Recompute, ...]:
        """Kinds of recomputation to try with a stage of ZeRO.

        A composition that fits needs neither more recomputation nor, beside it, a higher stage.
        """
        kinds = (Recompute.NONE, *self.kinds)
        if not fits or zero < point.zero:
            return kinds
        return kinds[: kinds.index(point.recompute) + (zero > point.zero)]

    def scheduled(self, point: Composition) -> Iterator[Composition]:
        """The composition with other caps, with split backward passes, and in a V."""
        if point.in_a_v:
            return
        for hides, splits in product((True, False), (True, False)):
            yield replace(point, hides_messages=hides, splits_backward=splits)
        if can_be_in_a_v(point):
            yield from map(in_a_v, self.with_micro(point, (1, 2)))

    def with_micro(self, point: Composition, times: Iterable[float]) -> Iterator[Composition]:
        """Variants with multiples of the micro-batches, if the model can be cut into them."""
        for factor in times:
            num_micro = int(factor * point.num_micro)
            if not num_micro or num_micro != self.bounded(num_micro):
                continue
            if len(point.pools) == 1 or not any(n % num_micro for n in point.samples):
                yield replace(point, num_micro=num_micro)

    def by_island(self, point: Composition, place: tuple[int, int]) -> Iterator[Composition]:
        """Variants with other teams and stages at a place, on as many hosts."""
        island = point.pools[place[0]][place[1]]
        for other in self.options[island.kind]:
            if other.hosts == island.hosts:
                yield with_island(point, place, other)

    def by_hosts(self, point: Composition, place: tuple[int, int]) -> Iterator[Composition]:
        """Variants with the same teams and stages at a place, on more or fewer hosts."""
        island = point.pools[place[0]][place[1]]
        for other in self.options[island.kind]:
            if replace(other, hosts=island.hosts) == island != other:
                yield with_island(point, place, other)

    def bounded(self, num_micro: int) -> int:
        """A power of two up to the batch; 1 if the model cannot be cut into micro-batches."""
        num_micro = 1 << (min(num_micro, self.graph.batch_size).bit_length() - 1)
        return 1 if micro_batches_refused(self.graph, num_micro) else num_micro


def with_moved_layer(point: Composition) -> Iterator[Composition]:
    """The composition with one layer moved across each boundary, in both directions."""
    for pool, layers in enumerate(point.layers):
        for stage, step in product(range(len(layers) - 1), (1, -1)):
            moved = list(layers)
            moved[stage] += step
            moved[stage + 1] -= step
            if min(moved) > 0:
                before, after = point.layers[:pool], point.layers[pool + 1 :]
                yield replace(point, layers=(*before, tuple(moved), *after))


def places(point: Composition) -> list[tuple[int, int]]:
    """(pool, place in it) of every island."""
    return [(p, i) for p, pool in enumerate(point.pools) for i in range(len(pool))]


def with_island(point: Composition, place: tuple[int, int], island: Island) -> Composition:
    """The composition with another island at a place of ``places``."""
    pools = [list(pool) for pool in point.pools]
    pools[place[0]][place[1]] = island
    return replace(point, pools=tuple(map(tuple, pools)))


def _without(point: Composition, place: tuple[int, int]) -> Iterator[Composition]:
    """The composition without an island, if another one is left."""
    pools = [list(pool) for pool in point.pools]
    del pools[place[0]][place[1]]
    if any(pools):
        yield replace(point, pools=tuple(tuple(pool) for pool in pools if pool))


def _with_more_stages(point: Composition, new: Island) -> Iterator[Composition]:
    """The composition with one more island, at either end of a pool."""
    for number, pool in enumerate(point.pools):
        for longer in ((new, *pool), (*pool, new)):
            pools = (*point.pools[:number], longer, *point.pools[number + 1 :])
            yield replace(point, pools=pools)


def can_be_in_a_v(point: Composition) -> bool:
    """Whether every stage has two layers or more, and no device has two stages yet."""
    return not point.in_a_v and min(min(layers) for layers in point.layers) > 1


def in_a_v(point: Composition) -> Composition:
    """The composition with two stages on each device, forth and back; their layers add up.

    >>> from heterog.strategy.layouts.layout import Recompute
    >>> point = Composition((), 2, recompute=Recompute.NONE, zero=0, layers=((5, 3),))
    >>> in_a_v(point).layers
    ((2, 1, 2, 3),)
    """
    layers = tuple(
        (*(count // 2 for count in own), *(count - count // 2 for count in reversed(own)))
        for own in point.layers
    )
    return replace(point, layers=layers, in_a_v=True, hides_messages=True, splits_backward=False)


MOST = 2.0
"""Largest ratio that counts, either way: what does not fit by its estimate may fit."""


class Prospects:
    """Variants of compositions that wait for simulation.

    Args:
        estimated: Function that estimates the seconds of a composition with its layers.

    Attributes:
        varied: Compositions whose variants wait, or have been simulated.
    """

    def __init__(self, estimated: Callable[[Composition], float]) -> None:
        self.varied: set[Composition] = set()
        self._estimated = estimated
        self._predicted: dict[Composition, float] = {}

    def vary(self, start: Composition, step_s: float, variants: Iterable[Composition]) -> None:
        """Let the variants of a composition wait.

        Args:
            start: The composition.
            step_s: Seconds of its step.
            variants: Its variants.
        """
        start_s = self._estimated(start)
        for other in dict.fromkeys(variants):
            ratio = min(max(self._estimated(other) / start_s, 1.0 / MOST), MOST)
            predicted_s = step_s * ratio
            self._predicted[other] = min(predicted_s, self._predicted.get(other, predicted_s))
        self.varied.add(start)

    def next(self, done: Callable[[Composition], bool]) -> Composition | None:
        """The variant with the least predicted step; those that are done wait no longer."""
        self._predicted = {point: s for point, s in self._predicted.items() if not done(point)}
        return min(self._predicted, key=self._predicted.__getitem__, default=None)
