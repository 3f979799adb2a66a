"""Workloads that run on testbeds of CPUs, and workloads for the calibration of testbeds.

Each is a function for ``heterog plan experiments/testbed_workloads.py:NAME``; weights and batches
are the same on every call. There is no dropout. Workloads for calibration are of the same families
in other sizes: none of their layers has the shape of a layer on which the calibration is tested.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import heterog


def _mlp(widths: Sequence[int], batch_size: int) -> heterog.Workload:
    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            layers += [nn.Linear(inner, outer), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch_size, widths[0], generator=draw)
    targets = torch.randn(batch_size, widths[-1], generator=draw)
    return _workload(model, (inputs, targets), functional.mse_loss)


def _vgg(widths: Sequence[int], size: int, classes: int, batch_size: int) -> heterog.Workload:
    def model() -> nn.Module:
        layers: list[nn.Module] = []
        channels = 3
        for width in widths:
            for _ in range(2):
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                ]
                channels = width
            layers.append(nn.MaxPool2d(2))
        side = size // 2 ** len(widths)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, classes))

    draw = torch.Generator().manual_seed(1)
    images = torch.randn(batch_size, 3, size, size, generator=draw)
    labels = torch.randint(0, classes, (batch_size,), generator=draw)
    return _workload(model, (images, labels), functional.cross_entropy)


class LanguageModel(nn.Module):
    """Transformer layers between a tied embedding and its decoder."""

    def __init__(self, vocabulary: int, width: int, heads: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position, ``[batch x tokens, vocabulary]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def _text(
    vocabulary: int, width: int, heads: int, num_layers: int, length: int, batch_size: int
) -> heterog.Workload:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (batch_size, length), generator=draw)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels.flatten())

    return _workload(
        lambda: LanguageModel(vocabulary, width, heads, num_layers),
        (tokens, tokens.roll(-1, 1)),
        loss,
    )


def _workload(
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> heterog.Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return heterog.Workload(model, batch, loss, torch.optim.SGD, {"lr": 0.01})


# Much communication, little compute: 3.8 M parameters.
mlp = partial(_mlp, (1024, 1408, 1408, 256), batch_size=4096)
# Convolutions with BatchNorm on 32 x 32 images: much compute, little communication.
vgg = partial(_vgg, (32, 64, 128), 32, 10, batch_size=384)
# A tied language model of 4.2 M parameters, and a deeper Transformer encoder of 7.4 M.
gpt = partial(_text, 4096, 256, heads=4, num_layers=4, length=32, batch_size=96)
encoder = partial(_text, 4096, 256, heads=4, num_layers=8, length=32, batch_size=72)

# For calibration: three narrower layers and four wider ones; images of 28 x 28 and of 36 x 36;
# two narrow layers over short texts and three wide ones over longer texts.
mlp_small = partial(_mlp, (768, 1152, 896, 320), batch_size=3000)
mlp_wide = partial(_mlp, (1280, 1664, 1280, 512, 192), batch_size=1600)
vgg_narrow = partial(_vgg, (24, 48, 96), 28, 20, batch_size=320)
vgg_wide = partial(_vgg, (40, 80, 160), 36, 20, batch_size=160)
text_small = partial(_text, 3072, 192, heads=3, num_layers=2, length=24, batch_size=120)
text_wide = partial(_text, 5120, 320, heads=5, num_layers=3, length=40, batch_size=48)
