"""Learners reach a known optimum, stop and go on exactly, and keep their books."""

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heterog.agents.config import PolicyConfig
from heterog.agents.elites import find_elites
from heterog.agents.graph_data import PairBatch
from heterog.agents.policy import Policy, draw, log_probabilities, score_pairs
from heterog.agents.ppo import PpoLearner
from heterog.agents.ppo_training import make_trainer
from heterog.agents.reinforce import POOL_SIZE, Reinforce
from heterog.agents.sources import PairSource
from heterog.agents.training import Algorithm, TrainingConfig
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import HeterogError
from tests.envs.cases import toy_pair

NETWORK = PolicyConfig(width=16, num_heads=2, num_rounds=1, rank=4, stay_bias=0.0)
SETTINGS = TrainingConfig(
    num_pairs=2,
    search_evaluations=120,
    num_steps=40,
    pairs_per_step=2,
    learning_rate=4e-3,
    samples_per_pair=12,
    entropy_nats=(3.0, 0.3),
    check_every=20,
    num_validation=1,
)


@cache
def optimum_s() -> float:
    """The best of all 256 strategies of the toy."""
    pair = toy_pair()
    rows = itertools.product(range(pair.num_candidates), repeat=pair.num_blocks)
    return min(pair.score(row).step_time_s for row in rows)


def source() -> PairSource:
    return PairSource(
        graphs=[chain_graph(4, 512, 1024)], clusters=[toy_cluster(5.0)], generated=0.0
    )


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def likelihood(policy: Policy) -> float:
    """Probability that a draw is optimal."""
    pair = toy_pair()
    every = list(itertools.product(range(pair.num_candidates), repeat=pair.num_blocks))
    best = [row for row in every if pair.score(row).step_time_s <= optimum_s() * (1 + 1e-9)]
    with torch.no_grad():
        scores = policy.eval()(PairBatch([pair.observation]))
        which = torch.zeros(len(best), dtype=torch.long)
        log_p, _ = log_probabilities(scores, which, torch.tensor(best))
    return float(log_p.exp().sum())


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_every_learner_finds_the_optimum_of_the_toy(algorithm: Algorithm) -> None:
    """Behind a slow network everything on one device is best: all 256 rows say so."""
    pair = toy_pair()
    alone = pair.score(np.zeros(pair.num_blocks, np.int32)).step_time_s
    assert optimum_s() == pytest.approx(alone)
    assert optimum_s() < 0.75 * pair.baseline_s
    settings = replace(SETTINGS, algorithm=algorithm)
    if algorithm in (Algorithm.REINFORCE, Algorithm.PPO):
        settings = replace(settings, num_steps=60)
    trainer = make_trainer(source(), settings, NETWORK)
    before = likelihood(trainer.policy)
    trainer.run()
    assert before < 0.5
    assert likelihood(trainer.policy) > 0.75
    greedy = draw(score_pairs(trainer.policy, [pair])[0], pair, 1, rng(), greedy=True).rows[0]
    assert pair.score(greedy).step_time_s == pytest.approx(optimum_s())


@pytest.mark.parametrize("algorithm", [Algorithm.MIXED, Algorithm.PPO])
def test_a_run_that_was_stopped_goes_on_exactly(algorithm: Algorithm, tmp_path: Path) -> None:
    settings = replace(
        SETTINGS, algorithm=algorithm, num_steps=6, check_every=2, search_evaluations=20
    )
    whole = make_trainer(source(), settings, NETWORK).run()
    path = tmp_path / "checkpoint.pt"

    def stop(stage: str, fraction: float, text: str) -> None:
        if stage == "validation" and text.startswith("step 4"):
            raise KeyboardInterrupt

    first = make_trainer(source(), settings, NETWORK, checkpoint=path, report=stop).run()
    assert not first.finished
    second = make_trainer(source(), settings, NETWORK, resume=path).run()
    assert second.finished
    assert second.history == whole.history
    for mine, theirs in zip(
        whole.checkpoint.policy.state_dict().values(),
        second.checkpoint.policy.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_steps=1, check_every=1, search_evaluations=20)
    path = tmp_path / "checkpoint.pt"
    make_trainer(source(), settings, NETWORK, checkpoint=path).run()
    with pytest.raises(HeterogError, match=r"other settings: seed 0 there, 1 here"):
        make_trainer(source(), replace(settings, seed=1), NETWORK, resume=path)
    with pytest.raises(HeterogError, match="another network"):
        make_trainer(source(), settings, replace(NETWORK, rank=2), resume=path)


def test_training_is_logged_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = replace(SETTINGS, algorithm=Algorithm.REINFORCE, num_steps=10, check_every=10)
    make_trainer(source(), settings, NETWORK, logdir=tmp_path).run()
    events: Any = EventAccumulator(str(tmp_path))
    events.Reload()
    names = set(events.Tags()["scalars"])
    wanted = ("reward", "speedup", "entropy", "out_of_memory", "evaluations_per_s")
    assert {f"train/{name}" for name in wanted} <= names
    assert "validation/best_of_16" in names


def test_search_finds_the_optimum_and_knows_its_headroom() -> None:
    pair = toy_pair()
    found = find_elites(pair, 250, np.random.default_rng(0))
    assert found.step_time_s == pytest.approx(optimum_s())
    assert found.headroom == pytest.approx(np.log(found.uniform_s / found.step_time_s))


def test_the_pool_starts_with_data_parallelism_and_keeps_the_best() -> None:
    pair = toy_pair()
    torch.manual_seed(0)
    policy = Policy(NETWORK)
    learner = Reinforce(8)
    scores = policy(PairBatch([pair.observation]))
    made = learner.step(scores, [pair], [0], 0.0, np.random.default_rng(0))
    pool = learner.states[0].pool
    assert 2 <= len(pool) <= POOL_SIZE
    assert [reward for reward, _ in pool] == sorted((r for r, _ in pool), reverse=True)
    assert made.num_evaluations == 9
    assert made.rows[0].shape == (9, pair.num_blocks)


def test_replaying_the_pool_leaves_the_estimate_unbiased() -> None:
    """Sum over all rows of (K p + q) w / (K + 1) f = sum p f, for any f."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(12))
    q = np.where(np.arange(12) < 3, 1 / 3, 0.0)
    value, k = rng.normal(size=12), 16
    weight = p / ((k * p + q) / (k + 1))
    assert ((k * p + q) / (k + 1) * weight * value).sum() == pytest.approx((p * value).sum())
    assert weight.max() <= (k + 1) / k + 1e-12


def test_ppo_encodes_each_pair_once_per_minibatch() -> None:
    learner = PpoLearner([toy_pair()], NETWORK, num_envs=4, steps_per_rollout=3)
    extractor = learner.actor_critic.extractor
    learner.learn(1, lambda number, terms: True)
    # One pair: 3 steps and the value after the last, then 2 epochs of one minibatch.
    assert extractor.num_encoded == 3 + 1 + 2
