"""Whether replicas are still one model: a few numbers about each tensor, compared between ranks.

Replicas begin with equal parameters and make equal updates. Where gradients are not averaged, or a
learning rate differs, parameters differ by a part of the way they have come. Unlike GPUs may round
an update differently, which is far less: at most about one unit in the last place for each step,
in either direction.

A rank tells the sum of a tensor's elements with random signs. The sums of two ranks differ by
about as much as their tensors do, as vectors, whatever the difference is:
E (u . d)^2 = |d|^2 for independent signs u.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_ELEMENTS = 2**14
"""Elements of each tensor that are looked at: an update touches nearly all, and their copies in
double precision are a fraction of a megabyte beside a step."""
EVERY = 64
"""Steps between comparisons, after those at steps 1, 2, 4, ... up to here."""
PART_OF_WAY = 1e-3
"""Least difference that counts, as a part of the way from the first step. Averages that are
forgotten make about 1; a learning rate that is 1 % larger 0.01."""
ROUNDING = 1e-6
"""Least difference that counts, as a part of a tensor's norm, for a step: about sixteen times
the rounding of float32, and it grows with the root of the number of steps. Numbers of 16 bits go
to another neighbour for a part eps32 / eps16 of the elements only, so their rounding counts
sqrt(eps16 / eps32) times as much."""

_EPS_32 = torch.finfo(torch.float32).eps
_NUM_FACTS = 3


@dataclass(frozen=True, slots=True)
class Drift:
    """Replicas of a tensor that differ.

    Attributes:
        place: Number of the tensor.
        ranks: Two ranks whose tensors differ most.
        apart: By how much, as vectors.
        way: How far training has moved the tensor.
    """

    place: int
    ranks: tuple[int, int]
    apart: float
    way: float


def compared_after(num_steps: int) -> bool:
    """Whether ranks compare replicas after so many steps."""
    is_early = 0 < num_steps < EVERY and num_steps.bit_count() == 1
    return is_early or (num_steps > 0 and num_steps % EVERY == 0)


class Replicas:
    """What a rank tells about its tensors, and how it has changed since they were first seen.

    Args:
        tensors: Tensors that several ranks may hold; ``None`` for one that this rank does not.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = list(tensors)
        random = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, 2, (MOST_ELEMENTS,), generator=random)
        self._signs = drawn.to(torch.float32).mul_(2).sub_(1)
        self._begin = [signed for signed, _ in self._sums()]

    def facts(self) -> list[float]:
        """The sum, the way and the rounding of each tensor; NaN for one that is not held."""
        found: list[float] = []
        for begin, (signed, rounding) in zip(self._begin, self._sums(), strict=True):
            found += [signed, abs(signed - begin), rounding]
        return found

    def _sums(self) -> list[tuple[float, float]]:
        """Signed sum and rounding of each tensor, with one transfer from each device."""
        found = [(math.nan, math.nan)] * len(self._tensors)
        by_device: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(self._tensors):
            if tensor is not None:
                by_device.setdefault(tensor.device, []).append(place)
        for device, places in by_device.items():
            signs = self._signs.to(device)
            held = [each for place in places if (each := self._tensors[place]) is not None]
            pairs = torch.stack([_sum_and_squares(each, signs) for each in held]).tolist()
            for place, tensor, (signed, squares) in zip(places, held, pairs, strict=True):
                coarse = max(1.0, torch.finfo(tensor.dtype).eps / _EPS_32)
                found[place] = signed, ROUNDING * math.sqrt(squares * coarse)
        return found


def drift(told: Sequence[Sequence[float]], num_steps: int) -> Drift | None:
    """The tensor whose replicas differ most, if that is more than rounding.

    Args:
        told: The facts of each rank.
        num_steps: Number of steps since they were first seen.
    """
    worst: Drift | None = None
    worst_excess = 1.0
    for place in range(len(told[0]) // _NUM_FACTS):
        begin = place * _NUM_FACTS
        facts = {
            rank: each[begin : begin + _NUM_FACTS]
            for rank, each in enumerate(told)
            if not all(map(math.isnan, each[begin : begin + _NUM_FACTS]))
        }
        if len(facts) < 2:
            continue
        finite = {rank: each for rank, each in facts.items() if math.isfinite(each[0])}
        low = min(finite or facts, key=lambda rank: facts[rank][0])
        high = max(finite or facts, key=lambda rank: facts[rank][0])
        way, rounding = (max((each[n] for each in finite.values()), default=0.0) for n in (1, 2))
        apart = facts[high][0] - facts[low][0] if finite else 0.0
        if len(finite) < len(facts) and finite:
            apart, high = math.inf, next(rank for rank in facts if rank not in finite)
        allowed = max(PART_OF_WAY * way, rounding * math.sqrt(num_steps))
        if apart > worst_excess * allowed:
            worst_excess = apart / allowed if allowed else math.inf
            worst = Drift(place, (min(low, high), max(low, high)), apart, way)
    return worst


def _sum_and_squares(tensor: Tensor, signs: Tensor) -> Tensor:
    """The sum of a tensor's elements with signs, and that of their squares."""
    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    looked_at = flat[:: max(1, -(-flat.numel() // MOST_ELEMENTS))].double()
    return torch.stack([(looked_at * signs[: len(looked_at)]).sum(), looked_at.square().sum()])
