"""Loops that train as one process does, and loops that do not: a check tells them apart."""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heterog import cli
from heterog.balance import checked as checked_rank
from heterog.balance.check import CheckRequest, ScriptError, Verdict, check
from heterog.errors import HeterogError
from tests.thorough import few_of

pytestmark = pytest.mark.distributed
LOOPS = Path(__file__).parent / "checked_loops.py"
RIGHT = (
    *("plain", "lbfgs", "dropout", "autocast", "attention", "micro-batches", "noise", "noisy"),
    *("momentum", "clipping", "ragged", "stream"),
)
WRONG = {
    "advantages": "0 times NaN is NaN",
    "mixup": "samples mixed",
    "factor": ".item()",
    "hook": "a hook that clips",
    "disguised sum": "a sum where a mean is weighed",
    "beside": "in no model of a balancer",
    "running": "kept from step to step",
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


@pytest.mark.parametrize("kind", few_of(list(WRONG), 8))
def test_wrong_loops_differ_and_the_reason_is_told(kind: str) -> None:
    verdict = checked(kind)
    assert verdict.answer == "differs", verdict
    assert verdict.apart > 3 * verdict.allowed
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
        ("hangs", {"timeout_s": 1.0}, "did not end within 1 s"),
        ("no updates", {}, r"no update with batches of a heterog.Balancer .*\(9 were taken\)"),
        ("plain", {"shares": ((1, 0), (8, 0))}, "divided batches of 8 samples alike, 8/0"),
        ("plain", {"shares": ((3, 1, 1),)}, "a whole number for each of 2 ranks"),
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


def test_files_that_were_there_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "last.pt"
    kept.write_text("weights of a week")
    with pytest.raises(ScriptError, match=r"would replace or remove last.pt"):
        checked("overwrites")
    assert kept.read_text() == "weights of a week"
    kept.unlink()
    assert checked("overwrites").answer == "equal"  # both runs write it


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
