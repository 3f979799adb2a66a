"""Trains a small convolutional network with Lightning."""

import os
import time
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from heterog.balance.for_lightning import LightningBalancer

EPOCHS = int(os.environ.get("EPOCHS", "4"))
BATCH = 96  # of all ranks together
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Net(LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As everywhere."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_epoch_start(self) -> None:
        """An epoch begins."""
        self.begin = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        """Print how long it took."""
        if self.global_rank == 0:
            seconds = time.perf_counter() - self.begin
            print(f"epoch {self.current_epoch} {seconds:.3f} s", flush=True)


def main() -> None:
    """Train and validate."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1000, 3, 64, 64), torch.randint(0, 10, (1000,)))
    model = Net()
    balancer = LightningBalancer(global_batch_size=BATCH)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[balancer], use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, balancer.loader(data))
    with torch.no_grad():
        inputs, targets = data[:200]
        loss = nn.functional.cross_entropy(model.layers(inputs), targets)
    if trainer.is_global_zero:
        print(f"validation loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
