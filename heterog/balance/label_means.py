"""Finds cross entropies that are means over fewer labels than there are, by autograd's record.

A loss that is weighed by samples has to be a mean over samples. ``cross_entropy`` with labels that
do not count (``ignore_index``), or with class weights, is a mean over something else, and what its
backward pass keeps tells so: the total weight that the sum was divided by.
"""

from typing import Any

from torch import Tensor

from heterog.balance.shares import BalanceError

_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_MEAN = 1
"""Number of ``reduction="mean"`` in ATen (``at::Reduction``)."""
_MOST_NODES = 64
"""Nodes of the graph that are looked at: a loss is a few sums and factors away from its end."""


def check_mean_over_samples(loss: Tensor) -> None:
    """Check that no cross entropy near the end of a loss is a mean over some labels only.

    Args:
        loss: Loss that is about to be weighed by the number of samples.

    Raises:
        BalanceError: one is; says what to give.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen = 0
    while waiting and seen < _MOST_NODES:
        node = waiting.pop(0)
        seen += 1
        if node is None:
            continue
        if node.name() in _CROSS_ENTROPIES and node._saved_reduction == _MEAN:
            _check(node._saved_total_weight, node._saved_target.numel())
            continue
        waiting += [each for each, _ in node.next_functions]


def _check(total_weight: Tensor, num_labels: int) -> None:
    total = float(total_weight)
    if abs(total - num_labels) > 1e-3 * num_labels:
        raise BalanceError(
            f"the loss is a mean over labels of a total weight of {total:g} (of {num_labels} "
            "labels: some do not count, or classes have weights), but it is weighed by samples. "
            "Give that total, weigh(loss, count=(labels != -100).sum()) for labels that do not "
            "count; all ranks give it."
        )
