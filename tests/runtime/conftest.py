"""Rank processes that the tests of a session share: one group of each size."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.ranks import Ranks

_POOLS: list[Ranks] = []


def _shared(num_ranks: int) -> Iterator[Ranks]:
    pool = Ranks(num_ranks)
    _POOLS.append(pool)
    yield pool
    pool.close()


def end_ranks_behind(folder: Path, nextitem: pytest.Item | None) -> None:
    """Idle ranks wake a hundred times a second, so they end when another folder's tests begin."""
    if nextitem is None or folder not in nextitem.path.parents:
        for pool in _POOLS:
            pool.close()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    end_ranks_behind(Path(__file__).parent, nextitem)


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
