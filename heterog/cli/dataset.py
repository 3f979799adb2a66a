"""``heterog dataset``: solve models on clusters, and keep the plans for others to learn from."""

from pathlib import Path
from typing import Annotated

import typer

from heterog.cli.common import (
    BudgetOption,
    ClustersOption,
    JsonOption,
    ModelsOption,
    SeedOption,
    load_cluster,
    load_methods,
    model_graphs,
    out,
    print_json,
    progress_line,
    split_names,
)
from heterog.cli.outputs import CACHE


def dataset(
    folder: Annotated[Path, typer.Argument(help="folder of solved pairs, added to"), CACHE],
    models: ModelsOption,
    clusters: ClustersOption,
    methods: Annotated[str, typer.Option("--methods", help="as of compare")] = "auto",
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Solve models on clusters and keep every method's plan, a file for each pair."""
    from heterog.methods.planner import Budget
    from heterog.search.dataset import SolvedPair, solved_before
    from heterog.search.portfolio import run_methods
    from heterog.search.request import Request, Session
    from heterog.simulator.evaluator import Evaluator

    names, known = load_methods(methods)
    parsed = Budget.parse(budget)
    targets = [load_cluster(name) for name in split_names(clusters)]
    documents = []
    for graph in model_graphs(models, as_json):
        for target in targets:
            pair = solved_before(SolvedPair(graph=graph, cluster=target), folder)
            request = Request(
                graph=graph,
                cluster=target,
                methods=tuple(names),
                known=known,
                budget=parsed,
                seed=seed,
            )
            with progress_line(as_json) as progress:
                rows = run_methods(Evaluator(graph, target), request, Session(progress=progress))
            pair = pair.adding(rows, seed, str(parsed))
            folder.mkdir(parents=True, exist_ok=True)
            path = pair.save(folder)
            best = pair.plans[0].step_time_s if pair.plans else None
            documents.append({"file": str(path), "plans": len(pair.plans), "step_time_s": best})
            if not as_json:
                said = "none fits" if best is None else f"{1e3 * best:.1f} ms the fastest"
                out.print(f"{path}: {len(pair.plans)} plans, {said}", markup=False)
    if as_json:
        print_json(documents)
