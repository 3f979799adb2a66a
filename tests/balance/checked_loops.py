"""A loop for each kind of step: ``python checked_loops.py KIND``, on ranks of a check.

Right loops train as one process does; wrong ones do not, and nothing but a run can tell: they
compute something from a rank's own samples where no graph and no weight shows it.
"""

import os
import random
import sqlite3
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

import heterog

SAMPLES, FEATURES, CLASSES, BATCH = 24, 6, 4, 8
LARGE = 64
"""Samples of a batch whose parts are nearly alike."""


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Random samples, drawn by the generator that scripts often leave unseeded, and noise."""

    def __init__(self, num_samples: int = SAMPLES, kind: str = "") -> None:
        self.x = torch.randn(num_samples, FEATURES)
        self.y = torch.randint(0, CLASSES, (num_samples,))
        self.kind, self.generator = kind, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.kind == "noise":
            x = x + torch.randn(FEATURES) * np.random.rand() * random.random()  # noqa: NPY002
        if self.kind == "own generator":
            x = x + self.generator.normal()
        return x, self.y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples, one after another."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = Data()
        return (data[index] for index in range(len(data)))


class Attention(nn.Module):
    """A part of the bias has no gradient but rounding: that of the keys; Adam would scale it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, dropout=0.3, batch_first=True)
        self.key, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, 2 * x, x.flip(1)], 1)
        seen = self.attention(rows, rows, rows)[0]
        fused = functional.scaled_dot_product_attention(seen, self.key(rows), rows, dropout_p=0.3)
        out: Tensor = self.out(fused.mean(1))
        return out


class Codebook(nn.Module):
    """A buffer that moves towards the samples, which no gradient reads."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("center", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.center.lerp_(x.mean(0), 0.1)
        out: Tensor = self.out(x)
        return out


class Level(nn.Module):
    """Divides its input by a moving average of its own samples' norm."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x / self.level)
        with torch.no_grad():
            self.level.lerp_(x.norm(dim=1).mean(), 0.5)
        return out


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), *layers, nn.Tanh(), nn.Linear(16, CLASSES))


entropy = functional.cross_entropy


def each(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample."""
    return entropy(model(x), y, reduction="none")


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return entropy(model(x), y)


def autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return entropy(model(x), y)


def advantages(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rewards = x[:, 0].detach()
    return (each(model, x, y) * (rewards - rewards.mean()) / (rewards.std() + 1e-6)).mean()


def weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    own = x[:, 0].exp()
    return (each(model, x, y) * own / own.sum() * len(own)).mean()


def mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(0.7 * x + 0.3 * x.flip(0))
    return 0.7 * entropy(logits, y) + 0.3 * entropy(logits, y.flip(0))


def factor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = each(model, x, y)
    return (losses * losses.detach().mean().sqrt()).mean()


def threshold(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = each(model, x, y)
    return (losses * (losses.detach() >= losses.detach().median())).mean()


def disguised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("n,n->", each(model, x, y), torch.full((len(x),), 1 / BATCH))


def pairs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    near = (-torch.cdist(logits, logits)).exp().sum(1).log()
    return entropy(logits, y) + near.mean()


def partners(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    logits = model(0.7 * x + 0.3 * x[order])
    return 0.7 * entropy(logits, y) + 0.3 * entropy(logits, y[order])


def noisy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    at = torch.randint(0, 10, (len(x), 1)) / 10
    return entropy(model(x + at * torch.randn_like(x)), y)


class Running:
    """Divides by a mean of losses so far, kept in Python."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = entropy(model(x), y)
        divided = loss / self.value
        self.value = 0.5 * self.value + 0.5 * loss.item()
        return divided


LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "advantages": advantages,
    "weights": weights,
    "mixup": mixup,
    "factor": factor,
    "threshold": threshold,
    "disguised sum": disguised,
    "pairs": pairs,
    "partners": partners,
    "noisy": noisy,
    "running": Running(),
    "running, large batches": Running(),
    "autocast": autocast,
    "level in 16 bits": autocast,
}
"""Of kinds whose loss is another one."""


