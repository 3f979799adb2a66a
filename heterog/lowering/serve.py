"""Parameter servers: push gradients, sum and update at home, pull parameters."""

from heterog.lowering.choice import Choice
from heterog.lowering.gradients import is_whole_everywhere, read_gradient
from heterog.lowering.kernels import helper
from heterog.lowering.program import TaskKind
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import Domain, GraphTables
from heterog.lowering.tape import NUM_BUFFERS, Tape, write_buffer, write_read, write_task

# Plain integers, because numba freezes enum members into slow objects.
_SUM = int(TaskKind.SUM)
_UPDATE = int(TaskKind.UPDATE)
_PUSH = int(TaskKind.PUSH)
_PULL = int(TaskKind.PULL)
_PEERS, _TEAM = int(Domain.PEERS), int(Domain.TEAM)


@helper
def _gives(
    choice: Choice, scratch: Scratch, parameter: int, division: int, domain: int, device: int
) -> bool:
    """Whether a device has a part of a sum of gradients that no earlier device has.

    Of a sum over teams the first member with a gradient gives its team's part; of a sum inside
    teams the first team with gradients gives it.
    """
    teams = choice.teams
    for other in range(choice.member.shape[1]):
        if scratch.gradient_buffer[parameter, other] < 0 or not choice.member[division, other]:
            continue
        if teams.number[division, other] == teams.number[division, device]:
            if (
                domain == _PEERS
                and teams.position[division, other] < teams.position[division, device]
            ):
                return False
        elif domain == _TEAM and teams.number[division, other] < teams.number[division, device]:
            return False
    return bool(scratch.gradient_buffer[parameter, device] >= 0)


@helper
def serve(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int
) -> None:
    """Push every gradient to the parameter's home, sum and update there, pull."""
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
        write_task(tape, _PUSH, parameter, home, 0, 0, device * num_devices + home, size)
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
        write_task(tape, _SUM, parameter, home, 0, 0, -1, (terms + 1.0) * size)
        for buffer in range(first_received, last_received):
            write_read(tape, buffer)
        if own:
            read_gradient(scratch, tape, parameter, home)
        token = write_buffer(tape, home, size)
    elif received == 1:
        token = first_received
    write_task(tape, _UPDATE, parameter, home, 0, 0, -1, 0.0)
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
            write_task(tape, _PULL, parameter, device, 0, 0, home * num_devices + device, size)
            write_read(tape, done)
            # Its own ops must be done with the old weight.
            write_read(tape, scratch.last_read[parameter, device])
            if not partial:
                read_gradient(scratch, tape, parameter, device)
            scratch.next_ready_buffer[parameter, device] = write_buffer(tape, device, 0.0)
