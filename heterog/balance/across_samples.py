"""Finds losses that take statistics over samples, or compare them, from the graph of autograd.

The loss of a batch is a mean of its samples' own losses if no nonlinear function comes after a sum
over samples. A variance, a maximum or a softmax over samples is such a function by itself, and so
is a table of products of samples with each other. A rank would compute all of these over its own
samples only. Batch norms have nodes of their own and are not meant.

Only shapes are read here, no saved tensors: those of checkpointed layers would be computed again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

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
    places = {node: place for place, node in enumerate(_nodes(maker_of(loss)[0]))}
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
        made = _shape(node, 0)
        made = made[1:] if made[:1] == (1,) else made  # of einsum
        if len(made) == 2 and made[0] == made[1]:
            yield made[0]
    if name.startswith(_SHIFTS) and 0 in node._saved_dims:
        yield _shape(node, 0)[0]
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
    shape = _shape(below, output)
    dims = getattr(node, "_saved_dim", None)
    dims = dims if isinstance(dims, tuple | list) else () if dims is None else (dims,)
    first = (0, -len(shape), 2**64 - len(shape))  # negative numbers are kept without their sign
    if shape and (not dims or any(each in first for each in dims)):
        yield shape[0]


def _shape(node: Any, output: int) -> tuple[int, ...]:
    """Shape of what the forward pass of a node made; empty for strided nested tensors."""
    try:
        return tuple(node._input_metadata[output].shape)
    except RuntimeError:  # they have none
        return ()


def _factors(name: str, below: list[Any], samples: float) -> Iterator[tuple[Any, bool]]:
    """The factors of a product, and whether it is nonlinear in each: as both sum over samples."""
    sums = [set(_sums_below(each, samples)) for each in below]
    both = len(below) == 2 and bool(sums[0] & sums[1])
    for place, each in enumerate(below):
        yield each, both or (place == 1 and name.startswith("Div"))


def _sums_below(node: Any, samples: float) -> Iterator[int]:
    """Numbers of rows over which sums below a node go."""
    for each in _nodes(node):
        if _is_sum(each):
            yield from (rows for rows in _first_rows(each) if rows % samples == 0)


def _nodes(node: Any) -> Iterator[Any]:
    """A node and those below it, each once, in an order that only the graph gives."""
    waiting, seen = [node], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        yield each
        waiting += [below for below, _ in inputs_of(each)]
