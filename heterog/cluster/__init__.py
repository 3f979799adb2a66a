"""Clusters: devices, hosts and links; the catalogue of device types; presets and cluster files."""

from heterog.cluster.catalog import device_type, device_type_names
from heterog.cluster.spec import preset_names
from heterog.cluster.topology import (
    Cluster,
    Device,
    DeviceType,
    Host,
    Link,
    LinkResource,
    PairLimit,
)

__all__ = [
    "Cluster",
    "Device",
    "DeviceType",
    "Host",
    "Link",
    "LinkResource",
    "PairLimit",
    "device_type",
    "device_type_names",
    "preset_names",
]
