"""Hosts of alike GPUs, and GPUs that multiply float32 in TF32."""

from dataclasses import replace
from pathlib import Path

from heterog.cluster import Cluster
from heterog.cluster.catalog import listed_type
from heterog.cluster.hardware import Device
from heterog.cluster.spec import parse_cluster

IN_A_HOST = 8


def alike_hosts(card: str, count: int, *, intra: str, nic: str) -> Cluster:
    """Hosts of eight GPUs of one type, or one with fewer.

    Args:
        card: their type.
        count: of all hosts.
        intra: link inside a host.
        nic: of each host, as in a cluster file.
    """
    hosts = -(-count // IN_A_HOST)
    text = (
        f"schema_version: 1\nname: {card}_x{count}\nhosts:\n"
        f"  - {{name: h, count: {hosts}, devices: [{{type: {card}, "
        f"count: {min(count, IN_A_HOST)}}}], intra: {intra}, nic: {nic}}}\n"
    )
    return parse_cluster(text, Path("hosts.yaml"))


def in_tf32(device: Device) -> Device:
    """The device, which multiplies float32 at the rate of TF32 where its type has that."""
    listed = listed_type(device.type.name)
    if listed is None or not listed.tf32_flops_per_s:
        return device
    peaks = {**device.type.peak_flops_per_s, "float32": listed.tf32_flops_per_s}
    return replace(device, type=replace(device.type, peak_flops_per_s=peaks))
