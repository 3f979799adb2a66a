"""Explanations on a terminal: every fact is there, nothing is wider than 100 columns."""

from io import StringIO

from rich.console import Console, RenderableType

from heterog.explain.explanation import explain
from heterog.report.tables import explanation_text, memory_table
from heterog.strategy.strategy import Decision
from tests.simulator.builders import cluster_of, linear_chain, plan_by_hand, strategy_of


def printed(shown: RenderableType, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(shown)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_words_and_table_of_a_plan() -> None:
    graph = linear_chain(("a", "b"), batch_size=8, width=4096)
    cluster = cluster_of((10.0, ["T4", "T4", "T4"]), (10.0, ["V100-16GB"]))
    decision = Decision(devices=(0, 1, 2, 3), shares=(2, 2, 2, 2))
    plan = plan_by_hand(graph, cluster, strategy_of(graph, cluster, decision))
    explanation = explain(plan, changes=False)
    text = printed(explanation_text(explanation), 160)
    assert text.startswith("In short: ")
    assert all(p.split()[0] in text for p in explanation.paragraphs)
    table = printed(memory_table(explanation.fit), 100)
    assert "A:0 to A:2 (3)" in table
    # Two weights of 64 MiB, their gradients, and twice as much state.
    assert "0.12" in table
    assert "0.25" in table
    assert max(len(line.rstrip()) for line in (text + table).splitlines()) <= 100
