"""Cutting and joining tensors along an axis (mostly the batch), in whichever dimension it lies.

A tensor placed as ``S(dim, outer)`` has ``outer x units x inner`` entries in dimension ``dim``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heterog.graph.placement import Placement


def cut(tensor: Tensor, placement: Placement, total: int, begin: int, count: int) -> Tensor:
    """The part of a tensor that belongs to some consecutive samples.

    Args:
        tensor: A tensor that holds ``total`` samples.
        placement: Position of the samples in it.
        total: Number of samples in ``tensor``.
        begin: First wanted sample.
        count: Number of wanted samples.

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


def put(tensor: Tensor, placement: Placement, total: int, begin: int, part: Tensor) -> None:
    """Write some consecutive samples, in place, to the position that ``cut`` reads.

    >>> whole = torch.zeros(6)
    >>> put(whole, Placement("S"), total=3, begin=1, part=torch.ones(2))
    >>> whole
    tensor([0., 0., 1., 1., 0., 0.])
    """
    dim, outer = placement.dim, placement.outer
    inner = tensor.shape[dim] // (outer * total)
    count = part.shape[dim] // (outer * inner)
    shape = tensor.shape
    apart = tensor.view(*shape[:dim], outer, total * inner, *shape[dim + 1 :])
    own = apart.narrow(dim + 1, begin * inner, count * inner)
    own.copy_(part.reshape(own.shape))


def nested(place: Placement, other: Placement, total: int, count: int) -> Placement:
    """Placement of units in a tensor that holds only a part of another axis.

    Args:
        place: Placement of the units in the whole tensor.
        other: Placement of the units of the other axis.
        total: Units of the other axis in the whole tensor.
        count: Units of the other axis in the part.

    >>> from heterog.graph.placement import S
    >>> nested(S(0, 8), S(0), total=8, count=2)  # positions inside samples, in one dimension
    Placement(kind='S', dim=0, outer=2)
    """
    around = other.outer * total
    if place.kind != "S" or other.kind != "S" or place.dim != other.dim or place.outer % around:
        return place
    return Placement("S", place.dim, place.outer // total * count)


def join(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Join parts with consecutive samples: the inverse of ``cut``."""
    dim, outer = placement.dim, placement.outer
    if len(parts) == 1:
        return parts[0]
    if outer == 1:
        return torch.cat(list(parts), dim)
    apart = [part.reshape(*part.shape[:dim], outer, -1, *part.shape[dim + 1 :]) for part in parts]
    whole = torch.cat(apart, dim + 1)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])
