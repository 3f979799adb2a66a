"""The strategy of a composition."""

from dataclasses import replace

import numpy as np

from heterog.errors import StrategyError
from heterog.methods.islands.composing import Composition, Pool, num_copies
from heterog.methods.islands.slices import Slices
from heterog.methods.megatron_grid import MOST_TASKS
from heterog.methods.teams import host_teams
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.layouts.pipelines import Manner, Pipeline, strategy_of_pipelines
from heterog.strategy.layouts.stages import shared_across_stages
from heterog.strategy.pipeline_schedule import PipelineSchedule
from heterog.strategy.schedules import caps_of_stages
from heterog.strategy.strategy import Strategy


def strategy_of(
    point: Composition, slices: Slices, evaluator: Evaluator, step_barrier: bool
) -> Strategy:
    """The strategy of a composition."""
    graph, cluster = evaluator.graph, evaluator.cluster
    pipelines = [
        _pipeline(pool, layers, samples, point, slices, evaluator)
        for pool, layers, samples in zip(point.pools, point.layers, point.samples, strict=True)
    ]
    num_tasks = point.num_micro * sum(
        len(pipeline.ranks[0]) * len(evaluator.tables.op_id) for pipeline in pipelines
    )
    if num_tasks > MOST_TASKS and point.num_micro > 1:
        raise StrategyError("too many tasks to simulate under a budget.")
    in_teams = any(island.members > 1 for pool in point.pools for island in pool)
    manner = Manner(
        zero=point.zero,
        recompute=point.recompute,
        schedule="zero_bubble_v" if point.in_a_v else "1f1b",
        num_chunks=2 if point.in_a_v else 1,
        keeps_turns=point.in_a_v,
        sequence_parallel=in_teams,
        step_barrier=step_barrier,
    )
    strategy = strategy_of_pipelines(graph, cluster, pipelines, manner)
    if point.in_a_v or not (point.splits_backward or strategy.num_micro_batches > 1):
        return strategy
    hidden = int(point.hides_messages)
    caps = [
        caps_of_stages(pipeline.ranks, cluster.num_devices, hidden=hidden).in_flight
        for pipeline in pipelines
    ]
    # Each device is in one pipeline, and only that sets its caps.
    in_flight = tuple(
        next((each for each in of_device if each), ()) for of_device in zip(*caps, strict=True)
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
