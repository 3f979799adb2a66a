"""The method ``pipette``: uniform layouts by a model, hosts dedicated to places, ten simulated.

As in the paper, layouts are enumerated and ranked by a model; the order of hosts is
annealed for the shortest communication on measured rates; layouts that cannot fit into memory are
left out, and the ten cheapest others are tried. Orders are annealed only if rates between hosts
differ, since otherwise all orders are equal.

Unlike in the paper, layouts are simulated instead of run. Orders are annealed for heterog's own
communication (``Pricing.EXECUTED``). The best layouts are also tried with hosts in the order of
the cluster, with an order for the traffic counted in their programs, and with one for the paper's
objective. A layout that does not fit is tried with a sliced optimizer and with recomputation.

On S hosts of g devices each, tp divides g (teams stay inside hosts), pp divides S (a stage has
whole hosts), and replicas take the rest. Sizes of micro-batches are the powers of two that divide
a replica's share, also above 8, where the paper stops: samples of other models are smaller than
sequences. The paper's seconds come from a network fitted to profiled runs, its gradients from a
formula for GPT. Unlike there, everything is counted in the captured graph: forward and backward
seconds of ops, gradient bytes of the largest stage, bytes between stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.lowering.program import IntArray
from heterog.memo import kept
from heterog.methods.host_order import HostTraffic, annealed_order, hosts_by_kind
from heterog.methods.islands.slices import sent_bytes
from heterog.methods.megatron_grid import divisors, least_bytes, most_room, uniform_layouts
from heterog.methods.pipette.communication import (
    COOLED,
    HostRates,
    Pricing,
    UniformCosts,
    anneal,
    latency_s,
    ring_payloads,
)
from heterog.methods.planner import PointSearch, Problem, Searching
from heterog.methods.recomputing import cheaper_layouts
from heterog.simulator import engine
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.stages import layers_of, stage_of_groups
from heterog.strategy.strategy import Strategy

_SUMS_PER_LAYER = 2
"""All-reduces of a team in each pass through a layer: one after attention, one after the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layout on some hosts.

    Attributes:
        layout: Layout with tp, pp, dp and micro-batch.
        hosts: Hosts of the cluster, ascending.
        num_micro: Number of micro-batches of a replica.
    """

    layout: Layout
    hosts: tuple[int, ...]
    num_micro: int


def host_sets(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """All hosts, if they have equally many devices, and the hosts of each kind."""
    everything = tuple(range(cluster.num_hosts))
    sizes = set(map(len, cluster.host_devices))
    kinds = hosts_by_kind(cluster)
    return tuple(dict.fromkeys(([everything] if len(sizes) == 1 else []) + list(kinds)))


def points(evaluator: Evaluator) -> Iterator[Point]:
    """Every layout on every set of hosts, with every micro-batch that divides a share."""
    for hosts in host_sets(evaluator.cluster):
        devices = [d for host in hosts for d in evaluator.cluster.host_devices[host]]
        per_host = len(devices) // len(hosts)
        for tp in divisors(per_host):
            for pp in divisors(len(hosts)):
                for layout, num_micro in uniform_layouts(evaluator, devices, tp, pp):
                    yield Point(layout=layout, hosts=hosts, num_micro=num_micro)


def ranks(cluster: Cluster, order: IntArray, num_stages: int) -> tuple[int, ...]:
    """Devices in the order in which layouts number ranks: stage by stage.

    Args:
        cluster: Cluster of the hosts.
        order: Hosts row by row; a row is a pipeline.  # [num_hosts]
        num_stages: Length of a row.
    """
    columns = order.reshape(-1, num_stages).T.ravel()
    return tuple(device for host in columns.tolist() for device in cluster.host_devices[host])


def stage_by_stage(num_hosts: int, num_stages: int) -> IntArray:
    """The default order of hosts in layouts: consecutive hosts have the same stage.

    >>> stage_by_stage(6, 3).reshape(-1, 3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    hosts = np.arange(num_hosts, dtype=np.int32)
    return hosts.reshape(num_stages, -1).T.ravel()


class LayoutCosts:
    """Prices layouts for the model, from the tables of one evaluator.

    Args:
        evaluator: Evaluator that knows graph, cluster and seconds of ops.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._cluster = evaluator.cluster
        self._layers = np.array(layers_of(evaluator.graph).of_group)

    def costs(self, point: Point) -> UniformCosts:
        """A layout in the terms of the model: its slowest stage on its slowest device."""
        layout, cluster = point.layout, self._cluster
        per_host = len(cluster.host_devices[point.hosts[0]])
        stage, message, gradients, layers = self._by_stage(layout.pp, layout.layers)
        devices = [device for host in point.hosts for device in cluster.host_devices[host]]
        inside = min(cluster.hosts[host].intra.bandwidth_bytes_per_s for host in point.hosts)
        activation_bytes = self._activation_bytes * layout.micro_batch
        sums_s = _SUMS_PER_LAYER * layers * ring_payloads(layout.tp) * activation_bytes / inside
        slowest = max(
            (self._passes_s(row, layout.micro_batch, stage, layout.pp) for row in dict.fromkeys(
                self._evaluator.prices.row(cluster.type_index[device], is_alone=len(devices) == 1)
                for device in devices
            )),
            key=sum,
        )  # fmt: skip
        return UniformCosts(
            num_stages=layout.pp,
            replicas_per_host=per_host // layout.tp,
            num_micro=point.num_micro,
            forward_s=slowest[0] / layout.tp + sums_s,
            backward_s=slowest[1] / layout.tp + sums_s,
            message_bytes=message * layout.micro_batch,
            gradient_bytes=gradients / layout.tp,
            team_size=layout.tp,
        )

    def _passes_s(
        self, row: int, samples: int, stage_of_group: tuple[int, ...], num_stages: int
    ) -> tuple[float, float]:
        """Seconds of a forward and a backward pass of the slowest stage."""
        forward, whole = self._evaluator.prices.seconds_of_groups(row, samples)
        passes = [
            np.bincount(stage_of_group, weights, num_stages)
            for weights in (forward, whole - forward)
        ]
        slowest = int(np.argmax(passes[0] + passes[1]))
        return float(passes[0][slowest]), float(passes[1][slowest])

    @kept
    def _by_stage(
        self, num_stages: int, layers: tuple[int, ...]
    ) -> tuple[tuple[int, ...], float, float, int]:
        """Each group's stage, and the largest message, gradients and layers of any stage."""
        tables = self._evaluator.tables
        layout = Layout(pp=num_stages, layers=layers)
        stage = np.array(stage_of_groups(self._evaluator.graph, layout))
        gradients = np.bincount(stage[tables.parameter_group], tables.gradient_bytes, num_stages)
        inside = self._layers >= 0
        of_layer = np.unique(np.stack([stage[inside], self._layers[inside]]), axis=1)
        counts = np.bincount(of_layer[0], minlength=num_stages)
        messages = sent_bytes(tables, stage, num_stages)
        return (
            tuple(stage.tolist()),
            float(messages.max(initial=0.0)),
            float(gradients.max(initial=0.0)),
            int(counts.max(initial=0)),
        )

    @property
    def _activation_bytes(self) -> float:
        """Bytes of a sample that two layers would exchange if each layer were a stage."""
        num_layers = int(self._layers.max(initial=-1)) + 1
        return self._by_stage(num_layers, ())[1] if num_layers > 1 else 0.0


NUM_TRIED = 10
"""Number of layouts that fit and are simulated; the paper measures as many."""
NUM_REORDERED = 3
"""About this many of the best layouts are simulated on other orders of hosts, too."""
MOST_MISSED = 30
"""Number of simulations of layouts that do not fit after which the search ends."""
ANNEALED_PART = 0.5
"""Part of a budget in seconds after which annealing ends."""

Order = tuple[int, ...]
"""Hosts of a cluster, row by row; a row is a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A layout on an order of hosts."""

    point: Point
    order: Order


class _Search(PointSearch[_Trial]):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        evaluator = problem.evaluator
        self.graph, self.cluster = evaluator.graph, evaluator.cluster
        self.rates = HostRates.of_cluster(self.cluster)
        self.costs = LayoutCosts(evaluator)
        self._orders: dict[tuple[Point, Pricing], Order] = {}
        self._ranked: tuple[Point, ...] = ()

    def search(self) -> None:
        """Try the cheapest that fit, then other orders for the best of these."""
        self._ranked = self._ranked or tuple(
            sorted(points(self.problem.evaluator), key=self._rank)
        )
        fitting = missed = 0
        for point in self._ranked:
            if fitting >= NUM_TRIED or missed >= MOST_MISSED:
                break
            for manner in self._until_it_fits(point):
                order = self._dedicated(point, Pricing.EXECUTED)
                found = self.ask(_Trial(point=manner, order=order))
                if found is not None and found.is_ok:
                    cheaper = cheaper_layouts(self.graph, manner.layout)
                    leanest = self.while_it_fits(
                        _Trial(point=replace(manner, layout=layout), order=order)
                        for layout in cheaper
                    )
                    cheapest = manner if leanest is None else leanest.point
                    self.ask(_Trial(point=cheapest, order=self._as_given(point)))
                    fitting += 1
                    break
                missed += 1
        for point in dict.fromkeys(trial.point for trial in self.best(2 * NUM_REORDERED)):
            for order in self._other_orders(point):
                self.ask(_Trial(point=point, order=order))

    def orders(self, point: _Trial) -> tuple[engine.Order, ...]:
        """See ``PointSearch``."""
        return (self.problem.first_order,)

    @property
    def why_nothing(self) -> str:
        """See ``PointSearch``."""
        if self.refused:
            return f"no layout can be said: {next(iter(self.refused.values()))}"
        if self._ranked:
            return "every uniform layout overflows the memory, even with layers that recompute"
        batch, sets = self.graph.batch_size, host_sets(self.cluster)
        devices = [sum(len(self.cluster.host_devices[h]) for h in hosts) for hosts in sets]
        return (
            f"no layout of whole hosts divides a batch of {batch}: sets of alike hosts have "
            f"{', '.join(map(str, devices[:4]))} devices; take a batch that these divide"
        )

    def in_words(self, trial: _Trial) -> str:
        """The layout, the order of hosts, and the prediction of the model."""
        names = [self.cluster.hosts[host].name for host in trial.order]
        order = " ".join(names[:16]) + (f" and {len(names) - 16} more" if names[16:] else "")
        said = f"{self._model_s(trial):.3g} s"
        return f"{trial.point.layout} on hosts {order}; its model says {said}"

    def _model_s(self, trial: _Trial) -> float:
        costs = self.costs.costs(trial.point)
        return latency_s(costs, self.rates.communication(np.array(trial.order, np.int32), costs))

    def _rank(self, point: Point) -> tuple[float, int]:
        """Seconds by the model with hosts as given; among equal ones, smaller tp x pp."""
        trial = _Trial(point=point, order=self._as_given(point))
        return self._model_s(trial), point.layout.tp * point.layout.pp

    def _as_given(self, point: Point) -> Order:
        places = stage_by_stage(len(point.hosts), point.layout.pp)
        return tuple(point.hosts[place] for place in places.tolist())

    def _dedicated(self, point: Point, pricing: Pricing) -> Order:
        """The order of hosts with the shortest communication; as given if all links are equal."""
        given = self._as_given(point)
        rates = self.rates.among(np.array(sorted(given), np.int32))
        if not rates.differ:
            return given
        key = replace(point, num_micro=0), pricing
        if key not in self._orders:
            volume = self.costs.costs(point)

            def cost_of(order: IntArray) -> float:
                return rates.communication(order, volume, pricing).total_s

            found = anneal(
                cost_of,
                stage_by_stage(len(given), point.layout.pp),
                np.random.default_rng(self.problem.seed),
                num_steps=COOLED,
                is_over=self._is_annealed,
            )
            order = tuple(point.hosts[place] for place in found)
            if self._is_annealed():  # a longer round may find a better one
                return order
            self._orders[key] = order
        return self._orders[key]

    def _is_annealed(self) -> bool:
        """Whether annealing must end, because simulations need the rest of the seconds."""
        return self.spending.is_past(ANNEALED_PART)

    def _other_orders(self, point: Point) -> Iterator[Order]:
        """Orders for the program's traffic, of the cluster, and for the published objective."""
        if not self.rates.among(np.array(point.hosts, np.int32)).differ:
            return
        given = _Trial(point=point, order=self._as_given(point))
        traffic = None
        if given in self.found:
            traffic = HostTraffic.of_strategy(self.strategy_of(given), self.evaluator)
        if traffic is not None:
            yield self._counted(given, traffic)
        yield point.hosts
        yield self._dedicated(point, Pricing.PUBLISHED)

    def _counted(self, given: _Trial, traffic: HostTraffic) -> Order:
        """The order of hosts in which a program's traffic costs least."""
        host_in = annealed_order(
            traffic,
            self.rates,
            np.arange(self.cluster.num_hosts, dtype=np.int32),
            np.array(given.point.hosts, np.int32),
            np.random.default_rng(self.problem.seed),
            is_over=self._is_annealed,
        )
        return tuple(int(host_in[place]) for place in given.order)

    def strategy_of(self, trial: _Trial) -> Strategy:
        """See ``PointSearch``."""
        layout = trial.point.layout
        return place_layout(
            layout,
            self.graph,
            self.cluster,
            devices=ranks(self.cluster, np.array(trial.order, np.int32), layout.pp),
            step_barrier=self.problem.step_barrier,
        ).strategy

    def _until_it_fits(self, point: Point) -> Sequence[Point]:
        """A layout and variants that need less memory, except those that surely overflow."""
        manners = [(0, Recompute.NONE)]
        if self.graph.updates_elementwise and point.layout.dp > 1:
            manners.append((1, Recompute.NONE))
        manners.append((manners[-1][0], Recompute.FULL))
        made = [
            replace(point, layout=replace(point.layout, zero=zero, recompute=recompute))
            for zero, recompute in manners
        ]
        room = most_room(
            self.cluster, (d for host in point.hosts for d in self.cluster.host_devices[host])
        )
        return [each for each in made if least_bytes(self.evaluator, each.layout) <= room]


class Pipette(Searching):
    """Uniform layouts on dedicated hosts; see the module docstring."""

    name = "pipette"
    stage = "search"
    resumes = True
    search = _Search

    @staticmethod
    def joins_auto(graph: OpGraph, cluster: Cluster) -> bool:
        """Whether ``auto`` runs it: if pairs differ; else ``megatron_grid`` has all layouts."""
        return bool(cluster.pairs) and HostRates.of_cluster(cluster).differ
