"""A first cluster file for several machines: of Ray, of torchrun, or of a Slurm job.

Each machine is described as in ``detect``. Neighbours in a ring of machines send each other a
large tensor. A host's NIC gets the better of the two rates in which it took part, so that a slower
neighbour does not count.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from heterog.cluster import DeviceType
from heterog.cluster.catalog import matching_types
from heterog.cluster.schema import is_cpu
from heterog.errors import HeterogError
from heterog.records import parse_dataclass
from heterog.runtime.accelerators import CPU_BACKEND
from heterog.runtime.measure.detect import FoundDevice, FoundMachine, detect, usable_bytes
from heterog.runtime.rank import join
from heterog.runtime.ranks.on_ray import connected
from heterog.runtime.ranks.ray_nodes import ACCELERATOR, CPU, GPU, Resources, offered
from heterog.runtime.step.collectives import gather_texts
from heterog.workers import connect_to_ray

_PROBE_BYTES = 64 * 1024**2
_PROBES = 3
_JOIN_S = 300.0


def detect_on(engine: str, variables: Mapping[str, str] = os.environ) -> list[FoundMachine]:
    """Describe the machines of an engine.

    Args:
        engine: ``ray``, ``torchrun`` or ``slurm``.
        variables: The environment.

    Returns:
        The machines; none on ranks of torchrun that are not the first.

    Raises:
        HeterogError: the engine is missing, or has no devices.
    """
    match engine:
        case "ray":
            return _on_ray()
        case "torchrun":
            return _on_torchrun()
        case _:
            return in_slurm(variables)


# --- Ray -----------------------------------------------------------------------------------------


def _on_ray() -> list[FoundMachine]:
    with connected() as ray:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        had = {node["NodeID"]: offered(node) for node in nodes}
        if any(named_devices(each) or each.get(GPU) for each in had.values()):
            had = {of: each for of, each in had.items() if named_devices(each) or each.get(GPU)}
        if not had:
            raise HeterogError("no node of the Ray cluster has a device; see ray status.")
        found = []
        for number, (node, has) in enumerate(had.items()):
            devices, link = named_devices(has), None
            if has.get(GPU) or not devices:
                seen = _there(ray, node, detect, num_gpus=has.get(GPU, 0.0))
                there = ray.get(seen.remote())
                count = 1 if has.get(GPU) else int(has.get(CPU, 1.0))
                devices, link = devices or [*there.devices] * count, there.link
            found.append(FoundMachine(host=f"node{number}", devices=tuple(devices), link=link))
        rates = []
        for source, target in _ring(list(had)):
            box = [_there(ray, source, _probe_bytes).remote()]
            ray.wait(box, fetch_local=False)
            rates.append(ray.get(_there(ray, target, _fetch_bytes_per_s).remote(box)))
        return with_rates(
            told_apart(found),
            rates,
            "as Ray moved 64 MiB through hosts' memory; GPUs may reach more",
        )


def named_devices(has: Resources) -> list[FoundDevice]:
    """Devices of a node that the catalogue knows; those named by custom resources come first."""
    custom = {key: has[key] for key in has if key not in (CPU, GPU) and matching_types(key)}
    accelerators = [key.removeprefix(ACCELERATOR) for key in has if key.startswith(ACCELERATOR)]
    counts = custom or {key: has.get(GPU, 0.0) for key in accelerators if matching_types(key)}
    return [each for key, amount in counts.items() for each in [listed(key)] * int(amount)]


def listed(name: str) -> FoundDevice:
    """A device of the catalogue, with the least memory that its name allows."""
    kind = min(matching_types(name), key=lambda each: each.memory_bytes)
    return FoundDevice(
        label=name, type=kind, is_listed=True, usable_memory_bytes=usable_bytes(kind.memory_bytes)
    )


def _there(ray: Any, node: str, what: Any, **needs: float) -> Any:
    """A function that runs on a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(what).options(num_cpus=0, scheduling_strategy=where, **needs)


def _probe_bytes() -> list[Any]:
    ray = connect_to_ray()[0]
    return [ray.put(np.ones(_PROBE_BYTES, np.uint8)) for _ in range(_PROBES)]


def _fetch_bytes_per_s(box: Sequence[Any]) -> float:
    """The best rate at which this node fetches objects of another node."""
    ray = connect_to_ray()[0]
    seconds = []
    for each in ray.get(box[0]):
        begin_s = time.perf_counter()
        ray.get(each)
        seconds.append(time.perf_counter() - begin_s)
    return _PROBE_BYTES / min(seconds)


# --- torchrun ------------------------------------------------------------------------------------


