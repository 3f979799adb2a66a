"""A process that plans for what is left of a cluster, while the ranks train.

    python -m heterog.healing.planning      requests on standard input, see ``Planning.answer``

It is started with the job, so that everything is imported, compiled and captured when a rank is
lost. A new request ends the search for the one before, which then answers with its best so far.
"""

from collections.abc import Sequence
from dataclasses import replace

from heterog.agents.improver import led_by, load_improver
from heterog.agents.planners import default_methods
from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.capture import capture_step
from heterog.healing.busy import device_seconds
from heterog.healing.improving import NEAR
from heterog.healing.moving import transfer_s
from heterog.healing.question import Question
from heterog.healing.remaining import Remaining, SlowedCosts, remaining, slowed
from heterog.healing.service import Message, answer_requests
from heterog.methods.local_search.planner import LocalSearch
from heterog.methods.planner import (
    Budget,
    Candidate,
    MethodRow,
    Planner,
    PlanResult,
    Problem,
    Stop,
)
from heterog.pricing.calibration import cost_model_of
from heterog.pricing.cost_model import CostModel
from heterog.records import parse_dataclass
from heterog.runtime.measure.rehearsal import rehearsal_of
from heterog.search.issue_order import IssuedSteps, Rehearse
from heterog.search.judging import run_method
from heterog.search.plan import Plan, Searched, load_plan, make_plan, plan_from_rows
from heterog.search.portfolio import rehearsed
from heterog.search.request import Request, Session
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy
from heterog.zoo import load_workload

_SEARCHES, _SEEDS_APART = 3, 100
"""Most searches for a plan to try, and how far apart their seeds are. A search that may not repeat
the changes of earlier trials finds nothing more often."""


class Planning:
    """Answers questions about one job."""

    def __init__(self) -> None:
        self._stop = Stop()
        self._plans: dict[str, Plan] = {}
        self._whole: Cluster  # of the first request
        self._rehearse: Rehearse | None = None

    def heard(self, request: Message) -> None:
        """A request has arrived: end the search for the one before."""
        self._stop.request()

    def answer(self, request: Message) -> Message:
        """Compute the reply to a request.

        The first request is ``{"whole": plan file, "source": workload}``; each later one is a
        ``Question``, whose reply is an ``Answer``. Without a workload plans are not played on
        shapes.
        """
        self._stop = Stop()
        if "whole" in request:
            plan = load_plan(request["whole"])
            self._whole = plan.cluster
            if request["source"]:
                workload = load_workload(request["source"], plan.graph.batch_size, must_take=False)
                self._rehearse = rehearsal_of(capture_step(workload))
            return {"busy_s": busy_seconds(Evaluator(plan.graph, plan.cluster), plan)}
        question = parse_dataclass(request, Question, "the question")
        left = remaining(self._whole, question.lost)
        evaluator = self._evaluator(self._running(question), left, question)
        if question.tried:
            plan = self._near(question, evaluator)
        else:
            plan = self._plan(question, left, evaluator)
        if plan.step_time_s is None:
            return {"error": f"nothing fits on what is left: {plan.shortage}"}
        plan.save(question.path)
        return {
            "path": question.path,
            "method": plan.method,
            "step_time_s": plan.step_time_s,
            "moving_s": self._moving_s(question, left, plan.strategy),
            "stay_step_s": self._stay_step_s(question),
            "busy_s": busy_seconds(evaluator, plan),
        }

    def _plan(self, question: Question, left: Remaining, evaluator: Evaluator) -> Plan:
        """The plan that finishes the job first."""
        running = self._running(question)
        request = Request(
            graph=running.graph,
            cluster=evaluator.cluster,
            methods=question.methods,
            known=default_methods(),
            budget=Budget.parse(question.budget),
            step_barrier=running.strategy.step_barrier,
        )
        session = Session(stop=self._stop)
        plan = make_plan(request, session, evaluator=evaluator, rehearse=self._rehearse)

        def until_done_s(row: MethodRow) -> float:
            assert row.candidate is not None
            assert row.step_time_s is not None
            moving_s = self._moving_s(question, left, row.candidate.strategy)
            return moving_s + question.steps_left * row.step_time_s

        fitting = [row for row in plan.rows if row.step_time_s is not None and row.candidate]
        if fitting:
            best = min(fitting, key=until_done_s)
            if best.method != plan.method:
                spent = Searched(budget=plan.budget, seed=plan.seed, seconds=plan.search_seconds)
                other = self._plan_of(evaluator, best, spent)
                return plan if other.step_time_s is None else other
        return plan

    def _near(self, question: Question, evaluator: Evaluator) -> Plan:
        """The best plan near the running one that does not repeat the changes of earlier trials.

        Raises:
            StrategyError: there is none.
        """
        running = self._running(question)
        mark, barrier = evaluator.cluster.fingerprint(), running.strategy.step_barrier
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
        spent = Searched(budget=question.budget, seed=problem.seed, seconds=row.search_seconds)
        return self._plan_of(evaluator, row, spent)

    def _moving_s(self, question: Question, left: Remaining, strategy: Strategy) -> float:
        """Seconds to change from the running plan to a strategy on what is left."""
        running = self._running(question)
        return question.restart_s + transfer_s(
            running.graph,
            self._whole,
            (running.strategy, question.running_on),
            (strategy, left.device_of),
        )

    def _plan_of(self, evaluator: Evaluator, row: MethodRow, spent: Searched) -> Plan:
        """Make the plan of one row, which is played on shapes unless it was."""
        issued = IssuedSteps(evaluator)
        rows = [row]
        if self._rehearse is not None and not row.is_rehearsed:
            rows = rehearsed(issued, rows, self._rehearse)
        return plan_from_rows(evaluator, rows, spent, issued=issued)

    def _stay_step_s(self, question: Question) -> float:
        """Predicted step time of the running plan on the devices that it runs on."""
        running = self._running(question)
        others = set(range(self._whole.num_devices)) - set(question.running_on)
        evaluator = self._evaluator(running, remaining(self._whole, others), question)
        strategy = replace(running.strategy, cluster=evaluator.cluster.fingerprint())
        judged = evaluator.referee(strategy, Order[running.order.upper()])
        return judged.step_time_s

    def _evaluator(self, plan: Plan, left: Remaining, question: Question) -> Evaluator:
        """An evaluator of what is left, in which some devices are slow."""
        slow = {
            rank: question.slow[device]
            for rank, device in enumerate(left.device_of)
            if device in question.slow
        }
        if not slow:
            return Evaluator(plan.graph, left.cluster)
        costs: CostModel = SlowedCosts(cost_model_of(left.cluster), left.cluster, slow)
        return Evaluator(plan.graph, slowed(left.cluster, slow), costs)

    def _running(self, question: Question) -> Plan:
        if question.running not in self._plans:
            self._plans = {question.running: load_plan(question.running)}
        return self._plans[question.running]


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


def busy_seconds(evaluator: Evaluator, plan: Plan) -> list[float]:
    """Predicted seconds that each device of a plan computes in a step."""
    choice = evaluator.encode(plan.strategy)
    program, start_s, finish_s = evaluator.referee_timings(choice, Order[plan.order.upper()])
    return device_seconds(program, start_s, finish_s)


def main() -> None:
    """Answer requests until the input ends."""
    planning = Planning()
    answer_requests(planning.answer, planning.heard)


if __name__ == "__main__":
    main()
