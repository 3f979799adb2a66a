"""Models for training policies, beside those of the zoo: other depths, widths and lengths.

Each function is a workload for the command line: ``experiments/training_models.py:lm_4l``. None of
them has the size of a held-out model or belongs to its family.
"""

from collections.abc import Callable
from functools import partial
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
    batch_size: int, *, vocabulary: int, width: int, layers: int, tokens: int, tied: bool
) -> Workload:
    return token_workload(
        "workload",
        lambda: LanguageModel(vocabulary, width, layers, tied=tied),
        batch_size,
        vocabulary,
        {"input_ids": tokens, "labels": tokens},
    )


def _images(model: Callable[[], nn.Module], batch_size: int, size: int = 224) -> Workload:
    def example_batch() -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, 3, size, size), torch.zeros(batch_size).long()

    return Workload(model, example_batch, functional.cross_entropy, torch.optim.Adam)


# A small language model with a large vocabulary.
lm_4l = partial(
    _language, batch_size=128, vocabulary=50_000, width=512, layers=4, tokens=64, tied=True
)
# Few wide layers.
lm_6l_wide = partial(
    _language, batch_size=64, vocabulary=32_000, width=1536, layers=6, tokens=64, tied=False
)
# Of medium depth.
lm_10l = partial(
    _language, batch_size=96, vocabulary=30_000, width=768, layers=10, tokens=128, tied=True
)
# Long sequences: much activation memory.
lm_14l_long = partial(
    _language, batch_size=24, vocabulary=50_000, width=1024, layers=14, tokens=512, tied=False
)
# Deep, with a head of its own.
lm_18l_untied = partial(
    _language, batch_size=40, vocabulary=40_000, width=1024, layers=18, tokens=128, tied=False
)
# Few very wide layers and a giant vocabulary: more state than most devices hold.
lm_8l_giant = partial(
    _language, batch_size=24, vocabulary=100_000, width=2560, layers=8, tokens=128, tied=True
)
# Deep and narrow.
lm_32l = partial(
    _language, batch_size=32, vocabulary=30_000, width=640, layers=32, tokens=128, tied=True
)


def _wide_layers() -> nn.Module:
    widths = (3072, 4096, 8192, 4096, 4096, 2048, 2048, 1000)
    stack: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        stack += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*stack[:-1])


def _wide_head() -> nn.Module:
    stack: list[nn.Module] = []
    before = 3
    for width, stride in ((64, 2), (192, 2), (384, 1), (384, 2), (256, 2)):
        stack += [nn.Conv2d(before, width, 3, stride, padding=1), nn.ReLU()]
        before = width
    stack += [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU()]
    stack += [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*stack)


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


# Wide linear layers: nearly all communication.
mlp = partial(_images, _wide_layers, batch_size=512, size=32)
# Few convolutions below large linear layers, as AlexNet.
vgg_wide_head = partial(_images, _wide_head, batch_size=96)
# A bottleneck ResNet of 26 layers.
resnet_shallow = partial(_images, partial(ResNet, (2, 2, 2, 2)), batch_size=128)
# A branching network with skips over cells.
cells = partial(_images, partial(Cells, 10, 256), batch_size=64)
