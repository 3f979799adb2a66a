"""Whether all ranks still have one model: a few numbers about its parameters, compared.

Ranks of data parallelism begin with equal parameters and make equal updates. Where gradients are
not averaged, or a learning rate differs, parameters differ by a part of the way they have come.
Unlike GPUs may round an update differently, which is far less: at most about one unit in the last
place for each step, in either direction.

A rank tells the sums of its parameters with random signs, in ``NUM_SUMS`` groups. The sums of two
ranks differ by about as much as their parameters do, as vectors, whatever the difference is:
E (u . d)^2 = |d|^2 for independent signs u.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from heterog.balance.group import RankGroup
from heterog.balance.shares import BalanceError

NUM_SUMS = 8
MOST_ELEMENTS = 2**16
"""Elements of each parameter that are looked at: an update touches nearly all."""
EVERY = 64
"""Steps between checks, after those at steps 1, 2, 4, ... up to here."""
PART_OF_WAY = 1e-3
"""Least difference that counts, as a part of the way from the first step. Averages that are
forgotten make about 1; a learning rate that is 1 % larger 0.01."""
ROUNDING = 1e-6
"""Least difference that counts, as a part of the parameters' norm, for a step: about sixteen times
the rounding of float32, and it grows with the root of the number of steps. Numbers of 16 bits go
to another neighbour for a part eps32 / eps16 of the elements only, so their rounding counts
sqrt(eps16 / eps32) times as much."""

_EPS_32 = torch.finfo(torch.float32).eps


class ReplicaCheck:
    """Compares the parameters of a model that all ranks hold, now and then.

    Args:
        model: The model, wrapped or not. Parameters that are sharded among ranks are left out.
        group: The ranks.
    """

    def __init__(self, model: nn.Module, group: RankGroup) -> None:
        self._model, self._group = model, group
        self._signs = _signs()
        self._num_steps = 0
        self._begin = self._sums()

    def end_step(self) -> None:
        """Compare after some steps; all ranks call it after each.

        Raises:
            BalanceError: parameters of ranks differ.
        """
        self._num_steps += 1
        is_early = self._num_steps < EVERY and self._num_steps.bit_count() == 1
        if is_early or self._num_steps % EVERY == 0:
            self._compare()

    def _compare(self) -> None:
        sums = self._sums()
        way = math.dist(sums[:NUM_SUMS], self._begin[:NUM_SUMS])
        told = self._group.gather([*sums, way])
        first = told[0]
        apart = [math.dist(each[:NUM_SUMS], first[:NUM_SUMS]) for each in told]
        rank = max(range(len(told)), key=lambda each: _or_infinite(apart[each], told[each], first))
        way, norm = (max(each[place] for each in told) for place in (-1, NUM_SUMS))
        rounding = ROUNDING * math.sqrt(self._num_steps) * norm
        if _or_infinite(apart[rank], told[rank], first) > max(PART_OF_WAY * way, rounding):
            raise BalanceError(self._described(rank, apart[rank], way))

    def _described(self, rank: int, apart: float, way: float) -> str:
        part = (
            f"by {apart / way:.0%} of how far training has moved them" if way else "from the start"
        )
        begun = f"after step {self._num_steps} the weights of ranks 0 and {rank} differ {part}: "
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

    def _sums(self) -> list[float]:
        """This rank's sums, then the norm of what they are sums of, as its rounding counts."""
        signed = torch.zeros(NUM_SUMS, dtype=torch.float64)
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, parameter in enumerate(_replicated(self._model)):
            by_device.setdefault(parameter.device, []).append((index % NUM_SUMS, parameter))
        squares = 0.0
        for device, parameters in by_device.items():
            signs = self._signs.to(device)
            pairs = torch.stack([_sum_and_squares(each, signs) for _, each in parameters]).cpu()
            signed.index_add_(0, torch.tensor([group for group, _ in parameters]), pairs[:, 0])
            coarse = [max(1.0, torch.finfo(each.dtype).eps / _EPS_32) for _, each in parameters]
            squares += float((pairs[:, 1] * torch.tensor(coarse, dtype=torch.float64)).sum())
        return [*signed.tolist(), math.sqrt(squares)]


def _or_infinite(apart: float, one: list[float], other: list[float]) -> float:
    """A difference; infinite where only one of two ranks has a sum that is not finite."""
    if math.isfinite(apart):
        return apart
    is_finite = [all(map(math.isfinite, each)) for each in (one, other)]
    return 0.0 if is_finite[0] == is_finite[1] else math.inf


def _signs() -> Tensor:
    """The same random signs on all ranks."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2, (MOST_ELEMENTS,), generator=random)
    return drawn.to(torch.float32).mul_(2).sub_(1)


def _sum_and_squares(parameter: Tensor, signs: Tensor) -> Tensor:
    """The sum of a parameter's elements with signs, and that of their squares."""
    flat = parameter.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    looked_at = flat[:: max(1, -(-flat.numel() // MOST_ELEMENTS))].double()
    return torch.stack([(looked_at * signs[: len(looked_at)]).sum(), looked_at.square().sum()])


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
