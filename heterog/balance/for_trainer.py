"""Hugging Face Trainer: ``BalancedTrainer`` instead of ``Trainer``.

    trainer = BalancedTrainer(model, arguments, train_dataset=dataset)
    trainer.train()

Each step has as many samples as the Trainer's own, its batch size on each rank, only dealt in
other shares. The update is that of a Trainer on one process with all of them: what the loss is a
mean of is measured on the first batch, see ``loss_probe``, and ranks are weighed by it. The loss
that is logged is the global batch's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from heterog.balance.balancer import Balancer
from heterog.balance.dealing import Deal
from heterog.balance.fixed_draws import undisturbed
from heterog.balance.for_trainer_arguments import check_trainer, loader_options, train_batches
from heterog.balance.label_means import MeanCounts
from heterog.balance.loader import BalancedLoader
from heterog.balance.loss_means import LossMean
from heterog.balance.loss_probe import UNCOUNTED, Batch, CountOf, Measurement, measure
from heterog.balance.sampler import ShareSampler
from heterog.runtime.accelerators import is_accelerated


class BalancedTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer whose ranks have shares of each batch.

    Args:
        arguments: Positional arguments of ``Trainer``.
        balance: Options of ``Balancer``, except ``batch_size``.
        loss_mean_over: What the loss is a mean over, where that cannot be measured: ``"samples"``;
            ``"labels"``, those that are not -100; ``"shifted_labels"``, all but the first of each
            sample; ``"num_items"``, if it is a sum that ``num_items_in_batch`` divides; or a
            function from a batch to the number of items.
        options: Keyword arguments of ``Trainer``.

    Raises:
        BalanceError: an argument asks for what a balanced job does not do; while training, it is
            unclear what the loss is a mean over.
    """

    def __init__(
        self,
        *arguments: Any,
        balance: Mapping[str, Any] | None = None,
        loss_mean_over: str | CountOf | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        check_trainer(self)
        self.balancer = Balancer(
            batch_size=self.args.train_batch_size * self.args.world_size, **(balance or {})
        )
        self._loss_mean = LossMean(self.balancer.group, self.label_names, loss_mean_over)
        self._fetched: deque[tuple[Deal, float]] = deque()
        self._iterator: Iterator[Any] | None = None
        self._num_fetched = 0
        self._is_first_step = True
        # Also weighs the loss of a subclass that computes its own.
        self._own_loss: Callable[..., Any] = self.compute_loss  # type: ignore[has-type]
        self._weight: float | None = None
        self._means = MeanCounts(self.balancer.group)
        self._num_samples = 0
        self.compute_loss = self._weighed_loss

    def get_train_dataloader(self) -> BalancedLoader:
        """A loader of this rank's shares."""
        batches, options = train_batches(self), loader_options(self)
        dataset = options.pop("dataset")
        loader = self.balancer.loader_type(
            dataset, self.balancer.sampler(batches), self.balancer, options
        )
        # The Trainer fetches all batches of an update before it runs the first: steps are
        # followed here instead.
        loader.follower = _Nobody()
        self.balancer.train_with(loader.share_sampler)
        if self.model is not None:
            self.balancer.watch_norms(self.model)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch the batches of an update, and find the weights of their losses."""
        sampler = self.balancer.share_sampler
        if epoch_iterator is not self._iterator:
            self._iterator, self._num_fetched = epoch_iterator, self._num_skipped()
        fetched, deals = [], []
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:
                break
            fetched.append(batch)
            deals.append(sampler.deal(self._num_fetched))
            self._num_fetched += 1
        has_data = [[samples > 0 for samples in deal.samples] for deal in deals]
        rank = self.balancer.group.rank
        counted = [
            batch if has[rank] else _uncounted(batch)
            for batch, has in zip(fetched, has_data, strict=True)
        ]
        with self.balancer.clock.waiting():  # these are exchanges
            num_items = self._get_num_items_in_batch(counted, device)
            measured = partial(self._measured, num_items)
            weights = self._loss_mean.weights(fetched, has_data, measured)
        self._fetched.extend(zip(deals, weights, strict=True))
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
        deal, self._weight = self._fetched.popleft()
        self._num_samples = deal.samples[self.balancer.group.rank]
        self.balancer.begin_step(deal)
        try:
            loss: Tensor = super().training_step(*arguments, **options)
        finally:
            self._weight = None
            self.balancer.release_norms()
        return loss

    def _weighed_loss(self, *arguments: Any, **options: Any) -> Any:
        """The loss, weighed while training."""
        if self._weight is None:
            return self._own_loss(*arguments, **options)
        with self._without_scale():
            found = self._own_loss(*arguments, **options)
        loss, *others = found if isinstance(found, tuple) else (found,)
        if (
            self._loss_mean.is_over_samples
        ):  # and not over padding, of which ranks have other parts
            self._means.check(loss, self._num_samples, 0, looks=True, part=False)
        # A mean over nothing is not a number, and does not count.
        weighed = loss * self._weight if self._weight else (loss * 0.0).nan_to_num()
        self.balancer.time_backward(weighed)
        return (weighed, *others) if isinstance(found, tuple) else weighed

    @contextmanager
    def _without_scale(self) -> Iterator[None]:
        """Keep the Trainer from multiplying losses by the number of ranks, as weights do it."""
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = True

    def _measured(
        self, num_items: Any, batch: Batch, *arguments: Any, masked: bool, training: bool
    ) -> Measurement:
        """Measure the loss on a batch, without a trace."""
        model = _unwrapped(self.model_wrapped)

        def loss_of(inputs: Batch, factor: float) -> float:
            items = None if num_items is None else num_items * factor
            with self.compute_loss_context_manager():
                loss = self._own_loss(model, dict(inputs), num_items_in_batch=items)
            return float(loss)

        batch = self._prepare_inputs(dict(batch))
        with undisturbed(model, training=training), self._without_scale():
            return measure(
                loss_of,
                batch,
                *arguments,
                has_items=num_items is not None,
                masked=masked,
                tolerance=self._tolerance(model),
            )

    def _tolerance(self, model: nn.Module) -> float:
        """Relative difference that rounding makes in losses of the same samples."""
        parameters = list(model.parameters())
        if self.args.fp16 or self.args.bf16 or any(each.itemsize < 4 for each in parameters):
            return 2e-2
        return 1e-3 if any(map(is_accelerated, parameters)) else 1e-5  # TF32 has 10 bits

    def _num_skipped(self) -> int:
        """Number of batches that a resumed Trainer skips at the start of its first epoch."""
        if self.args.ignore_data_skip:
            return 0
        per_update = self.args.gradient_accumulation_steps
        num_updates = -(-self.balancer.share_sampler.num_steps // per_update)
        skipped: int = (self.state.global_step % num_updates) * per_update
        return skipped


def _unwrapped(model: Any) -> Any:
    """The model that ranks run on their own, without DistributedDataParallel or a compiler."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _uncounted(batch: Any) -> Any:
    """A copy of a batch whose labels do not count, for a rank without data."""
    labels = {
        name: torch.full_like(batch[name], UNCOUNTED)
        for name in ("labels", "shift_labels")
        if isinstance(batch.get(name), Tensor)
    }
    return {**batch, **labels}


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
