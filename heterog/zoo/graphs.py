"""Full-batch graph networks: every step sees one whole graph, which is the only sample.

``gcn_2l`` is the two-layer graph convolution of Kipf and Welling (2017), ``sage_2l`` GraphSAGE
with means over all neighbours (Hamilton et al. 2017). Their graph is made from a seed: nodes in
communities, with degrees as skewed as in graphs of people or pages, where few nodes have most
edges. Nodes of a community have consecutive numbers, so that consecutive rows are fair parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.sparse_product import gcn_product, mean_product
from heterog.graph.workload import Batch, Workload
from heterog.zoo.registry import Builders

NUM_NODES = 8192
NUM_FEATURES = 256
HIDDEN = 128
NUM_CLASSES = 16
MEAN_DEGREE = 16
COMMUNITY = 128
UNLABELLED = -100
"""Label of nodes that no loss counts: ``ignore_index`` of the cross entropy."""


class Edges(NamedTuple):
    """Edges of a graph, both directions of each."""

    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    num_nodes: int


@lru_cache(maxsize=8)
def skewed_graph(
    num_nodes: int,
    mean_degree: float,
    *,
    community: int = COMMUNITY,
    outside: float = 0.3,
    skew: float = 0.8,
    seed: int = 0,
) -> Edges:
    """A graph with communities whose degrees fall as a power of a node's rank.

    Ends of edges are drawn in proportion to ``rank ** -skew`` (the model of Chung and Lu 2002),
    where ranks are assigned at random; no edge occurs twice, and none leads to its own node.

    Args:
        num_nodes: Number of nodes of the graph.
        mean_degree: Mean number of edges drawn for a node; a few are drawn twice.
        community: Number of nodes of a community; the last one may have fewer.
        outside: Part of the edges that lead to any node instead of one of the same community.
        skew: 0 for nodes that are alike, towards 1 for a few nodes with most edges.
        seed: Seed of the graph.
    """
    random = np.random.default_rng(seed)
    weight = (1.0 + random.permutation(num_nodes)) ** -skew
    total = np.cumsum(weight)
    num_edges = int(num_nodes * mean_degree / 2)
    one = np.searchsorted(total, random.uniform(0, total[-1], num_edges))
    begin = one // community * community
    end = np.minimum(begin + community, num_nodes)
    leaves = random.uniform(size=num_edges) < outside
    begin, end = np.where(leaves, 0, begin), np.where(leaves, num_nodes, end)
    before = np.concatenate([[0.0], total])
    drawn = random.uniform(before[begin], before[end])
    other = np.clip(np.searchsorted(total, drawn), begin, end - 1)
    pairs = np.stack([np.minimum(one, other), np.maximum(one, other)])
    pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
    return Edges(np.concatenate(pairs), np.concatenate(pairs[::-1]), num_nodes)


class GraphConvolutions(nn.Module):
    """Layers ``act(A H W + b)`` with one normalised matrix ``A`` of the whole graph.

    Args:
        edges: Edges of the graph.
        widths: Features of the nodes, of each hidden layer, and number of classes.
    """

    def __init__(self, edges: Edges, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.gather = gcn_product(edges.sources, edges.targets, edges.num_nodes)
        self.layers = nn.ModuleList(nn.Linear(have, want) for have, want in pairwise(widths))

    def forward(self, features: Tensor) -> Tensor:
        """Scores of the classes of every node.  # [samples, nodes, classes]"""
        x = features
        for number, layer in enumerate(self.layers):
            x = self.gather(layer(functional.relu(x) if number else x))
        return x


class GraphSage(nn.Module):
    """Layers ``act(H V + mean of neighbours' H W + b)``.

    Args:
        edges: Edges of the graph.
        widths: Features of the nodes, of each hidden layer, and number of classes.
    """

    def __init__(self, edges: Edges, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.gather = mean_product(edges.sources, edges.targets, edges.num_nodes)
        pairs = list(pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(have, want) for have, want in pairs)
        self.others = nn.ModuleList(nn.Linear(have, want, bias=False) for have, want in pairs)

    def forward(self, features: Tensor) -> Tensor:
        """Scores of the classes of every node.  # [samples, nodes, classes]"""
        x = features
        for number, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            x = functional.relu(x) if number else x
            x = own(x) + self.gather(others(x))
        return x


def full_batch(
    name: str,
    network: Callable[[Edges, tuple[int, ...]], nn.Module],
    batch_size: int = 1,
    *,
    num_nodes: int = NUM_NODES,
    mean_degree: float = MEAN_DEGREE,
    widths: tuple[int, ...] = (NUM_FEATURES, HIDDEN, NUM_CLASSES),
    labelled: float = 0.5,
) -> Workload:
    """Classification of a generated graph's nodes, learned from the nodes that have labels.

    Args:
        name: Name of the workload.
        network: Function that makes the model from edges and widths.
        batch_size: Number of sets of features on the same graph; one for an ordinary graph.
        num_nodes: Number of nodes of the graph.
        mean_degree: Mean number of edges of a node.
        widths: Features of the nodes, of each hidden layer, and number of classes.
        labelled: Part of the nodes that have labels.
    """
    community = min(COMMUNITY, max(num_nodes // 8, 1))

    def model() -> nn.Module:
        return network(skewed_graph(num_nodes, mean_degree, community=community), widths)

    def example_batch() -> Batch:
        random = torch.Generator().manual_seed(0)
        classes = (torch.arange(num_nodes) // community) % widths[-1]
        shape = (batch_size, num_nodes)
        has_label = torch.rand(shape, generator=random) < labelled
        labels = torch.where(has_label, classes.expand(shape), UNLABELLED)
        centres = torch.randn(widths[-1], widths[0], generator=random)
        noise = torch.randn(*shape, widths[0], generator=random)
        return centres[classes] + 2.0 * noise, labels

    return Workload(
        model=model, example_batch=example_batch, loss=node_loss, optimizer=torch.optim.Adam,
        name=name,
    )  # fmt: skip


def node_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, the mean over nodes with labels.

    Args:
        scores: Scores of the classes.  # [samples, nodes, classes]
        labels: Class of each node; ``UNLABELLED`` for those without.  # [samples, nodes]
    """
    return functional.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=UNLABELLED
    )


WORKLOADS: Builders = {
    "gcn_2l": lambda name, batch_size: full_batch(name, GraphConvolutions, batch_size),
    "sage_2l": lambda name, batch_size: full_batch(name, GraphSage, batch_size),
}
"""Makers of the workloads by name."""
