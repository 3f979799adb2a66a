"""The table of candidate decisions that a policy chooses from: device set x shares x sync.

Device sets come from ``simulator.space.device_sets`` (singles, hosts, types, unions of hosts,
all; at most 256). On each set the batch is divided by three rules, gradients are synchronised in
four ways, and rows with the same meaning are kept once. A second table is for models whose
parameters and optimizer state alone fill most devices: there, the devices of a set divide the
optimizer state (ZeRO-1), or leave it to parameter servers. The rules:

- *even*: equal shares;
- *proportional*: shares proportional to the devices' speeds on the whole model;
- *solved*: the shares that minimise the time of the slowest device, by each device's curve of
  seconds over samples, with no more samples than a device's memory holds if it held every group.
  Left out if they differ from the proportional shares by at most 2 % of the batch or a sample.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from heterog.envs.coarse import CoarseEvaluator
from heterog.lowering.channels import balanced_slices
from heterog.lowering.program import FloatArray
from heterog.lowering.tables import saved_values
from heterog.simulator.space import device_sets
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.strategy import Decision, Sync

MAX_CANDIDATES = 256
"""Most rows of a table; singles come first, then device sets in the order of ``device_sets``. From
longer tables, even shares of unions of hosts are dropped first, then the last rows."""

FULL = 0.8
"""Part of a device's memory above which parameters and optimizer state leave too little room."""

_GRID = 9  # numbers of samples at which the whole model is priced for solved shares


def candidate_table(
    evaluator: CoarseEvaluator, memory: "ModelMemory", *, divide: bool = False
) -> tuple[Decision, ...]:
    """The candidate decisions for a graph on a cluster, in a fixed order.

    Args:
        evaluator: Evaluator of the graph and cluster.
        memory: Memory of the whole model, for solved shares.
        divide: Whether the devices of a set divide the optimizer's state.
    """
    cluster, batch = evaluator.cluster, evaluator.graph.batch_size
    speeds = evaluator.speeds
    solver = _ShareSolver(evaluator, memory)
    sets = device_sets(cluster)
    rows = [Decision(devices=d, shares=(batch,)) for d in sorted(sets) if len(d) == 1]
    optional: set[Decision] = set()
    hosts = set(cluster.host_devices)
    for number, devices in enumerate(sets):
        if len(devices) == 1 or len(devices) > batch:
            continue
        proportional = split_in_proportion(batch, tuple(speeds[device] for device in devices))
        even = split_evenly(batch, len(devices))
        solved = solver.solve(devices)
        shares = dict.fromkeys((proportional, even))  # the same on equal devices
        if max(abs(a - b) for a, b in zip(solved, proportional, strict=True)) > max(
            0.02 * batch, 1
        ):
            shares.setdefault(solved)
        ways = _syncs(evaluator, devices, divide=divide)
        for part in shares:
            for sync, slices in ways:
                decision = Decision(devices=devices, shares=part, sync=sync, slices=slices)
                rows.append(decision)
                if part == even != proportional and number > 0 and devices not in hosts:
                    optional.add(decision)
        if len(rows) - len(optional) >= MAX_CANDIDATES:
            break
    if len(rows) > MAX_CANDIDATES:
        rows = [decision for decision in rows if decision not in optional]
    return tuple(rows[:MAX_CANDIDATES])


def _syncs(
    evaluator: CoarseEvaluator, devices: tuple[int, ...], *, divide: bool
) -> list[tuple[Sync, tuple[int, ...]]]:
    """Synchronisations with different link loads on a device set, with their slices."""
    if divide:
        slices = balanced_slices(evaluator.cluster, devices)
        return [(Sync.ZERO1, slices), (Sync.PARAMETER_SERVER, ())]
    found: dict[object, tuple[Sync, tuple[int, ...]]] = {}
    for sync in Sync:
        if sync.is_sharded:  # only in the second table
            continue
        slices = ()
        if sync.takes_slices:
            slices = balanced_slices(evaluator.cluster, devices)
        key = traffic_of(evaluator, Decision(
            devices=devices, shares=(1,) * len(devices), sync=sync, slices=slices
        ))  # fmt: skip
        found.setdefault(key, (sync, slices))
    return list(found.values())


def traffic_of(evaluator: CoarseEvaluator, decision: Decision) -> tuple[tuple[int, float], ...]:
    """Rounded bytes through each link per byte of gradient, as a key for comparisons."""
    table = evaluator.channels
    load: dict[int, float] = {}
    for number in table.for_decision(decision):
        for resource, multiple in table[number].traffic().items():
            load[resource] = load.get(resource, 0.0) + multiple
    if not load:
        return ((-1, float(decision.sync)),)
    return tuple(sorted((resource, round(multiple, 3)) for resource, multiple in load.items()))


