"""The library of solved plans: what is carried over, and that no file in it can do harm."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cli.plan import library_folder
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.search.library.store import (
    MOST_ENTRY_BYTES,
    MOST_SEEDS,
    EntryRecord,
    PlanLibrary,
    adapted,
    described,
    distance,
    entry_of,
)
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import one_in

METHODS = ("cp_ar", "pipeline", "local_search")


@lru_cache
def graph(width: int = 512, depth: int = 4, batch: int = 64) -> OpGraph:
    def model() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        return nn.Sequential(*layers, nn.Linear(width, 8))

    example = (torch.zeros(batch, width), torch.zeros(batch, 8))
    return capture(Workload(model, example, functional.mse_loss, torch.optim.Adam, name="mlp"))


@lru_cache
def evaluator(cluster: str = "paper_8gpu", **sizes: int) -> Evaluator:
    return Evaluator(graph(**sizes), Cluster.load(cluster))


@lru_cache
def solved(method: str = "local_search") -> Plan:
    methods = (method,)
    return make_plan(graph(), Cluster.load("paper_8gpu"), methods=methods, budget="150e")


def document(plan: Plan | None = None) -> dict[str, Any]:
    found = entry_of(plan or solved(), evaluator())
    assert found is not None
    # As a file has it.
    read: dict[str, Any] = json.loads(json.dumps(found))
    return read


def record(plan: Plan | None = None) -> EntryRecord:
    return EntryRecord.model_validate(document(plan))


def test_the_same_case_gets_the_same_plan(tmp_path: Path) -> None:
    library = PlanLibrary(tmp_path / "new" / "folder")
    assert library.look_up(evaluator()).seeds is None
    assert library.keep(solved(), evaluator()) == ""
    found = library.look_up(evaluator())
    assert found.num_plans == 1
    assert found.seeds is not None
    assert found.seeds.candidates[0].strategy == solved().strategy
    again = make_plan(
        graph(), Cluster.load("paper_8gpu"), methods=METHODS, budget="3e", seeds=found.seeds
    )
    known_s = solved().step_time_s
    assert again.step_time_s is not None
    assert known_s is not None
    assert again.step_time_s <= known_s * (1.0 + 1e-9)


@one_in(2)
@pytest.mark.parametrize("method", ["local_search", "pipeline", "cp_ps", "megatron_grid", "hap"])
@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [
        ("paper_8gpu", {"width": 256}),
        ("paper_8gpu", {"depth": 7}),
        ("paper_8gpu", {"batch": 5}),
        ("paper_12gpu", {}),
        ("poplar_v100_t4", {}),
        ("rtx_mixed", {"depth": 3, "batch": 96}),
    ],
)
def test_what_is_adapted_is_legal_and_runs(
    method: str, cluster: str, sizes: dict[str, int]
) -> None:
    there = evaluator(cluster, **sizes)
    found = adapted(record(solved(method)), there, step_barrier=True)
    if found is None:  # rules of ops and teams cannot always be carried over
        known = solved(method).strategy
        assert known.op_rules or any(each.teams or each.parts for each in known.decisions)
        return
    assert 0.0 < there.referee(found, Order.FIFO).step_time_s < float("inf")


def test_one_device_and_many() -> None:
    for width in (1, 16):
        there = Evaluator(graph(), cluster_of((100.0, ["V100-16GB"] * width)))
        found = adapted(record(solved("cp_ar")), there, step_barrier=True)
        assert found is not None
        assert len(found.decisions[0].devices) == width


def test_alike_cases_are_near_and_others_far() -> None:
    here, cluster = described(evaluator()), Cluster.load("paper_8gpu")
    assert distance(record(), here, cluster) == 0.0
    wider = described(evaluator(width=1024))
    assert 0.0 < distance(record(), wider, cluster)
    other = here | {"ops": "0" * 16, "kinds": {"conv": 1.0}}
    assert distance(record(), other, cluster) > distance(record(), wider, cluster) / 10.0


def _deep(value: int) -> object:
    found: object = 0
    for _ in range(value):
        found = [found]
    return found


HOSTILE: list[dict[str, object]] = [
    {"strategy": {}},
    {"strategy": {"decisions": _deep(50)}},
    {"strategy.micro_batches": [[1] * 64] + [[0] * 64] * 7},
    {"strategy.micro_batches": [[1] * 100_000] * 8},
    {"strategy.homes": [2**31 - 1] * 10},
    {"strategy.homes": []},
    {"strategy.groups": [0]},
    {"strategy.groups": [10**6] * 5},
    {"strategy.decisions": []},
    {"strategy.decisions": [{"devices": [7, 3], "shares": [1, 1], "sync": "ring", "slices": []}]},
    {"strategy.decisions": [{"devices": [0], "shares": [0], "sync": "ring", "slices": []}]},
    {"devices": [{"host": 0, "type": "x", "samples_per_s": 1e-300}]},
    {"devices": [{"host": 2**31 - 1, "type": "x", "samples_per_s": 1.0}] * 8},
    {"group_work": [0.0] * 400},
    {"step_time_s": -1.0},
    {"order": "../../etc/passwd"},
    {"model": "a\x1b[31mb"},
    {"graph": "../" * 8},
    {"unknown": 1},
]


@pytest.mark.parametrize("change", HOSTILE, ids=[str(each)[:40] for each in HOSTILE])
def test_a_hostile_file_starts_nothing_and_breaks_nothing(
    change: dict[str, object], tmp_path: Path
) -> None:
    bad = document()
    bad["graph"], bad["strategy"]["graph"] = "0" * 16, "0" * 16  # so that it is adapted
    for place, value in change.items():
        *outer, last = place.split(".")
        inner = bad
        for name in outer:
            inner = inner[name]
        inner[last] = value
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    found = PlanLibrary(tmp_path).look_up(evaluator())
    for candidate in () if found.seeds is None else found.seeds.candidates:
        candidate.strategy.check(graph(), evaluator().cluster)


def test_damaged_files_are_passed_over(tmp_path: Path) -> None:
    library = PlanLibrary(tmp_path)
    library.keep(solved(), evaluator())
    (whole,) = tmp_path.glob("*.json")
    (tmp_path / "cut.json").write_bytes(whole.read_bytes()[:500])
    (tmp_path / "huge.json").write_bytes(b" " * (MOST_ENTRY_BYTES + 1))
    (tmp_path / "bytes.json").write_bytes(os.urandom(1000))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.json")
    found = library.look_up(evaluator())
    assert (found.num_plans, found.warning) == (1, "")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    library = PlanLibrary(tmp_path, most_entries=3)
    for number in range(5):
        name = tmp_path / f"{number}.json"
        name.write_text(json.dumps(document()))
        os.utime(name, (number, number))
    (tmp_path / "other.txt").write_text("not ours")
    library.keep(solved(), evaluator())
    left = {path.name for path in tmp_path.glob("*.json")}
    assert left >= {"4.json", "3.json"}
    assert len(left) == 3
    assert (tmp_path / "other.txt").exists()


def test_few_plans_are_handed_over_the_nearest_first(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.json").write_text(json.dumps(document()))
    assert PlanLibrary(tmp_path).look_up(evaluator()).num_plans == MOST_SEEDS


def test_a_worse_plan_does_not_replace_a_better_one(tmp_path: Path) -> None:
    library, plan = PlanLibrary(tmp_path), solved()
    assert plan.step_time_s is not None
    library.keep(plan, evaluator())
    library.keep(replace(plan, step_time_s=2.0 * plan.step_time_s), evaluator())
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["step_time_s"] == plan.step_time_s
    library.keep(replace(plan, step_time_s=0.5 * plan.step_time_s), evaluator())
    assert json.loads(path.read_text())["step_time_s"] == 0.5 * plan.step_time_s


def test_writers_beside_each_other_leave_whole_files(tmp_path: Path) -> None:
    library, plan = PlanLibrary(tmp_path, most_entries=2), solved()
    assert plan.step_time_s is not None
    plans = [replace(plan, step_time_s=plan.step_time_s / (1 + n)) for n in range(12)]
    with ThreadPoolExecutor(4) as crew:
        said = list(crew.map(lambda each: library.keep(each, evaluator()), plans))
    assert said == [""] * 12
    assert library.look_up(evaluator()).num_plans == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_folder_that_cannot_be_used_is_one_warning(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for folder in (taken, taken / "below", Path("/proc/nothing")):
        library = PlanLibrary(folder)
        assert library.look_up(evaluator()).seeds is None
        said = library.keep(solved(), evaluator())
        assert said.startswith("the plan is not kept in the library: ")
        assert "\n" not in said


def test_a_full_disk_is_one_warning() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    assert PlanLibrary(full).keep(solved(), evaluator()).startswith("the plan is not kept")


def test_where_the_library_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert library_folder() is None  # in tests
    monkeypatch.setenv("HETEROG_LIBRARY", str(tmp_path))
    assert library_folder() == tmp_path
    monkeypatch.delenv("HETEROG_LIBRARY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library_folder() == tmp_path / "heterog" / "library"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library_folder() == tmp_path / ".cache" / "heterog" / "library"
