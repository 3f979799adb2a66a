"""Workloads that testbeds are calibrated on: the families of ``testbed_workloads``, other sizes.

No layer has the shape of one in the table that the calibration is judged by.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

import heterog


def mlp_small(batch_size: int = 3000) -> heterog.Workload:
    """Three layers, narrower than the judged one."""
    return _mlp((768, 1152, 896, 320), batch_size)


def mlp_wide(batch_size: int = 1600) -> heterog.Workload:
    """Four layers, wider."""
    return _mlp((1280, 1664, 1280, 512, 192), batch_size)


def vgg_narrow(batch_size: int = 320) -> heterog.Workload:
    """Convolutions with BatchNorm on 28 x 28 images."""
    return _vgg((24, 48, 96), 28, batch_size)


def vgg_wide(batch_size: int = 160) -> heterog.Workload:
    """Convolutions with BatchNorm on 36 x 36 images."""
    return _vgg((40, 80, 160), 36, batch_size)


def text_small(batch_size: int = 120) -> heterog.Workload:
    """Two narrow Transformer layers over short texts."""
    return _text(3072, 192, 3, 2, 24, batch_size)


def text_wide(batch_size: int = 48) -> heterog.Workload:
    """Three wide Transformer layers over longer texts."""
    return _text(5120, 320, 5, 3, 40, batch_size)


def _mlp(widths: tuple[int, ...], batch_size: int) -> heterog.Workload:
    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inner, outer in itertools.pairwise(widths):
            layers += [nn.Linear(inner, outer), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    batch = (torch.randn(batch_size, widths[0]), torch.randn(batch_size, widths[-1]))
    return heterog.Workload(model, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.01})


def _vgg(widths: tuple[int, ...], size: int, batch_size: int) -> heterog.Workload:
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
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, 20))

    batch = (torch.randn(batch_size, 3, size, size), torch.randint(0, 20, (batch_size,)))
    return heterog.Workload(model, batch, functional.cross_entropy, torch.optim.SGD, {"lr": 0.01})


class _Text(nn.Module):
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
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out.flatten(0, 1)


def _text(
    vocabulary: int, width: int, heads: int, num_layers: int, length: int, batch_size: int
) -> heterog.Workload:
    tokens = torch.randint(0, vocabulary, (batch_size, length))

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels.flatten())

    return heterog.Workload(
        lambda: _Text(vocabulary, width, heads, num_layers),
        (tokens, tokens.roll(-1, 1)),
        loss,
        torch.optim.SGD,
        {"lr": 0.01},
    )
