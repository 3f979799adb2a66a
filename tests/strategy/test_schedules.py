"""Schedules: bubbles and peaks known from the field, closed forms, memory, and what is refused.

Sources of the numbers: torch 2.13's own lists of operations for the named schedules, played with
one unit of time for a stage's forward pass, input gradients and weight gradients; the time of 1F1B
with links by enumeration of small cases (see the formulas below).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from random import Random

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.cluster.hardware import Link
from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import P, R, S
from heterog.lowering import encode, lower
from heterog.lowering.program import TaskKind
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.pipeline_schedule import Pass, PipelineSchedule, Turn, device_chunks
from heterog.strategy.schedules import caps_of_stages, stages_of, stated_turns
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, Strategy
from tests.simulator import reference
from tests.simulator.builders import GraphBuilder, cluster_of, linear_chain, strategy_of

WIDTH = 2


def stages_model(
    seconds: Sequence[tuple[float, float, float]],
    num_micro: int,
    *,
    width: int = WIDTH,
    weights_first: bool = True,
) -> OpGraph:
    """One group per stage with (forward, input gradient, weight gradient) seconds a micro-batch.

    One sample each. What a stage sends back leaves at the end of its backward pass if its weight
    gradients come first.
    """
    builder = GraphBuilder(num_micro)
    kept = [builder.batch(width)]
    weights = [builder.parameter(1, name=f"{stage}.weight") for stage in range(len(seconds))]
    shape, read = (num_micro, width), (S(0), S(0))

    def cost(value: float) -> tuple[tuple[str, float], ...]:
        return (("T4", value * num_micro),)

    for stage, (weight, each) in enumerate(zip(weights, seconds, strict=True)):
        made = builder.op(
            "forward",
            (kept[-1], weight),
            shape,
            module=f"{stage}",
            rule=((S(0), R), (S(0),)),
            measured_s=cost(each[0]),
        )
        kept.append(made)
    above, gradients = kept[-1], []
    for stage in range(len(seconds) - 1, -1, -1):
        made_of = above, kept[stage]
        for kind in ("weights", "inputs") if weights_first else ("inputs", "weights"):
            is_weights = kind == "weights"
            made = builder.op(
                kind,
                made_of,
                (1,) if is_weights else shape,
                module=f"{stage}",
                rule=(read, (P if is_weights else S(0),)),
                phase=Phase.BACKWARD,
                measured_s=cost(seconds[stage][2 if is_weights else 1]),
            )
            if is_weights:
                gradients.append(made)
            else:
                above = made
    for weight, gradient in zip(reversed(weights), gradients, strict=True):
        builder.update(weight, gradient, module=f"{weights.index(weight)}")
    return builder.build(kept[-1], state_ratio=0.0)


def row_of(num_devices: int, *, message_s: float = 0.0) -> Cluster:
    """Devices in one host, between which every message takes as long."""
    link = Link(kind="nvlink", bandwidth_bytes_per_s=1e15, latency_s=message_s)
    return cluster_of((100.0, ["T4"] * num_devices), latency_s=0.0, intra=link)


def pipeline_of(
    graph: OpGraph, cluster: Cluster, stages: Sequence[Sequence[int]], schedule: PipelineSchedule
) -> Strategy:
    """Each group of the graph is a stage; one sample per micro-batch."""
    batch = graph.batch_size
    idle = ((0,) * batch,) * (cluster.num_devices - 1)
    decisions = [Decision(devices=tuple(devices), shares=(batch,)) for devices in stages]
    plain = strategy_of(graph, cluster, decisions, micro_batches=((1,) * batch, *idle))
    return replace(plain, schedule=schedule)


def seconds_of(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> float:
    evaluator = Evaluator(graph, cluster)
    return evaluator.simulate(evaluator.encode(strategy), Order.FIFO)[0]


def live_chunks(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> list[int]:
    """Most (micro-batch, stage) pairs on each device from forward to weight gradients."""
    evaluator = Evaluator(graph, cluster)
    program, start, finish = evaluator.timings(evaluator.encode(strategy), Order.FIFO)
    num_stages = len(strategy.decisions)
    last = graph.ops[num_stages + 1].kind  # of a stage's backward pass
    moments: list[list[tuple[float, int]]] = [[] for _ in range(cluster.num_devices)]
    for task in range(program.num_tasks):
        if program.kind[task] != TaskKind.COMPUTE:
            continue
        op, device = int(program.subject[task]), int(program.device[task])
        if op < num_stages:
            moments[device].append((float(start[task]), 1))
        elif graph.ops[op].kind == last:
            moments[device].append((float(finish[task]), -1))
    peaks = []
    for own in moments:
        alive = most = 0
        for _, change in sorted((round(time, 6), change) for time, change in own):
            alive += change
            most = max(most, alive)
        peaks.append(most)
    return peaks


def unit_pipeline(name: str, num_ranks: int, num_micro: int) -> tuple[OpGraph, Cluster, Strategy]:
    """Equal stages, a full rank's forward, input and weight gradients a second each."""
    num_chunks = 1 if name in ("gpipe", "1f1b", "caps") else 2
    share = 1.0 / num_chunks
    splits = name in ("interleaved_zero_bubble", "zero_bubble_v", "dual_pipe_v")
    graph = stages_model(
        [(share, share, share)] * (num_ranks * num_chunks), num_micro, weights_first=not splits
    )
    cluster = row_of(num_ranks)
    ranks = [(rank,) for rank in range(num_ranks)]
    stages: tuple[tuple[int, ...], ...] = tuple(ranks)
    if name == "caps":
        schedule = caps_of_stages(ranks, num_ranks)
    else:
        stages = stages_of(name, ranks, num_chunks)
        schedule = stated_turns(
            name,
            ranks,
            num_chunks,
            num_micro,
            num_devices=num_ranks,
            chunk_starts=tuple(range(len(stages))),
        )
    return graph, cluster, pipeline_of(graph, cluster, stages, schedule)


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_micro", "bubble", "peaks"),
    [
        ("gpipe", 4, 8, 9.0, [8, 8, 8, 8]),
        ("gpipe", 8, 16, 21.0, [16] * 8),
        ("caps", 4, 8, 9.0, [4, 3, 2, 1]),
        ("1f1b", 4, 8, 9.0, [4, 3, 2, 1]),
        ("1f1b", 8, 16, 21.0, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("interleaved", 4, 8, 4.5, [11, 9, 7, 5]),
        ("interleaved", 8, 16, 10.5, [23, 21, 19, 17, 15, 13, 11, 9]),
        ("interleaved_zero_bubble", 4, 8, 1.5, [8] * 4),
        ("interleaved_zero_bubble", 8, 16, 3.5, [16] * 8),
        ("zero_bubble_v", 4, 8, 1.5, [8] * 4),
        ("zero_bubble_v", 8, 16, 3.5, [16] * 8),
        ("dual_pipe_v", 4, 8, 1.5, [9] * 4),
        ("dual_pipe_v", 8, 16, 3.5, [17] * 8),
    ],
)
def test_bubbles_and_peaks_are_those_of_the_field(
    name: str, num_ranks: int, num_micro: int, bubble: float, peaks: list[int]
) -> None:
    graph, cluster, strategy = unit_pipeline(name, num_ranks, num_micro)
    assert seconds_of(graph, cluster, strategy) - 3 * num_micro == pytest.approx(bubble, abs=1e-3)
    assert live_chunks(graph, cluster, strategy) == peaks


