"""Rows or positions of samples for each device of a team: a few ways at first, then moves.

The common part of ``spatial`` and ``sequences``, which know how samples can be cut: which device
gets how many units, and whether moving a unit between devices makes a step shorter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from heterog.graph.op_rule import OpRules
from heterog.methods.data_parallel import device_speeds, uniform_strategy
from heterog.methods.planner import Problem, Spending
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.tried import Tried
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Keeps, Strategy, Sync

MOST_MOVES = 48
"""Most moves of units that are tried for a point: a few times the pairs of a host's devices."""

Teams = tuple[tuple[int, ...], ...]


class Cut(Protocol):
    """A way to cut samples."""

    @property
    def op_rules(self) -> OpRules:
        """Rules of all ops."""
        ...

    @property
    def units(self) -> int:
        """Number of units that a sample is cut into."""
        ...


AnyCut = TypeVar("AnyCut", bound=Cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPoint(Generic[AnyCut]):
    """A way to cut samples, and the units of each device.

    Attributes:
        split: The way and its units.
        teams: Teams of devices, each with some samples.
        units: Number of units of each device, in the order of the teams.
        sync: Synchronisation of the gradients.
        recompute: Whether activations are computed again in the backward pass.
        keeps: Which of them are kept nevertheless.
    """

    split: AnyCut
    teams: Teams
    units: tuple[tuple[int, ...], ...]
    sync: Sync
    recompute: bool = False
    keeps: Keeps = Keeps.NOTHING


class UnitSearch(Generic[AnyCut]):
    """Points of a problem, with their evaluations and strategies.

    Args:
        problem: Problem to find a strategy for.
        spending: Spending that ends the search.
        least_units: Least units that a device may be left with.
    """

    def __init__(self, problem: Problem, spending: Spending, *, least_units: int) -> None:
        self.problem = problem
        self.spending = spending
        self.graph = problem.evaluator.graph
        self.cluster = problem.evaluator.cluster
        self.speeds = device_speeds(problem.evaluator)
        self.found = Tried[UnitPoint[AnyCut]](problem.evaluator, self._strategy)
        self._least_units = least_units

    def try_until_it_fits(self, point: UnitPoint[AnyCut]) -> None:
        """Simulate a point, and if it does not fit, with recomputation.

        Two-level sums are left out if there is one host.
        """
        hosts = {self.cluster.host_of[device] for team in point.teams for device in team}
        if point.sync == Sync.HIERARCHICAL and len(hosts) == 1:
            return
        found = self.found.evaluate(point)
        if found is None or found.is_ok:
            return
        for keeps in reversed(kinds_worth_trying(self.graph)):
            found = self.found.evaluate(replace(point, recompute=True, keeps=keeps))
            if found is None or not found.is_ok:
                return

    def refine(self, start: UnitPoint[AnyCut]) -> None:
        """Move a unit from one device of a team to another while that helps."""
        point, best, tried = start, self.found[start], 0
        while tried < MOST_MOVES and not self.spending.is_over:
            better = None
            for moved in self._moves(point):
                if tried >= MOST_MOVES or self.spending.is_over:
                    break
                tried += 1
                found = self.found.evaluate(moved)
                if found is not None and found.preference < best.preference:
                    better, best = moved, found
            if better is None:
                return
            point = better

    def _strategy(self, point: UnitPoint[AnyCut]) -> Strategy:
        return replace(
            uniform_strategy(
                self.problem.evaluator,
                self._decision(point),
                bucket_bytes=DEFAULT_BUCKET_BYTES,
                step_barrier=self.problem.step_barrier,
            ),
            op_rules=point.split.op_rules,
        )

    def _decision(self, point: UnitPoint[AnyCut]) -> Decision:
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

    def _moves(self, point: UnitPoint[AnyCut]) -> Iterator[UnitPoint[AnyCut]]:
        """Moves of a unit from one device to another, from those with the most units first."""
        for number, units in enumerate(point.units):
            by_units = sorted(range(len(units)), key=lambda place: -units[place])
            for giver in by_units:
                for taker in reversed(by_units):
                    if giver == taker or units[giver] <= self._least_units:
                        continue
                    moved = list(units)
                    moved[giver] -= 1
                    moved[taker] += 1
                    changed = (*point.units[:number], tuple(moved), *point.units[number + 1 :])
                    yield replace(point, units=changed)
