"""Layouts: what they say, what does not fit, and that the strategy does what was said."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from heterog.cluster import Cluster
from heterog.explain.differences import differences
from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout, LayoutError, Recompute, parse_layout
from heterog.strategy.layouts.placed import Given, place_layout, sizes_of
from heterog.strategy.layouts.stages import NO_LAYER, layers_of, stage_of_groups
from heterog.strategy.layouts.tensor import team_rules
from heterog.strategy.schedules import AS_IT_COMES, caps_of_stages
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Keeps, Sync
from tests.runtime.padded import padded_workload
from tests.simulator.builders import cluster_of

BATCH = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.back(torch.relu(self.wide(self.norm(x))))
        return result


class Model(nn.Module):
    def __init__(self, num_blocks: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


@cache
def graph_of(
    num_blocks: int = 8,
    *,
    batch_size: int = BATCH,
    tied: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
) -> OpGraph:
    tokens = torch.zeros(batch_size, 6, dtype=torch.int64)
    workload = Workload(
        model=lambda: Model(num_blocks, tied=tied),
        example_batch=(tokens, tokens),
        loss=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
        optimizer=optimizer,
        name="blocks",
    )
    return capture(workload)


GRAPH = graph_of()
CLUSTER = Cluster.load("paper_8gpu")


def placed(text: str, graph: OpGraph = GRAPH) -> Given:
    return place_layout(parse_layout(text), graph, CLUSTER)


def test_a_layout_is_read_in_every_vocabulary_and_written_back() -> None:
    said = "tp=2,pp=4,micro_batch=1,zero=1,recompute=full,schedule=1f1b"
    layout = parse_layout(said)
    assert layout == Layout(
        tp=2, pp=4, micro_batch=1, zero=1, recompute=Recompute.FULL, schedule="1f1b"
    )
    assert str(layout) == said
    megatron = (
        "--tensor-model-parallel-size=2, pipeline_model_parallel_size=4, micro-batch-size=1, "
        "use_distributed_optimizer=true, recompute-granularity=full, schedule=Schedule1F1B"
    )
    assert parse_layout(megatron) == layout
    assert parse_layout("sharding_strategy=SHARD_GRAD_OP").zero == 2
    uneven = parse_layout("pp=3,layers=1-2-1")
    assert uneven.layers == (1, 2, 1)
    assert parse_layout(str(uneven)) == uneven
    assert parse_layout("pp=2,split=a.b,dp=2") == Layout(pp=2, split=("a.b",), dp=2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "write key=value"),
        ("tp", "write key=value"),
        ("tpp=2", "did you mean 'tp'"),
        ("tp=two", "tp is 'two'; it must be a whole number"),
        ("tp=٣", "whole number"),
        ("tp=0", "tp is 0"),
        ("tp=1,tensor_parallel=1", "says 'tp' twice"),
        ("zero=4", "the stages of ZeRO are 0, 1, 2 and 3"),
        ("recompute_every=2", "give recompute=full"),
        ("recompute=ful", "did you mean 'full'"),
        ("schedule=2f2b,pp=2", "did you mean '1f1b'"),
        ("schedule=1f1b,chunks=2,pp=2", "take schedule=interleaved"),
        ("chunks=2", "pp is 1"),
        ("pp=2,layers=1-2-3", "pp=2 need 2 numbers"),
        ("pp=2,split=a+b", "need 1, one for each stage"),
        ("pp=2,split=a,layers=1-1", "give one of them"),
        ("dp_replicate=2,zero=0", "keeps everything whole"),
        ("dp_replicate=3,dp=8", "zero=3|does not divide into 3 copies"),
        ("dp_replicate=2,dp_shard=4,dp=4", "dp_shard is '4'; .* dp .4. is dp_replicate .2."),
        ("dp_shard=0", "dp_shard is '0'"),
        ("fsdp=hybrid_shard,zero=1", "says 'zero' twice"),
        ("fsdp=fullshard", "did you mean 'full_shard'"),
        ("tp=2,context_parallel=4", "its layers or its sequences, not both; .* such as cp=8"),
        ("sequence_parallel=perhaps", "write true or false"),
        ("vocabulary_parallel=perhaps", "write true or false"),
        ("x" * 20_000, "characters; at most"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem) as refused:
        parse_layout(text)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pp=3", "give dp=2 to leave 2 of them idle"),
        ("tp=4,pp=4", "tp 4 x pp 4 takes 16 devices"),
        ("dp=5", "does not divide among 5 replicas; take a batch of 30 or 35"),
        ("micro_batch=3", "does not divide the 4 samples of a replica"),
        ("num_micro=3", "3 micro-batches do not divide the 4 samples"),
        ("micro_batch=1,num_micro=2", "would be 2 micro-batches of 2"),
        ("pp=8,chunks=2,schedule=interleaved", "16 stages need as many repeated layers"),
        ("pp=4,layers=2-2-2-1", "add up to 7, but the model has 8"),
        ("pp=2,split=blocks.99", "no group of ops begins"),
        ("pp=2,split=embedding", "none the very first one"),
        ("dp_replicate=3", "do not divide into 3 copies .* give one of 1, 2, 4"),
    ],
)
def test_what_does_not_fit_says_what_does(text: str, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem) as refused:
        placed(text)
    assert len(str(refused.value).splitlines()) == 1


def test_uneven_layers_need_a_word() -> None:
    graph = graph_of(6)
    with pytest.raises(LayoutError, match=r"6 repeated layers do not divide into 4.*=2-2-1-1"):
        placed("pp=4", graph)
    assert placed("pp=4,layers=2-2-1-1", graph).sizes.dp == 2


def test_slices_need_an_elementwise_optimizer() -> None:
    with pytest.raises(LayoutError, match="Adafactor looks at whole parameters"):
        placed("zero=1", graph_of(2, optimizer=torch.optim.Adafactor))


def test_stages_have_equal_layers_the_embedding_first_and_the_head_last() -> None:
    assert layers_of(GRAPH).names == tuple(f"blocks.{number}" for number in range(8))
    stages = stage_of_groups(GRAPH, Layout(pp=4))
    by_name = dict(zip(group_ops(GRAPH).names, stages, strict=True))
    assert by_name["embedding"] == 0
    assert by_name["norm"] == by_name["head"] == 3
    for name, stage in by_name.items():
        if name.startswith("blocks."):
            assert stage == int(name.split(".")[1]) // 2
    assert list(stages) == sorted(stages)


def test_devices_are_numbered_as_megatron_does() -> None:
    sizes = sizes_of(Layout(tp=2, pp=2, micro_batch=2), batch_size=BATCH, num_devices=16)
    assert sizes.dp == 4
    assert sizes.num_micro == 4
    # Megatron's own example for tp 2, pp 4 on 16 ranks: teams [g0, g1], stages g0, g4, g8, g12.
    own = sizes_of(Layout(tp=2, pp=4), batch_size=BATCH, num_devices=16)
    assert own.team(0, 0) == (0, 1)
    assert [own.team(rank, 0)[0] for rank in range(4)] == [0, 4, 8, 12]
    assert [own.team(0, replica)[0] for replica in range(2)] == [0, 2]
    in_a_v = placed("pp=4,schedule=zero_bubble_v").strategy.decisions
    assert in_a_v[0].devices == in_a_v[-1].devices == (0, 1), "ranks 0, 1, 2, 3, 3, 2, 1, 0"


def test_copies_in_slices_in_the_words_of_torchtitan_fsdp_and_megatron() -> None:
    hybrid = Layout(dp=8, zero=3, dp_replicate=2)
    assert parse_layout("dp_replicate=2,dp_shard=4") == hybrid
    assert parse_layout("dp=8,data_parallel_shard_degree=4") == hybrid
    assert parse_layout("dp_shard=4") == Layout(dp=4, zero=3)
    assert parse_layout("dp_replicate=4,dp_shard=1") == Layout(dp=4)
    each_host = parse_layout("fsdp=HYBRID_SHARD")
    assert each_host == Layout(zero=3, dp_replicate=0)
    assert parse_layout(str(each_host)) == each_host == parse_layout("dp_replicate=hosts")
    assert parse_layout("fsdp=_HYBRID_SHARD_ZERO2") == Layout(zero=2, dp_replicate=0)
    megatron = "use_distributed_optimizer=true,num_distributed_optimizer_instances=2"
    assert parse_layout(megatron) == Layout(zero=1, dp_replicate=2)


def test_copies_in_slices_lie_on_neighbours_or_on_hosts() -> None:
    (decision,) = set(placed("dp_replicate=2").strategy.decisions)
    assert decision.slice_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    (on_hosts,) = set(placed("fsdp=hybrid_shard").strategy.decisions)
    assert on_hosts.slice_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    in_teams = placed("dp_replicate=2,tp=2").strategy.decisions[0]
    assert in_teams.slice_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert in_teams.teams == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_every_second_layer_recomputes() -> None:
    layers = layers_of(GRAPH).of_group
    decisions = placed("recompute=full,recompute_every=2").strategy.decisions
    found = {
        layer: decision.recompute
        for layer, decision in zip(layers, decisions, strict=True)
        if layer != NO_LAYER
    }
    assert found == {layer: layer % 2 == 1 for layer in found}
    assert len(found) > 2


def test_selective_recomputation_of_no_scores_says_so() -> None:
    given = placed("recompute=selective")
    assert given.strategy == placed("recompute=none").strategy
    assert any("no attention of this model keeps its scores" in each for each in given.remarks)


def test_layers_keep_what_is_not_made_again() -> None:
    graph = capture(padded_workload())
    for said, keeps in (
        ("full", Keeps.NOTHING), ("selective", Keeps.ALL_BUT_SCORES), ("op", Keeps.PRODUCTS)
    ):  # fmt: skip
        given = placed(f"recompute={said}", graph)
        assert not given.remarks
        for layer, decision in zip(
            layers_of(graph).of_group, given.strategy.decisions, strict=True
        ):
            assert decision.recompute == (layer != NO_LAYER)
            assert decision.keeps == (keeps if layer != NO_LAYER else Keeps.NOTHING)


def test_as_many_copies_as_replicas_are_whole() -> None:
    given = placed("dp_replicate=8")
    assert {each.sync.is_sharded for each in given.strategy.decisions} == {False}
    assert any("leave nothing to slice" in remark for remark in given.remarks)


def test_a_layout_does_what_it_says() -> None:
    given = placed("pp=2,micro_batch=2,zero=1,recompute=full")
    program = lower(GRAPH, CLUSTER, given.strategy)
    assert given.sizes.num_micro == 4
    assert set(program.micro.tolist()) == {0, 1, 2, 3}
    computing = program.kind == TaskKind.COMPUTE
    assert set(program.samples[computing].tolist()) == {2}
    assert (program.kind == TaskKind.RECOMPUTE).any()
    assert (program.kind == TaskKind.REDUCE_SCATTER).any()
    groups = dict(zip(group_ops(GRAPH).names, given.strategy.decisions, strict=True))
    assert groups["embedding"].devices == (0, 1, 2, 3)
    assert not groups["embedding"].recompute
    assert groups["head"].devices == (4, 5, 6, 7)
    assert groups["head"].sync == Sync.ZERO1


@pytest.mark.parametrize(
    "text",
    [
        "tp=1",
        "micro_batch=1",
        "zero=3,micro_batch=2",
        "pp=2,zero=2",
        "pp=2,zero=3,micro_batch=2",
        "pp=4,schedule=gpipe",
        "pp=8,recompute=full",
        "pp=4,micro_batch=2,schedule=interleaved",
        "pp=4,schedule=interleaved_zero_bubble",
        "pp=4,schedule=zero_bubble_v",
        "pp=2,schedule=dual_pipe_v",
        "pp=2,dp=2",
        "pp=2,split=blocks.3",
        "tp=2",
        "tp=2,pp=2,micro_batch=1,zero=1,recompute=full",
        "tp=2,micro_batch=2,zero=2",
        "tp=2,zero=3",
        "tp=4,pp=2,schedule=gpipe",
        "tp=2,pp=2,micro_batch=2,schedule=interleaved",
        "tp=2,pp=2,schedule=zero_bubble_v",
        "tp=2,pp=2,dp=1,vocabulary_parallel=false",
        "tp=2,pp=2,micro_batch=2,sp=true",
        "tp=4,sp=true,recompute=full,zero=1",
    ],
)
def test_every_kind_of_layout_can_be_simulated(text: str) -> None:
    given = placed(text)
    evaluator = Evaluator(GRAPH, CLUSTER)
    found = evaluator.referee(given.strategy, Order.FIFO)
    assert found.is_ok
    assert found.step_time_s > 0.0
    idle = CLUSTER.num_devices - given.sizes.num_devices
    assert bool(idle) == any("have no work" in remark for remark in given.remarks)


def test_1f1b_keeps_as_many_micro_batches_as_ranks_follow() -> None:
    """One stage of p holds p - s micro-batches: memory falls along the pipeline, GPipe's not."""
    evaluator = Evaluator(GRAPH, CLUSTER)
    peaks = {
        name: evaluator.referee(placed(f"pp=8,schedule={name}").strategy).peak_memory_bytes
        for name in ("1f1b", "gpipe")
    }
    assert peaks["1f1b"][1] < 0.6 * peaks["gpipe"][1]
    assert peaks["1f1b"][1] > peaks["1f1b"][3] > peaks["1f1b"][5]


