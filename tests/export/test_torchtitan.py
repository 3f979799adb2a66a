"""Plans that are layouts, as torchtitan's TOML, read back as the same strategy."""

from dataclasses import replace
from pathlib import Path

import pytest

from heterog.export import ExportError, make_export
from heterog.search.plan import Plan
from heterog.strategy.layouts.files import read_layout
from heterog.strategy.layouts.layout import Layout, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.schedules import AS_IT_COMES
from tests.runtime.strategies import graph_of
from tests.simulator.builders import plan_by_hand
from tests.strategy.test_layouts import CLUSTER, GRAPH, placed
from tests.thorough import THOROUGH, few_of


def plan_of(text: str) -> Plan:
    return plan_by_hand(GRAPH, CLUSTER, placed(text).strategy)


def exported(plan: Plan, folder: Path) -> tuple[Layout, tuple[str, ...], tuple[str, ...]]:
    """The layout in the TOML, the reader's remarks, and what is not expressed."""
    made = make_export(plan, "torchtitan")
    (folder / "a.toml").write_bytes(made.files["torchtitan.toml"])
    found = read_layout(folder / "a.toml")
    assert found.batch_size == GRAPH.batch_size
    return found.layout, found.remarks, made.not_expressed


@pytest.mark.parametrize(
    "text",
    few_of(
        [
            "tp=2,pp=2,micro_batch=2,zero=3,sp=true",
            "pp=4,layers=1-2-3-2,micro_batch=4,zero=2,recompute=full,recompute_every=2",
            "pp=2,schedule=interleaved,chunks=4,zero=3,dp_replicate=2,micro_batch=1",
            "tp=2,pp=4,micro_batch=4,sp=true,recompute=op",
            "tp=4,zero=3,sp=true,recompute=full",
            "pp=4,schedule=interleaved,micro_batch=1,zero=2",
            "pp=2,schedule=zero_bubble_v,micro_batch=2,zero=2",
            "pp=2,schedule=breadth_first,chunks=2,micro_batch=2,zero=3",
            "pp=8,schedule=gpipe,micro_batch=4",
        ],
        3,
    ),
)
def test_a_layout_is_read_back_as_the_same_strategy(tmp_path: Path, text: str) -> None:
    plan = plan_of(text)
    layout, remarks, not_expressed = exported(plan, tmp_path)
    assert place_layout(layout, GRAPH, CLUSTER).strategy == plan.strategy
    assert (remarks, not_expressed) == ((), ())


@THOROUGH
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt", "cp=2,pp=2,zero=2"),
        ("moe", "ep=2,zero=2"),
        ("moe", "ep=2,tp=2,zero=3,sp=true"),
        ("moe", "ep=2,zero=3,dp_replicate=2"),
    ],
)
def test_sequences_and_experts_are_read_back(tmp_path: Path, name: str, text: str) -> None:
    graph = graph_of(name)
    strategy = place_layout(parse_layout(text), graph, CLUSTER).strategy
    made = make_export(plan_by_hand(graph, CLUSTER, strategy), "torchtitan")
    (tmp_path / "a.toml").write_bytes(made.files["torchtitan.toml"])
    layout = read_layout(tmp_path / "a.toml").layout
    assert place_layout(layout, graph, CLUSTER).strategy == strategy
    assert not made.not_expressed


def test_what_torchtitan_does_otherwise_is_named(tmp_path: Path) -> None:
    layout, _, said = exported(plan_of("tp=2,pp=2,micro_batch=2"), tmp_path)
    assert (layout.zero, layout.sequence_parallel) == (2, True)
    assert [each.split(":")[0] for each in said] == [
        "Whole activations between the products of a team",
        "Whole copies of what replicas train",
    ]
    plan = plan_of("tp=2,pp=2,micro_batch=2,zero=3,sp=true")
    capped = replace(plan.strategy.schedule, turns=(), in_flight=((2,),) * 8)
    other = plan_by_hand(GRAPH, CLUSTER, replace(plan.strategy, schedule=capped))
    assert exported(other, tmp_path)[2][0].startswith("The plan's order of passes")


def test_what_torchtitan_cannot_say_is_refused_by_name() -> None:
    plan = plan_of("pp=2,micro_batch=4")
    first, last = dict.fromkeys(plan.strategy.decisions)
    narrow = replace(first, devices=(0,), shares=(32,))
    for other, said in (
        (replace(first, shares=(9, 7, 8, 8)), r"plan is none \(samples: .*where a layout has"),
        (narrow, "equal stages of equal replicas"),
    ):
        decisions = tuple(last if each == last else other for each in plan.strategy.decisions)
        strategy = replace(
            plan.strategy, decisions=decisions, micro_batches=(), schedule=AS_IT_COMES
        )
        with pytest.raises(ExportError, match=said):
            make_export(plan_by_hand(GRAPH, CLUSTER, strategy), "torchtitan")
