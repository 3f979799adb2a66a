"""BatchNorm over the whole batch, however it is cut: an explicit alternative to the usual one.

Where a batch or its samples are cut, ``nn.BatchNorm`` normalises each part by its own mean and
variance, as data-parallel training does. ``whole_statistics`` replaces it by modules that
compute the same from sums, which are added up over devices like any other sum: the numbers of one
device, for two small all-reduces forward and two backward in each layer, and with one more
activation kept (what ``SyncBatchNorm`` is to data-parallel training).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


class WholeBatchNorm(_BatchNorm):
    """BatchNorm of any number of dimensions, written as sums.

    Its running statistics are those of the whole, too. It has the parameters and buffers of
    ``nn.BatchNorm1d``, ``2d`` and ``3d``, and loads their state.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 or more dimensions, got {input.dim()}.")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by mean and variance over everything but the channels, dimension 1."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        dims = [0, *range(2, input.dim())]
        mean = input.mean(dims, keepdim=True)
        centred = input - mean
        variance = (centred * centred).mean(dims, keepdim=True)
        if self.training and self.running_mean is not None:
            self._keep(mean.detach(), variance.detach(), input.numel() // input.shape[1])
        normalised = centred * torch.rsqrt(variance + self.eps)
        if not self.affine:
            return normalised
        shape = [1, -1, *[1] * (input.dim() - 2)]
        return normalised * self.weight.view(shape) + self.bias.view(shape)

    def _keep(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics, with the unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        part = 0.1 if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - part).add_(mean.flatten() * part)
        unbiased = count / max(count - 1, 1)
        self.running_var.mul_(1 - part).add_(variance.flatten() * (part * unbiased))


def whole_statistics(model: nn.Module) -> nn.Module:
    """The same model with every ``nn.BatchNorm`` normalising by statistics of the whole.

    Args:
        model: Model, which is changed in place unless it is a BatchNorm itself.

    Returns:
        The model, or its replacement.
    """
    if isinstance(model, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        whole = WholeBatchNorm(
            model.num_features,
            model.eps,
            model.momentum,
            model.affine,
            model.track_running_stats,
        )
        whole.load_state_dict(model.state_dict(), assign=True)
        whole.train(model.training)
        return whole
    for name, child in model.named_children():
        setattr(model, name, whole_statistics(child))
    return model
