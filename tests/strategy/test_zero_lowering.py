"""ZeRO: traffic, slices and memory by hand."""

import re
from dataclasses import replace

import pytest

from heterog.errors import StrategyError
from heterog.graph.op_graph import Phase
from heterog.lowering import lower
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import Program, TaskKind
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import StrategySpace
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, Sync
from tests.simulator.builders import cluster_of, linear_chain, strategy_of
from tests.strategy.test_lowering import CHAIN, SAMPLE, THREE, WEIGHT, needs, tasks_of

ADAM = 2.0
STAGES = (Sync.ZERO1, Sync.ZERO2, Sync.ZERO3)
MICRO = ((2, 2), (1, 1), (1, 1))


def zero(
    stage: Sync, shares: tuple[int, ...] = (4, 2, 2), slices: tuple[int, ...] = (0, 1, 3)
) -> Decision:
    return Decision(devices=(0, 1, 2), shares=shares, sync=stage, slices=slices)


def program_of(stage: Sync, **options: object) -> Program:
    return lower(CHAIN, THREE, strategy_of(CHAIN, THREE, zero(stage), **options))  # type: ignore[arg-type]


def made(program: Program, task: int) -> dict[int, float]:
    """Bytes that a task makes on each device."""
    span = range(program.buffer_start[task], program.buffer_start[task + 1])
    found: dict[int, float] = {}
    for buffer in span:
        device = int(program.buffer_device[buffer])
        if device >= 0:
            found[device] = found.get(device, 0.0) + float(program.buffer_bytes[buffer])
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_each_device_steps_and_keeps_its_slice(stage: Sync) -> None:
    program = program_of(stage)
    updates = [(t.subject, t.device, t.num_bytes) for t in tasks_of(program, TaskKind.UPDATE)]
    assert sorted(updates) == [
        (0, 1, WEIGHT / 4), (0, 2, 3 * WEIGHT / 4), (1, 1, WEIGHT / 4), (1, 2, 3 * WEIGHT / 4),
    ]  # fmt: skip
    parts = (0.0, 0.25, 0.75)
    whole = [part if stage == Sync.ZERO3 else 1.0 for part in parts]
    kept = [2 * WEIGHT * (w + ADAM * p) for w, p in zip(whole, parts, strict=True)]
    shares = [samples * SAMPLE for samples in (4, 2, 2)]
    assert program.resident_bytes.tolist() == [k + s for k, s in zip(kept, shares, strict=True)]


def test_stage_1_scatters_once_and_gathers_new_parameters() -> None:
    program = program_of(Sync.ZERO1, micro_batches=MICRO)
    scatters = tasks_of(program, TaskKind.REDUCE_SCATTER)
    gathers = tasks_of(program, TaskKind.GATHER_PARAMETERS)
    assert [t.subject for t in scatters] == [t.subject for t in gathers] == [1, 0]
    assert len(tasks_of(program, TaskKind.ACCUMULATE)) == 2 * 3
    for scatter, gather in zip(scatters, gathers, strict=True):
        assert scatter.num_bytes == gather.num_bytes == WEIGHT
        updates = [t for t in tasks_of(program, TaskKind.UPDATE) if t.subject == scatter.subject]
        assert all(scatter.number in needs(program, t.number) for t in updates)
        assert {t.number for t in updates} <= needs(program, gather.number)
        kinds = [program.channels[program.channel[t.number]].kind for t in (scatter, gather)]
        assert kinds == [ChannelKind.REDUCE_SCATTER, ChannelKind.ALL_GATHER]
    # The traffic is that of reduce-scatter and all-gather of gradients.
    plain = replace(zero(Sync.ZERO1), sync=Sync.REDUCE_SCATTER_ALL_GATHER)
    other = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, plain, micro_batches=MICRO))
    for kind in (TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER):
        assert len(tasks_of(other, kind)) == 2


