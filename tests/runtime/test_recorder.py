"""Times of several ranks are told from one origin."""

import pytest

from heterog.runtime.step.recorder import TaskTimes, gather_task_times
from tests.runtime.ranks import Ranks


def record_from_own_origin(rank: int) -> list[list[float]]:
    """Start and finish of two tasks, one on each rank, whose recorder was made three seconds later
    on the second rank."""
    times = TaskTimes({})
    times.origin = 100.0 + 3.0 * rank
    times.start[rank], times.finish[rank] = 1.0, 2.0
    start, finish = gather_task_times(times, 2)
    return [start.tolist(), finish.tolist()]


@pytest.mark.distributed
def test_ranks_of_one_machine_have_one_clock(two_ranks: Ranks) -> None:
    for found in two_ranks.run(record_from_own_origin):
        assert found == [[1.0, 4.0], [2.0, 5.0]]
