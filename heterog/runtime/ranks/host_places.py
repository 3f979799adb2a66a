"""Finds the host of a plan that each machine under torchrun is, by its devices.

torchrun numbers machines as they arrive. Before the ranks join, each announces its device, and
takes the number of that device in the plan.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from heterog.cluster import Cluster
from heterog.cluster.catalog import may_mean
from heterog.errors import HeterogError
from heterog.runtime.accelerators import device_label, has_accelerator

DEVICE_TYPES = "HETEROG_DEVICE_TYPES"
"""Variable with the types of a machine's devices, separated by commas. It is needed if drivers use
other names than the plan, or if processors stand for other devices."""
HOST = "HETEROG_HOST"
"""Variable with the name of this machine in the plan, if hosts with the same devices differ."""
_ANY = ""
"""A processor, which may stand for a device of any type."""
_KEY = "heterog/device/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHas:
    """The machine and device of a rank under torchrun.

    Attributes:
        machine: Number of its machine.
        device: Type of its device; empty for a processor.
        host: Name of its host in the plan; empty if it may be any with such devices.
    """

    machine: int
    device: str
    host: str = ""


def rank_in_plan(cluster: Cluster, store: Any, timeout_s: float) -> int:
    """This process's rank in a plan, by its own device and those of all others.

    Args:
        cluster: The plan's cluster.
        store: Store that all ranks reach.
        timeout_s: Seconds to wait for the others.

    Raises:
        HeterogError: a machine is no host of the plan; the text says why, on all ranks.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != cluster.num_devices:
        raise HeterogError(
            f"the plan has {cluster.num_devices} devices, and torchrun started {world_size} "
            "ranks: set its nnodes and nproc-per-node to the plan's hosts and devices a host."
        )
    said = say_to_all(store, _KEY, json.dumps(asdict(own_place())), timeout_s)
    ranks = [RankHas(**json.loads(each)) for each in said]
    return ranks_in_plan(cluster, ranks)[int(os.environ["RANK"])]


def say_to_all(store: Any, key: str, text: str, timeout_s: float) -> list[str]:
    """The text of each rank, by torchrun's numbers; for ranks that have met and not yet joined."""
    store.set(f"{key}{os.environ['RANK']}", text)
    keys = [f"{key}{each}" for each in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [store.get(each).decode() for each in keys]


def own_place() -> RankHas:
    """The machine and device of this rank."""
    machine, host = int(os.environ["GROUP_RANK"]), os.environ.get(HOST, "")
    return RankHas(machine=machine, device=_own_device(), host=host)


def ranks_in_plan(cluster: Cluster, ranks: Sequence[RankHas]) -> list[int]:
    """Device in the plan of each rank of torchrun; there may be fewer ranks than devices.

    Machines that match several hosts keep their order as far as the others allow.

    Raises:
        HeterogError: a machine is no host of the plan; the text says what it has and what is left.
    """
    machines = sorted({rank.machine for rank in ranks})
    has = [[rank.device for rank in ranks if rank.machine == machine] for machine in machines]
    hosts = [
        [cluster.devices[device].type.name for device in devices]
        for devices in cluster.host_devices
    ]
    named = [next(rank.host for rank in ranks if rank.machine == each) for each in machines]
    places = [[_places_on(host, own) for host in hosts] for own in has]
    fits = np.array([
        [there is not None and name in ("", host.name)
         for there, host in zip(on_hosts, cluster.hosts, strict=True)]
        for on_hosts, name in zip(places, named, strict=True)
    ])  # fmt: skip
    order = np.abs(np.arange(len(has))[:, None] - np.arange(len(hosts)))
    chosen = linear_sum_assignment(np.where(fits, order, len(has) * len(hosts) ** 2))[1]
    for machine, own in enumerate(has):
        if machine >= len(chosen) or not fits[machine, chosen[machine]]:
            wanted = "; ".join(
                f"{host.name} has {_in_words(kinds)}"
                for host, kinds in zip(cluster.hosts, hosts, strict=True)
            )
            raise HeterogError(
                f"machine {machines[machine]} of torchrun has {_in_words(own)} and is no host of "
                f"the plan, or one that is taken: {wanted}. Start the plan's hosts, plan for what "
                f"there is, or name its devices in {DEVICE_TYPES}, or its host in {HOST}."
            )
    found = [0] * len(ranks)
    for machine, host in enumerate(chosen.tolist()):
        members = [n for n, rank in enumerate(ranks) if rank.machine == machines[machine]]
        for number, place in zip(members, places[machine][host] or (), strict=True):
            found[number] = cluster.host_devices[host][place]
    return found


def _places_on(host: Sequence[str], own: Sequence[str]) -> list[int] | None:
    """Place of each device of a machine on a host; ``None`` unless it has just the host's devices.

    A processor stands for a device of any type.
    """
    left, found = list(range(len(host))), [0] * len(own)
    for number in sorted(range(len(own)), key=lambda each: own[each] == _ANY):
        kind = own[number]
        place = next((each for each in left if kind == _ANY or may_mean(kind, host[each])), None)
        if place is None:
            return None
        left.remove(place)
        found[number] = place
    return None if left else found


def _own_device() -> str:
    """Type of this rank's device."""
    local = int(os.environ["LOCAL_RANK"])
    named = [each.strip() for each in os.environ.get(DEVICE_TYPES, "").split(",") if each.strip()]
    if named:
        if local >= len(named):
            raise HeterogError(
                f"{DEVICE_TYPES} names {len(named)} devices, and this is rank {local} of its "
                "machine, counted from 0; name one for each rank."
            )
        return named[local]
    return device_label(local) if has_accelerator() else _ANY


def _in_words(kinds: Sequence[str]) -> str:
    """Types for people: ``2 T4, 1 processor``."""
    counted = Counter(kind or "processor" for kind in kinds)
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counted.items())) or "nothing"
