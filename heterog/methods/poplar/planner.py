"""Poplar: ZeRO on unequal devices (Zhang et al., AAAI 2025; arXiv 2408.12596).

ZeRO gives every device the same batch; Poplar gives each what its speed and memory allow. Each
stage of ZeRO takes three steps:

1. Find the most samples that fit each device at once, from the liveness of the step's values
   (``samples_that_fit``).
2. Find the seconds of each device over its micro-batch (``seconds_over_samples``): measured if the
   cluster has a calibration, else the roofline's. A few micro-batches are priced, the others
   interpolated. Unlike the paper's cubic splines, the interpolation is monotone (PCHIP, Fritsch
   and Carlson 1980), because it must be inverted.
3. Find the exact allocation (``allocation``). Under stages 0 and 1 devices synchronise once per
   step, so each has its own number of micro-batches; under 2 and 3 they do so in every micro-step,
   so the number is common.

The paper's code is not public: this follows its description, with an exact search in place of its
heuristic. Collectives may or may not hide behind compute; allocations for both cases and even ones
are tried, and the simulator decides. Slices are equal, as in the paper; if memory is short, slices
that leave all devices equal room for samples are tried, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from heterog.cluster.hardware import DeviceType
from heterog.errors import StrategyError
from heterog.graph.op_graph import FloatArray, Phase
from heterog.grouped import grouped
from heterog.lowering.tables import GraphTables, reading_ops
from heterog.memo import kept
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem, StrategySearch
from heterog.methods.poplar.allocation import (
    STAGES,
    Allocation,
    common_steps,
    even_allocation,
    own_micro_batches,
    zero_decision,
    zero_strategy,
)
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator, Outcome
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Sync

_KNOTS_PER_OCTAVE = 2  # micro-batch sizes that are priced; see below


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
    # More samples never take less time: measurements may say so, but a device could pad.
    priced = np.maximum.accumulate(priced).tolist()
    samples = np.arange(1, most + 1)
    if len(knots) == 1:
        return np.array([0.0, priced[0]])
    from scipy.interpolate import PchipInterpolator  # 0.3 s, which ranks need not wait for

    between = PchipInterpolator(knots, priced)(samples)
    return np.concatenate([[0.0], np.maximum.accumulate(between)])


def liveness(tables: GraphTables) -> tuple[FloatArray, FloatArray]:
    """Bytes of live values while each op runs, as a function of a device's samples at once.

    Values live from their maker to their last reader; gradients of parameters are not counted.

    Returns:
        (bytes whatever the samples, bytes of each sample at once).  # [num_ops] each
    """
    num_ops, num_values = len(tables.op_id), len(tables.value_op)
    last = tables.value_op.astype(np.int64).copy()
    np.maximum.at(last, tables.read_value, reading_ops(tables))
    kept = np.ones(num_values, np.bool_)
    kept[tables.parameter_gradient] = False
    rows = []
    for sizes in (tables.value_bytes, tables.value_bytes_per_unit):
        change = np.zeros(num_ops + 1)
        np.add.at(change, tables.value_op[kept], sizes[kept])
        np.add.at(change, last[kept] + 1, -sizes[kept])
        rows.append(np.cumsum(change)[:num_ops])
    return rows[0], rows[1]


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
    fixed, per_sample = liveness(evaluator.tables)
    room = (_usable_bytes(evaluator) - kept)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = np.where(fixed <= room, np.inf, -1.0)  # of ops whose values do not grow
        fits = np.where(per_sample > 0.0, (room - fixed) / per_sample, alone)
    most = np.clip(np.floor(fits.min(axis=1)), 0, evaluator.graph.batch_size)
    return np.asarray(most, np.int64)


def kept_bytes(evaluator: Evaluator, stage: int, bucket_bytes: int) -> tuple[float, float]:
    """(bytes that every device keeps for the step, bytes that the devices divide into slices).

    With P bytes of parameters and r bytes of optimizer state per byte, parameters, gradients and
    state take (2 + r) P bytes (Rajbhandari et al. 2020, section 5, without mixed precision). Stage
    1 divides r P of them, stage 2 (1 + r) P, stage 3 all. Buckets in flight are added.
    """
    tables, cluster = evaluator.tables, evaluator.cluster
    size, state = float(tables.parameter_bytes.sum()), tables.state_ratio
    largest = max(float(tables.parameter_bytes.max(initial=0.0)), float(bucket_bytes))
    largest = min(largest, size)
    divided = {0: 0.0, 1: state, 2: 1.0 + state, 3: 2.0 + state}[stage] * size
    under_way = {0: 0.0, 1: 0.0, 2: 3.0, 3: 6.0}[stage] * largest
    # An even part of the batch; if a larger part does not fit, ``_fitting`` corrects it.
    inputs = evaluator.graph.batch_size / cluster.num_devices * tables.input_bytes_per_sample
    return (2.0 + state) * size - divided + under_way + tables.common_bytes + inputs, divided


def slices_by_memory(evaluator: Evaluator, stage: int) -> tuple[int, ...]:
    """Slices that leave all devices equal room for samples; empty if equal slices do.

    The paper's slices are equal. Let m_d be the room of device d beside undivided bytes and
    samples in proportion to speed. With D bytes to divide, the remaining room L solves
    sum over d of max(m_d - L, 0) = D, and max(m_d - L, 0) is the slice of d. While L is negative,
    the number of micro-steps is doubled.
    """
    whole, divided = kept_bytes(evaluator, stage, DEFAULT_BUCKET_BYTES)
    speeds = np.array(evaluator.speeds)
    samples = evaluator.graph.batch_size * speeds / speeds.sum()
    fixed, per_sample = liveness(evaluator.tables)
    equal = divided / len(samples)
    num_micro = 1
    while True:
        values = (fixed[:, None] + per_sample[:, None] * samples / num_micro).max(0)
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
    # If the k largest rooms are cut to one level, it is right once the next room is below it.
    below = np.append(ordered[1:], -np.inf)
    return float(levels[np.argmax(levels >= below)])


def _usable_bytes(evaluator: Evaluator) -> FloatArray:
    """Memory of each device, less the simulator's margin."""
    usable = [device.usable_memory_bytes for device in evaluator.cluster.devices]
    return np.array(usable, np.float64) / (1.0 + MEMORY_MARGIN)


