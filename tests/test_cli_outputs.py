"""What a command writes: never over an input, another output, or what is no regular file."""

import inspect
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from heterog import cli
from heterog.cli import app, cluster_app
from heterog.cli.common import err, print_line
from heterog.cli.outputs import Written
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import HeterogError, InputFileError
from heterog.files import moved_to, write_atomically
from tests.search.asking import make_plan

INPUTS = ("plan", "plans", "measurements", "runs", "jobs", "resume")
"""Parameters that are paths and no outputs."""
PLAN = ["plan", "m.py:workload", "--cluster", "lab.yaml", "--method", "ddp", "--budget", "1e"]
TRAIN = ["train", "--models", "m.py:workload", "-o", "new.pt"]


def refusal(*arguments: object) -> str:
    """What a call is refused with."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(done.exception, HeterogError), (done.exception, done.output)
    text = str(done.exception)
    assert "\n" not in text
    return text


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with inputs, links to them, and what is no regular file."""
    monkeypatch.chdir(tmp_path)
    for name in ("m.py", "helper.py", "lab.yaml", "plan.json", "policy.pt", "rows.csv"):
        (tmp_path / name).write_text(f"the content of {name}")
    (tmp_path / "link.json").symlink_to("plan.json")
    os.link(tmp_path / "plan.json", tmp_path / "hard.json")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "to_nowhere").symlink_to("nowhere/plan.json")


