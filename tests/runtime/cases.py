"""Workloads, their single-device reference, and what a rank does with a plan."""

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR

from heterog.errors import StrategyError
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.local_losses import local_blocks
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.step.alike import Signature, signature
from heterog.runtime.step.executor import StepExecutor
from heterog.search.plan import load_plan
from heterog.zoo.moe import MixtureOfExperts
from tests.runtime.llama import TinyLlama
from tests.runtime.translation import PADDING, TinyT5

BATCH = 8
STEPS = 3


class TinyLanguageModel(nn.Module):
    """Tied embedding, positions, two layers of a transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.position = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )
        self.decoder = nn.Linear(8, 13, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
        x = self.embedding(tokens) + self.position(places)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.decoder(x)
        return out.flatten(0, 1)


class Residual(nn.Module):
    """A small convolutional network with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = functional.max_pool2d(x + self.body(x), 2)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Normalised(nn.Module):
    """A VGG-like network with BatchNorm, in double precision: few samples a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(6, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


class NormalisedResidual(nn.Module):
    """A block of a ResNet with BatchNorm, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
            nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3),
        )  # fmt: skip
        self.head = nn.Linear(3, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x + self.body(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class FrozenNorms(NormalisedResidual):
    """The same as it is finetuned: BatchNorm keeps the statistics that it has learned before."""

    def __init__(self) -> None:
        super().__init__()
        for each in (self.body[1], self.body[4]):
            each.eval().get_buffer("running_mean").add_(torch.arange(3) / 8)


class TinyGpt(nn.Module):
    """Two causal layers, norms first, as in GPT-2."""

    def __init__(self, dropout: float = 0.0, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.position = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.blocks = nn.ModuleList(_GptBlock(dropout, heads) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out.flatten(0, 1)


class TiedGpt(TinyGpt):
    """One whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class _GptBlock(nn.Module):
    def __init__(self, dropout: float, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query_key_value, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.feed_forward = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        fused = self.query_key_value(self.first_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, 8)))
        out: Tensor = x + self.dropout(self.feed_forward(self.second_norm(x)))
        return out


class TinyMoe(nn.Module):
    """Tokens through a mixture of experts: capacity and balance loss of each sequence alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.experts = MixtureOfExperts(8, 16, 4)
        # The zoo's own start is so small that no gradient is far from rounding.
        nn.init.normal_(self.experts.weight_in, std=0.3)
        nn.init.normal_(self.experts.weight_out, std=0.3)
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        change, balance = self.experts(x)
        return self.head(x + change).flatten(0, 1), balance


def moe_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return token_loss(output[0], labels) + 0.1 * output[1].mean()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


class Gathered(nn.Module):
    """Each sample sees those before it: an op that needs the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x).cumsum(0)))
        return out


class AddedWeights(nn.Module):
    """Weights that are added, so that one value is the gradient of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, 4) / 4) for _ in range(2))
        self.third = nn.Parameter(torch.randn(4, 6) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.first + self.second + self.third.mT)


class OwnLoss(nn.Module):
    """A causal language model that shifts its labels and computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyGpt()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens).view(*tokens.shape, 13)
        shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), shifted.reshape(-1))


class MaskedTarget(OwnLoss):
    """Labels that a mask takes out, made of a constant pattern and of the tokens."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        pattern = torch.where(torch.arange(tokens.shape[1]) % 2 == 0, 1, 0)
        kept = (tokens > 3) & (pattern.expand_as(tokens) == 1)
        target = torch.where(kept, labels, torch.full_like(labels, -100))
        return functional.cross_entropy(self.model(tokens), target.reshape(-1))


class Contrastive(OwnLoss):
    """Each sample is to find its own second half among all: the target is an ``arange``."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        states = self.model(tokens).view(*tokens.shape, 13).tanh()
        first, second = states[:, 0], states[:, -1]
        return functional.cross_entropy(first @ second.T, torch.arange(len(tokens)))


class PseudoLabels(OwnLoss):
    """The model's own best guesses are the labels: nobody knows before the step which count."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens)
        guess = logits.detach().argmax(-1)
        return functional.cross_entropy(logits, torch.where(guess > 6, guess, -100))


class WeightedLabels(OwnLoss):
    """Class weights that are computed; the loss without gradient scales another one."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens)
        weight = torch.linspace(0.5, 2.0, 13) ** 2
        loss = functional.cross_entropy(logits, labels.flatten(), weight)
        scale = functional.cross_entropy(logits.detach(), labels.flatten())
        return loss * scale + functional.cross_entropy(logits, labels.flatten(), reduction="sum")


class SmoothedLabels(OwnLoss):
    """A part of the loss goes to all words; one of them is ignored, besides padding."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        labels = labels.flatten().clamp(min=3)
        weight = torch.linspace(0.5, 2.0, 13)
        logits = self.model(tokens)
        smooth = functional.cross_entropy(logits, labels, ignore_index=3, label_smoothing=0.1)
        return smooth + functional.cross_entropy(logits, labels, weight, ignore_index=3)


class Penalty(OwnLoss):
    """A penalty on the weights and numbers beside the loss: they count once on all devices."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        penalty = torch.stack([each.square().sum() for each in self.model.parameters()]).sum()
        loss = functional.cross_entropy(self.model(tokens), labels.flatten())
        return 1.5 - (0.5 - loss) + 0.25 + 0.01 * penalty


class Scheduled(OwnLoss):
    """A weight that follows the number of the step, which is an input of it."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, step: Tensor, labels: Tensor
    ) -> Tensor:
        logits: Tensor = self.model(tokens)
        weight = torch.where(step < 1, 0.0, 0.1 * step)
        return functional.cross_entropy(logits, labels.flatten()) + weight * logits.square().mean()


