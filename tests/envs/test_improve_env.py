"""The environment of moves: what it shows, how it is repeated, and what sizes it takes."""

import math

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import heterog.envs  # noqa: F401
from heterog.cluster import Cluster
from heterog.envs.improve_env import ImproveEnv
from heterog.envs.toy import chain_graph, toy_cluster

EPISODE = 6


@pytest.fixture(scope="module")
def env() -> ImproveEnv:
    return ImproveEnv(num_moves=8, num_steps=EPISODE)


def walk(env: ImproveEnv, seed: int) -> tuple[list[float], list[dict[str, object]]]:
    """Rewards and infos of an episode that takes the first move that leads elsewhere."""
    _, info = env.reset(seed=seed)
    rewards, infos, is_over = [], [info], False
    while not is_over:
        _, reward, ended, is_over, info = env.step(np.int64(np.argmax(env.action_masks())))
        assert not ended
        rewards.append(reward)
        infos.append(info)
    return rewards, infos


def test_keeps_the_rules_of_gymnasium() -> None:
    env = gym.make("heterog/Improve-v0", num_moves=4, render_mode="ansi")
    check_env(env.unwrapped)
    assert " s a step, " in str(env.unwrapped.render())


def test_rewards_add_up_to_the_whole_gain(env: ImproveEnv) -> None:
    rewards, infos = walk(env, 0)
    assert len(rewards) == EPISODE
    whole = math.log(infos[0]["cost"] / infos[-1]["cost"])  # type: ignore[operator]
    assert math.isclose(sum(rewards), whole, abs_tol=1e-9)
    assert infos[-1]["best"] == min(info["cost"] for info in infos)  # type: ignore[type-var]


def test_repeats_at_a_seed(env: ImproveEnv) -> None:
    assert walk(env, 3) == walk(env, 3)
    assert walk(env, 3) != walk(env, 4)


def test_environments_side_by_side_share_prices_and_see_what_each_sees_alone() -> None:
    def seen(env: ImproveEnv) -> list[np.ndarray]:
        found = [env.reset(seed=5)[0]]
        found += [env.step(np.int64(number))[0] for number in (3, 1, 6, 2)]
        return [array for each in found for array in each.values()]

    pairs = [(chain_graph(), toy_cluster())]
    first, second = (ImproveEnv(pairs, num_moves=8) for _ in range(2))
    walk(first, 0)
    priced = [env._of(0)[0].evaluator.prices for env in (first, second)]
    assert priced[0].group_seconds is priced[1].group_seconds
    assert priced[0].pricer is priced[1].pricer
    alone = ImproveEnv([(chain_graph(), toy_cluster())], num_moves=8)
    assert alone._of(0)[0].evaluator.prices.group_seconds is not priced[0].group_seconds
    assert all(map(np.array_equal, seen(second), seen(alone)))


def test_a_masked_move_changes_nothing(env: ImproveEnv) -> None:
    observation, _ = env.reset(seed=1)
    masks = env.action_masks()
    assert np.array_equal(observation["action_mask"], masks)
    for _ in range(20):
        masks = env.action_masks()
        if not masks.all():
            _, reward, _, _, _ = env.step(np.int64(np.argmin(masks)))
            assert reward == 0.0
            return
        env.step(np.int64(0))
    pytest.fail("no move was masked")


def test_one_shape_for_models_and_clusters_of_any_size() -> None:
    pairs = [
        (chain_graph(), toy_cluster()),
        (chain_graph(num_layers=7, batch_size=64), Cluster.load("mixed_64")),
    ]
    env = ImproveEnv(pairs, num_moves=4, num_steps=2)
    for number in range(2):
        observation, _ = env.reset(seed=number, options={"pair": number})
        assert env.observation_space.contains(observation)
        observation, *_ = env.step(np.int64(0))
        assert env.observation_space.contains(observation)
