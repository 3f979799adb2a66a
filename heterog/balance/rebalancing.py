"""Decides when shares change during training, and to what, and changes them at a step's end.

The decision (``Rebalancer``) is a pure function of all ranks' measurements: every rank gets the
seconds of all ranks and comes to the same shares. Shares change only if the step is predicted to
be quicker by more than a dead band, which grows with the noise of the measurements. So neither
noise nor constant speeds move shares. A change that did not make steps quicker is taken back, and
the next must promise twice as much, because a line does not describe every rank.
"""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from heterog.balance.group import RankGroup
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import Deal, best_shares, step_s
from heterog.balance.speeds import SpeedEstimate, StepClock

DEAD_BAND = 0.03
"""Least predicted gain: more than the error from rounding shares of a few dozen samples."""
NOISE_BANDS = 3.0
"""A gain must exceed this many standard errors of the noisiest rank; with fewer, shares swing in
``tests/balance/test_rebalancing.py``."""

MOST_CAUTION = 16.0
"""Largest factor of the dead band, after four changes that did not pay."""
MOST_GROWTH = 1.5
"""Largest growth of a share in one change, as speeds are measured at current sizes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New shares, and the reason for them.

    Attributes:
        shares: Units of each rank.
        gain: Predicted step time before, divided by that after.
        text: Description of what happened, in one line.
    """

    shares: tuple[int, ...]
    gain: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A change whose gain is not yet measured: shares before, their step time, shares after."""

    before: tuple[int, ...]
    step_s: float
    shares: tuple[int, ...]


class Rebalancer:
    """Follows the speeds of all ranks.

    Args:
        num_ranks: Number of ranks of the job.
        most: Units that each rank can hold; ``None`` is no limit.
        dead_band: Least predicted gain, as a fraction of the step time.
        unit: Unit of shares, in words.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        most: Sequence[int | None] | None = None,
        dead_band: float = DEAD_BAND,
        unit: str = "samples",
    ) -> None:
        self.estimates = [SpeedEstimate() for _ in range(num_ranks)]
        self._most, self._dead_band, self._unit = most, dead_band, unit
        self._caution = 1.0
        self._trial: _Trial | None = None

    def update(
        self,
        shares: Sequence[int],
        units: Sequence[Sequence[float]],
        seconds: Sequence[Sequence[float]],
    ) -> Change | None:
        """Take in measurements; returns a change if one pays.

        Args:
            shares: Shares in force for the next whole batch.
            units: Units of each rank in each step of the window.
            seconds: Seconds that each rank computed in those steps; not a number where unknown.
        """
        changed = [
            estimate.add(sizes, told)
            for estimate, sizes, told in zip(self.estimates, units, seconds, strict=True)
        ]
        if any(changed):
            self._trial = None  # earlier step times are not comparable any more
            for estimate in self.estimates:
                estimate.forget_noise()
        measured_s = statistics.median(map(max, zip(*seconds, strict=True)))
        if (back := self._taken_back(tuple(shares), measured_s)) is not None:
            return back
        speeds = [estimate.speed for estimate in self.estimates]
        known = [speed for speed in speeds if speed is not None]
        if len(known) < len(speeds):
            return None
        best = best_shares(known, sum(shares), self._limits(shares))
        gain = step_s(known, shares) / step_s(known, best)
        noise = max(estimate.relative_error for estimate in self.estimates)
        if gain <= 1 + max(self._caution * self._dead_band, NOISE_BANDS * noise):
            return None
        self._trial = _Trial(before=tuple(shares), step_s=measured_s, shares=best)
        times = [speed.seconds(share) for speed, share in zip(known, shares, strict=True)]
        return Change(shares=best, gain=gain, text=self._told(shares, best, times, gain))

    def _taken_back(self, shares: tuple[int, ...], measured_s: float) -> Change | None:
        """The change back, if the last change has not paid."""
        trial, self._trial = self._trial, None
        if trial is None or trial.shares != shares or not measured_s >= trial.step_s:
            return None
        self._caution = min(2 * self._caution, MOST_CAUTION)
        text = (
            f"steps are not quicker with {'/'.join(map(str, shares))} {self._unit}: back to "
            f"{'/'.join(map(str, trial.before))}"
        )
        return Change(shares=trial.before, gain=measured_s / trial.step_s, text=text)

    def _limits(self, shares: Sequence[int]) -> list[int | None]:
        """Largest share of each rank: within its memory, and not far above its current share."""
        grown = [max(math.ceil(MOST_GROWTH * share), share + 1) for share in shares]
        if self._most is None:
            return list(grown)
        return [
            most if limit is None else min(most, limit)
            for most, limit in zip(grown, self._most, strict=True)
        ]

    def _told(
        self, old: Sequence[int], new: Sequence[int], times: Sequence[float], gain: float
    ) -> str:
        busy = [rank for rank, time_s in enumerate(times) if time_s > 0]  # others have no samples
        typical = statistics.median(times[rank] for rank in busy)
        rank = max(busy, key=lambda each: (abs(times[each] / typical - 1), -each))
        ratio = times[rank] / typical
        how = "slower" if ratio > 1 else "faster"
        percent = round(100 * (ratio - 1 if ratio > 1 else 1 / ratio - 1))
        return (
            f"rank {rank} is {percent} % {how} than planned: {old[rank]} -> {new[rank]} "
            f"{self._unit} (all ranks {'/'.join(map(str, old))} -> {'/'.join(map(str, new))}, "
            f"steps {gain:.2f}x as fast)"
        )


