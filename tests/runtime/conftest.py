"""Rank processes that the tests of a session share: one group of each size."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.ranks import Ranks, capture_before_forks

_POOLS: list[Ranks] = []


def _shared(request: pytest.FixtureRequest, num_ranks: int) -> Iterator[Ranks]:
    capture_before_forks(request.session)
    pool = Ranks(num_ranks)
    _POOLS.append(pool)
    yield pool
    pool.close()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Idle ranks wake a hundred times a second, so they end when another folder's tests begin."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        for pool in _POOLS:
            pool.close()


@pytest.fixture(scope="session")
def two_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from _shared(request, 2)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from _shared(request, 3)


@pytest.fixture(scope="session")
def four_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from _shared(request, 4)


@pytest.fixture(scope="session")
def six_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from _shared(request, 6)
