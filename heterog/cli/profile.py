"""``heterog profile``: measure models on this machine, a testbed, or the ranks of torchrun."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli import completion
from heterog.cli.common import (
    BatchOption,
    JsonOption,
    load_cluster,
    print_result,
    progress_line,
    split_names,
    stage_progress,
)
from heterog.cli.outputs import JSON, not_replaced
from heterog.errors import HeterogError
from heterog.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from heterog.pricing.op_fits import Measurements


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

    Started by torchrun it measures on all ranks. What is done is kept beside the output, and the
    same command goes on with it.
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
                sources,
                named,
                journal,
                batch_size=batch_size,
                timeout_s=timeout_s,
                tell=tell,
            )
        else:
            kind = device_type or (named.devices[0].type.name if named else _local_type_name())
            measured = profiler.profile_here(
                sources,
                journal,
                kind,
                batch_size=batch_size,
                compiles=named is not None and named.execution == "compiled",
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


def _local_type_name() -> str:
    from heterog.runtime.measure.detect import local_type_name

    return local_type_name()


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
            f"{step['model']}, {step['samples']} samples on {step['device_type']}: "
            f"{format_seconds(step['step_time_s'])} a step, at most "
            f"{format_bytes(step['peak_memory_bytes'])}"
            for step in summary["steps"]
        ),
        f"next: heterog calibrate {output} -o calibration.json",
    )
