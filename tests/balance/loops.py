"""Training loops that run on rank processes and, without a balancer, on one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from heterog.balance.balancer import Balancer
from heterog.balance.shares import epoch_order
from heterog.balance.tokens import TokenBatches

FEATURES, CLASSES, LENGTH, WORDS = 6, 4, 5, 11
PADDING = -100


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is trained, and how.

    Attributes:
        wrapper: ``ddp``, ``fsdp`` or ``none``.
        shares: samples of each rank.
        num_samples: of the data set.
        tokens: the loss is a mean over labels that are no padding; else over samples.
        clip: the largest norm of gradients; 0 for any.
        accumulate: batches for each step of the optimizer.
        scaler: a gradient scaler that meets an infinite loss once.
        fits: samples that ranks hold at once, with micro-batches; empty for no limit.
        weigh: whether the loss is weighed, as it should be.
        interval: steps between measurements; 0 for none.
        dead_band: least predicted gain of a change.
        padded: whether samples of unequal lengths are padded; ``None``: all are alike.
    """

    wrapper: str
    shares: tuple[int, ...]
    num_samples: int = 40
    tokens: bool = False
    clip: float = 0.0
    accumulate: int = 1
    scaler: bool = False
    fits: tuple[int | None, ...] = ()
    weigh: bool = True
    interval: int = 0
    dead_band: float = 0.03
    padded: bool | None = None

    def lengths(self) -> list[int] | None:
        if self.padded is None:
            return None
        return [1 + index * 7 % 5 for index in range(self.num_samples)]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random data; with tokens, labels of which some samples have few and some none."""

    def __init__(self, loop: Loop) -> None:
        random = torch.Generator().manual_seed(1)
        count = loop.num_samples
        if loop.tokens:
            self.inputs = torch.randint(0, WORDS, (count, LENGTH), generator=random)
            self.targets = torch.randint(0, CLASSES, (count, LENGTH), generator=random)
            lengths = torch.randint(0, LENGTH + 1, (count, 1), generator=random)
            self.targets[torch.arange(LENGTH) >= lengths] = PADDING
        else:
            self.inputs = torch.randn(count, FEATURES, generator=random, dtype=torch.float64)
            self.targets = torch.randint(0, CLASSES, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def make_model(loop: Loop) -> nn.Module:
    torch.manual_seed(0)
    if loop.tokens:
        first: nn.Module = nn.Embedding(WORDS, 8)
    else:
        first = nn.Linear(FEATURES, 8)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, CLASSES)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss: Tensor = functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    return loss


def labels_that_count(batch: Any) -> Tensor:
    count: Tensor = (batch[1] != PADDING).sum()
    return count


def weights_of(model: nn.Module) -> list[float]:
    numbers: list[float] = []
    for parameter in model.parameters():
        data = parameter.data
        whole = data.full_tensor() if isinstance(data, DTensor) else data
        numbers += whole.flatten().tolist()
    return numbers


def update(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> float:
    """Clip, step and clear; the norm before clipping."""
    norm = 0.0
    if scaler is not None:
        scaler.unscale_(optimizer)
    if loop.clip:
        total = nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return norm


def make_scaler(loop: Loop) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0) if loop.scaler else None


Trained = tuple[list[float], list[float], list[float]]
"""Weights, losses and norms."""


def alone(loop: Loop, epochs: int = 2) -> Trained:
    """One process with the whole batch, and nothing of ours."""
    data, size = Samples(loop), sum(loop.shares)
    model = make_model(loop)
    optimizer, scaler = make_optimizer(model), make_scaler(loop)
    losses, norms = [], []
    for epoch in range(epochs):
        for step, chosen in enumerate(_global_batches(loop, size, epoch)):
            loss = loss_of(model, (data.inputs[chosen], data.targets[chosen]))
            losses.append(loss.item())
            loss = loss / loop.accumulate
            if scaler is not None:
                loss = scaler.scale(loss * (float("inf") if step == 1 else 1.0))
            torch.autograd.backward(loss)
            if (step + 1) % loop.accumulate == 0:
                norms.append(update(loop, model, optimizer, scaler))
    return weights_of(model), losses, norms


def _global_batches(loop: Loop, size: int, epoch: int) -> Iterator[Tensor]:
    lengths = loop.lengths()
    if lengths is None:
        order = torch.from_numpy(epoch_order(loop.num_samples, 0, epoch, shuffle=True))
        yield from torch.split(order, size)
    else:
        batches = TokenBatches(lengths, size, seed=0, shuffle=True, drop_last=False)
        for step in range(batches.num_steps(epoch)):
            yield torch.from_numpy(batches.batch(epoch, step))


def on_ranks(rank: int, loop: Loop, epochs: int = 2) -> Trained:
    """The same in a job of ranks."""
    model = make_model(loop)
    wrapped: nn.Module = model
    if loop.wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    elif loop.wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[2], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
    optimizer, scaler = make_optimizer(wrapped), make_scaler(loop)
    balancer = Balancer(
        wrapped,
        global_batch_size=sum(loop.shares),
        shares=loop.shares,
        fits=loop.fits or None,
        micro_batches=bool(loop.fits),
        interval=loop.interval,
        dead_band=loop.dead_band,
    )
    loader = balancer.loader(Samples(loop), lengths=loop.lengths(), padded=bool(loop.padded))
    losses, norms = [], []
    for _ in range(epochs):
        for step, batch in enumerate(loader):
            for part, count in _parts(balancer, loop, batch):
                loss = loss_of(wrapped, part)
                loss = balancer.weigh(loss, count) if loop.weigh else loss
                loss = loss / loop.accumulate
                if scaler is not None:
                    infinite = step == 1 and rank == 1
                    loss = scaler.scale(loss * (float("inf") if infinite else 1.0))
                torch.autograd.backward(loss)
            losses.append(balancer.mean_loss())
            if (step + 1) % loop.accumulate == 0:
                if loop.wrapper == "none":
                    balancer.average_gradients()
                norms.append(update(loop, wrapped, optimizer, scaler))
    return weights_of(wrapped), losses, norms


def _parts(balancer: Balancer, loop: Loop, batch: Any) -> Iterator[tuple[Any, Any]]:
    if loop.fits:
        count = labels_that_count if loop.tokens else None
        yield from ((part, None) for part in balancer.parts(batch, count))
    else:
        yield batch, labels_that_count(batch) if loop.tokens else None
