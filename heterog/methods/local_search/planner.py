"""Local search over rows of candidates, warm-started from other methods' strategies.

Simulated annealing with restarts changes runs of groups (``neighbours``): it shifts, adds and
removes boundaries, gives a run, part of it or all groups of one kind another decision, shards
layers or stops sharding them, and changes the settings of the whole step. In ablations on BERT and
Transformer, gains came from device subsets per range of layers, from collectives whose slices
follow the NICs, and from the order.

A search overfits the link model of its simulator. So the referee scores the best states of the
fast engine again, restarts begin from the referee's best states, and in the last part of the
budget the referee judges every move.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Protocol

import numpy as np

from heterog.grouped import grouped
from heterog.lowering import Choice
from heterog.methods.local_search.group_rules import (
    GroupRules,
)
from heterog.methods.local_search.neighbours import Neighbours, State, StateKey
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem
from heterog.methods.repair import repair
from heterog.methods.teams import without_needless_rules
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Outcome, given_up
from heterog.simulator.lower_bound import floor_s
from heterog.simulator.place_facts import PlaceFacts
from heterog.strategy.schedules import AS_IT_COMES
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Strategy

NUM_RETURNED = 4
"""Number of strategies returned, the best by the referee."""
NUM_ELITES = 12
REFEREE_FROM = 0.6
"""Part of the budget after which the referee judges every move."""
SIMPLIFY_FROM = 0.97
"""Part of the budget after which the best strategy is made simpler."""
COSTS_NOTHING = 2e-4
"""Relative rise of the step time that a simpler strategy may cost."""

_MOST_UNIFORM = 128  # uniform rows scored at the start
_UNIFORM_UNTIL = 0.25  # part of the budget after which no more uniform rows are scored
_UNIFORM_UNTIL_LED = 0.05  # the same for a led search, whose moves also reach uniform rows
_LEAST_SPEED = 0.25  # part of the cluster's speed that the devices of a uniform row need
_MOST_REPAIRED = 3  # seeds that do not fit and are repaired
_REPAIR_SHARE = 0.1  # part of the budget for each repair
_MOST_SHARDED = 3  # best starts, and machines, whose layers are sharded
_SHARD_SHARE = 0.05  # part of the budget for all of these together
_NEAR = 1.1  # ratio to the best start up to which a sharded start makes sharding moves allowed
_NUM_MOVES = 300  # moves of one annealing run
_MOST_IDLE = 20  # runs in a row without a new state after which the search ends
_IF_KEPT = 0.0  # limit for states whose cost matters only if they are among the best few
_HOT, _COLD = 0.02, 0.0005  # temperatures as parts of the start's cost


class Moves(Protocol):
    """Proposes the next point of a search; ``Neighbours`` draws it at random."""

    def of(self, state: State) -> State:
        """A point to try from a point."""
        ...


Lead = Callable[["Search"], Moves]
"""Function that makes the ``Moves`` of a search."""


class LocalSearch(Planner):
    """Simulated annealing on runs of groups; see the module docstring.

    Args:
        lead: Function that makes the moves, such as those of a policy; by default random ones.
        refused: Strategies whose changes, relative to the problem's first seed, are not made
            again; see ``Changes``.
    """

    name = "local_search"
    stage = "search"
    resumes = True
    improves = True
    is_random = True

    def __init__(self, lead: Lead | None = None, refused: Sequence[Strategy] = ()) -> None:
        self._lead, self._refused = lead, refused

    def plan(self, problem: Problem) -> PlanResult:
        """Search until the budget is over; return the best few different strategies."""
        return problem.resumed(lambda asked: Search(asked, self._lead, self._refused)).run(problem)


class Changes:
    """The differences between two points: groups, and settings of the whole step.

    If a plan was measured and did not pay, the prediction errs about its changes. It errs about
    any other plan that makes the same changes as well.

    Args:
        before: The point that is changed.
        after: The changed point.
    """

    def __init__(self, before: State, after: State) -> None:
        self._groups = np.flatnonzero(before.row != after.row)
        self._row = after.row[self._groups]
        self._settings = [
            (number, new)
            for number, (old, new) in enumerate(zip(before.key[1:], after.key[1:], strict=True))
            if old != new
        ]

    def are_in(self, state: State) -> bool:
        """Whether a point makes more than half of the changes; all groups count as one."""
        key = state.key[1:]
        parts = [float(key[number] == new) for number, new in self._settings]
        if len(self._groups):
            parts.append(float(np.mean(state.row[self._groups] == self._row)))
        return bool(parts) and sum(parts) > 0.5 * len(parts)


class _Judge:
    """Evaluates each state once, by the engine or the referee, and keeps the best few.

    Args:
        ask: Function that evaluates a state up to a limit; see ``Evaluator.evaluate``.
        tell: Function that gets the cost of every new best state.
    """

    def __init__(
        self,
        ask: Callable[[State, float], Evaluation],
        tell: Callable[[float], None] = lambda cost: None,
    ) -> None:
        self._ask = ask
        self._tell = tell
        self.found: dict[StateKey, Evaluation] = {}
        self.best: list[tuple[float, State]] = []  # different states, best first

    def cost(self, state: State, limit: float = math.inf) -> float:
        """Cost of a state; if it is above the limit, perhaps only a lower bound."""
        # Costs low enough for a state to be kept must be exact.
        limit = max(limit, self.best[-1][0] if len(self.best) == NUM_ELITES else math.inf)
        found = self.found.get(state.key)
        if found is None or (found.outcome == Outcome.GIVEN_UP and found.step_time_s <= limit):
            found = self._ask(state, limit)
            self.found[state.key] = found
            self._keep(cost_of(found), state)
        return cost_of(found)

    def _keep(self, cost: float, state: State) -> None:
        if len(self.best) < NUM_ELITES or cost < self.best[-1][0]:
            self.best.append((cost, state))
            self.best.sort(key=lambda pair: pair[0])
            del self.best[NUM_ELITES:]
            if self.best[0][1] is state:
                self._tell(cost)


class Search:
    """A local search that can be resumed with more budget.

    Args:
        problem: The first problem.
        lead: See ``LocalSearch``.
        refused: See ``LocalSearch``.

    Attributes:
        evaluator: Evaluator of the problem.
        neighbours: The random moves, and the rules that keep states legal.
        space: Candidates of the rows.
    """

    def __init__(
        self, problem: Problem, lead: Lead | None = None, refused: Sequence[Strategy] = ()
    ) -> None:
        self.problem = problem
        self.evaluator = problem.evaluator
        self.rng = np.random.default_rng(problem.seed)
        self.spending = problem.spend()
        self.is_seeded = False
        self.speeds = problem.evaluator.speeds
        self.space = problem.evaluator.space()
        self.num_groups = problem.evaluator.tables.num_groups
        self.rules = GroupRules(problem.evaluator)
        self.neighbours = Neighbours(problem, self.space, self.rules, self.rng)
        self.moves: Moves = self.neighbours if lead is None else lead(self)
        self._uniform_until = _UNIFORM_UNTIL if lead is None else _UNIFORM_UNTIL_LED
        self._refused: list[Changes] = []
        if refused:
            first = problem.seeds[0]
            before = self._states(first)[0]
            others = (self._states(replace(first, strategy=each))[0] for each in refused)
            self._refused = [Changes(before, other) for other in others]
        self._simulated: tuple[StateKey, Evaluation] | None = None
        self.engine = _Judge(partial(self._ask, problem.evaluator.evaluate))
        self.referee = _Judge(
            partial(self._ask, problem.evaluator.referee),
            tell=lambda cost: self.problem.report(self.spending.fraction, cost),
        )

    def run(self, problem: Problem) -> PlanResult:
        """Search with the budget of a problem: the first one, or a later one."""
        if problem is not self.problem:  # making the search counts for the first one
            self.problem, self.spending = problem, problem.spend()
        with self.spending.limits():
            self._search()
        return self._result()

    def _result(self) -> PlanResult:
        """The best few different strategies so far, made simpler while there is budget."""
        # If there was no time for the referee, the engine's best states are returned.
        best = [state for _, state in (self.referee.best or self.engine.best)[:NUM_RETURNED]]
        with self.spending.limits():
            for place, state in enumerate(best):
                best[place] = self._simpler(state)
        candidates = tuple(
            Candidate(strategy=self._strategy(state), orders=(state.order,))
            for state in {state.key: state for state in best}.values()
        )
        return PlanResult(
            candidates=self._with_best_seed(candidates),
            num_evaluations=self.spending.evaluations,
        )

    def _strategy(self, state: State) -> Strategy:
        strategy = self.space.decode(
            state.row, self.neighbours.settings(state), step_barrier=self.problem.step_barrier
        )
        return without_needless_rules(strategy)

    def _search(self) -> None:
        if self.is_seeded:
            self._join_seeds()
        else:
            self._seed()
        self.is_seeded = True
        idle = 0
        while (
            self.spending.fraction < SIMPLIFY_FROM
            and idle < _MOST_IDLE
            and not self.spending.is_over
        ):
            judge = self.referee if self.rng.random() < 0.75 else self.engine
            # Restarts go back to one of the best states, the first ones most often.
            which = min(int(self.rng.exponential(1.5)), len(judge.best) - 1)
            spent = self.spending.evaluations
            self._anneal(judge.best[which][1])
            idle = idle + 1 if self.spending.evaluations == spent else 0

    def _with_best_seed(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """The candidates, with the best judged seed if the search found nothing better.

        So even a search that is cut short does not end worse than it began.
        """
        seeds = [each for each in self.problem.seeds if each.judged is not None]
        seed = min(seeds, key=_judged_cost, default=None)
        if seed is None or (self.referee.best and self.referee.best[0][0] < _judged_cost(seed)):
            return candidates
        return seed, *candidates

    # --- starts ---------------------------------------------------------------------------------

    def _seed(self) -> None:
        """Score the other methods' strategies and uniform rows; the referee judges the best."""
        starts = [state for seed in self.problem.seeds for state in self._states(seed)]
        num_seeds = len(starts)
        starts += [self.everywhere(number) for number in self._uniform()]
        for index, state in enumerate(starts):
            is_late = index >= num_seeds and self.spending.fraction >= self._uniform_until
            if self.engine.best and (is_late or self.spending.is_over):
                break
            self.engine.cost(state, math.inf if index < num_seeds else _IF_KEPT)
        self._repair_seeds()
        self._team_seeds()
        self._shard_seeds()
        for index, (_, state) in enumerate(list(self.engine.best)):
            if index and self.spending.is_over:
                break
            self.referee.cost(state, _IF_KEPT)

    def _join_seeds(self) -> None:
        """Score new strategies of other methods; the referee judges the best of them."""
        for seed in self.problem.seeds:
            for state in self._states(seed):
                if self.engine.cost(state) <= self.engine.best[-1][0]:
                    self.referee.cost(state, _IF_KEPT)

    def _states(self, candidate: Candidate) -> list[State]:
        """A candidate's points in the search, one for each order."""
        strategy = candidate.strategy
        row, rules = self.space.row_of(strategy), self.rules.row_of(strategy.op_rules)
        states = [
            State(
                row,
                strategy.bucket_bytes,
                order,
                strategy.micro_batches,
                rules,
                strategy.schedule,
                strategy.blocks,
                strategy.first_bucket_bytes,
            )
            for order in candidate.orders
        ]
        return [self.neighbours.completed(state) for state in states]

    def _repair_seeds(self) -> None:
        """Repair the fastest strategies that do not fit, and add the results to the starts."""
        known = self.engine.found
        found = [(known.get(self._states(seed)[0].key), seed) for seed in self.problem.seeds]
        broken = [
            (each.step_time_s, place, seed)
            for place, (each, seed) in enumerate(found)
            if each is not None and each.outcome == Outcome.OUT_OF_MEMORY
        ]
        for _, _, candidate in sorted(broken)[:_MOST_REPAIRED]:
            if self.spending.is_over:
                return
            repaired = repair(
                self.evaluator,
                candidate.strategy,
                candidate.orders[0],
                budget=self.problem.budget.part(_REPAIR_SHARE),
            )
            for state in self._states(replace(candidate, strategy=repaired)):
                self.engine.cost(state)

    def _shard_seeds(self) -> None:
        """Shard layers, one kind after another, of the best starts and on every kind of machine.

        If sharding a kind of layers is faster, they stay sharded for the next kind. If no result
        comes near the best start, moves do not change rules of ops.
        """
        if self.spending.is_over:
            return
        ways = self.rules.layers
        until = self.spending.fraction + _SHARD_SHARE
        best = self.engine.best[0][0]
        bases: dict[bytes, State] = {}
        for _, state in self.engine.best:
            self.neighbours.may_shard |= bool(state.rules)
            if not state.rules:
                bases.setdefault(state.row.tobytes(), state)
        for base in (*list(bases.values())[:_MOST_SHARDED], *self._machines()):
            cost = self.engine.cost(base)
            for places in ways:
                if self.spending.fraction >= until:
                    return
                sharded = self.neighbours.sharded(base, places)
                if sharded is not None and self.engine.cost(sharded, cost) < cost:
                    base, cost = sharded, self.engine.cost(sharded)
            if base.rules and cost < _NEAR * best:
                self.neighbours.may_shard = True

    def _team_seeds(self) -> None:
        """Form teams inside hosts in the best starts and in replicas on all devices.

        If no result comes near the best start, moves do not form teams.
        """
        sizes = self.rules.team_sizes
        if self.spending.is_over or not sizes or not self.rules.may_cut(self.rules.of_teams):
            return
        best = self.engine.best[0][0]
        starts = [state for _, state in self.engine.best[:_MOST_SHARDED]]
        self.neighbours.may_team = any(state.rules == self.rules.of_teams for state in starts)
        everywhere = self.space.decisions_on(tuple(range(self.evaluator.cluster.num_devices)))[0]
        starts.append(
            starts[0]._replace(
                row=np.full(self.num_groups, self.space.add(everywhere), np.int32),
                micro_batches=(),
                schedule=AS_IT_COMES,
                rules=(),
                blocks=(),
            )
        )
        until = self.spending.fraction + _SHARD_SHARE
        for start, size in product(starts, sizes):
            if self.spending.fraction >= until:
                return
            cost = self.engine.cost(self.neighbours.in_teams(start, size), _NEAR * best)
            self.neighbours.may_team |= cost < _NEAR * best

    def _machines(self) -> list[State]:
        """States with everything on one machine, for each kind of machine with several devices."""
        cluster = self.evaluator.cluster
        kinds = grouped(
            (tuple(cluster.type_index[d] for d in devices), devices)
            for devices in cluster.host_devices
            if len(devices) > 1
        )
        fastest = sorted(
            (first for first, *_ in kinds.values()),
            key=lambda devices: -sum(self.speeds[d] for d in devices),
        )
        numbers = [
            self.space.add(self.space.decisions_on(devices)[0])
            for devices in fastest[:_MOST_SHARDED]
        ]
        return [self.everywhere(number) for number in numbers]

    def everywhere(self, number: int) -> State:
        """A state with one decision for all groups."""
        row = np.full(self.num_groups, number, np.int32)
        return State(row, DEFAULT_BUCKET_BYTES, self.problem.first_order)

    def _uniform(self) -> list[int]:
        """Candidates for uniform rows, first those with the fastest devices together."""
        total = sum(self.speeds)
        speed = [
            sum(self.speeds[device] for device in decision.devices)
            for decision in self.space.candidates[: self.neighbours.num_named]
        ]
        worth = [n for n in range(self.neighbours.num_named) if speed[n] >= _LEAST_SPEED * total]
        return sorted(worth, key=lambda n: (-speed[n], n))[:_MOST_UNIFORM]

    # --- scores ---------------------------------------------------------------------------------

    def _ask(
        self,
        evaluate: Callable[[Choice, Order, float], Evaluation],
        state: State,
        limit_s: float,
    ) -> Evaluation:
        self._simulated = None
        if any(changes.are_in(state) for changes in self._refused):
            return _refused(state.order)
        choice = self.space.encode(
            state.row, self.neighbours.settings(state), step_barrier=self.problem.step_barrier
        )
        if limit_s < math.inf:
            least_s = floor_s(self.evaluator.prices, choice)
            if least_s > limit_s:
                return given_up(least_s, state.order)
        found = evaluate(choice, state.order, limit_s)
        is_whole = found.outcome in (Outcome.OK, Outcome.OUT_OF_MEMORY)
        self._simulated = (state.key, found) if is_whole else None
        return found

    def evaluated(self, state: State, limit_s: float = math.inf) -> Evaluation:
        """The engine's evaluation of a point, which the search does not keep."""
        return self._ask(self.evaluator.evaluate, state, limit_s)

    def gain(self, before: State, after: State) -> float | None:
        """Log of the ratio of two points' costs; ``None`` if no judge knows both."""
        for judge in (self.referee, self.engine):
            old, new = judge.found.get(before.key), judge.found.get(after.key)
            if old is not None and new is not None:
                return math.log(cost_of(old) / cost_of(new))
        return None

    def looked_at(
        self, state: State, *, by_referee: bool = False
    ) -> tuple[Evaluation, PlaceFacts] | None:
        """A point's evaluation and facts; ``None`` if it is not simulated to its end.

        Args:
            state: The point.
            by_referee: Whether the referee judges it; facts come from the engine's times even so.
        """
        if by_referee:
            self._ask(self.evaluator.referee, state, math.inf)
        elif self._simulated is None or self._simulated[0] != state.key:
            self._ask(self.evaluator.evaluate, state, math.inf)
        facts = self.evaluator.facts()
        return None if self._simulated is None or facts is None else (self._simulated[1], facts)

    # --- annealing -------------------------------------------------------------------------------

    def _anneal(self, start: State) -> None:
        """One annealing run from a state; the referee then judges its best state."""
        judge = self.engine if self.spending.fraction < REFEREE_FROM else self.referee
        state, cost = start, judge.cost(start)
        best, best_cost = state, cost
        for move in range(_NUM_MOVES):
            if self.spending.is_over:
                break
            temperature = _HOT * cost * (_COLD / _HOT) ** (move / _NUM_MOVES)
            neighbour = self._neighbour(state)
            if neighbour is None:
                break
            # Metropolis's rule, with the random number drawn first: it gives the highest cost that
            # is accepted, and no evaluation above it has to be exact.
            accepted = cost - temperature * math.log(1.0 - self.rng.random())
            new = judge.cost(neighbour, accepted)
            if new <= accepted:
                state, cost = neighbour, new
                if cost < best_cost:
                    best, best_cost = state, cost
        self.referee.cost(best, _IF_KEPT)

    def _neighbour(self, state: State) -> State | None:
        """A drawn neighbour, unless that ends the budget: led moves evaluate the state first."""
        drawn = self.moves.of(state)
        return None if self.spending.is_over else drawn

    def _simpler(self, state: State) -> State:
        """A state with one decision for neighbours on the same devices, if that costs nothing.

        Annealing accepts moves without effect; the needless variety is hard to read.
        """
        limit = self.referee.cost(state) * (1.0 + COSTS_NOTHING)
        decided = [self.space.candidates[number] for number in state.row]
        members = [(decision.devices, decision.teams) for decision in decided]
        edges = [i for i in range(1, self.num_groups) if members[i] != members[i - 1]]
        for first, last in pairwise((0, *edges, self.num_groups)):
            numbers, counts = np.unique(state.row[first:last], return_counts=True)
            if len(numbers) == 1 or self.spending.is_over:
                continue
            row = state.row.copy()
            row[first:last] = numbers[np.argmax(counts)]
            simpler = state._replace(row=row)
            if self.referee.cost(simpler, limit) <= limit:
                state = simpler
        return state


_NOT_SIMULATED = 1e15
"""Above any overflow of memory; finite, because differences of costs decide."""


def _refused(order: Order) -> Evaluation:
    return Evaluation(
        outcome=Outcome.CANNOT_RUN,
        step_time_s=math.inf,
        peak_memory_bytes=(),
        order=order,
        shortage="its changes were measured, and did not pay",
        overflow_bytes=math.inf,
    )


def _judged_cost(candidate: Candidate) -> float:
    assert candidate.judged is not None
    return cost_of(candidate.judged)


def cost_of(evaluation: Evaluation) -> float:
    """Seconds, plus a charge for memory overflow that always outweighs speed."""
    if evaluation.outcome in (Outcome.TOO_LARGE, Outcome.CANNOT_RUN):
        return _NOT_SIMULATED
    if evaluation.outcome != Outcome.OUT_OF_MEMORY:
        return evaluation.step_time_s
    overflow_gib = evaluation.overflow_bytes / 2**30
    return evaluation.step_time_s * (10.0 + overflow_gib)
