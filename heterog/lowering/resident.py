"""Bytes that stay on a device for the whole step, and those that its optimizer makes in a call."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterog.graph.op_graph import OpGraph
from heterog.lowering.choice import Choice
from heterog.lowering.gradients import own_part
from heterog.lowering.kernels import by_reference, kernel
from heterog.lowering.program import FloatArray
from heterog.lowering.slices import is_sliced, owned_part
from heterog.lowering.tables import GraphTables
from heterog.strategy.sync import Sharded
from heterog.units import MIB

STEPPED_BYTES, STEPPED_BYTES_CPU = 64 * MIB, MIB
"""Most bytes that the optimizer steps in one call, on a GPU and on a CPU, if it treats parameters
apart. Few calls take less time on a GPU; on a CPU, pieces that fit into the cache do."""


@by_reference
class Held(NamedTuple):
    """Bytes on each device of what a step keeps and its optimizer steps.  # [num_devices] each"""

    resident: FloatArray  # for the whole step, see ``resident_bytes``
    largest: FloatArray  # what the optimizer steps: of the largest whole tensor,
    whole: FloatArray  # of all whole tensors,
    sliced: FloatArray  # of slices


def resident_bytes(tables: GraphTables, choice: Choice) -> FloatArray:
    """Bytes on each device for the whole step: parameters, optimizer state, buffers, batch.

    The largest workspace of a kernel is included: a device runs one op at a time, and an op that
    needs a workspace nearly always runs when memory is fullest.
    """
    return held_bytes(tables, choice).resident


def held_bytes(tables: GraphTables, choice: Choice) -> Held:
    """What a step keeps on each device, and what the optimizer steps there."""
    resident, workspace, *stepped = np.zeros((5, choice.member.shape[1]))
    held = Held(resident, *stepped)
    plain = choice._replace(modes=()) if choice.modes else choice
    _held_kernel(tables, plain, held, workspace)
    for mode in choice.modes:
        resident += mode.resident_bytes(tables, choice)
    return held._replace(resident=resident + workspace)


@kernel
def _held_kernel(tables: GraphTables, choice: Choice, held: Held, workspace: FloatArray) -> None:
    resident = held.resident
    num_devices = choice.member.shape[1]
    for parameter in range(len(tables.parameter_bytes)):
        group = tables.parameter_group[parameter]
        size, stepped = tables.parameter_bytes[parameter], tables.stepped_bytes[parameter]
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
                held.sliced[device] += stepped * owned
            else:
                resident[device] += part * size * (1.0 if home >= 0 else 1.0 + tables.state_ratio)
                if home < 0:
                    held.largest[device] = max(held.largest[device], part * stepped)
                    held.whole[device] += part * stepped
        if home >= 0:
            # The server keeps the state, and a copy of its own if it holds no replica.
            resident[home] += size * tables.state_ratio
            if not choice.member[choice.division[group], home]:
                resident[home] += size
            held.largest[home] = max(held.largest[home], stepped)
            held.whole[home] += stepped
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


def stepping_bytes(graph: OpGraph, held: Held, on_cpu: NDArray[np.bool_]) -> FloatArray:
    """Most bytes that the optimizer makes on each device in one call, beside its state.

    On a CPU it steps one tensor after the other, on a GPU all of a call together, if it can.

    Args:
        graph: One training step.
        held: What the optimizer steps on each device.
        on_cpu: Whether each device is a CPU.  # [num_devices]
    """
    stepping: FloatArray = np.zeros(len(on_cpu))
    _stepping_kernel(
        held, on_cpu, graph.optimizer_step_ratios, graph.is_stepped_in_pieces, stepping
    )
    return stepping


@kernel
def _stepping_kernel(
    held: Held,
    on_cpu: NDArray[np.bool_],
    ratios: tuple[float, float],
    is_in_pieces: bool,
    stepping: FloatArray,
) -> None:
    in_turn, together = ratios
    for device in range(len(stepping)):
        most = STEPPED_BYTES_CPU if on_cpu[device] else STEPPED_BYTES
        sliced = min(held.sliced[device], float(most))
        largest, whole = max(held.largest[device], sliced), held.whole[device] + sliced
        if is_in_pieces:
            largest, whole = min(largest, float(most)), min(whole, float(most))
        is_in_turn = on_cpu[device] or together == 0.0
        stepping[device] = in_turn * largest if is_in_turn else together * whole
