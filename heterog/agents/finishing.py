"""Finishes rows by what they cannot express: teams in hosts, caps, split backward passes, a V.

A policy decides which devices train which blocks. A pipelined row is a sequence of *stages*, runs
of blocks on the same devices. A finish adds to this without the policy. Devices of a host that
share a stage may form teams, whose micro-batches may be as small as one sample. Stages may have
caps that hide messages, or delay weight gradients until they would wait. Each device may have two
stages, if the model goes through the row's stages forth and back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from heterog.errors import StrategyError
from heterog.lowering.program import IntArray
from heterog.memo import kept
from heterog.methods.teams import apart, host_teams, in_teams, rules_of_model, team_sizes
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import StepSettings, StrategySpace
from heterog.strategy.layouts.stages import (
    Caps,
    capped,
    layers_of,
    stage_of_group,
    stages_by_counts,
)
from heterog.strategy.schedules import PipelineSchedule, stated_turns


class Scheduled(StrEnum):
    """Order in which a row's devices take up micro-batches."""

    AS_IT_COMES = ""
    SPLIT = "split"
    """Weight gradients are delayed until a device would wait."""
    CAPPED = "capped"
    """With the caps of 1F1B."""
    HIDDEN = "hidden"
    """With caps that hide messages."""
    HIDDEN_SPLIT = "hidden_split"
    IN_A_V = "in_a_v"
    """Two stages on every device, forth and back, in the turns of ``zero_bubble_v``."""


SCHEDULES_TRIED = tuple(each for each in Scheduled if each)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
_SPLITS = frozenset({Scheduled.SPLIT, Scheduled.HIDDEN_SPLIT})
_CAPS = {
    Scheduled.CAPPED: Caps.ONE_F_ONE_B,
    Scheduled.HIDDEN: Caps.HIDING,
    Scheduled.HIDDEN_SPLIT: Caps.HIDING,
}


@dataclass(frozen=True, slots=True, order=True)
class Finish:
    """Teams and schedule of a whole row.

    Attributes:
        team_size: Most devices of a team; teams lie inside hosts.
        schedule: Order in which devices take up micro-batches.
    """

    team_size: int = 1
    schedule: Scheduled = Scheduled.AS_IT_COMES


PLAIN = Finish()


Finished = tuple[IntArray, StepSettings]
"""A row with its finish: number of every group's decision in the space, and settings."""


