"""Clusters: devices, hosts and links; the catalogue of device types; presets and cluster files.

``topology`` has the cluster, ``hardware`` what it is made of, ``execution`` the settings of the
program that runs steps on it, ``prices`` those of hosts. ``resources`` numbers what transfers
occupy, ``validation`` checks a cluster as a whole (``checks`` single values), ``fingerprint`` says
which are equal. ``catalog`` and ``links`` find entries of ``data``.

A file goes from ``spec`` through ``document`` (text with lines), ``schema`` (of ``fields`` and
``pairs``) and ``building`` (with ``overrides``) into a cluster; ``writing`` goes back.
``json_record`` reads what ``Cluster.to_dict`` makes.
"""

from heterog.cluster.catalog import device_type, device_type_names
from heterog.cluster.hardware import Device, DeviceType, Host, Link, PairLimit
from heterog.cluster.resources import LinkResource
from heterog.cluster.spec import preset_names
from heterog.cluster.topology import Cluster

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
