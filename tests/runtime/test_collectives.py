"""Communication that nobody waits for does not disturb any other."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from heterog.runtime.rank import is_of_another
from heterog.runtime.step.collectives import Communicator, group_limit
from tests.runtime.ranks import Ranks

SIZE = 1 << 18
NUM_ROUNDS = 20


def forget_what_comes(rank: int) -> list[float]:
    """What rank 0 receives from rank 1 beside messages that it has let go of unread."""
    communicator = Communicator(rank, [(0, 1)])
    arrived = []
    for number in range(NUM_ROUNDS):
        like = torch.full((SIZE,), float(number))
        if rank == 0:
            communicator.receive(torch.zeros_like(like), 1, tag=3 * number)  # and forget it
            communicator.all_gather(like, (0, 1), [SIZE] * 2, lambda parts: parts[1])
            kept = communicator.receive(torch.zeros_like(like), 1, tag=3 * number + 1)
            arrived.append(float(kept.wait().mean()))
        elif rank == 1:
            time.sleep(0.01)
            communicator.send(like, 0, tag=3 * number)
            communicator.all_gather(like, (0, 1), [SIZE] * 2, lambda parts: parts[1])
            communicator.send(like, 0, tag=3 * number + 1)
        communicator.flush()
    return arrived


@pytest.mark.distributed
def test_a_receive_that_nobody_reads_is_held_until_it_is_done(two_ranks: Ranks) -> None:
    arrived = two_ranks.run(forget_what_comes)[0]
    assert arrived == [float(number) for number in range(NUM_ROUNDS)]


def exchange_before_waiting(rank: int) -> list[list[float]]:
    """What three ranks get of exchanges that are all under way when the first is waited for."""
    everyone = (0, 1, 2)
    communicator = Communicator(rank, [everyone])
    under_way = []
    for number, size in enumerate((SIZE, 7, 2 * SIZE, 1, SIZE)):
        own = torch.full((size,), float(10 * number + rank))
        under_way.append(communicator.all_gather(own, everyone, [size] * 3, torch.stack))
    summed = communicator.reduce_scatter(
        torch.arange(3.0).repeat_interleave(SIZE), everyone, [SIZE] * 3
    )
    found = [each.wait().mean(1).tolist() for each in reversed(under_way)]
    communicator.flush()
    return [*found, [float(summed.wait().mean())]]


@pytest.mark.distributed
def test_exchanges_in_turns_do_not_mix(ranks: Ranks) -> None:
    for rank, (*gathered, summed) in enumerate(ranks.run(exchange_before_waiting)):
        assert summed == [3.0 * rank]
        for number, found in zip((4, 3, 2, 1, 0), gathered, strict=True):
            assert found == [10.0 * number + each for each in range(3)]


def sum_without_the_other(rank: int, has_ended: Path) -> tuple[str, bool]:
    """What rank 0 is told if rank 1 stays away from a collective of both until it was told."""
    usual = group_limit()
    _set_pg_timeout(timedelta(seconds=0.5))  # that of the job
    try:
        communicator = Communicator(rank, [(0, 1)])
    finally:
        _set_pg_timeout(usual)
    if rank == 1:
        end_s = time.monotonic() + usual.total_seconds() / 10
        while not has_ended.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        return "", False
    try:
        communicator.all_reduce(torch.ones(3), (0, 1)).wait()
    except RuntimeError as error:
        has_ended.touch()
        return str(error), is_of_another(error)
    return "", False


@pytest.mark.distributed
def test_a_group_waits_no_longer_than_the_job(two_ranks: Ranks, tmp_path: Path) -> None:
    told, is_of_the_other = two_ranks.run(sum_without_the_other, tmp_path / "ended")[0]
    assert "Timed out waiting 500ms" in told
    assert is_of_the_other
