"""``heterog run``: train with a plan on local processes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli import completion
from heterog.cli.common import (
    JsonOption,
    PlanArgument,
    SourceOption,
    err,
    out,
    print_checkpoint,
    print_json,
    progress_line,
    stage_progress,
)
from heterog.cli.healing import heal_options, run_healing
from heterog.cli.outputs import CHECKPOINT, JSON, not_replaced
from heterog.errors import HeterogError
from heterog.units import format_seconds

if TYPE_CHECKING:
    from heterog.runtime.ranks.place import Place
    from heterog.runtime.request import RunRequest
    from heterog.search.plan import Plan


def run(
    plan: PlanArgument,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="if the plan does not name it",
            autocompletion=completion.models,
        ),
    ] = "",
    sources: SourceOption = None,
    steps: Annotated[int, typer.Option("--steps", help="measured training steps")] = 10,
    testbed: Annotated[
        str,
        typer.Option(
            "--testbed",
            help="shaped CPUs and links: a shipped name or a YAML file",
            autocompletion=completion.testbeds,
        ),
    ] = "",
    timeout: Annotated[str, typer.Option("--timeout", help="of the whole job")] = "300s",
    step_timeout: Annotated[
        str, typer.Option("--step-timeout", help="after which a step counts as hung")
    ] = "300s",
    save: Annotated[
        Path | None,
        typer.Option("--save", help="folder for a checkpoint at the end"),
        CHECKPOINT,
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
        JSON,
    ] = None,
    heal: Annotated[
        bool,
        typer.Option("--heal", help="go on with another plan when a rank is lost or slow"),
    ] = False,
    redundancy: Annotated[
        int | None,
        typer.Option(
            "--redundancy",
            min=0,
            help="with --heal: other hosts that hold a copy of each rank's state; 1 by default",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="with --heal: folder that is written beside training"),
        CHECKPOINT,
    ] = None,
    checkpoint_every: Annotated[
        str, typer.Option("--checkpoint-every", help="with --checkpoint: time between them; 60s")
    ] = "",
    back_after: Annotated[
        str,
        typer.Option("--back-after", help="with --heal: try a lost device again; 60s, 0s never"),
    ] = "",
    slow_factor: Annotated[
        float | None,
        typer.Option(
            "--slow-factor",
            help="with --heal: times its planned time from which a device is slow; 1.5, 0 never",
        ),
    ] = None,
    rendezvous: Annotated[
        str,
        typer.Option(
            "--rendezvous",
            help="with --heal on several hosts: ADDRESS:PORT of the one that leads",
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option("--host", help="with --rendezvous: this host's name in the plan's cluster"),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Train with a plan on local processes or a testbed.

    One process stands for each device of the plan.
    """
    from heterog.runtime.ranks.watching import Limits
    from heterog.runtime.request import RunRequest
    from heterog.units import parse_seconds

    request = RunRequest(
        plan=plan,
        model=model,
        sources=tuple(sources or ()),
        num_steps=steps,
        limits=Limits(
            timeout_s=parse_seconds(timeout), step_timeout_s=parse_seconds(step_timeout)
        ),
        port=port,
        save=save,
        resume=resume,
        allow_nonfinite=allow_nonfinite,
        record=not heal,
    )
    loaded = request.load()
    not_replaced(loaded.cluster.calibration, f"the calibration of {plan}", trace)
    healing = heal_options(
        heal,
        {
            "redundancy": redundancy,
            "checkpoint": checkpoint,
            "checkpoint_every": checkpoint_every,
            "back_after": back_after,
            "slow_factor": slow_factor,
            "rendezvous": rendezvous,
            "host": host,
        },
    )
    if healing is not None:
        if testbed or trace is not None or port or loaded.background is not None:
            raise HeterogError(
                "--heal does not go with --testbed, --trace, --port or a plan's background job; "
                "leave one of them out."
            )
        run_healing(request, healing, rendezvous=rendezvous, host=host, as_json=as_json)
        return
    measured = _run_in_place(request, loaded, testbed, quiet=as_json)
    if trace is not None:
        from heterog.report.trace import write_comparison

        write_comparison(trace, loaded.timeline(), loaded.measured_timeline(measured["tasks"]))
    if as_json:
        print_json(measured)
        return
    where = f"ranks of testbed {testbed}" if testbed else "local ranks"
    _print_measured(measured, loaded, where)
    print_checkpoint(save)


def _run_in_place(
    request: "RunRequest", plan: "Plan", testbed: str, *, quiet: bool
) -> dict[str, Any]:
    """The measurements of a job on this machine, or on a testbed if one is named."""
    from heterog.runtime.launch import run_ranks
    from heterog.runtime.ranks.place import HERE
    from heterog.runtime.ranks.testbed import Testbed, load_testbed

    place: AbstractContextManager[Place] = nullcontext(HERE)
    if testbed:
        cluster = load_testbed(testbed)
        difference = plan.cluster.describe_difference(cluster)
        if difference is not None:
            raise HeterogError(
                f"{request.plan} was made for another cluster than the testbed: {difference}; "
                f"plan with --cluster {testbed}."
            )
        place = Testbed(cluster)
    with place as there, progress_line(quiet) as show:
        return run_ranks(request, place=there, progress=lambda stage: show(*stage_progress(stage)))


def _print_measured(measured: Mapping[str, Any], plan: "Plan", where: str) -> None:
    """Print how long a step took and was predicted to take, and what was done beside it."""
    first, last = (
        float("nan") if loss is None else loss
        for loss in (measured["losses"][0], measured["losses"][-1])
    )
    differ = any(mode.steps_differ for mode in plan.strategy.modes)
    kind = "mean" if differ else "median"  # see ``rank``
    assert plan.step_time_s is not None
    out.print(
        f"{measured['model']} on {measured['num_ranks']} {where}: "
        f"{format_seconds(measured['step_time_s'])} a step ({kind} of "
        f"{len(measured['step_times_s'])}, "
        f"{format_seconds(measured['step_time_min_s'])} to "
        f"{format_seconds(measured['step_time_max_s'])}), predicted for {plan.cluster.name} "
        f"{format_seconds(plan.step_time_s)}; loss {first:.4f} -> {last:.4f}"
    )
    if measured.get("compile_s"):
        out.print(f"compiling took {format_seconds(measured['compile_s'])} before the second step")
    if "background" not in measured:
        return
    done = measured["background"]
    out.print(
        f"background {done['model']}: {sum(done['samples'])} samples, "
        f"{done['samples_per_s']:.1f} samples/s; a step took "
        f"{format_seconds(done['step_time_s'])} beside it and "
        f"{format_seconds(done['step_time_alone_s'])} alone, {done['slow_down']:.3f}x "
        f"(limit {done['limit']:g}x)"
    )
    for rank, words in done["failures"].items():
        err.print(f"the background job beside rank {rank} ended early: {words}")