def message_case(rng: Random) -> tuple[int, int, float, float, float]:
    """Stages, micro-batches, forward, backward and message seconds."""
    num_stages = rng.randint(2, 6)
    forward = rng.choice([1.0, 2.0, 3.0])
    backward = forward * rng.choice([1.0, 2.0, 3.0])
    # No ties: a backward pass that arrives just when a forward pass may begin comes first.
    message = rng.choice([0.0, 0.1, 0.47, 0.93, 1.37]) * forward
    return num_stages, rng.randint(2, 14), forward, backward, message


def time_with_caps(
    num_stages: int, num_micro: int, forward: float, backward: float, message: float, caps: str
) -> tuple[float, list[int]]:
    """(seconds, most micro-batches alive on each stage) of equal stages and links."""
    graph = stages_model([(forward, backward / 2, backward / 2)] * num_stages, num_micro)
    cluster = row_of(num_stages, message_s=message)
    ranks = [(rank,) for rank in range(num_stages)]
    hidden = 2.0 * message / (forward + backward) if caps == "hidden" else 0.0
    schedule = PipelineSchedule()
    if caps == "stated":
        schedule = stated_turns("1f1b", ranks, 1, num_micro, num_devices=num_stages)
    elif caps != "none":
        schedule = caps_of_stages(ranks, num_stages, hidden=hidden)
    strategy = pipeline_of(graph, cluster, ranks, schedule)
    return seconds_of(graph, cluster, strategy), live_chunks(graph, cluster, strategy)


