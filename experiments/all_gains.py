"""Makes all tables of gains in ``docs/notebook/searches.md`` again; a run may be stopped.

    python experiments/all_gains.py --folder gains --minutes 60
    python experiments/all_gains.py --folder gains --summary   # what is there so far

Sections, most wanted first: ``paper`` (eight models on 2 V100 + 4 GTX 1080 Ti + 2 P100, two
networks), ``large`` (HeteroG's six large settings), ``rates`` (the network at 0.2, 0.5 and 1.0 of
its line rate), ``presets`` (five models on four other clusters). Rows are kept pair by pair in one
file for each section, so a run that was stopped, or whose minutes are over, resumes where it
ended. Budgets are in evaluations and the same for every method of a section, so that rows are the
same on any machine.

Rows are those of ``heterog compare --methods auto``: each search has the whole budget, and the
referee judges all of them. ``CLUSTER@0.35`` is a cluster whose NICs reach that part of their line
rate. ``--calibration roofline`` prices kernels from data sheets, as tables did before there were
device models.
"""

import math
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rows import keep_row, option, plain_parser, progress, read_rows

from heterog.agents.planners import default_methods
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.methods.planner import Budget
from heterog.methods.registry import AUTO
from heterog.search.portfolio import compare_methods
from heterog.search.request import Request
from heterog.search.rows import DATA_PARALLEL, REFERENCES

MODELS = (
    "vgg19,resnet200,inception_v3,mobilenet_v2,nasnet_large,transformer_6l,bert_large_24l,"
    "xlnet_large_24l"
)
LARGE = (
    "resnet200:384,transformer_24l:120,bert_large_24l:96,xlnet_large_24l:96,bert_large_48l:24,"
    "xlnet_large_48l:24"
)
PAPER = "paper_8gpu"
PRESETS = "poplar_v100_t4,rtx_mixed,a100_v100_16,hap_v100_p100"
FOUR = ("ev_ps", "ev_ar", "cp_ps", "cp_ar")
GAINS = ("over the four", "over reference")
"""The reference is the better of ``best_ddp`` and ``tuned_uniform``."""
SHOWN = (
    "ddp", "best_ddp", "tuned_uniform", "megatron_grid", "model_parallel", "deeppool", "pipeline",
    "poplar", "two_segment", "hap", "local_search", "agent", "agent+search",
)  # fmt: skip

Row = dict[str, Any]
Pair = tuple[str, str, int]
"""Model, cluster and batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Pairs of models and clusters that are compared with one budget.

    Attributes:
        models: names, with ``:batch`` where it is not the default.
        clusters: names, with ``@rate`` where it is not the default.
        budget: of each method, in evaluations.
    """

    models: str
    clusters: str
    budget: str


SECTIONS = {
    "paper": Section(models=MODELS, clusters=f"{PAPER},paper_8gpu_net035", budget="200e"),
    "large": Section(models=LARGE, clusters=PAPER, budget="300e"),
    "rates": Section(
        models=MODELS.replace("nasnet_large,", ""),
        clusters="paper_8gpu@0.2,paper_8gpu@0.5,paper_8gpu@1.0",
        budget="200e",
    ),
    "presets": Section(
        models="bert_base,vgg19,gpt2,bert_moe,llama_1b", clusters=PRESETS, budget="50e"
    ),
}


def graph_of(name: str, folder: Path) -> OpGraph:
    """The graph of a model or ``model:batch``, captured once."""
    model, _, batch = name.partition(":")
    return captured(model, folder, int(batch) if batch else None)


def cluster_of(name: str, calibration: str | None) -> Cluster:
    """A cluster by its name, maybe with ``@`` and the part of the line rate."""
    plain, _, efficiency = name.partition("@")
    cluster = Cluster.load(plain)
    if calibration is not None:
        cluster = replace(cluster, calibration=calibration)
    return replace(cluster, efficiency=float(efficiency)) if efficiency else cluster


def pairs_of(path: Path | None) -> dict[Pair, list[Row]]:
    """Rows of a file by pair; nothing if there is no such file."""
    return grouped(
        ((row["model"], row["cluster"], row["batch_size"]), row) for row in read_rows(path)
    )


