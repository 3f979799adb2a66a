"""Learners reach a known optimum, stop and go on exactly, and keep their books."""

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.env_checker import check_env
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from heterog.agents.checkpoint import load_checkpoint, save_checkpoint
from heterog.agents.config import Algorithm, PolicyConfig, TrainingConfig
from heterog.agents.elites import find_elites
from heterog.agents.graph_data import PairBatch
from heterog.agents.learner import GradientLearner, Task, learner_of
from heterog.agents.policy import Policy, draw, log_probabilities, score_pairs
from heterog.agents.reinforce import Reinforce, advantage, gains_of_best, steered
from heterog.agents.sb3 import TEMPERATURE
from heterog.agents.sources import PairSource
from heterog.agents.training import RunFiles, Trainer, TrainingResult
from heterog.envs.conformance import check_reward
from heterog.envs.pair import Pair, Score
from heterog.envs.registration import ONE_SHOT, STEP_BY_STEP
from heterog.envs.reward import Reward, reward_of
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import HeterogError, HeterogWarning
from heterog.methods.planner import Budget
from tests.envs.cases import toy_pair
from tests.thorough import few_of

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


def settings_of(algorithm: str, **changes: Any) -> TrainingConfig:
    """``SETTINGS`` for an algorithm, with what those read that draw strategies."""
    if algorithm in (Algorithm.REINFORCE, Algorithm.MIXED):
        changes = {"samples_per_pair": 12, "entropy_nats": (3.0, 0.3)} | changes
    return replace(SETTINGS, algorithm=algorithm, **changes)


@cache
def optimum_s() -> float:
    """The best of all 256 strategies of the toy."""
    pair = toy_pair().judged()
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
    pair = toy_pair().judged()
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
    pair = toy_pair().judged()
    alone = pair.score(np.zeros(pair.num_blocks, np.int32)).step_time_s
    assert optimum_s() == pytest.approx(alone)
    assert optimum_s() < 0.75 * pair.baseline_s
    settings = settings_of(algorithm)
    if algorithm == Algorithm.REINFORCE:
        settings = replace(settings, num_steps=40)
    trainer = Trainer(source(), settings, NETWORK)
    before = likelihood(trainer.policy)
    trainer.run()
    assert before < 0.5
    assert likelihood(trainer.policy) > 0.75
    greedy = draw(score_pairs(trainer.policy, [pair])[0], pair, 1, rng(), greedy=True).rows[0]
    assert pair.score(greedy).step_time_s == pytest.approx(optimum_s())


def test_what_is_kept_is_the_average_that_torch_makes() -> None:
    learner = Trainer(source(), settings_of(Algorithm.IMITATION), NETWORK).learner
    assert isinstance(learner, GradientLearner)
    decay = learner.task.config.average_decay

    def mixed(kept: Any, weights: Any, count: Any) -> None:
        torch._foreach_lerp_(kept, weights, max(1.0 - decay, 9.0 / (10.0 + float(count))))

    expected = AveragedModel(learner.policy, multi_avg_fn=torch.no_grad()(mixed))
    for step in range(3):
        learner.advance(step)
        expected.update_parameters(learner.policy)
        for mine, theirs in zip(
            learner.averaged.state_dict().values(), expected.state_dict().values(), strict=True
        ):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("algorithm", few_of([Algorithm.MIXED, Algorithm.REINFORCE], 1))
