"""What a loss is a mean of, found by measuring it: on some samples, and on the same cut in two.

Let L be the loss of a batch that is cut into two parts with losses L_1, L_2 and counts c_1, c_2 of
what it may be a mean of (samples, or labels that are not ignored). Then

    L = L_1 + L_2                                 if it is a sum, which ``num_items_in_batch``
                                                  divides: L halves where that doubles;
    L = (c_1 L_1 + c_2 L_2) / (c_1 + c_2)         if it is a mean over what c counts.

The parts have one and three samples, and labels of the three are ignored but for one in each
sample, where labels can be: so these values differ. What cannot be told apart stays open as long
as it makes the same weights, and is measured again on a batch for which it does not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from heterog.balance.group import RankGroup
from heterog.balance.shares import BalanceError

Batch = Mapping[str, Any]
CountOf = Callable[[Batch], float]
UNCOUNTED = -100
"""The label that losses of PyTorch and Transformers ignore."""

NUM_ITEMS = "num_items"
SAMPLES = "samples"
LABELS = "labels"
SHIFTED_LABELS = "shifted_labels"
KINDS = (NUM_ITEMS, SAMPLES, LABELS, SHIFTED_LABELS)

NUM_SAMPLES = 4
_MOST_CANDIDATES = 16
_SAME_WEIGHT = 1e-6


def label_of(batch: Batch, label_names: Sequence[str]) -> Tensor | None:
    """The labels of a batch: its first tensor of these names."""
    for name in label_names:
        if isinstance(batch.get(name), Tensor) and batch[name].dim():
            found: Tensor = batch[name]
            return found
    return None


def num_rows(batch: Batch, label_names: Sequence[str]) -> int:
    """Number of samples of a batch: the length of its labels, or of its first tensor."""
    first = label_of(batch, label_names)
    if first is None:
        tensors = (each for each in batch.values() if isinstance(each, Tensor) and each.dim())
        first = next(tensors, None)
    return 0 if first is None else len(first)


def candidates(batch: Batch, label_names: Sequence[str]) -> dict[str, CountOf]:
    """What a loss may be a mean of, for batches like this one: names, and how to count."""
    found: dict[str, CountOf] = {SAMPLES: lambda batch: num_rows(batch, label_names)}
    label = label_of(batch, label_names)
    if label is not None:
        found[LABELS] = lambda batch: _num_counted(_needed(batch, label_names))
        if label.dim() > 1:
            found[SHIFTED_LABELS] = lambda batch: _num_counted(_needed(batch, label_names)[:, 1:])
    for name, value in batch.items():
        if "mask" in name and isinstance(value, Tensor) and len(found) < _MOST_CANDIDATES - 3:
            found[name] = _count_of_mask(name, 0)
            if value.dim() > 1:
                found[f"shifted {name}"] = _count_of_mask(name, 1)
    return found


def _needed(batch: Batch, label_names: Sequence[str]) -> Tensor:
    label = label_of(batch, label_names)
    if label is None:
        raise BalanceError(
            f"a batch has no tensor of labels ({', '.join(label_names)}), as the first one had. "
            "Give all batches the same contents."
        )
    return label


def _num_counted(label: Tensor) -> float:
    return float((label != UNCOUNTED).sum())


def _count_of_mask(name: str, begin: int) -> CountOf:
    return lambda batch: float((batch[name][..., begin:] != 0).sum()) if name in batch else 0.0


# --- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Losses of some samples and of their two parts.

    Attributes:
        whole: Loss of all.
        doubled: The same with twice as many items in ``num_items_in_batch``, if there are.
        parts: Losses of both parts; ``None`` if the model could not run them.
        counts: By candidate, what both parts count.
        tolerance: Relative differences that rounding may make.
        failure: Why the model could not run the parts.
    """

    whole: float
    doubled: float | None
    parts: tuple[float, float] | None
    counts: Mapping[str, tuple[float, float]]
    tolerance: float
    failure: str = ""

    def expected(self, kind: str) -> float:
        """Loss of the whole by those of its parts, if it is a sum or a mean of this kind."""
        assert self.parts is not None
        first, rest = self.parts
        if kind == NUM_ITEMS:
            return first + rest
        one, other = self.counts[kind]
        return (one * first + other * rest) / (one + other) if one + other else math.nan

    def agrees(self, kind: str) -> bool:
        """Whether the loss may be of this kind."""
        doubled = self.whole if self.doubled is None else self.doubled
        is_divided = self._alike(2 * doubled, self.whole)
        if not is_divided and not self._alike(doubled, self.whole):
            return False
        if is_divided and kind != NUM_ITEMS:
            return False
        if self.parts is None:
            return is_divided
        return self._alike(self.expected(kind), self.whole)

    @property
    def tells(self) -> bool:
        """Whether anything was measured that tells kinds apart."""
        numbers = (self.whole, *(self.parts or ()), *filter(None, [self.doubled]))
        if not all(map(math.isfinite, numbers)) or not self.whole:
            return False
        return self.parts is not None or self.agrees(NUM_ITEMS)

    def _alike(self, one: float, other: float) -> bool:
        largest = max(abs(self.whole), *map(abs, self.parts or (0.0,)))
        return abs(one - other) <= self.tolerance * largest

    def __str__(self) -> str:
        text = f"for some samples it is {self.whole:.6g}"
        if self.doubled is not None:
            text += f" ({self.doubled:.6g} with twice the num_items_in_batch)"
        if self.parts is None:
            return f"{text}, and the model cannot run a part of them ({self.failure})"
        wanted = ", ".join(f"{self.expected(kind):.6g} for {kind}" for kind in self.counts)
        return (
            f"{text}, for the first {self.parts[0]:.6g}, for the others {self.parts[1]:.6g}. "
            f"A sum would be {self.expected(NUM_ITEMS):.6g}; a mean {wanted}"
        )


