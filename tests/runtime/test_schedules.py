"""Pipelines in capped, split and stated order on real ranks: the numbers of one device."""

from dataclasses import replace
from pathlib import Path

import pytest

from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.planners.plan import load_plan
from heterog.runtime.deploy import deploy
from heterog.runtime.peak_memory import peak_bytes
from heterog.strategy.division import split_evenly
from heterog.strategy.pipeline_schedule import PipelineSchedule
from heterog.strategy.schedules import caps_of_stages, stages_of, stated_turns
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import BATCH, SGD, assert_same, captured_once, reference, train
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import SYNCS, cluster, graph_of, plan_of, strategy_of
from tests.runtime.test_recomputation import deep
from tests.thorough import THOROUGH, one_in

RANKS = ((0,), (1,), (2,))


def pipeline(graph: OpGraph, name: str, *, num_micro: int, recompute: bool = False) -> Strategy:
    """The groups of a graph cut evenly into the stages of a named schedule."""
    assert num_micro > 1 or name == "split"
    num_groups = group_ops(graph).num_groups
    is_stated = name in ("1f1b", "interleaved", "zero_bubble_v", "dual_pipe_v")
    num_chunks = 2 if is_stated and name != "1f1b" else 1
    stages = stages_of(name, RANKS, num_chunks) if is_stated else RANKS
    starts = [round(stage * num_groups / len(stages)) for stage in range(len(stages))]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], num_groups], strict=True)]
    if is_stated:
        schedule = stated_turns(
            name, RANKS, num_chunks, num_micro, num_devices=3, chunk_starts=tuple(starts)
        )
    elif name == "caps":
        schedule = caps_of_stages(RANKS, 3)
    elif name == "split, capped":
        schedule = replace(caps_of_stages(RANKS, 3), splits_backward=True)
    else:
        schedule = PipelineSchedule(splits_backward=name == "split")
    decisions = [
        Decision(devices=devices, shares=(graph.batch_size,), recompute=recompute)
        for devices, size in zip(stages, sizes, strict=True)
        for _ in range(size)
    ]
    counts = split_evenly(graph.batch_size, num_micro)
    idle = (0,) * num_micro
    micro_batches = (counts, idle, idle) if num_micro > 1 else ()
    plain = strategy_of(graph, decisions, micro_batches=micro_batches, bucket_bytes=10**6)
    return replace(plain, schedule=schedule)


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, model) for name in ("caps", "split, capped", "1f1b") for model in ("mlp", "gpt")),
        *((name, "gpt") for name in ("split", "interleaved", "zero_bubble_v", "dual_pipe_v")),
    ],
)
def test_schedules_train_alike(
    ranks: Ranks, tmp_path: Path, name: str, model: str, recompute: bool
) -> None:
    graph = graph_of(model)
    strategy = pipeline(graph, name, num_micro=BATCH - 2, recompute=recompute)
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    assert_same(ranks.run(train, model, SGD, str(path)), reference(model))


@pytest.mark.distributed
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_weight_gradients_of_one_micro_batch_wait(
    ranks: Ranks, tmp_path: Path, model: str
) -> None:
    """Stages work for each other first, and make their weight gradients beside each other."""
    graph = graph_of(model)
    plain = pipeline(graph, "split", num_micro=1)
    path = tmp_path / "plan.json"
    plan_of(graph, plain).save(path)
    assert_same(ranks.run(train, model, SGD, str(path)), reference(model))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["free", "caps", "shares"])
def test_blocks_with_losses_of_their_own_train_alike(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    graph = graph_of("local blocks")
    path = tmp_path / "plan.json"
    strategy = pipeline(graph, name, num_micro=BATCH // 2)
    if name == "shares":
        strategy = strategy_of(graph, [SYNCS["ring"]] * group_ops(graph).num_groups)
    plan_of(graph, strategy).save(path)
    results = ranks.run(train, "local blocks", SGD, str(path))
    assert_same(results, reference("local blocks"))


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("sync", [Sync.ZERO2, Sync.ZERO3])
@pytest.mark.parametrize("name", ["free", "caps", "1f1b"])
def test_stages_with_slices_train_alike(
    ranks: Ranks, tmp_path: Path, name: str, sync: Sync
) -> None:
    """Two devices share the first stage and its parameters, one has the second."""
    graph, teams = graph_of("gpt"), ((0, 1), (2,))
    num_groups, num_micro = group_ops(graph).num_groups, 4
    cut = num_groups // 2
    first = Decision(devices=teams[0], shares=(BATCH // 2,) * 2, sync=sync, slices=(3, 1))
    second = Decision(devices=teams[1], shares=(BATCH,))
    decisions = [first] * cut + [second] * (num_groups - cut)
    halves, whole = split_evenly(BATCH // 2, num_micro), split_evenly(BATCH, num_micro)
    strategy = strategy_of(
        graph, decisions, micro_batches=(halves, halves, whole), bucket_bytes=600
    )
    if name == "caps":
        strategy = replace(strategy, schedule=caps_of_stages(teams, 3))
    elif name == "1f1b":
        schedule = stated_turns(name, teams, 1, num_micro, num_devices=3, chunk_starts=(0, cut))
        strategy = replace(strategy, schedule=schedule)
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    assert_same(ranks.run(train, "gpt", SGD, str(path)), reference("gpt"))


def peak_of_deep(rank: int, path: str) -> int:
    workload: Workload = deep()
    with captured_once("deep"):
        step = deploy(workload, load_plan(path))
    step(workload.make_batch())
    return peak_bytes(step, workload.make_batch())


@THOROUGH
@pytest.mark.distributed
def test_caps_bound_the_memory_that_is_measured(ranks: Ranks, tmp_path: Path) -> None:
    graph = capture(deep())
    measured, predicted = {}, {}
    for name in ("free", "caps"):
        plan = plan_of(graph, pipeline(graph, name, num_micro=16))
        plan.save(tmp_path / "plan.json")
        measured[name] = ranks.run(peak_of_deep, str(tmp_path / "plan.json"))
        predicted[name] = plan.peak_memory_bytes
        for rank in range(cluster().num_devices):
            assert 0.9 * predicted[name][rank] <= measured[name][rank] <= predicted[name][rank]
    assert measured["caps"][0] < 0.5 * measured["free"][0]