def test_a_run_that_was_stopped_goes_on_exactly(algorithm: Algorithm, tmp_path: Path) -> None:
    settings = settings_of(algorithm, num_steps=6, check_every=2, search_evaluations=20)
    whole = Trainer(source(), settings, NETWORK).run()
    path = tmp_path / "checkpoint.pt"

    def stop(stage: str, fraction: float, text: str) -> None:
        if stage == "validation" and text.startswith("step 4"):
            raise KeyboardInterrupt

    first = Trainer(
        source(), settings, NETWORK, files=RunFiles(checkpoint=path), report=stop
    ).run()
    assert not first.finished
    second = Trainer(source(), settings, NETWORK, files=RunFiles(resume=path)).run()
    assert second.finished
    assert second.history == whole.history
    assert second.after == whole.after
    for mine, theirs in zip(
        whole.checkpoint.policy.state_dict().values(),
        second.checkpoint.policy.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def slowest(pair: Pair, score: Score) -> Reward:
    """The opposite of what everybody wants: a long step."""
    return replace(reward_of(pair, score), reward=math.log(score.step_time_s / pair.baseline_s))


def test_a_learner_maximises_the_reward_it_is_given() -> None:
    """Asked for slow strategies it finds them, and validation keeps a policy that does."""
    check_reward(slowest)
    settings = settings_of(Algorithm.REINFORCE, num_steps=80)
    trainer = Trainer(source(), settings, NETWORK, reward=slowest)
    result = trainer.run()
    pair = toy_pair().judged()
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
        Trainer(source(), SETTINGS, NETWORK, reward=slowest)
    settings = settings_of(Algorithm.REINFORCE, num_steps=1, check_every=1, search_evaluations=20)
    path = tmp_path / "checkpoint.pt"
    Trainer(source(), settings, NETWORK, files=RunFiles(checkpoint=path), reward=slowest).run()
    with pytest.raises(HeterogError, match=r"another reward: slowest there, reward_of here"):
        Trainer(source(), settings, NETWORK, files=RunFiles(resume=path))


def test_settings_that_an_algorithm_does_not_read_warn() -> None:
    settings = replace(SETTINGS, imitation_weight=0.5)
    with pytest.warns(HeterogWarning, match=r"imitation_weight=0.5 has no effect on 'imitation'"):
        Trainer(source(), settings, NETWORK)
    settings = settings_of("sb3:A2C", average_decay=0.9)
    with pytest.warns(HeterogWarning, match=r"only on imitation, reinforce, mixed"):
        Trainer(source(), settings, NETWORK)


@pytest.mark.parametrize("nats", [12.0, 0.1])
def test_the_entropy_is_pushed_where_it_should_be(nats: float) -> None:
    assert (steered(0.01, 3.0, (nats, nats), 0.5) > 0.01) == (nats > 3.0)


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_steps=1, check_every=1, search_evaluations=20)
    path = tmp_path / "checkpoint.pt"
    Trainer(source(), settings, NETWORK, files=RunFiles(checkpoint=path)).run()
    with pytest.raises(HeterogError, match=r"other settings: seed 0 there, 1 here"):
        Trainer(source(), replace(settings, seed=1), NETWORK, files=RunFiles(resume=path))
    with pytest.raises(HeterogError, match="another network"):
        Trainer(source(), settings, replace(NETWORK, rank=2), files=RunFiles(resume=path))


