"""Rank processes that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()
