"""The sizes of a policy's network, and the settings of its training. Needs no torch."""

from dataclasses import dataclass, fields
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Sizes of a policy.

    Attributes:
        encoder: Name of the network; see ``encoder.ENCODERS``.
        width: Width of every embedding.
        num_heads: Number of heads of every attention.
        num_rounds: Number of rounds of message passing.
        rank: Rank of the transition scores between candidates of neighbouring blocks; with 0,
            blocks are decided independently.
        stay_bias: Log-odds that an untrained policy keeps the previous block's candidate; it has
            no effect if ``rank`` is 0.
    """

    encoder: str = "hetero"
    width: int = 64
    num_heads: int = 4
    num_rounds: int = 2
    rank: int = 16
    stay_bias: float = 3.0

    def __post_init__(self) -> None:
        if self.width % self.num_heads or min(self.width, self.num_rounds) < 1 or self.rank < 0:
            raise ValueError(
                f"a policy needs a width that its heads divide and at least one round, got width "
                f"{self.width}, {self.num_heads} heads, {self.num_rounds} rounds and rank "
                f"{self.rank}."
            )


class Algorithm(StrEnum):
    """The package's own ways to learn; ``heterog.agents.learner`` knows others by name."""

    IMITATION = "imitation"
    REINFORCE = "reinforce"
    MIXED = "mixed"


_READ_BY = {
    "elites_per_pair": (Algorithm.IMITATION, Algorithm.MIXED),
    "samples_per_pair": (Algorithm.REINFORCE, Algorithm.MIXED, "sb3", "sb3_contrib"),
    "entropy_nats": (Algorithm.REINFORCE, Algorithm.MIXED),
    "imitation_weight": (Algorithm.MIXED,),
    "average_decay": (Algorithm.IMITATION, Algorithm.REINFORCE, Algorithm.MIXED),
}
"""Algorithms, or libraries of them, that read a setting. All algorithms read the others; a user's
own reads all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of a run; the defaults are those of the shipped policies and of ``heterog train``.

    Attributes:
        algorithm: Learning algorithm: one of ``Algorithm``, ``sb3:NAME``, ``sb3_contrib:NAME``, or
            a learner of your own, ``path/to/file.py:name``.
        num_pairs: Number of training pairs.
        search_evaluations: Evaluations spent on each pair's elites, and on each validation pair.
        num_steps: Number of gradient steps; with stable-baselines3, of rollouts, each about an
            episode of every environment, with the updates from it.
        pairs_per_step: Pairs in each step.
        elites_per_pair: Elites of each pair in a step of imitation.
        samples_per_pair: Strategies drawn for each pair in a step of REINFORCE; with
            stable-baselines3, environments that play the same pair.
        learning_rate: Peak, reached after 50 steps or a tenth; it falls to a tenth linearly.
        entropy_nats: Entropy of whole strategies that REINFORCE holds at the start and at the end.
        imitation_weight: Weight of imitation in ``mixed``.
        average_decay: Decay per step of the running average of the weights.
        check_every: Steps between validations.
        num_validation: Number of pairs by which the best policy is chosen; it is reported on as
            many other pairs.
        seed: Seed of everything random.
    """

    algorithm: str = Algorithm.IMITATION
    num_pairs: int = 1200
    search_evaluations: int = 750
    num_steps: int = 3000
    pairs_per_step: int = 8
    elites_per_pair: int = 4
    samples_per_pair: int = 16
    learning_rate: float = 5e-4
    entropy_nats: tuple[float, float] = (12.0, 6.0)
    imitation_weight: float = 1.0
    average_decay: float = 0.995
    check_every: int = 200
    num_validation: int = 16
    seed: int = 0

    @property
    def imitates(self) -> bool:
        """Whether pairs are searched first."""
        return self.algorithm in (Algorithm.IMITATION, Algorithm.MIXED)

    @property
    def reinforces(self) -> bool:
        """Whether REINFORCE draws and scores strategies."""
        return self.algorithm in (Algorithm.REINFORCE, Algorithm.MIXED)

    @property
    def asks_for_rewards(self) -> bool:
        """Whether the learner maximises a reward, and does not only copy elites."""
        return self.algorithm != Algorithm.IMITATION

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a warm-up over 50 steps or a tenth, times a linear decay.

        >>> config = TrainingConfig(num_steps=1000, learning_rate=1.0)
        >>> config.rate_at(0), config.rate_at(49), round(config.rate_at(1000), 3)
        (0.02, 0.9559, 0.1)
        """
        rising = min((step + 1) / min(50.0, max(self.num_steps / 10.0, 1.0)), 1.0)
        return self.learning_rate * rising * (1.0 - 0.9 * step / self.num_steps)

    def ignored(self) -> list[str]:
        """Settings that differ from their default and that the algorithm does not read.

        >>> TrainingConfig(algorithm="sb3:PPO", imitation_weight=2.0).ignored()
        ["imitation_weight=2.0 has no effect on 'sb3:PPO', only on mixed"]
        """
        if ".py:" in self.algorithm:
            return []
        name = self.algorithm.partition(":")[0]
        return [
            f"{field.name}={getattr(self, field.name)} has no effect on '{self.algorithm}', only "
            f"on {', '.join(_READ_BY[field.name])}"
            for field in fields(self)
            if name not in _READ_BY.get(field.name, (name,))
            and getattr(self, field.name) != field.default
        ]
