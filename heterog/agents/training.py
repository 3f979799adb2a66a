"""Training on many pairs at once: a learner's steps, validation, checkpoints, resume.

There are three sets of pairs: pairs to learn from, validation pairs that choose the best policy of
the run, and pairs on which that policy is reported. The last two are never learned from; on them,
policies draw as in use.
"""

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from heterog.agents.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from heterog.agents.config import PolicyConfig, TrainingConfig
from heterog.agents.imitation import search_pair
from heterog.agents.learner import Report, Task, learner_of
from heterog.agents.policy import Policy, draw
from heterog.agents.sources import PairSource
from heterog.agents.ways import draw_in, make_ways
from heterog.envs.pair import Pair
from heterog.envs.reward import RewardFunction, reward_of
from heterog.errors import ConformanceError, HeterogError, HeterogWarning, InputFileError
from heterog.garbage import settled
from heterog.methods.planner import Budget
from heterog.names import own_name
from heterog.runtime.accelerators import num_threads
from heterog.workers import HERE, Workers

FIRST_PAIR = 1_000_000
"""Number in the source of the first validation pair."""
FIRST_REPORTED = 2_000_000
"""Number of the first pair on which the chosen policy is reported."""
_MAY_CHANGE = ("num_steps", "check_every")
"""Settings in which a resumed run may differ from the first one."""
NO_FIT = 3.0
"""Ratio to the reference that counts if no sample fits."""


class Validation:
    """Some pairs with search results for them, plain rows or pipelines.

    Args:
        source: Source of the pairs.
        config: Number of pairs, and length of the searches.
        workers: Workers that run the searches.
        first: Number of the first pair.
        reward: Reward that the policy learns to raise; reported unless it is ``reward_of``, which
            the ratios reflect already.
    """

    def __init__(
        self,
        source: PairSource,
        config: TrainingConfig,
        workers: Workers = HERE,
        first: int = FIRST_PAIR,
        *,
        reward: RewardFunction = reward_of,
    ) -> None:
        # Without pipelined pairs: the policy has to find out which way is best.
        source = replace(source, pipelined=0.0)
        self.pairs: list[Pair] = []
        self.reference_s: list[float] = []
        self.num_evaluations = 0
        self._seed, self._reward = config.seed, reward
        if config.num_validation == 0:
            return
        # Pairs without any strategy that fits tell nothing about a policy; others replace them.
        numbers = range(first, first + 500)
        jobs = ((index, config.search_evaluations) for index in numbers)
        for index, found in zip(numbers, workers.map(_search, source, jobs), strict=True):
            reference_s, num_evaluations = found
            self.num_evaluations += num_evaluations
            if reference_s < math.inf:
                self.pairs.append(source.pair(index))
                self.reference_s.append(reference_s)
            if len(self.pairs) == config.num_validation:
                break

    def run(self, policy: Policy, num_samples: int = 16) -> dict[str, float]:
        """Geometric mean ratios to the reference: greedy, best of 16; part of draws that overflow.

        With another reward than ``reward_of`` also ``reward``: the mean over the pairs of the mean
        over all draws.
        """
        policy.eval()
        greedy, best, too_large, rewards = [], [], [], []
        evaluations = 0
        for number, (pair, reference_s) in enumerate(
            zip(self.pairs, self.reference_s, strict=True)
        ):
            rng = np.random.default_rng([self._seed, number])
            ways = make_ways(policy, [pair], num_samples)
            draw_in(ways, num_samples, rng)
            found = [score for way in ways for score in way.found]
            likeliest = draw(ways[0].scores, pair, 1, rng, greedy=True).rows[0]
            overflow, seconds = min(way.promise for way in ways)
            first = pair.score(likeliest)
            greedy.append(_log_ratio(first.overflow, first.step_time_s, reference_s))
            best.append(_log_ratio(overflow, seconds, reference_s))
            too_large.append(np.mean([score.overflow > 0.0 for score in found]))
            evaluations += len(found)
            if self._reward is not reward_of:
                rewards.append(np.mean([self._reward(pair, each).reward for each in found]))
            pair.forget()
        own = {"reward": float(np.mean(rewards))} if rewards else {}
        return own | {
            "greedy": math.exp(np.mean(greedy)),
            "best_of_16": math.exp(np.mean(best)),
            "out_of_memory": float(np.mean(too_large)),
            "evaluations": float(evaluations),
        }


