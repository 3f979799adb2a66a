"""Hugging Face Trainer: ``BalancedTrainer`` instead of ``Trainer``.

    trainer = BalancedTrainer(model, arguments, train_dataset=dataset)
    trainer.train()

Each step has as many samples as the Trainer's own, its batch size on each rank,
only dealt in other shares. Where the Trainer divides by the number of labels that count
(``num_items_in_batch``) it is exact already, and a rank without data gets labels that count
nothing; elsewhere the loss is weighed by samples. The loss that is logged is the global batch's.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from heterog.balance.balancer import Balancer
from heterog.balance.dealing import Deal
from heterog.balance.loader import BalancedLoader
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError

UNCOUNTED = -100
"""The label that losses of Transformers ignore."""


class BalancedTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer whose ranks have shares of each batch.

    Args:
        arguments: Positional arguments of ``Trainer``.
        balance: Options of ``Balancer``, except ``batch_size``.
        options: Keyword arguments of ``Trainer``.

    Raises:
        BalanceError: ``average_tokens_across_devices`` is off, so that each rank would have a mean
            of its own.
    """

    def __init__(
        self, *arguments: Any, balance: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        if not self.args.average_tokens_across_devices:
            raise BalanceError(
                "average_tokens_across_devices=False makes every rank count alike, however much "
                "data it has. Leave it on for a balanced job."
            )
        self.balancer = Balancer(
            batch_size=self.args.train_batch_size * self.args.world_size, **(balance or {})
        )
        self._fetched: deque[Deal] = deque()
        self._iterator: Iterator[Any] | None = None
        self._num_fetched = 0
        self._is_first_step = True

    def get_train_dataloader(self) -> BalancedLoader:
        """A loader of this rank's shares."""
        dataset = self.train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            raise BalanceError("a balanced job needs a train_dataset with a length.")
        loader = self.balancer.loader(
            dataset,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.accelerator.is_available(),
        )
        # The Trainer fetches all batches of an update before it runs the first: steps are
        # followed here instead.
        loader.follower = _Nobody()
        self.balancer.train_with(loader.share_sampler)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch the batches of an update, and note the steps that they belong to."""
        sampler = self.balancer.share_sampler
        if epoch_iterator is not self._iterator:
            self._iterator, self._num_fetched = epoch_iterator, self._num_skipped()
        fetched = []
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:
                break
            deal = sampler.deal(self._num_fetched)
            self._num_fetched += 1
            self._fetched.append(deal)
            has_data = deal.samples[self.balancer.group.rank] > 0
            fetched.append(batch if has_data else self._uncounted(batch))
        with self.balancer.clock.waiting():  # the count of labels is an all-reduce
            num_items = self._get_num_items_in_batch(fetched, device)
        return fetched, num_items

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Run the forward and backward pass of one batch."""
        if self.balancer.model is None:
            self.balancer.watch(self.model_wrapped)
        if self._is_first_step:
            self.balancer.begin_pass()
            self._is_first_step = False
        else:
            self.balancer.end_step()  # includes the optimizer's step, which has run since
        self.balancer.begin_step(self._fetched.popleft())
        loss: Tensor = super().training_step(*arguments, **options)
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss, weighed while training."""
        found = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss, outputs = found
        if model.training:
            if num_items_in_batch is None:
                loss = self.balancer.weigh(loss)
            else:
                self.balancer.time_backward(loss)
        return (loss, outputs) if return_outputs else loss

    def _uncounted(self, batch: Any) -> Any:
        """A copy of a batch whose labels do not count, for a rank without data."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not counts or "labels" not in batch:
            return batch
        return {**batch, "labels": torch.full_like(batch["labels"], UNCOUNTED)}

    def _num_skipped(self) -> int:
        """Number of batches that a resumed Trainer skips at the start of its first epoch."""
        if self.args.ignore_data_skip:
            return 0
        per_update = self.args.gradient_accumulation_steps
        num_updates = -(-self.balancer.share_sampler.num_steps // per_update)
        skipped: int = (self.state.global_step % num_updates) * per_update
        return skipped


class _Nobody:
    """A follower that ignores all steps."""

    def begin_pass(self, sampler: ShareSampler) -> None:
        """Do nothing."""

    def begin_step(self, deal: Deal, sampler: ShareSampler) -> None:
        """Do nothing."""

    def end_step(self, sampler: ShareSampler) -> None:
        """Do nothing."""

    def end_pass(self, sampler: ShareSampler) -> None:
        """Do nothing."""
