"""Trains a small convolutional network with Hugging Face Accelerate."""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

from heterog.balance.for_accelerate import AcceleratedBalancer

EPOCHS = int(os.environ.get("EPOCHS", "4"))
BATCH = 96  # of all ranks together


def main() -> None:
    """Train and validate."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1000, 3, 64, 64), torch.randint(0, 10, (1000,)))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    balancer = AcceleratedBalancer(accelerator, global_batch_size=BATCH)
    loader = balancer.loader(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        begin = time.perf_counter()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(balancer.weigh(loss))
            optimizer.step()
        if accelerator.is_main_process:
            print(f"epoch {epoch} {time.perf_counter() - begin:.3f} s", flush=True)
    with torch.no_grad():
        inputs, targets = data[:200]
        loss = nn.functional.cross_entropy(model(inputs), targets)
    if accelerator.is_main_process:
        print(f"validation loss {loss.item():.6f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
