"""Capture: structure, phases, modules, costs and errors on small models."""

import functools
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import torch_geometric
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import heterog.graph.capture.tracing as tracing
from heterog.errors import CaptureError, HeterogWarning
from heterog.graph.capture import capture, capture_step
from heterog.graph.capture.reading import optimizer_state_ratio
from heterog.graph.capture.tracing import _way_out
from heterog.graph.op_costs import VIEW_KINDS
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.serialize import graph_to_dict
from heterog.graph.workload import Workload
from tests.runtime.cases import workload_of
from tests.thorough import few_of


def workload(model: Any, *batch: Tensor, loss: Any = functional.mse_loss, **more: Any) -> Workload:
    optimizer = more.pop("optimizer", torch.optim.SGD)
    options = {"lr": 0.1} if optimizer is torch.optim.SGD else {}
    return Workload(model, tuple(batch), loss, optimizer, options, name="test", **more)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))


def captured_mlp() -> OpGraph:
    return capture(workload(mlp, torch.zeros(8, 6), torch.zeros(8, 4), optimizer=torch.optim.Adam))


def test_mlp_has_the_textbook_flops_phases_and_modules() -> None:
    graph = captured_mlp()
    # Forward: 2 B (6*10 + 10*4); backward: weight gradients the same, and one input gradient.
    assert graph.flops[[op.kind in ("addmm.default", "mm.default") for op in graph.ops]].sum() == (
        2 * 8 * (60 + 40) * 2 + 2 * 8 * 40
    )
    assert graph.num_parameters == 60 + 10 + 40 + 4
    assert graph.optimizer_state_ratio == 2.0
    assert len(graph.updates) == 4
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases), "forward, then backward, then update"
    modules = {op.module for op in graph.ops if op.kind == "mm.default"}
    assert modules == {"0", "2"}, "backward products belong to their forward twins' modules"
    assert graph.tensors[graph.loss].shape == ()
    gradients = [graph.tensors[gradient] for _, _, gradient in graph.updates]
    assert all(tensor.kind == TensorKind.GRADIENT for tensor in gradients)


class Onion(nn.Module):
    """Layers each of which is inside of the one before."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.skin = nn.Linear(6, 6)
        self.inner = Onion(depth - 1) if depth else nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.inner(self.skin(x))
        return inside


def test_modules_may_be_nested_as_deeply_as_python_lets_them_run() -> None:
    model, limit = Onion(200), sys.getrecursionlimit()
    batch = torch.zeros(8, 6), torch.zeros(8, 4)
    torch.autograd.backward(functional.mse_loss(model(batch[0]), batch[1]))
    assert len(capture(workload(model, *batch)).updates) == 404
    assert sys.getrecursionlimit() == limit


class PreNorm(nn.Module):
    """Tied embeddings and pre-norm residual layers, as in GPT-2 and Llama."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        x = x + self.rotary(tokens)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.norm(x) @ self.embedding.weight.T
        return out


class Rotary(nn.Module):
    """Computes without gradients, between ops that have some."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens.float() * 0.1).cos()[..., None]


def test_a_residual_gradient_is_summed_where_its_layer_is() -> None:
    """It followed the first term of the sum, and so the layer behind, up to the last norm.

    A pipeline then sent the stream's gradient to the last stage and back at every layer.
    """
    tokens = torch.zeros(6, 5, dtype=torch.long)
    graph = capture(workload(PreNorm, tokens, torch.zeros(6, 5, 11), loss=functional.mse_loss))
    sums = [
        op.module
        for op in graph.ops
        if op.phase == Phase.BACKWARD and op.kind == "add.Tensor" and len(op.inputs) == 2
    ]
    # One for each layer, from the last to the first, and one for the two uses of the embedding.
    assert sums == [*(f"layers.{layer}.0" for layer in (3, 2, 1, 0)), "embedding"]


def test_a_gradient_belongs_to_the_op_that_made_the_value_not_to_one_after_it() -> None:
    """Ops without gradients carry the number of the op before them; the rotary module's did."""
    tokens = torch.zeros(6, 5, dtype=torch.long)
    graph = capture(workload(PreNorm, tokens, torch.zeros(6, 5, 11)))
    (op,) = (op for op in graph.ops if op.kind == "embedding_dense_backward.default")
    assert op.module == "embedding"


def test_the_generated_module_gives_the_gradients_of_autograd() -> None:
    torch.manual_seed(0)
    model = mlp()
    batch = (torch.randn(8, 6), torch.randn(8, 4))
    step = capture_step(workload(model, *batch))
    loss, *gradients = step.module(*model.parameters(), *batch)
    torch.autograd.backward(functional.mse_loss(model(batch[0]), batch[1]))
    torch.testing.assert_close(loss, functional.mse_loss(model(batch[0]), batch[1]).detach())
    flat = torch.utils._pytree.tree_leaves(gradients)
    for parameter, gradient in zip(model.parameters(), flat, strict=False):
        torch.testing.assert_close(gradient, parameter.grad)


