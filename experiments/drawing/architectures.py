"""Drawn models of ``transformers``: configurations of drawn sizes, without weights.

Causal attention has no mask in the graph, as fused kernels want it (``large_models``).
"""

from collections.abc import Callable
from typing import Any

import transformers
from large_models import Logits
from torch import Tensor, nn

from drawing.families import (
    FAMILIES,
    TEST,
    TRAIN,
    VALIDATION,
    Draw,
    Family,
    family,
    precision,
    tensors,
)
from heterog import Workload

_HUB: Any = transformers  # its configurations take more than their types say


class Named(nn.Module):
    """A model of ``transformers`` that is given its inputs in order, and returns its logits."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Maps inputs to logits."""
        return self.model(**dict(zip(self.names, inputs, strict=True))).logits


def _causal(split: str, name: str, kind: str, **fixed: Any) -> None:
    """Enter a family of language models whose sizes have their usual names."""

    def build(draw: Draw) -> Workload:
        heads, depth = draw.size(4, 64, 4), draw.size(2, 32)
        words, length = draw.size(8000, 200_000, 8), draw.pick(128, 512, 2048)
        batch, dtype, wide = draw.batch(8, 512), precision(draw), draw.pick(3, 4)
        config = getattr(_HUB, f"{kind}Config")(
            vocab_size=words, hidden_size=64 * heads, intermediate_size=64 * heads * wide,
            num_hidden_layers=depth, num_attention_heads=heads, max_position_embeddings=length,
            use_cache=False, attn_implementation="causal_without_mask", **fixed,
        )  # fmt: skip
        model = lambda: Logits(getattr(_HUB, f"{kind}ForCausalLM")(config))  # noqa: E731
        made = tensors(model, (batch, length), (batch, length), dtypes="ll", dtype=dtype)
        return made

    FAMILIES[name] = Family(split, build)


_causal(TRAIN, "llama", "Llama", num_key_value_heads=4)
_causal(TRAIN, "opt", "OPT")
_causal(VALIDATION, "gpt_neox", "GPTNeoX")
_causal(TEST, "qwen", "Qwen3", num_key_value_heads=4, head_dim=64)
_causal(TEST, "phi", "Phi")


def _masked(split: str, name: str, kind: str, **fixed: Any) -> None:
    """Enter a family of masked language models."""

    def build(draw: Draw) -> Workload:
        heads, depth, words = draw.size(4, 32, 4), draw.size(2, 32), draw.size(8000, 100_000, 8)
        batch, length, dtype = draw.batch(8, 1024), draw.pick(64, 128, 512), precision(draw)
        config = getattr(_HUB, f"{kind}Config")(
            vocab_size=words, hidden_size=64 * heads, intermediate_size=256 * heads,
            num_hidden_layers=depth, num_attention_heads=heads, max_position_embeddings=512 + 8,
            **_NO_DROPOUT, **fixed,
        )  # fmt: skip
        model = lambda: Named(getattr(_HUB, f"{kind}ForMaskedLM")(config), ("input_ids",))  # noqa: E731
        return tensors(model, (batch, length), (batch, length), dtypes="ll", dtype=dtype)

    FAMILIES[name] = Family(split, build)


_NO_DROPOUT = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0,
    "dropout": 0.0, "activation_dropout": 0.0, "dropout_rate": 0.0,
}  # fmt: skip

_masked(TRAIN, "bert", "Bert")
_masked(TRAIN, "electra", "Electra", embedding_size=256)
_masked(
    TEST, "deberta", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"],
    position_buckets=64, max_relative_positions=256,
)  # fmt: skip


def _images(split: str, name: str, kind: str, sizes: Callable[[Draw], dict[str, Any]]) -> None:
    """Enter a family of classifiers of images."""

    def build(draw: Draw) -> Workload:
        batch, options = draw.batch(16, 2048), sizes(draw)
        config = getattr(_HUB, f"{kind}Config")(num_labels=1000, **options)
        size = options.get("image_size", draw.pick(128, 224))
        made = f"{kind}ForImageClassification"
        model = lambda: Named(getattr(_HUB, made)(config), ("pixel_values",))  # noqa: E731
        return tensors(model, (batch, 3, size, size), (batch,))

    FAMILIES[name] = Family(split, build)


def _patches(draw: Draw) -> dict[str, Any]:
    heads = draw.size(3, 24)
    return {
        "hidden_size": 64 * heads, "num_attention_heads": heads, "intermediate_size": 256 * heads,
        "num_hidden_layers": draw.size(4, 40), "image_size": 224, "patch_size": draw.pick(14, 16),
    } | _NO_DROPOUT  # fmt: skip


