"""Checks of what a loop gives a balancer: mistakes of a first try, each told in one line."""

from collections.abc import Mapping

from torch.utils.data import DataLoader

from heterog.balance.shares import BalanceError

_DEALT = {
    "batch_size": "the batch of all ranks together is Balancer(batch_size=...)",
    "sampler": "the balancer deals all samples of the data set; give it the samples to deal, in "
    "the order to keep with shuffle=False (torch.utils.data.Subset)",
    "batch_sampler": "the balancer deals the batches itself, by Balancer(batch_size=...)",
}


def check_arguments(batch_size: object, writer: object) -> None:
    """Check arguments of ``Balancer``.

    Raises:
        BalanceError: one of them is of a wrong kind.
    """
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__"):
        raise BalanceError(
            f"batch_size={batch_size!r}: give a whole number, the samples of all ranks together."
        )
    if writer is not None and not hasattr(writer, "add_scalar"):
        raise BalanceError(
            f"writer={writer!r} has no add_scalar: give a TensorBoard SummaryWriter, such as "
            "torch.utils.tensorboard.SummaryWriter('runs')."
        )


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