def test_capture_allocates_no_weight_and_leaves_the_model_alone() -> None:
    huge = lambda: nn.Linear(200_000, 200_000, bias=False)  # noqa: E731 - 160 GB if it were real
    graph = capture(
        workload(huge, torch.zeros(4, 200_000).to_sparse().to_dense()[:, :1].expand(4, 200_000),
                 torch.zeros(4, 1).expand(4, 200_000))
    )  # fmt: skip
    assert graph.num_parameters == 4 * 10**10
    model = mlp()
    before = [parameter.clone() for parameter in model.parameters()]
    capture(workload(model, torch.zeros(8, 6), torch.zeros(8, 4)))
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    assert not any(module._forward_hooks for module in model.modules())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.embedding(tokens))
        return out.flatten(0, 1)


def test_tied_weights_are_one_parameter_with_one_update() -> None:
    tokens = torch.zeros(4, 3, dtype=torch.long)
    graph = capture(
        workload(
            Tied, tokens, tokens, loss=lambda out, y: functional.cross_entropy(out, y.flatten())
        )
    )
    assert graph.num_parameters == 66
    assert len(graph.updates) == 1


def test_frozen_and_unused_parameters_get_no_update() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 4)
            self.unused = nn.Linear(6, 4)
            self.frozen = nn.Linear(6, 6)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(self.frozen(x))
            return out

    graph = capture(workload(Part, torch.zeros(4, 6), torch.zeros(4, 4)))
    names = [graph.tensors[parameter].name for _, parameter, _ in graph.updates]
    assert names == ["used.weight", "used.bias"]
    buffers = [graph.tensors[tensor].name for tensor in graph.inputs_of_kind(TensorKind.BUFFER)]
    assert buffers == ["frozen.weight", "frozen.bias"]


def test_the_only_mutation_left_writes_changed_buffers_back() -> None:
    model = lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))  # noqa: E731
    graph = capture(workload(model, torch.zeros(4, 6), torch.zeros(4, 4)))
    written = [op.inputs[0] for op in graph.ops if op.kind.endswith("_.default")]
    assert [graph.tensors[tensor].name for tensor in written] == ["1.num_batches_tracked"]
    assert any("batch_norm" in op.kind for op in graph.ops)


def test_every_attention_kernel_becomes_one_op_pair() -> None:
    model = lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)  # noqa: E731
    graph = capture(workload(model, torch.zeros(4, 3, 8), torch.zeros(4, 3, 8)))
    kinds = [op.kind for op in graph.ops]
    assert kinds.count("attention") == kinds.count("attention_backward") == 1
    attention = graph.ops[kinds.index("attention")]
    assert list(attention.args) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale",
    ]  # fmt: skip
    # Two products of B H S S D each.
    assert attention.flops == 2 * 2 * 4 * 2 * 3 * 3 * 4


def test_lstm_captures_without_the_fused_kernel() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x)[0]
            return out

    graph = capture(workload(Last, torch.zeros(4, 3, 6), torch.zeros(4, 3, 5)))
    assert not any("mkldnn" in op.kind for op in graph.ops)
    assert len(graph.updates) == 4


def test_dict_batches_and_models_that_return_their_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
            return functional.mse_loss(self.linear(x), labels)

    batch = {"x": torch.zeros(8, 6), "labels": torch.zeros(8, 4), "mask": None}
    graph = capture(Workload(Own, batch, None, torch.optim.SGD, {"lr": 0.1}))  # type: ignore[arg-type]
    assert graph.batch_size == 8
    plain = {"input": torch.zeros(8, 6), "labels": torch.zeros(8, 4)}
    model = lambda: nn.Linear(6, 4)  # noqa: E731
    graph = capture(Workload(model, plain, functional.mse_loss, torch.optim.SGD, {"lr": 0.1}))
    assert graph.batch_size == 8


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"x": 1}, "batch_dims names 'x', which the batch does not have; its entries are 0, 1"),
        ({2: None}, "batch_dims names 2, which"),
        ({0: 2}, r"batch_dims says 2 of a tensor of \(8, 6\); give one of its dimensions"),
        ({0: -1}, "batch_dims says -1"),
        ({0: "0"}, "batch_dims says '0'"),
    ],
)
def test_batch_dims_that_no_tensor_has_are_refused(stated: Any, words: str) -> None:
    """They were left out in silence: the tensor was split, or not, as if nothing was said."""
    with pytest.raises(CaptureError, match=words):
        capture(workload(mlp, torch.zeros(8, 6), torch.zeros(8, 4), batch_dims=stated))


def test_something_else_than_a_workload_is_refused() -> None:
    with pytest.raises(CaptureError, match="the workload is of type Sequential; give a heterog"):
        capture(mlp())  # type: ignore[arg-type]


def test_the_folder_of_torchs_compiler_must_be_one_that_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "file"
    there.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(there))
    with pytest.raises(CaptureError, match=r"cannot make the folder .*TORCHINDUCTOR_CACHE_DIR"):
        capture(workload_of("mlp"))


def test_batch_dims_name_another_dimension() -> None:
    model = lambda: nn.Linear(6, 4)  # noqa: E731
    graph = capture(
        workload(model, torch.zeros(3, 8, 6), torch.zeros(3, 8, 4), batch_dims={0: 1, 1: 1})
    )
    assert graph.batch_size == 8


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Picky()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.sum().item()  # the line that the message must name
        out: Tensor = self.linear(x) * scale
        return out


