"""Poplar's data about each device: the samples that fit, and seconds over samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterog.cluster.hardware import DeviceType
from heterog.graph.op_graph import FloatArray, Phase
from heterog.lowering.channels import Channel
from heterog.lowering.tables import GraphTables
from heterog.methods.data_parallel import device_speeds
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.feasibility import MEMORY_MARGIN
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision

_KNOTS_PER_OCTAVE = 2


def seconds_over_samples(evaluator: Evaluator, device_type: DeviceType, most: int) -> FloatArray:
    """Seconds of a forward and backward pass on 0 to ``most`` samples at once.

    Priced at two micro-batches per octave and interpolated monotonically between them.
    """
    if most == 0:
        return np.zeros(1)
    graph = evaluator.graph
    computes = np.array([op.phase != Phase.UPDATE for op in graph.ops], np.bool_)
    octaves = np.arange(0.0, np.log2(most), 1.0 / _KNOTS_PER_OCTAVE)
    knots = np.unique([*np.rint(2.0**octaves).astype(int), most])
    priced = [
        float(evaluator.cost_model.op_seconds(graph, device_type, int(knot))[computes].sum())
        for knot in knots
    ]
    # More samples never take less: measurements may differ, but a device could pad.
    priced = np.maximum.accumulate(priced).tolist()
    samples = np.arange(1, most + 1)
    if len(knots) == 1:
        return np.array([0.0, priced[0]])
    from scipy.interpolate import PchipInterpolator  # 0.3 s, which ranks need not wait for

    between = PchipInterpolator(knots, priced)(samples)
    return np.concatenate([[0.0], np.maximum.accumulate(between)])


@dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes of values that are alive at once, over the samples that a device has at once.

    While op r runs they are ``fixed[r] + samples x per_sample[r]`` bytes.
    """

    fixed: FloatArray
    per_sample: FloatArray

    def most_samples(self, room_bytes: float, limit: int) -> int:
        """Most samples whose values fit into some room, at most ``limit``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(
                self.per_sample > 0.0,
                (room_bytes - self.fixed) / self.per_sample,
                np.where(self.fixed <= room_bytes, np.inf, -1.0),
            )
        return int(np.clip(np.floor(fits.min()), 0, limit))


def liveness(tables: GraphTables) -> Liveness:
    """Bytes alive from each value's maker to its last reader, without parameters' gradients."""
    num_ops, num_values = len(tables.op_id), len(tables.value_op)
    last = tables.value_op.astype(np.int64).copy()
    reader = np.repeat(np.arange(num_ops), np.diff(tables.read_start))
    np.maximum.at(last, tables.read_value, reader)
    kept = np.ones(num_values, np.bool_)
    kept[tables.parameter_gradient] = False
    rows = []
    for sizes in (tables.value_bytes, tables.value_bytes_per_unit):
        change = np.zeros(num_ops + 1)
        np.add.at(change, tables.value_op[kept], sizes[kept])
        np.add.at(change, last[kept] + 1, -sizes[kept])
        rows.append(np.cumsum(change)[:num_ops])
    return Liveness(*rows)


def samples_that_fit(
    evaluator: Evaluator,
    stage: int,
    slices: Sequence[int] = (),
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> npt.NDArray[np.int64]:
    """Most samples at once on each device, if all devices accumulate gradients.

    Args:
        evaluator: Evaluator of the graph and cluster.
        stage: Stage of ZeRO.
        slices: Relative slice of each device; empty for equal ones.
        bucket_bytes: Bytes of a bucket of the collectives.
    """
    whole, divided = kept_bytes(evaluator, stage, bucket_bytes)
    weights = np.array(slices or [1] * evaluator.cluster.num_devices, np.float64)
    kept = whole + divided * weights / weights.sum()
    alive = liveness(evaluator.tables)
    return np.array(
        [
            alive.most_samples(room, evaluator.graph.batch_size)
            for room in (_usable_bytes(evaluator) - kept).tolist()
        ]
    )


def kept_bytes(evaluator: Evaluator, stage: int, bucket_bytes: int) -> tuple[float, float]:
    """(bytes that every device keeps for the step, bytes that the devices divide into slices).

    With P bytes of parameters and r bytes of optimizer state per byte, (2 + r) P are kept in all:
    parameters, gradients and state (Rajbhandari et al. 2020, section 5, without mixed precision).
    Divided are r P of them under stage 1, (1 + r) P under 2 and all under 3. The buckets that are
    under way come on top.
    """
    tables, cluster = evaluator.tables, evaluator.cluster
    size, state = float(tables.parameter_bytes.sum()), tables.state_ratio
    largest = max(float(tables.parameter_bytes.max(initial=0.0)), float(bucket_bytes))
    largest = min(largest, size)
    divided = {0: 0.0, 1: state, 2: 1.0 + state, 3: 2.0 + state}[stage] * size
    under_way = {0: 0.0, 1: 0.0, 2: 3.0, 3: 6.0}[stage] * largest
    # Of the batch itself an even part; larger parts are corrected when they do not fit.
    inputs = evaluator.graph.batch_size / cluster.num_devices * tables.input_bytes_per_sample
    return (2.0 + state) * size - divided + under_way + tables.common_bytes + inputs, divided


def slices_by_memory(evaluator: Evaluator, stage: int) -> tuple[int, ...]:
    """Slices that leave all devices equal room for samples; empty if equal slices do.

    The paper's slices are equal. Let device d have room m_d beside what it keeps whole and its
    samples, shared out by speed. With D bytes to divide, the room L that is left solves
    sum over d of max(m_d - L, 0) = D, and max(m_d - L, 0) is the slice of d. As long as L is
    negative, there are twice as many micro-steps.
    """
    whole, divided = kept_bytes(evaluator, stage, DEFAULT_BUCKET_BYTES)
    speeds = np.array(device_speeds(evaluator))
    samples = evaluator.graph.batch_size * speeds / speeds.sum()
    alive = liveness(evaluator.tables)
    equal = divided / len(samples)
    num_micro = 1
    while True:
        values = (alive.fixed[:, None] + alive.per_sample[:, None] * samples / num_micro).max(0)
        room = _usable_bytes(evaluator) - whole - values
        if not divided or (num_micro == 1 and room.min() >= equal):
            return ()
        parts = np.maximum(room - room_left(room, divided), 0.0)
        if (room >= parts).all() or samples.max() <= num_micro:
            break
        num_micro *= 2
    slices = np.rint(parts / parts.sum() * 1000.0 * len(parts)).astype(int).tolist()
    return () if len(set(slices)) == 1 else tuple(slices)


def room_left(room: FloatArray, divided: float) -> float:
    """The L at which sum over d of max(room_d - L, 0) is ``divided``."""
    ordered = np.sort(room)[::-1]
    levels = (np.cumsum(ordered) - divided) / np.arange(1, len(ordered) + 1)
    # With the k highest cut to one level, that level is the right one if the next is below it.
    below = np.append(ordered[1:], -np.inf)
    return float(levels[np.argmax(levels >= below)])


def _usable_bytes(evaluator: Evaluator) -> FloatArray:
    """Memory of each device, less the simulator's margin."""
    usable = [device.usable_memory_bytes for device in evaluator.cluster.devices]
    return np.array(usable, np.float64) / (1.0 + MEMORY_MARGIN)


def micro_step_seconds(evaluator: Evaluator, decision: Decision, stage: int) -> float:
    """Seconds of the collectives that each micro-step repeats, one after another."""
    first, second = evaluator.channels.for_decision(decision)
    size = float(evaluator.tables.parameter_bytes.sum())

    def seconds(channel: Channel) -> float:
        cost = evaluator.cost_model.channel_seconds(evaluator.cluster, channel)
        return cost.latency(size) + size * cost.seconds_per_byte

    if stage < 2 or first < 0:
        return 0.0
    channels = evaluator.channels
    gathers = 2.0 * seconds(channels[second]) if stage == 3 else 0.0
    return seconds(channels[first]) + gathers
