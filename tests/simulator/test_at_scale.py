"""What large clusters change: prices of few channels, too large programs, folded noise."""

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest

import heterog.simulator.evaluator as evaluator_module
from heterog.cluster.hardware import MAX_DEVICES
from heterog.cluster.spec import parse_cluster
from heterog.cluster.topology import Cluster
from heterog.lowering import resident_bytes
from heterog.lowering.channels import ChannelTable
from heterog.lowering.program import TaskKind
from heterog.pricing import price_table
from heterog.pricing.intervals import Noise, draw_noise
from heterog.simulator import runs
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator, Outcome
from heterog.simulator.lower_bound import floor_s
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.placed import place_layout
from tests.simulator.builders import random_case
from tests.strategy.test_layouts import GRAPH


def hosts_of(num_hosts: int, kinds: tuple[str, ...] = ("A100-80GB",)) -> Cluster:
    text = "".join(
        f"  - {{name: h{number}, devices: [{{type: {kinds[number % len(kinds)]}, count: 8}}], "
        "intra: nvlink_a100, nic: {line_rate: 100 Gbit/s}}\n"
        for number in range(num_hosts)
    )
    return parse_cluster(f"schema_version: 1\nname: large\nhosts:\n{text}", Path("large.yaml"))


@pytest.mark.parametrize("seed", range(60))
def test_prices_of_the_channels_in_use_are_those_of_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, choice = random_case(Random(seed))
    every = [(evaluator.evaluate(choice, o), evaluator.referee(choice, o)) for o in Order]
    monkeypatch.setattr(price_table, "MOST_PRICED", 0)
    few = [(evaluator.evaluate(choice, o), evaluator.referee(choice, o)) for o in Order]
    assert few == every


def test_a_transfer_is_made_when_it_is_asked_for() -> None:
    table = ChannelTable(hosts_of(4))
    assert not table._made
    assert table[1 * 32 + 30].devices == (1, 30)
    assert len(table._made) == 1
    number = table.all_reduce(tuple(range(32)), hierarchical=False)
    assert number == 32 * 32 == len(table) - 1
    with pytest.raises(IndexError):
        table[number + 1]


def test_tasks_are_counted_without_lowering() -> None:
    num_counted = 0
    for seed in range(60):
        evaluator, choice = random_case(Random(seed))
        if choice.rule_set or (choice.home >= 0).any():
            continue  # only about: teams work on samples of others, what is served counts more
        program, counted = evaluator.program(choice), evaluator.tasks_of(choice)
        real = int(np.isin(program.kind, (TaskKind.COMPUTE, TaskKind.UPDATE)).sum())
        # Constants are in no group.
        assert 0.6 * counted <= real + 1
        assert real <= 1.5 * counted + 40
        num_counted += 1
    assert num_counted > 30


def test_what_is_too_large_is_said_and_not_simulated() -> None:
    evaluator, choice = random_case(Random(3))
    evaluator.most_tasks = 1
    for found in (evaluator.evaluate(choice, Order.FIFO), evaluator.referee(choice)):
        assert found.outcome == Outcome.TOO_LARGE
        assert not found.is_ok
        assert found.preference[0] == math.inf
        assert "tasks" in found.shortage
    assert evaluator.num_evaluations == 0


def test_in_haste_what_does_not_fit_is_looked_at_briefly_and_never_said_to_fit() -> None:
    num_seen = num_brief = 0
    order = Order.FIFO
    for seed in range(60):
        evaluator, choice = random_case(Random(seed))
        exact, judged = evaluator.evaluate(choice, order), evaluator.referee(choice, order)
        if judged.outcome == Outcome.CANNOT_RUN:
            continue  # a norm of one value, which is said whatever the memory
        evaluator.feasibility.usable = np.array(judged.peak_memory_bytes) * 0.9
        judged = evaluator.referee(choice, order)
        evaluator.most_tasks = 10**12
        brief = evaluator.referee(choice, order)
        assert brief.outcome == judged.outcome == Outcome.OUT_OF_MEMORY
        assert brief.overflow_bytes <= judged.overflow_bytes

        kept = resident_bytes(evaluator.tables_of(choice), choice)
        evaluator.feasibility.usable = kept / (1.01 * evaluator_module.OVERFULL)
        whole = evaluator.tables.parameter_bytes.sum() * (1.0 + evaluator.tables.state_ratio)
        may_be = whole > evaluator_module.OVERFULL * evaluator.feasibility.usable.min()
        is_brief, evaluator.num_tasks = (
            bool(may_be) and floor_s(evaluator.prices, choice) > 0.0,
            -1,
        )
        for found in (evaluator.evaluate(choice, order), evaluator.referee(choice, order)):
            assert found.outcome == Outcome.OUT_OF_MEMORY
            assert found.step_time_s <= exact.step_time_s * (1.0 + 1e-9)
            assert (np.array(found.peak_memory_bytes) <= judged.peak_memory_bytes).all()
            assert (evaluator.num_tasks == -1) == ("at least" in found.shortage) == is_brief
        evaluator.most_tasks = math.inf
        assert "at least" not in evaluator.evaluate(choice, order).shortage
        num_seen, num_brief = num_seen + 1, num_brief + is_brief
    assert num_seen > 30
    assert num_brief > 10


def test_a_thousand_devices_that_do_alike_are_one_small_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was refused above 512, and pricing all pairs took gigabytes."""
    monkeypatch.setattr(runs, "LEAST_FOLDED", 0)
    cluster = hosts_of(128)
    assert cluster.num_devices == 1024 <= MAX_DEVICES
    evaluator = Evaluator(GRAPH, cluster)
    devices = tuple(range(4 * GRAPH.batch_size))
    layout = Layout(tp=2, pp=2, dp=GRAPH.batch_size)
    choice = evaluator.encode(place_layout(layout, GRAPH, cluster, devices=devices).strategy)
    evaluator.most_tasks = evaluator.tasks_of(choice) - 1
    found = evaluator.evaluate(choice, Order.FIFO)
    assert found.outcome != Outcome.TOO_LARGE, "few of them differ"
    assert evaluator.num_tasks < evaluator.tasks_of(choice)
    assert len(evaluator.channels._made) < 1000


def test_without_noise_a_folded_step_takes_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LEAST_FOLDED", 0)
    cluster = hosts_of(4)
    evaluator = Evaluator(GRAPH, cluster)
    layout = Layout(tp=2, dp=4)
    given = place_layout(layout, GRAPH, cluster, devices=tuple(range(8)))
    choice = evaluator.encode(given.strategy)
    judged = evaluator.referee(choice, Order.RANK)
    none = Noise(device=np.ones((2, 32)), resource=np.ones((2, len(cluster.resources))))
    seconds = evaluator.seconds_under_noise(choice, Order.RANK, none)
    assert seconds == pytest.approx(judged.step_time_s, rel=1e-9)
    some = draw_noise(cluster, 5, evaluator.spreads)
    assert len(set(evaluator.seconds_under_noise(choice, Order.RANK, some).tolist())) == 5
