"""Measures the ops and the memory of a training step on the device of this process.

Ops are measured inside a real training step, not alone in a loop, so that caches hold what they
hold in training. The step is the executor's own, of one device with a part of the batch in data
parallelism, with a communicator that sends nothing.

If steps are compiled, whole segments are measured. The ops of a segment then share its seconds in
proportion to the seconds that they take when run by themselves.

``peak_bytes`` measures the most bytes that a rank holds during a step.
"""

import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from heterog.cluster.hardware import Device, DeviceType, Host, Link
from heterog.cluster.schema import is_cpu
from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import axis_plan
from heterog.graph.batch_plan import batch_plan
from heterog.graph.capture import CapturedStep
from heterog.graph.op_graph import OpGraph
from heterog.graph.optimizer_probe import group_numbers, parameter_groups
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import Program, TaskKind
from heterog.lowering.tables import graph_tables
from heterog.pricing.op_fits import STEP, OpMeasurement, op_kind, op_signature
from heterog.runtime.accelerators import (
    CPU,
    has_accelerator,
    is_accelerated,
    keep_freed_memory,
    own_device,
    queue_mark,
    synchronize,
)
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.step.alike import batch_by_tensor
from heterog.runtime.step.collectives import Communicator, Pending
from heterog.runtime.step.compiled import Compiler
from heterog.runtime.step.executor import StepExecutor
from heterog.runtime.step.local_op import local_ops
from heterog.runtime.step.optimizer import Masters, make_optimizer
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recorder import Recorder
from heterog.runtime.step.special_ops import RandomStream
from heterog.runtime.step.step_order import step_order
from heterog.runtime.step.whole_model import ModelPart, other_inputs
from heterog.strategy.strategy import REPLICATED, Decision, Strategy


def peak_bytes(step: DeployedStep, batch: Any) -> int:
    """Most bytes that this rank's tensors held during one more step; every rank has to call it.

    Without a step barrier two steps are run, because the second finishes updates of the first.

    On a GPU the allocator counts. On a CPU every allocation and release of the tensor allocator,
    those inside kernels included, is added to the tensors that exist all the time: parameters,
    optimizer state, buffers and this rank's part of the batch.
    """
    step.flush()
    highest = peak_during(lambda: _run(step, batch))
    return highest if has_accelerator() else _resident_bytes(step) + highest


def _run(step: DeployedStep, batch: Any) -> None:
    step(batch)
    if not step.plan.strategy.step_barrier:
        step(batch)
        step.flush()


def peak_during(call: Callable[[], object]) -> int:
    """Most bytes that tensors held during a call.

    On a GPU this is the total; on a CPU it is the increase over the beginning.
    """
    if has_accelerator():
        torch.accelerator.reset_peak_memory_stats()
        call()
        return torch.accelerator.max_memory_allocated()
    activities = [ProfilerActivity.CPU]
    with _without_notes(), profile(activities=activities, profile_memory=True) as recorded:
        call()
    results = recorded.profiler
    assert results is not None
    assert results.kineto_results is not None
    changes = sorted(_allocations(results.kineto_results.experimental_event_tree()))
    held = highest = 0
    for _, num_bytes in changes:
        held += num_bytes
        highest = max(highest, held)
    return highest


