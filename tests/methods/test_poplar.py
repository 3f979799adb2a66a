"""Poplar: allocations against brute force, its curves, and what it promises."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from heterog.errors import StrategyError
from heterog.graph.capture import capture
from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget, Problem
from heterog.methods.poplar import EvenZero, Poplar, even_allocation, zero_strategy
from heterog.methods.poplar.allocation import Allocation, common_steps, own_micro_batches
from heterog.methods.poplar.planner import (
    room_left,
    samples_that_fit,
    seconds_over_samples,
    slices_by_memory,
)
from heterog.search.judging import run_method
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Sync
from tests.simulator.builders import cluster_of, linear_chain

# --- allocations ---------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[FloatArray], int, float]:
    """Two or three devices with curves of up to 4 samples, a batch of up to 7, collectives."""
    curves = []
    for _ in range(draw(st.integers(2, 3))):
        most = draw(st.integers(0, 4))
        steps = draw(st.lists(st.integers(0, 5), min_size=most, max_size=most))
        start = draw(st.integers(1, 4))
        curve = np.cumsum([0.0, *[float(step) for step in steps]])
        curve[1:] += start
        curves.append(curve)
    return curves, draw(st.integers(1, 7)), float(draw(st.integers(0, 3)))


def sizes_that_sum(total: int, limits: list[int]) -> Iterator[tuple[int, ...]]:
    for sizes in itertools.product(*[range(limit + 1) for limit in limits]):
        if sum(sizes) == total:
            yield sizes


def cuts_of(total: int, limit: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut a number into parts of at most a limit, largest first."""
    if total == 0:
        yield ()
    for first in range(min(total, limit), 0, -1):
        for rest in cuts_of(total - first, first):
            yield (first, *rest)


def slowest_alone(curves: list[FloatArray], batch: int) -> float:
    """Brute force of stages 0 and 1: every share of every device, every cut of it."""
    best = np.inf
    for shares in sizes_that_sum(batch, [batch] * len(curves)):
        ends = [
            min(
                (sum(curve[size] for size in cut) for cut in cuts_of(share, len(curve) - 1)),
                default=np.inf,
            )
            for curve, share in zip(curves, shares, strict=True)
        ]
        best = min(best, max(ends))
    return float(best)


def slowest_together(curves: list[FloatArray], batch: int, step_s: float) -> float:
    """Brute force of stages 2 and 3: every sequence of micro-steps, every share in each."""
    limits = [len(curve) - 1 for curve in curves]

    @cache
    def least(left: int) -> float:
        if left == 0:
            return 0.0
        return min(
            (
                max(curve[size] for curve, size in zip(curves, sizes, strict=True))
                + step_s
                + least(left - taken)
                for taken in range(1, left + 1)
                for sizes in sizes_that_sum(taken, limits)
            ),
            default=np.inf,
        )

    return float(least(batch))


def check_allocation(allocation: Allocation, curves: list[FloatArray], batch: int) -> None:
    assert sum(map(sum, allocation)) == batch
    assert len({len(sizes) for sizes in allocation}) == 1
    for sizes, curve in zip(allocation, curves, strict=True):
        assert max(sizes) < len(curve)
    assert min(map(sum, zip(*allocation, strict=True))) > 0


@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_own_micro_batches_are_the_best_there_are(
    problem: tuple[list[FloatArray], int, float],
) -> None:
    curves, batch, _ = problem
    wanted = slowest_alone(curves, batch)
    found = own_micro_batches(curves, batch)
    if found is None:
        assert wanted == np.inf
        return
    seconds, allocation = found
    assert seconds == wanted
    check_allocation(allocation, curves, batch)
    ends = [sum(c[size] for size in row) for c, row in zip(curves, allocation, strict=True)]
    assert max(ends) == wanted


@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_common_steps_are_the_best_there_are(
    problem: tuple[list[FloatArray], int, float],
) -> None:
    curves, batch, step_s = problem
    wanted = slowest_together(curves, batch, step_s)
    found = common_steps(curves, batch, step_s)
    if found is None:
        assert wanted == np.inf
        return
    seconds, allocation = found
    assert seconds == pytest.approx(wanted)
    check_allocation(allocation, curves, batch)
    columns = zip(*allocation, strict=True)
    steps = [
        max(c[size] for c, size in zip(curves, column, strict=True)) + step_s for column in columns
    ]
    assert sum(steps) == pytest.approx(wanted)