def test_a_team_shares_what_can_be_split() -> None:
    """Columns and rows of both weights, the table and the head; norms are everybody's."""
    given = placed("tp=2,pp=2,micro_batch=2")
    plan = axis_plan(GRAPH, given.strategy.op_rules)
    sharded = {GRAPH.tensors[parameter].name for parameter in plan.sharded}
    named = {GRAPH.tensors[parameter].name for _, parameter, _ in GRAPH.updates}
    whole = {name for name in named - sharded}
    assert {name.rpartition(".")[2] for name in whole} == {"weight", "bias"}
    assert all("norm" in name or name.endswith("back.bias") for name in whole)
    decision = given.strategy.decisions[0]
    assert decision.teams == ((0, 1), (2, 3))
    assert decision.parts == (1, 1, 1, 1)
    program = lower(GRAPH, CLUSTER, given.strategy)
    # Two sums a layer and micro-batch forward, two backward, in each of the two teams.
    sums = program.kind == TaskKind.REDUCE_VALUE
    by_layers = 8 * 2 * 2 * given.sizes.num_micro * 2
    assert sums.sum() >= by_layers / 2
    assert not any("reach over several hosts" in remark for remark in given.remarks)
    assert any("reach over several hosts" in remark for remark in placed("tp=4").remarks)


