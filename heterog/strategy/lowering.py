"""Lowering: the only place that knows what a strategy means.

``lower(graph, cluster, strategy)`` makes every split, copy, gather, reduction, parameter push and
pull an explicit task. It makes no choice and knows no seconds. A kernel over flat arrays does the
work; planners call it through the evaluator on buffers that are allocated once.

What the kernel does, in program order, for each micro-batch:

1. For every op of a group with shares, one compute task on each device with samples (or units of
   the axis that its rule names). Before the first backward op of a group that recomputes, its
   forward ops once more (``recomputation``).
2. Where an op reads a value that lies elsewhere (another group with other shares) or in parts, the
   conversion first: S to S moves the overlapping sample ranges, S to R gathers, P to R reduces,
   R to R copies. Samples are numbered, and a group's devices own consecutive ranges of them in
   device order, so neighbouring groups with similar shares move little.
3. After the op that completes a gradient (in the last micro-batch): synchronisation and update,
   tensor by tensor or when its bucket is full. Every replica holds a full-size gradient, whatever
   its share; ZeRO is in ``zero_lowering``.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import EVERYWHERE
from heterog.graph.op_graph import OpGraph
from heterog.graph.op_rule import OpRules
from heterog.strategy.channels import Channel, ChannelTable, slice_parts
from heterog.strategy.kernels import helper, kernel
from heterog.strategy.program import FloatArray, IntArray, Program, TaskKind
from heterog.strategy.strategy import SLICED, Strategy, Sync, split_in_proportion
from heterog.strategy.tables import GraphTables, graph_tables
from heterog.strategy.tape import (
    NUM_BUFFERS,
    NUM_READS,
    NUM_TASKS,
    OVERFLOW,
    Tape,
    make_tape,
)
from heterog.strategy.tape import write_buffer as _make
from heterog.strategy.tape import write_read as _read
from heterog.strategy.tape import write_task as _task
from heterog.strategy.zero_lowering import (
    begin_sliced_step,
    finish_gradient,
    gather_parameters,
    is_sliced,
    note_reader,
    number_sliced_buckets,
)

# Plain integers, because numba freezes enum members into slow objects.
_COMPUTE = int(TaskKind.COMPUTE)
_RECOMPUTE = int(TaskKind.RECOMPUTE)
_ACCUMULATE = int(TaskKind.ACCUMULATE)
_FLATTEN = int(TaskKind.FLATTEN)
_SPLIT = int(TaskKind.SPLIT)
_CONCAT = int(TaskKind.CONCAT)
_SUM = int(TaskKind.SUM)
_UPDATE = int(TaskKind.UPDATE)
_SEND = int(TaskKind.SEND)
_PUSH = int(TaskKind.PUSH)
_PULL = int(TaskKind.PULL)
_REDUCE_VALUE = int(TaskKind.REDUCE_VALUE)
_GATHER_VALUE = int(TaskKind.GATHER_VALUE)
_ALL_REDUCE = int(TaskKind.ALL_REDUCE)
_REDUCE_SCATTER = int(TaskKind.REDUCE_SCATTER)
_ALL_GATHER = int(TaskKind.ALL_GATHER)
_R, _S, _P = 0, 1, 2
_ZERO1 = int(Sync.ZERO1)
_ZERO2 = int(Sync.ZERO2)
_ZERO3 = int(Sync.ZERO3)


class Choice(NamedTuple):
    """A strategy in flat arrays.

    A *layout* is a device set with shares; groups share layouts. Layout ``l`` along axis ``a`` of
    the tables is row ``a * num_layouts + l`` of the arrays over layouts.
    """

    num_micro: int
    num_steps: int
    bucket_bytes: float
    layout: IntArray  # of each group, the last entry for constants  # [num_groups + 1]
    shares: IntArray  # [num_axes * num_layouts, num_micro, num_devices]
    member: npt.NDArray[np.bool_]  # devices that hold a layout's parameters  # [rows, num_devices]
    sync: IntArray  # of each group
    recompute: npt.NDArray[np.bool_]  # whether each group lets go what it made in the forward pass
    first_channel: IntArray  # all-reduce or reduce-scatter of each group, -1 if none
    second_channel: IntArray  # all-gather of each group, -1 if none
    reduce_channel: IntArray  # utility all-reduce of each layout
    gather_channel: IntArray  # utility all-gather of each layout
    home: IntArray  # of each parameter
    slice_part: FloatArray  # under ZeRO, that each device owns  # [num_groups, num_devices]
    rule_set: int = 0  # number of its op rules at the evaluator that encoded it


class Scratch(NamedTuple):
    """Working memory of the kernel."""

    value_buffer: IntArray  # local buffer of each value  # [num_values, num_devices]
    slot_buffer: IntArray  # converted value of each slot  # [num_slots, num_devices]
    slot_done: IntArray
    gradient_buffer: IntArray  # [num_parameters, num_devices]
    gradient_token: IntArray
    last_read: IntArray  # made by the op that reads each parameter last  # [num_parameters, ...]
    ready_buffer: IntArray  # token: the parameter of this step has arrived
    next_ready_buffer: IntArray  # token: the parameter of the next step has arrived
    next_in_bucket: IntArray
    open_first: IntArray  # first parameter of the open bucket of each group's channel
    open_last: IntArray
    open_bytes: FloatArray
    bucket_key: IntArray  # of each group: groups with the same layout and channel share it
    flat_buffer: IntArray  # [num_devices]
    # Under ZeRO, by the first parameter of a bucket; see ``zero_lowering``.
    bucket_bytes: FloatArray
    bucket_count: IntArray  # its parameters
    unfinished: IntArray  # those whose gradients are not there yet
    gathered: IntArray  # micro-batch and phase for which it was gathered last
    slice_buffer: IntArray  # summed slices of gradients  # [num_parameters, num_devices]
    slice_token: IntArray  # the last reduce-scatter is done
    # Of the last reduce-scatter and the one before: what it received, what it was given, its end.
    received_buffer: IntArray  # [2, num_devices]
    scattered_buffer: IntArray  # [2, num_devices]
    scattered_token: IntArray  # [2, num_devices]
    anchor: IntArray  # made by the first readers of the last two gathers  # [2, num_devices]


def make_scratch(tables: GraphTables, num_devices: int) -> Scratch:
    """Working memory for one graph and cluster."""
    num_parameters = len(tables.parameter_bytes)

    def per_device(rows: int) -> IntArray:
        return np.empty((rows, num_devices), np.int32)

    return Scratch(
        value_buffer=per_device(len(tables.value_op)),
        slot_buffer=per_device(len(tables.slot_value)),
        slot_done=np.empty(len(tables.slot_value), np.int32),
        gradient_buffer=per_device(num_parameters),
        gradient_token=per_device(num_parameters),
        last_read=per_device(num_parameters),
        ready_buffer=per_device(num_parameters),
        next_ready_buffer=per_device(num_parameters),
        next_in_bucket=np.empty(num_parameters, np.int32),
        open_first=np.empty(tables.num_groups, np.int32),
        open_last=np.empty(tables.num_groups, np.int32),
        open_bytes=np.empty(tables.num_groups, np.float64),
        bucket_key=np.empty(tables.num_groups, np.int32),
        flat_buffer=np.empty(num_devices, np.int32),
        bucket_bytes=np.empty(num_parameters, np.float64),
        bucket_count=np.empty(num_parameters, np.int32),
        unfinished=np.empty(num_parameters, np.int32),
        gathered=np.empty(num_parameters, np.int32),
        slice_buffer=per_device(num_parameters),
        slice_token=np.empty(num_parameters, np.int32),
        received_buffer=per_device(2),
        scattered_buffer=per_device(2),
        scattered_token=per_device(2),
        anchor=per_device(2),
    )


def lower(
    graph: OpGraph, cluster: Cluster, strategy: Strategy, *, num_steps: int | None = None
) -> Program:
    """The program of a strategy.

    Args:
        graph: one training step.
        cluster: the devices and links.
        strategy: made for this graph and cluster.
        num_steps: training steps to unroll; by default 1 with a step barrier and 8 without.

    Raises:
        StrategyError: the strategy is illegal or was made for something else.
    """
    strategy.check(graph, cluster)
    return _lower(graph, cluster, strategy, num_steps or (1 if strategy.step_barrier else 8))


def lower_resized(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Program:
    """The program of one step on another batch than the strategy was made for.

    Samples are shared out in proportion to the strategy's shares. Whatever does not depend on the
    batch stays: slices of parameters, homes, buckets. So does what decides about them: decisions
    that only come to the same shares on this batch stay apart.

    Args:
        graph: the step on the other batch, ``grouped_like`` the one of the strategy.
        cluster: the devices and links.
        strategy: from ``Strategy.resized``.

    Raises:
        StrategyError: rules of the strategy do not apply to this batch.
    """
    return _lower(graph, cluster, strategy, 1)


def _lower(graph: OpGraph, cluster: Cluster, strategy: Strategy, steps: int) -> Program:
    tables = graph_tables(graph, strategy.op_rules)
    channels = ChannelTable(cluster)
    choice = encode(strategy, tables, channels, num_steps=steps)
    scratch = make_scratch(tables, cluster.num_devices)
    tape = make_tape(4096, len(tables.parameter_bytes))
    tape = lower_to_tape(tables, choice, scratch, tape)
    return program_from_tape(
        tape,
        tables,
        choice,
        tuple(channels.channels),
        cluster.num_devices,
        op_rules=strategy.op_rules,
    )


def lower_to_tape(tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape) -> Tape:
    """Run the kernel, on a larger tape if the given one is too short; returns the one used."""
    while not lower_kernel(tables, choice, scratch, tape):
        tape = make_tape(2 * len(tape.tasks), len(tape.bucket))
    return tape


def encode(
    strategy: Strategy, tables: GraphTables, channels: ChannelTable, *, num_steps: int
) -> Choice:
    """A strategy as the kernel's flat arrays."""
    num_devices = channels.cluster.num_devices
    layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    layout = np.empty(tables.num_groups + 1, np.int32)
    for group, decision in enumerate(strategy.decisions):
        key = (decision.devices, decision.shares)
        layout[group] = layouts.setdefault(key, len(layouts))
    num_layouts = len(layouts) + 1
    layout[-1] = num_layouts - 1
    num_micro = strategy.num_micro_batches
    shares = np.zeros((num_layouts, num_micro, num_devices), np.int32)
    planned = np.zeros((num_layouts, 1, num_devices), np.int32)
    member = np.zeros((num_layouts, num_devices), np.bool_)
    reduce_channel = np.full(num_layouts, -1, np.int32)
    gather_channel = np.full(num_layouts, -1, np.int32)
    for (devices, counts), number in layouts.items():
        member[number, list(devices)] = True
        samples = batch_shares(counts, tables.batch_size)
        shares[number][:, list(devices)] = micro_shares(
            samples, devices, strategy.micro_batches, num_micro
        )
        planned[number, 0, list(devices)] = counts
        if len(devices) > 1:
            reduce_channel[number] = channels.value_reduce(devices)
            gather_channel[number] = channels.all_gather(devices, ())
    # Constants are computed on every device that computes anything.
    active = shares[:-1].sum(axis=0) > 0
    if len(tables.axis_units) > 1:  # a device without samples may own units of another axis
        active |= planned[:-1].sum(axis=0) > 0
        planned[-1] = active
    shares[-1] = active
    member[-1] = active.any(axis=0)
    num_axes = len(tables.axis_units)
    if num_axes > 1:
        rows = [_axis_rows(planned, int(units)) for units in tables.axis_units[1:]]
        shares = np.concatenate([shares, *rows])
        member = np.tile(member, (num_axes, 1))
        reduce_channel = np.tile(reduce_channel, num_axes)
        gather_channel = np.tile(gather_channel, num_axes)
    pairs = [channels.for_decision(decision) for decision in strategy.decisions]
    slice_part = np.zeros((tables.num_groups, num_devices))
    for group, decision in enumerate(strategy.decisions):
        if decision.sync in SLICED:
            slice_part[group, list(decision.devices)] = slice_parts(decision)
    return Choice(
        num_micro=num_micro,
        num_steps=num_steps,
        bucket_bytes=float(strategy.bucket_bytes),
        layout=layout,
        shares=shares,
        member=member,
        sync=np.array([int(decision.sync) for decision in strategy.decisions], np.int32),
        recompute=np.array([decision.recompute for decision in strategy.decisions], np.bool_),
        first_channel=np.array([first for first, _ in pairs], np.int32),
        second_channel=np.array([second for _, second in pairs], np.int32),
        reduce_channel=reduce_channel,
        gather_channel=gather_channel,
        home=np.array(strategy.homes, np.int32),
        slice_part=slice_part,
    )


