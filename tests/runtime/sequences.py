"""Small language models whose sequences are cut, and what a rank does with them."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from tests.runtime.cases import STEPS, Trained, captured_once
from tests.runtime.llama import TinyLlama

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 2, 13, 20


class Gpt(nn.Module):
    """Learned positions and two causal layers.

    Args:
        attend: maps queries, keys and values to what is mixed.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block(attend) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out.flatten(0, 1)


class _Block(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        fused = self.fused(self.first_norm(x)).view(batch, length, 3, HEADS, -1)
        mixed = self.attend(*fused.permute(2, 0, 3, 1, 4))
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        out: Tensor = x + self.feed_forward(self.second_norm(x))
        return out


def by_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention as it is written out: scores, a mask, a softmax."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights @ value


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels.flatten())


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}


def of_transformers(name: str) -> nn.Module:
    """A small model of the package ``transformers``, which makes its own loss of ``labels``."""
    hub: Any = importlib.import_module("transformers")
    if name == "llama":
        config = hub.LlamaConfig(**_SMALL, num_key_value_heads=2, use_cache=False)
        model = hub.LlamaForCausalLM(config)
    elif name == "mistral":  # each position sees the three before it
        config = hub.MistralConfig(
            **_SMALL, num_key_value_heads=2, use_cache=False, sliding_window=4
        )
        model = hub.MistralForCausalLM(config)
    elif name == "bert":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = hub.BertForMaskedLM(hub.BertConfig(**_SMALL, **off, attn_implementation="eager"))
    else:
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        shape = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
        model = hub.GPT2LMHeadModel(hub.GPT2Config(**shape, **off))
    assert isinstance(model, nn.Module)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(Gpt, partial(functional.scaled_dot_product_attention, is_causal=True)),
    "gpt of products": partial(Gpt, by_products),
    "encoder": partial(Gpt, functional.scaled_dot_product_attention),
    "tiny llama": TinyLlama,
    **{f"{name} of transformers": partial(of_transformers, name) for name in ("llama", "mistral",
                                                                             "bert", "gpt2")},
}  # fmt: skip


def batch_of(name: str, batch_size: int, step: int) -> Any:
    random = torch.Generator().manual_seed(100 + step)
    tokens, labels = torch.randint(0, VOCABULARY, (2, batch_size, LENGTH), generator=random)
    labels[:, 3] = -100  # does not count
    if "transformers" in name:
        return {"input_ids": tokens, "labels": labels}
    return tokens, labels


def workload_of(name: str, batch_size: int) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name]().double()

    loss = None if "transformers" in name else token_loss
    return Workload(
        seeded, batch_of(name, batch_size, 0), loss, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9},
        name=name.replace(" ", "_"),
    )  # fmt: skip


def trained_alone(name: str, batch_size: int) -> Trained:
    """The same steps on one device."""
    workload = workload_of(name, batch_size)
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    gradients: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        stepper.zero_grad()
        loss = workload.step_loss(model, batch_of(name, batch_size, step))
        torch.autograd.backward(loss)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(key, []).append(parameter.grad.clone())
        stepper.step()
        losses.append(float(loss.detach()))
    return Trained(losses, gradients, dict(model.state_dict()))


def train(rank: int, name: str, batch_size: int, plan_path: str) -> Trained:
    """What every rank does."""
    with captured_once((name, batch_size)):
        step = deploy(workload_of(name, batch_size), load_plan(plan_path))
    gradients: dict[str, list[Tensor]] = {}

    def keep(*_: object) -> None:
        for key, parameter in step.model.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(key, []).append(parameter.grad.clone())

    step.optimizer.register_step_pre_hook(keep)
    losses = [float(step(batch_of(name, batch_size, number))) for number in range(STEPS)]
    return Trained(losses, gradients, step.state_dict())
