"""Seconds of a simulated step and of its critical path by group, device and link, in one pass.

These are facts of ``timeline`` and ``critical_path``, but as arrays without names, and fast enough
to be computed after each move of a search. ``GROUP_FACTS`` lists the columns of groups of ops,
``DEVICE_FACTS`` those of devices.
"""

from typing import NamedTuple

import numpy as np

from heterog.lowering.kernels import helper, kernel
from heterog.lowering.program import (
    BUCKET_KINDS,
    FIRST_LINK_KIND,
    OP_KINDS,
    RECUT_KINDS,
    SLOT_KINDS,
    FloatArray,
    IntArray,
    TaskKind,
)
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import NUM_TASKS, Tape
from heterog.pricing.cost_model import ChannelPrices, Prices
from heterog.simulator.timings import Timings

GROUP_FACTS = (
    "compute", "gradients", "values_made", "values_read",
    "path_compute", "path_again", "path_copies", "path_update", "path_gradients",
    "path_values_made", "path_values_read", "path_wait",
)  # fmt: skip
"""Seconds of a group: all its ops, collectives and transfers, then those on the critical path."""
DEVICE_FACTS = ("compute", "path_compute", "path_link", "link")
"""Seconds of a device: on its stream, in its tasks on the critical path, on its busiest link."""

_COMPUTE, _GRADIENTS, _MADE, _READ = 0, 1, 2, 3
_PATH_COMPUTE, _PATH_AGAIN, _PATH_COPIES, _PATH_UPDATE = 4, 5, 6, 7
_PATH_GRADIENTS, _PATH_MADE, _PATH_READ, _PATH_WAIT = 8, 9, 10, 11
# Seconds of buckets are first summed by bucket, in these columns.
_BUCKET_LINK, _BUCKET_PATH_LINK, _BUCKET_PATH_COPY, _BUCKET_PATH_WAIT = range(4)
_SAME_INSTANT = 1e-9

_OP, _VALUE, _WHOLE_VALUE, _PARAMETER, _BUCKET, _NOWHERE = range(6)


def _about() -> IntArray:
    """Kind of the subject of each ``TaskKind``: an op, a value, a parameter, a bucket."""
    about = np.full(len(TaskKind), _NOWHERE, np.int32)
    about[[TaskKind.ACCUMULATE, TaskKind.SUM, TaskKind.UPDATE]] = _PARAMETER
    about[[TaskKind.PUSH, TaskKind.PULL]] = _PARAMETER
    for kinds, number in (
        *((OP_KINDS, _OP), (SLOT_KINDS, _VALUE)),
        *((RECUT_KINDS, _WHOLE_VALUE), (BUCKET_KINDS, _BUCKET)),
    ):
        about[list(kinds)] = number
    return about


_ABOUT = _about()


class PlaceFacts(NamedTuple):
    """Seconds of a simulated step by place, as shares of the whole step.

    Attributes:
        groups: Columns ``GROUP_FACTS`` of each group of ops.  # [num_groups, 12]
        devices: Columns ``DEVICE_FACTS`` of each lowered device; the last is left empty.
        resources: Seconds in which each link moves bytes.  # [num_resources]
    """

    groups: FloatArray
    devices: FloatArray
    resources: FloatArray


