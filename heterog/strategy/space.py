"""A search space of strategies as rows of integers: one candidate decision per group.

A candidate is a named device set, a rule for the shares, and a synchronisation. New candidates
(shares moved by a sample, say) can be added while a search runs. Encoding a row into the kernel's
arrays takes microseconds, because everything about a candidate is looked up.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.graph.op_rule import OpRules
from heterog.strategy.channels import ChannelTable, balanced_slices, slice_parts
from heterog.strategy.lowering import Choice, axis_shares, encode_turns
from heterog.strategy.pipeline_schedule import AS_IT_COMES, PipelineSchedule
from heterog.strategy.program import FloatArray, IntArray
from heterog.strategy.strategy import (
    ELEMENTWISE_OPTIMIZERS,
    REPLICATED,
    SLICED,
    Decision,
    Strategy,
    Sync,
    micro_shares,
    split_evenly,
    split_in_proportion,
)
from heterog.strategy.tables import GraphTables, graph_tables

MicroBatches = tuple[tuple[int, ...], ...]
"""Samples per micro-batch of each device, as in ``Strategy``; empty: in one go."""
MAX_DEVICE_SETS = 256
_CANDIDATES = tuple(sync for sync in Sync if sync not in (Sync.ZERO2, Sync.ZERO3))
"""ZeRO-1 saves memory and is seldom slower than all-reduce; the other stages communicate more and
are for planners that want them (``poplar``)."""


def device_sets(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Device sets worth naming: single devices, hosts, types, unions of hosts, everything.

    Unions come in order of size until there are 256 sets; hosts with the same devices and NIC are
    alike, so of the unions with the same number of each kind of host only the first is kept.
    """
    hosts = [cluster.host_devices(index) for index in range(cluster.num_hosts)]
    everything = tuple(range(cluster.num_devices))
    sets: dict[tuple[int, ...], None] = {everything: None}
    for index in range(len(cluster.device_types)):
        same = tuple(d for d in everything if cluster.type_index[d] == index)
        sets.setdefault(same)
    for host in hosts:
        sets.setdefault(host)
    kinds = [
        (
            tuple(cluster.type_index[device] for device in host),
            cluster.nic_bandwidth_bytes_per_s(index),
        )
        for index, host in enumerate(hosts)
    ]
    seen: set[tuple[object, ...]] = set()
    for size in range(2, len(hosts)):
        for chosen in combinations(range(len(hosts)), size):
            kind = tuple(sorted(str(kinds[host]) for host in chosen))
            if len(hosts) > 6 and kind in seen:
                continue
            seen.add(kind)
            sets.setdefault(tuple(sorted(d for host in chosen for d in hosts[host])))
            if len(sets) + cluster.num_devices >= MAX_DEVICE_SETS:
                break
        if len(sets) + cluster.num_devices >= MAX_DEVICE_SETS:
            break
    for device in everything[: MAX_DEVICE_SETS - len(sets)]:
        sets.setdefault((device,))
    return tuple(sets)


