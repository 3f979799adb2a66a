"""A process that plans for what is left of a cluster, while the ranks train.

It is started with the job, so that everything is imported, compiled and captured when a rank is
lost. A new question ends the search for the one before, whose answer is then the best so far.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from heterog.agents.improver import led_by, load_improver
from heterog.agents.planners import default_methods
from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError, StrategyError
from heterog.graph.capture import capture_step
from heterog.healing.choices import Choice, Question
from heterog.healing.costs import SlowedCosts, device_seconds, slowed, transfer_s
from heterog.healing.service import answer_questions
from heterog.methods.local_search.planner import LocalSearch
from heterog.methods.planner import Budget, Candidate, Planner, PlanResult, Problem, Stop
from heterog.pricing.calibration import cost_model_of
from heterog.pricing.cost_model import CostModel
from heterog.runtime.measure.rehearsal import rehearsal_of
from heterog.search.issue_order import IssuedSteps, Rehearse
from heterog.search.judging import run_method
from heterog.search.objective import FASTEST, Objective
from heterog.search.plan import Plan, load_plan, make_plan, plan_from_rows
from heterog.search.portfolio import rehearsed
from heterog.search.request import Request, Session
from heterog.search.rows import MethodRow, Rank
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy
from heterog.zoo import load_workload

NEAR = 1.05
"""Times the running plan's predicted step up to which a plan is worth trying: predictions on
testbeds err by 6 to 8 % (``docs/notebook/testbeds.md``)."""
_SEARCHES, _SEEDS_APART = 3, 100
"""Most searches for a plan to try, and how far apart their seeds are. A search that may not repeat
the changes of earlier trials finds nothing more often."""


class Planning:
    """Answers questions about one job.

    Args:
        whole: Path of the job's first plan.

    Attributes:
        busy_s: Predicted seconds that each rank of the first plan computes in a step.
    """

    def __init__(self, whole: Path) -> None:
        self._stop = Stop()
        plan = load_plan(whole)
        self._plans: dict[str, Plan] = {}
        self._whole = plan.cluster
        self._batch_size = plan.graph.batch_size
        self._rehearse: Rehearse | None = None
        self.busy_s = busy_seconds(Evaluator(plan.graph, plan.cluster), plan)

    def capture(self, source: str) -> None:
        """Capture the workload's step, so that from now on plans are played on shapes."""
        workload = load_workload(source, self._batch_size, must_take=False)
        self._rehearse = rehearsal_of(capture_step(workload))

    def stop(self) -> None:
        """End the search for the question that is being answered."""
        self._stop.request()

    def answer(self, question: Question) -> Choice:
        """Make a plan.

        Raises:
            StrategyError: none fits.
        """
        self._stop = Stop()
        evaluator = self._evaluator(question, question.devices)
        if question.tried:
            plan = self._near(question, evaluator)
        else:
            plan = self._plan(question, evaluator)
        if plan.step_time_s is None:
            raise StrategyError(f"nothing fits on what is left: {plan.shortage}")
        plan.save(question.path)
        return Choice(
            path=question.path,
            method=plan.method,
            kind=question.kind,
            devices=question.devices,
            slow={each: question.slow[each] for each in question.devices if each in question.slow},
            busy_s=busy_seconds(evaluator, plan),
            step_time_s=plan.step_time_s,
            stay_step_s=self._stay_step_s(question),
            moving_s=self._moving_s(question, plan.strategy),
        )

    def prepare(self, questions: Sequence[Question]) -> None:
        """Make plans for later, as far as there are any."""
        for each in questions:
            with suppress(HeterogError):
                self.answer(each)

    def _plan(self, question: Question, evaluator: Evaluator) -> Plan:
        """The plan with which the job ends first."""
        running = self._running(question)
        moving_s = cache(partial(self._moving_s, question))  # a row is ranked several times

        def until_done_s(row: MethodRow) -> float:
            assert row.candidate is not None
            return moving_s(row.candidate.strategy) + question.steps_left * (
                row.step_time_s or 0.0
            )

        request = Request(
            graph=running.graph,
            cluster=evaluator.cluster,
            methods=question.methods,
            known=default_methods(),
            budget=Budget.parse(question.budget),
            step_barrier=running.strategy.step_barrier,
            objective=_SoonestDone(until_done_s=until_done_s),
        )
        session = Session(stop=self._stop)
        plan = make_plan(request, session, evaluator=evaluator, rehearse=self._rehearse)
        return replace(plan, objective=FASTEST)

    def _near(self, question: Question, evaluator: Evaluator) -> Plan:
        """The best plan near the running one that does not repeat the changes of earlier trials.

        Raises:
            StrategyError: there is none.
        """
        running = self._running(question)
        mark, barrier = evaluator.cluster.fingerprint, running.strategy.step_barrier
        tried = [replace(load_plan(path).strategy, cluster=mark) for path in question.tried]
        now = Candidate(
            strategy=replace(running.strategy, cluster=mark),
            orders=(Order[running.order.upper()],),
        )
        stay_s = evaluator.referee(now.strategy, now.orders[0]).step_time_s
        refused = [each for each in tried if each != now.strategy]
        search = _Untried(LocalSearch(led_by(load_improver()), refused), tried)
        for again in range(_SEARCHES):
            problem = Problem(
                evaluator=evaluator,
                budget=Budget.parse(question.budget),
                seed=len(tried) + again * _SEEDS_APART,
                step_barrier=barrier,
                seeds=(now,),
                stop=self._stop,
            )
            row = run_method(search, problem)
            if row.step_time_s is not None and row.step_time_s <= NEAR * stay_s:
                break
        else:
            raise StrategyError("no other plan is predicted to be nearly as quick")
        issued, rows = IssuedSteps(evaluator), [row]
        if self._rehearse is not None and not row.is_rehearsed:
            rows = rehearsed(issued, rows, self._rehearse)
        plan = plan_from_rows(evaluator, rows, issued=issued)
        spent_s = row.search_seconds
        return replace(plan, budget=question.budget, seed=problem.seed, search_seconds=spent_s)

    def _moving_s(self, question: Question, strategy: Strategy) -> float:
        """Seconds to change from the running plan to a strategy on what is left."""
        running = self._running(question)
        return question.restart_s + transfer_s(
            running.graph,
            self._whole,
            (running.strategy, question.running.devices),
            (strategy, question.devices),
        )

    def _stay_step_s(self, question: Question) -> float:
        """Predicted step time of the running plan on the devices that it runs on."""
        running = self._running(question)
        evaluator = self._evaluator(question, question.running.devices)
        strategy = replace(running.strategy, cluster=evaluator.cluster.fingerprint)
        judged = evaluator.referee(strategy, Order[running.order.upper()])
        return judged.step_time_s

    def _evaluator(self, question: Question, devices: Sequence[int]) -> Evaluator:
        """An evaluator of some devices, some of which are slow."""
        graph, cluster = self._running(question).graph, self._whole.part(devices)
        ranks = enumerate(devices)
        slow = {rank: question.slow[each] for rank, each in ranks if each in question.slow}
        if not slow:
            return Evaluator(graph, cluster)
        costs: CostModel = SlowedCosts(cost_model_of(cluster), cluster, slow)
        return Evaluator(graph, slowed(cluster, slow), costs)

    def _running(self, question: Question) -> Plan:
        path = question.running.path
        if path not in self._plans:
            self._plans = {path: load_plan(path)}
        return self._plans[path]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SoonestDone(Objective):
    """Training that ends as soon as possible.

    Attributes:
        until_done_s: Seconds until then with the plan of a row that fits, moving included.
    """

    until_done_s: Callable[[MethodRow], float]

    def rank(self, cluster: Cluster) -> Rank:
        """See ``Objective``."""
        return lambda row: (row.overflow_bytes, self.until_done_s(row))


