"""Workloads that run on testbeds of CPUs, and workloads for the calibration of testbeds.

Each is a function for ``heterog plan experiments/testbed_workloads.py:NAME``; weights and batches
are the same on every call. There is no dropout. Workloads for calibration are of the same families
in other sizes: none of their layers has the shape of a layer on which the calibration is tested.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import heterog


def mlp(batch_size: int = 4096) -> heterog.Workload:
    """A multi-layer perceptron of 3.8 M parameters: much communication, little compute."""
    return _mlp((1024, 1408, 1408, 256), batch_size)


def vgg(batch_size: int = 384) -> heterog.Workload:
    """A VGG-like network with BatchNorm on 32 x 32 images: much compute, little communication."""
    return _vgg((32, 64, 128), 32, 10, batch_size)


def gpt(batch_size: int = 96) -> heterog.Workload:
    """A tied language model of 4.2 M parameters."""
    return _text(4096, 256, 4, 4, 32, batch_size)


def encoder(batch_size: int = 72) -> heterog.Workload:
    """A deeper Transformer encoder of 7.4 M parameters."""
    return _text(4096, 256, 4, 8, 32, batch_size)


def mlp_small(batch_size: int = 3000) -> heterog.Workload:
    """Three layers, narrower than the judged one."""
    return _mlp((768, 1152, 896, 320), batch_size)


def mlp_wide(batch_size: int = 1600) -> heterog.Workload:
    """Four layers, wider."""
    return _mlp((1280, 1664, 1280, 512, 192), batch_size)


def vgg_narrow(batch_size: int = 320) -> heterog.Workload:
    """Convolutions with BatchNorm on 28 x 28 images."""
    return _vgg((24, 48, 96), 28, 20, batch_size)


def vgg_wide(batch_size: int = 160) -> heterog.Workload:
    """Convolutions with BatchNorm on 36 x 36 images."""
    return _vgg((40, 80, 160), 36, 20, batch_size)


def text_small(batch_size: int = 120) -> heterog.Workload:
    """Two narrow Transformer layers over short texts."""
    return _text(3072, 192, 3, 2, 24, batch_size)


def text_wide(batch_size: int = 48) -> heterog.Workload:
    """Three wide Transformer layers over longer texts."""
    return _text(5120, 320, 5, 3, 40, batch_size)


def _mlp(widths: tuple[int, ...], batch_size: int) -> heterog.Workload:
    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            layers += [nn.Linear(inner, outer), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch_size, widths[0], generator=draw)
    targets = torch.randn(batch_size, widths[-1], generator=draw)
    return _workload(model, (inputs, targets), functional.mse_loss)


def _vgg(widths: tuple[int, ...], size: int, classes: int, batch_size: int) -> heterog.Workload:
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
