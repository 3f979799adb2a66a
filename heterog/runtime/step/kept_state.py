"""Optimizer state that is kept in fewer digits than it is computed in.

Adam's two moments are twice as large as the parameters. Kept in bfloat16 they take half of that:
before a step they are widened to the dtype of what is stepped, and rounded after it. The step
itself loses nothing (as with Megatron-LM's ``exp-avg-dtype``).
"""

import torch
from torch import Tensor

_DTYPE = "state_dtype"
"""Name of an optimizer's attribute: the dtype that its state is kept in."""


def keep_state_in(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Let an optimizer keep its state in another dtype between steps.

    Counters stay as they are, and so does all state where ``dtype`` is ``None``.

    Args:
        optimizer: An optimizer; what it steps has as many digits as ``dtype`` or more.
        dtype: Dtype of its state.
    """
    if dtype is None:
        return
    setattr(optimizer, _DTYPE, dtype)

    def widen(stepper: torch.optim.Optimizer, *_: object) -> None:
        _convert(stepper, None)

    def narrow(stepper: torch.optim.Optimizer, *_: object) -> None:
        _convert(stepper, dtype)

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)
    optimizer.register_load_state_dict_post_hook(narrow)


def is_narrow(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer keeps its state in a dtype of its own."""
    return getattr(optimizer, _DTYPE, None) is not None


def _convert(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Convert the state of all that the optimizer steps; ``None``: to the dtype of that."""
    for group in optimizer.param_groups:
        for stepped in group["params"]:
            state = optimizer.state.get(stepped, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                    state[key] = value.to(dtype or stepped.dtype)
