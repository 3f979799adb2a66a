"""The best uniform layout by enumeration, as a careful person would tune it by hand.

Layouts are those that Megatron-LM and FSDP offer: equal replicas, stages with equal numbers of
layers, even shares. The enumeration has every tp x pp x dp that fills the machines, every
micro-batch that divides a share, ZeRO (also with one sliced copy on each host), recomputation,
sequence and expert parallelism, and schedules. The faster kinds of machines alone and fewer
machines are tried, too. A *shape* is a division with a micro-batch, a *manner* the rest of a
layout. Shapes are tried in the order of an estimate, each in the first manner that fits into
memory, from the fastest to the leanest; after every few shapes, the manner of the best one is
varied. A search that is cut short returns the best so far.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import gcd, prod

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import batch_plan, micro_batches_refused
from heterog.graph.op_graph import Phase
from heterog.grouped import grouped
from heterog.memo import kept
from heterog.methods.islands.slices import boundary_bytes, layers_or_groups
from heterog.methods.planner import PointSearch, Problem, Searching
from heterog.methods.recomputing import cheaper_layouts, surely_kept, words_worth_trying
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.keeping import attention_scores
from heterog.strategy.layouts.experts import expert_weights
from heterog.strategy.layouts.layout import Dispatch, Layout, Recompute
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.stages import layers_of, num_returns
from heterog.strategy.strategy import Strategy

MOST_SHAPES = 48
"""Most shapes with a micro-batch that are tried, those with the shortest estimated step first."""
VARIED_AFTER = 8
"""Number of shapes after which the manner of the best point is varied, so that a search that is
cut short has tried shapes and manners."""
NUM_VARIED = 3
"""Number of the best shapes whose manner is varied when all have been tried."""
FEW_HOSTS = 4
"""Number of hosts up to which every number of them is tried."""
BUBBLE_OF_1F1B_OVER_V = 6.0
"""Bubble of 1F1B over that of two chunks in a V with split backward passes (Qi et al. 2023: 9 and
1.5 units for four stages, if each pass takes one unit)."""
MOST_TASKS = 6_000_000
"""Most tasks of a program, about a second's work; layouts with more are left out. Replicas on
alike hosts are simulated once, so of a stage at most the ``unlike_devices`` count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A layout on some machines."""

    layout: Layout
    devices: tuple[int, ...]
    num_micro: int

    @property
    def shape(self) -> tuple[object, ...]:
        """The shape: everything but the manner."""
        layout = self.layout
        return layout.tp, layout.pp, layout.dp, layout.micro_batch, self.devices


class _Grid(PointSearch[_Point]):
    why_nothing = "no uniform layout divides the batch and the machines"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        evaluator = problem.evaluator
        self.graph, self.cluster = evaluator.graph, evaluator.cluster
        self.speeds = evaluator.speeds
        self.num_layers = len(layers_of(self.graph).names)
        experts = expert_weights(self.graph, range(self.graph.num_ops))
        shapes = [self.graph.tensors[weight].shape for weight in experts]
        self.num_experts = min((shape[0] for shape in shapes), default=0)
        self.boundary_bytes = boundary_bytes(evaluator.tables, layers_or_groups(self.graph))
        self.is_ring = num_returns(self.graph, layers_or_groups(self.graph)) > 0
        self.in_experts = sum(map(prod, shapes)) / max(self.graph.num_parameters, 1)
        self.layouts: dict[_Point, Layout] = {}
        self.varied: set[tuple[object, ...]] = set()
        self._computing = np.array([op.phase != Phase.UPDATE for op in self.graph.ops])

    def search(self) -> None:
        """Try each shape in its first manner that fits, and the best shapes in all manners."""
        points = sorted(self._shapes(), key=self._order)[:MOST_SHAPES]
        for number, point in enumerate(points, 1):
            for manner in self._until_it_fits(point):
                found = self.ask(manner)
                if found is not None and found.is_ok:
                    cheaper = cheaper_layouts(self.graph, manner.layout)
                    self.while_it_fits(replace(manner, layout=layout) for layout in cheaper)
                if found is None or found.is_ok:
                    break
            if len(self.varied) < number // VARIED_AFTER:
                self._vary(self._best_shapes()[:1])
        self._vary(self._best_shapes()[:NUM_VARIED])

    def _best_shapes(self) -> list[_Point]:
        """The best point of each shape that has not been varied.

        First come those with the shortest step once what other manners save is taken off.
        """
        of_shape = grouped((point.shape, point) for point in self.best(len(self.found)))
        ranked = sorted((best for best, *_ in of_shape.values()), key=self._at_best)
        return [point for point in ranked if point.shape not in self.varied]

    def _vary(self, starts: Sequence[_Point]) -> None:
        """Try some shapes in all manners."""
        for start in starts:
            for point in self._varied(start):
                self.ask(point)
            if not self.spending.is_over:
                self.varied.add(start.shape)

    def _at_best(self, point: _Point) -> tuple[float, float]:
        """(bytes that are missing, seconds of a step less what other manners can save).

        Other schedules save bubbles, and slices (ZeRO) all of an update but 1 / dp.
        """
        found, layout, bubble = self.found[point], point.layout, self._bubble(point)
        missing, step_s = found.preference[0], found.step_time_s
        step_s *= (1.0 + self._least_bubble(point)) / (1.0 + bubble)
        if layout.zero == 0:
            update_s = max(self._update_seconds(row) for row in self._rows(point))
            step_s -= update_s / layout.tp / layout.pp * (1.0 - 1.0 / layout.dp)
        return missing, step_s

    def _bubble(self, point: _Point) -> float:
        """Bubble over the compute of a step in the schedule of GPipe."""
        return (point.layout.pp - 1) / point.num_micro

    def _least_bubble(self, point: _Point) -> float:
        """Bubble over the compute of a step by the best schedule that the shape can have."""
        bubble = self._bubble(point)
        return least_bubble(bubble, in_a_v=_can_be_in_chunks(point.layout, self.num_layers))

    def strategy_of(self, point: _Point) -> Strategy:
        """See ``PointSearch``."""
        given = place_layout(
            point.layout,
            self.graph,
            self.cluster,
            devices=point.devices,
            step_barrier=self.problem.step_barrier,
        )
        self.layouts[point] = given.layout
        return given.strategy

    def in_words(self, point: _Point) -> str:
        """See ``PointSearch``."""
        return str(self.layouts[point])

    def _machines(self) -> Iterator[tuple[int, ...]]:
        """All machines, those without the slowest kinds, and fewer of these, whole hosts only."""
        hosts = self.cluster.host_devices
        slowest = [round(min(self.speeds[device] for device in host), 9) for host in hosts]
        for least in sorted(set(slowest)):
            fast = [host for host, own in zip(hosts, slowest, strict=True) if own >= least]
            for count in host_counts(len(fast)):
                yield tuple(device for host in fast[:count] for device in host)

    def _shapes(self) -> Iterator[_Point]:
        """Every division of some machines, with every micro-batch that divides a share."""
        for devices in dict.fromkeys(self._machines()):
            for tp, pp in self._divisions(devices):
                for layout, num_micro in uniform_layouts(self.evaluator, devices, tp, pp):
                    if pp == 1 or num_micro >= pp:
                        yield _Point(layout=layout, devices=devices, num_micro=num_micro)

    def _divisions(self, devices: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(tp, pp) for a number of devices; teams stay inside hosts."""
        sizes = [
            sum(self.cluster.host_of[device] == host for device in devices)
            for host in {self.cluster.host_of[device] for device in devices}
        ]
        for tp in divisors(gcd(*sizes)):
            for pp in divisors(len(devices) // tp):
                yield tp, pp

    def _order(self, point: _Point) -> tuple[int, float, int]:
        """Sort key: first shapes that may fit on all devices, last those that fit nowhere."""
        least = min(self._least_bytes(each) for each in self._manners(point))
        room = [self.cluster.devices[device].usable_memory_bytes for device in point.devices]
        return (least > min(room)) + (least > max(room)), *self._estimate(point)

    def _until_it_fits(self, point: _Point) -> Iterator[_Point]:
        """A point in ever leaner manners, without those that cannot fit."""
        made = self._manners(point)
        fitting = [each for each in made if self._may_fit(each)]
        yield from fitting or made[-1:]

    def _manners(self, point: _Point) -> list[_Point]:
        """A point in ever leaner manners."""
        in_team = point.layout.tp > 1
        most = self._expert_degrees(point.layout)[-1]
        manners = [
            (0, Recompute.NONE, False, 1),
            (0, Recompute.NONE, in_team, 1),
            (0, Recompute.NONE, in_team, most),
            (1, Recompute.NONE, in_team, most),
            *((1, Recompute.SELECTIVE, in_team, most),) * bool(attention_scores(self.graph)),
            (1, Recompute.FULL, in_team, most),
        ]
        if point.layout.pp == 1:
            manners.append((3, Recompute.FULL, in_team, most))
        return [
            replace(point, layout=_in_manner(point.layout, zero, recompute, along_positions, ep))
            for zero, recompute, along_positions, ep in dict.fromkeys(manners)
            if not zero or point.layout.dp > 1
        ]

    def _varied(self, start: _Point) -> Iterator[_Point]:
        """Other manners of a point: ZeRO, recomputation, sequences, experts, the schedule."""
        layout = start.layout
        stages = [0, 1] if layout.pp > 1 else [0, 1, 2, 3]
        for (zero, copies), recompute, along_positions, (ep, way), (schedule, chunks) in product(
            self._kept(start, stages if layout.dp > 1 else [0]),
            self._recomputations(start),
            [False, True] if layout.tp > 1 else [False],
            # With experts shared, in each way in which tokens may come to them.
            [(1, Dispatch.ALL_TO_ALL), *product(self._expert_degrees(layout)[1:], Dispatch)],
            tuple(_schedules(layout, start.num_micro, self.num_layers)),
        ):
            if schedule == "breadth_first" and zero < 2:
                continue  # nothing is gathered or reduced for each micro-batch
            varied = replace(
                _in_manner(layout, zero, recompute, along_positions, ep),
                dispatch=way,
                dp_replicate=copies,
                schedule=schedule,
                chunks=chunks,
                layers=() if chunks > 1 else layout.layers,
            )
            point = replace(start, layout=varied)
            if self._may_fit(point):
                yield point

    def _recomputations(self, start: _Point) -> list[Recompute]:
        """Kinds of recomputation; single ops only if the point does not fit without."""
        kinds = [Recompute.NONE, *words_worth_trying(self.graph)]
        if start.layout.recompute == Recompute.NONE and self.found[start].is_ok:
            return [kind for kind in kinds if kind != Recompute.OP]
        return kinds

    def _expert_degrees(self, layout: Layout) -> list[int]:
        """Degrees of expert parallelism in which each device has at least one expert."""
        if not self.num_experts:
            return [1]
        return [ep for ep in divisors(layout.dp) if ep == 1 or ep * layout.tp <= self.num_experts]

    def _kept(self, start: _Point, stages: Sequence[int]) -> list[tuple[int, int]]:
        """(stage of ZeRO, copies): one copy over all replicas, or one on each host."""
        layout, hosts = start.layout, {self.cluster.host_of[device] for device in start.devices}
        on_a_host = len(start.devices) // len(hosts)
        has_copies = layout.tp < on_a_host < layout.tp * layout.dp
        return [(zero, c) for zero in stages for c in ([1, 0] if zero and has_copies else [1])]

    def _estimate(self, point: _Point) -> tuple[float, int]:
        """Seconds of a step, roughly; among equal ones, the smaller ``tp * pp`` comes first.

        The longest of compute with the bubble, messages between stages with the bubble, and the
        sums of gradients after half of the compute:

            T = max(C (1 + B), M (1 + B), C / 2 + S)

        B is the bubble of the best schedule. C is the time in which the slowest device computes
        all micro-batches, divided by stages, plus the sums inside teams.
        """
        layout, rows = point.layout, self._rows(point)
        of_micro_s = max(self._compute_seconds(row, layout.micro_batch, layout.tp) for row in rows)
        compute_s = point.num_micro * of_micro_s / layout.pp
        compute_s += self._team_seconds(point)
        sums_s = self._gradient_seconds(point) if layout.dp > 1 else 0.0
        with_bubble = 1.0 + self._least_bubble(point)
        longest_s = max(compute_s, self._message_seconds(point)) * with_bubble
        return max(longest_s, compute_s / 2.0 + sums_s), layout.tp * layout.pp

    def _rows(self, point: _Point) -> list[int]:
        """Rows of ``PriceTable.models`` for the types of a point's devices."""
        types = {self.cluster.type_index[device] for device in point.devices}
        is_alone = len(point.devices) == 1
        return [self.evaluator.prices.row(kind, is_alone=is_alone) for kind in types]

    def _team_seconds(self, point: _Point) -> float:
        """Seconds in which a team adds up activations: two sums a layer and pass, in a ring.

        4 (L / p) (2 (t - 1) / t b / r + 2 (t - 1) l m) with L layers, b bytes at a boundary for
        all samples of a replica, its m micro-batches, and rate r and latency l inside a host.
        """
        layout = point.layout
        if layout.tp == 1:
            return 0.0
        link = self.cluster.hosts[self.cluster.host_of[point.devices[0]]].intra
        sent = self.boundary_bytes * self.graph.batch_size / layout.dp / layout.tp
        sent_s = sent / link.bandwidth_bytes_per_s + point.num_micro * link.latency_s
        return 8.0 * self.num_layers / layout.pp * (layout.tp - 1) * sent_s

    def _message_seconds(self, point: _Point) -> float:
        """Seconds in which the busiest host or device sends the samples of a step between stages.

        It sends outputs to the next stage and gradients to the one before. With a shared weight,
        the first stage comes after the last.
        """
        layout, host_of = point.layout, self.cluster.host_of
        size, whole = layout.tp * layout.dp, self.boundary_bytes * self.graph.batch_size
        starts = [*range(0, len(point.devices), size), *[0] * (layout.pp > 1 and self.is_ring)]
        busy_s: defaultdict[tuple[bool, int], float] = defaultdict(float)
        for ends in pairwise(point.devices[start : start + size] for start in starts):
            leaders = [end[0] for end in ends]
            rate = self.cluster.bottleneck_bytes_per_s(*leaders)
            crosses = host_of[leaders[0]] != host_of[leaders[1]]
            for end, leader in zip(ends, leaders, strict=True):
                lines = len({host_of[device] for device in end})
                busy_s[crosses, host_of[leader] if crosses else leader] += whole / lines / rate
        return max(busy_s.values(), default=0.0)

    @kept
    def _compute_seconds(self, row: int, samples: int, members: int) -> float:
        """Seconds of the whole model for some samples on a team of equal members.

        Ops of a team have equal parts of the work, but not of what a kernel takes at least.

        Args:
            row: Row of ``PriceTable.models``.
            samples: Samples at once.
            members: Number of devices of the team.
        """
        device_type, model = self.evaluator.prices.models[row]
        seconds = model.op_seconds(self.graph, device_type, samples)
        if members > 1:
            work = (each / members for each in batch_plan(self.graph).work(samples))
            seconds = model.work_seconds(self.graph, device_type, *work)
        return float(seconds[self._computing].sum())

    @kept
    def _update_seconds(self, row: int) -> float:
        """Seconds in which one device updates all parameters."""
        device_type, model = self.evaluator.prices.models[row]
        return float(model.op_seconds(self.graph, device_type, 1)[~self._computing].sum())

    def _gradient_seconds(self, point: _Point) -> float:
        """Seconds in which the replicas of the slowest stage add up its G bytes of gradients.

        2 (n - 1) / n G / r in a ring of n hosts, at the rate r of the slowest line between
        neighbours; inside a host in a ring of n teams, whose t members have G / t each.
        """
        layout, cluster = point.layout, self.cluster
        gradients = float(self.problem.evaluator.tables.parameter_bytes.sum()) / layout.pp
        size, slowest_s = layout.tp * layout.dp, 0.0
        for first in range(0, len(point.devices), size):
            devices = point.devices[first : first + size]
            leaders = list({cluster.host_of[device]: device for device in devices}.values())
            if len(leaders) == 1:
                number = layout.dp
                rate = cluster.hosts[cluster.host_of[devices[0]]].intra.bandwidth_bytes_per_s
                rate *= layout.tp
            else:
                number = len(leaders)
                ring = zip(leaders, [*leaders[1:], leaders[0]], strict=True)
                rate = min(cluster.bottleneck_bytes_per_s(src, dst) for src, dst in ring)
            slowest_s = max(slowest_s, 2.0 * (number - 1) / number * gradients / rate)
        return slowest_s

    def _least_bytes(self, point: _Point) -> float:
        return least_bytes(self.evaluator, point.layout, self.in_experts)

    def _may_fit(self, point: _Point) -> bool:
        return self._least_bytes(point) <= most_room(self.cluster, point.devices)


def _in_manner(
    layout: Layout, zero: int, recompute: Recompute, along_positions: bool, ep: int
) -> Layout:
    return replace(
        layout,
        zero=zero,
        dp_replicate=1,
        recompute=recompute,
        sequence_parallel=along_positions,
        ep=ep,
    )


def least_bubble(bubble: float, *, in_a_v: bool) -> float:
    """Bubble of the best schedule, given that of 1F1B and whether there can be chunks in a V.

    These fill it only with two micro-batches or more for each stage: (p - 1) / 2 p < 1 / 2.
    """
    return bubble / BUBBLE_OF_1F1B_OVER_V if in_a_v and bubble < 0.5 else bubble


def _can_be_in_chunks(layout: Layout, num_layers: int) -> bool:
    """Whether each device of a pipeline can have two chunks of equally many layers."""
    return layout.pp > 1 and num_layers % (2 * layout.pp) == 0


def _schedules(layout: Layout, num_micro: int, num_layers: int) -> Iterator[tuple[str, int]]:
    """(name, chunks) of the schedules that a pipeline, or replicas in slices, can have."""
    yield "", 0
    if layout.pp == 1 and layout.dp > 1 and num_micro > 1:
        yield "breadth_first", 0
    if _can_be_in_chunks(layout, num_layers):
        if num_micro % layout.pp == 0:
            yield "interleaved", 2
        yield "zero_bubble_v", 2


def least_bytes(evaluator: Evaluator, layout: Layout, in_experts: float = 0.0) -> float:
    """Least bytes that a device holds, on average over the stages.

    Args:
        evaluator: Evaluator of the model.
        layout: The layout.
        in_experts: Part of the parameters that belongs to experts.
    """
    parts, state_ratio = layout.tp * layout.pp, evaluator.graph.optimizer_state_ratio
    here = 1.0 - in_experts * (1.0 - 1.0 / layout.ep)
    parameters = float(evaluator.group_state_bytes.sum()) * here
    activations = float(evaluator.group_saved_bytes.sum()) / evaluator.graph.batch_size
    own = parameters / (2.0 + state_ratio) / parts
    sliced = {0: 0.0, 1: state_ratio, 2: state_ratio + 1.0, 3: state_ratio + 2.0}[layout.zero]
    static = own * (2.0 + state_ratio - sliced * (1.0 - 1.0 / layout.dp))
    return static + surely_kept(layout.recompute) * activations * layout.micro_batch / parts


def most_room(cluster: Cluster, devices: Iterable[int]) -> float:
    """Bytes of the roomiest of some devices; a layout that does not fit there fits nowhere."""
    return max(cluster.devices[device].usable_memory_bytes for device in devices)


def has_alike_hosts(cluster: Cluster) -> bool:
    """Whether hosts of one kind do alike: no line between two single hosts has its own limit."""
    return not any(len(each.sources) == len(each.targets) == 1 for each in cluster.pairs)


def unlike_devices(cluster: Cluster, devices: Sequence[int]) -> int:
    """Number of devices of one host of each kind; devices of alike hosts do alike."""
    if not has_alike_hosts(cluster):
        return len(devices)
    hosts = {
        cluster.host_kind[cluster.host_of[device]]: cluster.host_of[device] for device in devices
    }
    return sum(len(cluster.host_devices[host]) for host in hosts.values())


def uniform_layouts(
    evaluator: Evaluator, devices: Sequence[int], tp: int, pp: int
) -> Iterator[tuple[Layout, int]]:
    """(layout, number of micro-batches) for each micro-batch that divides a replica's share.

    Sizes of micro-batches are the powers of two that divide the share, and the share itself.
    """
    graph, dp = evaluator.graph, len(devices) // (tp * pp)
    num_layers, num_ops = len(layers_of(graph).names), len(evaluator.tables.op_id)
    simulated = min(tp * dp, unlike_devices(evaluator.cluster, devices))
    share = graph.batch_size // dp
    if graph.batch_size % dp or not share or (pp > 1 and pp > num_layers):
        return
    layers = split_evenly(num_layers, pp) if num_layers % pp else ()
    powers = [1 << power for power in range(share.bit_length()) if share % (1 << power) == 0]
    for micro in dict.fromkeys((*powers, share)):
        num_micro = share // micro
        if num_micro > 1 and num_micro * num_ops * simulated > MOST_TASKS:
            continue
        if not micro_batches_refused(graph, num_micro):
            layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=micro, layers=layers)
            yield layout, num_micro


def host_counts(most: int) -> list[int]:
    """Numbers of hosts to try: all, half, a quarter, ... of them, and every small number.

    >>> host_counts(12)
    [12, 6, 4, 3, 2, 1]
    """
    halved = {most >> power for power in range(most.bit_length())}
    return sorted(halved.union(range(1, min(FEW_HOSTS, most) + 1)), reverse=True)


def divisors(number: int) -> list[int]:
    """Divisors of a small number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


class MegatronGrid(Searching):
    """Uniform layouts, enumerated; see the module docstring."""

    name = "megatron_grid"
    stage = "baseline"
    resumes = True
    search = _Grid
