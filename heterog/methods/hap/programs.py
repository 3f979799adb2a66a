"""The cost of a program at given sharding ratios, and its strategy.

Seconds of triples and conversions come from the evaluator's cost model. As in the paper, each
stage waits for its slowest device: a divided op takes the time of its slowest part, a collective
that of its padded or uneven volume. Sizes are bytes. Unlike the paper's code, latencies count, and
each conversion uses the cheapest of the allowed algorithms.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import batch_plan, op_work
from heterog.graph.op_graph import FloatArray
from heterog.graph.placement import OpCall, OpRule, OpRules
from heterog.lowering.channels import ChannelKind, ChannelTable
from heterog.memo import kept
from heterog.methods.hap.forms import Form
from heterog.methods.hap.theory import Role, Row, Theory, Triple, batch_triple
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

IMPOSSIBLE = 1e9
"""Price of a conversion that does not exist; sums of a few stay far above any step."""

COLLECTIVES = (
    "padded_all_gather",
    "grouped_broadcast",
    "all_to_all",
    "reduce_scatter",
    "hierarchical_all_reduce",
)
"""Algorithms that a conversion may choose from, besides the ring all-reduce."""
PADDED_ONLY = ("padded_all_gather",)
_CHANNELS = {
    "ring": ChannelKind.ALL_REDUCE_RING,
    "hierarchical": ChannelKind.ALL_REDUCE_HIERARCHICAL,
    "reduce_scatter": ChannelKind.REDUCE_SCATTER,
    "grouped": ChannelKind.ALL_GATHER,
    "padded": ChannelKind.ALL_GATHER,
    "gather": ChannelKind.ALL_GATHER,
}
"""Channel of each algorithm."""


@dataclass(frozen=True, slots=True)
class ValueClass:
    """Properties of a value that determine the price of its conversions."""

    num_bytes: int
    forms: tuple[Form, ...]
    role: Role
    is_gradient: bool


class Work:
    """FLOPs and bytes of every triple of every op: a fixed amount, and one divided along its axis.

    Attributes:
        theory: Theory with the triples.
        channels: Own table, so that pricing never adds channels to the evaluator's table.
        units: Axis of each triple, 0 if it is not divided.  # [most_triples, num_ops]
        axes: All different axes.
    """

    def __init__(self, theory: Theory, cluster: Cluster) -> None:
        self.theory = theory
        self.channels = ChannelTable(cluster)
        graph = theory.graph
        most = max(len(row.triples) for row in theory.rows)
        self.units = np.zeros((most, graph.num_ops), np.int64)
        self._amounts = np.zeros((4, most, graph.num_ops))
        known: dict[tuple[OpCall, Triple | OpRule | None], tuple[float, ...]] = {}
        for row in theory.rows:
            for number, triple in enumerate(row.triples):
                self.units[number, row.op] = triple.units
                key = (graph.calls[row.op], triple.rule or triple)
                if key not in known:
                    known[key] = _amounts(theory, row, triple)
                self._amounts[:, number, row.op] = known[key]
        self.axes = [int(units) for units in np.unique(self.units)]

    def seconds(self, evaluator: Evaluator, type_number: int, part: FloatArray) -> FloatArray:
        """Seconds of every triple on a type of device that does a part of its axis.

        Args:
            evaluator: Evaluator with the cost model and cluster.
            type_number: Number of the cluster's device type.
            part: Part of its axis for each triple.  # [most_triples, num_ops]
        """
        device_type = evaluator.cluster.device_types[type_number]
        flops_fixed, flops, bytes_fixed, num_bytes = self._amounts
        return np.array(
            [
                evaluator.cost_model.work_seconds(
                    self.theory.graph,
                    device_type,
                    flops_fixed[number] + part[number] * flops[number],
                    bytes_fixed[number] + part[number] * num_bytes[number],
                )
                for number in range(len(part))
            ]
        )


def _amounts(theory: Theory, row: Row, triple: Triple) -> tuple[float, ...]:
    """(FLOPs fixed, FLOPs divided, bytes fixed, bytes divided) of a triple, for the whole axis."""
    graph = theory.graph
    op = graph.ops[row.op]
    if row.is_update:
        whole = (op.flops, op.bytes_read + op.bytes_written)
        return (0.0, whole[0], 0.0, whole[1]) if triple.units else (whole[0], 0.0, whole[1], 0.0)
    if triple.rule is None:
        plan = batch_plan(graph)
        batch = graph.batch_size
        return (
            float(plan.flops_fixed[row.op]),
            float(plan.flops_per_sample[row.op]) * batch,
            float(plan.bytes_fixed[row.op]),
            float(plan.bytes_per_sample[row.op]) * batch,
        )
    rule, units = triple.rule, triple.rule.units
    fixed, each, bytes_fixed, bytes_each = op_work(graph, row.op, rule.outputs, rule.inputs, units)
    return fixed, each * units, bytes_fixed, bytes_each * units


class SpmdPrices:
    """Prices of one theory at one vector of ratios.

    Args:
        work: Work of the triples of a theory.
        evaluator: Evaluator with the cost model and channels.
        devices: Devices that run the program, ascending.
        shares: Samples of each of ``devices``; every other axis is divided in the same
            proportions.
        collectives: Members of ``COLLECTIVES`` that a conversion may use.
        exposed: Part of the gradients' synchronisation that is not hidden behind the backward
            pass; 1 in the paper.
    """

    def __init__(
        self,
        work: "Work",
        evaluator: Evaluator,
        devices: Sequence[int],
        shares: Sequence[int],
        *,
        collectives: Sequence[str] = COLLECTIVES,
        exposed: float = 1.0,
    ) -> None:
        self.work = work
        self.theory = work.theory
        self.evaluator = evaluator
        self.shares = tuple(shares)
        self.collectives = frozenset(collectives)
        self.exposed = exposed
        self.devices = tuple(devices)

    @kept
    def shares_of(self, units: int) -> tuple[int, ...]:
        """Number of units of an axis on each device."""
        if units == self.theory.graph.batch_size:
            return self.shares
        return split_in_proportion(units, tuple(float(share) for share in self.shares))

    @cached_property
    def seconds(self) -> FloatArray:
        """Seconds of each triple of each op on its slowest device.  # [most_triples, num_ops]"""
        types = self.evaluator.cluster.type_index
        slowest = np.zeros(self.work.units.shape)
        for number in range(len(self.evaluator.cluster.device_types)):
            members = [p for p, device in enumerate(self.devices) if types[device] == number]
            parts = {units: self._largest_part(units, members) for units in self.work.axes}
            part = np.vectorize(parts.__getitem__, otypes=[np.float64])(self.work.units)
            seconds = self.work.seconds(self.evaluator, number, part)
            slowest = np.maximum(slowest, np.where(part > 0.0, seconds, 0.0))
        return slowest

    def _largest_part(self, units: int, members: Sequence[int]) -> float:
        if units == 0:
            return 1.0 if any(self.shares[position] > 0 for position in members) else 0.0
        return max((self.shares_of(units)[position] for position in members), default=0) / units

    @kept
    def _channel(self, kind: str, units: int = 0) -> tuple[float, float]:
        """(latency, seconds per payload byte) of an algorithm."""
        table, devices = self.work.channels, self.devices
        if len(devices) == 1:
            return 0.0, 0.0
        slices = self.shares_of(units) if kind in ("reduce_scatter", "grouped") else ()
        number = table.collective(_CHANNELS[kind], devices, slices)
        cost = self.evaluator.cost_model.channel_seconds(self.evaluator.cluster, table[number])
        latency, per_byte = cost.latency_s + cost.fill_s, cost.seconds_per_byte
        if kind == "padded":
            per_byte *= len(devices) * max(self.shares_of(units)) / units
        elif kind == "grouped":
            latency *= sum(share > 0 for share in self.shares_of(units))
        return latency, per_byte

    @cached_property
    def _all_to_all_latency(self) -> float:
        first, *others = self.devices
        return len(others) * max(
            (self.evaluator.cluster.latency_s(first, device) for device in others), default=0.0
        )

    @kept
    def _all_to_all_s_per_byte(self, source: int, target: int) -> float:
        """Seconds per byte of an all-to-all between two splits; NICs and ports work at once.

        If device i has the part a_i and wants the part b_i, it sends a_i (1 - b_i) of all bytes,
        of which a_i (1 - sum of b over its host) leaves the host.
        """
        cluster = self.evaluator.cluster
        have = np.array(self.shares_of(source)) / source
        want = np.array(self.shares_of(target)) / target
        worst = 0.0
        hosts = np.array(cluster.host_of)[list(self.devices)]
        for host in np.unique(hosts).tolist():
            here = hosts == host
            out = have[here].sum() * (1.0 - want[here].sum())
            into = want[here].sum() * (1.0 - have[here].sum())
            outside = max(out, into) if not here.all() else 0.0
            worst = max(worst, outside / cluster.nic_bandwidth_bytes_per_s[host])
            inside = have[here].max() * (want[here].sum() - want[here].min())
            worst = max(worst, inside / cluster.hosts[host].intra.bandwidth_bytes_per_s)
        return float(worst)

    def all_reduce_s(self, num_bytes: int) -> float:
        """Seconds of the better of ring and, if allowed, hierarchical all-reduce."""
        kinds = ["ring"]
        if "hierarchical_all_reduce" in self.collectives:
            kinds.append("hierarchical")
        return min(_affine(self._channel(kind), num_bytes) for kind in kinds)

    def gather_s(self, num_bytes: int, units: int) -> float:
        """Seconds of an all-gather along an axis: padded, or broadcasts in a group."""
        kinds = ["padded"]
        if "grouped_broadcast" in self.collectives:
            kinds.append("grouped")
        return min(_affine(self._channel(kind, units), num_bytes) for kind in kinds)

    def padded_gather(self, num_bytes: int) -> tuple[float, float]:
        """(latency, seconds per unit of the largest ratio) of a padded all-gather."""
        latency, per_byte = self._channel("gather")
        return latency, per_byte * num_bytes * len(self.devices)

    def synchronise_s(self, num_bytes: int) -> float:
        """Exposed seconds of synchronising a replicated parameter's gradient in buckets.

        The better of ring and hierarchical; ``collectives`` limits conversions of values only.
        """
        # A gradient that fills a tenth of a bucket pays a tenth of the bucket's latency.
        filled = min(num_bytes / DEFAULT_BUCKET_BYTES, 1.0)
        costs = map(self._channel, ("ring", "hierarchical"))
        return self.exposed * min(
            latency * filled + per_byte * num_bytes for latency, per_byte in costs
        )

    @kept
    def delivery(self, kind: ValueClass) -> "Delivery":
        """Prices of converting values of a class into sets of forms."""
        return Delivery(self.conversions(kind))

    def conversions(self, kind: ValueClass) -> list[list[float]]:
        """Seconds of one conversion from each form of a value to each other."""
        forms = kind.forms
        if kind.role == Role.PARAMETER:
            return [
                [0.0 if i in (0, j) else IMPOSSIBLE for j in range(len(forms))]
                for i in range(len(forms))
            ]
        if kind.is_gradient:
            return self._gradient_conversions(kind)
        return [[self._direct(a, b, kind.num_bytes) for b in forms] for a in forms]

    def _gradient_conversions(self, kind: ValueClass) -> list[list[float]]:
        """Seconds for a gradient: synchronisation makes it whole; it is never split later."""
        price = [[IMPOSSIBLE] * len(kind.forms) for _ in kind.forms]
        for i, form in enumerate(kind.forms):
            price[i][i] = 0.0
            if form.kind == "P":
                price[i][0] = self.synchronise_s(kind.num_bytes)
            elif form.kind == "S":
                price[i][0] = self.gather_s(kind.num_bytes, form.units)
        return price

    def _direct(self, have: Form, want: Form, num_bytes: int) -> float:
        if have.kind == "R" or have == want:  # of R, a slice, or zeros on all devices but one
            return 0.0
        if want.kind == "R":
            if have.kind == "P":
                return self.all_reduce_s(num_bytes)
            return self.gather_s(num_bytes, have.units)
        if want.kind == "S" and have.kind == "P" and "reduce_scatter" in self.collectives:
            return _affine(self._channel("reduce_scatter", want.units), num_bytes)
        if want.kind == "S" and have.kind == "S" and "all_to_all" in self.collectives:
            per_byte = self._all_to_all_s_per_byte(have.units, want.units)
            return self._all_to_all_latency + per_byte * num_bytes
        return IMPOSSIBLE