def test_allocations_by_hand() -> None:
    fast, slow = np.arange(9.0), 3.0 * np.arange(9.0)
    assert own_micro_batches([fast, slow], 8) == (6.0, ((6,), (2,)))
    # Room for two at once: four micro-batches, of which the slow device takes one.
    assert own_micro_batches([fast[:3], slow[:3]], 8) == (6.0, ((2, 2, 2), (2, 0, 0)))
    # Without collectives the slow device has best nothing to do; each costs 10 s: few steps.
    assert common_steps([fast[:4], slow[:4]], 4, 10.0) == (13.0, ((3,), (1,)))
    assert common_steps([fast[:1], slow[:1]], 4, 0.0) is None
    assert own_micro_batches([fast[:1], slow[:1]], 4) is None


# --- curves and plans ----------------------------------------------------------------------------


def wide_mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(512, 16))


@cache
def graph_of(optimizer: str = "Adam", batch: int = 96) -> OpGraph:
    data = (torch.zeros(batch, 256, 512), torch.zeros(batch, 256, 16))
    kind = getattr(torch.optim, optimizer)
    return capture(Workload(wide_mlp, data, functional.mse_loss, kind, {"lr": 0.1}, name="wide"))


UNEQUAL = cluster_of((100.0, ["V100-16GB", "V100-16GB"]), (100.0, ["T4", "T4"]))


def tight(memory_bytes: int, last_bytes: int) -> Evaluator:
    """Devices with room for so many bytes, beside the margin of the simulator."""

    def usable(num_bytes: int) -> int:
        return round(num_bytes * (1.0 + MEMORY_MARGIN))

    devices = tuple(
        replace(device, usable_memory_bytes=usable(last_bytes if index == 3 else memory_bytes))
        for index, device in enumerate(UNEQUAL.devices)
    )
    return Evaluator(graph_of(), replace(UNEQUAL, devices=devices))


def test_interpolated_seconds_are_near_the_priced_ones_and_never_fall() -> None:
    evaluator = Evaluator(graph_of(), UNEQUAL)
    computes = [i for i, op in enumerate(graph_of().ops) if op.phase != Phase.UPDATE]
    for device_type in UNEQUAL.device_types:
        curve = seconds_over_samples(evaluator, device_type, 96)
        assert len(curve) == 97
        assert curve[0] == 0.0
        assert (np.diff(curve) >= 0.0).all()
        for samples in (1, 3, 11, 50, 96):
            priced = evaluator.cost_model.op_seconds(graph_of(), device_type, samples)[
                computes
            ].sum()
            assert curve[samples] == pytest.approx(priced, rel=0.02)
    assert len(seconds_over_samples(evaluator, UNEQUAL.device_types[0], 1)) == 2
    assert len(seconds_over_samples(evaluator, UNEQUAL.device_types[0], 0)) == 1


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_samples_that_fit_are_those_that_the_simulator_lets_through(zero_stage: int) -> None:
    evaluator = tight(59_000_000, 59_000_000)
    most = samples_that_fit(evaluator, zero_stage, bucket_bytes=0)
    assert (most == most[0]).all()
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=100))
    for samples, fits in ((int(most[0]) - 1, True), (int(most[0]) + 2, False)):
        sizes = [4 * samples] * (96 // (4 * samples)) + [96 % (4 * samples)]
        rows = zip(*[split_evenly(size, 4) for size in sizes if size], strict=True)
        strategy = zero_strategy(problem, zero_stage, tuple(rows), bucket_bytes=0)
        assert evaluator.evaluate(strategy, Order.FIFO).is_ok == fits


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_unequal_devices_get_unequal_batches_and_it_pays(zero_stage: int) -> None:
    evaluator = tight(120_000_000, 60_000_000)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=200))
    row = run_method(Poplar(zero_stage), problem)
    even = run_method(EvenZero(zero_stage), problem)
    assert row.outcome == even.outcome == "ok"
    assert row.step_time_s is not None
    assert even.step_time_s is not None
    assert row.step_time_s < 0.8 * even.step_time_s
    assert row.candidate is not None
    strategy = row.candidate.strategy
    (decision,) = set(strategy.decisions)
    wanted = {0: Sync.HIERARCHICAL, 1: Sync.ZERO1, 2: Sync.ZERO2, 3: Sync.ZERO3}
    assert decision.sync == wanted[zero_stage]
    assert decision.shares[0] > decision.shares[3]


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6), st.integers(1, 100))
def test_slices_leave_everybody_the_same_room(room: list[int], divided: int) -> None:
    level = room_left(np.array(room, np.float64), float(divided))
    assert sum(max(each - level, 0.0) for each in room) == pytest.approx(divided)


