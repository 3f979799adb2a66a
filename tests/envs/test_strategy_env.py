"""The environments keep Gymnasium's contract and their own data sheets."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import heterog.envs
from heterog.envs.registration import IMPROVE, JOB_PARTITION, ONE_SHOT, STEP_BY_STEP, STRATEGY_ZOO
from heterog.envs.spaces import Padding
from heterog.envs.strategy_env import StrategyEnv, StrategyOneShotEnv
from heterog.errors import HeterogError
from tests.envs.cases import language_pair, toy_pair

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [ONE_SHOT, STEP_BY_STEP])
def test_gymnasium_finds_nothing_wrong(name: str) -> None:
    assert heterog.envs
    check_env(gym.make(name).unwrapped)


WAYS = (
    "import heterog.envs; gym.make('heterog/Strategy-v1').reset(seed=0)",
    "gym.make('heterog.envs:heterog/StrategyOneShot-v1').reset(seed=0)",
    "import heterog.envs; gym.make_vec('heterog/Strategy-v1', num_envs=2).reset(seed=0)",
)
IN_FORKS = """
import os, sys, gymnasium as gym
for way in sys.argv[1:]:
    if not os.fork():
        exec(way)
        print(*sorted(name for name in gym.registry if "heterog" in name), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, way
"""


def test_importing_the_package_registers_its_environments() -> None:
    """In fresh processes, as something here may have imported the package before."""
    command = [sys.executable, "-c", IN_FORKS, *WAYS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr
    names = " ".join(sorted([IMPROVE, JOB_PARTITION, ONE_SHOT, STEP_BY_STEP, STRATEGY_ZOO]))
    assert done.stdout.splitlines() == [names] * len(WAYS)


def test_action_masks_are_those_of_the_observation() -> None:
    """And a policy that keeps to them is never told of a masked action."""
    small, large = toy_pair(), language_pair()
    whole = StrategyOneShotEnv([small, large])
    seen, _ = whole.reset(seed=0, options={"pair": 0})
    masks = whole.action_masks().reshape(seen["action_mask"].shape)
    blocks = small.num_blocks
    assert (masks[:blocks] == seen["action_mask"][:blocks].astype(bool)).all()
    assert masks[blocks:].all()
    env = StrategyEnv([small, large])
    seen, info = env.reset(seed=0, options={"pair": 1})
    done = False
    while not done:
        masks = env.action_masks()
        assert (masks == seen["action_mask"][seen["block"][0]].astype(bool)).all()
        seen, _, done, _, info = env.step(int(np.flatnonzero(masks)[-1]))
    assert info["masked_actions"] == 0


@pytest.mark.parametrize("kind", [StrategyOneShotEnv, StrategyEnv])
def test_same_seed_same_episode(kind: Any) -> None:
    def play() -> list[Any]:
        env = kind([toy_pair(), language_pair()])
        env.action_space.seed(3)
        seen, _ = env.reset(seed=3)
        told: list[Any] = [int(seen["pair"][0])]
        done = False
        while not done:
            seen, reward, terminated, truncated, info = env.step(env.action_space.sample())
            assert env.observation_space.contains(seen)
            told += [reward, info["masked_actions"]]
            done = terminated or truncated
        return told

    assert play() == play()


def test_a_masked_entry_follows_the_block_before_it() -> None:
    pair = toy_pair()
    env = StrategyOneShotEnv([pair, language_pair()])
    env.reset(seed=0, options={"pair": 0})
    too_high = pair.num_candidates
    action = np.zeros(env.padding.blocks, np.int64)
    action[:4] = [1, too_high, 2, too_high]
    _, reward, terminated, _, info = env.step(action)
    assert terminated
    assert info["masked_actions"] == 2
    assert info["row"].tolist() == [1, 1, 2, 2]
    assert info["step_time_s"] == pair.score([1, 1, 2, 2]).step_time_s
    assert reward == pytest.approx(min(np.log(info["speedup"]), 1.5))


def test_a_masked_step_decides_nothing_and_too_many_end_the_episode() -> None:
    env = StrategyEnv([toy_pair(), language_pair()])
    seen, _ = env.reset(seed=0, options={"pair": 0})
    for step in range(1, 17):
        seen, reward, terminated, truncated, info = env.step(env.padding.candidates - 1)
        assert (reward, terminated, info["masked_actions"]) == (0.0, False, step)
        assert seen["block"][0] == 0
    assert truncated


def test_both_environments_agree_on_a_strategy() -> None:
    pairs = [language_pair()]
    rng = np.random.default_rng(1)
    env = StrategyEnv(pairs)
    seen, _ = env.reset(seed=0)
    done, chosen, reward = False, [], 0.0
    while not done:
        allowed = np.flatnonzero(seen["action_mask"][seen["block"][0]])
        chosen.append(int(rng.choice(allowed)))
        seen, reward, done, _, info = env.step(chosen[-1])
    assert info["masked_actions"] == 0
    assert np.max(np.asarray(seen["used"], np.float64)) < 1.1
    assert np.all(np.asarray(seen["estimate"], np.float64) > 0)
    whole = StrategyOneShotEnv(pairs)
    whole.reset(seed=0)
    _, other, _, _, _ = whole.step(np.array(chosen))
    assert other == reward


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_environments_can_be_vectorised(mode: str) -> None:
    """Over the ends of episodes, after which a vector resets with its next step."""
    envs: Any = gym.make_vec(STEP_BY_STEP, num_envs=2, vectorization_mode=mode)
    seen, _ = envs.reset(seed=0)
    assert seen["blocks"].shape[0] == 2
    ended = 0
    for _ in range(10):  # the toy has four blocks
        masks = np.stack(envs.call("action_masks"))
        seen, reward, done, _, _ = envs.step(masks.argmax(axis=1))
        assert reward.shape == (2,)
        ended += int(done.sum())
    assert ended == 4
    envs.close()


def test_a_step_after_the_end_asks_for_a_reset() -> None:
    env = StrategyEnv([toy_pair()])
    env.reset(seed=0)
    while not env.step(int(env.action_masks().argmax()))[2]:
        pass
    assert env.action_masks().all()
    with pytest.raises(gym.error.ResetNeeded, match="all blocks are decided"):
        env.step(0)


def test_a_padding_that_is_too_small_is_refused_at_once() -> None:
    small, large = toy_pair(), language_pair()
    padding = Padding.of([small])
    StrategyEnv([small], padding)
    with pytest.raises(HeterogError, match=rf"the pairs need {large.num_blocks}; give Padding.of"):
        StrategyEnv([small, large], replace(padding, pairs=2))
    with pytest.raises(HeterogError, match=r"the padding has 1 pairs, and the pairs need 2"):
        StrategyEnv([small, small], padding)


@pytest.mark.parametrize("name", [ONE_SHOT, STEP_BY_STEP])
def test_an_episode_can_be_shown_as_text(name: str) -> None:
    assert StrategyEnv([toy_pair()]).render() is None
    env = gym.make(name, render_mode="ansi")
    env.reset(seed=0)
    env.action_space.seed(0)
    done = False
    while not done:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        done = terminated or truncated
    first, *blocks, last = str(env.render()).splitlines()
    assert " on " in first
    assert all(line.startswith("block ") and " by " in line for line in blocks)
    assert "x of data parallelism" in last


def test_models_and_clusters_by_name(tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(
        "import heterog, torch\n"
        "def workload():\n"
        "    batch = torch.zeros(8, 16), torch.zeros(8, 4)\n"
        "    return heterog.Workload(lambda: torch.nn.Linear(16, 4), batch,\n"
        "                            torch.nn.functional.mse_loss, torch.optim.SGD, name='mlp')\n"
    )
    models = [f"{tmp_path / 'mlp.py'}:workload"]
    env = gym.make(STRATEGY_ZOO, models=models, clusters=["rtx_mixed", "paper_8gpu"])
    names = [pair.name for pair in env.unwrapped.pairs]  # type: ignore[attr-defined]
    assert names == ["mlp on rtx_mixed", "mlp on paper_8gpu"]
    with pytest.raises(HeterogError, match="unknown model 'mlpp'"):
        gym.make(STRATEGY_ZOO, models=["mlpp"], clusters=["paper_8gpu"])
