"""Nodes of a Ray cluster on this machine, each a raylet with resources of its own."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def ray_nodes(
    monkeypatch: pytest.MonkeyPatch, *resources: Mapping[str, float], namespace: str | None = None
) -> Iterator[Any]:
    """A head without devices, and a node with each of these resources; Ray is connected."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; pip install heterog[ray]")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default workers yield to all else
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # of a machine that is busy
    ray: Any = importlib.import_module("ray")
    made: Any = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for each in resources:
        made.add_node(num_cpus=1, resources=dict(each))
    ray.init(address=made.address, namespace=namespace, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()
