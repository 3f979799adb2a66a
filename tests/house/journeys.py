"""Follows the code as it runs: ``python -m tests.house.journeys [--json] [--stays] [--pairs]``.

A journey is one run of the package: a strategy to its step time, a graph to a plan, a plan to a
step on a rank, a policy through a step of its training. Every call is written down in the order in
which it first happens, each pair of caller and callee once, as somebody reading would follow them.
A *stay* is a run of calls inside one file (or folder). A *return* is a stay in a file (or folder)
that was left before: a path that never turns back has none.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterog.cluster import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.graph.workload import Workload

PACKAGE = Path(__file__).parents[2] / "heterog"
CLUSTER = "paper_8gpu"
MOST_PAIRS = 40
ALONE = """
schema_version: 1
name: alone
hosts:
  - name: a
    devices: [{type: CPU}]
    nic: {line_rate: 1 Gbit/s}
"""


@dataclass(slots=True)
class Walk:
    """The calls of a journey.

    Attributes:
        files: File of each callee, relative to the package; a pair of caller and callee is once.
    """

    files: list[str] = field(default_factory=list)
    _seen: set[tuple[CodeType, CodeType]] = field(default_factory=set)

    def notice(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; the function for ``sys.setprofile``."""
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None or code.co_name.startswith("<"):
            return
        pair = caller.f_code, code
        if pair in self._seen or not code.co_filename.startswith(str(PACKAGE)):
            return
        self._seen.add(pair)
        self.files.append(str(Path(code.co_filename).relative_to(PACKAGE)))


@contextmanager
def walking() -> Iterator[Walk]:
    """Write down all calls of the package while the block runs."""
    walk = Walk()
    sys.setprofile(walk.notice)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def stays_of(places: Sequence[str]) -> list[str]:
    """The places without repetitions in a row."""
    return [place for place, _ in groupby(places)]


def returns_of(places: Sequence[str]) -> int:
    """Number of stays in a place that was left before."""
    stays = stays_of(places)
    return len(stays) - len(set(stays))


def pairs_of(places: Sequence[str]) -> Counter[tuple[str, str]]:
    """How many returns go from one place to another, in either direction."""
    found, seen = Counter[tuple[str, str]](), set[str]()
    for left, entered in pairwise(stays_of(places)):
        seen.add(left)
        if entered in seen:
            found[min(left, entered), max(left, entered)] += 1
    return found


def folder_of(file: str) -> str:
    """The package's folder that a file lies in."""
    return file.split("/")[0]


# --- the journeys --------------------------------------------------------------------------------


def _workload() -> "Workload":
    import torch
    from torch import nn

    import heterog

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batch = (torch.zeros(8, 16), torch.zeros(8, dtype=torch.long))
    return heterog.Workload(model, batch, nn.functional.cross_entropy, torch.optim.AdamW)


def _asked() -> "tuple[OpGraph, Cluster]":
    from heterog.cluster import Cluster
    from heterog.graph.capture import capture_step

    return capture_step(_workload()).graph, Cluster.load(CLUSTER)


def evaluation() -> Walk:
    """A strategy to its step time."""
    from heterog import api
    from heterog.simulator.evaluator import Evaluator

    graph, cluster = _asked()
    strategy = api.plan(graph, cluster, method="cp_ar", budget="5e").strategy
    evaluator = Evaluator(graph, cluster)
    with walking() as walk:
        evaluator.evaluate(strategy)
    return walk


def planning() -> Walk:
    """A graph to a plan, by all methods."""
    from heterog.methods.planner import Budget
    from heterog.search.plan import make_plan
    from heterog.search.request import Request

    graph, cluster = _asked()
    with walking() as walk:
        make_plan(Request(graph=graph, cluster=cluster, budget=Budget(evaluations=40)))
    return walk


def deployment() -> Walk:
    """A plan's file to a step on one rank."""
    import torch

    import heterog
    from heterog.runtime.rank import join

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29731")
    workload = _workload()
    with tempfile.TemporaryDirectory() as folder:
        cluster, path = Path(folder) / "alone.yaml", Path(folder) / "plan.json"
        cluster.write_text(ALONE)
        heterog.plan(workload, heterog.Cluster.load(cluster), method="cp_ar", budget="5e").save(
            path
        )
        join(30.0)
        with walking() as walk:
            step = heterog.deploy(workload, heterog.load_plan(path))
            step((torch.zeros(8, 16), torch.zeros(8, dtype=torch.long)))
        step.close()
    return walk


def learning() -> Walk:
    """A policy through two steps of its training."""
    from heterog.agents.config import Algorithm, PolicyConfig, TrainingConfig
    from heterog.agents.sources import PairSource
    from heterog.agents.training import Trainer

    graph, cluster = _asked()
    source = PairSource(graphs=(graph,), clusters=(cluster,))
    settings = TrainingConfig(
        algorithm=Algorithm.REINFORCE,
        num_pairs=1,
        num_validation=1,
        search_evaluations=10,
        num_steps=2,
        pairs_per_step=1,
        samples_per_pair=2,
        check_every=2,
    )
    with walking() as walk:
        Trainer(source, settings, PolicyConfig()).run()
    return walk


JOURNEYS: dict[str, Callable[[], Walk]] = {
    each.__name__: each for each in (evaluation, planning, deployment, learning)
}


def main() -> None:
    """Walk all journeys and print what they come to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--stays", action="store_true", help="also every stay, in order")
    parser.add_argument(
        "--pairs", action="store_true", help="also the files between which one goes"
    )
    asked = parser.parse_args()
    rows = []
    for name, journey in JOURNEYS.items():
        files = journey().files
        folders = [folder_of(each) for each in files]
        row = {
            "journey": name,
            "calls": len(files),
            "files": len(set(files)),
            "returns_by_file": returns_of(files),
            "returns_by_folder": returns_of(folders),
        }
        rows.append(row)
        if not asked.json:
            print(*(f"{key}={value}" for key, value in row.items()))
            if asked.stays:
                print("  " + " ".join(stays_of(files)))
            for pair, count in pairs_of(files).most_common(MOST_PAIRS) if asked.pairs else ():
                print(f"  {count}", *pair)
    if asked.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
