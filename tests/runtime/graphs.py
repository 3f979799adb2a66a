"""Small full-batch graph networks, cut by rows of nodes or by features, and what a rank does."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from heterog.graph.op_graph import OpGraph
from heterog.graph.sparse_product import gcn_product
from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.zoo.graphs import (
    UNLABELLED,
    Edges,
    GraphConvolutions,
    GraphSage,
    node_loss,
    skewed_graph,
)
from tests.runtime.cases import STEPS, Trained, captured_once
from tests.runtime.ranks import PARENT

NODES = 120
WIDTHS = (6, 12, 3)


def directed() -> Edges:
    """A graph whose edges lead one way, where 20 nodes have no edge at all."""
    whole = skewed_graph(NODES - 20, 6, community=25, seed=1)
    one_way = whole.sources < whole.targets
    return Edges(whole.sources[one_way], whole.targets[one_way], NODES)


class Mixed(nn.Module):
    """Two products of one value, a product of the batch itself, and a normalisation of nodes."""

    def __init__(self, edges: Edges, widths: tuple[int, ...]) -> None:
        super().__init__()
        there = gcn_product(edges.sources, edges.targets, edges.num_nodes)
        back = gcn_product(edges.targets, edges.sources, edges.num_nodes)
        self.there, self.back = there, back
        self.first = nn.Linear(widths[0], widths[1])
        self.norm = nn.LayerNorm(widths[1])
        self.second = nn.Linear(widths[1], widths[2])

    def forward(self, features: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.there(features)))
        x = self.norm(self.there(x) + self.back(x))
        out: Tensor = self.second(x)
        return out


CASES: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GraphConvolutions(skewed_graph(NODES, 6, community=20), WIDTHS),
    "sage": lambda: GraphSage(directed(), WIDTHS),
    "mixed": lambda: Mixed(directed(), WIDTHS),
}


def batch_of(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(WIDTHS[-1], (1, NODES), generator=random)
    labels[:, ::3] = UNLABELLED
    return torch.randn(1, NODES, WIDTHS[0], generator=random, dtype=dtype), labels


def workload_of(name: str, dtype: torch.dtype = torch.float64) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return CASES[name]().to(dtype)

    return Workload(
        seeded, partial(batch_of, 0, dtype), node_loss, torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9}, name=f"{name}_{dtype.itemsize}",
    )  # fmt: skip


@cache
def graph_of(name: str, dtype: torch.dtype = torch.float64) -> OpGraph:
    return PARENT.capture((name, dtype), workload_of, name, dtype)


def trained_alone(name: str, dtype: torch.dtype = torch.float64) -> Trained:
    """The same steps on one device."""
    workload = workload_of(name, dtype)
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    gradients: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        stepper.zero_grad()
        loss = workload.step_loss(model, batch_of(step, dtype))
        torch.autograd.backward(loss)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(key, []).append(parameter.grad.clone())
        stepper.step()
        losses.append(float(loss.detach()))
    return Trained(losses, gradients, model.state_dict())


def train(rank: int, name: str, dtype: torch.dtype, plan_path: str) -> Trained:
    """What every rank does; gradients of parameters that live in slices are left out."""
    with captured_once((name, dtype)):
        workload = workload_of(name, dtype)
        step = deploy(workload, load_plan(plan_path))
    whole = {key: each.shape for key, each in workload.make_model().named_parameters()}
    gradients: dict[str, list[Tensor]] = {}

    def keep(*_: object) -> None:
        for key, parameter in step.model.named_parameters():
            if parameter.grad is not None and parameter.shape == whole[key]:
                gradients.setdefault(key, []).append(parameter.grad.clone())

    step.optimizer.register_step_pre_hook(keep)
    losses = [float(step(batch_of(number, dtype))) for number in range(STEPS)]
    return Trained(losses, gradients, step.state_dict())
