"""BatchNorm on ranks with few samples or none.

Plain BatchNorm normalizes with a rank's own samples only, so a balanced job with it cannot equal
one process. This module ensures that no rank runs a single sample, which PyTorch refuses, and that
a rank without samples keeps its running statistics. ``SyncBatchNorm`` normalizes with the samples
of all ranks; a rank without samples adds none.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNorms:
    """The BatchNorm modules of a model.

    Args:
        model: Model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        every = [each for each in model.modules() if isinstance(each, _BatchNorm)]
        self._plain = [each for each in every if not isinstance(each, nn.SyncBatchNorm)]
        self._held: list[tuple[_BatchNorm, float | None, Tensor | None]] = []
        self._is_empty = False
        self._num_samples = 0
        for each in every:
            if isinstance(each, nn.SyncBatchNorm):
                each.register_forward_pre_hook(self._without_samples)
                each.register_forward_hook(self._as_many_as_before)

    @property
    def least(self) -> int:
        """Least number of samples of a forward pass in training."""
        return 2 if self._plain else 1

    def begin_step(self, *, is_empty: bool) -> None:
        """Freeze running statistics if this rank has no samples in the step, else update them."""
        self._is_empty = is_empty
        for module, momentum, count in self._held:
            module.momentum = momentum
            if count is not None and module.num_batches_tracked is not None:
                module.num_batches_tracked.copy_(count)
        self._held = []
        if is_empty:
            for module in self._plain:
                count = module.num_batches_tracked
                self._held.append(
                    (module, module.momentum, None if count is None else count.clone())
                )
                module.momentum = 0.0

    def _without_samples(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if not (self._is_empty and module.training):
            return None
        self._num_samples = len(inputs[0])
        return (inputs[0][:0], *inputs[1:])

    def _as_many_as_before(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not (self._is_empty and module.training):
            return None
        # The sum of an empty tensor keeps this rank in the backward pass, which communicates.
        return output.new_zeros((self._num_samples, *output.shape[1:])) + output.sum()
