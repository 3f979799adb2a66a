"""Lowering of ZeRO: parameters, gradients, optimizer state in slices (Rajbhandari et al. 2020).

Parameters whose gradients are summed over devices lie in *buckets*, as for other synchronisations;
a bucket is named by its first parameter, and in stage 3 ends with its layer (``layer_runs``), as
in FSDP2. Each device steps only the slice that its decision gives it. With n devices, payload S:

- stage 1: once per step, reduce-scatter of the gradients that micro-batches have added up, update
  of the slices, all-gather of the parameters.
- stage 2: each micro-batch's gradients are reduce-scattered when the bucket is complete; a device
  keeps and adds up only its own slice.
- stage 3: as 2, but parameters are kept in slices, too. Before the first op of a pass that reads a
  parameter of a bucket, the bucket is gathered on every device that has samples, and dropped after
  the last such op. A gather may start when the first reader of the second last gather is done, so
  at most two gathers are ahead, however fast the links are. A device of a pipeline runs other
  micro-batches between the passes of one, so there a gather follows gathers of the same pass.

If a schedule ``gathers_once``, stages 2 and 3 gather a bucket for the first micro-batch of a pass
and keep it for the others, and reduce gradients as stage 1 does.

Under stated turns a device runs chunks in another order than tasks are written here. So the waits
for earlier gathers or scatters have a *lane* for each pass of each chunk: in a new turn, a lane
continues from the lane with the latest earlier turn among those written so far.

With slice groups (``Decision.slice_groups``; FSDP's hybrid sharding, Zhao et al. 2023, section
3.2.2) all of this happens inside each group. After the last micro-batch, before the update, the
members that own the same slice in all groups add it up in an all-reduce: with k members, S/k each.
Nothing else goes from group to group.

If every replica has the whole gradient already, each updates the parameter, as without ZeRO.
"""

from heterog.lowering.choice import Choice, Lowering
from heterog.lowering.gradients import bucket_key, fresh_gradient, num_rings, own_part
from heterog.lowering.kernels import helper
from heterog.lowering.program import IntArray, TaskKind
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import (
    AS_STATED,
    NUM_TASKS,
    Scratch,
    Tape,
    follow_gradients,
    has_room,
    set_units,
    work_of,
    write_buffer,
    write_read,
    write_task,
)
from heterog.strategy.schedules import Pass
from heterog.strategy.sync import Sharded

_NUM_PASSES = len(Pass)
_AS_FORWARD = -2
"""Marks that the backward pass has had no gather yet."""


@helper
def is_sliced(tables: GraphTables, choice: Choice, parameter: int) -> bool:
    """Whether each device updates only a slice of its part of a parameter."""
    group = tables.parameter_group[parameter]
    return bool(
        choice.sharded[group] >= Sharded.STATE and num_rings(tables, choice, parameter) > 0
    )


@helper
def scatters_by_micro(choice: Choice, group: int) -> bool:
    """Whether gradients are reduce-scattered after each micro-batch, so only slices are kept."""
    return bool(choice.sharded[group] >= Sharded.GRADIENTS and not choice.turns.once)


@helper
def owned_part(tables: GraphTables, choice: Choice, parameter: int, device: int) -> float:
    """Fraction of a sliced parameter that a device updates."""
    group, domain = tables.parameter_group[parameter], tables.gradient_domain[parameter]
    owned = 0.0
    for ring in range(choice.rings.first[group, domain], choice.rings.end[group, domain]):
        owned += choice.rings.part[ring] * choice.rings.slice_part[ring, device]
    return owned


