"""Models for tests of predictions: families, sizes and optimizers that the zoo does not have.

Each function is a workload for ``gpu_steps.py`` and for the command line:
``experiments/held_out_models.py:convnext``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from heterog import Workload
from heterog.zoo.language import token_workload

_CLASSES = 1000


def _loss(output: Any, labels: Tensor) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _images(
    model: Callable[[], nn.Module],
    batch_size: int,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> Workload:
    def example_batch() -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 3, 224, 224), torch.zeros(batch_size).long()

    return Workload(model, example_batch, _loss, optimizer, options)


_SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}


def _tokens(
    kind: str,
    config: transformers.PretrainedConfig,
    batch_size: int,
    length: int,
    keys: tuple[str, ...] = ("input_ids",),
) -> Workload:
    made = token_workload(
        "workload",
        lambda: getattr(transformers, kind)(config),
        batch_size,
        config.vocab_size,
        dict.fromkeys((*keys, "labels"), length),
    )
    return replace(made, optimizer=torch.optim.AdamW)


def _classifier(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(num_labels=_CLASSES, **options)
        return getattr(transformers, f"{kind}ForImageClassification")(config)

    return make


# Depthwise convolutions of 7 x 7, and layer norms.
convnext = partial(_images, _classifier("ConvNext"), batch_size=64)
# Grouped convolutions, and batch norms.
regnet = partial(
    _images,
    _classifier("RegNet", hidden_sizes=[64, 128, 320, 768], depths=[2, 6, 12, 2]),
    batch_size=64,
    **_SGD,
)
# Attention in windows.
swin = partial(_images, _classifier("Swin"), batch_size=64)
# Attention to fewer keys, and depthwise convolutions.
segformer = partial(_images, _classifier("Segformer"), batch_size=64)
# Depthwise convolutions of 3 x 3, by SGD.
mobilenet_v1 = partial(_images, _classifier("MobileNetV1"), batch_size=128, **_SGD)
# A vision transformer with other blocks.
dinov2 = partial(_images, _classifier("Dinov2"), batch_size=32)


# A language model with few keys, of half a billion parameters.
qwen = partial(
    _tokens,
    "Qwen2ForCausalLM",
    transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True, use_cache=False,
    ),
    batch_size=8,
    length=512,
)  # fmt: skip
# Encoder and decoder with positions in the scores.
t5 = partial(
    _tokens,
    "T5ForConditionalGeneration",
    transformers.T5Config(use_cache=False),
    batch_size=32,
    length=256,
    keys=("input_ids", "decoder_input_ids"),
)
# Disentangled attention: many small kernels.
deberta = partial(
    _tokens,
    "DebertaV2ForMaskedLM",
    transformers.DebertaV2Config(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        vocab_size=50_000, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=64, max_relative_positions=256,
    ),
    batch_size=16,
    length=256,
)  # fmt: skip
# A language model with biases, of 350 million parameters.
opt = partial(
    _tokens,
    "OPTForCausalLM",
    transformers.OPTConfig(
        hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16,
        max_position_embeddings=1024, use_cache=False,
    ),
    batch_size=8,
    length=1024,
)  # fmt: skip


class _Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Down and up with skips, group norms and transposed convolutions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(
            _Block(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * after, after, 2, 2) for after in reversed(widths[:-1])
        )
        self.joined = nn.ModuleList(_Block(2 * after, after) for after in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to images."""
        skips: list[Tensor] = []
        for block in self.down:
            x = block(x if not skips else functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def unet(batch_size: int = 16) -> Workload:
    """A denoiser of images."""
    return Workload(
        model=UNet,
        example_batch=lambda: (torch.randn(batch_size, 3, 128, 128),) * 2,
        loss=functional.mse_loss,
        optimizer=torch.optim.Adam,
        name="unet",
    )


class Recommender(nn.Module):
    """Tables of embeddings and two stacks of linear layers, as DLRM."""

    def __init__(self, tables: int = 26, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 1),
        )  # fmt: skip
        self.low: Tensor
        self.register_buffer("low", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Maps ``[N, 13]`` numbers and ``[N, tables]`` categories to ``[N]``."""
        first = self.bottom(numbers)
        columns = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        every = torch.stack([first, *columns], 1)
        pairs = (every @ every.transpose(1, 2))[:, self.low[0], self.low[1]]
        return self.top(torch.cat([first, pairs], 1))[:, 0]


def recommender(batch_size: int = 4096) -> Workload:
    """Much memory and little work."""
    return Workload(
        model=Recommender,
        example_batch=lambda: (
            torch.randn(batch_size, 13),
            torch.randint(100_000, (batch_size, 26)),
            torch.rand(batch_size),
        ),
        loss=functional.binary_cross_entropy_with_logits,
        optimizer=torch.optim.SGD,
        optimizer_options={"lr": 0.1},
        name="recommender",
    )
