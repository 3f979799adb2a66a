"""Commands about cost models: ``heterog profile``, ``calibrate`` and ``fidelity``.

``profile`` measures models on this machine, a testbed, or the ranks of torchrun; ``calibrate``
fits a cost model to measurements; ``fidelity`` compares predictions with recorded runs.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli import completion
from heterog.cli.common import (
    BatchOption,
    JsonOption,
    load_cluster,
    load_model,
    print_line,
    print_result,
    progress_line,
    split_names,
    stage_progress,
)
from heterog.cli.outputs import JSON, not_replaced
from heterog.errors import HeterogError
from heterog.units import format_bytes, format_bytes_range, format_seconds

if TYPE_CHECKING:
    from heterog.fidelity.comparison import Compared
    from heterog.pricing.op_fits import Measurements

_SLACK = 0.01
"""Allowed rise of the mean error on left-out runs, whose errors are known to first order only."""


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
        str,
        typer.Option(
            "--model",
            help="with --runs, the model of all rows: a name of 'heterog models', "
            "file.py:function or a graph",
        ),
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help="cluster of the measured links, if not in the file; with --runs, that "
            "of all rows",
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
    from heterog.cluster import Cluster
    from heterog.pricing.calibration import calibrate as fit
    from heterog.pricing.calibration import link_error
    from heterog.pricing.op_fits import Measurements, merge
    from heterog.report.tables import fit_tables

    measured = merge([Measurements.load(path) for path in measurements])
    target = load_cluster(cluster) if cluster else None
    if target is None and measured.cluster is not None:
        target = Cluster.from_dict(measured.cluster)
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
    print_result(as_json, document, *fit_tables(types, links), _advice(output))


def _calibrate_on_runs(
    runs: Path, output: Path, *, model: str, cluster: str, as_json: bool
) -> None:
    """Device models fitted to recorded runs."""
    from functools import lru_cache

    import numpy as np

    from heterog.fidelity.comparison import read_runs
    from heterog.fidelity.run_fit import cases_of, fit_runs
    from heterog.pricing.calibration import cost_model_of, save_run_models
    from heterog.pricing.device_models.model import DeviceModels

    rows = read_runs(runs, model=model, cluster=cluster)
    for path in {name for row in rows for name in (row.model, row.cluster)}:
        not_replaced(path, f"an input of {runs}", output)
    loaded = cases_of(rows, lambda *named: load_model(*named)[0], lru_cache(load_cluster))
    cases = [case for _, case in loaded]
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


def fidelity(
    runs: Annotated[
        Path,
        typer.Argument(
            help="CSV file with columns model, batch_size, cluster, layout, seconds, peak_bytes, "
            "family"
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", help="of all rows: a name of 'heterog models', file.py:function or a graph"
        ),
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", help="of all rows: a preset or a cluster file")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with recorded runs.

    Prints errors by family, how many steps and peaks of memory lie in their 80 % intervals, and
    how many pairs of alternatives are ordered rightly.
    """
    from functools import lru_cache

    from heterog.fidelity.comparison import family_errors, in_words, read_runs
    from heterog.fidelity.run_fit import cases_of, compared

    rows = read_runs(runs, model=model, cluster=cluster)
    found = []
    cases = cases_of(rows, lambda *named: load_model(*named)[0], lru_cache(load_cluster))
    for number, (row, case) in enumerate(cases, 1):
        found.append(compared(row, case))
        if not as_json:
            each = found[-1]
            print_line(
                f"{number}/{len(rows)} {each.name}: measured {each.measured_s:.4g} s, predicted "
                f"{each.predicted_s:.4g} ({each.error:+.0%}){_peak(each)}"
            )
    families = sorted({each.family for each in found})
    errors = [
        family_errors(name, [each for each in found if each.family == name]) for name in families
    ]
    if len(families) > 1:
        errors.append(family_errors("all", found))
    document = {"families": list(map(asdict, errors)), "runs": list(map(asdict, found))}
    print_result(as_json, document, *map(in_words, errors))


def _peak(run: "Compared") -> str:
    """The recorded peak beside its interval, if one was recorded."""
    if run.measured_bytes is None or run.predicted_bytes is None or run.interval_bytes is None:
        return ""
    ends = format_bytes_range(*run.interval_bytes, around=run.predicted_bytes)
    return (
        f"; peak {format_bytes(run.measured_bytes)}, predicted "
        f"{format_bytes(run.predicted_bytes)} ({ends})"
    )


