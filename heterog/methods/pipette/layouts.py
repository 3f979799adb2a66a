"""The uniform layouts that Pipette enumerates, and their costs in the terms of its models.

On S hosts of g devices each: tp divides g (teams stay inside hosts), pp divides S, replicas take
the rest; a stage has whole hosts. Micro-batches are the powers of two that divide a replica's
share. Unlike the paper, whose seconds come from a network that was fitted to profiled runs and
whose gradients from a formula for GPT, all of this is counted in the captured graph: forward and
backward seconds of ops, bytes of gradients of the largest stage, bytes between stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import micro_batches_refused
from heterog.lowering.program import FloatArray, IntArray
from heterog.methods.host_kinds import hosts_by_kind
from heterog.methods.pipette.communication import Traffic, ring_payloads
from heterog.methods.pipette.latency import UniformCosts
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.stages import layers_of, stage_of_groups

MOST_TASKS = 2_000_000
"""Most tasks of a program, about a second's work; more and smaller micro-batches are left out."""
_SUMS_PER_LAYER = 2
"""All-reduces of a team in each pass through a layer: behind attention and behind the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layout on some hosts.

    Attributes:
        layout: Layout with tp, pp, dp and micro-batch.
        hosts: Hosts of the cluster, ascending.
        num_micro: Number of micro-batches of a replica.
    """

    layout: Layout
    hosts: tuple[int, ...]
    num_micro: int


