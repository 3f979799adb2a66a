"""Cutting and joining tensors along an axis (the batch, mostly), wherever it lies.

A tensor placed as ``S(dim, outer)`` has ``outer x units x inner`` entries in dimension ``dim``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heterog.graph.placement import Placement


def cut(tensor: Tensor, placement: Placement, total: int, begin: int, count: int) -> Tensor:
    """The part of a tensor that belongs to some consecutive samples.

    Args:
        tensor: holds ``total`` samples.
        placement: where the samples lie.
        total: samples in ``tensor``.
        begin: first wanted sample.
        count: number of wanted samples.

    >>> cut(torch.arange(6), Placement("S"), total=3, begin=1, count=1)
    tensor([2, 3])
    """
    if count == total:
        return tensor
    dim, outer = placement.dim, placement.outer
    inner = tensor.shape[dim] // (outer * total)
    if outer == 1:
        part = tensor.narrow(dim, begin * inner, count * inner)
        # Some kernels (layer norm's backward) read memory as if there were no strides.
        return part.contiguous() if tensor.is_contiguous() else part
    shape = tensor.shape
    apart = tensor.reshape(*shape[:dim], outer, total * inner, *shape[dim + 1 :])
    part = apart.narrow(dim + 1, begin * inner, count * inner)
    return part.reshape(*shape[:dim], outer * count * inner, *shape[dim + 1 :])


def join(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Put parts with consecutive samples together: the inverse of ``cut``."""
    dim, outer = placement.dim, placement.outer
    if len(parts) == 1:
        return parts[0]
    if outer == 1:
        return torch.cat(list(parts), dim)
    apart = [part.reshape(*part.shape[:dim], outer, -1, *part.shape[dim + 1 :]) for part in parts]
    whole = torch.cat(apart, dim + 1)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])
