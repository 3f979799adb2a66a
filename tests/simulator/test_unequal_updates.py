"""Golden values of Adaptive SGD and Hogbatch, as recomputed by event simulations of the papers."""

from collections.abc import Sequence

import pytest

from heterog.simulator.unequal_updates import (
    MERGE_BOOST,
    ElasticRule,
    MegaBatch,
    dispatch_order,
    is_worth_adding,
    merge_weights,
)
from heterog.strategy.division import split_in_proportion

SPEEDS = (1000.0, 500.0)
SWINGING = ElasticRule(dead_band=0.0)


def dispatched(
    speeds: Sequence[float], batches: Sequence[int], mega_batch: int
) -> tuple[tuple[int, ...], float]:
    """Updates of each worker, and seconds, if the next batch goes to the first free worker.

    Args:
        speeds: Samples per second of each worker.
        batches: Number of samples of a batch of each worker.
        mega_batch: Number of samples to hand out; the last batch is whole.
    """
    seconds = [batch / speed for batch, speed in zip(batches, speeds, strict=True)]
    order = dispatch_order(seconds, batches, mega_batch)
    updates = tuple(order.count(worker) for worker in range(len(batches)))
    return updates, max(number * each for number, each in zip(updates, seconds, strict=True))


def elastic_schedule(
    speeds: Sequence[float],
    batch: int,
    mega_batch: int,
    num_rounds: int,
    rule: ElasticRule,
) -> list[MegaBatch]:
    """Elastic batches round after round, where a batch of b takes b/v seconds."""
    batches, rounds = (batch,) * len(speeds), []
    for _ in range(num_rounds):
        updates, seconds = dispatched(speeds, batches, mega_batch)
        weights = merge_weights(updates, boost=MERGE_BOOST)
        rounds.append(
            MegaBatch(batches=batches, updates=updates, weights=weights, seconds=seconds)
        )
        batches = rule.next_batches(batches, updates)
    return rounds


def test_the_table_of_adaptive_sgd() -> None:
    rounds = elastic_schedule(SPEEDS, 512, 20_000, 9, SWINGING)
    for number, batches, updates, weights, seconds in (
        (1, (512, 512), (26, 14), (0.715, 0.315), 14.336),
        (2, (544, 480), (25, 14), (0.7051, 0.3231), 13.6),
        (6, (672, 352), (20, 19), (0.5641, 0.4385), 13.44),
        (7, (704, 320), (19, 21), (0.4275, 0.5775), 13.44),
    ):
        found = rounds[number - 1]
        assert (found.batches, found.updates) == (batches, updates)
        assert found.weights == pytest.approx(weights, abs=1e-4)
        assert found.seconds == pytest.approx(seconds, abs=1e-3)
    assert [each.batches for each in rounds[7:]] == [each.batches for each in rounds[5:7]]


def test_a_dead_band_ends_the_swing() -> None:
    rounds = elastic_schedule(SPEEDS, 512, 20_000, 9, ElasticRule())
    assert all(each.batches == (672, 352) for each in rounds[5:])


def test_equal_speeds_never_change() -> None:
    rounds = elastic_schedule((700.0, 700.0), 512, 20_480, 5, SWINGING)
    assert {each.batches for each in rounds} == {(512, 512)}


def test_weights_add_up_to_one_but_for_the_boost() -> None:
    plain = merge_weights((26, 14, 3))
    boosted = merge_weights((26, 14, 3), boost=MERGE_BOOST)
    assert sum(plain) == pytest.approx(1.0)
    assert sum(boosted) == pytest.approx(1.0 + 0.1 * (max(plain) - min(plain)))


def test_one_more_device_pays_below_its_part_of_the_work() -> None:
    assert is_worth_adding(0.25, 1.0, 0.19)
    assert not is_worth_adding(0.25, 1.0, 0.21)


def test_ravnest_shares_follow_the_largest_remainder() -> None:
    assert split_in_proportion(100, (8, 8, 16, 4)) == (22, 22, 45, 11)
