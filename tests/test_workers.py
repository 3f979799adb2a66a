"""Jobs give the same results here, in processes and on a Ray cluster of two workers."""

import importlib
import importlib.util
import json
import operator
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from heterog.agents.config import Algorithm, PolicyConfig, TrainingConfig
from heterog.agents.sources import PairSource
from heterog.agents.training import Trainer, TrainingResult
from heterog.cli import app, main
from heterog.errors import HeterogError
from heterog.workers import HERE, Processes, Workers, open_seats, open_workers
from tests.envs.cases import language_graph, mixed_cluster
from tests.jobs import die, refuse_name, remember, who
from tests.thorough import THOROUGH


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of two workers that only this machine can reach."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; pip install heterog[ray]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else one is kept in the home
        ray: Any = importlib.import_module("ray")
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
        )
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def alone() -> TrainingResult:
    """The training of ``trained`` in this process."""
    return trained(HERE)


@pytest.fixture(params=["here", "processes", "ray"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    crew = {"here": "1", "processes": "2", "ray": "ray"}
    with open_workers(crew[request.param]) as opened:
        yield opened


@pytest.mark.distributed
def test_results_come_in_order_and_not_all_jobs_need_to_run(workers: Workers) -> None:
    assert list(workers.map(operator.sub, 10, range(5))) == [10, 9, 8, 7, 6]
    assert list(workers.map(operator.sub, 20, [5])) == [15]  # another shared value
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            yield taken
            taken += 1

    answers = workers.map(operator.add, 0, endless())
    assert [next(answers) for _ in range(3)] == [0, 1, 2]
    assert taken < 1000
    with pytest.raises(HeterogError, match=r"unknown fruit 'aple'; did you mean 'apple'\? Known"):
        list(workers.map(refuse_name, "aple", [["apple"]]))


@pytest.mark.distributed
def test_a_process_serves_many_shared_values_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, another value meant another process: seconds of imports each time."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Processes(1) as crew:
        (first, process), *more = crew.map(who, 1000, [1, 2])
        assert [first, *(value for value, _ in more)] == [1001, 1002]
        assert list(crew.map(who, 2000, [1])) == [(2001, process)]
    assert not list(tmp_path.iterdir())


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["2", "ray:2"])
def test_seats_remember_their_own_jobs(kind: str, request: pytest.FixtureRequest) -> None:
    if kind.startswith("ray"):
        request.getfixturevalue("ray_cluster")
    with open_seats(kind) as seats:
        assert seats is not None
        assert len(seats) == 2
        assert seats.run(remember, 7, [1, 2]) == [(7, [1]), (7, [2])]
        assert seats.run(remember, 8, [3, 4]) == [(8, [1, 3]), (8, [2, 4])]
        assert seats.run(remember, 8, [5]) == [(8, [1, 3, 5])]
        with pytest.raises(HeterogError, match="unknown fruit 'aple'"):
            seats.run(refuse_name, "aple", [["apple"]])
        seats.stop()
        assert seats.run(remember, 8, [6, 7]) == [None, None]
    with open_seats("1") as alone:
        assert alone is None


@pytest.mark.distributed
def test_a_lost_process_is_told() -> None:
    with (
        Processes(1) as crew,
        pytest.raises(HeterogError, match=r"ended without an answer.*use fewer workers"),
    ):
        list(crew.map(die, None, [1]))


def trained(workers: Workers) -> TrainingResult:
    """Searches, rollouts and validation run on the workers."""
    config = TrainingConfig(
        algorithm=Algorithm.MIXED, num_pairs=3, search_evaluations=25, num_steps=3,
        pairs_per_step=3, samples_per_pair=4, check_every=3, num_validation=2,
    )  # fmt: skip
    network = PolicyConfig(width=16, num_heads=2, num_rounds=1, rank=4)
    source = PairSource(graphs=[language_graph()], seed=4)
    return Trainer(source, config, network, workers=workers).run()


@THOROUGH
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["2", "ray:2"])
def test_the_same_seed_gives_the_same_policy_on_workers(
    kind: str, alone: TrainingResult, request: pytest.FixtureRequest
) -> None:
    if kind.startswith("ray"):
        request.getfixturevalue("ray_cluster")
    with open_workers(kind) as crew:
        shared = trained(crew)
    assert shared.history == alone.history
    assert shared.num_evaluations == alone.num_evaluations
    mine, theirs = alone.checkpoint.policy.state_dict(), shared.checkpoint.policy.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@THOROUGH
@pytest.mark.distributed
def test_compare_gives_the_same_rows_on_ray(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heterog.graph.serialize import save_graph

    save_graph(language_graph(), tmp_path / "lm.json.gz")
    for network in (0.5, 1.0):
        cluster = mixed_cluster(network=network, name=f"net{network}")
        cluster.save(tmp_path / f"net{network}.yaml")
    monkeypatch.chdir(tmp_path)
    asked = ["compare", "--models", "lm.json.gz", "--clusters", "net0.5.yaml,net1.0.yaml"]
    asked += ["--methods", "ev_ar,local_search", "--budget", "40e", "--json"]
    found = []
    for workers in ("1", "ray"):
        done = CliRunner().invoke(app, [*asked, "--workers", workers])
        assert done.exit_code == 0, done.output
        rows = json.loads(done.stdout)["rows"]
        found.append([row | {"search_seconds": 0.0} for row in rows])
    assert found[0] == found[1]
    assert [row["cluster"] for row in found[0]] == ["net0.5", "net0.5", "net1.0", "net1.0"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "`workers` 0 is too small; give a number of processes"),
        ("ray:0", "`workers` ray:0 is too small"),
        ("many", r"cannot read `workers` many; give a number of processes \(4\), ray"),
        ("ray:", "cannot read `workers` ray:;"),
        ("dask:4", "cannot read `workers` dask:4"),
    ],
)
def test_workers_that_make_no_sense(text: str, told: str) -> None:
    with pytest.raises(HeterogError, match=told):
        open_workers(text)


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    asked = ["compare", "--models", "vgg19", "--clusters", "paper_8gpu", "--workers", "ray"]
    monkeypatch.setattr(sys, "argv", ["heterog", *asked])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    told = capsys.readouterr().err.strip()
    assert told == "heterog: Ray is asked for, which is not installed; pip install heterog[ray]."
