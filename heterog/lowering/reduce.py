"""Finished gradients become updated parameters, tensor by tensor or bucket by bucket.

With parameter servers (``serve``), devices push gradients to a home, which sums and updates, and
pull parameters.
"""

from heterog.lowering.choice import Choice, Lowering
from heterog.lowering.gradients import (
    bucket_key,
    is_whole_everywhere,
    num_rings,
    own_part,
    read_gradient,
)
from heterog.lowering.kernels import helper
from heterog.lowering.program import TaskKind
from heterog.lowering.slices import finish_gradient
from heterog.lowering.tables import Domain
from heterog.lowering.tape import (
    NUM_BUFFERS,
    Scratch,
    Tape,
    follow_gradients,
    set_units,
    write_buffer,
    write_read,
    write_task,
)
from heterog.strategy.sync import Sharded


@helper
def _gives(
    choice: Choice, scratch: Scratch, parameter: int, division: int, domain: int, device: int
) -> bool:
    """Whether a device has a part of a sum of gradients that no earlier device has.

    For a sum over teams, the first member with a gradient gives its team's part. For a sum inside
    teams, the first team with gradients gives all parts.
    """
    teams = choice.teams
    for other in range(choice.member.shape[1]):
        if scratch.gradient_buffer[parameter, other] < 0 or not choice.member[division, other]:
            continue
        if teams.number[division, other] == teams.number[division, device]:
            if (
                domain == Domain.PEERS
                and teams.position[division, other] < teams.position[division, device]
            ):
                return False
        elif (
            domain == Domain.TEAM
            and teams.number[division, other] < teams.number[division, device]
        ):
            return False
    return bool(scratch.gradient_buffer[parameter, device] >= 0)


@helper
def serve(lowering: Lowering, parameter: int) -> None:
    """Push every gradient to the parameter's home, sum and update there, pull."""
    tables, choice, scratch, tape = lowering
    home = choice.home[parameter]
    division = choice.division[tables.parameter_group[parameter]]
    size = tables.gradient_bytes[parameter]
    num_devices = choice.member.shape[1]
    domain = tables.gradient_domain[parameter]
    partial = not is_whole_everywhere(tables, choice, parameter)
    first_received = tape.counts[NUM_BUFFERS]
    received = 0
    for device in range(num_devices):
        if device == home or scratch.gradient_buffer[parameter, device] < 0:
            continue
        if not partial and (received > 0 or scratch.gradient_buffer[parameter, home] >= 0):
            break  # every replica has the same gradient: one is enough
        if partial and not _gives(choice, scratch, parameter, division, domain, device):
            continue
        write_task(tape, TaskKind.PUSH, parameter, home, 0, 0, device * num_devices + home, size)
        read_gradient(scratch, tape, parameter, device)
        write_buffer(tape, home, size)
        received += 1
    last_received = tape.counts[NUM_BUFFERS]
    own = scratch.gradient_buffer[parameter, home] >= 0 and (
        not partial or _gives(choice, scratch, parameter, division, domain, home)
    )
    token = -1
    if received + (1 if own else 0) > 1:
        terms = received + (1 if own else 0)
        write_task(tape, TaskKind.SUM, parameter, home, 0, 0, -1, (terms + 1.0) * size)
        for buffer in range(first_received, last_received):
            write_read(tape, buffer)
        if own:
            read_gradient(scratch, tape, parameter, home)
        token = write_buffer(tape, home, size)
    elif received == 1:
        token = first_received
    write_task(tape, TaskKind.UPDATE, parameter, home, 0, 0, -1, 0.0)
    if token >= 0:
        write_read(tape, token)
    else:
        read_gradient(scratch, tape, parameter, home)
    write_read(tape, scratch.last_read[parameter, home])
    done = write_buffer(tape, home, 0.0)
    size = tables.parameter_bytes[parameter]
    scratch.next_ready_buffer[parameter, home] = done
    for device in range(num_devices):
        if choice.member[division, device] and device != home:
            write_task(
                tape, TaskKind.PULL, parameter, device, 0, 0, home * num_devices + device, size
            )
            write_read(tape, done)
            # Its own ops must be done with the old weight.
            write_read(tape, scratch.last_read[parameter, device])
            if not partial:
                read_gradient(scratch, tape, parameter, device)
            scratch.next_ready_buffer[parameter, device] = write_buffer(tape, device, 0.0)