def _log_ratio(overflow: float, seconds: float, reference_s: float) -> float:
    return math.log(seconds / reference_s if overflow == 0.0 else NO_FIT)


def _search(source: PairSource, job: tuple[int, int]) -> tuple[float, int]:
    """(seconds of the best row that fits, with micro-batches or without; rows simulated)."""
    torch.set_num_threads(1)  # several workers share the machine
    index, num_evaluations = job
    pair, rng = source.pair(index), source.rng(index)
    found = [
        search_pair(each, num_evaluations, rng)
        for each in (pair, pair.pipelined())
        if each is not None
    ]
    seconds = [each.step_time_s for each in found if each.overflow == 0.0]
    return min(seconds, default=math.inf), sum(each.num_evaluations for each in found)


def _worth(row: Mapping[str, float]) -> float:
    """Sort key of policies, smallest is best: minus the reward, or the ratio to searches."""
    return -row["reward"] if "reward" in row else row["best_of_16"]


_LOG_EVERY = 10  # steps between two log entries; 1 in short runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        checkpoint: The best policy by validation: the one with the fastest strategies, or with the
            highest reward if the run has another reward than ``reward_of``.
        before: Results of the initial policy on the pairs for reports.
        after: Results of the best policy on the same pairs.
        finished: Whether all steps were made; ``False`` after an interruption.
        history: Rows of validation, as logged.
        num_evaluations: Number of strategies simulated, searches included.
        seconds: Wall time.
    """

    checkpoint: Checkpoint
    finished: bool
    history: tuple[Mapping[str, float], ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    num_evaluations: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Files that a run reads and writes.

    Attributes:
        provenance: Record stored with the policy (names of models and clusters, the command).
        logdir: Folder for TensorBoard; none if ``None``.
        checkpoint: File that is renewed at every validation; none if ``None``.
        resume: Checkpoint to resume from; the run may have more steps than the earlier one.
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
        config: Settings; the algorithm selects the learner.
        network: Sizes of a new policy, or an initial policy.
        files: Files that are read and written.
        reward: Reward that learners maximise. With another than ``reward_of``, validation keeps
            the policy with the highest mean reward instead of the fastest one.
        workers: Workers that search pairs and score strategies; the policy does not depend on
            them.
        report: Function that gets the progress.
        budget: Seconds or evaluations after which training ends before its last step.

    Raises:
        HeterogError: a reward is given to ``imitation``, which uses none, or the run to resume
            from had other settings.
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
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget
        self.source, self.config, self.report = source, config, report
        self._files, self._workers, self._reward = files, workers, reward
        check_settings(config, reward)
        torch.manual_seed(config.seed)
        network = network or PolicyConfig()
        policy = Policy(network.config if isinstance(network, Policy) else network)
        if isinstance(network, Policy):
            policy.load_state_dict(network.state_dict())
        task = Task(
            source=source,
            config=config,
            policy=policy,
            reward=reward,
            workers=workers,
            report=report,
        )
        self.learner = learner_of(config.algorithm)(task)
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.best: tuple[float, dict[str, torch.Tensor]] | None = None
        self._first = _copy(policy)
        self._spent = 0  # evaluations of validation
        self._writer = SummaryWriter(str(files.logdir)) if files.logdir is not None else None
        if files.resume is not None:
            self._resume(load_checkpoint(files.resume), files.resume)

    @property
    def policy(self) -> Policy:
        """The policy that is learning."""
        return self.learner.policy

    @property
    def num_evaluations(self) -> int:
        """Number of strategies simulated, searches included."""
        return self._spent + self.learner.num_evaluations

    @settled()
    def run(self) -> TrainingResult:
        """Train to the end, or until interrupted; return the best policy."""
        begin = time.perf_counter()
        try:
            with num_threads(1):  # see ``score_pairs``
                finished = self._run(begin)
                assert self.best is not None
                policy = self._policy_of(self.best[1])
                before, after = self._reported(policy) if finished else ({}, {})
        finally:
            if self._writer is not None:
                self._write_settings(self._writer)
                self._writer.close()
        seconds = time.perf_counter() - begin
        described = self._described(seconds) | {"before": before, "after": after}
        return TrainingResult(
            checkpoint=Checkpoint(policy=policy, provenance=described),
            finished=finished,
            history=tuple(self.history),
            before=before,
            after=after,
            num_evaluations=self.num_evaluations,
            seconds=seconds,
        )

    def _policy_of(self, weights: Mapping[str, torch.Tensor]) -> Policy:
        policy = Policy(self.policy.config)
        policy.load_state_dict(weights)
        return policy.eval()

    def _validation(self, first: int) -> Validation:
        """Validation on pairs from a number on, with search results for them."""
        made = Validation(self.source, self.config, self._workers, first, reward=self._reward)
        self._spent += made.num_evaluations if self.step in (0, self.config.num_steps) else 0
        return made

    def _reported(self, policy: Policy) -> tuple[dict[str, float], dict[str, float]]:
        """Results of the initial and the best policy on pairs that chose nothing."""
        self.report("report", 0.0, "")
        try:
            pairs = self._validation(FIRST_REPORTED)
            if pairs.pairs:
                return pairs.run(self._policy_of(self._first)), pairs.run(policy)
        except KeyboardInterrupt:
            self.report("interrupted", 1.0, "the best is kept")
        return {}, {}

    def _run(self, begin: float) -> bool:
        self.best = self.best or (float("inf"), _copy(self.learner.kept))
        try:
            self.report("validation pairs", 0.0, "")
            validation = self._validation(FIRST_PAIR)
            if not self.history:
                self._validate(validation)
            while self.step < self.config.num_steps and not self._is_spent(begin):
                terms = self.learner.advance(self.step)
                self.step += 1
                if self.step % _LOG_EVERY == 0 or self.config.num_steps < 10 * _LOG_EVERY:
                    self._log(terms, begin)
                if self.step % self.config.check_every == 0 or self.step == self.config.num_steps:
                    self._validate(validation)
            if self.history[-1]["step"] < self.step:  # the budget ended the run
                self._validate(validation)
        except KeyboardInterrupt:
            self.report("interrupted", self.step / self.config.num_steps, "the best is kept")
            return False
        return True

    def _is_spent(self, begin: float) -> bool:
        budget = self._budget
        return budget is not None and (
            time.perf_counter() - begin >= budget.limit_s
            or self.num_evaluations >= budget.most_evaluations
        )

    def _log(self, terms: Mapping[str, float], begin: float) -> None:
        """Log the results of a step."""
        if not isinstance(terms, Mapping):
            raise ConformanceError(
                f"{type(self.learner).__name__}: advance() returns {type(terms).__name__}; "
                "return numbers to log, such as {'reward': 0.5}."
            )
        rate = self.num_evaluations / max(time.perf_counter() - begin, 1e-9)
        learning_rate = self.config.rate_at(self.step)
        about = {"evaluations_per_s": rate, "learning_rate": learning_rate}
        self._write("train", about | dict(terms))
        self.report("train", self.step / self.config.num_steps, _words(terms))

    def _write(self, stage: str, numbers: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(f"{stage}/{name}", value, self.step)

    def _write_settings(self, writer: SummaryWriter) -> None:
        """Write settings and results for TensorBoard's table of hyper-parameters."""
        settings = {
            name: value if isinstance(value, int | float | str | bool) else str(value)
            for name, value in _plain(self.config).items()
        }
        reached = {f"best/{name}": value for name, value in self._best_row().items()}
        writer.add_hparams(settings, reached, run_name=".")

    def _best_row(self) -> dict[str, float]:
        """The row of validation of the best policy; empty if there is none yet."""
        return min([row for row in self.history if "best_of_16" in row], key=_worth, default={})

    def _validate(self, validation: Validation) -> None:
        row = validation.run(self.learner.kept)
        self._spent += int(row.pop("evaluations"))
        row = {"step": float(self.step), "num_evaluations": float(self.num_evaluations)} | row
        self.history.append(row)
        assert self.best is not None
        if _worth(row) <= self.best[0]:
            self.best = (_worth(row), _copy(self.learner.kept))
        self._write("validation", row)
        self.report("validation", self.step / self.config.num_steps, _words(row))
        self._save()

    def _described(self, seconds: float) -> dict[str, Any]:
        return dict(self._files.provenance) | {
            "training_config": _plain(self.config),
            "reward": own_name(self._reward),
            "history": [dict(row) for row in self.history],
            "num_evaluations": self.num_evaluations,
            "seconds": seconds,
            "models": [graph.name for graph in self.source.graphs],
            "clusters": [cluster.name for cluster in self.source.clusters],
        }

    def _save(self) -> None:
        if self._files.checkpoint is None:
            return
        assert self.best is not None
        state = {
            "config": _plain(self.config),
            "reward": own_name(self._reward),
            "step": self.step,
            "spent": [self._spent, self.learner.num_evaluations],
            "history": self.history,
            "best": list(self.best),
            "first": self._first,
            "learner": self.learner.state(),
        }
        save_checkpoint(
            self._files.checkpoint,
            Checkpoint(policy=self.policy, provenance=self._described(0.0), training=state),
        )

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
        different = [
            f"{name} {value!r} there, {_plain(self.config).get(name)!r} here"
            for name, value in state["config"].items()
            if value != _plain(self.config).get(name) and name not in _MAY_CHANGE
        ]
        if different:
            raise HeterogError(f"cannot resume with other settings: {'; '.join(different)}.")
        before = state.get("reward", own_name(reward_of))
        if before != own_name(self._reward):
            raise HeterogError(
                f"cannot resume with another reward: {before} there, {own_name(self._reward)} "
                "here."
            )
        self.policy.load_state_dict(checkpoint.policy.state_dict())
        try:
            self.learner.restore(state["learner"])
            self._spent, self.learner.num_evaluations = state["spent"]
            self.step, self._first = state["step"], dict(state["first"])
        except KeyError as error:
            raise HeterogError(
                f"the state to resume from has no {error}: another version of heterog wrote it. "
                "Train on from its policy with `initial`."
            ) from error
        if self.step >= self.config.num_steps:
            raise HeterogError(
                f"the run to resume from has made {self.step} steps, and "
                f"{self.config.num_steps} are asked for: ask for more."
            )
        self.history = [dict(row) for row in state["history"]]
        self.best = (state["best"][0], dict(state["best"][1]))


def check_settings(config: TrainingConfig, reward: RewardFunction) -> None:
    """Refuse a reward without effect; warn of settings that the algorithm does not read.

    Raises:
        HeterogError: the algorithm uses no reward, and another than ``reward_of`` is given.
    """
    if reward is not reward_of and not config.asks_for_rewards:
        raise HeterogError(
            f"'{config.algorithm}' copies the fastest strategies that a search finds and asks for "
            f"no reward, so {own_name(reward)} would change nothing; train with reinforce, mixed, "
            "or an algorithm of stable-baselines3 such as sb3:PPO."
        )
    for ignored in config.ignored():
        warnings.warn(f"{ignored}.", HeterogWarning, stacklevel=3)


_COUNTS = ("step", "num_evaluations")


def _words(numbers: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:,.0f}" if name in _COUNTS else f"{name} {value:.3f}"
        for name, value in numbers.items()
    )


def _copy(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def _plain(config: TrainingConfig) -> dict[str, Any]:
    """Settings as values that a checkpoint may hold."""
    return asdict(config) | {
        "algorithm": str(config.algorithm),
        "entropy_nats": list(config.entropy_nats),
    }
