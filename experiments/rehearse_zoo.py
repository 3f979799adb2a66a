"""Every method on every model of the zoo: can ranks execute what it proposes?

    python experiments/rehearse_zoo.py [--models vit_base,gpt2] [--cluster paper_8gpu] [--json]

Each method searches with a small budget; its strategy is then played through on all ranks without
data (``heterog.runtime.measure.rehearsal``). ``rows``: model, method, outcome, reason, num_tasks
and rehearsal_cpu_s, the seconds of CPU that one rehearsal takes (0 where another method's strategy
was the same), beside capture_cpu_s, those that the model's capture took in the same run.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rows import finish, option, progress, script_parser

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture_step
from heterog.methods.planner import Budget
from heterog.runtime.measure.rehearsal import rehearsal_of
from heterog.search.compare import compare_methods
from heterog.search.issue_order import IssuedStep
from heterog.search.request import Request
from heterog.strategy.strategy import Strategy
from heterog.zoo import load_workload, names


def rows_of(model: str, cluster: Cluster, budget: Budget) -> list[dict[str, Any]]:
    """What every method's strategy for a model comes to."""
    begin = time.process_time()
    captured = capture_step(load_workload(model))
    capture_s = time.process_time() - begin
    ask = rehearsal_of(captured)
    took: dict[Strategy, tuple[int, float]] = {}

    def timed(strategy: Strategy, issued: IssuedStep, check: Callable[[], None]) -> str:
        begin = time.process_time()
        why = ask(strategy, issued, check)
        took[strategy] = issued.program.num_tasks, time.process_time() - begin
        return why

    methods = default_methods()
    found = compare_methods(
        Request(
            graph=captured.graph,
            cluster=cluster,
            methods=methods.names,
            known=methods,
            budget=budget,
        )
    ).rehearsed(timed)
    rows = []
    for row in found.rows:
        known = row.candidate is not None and row.candidate.strategy in took
        num_tasks, seconds = (
            took.pop(row.candidate.strategy) if known and row.candidate else (0, 0.0)
        )
        rows.append(
            {
                "model": model,
                "method": row.method,
                "outcome": row.outcome,
                "is_rehearsed": row.is_rehearsed,
                "reason": row.shortage,
                "num_tasks": num_tasks,
                "rehearsal_cpu_s": round(seconds, 3),
                "capture_cpu_s": round(capture_s, 3),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse and print."""
    parser = script_parser(
        __doc__,
        option("--models", default=",".join(names())),
        option("--cluster", default="paper_8gpu"),
        option("--budget", default="60e"),
    )
    options = parser.parse_args(arguments)

    cluster, budget = Cluster.load(options.cluster), Budget.parse(options.budget)
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        found = rows_of(model, cluster, budget)
        rows += found
        outcomes = Counter(row["outcome"] for row in found if row["is_rehearsed"])
        most = max(row["rehearsal_cpu_s"] for row in found)
        progress(f"{model}: rehearsed {dict(outcomes)}, at most {most} s")
    finish(
        options, {"rows": rows}, ("  ".join(str(value) for value in row.values()) for row in rows)
    )


if __name__ == "__main__":
    main()
