"""Measured seconds of transformer layers on many cards, as the device models see them.

Rows have the columns of benson-guo/zorse (MIT): ``model, gpu, seq, dtype, phase, microbatch, ms``.
The column ``split`` says which rows are fitted; without it, rows of ``_TESTED`` are not. The time
of a layer is that of its matrix products, by given parameters, plus that of everything else.

The layers are those of BERT, GPT, Llama, Mistral and ViT.

The authors' program ran one layer on one GPU, in float32 or under float16 autocast: the parameters
stay in float32, and each product casts its inputs. Autocast keeps the casts of parameters, so that
the forward pass, timed fifteen times, casts them once. Kernels are those of Hugging Face's modules
of the time. Everything here is captured and priced, never run.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fits.kernels import errors_of
from heterog.cluster.catalog import device_type, matching_types
from heterog.cluster.hardware import DeviceType
from heterog.errors import UnknownNameError
from heterog.graph.batch_plan import batch_plan
from heterog.graph.capture import capture
from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.pricing.device_models.kernels import Use, local_sizes, products_of
from heterog.pricing.device_models.laws import Chip, ProductModel
from heterog.pricing.device_models.model import DeviceModels, product_unit
from heterog.pricing.device_models.parameters import chip_of

_PATCHES = 577
"""Positions of an image of 384 x 384 in patches of 16, and one for its class."""
_DROPOUT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes of a layer, and how it is captured.

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
        return self.out(found.transpose(1, 2).flatten(2))

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
            return self.second(x + self._dropped(self._inner(x)))
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
        return self.narrow(wide)


@lru_cache(maxsize=256)
def graph_of_layer(layer: Layer, batch: int) -> OpGraph:
    """One captured forward and backward pass; the loss and the update do not count."""
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
    """A module in front of the layer, so that the gradient of the layer's input is computed."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.zeros(hidden, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added


Row = Mapping[str, str]

_TESTED = ("llama_7b", "llama_33b", "vit_e", "gpt_6.7b", "bert_large")
_BATCH = 16
_PASSES = 15.0
"""Forward passes that share one cast of the parameters."""
_ADDED_BYTES = 12.0
"""Of each parameter, which a backward pass adds to its gradient in float32."""
_PHASES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD}
_SPELLED = {"watgpu": "A6000", "p100": "P100-16GB", "v100": "V100-16GB"}
_LARGEST = 64


def card_of(gpu: str) -> DeviceType | None:
    """The type of a name in the rows, ``None`` if the catalogue has no such card.

    >>> [card_of(name).name for name in ("a100x40", "rtx_3090", "v100-pciex32", "h100-nvl")]
    ['A100-40GB', 'RTX-3090', 'V100-PCIe-32GB', 'H100-NVL']
    """
    name = _SPELLED.get(gpu.lower(), gpu.lower().replace("_", " "))
    name = re.sub(r"(?<=\d)x(\d\d)$", r" \1gb", name)
    name = re.sub(r"(?<=pcie)x(\d\d)$", r" \1gb", name)
    try:
        return device_type(name)
    except UnknownNameError:
        return next(iter(matching_types(name)), None)


class _Pass(NamedTuple):
    """Products of one pass of a layer, and the seconds of its other kernels."""

    sizes: FloatArray  # [num_products, 4]
    num_bytes: FloatArray  # [num_products]
    weight: FloatArray  # [num_products], number of each times any factor on their seconds
    others_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayers:
    """Seconds of layers on one GPU type, whose products are one family's.

    Attributes:
        chip: Chip of the type, with the peak of the family.
        sizes: (batch, rows, columns, depth) of each product.  # [num_products, 4]
        num_bytes: Bytes that each reads and writes.  # [num_products]
        count: Number of them, times any factor on their seconds.  # [num_products]
        layer: Layer of each.  # [num_products]
        others_s: Seconds of all other kernels.  # [num_layers]
        seconds: Measured seconds.  # [num_layers]
        weight: Weight of a row in a fit, relative to a row of kernels measured alone.
    """

    chip: Chip
    sizes: FloatArray
    num_bytes: FloatArray
    count: FloatArray
    layer: NDArray[np.int64]
    others_s: FloatArray
    seconds: FloatArray
    weight: float = 1.0

    def log_errors(self, model: ProductModel) -> FloatArray:
        """log(predicted / measured) of each layer, weighted.  # [num_layers]"""
        alone = model.seconds(self.chip, self.sizes, self.num_bytes) - model.launch_s
        told = self.others_s + np.bincount(
            self.layer, self.count * alone, minlength=len(self.others_s)
        )
        return self.weight * np.log(told / self.seconds)