def _stages(draw: Draw) -> dict[str, Any]:
    width, depth = draw.size(32, 256, 16), draw.size(2, 12)
    return {"hidden_sizes": [width << k for k in range(4)], "depths": [2, 2, depth, 2]}


def _windows(draw: Draw) -> dict[str, Any]:
    width = 32 * draw.size(2, 8)
    heads = [width // 32 << k for k in range(4)]
    depths = [2, 2, 2 * draw.size(1, 6), 2]
    fixed = {"image_size": 224, "drop_path_rate": 0.0} | _NO_DROPOUT
    return {"embed_dim": width, "num_heads": heads, "depths": depths} | fixed


_images(TRAIN, "vit", "ViT", _patches)
_images(TRAIN, "resnet", "ResNet", _stages)
_images(VALIDATION, "regnet", "RegNet", lambda draw: _stages(draw) | {"groups_width": 16})
_images(TEST, "convnext", "ConvNext", _stages)
_images(TEST, "swin", "Swin", _windows)


def _pairs(split: str, name: str, kind: str, sizes: Callable[[Draw], dict[str, Any]]) -> None:
    """Enter a family of encoders with decoders."""

    def build(draw: Draw) -> Workload:
        batch, dtype, words = draw.batch(8, 512), precision(draw), draw.size(8000, 100_000, 8)
        config = getattr(_HUB, f"{kind}Config")(
            vocab_size=words, use_cache=False, **_NO_DROPOUT, **sizes(draw)
        )
        names = ("input_ids", "decoder_input_ids")
        made = f"{kind}ForConditionalGeneration"
        model = lambda: Named(getattr(_HUB, made)(config), names)  # noqa: E731
        shapes = (batch, draw.pick(64, 256, 512)), (batch, draw.pick(32, 128))
        return tensors(model, *shapes, shapes[1], dtypes="lll", dtype=dtype)

    FAMILIES[name] = Family(split, build)


def _bart(draw: Draw) -> dict[str, Any]:
    heads = draw.size(4, 20, 4)
    return {
        "d_model": 64 * heads, "encoder_layers": draw.size(2, 16),
        "decoder_layers": draw.size(2, 16), "encoder_attention_heads": heads,
        "decoder_attention_heads": heads, "encoder_ffn_dim": 256 * heads,
        "decoder_ffn_dim": 256 * heads,
    }  # fmt: skip


def _t5(draw: Draw) -> dict[str, Any]:
    heads = draw.size(4, 32, 4)
    return {
        "d_model": 64 * heads, "d_ff": 64 * heads * draw.pick(3, 4), "num_heads": heads,
        "num_layers": draw.size(2, 12), "num_decoder_layers": draw.size(2, 12),
    }  # fmt: skip


_pairs(TRAIN, "bart", "Bart", _bart)
_pairs(TEST, "t5", "T5", _t5)


@family(TEST)
def whisper(draw: Draw) -> Workload:
    """Convolutions and an encoder of sound below a decoder of words."""
    heads, batch, dtype = draw.size(4, 20, 2), draw.batch(8, 256), precision(draw)
    config = _HUB.WhisperConfig(
        d_model=64 * heads, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=256 * heads, decoder_ffn_dim=256 * heads,
        encoder_layers=draw.size(2, 24), decoder_layers=draw.size(2, 24), use_cache=False,
        max_source_positions=500, **_NO_DROPOUT,
    )  # fmt: skip
    model = lambda: Named(  # noqa: E731
        _HUB.WhisperForConditionalGeneration(config), ("input_features", "decoder_input_ids")
    )
    shapes = (batch, 80, 1000), (batch, 64), (batch, 64)
    return tensors(model, *shapes, dtypes="fll", dtype=dtype)


@family(TEST)
def segments(draw: Draw) -> Workload:
    """Attention over images at four scales, and a head that reads all of them."""
    width, batch = draw.size(32, 96, 32), draw.batch(8, 256)
    config = _HUB.SegformerConfig(
        hidden_sizes=[width, 2 * width, 5 * width, 8 * width],
        depths=[2, draw.size(2, 6), draw.size(2, 24), 3], num_labels=150, drop_path_rate=0.0,
        classifier_dropout_prob=0.0, decoder_hidden_size=draw.size(128, 768, 64), **_NO_DROPOUT,
    )  # fmt: skip

    def model() -> nn.Module:
        return Named(_HUB.SegformerForSemanticSegmentation(config), ("pixel_values",))

    size = draw.pick(128, 256)
    labels = batch, 150, size // 4, size // 4
    return tensors(model, (batch, 3, size, size), labels, dtypes="ff")
