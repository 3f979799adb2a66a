"""Every kind of sentence against facts that are counted again, task by task, in the program."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from heterog.cli.found import _beside
from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.explain.decided import AggregatedParameters, what_was_decided
from heterog.explain.explanation import Explanation, explain
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRules
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import FIRST_LINK_KIND, Program, TaskKind
from heterog.lowering.tables import graph_tables
from heterog.search.background import plan_background
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.schedules import PipelineSchedule
from heterog.strategy.strategy import Decision, Strategy, Sync
from heterog.strategy.tensor_parallel import shardings
from heterog.units import format_bytes, format_seconds
from tests.simulator import builders
from tests.simulator.builders import cluster_of, linear_chain, plan_by_hand, strategy_of

TWO = cluster_of((10.0, ["V100-16GB"]), (10.0, ["T4"]))
BOTH = Decision(devices=(0, 1), shares=(6, 2))


class Counted:
    """A program of one step, counted with dictionaries and loops."""

    def __init__(self, strategy: Strategy, graph: OpGraph, cluster: Cluster) -> None:
        self.program: Program = lower(graph, cluster, strategy, num_steps=1)
        self.graph = graph
        self.tables = graph_tables(graph, strategy.op_rules)
        self.about: dict[TaskKind, list[int]] = defaultdict(list)
        self.on: dict[TaskKind, set[int]] = defaultdict(set)
        self.updated_on: dict[int, set[int]] = defaultdict(set)
        self.op_units: dict[tuple[int, int], int] = defaultdict(int)
        self.again: set[int] = set()
        self.sizes: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.channel_kinds: dict[TaskKind, set[ChannelKind]] = defaultdict(set)
        self.busy: set[int] = set()
        program = self.program
        for task in range(program.num_tasks):
            kind, subject = TaskKind(program.kind[task]), int(program.subject[task])
            device = int(program.device[task])
            self.about[kind].append(subject)
            self.on[kind].add(device)
            if kind >= FIRST_LINK_KIND:
                channel = program.channels[int(program.channel[task])]
                self.channel_kinds[kind].add(channel.kind)
                continue
            self.busy.add(device)
            if kind == TaskKind.UPDATE:
                self.updated_on[subject].add(device)
            elif kind == TaskKind.COMPUTE:
                op = int(self.tables.op_id[subject])
                units = program.units[task] or program.samples[task]
                self.op_units[op, device] += int(units)
                self.sizes[op][int(program.micro[task])] += int(program.samples[task])
            elif kind == TaskKind.RECOMPUTE:
                self.again.add(int(group_ops(graph).group[self.tables.op_id[subject]]))


def words(strategy: Strategy, graph: OpGraph, cluster: Cluster = TWO) -> tuple[str, Counted]:
    """What is said about a strategy, and what its program does."""
    explanation = explained(strategy, graph, cluster)
    return " ".join(explanation.paragraphs), Counted(strategy, graph, cluster)


def explained(strategy: Strategy, graph: OpGraph, cluster: Cluster = TWO) -> Explanation:
    return explain(plan_by_hand(graph, cluster, strategy), changes=False)


@lru_cache(maxsize=2)
def feed_forward(batch: int = 8) -> OpGraph:
    """Two linear layers of a captured model, whose weights can be split."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    example = (torch.zeros(batch, 64), torch.zeros(batch, 64))
    return capture(Workload(model, example, functional.mse_loss, torch.optim.AdamW))


def sharded(graph: OpGraph) -> OpRules:
    """The columns of the first weight, which are the rows of the second."""
    found = shardings(graph, range(group_ops(graph).num_groups))
    return next(each.op_rules for each in found if each.units == 512)


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [Sync.RING, Sync.HIERARCHICAL])
def test_all_reduce(sync: Sync) -> None:
    graph = linear_chain(("a", "b", "c"))
    text, counted = words(strategy_of(graph, TWO, replace(BOTH, sync=sync)), graph)
    (kind,) = counted.channel_kinds[TaskKind.ALL_REDUCE]
    name = {
        ChannelKind.ALL_REDUCE_RING: "ring all-reduce",
        ChannelKind.ALL_REDUCE_HIERARCHICAL: "hierarchical all-reduce",
    }[kind]
    assert sorted(counted.about[TaskKind.ALL_REDUCE]) == [0, 1, 2], "one per parameter"
    assert f"Gradients are aggregated by {name} tensor by tensor." in text


