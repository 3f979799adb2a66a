"""Settings of healing."""

from dataclasses import dataclass
from typing import ClassVar

from heterog.errors import HeterogError
from heterog.records import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class HealOptions:
    """Settings that protect a job against lost and slow devices.

    Attributes:
        redundancy: Number of further hosts that also hold each part of a snapshot; with 0, losing
            a host loses its part. Ranks of one machine have one memory.
        first_budget: Search budget for the plan that training goes on with after a loss.
        search_budget: Budget of the search for a better plan meanwhile; empty for none.
        back_after_s: Seconds after a loss before a device is tried again; doubles with each
            further loss of the device. 0 never tries.
        slow_factor: Factor over its planned time, relative to the other devices, from which a
            device counts as slow; 0 turns the check off.
        checkpoint: Folder of checkpoints written beside training; empty for none.
        checkpoint_s: Seconds between checkpoints.
        num_trials: Number of plans near the running one that are tried on the job's own steps.
    """

    __pydantic_config__: ClassVar = STRICT

    redundancy: int = 1
    first_budget: str = "3s"
    search_budget: str = "30s"
    back_after_s: float = 60.0
    slow_factor: float = 1.5
    checkpoint: str = ""
    checkpoint_s: float = 60.0
    num_trials: int = 0

    def __post_init__(self) -> None:
        if self.redundancy < 0:
            raise HeterogError(f"the redundancy is {self.redundancy}; 0 is the least.")
        if self.slow_factor and not self.slow_factor > 1:
            raise HeterogError(
                f"a device is slow from {self.slow_factor:g} times the planned time on; give more "
                "than 1, or 0 to look for none."
            )
        if self.back_after_s < 0 or self.checkpoint_s <= 0:
            raise HeterogError("seconds cannot be negative, and between checkpoints not 0.")