@helper
def number_sliced_buckets(lowering: Lowering) -> None:
    """Put sliced parameters into buckets, in the order in which their gradients are finished.

    This comes first, because stage 3 gathers a bucket before any gradient is finished.
    """
    tables, choice, scratch, tape = lowering
    scratch.open_first[:] = -1
    for entry in range(len(tables.finished_parameter)):
        parameter = tables.finished_parameter[entry]
        if not is_sliced(tables, choice, parameter):
            continue
        key = bucket_key(tables, choice, scratch, parameter)
        first = scratch.open_first[key]
        if first < 0:
            first = parameter
            scratch.open_first[key] = first
            scratch.bucket_bytes[first] = 0.0
            scratch.bucket_gradient_bytes[first] = 0.0
            scratch.bucket_count[first] = 0
        else:
            scratch.next_in_bucket[scratch.open_last[key]] = parameter
        scratch.open_last[key] = parameter
        scratch.next_in_bucket[parameter] = -1
        tape.bucket[parameter] = first
        scratch.bucket_bytes[first] += tables.parameter_bytes[parameter]
        scratch.bucket_gradient_bytes[first] += tables.gradient_bytes[parameter]
        scratch.bucket_count[first] += 1
        scratch.unfinished[first] = scratch.bucket_count[first]
        if scratch.bucket_gradient_bytes[first] >= choice.bucket_bytes:
            scratch.open_first[key] = -1


@helper
def find_pipelines(tables: GraphTables, choice: Choice, scratch: Scratch) -> None:
    """Find the devices that take part in only some of the groups."""
    scratch.is_part[:] = 0
    for group in range(tables.num_groups):
        for device in range(choice.member.shape[1]):
            if not choice.member[choice.division[group], device]:
                scratch.is_part[device] = 1


@helper
def begin_sliced_step(scratch: Scratch) -> None:
    """Reset the working memory of slices for a new step."""
    scratch.gathered[:] = 0
    scratch.slice_buffer[:] = -1
    scratch.slice_token[:] = -1
    scratch.received_buffer[:] = -1
    scratch.scattered_buffer[:] = -1
    scratch.scattered_token[:] = -1
    scratch.anchor[:2] = -1
    scratch.anchor[2:] = _AS_FORWARD
    scratch.scattered_turn[:] = -1
    scratch.anchor_turn[:] = -1


@helper
def note_reader(lowering: Lowering, op: int, division: int, micro: int, is_backward: int) -> None:
    """Note an op as the first reader of the latest gather of its pass."""
    tables, choice, scratch = lowering.tables, lowering.choice, lowering.scratch
    value = tables.value_start[op]
    if value == tables.value_start[op + 1]:
        return
    for device in range(choice.member.shape[1]):
        if choice.shares[division, micro, device] > 0:
            row = _anchor_row(lowering, op, device, is_backward)
            scratch.anchor[row + 1, device] = scratch.anchor[row, device]
            scratch.anchor[row, device] = scratch.value_buffer[value, device]


@helper
def _lane_before(last_turn: IntArray, device: int, lane: int, turn: int) -> int:
    """Begin a turn in a lane; returns the lane that it continues from, -1 for none.

    Args:
        last_turn: Turn in which each lane was written; updated.  # [num_lanes, num_devices]
        device: Device that takes the turn.
        lane: Its lane.
        turn: The turn.
    """
    if last_turn[lane, device] == turn:
        return lane
    before, latest = -1, -1
    for other in range(len(last_turn)):
        if latest < last_turn[other, device] <= turn:
            before, latest = other, last_turn[other, device]
    last_turn[lane, device] = turn
    return before


@helper
def _anchor_row(lowering: Lowering, op: int, device: int, is_backward: int) -> int:
    """Row of the anchor of the last gather that the next gather of a pass must follow.

    The first gathers of the backward pass follow the last gathers of the forward pass.
    """
    tables, choice, scratch, tape = lowering
    if choice.turns.rule == AS_STATED:
        work = max(work_of(tables, choice.turns, op), is_backward)
        chunk = max(choice.turns.chunk[tables.op_group[op], device], 0)
        lane = chunk * _NUM_PASSES + work
        before = _lane_before(scratch.anchor_turn, device, lane, tape.turn[device])
        for age in range(2) if before != lane else range(0):
            made = scratch.anchor[2 * before + age, device] if before >= 0 else -1
            scratch.anchor[2 * lane + age, device] = made
        return int(2 * lane)
    row = 2 * is_backward * scratch.is_part[device]
    if scratch.anchor[row, device] == _AS_FORWARD:
        for age in range(2):
            scratch.anchor[2 + age, device] = scratch.anchor[age, device]
    return int(row)


