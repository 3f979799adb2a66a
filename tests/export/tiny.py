"""A model, a loss and batches in torch alone: what an exported folder trains in the tests."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 8
Batch = tuple[Tensor, Tensor]


class Tiny(nn.Module):
    """A small language model with a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)
        self.decoder = nn.Linear(8, 13, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.outer(functional.gelu(self.inner(self.norm(x))))
        logits: Tensor = self.decoder(x)
        return logits.flatten(0, 1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Tiny()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels.flatten())


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    return criterion(model(tokens), labels)


def global_batch(step: int) -> Batch:
    """A batch whose ignored labels lie unevenly over the samples."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 13, (BATCH, 5), generator=generator)
    labels = torch.randint(0, 13, (BATCH, 5), generator=generator)
    labels[:2, 1:] = -100
    if step == 1:
        labels[5:] = -100  # all of a rank that has the last three
    return tokens, labels


def reference(num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights on one device."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, global_batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()