LossOf = Callable[[Batch, float], float]
"""The loss of a batch, with so many times the items in ``num_items_in_batch``."""


def measure(
    loss_of: LossOf,
    batch: Batch,
    label_names: Sequence[str],
    counts: Mapping[str, CountOf],
    *,
    has_items: bool,
    masked: bool,
    tolerance: float,
) -> Measurement:
    """Measure a loss on samples of a batch, and on both parts of these.

    Args:
        loss_of: The loss.
        batch: Samples.
        label_names: Names of labels.
        counts: Candidates.
        has_items: Whether ``num_items_in_batch`` is given to the loss.
        masked: Whether labels of the second part may be ignored.
        tolerance: Relative differences that rounding may make.
    """
    found = Measurement(whole=math.nan, doubled=None, parts=None, counts={}, tolerance=tolerance)
    try:
        chosen = _chosen_samples(batch, label_names, masked=masked)
        found = replace(found, whole=loss_of(chosen, 1.0))
        if has_items:
            found = replace(found, doubled=loss_of(chosen, 2.0))
        parts = [_take(chosen, index, NUM_SAMPLES) for index in ([0], list(range(1, NUM_SAMPLES)))]
        told = {name: (count(parts[0]), count(parts[1])) for name, count in counts.items()}
        losses = (loss_of(parts[0], 1.0), loss_of(parts[1], 1.0))
        return replace(found, parts=losses, counts=told)
    except Exception as error:  # whatever a model says to inputs that it does not know
        return replace(found, failure=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _chosen_samples(batch: Batch, label_names: Sequence[str], *, masked: bool) -> Batch:
    """Samples of a batch: that with the most labels, then those with the fewest, but some."""
    number = num_rows(batch, label_names)
    label = label_of(batch, label_names)
    order = list(range(number))
    if label is not None and not label.is_floating_point():
        counted = (label != UNCOUNTED).reshape(number, -1).sum(1).tolist()
        order = sorted((each for each in order if counted[each]), key=lambda each: counted[each])
    if not order:
        raise BalanceError("no sample has a label that counts.")
    rest = [order[index % len(order)] for index in range(NUM_SAMPLES - 1)]
    chosen: Batch = _take(batch, [order[-1], *rest], number)
    if masked and label is not None and _may_be_ignored(label):
        return _with_few_labels(chosen, label_names)
    return chosen


def _may_be_ignored(label: Tensor) -> bool:
    """Whether labels of -100 can do no harm: on GPUs an index out of range ends the process."""
    if label.is_floating_point() or not label.dtype.is_signed:
        return False
    return label.device.type == "cpu" or bool((label == UNCOUNTED).any())


def _with_few_labels(batch: Batch, label_names: Sequence[str]) -> Batch:
    """Ignore all labels but one in each sample after the first, or where it has one, in all."""
    changed = dict(batch)
    for name in label_names:
        label = batch.get(name)
        if not isinstance(label, Tensor) or not label.dim() or label.is_floating_point():
            continue
        rest = label[1:].clone()
        rows = rest.reshape(len(rest), -1) if rest.dim() > 1 else rest[None]
        for row in rows:
            row[(row != UNCOUNTED).nonzero().flatten()[:-1]] = UNCOUNTED
        changed[name] = torch.cat([label[:1], rows.reshape(rest.shape)])
    return changed


def _take(value: Any, index: Sequence[int], number: int) -> Any:
    """Some samples of all tensors and lists of a batch that are as long as it."""
    if isinstance(value, Mapping):
        return {name: _take(each, index, number) for name, each in value.items()}
    if isinstance(value, Tensor) and value.dim() and len(value) == number:
        return value[list(index)]
    if isinstance(value, list | tuple) and len(value) == number:
        return type(value)([value[each] for each in index])
    return value


# --- deciding ------------------------------------------------------------------------------------


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
    """What the loss of a job is a mean of, and so the weights of its ranks.

    Args:
        group: The ranks.
        label_names: Names of labels in a batch.
        stated: What the loss is a mean of, if somebody says so: one of ``KINDS``, or a function
            from a batch to a number of items. Otherwise it is measured.

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

    def weights(
        self, batches: Sequence[Batch], has_data: Sequence[Sequence[bool]], measured: Measured
    ) -> list[float]:
        """What to multiply this rank's losses by, whose gradients are then averaged.

        Args:
            batches: This rank's batches of an update.
            has_data: For each, which ranks have samples; the others run one that does not count.
            measured: Measures the loss on a batch.

        Raises:
            BalanceError: it cannot be told what the loss is a mean of.
        """
        if self._group.num_ranks == 1 or not batches:
            return [1.0] * len(batches)
        if not self._open:
            self._begin(batches[0], measured)
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

    def _find(self, batch: Batch, measured: Measured) -> None:
        """Leave open only what all ranks' measurements agree with."""
        found: list[Measurement] = []
        for masked, training in ((True, True), (False, True), (False, False)):
            counts = {name: self._counts[name] for name in self._open if name != NUM_ITEMS}
            own = measured(batch, self._label_names, counts, masked=masked, training=training)
            found.append(own)
            bits = [float(own.agrees(name)) for name in self._open] if own.tells else []
            bits = [float(own.tells), *bits, *[1.0] * (_MOST_CANDIDATES - len(bits))]
            told = [each for each in self._group.gather(bits) if each[0]]
            left = [
                name
                for index, name in enumerate(self._open, 1)
                if all(each[index] for each in told)
            ]
            if told and left:
                self._open = left
                return
            if told and not masked:
                break
        best = max(found, key=lambda each: each.tells)
        raise BalanceError(_unclear(str(best)))

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
