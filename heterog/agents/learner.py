"""The base class of learners, and learning by gradients of a loss.

``imitation``, ``reinforce`` and ``mixed`` (both at once) follow gradients; ``sb3:NAME`` and
``sb3_contrib:NAME`` are algorithms of stable-baselines3 and sb3-contrib (``sb3``);
``path/to/file.py:NAME`` is your own learner, a subclass of ``Learner``.

All random draws of gradient learners come from one generator whose state is in the checkpoint, so
a run that is stopped and resumed ends with the same weights as an uninterrupted one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from heterog.agents.config import Algorithm, TrainingConfig
from heterog.agents.graph_data import PairBatch
from heterog.agents.imitation import Example, Imitation, make_examples
from heterog.agents.policy import Policy
from heterog.agents.reinforce import Reinforce
from heterog.agents.sources import PairSource
from heterog.envs.pair import Pair, Score
from heterog.envs.reward import RewardFunction, reward_of
from heterog.errors import ConformanceError, HeterogError, UnknownNameError
from heterog.lowering.program import IntArray
from heterog.user_code import is_from_file, load_object
from heterog.workers import HERE, Here, Workers

Report = Callable[[str, float, str], None]
"""Function called with (stage, part done, news)."""


def _silent(stage: str, fraction: float, text: str) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A learning task.

    Attributes:
        source: Source of the pairs; pairs below ``config.num_pairs`` are for learning.
        config: Settings.
        policy: Policy to begin with, which the learner may change.
        reward: Reward of a scored strategy.
        workers: Workers for searches and scores.
        report: Function that gets the progress of preparations.
    """

    source: PairSource
    config: TrainingConfig
    policy: Policy
    reward: RewardFunction = reward_of
    workers: Workers = HERE
    report: Report = _silent


class Learner(ABC):
    """Improves a policy step by step; ``Trainer`` validates it, keeps the best, stops and resumes.

    Args:
        task: The learning task.

    Attributes:
        policy: The policy that is learning.
        num_evaluations: Number of strategies simulated so far.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.policy = task.policy
        self.num_evaluations = 0

    @property
    def kept(self) -> Policy:
        """The policy that is validated and kept."""
        return self.policy

    @abstractmethod
    def advance(self, step: int) -> Mapping[str, float]:
        """Make a step of ``config.num_steps``; return numbers to log."""

    def state(self) -> dict[str, Any]:
        """The state to resume from beside the policy's weights, as a checkpoint may hold it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (nothing by default)
        """Go on from a state; the policy has its weights already."""


MakeLearner = Callable[[Task], Learner]


def learner_of(algorithm: str) -> MakeLearner:
    """The function that makes the learner of a name; see the module docstring.

    Raises:
        UnknownNameError: there is no such algorithm.
        HeterogError: it takes other actions than a choice among candidates, or its package or file
            is missing.
        ConformanceError: a name of your own is no ``Learner``.
    """
    if algorithm in list(Algorithm):
        return GradientLearner
    library, _, name = algorithm.partition(":")
    if library in ("sb3", "sb3_contrib") and name:
        from heterog.agents.sb3 import sb3_learner

        return sb3_learner(library, name)
    if not is_from_file(algorithm) or ".py" not in algorithm:
        known = (*Algorithm, "sb3:A2C", "sb3:PPO", "sb3:DQN", "sb3_contrib:MaskablePPO")
        raise UnknownNameError("algorithm", algorithm, known)
    found = load_object(algorithm, "learner")
    if not (isinstance(found, type) and issubclass(found, Learner)):
        raise ConformanceError(
            f"{algorithm} is no subclass of heterog.agents.learner.Learner; write "
            "'class Mine(Learner)' with a method 'advance'."
        )
    return found


_MOST_KEPT = 256
"""Number of pairs that a worker keeps ready."""


def score_on(
    workers: Workers,
    source: PairSource,
    indices: Sequence[int],
    pairs: Sequence[Pair],
    rows: Sequence[IntArray],
) -> None:
    """Score rows of a source's pairs on workers, and store the scores in the pairs.

    Args:
        workers: Workers that score; without any, rows are scored when their scores are needed.
        source: Source of the pairs.
        indices: Number of each pair in the source.
        pairs: The pairs.
        rows: Rows of each pair.  # each [num_rows, G]
    """
    if isinstance(workers, Here):
        return
    found = workers.map(_score, source, list(zip(indices, rows, strict=True)))
    for pair, own, scores in zip(pairs, rows, found, strict=True):
        pair.remember(own, scores)


def _score(source: PairSource, job: tuple[int, IntArray]) -> list[Score]:
    index, rows = job
    pair = _pair(source, index)
    scores = [pair.score(row) for row in rows]
    pair.forget()
    return scores


@lru_cache(_MOST_KEPT)
def _pair(source: PairSource, index: int) -> Pair:
    return source.pair(index)


