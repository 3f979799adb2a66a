"""A pair of model and cluster, ready for decisions: table, observation, scores, reward."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.envs.candidates import ModelMemory, candidate_table
from heterog.envs.coarse import CoarseEvaluator
from heterog.envs.filling import (
    BlockLimits,
    Filled,
    Logits,
    PartLoads,
    Parts,
    draw_rows,
    fill,
    find_fits,
    find_stage_fits,
)
from heterog.envs.observation import Observation, Observer
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.lowering.program import FloatArray, IntArray
from heterog.methods.planner import Budget, Problem
from heterog.methods.registry import built_in_methods
from heterog.pricing.cost_model import CostModel
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator, Outcome
from heterog.simulator.space import StepSettings, StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

PIPELINED = 8
"""Number of micro-batches in the rows of a pipelined pair."""
CUT_WEIGHTS = 0.0, 1.0 / (PIPELINED - 1), 0.5
"""Weights of a stage's transfers to the next stage beside its compute time: none; the part of
filling and draining the pipeline; one direction of a link that acts as a stage. The right weight
depends on links and overlap, so pipelines are drawn with each."""
MARGIN = 0.95
"""Part of the memory that rows may fill; their estimate leaves out small allocations."""
MOST_APART = 64
"""Most devices that are tracked one by one; see ``Loads``."""
BASELINES = ("ev_ps", "ev_ar", "cp_ps", "cp_ar", "ddp")
"""Methods of data parallelism; rewards are relative to the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of a row; both numbers are infinite if it cannot run.

    Attributes:
        step_time_s: Seconds per step, also if the row does not fit into memory.
        overflow: Missing bytes on the worst device as a part of its memory, 0 if it fits.
    """

    step_time_s: float
    overflow: float

    @property
    def preference(self) -> tuple[float, float]:
        """Sort key, smaller is better: rows that fit first, then shorter steps."""
        return self.overflow, self.step_time_s


def order_of(num_micro: int) -> Order:
    """Order of tasks in which a policy's strategies are scored.

    First in, first out with micro-batches: by rank, all forward passes come before the first
    backward pass, and their saved values are in memory at once.
    """
    return Order.RANK if num_micro == 1 else Order.FIFO


class Loads(NamedTuple):
    """Loads of candidates on devices; candidates that differ only in synchronisation share one.

    On clusters of more than ``MOST_APART`` devices, devices of one type and host that are in the
    same candidates form a class. A class counts as full as its fullest device; the shares of its
    devices differ by a sample at most.

    Attributes:
        counts: Number of samples on a device of each class.  # [num_loads, T]
        state: Part of parameters and optimizer state.  # [num_loads, T]
        holds: Whether the load uses the device at all.  # [num_loads, T] bool
        usable_bytes: Usable memory of one device of each class.  # [T]
        num_twins: Number of devices of each class.  # [T]
        of: Load of each candidate.  # [C]
        twin: Class of each device.  # [D]
    """

    counts: FloatArray
    state: FloatArray
    holds: npt.NDArray[np.bool_]
    usable_bytes: FloatArray
    num_twins: IntArray
    of: npt.NDArray[np.intp]
    twin: npt.NDArray[np.intp]


class Pair:
    """One model on one cluster; see the module docstring.

    Args:
        graph: Graph of one training step.
        cluster: Devices and links.
        cost_model: Cost model, as for ``Evaluator``.
        divide: Whether the candidates divide the optimizer's state; see ``candidates``.
        beside: As for ``Evaluator``.

    Attributes:
        num_blocks: Number of decisions to make.
        num_candidates: Number of rows of the table.
        num_micro: Number of equal micro-batches of every row. With more than one, rows are drawn
            as pipelines.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        cost_model: CostModel | None = None,
        *,
        divide: bool = False,
        beside: Evaluator | None = None,
    ) -> None:
        self.graph, self.cluster = graph, cluster
        self.evaluator = CoarseEvaluator(graph, cluster, cost_model, beside)
        self.memory = ModelMemory(self.evaluator)
        self.table = candidate_table(self.evaluator, self.memory, divide=divide)
        self.space = self.evaluator.space(self.table)
        self.num_blocks, self.num_candidates = self.evaluator.tables.num_groups, len(self.table)
        self.num_micro = 1
        self._is_judged = False
        self._scores: dict[bytes, Score] = {}

    @property
    def name(self) -> str:
        """Name of model and cluster, for logs."""
        return f"{self.graph.name} on {self.cluster.name}"

    @cached_property
    def numbers_on(self) -> dict[tuple[int, ...], list[int]]:
        """Numbers of the candidates on each set of devices."""
        return grouped((decision.devices, number) for number, decision in enumerate(self.table))

    @cached_property
    def held_parts(self) -> FloatArray:
        """Part of each candidate's fullest device that each block fills.  # [C, G]"""
        memory = self.memory
        parts = []
        for decision in self.table:
            devices, shares = list(decision.devices), np.array(decision.shares)
            room = memory.usable_bytes[devices] - memory.common_bytes
            state = memory.state_bytes * memory.state_part(decision) + memory.gradient_bytes
            bytes_held = state[:, None] + memory.saved_bytes_per_sample[:, None] * shares
            parts.append((bytes_held / room).max(axis=1))
        return np.array(parts)

    def divided(self) -> "Pair | None":
        """The pair with divided state; ``None`` unless the state alone fills most devices."""
        if not self.memory.overfills(self.table) or not self.graph.updates_elementwise:
            return None
        beside = self.evaluator
        return Pair(self.graph, self.cluster, beside.cost_model, divide=True, beside=beside)

    def pipelined(self, num_micro: int = PIPELINED) -> "Pair | None":
        """The pair with micro-batches; ``None`` if there are more of them than samples."""
        if self.graph.batch_size < num_micro:
            return None
        self.observer, self.loads  # noqa: B018 - made once for both
        other = copy.copy(self)
        other.num_micro, other._scores = num_micro, {}
        other.__dict__.pop("observation", None)
        return other

    def judged(self) -> "Pair":
        """The pair with rows scored op by op, like a policy's answers.

        This is slower than the coarse evaluator, but counts the overlap inside a block.
        """
        if self._is_judged:
            return self
        self.observer, self.loads, self._fine  # noqa: B018 - made once for both
        other = copy.copy(self)
        other._is_judged, other._scores = True, {}
        return other

    @cached_property
    def _fine(self) -> tuple[Evaluator, StrategySpace]:
        """Evaluator of single ops, with the space of the same candidates."""
        coarse = self.evaluator
        evaluator = Evaluator(self.graph, self.cluster, coarse.cost_model, coarse)
        return evaluator, evaluator.space(self.table)

    @cached_property
    def loads(self) -> Loads:
        """Loads of every candidate on every device."""
        both = np.zeros((2, self.num_candidates, self.cluster.num_devices))
        for number, decision in enumerate(self.table):
            devices = list(decision.devices)
            both[0, number, devices] = decision.shares
            both[1, number, devices] = self.memory.state_part(decision)
        different, of = np.unique(np.concatenate(both, axis=1), axis=0, return_inverse=True)
        counts, state = np.split(different, 2, axis=1)
        holds = (counts > 0) | (state > 0)
        usable = self.memory.usable_bytes
        every = np.arange(self.cluster.num_devices)
        apart = every if len(every) <= MOST_APART else 0 * every
        alike = np.concatenate([holds, [self.cluster.host_of, usable, apart]])
        _, first, twin, num_twins = np.unique(
            alike, axis=1, return_index=True, return_inverse=True, return_counts=True
        )
        by_class = np.argsort(twin.reshape(-1), kind="stable")
        starts = np.cumsum(num_twins) - num_twins
        return Loads(
            counts=np.maximum.reduceat(counts[:, by_class], starts, axis=1),
            state=np.maximum.reduceat(state[:, by_class], starts, axis=1),
            holds=holds[:, first],
            usable_bytes=usable[first],
            num_twins=num_twins.astype(np.int32),
            of=of.reshape(-1),
            twin=twin.reshape(-1),
        )

    @cached_property
    def part_loads(self) -> PartLoads:
        """The loads, divided by the memory that rows may fill."""
        loads = self.loads
        scale = 1.0 / (MARGIN * loads.usable_bytes)
        member = [np.flatnonzero(each) for each in loads.holds]
        return PartLoads(
            counts=np.array(loads.counts * scale, np.float32, order="C"),
            state=np.array(loads.state * scale, np.float32, order="C"),
            holds=np.array(loads.holds * scale, np.float32, order="C"),
            member_start=np.cumsum([0, *map(len, member)], dtype=np.int32),
            member=np.concatenate(member).astype(np.int32),
        )

    @cached_property
    def observer(self) -> Observer:
        """Maker of the observation, with its analytic times."""
        return Observer(self.evaluator, self.memory, self.table)

    @cached_property
    def observation(self) -> Observation:
        """The observation for a policy."""
        return self.observer.observe(self.num_micro)

    @cached_property
    def baseline_s(self) -> float:
        """Seconds of the best data-parallel baseline, whether it fits or not."""
        evaluator = self._fine[0]
        problem = Problem(evaluator=evaluator, budget=Budget(evaluations=1))
        scored = [
            evaluator.evaluate(candidate.strategy, candidate.orders[0])
            for name in BASELINES
            for candidate in built_in_methods()[name].plan(problem).candidates[:1]
        ]
        return min(scored, key=lambda each: each.preference).step_time_s

    def score(self, row: npt.ArrayLike) -> Score:
        """Score a row of candidates, one per block; each row is simulated only once.

        Args:
            row: Candidate's number of each block.
        """
        row = np.asarray(row, np.int32)
        key = row.tobytes()
        if key not in self._scores:
            evaluator, space = self._fine if self._is_judged else (self.evaluator, self.space)
            choice = space.encode(
                self.groups(row) if self._is_judged else row,
                StepSettings(
                    DEFAULT_BUCKET_BYTES, micro_batches=space.micro_batches(self.num_micro)
                ),
                step_barrier=True,
            )
            evaluation = evaluator.evaluate(choice, order_of(self.num_micro))
            over = np.array(evaluation.peak_memory_bytes) / self.memory.usable_bytes - 1.0
            self._scores[key] = (
                Score(step_time_s=math.inf, overflow=math.inf)
                if evaluation.outcome == Outcome.CANNOT_RUN
                else Score(
                    step_time_s=evaluation.step_time_s, overflow=max(float(over.max()), 0.0)
                )
            )
        return self._scores[key]

    def remember(self, rows: Sequence[IntArray] | IntArray, scores: Sequence[Score]) -> None:
        """Store scores of rows that were computed elsewhere."""
        for row, score in zip(rows, scores, strict=True):
            self._scores[np.asarray(row, np.int32).tobytes()] = score

    def forget(self) -> None:
        """Drop the scores of rows seen so far."""
        self._scores.clear()

    def groups(self, row: npt.ArrayLike) -> IntArray:
        """The candidate of every group, taken from its block, for one row or several."""
        return np.asarray(row, np.int32)[..., self.evaluator.block_of]


