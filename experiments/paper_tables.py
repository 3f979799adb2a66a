"""How do our simulated steps compare with tables 1, 4, 6 and 7 of the HeteroG paper (CoNEXT'20)?

    python experiments/paper_tables.py --budget 300s -o rows.jsonl
    python experiments/paper_tables.py -o rows.jsonl --summary --paper paper_tables.json

The paper measured real machines; we simulate the same methods on its clusters, the one of 8 GPUs
once at 0.7 of the NIC's line rate and once at 0.35, which is close to what its network must have
delivered. Tables 1 and 4 are seconds per step, with the time to find our strategy; 6 is the time
to find one, the policy's answer beside the paper's training on an unseen graph; 7 is the order:
our strategy in its own order and in FIFO. In brackets the paper's numbers.

A row is appended to the file when it is there, and one that is there is not made again.
"""

import json
from pathlib import Path
from typing import Any

from rows import keep_row, progress, read_rows, script_parser, teller

from heterog.agents.planners import default_methods
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget
from heterog.methods.registry import AUTO, Methods
from heterog.search.portfolio import best_row, run_methods
from heterog.search.request import Request, Session
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import lower_bound_s

# Our model and the paper's row for it, in tables 1, 4 and 7, and in table 6.
MODELS = {
    "vgg19": ("VGG-19", "VGG-19"),
    "resnet200": ("ResNet200", "ResNet200"),
    "inception_v3": ("Inception_v3", "Inception_v3"),
    "mobilenet_v2": ("MobileNet_v2", "MobileNet_v2"),
    "nasnet_large": ("NasNet", "NasNet"),
    "transformer_6l": ("Transformer (6 layers)", "Transformer"),
    "bert_large_24l": ("Bert-large (24 layers)", "Bert-large"),
    "xlnet_large_24l": ("XlNet-large (24 layers)", "Xlnet-large"),
}
LARGE = "paper_12gpu"
CLUSTERS = ("paper_8gpu_net035", "paper_8gpu", LARGE)
BASELINES = {"ev_ps": "EV-PS", "ev_ar": "EV-AR", "cp_ps": "CP-PS", "cp_ar": "CP-AR"}


