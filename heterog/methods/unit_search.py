"""Samples cut among the devices of a team: rows, nodes, features or positions for each device.

``spatial`` and ``sequences`` first try a few ways to cut samples. Then both move units, one at a
time, from one device to another as long as the simulated step gets shorter. They serve batches
with fewer samples than devices, and samples too large for a device: data parallelism ends at one
sample for each device, pipelines end at one micro-batch for each stage.

**Space**: a convolutional network is cut along the depth, height or width of its samples (Oyama et
al. 2020, arXiv 2007.12856). Each device of a team owns some rows of every activation, and
neighbours exchange the rows that convolutions read across the cut. Unlike in the paper, rows are
divided by the devices' speeds. Every dimension and every number of units is tried: a cut into
fewer units is coarser, but holds deeper into the network. A full-batch graph network is one
sample, too; its nodes or features are cut (``spatial_split``).

**Sequences**: the devices of a team own runs of positions (``heterog.strategy.sequence_split``).
This is the form of context parallelism in which keys and values are gathered (Grattafiori et al.
2024, arXiv 2407.21783, section 3.3.2). There, equal devices have an early and a late run each.
Unlike there, a device has one run. Its length follows from the speeds of devices and from causal
attention, whose later positions see more keys, so that all devices take equally long.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import ClassVar

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import axis_plan
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.sparse_pattern import SparsePattern, entry_shares
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import PointSearch, Problem, Searching
from heterog.methods.recomputing import kinds_worth_trying
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.sequence_split import (
    MOST_UNITS,
    RunCost,
    balanced_runs,
    finest_split,
    lengths,
    run_cost,
)
from heterog.strategy.spatial_split import UnitSplit, feature_splits, row_splits, spatial_splits
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Keeps, Strategy, Sync

NUM_REFINED = 2
"""Number of the best points whose units are moved."""
MOST_MOVES = 48
"""Most moves of units that are tried for a point: a few times the pairs of a host's devices."""
LARGE_PART = 0.5
"""A sample is large if its activations take more than this part of a device's memory."""

UNITS_PER_DEVICE = 4
"""Least units for each device, if the length allows: shares are then off by at most an eighth."""
LEAST_LENGTH = 512
"""Least positions for ``auto`` to run ``sequences``: shorter sequences do not fill a device."""
_SYNCS = (Sync.RING, Sync.HIERARCHICAL, Sync.ZERO1, Sync.ZERO3)

Teams = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPoint:
    """A way to cut samples, and the units of each device.

    Attributes:
        split: The way and its units.
        teams: Teams of devices, each with some samples.
        units: Number of units of each device, in the order of the teams.
        sync: Synchronisation of the gradients.
        recompute: Whether activations are computed again in the backward pass.
        keeps: Which activations are kept nevertheless.
    """

    split: UnitSplit
    teams: Teams
    units: tuple[tuple[int, ...], ...]
    sync: Sync
    recompute: bool = False
    keeps: Keeps = Keeps.NOTHING


