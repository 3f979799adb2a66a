"""``heterog schedule``: jobs that arrive at a cluster, and the devices of each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli.common import (
    ClusterOption,
    JsonOption,
    SeedOption,
    load_cluster,
    load_model,
    print_result,
    progress_line,
    split_names,
)

if TYPE_CHECKING:
    from heterog.search.arrivals.evaluated import EvaluatedCluster, TrainingJob
    from heterog.search.arrivals.jobs_file import JobRecord
    from heterog.search.arrivals.queueing import JobVerdict


def schedule(
    jobs: Annotated[
        Path,
        typer.Argument(
            help="YAML file: schema_version: 1, and jobs with name, model, steps, and perhaps "
            "batch_size, arrives, every, count, deadline or deadline_factor, most_devices"
        ),
    ],
    cluster: ClusterOption,
    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            help="how many devices a job gets: fit (the fewest that end in time), fastest, most, "
            "fewest (by arithmetic), one, random, at_most_4 (or another number)",
        ),
    ] = "fit",
    wait: Annotated[
        bool, typer.Option("--wait", help="jobs wait for devices, in the order of arrival")
    ] = False,
    methods: Annotated[
        str,
        typer.Option("--methods", help="of 'heterog methods', by which jobs are planned; commas"),
    ] = "",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Decide which devices arriving jobs get, and which jobs are turned away.

    Each job is planned on the devices that it would get, so its time there is the evaluator's. A
    job holds its devices from start to end; it is blocked if none are free or it would be late.
    """
    from heterog.methods.registry import built_in_methods
    from heterog.search.arrivals.evaluated import METHODS, EvaluatedCluster
    from heterog.search.arrivals.jobs_file import read_jobs, requests_of
    from heterog.search.arrivals.queueing import JobQueueing, rule_named

    chosen = rule_named(rule, seed)
    records = read_jobs(jobs)
    target = load_cluster(cluster)
    names = split_names(methods) if methods else list(METHODS)
    for name in names:
        built_in_methods()[name]  # a wrong one is reported before captures
    with progress_line(as_json) as progress:
        kinds = _captured(records, lambda model: progress(f"capture {model}", 0.0, float("inf")))
        where = EvaluatedCluster(target, kinds, names)
        for kind in kinds:
            where.alone_s(kind)  # a job that fits nowhere is reported before scheduling
        state = JobQueueing(where, requests_of(records, where), waits=wait)
        while state.request is not None:
            progress("schedule", len(state.verdicts) / len(state.requests), float("inf"))
            state.decide(chosen(state))
    _tell(state.final(), where, as_json)


def _captured(records: "list[JobRecord]", begin: "Any") -> "dict[str, TrainingJob]":
    """The jobs' training by kind, each model and batch captured once."""
    from heterog.search.arrivals.evaluated import TrainingJob

    graphs: dict[tuple[str, int | None], Any] = {}
    found: dict[str, TrainingJob] = {}
    for record in records:
        key = record.model, record.batch_size
        if key not in graphs:
            begin(record.model)
            graphs[key] = load_model(*key)[0]
        found[record.kind] = TrainingJob(graph=graphs[key], num_steps=record.steps)
    return found


def _tell(verdicts: "list[JobVerdict]", where: "EvaluatedCluster", as_json: bool) -> None:
    from heterog.report.tables import jobs_table
    from heterog.search.arrivals.queueing import blocking_rate, causes

    devices = where.cluster.devices
    blocked = blocking_rate(verdicts)
    rows = [
        {
            "job": verdict.request.name,
            "outcome": str(verdict.outcome),
            "arrives_s": verdict.request.arrives_s,
            "starts_s": verdict.starts_s if verdict.is_accepted else None,
            "ends_s": verdict.ends_s if verdict.is_accepted else None,
            "devices": [devices[device].name for device in verdict.devices],
            "runs": verdict.detail,
        }
        for verdict in verdicts
    ]
    document = {
        "cluster": where.cluster.name,
        "jobs": rows,
        "blocking_rate": blocked,
        "causes": causes(verdicts),
        "num_planned": where.num_planned,
    }
    print_result(
        as_json,
        document,
        jobs_table(verdicts, title=f"{len(verdicts)} jobs on {where.cluster.name}"),
        f"{sum(not verdict.is_accepted for verdict in verdicts)} of {len(verdicts)} blocked "
        f"({blocked:.1%})",
    )
