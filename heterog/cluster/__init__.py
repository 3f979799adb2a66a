"""Clusters: devices, hosts and links; the catalogue of device types; presets and cluster files.

``topology`` has the cluster, numbers what transfers occupy, and knows the settings of the program
that runs steps on it; ``hardware`` is what it is made of and what hosts cost, and checks it.
``catalog`` finds entries of ``data``.

A file goes from ``spec`` through ``schema`` (text with lines, and fields) and ``building`` into a
cluster, and back; ``spec`` also reads what ``Cluster.to_dict`` makes.
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
