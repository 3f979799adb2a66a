"""Global batches and how each is cut among ranks: pure functions of seed, epoch, step and shares.

The samples in the global batch of a step never depend on the shares. So shares may change at any
step, and a job may resume with other shares or even another number of ranks; each sample is still
seen exactly once in an epoch.
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
    """Distribution of one step's batch among the ranks.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step in its epoch.
        samples: Number of samples of each rank.
        units: Size of each rank's part in the unit of shares: samples, or cost of their tokens.
        ran: Units that each rank runs: its own, or those of the sample that fills an empty part
            (the result does not count).
    """

    epoch: int
    step: int
    samples: tuple[int, ...]
    units: tuple[int, ...]
    ran: tuple[int, ...]


class GlobalBatches(Protocol):
    """The global batches of an epoch, and the way to cut them.

    Attributes:
        unit: Unit of shares, in words.
        has_length: Whether the number of steps is known before an epoch is over.
    """

    unit: str
    has_length: bool

    @property
    def units_per_batch(self) -> int:
        """Sum of the shares of a whole batch."""

    def num_steps(self, epoch: int) -> int:
        """Number of global batches of an epoch."""

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""

    def cut(self, indices: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """The indices of each rank, in order of the ranks."""

    def units(self, indices: IndexArray) -> int:
        """Size of some samples in the unit of shares."""


def length_of(batches: GlobalBatches, epoch: int) -> int:
    """Number of steps of an epoch, for ``len``.

    Raises:
        TypeError: it is not known, as for a stream.
    """
    if not batches.has_length:
        raise TypeError("a loader of a stream has no length: its end is known when it is read.")
    return batches.num_steps(epoch)


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> IndexArray:
    """The samples of an epoch in order; the same on all ranks.  # [num_samples]"""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    return np.random.default_rng((seed, epoch)).permutation(num_samples).astype(np.int64)


def without_singles(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts of the same sum in which no rank has exactly one sample, if that is possible.

    A rank with one sample gets another from the rank with most, or else gives its own away.

    >>> without_singles((7, 1)), without_singles((2, 1, 1)), without_singles((2, 1))
    ((6, 2), (2, 0, 2), (3, 0))
    """
    found = list(counts)
    for rank in range(len(found)):
        if found[rank] != 1 or sum(found) == 1:
            continue
        most = max((each for each in range(len(found)) if each != rank), key=found.__getitem__)
        if found[most] >= 3:
            found[most] -= 1
            found[rank] = 2
        else:
            found[most] += 1
            found[rank] = 0
    return tuple(found)


class SampleBatches:
    """Global batches of equally many samples; a share is a number of samples.

    Args:
        num_samples: Number of samples of the data set.
        batch_size: Number of samples of a global batch.
        seed: Seed of the order.
        shuffle: Whether each epoch has its own order; otherwise it is that of the data set.
        drop_last: Whether to leave out samples at the end that do not fill a batch.

    Raises:
        BalanceError: there are no samples, or none in a batch.
    """

    unit = "samples"
    has_length = True

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
        """Number of samples of a whole batch."""
        return self._batch_size

    def num_steps(self, epoch: int) -> int:
        """Number of global batches of an epoch; the same for all epochs."""
        whole, rest = divmod(self._num_samples, self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def order(self, epoch: int) -> IndexArray:
        """The samples of an epoch in order; the same on all ranks.  # [num_samples]"""
        return epoch_order(self._num_samples, self._seed, epoch, shuffle=self._shuffle)

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.order(epoch)
        begin = step * self._batch_size
        return self._order[1][begin : begin + self._batch_size]

    def cut(self, indices: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """Cut into consecutive parts; a smaller batch is cut in the same proportion."""
        counts = shares if len(indices) == sum(shares) else scaled_shares(shares, len(indices))
        return np.split(indices, np.cumsum(counts)[:-1])

    def units(self, indices: IndexArray) -> int:
        """Number of indices."""
        return len(indices)
