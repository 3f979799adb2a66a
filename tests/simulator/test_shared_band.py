"""Shared bands: golden values, conditions of the optimum, and the referee beside them."""

import math
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.cluster import Cluster
from heterog.errors import ClusterError
from heterog.simulator.cost_model import ChannelSeconds
from heterog.simulator.engine import Order
from heterog.simulator.roofline import Roofline
from heterog.simulator.shared_band import (
    bands_for_loads,
    joint_shares,
    joint_shares_of_groups,
    loads_for_bands,
    loads_in_turn,
    round_seconds,
)
from heterog.strategy.channels import Channel
from tests.simulator.builders import Tasks, cluster_of

MOVE_S, COMPUTE_S = (1.0, 2.0, 4.0), (2.0, 1.0, 0.5)
THIRDS = (1 / 3, 1 / 3, 1 / 3)

SECONDS = st.floats(0.05, 20.0)
WORKERS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=7)


def test_golden_values_of_three_workers() -> None:
    assert round_seconds(MOVE_S, COMPUTE_S, THIRDS, THIRDS) == pytest.approx(25 / 6)
    assert loads_for_bands(MOVE_S, COMPUTE_S, THIRDS).round_s == pytest.approx(2.36486, abs=5e-6)
    assert bands_for_loads(MOVE_S, COMPUTE_S, THIRDS).round_s == pytest.approx(2.63307, abs=5e-6)
    joint = joint_shares(MOVE_S, COMPUTE_S)
    assert joint.round_s == pytest.approx((3 + math.sqrt(2)) / 2, rel=1e-12)
    assert joint.loads == pytest.approx((0.5, 0.5, 0.0))
    assert joint.bands == pytest.approx((0.41421, 0.58579, 0.0), abs=5e-6)


def test_golden_values_of_a_worker_with_a_bad_channel() -> None:
    joint = joint_shares((1.0, 1.0, 9.0), (1.0, 1.0, 4.0))
    assert joint.round_s == pytest.approx(1.5, rel=1e-12)
    assert joint.loads == pytest.approx((0.5, 0.5, 0.0))
    assert joint.bands == pytest.approx((0.5, 0.5, 0.0))


def test_golden_values_of_groups() -> None:
    found = joint_shares_of_groups(((1.0, 2.0), (1.0,)), ((2.0, 1.0), (1.0,)))
    assert found.round_s == pytest.approx(1.97508, abs=5e-6)
    assert found.loads == pytest.approx((0.09285, 0.90715), abs=5e-6)
    assert found.bands == pytest.approx((0.05189, 0.09866, 0.84946), abs=5e-6)
    found = joint_shares_of_groups(
        ((1.0, 1.0), (3.0, 0.5), (2.0,)), ((2.0, 2.0), (1.0, 4.0), (0.5,))
    )
    assert found.round_s == pytest.approx(2.4, rel=1e-9)
    assert found.loads == pytest.approx((0.2, 0.0, 0.8), abs=1e-9)
    assert found.bands == pytest.approx((0.1, 0.1, 0.0, 0.0, 0.8), abs=1e-9)


@given(WORKERS)
@settings(max_examples=200)
def test_the_joint_optimum_satisfies_its_conditions(workers: list[tuple[float, float]]) -> None:
    move_s, compute_s = zip(*workers, strict=True)
    joint = joint_shares(move_s, compute_s)
    assert sum(joint.loads) == pytest.approx(1.0, rel=1e-12)
    assert sum(joint.bands) == pytest.approx(1.0, rel=1e-9)
    assert min(joint.bands) >= 0.0
    # What a little more of the band gains is the same for all that take part, and less for others.
    gains = [
        move / (move + compute * band) ** 2
        for move, compute, band in zip(move_s, compute_s, joint.bands, strict=True)
    ]
    taking_part = [gain for gain, band in zip(gains, joint.bands, strict=True) if band > 0.0]
    assert max(taking_part) - min(taking_part) <= 1e-9 * max(taking_part)
    assert max(gains) <= max(taking_part) * (1 + 1e-9)


