"""Networks that classify images into 1000 classes, written out in plain torch.

Every network has the parameters of its publication, batch normalisation included, with two
deviations. There is no dropout, so that a training step is deterministic. Inception and NASNet
have no auxiliary head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Batch, Workload
from heterog.zoo.language import EncoderLayer
from heterog.zoo.registry import Builders

NUM_CLASSES = 1000


class Vgg19(nn.Sequential):
    """VGG-19 without dropout: 16 convolutions, 3 linear layers."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        in_channels = 3
        for num_layers, channels in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
            for _ in range(num_layers):
                layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU()]
                in_channels = channels
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU()]
        layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, NUM_CLASSES)]
        super().__init__(*layers)


class ConvNorm(nn.Sequential):
    """A convolution without bias, batch normalisation, and an activation unless it is ``None``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] | None = None,
        *,
        activation: type[nn.Module] | None = nn.ReLU,
        eps: float = 1e-5,
    ) -> None:
        if padding is None:
            padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(out_channels, eps=eps),
        )
        if activation is not None:
            self.append(activation())


class Classifier(nn.Sequential):
    """The mean over all positions, then one linear layer."""

    def __init__(self, in_channels: int) -> None:
        super().__init__(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, NUM_CLASSES)
        )


class Bottleneck(nn.Module):
    """The three-convolution block of ResNet; the 3 x 3 convolution carries the stride."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        self.body = nn.Sequential(
            ConvNorm(in_channels, width, 1),
            ConvNorm(width, width, 3, stride),
            ConvNorm(width, out_channels, 1, activation=None),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = ConvNorm(in_channels, out_channels, 1, stride, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[N, in_channels, H, W]`` to ``[N, 4 width, H / stride, W / stride]``."""
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """A bottleneck ResNet with the given number of blocks in each of its four stages."""

    def __init__(self, num_blocks: tuple[int, int, int, int]) -> None:
        layers: list[nn.Module] = [ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, padding=1)]
        in_channels = 64
        for stage, blocks in enumerate(num_blocks):
            width = 64 * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(in_channels, width, stride))
                in_channels = 4 * width
        super().__init__(*layers, Classifier(in_channels))


class Branches(nn.Module):
    """Modules applied to the same input, their outputs joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[N, C, H, W]`` to ``[N, sum of the branches' channels, H', W']``."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


_conv = partial(ConvNorm, eps=1e-3)


def _inception_pool(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), _conv(in_channels, out_channels, 1))


def _inception_35(in_channels: int, pool_channels: int) -> Branches:
    """The block on 35 x 35 positions (figure 5 of the paper)."""
    return Branches(
        _conv(in_channels, 64, 1),
        nn.Sequential(_conv(in_channels, 48, 1), _conv(48, 64, 5)),
        nn.Sequential(_conv(in_channels, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3)),
        _inception_pool(in_channels, pool_channels),
    )


def _inception_to_17() -> Branches:
    """The block from 35 x 35 to 17 x 17 positions (figure 10)."""
    return Branches(
        _conv(288, 384, 3, 2, 0),
        nn.Sequential(_conv(288, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3, 2, 0)),
        nn.MaxPool2d(3, 2),
    )


def _inception_17(width: int) -> Branches:
    """The block on 17 x 17 positions, 7 x 7 convolutions in two factors (figure 6)."""
    return Branches(
        _conv(768, 192, 1),
        nn.Sequential(
            _conv(768, width, 1), _conv(width, width, (1, 7)), _conv(width, 192, (7, 1))
        ),
        nn.Sequential(
            _conv(768, width, 1),
            _conv(width, width, (7, 1)),
            _conv(width, width, (1, 7)),
            _conv(width, width, (7, 1)),
            _conv(width, 192, (1, 7)),
        ),
        _inception_pool(768, 192),
    )


def _inception_to_8() -> Branches:
    """The block from 17 x 17 to 8 x 8 positions."""
    return Branches(
        nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, 2, 0)),
        nn.Sequential(
            _conv(768, 192, 1),
            _conv(192, 192, (1, 7)),
            _conv(192, 192, (7, 1)),
            _conv(192, 192, 3, 2, 0),
        ),
        nn.MaxPool2d(3, 2),
    )


def _inception_8(in_channels: int) -> Branches:
    """The block on 8 x 8 positions, whose filter bank is widened (figure 7)."""
    return Branches(
        _conv(in_channels, 320, 1),
        nn.Sequential(
            _conv(in_channels, 384, 1), Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))
        ),
        nn.Sequential(
            _conv(in_channels, 448, 1),
            _conv(448, 384, 3),
            Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))),
        ),
        _inception_pool(in_channels, 192),
    )


