"""Training on many pairs at once: examples, steps, validation, checkpoints, resume.

``imitation``, ``reinforce`` and ``mixed`` (both losses on the same pairs) run here; ``ppo`` is
``heterog.agents.ppo_training``. Every random draw comes from one generator whose state is in the
checkpoint, so a run that was stopped and resumed ends with the same weights as one that was not.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter

from heterog.agents.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from heterog.agents.config import PolicyConfig, TrainingConfig
from heterog.agents.graph_data import PairBatch
from heterog.agents.imitation import Example, Imitation, make_examples
from heterog.agents.policy import Policy, on_one_thread
from heterog.agents.reinforce import PairState, Reinforce, ReinforceStep
from heterog.agents.scoring import PairScorer
from heterog.agents.sources import PairSource
from heterog.agents.validation import Validation
from heterog.envs.pair import Pair
from heterog.envs.reward import RewardFunction, reward_of
from heterog.errors import HeterogError, HeterogWarning, InputFileError
from heterog.workers import HERE, Workers

Report = Callable[[str, float, str], None]
"""Function called with (stage, part done, news)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        checkpoint: The best policy by validation: the one with the fastest strategies, or with the
            highest reward if the run has a reward of its own.
        finished: Whether all steps were made; ``False`` after an interruption.
        history: Rows of validation, as logged.
        num_evaluations: Number of strategies simulated, searches included.
        seconds: Wall time.
    """

    checkpoint: Checkpoint
    finished: bool
    history: tuple[Mapping[str, float], ...]
    num_evaluations: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a run reads and keeps.

    Attributes:
        provenance: Record stored with the policy (names of models and clusters, the command).
        logdir: Folder for TensorBoard; none if ``None``.
        checkpoint: File that is renewed at every validation; none if ``None``.
        resume: Checkpoint to resume from.
    """

    provenance: Mapping[str, Any] = field(default_factory=dict)
    logdir: Path | None = None
    checkpoint: Path | None = None
    resume: Path | None = None


NO_FILES = RunFiles()


