"""Candidate tables, observations, running memory, rewards and generated clusters."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pytest

from heterog.agents.policy import draw, rule_of_thumb
from heterog.cluster.topology import ROOFLINE, Cluster
from heterog.envs.candidates import MAX_CANDIDATES
from heterog.envs.clusters import ClusterRange, random_cluster
from heterog.envs.pair import CUT_WEIGHTS, MARGIN, Pair, RunningMemory, RunningStages, Score
from heterog.envs.reward import MISFIT, reward_of
from heterog.envs.toy import toy_cluster
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.engine import Order
from heterog.simulator.lower_bound import floor_s
from heterog.simulator.space import StepSettings
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Sync
from tests.envs.cases import (
    crowded_pair,
    language_graph,
    language_pair,
    mixed_cluster,
    pipelined_pair,
    toy_pair,
)
from tests.search.asking import run_methods


def test_every_candidate_is_legal_and_different() -> None:
    pair = language_pair()
    assert len(set(pair.table)) == len(pair.table) <= MAX_CANDIDATES
    assert all(sum(decision.shares) == pair.graph.batch_size for decision in pair.table)
    devices = {decision.devices for decision in pair.table}
    assert {(0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3), (0, 1, 2), (2, 3)} <= devices
    assert {decision.sync for decision in pair.table} == {
        Sync.RING, Sync.HIERARCHICAL, Sync.REDUCE_SCATTER_ALL_GATHER, Sync.PARAMETER_SERVER
    }  # fmt: skip
    # On one host hierarchical and reduce-scatter load the links as a ring does: left out.
    inside = [decision.sync for decision in pair.table if decision.devices == (0, 1)]
    assert set(inside) == {Sync.RING, Sync.PARAMETER_SERVER}


def test_solved_shares_shorten_the_slowest_device_and_mind_memory() -> None:
    graph, roomy = language_graph(), language_pair()
    everywhere = {d.shares for d in roomy.table if d.devices == (0, 1, 2, 3)}
    assert len(everywhere) == 3  # even, proportional, solved

    def slowest_s(shares: tuple[int, ...]) -> float:
        kinds = roomy.cluster.type_index
        return max(
            float(roomy.evaluator.prices.op_seconds(kinds[device], samples).sum())
            for device, samples in enumerate(shares)
        )

    solved = min(everywhere, key=slowest_s)
    assert max(solved) > 13.5
    # Room for the state and 13.5 samples on each device: the solved shares are others.
    memory = roomy.memory
    fixed = memory.state_bytes.sum() + memory.saved_bytes.sum() + memory.common_bytes
    per_sample = (
        memory.saved_bytes_per_sample.sum()
        + memory.inner_bytes_per_sample.max()
        + memory.input_bytes_per_sample
    )
    gib = float(fixed + 13.5 * per_sample) / 0.95 / 2**30
    tight = Pair(graph, mixed_cluster(memory_gib=gib))
    assert tight.memory.most_samples(0) == pytest.approx(13.5, rel=1e-3)
    assert solved not in {d.shares for d in tight.table}


def test_observation_holds_ratios_only() -> None:
    """Ten times faster devices and links, latencies a tenth: nothing changes but the unit.

    On the roofline, whose latencies a device type may state.
    """
    slow, fast = (
        Pair(
            language_graph(), replace(mixed_cluster(scale=scale), calibration=ROOFLINE)
        ).observation
        for scale in (1.0, 10.0)
    )
    for field in fields(slow):
        np.testing.assert_allclose(
            getattr(slow, field.name), getattr(fast, field.name), rtol=1e-4, atol=1e-4
        )


def test_observation_is_finite_and_edges_go_forward_and_back() -> None:
    seen = language_pair().observation
    for field in fields(seen):
        assert np.isfinite(getattr(seen, field.name)).all()
    edges = {tuple(edge) for edge in seen.edges.T.tolist()}
    assert (0, 1) in edges
    assert (1, 0) in edges  # a gradient flows back
    np.testing.assert_allclose(seen.shares.sum(axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.diag(seen.overlap), 1.0, rtol=1e-6)
    np.testing.assert_allclose(seen.overlap, seen.overlap.T)


def test_devices_divide_the_state_where_it_fills_them() -> None:
    pair = crowded_pair()
    assert {d.sync for d in pair.table if len(d.devices) > 1} == {
        Sync.ZERO1,
        Sync.PARAMETER_SERVER,
    }
    assert all(d.slices for d in pair.table if d.sync == Sync.ZERO1)
    # Adam: parameters and two moments of them; of the moments each of two devices holds a half.
    both = next(d for d in pair.table if len(d.devices) == 2 and d.sync == Sync.ZERO1)
    assert pair.memory.state_part(both) == pytest.approx((1 + 2 / 2) / (1 + 2), rel=1e-3)
    assert pair.memory.state_part(pair.table[0]) == 1.0
    assert language_pair().divided() is None


@pytest.mark.parametrize("make", [language_pair, crowded_pair])
def test_running_memory_is_near_the_simulated_peak(make: Callable[[], Pair]) -> None:
    pair, rng = make(), np.random.default_rng(0)
    rows = rng.integers(pair.num_candidates, size=(40, 1)).repeat(pair.num_blocks, axis=1)
    rows[20:, pair.num_blocks // 2 :] = rng.integers(pair.num_candidates, size=(20, 1))
    memory = RunningMemory(pair, len(rows))
    for block in range(pair.num_blocks):
        memory.add(rows[:, block].tolist())
    for row, used in zip(rows, memory.used, strict=True):
        choice = pair.space.encode(row.astype(np.int32), StepSettings(), step_barrier=True)
        evaluation = pair.evaluator.evaluate(choice, Order.RANK)
        peak = max(evaluation.peak_memory_bytes / pair.memory.usable_bytes)
        assert used.max() * MARGIN == pytest.approx(peak, rel=0.15)


def fits_by_hand(
    pair: Pair, rows: npt.NDArray[np.int32], recompute: bool
) -> tuple[list[npt.NDArray[np.bool_]], float]:
    """What the block after each of the rows' may take, and the least distance from a limit."""
    memory, fits, nearest = pair.memory, [], math.inf
    kept = memory.passed_bytes_per_sample if recompute else memory.saved_bytes_per_sample
    inner = (memory.inner_bytes_per_sample + memory.saved_bytes_per_sample - kept) / pair.num_micro
    counts, state = np.zeros((2, pair.num_candidates, pair.cluster.num_devices))
    for number, decision in enumerate(pair.table):
        counts[number, list(decision.devices)] = decision.shares
        state[number, list(decision.devices)] = memory.state_part(decision)
    holds = (counts > 0) | (state > 0)
    room = MARGIN * memory.usable_bytes
    for row in rows:
        both = [memory.gradient_bytes[:, None, None] * holds, kept[:, None, None] * counts]
        passing = inner[:, None, None] * counts + both[0]
        stays = memory.state_bytes[:, None, None] * state
        for block in range(len(row)):
            before = np.arange(block), row[:block]
            every = np.arange(pair.num_candidates)
            held = [each[before].sum(axis=0) + each[block, every] for each in (stays, *both)]
            peak = held[1] + held[2] if pair.num_micro > 1 else np.maximum(held[1], held[2])
            most = np.maximum(passing[before].max(axis=0, initial=0.0), passing[block, every])
            total = held[0] / room + peak / room + most / room
            total += memory.common_bytes / memory.usable_bytes
            worst = total.max(axis=1)
            left = (room * np.maximum(1.0 - total, 0.0)).sum(axis=1)
            rest = (memory.state_bytes + pair.graph.batch_size * kept)[block + 1 :].sum()
            fit = (worst <= 1.0) & (recompute or pair.observation.fits[block])
            roomy = fit & (left >= rest)
            nearest = min(
                nearest, np.abs(worst - 1.0).min(), np.abs(left / rest - 1).min() if rest else 1
            )
            fit = roomy if roomy.any() else fit
            fits.append(fit if fit.any() else worst <= worst.min() + 1e-6)
    return fits, nearest


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [language_pair, crowded_pair, pipelined_pair])
def test_what_fits_is_what_adds_up_on_each_device(
    make: Callable[[], Pair], recompute: bool
) -> None:
    pair, rng = make(), np.random.default_rng(0)
    rows = rng.integers(pair.num_candidates, size=(6, pair.num_blocks)).astype(np.int32)
    rows[3:] = rows[3:, :1]
    memory, found = RunningMemory(pair, len(rows), recompute=recompute), []
    for block in range(pair.num_blocks):
        found.append(memory.fits())
        memory.add(rows[:, block])
    expected, nearest = fits_by_hand(pair, rows, recompute)
    assert nearest > 1e-6  # nothing is so near a limit that rounding decides
    in_order = np.stack(expected).reshape(len(rows), pair.num_blocks, -1).swapaxes(0, 1)
    assert np.array_equal(np.stack(found), in_order)