class _Untried(Planner):
    """A search whose answers leave out what is known already."""

    stage = "search"

    def __init__(self, search: Planner, known: Sequence[Strategy]) -> None:
        self.name, self._search, self._known = search.name, search, known

    def plan(self, problem: Problem) -> PlanResult:
        """See ``Planner``."""
        found = self._search.plan(problem)
        left = tuple(each for each in found.candidates if each.strategy not in self._known)
        return replace(found, candidates=left)


def busy_seconds(evaluator: Evaluator, plan: Plan) -> tuple[float, ...]:
    """Predicted seconds that each device of a plan computes in a step."""
    choice = evaluator.encode(plan.strategy)
    program, start_s, finish_s = evaluator.referee_timings(choice, Order[plan.order.upper()])
    return tuple(device_seconds(program, start_s, finish_s))


def main() -> None:
    """Answer questions; the first one is the first plan's path and the source of its workload."""
    begun: list[Planning] = []

    def answer(question: Any) -> Any:
        if not begun:
            path, source = question
            begun.append(Planning(path))
            if source:
                begun[0].capture(source)
            return begun[0].busy_s
        if isinstance(question, list):
            return begun[0].prepare(question)
        return begun[0].answer(question)

    def heard() -> None:
        for planning in begun:
            planning.stop()

    answer_questions(answer, heard)


if __name__ == "__main__":
    main()
