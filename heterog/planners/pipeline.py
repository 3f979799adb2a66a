"""Pipelines of machines: consecutive ranges of layers, each replicated inside its own stage.

Gradients are then synchronised inside a stage only, over its fast links, and between stages move
activations, which are small beside gradients where layers are wide. Stages are blocks of whole
machines, or single devices; the cut that balances the stages is found by dynamic programming for
every sequence of stages, then its boundaries are moved by simulation. The best are also tried with
caps on the micro-batches that stages hold, those of 1F1B and those that hide messages, and with
weight gradients when devices would wait otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import FloatArray
from heterog.planners.enumeration import Enumeration
from heterog.planners.model_parallel import activation_bytes, balanced_chain, parameter_bytes
from heterog.planners.planner import PlanResult, Problem, register
from heterog.planners.tuned_uniform import tuned_decision
from heterog.simulator.engine import Order
from heterog.strategy.pipeline_schedule import AS_IT_COMES, PipelineSchedule
from heterog.strategy.program import IntArray
from heterog.strategy.schedules import caps_of_stages

_FIRST_MICRO = (4, 8)  # tried for every sequence of stages
_ALL_MICRO = (1, 2, 4, 8, 16, 32)
_NUM_WIDENED = 10  # sequences that are tried with every number of micro-batches and order
_NUM_REFINED = 4
_MOST_CAPS = 2  # see ``_Point``
_MOST_HOSTS = 5  # up to which every sequence of machines is tried

Stages = tuple[tuple[int, ...], ...]
"""Devices of each stage, in the order of the layers."""


class Pipeline:
    """Sequences of stages by enumeration; see the module docstring."""

    name = "pipeline"
    stage = "search"

    def plan(self, problem: Problem) -> PlanResult:
        """Enumerate, then refine the best until nothing improves or the budget is over."""
        groups = problem.evaluator.tables.num_groups
        return _Enumeration(problem).run(
            reason=f"every stage needs a group of layers, and the model has {groups} of them"
        )


@dataclass(frozen=True, slots=True)
class _Point:
    stages: Stages
    cuts: tuple[int, ...]  # first group of each stage but the first
    num_micro: int
    order: Order
    caps: int = 0  # 0: none; 1: those of 1F1B; 2: twice as many but for the last stage, less one
    splits_backward: bool = False


def stage_sequences(cluster: Cluster) -> list[Stages]:
    """Sequences of stages worth trying: of two and more where there are two devices.

    Up to five machines: every sequence of machines, alike ones in one order only, cut into blocks
    in every way, and its devices one by one. With more: all machines, sorted by speed both ways,
    in blocks of equal size.
    """
    hosts = [cluster.host_devices(index) for index in range(cluster.num_hosts)]
    kinds = [
        (
            tuple(cluster.device_types[cluster.type_index[device]].name for device in host),
            cluster.nic_bandwidth_bytes_per_s(index),
        )
        for index, host in enumerate(hosts)
    ]
    found: dict[Stages, None] = {}
    for sequence in _host_sequences(kinds):
        count = len(sequence)
        for cuts in _compositions(count):
            bounds = (0, *cuts, count)
            blocks = [
                tuple(sorted(d for host in sequence[first:last] for d in hosts[host]))
                for first, last in pairwise(bounds)
            ]
            found.setdefault(tuple(blocks))
        found.setdefault(tuple((device,) for host in sequence for device in hosts[host]))
    return [stages for stages in found if len(stages) > 1] or list(found)


def _host_sequences(kinds: list[tuple[tuple[str, ...], float]]) -> Iterator[tuple[int, ...]]:
    everything = range(len(kinds))
    if len(kinds) > _MOST_HOSTS:
        by_kind = sorted(everything, key=lambda host: (kinds[host], host))
        yield tuple(by_kind)
        yield tuple(reversed(by_kind))
        return
    seen = set()
    for size in range(len(kinds), 0, -1):
        for chosen in combinations(everything, size):
            for sequence in permutations(chosen):
                kind = tuple(kinds[host] for host in sequence)
                if kind not in seen:
                    seen.add(kind)
                    yield sequence


def _compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Positions at which a sequence may be cut: everywhere, or evenly if it is long."""
    inner = range(1, count)
    if count <= _MOST_HOSTS:
        for size in range(count):
            yield from combinations(inner, size)
        return
    for parts in range(1, count + 1):
        yield tuple(dict.fromkeys(round(count * part / parts) for part in range(1, parts)))


