"""REINFORCE as in HeteroG (section 4.1.3): favour strategies above a pair's moving average.

Each step draws K strategies per pair and one more from the pair's pool of best strategies, which
starts with data parallelism. The paper replays its pool without weights; here all K + 1 count by
the balance heuristic (Veach & Guibas 1995), which keeps the estimate unbiased and every weight
below (K + 1) / K:

    w(a) = p(a) / ((K p(a) + q(a)) / (K + 1)),   q(a) = 1 / |pool| in the pool, else 0

The moving average and the entropy schedule are the paper's; unlike its fixed coefficient, ours is
steered so that the entropy of whole strategies follows the schedule: with a fixed one it fell to
nothing within a hundred steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterog.agents.policy import Samples, Scores, draw, log_probabilities, masks_of
from heterog.envs.pair import Pair
from heterog.envs.reward import RewardFunction, reward_of
from heterog.lowering.program import IntArray

POOL_SIZE = 8
ScoreAhead = Callable[[Sequence[int], Sequence[Pair], Sequence[IntArray]], None]
"""Function called with (keys, pairs, rows of each pair) before the rows' scores are asked for."""


def steered(
    coefficient: float, entropy: float, schedule: tuple[float, float], fraction: float
) -> float:
    """The next step's coefficient of the entropy: it grows while the entropy is too low.

    Args:
        coefficient: Coefficient of this step.
        entropy: Entropy of whole strategies in this step, in nats.
        schedule: Entropy wanted at the start and at the end of training; linear in between.
        fraction: Part of the training that is done.
    """
    first, last = schedule
    wanted = first + (last - first) * fraction
    # By a tenth a step at most: the entropy follows the coefficient only after some steps.
    factor = float(np.exp(np.clip(0.05 * (wanted - entropy), -0.1, 0.1)))
    return float(np.clip(coefficient * factor, 1e-4, 1.0))


@dataclass(slots=True)
class PairState:
    """Memory about a pair: its moving average and its best strategies."""

    average: float | None = None
    pool: list[tuple[float, bytes]] = field(default_factory=list)  # (reward, row), best first

    def remember(self, reward: float, row: IntArray) -> None:
        """Keep a row if it is among the best."""
        key = row.astype(np.int32).tobytes()
        if all(key != known for _, known in self.pool):
            self.pool.append((reward, key))
            self.pool.sort(key=lambda entry: -entry[0])
            del self.pool[POOL_SIZE:]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceStep:
    """Results of one step.

    Attributes:
        loss: Loss to be minimised.
        reward: Mean reward of the drawn strategies.
        speedup: Geometric mean over pairs of the best drawn strategy over the baseline.
        entropy: Mean entropy of whole strategies, in nats.
        out_of_memory: Part of the drawn strategies that do not fit.
        num_evaluations: Number of strategies scored.
        rows: For each pair, every row that was scored.
        improved: For each pair, the best drawn row that fits and its seconds.
    """

    loss: Tensor
    reward: float
    speedup: float
    entropy: float
    out_of_memory: float
    num_evaluations: int
    rows: tuple[IntArray, ...]
    improved: tuple[tuple[IntArray, float] | None, ...]


