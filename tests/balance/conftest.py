"""The rank processes of ``tests/runtime``, and ranks for whole scripts."""

from collections.abc import Iterator

import pytest

from tests.forked_scripts import ForkedScripts
from tests.runtime.conftest import ranks, two_ranks

__all__ = ["ranks", "two_ranks"]


@pytest.fixture(scope="session")
def scripts() -> Iterator[ForkedScripts]:
    """Ranks for scripts of Hugging Face and Lightning, whose imports take each process seconds."""
    started = ForkedScripts(
        *(f"heterog.balance.for_{library}" for library in ("accelerate", "trainer", "lightning")),
        "torch._dynamo",
    )
    yield started
    started.close()
