"""Measures transfers and collectives between the ranks of a job."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.cluster.topology import Cluster
from heterog.lowering.channels import ChannelKind
from heterog.pricing.op_fits import LinkMeasurement
from heterog.runtime.accelerators import from_every_rank, is_accelerated, synchronize, wire_device
from heterog.runtime.step.collectives import Communicator, Pending

PAYLOADS = (4 * 1024, 64 * 1024, 512 * 1024, 3 * 1024**2)
_COLLECTIVES = (ChannelKind.ALL_REDUCE_RING, ChannelKind.REDUCE_SCATTER, ChannelKind.ALL_GATHER)

_LinkCase = tuple[ChannelKind, tuple[int, ...], int, bool]
"""Kind, devices, number of bytes, and whether the devices compute meanwhile."""


def profile_links(
    cluster: Cluster,
    payloads: Sequence[int] = PAYLOADS,
    *,
    num_done: int = 0,
    quota: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[LinkMeasurement]:
    """Measure transfers between all pairs and collectives over all devices; on every rank.

    Devices that do not take part are idle. All ranks yield the same rows. If accelerators have a
    backend of their own, tensors travel between accelerators; how much this slows their kernels is
    not measured.

    Args:
        cluster: A cluster with one device per rank.
        payloads: Bytes of each transfer.
        num_done: Number of measurements to skip at the beginning; the same on all ranks.
        quota: Fraction of a core that this process may use.
        tell: Called with progress in words.
    """
    num_ranks = dist.get_world_size()
    communicator = Communicator(dist.get_rank(), _device_sets(num_ranks), cluster.host_of)
    stretch = 1.0 / quota if quota else 1.0
    cases = link_cases(num_ranks, payloads)
    for number, (kind, devices, payload, loaded) in enumerate(cases[num_done:], num_done + 1):
        tell(f"links {number} of {len(cases)}")
        if loaded:
            measured = _while_computing(communicator, kind, devices, payload)
        elif kind == ChannelKind.POINT_TO_POINT:
            measured = _point_to_point(communicator, devices, payload)
        else:
            measured = _collective(communicator, kind, devices, payload)
        seconds, cpu_s = zip(*gathered(measured), strict=True)
        yield LinkMeasurement(
            kind=kind.name.lower(),
            devices=tuple(cluster.devices[device].name for device in devices),
            slices=(1,) * len(devices) if kind.has_slices else (),
            num_bytes=payload,
            seconds=max(1e-9, *(seconds[device] for device in devices)),
            device_seconds=tuple(cpu_s[device] * stretch for device in devices),
            while_computing=loaded,
        )


def _device_sets(num_ranks: int) -> list[tuple[int, ...]]:
    """The groups of collectives: all devices, and all pairs."""
    everyone = tuple(range(num_ranks))
    pairs = [(a, b) for a in everyone for b in everyone if a < b]
    return list(dict.fromkeys([everyone, *pairs])) if num_ranks > 1 else []


def link_cases(num_ranks: int, payloads: Sequence[int]) -> list[_LinkCase]:
    """All measurements, in order."""
    ways = [(src, dst) for src in range(num_ranks) for dst in range(num_ranks) if src != dst]
    cases: list[_LinkCase] = []
    for way in ways:
        cases += [(ChannelKind.POINT_TO_POINT, way, payload, False) for payload in payloads]
        cases.append((ChannelKind.POINT_TO_POINT, way, min(payloads), True))
    for devices in _device_sets(num_ranks):
        for kind in _COLLECTIVES:
            cases += [(kind, devices, payload, False) for payload in payloads]
            cases.append((kind, devices, min(payloads), True))
    return cases


_NUM_ROUNDS = 5  # in a median, because a quota stops a process for tens of milliseconds somewhere
_NUM_OPERATIONS = 12  # under way at once, like collectives of small tensors in a step
_SMALL_BYTES = 64 * 1024  # up to this size ``_NUM_OPERATIONS`` are timed at once
_NUM_BURSTS = 3
_NUM_PRODUCTS = 8  # computed meanwhile if operations come one by one
_BUSY_SIZE = 256  # a matrix product of about a millisecond on one core
_BUSY_S = 0.3


def _repeat(act: Callable[[], None], *, takes_part: bool) -> tuple[float, float]:
    """(seconds, CPU seconds) of a call, medians of several between barriers."""
    device = wire_device()
    on_gpu = is_accelerated(device)
    rounds = []
    for _ in range(1 + _NUM_ROUNDS):
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        if takes_part:
            act()
            synchronize(device)
        rounds.append((time.perf_counter() - begin, time.process_time() - cpu))
        dist.barrier()
    elapsed, used = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    return elapsed, 0.0 if on_gpu else used  # a CPU that waits for its GPU costs nothing


def gathered(values: Sequence[float]) -> list[list[float]]:
    """Gather the values of all ranks."""
    return [part.tolist() for part in from_every_rank(torch.tensor(values, dtype=torch.float64))]


def _point_to_point(
    communicator: Communicator, devices: tuple[int, ...], payload: int
) -> tuple[float, float]:
    """Time a message one way and an empty answer, less half of an empty round trip."""
    rank, wire = communicator.rank, wire_device()
    src, dst = devices
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

        results.append(_repeat(act, takes_part=rank in (src, dst)))
    (whole, cpu), (empty, _) = results
    return whole - empty / 2 if rank == src else 0.0, cpu


def _collective(
    communicator: Communicator, kind: ChannelKind, devices: tuple[int, ...], payload: int
) -> tuple[float, float]:
    """Time a collective; small ones are issued several at once, to measure their rate."""
    takes_part = communicator.rank in devices
    issue = _issuer(communicator, kind, devices, payload)
    count = _NUM_OPERATIONS if payload <= _SMALL_BYTES else 1

    def act() -> None:
        for pending in [issue() for _ in range(count)]:
            pending.wait()

    seconds, cpu = (total / count for total in _repeat(act, takes_part=takes_part))
    communicator.flush()
    return seconds, cpu


def _issuer(
    communicator: Communicator, kind: ChannelKind, devices: tuple[int, ...], payload: int
) -> Callable[[], Pending]:
    """A function that issues a collective or a transfer of a payload, for its members."""
    wire = wire_device()
    count = payload // 4
    flat = torch.zeros(count, device=wire)
    counts = [count // len(devices)] * len(devices)
    counts[-1] += count - sum(counts)
    member = devices.index(communicator.rank) if communicator.rank in devices else 0
    own = torch.zeros(counts[member], device=wire)

    def issue() -> Pending:
        if kind == ChannelKind.POINT_TO_POINT:
            if communicator.rank == devices[1]:
                return communicator.receive(flat, devices[0], 0)
            communicator.send(flat, devices[1], 0)
            return Pending(None, lambda: flat)
        if kind == ChannelKind.REDUCE_SCATTER:
            return communicator.reduce_scatter(flat, devices, counts)
        if kind == ChannelKind.ALL_GATHER:
            return communicator.all_gather(own, devices, counts, torch.cat)
        return communicator.all_reduce(flat, devices)

    return issue


def _wait(communicator: Communicator, pending: Sequence[Pending]) -> None:
    for each in pending:
        each.wait()
    communicator.flush()


def _while_computing(
    communicator: Communicator, kind: ChannelKind, devices: tuple[int, ...], payload: int
) -> tuple[float, float]:
    """Time several small operations issued at once while their members compute.

    Every step of a collective waits until the next member runs its communication; on a CPU that a
    quota has stopped, this takes tens of milliseconds. On a CPU, communication also takes time
    from the member's own work: the CPU time of the process less that of its main thread.
    """
    issue = _issuer(communicator, kind, devices, payload)
    square = torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=wire_device())
    used = 0.0
    bursts = []

    def compute_for(num_products: int) -> float:
        begin = time.thread_time()
        for _ in range(num_products):
            square @ square
        return time.thread_time() - begin

    def compute_until(waiting: "Future[None]") -> None:
        while not waiting.done():
            compute_for(1)

    dist.barrier()
    if communicator.rank in devices:
        with ThreadPoolExecutor(1) as waiter:
            # Until then, quotas are used up and queues of GPUs are full.
            compute_until(waiter.submit(time.sleep, _BUSY_S))
            for _ in range(_NUM_BURSTS):
                begin = time.perf_counter()
                pending = [issue() for _ in range(_NUM_OPERATIONS)]
                compute_until(waiter.submit(_wait, communicator, pending))
                bursts.append((time.perf_counter() - begin) / _NUM_OPERATIONS)
        # One after another, like gradients that become ready: each wakes its own threads. Nothing
        # waits for them, as ranks do not wait either.
        cpu, computed, pending = time.process_time(), 0.0, []
        for _ in range(_NUM_BURSTS * _NUM_OPERATIONS):
            pending.append(issue())
            computed += compute_for(_NUM_PRODUCTS)
        _wait(communicator, pending)
        if not is_accelerated(square):
            used = (time.process_time() - cpu - computed) / (_NUM_BURSTS * _NUM_OPERATIONS)
    dist.barrier()
    return statistics.median(bursts or [0.0]), max(used, 0.0)
