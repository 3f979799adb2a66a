"""What the command line lists, its version, and what shells complete."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import heterog
import heterog.agents.planners
from heterog import cli
from heterog.agents.planners import default_methods
from heterog.cli import completion
from heterog.cluster import Cluster, device_type_names, preset_names
from heterog.cluster.catalog import intra_link, network_kind
from heterog.export import TARGETS
from heterog.methods.built_in import METHODS
from heterog.runtime.ranks.testbed import shipped_testbeds
from heterog.search.plan import BEST
from heterog.simulator.engine import Order
from heterog.zoo import names

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["heterog", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    return call


def document(run: Run, command: str) -> Any:
    return json.loads(run(command, "--json"))


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version") == f"heterog {heterog.__version__}\n"


def test_methods_lists_what_is_registered(run: Run) -> None:
    """The planners themselves are slow to import, so the table could go its own way."""
    assert {note.name: note.stage for note in METHODS} == {"auto": "all"} | {
        planner.name: planner.stage for planner in default_methods()
    }
    assert [row["name"] for row in document(run, "methods")] == [note.name for note in METHODS]
    text = run("methods")
    assert all(note.name in text for note in METHODS)
    assert max(map(len, text.splitlines())) <= 100


def test_devices_lists_the_catalogue_with_sheets(run: Run) -> None:
    rows = {row["name"]: row for row in document(run, "devices")}
    assert tuple(rows) == device_type_names()
    assert rows["A100-80GB"]["tf32_flops_per_s"] == 156e12
    assert rows["A100-80GB"]["peak_flops_per_s"]["bfloat16"] == 312e12
    assert rows["MI300X"]["vendor"] == "AMD"
    text = run("devices")
    for row in rows.values():
        assert row["name"] in text
        assert row["source"].split(";")[0][:60] in text


def test_links_lists_names_that_cluster_files_take(run: Run) -> None:
    found = document(run, "links")
    for row in found["intra"]:
        for name in (row["name"], *row["aliases"]):
            assert intra_link(name).bandwidth_bytes_per_s == row["bandwidth_bytes_per_s"]
    for row in found["nic"]:
        for name in (row["name"], *row["aliases"]):
            assert network_kind(name).line_rate_bytes_per_s == row["line_rate_bytes_per_s"]
    text = run("links")
    assert all(row["name"] in text for row in (*found["intra"], *found["nic"]))


def test_clusters_lists_presets_and_testbeds(run: Run) -> None:
    rows = document(run, "clusters")
    assert [row["name"] for row in rows] == [*preset_names(), *shipped_testbeds()]
    clusters = [Cluster.from_dict(row) for row in rows]
    throttled = [each.name for each in clusters if each.hosts[0].cpu_quota is not None]
    assert throttled == list(shipped_testbeds())
    assert all(name in run("clusters") for name in (*preset_names(), *shipped_testbeds()))


def test_an_unknown_cluster_may_be_meant_as_a_testbed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["heterog", "plan", "vgg19", "--cluster", "skew_bth"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "did you mean 'skew_both'" in capsys.readouterr().err


def test_completion_offers_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vgg_mine.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "lab.yaml").touch()
    (tmp_path / "folder" / "notes.txt").touch()
    assert completion.models("") == [*names(), "folder/", "vgg_mine.py"]
    assert completion.models("vgg") == [
        *(n for n in names() if n.startswith("vgg")),
        "vgg_mine.py",
    ]
    assert completion.clusters("skew_b") == ["skew_both"]
    assert completion.clusters("paper_1") == ["paper_12gpu"]
    assert completion.clusters("folder/") == ["folder/lab.yaml"]
    assert completion.clusters("nowhere/") == []
    assert completion.methods("cp_") == ["cp_ps", "cp_ar"]
    assert completion.several(completion.methods)("cp_ps,cp_") == ["cp_ps,cp_ar"]
    assert completion.policies("h") == ["heldout"]
    assert completion.TARGETS == tuple(TARGETS)
    assert set(completion.ORDERS) == {BEST, *(order.name.lower() for order in Order)}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["plan", "bert_b"], ["bert_base"]),
        (["plan", "vgg19", "--cluster", "paper_1"], ["paper_12gpu"]),
        (["plan", "vgg19", "--method", "ddp,local"], ["ddp,local_search"]),
        (["export", "plan.json", "--to", "kub"], ["kubernetes"]),
        (["evaluate", "held"], ["heldout"]),
    ],
)
def test_a_shell_gets_completions_without_waiting_for_torch(
    words: list[str], offered: list[str], tmp_path: Path
) -> None:
    blocked = "import sys; sys.modules.update(torch=None, numba=None); sys.argv = ['heterog']; "
    found = subprocess.run(
        [sys.executable, "-c", f"{blocked}from heterog.cli import main; main()"],
        env=os.environ
        | {
            "_HETEROG_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["heterog", *words]),
            "COMP_CWORD": str(len(words)),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split() == offered, found.stderr