@helper
def number_buckets(choice: Choice, scratch: Scratch) -> None:
    """Give groups whose gradients may share a bucket the same key: their first group's number.

    ZeRO-3 gathers a bucket for the ops that read it, so only neighbours in a layer share one.
    """
    for group in range(len(choice.sharded)):
        scratch.bucket_key[group] = group
        if choice.sharded[group] == Sharded.PARAMETERS:
            before = max(group - 1, 0)
            if (
                choice.run[group] == choice.run[before]
                and choice.sync_class[group] == choice.sync_class[before]
            ):
                scratch.bucket_key[group] = scratch.bucket_key[before]
            continue
        for other in range(group):
            if choice.sync_class[group] == choice.sync_class[other]:
                scratch.bucket_key[group] = other
                break


@helper
def synchronise(lowering: Lowering, parameter: int) -> None:
    """Sum a finished gradient and update its parameter, or put it into its bucket."""
    tables, choice, scratch, tape = lowering
    group = tables.parameter_group[parameter]
    if choice.home[parameter] >= 0:
        serve(lowering, parameter)
        return
    if num_rings(tables, choice, parameter) == 0:
        for device in range(choice.member.shape[1]):
            if _begin_update(lowering, parameter, device):
                read_gradient(scratch, tape, parameter, device)
                write_read(tape, scratch.last_read[parameter, device])
                scratch.next_ready_buffer[parameter, device] = write_buffer(tape, device, 0.0)
        return
    if choice.sharded[group] >= Sharded.STATE:
        finish_gradient(lowering, parameter, choice.num_micro - 1)
        return
    key = bucket_key(tables, choice, scratch, parameter)
    size = tables.gradient_bytes[parameter]
    if scratch.open_first[key] < 0:
        scratch.open_first[key] = parameter
        scratch.open_bytes[key] = 0.0
    else:
        scratch.next_in_bucket[scratch.open_last[key]] = parameter
    scratch.open_last[key] = parameter
    scratch.next_in_bucket[parameter] = -1
    scratch.open_bytes[key] += size
    if scratch.open_bytes[key] >= scratch.full_bytes[key]:
        close_bucket(lowering, key)


@helper
def _begin_update(lowering: Lowering, parameter: int, device: int) -> bool:
    """Begin the optimizer step of a device's part of a parameter; ``False`` if it has none."""
    tables, choice, tape = lowering.tables, lowering.choice, lowering.tape
    units = own_part(tables, choice, parameter, device)
    if units == 0:
        return False
    if tables.parameter_axis[parameter] < 0:
        write_task(tape, TaskKind.UPDATE, parameter, device, 0, 0, -1, 0.0)
    else:
        part = units * tables.parameter_bytes[parameter] / tables.parameter_units[parameter]
        write_task(tape, TaskKind.UPDATE, parameter, device, 0, 0, -1, part)
        set_units(tape, units)
    return True


@helper
def close_bucket(lowering: Lowering, key: int) -> None:
    """All-reduce (or reduce-scatter and all-gather) a bucket in its rings, then update.

    The bucket is named by its first parameter. A bucket of one tensor is synchronised in place.
    The tensors of a larger bucket are first copied into one flat tensor on each device, and so is
    the part of a tensor that one of several rings sums.
    """
    tables, choice, scratch, tape = lowering
    first = scratch.open_first[key]
    size = scratch.open_bytes[key]
    scratch.open_first[key] = -1
    scratch.full_bytes[key] = choice.bucket_bytes
    num_domains = choice.rings.first.shape[1]
    added_up = key // tables.num_dtypes
    group, domain = added_up // num_domains, added_up % num_domains
    parameter = first
    while parameter >= 0:
        tape.bucket[parameter] = first
        parameter = scratch.next_in_bucket[parameter]
    first_ring, end_ring = choice.rings.first[group, domain], choice.rings.end[group, domain]
    for ring in range(first_ring, end_ring):
        _add_up(lowering, first, ring, ring - first_ring, size)
    parameter = first
    while parameter >= 0:
        _update_replicas(lowering, parameter, first, first_ring, end_ring)
        parameter = scratch.next_in_bucket[parameter]