def test_code_that_depends_on_values_is_refused_with_module_line_and_advice() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(workload(Branching, torch.zeros(8, 6), torch.zeros(8, 4)))
    text = str(caught.value)
    assert "inner" in text
    assert "test_capture.py" in text
    assert "scale = x.sum().item()" in text
    assert "torch.where" in text
    assert "\n" not in text


def _of_lengths(x: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    return (nested * nested).values().mean()


def _of_places(x: Tensor) -> Tensor:
    places = torch.arange(0, 9, 2)
    return torch.nested.nested_tensor_from_jagged(x, places).values().mean()


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (_of_lengths, "pad the sequences to one length"),
        (_of_places, "pad the sequences to one length"),
        (lambda x: x * float(x.detach().numpy().max()), "compute it where the data is loaded"),
    ],
)
def test_what_reads_values_outside_of_torch_is_refused_with_advice(
    read: Callable[[Tensor], Tensor], text: str
) -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return read(super().forward(x))

    with pytest.raises(CaptureError, match=text):
        capture(workload(lambda: Reads(6, 4), torch.zeros(8, 6), torch.zeros(8, 4)))


def test_a_search_for_anomalies_reads_gradients_of_training_only() -> None:
    plain = workload(lambda: nn.Linear(6, 4), torch.zeros(8, 6), torch.zeros(8, 4))
    with torch.autograd.set_detect_anomaly(True):
        graph = capture(plain)
    assert graph.fingerprint == capture(plain).fingerprint


def test_positions_of_sizes_alone_need_no_mask() -> None:
    """As in training, ``transformers`` then leaves causal attention to the kernel."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    words = {"input_ids": torch.zeros(4, 5, dtype=torch.int64)}
    words["labels"] = words["input_ids"]
    model = lambda: transformers.LlamaForCausalLM(config)  # noqa: E731
    graph = capture(Workload(model, words, None, torch.optim.SGD, {"lr": 0.1}))
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert attention.args["is_causal"] is True
    assert attention.args["attn_mask"] is None


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/site-packages/torch_geometric/utils/loop.py", "AddSelfLoops"),
        ("/transformers/models/speecht5/modeling_speecht5.py", "the sum of the mask"),
        ("/site-packages/torch_geometric/nn/pool/glob.py", "num_nodes"),
        ("/site-packages/transformers/models/bert/modeling_bert.py", "eager attention"),
        ("/home/me/model.py", r"masks as indices \(x\[mask\]\)"),
    ],
)
def test_advice_belongs_to_the_library_whose_line_it_is(path: str, text: str) -> None:
    frame = traceback.FrameSummary(path, 1, "forward", line="x = x[mask]")
    assert re.search(text, _way_out(ValueError(), frame))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("n = int(b.max()) + 1", r"labels\.shape\[0\]"),
        ("p = int(self.place)", r"index_copy_\(0, \(place"),
        ("p = self.place.item()", r"index_copy_\(0, \(place"),
    ],
)
def test_a_number_that_values_say_is_taken_from_a_shape_or_stays_a_tensor(
    line: str, text: str
) -> None:
    frame = traceback.FrameSummary("/home/me/model.py", 1, "forward", line=line)
    assert re.search(text, _way_out(ValueError(), frame))


def test_an_adaptive_softmax_has_all_words() -> None:
    """The advice of the refusal is the same loss, and is captured."""
    head = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10], div_value=2)
    x, words = torch.randn(6, 8), torch.arange(6) * 3
    whole = functional.nll_loss(head.log_prob(x), words)
    torch.testing.assert_close(whole, head(x, words).loss)

    class Words(nn.Module):
        def __init__(self, *, all_words: bool) -> None:
            super().__init__()
            self.head, self.all_words = (
                nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10], div_value=2),
                all_words,
            )

        def forward(self, x: Tensor, words: Tensor) -> Tensor:
            if self.all_words:
                return functional.nll_loss(self.head.log_prob(x), words)
            loss: Tensor = self.head(x, words).loss
            return loss

    batch = (x, words)
    capture(Workload(lambda: Words(all_words=True), batch, None, torch.optim.SGD, {"lr": 0.1}))
    refused = Workload(lambda: Words(all_words=False), batch, None, torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(CaptureError, match=r"nll_loss\(head\.log_prob\(x\), labels\)"):
        capture(refused)


class Looked(nn.Module):
    """Sums rows of a table that asks for sparse gradients."""

    def __init__(self, *, in_module: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=in_module)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", sparse=in_module)
        self.in_module = in_module

    def forward(self, rows: Tensor) -> Tensor:
        if self.in_module:
            out: Tensor = self.table(rows).sum(1) + self.bag(rows)
            return out
        return functional.embedding(rows, self.table.weight, sparse=True).sum(1)


def test_sparse_embeddings_are_captured_with_dense_gradients_and_left_as_they_were() -> None:
    model = Looked(in_module=True)
    graph = capture(workload(model, torch.zeros(8, 3).long(), torch.zeros(8, 4)))
    assert [graph.tensors[gradient].shape for _, _, gradient in graph.updates] == [(7, 4)] * 2
    assert model.table.sparse
    assert model.bag.sparse


def test_a_sparse_gradient_that_no_module_asks_for_is_refused() -> None:
    batch = (torch.zeros(8, 3).long(), torch.zeros(8, 4))
    with pytest.raises(CaptureError, match=r"'table.weight' is sparse; leave out sparse=True"):
        capture(workload(lambda: Looked(in_module=False), *batch))


def test_a_sparse_buffer_is_refused_with_the_ways_out() -> None:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("near", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            near = torch.sparse.mm(self.get_buffer("near"), self.layer(x).T)
            out: Tensor = near.T
            return out

    with pytest.raises(CaptureError, match=r"'near' is a sparse tensor.*SparseProduct.*index_add"):
        capture(workload(Smoothed, torch.zeros(8, 4), torch.zeros(8, 4)))


def test_overloads_whose_names_are_words_of_python_are_captured() -> None:
    class Levels(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.empty_like(x).random_(1, 4)

    graph = capture(workload(lambda: Levels(4, 4), torch.zeros(8, 4), torch.zeros(8, 4)))
    (drawn,) = [op for op in graph.ops if op.kind == "random.from"]
    assert (drawn.args["from"], drawn.args["to"]) == (1, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8])
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Bilinear(4, 4, 4)])
def test_products_of_unlike_dtypes_are_refused_as_plain_torch_does(
    layer: nn.Module, dtype: torch.dtype
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(*[x] * (1 + isinstance(self.layer, nn.Bilinear)))
            return out

    batch = (torch.ones(8, 4, dtype=dtype), torch.zeros(8, 4))
    with pytest.raises(RuntimeError):
        Net()(batch[0])
    with pytest.raises(CaptureError, match=r"dtype|type") as caught:
        capture(workload(Net, *batch))
    assert "\n" not in str(caught.value)
    assert "layer" in str(caught.value)


def test_an_optimizer_of_sparse_gradients_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"SparseAdam cannot step a dense gradient.*Adagrad"):
        optimizer_state_ratio(torch.optim.SparseAdam, {})


class Checkpointed(nn.Module):
    """Dropout and BatchNorm under ``torch.utils.checkpoint``."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        checkpoint = torch.utils.checkpoint.checkpoint
        out: Tensor = checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant)
        return out


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_run_once_and_draw_their_masks_once(use_reentrant: bool) -> None:
    """Plans decide what is computed again; a second mask would give other gradients."""
    model = Checkpointed(use_reentrant=use_reentrant)
    graph = capture(workload(lambda: model, torch.zeros(8, 6), torch.zeros(8, 4)))
    kinds = [op.kind for op in graph.ops]
    assert sum("native_batch_norm" in kind and "backward" not in kind for kind in kinds) == 1
    assert sum("dropout.default" in kind or "bernoulli" in kind for kind in kinds) == 1
    assert len(graph.updates) == 6


