"""Compares predictions of the shipped device models with steps measured by ``gpu_steps.py``.

    python experiments/gpu_predictions.py experiments/measured/h200_held_out.jsonl.gz --json

``measured/`` has the steps of one H200. Nothing is calibrated: predictions know only the name of
the GPU's type. ``rows`` has one entry a case: seconds and peak memory, measured and predicted, and
device seconds by family of kernels.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_steps import Case, workload_of
from published.hosts import alike_hosts
from rows import asked_of, finish, option, read_rows, told

from heterog.cluster.catalog import device_type
from heterog.cluster.topology import Cluster, Execution, Tf32
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.pricing.device_models.model import DeviceModels
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout

FAMILIES = {
    "convolution": ("convolution",),
    "attention": ("attention",),
    "product": ("mm", "addmm", "bmm", "baddbmm", "grouped_mm"),
    "batch norm": ("batch_norm",),
    "layer norm": ("layer_norm",),
    "softmax": ("softmax",),
    "update": ("foreach", "fused_adam", "update"),
    "dropout": ("dropout", "bernoulli", "rand"),
    "loss": ("nll_loss",),
    "embedding": ("embedding", "index_select", "gather", "scatter", "index"),
    "pooling": ("pool",),
}
"""Parts of names of ATen ops, the first that fits; all others are ``elementwise``."""

OF_LIBRARIES = ("convolution", "attention", "product", "update")
"""Families that ``torch.compile`` leaves as they are; the rest is ``fused``."""

TF32 = {
    "strict": "none",
    "float32": "convolutions",
    "tf32": "everything",
    "bfloat16": "convolutions",
}
"""What a cluster file says for each precision."""


def family_of(name: str) -> str:
    """Family of an ATen op, or of a graph's.

    >>> family_of("aten::cudnn_convolution"), family_of("add.Tensor")
    ('convolution', 'elementwise')
    """
    plain = name.removeprefix("aten::").partition(".")[0].lstrip("_")
    for family, parts in FAMILIES.items():
        if family == "product" and plain in parts:
            return family
        if family != "product" and any(part in plain for part in parts):
            return family
    return "elementwise"


def one_gpu(label: str, tf32: str, execution: str = "eager") -> Cluster:
    """One device of the type of a GPU's label."""
    name = device_type(label.removeprefix("NVIDIA ").partition(" ")[0]).name
    cluster = alike_hosts(name, 1, intra="pcie4", nic="{line_rate: 1 Gbit/s}")
    return replace(cluster, tf32=Tf32(tf32), execution=Execution(execution))


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """One case, measured and predicted."""
    case = Case(row["model"], row["batch_size"], row["precision"])
    graph = capture(workload_of(case))
    execution = row.get("execution", "eager")
    cluster = one_gpu(row["device"], TF32[case.precision], execution)
    evaluator = Evaluator(graph, cluster)
    placed = place_layout(parse_layout("num_micro=1"), graph, cluster)
    found = evaluator.evaluate(placed.strategy, Order.FIFO)
    interval = evaluator.interval(found.step_time_s, placed.strategy)
    result = {
        **case._asdict(),
        "execution": execution,
        "measured_s": row["seconds"],
        "predicted_s": found.step_time_s,
        "off": found.step_time_s / row["seconds"] - 1.0,
        "in_interval": interval[0] <= row["seconds"] <= interval[1],
        "allocated": row["allocated"],
        "peak": float(max(found.peak_memory_bytes)),
    }
    result["families"] = by_family(row, graph, cluster)
    return result


def by_family(
    row: Mapping[str, Any], graph: OpGraph, cluster: Cluster
) -> dict[str, dict[str, float]]:
    """Device seconds of kernels in a step by family, measured and predicted."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"measured": 0.0, "predicted": 0.0})
    is_compiled = cluster.execution.compiles
    for name, _, count, seconds in row["kernels"]:
        if name.startswith("aten::"):
            found[family_of(name)]["measured"] += count * seconds
        elif name.startswith("kernel triton"):
            found["fused"]["measured"] += count * seconds
    kind = cluster.device_types[0]
    models = DeviceModels(cluster.execution, host_s=0.0).on(cluster)
    models.host = replace(models.host, graph_s=0.0)
    own = models.kernel_seconds(graph, kind, graph.flops, graph.bytes_moved)
    for op, seconds in zip(graph.ops, own.tolist(), strict=True):
        family = family_of(op.kind)
        if is_compiled and family not in OF_LIBRARIES:
            family = "fused"
        found[family]["predicted"] += seconds
    return dict(found)


def main() -> None:
    """Compare all rows."""
    arguments = asked_of(
        __doc__, option("steps", type=Path, nargs="+"), option("--only", default="")
    )
    only = arguments.only.split(",") if arguments.only else None
    for path in arguments.steps:
        if not path.is_file():
            raise SystemExit(f"{path} is no file")
    measured = [r for path in arguments.steps for r in read_rows(path) if "error" not in r]
    rows = told(compared(row) for row in measured if only is None or row["model"] in only)
    errors = [abs(each["off"]) for each in rows]
    peaks = [abs(each["peak"] / each["allocated"] - 1.0) for each in rows]
    summary = {
        "num_rows": len(rows),
        "mean": statistics.fmean(errors),
        "median": statistics.median(errors),
        "in_intervals": sum(each["in_interval"] for each in rows),
        "peak_median": statistics.median(peaks),
    }
    finish(arguments, {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
