"""A search space of strategies as rows of integers: one candidate decision per group.

A candidate is a device set, a rule for the shares, and a synchronisation. New candidates (shares
moved by a sample, say) can be added while a search runs. Encoding a row into the kernel's arrays
takes microseconds, because everything about a candidate is looked up.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.lowering import Choice, DistinctDecisions, steps_to_unroll
from heterog.lowering.channels import ChannelTable, balanced_slices
from heterog.lowering.choice import MicroBatches
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import GraphTables
from heterog.memo import kept
from heterog.pricing.price_table import RuleSets
from heterog.strategy.division import micro_batch_table, split_evenly, split_in_proportion
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from heterog.strategy.sync import Sharded

MAX_DEVICE_SETS = 256
_MOST_HOSTS_NAMED = 64
_MOST_SINGLES = 64
"""Above these numbers, hosts and single devices are listed only while there is room."""
_FEW_HOSTS = 6
_CANDIDATES = tuple(sync for sync in Sync if sync.sharded <= Sharded.STATE)
"""Synchronisations to try by default. ZeRO-1 saves memory and is seldom slower than all-reduce;
the other stages communicate more, and methods may add them (``poplar``)."""


class StepSettings(NamedTuple):
    """Settings of the whole step, which a row leaves open.

    Attributes:
        bucket_bytes: See ``Strategy``.
        first_bucket_bytes: See ``Strategy``.
        micro_batches: See ``Strategy``; none to run in one go.
        schedule: See ``Strategy``.
        rule_set: Number of the op rules and blocks in the evaluator; 0 for none.
    """

    bucket_bytes: int = 0
    first_bucket_bytes: int = 0
    micro_batches: MicroBatches = ()
    schedule: PipelineSchedule = AS_IT_COMES
    rule_set: int = 0


def device_sets(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Device sets worth trying: everything, types, hosts, unions of hosts, single devices.

    With up to six hosts, unions come in order of size. In larger clusters hosts of one kind are
    equal (``Cluster.host_kind``), so a union takes the first hosts of each kind, and the most
    natural unions come first: whole kinds, then halves, quarters, ... of a kind. At most 256 sets,
    among which is a host of each kind.
    """
    hosts = cluster.host_devices
    everything = tuple(range(cluster.num_devices))
    types = grouped((cluster.type_index[device], device) for device in everything)
    # Where there is no room for all, each kind of hosts has one before others of a kind.
    kinds = grouped((kind, host) for host, kind in enumerate(cluster.host_kind)).values()
    ranked = list(dict.fromkeys((*(first for first, *_ in kinds), *range(len(hosts)))))
    some = [hosts[host] for host in sorted(ranked[:_MOST_HOSTS_NAMED])]
    named = (everything, *map(tuple, types.values()), *some)
    sets: dict[tuple[int, ...], None] = dict.fromkeys(named)
    room = MAX_DEVICE_SETS - min(cluster.num_devices, _MOST_SINGLES)
    for chosen in _unions(cluster):
        if len(sets) >= room:
            break
        sets.setdefault(tuple(sorted(d for host in chosen for d in hosts[host])))
    devices = [device for host in ranked for device in hosts[host]]
    singles = ((device,) for device in sorted(devices[: MAX_DEVICE_SETS - len(sets)]))
    return tuple(dict.fromkeys((*sets, *singles)))


