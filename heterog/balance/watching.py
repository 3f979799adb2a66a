"""Hooks that tell a clock where a wrapped model waits for other ranks; see ``clock``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heterog.balance.clock import StepClock
from heterog.balance.group import keep_to_the_end
from heterog.runtime.accelerators import is_accelerated


def watch_waits(model: nn.Module, clock: StepClock) -> None:
    """Register hooks that tell the clock when a model, as it is wrapped now, waits."""
    for module in list(model.modules()):
        if isinstance(module, DistributedDataParallel):
            module.register_forward_pre_hook(clock.begin_wait, prepend=True)
            module.module.register_forward_pre_hook(clock.end_wait)
            keep_to_the_end(module.process_group)
        elif _is_sharded(module):
            _watch_gathers(module, clock)


def _is_sharded(module: object) -> bool:
    return isinstance(module, FSDPModule)


def _watch_gathers(module: nn.Module, clock: StepClock) -> None:
    """Enclose the hooks in which a sharded module waits for its parameters.

    Hooks run in the order in which they are registered: what comes first at a forward hook also
    comes first at the gradient of the output.
    """
    module.register_forward_pre_hook(clock.begin_wait, prepend=True)
    module.register_forward_pre_hook(clock.end_wait)

    def at_gradient_of(output: Any, call: Any) -> None:
        for each in output if isinstance(output, tuple | list) else [output]:
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(call)  # type: ignore[no-untyped-call]

    module.register_forward_hook(
        lambda _, inputs, output: at_gradient_of(output, clock.begin_wait), prepend=True
    )
    module.register_forward_hook(lambda _, inputs, output: at_gradient_of(output, clock.end_wait))
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    if not is_accelerated(device):
        module.set_custom_reduce_scatter(_TimedReduceScatter(clock))  # type: ignore[operator]


# Its name since PyTorch 2.13.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _TimedReduceScatter:
    """PyTorch's own reduce-scatter, timed; on a CPU it waits until all ranks are there."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with self._clock.waiting():
            return _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
