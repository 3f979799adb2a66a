"""Functions of torch that mix samples only in memory, as ops that keep each sample apart.

Torch computes some functions by ways that no rule can split, though each sample's result depends
on that sample alone: a mean over all places (``AdaptiveAvgPool2d(1)``) of images whose channels
are last is followed by a view by strides in memory, and so is the first step of ``torch.stft``.
While a step is captured they are computed by other ops, with the same numbers. So is ``bincount``,
which is as long as the largest value says: where its caller says that no value is as large as
``minlength``, which the step checks, it is a sum over samples.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from heterog.graph.value_checks import Wrapped, check_all

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
        length = n_fft if win_length is None else win_length
        is_odd = hop_length == 0 or not 0 < length <= n_fft or input.shape[-1] < n_fft
        is_odd |= window is not None and window.shape != (length,)
        has_complex = input.is_complex() or (window is not None and window.is_complex())
        is_odd |= onesided is True and has_complex
        if is_odd or return_complex is None or align_to_window:  # refused by torch, or deprecated
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


INSTEAD: Wrapped = (
    (functional, "adaptive_avg_pool1d", _mean_of_all, 1),
    (torch, "adaptive_avg_pool1d", _mean_of_all, 1),
    (torch._C._nn, "adaptive_avg_pool2d", _mean_of_all, 2),
    (torch._VF, "stft", _by_frames, None),
    (Tensor, "bincount", _counts, None),
    (torch, "bincount", _counts, None),
)
"""Functions by owner and name, with what wraps them and what that is told."""
