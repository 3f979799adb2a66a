"""The most bytes that a rank holds during a step, measured."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from heterog.graph.op_graph import TensorKind
from heterog.runtime.accelerators import has_accelerator, peak_memory_bytes, reset_peak_memory
from heterog.runtime.deploy import DeployedStep


def peak_bytes(step: DeployedStep, batch: Any) -> int:
    """Most bytes that this rank's tensors held during one more step; every rank has to call it.

    Without a step barrier two steps are run: the second finishes what the first left open.

    On a GPU by its allocator's own count. On a CPU by following every allocation and release of
    the tensor allocator, those inside kernels included, on top of what is there all the time:
    parameters, optimizer state, buffers and this rank's part of the batch.
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

    On a GPU the total; on a CPU in addition to what was there before.
    """
    if has_accelerator():
        reset_peak_memory()
        call()
        return peak_memory_bytes()
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
    """Drop the lines in which torch's profiler says that it begins, ends, or began late.

    They come from its C++ side, straight to the process's standard error. All other output of
    that time is passed on at the end.
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
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    samples = max(
        (
            dict(zip(decision.devices, decision.shares, strict=True)).get(step.rank, 0)
            for decision in step.plan.strategy.decisions
        ),
        default=0,
    )
    whole = sum(int(graph.tensor_bytes[t]) for t in graph.inputs_of_kind(TensorKind.BATCH))
    return stored_bytes(tensors) + whole * samples // graph.batch_size


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of storage of tensors; shared storage counts once."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(len(each) for each in storages.values())
