"""Replays under noise: what a factor on a device or a link does to a schedule."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.cluster import Cluster
from heterog.pricing.intervals import Noise, draw_noise
from heterog.simulator.engine import Order
from tests.simulator.builders import cluster_of, random_case


def constant(cluster: Cluster, device: float, resource: float) -> Noise:
    return Noise(
        device=np.full((1, cluster.num_devices), device),
        resource=np.full((1, len(cluster.resources)), resource),
    )


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_without_noise_it_is_the_referee(seed: int) -> None:
    rng = Random(seed)
    evaluator, choice = random_case(rng)
    order = rng.choice(list(Order))
    expected = evaluator.referee(choice, order).step_time_s
    noise = constant(evaluator.cluster, 1.0, 1.0)
    assert evaluator.seconds_under_noise(choice, order, noise) == pytest.approx([expected])


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_a_world_slower_by_a_factor_is_slower_by_at_most_that_factor(seed: int) -> None:
    # Latencies stay, so less than the factor is allowed; nothing may become faster.
    rng = Random(seed)
    evaluator, choice = random_case(rng)
    order = rng.choice(list(Order))
    nominal = evaluator.referee(choice, order).step_time_s
    noise = constant(evaluator.cluster, 2.0, 2.0)
    (slower,) = evaluator.seconds_under_noise(choice, order, noise)
    assert nominal * 0.999 <= slower <= 2.0 * nominal * (1 + 1e-9)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_answer_is_left_as_it_was(seed: int) -> None:
    rng = Random(seed)
    evaluator, choice = random_case(rng)
    order = rng.choice(list(Order))
    before = evaluator.referee(choice, order)
    evaluator.seconds_under_noise(
        choice, order, draw_noise(evaluator.cluster, 3, evaluator.spreads)
    )
    assert evaluator.referee(choice, order) == before


def test_a_spread_of_minus_zero_is_none() -> None:
    cluster = cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
    first, second = (draw_noise(cluster, 3, (zero,)) for zero in (-0.0, 0.0))
    assert np.array_equal(first.device, second.device)


def test_draws_are_paired_and_centred() -> None:
    cluster = Cluster.load("paper_8gpu")
    first, second = (draw_noise(cluster, 2000, (0.2, 0.1, 0.05)) for _ in range(2))
    assert np.array_equal(first.device, second.device)
    assert np.array_equal(first.resource, second.resource)
    assert np.median(first.device) == pytest.approx(1.0, abs=0.01)
    for device, kind in enumerate(cluster.type_index):
        expected = np.hypot((0.2, 0.1, 0.05)[kind], 0.03)
        assert np.log(first.device[:, device]).std() == pytest.approx(expected, rel=0.05)
    alike = [device for device, kind in enumerate(cluster.type_index) if kind == 0]
    together = np.corrcoef(np.log(first.device[:, alike[0]]), np.log(first.device[:, alike[1]]))
    assert together[0, 1] > 0.95, "a type is predicted wrongly as a whole"
    assert np.log(first.resource).std() == pytest.approx(0.10, abs=0.005)