class RunningMemory:
    """Memory used while rows are filled block by block, for many rows at once.

    A device's peak is the state of its blocks, plus the larger of saved values and gradients (both
    with micro-batches), plus the temporary values of one op for one micro-batch, including its
    gradient. The later blocks must still fit into the free memory of all devices together.

    Args:
        pair: Model and cluster.
        num_rows: Number of rows that are filled at once.
        recompute: Whether every block frees the values that only its own backward pass reads.
    """

    def __init__(self, pair: Pair, num_rows: int, *, recompute: bool = False) -> None:
        memory = pair.memory
        # A recomputing block keeps the values that others read and makes the rest again.
        kept = memory.passed_bytes_per_sample if recompute else memory.saved_bytes_per_sample
        passing = memory.inner_bytes_per_sample + memory.saved_bytes_per_sample - kept
        blocks = memory.state_bytes, kept, memory.gradient_bytes, passing / pair.num_micro
        every = np.ones((pair.num_blocks, pair.num_candidates), np.bool_)
        # Gradients of the first micro-batch coexist with saved values of the others.
        self._adds_up = pair.num_micro > 1
        loads = pair.loads
        devices = len(loads.usable_bytes)  # one of each class
        self.num_rows = num_rows
        held = np.zeros((4, devices, num_rows), np.float32)
        start = (memory.common_bytes / loads.usable_bytes).astype(np.float32)
        self._filled = Filled(start, *held)
        self._loads = pair.part_loads
        rest = memory.state_bytes + pair.graph.batch_size * kept
        self._limits = BlockLimits(
            blocks=np.stack(blocks, axis=1).astype(np.float32),
            is_alone=every if recompute else pair.observation.fits.copy(),
            rest=np.append(np.cumsum(rest[::-1])[::-1][1:], 0.0),
            room=(MARGIN * loads.usable_bytes * loads.num_twins).astype(np.float32),
            load_of=loads.of.astype(np.int32),
            adds_up=self._adds_up,
        )
        self._twin = loads.twin
        self._work = np.empty((3, max(len(loads.counts), devices)))
        self._block = 0

    @property
    def used(self) -> npt.NDArray[np.float32]:
        """Part of each device's memory that is used so far.  # [num_rows, D]"""
        start, state, saved, gradient, inner = self._filled
        both = saved + gradient if self._adds_up else np.maximum(saved, gradient)
        used = start[:, None] + state + both + inner
        return np.asarray(used[self._twin].T, np.float32)

    def fits(self) -> npt.NDArray[np.bool_]:
        """Whether the next block may take each candidate; all if none fits.  # [num_rows, C]"""
        fits = np.empty((self.num_rows, len(self._limits.load_of)), np.bool_)
        find_fits(self._filled, self._loads, self._limits, self._block, self._work, fits)
        return fits

    def add(self, candidates: Sequence[int] | IntArray) -> None:
        """Record the next block of every row."""
        chosen = np.asarray(candidates, np.int32)
        fill(self._filled, self._loads, self._limits, self._block, chosen)
        self._block += 1

    def draw(
        self, logits: Logits, noise: Parts, *, keep_masks: bool
    ) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Fill all rows, from the first block on; see ``draw_rows``.

        Returns:
            Candidate of each block [num_rows, G]; candidates that fitted [num_rows, G, C], empty
            unless they are kept.
        """
        num_blocks, _, num_candidates = noise.shape
        rows = np.empty((num_blocks, self.num_rows), np.int32)
        kept = num_blocks if keep_masks else 1
        masks = np.empty((kept, self.num_rows, num_candidates), np.bool_)
        draw_rows(logits, noise, self._filled, self._loads, self._limits, self._work, rows, masks)
        self._block = num_blocks
        return np.ascontiguousarray(rows.T), masks[: num_blocks * keep_masks].swapaxes(0, 1)


class RunningStages:
    """Candidates for the next block of rows that are filled as pipelines.

    A block stays on the devices of the current stage while these have time and memory left to
    reach a possible end of the stage; otherwise it begins a stage on unused devices. Transfers
    across the cut count as time of the stage that ends there. So a policy chooses the next stage's
    devices, and the limit on their time decides how many blocks the stage has.

    Args:
        memory: Memory of the rows, before the first block.
        pair: Model and cluster.
        limits: Most seconds of every stage of a row, as multiples of the compute bound of all
            devices together.  # [num_rows]
        cut_weights: Weight of transfers across a cut beside compute time, as
            ``CUT_WEIGHTS``.  # [num_rows]

    Attributes:
        is_late: Whether a row has a stage beyond the limit, because nothing else was left.
            # [num_rows] bool
    """

    def __init__(
        self,
        memory: RunningMemory,
        pair: Pair,
        limits: npt.NDArray[np.floating],
        cut_weights: npt.NDArray[np.floating],
    ) -> None:
        self._memory = memory
        self.num_rows = memory.num_rows
        sets = dict.fromkeys(decision.devices for decision in pair.table)
        number = {devices: index for index, devices in enumerate(sets)}
        self._set_of = np.array(
            [number[decision.devices] for decision in pair.table], np.int32
        )  # [C]
        member = np.zeros((len(sets), pair.cluster.num_devices), np.bool_)
        for devices, index in number.items():
            member[index, list(devices)] = True
        self._shares_device = member.astype(np.int32) @ member.T.astype(np.int32) > 0  # [S, S]
        self._seconds = pair.observer.compute_seconds  # [G, C]
        weights, self._weight_of = np.unique(cut_weights, return_inverse=True)
        self._weight_of = self._weight_of.astype(np.int32)
        self._cuts = weights[:, None] * pair.observer.cut_seconds  # [W, G]
        # Least seconds from each block to a possible end of its stage, transfers included.
        fastest = np.full((len(sets), pair.num_blocks), np.inf)
        np.minimum.at(fastest, self._set_of, self._seconds.T)
        through = np.cumsum(fastest, axis=1)
        ends = (through + self._cuts[:, None])[:, :, ::-1]  # [W, S, G]
        least = np.minimum.accumulate(ends, axis=2)[:, :, ::-1] - through
        until_end = least[:, self._set_of].transpose(2, 0, 1) + self._seconds[:, None]
        self._until_end = np.ascontiguousarray(until_end)  # [G, W, C]
        self._limit = np.asarray(limits) * pair.observer.bound_s
        self._is_taken = np.zeros((len(limits), len(sets)), np.bool_)  # by any stage so far
        self._current = np.full(len(limits), -1, np.int32)
        self._found = np.empty(len(pair.table), np.bool_)
        self._load = np.zeros(len(limits))
        self._block = 0
        self.is_late = np.zeros(len(limits), np.bool_)

    def fits(self) -> npt.NDArray[np.bool_]:
        """Whether the next block may take each candidate; all if none may.  # [num_rows, C]"""
        fits = self._memory.fits()
        find_stage_fits(
            self._set_of, self._current, self._is_taken, self._load,
            self._until_end[self._block], self._weight_of, self._limit, self._found, fits,
        )  # fmt: skip
        return fits

    def add(self, candidates: IntArray) -> None:
        """Record the next block of every row."""
        self._memory.add(candidates)
        chosen = self._set_of[candidates]
        stays = chosen == self._current
        if self._block > 0:
            ended = self._load + self._cuts[self._weight_of, self._block - 1]
            self._check(np.where(stays, 0.0, ended))
        self._load = np.where(stays, self._load, 0.0) + self._seconds[self._block, candidates]
        self._check(self._load)
        self._is_taken |= self._shares_device[chosen]
        self._current = chosen
        self._block += 1

    def _check(self, stage_s: FloatArray) -> None:
        self.is_late |= stage_s > self._limit * (1.0 + 1e-9)