@helper
def gather_parameters(
    lowering: Lowering, op: int, division: int, micro: int, is_backward: int
) -> bool:
    """Gather, in stage 3, the buckets that an op is the first of its pass to read.

    All devices that run any reader of a bucket get it: under a rule a later reader may run where
    this op has no samples. Ops that run again count as backward. Returns whether any was gathered.
    """
    tables, choice, scratch, tape = lowering
    num_devices = choice.member.shape[1]
    once, any_gathered = choice.turns.once, False
    turn = 2 * micro + is_backward + 1
    for entry in range(tables.parameter_read_start[op], tables.parameter_read_start[op + 1]):
        parameter = tables.parameter_read[entry]
        group = tables.parameter_group[parameter]
        first = tape.bucket[parameter]
        if choice.sharded[group] != Sharded.PARAMETERS or first < 0:
            continue
        if not once and scratch.gathered[first] == turn:
            continue
        whole_row = is_backward * len(tables.parameter_bytes) + first
        if once and scratch.gathered[first] & (1 << is_backward):  # by the first micro-batch
            for device in range(num_devices):
                whole = scratch.whole_buffer[whole_row, device]
                if whole >= 0:
                    scratch.ready_buffer[parameter, device] = whole
            continue
        any_gathered = True
        updated = scratch.gathered[first] == 0
        scratch.gathered[first] = scratch.gathered[first] | 1 << is_backward if once else turn
        scratch.whole_buffer[whole_row] = -1
        domain = tables.gradient_domain[parameter]
        for ring in range(choice.rings.first[group, domain], choice.rings.end[group, domain]):
            size = scratch.bucket_bytes[first] * choice.rings.part[ring]
            num_edges = (num_devices + 1) * (scratch.bucket_count[first] + 1)
            if not has_room(tape, 0, num_edges, num_edges):
                return any_gathered
            runs, any_runs = scratch.holder_buffer, False
            for device in range(num_devices):
                runs[device] = -1
                if choice.rings.member[ring, device] and (
                    _has_share(choice, division, micro, device)
                    or _reads_later(tables, choice, scratch, first, group, micro, device)
                ):
                    runs[device], any_runs = device, True
            if not any_runs:
                continue
            channel = choice.rings.second_channel[ring]
            write_task(tape, TaskKind.GATHER_PARAMETERS, first, -1, micro, 0, channel, size)
            member = first
            while updated and member >= 0:  # the first gather waits for the last step's updates
                for device in range(num_devices):
                    if choice.rings.member[ring, device]:
                        write_read(tape, scratch.ready_buffer[member, device])
                member = scratch.next_in_bucket[member]
            for device in range(num_devices):
                if runs[device] < 0:
                    continue
                row = _anchor_row(lowering, op, device, is_backward)
                write_read(tape, scratch.anchor[row + 1, device])
                whole = write_buffer(tape, device, size)
                scratch.whole_buffer[whole_row, device] = whole
                member = first
                while member >= 0:
                    scratch.ready_buffer[member, device] = whole
                    member = scratch.next_in_bucket[member]
    return any_gathered


@helper
def _has_share(choice: Choice, row: int, micro: int, device: int) -> bool:
    """Whether a device has a share in a micro-batch, or in any one if all share a gather."""
    if not choice.turns.once:
        return bool(choice.shares[row, micro, device] > 0)
    return bool(choice.shares[row, :, device].sum() > 0)


@helper
def _reads_later(
    tables: GraphTables, choice: Choice, scratch: Scratch, first: int, group: int, micro: int,
    device: int,
) -> bool:  # fmt: skip
    """Whether a device runs any op that reads a parameter of a bucket.

    Readers are listed only under op rules; without rules all run on the same devices.
    """
    member = first
    while member >= 0:
        for reader in range(tables.reader_start[member], tables.reader_start[member + 1]):
            axis = tables.op_axis[tables.value_op[tables.reader_value[reader]]]
            row = axis * len(choice.member) + choice.division[group]
            if _has_share(choice, row, micro, device):
                return True
        member = scratch.next_in_bucket[member]
    return False


