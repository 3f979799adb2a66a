"""Methods for comparison only, which a learned method has to beat.

``untrained`` and ``thumb`` answer like ``agent``, by the same draws, stages and refining, but
without training: with weights drawn from a seed, and with a rule of thumb instead of the network.
``ppo`` and ``maskable_ppo`` learn on the pair itself, from weights drawn with a seed, by
algorithms of stable-baselines3 and sb3-contrib (``sb3``), and return their best rows.
``row_search`` has the rivals that do not learn, ``placers`` the agents of papers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from heterog.agents.benchmark.placers import Gdp, HeterogAgent, Placeto, learn_by
from heterog.agents.benchmark.row_search import (
    MOST_KNOWN,
    Rows,
    RowSearch,
    annealing,
    cma_es,
    optional,
    random_draws,
    tpe,
    tree_search,
)
from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.config import PolicyConfig, TrainingConfig
from heterog.agents.graph_data import PairBatch
from heterog.agents.improver import Improver, led_by
from heterog.agents.learner import Task
from heterog.agents.planners import DEFAULT_POLICY, Agent, default_methods
from heterog.agents.policy import Policy, Scores
from heterog.agents.sources import PairSource
from heterog.envs.observation import PAIR_SLOWER
from heterog.envs.pair import Pair, Score
from heterog.methods.local_search.planner import Lead
from heterog.methods.planner import Planner, PlanResult, Problem
from heterog.methods.registry import Methods

if TYPE_CHECKING:
    from heterog.agents.sb3 import Sb3Learner

MASKED = -1e9  # score of a masked candidate: its probability is 0
MOST_REPEATED = 40
"""Consecutive episodes without a new strategy after which learning ends."""
NO_SCORE = Score(step_time_s=1e9, overflow=10.0)
"""Score of a row that cannot run, finite because a reward must be."""
SMALLEST = PolicyConfig(width=4, num_heads=1, num_rounds=1)


class Fixed(Policy):
    """A policy without a network: a weight on analytic times, and a bonus for staying."""

    def __init__(self, slower: float, cut: float, stay: float) -> None:
        super().__init__(SMALLEST)
        self.slower, self.of_cut, self.of_stay = slower, cut, stay

    def forward(self, batch: PairBatch) -> Scores:
        """Score every block and candidate of a batch of pairs."""
        unary = -self.slower * batch.pairs[..., PAIR_SLOWER]
        blocks = torch.zeros(unary.shape[:2])
        return Scores(
            unary=unary.masked_fill(~batch.allowed, MASKED),
            pair=torch.zeros_like(batch.overlap),
            overlap=batch.overlap,
            cut=blocks + self.of_cut,
            stay=blocks + self.of_stay,
            value=torch.zeros(len(unary)),
            block_mask=batch.block_mask,
        )


def untrained(seed: int, sizes: PolicyConfig | None = None) -> Policy:
    """A network with weights drawn from a seed, by default of the shipped policy's sizes."""
    torch.manual_seed(1000 + seed)
    return Policy(sizes or load_checkpoint(DEFAULT_POLICY).policy.config).eval()


def thumb(seed: int) -> Policy:
    """A rule of thumb: the fastest candidate of each block, and few cuts."""
    return Fixed(2.0, 1.0, 7.0).eval()


class WithoutTraining(Planner):
    """Answers like ``agent``, but with scores of another policy.

    Args:
        name: Name of the row.
        policy: Makes the policy from a seed.
        lead: Makes the lead of the finishing moves from a seed; by default moves are unled.
    """

    stage = "zero_shot"
    is_random = True

    def __init__(
        self,
        name: str,
        policy: Callable[[int], Policy],
        lead: Callable[[int], Lead | None] = lambda seed: None,
    ) -> None:
        self.name, self._policy, self._lead = name, policy, lead

    def plan(self, problem: Problem) -> PlanResult:
        """Answer with the policy."""
        lead = partial(self._lead, problem.seed)
        return Agent(self._policy(problem.seed), lead=lead).plan(problem)


def learn_by_sb3(
    algorithm: str,
    rows: Rows,
    episodes: float = 4,
    updates: float = 0.5,
    rate: float = 5e-4,
    entropy: float = 3e-3,
    stay: float = 3.0,
) -> None:
    """Learn on the problem's pair by PPO until the budget is over; an episode is an evaluation.

    Args:
        algorithm: Learning algorithm, as for ``heterog train``.
        rows: Rows of a problem.
        episodes: Episodes of a rollout.
        updates: Updates for each episode.
        rate: Learning rate, which falls to a tenth.
        entropy: Weight of the entropy.
        stay: Log-odds that the first policy keeps the candidate of the block before.
    """
    config = TrainingConfig(
        num_pairs=1,
        pairs_per_step=1,
        samples_per_pair=int(episodes),
        learning_rate=rate,
        seed=rows.problem.seed,
    )
    source = _OnePair(graphs=(), only=_Scored(rows))
    policy = untrained(rows.problem.seed, PolicyConfig(width=32, stay_bias=stay))
    task = Task(source=source, config=config, policy=policy)
    learner = _sb3(algorithm)(task, n_epochs=round(updates * episodes), ent_coef=entropy)
    while True:  # an evaluation beyond the budget raises an error
        learner.advance(int(min(rows.spending.fraction, 1.0) * config.num_steps))


