"""Whether the ranks of a loop still train one model, compared every so often."""

import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
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
        self._frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
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
        named = self._model.named_parameters()
        thawed = [name for name, each in named if each.requires_grad and name in self._frozen]
        if thawed:
            return begun + (
                f"{thawed[0]} was frozen when training began, and DistributedDataParallel "
                "averages no gradient of what was frozen when it wrapped the model. Wrap the "
                "model again after unfreezing; or wrap it with all parameters trainable and "
                "find_unused_parameters=True, and freeze them after that."
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


def check_data_parallel(model: nn.Module, num_ranks: int) -> None:
    """Check that no ranks share a layer, which would need the same samples.

    Raises:
        BalanceError: a parameter is split beside FSDP, or is averaged over a part of the ranks.
    """
    sharded = {
        id(each)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for each in module.parameters()
    }
    for name, parameter in model.named_parameters():
        data = parameter.data
        if not isinstance(data, DTensor):
            continue
        num_cuts = sum(not isinstance(each, Replicate) for each in data.placements)
        if num_cuts > (id(parameter) in sharded) or data.device_mesh.size() < num_ranks:
            raise BalanceError(
                f"{name} lies on a mesh of {data.device_mesh.size()} of {num_ranks} ranks as "
                f"{data.placements}: ranks that share layers (tensor, expert or pipeline "
                "parallelism) need the same samples, and a balancer gives each rank its own. Use "
                "fully_shard over all ranks alone, or DistributedDataParallel; heterog plan and "
                "heterog run balance such models."
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
