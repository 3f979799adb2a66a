"""Functions of torch that mix samples only in memory, as ops that keep each sample apart.

Torch computes some functions by ways that no rule can split, though each sample's result depends
on that sample alone. While a step is captured they are computed by other ops, with the same
numbers:

- A mean over all places (``AdaptiveAvgPool2d(1)``) of images whose channels are last is followed
  by a view by strides in memory, and so is the first step of ``torch.stft``.
- ``masked_scatter`` writes rows to the places of a mask, in order over the whole batch. Models of
  images and text write the features of images into a text in this way. The step checks that all
  samples have equally many places, and each then gets rows of its own.
- ``bincount`` is as long as the largest value says. Where its caller says that no value is as
  large as ``minlength``, which the step checks, it is a sum over samples.
- A list of the samples that is joined again (``torch.cat(list(features))``) is the tensor itself.
"""

import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from heterog.graph.value_checks import check_all

_Function = Callable[..., Any]


def _mean_of_all(function: _Function, num_dims: int) -> _Function:
    """An adaptive average pool over one or two dimensions, as a mean if it makes one value."""

    @functools.wraps(function)
    def pool(input: Tensor, output_size: Any) -> Tensor:
        sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
        if set(sizes) != {1}:
            result: Tensor = function(input, output_size)
            return result
        image = input.unsqueeze(-2) if num_dims == 1 else input
        mean = image.mean((-1, -2), keepdim=True)
        return mean.squeeze(-2) if num_dims == 1 else mean

    return pool


def _by_frames(function: _Function, _: object) -> _Function:
    """``torch.stft`` of a signal that is padded already, by frames from ``unfold``."""

    @functools.wraps(function)
    def stft(
        input: Tensor,
        n_fft: int,
        hop_length: int | None,
        win_length: int | None,
        window: Tensor | None,
        normalized: bool,
        onesided: bool | None,
        return_complex: bool | None,
        align_to_window: bool | None = None,
    ) -> Any:
        length = win_length or n_fft
        if return_complex is None or align_to_window or input.shape[-1] < n_fft:
            return function(
                input, n_fft, hop_length, win_length, window, normalized, onesided,
                return_complex, align_to_window,
            )  # fmt: skip
        frames = input.unfold(-1, n_fft, hop_length or n_fft // 4)
        if window is None and length < n_fft:
            window = torch.ones(length, dtype=input.dtype, device=input.device)
        if window is not None:
            before = (n_fft - length) // 2
            frames = frames * functional.pad(window, (before, n_fft - length - before))
        norm = "ortho" if normalized else "backward"
        if onesided is not False and not frames.is_complex():
            waves = torch.fft.rfft(frames, norm=norm)
        else:
            waves = torch.fft.fft(frames, norm=norm)
        waves = waves.transpose(-1, -2)
        return waves if return_complex else torch.view_as_real(waves)

    return stft


_UNEVEN = (
    "masked_scatter writes another number of rows into one sample of the batch than into the "
    "others; its step was captured for samples with equally many. Give all samples as many "
    "places in the mask (images, say), or write the rows with torch.where"
)


def _own_rows(function: _Function, _: object) -> _Function:
    """``masked_scatter`` of rows, of which every sample has its own."""

    @functools.wraps(function)
    def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        num_rows = _rows_of_sample(self, mask, source)
        if not num_rows:
            result: Tensor = function(self, mask, source)
            return result
        (samples, _, width), chosen = self.shape, mask[..., 0]
        check_all(chosen.sum(1) == num_rows, _UNEVEN)
        places = (chosen.long().cumsum(1) - 1).clamp(0, num_rows - 1)
        rows = source.reshape(samples, num_rows, width)
        written = rows.gather(1, places[..., None].expand(-1, -1, width))
        return torch.where(chosen[..., None], written, self)

    return masked_scatter


def _rows_of_sample(self: Tensor, mask: Tensor, source: Tensor) -> int:
    """Number of rows of a sample that are written to ``[samples, places, width]``, or 0."""
    if self.dim() != 3 or mask.dim() != 3 or mask.shape[:2] != self.shape[:2]:
        return 0
    if not isinstance(mask, FakeTensor) or (mask.shape[2] > 1 and mask.stride(2)):
        return 0
    samples, num_places, width = self.shape
    is_of_rows = source.dim() > 1 and source.shape[-1] == width and self.dtype == source.dtype
    num_rows, rest = divmod(source.numel(), max(samples * width, 1))
    return num_rows if is_of_rows and not rest and num_rows < num_places else 0


_TOO_LARGE = (
    "torch.bincount met a value that is not below its minlength; its step was captured for counts "
    "of minlength values. Give a minlength that is above all values"
)


def _counts(function: _Function, _: object) -> _Function:
    """``bincount`` of values below ``minlength``, by adding at their places."""

    @functools.wraps(function)
    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not isinstance(input, FakeTensor) or not minlength:
            result: Tensor = function(input, weights, minlength)
            return result
        check_all(input < minlength, _TOO_LARGE)
        added = torch.ones_like(input, dtype=torch.int64) if weights is None else weights.detach()
        if added.dtype not in (torch.int64, torch.float32):
            added = added.double()
        return added.new_zeros(minlength).index_add(0, input.long(), added)

    return bincount


class _Piece(NamedTuple):
    """A tensor is one of those that a tensor falls into along its first dimension."""

    of: Tensor
    number: int


_PIECE = "_heterog_piece"


def _marked(function: _Function, _: object) -> _Function:
    """``unbind`` whose results are marked as pieces."""

    @functools.wraps(function)
    def unbind(self: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = function(self, dim)
        if isinstance(self, FakeTensor) and dim == 0:
            for number, piece in enumerate(pieces):
                setattr(piece, _PIECE, _Piece(self, number))
        return pieces

    return unbind


def _whole_again(function: _Function, is_stack: object) -> _Function:
    """``cat`` or ``stack``, which is the tensor itself (or flattened) of all its pieces."""

    @functools.wraps(function)
    def join(tensors: Sequence[Tensor], *args: Any, **keywords: Any) -> Tensor:
        pieces: list[_Piece | None] = [getattr(each, _PIECE, None) for each in tensors]
        first = pieces[0] if pieces else None
        is_along_first = all(
            type(each) is int and not each for each in (*args, *keywords.values())
        )
        if first is not None and is_along_first and first.of.dim() > 1:
            numbers = [each.number for each in pieces if each and each.of is first.of]
            if numbers == list(range(len(first.of))):
                whole = first.of if is_stack else first.of.flatten(0, 1)
                return whole.clone(memory_format=torch.contiguous_format)
        result: Tensor = function(tensors, *args, **keywords)
        return result

    return join


INSTEAD: MappingProxyType[tuple[Any, str], tuple[Callable[..., _Function], Any]] = (
    MappingProxyType(
        {
            (functional, "adaptive_avg_pool1d"): (_mean_of_all, 1),
            (torch, "adaptive_avg_pool1d"): (_mean_of_all, 1),
            (torch._C._nn, "adaptive_avg_pool2d"): (_mean_of_all, 2),
            (torch._VF, "stft"): (_by_frames, None),
            (Tensor, "masked_scatter"): (_own_rows, None),
            (torch, "masked_scatter"): (_own_rows, None),
            (Tensor, "bincount"): (_counts, None),
            (torch, "bincount"): (_counts, None),
            (Tensor, "unbind"): (_marked, None),
            (torch, "unbind"): (_marked, None),
            (torch, "cat"): (_whole_again, False),
            (torch, "stack"): (_whole_again, True),
        }
    )
)
"""Functions by owner and name, with what wraps them and what that is told."""
