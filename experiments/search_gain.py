"""How does a search's gain depend on the network, and what happens when memory is short?

    python experiments/search_gain.py efficiency --json   # 0.2 to 1.0 of the NICs' line rate
    python experiments/search_gain.py large --json        # the large settings of HeteroG, table 1

Rows of every method on ``paper_8gpu``, by the referee, as ``heterog compare`` prints them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rows import finish, progress, script_parser

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget
from heterog.search.compare import compare_methods

# Registers ``agent`` and ``agent+search``, which ``auto`` asks, too.
from heterog.search.request import Request
from heterog.zoo import build

CLUSTER = "paper_8gpu"
MODELS = (
    "vgg19,resnet200,inception_v3,mobilenet_v2,nasnet_large,transformer_6l,bert_large_24l,"
    "xlnet_large_24l"
)
EFFICIENCIES = (0.2, 0.35, 0.5, 0.7, 1.0)
LARGE = (
    ("resnet200", 384),
    ("transformer_24l", 120),
    ("bert_large_24l", 96),
    ("xlnet_large_24l", 96),
    ("bert_large_48l", 24),
    ("xlnet_large_48l", 24),
)


def by_efficiency(models: str) -> Iterator[tuple[OpGraph, Cluster]]:
    """Every model on networks that reach more or less of their line rate."""
    for model in models.split(","):
        graph = capture(build(model))
        for efficiency in EFFICIENCIES:
            yield graph, replace(Cluster.load(CLUSTER), efficiency=efficiency)


def large() -> Iterator[tuple[OpGraph, Cluster]]:
    """Models and batches that plain data parallelism cannot hold."""
    for model, batch_size in LARGE:
        yield capture(build(model, batch_size)), Cluster.load(CLUSTER)


def main() -> None:
    """Compare on every pair."""
    parser = script_parser(__doc__)
    parser.add_argument("question", choices=("efficiency", "large"))
    parser.add_argument("--models", default=MODELS, help="for efficiency")
    parser.add_argument("--methods", default="auto")
    parser.add_argument("--budget", default="3000e")
    arguments = parser.parse_args()
    pairs = by_efficiency(arguments.models) if arguments.question == "efficiency" else large()
    rows: list[dict[str, Any]] = []
    for graph, cluster in pairs:
        result = compare_methods(
            Request(
                graph=graph,
                cluster=cluster,
                methods=tuple(arguments.methods.split(",")),
                known=default_methods(),
                budget=Budget.parse(arguments.budget),
            )
        )
        rows += [row | {"efficiency": cluster.efficiency} for row in result.to_dicts()]
        last = rows[-1]
        shown = last["step_time_s"] and f"{last['step_time_s']:.4f} s"
        progress(
            f"{graph.name} batch {graph.batch_size} efficiency {cluster.efficiency}: "
            f"{last['method']} ({last['picked_from']}) {last['outcome']} {shown}"
        )
    finish(arguments, {"budget": arguments.budget, "rows": rows})


if __name__ == "__main__":
    main()
