"""The best data parallelism that a person could choose, of every kind that a plan can name.

Replicas on all devices or on those of some classes of hosts; even shares, or in proportion to
measured speed; ring, hierarchical all-reduce, reduce-scatter and all-gather, one parameter server
or balanced ones; buckets of 1, 5, 25 or 100 MiB or a single one; the best of the three orders.
Micro-batches only where nothing fits without, and as few as it takes. All of them are tried, the
promising ones first, until a small part of the budget is over. Gains are quoted over the better of
this and ``tuned_uniform``.
"""

import math
from collections.abc import Iterator
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.lowering.channels import proportional_slices
from heterog.methods.data_parallel import (
    Trials,
    balanced_homes,
    device_speeds,
    uniform_strategy,
)
from heterog.methods.planner import Planner, PlanResult, Problem
from heterog.simulator.evaluation import Evaluation, Outcome
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Sync
from heterog.units import MIB

BUCKETS = (DEFAULT_BUCKET_BYTES, 100 * MIB, 5 * MIB, MIB)
"""Bytes of a bucket, beside a single one for all."""
ALL_REDUCES = (Sync.HIERARCHICAL, Sync.RING, Sync.REDUCE_SCATTER_ALL_GATHER)
NUM_RETURNED = 6
"""Number of strategies, each in an order, handed to the referee."""
MOST_SETS = 63
"""Most sets of classes of hosts that are tried."""


class Replicas(NamedTuple):
    """Devices with a copy of the model, and samples of each."""

    devices: tuple[int, ...]
    shares: tuple[int, ...]


class BestDataParallel(Planner):
    """The best data parallelism; see the module docstring."""

    name = "best_ddp"
    stage = "baseline"
    most_part = 0.05

    def plan(self, problem: Problem) -> PlanResult:
        """Try every combination while the budget lasts."""
        enumeration = _Enumeration(problem)
        with enumeration.trials.spending.limits():
            enumeration.run()
        return enumeration.trials.result(NUM_RETURNED)


