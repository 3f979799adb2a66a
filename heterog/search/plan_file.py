"""The format of a plan's file, and checks that its fields agree with each other.

Graph, cluster and strategy have their own readers; this module reads everything else. Some fields
follow from others and are written for people: the batch size, a speed-up, a copy of the chosen
row. They are not read into the plan, but a file whose copies differ from its plan is refused.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from heterog.errors import BudgetError, InputFileError
from heterog.files import read_json
from heterog.lowering import lower
from heterog.lowering.program import LAST_OP_KIND, IntArray, TaskKind
from heterog.methods.planner import Budget
from heterog.names import shown
from heterog.pricing.intervals import PeakErrors
from heterog.records import (
    Int32,
    Integers,
    Name,
    PositiveSeconds,
    Record,
    Seconds,
    Text,
    parse_record,
)
from heterog.search.background import BackgroundPlan
from heterog.search.history import MethodHistory
from heterog.search.objective import Objective, Offer, cost_per_step
from heterog.search.rows import OUTCOMES, MethodRow
from heterog.simulator.engine import Order

if TYPE_CHECKING:
    from heterog.search.plan import Plan
    from heterog.search.portfolio import Comparison

_ORDERS = tuple(order.name.lower() for order in Order)
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
_CLOSE = 1e-6
"""Relative tolerance for numbers that are computed again, perhaps on another machine."""
_OF_BACKGROUND = ("slow_down", "total_samples_per_s")
_ROOM = {"peak_intervals_bytes": 1.0, "fit_probability": 1e-6}
"""Absolute tolerance for some of these: whole bytes may be rounded differently."""
_COMPUTED = ("throughput_samples_per_s", "gains", "cost_per_step", *_OF_BACKGROUND, *_ROOM)
"""Fields that are computed again when a file is read; the others are copies."""
_Pair = Annotated[list[Int32], Field(min_length=2, max_length=2)]
_NO_PAIRS = np.zeros((0, 2), np.int32)


_ROWS_FOLLOW = ("model", "cluster", "lower_bound_s", "batch_size", "seed", "cost_per_step")
"""Fields of a row that follow from the plan; see ``contradiction``."""
_STAGES = ("baseline", "search", "zero_shot", "finetuned")


def _stated(value: Any, follows: Collection[str]) -> Any:
    """A JSON object without the fields that follow from the plan."""
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if name not in follows}


_Row = Annotated[MethodRow, BeforeValidator(lambda value: _stated(value, _ROWS_FOLLOW))]

_CHOSEN = ("outcome", "step_time_s", "order", "peak_memory_bytes", "shortage")
"""Fields of the chosen row that a plan's file repeats."""


_FOLLOW = (
    *("model", "source", "cluster", "batch_size", "step_barrier", *_CHOSEN, "gains"),
    *("throughput_samples_per_s", "peak_intervals_bytes", "fit_probability"),
)
"""Fields of a plan's file that follow from the plan."""


class PlanRecord(Record):
    """A plan's file, without what follows from the plan."""

    schema_version: int
    heterog_version: Text
    interval_s: Annotated[list[PositiveSeconds], Field(min_length=2, max_length=2)] | None = None
    method: Name
    peak_errors: PeakErrors | None = None  # plans of earlier versions have none of these
    lower_bound_s: Seconds
    search_seconds: Seconds
    num_evaluations: Int32
    seed: _Seed
    budget: Text
    calibration: Text
    methods: Annotated[list[_Row], Field(min_length=1, max_length=1000)]
    strategy: dict[str, Any]
    background: dict[str, Any] | None = None  # plans of earlier versions have none
    program_hash: _Hash | Literal[""]
    task_order: Annotated[IntArray, Integers(Int32)]
    sent_before: Annotated[IntArray, Integers(_Pair, (2,))] = _NO_PAIRS  # not in early plans
    history: Annotated[list[MethodHistory], Field(max_length=1000)] = Field(default_factory=list)
    objective: Objective | None = None
    offers: Annotated[list[Offer], Field(max_length=1000)] = Field(default_factory=list)
    cluster_description: dict[str, Any]
    graph: dict[str, Any]

    @property
    def row(self) -> MethodRow:
        """The row of the plan's own method."""
        return next(row for row in self.methods if row.method == self.method)