class GradientLearner(Learner):
    """Learns from some pairs per step, by imitation or REINFORCE; see the module docstring."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), config.learning_rate, betas=(0.9, 0.98), weight_decay=0.02,
            foreach=True,
        )  # fmt: skip
        # The average over the last few hundred steps varies less, so it is validated and kept.
        self.averaged = AveragedModel(self.policy)
        # Walking through all modules takes longer than averaging their weights.
        self._weights: list[Tensor] = list(self.policy.parameters())
        self._kept_weights: list[Tensor] = list(self.averaged.module.parameters())
        self._rng = np.random.default_rng([config.seed, 77])
        self._judged = replace(task.source, judged=True)
        self.reinforce = Reinforce(
            config.samples_per_pair,
            config.entropy_nats,
            reward=task.reward,
            score_ahead=partial(score_on, task.workers, self._judged),
        )
        self._pairs: dict[int, Pair] = {}
        self._known: list[Example] | None = None

    @property
    def kept(self) -> Policy:
        """The averaged policy, once there is one."""
        if not int(self.averaged.n_averaged):
            return self.policy
        assert isinstance(self.averaged.module, Policy)
        return self.averaged.module

    @property
    def examples(self) -> list[Example]:
        """Pairs with the elites of a search, which runs at the first use."""
        if self._known is None:
            self._known = self._searched() if self.task.config.imitates else []
        return self._known

    def _searched(self) -> list[Example]:
        config, report = self.task.config, self.task.report

        def progress(done: int) -> None:
            report("search", done / config.num_pairs, f"{done} of {config.num_pairs} pairs")

        examples = make_examples(
            self.task.source,
            config.num_pairs,
            config.search_evaluations,
            workers=self.task.workers,
            progress=progress,
        )
        if not examples:
            raise HeterogError(
                f"none of {config.num_pairs} pairs has a strategy that fits; train on more pairs, "
                "smaller models or larger clusters."
            )
        self.num_evaluations += sum(example.num_evaluations for example in examples)
        for example in examples if config.reinforces else ():
            # Draws are scored op by op, unlike in the search, so its best row is scored again.
            pair = self.pair(example.index)
            example.best_s = pair.score(example.elites[0]).step_time_s
        return examples

    def advance(self, step: int) -> dict[str, float]:
        """Make a step."""
        config = self.task.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate_at(step)
        self.policy.train()
        self.optimizer.zero_grad()
        terms: dict[str, float] = {}
        chosen: list[Example] = []
        if config.imitates:
            imitation = Imitation(self.examples, config.elites_per_pair)
            chosen = imitation.choose(config.pairs_per_step, self._rng)
            keys = [example.index for example in chosen]
        else:
            keys = self._rng.choice(config.num_pairs, config.pairs_per_step).tolist()
            # Sorted as in ``Imitation.choose``, for the halves below.
            keys.sort(key=lambda key: self.pair(key).num_candidates)
        # In two halves, so that small tables are not padded to the size of the largest.
        for half in (slice(0, len(keys) // 2), slice(len(keys) // 2, None)):
            if keys[half]:
                part = len(keys[half]) / len(keys)
                for name, value in self._accumulate(chosen[half], keys[half], part, step).items():
                    terms[name] = terms.get(name, 0.0) + part * value
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0, foreach=True)
        self.optimizer.step()
        self._average()
        return terms

    @torch.no_grad()
    def _average(self) -> None:
        """Move averaged weights towards the current ones, in a short run faster than by the decay.

        With a fixed decay of 0.995, what is kept after 13 steps is 94 % the first policy.
        """
        count = int(self.averaged.n_averaged)
        part = max(1.0 - self.task.config.average_decay, 9.0 / (10.0 + count)) if count else 1.0
        torch._foreach_lerp_(self._kept_weights, self._weights, part)
        for kept, own in zip(self.averaged.module.buffers(), self.policy.buffers(), strict=True):
            kept.copy_(own)
        self.averaged.n_averaged += 1

    def _accumulate(
        self, chosen: list[Example], keys: list[int], part: float, step: int
    ) -> dict[str, float]:
        """Add the gradient of some pairs of a step; return numbers to log."""
        config, terms = self.task.config, {}
        loss = torch.zeros(())
        if config.imitates:
            imitation = Imitation(chosen, config.elites_per_pair)
            loss, scores = imitation.loss(self.policy, chosen, self._rng)
            terms["imitation_loss"] = float(loss.detach())
            loss = loss * config.imitation_weight
        else:
            scores = self.policy(PairBatch([self.pair(key).observation for key in keys]))
        if config.reinforces:
            pairs, fraction = [self.pair(key) for key in keys], step / config.num_steps
            made = self.reinforce.step(scores, pairs, keys, fraction, self._rng)
            loss = loss + made.loss
            self.num_evaluations += made.num_evaluations
            for example, found in zip(chosen, made.improved, strict=False):
                if found is not None:
                    example.improve(*found)
            terms |= made.terms
        (loss * part).backward()  # type: ignore[no-untyped-call]
        return terms

    def pair(self, index: int) -> Pair:
        """A training pair, cached, without the scores of earlier steps."""
        if index not in self._pairs:
            self._pairs[index] = self._judged.pair(index)
        pair = self._pairs[index]
        pair.forget()
        return pair

    def state(self) -> dict[str, Any]:
        """Optimizer, average, random generator, and the elites of each pair."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "averaged": self.averaged.state_dict(),
            "rng": self._rng.bit_generator.state,
            "coefficient": self.reinforce.coefficient,
            "examples": [example.record() for example in self.examples],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.averaged.load_state_dict(state["averaged"])
        self._rng.bit_generator.state = state["rng"]
        self.reinforce.coefficient = state["coefficient"]
        self._known = [Example.restored(self.task.source, each) for each in state["examples"]]