def test_stage_2_scatters_each_micro_batch_and_keeps_the_slice() -> None:
    program = program_of(Sync.ZERO2, micro_batches=MICRO)
    scatters = tasks_of(program, TaskKind.REDUCE_SCATTER)
    assert [t.subject for t in scatters] == [1, 0, 1, 0]
    assert not tasks_of(program, TaskKind.ACCUMULATE)
    assert len(tasks_of(program, TaskKind.GATHER_PARAMETERS)) == 2
    # The sum, and what the two others have sent: of the second micro-batch that alone.
    for scatter, own in zip(scatters, (1, 1, 0, 0), strict=True):
        assert made(program, scatter.number) == {
            1: (2 + own) * WEIGHT / 4, 2: (2 + own) * 3 * WEIGHT / 4,
        }  # fmt: skip
    assert scatters[1].number in needs(program, scatters[3].number)


def test_stage_3_gathers_for_each_pass_and_two_ahead() -> None:
    graph = linear_chain(("a", "b", "c"))
    program = lower(graph, THREE, strategy_of(graph, THREE, zero(Sync.ZERO3)))
    gathers = tasks_of(program, TaskKind.GATHER_PARAMETERS)
    # Forward all, backward those whose input gradients are needed.
    assert [t.subject for t in gathers] == [0, 1, 2, 2, 1]
    ops = tasks_of(program, TaskKind.COMPUTE)
    for gather in gathers:
        assert made(program, gather.number) == dict.fromkeys((0, 1, 2), WEIGHT)
    readers = [[t.number for t in ops if t.subject == op] for op in (0, 1, 2, 4, 6)]
    for index, gather in enumerate(gathers):
        for reader in readers[index]:
            assert gather.number in program.dependencies(reader)
        before = needs(program, gather.number)
        ahead = set(readers[index - 2]) if index >= 2 else set()
        assert ahead <= before
        assert index == 0 or not set(readers[index - 1]) & before
    assert len(tasks_of(program, TaskKind.UPDATE)) == 3 * 2


@pytest.mark.parametrize("stage", [Sync.ZERO2, Sync.ZERO3])
def test_stages_of_a_pipeline_do_not_wait_for_each_other(stage: Sync) -> None:
    """A forward pass needs no backward pass of the micro-batch before, on no stage."""
    graph = linear_chain(("a", "b", "c", "d"))
    cluster = cluster_of(*[(10.0, ["T4"])] * 4)
    halves = [Decision(devices=pair, shares=(4, 4), sync=stage) for pair in ((0, 1), (2, 3))]
    strategy = strategy_of(graph, cluster, halves[0], micro_batches=((1, 1, 2),) * 4)
    strategy = replace(strategy, decisions=(halves[0], halves[0], halves[1], halves[1]))
    program = lower(graph, cluster, strategy)
    ops = tasks_of(program, TaskKind.COMPUTE)
    backward = {t.number for t in ops if graph.ops[t.subject].phase is Phase.BACKWARD}
    for task in ops:
        if task.number not in backward:
            assert not needs(program, task.number) & backward


def test_stage_3_brings_parameters_only_where_there_are_samples() -> None:
    decision = zero(Sync.ZERO3, shares=(5, 3, 0), slices=(1, 0, 1))
    program = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, decision))
    for gather in tasks_of(program, TaskKind.GATHER_PARAMETERS):
        assert gather.route == (0, 1, 2)
        assert made(program, gather.number) == {0: WEIGHT, 1: WEIGHT}
    for scatter in tasks_of(program, TaskKind.REDUCE_SCATTER):
        # Device 2 sends nothing and adds up what two devices have.
        assert made(program, scatter.number) == {0: 2 * WEIGHT / 2, 2: 3 * WEIGHT / 2}


def test_stage_3_of_the_next_step_gathers_what_has_been_stepped() -> None:
    strategy = strategy_of(CHAIN, THREE, zero(Sync.ZERO3), step_barrier=False)
    program = lower(CHAIN, THREE, strategy, num_steps=2)
    gathers = tasks_of(program, TaskKind.GATHER_PARAMETERS)
    updates = [t.number for t in tasks_of(program, TaskKind.UPDATE) if t.subject == 0]
    assert set(updates[:2]) <= needs(program, gathers[3].number)
    assert not set(updates[2:]) & needs(program, gathers[3].number)


LAYERS = linear_chain(("table", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "norm", "head"))


