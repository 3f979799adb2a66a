"""Registers the environments with Gymnasium; ``import heterog.envs`` calls it.

Gymnasium 1.4 no longer reads entry points of packages. ``gymnasium.make`` and ``make_vec`` import
the package themselves for a name such as ``"heterog.envs:heterog/Strategy-v1"``.
"""

import gymnasium as gym

ONE_SHOT = "heterog/StrategyOneShot-v1"
STEP_BY_STEP = "heterog/Strategy-v1"
STRATEGY_ZOO = "heterog/StrategyZoo-v1"
JOB_PARTITION = "heterog/JobPartition-v0"
IMPROVE = "heterog/Improve-v0"


def register_envs() -> None:
    """Register all environments that are not registered yet."""
    for name, where in (
        (ONE_SHOT, "strategy_env:StrategyOneShotEnv"),
        (STEP_BY_STEP, "strategy_env:StrategyEnv"),
        (STRATEGY_ZOO, "strategy_env:strategy_env_of_names"),
        (JOB_PARTITION, "job_partition:JobPartitionEnv"),
        (IMPROVE, "improve_env:ImproveEnv"),
    ):
        if name not in gym.registry:
            gym.register(id=name, entry_point=f"heterog.envs.{where}")
