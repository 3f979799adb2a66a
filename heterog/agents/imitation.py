"""Imitation of search elites: raise the probability of the best rows that a search found.

    loss = - mean over pairs and elites of log p(elite) / G

The value head also learns, from the reward of the best elite. Pairs with headroom over the best
uniform row are drawn more often. If the learner also draws samples, those that beat a pair's
elites replace them (expert iteration).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterog.agents.elites import NUM_ELITES, Elites, balanced_stages, find_elites
from heterog.agents.graph_data import PairBatch
from heterog.agents.policy import Policy, Scores, draw, log_probabilities, rule_of_thumb
from heterog.agents.reinforce import value_loss
from heterog.agents.sources import PairSource
from heterog.envs.observation import Observation
from heterog.envs.pair import Pair
from heterog.lowering.program import IntArray
from heterog.workers import HERE, Workers

_NUM_STARTS = 12  # rows drawn by the rule of thumb
_OF_PAIR = ("name", "observation")
"""Attributes of an example that its pair gives."""


@dataclass(slots=True, kw_only=True)
class Example:
    """A training pair: its observation, and the rows to imitate.

    Attributes:
        index: Number of the pair in its source.
        name: Name of model and cluster.
        observation: Observation of the pair.
        elites: The best rows known.  # [num_elites, G]
        best_s: Step time of the first elite.
        baseline_s: Step time of the best data-parallel baseline, to which rewards are relative.
        uniform_s: Step time of the best uniform row.
        headroom: Logarithm of the gain of the best elite over the best uniform row.
        num_evaluations: Evaluations that the search spent.
    """

    index: int
    name: str
    observation: Observation
    elites: IntArray
    best_s: float
    baseline_s: float
    uniform_s: float
    headroom: float
    num_evaluations: int

    def record(self) -> dict[str, Any]:
        """The attributes that a checkpoint holds."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OF_PAIR}
        return own | {"elites": torch.from_numpy(self.elites.copy())}

    @classmethod
    def restored(cls, source: PairSource, record: Mapping[str, Any]) -> Self:
        """The example of a record."""
        pair = source.pair(record["index"])
        seen = {"name": pair.name, "observation": pair.observation}
        return cls(**{**record, **seen, "elites": record["elites"].numpy()})

    def improve(self, row: IntArray, step_time_s: float) -> None:
        """Add a row that fits, if it is better than the best elite."""
        if step_time_s < self.best_s:
            self.best_s = step_time_s
            self.elites = np.concatenate([row[None], self.elites])[:NUM_ELITES]


def search_pair(pair: Pair, num_evaluations: int, rng: np.random.Generator) -> Elites:
    """Search from uniform rows and from a rule of thumb that respects the memory."""
    starts = list(draw(rule_of_thumb(pair), pair, _NUM_STARTS, rng).rows)
    if pair.num_micro > 1:
        starts += list(balanced_stages(pair, 5 * _NUM_STARTS, rng))
    found = find_elites(pair, num_evaluations, rng, starts)
    pair.forget()
    return found


def make_example(source: PairSource, index: int, num_evaluations: int) -> Example | None:
    """Search one pair of a source; ``None`` if no row was found that fits and can be drawn."""
    pair = source.pair(index)
    found = search_pair(pair, num_evaluations, source.rng(index))
    observation = pair.observation
    # A policy cannot draw a row in which the memory estimate masks a block's candidate.
    is_drawable = [observation.fits[np.arange(pair.num_blocks), row].all() for row in found.rows]
    if found.overflow > 0.0 or not any(is_drawable):
        return None
    return Example(
        index=index,
        name=pair.name,
        observation=observation,
        elites=found.rows[is_drawable],
        best_s=found.step_time_s,
        baseline_s=pair.baseline_s,
        uniform_s=found.uniform_s,
        headroom=found.headroom,
        num_evaluations=found.num_evaluations,
    )


def make_examples(
    source: PairSource,
    num_pairs: int,
    num_evaluations: int,
    *,
    workers: Workers = HERE,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Example]:
    """Search pairs 0, 1, ... of a source; the result does not depend on the workers."""
    found: list[Example] = []
    made = workers.map(_work, source, ((index, num_evaluations) for index in range(num_pairs)))
    for done, example in enumerate(made, 1):
        if example is not None:
            found.append(example)
        progress(done)
    return found


def _work(source: PairSource, job: tuple[int, int]) -> Example | None:
    torch.set_num_threads(1)  # several workers share the machine
    return make_example(source, *job)


class Imitation:
    """The loss over examples; see the module docstring.

    Args:
        examples: Pairs with elites.
        elites_per_pair: Number of elites drawn for each pair and step.
    """

    def __init__(self, examples: Sequence[Example], elites_per_pair: int = 4) -> None:
        self.examples = list(examples)
        self._per_pair = elites_per_pair

    def weights(self) -> npt.NDArray[np.float64]:
        """Probability of each pair to be drawn: higher if there is more to gain."""
        # A pair with a headroom of 1/6 or more comes 1.3 / 0.3 times as often as one without any.
        headroom = np.array([example.headroom for example in self.examples])
        weights = 0.3 + np.minimum(6.0 * headroom, 1.0)
        return np.asarray(weights / weights.sum())

    def choose(self, count: int, rng: np.random.Generator) -> list[Example]:
        """Draw examples, sorted by the size of their tables so that little is padded."""
        count = min(count, len(self.examples))
        numbers = rng.choice(len(self.examples), count, replace=False, p=self.weights())
        chosen = [self.examples[number] for number in numbers]
        return sorted(chosen, key=lambda example: len(example.observation.candidates))

    def loss(
        self, policy: Policy, chosen: Sequence[Example], rng: np.random.Generator
    ) -> tuple[Tensor, Scores]:
        """The loss of some pairs, and the scores it was computed from."""
        scores = policy(PairBatch([example.observation for example in chosen]))
        num_blocks = scores.unary.shape[1]
        which, actions, weights = [], [], []
        for index, example in enumerate(chosen):
            count = min(self._per_pair, len(example.elites))
            for row in example.elites[rng.choice(len(example.elites), count, replace=False)]:
                which.append(index)
                actions.append(np.pad(row, (0, num_blocks - len(row))))
                weights.append(1.0 / (count * len(row)))
        log_p, _ = log_probabilities(
            scores, torch.tensor(which), torch.from_numpy(np.array(actions)).long()
        )
        loss = -(log_p * torch.tensor(weights)).sum() / len(chosen)
        best = [math.log(example.baseline_s / example.best_s) for example in chosen]
        return loss + value_loss(scores.value, torch.tensor(best)), scores
