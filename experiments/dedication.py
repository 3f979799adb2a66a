"""What the order of hosts is worth on a measured matrix of 16 hosts, and when it has grown old.

    python experiments/dedication.py --data ../shared/data/pipette --json

The matrix is the one that Pipette's authors publish (hosts of eight GPUs, NCCL send and receive
between all pairs, measured twice). Here its hosts have eight A100 of 80 GB each, and train GPT-3
6.7B in uniform layouts. Every row is a layout on one measurement:

- hosts by name, row by row (``rows``: neighbours are stages of one pipeline) and stage by stage
  (``given``: neighbours have the same stage, as Megatron and ``--layout`` number them);
- orders annealed for the published objective and for what heterog executes;
- what the method ``dedication`` makes of the layout;
- the mean of some random orders.

Of each there are the seconds of the published objective and of a step by the referee, the latter
also on the other measurement of the same hosts: an order is only worth what is still true when
the job runs. ``--slow 3`` makes so many pairs ten times as slow, as a bad cable would.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from large_models import gpt_6b
from rows import finish, progress, script_parser

from heterog.cluster import Cluster, PairLimit
from heterog.cluster.spec import parse_cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import load_graph
from heterog.lowering.program import FloatArray, IntArray
from heterog.methods.dedication import Dedication
from heterog.methods.host_order import on_hosts
from heterog.methods.pipette import HostRates, Pricing, anneal
from heterog.methods.pipette.annealing import COOLED
from heterog.methods.pipette.layouts import LayoutCosts, Point, stage_by_stage
from heterog.methods.planner import Budget, Candidate, Problem
from heterog.search.judging import run_method
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import Strategy

LAYOUTS = (
    "tp=8,pp=2,dp=8,micro_batch=2,zero=1",
    "tp=8,pp=4,dp=4,micro_batch=2,zero=1",
    "tp=8,pp=8,dp=2,micro_batch=2",
    "tp=8,pp=16,dp=1,micro_batch=2",
    "tp=4,pp=4,dp=8,micro_batch=2,zero=1",
)
"""All have 128 devices; those that need it slice the optimizer's state."""
HOSTS = """schema_version: 1
name: pipette_16
efficiency: 1.0
hosts:
  - name: host
    count: 16
    devices: [{type: A100-80GB, count: 8}]
    intra: nvlink_a100
    nic: {line_rate: 200 Gbit/s}
"""
"""All of the line rate is usable, since the matrix says what pairs reach."""
SLOWED = 10.0


def measured(data: Path, number: str) -> FloatArray:
    """One measurement of all pairs, bytes per second.  # [16, 16]"""
    record = json.loads((data / "bw16_t0_MBps.json").read_text())
    return np.array(record[number]["bandwidth"]) * 1e6


def with_slow_pairs(rates: FloatArray, count: int, seed: int) -> FloatArray:
    """The same with some pairs slowed down in both directions."""
    rng = np.random.default_rng(seed)
    slow = rates.copy()
    pairs = [(i, j) for i in range(len(rates)) for j in range(i)]
    for number in rng.choice(len(pairs), count, replace=False):
        i, j = pairs[number]
        slow[i, j] /= SLOWED
        slow[j, i] /= SLOWED
    return slow


def cluster_of(rates: FloatArray) -> Cluster:
    """The hosts with a matrix between them."""
    hosts = range(len(rates))
    pairs = [
        PairLimit(sources=(i,), targets=(j,), bandwidth_bytes_per_s=float(rates[i, j]))
        for i in hosts
        for j in hosts
        if i != j
    ]
    return replace(parse_cluster(HOSTS, Path("pipette_16.yaml")), pairs=tuple(pairs))


