"""Simulated annealing over orders, as Pipette dedicates hosts to places in pipelines.

Five moves, equally likely; a worse neighbour is taken with probability exp(-x / T), where x is the
difference scaled by a power of ten into [0.1, 1), T begins at 1 and shrinks by a thousandth in
every step. Because of the scaling the size of a loss hardly matters, and after ``COOLED`` steps
nothing worse is taken any more. Unlike the paper, which goes on for 500 s, it then begins anew at
a random order, and the first run begins at the order that is given: the result is never worse.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from heterog.lowering.program import IntArray

FIRST_TEMPERATURE = 1.0
COOLING = 0.999
COOLED = 5_000
"""Steps of a run: at 0.999^5000 = 0.007 a loss of the least scaled size, 0.1, is taken once in
three million times."""
_MOST_KNOWN = 10_000
"""Orders whose cost is kept: all neighbours in a cold run of few hosts, little memory for many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annealed:
    """The best order of a search.

    Attributes:
        order: The permuted order.
        cost: Cost of the order.
        num_steps: Number of neighbours that were priced.
    """

    order: tuple[int, ...]
    cost: float
    num_steps: int


def anneal(
    cost_of: Callable[[IntArray], float],
    start: IntArray,
    rng: np.random.Generator,
    *,
    num_steps: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Annealed:
    """Search for the order of the least cost.

    Args:
        cost_of: Function to minimise, which depends on the order alone.
        start: Order to start from.
        rng: Generator of everything random.
        num_steps: Most neighbours to price.
        is_over: Function asked before each step whether to return the best order so far.
    """
    known: dict[bytes, float] = {}

    def known_cost(order: IntArray) -> float:
        """The cost, which a cold run asks for often: few orders are neighbours of one."""
        key = order.tobytes()
        found = known.get(key)
        if found is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            found = known[key] = cost_of(order)
        return found

    best, least = start.copy(), known_cost(start)
    order, cost = best, least
    temperature = FIRST_TEMPERATURE
    step = 0
    while step < num_steps and len(start) > 1 and not is_over():
        if step and step % COOLED == 0:
            order = rng.permutation(start)
            cost, temperature = known_cost(order), FIRST_TEMPERATURE
        neighbour = moved(order, rng)
        found = known_cost(neighbour)
        step += 1
        if found <= cost or rng.random() < math.exp(-scaled(found - cost) / temperature):
            order, cost = neighbour, found
        if found < least:
            best, least = neighbour, found
        temperature *= COOLING
    return Annealed(order=tuple(best.tolist()), cost=least, num_steps=step)


def scaled(difference: float) -> float:
    """A positive difference times the power of ten that brings it into [0.1, 1).

    >>> scaled(0.1), scaled(250.0), scaled(0.003)
    (0.1, 0.25, 0.3)
    """
    return float(difference / 10.0 ** (math.floor(math.log10(difference)) + 1))


def moved(order: IntArray, rng: np.random.Generator) -> IntArray:
    """A neighbour: a segment reversed, an element or segment moved, or two of them swapped."""
    count = len(order)
    # One call for all draws, because this runs in every step.
    draws = rng.random(4) * (5, count, count - 1, 1e9)
    kind, first, apart, place = map(int, draws.tolist())
    second = (first + 1 + apart) % count
    begin, end = min(first, second), max(first, second) + 1
    if kind == 0:
        result = order.copy()
        result[begin:end] = order[begin:end][::-1]
        return result
    if kind == 1:
        result = order.copy()
        result[first], result[second] = order[second], order[first]
        return result
    if kind == 2:
        begin, end = first, first + 1
    segment = order[begin:end]
    rest = np.concatenate([order[:begin], order[end:]])
    place %= len(rest) + 1
    if kind == 4:
        segment = segment[::-1]
    return np.concatenate([rest[:place], segment, rest[place:]])
