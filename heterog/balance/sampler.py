"""The batch sampler that deals each global batch among the ranks in shares, and its loader.

``BalancedLoader`` tells its balancer in which step the loop is.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from heterog.balance.shares import (
    BalanceError,
    Deal,
    GlobalBatches,
    IndexArray,
    check_shares,
    length_of,
    without_singles,
)
from heterog.balance.streams import StreamBatches
from heterog.strategy.division import split_evenly, split_in_proportion

STATE_VERSION = 1


class ShareSampler(Sampler[list[int]]):
    """Yields this rank's indices of every global batch, as ``DataLoader(batch_sampler=...)`` asks.

    All ranks have the same number of steps, and every sample is dealt exactly once in an epoch. If
    this rank has no samples in a step, it yields one index of another rank, because a loop cannot
    run on nothing and collectives need every rank. ``deal(step).samples`` is 0 there, and a
    ``Balancer`` weighs that sample with 0.

    Call ``set_epoch`` before each epoch, as with PyTorch's ``DistributedSampler``.

    Args:
        batches: Global batches, ``SampleBatches`` or ``TokenBatches``.
        rank: Rank of this process.
        num_ranks: Number of ranks of the job.
        shares: Units of each rank in a whole batch; by default equal ones.

    Attributes:
        least: Least number of samples that a rank runs, from the next pass on. With 2, for
            BatchNorm, no rank is dealt exactly one sample where that is possible.
        dataset: Data set of the loader that was made with this sampler.
        epoch: Number of the epoch that the current iteration deals, or else the next one.
        start: Step at which the next iteration begins; 0 unless a state was loaded.
        num_drawn: Number of dealt steps of this epoch; a loader with workers is ahead of its loop.

    Raises:
        BalanceError: the shares do not fit the ranks or the batch.
    """

    dealt_as: ClassVar[tuple[int, ...] | None] = None
    """Shares of all samplers instead of their own, in any unit; set by ``heterog check``."""

    def __init__(
        self,
        batches: GlobalBatches,
        *,
        rank: int,
        num_ranks: int,
        shares: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise BalanceError(f"rank {rank} does not exist among {num_ranks} ranks.")
        self._batches, self._rank, self._num_ranks = batches, rank, num_ranks
        total = batches.units_per_batch
        given = split_evenly(total, num_ranks) if shares is None else tuple(shares)
        # (first step, shares) for each change of shares in this epoch.
        self._in_force = [(0, check_shares(given, num_ranks, total))]
        self.least = self._least = 1
        self.dataset: Dataset[Any] | None = None
        self.epoch = self.start = self.num_drawn = 0
        self._begun: int | None = None

    @property
    def stream(self) -> StreamBatches | None:
        """The batches, if they are those of a stream."""
        return self._batches if isinstance(self._batches, StreamBatches) else None

    @property
    def unit(self) -> str:
        """Unit of shares, in words."""
        return self._batches.unit

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole epoch."""
        return self.steps_of(self.epoch)

    def steps_of(self, epoch: int) -> int:
        """Number of steps of an epoch."""
        return self._batches.num_steps(epoch)

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares set last."""
        if self.dealt_as is not None:
            return split_in_proportion(self._batches.units_per_batch, self.dealt_as)
        return self._in_force[-1][1]

    def set_epoch(self, epoch: int) -> None:
        """Deal this epoch next, from the position of a loaded state if that is in its middle."""
        if epoch != self.epoch or self._begun is not None:
            self.epoch, self.start, self.num_drawn = epoch, 0, 0
            self._begun = None
            self._in_force = [(0, self.shares)]

    def begin_pass(self) -> None:
        """Go on to the next epoch if a loop was left in the middle of this one."""
        if self.is_inside:
            self.set_epoch(self.epoch + 1)

    def begin_step(self, deal: Deal) -> None:
        """Note that a loop runs this step; a loader with workers has drawn further steps."""
        if deal.epoch == self.epoch:
            self._begun = deal.step

    def start_at(self, step: int) -> None:
        """Begin the next pass with this step of its epoch."""
        self.begin_pass()
        self.start = self.num_drawn = step

    @property
    def is_inside(self) -> bool:
        """Whether a loop has begun this epoch and not ended it."""
        return self._begun is not None

    @property
    def num_done(self) -> int:
        """Number of steps of this epoch that a loop has run, including the one that it is in."""
        return self.start if self._begun is None else self._begun + 1

    def set_shares(self, shares: Sequence[int], *, from_step: int | None = None) -> None:
        """Deal in other shares from a step on, which must be the same on all ranks.

        Args:
            shares: Units of each rank in a whole batch.
            from_step: Step of this epoch; by default the next one that is drawn. If the epoch ends
                before, the next epoch begins with the new shares.

        Raises:
            BalanceError: the shares do not fit, or the step has been dealt already.
        """
        begin = self.num_drawn if from_step is None else from_step
        if begin < self.num_drawn:
            raise BalanceError(
                f"new shares from step {begin} on come too late: {self.num_drawn} steps are dealt."
            )
        checked = check_shares(shares, self._num_ranks, self._batches.units_per_batch)
        self._in_force.append((begin, checked))

    def deal(self, step: int) -> Deal:
        """The batch of a step of the current epoch, as dealt to the ranks."""
        indices = self._batches.batch(self.epoch, step)
        parts = self._cut(indices, step)
        return Deal(
            epoch=self.epoch,
            step=step,
            samples=tuple(len(part) for part in parts),
            units=tuple(self._batches.units(part) for part in parts),
            ran=tuple(self._batches.units(self._ran(part, indices)) for part in parts),
        )

    def _cut(self, indices: IndexArray, step: int) -> list[IndexArray]:
        shares = self.dealt_as or next(
            shares for begin, shares in reversed(self._in_force) if begin <= step
        )
        parts = self._batches.cut(indices, shares)
        if self._least > 1 and any(len(part) == 1 for part in parts):
            counts = without_singles([len(part) for part in parts])
            parts = np.split(np.concatenate(parts), np.cumsum(counts)[:-1])
        return parts

    def _ran(self, part: IndexArray, indices: IndexArray) -> IndexArray:
        """Indices that a rank runs if this is its part of a batch: never none."""
        return part if len(part) else indices[: self._least]

    def __iter__(self) -> Iterator[list[int]]:
        # Repeated calls must have the same result: loaders with workers ask for an iterator
        # twice and use the last.
        self.num_drawn, self._least = self.start, self.least
        self._in_force = [(0, self.shares)]
        return self._dealt(self.epoch, self.start)

    def _dealt(self, epoch: int, begin: int) -> Iterator[list[int]]:
        self.start = 0
        step = begin
        while step < self._batches.num_steps(epoch):  # a stream's is known when it is read
            self.num_drawn = step + 1
            indices = self._batches.batch(epoch, step)
            yield self._ran(self._cut(indices, step)[self._rank], indices).tolist()
            step += 1

    def __len__(self) -> int:
        """Number of steps of the whole epoch, also where the next pass begins in its middle."""
        return length_of(self._batches, self.epoch)

    def state_dict(self, num_done: int | None = None) -> dict[str, Any]:
        """Position in the epoch, and the shares; ``load_state_dict`` resumes from it.

        Args:
            num_done: Number of steps of this epoch done; by default the number drawn, which is
                larger with workers in the loader.
        """
        done = self.num_drawn if num_done is None else num_done
        epoch = self.epoch
        if done >= self._batches.num_steps(epoch):
            epoch, done = epoch + 1, 0
        stream = self.stream
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "num_done": done,
            "units_per_batch": self._batches.units_per_batch,
            "shares": list(self.shares),
            "next": self.first_samples(epoch, done),
            **({} if stream is None else stream.after(epoch, done)),
        }

    def first_samples(self, epoch: int, step: int) -> list[int]:
        """A few indices of a batch, by which a state recognizes its data and their order."""
        if step >= self._batches.num_steps(epoch):
            return []
        return [int(index) for index in self._batches.batch(epoch, step)[:8]]

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether a state is of this data in this order: its next batch is the same here."""
        if state["units_per_batch"] != self._batches.units_per_batch:
            return False
        if ("stream" in state) != (self.stream is not None):
            return False
        now = self.first_samples(int(state["epoch"]), int(state["num_done"]))
        return bool(state.get("next", now) == now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume in the middle of an epoch; with the saved shares if there are as many ranks.

        With another number of ranks the shares of this sampler stay.

        Raises:
            BalanceError: the state has another version or another global batch, or it is in the
                middle of an epoch whose samples have another order here.
        """
        total = self._batches.units_per_batch
        if state["version"] != STATE_VERSION:
            raise BalanceError(
                f"the sampler's state has version {state['version']}; this is {STATE_VERSION}."
            )
        if state["units_per_batch"] != total:
            raise BalanceError(
                f"the state is of a global batch of {state['units_per_batch']}, this sampler's is "
                f"{total}: its steps have other samples. Use the same batch, or begin an epoch."
            )
        if state["num_done"] and not self.fits(state):
            raise BalanceError(
                f"the state is after {state['num_done']} steps of epoch {state['epoch']}, and the "
                "rest of that epoch has other samples here: the data, seed, shuffle or drop_last "
                "differ. Make the loader as it was, or begin an epoch without the state."
            )
        saved = state["shares"]
        shares = (
            self.shares if len(saved) != self._num_ranks else split_in_proportion(total, saved)
        )
        self._in_force = [(0, shares)]
        self.epoch, self._begun = int(state["epoch"]), None
        self.start = self.num_drawn = int(state["num_done"])
        if self.stream is not None:
            mark = state.get("stream_next")
            self.stream.load(state.get("stream"), self.epoch, self.start, mark)


_DEALT = {
    "batch_size": "the batch of all ranks together is Balancer(global_batch_size=...)",
    "sampler": "the balancer deals all samples of the data set; give it the samples to deal, in "
    "the order to keep with shuffle=False (torch.utils.data.Subset)",
    "batch_sampler": "the balancer deals the batches itself, by Balancer(global_batch_size=...)",
}


class Follower:
    """Notified of the steps of loops, and ignores them; each call names the loop's sampler."""

    def begin_pass(self, sampler: ShareSampler) -> None:
        """Called before the loop gets its first batch."""

    def begin_step(self, deal: Deal, sampler: ShareSampler) -> None:
        """Called when the loop gets the batch of this deal."""

    def end_step(self, sampler: ShareSampler) -> None:
        """Called when the loop asks for the next batch."""

    def end_pass(self, sampler: ShareSampler) -> None:
        """Called after the last batch, or when the loop was left."""


class BalancedLoader(DataLoader[Any]):
    """Loads this rank's batches; every pass is the next epoch, also after a ``break``.

    A loader with workers draws indices steps ahead, so only the loader knows which step a batch
    belongs to. ``len`` is the number of steps of a whole epoch.

    Args:
        dataset: Data set with ``__len__`` and ``__getitem__``, or a stream.
        shares: Sampler of the batches.
        follower: Object notified of the steps; the balancer.
        options: Keyword arguments of ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        shares: ShareSampler,
        follower: Follower,
        options: dict[str, Any],
    ) -> None:
        self.share_sampler = shares
        shares.dataset = dataset
        self.follower = follower
        self._pass: object = None
        if shares.stream is None:
            super().__init__(dataset, batch_sampler=shares, **options)
        else:  # samples one by one; this class makes batches of them
            self._collate = options.get("collate_fn") or default_collate
            super().__init__(dataset, **{**options, "batch_size": None, "collate_fn": _as_it_is})

    def __len__(self) -> int:
        return len(self.share_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch; a loop need not call it."""
        self.share_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._followed()

    def _followed(self) -> Iterator[Any]:
        """A pass; it begins with its first batch, as frameworks make iterators and drop them."""
        sampler, follower = self.share_sampler, self.follower
        sampler.begin_pass()
        epoch, begin = sampler.epoch, sampler.start
        follower.begin_pass(sampler)
        self._pass = this_pass = object()
        try:
            for step, batch in enumerate(self._own_batches(), begin):
                follower.begin_step(sampler.deal(step), sampler)
                yield batch
                if self._pass is not this_pass:
                    raise BalanceError(
                        "a loop goes on although another pass of its loader has begun since. Make "
                        "a loader for each: balancer.loader(dataset)."
                    )
                follower.end_step(sampler)
            sampler.set_epoch(epoch + 1)
        finally:
            if self._pass is this_pass:
                follower.end_pass(sampler)

    def _own_batches(self) -> Iterator[Any]:
        """This rank's part of every global batch."""
        sampler, stream = self.share_sampler, self.share_sampler.stream
        if stream is None:
            yield from super().__iter__()
            return
        epoch, step, is_here = sampler.epoch, sampler.start, self.num_workers == 0
        skipped = stream.begin_pass(epoch, step, is_here=is_here)
        samples = islice(super().__iter__(), skipped, None)
        places = iter(sampler)
        for batch in stream.read(samples, epoch, step, num_workers=self.num_workers):
            begin = int(stream.batch(epoch, step)[0])
            yield self._collate([batch[place - begin] for place in next(places)])
            step += 1


def _as_it_is(sample: Any) -> Any:
    return sample


def check_data(dataset: object, options: Mapping[str, object]) -> None:
    """Check a data set and options of its loader.

    Raises:
        BalanceError: batches would be made by something else than the balancer.
    """
    if isinstance(dataset, DataLoader):
        raise BalanceError(
            "loader() got a DataLoader, which makes equal batches: give it the data set, and "
            "options such as num_workers and collate_fn beside it."
        )
    for name, reason in _DEALT.items():
        if name in options:
            raise BalanceError(f"loader() takes no {name}: {reason}.")
