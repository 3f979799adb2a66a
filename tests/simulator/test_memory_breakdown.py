"""Breakdowns of peak memory by hand and against a slow reference."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.cluster.topology import Execution
from heterog.graph.op_graph import Phase
from heterog.lowering.program import LAST_OP_KIND, FloatArray, Program
from heterog.lowering.resident import held_bytes
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator, Outcome
from heterog.simulator.memory_breakdown import DeviceMemory, Fit, MemoryKind, memory_fit
from heterog.strategy.strategy import Decision, Sync
from tests.simulator.builders import cluster_of, linear_chain, random_case, strategy_of
from tests.simulator.reference import made_inside, running

WIDTH = 1024
WEIGHT = 4 * WIDTH * WIDTH  # bytes of a weight
SAMPLE = 4 * WIDTH  # bytes of one sample's activation
ADAM = 2  # state bytes per parameter byte


def shown(device: DeviceMemory) -> dict[str, int]:
    """Bytes by kind, without margin and what is zero."""
    return {str(kind): size for kind, size in device.parts if size and kind != MemoryKind.MARGIN}


def test_one_device_by_hand() -> None:
    graph = linear_chain(("a", "b"))
    cluster = cluster_of((10.0, ["T4"]))
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(8,)))
    (device,) = memory_fit(Evaluator(graph, cluster), strategy, Order.FIFO).devices
    # At the last weight gradient: both of them and the gradient of a's output are there.
    assert shown(device) == {
        "parameters": 2 * WEIGHT,
        "optimizer state": 2 * WEIGHT * ADAM,
        "gradients": 2 * WEIGHT,
        "backward": 8 * SAMPLE,
        "batch": 8 * SAMPLE,
    }
    needed = 2 * WEIGHT * (1 + ADAM) + 2 * WEIGHT + 16 * SAMPLE
    assert device.peak_bytes == round(needed * (1 + MEMORY_MARGIN))
    assert device.bytes_of(MemoryKind.MARGIN) == device.peak_bytes - needed
    assert device.lacking_bytes == 0


def test_a_server_receives_into_communication_buffers() -> None:
    graph = linear_chain(("a",), batch_size=6)
    cluster = cluster_of((10.0, ["T4"]), (10.0, ["T4"]))
    decision = Decision(devices=(0, 1), shares=(3, 3), sync=Sync.PARAMETER_SERVER)
    strategy = strategy_of(graph, cluster, decision, homes=0)
    server, worker = memory_fit(Evaluator(graph, cluster), strategy, Order.FIFO).devices
    # Its own gradient, the one that was pushed, and their sum.
    assert server.bytes_of(MemoryKind.COMMUNICATION) == 2 * WEIGHT
    assert server.bytes_of(MemoryKind.GRADIENTS) == WEIGHT
    assert server.bytes_of(MemoryKind.OPTIMIZER_STATE) == ADAM * WEIGHT
    assert worker.bytes_of(MemoryKind.OPTIMIZER_STATE) == 0


def test_the_fullest_device_is_the_one_that_lacks_most() -> None:
    def device(name: str, peak: int, usable: int) -> DeviceMemory:
        return DeviceMemory(
            device=name,
            device_type="T4",
            peak_bytes=peak,
            usable_bytes=usable,
            parts=(),
        )

    room, crowded, short = device("a", 1, 10), device("b", 9, 10), device("c", 30, 29)
    assert Fit(devices=(room, crowded)).fullest is crowded
    assert Fit(devices=(room, crowded)).is_ok
    fit = Fit(devices=(crowded, short, room))
    assert not fit.is_ok
    assert fit.fullest is short
    assert short.lacking_bytes == 1


def slow_kind(program: Program, tables: GraphTables, phases: list[Phase], buffer: int) -> str:
    """Kind of a buffer from its maker alone."""
    task = int(program.buffer_maker[buffer])
    if program.kind[task] > LAST_OP_KIND:
        return "communication"
    op = int(program.subject[task])
    value = int(tables.value_start[op]) + buffer - int(program.buffer_start[task])
    if value in tables.parameter_gradient.tolist():
        return "gradients"
    return "activations" if phases[int(tables.op_id[op])] == Phase.FORWARD else "backward"


def slow_breakdowns(
    program: Program,
    start: FloatArray,
    finish: FloatArray,
    kinds: list[str],
    device: int,
    inside: list[float],
) -> list[dict[str, float]]:
    """Bytes by kind at every moment at which a device is within a byte of its fullest."""
    last_use = [finish[maker] for maker in program.buffer_maker]
    for task in range(program.num_tasks):
        for buffer in program.read_buffer[program.read_start[task] : program.read_start[task + 1]]:
            last_use[buffer] = max(last_use[buffer], finish[task])
    changes = []
    for buffer, maker in enumerate(program.buffer_maker):
        size = float(program.buffer_bytes[buffer])
        if program.buffer_device[buffer] == device:
            first, _ = running(program, start.tolist(), finish.tolist(), device, start[maker])
            _, last = running(program, start.tolist(), finish.tolist(), device, last_use[buffer])
            changes.append((first, 1, size, kinds[buffer]))
            changes.append((last, 0, -size, kinds[buffer]))
    for task, size in enumerate(inside):
        if program.device[task] == device:
            changes.append((float(start[task]), 1, size, "workspace"))
            changes.append((float(finish[task]), 0, -size, "workspace"))
    live: dict[str, float] = dict.fromkeys([*kinds, "workspace"], 0.0)
    moments = [dict(live)]
    for _, _, change, kind in sorted(changes):
        live[kind] += change
        moments.append(dict(live))
    most = max(sum(moment.values()) for moment in moments)
    return [moment for moment in moments if sum(moment.values()) > most - 1.0]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_parts_add_up_and_equal_the_slow_reference(seed: int) -> None:
    rng = Random(seed)
    evaluator, choice = random_case(rng)
    order = rng.choice(list(Order))
    fit = memory_fit(evaluator, choice, order)
    reported = evaluator.referee(choice, order)
    assert tuple(device.peak_bytes for device in fit.devices) == reported.peak_memory_bytes
    assert fit.is_ok == (reported.outcome != Outcome.OUT_OF_MEMORY)  # whatever else forbids it
    tables = graph_tables(evaluator.graph)
    phases = [op.phase for op in evaluator.graph.ops]
    schedules = [evaluator.timings(choice, order), evaluator.referee_timings(choice, order)]
    program = schedules[0][0]
    inside = made_inside(program, evaluator.inside(tables, choice, held_bytes(tables, choice)))
    kinds = [slow_kind(program, tables, phases, b) for b in range(len(program.buffer_device))]
    for index, device in enumerate(fit.devices):
        assert sum(size for _, size in device.parts) == device.peak_bytes
        without = device.peak_bytes - device.bytes_of(MemoryKind.MARGIN)
        assert device.peak_bytes == pytest.approx(without * (1 + MEMORY_MARGIN), abs=8.0)
        staying = ("parameters", "optimizer state", "batch", "constants")
        resident = sum(size for kind, size in device.parts if kind in staying)
        assert resident == pytest.approx(program.resident_bytes[index], abs=4.0)
        alive = {str(kind): size for kind, size in device.parts}
        moments = [m for s in schedules for m in slow_breakdowns(*s, kinds, index, inside)]
        assert any(
            all(abs(alive[kind] - size) <= 1.0 for kind, size in moment.items())
            for moment in moments
        )


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_parts_of_a_compiled_step_add_up(seed: int) -> None:
    rng = Random(seed)
    evaluator, choice = random_case(rng, Execution.COMPILED)
    order = rng.choice(list(Order))
    for device in memory_fit(evaluator, choice, order).devices:
        without = device.peak_bytes - device.bytes_of(MemoryKind.MARGIN)
        assert device.peak_bytes == pytest.approx(without * (1 + MEMORY_MARGIN), abs=8.0)