@helper
def finish_gradient(lowering: Lowering, parameter: int, micro: int) -> None:
    """Count a finished gradient; scatter a complete bucket, and update in the last micro-batch."""
    tables, choice, scratch, tape = lowering
    first = tape.bucket[parameter]
    scratch.unfinished[first] -= 1
    if scratch.unfinished[first] > 0:
        return
    scratch.unfinished[first] = scratch.bucket_count[first]
    group, domain = tables.parameter_group[first], tables.gradient_domain[first]
    for ring in range(choice.rings.first[group, domain], choice.rings.end[group, domain]):
        _scatter(lowering, first, ring, micro)
    if micro == choice.num_micro - 1:
        for ring in range(
            choice.rings.end[group, domain], choice.rings.end_between[group, domain]
        ):
            _add_up_copies(lowering, first, ring)
        for ring in range(choice.rings.first[group, domain], choice.rings.end[group, domain]):
            _update(lowering, first, ring)


@helper
def _scatter(lowering: Lowering, first: int, ring: int, micro: int) -> None:
    """Reduce-scatter a bucket's gradients from the devices of a ring that have some.

    In stages 2 and 3 a device goes on when all but the last reduce-scatter are done: a device that
    runs ahead of its links would keep all gradients.
    """
    tables, choice, scratch, tape = lowering
    rings = choice.rings
    size = scratch.bucket_gradient_bytes[first] * rings.part[ring]
    by_micro = scatters_by_micro(choice, tables.parameter_group[first])
    num_senders, before = 0, -1
    for device in range(choice.member.shape[1]):
        if rings.member[ring, device]:
            before = scratch.slice_token[first, device]  # all members have the same
            scratch.flat_buffer[0, device] = -1
            if _has_gradients(tables, choice, scratch, first, device, by_micro):
                num_senders += rings.member[ring, device]
                _flatten(lowering, first, device, micro, size)
    write_task(tape, TaskKind.REDUCE_SCATTER, first, -1, micro, 0, rings.first_channel[ring], size)
    write_read(tape, before)
    for device in range(choice.member.shape[1]):
        if rings.member[ring, device]:
            row, part = _scatter_row(tables, choice, first, device), rings.slice_part[ring, device]
            _send_flat(scratch, tape, first, device, row, by_micro)
            if part > 0.0:
                _receive_slice(
                    scratch, tape, first, device, row, num_senders, part * size, by_micro
                )
    done = write_buffer(tape, -1, 0.0)
    for device in range(choice.member.shape[1]):
        if rings.member[ring, device]:
            scratch.slice_token[first, device] = done
            if by_micro:
                row = _scatter_row(tables, choice, first, device)
                scratch.scattered_token[row, device] = done


@helper
def _add_up_copies(lowering: Lowering, first: int, ring: int) -> None:
    """Sum a slice of a bucket's gradients over the slice groups, in place."""
    tables, choice, scratch, tape = lowering
    rings, micro = choice.rings, choice.num_micro - 1
    size = scratch.bucket_gradient_bytes[first] * rings.part[ring]
    by_micro = scatters_by_micro(choice, tables.parameter_group[first])
    write_task(tape, TaskKind.ALL_REDUCE, first, -1, micro, 0, rings.first_channel[ring], size)
    for device in range(choice.member.shape[1]):
        if rings.member[ring, device]:
            write_read(tape, scratch.slice_token[first, device])
            write_read(tape, scratch.slice_buffer[first, device])
            if not by_micro:
                write_read(tape, scratch.flat_buffer[0, device])
    done = write_buffer(tape, -1, 0.0)
    for device in range(choice.member.shape[1]):
        if rings.member[ring, device]:
            scratch.slice_token[first, device] = done