def _sb3(algorithm: str) -> "partial[Sb3Learner]":
    from heterog.agents.sb3 import sb3_learner

    return sb3_learner(*algorithm.split(":"))


def _ppo(algorithm: str, **choices: tuple[float, ...]) -> "Rival":
    return Rival(
        how=partial(learn_by_sb3, algorithm),
        choices=choices,
        needs=partial(_sb3, algorithm),
        most_repeated=MOST_REPEATED,
    )


class _Scored(Pair):
    """A pair that scores its rows through the ``Rows`` of a search."""

    def __init__(self, rows: Rows) -> None:
        evaluator = rows.evaluator
        super().__init__(evaluator.graph, evaluator.cluster, evaluator.cost_model)
        self._rows = rows

    def judged(self) -> "Pair":
        """See ``Pair``: rows are scored op by op already."""
        return self

    def score(self, row: npt.ArrayLike) -> Score:
        """See ``Pair``."""
        found = self._rows.tried(tuple(np.asarray(row).tolist()))
        if found is None:
            return NO_SCORE
        over = np.array(found.peak_memory_bytes) / self.memory.usable_bytes - 1.0
        return Score(step_time_s=found.step_time_s, overflow=max(float(over.max()), 0.0))


@dataclass(frozen=True, kw_only=True)
class _OnePair(PairSource):
    """A source of one pair."""

    only: Pair

    def pair(self, index: int) -> Pair:
        """See ``PairSource``."""
        return self.only


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A method that tries rows, and the values of its settings that were compared.

    Attributes:
        how: Function of rows and settings.
        choices: Values of each setting that were tried; the first is the default or the paper's.
        needs: As for ``RowSearch``.
        most_repeated: As for ``Rows``.
    """

    how: Callable[..., None]
    choices: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    needs: Callable[[], object] = object
    most_repeated: int = MOST_KNOWN

    def method(self, name: str, settings: Mapping[str, float]) -> RowSearch:
        """The method with some settings."""
        how = partial(self.how, **settings)
        return RowSearch(name, how, self.needs, self.most_repeated)


RIVALS = {
    "random": Rival(how=random_draws),
    "annealing": Rival(how=annealing, choices={"hot": (0.02, 0.005, 0.1), "run": (4, 2, 8)}),
    "tpe": Rival(how=tpe, choices={"num_random": (10, 30, 60)}, needs=partial(optional, "optuna")),
    "cma_es": Rival(
        how=cma_es, choices={"width": (1 / 6, 0.02, 0.05, 0.3)}, needs=partial(optional, "cmaes")
    ),
    "tree": Rival(how=tree_search, choices={"exploration": (1.0, 0.1, 0.3, 3.0)}),
    "heterog_agent": Rival(
        how=partial(learn_by, HeterogAgent),
        choices={"rate": (3e-3, 1e-3, 1e-2), "entropy": (0.1, 0.01, 1.0), "draws": (2, 4, 8)},
        most_repeated=60,
    ),
    "gdp": Rival(
        how=partial(learn_by, Gdp),
        choices={"rate": (3e-3, 1e-3, 1e-2), "entropy": (1e-2, 1e-1, 1e-3), "draws": (4, 8, 16)},
        most_repeated=60,
    ),
    "placeto": Rival(
        how=partial(learn_by, Placeto),
        choices={"rate": (1e-3, 3e-3, 1e-2), "entropy": (1e-2, 1e-3, 1e-1)},
        most_repeated=200,
    ),
    "ppo": _ppo(
        "sb3:PPO",
        episodes=(4, 8, 16),
        updates=(0.5, 1.0),
        rate=(5e-4, 1.5e-3, 5e-3),
        entropy=(3e-3, 3e-2),
        stay=(3.0, 7.0),
    ),
    "maskable_ppo": _ppo("sb3_contrib:MaskablePPO"),  # has the settings of ``ppo``
}
"""Methods that try rows."""
_OF_PPO = {"episodes": 8, "updates": 0.5, "rate": 1.5e-3, "entropy": 0.03, "stay": 7.0}
TUNED: dict[str, dict[str, float]] = {
    "annealing": {"hot": 0.005},
    "cma_es": {"width": 0.02},
    "tree": {"exploration": 0.3},
    "ppo": _OF_PPO,
    "maskable_ppo": _OF_PPO,  # with the same seed, it is PPO to all digits
}
"""Choices of ``experiments/tune_rivals.py`` (``experiments/measured/tuning.jsonl``). Of the other
rivals, no setting was better than the first."""


def known_rows() -> Methods:
    """All methods, with the rivals."""
    return default_methods().having(
        *(rival.method(name, TUNED.get(name, {})) for name, rival in RIVALS.items()),
        WithoutTraining("untrained", untrained, lambda seed: led_by(Improver.untrained(seed))),
        WithoutTraining("thumb", thumb),
    )
