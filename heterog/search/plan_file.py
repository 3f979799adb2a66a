"""The shape of a plan's file, and what its fields must say about each other.

Graph, cluster and strategy have readers of their own; here is everything else. What a file says
twice (the batch size, a speed-up) has to be the same both times.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from heterog.errors import BudgetError, HeterogError, InputFileError
from heterog.methods.planner import OUTCOMES, Budget, MethodRow
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
    read_record,
)
from heterog.search.background import BackgroundPlan
from heterog.search.objective import FASTEST, Aim, Objective
from heterog.simulator.engine import Order

_ORDERS = tuple(order.name.lower() for order in Order)
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Part = Annotated[float, Field(ge=-1e-6, le=1.0 + 1e-6, allow_inf_nan=False)]
_Factor = Annotated[float, Field(ge=1.0, le=1e9, allow_inf_nan=False)]
_Ratio = Annotated[float, Field(gt=0.0, le=1e12, allow_inf_nan=False)]
_CLOSE = 1e-6
_Pair = Annotated[list[Int32], Field(min_length=2, max_length=2)]
_BytesPair = Annotated[list[NumBytes], Field(min_length=2, max_length=2)]
_Point = Annotated[list[Amount], Field(min_length=3, max_length=3)]


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


class PeakErrorsRecord(Record):
    """Errors of predicted peaks."""

    spread: Annotated[float, Field(gt=0.0, le=1.0)]
    num_runs: Annotated[int, Field(ge=2, le=1000)]
    measured_on: Name


class ObjectiveRecord(Record):
    """Objective of a plan."""

    aim: Literal["time", "cost", "cost_per_token"]
    num_steps: Annotated[int, Field(ge=1, le=10**12)] | None
    deadline_s: PositiveSeconds | None


class OfferRecord(Record):
    """A trade of time for money."""

    hosts: Annotated[list[Name], Field(max_length=4096)]
    method: Name
    step_time_s: PositiveSeconds
    cost_per_step: Amount


class GainRecord(Record):
    """A speed-up over another method and its range under noise."""

    over: Name
    speedup: _Ratio
    low: _Ratio
    high: _Ratio


class BackgroundRecord(Record):
    """A second job in the idle time of the first."""

    model: Name
    source: Text
    batch_size: Count
    limit: _Factor
    allowance_s: Seconds
    step_time_alone_s: PositiveSeconds
    step_time_s: PositiveSeconds
    idle_share: list[_Part]
    samples_per_s: list[Amount]
    shortage: list[Text]
    slow_down: _Ratio
    total_samples_per_s: Amount


class HistoryRecord(Record):
    """The best step of one method while the search went on."""

    method: Name
    start_s: Seconds
    finish_s: Seconds
    points: Annotated[list[_Point], Field(min_length=1, max_length=1000)]


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
    peak_errors: PeakErrorsRecord | None = None  # plans of earlier versions have none of these
    lower_bound_s: Seconds
    search_seconds: Seconds
    num_evaluations: Int32
    batch_size: Count
    seed: _Seed
    budget: Text
    step_barrier: bool
    calibration: Text
    shortage: Text
    gains: list[GainRecord] = Field(default_factory=list)
    methods: Annotated[list[RowRecord], Field(min_length=1, max_length=1000)]
    strategy: dict[str, Any]
    background: BackgroundRecord | None = None  # plans of earlier versions have none
    program_hash: _Hash | Literal[""]
    task_order: Many[Int32]
    sent_before: Many[_Pair] = Field(default_factory=list)  # plans of earlier versions have none
    history: Annotated[list[HistoryRecord], Field(max_length=1000)] = Field(default_factory=list)
    objective: ObjectiveRecord | None = None
    offers: Annotated[list[OfferRecord], Field(max_length=1000)] = Field(default_factory=list)
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
    beside = record.background
    if beside is not None and not _close(
        [beside.slow_down, beside.total_samples_per_s],
        [beside.step_time_s / beside.step_time_alone_s, math.fsum(beside.samples_per_s)],
    ):
        return "field 'background' contradicts itself"
    return ""


def _close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(found) == len(wanted) and bool(np.allclose(found, wanted, rtol=_CLOSE, atol=0.0))


def objective_of(record: PlanRecord, where: str) -> Objective:
    """The objective of a plan's file; ``where`` names it in errors."""
    if record.objective is None:
        return FASTEST
    values = record.objective.model_dump()
    try:
        return Objective(**(values | {"aim": Aim(values["aim"])}))
    except (HeterogError, ValueError) as error:
        raise InputFileError(f"{where}: field 'objective': {error}") from error


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


def background_of(record: BackgroundRecord | None) -> BackgroundPlan | None:
    """The second job, if there is one."""
    if record is None:
        return None
    values = record.model_dump(exclude={"slow_down", "total_samples_per_s"})
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return BackgroundPlan(**(values | lists))


def row_to_dict(
    row: MethodRow,
    *,
    model: str,
    cluster: str,
    lower_bound_s: float,
    batch_size: int,
    seed: int,
    cost_per_step: float | None = None,
) -> dict[str, Any]:
    """A row as JSON, with its cost if that is known."""
    cost = {} if cost_per_step is None else {"cost_per_step": cost_per_step}
    return {
        "model": model,
        "cluster": cluster,
        "method": row.method,
        "stage": row.stage,
        "outcome": row.outcome,
        "step_time_s": row.step_time_s,
        "lower_bound_s": lower_bound_s,
        "order": row.order,
        "peak_memory_bytes": list(row.peak_memory_bytes),
        "noisy_step_times_s": list(row.noisy_step_times_s),
        "num_evaluations": row.num_evaluations,
        "search_seconds": row.search_seconds,
        "shortage": row.shortage,
        "is_rehearsed": row.is_rehearsed,
        "note": row.note,
        "starved": row.is_starved,
        "batch_size": batch_size,
        "seed": seed,
    } | cost
