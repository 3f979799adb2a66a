"""Loops that train as one process does, and loops that do not: a check tells them apart."""

import json
import math
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heterog import cli
from heterog.balance import checked as checked_rank
from heterog.balance import kept_files
from heterog.balance.check import (
    LATER,
    CheckRequest,
    ScriptError,
    Verdict,
    check,
    compare,
    differences,
)
from heterog.balance.checked import EPS, Noted
from heterog.balance.kept_files import KeptFiles, changed_files, times_of_files
from heterog.errors import HeterogError
from tests.thorough import few_of

pytestmark = pytest.mark.distributed
LOOPS = Path(__file__).parent / "checked_loops.py"
RIGHT = (
    *("plain", "lbfgs", "dropout", "autocast", "attention", "micro-batches", "noise", "noisy"),
    *("momentum", "clipping", "ragged", "stream", "plain, large batches"),
)
WRONG = {
    "advantages": "0 times NaN is NaN",
    "mixup": "samples mixed",
    "factor": ".item()",
    "hook": "a hook that clips",
    "disguised sum": "a sum where a mean is weighed",
    "beside": "in no model of a balancer",
    "running": "kept from step to step",
    "running, large batches": "kept from step to step",
    "level, large batches": "kept from step to step",
    "codebook": "Average over ranks what it writes",
    "pairs": "compared with each other",
    "weights": "weights or thresholds normalised",
    "threshold": "weights or thresholds normalised",
}


def checked(kind: str, **options: Any) -> Verdict:
    given: dict[str, Any] = {"script": str(LOOPS), "arguments": (kind,), **options}
    return check(CheckRequest(**given))


@pytest.mark.parametrize("kind", few_of(RIGHT, 8))
def test_right_loops_are_equal(kind: str) -> None:
    verdict = checked(kind)
    assert verdict.answer == "equal", verdict
    assert verdict.apart < verdict.allowed / 5


@pytest.mark.parametrize("kind", few_of(list(WRONG), 10))
def test_wrong_loops_differ_and_the_reason_is_told(kind: str) -> None:
    verdict = checked(kind)
    assert verdict.answer == "differs", verdict
    assert verdict.apart > 2 * verdict.allowed
    assert WRONG[kind] in verdict.advice
    assert verdict.noise is not None
    assert verdict.noise < 1e-5


def test_batch_norm_is_named_and_left_out() -> None:
    verdict = checked("batch norm")
    assert verdict.answer == "equal"
    assert "BatchNorm was left out" in verdict.notes[0]


@pytest.mark.parametrize("kind", ["partners", "own generator"])
def test_randomness_that_hides_the_answer_is_said(kind: str) -> None:
    """The partners of a mixed sample are drawn among those of the rank."""
    verdict = checked(kind)
    assert verdict.answer == "undecided", verdict
    assert verdict.noise is not None
    assert verdict.noise > verdict.apart / 3
    assert "random numbers" in verdict.advice


