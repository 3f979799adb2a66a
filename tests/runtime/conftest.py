"""Rank processes that the tests of a session share: one group of each size."""

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks


def _shared(num_ranks: int) -> Iterator[Ranks]:
    pool = Ranks(num_ranks)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from _shared(2)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    yield from _shared(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    yield from _shared(4)


@pytest.fixture(scope="session")
def six_ranks() -> Iterator[Ranks]:
    yield from _shared(6)