def graph_of(model: str, cluster: str, folder: Path | None) -> OpGraph:
    """Captured at the paper's batch: half as much again on 12 GPUs."""
    graph = captured(model, folder)
    return graph if cluster != LARGE else captured(model, folder, graph.batch_size * 3 // 2)


def measure(
    graph: OpGraph, cluster: Cluster, known: Methods, budget: Budget, seed: int
) -> dict[str, Any]:
    """The row of one model on one cluster."""
    evaluator = Evaluator(graph, cluster)
    rows = run_methods(
        evaluator,
        Request(
            graph=evaluator.graph,
            cluster=evaluator.cluster,
            methods=(AUTO,),
            known=known,
            budget=budget,
            seed=seed,
        ),
        Session(progress=teller()),
    )
    best = best_row(rows)
    by_name = {row.method: row for row in rows}
    fifo = None
    if best.candidate is not None:
        choice = evaluator.encode(best.candidate.strategy)
        found = evaluator.referee(choice, Order.FIFO)
        fifo = found.step_time_s if found.is_ok else None
    return {
        "model": graph.name,
        "batch_size": graph.batch_size,
        "cluster": cluster.name,
        "budget": str(budget),
        "seed": seed,
        "step_time_s": {name: by_name[name].step_time_s for name in (*BASELINES, "agent")}
        | {AUTO: best.step_time_s},
        "picked_from": best.method,
        "found_after_s": sum(row.search_seconds for row in rows),
        "num_evaluations": sum(row.num_evaluations for row in rows),
        "agent_answer_s": by_name["agent"].search_seconds,
        "fifo_s": fifo,
        "order": best.order,
        "lower_bound_s": lower_bound_s(graph, cluster, evaluator.cost_model).seconds,
    }


def beside(ours: float | None, theirs: float | None, digits: int = 3) -> str:
    """Our number, and the paper's in brackets."""
    text = "OOM" if ours is None else f"{ours:.{digits}f}"
    return text if theirs is None else f"{text} ({theirs:.{digits}f})"


def print_table(cluster: str, rows: list[dict[str, Any]], paper: dict[str, Any]) -> None:
    """Tables 1 or 4, 6 and 7 of one cluster."""
    seconds = paper.get("table4_12gpu_s" if cluster == LARGE else "table1_8gpu_s", [])
    names = (*BASELINES, "agent", AUTO)
    print(f"\n### {cluster}, seconds per step (table {4 if cluster == LARGE else 1})\n")
    print("| model | " + " | ".join(names) + " | found after s | picked from | bound |")
    print("|---" * (len(names) + 4) + "|")
    for row in rows:
        theirs: dict[str, Any] = next(
            (each for each in seconds if each["model"].lower() == name_in_paper(row)), {}
        )
        columns = BASELINES | {AUTO: "HeteroG"}
        cells = [
            beside(row["step_time_s"][name], theirs.get(columns.get(name, ""))) for name in names
        ]
        print(
            f"| {row['model']} | {' | '.join(cells)} | {row['found_after_s']:.0f} | "
            f"{row['picked_from']} | {row['lower_bound_s']:.3f} |"
        )
    print(f"\n### {cluster}, time to find a strategy (table 6)\n")
    print("| model | agent answers after s | agent over auto | auto s | paper: pre-trained min |")
    print("|---|---|---|---|---|")
    for row in rows:
        minutes = paper.get("table6_gnn_training_minutes", {}).get(MODELS[row["model"]][1], {})
        size = "12" if cluster == LARGE else "8"
        trained, scratch = minutes.get(f"pretrained_{size}"), minutes.get(f"scratch_{size}")
        said = "" if trained is None else f"{trained} (from scratch {scratch})"
        agent, auto = row["step_time_s"]["agent"], row["step_time_s"][AUTO]
        over = "OOM" if agent is None or auto is None else f"{agent / auto:.3f}"
        print(
            f"| {row['model']} | {row['agent_answer_s']:.2f} | {over} | "
            f"{row['found_after_s']:.0f} | {said} |"
        )
    if cluster == LARGE:
        return
    orders = {name.lower(): row for name, row in paper.get("table7_order_s", {}).items()}
    print(f"\n### {cluster}, order (table 7)\n")
    print("| model | our order | FIFO | faster by % |")
    print("|---|---|---|---|")
    for row in rows:
        theirs = orders.get(name_in_paper(row), {})
        auto, fifo = row["step_time_s"][AUTO], row["fifo_s"]
        gain = None if auto is None or fifo is None else 100.0 * (fifo / auto - 1.0)
        print(
            f"| {row['model']} | {beside(auto, theirs.get('HeteroG_order'))} | "
            f"{beside(fifo, theirs.get('FIFO'))} | "
            f"{beside(gain, theirs.get('recomputed_pct'), 1)} |"
        )


def name_in_paper(row: dict[str, Any]) -> str:
    """The paper's name of a row's model; it is not of one mind about capital letters."""
    return MODELS[row["model"]][0].lower()


def main() -> None:
    """Measure what is not in the file yet; print the tables, or JSON."""
    parser = script_parser(__doc__)
    parser.add_argument("--budget", default="20s", help="of auto, divided among its searches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--policy", default="heldout", help="that agent and agent+search ask")
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    parser.add_argument("--paper", type=Path, help="the paper's tables as JSON")
    parser.add_argument("-o", "--output", type=Path, help="JSON lines, added to")
    parser.add_argument("--summary", action="store_true", help="only print what the file holds")
    arguments = parser.parse_args()
    known = default_methods(arguments.policy)
    budget, clusters = Budget.parse(arguments.budget), arguments.clusters.split(",")
    rows = read_rows(arguments.output)
    done = {(row["model"], row["cluster"], row["budget"], row["seed"]) for row in rows}
    for model in [] if arguments.summary else arguments.models.split(","):
        for cluster in clusters:
            if (model, cluster, str(budget), arguments.seed) in done:
                continue
            progress(f"{model} on {cluster}")
            graph = graph_of(model, cluster, arguments.graphs)
            rows.append(measure(graph, Cluster.load(cluster), known, budget, arguments.seed))
            keep_row(arguments.output, rows[-1])
    if arguments.json:
        print(json.dumps({"policy": arguments.policy, "rows": rows}, indent=2))
        return
    paper = json.loads(arguments.paper.read_text()) if arguments.paper else {}
    for cluster in clusters:
        own = [row for row in rows if row["cluster"] == cluster]
        if own:
            print_table(cluster, own, paper)


if __name__ == "__main__":
    main()
