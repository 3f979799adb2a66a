"""Whether what a plan file says fits together: its order, its peaks and what follows from them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from heterog.lowering import lower
from heterog.lowering.program import LAST_OP_KIND, TaskKind
from heterog.names import shown
from heterog.search.plan_file import PlanRecord

if TYPE_CHECKING:
    from heterog.search.plan import Plan

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
