"""``heterog evaluate``: a policy on models and clusters, zero-shot and fine-tuned."""

from typing import Annotated, Any

import typer

from heterog.cli import completion
from heterog.cli.common import (
    BudgetOption,
    ClustersOption,
    EncoderOption,
    JsonOption,
    LayoutOption,
    ModelsOption,
    SeedOption,
    load_cluster,
    load_layout,
    model_graphs,
    out,
    print_json,
    progress_line,
    split_names,
    use_encoder,
)


def evaluate(
    policy: Annotated[
        str,
        typer.Argument(
            help="shipped name (default, heldout) or policy.pt",
            autocompletion=completion.policies,
        ),
    ],
    models: ModelsOption,
    clusters: ClustersOption,
    budget: BudgetOption = "30s",
    finetune: Annotated[
        str, typer.Option("--finetune", help="time or evaluations to fine-tune on each pair")
    ] = "",
    encoder: EncoderOption = "",
    layout: LayoutOption = "",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare a policy with baselines and searches."""
    from heterog.methods.planner import Budget

    parsed = Budget.parse(budget)
    tuning = Budget.parse(finetune) if finetune else None
    targets = [load_cluster(name) for name in split_names(clusters)]
    given = load_layout(layout, is_required=False)

    from heterog.agents.checkpoint import load_checkpoint
    from heterog.agents.evaluation import evaluate_policy, summary
    from heterog.agents.finetune import FineTuned
    from heterog.report.tables import methods_table
    from heterog.search.request import Request

    if encoder:
        use_encoder(encoder)
    checkpoint = load_checkpoint(policy)
    documents: list[dict[str, Any]] = []
    for graph in model_graphs(models, as_json):
        for target in targets:
            with progress_line(as_json) as progress:
                found = evaluate_policy(
                    policy,
                    Request(graph=graph, cluster=target, budget=parsed, seed=seed, given=given),
                    tuned=None if tuning is None else FineTuned(checkpoint.policy, tuning),
                    progress=progress,
                )
            documents += found.to_dicts()
            if not as_json:
                title = f"{graph.name}, batch {graph.batch_size}, on {target.name}, by {policy}"
                out.print(methods_table(found.rows, target, title=title))
                ratios = summary(found.rows)
                shown = ", ".join(
                    f"{name} {'does not fit' if value is None else f'{value:.3f}'}"
                    for name, value in ratios.items()
                )
                out.print(f"over the best search: {shown}", soft_wrap=True, markup=False)
    if as_json:
        print_json({"policy": policy, "rows": documents})
