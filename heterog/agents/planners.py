"""Policies as planners: ``agent`` answers alone, ``agent+search`` leads a local search.

``agent`` makes one pass of the network and at most 64 draws (the first one greedy), scores them
coarsely, scores the best eight at the op level (the best three of them with micro-batches and
recomputation too, which are no part of what a policy decides) and hands the best four over. No
baseline is among them and none is improved. ``agent+search`` gives the same proposals to local
search as seeds, and lets its moves take over parts of further draws, so that the policy's
probabilities order them.

Importing this registers both; torch is imported when one is asked to plan.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

# The other methods are registered before: the searches that start from what they find run last.
import heterog.planners.portfolio  # noqa: F401

# isort: split
from heterog.planners.data_parallel import device_speeds
from heterog.planners.local_search import LocalSearch
from heterog.planners.planner import Budget, Candidate, PlanResult, Spending, Task, register
from heterog.simulator.evaluator import UNROLLED_STEPS
from heterog.strategy.program import IntArray
from heterog.strategy.space import StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

if TYPE_CHECKING:
    from heterog.agents.checkpoint import Checkpoint
    from heterog.agents.policy import PairScores, Policy
    from heterog.envs.pair import Pair

DEFAULT_POLICY = "default"
NUM_SAMPLES = 64
NUM_RESCORED = 8
NUM_RETURNED = 4
NUM_PROPOSALS = 256
BUCKETS = (0, DEFAULT_BUCKET_BYTES)
NUM_VARIED = 3
TIGHT = 0.5
"""Part of the candidates that cannot hold the whole model from which memory counts as scarce."""
MICRO_BATCHES = (2, 4, 8)
HOPELESS = 0.05
"""Memory missing by the coarse evaluator, as a part, from which a row is left to recomputation."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """What a policy proposes for a task.

    Attributes:
        candidates: the best by the op-level evaluator, best first.
        num_evaluations: coarse and op-level simulations.
        pair: model and cluster as the policy sees them.
        scores: the policy's scores, for more draws.
        out_of_memory: part of the draws that do not fit, by the coarse evaluator.
    """

    candidates: tuple[Candidate, ...]
    num_evaluations: int
    pair: "Pair"
    scores: "PairScores"
    out_of_memory: float


class _Policies:
    """Loads each policy once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Checkpoint] = {}

    def get(self, source: str) -> "Checkpoint":
        """The policy of a name or file."""
        from heterog.agents.checkpoint import load_checkpoint

        if source not in self._loaded:
            self._loaded[source] = load_checkpoint(source)
        return self._loaded[source]


_policies = _Policies()


