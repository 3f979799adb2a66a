"""Pipelines of machines: consecutive ranges of layers, each replicated inside its own stage.

Gradients are synchronised inside stages only, over fast links. Only activations cross between
stages; they are small beside gradients if layers are wide. A stage is a block of whole machines,
or a single device. For every sequence of stages, dynamic programming finds the cut that balances
them, then simulation moves its boundaries. The best cuts are also tried with caps on the
micro-batches that stages hold (those of 1F1B, and larger ones that hide messages), with weight
gradients delayed until a device would wait, and with teams inside machines. Those that do not fit
are also tried with recomputation and sliced updates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import micro_batches_refused
from heterog.graph.op_graph import FloatArray
from heterog.grouped import cut
from heterog.memo import kept
from heterog.methods.enumeration import Enumeration, Meaning
from heterog.methods.host_order import communities, in_best_order
from heterog.methods.islands.slices import sent_bytes
from heterog.methods.megatron_grid import MOST_TASKS, unlike_devices
from heterog.methods.model_parallel import stage_starts
from heterog.methods.planner import Problem, Searching
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.teams import apart, host_teams, in_teams, rules_of_model, team_sizes
from heterog.methods.tuned_uniform import tuned_decision
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import StepSettings
from heterog.strategy.layouts.stages import Caps, capped, layer_blocks, stage_of_group
from heterog.strategy.strategy import Decision, Keeps, Sync

_FIRST_MICRO = (4, 8)  # tried for every sequence of stages
_ALL_MICRO = (1, 2, 4, 8, 16, 32)
_NUM_WIDENED = 10  # sequences that are tried with every number of micro-batches
_NUM_REFINED = 4  # best points that are refined
# Parts of the budget after which the next phase begins, even if points are left: a small budget
# is better spent on the best sequences than on all of them.
_UNTIL_SORTED = 0.2
_UNTIL_WIDENED, _UNTIL_TEAMS, _UNTIL_REFINED = 0.4, 0.6, 0.85
_MOST_HOSTS = 5  # most machines for which every sequence is tried
_MANY_HOSTS = 16  # with more machines, only some numbers of blocks are tried
_MOST_KINDS = 4  # on larger clusters, most kinds of machines for which every subset is tried

Stages = tuple[tuple[int, ...], ...]
"""Devices of each stage, in the order of the layers."""


@dataclass(frozen=True, slots=True)
class _Point:
    stages: Stages
    cuts: tuple[int, ...]  # first group of each stage but the first
    num_micro: int
    order: Order
    caps: Caps = Caps.NONE
    splits_backward: bool = False
    teams: tuple[int, ...] = ()  # most devices of a team in each stage; empty: no teams
    recomputing: int = 0  # stages from the first one that recompute
    keeps: Keeps = Keeps.NOTHING  # what these keep nevertheless
    slices_updates: bool = False


def stage_sequences(cluster: Cluster) -> list[Stages]:
    """Sequences of stages worth trying, of two stages or more if there are two devices.

    Up to five machines: every sequence of machines (those of one kind in one order), cut into
    blocks in every way, and its devices as single stages. More machines: those of all kinds and of
    subsets of kinds, sorted by kind in both directions, in blocks of equal size; also communities
    of near machines in both directions, each cut into its own blocks.
    """
    hosts = cluster.host_devices
    kinds = [
        (
            tuple(cluster.device_types[cluster.type_index[device]].name for device in host),
            cluster.nic_bandwidth_bytes_per_s[index],
            # Among few machines the lines between them (``pairs``) matter, too.
            cluster.host_kind[index] if len(hosts) <= _MOST_HOSTS else 0,
        )
        for index, host in enumerate(hosts)
    ]
    found: dict[Stages, None] = {}
    for sequence in _host_sequences(kinds):
        count = len(sequence)
        for cuts in _compositions(count):
            bounds = (0, *cuts, count)
            blocks = [
                tuple(sorted(d for host in sequence[first:last] for d in hosts[host]))
                for first, last in pairwise(bounds)
            ]
            found.setdefault(tuple(blocks))
        found.setdefault(tuple((device,) for host in sequence for device in hosts[host]))
    for blocks_of_near in _community_blocks(cluster):
        found.setdefault(
            tuple(tuple(sorted(d for h in block for d in hosts[h])) for block in blocks_of_near)
        )
    return [stages for stages in found if len(stages) > 1] or list(found)


def _host_sequences(
    kinds: list[tuple[tuple[str, ...], float, int]],
) -> Iterator[tuple[int, ...]]:
    everything = range(len(kinds))
    if len(kinds) > _MOST_HOSTS:
        different = sorted(set(kinds))[:_MOST_KINDS]
        for size in range(len(different), 0, -1):
            for some in combinations(different, size):
                rest = () if size < len(different) else tuple(set(kinds) - set(different))
                own = [host for host in everything if kinds[host] in (*some, *rest)]
                by_kind = sorted(own, key=lambda host: (kinds[host], host))
                yield tuple(by_kind)
                if size > 1:
                    yield tuple(reversed(by_kind))
        return
    seen = set()
    for size in range(len(kinds), 0, -1):
        for chosen in combinations(everything, size):
            for sequence in permutations(chosen):
                kind = tuple(kinds[host] for host in sequence)
                if kind not in seen:
                    seen.add(kind)
                    yield sequence


def _community_blocks(cluster: Cluster) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Blocks of machines, each in one community, so that no stage has a slow link inside."""
    near = communities(cluster) if cluster.num_hosts > _MOST_HOSTS else []
    if len(near) < 2:
        return
    ordered = in_best_order(cluster, near)
    for most in dict.fromkeys((1, 2, 4, max(map(len, near)))):
        blocks = [tuple(block) for each in ordered for block in cut(each, min(most, len(each)))]
        yield tuple(blocks)
        yield tuple(reversed(blocks))


