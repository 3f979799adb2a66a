"""Common parts of the workloads on token sequences: the example batch and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Workload

if TYPE_CHECKING:
    from heterog.graph.workload import Batch


def token_cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """The mean cross-entropy over all positions whose label is not -100.

    Args:
        output: Logits ``[batch, tokens, vocabulary]``, or an object that has them as ``logits``.
        labels: Wanted tokens ``[batch, tokens]``.
    """
    logits: Tensor = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def token_workload(
    name: str,
    model: Callable[[], nn.Module],
    batch_size: int,
    vocabulary: int,
    num_tokens: Mapping[str, int],
    loss: Callable[[Any, Tensor], Tensor] = token_cross_entropy,
) -> Workload:
    """A workload on random tokens, trained with Adam.

    Args:
        name: Name of the workload.
        model: Function that makes the model, which is called with the inputs by name.
        batch_size: Number of sequences in a batch.
        vocabulary: Number of different tokens.
        num_tokens: Length of each input, and of ``"labels"``.
        loss: Loss function, ``loss(output, labels)``.
    """

    def example_batch() -> Batch:
        random = torch.Generator().manual_seed(0)
        return {
            key: torch.randint(vocabulary, (batch_size, length), generator=random)
            for key, length in num_tokens.items()
        }

    return Workload(
        model=model,
        example_batch=example_batch,
        loss=loss,
        optimizer=torch.optim.Adam,
        name=name,
        source=name,
    )
