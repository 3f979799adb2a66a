"""Rows of a step stay in their order, though its code sorts them by expert."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from heterog.graph.batch_plan import batch_plan, micro_batches_refused, reads_across_samples
from heterog.graph.capture import CapturedStep, capture, capture_step
from heterog.graph.grouped_rows import outer, product
from heterog.graph.op_costs import GROUPED_PRODUCT, ROWS_OUTER, ROWS_PRODUCT
from heterog.graph.placement import P
from heterog.graph.workload import Workload
from heterog.pricing.device_models.kernels import products_of


def _one_by_one(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Products of rows that lie together by group, in any dtype."""
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    parts = zip(torch.split(rows, sizes), matrices, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


@contextmanager
def products_one_by_one() -> Iterator[None]:
    """Context in which torch's grouped product takes float64, too."""
    with mock.patch.object(functional, "grouped_mm", _one_by_one):
        yield


class Experts(nn.Module):
    """Two of four experts for each sample, whose rows are sorted by expert.

    Args:
        tell: What is made of the sorted rows of each expert.
        how: ``index`` puts rows back and adds them; the others add each to that of its token.
    """

    def __init__(self, tell: Callable[[Tensor], Tensor] | None = None, how: str = "index") -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        self.router = nn.Linear(12, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, 12, 12) / 4) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(4, 12))
        self.tell = tell or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        shares, chosen = self.router(hidden).softmax(-1).topk(2)
        ids, order = chosen.flatten().sort()
        ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        token = order // 2
        every = token[:, None].expand(-1, 12)  # as torchtitan does
        rows = {
            "index": lambda: hidden[token],
            "scatter_add": lambda: hidden.gather(0, every),
            "index_add": lambda: hidden.index_select(0, token),
        }[self.how]()
        rows = functional.grouped_mm(rows, self.up, offs=ends) + self.bias[ids]
        rows = functional.grouped_mm(self.tell(rows.relu()), self.down.mT, offs=ends)
        rows = rows * shares.flatten()[order][:, None]
        if self.how == "index":
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            made = rows[back].unflatten(0, (-1, 2)).sum(1)
        elif self.how == "scatter_add":
            made = hidden.scatter_add(0, every, rows)
        else:
            made = torch.zeros_like(hidden).index_add(0, token, rows)
        out: Tensor = self.last(made)
        return out


def _workload(model: nn.Module, batch: tuple[Tensor, ...]) -> Workload:
    loss = functional.mse_loss if len(batch) > 1 else None
    return Workload(lambda: model, batch, loss, torch.optim.SGD, {"lr": 0.1})


def _kinds(step: CapturedStep) -> list[str]:
    return [op.kind for op in step.graph.ops]