def test_buckets_are_those_that_travel() -> None:
    graph = linear_chain(("a", "b", "c"))  # 4 MiB each
    strategy = strategy_of(graph, TWO, BOTH, bucket_bytes=5 * 2**20)
    text, counted = words(strategy, graph)
    buckets = counted.about[TaskKind.ALL_REDUCE]
    payload = max(
        float(counted.program.num_bytes[task])
        for task in range(counted.program.num_tasks)
        if counted.program.kind[task] == TaskKind.ALL_REDUCE
    )
    assert len(buckets) == 2
    assert f"by ring all-reduce in 2 buckets of up to {format_bytes(payload)}." in text


def test_servers_are_where_gradients_go() -> None:
    graph = linear_chain(("a", "b", "c"))
    cluster = cluster_of((10.0, ["T4"]), (10.0, ["T4"]), (10.0, ["T4"]))
    served = Decision(devices=(0, 1, 2), shares=(3, 3, 2), sync=Sync.PARAMETER_SERVER)
    text, counted = words(strategy_of(graph, cluster, served, homes=(0, 2, 2)), graph, cluster)
    assert counted.on[TaskKind.PUSH] == {0, 2}
    assert "Gradients are aggregated by parameter servers on A:0 and C:0." in text


def test_two_ways_are_both_named_with_their_groups() -> None:
    graph = linear_chain(("a", "b", "c"))
    cut = replace(BOTH, sync=Sync.REDUCE_SCATTER_ALL_GATHER)
    text, counted = words(strategy_of(graph, TWO, [BOTH, cut, cut]), graph)
    assert len(counted.about[TaskKind.ALL_REDUCE]) == 1
    assert len(counted.about[TaskKind.REDUCE_SCATTER]) == 2
    assert (
        "Gradients are aggregated by reduce-scatter and all-gather (2 groups) tensor by tensor "
        "and ring all-reduce (1 group) tensor by tensor." in text
    )


@pytest.mark.parametrize("sync", [Sync.ZERO1, Sync.ZERO2, Sync.ZERO3])
def test_zero(sync: Sync) -> None:
    graph = linear_chain(("a", "b"))
    micro = ((3, 3), (1, 1))
    strategy = strategy_of(graph, TWO, replace(BOTH, sync=sync), micro_batches=micro)
    text, counted = words(strategy, graph)
    program = counted.program
    updates = [t for t in range(program.num_tasks) if program.kind[t] == TaskKind.UPDATE]
    stepped = sum(float(program.num_bytes[task]) for task in updates)
    assert stepped == pytest.approx(2 * 4 * 2**20), "each device steps its slice of both weights"
    gathers = [
        t for t in range(program.num_tasks) if program.kind[t] == TaskKind.GATHER_PARAMETERS
    ]
    ops = [t for t in range(program.num_tasks) if program.kind[t] == TaskKind.COMPUTE]
    scattered = len(counted.about[TaskKind.REDUCE_SCATTER])
    stage = {(False, 2): 1, (False, 4): 2, (True, 4): 3}[gathers[0] < ops[0], scattered]
    assert f"Gradients are aggregated by ZeRO-{stage} (" in text


def test_one_device_has_nothing_to_aggregate() -> None:
    graph = linear_chain(("a", "b"))
    stages = [Decision(devices=(0,), shares=(8,)), Decision(devices=(1,), shares=(8,))]
    text, counted = words(strategy_of(graph, TWO, stages), graph)
    assert not counted.about[TaskKind.PUSH]
    assert not counted.about[TaskKind.ALL_REDUCE]
    assert "Every parameter is on one device, so no gradients are aggregated." in text
    assert "a on A:0 (V100-16GB); b on B:0 (T4)." in text
    # Not so where another device updates one of them.
    text, counted = words(strategy_of(graph, TWO, stages, homes=(0, 0)), graph)
    assert counted.about[TaskKind.PUSH] == [1]
    assert "no gradients are aggregated" not in text
    assert "1 parameter (4.0 MiB) is updated on another device than where it is used (A:0)" in text


# --- where and what -----------------------------------------------------------------------------


