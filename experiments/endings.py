"""How long the ending of ``heterog plan`` takes after its search, beside what is kept back for it.

    python experiments/endings.py --json
    python experiments/endings.py --models vgg19 --methods pipeline --json

For strategies of unlike methods: seconds to rehearse the plan, to find its lower bound and
describe it, to write it and to explain it, and what ``heterog.planners.allotment`` expects from
the numbers of turns and of ops.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rows import finish, progress, script_parser

from heterog.cli.common import load_cluster, load_model, settled
from heterog.explain.explanation import explain
from heterog.planners.allotment import (
    EXPLANATION_S,
    REHEARSAL_OP_S,
    REHEARSAL_S,
    WRITING_OP_S,
)
from heterog.planners.issue_order import IssuedSteps, Rehearse
from heterog.planners.plan import Searched, plan_from_rows
from heterog.planners.planner import Budget, MethodRow
from heterog.planners.portfolio import run_methods
from heterog.planners.request import Request
from heterog.simulator.evaluator import Evaluator

MODELS = "vgg19,bert_large_24l,resnet200"
METHODS = "cp_ps,tuned_uniform,megatron_grid,model_parallel,pipeline"
EVALUATIONS = 60
_Result = TypeVar("_Result")


def timed(call: Callable[[], _Result]) -> tuple[_Result, float]:
    """A function's result, and the seconds that it takes."""
    begin_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin_s


def ending_of(evaluator: Evaluator, row: MethodRow, rehearse: Rehearse) -> dict[str, Any]:
    """Seconds of each part of an ending with the strategy of a row."""
    candidate = row.candidate
    assert candidate is not None
    issued = IssuedSteps(evaluator)
    step = issued.of(candidate)
    assert step is not None
    said, rehearsal_s = timed(lambda: rehearse(candidate.strategy, step, lambda: None))
    plan, described_s = timed(
        lambda: plan_from_rows(evaluator, [row], Searched(budget="5s"), issued=issued)
    )
    with tempfile.TemporaryDirectory() as folder:
        _, written_s = timed(lambda: plan.save(Path(folder) / "plan.json"))
    _, explained_s = timed(lambda: explain(plan, evaluator, changes=False))
    num_ops, turns = evaluator.graph.num_ops, issued.num_turns(candidate)
    return {
        "method": row.method,
        "ops": num_ops,
        "tasks": step.program.num_tasks,
        "turns": turns,
        "refused": said,
        "rehearsal_s": round(rehearsal_s, 2),
        "rehearsal_expected_s": round(turns * REHEARSAL_S + num_ops * REHEARSAL_OP_S, 2),
        "described_s": round(described_s, 2),
        "written_s": round(written_s, 2),
        "explained_s": round(explained_s, 2),
        "last_expected_s": round(turns * EXPLANATION_S + num_ops * WRITING_OP_S, 2),
    }


def main() -> None:
    """Print a row for each model and method."""
    parser = script_parser(__doc__)
    parser.add_argument("--models", default=MODELS, help="names, with commas")
    parser.add_argument("--methods", default=METHODS, help="names, with commas")
    parser.add_argument("--cluster", default="paper_8gpu")
    asked = parser.parse_args()
    rows = []
    for model in asked.models.split(","):
        progress(model)
        graph, rehearse = load_model(model, None)
        assert rehearse is not None
        evaluator = Evaluator(graph, load_cluster(asked.cluster))
        with settled():
            found = run_methods(
                evaluator,
                Request(
                    graph=evaluator.graph,
                    cluster=evaluator.cluster,
                    methods=tuple(asked.methods.split(",")),
                    budget=Budget(evaluations=EVALUATIONS),
                ),
            )
            rows += [
                {"model": model} | ending_of(evaluator, row, rehearse)
                for row in found
                if row.candidate is not None
            ]
    finish(
        asked,
        {"rows": rows},
        (" ".join(f"{key}={value}" for key, value in each.items()) for each in rows),
    )


if __name__ == "__main__":
    main()
