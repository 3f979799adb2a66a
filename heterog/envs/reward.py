"""The reward of a strategy: relative to data parallelism, with graded memory overrun.

    fits:       R = log(baseline / T), from -1 down ever slower towards -1.5
    does not:   R = -1.5 - min(log(1 + overrun), 1)

T is the step time, *baseline* that of the best data-parallel baseline (whether it fits or not),
*overrun* the bytes missing on the worst device over its memory. Unlike the paper's -sqrt(T), times
ten where memory runs out, it means the same for every model and cluster, and less overrun is
better than more. Of two strategies that fit the faster has more, however much faster than data
parallelism both are, or slower; any that fits has more than any that does not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from heterog.envs.pair import Pair, Score

MISFIT = -1.5
"""Reward below which strategies are that do not fit."""
_SLOW = -1.0
"""Logarithm from which the rewards of strategies that fit fall ever slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward and its terms.

    Attributes:
        reward: Value that a learner gets.
        step_time_s: Seconds per step.
        speedup: The baseline's seconds over these.
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
