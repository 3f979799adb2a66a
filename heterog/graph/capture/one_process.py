"""A step as one process runs it, whatever process group there is while it is captured.

A plan is made where there is no process group, but ranks capture its step where there is one. Code
that asks for it (gathered embeddings of a contrastive loss, statistics that are summed over ranks)
is given the answer of one process, which has the whole batch. ``nn.SyncBatchNorm`` then normalises
by the statistics of the whole batch, in ops that a plan splits. So does every BatchNorm of a step
that reads running statistics which it updates.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
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
    """``nn.SyncBatchNorm`` with the statistics of the whole batch."""
    norm._check_input_dim(input)  # type: ignore[no-untyped-call]
    part: float | Tensor = 0.1 if norm.momentum is None else norm.momentum
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # a mean over all steps
            part = 1 / norm.num_batches_tracked.to(input.dtype)
    is_training = norm.training or norm.running_mean is None
    running = norm.running_mean, norm.running_var
    return _of_whole_batch(input, norm.weight, norm.bias, *running, is_training, part, norm.eps)


_OF_PART = torch.batch_norm


def _of_whole_batch(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> Tensor:
    """``torch.batch_norm``: normalise by mean and variance over all but the channels.

    They are written as sums, which are added up over devices like any other sum. The running
    statistics are those of the whole batch, too.
    """
    running_mean, running_var, is_training, momentum, eps = settings[:5]
    if not is_training:
        return _OF_PART(input, weight, bias, running_mean, running_var, False, 0.0, eps, False)
    dims = [0, *range(2, input.dim())]
    wide = input if running_mean is None else input.to(running_mean.dtype)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    variance = (centred * centred).mean(dims, keepdim=True)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        unbiased = count / max(count - 1, 1)
        for kept, new in (running_mean, mean), (running_var, variance * unbiased):
            kept.mul_(1 - momentum).add_(new.detach().flatten() * momentum)
    normalised = centred * torch.rsqrt(variance + eps)
    shape = [1, -1, *[1] * (input.dim() - 2)]
    if weight is not None:
        normalised = normalised * weight.view(shape)
    if bias is not None:
        normalised = normalised + bias.view(shape)
    return normalised.to(input.dtype)


def statistics_of_whole_batch() -> AbstractContextManager[object]:
    """Make every BatchNorm normalise by the statistics of the whole batch, and keep them."""
    return mock.patch.object(torch, "batch_norm", _of_whole_batch)


def reads_statistics(graph: fx.Graph) -> bool:
    """Whether a step reads running statistics that one of its BatchNorms writes.

    They are those of the whole batch then, as on one device, instead of each device's own.
    """
    if torch.batch_norm is _of_whole_batch:
        return False
    written = {
        each
        for node in graph.nodes
        if (name := _norm(node)) and not name.endswith("_backward")
        for each in node.args[3:5]
        if isinstance(each, fx.Node)
    }
    return any(
        each.op != "placeholder"
        or any(user.op == "call_function" and not _norm(user) for user in each.users)
        for each in written
    )


def _norm(node: fx.Node) -> str:
    """Name of an op by which a BatchNorm is trained; empty for other ops."""
    schema: Any = getattr(node.target, "_schema", None)
    if schema is None or "batch_norm" not in schema.name:
        return ""
    places = [n for n, each in enumerate(schema.arguments) if each.name in ("training", "train")]
    return schema.name if places and node.args[places[0]] is True else ""
