"""``average``: replicas that train alone and average their parameters every H steps.

Only where a person asks for it (``average=8``), because the weights that come out
are not those of one device. It is a row beside the exact methods, judged by the same referee: a
step costs its own seconds and the H-th part of an averaging.

Islands are single devices, or the devices of a host, which then sum gradients in every step.
Samples follow the devices' speeds, so that islands end their steps at the same time. A device
that adds more communication than it takes work off the others is left out.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.names import shown
from heterog.planners.data_parallel import (
    device_speeds,
    even_shares,
    proportional_shares,
    uniform_strategy,
)
from heterog.planners.planner import Candidate, Planner, PlanResult, Problem, Spending
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.simulator.unequal_updates import is_worth_adding
from heterog.strategy.averaging import AverageWeights, Averaging
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import Decision, Strategy, Sync

AVERAGE = "average"
"""Name of the row, and the word that asks for it."""
_MOST_MOVED = 8
"""Most samples moved, one after another, from the slowest island to another one."""
_MOST_ASKED = 8
"""Most islands, the slowest first, for which leaving them out is tried."""
_NUMBERS = {"rate": "outer_rate", "momentum": "outer_momentum"}


def parse_asynchronous(text: str) -> Averaging:
    """The averaging that a text such as ``average=8`` asks for.

    >>> parse_asynchronous("average=8,rate=0.7,momentum=0.9").words
    'parameters averaged every 8 steps by samples, outer SGD of rate 0.7, momentum 0.9'

    Raises:
        HeterogError: a word is unknown, missing or has no such value.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        word, equals, value = part.strip().partition("=")
        if word not in (AVERAGE, "weights", "delay", *_NUMBERS) or not equals or word in values:
            raise HeterogError(
                f"`asynchronous` has {shown(part)}; it takes average=H, then if wanted "
                "weights=samples or weights=equal, delay=D (steps for which an average may be "
                "under way), rate=0.7 and momentum=0.9 of an outer "
                "optimizer, each once, with commas between them."
            )
        values[word] = value
    every, delay = values.get(AVERAGE, ""), values.get("delay", "0")
    if not (_is_count(every) and _is_count(delay)):
        raise HeterogError(
            "`asynchronous` needs numbers of steps, average=H and if wanted delay=D, not "
            f"{shown(every)} and {shown(delay)}; average=8 averages after every eighth step."
        )
    weights = values.get("weights", AverageWeights.SAMPLES.value)
    if weights not in list(AverageWeights):
        raise HeterogError(f"`asynchronous` has weights={shown(weights)}; it is samples or equal.")
    numbers = {
        name: _number(word, values[word]) for word, name in _NUMBERS.items() if word in values
    }
    return Averaging(
        every=int(every), weights=AverageWeights(weights), delay=int(delay), **numbers
    )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _number(word: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise HeterogError(
            f"`asynchronous` has {word}={shown(value)}, which is not a number."
        ) from None


class AveragedReplicas(Planner):
    """Searches the best islands for one averaging.

    Args:
        averaging: The averaging that was asked for.
    """

    name = AVERAGE
    stage = "search"

    def __init__(self, averaging: Averaging) -> None:
        self.averaging = averaging

    def plan(self, problem: Problem) -> PlanResult:
        """Try islands of devices and of hosts, with even and proportional shares, then refine."""
        evaluator, begin_s = problem.evaluator, time.perf_counter()
        if not problem.step_barrier:
            return nothing("averaging needs a step barrier")
        spending = problem.spend()
        tried: list[tuple[Evaluation, Strategy]] = []
        with spending.limits():
            for decision in island_decisions(evaluator):
                tried.append(self._tried(evaluator, decision))
            if tried:
                tried += self._refined(evaluator, min(tried, key=by_preference))
                tried += self._without_slow(evaluator, min(tried, key=by_preference))
        if not tried:
            return nothing("there are no two devices or hosts with samples to average between")
        return best_of(tried, problem, spending, time.perf_counter() - begin_s)

    def _tried(self, evaluator: Evaluator, decision: Decision) -> tuple[Evaluation, Strategy]:
        strategy = replace(uniform_strategy(evaluator, decision), averaging=self.averaging)
        return evaluator.evaluate(strategy, Order.FIFO), strategy

    def _without_slow(
        self, evaluator: Evaluator, best: tuple[Evaluation, Strategy]
    ) -> Iterator[tuple[Evaluation, Strategy]]:
        """Leave islands out while one costs more communication than it computes.

        A CPU beside GPUs, say; ``is_worth_adding`` is the closed form.
        """
        speeds = device_speeds(evaluator)
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
        self,
        evaluator: Evaluator,
        whole: tuple[Evaluation, Strategy],
        team: tuple[int, ...],
        speeds: tuple[float, ...],
    ) -> tuple[Evaluation, Strategy] | None:
        """The strategy without an island; ``None`` if the island is worth its communication."""
        kept = [each for each in whole[1].decisions[0].teams if each != team]
        devices = {device for each in kept for device in each}
        weights = [speed if device in devices else 0.0 for device, speed in enumerate(speeds)]
        shares = split_in_proportion(evaluator.graph.batch_size, weights)
        decision = _decision(kept, shares)
        if decision is None:
            return None
        rest = self._tried(evaluator, decision)
        whole_s, rest_s = (evaluator.encode(each[1]).averaging_s for each in (whole, rest))
        relative = sum(speeds[device] for device in team) / sum(weights)
        compute_s = rest[0].step_time_s - rest_s
        return None if is_worth_adding(relative, compute_s, whole_s - rest_s) else rest

    def _refined(
        self, evaluator: Evaluator, best: tuple[Evaluation, Strategy]
    ) -> Iterator[tuple[Evaluation, Strategy]]:
        """Move samples from the island that takes longest to the one that would take shortest."""
        decision = best[1].decisions[0]
        speeds = device_speeds(evaluator)
        for _ in range(_MOST_MOVED):
            moved = one_sample_moved(decision, speeds)
            if moved is None:
                return
            found = self._tried(evaluator, moved)
            yield found
            if found[0].preference >= best[0].preference:
                return
            decision, best = moved, found


