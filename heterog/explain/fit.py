"""Changes that would make a strategy fit: each is simulated, none is guessed."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum

from heterog.graph.axis_plan import axis_plan
from heterog.lowering import Choice, encode
from heterog.methods.planner import Spending
from heterog.methods.recomputing import kinds_worth_trying
from heterog.simulator.engine import Order
from heterog.simulator.evaluation import Evaluation
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.memory_breakdown import Fit
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.strategy import Decision, Keeps, Strategy


class RemedyKind(StrEnum):
    """The kind of change that makes a strategy fit."""

    RECOMPUTE = "recompute"
    MICRO_BATCHES = "micro_batches"
    BATCH_SIZE = "batch_size"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change after which the strategy fits.

    Attributes:
        kind: Kind of change.
        amount: The groups that recompute their activations (all of them), the smallest number of
            micro-batches found, the largest global batch found, or the usable bytes that every
            device of a type must have.
        device_type: For memory, the type's name.
        keeps: For recomputation, what is not made again: the quickest kind that fits.
        step_time_s: Seconds per step with the change; ``None`` for memory, which changes nothing.
    """

    kind: RemedyKind
    amount: int
    device_type: str = ""
    keeps: Keeps = Keeps.NOTHING
    step_time_s: float | None = None


def remedies(
    evaluator: Evaluator,
    strategy: Strategy,
    order: Order,
    fit: Fit,
    spending: Spending | None = None,
) -> tuple[Remedy, ...]:
    """Every change that makes a strategy fit; none if it fits already.

    Micro-batches and batch sizes are found by doubling and bisection, as if more micro-batches or
    fewer samples never needed more memory; the results were simulated and fit.

    Args:
        evaluator: Evaluator of the graph and cluster.
        strategy: Strategy for them.
        order: Order in which waiting tasks run.
        fit: Its memory, by ``memory_fit``.
        spending: Limit of the simulations; what is not found in time is left out.
    """
    if fit.is_ok:
        return ()
    judge = _Judge(evaluator, strategy, order)
    found: list[Remedy | None] = []
    with spending.limits() if spending is not None else nullcontext():
        found.append(_recompute(evaluator, strategy, order))
        found.append(_micro_batches(judge))
        found.append(_batch_size(judge))
    return tuple(remedy for remedy in (*found, *_memory(fit)) if remedy is not None)


def _recompute(evaluator: Evaluator, strategy: Strategy, order: Order) -> Remedy | None:
    """The quickest remedy that recomputes every group, if one helps.

    Kinds that make less again free less: they are tried only as long as those before them fit.
    """
    found: list[Remedy] = []
    for keeps in reversed(kinds_worth_trying(evaluator.graph)):
        again = tuple(replace(each, recompute=True, keeps=keeps) for each in strategy.decisions)
        tried = evaluator.referee(replace(strategy, decisions=again), order)
        if not tried.is_ok:
            break
        found.append(
            Remedy(
                kind=RemedyKind.RECOMPUTE,
                amount=len(strategy.decisions),
                keeps=keeps,
                step_time_s=tried.step_time_s,
            )
        )
    return min(found, key=lambda remedy: remedy.step_time_s or math.inf, default=None)


class _Judge:
    """Evaluates a strategy under changes of its batch."""

    def __init__(self, evaluator: Evaluator, strategy: Strategy, order: Order) -> None:
        self._evaluator = evaluator
        self._strategy = strategy
        self._order = order
        self.batch_size = evaluator.graph.batch_size
        self.num_devices = evaluator.cluster.num_devices
        self.num_micro = strategy.num_micro_batches

    @property
    def may_be_cut(self) -> bool:
        """Whether every op has a meaning on a part of the batch."""
        rules = self._strategy.op_rules
        return not rules or axis_plan(self._evaluator.graph, rules).crossing is None

    def cut(self, num_micro: int) -> Evaluation:
        """The evaluation with a number of micro-batches."""
        return self._referee(self.batch_size, num_micro)

    def shrunk(self, batch_size: int) -> Evaluation:
        """The evaluation with a smaller batch in the same proportions.

        The graph is still that of the whole batch: whatever does not depend on the samples of a
        device stays as it is, everything else follows its samples.
        """
        return self._referee(batch_size, min(self.num_micro, batch_size))

    def _referee(self, batch_size: int, num_micro: int) -> Evaluation:
        choice = _choice(self._evaluator, self._strategy, batch_size, num_micro)
        return self._evaluator.referee(choice, self._order)


def _choice(evaluator: Evaluator, strategy: Strategy, batch_size: int, num_micro: int) -> Choice:
    """A strategy for a part of the batch, in even micro-batches."""
    idle = (0,) * num_micro
    parts = (split_evenly(batch_size, num_micro),) + (idle,) * (evaluator.cluster.num_devices - 1)
    changed = replace(
        strategy,
        decisions=tuple(_scaled(decision, batch_size) for decision in strategy.decisions),
        micro_batches=parts if num_micro > 1 else (),
        schedule=strategy.schedule
        if num_micro == strategy.num_micro_batches
        else replace(strategy.schedule, turns=()),  # these are for other micro-batches
    )
    given = evaluator.encode(strategy)
    # Lowering divides the tables' batch in proportion, so they get this batch size.
    tables = evaluator.tables_of(given)._replace(batch_size=batch_size)
    choice = encode(changed, tables, evaluator.channels, num_steps=given.num_steps)
    return choice._replace(rule_set=given.rule_set)


def _scaled(decision: Decision, batch_size: int) -> Decision:
    weights = tuple(float(share) for share in decision.shares)
    return replace(decision, shares=split_in_proportion(batch_size, weights))


def _micro_batches(judge: _Judge) -> Remedy | None:
    """The smallest number of micro-batches that fits, if there may be any."""
    if not judge.may_be_cut:
        return None
    low, high = judge.num_micro, judge.num_micro
    found: Evaluation | None = None
    while found is None and high < judge.batch_size:
        low, high = high, min(2 * high, judge.batch_size)
        tried = judge.cut(high)
        found = tried if tried.is_ok else None
    if found is None:
        return None
    amount, found = _bisect(low, high, found, judge.cut)
    return Remedy(kind=RemedyKind.MICRO_BATCHES, amount=amount, step_time_s=found.step_time_s)


def _batch_size(judge: _Judge) -> Remedy | None:
    """The largest batch that fits, with at least one sample for each device of the cluster."""
    smallest = judge.shrunk(judge.num_devices)
    if not smallest.is_ok:
        return None
    amount, found = _bisect(judge.batch_size, judge.num_devices, smallest, judge.shrunk)
    return Remedy(kind=RemedyKind.BATCH_SIZE, amount=amount, step_time_s=found.step_time_s)


def _bisect(
    bad: int, good: int, found: Evaluation, evaluate: Callable[[int], Evaluation]
) -> tuple[int, Evaluation]:
    """The amount nearest to ``bad`` that fits, and its evaluation; ``good`` is known to fit."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        tried = evaluate(middle)
        if tried.is_ok:
            good, found = middle, tried
        else:
            bad = middle
    return good, found


def _memory(fit: Fit) -> Iterator[Remedy]:
    """Memory needed by each type that lacks some; the need does not depend on sizes."""
    short = dict.fromkeys(d.device_type for d in fit.devices if d.lacking_bytes > 0)
    for name in short:
        needs = max(d.peak_bytes for d in fit.devices if d.device_type == name)
        yield Remedy(kind=RemedyKind.MEMORY, amount=needs, device_type=name)