def _affine(cost: tuple[float, float], num_bytes: int) -> float:
    return cost[0] + cost[1] * num_bytes


class Delivery:
    """Cheapest conversions of a value from the form in which it is made into a set of forms.

    The price of a set is that of a tree of conversions from the made form, which may pass through
    other forms. So the price never falls when a form is added to the set.

    Args:
        conversions: Seconds of one conversion from each form to each other.

    Attributes:
        conversions: Seconds of the cheapest sequence of conversions from each form to each other.
    """

    def __init__(self, conversions: Sequence[Sequence[float]]) -> None:
        self.conversions = price = [list(row) for row in conversions]
        forms = range(len(price))
        for k in forms:  # Floyd and Warshall's shortest paths
            for i in forms:
                for j in forms:
                    price[i][j] = min(price[i][j], price[i][k] + price[k][j])

    def price(self, made: int, wanted: int) -> float:
        """Seconds from form ``made`` to all forms in the bit set ``wanted``."""
        wanted &= ~(1 << made)
        if wanted & (wanted - 1):  # several forms
            return min(self._grow(made)[wanted | 1 << made], IMPOSSIBLE)
        return self.conversions[made][wanted.bit_length() - 1] if wanted else 0.0

    @kept
    def _grow(self, made: int) -> list[float]:
        """Seconds from form ``made`` to every set of forms, or to a larger set."""
        count = len(self.conversions)
        # Every set is reached by adding one form to a smaller one, which has a smaller number.
        cost = [float("inf")] * (1 << count)
        cost[1 << made] = 0.0
        for reached, step in enumerate(self._steps):
            so_far = cost[reached]
            if so_far == float("inf"):
                continue
            for form in range(count):
                grown = reached | 1 << form
                if grown != reached:
                    cost[grown] = min(cost[grown], so_far + step[form])
        # A set costs no more than any set that contains it: the tree may hold unwanted forms.
        for form in range(count):
            for forms in range(1 << count):
                if not forms >> form & 1:
                    cost[forms] = min(cost[forms], cost[forms | 1 << form])
        return cost

    @cached_property
    def _steps(self) -> list[list[float]]:
        """Seconds of the cheapest conversion from any form of each set to each form."""
        steps = [[float("inf")] * len(self.conversions)]
        for forms in range(1, 1 << len(self.conversions)):
            lowest = forms & -forms
            others, alone = steps[forms ^ lowest], self.conversions[lowest.bit_length() - 1]
            steps.append([min(pair) for pair in zip(others, alone, strict=True)])
        return steps


