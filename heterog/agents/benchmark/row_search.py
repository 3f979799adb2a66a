"""Black-box searches of the space of policies.

A *row* has the number of a candidate for each block, as a policy decides it (``heterog.envs``).

- ``random`` draws numbers uniformly.
- ``annealing`` gives consecutive blocks another candidate, or the candidate of a neighbour.
- ``tpe`` is Optuna's sampler, for which numbers are categories; ``cma_es`` is CMA-ES of ``cmaes``,
  which Optuna uses, too: numbers are points of a line, in the table's order.
- ``tree`` is TAG's tree search (Zhang et al., arXiv 2302.06126) without its network; see
  ``tree_search``.

All but ``random`` and ``tree`` begin with rows of one candidate; ``tree`` reaches them by itself.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from heterog.envs.pair import Pair
from heterog.errors import HeterogError
from heterog.lowering.program import FloatArray
from heterog.methods.planner import Planner, PlanResult, PointSearch, Problem, TimeUp
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.simulator.space import StepSettings
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Strategy
from heterog.units import GIB

Row = tuple[int, ...]
MISFIT, CANNOT_RUN = 20.0, 40.0
"""Costs of rows that do not fit and that cannot run, far above the logarithm of any step time."""
MOST_KNOWN = 5000
"""``most_repeated`` of methods for which a known row costs little time."""
_UNIFORM_PART = 0.25
"""Part of the budget for rows of one candidate."""
_HOT, _COLD = 0.02, 0.0005
"""Temperatures of annealing, as parts of the step time; the same as in ``local_search``."""


class Rows(PointSearch[Row]):
    """Rows of a problem, each evaluated once.

    Args:
        problem: Problem to find strategies for.
        how: Function that tries rows until ``cost`` raises the end of the search.
        most_repeated: Consecutive known rows after which the search ends, too.
    """

    num_returned = 4
    why_nothing = "no row that was tried can run"

    def __init__(
        self,
        problem: Problem,
        how: Callable[["Rows"], None],
        most_repeated: int = MOST_KNOWN,
    ) -> None:
        super().__init__(problem)
        evaluator = problem.evaluator
        self.pair = Pair(evaluator.graph, evaluator.cluster, evaluator.cost_model)
        self.rng = np.random.default_rng(problem.seed)
        self._space = evaluator.space(self.pair.table)
        self._how, self._repeated, self._most = how, 0, most_repeated

    def search(self) -> None:
        """See ``PointSearch``."""
        self._how(self)

    def tried(self, row: Row) -> Evaluation | None:
        """Evaluate a row, or end the search when its budget is over."""
        is_new = row not in self.found and row not in self.refused
        self._repeated = 0 if is_new else self._repeated + 1
        if self.spending.is_over or self._repeated > self._most:
            raise TimeUp(self.spending)
        return self.evaluate(row, self.problem.first_order)

    def cost(self, row: Row) -> float:
        """Logarithm of a row's step time; above ``MISFIT`` if it does not fit."""
        found = self.tried(row)
        if found is None:
            return CANNOT_RUN
        if not found.is_ok:
            return MISFIT + math.log1p(found.overflow_bytes / GIB)
        return math.log(found.step_time_s)

    def uniform(self) -> Iterator[tuple[Row, float]]:
        """Rows of one candidate and their costs."""
        for number in self.rng.permutation(self.pair.num_candidates).tolist():
            if self.found and self.spending.fraction > _UNIFORM_PART:
                return
            row = (number,) * self.pair.num_blocks
            yield row, self.cost(row)

    def strategy_of(self, point: Row) -> Strategy:
        """See ``PointSearch``."""
        return self._space.decode(
            self.pair.groups(point),
            StepSettings(DEFAULT_BUCKET_BYTES),
            step_barrier=self.problem.step_barrier,
        )

    def orders(self, point: Row) -> tuple[Order, ...]:
        """See ``PointSearch``."""
        return (self.problem.first_order,)


def random_draws(rows: Rows) -> None:
    """Draw rows uniformly."""
    pair = rows.pair
    while True:
        rows.cost(tuple(rows.rng.integers(pair.num_candidates, size=pair.num_blocks).tolist()))


def annealing(rows: Rows, hot: float = _HOT, run: float = 4.0) -> None:
    """Anneal from the best row of one candidate.

    Args:
        rows: Rows of a problem.
        hot: First temperature, as a part of the step time; the last one is a fortieth of it.
        run: Mean number of consecutive blocks that change together.
    """
    pair, rng = rows.pair, rows.rng
    now, cost = min(rows.uniform(), key=lambda pair: pair[1])
    while True:
        heat = hot * (_COLD / _HOT) ** min(rows.spending.fraction, 1.0)
        first = int(rng.integers(pair.num_blocks))
        last = min(first + int(rng.geometric(1.0 / run)), pair.num_blocks)
        number = int(rng.integers(pair.num_candidates))
        if rng.random() < 0.5:  # moves a boundary between candidates
            number = now[first - 1] if first else now[min(last, pair.num_blocks - 1)]
        moved = (*now[:first], *(number,) * (last - first), *now[last:])
        other = rows.cost(moved)
        if other < cost or rng.random() < math.exp((cost - other) / heat):
            now, cost = moved, other


