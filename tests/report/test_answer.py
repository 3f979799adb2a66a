"""The short answer: at most 15 lines of 80 columns for any plan, and true ones."""

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from heterog.cluster import Cluster
from heterog.explain.explanation import Explanation, explain
from heterog.explain.wording import chance_to_fit
from heterog.graph.op_graph import OpGraph
from heterog.report.html import report_html
from heterog.report.modules import (
    amounts,
    columns_by_host,
    legend,
    placement_lines,
    range_name,
)
from heterog.report.tables import MOST_LINES, answer, brief_answer
from heterog.search.plan import Plan
from heterog.strategy.strategy import Decision, Strategy, Sync
from heterog.units import format_bytes, format_seconds
from tests.search.asking import make_plan
from tests.simulator.builders import (
    cluster_of,
    linear_chain,
    plan_by_hand,
    random_cluster,
    random_graph,
    random_rules,
    random_strategy,
    strategy_of,
    with_rules,
)
from tests.strategy.test_op_rules import sharded_mlp
from tests.thorough import one_in


def told(plan: Plan, width: int = 80, remarks: Sequence[str] = ()) -> tuple[Explanation, str]:
    """The answer as text, held to its size."""
    explanation = explain(plan, changes=False)
    lines = [
        line.plain
        for line in answer(explanation, width=width, remarks=remarks, advice="why? --explain")
    ]
    assert len(lines) <= MOST_LINES == 15
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() or "\n" in line or not line for line in lines)
    return explanation, "\n".join(lines)


