"""The method ``dedication``: plans that others found, with alike hosts in better places.

Where the rates between hosts differ (``Cluster.pairs``), the best plans of the other methods are
taken and their hosts of one kind permuted. Orders are proposed by annealing an estimate of what
the plan's own traffic costs (``HostTraffic``), and then by single moves; the evaluator judges
each. Among the candidates is the plan as it was, so that the result is never worse. ``auto`` runs
it last, on its winner.
"""

import time
from collections.abc import Iterator

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.planners.data_parallel import even_shares, uniform_strategy
from heterog.planners.host_kinds import hosts_by_kind
from heterog.planners.host_order import HostTraffic, on_hosts
from heterog.planners.pipette.annealing import COOLED, anneal, moved
from heterog.planners.pipette.communication import HostRates
from heterog.planners.planner import Candidate, PlanResult, Problem, register
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation
from heterog.strategy.program import IntArray
from heterog.strategy.strategy import Decision, Strategy, Sync

NUM_STARTS = 3
"""Plans whose hosts are permuted, the best one first."""
NUM_RETURNED = 3
"""Strategies handed to the referee, beside the plan as it was."""
NUM_PROPOSED = 2
"""Orders that are annealed for each plan."""
MOST_FRUITLESS = 60
"""Moves in a row that bring nothing, after which the next plan is taken up."""
MOST_TASKS = 2_000_000
"""Of a program whose traffic is counted; orders of a larger one are found by moves alone."""
ANNEALED_PART = 0.3
"""Of a budget in seconds, after which no order is annealed any longer."""


class Dedication:
    """Alike hosts in other places; see the module docstring."""

    name = "dedication"
    stage = "search"
    resumes = True
    comes_last = True

    @staticmethod
    def joins_auto(cluster: Cluster) -> bool:
        """Whether ``auto`` gives it a part: where alike hosts have unlike pairs."""
        if not cluster.pairs:
            return False
        rates = HostRates.of_cluster(cluster)
        return rates.differ and any(len(hosts) > 1 for hosts in hosts_by_kind(cluster))

    def plan(self, problem: Problem) -> PlanResult:
        """Permute the hosts of the best plans so far."""
        begin = time.perf_counter()
        spending = problem.spend()
        search = problem.resumed(_Search)
        search.problem, search.spending = problem, spending
        starts = _starts(problem)
        with spending.limits():
            if self.joins_auto(problem.evaluator.cluster):
                search.run(starts)
        best = search.best(NUM_RETURNED)
        return PlanResult(
            candidates=(*best, starts[0]),
            num_evaluations=spending.evaluations,
            search_seconds=time.perf_counter() - begin,
            note=search.gain_in_words(),
        )


def _starts(problem: Problem) -> list[Candidate]:
    """The best plans of others; data parallelism where there is none."""
    judged = [seed for seed in problem.seeds if seed.judged is not None]
    if not judged:
        evaluator = problem.evaluator
        devices = tuple(range(evaluator.cluster.num_devices))
        decision = Decision(devices=devices, shares=even_shares(evaluator), sync=Sync.RING)
        strategy = uniform_strategy(evaluator, decision, step_barrier=problem.step_barrier)
        return [Candidate(strategy=strategy, orders=(problem.first_order,))]
    judged.sort(key=lambda seed: seed.judged.preference)  # type: ignore[union-attr]
    return list({seed.strategy: seed for seed in reversed(judged)}.values())[::-1][:NUM_STARTS]


