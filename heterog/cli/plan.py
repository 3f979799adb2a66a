"""``heterog plan``: find how to train a model on a cluster, from the library of solved plans."""

import os
import sys
import time
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
    PolicyOption,
    SeedOption,
    WorkersOption,
    end_interrupted,
    load_asynchronous,
    load_cluster,
    load_layout,
    load_methods,
    load_model,
    load_model_graph,
    print_json,
    progress_line,
    settled,
    stop_when_interrupted,
)
from heterog.cli.objective import (
    DeadlineOption,
    ObjectiveOption,
    SamplesOption,
    StepsOption,
    TokensOption,
    check_amounts,
    objective_for,
    parse_aim,
)
from heterog.cli.outputs import HTML, JSON, YAML, not_replaced
from heterog.cli.run_file import run_file, save_settings
from heterog.errors import HeterogError
from heterog.units import format_seconds
from heterog.workers import open_seats

if TYPE_CHECKING:
    from heterog.explain.explanation import Explanation
    from heterog.methods.planner import Planner
    from heterog.modes.codecs.value import Codec
    from heterog.search.library.store import Lookup
    from heterog.search.plan import Plan
    from heterog.search.request import Request, SeedPlanner, Session
    from heterog.simulator.evaluator import Evaluator

VARIABLE = "HETEROG_LIBRARY"
OFF = "off"
NoLibraryOption = Annotated[
    bool,
    typer.Option(
        "--no-library",
        help="neither start from plans of like cases nor keep this one; so does "
        "HETEROG_LIBRARY=off",
    ),
]


def library_folder() -> Path | None:
    """Folder in which solved plans are kept; ``None`` if they are not kept.

    ``HETEROG_LIBRARY`` names a folder, or is ``off``; otherwise it is in the user's cache.
    """
    said = os.environ.get(VARIABLE, "")
    if said:
        return None if said.lower() == OFF else Path(said)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if cache and Path(cache).is_absolute():  # the specification: relative ones are ignored
        return Path(cache) / "heterog" / "library"
    try:
        return Path.home() / ".cache" / "heterog" / "library"
    except RuntimeError:  # a user without a home
        return None


class Shelf:
    """The user's library during one search; without plans if it is off.

    Args:
        evaluator: Evaluator of the graph and cluster.
        is_off: Whether it is off for this search.
        step_barrier: Whether a step ends with all updates.
    """

    def __init__(self, evaluator: "Evaluator", *, is_off: bool, step_barrier: bool) -> None:
        from heterog.search.library.store import PlanLibrary

        folder = None if is_off else library_folder()
        self._evaluator = evaluator
        self._library = self._lookup = None
        if folder is not None:
            self._library = PlanLibrary(folder)
            self._lookup = self._library.look_up(evaluator, step_barrier=step_barrier)
            _warn(self._lookup.warning)

    @property
    def seeds(self) -> "SeedPlanner | None":
        """Plans of like cases, for searches to start from."""
        return None if self._lookup is None else self._lookup.seeds

    def keep(self, plan: "Plan") -> None:
        """Keep a plan that trains exactly."""
        if self._library is not None and not plan.strategy.modes:
            _warn(self._library.keep(plan, self._evaluator))

    def remark(self, plan: "Plan") -> str:
        """What the search began with; empty if the library had nothing for it."""
        if self._lookup is None or self._lookup.seeds is None:
            return ""
        return _remark(plan, self._lookup)


def _remark(found: "Plan", lookup: "Lookup") -> str:
    """Remark on the better start of a search with the library, and on the time for it.

    Without the library, a search begins with the best of the methods that do not search.
    """
    from heterog.search.library.store import LIBRARY
    from heterog.search.request import GIVEN

    steps = {
        row.method: row.step_time_s
        for row in found.rows
        if row.stage == "baseline" and row.step_time_s is not None and row.method != GIVEN
    }
    start_s = steps.pop(LIBRARY, None)
    count = lookup.num_plans
    plans = f"{count} plan{'s' * (count > 1)} of {'' if count > 1 else 'a '}like case"
    plans += "s" * (count > 1)
    text = f"library: {plans}, {format_seconds(lookup.seconds)}"
    if start_s is None:
        return f"{text}, none fits here"
    if not steps:
        return f"{text}, starts with {format_seconds(start_s)} where no simple method fits"
    ratio = min(steps.values()) / start_s
    return (
        f"{text}, starts {ratio:.2f}x better than without"
        if ratio > 1.0
        else (f"{text}, starts no better than without")
    )


