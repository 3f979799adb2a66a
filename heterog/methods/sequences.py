"""Sequences cut among unequal devices: for long sequences, of which there are few in a batch.

Data parallelism ends where there is one sequence for each device, and one long sequence can fill a
device. Here the devices of a team own runs of positions (``heterog.strategy.sequence_split``), the
form of context parallelism in which keys and values are gathered (Grattafiori et al. 2024, arXiv
2407.21783, section 3.3.2).

Unlike there, where equal devices have an early and a late run each, a device has one run, as long
as makes all devices take the same time: by their speeds, and by causal attention, whose later
positions see more keys. Then units of positions are moved from one device to another as long as
the simulated step gets shorter.
"""

from collections.abc import Iterator
from itertools import pairwise

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import axis_plan
from heterog.graph.op_graph import OpGraph, Phase
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem, Spending
from heterog.methods.spatial import why_needless
from heterog.methods.unit_search import Teams, UnitPoint, UnitSearch
from heterog.simulator.engine import Order
from heterog.strategy.balanced_runs import RunCost, balanced_runs, run_cost
from heterog.strategy.division import split_in_proportion
from heterog.strategy.sequence_split import (
    MOST_UNITS,
    SequenceSplit,
    lengths,
    sequence_split,
    unit_counts,
)
from heterog.strategy.strategy import Sync

NUM_RETURNED = 3
"""Number of strategies handed to the referee."""
NUM_REFINED = 2
"""Number of the best points whose units are moved."""
UNITS_PER_DEVICE = 4
"""Least units for each device, if the length allows: shares are then off by at most an eighth."""
LEAST_LENGTH = 512
"""Positions from which on ``auto`` uses it: shorter sequences do not fill a device."""
_SYNCS = (Sync.RING, Sync.HIERARCHICAL, Sync.ZERO1, Sync.ZERO3)

_Point = UnitPoint[SequenceSplit]


class Sequences(Planner):
    """Cuts sequences along their positions; see the module docstring."""

    name = "sequences"
    stage = "baseline"

    @staticmethod
    def joins_auto(graph: OpGraph, cluster: Cluster) -> bool:
        """Whether there are long sequences that have to be cut."""
        is_long = max(lengths(graph), default=0) >= LEAST_LENGTH
        return is_long and not why_needless(graph, cluster)

    def plan(self, problem: Problem) -> PlanResult:
        """Try every kind of teams, then move units between the devices of the best."""
        spending = problem.spend()
        graph, cluster = problem.evaluator.graph, problem.evaluator.cluster
        reason = why_needless(graph, cluster)
        split = None if reason else _split(graph, cluster)
        if split is None:
            reason = reason or _why_uncut(graph)
            return PlanResult(candidates=(), num_evaluations=0, reason=reason)
        search = _Search(problem, spending, split)
        with spending.limits():
            search.run()
        best = search.found.best(NUM_RETURNED)
        return PlanResult(
            candidates=tuple(
                Candidate(strategy=search.found.strategies[point], orders=tuple(Order))
                for point in best
            ),
            num_evaluations=spending.evaluations,
            reason="" if best else "no team has enough units of positions for its devices",
            note=_in_words(best[0]) if best else "",
        )


def _split(graph: OpGraph, cluster: Cluster) -> SequenceSplit | None:
    """The cut with the most units that are worth distinguishing."""
    most = max(MOST_UNITS, UNITS_PER_DEVICE * cluster.num_devices)
    for units in unit_counts(graph, most):
        found = sequence_split(graph, units)
        if found is not None:
            return found
    return None


def _why_uncut(graph: OpGraph) -> str:
    known = lengths(graph)
    if not known:
        return "nothing in the batch is a sequence: [batch, positions] of whole numbers"
    return f"sequences of {', '.join(map(str, known))} positions cannot be cut into equal units"


class _Search(UnitSearch[SequenceSplit]):
    def __init__(self, problem: Problem, spending: Spending, split: SequenceSplit) -> None:
        super().__init__(problem, spending, least_units=1)
        self.split = split
        self.costs = _costs(problem, split)

    def run(self) -> None:
        """Try all teams with balanced runs first, then move units of the best."""
        for teams in dict.fromkeys(self._teams()):
            units = self._balanced(teams)
            if units is None:
                continue
            for sync in _SYNCS:
                point = UnitPoint(split=self.split, teams=teams, units=units, sync=sync)
                self.try_until_it_fits(point)
                if self.found and self.spending.is_over:
                    return
        for point in self.found.best(NUM_REFINED):
            self.refine(point)

    def _teams(self) -> Iterator[Teams]:
        """One team of all devices, or of the fastest kinds alone, or teams of some hosts each."""
        for least in sorted({round(speed, 9) for speed in self.speeds}):
            fast = [d for d, speed in enumerate(self.speeds) if round(speed, 9) >= least]
            if len(fast) > 1:
                yield (tuple(fast),)
        hosts = [tuple(self.cluster.host_devices(h)) for h in range(self.cluster.num_hosts)]
        yield from ((host,) for host in hosts if len(host) > 1)
        count = 2
        while count <= min(self.graph.batch_size, len(hosts)):
            sizes = split_in_proportion(len(hosts), [1.0] * count)
            ends = [sum(sizes[:place]) for place in range(count + 1)]
            yield tuple(
                tuple(device for host in hosts[begin:end] for device in host)
                for begin, end in pairwise(ends)
            )
            count *= 2

    def _balanced(self, teams: Teams) -> tuple[tuple[int, ...], ...] | None:
        """Units that take equal times; ``None`` if a team has more devices than units."""
        if any(len(team) > self.split.units for team in teams):
            return None
        return tuple(
            balanced_runs([self.costs[d] for d in team], self.split.units) for team in teams
        )


def _costs(problem: Problem, split: SequenceSplit) -> list[RunCost]:
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


def _in_words(point: _Point) -> str:
    shares = " and ".join(":".join(map(str, units)) for units in point.units)
    again = f", {point.keeps.words} recomputed" if point.recompute else ""
    return f"positions {shares} of each sequence{again}, {point.sync.name.lower()}"