def data_parallel(theory: Theory) -> tuple[int, ...]:
    """The program that splits everything along the batch: the start of every search."""
    plan = batch_plan(theory.graph)
    return tuple(batch_triple(theory, row, plan) for row in theory.rows)


def form_sets(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The forms of each value as a bit set, from pairs (value, number of a form)."""
    found: dict[int, int] = {}
    for value, form in pairs:
        found[value] = found.get(value, 0) | 1 << form
    return found


def program_cost(theory: Theory, prices: SpmdPrices, triples: Sequence[int]) -> float:
    """Cost of a program by definition, whatever the order of the search; see ``a_star``."""
    gradients = {row.reads[1].value for row in theory.rows if row.is_update}
    total = 0.0
    made: dict[int, int] = {}
    stored: dict[int, int] = {}
    chosen = [
        (row, number, row.triples[number])
        for row, number in zip(theory.rows, triples, strict=True)
    ]
    for row, number, triple in chosen:
        total += float(prices.seconds[number, row.op])
        made.update(triple.makes)
        if row.is_update:
            stored.update(triple.needs[:1])  # of the parameter, then of its gradient
    needed = form_sets(pair for *_, triple in chosen for pair in triple.needs)
    for number, forms in needed.items():
        value = theory.values[number]
        if value.role == Role.PARAMETER:
            # All readers of a split parameter must want that form; a whole one can be sliced.
            form = stored.get(number, 0)
            if form != 0 and forms != 1 << form:
                return IMPOSSIBLE
            continue
        kind = ValueClass(value.num_bytes, tuple(value.forms), value.role, number in gradients)
        if number in made:
            total += prices.delivery(kind).price(made[number], forms)
    return total


def op_rules(theory: Theory, triples: Sequence[int], start: Sequence[int]) -> OpRules:
    """The explicit rules of a strategy, for every op that does not follow the batch plan.

    Args:
        theory: Theory of the graph.
        triples: The program.
        start: The batch plan as a program (``data_parallel``).
    """
    found = []
    for row, number, batch in zip(theory.rows, triples, start, strict=True):
        rule = row.triples[number].rule
        if rule is not None and number != batch:
            found.append((row.op, rule))
    return tuple(sorted(found, key=lambda pair: pair[0]))