def micro_step_seconds(evaluator: Evaluator, decision: Decision, stage: int) -> float:
    """Seconds of the collectives that each micro-step repeats, one after another."""
    numbers = evaluator.channels.for_decision(decision)
    if stage < 2 or not numbers:
        return 0.0
    size, model = float(evaluator.tables.parameter_bytes.sum()), evaluator.cost_model
    reduced_s, gathered_s = (
        model.channel_seconds(evaluator.cluster, evaluator.channels[number]).seconds(size)
        for number in numbers
    )
    return reduced_s + 2.0 * gathered_s * (stage == 3)


_MOST_CORRECTIONS = 4  # allocations that are simulated to find one that fits


class Poplar(Planner):
    """ZeRO with unequal batches; see the module docstring.

    Args:
        zero_stage: Stage 0 to 3; by default the planner chooses it.
    """

    name = "poplar"
    stage = "search"

    def __init__(self, zero_stage: int | None = None) -> None:
        if zero_stage is not None and zero_stage not in STAGES:
            raise StrategyError(f"ZeRO has stages 0 to 3, not {zero_stage}.")
        self._stages = STAGES if zero_stage is None else (zero_stage,)

    def plan(self, problem: Problem) -> PlanResult:
        """Allocate for each stage, and keep the fastest."""
        return _Search(problem, self._stages).answer(problem)


