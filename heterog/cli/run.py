"""``heterog run``: train with a plan on local processes.

With ``--heal`` the job changes to another plan when devices are lost or slow; with ``--improve``
also when another plan is measured to be faster.
"""

from collections.abc import Callable, Mapping
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
    print_checkpoint,
    print_json,
    print_line,
    progress_line,
    stage_progress,
)
from heterog.cli.outputs import CHECKPOINT, JSON, not_replaced
from heterog.errors import HeterogError, UnknownNameError
from heterog.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from heterog.healing.options import HealOptions
    from heterog.runtime.ranks.place import Place
    from heterog.runtime.request import RunRequest
    from heterog.search.plan import Plan


def heal_options(heal: bool, given: Mapping[str, Any]) -> "HealOptions | None":
    """The options of healing on the command line; ``None`` if the job does not heal.

    Args:
        heal: Whether it heals.
        given: Values of the other options by their parameters, ``None`` or empty if not given.

    Raises:
        HeterogError: an option would have no effect.
    """
    from heterog.healing.options import HealOptions
    from heterog.units import parse_seconds

    given = {name: value for name, value in given.items() if value not in (None, "")}
    if given and not heal:
        option = f"--{next(iter(given)).replace('_', '-')}"
        raise HeterogError(f"{option} without --heal has no effect; add --heal or leave it out.")
    if "checkpoint_every" in given and "checkpoint" not in given:
        raise HeterogError("--checkpoint-every without --checkpoint; name a folder for them.")
    if not heal:
        return None
    read: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "redundancy": ("redundancy", int),
        "checkpoint": ("checkpoint", str),
        "checkpoint_every": ("checkpoint_s", parse_seconds),
        "back_after": ("back_after_s", parse_seconds),
        "slow_factor": ("slow_factor", float),
        "improve": ("num_trials", int),
    }
    fields = {read[name][0]: read[name][1](value) for name, value in given.items() if name in read}
    return HealOptions(**fields)


def run_healing(
    request: "RunRequest",
    options: "HealOptions",
    place: AbstractContextManager["Place"] | None = None,
    *,
    as_json: bool,
) -> None:
    """Run the job in a place, or on Ray if there is none, and print the outcome."""

    def say(text: str) -> None:
        print_line(text, to=err)

    with progress_line(as_json) as show:

        def progress(stage: str) -> None:
            show(*stage_progress(stage))

        if place is None:
            from heterog.healing.on_ray import heal_on_ray

            measured = heal_on_ray(request, options, progress=progress, say=say)
        else:
            from heterog.healing.job import HealingJob

            with place as there:
                measured = HealingJob(
                    request, options=options, place=there, progress=progress, say=say
                ).run()
    if as_json:
        print_json(measured)
    else:
        _print_moves(measured)
        print_checkpoint(request.save)


def _print_moves(measured: Mapping[str, Any]) -> None:
    """Print what happened, and how long a step took."""
    for move in measured["moves"]:
        took_s = sum(move[part] for part in ("detect_s", "plan_s", "move_s", "first_step_s"))
        print_line(
            f"{move['why']}: on with {move['num_ranks']} ranks ({move['method']}) after step "
            f"{move['step']}, {format_seconds(took_s)} later (noticed in "
            f"{format_seconds(move['detect_s'])}, planned in {format_seconds(move['plan_s'])}, "
            f"moved in {format_seconds(move['move_s'])}; {move['steps_done_again']} steps again)"
        )
    kept = [trial["is_kept"] for trial in measured["trials"]]
    if kept:
        print_line(f"{len(kept)} moves were tried, {sum(kept)} kept, the others taken back")
    snapshots, losses = measured["snapshots"], measured["losses"]
    first, last = (float("nan") if each is None else each for each in (losses[0], losses[-1]))
    print_line(
        f"{measured['model']} on {measured['num_ranks']} ranks: "
        f"{format_seconds(measured['step_time_s'])} a step (median of {len(losses)}); loss "
        f"{first:.4f} -> {last:.4f}; {snapshots['number']} snapshots, "
        f"{format_bytes(snapshots['bytes_of_rank_0'])} each from rank 0"
    )


