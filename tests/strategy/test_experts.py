"""Expert parallelism of layouts: replicas share experts, and nothing else."""

import pytest

from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.planners.judging import run_method
from heterog.planners.megatron_grid import MegatronGrid
from heterog.planners.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.experts import expert_weights
from heterog.strategy.layouts.layout import LayoutError, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.lowering import lower
from tests.runtime.grids import grid_cluster
from tests.runtime.strategies import graph_of
from tests.simulator.builders import cluster_of

SLOW = 0.05
"""GB/s, at which gradients of experts cost more than tokens."""


def moe() -> OpGraph:
    """Four experts of 8 x 16 and back; a batch of 8."""
    return graph_of("moe")


def test_weights_of_experts_are_found_by_their_products() -> None:
    graph = moe()
    names = [graph.tensors[w].name for w in expert_weights(graph, range(graph.num_ops))]
    assert names == ["experts.weight_in", "experts.weight_out"]
    assert expert_weights(graph_of("gpt"), range(graph_of("gpt").num_ops)) == ()


@pytest.mark.parametrize("ep", [2, 4])
def test_a_member_has_its_own_samples_and_its_own_experts(ep: int) -> None:
    graph, cluster = moe(), grid_cluster(4)
    given = place_layout(parse_layout(f"ep={ep}"), graph, cluster)
    assert given.sizes.dp == 4
    decisions = set(given.strategy.decisions)
    assert {decision.shares for decision in decisions} == {(2, 2, 2, 2)}
    assert {len(team) for decision in decisions for team in decision.teams} == {ep}
    plain = lower(graph, cluster, place_layout(parse_layout("dp=4"), graph, cluster).strategy)
    shared = lower(graph, cluster, given.strategy)
    in_experts = sum(
        graph.tensor_bytes[parameter]
        for _, parameter, _ in graph.updates
        if graph.tensors[parameter].name.split(".")[-1]
        in ("weight_in", "weight_out", "bias_in", "bias_out")
    )
    # Other members keep the rest, and its gradients; plain SGD has no state.
    elsewhere = 2 * in_experts * (1.0 - 1.0 / ep)
    assert (plain.resident_bytes - shared.resident_bytes).tolist() == [elsewhere] * 4


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("ep=2,tp=2", "moe", "ep=2 and tp=2: .* give one of them"),
        ("ep=2,cp=2", "moe", "ep=2 and cp=2"),
        ("ep=2,dp=3", "moe", "does not divide dp=3"),
        ("ep=3", "moe", "ep=3 does not divide the 4 replicas"),
        ("ep=2", "gpt", "no experts to share"),
        ("ep=2,zero=3,dp_replicate=2", "moe", "nothing to slice; give fewer copies"),
        ("expert_model_parallel_size=8", "moe", "does not divide the 4 replicas"),
    ],
)
def test_what_does_not_fit_says_why(text: str, name: str, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem) as refused:
        place_layout(parse_layout(text), graph_of(name), grid_cluster(4))
    assert len(str(refused.value).splitlines()) == 1


def test_more_members_than_experts_are_refused() -> None:
    with pytest.raises(LayoutError, match="ep=8 is more than the 4 experts"):
        place_layout(parse_layout("ep=8"), moe(), grid_cluster(8))


def test_the_grid_shares_experts_where_their_gradients_cost_most() -> None:
    cluster: Cluster = cluster_of(*[(SLOW, ["T4"])] * 4)
    evaluator = Evaluator(moe(), cluster)
    row = run_method(MegatronGrid(), Problem(evaluator=evaluator, budget=Budget.parse("300e")))
    assert row.outcome == "ok"
    assert row.step_time_s is not None
    for ep in (1, 2, 4):
        given = place_layout(parse_layout(f"ep={ep}"), moe(), cluster)
        assert row.step_time_s <= evaluator.referee(given.strategy).step_time_s * (1 + 1e-9)
