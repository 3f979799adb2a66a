"""Commands about plans: ``heterog plan`` finds one, ``report`` and ``export`` write it.

``report`` writes plans as one HTML page, ``export`` a plan as a folder for another launcher or
framework.
"""

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.cli import completion
from heterog.cli.common import (
    AsynchronousOption,
    BatchOption,
    BudgetOption,
    ClusterOption,
    EncoderOption,
    JsonOption,
    LayoutOption,
    ModelArgument,
    NoBarrierOption,
    OrderOption,
    PlanArgument,
    PolicyOption,
    SeedOption,
    SourceOption,
    WorkersOption,
    end_interrupted,
    load_asynchronous,
    load_cluster,
    load_layout,
    load_methods,
    load_model,
    print_json,
    print_result,
    progress_line,
    stop_when_interrupted,
)
from heterog.cli.objective import (
    DeadlineOption,
    ObjectiveOption,
    SamplesOption,
    StepsOption,
    TokensOption,
    asked_objective,
    objective_for,
)
from heterog.cli.outputs import FOLDER, HTML, JSON, YAML, not_replaced
from heterog.cli.run_file import run_file, save_settings
from heterog.errors import HeterogError, HeterogWarning
from heterog.garbage import settled
from heterog.units import format_seconds
from heterog.workers import open_seats

if TYPE_CHECKING:
    from heterog.explain.explanation import Explanation
    from heterog.methods.planner import Budget, Planner
    from heterog.modes.codecs.value import Codec
    from heterog.report.side_by_side import NamedPlan
    from heterog.search.plan import Plan
    from heterog.search.request import Request, Session
    from heterog.simulator.evaluator import Evaluator

NOTICED_S = 5.0
"""Shortest capture, in seconds, that is reported when it takes longer than the budget."""


