"""The grammar of drawn models: own modules by what is special about their graphs."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from training_models import Cells, LanguageModel

from drawing.families import TEST, TRAIN, VALIDATION, Draw, family, precision, tensors
from heterog import Workload
from heterog.zoo.graphs import GraphConvolutions, GraphSage, full_batch
from heterog.zoo.language import EncoderLayer, MultiHeadAttention
from heterog.zoo.moe import BertMoe, moe_loss
from heterog.zoo.vision import ConvNorm

CLASSES = 1000


def dense(*widths: int) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@family(TRAIN)
def chain(draw: Draw) -> Workload:
    """Linear layers: nearly all communication."""
    widths = [draw.size(128, 16384, 64) for _ in range(draw.size(3, 40))]
    batch = draw.batch(64, 65536)
    return tensors(lambda: dense(*widths, CLASSES), (batch, widths[0]), (batch,))


@family(TRAIN)
def convolutions(draw: Draw) -> Workload:
    """A chain of convolutions below wide linear layers."""
    width, depth, size = draw.size(16, 96, 8), draw.size(4, 14), draw.pick(32, 64, 128, 224)
    head, batch = draw.size(256, 8192, 64), draw.batch(16, 2048)

    def model() -> nn.Module:
        layers: list[nn.Module] = [ConvNorm(3, width, 3, 2)]
        now = width
        for index in range(depth):
            down = index % 3 == 2 and now < 8 * width
            layers.append(ConvNorm(now, 2 * now if down else now, 3, 2 if down else 1))
            now = 2 * now if down else now
        pool = [nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers, *pool, dense(4 * now, head, head, CLASSES))

    return tensors(model, (batch, 3, size, size), (batch,))


@family(TRAIN)
def branches(draw: Draw) -> Workload:
    """Branching cells with skips over one cell."""
    width, depth, batch = draw.size(32, 384, 16), draw.size(3, 24), draw.batch(16, 1024)
    size = draw.pick(64, 128, 224)
    return tensors(lambda: Cells(depth, width), (batch, 3, size, size), (batch,))


@family(TRAIN)
def language(draw: Draw) -> Workload:
    """Transformer layers below a tied or an own head."""
    width, depth = draw.size(256, 6144, 128), draw.size(2, 40)
    words, length = draw.size(4000, 160_000, 8), draw.pick(32, 128, 512, 2048)
    tied, batch, dtype = draw.pick(True, False), draw.batch(8, 1024), precision(draw)
    model = lambda: LanguageModel(words, width, depth, tied=tied)  # noqa: E731
    return tensors(model, (batch, length), (batch, length), dtypes="ll", dtype=dtype)


class Decoder(nn.Module):
    """Self-attention, attention to an encoded source, and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = MultiHeadAttention(width, width // 64, causal=True)
        self.cross = MultiHeadAttention(width, width // 64)
        self.wide = dense(width, 4 * width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Maps target and source to the shape of the target."""
        x = x + self.own(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), memory)
        return x + self.wide(self.norms[2](x))


class Translator(nn.Module):
    """Encoder and decoder of unlike depths with an embedding for each."""

    def __init__(self, words: int, width: int, encoder: int, decoder: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.Sequential(
            *(EncoderLayer(width, 4 * width, width // 64, nn.ReLU) for _ in range(encoder))
        )
        self.decoder = nn.ModuleList(Decoder(width) for _ in range(decoder))
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Maps tokens of both to logits of the target."""
        memory = self.encoder(self.source(source))
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


@family(TRAIN)
def encoder_decoder(draw: Draw) -> Workload:
    """An encoder that every layer of a decoder reads."""
    width, words = draw.size(256, 2048, 64), draw.size(4000, 100_000, 8)
    depths = draw.size(2, 24), draw.size(2, 24)
    source, target = draw.pick(32, 128, 512), draw.pick(16, 64, 256)
    batch, dtype = draw.batch(16, 1024), precision(draw)
    model = lambda: Translator(words, width, *depths)  # noqa: E731
    shapes = (batch, source), (batch, target), (batch, target)
    return tensors(model, *shapes, dtypes="lll", dtype=dtype)


class WideTable(nn.Module):
    """One table of embeddings whose rows are summed, below linear layers."""

    def __init__(self, rows: int, width: int, inner: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.top = dense(width, *[inner] * depth, 1)

    def forward(self, words: Tensor) -> Tensor:
        """Maps sets of rows to a number."""
        return self.top(self.table(words).sum(1))


@family(TRAIN)
def wide_table(draw: Draw) -> Workload:
    """A huge embedding: much memory, little work."""
    sizes = (
        draw.size(10**5, 10**7),
        draw.size(16, 512, 8),
        draw.size(64, 4096, 64),
        draw.size(1, 8),
    )
    batch, many = draw.batch(64, 16384), draw.size(4, 128)
    return tensors(lambda: WideTable(*sizes), (batch, many), (batch, 1), dtypes="lf")


@family(TRAIN)
def experts(draw: Draw) -> Workload:
    """Transformer layers of which every second has experts."""
    heads, depth, count = draw.size(4, 24), 2 * draw.size(1, 10), draw.pick(4, 8, 16, 32)
    batch, length = draw.batch(8, 512), draw.pick(32, 64, 128)
    made = tensors(
        lambda: BertMoe(64 * heads, depth, heads, count),
        (batch, length), (batch, length), dtypes="ll",
    )  # fmt: skip
    return Workload(made.model, made.example_batch, moe_loss, made.optimizer)


@family(TRAIN)
def sparse_products(draw: Draw) -> Workload:
    """Graph convolutions on a whole graph: one sample, or few."""
    return _on_a_graph(draw, GraphConvolutions)


def _on_a_graph(draw: Draw, network: type[GraphConvolutions] | type[GraphSage]) -> Workload:
    widths = [draw.size(64, 1024, 8) for _ in range(draw.size(2, 6))]
    return full_batch(
        "drawn",
        network,
        draw.batch_size or draw.pick(1, 1, 2, 8, 16),
        num_nodes=draw.size(2000, 30_000),
        mean_degree=float(draw.size(4, 40)),
        widths=(*widths, draw.size(8, 128)),
    )


class Recurrence(nn.Module):
    """Layers of gated cells, step by step, below a head."""

    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.gates = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Maps tokens to logits."""
        steps = list(self.embedding(words).unbind(1))
        for gate in self.gates:
            state = torch.zeros_like(steps[0])
            for index, x in enumerate(steps):
                new, keep = gate(torch.cat([x, state], 1)).chunk(2, 1)
                state = torch.sigmoid(keep) * state + torch.tanh(new)
                steps[index] = state
        return self.head(torch.stack(steps, 1))


@family(TRAIN)
def recurrence(draw: Draw) -> Workload:
    """Cells that read the step before them."""
    words, width, depth = draw.size(2000, 50_000, 8), draw.size(128, 2048, 64), draw.size(1, 6)
    batch, length = draw.batch(16, 2048), draw.size(8, 32)
    model = lambda: Recurrence(words, width, depth)  # noqa: E731
    return tensors(model, (batch, length), (batch, length), dtypes="ll")


class Hourglass(nn.Module):
    """Linear layers that narrow and widen again, with skips across."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [max(width >> index, 32) for index in range(depth + 1)]
        self.down = nn.ModuleList(dense(*pair) for pair in pairwise(widths))
        self.up = nn.ModuleList(dense(after, before) for before, after in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Maps features to as many features."""
        skips: list[Tensor] = []
        for layer in self.down:
            skips.append(x)
            x = functional.gelu(layer(x))
        for layer, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = functional.gelu(layer(x)) + skip
        return x


@family(VALIDATION)
def hourglass(draw: Draw) -> Workload:
    """An encoder and a decoder with skips across, of linear layers."""
    width, depth, batch = draw.size(1024, 16384, 64), draw.size(3, 8), draw.batch(64, 16384)
    return tensors(lambda: Hourglass(width, depth), (batch, width), (batch, width), dtypes="ff")


class Mixer(nn.Module):
    """Linear layers over positions and over channels in turn."""

    def __init__(self, positions: int, width: int, depth: int) -> None:
        super().__init__()
        self.over_positions = nn.ModuleList(
            dense(positions, 2 * positions, positions) for _ in range(depth)
        )
        self.over_channels = nn.ModuleList(dense(width, 4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Maps positions of channels to logits."""
        for positions, channels in zip(self.over_positions, self.over_channels, strict=True):
            x = x + positions(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return self.head(x.mean(1))


@family(VALIDATION)
def mixer(draw: Draw) -> Workload:
    """Layers over positions and over channels."""
    positions, width, depth = draw.size(16, 512, 8), draw.size(128, 2048, 64), draw.size(4, 24)
    batch = draw.batch(32, 2048)
    model = lambda: Mixer(positions, width, depth)  # noqa: E731
    return tensors(model, (batch, positions, width), (batch,), dtype=precision(draw))


class UShape(nn.Module):
    """Convolutions down and up with skips across."""

    def __init__(self, width: int, depth: int, repeats: int) -> None:
        super().__init__()
        widths = [width << index for index in range(depth + 1)]

        def block(before: int, after: int) -> nn.Sequential:
            rest = (ConvNorm(after, after, 3) for _ in range(repeats - 1))
            return nn.Sequential(ConvNorm(before, after, 3), *rest)

        self.stem = block(3, width)
        self.down = nn.ModuleList(block(*pair) for pair in pairwise(widths))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(block(2 * a, a) for a, _ in pairwise(widths))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to images."""
        x = self.stem(x)
        skips: list[Tensor] = []
        for layer in self.down:
            skips.append(x)
            x = layer(functional.max_pool2d(x, 2))
        for wider, layer in zip(reversed(self.wider), reversed(self.up), strict=True):
            x = layer(torch.cat([wider(x), skips.pop()], 1))
        return self.head(x)


@family(TEST)
def u_shape(draw: Draw) -> Workload:
    """A U of convolutions."""
    sizes = draw.size(16, 96, 8), draw.size(2, 4), draw.size(1, 3)
    batch, size = draw.batch(8, 512), draw.pick(64, 128, 256)
    shape = batch, 3, size, size
    return tensors(lambda: UShape(*sizes), shape, shape, dtypes="ff")


class TwoTowers(nn.Module):
    """Two towers with a table each, whose outputs are compared within a sample."""

    def __init__(self, rows: tuple[int, int], width: int, inner: int, depths: tuple[int, int]):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(each, width) for each in rows)
        self.towers = nn.ModuleList(dense(width, *[inner] * depth, 128) for depth in depths)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Maps two sets of rows to how alike they are."""
        left, right = (
            functional.normalize(tower(table(words).mean(1)), dim=1)
            for tower, table, words in zip(self.towers, self.tables, (one, other), strict=True)
        )
        return (left * right).sum(1)


@family(TEST)
def two_towers(draw: Draw) -> Workload:
    """Two towers of unlike depths on tables of unlike sizes."""
    rows = draw.size(10**4, 5 * 10**6), draw.size(10**4, 5 * 10**6)
    width, inner = draw.size(32, 512, 8), draw.size(256, 8192, 64)
    depths, batch = (draw.size(2, 12), draw.size(2, 12)), draw.batch(64, 16384)
    shapes = (batch, draw.size(1, 64)), (batch, draw.size(1, 64)), (batch,)
    return tensors(lambda: TwoTowers(rows, width, inner, depths), *shapes, dtypes="llf")


class Tables(nn.Module):
    """Tables of unlike sizes, products of all pairs of rows, and linear layers."""

    def __init__(self, rows: tuple[int, ...], width: int, inner: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(each, width) for each in rows)
        self.bottom = dense(16, inner, width)
        many = len(rows) + 1
        self.top = dense(many * many + width, inner, inner, 1)

    def forward(self, numbers: Tensor, words: Tensor) -> Tensor:
        """Maps numbers and categories to a number."""
        first = self.bottom(numbers)
        rows = [table(words[:, index]) for index, table in enumerate(self.tables)]
        every = torch.stack([first, *rows], 1)
        return self.top(torch.cat([first, (every @ every.transpose(1, 2)).flatten(1)], 1))


@family(TEST)
def tables(draw: Draw) -> Workload:
    """A recommender with many huge embeddings."""
    rows = tuple(draw.size(100, 3 * 10**6) for _ in range(draw.size(4, 26)))
    width, inner, batch = draw.size(16, 256, 8), draw.size(128, 2048, 64), draw.batch(256, 32768)
    shapes = (batch, 16), (batch, len(rows)), (batch, 1)
    return tensors(lambda: Tables(rows, width, inner), *shapes, dtypes="flf")


@family(TEST)
def neighbours(draw: Draw) -> Workload:
    """Means over neighbours on a whole graph."""
    return _on_a_graph(draw, GraphSage)


@family(TEST)
def wide_convolutions(draw: Draw) -> Workload:
    """Few very wide convolutions: weights that cost more to send than to use."""
    width, depth, batch = draw.size(256, 2048, 64), draw.size(2, 8), draw.batch(32, 1024)
    size = draw.pick(8, 16, 32)

    def model() -> nn.Module:
        layers = [ConvNorm(width, width, draw_kernel) for draw_kernel in kernels]
        return nn.Sequential(
            nn.Conv2d(3, width, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(width, CLASSES),
        )  # fmt: skip

    kernels = [draw.pick(1, 3, 5) for _ in range(depth)]
    return tensors(model, (batch, 3, size, size), (batch,))


class StateSpace(nn.Module):
    """Layers that carry a diagonal state over positions by doubling steps."""

    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.inner = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.decay = nn.Parameter(torch.zeros(depth, width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Maps tokens to logits."""
        x = self.embedding(words)
        length = x.shape[1]
        layers = zip(self.inner, self.outer, self.norms, self.decay, strict=True)
        for inner, outer, norm, decay in layers:
            state, gate = inner(norm(x)).chunk(2, 2)
            factor, step = torch.sigmoid(decay), 1
            while step < length:
                before = functional.pad(state, (0, 0, step, 0))[:, :length]
                state, factor, step = state + factor * before, factor * factor, 2 * step
            x = x + outer(state * functional.silu(gate))
        return self.head(x)


@family(TEST)
def state_space(draw: Draw) -> Workload:
    """A recurrence that is computed over all positions at once."""
    words, width, depth = draw.size(4000, 100_000, 8), draw.size(256, 4096, 64), draw.size(2, 16)
    batch, length = draw.batch(8, 512), draw.pick(64, 256, 1024)
    model = lambda: StateSpace(words, width, depth)  # noqa: E731
    return tensors(model, (batch, length), (batch, length), dtypes="ll", dtype=precision(draw))