def planned(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Plan:
    return plan_by_hand(graph, cluster, strategy)


@one_in(3)
@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("seed", range(12))
def test_any_plan_is_answered_in_fifteen_lines(seed: int, width: int) -> None:
    rng = Random(seed)
    graph, cluster = random_graph(rng), random_cluster(rng)
    strategy = random_strategy(rng, graph, cluster)
    if seed % 3 == 0:
        strategy = with_rules(graph, replace(strategy, micro_batches=()), random_rules(rng, graph))
    plan = planned(graph, cluster, strategy)
    explanation, text = told(plan, width, remarks=["words " * 60, "more words " * 40])
    assert text.startswith(f"{graph.name} on {cluster.name}: ")
    assert "more    why? --explain" in text, "where to read on is never cut away"
    if plan.step_time_s is not None:
        assert format_seconds(explanation.step_time_s) in text.splitlines()[0]
        assert "memory  fits" in text
    elif explanation.fit.is_ok:
        assert "memory  fits, but it cannot run: " in text
    else:
        assert "does not fit" in text


def test_numbers_are_those_of_the_plan() -> None:
    graph = linear_chain(("encoder.a", "encoder.b", "head"))
    cluster = cluster_of((10.0, ["V100-16GB"]), (10.0, ["P100-12GB"]))
    plan = make_plan(
        graph, cluster, methods=("ddp", "ev_ps", "tuned_uniform", "local_search"), budget="30e"
    )
    explanation, text = told(plan)
    assert plan.step_time_s is not None
    assert f": {format_seconds(plan.step_time_s)} a step" in text
    assert f"by {plan.method}" in text
    assert explanation.recommendation.split(".")[0] in " ".join(text.split())
    for gain in plan.gains:
        if gain.over != plan.method:
            assert f"{gain.speedup:.2f}x over {gain.over}" in " ".join(text.split())
    bound = f"can take less than {format_seconds(explanation.bound_s)}"
    assert re.search(f"no plan( without op rules)? {re.escape(bound)}", " ".join(text.split()))


def test_ranges_by_devices_by_hand() -> None:
    names = tuple(f"model.layers.{i}" for i in range(6))
    graph = linear_chain(names, batch_size=8)
    cluster = cluster_of((10.0, ["V100-16GB", "V100-16GB"]), (10.0, ["T4"]), (10.0, ["T4"]))
    front = Decision(devices=(0, 1), shares=(5, 3), sync=Sync.HIERARCHICAL)
    back = Decision(devices=(2,), shares=(8,))
    plan = planned(graph, cluster, strategy_of(graph, cluster, [front] * 4 + [back] * 2))
    _, text = told(plan)
    rows = text.splitlines()
    assert "where   A: 2 V100-16GB; B, C: 1 T4 each" in rows
    first = next(row for row in rows if "layers.0-3" in row)
    assert first.split() == ["layers.0-3", "5", "3", "-", "-", "hierarchical"]
    second = next(row for row in rows if "layers.4-5" in row)
    assert second.split() == ["layers.4-5", "-", "8", "-", "-"]
    assert "samples of 8" in text


def test_what_is_split_by_rules_is_told_in_units() -> None:
    """The columns of a layer are no samples of the batch."""
    graph, strategy = sharded_mlp()
    cluster = cluster_of((1.0, ["T4"]), (1.0, ["T4"]), (1.0, ["T4"]))
    explanation, text = told(planned(graph, cluster, strategy))
    (only,) = explanation.decided.ranges
    assert only.units == (16,)
    assert "or units" in text
    assert "16 units" in text
    decided = replace(explanation.decided, num_micro_batches=4)
    whole = f"samples of {graph.batch_size} in 4 micro-batches, or units"
    for width in (45, 60, 100):
        lines = placement_lines(explanation.plan, decided, width, 8)
        heading = next(line for line in lines if line.startswith("samples of")).partition("  ")[0]
        assert heading.endswith("...") or heading == whole
        assert whole.startswith(heading.removesuffix("...")), "cut at its end"
    pure = replace(only, by_batch=False)
    assert amounts(pure) == ("10", "4", "2")
    assert sum(map(int, amounts(pure))) == 16
    assert amounts(replace(pure, units=(16, 4))) == ("62%", "25%", "12%")
    assert amounts(only) == tuple(map(str, only.shares)), "the batch is split as well"


def test_zero_is_named() -> None:
    graph = linear_chain(("a", "b"), batch_size=8)
    cluster = cluster_of((10.0, ["T4", "T4"]))
    decision = Decision(devices=(0, 1), shares=(5, 3), sync=Sync.ZERO3, slices=(1, 1))
    _, text = told(planned(graph, cluster, strategy_of(graph, cluster, decision)))
    assert "ZeRO-3" in text


def test_a_single_device_needs_no_table() -> None:
    graph = linear_chain(("a", "b"), batch_size=8)
    cluster = cluster_of((10.0, ["T4"]))
    plan = planned(
        graph, cluster, strategy_of(graph, cluster, Decision(devices=(0,), shares=(8,)))
    )
    _, text = told(plan)
    assert "where   the whole model on A:0 (T4)" in text
    assert "gradients" not in text


def test_many_hosts_stand_in_columns_by_type() -> None:
    names = tuple(f"layers.{i}" for i in range(12))
    graph = linear_chain(names, batch_size=128)
    cluster = Cluster.load("hap_v100_p100")
    wide = Decision(devices=tuple(range(16)), shares=(8,) * 16)
    narrow = Decision(devices=tuple(range(16, 64)), shares=(2, 3, 3) * 16)
    ranges = [wide, narrow] * 6
    _, text = told(planned(graph, cluster, strategy_of(graph, cluster, ranges)))
    assert "16 V100-16GB" in text
    assert "16x 8" in text
    assert "48x 2-3" in text
    assert "shorter ranges" in text


def test_what_does_not_fit_says_what_is_missing_and_what_would_help() -> None:
    cluster = cluster_of((10.0, ["V100-16GB"]), (10.0, ["P100-12GB"]))
    devices = tuple(replace(device, usable_memory_bytes=2**20) for device in cluster.devices)
    graph = linear_chain(("a", "b"))
    plan = make_plan(graph, replace(cluster, devices=devices), methods=("ddp",), budget="1e")
    explanation, text = told(plan)
    assert "does not run; the nearest is ddp" in text
    assert "memory  does not fit: " in text
    assert explanation.fit.fullest.device in text
    assert "a step" not in text.splitlines()[0]
    assert " over " not in text, "nothing is faster than what cannot run"


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    ("usable_of_peak", "said"),
    [
        (1.0 / 0.97, "fits, but 3 % below the limit is within the model's error (chance to fit "),
        (
            1.0 / 1.03,
            "does not fit, but 3 % above the limit is within the model's error (chance to fit ",
        ),
        (3.0, "fits; fullest is A:0 (T4), "),
        (1.0 / 3.0, "does not fit: A:0 (T4) lacks "),
    ],
)
def test_a_limit_within_the_models_error_is_told(
    usable_of_peak: float, said: str, width: int
) -> None:
    graph = linear_chain(("a", "b"), width=2048)
    cluster = cluster_of((10.0, ["T4"]))
    alone = strategy_of(graph, cluster, Decision(devices=(0,), shares=(8,)))
    (peak,) = planned(graph, cluster, alone).peak_memory_bytes
    (device,) = cluster.devices
    device = replace(device, usable_memory_bytes=round(usable_of_peak * peak))
    limited = replace(cluster, devices=(device,))
    strategy = strategy_of(graph, limited, Decision(devices=(0,), shares=(8,)))
    plan = planned(graph, limited, strategy)
    explanation, text = told(plan, width)
    flat = " ".join(text.split())
    assert said in flat
    (low, high), chance = plan.peak_intervals_bytes[0], plan.fit_probability
    is_near = low <= device.usable_memory_bytes <= high
    assert chance is not None
    assert ("chance to fit" in flat) == is_near == (0.1 < chance < 0.9)
    assert (f"chance to fit {100 * chance:.0f} %" in flat) == is_near
    in_words = " ".join(explanation.paragraphs)
    assert (
        f"between {format_bytes(low)} and {format_bytes(high)}, four times out of five" in in_words
    )
    assert ("is within the model's error" in in_words) == is_near
    brief = " ".join(" ".join(line.plain.split()) for line in brief_answer(plan, width=width))
    assert ("is within the model's error" in brief) == is_near
    page = report_html(plan, explanation=explanation)
    assert f"on A:0; {chance_to_fit(chance)}</dd>" in page
    assert ("<p><b>3 % " in page) == is_near


def test_names_of_ranges() -> None:
    graph = linear_chain(("a.b.1.x", "a.b.3.y", "head"))
    cluster = cluster_of((10.0, ["T4"]), (10.0, ["T4"]))
    first, last = Decision(devices=(0,), shares=(8,)), Decision(devices=(1,), shares=(8,))
    for decisions, names in (
        ([first, first, last], ["a.b.1-3", "head"]),
        ([first, last, last], ["a.b.1", "a.b.3 to head"]),
    ):
        plan = planned(graph, cluster, strategy_of(graph, cluster, decisions))
        ranges = explain(plan, changes=False).decided.ranges
        assert [range_name(each) for each in ranges] == names
    assert legend(columns_by_host(cluster)) == "A, B: 1 T4 each"
    several = cluster_of((10.0, ["T4", "V100-16GB", "T4"]), (10.0, ["T4"]))
    assert legend(columns_by_host(several)) == "A: 2 T4, 1 V100-16GB; B: 1 T4"
