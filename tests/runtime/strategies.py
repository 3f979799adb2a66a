"""Strategies to run: by hand and at random, on three equal devices."""

from dataclasses import replace
from functools import cache
from random import Random

from heterog.cluster import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.search.plan import Plan
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.runtime.cases import BATCH, capture_case, workload_of
from tests.runtime.ranks import PARENT
from tests.simulator.builders import cluster_of, plan_by_hand, random_schedule

ALL = (0, 1, 2)
SYNCS = {
    "ring": Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.RING),
    "hierarchical": Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.HIERARCHICAL),
    "uneven slices": Decision(
        devices=ALL, shares=(5, 2, 1), sync=Sync.REDUCE_SCATTER_ALL_GATHER, slices=(1, 5, 2)
    ),
    "zero share": Decision(devices=ALL, shares=(5, 0, 3), sync=Sync.RING),
    "server": Decision(devices=ALL, shares=(4, 3, 1), sync=Sync.PARAMETER_SERVER),
    "one device": Decision(devices=(1,), shares=(8,)),
}
ZERO = {
    "zero1": Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.ZERO1, slices=(1, 5, 2)),
    "zero2": Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.ZERO2, slices=(1, 5, 2)),
    "zero3": Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.ZERO3, slices=(1, 5, 2)),
    "zero1, no slice": Decision(devices=ALL, shares=(5, 0, 3), sync=Sync.ZERO1, slices=(0, 1, 2)),
    "zero2, no slice": Decision(devices=ALL, shares=(5, 0, 3), sync=Sync.ZERO2, slices=(0, 1, 2)),
    "zero3, no slice": Decision(devices=ALL, shares=(5, 0, 3), sync=Sync.ZERO3, slices=(0, 1, 2)),
}


def cluster() -> Cluster:
    return cluster_of((1.0, ["T4"]), (1.0, ["T4"]), (1.0, ["T4"]))


@cache
def graph_of(name: str, optimizer: str = "SGD") -> OpGraph:
    if PARENT.is_running:
        return PARENT.capture(None, workload_of, name, optimizer)
    return capture_case(workload_of(name, optimizer)).graph


def plan_of(graph: OpGraph, strategy: Strategy) -> Plan:
    return plan_by_hand(graph, cluster(), strategy)


def strategy_of(
    graph: OpGraph,
    decisions: list[Decision],
    *,
    homes: tuple[int, ...] | None = None,
    bucket_bytes: int = 0,
    micro_batches: tuple[tuple[int, ...], ...] = (),
    step_barrier: bool = True,
) -> Strategy:
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster().fingerprint,
        decisions=tuple(decisions),
        homes=homes or (REPLICATED,) * len(graph.updates),
        bucket_bytes=bucket_bytes,
        micro_batches=micro_batches,
        step_barrier=step_barrier,
    )


def homes_of(graph: OpGraph, case: str) -> tuple[int, ...] | None:
    if SYNCS[case].sync != Sync.PARAMETER_SERVER:
        return None
    return tuple(index % 3 for index in range(len(graph.updates)))


def random_strategy(rng: Random, graph: OpGraph) -> Strategy:
    """Hybrid layouts, single devices, zero shares, servers, micro-batches, buckets, barriers."""
    pool = []
    for _ in range(rng.randint(1, 3)):
        devices = tuple(sorted(rng.sample(ALL, rng.randint(1, 3))))
        cuts = sorted(rng.randint(0, BATCH) for _ in devices[1:])
        shares = tuple(b - a for a, b in zip([0, *cuts], [*cuts, BATCH], strict=True))
        sync = rng.choice(list(Sync))
        slices: tuple[int, ...] = ()
        if sync.takes_slices:
            slices = (rng.randint(1, 4), *(rng.randint(0, 4) for _ in devices[1:]))
        recompute = rng.random() < 0.4
        pool.append(
            Decision(devices=devices, shares=shares, sync=sync, slices=slices, recompute=recompute)
        )
    grouping = group_ops(graph)
    decisions = [rng.choice(pool) for _ in range(grouping.num_groups)]
    homes = []
    for op, _, _ in graph.updates:
        decision = decisions[int(grouping.group[op])]
        served = decision.sync.is_served
        homes.append(rng.choice(ALL) if served else REPLICATED)
    micro: tuple[tuple[int, ...], ...] = ()
    if rng.random() < 0.4:
        count = rng.randint(2, 3)
        micro = (split_evenly(BATCH, count), (0,) * count, (0,) * count)
    strategy = strategy_of(
        graph,
        decisions,
        homes=tuple(homes),
        bucket_bytes=rng.choice([0, 300, 10**6]),
        micro_batches=micro,
        step_barrier=rng.random() < 0.5,
    )
    if not micro or rng.random() < 0.5:
        return strategy
    return replace(strategy, schedule=random_schedule(rng, strategy, len(ALL)))
