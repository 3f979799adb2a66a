"""A policy's proposals: draws, scored coarsely, and the best of them at the op level.

A row is the policy's decision: device set, shares and synchronisation of every block. ``ways``
draws rows and makes more from them. A row has no settings of the whole step; ``op_level`` tries
these for the best rows.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from heterog.agents.finishing import (
    Finish,
    Scheduled,
)
from heterog.agents.op_level import NUM_RESCORED, NUM_RETURNED, Scored, Scorer, Variation
from heterog.agents.stages import of_each_length
from heterog.lowering.program import IntArray
from heterog.methods.planner import Candidate, Problem, Spending
from heterog.simulator.evaluator import Evaluator

if TYPE_CHECKING:
    from heterog.agents.policy import PairScores, Policy
    from heterog.agents.ways import Way
    from heterog.envs.pair import Pair

NUM_SAMPLES = 64
MANY_DEVICES, FEW_SAMPLES = 512, 8
"""With more devices, a draw takes a quarter of a second; then, and if there are too few seconds
for a whole answer, only ``FEW_SAMPLES`` draws are made."""
MOST_UNIFORM = 32
"""Most uniform rows beside so few draws."""
NUM_PIPELINED = 5
"""Number of drawn pipelines that are scored at the op level."""
NUM_MADE = 10
"""Number of pipelines made near the drawn ones that are scored, with split backward passes."""
HOPELESS = 0.05
"""Missing part of memory, by the coarse evaluator, above which a plain row is not scored."""

ANSWER_S, ANSWER_BLOCK_S, ANSWER_OP_S = 0.3, 1.2e-4, 8e-5
"""CPU seconds of a policy's rows: constant, per group and device, and per op. They were
within a fifth of five answers (8, 16, 64, 235 and 287 devices; 61 to 111 groups, loaded cores);
models of few groups on many devices take longer (6 groups on 82: 1.1 s)."""
ANSWER_DEVICE_S = 0.012
"""CPU seconds per device with more than ``MANY_DEVICES``, where fewer draws are made."""
STATE_PART = 0.5
"""If parameters, gradients and optimizer state fill more than this part of a device, an answer
takes twice as long, because rows that divide this state are drawn, too."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A policy's proposals for a problem.

    Attributes:
        candidates: The best by the op-level evaluator, best first.
        num_evaluations: Number of coarse and op-level simulations.
        pair: Model and cluster as the policy sees them, in the way of the best candidate.
        scores: The policy's scores of that pair, for more draws.
        out_of_memory: Part of the draws that do not fit, by the coarse evaluator.
        is_whole: Whether the answer is complete; otherwise time was up.
    """

    candidates: tuple[Candidate, ...]
    num_evaluations: int
    pair: "Pair"
    scores: "PairScores"
    out_of_memory: float
    is_whole: bool = True


class Proposals:
    """A policy's proposals for a problem; every call of ``more`` adds draws.

    Args:
        problem: Graph, cluster and seed.
        network: The policy.
        num_samples: Number of draws of each call, the greedy one included.
        name: Name of the policy, for logs.
    """

    def __init__(
        self,
        problem: Problem,
        network: "Policy",
        num_samples: int = NUM_SAMPLES,
        *,
        name: str = "",
    ) -> None:
        from heterog.envs.pair import Pair

        evaluator = problem.evaluator
        graph, cluster, model = evaluator.graph, evaluator.cluster, evaluator.cost_model
        tables = [Pair(graph, cluster, model, beside=evaluator)]
        self._network, self._num_samples = network, num_samples
        self._name = name or "in training"
        self._tables: list[Pair] = tables
        self._ways: list[Way] = []
        self._scorers: list[tuple[Scorer, list[Way]]] = []
        self._times = 0

    def more(self, problem: Problem) -> Proposed:
        """Draw, and choose the best of all draws so far.

        Args:
            problem: The same problem with the budget of this call, which is not exceeded.
        """
        from heterog.agents.ways import BALANCED, draw_in

        num_samples = self._num_samples
        has_many = problem.evaluator.cluster.num_devices > MANY_DEVICES
        if num_samples > FEW_SAMPLES and not self._times:
            has_many |= answer_s(problem.evaluator) > problem.budget.limit_s
        if has_many:
            num_samples = min(num_samples, FEW_SAMPLES)
        if problem.budget.evaluations is not None:
            # A fifth of a small budget is left for the op level.
            most = int(0.8 * problem.budget.evaluations / (1.0 + BALANCED))
            num_samples = max(min(num_samples, most), 1)
        spending = problem.spend()
        self._prepare_ways(num_samples)
        rng = np.random.default_rng([problem.seed, 64, *[self._times] * (self._times > 0)])
        self._times += 1
        with spending.limits():
            draw_in(self._ways, num_samples, rng, spending.check)
            if has_many:
                limited = problem.budget.evaluations is not None
                self._ways[0].add_uniform(int(BALANCED * num_samples) if limited else MOST_UNIFORM)
        scored, spent = self._scored(problem, spending)
        scored.sort(key=lambda each: each[0][0])
        overflows = [each.overflow > 0 for way in self._ways for each in way.found]
        found = Proposed(
            candidates=tuple(candidate for (_, candidate), _ in scored[:NUM_RETURNED]),
            num_evaluations=spent,
            pair=scored[0][1].pair,
            scores=scored[0][1].scores,
            out_of_memory=float(np.mean(overflows)) if overflows else 0.0,
            is_whole=not spending.is_cut,
        )
        _log.info(
            "policy %s, seed %d: %d draws for %s, %.0f %% do not fit",
            self._name, problem.seed, num_samples, self._tables[0].name,
            100.0 * found.out_of_memory,
        )  # fmt: skip
        return found

    def _prepare_ways(self, num_samples: int) -> None:
        """Make the ways by one pass of the network, or let known ones begin again."""
        from heterog.agents.ways import FEWEST_FOR_WAYS, make_ways

        for way in self._ways:
            way.begin_again()
        if not self._ways:
            if num_samples >= FEWEST_FOR_WAYS:
                self._tables += [p for p in (self._tables[0].divided(),) if p is not None]
            self._ways = make_ways(self._network, self._tables, num_samples)

    def _scored(
        self, problem: Problem, spending: Spending
    ) -> "tuple[list[tuple[Scored, Way]], int]":
        """The best strategies of each table with their ways, and the number of evaluations.

        The rows of the best table are refined.
        """
        drawn = sum(len(way.rows) for way in self._ways)
        before = sum(scorer.num_evaluations for scorer, _ in self._scorers)

        def spent() -> int:
            return drawn - before + sum(scorer.num_evaluations for scorer, _ in self._scorers)

        known = {id(scorer.pair): scorer for scorer, _ in self._scorers}
        for table in self._tables:
            own = [way for way in self._ways if way.pair.table is table.table]
            scorer = known.get(id(table))
            if scorer is None:
                if not len(own[0].rows):  # out of time before it was drawn in
                    continue
                scorer = Scorer(problem, table, spent())
                self._scorers.append((scorer, own))
            else:
                scorer.begin(problem, spent())
            with spending.limits():
                _score(scorer, own)
                scorer.judge_best()
            if spending.is_cut:
                scorer.ensure(own[0].rows)
        best = min((scorer for scorer, _ in self._scorers), key=lambda each: each.best_judged)
        with spending.limits():
            best.refine()
        return [
            (each, own[-1] if is_pipelined else own[0])
            for scorer, own in self._scorers
            for each, is_pipelined in scorer.candidates()
        ], spent()


def _score(scorer: "Scorer", ways: "Sequence[Way]") -> None:
    """Score the best rows of a table's ways at the op level."""
    plain, *pipelined = ways
    found = plain.found
    order = sorted(range(len(found)), key=lambda n: found[n].preference)
    others: list[list[tuple[IntArray, Variation]]] = []
    if plain.is_tight:  # sorted by seconds alone: rows that do not fit may fit if they recompute
        loosely = sorted(order, key=lambda n: found[n].step_time_s)
        others.append([(plain.rows[n], Variation(recompute=1.0)) for n in loosely[:NUM_RESCORED]])
        order = [n for n in order if found[n].overflow <= HOPELESS] or order[:1]
    for way in pipelined:
        whole = Variation(num_micro=way.pair.num_micro)
        split = replace(whole, finish=Finish(schedule=Scheduled.SPLIT))
        drawn, made = (
            sorted(rows, key=lambda row: way.pair.score(row).preference)
            for rows in (way.rows[: way.num_drawn], way.rows[way.num_drawn :])
        )
        others.append([(row, each) for row in drawn[:NUM_PIPELINED] for each in (split, whole)])
        others.append([(row, split) for row in of_each_length(made)[:NUM_MADE]])
    in_turn = [each for turn in zip_longest(*others) for each in turn if each is not None]
    scorer.search(plain.rows[order], in_turn)