def test_what_a_row_takes_at_least_is_known_without_a_simulation() -> None:
    pair, rng = language_pair(), np.random.default_rng(0)
    for row in rng.integers(pair.num_candidates, size=(20, pair.num_blocks)):
        row = row.astype(np.int32)
        choice = pair.space.encode(row, StepSettings(DEFAULT_BUCKET_BYTES), step_barrier=True)
        least = floor_s(pair.evaluator.prices, choice)
        assert 0.0 < least <= pair.score(row).step_time_s * (1 + 1e-9)


def test_a_pipelined_pair_differs_in_what_it_says_of_micro_batches_alone() -> None:
    pair, pipelined = language_pair(), pipelined_pair()
    before, after = pair.observation, pipelined.observation
    np.testing.assert_array_equal(before.blocks[:, :-1], after.blocks[:, :-1])
    assert (before.blocks[:, -1] == 0.0).all()
    assert (after.blocks[:, -1] > 0.0).all()
    np.testing.assert_array_equal(before.candidates, after.candidates)
    row = np.zeros(pair.num_blocks, np.int32)
    # Every micro-batch launches every kernel, and nothing is gained on one device.
    assert pair.table[0].devices == (0,)
    assert pipelined.score(row).step_time_s > pair.score(row).step_time_s
    assert language_pair().pipelined(10**6) is None


