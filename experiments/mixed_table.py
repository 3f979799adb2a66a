"""A method beside the best uniform layout on the mixed clusters, each with the same seconds.

    python experiments/mixed_table.py --json
    python experiments/mixed_table.py --method islands --models bert_large_24l --budget 60s
    python experiments/mixed_table.py --against tuned_uniform

For every model and cluster both methods search on their own, and the referee judges what they
found. ``gain`` is the step of the other method over that of the method; the last line has the
geometric mean. ``auto`` is asked without the other method, so that nothing starts from its plans,
or with it (``--with-row``). ``--cpu-seconds`` counts budgets in seconds of this process, so that
other work on the machine does not shorten searches.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import asked_of, finish, geometric_mean, option, progress

import heterog.search.portfolio as portfolio
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import load_graph
from heterog.methods.planner import Budget, MethodRow, Problem
from heterog.methods.registry import AUTO, built_in_methods
from heterog.search.judging import run_method
from heterog.search.request import Request, Session
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

CLUSTERS = ("mixed_16", "mixed_32", "mixed_64", "mixed_128", "mixed_256", "two_sites_32")
MODELS = (
    *("vgg19", "resnet50", "inception_v3", "mobilenet_v2", "vit_base", "transformer_6l"),
    *("transformer_24l", "bert_large_24l", "xlnet_large_24l", "gpt2", "llama_1b", "bert_moe"),
)


def graph_of(model: str) -> OpGraph:
    """A zoo model, or a captured graph in a file."""
    if Path(model).suffix:
        return load_graph(Path(model))
    return capture(build(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How methods are asked.

    Attributes:
        budget: of each method on each case.
        pair: the other method, and the method.
        with_row: whether ``auto`` asks the other method, too.
        clock: seconds by which budgets are kept.
    """

    budget: Budget
    pair: tuple[str, str]
    with_row: bool
    clock: Callable[[], float]


def asked(method: str, setting: Setting, graph: OpGraph, cluster: Cluster) -> MethodRow:
    """What a method finds on its own; ``auto`` asks all methods, as a rule but the other one."""
    evaluator = Evaluator(graph, cluster)
    if method != AUTO:
        evaluator.warm_up()
        problem = Problem(evaluator=evaluator, budget=setting.budget, clock=setting.clock)
        return run_method(built_in_methods()[method], problem)
    without = () if setting.with_row else setting.pair[:1]
    rows = portfolio.run_methods(
        evaluator,
        Request(
            graph=evaluator.graph,
            cluster=evaluator.cluster,
            methods=(method,),
            budget=setting.budget,
        ),
        Session(clock=setting.clock),
        without=without,
    )
    able = [row for row in rows if row.candidate is not None]
    return min(able or rows, key=lambda row: row.preference)


def row_of(graph: OpGraph, cluster: Cluster, setting: Setting) -> dict[str, Any]:
    """Both methods on one case."""
    row: dict[str, Any] = {"model": graph.name, "cluster": cluster.name}
    seconds: list[float] = []
    for method in setting.pair:
        found = asked(method, setting, graph, cluster)
        row[method] = found.step_time_s
        row[f"{method}_by"] = found.method
        row[f"{method}_evaluations"] = found.num_evaluations
        row[f"{method}_note"] = found.note
        seconds += [] if found.step_time_s is None else [found.step_time_s]
    row["gain"] = seconds[0] / seconds[1] if len(seconds) == len(setting.pair) else None
    return row


def main() -> None:
    """Run the cases and print a table, or JSON."""
    options = asked_of(
        __doc__,
        option("--models", default=",".join(MODELS)),
        option("--clusters", default=",".join(CLUSTERS)),
        option("--method", default=AUTO),
        option("--against", default="megatron_grid"),
        option("--budget", default="20s", help="of each method on each case"),
        option("--with-row", action="store_true", help="auto asks the other one, too"),
        option("--cpu-seconds", action="store_true", help="budgets in this process's time"),
    )
    rows, pair = [], (options.against, options.method)
    setting = Setting(
        budget=Budget.parse(options.budget),
        pair=pair,
        with_row=options.with_row,
        clock=time.process_time if options.cpu_seconds else time.perf_counter,
    )
    for model in options.models.split(","):
        graph = graph_of(model)
        for cluster in options.clusters.split(","):
            row = row_of(graph, Cluster.load(cluster), setting)
            rows.append(row)
            progress(
                f"{row['model']} on {cluster}: {row[pair[0]]} by {pair[0]}, {row[pair[1]]} by "
                f"{row[f'{pair[1]}_by']}, gain {row['gain']} ({row[f'{pair[1]}_note']})"
            )
    gains = [row["gain"] for row in rows if row["gain"]]
    mean = geometric_mean(gains) if gains else None
    said = (
        f"geometric mean {mean:.3f} over {len(gains)}, {min(gains):.3f} to {max(gains):.3f}"
        if mean
        else ""
    )
    finish(options, {"rows": rows, "mean_gain": mean}, [said])


if __name__ == "__main__":
    main()