@contextmanager
def _without_notes() -> Iterator[None]:
    """Drop the lines in which torch's profiler reports that it begins, ends, or began late.

    Its C++ side writes them directly to the process's standard error. All other output of that
    time is passed on at the end.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            said.seek(0)
            for line in said:
                if not _NOTE.search(line):
                    os.write(2, line)


_NOTE = re.compile(
    rb"ProfilerHandler\.cpp:\d+\] profiler_(start|stop)"
    rb"|Memory block of unknown size was allocated before the profiling started"
)


def _allocations(events: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Time and number of bytes of all allocations; frees are negative."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def _resident_bytes(step: DeployedStep) -> int:
    """Bytes of all tensors that exist between steps."""
    graph = step.captured.graph
    tensors: list[Tensor] = [*step.model.parameters(), *step.model.buffers()]
    tensors += step.part.slices.own.values()
    tensors += step.masters.stepped
    for state in step.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    samples = max(
        (
            dict(zip(decision.devices, decision.shares, strict=True)).get(step.rank, 0)
            for decision in step.plan.strategy.decisions
        ),
        default=0,
    )
    whole = sum(int(graph.tensor_bytes[t]) for t in graph.batch)
    return stored_bytes(tensors) + whole * samples // graph.batch_size


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of storage of tensors; shared storage counts once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(len(each) for each in storages.values())


_WARM_UP_STEPS = 1
_LEAST_STEPS = 2
_LEAST_SECONDS = 1.0  # long against the 100 ms after which a CPU quota is renewed
_COPIES = (TaskKind.FLATTEN, TaskKind.ACCUMULATE, TaskKind.SUM)
_UPDATE_REPEATS = 5
_Row = Callable[..., OpMeasurement]
"""Makes a row of this device, model and number of samples."""


class LoopbackCommunicator(Communicator):
    """A communicator that sends nothing; received tensors keep their present values."""

    def __init__(self) -> None:
        super().__init__(0, ())

    def send(
        self, tensor: Tensor, dst: int, tag: int, devices: tuple[int, ...] | None = None
    ) -> None:
        """Do nothing."""

    def receive(
        self, like: Tensor, src: int, tag: int, devices: tuple[int, ...] | None = None
    ) -> Pending:
        """Return ``like`` unchanged."""
        return Pending(None, lambda: like)

    def all_reduce(self, tensor: Tensor, devices: tuple[int, ...]) -> Pending:
        """Return the tensor unchanged."""
        return Pending(None, lambda: tensor)


class _Clock(Recorder):
    """Records the seconds of every task of a step, and ignores the optimizer.

    On a CPU with one thread, it divides the thread's CPU time by the share of a core that it may
    use. A quota stops the process for tens of milliseconds at any place; the division spreads the
    pauses over all tasks, as many steps would. On a GPU, it uses events.
    """

    def __init__(self, device: torch.device, quota: float | None) -> None:
        self._device = device
        self._has_queue = is_accelerated(device)
        self._use_cpu_time = not self._has_queue and torch.get_num_threads() == 1
        self.stretch = 1.0 / quota if quota and self._use_cpu_time else 1.0
        self.own: dict[int, list[Any]] = {}
        self._begin: Any = None

    def _now(self) -> Any:
        if self._has_queue:
            return queue_mark(self._device)
        return time.thread_time() if self._use_cpu_time else time.perf_counter()

    def begin_task(self, task: int) -> None:
        """Note the start of a task."""
        self._begin = self._now()

    def end_task(self, task: int) -> None:
        """Note the end of a task."""
        end = self._now()
        self.own.setdefault(task, []).append((self._begin, end))

    def seconds(self) -> dict[int, list[float]]:
        """Seconds of every call, by task."""
        if self._has_queue:
            synchronize(self._device)
            return {
                task: [begin.elapsed_time(end) * 1e-3 for begin, end in calls]
                for task, calls in self.own.items()
            }
        return {
            task: [(end - begin) * self.stretch for begin, end in calls]
            for task, calls in self.own.items()
        }


def profile_ops(
    captured: CapturedStep,
    workload: Workload,
    samples: int,
    device_type: str,
    quota: float | None = None,
    compiles: bool = False,
) -> list[OpMeasurement]:
    """Measure the ops of a step on a part of the batch, on this process's device.

    Needs a process group of this process alone.

    Args:
        captured: The step.
        workload: The workload that it was captured from.
        samples: Local share; at most the batch size.
        device_type: Name of the device type in the rows.
        quota: Fraction of a core that this process may use.
        compiles: Whether the step is compiled.

    Returns:
        One row per op signature, rows of kind ``copy`` for copies and sums, and one of kind
        ``step``.
    """
    keep_freed_memory()  # as a run does
    graph = captured.graph
    device = CPU if is_cpu(device_type) else own_device()
    program = lower(graph, _pair(), _strategy(graph, samples), num_steps=1)
    model = workload.make_model().to(device)
    named = dict(model.named_parameters())
    parameters = {tensor: named[graph.tensors[tensor].name] for tensor in graph.parameters}
    groups = parameter_groups(workload, model)
    group_of = group_numbers(groups)
    seen = RankProgram(graph, _strategy(graph, samples), program, 0)
    in_groups = [group_of[graph.tensors[tensor].name] for _, tensor, _ in graph.updates]
    part = ModelPart(seen, parameters, in_groups)
    masters = Masters(workload.master_dtype, part.updated)
    optimizer = make_optimizer(workload, groups, masters.stepped, part.updated_groups)
    state = RankState(
        part=seen,
        ops=local_ops(captured, axis_plan(graph), device),
        communicator=LoopbackCommunicator(),
        parameters=parameters,
        buffers=other_inputs(captured, model, parameters, device),
        slices=part.slices,
        optimizer=optimizer,
        masters=masters,
        random=RandomStream(0, device),
        device=device,
    )
    order = step_order(seen, range(program.num_tasks), clips=False).for_rank(seen)
    executor = StepExecutor(state, order)
    batch = {
        tensor: value.to(device)
        for tensor, value in batch_by_tensor(captured.graph, workload.make_batch()).items()
    }
    clock = _Clock(device, quota)
    step_s = _timed(executor, batch, clock)
    seconds: Mapping[int, Sequence[float]] = clock.seconds()
    if compiles:
        executor = StepExecutor(state, order, compiler=Compiler())
        executor.times_segments = True
        clock = _Clock(device, quota)
        step_s = _timed(executor, batch, clock)
        ops = {
            task
            for task in np.flatnonzero(program.kind == TaskKind.COMPUTE).tolist()
            if not graph.is_view[graph_tables(graph).op_id[program.subject[task]]]
        }
        tasks = [turn.task for turn in executor.turns]
        seconds = parts_of_segments(clock.seconds(), seconds, tasks, ops)
    row = partial(OpMeasurement, device_type=device_type, model=graph.name, samples=samples)
    return [
        *_op_rows(row, graph, program, seconds, samples),
        _step_row(row, graph, executor, batch, optimizer, step_s, samples),
        *_update_rows(row, graph, parameters, optimizer, clock.stretch, device),
    ]


def _timed(executor: StepExecutor, batch: Mapping[int, Tensor], clock: _Clock) -> float:
    """Run an unrecorded step, then steps that a clock records; returns a step's mean seconds."""
    for _ in range(_WARM_UP_STEPS):
        executor(batch)
    executor.recorder = clock
    begin, steps = time.perf_counter(), 0
    while steps < _LEAST_STEPS or time.perf_counter() - begin < _LEAST_SECONDS:
        executor(batch)
        steps += 1
    executor.recorder = None
    return (time.perf_counter() - begin) / steps


