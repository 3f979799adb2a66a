"""How long a rank computes in a step, without its waits for other ranks.

In data parallelism all ranks end a step together, so the wall time of a step says nothing about a
rank. CPU time does not either: a throttled rank uses no more of it, it gets less per second. What
tells them apart is when a rank has its gradients. So a step is measured in wall time, or on an
accelerator in the time of its queue, from one such moment to the next, less the waits:

- At the end of the backward pass DistributedDataParallel waits for its all-reduces, in a callback
  that it gives to autograd when the last gradient is there. ``backward_begins`` gives autograd one
  before: it sees the time when this rank's gradients are ready and nobody has waited yet. It gives
  another one, which autograd puts behind all that there are: the wait is over.
- ``fully_shard`` waits for parameters before a module's forward and backward pass. Marks before
  and after the hooks that wait enclose them. On a CPU it also waits in each reduce-scatter.
- DistributedDataParallel sends its buffers before the forward pass; the same marks enclose it.
- What this package itself exchanges is enclosed too.

Everything else counts: loading, both passes, the optimizer. A part that does not depend on the
share is told apart by ``speeds``.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heterog.balance.group import keep_to_the_end
from heterog.runtime.accelerators import is_accelerated, queue_mark, synchronize

_Marks = tuple[Any, Any]


class StepClock:
    """Measures this rank's own seconds of each step.

    Args:
        device: Device on which the rank computes.
        now: Clock of the CPU, in seconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._begin: Any = None
        self._waits: list[_Marks] = []
        self._open: Any = None
        self._steps: list[tuple[_Marks, list[_Marks]]] = []

    def use(self, device: torch.device) -> None:
        """Measure on this device from now on."""
        if device != self._device:
            self._device, self._steps = device, []
            self.restart()

    def mark(self) -> Any:
        """The current time; on an accelerator a mark in its queue."""
        return queue_mark(self._device) if is_accelerated(self._device) else self._now()

    def begin_wait(self, *_: Any) -> None:
        """Note the start of a wait for other ranks; takes any arguments, to serve as a hook."""
        if self._open is None:
            self._open = self.mark()

    def end_wait(self, *_: Any) -> None:
        """Note the end of a wait; takes any arguments, to serve as a hook."""
        if self._open is not None:
            self._waits.append((self._open, self.mark()))
            self._open = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the body as a wait for other ranks."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def backward_begins(self, gradient: Tensor) -> None:
        """Hook of the loss: note when this rank's gradients are ready, and when all ranks' are."""
        _after_backward(self._gradients_are_ready)

    def _gradients_are_ready(self) -> None:
        self.begin_wait()
        _after_backward(self.end_wait)

    def end_step(self) -> None:
        """Note the end of a step and the start of the next. All ranks have just met."""
        end = self.mark()
        self._open = None
        if self._begin is not None:
            self._steps.append(((self._begin, end), self._waits))
        self._begin, self._waits = end, []

    def restart(self) -> None:
        """Ignore the time since the last step, which was an evaluation or a checkpoint, say."""
        self._begin, self._waits, self._open = self.mark(), [], None

    def take(self) -> list[float]:
        """Seconds of the steps since the last call, in order."""
        synchronize(self._device)
        steps, self._steps = self._steps, []
        return [
            max(0.0, self._seconds(whole) - sum(self._seconds(wait) for wait in waits))
            for whole, waits in steps
        ]

    def _seconds(self, marks: _Marks) -> float:
        begin, end = marks
        if is_accelerated(self._device):
            return float(begin.elapsed_time(end)) / 1e3
        return float(end - begin)


def _after_backward(call: Callable[[], None]) -> None:
    """Call a function when the current backward pass is over, after those queued so far."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def watch_waits(model: nn.Module, clock: StepClock) -> None:
    """Register hooks that tell the clock when a model, as it is wrapped now, waits."""
    for module in list(model.modules()):
        if isinstance(module, DistributedDataParallel):
            module.register_forward_pre_hook(clock.begin_wait, prepend=True)
            module.module.register_forward_pre_hook(clock.end_wait)
            keep_to_the_end(module.process_group)
        elif isinstance(module, FSDPModule):
            _watch_gathers(module, clock)


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
