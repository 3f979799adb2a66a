"""Batch propagation: what is split, what is summed, what costs a conversion."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.axis_plan import axis_plan
from heterog.graph.batch_plan import (
    batch_plan,
    ops_of_the_whole_batch,
    reads_across_samples,
)
from heterog.graph.capture import capture
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.placement import OpRule, R
from heterog.graph.sharding_rules import Special
from heterog.graph.sharding_rules.table import INSIDE_TEAMS
from heterog.graph.workload import Workload


def captured(model: Callable[[], nn.Module], x: Tensor, y: Tensor, loss: Any = None) -> OpGraph:
    loss = loss or functional.mse_loss
    return capture(Workload(model, (x, y), loss, torch.optim.SGD, {"lr": 0.1}))


def conversions(graph: OpGraph) -> list[str]:
    plan = batch_plan(graph)
    return [
        op.kind
        for op, needed in zip(graph.ops, plan.needed, strict=True)
        for tensor, place in zip(op.inputs, needed, strict=True)
        if plan.placements[tensor].kind in "SP" and place != plan.placements[tensor]
    ]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))


def test_mlp_is_batch_parallel_and_its_gradients_are_sums() -> None:
    graph = captured(mlp, torch.zeros(8, 6), torch.zeros(8, 4))
    plan = batch_plan(graph)
    assert conversions(graph) == []
    assert plan.unruled == ()
    for _, _, gradient in graph.updates:
        assert plan.placements[gradient].kind == "P"
    assert plan.placements[graph.loss].kind == "P"
    products = [i for i, op in enumerate(graph.ops) if op.kind in ("mm.default", "addmm.default")]
    assert plan.flops_fixed[products].sum() == 0
    assert (plan.flops_per_sample[products] * 8 == graph.flops[products]).all()
    # The first product reads its weight and bias for any share, and 6 + 10 floats a sample.
    first = products[0]
    assert plan.bytes_fixed[first] == 4 * (60 + 10)
    assert plan.bytes_per_sample[first] == 4 * (6 + 10)


def test_equal_sizes_of_batch_and_sequence_are_not_confused() -> None:
    model = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)  # noqa: E731
    graph = captured(model, torch.zeros(8, 8, 8), torch.zeros(8, 8, 8))
    assert conversions(graph) == []
    attention = next(op for op in graph.ops if op.kind == "attention")
    assert str(batch_plan(graph).placements[attention.inputs[0]]) == "S(0,1)"


def test_batch_on_the_second_dimension_stays_exact_through_views() -> None:
    model = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0)  # noqa: E731
    graph = capture(
        Workload(
            model, (torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)), functional.mse_loss,
            torch.optim.SGD, {"lr": 0.1}, batch_dims={0: 1, 1: 1},
        )
    )  # fmt: skip
    assert conversions(graph) == []


def test_rows_expanded_to_the_batch_are_split_at_birth() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            index = torch.arange(5).unsqueeze(0).expand(x.shape[0], 5)
            out: Tensor = x + self.table(index)
            return out

    graph = captured(Positions, torch.zeros(8, 5, 6), torch.zeros(8, 5, 6))
    plan = batch_plan(graph)
    lookup = next(i for i, op in enumerate(graph.ops) if op.kind == "embedding.default")
    assert str(plan.placements[graph.outputs[lookup][0]]) == "S(0,1)"
    assert conversions(graph) == []


def test_products_of_constants_repeated_for_every_sample_follow_the_share() -> None:
    """As relative positions in XLNet: each device did all samples' before, whatever its share."""

    class RelativePositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:  # x: [time, samples, features]
            angles = torch.arange(5.0)[:, None] * torch.arange(6.0)[None]
            rows = angles.sin()[:, None].expand(5, x.shape[1], 6).clone()
            return torch.einsum("ibf,jbf->bij", self.queries(x), self.keys(rows))

    graph = capture(
        Workload(
            RelativePositions, (torch.zeros(5, 8, 6), torch.zeros(8, 5, 5)), functional.mse_loss,
            torch.optim.SGD, {"lr": 0.1}, batch_dims={0: 1},
        )
    )  # fmt: skip
    assert batch_plan(graph).flops_fixed[graph.flops > 1000.0].sum() == 0.0
    assert conversions(graph) == []


