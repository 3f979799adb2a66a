"""Constants that are alike for all samples are made once; rows of samples stay with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from heterog.graph.batch_plan import batch_plan, ops_of_the_whole_batch
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.workload import Workload
from tests.thorough import one_in

LENGTH, WIDTH = 5, 4
Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """A product, and something of the test's own behind it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(2 * LENGTH, WIDTH)
        self.rest = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self, self.layer(x))


def step_of(forward: Forward, batch: int = 6, length: int = LENGTH) -> CapturedStep:
    torch.manual_seed(0)
    x, y = torch.randn(batch, length, WIDTH), torch.randn(batch, length, WIDTH)
    with torch.device("meta"):
        shape = Model(forward)(x.to("meta")).shape
    if shape[1:] != (length, WIDTH):
        y = torch.randn(shape)
    model = Model(forward)
    return capture_step(Workload(model, (x, y), functional.mse_loss, torch.optim.SGD, {"lr": 0.1}))


def repeated_mask(model: Any, x: Tensor) -> Tensor:
    """A mask of every sample, from an expansion: what masks of ``transformers`` are."""
    rows = torch.arange(x.shape[1])
    seen = (rows[None, :] <= rows[:, None]).expand(x.shape[0], -1, -1)
    scores = x @ x.transpose(1, 2) + torch.where(seen, 0.0, -1e4)
    return scores.softmax(-1) @ x


def filled_mask(model: Any, x: Tensor) -> Tensor:
    """A mask of every sample that is filled and cut."""
    mask = torch.full((x.shape[0], x.shape[1], x.shape[1]), -1e4).triu(1) * 2.0
    return (x @ x.transpose(1, 2) + mask).softmax(-1) @ x


def counted_positions(model: Any, x: Tensor) -> Tensor:
    """Positions as OPT counts them: sums over ones."""
    ones = torch.ones(x.shape[0], x.shape[1], dtype=torch.long)
    table: Tensor = model.table((ones.cumsum(1) * ones - 1).long())
    return x + table


def last_token(model: Any, x: Tensor) -> Tensor:
    """The state at one position of each sample, which its values say."""
    places = (x.sum(-1) > 0).sum(-1) % x.shape[1]
    return x[torch.arange(x.shape[0]), places]


def own_rows_of_mask(model: Any, x: Tensor) -> Tensor:
    """Attention masks of padded batches: every row looks into its own sample."""
    seen = (x.sum(-1) > 0).long()
    rows = torch.arange(x.shape[0])[:, None, None] + 0
    keys = torch.arange(x.shape[1])[None, None, :]
    mask = torch.where(seen[rows, keys] > 0, 0.0, -10.0)
    return (x @ x.transpose(1, 2) + mask).softmax(-1) @ x


def rows_of_heads(model: Any, x: Tensor) -> Tensor:
    """Informer: some queries of each head of each sample, read and written."""
    heads = torch.stack(x.chunk(2, -1), 1).flatten(0, 1)
    rows, best = torch.arange(len(heads))[:, None], heads.sum(-1).topk(2).indices
    found = heads.mean(1, keepdim=True).expand_as(heads).clone()
    found[rows, best] = heads[rows, best].tanh()
    return torch.cat(found.view(-1, 2, *found.shape[1:]).unbind(1), -1)


def own_places(model: Any, x: Tensor) -> Tensor:
    """Nearest points of a cloud, whose rows stand one after another for all samples."""
    near = (x @ x.transpose(1, 2)).topk(2).indices
    places = near + x.shape[1] * torch.arange(x.shape[0]).view(-1, 1, 1)
    points = x.reshape(-1, WIDTH)
    sums = torch.zeros_like(points).index_add(0, places[..., 0].flatten(), points.tanh())
    second = points[places[..., 1].flatten()]
    return (points[places].sum(2).flatten(0, 1) + second + sums).view_as(x)


FORWARDS = [
    *(repeated_mask, filled_mask, counted_positions, last_token, own_rows_of_mask),
    *(rows_of_heads, own_places),
]


def whole_constants(graph: OpGraph, batch: int) -> list[str]:
    """Ops that make something with the whole batch on every device, one number each aside."""
    plan = batch_plan(graph)
    return [
        op.kind
        for index, op in enumerate(graph.ops)
        if op.phase != Phase.UPDATE and not graph.is_view[index]
        for tensor in graph.outputs[index]
        if plan.placements[tensor].kind == "R"
        and graph.tensors[tensor].num_elements > batch
        and batch in graph.tensors[tensor].shape
    ]