class UnitSearch(PointSearch[UnitPoint]):
    """Search over ways to cut samples and over the units of each device.

    Args:
        problem: Problem to find a strategy for.

    Attributes:
        why_nothing: Reason to give if there is no point to try.
    """

    why_nothing = ""
    least_units: ClassVar[int]
    """Least units that a device may be left with."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.graph = problem.evaluator.graph
        self.cluster = problem.evaluator.cluster
        self.speeds = problem.evaluator.speeds
        self.hosts = self.cluster.host_devices
        self.why_nothing = why_needless(self.graph, self.cluster)

    @abstractmethod
    def points(self) -> Iterator[UnitPoint]:
        """The first points, in the order in which they are tried."""

    def search(self) -> None:
        """Try the first points, then move units between the devices of the best."""
        for point in self.points():
            self.try_until_it_fits(point)
            if self.found and self.spending.is_over:
                return
        for point in self.best(NUM_REFINED):
            self.refine(point)

    @abstractmethod
    def teams(self) -> Iterator[Teams]:
        """The teams that are tried."""

    def teams_within(self, units: int) -> Iterator[Teams]:
        """The teams with no more devices in a team than units."""
        return (teams for teams in self.teams() if max(map(len, teams)) <= units)

    def fast_teams(self) -> Iterator[Teams]:
        """One team of all devices, then one of the fastest kinds alone."""
        for least in sorted({round(speed, 9) for speed in self.speeds}):
            fast = [d for d, speed in enumerate(self.speeds) if round(speed, 9) >= least]
            if len(fast) > 1:
                yield (tuple(fast),)

    def try_until_it_fits(self, point: UnitPoint) -> None:
        """Simulate a point and, if it does not fit, the point with recomputation.

        Hierarchical all-reduce is skipped on a single host.
        """
        hosts = {self.cluster.host_of[device] for team in point.teams for device in team}
        if point.sync == Sync.HIERARCHICAL and len(hosts) == 1:
            return
        found = self.evaluate(point)
        if found is not None and not found.is_ok:
            kinds = reversed(kinds_worth_trying(self.graph))
            self.while_it_fits(replace(point, recompute=True, keeps=keeps) for keeps in kinds)

    def refine(self, start: UnitPoint) -> None:
        """Move a unit from one device of a team to another while that helps."""
        point, best, tried = start, self.found[start], 0
        while tried < MOST_MOVES and not self.spending.is_over:
            better = None
            for moved in self._moves(point):
                if tried >= MOST_MOVES or self.spending.is_over:
                    break
                tried += 1
                found = self.evaluate(moved)
                if found is not None and found.preference < best.preference:
                    better, best = moved, found
            if better is None:
                return
            point = better

    def strategy_of(self, point: UnitPoint) -> Strategy:
        """See ``PointSearch``."""
        return replace(
            uniform_strategy(
                self.problem.evaluator,
                self._decision(point),
                bucket_bytes=DEFAULT_BUCKET_BYTES,
                step_barrier=self.problem.step_barrier,
            ),
            op_rules=point.split.op_rules,
        )

    def _decision(self, point: UnitPoint) -> Decision:
        """A point's decision: samples by the teams' speeds, all with a team's first device."""
        rates = [sum(self.speeds[device] for device in team) for team in point.teams]
        samples = split_in_proportion(self.graph.batch_size, rates)
        share: dict[int, int] = {}
        part: dict[int, int] = {}
        for team, count, units in zip(point.teams, samples, point.units, strict=True):
            share |= dict.fromkeys(team, 0) | {team[0]: count}
            part |= dict(zip(team, units, strict=True))
        devices = tuple(sorted(share))
        return Decision(
            devices=devices,
            shares=tuple(share[device] for device in devices),
            teams=point.teams,
            parts=tuple(part[device] for device in devices),
            sync=point.sync,
            recompute=point.recompute,
            keeps=point.keeps,
        )

    def _moves(self, point: UnitPoint) -> Iterator[UnitPoint]:
        """Moves of a unit from one device to another, from those with the most units first."""
        for number, units in enumerate(point.units):
            by_units = sorted(range(len(units)), key=lambda place: -units[place])
            for giver, taker in product(by_units, reversed(by_units)):
                if giver != taker and units[giver] > self.least_units:
                    moved = list(units)
                    moved[giver] -= 1
                    moved[taker] += 1
                    changed = (*point.units[:number], tuple(moved), *point.units[number + 1 :])
                    yield replace(point, units=changed)


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


class _SpatialSearch(UnitSearch):
    least_units = 0

    def points(self) -> Iterator[UnitPoint]:
        """All ways to cut, with units in proportion to speed."""
        graph = self.graph
        if self.why_nothing:
            return
        self.why_nothing = "no convolution of the network can be cut along space"
        if graph.patterns:
            self.why_nothing = "neither nodes nor features of the graph can be cut"
        splits = (*spatial_splits(graph), *row_splits(graph), *feature_splits(graph))
        ways: list[tuple[UnitSplit, SparsePattern | None]] = [(each, None) for each in splits]
        ways += [(split, split.entries) for split in splits if split.entries is not None]
        for split, entries in ways:
            for teams in self.teams_within(split.units):
                units = self._proportional(split.units, teams, entries)
                for sync in (Sync.RING, Sync.HIERARCHICAL):
                    yield UnitPoint(split=split, teams=teams, units=units, sync=sync)

    def in_words(self, point: UnitPoint) -> str:
        """See ``PointSearch``."""
        return f"dimension {point.split.dim} of the activations, rows {_shares(point)}"

    def teams(self) -> Iterator[Teams]:
        """One team of all devices, one of the fastest kinds alone, and one on each host."""
        yield from self.fast_teams()
        if 1 < len(self.hosts) <= self.graph.batch_size:
            yield self.hosts

    def _proportional(
        self, units: int, teams: Teams, entries: SparsePattern | None
    ) -> tuple[tuple[int, ...], ...]:
        """Rows, or entries of a sparse matrix if given, by speed."""
        speeds = [[self.speeds[device] for device in team] for team in teams]
        if entries is not None:
            return tuple(entry_shares(entries, each, units) for each in speeds)
        return tuple(_with_one_each(split_in_proportion(units, each)) for each in speeds)


