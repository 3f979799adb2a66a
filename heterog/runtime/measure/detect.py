"""A first cluster file for this machine: its devices and links, measured or looked up.

GPUs that the catalogue knows keep the numbers of their data sheets; all others, and the CPU, get
the measured rates of a large matrix product and of a large copy. Large kernels reach these rates,
so the efficiencies of such a type are 1. Comments in the file say which lines are guesses.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from heterog.cluster.catalog import device_type, matching_types
from heterog.cluster.hardware import DTYPES, DeviceType, Link
from heterog.runtime.accelerators import (
    CPU,
    are_peers,
    computes_bfloat16,
    device_count,
    device_label,
    device_memory_bytes,
    device_of,
    has_accelerator,
    num_threads,
    synchronize,
)
from heterog.units import GIB

_MEMORY_TOLERANCE = 0.1  # the driver shows a little less than the sheet
_RESERVED_BYTES = GIB  # for context and communication buffers, as in cluster files
_MEASURE_S = 0.3
_CPU_SIZE, _GPU_SIZE = 1024, 8192  # of square matrices
_COPY_BYTES = 256 * 1024**2  # beyond all caches
_NVLINK_BYTES_PER_S = 60e9  # a faster link is NVLink: no PCIe slot up to generation 5 reaches it
_GUESSED_NIC_BYTES_PER_S = 1e9 / 8  # if the system reports no rate


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """A device of this machine.

    Attributes:
        label: Its name as the driver or the system reports it.
        type: Device type, from the catalogue or measured.
        is_listed: Whether the type is the catalogue's.
        usable_memory_bytes: Memory of this device that a plan may use.
    """

    label: str
    type: DeviceType
    is_listed: bool
    usable_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMachine:
    """The result of ``heterog cluster detect``.

    Attributes:
        host: Name of the machine.
        devices: Its GPUs, or else its CPU.
        link: Link between the devices, ``nvlink`` or ``pcie``, with the measured rate of the
            slowest pair of neighbours; ``None`` if there is only one device.
        interface: Network interface of the default route; empty if unknown.
        nic_bytes_per_s: Line rate of that interface; ``None`` if the system does not report it.
        nic_said: How that rate was found, if the system did not report it.
    """

    host: str
    devices: tuple[FoundDevice, ...]
    link: Link | None = None
    interface: str = ""
    nic_bytes_per_s: float | None = None
    nic_said: str = ""


def detect() -> FoundMachine:
    """Examine this machine; takes a second per device."""
    host = socket.gethostname().partition(".")[0] or "machine"
    interface = default_interface()
    devices = _gpus(host) if has_accelerator() else [_cpu(host)]
    return FoundMachine(
        host=host,
        devices=tuple(devices),
        link=_gpu_link(len(devices)) if len(devices) > 1 else None,
        interface=interface,
        nic_bytes_per_s=line_rate_bytes_per_s(interface),
    )


def local_type_name() -> str:
    """Name that ``detect`` gives to the type of this machine's first device."""
    if not has_accelerator():
        return "CPU"
    label, num_bytes = device_label(0), device_memory_bytes(0)
    return catalogue_name(label, num_bytes) or _type_name(label)


def catalogue_name(label: str, memory_bytes: int) -> str | None:
    """Name of the catalogue's type for a GPU, or ``None``.

    The driver's words decide first (a PCIe card is slower than the SXM module of the same name),
    then the memory.

    >>> catalogue_name("Tesla V100-SXM2-16GB", 16 * 2**30)
    'V100-16GB'
    >>> catalogue_name("NVIDIA H100 PCIe", 80 * 2**30)
    'H100-PCIe'
    """
    found = [
        (abs(each.memory_bytes - memory_bytes) / each.memory_bytes, each.name)
        for each in matching_types(label)
    ]
    difference, name = min(found, default=(1.0, ""))
    return name if difference <= _MEMORY_TOLERANCE else None


def default_interface(routes: Path = Path("/proc/net/route")) -> str:
    """Network interface of the default route; empty where the system does not report it."""
    if routes.exists():
        for line in routes.read_text().splitlines()[1:]:
            name, destination, *_ = line.split()
            if destination == "00000000":
                return name
    return ""