def test_samples_of_each_device_are_those_that_its_ops_run() -> None:
    graph = linear_chain(("a", "b"))
    text, counted = words(strategy_of(graph, TWO, BOTH), graph)
    assert {(counted.op_units[op, 0], counted.op_units[op, 1]) for op in range(5)} == {(6, 2)}
    assert "The whole model runs on A:0 (V100-16GB, 6 of 8 samples) and B:0 (T4, 2)." in text


def test_columns_are_not_samples() -> None:
    """The plan of README's example that was told in samples and parameter servers."""
    graph = feed_forward()
    served = replace(BOTH, sync=Sync.PARAMETER_SERVER)
    plain = strategy_of(graph, TWO, served, homes=0)
    strategy = builders.with_rules(graph, plain, sharded(graph))
    text, counted = words(strategy, graph)
    ruled = [op for op, _ in strategy.op_rules]
    assert {(counted.op_units[op, 0], counted.op_units[op, 1]) for op in ruled} == {(384, 128)}
    flops = {op: graph.flops[op] + 1.0 for op, _ in counted.op_units}
    part = round(100 * sum(flops[op] for op in ruled) / sum(flops.values()))
    assert part > 90
    said = re.search(r"384 of 512 units\) and B:0 \(T4, 128\) by columns and rows, (\d+) %", text)
    assert said is not None, text
    assert int(said[1]) == part
    assert "6 of 8 samples" not in text
    # Two weights and one bias live in slices; the other bias alone is served.
    in_slices = [p for p in range(4) if counted.tables.parameter_axis[p] >= 0]
    size = sum(float(counted.tables.parameter_bytes[p]) for p in in_slices)
    assert f"{len(in_slices)} parameters ({format_bytes(size)}) live in slices" in text
    assert {p for p in range(4) if p not in in_slices} == set(counted.about[TaskKind.PULL])
    assert "Gradients are aggregated by parameter servers on A:0." in text


def test_nobody_is_told_to_aggregate_what_lives_in_slices() -> None:
    graph = feed_forward()
    rules = sharded(graph)
    strategy = builders.with_rules(graph, strategy_of(graph, TWO, BOTH), rules)
    decided = what_was_decided(strategy, graph, TWO)
    counted = Counted(strategy, graph, TWO)
    assert dict(decided.syncs) == {"ring all-reduce": 1}
    assert len(counted.about[TaskKind.ALL_REDUCE]) == 1, "the second layer's bias"
    (each,) = decided.ranges
    assert each.splits[0].shares == (384, 128)
    assert sum(split.work for split in each.splits) == pytest.approx(1.0)


def test_micro_batches_may_be_uneven() -> None:
    graph = linear_chain(("a", "b"))
    micro = ((3, 2, 1), (1, 1, 0))
    text, counted = words(strategy_of(graph, TWO, BOTH, micro_batches=micro), graph)
    assert dict(counted.sizes[0]) == {0: 4, 1: 3, 2: 1}
    assert "The batch of 8 is cut into 3 micro-batches of 1 or 3 or 4 samples." in text


def test_weight_gradients_that_wait_are_told_without_micro_batches_too() -> None:
    graph = linear_chain(("a", "b"), batch_size=8)
    stages = [Decision(devices=(device,), shares=(8,)) for device in range(2)]
    plain = strategy_of(graph, TWO, stages)
    assert "otherwise wait" not in words(plain, graph)[0]
    late = replace(plain, schedule=PipelineSchedule(splits_backward=True))
    assert "The batch goes through in one piece. Gradients of weights" in words(late, graph)[0]


def test_groups_that_recompute_have_something_to_recompute() -> None:
    builder = builders.GraphBuilder(8)
    x = builder.batch(64)
    weight = builder.parameter(64, 64)
    made = builder.relu(builder.mm(x, weight, module="a"), module="a")
    last = builder.relu(made, module="b")
    gradient = builder.weight_gradient(made, last, weight, module="a")
    builder.update(weight, gradient, module="a")
    graph = builder.build(last)
    again = replace(BOTH, recompute=True)
    strategy = strategy_of(graph, TWO, again)
    text, counted = words(strategy, graph)
    assert 0 < len(counted.again) < group_ops(graph).num_groups
    count = len(counted.again)
    assert f"{count} group of {group_ops(graph).num_groups} computes activations again" in text


def test_no_barrier_is_told() -> None:
    graph = linear_chain(("a", "b"))
    for barrier in (True, False):
        text, _ = words(strategy_of(graph, TWO, BOTH, step_barrier=barrier), graph)
        assert ("There is no step barrier" in text) == (not barrier)