def reference(forward: Forward, step: CapturedStep, batch: int) -> tuple[Tensor, Tensor]:
    """(Loss of the graph, loss of the model itself) on the same numbers."""
    torch.manual_seed(1)
    inputs = [
        torch.randn(tensor.shape)
        for tensor in step.graph.tensors[: step.graph.num_inputs]
        if tensor.kind.name in ("PARAMETER", "BATCH")
    ]
    by_name = {
        tensor.name: value
        for tensor, value in zip(step.graph.tensors, inputs, strict=False)
        if tensor.kind.name == "PARAMETER"
    }
    model = Model(forward)
    model.load_state_dict(by_name, strict=False)
    x, y = inputs[len(by_name) :]
    loss = functional.mse_loss(model(x), y)
    made = fx.Interpreter(step.module).run(*inputs, enable_io_processing=False)
    found = made[0] if isinstance(made, tuple | list) else made
    assert isinstance(found, Tensor)
    return found, loss


@one_in(2)
@pytest.mark.parametrize("forward", FORWARDS)
def test_no_device_makes_the_whole_batch(forward: Forward) -> None:
    batch = 6
    step = step_of(forward, batch)
    assert whole_constants(step.graph, batch) == []
    assert ops_of_the_whole_batch(step.graph) == []
    loss, wanted = reference(forward, step, batch)
    torch.testing.assert_close(loss, wanted)


@one_in(2)
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_batch_of_another_size_has_the_same_ops(forward: Forward) -> None:
    kinds = [op.kind for op in step_of(forward, 6).graph.ops]
    for batch in (1, 2, WIDTH, 7):
        assert [op.kind for op in step_of(forward, batch).graph.ops] == kinds, batch


def test_one_mask_is_made_however_many_samples_there_are() -> None:
    graph = step_of(repeated_mask, batch=64, length=8).graph
    largest = max(
        graph.tensors[tensor].num_elements
        for op in range(graph.num_ops)
        if graph.is_constant[op] and not graph.is_view[op]
        for tensor in graph.outputs[op]
    )
    assert largest == 8 * 8


def test_an_index_that_counts_something_else_reads_the_whole() -> None:
    def shifted(model: Any, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0]) + 1
        return x[rows % x.shape[0], 0]

    step = step_of(shifted)
    plan = batch_plan(step.graph)
    (index,) = (i for i, op in enumerate(step.graph.ops) if op.kind == "index.Tensor")
    assert plan.specials[index] is None
    assert ops_of_the_whole_batch(step.graph) != []


def test_places_that_may_be_those_of_another_sample_read_the_whole() -> None:
    def doubled(model: Any, x: Tensor) -> Tensor:
        near = (x @ x.transpose(1, 2)).topk(2).indices * 2
        rows = near + x.shape[1] * torch.arange(x.shape[0]).view(-1, 1, 1)
        return x.reshape(-1, WIDTH)[rows % (x.shape[0] * x.shape[1])].sum(2)

    assert ops_of_the_whole_batch(step_of(doubled).graph) != []


def test_constants_that_differ_between_samples_stay_whole() -> None:
    def own_offset(model: Any, x: Tensor) -> Tensor:
        offset = torch.arange(x.shape[0]).view(-1, 1, 1).expand(-1, x.shape[1], x.shape[2]) * 2.0
        return x + offset

    step = step_of(own_offset)
    loss, wanted = reference(own_offset, step, 6)
    torch.testing.assert_close(loss, wanted)
    made = [op.kind for i, op in enumerate(step.graph.ops) if step.graph.is_constant[i]]
    assert "mul.Tensor" in made


def test_samples_of_several_rows_are_left_alone() -> None:
    """An expansion from the rows of one sample to those of all made capturing fail."""

    def rows_of_all(model: Any, x: Tensor) -> Tensor:
        table = torch.ones(x.shape[0], x.shape[1], WIDTH).cumsum(1).view(-1, WIDTH) * 0.5
        return (x.reshape(-1, WIDTH) * table).view(x.shape)

    step = step_of(rows_of_all)
    loss, wanted = reference(rows_of_all, step, 6)
    torch.testing.assert_close(loss, wanted)


def test_random_constants_are_not_one_for_all() -> None:
    def noisy(model: Any, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape[0], x.shape[1], 1).expand(-1, -1, WIDTH)

    graph = step_of(noisy).graph
    (draw,) = (i for i, op in enumerate(graph.ops) if op.kind.startswith("rand"))
    assert graph.tensors[graph.outputs[draw][0]].shape == (6, LENGTH, 1)
