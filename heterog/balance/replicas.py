"""Checks that the ranks of a loop train one model, and that they deal the same batches.

Both are compared in the first steps and now and then. Each rank deals for itself, from arguments
that have to be the same on all ranks. If a seed, a random split, or shares differed, some samples
would be trained with twice and others not at all.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset, TensorDataset

from heterog.balance.group import RankGroup
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError, Deal
from heterog.balance.streams import fingerprint
from heterog.errors import HeterogWarning, OwnSamplesWarning
from heterog.runtime.step.alike import Drift, Replicas, compared_after, drift


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
        self._looks_at_buffers = True
        self._num_steps = 0

    def end_step(self, *, is_end: bool = False) -> None:
        """Compare after some of the steps; all ranks call it after each step.

        Warns once of buffers that ranks compute from their own samples.

        Args:
            is_end: Whether a pass over the data ends, which may be the last one.

        Raises:
            BalanceError: parameters of ranks differ.
        """
        self._num_steps += 1
        if is_end or compared_after(self._num_steps):
            told = self._group.gather(self._replicas.facts())
            found = drift(told, self._num_steps)
            if found is not None:
                raise BalanceError(self._described(found))
            if self._looks_at_buffers:
                self._compare_buffers()

    def _compare_buffers(self) -> None:
        buffers = dict(_kept_buffers(self._model))
        told = self._group.gather(Replicas(list(buffers.values())).facts())
        for place, name in enumerate(buffers):
            sums, roundings = ([each[3 * place + n] for each in told] for n in (0, 2))
            apart = max(sums) - min(sums)
            if not apart > _MORE_THAN_ROUNDING * max(roundings):  # those of masks may be NaN
                continue
            self._looks_at_buffers = False
            warnings.warn(
                f"buffer '{name}' differs between ranks after step {self._num_steps}: each "
                "computes it from its own samples (a codebook, centers, a moving average), where "
                "one process has all. Average over ranks what the model writes there, or train "
                "by a plan, which writes what one device does (heterog.deploy).",
                OwnSamplesWarning,
                stacklevel=2,
            )
            return

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
                "alike, wrap the model again after parameters were unfrozen, and call backward() "
                "once for each forward pass, on the sum of its losses (no autograd.grad). "
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
        BalanceError: a parameter is split beside FSDP, or is averaged over a part of the ranks;
            or it is no model.
    """
    if not isinstance(model, nn.Module):
        raise BalanceError(f"the model is of type {type(model).__name__}; give a torch.nn.Module.")
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


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers by name, but for the statistics of batch norms, which are each rank's own."""
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            continue
        for name, buffer in module.named_buffers(prefix, recurse=False):
            is_plain = not isinstance(buffer, DTensor) and buffer.layout == torch.strided
            if is_plain and buffer.is_floating_point() and not buffer.is_meta:
                yield name, buffer


_MORE_THAN_ROUNDING = 1e3
"""Least difference of a buffer, in roundings of ``Replicas``: a thousandth of its norm."""
_MOST_INDICES = 4096  # of a ``Subset``, at equal distances
_FACTS = ("the data sets", "the orders of the samples", "the shares")


def samples_of(dataset: Dataset[Any] | None) -> tuple[int, int]:
    """Two hashes of the samples of a data set, as far as they are known without reading it.

    The first is of its length, the indices of a ``Subset``, and first rows of a ``TensorDataset``.
    The second is of Hugging Face's fingerprint, which is random if a transform cannot be hashed.
    """
    told: list[Any] = []
    while isinstance(dataset, Subset):
        number = len(dataset.indices)
        places = range(0, number, 1 + number // _MOST_INDICES)
        told += [number, *(int(dataset.indices[place]) for place in places)]
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        told += [each[:1] for each in dataset.tensors]
    told.append(getattr(dataset, "__len__", int)())
    return fingerprint(told), fingerprint(str(getattr(dataset, "_fingerprint", "")))


class SameDeals:
    """Compares the deals of ranks, in the first step of each training loader and later.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._num_steps: WeakKeyDictionary[ShareSampler, int] = WeakKeyDictionary()

    def check(self, sampler: ShareSampler, deal: Deal) -> None:
        """Compare the batch of a step; all ranks call it, once in each step.

        Raises:
            BalanceError: ranks deal differently.
        """
        number = self._num_steps[sampler] = self._num_steps.get(sampler, 0) + 1
        if not compared_after(number):
            return
        (which, maybe), order = (0, 0), [deal.epoch, deal.step]
        if sampler.stream is None:  # first samples of streams are compared when they are read
            which, maybe = samples_of(sampler.dataset)
            order += sampler.first_samples(*order)
        own = [which, fingerprint(order), fingerprint(list(map(int, deal.samples))), maybe]
        places, told = [], []
        for epoch, step, *facts in self._group.gather([deal.epoch, deal.step, *own]):
            places.append(f"step {step:.0f} of epoch {epoch:.0f}")
            told.append(facts)
        for rank, each in enumerate(told):
            if places[rank] != places[0]:
                raise BalanceError(
                    f"rank {rank} is in {places[rank]}, rank 0 in {places[0]}: one of them has "
                    "left its loop or a batch out alone, or has resumed elsewhere. Let all ranks "
                    "stop, leave out batches (by balancer.mean_loss()) and load states alike."
                )
            for what, mine, others in zip(_FACTS, told[0], each, strict=False):
                if mine != others:
                    raise BalanceError(
                        f"{what} of rank {rank} and rank 0 differ. Every rank makes the "
                        "loader of all samples with the same arguments (seed, shuffle, lengths, "
                        "shares, speeds, global_batch_size), and the balancer deals them: do not "
                        "cut data by ranks (DistributedSampler, shard), and draw splits and "
                        "subsets with one seed (random_split(..., generator=torch.Generator()"
                        ".manual_seed(0)))."
                    )
        if len({each[-1] for each in told}) > 1 and number == 1:
            warnings.warn(
                "the fingerprints of ranks' data sets differ: unless a transform could not be "
                "hashed, their samples do. Give train_test_split, shuffle and select the same "
                "arguments and a seed on all ranks, and leave out shard.",
                HeterogWarning,
                stacklevel=5,
            )
