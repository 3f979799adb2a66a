"""Ranks with unequal shares train like one process with the whole batch."""

import numpy as np
import pytest
import torch

from heterog.balance.group import RankGroup
from heterog.balance.weights import StepWeights
from tests.balance.loops import Loop, alone, on_ranks
from tests.runtime.ranks import Ranks
from tests.thorough import one_in

EXACT = 1e-9
WRAPPERS = ("ddp", "fsdp", "none")
UNEVEN = (5, 2, 0)  # 40 samples in batches of 7: the last has 5
pytestmark = pytest.mark.distributed


def assert_like_one_process(ranks: Ranks, loop: Loop) -> None:
    weights, losses, norms = alone(loop)
    for found_weights, found_losses, found_norms in ranks.run(on_ranks, loop):
        np.testing.assert_allclose(found_losses, losses, rtol=EXACT)
        np.testing.assert_allclose(found_norms, norms, rtol=EXACT)
        np.testing.assert_allclose(found_weights, weights, rtol=EXACT, atol=EXACT)


@one_in(3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize("shares", [UNEVEN, (3, 3, 3), (1, 1, 5), (0, 0, 4)], ids=str)
def test_uneven_shares(ranks: Ranks, wrapper: str, tokens: bool, shares: tuple[int, ...]) -> None:
    assert_like_one_process(ranks, Loop(wrapper=wrapper, shares=shares, tokens=tokens))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
def test_clipping_sees_the_norm_of_one_process(ranks: Ranks, wrapper: str, tokens: bool) -> None:
    loop = Loop(wrapper=wrapper, shares=UNEVEN, tokens=tokens, clip=0.1)
    assert_like_one_process(ranks, loop)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_accumulation(ranks: Ranks, wrapper: str) -> None:
    loop = Loop(wrapper=wrapper, shares=UNEVEN, num_samples=42, accumulate=3, clip=0.5)
    assert_like_one_process(ranks, loop)


@pytest.mark.parametrize("wrapper", ["ddp", "none"])
def test_a_scaler_skips_an_infinite_step_on_all_ranks(ranks: Ranks, wrapper: str) -> None:
    assert_like_one_process(ranks, Loop(wrapper=wrapper, shares=(4, 2, 1), scaler=True))


@one_in(3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize("fits", [(2, 2, 2), (None, 1, 3), (1, None, None)], ids=str)
def test_micro_batches(
    ranks: Ranks, wrapper: str, tokens: bool, fits: tuple[int | None, ...]
) -> None:
    loop = Loop(wrapper=wrapper, shares=(5, 2, 0), tokens=tokens, fits=fits, clip=0.3)
    assert_like_one_process(ranks, loop)


def test_an_update_of_losses_that_were_not_weighed_is_an_error(ranks: Ranks) -> None:
    """DDP alone averages means of unequal sizes."""
    loop = Loop(wrapper="ddp", shares=(5, 2, 0), weigh=False)
    with pytest.raises(AssertionError, match=r"BalanceError: .*no loss was weighed"):
        ranks.run(on_ranks, loop)


def test_each_update_needs_a_loss_that_was_weighed() -> None:
    weights = StepWeights(RankGroup())

    def update() -> None:
        assert weights.may_update
        weights.end_update()

    weights.begin_batch((5, 2))
    assert not weights.may_update
    weights.num_trained += 1
    update()
    update()  # of a second optimizer
    weights.begin_batch((5, 2))
    assert not weights.may_update
    weights.num_trained += 1
    weights.begin_batch((5, 2))  # a loop that steps when it has the next batch
    update()
    weights.num_trained += 1
    weights.begin_batch((5, 2))
    update()
    weights.begin_batch((3, 3))  # what is not weighed counts alike, and ranks have as much
    update()


def test_a_count_is_that_of_its_loss_alone() -> None:
    weights = StepWeights(RankGroup())
    weights.begin_batch((6, 2))  # of one process, whose rank is 0
    loss = torch.ones(())
    counted = torch.tensor(1.0), torch.tensor(4.0)
    found = [float(weights.weigh(loss, each)) for each in (counted, None)]
    assert found == [1 / 4, 6 / 8]
