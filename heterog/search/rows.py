"""Rows: the results of methods, in comparisons and in plan files, and ranks of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

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
