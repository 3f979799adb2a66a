"""Ctrl-C in real processes: the best so far is written and said, the exit code is 130."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heterog.graph.serialize import save_graph
from heterog.planners.plan import load_plan
from heterog.simulator.compile_kernels import smallest_graph

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
    )


def wait_for(process: subprocess.Popen[str], is_there: Callable[[str], bool]) -> str:
    """Lines of stderr up to the first that is waited for."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if is_there(line):
            return seen
    raise AssertionError(f"it ended before: {seen}")


def graph_file(folder: Path) -> str:
    save_graph(smallest_graph(), folder / "graph.json")
    return "graph.json"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_plan_is_the_best_so_far(tmp_path: Path, number: signal.Signals) -> None:
    process = started(
        tmp_path, "plan", graph_file(tmp_path), "--cluster", "hap_v100_p100",
        "--budget", "1h", "-o", "plan.json",
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
        "from heterog.planners.planner import PlanResult\n"
        f"class Own:\n    name, stage = '{name}', 'search'\n"
        "    def plan(self, task):\n"
        f"        print('{name} has begun', file=sys.stderr, flush=True)\n"
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
    method = method_file(tmp_path, "patient", "task.evaluator.poll()")
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
