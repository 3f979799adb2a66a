"""The coarse evaluator against the real one."""

import numpy as np
import pytest

from heterog.envs.merging import merge_tables
from heterog.envs.pair import Pair
from heterog.graph.grouping import cut_blocks
from heterog.lowering.tables import graph_tables
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import StepSettings, StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES
from tests.envs.cases import language_graph, language_pair, mixed_cluster


def random_rows(num_rows: int, seed: int = 0) -> list[np.ndarray]:
    """Rows of one to three segments."""
    pair, rng = language_pair(), np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        row = np.full(pair.num_blocks, rng.integers(pair.num_candidates), np.int32)
        for cut in rng.integers(pair.num_blocks, size=rng.integers(3)):
            row[cut:] = rng.integers(pair.num_candidates)
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def both() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(fine seconds, coarse seconds, fine peak, coarse peak) of 150 rows."""
    pair = language_pair()
    fine = Evaluator(pair.graph, pair.cluster)
    space = StrategySpace(
        pair.graph, pair.cluster, fine.rules, fine.channels, pair.space.speeds, pair.table
    )
    seconds, peaks = [], []
    for row in random_rows(150):
        for evaluator, encoder, each in (
            (fine, space, pair.groups(row)),
            (pair.evaluator, pair.space, row),
        ):
            choice = encoder.encode(each, StepSettings(DEFAULT_BUCKET_BYTES), step_barrier=True)
            second, peak = evaluator.simulate(choice, Order.RANK)
            seconds.append(second)
            peaks.append(peak.max())
    return (
        np.array(seconds[::2]),
        np.array(seconds[1::2]),
        np.array(peaks[::2]),
        np.array(peaks[1::2]),
    )


def test_coarse_seconds_rank_as_the_fine_ones(both: tuple[np.ndarray, ...]) -> None:
    from scipy.stats import spearmanr  # takes a second, and whatever is collected is imported

    fine, coarse = both[:2]
    assert spearmanr(fine, coarse).statistic > 0.98
    best = np.argsort(fine)[:50]
    assert spearmanr(fine[best], coarse[best]).statistic > 0.9
    assert 0.97 < np.median(coarse / fine) < 1.05


def test_coarse_memory_is_near_the_fine_one(both: tuple[np.ndarray, ...]) -> None:
    ratio = both[3] / both[2]
    assert 0.97 < np.median(ratio) < 1.05
    assert 0.9 < ratio.min()
    assert ratio.max() < 1.15


def test_one_device_takes_exactly_as_long() -> None:
    pair = language_pair()
    fine = Evaluator(pair.graph, pair.cluster)
    space = StrategySpace(
        pair.graph, pair.cluster, fine.rules, fine.channels, pair.space.speeds, pair.table
    )
    for candidate in range(pair.cluster.num_devices):
        row = np.full(pair.num_blocks, candidate, np.int32)
        choice = space.encode(pair.groups(row), StepSettings(), step_barrier=True)
        exact = fine.evaluate(choice, Order.RANK).step_time_s
        assert pair.score(row).step_time_s == pytest.approx(exact, rel=1e-9)


def test_micro_batches_of_different_sizes_all_take_time() -> None:
    pair = Pair(language_graph(), mixed_cluster())  # nothing has been priced yet
    fine = Evaluator(pair.graph, pair.cluster)
    num_micro = 5  # of ten samples and of nine
    row = np.zeros(pair.num_blocks, np.int32)
    space = StrategySpace(
        pair.graph, pair.cluster, fine.rules, fine.channels, pair.space.speeds, pair.table
    )
    choice = space.encode(
        pair.groups(row),
        StepSettings(micro_batches=space.micro_batches(num_micro)),
        step_barrier=True,
    )
    assert len(np.unique(choice.shares[0, :, 0])) > 1
    exact = fine.evaluate(choice, Order.RANK).step_time_s
    # Gradients that were merged are added up in one go.
    cut = pair.pipelined(num_micro)
    assert cut is not None
    assert cut.score(row).step_time_s == pytest.approx(exact, rel=0.1)


def test_merging_keeps_sums_and_order() -> None:
    graph = language_graph()
    fine, merged = graph_tables(graph), merge_tables(graph)
    coarse = merged.tables
    assert coarse.parameter_bytes.sum() == fine.parameter_bytes.sum()
    assert len(coarse.op_id) < 0.5 * len(fine.op_id)
    # Producers come first: every coarse op reads only from earlier ones.
    reader = np.repeat(np.arange(len(coarse.op_id)), np.diff(coarse.read_start))
    assert (coarse.value_op[coarse.read_value] < reader).all()
    # An op is in the run of its own block.
    block = np.append(merged.block_of, -1)[fine.op_group]
    assert (coarse.op_group[merged.run_of] == block).all()


def test_blocks_are_ranges_of_groups_and_heavy_ones_stay_alone() -> None:
    work, state = np.ones(40), np.ones(40)
    work[3] = 100.0
    blocks = cut_blocks(work, state, most=6)
    assert sorted(set(blocks)) == list(range(6))
    assert (np.diff(blocks) >= 0).all()
    assert (blocks == blocks[3]).sum() == 1
    assert (cut_blocks(work, state, most=10_000) == np.arange(40)).all()
