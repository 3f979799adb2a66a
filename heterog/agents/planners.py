"""Policies as planners: ``agent`` answers alone, ``agent+search`` leads a local search.

``agent`` makes one pass of the network and at most 64 draws (the first one greedy), makes more
rows from the best draws, refines the best rows for a bounded number of simulated tasks and returns
four (``proposals``, ``op_level``). It neither includes nor improves baselines. Beside other
methods, ``auto`` gives it the seconds of a whole answer (``whole_s``), or none. Asked again,
``agent`` makes further draws. It also drafts whole plans; alone, in the seconds of
``answer_limit_s`` that the draws leave. In the seconds after that, led moves finish the best of
draws and drafts (``beginnings``).
``agent+search`` gives the same proposals to local search as seeds, lets its moves use parts of
further draws, so that the policy's probabilities order them, and has them led by the policy that
improves plans (``improver``).

torch is imported when one is asked to plan.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from heterog.agents.beginnings import DraftAgent, left_of
from heterog.agents.op_level import NUM_RETURNED
from heterog.agents.proposals import (
    MANY_DEVICES,
    NUM_SAMPLES,
    Proposals,
    Proposed,
    answer_s,
)
from heterog.errors import HeterogError
from heterog.methods.local_search.planner import Lead, LocalSearch
from heterog.methods.planner import Budget, Candidate, Planner, PlanResult, Problem
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
LEAST_FOR_DRAFTS, LEAST_DRAFTS_S = 64, 0.1
"""Fewest remaining evaluations, and seconds, with which drafts are tried, too."""
ANSWER_LIMITS = ((16, 0.95), (64, 1.95), (1024, 4.95))
"""(devices, seconds of an answer with drafts if no other method runs), interpolated over the
logarithm of devices. The more seconds rows take, the fewer drafts are tried. The last simulation
ends a little later: an answer takes 1, 2 and 5 seconds."""
_LAST_S, _HAS_ASKED, _DRAFTED = "last_s", "has_asked", "drafted"  # in a method's memory
_TOO_MANY = PlanResult(
    candidates=(),
    num_evaluations=0,
    reason=f"a policy is not asked about more than {MOST_DEVICES} devices",
)


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
    """Seconds of an answer if no other method runs; later, no more drafts are tried.

    >>> [round(answer_limit_s(devices), 2) for devices in (2, 16, 64, 256, 1024)]
    [0.95, 0.95, 1.95, 3.45, 4.95]
    """
    devices, seconds = zip(*ANSWER_LIMITS, strict=True)
    return float(np.interp(np.log(num_devices), np.log(devices), seconds))


def drafts_budget(left: Budget, num_devices: int, spent_s: float = 0.0) -> Budget:
    """Budget of drafts: seconds up to ``answer_limit_s``, minus those that draws have spent.

    >>> drafts_budget(Budget(seconds=60.0), 16, spent_s=0.7).seconds
    0.25
    """
    if left.seconds is None:
        return left
    return Budget(seconds=max(min(left.seconds, answer_limit_s(num_devices) - spent_s), 1e-3))


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
        lead: Function that makes the lead of the moves that finish drafts, or of the search.
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

    def _drafted(self, problem: Problem, left: Budget, spent_s: float = 0.0) -> PlanResult:
        """The best drafts and seeds, finished by moves; none if too little budget is left."""
        budget = drafts_budget(left, problem.evaluator.cluster.num_devices, spent_s)
        if budget.most_evaluations < LEAST_FOR_DRAFTS or budget.limit_s < LEAST_DRAFTS_S:
            return _NO_DRAFTS
        return DraftAgent(lead=self._lead()).plan(replace(problem, budget=budget))

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
        drafts: Whether whole plans are drafted beside the draws, and the best of both finished.
        lead: As for every method that asks a policy.
    """

    stage = "zero_shot"

    def __init__(
        self,
        policy: "str | Policy" = DEFAULT_POLICY,
        *,
        name: str = "agent",
        num_samples: int = NUM_SAMPLES,
        drafts: bool = True,
        lead: NewLead = shipped_lead,
    ) -> None:
        super().__init__(policy, lead=lead)
        self.name, self._num_samples, self._drafts = name, num_samples, drafts

    def whole_s(self, problem: Problem) -> float:
        """Seconds of an answer: what the last one took, or a guess."""
        last_s: float = problem.memory.get(_LAST_S, 0.0)
        return last_s or answer_s(problem.evaluator)

    @as_torch_starts
    def plan(self, problem: Problem) -> PlanResult:
        """Propose once; most of the budget is left over."""
        if problem.evaluator.cluster.num_devices > MOST_DEVICES:
            return _TOO_MANY
        if (refusal := self._refusal(problem)) is not None:
            return refusal
        spending = problem.spend()
        proposals = problem.resumed(lambda asked: _make(self.policy, asked, self._num_samples))
        asked = replace(problem, budget=problem.budget.part(_rows_part(problem)))
        found = _more(proposals, self.policy, asked, self._num_samples)
        problem.memory[_LAST_S] = spending.seconds * (1.0 if found.is_whole else 2.0)
        drafted: PlanResult | None = problem.memory.get(_DRAFTED)
        left = left_of(problem.budget, found.num_evaluations, spending.seconds)
        # Drafts take about as long again; beside other methods they wait until there is time.
        has_time = not _is_too_short(answer_s(problem.evaluator), replace(problem, budget=left))
        if self._drafts and has_time and drafted is None:
            spent_s = 0.0 if problem.seeds else spending.seconds
            drafted = self._drafted(replace(problem, seeds=found.candidates), left, spent_s)
            problem.memory[_DRAFTED] = replace(drafted, num_evaluations=0)
        drafted = drafted or _NO_DRAFTS
        return PlanResult(
            candidates=_best((*found.candidates, *drafted.candidates)),
            num_evaluations=found.num_evaluations + drafted.num_evaluations,
        )