def place_facts(
    tape: Tape,
    prices: Prices,
    timings: Timings,
    tables: GraphTables,
    stream_of: IntArray,
    num_resources: int,
) -> PlaceFacts:
    """The facts of the last simulation; call it before another program is lowered.

    Args:
        tape: The program.
        prices: Its prices.
        timings: Its times.
        tables: Tables of the graph under the strategy's rules.
        stream_of: The lowered device that stands for each device of the cluster, -1 for none.
        num_resources: Number of link resources of the cluster.
    """
    tasks, num_devices = int(tape.counts[NUM_TASKS]), len(prices.type_of_device)
    order = np.argsort(timings.start[:tasks], kind="stable").astype(np.int32)
    before = np.empty(tasks, np.int32)  # the task before each on its stream or links
    # The last task so far of each device, link and queue.
    sizes = num_devices, num_resources, len(prices.channels.queue)
    on_device, on_resource, on_queue = (np.full(size, -1, np.int32) for size in sizes)
    found = PlaceFacts(
        groups=np.zeros((tables.num_groups + 1, len(GROUP_FACTS))),
        devices=np.zeros((num_devices, len(DEVICE_FACTS))),
        resources=np.zeros(num_resources),
    )
    buckets = np.zeros((len(tape.bucket) + 1, 4))
    _facts_kernel(
        tape, prices, timings, tables.op_group, tables.value_op, tables.slot_value,
        tables.slot_group, tables.parameter_group, _ABOUT, stream_of, order, before,
        on_device, on_resource, on_queue, found.groups, found.devices, found.resources, buckets,
    )  # fmt: skip
    whole = max(float(timings.finish[:tasks].max(initial=0.0)), 1e-30)
    _spread(tape.bucket, tables, buckets, found.groups)
    return PlaceFacts(
        groups=found.groups[:-1] / whole,
        devices=found.devices / whole,
        resources=found.resources / whole,
    )


def _spread(
    bucket: IntArray, tables: GraphTables, buckets: FloatArray, groups: FloatArray
) -> None:
    """Divide the seconds of buckets among the groups of their parameters, by bytes."""
    inside = np.flatnonzero(bucket >= 0)
    of, size = bucket[inside], tables.gradient_bytes[inside]
    total = np.bincount(of, size, len(buckets))
    part = size / np.maximum(total[of], 1e-30)
    group = tables.parameter_group[inside]
    columns = ((_GRADIENTS, 0), (_PATH_GRADIENTS, 1), (_PATH_COPIES, 2), (_PATH_WAIT, 3))
    for column, own in columns:
        groups[:, column] += np.bincount(group, buckets[of, own] * part, len(groups))


@helper
def _link_before(
    timings: Timings, channels: ChannelPrices, task: int, channel: int, on_resource: IntArray,
    on_queue: IntArray,
) -> int:  # fmt: skip
    """The last communication before a task that held a link or the communicator of the task."""
    found = -1
    if channels.is_collective[channel]:
        found = on_queue[channels.queue[channel]]
        on_queue[channels.queue[channel]] = task
    for entry in range(channels.resource_start[channel], channels.resource_start[channel + 1]):
        resource = channels.resource[entry]
        other = on_resource[resource]
        if other >= 0 and (found < 0 or timings.finish[other] > timings.finish[found]):
            found = other
        on_resource[resource] = task
    return int(found)


@helper
def _last_maker(tape: Tape, timings: Timings, task: int) -> int:
    """The maker of a task's inputs that ends last, -1 if it reads none."""
    found = -1
    for read in range(tape.tasks[task].read_start, tape.tasks[task + 1].read_start):
        maker = tape.buffers[tape.reads[read]].maker
        if found < 0 or timings.finish[maker] > timings.finish[found]:
            found = maker
    return int(found)