def test_a_script_that_ends_before_is_judged_by_what_it_has_done() -> None:
    verdict = checked("ends")
    assert verdict.answer == "equal"
    assert verdict.notes == ["The script has ended after 1 of 3 updates."]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("fails", {}, "1/0 .*checked_loops.py:[0-9]+: ArithmeticError: no step at all$"),
        ("exits", {}, "1/0 of each batch on its ranks: not today$"),
        ("exits silently", {}, "1/0 of each batch on its ranks: it exits and says nothing$"),
        ("hangs", {"timeout_s": 1.0}, "did not end within 1 s"),
        ("no updates", {}, r"no update with batches of a heterog.Balancer .*\(9 were taken\)"),
        ("plain", {"shares": ((1, 0), (8, 0))}, "divided batches of 8 samples alike, 8/0"),
        ("plain", {"shares": ((3, 1, 1),)}, "a whole number for each of 2 ranks"),
        ("leaves", {}, r"rank 0 has ended without saying what it has done: .* os._exit\(\)"),
        ("without a balancer", {}, r"no update with .*\(0 were taken\)"),
        ("plain", {"script": "nowhere.py"}, "no script 'nowhere.py'"),
        ("plain", {"script": stat.__file__}, r"no update with .*\(0 were taken\)"),
    ],
)
def test_what_cannot_be_checked_is_one_clear_line(
    kind: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(HeterogError, match=words):
        checked(kind, **options)


@pytest.mark.parametrize("kind", ["overwrites", "safetensors", "appends", "moves"])
def test_files_that_were_there_are_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "safetensors":
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "last.pt"
    kept.write_text("weights of a week")
    os.utime(kept, (0, 0))
    with pytest.raises(ScriptError, match=r"would change, move or remove last.pt"):
        checked(kind)
    assert kept.read_text() == "weights of a week"


def test_files_that_runs_make_are_theirs_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verdict = checked("overwrites", num_updates=2)  # both runs write it, by keywords
    assert verdict.answer == "equal"
    assert "The script has left files: last.pt." in verdict.notes


def test_a_changed_data_base_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite writes outside of Python, so that nothing stops the script."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs.db", "other.txt", ".hidden"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    notes = " ".join(checked("sqlite", num_updates=2).notes)
    assert "Files that were there have changed meanwhile: runs.db. The script" in notes


def test_of_many_files_only_those_that_were_looked_at_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files moved the place at which the limit is reached, so others seemed to be gone."""
    monkeypatch.setattr(kept_files, "_MOST_FILES", 4)
    for folder in ("b", "c"):
        (tmp_path / folder).mkdir()
        for number in range(6):
            (tmp_path / folder / str(number)).touch()
    before = times_of_files(tmp_path)
    assert [path.parent.name for path in before] == ["b"] * 4  # the limit is inside a folder
    (tmp_path / "a").mkdir()
    for folder in ("a", "b"):
        for number in range(10, 20):
            (tmp_path / folder / str(number)).touch()
    assert changed_files(before) == []
    written, removed = list(before)[:2]
    os.utime(written, (0, 0))
    removed.unlink()
    assert changed_files(before) == [written, removed]


def test_caches_below_the_working_folder_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME"):
        (folder := tmp_path / name / "inner").mkdir(parents=True)
        (folder / "cached").touch()
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("own.csv", "own.lock"):
        (tmp_path / name).touch()
    assert [path.name for path in times_of_files(tmp_path)] == ["own.csv"]


def test_a_loop_that_takes_up_the_run_before_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScriptError, match=r"begin with different weights .* a checkpoint"):
        checked("resumes", num_updates=2)


def test_only_caches_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old" / "log.csv"
    old.parent.mkdir()
    old.touch()
    hook = KeptFiles(began_s=old.stat().st_mtime + 1).hook
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(HeterogError, match=r"log.csv"):
            hook("open", (str(old), "", flags))
    hook("open", (str(old), "r", os.O_RDONLY | os.O_CLOEXEC))
    new = str(tmp_path / "new")
    for event, given in (
        ("os.truncate", (str(old), 0)),
        ("os.remove", (str(old), -1)),
        ("os.rename", (str(old), new, -1, -1)),
        ("os.rename", (new, str(old), -1, -1)),
        ("os.rename", (str(old.parent), new, -1, -1)),
        ("shutil.rmtree", (str(old.parent), None)),
    ):
        with pytest.raises(HeterogError, match=r"log.csv"):
            hook(event, given)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    for folder, is_cache in ((".runs", False), (".cache", True), ("hub", True)):
        each = tmp_path / folder / ".state.pt"
        each.parent.mkdir()
        each.touch()
        with nullcontext() if is_cache else pytest.raises(HeterogError, match=r"state.pt"):
            hook("open", (str(each), "w", os.O_WRONLY | os.O_TRUNC))


def test_compiled_models_run_op_by_op() -> None:
    verdict = checked("compiled", num_updates=2)
    assert verdict.answer == "equal"
    assert [each[:26] for each in verdict.notes] == ["torch.compile was left out"]


def test_a_warning_of_own_samples_is_never_said_equal() -> None:
    """The moving average hides in the rounding of 16 bits, but ranks' buffers tell of it."""
    verdict = checked("level in 16 bits", num_updates=2)
    assert verdict.answer == "undecided", verdict
    assert verdict.noise is None
    assert "buffer 'module.level' differs between ranks" in verdict.notes[0]


def noted(*gradients: float, eps: float = 0.0, moved: float = 0.0) -> list[Noted]:
    """A run on one rank, whose gradients have two elements: the given one, and 1."""
    updates = [{"weight": torch.tensor([each, 1.0])} for each in gradients]
    before, after = torch.tensor([0.0, 0.0]), torch.tensor([moved, 1.0])
    return [Noted(updates, {"weight": before}, {"weight": after}, [], eps, [], [], [])]


def test_later_bounds_follow_from_what_the_first_gradients_differ_by() -> None:
    exact, half = noted(1, 1, moved=1.0), 2.0**-7
    for other, place in (
        (noted(1.01, 1), 0),
        (noted(1, 1.01), 1),  # 2 sqrt of what rounding may make is 4.4 %
        (noted(1, 1, moved=1.01), 2),
        (noted(1 + 1e-6, 1 + 1e-3, moved=1.0), None),
        (noted(1, 1 + half, eps=half, moved=1.0), None),
    ):
        found = compare(exact, other)
        assert (found.place if found.names else None) == place
        assert found.bound >= found.allowed
    first = 1.0 + 1e-3  # under the bound of 16 bits
    found = compare(noted(1, 1, eps=half, moved=1.0), noted(first, 1, eps=half, moved=1.0))
    assert found.bound == pytest.approx(2 * math.sqrt(LATER * 1e-3 / math.sqrt(2)), rel=0.01)
    nothing = noted()
    nothing[0].updates.append({})
    assert compare(nothing, nothing).bound == 2 * math.sqrt(4096 * EPS)  # nothing was measured


def test_places_of_runs_with_unlike_numbers_of_updates_are_alike() -> None:
    two, three = noted(1, 1), noted(1, 1, 1)
    places = differences(two, two, 3)
    assert [each.keys() for each in places[2:]] == [set(), {"weight"}]
    assert compare(two, three).place == 2
    assert len(differences(two, noted(1), 3)) == len(differences(two, three, 3)) == 4


def test_ranks_share_an_accelerator_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **options: begun.append(words))
    monkeypatch.setattr(checked_rank, "device_count", lambda: 2)
    for rank, local in ((1, "1"), (2, "0")):
        monkeypatch.setattr(os, "environ", {"RANK": str(rank), "WORLD_SIZE": "3"})
        checked_rank.set_environment()
        assert os.environ["LOCAL_RANK"] == local
    dist.init_process_group("backend of accelerators", device_id=torch.device("cpu"))
    assert begun == [("gloo",)]


