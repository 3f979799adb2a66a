"""Ctrl-C in real processes: the best so far is written and said, the exit code is 130."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from heterog.agents.checkpoint import load_checkpoint
from heterog.graph.serialize import save_graph
from heterog.search.plan import load_plan
from heterog.simulator.compile_kernels import smallest_graph
from tests.envs.cases import language_graph
from tests.thorough import THOROUGH, few_of, one_in

pytestmark = pytest.mark.distributed  # they start processes
WAIT_S = 300.0


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, writing into a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "heterog.cli", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # a terminal's Ctrl-C reaches a group of processes
    )


def group_of(process: subprocess.Popen[str]) -> set[int]:
    """Processes that live on in the group of one that was started; zombies do not."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(group) == process.pid and state != "Z":
            found.add(int(entry.name))
    return found


def assert_nobody_is_left(process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while group_of(process):
        assert time.monotonic() < deadline_s, f"{group_of(process)} live on"
        time.sleep(0.05)


def wait_for(process: subprocess.Popen[str], is_there: Callable[[str], bool]) -> str:
    """Lines of stderr up to the first that is waited for."""
    assert process.stderr is not None
    seen = ""
    too_late = threading.Timer(WAIT_S, process.kill)
    too_late.start()
    try:
        for line in process.stderr:
            seen += line
            if is_there(line):
                return seen
    finally:
        too_late.cancel()
    raise AssertionError(f"it ended before, or was ended after {WAIT_S} s: {seen}")


def graph_file(folder: Path) -> str:
    save_graph(smallest_graph(), folder / "graph.json")
    return "graph.json"


@pytest.mark.parametrize("number", few_of([signal.SIGINT, signal.SIGTERM], 1))
def test_an_interrupted_plan_is_the_best_so_far(tmp_path: Path, number: signal.Signals) -> None:
    process = started(
        tmp_path, "plan", graph_file(tmp_path), "--cluster", "hap_v100_p100",
        "--budget", "1h", "--method", "cp_ar,tuned_uniform,local_search", "-o", "plan.json",
    )  # fmt: skip
    wait_for(process, lambda line: line.startswith("local_search"))
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "stopping with the best so far" in err
    assert "written to plan.json" in err.splitlines()[-1]
    plan = load_plan(tmp_path / "plan.json")
    assert plan.outcome == "ok"
    assert "a step" in out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["graph.json", "plan.json"]


def method_file(folder: Path, name: str, work: str) -> str:
    """A method of one's own that says when it has begun, and then works for ever."""
    (folder / f"{name}.py").write_text(
        "import sys, time\n"
        "from heterog.methods.planner import PlanResult\n"
        f"class Own:\n    name, stage = '{name}', 'search'\n"
        "    def plan(self, problem):\n"
        # One write: print makes two, between which another worker can write its line.
        f"        sys.stderr.write('{name} has begun\\n')\n"
        f"        while True:\n            time.sleep(0.01)\n            {work}\n"
    )
    return f"{name}.py:Own"


def test_a_second_interrupt_ends_at_once_and_writes_nothing(tmp_path: Path) -> None:
    method = method_file(tmp_path, "deaf", "pass")
    process = started(
        tmp_path, "plan", graph_file(tmp_path), "--cluster", "hap_v100_p100",
        "--method", method, "--budget", "1h", "-o", "plan.json",
    )  # fmt: skip
    wait_for(process, lambda line: line.startswith("deaf has begun"))
    process.send_signal(signal.SIGINT)
    wait_for(process, lambda line: "stopping" in line)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not (tmp_path / "plan.json").exists()


def test_an_interrupted_comparison_keeps_its_rows(tmp_path: Path) -> None:
    method = method_file(tmp_path, "patient", "problem.evaluator.poll()")
    process = started(
        tmp_path, "compare", "--models", graph_file(tmp_path), "--methods", f"ddp,{method}",
        "--clusters", "hap_v100_p100", "--budget", "1h", "--csv", "rows.csv", "--json",
    )  # fmt: skip
    wait_for(process, lambda line: line.startswith("patient has begun"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "rows are written to rows.csv" in err.splitlines()[-1]
    methods = {row["method"]: row["outcome"] for row in json.loads(out)["rows"]}
    assert methods == {"ddp": "ok", "patient": "not_applicable"}
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(methods)


CLUSTERS = "hap_v100_p100,paper_8gpu,paper_12gpu"


def comparison(folder: Path, method: str, begun: int) -> subprocess.Popen[str]:
    """Three clusters for two workers, both of which have begun with a method of one's own."""
    process = started(
        folder, "compare", "--models", graph_file(folder), "--methods", f"ddp,{method}",
        "--clusters", CLUSTERS, "--budget", "1h", "--csv", "rows.csv", "--workers", "2",
    )  # fmt: skip
    for _ in range(begun):
        wait_for(process, lambda line: "has begun" in line)
    return process


@THOROUGH
@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGINT, True),  # as a terminal does
        (signal.SIGTERM, False),  # as a batch system does
        (signal.SIGINT, False),
        (signal.SIGTERM, True),
    ],
)
def test_an_interrupted_comparison_on_workers_keeps_what_they_have(
    tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    """It waited for the workers, for an hour, or lost their rows with them."""
    process = comparison(tmp_path, method_file(tmp_path, "patient", "problem.evaluator.poll()"), 2)
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "4 rows are written to rows.csv" in err.splitlines()[-1]
    rows = (tmp_path / "rows.csv").read_text().splitlines()[1:]
    assert [row.split(",")[:2] for row in rows] == [
        ["smallest", cluster] for cluster in CLUSTERS.split(",")[:2] for _ in range(2)
    ]
    assert_nobody_is_left(process)


@one_in(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_a_launcher_that_does_not_wait(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = comparison(tmp_path, method_file(tmp_path, "deaf", "pass"), 2)
    process.send_signal(number)
    if number == signal.SIGINT:
        wait_for(process, lambda line: "stopping" in line)
        process.send_signal(number)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in err
    assert_nobody_is_left(process)


@THOROUGH
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_terminated_training_keeps_the_best_policy(tmp_path: Path, workers: str) -> None:
    save_graph(language_graph(), tmp_path / "lm.json")
    process = started(
        tmp_path, "train", "--models", "lm.json", "--clusters", "hap_v100_p100",
        "-o", "policy.pt", "--pairs", "2", "--steps", "100000", "--search", "20",
        "--workers", workers,
    )  # fmt: skip
    wait_for(process, lambda line: line.startswith("train "))
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "the best policy so far is written to policy.pt" in err.splitlines()[-1]
    assert "interrupted" in out
    assert load_checkpoint(str(tmp_path / "policy.pt")).provenance["history"]
    assert_nobody_is_left(process)


@pytest.mark.parametrize(
    ("place", "raised"),
    [
        ("typer.py", "raise KeyboardInterrupt"),  # while the commands are imported
        ("numba.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"),
        (
            "numba.py",  # what pydantic makes of a Ctrl-C while a class is made
            "import os, signal\n"
            "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
            "except BaseException:\n    raise ValueError('no schema') from None",
        ),
    ],
)
def test_an_interrupted_import_is_no_traceback(tmp_path: Path, place: str, raised: str) -> None:
    (tmp_path / place).write_text(raised)
    done = subprocess.run(
        [sys.executable, "-m", "heterog", "plan", graph_file(tmp_path), "--cluster", "rtx_mixed"],
        cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode in (130, -signal.SIGINT)  # Python's own, for one in an exec
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
        "import os, signal\ndef made():\n    os.kill(os.getpid(), signal.SIGTERM)\n",
    ],
)
def test_a_command_that_is_terminated_in_a_users_file_blames_nobody(
    tmp_path: Path, text: str
) -> None:
    """It was the file's error, with exit code 2: the file would end the program."""
    (tmp_path / "mine.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "heterog", "capture", "mine.py:made", "-o", "graph.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_a_command_that_is_terminated_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom heterog.cli import main\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "capture", graph_file(tmp_path), "-o", "copy.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["graph.json"]
