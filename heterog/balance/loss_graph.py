"""What the graph of autograd says of a loss: statistics over samples, and factors of its terms.

**Statistics.** The loss of a batch is a mean of its samples' own losses if no nonlinear function
comes after a sum over samples. A variance, a maximum or a softmax over samples is such a function
by itself, and so is a table of products of samples with each other. A rank would compute all of
these over its own samples only (``rows_together``). Batch norms have nodes of their own and are
not meant. Only shapes are read for this, no saved tensors: those of checkpointed layers would be
computed again.

**Factors.** A balancer weighs means. If L_r = sum_k a_k x_k is the loss of rank r, with a factor
a_k for each element x_k of its terms, then the sum of all a_k is 1 for a mean, and alike on all
ranks for a sum of means and of penalties on weights. For a sum over samples it grows with them,
and where a rank computes a factor from its own loss (by ``.item()``) it is any number. Terms whose
factor is one over the rank's samples are left out: of those some samples may have none.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SUMS = ("SumBackward", "MeanBackward", "DotBackward", "MmBackward")
_STATISTICS = (
    *("StdBackward", "StdMean", "VarBackward", "VarMean", "LinalgVectorNorm", "NormBackward"),
    *("MaxBackward", "MinBackward", "Amax", "Amin", "Median", "Topk", "Kthvalue", "Sort", "Prod"),
    *("Softmax", "LogSoftmax", "Logsumexp", "Cumsum", "Logcumsumexp", "Cummax", "Cummin"),
)
_EXTREMES = ("MaxBackward", "MinBackward", "Amax", "Amin")
_TABLES = ("MmBackward", "BmmBackward", "Cdist")
_SHIFTS = ("RollBackward", "FlipBackward")
_PRODUCTS = ("MulBackward", "DivBackward")
_LINEAR = (
    *("Add", "Sub", "Rsub", "NanToNum", "Neg", "Sum", "Mean"),
    *("ToCopy", "Clone", "Alias", "_DDPSink", "Where"),
    *("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "TBackward"),
    *("Expand", "Repeat", "Select", "Slice", "Split", "Unbind", "Stack", "Cat", "Index", "Gather"),
    *("Permute", "MaskedFill", "Diagonal", "Trace", "Clamp"),  # most clamps are only guards
)
"""Beginnings of names of nodes."""
NONE, MEAN, SUM = 0, 1, 2
"""Numbers of no reduction, a mean and a sum in ATen (``at::Reduction``)."""
_MOST_NODES = 50_000


class RowsTogether(NamedTuple):
    """Rows that a node of a graph puts together.

    Attributes:
        number: How many.
        place: Number of the node, alike on all ranks that compute alike.
    """

    number: int
    place: int


def inputs_of(node: Any) -> list[tuple[Any, int]]:
    """The nodes below a node, each with the number of its output; ``None`` for a constant.

    DistributedDataParallel puts one node below all outputs of a model: each has its own input.
    """
    return [_without_sink(*each) for each in node.next_functions]


def maker_of(loss: Tensor) -> tuple[Any, int]:
    """The node that has made a loss, and the number of its output."""
    return _without_sink(loss.grad_fn, loss.output_nr)


def _without_sink(node: Any, output: int) -> tuple[Any, int]:
    while node is not None and node.name() == "_DDPSinkBackward":
        node, output = node.next_functions[output]
    return node, output


def reduction_of(node: Any) -> int | None:
    """ATen's number of a loss's reduction; ``None`` for other nodes, as of a loss's gradient."""
    is_gradient = "BackwardBackward" in node.name()
    return None if is_gradient else getattr(node, "_saved_reduction", None)


def rows_together(loss: Tensor, samples: float) -> RowsTogether | None:
    """Rows of samples over which a loss is no mean of the samples' own losses.

    A parameter may have as many rows by chance: only ranks with unlike many samples can tell. At
    one place of the graph it has as many on all of them, so rows at unlike places tell nothing.
    Of several this is the least number, which has the fewest rows for each sample.

    Args:
        loss: The loss of a rank's samples.
        samples: Number of them.

    >>> import torch
    >>> x = torch.ones(4, 3, requires_grad=True)
    >>> rows_together(x.exp().mean(1).sum(), 4)
    >>> rows_together(x.std(0).sum(), 4)
    RowsTogether(number=4, place=1)
    >>> rows_together(x.mean() * x.exp().mean(), 4).number
    4
    >>> rows_together((x @ x.T).exp().mean(), 4).number
    4
    """
    places = {node: place for place, node in enumerate(nodes_below(maker_of(loss)[0]))}
    waiting: list[tuple[Any, bool]] = [(maker_of(loss)[0], False)]
    seen: dict[Any, bool] = {}
    found: set[RowsTogether] = set()
    while waiting:
        node, is_curved = waiting.pop()
        if node not in places or seen.get(node) in (True, is_curved):
            continue
        seen[node] = is_curved
        numbers = _rows_of(node, is_curved=is_curved)
        found |= {
            RowsTogether(number, places[node]) for number in numbers if number % samples == 0
        }
        name = node.name()
        below = [each for each, _ in inputs_of(node)]
        if name.startswith(_PRODUCTS) and not is_curved:
            waiting += _factors(name, below, samples)
        else:
            waiting += [(each, is_curved or not name.startswith(_LINEAR)) for each in below]
    return min(found, default=None)


