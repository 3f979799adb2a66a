"""Closed forms for workers of unequal speed that do not wait for each other.

They give the benefit of dispatch, elastic batches and one more device without a simulation:
Adaptive SGD (arXiv 2110.07029), CPU+GPU Hogbatch (arXiv 2004.08771).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

MERGE_BOOST = 0.1
"""Fraction by which the largest weight grows and the smallest shrinks in Adaptive SGD's code,
whose weights then do not add up to 1."""


def is_worth_adding(relative_speed: float, step_s: float, extra_s: float) -> bool:
    """Whether one more device pays, which takes s/(1+s) of the work but adds communication.

    With speed 1 so far and s of the new device, compute shrinks from T to T/(1+s), so it helps
    while the extra communication is below T s/(1+s).

    >>> is_worth_adding(0.25, 1.0, 0.19), is_worth_adding(0.25, 1.0, 0.21)
    (True, False)

    Args:
        relative_speed: s, speed of the new device over that of all others together.
        step_s: T, seconds of compute of a step without it.
        extra_s: Seconds of communication that it adds to a step.
    """
    return extra_s < step_s * relative_speed / (1.0 + relative_speed)


def merge_weights(updates: Sequence[int], *, boost: float = 0.0) -> tuple[float, ...]:
    """Weight of each worker's parameters, in proportion to its updates.

    With a boost b the largest weight grows by b of itself and the smallest shrinks by b of itself,
    so that they add up to 1 + b (largest - smallest), not to 1.

    >>> merge_weights((3, 1))
    (0.75, 0.25)

    Args:
        updates: Number of updates of each worker since the last merge.
        boost: ``MERGE_BOOST`` in Adaptive SGD while the norm of its weights grows.
    """
    weights = [each / sum(updates) for each in updates]
    largest = max(range(len(weights)), key=weights.__getitem__)
    smallest = min(range(len(weights)), key=weights.__getitem__)
    weights[largest] += boost * weights[largest]
    weights[smallest] -= boost * weights[smallest]
    return tuple(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRule:
    """The rule by which batches follow updates after each mega-batch, as in Adaptive SGD.

    Attributes:
        step: Number of samples by which a batch grows or shrinks.
        least: Least number of samples of a batch.
        most: Largest number of samples of a batch.
        dead_band: Number of batches by which two workers may differ without a change.
            0 is the paper's code, which swings around the ratio of speeds for ever.
    """

    step: int = 32
    least: int = 32
    most: int = 1024
    dead_band: float = 1.0

    def next_batches(self, batches: Sequence[int], updates: Sequence[int]) -> tuple[int, ...]:
        """The batch of each worker after a mega-batch.

        >>> ElasticRule().next_batches((512, 512), (26, 14))
        (544, 480)
        >>> ElasticRule().next_batches((672, 352), (20, 19))
        (672, 352)
        """
        mean = sum(updates) / len(updates)
        moved = []
        for batch, own in zip(batches, updates, strict=True):
            # The distance of two workers from their mean is half of their difference.
            is_near = 2.0 * abs(own - mean) <= self.dead_band
            sign = 0 if is_near else (own > mean) - (own < mean)
            moved.append(min(max(batch + sign * self.step, self.least), self.most))
        return tuple(moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegaBatch:
    """One window of dispatch.

    Attributes:
        batches: Number of samples of a batch of each worker.
        updates: Number of batches that each worker trained.
        weights: Weights of the merge.
        seconds: Seconds until the last worker had ended.
    """

    batches: tuple[int, ...]
    updates: tuple[int, ...]
    weights: tuple[float, ...]
    seconds: float


def dispatch_order(
    batch_seconds: Sequence[float], batches: Sequence[int], mega_batch: int
) -> list[int]:
    """The worker of each batch, if the next batch goes to the first free worker.

    >>> dispatch_order((1.0, 2.5), (10, 10), 50)
    [0, 1, 0, 0, 1]

    Args:
        batch_seconds: Seconds that each worker takes for its batch.
        batches: Number of samples of a batch of each worker.
        mega_batch: Number of samples to hand out; the last batch is whole.
    """
    free = [(0.0, worker) for worker in range(len(batches))]
    heapq.heapify(free)
    order, left = [], mega_batch
    while left > 0:
        now_s, worker = heapq.heappop(free)
        left -= batches[worker]
        order.append(worker)
        heapq.heappush(free, (now_s + batch_seconds[worker], worker))
    return order
