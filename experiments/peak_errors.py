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
from dataclasses import asdict, dataclass
from pathlib import Path

import published_runs
from published.runs import Run
from rows import asked_of, finish, option, progress
from scipy.stats import binomtest

from heterog.errors import HeterogError
from heterog.pricing.device_models.parameters import shipped_peak_errors
from heterog.pricing.intervals import COVERAGE, Interval, PeakErrors

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest peak of a run, without the reserve of its device.

    Attributes:
        name: of the run.
        num_nodes: that it ran on.
        measured_bytes: less the reserve.
        predicted_bytes: likewise.
    """

    name: str
    num_nodes: int
    measured_bytes: float
    predicted_bytes: float

    @property
    def log_error(self) -> float:
        """log(measured / predicted)."""
        return math.log(self.measured_bytes / self.predicted_bytes)


def peaks_of(path: Path) -> list[Peak]:
    """All runs of the file, predicted."""
    found = []
    for run in published_runs.sailor_runs(path):
        each = published_runs.sailor_compared(run, "", None)
        assert each.measured_bytes is not None, "the file has a peak for each run"
        assert each.predicted_bytes is not None
        reserved = published_runs.MEGATRON_RESERVES_BYTES
        peak = Peak(
            name=f"{run.name}, {_shape(run)}",
            num_nodes=len(run.cluster.hosts),
            measured_bytes=each.measured_bytes - reserved,
            predicted_bytes=each.predicted_bytes - reserved,
        )
        found.append(peak)
        progress(
            f"{peak.name}: measured {peak.measured_bytes / 1e9:.2f} GB, predicted "
            f"{peak.predicted_bytes / 1e9:.2f} ({peak.log_error:+.3f})"
        )
    return found


def _shape(run: Run) -> str:
    return f"{run.num_stages} stages, {run.layout.split('; ')[-1]}"


def fitted(peaks: Sequence[Peak]) -> PeakErrors:
    """The errors of some runs."""
    return peak_errors_of([(each.measured_bytes, each.predicted_bytes) for each in peaks], _TYPE)


def held(errors: PeakErrors, peaks: Sequence[Peak]) -> int:
    """How many of some runs lie in their intervals."""
    intervals: list[Interval] = [errors.interval(peak.predicted_bytes) for peak in peaks]
    pairs = zip(peaks, intervals, strict=True)
    return sum(ends.low <= peak.measured_bytes <= ends.high for peak, ends in pairs)


def main() -> None:
    """Fit to the runs on few nodes, test on the others, and print both."""
    arguments = asked_of(__doc__, option("--data", type=Path, required=True))
    peaks = peaks_of(arguments.data / FILE)
    few = [peak for peak in peaks if peak.num_nodes <= _FITTED_NODES]
    more = [peak for peak in peaks if peak.num_nodes > _FITTED_NODES]
    errors = fitted(few)
    inside = held(errors, more)
    document = {
        "fitted": asdict(errors),
        "ships": asdict(shipped_peak_errors()),
        "num_tested": len(more),
        "num_inside": inside,
        "p_value": float(binomtest(inside, len(more), COVERAGE).pvalue),
        "interval_of_one": list(errors.interval(1.0)),
        "runs": [asdict(peak) | {"log_error": peak.log_error} for peak in peaks],
    }
    finish(arguments, document)


if __name__ == "__main__":
    main()
