"""The cheapest plan: every method searches several sets of hosts, and the objective decides.

Methods minimize seconds, not money. A plan costs the rent of its hosts per second times its
seconds, so on a fixed set of hosts the fastest plan is the cheapest. The cheapest plan of all is
therefore the cheapest among the fastest plans of all sets. There are too many sets to search them
all: 16 hosts of four kinds have 624. So the seconds of each set are estimated from speeds and
links, and sets are ordered by how few others are both faster and cheaper (``ranked_host_sets``).
Methods search the whole cluster and the first of the other sets. A set is skipped if its lower
bound is neither cheaper than the best plan so far nor in time for the deadline.

A strategy that uses some of the hosts takes the same time with and without the others: nothing
runs on the others and nothing crosses their links. So a method that knows no prices searches the
cluster of the rented hosts alone (``HostSubset.part``). Its strategy holds for the whole cluster
once its devices are renumbered (``HostSubset.lifted``); the referee of the whole cluster judges
it.

Under a budget in evaluations, the whole cluster is searched exactly as for the shortest step, with
the whole budget, and all other sets together get as much again. So the cheapest plan never costs
more than the fastest one of the same seed. Neither the order of sets nor the searches depend on
the deadline, only the choice at the end does, so a later deadline never makes a plan dearer. A
budget in seconds is divided among the sets; the rest continues the search on the set of the best
plan. While no plan meets the deadline, the whole cluster gets more.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from heterog.cluster.topology import Cluster
from heterog.grouped import grouped
from heterog.memo import kept
from heterog.methods.changes import renumbered
from heterog.methods.planner import Budget, Candidate
from heterog.methods.registry import AUTO
from heterog.names import first_of
from heterog.search.allotment import Allotment
from heterog.search.objective import Offer, best_trades, hosts_used, offer_of, rent_per_s
from heterog.search.portfolio import prepare, run_methods
from heterog.search.request import Request, SeedPlanner, Session
from heterog.search.rows import MethodRow
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import lower_bound_s
from heterog.strategy.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class HostSubset:
    """Some hosts of a cluster.

    Attributes:
        whole: The whole cluster.
        hosts: Positions of the hosts that may be used, ascending.
    """

    whole: Cluster
    hosts: tuple[int, ...]

    @property
    def name(self) -> str:
        """Names of the hosts, or of the first few and how many more there are."""
        names = [self.whole.hosts[host].name for host in self.hosts]
        return first_of(names, most=4 if len(names) == 4 else 3)

    @property
    def is_whole(self) -> bool:
        """Whether these are all hosts."""
        return len(self.hosts) == self.whole.num_hosts

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Device of the whole cluster for each device of the part."""
        return tuple(d for host in self.hosts for d in self.whole.host_devices[host])

    @cached_property
    def part(self) -> Cluster:
        """The cluster of these hosts alone, with the lines that still have hosts on both sides."""
        return self.whole.part(self.devices)

    def lifted(self, strategy: Strategy) -> Strategy:
        """A strategy for the part as one for the whole cluster, where other hosts do nothing."""
        if self.is_whole:
            return strategy
        return renumbered(strategy, self.devices, self.whole)


def on_part(strategy: Strategy, whole: Cluster, devices: Sequence[int], part: Cluster) -> Strategy:
    """A strategy that uses only some devices, renumbered for the cluster of these devices.

    Args:
        strategy: Strategy for the whole cluster, whose modes name no devices.
        whole: The whole cluster.
        devices: Device of the whole cluster for each device of the part.
        part: The part.
    """
    place = [-1] * whole.num_devices
    for number, device in enumerate(devices):
        place[device] = number
    return renumbered(strategy, place, part)


MOST_SETS = 4096
"""Most sets with an estimate; beyond, counts of a kind are thinned to 1, 2, 4, ... all."""
_MOST_SYNC = 2.0
"""Most seconds of gradient sums, in times of compute: beyond, a pipeline sends less."""


