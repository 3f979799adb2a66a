"""What a policy's network is made of."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Sizes of a policy.

    Attributes:
        encoder: name of the network; see ``encoder.ENCODERS``.
        width: of every embedding.
        num_heads: of every attention.
        num_rounds: rounds of message passing.
        rank: of the transition between neighbouring blocks' candidates; 0 decides each block on
            its own.
        stay_bias: log-odds that an untrained policy keeps the previous block's candidate.
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
