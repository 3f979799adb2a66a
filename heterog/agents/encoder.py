"""Networks that encode a pair: embeddings of every block and every candidate.

``HeteroEncoder`` is ours. Messages pass between blocks that feed one another, between blocks and
devices, and along links. A candidate combines the embeddings of its devices. Then blocks and
candidates attend to themselves and to each other. ``PaperEncoder`` follows HeteroG (section 4.1):
graph attention over ops alone, then a sequence model over groups.
"""

import inspect
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, HeteroConv, MessagePassing, TransformerConv
from torch_geometric.utils import scatter, to_dense_batch

from heterog.agents.config import PolicyConfig
from heterog.agents.graph_data import FED_BY, FEEDS, IN, LINK, ON, RUNS, num_told
from heterog.envs.observation import (
    NUM_BLOCK_DEVICE_FEATURES,
    NUM_BLOCK_FEATURES,
    NUM_CANDIDATE_FEATURES,
    NUM_DEVICE_FEATURES,
    NUM_LINK_FEATURES,
)
from heterog.errors import named

_EDGE_FEATURES = {
    FEEDS: 1,
    FED_BY: 1,
    RUNS: NUM_BLOCK_DEVICE_FEATURES,
    ON: NUM_BLOCK_DEVICE_FEATURES,
    LINK: NUM_LINK_FEATURES,
}


def default_config(name: str) -> PolicyConfig:
    """Sizes of a policy with an encoder: the attribute ``sizes`` of its class, else defaults."""
    return PolicyConfig(encoder=name, **getattr(ENCODERS.get(name), "sizes", {}))


def make_encoder(config: PolicyConfig) -> nn.Module:
    """The encoder that a configuration names.

    Raises:
        UnknownNameError: there is none of that name.
    """
    encoder = named("encoder", config.encoder, ENCODERS)(config)
    remove_written_code(encoder)
    return encoder


def remove_written_code(network: nn.Module) -> None:
    """Remove files of code that PyG has written for a network's layers and has loaded.

    PyG leaves them in the temporary folder: two for each class of layers, in each process.
    """
    for kind in {type(each) for each in network.modules() if isinstance(each, MessagePassing)}:
        for method in (kind.propagate, kind.edge_updater):
            file = Path(inspect.getfile(method))
            if file.name.startswith(kind.__module__):  # else a file of PyG itself
                file.unlink(missing_ok=True)
                Path(cache_from_source(str(file))).unlink(missing_ok=True)


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


class _Attention(nn.Module):
    """Self- or cross-attention, then a feed-forward layer; pre-norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.other_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.out_norm = nn.LayerNorm(width)
        self.feed_forward = mlp(width, 2 * width, width)

    def forward(self, x: Tensor, other: Tensor, is_real: Tensor) -> Tensor:
        source = self.other_norm(other)
        found, _ = self.attention(
            self.norm(x), source, source, key_padding_mask=~is_real, need_weights=False
        )
        x = x + found
        out: Tensor = x + self.feed_forward(self.out_norm(x))
        return out


class AllJoined(NamedTuple):
    """Features of edges between all blocks and devices of a pair, padded.

    Attributes:
        seconds: Features of each block on each device.  # [B, G, D, NUM_BLOCK_DEVICE_FEATURES]
        links: Features of links from source devices.  # [B, S, D, NUM_LINK_FEATURES]
        told: Numbers of the source devices in the batch; see ``graphs_of``.  # [B, S]
        is_told: Which source devices are not padding.  # [B, S]
    """

    seconds: Tensor
    links: Tensor
    told: Tensor
    is_told: Tensor


def all_joined(graphs: Any) -> AllJoined:
    """The edges of a batch between all of its pairs' blocks and devices."""
    num_blocks, num_devices = (graphs[kind].ptr.diff().tolist() for kind in ("block", "device"))
    told = [num_told(count) for count in num_devices]
    size, blocks, devices, most = len(told), max(num_blocks), max(num_devices), max(told)
    seconds = torch.zeros(size, blocks, devices, NUM_BLOCK_DEVICE_FEATURES)
    links = torch.zeros(size, most, devices, NUM_LINK_FEATURES)
    numbers, is_told = torch.zeros(size, most, dtype=torch.long), torch.zeros(size, most) > 0
    sizes = zip(num_blocks, told, num_devices, strict=True)
    per_grid, per_pair = zip(*((own * d, each * d) for own, each, d in sizes), strict=True)
    of_blocks = graphs[ON].edge_attr.split(per_grid)
    of_links, sources = graphs[LINK].edge_attr.split(per_pair), graphs[LINK].edge_index[0]
    for pair, (own, first, count) in enumerate(
        zip(num_devices, sources.split(per_pair), told, strict=True)
    ):
        seconds[pair, : num_blocks[pair], :own] = of_blocks[pair].view(-1, own, seconds.shape[3])
        links[pair, :count, :own] = of_links[pair].view(-1, own, links.shape[3])
        numbers[pair, :count], is_told[pair, :count] = first[::own], True
    return AllJoined(seconds, links, numbers, is_told)


