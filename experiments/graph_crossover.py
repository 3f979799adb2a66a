"""When is a full-batch graph network better cut by rows of nodes than by features?

    python experiments/graph_crossover.py --json

A graph convolution of two layers on generated graphs of 8,192 nodes, from graphs whose edges stay
in communities to graphs whose edges lead anywhere, on three hosts with one GPU each. By rows, a
node's features travel to each part that reads them: 2 V (H + C) elements a step, where V counts
the rows that travel for one product (``rows_received``), H and C are features of the layers. By
features, parts of the scores are added up: an all-reduce of N C. Times are the referee's. Vertex
cuts, as DistGNN makes them, are counted beside them: 2 sum (clones - 1) rows for each product.
"""

import json
from pathlib import Path

import numpy as np
from rows import finish, script_parser
from torch import nn
from vertex_cut import libra

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.op_rule import OpRules
from heterog.graph.sparse_pattern import entry_shares, rows_received
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.methods.data_parallel import device_speeds, uniform_strategy
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_in_proportion
from heterog.strategy.graph_split import feature_rules, row_rules
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy, Sync
from heterog.zoo.graphs import Edges, GraphConvolutions, full_batch, skewed_graph

NUM_NODES, MEAN_DEGREE, COMMUNITY = 8192, 16.0, 128
OUTSIDE = (0.0, 0.002, 0.01, 0.05, 0.3, 1.0)
"""Part of the edges that lead out of a node's community."""
WIDTHS = ((256, 128, 16), (256, 128, 64), (256, 128, 128))
GPUS = ("V100-16GB", "V100-16GB", "T4")
NIC_GBIT_PER_S = 25


def cluster_of(gbit_per_s: float) -> Cluster:
    """Three hosts with one GPU each."""
    text = "schema_version: 1\nname: three\nefficiency: 1.0\nhosts:\n"
    for number, gpu in enumerate(GPUS):
        text += (
            f"  - {{name: h{number}, devices: [{{type: {gpu}, count: 1}}], "
            f"intra: pcie3, nic: {{line_rate: {gbit_per_s} Gbit/s}}}}\n"
        )
    return parse_cluster(text, Path("three.yaml"))


def graph_on(edges: Edges, widths: tuple[int, ...]) -> OpGraph:
    """The step of a graph convolution on some edges."""

    def network(_: Edges, layers: tuple[int, ...]) -> nn.Module:
        return GraphConvolutions(edges, layers)

    return capture(full_batch("gcn", network, num_nodes=edges.num_nodes, widths=widths))


def strategy_of(evaluator: Evaluator, rules: OpRules, parts: tuple[int, ...]) -> Strategy:
    """All devices as one team that shares out the units of rules."""
    devices = tuple(range(len(parts)))
    decision = Decision(
        devices=devices, shares=(1, *(0,) * (len(parts) - 1)), teams=(devices,), parts=parts,
        sync=Sync.RING,
    )  # fmt: skip
    whole = uniform_strategy(
        evaluator, decision, bucket_bytes=DEFAULT_BUCKET_BYTES, step_barrier=True
    )
    return Strategy(
        graph=whole.graph, cluster=whole.cluster, decisions=whole.decisions, homes=whole.homes,
        op_rules=rules,
    )  # fmt: skip


def alone(evaluator: Evaluator, device: int) -> Strategy:
    """Everything on one device."""
    decision = Decision(devices=(device,), shares=(1,))
    return uniform_strategy(
        evaluator, decision, bucket_bytes=DEFAULT_BUCKET_BYTES, step_barrier=True
    )


def row(outside: float, widths: tuple[int, int, int], cluster: Cluster) -> dict[str, object]:
    """Volumes and times of one graph."""
    edges = skewed_graph(NUM_NODES, MEAN_DEGREE, community=COMMUNITY, outside=outside)
    graph = graph_on(edges, widths)
    evaluator = Evaluator(graph, cluster)
    (pattern,) = graph.patterns
    speeds = device_speeds(evaluator)
    by_rows, by_features = row_rules(graph, NUM_NODES), feature_rules(graph, widths[1])
    even = split_in_proportion(NUM_NODES, speeds)
    by_entries = entry_shares(pattern, speeds, NUM_NODES)
    strategies = {
        "alone": alone(evaluator, max(range(len(speeds)), key=speeds.__getitem__)),
        "rows": strategy_of(evaluator, by_rows, even),
        "entries": strategy_of(evaluator, by_rows, by_entries),
        "features": strategy_of(evaluator, by_features, split_in_proportion(widths[1], speeds)),
    }
    received = sum(map(sum, rows_received(pattern, by_entries, by_entries)))
    program = lower(graph, cluster, strategies["entries"])
    sent = float(program.num_bytes[program.kind == TaskKind.SEND].sum())
    assert sent == 2 * received * (widths[1] + widths[2]) * 4, "the formula of the volume"
    pairs = [
        (one, other)
        for one, other in zip(edges.sources.tolist(), edges.targets.tolist(), strict=True)
        if one < other
    ]
    order = np.random.default_rng(0).permutation(len(pairs))
    cut = libra([pairs[i] for i in order], NUM_NODES, len(GPUS))
    return {
        "outside": outside,
        "widths": widths,
        "entries": pattern.num_entries,
        "connectivity": received / NUM_NODES,
        "vertex_cut_connectivity": cut.rows_sent / NUM_NODES,
        "rows_sent_bytes": sent,
        "features_reduced_bytes": 2.0 * (len(GPUS) - 1) * NUM_NODES * widths[2] * 4,
        "ms": {
            name: 1e3 * evaluator.evaluate(each, Order.FIFO).step_time_s
            for name, each in strategies.items()
        },
    }


def main() -> None:
    """Measure all graphs."""
    parser = script_parser(__doc__)
    parser.add_argument("--gbit", type=float, default=NIC_GBIT_PER_S, help="of each host's NIC")
    arguments = parser.parse_args()
    cluster = cluster_of(arguments.gbit)
    rows = [row(outside, widths, cluster) for widths in WIDTHS for outside in OUTSIDE]
    finish(arguments, rows, map(json.dumps, rows))


if __name__ == "__main__":
    main()
