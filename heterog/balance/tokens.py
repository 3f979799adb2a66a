"""Global batches of about equally many tokens, cut by the cost of their samples."""

from collections.abc import Callable, Sequence

import numpy as np

from heterog.balance.shares import BalanceError, FloatArray, IndexArray, epoch_order


class TokenBatches:
    """Global batches that cost at most a budget; a share is a part of the budget.

    Samples are taken in the order of the epoch until the next one would not fit; a sample that
    alone costs more is a batch of its own. Within a batch, ranks get samples whose costs are in
    proportion to the shares, as nearly as whole samples can be.

    Args:
        lengths: Number of tokens of every sample of the data set.
        budget: Largest cost of a global batch, in the unit of ``cost``.
        seed: Seed of the order.
        shuffle: Whether each epoch has its own order.
        drop_last: Whether to leave out the last batch of an epoch, which may be smaller.
        cost: Function from a sample's length to its cost in tokens, ``lambda n: n + n * n / 2048``
            where attention counts. By default the length.
        padded: Whether the loader pads a rank's samples to the longest of them, so that each
            costs as much as the longest. Samples of similar lengths then go to the same rank.

    Raises:
        BalanceError: there are no samples, or a length or cost is not positive.
    """

    unit = "tokens"
    has_length = True

    def __init__(
        self,
        lengths: Sequence[int],
        budget: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        cost: Callable[[int], float] | None = None,
        padded: bool = False,
    ) -> None:
        if len(lengths) == 0 or budget < 1:
            raise BalanceError(
                f"{len(lengths)} samples in batches of {budget} tokens; both must be 1 or more."
            )
        self._costs = np.array([cost(n) if cost else n for n in lengths], np.float64)
        if not (self._costs > 0).all():
            index = int(np.argmin(self._costs > 0))
            raise BalanceError(
                f"sample {index} of {lengths[index]} tokens costs {self._costs[index]:g}; costs "
                "must be positive. Leave empty samples out, or give a cost that is."
            )
        self._budget, self._seed = budget, seed
        self._shuffle, self._drop_last, self._padded = shuffle, drop_last, padded
        self._epoch: tuple[int, list[IndexArray]] | None = None

    @property
    def units_per_batch(self) -> int:
        """The budget."""
        return self._budget

    def num_steps(self, epoch: int) -> int:
        """Number of global batches of an epoch; epochs may differ by a few."""
        return len(self._batches(epoch))

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""
        return self._batches(epoch)[step]

    def cut(self, indices: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """Cut into the indices of each rank, by cost."""
        # The longest first, and equal ones in the order of the epoch.
        ordered = indices[np.argsort(-self._costs[indices], kind="stable")]
        if self._padded:
            return self._cut_ranges(ordered, shares)
        return self._cut_singly(ordered, shares)

    def units(self, indices: IndexArray) -> int:
        """Cost of samples on one rank."""
        if not len(indices):
            return 0
        costs = self._costs[indices]
        total = float(costs.max()) * len(costs) if self._padded else float(costs.sum())
        return max(1, round(total))

    def _batches(self, epoch: int) -> list[IndexArray]:
        if self._epoch is None or self._epoch[0] != epoch:
            order = epoch_order(len(self._costs), self._seed, epoch, shuffle=self._shuffle)
            cuts, filled = [], 0.0
            for place, cost in enumerate(self._costs[order].tolist()):
                if filled and filled + cost > self._budget:
                    cuts.append(place)
                    filled = 0.0
                filled += cost
            batches = np.split(order, cuts)
            if self._drop_last and len(batches) > 1:
                batches.pop()
            self._epoch = epoch, batches
        return self._epoch[1]

    def _cut_singly(self, ordered: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """Give each sample to the rank that ends first with it (Graham 1969, longest first)."""
        inverse = np.array([1 / share if share else np.inf for share in shares])
        ends: FloatArray = np.zeros(len(shares))
        rank_of = np.empty(len(ordered), np.int64)
        for place, cost in enumerate(self._costs[ordered]):
            rank = int(np.argmin(ends + cost * inverse))
            rank_of[place] = rank
            ends[rank] += cost * inverse[rank]
        return [ordered[rank_of == rank] for rank in range(len(shares))]

    def _cut_ranges(self, ordered: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """Cut into ranges of similar samples that end within the least time, by bisection."""
        costs = self._costs[ordered]

        def counts_within(time_s: float) -> list[int]:
            counts, begin = [], 0
            for share in shares:
                count = 0
                if begin < len(costs):
                    count = min(int(time_s * share / costs[begin]), len(costs) - begin)
                counts.append(count)
                begin += count
            return counts

        low, high = 0.0, float(costs[0]) * len(costs) / max(shares) * (1 + 1e-9)
        for _ in range(50):
            middle = (low + high) / 2
            if sum(counts_within(middle)) == len(costs):
                high = middle
            else:
                low = middle
        return np.split(ordered, np.cumsum(counts_within(high))[:-1])
