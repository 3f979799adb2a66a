"""Finished rows: pipelines in balance, teams and schedules, and devices that do alike."""

import copy
from dataclasses import replace
from itertools import combinations, groupby, pairwise, product

import numpy as np
import pytest

import heterog.agents.planners  # noqa: F401  registers the methods
from heterog.agents.elites import find_elites
from heterog.agents.finishing import Finish, Scheduled, moved_cuts
from heterog.agents.op_level import Scorer, Variation
from heterog.agents.planners import default_methods
from heterog.agents.policy import draw, rule_of_thumb
from heterog.agents.stages import balanced, estimated_s, kind_of, sequences_near
from heterog.agents.ways import BACKWARD, Way, rows_in_segments, seconds_of_cuts
from heterog.envs.pair import MARGIN, Loads, Pair, RunningMemory
from heterog.envs.strategy_env import StrategyEnv
from heterog.envs.toy import chain_graph
from heterog.lowering.program import IntArray
from heterog.methods.planner import Budget, Problem
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy
from tests.envs.cases import mixed_cluster, pipelined_pair
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of


def numbers_of(pair: Pair, *sets: tuple[int, ...]) -> tuple[int, ...]:
    """The first candidate on each set of devices."""
    return tuple(
        next(n for n, decision in enumerate(pair.table) if decision.devices == devices)
        for devices in sets
    )


def slowest_s(pair: Pair, row: IntArray, cut_weight: float) -> float:
    """Seconds of a row's slowest stage, with what crosses the cut behind it."""
    bounds = (0, *(b for b in range(1, len(row)) if row[b] != row[b - 1]), len(row))
    seconds = []
    for first, last in pairwise(bounds):
        own = float(pair.observer.compute_seconds[first:last, row[first]].sum())
        crosses = last < len(row)
        seconds.append(own + crosses * cut_weight * float(pair.observer.cut_seconds[last - 1]))
    return max(seconds)


@pytest.mark.parametrize("cut_weight", [0.0, 0.5])
def test_balanced_pipelines_are_the_best_of_all_cuts(cut_weight: float) -> None:
    pair = pipelined_pair()
    stages = numbers_of(pair, (2,), (0, 1), (3,))
    found = slowest_s(pair, balanced(pair, stages, cut_weight), cut_weight)
    every = [
        np.repeat(np.array(stages, np.int32), np.diff((0, *cuts, pair.num_blocks)))
        for cuts in combinations(range(1, pair.num_blocks), 2)
    ]
    assert found == pytest.approx(min(slowest_s(pair, row, cut_weight) for row in every))


def test_pipelines_without_memory_are_as_even_as_memory_is() -> None:
    """Twice the memory on one of two devices: about twice the layers, though both are as fast."""
    graph = chain_graph(12, 512, 64)
    cluster = cluster_of((100.0, ["V100-16GB"]), (100.0, ["V100-16GB"]))
    small, large = (
        replace(device, usable_memory_bytes=round(size * 2**20))
        for device, size in zip(cluster.devices, (10.0, 20.0), strict=True)
    )
    pair = Pair(graph, replace(cluster, devices=(small, large))).pipelined()
    assert pair is not None
    row = balanced(pair, numbers_of(pair, (0,), (1,)), 0.0)
    count = int((row == row[0]).sum())
    assert 2 <= count <= 5


def test_near_a_pipeline_are_its_devices_one_by_one_and_its_fastest_stages() -> None:
    pair = pipelined_pair()
    both, slow = numbers_of(pair, (0, 1), (3,))
    row = np.repeat(np.array([both, slow], np.int32), (5, pair.num_blocks - 5))
    near = {
        tuple(pair.table[number].devices for number in stages)
        for stages in sequences_near(pair, row)
    }
    forth = {((0, 1), (3,)), ((0,), (1,), (3,)), ((0,), (1,))}
    assert near == forth | {stages[::-1] for stages in forth}


def test_near_a_pipeline_neighbours_of_one_type_are_one_stage() -> None:
    pair = pipelined_pair()
    row = balanced(pair, numbers_of(pair, (0,), (1,), (3,)), 0.5)
    near = [
        [pair.table[number].devices for number in stages] for stages in sequences_near(pair, row)
    ]
    assert [(0, 1), (3,)] in near


