"""``heterog compare``: methods over models and clusters."""

import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli import completion
from heterog.cli.common import (
    BudgetOption,
    ClustersOption,
    JsonOption,
    LayoutOption,
    ModelsOption,
    NoBarrierOption,
    OrderOption,
    SeedOption,
    WorkersOption,
    end_interrupted,
    load_cluster,
    load_layout,
    load_methods,
    loaded_models,
    out,
    print_json,
    progress_line,
    split_names,
    stop_when_interrupted,
    termination_as_interrupt,
)
from heterog.cli.outputs import CSV
from heterog.workers import HERE, Workers, is_asked_to_stop, open_workers

if TYPE_CHECKING:
    from heterog.cluster import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.methods.planner import Stop
    from heterog.search.issue_order import Rehearse
    from heterog.search.portfolio import Comparison
    from heterog.search.request import Request


def compare(
    models: ModelsOption,
    clusters: ClustersOption,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="auto, or names of 'heterog methods' or file.py:name, with commas",
            autocompletion=completion.several(completion.methods),
        ),
    ] = "auto",
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    order: OrderOption = "best",
    no_step_barrier: NoBarrierOption = False,
    layout: LayoutOption = "",
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="write the rows there"), CSV
    ] = None,
    workers: WorkersOption = "1",
    as_json: JsonOption = False,
) -> None:
    """Compare methods over models and clusters.

    Every method gets the full budget. Workers take one model and cluster each; a budget in
    seconds is each worker's own time.
    """
    from heterog.files import write_atomically
    from heterog.methods.planner import Budget
    from heterog.methods.registry import Methods
    from heterog.report.tables import methods_table
    from heterog.search.plan import parse_orders
    from heterog.search.portfolio import compare_methods
    from heterog.search.request import Request, Session

    names, known = load_methods(methods)
    asked_orders, parsed = parse_orders(order), Budget.parse(budget)
    given = load_layout(layout, is_required=False)

    def request_for(graph: "OpGraph", target: "Cluster") -> Request:
        return Request(
            graph=graph,
            cluster=target,
            methods=tuple(names),
            known=known,
            budget=parsed,
            seed=seed,
            orders=asked_orders,
            step_barrier=not no_step_barrier,
            given=given,
        )

    targets = [load_cluster(name) for name in split_names(clusters)]
    documents: list[dict[str, Any]] = []

    def cases() -> "Iterator[tuple[OpGraph, Cluster, Rehearse | None]]":
        for graph, rehearse in loaded_models(models, as_json):
            for target in targets:
                yield graph, target, rehearse

    def found(crew: Workers) -> "Iterator[Comparison]":
        if crew is HERE:
            for graph, target, rehearse in cases():
                with stop_when_interrupted() as stop, progress_line(as_json) as progress:
                    session = Session(progress=progress, stop=stop)
                    result = compare_methods(request_for(graph, target), session)
                    result = _rehearsed(result, rehearse, stop)
                yield result
                if stop.is_requested:
                    raise KeyboardInterrupt
            return
        everything = list(cases())
        with stop_when_interrupted(crew.stop) as stop, progress_line(as_json) as progress:
            # A user's methods cannot be sent: workers read their files themselves.
            requests = [
                replace(request_for(graph, target), known=Methods(()))
                for graph, target, _ in everything
            ]
            for done, result in enumerate(crew.map(_compare, methods, requests), 1):
                text = f"{result.graph.name} on {result.cluster.name}"
                progress(text, done / len(everything), float("inf"))
                # In this process: the kernels of a captured step cannot be sent to workers.
                yield _rehearsed(result, everything[done - 1][2], stop)
            if stop.is_requested:
                raise KeyboardInterrupt

    is_interrupted = False
    try:
        with termination_as_interrupt(), open_workers(workers) as crew:
            for result in found(crew):
                documents += result.to_dicts()
                if not as_json:
                    graph, target = result.graph, result.cluster
                    title = f"{graph.name}, batch {graph.batch_size}, on {target.name}"
                    out.print(methods_table(result.rows, target, title=title))
    except KeyboardInterrupt:
        if not documents:
            raise
        is_interrupted = True
    if csv_file is not None:
        write_atomically(csv_file, _csv(documents).encode())
    if as_json:
        print_json({"rows": documents})
    if is_interrupted:
        where = "printed above" if csv_file is None else f"written to {csv_file}"
        end_interrupted(f"{len(documents)} rows are {where}")


def _rehearsed(found: "Comparison", rehearse: "Rehearse | None", stop: "Stop") -> "Comparison":
    return found if rehearse is None else found.rehearsed(rehearse, stop)


def _compare(methods: str, request: "Request") -> "Comparison":
    from heterog.methods.planner import Stop
    from heterog.search.portfolio import compare_methods
    from heterog.search.request import Session

    known = load_methods(methods)[1]
    return compare_methods(replace(request, known=known), Session(stop=Stop(is_asked_to_stop)))


def _csv(documents: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    fields = dict.fromkeys(name for document in documents for name in document)
    writer = csv.DictWriter(buffer, fieldnames=list(fields), restval="", lineterminator="\n")
    writer.writeheader()
    for document in documents:
        peaks = " ".join(map(str, document["peak_memory_bytes"]))
        writer.writerow(document | {"peak_memory_bytes": peaks})
    return buffer.getvalue()