def _on_torchrun() -> list[FoundMachine]:
    join(_JOIN_S, backend=CPU_BACKEND)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    said = gather_texts(as_text(detect()) if is_first else "")
    ranks = [rank for rank, text in enumerate(said) if text]
    found = told_apart([from_text(said[rank]) for rank in ranks])
    content = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    told = []
    for source, target in _ring(ranks):
        seconds = []
        for _ in range(_PROBES):
            dist.barrier()
            begin_s = time.perf_counter()
            if dist.get_rank() == source:
                dist.send(content, target)
            elif dist.get_rank() == target:
                dist.recv(content, source)
            seconds.append(time.perf_counter() - begin_s)
        rate = torch.tensor([_PROBE_BYTES / min(seconds)])
        dist.broadcast(rate, target)
        told.append(float(rate))
    is_here = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return with_rates(found, told, "as gloo moved 64 MiB") if is_here else []


def as_text(machine: FoundMachine) -> str:
    """A machine as JSON, for other ranks."""
    return json.dumps(asdict(machine), default=dict)  # a device's peaks are a read-only mapping


def from_text(text: str) -> FoundMachine:
    """The machine of a text that ``as_text`` made."""
    return parse_dataclass(json.loads(text), FoundMachine, "a machine")


def told_apart(found: Sequence[FoundMachine]) -> list[FoundMachine]:
    """Machines with unambiguous names of hosts and device types.

    Machines of one name are numbered. Processors of each machine have a type of their own. Other
    measured devices are of one type if their drivers give them the same name.
    """
    if len(found) == 1:
        return list(found)
    names = [each.host for each in found]
    if len(set(names)) < len(names):
        names = [f"{name}-{number}" for number, name in enumerate(names)]
    measured: dict[str, DeviceType] = {}

    def own(device: FoundDevice, host: str) -> FoundDevice:
        kind = device.type
        if device.is_listed:
            return device
        if is_cpu(kind.name):
            return replace(device, type=replace(kind, name=f"{kind.name}@{host}"))
        return replace(device, type=measured.setdefault(kind.name, kind))

    return [
        replace(each, host=name, devices=tuple(own(device, name) for device in each.devices))
        for name, each in zip(names, found, strict=True)
    ]


# --- Slurm ---------------------------------------------------------------------------------------


def in_slurm(variables: Mapping[str, str]) -> list[FoundMachine]:
    """The machines of a Slurm job, also of a heterogeneous one, from its environment.

    Device types are those that the job asked for (``--gpus-per-node a100:4``), else this
    machine's.

    Raises:
        HeterogError: this is no Slurm job.
    """
    kinds = int(variables.get("SLURM_HET_SIZE", "0"))
    ends = [f"_HET_GROUP_{number}" for number in range(kinds)] or [""]
    found = []
    for end in ends:
        names = variables.get(f"SLURM_JOB_NODELIST{end}", "")
        if not names:
            raise HeterogError(
                "SLURM_JOB_NODELIST is not set: run this within a Slurm job (salloc, sbatch)."
            )
        name, _, count = variables.get(f"SLURM_GPUS_PER_NODE{end}", "").rpartition(":")
        if matching_types(name):
            devices = [listed(name)] * int(count)
        else:
            devices = list(detect().devices)
        found += [FoundMachine(host=host, devices=tuple(devices)) for host in nodes_of(names)]
    return found


def nodes_of(names: str) -> list[str]:
    """Names of hosts in a list in Slurm's notation.

    >>> nodes_of("login,gpu[08-10,12]-a,t4")
    ['login', 'gpu08-a', 'gpu09-a', 'gpu10-a', 'gpu12-a', 't4']
    """
    found = []
    for each in re.findall(r"[^,\[]+(?:\[[^]]*\][^,\[]*)?", names):
        begin, bracket, rest = each.partition("[")
        inner, _, end = rest.partition("]")
        for part in inner.split(",") if bracket else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if part else [""]
            found += [f"{begin}{str(number).zfill(len(first))}{end}" for number in numbers]
    return found


# --- all -----------------------------------------------------------------------------------------


def _ring(members: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs of neighbours in a ring; a single member has none."""
    count = len(members)
    return [(members[i], members[(i + 1) % count]) for i in range(count)] if count > 1 else []


def with_rates(
    found: Sequence[FoundMachine], rates: Sequence[float], said: str
) -> list[FoundMachine]:
    """Machines with the NIC rates that transfers from each to the next one show.

    Args:
        found: The machines.
        rates: Bytes per second from each to the next in a ring; none for one machine.
        said: How the rates were found.
    """
    if not rates:
        return list(found)
    return [
        replace(each, nic_bytes_per_s=max(rates[number], rates[number - 1]), nic_said=said)
        for number, each in enumerate(found)
    ]
