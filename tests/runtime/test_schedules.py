"""Pipelines in capped, split and stated order on real ranks: the numbers of one device."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering.program import TaskKind
from heterog.runtime.deploy import deploy
from heterog.runtime.measure.op_profiler import peak_bytes
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.schedules import PipelineSchedule, caps_of_stages, stages_of, stated_turns
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import BATCH, SGD, assert_same, captured_once, reference, train
from tests.runtime.grids import grid_cluster
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import SYNCS, cluster, graph_of, plan_of, strategy_of
from tests.runtime.test_recomputation import deep
from tests.simulator.builders import plan_by_hand
from tests.simulator.builders import strategy_of as on_grid
from tests.thorough import THOROUGH, cases, one_in

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


STATED = ("interleaved", "interleaved_zero_bubble", "zero_bubble_v", "dual_pipe_v", "gpipe",
          "breadth_first")  # fmt: skip
"""Schedules whose turns are not in the order of micro-batches."""


def stated(graph: OpGraph, name: str, sync: Sync, rng: Random) -> Strategy:
    """Two ranks of two devices, each with two chunks between random groups, slices unequal."""
    num_groups, num_micro, teams = group_ops(graph).num_groups, 4, ((0, 1), (2, 3))
    stages = stages_of(name, teams, 2)
    starts = (0, *sorted(rng.sample(range(1, num_groups), len(stages) - 1)))
    made: dict[tuple[int, ...], Decision] = {
        devices: Decision(
            devices=devices,
            shares=(BATCH // 2,) * 2,
            sync=sync,
            slices=(rng.randint(1, 3), rng.randint(1, 3)) if sync.takes_slices else (),
            recompute=rng.random() < 0.3,
        )
        for devices in teams
    }
    ends = (*starts[1:], num_groups)
    strategy = on_grid(
        graph,
        grid_cluster(4),
        [
            made[devices]
            for devices, begin, end in zip(stages, starts, ends, strict=True)
            for _ in range(end - begin)
        ],
    )
    return replace(
        strategy,
        micro_batches=(split_evenly(BATCH // 2, num_micro),) * 4,
        bucket_bytes=rng.choice([0, 600, 10**6]),
        step_barrier=rng.random() < 0.5,
        schedule=stated_turns(name, teams, 2, num_micro, num_devices=4, chunk_starts=starts),
    )


@one_in(4)
@pytest.mark.distributed
@pytest.mark.parametrize("sync", [Sync.ZERO1, Sync.ZERO2, Sync.ZERO3])
@pytest.mark.parametrize("name", STATED)
def test_chunks_with_slices_train_alike(
    four_ranks: Ranks, tmp_path: Path, name: str, sync: Sync
) -> None:
    """Several chunks a device: gathers and scatters follow its turns, not the model's order."""
    graph, rng = graph_of("mlp"), Random(f"{name} {sync}")
    strategy = stated(graph, name, sync, rng)
    path = tmp_path / "plan.json"
    plan_by_hand(graph, grid_cluster(4), strategy).save(path)
    assert_same(four_ranks.run(train, "mlp", SGD, str(path)), reference("mlp"))


@pytest.mark.parametrize("sync", [Sync.ZERO1, Sync.ZERO2, Sync.ZERO3])
@pytest.mark.parametrize("name", STATED)
def test_chunks_with_slices_move_what_the_closed_form_says(name: str, sync: Sync) -> None:
    """Stage 1 scatters and gathers once, 2 scatters and 3 also gathers in every micro-batch.

    Breadth-first all do it once, 3 for each pass: 3 S as in Lamy-Poirier 2023.
    """
    graph = graph_of("mlp")
    for seed in range(cases(20, 4)):
        strategy = stated(graph, name, sync, Random(seed))
        strategy = replace(strategy, step_barrier=True)
        evaluator = Evaluator(graph, grid_cluster(4))
        program, _, _ = evaluator.timings(evaluator.encode(strategy), Order.FIFO)
        moved = {
            kind: float(program.num_bytes[program.kind == kind].sum())
            for kind in (TaskKind.REDUCE_SCATTER, TaskKind.GATHER_PARAMETERS)
        }
        size = sum(int(graph.tensor_bytes[parameter]) for parameter in graph.parameters)
        once = sync == Sync.ZERO1 or name == "breadth_first"
        scatters = 1 if once else strategy.num_micro_batches
        assert moved[TaskKind.REDUCE_SCATTER] == size * scatters
        if sync != Sync.ZERO3:
            assert moved[TaskKind.GATHER_PARAMETERS] == size
        else:  # forth, and back where an op of the backward pass reads the parameter
            read = size * scatters
            assert read < moved[TaskKind.GATHER_PARAMETERS] <= 2 * read


def peak_of_deep(rank: int, path: str) -> int:
    workload: Workload = deep()
    with captured_once("deep for schedules"):
        step = deploy(workload, load_plan(path))
    step(workload.make_batch())
    return peak_bytes(step, workload.make_batch())


@THOROUGH
@pytest.mark.distributed
def test_caps_bound_the_memory_that_is_measured(ranks: Ranks, tmp_path: Path) -> None:
    graph = PARENT.capture("deep for schedules", deep)
    measured, predicted = {}, {}
    for name in ("free", "caps"):
        plan = plan_of(graph, pipeline(graph, name, num_micro=16))
        plan.save(tmp_path / "plan.json")
        measured[name] = ranks.run(peak_of_deep, str(tmp_path / "plan.json"))
        predicted[name] = plan.peak_memory_bytes
        for rank in range(cluster().num_devices):
            assert 0.9 * predicted[name][rank] <= measured[name][rank] <= predicted[name][rank]
    assert measured["caps"][0] < 0.5 * measured["free"][0]
