"""The environment of arriving jobs: Gymnasium's checks, its masks, and what it reports."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from heterog.cluster import Cluster
from heterog.envs.job_partition import JobPartitionEnv
from heterog.envs.registration import JOB_PARTITION
from heterog.envs.toy import chain_graph
from heterog.errors import HeterogError
from heterog.search.arrivals.evaluated import EvaluatedCluster, TrainingJob
from heterog.search.arrivals.profiled import RampCluster, draw_requests
from heterog.search.arrivals.queueing import blocking_rate, most_devices, run_rule


def test_gymnasium_accepts_it() -> None:
    env = gym.make(JOB_PARTITION, render_mode="ansi")
    check_env(env.unwrapped)
    assert "of 32 devices are free" in str(env.unwrapped.render())


def test_the_mask_of_an_empty_cluster_is_the_papers() -> None:
    env = JobPartitionEnv()
    seen, _ = env.reset(seed=0)
    assert np.flatnonzero(seen["action_mask"]).tolist() == [0, 1, 2, 4, 6, 8, 16]
    assert env.observation_space.contains(seen)


def test_maximum_partitioning_in_the_environment_is_that_of_the_rule() -> None:
    env = JobPartitionEnv(deadlines="C", episode_s=1e5)
    seen, _ = env.reset(options={"episode": 5})
    rewards: list[float] = []
    is_over, info = False, dict[str, Any]()
    while not is_over:
        seen, reward, is_over, _, info = env.step(np.flatnonzero(seen["action_mask"])[-1])
        rewards.append(reward)
        assert env.observation_space.contains(seen)
    requests = draw_requests(RampCluster(), "C", 5, episode_s=1e5)
    verdicts = run_rule(RampCluster(), requests, most_devices, end_s=1e5)
    assert info["blocking_rate"] == blocking_rate(verdicts)
    assert sum(info["causes"].values()) == pytest.approx(1.0)
    assert len(rewards) == 101
    assert info["masked_actions"] == 0


def test_an_illegal_action_rejects() -> None:
    env = JobPartitionEnv(episode_s=3000.0)
    env.reset(seed=1)
    _, reward, _, _, info = env.step(3)
    assert (reward, info["outcome"], info["masked_actions"]) == (-1.0, "rejected", 1)
    with pytest.raises(HeterogError, match="deadlines are one of A, B, C, D, not 'E'"):
        JobPartitionEnv(deadlines="E")


def test_it_runs_on_unequal_gpus() -> None:
    job = TrainingJob(graph=chain_graph(batch_size=16384), num_steps=1000)
    cluster = EvaluatedCluster(Cluster.load("homogeneous_8xa100"), {"chain": job}, ("cp_ar",))
    spacing_s = cluster.alone_s("chain") / 8.0
    env = JobPartitionEnv(cluster, "D", spacing_s=spacing_s, episode_s=20 * spacing_s)
    seen, _ = env.reset(seed=0)
    is_over, rewards = False, []
    while not is_over:
        assert env.observation_space.contains(seen)
        seen, reward, is_over, _, _ = env.step(2)
        rewards.append(reward)
    assert {-1.0, 1.0} >= set(rewards)
    assert max(rewards) == 1.0
