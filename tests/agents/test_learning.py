"""Learners reach a known optimum, stop and go on exactly, and keep their books."""

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heterog.agents.checkpoint import load_checkpoint, save_checkpoint
from heterog.agents.config import Algorithm, PolicyConfig, TrainingConfig
from heterog.agents.elites import find_elites
from heterog.agents.graph_data import PairBatch
from heterog.agents.policy import Policy, draw, log_probabilities, score_pairs
from heterog.agents.ppo import PpoLearner
from heterog.agents.ppo_training import PpoTrainer, make_trainer
from heterog.agents.reinforce import POOL_SIZE, Reinforce
from heterog.agents.sources import PairSource
from heterog.agents.training import RunFiles
from heterog.envs.conformance import check_reward
from heterog.envs.pair import Pair, Score
from heterog.envs.reward import Reward, reward_of
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import HeterogError, HeterogWarning
from tests.envs.cases import toy_pair
from tests.thorough import few_of, one_in

NETWORK = PolicyConfig(width=16, num_heads=2, num_rounds=1, rank=4, stay_bias=0.0)
SETTINGS = TrainingConfig(
    num_pairs=2,
    search_evaluations=120,
    num_steps=40,
    pairs_per_step=2,
    learning_rate=4e-3,
    check_every=20,
    num_validation=1,
)


def settings_of(algorithm: Algorithm, **changes: Any) -> TrainingConfig:
    """``SETTINGS`` for an algorithm, with what those read that draw strategies."""
    if algorithm != Algorithm.IMITATION:
        changes = {"samples_per_pair": 12, "entropy_nats": (3.0, 0.3)} | changes
    return replace(SETTINGS, algorithm=algorithm, **changes)


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


@pytest.mark.parametrize("algorithm", few_of(sorted(Algorithm, reverse=True), 1))
def test_every_learner_finds_the_optimum_of_the_toy(algorithm: Algorithm) -> None:
    """Behind a slow network everything on one device is best: all 256 rows say so."""
    pair = toy_pair()
    alone = pair.score(np.zeros(pair.num_blocks, np.int32)).step_time_s
    assert optimum_s() == pytest.approx(alone)
    assert optimum_s() < 0.75 * pair.baseline_s
    settings = settings_of(algorithm)
    if algorithm in (Algorithm.REINFORCE, Algorithm.PPO):
        settings = replace(settings, num_steps=60)
    trainer = make_trainer(source(), settings, NETWORK)
    before = likelihood(trainer.policy)
    trainer.run()
    assert before < 0.5
    assert likelihood(trainer.policy) > 0.75
    greedy = draw(score_pairs(trainer.policy, [pair])[0], pair, 1, rng(), greedy=True).rows[0]
    assert pair.score(greedy).step_time_s == pytest.approx(optimum_s())


@pytest.mark.parametrize("algorithm", few_of([Algorithm.PPO, Algorithm.MIXED], 1))
def test_a_run_that_was_stopped_goes_on_exactly(algorithm: Algorithm, tmp_path: Path) -> None:
    settings = settings_of(algorithm, num_steps=6, check_every=2, search_evaluations=20)
    whole = make_trainer(source(), settings, NETWORK).run()
    path = tmp_path / "checkpoint.pt"

    def stop(stage: str, fraction: float, text: str) -> None:
        if stage == "validation" and text.startswith("step 4"):
            raise KeyboardInterrupt

    first = make_trainer(
        source(), settings, NETWORK, files=RunFiles(checkpoint=path), report=stop
    ).run()
    assert not first.finished
    second = make_trainer(source(), settings, NETWORK, files=RunFiles(resume=path)).run()
    assert second.finished
    assert second.history == whole.history
    for mine, theirs in zip(
        whole.checkpoint.policy.state_dict().values(),
        second.checkpoint.policy.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def slowest(pair: Pair, score: Score) -> Reward:
    """The opposite of what everybody wants: a long step."""
    return replace(reward_of(pair, score), reward=math.log(score.step_time_s / pair.baseline_s))


@one_in(2)
@pytest.mark.parametrize("algorithm", [Algorithm.REINFORCE, Algorithm.PPO])
def test_a_learner_maximises_the_reward_it_is_given(algorithm: Algorithm) -> None:
    """Asked for slow strategies it finds them, and validation keeps a policy that does."""
    check_reward(slowest)
    settings = settings_of(algorithm, num_steps=80)
    trainer = make_trainer(source(), settings, NETWORK, reward=slowest)
    result = trainer.run()
    pair = toy_pair()
    rows = itertools.product(range(pair.num_candidates), repeat=pair.num_blocks)
    worst_s = max(pair.score(row).step_time_s for row in rows)
    greedy = draw(score_pairs(trainer.policy, [pair])[0], pair, 1, rng(), greedy=True).rows[0]
    assert optimum_s() < 0.7 * worst_s
    assert pair.score(greedy).step_time_s > 0.98 * worst_s
    rewards = [row["reward"] for row in result.history]
    assert rewards[-1] > rewards[0] + 0.1
    assert result.checkpoint.provenance["reward"] == "slowest"


def test_a_reward_that_nobody_asks_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeterogError, match=r"asks for no reward, so slowest would change nothing"):
        make_trainer(source(), SETTINGS, NETWORK, reward=slowest)
    settings = settings_of(Algorithm.REINFORCE, num_steps=1, check_every=1, search_evaluations=20)
    path = tmp_path / "checkpoint.pt"
    make_trainer(
        source(), settings, NETWORK, files=RunFiles(checkpoint=path), reward=slowest
    ).run()
    with pytest.raises(HeterogError, match=r"another reward: slowest there, reward_of here"):
        make_trainer(source(), settings, NETWORK, files=RunFiles(resume=path))


