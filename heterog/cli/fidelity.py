"""``heterog fidelity``: predictions beside recorded runs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.cli.common import JsonOption, load_cluster, load_model_graph, out, print_result
from heterog.units import format_bytes, format_bytes_range

if TYPE_CHECKING:
    from heterog.fidelity.comparison import Compared


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

    Prints errors by family, how many steps and peaks of memory lie in their 80 % intervals, and
    how many pairs of alternatives are ordered rightly.
    """
    from functools import lru_cache

    from heterog.fidelity.comparison import family_errors, in_words, read_runs
    from heterog.fidelity.run_fit import cases_of, compared

    rows = read_runs(runs, model=model, cluster=cluster)
    found = []
    cases = cases_of(rows, load_model_graph, lru_cache(load_cluster))
    for number, (row, case) in enumerate(cases, 1):
        found.append(compared(row, case))
        if not as_json:
            each = found[-1]
            out.print(
                f"{number}/{len(rows)} {each.name}: measured {each.measured_s:.4g} s, predicted "
                f"{each.predicted_s:.4g} ({each.error:+.0%}){_peak(each)}",
                soft_wrap=True, highlight=False,
            )  # fmt: skip
    families = sorted({each.family for each in found})
    errors = [
        family_errors(name, [each for each in found if each.family == name]) for name in families
    ]
    if len(families) > 1:
        errors.append(family_errors("all", found))
    document = {"families": list(map(asdict, errors)), "runs": list(map(asdict, found))}
    print_result(as_json, document, *map(in_words, errors))


def _peak(run: "Compared") -> str:
    """The recorded peak beside its interval, if one was recorded."""
    if run.measured_bytes is None or run.predicted_bytes is None or run.interval_bytes is None:
        return ""
    ends = format_bytes_range(*run.interval_bytes, around=run.predicted_bytes)
    return (
        f"; peak {format_bytes(run.measured_bytes)}, predicted "
        f"{format_bytes(run.predicted_bytes)} ({ends})"
    )