class _Enumeration:
    def __init__(self, problem: Problem) -> None:
        self.trials = Trials(problem)
        self._evaluator = evaluator = problem.evaluator
        self._step_barrier = problem.step_barrier
        self._bytes = evaluator.tables.parameter_bytes
        whole = max(int(self._bytes.sum()), 1)
        self._buckets = tuple(dict.fromkeys(min(each, whole) for each in (*BUCKETS, whole)))

    def run(self) -> None:
        """One way for all replicas, then the other ways of the best ones first."""
        first = {each: self._first(each) for each in self._replicas()}
        ranked = sorted(first, key=lambda each: first[each].cost)
        for replicas in ranked:
            if len(replicas.devices) == 1 or self._is_hopeless(replicas):
                continue
            for sync in ALL_REDUCES:
                for bucket_bytes in self._buckets:
                    if (sync, bucket_bytes) != (ALL_REDUCES[0], self._buckets[0]):
                        self._judge(replicas, first[replicas].num_micro, sync, bucket_bytes)
        for replicas in ranked:
            is_hopeless = self._is_hopeless(replicas, is_served=True)
            for homes in () if is_hopeless else self._homes(replicas.devices):
                self._judge_served(replicas, first[replicas].num_micro, homes)

    def _replicas(self) -> Iterator[Replicas]:
        speeds, batch = device_speeds(self._evaluator), self._evaluator.graph.batch_size
        for devices in class_sets(self._evaluator.cluster):
            in_proportion = split_in_proportion(batch, [speeds[device] for device in devices])
            for shares in dict.fromkeys((in_proportion, split_evenly(batch, len(devices)))):
                yield Replicas(devices, shares)

    def _first(self, replicas: Replicas) -> "_First":
        """One way for some replicas, with as few micro-batches as it takes to fit."""

        def judge(num_micro: int) -> Evaluation | None:
            return self._judge(replicas, num_micro, ALL_REDUCES[0], self._buckets[0])

        num_micro, found = 1, judge(1)
        if found is None or found.outcome != Outcome.OUT_OF_MEMORY or self._is_hopeless(replicas):
            return _First.of(found, num_micro)
        most = max(replicas.shares)
        while not _fits(found) and num_micro < most:
            num_micro = min(2 * num_micro, most)
            found = judge(num_micro)
        low = num_micro // 2 + 1
        while _fits(found) and low < num_micro:
            middle = (low + num_micro) // 2
            if _fits(other := judge(middle)):
                num_micro, found = middle, other
            else:
                low = middle + 1
        return _First.of(found, num_micro)

    def _is_hopeless(self, replicas: Replicas, *, is_served: bool = False) -> bool:
        """Whether parameters, and their state unless servers have it, fill a device alone."""
        evaluator = self._evaluator
        state_ratio = 0.0 if is_served else evaluator.graph.optimizer_state_ratio
        state_bytes = self._bytes.sum() * (1.0 + state_ratio)
        devices = [evaluator.cluster.devices[device] for device in replicas.devices]
        return bool(state_bytes > min(device.usable_memory_bytes for device in devices))

    def _judge(
        self,
        replicas: Replicas,
        num_micro: int,
        sync: Sync,
        bucket_bytes: int = 0,
        homes: tuple[int, ...] | None = None,
    ) -> Evaluation | None:
        devices, shares = replicas
        cluster = self._evaluator.cluster
        if len(devices) == 1:
            decision = Decision(devices=devices, shares=shares)
        else:
            slices = proportional_slices(cluster, devices) if sync.takes_slices else ()
            decision = Decision(devices=devices, shares=shares, sync=sync, slices=slices)
        micro_batches: tuple[tuple[int, ...], ...] = ()
        if num_micro > 1:
            idle = ((0,) * num_micro,) * (cluster.num_devices - 1)
            micro_batches = (split_evenly(sum(shares), num_micro), *idle)
        return self.trials.judge(
            uniform_strategy(
                self._evaluator,
                decision,
                homes=homes,
                bucket_bytes=bucket_bytes,
                micro_batches=micro_batches,
                step_barrier=self._step_barrier,
            )
        )

    def _homes(self, devices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """One server, on the host with the fastest NIC, or all of them in balance."""
        cluster = self._evaluator.cluster
        if len(devices) == 1:
            return
        fastest = max(
            devices, key=lambda each: cluster.nic_bandwidth_bytes_per_s(cluster.host_of[each])
        )
        yield (fastest,) * len(self._bytes)
        yield balanced_homes(self._evaluator, devices)

    def _judge_served(self, replicas: Replicas, num_micro: int, homes: tuple[int, ...]) -> None:
        """Judge servers, unless what their NICs receive takes longer than the best step."""
        cluster = self._evaluator.cluster
        hosts = np.array(cluster.host_of)
        host_of_home = hosts[list(homes)]
        for host in dict.fromkeys(host_of_home.tolist()):
            senders = int((hosts[list(replicas.devices)] != host).sum())
            received_bytes = float(self._bytes[host_of_home == host].sum()) * senders
            if received_bytes / cluster.nic_bandwidth_bytes_per_s(host) > self.trials.limit_s:
                return
        self._judge(replicas, num_micro, Sync.PARAMETER_SERVER, homes=homes)


class _First(NamedTuple):
    """How well the first way for some replicas does, and their number of micro-batches."""

    cost: tuple[float, float]
    num_micro: int

    @staticmethod
    def of(found: Evaluation | None, num_micro: int) -> "_First":
        cost = (math.inf, math.inf) if found is None else found.preference
        return _First(cost, num_micro)


def _fits(found: Evaluation | None) -> bool:
    return found is not None and found.is_ok


def class_sets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Devices of all hosts, then those of some classes of hosts that are alike, most first."""
    classes: dict[int, list[int]] = {}
    for host, kind in enumerate(cluster.host_kind):
        classes.setdefault(kind, []).extend(cluster.host_devices(host))
    sets = (
        tuple(sorted(device for devices in chosen for device in devices))
        for size in range(len(classes), 0, -1)
        for chosen in combinations(classes.values(), size)
    )
    return list(islice(sets, MOST_SETS))
