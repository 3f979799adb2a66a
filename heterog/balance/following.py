"""Follows the speeds of ranks during training and changes their shares at a step's end."""

import logging
from collections.abc import Callable
from typing import Protocol

from heterog.balance.clock import StepClock
from heterog.balance.dealing import Deal
from heterog.balance.group import RankGroup
from heterog.balance.rebalancing import Rebalancer
from heterog.balance.sampler import ShareSampler

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
        """Take in a step that is done on all ranks."""
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
        # Not before batches that any rank has drawn: these were dealt in the old shares.
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