def test_devices_without_a_task_are_left_out() -> None:
    graph = linear_chain(("a", "b"))
    alone = Decision(devices=(0,), shares=(8,))
    text, counted = words(strategy_of(graph, TWO, alone), graph)
    assert counted.busy == {0}
    assert "B:0 (T4) is left out: giving it work as well takes" in text
    served = replace(BOTH, shares=(8, 0), sync=Sync.PARAMETER_SERVER)
    text, counted = words(strategy_of(graph, TWO, served, homes=1), graph)
    assert counted.busy == {0, 1}
    assert "left out" not in text


# --- time, memory, bound ------------------------------------------------------------------------


def test_the_chain_names_what_travels() -> None:
    """All the time is in links: gradients, new parameters and activations are told apart."""
    slow = cluster_of((1e-2, ["T4"]), (1e-2, ["T4"]), latency_s=0.0)
    graph = linear_chain(("a",))
    even = Decision(devices=(0, 1), shares=(4, 4))
    served = replace(even, sync=Sync.PARAMETER_SERVER)
    text, _ = words(strategy_of(graph, slow, served, homes=0), graph, slow)
    assert "50 % for the 0.01 Gbit/s NICs of A and B to exchange gradients" in text
    assert "50 % for the 0.01 Gbit/s NICs of A and B to fetch parameters" in text
    stages = [Decision(devices=(device,), shares=(8,)) for device in (0, 1)]
    graph = linear_chain(("a", "b"))
    text, _ = words(strategy_of(graph, slow, stages), graph, slow)
    assert "for the 0.01 Gbit/s NICs of A and B to move activations" in text
    assert "gradients" not in text.partition("A step takes")[2].partition("Memory")[0]


def test_collectives_that_wait_for_their_communicator() -> None:
    slow = cluster_of((1e-2, ["T4"]), (1e-2, ["T4"]), latency_s=0.0)
    graph = linear_chain(("a", "b", "c"))
    even = Decision(devices=(0, 1), shares=(4, 4))
    explanation = explained(strategy_of(graph, slow, even), graph, slow)
    (queued,) = explanation.queued
    # The first all-reduce waits for its gradient, the other two for the one before.
    assert queued.num_collectives == 2
    assert queued.seconds == pytest.approx(2 / 3 * explanation.step_time_s, rel=1e-2)
    text = " ".join(explanation.paragraphs)
    assert "67 % of the step is spent in collectives that waited for the communicator" in text
    assert "of A:0 and B:0, which runs one at a time." in text


def test_a_plan_that_does_not_fit() -> None:
    graph = linear_chain(("a", "b"), width=2048)
    small = replace(TWO.devices[0], usable_memory_bytes=20 * 2**20)
    cluster = replace(TWO, devices=(small, TWO.devices[1]))
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(8,)))
    text, counted = words(strategy, graph, cluster)
    needs = Evaluator(graph, cluster).referee(strategy, Order.FIFO).peak_memory_bytes[0]
    assert counted.program.resident_bytes[0] < needs
    assert (
        f"The plan does not fit: A:0 (V100-16GB) needs {format_bytes(needs)} and has 20.0 MiB; it "
        f"lacks {format_bytes(needs - 20 * 2**20)}." in text
    )


def test_one_lower_bound_everywhere() -> None:
    """The plan's own, with rules of single ops exactly where a method used some."""
    graph = feed_forward()
    plain = strategy_of(graph, TWO, BOTH)
    ruled = builders.with_rules(graph, plain, sharded(graph))
    for strategy in (plain, ruled):
        plan: Plan = plan_by_hand(graph, TWO, strategy)
        explanation = explain(plan, changes=False)
        assert explanation.bound.seconds == plan.lower_bound_s
        assert explanation.bound.with_op_rules == bool(strategy.op_rules)
        text = explanation.paragraphs[-1]
        assert format_seconds(plan.lower_bound_s) in text
        assert ("without rules for single ops" in text) == (not strategy.op_rules)


