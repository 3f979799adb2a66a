"""Commands that list built-in names, or make the files of a graph and of a cluster.

``heterog models``, ``clusters``, ``devices``, ``links`` and ``methods`` are the lists; ``capture``
writes one training step as a graph, ``cluster`` makes cluster files.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli.common import BatchOption, JsonOption, ModelArgument, load_model, print_result
from heterog.cli.outputs import JSON, YAML
from heterog.errors import UnknownNameError
from heterog.units import format_bytes

if TYPE_CHECKING:
    from heterog.cluster.catalog import ListedType
    from heterog.graph.op_graph import OpGraph


def models(as_json: JsonOption = False) -> None:
    """List the built-in models."""
    from heterog.report.tables import models_table
    from heterog.zoo import entry, names

    entries = [entry(name) for name in names()]
    print_result(as_json, _fields(entries, *_OF_A_MODEL), models_table(entries))


_OF_A_MODEL = ("name", "family", "default_batch_size", "num_parameters", "description")


def _fields(rows: Iterable[object], *names: str) -> list[dict[str, Any]]:
    return [{name: getattr(row, name) for name in names} for row in rows]


def clusters(as_json: JsonOption = False) -> None:
    """List the built-in clusters and testbeds."""
    from heterog.cluster import Cluster, preset_names
    from heterog.report.tables import clusters_table
    from heterog.runtime.ranks.testbed import load_testbed, shipped_testbeds

    presets = [Cluster.load(name) for name in preset_names()]
    testbeds = [load_testbed(name) for name in shipped_testbeds()]
    print_result(
        as_json,
        [cluster.to_dict() for cluster in (*presets, *testbeds)],
        clusters_table(presets),
        clusters_table(testbeds, title="testbeds: shaped ranks on this machine (Linux)"),
    )


def devices(as_json: JsonOption = False) -> None:
    """List the device types, with numbers and data sheets."""
    from heterog.cluster.catalog import listed_types
    from heterog.report.tables import devices_table, sources_text

    listed = listed_types()
    sources = sources_text([each.type.source for each in listed])
    print_result(as_json, [_device(each) for each in listed], devices_table(listed), sources)


def _device(each: "ListedType") -> dict[str, Any]:
    return {
        "name": each.type.name,
        "vendor": each.vendor,
        "memory_bytes": each.type.memory_bytes,
        "memory_bandwidth_bytes_per_s": each.type.memory_bandwidth_bytes_per_s,
        "peak_flops_per_s": dict(each.type.peak_flops_per_s),
        "tf32_flops_per_s": each.tf32_flops_per_s,
        "source": each.type.source,
    }


def links(as_json: JsonOption = False) -> None:
    """List the links and networks that clusters can name."""
    from heterog.cluster.catalog import link_kinds, network_kinds
    from heterog.report.tables import links_table, networks_table, sources_text

    inner, networks = link_kinds(), network_kinds()
    document = {
        "intra": [
            {
                "name": each.name,
                "aliases": list(each.aliases),
                "bandwidth_bytes_per_s": each.link.bandwidth_bytes_per_s,
                "sheet_bytes_per_s": each.sheet_bytes_per_s,
                "latency_s": each.link.latency_s,
                "source": each.sheet,
                "share": each.share,
            }
            for each in inner
        ],
        "nic": [
            {
                "name": each.name,
                "aliases": list(each.aliases),
                "line_rate_bytes_per_s": each.line_rate_bytes_per_s,
                "source": each.sheet,
            }
            for each in networks
        ],
    }
    sources = sources_text([f"{each.sheet}; used: {each.share}" for each in inner])
    print_result(as_json, document, links_table(inner), sources, networks_table(networks))


def methods(as_json: JsonOption = False) -> None:
    """List the methods: what each does and needs."""
    from heterog.methods.built_in import METHODS
    from heterog.report.tables import planners_table

    document = _fields(METHODS, "name", "stage", "what", "needs")
    print_result(as_json, document, planners_table(METHODS))


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
    graph = load_model(model, batch_size)[0]
    seconds = time.perf_counter() - begin
    save_graph(graph, output)
    summary = graph_summary(graph) | {"capture_seconds": seconds, "file": str(output)}
    unruled = summary["ops_without_rule"]
    print_result(
        as_json,
        summary,
        f"{graph.name}: {summary['num_ops']:,} ops ({summary['num_kernels']:,} kernels), "
        f"{graph.num_parameters:,} parameters, batch {graph.batch_size}, "
        f"{summary['flops'] / 1e9:,.1f} GFLOP and {format_bytes(summary['bytes_moved'])} moved "
        f"per step, {format_bytes(summary['peak_live_bytes'])} at the peak on one device, "
        f"{summary['num_groups']} groups; {seconds:.1f} s -> {output}",
        *[f"without a sharding rule, run replicated: {unruled}"] * bool(unruled),
    )


def graph_summary(graph: "OpGraph") -> dict[str, Any]:
    """The most important facts about a graph."""
    from heterog.graph.batch_plan import batch_plan
    from heterog.graph.grouping import group_ops

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
        "ops_without_rule": sorted({graph.ops[index].kind for index in batch_plan(graph).unruled}),
        "fingerprint": graph.fingerprint,
    }


def detect(
    output: Annotated[Path, typer.Option("-o", "--output", help="cluster.yaml"), YAML],
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="of what: local (this machine), ray (nodes of RAY_ADDRESS), torchrun (it starts "
            "this on each machine) or slurm (nodes of this job)",
        ),
    ] = "local",
    as_json: JsonOption = False,
) -> None:
    """Write a first cluster file of this machine or of several; its comments say what to check."""
    from heterog.cluster.spec import parse_cluster
    from heterog.files import write_atomically
    from heterog.report.tables import clusters_table
    from heterog.runtime.measure.detect import cluster_yaml
    from heterog.runtime.measure.detect import detect as detect_machine

    if on == "local":
        machines = [detect_machine()]
    elif on in ("ray", "torchrun", "slurm"):
        from heterog.runtime.measure.detect_hosts import detect_on

        machines = detect_on(on)
        if not machines:
            return  # a rank of torchrun that is not the first
    else:
        raise UnknownNameError("engine", on, ("local", "ray", "torchrun", "slurm"))
    text = cluster_yaml(*machines)
    found = parse_cluster(text, output)
    write_atomically(output, text.encode())
    checks = [line.strip() for line in text.splitlines() if "check: " in line]
    print_result(
        as_json,
        {"file": str(output), "cluster": found.to_dict(), "checks": checks},
        clusters_table([found]),
        f"cluster: {output}; check these lines:",
        *(f"  {line}" for line in checks),
    )