def test_what_an_op_of_every_device_reads_is_not_split_for_others() -> None:
    """Mixing weights of samples: a view of them has readers that need a part, and one all."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor, classes: Tensor) -> Tensor:
            weights = torch.rand(len(x), 1).detach()
            found = self.linear(weights * x + (1 - weights) * x.flip(0))
            losses = functional.cross_entropy(found, classes, reduction="none")
            return (weights.squeeze(1) * losses).mean()

    batch = torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)
    graph = capture(Workload(Mixed, batch, None, torch.optim.SGD, {"lr": 0.1}))
    plan = batch_plan(graph)
    runs_whole = graph.is_constant & ~graph.is_view
    assert runs_whole.sum() == 2
    for op in runs_whole.nonzero()[0].tolist():
        read = {plan.placements[tensor].kind for tensor in graph.ops[op].inputs}
        made = {plan.placements[tensor].kind for tensor in graph.outputs[op]}
        assert read | made == {"R"}, graph.ops[op].kind


def test_an_op_over_the_whole_batch_costs_a_gather() -> None:
    class Ranked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(self.linear(x), 0)

    graph = captured(Ranked, torch.zeros(8, 6), torch.zeros(8, 4))
    assert "cumsum.default" in conversions(graph)


def penalised(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The output carries the penalty on the weights in its first entry."""
    scores, penalty = output
    return functional.mse_loss(scores, target) + penalty


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), 0.1 * self.linear.weight.square().sum()


def test_rows_that_edges_name_are_taken_of_the_whole_batch() -> None:
    """Nodes are the samples, edges are not: a message may come from another rank's node."""

    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            for layer in self.layers:
                rows = edges[1].unsqueeze(-1).expand(-1, 3)
                x = layer(x.new_zeros(x.shape).scatter_add(0, rows, x[edges[0]]))
            return x

    batch = torch.zeros(6, 3), torch.zeros(2, 9, dtype=torch.int64), torch.zeros(6, 3)
    graph = capture(
        Workload(
            Neighbours, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1},
            batch_dims={0: 0, 1: None, 2: 0},
        )
    )  # fmt: skip
    plan = batch_plan(graph)
    kinds = [op.kind for op in graph.ops]
    backward = kinds.index("gather.default")
    assert {place.kind for place in plan.needed[backward]} == {"R"}
    assert INSIDE_TEAMS.isdisjoint(plan.specials)


def test_a_penalty_on_the_weights_leaves_the_loss_and_its_gradients_sums() -> None:
    graph = captured(Penalised, torch.zeros(8, 6), torch.zeros(8, 4), penalised)
    plan = batch_plan(graph)
    assert plan.placements[graph.loss].kind == "P"
    assert {plan.placements[gradient].kind for _, _, gradient in graph.updates} == {"P"}
    assert conversions(graph) == []
    assert ops_of_the_whole_batch(graph) == []