def _with_one_each(units: tuple[int, ...]) -> tuple[int, ...]:
    """Units with at least one for every device: a device without rows would do nothing."""
    found = list(units)
    for place, count in enumerate(found):
        if count == 0:
            found[found.index(max(found))] -= 1
            found[place] = 1
    return tuple(found)


def _shares(point: UnitPoint) -> str:
    return " and ".join(":".join(map(str, units)) for units in point.units)


def _why_uncut(graph: OpGraph) -> str:
    known = lengths(graph)
    if not known:
        return "nothing in the batch is a sequence: [batch, positions] of whole numbers"
    return f"sequences of {', '.join(map(str, known))} positions cannot be cut into equal units"


class _SequenceSearch(UnitSearch):
    least_units = 1

    def points(self) -> Iterator[UnitPoint]:
        """All teams with balanced runs."""
        if self.why_nothing:
            return
        most = max(MOST_UNITS, UNITS_PER_DEVICE * self.cluster.num_devices)
        split = finest_split(self.graph, most)
        if split is None:
            self.why_nothing = _why_uncut(self.graph)
            return
        self.why_nothing = "no team has enough units of positions for its devices"
        costs = _costs(self.problem, split)
        for teams in dict.fromkeys(self.teams_within(split.units)):
            units = tuple(balanced_runs([costs[d] for d in team], split.units) for team in teams)
            for sync in _SYNCS:
                yield UnitPoint(split=split, teams=teams, units=units, sync=sync)

    def in_words(self, point: UnitPoint) -> str:
        """See ``PointSearch``."""
        again = f", {point.keeps.words} recomputed" if point.recompute else ""
        return f"positions {_shares(point)} of each sequence{again}, {point.sync.name.lower()}"

    def teams(self) -> Iterator[Teams]:
        """One team of all devices, or of the fastest kinds alone, or teams of some hosts each."""
        yield from self.fast_teams()
        yield from ((host,) for host in self.hosts if len(host) > 1)
        count = 2
        while count <= min(self.graph.batch_size, len(self.hosts)):
            ends = accumulate(split_evenly(len(self.hosts), count), initial=0)
            yield tuple(
                tuple(device for host in self.hosts[begin:end] for device in host)
                for begin, end in pairwise(ends)
            )
            count *= 2


def _costs(problem: Problem, split: UnitSplit) -> list[RunCost]:
    """Cost of runs of positions of the whole batch on each device."""
    evaluator, units = problem.evaluator, split.units
    graph, plan = evaluator.graph, axis_plan(evaluator.graph, split.op_rules)
    computing = [index for index, op in enumerate(graph.ops) if op.phase != Phase.UPDATE]

    def seconds(kind: DeviceType, begin: int, end: int) -> float:
        work = plan.work(end - begin, graph.batch_size, graph.batch_size, begin)
        row = evaluator.cost_model.work_seconds(graph, kind, *work)
        return float(row[computing].sum())

    half = units // 2
    by_type = [
        run_cost(
            2 * half,
            seconds(kind, 0, half),
            seconds(kind, half, 2 * half),
            seconds(kind, 0, 2 * half),
        )
        for kind in evaluator.cluster.device_types
    ]
    return [by_type[index] for index in evaluator.cluster.type_index]


class Spatial(Searching):
    """Cuts samples along space; see the module docstring."""

    name = "spatial"
    stage = "baseline"
    search = _SpatialSearch

    @staticmethod
    def joins_auto(graph: OpGraph, cluster: Cluster) -> bool:
        """Whether the model has convolutions or a sparse graph, and its samples need a cut."""
        has_convolution = any(op.kind.startswith("convolution") for op in graph.ops)
        return (has_convolution or bool(graph.patterns)) and not why_needless(graph, cluster)


class Sequences(Searching):
    """Cuts sequences along their positions; see the module docstring."""

    name = "sequences"
    stage = "baseline"
    most_part = 0.05
    search = _SequenceSearch

    @staticmethod
    def joins_auto(graph: OpGraph, cluster: Cluster) -> bool:
        """Whether there are long sequences that have to be cut."""
        is_long = max(lengths(graph), default=0) >= LEAST_LENGTH
        return is_long and not why_needless(graph, cluster)