@helper
def _has_gradients(
    tables: GraphTables, choice: Choice, scratch: Scratch, first: int, device: int, by_micro: bool
) -> bool:
    """Whether a device made at least one gradient of a bucket.

    Under a rule a device may have made one gradient of a bucket and none of the others.
    """
    member = first
    while member >= 0:
        if _own_gradient(tables, choice, scratch, member, device, by_micro) >= 0:
            return True
        member = scratch.next_in_bucket[member]
    return False


@helper
def _flatten(lowering: Lowering, first: int, device: int, micro: int, size: float) -> None:
    """Copy a device's gradients of a bucket into one flat tensor; a single one stays in place."""
    tables, choice, scratch, tape = lowering
    sharded = choice.sharded[tables.parameter_group[first]]
    by_micro = scatters_by_micro(choice, tables.parameter_group[first])
    single = scratch.next_in_bucket[first] < 0
    if single:
        own = _own_gradient(tables, choice, scratch, first, device, by_micro)
        scratch.flat_buffer[0, device] = own
        if not by_micro:
            return
    write_task(tape, TaskKind.FLATTEN, first, device, micro, 0, -1, 0.0 if single else 2.0 * size)
    in_lanes = by_micro and choice.turns.rule == AS_STATED
    if by_micro and not in_lanes:
        _wait_for_scatters(scratch, tape, device, 0)
    member = first
    while member >= 0:
        write_read(tape, _own_gradient(tables, choice, scratch, member, device, by_micro))
        if not by_micro:
            write_read(tape, scratch.gradient_token[member, device])
        member = scratch.next_in_bucket[member]
    follow_gradients(choice.turns, tape)
    if in_lanes:  # the turn of the copy is known only now
        row = _scatter_row(tables, choice, first, device)
        _begin_scatters(scratch, device, row, tape.tasks[tape.counts[NUM_TASKS] - 1].turn)
        _wait_for_scatters(scratch, tape, device, row)
    if not single:
        scratch.flat_buffer[0, device] = write_buffer(tape, device, size)
    if by_micro and sharded == Sharded.GRADIENTS and scratch.is_part[device] == 0 and not in_lanes:
        # The next micro-batch does not begin while this one waits for its scatters, because both
        # would keep activations. In stage 3 the gathers have this effect.
        flattened = write_buffer(tape, device, 0.0)
        member = first
        while member >= 0:
            scratch.ready_buffer[member, device] = flattened
            member = scratch.next_in_bucket[member]


@helper
def _scatter_row(tables: GraphTables, choice: Choice, first: int, device: int) -> int:
    """Row of a device's last scatter, in the lane of the bucket's chunk."""
    if choice.turns.rule != AS_STATED:
        return 0
    return 2 * max(int(choice.turns.chunk[tables.parameter_group[first], device]), 0)


@helper
def _begin_scatters(scratch: Scratch, device: int, row: int, turn: int) -> None:
    """Begin a turn in the lane of a row."""
    lane = row // 2
    before = _lane_before(scratch.scattered_turn, device, lane, turn)
    if before == lane:
        return
    for age in range(2):
        for made in (scratch.scattered_token, scratch.scattered_buffer, scratch.received_buffer):
            made[row + age, device] = made[2 * before + age, device] if before >= 0 else -1


@helper
def _wait_for_scatters(scratch: Scratch, tape: Tape, device: int, row: int) -> None:
    """Make the task begun last wait for all but the last scatter of a lane."""
    write_read(tape, scratch.scattered_token[row + 1, device])
    write_read(tape, scratch.scattered_buffer[row + 1, device])
    write_read(tape, scratch.received_buffer[row + 1, device])


@helper
def _send_flat(
    scratch: Scratch, tape: Tape, first: int, device: int, row: int, by_micro: bool
) -> None:
    """Write the reads of the reduce-scatter begun last on a device."""
    write_read(tape, scratch.flat_buffer[0, device])
    if not by_micro:
        if scratch.next_in_bucket[first] < 0:
            write_read(tape, scratch.gradient_token[first, device])
        return
    write_read(tape, scratch.slice_buffer[first, device])
    if scratch.flat_buffer[0, device] < 0:
        write_read(tape, scratch.received_buffer[row, device])
    scratch.scattered_buffer[row + 1, device] = scratch.scattered_buffer[row, device]
    scratch.received_buffer[row + 1, device] = scratch.received_buffer[row, device]
    scratch.scattered_token[row + 1, device] = scratch.scattered_token[row, device]
    scratch.scattered_buffer[row, device] = scratch.flat_buffer[0, device]
    scratch.received_buffer[row, device] = -1


