"""HAP: SPMD programs by synthesis, sharding ratios by linear program (Zhang et al., EuroSys 2024).

The search (``hap.a_star``) finds the cheapest program at given ratios; the linear program
(``hap.ratios``) finds the best ratios for a given program. They alternate from several starts, and
each program is kept with the ratios at which it was priced. Column and row parallelism, heads,
vocabulary, experts and sufficient factors are not coded anywhere: they follow from sharding rules.

The paper's cost is the sum of all stages. Real steps hide most of the gradient synchronisation
behind the backward pass, so the search also runs with a part of it counted, and simulation ranks
the best programs of all runs. Data parallelism at the solved ratios is always among them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from heterog.graph.grouping import alike_groups, group_ops
from heterog.graph.placement import OpRules
from heterog.grouped import grouped
from heterog.methods.data_parallel import replicated, shares_to_try, uniform_strategy
from heterog.methods.hap.a_star import Search, SpmdProgram
from heterog.methods.hap.programs import (
    COLLECTIVES,
    PADDED_ONLY,
    SpmdPrices,
    Work,
    data_parallel,
    op_rules,
    program_cost,
)
from heterog.methods.hap.ratios import best_ratios, device_classes
from heterog.methods.hap.segments import Segments, TooWideError, fold
from heterog.methods.hap.theory import build_theory
from heterog.methods.planner import Problem, Searching, StrategySearch
from heterog.methods.teams import host_sizes, host_teams, in_teams
from heterog.methods.tuned_uniform import machine_subsets
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.strategy.division import micro_batch_table, split_evenly, split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy, Sync

_MOST_ROUNDS = 3  # of search and linear program; the paper's loop ends after two or three
_GAIN = 1e-4
"""Relative gain below which the loop of search and linear program ends."""
_NUM_SOLVED = 24  # device sets for which ratios of data parallelism are solved
_NUM_SUBSETS = 2  # subsets of machines, besides the whole cluster, that are searched
_NUM_TUNED = 3  # programs whose synchronisation, buckets and order are varied
_TEAM_MICRO = (2, 4)  # micro-batches of teams inside hosts
_NARROW = 2  # states that the narrow search keeps; on a large graph it runs before the full one
_LARGE = 3000  # least rows of a large graph: the full search of fewer takes seconds
_MOST_EXTENSIONS = 2_500_000
"""Most extensions of all full searches of a plan, some ten seconds: BERT-large on 8 devices takes
17,000 for each, an unrolled RWKV on two 2.2 million. This bounds plans under a budget in
evaluations, which time never cuts. Once they are spent, the other searches are narrow."""
_PRICED_BY = tuple(product((PADDED_ONLY, COLLECTIVES), (0.3, 1.0)))
"""For each search, the algorithms allowed for conversions and the part of the synchronisation that
counts; all algorithms and 1 in the paper. A program then runs all-reduces (hierarchical if several
devices of a host take part) and gathers."""
_WIDTH = 32
"""States that the beam keeps."""
_NUM_PROGRAMS = 2
"""Programs that each search returns."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A program with the devices and shares at which it was priced.

    Attributes:
        triples: Number of the triple for each row of the theory.
        devices: Devices that run it.
        shares: Samples of each of ``devices``.
    """

    triples: tuple[int, ...]
    devices: tuple[int, ...]
    shares: tuple[int, ...]


class Synthesis:
    """Programs and ratios of one graph on one cluster.

    Args:
        evaluator: Evaluator of the graph and cluster.
        check: Called in every loop; an exception from it ends the synthesis.

    Attributes:
        is_exact: Whether no search so far has cut a state.
        is_given_up: Whether a search was given up because it took too many steps.
    """

    def __init__(self, evaluator: Evaluator, check: Callable[[], None] = lambda: None) -> None:
        self.evaluator = evaluator
        self.is_exact = True
        self.is_given_up = False
        self._extensions_left: float = _MOST_EXTENSIONS
        self._check = check
        self.theory = build_theory(evaluator.graph, check)
        self.segments = Segments(self.theory, fold(self.theory), check)
        self.work = Work(self.theory, evaluator.cluster)
        self.start = data_parallel(self.theory)
        self._speeds = evaluator.speeds

    @property
    def note(self) -> str:
        """Whether the programs are optimal at their prices, in words."""
        if self.is_given_up:
            return (
                f"narrow searches after {_MOST_EXTENSIONS:,} steps of others, which were given up"
            )
        if self.is_exact:
            return "every program is the optimum at its prices"
        return f"a beam of {_WIDTH} states cut the search: no proof of optimality"

    def search(self, prices: SpmdPrices) -> tuple[SpmdProgram, ...]:
        """The best programs at some prices."""
        if self.is_given_up:
            return self.narrow_search(prices)
        search = Search(
            self.segments,
            prices,
            _WIDTH,
            check=self._check,
            most_extensions=self._extensions_left,
        )
        result = search.run(_NUM_PROGRAMS)
        self._extensions_left = search.extensions_left
        self.is_exact = self.is_exact and result.is_exact
        self.is_given_up = result.is_given_up
        return result.programs or self.narrow_search(prices)

    def narrow_search(self, prices: SpmdPrices) -> tuple[SpmdProgram, ...]:
        """A good program in a fraction of the time: the full search of a large graph may not end.

        An unrolled LSTM is an example: the gates of every time step may be sharded differently.
        """
        search = Search(
            self.segments,
            prices,
            _NARROW,
            check=self._check,
            most_extensions=_MOST_EXTENSIONS,
            most_at_cut=_NARROW,
        )
        return search.run().programs

    def solve(self, prices: SpmdPrices, triples: Sequence[int]) -> tuple[int, ...]:
        """Best shares of the batch for a program; the given ones if none are found."""
        if len(device_classes(self.evaluator, prices.devices)) == 1:
            return prices.shares
        ratios = best_ratios(self.work, prices, triples)
        if ratios is None or sum(ratios) <= 0.0:
            return prices.shares
        return split_in_proportion(self.evaluator.graph.batch_size, ratios)

    def starts(self, devices: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shares to begin with: in proportion to speed, and even."""
        return shares_to_try(self.evaluator.graph.batch_size, self._speeds, devices)

    def data_parallel(self, devices: tuple[int, ...]) -> Placed:
        """Data parallelism at the first shares."""
        return Placed(self.start, devices, self.starts(devices)[0])

    def solved_data_parallel(self, devices: tuple[int, ...]) -> Placed:
        """Data parallelism at the shares that the linear program finds for it."""
        prices = self._prices(devices, self.starts(devices)[0], *_PRICED_BY[0])
        return Placed(self.start, devices, self.solve(prices, self.start))

    def programs(self, devices: tuple[int, ...], *, thorough: bool) -> Iterator[Placed]:
        """The best programs and runners-up of every run.

        Args:
            devices: Devices that run the programs.
            thorough: Whether to search from all starts and under all prices, not only the first.
        """
        starts = self.starts(devices)
        yield from self._alternate(devices, starts[0], *_PRICED_BY[0])
        if not thorough:
            return
        for shares in starts[1:]:
            yield from self._alternate(devices, shares, *_PRICED_BY[0])
        for collectives, exposed in _PRICED_BY[1:]:
            yield from self._alternate(devices, starts[0], collectives, exposed)

    def _prices(
        self,
        devices: tuple[int, ...],
        shares: Sequence[int],
        collectives: Sequence[str],
        exposed: float,
    ) -> SpmdPrices:
        return SpmdPrices(
            self.work, self.evaluator, devices, shares, collectives=collectives, exposed=exposed
        )

    def _alternate(
        self,
        devices: tuple[int, ...],
        shares: tuple[int, ...],
        collectives: tuple[str, ...],
        exposed: float,
    ) -> Iterator[Placed]:
        """Search and linear program in turn, until the cost stops falling."""
        best_s = float("inf")
        prices = self._prices(devices, shares, collectives, exposed)
        if len(self.theory.rows) >= _LARGE:
            for program in self.narrow_search(prices):
                yield Placed(program.triples, devices, prices.shares)
        for _ in range(_MOST_ROUNDS):
            programs = self.search(prices)
            if not programs or programs[0].cost_s >= best_s * (1.0 - _GAIN):
                return
            for program in programs:
                yield Placed(program.triples, devices, prices.shares)
            best, best_s = programs[0].triples, programs[0].cost_s
            solved = self.solve(prices, best)
            prices = self._prices(devices, solved, collectives, exposed)
            cost_s = program_cost(self.theory, prices, best)
            if cost_s >= best_s * (1.0 - _GAIN):
                return
            yield Placed(best, devices, solved)
            best_s = cost_s


