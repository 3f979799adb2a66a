"""Samples cut along space: for batches with fewer samples than devices, or samples too large.

Data parallelism ends where there is one sample for each device, pipelines where there is one
micro-batch for each stage. A convolutional network can then still be cut along the depth, height
or width of its samples (Oyama et al. 2020, arXiv 2007.12856): each device of a team owns some rows
of every activation, and neighbours send each other the rows that convolutions read across the cut.

A full-batch graph network has one sample, too: nodes are cut, or features (``graph_split``).

Unlike the paper, rows are shared out by the devices' speeds, and then moved one unit at a time
from one device to another as long as the simulated step gets shorter. Every dimension and every
number of units is tried: fewer units are coarser, but go deeper into the network.
"""

from collections.abc import Iterator

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.sparse_pattern import entry_shares
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem
from heterog.methods.unit_search import Teams, UnitPoint, UnitSearch
from heterog.simulator.engine import Order
from heterog.strategy.division import split_in_proportion
from heterog.strategy.graph_split import feature_splits, row_splits
from heterog.strategy.spatial_split import SpatialSplit, spatial_splits
from heterog.strategy.strategy import Sync

NUM_RETURNED = 3
"""Number of strategies handed to the referee."""
NUM_REFINED = 2
"""Number of the best points whose rows are moved."""
LARGE_PART = 0.5
"""Part of a device's memory from which on the activations of a sample make it a large one."""

_Point = UnitPoint[SpatialSplit]


class Spatial(Planner):
    """Cuts samples along space; see the module docstring."""

    name = "spatial"
    stage = "baseline"

    @staticmethod
    def joins_auto(graph: OpGraph, cluster: Cluster) -> bool:
        """Whether there are convolutions, or a graph, and samples that have to be cut."""
        has_convolution = any(op.kind.startswith("convolution") for op in graph.ops)
        return (has_convolution or bool(graph.patterns)) and not why_needless(graph, cluster)

    def plan(self, problem: Problem) -> PlanResult:
        """Try every way to cut, then move rows between the devices of the best."""
        spending = problem.spend()
        search = _Search(problem, spending, least_units=0)
        reason = why_needless(search.graph, search.cluster)
        if not reason:
            with spending.limits():
                search.run()
            if not search.found:
                reason = "no convolution of the network can be cut along space"
                if search.graph.patterns:
                    reason = "neither nodes nor features of the graph can be cut"
        best = search.found.best(NUM_RETURNED)
        return PlanResult(
            candidates=tuple(
                Candidate(strategy=search.found.strategies[point], orders=tuple(Order))
                for point in best
            ),
            num_evaluations=spending.evaluations,
            reason=reason,
            note=_in_words(best[0]) if best else "",
        )


def why_needless(graph: OpGraph, cluster: Cluster) -> str:
    """Reason why samples need not be cut; empty if they should be."""
    devices = cluster.devices
    if len(devices) < 2:
        return "there is one device only"
    kept = sum(
        int(graph.tensor_bytes[tensor])
        for tensor in range(graph.num_inputs, len(graph.tensors))
        if graph.storage[tensor] == tensor and graph.tensors[tensor].kind != TensorKind.PARAMETER
    )
    room = max(device.usable_memory_bytes for device in devices)
    if graph.batch_size >= len(devices) and kept / graph.batch_size <= LARGE_PART * room:
        return (
            f"{graph.batch_size} samples are enough for {len(devices)} devices and a sample "
            "fits; the batch is cut instead"
        )
    return ""


class _Search(UnitSearch[SpatialSplit]):
    def run(self) -> None:
        """Try all ways in proportion to speed first, then move rows of the best."""
        graph = self.graph
        splits = (*spatial_splits(graph), *row_splits(graph), *feature_splits(graph))
        ways = [(split, False) for split in splits]
        ways += [(split, True) for split in splits if split.entries is not None]
        for split, by_entries in ways:
            for teams in self._teams():
                for sync in (Sync.RING, Sync.HIERARCHICAL):
                    point = self._proportional(split, teams, sync, by_entries=by_entries)
                    if point is not None:
                        self.try_until_it_fits(point)
                    if self.found and self.spending.is_over:
                        return
        for point in self.found.best(NUM_REFINED):
            self.refine(point)

    def _teams(self) -> Iterator[Teams]:
        """One team of all devices, one of the fastest kinds alone, and one on each host."""
        rates = sorted({round(speed, 9) for speed in self.speeds})
        for least in rates:
            fast = [d for d, speed in enumerate(self.speeds) if round(speed, 9) >= least]
            if len(fast) > 1:
                yield (tuple(fast),)
        hosts = [tuple(self.cluster.host_devices(h)) for h in range(self.cluster.num_hosts)]
        if 1 < len(hosts) <= self.graph.batch_size:
            yield tuple(hosts)

    def _proportional(
        self, split: SpatialSplit, teams: Teams, sync: Sync, *, by_entries: bool
    ) -> _Point | None:
        """Rows, or entries of a sparse matrix, by speed; ``None`` if units are too few."""
        if any(len(team) > split.units for team in teams):
            return None
        speeds = [[self.speeds[device] for device in team] for team in teams]
        if by_entries and split.entries is not None:
            units = tuple(entry_shares(split.entries, each, split.units) for each in speeds)
        else:
            units = tuple(
                _with_one_each(split_in_proportion(split.units, each)) for each in speeds
            )
        return UnitPoint(split=split, teams=teams, units=units, sync=sync)


def _with_one_each(units: tuple[int, ...]) -> tuple[int, ...]:
    """Units with at least one for every device: a device without rows would do nothing."""
    found = list(units)
    for place, count in enumerate(found):
        if count == 0:
            found[found.index(max(found))] -= 1
            found[place] = 1
    return tuple(found)


def _in_words(point: _Point) -> str:
    shares = " and ".join(":".join(map(str, units)) for units in point.units)
    return f"dimension {point.split.dim} of the activations, rows {shares}"
