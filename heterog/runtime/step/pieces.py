"""Large tensors are stepped piece by piece, so that an optimizer's intermediate results are small.

Adam on a CPU makes two tensors of the size of the one that it steps, and on a GPU one of all that
it steps together. An optimizer that treats each element on its own gives the same numbers if it is
called for each piece; its state stays that of the whole tensor. Pieces that fit into a cache are
also stepped up to three times as fast.
"""

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def is_cut(optimizer: torch.optim.Optimizer, whole: nn.Parameter, most_bytes: int) -> bool:
    """Whether a tensor is stepped in pieces of at most some bytes, which lie one after another."""
    alike = (each for each in optimizer.state.get(whole, {}).values() if _is_like(each, whole))
    return whole.nbytes > most_bytes and all(each.is_contiguous() for each in (whole, *alike))


def pieces_of(
    optimizer: torch.optim.Optimizer, whole: nn.Parameter, most_bytes: int
) -> Generator[tuple[nn.Parameter, slice], None, None]:
    """Put each piece of a tensor in its place in the optimizer, for one call of ``step``.

    Args:
        optimizer: One of torch's elementwise optimizers.
        whole: A tensor that it steps and that ``is_cut``.
        most_bytes: Most bytes of a piece.

    Yields:
        (piece, its elements in the flattened tensor).
    """
    group = next(
        each for each in optimizer.param_groups if any(p is whole for p in each["params"])
    )
    members, flat = group["params"], whole.detach().view(-1)
    size = max(most_bytes // whole.element_size(), 1)
    before = optimizer.state.get(whole, {})
    after: dict[str, Any] = dict(before)
    try:
        for begin in range(0, len(flat), size):
            part = slice(begin, begin + size)
            piece = nn.Parameter(flat[part])
            if before:
                optimizer.state[piece] = {k: _part(v, whole, part) for k, v in before.items()}
            group["params"] = [piece]
            try:
                yield piece, part
            finally:
                made = optimizer.state.pop(piece, {})
            _keep(after, made, piece, whole, part)
    finally:
        group["params"] = members
        if after:
            optimizer.state[whole] = after


def _is_like(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def _part(value: Any, whole: Tensor, part: slice) -> Any:
    """A piece's state: elements of the whole tensor's, or a counter as it was before the step."""
    if _is_like(value, whole):
        return value.view(-1)[part]
    return value.clone() if isinstance(value, Tensor) else value


def _keep(
    after: dict[str, Any], made: Mapping[str, Any], piece: Tensor, whole: Tensor, part: slice
) -> None:
    """Keep a stepped piece's state as a part of the whole tensor's."""
    for key, value in made.items():
        if not _is_like(value, piece):
            after[key] = value
            continue
        # The first step makes it, and may round what was made before.
        if key not in after or after[key].dtype != value.dtype:
            after[key] = torch.empty_like(whole, dtype=value.dtype)
        own = after[key].view(-1)[part]
        if own.data_ptr() != value.data_ptr():
            own.copy_(value)
