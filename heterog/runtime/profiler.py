"""Measures ops and links on the devices that this process runs on.

Ops are measured inside a real training step, not alone in a loop: caches hold what they will hold.
The step is the executor's own, of a device with a part of the batch in data parallelism, with a
communicator that talks to nobody. Each op is measured at several shares.

    python -m heterog.runtime.profiler MODEL --journal DIR      # one rank of ``heterog profile``

What is done, a model at a share or a link, is a line of the rank's journal, so that an interrupted
run goes on where it stopped.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from heterog.cluster.catalog import device_type_names
from heterog.cluster.topology import Cluster, Device, DeviceType, Host, Link
from heterog.errors import HeterogError, InputFileError
from heterog.files import write_atomically
from heterog.graph.batch_plan import batch_plan
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.workload import Workload
from heterog.runtime.collectives import Communicator, Pending, gather_texts
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.executor import StepExecutor, batch_by_tensor
from heterog.runtime.launch import run_commands
from heterog.runtime.rank import join
from heterog.runtime.rank import tell as tell_launcher
from heterog.runtime.testbed import Testbed
from heterog.simulator.calibration import (
    LinkMeasurement,
    Measurements,
    OpMeasurement,
    link_measurement,
    op_kind,
    op_signature,
)
from heterog.strategy.channels import ChannelKind
from heterog.strategy.lowering import lower
from heterog.strategy.program import Program, TaskKind
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from heterog.strategy.tables import graph_tables
from heterog.zoo import load_workload

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Parts of the batch at which ops are measured."""

_WARM_UP_STEPS = 1
_LEAST_STEPS = 2
_LEAST_SECONDS = 1.0  # long against the 100 ms after which a CPU quota is renewed
_COPIES = (TaskKind.FLATTEN, TaskKind.ACCUMULATE, TaskKind.SUM)
_PAYLOADS = (4 * 1024, 64 * 1024, 512 * 1024, 3 * 1024**2)
_COLLECTIVES = (
    ChannelKind.ALL_REDUCE_RING,
    ChannelKind.REDUCE_SCATTER,
    ChannelKind.ALL_GATHER,
)
_UPDATE_REPEATS = 5


