"""Poplar: ZeRO on unequal devices (Zhang et al., AAAI 2025; arXiv 2408.12596).

ZeRO gives every device the same batch; Poplar gives each what its speed and memory allow. For each
stage of ZeRO:

1. The most samples that fit each device at once, from the liveness of the step's values
   (``curves``).
2. Seconds of each device over its micro-batch: measured if the cluster has a calibration, else the
   roofline's. A few micro-batches are priced and interpolated. Unlike the paper's cubic splines
   the interpolation is monotone (PCHIP, Fritsch and Carlson 1980), for it must be inverted.
3. The allocation, exactly (``allocation``): under stages 0 and 1 devices meet once per step, so
   each has its own micro-batches; under 2 and 3 once per micro-step, so the number is common.

The paper's own code is not public: this follows its description, with an exact search in place of
its heuristic. Collectives may hide behind compute or not; allocations for both are tried, beside
even ones, and the simulator decides. Slices are equal, as in the paper, and where memory is short
also such that the devices are left alike room for samples.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from heterog.cluster.hardware import DeviceType
from heterog.errors import StrategyError
from heterog.graph.op_graph import FloatArray
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem
from heterog.methods.poplar.allocation import Allocation, common_steps, own_micro_batches
from heterog.methods.poplar.curves import (
    liveness,
    micro_step_seconds,
    samples_that_fit,
    seconds_over_samples,
    slices_by_memory,
)
from heterog.methods.poplar.zero import (
    STAGES,
    even_allocation,
    zero_decision,
    zero_strategy,
)
from heterog.simulator.engine import Order
from heterog.simulator.evaluation import Evaluation, Outcome
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy, Sync

NUM_RETURNED = 4
"""Number of strategies handed to the referee."""

_MOST_CORRECTIONS = 4


class Poplar(Planner):
    """ZeRO with unequal batches; see the module docstring.

    Args:
        zero_stage: Stage 0 to 3; by default the planner chooses it.
        name: Name in the registry and in tables.
    """

    stage = "search"

    def __init__(self, zero_stage: int | None = None, name: str = "poplar") -> None:
        if zero_stage is not None and zero_stage not in STAGES:
            raise StrategyError(f"ZeRO has stages 0 to 3, not {zero_stage}.")
        self.name = name
        self._stages = STAGES if zero_stage is None else (zero_stage,)

    def plan(self, problem: Problem) -> PlanResult:
        """Allocate for each stage, and keep the fastest."""
        search = _Search(problem)
        elementwise = problem.evaluator.graph.updates_elementwise
        stages = [stage for stage in self._stages if stage == 0 or elementwise]
        with search.spending.limits():
            for stage in stages:
                search.try_stage(stage)
            if self._stages == STAGES:  # a given stage is asked for as the paper has it
                for stage in (stage for stage in stages if stage < 2):
                    search.try_fewer(stage)
        reason = ""
        if not search.tried:
            reason = (
                f"{problem.evaluator.graph.optimizer} cannot update slices of parameters"
                if not stages
                else "no device can hold one sample under any of its stages of ZeRO"
            )
        return PlanResult(
            candidates=search.best(),
            num_evaluations=search.spending.evaluations,
            reason=reason,
        )


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.evaluator = problem.evaluator
        self.spending = problem.spend()
        self.tried: dict[tuple[Strategy, Order], Evaluation | None] = {}
        self._curves: dict[tuple[DeviceType, int], FloatArray] = {}
        tables = self.evaluator.tables
        # An op that needs the whole batch cannot be cut into micro-batches.
        self._is_whole = bool(np.any(tables.slot_whole[tables.value_kind[tables.slot_value] == 1]))

    def best(self) -> tuple[Candidate, ...]:
        """The best few of those that were evaluated."""
        judged = [(key, evaluation) for key, evaluation in self.tried.items() if evaluation]
        judged.sort(key=lambda pair: pair[1].preference)
        keys = [key for key, _ in judged] or list(self.tried)
        return tuple(
            Candidate(strategy=strategy, orders=(order,))
            for strategy, order in keys[:NUM_RETURNED]
        )

    def try_stage(self, stage: int) -> None:
        """Evaluate a stage's allocations: for equal slices, even ones, for uneven slices."""
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
                    self._evaluate(strategy, order)

    def try_fewer(self, stage: int) -> None:
        """Evaluate a stage without the slowest types of devices, and with a copy on each host.

        Beyond the paper: what a device computes may not pay for the sums that it joins, where
        steps are as short as the host allows.
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
                self._evaluate(strategy, self.problem.orders[0])

    def _slice_groups(
        self, stage: int, devices: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], ...]]:
        """No slice groups; then one group for each host, if there are several of equal size."""
        yield ()
        host_of = self.evaluator.cluster.host_of
        groups: dict[int, list[int]] = {}
        for device in devices:
            groups.setdefault(host_of[device], []).append(device)
        sizes = {len(group) for group in groups.values()}
        if stage and len(groups) > 1 and len(sizes) == 1 and max(sizes) > 1:
            yield tuple(map(tuple, groups.values()))

    def _evaluate(self, strategy: Strategy, order: Order) -> Evaluation | None:
        key = (strategy, order)
        if key not in self.tried:
            if self.spending.is_over and self.tried:
                self.spending.check()
                return None
            self.tried[key] = self.evaluator.evaluate(strategy, order)
            self.problem.report(min(self.spending.fraction, 1.0), self._fastest())
        return self.tried[key]

    def _fastest(self) -> float:
        return min(
            (each.step_time_s for each in self.tried.values() if each and each.is_ok),
            default=float("inf"),
        )

    def _allocations(self, stage: int, slices: tuple[int, ...]) -> Iterator[Allocation]:
        """Allocations with the full time of collectives, and with collectives hidden."""
        whole = zero_decision(self.evaluator, stage, self._even(1), slices)
        full_s = micro_step_seconds(self.evaluator, whole, stage)
        for step_s in dict.fromkeys((full_s, 0.0)):
            allocation = self._fitting(stage, slices, step_s)
            if allocation is not None:
                yield allocation

    def _fitting(self, stage: int, slices: tuple[int, ...], step_s: float) -> Allocation | None:
        """An allocation that fits by the simulator, which sees more than the memory model.

        Samples that overflow are taken off, and room left on devices at their limit is used.
        """
        evaluator = self.evaluator
        most = samples_that_fit(evaluator, stage, slices)
        slope = max(float(liveness(evaluator.tables).per_sample.max(initial=0.0)), 1.0)
        usable = np.array([d.usable_memory_bytes for d in evaluator.cluster.devices], np.float64)
        last: Allocation | None = None
        fitting: Allocation | None = None
        for _ in range(_MOST_CORRECTIONS):
            found = self._solve(stage, most, step_s)
            if found is None:
                break
            last = found
            strategy = zero_strategy(self.problem, stage, found, slices)
            evaluation = self._evaluate(strategy, self.problem.orders[0])
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

    def _curve(self, kind: DeviceType, most: int) -> FloatArray:
        """Seconds of a type of device over samples, priced once for all devices of the type."""
        if (kind, most) not in self._curves:
            self._curves[kind, most] = seconds_over_samples(self.evaluator, kind, most)
        return self._curves[kind, most]

    def _even(self, num_micro: int) -> Allocation:
        return even_allocation(self.evaluator, num_micro)

    def _even_that_fits(self, stage: int) -> Iterator[Allocation]:
        """ZeRO without Poplar: equal shares, in as few micro-steps as fit."""
        num_micro = 1
        most = min(map(max, self._even(1)), default=1)
        while True:
            allocation = self._even(num_micro)
            strategy = zero_strategy(self.problem, stage, allocation)
            evaluation = self._evaluate(strategy, self.problem.orders[0])
            if evaluation is None or evaluation.is_ok or self._is_whole or num_micro >= most:
                yield allocation
                return
            num_micro = min(2 * num_micro, most)


class EvenZero(Planner):
    """ZeRO as it is used on equal devices: the baseline of Poplar's tables, not a built-in method.

    Args:
        zero_stage: Stage 0 to 3.
        num_micro: Number of micro-steps; by default the fewest that fit.
        name: Name in tables.
    """

    stage = "baseline"

    def __init__(self, zero_stage: int, num_micro: int | None = None, name: str = "") -> None:
        self.name = name or f"even_zero{zero_stage}"
        self._stage = zero_stage
        self._num_micro = num_micro

    def plan(self, problem: Problem) -> PlanResult:
        """Try equal shares in micro-steps."""
        search = _Search(replace(problem, orders=(Order.FIFO,)))
        if self._num_micro is None:
            (allocation,) = search._even_that_fits(self._stage)
        else:
            allocation = even_allocation(problem.evaluator, self._num_micro)
        strategy = zero_strategy(problem, self._stage, allocation)
        return PlanResult(
            candidates=(Candidate(strategy=strategy, orders=(Order.FIFO,)),),
            num_evaluations=search.spending.evaluations,
        )
