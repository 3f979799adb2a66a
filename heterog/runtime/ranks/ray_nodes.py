"""The devices of nodes of a Ray cluster, and what the hosts of a plan need of them.

Ray knows a node's devices by a custom resource with the name of their type (``ray start
--resources '{"T4": 2}'``), or by its GPUs and their ``accelerator_type``. Processors without such
a resource are its CPUs.
"""

from collections.abc import Mapping, Sequence
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
"""Amount of a node's ``accelerator_type`` that a host asks for, to get a node that has it."""

Resources = Mapping[str, float]
"""Amounts by Ray's name of a resource."""


def asked_of_nodes(cluster: Cluster, nodes: Sequence[Resources]) -> list[dict[str, float]]:
    """The resources that each host of a cluster asks of a node, for all of its ranks.

    Args:
        cluster: The plan's cluster.
        nodes: Resources of each node that is alive.

    Raises:
        HeterogError: there are not enough nodes with the devices of the hosts.
    """
    names = {kind.name: _names_of(kind.name, nodes) for kind in cluster.device_types}
    asked = []
    for devices in cluster.host_devices:
        bundle: dict[str, float] = {}
        for device in devices:
            for key, amount in names[cluster.devices[device].type.name].items():
                bundle[key] = bundle.get(key, 0.0) + amount
        asked.append(bundle)
    _check_enough(cluster, asked, nodes)
    return asked


def _names_of(device_type: str, nodes: Sequence[Resources]) -> Resources:
    """Resources of a rank on a device of a type, by the nodes' names; empty if no node has it."""
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
    cluster: Cluster, asked: Sequence[Resources], nodes: Sequence[Resources]
) -> None:
    """Check that each host can have a node of its own.

    Raises:
        HeterogError: a host gets none; says what it needs and what the nodes have.
    """
    fits = np.array(
        [
            [all(node.get(key, 0.0) >= n for key, n in bundle.items()) for node in nodes]
            for bundle in asked
        ]
    ).reshape(len(asked), len(nodes))
    rows, columns = linear_sum_assignment(~fits)
    of_host: dict[int, int] = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    for number, host in enumerate(cluster.hosts):
        if number not in of_host or not fits[number, of_host[number]]:
            there = "; ".join(in_words(node) for node in nodes) or "none"
            raise HeterogError(
                f"no node of the Ray cluster is left for host {host.name}, which needs "
                f"{in_words(asked[number])}; nodes have {there}. Start one with ray start "
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
    """The device resources of each node of the cluster."""
    return [offered(node) for node in ray.nodes()]


def is_draining(ray: Any) -> bool:
    """Whether Ray drains the node of this actor, because its end was announced."""
    node = ray.get_runtime_context().get_node_id()
    return bool(node in ray._private.state.state.get_draining_nodes())  # as Ray Train asks