def _compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Positions at which a sequence may be cut: everywhere, or evenly if it is long."""
    inner = range(1, count)
    numbers: Sequence[int]
    if count <= _MOST_HOSTS:
        for size in range(count):
            yield from combinations(inner, size)
        return
    numbers = range(1, count + 1)
    if count > _MANY_HOSTS:  # 1, 2, 3, 4, 6, 8, 12, ... blocks
        doubled = [first << power for first in (2, 3) for power in range(count.bit_length())]
        numbers = sorted({1, count, *(each for each in doubled if each < count)})
    for parts in numbers:
        yield tuple(dict.fromkeys(round(count * part / parts) for part in range(1, parts)))


class _Enumeration(Enumeration[_Point]):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        evaluator = problem.evaluator
        self.nothing = (
            f"every stage needs a group of layers, and the model has {self.num_groups} of them"
        )
        self.cluster = evaluator.cluster
        self._all_sequences = [
            each for each in stage_sequences(self.cluster) if len(each) <= self.num_groups
        ]
        self.parameters = evaluator.group_state_bytes
        self.activations = evaluator.group_saved_bytes
        self.estimates: dict[Stages, float] = {}
        self.rules = rules_of_model(evaluator.graph)
        self.blocks_of_layers = layer_blocks(evaluator.graph)
        self.kinds = kinds_worth_trying(evaluator.graph)
        refused = micro_batches_refused(evaluator.graph, 2)
        self.most_micro = 1 if refused else evaluator.graph.batch_size
        self.num_ops = evaluator.group_num_ops

    def search(self) -> None:
        """Try balanced cuts of all sequences, other settings of the best, then cuts nearby."""
        order = self.problem.first_order
        most = self.most_micro
        # A batch of a few samples is cut into micro-batches of one sample.
        first_micro = [count for count in _FIRST_MICRO if count <= most] or [most]
        sequences = self._sequences(first_micro[-1], order)
        self.try_points(
            (
                point
                for stages in sequences
                for num_micro in first_micro
                for point in self._balanced(stages, num_micro, order)
            ),
            until=_UNTIL_WIDENED,
        )
        if not self._has_fit:
            for start in self._leaders():
                self.try_points(self._leanest(start), until=_UNTIL_TEAMS)
        self.try_points(
            (
                replace(
                    point,
                    caps=start.caps,
                    recomputing=start.recomputing,
                    keeps=start.keeps,
                    slices_updates=start.slices_updates,
                )
                for start in self.best(_NUM_WIDENED)
                for num_micro in _ALL_MICRO
                if num_micro <= most
                for point in self._balanced(start.stages, num_micro, order)
            ),
            until=_UNTIL_TEAMS,
        )
        for start in self._leaders():
            self.try_points(self._in_teams(start), until=_UNTIL_REFINED)
        for vary in (self._scheduled, self._leaner, self._cheaper, self._ordered):
            for start in self._leaders():
                self.try_points(vary(start), until=_UNTIL_REFINED)
        for start in self.best(_NUM_REFINED):
            self._refine(start)

    @property
    def _has_fit(self) -> bool:
        """Whether any point fits into memory."""
        return any(each.preference[0] <= 0.0 for each in self.found.values())

    def _leaders(self) -> list[_Point]:
        """The best points, and the fastest, fitting or not: a cap may make them fit.

        While none fits, the fastest come first: the best lack the fewest bytes, however slow.
        """
        fastest = sorted(self.found, key=lambda point: self.found[point].step_time_s)[
            :_NUM_REFINED
        ]
        best = self.best(_NUM_REFINED)
        return list(dict.fromkeys((*best, *fastest) if self._has_fit else (*fastest, *best)))

    def _sequences(self, num_micro: int, order: Order) -> list[Stages]:
        """All sequences of stages, by the estimated time of their balanced cut, fastest first.

        Sequences without an estimate come last. Estimates are kept for a resumed search.
        """
        for stages in self._all_sequences:
            if self.estimates and self.spending.fraction >= _UNTIL_SORTED:
                break
            if stages not in self.estimates:
                point = next(self._balanced(stages, num_micro, order))
                self.estimates[stages] = self._estimate(point)
        return sorted(self._all_sequences, key=lambda stages: self.estimates.get(stages, np.inf))

    def _estimate(self, point: _Point) -> float:
        """Seconds of a point: T_max + (sum T - T_max)/m, plus the slowest stage's gradients.

        T are the seconds of stages and of messages from each stage to the next.
        """
        stages, bounds = point.stages, (0, *point.cuts, self.num_groups)
        turns, gradients = self._message_seconds(point), []
        ratio = 2.0 + self.problem.evaluator.tables.state_ratio
        for devices, (first, last) in zip(stages, pairwise(bounds), strict=True):
            turns.append(float(self._stage_seconds(devices, point.num_micro)[first:last].sum()))
            size = self.parameters[first:last].sum() / ratio
            gradients.append(2.0 * size / self._slowest_rate(devices))
        fill = (sum(turns) - max(turns)) / point.num_micro
        return float(max(turns) + fill + max(gradients))

    def _message_seconds(self, point: _Point) -> list[float]:
        """Seconds in which each stage but the last sends the whole batch to the next one."""
        evaluator, hosts = self.problem.evaluator, self.cluster.host_of
        sent = evaluator.graph.batch_size * sent_bytes(
            evaluator.tables,
            np.array(stage_of_group(point.cuts, self.num_groups)),
            len(point.stages),
        )
        found = []
        for (sender, receiver), num_bytes in zip(pairwise(point.stages), sent, strict=False):
            lines = min(len({hosts[device] for device in each}) for each in (sender, receiver))
            rate = self.cluster.bottleneck_bytes_per_s(sender[0], receiver[0])
            found.append(float(num_bytes) / (lines * rate))
        return found

    def _slowest_rate(self, devices: tuple[int, ...]) -> float:
        """Bytes per second of the slowest link over which a stage's gradients are summed."""
        hosts = {self.cluster.host_of[device] for device in devices}
        if len(hosts) > 1:
            return min(self.cluster.nic_bandwidth_bytes_per_s[host] for host in hosts)
        (host,) = hosts
        inner = self.cluster.hosts[host].intra.bandwidth_bytes_per_s
        return inner if len(devices) > 1 else np.inf

    def _balanced(self, stages: Stages, num_micro: int, order: Order) -> Iterator[_Point]:
        """Cuts that balance the stages' seconds, with and without regard to memory."""
        for is_limited in (True, False):
            yield _Point(stages, self._cuts(stages, num_micro, is_limited), num_micro, order)

    @kept
    def _cuts(self, stages: Stages, num_micro: int, is_limited: bool) -> tuple[int, ...]:
        self.spending.check()
        limit = np.full(len(stages), np.inf)
        if is_limited:
            usable = [device.usable_memory_bytes for device in self.cluster.devices]
            limit = np.array([float(min(usable[d] for d in devices)) for devices in stages])
        seconds = np.stack([self._stage_seconds(devices, num_micro) for devices in stages], axis=1)
        memory = np.stack(
            [self.parameters + self.activations / len(devices) for devices in stages], axis=1
        )
        return stage_starts(seconds, memory, limit)[1:]

    # --- other manners of a point ----------------------------------------------------------------

    def _in_teams(self, start: _Point) -> Iterator[_Point]:
        """The point with teams inside machines in all stages, also with smaller micro-batches.

        Kernels of a team run all samples of the team, so smaller micro-batches cost it less.
        """
        largest = max(map(len, start.stages))
        for size in team_sizes(self.cluster, self.rules):
            for num_micro in (start.num_micro, 2 * start.num_micro):
                if size < 2 * largest and num_micro <= self.most_micro:
                    teams = (size,) * len(start.stages)
                    yield replace(start, teams=teams, num_micro=num_micro)

    def _scheduled(self, start: _Point) -> Iterator[_Point]:
        """The point with caps, and with weight gradients whenever a device would wait."""
        for caps, splits in product(Caps, (False, True)):
            yield replace(start, caps=caps, splits_backward=splits)

    def _ordered(self, start: _Point) -> Iterator[_Point]:
        """The point in other orders."""
        return (replace(start, order=other) for other in self.problem.orders)

    def _leaner(self, start: _Point) -> Iterator[_Point]:
        """If a point does not fit: recomputation in the first or all stages, sliced updates.

        The first stages recompute first because they hold the most micro-batches.
        """
        if self.found[start].preference[0] <= 0.0:
            return
        num_stages = len(start.stages)
        some = sorted({1, num_stages // 2, num_stages} - {0})
        for slices_updates in (
            (False, True) if self.problem.evaluator.graph.updates_elementwise else (False,)
        ):
            for count in (0, *some):
                yield replace(
                    start,
                    recomputing=count,
                    keeps=Keeps.NOTHING,
                    slices_updates=slices_updates,
                )

    def _cheaper(self, start: _Point) -> Iterator[_Point]:
        """For stages that recompute everything: recompute less, in the same or in all stages."""
        if not start.recomputing or start.keeps != Keeps.NOTHING:
            return
        for keeps in reversed(self.kinds[:-1]):
            fits = False
            for recomputing in dict.fromkeys((start.recomputing, len(start.stages))):
                point = replace(start, recomputing=recomputing, keeps=keeps)
                yield point
                fits = fits or (point in self.found and self.found[point].preference[0] <= 0.0)
            if not fits:
                return

    def _leanest(self, start: _Point) -> Iterator[_Point]:
        """The point with everything that saves memory, then with less, so that large models fit.

        Micro-batches have at least one sample for each device of a stage.
        """
        num_stages, graph = len(start.stages), self.problem.evaluator.graph
        most = graph.batch_size // max(len(devices) for devices in start.stages)
        smallest = replace(
            start,
            caps=Caps.ONE_F_ONE_B,
            num_micro=min(max(start.num_micro, most), self.most_micro),
        )
        for slices_updates in (True, False) if graph.updates_elementwise else (False,):
            for recomputing in dict.fromkeys((num_stages, (num_stages + 1) // 2)):
                for each in dict.fromkeys((smallest, replace(start, caps=Caps.ONE_F_ONE_B))):
                    yield replace(each, recomputing=recomputing, slices_updates=slices_updates)

    @kept
    def _stage_seconds(self, devices: tuple[int, ...], num_micro: int) -> FloatArray:
        """Seconds of each group on a stage whose devices share every micro-batch."""
        batch = self.problem.evaluator.graph.batch_size
        samples = max(round(batch / num_micro / len(devices)), 1)
        rate = np.zeros(self.num_groups)
        for device in devices:
            kind = self.cluster.type_index[device]
            _, seconds = self.evaluator.prices.seconds_of_groups(kind, samples)
            rate += samples / (seconds + 1e-9)
        result: FloatArray = batch / rate
        return result

    def _refine(self, start: _Point) -> None:
        """Change boundaries, micro-batches and teams of stages, while that helps."""
        best = start
        while True:
            self.try_points(self._beside(best))
            again = min(
                (point for point in self.found if point.stages == start.stages),
                key=lambda point: self.found[point].preference,
            )
            if again == best or self.spending.is_over:
                return
            best = again

    def _beside(self, point: _Point) -> Iterator[_Point]:
        """Points with another boundary, other micro-batches, or other teams in one stage."""
        for i, group in enumerate(point.cuts):
            for step in (-2, -1, 1, 2):
                yield replace(point, cuts=(*point.cuts[:i], group + step, *point.cuts[i + 1 :]))
        for num_micro in (2 * point.num_micro, point.num_micro // 2):
            if 0 < num_micro <= self.most_micro:
                yield replace(point, num_micro=num_micro)
        if not point.teams:
            return
        for size in (1, *team_sizes(self.cluster, self.rules)):
            for stage in range(len(point.stages)):
                teams = (*point.teams[:stage], size, *point.teams[stage + 1 :])
                yield replace(point, teams=teams if max(teams) > 1 else ())

    # --- what a point means ----------------------------------------------------------------------

    def is_possible(self, point: _Point) -> bool:
        """Whether every stage has a group, and the program is small enough to simulate."""
        bounds = (0, *point.cuts, self.num_groups)
        if any(first >= last for first, last in pairwise(bounds)):
            return False
        num_tasks = point.num_micro * sum(
            min(len(devices), unlike_devices(self.cluster, devices))
            * int(self.num_ops[first:last].sum())
            for devices, (first, last) in zip(point.stages, pairwise(bounds), strict=True)
        )
        return num_tasks <= MOST_TASKS or point.num_micro <= _FIRST_MICRO[0]

    def meaning(self, point: _Point) -> Meaning:
        """See ``Enumeration``.

        Devices without a team are teams of one. Layers recompute as a whole, unless a stage
        boundary cuts them.
        """
        row = np.empty(self.num_groups, np.int32)
        bounds = (0, *point.cuts, self.num_groups)
        for stage, (first, last) in enumerate(pairwise(bounds)):
            row[first:last] = self.space.add(self._decision(point, stage))
        blocks = tuple(sorted({*self.blocks_of_layers, *point.cuts}))
        settings = StepSettings(
            micro_batches=self.space.micro_batches(point.num_micro),
            schedule=capped(
                self.evaluator.graph,
                point.stages,
                stage_of_group(point.cuts, self.num_groups),
                point.caps if point.num_micro > 1 else Caps.NONE,
                self.cluster.num_devices,
                splits_backward=point.splits_backward,
            ),
            rule_set=self.evaluator.rules.number(
                self.rules.op_rules if point.teams and self.rules is not None else (),
                blocks if point.recomputing else (),
            ),
        )
        return Meaning(row, point.order, settings)

    def _decision(self, point: _Point, stage: int) -> Decision:
        """The decision of the groups of a stage."""
        devices = point.stages[stage]
        decision = tuned_decision(self.problem.evaluator, devices, self.speeds)
        if stage < point.recomputing:
            decision = replace(decision, recompute=True, keeps=point.keeps)
        if point.slices_updates and len(devices) > 1:
            decision = replace(decision, sync=Sync.ZERO1)
        if not point.teams:
            return decision
        teams = host_teams(self.cluster, devices, point.teams[stage])
        return apart(in_teams(decision, teams, self.speeds, self.cluster))


class PipelineSearch(Searching):
    """Sequences of stages by enumeration; see the module docstring."""

    name = "pipeline"
    stage = "search"
    resumes = True
    search = _Enumeration

    @staticmethod
    def prepare(evaluator: Evaluator) -> None:
        """Load the library that finds communities, before time is counted."""
        communities(evaluator.cluster)
