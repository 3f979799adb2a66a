"""Model families of any batch and width, for peaks of memory; those kept aside are held out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from families.family import Batch
from heterog.graph.workload import Workload

Made = tuple[Callable[[], nn.Module], Callable[[], Batch]]
"""Makes the model, and its batch, for a batch size and a width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A family of models.

    Attributes:
        make: Takes a batch size and a width.
        loss: See ``Workload``.
        optimizer: Class of the optimizer.
        options: Its options.
        is_aside: Whether no rule was made with its peaks in view.
    """

    make: Callable[[int, int], Made]
    loss: Any = functional.cross_entropy
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    options: Mapping[str, Any] = field(default_factory=dict)
    is_aside: bool = False

    def workload(self, batch: int, width: int) -> Workload:
        """The workload of a size."""
        model, example = self.make(batch, width)
        options = dict(self.options)
        return Workload(model, example(), self.loss, self.optimizer, options)


SIZED: dict[str, Sized] = {}


def sized(name: str, **options: Any) -> Callable[[Callable[[int, int], Made]], None]:
    """Add a family."""

    def add(make: Callable[[int, int], Made]) -> None:
        SIZED[name] = Sized(make=make, **options)

    return add


class Called(nn.Module):
    """Modules by name, and a function of them and the inputs."""

    def __init__(self, parts: Mapping[str, nn.Module], call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(dict(parts))
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the function."""
        return self.call(self.parts, *inputs)


def _labels(batch: int, classes: int = 10) -> Tensor:
    return torch.randint(0, classes, (batch,))


def _words(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def _flat_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@sized("bag_of_words", options={"weight_decay": 0.01})
def _bag(batch: int, width: int) -> Made:
    """A big embedding, its mean, two layers."""

    def call(net: Any, words: Tensor) -> Tensor:
        return net["out"](torch.relu(net["in"](net["table"](words).mean(1))))

    parts = {
        "table": nn.Embedding(20_000, width),
        "in": nn.Linear(width, 2 * width),
        "out": nn.Linear(2 * width, 10),
    }
    return partial(Called, parts, call), lambda: (_words(batch, 16, 20_000), _labels(batch))


@sized("dlrm", optimizer=torch.optim.Adagrad, loss=functional.binary_cross_entropy_with_logits)
def _dlrm(batch: int, width: int) -> Made:
    """Tables of categories, a network for numbers, products of pairs."""

    def call(net: Any, numbers: Tensor, kinds: Tensor) -> Tensor:
        found = [net[f"table{i}"](kinds[:, i]) for i in range(6)]
        every = torch.stack([net["bottom"](numbers), *found], 1)
        pairs = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return net["top"](torch.cat([every.flatten(1), pairs], 1)).squeeze(1)

    tables = {f"table{i}": nn.Embedding(3_000, width) for i in range(6)}
    bottom = nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, width))
    top = nn.Sequential(nn.Linear(7 * width + 49, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))
    parts = tables | {"bottom": bottom, "top": top}
    return partial(Called, parts, call), lambda: (
        torch.randn(batch, 13),
        _words(batch, 6, 3_000),
        torch.rand(batch),
    )


@sized("vit", optimizer=torch.optim.AdamW)
def _vit(batch: int, width: int) -> Made:
    """Patches by a convolution, two layers of torch's encoder."""

    def call(net: Any, images: Tensor) -> Tensor:
        tokens = net["patch"](images).flatten(2).transpose(1, 2)
        return net["head"](net["encoder"](tokens).mean(1))

    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
    )
    parts = {
        "patch": nn.Conv2d(3, width, 8, 8),
        "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "head": nn.Linear(width, 10),
    }
    return partial(Called, parts, call), lambda: (torch.randn(batch, 3, 64, 64), _labels(batch))


