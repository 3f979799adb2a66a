"""Clusters: devices, hosts and links; the catalogue of device types; presets and cluster files.

``topology`` has the cluster, the resources that transfers occupy, and the settings of the program
that runs steps. ``hardware`` has devices, hosts, links and prices, and checks them. ``catalog``
finds entries of ``data``.

A file goes from ``spec`` through ``schema`` (its YAML text and its fields) and ``building`` into a
cluster, and back; ``spec`` also reads the records of ``Cluster.to_dict``.
"""

from heterog.cluster.catalog import device_type, device_type_names
from heterog.cluster.hardware import Device, DeviceType, Host, Link, PairLimit
from heterog.cluster.spec import preset_names
from heterog.cluster.topology import Cluster, LinkResource

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