def rescore(
    problem: Problem, pair: "Pair", rows: IntArray, *, spent: int
) -> tuple[tuple[Candidate, ...], int]:
    """Score the first rows at the op level, in both bucket sizes, and vary the whole step.

    For the best few, micro-batches are tried as well, doubled while that helps, and recomputation
    if nothing fits without.

    Args:
        problem: Problem for the rows.
        pair: Its model and cluster.
        rows: Rows, best first by the coarse evaluator.
        spent: Evaluations of the problem's budget that are spent.

    Returns:
        The best candidates, best first, and the evaluations made.
    """
    scorer = Scorer(problem, pair, spent)
    scorer.search(rows)
    return tuple(candidate for (_, candidate), _ in scorer.candidates()), scorer.num_evaluations


def answer_s(evaluator: Evaluator) -> float:
    """Estimated CPU seconds of a whole answer."""
    graph, cluster = evaluator.graph, evaluator.cluster
    seconds = ANSWER_S + ANSWER_OP_S * graph.num_ops
    if cluster.num_devices > MANY_DEVICES:
        return seconds + ANSWER_DEVICE_S * cluster.num_devices
    seconds += ANSWER_BLOCK_S * evaluator.tables.num_groups * cluster.num_devices
    parameter_bytes = sum(float(graph.tensor_bytes[tensor]) for _, tensor, _ in graph.updates)
    state_bytes = (2.0 + graph.optimizer_state_ratio) * parameter_bytes
    usable_bytes = np.median([each.usable_memory_bytes for each in cluster.devices])
    return seconds * (2.0 if state_bytes > STATE_PART * usable_bytes else 1.0)
