"""Expert parallelism of layouts: replicas share experts, and nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.methods.megatron_grid import MegatronGrid
from heterog.methods.planner import Budget, Problem
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.experts import expert_weights, groups_of_experts
from heterog.strategy.layouts.layout import Dispatch, LayoutError, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import Strategy
from tests.runtime.grids import grid_cluster
from tests.runtime.strategies import graph_of
from tests.simulator.builders import cluster_of

CAPACITY, WIDTH = 3, 8
"""Of each expert, for each sample; of a token."""
LEAST_BYTES = 64
"""Smaller payloads are losses and counts of labels."""
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
    experts = groups_of_experts(graph)
    assert {g for g, each in enumerate(given.strategy.decisions) if each.teams} == experts
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


@pytest.mark.parametrize("ep", [2, 4])
def test_bytes_of_both_dispatchers_by_the_textbook(ep: int) -> None:
    """What a device sends: (n - 1)/n of its own tokens, or of all of its team's.

    Dispatched are [experts, capacity, width] float32 numbers for each sample. They go to the
    experts and back, forward and backward: four all-to-alls. Gathered instead, the dispatched
    tokens and the gradients of what experts make of them go from each member to all others.
    """
    graph, cluster = moe(), grid_cluster(4)
    own = 2 * 4 * CAPACITY * WIDTH * 4  # two samples, four experts, four bytes
    sent = {}
    for way in Dispatch:
        given = place_layout(parse_layout(f"ep={ep},dispatch={way}"), graph, cluster)
        sent[way] = bytes_for_experts(graph, cluster, given.strategy)
        assert not any("gather" in remark for remark in given.remarks)
    assert sent[Dispatch.ALL_TO_ALL] == pytest.approx([4 * own * (ep - 1) / ep] * 4)
    assert min(sent[Dispatch.ALL_GATHER]) >= 2 * own * (ep - 1)
    assert min(sent[Dispatch.ALL_GATHER]) > 1.9 * ep * max(sent[Dispatch.ALL_TO_ALL])


def bytes_for_experts(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> list[float]:
    """Bytes that each device sends because of experts' tokens, with one team or several."""
    program = lower(graph, cluster, strategy)
    sent = [0.0] * cluster.num_devices
    for task in range(program.num_tasks):
        kind, payload = TaskKind(program.kind[task]), float(program.num_bytes[task])
        channel = program.channels[program.channel[task]]
        members = len(channel.devices)
        part = {
            TaskKind.EXCHANGE_VALUE: 1.0 / members,
            TaskKind.GATHER_VALUE: 1.0,
            TaskKind.REDUCE_VALUE: 2.0,
        }.get(kind, 0.0)
        for device in channel.devices if part and payload > LEAST_BYTES else ():
            sent[device] += part * payload * (members - 1) / members
    return sent


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("ep=2,dp=3", "moe", "does not divide dp=3"),
        ("ep=2,dispatch=all", "moe", "unknown dispatch 'all'; did you mean"),
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
    with pytest.raises(LayoutError, match=r"8 devices share experts .* but there are 4 experts"):
        place_layout(parse_layout("ep=8"), moe(), grid_cluster(8))


class Picked(nn.Module):
    """Each sample is multiplied with the matrices of its own expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.argmax(-1) % 4
        return torch.bmm(x[:, None], self.experts[chosen])[:, 0]


class Grouped(Picked):
    """All samples of an expert are one product, as long as there are any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = functional.one_hot(x.argmax(-1) % 4, 4)
        ends = chosen.sum(0).cumsum(0).to(torch.int32)
        return functional.grouped_mm(x, self.experts, offs=ends)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Picked, "token picks the matrices"), (Grouped, "only while the model")],
)
def test_experts_of_changing_sizes_say_why_they_are_not_shared(
    model: type[nn.Module], why: str
) -> None:
    batch = (torch.zeros(8, 8), torch.zeros(8, 8))
    graph = capture(Workload(model, batch, functional.mse_loss, torch.optim.Adam))
    with pytest.raises(LayoutError, match=f"ep cannot share 'experts'.*{why}"):
        place_layout(parse_layout("ep=2"), graph, grid_cluster(4))


def test_the_grid_shares_experts_where_their_gradients_cost_most() -> None:
    cluster: Cluster = cluster_of(*[(SLOW, ["T4"])] * 4)
    evaluator = Evaluator(moe(), cluster)
    row = run_method(MegatronGrid(), Problem(evaluator=evaluator, budget=Budget.parse("300e")))
    assert row.outcome == "ok"
    assert row.step_time_s is not None
    for ep in (1, 2, 4):
        given = place_layout(parse_layout(f"ep={ep}"), moe(), cluster)
        assert row.step_time_s <= evaluator.referee(given.strategy).step_time_s * (1 + 1e-9)