def gathered(
    schedule: PipelineSchedule = AS_IT_COMES, **options: object
) -> list[tuple[int, float]]:
    """The first parameter and the size in weights of each gather of stage 3, in order."""
    strategy = strategy_of(LAYERS, THREE, zero(Sync.ZERO3), **options)  # type: ignore[arg-type]
    strategy = replace(strategy, schedule=schedule)
    program = lower(LAYERS, THREE, strategy)
    gathers = tasks_of(program, TaskKind.GATHER_PARAMETERS)
    for each in gathers:
        assert made(program, each.number) == dict.fromkeys((0, 1, 2), each.num_bytes)
    scatters = [
        (t.subject, t.num_bytes / WEIGHT) for t in tasks_of(program, TaskKind.REDUCE_SCATTER)
    ]
    once_a_pass = list(dict.fromkeys((t.subject, t.num_bytes / WEIGHT) for t in gathers))
    num_scatters = 1 if strategy.gathers_once else strategy.num_micro_batches
    assert scatters == num_scatters * once_a_pass[::-1]
    return [(t.subject, t.num_bytes / WEIGHT) for t in gathers]


def test_buckets_of_stage_3_are_layers() -> None:
    """Of neighbours in a layer, or between layers, up to the size of a bucket."""
    forward, backward = [(0, 1.0), (2, 2.0), (4, 2.0), (6, 2.0)], [(6, 2.0), (4, 2.0), (2, 2.0)]
    assert gathered(bucket_bytes=10**9) == forward + backward
    assert gathered(bucket_bytes=10**9, micro_batches=MICRO) == 2 * (forward + backward)
    once = PipelineSchedule(gathers_once=True)
    assert gathered(once, bucket_bytes=10**9, micro_batches=MICRO) == forward + backward
    alone = [(row, 1.0) for row in range(7)]
    assert gathered(bucket_bytes=1) == alone + alone[:0:-1]
    chunks = PipelineSchedule(chunk_starts=(2,))
    cut = [(0, 1.0), (1, 1.0), (2, 1.0), *forward[2:], *backward[:2], (2, 1.0), (1, 1.0)]
    assert gathered(chunks, bucket_bytes=10**9) == cut


def test_buckets_of_stage_3_end_where_decisions_do() -> None:
    one, other = zero(Sync.ZERO3), zero(Sync.ZERO3, slices=(1, 1, 1))
    decisions = (one, one, other, other, other, other, one)
    strategy = replace(strategy_of(LAYERS, THREE, one, bucket_bytes=10**9), decisions=decisions)
    assert lower(LAYERS, THREE, strategy).bucket.tolist() == [0, 1, 2, 4, 4, 5, 6]
    # Without layers a group is gathered for its own ops; stage 2 gathers nothing for ops.
    for stage, buckets in ((Sync.ZERO2, [1, 1]), (Sync.ZERO3, [0, 1])):
        program = program_of(stage, bucket_bytes=10**9)
        assert program.bucket.tolist() == buckets


def test_more_in_slices_needs_less_memory() -> None:
    graph = linear_chain(tuple("abcdefgh"))
    peaks = []
    for sync in (Sync.RING, *STAGES):
        decision = Decision(devices=(0, 1, 2), shares=(4, 2, 2), sync=sync)
        strategy = strategy_of(graph, THREE, decision, micro_batches=MICRO)
        peaks.append(Evaluator(graph, THREE).evaluate(strategy, Order.RANK).peak_memory_bytes[0])
    # 8 weights: state 16 to 16/3, then gradients 8 to 8/3 and some under way, then parameters.
    assert peaks[1] == pytest.approx(peaks[0] - 16 * WEIGHT * 2 / 3 * 1.04, rel=0.1)
    assert peaks[2] < peaks[1] - 2 * WEIGHT
    assert peaks[3] < peaks[2] - 2 * WEIGHT


def test_a_device_alone_has_no_slices() -> None:
    alone = Decision(devices=(1,), shares=(8,), sync=Sync.ZERO3)
    plain = Decision(devices=(1,), shares=(8,))
    programs = [lower(CHAIN, THREE, strategy_of(CHAIN, THREE, each)) for each in (alone, plain)]
    assert programs[0].hash == programs[1].hash