def test_a_budget_ends_a_run_that_goes_on_with_more_steps(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    settings = settings_of(Algorithm.MIXED, num_steps=2, check_every=2, search_evaluations=20)
    first = Trainer(
        source(),
        settings,
        NETWORK,
        files=RunFiles(checkpoint=path),
        budget=Budget(evaluations=1),  # the searches have had it
    ).run()
    assert first.finished
    assert [row["step"] for row in first.history] == [0.0]
    more = replace(settings, num_steps=3)
    again = RunFiles(resume=path, checkpoint=path)
    found = Trainer(source(), more, NETWORK, files=again).run()
    assert [row["step"] for row in found.history] == [0.0, 2.0, 3.0]
    with pytest.raises(HeterogError, match="has made 3 steps, and 3 are asked for"):
        Trainer(source(), more, NETWORK, files=RunFiles(resume=path))


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    settings = settings_of(Algorithm.MIXED, num_steps=1, check_every=1, search_evaluations=20)
    path = tmp_path / "checkpoint.pt"
    Trainer(source(), settings, NETWORK, files=RunFiles(checkpoint=path)).run()
    found = load_checkpoint(path)
    learner = dict(found.training["learner"])
    learner["coefficient_of_entropy"] = learner.pop("coefficient")
    save_checkpoint(path, replace(found, training={**found.training, "learner": learner}))
    with pytest.raises(HeterogError, match=r"has no 'coefficient': another version"):
        Trainer(source(), settings, NETWORK, files=RunFiles(resume=path))


def test_training_is_logged_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = settings_of(Algorithm.REINFORCE, num_steps=10, check_every=10)
    Trainer(source(), settings, NETWORK, files=RunFiles(logdir=tmp_path)).run()
    events: Any = EventAccumulator(str(tmp_path))
    events.Reload()
    names = set(events.Tags()["scalars"])
    wanted = ("reward", "speedup", "entropy", "out_of_memory", "evaluations_per_s")
    assert {f"train/{name}" for name in (*wanted, "learning_rate")} <= names
    assert {"validation/best_of_16", "best/best_of_16"} <= names
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_search_finds_the_optimum_and_knows_its_headroom() -> None:
    pair = toy_pair()
    found = find_elites(pair, 250, np.random.default_rng(0))
    assert found.step_time_s == pytest.approx(optimum_s())
    assert found.headroom == pytest.approx(np.log(found.uniform_s / found.step_time_s))


@pytest.mark.parametrize("best_of", [2, 3, 4])
def test_gains_are_means_over_all_sets_of_draws(best_of: int) -> None:
    rewards = np.array([0.3, -1.0, 0.3, 2.0, 0.7, 1.4])
    for number, gain in enumerate(gains_of_best(rewards, best_of)):
        others = np.delete(rewards, number)
        sets = itertools.combinations(others, best_of - 1)
        every = [max(rewards[number] - max(each), 0.0) for each in sets]
        assert gain == pytest.approx(np.mean(every))


def test_a_step_scores_its_draws_and_teaches_the_value_head() -> None:
    pair = toy_pair().judged()
    torch.manual_seed(0)
    policy = Policy(NETWORK)
    scores = policy(PairBatch([pair.observation]))
    made = Reinforce(8).step(scores, [pair], [0], 0.0, np.random.default_rng(0))
    assert made.num_evaluations == 8
    assert made.rows[0].shape == (8, pair.num_blocks)
    made.loss.backward()  # type: ignore[no-untyped-call]
    gradients = [weight.grad for weight in policy.value.parameters()]
    assert all(each is not None and bool(each.abs().sum() > 0.0) for each in gradients)


def test_the_best_is_chosen_by_other_pairs_than_it_is_reported_by() -> None:
    settings = settings_of(Algorithm.IMITATION, num_steps=2, check_every=1, search_evaluations=20)
    asked: list[int] = []

    @dataclass(frozen=True, kw_only=True)
    class Noted(PairSource):
        def pair(self, index: int) -> Pair:
            asked.append(index)
            return super().pair(index)

    given = source()
    noted = Noted(graphs=given.graphs, clusters=given.clusters, generated=0.0)
    result = Trainer(noted, settings, NETWORK).run()
    assert result.before.keys() == result.after.keys() >= {"greedy", "best_of_16"}
    assert {index // 1_000_000 for index in asked} == {0, 1, 2}


ALGORITHMS = ("sb3_contrib:MaskablePPO", "sb3:DQN", "sb3:A2C", "sb3:PPO", "sb3_contrib:TRPO",
              "sb3_contrib:QRDQN")  # fmt: skip


def sb3(algorithm: str, **changes: Any) -> tuple[Trainer, Any]:
    """A trainer with an algorithm of stable-baselines3, and that algorithm."""
    if algorithm.startswith("sb3_contrib"):
        pytest.importorskip("sb3_contrib", reason="pip install heterog[contrib]")
    settings = settings_of(algorithm, num_steps=2, check_every=2, search_evaluations=20)
    trainer = Trainer(source(), replace(settings, **changes), NETWORK)
    learner: Any = trainer.learner
    return trainer, learner.model


@pytest.mark.parametrize("algorithm", few_of(ALGORITHMS, 2))
def test_algorithms_of_stable_baselines_train_the_policy(algorithm: str, tmp_path: Path) -> None:
    trainer, model = sb3(algorithm)
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.run()
    assert trainer.num_evaluations > 0
    if hasattr(model, "ent_coef"):
        assert trainer.learner.advance(2)["entropy"] > 0.0
    after = trainer.policy.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in after)
    fresh, _ = sb3(algorithm)
    fresh.learner.restore(trainer.learner.state())
    assert all(
        torch.equal(after[name], value) for name, value in fresh.policy.state_dict().items()
    )


@pytest.mark.parametrize("name", [STEP_BY_STEP, ONE_SHOT])
def test_maskable_ppo_learns_on_an_environment_as_it_is(name: str) -> None:
    """Stock, without a wrapper, and its checks find no image and no masked action."""
    contrib = pytest.importorskip("sb3_contrib", reason="pip install heterog[contrib]")
    env = gym.make(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is an image.*")
        check_env(env.unwrapped)
    model = contrib.MaskablePPO("MultiInputPolicy", env, n_steps=8, batch_size=8, n_epochs=1)
    model.learn(8)
    assert model.num_timesteps == 8
    seen, info = env.reset(seed=0)
    done = False
    while not done:
        masks = env.get_wrapper_attr("action_masks")()
        action, _ = model.predict(seen, action_masks=masks)
        seen, _, done, _, info = env.step(action)
    assert info["masked_actions"] == 0


def test_what_stable_baselines_draws_is_what_the_policy_draws() -> None:
    """Step by step the same probabilities, memory included, so what it learns is the policy's."""
    trainer, model = sb3("sb3:A2C")
    seen = model.env.reset()
    pair = source().pair(int(seen[0, 0]))
    with torch.no_grad():
        scores = trainer.policy.eval()(PairBatch([pair.observation]))
    drawn = draw(scores.of(0, pair), pair, 1, rng(), keep_masks=True)
    row, masks = drawn.rows[0], torch.from_numpy(drawn.masks)
    total = 0.0
    for candidate in row:
        tensors, _ = model.policy.obs_to_tensor(seen)
        with torch.no_grad():
            choices = model.policy.get_distribution(tensors)
            actions = torch.full((len(seen),), int(candidate))
            total += float(choices.log_prob(actions)[0])
        seen, _, _, _ = model.env.step(actions.numpy())
    which, rows = torch.zeros(1).long(), torch.from_numpy(drawn.rows).long()
    expected, _ = log_probabilities(scores, which, rows, masks)
    assert total == pytest.approx(float(expected[0]), abs=1e-4)


def drawn_steps(model: Any, count: int) -> torch.Tensor:
    """Observations along episodes of random candidates that fit."""
    generator, seen = rng(), [model.env.reset()]
    for _ in range(count):
        masks = np.array(model.env.env_method("action_masks"))
        seen.append(model.env.step((masks * generator.random(masks.shape)).argmax(axis=1))[0])
    return torch.from_numpy(np.concatenate(seen))


def test_a_batch_of_steps_has_the_features_and_gradients_of_single_steps() -> None:
    """One pass over pairs of several sizes, padded, is as good as a pass for each step."""
    several = replace(source(), graphs=[chain_graph(3), chain_graph(5)], generated=1.0)
    settings = settings_of("sb3:A2C", num_pairs=4, pairs_per_step=4, samples_per_pair=1)
    learner: Any = learner_of(settings.algorithm)(
        Task(source=several, config=settings, policy=Policy(NETWORK))
    )
    steps = drawn_steps(learner.model, 2)
    extractor = learner.model.policy.features_extractor.train()
    assert len({int(each) for each in steps[:, 0]}) > 1
    every, slopes = [], []
    for parts in ([steps], [steps[number, None] for number in range(len(steps))]):
        extractor.zero_grad()
        features = torch.cat([extractor(part) for part in parts])
        torch.tanh(features).sum().backward()  # type: ignore[no-untyped-call]
        every.append(features.detach())
        slopes.append([w.grad.clone() for w in extractor.parameters() if w.grad is not None])
    assert torch.allclose(every[0], every[1], atol=1e-4)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*slopes, strict=True))


