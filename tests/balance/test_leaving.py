"""A rank that leaves its loop alone: the others learn it instead of waiting for it."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from heterog.balance import BalanceError, Balancer, leaving
from heterog.balance.group import RankGroup
from heterog.balance.replicas import SameDeals
from heterog.balance.sampler import ShareSampler
from tests.balance.test_same_deals import data, sampler
from tests.balance.test_updates import net, numbers
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.distributed
LEFT_IN = 5


def loop(rank: int, leaves: set[int]) -> tuple[Balancer, str]:
    """Three passes of nine steps, the first of which some ranks leave; and the error, if any."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = Balancer(model, global_batch_size=4, shares=[3, 1], interval=0)
    loader, is_first = balancer.loader(numbers()), True
    try:
        for _ in range(3):
            for step, (inputs, kinds) in enumerate(loader):
                loss = functional.cross_entropy(model(inputs), kinds)
                optimizer.zero_grad()
                torch.autograd.backward(balancer.weigh(loss))
                balancer.average_gradients()
                optimizer.step()
                if is_first and step == LEFT_IN and rank in leaves:
                    break
            is_first = False
            if rank == 1 and leaves == {1}:
                return balancer, ""
    except BalanceError as error:
        return balancer, str(error)
    return balancer, ""


def leaves_alone(rank: int) -> tuple[str, str]:
    """What is said of the wait, and the error after it."""
    store = dist.distributed_c10d._get_default_store()
    said = f"said{rank}"

    def end(_: int, told: str) -> None:
        store.set(said, told)

    with mock.patch.multiple(leaving, LOOK_S=0.02, end_process=end):
        balancer, error = loop(rank, {1})
        if rank == 1:
            assert "left its loop" in store.get("said0").decode()
            balancer.average_gradients()  # which rank 0 waits for
            return "", error
        return store.get(said).decode(), error


def test_a_rank_that_waits_for_one_that_left_says_so(two_ranks: Ranks) -> None:
    (said, error), (_, none) = two_ranks.run(leaves_alone)
    assert said.startswith(f"rank 1 left its loop in step {LEFT_IN} of epoch 0 (test_leaving.py:")
    assert "rank 0 went on" in said
    assert error == said
    assert none == ""


def leaves_with_all(rank: int) -> str:
    with mock.patch.object(leaving, "LOOK_S", 0.001):
        balancer, error = loop(rank, {0, 1})
    balancer._leaving.look()
    balancer._leaving.look()
    return error


def test_ranks_that_leave_alike_go_on(two_ranks: Ranks) -> None:
    assert two_ranks.run(leaves_with_all) == ["", ""]


def test_the_end_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("os._exit", side_effect=SystemExit) as exited, pytest.raises(SystemExit):
        leaving.end_process(0, "rank 1 left")
    assert capsys.readouterr().err == "heterog: rank 0: rank 1 left\n"
    exited.assert_called_once_with(2)


class AtAnotherPlace(RankGroup):
    """A group whose second rank is one step ahead."""

    def gather(self, numbers: list[float]) -> list[list[float]]:  # type: ignore[override]
        return [list(numbers), [numbers[0], numbers[1] + 1, *numbers[2:]]]


def test_ranks_in_unlike_steps_are_told_where_they_are() -> None:
    dealt: ShareSampler = sampler(data())
    with pytest.raises(BalanceError, match="rank 1 is in step 1 of epoch 0, rank 0 in step 0 of"):
        SameDeals(AtAnotherPlace()).check(dealt, dealt.deal(0))