class LoopbackCommunicator(Communicator):
    """A communicator of a rank that is alone: what it would receive is already there."""

    def __init__(self) -> None:
        super().__init__(0, ())

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Nobody hears."""

    def receive(self, like: Tensor, src: int, tag: int) -> Pending:
        """Whatever ``like`` holds."""
        return Pending(None, lambda: like)

    def all_reduce(self, tensor: Tensor, devices: tuple[int, ...]) -> Pending:
        """The tensor itself."""
        return Pending(None, lambda: tensor)


class _Clock:
    """Records the seconds of every task of a step.

    On a CPU with one thread: the thread's CPU time over the share of a core that it may use. A
    quota stops the process for tens of milliseconds wherever it happens to be; this spreads the
    pauses over all tasks, as they are spread over many steps. On a GPU: events.
    """

    def __init__(self, device: torch.device, quota: float | None) -> None:
        self._is_cuda = device.type == "cuda"
        self._use_cpu_time = not self._is_cuda and torch.get_num_threads() == 1
        self.stretch = 1.0 / quota if quota and self._use_cpu_time else 1.0
        self.own: dict[int, list[Any]] = {}
        self._begin: Any = None

    def _now(self) -> Any:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream())
            return event
        return time.thread_time() if self._use_cpu_time else time.perf_counter()

    def begin_task(self, task: int) -> None:
        """A task begins."""
        self._begin = self._now()

    def end_task(self, task: int) -> None:
        """A task ends."""
        end = self._now()
        self.own.setdefault(task, []).append((self._begin, end))

    def begin_update(self, parameters: Sequence[int]) -> None:
        """The optimizer begins; measured on its own."""

    def end_update(self, parameters: Sequence[int]) -> None:
        """The optimizer ends."""

    def waiting(self) -> None:
        """Nobody waits: the communicator talks to nobody."""

    def seconds(self) -> dict[int, list[float]]:
        """Seconds of every call by task."""
        if self._is_cuda:
            torch.cuda.synchronize()
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
) -> list[OpMeasurement]:
    """Measure the ops of a step on a part of the batch, on this process's device.

    Needs a process group of this process alone.

    Args:
        captured: the step.
        workload: that it was captured from.
        samples: local share; at most the batch size.
        device_type: name under which the rows are kept.
        quota: share of a core that this process may use.

    Returns:
        One row per op signature, and rows of kind ``copy`` for copies and sums.
    """
    graph = captured.graph
    device = _device_of(device_type)
    program = _data_parallel(graph, samples)
    model = workload.make_model().to(device)
    named = dict(model.named_parameters())
    named_buffers = dict(model.named_buffers())
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    for tensor in range(graph.num_inputs):
        kind, name = graph.tensors[tensor].kind, graph.tensors[tensor].name
        if kind == TensorKind.PARAMETER:
            parameters[tensor] = named[name]
        elif kind == TensorKind.BUFFER:
            buffers[tensor] = named_buffers.get(name, named.get(name, torch.empty(0))).detach()
        elif kind == TensorKind.CONSTANT:
            buffers[tensor] = getattr(captured.module, name).to(device)
    optimizer = workload.optimizer(list(parameters.values()), **dict(workload.optimizer_options))
    executor = StepExecutor(
        captured,
        _strategy(graph, samples),
        program,
        range(program.num_tasks),
        rank=0,
        communicator=LoopbackCommunicator(),
        parameters=parameters,
        buffers=buffers,
        optimizer=optimizer,
    )
    batch = {
        tensor: value.to(device)
        for tensor, value in batch_by_tensor(captured, workload.make_batch()).items()
    }
    for _ in range(_WARM_UP_STEPS):
        executor(batch)
    clock = _Clock(device, quota)
    executor.recorder = clock
    begin, steps = time.perf_counter(), 0
    while steps < _LEAST_STEPS or time.perf_counter() - begin < _LEAST_SECONDS:
        executor(batch)
        steps += 1
    rows = _op_rows(graph, program, clock.seconds(), samples, device_type)
    rows += _update_rows(graph, parameters, optimizer, clock.stretch, samples, device_type, device)
    return rows


_CPU = torch.device("cpu")


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _device_of(device_type: str) -> torch.device:
    """This process's device of a type: its GPU, if it has one and the type is not the CPU's."""
    is_cpu = device_type.partition("@")[0] == "CPU"  # a testbed's types are named CPU@QUOTA
    return _CPU if is_cpu or not _has_cuda() else torch.device("cuda", torch.cuda.current_device())


def _data_parallel(graph: OpGraph, samples: int) -> Program:
    return lower(graph, _pair(), _strategy(graph, samples), num_steps=1)


def _pair() -> Cluster:
    """Two devices of no particular kind: what is lowered, not priced."""
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
    """Data parallelism over two devices, of which this process plays the first."""
    decision = Decision(devices=(0, 1), shares=(samples, graph.batch_size - samples))
    if samples == graph.batch_size:
        decision = Decision(devices=(0,), shares=(samples,))
    return Strategy(
        graph=graph.fingerprint,
        cluster=_pair().fingerprint(),
        decisions=(decision,) * graph_tables(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
        bucket_bytes=25 * 2**20,
    )


def _op_rows(
    graph: OpGraph,
    program: Program,
    seconds: Mapping[int, Sequence[float]],
    samples: int,
    device_type: str,
) -> list[OpMeasurement]:
    """Rows of ops, equal signatures together, and of copies."""
    plan = batch_plan(graph)
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
                OpMeasurement(
                    device_type=device_type,
                    model=graph.name,
                    signature="",
                    kind="copy",
                    samples=samples,
                    flops=0.0,
                    num_bytes=float(program.num_bytes[task]),
                    seconds=statistics.median(calls),
                    count=len(calls),
                )
            )
    for signature, (op, calls) in found.items():
        rows.append(
            OpMeasurement(
                device_type=device_type,
                model=graph.name,
                signature=signature,
                kind=op_kind(graph, op),
                samples=samples,
                flops=float(plan.flops_fixed[op] + samples * plan.flops_per_sample[op]),
                num_bytes=float(plan.bytes_fixed[op] + samples * plan.bytes_per_sample[op]),
                seconds=_trimmed_mean(calls),
                count=len(calls),
            )
        )
    return rows


def _trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the highest tenth: interrupts belong to nobody."""
    kept = sorted(values)[: math.ceil(0.9 * len(values))]
    return sum(kept) / len(kept)


