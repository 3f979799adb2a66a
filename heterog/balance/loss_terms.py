"""The terms that a loss adds up, and their factors, from the graph of autograd.

A balancer weighs means. If L_r = sum_k a_k x_k is the loss of rank r, with a factor a_k for each
element x_k of its terms, then the sum of all a_k is 1 for a mean, and alike on all ranks for a sum
of means and of penalties on weights. For a sum over samples it grows with them, and where a rank
computes a factor from its own loss (by ``.item()``) it is any number. Terms whose factor is one
over the rank's samples are left out: of those some samples may have none.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heterog.balance.across_samples import inputs_of, maker_of, reduction_of

MOST_FACTORS = 4
"""Most unlike factors of one loss that ranks compare; a loss with more is not compared."""
_MOST_NODES = 4096
_SUM = 2
"""Number of the reduction ``sum`` in ATen."""
_SAME = 1e-5
_KEEPS = (
    *("ToCopy", "Clone", "Alias", "View", "UnsafeView", "Reshape", "Squeeze"),
    *("Unsqueeze", "Transpose", "TBackward", "Permute"),
)
_ADDS = ("AddBackward", "SubBackward", "RsubBackward", "Neg", "Stack", "Cat")
_CHOOSES = ("Minimum", "Maximum", "Clamp", "Where")
_PRODUCTS = ("MulBackward", "DivBackward")
"""Beginnings of names of nodes."""


class Factor(NamedTuple):
    """Elements that a loss adds up with one factor.

    Attributes:
        factor: The factor.
        total: That of all elements together.
    """

    factor: float
    total: float


Ranks = Sequence[tuple[float, Sequence[Factor]]]
"""Samples of each rank, and the factors of its loss."""


def factors_of(loss: Tensor) -> list[Factor]:
    """The factors of the elements that a loss adds up, in the order of its graph.

    There are none for what is summed up of nested tensors, whose elements are not known.

    >>> import torch
    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> factors_of(x.exp().sum() / 3 + 2 * x.square().mean())
    [Factor(factor=2.0, total=2.0), Factor(factor=0.3333333333333333, total=2.0)]
    >>> factors_of(sum(each.exp().mean() for each in x))
    [Factor(factor=1.0, total=3.0)]
    """
    found: dict[float, float] = {}
    waiting: list[tuple[Any, int, float]] = [(*maker_of(loss), 1.0)]
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        node, output, factor = waiting.pop(0)
        below = _below(node, factor)
        if below is None:
            is_sum = reduction_of(node) == _SUM
            number = node._saved_self.numel() if is_sum else _numel(node, output)
            if number is None:
                return []
            key = next((each for each in found if math.isclose(each, factor)), factor)
            found[key] = found.get(key, 0.0) + factor * number
        else:
            waiting += below
    return [] if waiting else [Factor(*each) for each in found.items()]


def is_normalised(loss: Tensor, samples: float) -> bool:
    """Whether factors of a loss's terms, one or more for each sample, are normalised over these.

    Their mean is 0, as that of normalised advantages, or 1, as that of weights divided by their
    mean. Whole numbers (labels) are left out, and factors that are alike for all samples.

    >>> import torch
    >>> x, given = torch.ones(3, 2, requires_grad=True), torch.tensor([[0.5], [1.0], [4.0]])
    >>> [is_normalised(-(x.exp() * each).mean(), 3) for each in (given - given.mean(), given)]
    [True, False]
    >>> is_normalised(torch.minimum(x.exp() * given / given.mean(), x.exp()).mean(), 3)
    True
    """
    waiting: list[tuple[Any, float]] = [(maker_of(loss)[0], 1.0)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return False
        node, factor = waiting.pop(0)
        name = node.name()
        if name.startswith(_PRODUCTS):
            constant = _constant_of(node)
            number = _number(constant)
            if number is None:
                if isinstance(constant, Tensor) and _has_mean_of(constant, samples, factor):
                    return True
                continue
            factor *= (1 / number if number else 0.0) if name.startswith("Div") else number
        elif not name.startswith((*_KEEPS, *_ADDS, *_CHOOSES, "SumBackward", "MeanBackward")):
            continue
        waiting += [(below, factor) for below, _ in inputs_of(node) if below is not None]
    return False


def _has_mean_of(constant: Tensor, samples: float, factor: float) -> bool:
    """Whether unlike rows of a tensor have the mean 0 or, times a factor or not, 1."""
    if not constant.is_floating_point() or constant.is_meta or constant.is_nested:
        return False
    if constant.shape[:1] != (samples,):
        return False
    rows = constant.detach().double().reshape(len(constant), -1).mean(1)
    mean, size = float(rows.mean()), float(rows.abs().mean())
    if not float((rows - mean).abs().max()) > 1e-3 * size or torch.equal(rows, rows.round()):
        return False
    known = (abs(mean) <= _SAME * size, *(is_alike([abs(mean * by), 1.0]) for by in (1, factor)))
    return any(known)


def summed(told: Ranks) -> list[float] | None:
    """Elements of each rank that are summed up with one factor, as many for each sample.

    >>> sums = [(3.0, [Factor(1.0, 3.0)]), (2.0, [Factor(1.0, 2.0)])]
    >>> summed(sums), summed([(n, [Factor(1 / n, 1.0)]) for n, _ in sums])
    ([3.0, 2.0], None)

    Half of a mean over four samples has the factor of a mean over eight:

    >>> means = [(n, [Factor(1 / n, 1.0), Factor(0.5 / n, 0.5)]) for n in (8.0, 4.0)]
    >>> summed(means)
    """
    samples = told[0][0]
    for factor, _ in told[0][1]:
        if _is_of_mean(factor * samples, told):
            continue
        found = [_like(factor, factors) for _, factors in told]
        totals = [each.total for each in found if each is not None]
        if len(totals) == len(told) and not is_alike(totals):
            if is_alike([total / n for total, (n, _) in zip(totals, told, strict=True)]):
                return [total / factor for total in totals]
    return None


def unlike_totals(told: Ranks) -> list[float] | None:
    """What the factors of each rank add up to, if ranks have computed them for themselves.

    Terms that add up to as much on all ranks, as those of mixed samples do, may be drawn.

    >>> unlike_totals([(3.0, [Factor(0.5, 0.5)]), (2.0, [Factor(0.7, 0.7)])])
    [0.5, 0.7]
    """
    totals = [
        sum(each.total for each in factors if not _is_of_mean(each.factor * n, told))
        for n, factors in told
    ]
    return None if is_alike(totals) else totals


def _is_of_mean(part: float, told: Ranks) -> bool:
    """Whether all ranks have a factor that is this part over their samples."""
    return all(_like(part / samples, factors) for samples, factors in told)


def _like(factor: float, factors: Sequence[Factor]) -> Factor | None:
    return next((each for each in factors if is_alike([each.factor, factor])), None)


def is_alike(values: Sequence[float]) -> bool:
    """Whether numbers are the same but for rounding."""
    return all(math.isclose(each, values[0], rel_tol=_SAME, abs_tol=1e-9) for each in values)


def _below(node: Any, factor: float) -> list[tuple[Any, int, float]] | None:
    """What a node adds up, with its factor; ``None`` for an element or for what is not linear."""
    name = node.name()
    by = [1.0] * len(inputs_of(node))
    if name.startswith(_PRODUCTS):
        number = _number(_constant_of(node))
        is_quotient = name.startswith("Div")
        if number is None or (is_quotient and not number):
            return None
        by = [1 / number if is_quotient else number] * len(by)
    elif name.startswith("Mean"):
        (below, output), *_ = inputs_of(node)
        number = _numel(below, output)
        if _numel(node, 0) != 1 or not below.name().startswith("SumBackward1") or not number:
            return None
        by = [1 / number]
    elif name.startswith(("Neg", "Rsub")):
        by[0] = -float(getattr(node, "_saved_alpha", 1))
    elif name.startswith(("AddBackward", "SubBackward")):
        sign = 1.0 if name.startswith("Add") else -1.0
        by[1:] = [sign * float(node._saved_alpha)] * (len(by) - 1)
    elif not name.startswith((*_KEEPS, *_ADDS, "SumBackward")):
        return None
    ends = zip(inputs_of(node), by, strict=True)
    below = ((each, output, factor * part) for (each, output), part in ends if each is not None)
    return [each for each in below if each[-1]]


def _constant_of(node: Any) -> Any:
    """The constant of a product or quotient, or ``None`` if it has none, or is divided itself."""
    ends = [each for each, _ in inputs_of(node)]
    if ends.count(None) != 1:
        return None
    if node.name().startswith("DotBackward"):
        return node._saved_self if ends[0] is None else node._saved_tensor
    if ends[0] is None:
        return None if node.name().startswith("Div") else node._saved_self
    return node._saved_other


def _number(constant: Any) -> float | None:
    if isinstance(constant, Tensor):
        if constant.numel() != 1 or constant.is_meta or constant.is_complex():
            return None
        constant = constant.item()
    is_number = isinstance(constant, int | float) and math.isfinite(constant)
    return float(constant) if is_number else None


def _numel(node: Any, output: int) -> int | None:
    """Number of elements; ``None`` for nested tensors, strided (no shape) or jagged (symbols)."""
    try:
        number = math.prod(node._input_metadata[output].shape)
    except RuntimeError:
        return None
    return number if isinstance(number, int) else None
