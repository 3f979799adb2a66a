"""Checks that every method has to pass; run them on your own with ``check_planner(Mine())``.

The tests of this package run the same checks on its own methods.
"""

from collections.abc import Callable
from dataclasses import replace

from heterog.cluster import Cluster
from heterog.errors import ConformanceError, HeterogError
from heterog.methods.planner import STAGES, Budget, Planner, PlanResult, Problem
from heterog.methods.registry import AUTO, Methods
from heterog.names import name_fault
from heterog.search.judging import run_method
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import lower_bound_s
from heterog.user_code import load_object

Check = Callable[[Planner, Evaluator], None]

_EVALUATIONS = 300
_OVERSPENT = 1.2
"""A search may exceed its budget of evaluations by a fifth: it checks only now and then."""


def check_planner(planner: Planner, evaluator: Evaluator | None = None) -> None:
    """Run every check on a method.

    Args:
        planner: The method.
        evaluator: Evaluator to try it on; by default that of one op on eight devices.

    Raises:
        ConformanceError: a check failed; says what was expected and what was found.
    """
    evaluator = evaluator or Evaluator(smallest_graph(), Cluster.load("paper_8gpu"))
    for check in CHECKS:
        check(planner, evaluator)


def check_name_and_stage(planner: Planner, evaluator: Evaluator | None = None) -> None:
    """A method has a name, a stage of ``planner.STAGES``, and a way to plan."""
    missing = [word for word in ("name", "stage") if not hasattr(planner, word)]
    missing += [] if callable(getattr(planner, "plan", None)) else ["plan"]
    if missing:
        raise ConformanceError(
            f"{type(planner).__name__} has no {' and no '.join(missing)}; a method is a class "
            "with a name, a stage and plan(problem), see heterog.methods.planner.Planner."
        )
    name, stage = planner.name, planner.stage
    fault = name_fault(name) if isinstance(name, str) else "is no text"
    if fault is None and ("," in str(name) or name == AUTO):
        fault = f"has a comma, or is '{AUTO}'; commas separate the names of methods"
    if fault is not None:
        raise ConformanceError(f"{type(planner).__name__} has the name {name!r}, which {fault}.")
    if stage not in STAGES:
        raise ConformanceError(f"{name} has the stage {stage!r}; known are {', '.join(STAGES)}.")


def check_strategies(planner: Planner, evaluator: Evaluator) -> None:
    """Every candidate is legal, and the referee can run it in every order it names."""
    result = _plan(planner, evaluator)
    if not result.candidates and not result.reason:
        raise ConformanceError(f"{planner.name} has no candidate and gives no reason for it.")
    for candidate in result.candidates:
        if not candidate.orders:
            raise ConformanceError(f"{planner.name} has a candidate without any order to run in.")
        try:
            candidate.strategy.check(evaluator.graph, evaluator.cluster)
        except HeterogError as error:
            raise ConformanceError(f"{planner.name} makes an illegal strategy: {error}") from error
        for order in candidate.orders:
            seconds = evaluator.referee(candidate.strategy, order).step_time_s
            if not 0.0 < seconds < float("inf"):
                raise ConformanceError(
                    f"{planner.name} has a strategy whose step takes {seconds} s in order "
                    f"{order.name.lower()}."
                )


def check_reproducible(planner: Planner, evaluator: Evaluator) -> None:
    """The same seed and budget of evaluations give the same candidates."""
    first, second = _plan(planner, evaluator), _plan(planner, evaluator)
    if first.candidates != second.candidates:
        raise ConformanceError(
            f"{planner.name} gives other candidates for the same problem the second time; draw "
            "from np.random.default_rng(problem.seed) and keep no state between problems."
        )


def check_budget(planner: Planner, evaluator: Evaluator) -> None:
    """A search stays within ``_OVERSPENT`` times its evaluations; baselines have no budget."""
    allowed = _EVALUATIONS // 6
    spent = _plan(planner, evaluator, budget=Budget(evaluations=allowed)).num_evaluations
    if planner.stage != "baseline" and spent > _OVERSPENT * allowed:
        raise ConformanceError(
            f"{planner.name} spent {spent} evaluations of {allowed}; ask Spending(problem.budget, "
            "problem.evaluator).is_over in the search loop."
        )


def check_barrier(planner: Planner, evaluator: Evaluator) -> None:
    """Strategies have the step barrier that the problem asks for."""
    for wanted in (True, False):
        found = _plan(planner, evaluator, step_barrier=wanted).candidates
        if any(candidate.strategy.step_barrier != wanted for candidate in found):
            raise ConformanceError(
                f"{planner.name} was asked for step_barrier={wanted} and answers otherwise."
            )


def check_bound(planner: Planner, evaluator: Evaluator) -> None:
    """The method's step, by the referee, is not below the lower bound."""
    bound = lower_bound_s(evaluator.graph, evaluator.cluster, evaluator.cost_model).seconds
    row = run_method(planner, _problem(evaluator))
    rules = row.candidate is not None and bool(row.candidate.strategy.op_rules)
    if row.step_time_s is not None and row.step_time_s < bound and not rules:
        raise ConformanceError(
            f"{planner.name} claims {row.step_time_s} s, below the lower bound of {bound} s."
        )


CHECKS: tuple[Check, ...] = (
    check_name_and_stage,
    check_strategies,
    check_reproducible,
    check_budget,
    check_barrier,
    check_bound,
)
"""All checks, in the order in which ``check_planner`` runs them."""


def load_planner(source: str, known: Methods) -> Planner:
    """The method of ``path/to/file.py:name``.

    Args:
        source: A file, and in it a class that can be made without arguments, or a function that
            returns a planner.
        known: Methods whose names are taken.

    Raises:
        InputFileError: the file or the name is missing, or running the file fails.
        ConformanceError: what was found is no planner, or has the name of another method.
    """
    made = load_object(source, "method")
    assert callable(made)
    try:
        planner: Planner = made()
    except Exception as error:
        raise ConformanceError(
            f"{source} cannot be made without arguments: {type(error).__name__}: {error}"
        ) from error
    check_name_and_stage(planner)
    if planner.name in known.names:
        raise ConformanceError(
            f"{source} is named '{planner.name}', as a method that there is already; give it "
            "another name."
        )
    return planner if isinstance(planner, Planner) else _Adapted(planner)


class _Adapted(Planner):
    """Wraps an object that has the attributes of a ``Planner`` without being one."""

    def __init__(self, made: Planner) -> None:
        self.name, self.stage, self._made = made.name, made.stage, made
        flags = ("resumes", "comes_last", "improves", "is_random", "answers_whole")
        for hook in (*flags, "most_part", "least_part", "prepare", "joins_auto", "whole_s"):
            if hasattr(made, hook):
                setattr(self, hook, getattr(made, hook))

    @property
    def written_in(self) -> str:
        """Module of the user's file; workers do not have that file."""
        return type(self._made).__module__

    def plan(self, problem: Problem) -> PlanResult:
        """Find strategies as the method does."""
        return self._made.plan(problem)


def _problem(evaluator: Evaluator) -> Problem:
    return Problem(evaluator=evaluator, budget=Budget(evaluations=_EVALUATIONS))


def _plan(planner: Planner, evaluator: Evaluator, **changes: object) -> PlanResult:
    return planner.plan(replace(_problem(evaluator), **changes))  # type: ignore[arg-type]