def _update_rows(
    graph: OpGraph,
    parameters: Mapping[int, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    stretch: float,
    samples: int,
    device_type: str,
    device: torch.device,
) -> list[OpMeasurement]:
    """Rows of the optimizer's steps: of each size of parameter, scaled to the step of all."""
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
        OpMeasurement(
            device_type=device_type,
            model=graph.name,
            signature=op_signature(graph, op),
            kind=op_kind(graph, op),
            samples=samples,
            flops=graph.ops[op].flops,
            num_bytes=graph.ops[op].bytes_read + graph.ops[op].bytes_written,
            seconds=alone[size] * together / total,
            count=len(members) * _UPDATE_REPEATS,
        )
        for size, (op, members) in sizes.items()
    ]


def _stamp(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


# --- memory ----------------------------------------------------------------------------------


def peak_bytes(step: DeployedStep, batch: Any) -> int:
    """Most bytes that this rank's tensors held during one more step.

    On a GPU by its allocator's own count. On a CPU by following every allocation and release of
    the tensor allocator, those inside kernels included, on top of what is there all the time:
    parameters, optimizer state, buffers and this rank's part of the batch.
    """
    if _has_cuda():
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        return int(torch.cuda.max_memory_allocated())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(batch)
    results = recorded.profiler
    assert results is not None
    assert results.kineto_results is not None
    changes = sorted(_allocations(results.kineto_results.experimental_event_tree()))
    held = highest = 0
    for _, num_bytes in changes:
        held += num_bytes
        highest = max(highest, held)
    return _resident_bytes(step) + highest


def _allocations(events: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """(time, bytes taken or given back) of all events."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def _resident_bytes(step: DeployedStep) -> int:
    """Bytes of what is there between steps."""
    graph = step.captured.graph
    tensors: list[Tensor] = [*step.model.parameters(), *step.model.buffers()]
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    samples = max(
        (
            dict(zip(decision.devices, decision.shares, strict=True)).get(step.rank, 0)
            for decision in step.plan.strategy.decisions
        ),
        default=0,
    )
    whole = sum(int(graph.tensor_bytes[t]) for t in graph.inputs_of_kind(TensorKind.BATCH))
    return sum(len(each) for each in storages.values()) + whole * samples // graph.batch_size


# --- links -----------------------------------------------------------------------------------


_LinkCase = tuple[ChannelKind, tuple[int, ...], int, bool]
"""What is measured, between which devices, with how many bytes, and whether they compute, too."""


def profile_links(
    cluster: Cluster,
    payloads: Sequence[int] = _PAYLOADS,
    *,
    num_done: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[LinkMeasurement]:
    """Measure transfers between all pairs and collectives over all devices; on every rank.

    Only the devices that take part do anything. All ranks yield the same rows. With NCCL tensors
    travel from GPU to GPU, and what that takes from their kernels is not measured.

    Args:
        cluster: one device per rank.
        payloads: bytes of each transfer.
        num_done: leave out that many at the beginning; the same on all ranks.
        tell: hears about progress.
    """
    num_ranks = dist.get_world_size()
    communicator = Communicator(dist.get_rank(), _device_sets(num_ranks))
    cases = _link_cases(num_ranks, payloads)
    for number, (kind, devices, payload, loaded) in enumerate(cases[num_done:], num_done + 1):
        tell(f"links {number} of {len(cases)}")
        if loaded:
            yield _while_computing(cluster, communicator, kind, devices, payload)
        elif kind == ChannelKind.POINT_TO_POINT:
            yield _point_to_point(cluster, communicator, devices[0], devices[1], payload)
        else:
            yield _collective(cluster, communicator, kind, devices, payload)


def _device_sets(num_ranks: int) -> list[tuple[int, ...]]:
    """All devices, and all pairs: groups of collectives."""
    everyone = tuple(range(num_ranks))
    pairs = [(a, b) for a in everyone for b in everyone if a < b]
    return list(dict.fromkeys([everyone, *pairs])) if num_ranks > 1 else []


def _link_cases(num_ranks: int, payloads: Sequence[int]) -> list[_LinkCase]:
    """In the order in which they are measured."""
    ways = [(src, dst) for src in range(num_ranks) for dst in range(num_ranks) if src != dst]
    cases: list[_LinkCase] = [
        (ChannelKind.POINT_TO_POINT, way, payload, False) for way in ways for payload in payloads
    ]
    for devices in _device_sets(num_ranks):
        for kind in _COLLECTIVES:
            cases += [(kind, devices, payload, False) for payload in payloads]
            cases.append((kind, devices, min(payloads), True))
    return cases


def _wire_device() -> torch.device:
    """Where tensors lie that travel: on the GPU if NCCL carries them."""
    uses_nccl = "cuda:nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl else _CPU


_REPEATS = 3
_NUM_QUEUED = 12  # collectives that are under way at once, as those of small tensors are
_BUSY_SIZE = 256  # a matrix product of about a millisecond on one core
_BUSY_S = 0.3


def _repeat(act: Callable[[], None], *, takes_part: bool, num_repeats: int) -> tuple[float, float]:
    """(seconds, CPU seconds) of one of several calls between two barriers."""
    on_gpu = _wire_device().type == "cuda"
    for timed in (False, True):
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        if takes_part:
            for _ in range(num_repeats if timed else 1):
                act()
            if on_gpu:
                torch.cuda.synchronize()
        elapsed, used = time.perf_counter() - begin, time.process_time() - cpu
        dist.barrier()
    if on_gpu:  # a CPU that waits for its GPU is nobody's loss
        used = 0.0
    return elapsed / num_repeats, used / num_repeats


def _gathered(values: Sequence[float]) -> list[list[float]]:
    """The values of all ranks."""
    mine = torch.tensor(values, dtype=torch.float64)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.tolist() for part in parts]


def _point_to_point(
    cluster: Cluster, communicator: Communicator, src: int, dst: int, payload: int
) -> LinkMeasurement:
    """A message one way and an empty answer, less half of an empty round trip."""
    rank, wire = communicator.rank, _wire_device()
    results = []
    for count in (payload // 4, 1):  # the message, and next to nothing
        message, answer = torch.zeros(count, device=wire), torch.zeros(1, device=wire)

        def act(message: Tensor = message, answer: Tensor = answer) -> None:
            if rank == src:
                communicator.send(message, dst, 0)
                communicator.receive(answer, dst, 1).wait()
            else:
                communicator.receive(message, src, 0).wait()
                communicator.send(answer, src, 1)
            communicator.flush()

        results.append(_repeat(act, takes_part=rank in (src, dst), num_repeats=_REPEATS))
    (whole, cpu), (empty, _) = results
    all_ranks = _gathered([whole - empty / 2, cpu])
    return LinkMeasurement(
        kind=ChannelKind.POINT_TO_POINT.name.lower(),
        devices=(cluster.devices[src].name, cluster.devices[dst].name),
        slices=(),
        num_bytes=payload,
        seconds=max(all_ranks[src][0], 1e-9),
        device_seconds=(all_ranks[src][1], all_ranks[dst][1]),
    )


def _collective(
    cluster: Cluster,
    communicator: Communicator,
    kind: ChannelKind,
    devices: tuple[int, ...],
    payload: int,
) -> LinkMeasurement:
    takes_part = communicator.rank in devices
    issue = _issuer(communicator, kind, devices, payload)

    def act() -> None:
        issue().wait()

    seconds, cpu = _repeat(act, takes_part=takes_part, num_repeats=_REPEATS)
    communicator.flush()
    all_ranks = _gathered([seconds, cpu])
    return LinkMeasurement(
        kind=kind.name.lower(),
        devices=tuple(cluster.devices[device].name for device in devices),
        slices=() if kind == ChannelKind.ALL_REDUCE_RING else (1,) * len(devices),
        num_bytes=payload,
        seconds=max(all_ranks[device][0] for device in devices),
        device_seconds=tuple(all_ranks[device][1] for device in devices),
    )


def _issuer(
    communicator: Communicator, kind: ChannelKind, devices: tuple[int, ...], payload: int
) -> Callable[[], Pending]:
    """What issues a collective of a payload, for its members."""
    wire = _wire_device()
    count = payload // 4
    flat = torch.zeros(count, device=wire)
    counts = [count // len(devices)] * len(devices)
    counts[-1] += count - sum(counts)
    member = devices.index(communicator.rank) if communicator.rank in devices else 0
    own = torch.zeros(counts[member], device=wire)

    def issue() -> Pending:
        if kind == ChannelKind.REDUCE_SCATTER:
            return communicator.reduce_scatter(flat, devices, counts)
        if kind == ChannelKind.ALL_GATHER:
            return communicator.all_gather(own, devices, counts, torch.cat)
        return communicator.all_reduce(flat, devices)

    return issue


def _while_computing(
    cluster: Cluster,
    communicator: Communicator,
    kind: ChannelKind,
    devices: tuple[int, ...],
    payload: int,
) -> LinkMeasurement:
    """Several small collectives issued at once while their members compute.

    Every step of a collective waits until the next member lets its communication run: on a CPU
    that a quota has stopped, tens of milliseconds.
    """
    issue = _issuer(communicator, kind, devices, payload)
    square = torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=_wire_device())
    elapsed = 0.0
    dist.barrier()
    if communicator.rank in devices:
        begin = time.perf_counter()
        while time.perf_counter() - begin < _BUSY_S:  # a quota is used up, a GPU's queue is full
            square @ square
        begin = time.perf_counter()
        pending = [issue() for _ in range(_NUM_QUEUED)]
        waiter = threading.Thread(target=lambda: [each.wait() for each in pending])
        waiter.start()
        while waiter.is_alive():
            square @ square
        elapsed = (time.perf_counter() - begin) / _NUM_QUEUED
        communicator.flush()
    dist.barrier()
    all_ranks = _gathered([elapsed])
    return LinkMeasurement(
        kind=kind.name.lower(),
        devices=tuple(cluster.devices[device].name for device in devices),
        slices=() if kind == ChannelKind.ALL_REDUCE_RING else (1,) * len(devices),
        num_bytes=payload,
        seconds=max(all_ranks[device][0] for device in devices),
        device_seconds=(0.0,) * len(devices),
        while_computing=True,
    )


# --- jobs ------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Versions and processors, for people."""
    device = torch.cuda.get_device_name() if _has_cuda() else platform.processor() or "CPU"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": str(torch.get_num_threads()),
    }


class Journal:
    """What a rank has measured so far: one line each, so that it is not measured again.

    A last line that was cut off is as if it had never been there.

    Args:
        path: its file, which is made if it is not there.
        of: whose measurements these are.

    Raises:
        InputFileError: the file is somebody else's journal.
    """

    def __init__(self, path: Path, of: str) -> None:
        self._path = path
        records = [{"journal_of": of}, *_whole_lines(path)]
        if len(records) > 1:
            other = records.pop(1).get("journal_of")
            if other != of:
                raise InputFileError(
                    f"{path} holds measurements of {other}, not of {of}; remove it, or choose "
                    "another output."
                )
        self._rows: dict[str, list[dict[str, Any]]] = {
            record["key"]: record["rows"] for record in records[1:]
        }
        # Whole again: what follows a line that was cut off would be lost with it.
        write_atomically(path, "".join(f"{json.dumps(each)}\n" for each in records).encode())

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def rows(self, key: str) -> list[dict[str, Any]]:
        """The rows of something that is done."""
        return self._rows[key]

    def add(self, key: str, rows: Sequence[OpMeasurement] | Sequence[LinkMeasurement]) -> None:
        """Something is done."""
        self._rows[key] = [asdict(row) for row in rows]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "rows": self._rows[key]}) + "\n")


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, up to where it was cut off."""
    records: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records


def remove_journal(folder: Path) -> None:
    """Remove a folder of journals; whatever else somebody put there stays."""
    for path in [*folder.glob("rank*.jsonl"), folder / _CLUSTER_FILE, folder / _RESULT_FILE]:
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


_CLUSTER_FILE = "cluster.yaml"
_RESULT_FILE = "measurements.json"


def profile_local(
    sources: Sequence[str],
    journal: Path,
    device_type: str,
    *,
    batch_size: int | None = None,
    quota: float | None = None,
    of: str = "",
    tell: Callable[[str], None] = lambda text: None,
) -> list[OpMeasurement]:
    """Measure models on this process's device.

    Args:
        sources: zoo names or ``file.py:function``.
        journal: file of what is done; lines are added, and what it holds is not measured again.
        device_type: name for the rows.
        batch_size: of the workloads; their own by default.
        quota: share of a core that this process may use.
        of: whose measurements the journal holds; by default those of the device type.
        tell: hears about progress.

    Returns:
        The rows of these models.

    Raises:
        InputFileError: the journal is somebody else's.
    """
    done = Journal(journal, of or f"a {device_type}, torch {torch.__version__}")
    distinct = list(dict.fromkeys(sources))
    rows: list[OpMeasurement] = []
    with _alone():
        for position, source in enumerate(distinct):
            workload = load_workload(source, batch_size)
            captured: CapturedStep | None = None
            measured: set[int] = set()
            for number, share in enumerate(SHARES, position * len(SHARES) + 1):
                key = f"{source} {_version_of(source)} {batch_size} {share}"
                if key not in done:
                    captured = captured or capture_step(workload)
                    samples = max(1, round(share * captured.graph.batch_size))
                    tell(
                        f"ops {number} of {len(SHARES) * len(distinct)}: {workload.name}, "
                        f"{samples} samples"
                    )
                    is_new = samples not in measured  # a small batch has few parts
                    measured.add(samples)
                    done.add(
                        key,
                        _profiled(captured, workload, samples, device_type, quota, tell)
                        if is_new
                        else [],
                    )
                rows += [OpMeasurement(**row) for row in done.rows(key)]
    return rows


def _profiled(
    captured: CapturedStep,
    workload: Workload,
    samples: int,
    device_type: str,
    quota: float | None,
    tell: Callable[[str], None],
) -> list[OpMeasurement]:
    """The rows at one share; none if it does not fit into a GPU's memory."""
    try:
        return profile_ops(captured, workload, samples, device_type, quota)
    except torch.cuda.OutOfMemoryError:
        tell(f"{workload.name}: {samples} samples do not fit on {device_type}; left out")
        return []