@helper
def _receive_slice(
    scratch: Scratch, tape: Tape, first: int, device: int, row: int, num_senders: int,
    size: float, by_micro: bool,
) -> None:  # fmt: skip
    """Write the buffers that the reduce-scatter begun last makes on a device."""
    others = num_senders - (1 if scratch.flat_buffer[0, device] >= 0 else 0)
    if num_senders == 0 and not by_micro:
        others = 1  # zeros, to which other slice groups add their slices
    received = write_buffer(tape, device, others * size)
    if by_micro:
        scratch.received_buffer[row, device] = received
        if scratch.slice_buffer[first, device] < 0:
            scratch.slice_buffer[first, device] = write_buffer(tape, device, size)
    elif scratch.flat_buffer[0, device] < 0:
        # If there is a flat buffer, it is added to the own slice in there, and freed.
        scratch.slice_buffer[first, device] = received


@helper
def _own_gradient(
    tables: GraphTables, choice: Choice, scratch: Scratch, parameter: int, device: int,
    by_micro: bool,
) -> int:  # fmt: skip
    """A device's gradient of this micro-batch, or of all together; -1 if it has none."""
    if by_micro:
        return fresh_gradient(tables, choice, scratch, parameter, device)
    return int(scratch.gradient_buffer[parameter, device])


@helper
def _update(lowering: Lowering, first: int, ring: int) -> None:
    """Update the slices of a ring; in stages 1 and 2 also gather the parameters."""
    tables, choice, scratch, tape = lowering
    rings = choice.rings
    num_devices = choice.member.shape[1]
    group = tables.parameter_group[first]
    by_micro = scatters_by_micro(choice, group)
    parameter = first
    while parameter >= 0:
        for device in range(num_devices):
            part = rings.part[ring] * rings.slice_part[ring, device]
            if part == 0.0:
                continue
            num_bytes = part * tables.parameter_bytes[parameter]
            write_task(tape, TaskKind.UPDATE, parameter, device, 0, 0, -1, num_bytes)
            if tables.parameter_axis[parameter] >= 0:
                set_units(tape, own_part(tables, choice, parameter, device))
            write_read(tape, scratch.slice_token[first, device])
            write_read(tape, scratch.last_read[parameter, device])
            write_read(tape, scratch.slice_buffer[first, device])
            if not by_micro:
                write_read(tape, scratch.flat_buffer[0, device])
            scratch.next_ready_buffer[parameter, device] = write_buffer(tape, device, 0.0)
        parameter = scratch.next_in_bucket[parameter]
    if choice.sharded[group] == Sharded.PARAMETERS:
        return
    num_edges = 2 * (num_devices + 1) * (scratch.bucket_count[first] + 1)
    if not has_room(tape, 0, num_edges, num_edges):
        return
    size = scratch.bucket_bytes[first] * rings.part[ring]
    write_task(tape, TaskKind.GATHER_PARAMETERS, first, -1, 0, 0, rings.second_channel[ring], size)
    parameter = first
    while parameter >= 0:
        for device in range(num_devices):
            if rings.slice_part[ring, device] > 0.0:
                write_read(tape, scratch.next_ready_buffer[parameter, device])
            if rings.member[ring, device]:
                # Its own ops must be done with the old weights.
                write_read(tape, scratch.last_read[parameter, device])
        parameter = scratch.next_in_bucket[parameter]
    arrived = write_buffer(tape, -1, 0.0)
    parameter = first
    while parameter >= 0:
        for device in range(num_devices):
            if rings.member[ring, device]:
                scratch.next_ready_buffer[parameter, device] = arrived
        parameter = scratch.next_in_bucket[parameter]
