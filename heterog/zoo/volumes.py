"""Networks on volumes: CosmoFlow and a 3D U-Net, whose samples may be too large for one device.

Oyama et al. trained both with samples cut along their depth (2020, "The Case for Strong Scaling in
Deep Learning: Training Large 3D CNNs With Hybrid Parallelism", arXiv 2007.12856); the networks are
those of the authors' LBANN repository. There is no dropout, so that a training step is
deterministic.

Where a batch or its samples are cut, ``nn.BatchNorm`` normalises each part by its own mean and
variance, as data-parallel training does. ``nn.SyncBatchNorm`` instead uses the statistics of the
whole batch, and so gives the numbers of one device. Each layer costs two small all-reduces forward
and two backward, and one more kept activation.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Batch, Workload
from heterog.zoo.registry import Builders

MOST_CHANNELS = 256
UNET_CHANNELS = ((32, 64), (64, 128), (128, 256), (256, 512))
NUM_LABELS = 3


def cosmoflow(batch_size: int, width: int) -> Workload:
    """CosmoFlow on cubes of any width.

    Args:
        batch_size: Number of volumes in the global batch.
        width: Width of the cubes; a power of two, 16 or more.
    """

    def example_batch() -> Batch:
        random = torch.Generator().manual_seed(0)
        cubes = torch.rand(batch_size, 1, width, width, width, generator=random)
        return cubes, torch.rand(batch_size, 4, generator=random)

    return Workload(
        model=lambda: CosmoFlow(width),
        example_batch=example_batch,
        loss=functional.mse_loss,
        optimizer=torch.optim.Adam,
        name=f"cosmoflow_{width}",
    )


def segmentation(
    batch_size: int, width: int, channels: tuple[tuple[int, int], ...] = UNET_CHANNELS
) -> Workload:
    """A 3D U-Net on cubes of any width, with any channels.

    Args:
        batch_size: Number of volumes in the global batch.
        width: Width of the cubes; halved once less than there are levels.
        channels: Channels of the two convolutions of each level, the last of them the bottom.
    """

    def example_batch() -> Batch:
        random = torch.Generator().manual_seed(0)
        shape = (batch_size, width, width, width)
        cubes = torch.rand(batch_size, 1, width, width, width, generator=random)
        return cubes, torch.randint(NUM_LABELS, shape, generator=random)

    return Workload(
        model=lambda: UNet3d(channels),
        example_batch=example_batch,
        loss=functional.cross_entropy,
        optimizer=torch.optim.Adam,
        name="unet3d",
    )


class CosmoFlow(nn.Module):
    """Convolutions of 3 x 3 x 3, each with a pooling that halves the cube; three linear layers.

    Cubes of every width end as 4 x 4 x 4; the four outputs are cosmological parameters.
    """

    def __init__(
        self, width: int, *, channels: int = 16, hidden: tuple[int, int] = (2048, 256)
    ) -> None:
        super().__init__()
        sizes = [1]
        while width > 4:
            sizes.append(min(channels, MOST_CHANNELS))
            channels, width = channels * 2, width // 2
        layers: list[nn.Module] = []
        for have, want in pairwise(sizes):
            layers += [
                nn.Conv3d(have, want, 3, padding=1),
                nn.LeakyReLU(0.3),
                nn.AvgPool3d(3, 2, padding=1),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(sizes[-1] * width**3, hidden[0]),
            nn.LeakyReLU(0.3),
            nn.Linear(hidden[0], hidden[1]),
            nn.LeakyReLU(0.3),
            nn.Linear(hidden[1], 4),
        )

    def forward(self, cubes: Tensor) -> Tensor:
        """Four numbers for each cube."""
        out: Tensor = self.head(self.features(cubes))
        return out


class UNet3d(nn.Module):
    """A 3D U-Net: levels joined by poolings, deconvolutions of stride 2 and concatenations.

    Args:
        channels: Channels of the two convolutions of each level, the last of them the bottom.
    """

    def __init__(self, channels: tuple[tuple[int, int], ...] = UNET_CHANNELS) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        have = 1
        for middle, want in channels:
            self.down.append(self._level(have, middle, want))
            have = want
        self.deconvolutions, self.up = nn.ModuleList(), nn.ModuleList()
        for _, want in reversed(channels[:-1]):
            self.deconvolutions.append(nn.ConvTranspose3d(have, have, 2, stride=2))
            self.up.append(self._level(have + want, want, want))
            have = want
        self.last = nn.Conv3d(have, NUM_LABELS, 1)

    def _level(self, have: int, middle: int, want: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in ((have, middle), (middle, want)):
            layers += [
                nn.Conv3d(before, after, 3, padding=1, bias=False),
                nn.BatchNorm3d(after),
                nn.ReLU(),
            ]
        return nn.Sequential(*layers)

    def forward(self, cubes: Tensor) -> Tensor:
        """Scores of the labels of each voxel."""
        kept = []
        x = cubes
        for number, level in enumerate(self.down):
            x = level(x if number == 0 else functional.max_pool3d(x, 2))
            kept.append(x)
        for deconvolution, level, skip in zip(
            self.deconvolutions, self.up, reversed(kept[:-1]), strict=True
        ):
            x = level(torch.cat([skip, deconvolution(x)], 1))
        out: Tensor = self.last(x)
        return out


WORKLOADS: Builders = {
    # Mathuriya et al. 2018, cubes of 128 and of 512 positions a side.
    "cosmoflow_128": lambda _, batch_size: cosmoflow(batch_size, 128),
    "cosmoflow_512": lambda _, batch_size: cosmoflow(batch_size, 512),
    # Cicek et al. 2016, cubes of 128, three labels.
    "unet3d": lambda _, batch_size: segmentation(batch_size, 128),
}
"""Makers of the workloads by name."""
