"""How long one evaluation takes: lowering, simulation and memory of a full training step.

    python benchmarks/evaluation_speed.py --json

Programs are operator-level, with step barrier, and kernels come from numba's cache on disk. One
thread; the median of many evaluations after a warm-up.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods.data_parallel import even_shares, uniform_strategy
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import balanced_homes
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy, Sync
from heterog.zoo import build

CASES = (
    ("bert_large_24l", "paper_8gpu", ("all_reduce", "ddp", "parameter_server")),
    ("bert_base", "hap_v100_p100", ("all_reduce", "ddp", "parameter_server")),
    ("resnet200", "paper_8gpu", ("all_reduce",)),
)


def strategies(evaluator: Evaluator) -> dict[str, Strategy]:
    """The programs that are timed."""
    devices = tuple(range(evaluator.cluster.num_devices))
    homes = balanced_homes(evaluator.tables.parameter_bytes, devices).tolist()
    decision = Decision(devices=devices, shares=even_shares(evaluator), sync=Sync.HIERARCHICAL)
    return {
        "all_reduce": uniform_strategy(evaluator, decision),
        "ddp": uniform_strategy(evaluator, decision, bucket_bytes=DEFAULT_BUCKET_BYTES),
        "parameter_server": uniform_strategy(
            evaluator, replace(decision, sync=Sync.PARAMETER_SERVER), homes=tuple(homes)
        ),
    }


def measure(num_evaluations: int) -> list[dict[str, object]]:
    """Time every case."""
    rows: list[dict[str, object]] = []
    for model, cluster, programs in CASES:
        evaluator = Evaluator(capture(build(model)), Cluster.load(cluster))
        for program in programs:
            choice = evaluator.encode(strategies(evaluator)[program])
            evaluator.evaluate(choice, Order.FIFO)
            seconds = []
            for _ in range(num_evaluations):
                begin = time.perf_counter()
                evaluator.evaluate(choice, Order.FIFO)
                seconds.append(time.perf_counter() - begin)
            median_s = statistics.median(seconds)
            num_tasks = evaluator.num_tasks
            rows.append(
                {
                    "model": model,
                    "cluster": cluster,
                    "program": program,
                    "num_tasks": num_tasks,
                    "median_ms_per_evaluation": median_s * 1e3,
                    "min_ms_per_evaluation": min(seconds) * 1e3,
                    "tasks_per_s": num_tasks / median_s,
                }
            )
    return rows


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--evaluations", type=int, default=100)
    arguments = parser.parse_args()
    rows = measure(arguments.evaluations)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    for row in rows:
        print(
            f"{row['model']:16} {row['cluster']:14} {row['program']:17} "
            f"{row['num_tasks']:7,} tasks {row['median_ms_per_evaluation']:8.2f} ms"
        )


if __name__ == "__main__":
    main()
