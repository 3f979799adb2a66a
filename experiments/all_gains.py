"""All tables of gains in ``docs/notebook/searches.md`` again, in pieces that may be stopped.

    python experiments/all_gains.py --folder gains --minutes 60
    python experiments/all_gains.py --folder gains --summary   # what is there so far
    python experiments/all_gains.py --folder gains --summary --beside before   # of another commit

Sections, most wanted first: ``paper`` (eight models on 2 V100 + 4 GTX 1080 Ti + 2 P100, two
networks), ``large`` (HeteroG's six large settings), ``free`` (without a step barrier), ``order``
(what the order of tasks is worth), ``rates`` (the network at 0.2, 0.5 and 1.0 of its line rate),
``presets`` (five models on four other clusters). Rows are kept pair by pair in one file for each
section: a run that was stopped, or whose minutes are over, goes on where it ended. Budgets are in
evaluations and the same for every method of a section, so that rows are the same on any machine.
"""

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gain_tables
import order_gain
from search_gain import LARGE

from heterog.agents.sources import captured
from heterog.methods.planner import Budget

PRESETS = "poplar_v100_t4,rtx_mixed,a100_v100_16,hap_v100_p100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Pairs of models and clusters that are compared with one budget.

    Attributes:
        models: names, with ``:batch`` where it is not the default.
        clusters: names, with ``@rate`` where it is not the default.
        budget: of each method, in evaluations.
        step_barrier: whether a step ends with all updates.
    """

    models: str
    clusters: str
    budget: str
    step_barrier: bool = True


SECTIONS = {
    "paper": Section(models=gain_tables.MODELS, clusters=gain_tables.CLUSTERS, budget="200e"),
    "large": Section(
        models=",".join(f"{model}:{batch}" for model, batch in LARGE),
        clusters="paper_8gpu",
        budget="300e",
    ),
    "free": Section(
        models=gain_tables.MODELS, clusters="paper_8gpu", budget="30e", step_barrier=False
    ),
    "order": Section(models=gain_tables.MODELS, clusters=order_gain.CLUSTER, budget="30e"),
    "rates": Section(
        models=gain_tables.MODELS.replace("nasnet_large,", ""),
        clusters="paper_8gpu@0.2,paper_8gpu@0.5,paper_8gpu@1.0",
        budget="200e",
    ),
    "presets": Section(
        models="bert_base,vgg19,gpt2,bert_moe,llama_1b", clusters=PRESETS, budget="50e"
    ),
}


def asked(section: Section, rows: Path, graphs: Path, calibration: str | None) -> Namespace:
    """A section as ``gain_tables`` is asked."""
    return Namespace(
        rows=rows,
        graphs=graphs,
        methods="auto",
        budget=section.budget,
        calibration=calibration,
        no_step_barrier=not section.step_barrier,
    )


def pieces(name: str, folder: Path, calibration: str | None) -> Iterator[None]:
    """Make a section, one pair at a time."""
    section, rows, graphs = SECTIONS[name], folder / f"{name}.jsonl", folder / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    for model in section.models.split(","):
        if name == "order":
            make_order(model, Budget.parse(section.budget), rows, graphs, calibration)
            yield
            continue
        for cluster in section.clusters.split(","):
            question = asked(section, rows, graphs, calibration)
            gain_tables.make_rows([model], [cluster], question)
            yield


def make_order(
    model: str, budget: Budget, path: Path, graphs: Path, calibration: str | None
) -> None:
    """What the order is worth to one model, with and without a barrier, unless it is there."""
    if model in {row["model"] for row in lines(path)}:
        return
    graph = captured(model, graphs, None)
    rows = [
        row
        for step_barrier in (True, False)
        for row in order_gain.measure(
            graph, budget, step_barrier=step_barrier, calibration=calibration
        )
    ]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def order_table(path: Path) -> Iterator[str]:
    """Gains of the best order over first come, first served, in Markdown."""
    rows = lines(path)
    columns = list(dict.fromkeys((row["strategy"], row["step_barrier"]) for row in rows))
    names = [f"{name}{'' if barrier else ', no barrier'}" for name, barrier in columns]
    yield "| model | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {(r["strategy"], r["step_barrier"]): r for r in rows if r["model"] == model}
        cells = []
        for column in columns:
            fifo, best = own[column]["fifo_s"], own[column]["best_s"]
            cells.append(f"{fifo / best:.3f}" if fifo and best else "-")
        yield f"| {model} | " + " | ".join(cells) + " |"


def summary(folder: Path, beside: Path | None) -> Iterator[str]:
    """Every section that is there, as ``gain_tables`` prints it."""
    for name, section in SECTIONS.items():
        path = folder / f"{name}.jsonl"
        if not path.exists():
            continue
        yield f"## {name}, {section.budget} for each method\n"
        if name == "order":
            yield from order_table(path)
            continue
        now = gain_tables.read_rows(path)
        then = gain_tables.read_rows(beside / path.name if beside is not None else None)
        for cluster in dict.fromkeys(key[1] for key in now):
            yield from gain_tables.table(now, then, cluster)
            yield ""


def main() -> None:
    """Make what is missing while there is time, or print what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("gains"), help="rows are kept here")
    parser.add_argument("--minutes", type=float, default=60.0, help="no pair begins after that")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--calibration", help="what prices kernels, as in a cluster file")
    parser.add_argument("--summary", action="store_true", help="print what is there, make nothing")
    parser.add_argument("--beside", type=Path, help="with --summary: the folder of another commit")
    arguments = parser.parse_args()
    if arguments.summary:
        print("\n".join(summary(arguments.folder, arguments.beside)))
        return
    end = time.monotonic() + 60.0 * arguments.minutes
    for name in arguments.sections.split(","):
        for _ in pieces(name, arguments.folder, arguments.calibration):
            if time.monotonic() > end:
                print(f"time is over in section {name}; call again to go on", file=sys.stderr)
                return
    print("everything is there", file=sys.stderr)


if __name__ == "__main__":
    main()
