"""What plans of like cases bring a search that has few evaluations, and what they cost.

    python experiments/library_gain.py --solve 2000e --budget 60e

Each case is solved once and kept; then a case that is like it but not the same is planned with and
without the library, on the same budget and seed.
"""

import argparse
import tempfile
from pathlib import Path

from heterog.cluster import Cluster
from heterog.graph.capture import capture_step
from heterog.graph.op_graph import OpGraph
from heterog.planners.library.store import PlanLibrary
from heterog.planners.plan import make_plan
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import load_workload

METHODS = ("cp_ar", "tuned_uniform", "pipeline", "local_search")
CASES = (
    (("vgg19", 192, "paper_8gpu"), ("vgg19", 96, "paper_8gpu")),
    (("vgg19", 192, "paper_8gpu"), ("vgg19", 192, "paper_12gpu")),
    (("bert_base", 64, "poplar_v100_t4"), ("bert_base", 32, "poplar_v100_t4")),
    (("bert_base", 64, "poplar_v100_t4"), ("gpt2", 32, "poplar_v100_t4")),
)


def graph_of(model: str, batch: int) -> OpGraph:
    """A zoo model's step."""
    return capture_step(load_workload(model, batch)).graph


def main() -> None:
    """Print a row for each pair of cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solve", default="2000e")
    parser.add_argument("--budget", default="60e")
    asked = parser.parse_args()
    print("| solved | asked | without, ms | with, ms | gain | look-up, ms |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for solved, like in CASES:
        with tempfile.TemporaryDirectory() as folder:
            library = PlanLibrary(Path(folder))
            evaluator = Evaluator(graph_of(*solved[:2]), Cluster.load(solved[2]))
            plan = make_plan(
                evaluator.graph, evaluator.cluster, methods=METHODS, budget=asked.solve
            )
            library.keep(plan, evaluator)
            graph, cluster = graph_of(*like[:2]), Cluster.load(like[2])
            found = library.look_up(Evaluator(graph, cluster))
            without, with_it = (
                make_plan(graph, cluster, methods=METHODS, budget=asked.budget, seeds=seeds)
                for seeds in (None, found.seeds)
            )
            before_s, after_s = without.step_time_s or 0.0, with_it.step_time_s or 0.0
            cells = [f"{1e3 * before_s:.1f}", f"{1e3 * after_s:.1f}"]
            cells += [f"{before_s / after_s:.3f}x", f"{1e3 * found.seconds:.0f}"]
            names = [" ".join(map(str, case)) for case in (solved, like)]
            print(f"| {' | '.join([*names, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
