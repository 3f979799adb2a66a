"""Measures how long a rank computes in a step, and estimates its speed from that.

``SpeedEstimate`` uses medians, so that one slow step does not count. The model is
t(n) = s (p + n)  as in ``shares``. The unit time ``s`` comes from the last few windows of steps; a
throttled rank is found after one window. The fixed part ``p``, in units, stays when a rank slows
down. It is fitted to pairs of steps of different sizes (Theil 1950, Sen 1968), and counts the less
the more uncertain it is. Steps from before a sudden change of speed are forgotten.

Steps of one window resemble each other more than those of the next: a machine does something else
for a while, or a quota is given now and then. So the error of a speed includes, besides the error
of a median of steps, the differences between whole windows of the same size.

``StepClock`` measures a step without the waits for other ranks. In data parallelism all ranks end
a step together, so its wall time says nothing about a rank. CPU time does not either: a throttled
rank uses as much CPU time as before, but gets less of it per second. Ranks differ in the moment at
which their gradients are ready. So a step is measured in wall time, or on an accelerator in the
time of its queue, from one end of a step to the next, less the waits:

- At the end of the backward pass DistributedDataParallel waits for its all-reduces, in a callback
  that it queues in autograd when the last gradient is ready. ``backward_begins`` queues a callback
  before that one, which notes when this rank's gradients are ready and no wait has begun. This
  callback queues another behind all existing ones, which notes the end of the wait.
- ``fully_shard`` waits for parameters in hooks before a module's forward and backward pass. Marks
  before and after these hooks enclose the wait. On a CPU it also waits in each reduce-scatter.
- DistributedDataParallel sends its buffers before the forward pass; the same marks enclose it.
- Exchanges of this package are enclosed, too.

Everything else counts: loading, both passes, the optimizer.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heterog.balance.group import keep_to_the_end
from heterog.balance.shares import FloatArray, RankSpeed
from heterog.runtime.accelerators import is_accelerated, queue_mark, synchronize

REMEMBERED = 6
"""Number of windows whose slowest counts: a rank is found slow at once, but fast only after all of
them. A rank that waits much looks faster than it would be with more work (its card is cool, its
quota unspent), and believing it at once makes shares swing. With 4 windows they still swing on
simulated quotas, 8 gain nothing (``tests/balance/test_rebalancing.py``)."""
KEPT_STEPS = 64
"""Number of steps that a fixed part is fitted to: several windows, and a few thousand pairs."""
RECENT_STEPS = 24
"""Number of steps in the median of the unit time: three windows, unless the speed has changed."""
DIFFERENT = 0.05
"""Least relative difference of step sizes; between closer sizes noise hides the fixed part."""
SUDDEN = 1.25
"""Factor between two windows above which the speed has changed; a smaller one is noise."""
EXPECTED_FIXED = 0.2
"""Expected fixed part over a rank's share; the fit's error is compared with it."""
NOISE_WINDOWS = 24
"""Number of differences between neighbouring windows whose median tells their noise."""
LEAST_DIFFERENCES = 3
"""Least number of differences between windows for an estimate of noise. So for four windows after
a sudden change shares follow without it, which corrects small errors of the first new shares."""
_NORMAL_MAD = 1.4826  # standard deviation of normal numbers over their median absolute deviation
_NORMAL_MEDIAN = 1.2533  # standard error of their median over that of their mean, sqrt(pi / 2)


class SpeedEstimate:
    """The measurements of one rank, and its estimated speed."""

    def __init__(self) -> None:
        self._units: FloatArray = np.zeros(0)
        self._seconds: FloatArray = np.zeros(0)
        self._fixed_units = 0.0
        self._windows: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # size, seconds
        self._differences: deque[float] = deque(maxlen=NOISE_WINDOWS)
        self._unit_s = 0.0
        self._error_of_steps = 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that was measured, as JSON values."""
        return {
            "units": self._units.tolist(),
            "seconds": self._seconds.tolist(),
            "fixed_units": self._fixed_units,
            "windows": [list(each) for each in self._windows],
            "differences": list(self._differences),
            "unit_s": self._unit_s,
            "relative_error": self._error_of_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the measurements of another estimate."""
        self._units = np.array(state["units"], np.float64)
        self._seconds = np.array(state["seconds"], np.float64)
        self._fixed_units = float(state["fixed_units"])
        self._windows.clear()
        self._windows.extend((float(size), float(told)) for size, told in state["windows"])
        self._differences.clear()
        self._differences.extend(map(float, state.get("differences", ())))
        self._unit_s = float(state["unit_s"])
        self._error_of_steps = float(state["relative_error"])

    @property
    def speed(self) -> RankSpeed | None:
        """The estimate to plan with; ``None`` until a window was measured."""
        if not self._windows:
            return None
        slowest = max(told / (size + self._fixed_units) for size, told in self._windows)
        unit_s = max(self._unit_s, slowest)
        return RankSpeed(unit_s=unit_s, fixed_units=self._fixed_units)

    @property
    def relative_error(self) -> float:
        """Standard error of the unit time over that time.

        The slowest of a few windows counts, so this is the noise of one window if that is known:
        the differences of neighbouring windows of the same size, over the square root of 2. Their
        median ignores the one difference that a change of speed makes.
        """
        if len(self._differences) < LEAST_DIFFERENCES:
            return self._error_of_steps
        middle = _median(np.abs(self._differences))
        return max(self._error_of_steps, _NORMAL_MAD * middle / float(np.sqrt(2)))

    def add(self, units: Sequence[float], seconds: Sequence[float]) -> bool:
        """Take in a window of steps: their sizes and seconds, nan where unknown.

        Returns:
            Whether the speed has suddenly changed.
        """
        told = np.asarray(seconds, np.float64)
        sizes = np.maximum(np.asarray(units, np.float64), 1.0)  # a rank without data runs on one
        measured = np.isfinite(told) & (told > 0)
        told, sizes = told[measured], sizes[measured]
        if not len(told):
            return False
        has_changed = self._has_changed(sizes, told)
        if has_changed:
            self._units, self._seconds = np.zeros(0), np.zeros(0)
        self._units = np.append(self._units, sizes)[-KEPT_STEPS:]
        self._seconds = np.append(self._seconds, told)[-KEPT_STEPS:]
        self._fit_fixed_part()
        each = (self._seconds / (self._units + self._fixed_units))[-RECENT_STEPS:]
        self._unit_s = _median(each)
        self._add_window(_median(sizes), _median(told))
        error = _spread(each) / float(np.sqrt(len(each)))
        self._error_of_steps = _NORMAL_MEDIAN * error / self._unit_s
        return has_changed

    def forget_noise(self) -> None:
        """Forget differences of windows, because a rank's speed has changed and shares follow."""
        self._differences.clear()

    def _add_window(self, size: float, told: float) -> None:
        """Add a window, and its difference from the previous one if that had the same size."""
        if self._windows:
            size_before, told_before = self._windows[-1]
            if abs(size_before - size) < DIFFERENT * size:
                self._differences.append(float(np.log(told / size * size_before / told_before)))
        self._windows.append((size, told))

    def _has_changed(self, sizes: FloatArray, told: FloatArray) -> bool:
        """Whether steps of this size take another time than before; ignores other sizes."""
        size = _median(sizes)
        alike = np.abs(self._units - size) < DIFFERENT * size
        if not alike.any():
            return False
        before = _median(self._seconds[alike][-RECENT_STEPS:])
        return not 1 / SUDDEN < _median(told) / before < SUDDEN

    def _fit_fixed_part(self) -> None:
        """Fit the fixed part from the median slope, reduced by its uncertainty.

        The standard error of a fitted line at 0 is  e = sigma sqrt(1 / k + mean(n)^2 / sum (n -
        mean(n))^2);  against an expected size ``d`` the fixed part counts by  d^2 / (d^2 + e^2).
        Without steps of different sizes it stays.
        """
        units, seconds = self._units, self._seconds
        first, second = np.triu_indices(len(units), 1)
        change = units[first] - units[second]
        apart = np.abs(change) >= DIFFERENT * np.maximum(units[first], units[second])
        if not apart.any():
            return
        slope = _median((seconds[first] - seconds[second])[apart] / change[apart])
        if slope <= 0:
            return
        rest = seconds - slope * units
        mean = float(np.mean(units))
        found = min(max(_median(rest) / slope, 0.0), mean)
        lever = 1 / len(units) + mean**2 / float(np.sum((units - mean) ** 2))
        error = _NORMAL_MEDIAN * _spread(rest) / slope * float(np.sqrt(lever))
        expected = EXPECTED_FIXED * mean
        self._fixed_units = found * expected**2 / (expected**2 + error**2)


def _spread(values: FloatArray) -> float:
    """Standard deviation as if normal, by the median absolute deviation."""
    return _NORMAL_MAD * _median(np.abs(values - _median(values)))


def _median(values: FloatArray) -> float:
    """The median; numpy's takes ten times as long for a few numbers."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


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
        """Hook of the loss: note when gradients are ready on this rank, and on all ranks."""
        after_backward(self._gradients_are_ready)

    def _gradients_are_ready(self) -> None:
        self.begin_wait()
        after_backward(self.end_wait)

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


def after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass, after those queued so far."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def watch_waits(model: nn.Module, clock: StepClock) -> None:
    """Register hooks that tell the clock when a wrapped model waits."""
    for module in list(model.modules()):
        if isinstance(module, DistributedDataParallel):
            module.register_forward_pre_hook(clock.begin_wait, prepend=True)
            module.module.register_forward_pre_hook(clock.end_wait)
            keep_to_the_end(module.process_group)
        elif isinstance(module, FSDPModule):
            _watch_gathers(module, clock)


def _watch_gathers(module: nn.Module, clock: StepClock) -> None:
    """Enclose the hooks in which a sharded module waits for its parameters.

    Hooks run in the order of registration. The hook that is first in the forward pass also
    registers first at the gradient of the output.
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


# Its name is reduce_scatter_single since PyTorch 2.13.
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
