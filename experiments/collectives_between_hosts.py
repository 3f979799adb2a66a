"""Fits rings and trees between hosts to NCCL's measured rates, and prints the errors.

    python experiments/collectives_between_hosts.py --data DIR [--json]

DIR holds ``nccl_h100_efa.csv`` (Hugging Face, Ultra-Scale Playbook, Apache-2): bus bandwidth of
collectives of 256 MiB on hosts of 8 H100 behind EFA. ``ring`` and ``tree`` with their growths are
those of ``heterog.pricing.cost_model``; ``links.yaml`` has them for ``efa_p5``. The error at each
number of hosts is that of a fit to all other numbers.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from published.nanotron import cluster_of
from rows import asked_of, csv_rows, finish, option

RATE = cluster_of(16).nic_bandwidth_bytes_per_s(0)
"""Bytes per second that a host sends through all of its NICs."""


class Measured(NamedTuple):
    """Time of an operation over that of a ring or a tree at the NICs' rate."""

    collective: str
    hosts: int
    is_tree: bool
    steps: float
    times: float


def measured(path: Path) -> list[Measured]:
    """The rows between hosts."""
    found = []
    for row in csv_rows(path):
        hosts, devices = int(row["nodes"]), int(row["gpus"])
        if hosts == 1:
            continue
        times = RATE / (float(row["busbw_GBps_mean"]) * 1e9)
        is_tree = row["collective"] == "AllReduce"
        if is_tree:  # over the hosts, where a ring goes through all devices
            times *= (1.0 - 1.0 / devices) / (1.0 - 1.0 / hosts)
        steps = math.log2(hosts) if is_tree else float(hosts)
        found.append(Measured(row["collective"], hosts, is_tree, steps, times))
    return found


def fitted(rows: Sequence[Measured]) -> tuple[float, float]:
    """Factor and growth of rows of one kind."""
    steps, times = np.log([row.steps for row in rows]), np.log([row.times for row in rows])
    growth, factor = np.polyfit(steps, times, 1)
    return math.exp(factor), float(growth)


def main() -> None:
    """Fit, and leave each number of hosts out in turn."""
    arguments = asked_of(
        __doc__,
        option("--data", type=Path, required=True),
    )
    rows = measured(arguments.data / "nccl_h100_efa.csv")
    found: dict[str, tuple[float, float]] = {}
    left_out = []
    for is_tree in (False, True):
        of_kind = [row for row in rows if row.is_tree == is_tree]
        found["tree" if is_tree else "ring"] = fitted(of_kind)
        for row in of_kind:
            factor, growth = fitted([other for other in of_kind if other.hosts != row.hosts])
            error = factor * row.steps**growth / row.times - 1.0
            left_out.append({"collective": row.collective, "hosts": row.hosts, "error": error})
    errors = [abs(row["error"]) for row in left_out]
    of_all = {"median": statistics.median(errors), "p90": float(np.quantile(errors, 0.9))}
    finish(arguments, {"rows": left_out, **of_all, **found})


if __name__ == "__main__":
    main()