def profile(
    models: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[,MODEL...]",
            help="names of 'heterog models' or file.py:function",
            autocompletion=completion.several(completion.models),
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="measurements.json"), JSON] = Path(
        "measurements.json"
    ),
    batch_size: BatchOption = None,
    testbed: Annotated[
        str,
        typer.Option(
            "--testbed",
            help="measure on its ranks: a shipped name or a YAML file",
            autocompletion=completion.testbeds,
        ),
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help="names the device types; needed under torchrun",
            autocompletion=completion.clusters,
        ),
    ] = "",
    device_type: Annotated[
        str, typer.Option("--device-type", help="what cluster files call this device")
    ] = "",
    timeout: Annotated[str, typer.Option("--timeout", help="of a job of several ranks")] = "1h",
    as_json: JsonOption = False,
) -> None:
    """Measure models on this machine or a testbed.

    Started by torchrun it measures on all ranks. Finished work is kept beside the output; the
    same command continues it.
    """
    import os

    from heterog.files import check_folder_writable
    from heterog.units import parse_seconds

    journal = check_folder_writable(output.with_name(f"{output.name}.partial"))
    timeout_s = parse_seconds(timeout)
    sources = split_names(models)
    _check_profile_options(testbed, cluster, device_type)
    as_rank = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not testbed
    rank = int(os.environ.get("RANK", "0")) if as_rank else 0
    named = load_cluster(cluster) if cluster else None
    if testbed:
        from heterog.runtime.ranks.testbed import load_testbed

        named = load_testbed(testbed)
    if named is not None:
        not_replaced(named.calibration, f"the calibration of {named.name}", output)
    for source in sources:
        _check_workload(source, batch_size)
    from heterog.runtime.measure import profiler
    from heterog.runtime.measure.detect import local_type_name

    measured: Measurements | None = None
    with progress_line(as_json or rank > 0) as show:

        def tell(stage: str) -> None:
            show(*stage_progress(stage))

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
            if device_type:
                raise HeterogError(
                    f"--device-type {device_type} under torchrun: {cluster} says the type of each "
                    "rank's device; leave it out."
                )
            measured = profiler.profile_as_rank(
                sources, named, journal, batch_size=batch_size, timeout_s=timeout_s, tell=tell
            )
        else:
            measured = profiler.profile_here(
                sources,
                journal,
                device_type or (named.devices[0].type.name if named else local_type_name()),
                batch_size=batch_size,
                compiles=named is not None and named.execution.compiles,
                tell=tell,
            )
    if measured is not None:
        measured.save(output)
    profiler.remove_journal(journal)
    if measured is not None:
        _print_measured(measured, output, as_json=as_json)
    if as_rank:
        from heterog.runtime.rank import end_together

        end_together()


def _check_profile_options(testbed: str, cluster: str, device_type: str) -> None:
    for name, value in (("--cluster", cluster), ("--device-type", device_type)):
        if testbed and value:
            raise HeterogError(f"{name} {value} and --testbed {testbed}: a testbed has its own.")


def _check_workload(source: str, batch_size: int | None) -> None:
    """Refuse a model that cannot be made, before any slow work."""
    if source.endswith((".json", ".json.gz")):
        raise HeterogError(
            f"{source} is a saved graph, which cannot be run; name the model itself, as "
            "file.py:function."
        )
    from heterog.zoo import load_workload

    load_workload(source, batch_size)


def _print_measured(measured: "Measurements", output: Path, *, as_json: bool) -> None:
    from heterog.pricing.op_fits import STEP

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
    print_result(
        as_json,
        summary,
        f"{summary['num_ops']:,} ops of {', '.join(models)} on {', '.join(types)} in "
        f"{len(measured.ops):,} measurements, {len(measured.links):,} of links -> {output}",
        *(
            f"{step['model']}, batch {step['samples']}, on {step['device_type']}: "
            f"{format_seconds(step['step_time_s'])} a step, at most "
            f"{format_bytes(step['peak_memory_bytes'])}"
            for step in summary["steps"]
        ),
        f"next: heterog calibrate {output} -o calibration.json",
    )
