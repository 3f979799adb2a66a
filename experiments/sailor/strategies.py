"""Plans for OPT-350M as strategies of heterog, on a cluster of nodes with four GPUs.

Choices that Sailor's rules leave open are made here: teams are placed in nodes in the order of the
plan, the largest first; the NIC of a node has the rate that Sailor measured between two nodes of
its kind with all four GPUs sending, as one rate that all flows share.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from published.hosts import in_tf32
from published.runs import SAILOR_CARDS

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.strategy.division import split_evenly
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.pipelines import Pipeline, strategy_of_pipelines
from heterog.strategy.layouts.stages import layers_of, stages_by_counts
from heterog.strategy.strategy import Strategy
from sailor.columns import NODE_GPUS
from sailor.inputs import Inputs, Plan, seconds_of

PROBE_BYTES = 64e6
"""Size of the message whose rate a NIC has: the largest of Sailor's rates that do not depend on
buckets."""


def cluster_of(inputs: Inputs, num_gpus: Mapping[str, int]) -> Cluster:
    """A cluster of nodes with as many GPUs as links were measured for.

    Products in float32 run at the rate that Sailor's profiles show: that of TF32.

    Raises:
        StrategyError: GPUs of a card do not fill their nodes.
    """
    hosts: list[str] = []
    for card, count in sorted(num_gpus.items()):
        node = NODE_GPUS[card]
        if count % node:
            raise StrategyError(
                f"{count} {card} do not fill nodes of {node}; give a multiple of {node}."
            )
        name, intra, _ = SAILOR_CARDS[card]
        link = inputs.link((card, node), (card, node))
        rate = PROBE_BYTES / seconds_of(link, PROBE_BYTES)
        hosts.append(
            f"  - {{name: {name[0]}{len(hosts)}, count: {count // node}, "
            f"devices: [{{type: {name}, count: {node}}}], intra: {intra}, "
            f"nic: {{line_rate: {rate * 8e-9:.1f} Gbit/s, latency: 20 us}}}}\n"
        )
    head = "schema_version: 1\nname: sailor\nefficiency: 1.0\nexecution: megatron\nhosts:\n"
    cluster = parse_cluster(head + "".join(hosts), Path("sailor.yaml"))
    return replace(cluster, devices=tuple(map(in_tf32, cluster.devices)))


def strategy_of(plan: Plan, graph: OpGraph, cluster: Cluster) -> Strategy:
    """A plan as a strategy: one pipeline, whose rounds have samples for all replicas."""
    layers = layers_of(graph)
    # The first and the last of Sailor's layers are the embedding and the head.
    last = plan.stages[-1].end_layer - 1
    counts = [min(stage.end_layer, last) - max(stage.first_layer, 1) for stage in plan.stages]
    pipeline = Pipeline(
        stages=stages_by_counts(layers, counts),
        teams=tuple(map(tuple, _placed(plan, cluster))),
        # Rounds of like sizes: in a small last one, some replicas would have no sample.
        micro_batches=tuple(split_evenly(plan.batch, plan.num_micro)),
    )
    return strategy_of_pipelines(graph, cluster, [pipeline], Layout())


def _placed(plan: Plan, cluster: Cluster) -> list[list[tuple[int, ...]]]:
    """Devices of each replica of each stage.

    Raises:
        StrategyError: no node has room for a team.
    """
    nodes_of = list(map(list, cluster.host_devices))
    free = grouped((cluster.devices[members[0]].type.name, members) for members in nodes_of)
    found: list[list[tuple[int, ...]]] = [[()] * len(stage.replicas) for stage in plan.stages]
    places = [
        (replica, index, column)
        for index, stage in enumerate(plan.stages)
        for column, replica in enumerate(stage.replicas)
    ]
    for replica, index, column in sorted(places, key=lambda place: -place[0].tensor):
        nodes = free.get(SAILOR_CARDS[replica.card][0], [])
        node = next((each for each in nodes if len(each) >= replica.tensor), None)
        if node is None:
            raise StrategyError(
                f"no node has {replica.tensor} free {replica.card}; use smaller teams."
            )
        found[index][column] = tuple(node[: replica.tensor])
        del node[: replica.tensor]
    return found
