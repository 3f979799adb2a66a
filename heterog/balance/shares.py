"""Shares: how many units of a global batch each rank gets, and which of its samples those are.

A rank ``r`` with ``n`` samples computes for  t_r(n) = s_r (p_r + n)  seconds: s_r seconds for
a sample and a fixed part that takes as long as p_r samples. The best shares are whole numbers
with the given sum whose largest t_r(n_r) is least. The first shares (``first_shares``) are given,
in proportion to speeds, from a plan, or equal.

The samples in the global batch of a step are a function of seed, epoch and step, and never depend
on the shares. So shares may change at any step, and a job may resume with other shares or even
another number of ranks; each sample is still seen exactly once in an epoch.

``cut_batch`` cuts a rank's batch into parts that fit its memory; gradients are reduced once.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from heterog.errors import HeterogError
from heterog.strategy.division import split_evenly, split_in_proportion

IndexArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class BalanceError(HeterogError):
    """Shares, speeds or a sampler's state that are invalid or do not fit the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """Compute time of a rank as a function of its share.

    Attributes:
        unit_s: Seconds for one unit, a sample or the cost of a token.
        fixed_units: Part of a step that does not depend on the share, in units that take as long.
    """

    unit_s: float
    fixed_units: float = 0.0

    def __post_init__(self) -> None:
        if not (self.unit_s > 0 and math.isfinite(self.unit_s)):
            raise BalanceError(f"a unit takes {self.unit_s:g} s; it must be a positive number.")
        if not (self.fixed_units >= 0 and math.isfinite(self.fixed_units)):
            raise BalanceError(f"the fixed part is {self.fixed_units:g} units; 0 is the least.")

    def seconds(self, units: float) -> float:
        """Seconds to compute a share."""
        return self.unit_s * (self.fixed_units + units)


def step_s(speeds: Sequence[RankSpeed], shares: Sequence[float]) -> float:
    """Seconds until the last rank has computed its share."""
    return max(speed.seconds(share) for speed, share in zip(speeds, shares, strict=True))


def best_shares(
    speeds: Sequence[RankSpeed], total: int, most: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """The shares whose slowest rank ends first; exact, and deterministic on every machine.

    Within a time T, rank ``r`` does  min(most_r, T / s_r - p_r)  units. The largest T that leaves
    units over is found by bisection; these last few units go one by one to the rank that would end
    first with them. A rank whose fixed part alone takes too long gets nothing.

    Args:
        speeds: Speed of every rank.
        total: Units of the global batch.
        most: Units that each rank can take; ``None`` is no limit.

    Raises:
        BalanceError: the limits add up to less than the batch.

    >>> best_shares([RankSpeed(unit_s=0.1), RankSpeed(unit_s=0.2)], 9)
    (6, 3)
    >>> best_shares([RankSpeed(unit_s=0.1), RankSpeed(unit_s=0.2)], 9, [4, None])
    (4, 5)
    """
    limits = [
        total if limit is None else min(limit, total) for limit in most or [None] * len(speeds)
    ]
    if sum(limits) < total:
        raise BalanceError(
            f"the ranks can take {' + '.join(map(str, limits))} = {sum(limits)} units of a global "
            f"batch of {total}. Make the batch smaller, or let parts() cut micro-batches."
        )

    def within(time_s: float) -> list[int]:
        return [
            min(limit, max(0, math.floor(time_s / speed.unit_s - speed.fixed_units)))
            for speed, limit in zip(speeds, limits, strict=True)
        ]

    low, high = 0.0, max(speed.seconds(total) for speed in speeds)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(within(middle)) <= total:
            low = middle
        else:
            high = middle
    shares = within(low)
    queue = [
        (speed.seconds(shares[rank] + 1), rank)
        for rank, speed in enumerate(speeds)
        if shares[rank] < limits[rank]
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(shares)):
        _, rank = heapq.heappop(queue)
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            heapq.heappush(queue, (speeds[rank].seconds(shares[rank] + 1), rank))
    return tuple(shares)


def shares_from_speeds(
    speeds: Sequence[float], total: int, most: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Shares in proportion to speeds, in samples per second or any other unit.

    Args:
        speeds: Speed of every rank.
        total: Units of the global batch.
        most: Units that each rank can take; ``None`` is no limit.

    Raises:
        BalanceError: a speed is not positive.

    >>> shares_from_speeds([80, 40, 30], 15)
    (8, 4, 3)
    """
    for rank, speed in enumerate(speeds):
        if not (speed > 0 and math.isfinite(speed)):
            raise BalanceError(
                f"rank {rank} has a speed of {speed:g}; speeds are positive numbers. A rank that "
                "shall have no samples gets a share of 0 instead."
            )
    return best_shares([RankSpeed(unit_s=1 / speed) for speed in speeds], total, most)