def run(
    plan: PlanArgument,
    model: Annotated[
        str,
        typer.Option(
            "--model", help="if the plan does not name it", autocompletion=completion.models
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
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", help="of the whole job, besides compiling, or with --heal steps"
        ),
    ] = "300s",
    step_timeout: Annotated[
        str, typer.Option("--step-timeout", help="after which a step counts as hung")
    ] = "300s",
    save: Annotated[
        Path | None, typer.Option("--save", help="folder for a checkpoint at the end"), CHECKPOINT
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
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="where ranks run: local, or ray for the cluster of RAY_ADDRESS; torchrun starts "
            "them by python -m heterog.run",
        ),
    ] = "local",
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="go on when the loss is not finite")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="trace.json with predicted and measured lanes"),
        JSON,
    ] = None,
    heal: Annotated[
        bool, typer.Option("--heal", help="go on with another plan when a rank is lost or slow")
    ] = False,
    redundancy: Annotated[
        int | None,
        typer.Option(
            "--redundancy",
            min=0,
            help="with --heal --on ray: other hosts that hold each rank's state; 1 by default",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="with --heal: folder that is written beside training"),
        CHECKPOINT,
    ] = None,
    checkpoint_every: Annotated[
        str,
        typer.Option(
            "--checkpoint-every", help="with --checkpoint: time between two; 60s if not given"
        ),
    ] = "",
    back_after: Annotated[
        str,
        typer.Option(
            "--back-after",
            help="with --heal: try a lost device again after 60s, or this time; 0s: never",
        ),
    ] = "",
    slow_factor: Annotated[
        float | None,
        typer.Option(
            "--slow-factor",
            help="with --heal: a device is slow if it takes this many times its planned time; "
            "1.5 if not given, 0: none ever is",
        ),
    ] = None,
    improve: Annotated[
        int | None,
        typer.Option(
            "--improve",
            min=1,
            help="with --heal: plans near this one that are tried and taken back if they do not "
            "pay",
        ),
    ] = None,
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
            "improve": improve,
        },
    )
    if healing is not None:
        if any((trace, port, loaded.background)):
            raise HeterogError(
                "--heal does not go with --trace, --port or a background job; leave one of them "
                "out."
            )
        if on == TORCHRUN:
            raise HeterogError(
                "torchrun starts ranks on each host by itself, and again when one is lost; run "
                "there: python -m heterog.heal --nnodes LEAST:MOST --rdzv-endpoint HOST:PORT ... "
                "plan.json (docs/healing.md)."
            )
        if on != LOCAL:
            check_engine(on, loaded, testbed)
        place = _place_of(request, loaded, testbed) if on == LOCAL else None
        run_healing(request, healing, place, as_json=as_json)
        return
    measured = _run_in_place(request, loaded, testbed, on, quiet=as_json)
    if trace is not None:
        from heterog.report.lanes import write_comparison

        write_comparison(trace, loaded.timeline(), loaded.measured_timeline(measured["tasks"]))
    if as_json:
        print_json(measured)
        return
    _print_measured(measured, loaded, f"ranks of testbed {testbed}" if testbed else f"{on} ranks")
    print_checkpoint(save)


def _run_in_place(
    request: "RunRequest", plan: "Plan", testbed: str, on: str, *, quiet: bool
) -> dict[str, Any]:
    """The measurements of a job on this machine, on a testbed if one is named, or on Ray.

    Raises:
        HeterogError: the engine is unknown, does not go with a testbed, or the job failed.
    """
    from heterog.runtime.launch import run_ranks

    if on != LOCAL:
        check_engine(on, plan, testbed)
        from heterog.runtime.ranks.on_ray import run_on_ray

        with progress_line(quiet) as show:
            return run_on_ray(request, progress=lambda stage: show(*stage_progress(stage)))
    with _place_of(request, plan, testbed) as there, progress_line(quiet) as show:
        return run_ranks(request, place=there, progress=lambda stage: show(*stage_progress(stage)))


