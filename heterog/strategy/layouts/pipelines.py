"""Parallel pipelines of teams, equal or not, as decisions and micro-batches of a strategy."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.strategy.division import split_evenly
from heterog.strategy.keeping import Keeps, attention_scores
from heterog.strategy.layouts.experts import context_rules, expert_rules, groups_of_experts
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.stages import NO_LAYER, layer_blocks, layers_of, num_returns
from heterog.strategy.layouts.tensor import TeamRules, team_rules
from heterog.strategy.schedules import (
    AS_IT_COMES,
    PipelineSchedule,
    as_caps,
    device_chunks,
    stages_of,
    stated_turns,
)
from heterog.strategy.strategy import (
    DEFAULT_BUCKET_BYTES,
    REPLICATED,
    Decision,
    Strategy,
    Sync,
    cut_at_changes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Replicas of the model that cut it into the same stages.

    Attributes:
        stages: Stage of each group.  # [num_groups]
        teams: Devices of each replica, by rank; if a rank has several stages, the schedule
            decides which.  # [num_ranks][num_replicas]
        micro_batches: Number of samples of each micro-batch, of all replicas together.
        num_copies: Number of copies of sliced state; each run of neighbouring replicas keeps one.
    """

    stages: tuple[int, ...]
    teams: tuple[tuple[tuple[int, ...], ...], ...]
    micro_batches: tuple[int, ...]
    num_copies: int = 1

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each rank."""
        return tuple(
            tuple(device for team in replicas for device in team) for replicas in self.teams
        )


KEEPS = {
    Recompute.FULL: Keeps.NOTHING,
    Recompute.SELECTIVE: Keeps.ALL_BUT_SCORES,
    Recompute.OP: Keeps.PRODUCTS,
}
"""Values that a layer keeps under each kind of recomputation."""


def strategy_of_pipelines(
    graph: OpGraph,
    cluster: Cluster,
    pipelines: Sequence[Pipeline],
    layout: Layout,
    *,
    keeps_turns: bool = True,
    step_barrier: bool = True,
) -> Strategy:
    """Make the strategy of some pipelines that train on one batch together.

    It is not checked here, because evaluating a strategy checks it.

    Args:
        graph: One training step.
        cluster: Devices and links.
        pipelines: Their stages, teams and micro-batches, which may be unequal.
        layout: All else that they share: ZeRO, recomputation, the schedule, splits in teams.
        keeps_turns: Whether the schedule states every turn; otherwise only its caps are used.
        step_barrier: Whether a step ends with all updates.

    Raises:
        StrategyError: a device is in two teams, or the schedule does not exist for these numbers.
    """
    used = [device for pipeline in pipelines for rank in pipeline.ranks for device in rank]
    if len(used) > len(set(used)):
        twice = next(device for device in used if used.count(device) > 1)
        raise StrategyError(f"device {twice} is in two teams; each device has one place.")
    samples = _samples_of_devices(pipelines, cluster.num_devices)
    decisions = _decisions(graph, cluster, pipelines, layout, samples)
    rules = rules_of_teams(graph, pipelines, layout)
    num_micro = max(len(pipeline.micro_batches) for pipeline in pipelines)
    makes_again = any(decision.recompute for decision in decisions)
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=decisions,
        homes=(REPLICATED,) * len(graph.updates),
        micro_batches=tuple(samples) if num_micro > 1 else (),
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        step_barrier=step_barrier,
        op_rules=rules.op_rules if rules is not None else (),
        schedule=_schedule(
            graph, decisions, pipelines, layout, cluster.num_devices, keeps_turns=keeps_turns
        ),
        blocks=cut_at_changes(layer_blocks(graph), decisions) if makes_again else (),
    )


def _samples_of_devices(pipelines: Sequence[Pipeline], num_devices: int) -> list[tuple[int, ...]]:
    """Number of samples of each device in each micro-batch.  # [num_devices][num_micro]"""
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


