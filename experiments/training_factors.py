"""Factors on 16-bit kernels of whole training runs, from MPT's published runs with FSDP.

    python experiments/training_factors.py --data DIR --json

``in_training`` of ``device_models/fitted.yaml`` comes from here: rows of ``fit`` on 8 GPUs in 16
bits, A100s together and H100 apart, ``fidelity.run_fit`` from factors of 1 with the host as it
ships. ``DIR`` holds ``mpt_fsdp.csv``. The factors are printed beside the shipped ones, with the
mean errors before and after on the fitted rows; ``published_runs.py`` has the rows that were not
fitted.
"""

from pathlib import Path
from typing import Any

import numpy as np
import published.mpt as mpt
from rows import asked_of, finish, option, progress

from heterog.fidelity.run_fit import Case, fit_runs
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import InTraining
from heterog.strategy.layouts.placed import place_layout

TOGETHER = (("A100-40GB", "A100-80GB"), ("H100",))
_ON = 8
"""GPUs of the rows."""
_FACTORS = ("products", "fused_attention", "streams", "float32")


def cases_of(path: Path, cards: tuple[str, ...], every: int) -> list[Case]:
    """The rows of some cards, captured and placed."""
    rows = [
        row
        for row in mpt.rows_of(path, "fit")
        if row.card in cards and row.cluster.num_devices == _ON
    ]
    rows.sort(key=lambda row: (row.model, row.length, row.batch))  # a graph serves several
    cases = []
    for number, row in enumerate(rows[::every]):
        graph = mpt.graph_of(row.model, row.length, row.batch)
        strategy = place_layout(row.layout, graph, row.cluster).strategy
        cases.append(
            Case(graph=graph, cluster=row.cluster, strategy=strategy, measured_s=row.measured_s)
        )
        progress(f"{number + 1}: {row.name}")
    return cases


def fitted(path: Path, cards: tuple[str, ...], every: int) -> dict[str, Any]:
    """Factors of some cards, fitted from 1."""
    cases = cases_of(path, cards, every)
    one = {card: InTraining(measured_on=card) for card in cards}
    found = fit_runs(cases, DeviceModels(in_training=one), with_host=False)

    def factors(models: DeviceModels) -> dict[str, dict[str, float]]:
        return {
            card: {name: getattr(models.in_training(card), name) for name in _FACTORS}
            for card in cards
        }

    return {
        "rows": len(cases),
        "fitted": factors(found.models),
        "shipped": factors(DeviceModels()),
        "mean_error_before": float(np.mean(np.abs(np.expm1(found.before)))),
        "mean_error_after": float(np.mean(np.abs(np.expm1(found.after)))),
        "mean_error_left_out": float(np.mean(np.abs(np.expm1(found.left_out)))),
    }


def main() -> None:
    """Fit and print."""
    arguments = asked_of(
        __doc__,
        option("--data", type=Path, required=True),
        option("--every", type=int, default=1, help="take each so-many-th row"),
    )
    found = [fitted(arguments.data / "mpt_fsdp.csv", cards, arguments.every) for cards in TOGETHER]
    lines = []
    for each in found:
        for card, factors in each["fitted"].items():
            shipped = each["shipped"][card]
            words = ", ".join(
                f"{name} {factors[name]:.3f} ({shipped[name]:.3f})" for name in factors
            )
            lines.append(f"{card}: {words}")
        lines.append(
            f"{each['rows']} rows: {each['mean_error_before']:.1%} before, "
            f"{each['mean_error_after']:.1%} after, {each['mean_error_left_out']:.1%} left out"
        )
    finish(arguments, found, lines)


if __name__ == "__main__":
    main()
