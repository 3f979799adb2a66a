"""``heterog capture``: one training step of a model as a graph file."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli.common import (
    BatchOption,
    JsonOption,
    ModelArgument,
    load_model_graph,
    print_result,
)
from heterog.cli.outputs import JSON
from heterog.units import format_bytes

if TYPE_CHECKING:
    from heterog.graph.op_graph import OpGraph


def capture(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="graph.json or graph.json.gz"), JSON
    ],
    batch_size: BatchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture one training step of a model as a graph file."""
    from heterog.graph.serialize import save_graph

    begin = time.perf_counter()
    graph = load_model_graph(model, batch_size)
    seconds = time.perf_counter() - begin
    save_graph(graph, output)
    summary = graph_summary(graph) | {"capture_seconds": seconds, "file": str(output)}
    unruled = summary["ops_without_rule"]
    print_result(
        as_json,
        summary,
        f"{graph.name}: {summary['num_ops']:,} ops ({summary['num_kernels']:,} kernels), "
        f"{graph.num_parameters:,} parameters, batch {graph.batch_size}, "
        f"{summary['flops'] / 1e12:.2f} TFLOP and {format_bytes(summary['bytes_moved'])} moved "
        f"per step, {format_bytes(summary['peak_live_bytes'])} at the peak on one device, "
        f"{summary['num_groups']} groups; {seconds:.1f} s -> {output}",
        *[f"without a sharding rule, run replicated: {unruled}"] * bool(unruled),
    )


def graph_summary(graph: "OpGraph") -> dict[str, Any]:
    """The most important facts about a graph."""
    from heterog.graph.batch_plan import batch_plan
    from heterog.graph.grouping import group_ops

    batch = batch_plan(graph)
    return {
        "name": graph.name,
        "batch_size": graph.batch_size,
        "num_ops": graph.num_ops,
        "num_kernels": int((~graph.is_view).sum()),
        "num_parameters": graph.num_parameters,
        "num_groups": group_ops(graph).num_groups,
        "flops": float(graph.flops.sum()),
        "bytes_moved": float(graph.bytes_moved.sum()),
        "peak_live_bytes": graph.peak_live_bytes,
        "optimizer": graph.optimizer,
        "optimizer_state_ratio": graph.optimizer_state_ratio,
        "ops_without_rule": sorted({graph.ops[index].kind for index in batch.unruled}),
        "fingerprint": graph.fingerprint,
    }
