"""The command line: it parses, calls, and prints; every decision is made elsewhere.

With ``--json`` one document goes to stdout and nothing else; progress and notes go to stderr. Bad
input ends with exit code 2 and one clear line.
"""

import csv
import io
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from heterog.errors import HeterogError, UnknownNameError
from heterog.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from heterog.cluster import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.simulator.calibration import Measurements

app = typer.Typer(
    help="Finds how to train a PyTorch model on a cluster of unequal GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
cluster_app = typer.Typer(help="Make cluster files.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")
out = Console(width=100 if not sys.stdout.isatty() else None)
err = Console(stderr=True)

ModelArgument = Annotated[
    str, typer.Argument(help="zoo name, path/to/file.py:function, or a saved graph")
]
ClusterOption = Annotated[str, typer.Option("--cluster", help="preset name or YAML file")]
BatchOption = Annotated[int | None, typer.Option("--batch-size", help="global batch size")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
BudgetOption = Annotated[str, typer.Option("--budget", help="30s, 2m, or 5000e (evaluations)")]
SeedOption = Annotated[int, typer.Option("--seed")]


def main() -> None:
    """Run the command line; exit code 2 and one line on bad input."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        app()
    except HeterogError as error:
        print(f"heterog: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("heterog: interrupted", file=sys.stderr)
        sys.exit(130)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List the built-in models."""
    from heterog.report.tables import models_table
    from heterog.zoo import entry, names

    entries = [entry(name) for name in names()]
    if as_json:
        _print_json(
            [
                {
                    "name": each.name,
                    "family": each.family,
                    "default_batch_size": each.default_batch_size,
                    "num_parameters": each.num_parameters,
                    "description": each.description,
                }
                for each in entries
            ]
        )
    else:
        out.print(models_table(entries))


@app.command()
def clusters(as_json: JsonOption = False) -> None:
    """List the built-in clusters."""
    from heterog.cluster import Cluster, preset_names
    from heterog.report.tables import clusters_table

    presets = [Cluster.load(name) for name in preset_names()]
    if as_json:
        _print_json([cluster.to_dict() for cluster in presets])
    else:
        out.print(clusters_table(presets))


@app.command()
def capture(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="graph.json or graph.json.gz")],
    batch_size: BatchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture one training step of a model as a graph file."""
    from heterog.files import check_writable
    from heterog.graph.serialize import save_graph

    check_writable(output)
    begin = time.perf_counter()
    graph = _graph(model, batch_size)
    seconds = time.perf_counter() - begin
    save_graph(graph, output)
    summary = graph_summary(graph) | {"capture_seconds": seconds, "file": str(output)}
    if as_json:
        _print_json(summary)
        return
    out.print(
        f"{graph.name}: {summary['num_ops']:,} ops ({summary['num_kernels']:,} kernels), "
        f"{graph.num_parameters:,} parameters, batch {graph.batch_size}, "
        f"{summary['flops'] / 1e12:.2f} TFLOP and {format_bytes(summary['bytes_moved'])} moved "
        f"per step, {format_bytes(summary['peak_live_bytes'])} at the peak on one device, "
        f"{summary['num_groups']} groups; {seconds:.1f} s -> {output}"
    )
    if summary["ops_without_rule"]:
        out.print(f"without a sharding rule, run replicated: {summary['ops_without_rule']}")


@app.command()
def plan(
    model: ModelArgument,
    cluster: ClusterOption,
    batch_size: BatchOption = None,
    method: Annotated[str, typer.Option("--method", help="auto, or names with commas")] = "auto",
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    order: Annotated[str, typer.Option("--order", help="best, fifo, rank or program")] = "best",
    no_step_barrier: Annotated[
        bool,
        typer.Option("--no-step-barrier", help="the next step may start before all updates end"),
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="plan.json")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="trace.json for ui.perfetto.dev")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find how to train a model on a cluster."""
    from heterog.files import check_writable
    from heterog.planners.plan import check_batch, make_plan, parse_orders
    from heterog.planners.planner import Budget

    for path in (output, trace):
        if path is not None:
            check_writable(path)
    parsed = Budget.parse(budget)
    parse_orders(order)
    methods = _methods(method)
    target = _cluster(cluster)
    with _progress(as_json) as progress:
        progress("capture", 0.0, float("inf"))
        graph = _graph(model, batch_size)
        check_batch(graph, target)
        found = make_plan(
            graph,
            target,
            methods=methods,
            budget=parsed,
            seed=seed,
            order=order,
            step_barrier=not no_step_barrier,
            progress=progress,
        )
    if output is not None:
        found.save(output)
    if trace is not None:
        from heterog.report.trace import write_trace

        write_trace(trace, found.timeline())
    extrapolated = _extrapolated(found)
    if as_json:
        _print_json(found.summary() | {"extrapolated": extrapolated})
        return
    from heterog.report.tables import methods_table

    out.print(methods_table(found.rows, target, title=_title(found)))
    out.print(_verdict(found))
    if extrapolated is not None:
        out.print(_trust(found.calibration, extrapolated), soft_wrap=True)
    for path, what in ((output, "plan"), (trace, "trace (open it in https://ui.perfetto.dev)")):
        if path is not None:
            out.print(f"{what}: {path}", soft_wrap=True)


@app.command()
def compare(
    models: Annotated[str, typer.Option("--models", help="names with commas")],
    clusters: Annotated[str, typer.Option("--clusters", help="names with commas")],
    methods: Annotated[str, typer.Option("--methods", help="auto, or names")] = "auto",
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    order: Annotated[str, typer.Option("--order")] = "best",
    no_step_barrier: Annotated[bool, typer.Option("--no-step-barrier")] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="write the rows there")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods over models and clusters; every method gets the full budget."""
    from heterog.files import check_writable, write_atomically
    from heterog.planners.compare import compare_methods
    from heterog.planners.plan import check_batch, parse_orders
    from heterog.planners.planner import Budget
    from heterog.report.tables import methods_table

    if csv_file is not None:
        check_writable(csv_file)
    parsed = Budget.parse(budget)
    orders = parse_orders(order)
    names = _methods(methods)
    targets = [_cluster(name) for name in _names(clusters)]
    documents: list[dict[str, Any]] = []
    for model in _names(models):
        with _progress(as_json) as progress:
            progress(f"capture {model}", 0.0, float("inf"))
            graph = _graph(model, None)
        for target in targets:
            check_batch(graph, target)
            with _progress(as_json) as progress:
                result = compare_methods(
                    graph,
                    target,
                    names,
                    budget=parsed,
                    seed=seed,
                    step_barrier=not no_step_barrier,
                    orders=orders,
                    progress=progress,
                )
            documents += result.to_dicts()
            if not as_json:
                title = f"{graph.name}, batch {graph.batch_size}, on {target.name}"
                out.print(methods_table(result.rows, target, title=title))
    if csv_file is not None:
        write_atomically(csv_file, _csv(documents).encode())
    if as_json:
        _print_json({"rows": documents})


@app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    model: Annotated[str, typer.Option("--model", help="if the plan does not name it")] = "",
    steps: Annotated[int, typer.Option("--steps", help="measured training steps")] = 10,
    testbed: Annotated[
        str,
        typer.Option("--testbed", help="shaped CPUs and links: a shipped name or a YAML file"),
    ] = "",
    timeout: Annotated[str, typer.Option("--timeout", help="of the whole job")] = "300s",
    step_timeout: Annotated[
        str, typer.Option("--step-timeout", help="after which a step counts as hung")
    ] = "300s",
    save: Annotated[
        Path | None, typer.Option("--save", help="folder for a checkpoint at the end")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="checkpoint to begin with, also of another plan"),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            envvar="MASTER_PORT",
            help="where ranks meet; 0 is any that is free",
        ),
    ] = 0,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="go on when the loss is not finite")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="trace.json with predicted and measured lanes"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train with a plan on local processes, one per device, or on a local testbed."""
    from contextlib import ExitStack

    from heterog.files import check_writable
    from heterog.planners.plan import load_plan
    from heterog.runtime.launch import run_ranks
    from heterog.runtime.testbed import Testbed, load_testbed
    from heterog.units import parse_seconds

    if steps < 1:
        raise HeterogError(f"--steps is {steps}; measure at least one step.")
    if trace is not None:
        check_writable(trace)
    loaded = load_plan(plan)
    if loaded.step_time_s is None:
        raise HeterogError(f"{plan} does not fit into memory ({loaded.shortage}); plan again.")
    with ExitStack() as stack:
        options: dict[str, Any] = {}
        if testbed:
            cluster = load_testbed(testbed)
            difference = loaded.cluster.describe_difference(cluster)
            if difference is not None:
                raise HeterogError(
                    f"{plan} was made for another cluster than the testbed: {difference}; plan "
                    f"with --cluster {testbed}."
                )
            bed = stack.enter_context(Testbed(cluster))
            options = {"wrap": bed.command, "environment": bed.environment}
        show = stack.enter_context(_progress(as_json))
        measured = run_ranks(
            plan,
            loaded.cluster.num_devices,
            model=model,
            num_steps=steps,
            timeout_s=parse_seconds(timeout),
            step_timeout_s=parse_seconds(step_timeout),
            port=port,
            save=save,
            resume=resume,
            allow_nonfinite=allow_nonfinite,
            record=True,
            progress=lambda stage: show(*_stage(stage)),
            **options,
        )
    if trace is not None:
        from heterog.report.trace import write_comparison

        write_comparison(trace, loaded.timeline(), loaded.measured_timeline(measured["tasks"]))
    if as_json:
        _print_json(measured)
        return
    first, last = (
        float("nan") if loss is None else loss
        for loss in (measured["losses"][0], measured["losses"][-1])
    )
    out.print(
        f"{measured['model']} on {measured['num_ranks']} "
        f"{'ranks of testbed ' + testbed if testbed else 'local ranks'}: "
        f"{format_seconds(measured['step_time_s'])} a step (median of {steps}, "
        f"{format_seconds(measured['step_time_min_s'])} to "
        f"{format_seconds(measured['step_time_max_s'])}), predicted for {loaded.cluster.name} "
        f"{format_seconds(loaded.step_time_s)}; loss {first:.4f} -> {last:.4f}"
    )
    if save is not None:
        out.print(f"checkpoint: {save}", soft_wrap=True)


@app.command()
def profile(
    models: Annotated[
        str, typer.Argument(metavar="MODEL[,MODEL...]", help="zoo names or file.py:function")
    ],
    output: Annotated[Path, typer.Option("-o", "--output")] = Path("measurements.json"),
    batch_size: BatchOption = None,
    testbed: Annotated[
        str,
        typer.Option("--testbed", help="measure on its ranks: a shipped name or a YAML file"),
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", help="names the device types; needed under torchrun")
    ] = "",
    device_type: Annotated[
        str, typer.Option("--device-type", help="what cluster files call this device")
    ] = "",
    timeout: Annotated[str, typer.Option("--timeout", help="of the whole job")] = "1h",
    as_json: JsonOption = False,
) -> None:
    """Measure models on this machine, on a testbed, or on the ranks of torchrun.

    What is done is kept beside the output, and the same command goes on with it.
    """
    import os

    from heterog.files import check_writable
    from heterog.units import parse_seconds

    check_writable(output)
    timeout_s = parse_seconds(timeout)
    sources = _names(models)
    _check_profile_options(testbed, cluster, device_type)
    named = _cluster(cluster) if cluster else None
    if testbed:
        from heterog.runtime.testbed import load_testbed

        named = load_testbed(testbed)
    for source in sources:
        _check_workload(source, batch_size)
    from heterog.runtime import profiler
    from heterog.simulator.calibration import Measurements

    journal = output.with_name(f"{output.name}.partial")
    as_rank = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not testbed
    rank = int(os.environ.get("RANK", "0")) if as_rank else 0
    measured: Measurements | None = None
    with _progress(as_json or rank > 0) as show:

        def tell(stage: str) -> None:
            show(*_stage(stage))

        if testbed:
            assert named is not None
            measured = profiler.profile_cluster(
                sources, named, journal, batch_size=batch_size, timeout_s=timeout_s, tell=tell
            )
        elif as_rank:
            if named is None:
                raise HeterogError(
                    "links are measured between the devices of a cluster: pass --cluster FILE "
                    "('heterog cluster detect' writes a first one)."
                )
            profiler.profile_as_rank(
                sources,
                named,
                journal,
                output,
                batch_size=batch_size,
                timeout_s=timeout_s,
                tell=tell,
            )
            if rank == 0:
                measured = Measurements.load(output)
        else:
            kind = device_type or (named.devices[0].type.name if named else _local_type_name())
            measured = profiler.profile_here(
                sources, journal, kind, batch_size=batch_size, tell=tell
            )
    if measured is not None:
        measured.save(output)
    profiler.remove_journal(journal)
    if measured is not None:
        _print_measured(measured, output, as_json=as_json)


@app.command()
def calibrate(
    measurements: Annotated[list[Path], typer.Argument(help="files of 'heterog profile'")],
    output: Annotated[Path, typer.Option("-o", "--output", help="calibration.json")],
    cluster: Annotated[
        str, typer.Option("--cluster", help="whose links were measured, if not in the file")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Fit a cost model to measurements, for the field 'calibration' of a cluster file."""
    from heterog.files import check_writable
    from heterog.simulator.calibration import Measurements, link_error, merge
    from heterog.simulator.calibration import calibrate as fit

    check_writable(output)
    measured = merge([Measurements.load(path) for path in measurements])
    target = _cluster(cluster) if cluster else _measured_cluster(measured)
    if measured.links and target is None:
        raise HeterogError(
            f"{measurements[0]} holds links, but not of which cluster; pass --cluster."
        )
    found = fit(measured, target, name=output.name.removesuffix(".gz").removesuffix(".json"))
    errors = link_error(measured.links, target) if target is not None else {}
    found.save(output)
    types = {
        kind: {
            "ops": len(fitted.curves),
            "measurements": sum(row.device_type == kind for row in measured.ops),
            "kinds": sorted(fitted.kinds),
            "error_ops": _number_or_none(found.held_out_error[kind][0]),
            "error_models": _number_or_none(found.held_out_error[kind][1]),
        }
        for kind, fitted in found.types.items()
    }
    links = {
        kind: {
            "measurements": sum(row.kind == kind for row in measured.links),
            "latency_factor": factors[0],
            "bytes_factor": factors[1],
            "error": errors.get(kind),
        }
        for kind, factors in found.links.factors.items()
    }
    if as_json:
        _print_json(
            {
                "name": found.name,
                "file": str(output),
                "device_types": types,
                "links": links,
                "link_rates_bytes_per_s": dict(found.links.rates),
            }
        )
        return
    _print_calibration(types, links)
    out.print(
        f"calibration: {output} (name it in a cluster file: 'calibration: {output.name}')",
        soft_wrap=True,
    )


@cluster_app.command("detect")
def cluster_detect(
    output: Annotated[Path, typer.Option("-o", "--output", help="cluster.yaml")],
    as_json: JsonOption = False,
) -> None:
    """Write a first cluster file of this machine; its comments say what to check."""
    from heterog.cluster.spec import parse_cluster
    from heterog.files import check_writable, write_atomically
    from heterog.runtime.detect import cluster_yaml, detect

    check_writable(output)
    text = cluster_yaml(detect())
    found = parse_cluster(text, output)
    write_atomically(output, text.encode())
    checks = [line.strip() for line in text.splitlines() if "check: " in line]
    if as_json:
        _print_json({"file": str(output), "cluster": found.to_dict(), "checks": checks})
        return
    from heterog.report.tables import clusters_table

    out.print(clusters_table([found]))
    out.print(f"cluster: {output}; check these lines:", soft_wrap=True)
    for line in checks:
        out.print(f"  {line}", soft_wrap=True, markup=False)


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    target: Annotated[
        str, typer.Option("--to", help="ddp, torchrun, slurm, kubernetes or deepspeed")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder to make")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="renew an export; an edited user.py is kept")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as a folder for another launcher or framework."""
    from heterog.export import check_folder, check_target, make_export, write_folder
    from heterog.planners.plan import load_plan

    check_target(target)
    check_folder(output, target, overwrite=overwrite)
    made = make_export(load_plan(plan), target)
    written = write_folder(made, output, overwrite=overwrite)
    if as_json:
        _print_json(
            {
                "target": target,
                "folder": str(output),
                "files": [str(path) for path in written],
                "not_expressed": list(made.not_expressed),
            }
        )
        return
    out.print(
        f"{target}: {len(written)} files in {output}; its README.md says how to start it.",
        soft_wrap=True,
    )
    for remark in made.not_expressed:
        out.print(f"not expressed: {remark}", soft_wrap=True, markup=False)


def graph_summary(graph: "OpGraph") -> dict[str, Any]:
    """What there is to know about a graph at a glance."""
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


def _graph(model: str, batch_size: int | None) -> "OpGraph":
    """The graph of a zoo name, a user's function, or a saved file."""
    if model.endswith((".json", ".json.gz")):
        from heterog.graph.serialize import load_graph

        graph = load_graph(model)
        if batch_size not in (None, graph.batch_size):
            raise HeterogError(
                f"{model} was captured with batch size {graph.batch_size}, not {batch_size}; "
                "capture the model again with --batch-size."
            )
        return graph
    from heterog.zoo import load_workload

    workload = load_workload(model, batch_size)
    # Only now: a wrong name is told without waiting for torch.
    from heterog.graph import capture as capturing

    captured: OpGraph = capturing.capture(workload)
    return captured


def _cluster(source: str) -> "Cluster":
    """A preset, a YAML file, or a shipped testbed."""
    from heterog.cluster import Cluster
    from heterog.runtime.testbed import load_testbed, shipped_testbeds

    return load_testbed(source) if source in shipped_testbeds() else Cluster.load(source)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise HeterogError("an empty list of names; separate names with commas.")
    return names


def _methods(text: str) -> list[str]:
    """Names of methods, checked before anything slow happens."""
    from heterog.planners import portfolio
    from heterog.planners.planner import planners

    known = [portfolio.AUTO, *(planner.name for planner in planners())]
    names = _names(text)
    for name in names:
        if name not in known:
            raise UnknownNameError("method", name, known)
    return names


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, float, float], None]]:
    """A progress line on stderr; plain lines where that is no terminal."""
    if not err.is_terminal:
        seen: set[str] = set()

        def tell(method: str, fraction: float, best: float) -> None:
            if method not in seen and not quiet:
                seen.add(method)
                print(f"{method} ...", file=sys.stderr)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        line = bar.add_task("", total=1.0)

        def show(method: str, fraction: float, best: float) -> None:
            found = "" if best == float("inf") else f", best {format_seconds(best)}"
            bar.update(line, completed=min(fraction, 1.0), description=f"{method}{found}")

        yield show


