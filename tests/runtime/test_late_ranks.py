"""A rank that has made fewer steps than others is named, with the place where its loop stands."""

import io
import time
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from heterog.graph.grouping import group_ops
from heterog.runtime import lookout
from heterog.runtime.deploy import deploy
from heterog.runtime.step.alike import BatchShapes
from heterog.runtime.step.late_ranks import LateRanks
from heterog.search.plan import load_plan
from tests.runtime.cases import batch_of, captured_once, workload_of
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import SYNCS, graph_of, plan_of, strategy_of


class Job:
    """The ranks of a job in one process: which steps they begin, and what they say."""

    def __init__(self, num_ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.shapes = [BatchShapes(store, "job", rank, num_ranks) for rank in range(num_ranks)]
        self.ranks = [LateRanks(each, rank) for rank, each in enumerate(self.shapes)]
        self._capsys = capsys

    def begin(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].__enter__()
            self.shapes[rank].begin_step(())

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].__exit__()

    def looks(self, number: int = 10) -> list[str]:
        """What is printed while each rank looks so often."""
        for _ in range(number):
            for rank in self.ranks:
                rank.look()
        return self._capsys.readouterr().err.splitlines()


@pytest.fixture
def job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(lookout, "LOOK_S", 3600.0)  # looks are called here
    return Job(3, capsys)


def test_ranks_in_one_step_or_between_steps_say_nothing(job: Job) -> None:
    job.begin(0, 1, 2)
    assert job.looks(100) == []  # a slow step
    job.end(0, 1, 2)
    assert job.looks(100) == []  # all read data


def test_a_rank_that_does_not_come_is_named_once(job: Job) -> None:
    job.begin(0, 1, 2)
    job.end(0, 1, 2)
    job.begin(1, 2)
    assert job.looks(9) == []
    late, waits = job.looks(1)
    assert "rank 0 has not begun step 2" in late
    assert f"it is at {Path(__file__).name}:" in late
    assert "rank 1 waits in step 2 for rank 0, which has not begun it" in waits
    assert job.looks(1000) == []


def test_a_rank_that_was_only_slow_is_told_of_later_next_time(job: Job) -> None:
    for step, patience in enumerate((10, 20, 40)):
        job.begin(0)
        assert job.looks(patience - 1) == []
        said = job.looks(1)
        assert said[0].startswith(f"heterog: rank 0 waits in step {step + 1} for ranks 1 and 2,")
        assert len(said) == 3
        job.begin(1, 2)
        job.end(0, 1, 2)


TOLD = "rank 2 has not begun step 3, in which others wait for it"


def broken_off(rank: int, path: str) -> list[str]:
    """Rank 2 ends its loop a step early; what each rank has printed until it goes on."""
    said = io.StringIO()
    with mock.patch.object(lookout, "LOOK_S", 0.01), redirect_stderr(said):
        with captured_once("mlp"):
            step = deploy(workload_of("mlp"), load_plan(path))
        for number in range(3):
            if rank == 2 and number == 2:
                while TOLD not in said.getvalue():  # it writes its model, say
                    time.sleep(0.01)
            step(batch_of("mlp", number))
        step.close()
    return said.getvalue().splitlines()


@pytest.mark.distributed
def test_a_loop_that_one_rank_leaves_is_told_on_real_ranks(ranks: Ranks, tmp_path: Path) -> None:
    graph, path = graph_of("mlp"), tmp_path / "plan.json"
    plan_of(graph, strategy_of(graph, [SYNCS["ring"]] * group_ops(graph).num_groups)).save(path)
    *_, said = ranks.run(broken_off, str(path))
    assert any(TOLD in each and f"it is at {Path(__file__).name}:" in each for each in said)
