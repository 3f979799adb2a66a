"""Tiny models, clusters and an obvious reference for the search of HAP."""

from collections.abc import Callable
from functools import lru_cache, partial
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.hap.a_star import Search, SearchResult
from heterog.methods.hap.fold import fold
from heterog.methods.hap.prices import SpmdPrices, ValueClass, Work
from heterog.methods.hap.segments import Segments
from heterog.methods.hap.theory import Role, Theory, build_theory
from heterog.simulator.evaluator import Evaluator
from tests.simulator.builders import cluster_of

UNLIMITED = 10**9
WIDTHS = (64, 1024, 4096)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


Layer = Callable[[], nn.Module]


def random_model(rng: Random, most_ops: int) -> tuple[Layer, int, int]:
    """A model of at most ``most_ops`` forward ops with its loss; its input and output width."""
    first = width = rng.choice(WIDTHS)
    layers: list[Layer] = []
    left = most_ops - 1
    while left > 0:
        kind = rng.choice(["linear", "linear", "relu", "norm", "residual"])
        if kind == "linear":
            after = rng.choice(WIDTHS)
            layers.append(partial(nn.Linear, width, after, bias=rng.random() < 0.5))
            width = after
        elif kind == "relu" and layers:
            layers.append(nn.ReLU)
        elif kind == "norm":
            layers.append(partial(nn.LayerNorm, width))
        elif kind == "residual" and left >= 2:
            layers.append(partial(residual, width))
            left -= 1
        else:
            continue
        left -= 1
    layers[-1] = layers[-1] if len(layers) > 1 else partial(nn.Linear, first, width)
    return lambda: nn.Sequential(*(layer() for layer in layers)), first, width


def residual(width: int) -> nn.Module:
    return Residual(nn.Linear(width, width, bias=False))


def captured(model: Layer, batch: tuple[Tensor, Tensor]) -> OpGraph:
    return capture(Workload(model, batch, functional.mse_loss, torch.optim.SGD))


def random_problem(seed: int, most_ops: int) -> Evaluator:
    """A random model on a random cluster; links from slow to fast move the optimum about."""
    rng = Random(seed)
    model, first, last = random_model(rng, most_ops)
    batch = rng.choice([64, 512, 2048])
    graph = captured(model, (torch.zeros(batch, first), torch.zeros(batch, last)))
    rate = rng.choice([1.0, 10.0, 100.0, 1000.0])
    hosts = rng.choice([(("V100-16GB",), ("P100-12GB",)), (("V100-16GB", "V100-16GB"), ("T4",))])
    cluster = cluster_of(*((rate, types) for types in hosts), latency_s=1e-6)
    return Evaluator(graph, cluster)


def searched(
    theory: Theory, prices: SpmdPrices, *, width: int = UNLIMITED, num_programs: int = 1
) -> SearchResult:
    return Search(Segments(theory, fold(theory)), prices, width).run(num_programs)


def prices_of(
    evaluator: Evaluator, shares: tuple[int, ...], theory: Theory | None = None
) -> SpmdPrices:
    theory = theory or build_theory(evaluator.graph)
    devices = tuple(range(evaluator.cluster.num_devices))
    return SpmdPrices(Work(theory, evaluator.cluster), evaluator, devices, shares)


def brute_force(theory: Theory, prices: SpmdPrices, limit_s: float) -> float:
    """Cost of the cheapest program below a limit, by trying all triples of all rows.

    Rows in program order, forward before backward; no folding, no merging of states, no dominance.
    A partial program is given up when its own cost, and the cheapest work of the rows to come,
    reach the best so far.
    """
    rows, values = theory.rows, theory.values
    gradients = {row.reads[1].value for row in rows if row.is_update}
    delivery = [
        prices.delivery(ValueClass(v.num_bytes, tuple(v.forms), v.role, number in gradients))
        for number, v in enumerate(values)
    ]
    rest = [0.0]
    for row in reversed(rows):
        rest.append(rest[-1] + float(prices.seconds[: len(row.triples), row.op].min()))
    rest.reverse()
    best = limit_s
    made: dict[int, int] = {}
    needed: dict[int, int] = {}

    def extend(place: int, cost: float) -> None:
        nonlocal best
        if cost + rest[place] >= best:
            return
        if place == len(rows):
            best = cost
            return
        row = rows[place]
        for number, triple in enumerate(row.triples):
            extra = float(prices.seconds[number, row.op])
            before: list[tuple[int, int]] = []
            for value, form in triple.needs:
                old = needed.get(value, 0)
                before.append((value, old))
                needed[value] = new = old | 1 << form
                if values[value].role == Role.PARAMETER:
                    # Readers so far; the update, which comes last, says how it is stored.
                    if row.is_update and form != 0 and new != 1 << form:
                        extra = float("inf")
                else:
                    extra += delivery[value].price(made[value], new)
                    extra -= delivery[value].price(made[value], old)
            for value, form in triple.makes:
                made[value] = form
            extend(place + 1, cost + extra)
            for value, old in reversed(before):
                needed[value] = old

    extend(0, 0.0)
    return best


@lru_cache(maxsize=1)
def v100_p100() -> Cluster:
    """Two V100 and two P100 on two hosts with a slow network."""
    return cluster_of((10.0, ("V100-16GB",) * 2), (10.0, ("P100-12GB",) * 2))
