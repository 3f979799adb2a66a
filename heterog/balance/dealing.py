"""Global batches and how each is cut among ranks: pure functions of seed, epoch, step and shares.

Which samples are in the global batch of a step never depends on the shares. So shares may change
at any step, and a job may go on with other shares or even another number of ranks, and each sample
is still seen exactly once in an epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from heterog.balance.shares import BalanceError, scaled_shares

IndexArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """What the ranks have of one step.

    Attributes:
        epoch: of the step.
        step: number of the step in its epoch.
        samples: number of samples of each rank.
        units: what shares count, for each rank: its samples, or the cost of their tokens.
        ran: units that each rank runs: its own, or those of the sample that stands in for none.
    """

    epoch: int
    step: int
    samples: tuple[int, ...]
    units: tuple[int, ...]
    ran: tuple[int, ...]


class GlobalBatches(Protocol):
    """The global batches of an epoch and how they are cut.

    Attributes:
        unit: what shares count, in words.
    """

    unit: str

    @property
    def units_per_batch(self) -> int:
        """What the shares of a whole batch add up to."""

    def num_steps(self, epoch: int) -> int:
        """Global batches of an epoch."""

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""

    def cut(self, indices: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """The indices of each rank, in order of the ranks."""

    def units(self, indices: IndexArray) -> int:
        """What indices count in the shares' units."""


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> IndexArray:
    """The samples of an epoch in order; the same on all ranks.  # [num_samples]"""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    return np.random.default_rng((seed, epoch)).permutation(num_samples).astype(np.int64)


class SampleBatches:
    """Global batches of equally many samples; a share is a number of samples.

    Args:
        num_samples: of the data set.
        batch_size: samples of a global batch.
        seed: of the order.
        shuffle: whether each epoch has an order of its own; else that of the data set.
        drop_last: leave out the samples that fill no whole batch; else they make a smaller one.

    Raises:
        BalanceError: there is no sample, or none in a batch.
    """

    unit = "samples"

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        if num_samples < 1 or batch_size < 1:
            raise BalanceError(
                f"{num_samples} samples in batches of {batch_size}; both must be 1 or more."
            )
        if drop_last and num_samples < batch_size:
            raise BalanceError(
                f"drop_last leaves no step: {num_samples} samples are less than one global batch "
                f"of {batch_size}."
            )
        self._num_samples, self._batch_size = num_samples, batch_size
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._order: tuple[int, IndexArray] | None = None

    @property
    def units_per_batch(self) -> int:
        """Samples of a whole batch."""
        return self._batch_size

    def num_steps(self, epoch: int) -> int:
        """Global batches of an epoch; the same for all."""
        whole, rest = divmod(self._num_samples, self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(self._num_samples, self._seed, epoch, shuffle=self._shuffle)
            self._order = epoch, order
        begin = step * self._batch_size
        return self._order[1][begin : begin + self._batch_size]

    def cut(self, indices: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """Consecutive parts; a smaller batch is cut in the same proportion."""
        counts = shares if len(indices) == sum(shares) else scaled_shares(shares, len(indices))
        return np.split(indices, np.cumsum(counts)[:-1])

    def units(self, indices: IndexArray) -> int:
        """Number of indices."""
        return len(indices)