def teams_of_groups(
    graph: OpGraph, pipelines: Sequence[Pipeline], layout: Layout
) -> list[tuple[tuple[int, ...], ...]]:
    """The teams of each group, pipeline by pipeline.  # [num_groups]

    In groups of experts the teams of replicas that share experts are joined to one.
    """
    rank_of = [_rank_of_stage(len(pipeline.teams), layout) for pipeline in pipelines]
    experts = groups_of_experts(graph) if layout.ep > 1 else frozenset()
    of_stages: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], ...]] = {}
    found = []
    for group in range(group_ops(graph).num_groups):
        joined = layout.ep if group in experts else 1
        stages = tuple(pipeline.stages[group] for pipeline in pipelines)
        if (stages, joined) not in of_stages:  # many groups have the same stages
            of_stages[stages, joined] = tuple(
                team
                for pipeline, rank, stage in zip(pipelines, rank_of, stages, strict=True)
                for team in _joined(pipeline.teams[rank[stage]], joined)
            )
        found.append(of_stages[stages, joined])
    return found


def each_once(
    of_groups: Sequence[tuple[tuple[int, ...], ...]],
) -> Collection[tuple[tuple[int, ...], ...]]:
    """The teams of groups without repetitions: groups of the same stages share one object."""
    return {id(teams): teams for teams in of_groups}.values()


def _joined(teams: Sequence[tuple[int, ...]], number: int) -> Iterator[tuple[int, ...]]:
    """Join each run of ``number`` teams to one."""
    for first in range(0, len(teams), number):
        yield tuple(device for team in teams[first : first + number] for device in team)


def rules_of_teams(
    graph: OpGraph, pipelines: Sequence[Pipeline], layout: Layout
) -> TeamRules | None:
    """Rules of all groups with a team of several devices; ``None`` if there is no such group.

    Raises:
        LayoutError: nothing can be split, or not into as many parts as a team has members.
    """
    of_groups = teams_of_groups(graph, pipelines, layout)
    largest = {id(teams): max(map(len, teams)) for teams in each_once(of_groups)}
    sizes = [largest[id(teams)] for teams in of_groups]
    groups = tuple(group for group, size in enumerate(sizes) if size > 1)
    if layout.ep == 1:
        return _rules_of_layers(graph, groups, sizes, layout)
    experts = groups_of_experts(graph)
    of_experts = expert_rules(graph, sorted(experts), max(sizes, default=1), layout.dispatch)
    rest = tuple(group for group in groups if group not in experts)
    others = _rules_of_layers(graph, rest, sizes, layout)
    if others is None:
        return of_experts
    group_of = group_ops(graph).group
    kept = {op: rule for op, rule in others.op_rules if int(group_of[op]) not in experts}
    return TeamRules(
        op_rules=tuple(sorted((kept | dict(of_experts.op_rules)).items())),
        least_units=min(others.least_units, of_experts.least_units),
        remarks=(*others.remarks, *of_experts.remarks),
    )


def _rules_of_layers(
    graph: OpGraph, groups: tuple[int, ...], sizes: Sequence[int], layout: Layout
) -> TeamRules | None:
    """Rules by which teams split layers or sequences.

    Args:
        graph: One training step.
        groups: Groups of teams of several devices.
        sizes: Size of the largest team of each group.
        layout: Decides which of the two, and how.
    """
    if not groups:
        return None
    sizes = [sizes[group] for group in groups]
    if layout.cp > 1:
        return context_rules(graph, max(sizes))
    return team_rules(
        graph,
        groups,
        members=max(sizes),
        vocabulary_parallel=layout.vocabulary_parallel,
        sequence_parallel=layout.sequence_parallel,
    )


def _decisions(
    graph: OpGraph,
    cluster: Cluster,
    pipelines: Sequence[Pipeline],
    layout: Layout,
    samples: Sequence[tuple[int, ...]],
) -> tuple[Decision, ...]:
    """Teams and recomputation of each group as decisions."""
    in_layer = layers_of(graph).of_group
    is_selective = layout.recompute == Recompute.SELECTIVE
    recomputes = bool(attention_scores(graph)) if is_selective else layout.recompute in KEEPS
    made: dict[tuple[int, bool], Decision] = {}  # groups of a stage have the same object as teams
    found = []
    for group, teams in enumerate(teams_of_groups(graph, pipelines, layout)):
        recompute = (
            recomputes
            and in_layer[group] != NO_LAYER
            and (in_layer[group] + 1) % layout.recompute_every == 0
        )
        if (id(teams), recompute) not in made:
            decision = _decision(cluster, teams, layout.zero, samples)
            if recompute:
                decision = replace(decision, recompute=True, keeps=KEEPS[layout.recompute])
            made[id(teams), recompute] = _in_copies(decision, teams, pipelines)
        found.append(made[id(teams), recompute])
    return tuple(found)


