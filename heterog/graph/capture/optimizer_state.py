"""How much state an optimizer keeps, measured on one real step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heterog.errors import CaptureError
from heterog.graph.optimizer_probe import probe_options


def optimizer_state_ratio(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
) -> float:
    """Optimizer state bytes per byte of parameter, measured on one real step of a small matrix.

    Args:
        optimizer: Class of the optimizer.
        options: Its keyword arguments.
        own: Options of the parameter's group.

    >>> optimizer_state_ratio(torch.optim.Adam, {})
    2.0
    >>> optimizer_state_ratio(torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0})
    0.0
    """
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    try:
        groups = [{**probe_options(own or {}), "params": [parameter]}]
        instance = optimizer(groups, **probe_options(options))
        instance.step()
    except (TypeError, ValueError) as error:
        if "closure" in str(error):
            raise CaptureError(
                f"optimizer {optimizer.__name__} needs a closure, which a plan cannot run: {error}"
            ) from error
        given = {**options, **(own or {})}
        raise CaptureError(
            f"optimizer {optimizer.__name__} cannot step with the options {given}: {error}"
        ) from error
    except RuntimeError as error:
        raise CaptureError(
            f"optimizer {optimizer.__name__} cannot step a dense gradient of a matrix ({error}); "
            "all gradients of a plan are dense. SGD, Adagrad and Adam can."
        ) from error
    state = sum(
        value.nbytes
        for value in instance.state[parameter].values()
        if isinstance(value, Tensor) and value.dim()
    )
    return state / parameter.nbytes
