"""``heterog calibrate``: fit a cost model to measurements."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli.common import JsonOption, load_cluster, print_result
from heterog.cli.outputs import JSON, not_replaced
from heterog.errors import HeterogError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from heterog.cluster import Cluster
    from heterog.pricing.op_fits import Measurements

_SLACK = 0.01
"""Mean error by which a fit may be worse on runs left out, which are known to first order."""


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="calibration.json"), JSON],
    measurements: Annotated[
        list[Path] | None, typer.Argument(help="files of 'heterog profile'")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", help="a table of recorded runs instead; see 'heterog fidelity --help'"
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="of all runs: zoo name, file.py:function or a graph")
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="whose links were measured, if not in the file; of all runs"
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Fit a cost model to measurements, or device models to recorded runs.

    The file is for the field 'calibration' of a cluster file.
    """
    if (runs is None) == (not measurements):
        raise HeterogError("give files of 'heterog profile', or --runs with a table; one of them.")
    if runs is not None:
        _calibrate_on_runs(runs, output, model=model, cluster=cluster, as_json=as_json)
        return
    assert measurements
    from heterog.pricing.calibration import calibrate as fit
    from heterog.pricing.calibration import link_error
    from heterog.pricing.op_fits import Measurements, merge

    measured = merge([Measurements.load(path) for path in measurements])
    target = load_cluster(cluster) if cluster else _measured_cluster(measured)
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
            "error_ops": found.held_out_error[kind][0],
            "error_models": found.held_out_error[kind][1],
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
    document = {
        "name": found.name,
        "file": str(output),
        "device_types": types,
        "links": links,
        "link_rates_bytes_per_s": dict(found.links.rates),
    }
    print_result(as_json, document, *_fit_tables(types, links), _advice(output))


def _calibrate_on_runs(
    runs: Path, output: Path, *, model: str, cluster: str, as_json: bool
) -> None:
    """Device models fitted to recorded runs."""
    from functools import lru_cache

    import numpy as np

    from heterog.cli.common import load_model_graph
    from heterog.fidelity.comparison import read_runs
    from heterog.fidelity.run_fit import cases_of, fit_runs
    from heterog.pricing.calibration import cost_model_of, save_run_models
    from heterog.pricing.device_models.model import DeviceModels

    rows = read_runs(runs, model=model, cluster=cluster)
    for path in {name for row in rows for name in (row.model, row.cluster)}:
        not_replaced(path, f"an input of {runs}", output)
    cases = [case for _, case in cases_of(rows, load_model_graph, lru_cache(load_cluster))]
    starts = {case.cluster.calibration: cost_model_of(case.cluster) for case in cases}
    executions = {case.cluster.execution for case in cases}
    start = next(iter(starts.values()))
    if len(starts) > 1 or len(executions) > 1 or not isinstance(start, DeviceModels):
        raise HeterogError(
            f"the clusters of {runs} are priced by {', '.join(sorted(map(str, starts)))} for "
            f"{', '.join(sorted(executions))}; runs correct the device models of one execution: "
            "leave 'calibration' out of the cluster files."
        )
    found = fit_runs(cases, start)
    errors = {
        which: float(np.mean(np.abs(np.expm1(off))))
        for which, off in (
            ("before", found.before), ("after", found.after), ("left_out", found.left_out)
        )
    }  # fmt: skip
    if len(cases) > 1 and errors["left_out"] > errors["before"] + _SLACK:
        raise HeterogError(
            f"a fit to these {len(cases)} runs is worse on runs left out (mean error "
            f"{errors['left_out']:.1%}) than the models without a fit ({errors['before']:.1%}), "
            f"and nothing was written: check the layouts and seconds of {runs}, or add runs."
        )
    name = output.name.removesuffix(".gz").removesuffix(".json")
    save_run_models(output, found.models, name, len(cases))
    print_result(
        as_json,
        {"name": name, "file": str(output), "num_runs": len(cases), "mape": errors},
        f"{len(cases)} runs: mean error {errors['before']:.1%} before, {errors['after']:.1%} "
        f"fitted, {errors['left_out']:.1%} each run left out",
        _advice(output),
    )


def _advice(output: Path) -> str:
    return f"calibration: {output} (name it in a cluster file: 'calibration: {output.name}')"


def _measured_cluster(measured: "Measurements") -> "Cluster | None":
    """The cluster whose links were measured, if there is one."""
    from heterog.cluster import Cluster

    return None if measured.cluster is None else Cluster.from_dict(measured.cluster)


def _fit_tables(types: dict[str, Any], links: dict[str, Any]) -> "Iterator[Table]":
    """What was fitted, and the errors without the fit."""
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
    yield ops
    if links:
        lines = table("links", "kind", "measured", "latency", "time per byte", "error, new sizes")
        for name, row in links.items():
            factors = (f"{row['latency_factor']:.2f}x", f"{row['bytes_factor']:.2f}x")
            count = f"{row['measurements']:,}"
            lines.add_row(name.replace("_", " "), count, *factors, percent(row["error"]))
        yield lines