class AgentSearch(_AsksPolicy):
    """Local search that policies lead; see the module docstring.

    Plans are drafted as by ``Agent``; after other methods, it starts from their plans instead.
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
        drafted = _NO_DRAFTS
        if not problem.seeds and not problem.has_only_places:
            rest = left_of(problem.budget, found.num_evaluations, spending.seconds)
            drafted = self._drafted(problem, rest.part(0.5))
        rng = np.random.default_rng([problem.seed, NUM_PROPOSALS])
        rows = draw(found.scores, found.pair, NUM_PROPOSALS, rng).rows
        table = found.pair.table
        proposals = tuple(
            tuple(table[number] for number in found.pair.groups(row)) for row in rows
        )
        seeds = tuple(
            replace(candidate, orders=(problem.first_order,)) for candidate in found.candidates
        )
        num_evaluations = found.num_evaluations + drafted.num_evaluations
        rest = left_of(problem.budget, num_evaluations, spending.seconds)
        searched = LocalSearch(self._lead()).plan(
            replace(
                problem,
                budget=rest,
                seeds=(*seeds, *drafted.candidates, *problem.seeds),
                proposals=proposals,
            )
        )
        return PlanResult(
            candidates=(*searched.candidates, *found.candidates[:1], *drafted.candidates[:1]),
            num_evaluations=num_evaluations + searched.num_evaluations,
        )


_NO_DRAFTS = PlanResult(candidates=(), num_evaluations=0)


def _best(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The best few by the referee; candidates that it has not judged come last."""
    unknown = math.inf, math.inf
    ranked = sorted(
        candidates, key=lambda each: unknown if each.judged is None else each.judged.preference
    )
    return tuple(ranked[:NUM_RETURNED])


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
    return Agent(policy), AgentSearch(policy)


def default_methods(policy: str = DEFAULT_POLICY) -> Methods:
    """All methods of this package, and the two that ask a policy."""
    return built_in_methods().having(*policy_methods(policy))
