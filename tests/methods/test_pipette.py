"""Pipette's models and objective: published values, closed forms, brute force."""

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
    HostRates,
    Pricing,
    Traffic,
    UniformCosts,
    Variant,
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
        traffic = Traffic(
            num_stages=case["pp"],
            replicas_per_host=case["inner_dp"],
            message_bytes=0.0671 * GB,
            gradient_bytes=2.0 * GB,
        )
        found = rates.communication(np.array(case["perm"], np.int32), traffic)
        assert 1e3 * found.total_s == pytest.approx(case["cost_ms"], rel=1e-6)


# p, m, c with F = 10, B = 20: exact 1F1B, eager order, Pipette's path, and amp with the real B.
TABLE = [
    (4, 8, 0, 330, 330, 330),
    (4, 8, 2, 362, 342, 354),
    (4, 16, 2, 626, 582, 618),
    (8, 32, 2, 1306, 1198, 1282),
    (8, 8, 5, 580, 520, 520),
    (4, 8, 10, 490, 390, 450),
    (4, 2, 2, 162, 162, 162),
]


def costs(**changes: Any) -> UniformCosts:
    """Ten hosts' worth of nothing in particular: no gradients, a message of one byte."""
    values = {
        "num_stages": 4,
        "num_replicas": 1,
        "replicas_per_host": 1,
        "num_micro": 8,
        "forward_s": 10.0,
        "backward_s": 20.0,
        "message_bytes": 1.0,
        "gradient_bytes": 0.0,
        "inside_bytes_per_s": 1.0,
        "between_bytes_per_s": 1.0,
    } | changes
    return UniformCosts(**values)


def one_forward_one_backward_s(
    *, num_stages: int, num_micro: int, forward_s: float, backward_s: float, message_s: float
) -> float:
    """1F1B with equal stages and links, if sends do not hold up computing.

    T = (m + p - 1)(F + B) + 2 (p - 1) c + 2c ((m - 2) - floor((m - 2)/p)): the eager order, and
    its waits. The engine takes this time (tests/strategy/test_schedules.py); ``+path`` is below it
    by 2c (p - 2) where p divides m.
    """
    waits = (num_micro - 2) - (num_micro - 2) // num_stages
    passes_s = (num_micro + num_stages - 1) * (forward_s + backward_s)
    return passes_s + 2.0 * (num_stages - 1 + waits) * message_s


@pytest.mark.parametrize(("p", "m", "c", "exact", "eager", "path"), TABLE)
def test_the_forms_of_1f1b(p: int, m: int, c: int, exact: int, eager: int, path: int) -> None:
    """The engine is held to the first column in tests/strategy/test_schedules.py."""
    form: dict[str, Any] = {
        "num_stages": p, "num_micro": m, "forward_s": 10.0, "backward_s": 20.0, "message_s": c,
    }  # fmt: skip
    assert one_forward_one_backward_s(**form) == exact
    layout = costs(num_stages=p, num_micro=m, message_bytes=float(c))
    assert latency_s(Variant.PATH, layout) == path
    # With B = 2F amp's 3F are F + B, and its pipeline is that of the eager order.
    assert latency_s(Variant.AMP, layout) == eager
    assert latency_s(Variant.AMP, costs(backward_s=999.0)) == latency_s(Variant.AMP, costs())


def test_two_stages_are_exact_and_more_are_low_by_the_stated_amount() -> None:
    for p in range(1, 9):
        for k in range(1, 6):
            exact = one_forward_one_backward_s(
                num_stages=p, num_micro=p * k, forward_s=10.0, backward_s=20.0, message_s=2.0
            )
            model = latency_s(
                Variant.PATH, costs(num_stages=p, num_micro=p * k, message_bytes=2.0)
            )
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


