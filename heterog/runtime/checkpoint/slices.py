"""What a rank saves and loads of parameters that are updated in slices (ZeRO).

A *part* is a run of elements of one flattened tensor. Parts are saved as they lie in the ranks'
slices, nothing is brought together; whoever resumes reads the parts that overlap with its own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from heterog.errors import StrategyError
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.slices import Piece, SlicedBucket

_SCALARS = frozenset({"step", "mu", "mu_product", "eta"})
"""State of torch's elementwise optimizers that is one number, whatever the parameter's shape."""


class Part(NamedTuple):
    """A run of elements of one tensor of a checkpoint, from element ``begin`` on."""

    whole: str
    begin: int
    whole_shape: tuple[int, ...]
    value: Tensor

    @property
    def name(self) -> str:
        """Its own name: ``model.weight[10:20]``."""
        return f"{self.whole}[{self.begin}:{self.begin + self.value.numel()}]"


def is_elementwise(key: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> bool:
    """Whether a state of the optimizer has an element for each of its parameter's."""
    return shape == parameter_shape and not (shape == () and key in _SCALARS)


def own_parts(step: DeployedStep) -> Iterator[Part]:
    """What this rank saves: of stage 3 the parameters, of all stages the optimizer's state."""
    for bucket, own in _own_slices(step):
        state = step.optimizer.state.get(own, {})
        sliced = {
            key: value
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == own.shape
        }
        begin = 0
        for piece in bucket.pieces(step.rank):
            name, shape = name_and_shape(step, piece.row)
            end = begin + piece.end - piece.begin
            if bucket.stage == 3:
                yield Part(f"model.{name}", piece.begin, shape, own.detach()[begin:end])
            for key, value in sliced.items():
                yield Part(f"optimizer.{name}.{key}", piece.begin, shape, value[begin:end])
            begin = end


def begun_here(step: DeployedStep, number: int) -> list[str]:
    """Parameters of a bucket that begin in this rank's slice: it saves their counters."""
    pieces = step.part.slices.buckets[number].pieces(step.rank)
    return [name_and_shape(step, piece.row)[0] for piece in pieces if piece.begin == 0]


def load_slices(
    step: DeployedStep,
    read: Callable[[str, int, int], Tensor],
    shapes: Callable[[str], tuple[int, ...]],
    tensors: Callable[[str], tuple[str, ...]],
    values: Callable[[str], Mapping[str, object]],
) -> tuple[dict[int, Tensor], dict[int, dict[str, object]]]:
    """Read what this rank's slices need.

    Args:
        step: freshly deployed.
        read: elements of a saved tensor, by its name, flat.
        shapes: shape of a saved tensor.
        tensors: names of the saved optimizer state of a parameter that are tensors.
        values: the rest of its state.

    Returns:
        New parameters of stage 3 and new optimizer states, by bucket.

    Raises:
        StrategyError: parameters of one slice were saved with different counters.
    """
    parameters: dict[int, Tensor] = {}
    states: dict[int, dict[str, object]] = {}
    for bucket, own in _own_slices(step):
        pieces = list(bucket.pieces(step.rank))
        named = [(*name_and_shape(step, piece.row), piece) for piece in pieces]
        if bucket.stage == 3:
            parameters[bucket.number] = _joined(
                [(f"model.{name}", piece) for name, _, piece in named], read, own
            )
        first, shape, _ = named[0]
        state: dict[str, object] = dict(values(first))
        for key in tensors(first):
            saved = shapes(f"optimizer.{first}.{key}")
            if is_elementwise(key, saved, shape):
                where = [(f"optimizer.{name}.{key}", piece) for name, _, piece in named]
                state[key] = _joined(where, read, own)
            else:
                size = int(torch.Size(saved).numel())
                state[key] = read(f"optimizer.{first}.{key}", 0, size).view(saved)
        for name, other, _ in named[1:]:
            _check_alike(first, name, state, other, read, shapes, tensors, values)
        if state:
            states[bucket.number] = state
    return parameters, states


def _check_alike(
    first: str,
    name: str,
    state: Mapping[str, object],
    shape: tuple[int, ...],
    read: Callable[[str, int, int], Tensor],
    shapes: Callable[[str], tuple[int, ...]],
    tensors: Callable[[str], tuple[str, ...]],
    values: Callable[[str], Mapping[str, object]],
) -> None:
    """The optimizer counts the steps of a slice once: they must be the same for all in it."""
    same = set(tensors(name)) == set(tensors(first)) and values(name) == values(first)
    for key in tensors(name) if same else ():
        saved = shapes(f"optimizer.{name}.{key}")
        if not is_elementwise(key, saved, shape):
            value = read(f"optimizer.{name}.{key}", 0, int(torch.Size(saved).numel()))
            wanted = state[key]
            same = same and isinstance(wanted, Tensor) and torch.equal(value, wanted.reshape(-1))
    if not same:
        raise StrategyError(
            f"'{first}' and '{name}' are stepped in one slice, but had different states of the "
            "optimizer when they were saved; plan with bucket_bytes 0."
        )


def _joined(
    where: list[tuple[str, Piece]], read: Callable[[str, int, int], Tensor], own: Tensor
) -> Tensor:
    parts = [read(name, piece.begin, piece.end) for name, piece in where]
    return torch.cat(parts).to(own.device)


def _own_slices(step: DeployedStep) -> Iterator[tuple[SlicedBucket, torch.nn.Parameter]]:
    for number, bucket in step.part.slices.buckets.items():
        if step.part.slices.own[number].numel():
            yield bucket, step.part.slices.own[number]


def name_and_shape(step: DeployedStep, row: int) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the parameter of a row of ``graph.updates``."""
    graph = step.captured.graph
    tensor = graph.tensors[graph.updates[row][1]]
    return tensor.name, tensor.shape
