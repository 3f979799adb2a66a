"""What a GPU does under a training load: kernels apart, back to back, and in a training step.

    python experiments/gpu_sustained.py --out sustained.jsonl [--seconds 4]

The same products, attention and passes over memory of a Llama layer (hidden size 4096, sequence
4096, bfloat16) are timed by CUDA events in three ways: *apart*, one launch after a pause in which
the GPU idles; *together*, launched without a pause for some seconds; and *in training*, where the
profiler finds them again by op and input shapes in a step of four such layers with AdamW. Beside
each stand the clock, the power and the temperature of the GPU at that time, so that a factor
between them can be told apart: clocks under power, other layouts, or other kernels. The launches
with zeros as data draw least power, and show what clocks alone come to.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, FEED_FORWARD, HEADS, KEY_HEADS, SEQUENCE = 4096, 14336, 32, 8, 4096
LAYERS = 4
APART = 24
"""Launches of each kernel with a pause before."""
PAUSE_S = 0.04
HELD_CYCLES = 2_000_000
"""Cycles for which the GPU waits before a launch: a millisecond, longer than any launch takes."""


@dataclass
class Gauge:
    """Reads the GPU's clock, power and temperature while a block runs."""

    readings: list[tuple[float, float, float]] = field(default_factory=list)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read every 20 ms."""
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        ended = threading.Event()

        def read() -> None:
            while not ended.wait(0.02):
                self.readings.append(
                    (
                        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                        pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                    )
                )

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def told(self) -> dict[str, float]:
        """Medians of the last half of the readings."""
        last = self.readings[len(self.readings) // 2 :]
        if not last:
            return {}
        clock, power, temperature = (
            statistics.median(column) for column in zip(*last, strict=True)
        )
        return {"clock_mhz": clock, "power_w": power, "temperature_c": temperature}


def timed(run: Callable[[], Any]) -> Callable[[], float]:
    """A launch between two events; call the result for its seconds once the GPU is done."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    return lambda: begin.elapsed_time(end) / 1000


def apart(run: Callable[[], Any]) -> dict[str, float]:
    """One launch after a pause, many times; the GPU waits until the host has launched it."""
    gauge, seconds = Gauge(), []
    with gauge.reading():
        for _ in range(APART):
            torch.cuda.synchronize()
            time.sleep(PAUSE_S)
            torch.cuda._sleep(HELD_CYCLES)  # type: ignore[no-untyped-call]
            took = timed(run)
            torch.cuda.synchronize()
            seconds.append(took())
    return {"seconds": statistics.median(seconds[4:]), **gauge.told()}