@pytest.mark.parametrize("optimizer", ["LBFGS", "Muon", "Adafactor", "LAMB"])
def test_optimizers_that_look_at_more_than_an_element_are_refused(optimizer: str) -> None:
    graph = replace(CHAIN, optimizer=optimizer)
    strategy = strategy_of(graph, THREE, zero(Sync.ZERO2))
    text = f"synchronised by zero2, which updates slices of parameters, but {optimizer} looks at"
    with pytest.raises(StrategyError, match=re.escape(text)):
        lower(graph, THREE, strategy)
    strategy_of(graph, THREE, Decision(devices=(1,), shares=(8,), sync=Sync.ZERO1)).check(
        graph, THREE
    )
    evaluator = Evaluator(graph, THREE)
    space = StrategySpace(graph, THREE, evaluator.rules, evaluator.channels, (1.0, 1.0, 1.0))
    assert Sync.ZERO1 not in {candidate.sync for candidate in space.candidates}


COPIES = ((0, 1), (2, 3))
FOUR = cluster_of((10.0, ["T4", "T4"]), (10.0, ["T4", "T4"]))


def copies(stage: Sync, **options: object) -> Decision:
    """Two copies in slices of a quarter and three quarters."""
    made = Decision(
        devices=(0, 1, 2, 3), shares=(2, 2, 2, 2), sync=stage, slices=(1, 3, 1, 3),
        slice_groups=COPIES,
    )  # fmt: skip
    return replace(made, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES)
def test_slice_groups_add_up_slices_once_a_step(stage: Sync) -> None:
    """Inside a group the traffic of ZeRO on its devices; between groups 2 (H-1)/H of a slice."""
    micro = ((1, 1), (1, 1), (1, 1), (1, 1))
    program = lower(CHAIN, FOUR, strategy_of(CHAIN, FOUR, copies(stage), micro_batches=micro))
    scatters = tasks_of(program, TaskKind.REDUCE_SCATTER)
    between = tasks_of(program, TaskKind.ALL_REDUCE)
    over = {program.channels[program.channel[t.number]].devices for t in scatters}
    assert over == set(COPIES)
    assert len(scatters) == 2 * 2 * (1 if stage == Sync.ZERO1 else 2)
    found = sorted(
        (t.subject, program.channels[program.channel[t.number]].devices, t.num_bytes)
        for t in between
    )
    assert found == [
        (row, devices, part * WEIGHT)
        for row in (0, 1)
        for devices, part in (((0, 2), 0.25), ((1, 3), 0.75))
    ]
    for update in tasks_of(program, TaskKind.UPDATE):
        mine = [t.number for t in between if t.subject == update.subject]
        mine = [t for t in mine if update.device in program.channels[program.channel[t]].devices]
        assert set(mine) <= needs(program, update.number)
    parts = (0.25, 0.75, 0.25, 0.75)
    whole = [part if stage == Sync.ZERO3 else 1.0 for part in parts]
    kept = [2 * WEIGHT * (w + ADAM * p) + 2 * SAMPLE for w, p in zip(whole, parts, strict=True)]
    assert program.resident_bytes.tolist() == kept
    read = strategy_from_dict(strategy_to_dict(strategy_of(CHAIN, FOUR, copies(stage))))
    assert read == strategy_of(CHAIN, FOUR, copies(stage))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sync": Sync.RING, "slices": ()}, "need the synchronisation zero1"),
        ({"slice_groups": ((0, 1), (2,))}, "each of the devices .* once"),
        ({"slice_groups": ((0,), (1, 2, 3))}, "as large as each other"),
        ({"slices": (1, 3, 3, 1)}, "slices as large as the others'"),
        ({"slice_groups": ((0,), (1,), (2,), (3,))}, "at least 2"),
    ],
)
def test_slice_groups_that_make_no_sense_are_refused(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(StrategyError, match=problem):
        strategy_of(CHAIN, FOUR, copies(Sync.ZERO2, **changes)).check(CHAIN, FOUR)


def test_strategies_in_files() -> None:
    for stage in STAGES:
        strategy = strategy_of(CHAIN, THREE, zero(stage))
        record = strategy_to_dict(strategy)
        assert record["decisions"][0]["sync"] == stage.name.lower()
        assert strategy_from_dict(record) == strategy
    assert [sync.value for sync in Sync] == list(range(7)), "old numbers stay"