def test_a_cut_costs_what_crosses_it() -> None:
    pair = toy_pair()  # between layers: activations of 1,024 samples, and their gradients back
    crossing = 2 * 1024 * 512 * 4 / pair.observer.mean_rate
    np.testing.assert_allclose(pair.observer.cut_seconds, [crossing] * 3 + [0.0])

    pair = language_pair()
    tables = pair.evaluator.tables
    expected = np.zeros(pair.num_blocks)
    size = tables.value_bytes + pair.graph.batch_size * tables.value_bytes_per_unit
    for value, maker in enumerate(tables.value_op):
        readers = tables.slot_group[tables.slot_value == value]
        sides = [int(tables.op_group[maker]), *readers[readers >= 0].tolist()]
        for block in range(pair.num_blocks):
            if 0 <= min(sides) <= block < max(sides):  # counted once, whoever reads it
                expected[block] += size[value] * tables.value_moved_fraction[value]
    np.testing.assert_allclose(pair.observer.cut_seconds * pair.observer.mean_rate, expected)
    # Inside a layer the residual crosses beside what the layer works on.
    inner = expected[:-1]
    assert inner.min() > 0.0
    assert inner.max() > 1.9 * inner.min()


def test_stages_have_devices_of_their_own_and_are_balanced() -> None:
    pair = pipelined_pair()
    seconds, cuts = pair.observer.compute_seconds, pair.observer.cut_seconds
    devices_of = [decision.devices for decision in pair.table]
    num_stages: list[int] = []
    crossing = np.zeros(len(CUT_WEIGHTS))
    for number, row in enumerate(
        draw(rule_of_thumb(pair), pair, 60, np.random.default_rng(0)).rows
    ):
        weight = CUT_WEIGHTS[number % len(CUT_WEIGHTS)]
        runs = [
            (devices, list(blocks))
            for devices, blocks in groupby(
                range(pair.num_blocks), key=lambda block: devices_of[row[block]]
            )
        ]
        used = [device for devices, _ in runs for device in devices]
        assert len(set(used)) == len(used)
        compute = [sum(seconds[block, row[block]] for block in blocks) for _, blocks in runs]
        after = np.array([cuts[blocks[-1]] for _, blocks in runs])
        longest = max(compute + weight * after)
        # A stage is over when, wherever else it ended, it would be longer than the longest.
        for (devices, blocks), own in zip(runs[:-1], compute[:-1], strict=True):
            alike = [each == devices for each in devices_of]
            for end in range(blocks[-1] + 1, pair.num_blocks):
                own += seconds[end, alike].min()
                assert own + weight * cuts[end] > longest * (1 - 1e-6)
        num_stages.append(len(runs))
        crossing[number % len(CUT_WEIGHTS)] += after.sum() / max(len(runs) - 1, 1)
    assert max(num_stages) > 2
    assert crossing[0] > crossing[1] >= crossing[2]  # dear cuts are avoided


def test_a_pipeline_that_runs_out_of_devices_is_late() -> None:
    pair = pipelined_pair()
    stages = RunningStages(RunningMemory(pair, 2), pair, np.array([0.2, 50.0]), np.zeros(2))
    for block in range(pair.num_blocks):
        fits = stages.fits()
        assert fits.any(axis=1).all()
        stages.add(np.array([fits[row].argmax() for row in range(2)]))
        assert block > 0 or fits[1].all()
    assert stages.is_late.tolist() == [True, False]


def test_draws_stay_within_memory_where_replicas_do_not_fit() -> None:
    graph = language_graph()
    whole = language_pair().memory
    need = whole.state_bytes.sum() + graph.batch_size * whole.saved_bytes_per_sample.sum()
    pair = Pair(graph, mixed_cluster(memory_gib=float(0.5 * need) / 2**30))
    uniform = [pair.score(np.full(pair.num_blocks, n)) for n in range(4)]
    assert all(score.overflow > 0 for score in uniform)  # no device holds the model
    rows = draw(rule_of_thumb(pair), pair, 32, np.random.default_rng(0)).rows
    overflow = np.array([pair.score(row).overflow for row in rows])
    assert (overflow == 0.0).any()
    assert overflow.max() < 0.12  # the estimate is off by a few percent