_Guess = tuple[float, float, tuple[int, ...]]
"""Guessed cost and seconds of a step on some hosts, which are ascending."""


def ranked_host_sets(evaluator: Evaluator) -> list[tuple[int, ...]]:
    """All sets of hosts that differ and could hold the model, the most promising ones first.

    Args:
        evaluator: Evaluator of the graph and a cluster with prices.
    """
    speeds = evaluator.speeds
    cluster, graph = evaluator.cluster, evaluator.graph
    parameters_bytes = sum(int(graph.tensor_bytes[tensor]) for _, tensor, _ in graph.updates)
    least_bytes = parameters_bytes * (1.0 + graph.optimizer_state_ratio)
    found = []
    for hosts in differing_sets(cluster):
        devices = [device for host in hosts for device in cluster.host_devices[host]]
        if sum(cluster.devices[d].usable_memory_bytes for d in devices) < least_bytes:
            continue
        compute_s = graph.batch_size / sum(speeds[device] for device in devices)
        sync_s = _sync_s(cluster, hosts, len(devices), float(parameters_bytes))
        seconds = max(compute_s, min(sync_s, _MOST_SYNC * compute_s))
        found.append((seconds * rent_per_s(cluster, hosts), seconds, hosts))
    return _by_layers(found)


def differing_sets(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Sets of hosts with the first ones of each kind and price, smallest sets first."""
    kinds = grouped(
        ((kind, cluster.host_price_per_s(host)), host)
        for host, kind in enumerate(cluster.host_kind)
    )
    members = list(kinds.values())
    counts = [list(range(len(own) + 1)) for own in members]
    if math.prod(map(len, counts)) > MOST_SETS:
        counts = [[n for n in own if n & (n - 1) == 0 or n == own[-1]] for own in counts]
    if math.prod(map(len, counts)) > MOST_SETS:
        counts = _all_or_none(counts)
    for chosen in sorted(product(*counts), key=lambda numbers: (sum(numbers), numbers)):
        hosts = [h for own, count in zip(members, chosen, strict=True) for h in own[:count]]
        if hosts:
            yield tuple(sorted(hosts))


def _all_or_none(counts: Sequence[list[int]]) -> list[list[int]]:
    """All or no hosts of each of the first kinds, up to ``MOST_SETS``; all of every other kind."""
    free = int(math.log2(MOST_SETS))
    both = [sorted({0, own[-1]}) for own in counts[:free]]
    return [*both, *([own[-1]] for own in counts[free:])]


def _sync_s(cluster: Cluster, hosts: Sequence[int], num_devices: int, num_bytes: float) -> float:
    """Seconds of a ring of all devices over the slowest link: 2 (n - 1) / n of the bytes."""
    if num_devices == 1:
        return 0.0
    if len(hosts) == 1:
        rate = cluster.hosts[hosts[0]].intra.bandwidth_bytes_per_s
    else:
        rate = min(cluster.nic_bandwidth_bytes_per_s[host] for host in hosts)
    return 2.0 * (num_devices - 1) / num_devices * num_bytes / rate


def _by_layers(sets: Sequence[_Guess]) -> list[tuple[int, ...]]:
    """Sets by Pareto layer of time and cost: first those that no other set beats in both."""
    left = sorted(sets, key=lambda each: (*each[:2], len(each[2]), each[2]))
    ranked: list[tuple[int, ...]] = []
    while left:
        rest: list[_Guess] = []
        fastest_s = math.inf
        for each in left:  # cheapest first, so any later one has to be faster
            if each[1] < fastest_s:
                ranked.append(each[2])
            else:
                rest.append(each)
            fastest_s = min(fastest_s, each[1])
        left = rest
    return ranked


MOST_SEARCHED = 8
"""Most sets of hosts beside the whole cluster that are searched in."""
WHOLE_PART, SETS_PART = 0.35, 0.45
"""Parts of a budget in seconds for the whole cluster and for all other sets; the rest continues
the search on the set of the best plan."""
LEAST_SET_S = 0.7
"""Least seconds for a set: with less, a search finds little more than baselines."""


class CheapestSearch:
    """Searches one set of hosts after another; see the module docstring.

    Args:
        evaluator: Evaluator of the graph and the whole cluster, which has prices.
        request: Request whose objective decides among the plans found.
        session: Progress, stop switch and workers of the search.
    """

    def __init__(self, evaluator: Evaluator, request: Request, session: Session) -> None:
        self._evaluator = evaluator
        self._objective = request.objective
        self._request, self._session = request, session
        self._found: list[tuple[HostSubset, MethodRow]] = []

    def run(self, budget: Budget, allotment: Allotment) -> list[MethodRow]:
        """Search until the budget is over; one row per method, the best by the objective."""
        named = self._request.methods
        wanted = [each for each in self._request.known if AUTO in named or each.name in named]
        prepare(self._evaluator, wanted, self._session)
        allotment.begin()
        everything = tuple(range(self._evaluator.cluster.num_hosts))
        sets = [each for each in ranked_host_sets(self._evaluator) if each != everything]
        sets = sets[:MOST_SEARCHED]
        each_s = 0.0
        if budget.seconds is None:
            parts = [budget, *[budget.part(1.0 / max(len(sets), 1))] * len(sets)]
        else:
            whole_s = max(allotment.search_s(()), LEAST_SET_S)
            sets = sets[: max(int(SETS_PART * whole_s / LEAST_SET_S), 1)]
            each_s = SETS_PART * whole_s / max(len(sets), 1)
            first_s = WHOLE_PART * whole_s if sets else whole_s
            parts = [Budget(seconds=first_s), *[Budget(seconds=each_s)] * len(sets)]
        self._search(everything, parts.pop(0))
        if budget.seconds is not None and sets and self._is_late():
            # Fewer hosts are hardly faster: half of the sets' time goes to the whole cluster.
            kept = (len(sets) + 1) // 2
            self._search(everything, Budget(seconds=each_s * (len(sets) - kept) or 0.5 * each_s))
            sets = sets[:kept]
        for hosts, part in zip(sets, parts, strict=False):
            if not (self._session.stop.is_requested or self._is_hopeless(hosts)):
                self._search(hosts, part)
        if budget.seconds is not None and sets:
            self._go_on(allotment)
        return self._rows()

    def offers(self) -> tuple[Offer, ...]:
        """The trades of time for money that no other beats in both, fastest first."""
        cluster = self._evaluator.cluster
        fitting = ((sub, row) for sub, row in self._found if row.step_time_s is not None)
        return best_trades(offer_of(row, _used(sub, row), cluster) for sub, row in fitting)

    def _search(self, hosts: tuple[int, ...], part: Budget) -> None:
        subset = HostSubset(whole=self._evaluator.cluster, hosts=hosts)
        evaluator = self._on(subset.hosts)
        request, session = self._request, self._session
        progress = session.progress
        if not subset.is_whole:
            where = subset.name
            progress = lambda method, fraction, best: session.progress(  # noqa: E731
                f"{method} on {where}", fraction, best
            )
        rows = run_methods(
            evaluator,
            replace(
                request,
                cluster=subset.part,
                budget=part,
                given=request.given if subset.is_whole else None,
                seeds=self._seeds(subset),
            ),
            replace(
                session,
                progress=progress,
                allotment=None if part.seconds is None else Allotment(part),
            ),
        )
        self._found += [(subset, row) for row in rows]

    def _go_on(self, allotment: Allotment) -> None:
        """Spend what is left of a budget in seconds on the hosts of the best plan."""
        able = [pair for pair in self._found if pair[1].candidate is not None]
        if not able or self._session.stop.is_requested:
            return
        subset, best = min(able, key=lambda pair: self._rank(*pair))
        assert best.candidate is not None
        strategy = subset.lifted(best.candidate.strategy)
        left_s = allotment.search_s([replace(best.candidate, strategy=strategy)])
        if left_s >= LEAST_SET_S:
            self._search(_used(subset, best), Budget(seconds=left_s))

    def _seeds(self, subset: HostSubset) -> SeedPlanner | None:
        """Strategies found earlier on the same hosts, which start another search there."""
        again = [
            row.candidate
            for other, row in self._found
            if other.hosts == subset.hosts and row.candidate is not None
        ]
        return SeedPlanner("continued", again) if again else None

    @kept
    def _on(self, hosts: tuple[int, ...]) -> Evaluator:
        whole = self._evaluator
        subset = HostSubset(whole=whole.cluster, hosts=hosts)
        return whole if subset.is_whole else Evaluator(whole.graph, subset.part, whole.cost_model)

    def _is_late(self) -> bool:
        """Whether even the fastest plan so far ends after the deadline."""
        times = [row.step_time_s for _, row in self._found if row.step_time_s is not None]
        return self._objective.missed_s(min(times, default=0.0)) > 0.0

    def _is_hopeless(self, hosts: tuple[int, ...]) -> bool:
        """Whether no plan that needs all of these hosts can be the best one.

        The search on fewer hosts finds the plans that need fewer.
        """
        objective, whole = self._objective, self._evaluator
        part = HostSubset(whole=whole.cluster, hosts=hosts).part
        bound = lower_bound_s(whole.graph, part, whole.cost_model, with_op_rules=True)
        least_s = bound.seconds if self._request.step_barrier else bound.compute_s
        rent = rent_per_s(whole.cluster, hosts)
        best = min(
            (self._rank(*pair) for pair in self._found if pair[1].step_time_s is not None),
            default=None,
        )
        return best is not None and objective.key(step_time_s=least_s, cost_per_s=rent) > best

    def _rank(self, subset: HostSubset, row: MethodRow) -> tuple[float, ...]:
        return self._objective.rank(subset.part)(row)

    def _rows(self) -> list[MethodRow]:
        """One row per method: its best plan on any hosts, judged on the whole cluster."""
        by_method = grouped(
            (row.method, (subset, row)) for subset, row in self._found if row.method != "continued"
        )
        return [self._best(found) for found in by_method.values()]

    def _best(self, found: Sequence[tuple[HostSubset, MethodRow]]) -> MethodRow:
        able = [pair for pair in found if pair[1].candidate is not None] or [found[0]]
        subset, row = min(able, key=lambda pair: self._rank(*pair)) if len(able) > 1 else able[0]
        row = row if subset.is_whole else self._lifted(subset, row)
        rows = [each for _, each in found]
        return replace(
            row,
            num_evaluations=sum(each.num_evaluations for each in rows),
            search_seconds=sum(each.search_seconds for each in rows),
        )

    def _lifted(self, subset: HostSubset, row: MethodRow) -> MethodRow:
        """The row of a host subset, judged again on the whole cluster."""
        where = f"on {subset.name}"
        row = replace(row, note="; ".join(filter(None, (where, row.note))))
        if row.candidate is None:
            return row
        strategy = subset.lifted(row.candidate.strategy)
        judged = self._evaluator.referee(strategy, row.candidate.orders[0])
        return replace(
            row,
            outcome=str(judged.outcome),
            step_time_s=judged.step_time_s if judged.is_ok else None,
            peak_memory_bytes=judged.peak_memory_bytes,
            shortage=judged.shortage,
            overflow_bytes=judged.overflow_bytes,
            candidate=Candidate(strategy=strategy, orders=(judged.order,), judged=judged),
        )


def _used(subset: HostSubset, row: MethodRow) -> tuple[int, ...]:
    """Hosts of the whole cluster that a row's strategy uses."""
    assert row.candidate is not None
    return tuple(subset.hosts[h] for h in hosts_used(row.candidate.strategy, subset.part))
