"""Finds losses that are no means over samples, from the graph of autograd.

A loss that is weighed by samples has to be a mean over samples. ``cross_entropy`` with labels that
do not count (``ignore_index``), or with class weights, is a mean over something else. Its backward
node shows this: it keeps the total weight that the sum was divided by. A sum that nothing divides
is no mean either.

A mean over the tokens of padded sequences is a mean over samples only if all samples of a batch
are equally long. Let rank r's mean be over n_r elements of its s_r samples. The weights s_r are
right if n_r / s_r is the same everywhere, or if n_r does not depend on the samples at all. A sum
over samples that is divided by n_r needs the former. A root of a mean, and a cross entropy whose
classes are the samples of the batch, need the latter, because such losses of ranks' parts do not
add up. If the user gives a count, it takes the place of s_r.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from heterog.balance.group import RankGroup
from heterog.balance.loss_graph import (
    MEAN,
    MOST_FACTORS,
    NONE,
    SUM,
    Factor,
    Ranks,
    constant_of,
    factors_of,
    inputs_of,
    is_alike,
    is_normalised,
    maker_of,
    nodes_below,
    number_of,
    reduction_of,
    rows_together,
    summed,
    unlike_totals,
)
from heterog.balance.shares import BalanceError
from heterog.errors import HeterogWarning, OwnSamplesWarning

_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_ADDS = ("AddBackward", "SubBackward", "Neg", "ToCopyBackward")
_OF_ELEMENTS = (*_ADDS, "MulBackward", "DivBackward", "PowBackward", "AbsBackward")
_CURVES = ("Sqrt", "Rsqrt", "Pow", "Log", "Exp", "Abs", "Relu", "Softplus", "Sigmoid", "Tanh")
"""Beginnings of names of nonlinear nodes. Clamps are left out: most are only guards."""
_MOST_NODES = 64
"""Most nodes that are examined: the means lie a few sums and factors before the loss."""
_MOST_COUNTS = 6
"""Most counts of one loss that ranks compare: those of a loss and a few added terms."""
_MOST_LOSSES = 4
"""Most losses of one step that are examined: further ones are repeated calls of closures."""
_EVERY = 64
"""Weighings between two comparisons of ranks, after the 1st, 2nd, 4th, ... up to here."""
_Known = TypeVar("_Known")


class Of(IntEnum):
    """The kind of term that a number of elements belongs to."""

    MEAN = 0
    SUM = 1
    """A sum over samples, divided by that number."""
    CURVED = 2
    """A mean that the loss depends on nonlinearly."""
    CLASSES = 3
    STATED = 4
    """A mean of a loss whose count is stated."""


class Count(NamedTuple):
    """A number of elements, and the kind of term that it belongs to."""

    number: float
    of: Of = Of.MEAN


def check_mean_over_samples(loss: Tensor, samples: float) -> None:
    """Check that a loss does not end in a sum, or in a mean over a part of the labels.

    Warns if a compiled model or a kernel made the loss, because its graph does not show means.

    Args:
        loss: Loss that is about to be weighed by the number of samples.
        samples: That number.

    Raises:
        BalanceError: it does; says what to give instead.
    """
    if None in _divisors(loss, samples):
        raise BalanceError(
            "the loss is a sum over samples, and a balancer weighs means: give it "
            'reduction="mean", or the sum divided by the number of this rank\'s samples. Where '
            "the update shall be that of a sum, multiply the mean by balancer.global_batch_size."
        )
    for node, _ in _last_nodes(loss):
        if node.name() in _CROSS_ENTROPIES and node._saved_reduction == MEAN:
            _check(node._saved_total_weight, node._saved_target.numel())
    if any(  # a term is the result of a custom autograd function
        isinstance(node, BackwardCFunction) for node, _ in _nodes(loss, None, _below_divided)
    ):
        warnings.warn(
            "the loss comes out of a compiled function or a kernel, whose record does not say "
            "what it is a mean over: it is weighed by samples. If it is a mean over labels of "
            "which some do not count, say over how many: weigh(loss, count).",
            HeterogWarning,
            stacklevel=4,
        )


def counts_of(loss: Tensor, samples: float) -> list[Count]:
    """Numbers of elements of the last means of a loss, and of similar terms.

    >>> import torch
    >>> x = torch.ones(2, 3, requires_grad=True).clone()
    >>> [each.number for each in counts_of(x.exp().sum() / 3 + x.mean(1).mean(), 2)]
    [3.0, 2.0]
    >>> [each.of.name for each in counts_of(x.square().sum() / 10 + x.mean().sqrt(), 2)]
    ['SUM', 'MEAN', 'CURVED']
    """
    divisors = [each for each in _divisors(loss, samples) if each is not None]
    found = [Count(each, Of.SUM) for each in divisors]
    for node, is_curved in _last_nodes(loss):
        number = _count_of(node)
        if number is not None:
            found.append(Count(number, Of.CURVED if is_curved else Of.MEAN))
        if node.name() in _CROSS_ENTROPIES and node._saved_self.dim() > 1:
            found.append(Count(float(node._saved_self.shape[1]), Of.CLASSES))
    return found


def labels_of(loss: Tensor) -> list[Count]:
    """Divisors of the last means of a loss; for means over labels, the weight of those that count.

    >>> import torch
    >>> x, labels = torch.zeros(3, 2, requires_grad=True), torch.tensor([1, -100, 0])
    >>> labels_of(torch.nn.functional.cross_entropy(x, labels))[0].number
    2.0
    """
    found = []
    for node, is_curved in _last_nodes(loss):
        number = _count_of(node)
        if number is not None and not is_curved:
            is_entropy = node.name() in _CROSS_ENTROPIES
            number = float(node._saved_total_weight) if is_entropy else number
            found.append(Count(number, Of.STATED))
    return found


def _divisors(loss: Tensor, samples: float) -> Iterator[float | None]:
    """The divisor of each sum over samples in a loss; ``None`` for a sum that nothing divides."""
    for node, divisor in _nodes(loss, None, _below_divided):
        if _is_sum(node, samples):
            yield divisor


def _below_divided(node: Any, divisor: float | None) -> list[tuple[Any, float | None]]:
    """The terms that a node adds up, or divides by a number, each with its divisor so far."""
    below = [each for each, _ in inputs_of(node)]
    if node.name().startswith(_ADDS):
        return [(each, divisor) for each in below]
    is_divided = node.name().startswith("DivBackward")
    if not is_divided and not node.name().startswith("MulBackward"):
        return []
    number = number_of(constant_of(node))
    if not number:
        return []
    by = number if is_divided else 1 / number
    return [(each, by * (divisor or 1.0)) for each in below if each is not None]


def _is_sum(node: Any, samples: float) -> bool:
    """Whether a node is the sum of a loss over all samples, as far as that is certain."""
    if node.name() != "SumBackward0":
        return reduction_of(node) == SUM
    below = inputs_of(node)[0][0]
    if reduction_of(below) == NONE:
        return True
    sizes = node._saved_self_sym_sizes
    is_of_samples = len(sizes) > 0 and sizes[0] == samples
    is_penalty = below.name().startswith(("PowBackward", "AbsBackward"))
    return is_of_samples and is_penalty and not _is_of_weights(below)


def _is_of_weights(node: Any) -> bool:
    """Whether a node is computed from parameters alone, element by element.

    >>> import torch
    >>> weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    >>> [_is_of_weights(each.grad_fn) for each in ((2 * weight - x).abs(), (weight.cos()).abs())]
    [True, False]
    """
    known = ("torch::autograd::AccumulateGrad", *_OF_ELEMENTS)
    return all(each.name().startswith(known) for each in nodes_below(node))


def _last_nodes(loss: Tensor) -> Iterator[tuple[Any, bool]]:
    """Nodes of autograd from the end of a loss back to its last means.

    Each comes with whether the loss depends on it nonlinearly.
    """

    def below(node: Any, is_curved: bool) -> list[tuple[Any, bool]]:
        is_curved = is_curved or node.name().startswith(_CURVES)
        return [] if _is_mean(node) else [(each, is_curved) for each, _ in inputs_of(node)]

    return _nodes(loss, False, below)


def _nodes(
    loss: Tensor, begin: _Known, below: Callable[[Any, _Known], list[tuple[Any, _Known]]]
) -> Iterator[tuple[Any, _Known]]:
    """Nodes of autograd from the end of a loss, each with what ``below`` found on the way."""
    waiting: list[tuple[Any, _Known]] = [(maker_of(loss)[0], begin)]
    seen = 0
    while waiting and seen < _MOST_NODES:
        node, known = waiting.pop(0)
        seen += 1
        if node is not None:
            yield node, known
            waiting += below(node, known)


def _is_mean(node: Any) -> bool:
    """Whether a node is the mean of all elements of something."""
    if node.name() == "MeanBackward1":
        return len(node._saved_dim) in (0, len(node._saved_self_sym_sizes))
    return node.name() == "MeanBackward0" or reduction_of(node) == MEAN


def _count_of(node: Any) -> float | None:
    if _is_mean(node):
        known = getattr(node, "_saved_self_sym_numel", None)
        if known is None:
            of = node._saved_target if node.name() in _CROSS_ENTROPIES else node._saved_self
            known = of.numel()
        return float(known)
    if not node.name().startswith("DivBackward"):
        return None
    divisor = number_of(node._saved_other)
    divided = inputs_of(node)[0][0]
    if divisor is None or divisor <= 0 or divided is None:
        return None
    is_whole = divisor >= 1 and divisor.is_integer()  # another number is a count only below a sum
    return divisor if is_whole or divided.name() == "SumBackward0" else None


class _Alike(NamedTuple):
    """The part of a count that is alike on all ranks: elements per sample, or elements."""

    of: Of
    per_sample: float | None
    number: float | None

    @property
    def is_right(self) -> bool:
        """Whether weights by samples are right for it."""
        return (self.per_sample, self.number) != (None, None)


@dataclass(slots=True)
class _Seen:
    """The counts of one loss of a step so far.

    Attributes:
        num_calls: How often it was weighed.
        counts: For each number of elements, the part that was alike on all ranks.
    """

    num_calls: int = 0
    counts: list[_Alike] | None = None


class MeanCounts:
    """Compares the counts of losses: among ranks now and then, with earlier ones always.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._seen: dict[int, _Seen] = defaultdict(_Seen)
        self._has_warned = False

    def check(
        self,
        loss: Tensor,
        samples: float | Tensor,
        place: int,
        *,
        looks: bool,
        part: bool = False,
        is_stated: bool = False,
    ) -> None:
        """Check a loss that is about to be weighed; all ranks call it alike.

        A loss that puts samples together is warned of once, not refused: what cancels out, as a
        shift before a softmax, looks alike.

        Args:
            loss: The loss.
            samples: Number of this rank's samples, or the stated count.
            place: Number of losses of this step that were weighed before.
            looks: Whether to examine this loss even if ranks do not compare it.
            part: Whether it belongs to a further part of a batch; ranks cut unlike many.
            is_stated: Whether ``samples`` is a stated count.

        Raises:
            BalanceError: it is a mean over elements whose number differs between samples, or
                losses of ranks' parts do not add up to that of the batch.
        """
        if place >= _MOST_LOSSES and not part:
            return
        seen = self._seen[0 if part else place]
        seen.num_calls += not part
        number = seen.num_calls
        compares = not part and (number & (number - 1) == 0 or number % _EVERY == 0)
        if not (looks or compares):
            return
        samples = float(samples)
        counts = labels_of(loss) if is_stated else counts_of(loss, samples)
        own = counts[:_MOST_COUNTS] if samples else []
        if compares:
            padded = [*own, *((math.nan, Of.MEAN) for _ in range(_MOST_COUNTS - len(own)))]
            is_open = samples and not is_stated and not self._has_warned
            rows = (rows_together(loss, samples) if is_open else None) or (math.nan, math.nan)
            factors = [] if is_stated else factors_of(loss)
            normalised = bool(is_open) and is_normalised(loss, samples)
            numbers = chain(*padded, _as_numbers(factors), [normalised], rows)
            told = self._group.gather([samples, *(float(n) for n in numbers)])
            told = [each for each in told if each[0]]
            self._compare(seen, told)
            self._warn_of_rows(told)
            self._compare_factors(told)
        elif seen.counts is not None:
            for index, (count, known) in enumerate(zip(own, seen.counts, strict=False)):
                seen.counts[index] = self._left(known, count.number, samples)

    def _compare(self, seen: _Seen, told: list[list[float]]) -> None:
        """Note what is alike on all ranks that have samples."""
        counts: list[_Alike] = []
        for index in range(1, 2 * _MOST_COUNTS, 2):
            found = [each for each in told if not math.isnan(each[index])]
            if not found:
                break
            of = Of(int(found[0][index + 1]))
            pairs = [(each[0], each[index]) for each in found]
            counts.append(
                _right_if(
                    of,
                    _alike([count / samples for samples, count in pairs]),
                    _alike([count for _, count in pairs]),
                )
            )
            if not counts[-1].is_right:
                unit = "counted" if of == Of.STATED else "samples"
                raise BalanceError(_unlike(of, [f"{n:g} for {s:g} {unit}" for s, n in pairs]))
        seen.counts = counts

    def _warn_of_rows(self, told: list[list[float]]) -> None:
        """Warn if all ranks put rows together at one place, as many for each sample.

        Or if all have factors that are normalised over their rows.
        """
        told = [each for each in told if each[0] > 1]  # any number is a multiple of one sample
        if len({each[0] for each in told}) > 1 and all(each[-3] for each in told):
            self._warn(HeterogWarning, _NORMALISED)
            return
        if len({place for *_, place in told}) != 1:
            return
        pairs = [(each[0], each[-2]) for each in told]
        per_sample = _alike([rows / samples for samples, rows in pairs])
        if per_sample is None or is_alike([rows for _, rows in pairs]):
            return  # ranks with equally many samples cannot tell, and a width is alike on all
        rows_told = ", ".join(f"{rows:g} for {samples:g} samples" for samples, rows in pairs)
        self._warn(HeterogWarning, _TOGETHER, rows_told)

    def _compare_factors(self, told: list[list[float]]) -> None:
        """Compare the factors with which ranks add up the terms of a loss."""
        ranks = [(each[0], _as_factors(each[1 + 2 * _MOST_COUNTS : -3])) for each in told]
        if not ranks or not all(factors for _, factors in ranks):
            return
        # On a rank with one sample, what is divided by the samples looks like a penalty.
        several = [each for each in ranks if each[0] > 1]
        numbers, totals = summed(ranks), unlike_totals(several) if several else None
        if numbers is not None:
            raise BalanceError(_SUMMED.format(", ".join(_told(numbers, ranks))))
        if totals is not None and not self._has_warned:
            self._warn(OwnSamplesWarning, _FACTORS, ", ".join(_told(totals, several)))

    def _warn(self, kind: type[HeterogWarning], text: str, told: str = "") -> None:
        self._has_warned = True
        warnings.warn(text.format(told, own=_OWN), kind, stacklevel=6)

    def _left(self, known: _Alike, count: float, samples: float) -> _Alike:
        if known.of == Of.CLASSES:
            return known  # only a comparison of ranks can tell
        before = known.per_sample, known.number
        per_sample, number = (
            each if each is not None and is_alike([each, now]) else None
            for each, now in zip(before, (count / samples, count), strict=True)
        )
        found = _Alike(known.of, per_sample, number)
        if not found.is_right:
            was = f"{before[0]:g} for each sample" if before[0] else f"{before[1]:g}"
            now = f"{count:g} for {samples:g} now"
            raise BalanceError(_unlike(known.of, [f"{was} before", now]))
        return found