def plan(
    context: typer.Context,
    model: ModelArgument,
    cluster: ClusterOption,
    batch_size: BatchOption = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="auto, or names of 'heterog methods' or file.py:name, with commas",
            autocompletion=completion.several(completion.methods),
        ),
    ] = "auto",
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    order: OrderOption = "best",
    no_step_barrier: NoBarrierOption = False,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="of plans about as fast, the one that loses least if predictions are off",
        ),
    ] = False,
    layout: LayoutOption = "",
    objective: ObjectiveOption = "time",
    steps: StepsOption = None,
    samples: SamplesOption = None,
    tokens: TokensOption = None,
    deadline: DeadlineOption = "",
    asynchronous: AsynchronousOption = "",
    background: Annotated[
        str,
        typer.Option(
            "--background",
            help="model of a job for the idle part of each device",
            autocompletion=completion.models,
        ),
    ] = "",
    background_batch: Annotated[
        int | None, typer.Option("--background-batch", help="samples of that job per device")
    ] = None,
    slow_down: Annotated[
        float | None,
        typer.Option(
            "--slow-down", help="largest factor by which it may lengthen a step; 1.1 if not given"
        ),
    ] = None,
    lossy: Annotated[
        str,
        typer.Option(
            "--lossy",
            help="encode slow messages: fp16, int8 or top_k=R; changes the numbers of training",
        ),
    ] = "",
    lossy_target: Annotated[
        float | None,
        typer.Option(
            "--lossy-target", help="seconds per step; top_k then keeps as many values as it can"
        ),
    ] = None,
    policy: PolicyOption = "",
    encoder: EncoderOption = "",
    workers: WorkersOption = "1",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="plan.json"), JSON] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="trace.json for ui.perfetto.dev"), JSON
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="plan.html, a page that explains the plan"),
        HTML,
    ] = None,
    no_changes: Annotated[
        bool, typer.Option("--no-changes", help="do not simulate what buying something would save")
    ] = False,
    why: Annotated[
        bool, typer.Option("--explain", help="also print every method, what was decided, and why")
    ] = False,
    save_config: Annotated[
        Path | None,
        typer.Option("--save-config", help="run.yaml, to be given in place of the model"),
        YAML,
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find how to train a model on a cluster.

    Prints the answer in at most 15 lines; --explain prints everything there is to say. In place of
    the model a run file (.yaml) may stand, with the options as its lines.
    """
    from heterog.cli.found import PlanAnswer
    from heterog.methods.planner import Budget
    from heterog.search.allotment import Allotment
    from heterog.search.plan import make_plan, parse_orders
    from heterog.search.request import Request, Session
    from heterog.simulator.evaluator import Evaluator

    written = output, trace, report, save_config
    not_replaced(run_file(context), "the run file", *written)
    limit = _slow_down_limit(slow_down, background, background_batch)
    codec = _codec(lossy, lossy_target)
    parsed = Budget.parse(budget)
    orders = parse_orders(order)
    methods, known = load_methods(method, policy, encoder)
    given = load_layout(layout, is_required=True)
    averaged = load_asynchronous(asynchronous, no_step_barrier)
    if codec is not None:
        _check_beside_codec(background, averaged)
    target = load_cluster(cluster)
    not_replaced(target.calibration, f"the calibration of {cluster}", *written)
    asked = asked_objective(objective, steps, samples, tokens, deadline)
    if not asked.is_time:
        asked.require_prices(target)
        no_changes = True  # purchases are judged by seconds, not money
    with progress_line(as_json) as progress:
        progress("capture", 0.0, float("inf"))
        begin_s = time.perf_counter()
        graph, rehearse = load_model(model, batch_size)
        _tell_overrun(time.perf_counter() - begin_s, parsed)
    if given is not None:  # a layout that does not fit is reported before any slow work
        given.place(graph, target, step_barrier=not no_step_barrier)
    best_at = objective_for(graph, asked, samples, tokens)
    evaluator = Evaluator(graph, target)
    request = Request(
        graph=graph,
        cluster=target,
        methods=tuple(methods),
        known=known,
        budget=parsed,
        seed=seed,
        orders=orders,
        step_barrier=not no_step_barrier,
        objective=best_at,
        is_robust=robust,
        given=given,
        asynchronous=averaged,
    )
    allotment = Allotment(
        parsed, is_explained=True, with_changes=not no_changes, started_s=time.process_time
    )
    about_codec = ""
    with (
        settled(),
        open_seats(workers) as seats,
        stop_when_interrupted(seats.stop if seats else lambda: None) as stop,
        progress_line(as_json) as progress,
    ):
        session = Session(progress=progress, stop=stop, allotment=allotment, seats=seats)
        best = make_plan(request, session, evaluator=evaluator, rehearse=rehearse)
        if codec is not None and not stop.is_requested:
            from heterog.modes.codecs.method import with_codec

            best, about_codec = with_codec(
                best, evaluator, codec, target_s=lossy_target, rehearse=rehearse
            )
        if background and not stop.is_requested:
            progress("background", 0.0, float("inf"))
            best = best.with_background(load_model(background, background_batch)[0], limit)
        _write(best, output, trace)
        explanation = _explained(best, evaluator, request, session, with_changes=not no_changes)
    if save_config is not None:
        save_settings(context, save_config)
    if report is not None:
        from heterog.report.html import write_report

        write_report(report, best, explanation=explanation)
    found = PlanAnswer(
        plan=best,
        explanation=explanation,
        about_codec=about_codec,
        files=_written(output=output, trace=trace, report=report, save_config=save_config),
    )
    if as_json:
        print_json(found.document())
    else:
        found.print(is_explained=why)
    if stop.is_requested:
        _end_with_best(best, output)


def _tell_overrun(capture_s: float, budget: "Budget") -> None:
    """Say that a capture took longer than a budget, which is for what comes after it."""
    if budget.seconds is not None and capture_s > max(budget.seconds, NOTICED_S):
        warnings.warn(
            f"capturing the model took {format_seconds(capture_s)}, more than the budget of "
            f"{budget}, which begins now; 'heterog capture' keeps the graph for later plans.",
            HeterogWarning,
            stacklevel=2,
        )


def _slow_down_limit(
    slow_down: float | None, background: str, background_batch: int | None
) -> float:
    """The factor by which a background job may lengthen a step."""
    if background_batch is not None and not background:
        raise HeterogError("--background-batch without --background; name the job's model.")
    if slow_down is not None and not background:
        raise HeterogError("--slow-down without --background; name the job's model.")
    limit = 1.1 if slow_down is None else slow_down
    if not limit >= 1.0:
        raise HeterogError(f"--slow-down is {limit:g}; it must be 1 or more.")
    return limit


def _check_beside_codec(background: str, asynchronous: "Planner | None") -> None:
    """Refuse what is not planned together with codecs."""
    if background:
        raise HeterogError("--lossy with --background is not planned yet; ask for one of them.")
    from heterog.modes.built_in import method_names

    if asynchronous is not None and asynchronous.name not in method_names(beside="codecs"):
        raise HeterogError(
            "--lossy goes with --asynchronous average=H; with a server or a stash it is not "
            "planned: ask for one of them."
        )


def _codec(text: str, target_s: float | None) -> "Codec | None":
    """The codec asked for by name, if any."""
    from heterog.modes.codecs.value import CodecKind, parse_codec

    if not text:
        if target_s is not None:
            raise HeterogError("--lossy-target without --lossy; add --lossy top_k=R.")
        return None
    codec = parse_codec(text)
    if target_s is not None and codec.kind != CodecKind.TOP_K:
        raise HeterogError(f"--lossy-target with --lossy {codec}; only top_k has a reduction.")
    if target_s is not None and not target_s > 0.0:
        raise HeterogError(f"--lossy-target is {target_s:g}; it must be more than 0 s.")
    return codec


def _write(plan: "Plan", output: Path | None, trace: Path | None) -> None:
    """Write the files that were asked for, but for the report."""
    if output is not None:
        plan.save(output)
    if trace is not None:
        from heterog.report.lanes import write_trace

        write_trace(trace, plan.timeline())


def _explained(
    plan: "Plan",
    evaluator: "Evaluator",
    request: "Request",
    session: "Session",
    *,
    with_changes: bool,
) -> "Explanation | None":
    """The explanation, if the plan ``is_written``, within its part of a budget in seconds."""
    from heterog.explain.explanation import explain

    allotment = session.allotment
    assert allotment is not None
    if not plan.is_written:
        return None
    return explain(
        plan,
        evaluator,
        changes=with_changes and not session.stop.is_requested,
        progress=session.progress,
        stop=session.stop,
        seconds=None if request.budget.seconds is None else allotment.changes_s,
    )


def _end_with_best(plan: "Plan", output: Path | None) -> None:
    """After an interrupt, end with its exit code and a line about the best plan so far."""
    step = "does not fit" if plan.step_time_s is None else format_seconds(plan.step_time_s)
    where = "printed above" if output is None else f"written to {output}"
    end_interrupted(f"the best so far ({plan.method}, {step}) is {where}")


def _written(
    *, output: Path | None, trace: Path | None, report: Path | None, save_config: Path | None
) -> list[str]:
    """The files written, and their uses."""
    files = [
        (output, ""),
        (trace, " (for ui.perfetto.dev)"),
        (report, ""),
        (save_config, " (a run file)"),
    ]
    return [f"{path}{use}" for path, use in files if path is not None]


def report(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN",
            help="files that 'heterog plan -o' wrote; several are put side by side",
            autocompletion=completion.plans,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="plan.html"), HTML],
    as_json: JsonOption = False,
) -> None:
    """Write a plan, or several side by side, as an HTML page.

    The page explains the plan and needs no network.
    """
    from heterog.search.plan import load_plan

    if len(plans) == 1:
        load_plan(plans[0]).report(output)
    else:
        from heterog.report.side_by_side import write_comparison_page

        write_comparison_page(output, _named(plans))
    document = {"file": str(output), "bytes": output.stat().st_size}
    print_result(as_json, document, f"report (open it in a browser): {output}")


def _named(paths: list[Path]) -> "list[NamedPlan]":
    """The plans with the names of their files, or their paths if names are the same."""
    from heterog.report.side_by_side import NamedPlan
    from heterog.search.plan import load_plan

    stems = [path.name.removesuffix(".gz").removesuffix(".json") for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    return [
        NamedPlan(name=name, plan=load_plan(path)) for name, path in zip(names, paths, strict=True)
    ]


def export(
    plan: PlanArgument,
    target: Annotated[
        str,
        typer.Option(
            "--to",
            help=f"one of {', '.join(completion.TARGETS)}",
            autocompletion=completion.among(completion.TARGETS),
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder to make"), FOLDER],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="renew an export; an edited user.py is kept")
    ] = False,
    sources: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as a folder for other launchers."""
    from heterog.export import check_folder, check_target, make_export, write_folder
    from heterog.search.plan import load_plan

    check_target(target)
    check_folder(output, target, overwrite=overwrite)
    made = make_export(load_plan(plan), target, sources=sources or ())
    for path in (plan, *(sources or ())):
        not_replaced(path, "an input", *(output / name for name in made.files))
    written = write_folder(made, output, overwrite=overwrite)
    document = {
        "target": target,
        "folder": str(output),
        "files": [str(path) for path in written],
        "not_expressed": list(made.not_expressed),
    }
    print_result(
        as_json,
        document,
        f"{target}: {len(written)} files in {output}; its README.md says how to start it.",
        *(f"not expressed: {remark}" for remark in made.not_expressed),
    )
