"""Rows: the results of methods, ranks of them, and how sure the gain of one over another is."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from heterog.methods.planner import Candidate
from heterog.records import (
    VALUE,
    Flag,
    Int32,
    MadeBy,
    Name,
    NumBytes,
    PositiveSeconds,
    Seconds,
    Series,
    Text,
    Word,
    finite,
)

OUTCOMES = ("ok", "out_of_memory", "cannot_run", "too_large", "not_applicable")
"""Possible outcomes of a method; plan files with other words are refused."""


def _not_stated(value: object) -> object:
    raise ValueError("is not a field of a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """Result of one method, judged by the referee: a row of every comparison and plan file.

    Attributes:
        method: Name of the planner.
        stage: ``"baseline"``, ``"search"``, ``"zero_shot"`` or ``"finetuned"``.
        outcome: One of ``OUTCOMES``.
        step_time_s: Seconds per step; ``None`` unless ``ok``.
        order: Name of the order it ran in.
        peak_memory_bytes: Predicted peak memory of each device.
        num_evaluations: Number of simulations spent.
        search_seconds: Seconds spent.
        shortage: Reason why it is not ``ok``, in words.
        overflow_bytes: Bytes missing on the worst device: 0 if it fits, infinite if it cannot run.
            No file has it.
        candidate: The strategy; ``None`` if the method does not apply. No file has it.
        noisy_step_times_s: Seconds per step when devices and links are not as fast as predicted,
            one for each draw of ``pricing.intervals``; the same draws for every method. Empty if
            no quoted gain needs the row.
        is_rehearsed: Whether the strategy was played through on all ranks without data; otherwise
            ``ok`` is only the simulator's judgement.
        note: Remark, for example that the method was starved or that a beam cut its search.
        starved: Whether its part of the budget was over after a few evaluations, so that a
            larger budget may find better strategies.
    """

    __pydantic_config__: ClassVar = VALUE

    method: Name
    stage: Word
    outcome: Word
    step_time_s: PositiveSeconds | None
    order: Word
    peak_memory_bytes: Series[NumBytes]
    num_evaluations: Int32
    search_seconds: Seconds
    shortage: Text = ""
    overflow_bytes: Annotated[float, MadeBy(_not_stated)] = 0.0
    candidate: Annotated[Candidate | None, MadeBy(_not_stated)] = None
    noisy_step_times_s: Series[PositiveSeconds] = ()
    is_rehearsed: Flag = False
    note: Text = ""  # plans of earlier versions have none
    starved: Flag = False

    @property
    def preference(self) -> tuple[float, float]:
        """Sort key, as ``Evaluation.preference``; smaller is better."""
        return self.overflow_bytes, self.step_time_s or 0.0


Rank = Callable[[MethodRow], tuple[float, ...]]
"""Function from a method's row to a few numbers; the row with the smallest is the best."""


def by_time(row: MethodRow) -> tuple[float, ...]:
    """Rank by the shortest step among those that fit; by nearness to fitting if none does."""
    return row.preference


BEST_DDP, TUNED_UNIFORM = "best_ddp", "tuned_uniform"
REFERENCES = (BEST_DDP, TUNED_UNIFORM)
"""Reference methods: speed-ups are quoted over the faster one."""
DATA_PARALLEL = ("ev_ps", "ev_ar", "cp_ps", "cp_ar", "ddp", "ddp_accumulate")
"""Methods of data parallelism as people run it, for comparison where no reference was asked."""
Ratio: TypeAlias = Annotated[float, finite(1e-12, 1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A speed-up and its range under noise.

    Attributes:
        over: Name of the method that it is measured against.
        speedup: Predicted speed-up.
        low: Least speed-up over all draws and the prediction.
        high: Largest one.
    """

    __pydantic_config__: ClassVar = VALUE

    over: Name
    speedup: Ratio
    low: Ratio
    high: Ratio

    def __str__(self) -> str:
        return f"{self.speedup:.2f}x, {self.low:.2f}x to {self.high:.2f}x under noise"


def gain(row: MethodRow, baseline: MethodRow) -> Gain:
    """Speed-up of one row over another; both must be ``ok``.

    The range is over draws; in each draw, both have the same factors on devices and links.
    """
    assert row.step_time_s is not None
    assert baseline.step_time_s is not None
    nominal = baseline.step_time_s / row.step_time_s
    pairs = zip(baseline.noisy_step_times_s, row.noisy_step_times_s, strict=True)
    ratios = [nominal, *(slow / fast for slow, fast in pairs)]
    return Gain(over=baseline.method, speedup=nominal, low=min(ratios), high=max(ratios))


def reference_of(rows: Iterable[MethodRow]) -> MethodRow | None:
    """The row that speed-ups are quoted over: the faster one of ``REFERENCES``.

    If neither can run, or neither was asked, the fastest one of ``DATA_PARALLEL``; ``None`` if
    none can run.
    """
    own = list(rows)
    return fastest([row for row in own if row.method in REFERENCES]) or fastest(
        [row for row in own if row.method in DATA_PARALLEL]
    )


def fastest(rows: Sequence[MethodRow]) -> MethodRow | None:
    """The row with the shortest step, ``None`` if nothing can run."""
    timed = [(row.step_time_s, index) for index, row in enumerate(rows) if row.step_time_s]
    return rows[min(timed)[1]] if timed else None


def robust_rank(rows: Sequence[MethodRow], rank: Rank) -> Rank:
    """Rank rows that were compared under noise by their regret, the others after them.

    The regret of a row in a draw is the ratio of its step to the shortest step of all rows in the
    same draw. Rows are ranked by its mean over draws.

    Args:
        rows: Rows; those with seconds under noise have the same number of draws.
        rank: Rank of rows without seconds under noise, and of rows of equal regret.
    """
    noisy = {row.method: row.noisy_step_times_s for row in rows if row.noisy_step_times_s}
    least = [min(each) for each in zip(*noisy.values(), strict=True)]
    regret = {
        method: sum(own / best for own, best in zip(seconds, least, strict=True)) / len(least)
        for method, seconds in noisy.items()
    }
    return lambda row: (regret.get(row.method, math.inf), *rank(row))