def _version_of(source: str) -> str:
    """What changes with a user's file; empty for the zoo."""
    path = Path(source.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8] if path.is_file() else ""


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _as_many_threads_as_ranks() -> Iterator[None]:
    """As many threads as a rank will have when it runs a plan."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def profile_here(
    sources: Sequence[str],
    journal: Path,
    device_type: str,
    *,
    batch_size: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Measure the ops of models on this machine's first device, in this process.

    Args:
        sources: zoo names or ``file.py:function``.
        journal: folder of what is done.
        device_type: what cluster files call this device.
        batch_size: of the workloads; their own by default.
        tell: hears about progress.

    Raises:
        HeterogError: the type is a GPU's, and there is none.
    """
    if not _has_cuda() and device_type != "CPU" and device_type in device_type_names():
        raise HeterogError(
            f"{device_type} cannot be measured: PyTorch sees no CUDA device here. Choose "
            "--device-type CPU to measure this machine's processor."
        )
    journal.mkdir(exist_ok=True)
    with _as_many_threads_as_ranks():
        ops = profile_local(
            sources, journal / "rank0.jsonl", device_type, batch_size=batch_size, tell=tell
        )
        return Measurements(environment=environment(), ops=tuple(ops))


def profile_cluster(
    sources: Sequence[str],
    cluster: Cluster,
    journal: Path,
    *,
    batch_size: int | None = None,
    timeout_s: float = 3600.0,
    testbed: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Measure models on every device of a testbed, all at once, and then its links.

    All ranks measure at the same time, as they will compute at the same time.

    Args:
        sources: zoo names or ``file.py:function``.
        cluster: of the testbed.
        journal: folder of what is done, one file per rank.
        batch_size: of the workloads; their own by default.
        timeout_s: of the whole job.
        testbed: build the testbed; otherwise plain processes on this machine.
        tell: hears what rank 0 does.
    """
    arguments = ["-m", "heterog.runtime.profiler", *sources, "--journal", str(journal.resolve())]
    arguments += ["--timeout", str(timeout_s)]
    if batch_size is not None:
        arguments += ["--batch-size", str(batch_size)]
    if testbed:
        arguments.append("--throttled")
    with Testbed(cluster) if testbed else nullcontext() as bed:
        journal.mkdir(parents=True, exist_ok=True)
        cluster.save(journal / _CLUSTER_FILE)
        run_commands(
            arguments,
            cluster.num_devices,
            timeout_s=timeout_s,
            wrap=bed.command if bed else lambda rank, command: command,
            environment=bed.environment if bed else lambda rank: {},
            progress=tell,
        )
    return Measurements.load(journal / _RESULT_FILE)


def profile_as_rank(
    sources: Sequence[str],
    cluster: Cluster,
    journal: Path,
    output: Path,
    *,
    batch_size: int | None = None,
    timeout_s: float = 3600.0,
    throttled: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure as the rank that the environment describes: its device, then links with the others.

    Args:
        sources: zoo names or ``file.py:function``.
        cluster: its device ``i`` is rank ``i``.
        journal: folder of what is done.
        output: file that rank 0 writes; it is there when the call returns.
        batch_size: of the workloads; their own by default.
        timeout_s: after which a rank gives up on the others.
        throttled: ranks have the CPU quotas of the cluster's testbed.
        tell: hears about progress.

    Raises:
        HeterogError: there is not one rank per device.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks != cluster.num_devices:
        raise HeterogError(
            f"cluster '{cluster.name}' has {cluster.num_devices} devices, but {num_ranks} ranks "
            "are running; start one rank per device."
        )
    if _has_cuda():
        local = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(local % torch.cuda.device_count())
    device = cluster.devices[rank]
    journal.mkdir(exist_ok=True)
    of = f"{device.name} of cluster '{cluster.name}' ({cluster.fingerprint()})"
    file = journal / f"rank{rank}.jsonl"
    with _as_many_threads_as_ranks():
        ops = profile_local(
            sources,
            file,
            device.type.name,
            batch_size=batch_size,
            quota=cluster.hosts[cluster.host_of[rank]].cpu_quota if throttled else None,
            of=of,
            tell=tell,
        )
        tell("waiting for the other ranks")
        join(timeout_s)
        links = _journalled_links(cluster, Journal(file, of), tell)
        parts = gather_texts(json.dumps([asdict(row) for row in ops]))
        if rank == 0:
            measured = Measurements(
                environment=environment(),
                ops=tuple(OpMeasurement(**row) for part in parts for row in json.loads(part)),
                links=links,
                cluster=replace(cluster, calibration=None).to_dict(),
            )
            measured.save(output)
        dist.barrier()
        dist.destroy_process_group()


def _journalled_links(
    cluster: Cluster, journal: Journal, tell: Callable[[str], None]
) -> tuple[LinkMeasurement, ...]:
    """All rows of links; rank 0's journal decides which are still to be measured."""
    keys = [f"link {case}" for case in _link_cases(dist.get_world_size(), _PAYLOADS)]
    known = list(itertools.takewhile(lambda key: key in journal, keys))
    num_done = int(_gathered([len(known)])[0][0])
    rows = [link_measurement(journal.rows(key)[0]) for key in known]
    measured = profile_links(cluster, num_done=num_done, tell=tell)
    for key, row in zip(keys[num_done:], measured, strict=True):
        if dist.get_rank() == 0:
            journal.add(key, [row])
        rows.append(row)
    return tuple(rows)


def main() -> None:
    """Measure as one rank of a testbed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--journal", required=True)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("--throttled", action="store_true")
    arguments = parser.parse_args()
    folder = Path(arguments.journal)
    try:
        profile_as_rank(
            arguments.models,
            Cluster.load(folder / _CLUSTER_FILE),
            folder,
            folder / _RESULT_FILE,
            batch_size=arguments.batch_size,
            timeout_s=arguments.timeout,
            throttled=arguments.throttled,
            tell=tell_launcher,
        )
    except HeterogError as error:
        print(f"heterog: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    main()