def _stage(stage: str) -> tuple[str, float, float]:
    """What a rank says it does, as progress: what is counted is a bar, the rest is a word."""
    counted, _, what = stage.partition(": ")
    match counted.split():
        case ["step", number, "of", last]:
            return "training", int(number) / int(last), float("inf")
        case ["ops" | "links" as word, number, "of", last]:
            return what or f"measuring {word}", int(number) / int(last), float("inf")
    return stage, 0.0, float("inf")


def _check_profile_options(testbed: str, cluster: str, device_type: str) -> None:
    for name, value in (("--cluster", cluster), ("--device-type", device_type)):
        if testbed and value:
            raise HeterogError(f"{name} {value} and --testbed {testbed}: a testbed has its own.")


def _check_workload(source: str, batch_size: int | None) -> None:
    """Refuse a model that cannot be made, before anything slow happens."""
    if source.endswith((".json", ".json.gz")):
        raise HeterogError(
            f"{source} is a saved graph, which cannot be run; name the model itself, as "
            "file.py:function."
        )
    from heterog.zoo import load_workload

    load_workload(source, batch_size)


def _local_type_name() -> str:
    from heterog.runtime.detect import local_type_name

    return local_type_name()


def _measured_cluster(measured: "Measurements") -> "Cluster | None":
    """The cluster whose links were measured."""
    from heterog.cluster import Cluster

    return None if measured.cluster is None else Cluster.from_dict(measured.cluster)