@given(WORKERS, st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_the_joint_optimum_is_never_worse_than_one_after_the_other(
    workers: list[tuple[float, float]], seed: int
) -> None:
    move_s, compute_s = zip(*workers, strict=True)
    best = joint_shares(move_s, compute_s).round_s * (1 - 1e-9)
    even = (1.0 / len(workers),) * len(workers)
    by_bands = loads_for_bands(move_s, compute_s, even)
    by_loads = bands_for_loads(move_s, compute_s, even)
    then_bands = bands_for_loads(move_s, compute_s, by_bands.loads)
    anyhow = tuple(np.random.default_rng(seed).dirichlet(np.ones(len(workers))))
    assert best <= loads_for_bands(move_s, compute_s, anyhow).round_s
    assert best <= then_bands.round_s <= by_bands.round_s * (1 + 1e-9)
    assert best <= by_loads.round_s <= round_seconds(move_s, compute_s, even, even) * (1 + 1e-9)
    # With every worker a group of its own it is the same problem.
    groups = joint_shares_of_groups([(a,) for a in move_s], [(c,) for c in compute_s])
    assert groups.round_s == pytest.approx(best, rel=1e-6)


@given(WORKERS, st.floats(0.1, 10.0))
@settings(max_examples=50)
def test_a_round_scales_with_its_seconds(
    workers: list[tuple[float, float]], factor: float
) -> None:
    move_s, compute_s = zip(*workers, strict=True)
    scaled = joint_shares([factor * a for a in move_s], [factor * c for c in compute_s])
    assert scaled.round_s == pytest.approx(factor * joint_shares(move_s, compute_s).round_s)


def test_a_worker_is_left_out_for_its_channel_alone() -> None:
    joint = joint_shares(MOVE_S, COMPUTE_S)
    at_once = joint_shares(MOVE_S, (2.0, 1.0, 0.0))
    assert at_once.round_s == pytest.approx(joint.round_s, rel=1e-12)
    assert at_once.loads[2] == 0.0
    # s = (1 + 1/2 + 2) / (1/2 + sqrt 2): below s^2 the worker takes part.
    limit = (3.5 / (0.5 + math.sqrt(2))) ** 2
    for move, takes_part in ((limit * 1.001, False), (limit * 0.999, True)):
        found = joint_shares((1.0, 2.0, move), COMPUTE_S)
        assert (found.loads[2] > 0.0) is takes_part


def test_a_worker_that_computes_in_no_time_gets_what_others_leave() -> None:
    found = joint_shares((1.0, 2.0), (1.0, 0.0))
    nearly = joint_shares((1.0, 2.0), (1.0, 1e-9))
    assert found.round_s == pytest.approx(nearly.round_s, rel=1e-6)
    assert sum(found.bands) == pytest.approx(1.0)


def test_whole_loads_beside_all_that_there_are() -> None:
    joint = joint_shares(MOVE_S, COMPUTE_S, 12.0)
    rounded = bands_for_loads(MOVE_S, COMPUTE_S, joint.whole_loads())
    best = min(
        bands_for_loads(MOVE_S, COMPUTE_S, (first, second, 12 - first - second)).round_s
        for first, second in product(range(13), repeat=2)
        if first + second <= 12
    )
    assert sum(joint.whole_loads()) == 12
    most = max(a / b + c for a, b, c in zip(MOVE_S, joint.bands, COMPUTE_S, strict=True) if b > 0)
    assert joint.round_s <= best <= rounded.round_s <= joint.round_s + most


@given(WORKERS, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_in_turn_is_never_slower_than_side_by_side(
    workers: list[tuple[float, float]], random: Random
) -> None:
    move_s, compute_s = zip(*workers, strict=True)
    best = loads_in_turn(move_s, compute_s)
    assert sum(best.loads) == pytest.approx(1.0)
    assert best.round_s <= joint_shares(move_s, compute_s).round_s * (1 + 1e-9)
    # No other order of turns is better.
    left, rate = 1.0, 0.0
    for move, compute in random.sample(workers, len(workers)):
        rate += left / (move + compute)
        left *= compute / (move + compute)
    assert best.round_s <= (1 + 1e-9) / rate


COMPUTE_OF_LIKE = (2.0, 1.0, 0.5)
LIKE = (1.0, 1.0, 1.0)
"""Workers with NICs of one kind that pull from one server of the same kind."""


@pytest.mark.parametrize("is_paced", [True, False])
def test_the_referee_takes_as_long(is_paced: bool) -> None:
    """Side by side, paced by their shares; and in turn, which the engine does by itself."""
    plan = (joint_shares if is_paced else loads_in_turn)(LIKE, COMPUTE_OF_LIKE)

    class Paced(Roofline):
        def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
            cost = super().channel_seconds(cluster, channel)
            pulls = channel.devices[0] == 0 and len(channel.devices) == 2
            return cost._replace(weight=plan.bands[channel.devices[1] - 1] if pulls else 1.0)

    # 1 GB/s each, and parameters of one GB.
    tasks = Tasks(cluster_of(*((8.0, ["T4"]),) * 4, latency_s=0.0), Paced())
    for worker, (load, compute) in enumerate(zip(plan.loads, COMPUTE_OF_LIKE, strict=True), 1):
        tasks.op(worker, load * compute, tasks.send(0, worker, load * 1e9))
    times = tasks.run(Order.PROGRAM)
    ends = (times.fair_finish if is_paced else times.finish)[1::2]
    assert ends == pytest.approx([plan.round_s] * 3, rel=1e-9)


@pytest.mark.parametrize(
    ("move_s", "compute_s"),
    [((), ()), ((1.0,), (1.0, 2.0)), ((0.0,), (1.0,)), ((1.0,), (-1.0,)), ((math.nan,), (1.0,))],
)
def test_seconds_that_make_no_sense_are_refused(
    move_s: tuple[float, ...], compute_s: tuple[float, ...]
) -> None:
    with pytest.raises(ClusterError):
        joint_shares(move_s, compute_s)
    with pytest.raises(ClusterError):
        joint_shares_of_groups([move_s], [compute_s])
