"""Graph networks of torch_geometric: batches of graphs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg
from torch_geometric.utils import add_self_loops

from families.family import BATCH, Batch, Family, enter, family, sgd, trained
from heterog.graph.workload import Workload

NODES = 5
EDGES = 12
WIDTH = 6


def edges_of_batch() -> Tensor:
    """Edges of a batch of graphs of equal size, ``[2, batch * edges]``: numbers of the whole.

    None is a self loop.
    """
    first = torch.randint(0, NODES, (BATCH, EDGES))
    ends = torch.stack([first, (first + torch.randint(1, NODES, (BATCH, EDGES))) % NODES])
    return (ends + NODES * torch.arange(BATCH)[None, :, None]).flatten(1)


def graph_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Node features of all graphs one after another, edges, and a class of each graph."""
    return (
        torch.randn(BATCH * NODES, WIDTH, dtype=torch.float64),
        edges_of_batch(),
        torch.randint(0, 3, (BATCH,)),
    )


class GraphClassifier(nn.Module):
    """Two layers of messages, the mean over the nodes of each graph, a class."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor, classes: Tensor) -> Tensor:
        x = torch.relu(self.first(x, edges))
        x = torch.tanh(self.second(x, edges))
        graph = torch.arange(BATCH, device=x.device).repeat_interleave(NODES)
        return functional.cross_entropy(self.head(pyg.global_mean_pool(x, graph, BATCH)), classes)


def of_layers(layer: Any, **options: Any) -> Workload:
    """A classifier of graphs with a kind of layer."""

    def model() -> nn.Module:
        return GraphClassifier(layer(WIDTH, 8, **options), layer(8, 8, **options)).double()

    return sgd(model, graph_batch)


@family("pyg_gin")
def gin() -> Workload:
    """GIN: a small network after the sum."""

    def layer(width_in: int, width: int) -> nn.Module:
        inner = nn.Sequential(nn.Linear(width_in, 8), nn.ReLU(), nn.Linear(8, width))
        return pyg.GINConv(inner, train_eps=True)

    return of_layers(layer)


@family("pyg_gatv2_given_loops")
def gatv2() -> Workload:
    """GATv2 with self loops that the batch brings along."""

    def batch() -> Batch:
        x, edges, classes = graph_batch()
        looped: Tensor = add_self_loops(edges, num_nodes=BATCH * NODES)[0]
        return x, looped, classes

    def model() -> nn.Module:
        return GraphClassifier(
            pyg.GATv2Conv(WIDTH, 8, add_self_loops=False),
            pyg.GATv2Conv(8, 8, add_self_loops=False),
        ).double()

    return sgd(model, batch, batch_dims={0: None, 1: None, 2: 0})


def _dense_graph_batch() -> Batch:
    adjacency = (torch.rand(BATCH, NODES, NODES, dtype=torch.float64) > 0.5).double()
    return (
        torch.randn(BATCH, NODES, WIDTH, dtype=torch.float64),
        adjacency,
        torch.randint(0, 3, (BATCH,)),
    )


@trained(
    "dense_graph",
    lambda: {
        "first": pyg.DenseGCNConv(WIDTH, 8),
        "second": pyg.DenseSAGEConv(8, 8),
        "head": nn.Linear(8, 3),
    },
    _dense_graph_batch,
    loss=functional.cross_entropy,
)
def dense_graph(net: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    """Graphs of equal size with dense adjacency: each sample is a graph."""
    x = torch.relu(net.first(x, adjacency))
    return net.head(net.second(x, adjacency).mean(1))


enter(
    Family(
        "pyg_gcn",
        "GCN: self loops and symmetric normalisation.",
        lambda: of_layers(pyg.GCNConv),
        is_quick=True,
    ),
    Family(
        "pyg_gat",
        "GAT: attention over neighbours, self loops.",
        lambda: of_layers(pyg.GATConv, heads=2, concat=False),
    ),
    Family("pyg_sage", "GraphSAGE: the mean of neighbours.", lambda: of_layers(pyg.SAGEConv)),
)