def test_reward_is_the_log_of_the_speedup_and_grades_overrun() -> None:
    pair = language_pair()
    base = pair.baseline_s

    def reward(factor: float, overflow: float = 0.0) -> float:
        return reward_of(pair, Score(step_time_s=factor * base, overflow=overflow)).reward

    for factor in (0.01, 0.2, 1.0, 2.0, math.e):
        assert reward(factor) == pytest.approx(-math.log(factor))
    assert reward(0.01, 1.0) == pytest.approx(MISFIT - math.log(2))
    assert reward(1.0, 100.0) == pytest.approx(MISFIT - 1.0)
    slow = [reward(factor) for factor in (2.7, 2.72, 3.0, 10.0, 1000.0)]
    assert slow == sorted(slow, reverse=True)  # the faster has more, however slow both are
    assert slow[-1] > MISFIT > reward(0.01, 0.001)  # what fits has more than what does not


def test_a_judged_pair_scores_op_by_op() -> None:
    """Coarse times miss the overlap inside a block, so that the two differ, but not by much."""
    pair = toy_pair()
    rows = np.random.default_rng(0).integers(pair.num_candidates, size=(30, pair.num_blocks))
    both = pair, pair.judged()
    times = np.array([[each.score(row).step_time_s for row in rows] for each in both])
    assert not np.allclose(*times)
    assert np.corrcoef(*np.log(times))[0, 1] > 0.98
    everywhere = max(range(pair.num_candidates), key=lambda c: len(pair.table[c].devices))
    uniform = pair.judged().score(np.full(pair.num_blocks, everywhere)).step_time_s
    assert uniform >= pair.baseline_s * (1 - 1e-9)  # that is one of the baselines


def test_baseline_is_the_best_data_parallel_plan() -> None:
    from heterog.methods.planner import Budget
    from heterog.simulator.evaluator import Evaluator

    pair = language_pair()
    names = ["ev_ps", "ev_ar", "cp_ps", "cp_ar", "ddp"]
    rows = run_methods(Evaluator(pair.graph, pair.cluster), names, budget=Budget(evaluations=1))
    best = min(row.step_time_s for row in rows if row.step_time_s is not None)
    assert pair.baseline_s == pytest.approx(best, rel=0.05)  # the referee's links share


def test_generated_clusters_are_varied_and_the_same_for_a_seed() -> None:
    graph = language_graph()
    drawn = [random_cluster(np.random.default_rng(seed), graph) for seed in range(60)]
    again = random_cluster(np.random.default_rng(7), graph)
    assert again.fingerprint == drawn[7].fingerprint
    sizes = [cluster.num_devices for cluster in drawn]
    assert min(sizes) >= 2
    assert max(sizes) <= 32
    assert len(set(sizes)) > 10
    assert sum(len(cluster.device_types) > 1 for cluster in drawn) > 25
    few = random_cluster(np.random.default_rng(1), graph, ClusterRange(max_devices=3))
    assert few.num_devices <= 3


def test_a_graph_without_any_conversion_is_merged() -> None:
    """One op and its gradient, nothing of which another group reads."""
    pair = Pair(smallest_graph(), toy_cluster())
    row = np.zeros(pair.num_blocks, np.int32)
    assert pair.score(row).step_time_s > 0.0


@pytest.mark.parametrize("name", ["paper_8gpu", "hap_v100_p100_16", "homogeneous_8xa100"])
def test_links_are_those_of_every_pair_of_devices_one_by_one(name: str) -> None:
    cluster = Cluster.load(name)
    first, *rest = cluster.hosts
    slow = replace(first, nic_latency_s=3e-4, nic_line_rate_bytes_per_s=1e8)
    cluster = replace(cluster, hosts=(slow, *rest))
    pair = Pair(smallest_graph(), cluster)
    observer = pair.observer
    size = pair.memory.gradient_bytes.sum()
    for source in range(cluster.num_devices):
        for target in range(cluster.num_devices):
            expected = [0.0, 0.0, 0.0]
            if source != target:
                seconds = size / cluster.bottleneck_bytes_per_s(source, target)
                latency = cluster.latency_s(source, target) * observer.num_blocks
                ratios = np.array([seconds, latency]) / observer.bound_s
                expected[:2] = 0.5 * np.log(np.clip(ratios, 5e-5, 2e4))
                expected[2] = float(cluster.host_of[source] == cluster.host_of[target])
            assert pair.observation.links[source, target] == pytest.approx(expected, rel=1e-5)
