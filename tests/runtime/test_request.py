"""What is to be run: one value, the same in Python, on the command line and in a file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heterog.cli import app
from heterog.cli.outputs import as_options
from heterog.errors import HeterogError, InputFileError
from heterog.runtime.ranks.watching import Limits
from heterog.runtime.request import RunRequest, read_request


def test_a_run_file_holds_the_whole_request(tmp_path: Path) -> None:
    request = RunRequest(
        plan=tmp_path / "plan.json",
        sources=("a.py", "b.py"),
        num_steps=3,
        limits=Limits(timeout_s=60.0),
        save=tmp_path / "saved",
        allow_nonfinite=True,
    )
    request.write(tmp_path / "run.json")
    assert read_request(tmp_path / "run.json") == request


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stpes": 3}, r"run\.json: unknown field 'stpes'"),
        ({"limits": {"step_s": 3}}, r"unknown field 'limits\.step_s'"),
        ({"num_steps": "3"}, "field 'num_steps' should be a valid integer, got '3'"),
        ({"num_steps": 0}, "`num_steps` is 0; measure at least one step"),
    ],
)
def test_a_wrong_field_of_a_run_file_is_named(
    tmp_path: Path, fields: dict[str, object], text: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"plan": "plan.json", **fields}))
    with pytest.raises(HeterogError, match=text):
        read_request(path)


def test_what_is_no_run_file_is_read_as_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert read_request(path) == RunRequest(plan=path)
    with pytest.raises(InputFileError, match=r"plan .*plan\.json"):
        read_request(path).load()


def test_settings_become_options_and_other_words_stay() -> None:
    options = {"steps": "--steps", "step_timeout": "--step-timeout"}
    text = "`num_steps`, `step_timeout_s` and `lr`"
    assert as_options(text, options) == "--steps, --step-timeout and `lr`"


def test_the_command_line_names_settings_by_its_options() -> None:
    done = CliRunner().invoke(app, ["run", "plan.json", "--steps", "0"])
    assert str(done.exception) == "--steps is 0; measure at least one step."


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_limits_that_end_every_job_are_refused(seconds: float) -> None:
    with pytest.raises(HeterogError, match="in a step; give more than 0"):
        Limits(step_timeout_s=seconds)
