"""A rank that leaves its loop alone: the others say so instead of waiting in silence."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from heterog.balance import BalanceError, Balancer, leaving
from heterog.balance.group import RankGroup
from heterog.balance.leaving import Leaving
from heterog.balance.replicas import SameDeals
from heterog.balance.sampler import ShareSampler
from heterog.runtime import lookout
from tests.balance.test_same_deals import data, sampler
from tests.balance.test_updates import net, numbers
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.distributed
LEFT_IN = 5


class Ears:
    """What a rank prints to its standard error, in the store of the ranks."""

    def __init__(self) -> None:
        self.heard = ""

    def write(self, text: str) -> None:
        self.heard += text
        if text == "\n":
            dist.distributed_c10d._get_default_store().set("heard", self.heard)

    def flush(self) -> None:
        """As of a file."""


def leave_in_first_pass(rank: int, leaves: set[int], num_passes: int) -> str:
    """Passes of nine steps, the first of which some ranks leave; and what was printed."""
    model, ears = net(), Ears()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = Balancer(model, global_batch_size=4, shares=[3, 1], interval=0)
    loader = balancer.loader(numbers())
    with mock.patch.object(lookout, "LOOK_S", 0.01), mock.patch("sys.stderr", ears):
        for number in range(num_passes):
            for step, (inputs, kinds) in enumerate(loader):
                loss = functional.cross_entropy(model(inputs), kinds)
                optimizer.zero_grad()
                torch.autograd.backward(balancer.weigh(loss))
                balancer.average_gradients()
                optimizer.step()
                if ears.heard or (number == 0 and step == LEFT_IN and rank in leaves):
                    break
    if rank == 1 and leaves == {1}:
        assert dist.distributed_c10d._get_default_store().get("heard")  # waits for it
        balancer.average_gradients()  # which rank 0 waits for
    return ears.heard


def test_a_rank_that_waits_for_one_that_left_says_so_once_and_goes_on(two_ranks: Ranks) -> None:
    said, none = two_ranks.run(leave_in_first_pass, {1}, 1)
    begin = f"heterog: rank 1 left its loop in step {LEFT_IN} of epoch 0 (test_leaving.py:"
    assert said.startswith(begin)
    assert f"rank 0 stands in step {LEFT_IN + 1} since" in said
    assert said.count("\n") == 1
    assert none == ""


def test_ranks_that_leave_alike_print_nothing(two_ranks: Ranks) -> None:
    assert two_ranks.run(leave_in_first_pass, {0, 1}, 3) == ["", ""]


class Loop:
    """The loop of one of two ranks in this process, as its loader and balancer note it."""

    def __init__(self, rank: int) -> None:
        self.leaving = Leaving(SimpleNamespace(rank=rank, num_ranks=2))  # type: ignore[arg-type]
        self.leaving._key = "left"
        self.sampler: ShareSampler = sampler(data())
        self.begin()

    def begin(self) -> None:
        self.sampler.begin_pass()
        self.leaving.begin_pass(self.sampler)

    def step_to(self, step: int) -> "Loop":
        """Run steps up to this one, and get its batch."""
        for each in range(step + 1):
            if each:
                self.weigh(each - 1)
                self.leaving.end_step(self.sampler)
            self.sampler.begin_step(self.sampler.deal(each))
        return self

    def weigh(self, step: int) -> "Loop":
        self.leaving.train(self.sampler, step)
        return self

    def leave(self) -> None:
        self.leaving.end_pass(self.sampler)

    def stand(self) -> None:
        """Do not move, longer than it takes to look at the others."""
        frames = {threading.get_ident(): sys._getframe()}
        with mock.patch("sys._current_frames", return_value=frames):
            for _ in range(2 * lookout.NUM_LOOKS):
                self.leaving.look()


@pytest.fixture
def loops() -> Iterator[tuple[Loop, Loop]]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with (
        mock.patch.multiple(leaving, _store=lambda: store, Lookout=mock.MagicMock()),
        mock.patch("torch.distributed.is_initialized", return_value=True),
    ):
        yield Loop(0), Loop(1)


Printed = pytest.CaptureFixture[str]


def test_a_rank_that_left_before_its_loss_is_waited_for_in_the_same_step(
    loops: tuple[Loop, Loop], capsys: Printed
) -> None:
    waits, leaves = loops
    leaves.step_to(2).leave()  # its data raises an error, say
    waits.step_to(2).weigh(2).stand()
    assert "rank 1 left its loop in step 2 of epoch 0" in capsys.readouterr().err
    waits.stand()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_weighed", [False, True])
def test_a_rank_that_leaves_where_others_are_is_not_waited_for(
    loops: tuple[Loop, Loop], capsys: Printed, is_weighed: bool
) -> None:
    """All of them are about to leave there; one saves its model before it does."""
    with mock.patch.object(leaving, "_TORCH", Path(__file__).parent):
        for loop in loops:
            loop.step_to(2)
            if is_weighed:
                loop.weigh(2)
        loops[1].leave()
        loops[0].stand()
    assert capsys.readouterr().err == ""


def test_an_iterator_that_stays_alive_does_not_hold_its_pass_open(
    loops: tuple[Loop, Loop], capsys: Printed
) -> None:
    for loop in loops:
        loop.step_to(2).weigh(2)
        loop.begin()  # another pass; the end of the first is never noted
        loop.step_to(0).weigh(0)
    loops[1].leave()
    loops[0].stand()
    assert capsys.readouterr().err == ""


def test_a_rank_that_got_out_of_its_wait_does_not_wait(
    loops: tuple[Loop, Loop], capsys: Printed
) -> None:
    waits, leaves = loops
    leaves.step_to(1).leave()
    waits.step_to(1).weigh(1)
    try:
        raise RuntimeError("the other rank has closed its connection")
    except RuntimeError:
        waits.stand()  # saves its model, while a traceback holds the iterator
    waits.leave()
    waits.stand()
    assert capsys.readouterr().err == ""


def test_a_rank_between_steps_waits_only_within_a_call_of_torch(
    loops: tuple[Loop, Loop], capsys: Printed
) -> None:
    waits, leaves = loops
    leaves.step_to(1).weigh(1).leave()
    waits.step_to(2).stand()  # it shows one more batch, say
    assert capsys.readouterr().err == ""
    with mock.patch.object(leaving, "_TORCH", Path(__file__).parent):
        waits.stand()  # exchanges buffers in a forward pass
    assert "rank 1 left its loop in step 1" in capsys.readouterr().err


def test_the_first_rank_that_leaves_is_named(loops: tuple[Loop, Loop], capsys: Printed) -> None:
    waits, leaves = loops
    follows = Loop(2)
    leaves.step_to(1).leave()
    follows.step_to(1).weigh(1).leave()  # its wait for the other was an error
    waits.step_to(1).weigh(1).stand()
    assert "rank 1 left" in capsys.readouterr().err


def test_a_store_that_may_be_gone_is_not_asked_while_a_loop_moves_or_after_it(
    loops: tuple[Loop, Loop],
) -> None:
    loop, _ = loops
    with mock.patch.object(leaving, "_store", side_effect=AssertionError):
        for step in range(3):
            loop.step_to(step).weigh(step).leaving.look()
        loop.sampler.set_epoch(1)  # after the last step
        loop.leave()
        loop.stand()


def test_loops_whose_end_is_not_known_are_not_watched(loops: tuple[Loop, Loop]) -> None:
    """Those of a ``BalancedTrainer``, which fetches batches itself."""
    loop, _ = loops
    loop.leave()
    loop.leaving.begin_pass(None)
    loop.step_to(1).weigh(1)
    assert loop.leaving._at is None
    assert loop.leaving._lookout is None


def test_a_sampler_is_not_kept() -> None:
    watched, dealt = Leaving(RankGroup()), sampler(data())
    watched.begin_pass(dealt)
    known: Callable[[], object] = ref(dealt)
    del dealt
    assert known() is None


class AtAnotherPlace(RankGroup):
    """A group whose second rank is one step ahead."""

    def gather(self, numbers: list[float]) -> list[list[float]]:  # type: ignore[override]
        return [list(numbers), [numbers[0], numbers[1] + 1, *numbers[2:]]]


def test_ranks_in_unlike_steps_are_told_where_they_are() -> None:
    dealt: ShareSampler = sampler(data())
    with pytest.raises(BalanceError, match="rank 1 is in step 1 of epoch 0, rank 0 in step 0 of"):
        SameDeals(AtAnotherPlace()).check(dealt, dealt.deal(0))