def _warn(text: str) -> None:
    """Print one line about a library that cannot be used; the plan is not affected."""
    if text:
        print(f"heterog: {text}", file=sys.stderr)


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
        typer.Option("--robust", help="of plans that are about as fast, the one that loses least"),
    ] = False,
    layout: LayoutOption = "",
    objective: ObjectiveOption = "time",
    steps: StepsOption = None,
    samples: SamplesOption = None,
    tokens: TokensOption = None,
    deadline: DeadlineOption = "",
    no_library: NoLibraryOption = False,
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
        int | None, typer.Option("--background-batch", help="its samples per device")
    ] = None,
    slow_down: Annotated[
        float | None,
        typer.Option("--slow-down", help="most that it may lengthen a step, as a factor; 1.1"),
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
        typer.Option("--lossy-target", help="seconds per step; top_k then keeps what it can"),
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
        bool,
        typer.Option("--explain", help="also print every method, what was decided, and why"),
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
    from heterog.cli.found import Found
    from heterog.methods.planner import Budget
    from heterog.search.allotment import Allotment
    from heterog.search.objective import Objective
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
    aim = parse_aim(objective)
    deadline_s = check_amounts(aim, steps, samples, tokens, deadline)
    if aim != "time":
        Objective(aim=aim, num_steps=1).require_prices(target)
        no_changes = True  # purchases are judged by seconds, not money
    with progress_line(as_json) as progress:
        progress("capture", 0.0, float("inf"))
        graph, rehearse = load_model(model, batch_size)
    if given is not None:  # a layout that does not fit is reported before any slow work
        given.place(graph, target, step_barrier=not no_step_barrier)
    best_at = objective_for(
        graph, aim, steps=steps, samples=samples, tokens=tokens, deadline_s=deadline_s
    )
    evaluator = Evaluator(graph, target)
    shelf = Shelf(evaluator, is_off=no_library, step_barrier=not no_step_barrier)
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
        seeds=shelf.seeds,
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
        shelf.keep(best)
        if codec is not None and not stop.is_requested:
            from heterog.modes.codecs.method import with_codec

            best, about_codec = with_codec(
                best, evaluator, codec, target_s=lossy_target, rehearse=rehearse
            )
        if background and not stop.is_requested:
            progress("background", 0.0, float("inf"))
            best = best.with_background(load_model_graph(background, background_batch), limit)
        _write(best, output, trace)
        explanation = _explained(best, evaluator, request, session, with_changes=not no_changes)
    if save_config is not None:
        save_settings(context, save_config)
    if report is not None:
        from heterog.report.html import write_report

        write_report(report, best, explanation=explanation)
    found = Found(
        plan=best,
        explanation=explanation,
        about_codec=about_codec,
        about_library=shelf.remark(best),
        files=_written(output=output, trace=trace, report=report, save_config=save_config),
    )
    if as_json:
        print_json(found.document())
    else:
        found.print(is_explained=why)
    if stop.is_requested:
        _end_with_best(best, output)


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
    if asynchronous is not None and asynchronous.name not in _beside_codecs():
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


def _beside_codecs() -> list[str]:
    """Names of the rows of modes that go with codecs."""
    from heterog.modes.built_in import built_in_modes
    from heterog.modes.codecs.value import Codecs

    return [mode.word for mode in built_in_modes() if Codecs.key in mode.goes_with]


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
    """The explanation, if the plan is written out, within what a budget in seconds has for it."""
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
    """After an interrupt, end with its exit code and a line about what there is."""
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