class Reinforce:
    """The estimator; see the module docstring.

    Args:
        samples_per_pair: K, number of strategies drawn for each pair.
        entropy_nats: Entropy of whole strategies at the start and at the end of training.
        reward: Reward of a scored row.
        score_ahead: Function that may score a step's rows elsewhere; see ``scoring.PairScorer``.
    """

    def __init__(
        self,
        samples_per_pair: int = 16,
        entropy_nats: tuple[float, float] = (12.0, 6.0),
        reward: RewardFunction = reward_of,
        score_ahead: ScoreAhead = lambda keys, pairs, rows: None,
    ) -> None:
        self._reward, self._score_ahead = reward, score_ahead
        self.num_samples = samples_per_pair
        self._entropy_nats = entropy_nats
        self.coefficient = 0.01
        self.states: dict[int, PairState] = {}

    def step(
        self,
        scores: Scores,
        pairs: Sequence[Pair],
        keys: Sequence[int],
        fraction: float,
        rng: np.random.Generator,
    ) -> ReinforceStep:
        """Draw, score, and compute the loss.

        Args:
            scores: Scores of the pairs, with gradients.
            pairs: The pairs.
            keys: A number for each pair, under which its state is kept.
            fraction: Part of the training that is done.
            rng: Generator for the draws.
        """
        states = [self._state(pair, key) for pair, key in zip(pairs, keys, strict=True)]
        samples = [
            self._draw(scores, index, pair, state, rng)
            for index, (pair, state) in enumerate(zip(pairs, states, strict=True))
        ]
        self._score_ahead(keys, pairs, [each.rows for each in samples])
        drawn = [
            self._judge(pair, state, each)
            for pair, state, each in zip(pairs, states, samples, strict=True)
        ]
        log_p, entropy = _log_probabilities(scores, drawn)
        pool = torch.tensor(np.concatenate([each.in_pool for each in drawn]))
        advantage = torch.tensor(np.concatenate([each.advantage for each in drawn]))
        k = self.num_samples
        p = log_p.detach().double().exp()  # of whole strategies: too small for 32 bits
        weight = torch.where(p > 0, p / ((k * p + pool) / (k + 1)), torch.zeros_like(p))
        gradient = (weight * advantage).float()
        fresh = torch.tensor(np.concatenate([each.is_fresh for each in drawn]))
        mean_entropy = (entropy * fresh).sum() / fresh.sum()
        loss = -(gradient * log_p).sum() / len(log_p) - self.coefficient * mean_entropy
        reached = float(mean_entropy.detach())
        self.coefficient = steered(self.coefficient, reached, self._entropy_nats, fraction)
        return ReinforceStep(
            loss=loss,
            reward=float(np.mean([each.reward.mean() for each in drawn])),
            speedup=float(np.exp(np.mean([np.log(each.speedup) for each in drawn]))),
            entropy=float(mean_entropy.detach()),
            out_of_memory=float(np.mean([each.out_of_memory for each in drawn])),
            num_evaluations=sum(len(each.rows) for each in drawn),
            rows=tuple(each.rows for each in drawn),
            improved=tuple(each.best for each in drawn),
        )

    def _state(self, pair: Pair, key: int) -> PairState:
        if key not in self.states:
            self.states[key] = state = PairState()
            # The pool begins with every kind of data parallelism over all devices.
            everything = max(range(pair.num_candidates), key=lambda c: len(pair.table[c].devices))
            devices = pair.table[everything].devices
            for number, decision in enumerate(pair.table):
                if decision.devices == devices:
                    row = np.full(pair.num_blocks, number, np.int32)
                    state.remember(self._reward(pair, pair.score(row)).reward, row)
        return self.states[key]

    def _draw(
        self, scores: Scores, index: int, pair: Pair, state: PairState, rng: np.random.Generator
    ) -> Samples:
        found = draw(scores.of(index, pair), pair, self.num_samples, rng, keep_masks=True)
        replay = np.frombuffer(state.pool[rng.integers(len(state.pool))][1], np.int32)
        rows = np.concatenate([found.rows, replay[None]])
        return Samples(
            rows=rows, masks=np.concatenate([found.masks, masks_of(pair, replay[None])])
        )

    def _judge(self, pair: Pair, state: PairState, samples: Samples) -> "_Drawn":
        rows = samples.rows
        results = [self._reward(pair, pair.score(row)) for row in rows]
        rewards = np.array([each.reward for each in results])
        fresh = rewards[:-1]
        average = state.average if state.average is not None else float(fresh.mean())
        # If all draws are nearly as good, their differences are not inflated to advantages.
        scale = max(float(fresh.std()), 0.02)
        known = {key for _, key in state.pool}
        in_pool = [float(row.tobytes() in known) / len(state.pool) for row in rows]
        state.average = 0.5 * (average + float(fresh.mean()))
        for row, result in zip(rows, results, strict=True):
            state.remember(result.reward, row)
        fitting = [n for n, each in enumerate(results) if each.overflow == 0.0]
        best = min(fitting, key=lambda n: results[n].step_time_s) if fitting else None
        return _Drawn(
            rows=rows,
            masks=samples.masks,
            reward=fresh,
            advantage=np.clip((rewards - average) / scale, -4.0, 4.0),
            in_pool=np.array(in_pool),
            is_fresh=np.append(np.ones(len(fresh), np.float32), np.float32(0.0)),
            out_of_memory=float(np.mean([each.overflow > 0.0 for each in results[:-1]])),
            speedup=max(each.speedup for each in results),
            best=None if best is None else (rows[best], results[best].step_time_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Strategies of one pair in one step: K fresh ones, then one from the pool."""

    rows: IntArray
    masks: npt.NDArray[np.bool_]
    reward: npt.NDArray[np.float64]
    advantage: npt.NDArray[np.float64]
    in_pool: npt.NDArray[np.float64]
    is_fresh: npt.NDArray[np.float32]
    out_of_memory: float
    speedup: float
    best: tuple[IntArray, float] | None


def _log_probabilities(scores: Scores, drawn: Sequence["_Drawn"]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every row that was drawn, in one pass.  # [R], [R]"""
    num_blocks, num_candidates = scores.unary.shape[1:]
    which = np.repeat(np.arange(len(drawn)), [len(each.rows) for each in drawn])
    actions = np.zeros((len(which), num_blocks), np.int64)
    masks = np.zeros((len(which), num_blocks, num_candidates), np.bool_)
    masks[:, :, 0] = True  # of blocks that a smaller pair does not have
    at = 0
    for each in drawn:
        count, blocks = each.rows.shape
        actions[at : at + count, :blocks] = each.rows
        masks[at : at + count, :blocks] = False
        masks[at : at + count, :blocks, : each.masks.shape[2]] = each.masks
        at += count
    return log_probabilities(
        scores, torch.from_numpy(which), torch.from_numpy(actions), torch.from_numpy(masks)
    )