def test_sequences_that_only_exchange_alike_hosts_are_of_one_kind() -> None:
    pair = Pair(
        chain_graph(6, 64, 32), cluster_of(*[(10.0, ["T4", "T4"])] * 2, (10.0, ["P100-16GB"]))
    )
    kinds = [
        kind_of(pair, numbers_of(pair, *sets))
        for sets in (((0, 1), (2, 3), (4,)), ((2, 3), (0, 1), (4,)), ((0, 1), (4,), (2, 3)))
    ]
    assert kinds[0] == kinds[1] != kinds[2]
    one_host, two_hosts = numbers_of(pair, (0,), (1,)), numbers_of(pair, (0,), (2,))
    assert kind_of(pair, one_host) != kind_of(pair, two_hosts)


def test_the_estimate_of_a_pipeline_is_its_slowest_stage_and_a_part_of_the_others() -> None:
    pair = pipelined_pair()
    row = balanced(pair, numbers_of(pair, (0, 1), (3,)), 0.5)
    observer, cut = pair.observer, int(np.flatnonzero(np.diff(row))[0]) + 1
    first, second = (
        (observer.compute_seconds[part, number].sum(), observer.sync_seconds[part, number].sum())
        for part, number in ((slice(cut), row[0]), (slice(cut, None), row[-1]))
    )
    slow, fast = max(first[0], second[0]), min(first[0], second[0])
    expected = slow + fast / pair.num_micro + max(first[1], second[1])
    assert estimated_s(pair, row) == pytest.approx(expected)


def seconds_one_by_one(pair: Pair, row: IntArray) -> float:
    """Slow reference of ``seconds_of_cuts`` without memory."""
    observer = pair.observer
    compute = [float(observer.compute_seconds[block, n]) for block, n in enumerate(row)]
    ready, summed = sum(compute) * (1.0 - BACKWARD), 0.0
    for block in reversed(range(len(row))):
        ready += BACKWARD * compute[block]
        summed = max(summed, ready) + float(observer.sync_seconds[block, row[block]])
    return max(summed, sum(compute))


def test_the_seconds_of_every_cut_are_those_of_its_row() -> None:
    pair = Pair(
        chain_graph(6, 64, 32), cluster_of((10.0, ["V100-16GB"] * 2), (10.0, ["P100-16GB"]))
    )
    first, second = (np.array(numbers, np.int32) for numbers in ((0, 3, 4), (3, 1, 2)))
    found = seconds_of_cuts(pair, first, second)
    for cut, column in product(range(pair.num_blocks), range(3)):
        row = np.repeat([first[column], second[column]], (cut, pair.num_blocks - cut))
        assert found[cut, column] == pytest.approx(seconds_one_by_one(pair, row))


def test_rows_in_segments_are_the_fastest_of_all_cuts() -> None:
    pair = Pair(
        chain_graph(6, 64, 32), cluster_of((10.0, ["V100-16GB"] * 2), (10.0, ["P100-16GB"]))
    )
    rows = rows_in_segments(pair, 10**6)
    seconds = [seconds_one_by_one(pair, row) for row in rows]
    assert seconds == sorted(seconds)
    numbers = range(pair.num_candidates)
    every = [
        seconds_one_by_one(pair, np.repeat([a, b], (cut, pair.num_blocks - cut)))
        for a, b in product(numbers, numbers)
        for cut in range(1, pair.num_blocks)
        if a != b
    ]
    assert seconds[0] == pytest.approx(min(every))


def test_uniform_rows_are_the_fastest_of_each_size_and_sum() -> None:
    pair = Pair(chain_graph(6, 64, 32), cluster_of((10.0, ["V100-16GB"] * 4), (10.0, ["T4"] * 4)))
    way = Way(pair, rule_of_thumb(pair))
    way.add_uniform(100)
    assert all(len(set(row.tolist())) == 1 for row in way.rows)
    decisions = {number: pair.table[number] for number in way.rows[:, 0].tolist()}
    seconds = seconds_of_cuts(pair, *[np.arange(pair.num_candidates, dtype=np.int32)] * 2)[0]
    for sync in {decision.sync for decision in pair.table}:
        of_sync = {n: len(each.devices) for n, each in decisions.items() if each.sync == sync}
        sizes = sorted(of_sync.values(), reverse=True)
        assert sizes[0] == max(len(each.devices) for each in pair.table if each.sync == sync)
        assert all(later <= 2 / 3 * former for former, later in pairwise(sizes))
        for number, size in of_sync.items():
            alike = [
                seconds[n]
                for n, each in enumerate(pair.table)
                if each.sync == sync and len(each.devices) == size
            ]
            assert seconds[number] == min(alike)
    few = Way(pair, rule_of_thumb(pair))
    few.add_uniform(2)
    assert len(few.rows) == 2