@sized("relative_attention", optimizer=torch.optim.RMSprop)
def _relative(batch: int, width: int) -> Made:
    """Attention by hand with learned biases of distances."""
    length, heads = 32, 4

    def call(net: Any, tokens: Tensor) -> Tensor:
        q, k, v = net["qkv"](tokens).view(len(tokens), length, 3, heads, -1).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (width / heads) ** 0.5
        places = torch.arange(length, device=tokens.device)
        bias = net["bias"](places[:, None] - places[None] + length).permute(2, 0, 1)
        weights = (scores + bias).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
        return net["head"]((tokens + net["out"](mixed)).mean(1))

    parts = {
        "qkv": nn.Linear(width, 3 * width),
        "bias": nn.Embedding(2 * length, heads),
        "out": nn.Linear(width, width),
        "head": nn.Linear(width, 10),
    }
    return partial(Called, parts, call), lambda: (torch.randn(batch, 32, width), _labels(batch))


@sized("linear_attention")
def _linear_attention(batch: int, width: int) -> Made:
    """Attention without a softmax over keys."""

    def call(net: Any, tokens: Tensor) -> Tensor:
        q = functional.elu(net["q"](tokens)) + 1
        k = functional.elu(net["k"](tokens)) + 1
        v = net["v"](tokens)
        state = torch.einsum("btd,bte->bde", k, v)
        norm = 1 / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
        return net["head"](((q @ state) * norm).mean(1))

    parts: dict[str, nn.Module] = {name: nn.Linear(width, width) for name in "qkv"}
    parts["head"] = nn.Linear(width, 10)
    return partial(Called, parts, call), lambda: (torch.randn(batch, 64, width), _labels(batch))


@sized("unet", optimizer=torch.optim.AdamW, loss=functional.mse_loss)
def _unet(batch: int, width: int) -> Made:
    """Convolutions with GroupNorm, down and up again, and a skip."""

    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, 1, 1), nn.GroupNorm(4, b), nn.SiLU())

    def call(net: Any, images: Tensor) -> Tensor:
        top = net["in"](images)
        low = net["low"](functional.avg_pool2d(top, 2))
        up = net["up"](low)
        return net["out"](torch.cat([top, up], 1))

    parts = {
        "in": block(3, width),
        "low": block(width, 2 * width),
        "up": nn.Sequential(nn.Upsample(scale_factor=2), block(2 * width, width)),
        "out": nn.Conv2d(2 * width, 3, 3, 1, 1),
    }
    return partial(Called, parts, call), lambda: (
        torch.randn(batch, 3, 16, 16),
        torch.randn(batch, 3, 16, 16),
    )


@sized("separable", optimizer=torch.optim.SGD, options={"momentum": 0.9, "weight_decay": 1e-4})
def _separable(batch: int, width: int) -> Made:
    """Inverted residuals: depthwise convolutions, BatchNorm, squeeze and excitation."""

    def call(net: Any, images: Tensor) -> Tensor:
        x = net["stem"](images)
        y = net["wide"](x)
        y = y * torch.sigmoid(net["gate"](y.mean((2, 3), keepdim=True)))
        return net["head"]((x + net["narrow"](y)).mean((2, 3)))

    wide = 4 * width
    parts = {
        "stem": nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.Hardswish()),
        "wide": nn.Sequential(
            nn.Conv2d(width, wide, 1),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
        ),
        "gate": nn.Conv2d(wide, wide, 1),
        "narrow": nn.Sequential(nn.Conv2d(wide, width, 1), nn.BatchNorm2d(width)),
        "head": nn.Linear(width, 10),
    }
    return partial(Called, parts, call), lambda: (torch.randn(batch, 3, 32, 32), _labels(batch))


