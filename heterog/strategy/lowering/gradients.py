"""Gradients on the device that made them: kept, added up over micro-batches, handed on."""

from heterog.strategy.kernels import helper
from heterog.strategy.lowering.choice import Choice
from heterog.strategy.lowering.scratch import Scratch
from heterog.strategy.lowering.tape import Tape, write_buffer, write_read, write_task
from heterog.strategy.lowering.turns import follow_gradients
from heterog.strategy.program import TaskKind
from heterog.strategy.tables import GraphTables

# Plain integers, because numba freezes enum members into slow objects.
_ACCUMULATE = int(TaskKind.ACCUMULATE)
_PUSH = int(TaskKind.PUSH)


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
    value = tables.parameter_gradient[parameter]
    size = tables.parameter_bytes[parameter]
    for device in range(choice.member.shape[1]):
        fresh = scratch.value_buffer[value, device]
        if fresh < 0:
            continue
        if scratch.gradient_buffer[parameter, device] < 0:
            scratch.gradient_buffer[parameter, device] = fresh
            continue
        write_task(tape, _ACCUMULATE, parameter, device, micro, 0, -1, 3.0 * size)
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