@helper
def _add_up(lowering: Lowering, first: int, ring: int, number: int, size: float) -> None:
    """Sum a bucket's gradients in one ring.

    Args:
        lowering: Its ``flat_buffer``, ``ring_token`` and tape are written.
        first: First parameter, which names the bucket.
        ring: Row of ``choice.rings``.
        number: Index of the ring among those of the bucket.
        size: Bytes of the whole bucket.
    """
    choice, scratch, tape = lowering.choice, lowering.scratch, lowering.tape
    rings = choice.rings
    num_devices = choice.member.shape[1]
    size *= rings.part[ring]
    single = scratch.next_in_bucket[first] < 0
    scratch.flat_buffer[number, :] = -1
    for device in range(num_devices):
        in_place = single and (
            rings.is_whole[ring, device] or scratch.gradient_buffer[first, device] < 0
        )
        if not rings.member[ring, device] or in_place:
            continue
        last = choice.num_micro - 1
        write_task(tape, TaskKind.FLATTEN, first, device, last, 0, -1, 2.0 * size)
        parameter = first
        while parameter >= 0:
            read_gradient(scratch, tape, parameter, device)
            parameter = scratch.next_in_bucket[parameter]
        follow_gradients(choice.turns, tape)
        scratch.flat_buffer[number, device] = write_buffer(tape, device, size)
    two_phases = rings.second_channel[ring] >= 0
    kind = TaskKind.REDUCE_SCATTER if two_phases else TaskKind.ALL_REDUCE
    write_task(tape, kind, first, -1, 0, 0, rings.first_channel[ring], size)
    _read_parts(choice, scratch, tape, first, ring, number)
    for device in range(num_devices):
        # A replica without samples has no gradient of its own: it receives one.
        if rings.member[ring, device] and scratch.flat_buffer[number, device] < 0:
            if scratch.gradient_buffer[first, device] < 0:
                scratch.gradient_buffer[first, device] = write_buffer(tape, device, size)
    token = write_buffer(tape, -1, 0.0)
    if two_phases:
        write_task(tape, TaskKind.ALL_GATHER, first, -1, 0, 0, rings.second_channel[ring], size)
        write_read(tape, token)
        _read_parts(choice, scratch, tape, first, ring, number)
        token = write_buffer(tape, -1, 0.0)
    scratch.ring_token[number] = token


@helper
def _read_parts(
    choice: Choice, scratch: Scratch, tape: Tape, first: int, ring: int, number: int
) -> None:
    """Make a collective read the part of each member of its ring."""
    for device in range(choice.member.shape[1]):
        if choice.rings.member[ring, device]:
            _read_part(scratch, tape, first, number, device)


@helper
def _read_part(scratch: Scratch, tape: Tape, first: int, number: int, device: int) -> None:
    """Make the task begun last read a device's part of a bucket in a ring."""
    if scratch.flat_buffer[number, device] >= 0:
        write_read(tape, scratch.flat_buffer[number, device])
    else:
        read_gradient(scratch, tape, first, device)


@helper
def _update_replicas(
    lowering: Lowering, parameter: int, first: int, first_ring: int, end_ring: int
) -> None:
    """Update a parameter on each device that has a part of it.

    In a bucket the gradient is a view of the flat copy.
    """
    choice, scratch, tape = lowering.choice, lowering.scratch, lowering.tape
    rings = choice.rings
    for device in range(choice.member.shape[1]):
        if not _begin_update(lowering, parameter, device):
            continue
        is_alone = True  # no ring: an island of one device among larger islands
        for ring in range(first_ring, end_ring):
            if rings.member[ring, device]:
                is_alone = False
                write_read(tape, scratch.ring_token[ring - first_ring])
        if is_alone:
            read_gradient(scratch, tape, parameter, device)
        write_read(tape, scratch.last_read[parameter, device])
        for ring in range(first_ring, end_ring):
            if rings.member[ring, device]:
                _read_part(scratch, tape, first, ring - first_ring, device)
        scratch.next_ready_buffer[parameter, device] = write_buffer(tape, device, 0.0)
