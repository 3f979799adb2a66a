"""``heterog run``: train with a plan on local processes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from heterog.cli import completion
from heterog.cli.common import (
    JsonOption,
    PlanArgument,
    SourceOption,
    err,
    out,
    print_json,
    progress_line,
    stage_progress,
)
from heterog.cli.healing import heal_options, run_healing
from heterog.cli.outputs import CHECKPOINT, JSON, not_replaced
from heterog.errors import HeterogError
from heterog.units import format_seconds


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
    source: SourceOption = None,
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
    from contextlib import ExitStack

    from heterog.planners.plan import load_plan
    from heterog.runtime.background import has_own_process
    from heterog.runtime.launch import run_ranks
    from heterog.runtime.testbed import Testbed, load_testbed
    from heterog.units import parse_seconds
    from heterog.user_code import trusted_source

    if steps < 1:
        raise HeterogError(f"--steps is {steps}; measure at least one step.")
    loaded = load_plan(plan)
    not_replaced(loaded.cluster.calibration, f"the calibration of {plan}", trace)
    if loaded.step_time_s is None:
        raise HeterogError(f"{plan} does not fit into memory ({loaded.shortage}); plan again.")
    beside = loaded.background
    if beside is not None and not beside.source:
        raise HeterogError(
            f"{plan} has the background job {beside.model}, which was read from a graph file; "
            "plan with a model's name or file.py:function after --background."
        )
    if beside is not None and not has_own_process(loaded.cluster):
        beside = None  # the ranks run it themselves
    sources = source or ()
    if not model:
        trusted_source(loaded.graph.source, sources, str(plan))
    if loaded.background is not None:
        trusted_source(loaded.background.source, sources, str(plan))
    healing = heal_options(
        heal,
        redundancy=redundancy,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        back_after=back_after,
        slow_factor=slow_factor,
        rendezvous=rendezvous,
        host=host,
    )
    if healing is not None:
        if testbed or trace is not None or port or loaded.background is not None:
            raise HeterogError(
                "--heal does not go with --testbed, --trace, --port or a plan's background job; "
                "leave one of them out."
            )
        run_healing(
            plan,
            healing,
            rendezvous=rendezvous,
            host=host,
            as_json=as_json,
            model=model,
            sources=sources,
            num_steps=steps,
            timeout_s=parse_seconds(timeout),
            step_timeout_s=parse_seconds(step_timeout),
            save=save,
            resume=resume,
            allow_nonfinite=allow_nonfinite,
        )
        return
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
        show = stack.enter_context(progress_line(as_json))
        measured = run_ranks(
            plan,
            loaded.cluster.num_devices,
            model=model,
            sources=sources,
            num_steps=steps,
            timeout_s=parse_seconds(timeout),
            step_timeout_s=parse_seconds(step_timeout),
            port=port,
            save=save,
            resume=resume,
            allow_nonfinite=allow_nonfinite,
            record=True,
            background=beside,
            progress=lambda stage: show(*stage_progress(stage)),
            **options,
        )
    if trace is not None:
        from heterog.report.trace import write_comparison

        write_comparison(trace, loaded.timeline(), loaded.measured_timeline(measured["tasks"]))
    if as_json:
        print_json(measured)
        return
    first, last = (
        float("nan") if loss is None else loss
        for loss in (measured["losses"][0], measured["losses"][-1])
    )
    differ = any(mode.steps_differ for mode in loaded.strategy.modes)
    kind = "mean" if differ else "median"  # see ``rank``
    out.print(
        f"{measured['model']} on {measured['num_ranks']} "
        f"{'ranks of testbed ' + testbed if testbed else 'local ranks'}: "
        f"{format_seconds(measured['step_time_s'])} a step ({kind} of {steps}, "
        f"{format_seconds(measured['step_time_min_s'])} to "
        f"{format_seconds(measured['step_time_max_s'])}), predicted for {loaded.cluster.name} "
        f"{format_seconds(loaded.step_time_s)}; loss {first:.4f} -> {last:.4f}"
    )
    if "background" in measured:
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
    if save is not None:
        out.print(f"checkpoint: {save}", soft_wrap=True)