def attend(
    conv: TransformerConv, sources: Tensor, is_real: Tensor, targets: Tensor, features: Tensor
) -> Tensor:
    """Messages of a ``TransformerConv`` on a graph where every source feeds every target.

    With queries q, keys k, values v and an edge's features W x,

        a(t, s) = softmax over s of (q(t) . k(s) + (q(t) W) . x(s, t)) / sqrt(size)
        out(t) = sum over s of a(t, s) v(s) + W (sum over s of a(t, s) x(s, t))

    so that no edge needs a vector as wide as an embedding.

    Args:
        conv: The layer.
        sources: Embeddings of sources.  # [B, S, width]
        is_real: Whether a source is not padding.  # [B, S] bool
        targets: Embeddings of targets.  # [B, T, width]
        features: Features of edges.  # [B, S, T, F]

    Returns:
        # [B, T, heads * size]
    """
    heads, size = conv.heads, conv.out_channels
    query, key, value = (
        layer(nodes).unflatten(2, (heads, size)).transpose(1, 2)
        for layer, nodes in (
            (conv.lin_query, targets), (conv.lin_key, sources), (conv.lin_value, sources)
        )
    )  # each [B, heads, S or T, size]  # fmt: skip
    edge = conv.lin_edge.weight.view(heads, size, -1)
    by_feature = features.permute(3, 0, 2, 1)[:, :, None]  # [F, B, 1, T, S]
    asked = (query @ edge).permute(3, 0, 1, 2)[..., None]  # [F, B, heads, T, 1]
    scores = query @ key.mT + (asked * by_feature).sum(dim=0)
    scores = scores.masked_fill(~is_real[:, None, None], -torch.inf)
    weight = (scores / size**0.5).softmax(dim=3)
    seen = (weight * by_feature).sum(dim=4).permute(1, 2, 3, 0)  # [B, heads, T, F]
    out: Tensor = (weight @ value + seen @ edge.mT).transpose(1, 2).flatten(2)
    return out