def test_the_six_models_by_hand() -> None:
    """p 2, m 4, 4 replicas of which 2 on a host; P 3 and D 8 bytes; 4 B/s inside, 2 between."""
    layout = costs(
        num_stages=2,
        num_replicas=4,
        replicas_per_host=2,
        num_micro=4,
        message_bytes=3.0,
        gradient_bytes=8.0,
        inside_bytes_per_s=4.0,
        between_bytes_per_s=2.0,
    )
    measured = Communication(pipeline_s=5.0, between_s=7.0, inside_s=2.0)
    c = 2 * 1 * 3.0 / 2.0
    through = 3 * 30.0 + 60.0 + c  # (m - 1)(F + B) + E + C
    path = 2 * (60.0 + c) + 30.0
    flat = 2 * 3 / 4 * 8.0 / 2.0
    split = 2 * (2 * 1 / 2 * 8.0 / 4.0) + 2 * 1 / 2 * 8.0 / 2.0
    assert latency_s(Variant.AMP, layout) == 3 * 30.0 + 2 * 30.0 + c + flat
    assert latency_s(Variant.PATH, layout) == path + flat
    assert latency_s(Variant.SPLIT, layout) == through + split
    assert latency_s(Variant.PATH_SPLIT, layout) == path + split
    assert latency_s(Variant.MEASURED, layout, measured) == 3 * 30.0 + 60.0 + 5.0 + 9.0
    assert latency_s(Variant.ALL, layout, measured) == 2 * 65.0 + 30.0 + 9.0


def test_the_last_model_is_the_one_before_where_all_rates_are_equal() -> None:
    """But for the factor 2 inside hosts, which only one of the two has; here n is 1."""
    rate = 7.0
    layout = costs(
        num_stages=4, num_replicas=2, message_bytes=3.0, gradient_bytes=5.0,
        inside_bytes_per_s=rate, between_bytes_per_s=rate,
    )  # fmt: skip
    rates = HostRates(np.full((8, 8), rate))
    traffic = Traffic(num_stages=4, replicas_per_host=1, message_bytes=3.0, gradient_bytes=5.0)
    assert not rates.differ
    order = np.random.default_rng(0).permutation(hostnames(8))
    measured = rates.communication(order, traffic)
    expected = latency_s(Variant.PATH_SPLIT, layout)
    assert latency_s(Variant.ALL, layout, measured) == pytest.approx(expected)


def random_rates(hosts: int, seed: int) -> HostRates:
    return HostRates(np.random.default_rng(seed).uniform(1.0, 10.0, (hosts, hosts)))


@one_in(2)
@pytest.mark.parametrize("pricing", Pricing)
@pytest.mark.parametrize(("hosts", "stages"), [(6, 2), (6, 3), (6, 6), (7, 1), (7, 7), (8, 4)])
def test_annealing_finds_what_brute_force_finds(hosts: int, stages: int, pricing: Pricing) -> None:
    rates = random_rates(hosts, hosts + stages)
    traffic = Traffic(
        num_stages=stages, replicas_per_host=2, message_bytes=1.0, gradient_bytes=2.0, team_size=2
    )

    def cost_of(order: IntArray) -> float:
        return rates.communication(order, traffic, pricing).total_s

    least = min(cost_of(np.array(order, np.int32)) for order in permutations(range(hosts)))
    start = hostnames(hosts)
    found = anneal(cost_of, start, np.random.default_rng(0), num_steps=2 * COOLED)
    assert sorted(found) == list(range(hosts))
    assert cost_of(np.array(found, np.int32)) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(5))
def test_an_order_is_never_worse_than_the_one_given_however_short_the_search(seed: int) -> None:
    rates = random_rates(12, seed)
    traffic = Traffic(num_stages=3, replicas_per_host=1, message_bytes=1.0, gradient_bytes=1.0)
    start = hostnames(12)

    def cost_of(order: IntArray) -> float:
        return rates.communication(order, traffic).total_s

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
    traffic = Traffic(
        num_stages=stages, replicas_per_host=1, message_bytes=0.0671 * GB, gradient_bytes=2 * GB
    )

    def cost_of(order: IntArray) -> float:
        return rates.communication(order, traffic).total_s

    found = anneal(cost_of, hostnames(16), np.random.default_rng(0), num_steps=COOLED)
    assert cost_of(np.array(found)) < cost_of(hostnames(16))


@pytest.mark.parametrize("seed", range(20))
def test_rates_are_those_of_a_transfer_that_is_alone(seed: int) -> None:
    cluster = random_cluster(Random(seed))
    found = 1.0 / HostRates.of_cluster(cluster).s_per_byte
    for i in range(cluster.num_hosts):
        assert found[i, i] == pytest.approx(cluster.hosts[i].intra.bandwidth_bytes_per_s)
        for j in range(cluster.num_hosts):
            pair = cluster.host_devices(i)[0], cluster.host_devices(j)[0]
            if i != j:
                assert found[i, j] == pytest.approx(cluster.bottleneck_bytes_per_s(*pair))