class Trainer:
    """One run; see the module docstring.

    Args:
        source: Source of the pairs.
        config: Settings.
        network: Sizes of a new policy, or a policy to begin with.
        files: What is read and kept.
        reward: Reward that REINFORCE and PPO maximise. With another than ``reward_of``, validation
            keeps the policy with the highest mean reward instead of the fastest one.
        workers: Workers that search pairs and score strategies; the policy does not depend on
            them.
        report: Function that gets the progress.

    Raises:
        HeterogError: a reward is given to ``imitation``, which asks for none, or the run to
            resume from had other settings.
    """

    def __init__(
        self,
        source: PairSource,
        config: TrainingConfig,
        network: PolicyConfig | Policy | None = None,
        files: RunFiles = NO_FILES,
        *,
        reward: RewardFunction = reward_of,
        workers: Workers = HERE,
        report: Report = lambda stage, fraction, text: None,
    ) -> None:
        self.source, self.config, self.report = source, config, report
        self._files, self._workers = files, workers
        self.reward = reward
        check_settings(config, reward)
        torch.manual_seed(config.seed)
        network = network or PolicyConfig()
        if isinstance(network, Policy):
            self.policy = self.make_policy(network.config)
            self.policy.load_state_dict(network.state_dict())
        else:
            self.policy = self.make_policy(network)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), config.learning_rate, betas=(0.9, 0.98), weight_decay=0.02
        )
        # The average over the last few hundred steps is validated and kept: it is steadier.
        averaging = get_ema_multi_avg_fn(config.average_decay)  # type: ignore[no-untyped-call]
        self.averaged = AveragedModel(self.policy, multi_avg_fn=averaging)
        self.rng = np.random.default_rng([config.seed, 77])
        self.reinforce = Reinforce(
            config.samples_per_pair,
            config.entropy_nats,
            reward=reward,
            score_ahead=PairScorer(workers, source),
        )
        self.step = 0
        self.num_evaluations = 0
        self.history: list[dict[str, float]] = []
        self.best: tuple[float, dict[str, torch.Tensor]] | None = None
        self._pairs: dict[int, Pair] = {}
        self._elites: list[dict[str, Any]] | None = None
        self._writer = SummaryWriter(str(files.logdir)) if files.logdir is not None else None
        if files.resume is not None:
            self._resume(load_checkpoint(files.resume), files.resume)

    def make_policy(self, network: PolicyConfig) -> Policy:
        """A new policy."""
        return Policy(network)

    @property
    def kept(self) -> Policy:
        """The policy that is validated and kept."""
        if not int(self.averaged.n_averaged):
            return self.policy
        assert isinstance(self.averaged.module, Policy)
        return self.averaged.module

    def run(self) -> TrainingResult:
        """Train to the end, or until interrupted; return the best policy."""
        begin = time.perf_counter()
        try:
            with on_one_thread():
                finished = self._run(begin)
        finally:
            if self._writer is not None:
                self._writer.close()
        assert self.best is not None
        policy = Policy(self.policy.config)
        policy.load_state_dict(self.best[1])
        policy.eval()
        seconds = time.perf_counter() - begin
        return TrainingResult(
            checkpoint=Checkpoint(policy=policy, provenance=self._described(seconds)),
            finished=finished,
            history=tuple(self.history),
            num_evaluations=self.num_evaluations,
            seconds=seconds,
        )

    def _run(self, begin: float) -> bool:
        self.best = self.best or (float("inf"), _copy(self.kept))
        try:
            self.report("validation pairs", 0.0, "")
            validation = Validation(self.source, self.config, self._workers, reward=self.reward)
            if self.step == 0:
                self.num_evaluations += validation.num_evaluations
            examples = self._examples()
            if self.step == 0:
                self._validate(validation)
                self._save(examples)
            while self.step < self.config.num_steps:
                left = self.config.check_every - self.step % self.config.check_every
                self.advance(examples, min(left, self.config.num_steps - self.step), begin)
                self._validate(validation)
                self._save(examples)
        except KeyboardInterrupt:
            self.report("interrupted", self.step / self.config.num_steps, "the best is kept")
            return False
        return True

    def _examples(self) -> list[Example]:
        config = self.config
        if not config.imitates:
            return []

        def progress(done: int) -> None:
            self.report("search", done / config.num_pairs, f"{done} of {config.num_pairs} pairs")

        if self._elites is not None:
            return [_restore(self.source, record) for record in self._elites]
        examples = make_examples(
            self.source,
            config.num_pairs,
            config.search_evaluations,
            workers=self._workers,
            progress=progress,
        )
        if not examples:
            raise HeterogError(
                f"none of {config.num_pairs} pairs has a strategy that fits; train on more pairs, "
                "smaller models or larger clusters."
            )
        self.num_evaluations += sum(example.num_evaluations for example in examples)
        return examples

    def advance(self, examples: list[Example], num_steps: int, begin: float) -> None:
        """Make some steps, after which the next validation comes."""
        for _ in range(num_steps):
            self._one_step(examples, begin)

    def log(self, terms: Mapping[str, float], begin: float) -> None:
        """Log the results of a step."""
        if self._writer is not None:
            rate = self.num_evaluations / max(time.perf_counter() - begin, 1e-9)
            for name, value in ({"evaluations_per_s": rate} | dict(terms)).items():
                self._writer.add_scalar(f"train/{name}", value, self.step)
        text = ", ".join(f"{name} {value:.3f}" for name, value in terms.items())
        self.report("train", self.step / self.config.num_steps, text)

    def _one_step(self, examples: list[Example], begin: float) -> None:
        config = self.config
        fraction = self.step / config.num_steps
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate_at(self.step)
        self.policy.train()
        self.optimizer.zero_grad()
        terms: dict[str, float] = {}
        chosen: list[Example] = []
        if config.imitates:
            imitation = Imitation(examples, config.elites_per_pair)
            chosen = imitation.choose(config.pairs_per_step, self.rng)
            keys = [example.index for example in chosen]
        else:
            keys = self.rng.choice(config.num_pairs, config.pairs_per_step).tolist()
            # Sorted as in ``Imitation.choose``, for the halves below.
            keys.sort(key=lambda key: self.pair(key).num_candidates)
        # Two halves, so that smaller tables are not padded to the size of the largest.
        for half in (slice(0, len(keys) // 2), slice(len(keys) // 2, None)):
            if keys[half]:
                self._accumulate(chosen[half], keys[half], len(keys), fraction, terms)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.averaged.update_parameters(self.policy)
        self.step += 1
        if self.step % 10 == 0:
            self.log(terms, begin)

    def _accumulate(
        self,
        chosen: list[Example],
        keys: list[int],
        total: int,
        fraction: float,
        terms: dict[str, float],
    ) -> None:
        """Add the gradient of some pairs of a step, and their part of its numbers."""
        config, part = self.config, len(keys) / total
        loss = torch.zeros(())
        if config.imitates:
            imitation = Imitation(chosen, config.elites_per_pair)
            loss, scores = imitation.loss(self.policy, chosen, self.rng)
            _count(terms, {"imitation_loss": float(loss.detach())}, part)
            loss = loss * config.imitation_weight
        else:
            observations = [self.pair(key).observation for key in keys]
            scores = self.policy(PairBatch(observations))
        if config.reinforces:
            pairs = [self.pair(key) for key in keys]
            made = self.reinforce.step(scores, pairs, keys, fraction, self.rng)
            loss = loss + made.loss
            self.num_evaluations += made.num_evaluations
            for example, found in zip(chosen, made.improved, strict=False):
                if found is not None:
                    example.improve(*found)
            _count(terms, _terms(made), part)
        (loss * part).backward()  # type: ignore[no-untyped-call]

    def pair(self, index: int) -> Pair:
        """A training pair, kept once it is made, without the scores of earlier steps."""
        if index not in self._pairs:
            self._pairs[index] = self.source.pair(index)
        pair = self._pairs[index]
        pair.forget()
        return pair

    def _validate(self, validation: Validation) -> None:
        row = validation.run(self.kept)
        self.num_evaluations += int(row.pop("evaluations"))
        row = {"step": float(self.step), "num_evaluations": float(self.num_evaluations)} | row
        self.history.append(row)
        assert self.best is not None
        worth = -row["reward"] if "reward" in row else row["best_of_16"]
        if worth <= self.best[0]:
            self.best = (worth, _copy(self.kept))
        if self._writer is not None:
            for name, value in row.items():
                self._writer.add_scalar(f"validation/{name}", value, self.step)
        text = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
        self.report("validation", self.step / self.config.num_steps, text)

    def _described(self, seconds: float) -> dict[str, Any]:
        return dict(self._files.provenance) | {
            "training_config": _plain(self.config),
            "reward": _name(self.reward),
            "history": [dict(row) for row in self.history],
            "num_evaluations": self.num_evaluations,
            "seconds": seconds,
            "models": [graph.name for graph in self.source.graphs],
            "clusters": [cluster.name for cluster in self.source.clusters],
        }

    def _save(self, examples: list[Example]) -> None:
        if self._files.checkpoint is None:
            return
        assert self.best is not None
        state = {
            "config": _plain(self.config),
            "reward": _name(self.reward),
            "step": self.step,
            "num_evaluations": self.num_evaluations,
            "rng": self.rng.bit_generator.state,
            "history": self.history,
            "best": list(self.best),
            "coefficient": self.reinforce.coefficient,
            "pairs": {
                key: [state.average, [list(entry) for entry in state.pool]]
                for key, state in self.reinforce.states.items()
            },
            "elites": [_record(example) for example in examples],
        } | self.state()
        save_checkpoint(
            self._files.checkpoint,
            Checkpoint(policy=self.policy, provenance=self._described(0.0), training=state),
        )

    def state(self) -> dict[str, Any]:
        """Everything that the learner needs to resume exactly."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "averaged": self.averaged.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.averaged.load_state_dict(state["averaged"])

    def _resume(self, checkpoint: Checkpoint, path: Path) -> None:
        """Resume from a checkpoint.

        Raises:
            InputFileError: its state of training does not fit together.
            HeterogError: it was trained with other settings.
        """
        try:
            self._load(checkpoint)
        # Errors of torch and numpy about a state that does not fit.
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise InputFileError(
                f"cannot resume from {path}: its state of training does not fit together "
                f"({type(error).__name__})."
            ) from error
        except (RuntimeError, ValueError) as error:
            raise InputFileError(
                f"cannot resume from {path}: its state of training does not fit together: "
                f"{' '.join(str(error).split())[:120]}."
            ) from error

    def _load(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.training
        if not state:
            raise HeterogError("the policy to resume from has no state of training in it.")
        if checkpoint.policy.config != self.policy.config:
            raise HeterogError(
                f"cannot resume with another network: {checkpoint.policy.config} there, "
                f"{self.policy.config} here."
            )
        if state["config"] != _plain(self.config):
            different = [
                f"{name} {value!r} there, {_plain(self.config).get(name)!r} here"
                for name, value in state["config"].items()
                if value != _plain(self.config).get(name)
            ]
            raise HeterogError(f"cannot resume with other settings: {'; '.join(different)}.")
        before = state.get("reward", _name(reward_of))
        if before != _name(self.reward):
            raise HeterogError(
                f"cannot resume with another reward: {before} there, {_name(self.reward)} here."
            )
        self.policy.load_state_dict(checkpoint.policy.state_dict())
        try:
            self.restore(state)
        except KeyError as error:
            raise HeterogError(
                f"the state to resume from has no {error}: another version of heterog wrote it. "
                "Train on from its policy with `initial`."
            ) from error
        self.rng.bit_generator.state = state["rng"]
        self.step, self.num_evaluations = state["step"], state["num_evaluations"]
        self.history = [dict(row) for row in state["history"]]
        self.best = (state["best"][0], dict(state["best"][1]))
        self.reinforce.coefficient = state["coefficient"]
        self.reinforce.states = {
            key: PairState(average, [(reward, row) for reward, row in pool])
            for key, (average, pool) in state["pairs"].items()
        }
        self._elites = list(state["elites"]) or None


def check_settings(config: TrainingConfig, reward: RewardFunction) -> None:
    """Refuse a reward without use; warn of settings that the algorithm does not read.

    Raises:
        HeterogError: the algorithm asks for no reward, and one of its own is given.
    """
    if reward is not reward_of and not config.asks_for_rewards:
        raise HeterogError(
            f"'{config.algorithm}' copies the fastest strategies that a search finds and asks for "
            f"no reward, so {_name(reward)} would change nothing; train with reinforce, mixed or "
            "ppo."
        )
    for ignored in config.ignored():
        warnings.warn(f"{ignored}.", HeterogWarning, stacklevel=3)


def _name(reward: RewardFunction) -> str:
    """A reward by name, as policies and checkpoints record it."""
    return str(getattr(reward, "__qualname__", type(reward).__qualname__))


def _count(terms: dict[str, float], new: Mapping[str, float], part: float) -> None:
    for name, value in new.items():
        terms[name] = terms.get(name, 0.0) + part * value


def _terms(made: ReinforceStep) -> dict[str, float]:
    return {
        "reward": made.reward,
        "speedup": made.speedup,
        "entropy": made.entropy,
        "out_of_memory": made.out_of_memory,
    }


def _copy(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def _plain(config: TrainingConfig) -> dict[str, Any]:
    """Settings as values that a checkpoint may hold."""
    record = asdict(replace(config))
    return record | {
        "algorithm": str(config.algorithm),
        "entropy_nats": list(config.entropy_nats),
    }


def _record(example: Example) -> dict[str, Any]:
    return {
        "index": example.index,
        "elites": torch.from_numpy(example.elites.copy()),
        "best_s": example.best_s,
        "uniform_s": example.uniform_s,
        "headroom": example.headroom,
        "num_evaluations": example.num_evaluations,
    }


def _restore(source: PairSource, record: Mapping[str, Any]) -> Example:
    pair = source.pair(record["index"])
    return Example(
        name=pair.name,
        observation=pair.observation,
        **{key: value for key, value in record.items() if key != "elites"},
        elites=record["elites"].numpy(),
    )
