"""The mean of gradients over ranks, for a model that is not wrapped.

A parameter that no rank has used keeps no gradient, as on one process: with zeros in its place,
weight decay and momentum would move it. One that some ranks have used counts as zeros elsewhere.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

from heterog.balance.group import RankGroup


def average_gradients(model: nn.Module, group: RankGroup) -> None:
    """Replace each gradient by its mean over the ranks.

    One small all-reduce says who has which gradients, then one for each dtype and device sums the
    dense ones. Sparse gradients (of ``nn.Embedding(sparse=True)``) are gathered and stay sparse,
    unless another rank has a dense one.
    """
    if group.num_ranks == 1:
        return
    parameters = list(model.parameters())
    gradients = [each.grad if each.requires_grad else None for each in parameters]
    has_sparse = [each is not None and _has_rows(each) for each in gradients]
    has_dense = [
        each is not None and not rows for each, rows in zip(gradients, has_sparse, strict=True)
    ]
    told = group.add_up(torch.tensor([has_dense, has_sparse], dtype=torch.float32)).tolist()
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter, gradient, dense, sparse in zip(parameters, gradients, *told, strict=True):
        if dense:
            own = torch.zeros_like(parameter) if gradient is None else gradient
            parameter.grad = own.to_dense() if own.is_sparse else own
            by_type[parameter.grad.dtype, parameter.grad.device].append(parameter.grad)
        elif sparse:
            parameter.grad = _mean_of_sparse(parameter, gradient, group)
    for alike in by_type.values():
        _average_dense(alike, group)


def _has_rows(gradient: Tensor) -> bool:
    """Whether a gradient holds some rows of its parameter, as that of a sparse embedding."""
    return gradient.is_sparse and gradient.sparse_dim() == 1


def _average_dense(gradients: list[Tensor], group: RankGroup) -> None:
    """Average gradients of one dtype and device in place."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    mean = group.add_up(flat).div_(group.num_ranks)
    begin = 0
    for gradient in gradients:
        end = begin + gradient.numel()
        gradient.copy_(mean[begin:end].view_as(gradient))
        begin = end


def _mean_of_sparse(parameter: Tensor, gradient: Tensor | None, group: RankGroup) -> Tensor:
    """The mean of sparse gradients: of the rows that any rank has."""
    if gradient is None:
        rows = torch.zeros(0, dtype=torch.long, device=parameter.device)
        values = parameter.new_zeros(0, *parameter.shape[1:])
    else:
        own = gradient.coalesce()
        rows, values = own.indices()[0], own.values()
    counts = [int(count) for (count,) in group.gather([len(rows)])]
    most = max(counts)
    padded_rows = rows.new_zeros(most)
    padded_rows[: len(rows)] = rows
    padded_values = values.new_zeros(most, *values.shape[1:])
    padded_values[: len(values)] = values
    every_row = group.gather_tensors(padded_rows)
    every_value = group.gather_tensors(padded_values)
    total = torch.sparse_coo_tensor(
        torch.cat([each[:count] for each, count in zip(every_row, counts, strict=True)])[None],
        torch.cat([each[:count] for each, count in zip(every_value, counts, strict=True)]),
        parameter.shape,
    )
    return (total / group.num_ranks).coalesce()