class _Search(StrategySearch):
    """Allocations of a problem's batch, simulated.

    Args:
        problem: Problem to find a strategy for.
        stages: Stages of ZeRO to try.
    """

    def __init__(self, problem: Problem, stages: Sequence[int]) -> None:
        super().__init__(problem)
        is_sliced = self.evaluator.graph.updates_elementwise
        self._stages = [stage for stage in stages if stage == 0 or is_sliced]
        self._is_any_stage = tuple(stages) == STAGES
        tables = self.evaluator.tables
        # An op that needs the whole batch cannot be cut into micro-batches.
        self._is_whole = bool(np.any(tables.slot_whole[tables.value_kind[tables.slot_value] == 1]))

    def search(self) -> None:
        """See ``PointSearch``."""
        for stage in self._stages:
            self.try_stage(stage)
        if self._is_any_stage:  # a given stage runs as in the paper
            for stage in (stage for stage in self._stages if stage < 2):
                self.try_fewer(stage)
            self.try_smaller_buckets()

    @property
    def why_nothing(self) -> str:
        """See ``PointSearch``."""
        if not self._stages:
            return f"{self.evaluator.graph.optimizer} cannot update slices of parameters"
        return "no device can hold one sample under any of its stages of ZeRO"

    def try_stage(self, stage: int) -> None:
        """Evaluate a stage's allocations: Poplar's, even ones, and Poplar's on uneven slices."""
        equal: tuple[int, ...] = ()
        tried = [(each, equal) for each in self._allocations(stage, equal)]
        tried += [(each, equal) for each in self._even_that_fits(stage)]
        slices = slices_by_memory(self.evaluator, stage)
        if slices:
            tried += [(each, slices) for each in self._allocations(stage, slices)]
        for micro_batches, sliced in dict.fromkeys(tried):
            for bucket_bytes in (DEFAULT_BUCKET_BYTES, 0):
                strategy = zero_strategy(
                    self.problem, stage, micro_batches, sliced, bucket_bytes=bucket_bytes
                )
                for order in self.problem.orders:
                    self.ask((strategy, order))

    def try_fewer(self, stage: int) -> None:
        """Evaluate a stage without the slowest types of devices, and with a copy on each host.

        Beyond the paper: if steps are so short that hosts limit them, a device may slow down the
        sums of gradients by more than it computes.
        """
        evaluator = self.evaluator
        cluster, batch = evaluator.cluster, evaluator.graph.batch_size
        each = max(1, batch // cluster.num_devices)
        of_type = [
            float(evaluator.prices.op_seconds(kind, each).sum())
            for kind in range(len(cluster.device_types))
        ]
        seconds = [of_type[kind] for kind in cluster.type_index]
        for limit in sorted(set(seconds)):
            devices = tuple(d for d, taken in enumerate(seconds) if taken <= limit)
            if len(devices) > batch:
                break
            shares = split_in_proportion(batch, [1.0 / seconds[device] for device in devices])
            for groups in self._slice_groups(stage, devices):
                decision = Decision(
                    devices=devices,
                    shares=shares,
                    sync=Sync.of_stage(stage) if stage else Sync.RING,
                    slice_groups=groups,
                )
                strategy = uniform_strategy(
                    evaluator,
                    decision,
                    bucket_bytes=DEFAULT_BUCKET_BYTES,
                    step_barrier=self.problem.step_barrier,
                )
                self.ask((strategy, self.problem.orders[0]))

    def try_smaller_buckets(self) -> None:
        """Halve the best strategy's buckets while that helps: the last one is summed at the end.

        Beyond the paper: the sums of the last bucket hide behind no backward pass.
        """
        for strategy, order in self.best(1):
            while size := strategy.bucket_bytes // 2:
                smaller = replace(strategy, bucket_bytes=size)
                self.ask((smaller, order))
                if self.best(1) != [(smaller, order)]:
                    return
                strategy = smaller

    def _slice_groups(
        self, stage: int, devices: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        """No slice groups; then one group for each host, if there are several of equal size."""
        yield ()
        host_of = self.evaluator.cluster.host_of
        groups = grouped((host_of[device], device) for device in devices)
        sizes = {len(group) for group in groups.values()}
        if stage and len(groups) > 1 and len(sizes) == 1 and max(sizes) > 1:
            yield tuple(map(tuple, groups.values()))

    def _allocations(self, stage: int, slices: tuple[int, ...]) -> Iterator[Allocation]:
        """Allocations with the full time of collectives, and with collectives hidden."""
        whole = zero_decision(self.evaluator, stage, even_allocation(self.evaluator, 1), slices)
        full_s = micro_step_seconds(self.evaluator, whole, stage)
        for step_s in dict.fromkeys((full_s, 0.0)):
            allocation = self._fitting(stage, slices, step_s)
            if allocation is not None:
                yield allocation

    def _fitting(self, stage: int, slices: tuple[int, ...], step_s: float) -> Allocation | None:
        """An allocation that fits by the simulator, which is more exact than the memory model.

        Devices that overflow get fewer samples; devices at their limit that have room get more.
        """
        evaluator = self.evaluator
        most = samples_that_fit(evaluator, stage, slices)
        slope = max(float(liveness(evaluator.tables)[1].max(initial=0.0)), 1.0)
        usable = np.array([d.usable_memory_bytes for d in evaluator.cluster.devices], np.float64)
        last: Allocation | None = None
        fitting: Allocation | None = None
        for _ in range(_MOST_CORRECTIONS):
            found = self._solve(stage, most, step_s)
            if found is None:
                break
            last = found
            strategy = zero_strategy(self.problem, stage, found, slices)
            evaluation = self.ask((strategy, self.problem.orders[0]))
            if evaluation is None or evaluation.outcome == Outcome.TOO_LARGE:
                break
            taken = np.array([max(sizes) for sizes in found])
            room = (usable - np.array(evaluation.peak_memory_bytes)) / slope
            if evaluation.is_ok:
                fitting = found
                more = np.where(taken >= most, np.maximum(np.floor(room), 0.0), 0.0)
                if not more.any():
                    break
                most = np.minimum(most + more, evaluator.graph.batch_size).astype(int)
            elif fitting is not None:
                break
            else:
                fewer = np.maximum(np.minimum(most, taken) - np.ceil(-room), 0.0)
                most = np.where(room < 0.0, fewer, most).astype(int)
        return fitting or last

    def _solve(self, stage: int, most: npt.NDArray[np.int64], step_s: float) -> Allocation | None:
        self.spending.check()
        evaluator, batch = self.evaluator, self.evaluator.graph.batch_size
        kinds = [device.type for device in evaluator.cluster.devices]
        curves = [self._curve(kind, int(limit)) for kind, limit in zip(kinds, most, strict=True)]
        if stage < 2:
            found = own_micro_batches(curves, batch)
        else:
            found = common_steps(curves, batch, step_s)
        if found is None or (self._is_whole and len(found[1][0]) > 1):
            return None
        return found[1]

    @kept
    def _curve(self, kind: DeviceType, most: int) -> FloatArray:
        """Seconds of a type of device over samples, priced once for all devices of the type."""
        return seconds_over_samples(self.evaluator, kind, most)

    def _even_that_fits(self, stage: int) -> Iterator[Allocation]:
        """ZeRO without Poplar: equal shares, in as few micro-steps as fit."""
        num_micro = 1
        most = min(map(max, even_allocation(self.evaluator, 1)), default=1)
        while True:
            allocation = even_allocation(self.evaluator, num_micro)
            strategy = zero_strategy(self.problem, stage, allocation)
            evaluation = self.ask((strategy, self.problem.orders[0]))
            if evaluation is None or evaluation.is_ok or self._is_whole or num_micro >= most:
                yield allocation
                return
            num_micro = min(2 * num_micro, most)


class EvenZero(Planner):
    """ZeRO as it is used on equal devices: the baseline of Poplar's tables, not a built-in method.

    Args:
        zero_stage: Stage 0 to 3.
        num_micro: Number of micro-steps; by default the fewest that fit.
    """

    stage = "baseline"

    def __init__(self, zero_stage: int, num_micro: int | None = None) -> None:
        self.name = f"even_zero{zero_stage}"
        self._stage = zero_stage
        self._num_micro = num_micro

    def plan(self, problem: Problem) -> PlanResult:
        """Try equal shares in micro-steps."""
        search = _Search(replace(problem, orders=(Order.FIFO,)), (self._stage,))
        if self._num_micro is None:
            (allocation,) = search._even_that_fits(self._stage)
        else:
            allocation = even_allocation(problem.evaluator, self._num_micro)
        strategy = zero_strategy(problem, self._stage, allocation)
        return PlanResult(
            candidates=(Candidate(strategy=strategy, orders=(Order.FIFO,)),),
            num_evaluations=search.spending.evaluations,
        )
