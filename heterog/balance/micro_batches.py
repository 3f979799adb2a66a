"""A rank's batch in parts that fit its memory; their gradients are reduced once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heterog.balance.shares import BalanceError
from heterog.strategy.division import split_evenly


def num_parts(
    samples: Sequence[int], fits: Sequence[int | None], rank: int, *, alike: bool
) -> int:
    """Number of micro-batches of a rank in a step.

    Args:
        samples: Number of samples of every rank in the step.
        fits: Number of samples that each rank can hold at once; ``None`` is no limit.
        rank: Rank of this process.
        alike: Whether every rank needs as many, because each forward pass communicates.
    """
    every = [
        max(1, math.ceil(count / limit)) if limit else 1
        for count, limit in zip(samples, fits, strict=True)
    ]
    return max(every) if alike else every[rank]


def forward_communicates(model: object) -> bool:
    """Whether ranks must run equally many forward passes: FSDP gathers parameters in each."""
    return isinstance(model, FSDPModule)


def cut_batch(batch: Any, num_samples: int, parts: int) -> Iterator[tuple[Any, int]]:
    """Cut a batch into parts as equal as possible, each with its number of samples.

    A part that would be empty is the first sample with a count of 0.

    Raises:
        BalanceError: the batch does not have the given number of samples.
    """
    begin = 0
    for count in split_evenly(num_samples, parts):
        if parts == 1:
            yield batch, count
        elif count:
            yield _take(batch, begin, begin + count, num_samples), count
        else:
            yield _take(batch, 0, 1, num_samples), 0
        begin += count


def _take(value: Any, begin: int, end: int, num_samples: int) -> Any:
    """Samples ``begin`` to ``end`` of all tensors and lists of a batch."""
    if isinstance(value, Mapping):
        taken = {key: _take(each, begin, end, num_samples) for key, each in value.items()}
        return type(value)(taken)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_take(each, begin, end, num_samples) for each in value))
    if isinstance(value, tuple | list) and any(
        isinstance(each, Tensor | Mapping | tuple | list) for each in value
    ):
        return type(value)(_take(each, begin, end, num_samples) for each in value)
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if isinstance(value, Tensor | list | tuple):
        if len(value) != num_samples:
            raise BalanceError(
                f"a batch of {num_samples} samples holds something of {len(value)}: parts() cuts "
                "the first axis of tensors and lists. Cut such a batch in your own loop."
            )
        return value[begin:end]
    return value


@contextmanager
def gradients_stay_local(model: object) -> Iterator[None]:
    """Keep gradients of the body's backward passes on this rank, without communication."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
