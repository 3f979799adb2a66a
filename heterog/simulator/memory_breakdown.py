"""The contents of each device's memory at the moment when it is fullest.

Buffers that are alive at the peak by the liveness of ``memory`` are summed by kind: gradients,
activations, communication. Memory of the whole step is split by calling ``resident_bytes`` of the
lowering again with one ingredient at a time, so this module need not know how a strategy places
parameters and optimizer state.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from heterog.graph.op_graph import OpGraph, Phase
from heterog.lowering import Choice, held_bytes, resident_bytes, value_of_buffers
from heterog.lowering.program import FloatArray, Program
from heterog.lowering.tables import GraphTables
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.memory import Lives, all_lives, of_each_device
from heterog.strategy.strategy import Strategy


class MemoryKind(StrEnum):
    """The use of some bytes of memory."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    """Gradients of parameters, where an op made them."""
    ACTIVATIONS = "activations"
    """Values that forward ops make, at first or in a recomputation."""
    BACKWARD = "backward"
    """Values that backward ops make, other than the gradients of parameters."""
    COMMUNICATION = "communication"
    """Values that were received or gathered, or are copied together for sending."""
    BATCH = "batch"
    CONSTANTS = "constants"
    """The model's buffers and constants, and parameters that are not trained."""
    WORKSPACE = "workspace"
    """Memory that kernels need besides their inputs and outputs while they run, and optimizers
    besides their state while they step."""
    STASH = "stash"
    """Older weights, further batches, and values of these batches for their backward passes."""
    MARGIN = "margin"
    """Memory added for small workspaces and rounding of allocators."""


_KINDS = tuple(MemoryKind)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one device at its peak.

    Attributes:
        device: Name of the device.
        device_type: Name of its type.
        peak_bytes: Most bytes that it needs at once, as an evaluation reports.
        usable_bytes: Bytes that a job may use on it.
        parts: Bytes of each kind at the peak; they add up to ``peak_bytes``.
    """

    device: str
    device_type: str
    peak_bytes: int
    usable_bytes: int
    parts: tuple[tuple[MemoryKind, int], ...]

    @property
    def lacking_bytes(self) -> int:
        """Bytes missing; 0 if it fits."""
        return max(self.peak_bytes - self.usable_bytes, 0)

    def bytes_of(self, kind: MemoryKind) -> int:
        """Bytes of one kind."""
        return dict(self.parts)[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a strategy fits, device by device.

    Attributes:
        devices: Memory of each device, in the cluster's order.
    """

    devices: tuple[DeviceMemory, ...]

    @property
    def is_ok(self) -> bool:
        """Whether every device has enough memory."""
        return all(device.lacking_bytes == 0 for device in self.devices)

    @property
    def peaks(self) -> tuple[tuple[int, int], ...]:
        """(predicted, usable) bytes of each device."""
        return tuple((device.peak_bytes, device.usable_bytes) for device in self.devices)

    @property
    def fullest(self) -> DeviceMemory:
        """The device that lacks most bytes, or else the device with the largest share in use."""
        return max(
            self.devices,
            key=lambda device: (device.lacking_bytes, device.peak_bytes / device.usable_bytes),
        )


def memory_fit(evaluator: Evaluator, strategy: Strategy | Choice, order: Order) -> Fit:
    """Break down the memory of each device at the peak that ``Evaluator.referee`` reports.

    The peak of a device is the larger of its peaks in the engine's and in the referee's schedule;
    the breakdown is of the same schedule.

    Args:
        evaluator: Evaluator of the graph and cluster.
        strategy: Strategy for them.
        order: Order in which waiting tasks run.
    """
    choice = evaluator.encode(strategy) if isinstance(strategy, Strategy) else strategy
    reported = evaluator.referee(choice, order).peak_memory_bytes
    tables = evaluator.tables_of(choice)
    kept_values = evaluator.kept_values(tables, choice)
    held = held_bytes(tables, choice)
    inside = evaluator.inside(tables, choice, held)
    resident = _resident_parts(tables, choice)
    by_times = []
    for timings in (evaluator.timings, evaluator.referee_timings):
        program, start, finish = timings(choice, order)
        kinds = _buffer_kinds(program, tables, evaluator.graph)
        # Residuals of codecs' gradients also stay for the whole step, and so does a stash.
        kept = program.resident_bytes - held.resident
        parts = resident.copy()
        kind = MemoryKind.GRADIENTS
        if any(mode.keeps_versions for mode in choice.modes):
            kind = MemoryKind.STASH
        parts[:, _NUMBER[kind]] += kept
        lives = all_lives(program, start, finish, tables, kept_values, inside)
        kinds = np.pad(
            kinds,
            (0, len(lives.end) - len(kinds)),
            constant_values=_NUMBER[MemoryKind.WORKSPACE],
        )
        by_times.append(_parts_at_peak(program, lives, kinds, parts))
    devices = []
    for index, device in enumerate(evaluator.cluster.devices):
        parts = max((tried[index] for tried in by_times), key=lambda each: each.sum())
        whole = np.rint(parts).astype(np.int64)
        whole[_NUMBER[MemoryKind.MARGIN]] = reported[index] - whole.sum()
        devices.append(
            DeviceMemory(
                device=device.name,
                device_type=device.type.name,
                peak_bytes=reported[index],
                usable_bytes=device.usable_memory_bytes,
                parts=tuple(zip(_KINDS, whole.tolist(), strict=True)),
            )
        )
    return Fit(devices=tuple(devices))


