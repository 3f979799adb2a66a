"""Shared parts of the modes' searches: decisions with islands, and results beside exact ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from heterog.grouped import grouped
from heterog.methods.data_parallel import even_shares, proportional_shares
from heterog.methods.planner import Candidate, PlanResult, Problem, Spending
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.strategy.strategy import Decision, Strategy, Sync


def words_in(text: str, *known: str) -> dict[str, str]:
    """The values of words in a user's text.

    >>> words_in("average=8,delay=2", "average", "delay", "weights")
    {'average': '8', 'delay': '2'}

    Raises:
        ValueError: a word is unknown, or comes twice.
    """
    pairs = [[each.strip() for each in part.partition("=")[::2]] for part in text.split(",")]
    found = {word: value for word, value in pairs}
    if len(found) < len(pairs) or not found.keys() <= set(known):
        raise ValueError(text)
    return found


def count_in(text: str) -> int:
    """The number of steps or parts that a user's text says.

    Raises:
        ValueError: it is no such number.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(text)
    return int(text)


Tried = tuple[Evaluation, Strategy]
"""The evaluation of a tried strategy, and the strategy."""
_MOST_MOVED = 8
"""Most samples moved, one by one, from the slowest team to another team."""


def by_preference(pair: Tried) -> tuple[float, float]:
    """Sort key of tried strategies, best first."""
    return pair[0].preference


def island_decisions(evaluator: Evaluator) -> Iterator[Decision]:
    """Distinct decisions for each kind of island (devices, hosts) and each kind of shares."""
    known = set()
    ways = (proportional_shares(evaluator), even_shares(evaluator))
    singles: list[tuple[int, ...]] = [(device,) for device in range(evaluator.cluster.num_devices)]
    hosts = grouped((host, device) for device, host in enumerate(evaluator.cluster.host_of))
    for teams in (singles, list(map(tuple, hosts.values()))):
        for shares in ways:
            decision = island_decision(teams, shares)
            if decision is not None and decision not in known:
                known.add(decision)
                yield decision


def best_of(
    tried: Sequence[Tried], problem: Problem, spending: Spending, why_none: str
) -> PlanResult:
    """The best three of a method's tried strategies, none of which is exact.

    Args:
        tried: All tried strategies.
        problem: Problem whose seeds are exact strategies, with which the best one is compared.
        spending: Spending of the search.
        why_none: The reason if none was tried.
    """
    if not tried:
        return nothing(why_none)
    best = sorted(tried, key=by_preference)[:3]
    return PlanResult(
        candidates=tuple(
            Candidate(strategy=strategy, orders=(Order.FIFO,)) for _, strategy in best
        ),
        num_evaluations=spending.evaluations,
        note=_beside_exact(*best[0], problem),
    )


def _beside_exact(found: Evaluation, strategy: Strategy, problem: Problem) -> str:
    """Note that a strategy is not exact, with its speed over the best exact strategy's."""
    note = "not exact: " + "; ".join(mode.words for mode in strategy.modes)
    exact: Sequence[Evaluation] = [
        seed.judged for seed in problem.seeds if seed.judged is not None and seed.judged.is_ok
    ]
    if exact and found.is_ok:
        least_s = min(each.step_time_s for each in exact)
        note += f"; {least_s / found.step_time_s:.2f}x as fast as the best exact plan"
    return note


def nothing(reason: str) -> PlanResult:
    """A result without strategies, and the reason."""
    return PlanResult(candidates=(), num_evaluations=0, reason=reason)


def island_decision(teams: list[tuple[int, ...]], shares: tuple[int, ...]) -> Decision | None:
    """A decision with the islands that have samples; ``None`` if fewer than two do."""
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
    """A decision with one sample moved from the slowest device to the fastest one.

    The fastest device is the one that ends first with a sample more.
    """
    shares = dict(zip(decision.devices, decision.shares, strict=True))
    slowest = max(shares, key=lambda device: shares[device] / speeds[device])
    quickest = min(shares, key=lambda device: (shares[device] + 1) / speeds[device])
    if slowest == quickest or shares[slowest] < 2:
        return None
    shares[slowest] -= 1
    shares[quickest] += 1
    return replace(decision, shares=tuple(shares[device] for device in decision.devices))


def refined(
    best: Tried,
    speeds: Callable[[Strategy], tuple[float, ...]],
    attempt: Callable[[Decision], Tried],
) -> Iterator[Tried]:
    """Move samples one by one from the slowest device while that shortens the step.

    Args:
        best: Strategy to begin with.
        speeds: Samples per second of every device under a strategy.
        attempt: Tries a decision for all groups.
    """
    for _ in range(_MOST_MOVED):
        moved = one_sample_moved(best[1].decisions[0], speeds(best[1]))
        if moved is None:
            return
        found = attempt(moved)
        yield found
        if found[0].preference >= best[0].preference:
            return
        best = found
