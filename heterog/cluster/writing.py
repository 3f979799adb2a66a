"""Writes cluster files: names of the catalogue where they load as the same, else all numbers."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from heterog.cluster.catalog import device_type, listed_type
from heterog.cluster.execution import Execution, Sends, Tf32
from heterog.cluster.hardware import DTYPES, DeviceType
from heterog.cluster.links import link_kinds
from heterog.cluster.overrides import CPU, throttled
from heterog.cluster.pairs import pairs_record
from heterog.cluster.topology import SHIPPED_MODELS, Cluster
from heterog.files import write_atomically
from heterog.units import parse_bandwidth, parse_bytes, parse_flops_per_s, parse_seconds


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a cluster file; see ``Cluster.save``."""
    text = yaml.dump(
        _file_record(cluster, path), sort_keys=False, default_flow_style=None, width=99
    )
    write_atomically(path, text.encode())


def _file_record(cluster: Cluster, path: Path) -> dict[str, Any]:
    record: dict[str, Any] = {
        "schema_version": 1,
        "name": cluster.name,
        "efficiency": float(cluster.efficiency),
    }
    if cluster.calibration is not None:
        is_path = cluster.calibration not in SHIPPED_MODELS
        record["calibration"] = (
            os.path.relpath(cluster.calibration, path.parent) if is_path else cluster.calibration
        )
    if cluster.sends != Sends.OVERLAPPED:
        record["sends"] = str(cluster.sends)
    if cluster.execution != Execution.EAGER:
        record["execution"] = str(cluster.execution)
    if cluster.tf32 != Tf32.CONVOLUTIONS:
        record["tf32"] = str(cluster.tf32)
    record["hosts"] = [_host_record(cluster, h) for h in range(cluster.num_hosts)]
    if cluster.pairs:
        record["pairs"] = pairs_record(cluster)
    if cluster.prices is not None:
        record["prices"] = cluster.prices.to_dict()
    return record


def _host_record(cluster: Cluster, host_index: int) -> dict[str, Any]:
    host = cluster.hosts[host_index]
    named = {each.link: each.name for each in link_kinds()}
    intra: str | dict[str, Any] = named.get(
        host.intra,
        "",
    ) or {
        "kind": host.intra.kind,
        "bandwidth": _text(host.intra.bandwidth_bytes_per_s, _RATES, parse_bandwidth),
        "latency": _text(host.intra.latency_s, _TIMES, parse_seconds),
        "shared": host.intra.shared,
    }
    nic: dict[str, Any] = {
        "line_rate": _text(host.nic_line_rate_bytes_per_s, _NIC_RATES, parse_bandwidth),
        "latency": _text(host.nic_latency_s, _TIMES, parse_seconds),
    }
    if host.num_nics > 1:
        nic["count"] = host.num_nics
    if host.collectives is not None:
        nic["collectives"] = asdict(host.collectives)
    record: dict[str, Any] = {
        "name": host.name,
        "devices": _device_records(cluster, host_index),
        "intra": intra,
        "nic": nic,
    }
    if host.cpu_quota is not None:
        record["testbed"] = {"cpu_quota": float(host.cpu_quota)}
    return record


def _device_records(cluster: Cluster, host_index: int) -> list[dict[str, Any]]:
    """Entries of the devices; neighbours of one type and usable memory share an entry."""
    host = cluster.hosts[host_index]
    records: list[dict[str, Any]] = []
    previous: tuple[DeviceType, int] | None = None
    members = cluster.host_devices(host_index)
    usual_names = [f"{host.name}:{i}" for i in range(len(members))]
    are_usual = [cluster.devices[i].name for i in members] == usual_names
    for index in members:
        device = cluster.devices[index]
        if (device.type, device.usable_memory_bytes) != previous:
            previous = (device.type, device.usable_memory_bytes)
            records.append(
                {
                    "type": _type_record(device.type, host.cpu_quota),
                    "count": 0,
                    "usable_memory": _text(device.usable_memory_bytes, _SIZES, parse_bytes),
                }
                | ({} if are_usual else {"names": []})
            )
        records[-1]["count"] += 1
        if not are_usual:
            records[-1]["names"].append(device.name)
    return records


def _type_record(of_type: DeviceType, quota: float | None) -> str | dict[str, Any]:
    """A name of the catalogue if it loads as exactly this type, else all numbers."""
    if quota is not None and of_type == throttled(device_type(CPU), quota):
        return CPU
    listed = listed_type(of_type.name)
    is_listed = listed is not None and of_type == listed.type
    if is_listed and not (quota is not None and of_type.name == CPU):
        return of_type.name
    return {
        "name": of_type.name,
        "peak_flops": {
            dtype: _text(of_type.peak_flops_per_s[dtype], _SPEEDS, parse_flops_per_s)
            for dtype in DTYPES
            if dtype in of_type.peak_flops_per_s
        },
        "memory_bandwidth": _text(of_type.memory_bandwidth_bytes_per_s, _RATES, parse_bandwidth),
        "memory": _text(of_type.memory_bytes, _SIZES, parse_bytes),
        "source": of_type.source,
        "compute_efficiency": float(of_type.compute_efficiency),
        "memory_efficiency": float(of_type.memory_efficiency),
        "launch_overhead": _text(of_type.launch_overhead_s, _TIMES, parse_seconds),
    }


_RATES = {"GB/s": 1e9, "MB/s": 1e6}
_NIC_RATES = {"Gbit/s": 0.125e9, "Mbit/s": 0.125e6}
_SIZES = {"GiB": 1024.0**3, "MiB": 1024.0**2}
_SPEEDS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3}


def _text(value: float, units: dict[str, float], parse: Callable[[str], float]) -> str | float:
    """A short text with a unit if it parses to exactly this value, else the value."""
    for unit, size in units.items():
        text = f"{value / size:.6g} {unit}"
        if value >= size and parse(text) == value:
            return text
    return value if isinstance(value, int) else float(value)