def _resident_parts(tables: GraphTables, choice: Choice) -> FloatArray:
    """Bytes of each kind that stay for the whole step.  # [num_devices, num_kinds]

    ``resident_bytes`` is a sum of terms in proportion to each ingredient, so adding one to the
    parameters alone adds exactly its bytes.
    """
    no_workspace = np.zeros_like(tables.parameter_workspace)
    bare = tables._replace(
        state_ratio=0.0,
        common_bytes=0.0,
        input_bytes_per_sample=0.0,
        parameter_workspace=no_workspace,
    )
    ingredients = {
        MemoryKind.OPTIMIZER_STATE: bare._replace(state_ratio=tables.state_ratio),
        MemoryKind.CONSTANTS: bare._replace(common_bytes=tables.common_bytes),
        MemoryKind.BATCH: bare._replace(input_bytes_per_sample=tables.input_bytes_per_sample),
        MemoryKind.WORKSPACE: bare._replace(parameter_workspace=tables.parameter_workspace),
    }
    parameters = resident_bytes(bare, choice)
    parts = np.zeros((len(parameters), len(_KINDS)))
    parts[:, _NUMBER[MemoryKind.PARAMETERS]] = parameters
    for kind, some in ingredients.items():
        parts[:, _NUMBER[kind]] = resident_bytes(some, choice) - parameters
    return parts


def _buffer_kinds(program: Program, tables: GraphTables, graph: OpGraph) -> npt.NDArray[np.int64]:
    """Number of the kind of each buffer.  # [num_buffers]"""
    kinds = np.full(len(program.buffer_maker), _NUMBER[MemoryKind.COMMUNICATION])
    value = value_of_buffers(program, tables)
    by_op = np.flatnonzero(value >= 0)
    value = value[by_op]
    op = tables.value_op[value]
    is_forward = np.array([graph.ops[each].phase == Phase.FORWARD for each in tables.op_id])
    is_gradient = np.zeros(len(tables.value_op), np.bool_)
    is_gradient[tables.parameter_gradient] = True
    kinds[by_op] = np.where(
        is_gradient[value],
        _NUMBER[MemoryKind.GRADIENTS],
        np.where(is_forward[op], _NUMBER[MemoryKind.ACTIVATIONS], _NUMBER[MemoryKind.BACKWARD]),
    )
    return kinds


def _parts_at_peak(
    program: Program,
    lives: Lives,
    kinds: npt.NDArray[np.int64],
    resident: FloatArray,
) -> list[FloatArray]:
    """Bytes of each kind at the peak of each device, without margin."""
    found = []
    sized = np.flatnonzero(lives.num_bytes > 0.0)
    of_device = of_each_device(lives.device[sized], program.num_devices)
    for device, own in enumerate(of_device):
        mine = sized[own]
        sizes = lives.num_bytes[mine]
        times = np.concatenate([lives.begin[mine], lives.end[mine]])
        changes = np.concatenate([sizes, -sizes])
        order = np.lexsort((changes, times))
        totals = np.concatenate([[0.0], np.cumsum(changes[order])])
        upto = int(np.argmax(totals))
        past = order[:upto]  # births and deaths of buffers before the peak
        which = kinds[np.concatenate([mine, mine])[past]]
        found.append(resident[device] + np.bincount(which, changes[past], minlength=len(_KINDS)))
    return found