class InceptionV3(nn.Sequential):
    """Inception-v3 without its auxiliary head and without dropout."""

    def __init__(self) -> None:
        super().__init__(
            *(_conv(3, 32, 3, 2, 0), _conv(32, 32, 3, 1, 0), _conv(32, 64, 3), nn.MaxPool2d(3, 2)),
            *(_conv(64, 80, 1), _conv(80, 192, 3, 1, 0), nn.MaxPool2d(3, 2)),
            *(_inception_35(192, 32), _inception_35(256, 64), _inception_35(288, 64)),
            _inception_to_17(),
            *(_inception_17(128), _inception_17(160), _inception_17(160), _inception_17(192)),
            _inception_to_8(),
            *(_inception_8(1280), _inception_8(2048)),
            Classifier(2048),
        )


class InvertedResidual(nn.Module):
    """The block of MobileNetV2: widen, convolve each channel alone, narrow without activation."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = expansion * in_channels
        self.body = nn.Sequential(
            nn.Sequential(
                nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU6(),
            ),
            ConvNorm(width, out_channels, 1, activation=None),
        )
        if expansion != 1:
            self.body.insert(0, ConvNorm(in_channels, width, 1, activation=nn.ReLU6))
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[N, in_channels, H, W]`` to ``[N, out_channels, H / stride, W / stride]``."""
        out: Tensor = self.body(x)
        return x + out if self.has_shortcut else out


class MobileNetV2(nn.Sequential):
    """MobileNetV2 at width 1.0, without dropout (table 2 of the paper)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [ConvNorm(3, 32, 3, 2, activation=nn.ReLU6)]
        in_channels = 32
        for expansion, channels, num_blocks, first_stride in (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ):
            for block in range(num_blocks):
                stride = first_stride if block == 0 else 1
                layers.append(InvertedResidual(in_channels, channels, stride, expansion))
                in_channels = channels
        layers += [ConvNorm(320, 1280, 1, activation=nn.ReLU6), Classifier(1280)]
        super().__init__(*layers)


class ReluConvNorm(nn.Sequential):
    """ReLU, a 1 x 1 convolution and batch normalisation, with which NASNet sets a width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.ReLU(), ConvNorm(in_channels, out_channels, 1, activation=None, eps=1e-3)
        )


class Separable(nn.Sequential):
    """NASNet's separable convolution, applied twice; the first one carries the stride."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        # In the first stem cell the input is wider than the output and narrows at once; everywhere
        # else both are equal.
        for inputs, step in ((in_channels, stride), (out_channels, 1)):
            layers += [
                nn.ReLU(),
                nn.Conv2d(inputs, inputs, kernel, step, kernel // 2, groups=inputs, bias=False),
                nn.Conv2d(inputs, out_channels, 1, bias=False),
                nn.BatchNorm2d(out_channels, eps=1e-3),
            ]
        super().__init__(*layers)


class HalveResolution(nn.Module):
    """NASNet's factorised reduction: two grids of every second position, one shifted by one."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[N, in_channels, H, W]`` to ``[N, out_channels, ceil(H / 2), ceil(W / 2)]``."""
        x = functional.relu(x)
        even = self.even(functional.avg_pool2d(x, 1, 2))
        shifted = functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        odd = self.odd(functional.avg_pool2d(shifted, 1, 2))
        out: Tensor = self.norm(torch.cat([even, odd], dim=1))
        return out


def _average(x: Tensor, stride: int = 1) -> Tensor:
    return functional.avg_pool2d(x, 3, stride, padding=1, count_include_pad=False)


class NormalCell(nn.Module):
    """NASNet-A's normal cell (figure 4, left), on the outputs of the last two cells.

    Args:
        last_channels: Channels of the last cell's output.
        before_channels: Channels of the output of the cell before it.
        width: Channels to which both inputs are set, and of each of the six results.
        halve: Whether the older input has twice the resolution.
    """

    def __init__(
        self, last_channels: int, before_channels: int, width: int, *, halve: bool = False
    ) -> None:
        super().__init__()
        adjust = HalveResolution if halve else ReluConvNorm
        self.adjust_before = adjust(before_channels, width)
        self.adjust_last = ReluConvNorm(last_channels, width)
        self.last_5x5 = Separable(width, width, 5)
        self.before_3x3 = Separable(width, width, 3)
        self.before_5x5 = Separable(width, width, 5)
        self.before_3x3_again = Separable(width, width, 3)
        self.last_3x3 = Separable(width, width, 3)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """Gives ``[N, 6 width, H, W]``."""
        last, before = self.adjust_last(last), self.adjust_before(before)
        average = _average(before)
        return torch.cat(
            [
                before,
                self.last_5x5(last) + self.before_3x3(before),
                self.before_5x5(before) + self.before_3x3_again(before),
                _average(last) + before,
                average + average,
                self.last_3x3(last) + last,
            ],
            dim=1,
        )