def check_shares(shares: Sequence[int], num_ranks: int, total: int) -> tuple[int, ...]:
    """Return the shares, if they fit.

    Raises:
        BalanceError: their number or sum is wrong, or one is negative.
    """
    told = tuple(int(share) for share in shares)
    if len(told) != num_ranks:
        raise BalanceError(
            f"there are {len(told)} shares for {num_ranks} ranks; give one for each."
        )
    if min(told) < 0 or sum(told) != total:
        raise BalanceError(
            f"shares {' + '.join(map(str, told))} = {sum(told)}; they must be 0 or more and add "
            f"up to the global batch of {total}."
        )
    return told


def num_parts(
    samples: Sequence[int], fits: Sequence[int | None], rank: int, *, alike: bool
) -> int:
    """Number of micro-batches of a rank in a step.

    Args:
        samples: Number of samples of every rank in the step.
        fits: Number of samples that each rank can hold at once; ``None`` is no limit.
        rank: Rank of this process.
        alike: Whether every rank needs as many, because each forward pass communicates.
    """
    every = [
        max(1, math.ceil(count / limit)) if limit else 1
        for count, limit in zip(samples, fits, strict=True)
    ]
    return max(every) if alike else every[rank]


def forward_communicates(model: object) -> bool:
    """Whether ranks must run equally many forward passes: FSDP gathers parameters in each."""
    return isinstance(model, FSDPModule)


def cut_batch(batch: Any, num_samples: int, parts: int) -> Iterator[tuple[Any, int]]:
    """Cut a batch into parts as equal as possible, each with its number of samples.

    In place of an empty part, it yields the first sample with a count of 0.

    Raises:
        BalanceError: the batch does not have the given number of samples.
    """
    begin = 0
    for count in split_evenly(num_samples, parts):
        if parts == 1:
            yield batch, count
        elif count:
            yield _take(batch, begin, begin + count, num_samples), count
        else:
            yield _take(batch, 0, 1, num_samples), 0
        begin += count


def _take(value: Any, begin: int, end: int, num_samples: int) -> Any:
    """Samples ``begin`` to ``end`` of all tensors and lists of a batch."""
    if isinstance(value, Mapping):
        taken = {key: _take(each, begin, end, num_samples) for key, each in value.items()}
        return type(value)(taken)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_take(each, begin, end, num_samples) for each in value))
    if isinstance(value, tuple | list) and any(
        isinstance(each, Tensor | Mapping | tuple | list) for each in value
    ):
        return type(value)(_take(each, begin, end, num_samples) for each in value)
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    if isinstance(value, Tensor | list | tuple):
        if len(value) != num_samples:
            raise BalanceError(
                f"a batch of {num_samples} samples holds something of {len(value)}: parts() cuts "
                "the first axis of tensors and lists. Cut such a batch in your own loop."
            )
        return value[begin:end]
    return value


@contextmanager
def gradients_stay_local(model: object) -> Iterator[None]:
    """Keep gradients of the body's backward passes on this rank, without communication."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def first_shares(
    total: int,
    num_ranks: int,
    most: Sequence[int | None] | None,
    *,
    shares: Sequence[int] | None,
    speeds: Sequence[float] | None,
    plan: str | Path | None,
) -> tuple[int, ...]:
    """Units of each rank in a whole batch; equal ones if nothing says them.

    Args:
        total: Units of the batch.
        num_ranks: Number of ranks of the job.
        most: Units that each rank can hold; ``None`` is no limit.
        shares: Units of each rank.
        speeds: Speeds to which shares are proportional, in any unit.
        plan: Path of a data-parallel plan.

    Raises:
        BalanceError: more than one source is given, or the shares do not fit.
    """
    sources = {"shares": shares, "speeds": speeds, "plan": plan}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise BalanceError(f"{' and '.join(given)} are given; one of them says the first shares.")
    if shares is not None:
        return _within(check_shares(shares, num_ranks, total), most)
    weights = [1.0] * num_ranks
    if plan is not None:
        weights = shares_of_plan(plan)
    elif speeds is not None:
        weights = list(speeds)
    if len(weights) != num_ranks:
        raise BalanceError(
            f"{'the plan has' if plan is not None else 'there are speeds of'} {len(weights)} "
            f"ranks; {num_ranks} are running."
        )
    if plan is None:
        return shares_from_speeds(weights, total, most)
    limits = [
        0 if weight <= 0 else limit
        for weight, limit in zip(weights, most or [None] * num_ranks, strict=True)
    ]
    speed_of = [RankSpeed(unit_s=1 / weight if weight > 0 else 1.0) for weight in weights]
    return best_shares(speed_of, total, limits)


def shares_of_plan(plan: str | Path) -> list[float]:
    """Samples of each device of a plan that keeps the whole model on every rank.

    Raises:
        ExportError: the plan is not data-parallel.
    """
    # Reading plans takes the simulator's compiled kernels, which most loops never need.
    from heterog.export.uniform import uniform_micro_batches
    from heterog.search.plan import load_plan

    loaded = load_plan(plan)
    samples = uniform_micro_batches(loaded, "a balancer")
    return [float(sum(samples.get(index, ()))) for index in range(loaded.cluster.num_devices)]


def _within(shares: tuple[int, ...], most: Sequence[int | None] | None) -> tuple[int, ...]:
    for rank, (share, limit) in enumerate(zip(shares, most or (), strict=False)):
        if limit is not None and share > limit:
            raise BalanceError(
                f"rank {rank} is given {share} samples and can hold {limit}. Give it fewer, or "
                "set micro_batches=True and loop over balancer.parts(batch)."
            )
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Distribution of one step's batch among the ranks.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step in its epoch.
        samples: Number of samples of each rank.
        units: Size of each rank's part in the unit of shares: samples, or cost of their tokens.
        ran: Units that each rank runs: its own, or those of the sample that fills an empty part
            (the result does not count).
    """

    epoch: int
    step: int
    samples: tuple[int, ...]
    units: tuple[int, ...]
    ran: tuple[int, ...]


