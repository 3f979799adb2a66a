"""The interface of cost models, their prices as arrays for the simulator, and alpha-beta seconds.

``alpha_beta`` prices a transfer or collective from the traffic of its channel. The phases of an
all-reduce process the payload chunk by chunk, as in NCCL. So all its links carry bytes at the same
time, and the most loaded link determines the time. Ranks begin the second phase of a
reduce-scatter or all-gather when the first one has ended, so its phases add up:

    T(S) = alpha + S max_link sum_phase (multiple / rate)   all-reduce
    T(S) = alpha + S sum_phase max_link (multiple / rate)   reduce-scatter, all-gather

(Hockney 1994 for alpha-beta; Thakur et al. 2005 for the algorithms. Unlike there, phases over
different links overlap within an operation; operations of one communicator never do.) Each link is
*held* only for its own bytes over its own rate.

``seconds_between_hosts`` prices collectives of n devices on H hosts, at most n_h on one of them,
as NCCL does them. An all-reduce is a ring or a tree, whichever starts sooner; a tree's latency is
2 (n_h - 1) hops inside a host and 2 ceil(log2 H) between hosts (``ncclTopoTuneModel`` in NCCL's
``tuning.cc``). Where NCCL was measured between hosts (``SlowedCollectives``), and R is the rate
of the slowest host over all of its NICs, the seconds per byte of payload are

    ring (reduce-scatter, all-gather)   (n - 1) / n / R x ring H^ring_growth
    tree (all-reduce)                 2 (H - 1) / H / R x tree (log2 H)^tree_growth

but no less than the NICs of the members need, which is what counts for a host that was not
measured. An all-reduce takes the minimum of a tree and twice a ring. The number of members on a
host matters little: 1B models in teams of 1 to 8 (``fit`` rows of the Ultra-Scale Playbook on 64
to 256 GPUs) were predicted 8, 2, 11 and 12 % too long in the mean with these formulas, and 8, 25,
57 and 59 % too long with R of the members' NICs alone.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.lowering.channels import Channel
from heterog.lowering.kernels import by_reference
from heterog.lowering.program import FloatArray, IntArray


class CostModel(Protocol):
    """Seconds of compute tasks on a device type and of communication over a channel."""

    @property
    def name(self) -> str:
        """Name shown with every prediction: ``"roofline"`` or the calibration it comes from."""

    def __hash__(self) -> int:
        """Models are hashable because prices are cached by model."""

    def op_seconds(self, graph: OpGraph, device_type: DeviceType, samples: int) -> FloatArray:
        """Seconds of every op at a local share.

        Args:
            graph: The training step.
            device_type: Device type on which it runs.
            samples: Number of local samples of the batch.

        Returns:
            Seconds of each op, updates included; views are 0.  # [num_ops]
        """

    def work_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """Seconds of every op whose local part has this work, whatever axis it is split along.

        Args:
            graph: The training step.
            device_type: Device type on which it runs.
            flops: FLOPs of each op.  # [num_ops]
            num_bytes: Bytes moved by each op.  # [num_ops]

        Returns:
            Seconds of each op; views are 0.  # [num_ops]
        """

    def in_teams(self, members: int) -> "CostModel":
        """The cost model for ops of teams in a pipeline whose stages lie on several hosts.

        Args:
            members: Devices of a team.
        """

    def alone(self) -> "CostModel":
        """The cost model for a strategy on one device, which exchanges nothing."""
        return self

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        """Standard deviation of log(measured / predicted) of a step's compute time."""

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """Fixed seconds, and seconds per byte moved, of copies and sums on a device."""

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> "ChannelSeconds":
        """Cost of a channel per operation and payload byte."""


class ChannelSeconds(NamedTuple):
    """Cost of a channel: ``latency(payload) + payload x seconds_per_byte`` from start to end.

    latency(payload) = latency_s + min(fill_s, payload x fill_s_per_byte): a large collective
    needs time to fill its pipeline; a small one ends before the pipeline is full.

    Each link resource is held only for ``payload x held``: a 100 Gbit/s NIC that sends to a
    50 Gbit/s NIC is busy half the time. Members of the channel that compute lose time to it, by
    device type: ``overhead_s`` per operation and ``drag`` seconds per payload byte (o and O of
    the LogGP model, Alexandrov et al. 1995). While a member computes, the latency is the longer
    of ``latency_s`` and ``loaded_latency_s``.

    Flows that share a link get rates in proportion to their ``weight`` (weighted max-min
    fairness). Networks by themselves give weight 1; other weights are for flows that are paced
    or have a traffic class of their own.
    """

    latency_s: float
    seconds_per_byte: float
    held: dict[int, float]
    drag: Mapping[str, float] = MappingProxyType({})
    loaded_latency_s: float = 0.0
    overhead_s: Mapping[str, float] = MappingProxyType({})
    fill_s: float = 0.0
    fill_s_per_byte: float = 0.0
    weight: float = 1.0

    def latency(self, payload: float) -> float:
        """Seconds of an operation before its bytes move at full rate."""
        return self.latency_s + min(self.fill_s, payload * self.fill_s_per_byte)

    def seconds(self, payload: float) -> float:
        """Seconds of an operation from start to end."""
        return self.latency(payload) + payload * self.seconds_per_byte


