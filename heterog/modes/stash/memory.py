"""What a stash keeps on each device, beside what a step needs on its own."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterog.lowering.choice import Choice
from heterog.lowering.program import FIRST_LINK_KIND, FloatArray, IntArray
from heterog.lowering.resident import resident_bytes
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, Tape
from heterog.modes.mode import EncodedMode
from heterog.modes.stash.phases import is_of_backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedStash(EncodedMode):
    """Stage of each device, and the micro-batches by which it is behind.

    Attributes:
        stage: Stage of each device, -1 for none.  # [num_devices]
        behind: Number of micro-batches.  # [num_devices]
    """

    folds = False
    keeps_versions = True

    stage: IntArray
    behind: IntArray

    def kept_bytes(self, tape: Tape, tables: GraphTables, choice: Choice) -> FloatArray:
        """Bytes that the stash adds to each device."""
        return stash_bytes(tape, tables, choice, self)


def encoded_stash(choice: Choice) -> EncodedStash:
    """The stash of a choice that has one."""
    return next(mode for mode in choice.modes if isinstance(mode, EncodedStash))


def stash_bytes(
    tape: Tape, tables: GraphTables, choice: Choice, stash: EncodedStash
) -> FloatArray:
    """Bytes that a stash adds to each device.

    A device that is D micro-batches of m behind keeps ceil(D / m) more versions of its weights,
    and what D more micro-batches have left for their backward passes. The newest batch has come
    when the oldest of these D + 1 begins its backward pass: that is its own samples of
    ceil((D + 1) / m) more batches. Messages come before they are needed, too: gradients of one
    micro-batch, and inputs of one, or of two of the same batch.

    Args:
        tape: Tape of one step, whose micro-batches come one after another.
        tables: The graph's tables.
        choice: The choice that it was lowered from.
        stash: The stash.

    Returns:
        # [num_devices]
    """
    holds = choice.member[choice.division[tables.parameter_group]]
    weights = (tables.parameter_bytes[:, None] * holds).sum(0)
    without = resident_bytes(tables._replace(input_bytes_per_sample=0.0), choice)
    batch = resident_bytes(tables, choice) - without
    tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
    reads, buffers = tape.reads[: tape.counts[NUM_READS]], tape.buffers[: tape.counts[NUM_BUFFERS]]
    is_late = is_of_backward(tasks["kind"], tasks["subject"], tables)
    ends = np.append(tasks["read_start"], tape.counts[NUM_READS])
    is_read_late = np.zeros(len(buffers), np.bool_)
    is_read_late[reads[np.repeat(is_late, np.diff(ends))]] = True
    maker = buffers["maker"]
    is_saved = is_read_late & ~is_late[maker]
    source, target = source_stages(tape, stash.stage), _stage(stash.stage, tasks["device"])
    is_message = tasks["kind"] >= FIRST_LINK_KIND
    comes, is_gradient = (is_message & (target >= 0) & (source != target))[maker], is_late[maker]
    micro, count = tasks["micro"][maker], choice.num_micro
    saved = _by_micro_batch(buffers, micro, is_saved, (count, len(weights)))
    whole, more = np.divmod(stash.behind, count)
    kept = whole * saved.sum(0) + more * saved.max(0)
    kept += (whole + (more > 0)) * weights + (whole + 1) * batch
    inputs = _by_micro_batch(buffers, micro, comes & ~is_gradient, saved.shape)
    gradients = _by_micro_batch(buffers, micro, comes & is_gradient, saved.shape)
    early = min(count, 2) * inputs.max(0) + gradients.max(0)
    return np.asarray(kept + early, np.float64)


def _by_micro_batch(
    buffers: npt.NDArray[np.void],
    micro: IntArray,
    chosen: npt.NDArray[np.bool_],
    shape: tuple[int, int],
) -> FloatArray:
    """Bytes of some buffers by micro-batch and device.

    Args:
        buffers: Buffers of a tape.  # [num_buffers]
        micro: Micro-batch of each.  # [num_buffers]
        chosen: Whether each counts.  # [num_buffers]
        shape: Numbers of micro-batches and devices.

    Returns:
        # [num_micro, num_devices]
    """
    here = chosen & (buffers["device"] >= 0)
    key = micro[here] * shape[1] + buffers["device"][here]
    sizes = np.bincount(key, buffers["num_bytes"][here], shape[0] * shape[1])
    return np.asarray(sizes, np.float64).reshape(shape)


def source_stages(tape: Tape, stage: IntArray) -> IntArray:
    """Stage of the device whose buffer each task reads first, -1 for none.  # [num_tasks]"""
    count = int(tape.counts[NUM_TASKS])
    starts = np.append(tape.tasks["read_start"][:count], tape.counts[NUM_READS])
    found = np.full(count, -1, np.int32)
    has_reads = np.diff(starts) > 0
    first = tape.reads[starts[:-1][has_reads]]
    found[has_reads] = _stage(stage, tape.buffers["device"][first])
    return found


def _stage(stage: IntArray, device: IntArray) -> IntArray:
    """Stage of each device of an array, -1 for no device."""
    return np.append(stage, np.int32(-1))[device]
