"""The rank processes of ``tests/runtime``."""

from tests.runtime.conftest import ranks, two_ranks

__all__ = ["ranks", "two_ranks"]
