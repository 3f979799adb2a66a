"""The points of a search: each is made into a strategy and evaluated once."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from heterog.errors import StrategyError
from heterog.simulator.engine import Order
from heterog.simulator.evaluation import Evaluation, Outcome
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import LayoutError
from heterog.strategy.strategy import Strategy

Point = TypeVar("Point", bound=Hashable)


class Tried(dict[Point, Evaluation], Generic[Point]):
    """Evaluations of the points that were tried.

    Args:
        evaluator: Evaluator of their strategies.
        make: Makes the strategy of a point; a ``LayoutError`` or ``StrategyError`` refuses it.

    Attributes:
        strategies: Strategies of the points.
        refused: Why other points have none.
    """

    def __init__(self, evaluator: Evaluator, make: Callable[[Point], Strategy]) -> None:
        super().__init__()
        self._evaluator, self._make = evaluator, make
        self.strategies: dict[Point, Strategy] = {}
        self.refused: dict[Point, str] = {}

    def evaluate(self, point: Point, order: Order = Order.FIFO) -> Evaluation | None:
        """Evaluate a point, once; ``None`` if it is refused."""
        if point in self or point in self.refused:
            return self.get(point)
        try:
            strategy = self._make(point)
            self[point] = self._evaluator.evaluate(strategy, order)
        except (LayoutError, StrategyError) as error:
            self.refused[point] = str(error)
            return None
        self.strategies[point] = strategy
        return self[point]

    def best(self, count: int) -> list[Point]:
        """The best points, best first."""
        return sorted(self, key=lambda point: self[point].preference)[:count]

    def forget_too_large(self) -> None:
        """Forget what was too large to simulate: it may not be in a longer round."""
        for point in [p for p, each in self.items() if each.outcome == Outcome.TOO_LARGE]:
            del self[point]