class ModelMemory:
    """Memory of a graph's blocks, from the tables alone.

    Attributes:
        state_bytes: Parameters and optimizer state of each block.  # [num_blocks]
        gradient_bytes: Gradients of each block.  # [num_blocks]
        saved_bytes: Bytes kept from forward to backward for any share.  # [num_blocks]
        saved_bytes_per_sample: Bytes kept per sample of the share.  # [num_blocks]
        passed_bytes_per_sample: The part of these bytes that other blocks read, too; it is kept
            if the block recomputes.  # [num_blocks]
        inner_bytes_per_sample: Most temporary bytes per sample of any op of a block.
        usable_bytes: Usable memory of each device.  # [num_devices]
        state_ratio: Bytes of optimizer state per byte of parameters.
    """

    def __init__(self, evaluator: CoarseEvaluator) -> None:
        tables = evaluator.tables
        blocks = tables.num_groups
        is_saved = saved_values(tables)
        block = tables.op_group[tables.value_op]
        kept = is_saved & (block >= 0)
        self.gradient_bytes = np.bincount(tables.parameter_group, tables.parameter_bytes, blocks)
        self.state_bytes = self.gradient_bytes * (1.0 + tables.state_ratio)
        self.saved_bytes = np.bincount(block[kept], tables.value_bytes[kept], blocks)
        self.saved_bytes_per_sample = np.bincount(
            block[kept], tables.value_bytes_per_unit[kept], blocks
        )
        is_passed = kept & (np.diff(tables.value_slot_start) > 0)
        self.passed_bytes_per_sample = np.bincount(
            block[is_passed], tables.value_bytes_per_unit[is_passed], blocks
        )
        # All outputs of an op that are not saved are alive at once while it runs.
        passing = np.where(is_saved, 0.0, tables.value_bytes_per_unit)
        by_op = np.bincount(tables.value_op, passing, len(tables.op_id))
        self.inner_bytes_per_sample = np.zeros(blocks)
        owned = tables.op_group >= 0
        np.maximum.at(self.inner_bytes_per_sample, tables.op_group[owned], by_op[owned])
        self.usable_bytes = np.array(
            [float(device.usable_memory_bytes) for device in evaluator.cluster.devices]
        )
        self.common_bytes = float(tables.common_bytes)
        self.state_ratio = float(tables.state_ratio)
        self.input_bytes_per_sample = float(tables.input_bytes_per_sample)

    def overfills(self, decisions: Sequence[Decision]) -> bool:
        """Whether, for most decisions, the state of all blocks (nearly) fills a device."""
        state = self.state_bytes.sum() + self.common_bytes
        full = [state > FULL * self.usable_bytes[list(d.devices)].min() for d in decisions]
        return bool(np.mean(full) > 0.5)

    def state_part(self, decision: Decision) -> float:
        """Part of parameters and optimizer state that each device of a decision holds."""
        if not (decision.sync.is_sharded or decision.sync.is_served):
            return 1.0
        return (1.0 + self.state_ratio / len(decision.devices)) / (1.0 + self.state_ratio)

    def most_samples(self, device: int) -> float:
        """Number of samples that fit on a device that holds every block."""
        per_sample = (
            self.saved_bytes_per_sample.sum()
            + self.inner_bytes_per_sample.max()
            + self.input_bytes_per_sample
        )
        fixed = self.state_bytes.sum() + self.common_bytes + self.saved_bytes.sum()
        free = 0.95 * self.usable_bytes[device] - fixed
        return max(float(free / max(per_sample, 1.0)), 0.0)


class _ShareSolver:
    """Finds shares that minimise the slowest device's seconds."""

    def __init__(self, evaluator: CoarseEvaluator, memory: ModelMemory) -> None:
        batch = evaluator.graph.batch_size
        self.batch = batch
        self.type_of = np.array(evaluator.cluster.type_index)
        self.samples = np.unique(np.geomspace(1, batch, _GRID).round().astype(int))
        self.seconds = [
            np.maximum.accumulate(
                [evaluator.prices.op_seconds(k, int(s)).sum() for s in self.samples]
            )
            for k in range(len(evaluator.cluster.device_types))
        ]
        every = range(evaluator.cluster.num_devices)
        self.limit = np.array([memory.most_samples(device) for device in every])

    def solve(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Number of samples for each device."""
        types, limits = self.type_of[list(devices)], self.limit[list(devices)]
        if limits.sum() < self.batch:  # no shares fit: divide by speed alone
            limits[:] = self.batch
        low, high = 0.0, max(float(self.seconds[kind][-1]) for kind in set(types.tolist()))
        for _ in range(40):
            middle = 0.5 * (low + high)
            if self._within(types, limits, middle).sum() >= self.batch:
                high = middle
            else:
                low = middle
        exact = np.maximum(self._within(types, limits, high), 1e-9)
        return split_in_proportion(self.batch, tuple(exact.tolist()))

    def _within(
        self, types: npt.NDArray[np.intp], limits: FloatArray, seconds: float
    ) -> FloatArray:
        """Number of samples that each device can process in some seconds."""
        done = [np.interp(seconds, curve, self.samples, left=0.0) for curve in self.seconds]
        return np.asarray(np.minimum(np.array(done)[types], limits), np.float64)
