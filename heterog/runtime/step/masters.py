"""Master weights: copies with more digits that the optimizer updates.

Updates smaller than half a step between two numbers of the model's dtype would be lost, one step
after the other. So the optimizer has a copy with more digits, and the model gets it rounded after
every step (Micikevicius et al. 2018, section 3.1).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn


class Masters:
    """The optimizer's copies of the parameters and slices that it updates.

    Args:
        dtype: Dtype of the copies; ``None`` makes none, and the values themselves are updated.
        values: Parameters and slices to update; those that have the dtype already need no copy.

    Attributes:
        stepped: Tensors of the optimizer, in the order of the values.
    """

    def __init__(self, dtype: torch.dtype | None, values: Sequence[nn.Parameter]) -> None:
        self._values: dict[int, nn.Parameter] = {}  # by id of the copy
        self._copies: dict[int, nn.Parameter] = {}  # by id of the value
        self.stepped = [self._add(dtype, value) for value in values]

    def _add(self, dtype: torch.dtype | None, value: nn.Parameter) -> nn.Parameter:
        if dtype is None or value.dtype == dtype or not value.is_floating_point():
            return value
        copy = nn.Parameter(value.detach().to(dtype))
        self._copies[id(value)], self._values[id(copy)] = copy, value
        return copy

    def of(self, value: nn.Parameter) -> nn.Parameter:
        """The optimizer's copy of a value, or the value itself if it has none."""
        return self._copies.get(id(value), value)

    def value_of(self, stepped: nn.Parameter) -> nn.Parameter:
        """The model's value of one of the optimizer's tensors."""
        return self._values.get(id(stepped), stepped)

    def write_back(self, values: Iterable[nn.Parameter]) -> None:
        """Round the copies of some values and store them in the values."""
        with torch.no_grad():
            for value in values:
                if id(value) in self._copies:
                    value.copy_(self._copies[id(value)])
