"""Compositions of machines of several kinds: their estimates, variants and strategies.

An *island* is some hosts of one kind, in teams of one size, as some consecutive stages of a
pipeline; the teams of a stage share its micro-batches. Other hosts of the kind are idle: fewer
hosts often train a small batch faster. A *pool* is a pipeline of islands; pools are replicas of
each other, even if they are unlike.

Let C_r be the seconds that stage r would take for all layers of a micro-batch. Stages cut in
proportion take H = 1 / sum_r 1/C_r each, and a pool of R stages takes (m + R - 1) H for its m
micro-batches. If the slowest message between two stages takes longer than H, it replaces H; if
messages are not hidden, it is added to H. Delayed weight gradients fill a part of the R - 1 turns
in which stages are idle (Qi et al., Zero Bubble Pipeline Parallelism, section 2.3). Last come the
sums of gradients that several teams have.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise, product
from math import gcd

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.op_graph import FloatArray
from heterog.memo import kept
from heterog.methods.islands.slices import Slices
from heterog.methods.megatron_grid import MOST_TASKS, has_alike_hosts, host_counts
from heterog.methods.model_parallel import stage_starts
from heterog.methods.teams import host_teams
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.pipelines import Pipeline, strategy_of_pipelines
from heterog.strategy.layouts.stages import Caps, capped, shared_across_stages
from heterog.strategy.schedules import PipelineSchedule
from heterog.strategy.strategy import Strategy

MOST_KINDS = 4
"""Most kinds of machines for which every partition into pools is tried."""
MOST_STAGES = 16
"""Most stages of one kind of machines."""
OVERFLOWS = 1e6
"""An estimate of so many seconds or more means that the composition does not fit."""
IDLE = 2.0 / 3.0
"""Part of a pipeline's idle turns that delayed weight gradients leave idle: a third in ZB-H1 with
many micro-batches, more with few."""
IDLE_IN_A_V = 1.0 / 6.0
"""The same part with two chunks in a V (Qi et al. 2023: 1.5 units, not 9, for four stages)."""
ROUNDS = 3
"""Number of rounds in which the samples of pools are adjusted to their seconds."""


@dataclass(frozen=True, slots=True)
class Island:
    """Hosts of one kind as stages of a pipeline.

    Attributes:
        kind: Number of the kind.
        members: Number of devices of a team.
        stages: Number of stages, among which the island's teams are divided.
        hosts: Number of hosts, the first ones of the kind.
    """

    kind: int
    members: int
    stages: int
    hosts: int


Pool = tuple[Island, ...]
"""Islands in the order of their layers."""
Structure = tuple[tuple[int, ...], ...]
"""Kinds of machines of each pool, in the order of their layers."""


@dataclass(frozen=True, slots=True)
class Composition:
    """Pools that train on one batch together.

    Attributes:
        pools: The pools.
        num_micro: Number of micro-batches of a step, the same in every pool.
        recompute: What layers recompute.
        zero: Stage of ZeRO: 0, 1 or 3.
        samples: Samples of the batch for each pool.
        layers: Layers of each stage of each pool; in a V there are two stages on the same devices.
        hides_messages: Whether stages may hold about twice as many micro-batches as under 1F1B,
            whose caps make stages wait if forward and backward passes differ.
        splits_backward: Whether weight gradients wait until a device has nothing else to do.
        in_a_v: Whether a pool's layers go through its islands forth and back: each device has two
            stages, in the turns of ``zero_bubble_v``.
        copies_on_hosts: Whether each host keeps all slices of ZeRO, so that only sums of gradients
            cross the network.
    """

    pools: tuple[Pool, ...]
    num_micro: int
    recompute: Recompute
    zero: int
    samples: tuple[int, ...] = ()
    layers: tuple[tuple[int, ...], ...] = ()
    hides_messages: bool = True
    splits_backward: bool = False
    in_a_v: bool = False
    copies_on_hosts: bool = False


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of a pool: teams of one kind."""

    island: Island
    teams: int
    hosts: int  # number of hosts with devices of the stage