def tree_search(rows: Rows, exploration: float = 1.0) -> None:
    """Search a tree whose levels are blocks, the costliest first, by PUCT with a uniform prior.

    As in ``search/mcts.py`` of TAG's repository, undecided blocks take the first block's decision,
    the value of a leaf is its gain over one decision for all devices (above 1, its fourth root; -1
    where memory runs out), and exploration grows with the root of the number of children. Unlike
    there, a decision is a candidate of the table, blocks are ranges of the forward pass, and a new
    leaf is scored with its own decision, not only its parent's. ``exploration`` multiplies TAG's
    weight of exploration.
    """
    pair, rng = rows.pair, rows.rng
    order = np.argsort(-pair.observer.compute_seconds.min(axis=1), kind="stable").tolist()
    widest = max(range(pair.num_candidates), key=lambda each: len(pair.table[each].devices))
    base = rows.cost((widest,) * pair.num_blocks)
    if base >= MISFIT:
        base = min(cost for _, cost in rows.uniform())
    known: dict[Row, tuple[FloatArray, FloatArray]] = {}
    while True:
        prefix: Row = ()
        while prefix in known and len(prefix) < pair.num_blocks:
            prefix = (*prefix, _chosen(*known[prefix], exploration, rng))
        known.setdefault(prefix, (np.zeros(pair.num_candidates), np.zeros(pair.num_candidates)))
        if not prefix:
            continue
        row = np.full(pair.num_blocks, prefix[0])
        row[order[: len(prefix)]] = prefix
        gain = math.exp(min(base - rows.cost(tuple(row.tolist())), 50.0)) - 1.0
        value = gain**0.25 if gain > 1.0 else gain
        for depth, number in enumerate(prefix):
            visits, values = known[prefix[:depth]]
            visits[number] += 1.0
            values[number] += (value - values[number]) / visits[number]


def _chosen(
    visits: FloatArray, values: FloatArray, exploration: float, rng: np.random.Generator
) -> int:
    """The child with the best mean value plus a bonus for few visits; ties by chance."""
    count = len(visits)
    explored = math.sqrt(count / 10) / count * math.sqrt(visits.sum() + 1.0) / (1.0 + visits)
    worth = values + exploration * explored
    return int(rng.choice(np.flatnonzero(worth == worth.max())))


def tpe(rows: Rows, num_random: int = 10) -> None:
    """Let Optuna's TPE propose rows; random ones until ``num_random`` rows are known."""
    optuna = optional("optuna")
    kind = optuna.distributions.CategoricalDistribution(range(rows.pair.num_candidates))
    kinds = {str(block): kind for block in range(rows.pair.num_blocks)}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(n_startup_trials=num_random, seed=rows.problem.seed)
    study = optuna.create_study(sampler=sampler)
    for row, cost in rows.uniform():
        params = dict(zip(kinds, row, strict=True))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=cost))
    while True:
        rows.spending.check()
        asked = study.ask(kinds)
        study.tell(asked, rows.cost(tuple(asked.params[name] for name in kinds)))


def cma_es(rows: Rows, width: float = 1 / 6) -> None:
    """Let CMA-ES propose rows, from the best row of one candidate; ``width`` as in Optuna."""
    library, count = optional("cmaes"), rows.pair.num_candidates
    best, _ = min(rows.uniform(), key=lambda pair: pair[1])
    if len(best) == 1:
        return  # every row has one candidate
    search = library.CMA(
        mean=np.array(best) + 0.5,
        sigma=count * width,
        bounds=np.tile([0.0, float(count)], (len(best), 1)),
        seed=rows.problem.seed,
    )
    while True:
        rows.spending.check()
        asked = [search.ask() for _ in range(search.population_size)]
        whole = [np.minimum(each.astype(int), count - 1).tolist() for each in asked]
        search.tell([(x, rows.cost(tuple(row))) for x, row in zip(asked, whole, strict=True)])


def optional(name: str) -> Any:
    """An optional module.

    Raises:
        HeterogError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HeterogError(
            f"the rivals tpe and cma_es need Optuna and cmaes ({error}); install them with "
            "'pip install heterog[bench]', or leave these methods out."
        ) from error


class RowSearch(Planner):
    """A search of rows as a method; see the module docstring.

    Args:
        name: Name of the method.
        how: Function that tries rows.
        needs: Imports what it needs, apart from its seconds.
        most_repeated: As for ``Rows``.
    """

    stage = "search"
    is_random = True

    def __init__(
        self,
        name: str,
        how: Callable[[Rows], None],
        needs: Callable[[], object] = object,
        most_repeated: int = MOST_KNOWN,
    ) -> None:
        self.name, self._how, self._needs, self._most = name, how, needs, most_repeated

    def prepare(self, evaluator: Evaluator) -> None:
        """Import what it needs."""
        self._needs()

    def plan(self, problem: Problem) -> PlanResult:
        """Try rows until the budget is over."""
        return Rows(problem, self._how, self._most).answer(problem)
