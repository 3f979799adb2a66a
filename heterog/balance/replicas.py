"""Whether the ranks of a loop still train one model, compared every so often."""

import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from heterog.balance.group import RankGroup
from heterog.balance.shares import BalanceError
from heterog.runtime.step.replicas import Drift, Replicas, compared_after, drift


class ReplicaCheck:
    """Compares the parameters of a model that all ranks hold, now and then.

    Args:
        model: The model, wrapped or not. Parameters that are sharded among ranks are left out.
        group: The ranks.
    """

    def __init__(self, model: nn.Module, group: RankGroup) -> None:
        self._model, self._group = model, group
        self._replicas = Replicas(list(_replicated(model)))
        self._num_steps = 0

    def end_step(self) -> None:
        """Compare after some steps; all ranks call it after each.

        Raises:
            BalanceError: parameters of ranks differ.
        """
        self._num_steps += 1
        if compared_after(self._num_steps):
            told = self._group.gather(self._replicas.facts())
            found = drift(told, self._num_steps)
            if found is not None:
                raise BalanceError(self._described(found))

    def _described(self, found: Drift) -> str:
        is_known = math.isfinite(found.apart) and found.way
        part = (
            f"by {found.apart / found.way:.0%} of how far training has moved them"
            if is_known
            else "from the start"
        )
        begun = (
            f"after step {self._num_steps} the weights of ranks {found.ranks[0]} and "
            f"{found.ranks[1]} differ {part}: "
        )
        if any(isinstance(each, DistributedDataParallel) for each in self._model.modules()):
            return begun + (
                "gradients are averaged, so something else differs between ranks. Give all of "
                "them the same learning rate, optimizer options and clipping, change weights "
                "alike, and wrap the model again after parameters were unfrozen. "
                "check_replicas=False does without this check."
            )
        return begun + (
            "each rank trains a model of its own. Wrap it in DistributedDataParallel, or call "
            "balancer.average_gradients() after the backward pass; and begin with the same "
            "weights and the same learning rate. check_replicas=False does without this check."
        )


def _replicated(model: nn.Module) -> Iterator[Tensor]:
    """The parameters that every rank holds whole."""
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        return
    left_out: set[str] = set()
    if isinstance(model, DistributedDataParallel):
        left_out = set(model.parameters_to_ignore)
        model = model.module
    for name, parameter in model.named_parameters():
        is_number = parameter.is_floating_point() or parameter.is_complex()
        if name not in left_out and is_number and not parameter.is_meta:
            if not isinstance(parameter.data, DTensor):
                yield parameter