def by_preference(pair: tuple[Evaluation, Strategy]) -> tuple[float, float]:
    """Sort key of strategies that were tried: the best comes first."""
    return pair[0].preference


def island_decisions(evaluator: Evaluator) -> Iterator[Decision]:
    """Decisions for each kind of island (devices, hosts) and each kind of share, none twice."""
    known = set()
    ways = (proportional_shares(evaluator), even_shares(evaluator))
    for teams in (_singles(evaluator.cluster), _hosts(evaluator.cluster)):
        for shares in ways:
            decision = _decision(teams, shares)
            if decision is not None and decision not in known:
                known.add(decision)
                yield decision


def best_of(
    tried: Sequence[tuple[Evaluation, Strategy]],
    problem: Problem,
    spending: Spending,
    search_seconds: float,
) -> PlanResult:
    """The best three of the strategies that a method has tried, none of which is exact.

    Args:
        tried: All of them, at least one.
        problem: Problem whose seeds are the exact strategies, beside which the best one is put.
        spending: What the search has spent.
        search_seconds: Seconds that it took.
    """
    best = sorted(tried, key=by_preference)[:3]
    return PlanResult(
        candidates=tuple(
            Candidate(strategy=strategy, orders=(Order.FIFO,)) for _, strategy in best
        ),
        num_evaluations=spending.evaluations,
        search_seconds=search_seconds,
        note=_beside_exact(*best[0], problem),
    )


def _beside_exact(found: Evaluation, strategy: Strategy, problem: Problem) -> str:
    """Note that a strategy is not exact, and how fast it is beside the best exact one."""
    assert strategy.inexact is not None
    note = f"not exact: {strategy.inexact.words}"
    exact: Sequence[Evaluation] = [
        seed.judged for seed in problem.seeds if seed.judged is not None and seed.judged.is_ok
    ]
    if exact and found.is_ok:
        least_s = min(each.step_time_s for each in exact)
        note += f"; {least_s / found.step_time_s:.2f}x as fast as the best exact plan"
    return note


def nothing(reason: str) -> PlanResult:
    """A result without strategies, and the reason."""
    return PlanResult(candidates=(), num_evaluations=0, search_seconds=0.0, reason=reason)


def _singles(cluster: Cluster) -> list[tuple[int, ...]]:
    return [(device,) for device in range(cluster.num_devices)]


def _hosts(cluster: Cluster) -> list[tuple[int, ...]]:
    hosts: dict[int, list[int]] = {}
    for device in range(cluster.num_devices):
        hosts.setdefault(cluster.host_of[device], []).append(device)
    return [tuple(members) for members in hosts.values()]


def _decision(teams: list[tuple[int, ...]], shares: tuple[int, ...]) -> Decision | None:
    """A decision of the islands that have samples; ``None`` if fewer than two have."""
    kept = [
        tuple(device for device in team if shares[device])
        for team in teams
        if any(shares[device] for device in team)
    ]
    if len(kept) < 2:
        return None
    devices = tuple(sorted(device for team in kept for device in team))
    return Decision(
        devices=devices,
        shares=tuple(shares[device] for device in devices),
        sync=Sync.RING,
        teams=tuple(kept),
    )


def one_sample_moved(decision: Decision, speeds: tuple[float, ...]) -> Decision | None:
    """A decision with one sample moved from the slowest device to the one that would end first."""
    shares = dict(zip(decision.devices, decision.shares, strict=True))
    slowest = max(shares, key=lambda device: shares[device] / speeds[device])
    quickest = min(shares, key=lambda device: (shares[device] + 1) / speeds[device])
    if slowest == quickest or shares[slowest] < 2:
        return None
    shares[slowest] -= 1
    shares[quickest] += 1
    return replace(decision, shares=tuple(shares[device] for device in decision.devices))
