"""Pace of a pipeline whose stages do not wait, predicted from one step on its own.

A batch is m micro-batches. Stage s takes F_s for the forward pass of a micro-batch and B_s for the
backward pass, which includes one m-th of the end of a batch: sums of gradients and updates. It
alternates: the backward pass of micro-batch n - 1 - D_s, then the forward pass of n (``value``).
With c_s the seconds of messages from stage s to the next and back together, and K micro-batches
that each boundary adds, a step takes

    T = m max over i <= j of (F_i + B_i + ... + F_j + B_j + c_i + ... + c_{j-1}) / (1 + K (j - i))

because the stages i to j wait for each other in a circle: a micro-batch goes forth from i to j and
back to i, and then the forward pass of the (1 + K (j - i))-th micro-batch after it begins. For
i = j it is the slowest stage; if messages take no time and K >= 1, no other circle is slower. For
K = 0 and the whole pipeline it is one micro-batch after the other. A step takes at least the time
that all its messages hold any link.

A message leaves when its receive has begun and the message before it has arrived. So a step takes
at least m messages in a row, of the forward or of the backward pass. The receive of inputs begins
one micro-batch ahead (``ranks``). Only the receive for a batch's first micro-batch begins when the
stage has ended the forward pass before it, because nobody has called with this batch yet. So with
c_ij of forward messages alone a step takes at least m c_ij + F_j. Receives of gradients begin
early enough to add nothing.

For m = 1 that is exact. For more, the end of a batch comes at once and not in m parts, and inputs
are late once in a batch. Then the ends of passes over some tens of batches give a step's seconds:
with U_s the end of a batch on stage s, not in B here, messages c_ij and c'_ij of the two passes
and b(k) of k = n - 1 - D_s,

    b_s(k) = max(f_s(n - 1), max over j > s of g_js(k)) + B_s
    g_js(k) = max(b_j(k), g_js(k - 1)) + c'_js
    f_s(n) = max(b_s(k) + (U_s if k ends a batch), max over i < s of a_is(n)) + F_s
    a_is(n) = max(f_i(n), a_is(n - 1), f_s(n - 1 if n begins a batch, else n - 2)) + c_is

F_s, B_s and c_s are means, if micro-batches are unequal. ``EncodedStash.kept_bytes`` has the
memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from heterog.lowering.choice import BoolArray, Choice
from heterog.lowering.program import FIRST_LINK_KIND, FloatArray, IntArray
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import NUM_READS, NUM_TASKS, Tape
from heterog.modes.stash.value import (
    OF_BATCH,
    EncodedStash,
    WeightStash,
    is_of_backward,
    is_written_last,
    micro_batch_of,
    source_stages,
)
from heterog.pricing.cost_model import Prices
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.runs import Lowered

Pair = tuple[int, int]
"""(sending stage, receiving stage)."""
_NUM_BATCHES = 48
"""Batches after the first gradient; the later half measures a step's seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePace:
    """Seconds of each stage's passes of a micro-batch, and of messages between stages.

    Attributes:
        forward_s: Seconds F of the forward pass of each stage.
        backward_s: Seconds B of the backward pass of each stage, with its part of the updates.
        forward_lag_s: Seconds from the end of a stage's forward pass until another stage has all
            messages from it; negative if these arrive before the end.
        backward_lag_s: The same for the backward pass.
        num_micro: Number m of micro-batches of a step.
        end_s: Seconds U of the end of a batch on each stage; ``backward_s`` includes one m-th of
            them; empty for none.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_lag_s: Mapping[Pair, float]
    backward_lag_s: Mapping[Pair, float]
    num_micro: int = 1
    end_s: tuple[float, ...] = ()

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
        last = self.num_stages - 1
        mirrored = {(last - a, last - b): lag for (a, b), lag in self.backward_lag_s.items()}
        back = _longest(self.backward_s[::-1], mirrored)
        # Entry [i, j] becomes back[last - j, last - i], the path from stage j to stage i.
        back = back[::-1, ::-1].T
        source, target = np.indices(there.shape)
        apart = 1 + stash.boundary_steps * np.maximum(target - source, 0)
        seconds = self.num_micro * float(((there + back) / apart).max())
        seconds = max(seconds, self._messages_s())
        return seconds if self.num_micro == 1 else max(seconds, self._by_passes(stash))

    def _messages_s(self) -> float:
        """Seconds of a batch's messages in a row, and the gap to the next batch's messages."""
        inputs = (
            self.num_micro * lag + self.forward_s[target]
            for (_, target), lag in self.forward_lag_s.items()
        )
        gradients = (self.num_micro * lag for lag in self._gradient_lags().values())
        return max((*inputs, *gradients), default=0.0)

    def _gradient_lags(self) -> dict[Pair, float]:
        """Lags of backward messages after the end of the pass, without the end of a batch."""
        end_s = self.end_s or (0.0,) * self.num_stages
        return {
            (source, target): lag + end_s[source] / self.num_micro
            for (source, target), lag in self.backward_lag_s.items()
        }

    def _by_passes(self, stash: WeightStash) -> float:
        """Steady seconds of a step, from the ends of passes over many batches."""
        stages, num_micro = range(self.num_stages), self.num_micro
        behind = [stash.behind(stage, self.num_stages) for stage in stages]
        at_end_s = self.end_s or (0.0,) * self.num_stages
        own_s = [s - end / num_micro for s, end in zip(self.backward_s, at_end_s, strict=True)]
        inputs = _Messages(self.forward_lag_s, self.num_stages)
        gradients = _Messages(self._gradient_lags(), self.num_stages)
        num_filling, num_measured = behind[0] + 1, _NUM_BATCHES // 2 * num_micro
        forward = [[0.0] * self.num_stages] * 2  # of the micro-batches before the first
        backward: list[list[float]] = []
        for number in range(num_filling + 2 * num_measured):
            before, free = forward[-2], list(forward[-1])
            announced = forward[-1] if number % num_micro == 0 else before
            backward.append([0.0] * self.num_stages)
            for stage in reversed(stages):
                oldest = number - 1 - behind[stage]
                if oldest < 0:
                    continue
                comes = gradients.arrival(stage, backward[oldest], 0.0)
                backward[oldest][stage] = max(free[stage], comes) + own_s[stage]
                is_last = oldest % num_micro == num_micro - 1
                free[stage] = backward[oldest][stage] + (at_end_s[stage] if is_last else 0.0)
            ended = [0.0] * self.num_stages
            for stage in stages:
                comes = inputs.arrival(stage, ended, announced[stage])
                ended[stage] = max(free[stage], comes) + self.forward_s[stage]
            forward.append(ended)
        took_s = forward[-1][0] - forward[-1 - num_measured][0]
        return took_s * num_micro / num_measured

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_s)


class _Messages:
    """When messages of one kind of pass arrive, micro-batch after micro-batch.

    Args:
        lag_s: Seconds from the end of a pass to the arrival of its message; see ``StagePace``.
        num_stages: Number of stages.
    """

    def __init__(self, lag_s: Mapping[Pair, float], num_stages: int) -> None:
        self._sources: list[list[tuple[int, float]]] = [[] for _ in range(num_stages)]
        for (source, target), seconds in lag_s.items():
            self._sources[target].append((source, seconds))
        self._last: dict[Pair, float] = {}

    def arrival(self, target: int, ended: Sequence[float], announced: float) -> float:
        """When a stage has all messages of the next micro-batch; 0 if it gets none.

        Args:
            target: The stage.
            ended: When the pass of this micro-batch has ended on each earlier stage.
            announced: When the stage has begun to receive this micro-batch.
        """
        latest = 0.0
        for source, lag in self._sources[target]:
            free = max(announced, self._last.get((source, target), 0.0))
            found = max(ended[source] + lag, free + max(lag, 0.0))
            self._last[source, target] = found
            latest = max(latest, found)
        return latest


def _longest(own_s: Sequence[float], lag_s: Mapping[Pair, float]) -> FloatArray:
    """Seconds of the longest path between stages, including both; -inf without a path."""
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


def held_s(tape: Tape, prices: Prices) -> float:
    """Seconds that all messages of a step occupy the busiest link.

    Args:
        tape: Tape of the step.
        prices: Prices of its channels.
    """
    tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
    tasks = tasks[tasks["channel"] >= 0]
    channels = prices.channels
    start = channels.resource_start
    sent = np.bincount(tasks["channel"], tasks["num_bytes"], len(start) - 1)
    channel = np.repeat(np.arange(len(sent)), np.diff(start))
    held_s = sent[channel] * channels.resource_s_per_byte
    return float(np.bincount(channels.resource, held_s, prices.num_resources).max(initial=0.0))


class StagedStep:
    """The tasks of one step on its own, by micro-batch, pass and stage.

    Micro-batches come one after another (``WeightStash.schedule``).

    Args:
        tape: Tape of the step.
        tables: The graph's tables.
        stage: Stage of each device, -1 for none.  # [num_devices]
        num_micro: Number of micro-batches.
    """

    def __init__(self, tape: Tape, tables: GraphTables, stage: IntArray, num_micro: int) -> None:
        tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
        self._shape = num_micro, 2, int(stage.max()) + 1  # micro-batches, passes, stages
        self._stage_of_device = stage
        self._device: IntArray = tasks["device"]
        is_late = is_of_backward(tasks["kind"], tasks["subject"], tables)
        ends = np.append(tasks["read_start"], tape.counts[NUM_READS])
        reads = tape.reads[: tape.counts[NUM_READS]]
        micro = micro_batch_of(tasks["micro"], np.diff(ends), reads, tape.buffers["maker"])
        self._pass: IntArray = 2 * micro + is_late
        self._is_link = tasks["kind"] >= FIRST_LINK_KIND
        # A collective has no device; it runs where its inputs are.
        source = source_stages(tape, stage)
        self._ends_batch = np.isin(tasks["kind"], OF_BATCH)
        self._is_awaited = ~is_written_last(tasks["kind"], tasks["subject"], tables)
        self._stage = np.where(self._device >= 0, stage[self._device], source)
        self._source = np.where(self._is_link, source, self._stage)

    def pace(self, seconds: FloatArray, finish: FloatArray) -> StagePace:
        """Pace of the stages, from the times of the step on its own.

        Args:
            seconds: Seconds that each task takes.  # [num_tasks]
            finish: Time at which each task ends.  # [num_tasks]
        """
        crosses = self._is_link & (self._source != self._stage)
        is_own = ~crosses & self._is_awaited
        arrived, done = self._latest(finish, crosses), self._latest(finish, is_own)
        passed = self._latest(finish, is_own & ~self._ends_batch)
        busy = self._busy(seconds)
        num_micro, num_passes, num_stages = self._shape
        ends, own = np.zeros_like(done), np.zeros_like(done)
        before, end = np.zeros(num_stages), np.zeros(num_stages)
        for number in range(num_micro * num_passes):  # one after another, on each stage
            begin = np.maximum(arrived[number], before)
            ends[number] = before = np.maximum(done[number], begin)
            own[number] = np.maximum(before - begin, busy[number])
            end = own[number] - np.maximum(passed[number] - begin, 0.0)
        forward_s, backward_s = own.reshape(self._shape).mean(axis=0).tolist()
        forward_lag_s, backward_lag_s = self._lags(crosses, finish, ends)
        return StagePace(
            forward_s=tuple(forward_s),
            backward_s=tuple(backward_s),
            forward_lag_s=forward_lag_s,
            backward_lag_s=backward_lag_s,
            num_micro=num_micro,
            end_s=tuple(end.tolist()),  # of the last pass: the last micro-batch's backward pass
        )

    def _latest(self, finish: FloatArray, chosen: BoolArray) -> FloatArray:
        """When the last of the chosen tasks of each pass ends on each stage, 0 for none.

        Returns:
            # [num_micro * 2, num_stages]
        """
        num_micro, num_passes, num_stages = self._shape
        found = np.zeros((num_micro * num_passes, num_stages))
        chosen = chosen & (self._stage >= 0)
        np.maximum.at(found, (self._pass[chosen], self._stage[chosen]), finish[chosen])
        return found

    def _busy(self, seconds: FloatArray) -> FloatArray:
        """Seconds that each pass takes on the busiest device of each stage.

        Returns:
            # [num_micro * 2, num_stages]
        """
        num_micro, num_passes, num_stages = self._shape
        stage_of, passes = self._stage_of_device, num_micro * num_passes
        computes = ~self._is_link
        key = self._pass[computes] * len(stage_of) + self._device[computes]
        of_device = np.bincount(key, seconds[computes], passes * len(stage_of))
        takes_part = stage_of >= 0
        found = np.zeros((num_stages, passes))
        np.maximum.at(found, stage_of[takes_part], of_device.reshape(passes, -1).T[takes_part])
        return found.T

    def _lags(
        self, crosses: BoolArray, finish: FloatArray, ends: FloatArray
    ) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """Lags of messages of the forward and the backward pass, as means over micro-batches."""
        arrived: dict[tuple[int, Pair], float] = {}
        for task in np.flatnonzero(crosses).tolist():
            key = int(self._pass[task]), (int(self._source[task]), int(self._stage[task]))
            arrived[key] = max(arrived.get(key, 0.0), float(finish[task]))
        lags: tuple[dict[Pair, list[float]], dict[Pair, list[float]]] = {}, {}
        for (number, pair), at in arrived.items():
            lags[number % 2].setdefault(pair, []).append(at - float(ends[number, pair[0]]))
        forward_s, backward_s = (
            {pair: sum(each) / len(each) for pair, each in by_pair.items()} for by_pair in lags
        )
        return forward_s, backward_s


def more_seconds(stash: WeightStash, evaluator: Evaluator, choice: Choice) -> float:
    """Seconds of a step beyond a step on its own; mostly below 0, because steps overlap."""
    if evaluator.tasks_of(choice) > evaluator.most_tasks:  # it will not be simulated
        return 0.0
    pace, local_s, lowered = stage_pace(evaluator, choice)
    return max(pace.step_s(stash), held_s(lowered.tape, lowered.prices)) - local_s


def stage_pace(evaluator: Evaluator, choice: Choice) -> tuple[StagePace, float, Lowered]:
    """(pace of the stages, seconds of a step on its own by the referee, its lowering).

    Not counted as an evaluation, because it is part of the strategy's evaluation.
    """
    lowered, _, timings = evaluator.alone(choice)
    local_s, replayed = evaluator.replayed(lowered)
    assert replayed is not None
    number = int(lowered.tape.counts[NUM_TASKS])
    stage = next(mode for mode in choice.modes if isinstance(mode, EncodedStash)).stage
    staged = StagedStep(lowered.tape, evaluator.tables_of(choice), stage, choice.num_micro)
    return staged.pace(timings.seconds[:number], replayed.finish[:number]), local_s, lowered