def _rows_of(node: Any, *, is_curved: bool) -> Iterator[int]:
    """Numbers of rows that a node puts together in a way that is no mean."""
    name = node.name()
    if name.startswith(_TABLES):
        made = _shape(node, 0) or ()
        made = made[1:] if made[:1] == (1,) else made  # of einsum
        if len(made) == 2 and made[0] == made[1]:
            yield made[0]
    if name.startswith(_SHIFTS) and 0 in node._saved_dims:
        yield from (_shape(node, 0) or ())[:1]
    if name.startswith(_EXTREMES) and is_curved and getattr(node, "_saved_dim", ()) == ():
        return  # of all elements: one number, mostly taken off before exp() and of no effect
    if name.startswith(_STATISTICS) or (is_curved and _is_sum(node)):
        yield from _first_rows(node)


def _is_sum(node: Any) -> bool:
    return node.name().startswith(_SUMS) or bool(reduction_of(node))


def _first_rows(node: Any) -> Iterator[int]:
    """Rows that a node sums over; none if it does not sum over the first dimension."""
    below, output = next((each for each in inputs_of(node) if each[0]), (None, 0))
    if below is None:
        return
    if node.name().startswith("MmBackward"):
        sizes = node._saved_self_sym_sizes or node._saved_mat2_sym_sizes[:1]
        yield int(sizes[-1])
        return
    shape = _shape(below, output) or ()
    dims = getattr(node, "_saved_dim", None)
    dims = dims if isinstance(dims, tuple | list) else () if dims is None else (dims,)
    first = (0, -len(shape), 2**64 - len(shape))  # negative numbers are kept without their sign
    if shape and (not dims or any(each in first for each in dims)):
        yield shape[0]


def _shape(node: Any, output: int) -> tuple[int, ...] | None:
    """Shape of what the forward pass of a node made; ``None`` for strided nested tensors."""
    try:
        return tuple(node._input_metadata[output].shape)
    except RuntimeError:  # they have none
        return None


def _factors(name: str, below: list[Any], samples: float) -> Iterator[tuple[Any, bool]]:
    """The factors of a product, and whether it is nonlinear in each: as both sum over samples."""
    sums = [set(_sums_below(each, samples)) for each in below]
    both = len(below) == 2 and bool(sums[0] & sums[1])
    for place, each in enumerate(below):
        yield each, both or (place == 1 and name.startswith("Div"))


def _sums_below(node: Any, samples: float) -> Iterator[int]:
    """Numbers of rows over which sums below a node go."""
    for each in nodes_below(node):
        if _is_sum(each):
            yield from (rows for rows in _first_rows(each) if rows % samples == 0)


def nodes_below(node: Any) -> Iterator[Any]:
    """A node and those below it, each once, in an order that only the graph gives."""
    waiting, seen = [node], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        yield each
        waiting += [below for below, _ in inputs_of(each)]


# --- factors ---------------------------------------------------------------------------------


MOST_FACTORS = 4
"""Most unlike factors of one loss that ranks compare; a loss with more is not compared."""
_MOST_TERMS = 4096
_SAME = 1e-5
"""Largest relative difference of alike numbers: weights are sums, which round."""
_KEEPS = (
    *("ToCopy", "Clone", "Alias", "View", "UnsafeView", "Reshape", "Squeeze"),
    *("Unsqueeze", "Transpose", "TBackward", "Permute"),
)
_ADDS = ("AddBackward", "SubBackward", "RsubBackward", "Neg", "Stack", "Cat")
_CHOOSES = ("Minimum", "Maximum", "Clamp", "Where")
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
    for _ in range(_MOST_TERMS):
        if not waiting:
            break
        node, output, factor = waiting.pop(0)
        below = _below(node, factor)
        if below is None:
            is_sum = reduction_of(node) == SUM
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
    waiting: list[tuple[Any, int, float]] = [(*maker_of(loss), 1.0)]
    for _ in range(_MOST_TERMS):
        if not waiting:
            return False
        node, _, factor = waiting.pop(0)
        constant = constant_of(node) if node.name().startswith(_PRODUCTS) else None
        if isinstance(constant, Tensor) and _has_mean_of(constant, samples, factor):
            return True
        if node.name().startswith((*_CHOOSES, "MeanBackward")):
            waiting += [(*each, factor) for each in inputs_of(node) if each[0] is not None]
        else:
            waiting += _below(node, factor) or []
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
        number = number_of(constant_of(node), most_dims=math.inf)
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
        by[1:] = [sign * float(getattr(node, "_saved_alpha", 1))] * (len(by) - 1)
    elif not name.startswith((*_KEEPS, *_ADDS, "SumBackward")):
        return None
    ends = zip(inputs_of(node), by, strict=True)
    below = ((each, output, factor * part) for (each, output), part in ends if each is not None)
    return [each for each in below if each[-1]]


def constant_of(node: Any) -> Any:
    """The constant of a product or quotient, or ``None`` if it has none, or is divided itself."""
    ends = [each for each, _ in inputs_of(node)]
    if ends.count(None) != 1:
        return None
    if node.name().startswith("DotBackward"):
        return node._saved_self if ends[0] is None else node._saved_tensor
    if ends[0] is None:
        return None if node.name().startswith("Div") else node._saved_self
    return node._saved_other


def number_of(constant: Any, most_dims: float = 0) -> float | None:
    """The value of a finite number, or of a tensor with one element.

    Args:
        constant: The number or tensor.
        most_dims: Most dimensions of the tensor: with one, its element may be that of a sample.
    """
    if isinstance(constant, Tensor):
        is_one = constant.numel() == 1 and constant.dim() <= most_dims
        if not is_one or constant.is_meta or constant.is_complex():
            return None
        constant = constant.item()
    is_number = isinstance(constant, int | float) and math.isfinite(constant)
    return float(constant) if is_number else None


def _numel(node: Any, output: int) -> int | None:
    """Number of elements; ``None`` for nested tensors, strided (no shape) or jagged (symbols)."""
    shape = _shape(node, output)
    number = None if shape is None else math.prod(shape)
    return number if isinstance(number, int) else None
