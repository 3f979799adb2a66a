"""A policy's proposals: draws, scored coarsely, and the best of them at the op level.

A policy decides the rows: device set, shares and synchronisation of every block. They are drawn,
and others made of them, in ``ways``. Settings of the whole step are no part of a row, and are
tried for the best rows in ``op_level``.
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
from heterog.agents.op_level import NUM_RESCORED, NUM_RETURNED, Scored, Scorer, Whole
from heterog.agents.stages import of_each_length
from heterog.planners.planner import Candidate, Problem, Spending
from heterog.strategy.program import IntArray

if TYPE_CHECKING:
    from heterog.agents.policy import PairScores, Policy
    from heterog.agents.ways import Way
    from heterog.envs.pair import Pair

NUM_SAMPLES = 64
NUM_PIPELINED = 5
"""Number of rows drawn as pipelines that are scored at the op level."""
NUM_MADE = 10
"""Number of pipelines made of them that are, with split backward passes."""
HOPELESS = 0.05
"""Missing part of memory, by the coarse evaluator, from which a row is left to other ways."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A policy's proposals for a problem.

    Attributes:
        candidates: The best by the op-level evaluator, best first.
        num_evaluations: Number of coarse and op-level simulations.
        pair: Model and cluster as the policy sees them, in the way that the best one came from.
        scores: The policy's scores of that pair, for more draws.
        out_of_memory: Part of the draws that do not fit, by the coarse evaluator.
    """

    candidates: tuple[Candidate, ...]
    num_evaluations: int
    pair: "Pair"
    scores: "PairScores"
    out_of_memory: float


def propose(
    problem: Problem, network: "Policy", num_samples: int = NUM_SAMPLES, *, name: str = ""
) -> Proposed:
    """Draw strategies for a problem and choose the best.

    Args:
        problem: Graph, cluster and seed; evaluations beyond its budget are not made.
        network: The policy.
        num_samples: Number of draws, the greedy one included.
        name: Name of the policy, for logs.
    """
    from heterog.agents.ways import BALANCED, FEWEST_FOR_WAYS, draw_in, make_ways
    from heterog.envs.pair import Pair

    if problem.budget.evaluations is not None:
        # A fifth of a small budget is left for the op level.
        most = int(0.8 * problem.budget.evaluations / (1.0 + BALANCED))
        num_samples = max(min(num_samples, most), 1)
    evaluator, spending = problem.evaluator, problem.spend()
    tables = [Pair(evaluator.graph, evaluator.cluster, evaluator.cost_model)]
    if num_samples >= FEWEST_FOR_WAYS:
        tables += [pair for pair in (tables[0].divided(),) if pair is not None]
    ways = make_ways(network, tables, num_samples)
    with spending.limits():
        draw_in(ways, num_samples, np.random.default_rng([problem.seed, 64]), spending.check)
    scored, spent = _scored(problem, tables, ways, spending)
    scored.sort(key=lambda each: each[0][0])
    found = Proposed(
        candidates=tuple(candidate for (_, candidate), _ in scored[:NUM_RETURNED]),
        num_evaluations=spent,
        pair=scored[0][1].pair,
        scores=scored[0][1].scores,
        out_of_memory=float(np.mean([each.overflow > 0 for way in ways for each in way.found])),
    )
    _log.info(
        "policy %s, seed %d: %d draws for %s, %.0f %% do not fit",
        name or "in training", problem.seed, num_samples, tables[0].name,
        100.0 * found.out_of_memory,
    )  # fmt: skip
    return found


def _scored(
    problem: Problem, tables: "Sequence[Pair]", ways: "Sequence[Way]", spending: Spending
) -> "tuple[list[tuple[Scored, Way]], int]":
    """The best strategies of each table with the way they came from, and all evaluations so far.

    The rows of the better table are refined.
    """
    drawn = sum(len(way.rows) for way in ways)
    scorers: list[tuple[Scorer, list[Way]]] = []

    def spent() -> int:
        return drawn + sum(scorer.num_evaluations for scorer, _ in scorers)

    for table in tables:
        own = [way for way in ways if way.pair.table is table.table]
        if not len(own[0].rows):  # out of time before it was drawn in
            continue
        scorer = Scorer(problem, table, spent())
        with spending.limits():
            _score(scorer, own)
            scorer.judge_best()
        if spending.is_cut:
            scorer.ensure(own[0].rows[0])
        scorers.append((scorer, own))
    best = min((scorer for scorer, _ in scorers), key=lambda scorer: scorer.best_judged)
    with spending.limits():
        best.refine()
    return [
        (each, own[-1] if is_pipelined else own[0])
        for scorer, own in scorers
        for each, is_pipelined in scorer.candidates()
    ], spent()


def _score(scorer: "Scorer", ways: "Sequence[Way]") -> None:
    """Score the best rows of a table's ways at the op level."""
    plain, *pipelined = ways
    found = plain.found
    order = sorted(range(len(found)), key=lambda n: found[n].preference)
    others: list[list[tuple[IntArray, Whole]]] = []
    if plain.is_tight:  # by seconds alone: rows that do not fit may fit if they recompute
        loosely = sorted(order, key=lambda n: found[n].step_time_s)
        others.append([(plain.rows[n], Whole(recompute=1.0)) for n in loosely[:NUM_RESCORED]])
        order = [n for n in order if found[n].overflow <= HOPELESS] or order[:1]
    for way in pipelined:
        whole = Whole(num_micro=way.pair.num_micro)
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
    found = tuple(candidate for (_, candidate), _ in scorer.candidates())
    return found, scorer.num_evaluations