class Scaled(nn.Module):
    """Divides by a mean over the batch, or by the power iteration of spectral norm."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        linear = nn.Linear(6, 4)
        self.linear = nn.utils.parametrizations.spectral_norm(linear) if how == "norm" else linear
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(x)
        if self.how == "mean":
            return out / out.square().mean(), out.new_zeros(())
        if self.how == "batch":
            return out / x.square().mean(), out.new_zeros(())
        return out, self.scale.square() if self.how == "gradient" else out.new_zeros(())


@pytest.mark.parametrize(
    ("how", "kind"),
    [("mean", "div.Tensor"), ("norm", "copy_.default"), ("gradient", "mul.Tensor")],
)
def test_ops_that_micro_batches_would_change_are_found(how: str, kind: str) -> None:
    graph = captured(lambda: Scaled(how), torch.zeros(8, 6), torch.zeros(8, 4), penalised)
    assert kind in {graph.ops[op].kind for op in ops_of_the_whole_batch(graph)}


def test_sums_of_the_batch_alone_are_known_before_the_step() -> None:
    """``(loss * mask).sum() / mask.sum()``: every rank has the whole mask."""
    graph = captured(lambda: Scaled("batch"), torch.zeros(8, 6), torch.zeros(8, 4), penalised)
    plan = batch_plan(graph)
    known = [op for op, special in enumerate(plan.specials) if special == Special.OF_WHOLE_BATCH]
    assert [graph.ops[op].kind for op in known] == ["mean.default"]
    assert plan.placements[graph.outputs[known[0]][0]].kind == "R"
    assert conversions(graph) == []
    assert ops_of_the_whole_batch(graph) == []
    product = next(op for op, node in enumerate(graph.ops) if node.kind == "addmm.default")
    whole = OpRule(inputs=(R,) * 3, outputs=(R,), units=4)
    ruled = axis_plan(graph, ((product, whole),))  # they read the whole batch under rules, too
    assert ruled.bytes_fixed[known] == plan.bytes_fixed[known] >= 4 * 8 * 6
    assert ruled.bytes_per_unit[known] == plan.bytes_per_sample[known] == 0


@pytest.mark.parametrize(
    "made",
    [
        lambda x: 0.3 * x + 0.7 * x.flip(0),
        lambda x: (x - x.mean(0)) / x.std(0),
        lambda x: x.sort(0).values,
        lambda x: x * torch.bincount(x.argmax(1), minlength=6),
    ],
)
def test_other_samples_of_the_batch_are_known_before_the_step(
    made: Callable[[Tensor], Tensor],
) -> None:
    """Mixed samples, and advantages that are normalised: every rank has the whole batch."""

    class Mixed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(made(input))

    graph = captured(lambda: Mixed(6, 4), torch.zeros(8, 6), torch.zeros(8, 4))
    assert conversions(graph) == []
    assert batch_plan(graph).unruled == ()
    assert ops_of_the_whole_batch(graph) == []
    product = next(op for op, node in enumerate(graph.ops) if node.kind == "addmm.default")
    assert batch_plan(graph).flops_fixed[product] == 0


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_sum_over_labels_needs_no_count_of_them(reduction: str) -> None:
    """Neither do those that the model makes itself."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        known = functional.cross_entropy(out, y[:, 0].long(), reduction=reduction)
        guessed = functional.cross_entropy(out, out.argmax(1), reduction=reduction)
        return (known + guessed).sum() / 8

    graph = captured(mlp, torch.zeros(8, 6), torch.zeros(8, 4), loss)
    assert conversions(graph) == []
    assert batch_plan(graph).unruled == ()
    assert ops_of_the_whole_batch(graph) == []


def test_numbers_beside_a_loss_need_no_total() -> None:
    """``1 - similarity.mean()``: the number counts once, so micro-batches can be summed."""
    loss = lambda out, y: 2.0 - (1 - (functional.mse_loss(out, y) + 0.5))  # noqa: E731
    graph = captured(mlp, torch.zeros(8, 6), torch.zeros(8, 4), loss)
    assert conversions(graph) == []
    assert ops_of_the_whole_batch(graph) == []


def test_the_bias_of_a_head_whose_mean_is_the_loss_gets_a_sum() -> None:
    """Its gradient is the same on all devices, but each micro-batch has a part of it."""
    graph = captured(mlp, torch.zeros(8, 6), torch.zeros(8, 4), lambda out, y: -out.mean())
    plan = batch_plan(graph)
    assert {plan.placements[gradient].kind for _, _, gradient in graph.updates} == {"P"}
    assert conversions(graph) == []
    assert ops_of_the_whole_batch(graph) == []


