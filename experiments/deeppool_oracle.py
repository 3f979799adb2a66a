"""Compare our dynamic program with plans of the original DeepPool planner.

    python experiments/deeppool_oracle.py --profiles DIR --golden FILE [--corrected] [--json FILE]

The golden file holds plans of the original (model, batch, GPUs, amplification limit, bandwidth,
latency, data parallelism or not) with iteration ms, GPU-ms and GPUs per layer. Prints every plan
that differs and, last, ``N of M plans equal``. ``--corrected`` adds, for each plan, what the
corrected program finds with corrected costs.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deeppool_costs import Profile, ProfiledCosts, load_model
from deeppool_models import Layer
from deeppool_original import search_as_published

from heterog.errors import HeterogError
from heterog.methods.deeppool import fork_join, search

A100_BYTES_PER_US = 2.66e5
A100_LATENCY_US = 240.0
"""Of the original's examples, where a plan does not say."""
TOLERANCE = 1e-9
"""Relative; sums are added in another order."""


def replan(golden: Mapping[str, Any], layers: list[Layer], profile: Profile) -> dict[str, Any]:
    """Our plan for one golden plan's question, in the golden plan's words."""
    costs = _costs(golden, layers, profile, faithful=True)
    plan = search_as_published(
        costs,
        fork_join([layer.previous for layer in layers]),
        limit=float(golden["lim"]),
        num_devices=int(golden["gpus"]),
        is_baseline=bool(golden["dp"]),
    )
    return {
        "iter_ms": plan.time / 1000.0,
        "gpu_ms": plan.device_time / 1000.0,
        "max_gpus": plan.num_devices,
        "gpus_per_layer": list(plan.widths),
    }


def corrected(golden: Mapping[str, Any], layers: list[Layer], profile: Profile) -> dict[str, Any]:
    """The plan of the corrected program, with corrected costs."""
    costs = _costs(golden, layers, profile, faithful=False)
    plan = search(
        costs,
        fork_join([layer.previous for layer in layers]),
        limit=math.inf if golden["dp"] else float(golden["lim"]),
        num_devices=int(golden["gpus"]),
        fork=not golden["dp"],
    )
    return {
        "iter_ms": plan.time / 1000.0,
        "gpu_ms": plan.device_time / 1000.0,
        "gpus_per_layer": list(plan.widths),
        "missing_times": len(costs.missing),
    }


def _costs(
    golden: Mapping[str, Any], layers: list[Layer], profile: Profile, *, faithful: bool
) -> ProfiledCosts:
    return ProfiledCosts(
        layers,
        profile,
        batch=int(golden["batch"]),
        num_devices=int(golden["gpus"]),
        bytes_per_us=float(golden.get("bw", A100_BYTES_PER_US)),
        latency_us=float(golden.get("lat", A100_LATENCY_US)),
        is_baseline=bool(golden["dp"]),
        faithful=faithful,
    )


def differences(golden: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What is not equal, in words."""
    found = []
    for name in ("iter_ms", "gpu_ms"):
        if not math.isclose(golden[name], ours[name], rel_tol=TOLERANCE):
            found.append(f"{name} {ours[name]:.4f} instead of {golden[name]:.4f}")
    widths, mine = golden["gpus_per_layer"], ours["gpus_per_layer"]
    if len(widths) != len(mine):
        found.append(f"{len(mine)} layers instead of {len(widths)}")
    else:
        pairs = enumerate(zip(widths, mine, strict=True))
        wrong = [index for index, (golden_width, own) in pairs if golden_width != own]
        if wrong:
            first = wrong[0]
            found.append(
                f"{len(wrong)} layers differ, the first is {first}: {mine[first]} GPUs instead of "
                f"{widths[first]}"
            )
    return found


def _shown(plan: Mapping[str, Any]) -> str:
    return f"{plan['iter_ms']:.3f} ms and {plan['gpu_ms']:.2f} GPU-ms"


def main() -> int:
    """Compare, print, and say how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--profiles", type=Path, required=True, help="folder of *.prof files")
    parser.add_argument("--golden", type=Path, required=True, help="plans of the original, JSON")
    parser.add_argument("--corrected", action="store_true", help="also show corrected plans")
    parser.add_argument("--json", type=Path, help="write all plans here")
    arguments = parser.parse_args()
    try:
        document = json.loads(arguments.golden.read_text())
        goldens = document["plans"] if isinstance(document, dict) else document
        rows, equal = [], 0
        known: dict[str, tuple[list[Layer], Profile]] = {}
        for golden in goldens:
            name = str(golden["model"])
            if name not in known:
                known[name] = load_model(arguments.profiles, name)
            ours = replan(golden, *known[name])
            found = differences(golden, ours)
            equal += not found
            kind = "data parallel" if golden["dp"] else f"limit {golden['lim']:g}"
            title = f"{name}, batch {golden['batch']}, {golden['gpus']} GPUs, {kind}"
            if found:
                print(f"{title}: {'; '.join(found)}")
            row = {"title": title, "golden": golden, "ours": ours, "differences": found}
            if arguments.corrected:
                row["corrected"] = corrected(golden, *known[name])
                print(f"{title}: {_shown(golden)} published, {_shown(row['corrected'])} corrected")
            rows.append(row)
    except (HeterogError, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{equal} of {len(rows)} plans equal")
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
