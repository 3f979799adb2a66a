"""Hugging Face Accelerate: ``AcceleratedBalancer`` instead of ``Balancer``.

accelerator = Accelerator()
balancer = AcceleratedBalancer(accelerator, batch_size=96)
loader = balancer.loader(dataset)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
...
accelerator.backward(balancer.weigh(loss))
"""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device

from heterog.balance.balancer import Balancer
from heterog.balance.loader import BalancedLoader


class AcceleratedLoader(BalancedLoader):
    """A loader that ``Accelerator.prepare`` leaves unchanged: it deals to ranks itself.

    It puts batches on the accelerator's device and says which one is the last, which
    ``Accelerator.accumulate`` asks for.
    """

    accelerator: Accelerator
    _is_accelerate_prepared = True  # read and written by ``prepare``
    end_of_dataloader = False
    remainder = -1  # no sample is dealt twice, so ``gather_for_metrics`` has none to leave out

    def _followed(self, epoch: int, begin: int, batches: Iterator[Any]) -> Iterator[Any]:
        state = self.accelerator.gradient_state
        self.end_of_dataloader = False
        state._add_dataloader(self)
        last = begin + len(self) - 1
        try:
            for step, batch in enumerate(super()._followed(epoch, begin, batches), begin):
                self.end_of_dataloader = step == last
                yield send_to_device(batch, self.accelerator.device)
        finally:
            state._remove_dataloader(self)


class AcceleratedBalancer(Balancer):
    """A balancer of a job that Accelerate runs.

    Args:
        accelerator: The job's ``Accelerator``.
        options: Keyword arguments of ``Balancer``.
    """

    loader_type = AcceleratedLoader

    def __init__(self, accelerator: Accelerator, **options: Any) -> None:
        super().__init__(None, **options)
        self._accelerator = accelerator

    def loader(self, dataset: Any, **options: Any) -> BalancedLoader:
        """Make a loader as ``Balancer.loader`` does; ``Accelerator.prepare`` takes it."""
        loader = super().loader(dataset, **options)
        assert isinstance(loader, AcceleratedLoader)
        loader.accelerator = self._accelerator
        return loader

    def begin_pass(self) -> None:
        """Begin a pass of the loop: by now the model is prepared."""
        models = self._accelerator._models
        if self._model is None and models:
            self.watch(models[0])
        super().begin_pass()