def together(run: Callable[[], Any], for_s: float) -> dict[str, float]:
    """Launches without a pause; the last half counts."""
    gauge, seconds = Gauge(), []
    with gauge.reading():
        ends = time.monotonic() + for_s
        while time.monotonic() < ends:
            launched = [timed(run) for _ in range(50)]
            torch.cuda.synchronize()
            seconds.append(statistics.median(took() for took in launched))
    return {"seconds": statistics.median(seconds[len(seconds) // 2 :]), **gauge.told()}


# --- the kernels of a layer ----------------------------------------------------------------------


def products(tokens: int, make: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Forward product, gradient of the input and gradient of the weight of each matrix."""
    widths = {
        "qkv": (HIDDEN, HIDDEN + 2 * KEY_HEADS * HIDDEN // HEADS),
        "out": (HIDDEN, HIDDEN),
        "up": (HIDDEN, FEED_FORWARD),
        "down": (FEED_FORWARD, HIDDEN),
    }
    for name, (inner, outer) in widths.items():
        x, weight, gradient = make(tokens, inner), make(outer, inner), make(tokens, outer)
        yield f"{name} forward", lambda x=x, w=weight: x @ w.t()  # type: ignore[misc]
        yield f"{name} of input", lambda g=gradient, w=weight: g @ w  # type: ignore[misc]
        yield f"{name} of weight", lambda g=gradient, x=x: g.t() @ x  # type: ignore[misc]


def attention(batch: int, make: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Causal attention, forward and backward."""
    q, k, v = (
        make(batch, HEADS, SEQUENCE, HIDDEN // HEADS).requires_grad_(True) for _ in range(3)
    )
    qd, kd, vd = (each.detach() for each in (q, k, v))
    yield (
        "attention forward",
        lambda: functional.scaled_dot_product_attention(qd, kd, vd, is_causal=True),
    )
    made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = make(*made.shape)
    yield (
        "attention backward",
        lambda: torch.autograd.grad(made, (q, k, v), gradient, retain_graph=True),
    )


def streams(tokens: int, make: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Passes over memory."""
    a, b, wide = make(tokens, HIDDEN), make(tokens, HIDDEN), make(tokens, FEED_FORWARD)
    scale = make(HIDDEN)
    yield "add", lambda: a + b
    yield "silu", lambda: functional.silu(wide)
    yield "rms norm", lambda: functional.rms_norm(a, (HIDDEN,), scale)


# --- a training step of the same layers ----------------------------------------------------------


class Layer(nn.Module):
    """A Llama layer with separate matrices, as the products above."""

    def __init__(self) -> None:
        super().__init__()
        key = KEY_HEADS * HIDDEN // HEADS
        self.qkv = nn.Linear(HIDDEN, HIDDEN + 2 * key, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.up = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attention and feed-forward network, each beside its residual."""
        batch, tokens, _ = x.shape
        key = KEY_HEADS * HIDDEN // HEADS
        q, k, v = self.qkv(self.norms[0](x)).split((HIDDEN, key, key), dim=-1)
        q, k, v = (
            each.view(batch, tokens, -1, HIDDEN // HEADS).transpose(1, 2) for each in (q, k, v)
        )
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        wide = self.norms[1](x)
        made: Tensor = x + self.down(functional.silu(self.gate(wide)) * self.up(wide))
        return made


def in_training(batch: int, for_s: float) -> Iterator[dict[str, Any]]:
    """Seconds of a step, and of each op and shapes in it, after some seconds of training."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    x = torch.randn(batch, SEQUENCE, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    gauge, seconds = Gauge(), []
    with gauge.reading():
        ends = time.monotonic() + for_s
        while time.monotonic() < ends:
            took = timed(step)
            torch.cuda.synchronize()
            seconds.append(took())
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
    told = gauge.told()
    yield {"kernel": "step", "seconds": statistics.median(seconds[len(seconds) // 2 :]), **told}
    for row in profile.key_averages(group_by_input_shape=True):
        if row.self_device_time_total > 0 and row.key.startswith("aten::"):
            yield {
                "kernel": row.key,
                "shapes": str(row.input_shapes),
                "count": row.count,
                "seconds": row.self_device_time_total / row.count / 1e6,
                **told,
            }


def random(*shape: int) -> Tensor:
    """Values as those of a network at its start."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.1


def zeros(*shape: int) -> Tensor:
    """Values that switch no transistor."""
    return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16)


def rows(for_s: float) -> Iterator[dict[str, Any]]:
    """All measurements."""
    for batch in (1, 2):
        tokens = batch * SEQUENCE
        for data, make in (("random", random), ("zeros", zeros)):
            kernels = list(products(tokens, make))
            if data == "random":
                kernels += [*attention(batch, make), *streams(tokens, make)]
            for name, run in kernels:
                about = {"kernel": name, "batch": batch, "data": data}
                yield {"way": "apart", **about, **apart(run)}
                yield {"way": "together", **about, **together(run, for_s)}
        for row in in_training(batch, 5 * for_s):
            yield {"way": "in training", "batch": batch, "data": "random", **row}


def main() -> None:
    """Measure and write a JSON line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of launches together")
    asked = parser.parse_args()
    card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    with asked.out.open("w") as out:
        for row in rows(asked.seconds):
            out.write(json.dumps(card | row) + "\n")
            out.flush()
            print(row.get("way"), row["kernel"], row.get("shapes", ""), f"{row['seconds']:.3e}")


if __name__ == "__main__":
    main()
