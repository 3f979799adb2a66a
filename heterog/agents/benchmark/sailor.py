"""Sailor's closed form of a training step, a second referee for strategies that it can express.

Strati et al. (SOSP 2025), after the run-time simulator in its repository (eth-easl/sailor at
cf2c8e3). Stages have consecutive groups, each stage on its own devices; a replica of a stage is a
device; every round has the same samples. With the seconds ``c[i]`` of a stage's slowest replica
for a round, its sends and receives ``p[i]``, ``n`` rounds and the update ``u``::

    T = (n - 1) max (c[i] + p[i]) + sum p[i] + sum c[i] + u + max sync[i]

No send overlaps any computation. As in Sailor, the last stage pays for its gradients twice, and
the first of four or more stages pays for its activations twice. A stage's gradients go round a
ring without a closing edge: ``2 (D - 1) time(bytes / D)`` at the slowest pair of neighbours.

Unlike in Sailor, layers take the seconds of our cost model and links have the cluster's rates,
because Sailor's measurements are for one model. Shares may differ, and the slowest replica counts.
Values that cross two boundaries are passed on by the stage between. ``u`` is the update of a whole
stage, not of a layer. Memory is not checked.
"""

from collections.abc import Sequence
from itertools import pairwise
from operator import add

import numpy as np

from heterog.cluster import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.lowering.program import IntArray
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy
from heterog.strategy.sync import Aggregation

_DOUBLED_FROM = 4
"""Number of stages from which the first one pays for its activations twice."""


