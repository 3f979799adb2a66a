"""Settings that every test shares."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: workers run beside each other, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from heterog.runtime.ranks.forks import rank_forks
from tests.thorough import cases, leave_out

# Tests of what experiments share; theirs come last, as some are called like packages.
sys.path.append(str(Path(__file__).parents[1] / "experiments"))

# Captures make millions of objects that are no garbage; looking for some took a fifteenth.
gc.set_threshold(20_000, 20, 50)

# Whoever started the tests may ignore these (nohup, a shell's background); tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadlines: a busy machine is no failure, and speed is measured in benchmarks/.
settings.register_profile("heterog", deadline=None, derandomize=True, max_examples=cases(100, 30))
settings.load_profile("heterog")

# Two processes take one file after another: long files come first, so that both end together.
LONG = (
    *("test_published_runs.py", "healing", "balance", "runtime", "test_interrupt.py", "export"),
    *("test_workers.py", "test_cli.py", "sailor", "agents", "planners", "graph", "simulator"),
)


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


@pytest.fixture(scope="session", autouse=True)
def ranks_are_forked() -> Iterator[None]:
    """Ranks that tests launch are forked off one process, started when the first one is."""
    from heterog.runtime.launch import RANKS_OWN

    with rank_forks([*RANKS_OWN, "PYTEST_CURRENT_TEST"]):
        yield


@pytest.fixture
def where_models_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A plan's file is run if it lies under the folder one works in."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