class RepeatedEncodings(nn.Module):
    """Encodings of positions, repeated for every sample before they are projected, as in XLNet."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.project = nn.Linear(6, 6, bias=False)
        self.decoder = nn.Linear(6, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        places = torch.arange(length)[:, None] * torch.linspace(0.1, 1.0, 6)
        repeated = places.sin().expand(batch, length, 6).reshape(batch * length, 6)
        x = self.embedding(tokens) * self.project(repeated).view(batch, length, 6)
        out: Tensor = self.decoder(x)
        return out.flatten(0, 1)


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels.flatten())


def summed_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy by sums over the words, which a team that shares them adds up."""
    exponentials = (logits - 1.0).exp()
    is_wanted = labels.flatten().unsqueeze(-1) == torch.arange(logits.shape[-1])
    return (exponentials.sum(-1).log() + 1.0 - (logits * is_wanted).sum(-1)).mean()


def chosen_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy written by hand: the labels' logarithms are chosen among all words."""
    logarithms = logits.log_softmax(-1)
    return -logarithms.gather(-1, labels.flatten().clamp(min=0).unsqueeze(-1)).mean()


def in_blocks() -> nn.Module:
    """Three blocks of a perceptron that train by losses of their own."""
    layers = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    net = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
    return local_blocks(
        net, ["0", "1"], head=lambda name: nn.Linear(8, 4), loss=functional.mse_loss
    )


MODELS: dict[str, Any] = {
    "mlp": (mlp, functional.mse_loss),
    "language": (TinyLanguageModel, token_loss),
    "residual": (Residual, functional.cross_entropy),
    "gpt": (TinyGpt, token_loss),
    "moe": (TinyMoe, moe_loss),
}
NORMALISED: dict[str, Any] = {
    "normalised": (Normalised, functional.cross_entropy),
    "normalised residual": (NormalisedResidual, functional.cross_entropy),
}
FROZEN: dict[str, Any] = {"frozen norms": (FrozenNorms, functional.cross_entropy)}
GATHERED: dict[str, Any] = {"gathered": (Gathered, functional.mse_loss)}
ADDED: dict[str, Any] = {"added weights": (AddedWeights, functional.mse_loss)}
OWN_LOSS: dict[str, Any] = {
    "own loss": (OwnLoss, None),
    "masked target": (MaskedTarget, None),
    "contrastive": (Contrastive, None),
    "pseudo-labels": (PseudoLabels, None),
    "weighted labels": (WeightedLabels, None),
    "smoothed labels": (SmoothedLabels, None),
    "penalty": (Penalty, None),
    "scheduled": (Scheduled, None),
}
LOCAL: dict[str, Any] = {"local blocks": (in_blocks, None)}
TIED: dict[str, Any] = {
    "tied": (TiedGpt, summed_token_loss),
    "tied, chosen": (TiedGpt, chosen_token_loss),
}
TRANSLATION: dict[str, Any] = {"translation": (TinyT5, token_loss)}
LLAMA: dict[str, Any] = {
    "llama": (TinyLlama, token_loss),
    "as many heads as samples": (partial(TinyGpt, heads=8), token_loss),
}
ENCODED: dict[str, Any] = {"encodings": (RepeatedEncodings, token_loss)}
MORE = TIED | TRANSLATION | LLAMA | ENCODED | FROZEN | GATHERED | ADDED
EVERY = MODELS | NORMALISED | OWN_LOSS | LOCAL | MORE
IMAGES = ("residual", *NORMALISED, *FROZEN)


