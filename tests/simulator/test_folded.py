"""Folded evaluations: the same time and memory as with every device lowered."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.errors import HeterogError, StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering import Choice
from heterog.lowering.folding import fold_choice, folds, hardware_of
from heterog.methods.teams import rules_of_model
from heterog.pricing.price_table import ChannelPricer
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator
from heterog.simulator.runs import Folding
from heterog.strategy.division import split_evenly
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.schedules import SCHEDULES, PipelineSchedule
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.simulator.builders import (
    random_composition,
    random_graph,
    random_rules,
    strategy_of,
    with_rules,
    within_samples,
)
from tests.strategy.test_layouts import GRAPH
from tests.thorough import cases, one_in

SEED = int(os.environ.get("HETEROG_SEED", "7"))
NUM_RANDOM = int(os.environ.get("HETEROG_RANDOM_STRATEGIES", str(cases(40, 12))))


def cluster_of(hosts: int, devices: int, *, intra: str = "nvlink_a100", nics: int = 1) -> Cluster:
    text = "".join(
        f"  - name: h{number}\n"
        f"    devices: [{{type: A100-80GB, count: {devices}}}]\n"
        f"    intra: {intra}\n"
        f"    nic: {{line_rate: 10 Gbit/s, count: {nics}}}\n"
        for number in range(hosts)
    )
    return parse_cluster(f"schema_version: 1\nname: alike\nhosts:\n{text}", Path("alike.yaml"))


def drawn_layout(rng: random.Random, num_devices: int) -> Layout:
    """Powers of two that multiply to the number of devices."""
    tp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
    return Layout(
        tp=tp,
        pp=pp,
        dp=num_devices // (tp * pp),
        num_micro=rng.choice([1, 2, 4]),
        zero=rng.choice([0, 0, 1, 2, 3]),
        recompute=rng.choice(list(Recompute)),
        schedule=rng.choice(["", "", *SCHEDULES]) if pp > 1 else "",
        vocabulary_parallel=rng.random() < 0.5,
    )


def check(evaluator: Evaluator, choice: Choice) -> int:
    """A folded evaluation is that of all devices; returns how many devices were lowered."""
    for order in Order:
        seconds, peaks = evaluator.simulate(choice, order)
        found = evaluator.evaluate(choice, order)
        assert found.step_time_s == seconds
        # Bytes are added up in another order.
        expected = np.rint(peaks * (1.0 + MEMORY_MARGIN))
        assert np.allclose(found.peak_memory_bytes, expected, rtol=1e-9, atol=1)
        _, _, finish = evaluator.referee_timings(choice, order)
        judged = evaluator.referee(choice, order)
        assert judged.step_time_s == pytest.approx(finish.max() / choice.num_steps, rel=1e-9)
    pricer = ChannelPricer(evaluator.cost_model, evaluator.cluster)
    folding = Folding(evaluator.cluster, pricer, evaluator.channels)
    folded = folding.lower(choice, evaluator.tables_of(choice))
    return evaluator.cluster.num_devices if folded is None else len(folded.fold.columns)


@pytest.fixture(autouse=True)
def small_clusters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heterog.simulator.runs.LEAST_FOLDED", 0)


CLUSTERS = {
    "one NIC": cluster_of(4, 4),
    "own NICs": cluster_of(4, 4, nics=4),
    "shared bus": cluster_of(2, 8, intra="pcie3", nics=2),
    "one host": cluster_of(1, 16),
}


@one_in(2)
@pytest.mark.parametrize("name", CLUSTERS)
def test_folded_equals_unfolded(name: str) -> None:
    cluster = CLUSTERS[name]
    evaluator = Evaluator(GRAPH, cluster)
    rng = random.Random(name)
    columns: Counter[int] = Counter()
    for _ in range(cases(60, 30)):
        devices = list(range(cluster.num_devices))
        if rng.random() < 0.3:
            devices = np.array(devices).reshape(4, 4).T.ravel().tolist()
        layout = drawn_layout(rng, cluster.num_devices)
        try:
            given = place_layout(layout, GRAPH, cluster, devices=devices)
            choice = evaluator.encode(given.strategy)
            evaluator.simulate(choice, Order.FIFO)
        except HeterogError:
            continue  # it does not fit the model, or its turns wait for each other
        columns[check(evaluator, choice)] += 1
    assert sum(count for size, count in columns.items() if size <= 8) >= 5


GRIDS = [
    (1, 2, 4), (1, 4, 2), (2, 2, 2), (1, 8, 1), (1, 1, 8), (2, 4, 1), (2, 1, 4), (4, 2, 1),
    (1, 2, 3),
]  # fmt: skip
"""Grids, lanes of each, and positions."""


def alike_strategy(rng: random.Random, graph: OpGraph, cluster: Cluster) -> Strategy:
    """Any rules and synchronisations on grids of lanes and positions, most of which are alike."""
    num_grids, num_lanes, size = rng.choice(GRIDS)
    devices = list(range(cluster.num_devices))
    if rng.random() < 0.4:
        rng.shuffle(devices)
    per_lane = graph.batch_size // num_lanes
    # What members of a team do of it: by position, so that lanes are alike.
    shares = list(random_composition(rng, per_lane, size))
    if rng.random() < 0.7:
        shares = [per_lane // size] * size
        shares[0] += per_lane % size
    parts = rng.choice([[1] * size, [rng.randint(1, 3) for _ in range(size)]])
    decisions = []
    for grid in range(num_grids):
        first = grid * num_lanes * size
        teams = [devices[first + lane * size :][:size] for lane in range(num_lanes)]
        own = {
            device: (share, part)
            for team in teams
            for device, share, part in zip(team, shares, parts, strict=True)
        }
        decisions.append(
            Decision(
                devices=tuple(sorted(own)),
                shares=tuple(own[device][0] for device in sorted(own)),
                sync=rng.choice([each for each in Sync if not each.is_served]),
                teams=tuple(map(tuple, teams)),
                parts=tuple(own[device][1] for device in sorted(own)),
                recompute=rng.random() < 0.3,
            )
        )
    num_groups = group_ops(graph).num_groups
    chosen = [rng.choice(decisions) for _ in range(num_groups)]
    if rng.random() < 0.5:  # a pipeline
        chosen.sort(key=decisions.index)
    micro: tuple[tuple[int, ...], ...] = ()
    if per_lane % 2 == 0 and rng.random() < 0.5:
        idle = (0, 0)
        micro = ((graph.batch_size // 2,) * 2, *(idle for _ in range(cluster.num_devices - 1)))
    plain = strategy_of(
        graph,
        cluster,
        chosen,
        micro_batches=micro,
        bucket_bytes=rng.choice([0, 100_000]),
        step_barrier=rng.random() < 0.7,
    )
    rules = within_samples(graph, random_rules(rng, graph)) if rng.random() < 0.8 else ()
    strategy = with_rules(graph, plain, rules, keeps_slices=True)
    if micro and rng.random() < 0.5:
        strategy = replace(strategy, schedule=PipelineSchedule(splits_backward=True))
    return strategy


UNLIKE = [
    ((4, 1), (2, 2)), ((4, 1), (2, 1)), ((2, 2), (4, 1)), ((2, 1), (4, 1), (2, 2)),
    ((8, 1), (2, 2)),
]  # fmt: skip
"""(Teams, members of each) of the stages of pipelines whose lanes are alike."""


@pytest.mark.parametrize("stages", UNLIKE)
@pytest.mark.parametrize("link", ["nvlink_a100", "pcie3"])
@pytest.mark.parametrize("num_micro", [1, 2])
def test_stages_of_unlike_width_are_folded(
    stages: tuple[tuple[int, int], ...], link: str, num_micro: int
) -> None:
    """Lanes are then several teams of a stage; nothing was folded before."""
    hosts = max(teams * size for teams, size in stages)
    cluster = cluster_of(hosts * len(stages), 1, intra=link)
    evaluator = Evaluator(GRAPH, cluster)
    rules = rules_of_model(GRAPH)
    assert rules is not None
    decisions, first = [], 0
    for teams, size in stages:
        devices = tuple(range(first, first + teams * size))
        first += hosts
        shares = split_evenly(GRAPH.batch_size, teams * size)
        decisions.append(
            Decision(
                devices=devices,
                shares=shares,
                sync=Sync.RING,
                teams=tuple(devices[team * size :][:size] for team in range(teams)),
                parts=(1,) * len(devices),
            )
        )
    num_groups = group_ops(GRAPH).num_groups
    chosen = [decisions[group * len(stages) // num_groups] for group in range(num_groups)]
    micro: tuple[tuple[int, ...], ...] = ()
    if num_micro > 1:
        idle = (0,) * num_micro
        sizes = split_evenly(GRAPH.batch_size, num_micro)
        micro = (sizes, *(idle for _ in range(cluster.num_devices - 1)))
    strategy = strategy_of(GRAPH, cluster, chosen, micro_batches=micro)
    strategy = replace(strategy, op_rules=rules.op_rules)
    strategy.check(GRAPH, cluster)
    lowered = check(evaluator, evaluator.encode(strategy))
    if link == "nvlink_a100":  # a bus is what a host's devices share: each host has one here
        assert lowered < sum(teams * size for teams, size in stages)


@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_any_strategy_is_folded_truly(seed: int) -> None:
    rng = random.Random(SEED * 100_003 + seed)
    link = rng.choice(["nvlink_a100", "nvlink_a100", "pcie3"])
    cluster = rng.choice(
        [
            cluster_of(2, 4, intra=link, nics=rng.choice([1, 4])),
            cluster_of(1, 8, intra=link),
            cluster_of(4, 2, nics=2),
            cluster_of(8, 1),
        ]
    )
    graph = random_graph(rng, 24)
    strategy = alike_strategy(rng, graph, cluster)
    try:
        strategy.check(graph, cluster)
    except StrategyError:
        pytest.skip("no legal strategy was drawn")
    evaluator = Evaluator(graph, cluster)
    check(evaluator, evaluator.encode(strategy))


def test_teams_of_a_fold_are_numbered_beyond_its_devices() -> None:
    """The kept devices are those of the first and of the last team of eight."""
    hosts = (
        f"  - {{name: {name}, count: {count}, devices: [{{type: {kind}, count: 2}}], "
        "intra: nvlink_a100, nic: {line_rate: 10 Gbit/s}}\n"
        for name, count, kind in (("a", 6, "A100-80GB"), ("v", 2, "V100-16GB"))
    )
    text = "schema_version: 1\nname: alike\nhosts:\n" + "".join(hosts)
    cluster = parse_cluster(text, Path("alike.yaml"))
    evaluator = Evaluator(GRAPH, cluster)
    choice = evaluator.encode(place_layout(Layout(tp=2, dp=8), GRAPH, cluster).strategy)
    fold = next(folds(choice, cluster, hardware_of(cluster)))
    folded, _ = fold_choice(choice, fold)
    assert folded.teams.number.max() >= len(fold.columns)
    check(evaluator, choice)


def arrays(value: object, name: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The arrays of a choice, with their names."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field in value._fields:
            yield from arrays(getattr(value, field), f"{name}.{field}")


def test_whatever_a_choice_says_of_devices_is_folded() -> None:
    cluster = cluster_of(11, 1)
    evaluator = Evaluator(GRAPH, cluster)
    decision = Decision(devices=tuple(range(11)), shares=(3,) * 10 + (2,), sync=Sync.ZERO2)
    capped = PipelineSchedule(in_flight=((1,),) * 11, splits_backward=True)
    strategy = strategy_of(GRAPH, cluster, decision, micro_batches=((16, 16), *[(0, 0)] * 10))
    choice = evaluator.encode(replace(strategy, schedule=capped))
    fold = next(folds(choice, cluster, hardware_of(cluster)))
    assert len(fold.columns) == 3  # 2 and 1, 1 and 2, 1 and 1 samples
    of_devices = {name for name, array in arrays(choice, "choice") if 11 in array.shape}
    assert len(of_devices) > 15
    folded, _ = fold_choice(choice, fold)
    for name, array in arrays(folded, "choice"):
        assert 11 not in array.shape, f"{name} has a row or column for each device"
        if name in of_devices:
            assert 3 in array.shape, name
