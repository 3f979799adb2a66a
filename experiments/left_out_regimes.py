"""Errors of device models on regimes left out of the fit, beside gradient boosting.

    python experiments/left_out_regimes.py --data DIR --json

``DIR`` holds ``vtrain_one_node.csv`` (VIA-Research/vTrain, MIT). Each regime (teams of four and
more, hidden 2048, micro-batch 8) is left out in turn: the shipped numbers that were fitted to
vTrain's rows of ``fit`` are fitted again to those of these rows outside the regime, and rows of
``test`` inside it are predicted. These numbers are the times of Megatron's host in
``device_models/fitted.yaml`` (five: to issue a kernel from Python, the same from autograd, to
issue a collective, and the extra time of a collective in a step, at most and by byte) and the
factor on products whose rows are not aligned. Everything else stays as shipped: kernels and
collectives measured alone, and factors of A100s in training, which are from other runs.

The fit begins with values that know no run of vTrain: kernels and collectives issued as by
PyTorch, twice as fast by autograd, collectives as fast as alone, rows that are not aligned no
slower; see ``BEGIN``. It takes one row of each hidden size, tensor parallelism and micro-batch,
the one with the fewest GPUs and then the smallest batch: the set's rows are composed of so few
measurements that all rows of such a kind have the same seconds of a layer, to four digits. All
steps are predicted from models of few layers (``--few-layers`` of ``published_runs.py``), so the
script takes only minutes.

Decisions that were made with all rows of ``fit`` in view are not fitted again: which kernels
Megatron runs, where its fused softmax applies, and that a collective's extra time is the lesser of
two lines.

Boosting gets all rows of ``fit`` outside the regime, the logarithm of the seconds and the columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from fits.boosting import Floats, Settings, fit_boosted
from published.models import Model
from published_runs import by_capture, case_of, few_layer_terms
from rows import asked_of, csv_rows, finish, option, progress
from scipy.optimize import least_squares

from heterog.cluster.topology import Execution
from heterog.fidelity.run_fit import Case
from heterog.grouped import grouped
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import host_of, in_training_of
from heterog.strategy.layouts.layout import parse_layout

Row = dict[str, str]
REGIMES: dict[str, Callable[[Row], bool]] = {
    "tensor parallelism of 4 and 8": lambda row: int(row["tensor parallelism"]) >= 4,
    "hidden 2048": lambda row: int(row["hidden size"]) == 2048,
    "micro-batch 8": lambda row: int(row["micro batch"]) == 8,
}
_CARD = "A100-40GB"
_COLUMNS = (
    "# GPUs", "global batch", "micro batch", "hidden size", "# layers", "tensor parallelism",
    "data parallelism", "pipeline parallelism",
)  # fmt: skip
"""Columns that differ among rows: all are given to boosting."""
_KIND = ("hidden size", "tensor parallelism", "micro batch")
"""Columns that the seconds of a layer follow from."""
_BOOSTING = Settings(rounds=500, depth=4, rate=0.05, least_rows=3)
_RUN_SPREAD = 0.08
_PARAMETER_SPREAD = 1.0
"""Standard deviations of the logarithm of a step, as in ``fidelity.run_fit``, and of parameters
before any run."""
_STEP = 0.05
_MOST_ITERATIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Numbers fitted to vTrain's rows: see ``Host`` and ``InTraining.unaligned``."""

    issue_s: float
    backward: float
    collective_s: float
    ramp_s: float
    ramp_s_per_byte: float
    unaligned: float

    def models(self) -> DeviceModels:
        """The shipped device models, but for these numbers."""
        factors = replace(in_training_of(_CARD), unaligned=self.unaligned)
        models = DeviceModels(Execution.MEGATRON, in_training={_CARD: factors})
        models.host = replace(
            models.host,
            issue_s=self.issue_s,
            backward=self.backward,
            collective_s=self.collective_s,
            ramp_s=self.ramp_s,
            ramp_s_per_byte=self.ramp_s_per_byte,
        )
        return models