class Trained(NamedTuple):
    """What came out of some steps.

    Attributes:
        losses: of the steps.
        gradients: of every step by name.
        weights: at the end, on rank 0.
        shapes: of the parameters as this rank holds them.
    """

    losses: list[float]
    gradients: dict[str, list[Tensor]]
    weights: dict[str, Tensor] | None
    shapes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train, on one device or on many.

    Attributes:
        optimizer: name of the ``torch.optim`` class.
        max_grad_norm: clip to this norm.
        decay: the learning rate is multiplied by it after every step.
    """

    optimizer: str = "SGD"
    max_grad_norm: float | None = None
    decay: float | None = None

    def scheduler(self, optimizer: torch.optim.Optimizer) -> ExponentialLR | None:
        return None if self.decay is None else ExponentialLR(optimizer, self.decay)


SGD = Recipe()


def batch_of(name: str, step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(100 + step)
    if name in ("mlp", *GATHERED, *ADDED, *LOCAL):
        return (
            torch.randn(BATCH, 6, generator=generator),
            torch.randn(BATCH, 4, generator=generator),
        )
    if name in IMAGES:
        dtype = torch.float32 if name == "residual" else torch.float64
        return (
            torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=dtype),
            torch.randint(0, 5, (BATCH,), generator=generator),
        )
    tokens = torch.randint(0, 13, (BATCH, 5), generator=generator)
    labels = torch.randint(0, 13, (BATCH, 5), generator=generator)
    labels[:3, 1:] = -100  # unevenly over the samples
    if name in TRANSLATION:
        source = torch.randint(0, 13, (BATCH, 4), generator=generator)
        source[2:5, 2:] = PADDING
        return source, tokens, labels
    if name == "scheduled":
        return tokens, torch.tensor(step), labels
    return tokens, labels


def workload_of(name: str, optimizer: str = "SGD") -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        made = EVERY[name][0]()
        assert isinstance(made, nn.Module)
        return made

    options = {
        "SGD": {"lr": 0.1, "momentum": 0.9},
        "AdamW": {"lr": 1e-3},
        "Adafactor": {"lr": 1e-2},
    }[optimizer]
    return Workload(
        seeded,
        batch_of(name, 0),
        EVERY[name][1],
        getattr(torch.optim, optimizer),
        options,
        name=name,
    )


@cache
def reference(name: str, recipe: Recipe = SGD) -> Trained:
    """The same steps on one device."""
    return trained_by(workload_of(name, recipe.optimizer).make_model(), name, recipe)


def trained_by(model: nn.Module, name: str, recipe: Recipe) -> Trained:
    """What comes of a model on one device."""
    workload = workload_of(name, recipe.optimizer)
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    scheduler = recipe.scheduler(stepper)
    losses = []
    gradients: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        loss = workload.step_loss(model, batch_of(name, step))
        stepper.zero_grad()
        torch.autograd.backward(loss)
        if recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        _record(gradients, model)
        stepper.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return Trained(losses, gradients, model.state_dict())


def _record(gradients: dict[str, list[Tensor]], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients.setdefault(name, []).append(parameter.grad.clone())


def _record_slices(gradients: dict[str, list[Tensor]], step: DeployedStep) -> None:
    """What this rank knows of gradients under ZeRO, the rest NaN."""
    graph = step.captured.graph
    for number, own in step.part.slices.own.items():
        if own.grad is None:
            continue
        begin = 0
        for row, first, last in step.part.slices.buckets[number].pieces(step.rank):
            meta = graph.tensors[graph.updates[row][1]]
            seen = torch.full((meta.num_elements,), math.nan, dtype=own.dtype)
            seen[first:last] = own.grad[begin : begin + last - first]
            begin += last - first
            gradients.setdefault(meta.name, []).append(seen.view(meta.shape))


def reference_with_local_statistics(name: str, shares: tuple[int, ...]) -> Trained:
    """One device that normalises each replica's samples on their own; buffers of replica 0."""
    workload = workload_of(name)
    model = workload.make_model()
    parameters = dict(model.named_parameters())
    buffers = [{k: v.clone() for k, v in model.named_buffers()} for _ in shares]
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    gradients: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        x, y = batch_of(name, step)
        stepper.zero_grad()
        total = 0.0
        begin = 0
        for share, own in zip(shares, buffers, strict=True):
            if share:
                part = slice(begin, begin + share)
                output = torch.func.functional_call(model, {**parameters, **own}, (x[part],))
                loss = functional.cross_entropy(output, y[part], reduction="sum") / BATCH
                torch.autograd.backward(loss)
                total += float(loss.detach())
            begin += share
        _record(gradients, model)
        stepper.step()
        losses.append(total)
    weights = {**{k: v.detach() for k, v in parameters.items()}, **buffers[0]}
    return Trained(losses, gradients, weights)


