"""Random numbers of ops on several ranks: dropout masks, noise.

Every op of every step gets a seed of its own, made from what identifies it. So a run repeats with
the same seed, whatever the order of its ops, and resuming needs only the number of the step. The
default generator, which the user's own code draws from, is left as it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from heterog.runtime.accelerators import default_generator

_EVERY_RANK = 0


class RandomStream:
    """Seeds for the ops of a rank.

    Args:
        seed: Seed of the run; the same on all ranks.
        device: Device on which its ops draw.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = default_generator(device)

    @contextmanager
    def drawing(self, step: int, op: int, micro: int, *, rank: int | None) -> Iterator[None]:
        """Draw the random numbers of the body from the stream of one op.

        Args:
            step: Number of the step.
            op: Index of the op.
            micro: Number of the micro-batch. An op that all ranks share ignores it and draws for
                whole step.
            rank: Rank whose numbers these are; ``None`` if every rank draws the same.
        """
        own = (_EVERY_RANK, 0) if rank is None else (1 + rank, micro)
        mixed = np.random.SeedSequence((self._seed, step, op, *own)).generate_state(1, np.uint64)
        state = self._generator.get_state()
        # torch takes seeds as signed numbers of 64 bits.
        self._generator.manual_seed(int(mixed[0]) >> 1)
        try:
            yield
        finally:
            self._generator.set_state(state)