def read_plan_record(path: str | Path, version: int) -> tuple[PlanRecord, Any]:
    """Read a plan's file, except for the graph, cluster and strategy in it.

    Returns:
        The record, and the whole document.

    Raises:
        InputFileError: the file is missing, cut off, of another version, or contradicts itself.
    """
    document = read_json(path, "plan")
    where, stated = f"plan {path}", _stated(document, _FOLLOW)
    record = parse_record(stated, PlanRecord, where, versions=(version,))
    fault = _fault(record)
    if fault:
        raise InputFileError(f"{where}: {fault}.")
    return record, document


def _fault(record: PlanRecord) -> str:
    """The first impossible field of a record, in words; empty if none."""
    try:
        Budget.parse(record.budget)
    except BudgetError as error:
        return f"field 'budget': {str(error).rstrip('.')}"
    methods = [row.method for row in record.methods]
    if len(set(methods)) < len(methods):
        return "field 'methods' has a method twice"
    if record.method not in methods:
        return f"field 'method' is '{record.method}', which is not among its methods"
    step_time_s = record.row.step_time_s
    if record.interval_s is not None and not (
        step_time_s is not None and record.interval_s[0] <= step_time_s <= record.interval_s[1]
    ):
        return "field 'interval_s' does not hold the step time"
    for each in record.history:
        seconds, counts, steps = zip(*each.points, strict=True)
        rises = (list(seconds) == sorted(seconds), list(counts) == sorted(counts))
        if each.method not in methods or not all(rises) or min(steps) <= 0.0:
            return f"field 'history' of method '{each.method}' does not fit its methods or itself"
        if sorted(set(steps), reverse=True) != list(steps):
            return f"field 'history' of method '{each.method}' has steps that do not fall"
    for number, row in enumerate(record.methods):
        if why := _row_fault(row):
            return f"field 'methods.{number}.{why}"
    return _order_fault(record)


def _row_fault(row: MethodRow) -> str:
    if row.stage not in _STAGES:
        return f"stage' is none of {', '.join(_STAGES)}"
    if row.outcome not in OUTCOMES:
        return f"outcome' is none of {', '.join(OUTCOMES)}"
    if (row.outcome == "ok") != (row.step_time_s is not None):
        return "step_time_s' is there exactly where the outcome is ok, and is not here"
    if row.order not in (*_ORDERS, *([""] if row.outcome == "not_applicable" else [])):
        return f"order' is none of {', '.join(_ORDERS)}"
    return ""


def _order_fault(record: PlanRecord) -> str:
    """Fault of the order: a task not listed once, or before one it waits for; empty if none."""
    order, num_tasks = record.task_order, len(record.task_order)
    if not record.program_hash:  # of a step of too many tasks
        return "field 'task_order' is of no program" if num_tasks else ""
    if not num_tasks or order.max(initial=0) >= num_tasks:
        return f"field 'task_order' names a task that is none of its {num_tasks:,}"
    if (np.bincount(order, minlength=num_tasks) != 1).any():
        return f"field 'task_order' does not hold each of {num_tasks:,} tasks once"
    place = np.append(np.argsort(order), num_tasks)
    send, op = place[np.minimum(record.sent_before, num_tasks)].T
    if (wrong := np.flatnonzero((send >= op) | (op >= num_tasks))).size:
        return f"field 'sent_before.{wrong[0]}' names tasks that do not follow each other"
    return ""


def background_of(record: PlanRecord, where: str) -> BackgroundPlan | None:
    """The second job, if there is one; ``where`` names the file in errors."""
    if record.background is None:
        return None
    told = _stated(record.background, _OF_BACKGROUND)
    return parse_record(told, BackgroundPlan, f"{where}: background")