_captured: dict[tuple[Hashable, Signature], CapturedStep] = {}


def captured_now(
    key: Hashable, workload: Workload, planned: OpGraph | None = None
) -> CapturedStep:
    """What is captured of a workload on its batch, or was before, maybe before a fork."""
    what = key, signature(workload.make_batch())
    if what not in _captured:
        _captured[what] = capture_step(workload, planned)
    return _captured[what]


def num_captured() -> int:
    """How many steps this process has captured, or had when it was forked."""
    return len(_captured)


def capture_case(workload: Workload, planned: OpGraph | None = None) -> CapturedStep:
    """Capture a workload; once for each of ``workload_of``, which ranks deploy again and again."""
    model = workload.model
    if (model.__module__, getattr(model, "__name__", "")) != (__name__, "seeded"):
        return capture_step(workload, planned)
    shaped = ("model", "example_batch", "loss")  # the name of a case and its batch stand for them
    names = [field.name for field in fields(workload) if field.name not in shaped]
    others = tuple(str(getattr(workload, name)) for name in names)
    return captured_now((workload.loss, others), workload, planned)


def _captures(function: Callable[..., CapturedStep]) -> "list[mock._patch[Any]]":
    """Patches with which deployed steps are captured by another function."""
    modules = ("heterog.runtime.deploy", "heterog.runtime.step.alike")
    return [mock.patch(f"{module}.capture_step", function) for module in modules]


def capture_cases_once() -> None:
    """Have this process, a rank, deploy cases with ``capture_case``."""
    for each in _captures(capture_case):
        each.start()


@contextmanager
def captured_once(key: Hashable) -> Iterator[None]:
    """A rank captures a workload on each shape once, which takes most of the time.

    Args:
        key: tells workloads apart.
    """

    def capture_once(workload: Workload, planned: OpGraph | None = None) -> CapturedStep:
        return captured_now(key, workload, planned)

    deployed_first, resized = _captures(capture_once)
    with deployed_first, resized:
        yield


def deployed(name: str, plan_path: str, recipe: Recipe = SGD) -> DeployedStep:
    """A deployed plan of a case."""
    workload = workload_of(name, recipe.optimizer)
    return deploy(workload, load_plan(plan_path), max_grad_norm=recipe.max_grad_norm)


def train(rank: int, name: str, recipe: Recipe, plan_path: str) -> Trained:
    """What every rank does: deploy the plan and train."""
    return run_steps(deployed(name, plan_path, recipe), name, recipe)


