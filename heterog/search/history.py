"""History of a search: the best step of each method over time, in bounded space.

The history is taken from the progress that methods report anyway, so recording it costs nothing
and changes no search.
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from heterog.methods.planner import Progress
from heterog.records import VALUE, Amount, Name, NumBytes, Seconds, Series
from heterog.simulator.evaluator import Evaluator

MOST_POINTS = 48
"""Most improvements kept of each method; beyond that, every other one is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodHistory:
    """The best step that one method had found, at each change.

    Attributes:
        method: Name of the method.
        start_s: Seconds from the beginning of the whole search to that of the method.
        finish_s: Seconds from the beginning of the whole search to the method's end.
        points: (seconds since the whole search began, evaluations of all methods until then, best
            seconds per step); improvements only, so the last column falls.
    """

    __pydantic_config__: ClassVar = VALUE

    method: Name
    start_s: Seconds
    finish_s: Seconds
    points: Annotated[
        Series[tuple[Amount, NumBytes, Amount]], Field(min_length=1, max_length=1000)
    ]


class SearchHistory:
    """Records what methods report, and passes it on.

    Args:
        evaluator: Evaluator whose evaluations are counted.
        progress: Function that gets everything as well.
    """

    def __init__(self, evaluator: Evaluator, progress: Progress) -> None:
        self._evaluator = evaluator
        self._progress = progress
        self._began_s = time.perf_counter()
        self._spans: dict[str, tuple[float, float]] = {}
        self._points: dict[str, list[tuple[float, int, float]]] = {}

    def tell(self, method: str, fraction: float, best_s: float) -> None:
        """Record a method's progress and pass it on; see ``methods.planner.Progress``."""
        now_s = time.perf_counter() - self._began_s
        start_s, _ = self._spans.get(method, (now_s, now_s))
        self._spans[method] = (start_s, now_s)
        points = self._points.setdefault(method, [])
        if math.isfinite(best_s) and (not points or best_s < points[-1][2]):
            points.append((now_s, self._evaluator.num_evaluations, best_s))
            if len(points) > MOST_POINTS:
                # The first and the last stay; those between were improvements on the way.
                self._points[method] = points[0:-1:2] + points[-1:]
        self._progress(method, fraction, best_s)

    def of(self, methods: Collection[str]) -> tuple[MethodHistory, ...]:
        """Histories of the methods that found something, in the order they ran."""
        return tuple(
            MethodHistory(
                method=method,
                start_s=self._spans[method][0],
                finish_s=self._spans[method][1],
                points=tuple(points),
            )
            for method, points in self._points.items()
            if points and method in methods
        )