def contents(folder: Path) -> dict[str, object]:
    """Everything in a folder."""
    return {
        path.name: path.read_text() if path.is_file() else path.lstat().st_mode
        for path in folder.iterdir()
    }


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ([*PLAN, "-o", "m.py"], "cannot write m.py (-o): MODEL reads it; name another file."),
        ([*PLAN, "--trace", "folder/../m.py"], "(--trace): MODEL reads it"),
        ([*PLAN, "-o", "lab.yaml"], "(-o): --cluster reads it"),
        ([*PLAN, "--report", "helper.py"], "there is a .py file, and what is written ends in"),
        ([*PLAN, "-o", "x.json", "--report", "x.json"], "-o and --report name the same file"),
        ([*PLAN, "-o", "plan.json", "--trace", "hard.json"], "-o and --trace name the same"),
        ([*PLAN, "--policy", "policy.pt", "-o", "policy.pt"], "--policy reads it"),
        (["report", "plan.json", "-o", "plan.json"], "(-o): PLANS reads it"),
        (["report", "plan.json", "x.json", "-o", "link.json"], "(-o): PLANS reads it"),
        (["report", "link.json", "-o", "hard.json"], "(-o): PLANS reads it"),
        (["export", "plan.json", "--to", "ddp", "-o", "plan.json"], "(-o): PLAN reads it"),
        (["run", "plan.json", "--trace", "plan.json"], "(--trace): PLAN reads it"),
        (["run", "plan.json", "--source", "m.py", "--save", "m.py"], "--source reads it"),
        (["run", "plan.json", "--save", "helper.py"], "it is a file; name a folder"),
        (["run", "plan.json", "--heal", "--checkpoint", "rows.csv"], "it is a file"),
        (["run", "plan.json", "--heal", "--checkpoint", "ck", "--save", "ck"], "the same file"),
        (["capture", "m.py:workload", "-o", "m.py"], "(-o): MODEL reads it"),
        (["profile", "vgg19,m.py:workload", "-o", "m.py"], "(-o): MODELS reads it"),
        (["calibrate", "plan.json", "-o", "plan.json"], "(-o): MEASUREMENTS reads it"),
        (["calibrate", "--runs", "rows.csv", "-o", "rows.csv"], "(-o): --runs reads it"),
        (["compare", "--models", "vgg19", "--clusters", "lab.yaml", "--csv", "lab.yaml"],
         "(--csv): --clusters reads it"),
        ([*TRAIN, "--checkpoint", "new.pt"], "-o and --checkpoint name the same file"),
        ([*TRAIN, "--initial", "policy.pt", "--checkpoint", "policy.pt"], "--initial reads it"),
        ([*TRAIN, "--logdir", "helper.py"], "it is a file; name a folder"),
        ([*TRAIN, "--graphs", "pipe"], "it is a file; name a folder"),
        (["cluster", "detect", "-o", "m.py"], "there is a .py file"),
        *(([*PLAN, "-o", name], text) for name, text in (
            ("pipe", "not a regular file, but a pipe"),
            ("to_pipe", "not a regular file, but a pipe"),
            ("folder", "it is a folder; name a file in it"),
            ("loop", "Too many levels of symbolic links"),
            ("to_nowhere", "/nowhere does not exist"),
            ("no/plan.json", "the folder no does not exist"),
            ("m.py/plan.json", "Not a directory"),
            ("a" * 300, "File name too long"),
        )),
    ],
    ids=lambda value: "" if isinstance(value, list) else value[-25:],
)  # fmt: skip
def test_bad_outputs_are_refused_before_anything_is_read(
    asked: list[str], text: str, tmp_path: Path
) -> None:
    """None of the inputs could be read: they hold nonsense."""
    before = contents(tmp_path)
    assert text in refusal(*asked)
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices, and may replace one")
def test_a_device_stays_one(tmp_path: Path) -> None:
    """It is like /dev/null, and lies where it may be replaced."""
    node = tmp_path / "node"
    try:
        os.mknod(node, 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("not allowed to make devices here")
    assert "not a regular file, but a device" in refusal(*PLAN, "-o", "node")
    with pytest.raises(HeterogError, match="not a regular file"):
        write_atomically(node, b"x")
    assert node.is_char_device()


def test_a_calibration_that_the_cluster_names_is_an_input(tmp_path: Path) -> None:
    toy_cluster().save(tmp_path / "toy.yaml")
    text = (tmp_path / "toy.yaml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith("calibration")]
    (tmp_path / "toy.yaml").write_text("\n".join([*kept, "calibration: lab.json"]))
    (tmp_path / "lab.json").write_text("{}")
    asked = ["plan", "m.py:workload", "--cluster", "toy.yaml", "--method", "ddp", "--budget", "1e"]
    assert "the calibration of toy.yaml is read there" in refusal(*asked, "-o", "lab.json")
    assert (tmp_path / "lab.json").read_text() == "{}"


def test_an_export_is_not_written_over_the_plan_it_is_made_of(tmp_path: Path) -> None:
    plan = make_plan(chain_graph(), toy_cluster(), methods=["single_device"])
    plan.save(tmp_path / "first.json")
    asked = ["export", "first.json", "--to", "torchrun", "-o", "job"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    before = contents(tmp_path / "job")
    again = ["export", "job/plan.json", "--to", "torchrun", "-o", "job", "--overwrite"]
    assert "an input is read there" in refusal(*again)
    assert contents(tmp_path / "job") == before


def test_a_file_keeps_its_permissions_and_a_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "plan.json", tmp_path / "link.json"
    target.chmod(0o640)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    longest = tmp_path / ("a" * 250 + ".json")
    write_atomically(longest, b"new")
    assert longest.stat().st_mode & 0o777 == 0o644
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_new_files_have_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    """A plan for oneself alone, say, or for a group."""
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "new.json", b"new")
        plan = make_plan(chain_graph(), toy_cluster(), methods=["single_device"])
        plan.save(tmp_path / "new.json")
        asked = ["export", str(tmp_path / "new.json"), "--to", "torchrun", "-o"]
        assert CliRunner().invoke(app, [*asked, str(tmp_path / "job")]).exit_code == 0
    finally:
        os.umask(before)
    wanted = {"new.json": 0o666, "job": 0o777, "job/launch.sh": 0o777, "job/ranks.json": 0o666}
    found = {name: (tmp_path / name).stat().st_mode & 0o777 for name in wanted}
    assert found == {name: mode & ~mask for name, mode in wanted.items()}


def test_a_folder_that_is_gone_is_no_place_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MKL ends the program at the first product of matrices there."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["heterog", "models"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = "heterog: the folder that you work in was removed; change to another one.\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, said)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_what_others_are_writing_stays(tmp_path: Path) -> None:
    """Whatever hidden files are there, a write removes only its own."""
    (tmp_path / ".heterog-notes.md").write_bytes(b"mine")
    target = tmp_path / "plan.json"
    with moved_to(target) as one:
        one.write_bytes(b"one")
        write_atomically(target, b"other")
        assert sorted(hidden(tmp_path)) == sorted([one.name, ".heterog-notes.md"])
    assert target.read_bytes() == b"one"

    def writes(number: int) -> None:
        for _ in range(50):
            write_atomically(target, bytes([number]) * 10_000)

    with ThreadPoolExecutor() as threads:
        list(threads.map(writes, range(4)))
    assert target.read_bytes() in {bytes([number]) * 10_000 for number in range(4)}
    assert hidden(tmp_path) == [".heterog-notes.md"]


def test_every_output_is_marked_as_one() -> None:
    """A path is an input, or it is checked before the command begins."""
    marked = 0
    for each in (*app.registered_commands, *cluster_app.registered_commands):
        assert each.callback is not None
        for name, parameter in inspect.signature(each.callback, eval_str=True).parameters.items():
            if "Path" not in str(get_args(parameter.annotation)[:1]):
                continue
            is_output = any(isinstance(it, Written) for it in get_args(parameter.annotation))
            assert is_output != (name in INPUTS), f"{each.callback.__name__}: {name}"
            marked += is_output
    assert marked == 19


STREAMS = """
import os, sys
from heterog.cli.outputs import standard_streams
with standard_streams():
    print("\\u00e4" * 3, flush=True)
    number = os.open(os.devnull, os.O_RDONLY)
    assert number > 2, "what is printed would go into a file"
    print("x" * 100_000)
"""


@pytest.mark.parametrize(
    ("shell", "code", "told"),
    [
        ('"$@" >&-', 2, "stdout is closed, and the answer would be lost"),
        ('"$@" <&- 2>&-', 0, ""),
        ('PYTHONIOENCODING=ascii "$@" | head -c 9', 0, r"\xe4\xe4"),
        ('{ "$@"; echo $? >&2; } | head -c 1 >/dev/null', 0, "1\n"),
        ('ulimit -f 1; "$@" > big', 2, "cannot write to stdout"),
        ('ulimit -f 1; PYTHONUNBUFFERED=1 "$@" > big', 2, "cannot write to stdout"),
    ],
)
def test_streams_may_be_closed_full_cut_off_or_ascii(
    shell: str, code: int, told: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from heterog.errors import HeterogError\ntry:\n"
        + "".join(f"    {line}\n" for line in STREAMS.strip().splitlines())
        + "except HeterogError as error:\n    sys.stderr.write(str(error)); sys.exit(2)\n"
    )
    package = Path(__file__).parents[1]
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert told in done.stdout + done.stderr


def test_names_of_files_that_cannot_be_printed_are_escaped() -> None:
    assert str(InputFileError("cannot write \udcff\n.json")) == r"cannot write \udcff\n.json"


def test_what_others_say_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of gloo begin with what rich takes for the end of a style; names may have styles."""
    said = "rank 1: [/pytorch/third_party/gloo/pair.cc:534] Connection closed by peer " + "x" * 99
    print_line(said)
    print_line("checkpoint: runs[final]", to=err)
    assert capsys.readouterr() == (f"{said}\n", "checkpoint: runs[final]\n")


def test_texts_are_printed_by_one_function() -> None:
    """Any other way takes words in brackets for styles, and cuts lines."""
    told = re.compile(r"\b(out|err)\.print\(\s*(f?\"|[a-z_]+\[)")
    folder = Path(inspect.getfile(cli)).parent
    assert [path.name for path in folder.glob("*.py") if told.search(path.read_text())] == []