INTERVAL = 8
"""Steps between exchanges: two windows and the batches that loaders drew ahead are 20 steps."""

_logger = logging.getLogger(__name__)


class ScalarWriter(Protocol):
    """The method of TensorBoard's ``SummaryWriter`` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write a number for a step."""


class SpeedFollower:
    """Measures steps, exchanges times every few steps, and sets new shares; alike on all ranks.

    Args:
        group: The ranks.
        rebalancer: Decides on new shares.
        clock: Measures this rank's steps.
        interval: Number of steps between exchanges.
        writer: TensorBoard writer, on any rank, for the shares and seconds of every rank.
        tell: Function that gets a line about each change; by default rank 0 logs it.
    """

    def __init__(
        self,
        group: RankGroup,
        rebalancer: Rebalancer,
        clock: StepClock,
        *,
        interval: int,
        writer: ScalarWriter | None,
        tell: Callable[[str], None] | None,
    ) -> None:
        self._group, self._rebalancer, self._clock = group, rebalancer, clock
        self._interval = interval
        self._writer, self._tell = writer, tell
        self._window: list[Deal] = []
        self._num_steps = 0

    def end_step(self, deal: Deal, sampler: ShareSampler) -> None:
        """Count a step that all ranks have done; exchange times if it is due."""
        self._clock.end_step()
        self._window.append(deal)
        self._num_steps += 1
        if len(self._window) >= self._interval:
            with self._clock.waiting():
                self._exchange(sampler)

    def _exchange(self, sampler: ShareSampler) -> None:
        window, self._window = self._window, []
        measured = self._clock.take()[-len(window) :]
        unknown = [float("nan")] * (len(window) - len(measured))
        told = self._group.gather([*unknown, *measured, float(sampler.num_drawn)])
        seconds = [each[:-1] for each in told]
        units = [[float(deal.ran[rank]) for deal in window] for rank in range(len(told))]
        change = self._rebalancer.update(sampler.shares, units, seconds)
        self._write(sampler.shares, seconds)
        if change is None:
            return
        # Not before the batches that some rank has drawn already, dealt in the old shares.
        sampler.set_shares(change.shares, from_step=int(max(each[-1] for each in told)))
        if self._tell is not None:
            self._tell(change.text)
        elif self._group.rank == 0:
            _logger.warning(change.text)
        if self._writer is not None:
            self._writer.add_scalar("balance/predicted_gain", change.gain, self._num_steps)

    def _write(self, shares: tuple[int, ...], seconds: list[list[float]]) -> None:
        if self._writer is None:
            return
        for rank, (share, told) in enumerate(zip(shares, seconds, strict=True)):
            middle = sorted(told)[len(told) // 2]
            self._writer.add_scalar(f"balance/share/rank{rank}", share, self._num_steps)
            self._writer.add_scalar(f"balance/seconds/rank{rank}", middle, self._num_steps)