def _print_measured(measured: "Measurements", output: Path, *, as_json: bool) -> None:
    from heterog.simulator.calibration import STEP

    types = sorted({row.device_type for row in measured.ops})
    models = sorted({row.model for row in measured.ops})
    summary: dict[str, Any] = {
        "file": str(output),
        "models": models,
        "device_types": types,
        "num_ops": len({row.signature for row in measured.ops if row.signature}),
        "num_op_measurements": len(measured.ops),
        "num_link_measurements": len(measured.links),
        "steps": [
            {
                "model": row.model,
                "device_type": row.device_type,
                "samples": row.samples,
                "step_time_s": row.seconds,
                "peak_memory_bytes": round(row.num_bytes),
            }
            for row in measured.ops
            if row.kind == STEP
        ],
        "environment": dict(measured.environment),
    }
    if as_json:
        _print_json(summary)
        return
    out.print(
        f"{summary['num_ops']:,} ops of {', '.join(models)} on {', '.join(types)} in "
        f"{len(measured.ops):,} measurements, {len(measured.links):,} of links -> {output}",
        soft_wrap=True,
        markup=False,
    )
    for step in summary["steps"]:
        out.print(
            f"{step['model']}, {step['samples']} samples on {step['device_type']}: "
            f"{format_seconds(step['step_time_s'])} a step, at most "
            f"{format_bytes(step['peak_memory_bytes'])}",
            soft_wrap=True,
            markup=False,
        )
    out.print(f"next: heterog calibrate {output} -o calibration.json", soft_wrap=True)


