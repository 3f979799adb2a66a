"""The method ``pipette``: uniform layouts by a model, hosts dedicated to places, ten simulated.

As the paper has it: layouts are enumerated and ranked by the model ``all``, the order of hosts is
annealed for the shortest communication on measured rates, what cannot fit into memory is left out,
and the ten cheapest that are left are tried. Unlike the paper, they are simulated instead of run;
orders are annealed for what heterog executes (``Pricing.EXECUTED``) and, of the best, for what
their programs were found to send and for the published objective, beside hosts in the order of the
cluster; and a layout that does not fit is tried with a sliced optimizer and with layers that
recompute. Hosts are dedicated only where the rates between them differ: else all orders are alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.lowering.program import IntArray
from heterog.methods.host_order import HostTraffic, annealed_order
from heterog.methods.model_parallel import activation_bytes, parameter_bytes
from heterog.methods.pipette.annealing import COOLED, anneal
from heterog.methods.pipette.communication import HostRates, Pricing, Variant, latency_s
from heterog.methods.pipette.layouts import (
    LayoutCosts,
    Point,
    host_sets,
    points,
    ranks,
    stage_by_stage,
)
from heterog.methods.planner import Planner, PlanResult, PointSearch, Problem
from heterog.methods.recomputing import cheaper_layouts, surely_kept
from heterog.simulator import engine
from heterog.simulator.evaluation import Evaluation
from heterog.strategy.layouts.layout import Recompute
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import Strategy

NUM_TRIED = 10
"""Number of layouts that fit and are simulated: as many as the paper measures."""
NUM_REORDERED = 3
"""About this many of the best layouts are simulated on other orders of hosts, too."""
MOST_MISSED = 30
"""Number of simulations of layouts that do not fit after which the search ends."""
ANNEALED_PART = 0.5
"""Part of a budget in seconds after which no order is searched for any longer."""

Order = tuple[int, ...]
"""Hosts of a cluster, row by row; a row is a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A layout on an order of hosts."""

    point: Point
    order: Order


class Pipette(Planner):
    """Uniform layouts on dedicated hosts; see the module docstring."""

    name = "pipette"
    stage = "search"
    resumes = True

    @staticmethod
    def joins_auto(graph: OpGraph, cluster: Cluster) -> bool:
        """Whether ``auto`` gives it a part: if pairs differ; else the grid has all layouts."""
        return bool(cluster.pairs) and HostRates.of_cluster(cluster).differ

    def plan(self, problem: Problem) -> PlanResult:
        """Rank layouts, dedicate hosts, simulate the cheapest."""
        return problem.resumed(_Search).answer(problem)


class _Search(PointSearch[_Trial]):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        evaluator = problem.evaluator
        self.graph, self.cluster = evaluator.graph, evaluator.cluster
        self.rates = HostRates.of_cluster(self.cluster)
        self.costs = LayoutCosts(evaluator)
        self._parameters = float(parameter_bytes(evaluator).sum())
        self._activations = float(activation_bytes(evaluator).sum()) / self.graph.batch_size
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
                found = self._try(_Trial(point=manner, order=order))
                if found is not None and found.is_ok:
                    cheapest = self._cheapest(manner, order)
                    self._try(_Trial(point=cheapest, order=self._as_given(point)))
                    fitting += 1
                    break
                missed += 1
        for point in dict.fromkeys(trial.point for trial in self.best(2 * NUM_REORDERED)):
            for order in self._other_orders(point):
                self._try(_Trial(point=point, order=order))

    def orders(self, point: _Trial) -> tuple[engine.Order, ...]:
        """See ``PointSearch``."""
        return (self.problem.first_order,)

    def _cheapest(self, point: Point, order: Order) -> Point:
        """A layout that fits, or one that makes less again and still fits."""
        for layout in cheaper_layouts(self.graph, point.layout):
            cheaper = replace(point, layout=layout)
            found = self._try(_Trial(point=cheaper, order=order))
            if found is None or not found.is_ok:
                break
            point = cheaper
        return point

    @property
    def why_nothing(self) -> str:
        """See ``PointSearch``."""
        if self.refused:
            return f"no layout can be said: {next(iter(self.refused.values()))}"
        if self._ranked:
            return "every uniform layout overflows the memory, even with layers that recompute"
        batch, sets = self.graph.batch_size, host_sets(self.cluster)
        devices = [sum(len(self.cluster.host_devices(h)) for h in hosts) for hosts in sets]
        return (
            f"no layout of whole hosts divides a batch of {batch}: sets of alike hosts have "
            f"{', '.join(map(str, devices[:4]))} devices; take a batch that these divide"
        )

    def in_words(self, trial: _Trial) -> str:
        """The layout, the order of hosts, and the predictions of the six models."""
        names = [self.cluster.hosts[host].name for host in trial.order]
        order = " ".join(names[:16]) + (f" and {len(names) - 16} more" if names[16:] else "")
        said = ", ".join(f"{variant} {self._model_s(trial, variant):.3g} s" for variant in Variant)
        return f"{trial.point.layout} on hosts {order}; its models say {said}"

    def _model_s(self, trial: _Trial, variant: Variant) -> float:
        costs, traffic = self.costs.costs(trial.point), self.costs.traffic(trial.point)
        measured = self.rates.communication(np.array(trial.order, np.int32), traffic)
        return latency_s(variant, costs, measured if variant.needs_measured else None)

    def _rank(self, point: Point) -> tuple[float, int]:
        """Seconds by the last model with hosts as given; ties: the shorter pipeline first."""
        trial = _Trial(point=point, order=self._as_given(point))
        return self._model_s(trial, Variant.ALL), point.layout.tp * point.layout.pp

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
            traffic = self.costs.traffic(point)

            def cost_of(order: IntArray) -> float:
                return rates.communication(order, traffic, pricing).total_s

            found = anneal(
                cost_of,
                stage_by_stage(len(given), point.layout.pp),
                np.random.default_rng(self.problem.seed),
                num_steps=COOLED,
                is_over=self._is_annealed,
            )
            order = tuple(point.hosts[place] for place in found.order)
            if self._is_annealed():  # a longer round may find a better one
                return order
            self._orders[key] = order
        return self._orders[key]

    def _is_annealed(self) -> bool:
        """Whether simulations need the rest of the seconds."""
        spending = self.spending
        is_timed = self.problem.budget.seconds is not None
        return spending.is_cut or (is_timed and spending.fraction >= ANNEALED_PART)

    def _other_orders(self, point: Point) -> Iterator[Order]:
        """Orders by the program's traffic, by pipeline neighbours, by the published objective."""
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

    def _try(self, trial: _Trial) -> Evaluation | None:
        """Simulate a trial; ``None`` if it is impossible or the budget is over."""
        if trial in self.found:
            return self.found[trial]
        if self.found and self.spending.is_over:
            return None
        evaluation = self.evaluate(trial, self.problem.first_order)
        if evaluation is not None:
            best = self.found[self.best(1)[0]]
            self.problem.report(self.spending.fraction, best.step_time_s)
        return evaluation

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
        return [each for each in made if self._least_bytes(each) <= self._room(each)]

    def _least_bytes(self, point: Point) -> float:
        """Least bytes that a device holds, on average over the stages."""
        layout = point.layout
        parts = layout.tp * layout.pp
        ratio = self.graph.optimizer_state_ratio
        own = self._parameters / (2.0 + ratio) / parts
        sliced = ratio if layout.zero else 0.0
        static = own * (2.0 + ratio - sliced * (1.0 - 1.0 / layout.dp))
        return (
            static + surely_kept(layout.recompute) * self._activations * layout.micro_batch / parts
        )

    def _room(self, point: Point) -> float:
        """Bytes of the roomiest device; a layout that does not fit there fits nowhere."""
        return max(
            self.cluster.devices[device].usable_memory_bytes
            for host in point.hosts
            for device in self.cluster.host_devices(host)
        )
