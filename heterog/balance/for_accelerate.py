"""Hugging Face Accelerate: ``AcceleratedBalancer`` instead of ``Balancer``.

accelerator = Accelerator()
balancer = AcceleratedBalancer(accelerator, global_batch_size=96)
loader = balancer.loader(dataset)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
...
accelerator.backward(balancer.weigh(loss))

A prepared scheduler steps once in each update, because the batch is that of all processes, as in
Accelerate with ``split_batches=True``.
"""

from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply, send_to_device

from heterog.balance.balancer import Balancer
from heterog.balance.sampler import BalancedLoader, ShareSampler
from heterog.balance.shares import BalanceError, Deal


class AcceleratedLoader(BalancedLoader):
    """A loader that ``Accelerator.prepare`` leaves unchanged: it deals to ranks itself.

    It puts batches on the accelerator's device and says which one is the last, which
    ``Accelerator.accumulate`` asks for.
    """

    accelerator: Accelerator
    num_skipped = 0
    _is_accelerate_prepared = True  # read and written by ``prepare``
    end_of_dataloader = False
    remainder = -1  # no sample is dealt twice, so ``gather_for_metrics`` has none to leave out

    def _followed(self) -> Iterator[Any]:
        if self.num_skipped:
            self.share_sampler.start_at(self.num_skipped)
        state = self.accelerator.gradient_state
        self.end_of_dataloader = False
        state._add_dataloader(self)
        try:
            for batch in super()._followed():
                self.end_of_dataloader = (
                    self.share_sampler.num_done == self.share_sampler.num_steps
                )
                yield send_to_device(batch, self.accelerator.device)
        finally:
            state._remove_dataloader(self)


class AcceleratedBalancer(Balancer):
    """A balancer of a job that Accelerate runs.

    The accelerator's ``skip_first_batches`` and ``gather_for_metrics`` know its loaders from now
    on.

    Args:
        accelerator: The job's ``Accelerator``.
        options: Keyword arguments of ``Balancer``.

    Raises:
        BalanceError: ranks of the accelerator share samples.
    """

    loader_type = AcceleratedLoader

    def __init__(self, accelerator: Accelerator, **options: Any) -> None:
        layout = getattr(accelerator, "parallelism_config", None)
        if layout is not None and layout.non_data_parallel_size > 1:
            raise BalanceError(
                f"{layout.non_data_parallel_size} ranks of the accelerator's parallelism_config "
                "share samples, and a balancer gives each rank its own. Leave data parallelism "
                "only (dp_replicate_size, dp_shard_size)."
            )
        super().__init__(None, **options)
        self._accelerator = accelerator
        self._skip, self._gather = accelerator.skip_first_batches, accelerator.gather_for_metrics
        accelerator.skip_first_batches = self._skip_first_batches
        accelerator.gather_for_metrics = self._gather_for_metrics

    def loader(self, dataset: Any, **options: Any) -> BalancedLoader:
        """Make a loader as ``Balancer.loader`` does; ``Accelerator.prepare`` takes it."""
        loader = super().loader(dataset, **options)
        assert isinstance(loader, AcceleratedLoader)
        loader.accelerator = self._accelerator
        return loader

    def begin_pass(self, sampler: ShareSampler | None = None) -> None:
        """Begin a pass of the loop: by now the model is prepared."""
        models = self._accelerator._models
        if self.model is None and models:
            self.watch(models[0])
        super().begin_pass(sampler)

    def begin_step(self, deal: Deal, sampler: ShareSampler | None = None) -> None:
        """Begin a step; schedulers step once in it, not once for each process."""
        for scheduler in self._accelerator._schedulers:
            if isinstance(scheduler, AcceleratedScheduler):
                scheduler.split_batches = True
        super().begin_step(deal, sampler)

    def _skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader of the rest of the epoch; the next pass of the given one is the next epoch."""
        if not isinstance(dataloader, AcceleratedLoader):
            return self._skip(dataloader, num_batches)
        rest = copy(dataloader)
        rest.num_skipped = num_batches
        return rest

    def _gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of ranks, which may have different numbers of samples."""
        active = self._accelerator.gradient_state.active_dataloader
        step = (
            self._open.of(active.share_sampler) if isinstance(active, AcceleratedLoader) else None
        )
        if step is None or use_gather_object or self.group.num_ranks == 1:
            return self._gather(input_data, use_gather_object=use_gather_object)
        # Without the fill-ins of ranks without samples.
        gather = partial(self.group.join, counts=step.deal.samples)
        return recursively_apply(gather, input_data, error_on_other_type=True)
