"""Working memory of the kernel during a step: which buffer holds what on which device."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.kernel_arguments import by_reference
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import Domain, GraphTables
from heterog.strategy.pipeline_schedule import Pass


@by_reference
class Scratch(NamedTuple):
    """Working memory of the kernel."""

    # First member of each division, and one after its last one: nobody else has work there.
    span: IntArray  # [num_divisions, 2]
    value_buffer: IntArray  # local buffer of each value  # [num_values, num_devices]
    remade_buffer: IntArray  # of values made where they are read; see ``remake``
    slot_buffer: IntArray  # converted value of each slot  # [num_slots, num_devices]
    slot_done: IntArray  # 1: ``slot_buffer`` is filled; 2: once more, for a recomputation
    # What a gather in the backward pass, or what is made again, waits for, -1: nothing.
    awaited: IntArray  # [num_devices]
    gradient_buffer: IntArray  # [num_parameters, num_devices]
    gradient_token: IntArray
    last_read: IntArray  # made by the op that reads each parameter last  # [num_parameters, ...]
    ready_buffer: IntArray  # token: the parameter of this step has arrived
    next_ready_buffer: IntArray  # token: the parameter of the next step has arrived
    next_in_bucket: IntArray
    open_first: (
        IntArray  # first parameter of an open bucket  # [num_groups * num_domains * num_dtypes]
    )
    open_last: IntArray
    open_bytes: FloatArray
    bucket_key: IntArray  # of each group: the first whose gradients may share its buckets
    flat_buffer: IntArray  # by ring of a domain  # [num_devices, num_devices]
    ring_token: IntArray  # its collective is done  # [num_devices]
    holder_buffer: IntArray  # what a conversion begins with  # [num_devices]
    # Under ZeRO, by the first parameter of a bucket; see ``slices``.
    bucket_bytes: FloatArray
    bucket_gradient_bytes: FloatArray
    bucket_count: IntArray  # its parameters
    unfinished: IntArray  # those whose gradients are not there yet
    gathered: IntArray  # micro-batch and phase for which it was gathered last
    slice_buffer: IntArray  # summed slices of gradients  # [num_parameters, num_devices]
    slice_token: IntArray  # the last reduce-scatter is done  # [num_parameters, num_devices]
    # Of the last reduce-scatter and the one before: what it received, what it was given, its end.
    # Under stated turns for each chunk, with the turn in which it was last written.
    received_buffer: IntArray  # [2 * num_lanes, num_devices]
    scattered_buffer: IntArray  # [2 * num_lanes, num_devices]
    scattered_token: IntArray  # [2 * num_lanes, num_devices]
    scattered_turn: IntArray  # [num_lanes, num_devices]
    is_part: (
        IntArray  # 1: the device has no part in some groups, as in a pipeline  # [num_devices]
    )
    # Made by the first readers of the last two gathers, of the last two for the backward pass.
    # Under stated turns for each pass of each chunk.
    anchor: IntArray  # [4, or 2 * num_lanes, num_devices]
    anchor_turn: IntArray  # [num_lanes, num_devices]
    # Under caps on micro-batches in flight; see ``turns``.
    # Made at the end of the last micro-batches that began there, the first one first, in a ring.
    token: IntArray  # [num_devices, num_chunks, num_micro, 2]
    entered: IntArray  # 1 + the last micro-batch that began  # [num_devices, num_chunks]
    begun: IntArray  # how many have begun  # [num_devices, num_chunks]
    permit: IntArray  # tokens that the next op waits for  # [2, num_devices]


def spans(member: npt.NDArray[np.bool_]) -> IntArray:
    """First member of each division, and one after its last; 0 and 0 if there is none.

    >>> spans(np.array([[False, True, True, False], [False] * 4])).tolist()
    [[1, 3], [0, 0]]

    Args:
        member: Devices of each division.  # [num_divisions, num_devices]
    """
    num_devices = member.shape[1]
    begin, behind = member.argmax(axis=1), member[:, ::-1].argmax(axis=1)
    found = np.stack([begin, num_devices - behind], axis=1).astype(np.int32)
    found[member.sum(axis=1) == 0] = 0
    return found


def make_scratch(tables: GraphTables, num_devices: int) -> Scratch:
    """Working memory for one graph and cluster."""
    num_parameters = len(tables.parameter_bytes)
    num_domains = Domain.SLICES + len(tables.axis_units) - 1
    num_keys = tables.num_groups * num_domains * tables.num_dtypes

    def per_device(rows: int) -> IntArray:
        return np.empty((rows, num_devices), np.int32)

    return Scratch(
        span=np.empty((0, 2), np.int32),  # it depends on the choice
        value_buffer=per_device(len(tables.value_op)),
        remade_buffer=per_device(len(tables.value_op)),
        slot_buffer=per_device(len(tables.slot_value)),
        slot_done=np.empty(len(tables.slot_value), np.int32),
        awaited=np.empty(num_devices, np.int32),
        gradient_buffer=per_device(num_parameters),
        gradient_token=per_device(num_parameters),
        last_read=per_device(num_parameters),
        ready_buffer=per_device(num_parameters),
        next_ready_buffer=per_device(num_parameters),
        next_in_bucket=np.empty(num_parameters, np.int32),
        open_first=np.empty(num_keys, np.int32),
        open_last=np.empty(num_keys, np.int32),
        open_bytes=np.empty(num_keys, np.float64),
        bucket_key=np.empty(tables.num_groups, np.int32),
        flat_buffer=per_device(num_devices),
        ring_token=np.empty(num_devices, np.int32),
        holder_buffer=np.empty(num_devices, np.int32),
        bucket_bytes=np.empty(num_parameters, np.float64),
        bucket_gradient_bytes=np.empty(num_parameters, np.float64),
        bucket_count=np.empty(num_parameters, np.int32),
        unfinished=np.empty(num_parameters, np.int32),
        gathered=np.empty(num_parameters, np.int32),
        slice_buffer=per_device(num_parameters),
        slice_token=per_device(num_parameters),
        received_buffer=per_device(2),
        scattered_buffer=per_device(2),
        scattered_token=per_device(2),
        scattered_turn=per_device(0),
        is_part=np.empty(num_devices, np.int32),
        anchor=per_device(4),
        anchor_turn=per_device(0),
        token=np.empty((num_devices, 0, 0, 2), np.int32),
        entered=np.empty((num_devices, 0), np.int32),
        begun=np.empty((num_devices, 0), np.int32),
        permit=per_device(2),
    )


def with_lanes(scratch: Scratch, num_chunks: int, num_devices: int) -> Scratch:
    """The memory for gathers and scatters under stated turns; see ``slices``."""

    def per_device(rows: int) -> IntArray:
        return np.empty((rows, num_devices), np.int32)

    return scratch._replace(
        received_buffer=per_device(2 * num_chunks),
        scattered_buffer=per_device(2 * num_chunks),
        scattered_token=per_device(2 * num_chunks),
        scattered_turn=per_device(num_chunks),
        anchor=per_device(2 * len(Pass) * num_chunks),
        anchor_turn=per_device(len(Pass) * num_chunks),
    )
