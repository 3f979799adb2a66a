"""A step as one process runs it, whatever process group there is while it is captured.

A plan is made where there is no process group, but ranks capture its step where there is one. Code
that asks for it (gathered embeddings of a contrastive loss, statistics that are summed over ranks)
is given the answer of one process, which has the whole batch. ``nn.SyncBatchNorm`` then normalises
by the statistics of the whole batch, in ops that a plan splits.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from heterog.graph.static_shapes import everywhere


@contextmanager
def as_one_process() -> Iterator[None]:
    """Make this thread's code see no process group."""
    if not dist.is_available():
        yield
        return
    asked: Callable[[], bool] = dist.is_initialized
    thread = threading.get_ident()

    def is_initialized() -> bool:
        return threading.get_ident() != thread and asked()

    with ExitStack() as stack:
        stack.enter_context(everywhere({asked: is_initialized}))
        stack.enter_context(mock.patch.object(nn.SyncBatchNorm, "forward", whole_batch_norm))
        yield


def whole_batch_norm(norm: _BatchNorm, input: Tensor) -> Tensor:
    """Normalise by mean and variance over everything but the channels, dimension 1.

    They are written as sums, which are added up over devices like any other sum. The running
    statistics are those of the whole batch, too.
    """
    norm._check_input_dim(input)  # type: ignore[no-untyped-call]
    if not norm.training and norm.running_mean is not None:
        return functional.batch_norm(
            input, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
    dims = [0, *range(2, input.dim())]
    mean = input.mean(dims, keepdim=True)
    centred = input - mean
    variance = (centred * centred).mean(dims, keepdim=True)
    if norm.training and norm.running_mean is not None:
        _keep(norm, mean.detach(), variance.detach(), input.numel() // input.shape[1])
    normalised = centred * torch.rsqrt(variance + norm.eps)
    if not norm.affine:
        return normalised
    shape = [1, -1, *[1] * (input.dim() - 2)]
    return normalised * norm.weight.view(shape) + norm.bias.view(shape)


def _keep(norm: _BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update the running statistics, with the unbiased variance."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    part: float | Tensor = 0.1 if norm.momentum is None else norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # a mean over all steps
            part = 1 / norm.num_batches_tracked.to(mean.dtype)
    norm.running_mean.mul_(1 - part).add_(mean.flatten() * part)
    unbiased = count / max(count - 1, 1)
    norm.running_var.mul_(1 - part).add_(variance.flatten() * (part * unbiased))