def parts_of_segments(
    segments: Mapping[int, Sequence[float]],
    apart: Mapping[int, Sequence[float]],
    order: Sequence[int],
    ops: Set[int],
) -> dict[int, list[float]]:
    """Seconds of every op as its part of its segment; ops outside segments keep their own.

    Args:
        segments: Seconds of each call of a segment, by its first task.
        apart: Seconds of each task that was run by itself.
        order: Tasks in the order in which they run.
        ops: Tasks that share a segment's seconds, in proportion to those in ``apart``.
    """
    found: dict[int, list[float]] = {}
    first: int | None = None
    members: dict[int, list[int]] = {}
    for task in order:
        first = task if task in segments else first
        if first is not None and task >= 0:
            members.setdefault(first, []).append(task)
    for first, tasks in members.items():
        weights = {task: _trimmed_mean(apart[task]) for task in tasks if task in ops}
        whole = sum(weights.values())
        for task, weight in weights.items():
            found[task] = [each * weight / whole for each in segments[first]]
        if first not in ops and len(tasks) == 1:
            found[first] = list(segments[first])
    return found


def _pair() -> Cluster:
    """Two devices of no particular kind, as the program is lowered for them but not priced."""
    kind = DeviceType(
        name="profiled",
        peak_flops_per_s={"float32": 1e12},
        memory_bandwidth_bytes_per_s=1e11,
        memory_bytes=2**50,
        source="not priced",
    )
    link = Link(kind="bus", bandwidth_bytes_per_s=1e9)
    host = Host(name="host", nic_line_rate_bytes_per_s=1e9, intra=link)
    devices = tuple(
        Device(name=f"host:{i}", type=kind, host_index=0, usable_memory_bytes=2**50)
        for i in range(2)
    )
    return Cluster(name="profiled", hosts=(host,), devices=devices)