class AsksForValues(nn.Module):
    """What libraries ask of values: arguments of distributions, conversions, checked masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        self.layer.to(self.layer.weight.dtype)
        logits = self.layer(x)
        functions: Any = torch
        functions._check_tensor_all(actions < 4, lambda: "there are 4 actions")
        policy: Any = torch.distributions.Categorical(logits=logits)
        out: Tensor = policy.log_prob(actions) + 0.1 * policy.entropy()
        return out


def test_questions_about_values_are_asked_when_the_step_runs() -> None:
    torch.manual_seed(0)
    model, x, rewards = AsksForValues(), torch.randn(8, 6), torch.randn(8)
    actions = torch.arange(8) % 4

    def loss(out: Tensor, rewards: Tensor) -> Tensor:
        return -(out * rewards).mean()

    step = capture_step(workload(lambda: model, x, actions, rewards, loss=loss))
    state = [*model.parameters(), *model.buffers()]
    expected = loss(model(x, actions), rewards)
    assert torch.allclose(step.module(*state, x, actions, rewards)[0], expected)
    with pytest.raises(RuntimeError, match="there are 4 actions"):
        step.module(*state, x, actions + 1, rewards)
    with pytest.raises(ValueError, match="constraint"):  # torch asks again after a capture
        torch.distributions.Bernoulli(torch.tensor(2.0))


class GraphLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(torch_geometric.nn, kind)(6, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.layer(x, edges)
        return out


@pytest.mark.parametrize("kind", ["GCNConv", "GATConv", "TransformerConv"])
def test_graph_layers_are_captured_for_graphs_without_own_loops_which_is_checked(
    kind: str,
) -> None:
    torch.manual_seed(0)
    model = GraphLayer(kind)
    x, edges, target = torch.randn(5, 6), torch.tensor([[0, 1, 2], [1, 2, 4]]), torch.randn(5, 4)
    step = capture_step(workload(model, x, edges, target))
    state = [*model.parameters(), *model.buffers()]
    loss = step.module(*state, x, edges, target)[0]
    assert torch.allclose(loss, functional.mse_loss(model(x, edges), target))
    if kind == "TransformerConv":  # adds none
        return
    with pytest.raises(RuntimeError, match="self loops of its own"):
        step.module(*state, x, torch.tensor([[0, 1, 2], [1, 1, 4]]), target)


@functools.lru_cache(maxsize=4)
def places_of(size: int) -> Tensor:
    """A table that a library keeps for every size."""
    return torch.arange(size) * 0.1


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x + places_of(6))
        return out


def test_what_a_library_caches_meanwhile_is_not_what_the_real_model_reads() -> None:
    """Positions of patches in ``transformers``: the model was fed fake tensors after capture."""
    batch = (torch.zeros(8, 6), torch.zeros(8, 4))
    capture(workload(Placed, *batch))
    assert type(places_of(6)) is Tensor
    capture(workload(Placed, *batch))  # with a real table in the cache


class GroupedExperts(nn.Module):
    """Each row is multiplied with the matrix of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.grouped_mm(x, self.weight, offs=torch.tensor([3, 8], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_captured_in_every_dtype_of_the_cpu(dtype: torch.dtype) -> None:
    batch = (torch.zeros(8, 8, dtype=dtype)[:, :4], torch.zeros(8, 8, dtype=dtype))
    graph = capture(workload(lambda: GroupedExperts().to(dtype), *batch))
    products = [op for op in graph.ops if op.kind == "_grouped_mm.default"]
    # Forward and gradient of the matrices: every row meets one matrix of 4 x 8.
    assert [op.flops for op in products] == [2 * 8 * 4 * 8] * 2


class Speech(nn.Module):
    """Scores of letters over time, and how well they tell a text."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, sound: Tensor, text: Tensor) -> Tensor:
        likely = self.head(sound).log_softmax(-1).transpose(0, 1)
        lengths: Any = [(length,) * len(sound) for length in (12, 3)]
        return nn.functional.ctc_loss(likely, text, *lengths)


def test_ctc_says_what_depends_on_values() -> None:
    workload = Workload(
        Speech,
        (torch.randn(4, 12, 4), torch.ones(4, 3, dtype=torch.long)),
        None,
        torch.optim.SGD,
        {"lr": 0.1},
    )
    with pytest.raises(CaptureError, match=r"as wide as the longest target.*target_lengths"):
        capture(workload)


def test_a_failing_model_names_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    """In one line: torch's own log of the failed op is left out."""
    model = lambda: nn.Linear(5, 4)  # noqa: E731
    with pytest.raises(CaptureError, match=r"the training step fails in .* RuntimeError"):
        capture(workload(model, torch.zeros(8, 6), torch.zeros(8, 4)))
    assert not capfd.readouterr().err


class _Leaves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit("enough")


def test_a_model_that_ends_the_program_is_refused() -> None:
    """Its exit code, 0 say, is none of a command that has made no plan."""
    with pytest.raises(CaptureError, match=r"fails in .* SystemExit: enough"):
        capture(workload(lambda: _Leaves(6, 4), torch.zeros(8, 6), torch.zeros(8, 4)))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda out, y: out - y, r"must be a scalar tensor, got \(8, 4\). Take its mean"),
        (lambda out, y: (out.sum(), y), r"must be a scalar tensor, got tuple. Return what is"),
        (lambda out, y: y.sum(), "does not depend on any parameter"),
    ],
)
def test_losses_that_cannot_be_trained(loss: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(workload(lambda: nn.Linear(6, 4), torch.zeros(8, 6), torch.zeros(8, 4), loss=loss))


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(CaptureError, match="the example batch has no samples"):
        capture(workload(lambda: nn.Linear(6, 4), torch.zeros(0, 6), torch.zeros(0, 4)))


def test_a_model_may_return_its_loss_in_a_dict() -> None:
    class Trains(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x)
            return {"loss": functional.mse_loss(out, y), "error": (out - y).abs().max()}

    batch = (torch.zeros(8, 6), torch.zeros(8, 4))
    graph = capture(workload(lambda: Trains(6, 4), *batch, loss=None))
    assert "max.default" not in {op.kind for op in graph.ops}


def test_tensors_in_objects_of_a_batch_are_refused_by_their_place() -> None:
    @dataclass
    class Sample:
        x: Tensor

    batch = {"one": [1, Sample(torch.zeros(8, 6))], "labels": torch.zeros(8, 4)}
    made = Workload(lambda: nn.Linear(6, 4), batch, functional.mse_loss, torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"\['one'\]\[1\] of the batch is a Sample with tens"):
        capture(made)


def test_a_hessian_and_an_inverse_fourier_transform_have_gradients() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.window: Tensor
            self.register_buffer("window", torch.hann_window(8))

        def forward(self, x: Tensor) -> Tensor:
            bent: Tensor = torch.func.vmap(
                torch.func.hessian(lambda y: self.layer(y).tanh().sum())
            )(x)
            seen = torch.stft(x.flatten()[None], 8, 2, window=self.window, return_complex=True)
            again: Tensor = torch.istft(seen * 2, 8, 2, window=self.window)
            return bent.pow(2).sum() + again.pow(2).sum()

    x = torch.randn(8, 6)
    step = capture_step(workload(Twice, x, loss=None))
    model = Twice()
    loss = model(x)
    torch.autograd.backward(loss)
    inputs = (*(each.detach() for each in model.parameters()), model.window)
    found = pytree.tree_leaves(step.module(*inputs, x))
    wanted = [loss.detach(), *(each.grad for each in model.parameters())]
    for value, expected in zip(found, wanted, strict=False):
        torch.testing.assert_close(value, expected)
    with pytest.raises(RuntimeError, match=r"windows of torch.istft do not overlap"):
        step.module(*inputs[:-1], 0 * model.window, x)


def test_running_statistics_of_an_instance_norm_are_stepped_by_ops() -> None:
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    x, y = torch.randn(8, 3, 4, 4), torch.zeros(8, 3, 4, 4)
    step = capture_step(workload(norm, x, y))
    kept = [each.clone() for each in norm.buffers()]
    inputs = [each.detach().clone() for each in norm.parameters()]
    step.module(*inputs, *kept, x, y)
    norm(x)
    for found, wanted in zip(kept, norm.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_parameter_that_torch_cannot_add_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'weight' is trained in torch.float8_e4m3fn, which"):
        capture(
            workload(
                lambda: nn.Linear(6, 4).to(torch.float8_e4m3fn),
                torch.zeros(8, 6),
                torch.zeros(8, 4),
            )
        )


def test_a_batch_without_one_size_is_refused() -> None:
    batch = (torch.zeros(8, 6), torch.zeros(8, 4))
    with pytest.raises(CaptureError, match=r"2 different batch sizes.*batch_dims"):
        capture(workload(lambda: nn.Linear(6, 4), *batch, batch_dims={1: 1}))


def test_a_batch_of_which_nothing_can_be_shared_out_is_refused() -> None:
    batch = (torch.zeros(8, 6), torch.zeros(8, 4))
    with pytest.raises(CaptureError, match=r"no tensor of the batch .* has a batch dimension"):
        capture(workload(lambda: nn.Linear(6, 4), *batch, batch_dims={0: None, 1: None}))


def test_views_are_what_torch_calls_views() -> None:
    unsafe = {"_unsafe_view.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default"}
    for kind in VIEW_KINDS - unsafe:
        name, overload = kind.split(".")
        assert getattr(getattr(torch.ops.aten, name), overload).is_view, kind


@pytest.mark.parametrize(
    ("optimizer", "options", "ratio"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0.0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1.0),
        (torch.optim.AdamW, {}, 2.0),
        (torch.optim.Adam, {"amsgrad": True}, 3.0),
    ],
)
def test_optimizer_state(optimizer: Any, options: dict[str, Any], ratio: float) -> None:
    assert optimizer_state_ratio(optimizer, options) == ratio


class Masked(nn.Module):
    """A layer that makes the mask of its positions itself, and drops values at random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 5, 5, dtype=torch.bool).tril()
        noise = torch.rand(5, 4)
        out: Tensor = torch.where(mask, 0.5, 0.0) @ self.linear(x) + noise
        return out


def test_constants_that_several_layers_make_alike_are_made_once_and_noise_is_not() -> None:
    def made(layers: int) -> tuple[int, int]:
        data = torch.zeros(8, 5, 4)
        graph = capture(
            workload(lambda: nn.Sequential(*(Masked() for _ in range(layers))), data, data)
        )
        kinds = [op.kind for op in graph.ops]
        return kinds.count("tril.default"), kinds.count("rand.default")

    assert made(1) == (1, 1)
    assert made(3) == (1, 3)


class Sharpness(torch.optim.SGD):
    """Asks for a closure by itself, as implementations of SAM do."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "no closure is given"


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, Sharpness])
def test_an_optimizer_that_needs_a_closure_is_refused(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    with pytest.raises(CaptureError, match=f"{optimizer.__name__} needs a closure"):
        optimizer_state_ratio(optimizer, {"lr": 0.1})


class Ending(torch.optim.SGD):
    """Ends the program where it does not like what it is given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise SystemExit(3)


def test_an_optimizer_that_ends_the_program_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"optimizer Ending cannot step with .*: 3"):
        optimizer_state_ratio(Ending, {"lr": 0.1})


def linear(**more: Any) -> Workload:
    return workload(lambda: nn.Linear(4, 2), torch.zeros(6, 4), torch.zeros(6, 2), **more)


def test_an_optimizer_that_does_not_take_the_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"Muon does not take .* Leave some out with par"):
        capture(linear(optimizer=torch.optim.Muon))

    def matrices(model: nn.Module) -> list[Tensor]:
        return [each for each in model.parameters() if each.ndim == 2]

    graph = capture(linear(optimizer=torch.optim.Muon, parameter_groups=matrices))
    assert len(graph.updates) == 1


def test_observers_that_have_seen_nothing_are_refused() -> None:
    def prepared() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 2))
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        made: nn.Module = torch.ao.quantization.prepare_qat(model.train())
        return made

    def warm() -> nn.Module:
        model = prepared()
        model(torch.zeros(6, 4))
        return model

    with pytest.raises(CaptureError, match=r"min_val' of an observer .* \(2 channels\)"):
        capture(replace(linear(), model=prepared))
    capture(replace(linear(), model=warm))


def test_parameters_of_a_loss_are_named_in_a_warning() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return self.scale * (output - target).square().mean()

    with pytest.warns(HeterogWarning, match=r"the loss has parameters \(scale\) that no"):
        capture(linear(loss=Scaled()))


def test_peak_live_bytes_by_hand() -> None:
    graph = capture(
        workload(lambda: nn.Linear(6, 4, bias=False), torch.zeros(8, 6), torch.zeros(8, 4))
    )
    weight, x, y = 6 * 4 * 4, 8 * 6 * 4, 8 * 4 * 4
    # Output, its gradient and the weight gradient are the large values of the backward pass.
    assert weight + x + y + 2 * y <= graph.peak_live_bytes <= weight + x + y + 3 * y + weight + 64


def test_fingerprint_follows_what_matters_and_differences_are_named() -> None:
    graph = captured_mlp()
    assert graph.fingerprint == captured_mlp().fingerprint
    wider = capture(
        workload(
            lambda: nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)),
            torch.zeros(8, 6), torch.zeros(8, 4), optimizer=torch.optim.Adam,
        )
    )  # fmt: skip
    assert graph.fingerprint != wider.fingerprint
    assert "0.weight: (10, 6)" in (graph.describe_difference(wider) or "")
    assert graph.describe_difference(captured_mlp()) is None
    assert [op.phase for op in graph.ops].count(Phase.UPDATE) == 4


def test_grouped_convolutions_are_not_charged_for_other_groups() -> None:
    def flops(groups: int) -> float:
        model = lambda: nn.Sequential(  # noqa: E731
            nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False)
        )
        image = torch.zeros(2, 8, 5, 5)
        graph = capture(workload(model, image, image))
        return float(sum(op.flops for op in graph.ops if op.kind.startswith("convolution")))

    first = 2 * 2 * 25 * 64 * 2  # forward and weight gradient; its input needs none
    assert flops(1) == first + 3 * 2 * 2 * 25 * 64 * 9
    assert flops(8) == first + 3 * 2 * 2 * 25 * 8 * 9


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    few_of([("mobilenet_v2", 0.300e9), ("resnet50", 4.1e9), ("vgg19", 19.6e9)], 1),
)
def test_zoo_flops_are_the_published_ones(name: str, multiply_adds: float) -> None:
    """Forward multiply-adds per image, as the model papers state them."""
    from heterog.zoo import build

    graph = capture(build(name, 8))
    products = [
        op for op in graph.ops if op.kind.split(".")[0] in
        ("convolution", "convolution_backward", "mm", "addmm")
    ]  # fmt: skip
    forward = sum(op.flops for op in products if op.phase == Phase.FORWARD)
    assert forward / 2 / 8 == pytest.approx(multiply_adds, rel=0.05)
    total = sum(op.flops for op in products)
    assert total == pytest.approx(3 * forward, rel=0.1)


def test_models_that_convert_or_look_at_their_weights_are_captured() -> None:
    def converted() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).to(torch.float64)

    def truncated() -> nn.Module:
        model = nn.Linear(6, 4)
        nn.init.trunc_normal_(model.weight)
        return model

    for model, dtype in ((converted, torch.float64), (truncated, torch.float32)):
        batch = (torch.zeros(8, 6, dtype=dtype), torch.zeros(8, 4, dtype=dtype))
        graph = capture(workload(model, *batch))
        assert graph.num_parameters in (28, 36)
        assert graph.tensors[graph.parameters[0]].dtype == str(dtype).removeprefix("torch.")


class Rerun(torch.autograd.Function):
    """Runs a layer without a graph, and again, with one, in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, layer: nn.Module) -> Any:
        context.layer = layer
        context.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = context.saved_tensors[0].detach().requires_grad_()
            context.layer(x).backward(gradients[0])
        return x.grad, None