def test_command_prints_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["heterog", "check", *words])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    code, out, _ = run("--steps", "1", str(LOOPS), "mixup", "--json")
    assert code == 1
    assert out.startswith(f"DIFFERS: {LOOPS} trains otherwise")
    assert "0.weight\n" in out
    code, out, _ = run("--json", "-m", "tests.balance.checked_loops", "plain")
    assert code == 0
    assert json.loads(out)["answer"] == "equal"
    code, out, _ = run("--json", str(LOOPS), "advantages")
    assert (code, json.loads(out)["answer"], json.loads(out)["apart"]) == (1, "differs", None)
    code, out, err = run(str(LOOPS), "fails")
    assert (code, out) == (2, "")
    assert err.count('raise ArithmeticError("no step') == 1
    assert run("--shares", "3:1", str(LOOPS)) == (
        2,
        "",
        "heterog: --shares '3:1': give whole numbers with commas, one for each rank.\n",
    )


def test_files_are_followed_before_the_temporary_folder_is_known(tmp_path: Path) -> None:
    """To find that folder Python opens files while it holds a lock."""
    script = (
        "import tempfile, time\n"
        "from heterog.balance.kept_files import KeptFiles\n"
        "tempfile.tempdir = None\n"
        "kept = KeptFiles(time.time())\n"
        "kept.watch()\n"
        "open('made', 'w').close()\n"
        "print(*kept.made)\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert made.stdout.split() == [str(tmp_path / "made")], made.stderr
