"""Hugging Face Trainer: ``BalancedTrainer`` instead of ``Trainer``.

    trainer = BalancedTrainer(model, arguments, train_dataset=dataset)
    trainer.train()

Each step has as many samples as with a plain Trainer (its batch size times the ranks), dealt in
other shares. The update is that of a Trainer on one process with all samples: ``loss_probe``
measures on the first batch what the loss is a mean of, and ranks are weighed by it. The logged
loss is that of the global batch.

A Trainer's arguments about its data are obeyed or refused, never ignored.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from transformers.trainer_utils import seed_worker

from heterog.balance.balancer import Balancer
from heterog.balance.label_means import MeanCounts
from heterog.balance.loss_means import LossMean
from heterog.balance.loss_probe import UNCOUNTED, Batch, CountOf, Measurement, measure, undisturbed
from heterog.balance.sampler import BalancedLoader, Follower
from heterog.balance.shares import BalanceError, Deal, GlobalBatches, IndexArray, SampleBatches
from heterog.balance.streams import StreamBatches, check_stream
from heterog.balance.tokens import TokenBatches
from heterog.errors import HeterogWarning
from heterog.runtime.accelerators import is_accelerated

POSITION_FILE = "balancer.pt"
"""File in a checkpoint's folder with the position in a stream."""


def check_trainer(trainer: Any) -> None:
    """Check the arguments of a Trainer.

    Raises:
        BalanceError: one would be ignored, or would change updates.
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
    if arguments.neftune_noise_alpha is not None and arguments.process_index == 0:
        warnings.warn(
            f"neftune_noise_alpha={arguments.neftune_noise_alpha}: each rank draws the noise of "
            "its own samples, as it draws dropout. The run is that of one process on average, "
            "not number for number.",
            HeterogWarning,
            stacklevel=3,
        )


def train_batches(trainer: Any) -> GlobalBatches:
    """The global batches, in the order that the Trainer's own sampler asks for.

    Raises:
        BalanceError: there is no data set with a length and no stream, or the order is not known
            here.
    """
    arguments, dataset = trainer.args, trainer.train_dataset
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and (dataset is None or not hasattr(dataset, "__len__")):
        raise BalanceError(
            "a balanced job needs a train_dataset with a length, or an IterableDataset."
        )
    size, lengths = trainer.balancer.global_batch_size, trainer.token_options.get("lengths")
    if lengths is None and size != trainer._train_batch_size * arguments.world_size:
        raise BalanceError(
            f"the Trainer's batch is {trainer._train_batch_size} samples on each of "
            f"{arguments.world_size} ranks now, and the balancer deals {size}: make a new "
            "BalancedTrainer for another batch size."
        )
    if is_stream:
        check_stream(dataset, shuffle=None, lengths=lengths)
        drop_last, group = arguments.dataloader_drop_last, trainer.balancer.group
        return StreamBatches(dataset, size, drop_last=drop_last, group=group)
    order: dict[str, Any] = {
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
        "drop_last": arguments.dataloader_drop_last,
    }
    sampler = trainer._get_train_sampler(dataset)
    if lengths is not None and type(sampler) in (RandomSampler, SequentialSampler):
        shuffle = isinstance(sampler, RandomSampler)
        return TokenBatches(budget=size, shuffle=shuffle, **trainer.token_options, **order)
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
        self._lengths, self._group_size = lengths, group_size

    def order(self, epoch: int) -> IndexArray:
        """The samples of an epoch in order.  # [num_samples]"""
        random = torch.Generator().manual_seed(self._seed + epoch)
        order = get_length_grouped_indices(self._lengths, self._group_size, generator=random)
        return np.array(order, np.int64)


class BalancedTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer whose ranks have shares of each batch.

    Args:
        arguments: Positional arguments of ``Trainer``.
        balance: Options of ``Balancer``; ``global_batch_size`` only with ``lengths``, else it
            follows from the arguments.
        loader: Options of ``Balancer.loader`` for batches of tokens: ``lengths``, ``cost`` and
            ``padded``.
        loss_mean_over: What the loss is a mean over, where that cannot be measured: ``"samples"``;
            ``"labels"``, those that are not -100; ``"shifted_labels"``, all but the first of each
            sample; ``"num_items"``, if it is a sum that ``num_items_in_batch`` divides; or a
            function from a batch to the number of items.
        options: Keyword arguments of ``Trainer``.

    Raises:
        BalanceError: a balanced job cannot do what an argument asks for; or, while training, it
            is unclear what the loss is a mean over.
    """

    def __init__(
        self,
        *arguments: Any,
        balance: Mapping[str, Any] | None = None,
        loader: Mapping[str, Any] | None = None,
        loss_mean_over: str | CountOf | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        check_trainer(self)
        self.token_options = _checked_loader(loader or {}, balance or {})
        usual = {"global_batch_size": self.args.train_batch_size * self.args.world_size}
        self.balancer = Balancer(**{**usual, **(balance or {})})
        self._loss_mean = LossMean(self.balancer.group, self.label_names, loss_mean_over)
        self._fetched: deque[tuple[Deal, float]] = deque()
        self._iterator: Iterator[Any] | None = None
        self._num_fetched = self._num_skipped = 0
        self._resumed: dict[str, Any] = {}
        self._is_first_step = True
        # Kept by name, so that a subclass's own loss is weighed and its own step followed, too.
        self._own_loss: Callable[..., Any] = self.compute_loss  # type: ignore[has-type]
        self._own_step: Callable[..., Tensor] = self.training_step  # type: ignore[has-type]
        self._weight: float | None = None
        self._means = MeanCounts(self.balancer.group)
        self._num_samples = 0
        self._is_weighed = False
        self.compute_loss = self._weighed_loss
        self.training_step = self._balanced_step

    def get_train_dataloader(self) -> BalancedLoader:
        """A loader of this rank's shares."""
        batches, options = train_batches(self), loader_options(self)
        dataset = options.pop("dataset")
        loader = self.balancer.loader_type(
            dataset, self.balancer.sampler(batches), self.balancer, options
        )
        # The Trainer fetches all batches of an update before it runs the first, so this class
        # follows the steps itself.
        loader.follower = Follower()
        self.balancer.train_with(loader.share_sampler)
        if self.model is not None:
            self.balancer.watch_norms(self.model)
        return loader

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the position in a stream beside the random numbers."""
        super()._save_rng_state(output_dir)
        sampler = self.balancer.share_sampler
        if sampler.stream is not None and self.args.should_save:
            torch.save(sampler.state_dict(self._num_fetched), Path(output_dir, POSITION_FILE))

    def _init_training_state(
        self, max_steps: int, num_update_steps: int, num_epochs: int, resumed: Any, trial: Any
    ) -> tuple[int, int]:
        """The epoch and batch at which a run resumes, also if epochs differ in length."""
        epoch, skipped = super()._init_training_state(
            max_steps, num_update_steps, num_epochs, resumed, trial
        )
        sampler, self._resumed = self.balancer.share_sampler, {}
        per_update = self.args.gradient_accumulation_steps
        if resumed is None:
            return epoch, skipped
        if self.token_options:
            epoch, left = 0, self.state.global_step
            while left >= (updates := -(-sampler.steps_of(epoch) // per_update)):
                epoch, left = epoch + 1, left - updates
            skipped = left * per_update
        elif sampler.stream is not None and (file := Path(resumed, POSITION_FILE)).is_file():
            self._resumed = torch.load(file, weights_only=True)
            epoch, skipped = self._resumed["epoch"], self._resumed["num_done"]
        return epoch, 0 if self.args.ignore_data_skip else skipped

    def _run_epoch(self, **options: Any) -> None:
        """Run an epoch; with batches of tokens, epochs may differ by a few batches.

        Raises:
            BalanceError: the data are not the balancer's.
        """
        if not isinstance(options["train_dataloader"], BalancedLoader):
            raise BalanceError(
                f"{type(self).__name__}.get_train_dataloader returns batches that are not dealt "
                "in shares. Leave it out, and give train_dataset, data_collator and arguments."
            )
        sampler = options["train_dataloader"].share_sampler
        per_update = self.args.gradient_accumulation_steps
        is_resumed = (
            options["resume_from_checkpoint"] is not None
            and options["epoch"] == options["epochs_trained"]
        )
        self._num_skipped = options["steps_trained_in_current_epoch"] if is_resumed else 0
        if self.token_options:
            sampler.set_epoch(options["epoch"])
            options["steps_in_epoch"] = sampler.num_steps
            options["num_update_steps_per_epoch"] = -(-sampler.num_steps // per_update)
        if sampler.stream is not None and self._num_skipped:
            if self._resumed:
                sampler.load_state_dict(self._resumed)
            else:
                sampler.start_at(self._num_skipped)
            options["steps_trained_in_current_epoch"] = 0  # the stream is already in its place
        super()._run_epoch(**options)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch the batches of an update, and find the weights of their losses."""
        sampler = self.balancer.share_sampler
        if epoch_iterator is not self._iterator:
            self._iterator, self._num_fetched = epoch_iterator, self._num_skipped
        fetched, deals = [], []
        for _ in range(num_batches):
            batch = next(epoch_iterator, None)
            if batch is None:  # a stream is over
                self._num_fetched = 0
                break
            fetched.append(batch)
            deals.append(sampler.deal(self._num_fetched))
            self._num_fetched += 1
        if not fetched:
            return [], None
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

    def _balanced_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Run the forward and backward pass of one batch.

        Raises:
            BalanceError: a subclass's step trains with a loss that is not weighed.
        """
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
        self._is_weighed = False
        try:
            loss = self._own_step(*arguments, **options)
        finally:
            self._weight = None
            self.balancer.release_norms()
        if not self._is_weighed:
            raise BalanceError(
                f"a training step of {type(self).__name__} took no loss from compute_loss, where "
                "it is weighed by the samples of each rank. Call self.compute_loss in a "
                "training_step of your own, and override compute_loss in a subclass."
            )
        return loss

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        """End a run; make the losses since the last log those of the global batch, too."""
        group = self.balancer.group
        every = group.gather([float(self._tr_loss)])
        self._tr_loss.fill_(sum(loss for (loss,) in every) / group.num_ranks)
        return super()._finalize_training(*arguments, **options)

    def _weighed_loss(self, *arguments: Any, **options: Any) -> Any:
        """The loss, weighed while training."""
        if self._weight is None:
            return self._own_loss(*arguments, **options)
        self._is_weighed = True
        with self._without_scale():
            found = self._own_loss(*arguments, **options)
        loss, *others = found if isinstance(found, tuple) else (found,)
        if (
            self._loss_mean.is_over_samples
        ):  # the check would refuse a mean over labels: ranks have unlike padding
            self._means.check(loss, self._num_samples, 0, looks=True)
        # A mean over no elements is nan; it must not count.
        weighed = loss * self._weight if self._weight else (loss * 0.0).nan_to_num()
        self.balancer.time_backward(weighed)
        return (weighed, *others) if isinstance(found, tuple) else weighed

    @contextmanager
    def _without_scale(self) -> Iterator[None]:
        """Keep the Trainer from multiplying losses by the number of ranks: the weights do it."""
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


def _checked_loader(loader: Mapping[str, Any], balance: Mapping[str, Any]) -> dict[str, Any]:
    """The options of batches of tokens.

    Raises:
        BalanceError: an option is unknown, or there is a budget of tokens without lengths.
    """
    unknown = set(loader) - {"lengths", "cost", "padded"}
    if unknown or ("lengths" not in loader and (loader or "global_batch_size" in balance)):
        raise BalanceError(
            f"loader={sorted(loader)}, balance={sorted(balance)}: give loader its lengths, and "
            "with them cost, padded and balance's global_batch_size in tokens; a Trainer's "
            "arguments say all else of its data."
        )
    return dict(loader)


def _unwrapped(model: Any) -> Any:
    """The model without DistributedDataParallel and compiler, as a rank can run it alone."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def _uncounted(batch: Any) -> Any:
    """A copy of a batch whose labels do not count, for a rank without data."""
    labels = {
        name: torch.full_like(batch[name], UNCOUNTED)
        for name in ("labels", "shift_labels")
        if isinstance(batch.get(name), Tensor)
    }
    return {**batch, **labels}