class _Ranking(StrategySearch):
    """Strategies, ranked by simulated seconds."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.order = problem.first_order
        self._seen: set[tuple[OpRules, tuple[int, ...], tuple[int, ...]]] = set()
        self._note = ""

    def search(self) -> None:
        """See ``PointSearch``."""
        whole = tuple(range(self.evaluator.cluster.num_devices))
        self._note = "out of time before it had any program but data parallelism"
        # Data parallelism comes first, so that even a short search has a result.
        batch, speeds = self.evaluator.graph.batch_size, self.evaluator.speeds
        self.add(whole, shares_to_try(batch, speeds, whole)[0])
        try:
            synthesis = Synthesis(self.evaluator, self.spending.check)
        except TooWideError as error:
            self._note = f"data parallelism only: {error}"
            self.tune()
            return

        def add(placed: Placed) -> None:
            rules = op_rules(synthesis.theory, placed.triples, synthesis.start)
            self.add(placed.devices, placed.shares, rules)
            if rules:
                self._note = "out of time before its searches ended"

        sets = dict.fromkeys((whole, *machine_subsets(self.evaluator.cluster)))
        starts = [synthesis.data_parallel(each) for each in sets if self._room(each) > 1.0]
        for placed in starts:
            self.know(placed)

        def placed_in_turn() -> Iterator[Placed]:
            yield from starts
            # Programs before ratios: where parameters are large, nothing else is any good.
            for devices in self.subsets(list(sets))[:_NUM_SUBSETS]:
                yield from synthesis.programs(devices, thorough=False)
            for devices in dict.fromkeys((whole, *self.device_sets()[:_NUM_SOLVED])):
                yield synthesis.solved_data_parallel(devices)
            yield from synthesis.programs(whole, thorough=True)

        for placed in placed_in_turn():
            if self.spending.is_over:
                break
            add(placed)
        self._note = synthesis.note
        self.prune()
        self.tune()
        self.team_up()

    @property
    def why_nothing(self) -> str:
        """See ``PointSearch``."""
        return self._note

    def in_words(self, point: tuple[Strategy, Order]) -> str:
        """See ``PointSearch``."""
        return self._note

    def add(self, devices: tuple[int, ...], shares: tuple[int, ...], rules: OpRules = ()) -> None:
        """Score a program at its shares, with the synchronisation that is usually best."""
        if (rules, devices, shares) not in self._seen:
            self._seen.add((rules, devices, shares))
            decision = replicated(self.evaluator.cluster, devices, shares, Sync.HIERARCHICAL)
            self._score(self._strategy(rules, decision, DEFAULT_BUCKET_BYTES))

    def know(self, placed: Placed) -> None:
        """Let the evaluator number channels of some devices now, so that it prices them once."""
        channels = self.problem.evaluator.channels
        for sync in (Sync.HIERARCHICAL, Sync.RING, Sync.REDUCE_SCATTER_ALL_GATHER):
            channels.for_decision(
                replicated(self.evaluator.cluster, placed.devices, placed.shares, sync)
            )
        if len(placed.devices) > 1:
            channels.all_gather(placed.devices, ())

    def device_sets(self) -> list[tuple[int, ...]]:
        """Device sets of the strategies that were scored, best first."""
        return list(dict.fromkeys(each.decisions[0].devices for each in self._ranked()))

    def _room(self, devices: tuple[int, ...]) -> float:
        """The least memory of some devices over what a replica keeps."""
        tables = self.evaluator.tables
        kept = tables.parameter_bytes.sum() * (1.0 + tables.state_ratio)
        return float(self.evaluator.feasibility.usable[list(devices)].min() / max(kept, 1.0))

    def subsets(self, sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Device sets but the whole cluster, the most promising first.

        By data parallelism if that fits. If not, its steps say nothing about programs that shard
        parameters. These send least on few hosts: of each number of hosts comes the fastest set
        with memory for all parameters.

        Args:
            sets: All sets of whole machines.
        """
        cluster, speeds = self.evaluator.cluster, self.evaluator.speeds
        if any(evaluation.is_ok for evaluation in self.found.values()):
            ranked = self.device_sets()
            return [devices for devices in ranked if len(devices) < cluster.num_devices]
        of_size = grouped(
            (len({cluster.host_of[device] for device in devices}), devices)
            for devices in sets
            if len(devices) < cluster.num_devices and len(devices) * self._room(devices) > 1.0
        )
        return [
            max(of_size[size], key=lambda devices: sum(speeds[device] for device in devices))
            for size in sorted(of_size)
        ]

    def _ranked(self) -> list[Strategy]:
        """Simulated strategies, best first, once for each order in which they were tried."""
        return [strategy for strategy, _ in self.best(len(self.found))]

    def prune(self) -> None:
        """Remove rules that do not pay in the simulation, for one kind of group at a time.

        Prices are only estimates: splitting one kind of group, such as a tied vocabulary beside
        the layers, may cost more than the other rules gain.
        """
        graph = self.problem.evaluator.graph
        group, kind_of = group_ops(graph).group, alike_groups(graph)
        on_devices = grouped(
            (each.decisions[0].devices, each) for each in self._ranked() if each.op_rules
        )
        for strategy, *_ in on_devices.values():
            rules, best = strategy.op_rules, self.found[strategy, self.order]
            for kind in dict.fromkeys(int(kind_of[group[op]]) for op, _ in rules):
                rest = tuple(each for each in rules if kind_of[group[each[0]]] != kind)
                if not rest or self.spending.is_over:
                    continue
                found = self._score(replace(strategy, op_rules=rest))
                if found is not None and found.preference < best.preference:
                    best, rules = found, rest

    def tune(self) -> None:
        """Try other synchronisations, buckets and orders for the best programs."""
        for leader in self._ranked()[:_NUM_TUNED]:
            decided = leader.decisions[0]
            for sync in (Sync.REDUCE_SCATTER_ALL_GATHER, Sync.RING, Sync.HIERARCHICAL):
                for bucket_bytes in (DEFAULT_BUCKET_BYTES, 0):
                    if sync == Sync.HIERARCHICAL and bucket_bytes:
                        continue
                    decision = replicated(
                        self.evaluator.cluster, decided.devices, decided.shares, sync
                    )
                    if self.spending.is_over:
                        return
                    self._score(self._strategy(leader.op_rules, decision, bucket_bytes))
        for strategy in self._ranked()[:_NUM_TUNED]:
            for order in self.problem.orders:
                if order != self.order and not self.spending.is_over:
                    self.evaluate((strategy, order), order)

    def team_up(self) -> None:
        """Try the best programs inside hosts, with replicas on other hosts, also in micro-batches.

        The paper's programs span all devices; with teams, their sums stay inside hosts.
        """
        cluster, speeds = self.problem.evaluator.cluster, self.problem.evaluator.speeds
        leaders = dict.fromkeys(each.op_rules for each in self._ranked() if each.op_rules)
        programs = list(leaders)[:_NUM_TUNED]
        whole = tuple(range(cluster.num_devices))
        several = dict.fromkeys((whole, *self.device_sets()[:_NUM_TUNED]))
        for rules, devices in product(programs, several):
            for size in host_sizes(cluster, len(devices)):
                even = split_evenly(self.problem.evaluator.graph.batch_size, len(devices))
                plain = replicated(
                    self.evaluator.cluster, devices, even, Sync.REDUCE_SCATTER_ALL_GATHER
                )
                decision = in_teams(plain, host_teams(cluster, devices, size), speeds, cluster)
                if len(decision.teams) < 2 or self.spending.is_over:
                    continue
                strategy = self._strategy(rules, decision, DEFAULT_BUCKET_BYTES)
                for num_micro in (1, *_TEAM_MICRO):
                    counts = split_evenly(self.problem.evaluator.graph.batch_size, num_micro)
                    micro = micro_batch_table(counts, cluster.num_devices)
                    if num_micro <= min(decision.shares) and not self.spending.is_over:
                        self._score(replace(strategy, micro_batches=micro))

    def _strategy(self, rules: OpRules, decision: Decision, bucket_bytes: int) -> Strategy:
        strategy = uniform_strategy(
            self.problem.evaluator,
            decision,
            bucket_bytes=bucket_bytes,
            step_barrier=self.problem.step_barrier,
        )
        return replace(strategy, op_rules=rules)

    def _score(self, strategy: Strategy) -> Evaluation | None:
        """Simulate a strategy; ``None`` if it is not legal."""
        return self.evaluate((strategy, self.order), self.order)


class Hap(Searching):
    """SPMD program synthesis with solved ratios; see the module docstring."""

    name = "hap"
    stage = "search"
    search = _Ranking
