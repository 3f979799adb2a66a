"""Pipelines of teams beside each other, also unlike ones, as decisions and micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.strategy.layout import split_evenly
from heterog.strategy.layouts.layout import Recompute
from heterog.strategy.layouts.stages import NO_LAYER, layers_of
from heterog.strategy.pipeline_schedule import AS_IT_COMES, PipelineSchedule
from heterog.strategy.schedules import caps_of_stages, stages_of, stated_turns
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, REPLICATED, Decision, Strategy, Sync

_ZERO = (Sync.RING, Sync.ZERO1, Sync.ZERO2, Sync.ZERO3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Replicas of the model that cut it into the same stages.

    Attributes:
        stages: stage of each group.  # [num_groups]
        teams: of each rank, the devices of each replica; with several stages on a rank they lie on
            it as the schedule says.  # [num_ranks][num_replicas]
        micro_batches: samples of each micro-batch, of all replicas together.
    """

    stages: tuple[int, ...]
    teams: tuple[tuple[tuple[int, ...], ...], ...]
    micro_batches: tuple[int, ...]

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each rank."""
        return tuple(
            tuple(device for team in replicas for device in team) for replicas in self.teams
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """What all pipelines of a strategy have in common.

    Attributes:
        zero: stage of ZeRO.
        recompute: what is made again for the backward pass.
        schedule: a name of ``schedules.SCHEDULES``.
        num_chunks: stages of each rank.
        keeps_turns: whether the schedule states every turn; otherwise 1F1B is its caps.
        step_barrier: whether a step ends with all updates.
    """

    zero: int = 0
    recompute: Recompute = Recompute.NONE
    schedule: str = "1f1b"
    num_chunks: int = 1
    keeps_turns: bool = True
    step_barrier: bool = True


def strategy_of_pipelines(
    graph: OpGraph, cluster: Cluster, pipelines: Sequence[Pipeline], manner: Manner
) -> Strategy:
    """The strategy of some pipelines that train on one batch together.

    Raises:
        StrategyError: a device is in two teams, the samples are not those of the batch, or the
            schedule is none for these numbers.
    """
    used = [device for pipeline in pipelines for rank in pipeline.ranks for device in rank]
    if len(used) > len(set(used)):
        twice = next(device for device in used if used.count(device) > 1)
        raise StrategyError(f"device {twice} is in two teams; each device has one place.")
    samples = _samples_of_devices(pipelines, cluster.num_devices)
    num_micro = max(len(pipeline.micro_batches) for pipeline in pipelines)
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint(),
        decisions=_decisions(graph, cluster, pipelines, manner, samples),
        homes=(REPLICATED,) * len(graph.updates),
        micro_batches=_counted_once(pipelines, samples) if num_micro > 1 else (),
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        step_barrier=manner.step_barrier,
        schedule=_schedule(pipelines, manner, cluster.num_devices),
        blocks=_blocks(graph) if manner.recompute == Recompute.FULL else (),
    )
    strategy.check(graph, cluster)
    return strategy


def _blocks(graph: OpGraph) -> tuple[int, ...]:
    """First groups of the repeated layers, and every group outside of them."""
    in_layer = layers_of(graph).of_group
    return tuple(
        group
        for group, layer in enumerate(in_layer)
        if group == 0 or layer == NO_LAYER or layer != in_layer[group - 1]
    )


def _samples_of_devices(pipelines: Sequence[Pipeline], num_devices: int) -> list[tuple[int, ...]]:
    """Samples of each device in each micro-batch.  # [num_devices][num_micro]"""
    num_micro = max(len(pipeline.micro_batches) for pipeline in pipelines)
    samples: list[tuple[int, ...]] = [(0,) * num_micro for _ in range(num_devices)]
    for pipeline in pipelines:
        sizes = pipeline.micro_batches + (0,) * (num_micro - len(pipeline.micro_batches))
        for replicas in pipeline.teams:
            of_team = [split_evenly(size, len(replicas)) for size in sizes]
            for number, team in enumerate(replicas):
                of_member = [split_evenly(counts[number], len(team)) for counts in of_team]
                for position, device in enumerate(team):
                    samples[device] = tuple(counts[position] for counts in of_member)
    return samples


