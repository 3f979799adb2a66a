"""What Poplar knows about each device: samples that fit it, seconds over samples."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator

from heterog.cluster.topology import DeviceType
from heterog.graph.op_graph import FloatArray, Phase
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator
from heterog.strategy.channels import Channel
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision
from heterog.strategy.tables import GraphTables

_KNOTS_PER_OCTAVE = 2


def seconds_over_samples(evaluator: Evaluator, kind: DeviceType, most: int) -> FloatArray:
    """Seconds of forward and backward pass on 0 to ``most`` samples at once.

    Priced at two micro-batches per octave and interpolated monotonically between them.
    """
    if most == 0:
        return np.zeros(1)
    graph = evaluator.graph
    computes = np.array([op.phase != Phase.UPDATE for op in graph.ops], np.bool_)
    octaves = np.arange(0.0, np.log2(most), 1.0 / _KNOTS_PER_OCTAVE)
    knots = np.unique([*np.rint(2.0**octaves).astype(int), most])
    priced = [
        float(evaluator.cost_model.op_seconds(graph, kind, int(knot))[computes].sum())
        for knot in knots
    ]
    # More samples are never faster: measurements may say so, but a device could pad.
    priced = np.maximum.accumulate(priced).tolist()
    samples = np.arange(1, most + 1)
    if len(knots) == 1:
        return np.array([0.0, priced[0]])
    between = PchipInterpolator(knots, priced)(samples)
    return np.concatenate([[0.0], np.maximum.accumulate(between)])


@dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes of values that are alive at once, over the samples that a device has at once.

    While op r runs they are ``fixed[r] + samples x per_sample[r]``.
    """

    fixed: FloatArray
    per_sample: FloatArray

    def most_samples(self, room_bytes: float, limit: int) -> int:
        """The most samples whose values fit into some room, at most ``limit``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(
                self.per_sample > 0.0,
                (room_bytes - self.fixed) / self.per_sample,
                np.where(self.fixed <= room_bytes, np.inf, -1.0),
            )
        return int(np.clip(np.floor(fits.min()), 0, limit))


def liveness(tables: GraphTables) -> Liveness:
    """Values by the ops that make them and read them last; gradients of parameters apart."""
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
    evaluator: Evaluator, stage: int, num_owners: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> npt.NDArray[np.int64]:
    """The most samples at once on each device, if all of them accumulate gradients.

    With P bytes of parameters, r bytes of optimizer state per byte and n devices, a device keeps
    (2 + r) P under stage 0, (2 + r / n) P under 1, (1 + (1 + r) / n) P under 2 and
    (2 + r) P / n under 3 (Rajbhandari et al. 2020, section 5, without mixed precision), and the
    buckets that are under way.
    """
    tables, cluster = evaluator.tables, evaluator.cluster
    size, state = float(tables.parameter_bytes.sum()), tables.state_ratio
    largest = max(float(tables.parameter_bytes.max(initial=0.0)), float(bucket_bytes))
    largest = min(largest, size)
    kept = {
        0: (2.0 + state) * size,
        1: (2.0 + state / num_owners) * size,
        2: (1.0 + (1.0 + state) / num_owners) * size + 3.0 * largest,
        3: (2.0 + state) / num_owners * size + 6.0 * largest,
    }[stage]
    alive = liveness(tables)
    batch = evaluator.graph.batch_size
    # Of the batch itself an even part: who takes more is corrected when it does not fit.
    kept += tables.common_bytes + batch / cluster.num_devices * tables.input_bytes_per_sample
    return np.array(
        [
            alive.most_samples(device.usable_memory_bytes / (1.0 + MEMORY_MARGIN) - kept, batch)
            for device in cluster.devices
        ]
    )


def micro_step_seconds(evaluator: Evaluator, decision: Decision, stage: int) -> float:
    """Seconds of the collectives that each micro-step repeats, one after another."""
    first, second = evaluator.channels.for_decision(decision)
    size = float(evaluator.tables.parameter_bytes.sum())

    def seconds(channel: Channel) -> float:
        cost = evaluator.cost_model.channel_seconds(evaluator.cluster, channel)
        return cost.latency_s + size * cost.seconds_per_byte

    if stage < 2 or first < 0:
        return 0.0
    channels = evaluator.channels.channels
    gathers = 2.0 * seconds(channels[second]) if stage == 3 else 0.0
    return seconds(channels[first]) + gathers