def host_sets(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """All hosts, if they have equally many devices, and the hosts of each kind."""
    everything = tuple(range(cluster.num_hosts))
    sizes = {len(cluster.host_devices(host)) for host in everything}
    kinds = hosts_by_kind(cluster)
    return tuple(dict.fromkeys(([everything] if len(sizes) == 1 else []) + list(kinds)))


def points(evaluator: Evaluator) -> Iterator[Point]:
    """Every layout on every set of hosts, with every micro-batch that divides a share."""
    graph, cluster = evaluator.graph, evaluator.cluster
    num_layers, num_ops = len(layers_of(graph).names), len(evaluator.tables.op_id)
    for hosts in host_sets(cluster):
        per_host = len(cluster.host_devices(hosts[0]))
        for tp in _divisors(per_host):
            for pp in _divisors(len(hosts)):
                dp = len(hosts) * per_host // (tp * pp)
                share = graph.batch_size // dp
                if graph.batch_size % dp or not share or (pp > 1 and pp > num_layers):
                    continue
                layers = split_evenly(num_layers, pp) if num_layers % pp else ()
                for micro in _micro_batches(share):
                    num_micro = share // micro
                    if num_micro > 1 and num_micro * num_ops * tp * dp > MOST_TASKS:
                        continue
                    if micro_batches_refused(graph, num_micro):
                        continue
                    yield Point(
                        layout=Layout(tp=tp, pp=pp, dp=dp, micro_batch=micro, layers=layers),
                        hosts=hosts,
                        num_micro=num_micro,
                    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _micro_batches(share: int) -> list[int]:
    """Powers of two that divide a share, and the share itself.

    Unlike the paper, which stops at 8: samples of other models are smaller than sequences.
    """
    powers = [1 << power for power in range(share.bit_length()) if share % (1 << power) == 0]
    return powers if powers[-1] == share else [*powers, share]


def ranks(cluster: Cluster, order: IntArray, num_stages: int) -> tuple[int, ...]:
    """Devices in the order in which layouts number ranks: stage by stage.

    Args:
        cluster: Cluster of the hosts.
        order: Hosts row by row; a row is a pipeline.  # [num_hosts]
        num_stages: Length of a row.
    """
    columns = order.reshape(-1, num_stages).T.ravel()
    return tuple(device for host in columns.tolist() for device in cluster.host_devices(host))


def stage_by_stage(num_hosts: int, num_stages: int) -> IntArray:
    """The order in which layouts take up hosts by default: those of a stage are neighbours.

    >>> stage_by_stage(6, 3).reshape(-1, 3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    hosts = np.arange(num_hosts, dtype=np.int32)
    return hosts.reshape(num_stages, -1).T.ravel()


class LayoutCosts:
    """Prices layouts for the models, from the tables of one evaluator.

    Args:
        evaluator: Evaluator that knows graph, cluster and seconds of ops.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._cluster = evaluator.cluster
        self._layers = np.array(layers_of(evaluator.graph).of_group)
        self._by_stage = lru_cache(maxsize=256)(self._stages)
        self._seconds = lru_cache(maxsize=1024)(self._group_seconds)

    def costs(self, point: Point) -> UniformCosts:
        """A layout in the terms of the models: its slowest stage on its slowest device."""
        layout, cluster = point.layout, self._cluster
        per_host = len(cluster.host_devices(point.hosts[0]))
        stage, message, gradients, layers = self._by_stage(layout.pp, layout.layers)
        devices = [device for host in point.hosts for device in cluster.host_devices(host)]
        inside = min(cluster.hosts[host].intra.bandwidth_bytes_per_s for host in point.hosts)
        between = min(cluster.nic_bandwidth_bytes_per_s(host) for host in point.hosts)
        activation_bytes = self._activation_bytes * layout.micro_batch
        sums_s = _SUMS_PER_LAYER * layers * ring_payloads(layout.tp) * activation_bytes / inside
        slowest = max(
            (self._passes_s(kind, layout.micro_batch, stage, layout.pp) for kind in
             dict.fromkeys(cluster.type_index[device] for device in devices)),
            key=sum,
        )  # fmt: skip
        return UniformCosts(
            num_stages=layout.pp,
            num_replicas=layout.dp,
            replicas_per_host=per_host // layout.tp,
            num_micro=point.num_micro,
            forward_s=slowest[0] / layout.tp + sums_s,
            backward_s=slowest[1] / layout.tp + sums_s,
            message_bytes=message * layout.micro_batch,
            gradient_bytes=gradients / layout.tp,
            inside_bytes_per_s=inside,
            between_bytes_per_s=between if len(point.hosts) > 1 else inside,
        )

    def traffic(self, point: Point) -> Traffic:
        """Traffic of a layout between hosts."""
        costs = self.costs(point)
        return Traffic(
            num_stages=costs.num_stages,
            replicas_per_host=costs.replicas_per_host,
            message_bytes=costs.message_bytes,
            gradient_bytes=costs.gradient_bytes,
            team_size=point.layout.tp,
        )

    def _passes_s(
        self, kind: int, samples: int, stage_of_group: tuple[int, ...], num_stages: int
    ) -> tuple[float, float]:
        """Seconds of a forward and a backward pass of the slowest stage."""
        passes = [
            np.bincount(stage_of_group, weights, num_stages)
            for weights in self._seconds(kind, samples)
        ]
        slowest = int(np.argmax(passes[0] + passes[1]))
        return float(passes[0][slowest]), float(passes[1][slowest])

    def _group_seconds(self, kind: int, samples: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of each group's forward and backward ops.  # [num_groups] twice"""
        tables = self._evaluator.tables
        seconds = self._evaluator.prices.op_seconds(kind, samples)
        is_backward = tables.op_is_backward == 1
        groups = tables.op_group + 1  # constants, group -1, come first

        def of_groups(chosen: npt.NDArray[np.bool_]) -> FloatArray:
            weights = np.where(chosen, seconds, 0.0)
            summed = np.bincount(groups, weights, tables.num_groups + 1)
            return summed[1:].astype(np.float64)

        return of_groups(~is_backward), of_groups(is_backward)

    def _stages(
        self, num_stages: int, layers: tuple[int, ...]
    ) -> tuple[tuple[int, ...], float, float, int]:
        """Of a cut: each group's stage; message, gradients and layers of the largest stage."""
        tables = self._evaluator.tables
        layout = Layout(pp=num_stages, layers=layers)
        stage = np.array(stage_of_groups(self._evaluator.graph, layout))
        gradients = np.bincount(stage[tables.parameter_group], tables.gradient_bytes, num_stages)
        inside = self._layers >= 0
        of_layer = np.unique(np.stack([stage[inside], self._layers[inside]]), axis=1)
        counts = np.bincount(of_layer[0], minlength=num_stages)
        messages = self._sent_bytes(stage, num_stages)
        return (
            tuple(stage.tolist()),
            float(messages.max(initial=0.0)),
            float(gradients.max(initial=0.0)),
            int(counts.max(initial=0)),
        )

    def _sent_bytes(self, stage_of_group: IntArray, num_stages: int) -> FloatArray:
        """Bytes of a sample that each stage makes in its forward pass and a later one reads."""
        tables = self._evaluator.tables
        group = tables.op_group[tables.value_op]
        reader = tables.slot_group
        made_in = np.where(group >= 0, stage_of_group[group], num_stages)
        forward = tables.op_is_backward[tables.value_op] == 0
        goes_on = forward[tables.slot_value] & (
            stage_of_group[reader] > made_in[tables.slot_value]
        )
        goes_on &= np.diff(tables.remake_start) == 0  # or each stage makes it of the batch
        sent = np.unique(tables.slot_value[goes_on])
        sizes = tables.value_bytes_per_unit[sent]
        summed = np.bincount(made_in[sent], sizes, num_stages + 1)[:-1]
        return summed.astype(np.float64)

    @property
    def _activation_bytes(self) -> float:
        """Bytes of a sample between two layers, which would be sent if each were a stage."""
        num_layers = int(self._layers.max(initial=-1)) + 1
        if num_layers < 2:
            return 0.0
        return self._by_stage(num_layers, ())[1]
