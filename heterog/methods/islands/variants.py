"""Variants of a composition: a layer moved over a boundary, two stages on each device in a V."""

from collections.abc import Iterator
from dataclasses import replace

from heterog.methods.islands.composing import Composition


def with_moved_layer(point: Composition) -> Iterator[Composition]:
    """A layer more or less at each boundary."""
    for pool, layers in enumerate(point.layers):
        for stage in range(len(layers) - 1):
            for step in (1, -1):
                moved = list(layers)
                moved[stage] += step
                moved[stage + 1] -= step
                if min(moved) > 0:
                    others = list(point.layers)
                    others[pool] = tuple(moved)
                    yield replace(point, layers=tuple(others))


def places(point: Composition) -> list[tuple[int, int]]:
    """(pool, place in it) of every island."""
    return [(p, i) for p, pool in enumerate(point.pools) for i in range(len(pool))]


def can_be_in_a_v(point: Composition) -> bool:
    """Whether every stage has two layers or more, and no device two stages yet."""
    return not point.in_a_v and min(min(layers) for layers in point.layers) > 1


def in_a_v(point: Composition) -> Composition:
    """The same devices with two stages each, forth and back, with as many layers together.

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