@sized("wavenet", loss=functional.mse_loss)
def _wavenet(batch: int, width: int) -> Made:
    """Dilated convolutions of sequences, gated, with sums of skips."""

    def call(net: Any, sound: Tensor) -> Tensor:
        x = net["in"](sound)
        total = torch.zeros_like(x)
        for i in range(3):
            both = net[f"dilated{i}"](functional.pad(x, (2**i, 0)))
            a, b = both.chunk(2, 1)
            made = net[f"mix{i}"](torch.tanh(a) * torch.sigmoid(b))
            x, total = x + made, total + made
        return net["out"](total)

    parts: dict[str, nn.Module] = {"in": nn.Conv1d(1, width, 1), "out": nn.Conv1d(width, 1, 1)}
    for i in range(3):
        parts[f"dilated{i}"] = nn.Conv1d(width, 2 * width, 2, dilation=2**i)
        parts[f"mix{i}"] = nn.Conv1d(width, width, 1)
    return partial(Called, parts, call), lambda: (
        torch.randn(batch, 1, 128),
        torch.randn(batch, 1, 128),
    )


@sized("lstm", loss=_flat_loss, optimizer=torch.optim.RMSprop, options={"centered": True})
def _lstm(batch: int, width: int) -> Made:
    """An embedding, two layers of an LSTM, a head over the vocabulary."""

    def call(net: Any, words: Tensor) -> Tensor:
        return net["head"](net["layers"](net["table"](words))[0])

    parts = {
        "table": nn.Embedding(1_000, width),
        "layers": nn.LSTM(width, width, 2, batch_first=True),
        "head": nn.Linear(width, 1_000),
    }
    return partial(Called, parts, call), lambda: (
        _words(batch, 12, 1_000),
        _words(batch, 12, 1_000),
    )


@sized("experts")
def _experts(batch: int, width: int) -> Made:
    """A dense mixture of four experts by the weights of a router."""

    def call(net: Any, tokens: Tensor) -> Tensor:
        weights = net["router"](tokens).softmax(-1)
        outputs = [net[f"expert{i}"](tokens) for i in range(4)]
        return net["head"]((torch.stack(outputs, -1) * weights[:, :, None]).sum(-1).mean(1))

    parts: dict[str, nn.Module] = {"router": nn.Linear(width, 4), "head": nn.Linear(width, 10)}
    for i in range(4):
        parts[f"expert{i}"] = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
    return partial(Called, parts, call), lambda: (torch.randn(batch, 16, width), _labels(batch))


@sized("messages", options={"amsgrad": True}, loss=functional.mse_loss)
def _messages(batch: int, width: int) -> Made:
    """Messages over edges of a fixed graph, summed by ``index_add``."""
    draw = torch.Generator().manual_seed(0)
    source, target = torch.randint(0, 24, (2, 96), generator=draw)

    def call(net: Any, nodes: Tensor) -> Tensor:
        x = net["in"](nodes)
        for i in range(2):
            sent = net[f"edge{i}"](torch.cat([x[:, source], x[:, target]], -1)).relu()
            x = x + torch.zeros_like(x).index_add(1, target, sent)
        return net["out"](x)

    parts = {
        "in": nn.Linear(8, width),
        "edge0": nn.Linear(2 * width, width),
        "edge1": nn.Linear(2 * width, width),
        "out": nn.Linear(width, 1),
    }
    return partial(Called, parts, call), lambda: (
        torch.randn(batch, 24, 8),
        torch.randn(batch, 24, 1),
    )


@sized("mixer", optimizer=torch.optim.NAdam)
def _mixer(batch: int, width: int) -> Made:
    """Perceptrons over tokens and over channels in turn."""

    def call(net: Any, tokens: Tensor) -> Tensor:
        x = tokens
        for i in range(2):
            x = x + net[f"tokens{i}"](net[f"a{i}"](x).transpose(1, 2)).transpose(1, 2)
            x = x + net[f"channels{i}"](net[f"b{i}"](x))
        return net["head"](x.mean(1))

    parts: dict[str, nn.Module] = {"head": nn.Linear(width, 10)}
    for i in range(2):
        parts[f"a{i}"], parts[f"b{i}"] = nn.LayerNorm(width), nn.LayerNorm(width)
        parts[f"tokens{i}"] = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        parts[f"channels{i}"] = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
    return partial(Called, parts, call), lambda: (torch.randn(batch, 32, width), _labels(batch))


