"""Every method's strategy for models of the zoo can be executed."""

import pytest

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture_step
from heterog.methods.planner import Budget
from heterog.runtime.measure.rehearsal import rehearsal_of
from heterog.search.portfolio import compare_methods
from heterog.search.request import Request
from heterog.zoo import load_workload
from tests.thorough import cases, few_of


@pytest.mark.slow
@pytest.mark.parametrize("model", few_of(["mobilenet_v2", "gpt2"], 0))
def test_every_method(model: str) -> None:
    captured, methods = capture_step(load_workload(model)), default_methods()
    request = Request(
        graph=captured.graph,
        cluster=Cluster.load("paper_8gpu"),
        methods=methods.names,
        known=methods,
        budget=Budget(evaluations=cases(20, 5)),
    )
    rows = compare_methods(request).rehearsed(rehearsal_of(captured)).rows
    assert [row for row in rows if row.outcome == "cannot_run"] == []
    assert any(row.is_rehearsed for row in rows)
