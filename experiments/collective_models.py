"""Fits the models of collectives inside a host to measured ones, and prints their errors.

    python experiments/collective_models.py --data DIR [--json] [--write]

DIR holds ``nccl.csv.gz`` (ai-dynamo/aiconfigurator, Apache-2): seconds of collectives of 2, 4 and
8 GPUs. The fit uses rows of ``fit``; errors are those of rows of ``test``, beside the errors of
another measurement of the same collective. Types whose GPUs hang on PCIe or on single NVLinks
(L40S, V100) keep the links of the cluster file, because the speed of their collectives depends on
how the machine is wired.
"""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from device_models import rounded, write_section
from rows import asked_of, csv_rows, finish, option
from scipy.optimize import least_squares

from heterog.cluster.catalog import device_type, intra_link
from heterog.graph.op_graph import FloatArray
from heterog.grouped import grouped
from heterog.pricing.device_models.laws import CollectiveModel

LINKS = {"A100-80GB": "nvlink_a100", "H100": "nvlink4", "H200": "nvlink4"}
KINDS = {
    "all_reduce": ("all_reduce_ring", 2.0),
    "reduce_scatter": ("reduce_scatter", 1.0),
    "all_gather": ("all_gather", 1.0),
    "alltoall": ("all_to_all", 1.0),  # of each member's own payload
}
"""Name of the channel's kind, and how often each byte goes over a link."""
BYTES = {"half": 2.0, "int8": 1.0}
_STARTS = 6
_BEGIN = (5e-6, 2e-6, 2e-5, 2e-6, 1e-11, 1.0, 0.2)
_LEAST = (1e-7, 1e-8, 1e-8, 1e-9, 1e-13, 0.2, 1e-3)
_MOST = (1e-4, 1e-4, 1e-3, 1e-4, 1e-9, 5.0, 1.0)


def columns(rows: list[dict[str, str]]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(payload bytes, members, seconds) of rows."""
    payload = [float(row["num_bytes_field"]) * BYTES[row["dtype"]] for row in rows]
    members = [float(row["num_gpus"]) for row in rows]
    return np.array(payload), np.array(members), np.array([float(row["ms"]) / 1e3 for row in rows])


def fit(rows: list[dict[str, str]], bandwidth: float, rounds: float) -> CollectiveModel:
    """The parameters that explain rows best, from several starts."""
    payload, members, seconds = columns(rows)

    def model(logs: FloatArray) -> CollectiveModel:
        return CollectiveModel(rounds, *map(float, np.exp(logs)))

    def off(logs: FloatArray) -> FloatArray:
        told = model(logs).seconds(payload, members, bandwidth)
        return np.asarray(np.log(told / seconds))

    rng = np.random.default_rng(0)
    found = [
        least_squares(
            off,
            np.maximum(np.log(_BEGIN) + rng.normal(0.0, 0.5, len(_BEGIN)), np.log(_LEAST)),
            bounds=(np.log(_LEAST), np.log(_MOST)),
            loss="soft_l1",
            f_scale=0.1,
        )
        for _ in range(_STARTS)
    ]
    return model(min(found, key=lambda each: float(each.cost)).x)


def repeated(fitted: list[dict[str, str]], tested: list[dict[str, str]]) -> FloatArray:
    """Errors of no model at all: the median of fitted rows of the same payload and members.

    These errors are the differences between measurements of the same collective.

    Returns:
        Absolute errors of the tested rows that have such rows.  # [num_rows]
    """
    known = grouped(
        ((payload, members), seconds)
        for payload, members, seconds in zip(*columns(fitted), strict=True)
    )
    errors = [
        abs(statistics.median(known[payload, members]) / seconds - 1.0)
        for payload, members, seconds in zip(*columns(tested), strict=True)
        if (payload, members) in known
    ]
    return np.array(errors)


def main() -> None:
    """Fit, print, and write if asked to."""
    arguments = asked_of(
        __doc__, option("--data", type=Path, required=True), option("--write", action="store_true")
    )
    found = grouped(
        ((device_type(row["device"]).name, row["op"], row["split"]), dict(row))
        for row in csv_rows(arguments.data / "nccl.csv.gz")
        if not row["device"].startswith("vTrain") and row["op"] in KINDS
    )
    rows = defaultdict(list, found)
    told: list[dict[str, Any]] = []
    document: dict[str, dict[str, Any]] = {}
    for name, link in LINKS.items():
        bandwidth = intra_link(link).bandwidth_bytes_per_s
        for operation, (kind, rounds) in KINDS.items():
            model = fit(rows[name, operation, "fit"], bandwidth, rounds)
            payload, members, seconds = columns(rows[name, operation, "test"])
            error = np.abs(model.seconds(payload, members, bandwidth) / seconds - 1.0)
            again = repeated(rows[name, operation, "fit"], rows[name, operation, "test"])
            fields = {field: getattr(model, field) for field in model.__slots__}
            document.setdefault(name, {})[kind] = rounded(fields)
            told.append(
                {
                    "type": name,
                    "operation": operation,
                    "rows": len(error),
                    "median": float(np.median(error)),
                    "p90": float(np.quantile(error, 0.9)),
                    "measured_again_p90": float(np.quantile(again, 0.9)),
                }
            )
    if arguments.write:
        write_section("collectives", document)
    finish(arguments, {"rows": told, "parameters": document})


if __name__ == "__main__":
    main()