def propose(task: Task, policy: "str | Policy", num_samples: int = NUM_SAMPLES) -> Proposed:
    """Draw strategies for a task and choose the best.

    Args:
        task: graph, cluster, seed; evaluations beyond its budget are not made.
        policy: shipped name, file, or the network itself.
        num_samples: draws, the greedy one included.
    """
    from heterog.agents.policy import draw, score_pairs
    from heterog.envs.observation import WHOLE_OVERFLOWS
    from heterog.envs.pair import Pair

    network = _policies.get(policy).policy if isinstance(policy, str) else policy
    evaluator = task.evaluator
    if task.budget.evaluations is not None:
        # A fifth of a small budget is left for the op level.
        num_samples = max(min(num_samples, int(0.8 * task.budget.evaluations)), 1)
    pair = Pair(evaluator.graph, evaluator.cluster, evaluator.cost_model)
    scores = score_pairs(network, [pair])[0]
    rng = np.random.default_rng([task.seed, 64])
    greedy = draw(scores, pair, 1, rng, greedy=True).rows
    # Where memory is scarce, half of the draws may recompute.
    tight = bool((pair.observation.candidates[:, WHOLE_OVERFLOWS] > 0.5).mean() > TIGHT)
    loose = (num_samples - 1) // 2 if tight else 0
    drawn = draw(scores, pair, num_samples - 1 - loose, rng).rows
    recomputed = draw(scores, pair, loose, rng, recompute=True).rows
    rows = np.unique(np.concatenate([greedy, drawn, recomputed]), axis=0)
    found = [pair.score(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda n: found[n].preference)
    # Those that do not fit as they are follow by their seconds alone: recomputing, they may.
    loosely = sorted(range(len(rows)), key=lambda n: found[n].step_time_s)
    candidates, rescored = rescore(
        task, pair, rows[order], spent=len(rows), recomputing=rows[loosely] if tight else rows[:0]
    )
    out_of_memory = float(np.mean([each.overflow > 0.0 for each in found]))
    _log.info(
        "policy %s, seed %d: %d draws for %s, %d different, %.0f %% do not fit",
        policy if isinstance(policy, str) else "in training",
        task.seed, num_samples, pair.name, len(rows), 100.0 * out_of_memory,
    )  # fmt: skip
    return Proposed(
        candidates=candidates,
        num_evaluations=len(rows) + rescored,
        pair=pair,
        scores=scores,
        out_of_memory=out_of_memory,
    )


def rescore(
    task: Task, pair: "Pair", rows: IntArray, *, spent: int, recomputing: IntArray | None = None
) -> tuple[tuple[Candidate, ...], int]:
    """Score the first rows at the op level, in both bucket sizes.

    What holds for the whole step is no part of a row: for the best three, micro-batches are tried
    as well, twice as many while that helps, and recomputation where nothing fits without.

    Args:
        task: what the rows are for.
        pair: its model and cluster.
        rows: best first by the coarse evaluator.
        spent: evaluations of the task's budget that are gone.
        recomputing: rows to be tried with recomputation first, best first.

    Returns:
        The best candidates, best first, and the evaluations made.
    """
    evaluator = task.evaluator
    space = StrategySpace(
        evaluator.graph,
        evaluator.cluster,
        evaluator.tables,
        evaluator.channels,
        device_speeds(evaluator),
        pair.table,
    )
    steps = 1 if task.step_barrier else UNROLLED_STEPS
    judge = task.orders[min(1, len(task.orders) - 1)]
    count = NUM_RESCORED
    if task.budget.evaluations is not None:
        count = max(min(count, (task.budget.evaluations - spent) // len(BUCKETS)), 1)
    again = [space.add(replace(decision, recompute=True)) for decision in pair.table]
    scored: list[tuple[tuple[float, float], _Whole]] = []

    def row_of(whole: _Whole) -> IntArray:
        row = pair.groups(rows[whole.number])
        return np.array(again, np.int32)[row] if whole.recompute else row

    def score(whole: _Whole) -> tuple[float, float]:
        """(bytes missing, seconds); nothing is found out once the budget is spent."""
        allowed = task.budget.evaluations
        if scored and allowed is not None and spent + len(scored) >= allowed:
            return np.inf, np.inf
        choice = space.encode(
            row_of(whole),
            bucket_bytes=whole.bucket_bytes,
            num_steps=steps,
            micro_batches=space.micro_batches(whole.num_micro),
        )
        preference = evaluator.evaluate_choice(choice, judge).preference
        scored.append((preference, whole))
        return preference

    def vary(best: tuple[float, float], whole: _Whole) -> None:
        if best[0] > 0.0 and not whole.recompute:
            best = min(best, score(replace(whole, recompute=True)))
        for num_micro in MICRO_BATCHES:
            if num_micro > pair.graph.batch_size:
                return
            found = score(replace(whole, num_micro=num_micro, recompute=False))
            if found[0] == 0.0 and found >= best:
                return
            best = min(best, found)
            if best[0] > 0.0:
                best = min(best, score(replace(whole, num_micro=num_micro, recompute=True)))

    if recomputing is not None and len(recomputing):
        rows = np.array([row for row in rows if pair.score(row).overflow <= HOPELESS] or rows[:1])
    plain = min(count, len(rows))
    for number in range(plain):
        for bucket_bytes in BUCKETS:
            score(_Whole(number=number, bucket_bytes=bucket_bytes))
    if recomputing is not None and len(recomputing):
        rows = np.concatenate([rows[:plain], recomputing[:count]])
        for number in range(plain, len(rows)):
            score(_Whole(number=number, bucket_bytes=DEFAULT_BUCKET_BYTES, recompute=True))
    scored.sort()
    for best, whole in scored[:NUM_VARIED]:
        vary(best, whole)
    scored.sort()
    candidates = tuple(
        Candidate(
            strategy=space.decode(
                row_of(whole),
                bucket_bytes=whole.bucket_bytes,
                step_barrier=task.step_barrier,
                micro_batches=space.micro_batches(whole.num_micro),
            ),
            orders=task.orders,
        )
        for _, whole in scored[:NUM_RETURNED]
    )
    return candidates, len(scored)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Whole:
    """A row of the policy's, by its number, and what holds for the whole step."""

    number: int
    bucket_bytes: int
    num_micro: int = 1
    recompute: bool = False


class Agent:
    """A policy's own answer; see the module docstring.

    Args:
        policy: shipped name, file, or the network itself.
        name: under which it is registered.
        num_samples: draws, the greedy one included.
    """

    stage = "zero_shot"

    def __init__(
        self,
        policy: "str | Policy" = DEFAULT_POLICY,
        *,
        name: str = "agent",
        num_samples: int = NUM_SAMPLES,
    ) -> None:
        self.name = name
        self.policy = policy
        self._num_samples = num_samples

    def plan(self, task: Task) -> PlanResult:
        """Answer once; most of the budget is left over."""
        begin = time.perf_counter()
        found = propose(task, self.policy, self._num_samples)
        return PlanResult(
            candidates=found.candidates,
            num_evaluations=found.num_evaluations,
            search_seconds=time.perf_counter() - begin,
        )


class AgentSearch:
    """Local search that a policy leads; see the module docstring.

    Args:
        policy: shipped name or file.
        name: under which it is registered.
    """

    stage = "search"

    def __init__(self, policy: str = DEFAULT_POLICY, *, name: str = "agent+search") -> None:
        self.name = name
        self.policy = policy

    def plan(self, task: Task) -> PlanResult:
        """Propose, then search with what is left of the budget."""
        from heterog.agents.policy import draw

        begin = time.perf_counter()
        spending = Spending(task.budget, task.evaluator)
        found = propose(task, self.policy)
        rng = np.random.default_rng([task.seed, NUM_PROPOSALS])
        rows = draw(found.scores, found.pair, NUM_PROPOSALS, rng).rows
        table = found.pair.table
        proposals = tuple(
            tuple(table[number] for number in found.pair.groups(row)) for row in rows
        )
        seeds = tuple(
            replace(candidate, orders=task.orders[:2][-1:]) for candidate in found.candidates
        )
        rest = _left(task.budget, found.num_evaluations, spending.seconds)
        searched = LocalSearch().plan(
            replace(task, budget=rest, seeds=(*seeds, *task.seeds), proposals=proposals)
        )
        return PlanResult(
            candidates=(*searched.candidates, *found.candidates[:1]),
            num_evaluations=found.num_evaluations + searched.num_evaluations,
            search_seconds=time.perf_counter() - begin,
        )


def _left(budget: Budget, evaluations: int, seconds: float) -> Budget:
    """What is left of a budget; never nothing."""
    if budget.evaluations is not None:
        return Budget(evaluations=max(budget.evaluations - evaluations, 1))
    assert budget.seconds is not None
    return Budget(seconds=max(budget.seconds - seconds, 1e-3))


def use_policy(policy: str) -> None:
    """Let ``agent`` and ``agent+search`` ask another policy.

    Args:
        policy: shipped name or file; another than the default is read now, so that a wrong one
            is told early.
    """
    if policy != DEFAULT_POLICY:
        _policies.get(policy)
    register(Agent(policy))
    register(AgentSearch(policy))


register(Agent())
register(AgentSearch())
