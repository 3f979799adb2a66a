"""A ``DataLoader`` that tells its balancer which step the loop is in."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from heterog.balance.dealing import Deal
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError

_DEALT = {
    "batch_size": "the batch of all ranks together is Balancer(batch_size=...)",
    "sampler": "the balancer deals all samples of the data set; give it the samples to deal, in "
    "the order to keep with shuffle=False (torch.utils.data.Subset)",
    "batch_sampler": "the balancer deals the batches itself, by Balancer(batch_size=...)",
}


class Follower(Protocol):
    """An object that is notified of the steps of loops; each call names the loop's sampler."""

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
        dataset: Data set with ``__len__`` and ``__getitem__``.
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
        self.follower = follower
        self._pass: object = None
        super().__init__(dataset, batch_sampler=shares, **options)

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch; a loop need not call it."""
        self.share_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._followed()

    def _followed(self) -> Iterator[Any]:
        """A pass, from its first batch on: frameworks make iterators that they never use."""
        sampler, follower = self.share_sampler, self.follower
        sampler.begin_pass()
        epoch, begin = sampler.epoch, sampler.start
        follower.begin_pass(sampler)
        self._pass = this_pass = object()
        try:
            for step, batch in enumerate(super().__iter__(), begin):
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
