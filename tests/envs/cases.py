"""Small pairs that the tests of environments and agents share."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog import Workload
from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.cluster.topology import ROOFLINE
from heterog.envs.pair import Pair
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.zoo.language import EncoderLayer


class SmallLanguageModel(nn.Module):
    """A tied embedding and three encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 256)
        self.layers = nn.Sequential(*(EncoderLayer(256, 1024, 4, nn.GELU) for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.layers(self.embedding(tokens)), self.embedding.weight)


@cache
def language_graph() -> OpGraph:
    """A captured step of a small language model."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    tokens = torch.zeros(48, 32, dtype=torch.long)
    return capture(
        Workload(SmallLanguageModel, (tokens, tokens), loss, torch.optim.Adam, name="small_lm")
    )


def mixed_cluster(
    *, network: float = 1.0, memory_gib: float = 4.0, scale: float = 1.0, name: str = "mixed"
) -> Cluster:
    """Two V100 on one host, a P100 and a GTX 1080 Ti on hosts of their own.

    Args:
        network: factor on the NICs' rates.
        memory_gib: usable memory of every device.
        scale: factor on every rate; latencies and launch overheads are divided by it.
        name: of the cluster.
    """
    from dataclasses import replace

    def scaled(kind: str) -> object:
        found = device_type(kind)
        return replace(
            found,
            peak_flops_per_s={d: f * scale for d, f in found.peak_flops_per_s.items()},
            memory_bandwidth_bytes_per_s=found.memory_bandwidth_bytes_per_s * scale,
            launch_overhead_s=found.launch_overhead_s / scale,
        )

    kinds = ("V100-16GB", "V100-16GB", "P100-12GB", "GTX-1080-Ti")
    on_host = (0, 0, 1, 2)
    hosts = tuple(
        Host(
            name=host,
            nic_line_rate_bytes_per_s=rate * 1e9 * network * scale,
            nic_latency_s=20e-6 / scale,
            intra=Link(kind="pcie3", bandwidth_bytes_per_s=9e9 * scale, latency_s=5e-6 / scale),
        )
        for host, rate in (("a", 6.0), ("b", 3.0), ("c", 1.5))
    )
    devices = tuple(
        Device(
            name=f"d{index}",
            type=scaled(kind),  # type: ignore[arg-type]
            host_index=host,
            usable_memory_bytes=round(memory_gib * 2**30),
        )
        for index, (kind, host) in enumerate(zip(kinds, on_host, strict=True))
    )
    # By data sheets: of models as small as these, every op would wait for the host.
    return Cluster(name=name, hosts=hosts, devices=devices, efficiency=1.0, calibration=ROOFLINE)


@cache
def language_pair() -> Pair:
    """The small language model on the mixed cluster."""
    return Pair(language_graph(), mixed_cluster())


@cache
def pipelined_pair() -> Pair:
    """The same, with rows that are pipelines."""
    pair = language_pair().pipelined()
    assert pair is not None
    return pair


@cache
def crowded_pair() -> Pair:
    """Parameters and optimizer state fill nine tenths of every device."""
    memory = language_pair().memory
    gib = float(memory.state_bytes.sum() + memory.common_bytes) / 0.9 / 2**30
    divided = Pair(language_graph(), mixed_cluster(memory_gib=gib)).divided()
    assert divided is not None
    return divided


@cache
def toy_pair() -> Pair:
    """Four layers on two devices: 4 candidates per block, 256 rows in all."""
    return Pair(chain_graph(4, 512, 1024), toy_cluster(5.0))
