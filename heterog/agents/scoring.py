"""Scoring of many pairs' strategies in parallel, if there are workers for it."""

from collections.abc import Sequence
from functools import lru_cache

from heterog.agents.sources import PairSource
from heterog.envs.pair import Pair, Score
from heterog.lowering.program import IntArray
from heterog.workers import Here, Workers

_MOST_KEPT = 256
"""Number of pairs that a worker keeps ready."""


class PairScorer:
    """Scores rows of a source's pairs; each pair then knows the scores of its rows.

    Args:
        workers: Workers that score; in this process, rows are scored when their scores are needed.
        source: Source of the pairs.
    """

    def __init__(self, workers: Workers, source: PairSource) -> None:
        self._workers, self._source = workers, source

    def __call__(
        self, indices: Sequence[int], pairs: Sequence[Pair], rows: Sequence[IntArray]
    ) -> None:
        """Score rows.

        Args:
            indices: Number of each pair in the source.
            pairs: The pairs.
            rows: Rows of each pair.  # each [num_rows, G]
        """
        if isinstance(self._workers, Here):
            return
        jobs = list(zip(indices, rows, strict=True))
        found = self._workers.map(_score, self._source, jobs)
        for pair, own, scores in zip(pairs, rows, found, strict=True):
            pair.remember(own, scores)


def _score(source: PairSource, job: tuple[int, IntArray]) -> list[Score]:
    index, rows = job
    pair = _pair(_Same(source), index)
    scores = [pair.score(row) for row in rows]
    pair.forget()
    return scores


class _Same:
    """A source by identity, because comparing graphs would take longer than scoring."""

    def __init__(self, source: PairSource) -> None:
        self.source = source

    def __hash__(self) -> int:
        return id(self.source)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.source is other.source


@lru_cache(_MOST_KEPT)
def _pair(source: _Same, index: int) -> Pair:
    return source.source.pair(index)