def test_refining_moves_a_cut_to_where_the_referee_wants_it() -> None:
    """A pipeline cut far from the best place comes within a hundredth of the best of all cuts."""
    pair = pipelined_pair()
    evaluator = Evaluator(pair.graph, pair.cluster)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=400), orders=(Order.FIFO,))
    numbers = np.array(numbers_of(pair, (0, 1), (2,)), np.int32)
    whole = Variation(num_micro=4, finish=Finish(schedule=Scheduled.SPLIT))

    def cut_at(block: int) -> IntArray:
        return pair.groups(np.repeat(numbers, (block, pair.num_blocks - block)))

    every = Scorer(problem, pair, 0)
    best = min(
        every.judge(cut_at(block), whole, Order.FIFO) for block in range(1, pair.num_blocks)
    )
    scorer = Scorer(problem, pair, 0)
    begin = scorer.score(cut_at(1), whole)
    scorer.judge_best()
    scorer.refine()
    assert scorer.best_judged[1] < begin[1]
    assert scorer.best_judged[1] <= 1.01 * best[1]


def test_cuts_move_by_some_groups_as_far_as_a_neighbour_goes() -> None:
    member = np.eye(3, dtype=np.bool_)
    row = np.array([0, 0, 0, 1, 2, 2, 2], np.int32)
    found = [other.tolist() for other in moved_cuts(row, member, 2)]
    assert found == [
        [0, 0, 0, 0, 2, 2, 2],
        [0, 1, 1, 1, 2, 2, 2],
        [0, 0, 0, 1, 1, 1, 2],
        [0, 0, 0, 2, 2, 2, 2],
    ]


def test_cuts_move_by_one_block_either_way() -> None:
    member = np.eye(3, dtype=np.bool_)
    row = np.array([0, 0, 1, 2, 2], np.int32)
    found = [other.tolist() for other in moved_cuts(row, member)]
    assert found == [[0, 0, 0, 2, 2], [0, 1, 1, 2, 2], [0, 0, 1, 1, 2], [0, 0, 2, 2, 2]]


@pytest.mark.parametrize("team_size", [1, 2])
@pytest.mark.parametrize("schedule", [each for each in Scheduled if each != Scheduled.IN_A_V])
def test_a_finished_row_is_scored_as_its_strategy(schedule: Scheduled, team_size: int) -> None:
    """In teams nearly so: single devices lose rules that mean nothing there."""
    strategy = scored(pipelined_pair(), ((0, 1), (2,)), Finish(team_size, schedule), team_size)
    has_teams = any(len(team) > 1 for each in strategy.decisions for team in each.teams)
    assert has_teams == (team_size > 1)
    assert bool(strategy.schedule.in_flight) == (schedule in ("capped", "hidden", "hidden_split"))
    assert strategy.schedule.splits_backward == (schedule in ("split", "hidden_split"))


def test_stages_in_a_v_go_through_the_devices_forth_and_back() -> None:
    pair = Pair(chain_graph(8, 256, 32), cluster_of((10.0, ["T4"]), (10.0, ["T4"]))).pipelined()
    assert pair is not None
    strategy = scored(pair, ((0,), (1,)), Finish(1, Scheduled.IN_A_V), 1)
    devices = [device for decision in strategy.decisions for device in decision.devices]
    assert [device for device, _ in groupby(devices)] == [0, 1, 0]
    assert len(strategy.schedule.chunk_starts) == 3
    assert strategy.schedule.turns


def scored(
    pair: Pair, sets: tuple[tuple[int, ...], ...], finish: Finish, team_size: int
) -> Strategy:
    """The strategy of a finished row, whose score is that of the evaluator."""
    evaluator = Evaluator(pair.graph, pair.cluster)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=99), orders=(Order.FIFO,))
    scorer = Scorer(problem, pair, 0)
    row = balanced(pair, numbers_of(pair, *sets), 0.5)
    score = scorer.score(row, Variation(num_micro=4, finish=finish))
    (found, candidate), _ = scorer.candidates()[0]
    assert found == score
    candidate.strategy.check(pair.graph, pair.cluster)
    near = 0.05 if team_size > 1 else 1e-9
    again = evaluator.evaluate(candidate.strategy, Order.FIFO)
    assert again.preference == pytest.approx(score, rel=near)
    return candidate.strategy


