"""``heterog plan``: find how to train a model on a cluster.

What ``heterog plan`` found, and how it says so.
"""

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
    load_asynchronous,
    load_cluster,
    load_layout,
    load_methods,
    load_model,
    load_model_graph,
    print_json,
    progress_line,
    settled,
)
from heterog.cli.interrupt import end_interrupted, stop_when_interrupted
from heterog.cli.library import NoLibraryOption, Shelf
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
from heterog.cli.outputs import HTML, JSON, not_replaced
from heterog.errors import HeterogError
from heterog.units import format_seconds
from heterog.workers import open_seats

if TYPE_CHECKING:
    from heterog.explain.explanation import Explanation
if TYPE_CHECKING:
    from heterog.modes.codecs.value import Codec
if TYPE_CHECKING:
    from heterog.search.plan import Plan
if TYPE_CHECKING:
    from heterog.methods.planner import Planner
if TYPE_CHECKING:
    from heterog.search.request import Request, Session
if TYPE_CHECKING:
    from heterog.simulator.evaluator import Evaluator
from dataclasses import dataclass
from typing import Any

from heterog.cli.common import out
from heterog.cli.objective import money_remarks, offers_lines
from heterog.cluster.topology import Cluster
from heterog.explain.explanation import Explanation
from heterog.modes.built_in import method_names
from heterog.pricing.calibration import Calibration, cost_model_of, extrapolated_by
from heterog.pricing.device_models.model import DeviceModels, provenance
from heterog.report.answer import answer, brief_answer
from heterog.report.tables import explanation_text, memory_table, methods_table
from heterog.search.background import BackgroundPlan
from heterog.search.plan import Plan
from heterog.search.portfolio import UNPLAYED
from heterog.search.stability import DATA_PARALLEL, REFERENCES


