"""Ranks on the nodes of a Ray cluster: an actor starts each, where its device is.

A host of the plan is a bundle of a placement group, so that its ranks share a node, and no two
hosts do. Ray knows a node's devices by a custom resource with the name of their type (``ray start
--resources '{"T4": 2}'``), or by its GPUs and their ``accelerator_type``; processors that nothing
names are its CPUs. Files that ranks read or write, but for the plan, have the same path on all
nodes, as what ``ray job submit`` brings in its working directory.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from heterog.cluster import Cluster
from heterog.cluster.catalog import may_mean
from heterog.cluster.overrides import is_cpu
from heterog.errors import HeterogError
from heterog.files import read_json, write_atomically
from heterog.runtime.launch import (
    HEARTBEAT,
    LocalRank,
    end_ranks,
    free_port,
    interface_of,
    signals_as_exit,
    start_rank,
    temporary_folder,
    with_package,
)
from heterog.runtime.ranks.watching import wait_for_ranks
from heterog.runtime.request import RunRequest
from heterog.workers import connect_to_ray

_ACCELERATOR = "accelerator_type:"
_GPU, _CPU = "GPU", "CPU"
_SLIVER = 0.001
"""Of a node's ``accelerator_type``: enough to be on a node that has it."""
_PLACED_S = 60.0
_GONE = -9
"""Exit code of a rank whose node or actor is lost: as if it had been killed."""
_SILENT_S = 10.0
"""Seconds without an answer after which a node counts as lost."""
_END_S = 10.0

Resources = Mapping[str, float]
"""Amounts by Ray's name of a resource."""


def run_on_ray(
    request: RunRequest, *, progress: Callable[[str], None] = lambda stage: None
) -> dict[str, Any]:
    """Run a plan on the Ray cluster of ``RAY_ADDRESS``, each rank where the plan has its device.

    Args:
        request: What to run.
        progress: Called with what rank 0 does, whenever that changes.

    Returns:
        The measurements of rank 0.

    Raises:
        LaunchError: a rank failed, its node was lost, or the time is over.
        HeterogError: Ray is missing or does not answer, or lacks devices; the text says which.
    """
    plan = request.load()
    if plan.background is not None:
        raise HeterogError(
            "a plan with a background job runs on one machine only; plan without `background`, "
            "or run it there."
        )
    content = request.plan.read_bytes()
    with signals_as_exit(), _ray() as ray:
        asked = asked_of_nodes(plan.cluster, [_offered(node) for node in ray.nodes()])
        group = ray.util.placement_group(
            [dict(host.bundle) for host in asked],
            strategy="STRICT_SPREAD" if len(asked) > 1 else "STRICT_PACK",
        )
        ranks: list[_RayRank] = []
        try:
            _wait_until_placed(ray, group, asked)
            actors = [
                _actor(ray, group, place, dict(each))
                for place, host in enumerate(asked)
                for each in host.ranks
            ]
            address, port = ray.get(actors[0].meeting_place.remote())
            locals_of = [len(host.ranks) for host in asked for _ in host.ranks]
            local = [number for host in asked for number in range(len(host.ranks))]
            for rank, actor in enumerate(actors):
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(actors)),
                    "LOCAL_RANK": str(local[rank]),
                    "LOCAL_WORLD_SIZE": str(locals_of[rank]),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(request.port or port),
                }
                actor.start.remote(content, request.to_json(), variables)
                ranks.append(_RayRank(ray, actor))
            wait_for_ranks(ranks, request.limits, progress)
            measured = ray.get(actors[0].measured.remote())
            assert isinstance(measured, dict)
            return measured
        finally:
            _end(ray, group, ranks)


# --- devices and nodes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOfNode:
    """What a host of the plan asks of one node.

    Attributes:
        host: The host's name.
        bundle: All that its ranks need.
        ranks: What each of its ranks needs.
    """

    host: str
    bundle: Resources
    ranks: tuple[Resources, ...]


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
        ranks = tuple(names[name] for name in types)
        bundle: dict[str, float] = {}
        for each in ranks:
            for key, amount in each.items():
                bundle[key] = bundle.get(key, 0.0) + amount
        asked.append(AskedOfNode(host=host.name, bundle=bundle, ranks=ranks))
    _check_enough(cluster, asked, nodes)
    return asked


def _names_of(device_type: str, nodes: Sequence[Resources]) -> Resources:
    """What a rank on a device of a type needs, in the names that the nodes use; empty if none."""
    keys = sorted({key for node in nodes for key in node})
    for key in keys:
        if may_mean(key, device_type):
            has_gpus = any(node.get(_GPU) for node in nodes if key in node)
            return {key: 1.0, **({_GPU: 1.0} if has_gpus else {})}
    for key in keys:
        if key.startswith(_ACCELERATOR) and may_mean(key.removeprefix(_ACCELERATOR), device_type):
            return {key: _SLIVER, _GPU: 1.0}
    return {_CPU: 1.0} if is_cpu(device_type) else {device_type: 1.0}


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
            there = "; ".join(_in_words(node) for node in nodes) or "none"
            raise HeterogError(
                f"no node of the Ray cluster is left for host {host.host}, which needs "
                f"{_in_words(host.bundle)}; nodes have {there}. Start one with ray start "
                "--resources and the names of its device types, or plan for what there is "
                f"({len(cluster.hosts)} hosts are asked for)."
            )


