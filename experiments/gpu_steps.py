"""Measures whole training steps, and the kernels in them, on the GPU of this machine.

    python experiments/gpu_steps.py --out steps.jsonl [--only vgg19,gpt2] [--budget 240]
    python experiments/gpu_steps.py --out compiled.jsonl --compile

A step is that of an ordinary loop in plain PyTorch: forward, backward, ``optimizer.step()``,
``zero_grad()``. One JSON line a case: seconds of a step, peaks of memory, and device seconds of
all kernels by ATen op and input shapes. ``gpu_predictions.py`` compares them with predictions.

With ``--compile`` each case is measured twice, eager and with its loss under ``torch.compile``.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rows import option, plain_parser, progress
from torch import Tensor
from torch.utils import _pytree as pytree

from heterog.graph.workload import Workload
from heterog.grouped import grouped
from heterog.zoo import load_workload

HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the latter to try this file
PRECISIONS = ("float32", "tf32", "bfloat16")
"""As torch is by default; with TF32 in products too; all weights and values in bfloat16. There is
also ``strict``: without TF32 in convolutions."""
_WARM_UP = 3
_LEAST_STEPS = 8
_SECONDS = 1.0


class Case(NamedTuple):
    """A workload, its batch size and a precision."""

    model: str
    batch_size: int
    precision: str


CASES = tuple(
    Case(model, batch_size, precision)
    for model, batch_size in (
        ("vgg19", 96), ("resnet50", 128), ("inception_v3", 96), ("mobilenet_v2", 128),
        ("vit_base", 64), ("gpt2", 16), ("bert_large_24l", 32), ("transformer_6l", 128),
        ("xlnet_large_24l", 16), ("bert_moe", 32), ("llama_1b", 4),
        ("training_models.py:lm_4l", 128), ("training_models.py:lm_14l_long", 12),
        ("training_models.py:mlp", 512), ("training_models.py:vgg_wide_head", 96),
        ("training_models.py:cells", 64), ("resnet50", 16), ("bert_large_24l", 4),
        ("vit_base", 8), ("training_models.py:lm_6l_wide", 64),
        ("training_models.py:resnet_shallow", 128), ("training_models.py:lm_32l", 32),
    )
    for precision in PRECISIONS
)  # fmt: skip

_COMPILED = (
    ("bert_large_24l", 16), ("gpt2", 16), ("resnet50", 64), ("vit_base", 64),
    ("training_models.py:lm_14l_long", 8), ("transformer_6l", 64), ("mobilenet_v2", 64),
    ("training_models.py:mlp", 512), ("training_models.py:vgg_wide_head", 64),
    ("training_models.py:lm_4l", 128),
)  # fmt: skip
COMPILED = (
    *(Case(model, batch_size, "bfloat16") for model, batch_size in _COMPILED),
    *(Case(model, batch_size, "tf32") for model, batch_size in _COMPILED[:4]),
)
"""Measured eager and compiled."""

HELD_OUT = tuple(
    Case(f"held_out_models.py:{model}", batch_size, precision)
    for precision in ("float32", "bfloat16")
    for model, batch_size in (
        ("convnext", 64), ("regnet", 64), ("swin", 64), ("segformer", 64), ("mobilenet_v1", 128),
        ("dinov2", 32), ("qwen", 8), ("t5", 32), ("deberta", 16), ("opt", 8), ("unet", 16),
        ("recommender", 4096),
    )
)  # fmt: skip
"""Other models, and other optimizers, to which nothing was fitted."""


def workload_of(case: Case) -> Workload:
    """The workload of a case; in bfloat16 with weights and inputs of that type."""
    source = str(HERE / case.model) if ".py:" in case.model else case.model
    found = load_workload(source, case.batch_size)
    if case.precision != "bfloat16":
        return found

    def batch() -> Any:
        return pytree.tree_map(_narrowed, found.make_batch())

    return replace(found, model=lambda: found.make_model().bfloat16(), example_batch=batch)


def _narrowed(value: Any) -> Any:
    is_wide = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.bfloat16() if is_wide else value


class Step:
    """A model on the device that can take steps, eager at first."""

    def __init__(self, case: Case) -> None:
        torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = case.precision != "strict"
        gc.collect()
        torch.cuda.empty_cache()
        self.case = case
        self.before = torch.cuda.memory_allocated()
        self.workload = workload_of(case)
        with torch.device(DEVICE):
            model = self.workload.make_model()
        self.model = model.to(DEVICE)
        self.batch: Any = pytree.tree_map(
            lambda v: v.to(DEVICE) if isinstance(v, Tensor) else v, self.workload.make_batch()
        )
        options = dict(self.workload.optimizer_options)
        self.optimizer = self.workload.optimizer(self.model.parameters(), **options)
        self.loss: Callable[[], Any] = self.eager_loss

    def eager_loss(self) -> Any:
        """The loss of the batch; another may take its place as ``loss``."""
        return self.workload.step_loss(self.model, self.batch)

    def __call__(self) -> None:
        """Take a step."""
        torch.autograd.backward(self.loss())
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_both(case: Case) -> Iterator[dict[str, Any]]:
    """The rows of a case, compiled and eager."""
    step = Step(case)
    compiled = torch.compile(lambda batch: step.workload.step_loss(step.model, batch))
    step.loss = lambda: compiled(step.batch)
    begin = time.perf_counter()
    step()
    _synchronize()
    compile_s = time.perf_counter() - begin
    yield {**measured_step(step, "compiled"), "compile_s": compile_s}
    torch.cuda.empty_cache()
    step.loss = step.eager_loss
    yield measured_step(step)


def measured_step(step: Step, execution: str = "eager") -> dict[str, Any]:
    """The row of a step."""
    row: dict[str, Any] = {**step.case._asdict(), "execution": execution, **_environment()}
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(_WARM_UP):
        step()
    row["seconds"], row["fastest_s"], row["steps"] = _seconds(step)
    row["allocated"] = torch.cuda.max_memory_allocated() - step.before
    row["reserved"] = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info() if DEVICE == "cuda" else (0, 0)
    row["used"] = total - free
    row["passes"] = _passes(step)
    row["kernels"] = _kernels(step)
    return row


def _seconds(step: Callable[[], None]) -> tuple[float, float, int]:
    """(median seconds of a step, the fastest, how many), each step waited for in blocks of two."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST_STEPS or time.perf_counter() - begin < _SECONDS:
        _synchronize()
        start = time.perf_counter()
        step()
        step()
        _synchronize()
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times), min(times), len(times)