@by_reference
class ChannelPrices(NamedTuple):
    """A cost model's prices of a set of channels; made again when new channels appear."""

    latency_s: FloatArray
    fill_s: FloatArray  # most seconds that filling the pipeline adds to the latency
    fill_s_per_byte: FloatArray
    s_per_byte: FloatArray
    weight: FloatArray  # flows share a link in proportion to their weights
    is_collective: npt.NDArray[np.bool_]
    drag: FloatArray  # share of compute speed that members lose  # [channels, num_types]
    overhead_s: FloatArray  # compute seconds that each busy member loses to an operation
    loaded_s: FloatArray  # added to the latency while a member computes
    member_start: IntArray  # devices of each channel  # [num_channels + 1]
    member: IntArray
    queue: IntArray  # first channel of the communicator; for a transfer, the channel
    resource_start: IntArray  # link resources of each channel  # [num_channels + 1]
    resource: IntArray
    resource_s_per_byte: FloatArray
    has_drag: bool  # whether ``drag`` or ``overhead_s`` is ever above 0


@by_reference
class Prices(NamedTuple):
    """A cost model's prices for one graph, cluster and set of channels, for the kernels."""

    type_of_device: IntArray
    op_seconds: FloatArray  # [num_types, batch_size + 1, num_compute_ops]
    has_rule: npt.NDArray[np.bool_]  # of each compute op
    ruled_row: IntArray  # row of ``Choice.shares`` of an op with a rule  # [num_compute_ops]
    ruled_number: IntArray  # number of a row's work  # [num_rows, num_micro, num_devices]
    ruled_seconds: FloatArray  # seconds of ops at each work  # [numbers, num_compute_ops]
    update_seconds: FloatArray  # [num_types, num_parameters]
    parameter_bytes: FloatArray
    copy_fixed_s: FloatArray  # [num_types]
    copy_s_per_byte: FloatArray  # [num_types]
    channels: ChannelPrices
    blocks_sends: bool  # a device computes nothing while it sends a value
    num_resources: int


def alpha_beta(
    cluster: Cluster, channel: Channel, measured: Mapping[str, float] = MappingProxyType({})
) -> ChannelSeconds:
    """Compute the seconds of a channel from the cluster's effective rates and latencies.

    Args:
        cluster: The cluster with the links.
        channel: A channel over these links.
        measured: Bytes/s of link resources by name, which replace the cluster's rates.
    """
    held: dict[int, float] = {}
    in_turn = 0.0
    for phase in channel.phases:
        slowest = 0.0
        for resource, multiple in phase:
            link = cluster.resources[resource]
            seconds = multiple / measured.get(link.name, link.bandwidth_bytes_per_s)
            held[resource] = held.get(resource, 0.0) + seconds
            slowest = max(slowest, seconds)
        in_turn += slowest
    at_once = max(held.values(), default=0.0)
    per_byte = in_turn if channel.kind.has_slices else at_once
    return ChannelSeconds(channel.latency_s, per_byte, held)


def seconds_between_hosts(
    cluster: Cluster, channel: Channel, found: ChannelSeconds
) -> ChannelSeconds:
    """Seconds of a collective between hosts as NCCL does it; see the module.

    Args:
        cluster: The cluster with the links.
        channel: A channel over these links.
        found: Its seconds by rates and latencies alone.
    """
    members = grouped((cluster.host_of[device], device) for device in channel.devices)
    num_hosts, num_devices = len(members), len(channel.devices)
    is_sum = channel.kind.is_all_reduce
    if num_hosts == 1 or not (is_sum or channel.kind.has_slices):
        return found
    if is_sum:
        found = found._replace(latency_s=min(found.latency_s, _tree_latency_s(cluster, members)))
    if all(cluster.hosts[host].collectives is None for host in members):
        return found
    ring = tree = 0.0
    for host, own in members.items():
        rate = cluster.nic_bandwidth_bytes_per_s[host]
        nics = cluster.nics(own, 0)
        least = rate / sum(cluster.resources[nic].bandwidth_bytes_per_s for nic in nics)
        of_ring = of_tree = least
        if (slowed := cluster.hosts[host].collectives) is not None:
            of_ring = max(slowed.ring * num_hosts**slowed.ring_growth, least)
            of_tree = max(slowed.tree * math.log2(num_hosts) ** slowed.tree_growth, least)
        ring = max(ring, (1.0 - 1.0 / num_devices) / rate * of_ring)
        tree = max(tree, 2.0 * (1.0 - 1.0 / num_hosts) / rate * of_tree)
    if not is_sum:
        # Uneven slices load some links more than a ring does.
        is_even = len(set(channel.slices)) <= 1
        return found._replace(
            seconds_per_byte=ring if is_even else max(ring, found.seconds_per_byte)
        )
    return found._replace(seconds_per_byte=min(tree, 2.0 * ring))


def _tree_latency_s(cluster: Cluster, members: Mapping[int, list[int]]) -> float:
    """Latency of NCCL's tree: chains inside hosts and a binary tree between them, up and down."""
    firsts = [own[0] for own in members.values()]
    hop_s = max(map(cluster.latency_s, firsts, firsts[1:] + firsts[:1]))
    inside_s = max((len(own) - 1) * cluster.latency_s(own[0], own[-1]) for own in members.values())
    return 2.0 * (inside_s + math.ceil(math.log2(len(members))) * hop_s)