def compare(graph: OpGraph, named: str, cluster: Cluster, section: Section, file: Path) -> None:
    """Compare all methods on a pair, unless it is in the file."""
    if (graph.name, named, graph.batch_size) in pairs_of(file):
        return
    result = compare_methods(
        Request(
            graph=graph,
            cluster=cluster,
            methods=(AUTO,),
            known=default_methods(),
            budget=Budget.parse(section.budget),
        )
    )
    rows = [row | {"cluster": named} for row in result.to_dicts()]
    for row in rows:
        keep_row(file, row)
    best = best_seconds(rows, {row["method"] for row in rows})
    progress(f"{graph.name} on {named}: {shown(best)} s")


def best_seconds(rows: Iterable[Row], methods: Collection[str]) -> float | None:
    """The shortest step of some methods; ``None`` if none fits."""
    times = [r["step_time_s"] for r in rows if r["method"] in methods and r["step_time_s"]]
    return min(times, default=None)


def columns(rows: list[Row]) -> dict[str, float | None]:
    """What a line of the table says about a pair."""
    every = {row["method"] for row in rows}
    auto = best_seconds(rows, every)
    four, reference = best_seconds(rows, FOUR), best_seconds(rows, REFERENCES)
    return {
        "best of four": four,
        **{name: best_seconds(rows, (name,)) for name in SHOWN if name in every},
        "auto": auto,
        "over the four": four / auto if four and auto else None,
        "over reference": reference / auto if reference and auto else None,
        **draws(rows),
        "bound": min(row["lower_bound_s"] for row in rows),
    }


def draws(rows: list[Row]) -> dict[str, float | None]:
    """Least and largest gain over the reference when speeds are not as predicted."""
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
    """One number of a line; there is no gain over a reference that does not fit."""
    is_gain = name.startswith("over ")
    return "-" if is_gain and found.get(name) is None else shown(found.get(name))


def table(pairs: Mapping[Pair, list[Row]], cluster: str) -> Iterable[str]:
    """Lines of one cluster in Markdown, and the means under them."""
    lines = {key: columns(rows) for key, rows in pairs.items() if key[1] == cluster}
    names = list(next(iter(lines.values())))
    yield f"### {cluster}\n"
    yield "| model, batch | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for key, found in lines.items():
        cells = [cell(name, found) for name in names]
        yield f"| {key[0]}, {key[2]} | " + " | ".join(cells) + " |"
    for name in GAINS:
        gains = [gain for found in lines.values() if (gain := found[name])]
        mean = statistics.geometric_mean(gains) if gains else math.nan
        yield f"\nGeometric mean {name}: **{mean:.3f}x** ({len(gains)} models)."


def summary(folder: Path) -> Iterator[str]:
    """Every section that is there, as tables in Markdown."""
    for name, section in SECTIONS.items():
        path = folder / f"{name}.jsonl"
        if not path.exists():
            continue
        yield f"## {name}, {section.budget} for each method\n"
        now = pairs_of(path)
        for cluster in dict.fromkeys(key[1] for key in now):
            yield from table(now, cluster)
            yield ""


def main() -> None:
    """Make missing rows while there is time, or print the rows that exist."""
    arguments = plain_parser(
        __doc__,
        option("--folder", type=Path, default=Path("gains"), help="rows are kept here"),
        option("--minutes", type=float, default=60.0, help="no pair begins after that"),
        option("--sections", default=",".join(SECTIONS)),
        option("--calibration", help="what prices kernels, as in a cluster file"),
        option("--summary", action="store_true", help="print what is there, make nothing"),
    ).parse_args()
    if arguments.summary:
        print("\n".join(summary(arguments.folder)))
        return
    end = time.monotonic() + 60.0 * arguments.minutes
    graphs = arguments.folder / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    for name in arguments.sections.split(","):
        section, file = SECTIONS[name], arguments.folder / f"{name}.jsonl"
        for model, named in product(section.models.split(","), section.clusters.split(",")):
            cluster = cluster_of(named, arguments.calibration)
            compare(graph_of(model, graphs), named, cluster, section, file)
            if time.monotonic() > end:
                progress(f"time is over in section {name}; call again to go on")
                return
    progress("everything is there")


if __name__ == "__main__":
    main()
