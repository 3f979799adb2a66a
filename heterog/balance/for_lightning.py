"""Lightning: ``LightningBalancer`` is a callback, and makes the data.

    balancer = LightningBalancer(batch_size=96)
    trainer = Trainer(callbacks=[balancer], use_distributed_sampler=False, strategy="ddp", ...)
    trainer.fit(module, balancer.data(dataset))

It weighs what ``training_step`` returns. A module with manual optimization calls
``weigh`` itself, before its manual backward pass.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset

from heterog.balance.balancer import Balancer
from heterog.balance.loader import BalancedLoader
from heterog.balance.shares import BalanceError


class BalancedData(LightningDataModule):
    """Training data of a balanced job; the loader is made once the process group exists.

    Args:
        make: Function that makes the loader.
    """

    def __init__(self, make: Callable[[], BalancedLoader]) -> None:
        super().__init__()
        self._make = make

    def train_dataloader(self) -> BalancedLoader:
        """A loader of this rank's shares."""
        return self._make()


class LightningBalancer(Callback):
    """Gives ranks shares of each batch and weighs the losses of a module.

    Args:
        options: Keyword arguments of ``Balancer``.
    """

    def __init__(self, **options: Any) -> None:
        self.balancer = Balancer(**options)
        self._to_load: dict[str, Any] | None = None

    def data(self, dataset: Dataset[Any], **options: Any) -> BalancedData:
        """Make an argument for ``Trainer.fit``; options as ``Balancer.loader``."""

        def make() -> BalancedLoader:
            loader = self.balancer.loader(dataset, **options)
            if self._to_load is not None:
                self.balancer.load_state_dict(self._to_load)
                self._to_load = None
            return loader

        return BalancedData(make)

    def weigh(self, loss: Tensor, count: float | Tensor | None = None) -> Tensor:
        """Weigh a loss; see ``Balancer.weigh``."""
        return self.balancer.weigh(loss, count)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the module's training step so that its loss is weighed.

        Raises:
            BalanceError: Lightning would put its own sampler in place of the shares.
        """
        if stage != "fit":
            return
        if trainer._accelerator_connector.use_distributed_sampler:
            raise BalanceError(
                "Lightning deals equal parts to all ranks; set use_distributed_sampler=False in "
                "its Trainer, and the balancer deals."
            )
        if not pl_module.automatic_optimization:
            return
        step = pl_module.training_step

        def weighed_step(*arguments: Any, **options: Any) -> Any:
            result: Any = step(*arguments, **options)
            if isinstance(result, Tensor):
                return self.balancer.weigh(result)
            if isinstance(result, Mapping) and "loss" in result:
                return {**result, "loss": self.balancer.weigh(result["loss"])}
            return result

        pl_module.training_step = weighed_step  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the model, which the strategy has wrapped by now."""
        if trainer.strategy.model is not None:
            self.balancer.watch(trainer.strategy.model)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and the shares, for Lightning's checkpoints."""
        return self.balancer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until there is a loader, because Lightning loads it before."""
        self._to_load = state_dict
