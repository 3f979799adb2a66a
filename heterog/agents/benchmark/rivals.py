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
from heterog.lowering.space import StrategySpace
from heterog.methods.data_parallel import device_speeds
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem, Tried
from heterog.methods.registry import Methods
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
        evaluator, spending = problem.evaluator, problem.spend()
        pair = Pair(evaluator.graph, evaluator.cluster, evaluator.cost_model)
        space = StrategySpace(
            evaluator.graph,
            evaluator.cluster,
            evaluator.tables,
            evaluator.channels,
            device_speeds(evaluator),
            pair.table,
        )

        def strategy(row: tuple[int, ...]) -> Strategy:
            return space.decode(
                pair.groups(row),
                bucket_bytes=DEFAULT_BUCKET_BYTES,
                step_barrier=problem.step_barrier,
            )

        rng = np.random.default_rng(problem.seed)
        tried: Tried[tuple[int, ...]] = Tried(evaluator, strategy)
        draws = 0
        with spending.limits():
            while not spending.is_over and draws < pair.num_candidates**pair.num_blocks:
                drawn = rng.integers(pair.num_candidates, size=pair.num_blocks)
                tried.evaluate(tuple(drawn.tolist()), problem.first_order)
                draws += 1
                spending.check()
        found = [
            Candidate(strategy=tried.strategies[point], orders=(problem.first_order,))
            for point in tried.best(4)
        ]
        return PlanResult(
            candidates=tuple(found),
            num_evaluations=spending.evaluations,
            reason="" if found else "no row that was drawn can run",
        )


def known_rows() -> Methods:
    """All methods, and those that are only here."""
    return default_methods().having(
        RandomSearch(), WithoutTraining("untrained", untrained), WithoutTraining("thumb", thumb)
    )