@sized("fields", optimizer=torch.optim.Adamax, loss=functional.mse_loss)
def _fields(batch: int, width: int) -> Made:
    """Coordinates as sines and cosines, a perceptron with a skip."""

    def call(net: Any, places: Tensor) -> Tensor:
        scaled = (places[..., None] * 2.0 ** torch.arange(6, device=places.device)).flatten(-2)
        encoded = torch.cat([scaled.sin(), scaled.cos()], -1)
        x = net["a"](encoded).relu()
        x = net["b"](x).relu()
        return net["c"](torch.cat([x, encoded], -1)).sigmoid()

    parts = {
        "a": nn.Linear(36, width),
        "b": nn.Linear(width, width),
        "c": nn.Linear(width + 36, 3),
    }
    return partial(Called, parts, call), lambda: (
        torch.randn(batch, 64, 3),
        torch.rand(batch, 64, 3),
    )


@sized("lora", optimizer=torch.optim.AdamW)
def _lora(batch: int, width: int) -> Made:
    """Frozen layers, each with a product of two small matrices that are trained."""

    def call(net: Any, tokens: Tensor) -> Tensor:
        x = tokens
        for i in range(3):
            x = (net[f"whole{i}"](x) + net[f"up{i}"](net[f"down{i}"](x))).relu()
        return net["head"](x.mean(1))

    parts: dict[str, nn.Module] = {"head": nn.Linear(width, 10)}
    for i in range(3):
        parts[f"whole{i}"] = nn.Linear(width, width).requires_grad_(False)
        parts[f"down{i}"] = nn.Linear(width, 4, bias=False)
        parts[f"up{i}"] = nn.Linear(4, width, bias=False)
    return partial(Called, parts, call), lambda: (torch.randn(batch, 32, width), _labels(batch))


# --- kept aside ---------------------------------------------------------------------------------


@sized("grouped_queries", is_aside=True, loss=_flat_loss, optimizer=torch.optim.AdamW)
def _grouped(batch: int, width: int) -> Made:
    """A language model with RMSNorm, grouped queries and SwiGLU."""
    length, heads = 24, 4

    def call(net: Any, words: Tensor) -> Tensor:
        x = net["table"](words)
        y = net["norm0"](x)
        q = net["q"](y).view(len(words), length, heads, -1).transpose(1, 2)
        k, v = (
            net[n](y).view(len(words), length, 2, -1).transpose(1, 2).repeat_interleave(2, 1)
            for n in "kv"
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + net["o"](mixed.transpose(1, 2).flatten(2))
        y = net["norm1"](x)
        x = x + net["down"](functional.silu(net["gate"](y)) * net["up"](y))
        return net["head"](x)

    parts = {
        "table": nn.Embedding(2_000, width),
        "norm0": nn.RMSNorm(width),
        "norm1": nn.RMSNorm(width),
        "q": nn.Linear(width, width, bias=False),
        "k": nn.Linear(width, width // 2, bias=False),
        "v": nn.Linear(width, width // 2, bias=False),
        "o": nn.Linear(width, width, bias=False),
        "gate": nn.Linear(width, 3 * width, bias=False),
        "up": nn.Linear(width, 3 * width, bias=False),
        "down": nn.Linear(3 * width, width, bias=False),
        "head": nn.Linear(width, 2_000, bias=False),
    }
    return partial(Called, parts, call), lambda: (
        _words(batch, 24, 2_000),
        _words(batch, 24, 2_000),
    )


@sized("autoencoder", is_aside=True, loss=functional.mse_loss)
def _autoencoder(batch: int, width: int) -> Made:
    """Convolutions with strides, and transposed ones back."""
    parts = {
        "down": nn.Sequential(
            *(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2)),
        ),
        "up": nn.Sequential(
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU()),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        ),
    }
    return partial(Called, parts, lambda net, x: net["up"](net["down"](x))), lambda: (
        torch.randn(batch, 3, 32, 32),
        torch.randn(batch, 3, 32, 32),
    )


@sized("two_towers", is_aside=True, optimizer=torch.optim.SGD, options={"momentum": 0.9})
def _towers(batch: int, width: int) -> Made:
    """Two big tables, a perceptron of each, scores by a product over many classes."""

    def call(net: Any, users: Tensor) -> Tensor:
        user = functional.normalize(net["tower"](net["left"](users)), dim=-1)
        item = functional.normalize(net["right"].weight, dim=-1)
        return user @ item.T / 0.1

    parts = {
        "left": nn.Embedding(10_000, width),
        "right": nn.Embedding(3_000, width),
        "tower": nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        ),
    }
    return partial(Called, parts, call), lambda: (
        torch.randint(0, 10_000, (batch,)),
        _labels(batch, 3_000),
    )


