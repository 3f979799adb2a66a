"""The reward of a strategy: relative to data parallelism, bounded, with graded memory overrun.

    fits:       R = clip(log(baseline / T), -1.5, 1.5)
    does not:   R = -1.5 - min(log(1 + overrun), 1)

T is the step time, *baseline* that of the best data-parallel baseline (whether it fits or not),
*overrun* the bytes missing on the worst device over its memory. Unlike the paper's -sqrt(T), times
ten where memory runs out, it means the same for every model and cluster, and less overrun is
better than more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from heterog.envs.pair import Pair, Score

BOUND = 1.5


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
    if score.overflow > 0.0:
        value = -BOUND - min(math.log1p(score.overflow), 1.0)
    else:
        value = min(max(math.log(speedup), -BOUND), BOUND)
    return Reward(
        reward=value, step_time_s=score.step_time_s, speedup=speedup, overflow=score.overflow
    )