@pytest.mark.parametrize("seed", range(25))
def test_capped_pipelines_take_the_time_of_the_closed_form(seed: int) -> None:
    """T(1F1B) = (m+p-1)(F+B) + 2(p-1)c + 2c((m-2) - floor((m-2)/p)); caps that hide the links pay
    for them once; and no stage holds more than its cap."""
    p, m, forward, backward, message = case = message_case(Random(seed))
    eager = (m + p - 1) * (forward + backward) + 2 * (p - 1) * message
    waits = 2 * message * ((m - 2) - (m - 2) // p)
    stated, alive = time_with_caps(*case, "stated")
    assert alive == [min(m, p - stage) for stage in range(p)]
    seconds, held = time_with_caps(*case, "1f1b")
    assert seconds == pytest.approx(stated)
    assert held == alive
    # With slow links and backward passes of three times the forward ones the form is a bound.
    slack = 0.02 if backward == 3 * forward else 1e-3
    assert stated == pytest.approx(eager + waits, rel=slack)
    more = ceil(2 * message / (forward + backward) - 1e-9)
    seconds, alive = time_with_caps(*case, "hidden")
    assert seconds == pytest.approx(eager, rel=1e-3)
    caps = [(p - stage) + (p - 1 - stage) * more for stage in range(p)]
    assert all(held <= min(m, cap) for held, cap in zip(alive, caps, strict=True))
    seconds, _ = time_with_caps(*case, "none")
    assert seconds == pytest.approx(eager, rel=1e-3)


def test_a_cap_bounds_the_memory_of_a_stage() -> None:
    width, num_micro = 1_000_000, 16
    graph = stages_model([(1.0, 1.0, 1.0)] * 4, num_micro, width=width)
    cluster = row_of(4)
    ranks = [(rank,) for rank in range(4)]
    evaluator = Evaluator(graph, cluster)

    def peak(schedule: PipelineSchedule) -> list[float]:
        strategy = pipeline_of(graph, cluster, ranks, schedule)
        return [
            round(value / (4.0 * width), 1)
            for value in evaluator.simulate(evaluator.encode(strategy), Order.RANK)[1]
        ]

    free, capped = peak(PipelineSchedule()), peak(caps_of_stages(ranks, 4))
    # Every device has the batch. A stage holds one value for each micro-batch under way, and for a
    # moment what it reads and makes on its way back.
    assert capped[1] - num_micro <= 3 + 3
    assert free[1] - num_micro > 2 * (capped[1] - num_micro)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble_v", "dual_pipe_v"])
def test_stated_turns_equal_the_slow_reference(name: str) -> None:
    rng = Random(name)
    num_chunks = 1 if name == "1f1b" else 2
    ranks = [(rank,) for rank in range(3)]
    stages = stages_of(name, ranks, num_chunks)
    seconds = [(rng.random(), rng.random(), rng.random()) for _ in stages]
    graph, cluster = stages_model(seconds, 6), row_of(3, message_s=0.2)
    starts = tuple(range(len(stages)))
    schedule = stated_turns(name, ranks, num_chunks, 6, num_devices=3, chunk_starts=starts)
    strategy = replace(pipeline_of(graph, cluster, stages, schedule), step_barrier=False)
    evaluator = Evaluator(graph, cluster)
    choice = encode(strategy, evaluator.tables, evaluator.channels, num_steps=2)
    program, start, finish = evaluator.timings(choice, Order.FIFO)
    tasks = reference.price(program, graph, cluster, evaluator.cost_model)
    reference.assert_legal(tasks, start, finish)
    slow = reference.simulate(tasks, Order.FIFO, is_in_turn=program.is_in_turn)
    np.testing.assert_allclose((start, finish), slow, rtol=1e-9)


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble_v", "dual_pipe_v"])
def test_stated_turns_survive_a_file(name: str) -> None:
    _, _, strategy = unit_pipeline(name, 2, 4)
    assert strategy_from_dict(strategy_to_dict(strategy)) == strategy


def test_files_from_before_schedules_are_read() -> None:
    _, _, strategy = unit_pipeline("caps", 2, 4)
    record = strategy_to_dict(strategy)
    record["schema_version"] = 1
    del record["schedule"]
    assert strategy_from_dict(record) == replace(strategy, schedule=PipelineSchedule())


def test_turns_that_wait_for_each_other_are_refused() -> None:
    graph, cluster, strategy = unit_pipeline("interleaved", 2, 4)
    turns = strategy.schedule.turns
    backward_first = tuple(sorted(turns[1], key=lambda turn: -turn.work))
    schedule = replace(strategy.schedule, turns=(turns[0], backward_first))
    with pytest.raises(StrategyError, match="the turns of the schedule wait for each other"):
        seconds_of(graph, cluster, replace(strategy, schedule=schedule))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"in_flight": ((1, 1, 1),)}, "in_flight has 3 caps for device 0, which has 2 chunks"),
        ({"in_flight": ((),) * 3}, "in_flight names 3 devices; the cluster has 2"),
        ({"turns": ((),)}, "the turns of device 0 lack micro-batch 0, chunk 0, forward"),
        ({"splits_backward": True}, "lack micro-batch 0, chunk 0, weights"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(change: dict[str, object], text: str) -> None:
    graph, cluster, strategy = unit_pipeline("interleaved", 2, 4)
    wrong = replace(strategy, schedule=replace(strategy.schedule, **change))  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=text):
        wrong.check(graph, cluster)


