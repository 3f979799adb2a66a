"""Trains a small network with DistributedDataParallel and goes on when hosts are lost."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import heterog
from heterog.healing.loop import HealingLoop

EPOCHS = int(os.environ.get("EPOCHS", "4"))
BATCH = 96  # of all ranks together


def main() -> None:
    """Train and validate."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1000, 3, 64, 64), torch.randint(0, 10, (1000,)))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    model = DistributedDataParallel(model)
    balancer = heterog.Balancer(model, global_batch_size=BATCH)
    loader = balancer.loader(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    healing = HealingLoop(model, optimizer, balancer)
    if healing.restore() and dist.get_rank() == 0:
        print(f"on from {healing.resumed_from}", flush=True)
    sampler = balancer.share_sampler
    while sampler.epoch < EPOCHS:
        epoch, begin = sampler.epoch, time.perf_counter()
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            balancer.weigh(loss).backward()
            optimizer.step()
            healing.end_step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} {time.perf_counter() - begin:.3f} s", flush=True)
    healing.close()
    with torch.no_grad():
        inputs, targets = data[:200]
        loss = nn.functional.cross_entropy(model(inputs), targets)
    if dist.get_rank() == 0:
        print(f"validation loss {loss.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
