"""Weights of losses with which unequal ranks make the update of one process.

Rank ``r`` of ``R`` has a loss L_r that is a mean over c_r samples or tokens. One process
with the whole batch would follow  sum_r (c_r / C) grad L_r,  C = sum_r c_r.
DistributedDataParallel and ``fully_shard`` average:  (1 / R) sum_r grad l_r.  So each rank's
backward pass starts from

    l_r = R (c_r / C) L_r

The reduced gradients are those of the one process: clipping sees the right norm, and a gradient
scaler multiplies everything alike. A rank with c_r = 0 runs its passes with the weight 0.

``average_gradients`` averages over ranks for a model that is not wrapped. A parameter that no rank
has used keeps no gradient, as on one process: weight decay and momentum would move it if its
gradient were zero. If only some ranks have used a parameter, the others contribute zeros.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heterog.balance.group import RankGroup
from heterog.balance.passes import Passes
from heterog.balance.shares import BalanceError
from heterog.grouped import grouped


class StepWeights:
    """Weights of this rank's losses in the current step.

    Args:
        group: The ranks.

    Attributes:
        num_weighed: Number of losses weighed so far.
        num_trained: Number of weighed losses that train.
        checks_updates: Whether an update needs a weighed loss.
        is_unlike: Whether ranks have unlike numbers of samples in this step.
        parameters: Identities of the parameters that are trained, if they are known.
        passes: Backward passes that reach these parameters.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._count: float | Tensor = 0.0
        self._total: float | Tensor = 0.0
        self._seen: list[Tensor] = []
        self._is_complete = False
        self.num_weighed = self.num_trained = 0
        self._num_before = 0  # ``num_trained`` at the last update of an earlier batch
        self._num_at_update: int | None = None
        self.checks_updates, self.is_unlike = True, False
        self.parameters: frozenset[int] | None = None
        self.passes = Passes()

    def begin_batch(self, samples: Sequence[int]) -> None:
        """Begin a step, given each rank's number of samples in its batch."""
        self.begin_step()
        if self._num_at_update is not None:
            self._num_before, self._num_at_update = self._num_at_update, None
        self.set(samples[self._group.rank], sum(samples))
        self.is_unlike = len(set(samples)) > 1
        self.passes.begin_batch(is_unlike=self.is_unlike)

    def begin_step(self) -> None:
        """Forget the losses of the previous step."""
        self._seen, self._is_complete = [], False
        self.passes.begin_step()

    def kept(self) -> tuple[Any, ...]:
        """The state of this step, to be restored after another loop has run inside it."""
        return self._count, self._total, self._seen, self._is_complete

    def restore(self, kept: tuple[Any, ...]) -> None:
        """Return to a step, given its state from ``kept``."""
        self._count, self._total, self._seen, self._is_complete = kept

    @property
    def samples(self) -> float | None:
        """This rank's samples; ``None`` where losses are weighed by another count."""
        return None if isinstance(self._total, Tensor) else float(self._count)

    def looks_at_mean(self, loss: Tensor) -> bool:
        """Whether to examine what a loss of this rank's samples is a mean over.

        Always on a CPU; elsewhere at first and now and then, because it waits for the device.
        """
        if not loss.requires_grad:
            return False
        number = self.num_weighed
        return loss.device.type == "cpu" or number & (number - 1) == 0 or number % 64 == 0

    def end_update(self) -> None:
        """Called after an optimizer's step: the next weighed loss begins a new sum."""
        self._is_complete = True
        self._num_at_update = self.num_trained

    @property
    def may_update(self) -> bool:
        """Whether a loss was weighed since the updates of earlier batches, if that matters."""
        is_weighed = self.num_trained > self._num_before
        return is_weighed or not self.is_unlike or not self.checks_updates

    def set(self, count: float | Tensor, total: float | Tensor) -> None:
        """Set the weight of the next losses: ``count`` items here, ``total`` on all ranks."""
        self._count, self._total = count, total

    def exchange(self, counts: list[float | Tensor]) -> list[Tensor]:
        """Sum counts over ranks; returns this rank's counts, then the sum.

        This is the one all-reduce of a step: a scalar, which stays on its device.
        """
        own = [torch.as_tensor(count).detach().to(torch.float64) for count in counts]
        return [*own, self._group.add_up(torch.stack(own).sum())]

    def weigh(self, loss: Tensor, counted: Sequence[Tensor] | None = None) -> Tensor:
        """Weigh a loss, to begin the backward pass with.

        Args:
            loss: The loss.
            counted: Counts of this loss on this rank and on all ranks, if they differ from those
                of the other losses of the step.
        """
        if self._is_complete:
            self.begin_step()
        self.num_weighed += 1
        own, total = (self._count, self._total) if counted is None else counted
        weight: float | Tensor
        if isinstance(total, Tensor):
            count = torch.as_tensor(own, dtype=torch.float64, device=total.device)
            part = torch.where(total > 0, count / total, torch.zeros_like(count))
            weight = (part * self._group.num_ranks).to(loss.device, loss.dtype)
            seen = torch.where(part > 0, loss.detach().double() * part.to(loss.device), 0.0)
        else:
            part_known = float(own) / total if total else 0.0
            weight = part_known * self._group.num_ranks
            seen = (
                loss.detach().double() * part_known
                if part_known
                else torch.zeros((), dtype=torch.float64, device=loss.device)
            )
        self._seen.append(seen)
        return loss * weight

    def mean_loss(self) -> float:
        """Loss of the whole batch: the weighted mean of the losses that ranks weighed.

        Losses of several backward passes add up until an optimizer has stepped or the sum is read,
        because the next loss is that of another optimizer, or at other parameters.
        """
        self._is_complete = True
        own = torch.stack(self._seen).sum() if self._seen else torch.zeros(1, dtype=torch.float64)
        return float(self._group.add_up(own.reshape(())))


