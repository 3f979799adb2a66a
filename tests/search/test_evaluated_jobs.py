"""Jobs on unequal GPUs by the evaluator, and the file that says which jobs come."""

from pathlib import Path

import pytest

from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import HeterogError, InputFileError, UnknownNameError
from heterog.search.arrivals.evaluated import EvaluatedCluster, TrainingJob
from heterog.search.arrivals.jobs_file import read_jobs, requests_of
from heterog.search.arrivals.queueing import JobRequest, fewest_that_fit, most_devices, run_rule

GRAPH = chain_graph(num_layers=2, width=4096, batch_size=2048)


def cluster_of(name: str = "mixed_16", steps: int = 100) -> EvaluatedCluster:
    job = TrainingJob(graph=GRAPH, num_steps=steps)
    return EvaluatedCluster(Cluster.load(name), {"chain": job}, ("cp_ar",))


def test_step_times_are_kept_by_what_devices_are() -> None:
    cluster = cluster_of()
    first = cluster.place("chain", 2, 0)
    assert first is not None
    planned = cluster.num_planned
    # The two after it are on the same host and alike: nothing is planned again.
    second = cluster.place("chain", 2, first.devices)
    assert second is not None
    assert not first.devices & second.devices
    assert second.seconds == first.seconds
    assert cluster.num_planned == planned
    assert first.detail == "cp_ar on 2 x A100-40GB (A)"
    assert cluster.place("chain", 16, 1) is None
    assert cluster.degrees == (1, 2, 3, 4, 6, 8, 12, 16)
    alone_s = cluster.alone_s("chain")
    assert 0.5 < alone_s / first.seconds < 2.0
    with pytest.raises(UnknownNameError, match="unknown job 'chian'; did you mean 'chain'"):
        cluster.place("chian", 1, 0)


def test_speed_ups_are_those_of_the_links() -> None:
    """On two hosts behind a slow network, two devices are slower than one."""
    job = TrainingJob(graph=chain_graph(), num_steps=10)
    cluster = EvaluatedCluster(toy_cluster(), {"chain": job}, ("cp_ar",))
    one, two = (cluster.place("chain", degree, 0) for degree in (1, 2))
    assert one is not None
    assert two is not None
    assert one.seconds < two.seconds
    requests = [JobRequest(name=f"{n}", kind="chain", arrives_s=0.0) for n in range(3)]
    few = run_rule(cluster, requests, fewest_that_fit)
    assert [len(verdict.devices) for verdict in few] == [1, 1, 0]
    assert sum(v.is_accepted for v in run_rule(cluster, requests, most_devices)) == 1


def test_a_part_of_a_cluster_keeps_its_hosts_and_lines() -> None:
    whole = Cluster.load("two_sites_32")
    part = whole.part((0, whole.num_devices - 1))
    assert part.num_devices == 2
    assert part.num_hosts == 2
    assert part.devices[0].name == whole.devices[0].name
    assert 0 < len(part.pairs) <= len(whole.pairs)


def test_what_fits_nowhere_is_told_with_the_way_out() -> None:
    graph = chain_graph(num_layers=1, width=65536, batch_size=2)
    cluster = EvaluatedCluster(
        toy_cluster(), {"wide": TrainingJob(graph=graph, num_steps=1)}, ("cp_ar",)
    )
    assert cluster.place("wide", 2, 0) is None
    with pytest.raises(HeterogError, match="job 'wide' does not fit into the memory of cluster"):
        cluster.alone_s("wide")


JOB = "{name: a, model: m.json, steps: 5}"


def test_a_file_of_jobs(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "schema_version: 1\njobs:\n"
        "  - {name: a, model: chain, steps: 5, arrives: 1 min, every: 2 h, count: 2,"
        " deadline: 9}\n"
        "  - {name: b, model: chain, batch_size: 8, steps: 5, deadline_factor: 0.5}\n"
    )
    jobs = read_jobs(path)
    graph = TrainingJob(graph=GRAPH, num_steps=5)
    cluster = EvaluatedCluster(
        Cluster.load("mixed_16"), {job.kind: graph for job in jobs}, ("cp_ar",)
    )
    requests = requests_of(jobs, cluster)
    assert [(r.name, r.arrives_s) for r in requests] == [("a 1", 60), ("a 2", 7260), ("b", 0)]
    assert requests[0].acceptable_s == 9.0
    assert requests[2].acceptable_s == pytest.approx(0.5 * cluster.alone_s(jobs[1].kind))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("jobs: []", "has schema_version None"),
        ("schema_version: 1\njobs: []", "there is no job"),
        (f"schema_version: 1\njobs: [{JOB}, {JOB}]", "job 'a' is there twice"),
        ("schema_version: 1\njobs: [{name: a, steps: 5}]", "field 'jobs.0.model' is missing"),
        ("schema_version: 1\njobs: [{name: a, model: x.py, steps: 5}]", "is Python code"),
        ("schema_version: 1\njobs: [{name: a, model: 'evil:run', steps: 5}]", "is Python code"),
        ("schema_version: 1\njobs: [{name: a, model: x, steps: 0}]", "greater than or equal to 1"),
        ("schema_version: 1\njobs: [1]", "field 'jobs.0'"),
        (f"schema_version: 1\njobs: [{JOB[:-1]}, colour: red}}]", "unknown field 'jobs.0.colour'"),
        (f"schema_version: 1\njobs: [{JOB[:-1]}, count: 3}}]", "one of 'every' and 'count'"),
        (f"schema_version: 1\njobs: [{JOB[:-1]}, deadline: soon}}]", "'soon', not a time"),
        (f"schema_version: 1\njobs: [{JOB[:-1]}, deadline: 0}}]", "is 0; it must be above 0"),
        (f"schema_version: 1\njobs: [{JOB[:-1]}, arrives: .nan}}]", "it must be 0 or above"),
        (
            f"schema_version: 1\njobs: [{JOB[:-1]}, deadline: 1, deadline_factor: 1}}]",
            "give one of them",
        ),
        (f"schema_version: 1\njobs: [{JOB[:-1]}, every: 1, count: 200000}}]", "200,000 arrivals"),
        (f"schema_version: 1\njobs: [{JOB[:-1]}, every: 1e8, count: 99}}]", "arrives last after"),
    ],
)
def test_a_bad_file_of_jobs_is_one_clear_line(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    with pytest.raises(InputFileError) as caught:
        read_jobs(path)
    message = str(caught.value)
    assert told in message
    assert str(path) in message
    assert "\n" not in message
