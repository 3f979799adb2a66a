"""Uncertainty of predictions by regime of a run: conformal prediction over recorded runs.

    python experiments/published_runs.py --data DIR --only ultrascale --split fit --json > 1B.json
    python experiments/published_runs.py --data DIR --only ultrascale --split test --json > 3B.json
    python experiments/regimes.py 1B.json --test 3B.json [--write]

The first file's runs give each regime a spread. With this spread and that of devices, the regime's
intervals hold four of five runs and one more; see ``conformal_spread``. The
other file's runs show how many runs the intervals hold, and their width, on runs that were not
fitted. ``--write`` puts the spreads into the package.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from rows import asked_of, finish, option

from heterog.grouped import grouped
from heterog.pricing import intervals
from heterog.pricing.intervals import COVERAGE, ONE_HOST, interval_around, regime_name

_DEVICES_OF_A_HOST = 8
_DEVIATIONS = NormalDist().inv_cdf(0.5 + 0.5 * COVERAGE)


class Run(NamedTuple):
    """One recorded run and what was said of it."""

    regime: str
    log_error: float
    spread: float


def spread_of_interval(predicted: float, high: float) -> float:
    """The spread of a prediction whose interval ends at ``high``.

    >>> round(spread_of_interval(1.0, interval_around(1.0, 0.1).high), 3)
    0.1
    """
    return math.log(high / predicted) / _DEVIATIONS


def conformal_spread(log_errors: Sequence[float], spreads: Sequence[float]) -> float:
    """The least spread that, added in quadrature, makes the interval of a new run hold it.

    Split conformal prediction (Vovk et al. 2005): n + 1 runs are equally likely to be the worst,
    so a new run lies inside with probability 0.8 if ceil(0.8 (n + 1)) of n runs do.

    Args:
        log_errors: log(measured / predicted) of runs to which nothing was fitted.
        spreads: Spread of each prediction before the addition.

    >>> round(conformal_spread([0.1, -0.2, 0.3, 0.1], [0.0] * 4) * 1.2816, 3)
    0.3
    """
    lacking = sorted(
        math.sqrt(max((error / _DEVIATIONS) ** 2 - spread**2, 0.0))
        for error, spread in zip(log_errors, spreads, strict=True)
    )
    return lacking[min(math.ceil(COVERAGE * (len(lacking) + 1)), len(lacking)) - 1]


def read_runs(path: Path) -> list[Run]:
    """Runs on one device type, whose own spread is that of the narrowest interval."""
    runs = json.loads(path.read_text())["runs"]
    of_devices = min(spread_of_interval(run["predicted_s"], run["interval_s"][1]) for run in runs)
    found = []
    for run in runs:
        hosts = -(-int(run["choice"].split(" on ")[1]) // _DEVICES_OF_A_HOST)
        tp, pp = (int(re.findall(rf"\b{word}=(\d+)", run["name"])[0]) for word in ("tp", "pp"))
        regime = regime_name(hosts, is_mixed=tp > 1 and pp > 1)
        error = math.log(run["measured_s"] / run["predicted_s"])
        found.append(Run(regime, error, of_devices))
    return found


def fitted(runs: Sequence[Run]) -> dict[str, float]:
    """Spread of each regime but that of one host, to three digits."""
    by_regime = grouped((run.regime, run) for run in runs)
    found = {
        regime: round(conformal_spread([r.log_error for r in own], [r.spread for r in own]), 3)
        for regime, own in sorted(by_regime.items())
        if regime != ONE_HOST
    }
    # What has stages beside teams is no surer than what has not.
    return {
        regime: max(spread, *(found[part] for part in found if regime.endswith(part)))
        for regime, spread in found.items()
    }


def held(runs: Sequence[Run], spreads: Mapping[str, float]) -> list[dict[str, Any]]:
    """Share of runs inside their intervals, median half-width and error, by regime and in all."""
    rows: list[tuple[str, tuple[bool, float, float]]] = []
    for run in runs:
        spread = math.hypot(run.spread, spreads.get(run.regime, 0.0))
        low, high = interval_around(1.0, spread)
        told = low <= math.exp(run.log_error) <= high, (high - low) / 2, abs(run.log_error)
        rows += [(run.regime, told), ("all", told)]
    return [
        {"regime": name, "runs": len(each), "inside": float(np.mean([row[0] for row in each])),
         "half_width": float(np.median([row[1] for row in each])),
         "error": float(np.median([row[2] for row in each]))}
        for name, each in grouped(rows).items()
    ]  # fmt: skip


def main() -> None:
    """Fit, hold against the other file, and write if asked to."""
    asked = asked_of(
        __doc__,
        option("fit", type=Path),
        option("--test", type=Path),
        option("--write", action="store_true"),
    )
    spreads = fitted(read_runs(asked.fit))
    rows = held(read_runs(asked.test), spreads) if asked.test is not None else []
    if asked.write:
        path = Path(intervals.__file__).parent / "regimes.yaml"
        head = path.read_text(encoding="utf-8").partition("spreads:\n")[0]
        written = "".join(f"  {regime}: {spread}\n" for regime, spread in spreads.items())
        path.write_text(f"{head}spreads:\n{written}", encoding="utf-8")
    finish(asked, {"spreads": spreads, "rows": rows})


if __name__ == "__main__":
    main()