def test_scores_are_kept_only_while_weights_stay() -> None:
    _, model = sb3("sb3:A2C")
    extractor, steps = model.policy.features_extractor.eval(), drawn_steps(model, 1)
    with torch.no_grad():
        first = extractor(steps)
        for weight in extractor.parameters():
            weight.data.mul_(1.1)
        assert torch.equal(extractor(steps), first)  # no training has begun
        extractor.train()
        changed = extractor(steps)
        assert not torch.allclose(changed, first)
        assert torch.allclose(extractor.eval()(steps), changed, atol=1e-5)


def test_a_reward_is_the_gain_over_siblings_of_the_same_pair() -> None:
    _, model = sb3("sb3:A2C", pairs_per_step=2, samples_per_pair=4)
    generator, own = rng(), model.env.reset()[:, 0].reshape(2, 4)
    assert (own == own[:, :1]).all()
    done = np.zeros(8, bool)
    while not done.any():
        masks = np.array(model.env.env_method("action_masks"))
        chosen = (masks * generator.random(masks.shape)).argmax(axis=1)
        _, rewards, done, infos = model.env.step(chosen)
    found = np.array([info["reward"] for info in infos]).reshape(2, 4)
    gains = [advantage(each.astype(np.float32).astype(np.float64)) for each in found]
    expected = [each - each.mean() for each in gains]
    assert done.all()
    assert rewards.reshape(2, 4) == pytest.approx(np.array(expected), rel=1e-4, abs=1e-5)


