"""``heterog fidelity``: predictions beside recorded runs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.cli.common import JsonOption, load_cluster, load_model_graph, out, print_json

if TYPE_CHECKING:
    from heterog.fidelity.comparison import FamilyErrors


def fidelity(
    runs: Annotated[
        Path,
        typer.Argument(
            help="CSV file with columns model, batch_size, cluster, layout, seconds, peak_bytes, "
            "family"
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", help="of all rows: zoo name, file.py:function or a graph")
    ] = "",
    cluster: Annotated[
        str, typer.Option("--cluster", help="of all rows: a preset or a cluster file")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with recorded runs.

    Prints errors by family, and how many pairs of alternatives are ordered rightly.
    """
    from functools import lru_cache

    from heterog.fidelity.comparison import family_errors
    from heterog.fidelity.predicting import cases_of, compared
    from heterog.fidelity.recorded import read_runs

    rows = read_runs(runs, model=model, cluster=cluster)
    found = []
    cases = cases_of(rows, load_model_graph, lru_cache(load_cluster))
    for number, (row, case) in enumerate(cases, 1):
        found.append(compared(row, case))
        if not as_json:
            each = found[-1]
            out.print(
                f"{number}/{len(rows)} {each.name}: measured {each.measured_s:.4g} s, predicted "
                f"{each.predicted_s:.4g} ({each.error:+.0%})",
                soft_wrap=True, highlight=False,
            )  # fmt: skip
    families = sorted({each.family for each in found})
    errors = [
        family_errors(name, [each for each in found if each.family == name]) for name in families
    ]
    if len(families) > 1:
        errors.append(family_errors("all", found))
    if as_json:
        print_json(
            {
                "families": [asdict(each) for each in errors],
                "runs": [asdict(each) for each in found],
            }
        )
        return
    for family in errors:
        out.print(words(family), soft_wrap=True, highlight=False)


def words(errors: "FamilyErrors") -> str:
    """One line about a family."""
    text = (
        f"{errors.name}: {errors.num_runs} run{'s' * (errors.num_runs > 1)}, mean error "
        f"{errors.mape:.1%}, median {errors.median:.1%}, 90th percentile {errors.p90:.1%}, bias "
        f"{errors.bias:+.1%}"
    )
    if errors.interval_coverage is not None and errors.interval_width is not None:
        text += f"; {errors.interval_coverage:.0%} inside intervals of {errors.interval_width:.0%}"
    if errors.memory_mape is not None:
        text += f"; memory {errors.memory_mape:.1%}"
    if errors.pairs is not None:
        text += f"; {errors.pairs.ordered} of {errors.pairs.number} pairs ordered rightly"
    return text
