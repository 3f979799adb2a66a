"""Unlike strategies for three unequal devices, for any graph."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from testbeds import plan_of

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.graph.batch_plan import batch_plan, norms_of_lone_values, ops_of_the_whole_batch
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.sharding_rules import Special
from heterog.methods.model_parallel import balanced_chain
from heterog.methods.planner import Budget
from heterog.search.plan import Plan, make_plan
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.layer_shardings import layer_shardings
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

ALL = (0, 1, 2)
NUM_RANKS = len(ALL)
SEARCH = "60e"
"""Budget of the plan that is searched: enough for every method to answer."""
METHODS = ("cp_ar", "tuned_uniform", "pipeline", "poplar", "local_search")
"""Methods that search it: those that are quick on thousands of small ops."""
# So slow that sharing models of a few thousand weights out is worth its while.
_CLUSTER = "schema_version: 1\nname: three_kinds\nhosts:" + "".join(
    f"""
  - name: {name}
    devices:
      - type: {{name: kind_{name}, peak_flops: {{float32: {rate} MFLOP/s}}, memory: 8 GiB,
               memory_bandwidth: {rate} MB/s, launch_overhead: 1 us}}
    nic: {{line_rate: {network} Gbit/s, latency: 1 us}}"""
    for name, rate, network in (("a", 50, 10), ("b", 30, 10), ("c", 20, 1))
)


@cache
def cluster() -> Cluster:
    """Three machines with one device each, of three speeds."""
    return parse_cluster(_CLUSTER, Path("three_kinds.yaml"))


def shares_of(graph: OpGraph, *weights: int) -> tuple[int, ...]:
    """Samples in proportion to weights; the first device takes what rounding leaves.

    Where torch would refuse to train a BatchNorm on one sample, no device has one alone.
    """
    if len(weights) == NUM_RANKS and norms_of_lone_values(graph):
        weights = (2, 1, 1)
    rest = [graph.batch_size * weight // sum(weights) for weight in weights[1:]]
    return graph.batch_size - sum(rest), *rest


def makers(graph: OpGraph, *, searches: bool) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """What makes these plans, each of which may be refused."""
    for name, make in (
        ("parameter_servers", _servers),
        ("pipeline", _pipeline),
        ("zero3", _zero),
        ("op_rules", _rules),
    ):
        strategy = make(graph)
        if strategy is not None:
            yield name, partial(_plan_of, graph, strategy)
    if searches:
        request = Request(
            graph=graph, cluster=cluster(), methods=METHODS, budget=Budget.parse(SEARCH)
        )
        yield "searched", partial(make_plan, request)


def _plan_of(graph: OpGraph, strategy: Strategy) -> Plan:
    return plan_of(Evaluator(graph, cluster()), strategy)


def _strategy(graph: OpGraph, decisions: list[Decision], homes: tuple[int, ...] = ()) -> Strategy:
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster().fingerprint,
        decisions=tuple(decisions),
        homes=homes or (REPLICATED,) * len(graph.updates),
    )


def _servers(graph: OpGraph) -> Strategy:
    """Uneven shares; parameters live on all devices in turn; no barrier between steps."""
    decision = Decision(devices=ALL, shares=shares_of(graph, 4, 3, 1), sync=Sync.PARAMETER_SERVER)
    homes = tuple(index % NUM_RANKS for index in range(len(graph.updates)))
    made = _strategy(graph, [decision] * group_ops(graph).num_groups, homes)
    return replace(made, step_barrier=False)


def _pipeline(graph: OpGraph) -> Strategy:
    """The first half on one device, the second on two, with two micro-batches.

    With BatchNorm every stage is on one device: all layers then see the same local groups, so the
    plan can be compared with steps on one device.
    """
    groups = group_ops(graph)
    work = np.zeros(groups.num_groups)
    for op, group in zip(graph.ops, groups.group, strict=True):
        if group >= 0:
            work[group] += op.flops + op.bytes_read
    whole = (graph.batch_size,)
    stages = [
        Decision(devices=(0,), shares=whole),
        Decision(devices=(1, 2), shares=shares_of(graph, 5, 3), sync=Sync.RING),
    ]
    if Special.LOCAL_STATISTICS in batch_plan(graph).specials:
        stages = [Decision(devices=(device,), shares=whole) for device in ALL]
    none = np.zeros((groups.num_groups, len(stages)))
    seconds = np.repeat(work[:, None], len(stages), axis=1)
    placed = balanced_chain(seconds, none, np.ones(len(stages)))
    if len(set(placed)) < 2:
        placed[-1] = 1
    in_one_go = _strategy(graph, [stages[stage] for stage in placed])
    if ops_of_the_whole_batch(graph):
        return in_one_go  # these would see a micro-batch only
    return replace(in_one_go, micro_batches=(split_evenly(graph.batch_size, 2), (0, 0), (0, 0)))


def _zero(graph: OpGraph) -> Strategy:
    """Parameters, gradients and optimizer state in uneven slices, and buckets."""
    decision = Decision(
        devices=ALL, shares=shares_of(graph, 5, 2, 1), sync=Sync.ZERO3, slices=(1, 5, 2)
    )
    return replace(_strategy(graph, [decision] * group_ops(graph).num_groups), bucket_bytes=4096)


def _rules(graph: OpGraph) -> Strategy | None:
    """Every layer split by columns, rows, heads or experts where the graph allows it."""
    decision = Decision(devices=ALL, shares=shares_of(graph, 2, 1, 1), sync=Sync.RING)
    made = _strategy(graph, [decision] * group_ops(graph).num_groups)
    places = [rules for places in layer_shardings(graph) for rules in places]
    rules = {op: rule for part in reversed(places) for op, rule in part}  # an op's first rule
    return replace(made, op_rules=tuple(sorted(rules.items()))) if places else None