def test_finishing_makes_pipelines_faster_and_nothing_slower() -> None:
    """Weight gradients fill the gaps of a pipeline; rows without micro-batches stay."""
    pair = pipelined_pair()
    problem = Problem(
        evaluator=Evaluator(pair.graph, pair.cluster), budget=Budget(evaluations=400)
    )
    rows = draw(rule_of_thumb(pair), pair, 16, np.random.default_rng(0)).rows
    scorer = Scorer(problem, pair, 0)
    scorer.search(np.unique(rows, axis=0))
    best = scorer.best(1)[0][1]
    plain = min(
        scorer.score(row, whole) for row, whole in scorer.best(10**6) if whole.finish == Finish()
    )
    assert scorer.score(*scorer.best(1)[0]) < plain
    assert best.finish.schedule


def each_alone(pair: Pair) -> Loads:
    """Loads of a pair with every device a class of its own."""
    num_devices = pair.cluster.num_devices
    counts, state = np.zeros((2, pair.num_candidates, num_devices))
    for number, decision in enumerate(pair.table):
        counts[number, list(decision.devices)] = decision.shares
        state[number, list(decision.devices)] = pair.memory.state_part(decision)
    return Loads(
        counts=counts,
        state=state,
        holds=(counts > 0) | (state > 0),
        usable_bytes=pair.memory.usable_bytes,
        num_twins=np.ones(num_devices, np.int32),
        of=np.arange(pair.num_candidates),
        twin=np.arange(num_devices),
    )


@pytest.mark.parametrize("num_hosts", [2, 32])
def test_devices_of_a_host_count_as_its_fullest_on_large_clusters(num_hosts: int) -> None:
    """Shares differ by a sample at most, and so does what is counted; up to 64 devices nothing."""
    cluster = cluster_of(*[(10.0, ["T4"] * 8)] * num_hosts)
    pair = Pair(chain_graph(6, 256, 500), cluster)
    assert (len(pair.loads.num_twins) < cluster.num_devices) == (num_hosts == 32)
    assert pair.loads.num_twins.sum() == cluster.num_devices
    slow = copy.copy(pair)
    slow.__dict__["loads"] = each_alone(pair)
    rows = np.random.default_rng(0).integers(pair.num_candidates, size=(8, pair.num_blocks))
    fast_memory, slow_memory = RunningMemory(pair, 8), RunningMemory(slow, 8)
    for block in range(pair.num_blocks):
        assert not (fast_memory.fits() & ~slow_memory.fits()).any()
        fast_memory.add(rows[:, block].tolist())
        slow_memory.add(rows[:, block].tolist())
    memory = pair.memory
    sample = memory.saved_bytes_per_sample.sum() + memory.inner_bytes_per_sample.max()
    more = fast_memory.used - slow_memory.used
    assert more.min() >= -1e-6
    most = 0.0 if num_hosts == 2 else sample / memory.usable_bytes.min() / MARGIN
    assert more.max() <= most + 1e-6


def test_a_pipeline_behind_a_row_of_one_stage_is_finished_and_passes_it() -> None:
    """Two V100 by data parallelism are ahead until weight gradients fill the pipeline's gaps."""
    pair = Pair(chain_graph(12, 1024, 2048), mixed_cluster()).pipelined()
    assert pair is not None
    uniform = min(
        (np.full(pair.num_blocks, number, np.int32) for number in range(pair.num_candidates)),
        key=lambda row: pair.score(row).preference,
    )
    pipelined = balanced(pair, numbers_of(pair, (0,), (1,)), 0.5)
    problem = Problem(
        evaluator=Evaluator(pair.graph, pair.cluster), budget=Budget(evaluations=400)
    )
    scorer = Scorer(problem, pair, 0)
    scorer.search(np.stack([uniform, pipelined]))
    best = scorer.best(10**6)
    assert next(row for row, whole in best if whole.finish == Finish()).tolist() == list(uniform)
    row, whole = best[0]
    assert whole.finish.schedule
    assert set(row) == set(pipelined)


def test_a_model_of_a_single_block_is_planned() -> None:
    """Nothing can be cut: there are no rows of two segments, stages or neighbouring blocks."""
    pair = Pair(chain_graph(1, 64), mixed_cluster())
    assert pair.num_blocks == 1
    assert rows_in_segments(pair, 10) == []
    known = default_methods()
    found = make_plan(pair.graph, pair.cluster, methods=["agent"], known=known, budget="100e")
    assert found.outcome == "ok"
    assert find_elites(pair, 20, np.random.default_rng(0)).rows.shape[1] == 1
    env = StrategyEnv([pair])
    env.reset(seed=0)
    _, _, done, _, info = env.step(int(np.flatnonzero(env.action_masks())[0]))
    assert done
    assert info["is_ok"]
