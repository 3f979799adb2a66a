"""Which pass of which micro-batch a task belongs to, and whether stages can run these apart.

With a stash a stage runs the forward pass of one micro-batch and the backward pass of another. So
every task belongs to one of the two, and a value of the forward pass may only go to later stages,
one of the backward pass only to earlier ones.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from heterog.lowering.program import FIRST_LINK_KIND, IntArray, Program, TaskKind
from heterog.lowering.tables import GraphTables

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
    scattered = np.isin(kind, (TaskKind.SCATTER_VALUE, TaskKind.EXCHANGE_VALUE))
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