def sailor_s(evaluator: Evaluator, strategy: Strategy) -> float | None:
    """Seconds of a step by Sailor's rules; ``None`` if they cannot express the strategy."""
    stages = _stages(evaluator.graph, strategy)
    if stages is None:
        return None
    graph, cluster, rounds = evaluator.graph, evaluator.cluster, strategy.num_micro_batches
    decisions = [decision for decision, _ in stages]
    stage_of = _stage_of_ops(graph, [groups for _, groups in stages])
    compute, update = [0.0] * len(stages), [0.0] * len(stages)
    phase = np.array([op.phase for op in graph.ops])
    for stage, decision in enumerate(decisions):
        own = stage_of == stage
        for device, share in zip(decision.devices, decision.shares, strict=True):
            kind = cluster.devices[device].type
            seconds = evaluator.cost_model.op_seconds(graph, kind, share // rounds)
            is_update = phase == Phase.UPDATE
            if share:
                compute[stage] = max(compute[stage], float(seconds[own & ~is_update].sum()))
            update[stage] = max(update[stage], float(seconds[own & is_update].sum()))
    sends = _sends_s(graph, cluster, decisions, stage_of, rounds)
    sync = [_sync_s(graph, cluster, each, stage_of == i) for i, each in enumerate(decisions)]
    return pipeline_s(compute, sends, max(update), rounds) + max(sync)


def pipeline_s(
    compute: Sequence[float], sends: Sequence[float], update_s: float, rounds: int
) -> float:
    """The closed form without the synchronisation of gradients.

    Args:
        compute: Seconds of each stage's slowest replica for a round.
        sends: Seconds of each stage's sends and receives in a round.
        update_s: Seconds of the update.
        rounds: Number of rounds.
    """
    slowest = max(c + p for c, p in zip(compute, sends, strict=True))
    return (rounds - 1) * slowest + (sum(compute) + sum(sends)) + update_s


def sends_of_stages(ahead: Sequence[float], back: Sequence[float]) -> list[float]:
    """Seconds of each stage's sends and receives in a round.

    Args:
        ahead: Seconds of the activations over each boundary of stages.
        back: Seconds of the gradients over each boundary.
    """
    if not ahead:
        return [0.0]
    first = ahead[0] * (2 if len(ahead) + 1 >= _DOUBLED_FROM else 1)
    return [first, *map(add, ahead[1:], back), 2 * back[-1]]


def _stages(graph: OpGraph, strategy: Strategy) -> list[tuple[Decision, list[int]]] | None:
    """Decision and groups of each stage in forward order; ``None`` if Sailor lacks such stages."""
    if strategy.op_rules or strategy.modes or any(home >= 0 for home in strategy.homes):
        return None
    found: list[tuple[Decision, list[int]]] = []
    for group in _forward_order(graph):
        decision = strategy.decisions[group]
        if found and _place(decision) == _place(found[-1][0]):
            found[-1][1].append(group)
        else:
            found.append((decision, [group]))
    devices = [device for decision, _ in found for device in decision.devices]
    rounds = strategy.num_micro_batches
    is_said = (
        len(set(devices)) == len(devices)
        and len({len(decision.devices) for decision, _ in found}) == 1
        and all(_is_said(strategy.decisions[each], rounds) for _, own in found for each in own)
        and len(set(strategy.micro_sizes)) <= 1
    )
    return found if is_said else None


def _place(decision: Decision) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(decision.devices), tuple(decision.shares)


def _is_said(decision: Decision, rounds: int) -> bool:
    """Whether each replica of a decision is one device and has equal rounds."""
    return (
        not decision.recompute
        and not decision.teams
        and (len(decision.devices) == 1 or _is_ring(decision))
        and all(share % rounds == 0 for share in decision.shares)
    )


def _is_ring(decision: Decision) -> bool:
    return not decision.sync.is_sharded and decision.sync.aggregation == Aggregation.RING


def _forward_order(graph: OpGraph) -> list[int]:
    """Groups by their first op; groups with forward ops come first."""
    return list(dict.fromkeys(group_ops(graph).group.tolist()))


def _stage_of_ops(graph: OpGraph, stages: Sequence[Sequence[int]]) -> IntArray:
    """Stage of each op.  # [num_ops]"""
    group_of = group_ops(graph).group
    stage_of_group = np.zeros(int(group_of.max()) + 1, np.int64)
    for stage, groups in enumerate(stages):
        stage_of_group[list(groups)] = stage
    return np.asarray(stage_of_group[group_of])


def _sends_s(
    graph: OpGraph,
    cluster: Cluster,
    decisions: Sequence[Decision],
    stage_of: IntArray,
    rounds: int,
) -> list[float]:
    """Seconds of each stage's sends and receives in a round."""
    ahead, back = [], []
    for number, (stage, after) in enumerate(pairwise(decisions)):
        num_bytes = _crossing(graph, stage_of, number) / rounds
        ahead.append(_slowest_s(cluster, stage, after, num_bytes))
        back.append(_slowest_s(cluster, after, stage, num_bytes))
    return sends_of_stages(ahead, back)


def _crossing(graph: OpGraph, stage_of: IntArray, stage: int) -> float:
    """Bytes of the whole batch that stages after a boundary read from stages before it."""
    total = 0
    for op, outputs in enumerate(graph.outputs):
        if graph.ops[op].phase != Phase.FORWARD or stage_of[op] > stage:
            continue
        for tensor in outputs:
            is_read = any(
                stage_of[reader] > stage and graph.ops[reader].phase == Phase.FORWARD
                for reader in graph.consumers[tensor]
            )
            if is_read and graph.tensors[tensor].kind == TensorKind.ACTIVATION:
                total += graph.tensors[tensor].num_bytes
    return float(total)


def _slowest_s(cluster: Cluster, sender: Decision, receiver: Decision, num_bytes: float) -> float:
    """Seconds of the slowest send; each replica sends to one replica of the next stage."""
    return max(
        num_bytes * share / sum(sender.shares) / _rate(cluster, one, other)
        for one, share, other in zip(sender.devices, sender.shares, receiver.devices, strict=True)
    )


def _sync_s(graph: OpGraph, cluster: Cluster, decision: Decision, own: IntArray) -> float:
    """The ring of a stage's gradients, at the rate of the slowest pair of neighbours."""
    count = len(decision.devices)
    if count < 2:
        return 0.0
    left = sum(graph.tensors[p].num_bytes for op, p, _ in graph.updates if own[op])
    rate = min(map(_rate, [cluster] * (count - 1), decision.devices, decision.devices[1:]))
    return 2 * (count - 1) * left / count / rate


def _rate(cluster: Cluster, one: int, other: int) -> float:
    """Bytes per second from a device to another."""
    hosts = cluster.host_of[one], cluster.host_of[other]
    if hosts[0] == hosts[1]:
        return cluster.hosts[hosts[0]].intra.bandwidth_bytes_per_s
    return min(cluster.nic_bandwidth_bytes_per_s[host] for host in hosts)