def _decision(
    cluster: Cluster,
    teams: tuple[tuple[int, ...], ...],
    zero: int,
    samples: Sequence[tuple[int, ...]],
) -> Decision:
    devices = tuple(sorted(device for team in teams for device in team))
    sync = Sync.of_stage(zero) if zero else Sync.RING
    if sync == Sync.RING:
        hosts = {cluster.host_of[team[0]] for team in teams}
        sync = Sync.HIERARCHICAL if 1 < len(hosts) < len(teams) else Sync.RING
    are_plain = len(teams) == len(devices) and [d for (d,) in teams] == list(devices)
    return Decision(
        devices=devices,
        shares=tuple(sum(samples[device]) for device in devices),
        sync=sync,
        teams=() if are_plain else teams,
        parts=() if are_plain else (1,) * len(devices),
    )


def _in_copies(
    decision: Decision, teams: Sequence[tuple[int, ...]], pipelines: Sequence[Pipeline]
) -> Decision:
    """Give a decision slice groups, if its only pipeline keeps several copies in slices."""
    copies = pipelines[0].num_copies
    if len(pipelines) > 1 or copies == 1:
        return decision
    return replace(decision, slice_groups=tuple(_joined(teams, len(teams) // copies)))


def _rank_of_stage(num_ranks: int, layout: Layout) -> tuple[int, ...]:
    ranks = [(rank,) for rank in range(num_ranks)]
    return tuple(rank for (rank,) in stages_of(layout.schedule_name, ranks, layout.num_chunks))


def _schedule(
    graph: OpGraph,
    decisions: Sequence[Decision],
    pipelines: Sequence[Pipeline],
    layout: Layout,
    num_devices: int,
    *,
    keeps_turns: bool,
) -> PipelineSchedule:
    """The named schedule of each pipeline, on its own devices.

    Without stages, the chunks of a breadth-first order are single layers.
    """
    if max(len(pipeline.micro_batches) for pipeline in pipelines) == 1:
        return AS_IT_COMES
    is_by_layer = layout.schedule == "breadth_first" and len(pipelines[0].ranks) == 1
    layers = layer_blocks(graph) if is_by_layer else ()
    chunks = device_chunks([each.devices for each in decisions], num_devices, layers)
    parts = []
    for pipeline in pipelines:
        stated = stated_turns(
            layout.schedule_name,
            pipeline.ranks,
            len(chunks[pipeline.ranks[0][0]]) if is_by_layer else layout.num_chunks,
            len(pipeline.micro_batches),
            num_devices=num_devices,
        )
        returns = num_returns(graph, pipeline.stages)
        parts.append(stated if keeps_turns else as_caps(stated, returns))
    starts = {
        group
        for pipeline in pipelines
        for group in range(1, len(pipeline.stages))
        if pipeline.stages[group] != pipeline.stages[group - 1]
    }
    starts |= set(layers)
    return PipelineSchedule(
        in_flight=_beside([part.in_flight for part in parts]),
        splits_backward=any(part.splits_backward for part in parts),
        turns=_beside([part.turns for part in parts]),
        chunk_starts=tuple(sorted(starts)) if layout.num_chunks > 1 or is_by_layer else (),
        gathers_once=any(part.gathers_once for part in parts),
    )


_T = TypeVar("_T")


def _beside(parts: Sequence[tuple[tuple[_T, ...], ...]]) -> tuple[tuple[_T, ...], ...]:
    """Merge the entries of several parts; no device has an entry in more than one."""
    length = max(map(len, parts))
    return tuple(
        next((part[device] for part in parts if device < len(part) and part[device]), ())
        for device in range(length)
    )
