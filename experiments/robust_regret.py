"""What ``plan --robust`` loses and gains where speeds are not as predicted.

    python experiments/robust_regret.py --models mobilenet_v2,transformer_6l --seeds 3 --json

For each model, cluster and seed, methods search as for ``plan``. The fastest row and the robust
one are then replayed, with all rows whose intervals overlap that of the fastest, in draws of
speeds that the choice has not seen, from the same intervals. Regret is what a row takes longer
than the shortest in the same draw. Its mean is given with that of the difference, and the 80 %
interval of the latter over draws (bootstrap); ``cost`` is what the robust row takes longer as
predicted.
"""

from typing import Any

import numpy as np
from rows import asked_of, finish, option, progress

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, MethodRow, by_time
from heterog.pricing.intervals import draw_noise
from heterog.search.judging import NUM_DRAWS
from heterog.search.portfolio import best_row, run_methods, with_noise
from heterog.search.request import Request
from heterog.search.stability import robust_rank
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

_UNSEEN_SEED = 1
_RESAMPLED = 1000


def unseen_s(evaluator: Evaluator, row: MethodRow, num_draws: int) -> Any:
    """Seconds of a row's step in draws that no choice has seen.  # [num_draws]"""
    assert row.candidate is not None
    noise = draw_noise(evaluator.cluster, num_draws, evaluator.spreads, seed=_UNSEEN_SEED)
    order = Order[row.order.upper()]
    return evaluator.seconds_under_noise(evaluator.encode(row.candidate.strategy), order, noise)


def compared(
    graph: OpGraph, cluster: Cluster, seed: int, budget: str, draws: int
) -> dict[str, Any]:
    """The row of one model, cluster and seed."""
    evaluator = Evaluator(graph, cluster)
    request = Request(
        graph=graph,
        cluster=cluster,
        known=default_methods(),
        budget=Budget.parse(budget),
        seed=seed,
    )
    rows = with_noise(evaluator, run_methods(evaluator, request), rivals=True)
    rivals = [row for row in rows if row.noisy_step_times_s]
    fastest, robust = best_row(rivals), best_row(rivals, robust_rank(rivals, by_time))
    seconds = {row.method: unseen_s(evaluator, row, draws) for row in rivals}
    least = np.min(list(seconds.values()), axis=0)
    regret = {name: seconds[name] / least - 1.0 for name in (fastest.method, robust.method)}
    saved = regret[fastest.method] - regret[robust.method]
    drawn = np.random.default_rng(seed).integers(0, draws, (_RESAMPLED, draws))
    low, high = np.quantile(saved[drawn].mean(axis=1), (0.1, 0.9))
    assert fastest.step_time_s is not None
    assert robust.step_time_s is not None
    return {
        "model": graph.name, "cluster": cluster.name, "seed": seed, "rivals": len(rivals),
        "fastest": fastest.method, "robust": robust.method,
        "cost": robust.step_time_s / fastest.step_time_s - 1.0,
        "regret_fastest": float(regret[fastest.method].mean()),
        "regret_robust": float(regret[robust.method].mean()),
        "p90_fastest": float(np.quantile(regret[fastest.method], 0.9)),
        "p90_robust": float(np.quantile(regret[robust.method], 0.9)),
        "saved": float(saved.mean()), "saved_low": float(low), "saved_high": float(high),
        "draws": draws, "draws_seen": NUM_DRAWS,
    }  # fmt: skip


def main() -> None:
    """Compare on every model, cluster and seed."""
    asked = asked_of(
        __doc__,
        option("--models", default="mobilenet_v2,vgg19,transformer_6l,bert_base"),
        option("--clusters", default="paper_8gpu,rtx_mixed,a100_v100_16"),
        option("--seeds", type=int, default=3),
        option("--budget", default="600e"),
        option("--draws", type=int, default=200),
    )
    rows = []
    for model in asked.models.split(","):
        graph = capture(build(model))
        for name in asked.clusters.split(","):
            for seed in range(asked.seeds):
                cluster = Cluster.load(name)
                rows.append(compared(graph, cluster, seed, asked.budget, asked.draws))
                progress(rows[-1])
    lines = [
        f"{row['model']:16} {row['cluster']:14} {row['seed']} {row['fastest']:14} "
        f"{row['regret_fastest']:6.2%} {row['robust']:14} {row['regret_robust']:6.2%} "
        f"saved {row['saved']:6.2%} ({row['saved_low']:.2%} to {row['saved_high']:.2%})"
        for row in rows
    ]
    finish(asked, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
