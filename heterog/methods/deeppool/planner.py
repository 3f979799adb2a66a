"""DeepPool: burst-parallel training (Park et al., MLSys 2022), on unequal devices.

Layers are the groups of the graph. Each gets a place: a run of devices of an ordered list, fastest
hosts first, so that a narrower place is the faster part of a wider one. Shares follow the devices'
speeds. ``deeppool.search`` chooses the places by dynamic programming, with times from the cost
model, transfers of the samples that change devices, and gradients by the cheapest collective.

Unlike the paper, gradients may overlap with the backward pass: the program is solved for several
parts of their time (``EXPOSED``). Also unlike the paper, plans for several amplification limits
are simulated in every order, and the best are returned. The best uniform plan is among them, so by
the referee the result is never worse.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import TypeAlias

import numpy as np

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import FloatArray, Phase
from heterog.lowering.channels import balanced_slices
from heterog.memo import kept
from heterog.methods.deeppool.search import (
    Block,
    BurstPlan,
    Chain,
    Place,
    fork_join,
    layers_of,
    search,
)
from heterog.methods.planner import Problem, Searching, StrategySearch
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, REPLICATED, Decision, Strategy, Sync

NUM_RETURNED = 6
"""Number of strategies handed to the referee."""
LIMITS = (math.inf, 8.0, 4.0, 2.5, 2.0, 1.5, 1.2)
"""Amplification limits that are tried (the authors' examples: 1.5 to 5)."""
EXPOSED = (0.0, 0.5, 1.0)
"""Parts of the gradients' time that the dynamic program counts (the paper: all of it)."""
NEGLIGIBLE_S = 300e-6
"""Layers that take less than this are free of the limit, as in the authors' code."""
_MOST_DEVICES_FOR_BRANCHES = 8  # with more, branches take turns: else it would take minutes


class _Search(StrategySearch):
    num_returned = NUM_RETURNED
    why_nothing = ""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._uniform: dict[Strategy, bool] = {}

    def search(self) -> None:
        """Try each strategy in all orders; the best order of each counts."""
        for strategy, is_uniform in self._strategies():
            if strategy not in self._uniform:
                choice = self.evaluator.encode(strategy)
                found = self.evaluator.evaluate_orders(choice, self.problem.orders)
                best = min(found, key=lambda evaluation: evaluation.preference)
                self._uniform[strategy] = is_uniform
                self.keep((strategy, Order(best.order)), best)
            if self.spending.is_over:
                return

    def returned(self) -> list[tuple[Strategy, Order]]:
        """The best, and the best uniform one."""
        ranked = self.best(len(self.found))
        uniform = [point for point in ranked if self._uniform[point[0]]]
        return list(dict.fromkeys((*ranked[: self.num_returned], *uniform[:1])))

    def _strategies(self) -> Iterator[tuple[Strategy, bool]]:
        """(strategy, whether it is uniform), uniform ones first."""
        costs = GroupCosts(self.evaluator)
        barrier, check = self.problem.step_barrier, self.spending.check
        for width in reversed(costs.widths):
            places = [(0, width)] * costs.num_groups
            for bucket_bytes in (DEFAULT_BUCKET_BYTES, 0):
                yield costs.strategy(places, bucket_bytes, barrier), True
        has_branches = any(isinstance(item, Block) for item in costs.chain)
        for fork in (False, True) if has_branches else (False,):
            if fork and len(costs.order) > _MOST_DEVICES_FOR_BRANCHES:
                return
            for limit in LIMITS:
                for exposed in EXPOSED:
                    plan = plan_places(costs, limit, exposed, fork=fork, check=check)
                    for bucket_bytes in (DEFAULT_BUCKET_BYTES, 0):
                        yield costs.strategy(plan.places, bucket_bytes, barrier), False


def plan_places(
    costs: "GroupCosts",
    limit: float,
    exposed: float = 1.0,
    *,
    fork: bool = True,
    check: Callable[[], None] = lambda: None,
) -> BurstPlan:
    """The dynamic program's places for all groups.

    Args:
        costs: Costs of the groups.
        limit: Amplification limit.
        exposed: Part of the gradients' time that is not hidden behind the backward pass.
        fork: Whether branches may run at the same time on devices of their own.
        check: Called often; an exception from it ends the program.
    """
    return search(
        costs.with_exposed(exposed),
        costs.chain,
        limit=limit,
        num_devices=len(costs.order),
        fork=fork,
        check=check,
    )


def device_order(evaluator: Evaluator) -> tuple[int, ...]:
    """Devices sorted by the speed of their hosts and, inside a host, by their own speed."""
    cluster, speeds = evaluator.cluster, evaluator.speeds

    def host_key(host: int) -> tuple[float, float, int]:
        devices = cluster.host_devices[host]
        mean = sum(speeds[device] for device in devices) / len(devices)
        return -mean, -cluster.nic_bandwidth_bytes_per_s[host], host

    hosts = sorted(range(cluster.num_hosts), key=host_key)
    return tuple(
        device
        for host in hosts
        for device in sorted(cluster.host_devices[host], key=lambda each: (-speeds[each], each))
    )


class GroupCosts:
    """Costs of a graph's groups on runs of the ordered devices, in seconds.

    Attributes:
        order: The devices; place ``(first, width)`` is ``order[first : first + width]``.
        widths: Numbers of devices to choose from: powers of two, and whole hosts.
        chain: The groups as chains and blocks.
    """

    negligible = NEGLIGIBLE_S

    exposed = 1.0
    """Part of the gradients' time that counts."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.speeds = evaluator.speeds
        self._pricer = evaluator.prices.pricer
        self.order = device_order(evaluator)
        tables = evaluator.tables
        self.num_groups = tables.num_groups
        self._gradient_bytes = np.bincount(
            tables.parameter_group, tables.parameter_bytes, tables.num_groups
        ).astype(np.float64)
        self.widths = tuple(
            width for width in _widths(evaluator, self.order) if min(self.shares((0, width))) > 0
        )

    def with_exposed(self, exposed: float) -> "GroupCosts":
        """These costs with another part of the gradients' time counted."""
        twin = copy(self)
        twin.exposed = exposed
        return twin

    def shares(self, place: Place) -> tuple[int, ...]:
        """Samples of each device of a place, in its order."""
        devices = self.order[place[0] : sum(place)]
        weights = tuple(self.speeds[device] for device in devices)
        return split_in_proportion(self.evaluator.graph.batch_size, weights)

    @kept
    def decision(self, place: Place) -> Decision:
        """The decision of a group on a place; its gradients are summed the cheapest way."""
        pairs = sorted(zip(self.order[place[0] : sum(place)], self.shares(place), strict=True))
        devices, shares = zip(*pairs, strict=True)
        options = [Decision(devices=devices, shares=shares)]
        if len(devices) > 1:
            options += [
                Decision(devices=devices, shares=shares, sync=Sync.HIERARCHICAL),
                Decision(
                    devices=devices,
                    shares=shares,
                    sync=Sync.REDUCE_SCATTER_ALL_GATHER,
                    slices=balanced_slices(self.evaluator.cluster, devices),
                ),
            ]
        return min(options, key=lambda each: self._synchronise(each, DEFAULT_BUCKET_BYTES))

    def strategy(self, places: Sequence[Place], bucket_bytes: int, step_barrier: bool) -> Strategy:
        """The strategy that gives each group its place."""
        graph = self.evaluator.graph
        return Strategy(
            graph=graph.fingerprint,
            cluster=self.evaluator.cluster.fingerprint,
            decisions=tuple(self.decision(place) for place in places),
            homes=(REPLICATED,) * len(graph.updates),
            bucket_bytes=bucket_bytes,
            step_barrier=step_barrier,
        )

    def own(self, layer: int, place: Place) -> float:
        """Seconds of the slowest device's compute and of the exposed synchronisation."""
        decision, compute = self.decision(place), float(self._slowest(place)[layer])
        gradient = float(self._gradient_bytes[layer])
        if not gradient or len(decision.devices) == 1:
            return compute
        return compute + self.exposed * self._synchronise(decision, gradient)

    def weight(self, place: Place) -> float:
        """Sum of the devices' speeds, where the first one counts as 1."""
        devices = self.order[place[0] : sum(place)]
        return sum(self.speeds[device] for device in devices) / self.speeds[self.order[0]]

    def transfer(self, source: int, at: Place, target: int, to: Place) -> float:
        """Seconds on the busiest link for samples that change devices, forward and backward."""
        per_sample = self._crossing.get((source, target), 0.0)
        if at == to or not per_sample:
            return 0.0
        return self._latency_s + per_sample * self._seconds_per_sample_byte(at, to)

    @cached_property
    def chain(self) -> Chain:
        """Groups as chains and blocks."""
        previous: list[set[int]] = [set() for _ in range(self.num_groups)]
        for first, second in self._links:
            previous[second].add(first)
        return fork_join([sorted(each) for each in previous])

    @cached_property
    def _links(self) -> dict[tuple[int, int], float]:
        """Bytes per sample that two groups exchange, the earlier one first."""
        tables = self.evaluator.tables
        found: dict[tuple[int, int], float] = {}
        for value, reader in zip(tables.slot_value, tables.slot_group, strict=True):
            maker = int(tables.op_group[tables.value_op[value]])
            size = tables.value_bytes_per_unit[value] * tables.value_moved_fraction[value]
            if 0 <= maker != reader >= 0 and size > 0:
                pair = (min(maker, int(reader)), max(maker, int(reader)))
                found[pair] = found.get(pair, 0.0) + float(size)
        return found

    @cached_property
    def _crossing(self) -> dict[tuple[int, int], float]:
        """Bytes per sample over each step of the chain, including links that skip layers."""
        return crossing_bytes(self.chain, self._links)

    @cached_property
    def _latency_s(self) -> float:
        cluster = self.evaluator.cluster
        # Two devices of each host are enough: latencies are those of hosts.
        some = [each for devices in cluster.host_devices for each in devices[:2]]
        return 2.0 * max(cluster.latency_s(a, b) for a in some for b in some)

    @kept
    def _slowest(self, place: Place) -> FloatArray:
        """Seconds of each group on the slowest device of a place."""
        decision, type_of = self.decision(place), self.evaluator.cluster.type_index
        pairs = {
            (int(type_of[device]), samples)
            for device, samples in zip(decision.devices, decision.shares, strict=True)
        }
        seconds: FloatArray = np.max([self._group_seconds(*pair) for pair in pairs], axis=0)
        return seconds

    @kept
    def _group_seconds(self, type_number: int, samples: int) -> FloatArray:
        """Seconds of each group's ops, updates included, on a type of device."""
        graph, device_type = self.evaluator.graph, self.evaluator.cluster.device_types[type_number]
        seconds = self.evaluator.cost_model.op_seconds(graph, device_type, samples).copy()
        updates = [index for index, op in enumerate(graph.ops) if op.phase == Phase.UPDATE]
        full = self.evaluator.cost_model.op_seconds(graph, device_type, graph.batch_size)
        seconds[updates] = full[updates]
        group = group_ops(graph).group
        of_groups = np.bincount(group[group >= 0], seconds[group >= 0], self.num_groups)
        return of_groups.astype(np.float64)

    def _synchronise(self, decision: Decision, num_bytes: float) -> float:
        """Seconds of a decision's collectives for some bytes of gradients."""
        numbers = self.evaluator.channels.for_decision(decision)
        costs = (self._pricer.seconds(self.evaluator.channels[number]) for number in numbers)
        return sum(cost.seconds(num_bytes) for cost in costs)

    @kept
    def _seconds_per_sample_byte(self, at: Place, to: Place) -> float:
        """Seconds on the busiest link for one byte per sample of the batch."""
        busy: dict[int, float] = {}
        pieces = _overlaps(_intervals(self.decision(at)), _intervals(self.decision(to)))
        for source, target, samples in pieces:
            if source != target:
                number = source * self.evaluator.cluster.num_devices + target
                cost = self._pricer.seconds(self.evaluator.channels[number])
                for resource, held in cost.held.items():
                    busy[resource] = busy.get(resource, 0.0) + samples * held
        return max(busy.values(), default=0.0)


def crossing_bytes(
    chain: Chain, links: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """Bytes over each step of a chain: from all layers before it to all later ones of the chain.

    A step into a branch carries links from before the block, a step out of it links to the join
    and beyond.
    """
    found: dict[tuple[int, int], float] = {}

    def between(before: set[int], after: set[int]) -> float:
        return sum(
            size
            for (first, second), size in links.items()
            if (first in before and second in after) or (second in before and first in after)
        )

    def walk(items: Chain, outside: set[int], beyond: set[int], fork: int | None) -> None:
        layers = [set(layers_of((item,))) for item in items]
        source = fork
        for index, item in enumerate(items):
            before = outside.union(*layers[:index])
            after: set[int] = set().union(*layers[index + 1 :])
            if isinstance(item, int):
                if source is not None:
                    found[source, item] = between(before, layers[index] | after)
                source = item
                continue
            assert source is not None
            behind = {item.join} | after | beyond
            for branch in item.branches:
                own = set(layers_of(branch))
                if branch:
                    walk(branch, before, behind, source)
                    last = branch[-1]
                    end = last if isinstance(last, int) else last.join
                    found[end, item.join] = between(own, behind)
                else:
                    found[source, item.join] = between(before, behind)
            source = item.join

    walk(chain, set(), set(), None)
    return found


def _widths(evaluator: Evaluator, order: tuple[int, ...]) -> list[int]:
    """Numbers of devices: powers of two, and the ends of hosts, up to all devices."""
    count = len(order)
    widths = {1 << power for power in range(count.bit_length()) if 1 << power <= count}
    hosts = [evaluator.cluster.host_of[device] for device in order]
    widths |= {index + 1 for index in range(count - 1) if hosts[index] != hosts[index + 1]}
    return sorted(widths | {count})


_Interval: TypeAlias = tuple[int, int]
"""(device, end of its samples); its samples begin where the interval before ends."""


def _intervals(decision: Decision) -> list[_Interval]:
    """The samples of a decision's devices, as consecutive intervals."""
    ends = np.cumsum(decision.shares).tolist()
    return list(zip(decision.devices, ends, strict=True))


def _overlaps(
    first: Sequence[_Interval], second: Sequence[_Interval]
) -> Iterator[tuple[int, int, int]]:
    """(device of the first, device of the second, common samples), where there are any.

    >>> list(_overlaps([(0, 2), (1, 6)], [(2, 3), (3, 3), (4, 6)]))
    [(0, 2, 2), (1, 2, 1), (1, 4, 3)]
    """
    begin, other = 0, 0
    for device, end in first:
        while begin < end:
            target, last = second[other]
            until = min(end, last)
            if until > begin:
                yield device, target, until - begin
            begin = until
            if begin == last:
                other += 1


class DeepPool(Searching):
    """Devices per group by dynamic programming; see the module docstring."""

    name = "deeppool"
    stage = "search"
    search = _Search