@sized("gru_attention", is_aside=True, loss=_flat_loss)
def _translator(batch: int, width: int) -> Made:
    """A GRU over each sequence; the second attends to the first."""

    def call(net: Any, words: Tensor) -> Tensor:
        first, _ = net["encoder"](net["table"](words))
        second, _ = net["decoder"](net["table"](words.flip(1)))
        mixed = (second @ first.transpose(1, 2)).softmax(-1) @ first
        return net["head"](torch.cat([second, mixed], -1))

    parts = {
        "table": nn.Embedding(800, width),
        "encoder": nn.GRU(width, width, batch_first=True, bidirectional=False),
        "decoder": nn.GRU(width, width, batch_first=True),
        "head": nn.Linear(2 * width, 800),
    }
    return partial(Called, parts, call), lambda: (_words(batch, 8, 800), _words(batch, 8, 800))


@sized("gated_scan", is_aside=True, optimizer=torch.optim.Adadelta)
def _scan(batch: int, width: int) -> Made:
    """Gates, a cumulative sum over time, and a norm."""

    def call(net: Any, tokens: Tensor) -> Tensor:
        x = tokens
        for i in range(2):
            gate, value = net[f"in{i}"](x).chunk(2, -1)
            decay = functional.logsigmoid(gate).cumsum(1)
            state = (value * (-decay).exp().clamp(max=1e4)).cumsum(1) * decay.exp()
            x = net[f"norm{i}"](x + net[f"out{i}"](state * functional.silu(value)))
        return net["head"](x[:, -1])

    parts: dict[str, nn.Module] = {"head": nn.Linear(width, 10)}
    for i in range(2):
        parts[f"in{i}"] = nn.Linear(width, 2 * width)
        parts[f"out{i}"] = nn.Linear(width, width)
        parts[f"norm{i}"] = nn.LayerNorm(width)
    return partial(Called, parts, call), lambda: (torch.randn(batch, 32, width), _labels(batch))


@sized("convnext", is_aside=True, optimizer=torch.optim.AdamW, options={"weight_decay": 0.05})
def _convnext(batch: int, width: int) -> Made:
    """Wide depthwise convolutions, LayerNorm over permuted channels, scaled residual sums."""

    def call(net: Any, images: Tensor) -> Tensor:
        x = net["stem"](images)
        for i in range(2):
            y = net[f"depth{i}"](x).permute(0, 2, 3, 1)
            y = net[f"wide{i}"](net[f"norm{i}"](y))
            x = x + net[f"narrow{i}"](functional.gelu(y)).permute(0, 3, 1, 2)
        return net["head"](x.mean((2, 3)))

    parts: dict[str, nn.Module] = {
        "stem": nn.Conv2d(3, width, 4, 4),
        "head": nn.Linear(width, 10),
    }
    for i in range(2):
        parts[f"depth{i}"] = nn.Conv2d(width, width, 7, 1, 3, groups=width)
        parts[f"norm{i}"] = nn.LayerNorm(width)
        parts[f"wide{i}"] = nn.Linear(width, 4 * width)
        parts[f"narrow{i}"] = nn.Linear(4 * width, width)
    return partial(Called, parts, call), lambda: (torch.randn(batch, 3, 32, 32), _labels(batch))
