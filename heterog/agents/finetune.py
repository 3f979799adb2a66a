"""Fine-tuning on one pair: the policy keeps learning from its own best strategies there.

Each step draws strategies, learns from them by REINFORCE, and imitates the best seen so far. Every
few steps, a short search starts from these (expert iteration). The result is the best strategy
seen, as in the paper's table 6, which gives the time to train for an unseen graph. It includes the
policy's proposals before and after, so fine-tuning is never worse than zero-shot. Training uses
the kind of rows that the best proposal has: plain, pipelined, or with a divided state.
"""

import copy

import numpy as np
import torch

from heterog.agents.elites import find_elites
from heterog.agents.graph_data import PairBatch
from heterog.agents.imitation import Example, Imitation
from heterog.agents.policy import Policy
from heterog.agents.proposals import Proposals, rescore
from heterog.agents.reinforce import Reinforce
from heterog.envs.pair import Pair, Score
from heterog.lowering.program import IntArray
from heterog.methods.planner import Budget, Planner, PlanResult, Problem, Spending
from heterog.runtime.accelerators import num_threads

_NUM_SAMPLES = 24  # draws of each training step
_SEARCH_EVERY = 8  # training steps between two searches
_SEARCH_EVALUATIONS = _SEARCH_EVERY * _NUM_SAMPLES
"""Evaluations of a search: as many as the draws of the steps between two searches."""
_NUM_KEPT = 8  # best rows that are kept


class FineTuned(Planner):
    """A policy, fine-tuned on the problem's pair with its own budget.

    Args:
        policy: Policy to begin with; it is not changed.
        budget: Budget of the fine-tuning.
        learning_rate: Learning rate of Adam.
    """

    name = "agent_finetuned"
    stage = "finetuned"

    def __init__(self, policy: Policy, budget: Budget, *, learning_rate: float = 3e-4) -> None:
        self.policy = policy
        self._budget = budget
        self._learning_rate = learning_rate

    def plan(self, problem: Problem) -> PlanResult:
        """Learn until the budget is over; return the best strategies seen."""
        before = Proposals(problem, self.policy).more(problem)
        pair = before.pair
        spending = Spending(self._budget, pair.evaluator)
        policy = copy.deepcopy(self.policy)
        rng = np.random.default_rng([problem.seed, 99])
        optimizer = torch.optim.Adam(policy.parameters(), self._learning_rate, betas=(0.9, 0.98))
        reinforce = Reinforce(_NUM_SAMPLES, entropy_nats=(8.0, 4.0))
        best: dict[bytes, tuple[IntArray, Score]] = {}
        batch = PairBatch([pair.observation])
        num_steps = 0
        with num_threads(1):  # see ``score_pairs``
            while not best or not spending.is_over:
                scores = policy(batch)
                made = reinforce.step(scores, [pair], [0], min(spending.fraction, 1.0), rng)
                loss = made.loss
                rows = [*made.rows[0]]
                num_steps += 1
                if num_steps % _SEARCH_EVERY == 0 and not spending.is_over:
                    left = self._budget.most_evaluations - spending.evaluations
                    starts = [*rows, *(row for row, _ in best.values())]
                    allowed = int(min(_SEARCH_EVALUATIONS, left))
                    rows += [*find_elites(pair, allowed, rng, starts).rows]
                for row in rows:
                    best[row.tobytes()] = (row, pair.score(row))  # a look-up: it is scored already
                kept = sorted(best.items(), key=lambda item: item[1][1].preference)[:_NUM_KEPT]
                best = dict(kept)
                top = kept[0][1][1]
                if top.overflow == 0.0:
                    elites = np.array([row for _, (row, score) in kept if score.overflow == 0.0])
                    example = _example(pair, elites, top.step_time_s)
                    loss = loss + Imitation([example]).loss(policy, [example], rng)[0]
                    problem.report(min(spending.fraction, 1.0), top.step_time_s)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
        rows_best = np.array([row for row, _ in best.values()])
        candidates, rescored = rescore(problem, pair, rows_best, spent=0)
        after = Proposals(problem, policy.eval()).more(problem)
        proposed = before.num_evaluations + after.num_evaluations
        return PlanResult(
            candidates=(*candidates, *before.candidates, *after.candidates),
            num_evaluations=spending.evaluations + rescored + proposed,
        )


def _example(pair: Pair, elites: IntArray, best_s: float) -> Example:
    return Example(
        index=0,
        name=pair.name,
        observation=pair.observation,
        elites=elites,
        best_s=best_s,
        baseline_s=pair.baseline_s,
        uniform_s=0.0,
        headroom=1.0,
        num_evaluations=0,
    )