def _passes(step: Step) -> dict[str, float]:
    """Seconds of each pass alone, and seconds after which the host has issued it."""
    found: dict[str, list[float]] = {}
    for _ in range(4):
        state: list[Any] = []
        for name, call in (
            ("forward", lambda state=state: state.append(step.loss())),
            ("backward", lambda state=state: state[0].backward()),
            ("update", step.optimizer.step),
        ):
            _synchronize()
            start = time.perf_counter()
            call()
            found.setdefault(f"{name}_issue", []).append(time.perf_counter() - start)
            _synchronize()
            found.setdefault(name, []).append(time.perf_counter() - start)
        step.optimizer.zero_grad()
    return {name: statistics.median(times) for name, times in found.items()}


def _kernels(step: Callable[[], None]) -> list[list[Any]]:
    """[ATen op, input shapes, calls a step, device seconds of one] of the ops that run kernels."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as recorded:
        step()
        _synchronize()
    rows = []
    for each in recorded.key_averages(group_by_input_shape=True):
        if each.self_device_time_total > 0 and each.key.startswith("aten::"):
            of_one = each.self_device_time_total * 1e-6 / each.count
            rows.append([each.key, each.input_shapes, each.count, of_one])
    launched = grouped(
        (event.name[:100], event.device_time * 1e-6)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA
    )
    for name, times in launched.items():
        rows.append([f"kernel {name}", [], len(times), sum(times) / len(times)])
    return rows


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _environment() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def measured(
    cases: Sequence[Case], budget_s: float, rows_of: Callable[[Case], Iterable[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Rows of cases, until the seconds are spent; that of a case that fails says why."""
    begin = time.perf_counter()
    for case in cases:
        if time.perf_counter() - begin > budget_s:
            progress(f"no time left for {case}")
            continue
        try:
            yield from rows_of(case)
        except Exception as error:  # one case that fails must not cost the others
            yield {**case._asdict(), **_environment(), "error": repr(error)[:500]}
        torch._dynamo.reset()


def main() -> None:
    """Measure all cases."""
    arguments = plain_parser(
        __doc__,
        option("--out", type=Path, required=True),
        option("--held-out", action="store_true", help="the models nothing is fitted to"),
        option("--only", default=""),
        option("--precisions", default=",".join(PRECISIONS)),
        option("--budget", type=float, default=600.0),
        option("--compile", action="store_true", help="both eager and torch.compile"),
        option("--batch-size", type=int, default=None, help="instead of each case's own"),
    ).parse_args()
    only = [name for name in arguments.only.split(",") if name]
    cases = HELD_OUT if arguments.held_out else COMPILED if arguments.compile else CASES
    if arguments.precisions == "strict":
        cases = tuple(case._replace(precision="strict") for case in cases[::3])
    chosen = [
        case
        for case in cases
        if (not only or case.model in only) and case.precision in arguments.precisions.split(",")
    ]
    if arguments.batch_size is not None:
        chosen = [case._replace(batch_size=arguments.batch_size) for case in chosen]
    rows_of = measure_both if arguments.compile else lambda case: [measured_step(Step(case))]
    with arguments.out.open("w", encoding="utf-8") as file:
        for row in measured(chosen, arguments.budget, rows_of):
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress(row)


if __name__ == "__main__":
    main()
