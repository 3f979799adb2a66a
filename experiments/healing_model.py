"""The workload that the experiments about healing train, copied beside the plan."""

import torch
from torch import nn

import heterog


def workload(batch_size: int = 24) -> heterog.Workload:
    """A perceptron on random numbers."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)
        )

    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(batch_size, 64, generator=generator),
        torch.randn(batch_size, 16, generator=generator),
    )
    return heterog.Workload(model, batch, nn.functional.mse_loss, torch.optim.Adam, {"lr": 1e-4})