def balance(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that balances experts: of means over tokens, a product."""
    shares, chosen = logits.softmax(-1), logits.topk(2).indices.flatten()
    counts = torch.histc(chosen.float(), 4, 0, 4) / len(logits)
    return functional.mse_loss(logits, labels) + (counts * shares.mean(0)[None]).sum()


@pytest.mark.parametrize(
    "loss", [balance, lambda out, y: functional.mse_loss(out - out.mean(0), y)]
)
def test_totals_of_statistics_are_of_their_own_size(loss: Callable[..., Tensor]) -> None:
    """Also where their gradients go back to all samples."""
    graph = captured(mlp, torch.zeros(8, 6), torch.zeros(8, 4), loss)
    plan = batch_plan(graph)
    assert plan.unruled == ()
    totals = [(graph.tensors[tensor].shape, plan.placements[tensor].kind)
              for _, tensor in reads_across_samples(graph)]  # fmt: skip
    assert {math.prod(shape) for shape, _ in totals} == {4}
    assert {kind for _, kind in totals} == {"P"}
    assert len(totals) <= 2


def test_batch_norm_statistics_stay_local_and_in_one_group() -> None:
    model = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())  # noqa: E731
    graph = captured(model, torch.zeros(8, 3, 6, 6), torch.zeros(8, 64))
    plan = batch_plan(graph)
    local = [tensor for tensor, place in enumerate(plan.placements) if place.kind == "L"]
    assert local
    groups = group_ops(graph).group
    for tensor in local:
        users = [int(graph.producer[tensor]), *graph.consumers[tensor]]
        assert len({int(groups[op]) for op in users if op >= 0}) == 1


def test_a_buffer_is_stepped_in_the_group_that_reads_it() -> None:
    """In a pipeline its reader would never see the new value: spectral norm stood still."""

    def two_normed() -> nn.Module:
        normed = nn.utils.parametrizations.spectral_norm
        return nn.Sequential(normed(nn.Linear(6, 8)), nn.ReLU(), normed(nn.Linear(8, 4)))

    graph = captured(two_normed, torch.zeros(8, 6), torch.zeros(8, 4))
    group = group_ops(graph).group
    steps = [index for index, op in enumerate(graph.ops) if op.kind == "copy_.default"]
    assert len(steps) == 4
    for index in steps:
        buffer = graph.ops[index].inputs[0]
        assert len({int(group[reader]) for reader in graph.consumers[buffer]}) == 1
    assert len({int(group[index]) for index in steps}) == 2


class Centred(nn.Module):
    """Subtracts a moving average of its own activations, which is a buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(found.mean(0), alpha=0.1)
        out: Tensor = self.head(found - self.average)
        return out


def test_a_buffer_is_stepped_where_a_constant_that_is_made_of_it_is_read() -> None:
    """Nine tenths of the average are made on all devices, of what each has for the average.

    It was stepped beside the head instead, and the layer's device had the average of the start.
    """
    graph = captured(Centred, torch.zeros(8, 6), torch.zeros(8, 4))
    group = group_ops(graph).group
    (step,) = (index for index, op in enumerate(graph.ops) if op.kind == "copy_.default")
    (buffer,) = graph.inputs_of_kind(TensorKind.BUFFER)
    (fading,) = (op for op in graph.consumers[buffer] if op != step)
    assert graph.is_constant[fading]
    readers = graph.consumers[graph.outputs[fading][0]]
    assert {int(group[reader]) for reader in readers} == {int(group[step])}
    heads = {
        int(group[i]) for i, op in enumerate(graph.ops) if "log" in op.kind or "mse" in op.kind
    }
    assert int(group[step]) not in heads


def test_groups_follow_modules_and_keep_what_belongs_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.decoder = nn.Linear(6, 11, bias=False)
            self.decoder.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for layer in self.body:
                x = x + layer(x)
            out: Tensor = self.decoder(x)
            return out.flatten(0, 1)

    tokens = torch.zeros(8, 3, dtype=torch.long)
    graph = captured(
        Tied, tokens, tokens, lambda out, y: functional.cross_entropy(out, y.flatten())
    )
    grouping = group_ops(graph)
    assert len(grouping.names) == 5
    assert set(grouping.names) == {"embedding", *(f"body.{i}" for i in range(4))}
    for op, parameter, gradient in graph.updates:
        group = int(grouping.group[op])
        assert group == int(grouping.group[graph.producer[graph.storage[gradient]]])
        readers = graph.consumers[parameter]
        assert {int(grouping.group[reader]) for reader in readers} == {group}
    # Every op is in a group, and groups begin in forward order.
    assert (grouping.group >= CONSTANT_GROUP).all()
    first = [int((grouping.group == group).argmax()) for group in range(grouping.num_groups)]
    assert first == sorted(first)


@pytest.mark.parametrize("depth", [2, 40])
def test_grouping_is_deterministic_and_bounded(depth: int) -> None:
    model = lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(depth)))  # noqa: E731
    one = group_ops(captured(model, torch.zeros(8, 6), torch.zeros(8, 6)))
    two = group_ops(captured(model, torch.zeros(8, 6), torch.zeros(8, 6)))
    assert one.names == two.names
    assert (one.group == two.group).all()
    assert one.num_groups == depth


def test_constants_have_no_group() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(5, 5).tril().unsqueeze(0)
            out: Tensor = self.linear(mask @ x)
            return out

    graph = captured(Masked, torch.zeros(8, 5, 6), torch.zeros(8, 5, 6))
    grouping = group_ops(graph)
    tril = next(i for i, op in enumerate(graph.ops) if op.kind == "tril.default")
    assert grouping.group[tril] == CONSTANT_GROUP
    updates = [op.phase == Phase.UPDATE for op in graph.ops]
    assert (grouping.group[updates] >= 0).all()
    assert all(
        graph.tensors[tensor].kind != TensorKind.PARAMETER for tensor in graph.ops[tril].inputs
    )
