"""The part of each parameter that a rank holds, in boxes of the whole parameter.

A rank may hold a parameter whole, as a slice along the axis of op rules, as a run of elements in
the flat slice of a bucket (ZeRO), or as a run of a slice (ZeRO between teams). No parameter is
gathered: ranks save their boxes as they are, and a rank that resumes reads the saved boxes that
overlap with its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from heterog.graph.placement import Placement
from heterog.graph.sharding_rules import local_shape
from heterog.runtime.checkpoint.boxes import Box, Piece, run_pieces, whole_piece
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.step.slices import SlicedBucket, SliceRun


def in_units(
    piece: Piece, shape: Sequence[int], place: Placement, units: int, begin: int, count: int
) -> list[Piece]:
    """Convert a piece of a slice along an axis to pieces of the whole tensor.

    Args:
        piece: Piece of the slice.
        shape: Shape of the whole tensor.
        place: Placement of the axis in it.
        units: Number of units of the axis.
        begin: First unit of the slice.
        count: Number of units of the slice.
    """
    if count == units:
        return [piece]
    dim = place.dim
    inner = shape[dim] // (place.outer * units)
    block = count * inner  # number of entries of the slice that are neighbours in the whole
    first, size = piece.box.offsets[dim], piece.box.sizes[dim]
    found = []
    for number in range(first // block, -(-(first + size) // block)):
        low, high = max(first, number * block), min(first + size, (number + 1) * block)
        at = (number * units + begin) * inner + low - number * block
        box = _with_range(piece.box, dim, at, high - low)
        inside = piece.held.offsets[dim] + low - first
        found.append(
            piece._replace(box=box, held=_with_range(piece.held, dim, inside, high - low))
        )
    return found


def _with_range(box: Box, dim: int, begin: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = begin, size
    return Box(tuple(offsets), tuple(sizes))


MASTER = "master_weight"
"""Name of the optimizer's copy in higher precision, in a parameter's saved state."""
_SCALARS = frozenset({"step", "mu", "mu_product", "eta"})
"""State of torch's elementwise optimizers that is one number, whatever the parameter's shape."""


class Member(NamedTuple):
    """A parameter, or a part of it, that the optimizer updates here.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the whole parameter.
        pieces: Pieces of it in the tensor that is updated.
    """

    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def begins_here(self) -> bool:
        """Whether its first element is here; that rank saves state that exists only once."""
        return any(not any(piece.box.offsets) for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A tensor that the optimizer updates: a parameter, or a slice of one or of a bucket.

    Attributes:
        value: The model's tensor.
        stepped: The optimizer's tensor: the value, or a master copy of it.
        members: Parameters in it.
        bucket: The bucket whose slice it is; ``None`` for other values.
        is_saved: Whether this rank saves it, because no other rank's copy counts.
    """

    value: nn.Parameter
    stepped: nn.Parameter
    members: list[Member]
    bucket: SlicedBucket | None
    is_saved: bool

    @property
    def master(self) -> nn.Parameter | None:
        """The optimizer's copy, if it has one."""
        return None if self.stepped is self.value else self.stepped

    @property
    def is_cut(self) -> bool:
        """Whether it is anything other than one whole parameter."""
        return self.bucket is not None or self.members[0].shape != tuple(self.value.shape)


def is_elementwise(key: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> bool:
    """Whether an entry of the optimizer's state has one element for each of the parameter's."""
    return shape == parameter_shape and not (shape == () and key in _SCALARS)


def stepped_values(step: DeployedStep) -> list[Stepped]:
    """Tensors of this rank's optimizer, in its order."""
    row_of = {
        id(step.part.parameters[tensor]): row
        for row, (_, tensor, _) in enumerate(step.captured.graph.updates)
        if tensor in step.part.parameters
    }
    found = []
    for stepped in (each for group in step.optimizer.param_groups for each in group["params"]):
        value = step.masters.value_of(stepped)
        in_slice = step.part.slices.of_parameter(value)
        bucket = None
        if in_slice is not None:
            bucket, run = in_slice
            members = list(_run_members(step, bucket, run))
            is_saved = bucket.is_first
        else:
            row = row_of[id(value)]
            members = [Member(*name_and_shape(step, row), held_pieces(step, row))]
            is_saved = is_saved_here(step, row)
        found.append(
            Stepped(
                value=value, stepped=stepped, members=members, bucket=bucket, is_saved=is_saved
            )
        )
    return found


def held_pieces(step: DeployedStep, row: int) -> list[Piece]:
    """The boxes of a parameter that this rank holds outside of slices of buckets."""
    _, shape = name_and_shape(step, row)
    if row not in step.part.sharded:
        return [whole_piece(shape)]
    place, spans = step.part.sharded[row]
    begin, count = spans.units_of(step.rank)
    own = whole_piece(local_shape(shape, place, count, spans.units))
    return in_units(own, shape, place, spans.units, begin, count)


def _run_members(step: DeployedStep, bucket: SlicedBucket, run: SliceRun) -> Iterator[Member]:
    """The parameters in a run of this rank's slice of a bucket."""
    end = -run.begin
    for piece in bucket.pieces(step.rank):
        at, end = end, end + piece.end - piece.begin
        if not 0 <= at < run.end - run.begin:
            continue
        name, shape = name_and_shape(step, piece.row)
        if piece.row not in step.part.sharded:
            pieces = run_pieces(shape, piece.begin, piece.end, at)
        else:
            place, spans = step.part.sharded[piece.row]
            begin, count = bucket.ring.begin, bucket.ring.end - bucket.ring.begin
            local = local_shape(shape, place, count, spans.units)
            pieces = [
                part
                for each in run_pieces(local, piece.begin, piece.end, at)
                for part in in_units(each, shape, place, spans.units, begin, count)
            ]
        yield Member(name, shape, pieces)


def is_saved_here(step: DeployedStep, row: int) -> bool:
    """Whether this rank saves a parameter that no bucket slices.

    The home or the first replica saves it; if it lives in slices along an axis, the first team.
    """
    if row in step.part.sharded:
        _, spans = step.part.sharded[row]
        return step.rank in spans.first_team() and spans.units_of(step.rank)[1] > 0
    return step.part.owner(row) == step.rank


def name_and_shape(step: DeployedStep, row: int) -> tuple[str, tuple[int, ...]]:
    """Name and whole shape of the parameter of a row of ``graph.updates``."""
    graph = step.captured.graph
    tensor = graph.tensors[graph.updates[row][1]]
    return tensor.name, tensor.shape