class _Search:
    """Orders of hosts that were tried."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.spending = problem.spend()
        self._cluster = problem.evaluator.cluster
        self._rates = HostRates.of_cluster(self._cluster)
        self._kinds = [
            np.array(hosts, np.int32) for hosts in hosts_by_kind(self._cluster) if len(hosts) > 1
        ]
        self._found: dict[tuple[Strategy, Order], Evaluation] = {}
        self._done: set[Strategy] = set()
        self._gain = (0.0, 0.0)

    def run(self, starts: list[Candidate]) -> None:
        """Permute the hosts of each plan, unless that was done before."""
        for start in starts:
            if start.strategy not in self._done:
                self._improve(start)
                self._done.add(start.strategy)

    def best(self, count: int) -> list[Candidate]:
        """The best permuted plans so far, best first."""
        found = sorted(self._found, key=lambda key: self._found[key].preference)[:count]
        return [Candidate(strategy=strategy, orders=(order,)) for strategy, order in found]

    def gain_in_words(self) -> str:
        """What the best order of any plan gains over that plan."""
        before_s, after_s = self._gain
        if after_s >= before_s:
            return ""
        return f"other places of alike hosts take {before_s:.4g} s to {after_s:.4g} s"

    def _improve(self, start: Candidate) -> None:
        """Try orders: those that are annealed, then moves of the best one."""
        turn = start.orders[0]
        given = np.arange(self._cluster.num_hosts, dtype=np.int32)
        rng = np.random.default_rng(self.problem.seed)
        first = self._try(start.strategy, turn)
        if first is None:
            return
        best, order = first, given
        for proposed in self._proposed(start.strategy, rng):
            found = self._try(self._placed(start.strategy, proposed), turn)
            if found is not None and found.preference < best.preference:
                best, order = found, proposed
        fruitless = 0
        while fruitless < MOST_FRUITLESS and not self.spending.is_over:
            neighbour = self._moved(order, rng)
            strategy = self._placed(start.strategy, neighbour)
            is_new = (strategy, turn) not in self._found
            found = self._try(strategy, turn, best.step_time_s) if is_new else None
            if found is not None and found.preference < best.preference:
                best, order, fruitless = found, neighbour, 0
            else:
                fruitless += 1
        if best is not first and best.preference == self._least:
            self._gain = first.step_time_s, best.step_time_s

    @property
    def _least(self) -> tuple[float, float]:
        return min(found.preference for found in self._found.values())

    def _placed(self, strategy: Strategy, order: IntArray) -> Strategy:
        return on_hosts(strategy, self._cluster, order.tolist())

    def _proposed(self, strategy: Strategy, rng: np.random.Generator) -> Iterator[IntArray]:
        """Orders of little estimated traffic, kind by kind."""
        evaluator = self.problem.evaluator
        choice = evaluator.encode(strategy)
        if evaluator.tasks_of(choice) > MOST_TASKS:
            return
        traffic = HostTraffic.of_program(evaluator.program(choice), self._cluster)
        if traffic.is_nothing:
            return
        order = np.arange(self._cluster.num_hosts, dtype=np.int32)
        for _ in range(NUM_PROPOSED):
            for hosts in self._kinds:
                order = self._annealed(order, hosts, traffic, rng)
            yield order

    def _annealed(
        self, order: IntArray, hosts: IntArray, traffic: HostTraffic, rng: np.random.Generator
    ) -> IntArray:
        """An order whose hosts of one kind are annealed."""
        whole = order.copy()

        def cost_of(part: IntArray) -> float:
            whole[hosts] = part
            return traffic.seconds(whole, self._rates)

        found = anneal(cost_of, order[hosts], rng, num_steps=COOLED, is_over=self._is_annealed)
        whole[hosts] = found.order
        return whole

    def _is_annealed(self) -> bool:
        """Whether simulations need what is left of the seconds."""
        is_timed = self.problem.budget.seconds is not None
        return self.spending.is_cut or (is_timed and self.spending.fraction >= ANNEALED_PART)

    def _moved(self, order: IntArray, rng: np.random.Generator) -> IntArray:
        """An order with some hosts of one kind elsewhere."""
        hosts = self._kinds[int(rng.integers(len(self._kinds)))]
        result = order.copy()
        result[hosts] = moved(order[hosts], rng)
        return result

    def _try(self, strategy: Strategy, turn: Order, limit_s: float = np.inf) -> Evaluation | None:
        """Simulate a strategy once; ``None`` where the budget is over."""
        key = strategy, turn
        if key not in self._found:
            if self._found and self.spending.is_over:
                return None
            evaluator = self.problem.evaluator
            choice = evaluator.encode(strategy)
            self._found[key] = evaluator.evaluate_choice(choice, turn, limit_s)
            self.problem.report(self.spending.fraction, self._least[1])
        return self._found[key]


register(Dedication())