def _counted_once(
    pipelines: Sequence[Pipeline], samples: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Samples of the first ranks alone: the batch counts once."""
    first = {device for pipeline in pipelines for device in pipeline.ranks[0]}
    return tuple(own if device in first else (0,) * len(own) for device, own in enumerate(samples))


def _decisions(
    graph: OpGraph,
    cluster: Cluster,
    pipelines: Sequence[Pipeline],
    manner: Manner,
    samples: Sequence[tuple[int, ...]],
) -> tuple[Decision, ...]:
    """One for each group: the teams that have it, and whether its layer recomputes."""
    in_layer = layers_of(graph).of_group
    rank_of = [_rank_of_stage(len(pipeline.teams), manner) for pipeline in pipelines]
    made: dict[tuple[tuple[int, ...], bool], Decision] = {}
    found = []
    for group in range(group_ops(graph).num_groups):
        ranks = tuple(
            rank_of[number][pipeline.stages[group]] for number, pipeline in enumerate(pipelines)
        )
        recompute = manner.recompute == Recompute.FULL and in_layer[group] != NO_LAYER
        if (ranks, recompute) not in made:
            teams = tuple(
                team
                for pipeline, rank in zip(pipelines, ranks, strict=True)
                for team in pipeline.teams[rank]
            )
            made[ranks, recompute] = _decision(cluster, teams, manner.zero, samples, recompute)
        found.append(made[ranks, recompute])
    return tuple(found)


def _decision(
    cluster: Cluster,
    teams: Sequence[tuple[int, ...]],
    zero: int,
    samples: Sequence[tuple[int, ...]],
    recompute: bool,
) -> Decision:
    devices = tuple(sorted(device for team in teams for device in team))
    sync = _ZERO[zero]
    if sync == Sync.RING:
        hosts = {cluster.host_of[team[0]] for team in teams}
        sync = Sync.HIERARCHICAL if 1 < len(hosts) < len(teams) else Sync.RING
    return Decision(
        devices=devices,
        shares=tuple(sum(samples[device]) for device in devices),
        sync=sync,
        recompute=recompute,
    )


def _rank_of_stage(num_ranks: int, manner: Manner) -> tuple[int, ...]:
    ranks = [(rank,) for rank in range(num_ranks)]
    return tuple(rank for (rank,) in stages_of(manner.schedule, ranks, manner.num_chunks))


def _schedule(pipelines: Sequence[Pipeline], manner: Manner, num_devices: int) -> PipelineSchedule:
    """The named schedule of each pipeline, on its own devices."""
    if max(len(pipeline.micro_batches) for pipeline in pipelines) == 1:
        return AS_IT_COMES
    parts = []
    for pipeline in pipelines:
        if not manner.keeps_turns:
            parts.append(caps_of_stages(pipeline.ranks, num_devices))
            continue
        parts.append(
            stated_turns(
                manner.schedule,
                pipeline.ranks,
                manner.num_chunks,
                len(pipeline.micro_batches),
                num_devices=num_devices,
            )
        )
    starts = {
        group
        for pipeline in pipelines
        for group in range(1, len(pipeline.stages))
        if pipeline.stages[group] != pipeline.stages[group - 1]
    }
    return PipelineSchedule(
        in_flight=_beside([part.in_flight for part in parts]),
        splits_backward=any(part.splits_backward for part in parts),
        turns=_beside([part.turns for part in parts]),
        chunk_starts=tuple(sorted(starts)) if manner.num_chunks > 1 else (),
    )


_T = TypeVar("_T")


def _beside(parts: Sequence[tuple[tuple[_T, ...], ...]]) -> tuple[tuple[_T, ...], ...]:
    """What each device does in the one part that says something about it."""
    length = max(map(len, parts))
    return tuple(
        next((part[device] for part in parts if device < len(part) and part[device]), ())
        for device in range(length)
    )
