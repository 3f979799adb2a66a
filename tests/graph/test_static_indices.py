"""Unknown numbers and masks as indices do in a captured step what they do in torch.

Masks that a step makes of sizes alone are known, and so are questions about them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterog.errors import CaptureError
from heterog.graph.batch_plan import batch_plan, reads_across_samples
from heterog.graph.capture import capture_step
from heterog.graph.placement import S
from heterog.graph.sharding_rules import Special
from heterog.graph.workload import Workload

BATCH, LENGTH, WIDTH = 4, 5, 6
Choice = Callable[[Tensor, Tensor], Tensor]
CHOICES: dict[str, Choice] = {
    "rows": lambda x, i: x[:, i],
    "the last dimension": lambda x, i: x[..., i],
    "before an ellipsis": lambda x, i: x[:, i, ...],
    "around a new dimension": lambda x, i: x[None, :, None, i],
    "twice": lambda x, i: x[:, i, i + 0 * i],
    "beside a list": lambda x, i: x[:, i, [0, 2]],
    "beside a tensor": lambda x, i: x[:, i, torch.arange(3)],
    "between slices": lambda x, i: x[1:, i, ::2],
    "a tensor alone": lambda x, i: x.transpose(0, 1)[i],
    "in few bits": lambda x, i: x[:, i.to(torch.int8)],
}


class Choosing(nn.Module):
    def __init__(self, choice: Choice) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.choice = choice

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        return self.choice(self.layer(x), place).pow(2).sum()


def workload_of(choice: Choice) -> Workload:
    batch = torch.zeros(BATCH, LENGTH, WIDTH).double(), torch.tensor(0)
    return Workload(lambda: Choosing(choice), batch, None, torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize("kind", CHOICES)
def test_a_captured_step_looks_up_what_torch_chooses(kind: str) -> None:
    step = capture_step(workload_of(CHOICES[kind]))
    model, x = Choosing(CHOICES[kind]), torch.randn(BATCH, LENGTH, WIDTH).double()
    for place in (0, 3, -1, -LENGTH):
        model.zero_grad()
        loss = model(x, torch.tensor(place))
        torch.autograd.backward(loss)
        found: Any = step.module(*model.parameters(), x, torch.tensor(place))
        flat = torch.utils._pytree.tree_leaves(found)
        wanted = [loss.detach(), *(p.grad for p in model.parameters())]
        for value, expected in zip(flat, wanted, strict=True):
            torch.testing.assert_close(value, expected)
    if kind != "the last dimension":
        with pytest.raises((IndexError, RuntimeError)):
            step.module(*model.parameters(), x, torch.tensor(LENGTH))


def test_samples_stay_where_they_are() -> None:
    graph = capture_step(workload_of(CHOICES["rows"])).graph
    (op,) = [i for i, each in enumerate(graph.ops) if each.kind == "index_select.default"]
    assert batch_plan(graph).placements[graph.outputs[op][0]] == S(0)


def test_an_index_that_is_known_is_a_view() -> None:
    def known(x: Tensor, place: Tensor) -> Tensor:
        return x[:, torch.tensor(3)] * (1 + 0 * place)

    graph = capture_step(workload_of(known)).graph
    assert "index_select.default" not in {op.kind for op in graph.ops}


@pytest.mark.parametrize("width", [0, 1, WIDTH])
def test_one_value_is_written_by_a_mask(width: int) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(WIDTH, WIDTH).double()
            self.token = nn.Parameter(torch.randn(width).double()) if width else None

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            found = self.layer(x).sin()
            if self.token is None:
                found[mask] = 0.5
                found[found.detach() < -0.9] = 0
            else:
                found[mask] = self.token if width > 1 else self.token[0]
            total: Tensor = found.pow(3).sum()
            return total

    x, mask = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.rand(BATCH, LENGTH) < 0.4
    step = capture_step(Workload(Masked, (x, mask), None, torch.optim.SGD, {"lr": 0.1}))
    model = Masked()
    loss = model(x, mask)
    torch.autograd.backward(loss)
    found: Any = step.module(*model.parameters(), x, mask)
    wanted = [loss.detach(), *(p.grad for p in model.parameters())]
    for value, expected in zip(torch.utils._pytree.tree_leaves(found), wanted, strict=True):
        torch.testing.assert_close(value, expected)
    assert not list(reads_across_samples(step.graph))


def off_the_diagonal(x: Tensor) -> Tensor:
    return (x @ x.mT)[:, ~torch.eye(LENGTH, dtype=torch.bool)]


def filled_diagonal(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask.fill_diagonal_(False)
    mask[0, 3] = False
    return (x @ x.mT)[:, mask] * int(mask.sum())


def pairs_of_samples(x: Tensor) -> Tensor:
    same = torch.arange(BATCH)[None] % 2 == torch.arange(BATCH)[:, None] % 2
    apart = ~torch.eye(BATCH, dtype=torch.bool)
    near = (x[:, 0] @ x[:, 0].mT)[apart].view(BATCH, -1)
    return near[same[apart].view(BATCH, -1)] - x[0, torch.triu(torch.ones(2, 2)).nonzero()].sum()


def covariance(x: Tensor) -> Tensor:
    return torch.cov(x.flatten(0, 1).T) + torch.corrcoef(x[0].T)


@pytest.mark.parametrize(
    "choice", [off_the_diagonal, filled_diagonal, pairs_of_samples, covariance]
)
def test_what_is_made_of_sizes_alone_may_choose(choice: Callable[[Tensor], Tensor]) -> None:
    def of_both(x: Tensor, place: Tensor) -> Tensor:
        return choice(x) * (1 + 0 * place)

    step = capture_step(workload_of(of_both))
    model, x = Choosing(of_both), torch.randn(BATCH, LENGTH, WIDTH).double()
    loss = model(x, torch.tensor(0))
    torch.autograd.backward(loss)
    found: Any = step.module(*model.parameters(), x, torch.tensor(0))
    wanted = [loss.detach(), *(p.grad for p in model.parameters())]
    for value, expected in zip(torch.utils._pytree.tree_leaves(found), wanted, strict=True):
        torch.testing.assert_close(value, expected)


def test_a_mask_that_an_input_has_written_to_is_not_known() -> None:
    def written(x: Tensor, place: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, dtype=torch.bool)
        mask[:2] = x[0, 0, :2] > 0
        return x[:, mask]

    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture_step(workload_of(written))


@pytest.mark.parametrize("is_buffer", [False, True])
def test_attention_of_torch_takes_any_mask(is_buffer: bool) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True).double()
            self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.register_buffer("mask", self.made() if is_buffer else None)

        def made(self) -> Tensor:
            return nn.Transformer.generate_square_subsequent_mask(LENGTH).double()

        def forward(self, x: Tensor) -> Tensor:
            mask = self.mask if is_buffer else self.made()
            return self.body(x, mask=mask).pow(2).mean()  # type: ignore[no-any-return]

    batch = (torch.randn(BATCH, LENGTH, WIDTH).double(),)
    step = capture_step(Workload(Causal, batch, None, torch.optim.SGD, {"lr": 0.1}))
    model = Causal()
    found: Any = step.module(*model.parameters(), *model.buffers(), *batch)
    torch.testing.assert_close(torch.utils._pytree.tree_leaves(found)[0], model(*batch).detach())
    masks = [op.args.get("is_causal") for op in step.graph.ops if op.kind == "attention"]
    assert masks == [not is_buffer], "the kernel needs no mask where it is known to be causal"


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a range of Python": lambda x, i: x[range(len(x)), i[:, 0]],
    "a list": lambda x, i: x[list(range(len(x))), i[:, 0]],
    "an expanded range": lambda x, i: x[torch.arange(len(x))[:, None].expand_as(i), i],
    "a range before a new dimension": lambda x, i: x[torch.arange(len(x))[:, None], i],
    "a repeated range": lambda x, i: x[torch.arange(len(x)).view(-1, 1).repeat(1, i.shape[1]), i],
    "an expanded range to write": lambda x, i: torch.zeros_like(x).index_put(
        (torch.arange(len(x))[:, None].expand_as(i), i), 2 * x[:, :2]
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_sample_that_takes_its_own_elements_needs_no_other_device(kind: str) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(BATCH, LENGTH, WIDTH).double(), torch.tensor([[0, 3]] * BATCH)

    step = capture_step(replace(workload_of(OWN[kind]), example_batch=batch))
    plan = batch_plan(step.graph)
    assert not plan.unruled
    assert list(reads_across_samples(step.graph)) == []
    own = [s for op, s in zip(step.graph.ops, plan.specials, strict=True) if "index" in op.kind]
    assert set(own) == {Special.OWN_ROWS}


def test_a_list_that_does_not_count_samples_stays_as_it_is() -> None:
    step = capture_step(workload_of(lambda x, i: x[[1, 0, 2, 3], i]))
    assert list(reads_across_samples(step.graph))