def _unions(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Unions of at least two hosts, but not all, worth trying; generated one by one."""
    everything = range(cluster.num_hosts)
    if cluster.num_hosts <= _FEW_HOSTS:
        for size in range(2, cluster.num_hosts):
            yield from combinations(everything, size)
        return
    own = list(grouped((kind, host) for host, kind in enumerate(cluster.host_kind)).values())
    for size in range(len(own) - 1, 0, -1):
        for some in combinations(own, size):
            yield tuple(host for hosts in some for host in hosts)
    parts = own
    while parts := [
        half
        for hosts in parts
        for half in (hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :])
        if len(half) > 1
    ]:
        yield from map(tuple, parts)
    for size in range(2, cluster.num_hosts):
        yield from sorted(_of_size(own, size))


def _of_size(kinds: Sequence[list[int]], size: int) -> Iterator[tuple[int, ...]]:
    """Unions of a given number of hosts, made of the first hosts of each kind."""
    if not kinds:
        yield from [()] * (size == 0)
        return
    first, *rest = kinds
    for count in range(min(len(first), size), -1, -1):
        for others in _of_size(rest, size - count):
            yield tuple(sorted((*first[:count], *others)))


def balanced_homes(sizes: FloatArray, devices: tuple[int, ...]) -> IntArray:
    """A home for each parameter: largest first, each to the server with the fewest bytes.

    Args:
        sizes: Bytes of each parameter.  # [num_parameters]
        devices: The servers.

    Returns:
        # [num_parameters]
    """
    load = np.zeros(len(devices))
    homes = np.empty(len(sizes), np.int32)
    for parameter in np.argsort(-sizes, kind="stable"):
        server = int(np.argmin(load))
        load[server] += sizes[parameter]
        homes[parameter] = devices[server]
    return homes


class StrategySpace:
    """Encodes rows of candidate numbers into strategies and kernel arrays, and back.

    Args:
        graph: The training step.
        cluster: Devices and links.
        rules: The evaluator's rule sets; set 0 has no rules.
        channels: The evaluator's channel table; candidates register their channels there.
        speeds: Samples per second of each device, for proportional shares.
        decisions: Candidates at the start; by default those on all device sets worth trying.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        rules: RuleSets,
        channels: ChannelTable,
        speeds: tuple[float, ...],
        decisions: Sequence[Decision] | None = None,
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.speeds = speeds
        self._rules, self._tables = rules, rules.of(0).tables
        self._channels = channels
        self.candidates: list[Decision] = []
        self._numbers: dict[Decision, int] = {}
        self._no_homes = np.full(len(self._tables.parameter_bytes), REPLICATED, np.int32)
        if decisions is None:
            decisions = [d for devices in device_sets(cluster) for d in self.decisions_on(devices)]
        for decision in decisions:
            self.add(decision)

    @kept
    def decisions_on(self, devices: tuple[int, ...]) -> list[Decision]:
        """The candidate decisions on one device set."""
        batch = self.graph.batch_size
        if len(devices) == 1:
            return [Decision(devices=devices, shares=(batch,))]
        even = split_evenly(batch, len(devices))
        solved = split_in_proportion(batch, tuple(self.speeds[device] for device in devices))
        slices = balanced_slices(self.cluster, devices)
        return [
            Decision(
                devices=devices,
                shares=shares,
                sync=sync,
                slices=slices if sync.takes_slices else (),
            )
            for shares in dict.fromkeys((solved, even))
            for sync in _CANDIDATES
            if self.graph.updates_elementwise or not sync.is_sharded
        ]

    def add(self, decision: Decision) -> int:
        """Number of a candidate, which is added if it is new."""
        known = self._numbers.get(decision)
        if known is not None:
            return known
        number = self._numbers[decision] = len(self.candidates)
        self.candidates.append(decision)
        # Channels that all candidates may use are priced at once, not one by one in a search.
        self._channels.for_decision(decision)
        if len(decision.devices) > 1:
            self._channels.of_values(decision.devices)
        return number

    @kept
    def micro_batches(self, num_micro: int) -> MicroBatches:
        """``Strategy.micro_batches`` that cut the batch evenly, for any shares of groups."""
        sizes = split_evenly(self.graph.batch_size, num_micro)
        return micro_batch_table(sizes, self.cluster.num_devices)

    def encode(self, row: IntArray, settings: StepSettings, *, step_barrier: bool) -> Choice:
        """Encode a row as the kernel's arrays.

        Args:
            row: Candidate number of each group.  # [num_groups]
            settings: Settings of the whole step.
            step_barrier: See ``Strategy``.
        """
        rules = self._rules.of(settings.rule_set)
        # Convert only the few candidates in use, because a search adds thousands.
        numbers = sorted(set(row.tolist()))
        decisions = [self.candidates[number] for number in numbers]
        decided = DistinctDecisions(decisions, np.searchsorted(numbers, row).astype(np.int32))
        choice = rules.encoder.encode(
            decided,
            micro_batches=settings.micro_batches,
            schedule=settings.schedule,
            home=self._homes_of(decided, rules.tables),
            bucket_bytes=settings.bucket_bytes,
            num_steps=steps_to_unroll(step_barrier),
        )
        first_bytes = float(settings.first_bucket_bytes or settings.bucket_bytes)
        return choice._replace(rule_set=settings.rule_set, first_bucket_bytes=first_bytes)

    def _homes_of(self, decided: DistinctDecisions, tables: GraphTables) -> IntArray:
        """Homes of the parameters: served ones are balanced over their own group's devices.

        Args:
            decided: Decisions of all groups.
            tables: Tables with op rules; parameters that these cut into slices have no home.
        """
        decisions, of_group = decided
        if not any(each.sync.is_served for each in decisions):
            return self._no_homes
        of_decision = np.array([
            self._balanced(each.devices) if each.sync.is_served and len(each.devices) > 1
            else self._no_homes for each in decisions
        ])  # fmt: skip
        decision = of_group[self._tables.parameter_group]
        homes: IntArray = of_decision[decision, np.arange(len(decision))]
        homes[tables.parameter_axis >= 0] = REPLICATED
        return homes

    @kept
    def _balanced(self, devices: tuple[int, ...]) -> IntArray:
        return balanced_homes(self._tables.parameter_bytes, devices)

    def decode(self, row: IntArray, settings: StepSettings, *, step_barrier: bool) -> Strategy:
        """Decode a row to its strategy; arguments as in ``encode``."""
        rules = self._rules.of(settings.rule_set)
        numbers, of_group = np.unique(row, return_inverse=True)
        decisions = [self.candidates[number] for number in numbers.tolist()]
        decided = DistinctDecisions(decisions, of_group.astype(np.int32))
        return Strategy(
            graph=self.graph.fingerprint,
            cluster=self.cluster.fingerprint,
            decisions=tuple(self.candidates[number] for number in row),
            homes=tuple(int(home) for home in self._homes_of(decided, rules.tables)),
            micro_batches=settings.micro_batches,
            bucket_bytes=settings.bucket_bytes,
            first_bucket_bytes=settings.first_bucket_bytes,
            step_barrier=step_barrier,
            op_rules=rules.op_rules,
            schedule=settings.schedule,
            blocks=rules.blocks,
        )

    def row_of(self, strategy: Strategy) -> IntArray:
        """The row of a strategy; new decisions become candidates.

        Served parameters get the space's own homes. Settings of the whole step, micro-batches and
        op rules are not part of a row.
        """
        return np.array([self.add(decision) for decision in strategy.decisions], np.int32)
