"""Searches that imitation learns from."""

from itertools import combinations, pairwise

import numpy as np

from heterog.agents.elites import balanced_stages
from heterog.agents.imitation import search_pair
from heterog.lowering.program import IntArray
from tests.envs.cases import pipelined_pair


def test_balanced_stages_are_as_fast_as_any_cut_of_the_same_devices() -> None:
    pair = pipelined_pair()
    seconds = pair.observer.compute_seconds
    rows = balanced_stages(pair, 16, np.random.default_rng(0))
    assert len(rows) > 2
    for row in rows:
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), pair.num_blocks]
        stages = row[starts[:-1]]
        assert len(set(stages.tolist())) == len(stages)

        def slowest(cuts: tuple[int, ...], stages: IntArray = stages) -> float:
            ends = pairwise((0, *cuts, pair.num_blocks))
            return max(
                float(seconds[first:last, stage].sum())
                for (first, last), stage in zip(ends, stages, strict=True)
            )

        if len(stages) > 3:
            continue
        least = min(map(slowest, combinations(range(1, pair.num_blocks), len(stages) - 1)))
        assert slowest(tuple(starts[1:-1])) <= least * 1.01


def test_a_search_for_pipelines_is_no_worse_than_the_balanced_ones() -> None:
    pair = pipelined_pair()
    balanced = balanced_stages(pair, 24, np.random.default_rng(0))
    found = search_pair(pair, 120, np.random.default_rng(0))
    assert found.overflow == 0.0
    best = min(score.step_time_s for score in map(pair.score, balanced) if score.overflow == 0.0)
    assert found.step_time_s <= best * 1.1


def test_elites_keep_no_segment_that_gains_nothing() -> None:
    pair = pipelined_pair()
    found = search_pair(pair, 600, np.random.default_rng(0))
    assert found.overflow == 0.0
    for row in found.rows:
        seconds = pair.score(row).step_time_s
        assert seconds <= found.step_time_s * 1.013  # close to the best, and simpler for 0.2 %
        edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), pair.num_blocks]
        for first, last in pairwise(edges):
            for near in {max(first - 1, 0), min(last, pair.num_blocks - 1)} - {first, last - 1}:
                simpler = row.copy()
                simpler[first:last] = row[near]
                score = pair.score(simpler)
                assert score.overflow > 0.0 or score.step_time_s > seconds
