"""Bytes that stay on a device for the whole step."""

import numpy as np

from heterog.lowering.choice import Choice
from heterog.lowering.gradients import own_part
from heterog.lowering.kernels import kernel
from heterog.lowering.program import FloatArray
from heterog.lowering.slices import is_sliced, owned_part
from heterog.lowering.tables import GraphTables
from heterog.strategy.sync import Sharded


def resident_bytes(tables: GraphTables, choice: Choice) -> FloatArray:
    """Bytes on each device for the whole step: parameters, optimizer state, buffers, batch.

    The largest workspace of a kernel is included: a device runs one op at a time, and an op that
    needs a workspace nearly always runs when memory is fullest.
    """
    resident: FloatArray = np.zeros(choice.member.shape[1])
    workspace = np.zeros_like(resident)
    plain = choice._replace(modes=()) if choice.modes else choice
    _resident_kernel(tables, plain, resident, workspace)
    for mode in choice.modes:
        resident += mode.resident_bytes(tables, choice)
    return resident + workspace


@kernel
def _resident_kernel(
    tables: GraphTables, choice: Choice, resident: FloatArray, workspace: FloatArray
) -> None:
    num_devices = choice.member.shape[1]
    for parameter in range(len(tables.parameter_bytes)):
        group = tables.parameter_group[parameter]
        size = tables.parameter_bytes[parameter]
        sliced = is_sliced(tables, choice, parameter)
        home = choice.home[parameter]
        for device in range(num_devices):
            units = own_part(tables, choice, parameter, device)
            if units == 0:
                continue
            part = units / tables.parameter_units[parameter]
            needed = part * tables.parameter_workspace[parameter]
            workspace[device] = max(workspace[device], needed)
            if sliced:
                owned = owned_part(tables, choice, parameter, device)
                kept = owned if choice.sharded[group] == Sharded.PARAMETERS else part
                resident[device] += size * (kept + owned * tables.state_ratio)
            else:
                resident[device] += part * size * (1.0 if home >= 0 else 1.0 + tables.state_ratio)
        if home >= 0:
            # The server keeps the state, and a copy of its own if it holds no replica.
            resident[home] += size * tables.state_ratio
            if not choice.member[choice.division[group], home]:
                resident[home] += size
    active = choice.division[tables.num_groups]
    for device in range(num_devices):
        if choice.member[active, device]:
            most = 0
            for division in range(active):
                most = max(most, choice.shares[division, :, device].sum())
            for group in range(tables.num_groups):
                if tables.group_reads_team[group] == 1:
                    samples = choice.teams.samples[choice.division[group], :, device]
                    most = max(most, samples.sum())
            resident[device] += tables.common_bytes + most * tables.input_bytes_per_sample
