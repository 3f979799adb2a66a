"""An option that would change nothing is refused in one line, not ignored."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import heterog
from heterog.cli import app
from heterog.cli.once import EachOnce
from heterog.cli.plan import _tell_overrun
from heterog.cli.run import heal_options
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import HeterogError, HeterogWarning
from heterog.methods.planner import Budget

PLAN = ["plan", "vgg19", "--cluster", "rtx_mixed"]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ([*PLAN, "--slow-down", "1.2"], "--slow-down without --background; name the job's model"),
        ([*PLAN, "--background-batch", "8"], "--background-batch without --background"),
        (
            [*PLAN, "--method", "ddp,hap", "--policy", "heldout"],
            "--policy has no effect on ddp, hap; only agent and agent+search ask a policy",
        ),
        ([*PLAN, "--method", "ddp", "--encoder", "x.py:Net"], "--encoder has no effect on ddp"),
        (
            [*PLAN, "--lossy", "int8", "--asynchronous", "stash=1"],
            "with a server or a stash it is not planned: ask for one of them",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_without_effect_are_refused(asked: list[str], text: str) -> None:
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, HeterogError)
    assert text in str(done.exception)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            ["compare", "--models", "vgg19", "--models", "gpt2", "--clusters", "rtx_mixed"],
            "--models is given twice; names go into one, with commas.",
        ),
        (["policy", "pack", "default", ""], "folder is an empty path; write . for this folder"),
        (["policy", "pull", "x", "--output="], "--output is an empty path"),
        (["policy", "pull", "x=", "--output", "."], "cannot write .: it is a folder"),
        (["check", "--ranks", "2", "--ranks", "3", "none.py"], "there is no script"),
        (
            ["evaluate", "none.pt", "--models", "vgg19", "--clusters", "--models"],
            "unknown cluster '--models'",
        ),
        (["check", "--shares", "3,1", "--shares", "1,3", "none.py"], "there is no script"),
        (["check", "none.py", "--lr", "1", "--lr", "2"], "there is no script"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_second_lists_and_empty_paths_are_refused(asked: list[str], text: str) -> None:
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, HeterogError)
    assert text in str(done.exception)


def test_every_command_refuses_second_lists() -> None:
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    commands = [each for group in groups if group for each in group.registered_commands]
    assert [
        each.callback for each in commands if not issubclass(each.cls or object, EachOnce)
    ] == []
    assert len(commands) > 20


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"redundancy": 2}, "--redundancy without --heal has no effect"),
        ({"back_after": "5s"}, "--back-after without --heal has no effect"),
        ({"slow_factor": 0.0}, "--slow-factor without --heal has no effect"),
        ({"heal": True, "slow_factor": 1.0}, "slow from 1 times the planned time on; give more"),
        ({"heal": True, "checkpoint_every": "5s"}, "--checkpoint-every without --checkpoint"),
    ],
)
def test_options_of_healing_need_it(options: dict[str, Any], text: str) -> None:
    given = {name: value for name, value in options.items() if name != "heal"}
    with pytest.raises(HeterogError, match=text):
        heal_options("heal" in options, given)


def test_a_policy_that_no_method_asks_warns() -> None:
    with pytest.warns(HeterogWarning, match=r"policy 'heldout' has no effect on ddp; only agent"):
        heterog.plan(chain_graph(), toy_cluster(), method="ddp", budget="5e", policy="heldout")


def test_under_torchrun_the_cluster_names_device_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    options = ["--cluster", "rtx_mixed", "--device-type", "V100", "-o", str(tmp_path / "m.json")]
    done = CliRunner().invoke(app, ["profile", "vgg19", *options])
    assert isinstance(done.exception, HeterogError)
    assert "rtx_mixed says the type of each rank's device" in str(done.exception)


def test_a_warning_of_ours_is_one_line_on_stderr() -> None:
    code = (
        "import sys, warnings; from heterog import cli; from heterog.errors import HeterogWarning;"
        "warnings.showwarning = cli._show_warning;"
        "warnings.warn('two of three are ignored.', HeterogWarning);"
        "warnings.warn('somebody else', UserWarning)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *rest = done.stderr.splitlines()
    assert first == "heterog: warning: two of three are ignored."
    assert "UserWarning: somebody else" in "".join(rest)
    assert done.stdout == ""


def test_a_capture_that_outlasts_the_budget_is_said(recwarn: pytest.WarningsRecorder) -> None:
    for seconds, budget in ((20.0, "30s"), (4.0, "1s"), (20.0, "100e")):
        _tell_overrun(seconds, Budget.parse(budget))
    assert not recwarn
    with pytest.warns(HeterogWarning, match=r"took 20.* s, more than the budget of 10s"):
        _tell_overrun(20.0, Budget.parse("10s"))