class _Round(nn.Module):
    """One round of message passing over all edge types."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width, heads = config.width, config.num_heads
        self.norms = nn.ModuleDict({kind: nn.LayerNorm(width) for kind in ("block", "device")})
        self.convolve = HeteroConv(
            {
                edge: TransformerConv(
                    width, width // heads, heads, edge_dim=size, root_weight=False
                )
                for edge, size in _EDGE_FEATURES.items()
            },
            aggr="sum",
        )
        self.out_norms = nn.ModuleDict({kind: nn.LayerNorm(width) for kind in self.norms})
        self.feed_forward = nn.ModuleDict({kind: mlp(width, width, width) for kind in self.norms})

    def forward(self, x: dict[str, Tensor], graphs: Any, joined: AllJoined) -> dict[str, Tensor]:
        normed = {kind: self.norms[kind](value) for kind, value in x.items()}
        convs, summed = self.convolve.convs, dict(x)
        for edge in (FEEDS, FED_BY):
            own = graphs[edge]
            summed["block"] = summed["block"] + convs[edge](
                normed["block"], own.edge_index, own.edge_attr
            )
        blocks, is_block = to_dense_batch(normed["block"], graphs["block"].batch)
        devices, is_device = to_dense_batch(normed["device"], graphs["device"].batch)
        told, seconds = normed["device"][joined.told], joined.seconds
        to_blocks = attend(convs[RUNS], devices, is_device, blocks, seconds.transpose(1, 2))
        to_devices = attend(convs[ON], blocks, is_block, devices, seconds)
        to_devices = to_devices + attend(convs[LINK], told, joined.is_told, devices, joined.links)
        summed["block"] = summed["block"] + to_blocks[is_block]
        summed["device"] = summed["device"] + to_devices[is_device]
        return {
            kind: value + self.feed_forward[kind](self.out_norms[kind](value))
            for kind, value in summed.items()
        }


class HeteroEncoder(nn.Module):
    """Blocks, devices, links and candidates; see the module docstring."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width, heads = config.width, config.num_heads
        self.blocks = mlp(NUM_BLOCK_FEATURES, width, width)
        self.devices = mlp(NUM_DEVICE_FEATURES, width, width)
        self.rounds = nn.ModuleList(_Round(config) for _ in range(config.num_rounds))
        self.candidates = mlp(NUM_CANDIDATE_FEATURES + 2 * width, width, width)
        self.block_self = _Attention(width, heads)
        self.candidate_self = _Attention(width, heads)
        self.block_cross = _Attention(width, heads)
        self.candidate_cross = _Attention(width, heads)

    def forward(self, graphs: Any) -> tuple[Tensor, Tensor]:
        """Embeddings of blocks and candidates, padded."""
        x = {
            "block": self.blocks(graphs["block"].x),
            "device": self.devices(graphs["device"].x),
        }
        joined = all_joined(graphs)
        for each in self.rounds:
            x = each(x, graphs, joined)
        device, candidate = graphs[IN].edge_index
        count = graphs["candidate"].num_nodes
        members = x["device"][device]
        reach = [
            scatter(members, candidate, 0, count, "mean"),
            scatter(members * graphs[IN].edge_attr, candidate, 0, count, "sum"),
        ]
        candidates = self.candidates(torch.cat([graphs["candidate"].x, *reach], dim=1))
        b, b_real = to_dense_batch(x["block"], graphs["block"].batch)
        c, c_real = to_dense_batch(candidates, graphs["candidate"].batch)
        b = self.block_self(b, b, b_real)
        c = self.candidate_self(c, c, c_real)
        return self.block_cross(b, c, c_real), self.candidate_cross(c, b, b_real)


class PaperEncoder(nn.Module):
    """Graph attention over ops, then a sequence model; no device graph.

    Unlike the paper's fixed softmax over M + 4 actions, candidates are scored by their features,
    so that one set of weights serves any cluster. Also unlike the paper's, the network is small;
    the paper has 12 layers of 8 heads, then 8 layers of Transformer-XL, for 2,000 groups.
    """

    sizes: ClassVar[dict[str, Any]] = {"rank": 0}  # each block is decided on its own

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width, heads = config.width, config.num_heads
        self.blocks = mlp(NUM_BLOCK_FEATURES, width, width)
        self.layers = nn.ModuleList(
            GATConv(width, width // heads, heads) for _ in range(2 * config.num_rounds)
        )
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.sequence = nn.TransformerEncoder(
            layer, config.num_rounds, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.candidates = mlp(NUM_CANDIDATE_FEATURES, width, width)

    def forward(self, graphs: Any) -> tuple[Tensor, Tensor]:
        """Embeddings of blocks and candidates, padded."""
        x = self.blocks(graphs["block"].x)
        edges = graphs[FED_BY].edge_index  # an op attends to its inputs
        for layer in self.layers:
            x = x + nn.functional.elu(layer(x, edges))
        b, b_real = to_dense_batch(x, graphs["block"].batch)
        b = self.sequence(b, src_key_padding_mask=~b_real)
        c, _ = to_dense_batch(self.candidates(graphs["candidate"].x), graphs["candidate"].batch)
        return b, c


ENCODERS: dict[str, Callable[[PolicyConfig], nn.Module]] = {
    "hetero": HeteroEncoder,
    "paper": PaperEncoder,
}
"""Networks by name. Each maps a batch of graphs to padded embeddings of blocks ``[B, G, width]``
and candidates ``[B, C, width]``."""
BUILT_IN = tuple(ENCODERS)
"""Names of the package's own encoders, which cannot be replaced."""
