"""Methods that a learned one has to beat, and that nobody would plan with.

``random`` draws a candidate for each block and keeps the best of as many draws as its budget has.
``untrained`` and ``thumb`` answer as ``agent`` does, by the same draws, stages and refining, but
without training: with the weights of a seed, and with a rule of thumb in place of the network.
"""

from collections.abc import Callable

import numpy as np
import torch

from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.config import PolicyConfig
from heterog.agents.graph_data import PairBatch
from heterog.agents.planners import DEFAULT_POLICY, Agent, default_methods
from heterog.agents.policy import Policy, Scores
from heterog.envs.observation import PAIR_SLOWER
from heterog.envs.pair import Pair
from heterog.methods.data_parallel import space_of
from heterog.methods.planner import Planner, PlanResult, PointSearch, Problem
from heterog.methods.registry import Methods
from heterog.simulator.engine import Order
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Strategy

MASKED = -1e9
SMALLEST = PolicyConfig(width=4, num_heads=1, num_rounds=1)


class Fixed(Policy):
    """Scores without a network: a weight on analytic times, and a bonus for staying."""

    def __init__(self, slower: float, cut: float, stay: float) -> None:
        super().__init__(SMALLEST)
        self.slower, self.of_cut, self.of_stay = slower, cut, stay

    def forward(self, batch: PairBatch) -> Scores:
        """Score every block and candidate of a batch of pairs."""
        unary = -self.slower * batch.pairs[..., PAIR_SLOWER]
        blocks = torch.zeros(unary.shape[:2])
        return Scores(
            unary=unary.masked_fill(~batch.allowed, MASKED),
            pair=torch.zeros_like(batch.overlap),
            overlap=batch.overlap,
            cut=blocks + self.of_cut,
            stay=blocks + self.of_stay,
            value=torch.zeros(len(unary)),
            block_mask=batch.block_mask,
        )


def untrained(seed: int, sizes: PolicyConfig | None = None) -> Policy:
    """A network with weights of a seed; of the shipped policy's sizes if none are given."""
    torch.manual_seed(1000 + seed)
    return Policy(sizes or load_checkpoint(DEFAULT_POLICY).policy.config).eval()


def thumb(seed: int) -> Policy:
    """A rule of thumb: what is quick alone, and few cuts."""
    return Fixed(2.0, 1.0, 7.0).eval()


class WithoutTraining(Planner):
    """Answers as ``agent`` does, with another origin of scores.

    Args:
        name: Name of the row.
        policy: Makes the policy of a seed.
    """

    stage = "zero_shot"
    is_random = True

    def __init__(self, name: str, policy: Callable[[int], Policy]) -> None:
        self.name, self._policy = name, policy

    def plan(self, problem: Problem) -> PlanResult:
        """Answer as the policy does."""
        return Agent(self._policy(problem.seed)).plan(problem)


class RandomSearch(Planner):
    """Draws a candidate for each block, alike among all, and keeps the best rows."""

    name = "random"
    stage = "search"
    is_random = True

    def plan(self, problem: Problem) -> PlanResult:
        """Draw until the budget is over."""
        return _Draws(problem).answer(problem)


class _Draws(PointSearch[tuple[int, ...]]):
    """A point has the number of a candidate for each block."""

    num_returned = 4
    why_nothing = "no row that was drawn can run"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        evaluator = problem.evaluator
        self._pair = Pair(evaluator.graph, evaluator.cluster, evaluator.cost_model)
        self._space = space_of(evaluator, self._pair.table)

    def search(self) -> None:
        """See ``PointSearch``; stops where as many were drawn as there are."""
        pair, rng = self._pair, np.random.default_rng(self.problem.seed)
        draws = 0
        while not self.spending.is_over and draws < pair.num_candidates**pair.num_blocks:
            drawn = rng.integers(pair.num_candidates, size=pair.num_blocks)
            self.evaluate(tuple(drawn.tolist()), self.problem.first_order)
            draws += 1
            self.spending.check()

    def strategy_of(self, point: tuple[int, ...]) -> Strategy:
        """See ``PointSearch``."""
        return self._space.decode(
            self._pair.groups(point),
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            step_barrier=self.problem.step_barrier,
        )

    def orders(self, point: tuple[int, ...]) -> tuple[Order, ...]:
        """See ``PointSearch``."""
        return (self.problem.first_order,)


def known_rows() -> Methods:
    """All methods, and those that are only here."""
    return default_methods().having(
        RandomSearch(), WithoutTraining("untrained", untrained), WithoutTraining("thumb", thumb)
    )
