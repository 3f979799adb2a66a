"""The reward of a strategy: relative to data parallelism, with graded memory overrun.

    fits:       R = log(baseline / T), from -1 down ever slower towards -1.5
    does not:   R = -1.5 - min(log(1 + overrun), 1)

T is the step time, *baseline* the step time of the best data-parallel baseline (whether it fits or
not), *overrun* the missing bytes on the worst device over its memory. Unlike the paper's reward
(-sqrt(T), times ten where memory runs out), it means the same for every model and cluster, and
falls with the overrun. Among strategies that fit, a faster one always has the higher reward; every
strategy that fits has a higher reward than any that does not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from heterog.envs.pair import Pair, Score

MISFIT = -1.5
"""Upper bound of the rewards of strategies that do not fit."""
_SLOW = -1.0
"""Logarithm below which the rewards of strategies that fit fall ever slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward and its terms.

    Attributes:
        reward: Value that a learner gets.
        step_time_s: Seconds per step.
        speedup: The baseline's seconds per step over ``step_time_s``.
        overflow: Missing bytes on the worst device over its memory.
    """

    reward: float
    step_time_s: float
    speedup: float
    overflow: float


RewardFunction = Callable[["Pair", "Score"], Reward]
"""Function from a pair and the score of a row to a reward, for environments and learners."""


def reward_of(pair: Pair, score: Score) -> Reward:
    """The reward of a scored row; see the module docstring."""
    speedup = pair.baseline_s / score.step_time_s
    value = math.log(speedup)
    if score.overflow > 0.0:
        value = MISFIT - min(math.log1p(score.overflow), 1.0)
    elif value < _SLOW:
        value = MISFIT + (_SLOW - MISFIT) * math.exp((value - _SLOW) / (_SLOW - MISFIT))
    return Reward(
        reward=value, step_time_s=score.step_time_s, speedup=speedup, overflow=score.overflow
    )
