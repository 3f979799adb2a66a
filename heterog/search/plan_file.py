"""The shape of a plan's file, and what its fields must say about each other.

Graph, cluster and strategy have readers of their own; here is everything else. What a file says
twice (the batch size, a speed-up) has to be the same both times.

Whether what a plan file says fits together: its order, its peaks and what follows from them.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from heterog.errors import BudgetError, InputFileError
from heterog.lowering import lower
from heterog.lowering.program import LAST_OP_KIND, TaskKind
from heterog.methods.planner import OUTCOMES, Budget, MethodRow
from heterog.names import shown
from heterog.pricing.intervals import PeakErrors
from heterog.records import (
    Amount,
    Count,
    Int32,
    Many,
    Name,
    NumBytes,
    PositiveSeconds,
    Record,
    Seconds,
    Share,
    Text,
    parse_record,
    read_record,
)
from heterog.search.background import BackgroundPlan
from heterog.search.cheapest import Offer
from heterog.search.history import MethodHistory
from heterog.search.objective import Objective, cost_per_step
from heterog.search.stability import Gain
from heterog.simulator.engine import Order

if TYPE_CHECKING:
    from heterog.search.compare import Comparison
    from heterog.search.plan import Plan

_ORDERS = tuple(order.name.lower() for order in Order)
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
_CLOSE = 1e-6
_Pair = Annotated[list[Int32], Field(min_length=2, max_length=2)]
_BytesPair = Annotated[list[NumBytes], Field(min_length=2, max_length=2)]


class RowRecord(Record):
    """Result of one method."""

    model: Name
    cluster: Name
    method: Name
    stage: Literal["baseline", "search", "zero_shot", "finetuned"]
    outcome: str
    step_time_s: PositiveSeconds | None
    lower_bound_s: Seconds
    order: str
    peak_memory_bytes: list[NumBytes]
    noisy_step_times_s: list[PositiveSeconds] = Field(default_factory=list)
    num_evaluations: Int32
    search_seconds: Seconds
    shortage: Text
    is_rehearsed: bool = False
    note: Text = ""  # plans of earlier versions have none
    starved: bool = False
    batch_size: Count
    seed: _Seed
    cost_per_step: Amount | None = None  # only where hosts have prices


class PlanRecord(Record):
    """A plan's file."""

    schema_version: int
    heterog_version: Text
    model: Name
    source: Text
    cluster: Name
    outcome: str
    step_time_s: PositiveSeconds | None
    interval_s: Annotated[list[PositiveSeconds], Field(min_length=2, max_length=2)] | None = None
    throughput_samples_per_s: Amount | None
    method: Name
    order: str
    peak_memory_bytes: list[NumBytes]
    peak_intervals_bytes: list[_BytesPair] = Field(default_factory=list)
    fit_probability: Share | None = None
    peak_errors: PeakErrors | None = None  # plans of earlier versions have none of these
    lower_bound_s: Seconds
    search_seconds: Seconds
    num_evaluations: Int32
    batch_size: Count
    seed: _Seed
    budget: Text
    step_barrier: bool
    calibration: Text
    shortage: Text
    gains: list[Gain] = Field(default_factory=list)
    methods: Annotated[list[RowRecord], Field(min_length=1, max_length=1000)]
    strategy: dict[str, Any]
    background: dict[str, Any] | None = None  # plans of earlier versions have none
    program_hash: _Hash | Literal[""]
    task_order: Many[Int32]
    sent_before: Many[_Pair] = Field(default_factory=list)  # plans of earlier versions have none
    history: Annotated[list[MethodHistory], Field(max_length=1000)] = Field(default_factory=list)
    objective: Objective | None = None
    offers: Annotated[list[Offer], Field(max_length=1000)] = Field(default_factory=list)
    cluster_description: dict[str, Any]
    graph: dict[str, Any]


def read_plan_record(path: str | Path, version: int) -> PlanRecord:
    """Read a plan's file; graph, cluster and strategy in it are still to be read.

    Raises:
        InputFileError: the file is missing, cut off, of another version, or contradicts itself.
    """
    record = read_record(path, "plan", PlanRecord, versions=(version,))
    fault = _fault(record)
    if fault:
        raise InputFileError(f"plan {path}: {fault}.")
    return record


