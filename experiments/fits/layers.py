"""Layers of transformers as benson-guo/zorse (MIT) timed them: BERT, GPT, Llama, Mistral, ViT.

That program ran one layer on one GPU, in float32 or under float16 autocast: the parameters stay in
float32, and each product casts what it is given. Autocast keeps the casts of parameters, so that
the forward pass, timed fifteen times, casts them once. Kernels are those of Hugging Face's modules
of the time. Everything here is captured and priced, never run.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload

_PATCHES = 577
"""Positions of an image of 384 x 384 in patches of 16, and one for its class."""
_DROPOUT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes of a layer, and what it is captured with.

    ``is_fused`` tells whether attention is one kernel.
    """

    family: str
    hidden: int
    heads: int
    inner: int
    sequence: int
    is_half: bool
    is_fused: bool


_SIZES = {
    "bert_base": (768, 12, 3072), "bert_large": (1024, 16, 4096), "bert_xlarge": (1536, 24, 6144),
    "gpt_1.3b": (2048, 128, 8192), "gpt_2.7b": (2560, 80, 10240), "gpt_6.7b": (4096, 128, 16384),
    "llama_tiny": (2048, 32, 5632), "llama_3b": (3200, 32, 8640), "llama_7b": (4096, 32, 11008),
    "llama_13b": (5120, 40, 13824), "llama_33b": (6656, 52, 17920), "llama_65b": (8192, 64, 22016),
    "mistral_7b": (4096, 32, 14336), "vit_h": (1280, 16, 5120), "vit_g": (1664, 16, 8192),
    "vit_g_small": (1664, 16, 8192), "vit_e": (1792, 16, 15360), "vit_e_toy": (1792, 16, 15360),
}  # fmt: skip
"""Hidden size, heads, and width of the inner layer."""
_KEYS_OF_MISTRAL = 8


def layer_of(name: str, sequence: int, dtype: str, *, is_eager: bool) -> Layer | None:
    """The layer of a name in the program, ``None`` if it is not known.

    Args:
        name: Of the model in the program, with its prefix or without.
        sequence: Tokens of a sample; images have their own.
        dtype: ``"float32"``, or ``"float16"`` for autocast.
        is_eager: Whether the program writes Llama's attention out, as on a P40.
    """
    name = name.removeprefix("deepspeed")
    if name not in _SIZES:
        return None
    hidden, heads, inner = _SIZES[name]
    family = name.split("_")[0]
    return Layer(
        family=family,
        hidden=hidden,
        heads=heads,
        inner=inner,
        sequence=_PATCHES if family == "vit" else sequence,
        is_half=dtype == "float16",
        is_fused=family == "llama" and not is_eager,
    )


class _Linear(nn.Linear):
    """A product that casts its factors if ``is_half``, as autocast does."""

    def __init__(self, inputs: int, outputs: int, layer: Layer) -> None:
        super().__init__(inputs, outputs, bias=layer.family not in ("llama", "mistral"))
        self._dtype = torch.float16 if layer.is_half else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self._dtype)
        return functional.linear(x.to(self._dtype), self.weight.to(self._dtype), bias)


class _Norm(nn.Module):
    """A root-mean-square norm, written out in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def _rotated(x: Tensor, waves: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * waves + torch.cat((-x[..., half:], x[..., :half]), -1) * waves


class _Attention(nn.Module):
    """Attention by one kernel, or by two products and a softmax."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        width = layer.hidden // layer.heads
        self.key_heads = _KEYS_OF_MISTRAL if layer.family == "mistral" else layer.heads
        of_keys = self.key_heads * width
        if layer.family == "gpt":
            self.joint = _Linear(layer.hidden, 3 * layer.hidden, layer)
        else:
            self.query = _Linear(layer.hidden, layer.hidden, layer)
            self.key = _Linear(layer.hidden, of_keys, layer)
            self.value = _Linear(layer.hidden, of_keys, layer)
        self.out = _Linear(layer.hidden, layer.hidden, layer)
        self.width = width
        self.positions: Tensor
        self.register_buffer("positions", torch.ones(layer.sequence, width, dtype=self._dtype))
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(layer.sequence, layer.sequence))

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.layer.is_half else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.family == "gpt":
            query, key, value = self.joint(x).split(self.layer.hidden, dim=-1)
        else:
            query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            each.unflatten(-1, (-1, self.width)).transpose(1, 2) for each in (query, key, value)
        )
        if self.layer.family in ("llama", "mistral"):
            query, key = (_rotated(each, self.positions) for each in (query, key))
        repeats = self.layer.heads // self.key_heads
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        if self.layer.is_fused:
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            found = self._written_out(query, key, value)
        made: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return made

    def _written_out(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        if self.layer.family == "gpt":
            scores = scores * self.mask + -1e4 * (1 - self.mask)
        weights = scores.softmax(-1, dtype=torch.float32)
        if self.layer.family in ("bert", "gpt"):
            weights = functional.dropout(weights, _DROPOUT)
        return weights.to(self._dtype) @ value


class _TimedLayer(nn.Module):
    """A layer with its norms before or after, and its inner layer gated or not."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.family, self.is_gated = layer.family, layer.family in ("llama", "mistral")
        self.attention = _Attention(layer)
        self.wide = _Linear(layer.hidden, layer.inner, layer)
        self.gate = _Linear(layer.hidden, layer.inner, layer) if self.is_gated else None
        self.narrow = _Linear(layer.inner, layer.hidden, layer)
        norm = _Norm if self.is_gated else nn.LayerNorm
        self.first, self.second = norm(layer.hidden), norm(layer.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.family in ("bert", "gpt"):
            x = self.first(x + self._dropped(self.attention(x)))
            made: Tensor = self.second(x + self._dropped(self._inner(x)))
            return made
        x = x + self.attention(self.first(x))
        return x + self._inner(self.second(x))

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, _DROPOUT)

    def _inner(self, x: Tensor) -> Tensor:
        wide: Tensor = self.wide(x)
        if self.gate is not None:
            wide = functional.silu(self.gate(x)) * wide
        elif self.family == "gpt":
            bent = torch.tanh(math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide.pow(3.0)))
            wide = 0.5 * wide * (1.0 + bent)
        else:
            wide = functional.gelu(wide)
        made: Tensor = self.narrow(wide)
        return made


@lru_cache(maxsize=256)
def graph_of_layer(layer: Layer, batch: int) -> OpGraph:
    """One captured forward and backward pass; the loss and the update are of no account."""
    dtype = torch.float16 if layer.is_half else torch.float32
    shape = batch, layer.sequence, layer.hidden
    return capture(
        Workload(
            model=lambda: nn.Sequential(_Input(layer.hidden, dtype), _TimedLayer(layer)),
            example_batch=(torch.zeros(shape, dtype=dtype), torch.zeros(batch)),
            loss=lambda output, _: output.sum(),
            optimizer=torch.optim.SGD,
            name=f"{layer.family}_{layer.hidden}",
        )
    )


class _Input(nn.Module):
    """What makes the gradient of the layer's input wanted."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.zeros(hidden, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added
