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
        seed: of the run; the same on all ranks.
        device: where its ops draw.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = default_generator(device)

    @contextmanager
    def drawing(self, step: int, op: int, micro: int, *, rank: int | None) -> Iterator[None]:
        """Random numbers drawn inside belong to an op.

        Args:
            step: number of the step.
            op: the op.
            micro: the micro-batch, of which an op that all ranks share sees nothing: it draws for
                the whole step.
            rank: whose numbers these are; ``None``: every rank draws the same.
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