def _as_numbers(factors: list[Factor]) -> list[float]:
    """Factors as so many numbers on all ranks: NaN where there are none, or too many."""
    known = [*chain(*factors)] if len(factors) <= MOST_FACTORS else []
    return known + [math.nan] * (2 * MOST_FACTORS - len(known))


def _as_factors(numbers: list[float]) -> list[Factor]:
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [Factor(*pair) for pair in pairs if not math.isnan(pair[0])]


def _told(numbers: list[float], ranks: Ranks) -> list[str]:
    pairs = zip(numbers, ranks, strict=True)
    return [f"{number:.6g} for {samples:g} samples" for number, (samples, _) in pairs]


def _right_if(of: Of, per_sample: float | None, number: float | None) -> _Alike:
    """The alike values that make weights by samples right; the others become ``None``."""
    if of == Of.CLASSES:  # places in a sequence differ, too, but not as samples do
        is_of_samples = number is None and per_sample is not None and per_sample.is_integer()
        return _Alike(of, None, None if is_of_samples else math.inf)
    return _Alike(of, None if of == Of.CURVED else per_sample, None if of == Of.SUM else number)


def _alike(values: list[float]) -> float | None:
    return values[0] if is_alike(values) else None


_UNLIKE = {
    Of.MEAN: "the loss is a mean over elements of which samples have unlike numbers ({}), but it "
    "is weighed by samples. Say over how many, weigh(loss, count=labels.numel()) for labels "
    "without padding, or the sum of the weights of a weighted mean; or pad all batches to one "
    "length, as a Trainer's have to be.",
    Of.STATED: "weigh() got a count that a mean of the loss is not over ({}). Count what it is a "
    "mean over: (labels != -100).sum() for labels that do not count, and (labels[:, 1:] != -100)"
    ".sum() where a causal language model shifts them; weigh terms that are means over something "
    "else alone.",
    Of.SUM: "the loss is a sum over samples, divided by something else than their number ({}), "
    'and a balancer weighs means: give it reduction="mean", or the sum divided by the number of '
    "this rank's samples.",
    Of.CURVED: "the loss is a root, a power or the like of a mean over samples (a mean of {}), "
    "and such losses of ranks' parts do not add up to that of the batch. Weigh the mean itself; "
    "{own}.",
    Of.CLASSES: "a cross entropy has more classes where a rank has more samples ({}): it compares "
    "samples of a batch with each other, and a rank sees its own part only. Compare with all "
    "samples of a queue or a bank that ranks share; {own}.",
}
_TOGETHER = (
    "the loss or the model takes statistics over the samples of a batch, or compares them with "
    "each other ({}), and a rank sees its own part only. heterog check SCRIPT shows whether that "
    "makes other updates. A plan runs such a step as one device does (heterog.deploy); {own}."
)
_NORMALISED = (
    "the factors of the loss's terms are normalised over each rank's own samples (advantages, or "
    "weights divided by their mean), where one process does so over all: take their sums over "
    "ranks (torch.distributed.all_reduce), or for weights weigh((losses * weights).sum() / "
    "weights.sum(), count=weights.sum()); {own}."
)
_SUMMED = (
    "the loss is a sum over samples, or a part of it is (its elements are {}), and a "
    'balancer weighs means: give it reduction="mean", or the sum divided by the number of this '
    "rank's samples. Where weights add up to 1 on each rank, divide after: weigh((losses * "
    "weights).sum() / weights.sum(), count=weights.sum())."
)
_FACTORS = (
    "the factors of the loss's terms add up to unlike numbers on the ranks ({}): where each rank "
    "computes a factor from its own samples (by .item() of a loss), or adds a term if they need "
    "it, one process does so for all of them. Compute it of balancer.mean_loss() or of sums over "
    "ranks, and weigh sums of some samples divided by the number of all; {own}."
)
_OWN = (
    "where each rank shall have its own, say so: weigh(loss, count=len(batch)), or a Trainer's "
    "loss_mean_over='samples'"
)


def _unlike(of: Of, told: list[str]) -> str:
    return _UNLIKE[of].format(", ".join(told), own=_OWN)


def _check(total_weight: Tensor, num_labels: int) -> None:
    total = float(total_weight)
    if not abs(total - num_labels) <= 1e-3 * num_labels:
        raise BalanceError(
            f"the loss is a mean over labels of a total weight of {total:g} (of {num_labels} "
            "labels: some do not count, or classes have weights), but it is weighed by samples. "
            "Give that total, weigh(loss, count=(labels != -100).sum()) for labels that do not "
            "count; all ranks give it."
        )
