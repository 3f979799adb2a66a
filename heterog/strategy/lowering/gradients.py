"""Gradients on the device that made them: kept, added up over micro-batches, handed on."""

from heterog.strategy.kernels import helper
from heterog.strategy.lowering.choice import Choice
from heterog.strategy.lowering.scratch import Scratch
from heterog.strategy.lowering.tape import Tape, write_buffer, write_read, write_task
from heterog.strategy.lowering.turns import follow_gradients
from heterog.strategy.program import TaskKind
from heterog.strategy.tables import Domain, GraphTables

# Plain integers, because numba freezes enum members into slow objects.
_ACCUMULATE = int(TaskKind.ACCUMULATE)
_PUSH = int(TaskKind.PUSH)
_NOBODY, _PEERS = int(Domain.NOBODY), int(Domain.PEERS)


@helper
def fresh_gradient(tables: GraphTables, scratch: Scratch, parameter: int, device: int) -> int:
    """Buffer of a micro-batch's gradient, -1 if the device made none."""
    slot = tables.gradient_slot[parameter]
    if slot >= 0:  # made in parts of a parameter that is whole
        return int(scratch.slot_buffer[slot, device])
    return int(scratch.value_buffer[tables.parameter_gradient[parameter], device])


@helper
def num_rings(tables: GraphTables, choice: Choice, parameter: int) -> int:
    """Rings that add up a parameter's gradients; 0 if its devices have the sum already."""
    domain = tables.gradient_domain[parameter]
    if domain < 0:
        return 0
    group = tables.parameter_group[parameter]
    return int(choice.rings.end[group, domain] - choice.rings.first[group, domain])


@helper
def own_part(tables: GraphTables, choice: Choice, parameter: int, device: int) -> int:
    """Units of a parameter that lives in slices on a device; of a whole one 1 for each replica."""
    layout = choice.layout[tables.parameter_group[parameter]]
    axis = tables.parameter_axis[parameter]
    if axis < 0:
        return 1 if choice.member[layout, device] else 0
    return int(choice.teams.units[axis * len(choice.member) + layout, device])


@helper
def is_whole_everywhere(tables: GraphTables, choice: Choice, parameter: int) -> bool:
    """Whether all devices of a group that make a parameter's gradient make the whole of it."""
    domain = tables.gradient_domain[parameter]
    if domain != _PEERS:
        return bool(domain == _NOBODY)
    layout = choice.layout[tables.parameter_group[parameter]]
    for device in range(choice.member.shape[1]):
        if choice.teams.number[layout, device] > 0:
            return False
    return True


@helper
def share_whole_gradient(
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
            write_task(tape, _PUSH, parameter, device, micro, 0, channel, size)
            write_read(tape, scratch.value_buffer[value, owner])
            scratch.value_buffer[value, device] = write_buffer(tape, device, size)


@helper
def accumulate(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int, micro: int
) -> None:
    """Add a micro-batch's gradient to the one that is there, or keep it as the first."""
    size = tables.parameter_bytes[parameter]
    for device in range(choice.member.shape[1]):
        fresh = fresh_gradient(tables, scratch, parameter, device)
        if fresh < 0:
            continue
        if scratch.gradient_buffer[parameter, device] < 0:
            scratch.gradient_buffer[parameter, device] = fresh
            continue
        part = 1.0
        if tables.parameter_axis[parameter] >= 0:
            units = own_part(tables, choice, parameter, device)
            part = units / tables.parameter_units[parameter]
        write_task(tape, _ACCUMULATE, parameter, device, micro, 0, -1, 3.0 * part * size)
        write_read(tape, fresh)
        write_read(tape, scratch.gradient_buffer[parameter, device])
        write_read(tape, scratch.gradient_token[parameter, device])
        follow_gradients(choice.turns, tape)
        scratch.gradient_token[parameter, device] = write_buffer(tape, device, 0.0)


@helper
def read_gradient(scratch: Scratch, tape: Tape, parameter: int, device: int) -> None:
    """The task that was begun last reads a gradient, and waits for what was added to it."""
    write_read(tape, scratch.gradient_buffer[parameter, device])
    write_read(tape, scratch.gradient_token[parameter, device])
