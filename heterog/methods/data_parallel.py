"""Data parallelism as practised today: the paper's four baselines, DDP, and the best of all kinds.

- ``ev_ps``, ``ev_ar``, ``cp_ps``, ``cp_ar`` (HeteroG section 6): replicas on all devices; even
  shares, or shares in proportion to the measured speed of the whole model; synchronised tensor by
  tensor, first come first served, no micro-batches. PS is the better of one server and servers
  balanced by bytes over all devices, AR the better of ring and hierarchical for the whole model.
- ``ddp``: even shares, buckets in the order in which gradients are computed, the first of 1 MiB
  and others of 25, all-reduce during the backward pass (Li et al., VLDB 2020).
- ``ddp_accumulate``: the same with the smallest number of micro-batches that fits.
- ``best_ddp``: the best data parallelism that a plan can express. Replicas are on all devices or
  on those of some classes of hosts; shares are even or in proportion to measured speed.
  Gradients are summed by ring or hierarchical all-reduce, by reduce-scatter and all-gather, or
  by one parameter server or balanced ones. Buckets are DDP's, of 1, 5 or 100 MiB, or a single
  one; the best of the three orders counts. There are as few micro-batches as memory allows. All
  combinations are tried, the promising ones first, until a small part of the budget is over.
  Gains are quoted over the better of this method and ``tuned_uniform``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, islice
from typing import NamedTuple, TypeVar

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.grouping import group_ops
from heterog.grouped import grouped
from heterog.lowering.channels import proportional_slices
from heterog.methods.planner import (
    Candidate,
    Planner,
    PlanResult,
    Problem,
    Searching,
    StrategySearch,
)
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator, Outcome
from heterog.simulator.lower_bound import floor_s
from heterog.simulator.space import balanced_homes
from heterog.strategy.division import micro_batch_table, split_evenly, split_in_proportion
from heterog.strategy.strategy import (
    DEFAULT_BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    REPLICATED,
    Decision,
    Strategy,
    Sync,
)
from heterog.units import MIB

TRANSFERS_PER_S = 50_000
"""Pushes and pulls that the referee simulates in a second, if all share a few links."""
NEARLY_BEST = 1.1
"""Ratio to the engine's best step up to which the referee may still prefer a strategy."""
PATIENCE = 2.0
"""Most budgets that a baseline may take; a baseline that would take longer is not begun."""


def uniform_strategy(
    evaluator: Evaluator,
    decision: Decision,
    *,
    homes: tuple[int, ...] | None = None,
    bucket_bytes: int = 0,
    first_bucket_bytes: int = 0,
    micro_batches: tuple[tuple[int, ...], ...] = (),
    step_barrier: bool = True,
) -> Strategy:
    """A strategy with one decision for every group."""
    graph = evaluator.graph
    return Strategy(
        graph=graph.fingerprint,
        cluster=evaluator.cluster.fingerprint,
        decisions=(decision,) * group_ops(graph).num_groups,
        homes=homes or (REPLICATED,) * len(graph.updates),
        micro_batches=micro_batches,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        step_barrier=step_barrier,
    )


def replicated(
    cluster: Cluster, devices: tuple[int, ...], shares: tuple[int, ...], sync: Sync
) -> Decision:
    """Replicas on devices; slices, where the synchronisation has them, in proportion to links."""
    if len(devices) == 1:
        return Decision(devices=devices, shares=shares)
    slices = proportional_slices(cluster, devices) if sync.takes_slices else ()
    return Decision(devices=devices, shares=shares, sync=sync, slices=slices)