def test_negative_caps_and_repeated_turns_are_refused() -> None:
    with pytest.raises(StrategyError, match="caps must be 0"):
        PipelineSchedule(in_flight=((-1,),))
    turn = Turn(0, 0, Pass.FORWARD)
    with pytest.raises(StrategyError, match="the same turn twice"):
        PipelineSchedule(turns=((turn, turn),))


def test_chunks_begin_where_stages_do() -> None:
    assert device_chunks([(0,), (0,)], 1) == ((range(0, 2),),)
    assert device_chunks([(0,), (0,)], 1, (1,)) == ((range(0, 1), range(1, 2)),)


def test_split_weight_gradients_fill_the_bubble() -> None:
    """One chunk per device: 3(p-1) seconds of bubble become p-1 (Qi et al. 2024, ZB-H2)."""
    num_ranks, num_micro = 4, 12
    graph = stages_model([(1.0, 1.0, 1.0)] * num_ranks, num_micro, weights_first=False)
    cluster = row_of(num_ranks)
    ranks = [(rank,) for rank in range(num_ranks)]
    late = PipelineSchedule(splits_backward=True)
    filled = seconds_of(graph, cluster, pipeline_of(graph, cluster, ranks, late))
    assert filled - 3 * num_micro == pytest.approx(num_ranks - 1, abs=1e-3)


def test_split_weight_gradients_of_one_micro_batch_run_beside_each_other() -> None:
    """p stages: all p F and p B follow one another, but only the weights of the first one."""
    num_ranks = 4
    graph = stages_model([(1.0, 1.0, 1.0)] * num_ranks, 1, weights_first=True)
    cluster = row_of(num_ranks)
    ranks = [(rank,) for rank in range(num_ranks)]
    plain = seconds_of(graph, cluster, pipeline_of(graph, cluster, ranks, PipelineSchedule()))
    assert plain == pytest.approx(3 * num_ranks, abs=1e-3)
    late = PipelineSchedule(splits_backward=True)
    filled = seconds_of(graph, cluster, pipeline_of(graph, cluster, ranks, late))
    assert filled == pytest.approx(2 * num_ranks + 1, abs=1e-3)


def waits_for(
    decisions: Sequence[Decision], micro_batches: tuple[tuple[int, ...], ...], device: int
) -> dict[int, set[int]]:
    """Under a cap of 1: micro-batches whose ops on a device the first op of each one waits for."""
    graph, cluster = linear_chain(("a", "b"), batch_size=4), row_of(2)
    strategy = strategy_of(graph, cluster, decisions, micro_batches=micro_batches)
    capped = replace(strategy, schedule=PipelineSchedule(in_flight=((1,), (1,))))
    program = lower(graph, cluster, capped)
    ops: dict[int, list[int]] = {}
    for task in range(program.num_tasks):
        if program.kind[task] == TaskKind.COMPUTE and program.device[task] == device:
            ops.setdefault(int(program.micro[task]), []).append(task)
    last = {own[-1]: micro for micro, own in ops.items()}
    return {
        micro: {last[task] for task in program.dependencies(own[0]) if task in last}
        for micro, own in ops.items()
    }


def test_a_cap_counts_micro_batches_with_samples() -> None:
    """Two replicas that take turns have two micro-batches each."""
    both = Decision(devices=(0, 1), shares=(2, 2))
    table = ((1, 0, 1, 0), (0, 1, 0, 1))
    assert waits_for([both, both], table, 0) == {0: set(), 2: {0}}
    assert waits_for([both, both], table, 1) == {1: set(), 3: {1}}


def test_a_cap_binds_where_the_first_group_of_a_chunk_has_no_samples() -> None:
    first, second = (Decision(devices=(0, 1), shares=shares) for shares in ((4, 0), (0, 4)))
    table = ((1, 1, 1, 1), (0, 0, 0, 0))
    expected = {0: set(), 1: {0}, 2: {1}, 3: {2}}
    assert waits_for([first, second], table, 0) == expected
    assert waits_for([first, second], table, 1) == expected