class _Enumeration(Enumeration[_Point]):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.parameters = parameter_bytes(problem.evaluator)
        self.activations = activation_bytes(problem.evaluator)
        self.seconds: dict[tuple[int, int], FloatArray] = {}

    def search(self) -> None:
        """Balanced cuts of all sequences, other settings of the best, then cuts beside those."""
        order = self.problem.orders[min(1, len(self.problem.orders) - 1)]
        sequences = [
            stages
            for stages in stage_sequences(self.problem.evaluator.cluster)
            if len(stages) <= self.num_groups
        ]
        most = self.problem.evaluator.graph.batch_size
        # A batch of a few samples is cut into as many micro-batches as it has.
        first_micro = [count for count in _FIRST_MICRO if count <= most] or [most]
        self.try_points(
            point
            for num_micro in first_micro
            for stages in sequences
            for point in self._balanced(stages, num_micro, order)
        )
        self.try_points(
            point
            for start in self.best(_NUM_WIDENED)
            for num_micro in _ALL_MICRO
            if num_micro <= most
            for point in self._balanced(start.stages, num_micro, order)
        )
        self.try_points(
            replace(start, order=other)
            for start in self.best(_NUM_WIDENED)
            for other in self.problem.orders
        )
        self.try_points(
            replace(start, caps=caps, splits_backward=splits)
            for start in dict.fromkeys((*self.best(_NUM_REFINED), *self._fastest(_NUM_REFINED)))
            for caps in range(_MOST_CAPS + 1)
            for splits in (False, True)
        )
        for start in self.best(_NUM_REFINED):
            self._refine(start)

    def _fastest(self, count: int) -> list[_Point]:
        """Points with the shortest steps, whether they fit or not: a cap may make them fit."""
        return sorted(self.cost, key=lambda point: self.cost[point][1])[:count]

    def _balanced(self, stages: Stages, num_micro: int, order: Order) -> Iterator[_Point]:
        """Cuts that balance the stages' seconds, with and without regard to memory."""
        self.spending.check()
        evaluator = self.problem.evaluator
        seconds = np.stack([self._stage_seconds(devices, num_micro) for devices in stages], axis=1)
        memory = np.stack(
            [self.parameters + self.activations / len(devices) for devices in stages], axis=1
        )
        usable = [device.usable_memory_bytes for device in evaluator.cluster.devices]
        room = np.array([min(usable[device] for device in devices) for devices in stages])
        for limit in (room, np.full(len(stages), np.inf)):
            placement = np.array(balanced_chain(seconds, memory, limit))
            # Every stage keeps a group, though the fastest cut may leave a slow one empty.
            cuts = np.searchsorted(placement, np.arange(1, len(stages)))
            lowest = np.arange(1, len(stages))
            cuts = np.maximum.accumulate(np.maximum(cuts, lowest))
            cuts = np.minimum(cuts, self.num_groups - lowest[::-1])
            yield _Point(stages, tuple(int(cut) for cut in cuts), num_micro, order)

    def _stage_seconds(self, devices: tuple[int, ...], num_micro: int) -> FloatArray:
        """Seconds of each group on a stage whose devices share every micro-batch."""
        evaluator = self.problem.evaluator
        cluster, graph = evaluator.cluster, evaluator.graph
        micro = graph.batch_size / num_micro
        samples = max(round(micro / len(devices)), 1)
        rate = np.zeros(self.num_groups)
        for device in devices:
            kind = cluster.type_index[device]
            if (kind, samples) not in self.seconds:
                op_seconds = evaluator.cost_model.op_seconds(
                    graph, cluster.device_types[kind], samples
                )[evaluator.tables.op_id]
                per_group = np.full(self.num_groups, 1e-9)
                inside = evaluator.tables.op_group >= 0
                np.add.at(per_group, evaluator.tables.op_group[inside], op_seconds[inside])
                self.seconds[kind, samples] = per_group
            rate += samples / self.seconds[kind, samples]
        return graph.batch_size / rate

    def _refine(self, start: _Point) -> None:
        """Move boundaries for as long as that helps."""
        best = start
        while True:
            self.try_points(
                replace(best, cuts=(*best.cuts[:i], cut + step, *best.cuts[i + 1 :]))
                for i, cut in enumerate(best.cuts)
                for step in (-2, -1, 1, 2)
            )
            again = min(
                (point for point in self.cost if point.stages == start.stages),
                key=self.cost.__getitem__,
            )
            if again == best or self.spending.is_over:
                return
            best = again

    def is_possible(self, point: _Point) -> bool:
        """Every stage keeps a group."""
        bounds = (0, *point.cuts, self.num_groups)
        return all(first < last for first, last in pairwise(bounds))

    def row(self, point: _Point) -> IntArray:
        """See ``Enumeration``."""
        row = np.empty(self.num_groups, np.int32)
        bounds = (0, *point.cuts, self.num_groups)
        for devices, first, last in zip(point.stages, bounds[:-1], bounds[1:], strict=True):
            row[first:last] = self.space.add(
                tuned_decision(self.problem.evaluator, devices, self.speeds)
            )
        return row

    def order(self, point: _Point) -> Order:
        """See ``Enumeration``."""
        return point.order

    def micro_batches(self, point: _Point) -> tuple[tuple[int, ...], ...]:
        """See ``Enumeration``."""
        return self.space.micro_batches(point.num_micro)

    def schedule(self, point: _Point) -> PipelineSchedule:
        """See ``Enumeration``."""
        capped = AS_IT_COMES
        if point.caps and point.num_micro > 1:
            num_devices = self.problem.evaluator.cluster.num_devices
            capped = caps_of_stages(point.stages, num_devices, hidden=point.caps - 1)
        return replace(capped, splits_backward=point.splits_backward and point.num_micro > 1)


register(Pipeline())
