"""Costs of a slice of the model on a team of devices of one kind.

A slice is a run of *layers*. Layers are the repeated modules of a model; the first one includes
everything before it, the last one everything after it. If a model repeats nothing, every group is
a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, AxisPlan, axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph, Phase
from heterog.graph.placement import OpRules
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.memo import kept
from heterog.methods.recomputing import freed_bytes, runs_again
from heterog.methods.teams import rules_of_model
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Recompute
from heterog.strategy.layouts.pipelines import KEEPS
from heterog.strategy.layouts.stages import (
    NO_LAYER,
    layer_blocks,
    layers_of,
    num_returns,
    stages_by_counts,
)

RECOMPUTED = 0.12
"""Part of the activations that a stage holds if its layers recompute everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Devices of one type in hosts of one kind.

    Attributes:
        hosts: Positions of the hosts in the cluster.
        devices: Devices of the type, for each host.
        device_type: Number of the type of all devices.
        usable_bytes: Memory of one device that a job may use.
        nic_bytes_per_s: Rate of all NICs of a host.
        link_bytes_per_s: Rate of the link inside a host.
        link_latency_s: Latency of the link inside a host.
    """

    hosts: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    device_type: int
    usable_bytes: int
    nic_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float

    @property
    def size(self) -> int:
        """Number of its devices in each host."""
        return len(self.devices[0])


def kinds_of(cluster: Cluster) -> tuple[Kind, ...]:
    """The kinds of a cluster; a host with several types of devices counts for one of each."""
    of_kind: dict[tuple[int, int], dict[int, list[int]]] = {}
    for device, host in enumerate(cluster.host_of):
        key = cluster.host_kind[host], cluster.type_index[device]
        of_kind.setdefault(key, {}).setdefault(host, []).append(device)
    found = []
    for (_, device_type), hosts in of_kind.items():
        first = next(iter(hosts))
        link = cluster.hosts[first].intra
        devices = tuple(map(tuple, hosts.values()))
        found.append(
            Kind(
                hosts=tuple(hosts),
                devices=devices,
                device_type=device_type,
                usable_bytes=cluster.devices[devices[0][0]].usable_memory_bytes,
                nic_bytes_per_s=cluster.nic_bandwidth_bytes_per_s[first],
                link_bytes_per_s=link.bandwidth_bytes_per_s,
                link_latency_s=link.latency_s,
            )
        )
    return tuple(found)


class Slices:
    """Seconds and bytes of each layer on teams of each kind, computed once each.

    Attributes:
        evaluator: Evaluator of the graph on the cluster.
        kinds: Kinds of the cluster's hosts.
        layer_of_group: Layer of every group.  # [num_groups]
        num_layers: Number of layers.
        most_members: Size of the largest team that can divide the model; 1 if none can.
        state_bytes: Parameters, gradients and optimizer state of each layer.  # [num_layers]
        parameter_bytes: Parameters of each layer.  # [num_layers]
        kept_bytes: Activations of a sample that the backward pass reads.  # [num_layers]
        num_returns: Stages through which values go again after the last, if there are several.
        boundary_bytes: Bytes of a sample that go from one layer to the next.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        graph = evaluator.graph
        self.kinds = kinds_of(evaluator.cluster)
        self.layer_of_group = layers_or_groups(graph)
        self.num_layers = max(self.layer_of_group) + 1
        rules = rules_of_model(graph)
        self.most_members = max(rules.least_units, 1) if rules is not None else 1
        self._op_rules = rules.op_rules if rules is not None else ()
        self._layer_of_op = layer_of_op(graph, self.layer_of_group)
        self._is_backward = np.array([op.phase != Phase.FORWARD for op in graph.ops])
        self.num_returns = num_returns(graph, self.layer_of_group)
        self.boundary_bytes = boundary_bytes(evaluator.tables, self.layer_of_group)
        self.state_bytes = self._by_layer(evaluator.group_state_bytes)
        self.parameter_bytes = self.state_bytes / (2.0 + evaluator.tables.state_ratio)
        self.kept_bytes = self._by_layer(evaluator.group_saved_bytes) / graph.batch_size

    @kept
    def all_bytes(self, recompute: Recompute) -> tuple[float, float, float]:
        """Parameters, state, and activations of a sample (``held_bytes``), of all layers."""
        sizes = self.parameter_bytes, self.state_bytes, self.held_bytes(recompute)
        parameters, state, held = (float(each.sum()) for each in sizes)
        return parameters, state, held

    @kept
    def all_seconds(
        self, kind: int, members: int, samples: int, recompute: Recompute, is_alone: bool
    ) -> float:
        """``seconds`` of all layers."""
        return float(self.seconds(kind, members, samples, recompute, is_alone).sum())

    def _by_layer(self, of_groups: FloatArray) -> FloatArray:
        return np.bincount(self.layer_of_group, of_groups, self.num_layers).astype(np.float64)

    @kept
    def between_bytes_per_s(self, first: int, second: int) -> float:
        """Rate of the lines between hosts of two kinds, without their NICs; infinite if none."""
        sources, targets = set(self.kinds[first].hosts), set(self.kinds[second].hosts)
        rates = [
            limit.bandwidth_bytes_per_s
            for limit in self.evaluator.cluster.pairs
            if sources & set(limit.sources) and targets & set(limit.targets)
        ]
        return sum(rates) or np.inf

    @kept
    def seconds(
        self, kind: int, members: int, samples: int, recompute: Recompute, is_alone: bool
    ) -> FloatArray:
        """Seconds of each layer's forward and backward pass for a micro-batch on one team.

        Args:
            kind: Number of the kind of the team's host.
            members: Number of devices of the team.
            samples: Samples of the micro-batch on this team.
            recompute: What layers recompute for the backward pass.
            is_alone: Whether the strategy uses no other device.

        Returns:
            # [num_layers]
        """
        on = self.kinds[kind]
        links = on.link_bytes_per_s, on.link_latency_s
        row = self.evaluator.prices.row(on.device_type, is_alone=is_alone)
        of_ops, sums = self._price(row, links, members, samples)
        forward, backward, again = self._of_layers(of_ops, members, recompute)
        # Weight gradients take half of the backward pass and hide the team's sums.
        behind = backward / 2.0 + np.maximum(backward / 2.0, sums[1])
        result: FloatArray = forward + sums[0] + behind + again
        return result

    @kept
    def held_bytes(self, recompute: Recompute) -> FloatArray:
        """Activations of a sample that wait for the backward pass.  # [num_layers]"""
        if recompute == Recompute.NONE:
            return self.kept_bytes
        if recompute == Recompute.FULL:
            return RECOMPUTED * self.kept_bytes
        of_sample, once = freed_bytes(self._tables(()), KEEPS[recompute])
        freed = self._by_layer(of_sample + once / self.evaluator.graph.batch_size)
        return np.maximum(self.kept_bytes - freed, RECOMPUTED * self.kept_bytes)

    @kept
    def _price(
        self, row: int, links: tuple[float, float], members: int, samples: int
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of ops by a row of ``PriceTable.models``, and of a team's sums over links.

        Links are (bytes per second, latency).

        Returns:
            Seconds of each op.  # [num_ops]
            Forward and backward.  # [2, num_layers]
        """
        evaluator = self.evaluator
        device_type, model = evaluator.prices.models[row]
        if members == 1:
            of_ops = model.op_seconds(evaluator.graph, device_type, samples)
            return of_ops, np.zeros((2, self.num_layers))
        plan = self._plan
        ruled = plan.op_axis != BATCH_AXIS
        units = np.where(ruled, np.array(plan.axes)[plan.op_axis], samples) / members
        part = 1.0 + plan.follows_batch * (samples / evaluator.graph.batch_size - 1.0)
        flops = (plan.flops_fixed + units * plan.flops_per_unit) * part[:, 0]
        moved = plan.bytes_fixed * part[:, 1] + units * plan.bytes_per_unit * part[:, 2]
        of_ops = model.work_seconds(evaluator.graph, device_type, flops, moved)
        (summed, count), (bytes_per_s, latency_s) = self._summed, links
        share = samples / evaluator.graph.batch_size
        ring = 2.0 * (members - 1) / members * share / bytes_per_s
        sums = summed * ring + count * (2.0 * (members - 1) * latency_s)
        return of_ops, sums

    def _of_layers(self, of_ops: FloatArray, members: int, recompute: Recompute) -> FloatArray:
        """Seconds of forward and backward ops, and of repeated ones; updates run once a step.

        Returns:
            # [3, num_layers]
        """
        inside = self._layer_of_op >= 0
        again = self._done_again(recompute, members > 1)
        passes = [inside & ~self._is_backward, inside & self._is_backward, inside & again]
        found = [
            np.bincount(self._layer_of_op[some], of_ops[some], self.num_layers) for some in passes
        ]
        return np.stack(found).astype(np.float64)

    def _tables(self, rules: OpRules) -> GraphTables:
        return graph_tables(self.evaluator.graph, rules, layer_blocks(self.evaluator.graph))

    @kept
    def _done_again(self, recompute: Recompute, in_teams: bool) -> npt.NDArray[np.bool_]:
        """Ops of repeated layers that run again where layers recompute.  # [num_ops]"""
        graph = self.evaluator.graph
        found = np.zeros(graph.num_ops, np.bool_)
        if recompute != Recompute.NONE:
            tables = self._tables(self._op_rules if in_teams else ())
            found[tables.op_id[runs_again(tables, KEEPS[recompute])]] = True
        found &= np.array(layers_of(graph).of_group)[group_ops(graph).group] != NO_LAYER
        return found

    @cached_property
    def _plan(self) -> AxisPlan:
        return axis_plan(self.evaluator.graph, self._op_rules)

    @cached_property
    def _summed(self) -> tuple[FloatArray, FloatArray]:
        """(bytes, number) of partial results that a team sums, by pass and layer.

        A sum of partial results is partial, too, so only values that a reader needs whole are
        exchanged.
        """
        graph, plan = self.evaluator.graph, self._plan
        total, count = np.zeros((2, self.num_layers)), np.zeros((2, self.num_layers))
        exchanged: set[int] = set()
        for index, op in enumerate(graph.ops):
            for position, tensor in enumerate(op.inputs):
                is_part = plan.tensor_axis[tensor] != BATCH_AXIS and plan.made(tensor).kind == "P"
                if is_part and plan.whole_needed(index, position, tensor) != AS_MADE:
                    exchanged.add(tensor)
        for tensor in exchanged:
            maker = graph.producer[tensor]
            layer, phase = self._layer_of_op[maker], int(self._is_backward[maker])
            if layer >= 0:
                total[phase, layer] += float(graph.tensor_bytes[tensor])
                count[phase, layer] += 1.0
        return total, count


def layers_or_groups(graph: OpGraph) -> tuple[int, ...]:
    """The layer of every group; if no module is repeated, every group is a layer."""
    layers = layers_of(graph)
    if len(layers.names) > 1:
        return stages_by_counts(layers, (1,) * len(layers.names))
    return tuple(range(group_ops(graph).num_groups))


def layer_of_op(graph: OpGraph, layer_of_group: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The layer of every op that runs per micro-batch, -1 for other ops.  # [num_ops]"""
    group = group_ops(graph).group
    return np.array(
        [
            -1
            if op.phase == Phase.UPDATE or group[index] == CONSTANT_GROUP
            else layer_of_group[group[index]]
            for index, op in enumerate(graph.ops)
        ],
        np.int64,
    )


def sent_bytes(tables: GraphTables, stage_of_group: IntArray, num_stages: int) -> FloatArray:
    """Bytes of a sample that each stage computes in its forward pass for a later stage.

    Args:
        tables: Tables of the graph.
        stage_of_group: Stage of every group, ascending.  # [num_groups]
        num_stages: Number of stages.

    Returns:
        # [num_stages]
    """
    group = tables.op_group[tables.value_op]
    made_in = np.where(group >= 0, stage_of_group[group], num_stages)
    forward = tables.op_is_backward[tables.value_op] == 0
    goes_on = forward[tables.slot_value] & (
        stage_of_group[tables.slot_group] > made_in[tables.slot_value]
    )
    goes_on &= np.diff(tables.remake_start) == 0  # other stages remake the rest from the batch
    sent = np.unique(tables.slot_value[goes_on])
    sizes = tables.value_bytes_per_unit[sent]
    return np.bincount(made_in[sent], sizes, num_stages + 1)[:-1].astype(np.float64)


def boundary_bytes(tables: GraphTables, layer_of_group: Sequence[int]) -> float:
    """Bytes of a sample that go from one layer to the next, the median of all boundaries."""
    num_layers = max(layer_of_group) + 1
    sent = sent_bytes(tables, np.array(layer_of_group), num_layers)
    return float(np.median(sent[:-1])) if num_layers > 1 else 0.0