def measured_layers(rows: Sequence[Row], dtype: str) -> dict[str, tuple[MeasuredLayers, ...]]:
    """Rows of a dtype by type: those to fit, and those to test.

    Types whose products of 16 bits run on units for float32 are not among those of tensor cores.
    """
    by_type: dict[str, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for row in rows:
        kind = card_of(row["gpu"])
        name = row["model"].removeprefix("deepspeed")
        is_known = layer_of(name, 1, dtype, is_eager=False) is not None
        if (
            kind is None
            or row["dtype"] != dtype
            or int(row["microbatch"]) > _LARGEST
            or not is_known
        ):
            continue
        is_tested = row.get("split", "test" if name in _TESTED else "fit") == "test"
        by_type[kind.name][is_tested].append(row)
    return {
        name: tuple(_of_type(each, device_type(name)) for each in both)
        for name, both in by_type.items()
    }


def _of_type(rows: Sequence[Row], kind: DeviceType) -> MeasuredLayers:
    found = [_pass(row, kind) for row in rows]
    peak = kind.peak_flops_per_s["float32"]
    if rows and rows[0]["dtype"] == "float16":
        peak = product_unit(kind, "float16").peak_flops_per_s
    none = np.zeros((0, 4))
    return MeasuredLayers(
        chip=chip_of(kind, peak),
        sizes=np.concatenate([none, *(each.sizes for each in found)]),
        num_bytes=np.concatenate([none[:, 0], *(each.num_bytes for each in found)]),
        count=np.concatenate([none[:, 0], *(each.weight for each in found)]),
        layer=np.repeat(np.arange(len(found)), [len(each.weight) for each in found]),
        others_s=np.array([each.others_s for each in found]),
        seconds=np.array([float(row["ms"]) / 1e3 for row in rows]),
    )


@cache
def _captured(name: str, sequence: int, dtype: str, is_eager: bool) -> OpGraph:
    layer = layer_of(name, sequence, dtype, is_eager=is_eager)
    assert layer is not None
    return graph_of_layer(layer, _BATCH)


def _pass(row: Row, kind: DeviceType) -> _Pass:
    graph = _captured(
        row["model"].removeprefix("deepspeed"), int(row["seq"]), row["dtype"], kind.name == "P40"
    )
    return _priced(graph, kind, int(row["microbatch"]), row["phase"])


@cache
def _priced(graph: OpGraph, kind: DeviceType, samples: int, phase: str) -> _Pass:
    models = DeviceModels(host_s=0.0)
    share = _share_of_pass(graph, _PHASES[phase])
    seconds = models.op_seconds(graph, kind, samples)
    plan, products = batch_plan(graph), products_of(graph)
    chosen = np.flatnonzero(share[products.op] > 0.0).astype(np.int32)
    op = products.op[chosen]
    part = (plan.flops_fixed + samples * plan.flops_per_sample)[op] / graph.flops[op]
    moved = (plan.bytes_fixed + samples * plan.bytes_per_sample)[op] * products.bytes_share[chosen]
    sizes = local_sizes(products, chosen, part, moved / products.num_bytes[chosen])
    factors = models.in_training(kind.name)
    slower = np.ones(len(chosen))
    for number, each in enumerate(products.kinds):
        if product_unit(kind, each.dtype).is_tensor_core:
            of_use = factors.fused_attention if each.use == Use.ATTENTION else factors.products
            slower[products.factors[chosen] == number] = of_use
    launch_s, copy_s = models.copy_seconds(kind)
    others = np.where(np.isin(np.arange(graph.num_ops), op), 0.0, seconds) * share
    added = _ADDED_BYTES * graph.num_parameters * copy_s if phase == "backward" else 0.0
    return _Pass(
        sizes=sizes,
        num_bytes=moved / products.count[chosen],
        weight=products.count[chosen] * slower,
        others_s=float(others.sum() + launch_s * len(op) + added),
    )


def _share_of_pass(graph: OpGraph, phase: Phase) -> FloatArray:
    """How often each op ran in a timed pass: casts of parameters once in all, the loss never."""
    parameters = set(graph.parameters)
    is_cast = np.array(
        [op.kind.startswith("_to_copy") and op.inputs[0] in parameters for op in graph.ops]
    )
    share = np.array([float(op.phase == phase) for op in graph.ops])
    share[is_cast] /= _PASSES
    share[0] = 0.0  # makes the gradient of the input wanted
    loss = [index for index, op in enumerate(graph.ops) if op.phase == Phase.FORWARD][-2:]
    share[loss] = 0.0
    return share


def errors_by_card(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors of the shipped models on every card and dtype of the rows."""
    found = []
    for dtype in ("float16", "float32"):
        for name, both in measured_layers(rows, dtype).items():
            unit = product_unit(device_type(name), dtype)
            off = np.concatenate([each.log_errors(unit.model) for each in both])
            found.append({"dtype": dtype, "type": name, **asdict(errors_of(off))})
    return found
