"""Pipette's model and objective: published values, closed forms, brute force."""

import json
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from heterog.lowering.program import IntArray
from heterog.methods.pipette.communication import (
    COOLED,
    Communication,
    CommunicationVolume,
    HostRates,
    Pricing,
    UniformCosts,
    anneal,
    latency_s,
    moved,
    scaled,
)
from tests.simulator.builders import random_cluster
from tests.thorough import one_in

DATA = Path(__file__).parents[3] / "shared" / "data" / "pipette"
GB = 1e9
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the published matrix is not beside the project (shared/data)"
)


def published(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def real_rates() -> HostRates:
    return HostRates(np.array(published("bw16_t0_MBps.json")["0"]["bandwidth"]) * 1e6)


def hostnames(count: int) -> IntArray:
    """The order of hosts as given."""
    return np.arange(count, dtype=np.int32)


@needs_data
def test_the_objective_is_the_published_one() -> None:
    """20 values of the authors' own function on their matrix: 0.0671 GB and 2 GB messages."""
    rates = real_rates()
    cases = published("golden_objective_sample.json")["cases"]
    assert len(cases) == 20
    for case in cases:
        volume = CommunicationVolume(
            num_stages=case["pp"],
            replicas_per_host=case["inner_dp"],
            message_bytes=0.0671 * GB,
            gradient_bytes=2.0 * GB,
        )
        found = rates.communication(np.array(case["perm"], np.int32), volume)
        assert 1e3 * found.total_s == pytest.approx(case["cost_ms"], rel=1e-6)


# p, m, c with F = 10, B = 20: exact 1F1B, Pipette's model.
TABLE = [
    (4, 8, 0, 330, 330),
    (4, 8, 2, 362, 354),
    (4, 16, 2, 626, 618),
    (8, 32, 2, 1306, 1282),
    (8, 8, 5, 580, 520),
    (4, 8, 10, 490, 450),
    (4, 2, 2, 162, 162),
]


def costs(**changes: Any) -> UniformCosts:
    """Nothing in particular."""
    values = {
        "num_stages": 4,
        "replicas_per_host": 1,
        "num_micro": 8,
        "forward_s": 10.0,
        "backward_s": 20.0,
        "message_bytes": 1.0,
        "gradient_bytes": 0.0,
    } | changes
    return UniformCosts(**values)


def pipeline_s(*, num_stages: int, num_micro: int, message_s: float) -> float:
    """The model without gradients, where all links are alike: C = 2 (p - 1) c."""
    trip = Communication(
        pipeline_s=2.0 * (num_stages - 1) * message_s, between_s=0.0, inside_s=0.0
    )
    return latency_s(costs(num_stages=num_stages, num_micro=num_micro), trip)


def one_forward_one_backward_s(
    *, num_stages: int, num_micro: int, forward_s: float, backward_s: float, message_s: float
) -> float:
    """1F1B with equal stages and links, if sends do not hold up computing.

    T = (m + p - 1)(F + B) + 2 (p - 1) c + 2c ((m - 2) - floor((m - 2)/p)): the eager order, and
    its waits. The engine takes this time (tests/strategy/test_schedules.py); the model is below it
    by 2c (p - 2) where p divides m.
    """
    waits = (num_micro - 2) - (num_micro - 2) // num_stages
    passes_s = (num_micro + num_stages - 1) * (forward_s + backward_s)
    return passes_s + 2.0 * (num_stages - 1 + waits) * message_s


@pytest.mark.parametrize(("p", "m", "c", "exact", "model"), TABLE)
def test_the_forms_of_1f1b(p: int, m: int, c: int, exact: int, model: int) -> None:
    """The engine is held to the first column in tests/strategy/test_schedules.py."""
    form: dict[str, Any] = {"num_stages": p, "num_micro": m, "message_s": float(c)}
    assert one_forward_one_backward_s(forward_s=10.0, backward_s=20.0, **form) == exact
    assert pipeline_s(**form) == model


def test_two_stages_are_exact_and_more_are_low_by_the_stated_amount() -> None:
    for p in range(1, 9):
        for k in range(1, 6):
            exact = one_forward_one_backward_s(
                num_stages=p, num_micro=p * k, forward_s=10.0, backward_s=20.0, message_s=2.0
            )
            model = pipeline_s(num_stages=p, num_micro=p * k, message_s=2.0)
            assert exact - model == pytest.approx(2 * 2.0 * max(p - 2, 0) if k > 0 else 0.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_faster_link_never_makes_the_exact_form_slower(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, m = int(rng.integers(1, 9)), int(rng.integers(1, 30))
    forward_s, backward_s, message_s = rng.random(3).tolist()

    def seconds(scale: float, message: float) -> float:
        return one_forward_one_backward_s(
            num_stages=p,
            num_micro=m,
            forward_s=scale * forward_s,
            backward_s=scale * backward_s,
            message_s=scale * message,
        )

    assert seconds(1.0, 0.5 * message_s) <= seconds(1.0, message_s)
    assert seconds(3.0, message_s) == pytest.approx(3.0 * seconds(1.0, message_s))


def test_the_model_by_hand() -> None:
    """p 2, m 4: two rounds with a trip of 5 s, a stage more, then 7 + 2 s of gradients."""
    measured = Communication(pipeline_s=5.0, between_s=7.0, inside_s=2.0)
    layout = costs(num_stages=2, num_micro=4)
    assert latency_s(layout, measured) == 2 * 65.0 + 30.0 + 9.0


def test_gradients_of_an_order_are_those_of_rings() -> None:
    """Where all rates are equal: 2 (n - 1)/n of the bytes over each kind of link; here n is 2."""
    rates = HostRates(np.full((8, 8), 7.0))
    assert not rates.differ
    volume = CommunicationVolume(
        num_stages=4, replicas_per_host=2, message_bytes=3.0, gradient_bytes=5.0
    )
    order = np.random.default_rng(0).permutation(hostnames(8))
    found = rates.communication(order, volume)
    assert found.pipeline_s == pytest.approx(2 * 3 * 3.0 / 7.0)
    assert found.between_s == pytest.approx(2 * 1 / 2 * 5.0 / 7.0)
    assert found.inside_s == pytest.approx(2 * 1 / 2 * 5.0 / 7.0)


def random_rates(hosts: int, seed: int) -> HostRates:
    return HostRates(np.random.default_rng(seed).uniform(1.0, 10.0, (hosts, hosts)))


@one_in(2)
@pytest.mark.parametrize("pricing", Pricing)
@pytest.mark.parametrize(("hosts", "stages"), [(6, 2), (6, 3), (6, 6), (7, 1), (7, 7), (8, 4)])
def test_annealing_finds_what_brute_force_finds(hosts: int, stages: int, pricing: Pricing) -> None:
    rates = random_rates(hosts, hosts + stages)
    volume = CommunicationVolume(
        num_stages=stages, replicas_per_host=2, message_bytes=1.0, gradient_bytes=2.0, team_size=2
    )

    def cost_of(order: IntArray) -> float:
        return rates.communication(order, volume, pricing).total_s

    least = min(cost_of(np.array(order, np.int32)) for order in permutations(range(hosts)))
    start = hostnames(hosts)
    found = anneal(cost_of, start, np.random.default_rng(0), num_steps=2 * COOLED)
    assert sorted(found) == list(range(hosts))
    assert cost_of(np.array(found, np.int32)) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(5))
def test_an_order_is_never_worse_than_the_one_given_however_short_the_search(seed: int) -> None:
    rates = random_rates(12, seed)
    volume = CommunicationVolume(
        num_stages=3, replicas_per_host=1, message_bytes=1.0, gradient_bytes=1.0
    )
    start = hostnames(12)

    def cost_of(order: IntArray) -> float:
        return rates.communication(order, volume).total_s

    costs_by_steps = [
        cost_of(np.array(anneal(cost_of, start, np.random.default_rng(seed), num_steps=steps)))
        for steps in (0, 10, 1000)
    ]
    assert costs_by_steps[0] == cost_of(start)
    assert costs_by_steps == sorted(costs_by_steps, reverse=True)
    again = anneal(cost_of, start, np.random.default_rng(seed), num_steps=1000)
    assert again == anneal(cost_of, start, np.random.default_rng(seed), num_steps=1000)
    asked = iter([False, False, True])
    anneal(
        cost_of, start, np.random.default_rng(seed), num_steps=1000, is_over=lambda: next(asked)
    )
    assert next(asked, None) is None


def test_moves_are_permutations_and_reach_everything() -> None:
    rng = np.random.default_rng(0)
    seen: set[tuple[int, ...]] = set()
    order = hostnames(4)
    for _ in range(2000):
        order = moved(order, rng)
        seen.add(tuple(order.tolist()))
    assert seen == set(permutations(range(4)))


@pytest.mark.parametrize(("value", "expected"), [(0.1, 0.1), (1.0, 0.1), (0.0999, 0.999)])
def test_differences_lose_their_size(value: float, expected: float) -> None:
    assert scaled(value) == pytest.approx(expected)


@needs_data
@pytest.mark.parametrize("stages", [1, 4, 8, 16])
def test_the_published_matrix_has_a_better_order_than_hostnames(stages: int) -> None:
    """By 0.4 to 10 %; with two stages, whose ring skips every other host, one run finds none."""
    rates = real_rates()
    volume = CommunicationVolume(
        num_stages=stages, replicas_per_host=1, message_bytes=0.0671 * GB, gradient_bytes=2 * GB
    )

    def cost_of(order: IntArray) -> float:
        return rates.communication(order, volume).total_s

    found = anneal(cost_of, hostnames(16), np.random.default_rng(0), num_steps=COOLED)
    assert cost_of(np.array(found)) < cost_of(hostnames(16))


@pytest.mark.parametrize("seed", range(20))
def test_rates_are_those_of_a_transfer_that_is_alone(seed: int) -> None:
    cluster = random_cluster(Random(seed))
    found = 1.0 / HostRates.of_cluster(cluster).s_per_byte
    for i in range(cluster.num_hosts):
        assert found[i, i] == pytest.approx(cluster.hosts[i].intra.bandwidth_bytes_per_s)
        for j in range(cluster.num_hosts):
            pair = cluster.host_devices[i][0], cluster.host_devices[j][0]
            if i != j:
                assert found[i, j] == pytest.approx(cluster.bottleneck_bytes_per_s(*pair))
