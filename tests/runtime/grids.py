"""Random strategies with teams: tensor parallelism inside, data and pipeline parallelism."""

from dataclasses import replace
from itertools import pairwise
from random import Random

from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.op_rule import OpRule, OpRules
from heterog.graph.placement import R
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from heterog.strategy.tensor_parallel import merge_rules, shardings
from tests.simulator.builders import cluster_of

BATCH = 8


def grid_cluster(num_devices: int) -> Cluster:
    return cluster_of(*[(1.0, ["T4"])] * num_devices)


def random_grid(rng: Random, graph: OpGraph, num_devices: int) -> Strategy:
    """A legal strategy with stages, teams, rules, ZeRO, micro-batches and recomputation."""
    while True:
        strategy = _random_grid(rng, graph, num_devices)
        try:
            strategy.check(graph, grid_cluster(num_devices))
        except StrategyError:
            continue
        return strategy


def _random_grid(rng: Random, graph: OpGraph, num_devices: int) -> Strategy:
    grouping = group_ops(graph)
    num_stages = rng.choice([1, 1, 2])
    cuts = [0, *sorted(rng.sample(range(1, grouping.num_groups), num_stages - 1))]
    ends = [*cuts[1:], grouping.num_groups]
    devices = list(range(num_devices))
    rng.shuffle(devices)
    num_micro = rng.choice([1, 1, 2, 3])
    teams_like = rng.random() < 0.6
    sizes = _composition(
        rng, BATCH, rng.choice([1, 2, 2, 3]), least=0 if rng.random() < 0.2 else 1
    )
    decisions: list[Decision] = []
    rules: list[OpRules] = []
    for stage, (begin, end) in enumerate(zip(cuts, ends, strict=True)):
        own = devices[stage::num_stages]
        samples = sizes if teams_like else _composition(rng, BATCH, rng.randint(1, len(own)))
        decision = _random_decision(rng, own, samples)
        decisions += [replace(decision, recompute=rng.random() < 0.3) for _ in range(begin, end)]
        rules.append(_random_rules(rng, graph, range(begin, end)))
    idle = (0,) * num_micro
    micro = (split_evenly(BATCH, num_micro), *[idle] * (num_devices - 1))
    return Strategy(
        graph=graph.fingerprint,
        cluster=grid_cluster(num_devices).fingerprint(),
        decisions=tuple(decisions),
        homes=(REPLICATED,) * len(graph.updates),
        micro_batches=micro if num_micro > 1 else (),
        bucket_bytes=rng.choice([0, 300, 10**6]),
        op_rules=merge_rules(*rules),
    )


def _random_decision(rng: Random, own: list[int], samples: tuple[int, ...]) -> Decision:
    samples = samples[: len(own)]
    samples = (*samples[:-1], BATCH - sum(samples[:-1]))
    members = _composition(rng, len(own), len(samples))
    if len(own) % len(samples) == 0 and rng.random() < 0.6:
        members = (len(own) // len(samples),) * len(samples)
    teams: list[tuple[int, ...]] = []
    share_of: dict[int, int] = {}
    part_of: dict[int, int] = {}
    begin = 0
    for size, count in zip(members, samples, strict=True):
        team = tuple(own[begin : begin + size])
        begin += size
        teams.append(team)
        share_of |= dict(zip(team, _composition(rng, count, size, least=0), strict=True))
        part_of |= {device: rng.choice([1, 1, 2]) for device in team}
    devices = tuple(sorted(own))
    sync = rng.choice([sync for sync in Sync if not sync.is_served])
    return Decision(
        devices=devices,
        shares=tuple(share_of[device] for device in devices),
        teams=tuple(teams),
        parts=tuple(part_of[device] for device in devices),
        sync=sync,
    )


def _random_rules(rng: Random, graph: OpGraph, groups: range) -> OpRules:
    """Some layers sharded; with luck all other ops done by every member of a team."""
    found = list(shardings(graph, groups))
    chosen = rng.sample(found, min(len(found), rng.randint(0, 2)))
    rules = merge_rules(*(each.op_rules for each in chosen))
    if rng.random() < 0.5:
        rules = merge_rules(rules, done_by_all(graph, groups))
    return rules


def done_by_all(graph: OpGraph, groups: range) -> OpRules:
    """Rules by which every member of a team does all of each op of some groups."""
    group = group_ops(graph).group
    return tuple(
        (
            index,
            OpRule(
                inputs=tuple(R for _ in op.inputs),
                outputs=tuple(R for _ in range(op.num_outputs)),
                units=1,
            ),
        )
        for index, op in enumerate(graph.ops)
        if int(group[index]) in groups
        and int(group[index]) != CONSTANT_GROUP
        and op.phase != Phase.UPDATE
        and not graph.is_view[index]
        and "batch_norm" not in op.kind
    )


def _composition(rng: Random, total: int, parts: int, least: int = 1) -> tuple[int, ...]:
    """Random whole numbers of at least ``least`` that add up to ``total``."""
    left = max(total - least * parts, 0)
    if total < least * parts:
        least, left = 0, total
    cuts = [0, *sorted(rng.randint(0, left) for _ in range(parts - 1)), left]
    return tuple(b - a + least for a, b in pairwise(cuts))