def _strategy(graph: OpGraph, samples: int) -> Strategy:
    """Data parallelism over two devices; this process acts as the first."""
    decision = Decision(devices=(0, 1), shares=(samples, graph.batch_size - samples))
    if samples == graph.batch_size:
        decision = Decision(devices=(0,), shares=(samples,))
    return Strategy(
        graph=graph.fingerprint,
        cluster=_pair().fingerprint,
        decisions=(decision,) * graph_tables(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
        bucket_bytes=25 * 2**20,
    )


def _op_rows(
    row: _Row,
    graph: OpGraph,
    program: Program,
    seconds: Mapping[int, Sequence[float]],
    samples: int,
) -> list[OpMeasurement]:
    """Rows of ops, equal signatures together, and of copies."""
    flops, num_bytes = batch_plan(graph).work(samples)
    tables = graph_tables(graph)
    found: dict[str, tuple[int, list[float]]] = {}
    rows = []
    for task, calls in seconds.items():
        kind = TaskKind(program.kind[task])
        if kind == TaskKind.COMPUTE:
            op = int(tables.op_id[program.subject[task]])
            found.setdefault(op_signature(graph, op), (op, []))[1].extend(calls)
        elif kind in _COPIES:
            rows.append(
                row(
                    signature="",
                    kind="copy",
                    flops=0.0,
                    num_bytes=float(program.num_bytes[task]),
                    seconds=statistics.median(calls),
                    count=len(calls),
                )
            )
    for signature, (op, calls) in found.items():
        rows.append(
            row(
                signature=signature,
                kind=op_kind(graph, op),
                flops=float(flops[op]),
                num_bytes=float(num_bytes[op]),
                seconds=_trimmed_mean(calls),
                count=len(calls),
            )
        )
    return rows


def _step_row(
    row: _Row,
    graph: OpGraph,
    executor: StepExecutor,
    batch: Mapping[int, Tensor],
    optimizer: torch.optim.Optimizer,
    seconds: float,
    samples: int,
) -> OpMeasurement:
    """Row of the whole step: its seconds, and the most bytes that tensors held in one more."""
    num_bytes = peak_during(lambda: executor(batch))
    if not has_accelerator():
        state = [value for each in optimizer.state.values() for value in each.values()]
        model = [value for group in optimizer.param_groups for value in group["params"]]
        num_bytes += stored_bytes([*model, *(v for v in state if isinstance(v, Tensor))])
        num_bytes += stored_bytes(batch.values()) * samples // graph.batch_size
    return row(
        signature="",
        kind=STEP,
        flops=float(graph.flops.sum()) * samples / graph.batch_size,
        num_bytes=float(num_bytes),
        seconds=seconds,
        count=1,
    )


def _trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the highest tenth, which contains interrupts."""
    kept = sorted(values)[: math.ceil(0.9 * len(values))]
    return sum(kept) / len(kept)


def _update_rows(
    row: _Row,
    graph: OpGraph,
    parameters: Mapping[int, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    stretch: float,
    device: torch.device,
) -> list[OpMeasurement]:
    """Rows of the optimizer's steps, one per parameter size, scaled to a step of all."""
    sizes: dict[int, tuple[int, list[int]]] = {}
    for op, parameter, _ in graph.updates:
        sizes.setdefault(parameters[parameter].numel(), (op, []))[1].append(parameter)

    def seconds(chosen: Sequence[int]) -> float:
        for parameter in chosen:
            parameters[parameter].grad = torch.zeros_like(parameters[parameter])
        times = []
        for _ in range(_UPDATE_REPEATS):
            begin = _stamp(device)
            optimizer.step()
            times.append(_stamp(device) - begin)
        for parameter in chosen:
            parameters[parameter].grad = None
        return statistics.median(times) * stretch

    nothing = seconds(())
    alone = {
        size: max(seconds(members[:1]) - nothing, 1e-9) for size, (_, members) in sizes.items()
    }
    together = seconds([parameter for _, parameter, _ in graph.updates])
    total = sum(alone[size] * len(members) for size, (_, members) in sizes.items())
    return [
        row(
            signature=op_signature(graph, op),
            kind=op_kind(graph, op),
            flops=graph.ops[op].flops,
            num_bytes=graph.ops[op].bytes_read + graph.ops[op].bytes_written,
            seconds=alone[size] * together / total,
            count=len(members) * _UPDATE_REPEATS,
        )
        for size, (op, members) in sizes.items()
    ]


def _stamp(device: torch.device) -> float:
    if is_accelerated(device):
        synchronize(device)
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
