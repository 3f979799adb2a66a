"""Gradients on the device that made them: kept, and added up over micro-batches.

Also sends a gradient that replicas already have whole to replicas that computed nothing.
"""

from heterog.lowering.choice import Choice, Lowering
from heterog.lowering.kernels import helper
from heterog.lowering.program import TaskKind
from heterog.lowering.tables import Domain, GraphTables
from heterog.lowering.tape import (
    APART,
    Scratch,
    Tape,
    follow_gradients,
    write_buffer,
    write_read,
    write_task,
)


@helper
def made_gradient(tables: GraphTables, scratch: Scratch, parameter: int, device: int) -> int:
    """Buffer of a micro-batch's gradient; -1 if the device made none."""
    slot = tables.gradient_slot[parameter]
    if slot >= 0:  # made in parts, but the parameter is whole
        return int(scratch.slot_buffer[slot, device])
    return int(scratch.value_buffer[tables.parameter_gradient[parameter], device])


@helper
def fresh_gradient(
    tables: GraphTables, choice: Choice, scratch: Scratch, parameter: int, device: int
) -> int:
    """Buffer of a micro-batch's gradient that enters the sum; -1 if the device adds none.

    If all devices are in one ring, only the first of the members that made the same gradient adds
    it.
    """
    made = made_gradient(tables, scratch, parameter, device)
    if made < 0 or num_rings(tables, choice, parameter) == 0:
        return made
    group = tables.parameter_group[parameter]
    ring = choice.rings.first[group, tables.gradient_domain[parameter]]
    if choice.rings.is_once[ring]:
        teams, division = choice.teams, choice.division[group]
        for other in range(choice.member.shape[1]):
            if (
                teams.number[division, other] == teams.number[division, device]
                and teams.position[division, other] < teams.position[division, device]
                and made_gradient(tables, scratch, parameter, other) >= 0
            ):
                return -1
    return made


@helper
def num_rings(tables: GraphTables, choice: Choice, parameter: int) -> int:
    """Number of rings that sum a parameter's gradients; 0 if its devices have the sum already."""
    domain = tables.gradient_domain[parameter]
    if domain < 0:
        return 0
    group = tables.parameter_group[parameter]
    return int(choice.rings.end[group, domain] - choice.rings.first[group, domain])


@helper
def bucket_key(tables: GraphTables, choice: Choice, scratch: Scratch, parameter: int) -> int:
    """Key of a parameter's bucket: equal for parameters whose gradients may share one."""
    group, domain = tables.parameter_group[parameter], tables.gradient_domain[parameter]
    key = scratch.bucket_key[group] * choice.rings.first.shape[1] + domain
    return int(key * tables.num_dtypes + tables.parameter_dtype[parameter])


@helper
def own_part(tables: GraphTables, choice: Choice, parameter: int, device: int) -> int:
    """Units that a device has of a parameter in slices; 1 per replica of a whole one."""
    division = choice.division[tables.parameter_group[parameter]]
    axis = tables.parameter_axis[parameter]
    if axis < 0:
        return 1 if choice.member[division, device] else 0
    return int(choice.teams.units[axis * len(choice.member) + division, device])


@helper
def is_shared(tables: GraphTables, choice: Choice, parameter: int) -> bool:
    """Whether replicas that compute nothing receive the gradient; see ``share_whole_gradient``."""
    if tables.parameter_axis[parameter] >= 0:
        return False
    if is_whole_everywhere(tables, choice, parameter):
        return True
    group, domain = tables.parameter_group[parameter], tables.gradient_domain[parameter]
    if domain != Domain.PEERS or num_rings(tables, choice, parameter) == 0:
        return False
    return not choice.rings.is_once[choice.rings.first[group, domain]]


@helper
def is_whole_everywhere(tables: GraphTables, choice: Choice, parameter: int) -> bool:
    """Whether each device that makes a parameter's gradient makes the whole gradient."""
    domain = tables.gradient_domain[parameter]
    if domain != Domain.PEERS:
        return bool(domain == Domain.NOBODY)
    return bool(choice.teams.num_teams[choice.division[tables.parameter_group[parameter]]] == 1)


@helper
def share_whole_gradient(lowering: Lowering, parameter: int, micro: int) -> None:
    """Send a gradient that other replicas have whole to replicas that compute nothing.

    The sender is the first device that has it, or the first of the receiver's team if teams have
    different parts of a sum.
    """
    tables, choice, scratch, tape = lowering
    value, slot = tables.parameter_gradient[parameter], tables.gradient_slot[parameter]
    division = choice.division[tables.parameter_group[parameter]]
    size = tables.gradient_bytes[parameter]
    num_devices = choice.member.shape[1]
    teams = choice.teams
    by_team = not is_whole_everywhere(tables, choice, parameter)
    for device in range(num_devices):
        made = made_gradient(tables, scratch, parameter, device)
        scratch.holder_buffer[device] = made
    for device in range(num_devices):
        if not choice.member[division, device] or scratch.holder_buffer[device] >= 0:
            continue
        owner = -1
        for other in range(num_devices):
            if scratch.holder_buffer[other] < 0:
                continue
            if not by_team:
                owner = other if owner < 0 else owner
            elif teams.number[division, other] == teams.number[division, device] and (
                owner < 0 or teams.position[division, other] < teams.position[division, owner]
            ):
                owner = other
        if owner < 0:
            continue  # no member of its team has samples
        channel = owner * num_devices + device
        write_task(tape, TaskKind.PUSH, parameter, device, micro, 0, channel, size)
        tape.counts[APART] = 1
        write_read(tape, scratch.holder_buffer[owner])
        received = write_buffer(tape, device, size)
        if slot >= 0:
            scratch.slot_buffer[slot, device] = received
        else:
            scratch.value_buffer[value, device] = received


@helper
def accumulate(lowering: Lowering, parameter: int, micro: int) -> None:
    """Add a micro-batch's gradient to the existing sum, or keep it as the first."""
    tables, choice, scratch, tape = lowering
    size = tables.gradient_bytes[parameter]
    for device in range(choice.member.shape[1]):
        fresh = fresh_gradient(tables, choice, scratch, parameter, device)
        if fresh < 0:
            continue
        if scratch.gradient_buffer[parameter, device] < 0:
            scratch.gradient_buffer[parameter, device] = fresh
            continue
        part = 1.0
        if tables.parameter_axis[parameter] >= 0:
            units = own_part(tables, choice, parameter, device)
            part = units / tables.parameter_units[parameter]
        write_task(tape, TaskKind.ACCUMULATE, parameter, device, micro, 0, -1, 3.0 * part * size)
        write_read(tape, fresh)
        write_read(tape, scratch.gradient_buffer[parameter, device])
        write_read(tape, scratch.gradient_token[parameter, device])
        follow_gradients(choice.turns, tape)
        scratch.gradient_token[parameter, device] = write_buffer(tape, device, 0.0)


@helper
def read_gradient(scratch: Scratch, tape: Tape, parameter: int, device: int) -> None:
    """Make the task begun last read a gradient and wait for everything added to it."""
    write_read(tape, scratch.gradient_buffer[parameter, device])
    write_read(tape, scratch.gradient_token[parameter, device])