def _fault(record: PlanRecord) -> str:
    """First field of a record that cannot be right, in words; empty if none."""
    try:
        Budget.parse(record.budget)
    except BudgetError as error:
        return f"field 'budget': {str(error).rstrip('.')}"
    methods = [row.method for row in record.methods]
    if len(set(methods)) < len(methods):
        return "field 'methods' has a method twice"
    if record.method not in methods:
        return f"field 'method' is '{record.method}', which is not among its methods"
    chosen = record.methods[methods.index(record.method)]
    for field in ("outcome", "step_time_s", "order", "shortage", "peak_memory_bytes"):
        if getattr(chosen, field) != getattr(record, field):
            return f"field '{field}' is not that of its method '{record.method}'"
    if record.interval_s is not None and not (
        record.step_time_s is not None
        and record.interval_s[0] <= record.step_time_s <= record.interval_s[1]
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
        if why := _row_fault(row, record):
            return f"field 'methods.{number}.{why}"
    return _order_fault(record) or _rate_fault(record)


def _row_fault(row: RowRecord, record: PlanRecord) -> str:
    if row.outcome not in OUTCOMES:
        return f"outcome' is none of {', '.join(OUTCOMES)}"
    if (row.outcome == "ok") != (row.step_time_s is not None):
        return "step_time_s' is there exactly where the outcome is ok, and is not here"
    if row.order not in (*_ORDERS, *([""] if row.outcome == "not_applicable" else [])):
        return f"order' is none of {', '.join(_ORDERS)}"
    for field in ("model", "cluster", "batch_size", "seed", "lower_bound_s"):
        if getattr(row, field) != getattr(record, field):
            return f"{field}' is not the plan's"
    return ""


def _order_fault(record: PlanRecord) -> str:
    """Fault of the order: a task not listed once, or before one it waits for; empty if none."""
    order = np.array(record.task_order, np.int64)
    num_tasks = len(order)
    if not record.program_hash:  # of a step of too many tasks
        return "field 'task_order' is of no program" if num_tasks else ""
    if not num_tasks or order.max(initial=0) >= num_tasks:
        return f"field 'task_order' names a task that is none of its {num_tasks:,}"
    if (np.bincount(order, minlength=num_tasks) != 1).any():
        return f"field 'task_order' does not hold each of {num_tasks:,} tasks once"
    place = np.argsort(order)
    for number, (send, op) in enumerate(record.sent_before):
        if max(send, op) >= num_tasks or place[send] >= place[op]:
            return f"field 'sent_before.{number}' names tasks that do not follow each other"
    return ""


def _rate_fault(record: PlanRecord) -> str:
    if record.step_time_s is None:
        return "field 'throughput_samples_per_s' is there without a step time" * (
            record.throughput_samples_per_s is not None
        )
    rate = record.batch_size / record.step_time_s
    if not _close([record.throughput_samples_per_s or 0.0], [rate]):
        return "field 'throughput_samples_per_s' is not the batch size over the step time"
    return ""


def _close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(found) == len(wanted) and bool(np.allclose(found, wanted, rtol=_CLOSE, atol=0.0))


def row_of(record: RowRecord) -> MethodRow:
    """The result of a method."""
    return MethodRow(
        method=record.method,
        stage=record.stage,
        outcome=record.outcome,
        step_time_s=record.step_time_s,
        order=record.order,
        peak_memory_bytes=tuple(record.peak_memory_bytes),
        num_evaluations=record.num_evaluations,
        search_seconds=record.search_seconds,
        shortage=record.shortage,
        noisy_step_times_s=tuple(record.noisy_step_times_s),
        is_rehearsed=record.is_rehearsed,
        note=record.note,
        is_starved=record.starved,
    )


def background_of(record: PlanRecord, where: str) -> BackgroundPlan | None:
    """The second job, if there is one; ``where`` names the file in errors."""
    if record.background is None:
        return None
    told = dict(record.background)
    derived = {name: told.pop(name, None) for name in ("slow_down", "total_samples_per_s")}
    found = parse_record(told, BackgroundPlan, f"{where}: background")
    for name, value in derived.items():
        wanted = getattr(found, name)
        if not isinstance(value, float) or not math.isclose(value, wanted, rel_tol=_CLOSE):
            raise InputFileError(f"{where}: field 'background.{name}' contradicts the others.")
    return found


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
        "starved": row.is_starved,
        "batch_size": of.graph.batch_size,
        "seed": of.seed,
    } | ({} if cost is None else {"cost_per_step": cost})


_SAME_PEAK = 1e-6
"""Largest relative difference of interval ends, and difference of probabilities, to ignore."""
_Gain = tuple[str, float, float, float]


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
    for number, (send, op) in enumerate(plan.sent_before):
        is_send = program.kind[send] == TaskKind.SEND
        if not is_send or program.kind[op] > LAST_OP_KIND:
            return f"field 'sent_before.{number}' is not a transfer and an op"
        if program.channels[int(program.channel[send])].devices[0] != program.device[op]:
            return (
                f"field 'sent_before.{number}' has an op that does not run where it is sent from"
            )
    return ""


def contradiction(plan: "Plan", record: PlanRecord) -> str:
    """First field of a file that contradicts its graph, cluster or strategy; empty if none."""
    num_devices = plan.cluster.num_devices
    said = {
        "model": (record.model, plan.graph.name),
        "source": (record.source, plan.graph.source),
        "cluster": (record.cluster, plan.cluster.name),
        "batch_size": (record.batch_size, plan.graph.batch_size),
        "step_barrier": (record.step_barrier, plan.strategy.step_barrier),
    }
    for field, (here, there) in said.items():
        if here != there:
            return f"field '{field}' is {shown(here)}, but what it describes says {shown(there)}"
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
        gains = plan.gains
    except ValueError:
        return "field 'noisy_step_times_s' has different lengths for methods that are compared"
    if fault := _peaks_fault(plan, record):
        return fault
    told = [(each.over, each.speedup, each.low, each.high) for each in record.gains]
    if not _same_gains(told, [(g.over, g.speedup, g.low, g.high) for g in gains]):
        return "field 'gains' is not what follows from the step times of its methods"
    return ""


def _peaks_fault(plan: "Plan", record: PlanRecord) -> str:
    """Field about peaks that does not follow from them and their errors; empty if none."""
    told, found = record.peak_intervals_bytes, plan.peak_intervals_bytes
    # Whole bytes, of which the last may be rounded otherwise on another machine.
    if len(told) != len(found) or not np.allclose(told, found, rtol=_SAME_PEAK, atol=1.0):
        return (
            "field 'peak_intervals_bytes' is not what follows from 'peak_memory_bytes' and "
            "'peak_errors'"
        )
    here, there = record.fit_probability, plan.fit_probability
    if (here is None) != (there is None) or abs((here or 0.0) - (there or 0.0)) > _SAME_PEAK:
        return (
            f"field 'fit_probability' is {here}, but peaks, their errors and usable memory say "
            f"{there}"
        )
    return ""


def _same_gains(told: Sequence[_Gain], found: Sequence[_Gain]) -> bool:
    return [each[0] for each in told] == [each[0] for each in found] and np.allclose(
        [each[1:] for each in told], [each[1:] for each in found], rtol=1e-6, atol=0.0
    )
