"""Explanations of small plans: facts by hand, closed forms, and words that follow from them."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.cluster import Cluster
from heterog.explain.changed_cluster import ChangeKind, possible_changes, strategies_with
from heterog.explain.decided import what_was_decided
from heterog.explain.explanation import Explanation, explain
from heterog.explain.what_if import RemedyKind, _judged, remedies, with_idle_devices
from heterog.graph.op_graph import OpGraph
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.teams import rules_of_model
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.memory_breakdown import memory_fit
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.methods.test_recomputing import NESTED, TWO, written_out
from tests.methods.test_repair import with_memory
from tests.search.asking import make_plan
from tests.simulator import builders
from tests.simulator.builders import cluster_of, linear_chain, plan_by_hand, strategy_of
from tests.strategy.test_layouts import GRAPH

FAST = 1e5  # Gbit/s: a network that costs nothing
SLOW = 1e-2  # Gbit/s: a network that costs everything


def planned(graph: OpGraph, cluster: Cluster, methods: str = "tuned_uniform") -> Plan:
    return make_plan(graph, cluster, methods=methods.split(","), budget="60e")


def words_of(explanation: Explanation) -> str:
    return " ".join(explanation.paragraphs)


def test_ranges_of_equal_decisions_and_idle_devices() -> None:
    graph = linear_chain(("a", "b", "c"))
    cluster = cluster_of((10.0, ["T4", "T4"]), (10.0, ["V100-16GB"]), (10.0, ["T4"]))
    both = Decision(devices=(0, 1), shares=(5, 3))
    other = replace(both, sync=Sync.HIERARCHICAL, recompute=True)
    last = Decision(devices=(2,), shares=(8,))
    decided = what_was_decided(strategy_of(graph, cluster, [both, other, last]), graph, cluster)
    assert [(r.first, r.last, r.devices, r.shares) for r in decided.ranges] == [
        ("a", "b", (0, 1), (5, 3)),
        ("c", "c", (2,), (8,)),
    ]
    assert [each.syncs for each in decided.ranges] == [
        ("ring all-reduce", "hierarchical all-reduce"),
        (),
    ]
    assert all(each.by_batch and not each.units for each in decided.ranges)
    assert decided.idle == (3,)
    assert dict(decided.syncs) == {"ring all-reduce": 1, "hierarchical all-reduce": 1}
    # Told to recompute, but its backward pass reads nothing that it made itself.
    assert decided.num_recomputing == 0


def test_one_more_device_saves_its_part_of_the_compute() -> None:
    # Compute only, and a batch that divides by 2 and by 3: the step goes from 1/2 to 1/3.
    graph = linear_chain(("a", "b"), batch_size=6 * 2048)
    cluster = cluster_of((FAST, ["T4"]), (FAST, ["T4"]), latency_s=0.0)
    explanation = explain(planned(graph, cluster))
    best = explanation.changes[0]
    assert (best.kind, best.what) == (ChangeKind.DEVICE, "one more T4")
    assert best.saving == pytest.approx(1 / 3, abs=0.02)
    nic = next(change for change in explanation.changes if change.kind == ChangeKind.NIC)
    assert nic.saving < 0.005
    assert "one more T4 on a host of its own" in words_of(explanation)
    assert "Next to nothing would come of NICs" in words_of(explanation)
    assert explanation.quality.suffices
    assert "Use plain data parallelism" in explanation.recommendation
    assert explanation.left_to_gain < 0.1
    assert "is left to gain on this cluster" in words_of(explanation)


def test_twice_the_network_halves_a_step_that_is_all_network() -> None:
    graph = linear_chain(("a", "b"), batch_size=8)
    cluster = cluster_of((SLOW, ["T4"]), (SLOW, ["T4"]), latency_s=0.0)
    both = Decision(devices=(0, 1), shares=(4, 4))
    plan = plan_by_hand(graph, cluster, strategy_of(graph, cluster, both))
    explanation = explain(plan, changes=False)
    links = sum(p.seconds for p in explanation.pieces if p.limit == "link")
    assert links > 0.95 * explanation.step_time_s
    assert "waits for links, for the 0.01 Gbit/s NICs of A and B to exchange gradients" in (
        words_of(explanation)
    )
    change = next(c for c in possible_changes(cluster) if c.kind == ChangeKind.NIC)
    faster = Evaluator(graph, change.cluster).referee(
        strategy_of(graph, change.cluster, both), Order.FIFO
    )
    assert faster.step_time_s == pytest.approx(explanation.step_time_s / 2, rel=0.05)


def test_a_quick_search_that_finds_better_is_told() -> None:
    # Data parallelism over a network that is far too slow: one device alone is better.
    graph = linear_chain(("a", "b"), batch_size=8)
    cluster = cluster_of((SLOW, ["T4"]), (SLOW, ["T4"]))
    both = Decision(devices=(0, 1), shares=(4, 4))
    explanation = explain(plan_by_hand(graph, cluster, strategy_of(graph, cluster, both)))
    assert explanation.quickly_found_s is not None
    assert explanation.quickly_found_s < 0.5 * explanation.step_time_s
    # Data parallelism is as good as this plan, but not as good as what is known.
    assert not explanation.quality.suffices
    assert "quick search" in explanation.recommendation


def test_a_reference_that_is_faster_is_told() -> None:
    # Two of three hosts halve the step of one; with the third, everything waits for its network.
    graph = linear_chain(("a", "b"), batch_size=2 * 2048)
    cluster = cluster_of((FAST, ["T4"]), (FAST, ["T4"]), (SLOW, ["T4"]), latency_s=0.0)
    plan = make_plan(graph, cluster, methods=("single_device",), budget="5e")
    explanation = explain(plan, changes=False)
    assert not explanation.quality.suffices
    assert explanation.recommendation.startswith("Plan with best_ddp as well (the best")
    assert explanation.recommendation.endswith("less time.")


def test_a_plan_that_does_not_run_is_not_recommended() -> None:
    graph = linear_chain(("a", "b"), batch_size=64)
    cluster = cluster_of((FAST, ["T4"]), (FAST, ["T4"]))
    plan = make_plan(
        graph, cluster, methods=("ddp",), budget="5e", rehearse=lambda *_: "rank 0 is alone"
    )
    explanation = explain(plan, changes=False)
    assert explanation.fit.is_ok
    assert explanation.recommendation.endswith("this plan does not run.")
    assert explanation.to_dict()["recommendation"] == explanation.recommendation


def test_machines_left_out_and_what_they_would_cost() -> None:
    graph = linear_chain(("a", "b"), batch_size=64)
    cluster = cluster_of((FAST, ["V100-16GB"]), (SLOW, ["T4"]))
    explanation = explain(planned(graph, cluster), changes=False)
    (left,) = explanation.left_out
    assert left.devices == (1,)
    assert left.step_time_s is not None
    assert left.step_time_s > explanation.step_time_s
    assert "B:0 (T4) is left out: giving it work as well takes" in words_of(explanation)


def too_large() -> tuple[Evaluator, Strategy]:
    """Eight layers whose activations fit only in parts."""
    graph = linear_chain(tuple("abcdefgh"), batch_size=1024, width=256)
    cluster = cluster_of((10.0, ["T4"]))
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(1024,)))
    needs = Evaluator(graph, cluster).referee(strategy, Order.FIFO).peak_memory_bytes[0]
    small = replace(cluster.devices[0], usable_memory_bytes=round(0.75 * needs))
    changed = replace(cluster, devices=(small,))
    return Evaluator(graph, changed), replace(strategy, cluster=changed.fingerprint)


def test_what_would_make_it_fit_was_simulated() -> None:
    evaluator, strategy = too_large()
    fit = memory_fit(evaluator, strategy, Order.FIFO)
    assert not fit.is_ok
    found = {remedy.kind: remedy for remedy in remedies(evaluator, strategy, Order.FIFO, fit)}
    cut, smaller = found[RemedyKind.MICRO_BATCHES], found[RemedyKind.BATCH_SIZE]
    for num_micro, fits in ((cut.amount, True), (cut.amount - 1, False)):
        assert _judged(evaluator, strategy, Order.FIFO, 1024, num_micro).is_ok == fits
    # The largest batch, checked on graphs that really have this batch and one sample more.
    for batch, fits in ((smaller.amount, True), (smaller.amount + 1, False)):
        graph = linear_chain(tuple("abcdefgh"), batch_size=batch, width=256)
        whole = Decision(devices=(0,), shares=(batch,))
        real = Evaluator(graph, evaluator.cluster)
        judged = real.referee(strategy_of(graph, evaluator.cluster, whole), Order.FIFO)
        assert judged.is_ok == fits
    assert found[RemedyKind.MEMORY].amount == fit.fullest.peak_bytes


def test_a_batch_of_fewer_samples_than_devices_is_made_smaller() -> None:
    """All of it on one of six devices, whose memory lacks 1 % of what four samples need."""
    graph = linear_chain(tuple("abcdefgh"), batch_size=4, width=8)
    cluster = cluster_of((10.0, ["T4"] * 6))
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(4,)))
    needs = Evaluator(graph, cluster).referee(strategy, Order.FIFO).peak_memory_bytes[0]
    small = [replace(each, usable_memory_bytes=round(0.99 * needs)) for each in cluster.devices]
    changed = replace(cluster, devices=tuple(small))
    evaluator, there = Evaluator(graph, changed), replace(strategy, cluster=changed.fingerprint)
    fit = memory_fit(evaluator, there, Order.FIFO)
    found = {remedy.kind: remedy for remedy in remedies(evaluator, there, Order.FIFO, fit)}
    assert found[RemedyKind.BATCH_SIZE].amount == 3


def test_no_more_is_made_again_than_it_takes_to_fit() -> None:
    """With more and more room: everything, all but every other product, scores of attention."""
    graph = written_out()
    whole = Decision(devices=(0, 1, 2, 3), shares=(4, 4, 4, 4))
    peaks = [
        max(Evaluator(graph, TWO).referee(each, Order.FIFO).peak_memory_bytes)
        for each in (
            *(
                strategy_of(graph, TWO, replace(whole, recompute=True, keeps=keeps))
                for keeps in reversed(NESTED)
            ),
            strategy_of(graph, TWO, whole),
        )
    ]
    said = []
    for smaller, larger in pairwise(peaks):
        assert smaller < larger
        tight = with_memory(TWO, [(smaller + larger) / 2] * 4)
        strategy, evaluator = strategy_of(graph, tight, whole), Evaluator(graph, tight)
        fit = memory_fit(evaluator, strategy, Order.FIFO)
        found = {remedy.kind: remedy for remedy in remedies(evaluator, strategy, Order.FIFO, fit)}
        said.append(found[RemedyKind.RECOMPUTE])
    assert [remedy.keeps for remedy in said] == [*reversed(NESTED)]
    seconds = [remedy.step_time_s for remedy in said]
    assert seconds == sorted(seconds, key=lambda s: -(s or 0.0))


def test_a_plan_that_does_not_fit_says_what_is_short_and_what_to_do() -> None:
    evaluator, strategy = too_large()
    plan = plan_by_hand(evaluator.graph, evaluator.cluster, strategy)
    explanation = explain(plan)
    assert "The plan does not fit: A:0 (T4) needs" in words_of(explanation)
    assert "micro-batches" in explanation.recommendation
    assert "usable on every T4" in explanation.recommendation
    assert "a quick search on the same cluster found a plan" in explanation.recommendation
    memory = [c for c in explanation.changes if c.kind == ChangeKind.MEMORY]
    assert [c.after_s is not None for c in memory] == [True]


def test_changes_of_the_paper_cluster() -> None:
    cluster = Cluster.load("paper_8gpu")
    peaks = [[0] * 7 + [cluster.devices[7].usable_memory_bytes]]
    changes = list(possible_changes(cluster, peaks))
    assert [str(change.kind) for change in changes] == [
        "device", "device", "device", "nic", "nic", "inner_link", "inner_link", "memory",
    ]  # fmt: skip
    for change in changes:
        before = [(d.name, d.type.name) for d in cluster.devices]
        after = [(d.name, d.type.name) for d in change.cluster.devices]
        assert after[:8] == before
        assert len(after) == 8 + (change.kind == ChangeKind.DEVICE)
        assert change.cluster.fingerprint != cluster.fingerprint
    grown = changes[-1].cluster.devices[7]
    assert grown.usable_memory_bytes == cluster.devices[7].usable_memory_bytes + 12 * 2**30
    alone = Cluster.load("homogeneous_8xa100")
    (device, link) = possible_changes(alone)
    assert (device.where, device.cluster.num_hosts) == ("in host A", 1)
    assert link.kind == ChangeKind.INNER_LINK


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, deadline=None)
def test_any_plan_can_be_explained(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = builders.random_graph(rng), builders.random_cluster(rng)
    strategy = builders.random_strategy(rng, graph, cluster)
    plan = plan_by_hand(graph, cluster, strategy)
    explanation = explain(plan, evaluations=8)
    assert sum(p.seconds for p in explanation.pieces) == pytest.approx(
        explanation.step_time_s, rel=1e-9
    )
    text = json.dumps(explanation.to_dict(), allow_nan=False)
    assert text == json.dumps(explain(plan, evaluations=8).to_dict(), allow_nan=False)
    assert all(text.endswith(".") for text in explanation.paragraphs)
    savings = [change.saving for change in explanation.changes]
    assert savings == sorted(savings, reverse=True)
    assert min(savings) >= 0.0
    for change in explanation.changes:
        if change.before_s is not None:
            assert (change.after_s or math.inf) <= change.before_s
    # Whoever joins a strategy leaves a legal one.
    evaluator = Evaluator(graph, cluster)
    joiner = (rng.randrange(cluster.num_devices),)
    for joined in strategies_with(strategy, evaluator, joiner, evaluator.speeds):
        joined.check(graph, cluster)
        evaluator.evaluate(joined, Order.FIFO)


@pytest.mark.parametrize("sync", [Sync.RING, Sync.ZERO1])
def test_whoever_joins_teams_is_a_team_of_its_own(sync: Sync) -> None:
    """A plan of tensor parallel pairs could not be asked what another device would save."""
    pairs = builders.cluster_of((1.0, ["T4"] * 2), (1.0, ["T4"] * 3))
    evaluator = Evaluator(GRAPH, pairs)
    rules = rules_of_model(GRAPH)
    assert rules is not None
    decision = Decision(
        devices=(0, 1, 2, 3), shares=(8,) * 4, sync=sync, teams=((0, 1), (2, 3)), parts=(1,) * 4
    )
    strategy = replace(uniform_strategy(evaluator, decision), op_rules=rules.op_rules)
    evaluator.evaluate(strategy, Order.FIFO)
    for joined in strategies_with(strategy, evaluator, (4,), evaluator.speeds):
        evaluator.evaluate(joined, Order.FIFO)
        assert any(each.teams == ((0, 1), (2, 3), (4,)) for each in joined.decisions)


def test_idle_devices_join_a_layout_in_micro_batches() -> None:
    """A layout says of each device what it has of each micro-batch, of idle ones nothing.

    ``heterog plan`` of a model whose best plan leaves hosts idle ended with that error.
    """
    cluster = builders.cluster_of(*[(10.0, ["T4"] * 2)] * 3)
    evaluator = Evaluator(GRAPH, cluster)
    layout = Layout(pp=2, dp=2, num_micro=4)
    strategy = place_layout(layout, GRAPH, cluster, devices=range(4)).strategy
    assert sum(map(sum, strategy.micro_batches)) != GRAPH.batch_size
    joined = list(strategies_with(strategy, evaluator, (4, 5), evaluator.speeds))
    assert joined
    for each in joined:
        assert each.num_micro_batches == 4
        assert {4, 5} & {device for decision in each.decisions for device in decision.devices}
    assert with_idle_devices(evaluator, strategy, Order.FIFO, (4, 5)) is not None


def test_micro_batches_make_teams_fit() -> None:
    """Op rules once excluded micro-batches; now they are tried."""
    pairs = builders.cluster_of((1.0, ["T4"] * 2), (1.0, ["T4"] * 2))
    evaluator = Evaluator(GRAPH, pairs)
    rules = rules_of_model(GRAPH)
    assert rules is not None
    decision = Decision(
        devices=(0, 1, 2, 3), shares=(8,) * 4, teams=((0, 1), (2, 3)), parts=(1,) * 4
    )
    strategy = replace(uniform_strategy(evaluator, decision), op_rules=rules.op_rules)
    peak = evaluator.evaluate(strategy, Order.FIFO).peak_memory_bytes[0]
    cut = replace(strategy, micro_batches=((16, 16), (0, 0), (0, 0), (0, 0)))
    less = evaluator.evaluate(cut, Order.FIFO).peak_memory_bytes[0]
    assert less < 0.95 * peak
    small = replace(
        pairs,
        devices=tuple(replace(d, usable_memory_bytes=(less + peak) // 2) for d in pairs.devices),
    )
    tight = Evaluator(GRAPH, small)
    there = replace(strategy, cluster=small.fingerprint)
    fit = memory_fit(tight, there, Order.FIFO)
    found = {remedy.kind: remedy for remedy in remedies(tight, there, Order.FIFO, fit)}
    assert found[RemedyKind.MICRO_BATCHES].amount == 2
