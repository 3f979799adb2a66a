"""Learning by gradients of a loss: ``imitation``, ``reinforce``, and ``mixed``, both at once.

Every random draw comes from one generator whose state is in the checkpoint, so a run that was
stopped and resumed ends with the same weights as one that was not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from heterog.agents.graph_data import PairBatch
from heterog.agents.imitation import Example, Imitation, make_examples
from heterog.agents.learner import Learner, Task
from heterog.agents.policy import Policy
from heterog.agents.reinforce import Reinforce
from heterog.agents.scoring import PairScorer
from heterog.envs.pair import Pair
from heterog.errors import HeterogError


class GradientLearner(Learner):
    """Draws or copies strategies of some pairs a step; see the module docstring."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), config.learning_rate, betas=(0.9, 0.98), weight_decay=0.02
        )
        # The average over the last few hundred steps is validated and kept: it is steadier.
        averaging = get_ema_multi_avg_fn(config.average_decay)  # type: ignore[no-untyped-call]
        self.averaged = AveragedModel(self.policy, multi_avg_fn=averaging)
        self._rng = np.random.default_rng([config.seed, 77])
        self._judged = replace(task.source, judged=True)
        self.reinforce = Reinforce(
            config.samples_per_pair,
            config.entropy_nats,
            reward=task.reward,
            score_ahead=PairScorer(task.workers, self._judged),
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
        """Pairs with what a search found for them, searched when they are first asked for."""
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
            # Draws are judged more finely than the search did, so that its best is judged anew.
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
        # Two halves, so that smaller tables are not padded to the size of the largest.
        for half in (slice(0, len(keys) // 2), slice(len(keys) // 2, None)):
            if keys[half]:
                part = len(keys[half]) / len(keys)
                for name, value in self._accumulate(chosen[half], keys[half], part, step).items():
                    terms[name] = terms.get(name, 0.0) + part * value
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.averaged.update_parameters(self.policy)
        return terms

    def _accumulate(
        self, chosen: list[Example], keys: list[int], part: float, step: int
    ) -> dict[str, float]:
        """Add the gradient of some pairs of a step; return their numbers."""
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
        """A training pair, kept once it is made, without the scores of earlier steps."""
        if index not in self._pairs:
            self._pairs[index] = self._judged.pair(index)
        pair = self._pairs[index]
        pair.forget()
        return pair

    def state(self) -> dict[str, Any]:
        """Optimizer, average, draws, and what was found for each pair."""
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
