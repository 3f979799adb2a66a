"""Pace and memory of a pipeline whose stages do not wait: closed forms from one step on its own.

Stage s takes F_s for the forward pass of a batch and B_s for the backward pass of one, with its
updates; between them the weights change, so it does one after the other. In its call n it runs
the backward pass of batch n - 1 - d_s, then the forward pass of batch n (``strategy.stash``). With
c_s the seconds that messages take from stage s to the next and back together, and K steps that
each boundary adds, a step takes

    T = max over i <= j of (F_i + B_i + ... + F_j + B_j + c_i + ... + c_{j-1}) / (1 + K (j - i))

because the stages i to j wait for each other in a circle: forth from i to j with one batch, back
to i, and there the forward pass of the (1 + K (j - i))-th batch after it begins. For i = j it is
the slowest stage; if messages take no time, no other circle is slower, for K of at least 1. For
K = 0 and the whole pipeline it is one batch after the other. No step takes less than what all its
messages hold any link.

On each device stay d_s more versions of its weights, what d_s more batches have left for their
backward passes, and messages that come before they are needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from heterog.simulator.cost_model import Prices
from heterog.strategy.lowering import source_stages
from heterog.strategy.lowering.tape import NUM_TASKS, Tape
from heterog.strategy.program import FIRST_LINK_KIND, FloatArray, IntArray
from heterog.strategy.stash import WeightStash
from heterog.strategy.stash_phases import BoolArray, is_of_backward
from heterog.strategy.tables import GraphTables

Pair = tuple[int, int]
"""A stage that sends, and one that receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePace:
    """Seconds of each stage's passes, and of messages between stages.

    Attributes:
        forward_s: Seconds F of the forward pass of each stage.
        backward_s: Seconds B of the backward pass of each stage, with its updates.
        forward_lag_s: Seconds from the end of a stage's forward pass until another stage has all
            that it gets of it; negative where that is earlier.
        backward_lag_s: The same for the backward pass.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_lag_s: Mapping[Pair, float]
    backward_lag_s: Mapping[Pair, float]

    def step_s(self, stash: WeightStash) -> float:
        """Seconds of a step, once the pipeline is full.

        >>> pace = StagePace(
        ...     forward_s=(1.0, 1.0),
        ...     backward_s=(2.0, 2.0),
        ...     forward_lag_s={(0, 1): 0.5},
        ...     backward_lag_s={(1, 0): 0.5},
        ... )
        >>> [pace.step_s(WeightStash(boundary_steps=steps)) for steps in range(3)]
        [7.0, 3.5, 3.0]
        """
        there = _longest(self.forward_s, self.forward_lag_s)
        back = _longest(self.backward_s[::-1], _mirrored(self.backward_lag_s, self.num_stages))
        # back[last - j, last - i] leads from stage j to stage i
        circle = there + back[::-1, ::-1].T
        first, last = np.indices(circle.shape)
        return float((circle / (1 + stash.boundary_steps * np.maximum(last - first, 0))).max())

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_s)


def _longest(own_s: Sequence[float], lag_s: Mapping[Pair, float]) -> FloatArray:
    """Seconds of the longest path between stages, ends included; -inf where there is none."""
    count = len(own_s)
    found = np.full((count, count), -np.inf)
    for first in range(count):
        found[first, first] = own_s[first]
        for last in range(first + 1, count):
            ways = (
                found[first, middle] + lag_s[middle, last] + own_s[last]
                for middle in range(first, last)
                if (middle, last) in lag_s
            )
            found[first, last] = max(ways, default=-np.inf)
    return found


def _mirrored(lag_s: Mapping[Pair, float], count: int) -> dict[Pair, float]:
    return {(count - 1 - a, count - 1 - b): seconds for (a, b), seconds in lag_s.items()}


def held_s(tape: Tape, prices: Prices) -> float:
    """Seconds for which all messages of a step hold the link that is held longest.

    Args:
        tape: Tape of the step.
        prices: Prices of its channels.
    """
    tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
    tasks = tasks[tasks["channel"] >= 0]
    start = prices.resource_start
    sent = np.bincount(tasks["channel"], tasks["num_bytes"], len(start) - 1)
    channel = np.repeat(np.arange(len(sent)), np.diff(start))
    held = np.bincount(
        prices.resource, sent[channel] * prices.resource_s_per_byte, prices.num_resources
    )
    return float(held.max(initial=0.0))


class StagedStep:
    """The tasks of one step on its own, by the stage that runs them.

    Args:
        tape: Tape of the step.
        tables: The graph's tables.
        stage: Stage of each device, -1 for none.  # [num_devices]
    """

    def __init__(self, tape: Tape, tables: GraphTables, stage: IntArray) -> None:
        tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
        self._num_stages = int(stage.max()) + 1
        self._device: IntArray = tasks["device"]
        self._is_late: BoolArray = is_of_backward(tasks["kind"], tasks["subject"], tables)
        self._is_link = tasks["kind"] >= FIRST_LINK_KIND
        # A collective, which has no device, runs where what it reads is.
        source = source_stages(tape, stage)
        self._stage = np.where(self._device >= 0, stage[self._device], source)
        self._source = np.where(self._is_link, source, self._stage)

    def pace(self, seconds: FloatArray, finish: FloatArray) -> StagePace:
        """Pace of the stages, by the times of the step on its own.

        Args:
            seconds: Seconds that each task takes.  # [num_tasks]
            finish: Time at which each task ends.  # [num_tasks]
        """
        crosses = self._is_link & (self._source != self._stage)
        ends: dict[bool, list[float]] = {}
        own: dict[bool, list[float]] = {}
        for is_late in (False, True):
            ends[is_late], own[is_late] = [], []
            for stage in range(self._num_stages):
                of_pass = (self._stage == stage) & (self._is_late == is_late)
                mine = of_pass & ~crosses
                arrived = float(finish[of_pass & crosses].max(initial=0.0))
                if is_late:  # the last stage has its forward pass before it
                    arrived = arrived or ends[False][stage]
                end = float(finish[mine].max(initial=arrived))
                computes = mine & ~self._is_link
                busy = np.bincount(self._device[computes], seconds[computes]).max(initial=0.0)
                ends[is_late].append(end)
                own[is_late].append(max(end - arrived, float(busy)))
        lags = {is_late: self._lags(crosses, is_late, ends[is_late], finish) for is_late in ends}
        return StagePace(
            forward_s=tuple(own[False]),
            backward_s=tuple(own[True]),
            forward_lag_s=lags[False],
            backward_lag_s=lags[True],
        )

    def _lags(
        self, crosses: BoolArray, is_late: bool, ends: Sequence[float], finish: FloatArray
    ) -> dict[Pair, float]:
        arrived: dict[Pair, float] = {}
        for task in np.flatnonzero(crosses & (self._is_late == is_late)).tolist():
            pair = int(self._source[task]), int(self._stage[task])
            arrived[pair] = max(arrived.get(pair, 0.0), float(finish[task]))
        return {(src, dst): seconds - ends[src] for (src, dst), seconds in arrived.items()}