def test_slices_follow_memory_where_it_is_short() -> None:
    roomy = Evaluator(graph_of(), UNEQUAL)
    assert all(slices_by_memory(roomy, stage) == () for stage in (0, 1, 2, 3))
    evaluator = tight(59_000_000, 33_400_000)
    assert slices_by_memory(evaluator, 0) == ()  # nothing is divided
    slices = slices_by_memory(evaluator, 2)
    # The first T4 has fewer samples than the V100s and as much memory, the second one has less.
    assert slices[0] == slices[1] < slices[2]
    assert slices[3] == 0
    equal, uneven = samples_that_fit(evaluator, 2), samples_that_fit(evaluator, 2, slices)
    assert equal[3] == 0 < uneven[3]
    row = run_method(Poplar(2), Problem(evaluator=evaluator, budget=Budget(evaluations=200)))
    assert row.outcome == "ok"
    assert row.candidate is not None
    (decision,) = set(row.candidate.strategy.decisions)
    assert decision.slices == slices
    assert decision.shares[3] > 0


def test_the_planner_chooses_the_stage_that_fits() -> None:
    roomy = Poplar().plan(
        Problem(evaluator=Evaluator(graph_of(), UNEQUAL), budget=Budget(evaluations=200))
    )
    assert len({candidate.strategy for candidate in roomy.candidates}) > 1
    # 4.2 MB of parameters four times over, 13 MB of the batch: no room for a sample.
    small = tight(32_400_000, 32_400_000)
    row = run_method(Poplar(), Problem(evaluator=small, budget=Budget(evaluations=200)))
    assert row.outcome == "ok"
    assert row.candidate is not None
    assert row.candidate.strategy.decisions[0].sync.is_sharded
    alone = run_method(Poplar(0), Problem(evaluator=small, budget=Budget(evaluations=200)))
    assert alone.outcome != "ok"


def test_an_optimizer_that_looks_at_whole_parameters_leaves_stage_0() -> None:
    evaluator = Evaluator(graph_of("Adafactor"), UNEQUAL)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=50))
    candidates = Poplar().plan(problem).candidates
    assert candidates
    assert all(not c.strategy.decisions[0].sync.is_sharded for c in candidates)
    refused = Poplar(2).plan(problem)
    assert not refused.candidates
    assert "Adafactor cannot update slices" in refused.reason
    with pytest.raises(StrategyError, match="stages 0 to 3, not 4"):
        Poplar(4)


def test_even_zero_in_a_given_number_of_micro_steps() -> None:
    problem = Problem(evaluator=Evaluator(graph_of(), UNEQUAL), budget=Budget(evaluations=9))
    row = run_method(EvenZero(2, 3), problem)
    assert row.candidate is not None
    assert row.candidate.strategy.micro_batches == ((8, 8, 8),) * 4
    assert row.candidate.strategy.decisions[0].sync == Sync.ZERO2


def test_even_parts() -> None:
    evaluator = Evaluator(graph_of(), UNEQUAL)
    assert even_allocation(evaluator, 1) == ((24,),) * 4
    assert even_allocation(evaluator, 5) == ((5, 5, 5, 5, 4),) * 4


def test_types_that_do_not_pay_for_the_sums_they_join_are_left_out() -> None:
    """Eight T4 behind slow NICs beside eight H100, whose step is as short as their host allows."""
    fast, slow = (100.0, ["H100"] * 8), (1.0, ["T4"] * 8)
    evaluator = Evaluator(graph_of(), cluster_of(fast, slow))
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=100))
    (decision, *_) = Poplar().plan(problem).candidates[0].strategy.decisions
    assert decision.devices == tuple(range(8))
    (of_paper, *_) = Poplar(1).plan(problem).candidates[0].strategy.decisions
    assert len(of_paper.devices) == 16


def test_buckets_are_halved_while_that_hides_more_of_the_sums() -> None:
    """Of weights of 16 MiB a bucket of 25 holds two, and the last one hides behind nothing."""
    graph = linear_chain("abcdefgh", batch_size=512, width=2048)
    evaluator = Evaluator(graph, cluster_of(*[(40.0, [kind] * 2) for kind in ("V100-16GB", "T4")]))
    best = (
        Poplar().plan(Problem(evaluator=evaluator, budget=Budget(evaluations=200))).candidates[0]
    )
    seconds = [
        evaluator.evaluate(replace(best.strategy, bucket_bytes=size), best.orders[0]).step_time_s
        for size in (DEFAULT_BUCKET_BYTES, best.strategy.bucket_bytes)
    ]
    assert seconds[1] < 0.95 * seconds[0]