def train_sharded(rank: int, name: str, recipe: Recipe, plan_path: str) -> Trained:
    """Train; parameters may live in slices, so that only gradients of whole ones are kept."""
    step = deployed(name, plan_path, recipe)
    shapes = {key: tuple(value.shape) for key, value in step.model.named_parameters()}
    result = run_steps(step, name, recipe)
    whole = {
        key: tuple(value.shape) for key, value in workload_of(name).make_model().named_parameters()
    }
    gradients = {k: g for k, g in result.gradients.items() if shapes[k] == whole[k]}
    return Trained(result.losses, gradients, result.weights, shapes)


def run_steps(step: DeployedStep, name: str, recipe: Recipe = SGD) -> Trained:
    """Train, and look at the gradients that the optimizer gets."""
    gradients: dict[str, list[Tensor]] = {}
    model = step.model
    step.optimizer.register_step_pre_hook(lambda *_: _record(gradients, model))
    step.optimizer.register_step_pre_hook(lambda *_: _record_slices(gradients, step))
    scheduler = recipe.scheduler(step.optimizer)
    losses = []
    for number in range(STEPS):
        losses.append(float(step(batch_of(name, number))))
        if scheduler is not None:
            scheduler.step()
    return Trained(losses, gradients, step.state_dict())


def assert_same(
    results: list[Trained],
    wanted: Trained,
    *,
    rtol: float = 1e-4,
    loss_rtol: float = 1e-5,
    atol: float = 0.0,
    all_gradients: bool = True,
) -> None:
    """Losses, gradients and weights of all ranks are those of one device.

    Gradients are compared relative to the largest element of their tensor; one that is zero but
    for rounding, relative to all gradients together. So are weights, up to ``atol``.
    """
    seen = {
        name: torch.zeros(g[0].shape, dtype=torch.bool) for name, g in wanted.gradients.items()
    }
    for result in results:
        assert result.losses == pytest.approx(wanted.losses, rel=loss_rtol)
        for name, steps in result.gradients.items():
            assert len(steps) == STEPS, f"{name} was stepped {len(steps)} times"
            for step, gradient in enumerate(steps):
                target = wanted.gradients[name][step]
                every = torch.stack([g[step].norm() for g in wanted.gradients.values()]).norm()
                scale = max(float(target.abs().max()), float(every) * 1e-3)
                known = ~gradient.isnan()
                seen[name] |= known
                assert float((gradient - target)[known].abs().max()) <= rtol * scale, (name, step)
    if all_gradients:
        assert all(known.all() for known in seen.values())
    weights = results[0].weights
    assert weights is not None
    assert wanted.weights is not None
    assert set(weights) == set(wanted.weights)
    for name, target in wanted.weights.items():
        if target.is_floating_point():
            limit = atol or rtol * max(float(target.abs().max()), 1e-2)
            off = float((weights[name] - target).abs().max())
            assert off <= limit, f"{name}: off by {off:.3g}, allowed {limit:.3g}"
        else:
            assert torch.equal(weights[name], target), name


def refusal(rank: int, name: str, plan_path: str) -> str:
    """Why a plan cannot be deployed."""
    try:
        deployed(name, plan_path)
    except StrategyError as error:
        return str(error)
    return ""


def count_tasks(rank: int, plan_path: str, kind: str) -> int:
    """How many tasks of a kind the program of a plan has."""
    plan = load_plan(plan_path)
    program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
    return int((program.kind == TaskKind[kind]).sum())


def train_without(rank: int, name: str, plan_path: str, kind: str, only: int) -> Trained | None:
    """Train with tasks of a kind left out on every rank; ``None`` if that cannot even run.

    Args:
        rank: this rank.
        name: of the workload.
        plan_path: where the plan is.
        kind: of the tasks.
        only: which one of them, in program order; -1 for all.
    """
    step = deployed(name, plan_path)
    executor = step._executor
    tasks = [int(t) for t in range(executor.program.num_tasks) if _is_of(executor, t, kind)]
    left_out = set(tasks) if only < 0 else {tasks[only]}
    executor.turns = [turn for turn in executor.turns if turn.task not in left_out]
    try:
        return run_steps(step, name)
    except (AssertionError, KeyError, IndexError, RuntimeError, StrategyError):
        # The ranks stay in step: each of them fails in its own first step or none does.
        return None


def _is_of(executor: StepExecutor, task: int, kind: str) -> bool:
    return bool(executor.program.kind[task] == TaskKind[kind])