def test_settings_that_an_algorithm_does_not_read_warn() -> None:
    settings = replace(SETTINGS, imitation_weight=0.5)
    with pytest.warns(HeterogWarning, match=r"imitation_weight=0.5 has no effect on 'imitation'"):
        make_trainer(source(), settings, NETWORK)
    settings = settings_of(Algorithm.PPO, average_decay=0.9)
    with pytest.warns(HeterogWarning, match=r"only on imitation, reinforce, mixed"):
        make_trainer(source(), settings, NETWORK)


@pytest.mark.parametrize("nats", few_of([12.0, 0.1], 1))
def test_ppo_follows_the_schedules(nats: float) -> None:
    """The rate of Adam is that of REINFORCE, and the entropy is pushed where it should be."""
    settings = settings_of(
        Algorithm.PPO,
        num_steps=12,
        check_every=5,
        search_evaluations=20,
        entropy_nats=(nats, nats),
    )
    rates: list[float] = []

    def note(stage: str, fraction: float, text: str) -> None:
        if stage == "train":
            optimizer = trainer.learner.actor_critic.optimizer
            rates.append(float(optimizer.param_groups[0]["lr"]))

    trainer = PpoTrainer(source(), settings, NETWORK, report=note)
    before = trainer.learner.coefficient
    trainer.run()
    assert rates == pytest.approx([settings.rate_at(step) for step in range(12)])
    assert (trainer.learner.coefficient > before) == (nats > 3.0)


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_steps=1, check_every=1, search_evaluations=20)
    path = tmp_path / "checkpoint.pt"
    make_trainer(source(), settings, NETWORK, files=RunFiles(checkpoint=path)).run()
    with pytest.raises(HeterogError, match=r"other settings: seed 0 there, 1 here"):
        make_trainer(source(), replace(settings, seed=1), NETWORK, files=RunFiles(resume=path))
    with pytest.raises(HeterogError, match="another network"):
        make_trainer(source(), settings, replace(NETWORK, rank=2), files=RunFiles(resume=path))


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    settings = settings_of(Algorithm.PPO, num_steps=1, check_every=1, search_evaluations=20)
    path = tmp_path / "checkpoint.pt"
    make_trainer(source(), settings, NETWORK, files=RunFiles(checkpoint=path)).run()
    found = load_checkpoint(path)
    older = {name: value for name, value in found.training.items() if name != "coefficient"}
    save_checkpoint(path, replace(found, training=older | {"coefficient_of_entropy": 0.1}))
    with pytest.raises(HeterogError, match=r"has no 'coefficient': another version"):
        make_trainer(source(), settings, NETWORK, files=RunFiles(resume=path))


def test_training_is_logged_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = settings_of(Algorithm.REINFORCE, num_steps=10, check_every=10)
    make_trainer(source(), settings, NETWORK, files=RunFiles(logdir=tmp_path)).run()
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
    learner = PpoLearner(
        [toy_pair()], NETWORK, TrainingConfig(samples_per_pair=4, pairs_per_step=3)
    )
    extractor = learner.actor_critic.extractor
    learner.learn(1, lambda number, terms: True)
    # One pair: 3 steps and the value after the last, then 2 epochs of one minibatch.
    assert extractor.num_encoded == 3 + 1 + 2
