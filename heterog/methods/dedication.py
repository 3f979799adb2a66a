"""The method ``dedication``: plans of other methods, with hosts of one kind in better places.

If rates between hosts differ (``Cluster.pairs``), hosts of one kind are permuted in the best plans
of the other methods. Annealing on an estimate of the plan's traffic (``HostTraffic``) proposes
orders of hosts, then single moves do. The evaluator judges each order, the referee the best ones.
The original plan is among the candidates, so the result is never worse. ``auto`` runs this method
last, on its winner.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.lowering.program import IntArray
from heterog.methods.data_parallel import even_shares, uniform_strategy
from heterog.methods.host_order import HostTraffic, annealed_order, hosts_by_kind, on_hosts
from heterog.methods.pipette.communication import HostRates, moved
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem, StrategySearch
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation
from heterog.strategy.strategy import Decision, Strategy, Sync

NUM_STARTS = 3
"""Number of plans whose hosts are permuted, the best one first."""
NUM_JUDGED = 3
"""Number of permuted plans that the referee compares with the original ones."""
NUM_PROPOSED = 2
"""Number of orders that are annealed for each plan."""
MOST_FRUITLESS = 60
"""Moves in a row without gain after which the search turns to the next plan."""
SEARCHED_PART = 0.8
"""Part of a budget for the search; the rest is for the referee."""
ANNEALED_PART = 0.3
"""Part of a budget in seconds after which annealing ends."""


class Dedication(Planner):
    """Hosts of one kind in other places; see the module docstring."""

    name = "dedication"
    stage = "search"
    resumes = True
    comes_last = True

    @staticmethod
    def joins_auto(graph: OpGraph, cluster: Cluster) -> bool:
        """Whether ``auto`` runs it: only if rates between hosts of one kind differ."""
        if not cluster.pairs:
            return False
        rates = HostRates.of_cluster(cluster)
        return any(_places_differ(rates, hosts) for hosts in hosts_by_kind(cluster))

    def plan(self, problem: Problem) -> PlanResult:
        """Permute the hosts of the best plans so far."""
        search = problem.resumed(_Search)
        search.problem, search.spending = problem, problem.spend()
        search.starts = _starts(problem)
        with search.spending.limits():
            if self.joins_auto(problem.evaluator.graph, problem.evaluator.cluster):
                search.search()
        first, best = search.starts[0], search.best_of(search.starts[0])
        return PlanResult(
            candidates=(best,),
            num_evaluations=search.spending.evaluations,
            note="" if best is first else _gain_in_words(first, best),
        )


def _places_differ(rates: HostRates, hosts: tuple[int, ...]) -> bool:
    """Whether hosts of one kind differ by their links."""
    own = np.array(hosts, np.int32)
    others = np.setdiff1d(np.arange(rates.num_hosts, dtype=np.int32), own)
    seen_from = rates.s_per_byte[np.ix_(others, own)]  # [num_others, num_own]
    seen_by = rates.s_per_byte[np.ix_(own, others)]  # [num_own, num_others]
    among = rates.s_per_byte[np.ix_(own, own)][~np.eye(len(own), dtype=np.bool_)]
    spreads = [np.ptp(seen_from, axis=1), np.ptp(seen_by, axis=0)]
    if len(own) > 1:
        spreads.append(np.array([np.ptp(among)]))
    return any((each > 0.0).any() for each in spreads)


def _gain_in_words(before: Candidate, after: Candidate) -> str:
    assert before.judged is not None
    assert after.judged is not None
    was_s, is_s = before.judged.step_time_s, after.judged.step_time_s
    return f"alike hosts in other places: {is_s:.4g} s a step, before {was_s:.4g} s"


def _is_better(found: Evaluation | None, best: Evaluation | None) -> bool:
    return found is not None and (best is None or found.preference < best.preference)


def _starts(problem: Problem) -> list[Candidate]:
    """The best plans of others; data parallelism if there are none."""
    judged = [seed for seed in problem.seeds if seed.judged is not None]
    if not judged:
        evaluator = problem.evaluator
        devices = tuple(range(evaluator.cluster.num_devices))
        decision = Decision(devices=devices, shares=even_shares(evaluator), sync=Sync.RING)
        strategy = uniform_strategy(evaluator, decision, step_barrier=problem.step_barrier)
        order = problem.first_order
        judged_so = evaluator.referee(strategy, order)
        return [Candidate(strategy=strategy, orders=(order,), judged=judged_so)]
    judged.sort(key=lambda seed: seed.judged.preference)  # type: ignore[union-attr]
    return list({seed.strategy: seed for seed in reversed(judged)}.values())[::-1][:NUM_STARTS]


class _Search(StrategySearch):
    """The orders of hosts that were tried."""

    why_nothing = ""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._cluster = problem.evaluator.cluster
        self._rates = HostRates.of_cluster(self._cluster)
        self._kinds = [
            np.array(hosts, np.int32) for hosts in hosts_by_kind(self._cluster) if len(hosts) > 1
        ]
        self.starts: list[Candidate] = []
        self._done: set[Strategy] = set()
        self._judged: dict[tuple[Strategy, Order], Evaluation] = {}

    def search(self) -> None:
        """Permute the hosts of each start, unless that was done before, and judge the best."""
        for start in self.starts:
            if start.judged is not None:
                self._judged[start.strategy, start.orders[0]] = start.judged
            if start.strategy not in self._done and self._improve(start):
                self._done.add(start.strategy)
        for number, key in enumerate(self.best(NUM_JUDGED)):
            if number and self.spending.is_over:
                return
            if key not in self._judged:
                self._judged[key] = self.problem.evaluator.referee(*key)

    def best_of(self, start: Candidate) -> Candidate:
        """The best plan by the referee: a permuted one, or the original."""
        if start.judged is None or not self._judged:
            return start
        key = min(self._judged, key=lambda key: self._judged[key].preference)
        judged = self._judged[key]
        if judged.preference >= start.judged.preference:
            return start
        return Candidate(strategy=key[0], orders=(key[1],), judged=judged)

    def _improve(self, start: Candidate) -> bool:
        """Try orders: first annealed ones, then moves of the best one.

        A second call soon reaches the point where the first ended, because evaluations are kept.

        Returns:
            Whether the search ended because no move improves the plan.
        """
        turn = start.orders[0]
        given = np.arange(self._cluster.num_hosts, dtype=np.int32)
        rng = np.random.default_rng(self.problem.seed)
        best, order = self._try(start.strategy, turn), given
        for proposed in self._proposed(start.strategy, rng):
            found = self._try(self._placed(start.strategy, proposed), turn)
            if _is_better(found, best):
                best, order = found, proposed
        fruitless = 0
        while best is not None and fruitless < MOST_FRUITLESS:
            if self._is_searched:
                return False
            neighbour = self._moved(order, rng)
            found = self._try(self._placed(start.strategy, neighbour), turn, best.step_time_s)
            fruitless += 1
            if _is_better(found, best):
                best, order, fruitless = found, neighbour, 0
        return best is not None

    @property
    def _is_searched(self) -> bool:
        """Whether the referee needs the rest of the budget."""
        return self.spending.is_over or self.spending.fraction >= SEARCHED_PART

    def _placed(self, strategy: Strategy, order: IntArray) -> Strategy:
        return on_hosts(strategy, self._cluster, order.tolist())

    def _proposed(self, strategy: Strategy, rng: np.random.Generator) -> Iterator[IntArray]:
        """Orders with little estimated traffic, annealed for one kind of host after another."""
        traffic = HostTraffic.of_strategy(strategy, self.problem.evaluator)
        if traffic is None:
            return
        order = np.arange(self._cluster.num_hosts, dtype=np.int32)
        for _ in range(NUM_PROPOSED):
            for hosts in self._kinds:
                # Simulations need the rest of the seconds.
                is_over = partial(self.spending.is_past, ANNEALED_PART)
                order = annealed_order(traffic, self._rates, order, hosts, rng, is_over=is_over)
            yield order

    def _moved(self, order: IntArray, rng: np.random.Generator) -> IntArray:
        """An order with some hosts of one kind elsewhere."""
        hosts = self._kinds[int(rng.integers(len(self._kinds)))]
        result = order.copy()
        result[hosts] = moved(order[hosts], rng)
        return result

    def _try(self, strategy: Strategy, turn: Order, limit_s: float = np.inf) -> Evaluation | None:
        """Simulate a strategy once; ``None`` where the budget is over."""
        key = strategy, turn
        if key not in self.found and not (self.found and self._is_searched):
            self.keep(key, self.evaluator.evaluate(strategy, turn, limit_s))
        return self.found.get(key)
