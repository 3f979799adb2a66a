"""Policies as planners: ``agent`` answers alone, ``agent+search`` leads a local search.

``agent`` begins by a policy's rows (``proposals``) on some numbers of devices (``BY_ROWS``), else
by the best compositions of ``islands``, and by both where the first do not fit; led moves finish
them for the rest of the seconds of an answer (``answer_limit_s``). Rows are one pass of the
network and at most 64 draws (the first one greedy), more rows made from the best draws, and the
best rows refined for a bounded number of simulated tasks. Beside other methods, which have plans
already, rows are all: ``auto`` gives them the seconds of a whole answer (``whole_s``), or none.
Asked again, ``agent`` makes further draws.

``agent+search`` gives the same proposals to local search as seeds, lets its moves use parts of
further draws, so that the policy's probabilities order them, and has them led by the policy that
improves plans (``improver``).

torch is imported when one is asked to plan.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from heterog.agents.op_level import NUM_RETURNED
from heterog.agents.proposals import (
    MANY_DEVICES,
    NUM_SAMPLES,
    Proposals,
    Proposed,
    answer_s,
)
from heterog.errors import HeterogError
from heterog.methods.islands.planner import Islands
from heterog.methods.local_search.planner import Lead, LocalSearch
from heterog.methods.planner import Budget, Planner, PlanResult, Problem
from heterog.methods.registry import Methods, built_in_methods
from heterog.names import shown
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.evaluator import Evaluator

if TYPE_CHECKING:
    from heterog.agents.policy import Policy

DEFAULT_POLICY = "default"
LEARNED = ("agent", "agent+search")
"""Methods that use a policy."""
NUM_PROPOSALS = 256
MOST_DEVICES = 1024
"""An answer for 836 takes about ten seconds."""
ROWS_PART = 0.25
"""Part of the budget for draws if there is nothing to divide."""
ISLANDS_PART = 0.4
"""Part of an answer for islands; moves have the rest."""
LEAST_FOR_MOVES = 8
"""Fewest remaining evaluations with which moves finish an answer."""
LEAST_FOR_ISLANDS = 64
"""Fewest evaluations with which an answer begins by islands: the first few compositions are longer
than the first rows."""
BY_ROWS = range(5, 17)
"""Numbers of devices on which an answer begins by rows. There islands' part of a second is too
short: over the better of both beginnings, on 59 training pairs, steps were 12.5 % longer with
islands and 3.9 % with rows; on 54 pairs with fewer devices 1.1 and 3.5 %, on 155 with more 4.5 and
14.7 %."""
ANSWER_LIMITS = ((16, 0.95), (64, 1.95), (1024, 4.95))
"""(devices, seconds of an answer if no other method runs), interpolated over the logarithm of
devices. The last simulation ends a little later: an answer takes 1, 2 and 5 seconds."""
MOST_EVALUATIONS = 600
"""Most evaluations of an answer, under a budget in evaluations."""
LARGEST = 250_000
"""Most tasks of a simulation in an answer: half a second if few devices can be folded."""
_LAST_S, _HAS_ASKED = "last_s", "has_asked"  # in a method's memory
_TOO_MANY = PlanResult(
    candidates=(),
    num_evaluations=0,
    reason=f"a policy is not asked about more than {MOST_DEVICES} devices",
)


_NOTHING = PlanResult(candidates=(), num_evaluations=0)


@cache
def _loaded(source: str) -> "Policy":
    """The policy of a name or file."""
    from heterog.agents.checkpoint import load_checkpoint

    return load_checkpoint(source).policy


def _network(policy: "str | Policy") -> "Policy":
    return _loaded(policy) if isinstance(policy, str) else policy


_proposed: WeakKeyDictionary[Evaluator, dict[tuple[object, ...], Proposed]] = WeakKeyDictionary()


def ask(policy: "str | Policy", problem: Problem, num_samples: int = NUM_SAMPLES) -> Proposed:
    """The proposals of a policy (a name, a file or the network itself) for a problem.

    Under a budget in seconds, earlier proposals for the same evaluator are reused, so that
    ``agent+search`` need not wait for the network that ``agent`` has just run. Proposals that were
    cut short are not reused: with more time there would be better ones.
    """
    known = _proposed.setdefault(problem.evaluator, {})
    key = _key(policy, problem, num_samples)
    if problem.budget.seconds is not None and key in known:
        return replace(known[key], num_evaluations=0)
    return _more(_make(policy, problem, num_samples), policy, problem, num_samples)


def _make(policy: "str | Policy", problem: Problem, num_samples: int) -> Proposals:
    name = policy if isinstance(policy, str) else ""
    return Proposals(problem, _network(policy), num_samples, name=name)


def _more(
    proposals: Proposals, policy: "str | Policy", problem: Problem, num_samples: int
) -> Proposed:
    """More proposals, remembered if they are whole."""
    found = proposals.more(problem)
    if problem.budget.seconds is not None and found.is_whole:
        known = _proposed.setdefault(problem.evaluator, {})
        known[_key(policy, problem, num_samples)] = found
    return found


def _key(policy: "str | Policy", problem: Problem, num_samples: int) -> tuple[object, ...]:
    """Everything but the budget on which whole proposals depend."""
    return policy, problem.seed, problem.step_barrier, problem.orders, num_samples


def _has_many(problem: Problem) -> bool:
    """Whether to start from other methods' plans, since a policy's answer takes too long."""
    return bool(problem.seeds) and problem.evaluator.cluster.num_devices > MANY_DEVICES


def _is_too_short(needed_s: float, problem: Problem) -> bool:
    """Whether a whole answer takes too long while other methods have plans already."""
    return bool(problem.seeds) and problem.budget.limit_s < needed_s


def answer_limit_s(num_devices: int) -> float:
    """Seconds of an answer if no other method runs.

    >>> [round(answer_limit_s(devices), 2) for devices in (2, 16, 64, 256, 1024)]
    [0.95, 0.95, 1.95, 3.45, 4.95]
    """
    devices, seconds = zip(*ANSWER_LIMITS, strict=True)
    return float(np.interp(np.log(num_devices), np.log(devices), seconds))


def of_an_answer(budget: Budget, num_devices: int) -> Budget:
    """The part of a budget that an answer may take.

    >>> of_an_answer(Budget(seconds=60.0), 16), of_an_answer(Budget(evaluations=50), 16)
    (Budget(seconds=0.95, evaluations=None), Budget(seconds=None, evaluations=50))
    """
    if budget.evaluations is not None:
        return Budget(evaluations=min(budget.evaluations, MOST_EVALUATIONS))
    return Budget(seconds=min(budget.limit_s, answer_limit_s(num_devices)))


def left_of(budget: Budget, evaluations: int, seconds: float = 0.0) -> Budget:
    """What is left of a budget after some evaluations or seconds; at least a little.

    >>> left_of(Budget(evaluations=5), 2, 9.0), left_of(Budget(seconds=1.0), 2, 9.0)
    (Budget(seconds=None, evaluations=3), Budget(seconds=0.001, evaluations=None))
    """
    if budget.evaluations is not None:
        return Budget(evaluations=max(budget.evaluations - evaluations, 1))
    return Budget(seconds=max(budget.limit_s - seconds, 1e-3))


def shipped_lead() -> Lead:
    """The lead of the shipped policy that improves plans."""
    from heterog.agents.improver import led_by, load_improver

    return led_by(load_improver())


NewLead = Callable[[], Lead | None]
"""Function that makes the lead of a search; ``None`` for random moves."""


P = ParamSpec("P")
R = TypeVar("R")


def as_torch_starts(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run with torch's own defaults; a model's file may have set others."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from heterog.graph.python_state import torchs_defaults

        with torchs_defaults():
            return function(*args, **kwargs)

    return run


class _AsksPolicy(Planner):
    """A method that asks a policy, and goes on when it is asked again.

    Args:
        policy: Name of a shipped policy, a file, or the network itself.
        lead: Function that makes the lead of the moves that finish an answer, or of the search.
    """

    resumes = True
    answers_whole = True

    def __init__(
        self, policy: "str | Policy" = DEFAULT_POLICY, *, lead: NewLead = shipped_lead
    ) -> None:
        self.policy, self._lead = policy, lead

    def _refusal(self, problem: Problem) -> PlanResult | None:
        """The result if a whole answer takes longer than there is time."""
        if not _is_too_short(needed_s := self.whole_s(problem), problem):
            return None
        reason = (
            f"a policy's answer takes about {needed_s:.1f} s, of the "
            f"{problem.budget.limit_s:.1f} s that it has; a larger budget lets it answer"
        )
        return PlanResult(candidates=(), num_evaluations=0, reason=reason)

    @as_torch_starts
    def prepare(self, evaluator: Evaluator) -> None:
        """Run on the smallest graph: libraries take about a second to set up at first use."""
        from heterog.agents.improver import load_improver
        from heterog.agents.ways import FEWEST_FOR_WAYS, draw_in, make_ways
        from heterog.envs.pair import Pair

        if evaluator.cluster.num_devices > MOST_DEVICES:
            return
        pair, count = Pair(smallest_graph(), evaluator.cluster), FEWEST_FOR_WAYS
        ways = make_ways(_network(self.policy), [pair], count)
        draw_in(ways, count, np.random.default_rng(0))
        load_improver()


class Agent(_AsksPolicy):
    """A policy's own answer; see the module docstring.

    Args:
        policy: As for every method that asks one.
        name: Name of the method.
        num_samples: Number of draws, the greedy one included.
        only_rows: Whether an answer is the rows of the policy alone.
        by_rows: Whether an answer begins by rows on any number of devices, as with a policy of
            one's own, which is asked for what it proposes.
        lead: As for every method that asks a policy.
    """

    stage = "zero_shot"

    def __init__(
        self,
        policy: "str | Policy" = DEFAULT_POLICY,
        *,
        name: str = "agent",
        num_samples: int = NUM_SAMPLES,
        only_rows: bool = False,
        by_rows: bool = False,
        lead: NewLead = shipped_lead,
    ) -> None:
        super().__init__(policy, lead=lead)
        self.name, self._num_samples = name, num_samples
        self._only_rows, self._by_rows = only_rows, by_rows

    def whole_s(self, problem: Problem) -> float:
        """Seconds of an answer: what the last one took, or a guess."""
        last_s: float = problem.memory.get(_LAST_S, 0.0)
        return last_s or answer_s(problem.evaluator)

    @as_torch_starts
    def plan(self, problem: Problem) -> PlanResult:
        """Propose once; most of the budget is left over."""
        evaluator = problem.evaluator
        if evaluator.cluster.num_devices > MOST_DEVICES:
            return _TOO_MANY
        if self._only_rows or problem.seeds:
            return self._rows(problem)
        budget = of_an_answer(problem.budget, evaluator.cluster.num_devices)
        asked = replace(problem, budget=budget)
        whole, spending, begun = problem.spend(), asked.spend(), _NOTHING
        with whole.limits():
            for found in self._beginnings(asked):
                begun = PlanResult(
                    candidates=(*found.candidates, *begun.candidates),
                    num_evaluations=begun.num_evaluations + found.num_evaluations,
                )
                if begun.num_evaluations >= budget.most_evaluations:
                    break
        rest = left_of(budget, begun.num_evaluations, spending.seconds)
        if begun.candidates and (spending.is_cut or rest.most_evaluations < LEAST_FOR_MOVES):
            return begun
        with _without_large(evaluator):
            finished = LocalSearch(self._lead()).plan(
                replace(asked, budget=rest, seeds=begun.candidates, memory={})
            )
        return PlanResult(
            candidates=(*finished.candidates[: NUM_RETURNED - 1], *begun.candidates[:1]),
            num_evaluations=begun.num_evaluations + finished.num_evaluations,
        )

    def _beginnings(self, problem: Problem) -> Iterator[PlanResult]:
        """Plans from which moves begin; those of the other kind, too, if the best do not fit.

        The second kind has as much of the budget as if it were the first: an answer that fits may
        be late.
        """
        evaluator = problem.evaluator
        begins = [self._from_islands, self._from_rows]
        is_small = evaluator.cluster.num_devices in BY_ROWS
        is_short = problem.budget.most_evaluations < LEAST_FOR_ISLANDS
        if self._by_rows or problem.has_only_places or is_small or is_short:
            begins.reverse()
        for begin in begins:
            found = begin(problem)
            yield found
            for best in found.candidates[:1]:
                if evaluator.evaluate(best.strategy, best.orders[0]).is_ok:
                    return

    def _from_islands(self, problem: Problem) -> PlanResult:
        with _without_large(problem.evaluator):
            return begun_by_islands(problem, ISLANDS_PART)

    def _from_rows(self, problem: Problem) -> PlanResult:
        # Half of a count is left for moves, if they are many; of seconds, rows leave enough.
        budget = problem.budget
        is_halved = budget.seconds is None and budget.most_evaluations >= LEAST_FOR_ISLANDS
        part = 0.5 if is_halved else 1.0
        return self._rows(replace(problem, budget=problem.budget.part(part)))

    def _rows(self, problem: Problem) -> PlanResult:
        """The best rows of the policy."""
        if (refusal := self._refusal(problem)) is not None:
            return refusal
        spending = problem.spend()
        proposals = problem.resumed(lambda asked: _make(self.policy, asked, self._num_samples))
        asked = replace(problem, budget=problem.budget.part(_rows_part(problem)))
        found = _more(proposals, self.policy, asked, self._num_samples)
        problem.memory[_LAST_S] = spending.seconds * (1.0 if found.is_whole else 2.0)
        return PlanResult(candidates=found.candidates, num_evaluations=found.num_evaluations)


@contextmanager
def _without_large(evaluator: Evaluator) -> Iterator[None]:
    """A block in which no program of more than ``LARGEST`` tasks is simulated."""
    allowed, evaluator.most_tasks = evaluator.most_tasks, min(evaluator.most_tasks, LARGEST)
    try:
        yield
    finally:
        evaluator.most_tasks = allowed


def begun_by_islands(problem: Problem, part: float) -> PlanResult:
    """The best compositions that ``islands`` finds with a part of a budget."""
    return Islands().plan(replace(problem, budget=problem.budget.part(part), memory={}))


class AgentSearch(_AsksPolicy):
    """Local search that policies lead; see the module docstring.

    It also starts from compositions of ``islands``; after other methods, from their plans instead.
    """

    name = "agent+search"
    stage = "search"
    improves = True
    is_random = True

    def whole_s(self, problem: Problem) -> float:
        """Seconds of an answer and an equally long search; 0 if no answer is needed."""
        known = _proposed.get(problem.evaluator, {})
        has_asked = _has_many(problem) or problem.memory.get(_HAS_ASKED)
        if has_asked or _key(self.policy, problem, NUM_SAMPLES) in known:
            return 0.0
        return 2.0 * answer_s(problem.evaluator)

    @as_torch_starts
    def plan(self, problem: Problem) -> PlanResult:
        """Propose, then search with the rest of the budget."""
        from heterog.agents.policy import draw

        if _has_many(problem) or problem.memory.get(_HAS_ASKED):
            return LocalSearch(self._lead()).plan(problem)
        if (refusal := self._refusal(problem)) is not None:
            return refusal
        spending = problem.spend()
        # Half of a budget in seconds is left for the search, however long the policy takes.
        whole = 1.0 if problem.budget.seconds is None else 0.5
        asked = replace(problem, budget=problem.budget.part(_rows_part(problem, whole)))
        found = ask(self.policy, asked)
        problem.memory[_HAS_ASKED] = found.is_whole
        begun = _NOTHING
        if not problem.seeds and not problem.has_only_places:
            rest = left_of(problem.budget, found.num_evaluations, spending.seconds)
            begun = begun_by_islands(replace(problem, budget=rest), 0.5)
        rng = np.random.default_rng([problem.seed, NUM_PROPOSALS])
        rows = draw(found.scores, found.pair, NUM_PROPOSALS, rng).rows
        table = found.pair.table
        proposals = tuple(
            tuple(table[number] for number in found.pair.groups(row)) for row in rows
        )
        seeds = tuple(
            replace(candidate, orders=(problem.first_order,)) for candidate in found.candidates
        )
        num_evaluations = found.num_evaluations + begun.num_evaluations
        rest = left_of(problem.budget, num_evaluations, spending.seconds)
        searched = LocalSearch(self._lead()).plan(
            replace(
                problem,
                budget=rest,
                seeds=(*seeds, *begun.candidates, *problem.seeds),
                proposals=proposals,
            )
        )
        return PlanResult(
            candidates=(*searched.candidates, *found.candidates[:1], *begun.candidates[:1]),
            num_evaluations=num_evaluations + searched.num_evaluations,
        )


def _rows_part(problem: Problem, whole: float = 1.0) -> float:
    """Part of the budget for draws: where there are only places, moves decide these better."""
    return ROWS_PART if problem.has_only_places else whole


def policy_methods(policy: str = DEFAULT_POLICY) -> tuple[Agent, AgentSearch]:
    """The two methods that ask a policy.

    Args:
        policy: Name of a shipped policy, or a file; any but the default is loaded at once, so that
            mistakes show early.

    Raises:
        HeterogError: it is no text, or no policy can be read there.
    """
    if not isinstance(policy, str):
        raise HeterogError(f"`policy` is {shown(policy)}; give a name or the path of a file.")
    if policy != DEFAULT_POLICY:
        _loaded(policy)
    return Agent(policy, by_rows=policy != DEFAULT_POLICY), AgentSearch(policy)


def default_methods(policy: str = DEFAULT_POLICY) -> Methods:
    """All methods of this package, and the two that ask a policy."""
    return built_in_methods().having(*policy_methods(policy))
