"""A ``DataLoader`` that tells its balancer which step the loop is in."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from heterog.balance.dealing import Deal
from heterog.balance.sampler import ShareSampler


class Follower(Protocol):
    """An object that is notified of the steps of a loop."""

    def begin_pass(self) -> None:
        """Called when the loop begins, or goes on after something else."""

    def begin_step(self, deal: Deal) -> None:
        """Called when the loop gets the batch of this deal."""

    def end_step(self) -> None:
        """Called when the loop asks for the next batch."""


class BalancedLoader(DataLoader[Any]):
    """Loads this rank's batches; every pass is the next epoch.

    A loader with workers draws indices steps ahead, so only the loader knows which step a batch
    belongs to.

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
        super().__init__(dataset, batch_sampler=shares, **options)

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch; a loop need not call it."""
        self.share_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch, begin = self.share_sampler.epoch, self.share_sampler.start
        return self._followed(epoch, begin, super().__iter__())

    def _followed(self, epoch: int, begin: int, batches: Iterator[Any]) -> Iterator[Any]:
        self.follower.begin_pass()
        for step, batch in enumerate(batches, begin):
            self.follower.begin_step(self.share_sampler.deal(step))
            yield batch
            self.follower.end_step()
        self.share_sampler.set_epoch(epoch + 1)
