"""Checks that every reward must pass, your own, too: ``check_reward(mine)``."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from heterog.envs.pair import Pair, Score
from heterog.envs.reward import Reward, RewardFunction
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import ConformanceError
from heterog.names import own_name
from heterog.user_code import load_object

_NUM_ROWS = 32  # random rows tried on each pair


def check_reward(reward: RewardFunction, pairs: Sequence[Pair] = ()) -> None:
    """Call a reward on strategies that fit and strategies that do not.

    Args:
        reward: Reward to be checked.
        pairs: Models and clusters to try it on; a toy by default.

    Raises:
        ConformanceError: the reward fails, returns something else than a ``Reward``, is not
            finite, differs the second time, changes the score's terms, or is the same for all
            strategies.
    """
    name = own_name(reward)
    rng = np.random.default_rng(0)
    values: set[float] = set()
    for pair in pairs or [Pair(chain_graph(), toy_cluster())]:
        for row in rng.integers(pair.num_candidates, size=(_NUM_ROWS, pair.num_blocks)):
            score = pair.score(row)
            for each in (score, replace(score, overflow=0.5)):
                values.add(_asked(reward, name, pair, each))
    if len(values) == 1:
        raise ConformanceError(
            f"reward {name} is {values.pop():g} for each of {2 * _NUM_ROWS} strategies, so that "
            "there is nothing to learn from."
        )


def load_reward(source: str) -> RewardFunction:
    """The reward of ``path/to/file.py:name``, checked.

    Raises:
        InputFileError: the file or the name is missing, or running the file fails.
        ConformanceError: see ``check_reward``.
    """
    found = load_object(source, "reward")
    assert callable(found)
    check_reward(found)
    return found


def _asked(reward: RewardFunction, name: str, pair: Pair, score: Score) -> float:
    """The reward of one score, after the checks that need only this score."""
    try:
        found, again = reward(pair, score), reward(pair, score)
    except Exception as error:
        raise ConformanceError(
            f"reward {name} fails on {score}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Reward):
        raise ConformanceError(
            f"reward {name} returns {type(found).__name__}; return a heterog.envs.reward.Reward."
        )
    if not math.isfinite(found.reward):
        raise ConformanceError(f"reward {name} is {found.reward} for {score}; it must be finite.")
    if found != again:
        raise ConformanceError(f"reward {name} gives two answers for {score}: {found}, {again}.")
    if (found.step_time_s, found.overflow) != (score.step_time_s, score.overflow):
        raise ConformanceError(
            f"reward {name} changes step_time_s or overflow: {found} for {score}; learners read "
            "from them whether a strategy fits. Only 'reward' is yours to choose."
        )
    if not 0.0 < found.speedup < math.inf:
        raise ConformanceError(
            f"reward {name} gives the speed-up {found.speedup}; it is pair.baseline_s over the "
            "step time."
        )
    return float(found.reward)