def plan(
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
    as_json: JsonOption = False,
) -> None:
    """Find how to train a model on a cluster.

    Prints the answer in at most 15 lines; --explain prints everything there is to say.
    """
    from heterog.methods.planner import Budget
    from heterog.search.allotment import Allotment
    from heterog.search.objective import Objective
    from heterog.search.plan import make_plan, parse_orders
    from heterog.search.request import Request, Session
    from heterog.simulator.evaluator import Evaluator

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
    not_replaced(target.calibration, f"the calibration of {cluster}", output, trace, report)
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
    if report is not None:
        from heterog.report.html import write_report

        write_report(report, best, explanation=explanation)
    found = Found(
        plan=best,
        explanation=explanation,
        about_codec=about_codec,
        about_library=shelf.remark(best),
        files=_written(output=output, trace=trace, report=report),
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
        from heterog.report.trace import write_trace

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


def _written(*, output: Path | None, trace: Path | None, report: Path | None) -> list[str]:
    """The files written, and their uses."""
    files = [(output, ""), (trace, " (for ui.perfetto.dev)"), (report, "")]
    return [f"{path}{use}" for path, use in files if path is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan and what there is to say about it.

    Attributes:
        plan: The plan.
        explanation: Its explanation, if it is written out.
        about_codec: What became of the codec that was asked for; empty without one.
        about_library: What the search began with; empty if that was nothing of the library's.
        files: The files written, and their uses.
    """

    plan: Plan
    explanation: Explanation | None
    about_codec: str
    about_library: str
    files: list[str]

    def document(self) -> dict[str, Any]:
        """All of it as JSON."""
        explained = None if self.explanation is None else self.explanation.to_dict()
        extra: dict[str, Any] = {
            "extrapolated": _extrapolated(self.plan),
            "explanation": explained,
        }
        told = {"library": self.about_library, "lossy": self.about_codec}
        return self.plan.summary() | extra | {key: text for key, text in told.items() if text}

    def print(self, *, is_explained: bool) -> None:
        """Print the answer, and then, if it is explained, every method and every fact."""
        width, remarks = min(out.width, 100), self._remarks()
        if self.explanation is None:
            lines = brief_answer(self.plan, width=width, remarks=remarks, files=self.files)
        else:
            lines = answer(
                self.explanation,
                width=width,
                remarks=remarks,
                files=self.files,
                advice="" if is_explained else "--explain says why and shows all methods",
            )
        for line in lines:
            out.print(line, soft_wrap=True, highlight=False)
        if is_explained:
            self._print_everything()

    def _remarks(self) -> list[str]:
        """Sentences beside the answer, the most important first."""
        plan, extrapolated = self.plan, _extrapolated(self.plan)
        remarks = _not_rehearsed(plan)
        if plan.background is not None:
            remarks.append(_beside(plan.background, plan.cluster))
        if extrapolated is not None:
            remarks.append(_trust(plan.calibration, extrapolated))
        if not remarks:
            remarks = _modelled(plan.cluster)
        asked = [self.about_codec, *_not_exact(plan), *money_remarks(plan), self.about_library]
        return [*filter(None, asked), *remarks]

    def _print_everything(self) -> None:
        """Print every method, and everything there is to say about the plan."""
        out.print()
        out.print(methods_table(self.plan.rows, self.plan.cluster, title=_title(self.plan)))
        out.print(_verdict(self.plan))
        for line in offers_lines(self.plan):
            out.print(line, highlight=False)
        if self.explanation is not None:
            out.print()
            out.print(explanation_text(self.explanation))
            out.print(memory_table(self.explanation.fit))


def _not_rehearsed(found: Plan) -> list[str]:
    """A remark if the winner should have been rehearsed and was not."""
    winner = next(row for row in found.rows if row.method == found.method)
    return [UNPLAYED] * (UNPLAYED in winner.note)


def _not_exact(found: Plan) -> list[str]:
    """What a method that gives other weights was asked for, and how it compares."""
    return [
        f"{row.method} ({'chosen' if row.method == found.method else 'not chosen'}): "
        f"{row.note or row.shortage}"
        for row in found.rows
        if row.method in method_names()
    ]


def _beside(beside: BackgroundPlan, cluster: Cluster) -> str:
    """One sentence or two: what a background job gets done, and what it costs."""
    where = beside.devices
    text = f"Background {beside.model}, batch {beside.batch_size}: no device has room."
    if where:
        idle = sum(beside.idle_share[device] for device in where) / len(where)
        text = (
            f"Background {beside.model}, batch {beside.batch_size} on each of {len(where)} "
            f"device{'s' * (len(where) > 1)}, idle {idle:.0%} of the step: "
            f"{beside.total_samples_per_s:.1f} samples/s; the step takes "
            f"{format_seconds(beside.step_time_s)}, {beside.slow_down:.3f}x (limit "
            f"{beside.limit:g}x)."
        )
    for device, why in enumerate(beside.shortage):
        if why:
            text += f" Not on {cluster.devices[device].name}: {why}."
    return text


def _extrapolated(found: Plan) -> dict[str, Any] | None:
    """Part of a plan's compute time far from all measurements; ``None`` for the roofline."""
    model = cost_model_of(found.cluster)
    if not isinstance(model, Calibration):
        return None
    shares = extrapolated_by(model, found.graph, found.cluster, found.strategy)
    return {"share": sum(shares.values()), "kinds": list(shares)}


def _modelled(cluster: Cluster) -> list[str]:
    """Sources of measured kernel times, if there are no measurements of one's own."""
    if not isinstance(cost_model_of(cluster), DeviceModels):
        return []
    return [f"kernels by device models ({provenance(cluster.device_types)})"]


def _trust(calibration: str, extrapolated: dict[str, Any]) -> str:
    """One sentence: how much of a prediction was measured."""
    share, kinds = extrapolated["share"], extrapolated["kinds"]
    if not kinds:
        return f"calibrated on {calibration}; every op was measured near its size"
    shown = ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
    return (
        f"calibrated on {calibration}; {share:.0%} of the compute time is extrapolated ({shown})"
    )


def _title(found: Plan) -> str:
    barrier = "" if found.strategy.step_barrier else ", no step barrier"
    return (
        f"{found.graph.name}, batch {found.graph.batch_size}, on {found.cluster.name} "
        f"(predicted by {found.calibration}, seed {found.seed}, budget {found.budget}{barrier})"
    )


def _verdict(found: Plan) -> str:
    """A few sentences: the winner, its gain, and how stable that is."""
    if found.step_time_s is None:
        return f"No method fits. The nearest is {found.method}: {found.shortage}."
    text = (
        f"{found.method}: {format_seconds(found.step_time_s)} a step, "
        f"{found.throughput_samples_per_s:.1f} samples/s, order {found.order}, at least "
        f"{format_seconds(found.lower_bound_s)} by any strategy with a step barrier."
    )
    for each in found.gains:
        text += f" {each.speedup:.2f}x over {each.over}"
        if each.low < each.high:
            text += f" ({each.low:.2f}x to {each.high:.2f}x if predictions are off)"
        text += "."
    simple = found.gains[0] if found.gains else None
    is_simple = found.method in (*DATA_PARALLEL, *REFERENCES)
    if simple is not None and not is_simple and simple.speedup < 1.01:
        text += f" That is within 1 % of data parallelism: prefer the simpler {simple.over}."
    return text