class RunTwice(nn.Module):
    """A layer whose gradients its own function adds to ``.grad``; it may be used plainly, too."""

    def __init__(self, *, plainly: bool) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 4), nn.Linear(4, 4)
        self.plainly = plainly

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = Rerun.apply(x, self.layer)  # type: ignore[no-untyped-call]
        return out + self.layer(out) if self.plainly else out


@pytest.mark.parametrize("plainly", [False, True])
def test_gradients_that_a_backward_pass_adds_up_itself_count(plainly: bool) -> None:
    """The layer seemed not to be trained: only what autograd returns was taken for its gradient.

    What an earlier step has left in ``.grad`` does not count.
    """
    torch.manual_seed(0)
    model, x, y = RunTwice(plainly=plainly), torch.randn(8, 6), torch.randn(8, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step = capture_step(workload(model, x, y))
    model.zero_grad()
    assert len(step.graph.updates) == 4
    _, *gradients = step.module(*model.parameters(), x, y)
    torch.autograd.backward(functional.mse_loss(model(x), y))
    flat = torch.utils._pytree.tree_leaves(gradients)
    for gradient, parameter in zip(flat, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


class Waves(nn.Module):
    """Filters a signal: gradients of Fourier transforms write into slices of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        out: Tensor = torch.fft.irfft(waves, n=x.shape[-1])
        return out


def test_fourier_transforms_are_captured_with_their_gradients() -> None:
    torch.manual_seed(0)
    model, x, y = Waves(), torch.randn(8, 6), torch.randn(8, 6)
    step = capture_step(workload(lambda: model, x, y))
    with torch.no_grad():
        _, *gradients = step.module(*model.parameters(), x, y)
    torch.autograd.backward(functional.mse_loss(model(x), y))
    (gradient,) = torch.utils._pytree.tree_leaves(gradients)
    torch.testing.assert_close(gradient, model.filter.grad)


def test_a_model_that_looks_at_its_values_when_it_is_made_is_captured() -> None:
    """Neither fake nor meta tensors have any: such a model is made in memory."""

    def model() -> nn.Module:
        return nn.utils.parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")

    graph = capture(workload(model, torch.zeros(8, 6), torch.zeros(8, 6)))
    assert len(graph.updates) == 2


def test_errors_that_a_model_hides_when_it_is_made_are_seen() -> None:
    """On meta tensors torch leaves out the base of a matrix that is not square."""

    def model() -> nn.Module:
        return nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)).double()

    batch = torch.zeros(8, 6).double(), torch.zeros(8, 4).double()
    assert any(each.name.endswith("base") for each in capture(workload(model, *batch)).tensors)


class Asking(nn.Module):
    """Asks for its parameter in ways that tell real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.layer.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        self.layer.weight.factor = 5.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_parameter("layer.weight")
        factor = getattr(weight, "factor", 1.0) if isinstance(weight, nn.Parameter) else 2.0
        with torch.profiler.record_function("layer"):
            made: Tensor = self.layer(x) * factor
        return made * 7 if self.layer._forward_hooks else made


def test_parameters_are_asked_for_as_in_training() -> None:
    torch.manual_seed(0)
    model = Asking().double()
    batch = torch.randn(8, 6).double(), torch.randn(8, 4).double()
    step = capture_step(workload(lambda: Asking().double(), *batch))
    torch.autograd.backward(functional.mse_loss(model(batch[0]), batch[1]))
    _, *gradients = pytree.tree_leaves(step.module(*model.parameters(), *batch))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.LazyLinear(4), "Call the model on a batch in the function that makes it"),
        (lambda: torch.jit.script(nn.Linear(6, 4)), "compiled by torch.jit"),
    ],
)
def test_models_without_shapes_or_code_are_refused(
    model: Callable[[], nn.Module], text: str
) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(workload(model, torch.zeros(8, 6), torch.zeros(8, 4)))


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pack = nn.utils.rnn.pack_padded_sequence
        _, last = self.layer(pack(x, lengths, batch_first=True, enforce_sorted=False))
        out: Tensor = last[-1]
        return out