def optimizer_of(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "momentum":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    if kind == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)
    return torch.optim.AdamW(parameters, lr=0.01)


def data_of(kind: str) -> Dataset[Any]:
    if kind == "ragged":
        return Data(BATCH - 3)
    if kind == "stream":
        return Stream()
    return Data(4 * LARGE if is_large(kind) else SAMPLES, kind)


def is_large(kind: str) -> bool:
    return kind.endswith(("large batches", "16 bits"))


def model_of(kind: str) -> nn.Module:
    if kind in ("attention", "autocast"):
        return Attention()
    if kind == "codebook":
        return Codebook()
    if kind.startswith("level"):
        return Level()
    layers = {"dropout": nn.Dropout(0.5), "batch norm": nn.BatchNorm1d(16)}
    return net(layers[kind]) if kind in layers else net()


def main() -> None:
    kind = sys.argv[1]
    dist.init_process_group("gloo")
    own = model_of(kind)
    if kind == "compiled":
        own = compiled(own)
    if kind == "resumes" and Path("last.pt").exists():
        own.load_state_dict(torch.load("last.pt"))
    model = DistributedDataParallel(own)
    options: dict[str, Any] = {"fits": 3, "micro_batches": True} if kind == "micro-batches" else {}
    balancer = heterog.Balancer(
        model, global_batch_size=LARGE if is_large(kind) else BATCH, **options
    )
    parameters = list(model.parameters())
    scale = nn.Parameter(torch.ones(CLASSES))
    if kind == "beside":
        parameters.append(scale)
    if kind == "hook":
        for parameter in parameters:
            hook: Any = parameter.register_hook
            hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    optimizer, loss_of = optimizer_of(kind, parameters), LOSSES.get(kind, plain)

    def backward(x: Tensor, y: Tensor) -> None:
        loss = entropy(model(x) * scale, y) if kind == "beside" else loss_of(model, x, y)
        weighed: Any = balancer.weigh(loss)
        weighed.backward()

    def closure(x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        backward(x, y)
        return balancer.mean_loss()

    if kind == "level in 16 bits":
        warnings.filterwarnings("ignore")
    if kind == "leaves":
        os._exit(0)
    while kind == "without a balancer":  # a check ends it
        optimizer.step()
    for _ in range(3):
        for batch in balancer.loader(data_of(kind)):
            if kind == "lbfgs":
                optimizer.step(partial(closure, *batch))
                continue
            if dist.get_rank() == 1:
                misbehave(kind)
            for part in balancer.parts(batch) if kind == "micro-batches" else [batch]:
                backward(*part)
            if kind == "clipping":
                nn.utils.clip_grad_norm_(parameters, 0.1)
            if kind != "no updates":
                optimizer.step()
            optimizer.zero_grad()
            save(kind, own)
            if kind == "ends":
                return


def compiled(model: nn.Module) -> nn.Module:
    """Compile by a call, and by a decorator."""
    decorate: Any = torch.compile(fullgraph=True)
    model.forward = decorate(model.forward)
    whole: Any = torch.compile(model, fullgraph=True)
    return whole  # type: ignore[no-any-return]


def save(kind: str, model: nn.Module) -> None:
    """Write files as loops do."""
    if dist.get_rank():
        return
    if kind in ("overwrites", "resumes"):
        torch.save(obj=model.state_dict(), f="last.pt")
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(model.state_dict(), "last.pt")
    if kind == "appends":
        with open("last.pt", "a") as file:
            file.write("a step")
    if kind == "moves":
        os.rename("last.pt", "old.pt")
    if kind == "sqlite":
        with sqlite3.connect("runs.db") as runs:
            runs.execute("create table if not exists runs (x)")


def misbehave(kind: str) -> None:
    if kind == "fails":
        raise ArithmeticError("no step\nat all")
    if kind == "exits":
        sys.exit("not today")
    if kind == "exits silently":
        sys.exit(4)
    if kind == "hangs":
        time.sleep(1000)


if __name__ == "__main__":
    main()
