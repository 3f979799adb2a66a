"""``heterog compare``: methods over models and clusters."""

import csv
import io
from pathlib import Path
from typing import Annotated, Any

import typer

from heterog.cli.common import (
    BudgetOption,
    JsonOption,
    SeedOption,
    load_cluster,
    method_names,
    model_graphs,
    out,
    print_json,
    progress_line,
    split_names,
)


def compare(
    models: Annotated[str, typer.Option("--models", help="names with commas")],
    clusters: Annotated[str, typer.Option("--clusters", help="names with commas")],
    methods: Annotated[str, typer.Option("--methods", help="auto, or names")] = "auto",
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    order: Annotated[str, typer.Option("--order")] = "best",
    no_step_barrier: Annotated[bool, typer.Option("--no-step-barrier")] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="write the rows there")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods over models and clusters; every method gets the full budget."""
    from heterog.files import check_writable, write_atomically
    from heterog.planners.compare import compare_methods
    from heterog.planners.plan import check_batch, parse_orders
    from heterog.planners.planner import Budget
    from heterog.report.tables import methods_table

    if csv_file is not None:
        check_writable(csv_file)
    parsed = Budget.parse(budget)
    orders = parse_orders(order)
    names = method_names(methods)
    targets = [load_cluster(name) for name in split_names(clusters)]
    documents: list[dict[str, Any]] = []
    for graph in model_graphs(models, as_json):
        for target in targets:
            check_batch(graph, target)
            with progress_line(as_json) as progress:
                result = compare_methods(
                    graph,
                    target,
                    names,
                    budget=parsed,
                    seed=seed,
                    step_barrier=not no_step_barrier,
                    orders=orders,
                    progress=progress,
                )
            documents += result.to_dicts()
            if not as_json:
                title = f"{graph.name}, batch {graph.batch_size}, on {target.name}"
                out.print(methods_table(result.rows, target, title=title))
    if csv_file is not None:
        write_atomically(csv_file, _csv(documents).encode())
    if as_json:
        print_json({"rows": documents})


def _csv(documents: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(documents[0]), lineterminator="\n")
    writer.writeheader()
    for document in documents:
        peaks = " ".join(map(str, document["peak_memory_bytes"]))
        writer.writerow(document | {"peak_memory_bytes": peaks})
    return buffer.getvalue()