def _check_gradients(step: CapturedStep, model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    """The captured step must have the loss and the gradients of autograd."""
    parameters = list(model.parameters())
    with torch.no_grad():
        loss, *made = fx.Interpreter(step.module).run(*parameters, *model.buffers(), *batch)
    expected = _workload(model, batch).step_loss(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    gradients = list(torch.autograd.grad(expected, parameters))
    torch.testing.assert_close(made[: len(gradients)], gradients, rtol=1e-12, atol=1e-13)


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 8).double(), torch.randn(8, 4).double()


@pytest.mark.parametrize("how", ["index", "scatter_add", "index_add"])
def test_rows_stay_in_their_order(how: str) -> None:
    batch, model = _batch(), Experts(how=how).double()
    step = capture_step(_workload(model, batch))
    kinds = _kinds(step)
    assert not {"sort.default", GROUPED_PRODUCT, "histc.default", "arange.default"} & set(kinds)
    assert not list(reads_across_samples(step.graph))
    assert (kinds.count(ROWS_PRODUCT), kinds.count(ROWS_OUTER)) == (4, 2)
    # 16 rows meet one matrix of 12 x 12 each.
    assert {op.flops for op in step.graph.ops if "heterog_rows" in op.kind} == {2 * 16 * 12 * 12}
    with products_one_by_one():
        _check_gradients(step, model, batch)


def test_products_pay_for_sorting_their_rows() -> None:
    graph = capture(_workload(Experts().double(), _batch()))
    products = products_of(graph)
    found = [row for row, op in enumerate(products.op) if "heterog_rows" in graph.ops[op].kind]
    # Of four experts, each has 4 of 16 rows; 12 numbers of a row are read and 12 made, of 8 bytes.
    assert {tuple(products.sizes[row]) for row in found} == {(4, 4, 12, 12), (4, 12, 12, 4)}
    assert {products.added[row] * products.num_bytes[row] for row in found} == {
        2 * 2 * 16 * 12 * 8
    }


@pytest.mark.parametrize(
    "tell",
    [
        lambda rows: rows.cumsum(0),
        lambda rows: rows * torch.arange(16)[:, None],
        lambda rows: rows.flip(0),
        lambda rows: rows.view(8, 2, 12).softmax(1).view(16, 12),
        lambda rows: rows - rows[:1],
        lambda rows: rows * torch.zeros(16, 1).index_fill(0, torch.tensor(3), 1.0),
    ],
)
def test_rows_are_sorted_where_an_op_can_tell(tell: Callable[[Tensor], Tensor]) -> None:
    batch, model = _batch(), Experts(tell).double()
    step = capture_step(_workload(model, batch))
    kinds = _kinds(step)
    assert kinds.count("sort.default") == 1
    assert kinds.count(GROUPED_PRODUCT) == 6
    assert ROWS_PRODUCT not in kinds


@pytest.mark.parametrize("name", ["olmoe", "mixtral"])
def test_experts_of_transformers_are_divided_by_samples(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        name,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("num_experts", "num_local_experts"), 4),
        **dict.fromkeys(("num_hidden_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
        **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
        num_attention_heads=4,
        vocab_size=61,
    )
    torch.manual_seed(0)
    experts = transformers.AutoModelForCausalLM.from_config(config).double()

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = experts

        def forward(self, tokens: Tensor) -> Tensor:
            loss: Tensor = self.language(input_ids=tokens, labels=tokens).loss
            return loss

    batch, model = (torch.randint(0, 61, (4, 8)),), Language()
    step = capture_step(_workload(model, batch))
    graph = step.graph
    assert batch_plan(graph).unruled == ()
    # The number of labels that count.
    assert [graph.tensors[tensor].shape for _, tensor in reads_across_samples(graph)] == [()]
    assert not micro_batches_refused(graph, 2)
    weights = [t for t in graph.trained if len(graph.tensors[t].shape) == 3]
    gradients = {parameter: gradient for _, parameter, gradient in graph.updates}
    assert len(weights) == 4
    assert {batch_plan(graph).placements[gradients[each]] for each in weights} == {P}
    experts.set_experts_implementation("eager")
    _check_gradients(step, model, batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(8, 16), (3, 5)])
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_products_by_expert(dtype: torch.dtype, sizes: tuple[int, int], num_rows: int) -> None:
    """With torch's kernel, and without, where it refuses dtypes or sizes."""
    k, m = sizes
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:  # small integers, whose products are exact
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)

    rows, matrices, gradient = whole(num_rows, k), whole(4, m, k).mT, whole(num_rows, m)
    ids = torch.tensor([3, 0, 2, 2, 0, 3])[:num_rows]
    expected = (rows[:, None] @ matrices[ids])[:, 0]
    torch.testing.assert_close(product(rows, matrices, ids), expected, rtol=0, atol=0)
    each = rows[:, :, None] * gradient[:, None]
    wanted = torch.zeros(4, k, m, dtype=dtype).index_add(0, ids, each)
    torch.testing.assert_close(outer(rows.t(), gradient, ids, 4), wanted, rtol=0, atol=0)


def test_a_last_batch_of_one_sample_has_the_same_ops() -> None:
    batch = _batch()
    planned = capture(_workload(Experts().double(), batch))
    one = (batch[0][:1], batch[1][:1])
    again = capture_step(_workload(Experts().double(), one), planned)
    assert [op.kind for op in again.graph.ops] == [op.kind for op in planned.ops]
