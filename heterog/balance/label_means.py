"""Finds losses that are no means over samples, by autograd's record.

A loss that is weighed by samples has to be a mean over samples. ``cross_entropy`` with labels that
do not count (``ignore_index``), or with class weights, is a mean over something else, and what its
backward pass keeps tells so: the total weight that the sum was divided by. A sum that nothing
divides is no mean either.

A mean over the tokens of padded sequences is one over samples only while all samples of a batch
are equally long. Let rank r's mean be over n_r elements of its s_r samples. The weights s_r are
right if n_r / s_r is the same everywhere, or if n_r does not depend on the samples at all.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heterog.balance.group import RankGroup
from heterog.balance.shares import BalanceError

_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_NONE, _MEAN, _SUM = 0, 1, 2
"""Numbers of no reduction, a mean and a sum in ATen (``at::Reduction``)."""
_MOST_NODES = 64
"""Nodes of the graph that are looked at: a loss is a few sums and factors away from its end."""
_MOST_MEANS = 4
"""Means of one loss that ranks compare: a loss and a few that are added to it."""
_MOST_LOSSES = 4
"""Losses of one step that are looked at: those of further ones are closures called again."""
_EVERY = 64


def check_mean_over_samples(loss: Tensor, samples: float) -> None:
    """Check that near the end of a loss is no sum, and no mean over some labels only.

    Args:
        loss: Loss that is about to be weighed by the number of samples.
        samples: That number.

    Raises:
        BalanceError: one is; says what to give.
    """
    if any(_is_sum(term, samples) for term in _terms(loss)):
        raise BalanceError(
            "the loss is a sum over samples, and a balancer weighs means: give it "
            'reduction="mean", or the sum divided by the number of this rank\'s samples. Where '
            "the update shall be that of a sum, multiply the mean by balancer.global_batch_size."
        )
    for node in _last_nodes(loss):
        if node.name() in _CROSS_ENTROPIES and node._saved_reduction == _MEAN:
            _check(node._saved_total_weight, node._saved_target.numel())


def counts_of(loss: Tensor) -> list[float]:
    """Numbers of elements that the last means of a loss are over.

    >>> import torch
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> counts_of(x.mean()), counts_of(x.sum() / 2 + x.mean(1).mean())
    ([6.0], [2.0, 2.0])
    """
    return [count for node in _last_nodes(loss) if (count := _count_of(node)) is not None]


def _terms(loss: Tensor) -> Iterator[Any]:
    """Nodes of autograd that a loss is a sum or a difference of."""
    return (node for node in _nodes(loss, _adds) if not _adds(node))


def _adds(node: Any) -> bool:
    """Whether a node is a sum, a difference or a change of sign."""
    found: bool = node.name().startswith(("AddBackward", "SubBackward", "Neg"))
    return found


def _is_sum(node: Any, samples: float) -> bool:
    """Whether a node is the sum of a loss over all samples, as far as that is certain."""
    if node.name() != "SumBackward0":
        return getattr(node, "_saved_reduction", None) == _SUM
    below = node.next_functions[0][0]
    if getattr(below, "_saved_reduction", None) == _NONE:
        return True
    sizes = node._saved_self_sym_sizes
    is_of_samples = len(sizes) > 0 and sizes[0] == samples
    return is_of_samples and below.name().startswith(("PowBackward", "AbsBackward"))


def _last_nodes(loss: Tensor) -> Iterator[Any]:
    """Nodes of autograd near the end of a loss, but none that is before a mean."""
    return _nodes(loss, lambda node: not _is_mean(node))


def _nodes(loss: Tensor, goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """Nodes of autograd from the end of a loss; what is before a node only where it goes on."""
    waiting: list[Any] = [loss.grad_fn]
    seen = 0
    while waiting and seen < _MOST_NODES:
        node = waiting.pop(0)
        seen += 1
        if node is None:
            continue
        yield node
        if goes_on(node):
            waiting += [each for each, _ in node.next_functions]


def _is_mean(node: Any) -> bool:
    """Whether a node is the mean of all elements of something."""
    if node.name() == "MeanBackward1":
        return len(node._saved_dim) in (0, len(node._saved_self_sym_sizes))
    return node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == _MEAN


def _count_of(node: Any) -> float | None:
    if _is_mean(node):
        known = getattr(node, "_saved_self_sym_numel", None)
        if known is None:
            of = node._saved_target if node.name() in _CROSS_ENTROPIES else node._saved_self
            known = of.numel()
        return float(known)
    if not node.name().startswith("DivBackward"):
        return None
    other = node._saved_other
    if isinstance(other, Tensor) and (other.dim() or other.is_complex() or other.is_meta):
        return None
    divisor = float(other) if isinstance(other, Tensor | int | float) else math.nan
    return divisor if divisor >= 1 and divisor.is_integer() else None  # else it counts nothing


@dataclass(slots=True)
class _Seen:
    """What one loss of a step was a mean over so far.

    Attributes:
        num_calls: How often it was weighed.
        means: For each mean, what was alike on all ranks: elements of a sample, and elements.
    """

    num_calls: int = 0
    means: list[tuple[float | None, float | None]] | None = None


class MeanCounts:
    """Compares what losses are means over: among ranks now and then, with the first ones always.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._seen: dict[int, _Seen] = defaultdict(_Seen)

    def check(self, loss: Tensor, samples: float, place: int, *, looks: bool, part: bool) -> None:
        """Check a loss that is about to be weighed by samples; all ranks call it alike.

        Args:
            loss: The loss.
            samples: Number of this rank's samples.
            place: Number of losses of this step that were weighed before.
            looks: Whether to look at this loss where ranks compare nothing.
            part: Whether it is one of further parts of a batch, of which ranks have unlike many.

        Raises:
            BalanceError: it is a mean over elements of which samples have unlike numbers.
        """
        if place >= _MOST_LOSSES and not part:
            return
        seen = self._seen[0 if part else place]
        seen.num_calls += not part
        number = seen.num_calls
        compares = not part and (number & (number - 1) == 0 or number % _EVERY == 0)
        own = counts_of(loss)[:_MOST_MEANS] if samples and (looks or compares) else []
        if compares:
            padded = [*own, *(math.nan for _ in range(_MOST_MEANS - len(own)))]
            told = self._group.gather([samples, *padded])
            self._compare(seen, [each for each in told if each[0]])
        elif seen.means is not None:
            for index, (count, known) in enumerate(zip(own, seen.means, strict=False)):
                seen.means[index] = self._left(known, count, samples)

    def _compare(self, seen: _Seen, told: list[list[float]]) -> None:
        """Note what is alike on all ranks that have samples."""
        means: list[tuple[float | None, float | None]] = []
        for index in range(1, _MOST_MEANS + 1):
            pairs = [(each[0], each[index]) for each in told if not math.isnan(each[index])]
            if not pairs:
                break
            per_sample = _alike([count / samples for samples, count in pairs])
            means.append((per_sample, _alike([count for _, count in pairs])))
            if means[-1] == (None, None):
                raise BalanceError(_unlike([f"{n:g} for {s:g} samples" for s, n in pairs]))
        seen.means = means

    def _left(
        self, known: tuple[float | None, float | None], count: float, samples: float
    ) -> tuple[float | None, float | None]:
        per_sample, alike = known
        found = (
            per_sample if per_sample == count / samples else None,
            alike if alike == count else None,
        )
        if found == (None, None):
            before = f"{per_sample:g} for each sample" if per_sample else f"{alike:g}"
            raise BalanceError(_unlike([f"{before} before", f"{count:g} for {samples:g} now"]))
        return found


def _alike(values: list[float]) -> float | None:
    return values[0] if all(each == values[0] for each in values) else None


def _unlike(told: list[str]) -> str:
    return (
        "the loss is a mean over elements of which samples have unlike numbers "
        f"({', '.join(told)}), but it is weighed by samples. Say over how many, weigh(loss, "
        "count=labels.numel()) for labels without padding; or pad all batches to one length, as a "
        "Trainer's have to be."
    )


def _check(total_weight: Tensor, num_labels: int) -> None:
    total = float(total_weight)
    if abs(total - num_labels) > 1e-3 * num_labels:
        raise BalanceError(
            f"the loss is a mean over labels of a total weight of {total:g} (of {num_labels} "
            "labels: some do not count, or classes have weights), but it is weighed by samples. "
            "Give that total, weigh(loss, count=(labels != -100).sum()) for labels that do not "
            "count; all ranks give it."
        )