@kernel
def _facts_kernel(
    tape: Tape, prices: Prices, timings: Timings, op_group: IntArray, value_op: IntArray,
    slot_value: IntArray, slot_group: IntArray, parameter_group: IntArray, about: IntArray,
    stream_of: IntArray,
    order: IntArray, before: IntArray, on_device: IntArray, on_resource: IntArray,
    on_queue: IntArray, groups: FloatArray, devices: FloatArray, resources: FloatArray,
    buckets: FloatArray,
) -> None:  # fmt: skip
    channels, num_tasks = prices.channels, tape.counts[NUM_TASKS]
    last, end = -1, -1.0
    for place in range(num_tasks):
        task = order[place]
        record = tape.tasks[task]
        seconds = timings.finish[task] - timings.start[task]
        if timings.finish[task] > end:
            last, end = task, timings.finish[task]
        kind, subject = record.kind, record.subject
        what = about[kind]
        if kind < FIRST_LINK_KIND:
            before[task] = on_device[record.device]
            on_device[record.device] = task
            devices[record.device, 0] += seconds
            if what == _OP:
                groups[op_group[subject], _COMPUTE] += seconds
            continue
        channel = record.channel
        before[task] = _link_before(timings, channels, task, channel, on_resource, on_queue)
        for entry in range(channels.resource_start[channel], channels.resource_start[channel + 1]):
            held = record.num_bytes * channels.resource_s_per_byte[entry]
            resources[channels.resource[entry]] += held
        if what == _BUCKET:
            buckets[subject, _BUCKET_LINK] += seconds
        elif what == _PARAMETER:
            groups[parameter_group[subject], _GRADIENTS] += seconds
        elif what == _VALUE:
            groups[op_group[value_op[slot_value[subject]]], _MADE] += seconds
            groups[slot_group[subject], _READ] += seconds
        elif what == _WHOLE_VALUE:
            groups[op_group[value_op[subject]], _MADE] += seconds
    _follow_path(
        tape, prices, timings, op_group, value_op, slot_value, slot_group, parameter_group,
        about, stream_of, before, last, groups, devices, buckets,
    )  # fmt: skip


@helper
def _follow_path(
    tape: Tape, prices: Prices, timings: Timings, op_group: IntArray, value_op: IntArray,
    slot_value: IntArray, slot_group: IntArray, parameter_group: IntArray, about: IntArray,
    stream_of: IntArray,
    before: IntArray, task: int, groups: FloatArray, devices: FloatArray, buckets: FloatArray,
) -> None:  # fmt: skip
    """Follow the critical path back from its last task, and count its seconds by place."""
    channels, left = prices.channels, tape.counts[NUM_TASKS]
    until = timings.finish[task] if task >= 0 else 0.0
    tolerance = _SAME_INSTANT * until
    while task >= 0 and left > 0:
        left -= 1
        record = tape.tasks[task]
        start = timings.start[task]
        maker = _last_maker(tape, timings, task)
        previous = maker
        if maker < 0 or timings.finish[maker] < start - tolerance:
            other = before[task]
            if other >= 0 and (maker < 0 or timings.finish[other] >= timings.finish[maker]):
                previous = other
        reached = min(timings.finish[previous], start) if previous >= 0 else 0.0
        seconds, wait = until - start, start - reached
        kind, subject = record.kind, record.subject
        what, is_link = about[kind], kind >= FIRST_LINK_KIND
        if is_link:
            channel = record.channel
            for entry in range(channels.member_start[channel], channels.member_start[channel + 1]):
                stream = stream_of[channels.member[entry]]
                if stream >= 0:
                    devices[stream, 2] += seconds
        else:
            devices[record.device, 1] += seconds
        if what == _OP:
            again = kind in (TaskKind.RECOMPUTE, TaskKind.REMAKE)
            groups[op_group[subject], _PATH_AGAIN if again else _PATH_COMPUTE] += seconds
            groups[op_group[subject], _PATH_WAIT] += wait
        elif what == _BUCKET:
            buckets[subject, _BUCKET_PATH_LINK if is_link else _BUCKET_PATH_COPY] += seconds
            buckets[subject, _BUCKET_PATH_WAIT] += wait
        elif what == _PARAMETER:
            column = _PATH_GRADIENTS if is_link else _PATH_COPIES
            if kind == TaskKind.UPDATE:
                column = _PATH_UPDATE
            groups[parameter_group[subject], column] += seconds
            groups[parameter_group[subject], _PATH_WAIT] += wait
        elif what == _VALUE:
            made, read = op_group[value_op[slot_value[subject]]], slot_group[subject]
            if is_link:
                groups[made, _PATH_MADE] += seconds
                groups[read, _PATH_READ] += seconds
            else:
                groups[made, _PATH_COPIES] += seconds
            groups[made, _PATH_WAIT] += wait
        elif what == _WHOLE_VALUE:
            groups[op_group[value_op[subject]], _PATH_MADE] += seconds
        task, until = previous, reached
