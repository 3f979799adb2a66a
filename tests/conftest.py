"""Settings that every test shares."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch is imported: workers run beside each other, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from heterog.runtime.ranks.forks import rank_forks
from tests.thorough import IS_THOROUGH, cases, leave_out

if TYPE_CHECKING:
    from tests.forked_python import ForkedPython

# Tests of what experiments share; theirs come last, as some are called like packages.
sys.path.append(str(Path(__file__).parents[1] / "experiments"))

# Captures make millions of objects that are no garbage; looking for some took a fifteenth, and
# still a thirtieth after each 20,000.
gc.set_threshold(200_000, 10, 10)

# Whoever started the tests may ignore these (nohup, a shell's background); tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadlines: a busy machine is no failure, and speed is measured in benchmarks/.
settings.register_profile("heterog", deadline=None, derandomize=True, max_examples=cases(100, 20))
settings.load_profile("heterog")

# Two processes take one file after another: long files come first, so that both end together.
LONG = (
    *("runtime", "balance", "healing", "export", "test_fuzz_inputs.py", "test_architecture.py"),
    *("website", "test_interrupt.py", "test_published_runs.py", "test_workers.py", "zoo"),
    *("test_cli.py", "test_docs.py", "agents", "graph", "methods", "search", "report"),
)
FORKING = {
    "ranks": ("tests/runtime/",),
    "scripts": (
        *("tests/balance/", "tests/healing/", "tests/export/", "tests/test_fuzz_inputs.py"),
        *("tests/test_architecture.py", "tests/website/test_first_steps"),
    ),
}
"""Tests whose processes are forked off one that has imported torch and captured models."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process takes all ranks, one all scripts, as each would import and capture them again.

    No more than that is kept together: what waits, as healing jobs do, waits beside the ranks.
    """
    if IS_THOROUGH or config.getoption("dist") != "loadfile":  # they would take most of the time
        return None
    scheduling: Any = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    file_of = scheduling._split_scope

    def scope_of(nodeid: str) -> str:
        found = (name for name, begins in FORKING.items() if nodeid.startswith(begins))
        return next(found, None) or file_of(nodeid)

    scheduling._split_scope = scope_of
    return scheduling


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Modules without examples need not be imported to be searched for some."""
    if collection_path.suffix != ".py" or collection_path.name.startswith("test_"):
        return None
    return True if b">>>" not in collection_path.read_bytes() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files, and those of the longest folders, first, in their own order."""
    tests = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        name = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=turn)
    leave_out(items)


def pytest_unconfigure() -> None:
    """At the end pytest collects garbage five times, in which nothing is that tests look at."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ranks_are_forked() -> Iterator[None]:
    """Ranks that tests launch are forked off one process, started when the first one is."""
    from heterog.runtime.launch import RANKS_OWN

    with rank_forks([*RANKS_OWN, "PYTEST_CURRENT_TEST"]):
        yield


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[ForkedPython]":
    """Runs scripts that need not import torch."""
    from tests.forked_python import ForkedPython

    forked = ForkedPython(tmp_path_factory.mktemp("python"))
    yield forked
    forked.close()


@pytest.fixture
def where_models_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A plan's file is run if it lies under the folder one works in."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