def test_action_values_explore_by_the_policys_own_probabilities() -> None:
    """The largest of values with noise is a draw from p, whose logarithms the values are."""
    _, model = sb3("sb3:DQN")
    steps = drawn_steps(model, 0)[:1]
    network = model.policy.q_net
    with torch.no_grad():
        chances = network.train()(steps)[0].div(TEMPERATURE).softmax(dim=0)
        drawn = network.eval()(steps.expand(4000, -1)).argmax(dim=1)
    parts = torch.bincount(drawn, minlength=len(chances)) / len(drawn)
    assert torch.allclose(parts, chances, atol=0.04)


def test_trpo_gets_the_slopes_that_its_own_method_finds() -> None:
    """In one pass for all weights, and of those with "value" in their names, too."""
    _, model = sb3("sb3_contrib:TRPO", pairs_per_step=1, samples_per_pair=1)
    steps = drawn_steps(model, 1)
    with sdpa_kernel(SDPBackend.MATH):
        choices = model.policy.get_distribution(steps)
        both = choices.entropy().mean(), choices.log_prob(torch.zeros(len(steps))).mean()
        found = model._compute_actor_grad(*both)
        own = type(model)._compute_actor_grad(model, *both)

    def by_weight(slopes: Any, column: int) -> dict[Any, torch.Tensor]:
        parts = slopes[column].split([shape.numel() for shape in slopes[3]])
        return dict(zip(slopes[0], parts, strict=True))

    for column in (1, 2):
        mine, theirs = by_weight(found, column), by_weight(own, column)
        assert theirs.keys() < mine.keys()
        assert all(torch.allclose(mine[w], slope, atol=1e-6) for w, slope in theirs.items())


def test_what_a_short_run_keeps_is_not_its_beginning() -> None:
    settings = settings_of(Algorithm.REINFORCE, num_steps=12, check_every=12)
    learner: Any = learner_of(settings.algorithm)(
        Task(source=source(), config=settings, policy=Policy(NETWORK))
    )
    first = parameters_to_vector(learner.policy.parameters()).detach().clone()
    for step in range(12):
        learner.advance(step)
    kept, last = (
        parameters_to_vector(each.parameters()).detach() for each in (learner.kept, learner.policy)
    )
    assert (kept - last).norm() < 0.7 * (first - last).norm()


@pytest.mark.thorough
def test_maskable_ppo_finds_the_optimum_of_the_toy() -> None:
    trainer, _ = sb3("sb3_contrib:MaskablePPO", num_steps=25, check_every=25, pairs_per_step=8)
    trainer.run()
    assert likelihood(trainer.policy) > 0.75


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("sb3:SAC", "sb3:SAC cannot learn here.*only supports"),
        ("sb3_contrib:RecurrentPPO", "RecurrentPPO cannot learn here"),
        ("sb3:Nobody", "unknown algorithm 'sb3:Nobody'"),
        ("pro", "unknown algorithm 'pro'"),
        ("nowhere.py:Mine", "no file 'nowhere.py'"),
    ],
)
def test_an_algorithm_that_cannot_learn_is_refused_by_name(algorithm: str, said: str) -> None:
    if algorithm.startswith("sb3_contrib"):
        pytest.importorskip("sb3_contrib", reason="pip install heterog[contrib]")
    with pytest.raises(HeterogError, match=said):
        learner_of(algorithm)


MINE = """
from heterog.agents.learner import Learner

class Mine(Learner):
    def advance(self, step):
        self.policy.prior.data += 1.0
        return {"done": step + 1.0}

class Silent(Learner):
    def advance(self, step):
        pass

class Other:
    pass
"""


def test_a_learner_of_a_file_learns(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    settings = replace(SETTINGS, algorithm=f"{tmp_path}/mine.py:Mine", num_steps=3, check_every=3)
    trainer = Trainer(source(), replace(settings, search_evaluations=20), NETWORK)
    first = trainer.policy.prior.tolist()
    result: TrainingResult = trainer.run()
    assert result.checkpoint.policy.prior.tolist() == [each + 3.0 for each in first]
    silent = replace(settings, algorithm=f"{tmp_path}/mine.py:Silent")
    with pytest.raises(
        HeterogError, match=r"Silent: advance\(\) returns NoneType; return numbers"
    ):
        Trainer(source(), silent, NETWORK).run()
    with pytest.raises(HeterogError, match=r"no subclass of heterog\.agents\.learner"):
        learner_of(f"{tmp_path}/mine.py:Other")
