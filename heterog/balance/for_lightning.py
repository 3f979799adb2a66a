"""Lightning: ``LightningBalancer`` is a callback, and makes the data.

    balancer = LightningBalancer(global_batch_size=96)
    trainer = Trainer(callbacks=[balancer], strategy="ddp", ...)
    trainer.fit(module, balancer.loader(dataset), val_loader)

It weighs the result of ``training_step``: a loss that is a mean over samples, or
``{"loss": loss, "count": number_of_labels}`` if the loss is a mean over labels. A module with
manual optimization calls ``weigh`` itself, before its manual backward pass.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import Dataset

from heterog.balance.balancer import Balancer
from heterog.balance.sampler import BalancedLoader
from heterog.balance.shares import BalanceError, length_of


class BalancedData:
    """Data of a balanced job; each process of the job makes the actual loader.

    Lightning gives the number of each epoch to ``sampler.set_epoch``, as it does with a
    ``DistributedSampler``.

    Args:
        callback: The job's balancer.
        dataset: Data set with a length, or a stream.
        options: Arguments of ``Balancer.loader``.
    """

    def __init__(
        self, callback: "LightningBalancer", dataset: Dataset[Any], options: Mapping[str, Any]
    ) -> None:
        self.dataset = dataset
        self._callback, self._options = callback, options
        self._batches = callback.balancer.global_batches(dataset, **options)
        self._loader: BalancedLoader | None = None
        self._epoch = 0

    batch_sampler = None  # asked for by Lightning

    @property
    def sampler(self) -> "BalancedData":
        """This object; Lightning calls its ``set_epoch``."""
        return self

    def _attach(self, trainer: Trainer) -> None:
        """Become the training data of a fit that got this object as its ``datamodule``."""
        connector = trainer._data_connector
        model = connector._datahook_selector.model  # type: ignore[union-attr]
        connector.attach_datamodule(model, None)
        trainer.datamodule = None  # type: ignore[attr-defined]
        connector.attach_dataloaders(model, train_dataloaders=self)

    trainer = property(fset=_attach)  # which Lightning sets

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch."""
        self._epoch = epoch
        self.loader().set_epoch(epoch)

    def loader(self) -> BalancedLoader:
        """The loader of this process, once it is a rank of the job."""
        if self._loader is None:
            self._loader = self._callback.balancer.loader(self.dataset, **self._options)
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        self._callback.take_none_ahead()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # A generator, because Lightning makes its first iterator before it sets the epoch.
        yield from self.loader()

    @property
    def is_stream(self) -> bool:
        """Whether its length is unknown until it is read."""
        return not self._batches.has_length

    def __len__(self) -> int:
        return length_of(self._batches, self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and the shares, for Lightning's checkpoints."""
        sampler = self.loader().share_sampler
        return sampler.state_dict(num_done=sampler.num_done)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.loader().share_sampler.load_state_dict(state_dict)


class LightningBalancer(Callback):
    """Gives ranks shares of each batch and weighs the losses of a module.

    Args:
        options: Keyword arguments of ``Balancer``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.balancer = Balancer(**options)
        self._trainer: Trainer | None = None
        self._to_load: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Make it anew in a process that Lightning spawns, with hooks of its own."""
        return partial(type(self), **self._options), ()

    def loader(self, dataset: Dataset[Any], **options: Any) -> BalancedData:
        """Make a loader for ``Trainer.fit`` or a module's hook; options as ``Balancer.loader``."""
        return BalancedData(self, dataset, options)

    def weigh(self, loss: Tensor, count: float | Tensor | None = None) -> Tensor:
        """Weigh a loss; see ``Balancer.weigh``."""
        return self.balancer.weigh(loss, count)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the module's training step so that its loss is weighed.

        Raises:
            BalanceError: Lightning would put batches of its own in place of the shares.
        """
        if stage != "fit":
            return
        self._trainer = trainer
        if trainer.overfit_batches:  # type: ignore[attr-defined]
            raise BalanceError(
                "with overfit_batches Lightning would make the batches. Give "
                "balancer.loader(torch.utils.data.Subset(dataset, range(n)), shuffle=False) the "
                "few samples instead."
            )
        if not pl_module.automatic_optimization:
            return
        step = pl_module.training_step

        @wraps(step)  # Lightning looks at its arguments
        def weighed_step(*arguments: Any, **options: Any) -> Any:
            result: Any = step(*arguments, **options)
            if isinstance(result, Tensor):
                return self.balancer.weigh(result)
            if isinstance(result, Mapping) and "loss" in result:
                return {**result, "loss": self.balancer.weigh(result["loss"], result.get("count"))}
            return result

        pl_module.training_step = weighed_step  # type: ignore[method-assign]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module its own training step back."""
        if stage == "fit":
            vars(pl_module).pop("training_step", None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the model, which the strategy has wrapped by now, and load a state.

        Raises:
            BalanceError: the data are not the balancer's.
        """
        if trainer.strategy.model is not None:
            self.balancer.watch(trainer.strategy.model)
        every = _combined(trainer).flattened
        loaders = [each.loader() if isinstance(each, BalancedData) else each for each in every]
        loaders = [each for each in loaders if isinstance(each, BalancedLoader)]
        if not loaders or len(loaders) < len(every):
            raise BalanceError(
                f"the balancer deals {len(loaders)} of the {len(every)} loaders of training data "
                "of this fit; give Lightning balancer.loader(dataset) as each of them."
            )
        if self._to_load is not None:
            self.balancer.load_state_dict(self._to_load)
            self._to_load = None
        elif len(loaders) == 1:
            self.balancer.train_with(loaders[0].share_sampler)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell Lightning the length of this epoch: with tokens, epochs differ in batches."""
        fit, combined = trainer.fit_loop, _combined(trainer)
        lengths = [sized_len(each) for each in combined.flattened]
        if None in lengths:
            return
        limit = trainer.limit_train_batches
        combined.limits = [
            _parse_num_batches(RunningStage.TRAINING, length, limit)
            for length in lengths
            if length is not None
        ]
        length = (min if combined._mode == "min_size" else max)(combined.limits)
        fit.max_batches = length
        if fit._data_fetcher is not None:
            fit._data_fetcher.length = int(length)

    def take_none_ahead(self) -> None:
        """Keep Lightning from prefetching: losses would get the weights of the batch ahead."""
        fetcher = None if self._trainer is None else self._trainer.fit_loop._data_fetcher
        if isinstance(fetcher, _PrefetchDataFetcher):
            fetcher.prefetch_batches = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Tell Lightning of the last batch of a stream, as it cannot know without prefetching.

        Raises:
            BalanceError: there is training data beside the stream.
        """
        every = _combined(trainer).flattened
        streams = [each for each in every if isinstance(each, BalancedData) and each.is_stream]
        if streams and len(every) > 1:
            raise BalanceError("a stream has to be all training data of a fit: give it alone.")
        for each in streams:
            sampler = each.loader().share_sampler
            is_last = sampler.num_done == sampler.num_steps
            assert trainer.fit_loop._data_fetcher is not None
            trainer.fit_loop._data_fetcher.done = is_last
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = is_last

    def on_train_batch_end(self, *_: Any) -> None:
        """Leave the module as it was."""
        self.balancer.release_norms()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep an older checkpoint's state until there is a loader; newer ones load into data."""
        self._to_load = state_dict or None


def _combined(trainer: Trainer) -> CombinedLoader:
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    return combined