def shares_to_try(
    batch: int, speeds: Sequence[float], devices: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Shares of some devices: in proportion to speed, and even."""
    by_speed = split_in_proportion(batch, tuple(speeds[device] for device in devices))
    return list(dict.fromkeys([by_speed, split_evenly(batch, len(devices))]))


def even_shares(evaluator: Evaluator) -> tuple[int, ...]:
    """Shares of the batch: equal parts over all devices."""
    return split_evenly(evaluator.graph.batch_size, evaluator.cluster.num_devices)


def proportional_shares(evaluator: Evaluator) -> tuple[int, ...]:
    """Shares of the batch in proportion to the devices' speeds."""
    return split_in_proportion(evaluator.graph.batch_size, evaluator.speeds)


class Trials(StrategySearch):
    """Evaluates strategies in every order by the engine; for enumerations.

    A strategy is given up once a lower bound or a partial simulation shows it far behind the best.
    """

    why_nothing = ""

    @property
    def limit_s(self) -> float:
        """Seconds of a step above which a strategy is given up."""
        return NEARLY_BEST * self._best_s

    def judge(self, strategy: Strategy) -> Evaluation | None:
        """The evaluation in the best order; ``None`` if the strategy was given up."""
        choice = self.evaluator.encode(strategy)
        if floor_s(self.evaluator.prices, choice) > self.limit_s:
            return None
        found = self.evaluator.evaluate_orders(choice, tuple(Order), self.limit_s)
        kept = [each for each in found if each.outcome != Outcome.GIVEN_UP]
        for each in kept:
            self.keep((strategy, each.order), each)
        return min(kept, key=lambda each: each.preference, default=None)


_T = TypeVar("_T")


def fewest(
    judge: Callable[[int], _T], first: _T, fits: Callable[[_T], bool], most: int
) -> tuple[int, _T]:
    """The smallest number of micro-batches that fits, by doubling and then bisection.

    >>> fewest(lambda count: count, 1, lambda found: found >= 11, most=64)
    (11, 11)

    Args:
        judge: Function that tries a number of micro-batches.
        first: What it has found for 1.
        fits: Whether what it finds fits.
        most: Largest number, which is returned if none fits.
    """
    count, found = 1, first
    while not fits(found) and count < most:
        count = min(2 * count, most)
        found = judge(count)
    low = count // 2 + 1
    while fits(found) and low < count:
        middle = (low + count) // 2
        if fits(tried := judge(middle)):
            count, found = middle, tried
        else:
            low = middle + 1
    return count, found


class DataParallel(Planner):
    """Replicas on all devices, one decision for the whole model."""

    stage = "baseline"

    def __init__(self, name: str, *, proportional: bool, by_server: bool) -> None:
        self.name = name
        self._proportional = proportional
        self._by_server = by_server

    def plan(self, problem: Problem) -> PlanResult:
        """Try the variants that the definition allows; see the module docstring."""
        variants = list(self._variants(problem))
        if self._by_server and problem.budget.seconds is not None:
            graph, cluster = problem.evaluator.graph, problem.evaluator.cluster
            transfers = 2 * len(variants) * len(graph.updates) * cluster.num_devices
            seconds = transfers / TRANSFERS_PER_S
            if seconds > PATIENCE * problem.budget.seconds:
                reason = (
                    f"its {transfers} transfers take about {seconds:.0f} s to simulate, of the "
                    f"{problem.budget.seconds:.1f} s that it has; a larger budget lets it try"
                )
                return PlanResult(candidates=(), num_evaluations=0, reason=reason)
        return _best_variants(problem, variants)

    def _variants(self, problem: Problem) -> Iterator[Strategy]:
        evaluator = problem.evaluator
        devices = tuple(range(evaluator.cluster.num_devices))
        shares = proportional_shares(evaluator) if self._proportional else even_shares(evaluator)
        if self._by_server:
            decision = Decision(devices=devices, shares=shares, sync=Sync.PARAMETER_SERVER)
            one = (0,) * len(evaluator.graph.updates)
            balanced = balanced_homes(evaluator.tables.parameter_bytes, devices)
            for homes in (one, tuple(balanced.tolist())):
                yield uniform_strategy(
                    evaluator, decision, homes=homes, step_barrier=problem.step_barrier
                )
            return
        for sync in (Sync.RING, Sync.HIERARCHICAL):
            decision = Decision(devices=devices, shares=shares, sync=sync)
            yield uniform_strategy(evaluator, decision, step_barrier=problem.step_barrier)


class DistributedDataParallel(Planner):
    """PyTorch's DDP: even shares and buckets, with or without gradient accumulation."""

    stage = "baseline"

    def __init__(self, name: str, *, accumulate: bool) -> None:
        self.name = name
        self._accumulate = accumulate

    def plan(self, problem: Problem) -> PlanResult:
        """The better of ring and hierarchical all-reduce, as NCCL chooses."""

        def tried(num_micro: int) -> PlanResult:
            return _best_variants(problem, self._variants(problem, num_micro))

        found = tried(1)
        if self._accumulate and found.candidates:  # else the budget was over before the first
            most = min(even_shares(problem.evaluator))
            with problem.spend().limits():
                _, found = fewest(tried, found, partial(self._fits, problem), most)
        return found

    def _fits(self, problem: Problem, result: PlanResult) -> bool:
        if not result.candidates:
            return False
        strategy = result.candidates[0].strategy
        return problem.evaluator.evaluate(strategy, Order.FIFO).is_ok

    def _variants(self, problem: Problem, num_micro: int) -> list[Strategy]:
        evaluator = problem.evaluator
        shares = even_shares(evaluator)
        micro_batches = tuple(split_evenly(share, num_micro) for share in shares)
        return [
            uniform_strategy(
                evaluator,
                Decision(devices=tuple(range(len(shares))), shares=shares, sync=sync),
                bucket_bytes=DEFAULT_BUCKET_BYTES,
                first_bucket_bytes=FIRST_BUCKET_BYTES,
                micro_batches=micro_batches if num_micro > 1 else (),
                step_barrier=problem.step_barrier,
            )
            for sync in (Sync.RING, Sync.HIERARCHICAL)
        ]


def in_orders(
    problem: Problem, strategies: Sequence[Strategy], orders: Sequence[Order]
) -> tuple[list[tuple[Evaluation, Strategy]], int]:
    """Strategies with their evaluations in the best of some orders, best first.

    Returns:
        Those that were evaluated before the budget was over, and the number of evaluations.
    """
    spending, found = problem.spend(), list[tuple[Evaluation, Strategy]]()
    with spending.limits():
        for strategy in strategies:
            choice = problem.evaluator.encode(strategy)
            tried = (problem.evaluator.evaluate(choice, order) for order in orders)
            found.append((min(tried, key=lambda each: each.preference), strategy))
    return sorted(found, key=lambda pair: pair[0].preference), spending.evaluations


def _best_variants(problem: Problem, strategies: Sequence[Strategy]) -> PlanResult:
    """Variants as candidates, best first; the referee decides which one counts."""
    # Without a barrier, baselines may choose among the same orders as searches.
    orders = (Order.FIFO,) if problem.step_barrier else problem.orders
    found, num_evaluations = in_orders(problem, strategies, orders)
    return PlanResult(
        candidates=tuple(Candidate(strategy=each, orders=orders) for _, each in found),
        num_evaluations=num_evaluations,
    )


EV_PS = partial(DataParallel, "ev_ps", proportional=False, by_server=True)
EV_AR = partial(DataParallel, "ev_ar", proportional=False, by_server=False)
CP_PS = partial(DataParallel, "cp_ps", proportional=True, by_server=True)
CP_AR = partial(DataParallel, "cp_ar", proportional=True, by_server=False)
DDP = partial(DistributedDataParallel, "ddp", accumulate=False)
DDP_ACCUMULATE = partial(DistributedDataParallel, "ddp_accumulate", accumulate=True)


class Buckets(NamedTuple):
    """Bytes of a bucket, and of the first one if it is smaller."""

    others: int = 0
    first: int = 0

    def within(self, num_bytes: int) -> "Buckets":
        """These buckets, limited to a model with ``num_bytes`` of parameters."""
        others = min(self.others, num_bytes)
        return Buckets(others, self.first if self.first < others else 0)


NO_BUCKETS = Buckets()
BUCKETS = (
    Buckets(DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES),
    *map(Buckets, (100 * MIB, 5 * MIB, MIB)),
)
"""DDP's buckets and some others; a single bucket for the whole model is tried, too."""
ALL_REDUCES = (Sync.HIERARCHICAL, Sync.RING, Sync.REDUCE_SCATTER_ALL_GATHER)
MOST_SETS = 63
"""Most sets of classes of hosts that are tried."""


class Replicas(NamedTuple):
    """Devices with a copy of the model, and samples of each."""

    devices: tuple[int, ...]
    shares: tuple[int, ...]


class _Enumeration(Trials):
    num_returned = 6

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._bytes = self.evaluator.tables.parameter_bytes
        whole = max(int(self._bytes.sum()), 1)
        every = (*BUCKETS, Buckets(whole))
        self._buckets = tuple(dict.fromkeys(each.within(whole) for each in every))

    def search(self) -> None:
        """One synchronisation for all replicas, then the others, for the best replicas first."""
        first = {each: self._first(each) for each in self._replicas()}
        ranked = sorted(first, key=lambda each: first[each][0])
        for replicas in ranked:
            if len(replicas.devices) == 1 or self._is_hopeless(replicas):
                continue
            for sync in ALL_REDUCES:
                for buckets in self._buckets:
                    if (sync, buckets) != (ALL_REDUCES[0], self._buckets[0]):
                        self._judge(replicas, first[replicas][1], sync, buckets)
        for replicas in ranked:
            is_hopeless = self._is_hopeless(replicas, is_served=True)
            for homes in () if is_hopeless else self._homes(replicas.devices):
                self._judge_served(replicas, first[replicas][1], homes)

    def _replicas(self) -> list[Replicas]:
        """All replicas, sorted by a rough estimate of compute and gradient seconds.

        So a budget that ends early has tried the best ones, and later ones are given up sooner.
        """
        speeds, batch = self.evaluator.speeds, self.evaluator.graph.batch_size
        cluster = self.evaluator.cluster

        def roughly_s(each: Replicas) -> float:
            compute_s = max(
                share / speeds[device]
                for device, share in zip(each.devices, each.shares, strict=True)
            )
            hosts = {cluster.host_of[device] for device in each.devices}
            slowest = min(cluster.nic_bandwidth_bytes_per_s[host] for host in hosts)
            sent_bytes = 2.0 * float(self._bytes.sum()) * (len(hosts) - 1) / len(hosts)
            return compute_s + sent_bytes / slowest

        found = [
            Replicas(devices, shares)
            for devices in class_sets(cluster)
            for shares in shares_to_try(batch, speeds, devices)
        ]
        return sorted(found, key=roughly_s)

    def _first(self, replicas: Replicas) -> tuple[tuple[float, float], int]:
        """Judge replicas with one synchronisation and the fewest micro-batches that fit.

        Returns:
            Their cost and their number of micro-batches.
        """

        def judge(num_micro: int) -> Evaluation | None:
            return self._judge(replicas, num_micro, ALL_REDUCES[0], self._buckets[0])

        found = judge(1)
        is_too_large = found is not None and found.outcome == Outcome.OUT_OF_MEMORY
        most = max(replicas.shares) if is_too_large and not self._is_hopeless(replicas) else 1
        num_micro, found = fewest(judge, found, _fits, most)
        return (math.inf, math.inf) if found is None else found.preference, num_micro

    def _is_hopeless(self, replicas: Replicas, *, is_served: bool = False) -> bool:
        """Whether parameters, and their state unless servers hold it, exceed a device's memory."""
        evaluator = self.evaluator
        state_ratio = 0.0 if is_served else evaluator.graph.optimizer_state_ratio
        state_bytes = self._bytes.sum() * (1.0 + state_ratio)
        devices = [evaluator.cluster.devices[device] for device in replicas.devices]
        return bool(state_bytes > min(device.usable_memory_bytes for device in devices))

    def _judge(
        self,
        replicas: Replicas,
        num_micro: int,
        sync: Sync,
        buckets: Buckets = NO_BUCKETS,
        homes: tuple[int, ...] | None = None,
    ) -> Evaluation | None:
        cluster, sizes = self.evaluator.cluster, split_evenly(sum(replicas.shares), num_micro)
        return self.judge(
            uniform_strategy(
                self.evaluator,
                replicated(cluster, *replicas, sync),
                homes=homes,
                bucket_bytes=buckets.others,
                first_bucket_bytes=buckets.first,
                micro_batches=micro_batch_table(sizes, cluster.num_devices),
                step_barrier=self.problem.step_barrier,
            )
        )

    def _homes(self, devices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """One server on the host with the fastest NIC, then balanced servers on all devices."""
        cluster = self.evaluator.cluster
        if len(devices) == 1:
            return
        fastest = max(
            devices, key=lambda each: cluster.nic_bandwidth_bytes_per_s[cluster.host_of[each]]
        )
        yield (fastest,) * len(self._bytes)
        yield tuple(balanced_homes(self._bytes, devices).tolist())

    def _judge_served(self, replicas: Replicas, num_micro: int, homes: tuple[int, ...]) -> None:
        """Judge servers, unless receiving gradients alone takes longer than ``limit_s``."""
        cluster = self.evaluator.cluster
        hosts = np.array(cluster.host_of)
        host_of_home = hosts[list(homes)]
        for host in dict.fromkeys(host_of_home.tolist()):
            senders = int((hosts[list(replicas.devices)] != host).sum())
            received_bytes = float(self._bytes[host_of_home == host].sum()) * senders
            if received_bytes / cluster.nic_bandwidth_bytes_per_s[host] > self.limit_s:
                return
        self._judge(replicas, num_micro, Sync.PARAMETER_SERVER, homes=homes)


def _fits(found: Evaluation | None) -> bool:
    return found is not None and found.is_ok


def class_sets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Devices of all hosts, then of ever fewer kinds of hosts."""
    classes = grouped(
        (kind, device)
        for host, kind in enumerate(cluster.host_kind)
        for device in cluster.host_devices[host]
    )
    sets = (
        tuple(sorted(device for devices in chosen for device in devices))
        for size in range(len(classes), 0, -1)
        for chosen in combinations(classes.values(), size)
    )
    return list(islice(sets, MOST_SETS))


class BestDataParallel(Searching):
    """The best data parallelism; see the module docstring."""

    name = "best_ddp"
    stage = "baseline"
    most_part = 0.05
    search = _Enumeration
