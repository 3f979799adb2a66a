"""Rank processes that the tests of a session share: one group of each size."""

from collections.abc import Iterator

import pytest

from tests.runtime.ranks import Ranks, capture_before_forks

MANY_TESTS = 300
"""With so many tests, most models are trained on most groups of ranks."""


def _shared(request: pytest.FixtureRequest, num_ranks: int) -> Iterator[Ranks]:
    if len(request.session.items) >= MANY_TESTS:
        capture_before_forks()
    pool = Ranks(num_ranks)
    yield pool
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