def _print_calibration(types: dict[str, Any], links: dict[str, Any]) -> None:
    """What was fitted, and how far off it is where it was not fitted."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for number, column in enumerate(columns):
            made.add_column(column, justify="right" if number else "left")
        return made

    def percent(error: float | None) -> str:
        return "-" if error is None else f"{error:.1%}"

    ops = table("ops", "device type", "ops", "kinds", "error, new ops", "error, new models")
    for name, row in types.items():
        errors = (percent(row["error_ops"]), percent(row["error_models"]))
        ops.add_row(escape(name), f"{row['ops']:,}", str(len(row["kinds"])), *errors)
    out.print(ops)
    if links:
        lines = table("links", "kind", "measured", "latency", "time per byte", "error, new sizes")
        for name, row in links.items():
            factors = (f"{row['latency_factor']:.2f}x", f"{row['bytes_factor']:.2f}x")
            count = f"{row['measurements']:,}"
            lines.add_row(name.replace("_", " "), count, *factors, percent(row["error"]))
        out.print(lines)


def _number_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _extrapolated(found: Any) -> dict[str, Any] | None:
    """Part of a plan's compute time that was never measured near; ``None`` for the roofline."""
    from heterog.simulator.calibration import Calibration, cost_model_of, extrapolated_by

    model = cost_model_of(found.cluster)
    if not isinstance(model, Calibration):
        return None
    shares = extrapolated_by(model, found.graph, found.cluster, found.strategy)
    return {"share": sum(shares.values()), "kinds": list(shares)}