class Finisher:
    """Makes strategies of rows and their finishes.

    Args:
        evaluator: Evaluator at the op level.
        space: Space of the rows' decisions; those in teams are added.
    """

    def __init__(self, evaluator: Evaluator, space: StrategySpace) -> None:
        self._evaluator, self._space = evaluator, space
        self._speeds = evaluator.speeds

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes of teams worth trying, the largest first; none if teams have little to divide.

        Teams divide matrix products, so their FLOPs are checked first: finding that team rules do
        not suit NASNet's convolutions takes 14 seconds.
        """
        graph = self._evaluator.graph
        is_product = np.array([op.kind.startswith(_PRODUCTS) for op in graph.ops])
        if graph.flops[is_product].sum() < 0.5 * graph.flops.sum():
            return []
        return team_sizes(self._evaluator.cluster, rules_of_model(graph))

    def finished(self, row: IntArray, finish: Finish, num_micro: int) -> Finished | None:
        """The row with its finish; ``None`` if the row has no such schedule.

        Args:
            row: Number of every group's decision in the space.  # [num_groups]
            finish: Teams and schedule.
            num_micro: Number of micro-batches.
        """
        settings = StepSettings(micro_batches=self._space.micro_batches(num_micro))
        if finish == PLAIN:
            return row, settings
        stages = self._stages(row)
        if finish.schedule:
            if len({device for devices, _, _ in stages for device in devices}) < sum(
                len(devices) for devices, _, _ in stages
            ):
                return None  # a device has several stages already
            if finish.schedule == Scheduled.IN_A_V:
                folded = self._in_a_v(row, stages, num_micro)
                if folded is None:
                    return None
                row, schedule = folded
            else:
                schedule = self._capped(stages, finish.schedule)
            settings = settings._replace(schedule=schedule)
        return self._with_teams(row, finish.team_size, settings)

    def _capped(
        self, stages: list[tuple[tuple[int, ...], int, int]], schedule: Scheduled
    ) -> PipelineSchedule:
        return capped(
            self._evaluator.graph,
            [devices for devices, _, _ in stages],
            stage_of_group([first for _, first, _ in stages[1:]], stages[-1][2]),
            _CAPS.get(schedule, Caps.NONE),
            self._evaluator.cluster.num_devices,
            splits_backward=schedule in _SPLITS,
        )

    def _in_a_v(
        self,
        row: IntArray,
        stages: list[tuple[tuple[int, ...], int, int]],
        num_micro: int,
    ) -> tuple[IntArray, PipelineSchedule] | None:
        """The first halves of the stages in their order, then the second halves in reverse."""
        counts = [last - first for _, first, last in stages]
        if len(stages) < 2 or min(counts) < 2:
            return None
        halves = [count // 2 for count in counts]
        halves += [count - count // 2 for count in reversed(counts)]
        starts = self._between_layers(np.cumsum(halves)[:-1])
        if (np.diff(starts, prepend=0, append=len(row)) < 1).any():
            return None
        halves = np.diff(starts, prepend=0, append=len(row)).tolist()
        numbers = [int(row[first]) for _, first, _ in stages]
        folded = np.repeat(np.array([*numbers, *reversed(numbers)], np.int32), halves)
        try:
            schedule = stated_turns(
                "zero_bubble_v",
                [devices for devices, _, _ in stages],
                2,
                num_micro,
                num_devices=self._evaluator.cluster.num_devices,
                chunk_starts=tuple(int(start) for start in starts),
            )
        except StrategyError:
            return None
        return folded, schedule

    def _between_layers(self, starts: IntArray) -> IntArray:
        """The nearest groups at which layers begin; with cuts elsewhere, turns may deadlock."""
        layers = layers_of(self._evaluator.graph)
        if len(layers.names) < 2:
            return starts
        of_group = np.array(stages_by_counts(layers, (1,) * len(layers.names)))
        places = np.flatnonzero(np.diff(of_group)) + 1
        nearest = np.abs(places[:, None] - starts[None]).argmin(axis=0)
        return np.asarray(places[nearest], np.int32)

    def _with_teams(self, row: IntArray, size: int, settings: StepSettings) -> Finished:
        rules = rules_of_model(self._evaluator.graph) if size > 1 else None
        if rules is None:
            return row, settings
        numbers, of_group = np.unique(row, return_inverse=True)
        in_teams = np.array([self._number(int(number), size) for number in numbers], np.int32)
        rule_set = self._evaluator.rules.number(rules.op_rules)
        return in_teams[of_group.reshape(-1)], settings._replace(rule_set=rule_set)

    @kept
    def _number(self, number: int, size: int) -> int:
        """Number of a decision in teams."""
        decision, cluster = self._space.candidates[number], self._evaluator.cluster
        teams = host_teams(cluster, decision.devices, size)
        return self._space.add(apart(in_teams(decision, teams, self._speeds, cluster)))

    def _stages(self, row: IntArray) -> list[tuple[tuple[int, ...], int, int]]:
        """(devices, first group, last group + 1) of each run of groups on the same devices."""
        of_group = [self._space.candidates[number].devices for number in row]
        cuts = [g for g in range(1, len(row)) if of_group[g] != of_group[g - 1]]
        return [(of_group[first], first, last) for first, last in pairwise((0, *cuts, len(row)))]


def moved_cuts(row: IntArray, member: npt.NDArray[np.bool_], step: int = 1) -> Iterator[IntArray]:
    """Rows with one stage a few groups longer, and its neighbour as much shorter.

    Args:
        row: Candidate of each group or block.  # [G]
        member: Whether a device takes part in each candidate.  # [C, D]
        step: Number of groups; a neighbour with no more groups disappears.
    """
    changes = np.flatnonzero((member[row[1:]] != member[row[:-1]]).any(axis=1)) + 1
    bounds = [0, *changes.tolist(), len(row)]
    for before, cut, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        for moved, taker in (
            (slice(cut, min(cut + step, after)), cut - 1),
            (slice(max(cut - step, before), cut), cut),
        ):
            other = row.copy()
            other[moved] = row[taker]
            yield other