class InTurn(nn.Module):
    """Layers that attend with and without a mask in turn, and take a softmax over either axis."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(16, 16) for name in "qkvo"}) for _ in range(4)
        )
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.ModuleDict)
            q, k, v = (layer[name](x).view(-1, 8, 4, 4).transpose(1, 2) for name in "qkv")
            mask = self.mask if number % 2 else None
            found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            found = found.transpose(1, 2).softmax(1 + number // 2)
            x = x + layer["o"](found.reshape(-1, 8, 16))
        return x


def test_layers_that_make_other_calls_are_not_split_alike() -> None:
    """The rule of attention with a mask has an input more: ModernBERT has both in turn."""
    batch = (torch.zeros(BATCH, 8, 16), torch.zeros(BATCH, 8, 16))
    graph = capture(Workload(InTurn, batch, nn.functional.mse_loss, torch.optim.SGD))
    rules = team_rules(graph, tuple(range(group_ops(graph).num_groups)))
    assert axis_plan(graph, rules.op_rules).sharded  # every rule is legal for its op
    with_rules = {op for op, _ in rules.op_rules}
    attended = [n for n, op in enumerate(graph.ops) if op.kind == "attention"]
    assert len(attended) == 4
    assert with_rules.issuperset(attended)


def test_a_team_has_no_more_members_than_units() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    batch = torch.zeros(BATCH, 3)
    graph = capture(
        Workload(Narrow, (batch, batch), nn.functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    )
    with pytest.raises(LayoutError, match="more members than the 3 units"):
        placed("tp=8", graph)


def test_a_shared_weight_is_said() -> None:
    given = placed("pp=2", graph_of(4, tied=True))
    assert any("shares a weight with a later stage" in remark for remark in given.remarks)
    assert not placed("pp=2").remarks


def test_caps_let_micro_batches_go_back_to_a_shared_weight() -> None:
    """A head on the first stage: with the caps of 1F1B micro-batches go around one by one."""
    graph, cluster = graph_of(8, tied=True), cluster_of((10.0, ["V100-16GB"] * 4))
    layout = parse_layout("pp=4,micro_batch=1")
    capped = place_layout(layout, graph, cluster).strategy
    assert capped.schedule.in_flight == ((6,), (5,), (4,), (3,))
    evaluator = Evaluator(graph, cluster)
    one_by_one = caps_of_stages([(0,), (1,), (2,), (3,)], 4)
    uncapped_s, capped_s, one_by_one_s = (
        evaluator.referee(replace(capped, schedule=schedule)).step_time_s
        for schedule in (AS_IT_COMES, capped.schedule, one_by_one)
    )
    assert capped_s < 1.1 * uncapped_s
    assert one_by_one_s > 1.15 * uncapped_s


def test_differences_name_what_a_plan_does_otherwise() -> None:
    before, after = placed("tp=2,pp=2,micro_batch=1").strategy, placed("zero=1").strategy
    found = {each.what: each for each in differences(before, after, GRAPH, CLUSTER)}
    assert "devices" not in found, "members without samples of their own work, too"
    assert "samples" not in found, "both share the batch evenly"
    assert (found["teams"].given, found["teams"].ours) == ("of 2", "none")
    assert found["stages"].given.startswith("2, the later ones from blocks.4")
    assert found["micro-batches"].ours == "none"
    assert "ZeRO-1" in found["gradients"].ours
    assert not differences(before, before, GRAPH, CLUSTER)


def test_positions_are_shared_out_between_matrix_products() -> None:
    """As many bytes over the links, and nothing whole is summed inside the layers."""
    programs, peaks = {}, {}
    for name in ("tp=2,dp=4,micro_batch=4", "tp=2,dp=4,micro_batch=4,sp=true"):
        strategy = placed(name).strategy
        programs[name] = lower(GRAPH, CLUSTER, strategy)
        # Of a graph as small as this, the optimizer's own results would be the peak.
        graph = replace(GRAPH, optimizer_step_ratios=(0.0, 0.0))
        peaks[name] = Evaluator(graph, CLUSTER).referee(strategy).peak_memory_bytes
    plain, split = programs.values()
    sums = split.kind == TaskKind.REDUCE_VALUE
    assert not (split.num_bytes[sums] > 1000.0).any(), "only the loss and its label counts"
    scatters = split.kind == TaskKind.SCATTER_VALUE
    large = (plain.kind == TaskKind.REDUCE_VALUE) & (plain.num_bytes > 1000.0)
    # Each sum becomes a reduce-scatter of as many bytes; two members have half of them each.
    assert scatters.sum() == large.sum()
    assert split.num_bytes[scatters].sum() == pytest.approx(plain.num_bytes[large].sum())
    assert max(peaks["tp=2,dp=4,micro_batch=4,sp=true"]) < max(peaks["tp=2,dp=4,micro_batch=4"])


@pytest.mark.parametrize("micro", [1, 2])
def test_breadth_first_gathers_and_reduces_once_a_step(micro: int) -> None:
    """Lamy-Poirier 2023: 3 S of traffic, however many micro-batches, layer by layer."""
    graph = graph_of(4)
    size = sum(int(graph.tensor_bytes[parameter]) for parameter in graph.parameters)
    words = f"dp=8,zero=3,micro_batch={micro}"
    found = {}
    for schedule in ("", ",schedule=breadth_first"):
        strategy = placed(words + schedule, graph).strategy
        assert strategy_from_dict(strategy_to_dict(strategy)) == strategy
        program = lower(graph, CLUSTER, strategy)
        for kind in (TaskKind.GATHER_PARAMETERS, TaskKind.REDUCE_SCATTER):
            found[schedule, kind] = float(program.num_bytes[program.kind == kind].sum())
    once = found[",schedule=breadth_first", TaskKind.REDUCE_SCATTER]
    assert once == size
    assert size < found[",schedule=breadth_first", TaskKind.GATHER_PARAMETERS] <= 2 * size
    for (schedule, kind), moved in found.items():
        if not schedule:
            assert moved == found[",schedule=breadth_first", kind] * (BATCH // 8 // micro)


def test_breadth_first_keeps_one_layer_whole_unless_a_weight_is_shared() -> None:
    words = "dp=8,zero=3,micro_batch=1,schedule="
    graph, tied = graph_of(8), graph_of(8, tied=True)
    evaluator = Evaluator(graph, CLUSTER)
    first, all_whole = (
        replace(placed(words + name, graph).strategy.schedule, gathers_once=True)
        for name in ("breadth_first", "gpipe")
    )
    strategy = placed(words + "breadth_first", graph).strategy
    peaks = [
        max(evaluator.referee(replace(strategy, schedule=each), Order.FIFO).peak_memory_bytes)
        for each in (first, all_whole)
    ]
    assert peaks[0] < 0.9 * peaks[1]
    for chunks in (1, 2):  # stages take micro-batches one after another
        text = f"dp=4,pp=2,zero=3,micro_batch=1,schedule=breadth_first,chunks={chunks}"
        pipeline = placed(text, graph)
        pipeline.strategy.check(graph, CLUSTER)
        assert pipeline.strategy.gathers_once
    given = placed(words + "breadth_first", tied)
    assert not given.strategy.schedule.turns
    assert "but not its order of turns" in given.remarks[1]