def _trust(calibration: str, extrapolated: dict[str, Any]) -> str:
    """One sentence: what of a prediction was measured."""
    share, kinds = extrapolated["share"], extrapolated["kinds"]
    if not kinds:
        return f"calibrated on {calibration}; every op was measured near its size"
    shown = ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
    return (
        f"calibrated on {calibration}; {share:.0%} of the compute time is extrapolated ({shown})"
    )


def _title(found: Any) -> str:
    barrier = "" if found.strategy.step_barrier else ", no step barrier"
    return (
        f"{found.graph.name}, batch {found.graph.batch_size}, on {found.cluster.name} "
        f"(predicted by {found.calibration}, seed {found.seed}, budget {found.budget}{barrier})"
    )


def _verdict(found: Any) -> str:
    """One or two sentences: what won, and by how much."""
    if found.step_time_s is None:
        return f"No method fits. The nearest is {found.method}: {found.shortage}."
    text = (
        f"{found.method}: {format_seconds(found.step_time_s)} a step, "
        f"{found.throughput_samples_per_s:.1f} samples/s, order {found.order}, at least "
        f"{format_seconds(found.lower_bound_s)} by any strategy with a step barrier."
    )
    baselines = [
        row for row in found.rows if row.step_time_s is not None and row.stage == "baseline"
    ]
    if baselines and found.method not in {row.method for row in baselines}:
        best = min(baselines, key=lambda row: row.step_time_s)
        gain = best.step_time_s / found.step_time_s
        text += f" {gain:.2f}x over the best baseline ({best.method})."
        if gain < 1.01:
            text += f" That is within 1 %: prefer the simpler {best.method}."
    return text


def _csv(documents: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(documents[0]), lineterminator="\n")
    writer.writeheader()
    for document in documents:
        peaks = " ".join(map(str, document["peak_memory_bytes"]))
        writer.writerow(document | {"peak_memory_bytes": peaks})
    return buffer.getvalue()


if __name__ == "__main__":
    main()
