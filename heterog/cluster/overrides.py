"""Device types that a cluster file writes out or changes, and CPUs with a testbed's quota."""

from collections.abc import Mapping
from dataclasses import replace

from heterog.cluster.catalog import device_type
from heterog.cluster.hardware import DeviceType, FrozenFlops
from heterog.cluster.schema import DeviceSpec, Dtype

CPU = "CPU"


def base_type(entry: DeviceSpec) -> DeviceType:
    """The type that an entry names or writes out.

    Raises:
        UnknownNameError: The catalogue has no such type.
        ClusterError: Its numbers make no sense.
    """
    spec = entry.type
    if isinstance(spec, str):
        return device_type(spec)
    return DeviceType(
        name=spec.name,
        peak_flops_per_s={dtype: peak for dtype, peak in spec.peak_flops.items()},
        memory_bandwidth_bytes_per_s=spec.memory_bandwidth,
        memory_bytes=spec.memory,
        source=spec.source,
        compute_efficiency=spec.compute_efficiency,
        memory_efficiency=spec.memory_efficiency,
        launch_overhead_s=spec.launch_overhead,
    )


def _merged(peaks: Mapping[str, float], given: Mapping[Dtype, float] | None) -> FrozenFlops:
    merged = dict(peaks)
    for dtype, peak in (given or {}).items():
        merged[dtype] = peak
    return FrozenFlops(merged)


def overridden(base: DeviceType, entry: DeviceSpec) -> DeviceType:
    """The type with the entry's numbers; ``base`` itself where these change nothing."""
    given = {
        "peak_flops_per_s": _merged(base.peak_flops_per_s, entry.peak_flops),
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth,
        "compute_efficiency": entry.compute_efficiency,
        "memory_efficiency": entry.memory_efficiency,
        "launch_overhead_s": entry.launch_overhead,
    }
    changed = {k: v for k, v in given.items() if v is not None and v != getattr(base, k)}
    if not changed:
        return base
    return replace(base, **changed, source=f"{base.source}; cluster file")  # type: ignore[arg-type]


def throttled(kind: DeviceType, quota: float) -> DeviceType:
    """A core that runs only ``quota`` of the time, so that everything takes 1 / quota as long."""
    if quota == 1:
        return kind
    return replace(
        kind,
        name=f"{kind.name}@{quota:g}",
        peak_flops_per_s={d: p * quota for d, p in kind.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s * quota,
        launch_overhead_s=kind.launch_overhead_s / quota,
    )


def is_cpu(type_name: str) -> bool:
    """Whether a type of device is a core, or the share of one that ``throttled`` leaves.

    >>> is_cpu("CPU@0.4")
    True
    """
    return type_name.partition("@")[0] == CPU