_EAGER = host_of(Execution.EAGER).issue_s
BEGIN = Fitted(
    issue_s=_EAGER,
    backward=0.5,
    collective_s=_EAGER,
    ramp_s=4.2e-5,
    ramp_s_per_byte=5.4e-12,
    unaligned=1.05,
)
"""Of an all-reduce among A100s alone, ``fitted.yaml`` has 3.9e-5 s (and 5e-7 for each member) and
5.3e-12 s/B. Below them the greater of both would hide any slope, as it would for a factor of 1.
That autograd, which is C++, issues a kernel in half the time is chosen: from 1 the fit to all rows
of ``fit`` ends at 2.3, with a mean error of 5.7 instead of 5.4 % there."""


def shipped() -> Fitted:
    """The numbers that ship."""
    host = host_of(Execution.MEGATRON)
    return Fitted(
        issue_s=host.issue_s,
        backward=host.backward,
        collective_s=host.collective_s,
        ramp_s=host.ramp_s,
        ramp_s_per_byte=host.ramp_s_per_byte,
        unaligned=in_training_of(_CARD).unaligned,
    )


Key = tuple[Model, int, str]
"""Model, batch and layout of a case."""


class Predictor:
    """Seconds of rows by parameters, from models of few layers, which are captured once."""

    def __init__(self) -> None:
        self._cases: dict[Key, Case] = {}
        self._seconds: dict[tuple[Key, Fitted], float] = {}
        self._terms: dict[tuple[str, ...], list[tuple[float, Key]]] = {}

    def predicted_s(self, rows: Sequence[Row], parameters: Fitted) -> Floats:
        """Predicted seconds of each row.  # [num_rows]"""
        models = parameters.models()
        return np.array([self._of_row(row, parameters, models) for row in rows])

    def _of_row(self, row: Row, parameters: Fitted, models: DeviceModels) -> float:
        named = _named(row)
        if named not in self._terms:
            self._terms[named] = self._placed(row)
        terms = self._terms[named]
        return sum(share * self._seconds_of(key, parameters, models) for share, key in terms)

    def _placed(self, row: Row) -> list[tuple[float, Key]]:
        found = []
        for share, run in few_layer_terms(row):
            key = (run.model, run.batch, run.layout)
            if key not in self._cases:
                self._cases[key] = case_of(run)
            found.append((share, key))
        return found

    def _seconds_of(self, key: Key, parameters: Fitted, models: DeviceModels) -> float:
        if not _has_collectives(key[2]):
            alone = {"collective_s": 0.0, "ramp_s": 0.0, "ramp_s_per_byte": 0.0}
            parameters = replace(parameters, **alone)
        if (key, parameters) not in self._seconds:
            self._seconds[key, parameters] = self._cases[key].predicted_s(models)
        return self._seconds[key, parameters]


def _named(row: Row) -> tuple[str, ...]:
    return tuple(row[column] for column in _COLUMNS)


def _has_collectives(layout: str) -> bool:
    said = parse_layout(layout)
    return said.tp > 1 or said.dp != 1


def seconds_of(rows: Sequence[Row]) -> Floats:
    """Measured seconds of steps.  # [num_rows]"""
    return np.array([float(row["iteration time (ms)"]) / 1e3 for row in rows])


def _kind(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _KIND)


def one_of_each(rows: Sequence[Row]) -> list[Row]:
    """The row of each kind with the fewest GPUs, the smallest batch and the fewest layers."""

    def size(row: Row) -> tuple[int, ...]:
        return tuple(int(row[name]) for name in ("# GPUs", "global batch", "# layers", *_COLUMNS))

    kinds = grouped((_kind(row), row) for row in rows)
    return sorted((min(own, key=size) for own in kinds.values()), key=by_capture)