def row_to_dict(row: MethodRow, of: "Plan | Comparison") -> dict[str, Any]:
    """A row of a plan or comparison as JSON, with its cost if that is known."""
    cost = cost_per_step(row, of.cluster)
    return {
        "model": of.graph.name,
        "cluster": of.cluster.name,
        "method": row.method,
        "stage": row.stage,
        "outcome": row.outcome,
        "step_time_s": row.step_time_s,
        "lower_bound_s": of.lower_bound_s,
        "order": row.order,
        "peak_memory_bytes": list(row.peak_memory_bytes),
        "noisy_step_times_s": list(row.noisy_step_times_s),
        "num_evaluations": row.num_evaluations,
        "search_seconds": row.search_seconds,
        "shortage": row.shortage,
        "is_rehearsed": row.is_rehearsed,
        "note": row.note,
        "starved": row.starved,
        "batch_size": of.graph.batch_size,
        "seed": of.seed,
    } | ({} if cost is None else {"cost_per_step": cost})


def program_fault(plan: "Plan") -> str:
    """Reason why the stored order cannot be run; empty if it can, or if there is none."""
    if not plan.is_written:
        return ""
    program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
    if program.hash != plan.program_hash:
        return (
            f"field 'program_hash' is {plan.program_hash}, but this heterog makes program "
            f"{program.hash} of its strategy; plan again"
        )
    if len(plan.task_order) != program.num_tasks:
        return f"field 'task_order' has {len(plan.task_order)} of {program.num_tasks} tasks"
    if (early := program.read_too_early(plan.task_order)) is not None:
        task, needed = early
        return f"field 'task_order' has task {task} before task {needed}, whose result it reads"
    send, op = plan.sent_before.T
    wrong = (program.kind[send] != TaskKind.SEND) | (program.kind[op] > LAST_OP_KIND)
    if wrong.any():
        return f"field 'sent_before.{wrong.argmax()}' is not a transfer and an op"
    elsewhere = program.senders(send) != program.device[op]
    if elsewhere.any():
        return (
            f"field 'sent_before.{elsewhere.argmax()}' has an op that does not run where it is "
            "sent from"
        )
    return ""


def contradiction(plan: "Plan", document: Mapping[str, Any]) -> str:
    """First field of a file that differs from its plan; empty if there is none."""
    num_devices = plan.cluster.num_devices
    for row in plan.rows:
        if len(row.peak_memory_bytes) not in (num_devices, *([] if row.step_time_s else [0])):
            return (
                f"field 'peak_memory_bytes' of method '{row.method}' has "
                f"{len(row.peak_memory_bytes)} entries for {num_devices} devices"
            )
    beside = plan.background
    for field in ("idle_share", "samples_per_s", "shortage"):
        if beside is not None and len(getattr(beside, field)) != num_devices:
            return f"field 'background.{field}' needs an entry for each of {num_devices} devices"
    try:
        again = plan.summary() | {"source": plan.graph.source}
    except ValueError:
        return "field 'noisy_step_times_s' has different lengths for methods that are compared"
    told: list[tuple[str, Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]]
    told = [("", document, again, _FOLLOW)]
    for number, rows in enumerate(zip(document["methods"], again["methods"], strict=True)):
        told.append((f"methods.{number}.", *rows, _ROWS_FOLLOW))
    if beside is not None:
        told.append(("background.", document["background"], again["background"], _OF_BACKGROUND))
    for where, here, there, follows in told:
        for name in follows:
            if name in here and name in there and not _is_same(name, here[name], there[name]):
                said = f"is {shown(here[name])}, but what it describes says {shown(there[name])}"
                return f"field '{where}{name}' {said}"
    return ""


def _is_same(name: str, here: object, there: object) -> bool:
    """Whether a field, or a part of it, is the same in a file and in its plan."""
    if isinstance(here, dict) and isinstance(there, dict):
        same = here.keys() == there.keys()
        return same and all(_is_same(name, here[key], there[key]) for key in here)
    if isinstance(here, list) and isinstance(there, list):
        return len(here) == len(there) and all(
            _is_same(name, *pair) for pair in zip(here, there, strict=True)
        )
    if name in _COMPUTED and isinstance(here, int | float) and isinstance(there, int | float):
        room = max(_CLOSE * abs(there), _ROOM.get(name, 0.0))
        return there - room <= here <= there + room
    return here == there
