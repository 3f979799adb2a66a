"""Measures what the loss of a job is a mean of, which gives the weights of its ranks.

All ranks measure it on the first batch (see ``loss_probe``), and again on a few later ones. Kinds
of means that a measurement cannot tell apart stay open as long as they give the same weights; a
batch for which weights differ is measured again.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from heterog.balance.group import RankGroup
from heterog.balance.loss_probe import (
    KINDS,
    MOST_CANDIDATES,
    NUM_ITEMS,
    SAMPLES,
    Batch,
    CountOf,
    Measurement,
    candidates,
)
from heterog.balance.shares import BalanceError

_SAME_WEIGHT = 1e-6
_CLEARLY = 5.0
"""A kind is ruled out if its difference is this many times that of the best kind."""
_MEASURED_AGAIN = (2, 4, 8)
"""Updates with a new measurement: the first batch may lack classes, or a term may begin later."""


class Measured(Protocol):
    """A function that measures a job's loss; see ``measure``."""

    def __call__(
        self,
        batch: Batch,
        label_names: Sequence[str],
        counts: Mapping[str, CountOf],
        *,
        masked: bool,
        training: bool,
    ) -> Measurement:
        """Measure the loss on a batch."""


class LossMean:
    """The kind of mean of a job's loss, and the weights of ranks that follow from it.

    Args:
        group: The ranks.
        label_names: Names of labels in a batch.
        stated: What the loss is a mean of, if the user says so: one of ``KINDS``, or a function
            from a batch to a number of items. It is measured if ``None``.

    Raises:
        BalanceError: ``stated`` is of another kind.
    """

    def __init__(
        self, group: RankGroup, label_names: Sequence[str], stated: str | CountOf | None
    ) -> None:
        if stated is not None and not callable(stated) and stated not in KINDS:
            raise BalanceError(
                f"loss_mean_over={stated!r}: give {', '.join(map(repr, KINDS))}, or a function "
                "from a batch to the number of items that its loss is a mean over."
            )
        self._group, self._label_names, self._stated = group, tuple(label_names), stated
        self._counts: dict[str, CountOf] = {}
        self._open: list[str] = []
        self._num_updates = 0

    @property
    def is_over_samples(self) -> bool:
        """Whether the loss was found, or may be, a mean over samples; the same on all ranks."""
        return SAMPLES in self._open and self._stated is None

    def weights(
        self, batches: Sequence[Batch], has_data: Sequence[Sequence[bool]], measured: Measured
    ) -> list[float]:
        """Factors of this rank's losses, whose gradients are then averaged over ranks.

        Args:
            batches: This rank's batches of an update.
            has_data: For each, which ranks have samples; the others run one that does not count.
            measured: Measures the loss on a batch.

        Raises:
            BalanceError: measurements do not show what the loss is a mean of.
        """
        if self._group.num_ranks == 1 or not batches:
            return [1.0] * len(batches)
        self._num_updates += 1
        if not self._open:
            self._begin(batches[0], measured)
        elif self._num_updates in _MEASURED_AGAIN and self._stated is None:
            self._find(batches[0], measured, again=True)
        found = self._by_kind(batches, has_data)
        place = _first_difference(found)
        if place is not None:
            self._find(batches[place], measured)
            found = self._by_kind(batches, has_data)
            if _first_difference(found) is not None:
                raise BalanceError(
                    _unclear(
                        f"{' and '.join(self._open)} both agree with what was measured, and this "
                        "batch has other parts of them on a rank"
                    )
                )
        return [each[self._group.rank] for each in found[0]]

    def _begin(self, batch: Batch, measured: Measured) -> None:
        if callable(self._stated):
            self._counts, self._open = {"items": self._stated}, ["items"]
            return
        self._counts = candidates(batch, self._label_names)
        if self._stated is not None:
            if self._stated != NUM_ITEMS and self._stated not in self._counts:
                raise BalanceError(
                    f"loss_mean_over={self._stated!r}, and a batch has {', '.join(batch)}: none "
                    f"is such labels ({', '.join(self._label_names) or 'label_names is empty'})."
                )
            self._open = [self._stated]
            return
        self._open = [NUM_ITEMS, *self._counts]
        self._find(batch, measured)

    def _find(self, batch: Batch, measured: Measured, *, again: bool = False) -> None:
        """Leave open only the kinds that agree with the measurements of all ranks.

        Args:
            batch: This rank's samples.
            measured: Measures the loss on them.
            again: Whether it was measured before, so that no kind need be ruled out now.
        """
        found: list[Measurement] = []
        for masked, training in ((True, True), (False, True), (False, False)):
            counts = {name: self._counts[name] for name in self._open if name != NUM_ITEMS}
            own = measured(batch, self._label_names, counts, masked=masked, training=training)
            found.append(own)
            apart = [own.difference(name) for name in self._open] if own.tells else []
            apart += [0.0] * (MOST_CANDIDATES - len(apart))
            told = [each[1:] for each in self._group.gather([own.tells, *apart]) if each[0]]
            left = self._left(told, own.tolerance)
            if told and left:
                self._open = left
                return
            if told and not masked:
                break
        else:
            if again:
                return
        best = max(found, key=lambda each: (each.tells, not any(map(each.agrees, self._open))))
        raise BalanceError(_unclear(str(best)))

    def _left(self, told: Sequence[Sequence[float]], tolerance: float) -> list[str]:
        """Kinds that agree with all ranks' measurements, not far worse than the best kind."""
        worst = {
            name: max((each[index] for each in told), default=0.0)
            for index, name in enumerate(self._open)
        }
        most = min(tolerance, max(_CLEARLY * min(worst.values()), tolerance / 10))
        return [name for name, apart in worst.items() if apart <= most]

    def _by_kind(
        self, batches: Sequence[Batch], has_data: Sequence[Sequence[bool]]
    ) -> list[list[list[float]]]:
        """Weights of all ranks, for each kind that is open and each batch."""
        rank, num_ranks = self._group.rank, self._group.num_ranks
        kinds = [kind for kind in self._open if kind != NUM_ITEMS]
        own = [
            float(self._counts[kind](batch)) if has[rank] else 0.0
            for kind in kinds
            for batch, has in zip(batches, has_data, strict=True)
        ]
        told = self._group.gather(own) if own else []
        weights = []
        for index in range(len(kinds)):
            begin = index * len(batches)
            columns = [[each[begin + place] for each in told] for place in range(len(batches))]
            weights.append(
                [
                    [num_ranks * each / (sum(column) or 1.0) for each in column]
                    for column in columns
                ]
            )
        if NUM_ITEMS in self._open:
            weights.append([[float(num_ranks) * each for each in has] for has in has_data])
        return weights


def _first_difference(weights: Sequence[Sequence[Sequence[float]]]) -> int | None:
    """The first batch for which two kinds make different weights."""
    for place, alike in enumerate(zip(*weights, strict=True)):
        for ranks in zip(*alike, strict=True):
            if max(ranks) - min(ranks) > _SAME_WEIGHT:
                return place
    return None


def _unclear(measured: str) -> str:
    return (
        f"what this loss is a mean of is unclear: {measured}. State it: "
        'BalancedTrainer(..., loss_mean_over="samples"), or "labels" (those that are not -100), '
        '"shifted_labels" (all but the first of each sample), "num_items" (a sum that '
        "num_items_in_batch divides), or a function from a batch to the number of items. A loss "
        "with terms across samples is no mean: no weights of ranks make it that of one process."
    )