def test_a_background_job_is_told_of_the_devices_that_it_runs_on() -> None:
    """A device without room for it does not count as idle for it."""
    foreground = feed_forward()
    alone = strategy_of(foreground, TWO, Decision(devices=(0,), shares=(8,)))
    small = replace(TWO.devices[0], usable_memory_bytes=1)
    for cluster, idle in ((TWO, 50), (replace(TWO, devices=(small, TWO.devices[1])), 100)):
        strategy = replace(alone, cluster=cluster.fingerprint)
        plan = plan_by_hand(foreground, cluster, strategy)
        found = replace(plan, background=plan_background(
            Evaluator(foreground, cluster), strategy, Order.FIFO, feed_forward(4), limit=1.0
        ))  # fmt: skip
        counted = Counted(strategy, foreground, cluster)
        assert counted.busy == {0}, "a chain without gaps: busy all the time, the other never"
        assert found.background is not None
        count = len(found.background.devices)
        said = _beside(found.background, found.cluster)
        assert f"on each of {count} device{'s' * (count > 1)}, idle {idle}% of" in said


# --- any plan -----------------------------------------------------------------------------------


def random_plan(rng: Random) -> tuple[OpGraph, Cluster, Strategy]:
    """Any legal strategy, often with rules."""
    graph, cluster = builders.random_graph(rng), builders.random_cluster(rng)
    strategy = builders.random_strategy(rng, graph, cluster)
    if rng.random() < 0.5:
        rules = builders.random_rules(rng, graph)
        ruled = builders.with_rules(graph, replace(strategy, micro_batches=()), rules)
        try:
            ruled.check(graph, cluster)
        except StrategyError:
            return graph, cluster, strategy
        strategy = ruled
    return graph, cluster, strategy


def way_of(parameter: int, counted: Counted, strategy: Strategy) -> str:
    """How a gradient is aggregated, by the tasks about it."""
    about, program = counted.about, counted.program
    bucket = int(program.bucket[parameter])
    if any(
        program.kind[task] == TaskKind.UPDATE
        and program.subject[task] == parameter
        and program.samples[task] > 0
        for task in range(program.num_tasks)
    ):
        return "in slices"
    if bucket in about[TaskKind.ALL_REDUCE]:
        return "all-reduce"
    if bucket in about[TaskKind.REDUCE_SCATTER]:
        return "reduce-scatter" if bucket in about[TaskKind.ALL_GATHER] else "ZeRO"
    if len(counted.updated_on[parameter]) > 1:
        return "made whole"
    if parameter not in about[TaskKind.PUSH] + about[TaskKind.PULL]:
        return "alone"
    group = int(counted.tables.parameter_group[parameter])
    return "servers" if len(strategy.decisions[group].devices) > 1 else "elsewhere"


def told(aggregations: Sequence[AggregatedParameters]) -> dict[str, int]:
    """Parameters by the last word of how they are aggregated."""
    short = {
        "ring all-reduce": "all-reduce", "hierarchical all-reduce": "all-reduce",
        "reduce-scatter and all-gather": "reduce-scatter", "parameter servers": "servers",
    }  # fmt: skip
    found: dict[str, int] = defaultdict(int)
    for each in aggregations:
        name = "ZeRO" if each.way.startswith("ZeRO") else short.get(each.way, each.way)
        found[name] += each.num_parameters
    return dict(found)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_facts_of_any_plan_are_those_of_its_program(seed: int) -> None:
    graph, cluster, strategy = random_plan(Random(seed))
    decided = what_was_decided(strategy, graph, cluster)
    counted = Counted(strategy, graph, cluster)
    expected: dict[str, int] = defaultdict(int)
    for parameter in range(len(graph.updates)):
        expected[way_of(parameter, counted, strategy)] += 1
    assert told(decided.aggregations) == dict(expected)
    assert decided.idle == tuple(d for d in range(cluster.num_devices) if d not in counted.busy)
    assert decided.num_recomputing == len(counted.again)
    group = group_ops(graph).group
    for each in decided.ranges:
        shared = {split.units: split.shares for split in each.splits}
        ops = [
            op
            for op in range(graph.num_ops)
            if each.first_group <= group[op] < each.first_group + each.num_groups
            and not graph.is_view[op]
            and graph.ops[op].phase != Phase.UPDATE
        ]
        for op in ops:
            mine = tuple(counted.op_units[op, device] for device in each.devices)
            assert mine in shared.values()
            assert sum(mine) == graph.batch_size or mine != each.shares
        used = {tuple(counted.op_units[op, device] for device in each.devices) for op in ops}
        assert used == set(shared.values())