def batch_shares(shares: tuple[int, ...], batch_size: int) -> tuple[int, ...]:
    """Samples of each device of a decision, in proportion to its shares on another batch.

    >>> batch_shares((5, 2, 1), 8), batch_shares((5, 2, 1), 4)
    ((5, 2, 1), (3, 1, 0))
    """
    return shares if sum(shares) == batch_size else split_in_proportion(batch_size, shares)


def axis_shares(units: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Units of an axis for each device of a decision, in proportion to its shares.

    >>> axis_shares(16, (5, 2, 1)), axis_shares(EVERYWHERE, (5, 0, 3))
    ((10, 4, 2), (1, 0, 1))
    """
    if units == EVERYWHERE:
        return tuple(int(share > 0) for share in shares)
    return split_in_proportion(units, shares)


def _axis_rows(shares: IntArray, units: int) -> IntArray:
    """Shares of every layout along another axis than the batch."""
    assert shares.shape[1] == 1, "strategies with op rules have no micro-batches"
    return np.array([[axis_shares(units, tuple(map(int, row[0])))] for row in shares], np.int32)


def micro_shares(
    shares: tuple[int, ...],
    devices: tuple[int, ...],
    micro_batches: tuple[tuple[int, ...], ...],
    num_micro: int,
) -> IntArray:
    """Samples of each micro-batch on each of a group's devices.

    The columns are the strategy's own micro-batches where they add up to the group's shares.
    Otherwise each micro-batch, whose size is given, is cut in the proportions of what is left of
    the group's shares, so that every row and column adds up.

    Returns:
        # [num_micro, num_devices of the group]
    """
    if not micro_batches:
        return np.array([shares], np.int32)
    own = np.array([micro_batches[device] for device in devices], np.int32).T
    if tuple(own.sum(axis=0)) == shares:
        return own
    sizes = [sum(counts) for counts in zip(*micro_batches, strict=True)]
    left = list(shares)
    rows: list[tuple[int, ...]] = []
    for size in sizes:
        row = split_in_proportion(size, tuple(float(count) for count in left))
        row = _within(row, left)
        left = [count - taken for count, taken in zip(left, row, strict=True)]
        rows.append(row)
    return np.array(rows, np.int32)


def _within(row: tuple[int, ...], left: list[int]) -> tuple[int, ...]:
    """Move what exceeds a device's remaining samples to devices that still have some."""
    counts = [min(count, limit) for count, limit in zip(row, left, strict=True)]
    missing = sum(row) - sum(counts)
    for index, limit in enumerate(left):
        extra = min(missing, limit - counts[index])
        counts[index] += extra
        missing -= extra
    return tuple(counts)


def program_from_tape(
    tape: Tape,
    tables: GraphTables,
    choice: Choice,
    channels: tuple[Channel, ...],
    num_devices: int,
    *,
    op_rules: OpRules = (),
) -> Program:
    """Copy what was written to a tape into a program."""
    num_tasks, num_buffers, num_reads, _ = (int(count) for count in tape.counts)
    tasks = tape.tasks[:num_tasks]
    buffers = tape.buffers[:num_buffers]
    return Program(
        num_devices=num_devices,
        num_steps=choice.num_steps,
        kind=tasks["kind"].astype(np.uint8),
        subject=tasks["subject"].copy(),
        device=tasks["device"].copy(),
        micro=tasks["micro"].copy(),
        samples=tasks["samples"].copy(),
        channel=tasks["channel"].copy(),
        num_bytes=tasks["num_bytes"].copy(),
        read_start=tape.tasks["read_start"][: num_tasks + 1].copy(),
        read_buffer=tape.reads[:num_reads].copy(),
        buffer_start=tape.tasks["buffer_start"][: num_tasks + 1].copy(),
        buffer_device=buffers["device"].copy(),
        buffer_bytes=buffers["num_bytes"].copy(),
        bucket=tape.bucket.copy(),
        resident_bytes=resident_bytes(tables, choice),
        channels=channels,
        op_rules=op_rules,
    )


def resident_bytes(tables: GraphTables, choice: Choice) -> FloatArray:
    """Bytes on each device for the whole step: parameters, optimizer state, buffers, batch.

    And the largest workspace of a kernel there: a device runs one op at a time, and one of them
    nearly always runs when memory is fullest.
    """
    resident: FloatArray = np.zeros(choice.member.shape[1])
    workspace = np.zeros_like(resident)
    _resident_kernel(tables, choice, resident, workspace)
    return resident + workspace


@kernel
def _resident_kernel(
    tables: GraphTables, choice: Choice, resident: FloatArray, workspace: FloatArray
) -> None:
    num_devices = choice.member.shape[1]
    num_layouts = len(choice.shares) // len(tables.axis_units)
    for parameter in range(len(tables.parameter_bytes)):
        group = tables.parameter_group[parameter]
        layout = choice.layout[group]
        size = tables.parameter_bytes[parameter]
        axis = tables.parameter_axis[parameter]
        if axis >= 0:
            per_unit = size / tables.parameter_units[parameter]
            for device in range(num_devices):
                share = choice.shares[axis * num_layouts + layout, 0, device]
                resident[device] += share * per_unit * (1.0 + tables.state_ratio)
                part = share / tables.parameter_units[parameter]
                needed = part * tables.parameter_workspace[parameter]
                workspace[device] = max(workspace[device], needed)
            continue
        for device in range(num_devices):
            if choice.member[layout, device]:
                needed = tables.parameter_workspace[parameter]
                workspace[device] = max(workspace[device], needed)
        home = choice.home[parameter]
        served = home >= 0
        if choice.sync[group] >= _ZERO1 and is_sliced(tables, choice, parameter):
            for device in range(num_devices):
                if choice.member[layout, device]:
                    part = choice.slice_part[group, device]
                    kept = part if choice.sync[group] == _ZERO3 else 1.0
                    resident[device] += size * (kept + part * tables.state_ratio)
            continue
        for device in range(num_devices):
            if choice.member[layout, device]:
                resident[device] += size * (1.0 if served else 1.0 + tables.state_ratio)
        if served:
            # The server keeps the state, and a copy of its own if it holds no replica.
            resident[home] += size * tables.state_ratio
            if not choice.member[layout, home]:
                resident[home] += size
    active = choice.layout[tables.num_groups]
    for device in range(num_devices):
        if choice.member[active, device]:
            most = 0
            for layout in range(active):
                samples = 0
                for micro in range(choice.num_micro):
                    samples += choice.shares[layout, micro, device]
                most = max(most, samples)
            resident[device] += tables.common_bytes + most * tables.input_bytes_per_sample


@kernel
def lower_kernel(tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape) -> bool:
    """Write the program of a choice to a tape; ``False`` if the tape is too short."""
    num_devices = choice.member.shape[1]
    num_ops = len(tables.op_id)
    num_layouts = len(choice.shares) // len(tables.axis_units)
    tape.counts[:] = 0
    tape.bucket[:] = -1
    scratch.next_ready_buffer[:] = -1
    _number_buckets(tables, choice, scratch)
    has_slices, has_gathers = False, False
    for group in range(tables.num_groups):
        if choice.sync[group] >= _ZERO1:
            has_slices = True
            has_gathers |= choice.sync[group] == _ZERO3
    if has_slices:
        number_sliced_buckets(tables, choice, scratch, tape)
    for _step in range(choice.num_steps):
        for parameter in range(len(scratch.ready_buffer)):
            for device in range(num_devices):
                arrived = scratch.next_ready_buffer[parameter, device]
                scratch.ready_buffer[parameter, device] = arrived
        scratch.gradient_buffer[:] = -1
        scratch.gradient_token[:] = -1
        scratch.last_read[:] = -1
        scratch.open_first[:] = -1
        if has_slices:
            begin_sliced_step(scratch)
        for micro in range(choice.num_micro):
            scratch.value_buffer[:] = -1
            scratch.slot_done[:] = 0
            last = micro == choice.num_micro - 1
            for op in range(num_ops):
                group = tables.op_group[op]
                # The constant group is -1: the last entry.
                layout = choice.layout[group] + num_layouts * tables.op_axis[op]
                for read in range(tables.read_start[op], tables.read_start[op + 1]):
                    slot = tables.read_slot[read]
                    if slot < 0 or scratch.slot_done[slot] == 1:
                        continue
                    value = tables.slot_value[slot]
                    maker = tables.value_op[value]
                    source = (
                        choice.layout[tables.op_group[maker]] + num_layouts * tables.op_axis[maker]
                    )
                    if source == layout and tables.slot_whole[slot] == 0:
                        scratch.slot_done[slot] = 1
                        for device in range(num_devices):
                            there = scratch.value_buffer[value, device]
                            scratch.slot_buffer[slot, device] = there
                    else:
                        _convert(tables, choice, scratch, tape, slot, micro)
                gathers = False
                if has_gathers:
                    gathers = gather_parameters(
                        tables, choice, scratch, tape, op, layout, micro, tables.op_is_backward[op]
                    )
                if tables.op_recomputes[op] == 1 and choice.recompute[group]:
                    _recompute(tables, choice, scratch, tape, op, micro)
                # One compute task on each device that has samples. Nearly all tasks are made here,
                # so this is written out, with the counts in registers.
                first_read, last_read = tables.read_start[op], tables.read_start[op + 1]
                first_ready = tables.parameter_read_start[op]
                last_ready = tables.parameter_read_start[op + 1]
                first_value, last_value = tables.value_start[op], tables.value_start[op + 1]
                number = tape.counts[NUM_TASKS]
                made = tape.counts[NUM_BUFFERS]
                read = tape.counts[NUM_READS]
                if (
                    number + num_devices >= len(tape.tasks) - 2
                    or made + num_devices * (last_value - first_value) >= len(tape.buffers) - 256
                    or read + num_devices * (last_read - first_read + last_ready - first_ready)
                    >= len(tape.reads)
                ):
                    return False
                for device in range(num_devices):
                    samples = choice.shares[layout, micro, device]
                    if samples == 0:
                        continue
                    task = tape.tasks[number]
                    task.kind = _COMPUTE
                    task.subject = op
                    task.device = device
                    task.micro = micro
                    task.samples = samples
                    task.channel = -1
                    task.num_bytes = 0.0
                    task.read_start = read
                    task.buffer_start = made
                    for entry in range(first_read, last_read):
                        slot = tables.read_slot[entry]
                        if slot >= 0:
                            needed = scratch.slot_buffer[slot, device]
                        else:
                            needed = scratch.value_buffer[tables.read_value[entry], device]
                        if needed >= 0:
                            tape.reads[read] = needed
                            read += 1
                    for entry in range(first_ready, last_ready):
                        needed = scratch.ready_buffer[tables.parameter_read[entry], device]
                        if needed >= 0:
                            tape.reads[read] = needed
                            read += 1
                    for value in range(first_value, last_value):
                        buffer = tape.buffers[made]
                        buffer.maker = number
                        buffer.device = device
                        buffer.num_bytes = (
                            tables.value_bytes[value]
                            + tables.value_bytes_per_unit[value] * samples
                        )
                        scratch.value_buffer[value, device] = made
                        made += 1
                    number += 1
                tape.counts[NUM_TASKS] = number
                tape.counts[NUM_BUFFERS] = made
                tape.counts[NUM_READS] = read
                if gathers and first_value < last_value:
                    note_reader(choice, scratch, first_value, layout, micro)
                for entry in range(tables.finished_start[op], tables.finished_start[op + 1]):
                    parameter = tables.finished_parameter[entry]
                    last_value = tables.parameter_last_value[parameter]
                    if last_value >= 0:
                        for device in range(num_devices):
                            if scratch.value_buffer[last_value, device] >= 0:
                                made = scratch.value_buffer[last_value, device]
                                scratch.last_read[parameter, device] = made
                    # Where no gradient is made, nothing else waits for the parameter's readers.
                    value = tables.parameter_gradient[parameter]
                    for reader in range(
                        tables.reader_start[parameter], tables.reader_start[parameter + 1]
                    ):
                        for device in range(num_devices):
                            made = scratch.value_buffer[tables.reader_value[reader], device]
                            if made >= 0 and scratch.value_buffer[value, device] < 0:
                                scratch.last_read[parameter, device] = made
                    slot = tables.gradient_slot[parameter]
                    if slot >= 0:
                        # Made in parts of a parameter that is whole (never in micro-batches).
                        if scratch.slot_done[slot] == 0:
                            _convert(tables, choice, scratch, tape, slot, micro)
                        for device in range(num_devices):
                            there = scratch.slot_buffer[slot, device]
                            scratch.gradient_buffer[parameter, device] = there
                        _synchronise(tables, choice, scratch, tape, parameter)
                        continue
                    if tables.gradient_is_partial[parameter] == 0 and (
                        tables.parameter_axis[parameter] < 0
                    ):
                        _share_whole_gradient(tables, choice, scratch, tape, parameter, micro)
                    elif has_slices and choice.sync[tables.parameter_group[parameter]] >= _ZERO2:
                        if is_sliced(tables, choice, parameter):
                            finish_gradient(tables, choice, scratch, tape, parameter, micro)
                            continue
                    if micro == 0:
                        value = tables.parameter_gradient[parameter]
                        for device in range(num_devices):
                            fresh = scratch.value_buffer[value, device]
                            scratch.gradient_buffer[parameter, device] = fresh
                    else:
                        _accumulate(tables, choice, scratch, tape, parameter, micro)
                    if last:
                        _synchronise(tables, choice, scratch, tape, parameter)
                if tape.counts[OVERFLOW] != 0:
                    return False
        for key in range(tables.num_groups):
            if scratch.open_first[key] >= 0:
                _close_bucket(tables, choice, scratch, tape, key)
    end = tape.tasks[tape.counts[NUM_TASKS]]
    end.read_start = tape.counts[NUM_READS]
    end.buffer_start = tape.counts[NUM_BUFFERS]
    return bool(tape.counts[OVERFLOW] == 0)


@helper
def _recompute(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, reader: int, micro: int
) -> None:
    """Run a group's forward ops once more before its first backward op, the ``reader``.

    They read what they read the first time, but for what has itself been made again. The first one
    waits for the gradients that the reader waits for: a device that is ahead of others would
    otherwise hold what it makes again for as long as if it had kept it.
    """
    group = tables.op_group[reader]
    num_layouts = len(choice.shares) // len(tables.axis_units)
    num_devices = choice.member.shape[1]
    first, last = tables.recompute_start[group], tables.recompute_start[group + 1]
    for position in range(first, last):
        op = tables.recompute_op[position]
        layout = choice.layout[group] + num_layouts * tables.op_axis[op]
        gathers = False
        if choice.sync[group] == _ZERO3:
            gathers = gather_parameters(tables, choice, scratch, tape, op, layout, micro, 1)
        for device in range(num_devices):
            samples = choice.shares[layout, micro, device]
            if samples == 0:
                continue
            _task(tape, _RECOMPUTE, op, device, micro, samples, -1, 0.0)
            for entry in range(tables.read_start[op], tables.read_start[op + 1]):
                _read(tape, _needed(tables, scratch, entry, device))
            for entry in range(
                tables.parameter_read_start[op], tables.parameter_read_start[op + 1]
            ):
                _read(tape, scratch.ready_buffer[tables.parameter_read[entry], device])
            if position == first:
                for entry in range(tables.read_start[reader], tables.read_start[reader + 1]):
                    if tables.op_is_backward[tables.value_op[tables.read_value[entry]]] == 1:
                        _read(tape, _needed(tables, scratch, entry, device))
            for value in range(tables.value_start[op], tables.value_start[op + 1]):
                size = tables.value_bytes[value] + tables.value_bytes_per_unit[value] * samples
                scratch.value_buffer[value, device] = _make(tape, device, size)
        if gathers and tables.value_start[op] < tables.value_start[op + 1]:
            note_reader(choice, scratch, tables.value_start[op], layout, micro)


@helper
def _needed(tables: GraphTables, scratch: Scratch, entry: int, device: int) -> int:
    """Buffer of what an op reads, -1 if there is none."""
    slot = tables.read_slot[entry]
    if slot >= 0:
        return int(scratch.slot_buffer[slot, device])
    return int(scratch.value_buffer[tables.read_value[entry], device])


@helper
def _number_buckets(tables: GraphTables, choice: Choice, scratch: Scratch) -> None:
    """Groups whose gradients may share a bucket get the same key: the first such group."""
    for group in range(tables.num_groups):
        scratch.bucket_key[group] = group
        for other in range(group):
            if (
                choice.layout[group] == choice.layout[other]
                and choice.first_channel[group] == choice.first_channel[other]
                and choice.second_channel[group] == choice.second_channel[other]
                and choice.sync[group] == choice.sync[other]
                and choice.sync[group] != _ZERO3  # gathers a bucket for the ops of one group
            ):
                scratch.bucket_key[group] = other
                break


@helper
def _convert(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, micro: int
) -> None:
    """Make a value available the way a slot needs it."""
    value = tables.slot_value[slot]
    whole = tables.slot_whole[slot]
    kind = tables.value_kind[value]
    maker = tables.value_op[value]
    num_layouts = len(choice.shares) // len(tables.axis_units)
    first_row = num_layouts * tables.op_axis[maker]
    source = choice.layout[tables.op_group[maker]] + first_row
    reading = choice.layout[tables.slot_group[slot]]
    # Units move along their own axis; whatever else is read is wanted where the reader runs.
    target = reading + (first_row if kind == _S else num_layouts * tables.slot_axis[slot])
    scratch.slot_done[slot] = 1
    num_devices = choice.member.shape[1]
    same_devices = source == reading + first_row
    # Gathers and reductions leave the whole on every device of a layout.
    in_layout = kind == _S or (kind == _P and whole == 1 and same_devices)
    # Another slot of the same value may have brought it to the same layout already.
    for other in range(tables.value_slot_start[value], tables.value_slot_start[value + 1]):
        if (
            other != slot
            and scratch.slot_done[other] == 1
            and tables.slot_whole[other] == whole
            and choice.layout[tables.slot_group[other]] == reading
            and (in_layout or tables.slot_axis[other] == tables.slot_axis[slot])
        ):
            for device in range(num_devices):
                scratch.slot_buffer[slot, device] = scratch.slot_buffer[other, device]
            return
    for device in range(num_devices):
        scratch.slot_buffer[slot, device] = scratch.value_buffer[value, device]
    if kind == _S:
        if source != target:
            _move_samples(tables, choice, scratch, tape, slot, source, target, micro)
        if whole == 1:
            _gather(tables, choice, scratch, tape, slot, target, micro)
    elif kind == _P:
        if whole == 1 or not (same_devices and _covers(choice, source, target, micro)):
            _reduce(tables, choice, scratch, tape, slot, source, micro)
            if whole == 0 or not same_devices:
                _copy_whole(tables, choice, scratch, tape, slot, source, target, micro, whole == 0)
    elif source != target:
        _copy_whole(tables, choice, scratch, tape, slot, source, target, micro, False)


@helper
def _covers(choice: Choice, source: int, target: int, micro: int) -> bool:
    """Whether whoever made a part of a sum also runs its reader."""
    for device in range(choice.member.shape[1]):
        if choice.shares[source, micro, device] > 0 and choice.shares[target, micro, device] == 0:
            return False
    return True


@helper
def _move_samples(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int,
) -> None:  # fmt: skip
    """S to S: each device gets its range of samples from the devices whose ranges overlap it."""
    value = tables.slot_value[slot]
    num_devices = choice.member.shape[1]
    per_unit = tables.value_bytes_per_unit[value] * tables.value_moved_fraction[value]
    contiguous = tables.value_is_outermost[value] == 1
    begin = 0
    for device in range(num_devices):
        count = choice.shares[target, micro, device]
        if count == 0:
            continue
        end = begin + count
        # First the pieces that must travel, then one task that joins all of them.
        parts = 0
        low = 0
        first_piece = tape.counts[NUM_BUFFERS]
        local = -1
        for other in range(num_devices):
            owned = choice.shares[source, micro, other]
            high = low + owned
            overlap = min(end, high) - max(begin, low)
            low = high
            if overlap <= 0:
                continue
            parts += 1
            mine = scratch.value_buffer[value, other]
            size = overlap * per_unit
            if other == device:
                local = mine
                if overlap == owned and overlap == count:
                    break
                continue
            if overlap < owned and not contiguous:
                _task(tape, _SPLIT, slot, other, micro, overlap, -1, 2.0 * size)
                _read(tape, mine)
                mine = _make(tape, other, size)
            _task(tape, _SEND, slot, device, micro, overlap, other * num_devices + device, size)
            _read(tape, mine)
            scratch.slot_buffer[slot, device] = _make(tape, device, size)
        if parts > 1:
            pieces = tape.counts[NUM_BUFFERS]
            _task(tape, _CONCAT, slot, device, micro, count, -1, 2.0 * count * per_unit)
            _read(tape, local)
            for piece in range(first_piece, pieces):
                if tape.buffers[piece].device == device:
                    _read(tape, piece)
            scratch.slot_buffer[slot, device] = _make(tape, device, count * per_unit)
        begin = end


@helper
def _gather(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, layout: int,
    micro: int,
) -> None:  # fmt: skip
    """S to R inside a layout: a padded all-gather to every member."""
    channel = choice.gather_channel[layout]
    if channel < 0:
        return
    value = tables.slot_value[slot]
    num_devices = choice.member.shape[1]
    total = 0
    largest = 0
    members = 0
    for device in range(num_devices):
        count = choice.shares[layout, micro, device]
        total += count
        largest = max(largest, count)
        members += 1 if choice.member[layout, device] else 0
    per_unit = tables.value_bytes_per_unit[value]
    _task(tape, _GATHER_VALUE, slot, -1, micro, total, channel, members * largest * per_unit)
    for device in range(num_devices):
        if choice.shares[layout, micro, device] > 0:
            _read(tape, scratch.slot_buffer[slot, device])
    for device in range(num_devices):
        if choice.member[layout, device]:
            scratch.slot_buffer[slot, device] = _make(tape, device, total * per_unit)


@helper
def _reduce(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, layout: int,
    micro: int,
) -> None:  # fmt: skip
    """P to R inside a layout: an all-reduce over every member."""
    channel = choice.reduce_channel[layout]
    if channel < 0:
        return
    value = tables.slot_value[slot]
    size = tables.value_bytes[value]
    num_devices = choice.member.shape[1]
    _task(tape, _REDUCE_VALUE, slot, -1, micro, 0, channel, size)
    for device in range(num_devices):
        if choice.shares[layout, micro, device] > 0 and tables.value_is_early[value] == 0:
            _read(tape, scratch.value_buffer[value, device])
    for device in range(num_devices):
        if choice.member[layout, device]:
            scratch.slot_buffer[slot, device] = _make(tape, device, size)


@helper
def _copy_whole(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int, only_first: bool,
) -> None:  # fmt: skip
    """R to R: send a copy to every target device that has none.

    With ``only_first`` the value goes to the target's first device alone and counts as zero on the
    others: a whole value seen as a partial sum.
    """
    value = tables.slot_value[slot]
    size = (tables.value_bytes[value]) * tables.value_moved_fraction[value]
    num_devices = choice.member.shape[1]
    sender = -1
    for device in range(num_devices):
        if choice.shares[source, micro, device] > 0:
            sender = device
            break
    seen = False
    for device in range(num_devices):
        if choice.shares[target, micro, device] == 0:
            continue
        if only_first and seen:
            scratch.slot_buffer[slot, device] = -1
            continue
        seen = True
        if scratch.slot_buffer[slot, device] < 0:
            _task(tape, _SEND, slot, device, micro, 0, sender * num_devices + device, size)
            _read(tape, scratch.slot_buffer[slot, sender])
            scratch.slot_buffer[slot, device] = _make(tape, device, size)


@helper
def _share_whole_gradient(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int, micro: int
) -> None:
    """A replica without samples gets the gradient that all others have whole."""
    value = tables.parameter_gradient[parameter]
    layout = choice.layout[tables.parameter_group[parameter]]
    size = tables.parameter_bytes[parameter]
    num_devices = choice.member.shape[1]
    owner = -1
    for device in range(num_devices):
        if owner < 0 and scratch.value_buffer[value, device] >= 0:
            owner = device
    for device in range(num_devices):
        if choice.member[layout, device] and scratch.value_buffer[value, device] < 0:
            channel = owner * num_devices + device
            _task(tape, _PUSH, parameter, device, micro, 0, channel, size)
            _read(tape, scratch.value_buffer[value, owner])
            scratch.value_buffer[value, device] = _make(tape, device, size)


@helper
def _accumulate(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int, micro: int
) -> None:
    """Add a micro-batch's gradient to the one that is there, or keep it as the first."""
    value = tables.parameter_gradient[parameter]
    size = tables.parameter_bytes[parameter]
    for device in range(choice.member.shape[1]):
        fresh = scratch.value_buffer[value, device]
        if fresh < 0:
            continue
        if scratch.gradient_buffer[parameter, device] < 0:
            scratch.gradient_buffer[parameter, device] = fresh
            continue
        _task(tape, _ACCUMULATE, parameter, device, micro, 0, -1, 3.0 * size)
        _read(tape, fresh)
        _read(tape, scratch.gradient_buffer[parameter, device])
        _read(tape, scratch.gradient_token[parameter, device])
        scratch.gradient_token[parameter, device] = _make(tape, device, 0.0)


@helper
def _read_gradient(scratch: Scratch, tape: Tape, parameter: int, device: int) -> None:
    _read(tape, scratch.gradient_buffer[parameter, device])
    _read(tape, scratch.gradient_token[parameter, device])


@helper
def _synchronise(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int
) -> None:
    """Aggregate a finished gradient and update, or put it into its bucket."""
    group = tables.parameter_group[parameter]
    layout = choice.layout[group]
    num_devices = choice.member.shape[1]
    if tables.parameter_axis[parameter] >= 0:
        row = layout + tables.parameter_axis[parameter] * (
            len(choice.shares) // len(tables.axis_units)
        )
        for device in range(num_devices):
            share = choice.shares[row, 0, device]
            if share > 0:
                size = tables.parameter_bytes[parameter]
                part = share * size / tables.parameter_units[parameter]
                _task(tape, _UPDATE, parameter, device, 0, share, -1, part)
                _read_gradient(scratch, tape, parameter, device)
                _read(tape, scratch.last_read[parameter, device])
                scratch.next_ready_buffer[parameter, device] = _make(tape, device, 0.0)
        return
    if choice.home[parameter] >= 0:
        _serve(tables, choice, scratch, tape, parameter)
        return
    if choice.first_channel[group] < 0 or tables.gradient_is_partial[parameter] == 0:
        for device in range(num_devices):
            if choice.member[layout, device]:
                _task(tape, _UPDATE, parameter, device, 0, 0, -1, 0.0)
                _read_gradient(scratch, tape, parameter, device)
                _read(tape, scratch.last_read[parameter, device])
                scratch.next_ready_buffer[parameter, device] = _make(tape, device, 0.0)
        return
    if choice.sync[group] >= _ZERO1:
        finish_gradient(tables, choice, scratch, tape, parameter, choice.num_micro - 1)
        return
    key = scratch.bucket_key[group]
    size = tables.parameter_bytes[parameter]
    if scratch.open_first[key] < 0:
        scratch.open_first[key] = parameter
        scratch.open_bytes[key] = 0.0
    else:
        scratch.next_in_bucket[scratch.open_last[key]] = parameter
    scratch.open_last[key] = parameter
    scratch.next_in_bucket[parameter] = -1
    scratch.open_bytes[key] += size
    if scratch.open_bytes[key] >= choice.bucket_bytes:
        _close_bucket(tables, choice, scratch, tape, key)


@helper
def _close_bucket(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, key: int
) -> None:
    """All-reduce (or reduce-scatter and all-gather) a bucket, then update its parameters.

    The bucket is named by its first parameter. A bucket of one tensor is synchronised in place; a
    larger one is first copied together on each device.
    """
    first = scratch.open_first[key]
    size = scratch.open_bytes[key]
    scratch.open_first[key] = -1
    layout = choice.layout[key]
    num_devices = choice.member.shape[1]
    single = scratch.next_in_bucket[first] < 0
    parameter = first
    while parameter >= 0:
        tape.bucket[parameter] = first
        parameter = scratch.next_in_bucket[parameter]
    scratch.flat_buffer[:] = -1
    if not single:
        for device in range(num_devices):
            if choice.member[layout, device]:
                last = choice.num_micro - 1
                _task(tape, _FLATTEN, first, device, last, 0, -1, 2.0 * size)
                parameter = first
                while parameter >= 0:
                    _read_gradient(scratch, tape, parameter, device)
                    parameter = scratch.next_in_bucket[parameter]
                scratch.flat_buffer[device] = _make(tape, device, size)
    two_phases = choice.second_channel[key] >= 0
    kind = _REDUCE_SCATTER if two_phases else _ALL_REDUCE
    _task(tape, kind, first, -1, 0, 0, choice.first_channel[key], size)
    for device in range(num_devices):
        if choice.member[layout, device]:
            if single:
                _read_gradient(scratch, tape, first, device)
            else:
                _read(tape, scratch.flat_buffer[device])
    for device in range(num_devices):
        # A replica without samples has no gradient of its own: it receives one.
        missing = single and scratch.gradient_buffer[first, device] < 0
        if choice.member[layout, device] and missing:
            scratch.gradient_buffer[first, device] = _make(tape, device, size)
    token = _make(tape, -1, 0.0)
    if two_phases:
        _task(tape, _ALL_GATHER, first, -1, 0, 0, choice.second_channel[key], size)
        _read(tape, token)
        for device in range(num_devices):
            if choice.member[layout, device]:
                if single:
                    _read_gradient(scratch, tape, first, device)
                else:
                    _read(tape, scratch.flat_buffer[device])
        token = _make(tape, -1, 0.0)
    # The updates, written out like the ops: an optimizer step of each parameter on each replica.
    # In a bucket the gradient is a view of the flat copy.
    number, made, read = tape.counts[NUM_TASKS], tape.counts[NUM_BUFFERS], tape.counts[NUM_READS]
    parameter = first
    while parameter >= 0:
        if (
            number + num_devices >= len(tape.tasks) - 2
            or made + num_devices >= len(tape.buffers) - 256
            or read + 4 * num_devices >= len(tape.reads)
        ):
            tape.counts[OVERFLOW] = 1
            number, made, read = 0, 0, 0
        for device in range(num_devices):
            if not choice.member[layout, device]:
                continue
            task = tape.tasks[number]
            task.kind = _UPDATE
            task.subject = parameter
            task.device = device
            task.micro = 0
            task.samples = 0
            task.channel = -1
            task.num_bytes = 0.0
            task.read_start = read
            task.buffer_start = made
            tape.reads[read] = token
            read += 1
            if scratch.last_read[parameter, device] >= 0:
                tape.reads[read] = scratch.last_read[parameter, device]
                read += 1
            if single:
                tape.reads[read] = scratch.gradient_buffer[parameter, device]
                read += 1
                if scratch.gradient_token[parameter, device] >= 0:
                    tape.reads[read] = scratch.gradient_token[parameter, device]
                    read += 1
            else:
                tape.reads[read] = scratch.flat_buffer[device]
                read += 1
            buffer = tape.buffers[made]
            buffer.maker = number
            buffer.device = device
            buffer.num_bytes = 0.0
            scratch.next_ready_buffer[parameter, device] = made
            made += 1
            number += 1
        parameter = scratch.next_in_bucket[parameter]
    tape.counts[NUM_TASKS] = number
    tape.counts[NUM_BUFFERS] = made
    tape.counts[NUM_READS] = read


@helper
def _serve(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int
) -> None:
    """Push every gradient to the parameter's home, add and update there, pull."""
    home = choice.home[parameter]
    layout = choice.layout[tables.parameter_group[parameter]]
    size = tables.parameter_bytes[parameter]
    num_devices = choice.member.shape[1]
    partial = tables.gradient_is_partial[parameter] == 1
    first_received = tape.counts[NUM_BUFFERS]
    received = 0
    for device in range(num_devices):
        if device == home or scratch.gradient_buffer[parameter, device] < 0:
            continue
        if not partial and (received > 0 or scratch.gradient_buffer[parameter, home] >= 0):
            break  # every replica has the same gradient: one is enough
        _task(tape, _PUSH, parameter, home, 0, 0, device * num_devices + home, size)
        _read_gradient(scratch, tape, parameter, device)
        _make(tape, home, size)
        received += 1
    last_received = tape.counts[NUM_BUFFERS]
    own = scratch.gradient_buffer[parameter, home] >= 0
    token = -1
    if received + (1 if own else 0) > 1:
        terms = received + (1 if own else 0)
        _task(tape, _SUM, parameter, home, 0, 0, -1, (terms + 1.0) * size)
        for buffer in range(first_received, last_received):
            _read(tape, buffer)
        if own:
            _read_gradient(scratch, tape, parameter, home)
        token = _make(tape, home, size)
    elif received == 1:
        token = first_received
    _task(tape, _UPDATE, parameter, home, 0, 0, -1, 0.0)
    if token >= 0:
        _read(tape, token)
    else:
        _read_gradient(scratch, tape, parameter, home)
    _read(tape, scratch.last_read[parameter, home])
    done = _make(tape, home, 0.0)
    scratch.next_ready_buffer[parameter, home] = done
    for device in range(num_devices):
        if choice.member[layout, device] and device != home:
            _task(tape, _PULL, parameter, device, 0, 0, home * num_devices + device, size)
            _read(tape, done)
            # Its own ops must be done with the old weight.
            _read(tape, scratch.last_read[parameter, device])
            if not partial:
                _read_gradient(scratch, tape, parameter, device)
            scratch.next_ready_buffer[parameter, device] = _make(tape, device, 0.0)
