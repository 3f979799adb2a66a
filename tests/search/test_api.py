"""What is given to ``heterog.plan`` and ``heterog.layout`` as something else than they take."""

from typing import Any

import pytest

import heterog
from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.simulator.compile_kernels import smallest_graph


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workload": None}, "the workload is of type NoneType; give a heterog.Workload"),
        ({"cluster": "two.yaml"}, r"`cluster` is of type str; give a cluster, heterog\.Cluster"),
        ({"budget": 30}, "`budget` is of type int; give a text, '30s'"),
        ({"objective": "cheapest"}, "`objective` is of type str; give an Objective"),
    ],
)
def test_a_plan_of_something_else_is_refused_in_one_line(given: Any, words: str) -> None:
    asked = {"workload": smallest_graph(), "cluster": Cluster.load("rtx_mixed"), "method": "ddp"}
    with pytest.raises(HeterogError, match=words):
        heterog.plan(**asked | given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": "2"}, "tp is '2'; give a whole number"),
        ({"micro_batch": 0.5}, "micro_batch is 0.5; give a whole number"),
        ({"recompute": "some"}, "unknown recompute 'some'; did you mean 'none'"),
    ],
)
def test_a_layout_of_other_types_is_refused_in_one_line(given: Any, words: str) -> None:
    with pytest.raises(HeterogError, match=words):
        heterog.layout(smallest_graph(), Cluster.load("rtx_mixed"), **given)
