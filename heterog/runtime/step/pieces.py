"""Large tensors are stepped piece by piece, so that an optimizer's intermediate results are small.

Adam on a CPU makes two tensors of the size of the one that it steps, and on a GPU one of all that
it steps together. An optimizer that treats each element on its own gives the same numbers if it is
called for each piece; its state stays that of the whole tensor. Pieces that fit into a cache are
also stepped up to three times as fast.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[int | slice, ...]
"""Where a piece lies: an index of the whole tensor."""

_ALIKE = 64
"""Elements that kernels of CPUs take together; fused ones round what is left over otherwise."""


def pieces_of(
    optimizer: torch.optim.Optimizer, whole: nn.Parameter, most_bytes: int
) -> Generator[tuple[nn.Parameter, Place], None, None]:
    """Put each piece of a tensor in its place in the optimizer, for one call of ``step``.

    Args:
        optimizer: One of torch's elementwise optimizers.
        whole: A tensor that it steps; rows of its first dimension lie in a stretch each, whose
            elements lie in any order.
        most_bytes: Most bytes of a piece.

    Yields:
        (piece, its place in the whole tensor).
    """
    group = next(
        each for each in optimizer.param_groups if any(p is whole for p in each["params"])
    )
    members = group["params"]
    before = optimizer.state.get(whole, {})
    after: dict[str, Any] = dict(before)
    try:
        for place in _places(whole.shape, max(most_bytes // whole.element_size(), 1)):
            piece = nn.Parameter(whole.detach()[place])
            if before:
                optimizer.state[piece] = {k: _part(v, whole, place) for k, v in before.items()}
            group["params"] = [piece]
            try:
                yield piece, place
            finally:
                made = optimizer.state.pop(piece, {})
            _keep(after, made, piece, whole, place)
    finally:
        group["params"] = members
        if after:
            optimizer.state[whole] = after


def _places(shape: Sequence[int], most: int) -> Iterator[Place]:
    """Places of pieces with at most some elements, by rows of the first dimensions.

    >>> list(_places((2, 3), 4))
    [(slice(0, 1, None),), (slice(1, 2, None),)]
    >>> list(_places((2, 3), 2))[:2]
    [(0, slice(0, 2, None)), (0, slice(2, 4, None))]
    """
    of_a_row = prod(shape[1:])
    if of_a_row > most:
        for row in range(shape[0]):
            yield from ((row, *place) for place in _places(shape[1:], most))
    else:
        num_rows = most // of_a_row
        num_rows -= num_rows % _ALIKE if num_rows > _ALIKE else 0
        yield from ((slice(begin, begin + num_rows),) for begin in range(0, shape[0], num_rows))


def _is_like(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def _part(value: Any, whole: Tensor, place: Place) -> Any:
    """A piece's state: elements of the whole tensor's, or a counter as it was before the step."""
    if _is_like(value, whole):
        return value[place]
    return value.clone() if isinstance(value, Tensor) else value


def _keep(
    after: dict[str, Any], made: Mapping[str, Any], piece: Tensor, whole: Tensor, place: Place
) -> None:
    """Keep a stepped piece's state as a part of the whole tensor's."""
    for key, value in made.items():
        if not _is_like(value, piece):
            after[key] = value
            continue
        # The first step makes it, and may round what was made before.
        if key not in after or after[key].dtype != value.dtype:
            after[key] = torch.empty_like(whole, dtype=value.dtype)
        own = after[key][place]
        if own.data_ptr() != value.data_ptr():
            own.copy_(value)
