"""Which pairs of vTrain's layouts are ordered wrongly, and how many could be ordered at all.

    python experiments/vtrain_pairs.py --data DIR --split fit --json

A pair is of one model, number of GPUs and global batch, and differs by more than a twentieth.
``DIR`` holds ``vtrain_one_node.csv`` (VIA-Research/vTrain, MIT). Steps are predicted from models
of few layers, as in ``left_out_regimes.py``, by the device models that ship. Beside them:

``teams measured``, ``rest measured``
    measured seconds in place of predicted ones, of layouts with teams or of those without: how
    many pairs only the others cost.
``noise``
    measured seconds times a random factor for each kind in teams (hidden size, team, micro-batch),
    whose logarithm is normal: how many pairs a model would order that knows seconds without noise.
    Kinds share a factor, since the set's rows are composed of one measurement of each.
``monotone``
    steps with the seconds of a layer replaced by the nearest ones that do not fall where a device
    has more work and sends as much or more.

Seconds of a layer are exact: a step takes A + L B + (m + p - 1) (C + L D / p), with L layers, p
stages and m micro-batches, to four digits, and D is that of its kind. They are found where a
configuration has enough rows, and steps of other kinds stay as they are.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from left_out_regimes import Floats, Predictor, Row, seconds_of, shipped
from published_runs import read_rows
from scipy.optimize import LinearConstraint, minimize

_DIFFERENT = 0.05
_SPREADS = (0.05, 0.09, 0.13)
_DRAWS = 300
_TERMS = 4
_SEED = 0


class Kind(NamedTuple):
    """What the seconds of a layer follow from."""

    hidden: int
    team: int
    micro_batch: int

    @property
    def work(self) -> float:
        """Work of a device for a layer, up to a factor."""
        return self.hidden**2 * self.micro_batch / self.team

    @property
    def payload(self) -> int:
        """Bytes of each collective of a layer, up to a factor."""
        return self.hidden * self.micro_batch


def kind_of(row: Row) -> Kind:
    """The kind of a row."""
    return Kind(*(int(row[n]) for n in ("hidden size", "tensor parallelism", "micro batch")))


def alternatives(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Numbers of the rows of each pair, the faster one first."""
    measured = seconds_of(rows)
    of_choice: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        choice = tuple(row[n] for n in ("hidden size", "# layers", "global batch", "# GPUs"))
        of_choice[choice].append(number)
    found = []
    for numbers in of_choice.values():
        for pair in combinations(numbers, 2):
            fast, slow = sorted(pair, key=measured.__getitem__)
            if measured[slow] > (1.0 + _DIFFERENT) * measured[fast]:
                found.append((fast, slow))
    return found


def num_ordered(pairs: Sequence[tuple[int, int]], seconds: Floats) -> int:
    """How many pairs some seconds order rightly."""
    return sum(bool(seconds[fast] < seconds[slow]) for fast, slow in pairs)


def terms_of(row: Row) -> Floats:
    """Factors of A, B, C and D in the seconds of a step.  # [4]"""
    stages, layers = int(row["pipeline parallelism"]), int(row["# layers"])
    micro = int(row["global batch"]) / int(row["data parallelism"]) / int(row["micro batch"])
    runs = micro + stages - 1.0
    return np.array([1.0, layers, runs, runs * layers / stages])


def layer_seconds(rows: Sequence[Row]) -> dict[Kind, float]:
    """Seconds of a layer and micro-batch by kind, where a configuration tells them."""
    of_configuration: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        names = ("data parallelism", "pipeline parallelism")
        of_configuration[*map(str, kind_of(row)), *(row[n] for n in names)].append(row)
    found: dict[Kind, list[float]] = defaultdict(list)
    for own in of_configuration.values():
        factors = np.array([terms_of(row) for row in own])
        if np.linalg.matrix_rank(factors) == _TERMS:
            solved = np.linalg.lstsq(factors, seconds_of(own), rcond=None)[0]
            found[kind_of(own[0])].append(float(solved[3]))
    return {kind: float(np.median(each)) for kind, each in sorted(found.items())}


def monotone(known: dict[Kind, float]) -> dict[Kind, float]:
    """The nearest seconds that do not fall with work, in a team of one size and as fused.

    Teams of eight with one sample run other kernels: two heads are no block of the fused softmax.
    """
    kinds = [kind for kind in known if (kind.team, kind.micro_batch) != (8, 1)]
    measured = np.log([known[kind] for kind in kinds])
    above = [
        (low, high)
        for low, one in enumerate(kinds)
        for high, other in enumerate(kinds)
        if low != high and one.team == other.team
        and one.work <= other.work and one.payload <= other.payload
    ]  # fmt: skip
    rises = np.zeros((len(above), len(kinds)))
    for number, (low, high) in enumerate(above):
        rises[number, low], rises[number, high] = -1.0, 1.0

    def off(at: Floats) -> float:
        return float(((at - measured) ** 2).sum())

    found = minimize(off, measured, constraints=LinearConstraint(rises, lb=0.0), method="SLSQP")
    return dict(zip(kinds, map(float, np.exp(found.x)), strict=True))


