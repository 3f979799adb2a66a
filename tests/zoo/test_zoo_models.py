import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from heterog.errors import HeterogError
from heterog.zoo import registry
from heterog.zoo.language import Transformer, sinusoids, token_cross_entropy
from heterog.zoo.moe import BertMoe, MixtureOfExperts, MoeOutput, moe_loss
from heterog.zoo.vision import MobileNetV2, ResNet
from tests.thorough import one_in

HUB_MODELS = (
    "bert_base",
    "bert_large_24l",
    "bert_large_48l",
    "xlnet_large_24l",
    "xlnet_large_48l",
    "gpt2",
    "llama_1b",
)


def make_fake(name: str) -> nn.Module:
    if name in HUB_MODELS:
        pytest.importorskip("transformers")
    workload = registry.build(name, 2)
    with FakeTensorMode():
        return workload.make_model()


@pytest.mark.parametrize("name", registry.names())
def test_num_parameters(name: str) -> None:
    model = make_fake(name)
    assert sum(p.numel() for p in model.parameters()) == registry.entry(name).num_parameters
    assert all(isinstance(t, FakeTensor) for t in (*model.parameters(), *model.buffers()))
    assert not any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())


def capture(name: str, shorten: Callable[[Any], None] = lambda model: None) -> GraphModule:
    if name in HUB_MODELS:
        pytest.importorskip("transformers")
    workload = registry.build(name, 2)
    mode = FakeTensorMode()
    with mode:
        model, batch = workload.make_model().train(), workload.make_batch()
        shorten(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def step(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Any:
        def call(*inputs: Any, **named: Any) -> Any:
            return functional_call(model, {**parameters, **buffers}, inputs, named)

        loss = workload.step_loss(call, batch)
        assert loss.shape == ()
        return torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)

    with mode:
        return make_fx(step)(parameters, buffers, batch)


@one_in(2)
@pytest.mark.parametrize("name", ["inception_v3", "vit_base", "transformer_6l", "bert_moe"])
def test_step_can_be_captured_and_uses_every_parameter(name: str) -> None:
    graph = capture(name).graph
    gradients = graph.output_node().args[0]
    assert isinstance(gradients, list | tuple)
    assert gradients
    assert None not in gradients


@pytest.mark.parametrize(
    ("name", "layers"), [("llama_1b", "model.layers"), ("gpt2", "transformer.h")]
)
def test_hub_attention_has_no_mask_tensor(name: str, layers: str) -> None:
    """In two of their layers, which are all alike."""

    def shorten(model: nn.Module) -> None:
        every = model.get_submodule(layers)
        assert isinstance(every, nn.ModuleList)
        del every[2:]

    nodes = capture(name, shorten).graph.nodes
    calls = [node for node in nodes if "attention" in str(node.target)]
    assert calls
    assert all(node.kwargs.get("attn_mask") is None for node in calls)


def test_xlnet_leaves_only_its_unused_streams_without_gradient() -> None:
    """In two of its layers, which are all alike."""

    def shorten(model: Any) -> None:
        del model.transformer.layer[2:]

    gradients = capture("xlnet_large_24l", shorten).graph.output_node().args[0]
    model = make_fake("xlnet_large_24l")
    shorten(model)
    names = [name for name, _ in model.named_parameters()]
    assert isinstance(gradients, list | tuple)
    unused = {n.split(".")[-1] for n, g in zip(names, gradients, strict=True) if g is None}
    assert unused == {"mask_emb", "seg_embed", "r_s_bias"}


def test_a_model_that_needs_transformers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(HeterogError, match=r"'gpt2' needs .*pip install 'heterog\[zoo\]'"):
        registry.build("gpt2")


@pytest.mark.parametrize("name", ["bert_base", "xlnet_large_24l", "gpt2", "llama_1b"])
def test_hub_models_tie_their_output_to_the_embedding(name: str) -> None:
    model: Any = make_fake(name)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_transformer_has_one_parameter_of_vocabulary_size() -> None:
    sizes = [p.shape for p in make_fake("transformer_6l").parameters()]
    assert [tuple(s) for s in sizes if 50_000 in s] == [(50_000, 512)]


@pytest.mark.parametrize("make", [lambda: ResNet((1, 1, 1, 1)), MobileNetV2])
def test_a_small_image_network_learns_two_images(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    images, labels = torch.rand(2, 3, 64, 64), torch.tensor([3, 900])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_token_cross_entropy_ignores_positions() -> None:
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[1, -100, 4], [-100, -100, 0]])
    log_p = logits.log_softmax(-1)
    expected = -(log_p[0, 0, 1] + log_p[0, 2, 4] + log_p[1, 2, 0]) / 3
    torch.testing.assert_close(token_cross_entropy(logits, labels), expected)


