"""Models for training policies, beside those of the zoo: other depths, widths and lengths.

Each function is a workload for the command line: ``experiments/training_models.py:lm_4l``. None of
them has the size of a held-out model or belongs to its family.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog import Workload
from heterog.zoo.language import EncoderLayer, token_workload
from heterog.zoo.vision import Classifier, ConvNorm, ResNet


class LanguageModel(nn.Module):
    """Embedding, transformer layers, and a head of its own or the tied embedding."""

    def __init__(self, vocabulary: int, width: int, num_layers: int, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        heads = width // 64
        self.layers = nn.Sequential(
            *(EncoderLayer(width, 4 * width, heads, nn.GELU) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Maps tokens ``[batch, tokens]`` to logits ``[batch, tokens, vocabulary]``."""
        x = self.norm(self.layers(self.embedding(input_ids)))
        weight = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(x, weight)


def _language(
    name: str, batch: int, vocabulary: int, width: int, layers: int, tokens: int, *, tied: bool
) -> Workload:
    return token_workload(
        name,
        lambda: LanguageModel(vocabulary, width, layers, tied=tied),
        batch,
        vocabulary,
        {"input_ids": tokens, "labels": tokens},
    )


def _images(name: str, batch: int, size: int, model: Callable[[], nn.Module]) -> Workload:
    return Workload(
        model=model,
        example_batch=lambda: (torch.zeros(batch, 3, size, size), torch.zeros(batch).long()),
        loss=functional.cross_entropy,
        optimizer=torch.optim.Adam,
        name=name,
    )


def lm_4l(batch_size: int = 128) -> Workload:
    """A small language model with a large vocabulary."""
    return _language("lm_4l", batch_size, 50_000, 512, 4, 64, tied=True)


def lm_6l_wide(batch_size: int = 64) -> Workload:
    """Few wide layers."""
    return _language("lm_6l_wide", batch_size, 32_000, 1536, 6, 64, tied=False)


def lm_10l(batch_size: int = 96) -> Workload:
    """Of medium depth."""
    return _language("lm_10l", batch_size, 30_000, 768, 10, 128, tied=True)


def lm_14l_long(batch_size: int = 24) -> Workload:
    """Long sequences: much activation memory."""
    return _language("lm_14l_long", batch_size, 50_000, 1024, 14, 512, tied=False)


def lm_18l_untied(batch_size: int = 40) -> Workload:
    """Deep, with a head of its own."""
    return _language("lm_18l_untied", batch_size, 40_000, 1024, 18, 128, tied=False)


def lm_8l_giant(batch_size: int = 24) -> Workload:
    """Few very wide layers and a giant vocabulary: more state than most devices hold."""
    return _language("lm_8l_giant", batch_size, 100_000, 2560, 8, 128, tied=True)


def lm_32l(batch_size: int = 32) -> Workload:
    """Deep and narrow."""
    return _language("lm_32l", batch_size, 30_000, 640, 32, 128, tied=True)


def mlp(batch_size: int = 512) -> Workload:
    """Wide linear layers: nearly all communication."""

    def model() -> nn.Module:
        widths = (3072, 4096, 8192, 4096, 4096, 2048, 2048, 1000)
        stack: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            stack += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*stack[:-1])

    return _images("mlp", batch_size, 32, model)


def vgg_wide_head(batch_size: int = 96) -> Workload:
    """Few convolutions below large linear layers, as AlexNet."""

    def model() -> nn.Module:
        stack: list[nn.Module] = []
        before = 3
        for width, stride in ((64, 2), (192, 2), (384, 1), (384, 2), (256, 2)):
            stack += [nn.Conv2d(before, width, 3, stride, padding=1), nn.ReLU()]
            before = width
        stack += [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU()]
        stack += [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
        return nn.Sequential(*stack)

    return _images("vgg_wide_head", batch_size, 224, model)


def resnet_shallow(batch_size: int = 128) -> Workload:
    """A bottleneck ResNet of 26 layers."""
    return _images("resnet_shallow", batch_size, 224, lambda: ResNet((2, 2, 2, 2)))


class _Cell(nn.Module):
    """A cell of branches that reads the outputs of the two cells before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(ConvNorm(width, width, kernel), ConvNorm(width, width, 1))
            for kernel in (1, 3, 3, 5)
        )
        self.join = ConvNorm(2 * width, width, 1)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """Maps two ``[N, C, H, W]`` to one."""
        first = self.branches[0](x) + self.branches[1](before)
        second = self.branches[2](x) + self.branches[3](first)
        return self.join(torch.cat([first, second], dim=1))


class Cells(nn.Module):
    """Branching cells with skips over one cell."""

    def __init__(self, num_cells: int, width: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, 3, 4)
        self.cells = nn.ModuleList(_Cell(width) for _ in range(num_cells))
        self.head = Classifier(width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to 1,000 logits."""
        before = x = self.stem(x)
        for cell in self.cells:
            before, x = x, cell(x, before)
        return self.head(x)


def cells(batch_size: int = 64) -> Workload:
    """A branching network with skips over cells."""
    return _images("cells", batch_size, 224, lambda: Cells(10, 256))