class StrategySpace:
    """Encodes rows of candidate numbers into strategies and kernel arrays, and back.

    Args:
        graph: the step.
        cluster: devices and links.
        tables: the graph's tables.
        channels: the evaluator's channel table; candidates register their channels there.
        speeds: samples per second of each device, for proportional shares.
        decisions: the candidates to begin with; by default those on all named device sets.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        tables: GraphTables,
        channels: ChannelTable,
        speeds: tuple[float, ...],
        decisions: Sequence[Decision] | None = None,
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.speeds = speeds
        self._tables = tables
        self._channels = channels
        self.candidates: list[Decision] = []
        self._numbers: dict[Decision, int] = {}
        self._layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._layout_of: list[int] = []
        self._layouts_by_number: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._member = np.zeros((16, cluster.num_devices), np.bool_)
        self._reduce = np.full(16, -1, np.int32)
        self._gather = np.full(16, -1, np.int32)
        self._first: list[int] = []
        self._second: list[int] = []
        self._part: FloatArray = np.zeros((16, cluster.num_devices))
        self._homes: dict[tuple[int, ...], IntArray] = {}
        self._cuts: dict[MicroBatches, dict[int, IntArray]] = {}
        self._axis_rows: dict[tuple[int, int], IntArray] = {}
        if decisions is None:
            decisions = [d for devices in device_sets(cluster) for d in self.decisions_on(devices)]
        for decision in decisions:
            self.add(decision)

    def decisions_on(self, devices: tuple[int, ...]) -> list[Decision]:
        """The candidate decisions on one device set."""
        batch = self.graph.batch_size
        if len(devices) == 1:
            return [Decision(devices=devices, shares=(batch,))]
        even = split_evenly(batch, len(devices))
        solved = split_in_proportion(batch, tuple(self.speeds[device] for device in devices))
        decisions = []
        for shares in dict.fromkeys((solved, even)):
            for sync in _CANDIDATES:
                slices: tuple[int, ...] = ()
                if sync in SLICED and self.graph.optimizer not in ELEMENTWISE_OPTIMIZERS:
                    continue
                if sync in (Sync.REDUCE_SCATTER_ALL_GATHER, Sync.ZERO1):
                    slices = balanced_slices(self.cluster, devices)
                decisions.append(
                    Decision(devices=devices, shares=shares, sync=sync, slices=slices)
                )
        return decisions

    def add(self, decision: Decision) -> int:
        """Number of a candidate, new or known."""
        if decision in self._numbers:
            return self._numbers[decision]
        number = len(self.candidates)
        self.candidates.append(decision)
        self._numbers[decision] = number
        key = (decision.devices, decision.shares)
        if key not in self._layouts:
            self._add_layout(decision)
        self._layout_of.append(self._layouts[key])
        first, second = self._channels.for_decision(decision)
        self._first.append(first)
        self._second.append(second)
        if number >= len(self._part):
            self._part = np.concatenate([self._part, np.zeros_like(self._part)])
        if decision.sync in SLICED:
            self._part[number, list(decision.devices)] = slice_parts(decision)
        return number

    def _add_layout(self, decision: Decision) -> None:
        layout = len(self._layouts)
        self._layouts[decision.devices, decision.shares] = layout
        self._layouts_by_number.append((decision.devices, decision.shares))
        if layout + 1 >= len(self._member):  # the last row is kept for constants
            self._member = np.concatenate([self._member, np.zeros_like(self._member)])
            self._reduce = np.concatenate([self._reduce, np.full_like(self._reduce, -1)])
            self._gather = np.concatenate([self._gather, np.full_like(self._gather, -1)])
        devices = list(decision.devices)
        self._member[layout, devices] = True
        if len(devices) > 1:
            self._reduce[layout] = self._channels.value_reduce(decision.devices)
            self._gather[layout] = self._channels.all_gather(decision.devices, ())

    def micro_batches(self, num_micro: int) -> MicroBatches:
        """``Strategy.micro_batches`` that cut the batch evenly, whatever the groups' shares."""
        if num_micro == 1:
            return ()
        idle = (0,) * num_micro
        counts = split_evenly(self.graph.batch_size, num_micro)
        return (counts, *(idle for _ in range(self.cluster.num_devices - 1)))

    def _shares(self, layout: int, micro_batches: MicroBatches) -> IntArray:
        """Samples of a layout per micro-batch and device.  # [num_micro, num_devices]"""
        known = self._cuts.setdefault(micro_batches, {})
        if layout not in known:
            devices, shares = self._layouts_by_number[layout]
            num_micro = len(micro_batches[0]) if micro_batches else 1
            table = np.zeros((num_micro, self.cluster.num_devices), np.int32)
            table[:, list(devices)] = micro_shares(shares, devices, micro_batches, num_micro)
            known[layout] = table
        return known[layout]

    def _on_axis(self, layout: int, units: int) -> IntArray:
        """Units of another axis than the batch on each device.  # [1, num_devices]"""
        key = (layout, units)
        if key not in self._axis_rows:
            whole = self._shares(layout, ())[0]
            self._axis_rows[key] = np.array([axis_shares(units, tuple(whole.tolist()))], np.int32)
        return self._axis_rows[key]

    def encode(
        self,
        row: IntArray,
        *,
        bucket_bytes: int,
        num_steps: int,
        micro_batches: MicroBatches = (),
        tables: GraphTables | None = None,
        schedule: PipelineSchedule = AS_IT_COMES,
    ) -> Choice:
        """The kernel's arrays of a row.

        Args:
            row: candidate number of each group.  # [num_groups]
            bucket_bytes: see ``Strategy``.
            num_steps: unrolled steps.
            micro_batches: see ``Strategy``; by default the step runs in one go.
            tables: of the graph under op rules, which exclude micro-batches and ZeRO; the caller
                sets the choice's ``rule_set``.
            schedule: see ``Strategy``.
        """
        tables = tables or self._tables
        # By the few candidates in use: a search adds thousands of others.
        numbers, of_group = np.unique(row, return_inverse=True)
        decisions = [self.candidates[number] for number in numbers]

        def by_group(values: Sequence[int]) -> IntArray:
            return np.array([values[number] for number in numbers], np.int32)[of_group]

        layouts = by_group(self._layout_of)
        used = np.unique(layouts)
        num_micro = len(micro_batches[0]) if micro_batches else 1
        # Only the layouts in use, renumbered: the arrays that the kernel scans stay small.
        shares = np.zeros((len(used) + 1, num_micro, self.cluster.num_devices), np.int32)
        for position, number in enumerate(used):
            shares[position] = self._shares(int(number), micro_batches)
        member = np.concatenate([self._member[used], np.zeros_like(self._member[:1])])
        shares[-1] = shares[:-1].sum(axis=0) > 0
        member[-1] = shares[-1].any(axis=0)
        reduce_channel = np.append(self._reduce[used], np.int32(-1))
        gather_channel = np.append(self._gather[used], np.int32(-1))
        layout = np.append(np.searchsorted(used, layouts), len(used)).astype(np.int32)
        num_axes = len(tables.axis_units)
        if num_axes > 1:
            parts = [shares]
            for units in tables.axis_units[1:].tolist():
                parts += [self._on_axis(int(number), units)[None] for number in used]
                constants = axis_shares(units, tuple(shares[-1, 0].tolist()))
                parts.append(np.array([[constants]], np.int32))
            shares = np.concatenate(parts)
            member = np.tile(member, (num_axes, 1))
            reduce_channel = np.tile(reduce_channel, num_axes)
            gather_channel = np.tile(gather_channel, num_axes)
        return Choice(
            num_micro=num_micro,
            num_steps=num_steps,
            bucket_bytes=float(bucket_bytes),
            layout=layout,
            shares=shares,
            member=member,
            sync=np.array([int(each.sync) for each in decisions], np.int32)[of_group],
            recompute=np.array([each.recompute for each in decisions], np.bool_)[of_group],
            first_channel=by_group(self._first),
            second_channel=by_group(self._second),
            reduce_channel=reduce_channel,
            gather_channel=gather_channel,
            home=self.homes(row, tables),
            slice_part=self._part[row],
            turns=encode_turns(
                schedule,
                tables,
                [self.candidates[number].devices for number in row],
                layout,
                shares,
            ),
        )

    def homes(self, row: IntArray, tables: GraphTables | None = None) -> IntArray:
        """Homes of the parameters: served ones balanced over their own group's devices.

        Those that op rules cut into slices (by ``tables``) have none.
        """
        homes = np.full(len(self._tables.parameter_bytes), REPLICATED, np.int32)
        group = self._tables.parameter_group
        for number in np.unique(row):
            decision = self.candidates[number]
            if decision.sync == Sync.PARAMETER_SERVER and len(decision.devices) > 1:
                served = np.flatnonzero(row[group] == number)
                homes[served] = self._balanced(decision.devices)[served]
        if tables is not None:
            homes[tables.parameter_axis >= 0] = REPLICATED
        return homes

    def _balanced(self, devices: tuple[int, ...]) -> IntArray:
        """For each parameter a server among ``devices``, balanced over all parameters."""
        if devices not in self._homes:
            sizes = self._tables.parameter_bytes
            load = np.zeros(len(devices))
            homes = np.empty(len(sizes), np.int32)
            for parameter in np.argsort(-sizes, kind="stable"):
                server = int(np.argmin(load))
                load[server] += sizes[parameter]
                homes[parameter] = devices[server]
            self._homes[devices] = homes
        return self._homes[devices]

    def decode(
        self,
        row: IntArray,
        *,
        bucket_bytes: int,
        step_barrier: bool,
        micro_batches: MicroBatches = (),
        op_rules: OpRules = (),
        schedule: PipelineSchedule = AS_IT_COMES,
    ) -> Strategy:
        """The strategy of a row."""
        homes = self.homes(row, graph_tables(self.graph, op_rules))
        return Strategy(
            graph=self.graph.fingerprint,
            cluster=self.cluster.fingerprint(),
            decisions=tuple(self.candidates[number] for number in row),
            homes=tuple(int(home) for home in homes),
            micro_batches=micro_batches,
            bucket_bytes=bucket_bytes,
            step_barrier=step_barrier,
            op_rules=op_rules,
            schedule=schedule,
        )

    def row_of(self, strategy: Strategy) -> IntArray:
        """The row of a strategy's decisions, which are added.

        Served parameters get the space's own homes. What holds for the whole step, its
        micro-batches and the rules of its ops, is no part of a row.
        """
        return np.array([self.add(decision) for decision in strategy.decisions], np.int32)

    def without_zero(self, row: IntArray) -> IntArray:
        """The same shares without slices of the optimizer's state, which op rules exclude."""
        plain = row.copy()
        for number in np.unique(row):
            decision = self.candidates[number]
            if decision.sync in SLICED:
                sync = Sync.REDUCE_SCATTER_ALL_GATHER
                plain[row == number] = self.add(replace(decision, sync=sync))
        return plain
