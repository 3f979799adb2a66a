"""Workloads, their single-device reference, and what a rank does with a plan."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Workload
from heterog.planners.plan import load_plan
from heterog.runtime.deploy import deploy
from heterog.strategy.lowering import lower
from heterog.strategy.program import TaskKind

BATCH = 8
STEPS = 3


class TinyLanguageModel(nn.Module):
    """Tied embedding, positions, one causal transformer layer."""

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


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels.flatten())


MODELS: dict[str, Any] = {
    "mlp": (mlp, functional.mse_loss),
    "language": (TinyLanguageModel, token_loss),
    "residual": (Residual, functional.cross_entropy),
}
NORMALISED = {"normalised": (Normalised, functional.cross_entropy)}


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    if name == "mlp":
        return (
            torch.randn(BATCH, 6, generator=generator),
            torch.randn(BATCH, 4, generator=generator),
        )
    if name in ("residual", "normalised"):
        dtype = torch.float64 if name == "normalised" else torch.float32
        return (
            torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=dtype),
            torch.randint(0, 5, (BATCH,), generator=generator),
        )
    tokens = torch.randint(0, 13, (BATCH, 5), generator=generator)
    labels = torch.randint(0, 13, (BATCH, 5), generator=generator)
    labels[:3, 1:] = -100  # unevenly over the samples
    return tokens, labels


def workload_of(name: str, optimizer: str = "SGD") -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        made = (MODELS | NORMALISED)[name][0]()
        assert isinstance(made, nn.Module)
        return made

    options = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}[optimizer]
    return Workload(
        seeded,
        batch_of(name, 0),
        (MODELS | NORMALISED)[name][1],
        getattr(torch.optim, optimizer),
        options,
        name=name,
    )


def reference(name: str, optimizer: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights on one device."""
    workload = workload_of(name, optimizer)
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    for step in range(STEPS):
        loss = workload.step_loss(model, batch_of(name, step))
        stepper.zero_grad()
        torch.autograd.backward(loss)
        stepper.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def reference_with_local_statistics(
    name: str, shares: tuple[int, ...]
) -> tuple[list[float], dict[str, Tensor]]:
    """One device that normalises each replica's samples on their own; buffers of replica 0."""
    workload = workload_of(name)
    model = workload.make_model()
    parameters = dict(model.named_parameters())
    buffers = [{k: v.clone() for k, v in model.named_buffers()} for _ in shares]
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
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
        stepper.step()
        losses.append(total)
    return losses, {**{k: v.detach() for k, v in parameters.items()}, **buffers[0]}


def train(
    rank: int, name: str, optimizer: str, plan_path: str
) -> tuple[list[float], dict[str, Tensor] | None]:
    """What every rank does: deploy the plan and train."""
    step = deploy(workload_of(name, optimizer), load_plan(plan_path))
    losses = [float(step(batch_of(name, number))) for number in range(STEPS)]
    return losses, step.state_dict()


def count_tasks(rank: int, plan_path: str, kind: str) -> int:
    """How many tasks of a kind the program of a plan has."""
    plan = load_plan(plan_path)
    program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
    return int((program.kind == TaskKind[kind]).sum())


def train_without(
    rank: int, name: str, plan_path: str, kind: str
) -> tuple[list[float], dict[str, Tensor] | None] | None:
    """Train with all tasks of a kind left out on every rank; ``None`` if that cannot even run."""
    step = deploy(workload_of(name), load_plan(plan_path))
    executor = step._executor
    executor._tasks = [
        task for task in executor._tasks if executor.program.kind[task] != TaskKind[kind]
    ]
    try:
        losses = [float(step(batch_of(name, number))) for number in range(STEPS)]
    except (AssertionError, KeyError, IndexError, RuntimeError):
        # The ranks stay in step: each of them fails in its own first step or none does.
        return None
    return losses, step.state_dict()