def _place_of(
    request: "RunRequest", plan: "Plan", testbed: str
) -> AbstractContextManager["Place"]:
    """This machine, or a testbed on it if one is named.

    Raises:
        HeterogError: the plan was made for another cluster than the testbed.
    """
    from heterog.runtime.ranks.place import HERE
    from heterog.runtime.ranks.testbed import Testbed, load_testbed

    if not testbed:
        return nullcontext(HERE)
    cluster = load_testbed(testbed)
    difference = plan.cluster.describe_difference(cluster)
    if difference is not None:
        raise HeterogError(
            f"{request.plan} was made for another cluster than the testbed: {difference}; "
            f"plan with --cluster {testbed}."
        )
    return Testbed(cluster)


LOCAL, TORCHRUN, RAY = "local", "torchrun", "ray"


def check_engine(on: str, plan: "Plan", testbed: str) -> None:
    """Check the name of what starts the ranks.

    Raises:
        UnknownNameError: there is none of that name.
        HeterogError: it cannot be used from here; says what to do.
    """
    if on not in (LOCAL, TORCHRUN, RAY):
        raise UnknownNameError("engine", on, (LOCAL, TORCHRUN, RAY))
    if on == TORCHRUN:
        hosts = plan.cluster.num_hosts
        counts = sorted({list(plan.cluster.host_of).count(host) for host in range(hosts)})
        number = str(counts[0]) if len(counts) == 1 else "N"
        raise HeterogError(
            "torchrun starts ranks on each host by itself; run there, with the first host's "
            f"address: torchrun --nnodes {hosts} --nproc-per-node {number} --rdzv-backend c10d "
            "--rdzv-endpoint ADDRESS:29400 -m heterog.run plan.json."
        )
    if testbed:
        raise HeterogError(f"--testbed is this machine's and --on {on} is not; leave one out.")


def _print_measured(measured: Mapping[str, Any], plan: "Plan", where: str) -> None:
    """Print the measured and predicted seconds of a step, and the work of a background job."""
    first, last = (
        float("nan") if loss is None else loss
        for loss in (measured["losses"][0], measured["losses"][-1])
    )
    differ = any(mode.steps_differ for mode in plan.strategy.modes)
    kind = "mean" if differ else "median"  # see ``rank``
    assert plan.step_time_s is not None
    print_line(
        f"{measured['model']} on {measured['num_ranks']} {where}: "
        f"{format_seconds(measured['step_time_s'])} a step ({kind} of "
        f"{len(measured['step_times_s'])}, "
        f"{format_seconds(measured['step_time_min_s'])} to "
        f"{format_seconds(measured['step_time_max_s'])}), predicted for {plan.cluster.name} "
        f"{format_seconds(plan.step_time_s)}; loss {first:.4f} -> {last:.4f}"
    )
    if measured.get("compile_s"):
        print_line(
            f"compiling took {format_seconds(measured['compile_s'])} before the second step"
        )
    if measured.get("not_compiled"):
        print_line(measured["not_compiled"], to=err)
    if "background" not in measured:
        return
    done = measured["background"]
    print_line(
        f"background {done['model']}: {sum(done['samples'])} samples, "
        f"{done['samples_per_s']:.1f} samples/s; a step took "
        f"{format_seconds(done['step_time_s'])} beside it and "
        f"{format_seconds(done['step_time_alone_s'])} alone, {done['slow_down']:.3f}x "
        f"(limit {done['limit']:g}x)"
    )
    for rank, words in done["failures"].items():
        print_line(f"the background job beside rank {rank} ended early: {words}", to=err)
