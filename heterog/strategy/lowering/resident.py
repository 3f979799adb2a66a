"""Bytes that stay on a device for the whole step."""

import numpy as np

from heterog.strategy.kernels import kernel
from heterog.strategy.lowering.choice import Choice
from heterog.strategy.lowering.slices import is_sliced
from heterog.strategy.program import FloatArray
from heterog.strategy.strategy import Sync
from heterog.strategy.tables import GraphTables

# Plain integers, because numba freezes enum members into slow objects.
_ZERO1 = int(Sync.ZERO1)
_ZERO3 = int(Sync.ZERO3)


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
