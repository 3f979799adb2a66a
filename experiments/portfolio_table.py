"""What does ``auto`` gain from its agents, compared with more time without, or over one method?

    python experiments/portfolio_table.py --pairs experiments/pairs/test.jsonl --json
    python experiments/portfolio_table.py --pairs experiments/pairs/mixed.jsonl \
        --arms megatron_grid,without_grid --seeds 1 --json

Arms: ``with`` and ``without`` agents, ``without_5x`` (without agents for five times as long) and,
if asked for, ``blind`` (with agents, but no policy leads the moves of ``agent+search``),
``without_grid`` (without agents and ``megatron_grid``, so that no method starts from its plans) or
a method by its name. Ratios are step times over those of the first arm. Budgets are in seconds of
this process, so that other work on the machine shortens no search.
"""

import time
from collections.abc import Collection
from functools import partial

from rows import board_parser, run, run_board

from heterog.agents.benchmark.board import Line, judged
from heterog.agents.planners import DEFAULT_POLICY, LEARNED, AgentSearch, default_methods
from heterog.methods.planner import Budget
from heterog.methods.registry import Methods
from heterog.search.portfolio import best_row, run_methods
from heterog.search.request import Request, Session
from heterog.simulator.evaluator import Evaluator

ARMS = "with,without,without_5x"


def auto(
    known: Methods, without: Collection[str], times: float, evaluator: Evaluator, seed: int,
    budget: Budget,
) -> Line:  # fmt: skip
    """The best row of all methods but some."""
    request = Request(
        graph=evaluator.graph,
        cluster=evaluator.cluster,
        known=known,
        budget=budget.part(times),
        seed=seed,
    )
    rows = run_methods(evaluator, request, Session(clock=time.process_time), without=without)
    best, evaluations = best_row(rows), sum(row.num_evaluations for row in rows)
    return {"step_time_s": best.step_time_s, "method": best.method, "evaluations": evaluations}


def main() -> None:
    """Make the table."""
    parser = board_parser(__doc__, ARMS)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    asked = parser.parse_args()
    known = default_methods(asked.policy)
    blind = known.having(AgentSearch(asked.policy, lead=lambda: None))
    arms = {method.name: partial(judged, method) for method in known} | {
        "blind": partial(auto, blind, (), 1.0),
        "with": partial(auto, known, (), 1.0),
        "without": partial(auto, known, LEARNED, 1.0),
        "without_5x": partial(auto, known, LEARNED, 5.0),
        "without_grid": partial(auto, known, (*LEARNED, "megatron_grid"), 1.0),
    }
    run_board(asked, arms)


if __name__ == "__main__":
    run(main)
