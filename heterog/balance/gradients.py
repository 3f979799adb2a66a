"""The mean of gradients over ranks, for a model that is not wrapped."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from heterog.balance.group import RankGroup


def average_gradients(model: nn.Module, group: RankGroup) -> None:
    """Replace each gradient by its mean over the ranks; one all-reduce for each dtype and device.

    A parameter without a gradient on this rank takes part with zeros: another rank may have one.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_type[parameter.grad.dtype, parameter.grad.device].append(parameter.grad)
    for gradients in by_type.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        mean = group.add_up(flat).div_(group.num_ranks)
        begin = 0
        for gradient in gradients:
            end = begin + gradient.numel()
            gradient.copy_(mean[begin:end].view_as(gradient))
            begin = end
