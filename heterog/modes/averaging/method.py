"""``average``: replicas train alone and average their parameters every H steps.

Only if a user asks for it (``average=8``), because the resulting weights differ from those of one
device. It is a row beside the exact methods, judged by the same referee: a step costs its own
seconds and one H-th of an averaging.

Islands are single devices, or the devices of a host, which then sum gradients in every step.
Samples follow the devices' speeds, so that islands end their steps at the same time. An island is
left out if its communication costs more time than its computation saves.
"""

from collections.abc import Iterator
from functools import partial

from heterog.errors import HeterogError
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Planner, PlanResult, Problem
from heterog.modes.averaging.value import AverageWeights, Averaging
from heterog.modes.search import (
    Tried,
    best_of,
    by_preference,
    count_in,
    island_decision,
    island_decisions,
    nothing,
    refined,
    words_in,
)
from heterog.names import shown
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.unequal_updates import is_worth_adding
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import Decision

_MOST_ASKED = 8
"""Most islands, the slowest first, that the search tries to leave out."""
_NUMBERS = {"rate": "outer_rate", "momentum": "outer_momentum"}


def parse_averaging(text: str) -> Averaging:
    """The averaging for a text such as ``average=8``.

    >>> parse_averaging("average=8,rate=0.7,momentum=0.9").words
    'parameters averaged every 8 steps by samples, outer SGD of rate 0.7, momentum 0.9'

    Raises:
        HeterogError: a word is unknown, missing or has no such value.
    """
    try:
        said = words_in(text, Averaging.word, "weights", "delay", *_NUMBERS)
        return Averaging(
            every=count_in(said.get(Averaging.word, "")),
            weights=AverageWeights(said.get("weights", AverageWeights.SAMPLES)),
            delay=count_in(said.get("delay", "0")),
            **{name: float(said[word]) for word, name in _NUMBERS.items() if word in said},
        )
    except ValueError:
        raise HeterogError(
            f"`asynchronous` has {shown(text)}; it takes average=H (average=8: after every "
            "eighth step), then if wanted weights=samples or weights=equal, delay=D (steps for "
            "which an average may be under way), rate=0.7 and momentum=0.9 of an outer optimizer, "
            "each once, with commas between them."
        ) from None


class AveragedReplicas(Planner):
    """Searches the best islands for one averaging.

    Args:
        averaging: The requested averaging.
    """

    name = Averaging.word
    stage = "search"

    def __init__(self, averaging: Averaging) -> None:
        self.averaging = averaging

    def plan(self, problem: Problem) -> PlanResult:
        """Try islands of devices and of hosts, with even and proportional shares, then refine."""
        evaluator = problem.evaluator
        if not problem.step_barrier:
            return nothing("averaging needs a step barrier")
        spending = problem.spend()
        tried: list[Tried] = []
        with spending.limits():
            for decision in island_decisions(evaluator):
                tried.append(self._tried(evaluator, decision))
            if tried:
                speeds, best = evaluator.speeds, min(tried, key=by_preference)
                tried += refined(best, lambda _: speeds, partial(self._tried, evaluator))
                tried += self._without_slow(evaluator, min(tried, key=by_preference))
        why_none = "there are no two devices or hosts with samples to average between"
        return best_of(tried, problem, spending, why_none)

    def _tried(self, evaluator: Evaluator, decision: Decision) -> Tried:
        strategy = uniform_strategy(evaluator, decision).with_mode(self.averaging)
        return evaluator.evaluate(strategy, Order.FIFO), strategy

    def _without_slow(self, evaluator: Evaluator, best: Tried) -> Iterator[Tried]:
        """Leave islands out while the communication of one costs more than its computation saves.

        An example is a CPU beside GPUs; ``is_worth_adding`` is the closed form.
        """
        speeds = evaluator.speeds
        while len(teams := best[1].decisions[0].teams) > 2:
            by_speed = sorted(teams, key=lambda team: sum(speeds[device] for device in team))
            found = [
                rest
                for team in by_speed[:_MOST_ASKED]
                if (rest := self._unless_worth(evaluator, best, team, speeds)) is not None
            ]
            if not found:
                return
            yield from found
            best = min(found, key=by_preference)

    def _unless_worth(
        self, evaluator: Evaluator, whole: Tried, team: tuple[int, ...], speeds: tuple[float, ...]
    ) -> Tried | None:
        """The strategy without an island; ``None`` if the island is worth its communication."""
        kept = [each for each in whole[1].decisions[0].teams if each != team]
        devices = {device for each in kept for device in each}
        weights = [speed if device in devices else 0.0 for device, speed in enumerate(speeds)]
        decision = island_decision(kept, split_in_proportion(evaluator.graph.batch_size, weights))
        if decision is None:
            return None
        rest = self._tried(evaluator, decision)
        whole_s, rest_s = (
            sum(mode.more_s for mode in evaluator.encode(each[1]).modes) for each in (whole, rest)
        )
        relative = sum(speeds[device] for device in team) / sum(weights)
        compute_s = rest[0].step_time_s - rest_s
        return None if is_worth_adding(relative, compute_s, whole_s - rest_s) else rest