def check_loss(loss: object) -> None:
    """Check that a backward pass can begin from a loss.

    Raises:
        BalanceError: it is no tensor of one element.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = (
            f"a loss of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"{type(loss).__name__} {loss!r}"
        )
        raise BalanceError(
            f"weigh() got {what}: give it the mean over this rank's samples, a tensor of one "
            "element that backward() can begin from."
        )


def average_gradients(model: nn.Module, group: RankGroup) -> None:
    """Replace each gradient by its mean over the ranks.

    One small all-reduce finds which ranks have which gradients; then one for each dtype and device
    sums the dense ones. Sparse gradients (of ``nn.Embedding(sparse=True)``) are gathered and stay
    sparse, unless another rank has a dense one.
    """
    if group.num_ranks == 1:
        return
    parameters = list(model.parameters())
    gradients = [each.grad if each.requires_grad else None for each in parameters]
    has_sparse = [  # gradients of some rows of a parameter, as for a sparse embedding
        each is not None and each.is_sparse and each.sparse_dim() == 1 for each in gradients
    ]
    has_dense = [
        each is not None and not rows for each, rows in zip(gradients, has_sparse, strict=True)
    ]
    told = group.add_up(torch.tensor([has_dense, has_sparse], dtype=torch.float32)).tolist()
    averaged = []
    for parameter, gradient, dense, sparse in zip(parameters, gradients, *told, strict=True):
        if dense:
            own = torch.zeros_like(parameter) if gradient is None else gradient
            parameter.grad = own.to_dense() if own.is_sparse else own
            averaged.append(parameter.grad)
        elif sparse:
            parameter.grad = _mean_of_sparse(parameter, gradient, group)
    for alike in by_type(averaged):
        flat = torch.cat([gradient.reshape(-1) for gradient in alike])
        take_over(alike, group.add_up(flat).div_(group.num_ranks))


def by_type(values: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Values of one dtype and device together."""
    return grouped(((value.dtype, value.device), value) for value in values).values()


def take_over(values: Sequence[Tensor], flat: Tensor) -> None:
    """Write the parts of a flat tensor into values."""
    parts = torch.split(flat, [value.numel() for value in values])
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view_as(value))


def _mean_of_sparse(parameter: Tensor, gradient: Tensor | None, group: RankGroup) -> Tensor:
    """The mean of sparse gradients: of the rows that any rank has."""
    if gradient is None:
        rows = torch.zeros(0, dtype=torch.long, device=parameter.device)
        values = parameter.new_zeros(0, *parameter.shape[1:])
    else:
        own = gradient.coalesce()
        rows, values = own.indices()[0], own.values()
    counts = [int(count) for (count,) in group.gather([len(rows)])]
    total = torch.sparse_coo_tensor(
        group.join(rows, counts)[None], group.join(values, counts), parameter.shape
    )
    return (total / group.num_ranks).coalesce()