def line_rate_bytes_per_s(
    interface: str, interfaces: Path = Path("/sys/class/net")
) -> float | None:
    """Line rate of a network interface; ``None`` where it is virtual, down or unknown."""
    try:
        mbit_per_s = int((interfaces / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return mbit_per_s * 1e6 / 8 if interface and mbit_per_s > 0 else None


def cluster_yaml(*machines: FoundMachine) -> str:
    """The text of a cluster file; comments name the lines to check."""
    is_measured = all(each.nic_said for each in machines)
    part = "1" if is_measured else "0.7  # check: part of the NIC's line rate that transfers reach"
    lines = [
        "# Written by 'heterog cluster detect'. Check the lines marked 'check', and add machines",
        "# that are missing below 'hosts'.",
        "schema_version: 1",
        f"name: {json.dumps(machines[0].host)}",
        f"efficiency: {part}",
        "hosts:",
    ]
    for each in machines:
        lines += _host_lines(each)
    return "\n".join(lines) + "\n"


def _host_lines(found: FoundMachine) -> list[str]:
    lines = [f"  - name: {json.dumps(found.host)}", "    devices:"]
    for device, members in groupby(found.devices):
        lines += _device_lines(device, len(list(members)))
    if found.link is None and len(found.devices) > 1:
        lines.append("    intra: pcie3  # check: a guess")
    if found.link is not None:
        rate = found.link.bandwidth_bytes_per_s / 1e9
        lines += [
            f"    # check: {found.link.kind} by the measured rate between neighbours",
            f"    intra: {{kind: {found.link.kind}, bandwidth: {rate:.4g} GB/s}}",
        ]
    if found.nic_bytes_per_s is None:
        rate, said = _GUESSED_NIC_BYTES_PER_S, "check: a guess, the system does not tell the rate"
        if found.interface:
            said += f" of {found.interface}"
    else:
        said = found.nic_said or f"what {found.interface} says it is linked at"
        rate, said = found.nic_bytes_per_s, f"check: {said}"
    lines.append(f"    nic: {{line_rate: {rate * 8e-9:.4g} Gbit/s}}  # {said}")
    return lines


def _device_lines(device: FoundDevice, count: int) -> list[str]:
    usable = f"usable_memory: {_gib(device.usable_memory_bytes)}"
    of_type = device.type
    if device.is_listed:
        return [
            f"      # {device.label}",
            f"      - {{type: {of_type.name}, count: {count}, {usable}}}",
        ]
    peaks = ", ".join(
        f"{dtype}: {of_type.peak_flops_per_s[dtype] / 1e9:.4g} GFLOP/s"
        for dtype in DTYPES
        if dtype in of_type.peak_flops_per_s
    )
    bandwidth = of_type.memory_bandwidth_bytes_per_s / 1e9
    return [
        f"      # {device.label}",
        "      # check: measured rates, in the place of a data sheet's",
        "      - type:",
        f"          name: {json.dumps(of_type.name)}",
        f"          peak_flops: {{{peaks}}}",
        f"          memory_bandwidth: {bandwidth:.4g} GB/s",
        f"          memory: {_gib(of_type.memory_bytes)}  # check: less where others use it, too",
        f"          source: {json.dumps(of_type.source)}",
        f"          compute_efficiency: {of_type.compute_efficiency:g}",
        f"          memory_efficiency: {of_type.memory_efficiency:g}",
        f"        count: {count}",
        f"        {usable}",
    ]


def _gib(num_bytes: int) -> str:
    """Format as GiB, rounded down so that no plan counts on memory that is not there."""
    return f"{num_bytes * 100 // GIB / 100:g} GiB"


def _cpu(host: str) -> FoundDevice:
    """The CPU as one device, measured with one thread, because a rank uses one."""
    with num_threads(1):
        peaks = {
            dtype: _flops_per_s(CPU, dtype, _CPU_SIZE, _MEASURE_S)
            for dtype in ("float64", "float32")
        }
        bandwidth = _copy_bytes_per_s(CPU)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    of_type = _measured_type("CPU", host, "one thread", peaks, bandwidth, memory)
    return FoundDevice(
        label="the processor; one device is one core",
        type=of_type,
        is_listed=False,
        usable_memory_bytes=usable_bytes(memory),
    )


def _gpus(host: str) -> list[FoundDevice]:
    found: list[FoundDevice] = []
    measured: dict[tuple[str, int], DeviceType] = {}
    for index in range(device_count()):
        label, memory = device_label(index), device_memory_bytes(index)
        name = catalogue_name(label, memory)
        if name is not None:
            of_type = device_type(name)
        else:
            # Equal cards are one type, measured once: two measurements would differ a little.
            key = (label, memory)
            of_type = measured.get(key) or _measured_gpu(host, index, number=len(measured))
            measured[key] = of_type
        usable = usable_bytes(min(memory, of_type.memory_bytes))
        found.append(
            FoundDevice(
                label=label, type=of_type, is_listed=name is not None, usable_memory_bytes=usable
            )
        )
    return found


def _measured_gpu(host: str, index: int, *, number: int) -> DeviceType:
    label, memory = device_label(index), device_memory_bytes(index)
    device = device_of(index)
    dtypes = [dtype for dtype in DTYPES if dtype != "bfloat16" or computes_bfloat16()]
    # float64 is 1/64 of float32 on some cards: a smaller product is large enough for it.
    peaks = {
        dtype: _flops_per_s(device, dtype, _GPU_SIZE // (4 if dtype == "float64" else 1), 0.1)
        for dtype in dtypes
    }
    bandwidth = _copy_bytes_per_s(device)
    name = _type_name(label) if number == 0 else f"{_type_name(label)}-{number}"
    return _measured_type(name, host, label, peaks, bandwidth, memory)


def usable_bytes(memory_bytes: int) -> int:
    """Bytes of a device's memory that a plan may use."""
    return max(memory_bytes - _RESERVED_BYTES, memory_bytes // 2)


def _type_name(label: str) -> str:
    return "-".join(label.split())


def _measured_type(
    name: str, host: str, what: str, peaks: dict[str, float], bandwidth: float, memory_bytes: int
) -> DeviceType:
    return DeviceType(
        name=name,
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=bandwidth,
        memory_bytes=memory_bytes,
        source=f"measured on {host} ({what}) with torch {torch.__version__}",
        compute_efficiency=1.0,
        memory_efficiency=1.0,
    )


def _flops_per_s(device: torch.device, dtype: str, size: int, at_least_s: float) -> float:
    """Rate of a square matrix product; float32 without TF32, which is PyTorch's default."""
    first = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    second, out = torch.ones_like(first), torch.empty_like(first)
    seconds = _shortest_s(lambda: torch.mm(first, second, out=out), device, at_least_s)
    return 2.0 * size**3 / seconds


def _copy_bytes_per_s(device: torch.device) -> float:
    """Rate at which a large copy reads and writes."""
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * _COPY_BYTES / _shortest_s(lambda: target.copy_(source), device, _MEASURE_S)


def _gpu_link(num_devices: int) -> Link:
    """The slowest link between neighbours, because rings use these links only."""
    rates = []
    for index in range(num_devices):
        other = (index + 1) % num_devices
        source = torch.ones(_COPY_BYTES // 4, device=device_of(index))
        target = torch.empty_like(source, device=device_of(other))

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> object:
            return target.copy_(source)

        rates.append(_COPY_BYTES / _shortest_s(copy, target.device, _MEASURE_S))
    direct = all(are_peers(index, (index + 1) % num_devices) for index in range(num_devices))
    kind = "nvlink" if direct and min(rates) > _NVLINK_BYTES_PER_S else "pcie"
    return Link(kind=kind, bandwidth_bytes_per_s=min(rates))


def _shortest_s(act: Callable[[], object], device: torch.device, at_least_s: float) -> float:
    """Seconds of the fastest of several calls, which other processes disturb the least."""
    shortest = float("inf")
    for phase_s in (0.0, at_least_s):  # the first call warms up
        begin = time.perf_counter()
        while True:
            synchronize(device)
            start = time.perf_counter()
            act()
            synchronize(device)
            end = time.perf_counter()
            shortest = min(shortest, end - start)
            if end - begin >= phase_s:
                break
    return shortest