def fit(rows: Sequence[Row], predictor: Predictor) -> Fitted:
    """Parameters that fit one row of each kind best: least squares of logarithms, with a prior.

    Args:
        rows: Rows to fit.
        predictor: Predictor of their seconds.
    """
    chosen = one_of_each(rows)
    begin = np.log(astuple(BEGIN))
    measured = np.log(seconds_of(chosen))

    def off(at: Floats) -> Floats:
        predicted = np.log(predictor.predicted_s(chosen, _at(at)))
        return np.concatenate(
            [(predicted - measured) / _RUN_SPREAD, (at - begin) / _PARAMETER_SPREAD]
        )

    def slopes(at: Floats) -> Floats:
        here = off(at)
        moved = [off(at + _STEP * unit) for unit in np.eye(len(at))]
        return np.stack([(there - here) / _STEP for there in moved], axis=1)

    return _at(least_squares(off, begin, slopes, max_nfev=_MOST_ITERATIONS).x)


def _at(logarithms: Floats) -> Fitted:
    return Fitted(**dict(zip(_NAMES, map(float, np.exp(logarithms)), strict=True)))


_NAMES = tuple(field.name for field in fields(Fitted))


def errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """Mean, median and 90th percentile of absolute errors, and the median signed one."""
    off = predicted / measured - 1.0
    return {
        "mape": float(np.abs(off).mean()),
        "median": float(np.median(np.abs(off))),
        "p90": float(np.quantile(np.abs(off), 0.9)),
        "bias": float(np.median(off)),
    }


def boosting(outside: Sequence[Row], inside: Sequence[Row]) -> Floats:
    """Seconds of rows inside a regime by boosting on rows outside.  # [num_inside]"""
    known, asked = (
        np.array([[float(row[name]) for name in _COLUMNS] for row in rows])
        for rows in (outside, inside)
    )
    model = fit_boosted(known, np.log(seconds_of(outside)), _BOOSTING)
    return np.exp(model.predict(asked))


def regime(name: str, rows: Sequence[Row], predictor: Predictor) -> dict[str, Any]:
    """Errors of one regime that was left out."""
    is_inside = REGIMES[name]
    outside = [row for row in rows if row["split"] == "fit" and not is_inside(row)]
    inside = sorted(
        (row for row in rows if row["split"] == "test" and is_inside(row)), key=by_capture
    )
    fitted_rows = one_of_each(outside)
    parameters = fit(outside, predictor)
    progress(f"{name}: {parameters}")
    measured = seconds_of(inside)
    found = {
        "on_rows_fitted": (fitted_rows, predictor.predicted_s(fitted_rows, parameters)),
        "device_models": (inside, predictor.predicted_s(inside, parameters)),
        "as_shipped": (inside, predictor.predicted_s(inside, shipped())),
        "boosting": (inside, boosting(outside, inside)),
    }
    return {
        "regime": name,
        "rows_fitted": len(fitted_rows),
        "rows_of_boosting": len(outside),
        "rows_tested": len(inside),
        "parameters": asdict(parameters),
        **{name: errors(predicted, seconds_of(of)) for name, (of, predicted) in found.items()},
        "rows": [
            {column: int(row[column]) for column in _COLUMNS}
            | {"measured_s": own, "predicted_s": predicted, "by_boosting_s": rival}
            for row, own, predicted, rival in zip(
                inside, measured, found["device_models"][1], found["boosting"][1], strict=True
            )
        ],
    }


def main() -> None:
    """Leave each regime out once."""
    arguments = asked_of(
        __doc__,
        option("--data", type=Path, required=True),
        option("--only", default="", help="regimes that begin so"),
    )
    rows = csv_rows(arguments.data / "vtrain_one_node.csv")
    predictor = Predictor()
    names = [name for name in REGIMES if name.startswith(arguments.only)]
    found = [regime(name, rows, predictor) for name in names]
    about = {"begin": asdict(BEGIN), "boosting": asdict(_BOOSTING)}
    finish(arguments, about | {"regimes": found})


if __name__ == "__main__":
    main()
