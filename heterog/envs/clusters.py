"""Generated clusters to train on: 2 to 32 devices of mixed types, memories and networks.

Hosts hold one to eight equal devices. Network speed and memory are drawn relative to the graph,
because they decide whether there is anything to learn: nothing can be learned on a cluster whose
network and memory never limit the model.
"""

from dataclasses import dataclass, replace

import numpy as np

from heterog.cluster.catalog import device_type
from heterog.cluster.hardware import Device, DeviceType, Host, Link
from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph, Phase
from heterog.pricing.roofline import Roofline
from heterog.units import GIB

# Not the whole catalogue: a new card there must not change the drawn clusters, from which policies
# learn.
_GPUS = (
    "V100-16GB", "V100-32GB", "V100S-32GB", "P100-12GB", "P100-16GB", "GTX-1080-Ti", "T4",
    "RTX-2080-Ti", "Titan-RTX", "RTX-3090", "RTX-4090", "A10", "A40", "A100-40GB", "A100-80GB",
    "A800-80GB", "L40S", "H100", "H200", "GH200",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRange:
    """The distribution of generated clusters.

    Attributes:
        min_devices: Least number of devices.
        max_devices: Most devices; numbers are log-uniform, so low ones are more likely.
        traffic: Seconds of the model's gradients on an average NIC over the compute bound,
            log-uniform.
        nic_spread: Largest factor by which NICs are faster or slower than the average.
        speed_spread: Largest factor by which the efficiency of devices of a type differs.
        tight: Probability that memory is scarce.
    """

    min_devices: int = 2
    max_devices: int = 32
    traffic: tuple[float, float] = (0.1, 10.0)
    nic_spread: float = 2.5
    speed_spread: float = 1.5
    tight: float = 0.3


def random_cluster(
    rng: np.random.Generator, graph: OpGraph, wanted: ClusterRange | None = None
) -> Cluster:
    """Draw a cluster for a graph.

    Args:
        rng: Generator for every draw.
        graph: Graph relative to which network and memory are drawn.
        wanted: Distribution to draw from.
    """
    wanted = wanted or ClusterRange()
    groups = _groups(rng, wanted, graph.batch_size)
    types = [_type(rng, wanted, number) for number in range(min(len(groups), 4))]
    chosen = [types[rng.integers(len(types))] for _ in groups]
    speeds = [1.0 / _model_seconds(graph, kind) for kind in chosen]
    bound_s = 1.0 / sum(speed * count for speed, count in zip(speeds, groups, strict=True))
    size = float(sum(graph.tensor_bytes[parameter] for parameter in graph.parameters))
    low, high = np.log(wanted.traffic)
    rate = size / (float(np.exp(rng.uniform(low, high))) * bound_s)
    spread = np.log(wanted.nic_spread)
    steps = np.exp(rng.uniform(-spread, spread, 3))  # a data centre has few kinds of NICs
    nic = rate * steps[rng.integers(3, size=len(groups))]
    usable = _memory(rng, wanted, graph, chosen, groups)
    hosts = []
    devices = []
    for index, (kind, count) in enumerate(zip(chosen, groups, strict=True)):
        inner = float(nic[index] * np.exp(rng.uniform(np.log(1.5), np.log(20.0))))
        hosts.append(
            Host(
                name=f"h{index}",
                nic_line_rate_bytes_per_s=float(nic[index]),
                nic_latency_s=20e-6,
                intra=Link(kind="drawn", bandwidth_bytes_per_s=inner, shared=rng.random() < 0.1),
            )
        )
        devices += [
            Device(
                name=f"h{index}:{number}",
                type=kind,
                host_index=index,
                usable_memory_bytes=usable[kind.name],
            )
            for number in range(count)
        ]
    return Cluster(
        name=f"drawn_{len(devices)}", hosts=tuple(hosts), devices=tuple(devices), efficiency=1.0
    )


def _groups(rng: np.random.Generator, wanted: ClusterRange, batch_size: int) -> list[int]:
    """Number of devices of each host."""
    most = min(wanted.max_devices, batch_size)
    low, high = np.log(wanted.min_devices), np.log(most + 1)
    total = min(int(np.exp(rng.uniform(low, high))), most)
    groups: list[int] = []
    sizes = rng.choice([1, 2, 2, 4, 4, 8], 1 + int(rng.integers(2)))
    while sum(groups) < total:
        groups.append(min(int(rng.choice(sizes)), total - sum(groups)))
    return groups


def _type(rng: np.random.Generator, wanted: ClusterRange, number: int) -> DeviceType:
    base = device_type(_GPUS[rng.integers(len(_GPUS))])
    spread = np.log(wanted.speed_spread)
    factor = float(np.exp(rng.uniform(-spread, spread)))
    return replace(
        base,
        name=f"{base.name}-{number}",
        compute_efficiency=min(0.6 * factor, 0.95),
        memory_efficiency=min(0.75 * factor, 0.95),
        memory_bytes=2**20 * GIB,  # the usable part is drawn
    )


def _model_seconds(graph: OpGraph, device_type: DeviceType) -> float:
    computing = [index for index, op in enumerate(graph.ops) if op.phase != Phase.UPDATE]
    return float(Roofline().op_seconds(graph, device_type, graph.batch_size)[computing].sum())


def _memory(
    rng: np.random.Generator,
    wanted: ClusterRange,
    graph: OpGraph,
    chosen: list[DeviceType],
    groups: list[int],
) -> dict[str, int]:
    """Usable bytes of each type: enough for a replica on each device, or scarce in total."""
    state = (1.0 + graph.optimizer_state_ratio) * sum(
        graph.tensor_bytes[parameter] for parameter in graph.parameters
    )
    whole = float(graph.peak_live_bytes)
    kinds = {kind.name: float(np.exp(rng.uniform(-0.5, 0.5))) for kind in chosen}
    total = sum(kinds[kind.name] * count for kind, count in zip(chosen, groups, strict=True))
    if rng.random() < wanted.tight:  # one copy of the model on all devices, with some room
        scale = whole * float(np.exp(rng.uniform(np.log(1.3), np.log(3.0)))) / total
    else:  # a replica on each device
        share = state + 2.0 * (whole - state) / sum(groups)
        scale = share * float(np.exp(rng.uniform(np.log(1.2), np.log(6.0))))
    return {name: round(factor * scale) for name, factor in kinds.items()}
