"""Which pass of which micro-batch a task belongs to, and whether stages can run these apart.

With a stash a stage runs the forward pass of one micro-batch and the backward pass of another. So
every task belongs to one of the two, and a value of the forward pass may only go to later stages,
one of the backward pass only to earlier ones.

What a stash keeps on each device, beside what a step needs on its own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heterog.lowering.choice import Choice
from heterog.lowering.program import (
    FIRST_LINK_KIND,
    RECUT_KINDS,
    FloatArray,
    IntArray,
    Program,
    TaskKind,
)
from heterog.lowering.resident import resident_bytes
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, Tape
from heterog.modes.mode import EncodedMode

BoolArray = npt.NDArray[np.bool_]
Stages = tuple[tuple[int, ...], ...]
AnyIntegers = npt.NDArray[np.integer[Any]]

_OF_SLOTS = (
    *(TaskKind.SPLIT, TaskKind.CONCAT, TaskKind.SEND),
    *(TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE),
)
_OF_BATCH = (
    *(TaskKind.FLATTEN, TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER),
    *(TaskKind.PUSH, TaskKind.SUM, TaskKind.UPDATE, TaskKind.PULL),
)


def is_of_backward(kind: AnyIntegers, subject: IntArray, tables: GraphTables) -> BoolArray:
    """Whether each task belongs to the backward pass of its batch.

    A move of a value belongs where the value is made, and what is made again of the batch where it
    was made first; updates, sums of gradients and what is recomputed belong to the backward pass.

    Args:
        kind: ``TaskKind`` of each task.  # [num_tasks]
        subject: Subject of each task.  # [num_tasks]
        tables: The graph's tables, by which subjects are numbered.

    Returns:
        # [num_tasks]
    """
    found = np.ones(len(kind), np.bool_)
    of_op = np.isin(kind, (TaskKind.COMPUTE, TaskKind.REMAKE))
    found[of_op] = tables.op_is_late[subject[of_op]] > 0
    of_value = np.isin(kind, _OF_SLOTS)
    found[of_value] = tables.op_is_late[
        tables.value_op[tables.slot_value[subject[of_value]]]
    ].astype(np.bool_)
    scattered = np.isin(kind, list(RECUT_KINDS))
    found[scattered] = tables.op_is_late[tables.value_op[subject[scattered]]] > 0
    return found


def ends_batch(kind: AnyIntegers) -> BoolArray:
    """Whether each task sums the gradients of a batch over devices, or updates with them.

    Args:
        kind: ``TaskKind`` of each task.  # [num_tasks]
    """
    return np.isin(kind, _OF_BATCH)


def is_written_last(kind: AnyIntegers, subject: IntArray, tables: GraphTables) -> BoolArray:
    """Whether each task writes to a buffer what the forward pass has made for it.

    A running statistic, say. A step on its own does so at its end, but no later task waits for it,
    and stages that run batches apart do so in the forward pass.

    Args:
        kind: ``TaskKind`` of each task.  # [num_tasks]
        subject: Subject of each task.  # [num_tasks]
        tables: The graph's tables, by which subjects are numbered.
    """
    found = kind == TaskKind.COMPUTE
    own = subject[found]
    found[found] = (tables.op_is_backward[own] > 0) & (tables.op_is_late[own] == 0)
    return np.asarray(found, np.bool_)


def micro_batch_of(
    micro: IntArray, num_reads: AnyIntegers, reads: IntArray, maker: IntArray
) -> IntArray:
    """Micro-batch with which a stage runs each task: the last one that it has anything of.

    A sum of gradients or an update belongs to no micro-batch; it runs with the last one whose
    gradients it needs.

    Args:
        micro: Micro-batch of each task as it was lowered, 0 where it belongs to none.
            # [num_tasks]
        num_reads: Number of buffers that each task reads.  # [num_tasks]
        reads: Buffers that tasks read, one task after another.  # [num_reads]
        maker: Task that makes each buffer.  # [num_buffers]

    Returns:
        # [num_tasks]
    """
    found = micro.copy()
    if not micro.any():
        return found
    reader, made_by = np.repeat(np.arange(len(micro)), num_reads), maker[reads]
    while True:  # once for each task of a chain without micro-batches: sum, update, pull
        last = found.copy()
        np.maximum.at(found, reader, last[made_by])
        if (found == last).all():
            return found


def stage_fault(program: Program, stages: Stages, tables: GraphTables) -> str:
    """Say why stages cannot work on different batches at a time; empty if they can.

    Args:
        program: Program of one step.
        stages: Devices of each stage.
        tables: The graph's tables.
    """
    stage = {device: number for number, own in enumerate(stages) for device in own}
    is_late = is_of_backward(program.kind, program.subject, tables)
    for task in np.flatnonzero(program.kind >= FIRST_LINK_KIND).tolist():
        devices = program.channels[int(program.channel[task])].devices
        met = [stage.get(device, -1) for device in devices]
        if len(set(met)) == 1:
            continue
        goes_on = met[0] < met[-1] if not is_late[task] else met[0] > met[-1]
        if program.kind[task] != TaskKind.SEND or -1 in met or not goes_on:
            return (
                f"devices {devices} of several stages exchange a value of the "
                f"{'backward' if is_late[task] else 'forward'} pass, which with a stash goes from "
                f"a stage to {'earlier' if is_late[task] else 'later'} ones only; cut the model "
                "where one value follows from the others, and keep shared parameters in one stage"
            )
    reader = np.repeat(np.arange(program.num_tasks), np.diff(program.read_start))
    maker = program.buffer_maker[program.read_buffer]
    # A forward pass begins after the backward pass before it in a step on its own only.
    is_alike = program.micro[maker] == program.micro[reader]
    if (is_late[maker] & ~is_late[reader] & is_alike).any():
        return (
            "an op of the forward pass reads what the backward pass makes, so that with a stash "
            "it would wait for a later batch; plan without the stash"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedStash(EncodedMode):
    """Stage of each device, and the micro-batches by which it is behind.

    Attributes:
        stage: Stage of each device, -1 for none.  # [num_devices]
        behind: Number of micro-batches.  # [num_devices]
    """

    folds = False
    keeps_versions = True

    stage: IntArray
    behind: IntArray

    def kept_bytes(self, tape: Tape, tables: GraphTables, choice: Choice) -> FloatArray:
        """Bytes that the stash adds to each device."""
        return stash_bytes(tape, tables, choice, self)


def encoded_stash(choice: Choice) -> EncodedStash:
    """The stash of a choice that has one."""
    return next(mode for mode in choice.modes if isinstance(mode, EncodedStash))


def stash_bytes(
    tape: Tape, tables: GraphTables, choice: Choice, stash: EncodedStash
) -> FloatArray:
    """Bytes that a stash adds to each device.

    A device that is D micro-batches of m behind keeps ceil(D / m) more versions of its weights,
    and what D more micro-batches have left for their backward passes. The newest batch has come
    when the oldest of these D + 1 begins its backward pass: that is its own samples of
    ceil((D + 1) / m) more batches. Messages come before they are needed, too: gradients of one
    micro-batch, and inputs of one, or of two of the same batch.

    Args:
        tape: Tape of one step, whose micro-batches come one after another.
        tables: The graph's tables.
        choice: The choice that it was lowered from.
        stash: The stash.

    Returns:
        # [num_devices]
    """
    holds = choice.member[choice.division[tables.parameter_group]]
    weights = (tables.parameter_bytes[:, None] * holds).sum(0)
    without = resident_bytes(tables._replace(input_bytes_per_sample=0.0), choice)
    batch = resident_bytes(tables, choice) - without
    tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
    reads, buffers = tape.reads[: tape.counts[NUM_READS]], tape.buffers[: tape.counts[NUM_BUFFERS]]
    is_late = is_of_backward(tasks["kind"], tasks["subject"], tables)
    ends = np.append(tasks["read_start"], tape.counts[NUM_READS])
    is_read_late = np.zeros(len(buffers), np.bool_)
    is_read_late[reads[np.repeat(is_late, np.diff(ends))]] = True
    maker = buffers["maker"]
    is_saved = is_read_late & ~is_late[maker]
    source, target = source_stages(tape, stash.stage), _stage(stash.stage, tasks["device"])
    is_message = tasks["kind"] >= FIRST_LINK_KIND
    comes, is_gradient = (is_message & (target >= 0) & (source != target))[maker], is_late[maker]
    micro, count = tasks["micro"][maker], choice.num_micro
    saved = _by_micro_batch(buffers, micro, is_saved, (count, len(weights)))
    whole, more = np.divmod(stash.behind, count)
    kept = whole * saved.sum(0) + more * saved.max(0)
    kept += (whole + (more > 0)) * weights + (whole + 1) * batch
    inputs = _by_micro_batch(buffers, micro, comes & ~is_gradient, saved.shape)
    gradients = _by_micro_batch(buffers, micro, comes & is_gradient, saved.shape)
    early = min(count, 2) * inputs.max(0) + gradients.max(0)
    return np.asarray(kept + early, np.float64)


def _by_micro_batch(
    buffers: npt.NDArray[np.void],
    micro: IntArray,
    chosen: npt.NDArray[np.bool_],
    shape: tuple[int, int],
) -> FloatArray:
    """Bytes of some buffers by micro-batch and device.

    Args:
        buffers: Buffers of a tape.  # [num_buffers]
        micro: Micro-batch of each.  # [num_buffers]
        chosen: Whether each counts.  # [num_buffers]
        shape: Numbers of micro-batches and devices.

    Returns:
        # [num_micro, num_devices]
    """
    here = chosen & (buffers["device"] >= 0)
    key = micro[here] * shape[1] + buffers["device"][here]
    sizes = np.bincount(key, buffers["num_bytes"][here], shape[0] * shape[1])
    return np.asarray(sizes, np.float64).reshape(shape)


def source_stages(tape: Tape, stage: IntArray) -> IntArray:
    """Stage of the device whose buffer each task reads first, -1 for none.  # [num_tasks]"""
    count = int(tape.counts[NUM_TASKS])
    starts = np.append(tape.tasks["read_start"][:count], tape.counts[NUM_READS])
    found = np.full(count, -1, np.int32)
    has_reads = np.diff(starts) > 0
    first = tape.reads[starts[:-1][has_reads]]
    found[has_reads] = _stage(stage, tape.buffers["device"][first])
    return found


def _stage(stage: IntArray, device: IntArray) -> IntArray:
    """Stage of each device of an array, -1 for no device."""
    return np.append(stage, np.int32(-1))[device]