def with_layers(rows: Sequence[Row], known: dict[Kind, float], new: dict[Kind, float]) -> Floats:
    """Measured seconds with other seconds of a layer.  # [num_rows]"""
    changed = np.array([new.get(k, 0.0) - known[k] if (k := kind_of(row)) in new else 0.0
                        for row in rows])  # fmt: skip
    weight = np.array([float(terms_of(row)[3]) for row in rows])
    return np.asarray(seconds_of(rows) + changed * weight)


def with_noise(rows: Sequence[Row], pairs: Sequence[tuple[int, int]], spread: float) -> Floats:
    """Share of pairs that measured seconds order with noise on kinds in teams.  # [draws]"""
    random = np.random.default_rng(_SEED)
    kinds = sorted({kind_of(row) for row in rows})
    index = np.array([kinds.index(kind_of(row)) for row in rows])
    is_noisy = np.array([kind.team > 1 for kind in kinds])
    measured = seconds_of(rows)
    draws = np.exp(spread * is_noisy * random.standard_normal((_DRAWS, len(kinds))))
    return np.array([num_ordered(pairs, measured * each[index]) for each in draws]) / len(pairs)


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """All that is printed."""
    pairs = alternatives(rows)
    measured, predicted = seconds_of(rows), Predictor().predicted_s(rows, shipped())
    has_teams = np.array([kind_of(row).team > 1 for row in rows])
    known = layer_seconds(rows)
    nearest = monotone(known)
    formula = np.array([terms_of(r)[2] / int(r["pipeline parallelism"]) for r in rows])
    wrong = [pair for pair in pairs if not predicted[pair[0]] < predicted[pair[1]]]
    errors: dict[Kind, list[float]] = defaultdict(list)
    for row, own, guess in zip(rows, measured, predicted, strict=True):
        errors[kind_of(row)].append(float(guess / own) - 1.0)
    seconds = {
        "predicted": predicted,
        "formula": formula,
        "teams measured": np.where(has_teams, measured, predicted),
        "rest measured": np.where(has_teams, predicted, measured),
        "monotone": with_layers(rows, known, nearest),
    }
    noise = {str(spread): with_noise(rows, pairs, spread) for spread in _SPREADS}
    return {
        "rows": len(rows),
        "mape": float(np.abs(predicted / measured - 1.0).mean()),
        "pairs": len(pairs),
        "ordered": {name: num_ordered(pairs, each) for name, each in seconds.items()},
        "ordered_with_noise": {
            spread: {"mean": float(each.mean()), "p10": float(np.quantile(each, 0.1)),
                     "p90": float(np.quantile(each, 0.9))}
            for spread, each in noise.items()
        },
        "wrong_by_kind": {
            "too_slow": _counted(kind_of(rows[fast]) for fast, _ in wrong),
            "too_fast": _counted(kind_of(rows[slow]) for _, slow in wrong),
        },
        "error_by_kind": {
            str(tuple(kind)): float(np.mean(each)) for kind, each in sorted(errors.items())
        },
        "layer_ms": {str(tuple(kind)): 1e3 * each for kind, each in known.items()},
        "nearest_monotone_layer_ms": {
            str(tuple(kind)): 1e3 * each for kind, each in nearest.items()
        },
    }  # fmt: skip


def _counted(kinds: Iterable[Kind]) -> dict[str, int]:
    return {str(tuple(kind)): number for kind, number in Counter(kinds).most_common()}


def main() -> None:
    """Print pairs and bounds of a split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="fit")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = read_rows(arguments.data / "vtrain_one_node.csv")
    found = document([row for row in rows if row["split"] == arguments.split])
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['rows']} rows, mean error {found['mape']:.1%}, {found['pairs']} pairs")
    for name, number in found["ordered"].items():
        print(f"{name}: {number} ({number / found['pairs']:.1%})")
    for spread, each in found["ordered_with_noise"].items():
        print(f"noise {spread}: {each['mean']:.1%} ({each['p10']:.1%} to {each['p90']:.1%})")
    for name, kinds in found["wrong_by_kind"].items():
        print(f"{name}: {kinds}")


if __name__ == "__main__":
    main()