def stages_of(pool: Pool, slices: Slices) -> list[_Stage]:
    """The stages of a pool, in order."""
    found = []
    for island in pool:
        in_host = slices.kinds[island.kind].size // island.members
        teams = island.hosts * in_host // island.stages
        found += [_Stage(island, teams, -(-teams // in_host))] * island.stages
    return found


def num_copies(pool: Pool, slices: Slices) -> int:
    """Hosts per stage if equal for all stages, above 1, and with several teams each; else 1."""
    found = set()
    for island in pool:
        hosts, rest = divmod(island.hosts, island.stages)
        found.add(0 if rest or slices.kinds[island.kind].size <= island.members else hosts)
    return found.pop() if len(found) == 1 and max(found) > 1 else 1


def islands_of(slices: Slices, kind: int) -> list[Island]:
    """Every division of the ``host_counts`` of a kind's hosts into teams and stages.

    Divisions with more teams in a stage than samples come last.
    """
    of_kind, batch = slices.kinds[kind], slices.evaluator.graph.batch_size
    most = min(of_kind.size, slices.most_members)
    sizes = [1 << power for power in range(most.bit_length()) if of_kind.size % (1 << power) == 0]
    found = []
    for hosts, members in product(host_counts(len(of_kind.hosts)), sizes):
        teams = hosts * (of_kind.size // members)
        found += [
            Island(kind, members, stages, hosts)
            for stages in range(1, min(teams, MOST_STAGES, slices.num_layers) + 1)
            if teams % stages == 0
        ]
    return sorted(found, key=lambda island: stages_of((island,), slices)[0].teams > batch)


def partitions(items: Sequence[int]) -> Iterator[Structure]:
    """All ways to divide a few items into sets.

    >>> list(partitions([0, 1]))
    [((0, 1),), ((0,), (1,))]
    """
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        for index, own in enumerate(smaller):
            yield (*smaller[:index], (first, *own), *smaller[index + 1 :])
        yield ((first,), *smaller)


class Estimator:
    """Seconds of compositions before they are simulated.

    Args:
        slices: Costs of layers.
    """

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self.batch = slices.evaluator.graph.batch_size
        self._pool_seconds: dict[object, float] = {}

    def pool_seconds(self, pool: Pool, samples: float, point: Composition) -> float:
        """Seconds of a pool's part of a step; infinite if it is impossible.

        Args:
            pool: Islands of the pool.
            samples: Samples of the batch for the pool.
            point: Composition with the micro-batches and the manner.
        """
        others = _kinds_beside(pool, point)
        manner = point.recompute, point.zero, point.hides_messages
        key = pool, samples, point.num_micro, manner, others
        if key not in self._pool_seconds:
            self._pool_seconds[key] = self._estimated(pool, samples, point, others)
        return self._pool_seconds[key]

    def _estimated(
        self, pool: Pool, samples: float, point: Composition, others: Sequence[int]
    ) -> float:
        slices, stages = self.slices, stages_of(pool, self.slices)
        micro = samples / point.num_micro
        if len(stages) > slices.num_layers or any(stage.teams > micro + 1e-9 for stage in stages):
            return np.inf
        # The first stage of an island stands for all: they are equally fast, and it holds most.
        starts = np.cumsum([0, *(island.stages for island in pool)]).tolist()
        firsts = [stages[start] for start in starts[:-1]]
        is_alone = self._is_alone(point)
        whole = [
            slices.all_seconds(
                stage.island.kind,
                stage.island.members,
                _samples(stage, micro),
                point.recompute,
                is_alone,
            )
            for stage in firsts
        ]
        each = 1.0 / sum(island.stages / own for island, own in zip(pool, whole, strict=True))
        parts = [each / own for own in whole]  # of the layers
        sizes = slices.all_bytes(point.recompute)
        returns = slices.num_returns if len(stages) > 1 else 0
        over = max(
            part * sum(map(operator.mul, sizes, self._held(stage, behind, micro, point)))
            / slices.kinds[stage.island.kind].usable_bytes
            for part, stage, behind in zip(
                parts, firsts, (len(stages) + returns - start for start in starts), strict=False
            )
        )  # fmt: skip
        messages = micro * self._message_seconds(pool, point.in_a_v)
        gradients = self._gradient_seconds(firsts, parts, point, others)
        turn = max(each, messages) if point.hides_messages else each + messages
        seconds = (point.num_micro + IDLE * (len(stages) - 1)) * turn + gradients
        return _ranked_s(seconds, over)

    def shared_out(self, point: Composition) -> tuple[float, tuple[int, ...]]:
        """(seconds of a step, samples of each pool), so that pools take about equally long."""
        pools, rest = point.pools, self.batch
        if len(pools) == 1:
            return self.pool_seconds(pools[0], rest, point), (rest,)
        weights = np.ones(len(pools))
        best: tuple[float, tuple[int, ...]] = (np.inf, ())
        for _ in range(ROUNDS):
            units = rest // point.num_micro
            if units < len(pools):
                return np.inf, ()
            counts = split_in_proportion(units, tuple(weights.tolist()))
            samples = tuple(count * point.num_micro for count in counts)
            if min(samples) == 0 or sum(samples) != rest:
                return best
            seconds = np.array(
                [self.pool_seconds(*pair, point) for pair in zip(pools, samples, strict=True)]
            )
            best = min(best, (float(seconds.max()), samples))
            if not np.isfinite(seconds).all():
                return best
            weights = np.array(samples) / seconds
        return best

    @kept
    def cut(self, point: Composition) -> tuple[float, Composition] | None:
        """(seconds, the composition with layers of each stage); ``None`` with too few layers.

        With several stages, weight gradients are delayed to fill idle turns.
        """
        layers = []
        for pool, samples in zip(point.pools, point.samples, strict=True):
            stages = stages_of(pool, self.slices)
            if len(stages) > self.slices.num_layers:
                return None
            starts = stage_starts(*self._costs(stages, samples / point.num_micro, point))
            bounds = (*starts, self.slices.num_layers)
            layers.append(tuple(end - start for start, end in pairwise(bounds)))
        found = replace(point, layers=tuple(layers), splits_backward=max(map(len, layers)) > 1)
        return self.seconds(found), found

    def seconds(self, point: Composition) -> float:
        """Seconds of a step of a composition with its layers.

        Stages of whole layers are not exactly in proportion, so a pool takes as long as its
        slowest stage says: m max_r T_r + sum_r T_r - max_r T_r for T_r seconds of stage r, less
        the part of idle turns that the schedule fills.
        """
        pools = zip(point.pools, point.layers, point.samples, strict=True)
        return max(self._seconds(*each, point) for each in pools)

    def _seconds(
        self, pool: Pool, layers: Sequence[int], samples: float, point: Composition
    ) -> float:
        stages, micro = stages_of(pool, self.slices), samples / point.num_micro
        seconds, memory, room = self._costs(stages, micro, point)
        held = memory / room
        each, filled, parts = np.zeros((3, len(stages)))
        for number, (first, end) in enumerate(pairwise(accumulate(layers, initial=0))):
            back = len(layers) - 1 - number
            stage = min(number, back) if point.in_a_v else number
            each[stage] += seconds[first:end, stage].sum()
            filled[stage] += held[first:end, stage].sum()
            parts[stage] += (end - first) / self.slices.num_layers
        messages = micro * self._message_seconds(pool, point.in_a_v)
        longest = float(each.max())
        longest = max(longest, messages) if point.hides_messages else longest + messages
        gradients = self._gradient_seconds(stages, parts, point, _kinds_beside(pool, point))
        idle = IDLE_IN_A_V if point.in_a_v else IDLE if point.splits_backward else 1.0
        others = idle * float(each.sum() - each.max())
        took = (point.num_micro - 1) * longest + float(each.max()) + others + gradients
        return _ranked_s(took, float(filled.max()))

    def _costs(
        self, stages: Sequence[_Stage], micro: float, point: Composition
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds and bytes of each layer on each stage, and each stage's bytes of memory.

        Returns:
            # [num_layers, num_stages], the same, [num_stages]
        """
        is_alone = self._is_alone(point)
        each = [
            self.slices.seconds(
                stage.island.kind,
                stage.island.members,
                _samples(stage, micro),
                point.recompute,
                is_alone,
            )
            for stage in stages
        ]
        room = [float(self.slices.kinds[stage.island.kind].usable_bytes) for stage in stages]
        return np.stack(each, axis=1), self._memory(stages, micro, point), np.array(room)

    def _is_alone(self, point: Composition) -> bool:
        """Whether a composition uses one device, which exchanges nothing."""
        islands = (island for pool in point.pools for island in pool)
        return sum(each.hosts * self.slices.kinds[each.kind].size for each in islands) == 1

    def _memory(self, stages: Sequence[_Stage], micro: float, point: Composition) -> FloatArray:
        """State and activations of each layer on one device of each stage.

        Returns:
            # [num_layers, num_stages]
        """
        slices, count = self.slices, len(stages)
        count += slices.num_returns if count > 1 and not point.in_a_v else 0
        sizes = (
            slices.parameter_bytes, slices.state_bytes, slices.held_bytes(point.recompute)
        )  # fmt: skip
        factors = [
            # Chunks of a device in a V are as far from both ends as those of the first one.
            self._held(stage, count - number * (not point.in_a_v), micro, point)
            for number, stage in enumerate(stages)
        ]
        found: FloatArray = np.stack(sizes, axis=1) @ np.array(factors).T
        return found

    def _held(
        self, stage: _Stage, behind: int, micro: float, point: Composition
    ) -> tuple[float, float, float]:
        """What a device of a stage holds of its layers.

        Args:
            stage: The stage.
            behind: Number of stages from it to the last, both included, and again after that.
            micro: Samples of a micro-batch.
            point: Composition with the micro-batches and the manner.

        Returns:
            Factors on the bytes of parameters, of state and of a sample's activations.
        """
        members, sliced = stage.island.members, 1.0
        if point.zero and stage.teams > 1:
            sliced = 1.0 / stage.teams
        # Parameters and gradients are whole under stage 1 and slices under stage 3.
        whole = 2.0 * (1.0 - sliced) if point.zero == 1 else 0.0
        is_plain = point.in_a_v or not point.hides_messages
        most = behind if is_plain else 2 * behind - 1
        in_flight = max(min(most, point.num_micro), 1)
        return whole / members, sliced / members, micro / stage.teams / members * in_flight

    @kept
    def _message_seconds(self, pool: Pool, in_a_v: bool) -> float:
        """Seconds in which the busiest link sends a sample's values between stages, both ways.

        The NICs of a host send outputs to the next stage and gradients to the one before. With a
        shared weight, the first stage comes after the last; in a V, a sample comes by twice.
        """
        slices, size, parts = self.slices, self.slices.boundary_bytes, list[tuple[int, float]]()
        busy_s: defaultdict[object, float] = defaultdict(float)
        for island in pool:
            count = min(island.stages, island.hosts)
            # Three neighbours stand for all: one of them is between two others.
            parts += [(island.kind, island.hosts / count)] * min(count, 3)
            if island.stages > count:
                busy_s["inside"] = size / slices.kinds[island.kind].link_bytes_per_s
        hops = list(pairwise(range(len(parts)))) * (1 + in_a_v)
        if slices.num_returns and len(parts) > 1 and not in_a_v:
            hops.append((len(parts) - 1, 0))
        for ends in hops:
            (first, hosts), (second, others) = (parts[end] for end in ends)
            kind, other = slices.kinds[first], slices.kinds[second]
            if first != second and kind.hosts == other.hosts:
                busy_s[ends] += size / (kind.link_bytes_per_s * min(hosts, others))
                continue
            busy_s[frozenset((first, second))] += size / slices.between_bytes_per_s(first, second)
            busy_s[ends[0]] += size / (kind.nic_bytes_per_s * hosts)
            busy_s[ends[1]] += size / (other.nic_bytes_per_s * others)
        return max(busy_s.values(), default=0.0)

    def _gradient_seconds(
        self,
        stages: Sequence[_Stage],
        parts: Iterable[float],
        point: Composition,
        others: Sequence[int],
    ) -> float:
        """Seconds in which the slowest stage sums its gradients.

        Args:
            stages: Stages of a pool.
            parts: Part of the layers for each of them.
            point: Composition with the micro-batches and the manner.
            others: Kinds of machines in other pools.
        """
        size, slowest = self.slices.all_bytes(point.recompute)[0], 0.0
        for stage, part in zip(stages, parts, strict=True):
            kind = self.slices.kinds[stage.island.kind]
            if stage.teams == 1 and not others:
                continue
            in_host = kind.size // stage.island.members
            beside = {host for other in others for host in self.slices.kinds[other].hosts}
            is_beside = bool(others) and len(beside | {*kind.hosts[: stage.island.hosts]}) > 1
            crosses = is_beside or stage.teams > in_host
            rate = kind.nic_bytes_per_s if crosses else kind.link_bytes_per_s
            between = (
                self.slices.between_bytes_per_s(stage.island.kind, other) for other in others
            )
            slowest = max(slowest, 2.0 * size * part / min(rate, *between, np.inf))
        # Under stage 3 parameters are gathered again for every micro-batch.
        return slowest * (0.5 + point.num_micro if point.zero == 3 else 1.0)


def _ranked_s(seconds: float, filled: float) -> float:
    """Seconds of a pool that fills this part of a device; what does not fit ranks behind all else.

    The leanest of what does not fit comes first.
    """
    return seconds if filled <= 1.0 else OVERFLOWS * filled + seconds


def _samples(stage: _Stage, micro: float) -> int:
    """Most samples of a micro-batch on a team of a stage."""
    return max(int(np.ceil(micro / stage.teams - 1e-9)), 1)


def _kinds_beside(pool: Pool, point: Composition) -> tuple[int, ...]:
    """Kinds of machines in the other pools, with which gradients are summed."""
    return tuple(island.kind for other in point.pools if other != pool for island in other)


def structures(kinds: Sequence[int]) -> Iterator[Structure]:
    """Kinds of machines in pools, each pool in the order of its layers; some kinds may be idle.

    Up to four kinds: all partitions of all subsets. More: all kinds in one pipeline, each kind
    alone, and all kinds as replicas of each other.

    Args:
        kinds: Kinds, first the one that should have the first layers.
    """
    # These come first, so that a search that is cut short has seen them.
    together = tuple(kinds)
    yield (together,)
    for kind in kinds if len(kinds) > 1 else ():
        yield ((kind,),)
    if len(kinds) > MOST_KINDS:
        yield tuple((kind,) for kind in kinds)
        return
    for size in range(len(kinds), 1, -1):
        for some in combinations(kinds, size):
            for pools in partitions(some):
                if pools != (together,):
                    yield pools
                if any(len(pool) > 1 for pool in pools):
                    yield tuple(pool[::-1] for pool in pools)


_AGAIN = {
    Recompute.NONE: "",
    Recompute.FULL: ", recompute",
    Recompute.OP: ", recompute ops",
    Recompute.SELECTIVE: ", recompute scores",
}


def described(point: Composition, slices: Slices, cluster: Cluster) -> str:
    """A composition in words: ``A100 tp8 x 2 (5-5 layers) | T4 ...; 16 micro-batches``."""
    parts = []
    for pool, layers, samples in zip(point.pools, point.layers, point.samples, strict=True):
        stage, islands = 0, []
        for island in pool:
            kind = slices.kinds[island.kind]
            own: list[object] = list(layers[stage : stage + island.stages])
            if point.in_a_v:
                back = layers[::-1][stage : stage + island.stages]
                own = [f"{forth}+{more}" for forth, more in zip(own, back, strict=True)]
            stage += island.stages
            teams = stages_of((island,), slices)[0].teams
            name = cluster.device_types[kind.device_type].name
            islands.append(
                f"{name} tp {island.members} dp {teams} layers {'-'.join(map(str, own))}"
            )
        parts.append(f"{' > '.join(islands)} ({samples} samples)")
    manner = _AGAIN[point.recompute] + f", zero {point.zero}" * bool(point.zero)
    manner += " on each host" * point.copies_on_hosts
    manner += ", 1F1B" * (not point.hides_messages) + ", split backward" * point.splits_backward
    manner += ", zero_bubble_v" * point.in_a_v
    micro = f"{point.num_micro} micro-batches" if point.num_micro > 1 else "in one go"
    return f"{' | '.join(parts)}; {micro}{manner}"


def strategy_of(
    point: Composition, slices: Slices, evaluator: Evaluator, step_barrier: bool
) -> Strategy:
    """The strategy of a composition."""
    graph, cluster = evaluator.graph, evaluator.cluster
    pipelines = [
        _pipeline(pool, layers, samples, point, slices, evaluator)
        for pool, layers, samples in zip(point.pools, point.layers, point.samples, strict=True)
    ]
    # Teams that do alike are simulated once: as many lanes as divide the teams of all stages.
    counts = [stage.teams for pool in point.pools for stage in stages_of(pool, slices)]
    lanes = gcd(*counts) if has_alike_hosts(cluster) else 1
    num_tasks = point.num_micro * sum(
        len(pipeline.ranks[0]) // lanes * len(evaluator.tables.op_id) for pipeline in pipelines
    )
    if num_tasks > MOST_TASKS and point.num_micro > 1:
        raise StrategyError("too many tasks to simulate under a budget.")
    in_teams = any(island.members > 1 for pool in point.pools for island in pool)
    layout = Layout(
        pp=2,  # or more, or 1: the pipelines have their stages
        zero=point.zero,
        recompute=point.recompute,
        schedule="zero_bubble_v" if point.in_a_v else "1f1b",
        sequence_parallel=in_teams,
    )
    strategy = strategy_of_pipelines(
        graph, cluster, pipelines, layout, keeps_turns=point.in_a_v, step_barrier=step_barrier
    )
    if point.in_a_v or not (point.splits_backward or strategy.num_micro_batches > 1):
        return strategy
    caps = Caps.HIDING if point.hides_messages else Caps.ONE_F_ONE_B
    parts = [
        capped(graph, each.ranks, each.stages, caps, cluster.num_devices).in_flight
        for each in pipelines
    ]
    # Each device is in one pipeline, which alone sets its caps.
    in_flight = tuple(
        next((each for each in of_device if each), ()) for of_device in zip(*parts, strict=True)
    )
    schedule = PipelineSchedule(in_flight=in_flight, splits_backward=point.splits_backward)
    return replace(strategy, schedule=schedule)


def _pipeline(
    pool: Pool,
    layers: tuple[int, ...],
    samples: int,
    point: Composition,
    slices: Slices,
    evaluator: Evaluator,
) -> Pipeline:
    stage_of_layer = [stage for stage, count in enumerate(layers) for _ in range(count)]
    stages = tuple(stage_of_layer[layer] for layer in slices.layer_of_group)
    if shared_across_stages(evaluator.graph, stages) and len(layers) > 1:
        stages = tuple(np.maximum.accumulate(stages).tolist())
    teams = []
    for island in pool:
        kind = slices.kinds[island.kind]
        devices = [device for own in kind.devices[: island.hosts] for device in own]
        of_kind = host_teams(evaluator.cluster, devices, island.members)
        per_stage = len(of_kind) // island.stages
        teams += [
            of_kind[stage * per_stage : (stage + 1) * per_stage] for stage in range(island.stages)
        ]
    return Pipeline(
        stages=stages,
        teams=tuple(teams),
        micro_batches=split_evenly(samples, point.num_micro),
        num_copies=num_copies(pool, slices) if point.copies_on_hosts else 1,
    )
