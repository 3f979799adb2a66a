"""What an evaluation of a strategy says: whether it can run, how long a step takes, and memory."""

import math
from dataclasses import dataclass
from enum import StrEnum

from heterog.simulator.engine import Order


class Outcome(StrEnum):
    """Whether a strategy can run."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    CANNOT_RUN = "cannot_run"
    """Ranks would not compute what one device does, or get stuck."""
    TOO_LARGE = "too_large"
    """Not simulated: its program has more tasks than ``Evaluator.most_tasks``."""
    GIVEN_UP = "given_up"
    """Slower than the limit that was asked for; ``step_time_s`` is a lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Predicted step time and memory of a strategy.

    Attributes:
        outcome: ``ok`` or why it cannot run.
        step_time_s: Seconds per training step, also where memory does not suffice.
        peak_memory_bytes: Predicted peak memory of each device.
        order: Order in which waiting tasks ran.
        shortage: For ``out_of_memory``, the device and the missing bytes in words.
        overflow_bytes: Bytes missing on the worst device, 0 if none; infinite for what cannot run.
    """

    outcome: Outcome
    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    order: Order
    shortage: str = ""
    overflow_bytes: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the strategy can run."""
        return self.outcome == Outcome.OK

    @property
    def preference(self) -> tuple[float, float]:
        """Sort key, smaller is better: what fits comes first (overflow 0), then the shorter step.

        What was given up comes last: whether it fits is not known.
        """
        if self.outcome == Outcome.GIVEN_UP:
            return math.inf, self.step_time_s
        return self.overflow_bytes, self.step_time_s


def given_up(seconds: float, order: Order) -> Evaluation:
    """Evaluation of a strategy that was given up, because it takes at least these seconds."""
    return Evaluation(
        outcome=Outcome.GIVEN_UP, step_time_s=seconds, peak_memory_bytes=(), order=order
    )
