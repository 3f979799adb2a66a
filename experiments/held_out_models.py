"""Models for tests of predictions: families, sizes and optimizers that the zoo does not have.

Each function is a workload for ``gpu_steps.py`` and for the command line:
``experiments/held_out_models.py:convnext``.
"""

from collections.abc import Callable
from dataclasses import replace
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
    name: str,
    batch: int,
    model: Callable[[], nn.Module],
    size: int = 224,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> Workload:
    return Workload(
        model=model,
        example_batch=lambda: (torch.randn(batch, 3, size, size), torch.zeros(batch).long()),
        loss=_loss,
        optimizer=optimizer,
        optimizer_options=options,
        name=name,
    )


def _tokens(
    name: str,
    batch: int,
    length: int,
    vocabulary: int,
    model: Callable[[], nn.Module],
    keys: tuple[str, ...] = ("input_ids",),
) -> Workload:
    lengths = dict.fromkeys((*keys, "labels"), length)
    made = token_workload(name, model, batch, vocabulary, lengths)
    return replace(made, optimizer=torch.optim.AdamW)


def _classifier(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(num_labels=_CLASSES, **options)
        return getattr(transformers, f"{kind}ForImageClassification")(config)

    return make


def convnext(batch_size: int = 64) -> Workload:
    """Depthwise convolutions of 7 x 7, and layer norms."""
    return _images("convnext", batch_size, _classifier("ConvNext"))


def regnet(batch_size: int = 64) -> Workload:
    """Grouped convolutions, and batch norms."""
    model = _classifier("RegNet", hidden_sizes=[64, 128, 320, 768], depths=[2, 6, 12, 2])
    return _images("regnet", batch_size, model, 224, torch.optim.SGD, lr=0.1, momentum=0.9)


def swin(batch_size: int = 64) -> Workload:
    """Attention in windows."""
    return _images("swin", batch_size, _classifier("Swin"))


def segformer(batch_size: int = 64) -> Workload:
    """Attention to fewer keys, and depthwise convolutions."""
    return _images("segformer", batch_size, _classifier("Segformer"))


def mobilenet_v1(batch_size: int = 128) -> Workload:
    """Depthwise convolutions of 3 x 3, by SGD."""
    model = _classifier("MobileNetV1")
    return _images("mobilenet_v1", batch_size, model, 224, torch.optim.SGD, lr=0.1, momentum=0.9)


def dinov2(batch_size: int = 32) -> Workload:
    """A vision transformer with other blocks."""
    return _images("dinov2", batch_size, _classifier("Dinov2"))


def qwen(batch_size: int = 8) -> Workload:
    """A language model with few keys, of half a billion parameters."""

    def make() -> nn.Module:
        return transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
                vocab_size=151_936,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )

    return _tokens("qwen", batch_size, 512, 151_936, make)


def t5(batch_size: int = 32) -> Workload:
    """Encoder and decoder with positions in the scores."""
    config = transformers.T5Config(use_cache=False)
    model = lambda: transformers.T5ForConditionalGeneration(config)  # noqa: E731
    keys = ("input_ids", "decoder_input_ids")
    return _tokens("t5", batch_size, 256, 32_128, model, keys)


def deberta(batch_size: int = 16) -> Workload:
    """Disentangled attention: many small kernels."""
    config = transformers.DebertaV2Config(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        vocab_size=50_000, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=64, max_relative_positions=256,
    )  # fmt: skip
    model = lambda: transformers.DebertaV2ForMaskedLM(config)  # noqa: E731
    return _tokens("deberta", batch_size, 256, 50_000, model)


def opt(batch_size: int = 8) -> Workload:
    """A language model with biases, of 350 million parameters."""
    config = transformers.OPTConfig(
        hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16,
        max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    return _tokens("opt", batch_size, 1024, 50_272, lambda: transformers.OPTForCausalLM(config))


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


ALL = (
    "convnext", "regnet", "swin", "segformer", "mobilenet_v1", "dinov2", "qwen", "t5", "deberta",
    "opt", "unet", "recommender",
)  # fmt: skip