class Case:
    """A layout on one measurement, judged on both.

    Args:
        graph: the model.
        rates: that orders are searched on, and those that they are judged on as well.
        layout: in words.
        evaluations: of ``dedication``.
        seed: of everything random.
    """

    def __init__(
        self,
        graph: OpGraph,
        rates: tuple[FloatArray, FloatArray],
        layout: str,
        *,
        evaluations: int,
        seed: int,
    ) -> None:
        self.evaluators = [Evaluator(graph, cluster_of(each)) for each in rates]
        self.cluster = self.evaluators[0].cluster
        self.layout, self.evaluations, self.seed = parse_layout(layout), evaluations, seed
        self.plain = place_layout(self.layout, graph, self.cluster).strategy
        self.rates = HostRates.of_cluster(self.cluster)
        point = Point(
            layout=self.layout,
            hosts=tuple(range(self.cluster.num_hosts)),
            num_micro=graph.batch_size // (self.layout.dp * self.layout.micro_batch),
        )
        self.traffic = LayoutCosts(self.evaluators[0]).traffic(point)
        self.given = stage_by_stage(self.cluster.num_hosts, self.layout.pp)

    def objective_s(self, order: IntArray, pricing: Pricing = Pricing.PUBLISHED) -> float:
        """Communication of an order of hosts, row by row."""
        return self.rates.communication(order, self.traffic, pricing).total_s

    def strategy(self, order: IntArray) -> Strategy:
        """The layout on an order of hosts, row by row."""
        hosts = np.empty_like(order)
        hosts[self.given] = order  # the host in each place of the layout as given
        return on_hosts(self.plain, self.cluster, hosts.tolist())

    def step_s(self, strategy: Strategy, on_other: bool = False) -> float:
        """Seconds of a step by the referee, first come, first served."""
        evaluator = self.evaluators[on_other]
        own = replace(strategy, cluster=evaluator.cluster.fingerprint())
        return evaluator.referee(own, Order.FIFO).step_time_s

    def annealed(self, pricing: Pricing) -> IntArray:
        """The order of the least communication, from the one as given."""
        found = anneal(
            lambda order: self.objective_s(order, pricing),
            self.given,
            np.random.default_rng(self.seed),
            num_steps=4 * COOLED,
        )
        return np.array(found.order, np.int32)

    def dedicated(self) -> Strategy:
        """What the method makes of the layout."""
        problem = Problem(
            evaluator=self.evaluators[0],
            budget=Budget(evaluations=self.evaluations),
            seed=self.seed,
            orders=(Order.FIFO,),
            seeds=(
                Candidate(
                    strategy=self.plain,
                    orders=(Order.FIFO,),
                    judged=self.evaluators[0].referee(self.plain, Order.FIFO),
                ),
            ),
        )
        row = run_method(Dedication(), problem)
        assert row.candidate is not None
        return row.candidate.strategy

    def row(self, num_random: int) -> dict[str, object]:
        """Objective and step of all orders."""
        orders: Mapping[str, IntArray] = {
            "given": self.given,
            "rows": np.arange(self.cluster.num_hosts, dtype=np.int32),
            "published": self.annealed(Pricing.PUBLISHED),
            "executed": self.annealed(Pricing.EXECUTED),
        }
        found: dict[str, object] = {"layout": str(self.layout)}
        for name, order in orders.items():
            strategy = self.strategy(order)
            found[f"{name}_objective_s"] = self.objective_s(order)
            found[f"{name}_step_s"] = self.step_s(strategy)
            found[f"{name}_step_on_other_s"] = self.step_s(strategy, on_other=True)
        begin = time.perf_counter()
        strategy = self.dedicated()
        found["dedication_search_s"] = time.perf_counter() - begin
        found["dedication_step_s"] = self.step_s(strategy)
        found["dedication_step_on_other_s"] = self.step_s(strategy, on_other=True)
        rng = np.random.default_rng(self.seed)
        drawn = [rng.permutation(self.given) for _ in range(num_random)]
        found["random_objective_s"] = float(np.mean([self.objective_s(each) for each in drawn]))
        steps = [self.step_s(self.strategy(each)) for each in drawn]
        found["random_step_s"] = float(np.mean(steps))
        return found


def main() -> None:
    """Print the rows."""
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the matrix")
    parser.add_argument("--graph", type=Path, help="a captured step, instead of GPT-3 6.7B")
    parser.add_argument("--layouts", default=" ".join(LAYOUTS))
    parser.add_argument("--slow", type=int, default=0, help="pairs that are ten times as slow")
    parser.add_argument("--random", type=int, default=5, help="random orders")
    parser.add_argument("--evaluations", type=int, default=30, help="of dedication")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    graph = load_graph(arguments.graph) if arguments.graph else capture(gpt_6b())
    rows = []
    for number, other in (("0", "1"), ("1", "0")):
        rates = tuple(
            with_slow_pairs(measured(arguments.data, each), arguments.slow, arguments.seed)
            for each in (number, other)
        )
        for layout in arguments.layouts.split():
            case = Case(
                graph,
                (rates[0], rates[1]),
                layout,
                evaluations=arguments.evaluations,
                seed=arguments.seed,
            )
            row = case.row(arguments.random)
            rows.append({"measurement": number, "slow_pairs": arguments.slow} | row)
            progress(json.dumps(rows[-1]))
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