def test_packed_sequences_are_refused_with_what_to_do_instead() -> None:
    batch = torch.zeros(8, 5, 6), torch.full((8,), 5), torch.zeros(8, 4)
    with pytest.raises(CaptureError, match=r"as many steps as the values of lengths say.*gather"):
        capture(workload(Packing, *batch))


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unread = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.unread(out)
        return out


def test_statistics_of_a_norm_that_nothing_reads_move() -> None:
    graph = capture(workload(Unread, torch.zeros(8, 6), torch.zeros(8, 4)))
    assert [op.module for op in graph.ops if "batch_norm" in op.kind] == ["unread"]


@pytest.mark.parametrize("loss", [lambda output: output.loss, nn.CrossEntropyLoss, "mean"])
def test_a_loss_that_cannot_be_called_says_how_it_is_called(loss: Any) -> None:
    batch = (torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(CaptureError, match=r"called as loss\(output, target\).*loss=None"):
        Workload(nn.Linear(3, 3), batch, loss, torch.optim.SGD)


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(), functional.mse_loss, max])
def test_losses_that_can_be_called_are_taken(loss: Any) -> None:
    Workload(nn.Linear(3, 3), (torch.zeros(4, 3), torch.zeros(4, 3)), loss, torch.optim.SGD)


class Written(nn.Module):
    """Writes in place, in a way that a case names."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear, self.norm = way, nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.way == "norm":
            y = self.norm(y)
        if self.way == "view":
            y[:, :2] *= 2.0
        return functional.relu(y, inplace=self.way == "relu")


def traces_of(monkeypatch: pytest.MonkeyPatch, made: Workload) -> tuple[OpGraph, OpGraph, bool]:
    """The graph, the graph after a second trace, and whether there was one anyway."""
    found: list[bool] = []
    mutates = tracing._mutates

    def noted(graph: Any) -> bool:
        found.append(mutates(graph))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_mutates", noted)
        graph = capture(made)
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_mutates", lambda graph: True)
        return graph, capture(made), found[0]


@pytest.mark.parametrize("way", ["nothing", "norm", "view", "relu"])
def test_only_a_step_that_writes_in_place_is_traced_again(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Statistics of a norm are written without a word of it in the op's schema."""
    made = workload(lambda: Written(way), torch.zeros(4, 6), torch.zeros(4, 6))
    once, twice, is_traced_again = traces_of(monkeypatch, made)
    assert is_traced_again == (way != "nothing")
    assert graph_to_dict(once) == graph_to_dict(twice)


@pytest.mark.parametrize("name", ["gpt", "moe", "own loss"])
def test_a_second_trace_would_find_the_same_step(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    once, twice, is_traced_again = traces_of(monkeypatch, workload_of(name))
    assert not is_traced_again
    assert graph_to_dict(once) == graph_to_dict(twice)


def test_a_batch_norm_that_counts_its_steps_is_refused_with_advice_that_works() -> None:
    def model(momentum: float | None) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum))

    batch = torch.randn(8, 3), torch.randn(8, 4)
    with pytest.raises(CaptureError, match="Give it a momentum"):
        capture(workload(lambda: model(None), *batch))
    capture(workload(lambda: model(0.1), *batch))
