"""What the nodes of a Ray cluster have, and what the hosts of a plan ask of them.

Ray knows a node's devices by a custom resource with the name of their type (``ray start
--resources '{"T4": 2}'``), or by its GPUs and their ``accelerator_type``; processors that nothing
names are its CPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from heterog.cluster import Cluster
from heterog.cluster.catalog import may_mean
from heterog.cluster.schema import is_cpu
from heterog.errors import HeterogError

ACCELERATOR = "accelerator_type:"
GPU, CPU = "GPU", "CPU"
_SLIVER = 0.001
"""Of a node's ``accelerator_type``: enough to be on a node that has it."""

Resources = Mapping[str, float]
"""Amounts by Ray's name of a resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOfNode:
    """What a host of the plan asks of one node.

    Attributes:
        host: The host's name.
        bundle: All that its ranks need.
    """

    host: str
    bundle: Resources


def asked_of_nodes(cluster: Cluster, nodes: Sequence[Resources]) -> list[AskedOfNode]:
    """What each host of a cluster asks of a node, in Ray's names.

    Args:
        cluster: The plan's cluster.
        nodes: Resources of each node that is alive.

    Raises:
        HeterogError: there are not enough nodes with the devices of the hosts.
    """
    names = {kind.name: _names_of(kind.name, nodes) for kind in cluster.device_types}
    asked = []
    for number, host in enumerate(cluster.hosts):
        types = [
            device.type.name
            for device, of in zip(cluster.devices, cluster.host_of, strict=True)
            if of == number
        ]
        bundle: dict[str, float] = {}
        for name in types:
            for key, amount in names[name].items():
                bundle[key] = bundle.get(key, 0.0) + amount
        asked.append(AskedOfNode(host=host.name, bundle=bundle))
    _check_enough(cluster, asked, nodes)
    return asked


def _names_of(device_type: str, nodes: Sequence[Resources]) -> Resources:
    """What a rank on a device of a type needs, in the names that the nodes use; empty if none."""
    keys = sorted({key for node in nodes for key in node})
    for key in keys:
        if may_mean(key, device_type):
            has_gpus = any(node.get(GPU) for node in nodes if key in node)
            return {key: 1.0, **({GPU: 1.0} if has_gpus else {})}
    for key in keys:
        if key.startswith(ACCELERATOR) and may_mean(key.removeprefix(ACCELERATOR), device_type):
            return {key: _SLIVER, GPU: 1.0}
    return {CPU: 1.0} if is_cpu(device_type) else {device_type: 1.0}


def _check_enough(
    cluster: Cluster, asked: Sequence[AskedOfNode], nodes: Sequence[Resources]
) -> None:
    """Check that each host can have a node of its own.

    Raises:
        HeterogError: one is left without; says what it needs and what there is.
    """
    fits = np.array(
        [
            [all(node.get(key, 0.0) >= n for key, n in host.bundle.items()) for node in nodes]
            for host in asked
        ]
    ).reshape(len(asked), len(nodes))
    rows, columns = linear_sum_assignment(~fits)
    of_host: dict[int, int] = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    for number, host in enumerate(asked):
        if number not in of_host or not fits[number, of_host[number]]:
            there = "; ".join(in_words(node) for node in nodes) or "none"
            raise HeterogError(
                f"no node of the Ray cluster is left for host {host.host}, which needs "
                f"{in_words(host.bundle)}; nodes have {there}. Start one with ray start "
                "--resources and the names of its device types, or plan for what there is "
                f"({len(cluster.hosts)} hosts are asked for)."
            )


def in_words(resources: Resources) -> str:
    """Resources for people: ``2 T4, 4 CPU``."""
    return ", ".join(
        key.removeprefix(ACCELERATOR) if amount < 1.0 else f"{amount:g} {key}"
        for key, amount in sorted(resources.items())
    )


def offered(node: Mapping[str, Any]) -> Resources:
    """The resources of a node in Ray's list that may be devices; nothing if it is gone."""
    if not node.get("Alive"):
        return {}
    other = ("memory", "object_store_memory")
    return {
        key: float(amount)
        for key, amount in node["Resources"].items()
        if key not in other and not key.startswith("node:")
    }


def offers(ray: Any) -> list[Resources]:
    """What each node of the cluster has."""
    return [offered(node) for node in ray.nodes()]


def is_draining(ray: Any) -> bool:
    """Whether the node of this actor is to be drained: its end was announced to Ray."""
    node = ray.get_runtime_context().get_node_id()
    return bool(node in ray._private.state.state.get_draining_nodes())  # as Ray Train asks