def test_sinusoids_by_hand() -> None:
    codes = sinusoids(3, 4)
    angle = torch.tensor([2.0, 2.0 / 100])
    expected = torch.stack([angle.sin(), angle.cos()], dim=1).flatten()
    torch.testing.assert_close(codes[2], expected)


def test_transformer_decoder_sees_no_later_target_token() -> None:
    torch.manual_seed(0)
    model = Transformer(1)
    source, target = torch.randint(50_000, (2, 1, 32))
    changed = target.clone()
    changed[0, 20:] = 7
    with torch.no_grad():
        one, other = model(source, target), model(source, changed)
    torch.testing.assert_close(one[:, :20], other[:, :20])
    assert not torch.allclose(one[:, 20:], other[:, 20:])


def small_moe() -> BertMoe:
    torch.manual_seed(0)
    return BertMoe(width=16, num_layers=4, num_heads=2, num_experts=4, vocabulary=50).double()


def test_moe_split_batch_gives_the_same_outputs_and_loss() -> None:
    model = small_moe()
    ids, labels = torch.randint(50, (2, 6, 12))
    whole: MoeOutput = model(ids)
    parts: list[MoeOutput] = [model(ids[:2]), model(ids[2:])]
    torch.testing.assert_close(torch.cat([p.logits for p in parts]), whole.logits)
    torch.testing.assert_close(torch.cat([p.balance for p in parts]), whole.balance)
    split_loss = 2 * moe_loss(parts[0], labels[:2]) + 4 * moe_loss(parts[1], labels[2:])
    torch.testing.assert_close(split_loss, 6 * moe_loss(whole, labels))


def moe_by_loops(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """One sequence ``[tokens, width]`` through the experts, one token after the other."""
    num_experts = layer.num_experts
    capacity = -(-2 * len(x) // num_experts)
    gates = layer.gate(x).softmax(-1)
    choices = gates.topk(2).indices.tolist()
    queue = [0] * num_experts
    out = torch.zeros_like(x)
    for choice in (0, 1):
        for token, experts in enumerate(choices):
            expert = experts[choice]
            queue[expert] += 1
            if queue[expert] > capacity:
                continue
            hidden = x[token] @ layer.weight_in[expert] + layer.bias_in[expert, 0, 0]
            result = nn.functional.gelu(hidden) @ layer.weight_out[expert]
            weight = gates[token, expert] / gates[token, experts].sum()
            out[token] += weight * (result + layer.bias_out[expert, 0, 0])
    return out


def test_moe_equals_token_by_token_dispatch_with_dropped_tokens() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 16, 4).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 10, 8, dtype=torch.float64)
    out, balance = layer(x)
    torch.testing.assert_close(out, torch.stack([moe_by_loops(layer, s) for s in x]))
    gates = layer.gate(x).softmax(-1)
    first = nn.functional.one_hot(gates.argmax(-1), 4).double()
    torch.testing.assert_close(balance, 4 * (first.mean(1) * gates.mean(1)).sum(-1))


def test_moe_gate_and_experts_get_gradients() -> None:
    model = small_moe()
    ids, labels = torch.randint(50, (2, 4, 12))
    torch.autograd.backward(moe_loss(model(ids), labels))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
