"""How far off predicted peaks of memory are, and whether their intervals hold on other runs.

    python experiments/peak_errors.py --data DIR --json

``peaks`` of ``device_models/fitted.yaml`` comes from here. ``DIR`` holds
``sailor_gh200_opt.json`` (eth-easl/sailor, MIT): OPT-350M on 1 to 32 nodes of four GH200, and the
largest peak of a device of each run. Runs on one and two nodes are fitted, runs on more nodes are
the test. ``published_runs.MEGATRON_RESERVES_BYTES`` was found by the same rule, from the same
runs. ``pricing.intervals`` has the formula of the spread.

The comparison is of memory beyond that reserve, because this part is predicted. Several runs of
the test differ in their number of replicas only, and have nearly the same peak: the errors of each
kind of pipeline are alike, so the test proves less than its number of runs suggests.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import published_runs
from rows import asked_of, finish, option, progress
from scipy.stats import binomtest

from heterog.errors import HeterogError
from heterog.pricing.device_models.parameters import shipped_peak_errors
from heterog.pricing.intervals import COVERAGE, PeakErrors

FILE = "sailor_gh200_opt.json"
_FITTED_NODES = 2
_TYPE = "GH200"


def peak_errors_of(peaks: Sequence[tuple[float, float]], measured_on: str) -> PeakErrors:
    """Errors from a few runs, to which one number was fitted; see ``pricing.intervals``.

    Args:
        peaks: (measured, predicted) bytes of each run, above 0, without what devices reserve.
        measured_on: GPU type of the runs.

    Raises:
        HeterogError: there are fewer than two runs.

    >>> round(peak_errors_of([(1.1, 1.0), (1.0, 1.1)], "GH200").spread, 4)
    0.1348
    """
    if len(peaks) < 2:
        raise HeterogError(
            f"a spread needs at least two measured peaks, got {len(peaks)}; record more runs."
        )
    squares = math.fsum(math.log(measured / predicted) ** 2 for measured, predicted in peaks)
    spread = math.sqrt(squares / (len(peaks) - 1))
    return PeakErrors(spread=spread, num_runs=len(peaks), measured_on=measured_on)


def peaks_of(path: Path) -> list[dict[str, Any]]:
    """All runs of the file, measured and predicted bytes without the reserve of a device."""
    reserved = published_runs.MEGATRON_RESERVES_BYTES
    found = []
    for run in published_runs.sailor_runs(path):
        each = published_runs.sailor_compared(run, "", None)
        assert each.measured_bytes is not None, "the file has a peak for each run"
        assert each.predicted_bytes is not None
        measured, predicted = each.measured_bytes - reserved, each.predicted_bytes - reserved
        row = {
            "name": f"{run.name}, {run.num_stages} stages, {run.layout.split('; ')[-1]}",
            "num_nodes": len(run.cluster.hosts),
            "measured_bytes": measured,
            "predicted_bytes": predicted,
            "log_error": math.log(measured / predicted),
        }
        progress(row)
        found.append(row)
    return found


def main() -> None:
    """Fit to the runs on few nodes, test on the others, and print both."""
    arguments = asked_of(__doc__, option("--data", type=Path, required=True))
    peaks = peaks_of(arguments.data / FILE)
    few, more = (
        [
            (peak["measured_bytes"], peak["predicted_bytes"])
            for peak in peaks
            if (peak["num_nodes"] <= _FITTED_NODES) == is_fitted
        ]
        for is_fitted in (True, False)
    )
    errors = peak_errors_of(few, _TYPE)
    intervals = [errors.interval(predicted) for _, predicted in more]
    inside = sum(
        ends.low <= measured <= ends.high
        for (measured, _), ends in zip(more, intervals, strict=True)
    )
    document = {
        "fitted": asdict(errors),
        "ships": asdict(shipped_peak_errors()),
        "num_tested": len(more),
        "num_inside": inside,
        "p_value": float(binomtest(inside, len(more), COVERAGE).pvalue),
        "interval_of_one": list(errors.interval(1.0)),
        "runs": peaks,
    }
    finish(arguments, document)


if __name__ == "__main__":
    main()