def _in_words(resources: Resources) -> str:
    """Resources for people: ``2 T4, 4 CPU``."""
    return ", ".join(
        key.removeprefix(_ACCELERATOR) if amount < 1.0 else f"{amount:g} {key}"
        for key, amount in sorted(resources.items())
    )


def _offered(node: Mapping[str, Any]) -> Resources:
    """The resources of a node in Ray's list that may be devices; nothing if it is gone."""
    if not node.get("Alive"):
        return {}
    other = ("memory", "object_store_memory")
    return {
        key: float(amount)
        for key, amount in node["Resources"].items()
        if key not in other and not key.startswith("node:")
    }


# --- ranks ---------------------------------------------------------------------------------------


class _Starter:
    """The class of an actor: starts a rank on its node and tells how it is."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._folder = Path(self._open.enter_context(temporary_folder()))
        self._rank: LocalRank | None = None

    def meeting_place(self) -> tuple[str, int]:
        """Address of this node, and a port that is free on it."""
        return _own_address(), free_port()

    def start(self, plan: bytes, request: str, variables: Mapping[str, str]) -> None:
        """Start the rank."""
        path = self._folder / "plan.json"
        write_atomically(path, plan)
        run_file = self._folder / "run.json"
        fields = {**json.loads(request), "plan": str(path), "output": str(self._output)}
        write_atomically(run_file, json.dumps(fields).encode())
        words, heartbeat = self._folder / "rank.err", self._folder / "rank.stage"
        interface = interface_of(_own_address())
        common = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": with_package(),
            HEARTBEAT: str(heartbeat),
            **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        }
        process = start_rank(
            [sys.executable, "-m", "heterog.runtime.rank", str(run_file)],
            {**os.environ, **common, **variables},
            words,
        )
        self._rank = LocalRank(process, words, heartbeat)

    def look(self) -> tuple[int | None, str, bool, int, str]:
        """Its exit code, stage, whether it is stopped, its process and its last words."""
        rank = self._rank
        if rank is None:
            return None, "", False, 0, ""
        rank.look(time.monotonic())
        code = rank.poll()
        return code, rank.stage, rank.stopped_since_s is not None, rank.pid, rank.last_words()

    def measured(self) -> Any:
        """What rank 0 measured."""
        return read_json(self._output, "measurement")

    def end(self) -> None:
        """End the rank."""
        if self._rank is not None:
            end_ranks([self._rank.process])
        self._open.close()

    @property
    def _output(self) -> Path:
        return self._folder / "measured.json"


class _RayRank:
    """A rank on a node, as its actor tells; see ``watching.Watched``."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self.actor = ray, actor
        self.stage, self.since_s = "", time.monotonic()
        self.stopped_since_s: float | None = None
        self._code: int | None = None
        self._words, self._pid = "", 0
        self._heard_s = time.monotonic()

    @property
    def pid(self) -> int:
        """Id of its process on its node."""
        return self._pid

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""
        if self._code is None:
            self.look(time.monotonic())
        return self._code

    def look(self, now_s: float) -> None:
        """Ask its actor, whose node may be lost."""
        if self._code is not None:
            return
        errors = self._ray.exceptions
        try:
            told = self._ray.get(self.actor.look.remote(), timeout=1.0)
        except errors.RayError as error:
            is_silent = isinstance(error, errors.GetTimeoutError)
            if not is_silent or now_s - self._heard_s > _SILENT_S:
                self._code, self._words = _GONE, "its Ray node, or its actor there, is lost."
            return
        self._heard_s = now_s
        self._code, stage, is_stopped, self._pid, self._words = told
        if stage and stage != self.stage:
            self.stage, self.since_s = stage, now_s
        if not is_stopped:
            self.stopped_since_s = None
        elif self.stopped_since_s is None:
            self.stopped_since_s = now_s

    def last_words(self) -> str:
        """Its error line, or the last line that it printed."""
        return self._words


@contextmanager
def _ray() -> Iterator[Any]:
    """Ray, connected; a cluster that was started for it ends with it."""
    ray, is_mine = connect_to_ray()
    try:
        yield ray
    finally:
        if is_mine:
            ray.shutdown()


def _actor(ray: Any, group: Any, place: int, needs: dict[str, float]) -> Any:
    """The actor of a rank in a bundle of the placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return (
        ray.remote(_Starter)
        .options(
            num_cpus=needs.pop(_CPU, 0),
            num_gpus=needs.pop(_GPU, 0),
            resources=needs,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=place
            ),
        )
        .remote()
    )


def _wait_until_placed(ray: Any, group: Any, asked: Sequence[AskedOfNode]) -> None:
    """Wait for the nodes.

    Raises:
        HeterogError: other jobs of the cluster hold them.
    """
    if not group.wait(_PLACED_S):
        wanted = "; ".join(f"{host.host}: {_in_words(host.bundle)}" for host in asked)
        raise HeterogError(
            f"the Ray cluster has the devices ({wanted}) but did not give them within "
            f"{_PLACED_S:g} s: other jobs hold them. See ray status, and run again when they are "
            "done."
        )


def _end(ray: Any, group: Any, ranks: Sequence[_RayRank]) -> None:
    """End all ranks and give their nodes back."""
    asked = [rank.actor.end.remote() for rank in ranks]
    with suppress(ray.exceptions.RayError):
        ray.wait(asked, num_returns=len(asked), timeout=_END_S) if asked else None
    for rank in ranks:
        ray.kill(rank.actor)
    ray.util.remove_placement_group(group)


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
