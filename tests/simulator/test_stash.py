"""Pipelines that do not wait: the closed form against a loop over calls, memory by hand."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.graph.grouping import group_ops
from heterog.lowering import lower_to_tape, make_scratch
from heterog.lowering.tape import make_tape
from heterog.modes.stash.paces import StagePace, stage_pace
from heterog.modes.stash.value import WeightStash, is_of_backward
from heterog.pricing.intervals import Noise
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.strategies import cluster, graph_of, strategy_of
from tests.simulator.builders import cluster_of
from tests.thorough import cases


def pace_of(
    forward_s: list[float],
    backward_s: list[float],
    there_s: list[float],
    back_s: list[float],
    num_micro: int = 1,
) -> StagePace:
    """A chain of stages with messages between neighbours."""
    return StagePace(
        num_micro=num_micro,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        forward_lag_s={(n, n + 1): seconds for n, seconds in enumerate(there_s)},
        backward_lag_s={(n + 1, n): seconds for n, seconds in enumerate(back_s)},
    )


def by_calls(
    pace: StagePace, boundary_steps: int, num_micro_batches: int, end_s: list[float]
) -> float:
    """Seconds of a step in the long run, with every stage's passes one after another.

    A message leaves when it is made, its receiver has begun to receive it, and the one before it
    has arrived.

    Args:
        pace: The passes; those of a batch's end are not in them.
        boundary_steps: Micro-batches that each boundary adds.
        num_micro_batches: Number of micro-batches in all.
        end_s: Seconds of what each stage does behind a batch's last backward pass.
    """
    count, num_micro = pace.num_stages, pace.num_micro
    behind = [boundary_steps * (count - 1 - stage) for stage in range(count)]
    forward = np.zeros((count, num_micro_batches))  # end, by micro-batch
    backward = np.zeros((count, num_micro_batches))
    inputs, gradients = np.zeros((2, count, num_micro_batches + 1))  # arrival
    wants_inputs, wants_gradients = np.zeros((2, count, num_micro_batches + 1))
    for number in range(num_micro_batches):
        free = [0.0] * count
        for stage in reversed(range(count)):
            free[stage] = forward[stage, number - 1] if number else 0.0
            # What the stage begins to receive: of this micro-batch, or of the next one.
            if number % num_micro == 0:
                wants_inputs[stage, number] = free[stage]
            if (number + 1) % num_micro:
                wants_inputs[stage, number + 1] = free[stage]
            wants_gradients[stage, max(number - behind[stage], 0)] = free[stage]
            before = number - 1 - behind[stage]
            if before < 0:
                continue
            begin = free[stage]
            if stage + 1 < count:
                lag = pace.backward_lag_s[stage + 1, stage]
                leaves = max(backward[stage + 1, before], wants_gradients[stage, before])
                leaves = max(leaves, gradients[stage, before - 1] if before else 0.0)
                begin = max(begin, leaves + lag)
                gradients[stage, before] = leaves + lag
            free[stage] = backward[stage, before] = begin + pace.backward_s[stage]
            if before % num_micro == num_micro - 1:
                free[stage] += end_s[stage]
        for stage in range(count):
            begin = free[stage]
            if stage:
                lag = pace.forward_lag_s[stage - 1, stage]
                leaves = max(forward[stage - 1, number], wants_inputs[stage, number])
                leaves = max(leaves, inputs[stage, number - 1] if number else 0.0)
                begin = max(begin, leaves + lag)
                inputs[stage, number] = leaves + lag
            forward[stage, number] = begin + pace.forward_s[stage]
    half = num_micro_batches // 2 // num_micro * num_micro
    took_s = float(forward[0, -1] - forward[0, half - 1])
    return took_s / (num_micro_batches - half) * num_micro


@pytest.mark.parametrize("seed", range(cases(40, 10)))
def test_a_step_is_the_slowest_circle_of_stages(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(2, 5)

    def drawn(number: int, most: float) -> list[float]:
        return [rng.uniform(0.0, most) for _ in range(number)]

    most = rng.choice([0.0, 0.3, 5.0])
    pace = pace_of(
        drawn(count, 1.0), drawn(count, 2.0), drawn(count - 1, most), drawn(count - 1, most)
    )
    for boundary_steps in (0, 1, 2, 3):
        found = pace.step_s(WeightStash(boundary_steps=boundary_steps))
        wanted = by_calls(pace, boundary_steps, 2400, [0.0] * count)
        assert found == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("seed", range(cases(20, 5)))
def test_the_end_of_a_batch_and_its_first_inputs_hold_up_stages(seed: int) -> None:
    """By the loop; and no shorter than where the end comes in parts."""
    rng = Random(seed)
    count, num_micro = rng.randint(2, 4), rng.randint(2, 6)

    def drawn(number: int, most: float) -> list[float]:
        return [rng.uniform(0.0, most) for _ in range(number)]

    most = rng.choice([0.0, 0.3, 5.0])
    end_s = drawn(count, rng.choice([0.5, 5.0]))
    alone = pace_of(
        drawn(count, 1.0),
        drawn(count, 2.0),
        drawn(count - 1, most),
        drawn(count - 1, most),
        num_micro,
    )
    # As a step on its own has them: in a pass's seconds, and behind it what it sends.
    parts = tuple(seconds / num_micro for seconds in end_s)
    in_parts = replace(
        alone,
        backward_s=tuple(a + b for a, b in zip(alone.backward_s, parts, strict=True)),
        backward_lag_s={
            (src, dst): lag - parts[src] for (src, dst), lag in alone.backward_lag_s.items()
        },
    )
    for boundary_steps in (0, 1, 3):
        stash = WeightStash(boundary_steps=boundary_steps)
        wanted = by_calls(alone, boundary_steps, 1440, end_s)
        assert in_parts.step_s(stash) * 0.995 <= wanted
        found = replace(in_parts, end_s=tuple(end_s)).step_s(stash)
        assert found == pytest.approx(wanted, rel=1e-2)


def test_a_stage_waits_for_one_that_updates_though_both_are_equally_slow() -> None:
    """Two stages, a boundary of one micro-batch: while the first one updates, the last one idles.

    The last one takes 4 for 4 micro-batches, the first one 3.6 and 0.4 for an update. With two
    micro-batches through both, one of them behind the update, and two more on the last stage a
    step takes (0.9 + 1 + 0.4) + 1 + 1.
    """
    pace = StagePace(
        forward_s=(0.4, 0.5),
        backward_s=(0.6, 0.5),
        forward_lag_s={(0, 1): 0.0},
        backward_lag_s={(1, 0): 0.0},
        num_micro=4,
        end_s=(0.4, 0.0),
    )
    assert pace.step_s(WeightStash(boundary_steps=1)) == pytest.approx(4.3)
    assert replace(pace, end_s=()).step_s(WeightStash(boundary_steps=1)) == pytest.approx(4.0)


def test_inputs_of_a_batch_begin_to_come_when_the_batch_before_is_through() -> None:
    """Two stages that wait for messages of 2 forth and 1 back, however old weights may be.

    In whole batches the last one's forward pass of 0.5 is between two inputs: 2.5. Of 4
    micro-batches all inputs but the first come behind each other: 4 times 2, and 0.5. Gradients
    come behind each other always: with 2 forth and 3 back a step takes 3, and 4 times 3.
    """
    old = WeightStash(boundary_steps=50)
    passes = [0.25, 0.5], [0.25, 0.5]
    assert pace_of(*passes, [2.0], [1.0]).step_s(old) == pytest.approx(2.5)
    assert pace_of(*passes, [2.0], [1.0], num_micro=4).step_s(old) == pytest.approx(8.5)
    assert pace_of(*passes, [2.0], [3.0]).step_s(old) == pytest.approx(3.0)
    assert pace_of(*passes, [2.0], [3.0], num_micro=4).step_s(old) == pytest.approx(12.0)


def test_without_messages_a_step_is_the_slowest_stage_and_with_k_0_all_of_them() -> None:
    pace = pace_of([1.0, 2.0, 0.5], [2.0, 3.5, 1.0], [0.0, 0.0], [0.0, 0.0])
    assert pace.step_s(WeightStash(boundary_steps=1)) == 5.5
    assert pace.step_s(WeightStash(boundary_steps=7)) == 5.5
    assert pace.step_s(WeightStash(boundary_steps=0)) == 10.0


def pipeline(name: str, boundary_steps: int, num_micro: int = 1) -> Strategy:
    graph = graph_of(name)
    count = group_ops(graph).num_groups
    chain = [Decision(devices=(device,), shares=(8,)) for device in range(3)]
    sizes, idle = split_evenly(8, num_micro), (0,) * num_micro
    exact = strategy_of(
        graph,
        [chain[group * 3 // count] for group in range(count)],
        micro_batches=(sizes, idle, idle) if num_micro > 1 else (),
    )
    return exact.with_mode(WeightStash(boundary_steps=boundary_steps))


@pytest.mark.parametrize(("name", "num_micro"), [("normalised", 1), ("gpt", 3)])
def test_the_passes_of_a_stage_take_what_its_device_computes(name: str, num_micro: int) -> None:
    """Though running statistics are written at the end of a step on its own."""
    evaluator = Evaluator(graph_of(name), cluster())
    strategy = pipeline(name, 1, num_micro)
    choice = evaluator.encode(strategy)
    program, start, finish = evaluator.referee_timings(choice, Order.FIFO)
    pace = stage_pace(evaluator, evaluator.encode(strategy))[0]
    for stage in range(3):
        on = (program.device == stage) & (program.channel < 0)
        late = is_of_backward(program.kind, program.subject, evaluator.tables)
        for is_late, found in ((False, pace.forward_s), (True, pace.backward_s)):
            own = on & (late == is_late)
            wanted = float((finish - start)[own].sum())
            assert num_micro * found[stage] == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("num_micro", [1, 3])
def test_a_boundary_without_staleness_is_one_micro_batch_after_another(num_micro: int) -> None:
    stashed = pipeline("gpt", 0, num_micro)
    evaluator = Evaluator(graph_of("gpt"), cluster())
    one_by_one = replace(
        replace(stashed, schedule=stashed.own_mode(WeightStash).schedule(stashed, 3)), modes=()
    )
    exact = evaluator.referee(one_by_one, Order.FIFO)
    found = evaluator.referee(stashed, Order.FIFO)
    assert found.step_time_s == pytest.approx(exact.step_time_s, rel=1e-2)


def test_memory_grows_by_weights_and_saved_values_for_each_step_behind() -> None:
    """Stage s keeps 2 K and K more versions of its weights, and of what batches have left."""
    evaluator = Evaluator(graph_of("mlp"), cluster())
    peaks = [
        np.array(evaluator.referee(pipeline("mlp", steps), Order.FIFO).peak_memory_bytes)
        for steps in (1, 2, 3)
    ]
    each = (peaks[1] - peaks[0]) / 1.04
    np.testing.assert_allclose((peaks[2] - peaks[1]) / 1.04, each, atol=2)
    assert each[2] == 0
    strategy, graph = pipeline("mlp", 1), graph_of("mlp")
    group = group_ops(graph).group
    for device, behind in ((0, 2), (1, 1)):
        weights = sum(
            float(graph.tensor_bytes[parameter])
            for op, parameter, _ in graph.updates
            if strategy.decisions[int(group[op])].devices == (device,)
        )
        assert each[device] > behind * weights


def test_memory_of_micro_batches_is_that_of_those_behind_and_of_versions_of_weights() -> None:
    """With 4, K = 1 to 3 makes the first stage 2, 4 and 6 of them and 1, 1 and 2 updates late.

    So there are 1, 2 and 2 more batches than its own when the next one has come.
    """
    graph, evaluator = graph_of("mlp"), Evaluator(graph_of("mlp"), cluster())
    peaks = [
        np.array(evaluator.referee(pipeline("mlp", steps, 4), Order.FIFO).peak_memory_bytes) / 1.04
        for steps in (1, 2, 3)
    ]
    group = group_ops(graph).group
    weights = [
        sum(
            float(graph.tensor_bytes[parameter])
            for op, parameter, _ in graph.updates
            if pipeline("mlp", 1).decisions[int(group[op])].devices == (device,)
        )
        for device in range(3)
    ]
    batch = batch_bytes("mlp")
    two_more, two_more_and_weights = peaks[1] - peaks[0], peaks[2] - peaks[1]
    two_more[0] -= batch
    assert two_more_and_weights[0] - two_more[0] == pytest.approx(weights[0], abs=4)
    np.testing.assert_allclose(two_more_and_weights[1:], two_more[1:], atol=4)
    whole = evaluator.referee(pipeline("mlp", 1), Order.FIFO).peak_memory_bytes
    of_whole = np.array(evaluator.referee(pipeline("mlp", 2), Order.FIFO).peak_memory_bytes)
    saved = (of_whole - whole)[0] / 1.04 / 2 - weights[0] - batch
    assert two_more[0] == pytest.approx(saved / 2, abs=4)  # half of the batch


@pytest.mark.parametrize(("steps", "num_micro"), [(1, 1), (3, 1), (1, 4), (2, 4), (3, 4)])
def test_batches_that_are_under_way_or_have_come_are_kept(steps: int, num_micro: int) -> None:
    """Stage s is behind by D = K (2 - s) micro-batches; all ranks keep ceil((D + 1) / m) more."""
    evaluator = Evaluator(graph_of("mlp"), cluster())
    choice = evaluator.encode(pipeline("mlp", steps, num_micro))
    tables = evaluator.tables_of(choice)
    tape = make_tape(4096, len(tables.parameter_bytes), 3)
    tape = lower_to_tape(tables, choice, make_scratch(tables, 3), tape)
    (stash,) = choice.modes
    without = stash.kept_bytes(tape, tables._replace(input_bytes_per_sample=0.0), choice)
    batches = np.asarray(stash.kept_bytes(tape, tables, choice) - without) / batch_bytes("mlp")
    wanted = [math.ceil((steps * (2 - stage) + 1) / num_micro) for stage in range(3)]
    assert batches.tolist() == pytest.approx(wanted)


def test_slow_links_bind_whatever_the_staleness() -> None:
    """What goes from the first stage to the second in a step holds the first one's line."""
    graph, slow = graph_of("mlp"), cluster_of((1e-5, ["T4"]), (1.0, ["T4"]), (1.0, ["T4"]))
    evaluator = Evaluator(graph, slow)
    program = evaluator.program(evaluator.encode(on(pipeline("mlp", 1), slow)))
    sent = sum(
        float(program.num_bytes[task])
        for task in range(program.num_tasks)
        if program.channel[task] >= 0
        and program.channels[int(program.channel[task])].devices == (0, 1)
    )
    assert sent > 0
    for steps in (50, 100):
        found = evaluator.referee(on(pipeline("mlp", steps), slow), Order.FIFO).step_time_s
        assert found == pytest.approx(sent / (1e-5 * 1e9 / 8), rel=1e-2)
    exact = evaluator.referee(on(replace(pipeline("mlp", 1), modes=()), slow), Order.FIFO)
    assert exact.step_time_s > 1.5 * found


def test_under_noise_steps_that_overlap_go_with_the_speeds_of_their_tasks() -> None:
    """A tenth slower everywhere is a tenth slower; never less than no time."""
    evaluator = Evaluator(graph_of("gpt"), cluster())
    choice = evaluator.encode(pipeline("gpt", 3))
    assert choice.modes[0].more_s < 0
    nominal = evaluator.evaluate(choice, Order.FIFO).step_time_s
    resource = np.full((1, len(cluster().resources)), 1.1)
    slower = Noise(device=np.full((1, 3), 1.1), resource=resource)
    found = evaluator.seconds_under_noise(choice, Order.FIFO, slower)
    assert found[0] == pytest.approx(1.1 * nominal, rel=0.05)


def batch_bytes(name: str) -> float:
    graph = graph_of(name)
    return float(sum(graph.tensor_bytes[each] for each in graph.batch))


def on(strategy: Strategy, target: Cluster) -> Strategy:
    return replace(strategy, cluster=target.fingerprint)
