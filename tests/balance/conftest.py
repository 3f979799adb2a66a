"""The rank processes of ``tests/runtime``, and ranks for whole scripts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_python import ForkedPython
from tests.runtime.conftest import end_ranks_behind, ranks, two_ranks

__all__ = ["ranks", "two_ranks"]


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    end_ranks_behind(Path(__file__).parent, nextitem)


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPython]:
    """Ranks for scripts of Hugging Face and Lightning, whose imports take each process seconds."""
    libraries = [f"heterog.balance.for_{name}" for name in ("accelerate", "trainer", "lightning")]
    started = ForkedPython(tmp_path_factory.mktemp("scripts"), libraries)
    yield started
    started.close()
