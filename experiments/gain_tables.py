"""Tables of gains in ``docs/notebook/searches.md``: every method on some models and clusters.

    python experiments/gain_tables.py --budget 300e --rows gains.jsonl
    python experiments/gain_tables.py --budget 300e --rows gains.jsonl --beside before.jsonl
    python experiments/gain_tables.py --clusters paper_8gpu@0.2,paper_8gpu@0.35 --gains

Rows are those of ``heterog compare --methods auto``: each search has the whole budget, all are
judged by the referee. They are written pair by pair, and a pair that is in the file already is
not made again, so a run may be stopped and goes on. With ``--beside`` each number stands beside
the one of another run (``now (then)``): of another commit, made by running this file with that
commit's package. Budgets in evaluations give the same rows on any machine.

``CLUSTER@0.35`` is a cluster whose NICs reach that part of their line rate. ``--calibration
roofline`` prices kernels from data sheets, as tables from before the device models did.
``--gains`` prints one table for all clusters, with the gains alone; ``--json`` prints numbers for
a program.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from heterog.agents.planners import default_methods
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.methods.planner import Budget
from heterog.methods.registry import AUTO
from heterog.search.compare import compare_methods

# Registers ``agent`` and ``agent+search``, which ``auto`` asks, too.
from heterog.search.request import Request
from heterog.search.stability import DATA_PARALLEL, REFERENCES

MODELS = (
    "vgg19,resnet200,inception_v3,mobilenet_v2,nasnet_large,transformer_6l,bert_large_24l,"
    "xlnet_large_24l"
)
CLUSTERS = "paper_8gpu,paper_8gpu_net035"
FOUR = ("ev_ps", "ev_ar", "cp_ps", "cp_ar")
GAINS = ("over the four", "over reference")
"""The reference is the better of ``best_ddp`` and ``tuned_uniform``."""
SHOWN = (
    "ddp", "best_ddp", "tuned_uniform", "megatron_grid", "model_parallel", "deeppool", "pipeline",
    "poplar", "two_segment", "hap", "local_search", "agent", "agent+search",
)  # fmt: skip

Row = dict[str, Any]
Pair = tuple[str, str, int, bool]
"""Model, cluster, batch, whether with a step barrier."""


def read_rows(path: Path | None) -> dict[Pair, list[Row]]:
    """Rows of a file by pair; nothing if there is no such file."""
    pairs: dict[Pair, list[Row]] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        row = json.loads(line)
        key = row["model"], row["cluster"], row["batch_size"], row["step_barrier"]
        pairs.setdefault(key, []).append(row)
    return pairs


def load_cluster(name: str, calibration: str | None = None) -> Cluster:
    """A cluster by its name, ``@`` and the part of the line rate that its NICs reach.

    Args:
        name: Name of a preset, with or without that part.
        calibration: What prices its kernels, if not what the preset says.
    """
    plain, _, efficiency = name.partition("@")
    cluster = Cluster.load(plain)
    if calibration is not None:
        cluster = replace(cluster, calibration=calibration)
    return replace(cluster, efficiency=float(efficiency)) if efficiency else cluster


def make_rows(
    models: Iterable[str], clusters: Iterable[str], arguments: argparse.Namespace
) -> None:
    """Compare on every pair that is not in the file yet."""
    wanted = list(clusters)
    for name in models:
        model, _, batch = name.partition(":")
        graph = None
        for cluster in wanted:
            graph = graph or captured(model, arguments.graphs, int(batch) if batch else None)
            barrier = not arguments.no_step_barrier
            if (graph.name, cluster, graph.batch_size, barrier) in read_rows(arguments.rows):
                continue
            result = compare_methods(
                Request(
                    graph=graph,
                    cluster=load_cluster(cluster, arguments.calibration),
                    methods=tuple(arguments.methods.split(",")),
                    known=default_methods(),
                    budget=Budget.parse(arguments.budget),
                    step_barrier=barrier,
                )
            )
            asked = {"cluster": cluster, "step_barrier": barrier}
            rows = [row | asked for row in result.to_dicts()]
            with arguments.rows.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            best = best_seconds(rows, {row["method"] for row in rows})
            print(f"{name} on {cluster}: {shown(best)} s", file=sys.stderr)


def best_seconds(rows: Iterable[Row], methods: Iterable[str]) -> float | None:
    """The shortest step of some methods; ``None`` if none fits."""
    wanted = set(methods)
    times = [r["step_time_s"] for r in rows if r["method"] in wanted and r["step_time_s"]]
    return min(times, default=None)


def columns(rows: list[Row]) -> dict[str, float | None]:
    """What a line of the table says about a pair."""
    every = {row["method"] for row in rows}
    auto = best_seconds(rows, every)
    four, reference = best_seconds(rows, FOUR), best_seconds(rows, REFERENCES)
    found = {"best of four": four}
    found |= {name: best_seconds(rows, (name,)) for name in SHOWN if name in every}
    found["auto"] = auto
    found["over the four"] = four / auto if four and auto else None
    found["over reference"] = reference / auto if reference and auto else None
    found |= draws(rows)
    found["bound"] = min(row["lower_bound_s"] for row in rows)
    return found


def draws(rows: list[Row]) -> dict[str, float | None]:
    """Least and largest gain over what gains are quoted over when speeds are not as predicted."""
    names = ("over it, worst draw", "over it, best draw")
    parallel = [r for r in rows if r["method"] in REFERENCES and r["step_time_s"]]
    parallel = parallel or [r for r in rows if r["method"] in DATA_PARALLEL and r["step_time_s"]]
    auto = [row["noisy_step_times_s"] for row in rows if row["method"] == AUTO]
    if not parallel or not auto:
        return dict.fromkeys(names)
    slow = min(parallel, key=lambda row: float(row["step_time_s"]))["noisy_step_times_s"]
    gains = sorted(before / now for before, now in zip(slow, auto[0], strict=True))
    return dict(zip(names, (gains[0], gains[-1]), strict=True)) if gains else dict.fromkeys(names)


def shown(value: float | None) -> str:
    """Three or four digits."""
    if value is None:
        return "OOM"
    return f"{value:.4f}" if value < 1.0 else f"{value:.3f}"


def cell(name: str, found: Mapping[str, float | None]) -> str:
    """One number of a line; a gain over what does not fit is none."""
    is_gain = name.startswith("over ")
    return "-" if is_gain and found.get(name) is None else shown(found.get(name))


def geometric_mean(values: Iterable[float | None]) -> float:
    """Of those that there are."""
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def table(
    pairs: Mapping[Pair, list[Row]], beside: Mapping[Pair, list[Row]], cluster: str
) -> Iterable[str]:
    """Lines of one cluster in Markdown, and the means under them."""
    lines = {key: columns(rows) for key, rows in pairs.items() if key[1] == cluster}
    then = {key: columns(rows) for key, rows in beside.items() if key in lines}
    names = list(next(iter(lines.values())))
    yield f"### {cluster}\n"
    yield "| model, batch | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for key, found in lines.items():
        cells = []
        for name in names:
            before = then.get(key)
            old = f" ({cell(name, before)})" if before is not None else ""
            cells.append(f"{cell(name, found)}{old}")
        yield f"| {key[0]}, {key[2]} | " + " | ".join(cells) + " |"
    for name in GAINS:
        both = [key for key in lines if lines[key][name]]
        now = geometric_mean(lines[key][name] for key in both)
        text = f"Geometric mean {name}: **{now:.3f}x** ({len(both)} models)"
        was = [then[key][name] for key in both if key in then]
        if was:
            text += f", before {geometric_mean(was):.3f}x ({len(was)})"
        yield f"\n{text}."


def table_of_gains(
    pairs: Mapping[Pair, list[Row]], beside: Mapping[Pair, list[Row]]
) -> Iterable[str]:
    """Lines of all clusters beside each other in Markdown, with the gains alone."""
    now = {key: columns(rows) for key, rows in pairs.items()}
    then = {key: columns(rows) for key, rows in beside.items() if key in now}
    clusters = list(dict.fromkeys(key[1] for key in now))
    yield "| model, batch | " + " | ".join(clusters) + " |"
    yield "|---" * (len(clusters) + 1) + "|"

    def line(first: str, wanted: list[list[Pair]]) -> str:
        return f"| {first} | " + " | ".join(mean(keys) for keys in wanted) + " |"

    def mean(keys: list[Pair]) -> str:
        text = gains_of([now[key] for key in keys]) if keys else ""
        was = [then[key] for key in keys if key in then]
        return f"{text} ({gains_of(was)})" if was else text

    for name, batch in dict.fromkeys((key[0], key[2]) for key in now):
        own = [key for key in now if (key[0], key[2]) == (name, batch)]
        yield line(f"{name}, {batch}", [[k for k in own if k[1] == each] for each in clusters])
    yield line("geometric mean", [[k for k in now if k[1] == each] for each in clusters])


def gains_of(found: list[dict[str, float | None]]) -> str:
    """Geometric means over the four and over the reference."""
    means = [geometric_mean(each[name] for each in found) for name in GAINS]
    return " / ".join("-" if math.isnan(value) else f"{value:.2f}" for value in means)


def as_json(pairs: Mapping[Pair, list[Row]]) -> list[dict[str, Any]]:
    """What the lines of the tables say, with all digits."""
    names = ("model", "cluster", "batch_size", "step_barrier")
    return [dict(zip(names, key, strict=True)) | columns(rows) for key, rows in pairs.items()]


def main() -> None:
    """Make what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS, help="model or model:batch, with commas")
    parser.add_argument("--clusters", default=CLUSTERS)
    parser.add_argument("--methods", default="auto")
    parser.add_argument("--budget", default="300e")
    parser.add_argument("--calibration", help="what prices kernels, as in a cluster file")
    parser.add_argument("--no-step-barrier", action="store_true")
    parser.add_argument("--rows", type=Path, default=Path("gains.jsonl"), help="kept here")
    parser.add_argument("--beside", type=Path, help="rows of another commit")
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    parser.add_argument("--gains", action="store_true", help="one table, with the gains alone")
    parser.add_argument("--json", action="store_true", help="numbers, now and then, as JSON")
    arguments = parser.parse_args()
    make_rows(arguments.models.split(","), arguments.clusters.split(","), arguments)
    pairs, beside = read_rows(arguments.rows), read_rows(arguments.beside)
    if arguments.json:
        print(json.dumps({"now": as_json(pairs), "then": as_json(beside)}))
        return
    if arguments.gains:
        print("\n".join(table_of_gains(pairs, beside)))
        return
    for cluster in dict.fromkeys(key[1] for key in pairs):
        print("\n".join(table(pairs, beside, cluster)) + "\n")


if __name__ == "__main__":
    main()