class ReductionCell(nn.Module):
    """NASNet-A's reduction cell (figure 4, right); it halves the resolution.

    Args:
        last_channels: Channels of the last cell's output.
        before_channels: Channels of the output of the cell before it.
        width: Channels of each of the cell's four results.
        first: Whether this is the first stem cell, which takes the older input as it is.
        halve: Whether the older input has twice the resolution.
    """

    def __init__(
        self,
        last_channels: int,
        before_channels: int,
        width: int,
        *,
        first: bool = False,
        halve: bool = False,
    ) -> None:
        super().__init__()
        adjust = HalveResolution if halve else ReluConvNorm
        self.adjust_before = nn.Identity() if first else adjust(before_channels, width)
        self.adjust_last = ReluConvNorm(last_channels, width)
        before_width = before_channels if first else width
        self.last_5x5 = Separable(width, width, 5, 2)
        self.before_7x7 = Separable(before_width, width, 7, 2)
        self.before_7x7_again = Separable(before_width, width, 7, 2)
        self.before_5x5 = Separable(before_width, width, 5, 2)
        self.first_3x3 = Separable(width, width, 3)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """Gives ``[N, 4 width, ceil(H / 2), ceil(W / 2)]``."""
        last, before = self.adjust_last(last), self.adjust_before(before)
        most = functional.max_pool2d(last, 3, 2, padding=1)
        first = self.last_5x5(last) + self.before_7x7(before)
        second = most + self.before_7x7_again(before)
        third = _average(last, 2) + self.before_5x5(before)
        return torch.cat(
            [second, third, _average(first) + second, self.first_3x3(first) + most], dim=1
        )


class NasNetLarge(nn.Module):
    """NASNet-A (6 @ 4032): 4032 channels at the end, three times six normal cells."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 96, 3, 2, padding=0, activation=None, eps=1e-3)
        self.stem_1 = ReductionCell(96, 96, 42, first=True)
        self.stem_2 = ReductionCell(4 * 42, 96, 84, halve=True)
        self.cells = nn.ModuleList()
        last, before = 4 * 84, 4 * 42
        for width in (168, 336, 672):
            if width > 168:
                self.cells.append(ReductionCell(last, before, width))
                # The next cell's older input is the older input of the reduction.
                last = 4 * width
            for cell in range(6):
                self.cells.append(NormalCell(last, before, width, halve=cell == 0))
                last, before = 6 * width, last
        self.classifier = nn.Sequential(nn.ReLU(), Classifier(last))

    def forward(self, x: Tensor) -> Tensor:
        """Maps images ``[N, 3, 331, 331]`` to logits ``[N, 1000]``."""
        x = self.stem(x)
        last = self.stem_1(x, x)
        last, before = self.stem_2(last, x), last
        for cell in self.cells:
            out = cell(last, before)
            last, before = out, before if isinstance(cell, ReductionCell) else last
        logits: Tensor = self.classifier(last)
        return logits


class VitBase(nn.Module):
    """The base vision transformer: 12 layers of width 768 on 14 x 14 patches and a class token."""

    def __init__(self) -> None:
        super().__init__()
        width = 768
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 14 * 14 + 1, width))
        nn.init.normal_(self.positions, std=0.02)
        self.layers = nn.Sequential(
            *(EncoderLayer(width, 4 * width, 12, nn.GELU, eps=1e-6) for _ in range(12))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images ``[N, 3, 224, 224]`` to logits ``[N, 1000]``."""
        patches = self.patches(x).flatten(2).transpose(1, 2)  # [N, 196, width]
        class_token = self.class_token.expand(x.shape[0], -1, -1)
        tokens = self.layers(torch.cat([class_token, patches], dim=1) + self.positions)
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits


def _workload(
    name: str, batch_size: int, *, model: Callable[[], nn.Module], image_size: int
) -> Workload:
    def example_batch() -> Batch:
        random = torch.Generator().manual_seed(0)
        images = torch.rand(batch_size, 3, image_size, image_size, generator=random)
        return images, torch.randint(NUM_CLASSES, (batch_size,), generator=random)

    return Workload(
        model=model,
        example_batch=example_batch,
        loss=functional.cross_entropy,
        optimizer=torch.optim.Adam,
        name=name,
        source=name,
    )


WORKLOADS: Builders = {
    # Simonyan and Zisserman 2015, configuration E.
    "vgg19": partial(_workload, model=Vgg19, image_size=224),
    # He et al. 2016.
    "resnet50": partial(_workload, model=lambda: ResNet((3, 4, 6, 3)), image_size=224),
    # With the block of ResNet-50. Unlike the second paper of He et al., where ResNet-200 first
    # appears, the block normalises after each convolution and not before it; the convolutions are
    # the same.
    "resnet200": partial(_workload, model=lambda: ResNet((3, 24, 36, 3)), image_size=224),
    # Szegedy et al. 2016, without the auxiliary head.
    "inception_v3": partial(_workload, model=InceptionV3, image_size=299),
    # Sandler et al. 2018, width 1.0.
    "mobilenet_v2": partial(_workload, model=MobileNetV2, image_size=224),
    # NASNet-A (6 @ 4032), Zoph et al. 2018, without its auxiliary head. It has 88,753,150
    # parameters, the count of the PyTorch ports; the paper says 88.9 million.
    "nasnet_large": partial(_workload, model=NasNetLarge, image_size=331),
    # Dosovitskiy et al. 2021, patches of 16 x 16.
    "vit_base": partial(_workload, model=VitBase, image_size=224),
}
"""Makers of the workloads by name."""