class GlobalBatches(Protocol):
    """The global batches of an epoch, and the way to cut them.

    Attributes:
        unit: Unit of shares, in words.
        has_length: Whether the number of steps is known before an epoch is over.
    """

    unit: str
    has_length: bool

    @property
    def units_per_batch(self) -> int:
        """Sum of the shares of a whole batch."""

    def num_steps(self, epoch: int) -> int:
        """Number of global batches of an epoch."""

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""

    def cut(self, indices: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """The indices of each rank, in order of the ranks."""

    def units(self, indices: IndexArray) -> int:
        """Size of some samples in the unit of shares."""


def length_of(batches: GlobalBatches, epoch: int) -> int:
    """Number of steps of an epoch, for ``len``.

    Raises:
        TypeError: it is not known, as for a stream.
    """
    if not batches.has_length:
        raise TypeError("a loader of a stream has no length: its end is known when it is read.")
    return batches.num_steps(epoch)


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> IndexArray:
    """The samples of an epoch in order; the same on all ranks.  # [num_samples]"""
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    return np.random.default_rng((seed, epoch)).permutation(num_samples).astype(np.int64)


def without_singles(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts of the same sum in which no rank has exactly one sample, if that is possible.

    A rank with one sample gets another from the rank with most, or else gives its own away.

    >>> without_singles((7, 1)), without_singles((2, 1, 1)), without_singles((2, 1))
    ((6, 2), (2, 0, 2), (3, 0))
    """
    found = list(counts)
    for rank in range(len(found)):
        if found[rank] != 1 or sum(found) == 1:
            continue
        most = max((each for each in range(len(found)) if each != rank), key=found.__getitem__)
        if found[most] >= 3:
            found[most] -= 1
            found[rank] = 2
        else:
            found[most] += 1
            found[rank] = 0
    return tuple(found)


class SampleBatches:
    """Global batches of equally many samples; a share is a number of samples.

    Args:
        num_samples: Number of samples of the data set.
        batch_size: Number of samples of a global batch.
        seed: Seed of the order.
        shuffle: Whether each epoch has its own order; otherwise it is that of the data set.
        drop_last: Whether to leave out samples at the end that do not fill a batch.

    Raises:
        BalanceError: there are no samples, or none in a batch.
    """

    unit = "samples"
    has_length = True

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        if num_samples < 1 or batch_size < 1:
            raise BalanceError(
                f"{num_samples} samples in batches of {batch_size}; both must be 1 or more."
            )
        if drop_last and num_samples < batch_size:
            raise BalanceError(
                f"drop_last leaves no step: {num_samples} samples are less than one global batch "
                f"of {batch_size}."
            )
        self._num_samples, self._batch_size = num_samples, batch_size
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._order: tuple[int, IndexArray] | None = None

    @property
    def units_per_batch(self) -> int:
        """Number of samples of a whole batch."""
        return self._batch_size

    def num_steps(self, epoch: int) -> int:
        """Number of global batches of an epoch; the same for all epochs."""
        whole, rest = divmod(self._num_samples, self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def order(self, epoch: int) -> IndexArray:
        """The samples of an epoch in order; the same on all ranks.  # [num_samples]"""
        return epoch_order(self._num_samples, self._seed, epoch, shuffle=self._shuffle)

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.order(epoch)
        begin = step * self._batch_size
        return self._order[1][begin : begin + self._batch_size]

    def cut(self, indices: IndexArray, shares: Sequence[int]) -> list[IndexArray]:
        """Cut into consecutive parts; a smaller batch is cut in the same proportion."""
        counts = (
            shares if len(indices) == sum(shares) else split_in_proportion(len(indices), shares)
        )
        return np.split(indices, np.cumsum(counts)[:-1])

    def units(self, indices: IndexArray) -> int:
        """Number of indices."""
        return len(indices)
