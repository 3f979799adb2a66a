"""Does a policy that leads its moves improve local search, at equal CPU seconds?

    python experiments/improver_table.py --pairs FILE --cpu-seconds 20 --json

For each pair and seed, the baselines make starts in a quarter of the seconds, once; all arms that
run in one call search from these. Arms: ``blind`` (local search as it is without a policy),
``learned`` (the shipped policy leads its moves), ``untrained`` (the same network with random
weights, the same moves and turns) and ``NAME=FILE`` for a policy of your own.
"""

import time
from dataclasses import replace
from functools import partial

from rows import board_parser, run, run_board

from heterog.agents.benchmark.board import Line
from heterog.agents.improver import SHIPPED, Improver, led_by, load_improver
from heterog.methods.local_search.planner import Lead, LocalSearch, Search
from heterog.methods.planner import Budget, Candidate, Problem
from heterog.methods.registry import built_in_methods
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator

START_PART = 0.25
_STARTS: dict[tuple[str, str, int], tuple[Candidate, ...]] = {}
"""Starts of each graph, cluster and seed."""


def starts_of(evaluator: Evaluator, seconds: float) -> tuple[Candidate, ...]:
    """Plans that the baselines find, each in an equal part of the seconds."""
    graph, cluster = evaluator.graph, evaluator.cluster
    methods = [
        each
        for each in built_in_methods()
        if each.stage == "baseline" and each.joins_auto(graph, cluster)
    ]
    budget = Budget(seconds=seconds / len(methods))
    problem = Problem(evaluator=evaluator, budget=budget, clock=time.process_time)
    rows = [run_method(each, problem) for each in methods]
    return tuple(row.candidate for row in rows if row.candidate is not None)


def lead_of(arm: str, seed: int) -> Lead | None:
    """Lead of the moves of an arm; ``None`` for blind ones."""
    if arm == "blind":
        return None
    if arm == "untrained":
        return led_by(Improver.untrained(seed))
    return led_by(load_improver(arm.partition("=")[2] or SHIPPED))


def searched(arm: str, evaluator: Evaluator, seed: int, budget: Budget) -> Line:
    """The best step of a search by the referee, and the search's progress."""
    assert budget.seconds is not None
    curve: list[tuple[float, float]] = []
    key = evaluator.graph.fingerprint, evaluator.cluster.fingerprint, seed
    if key not in _STARTS:  # on a copy of the graph: no arm profits from its tables
        own = Evaluator(replace(evaluator.graph), evaluator.cluster)
        _STARTS[key] = starts_of(own, START_PART * budget.seconds)
    Search(Problem(evaluator=evaluator, budget=Budget(evaluations=1)))  # what arms share
    counted, begin = evaluator.num_evaluations, time.process_time()
    problem = Problem(
        evaluator=evaluator,
        budget=budget,
        seed=seed,
        seeds=_STARTS[key],
        clock=time.process_time,
        report=lambda fraction, best: curve.append((time.process_time() - begin, best)),
    )
    answer = LocalSearch(lead_of(arm, seed)).plan(problem)
    spent, num_evaluations = time.process_time() - begin, evaluator.num_evaluations - counted
    judged = [evaluator.referee(each.strategy, each.orders[0]) for each in answer.candidates]
    return {
        "step_time_s": min((each.step_time_s for each in judged if each.is_ok), default=None),
        "cpu_s": round(spent, 3),
        "evaluations": num_evaluations,
        "curve": [(round(at_s, 2), best) for at_s, best in curve],
    }


def main() -> None:
    """Make what is missing, print rows or a table."""
    asked = board_parser(__doc__, "blind,learned").parse_args()
    arms = {arm.partition("=")[0]: partial(searched, arm) for arm in asked.arms.split(",")}
    asked.arms = ",".join(arms)
    run_board(asked, arms)


if __name__ == "__main__":
    run(main)
