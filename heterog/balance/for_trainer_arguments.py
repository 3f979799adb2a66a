"""What a Trainer's arguments say about its data: obeyed where a balanced job can, else refused."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from transformers.trainer_utils import seed_worker

from heterog.balance.dealing import GlobalBatches, IndexArray, SampleBatches
from heterog.balance.shares import BalanceError


def check_trainer(trainer: Any) -> None:
    """Check what a Trainer is asked for.

    Raises:
        BalanceError: something would be ignored, or make other updates.
    """
    arguments = trainer.args
    if not arguments.average_tokens_across_devices:
        raise BalanceError(
            "average_tokens_across_devices=False makes every rank count alike, however much "
            "data it has. Leave it on for a balanced job."
        )
    refused = {
        "deepspeed": "it averages gradients itself",
        "parallelism_config": "its ranks share samples",
        "auto_find_batch_size": "the balancer deals a batch of fixed size; fits= says what a "
        "rank can hold",
    }
    for name, reason in refused.items():
        if getattr(arguments, name, None):
            raise BalanceError(f"a BalancedTrainer takes no {name}: {reason}. Leave it out.")
    if arguments.n_gpu > 1:
        raise BalanceError(
            f"this process has {arguments.n_gpu} GPUs, which a Trainer gives equal parts: start "
            "one process for each (torchrun --nproc-per-node), as a BalancedTrainer needs."
        )
    how = arguments.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(how, name, None):
            raise BalanceError(
                f"accelerator_config has {name}=True, by which ranks get equal parts of a batch; "
                "a BalancedTrainer deals itself. Leave it out."
            )


def train_batches(trainer: Any) -> GlobalBatches:
    """The global batches, in the order that the Trainer's own sampler asks for.

    Raises:
        BalanceError: there is no data set with a length, or the order is not known here.
    """
    arguments, dataset = trainer.args, trainer.train_dataset
    if dataset is None or not hasattr(dataset, "__len__"):
        raise BalanceError("a balanced job needs a train_dataset with a length.")
    size = trainer.balancer.batch_size
    if size != trainer._train_batch_size * arguments.world_size:
        raise BalanceError(
            f"the Trainer's batch is {trainer._train_batch_size} samples on each of "
            f"{arguments.world_size} ranks now, and the balancer deals {size}: make a new "
            "BalancedTrainer for another batch size."
        )
    order: dict[str, Any] = {
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
        "drop_last": arguments.dataloader_drop_last,
    }
    sampler = trainer._get_train_sampler(dataset)
    if isinstance(sampler, LengthGroupedSampler):
        group = size * arguments.gradient_accumulation_steps
        return LengthGroupedBatches(sampler.lengths, size, group, **order)
    if type(sampler) in (RandomSampler, SequentialSampler):
        shuffle = isinstance(sampler, RandomSampler)
        return SampleBatches(len(dataset), size, shuffle=shuffle, **order)
    strategy = getattr(arguments, "train_sampling_strategy", None)
    raise BalanceError(
        f"the Trainer's sampler is a {type(sampler).__name__} (train_sampling_strategy="
        f"{strategy!r}), and a BalancedTrainer deals in the orders random, sequential and "
        "group_by_length only. Choose one of these."
    )


def loader_options(trainer: Any) -> dict[str, Any]:
    """Arguments of the loader, as the Trainer gives them to its own."""
    arguments, dataset, collate = trainer.args, trainer.train_dataset, trainer.data_collator
    if hasattr(dataset, "column_names"):  # of the library ``datasets``
        dataset = trainer._remove_unused_columns(dataset, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    num_workers = arguments.dataloader_num_workers
    names = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order")
    given = {name: getattr(arguments, f"dataloader_{name}", None) for name in names}
    return {
        "dataset": dataset,
        "collate_fn": collate,
        "num_workers": num_workers,
        "pin_memory": arguments.dataloader_pin_memory and torch.accelerator.is_available(),
        "worker_init_fn": partial(
            seed_worker, num_workers=num_workers, rank=arguments.process_index
        ),
        **{name: value for name, value in given.items() if value is not None},
    }


class LengthGroupedBatches(SampleBatches):
    """Global batches of samples of about equal lengths, grouped as the Trainer groups them.

    Args:
        lengths: Length of every sample.
        batch_size: Number of samples of a global batch.
        group_size: Number of samples of an update.
        seed: Seed of the order.
        drop_last: Whether to leave out samples at the end that do not fill a batch.
    """

    def __init__(
        self, lengths: list[int], batch_size: int, group_size: int, *, seed: int, drop_last: bool
    ) -> None:
        super().__init__(len(lengths), batch_size, seed=seed, shuffle=True, drop_last=drop_last)
        self._lengths, self._group_size, self._batch = lengths, group_size, batch_size
        self._grouped_seed = seed
        self._grouped: tuple[int, IndexArray] | None = None

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Indices of a global batch.  # [num_samples]"""
        if self._grouped is None or self._grouped[0] != epoch:
            random = torch.Generator().manual_seed(self._grouped_seed + epoch)
            order = get_length_grouped_indices(self._lengths, self._group_size, generator=random)
            self._grouped = epoch, np.array(order, np.int64)
        begin = step * self._batch
        return self._grouped[1][begin : begin + self._batch]
