"""Placements of one tensor along one mesh axis, and ops as the sharding rules see them.

A placement states which part of a tensor a device holds when an axis (the batch, say) of
``axis_size`` units is divided unevenly among devices:

- ``R``: every device holds the whole tensor.
- ``S(dim, outer)``: dimension ``dim`` is ``outer x axis_size x inner``; a device that owns
  ``share`` of the ``axis_size`` units holds ``outer x share x inner`` of it. The written form
  keeps every view exact: (B, T, D) seen as (B*T, D) is split in dimension 0 with ``inner = T``.
- ``P``: every device holds a tensor of full shape; their sum is the tensor.
- ``L``: every device holds statistics of its own samples (of a BatchNorm), which stay local.
- ``H(dim, window)``: only for needed inputs: the rows of dimension ``dim`` that an op's part of
  the output reads. They may reach into rows of neighbours (a *halo*; see
  ``heterog.graph.sparse_pattern``).
  ``neighbours(dim, key)``: only for needed inputs: the rows that the entries of a sparse matrix
  name (``heterog.graph.sparse_pattern``), which may be any rows.

``OpRule`` states how one op runs on its group's devices along another axis than the group's.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from heterog.errors import StrategyError
from heterog.graph.sparse_pattern import Rows
from heterog.names import shown
from heterog.records import VALUE, Count, MadeBy, Series


class Window(NamedTuple):
    """Rows that a device with the units ``[u, v)`` of an axis needs of a tensor.

    They are ``[u * step - before, v * step + after)``, clipped to the tensor.
    """

    step: int
    before: int
    after: int

    def rows(self, begin: int, end: int, size: int) -> Rows:
        """Rows for the units from ``begin`` to before ``end``, of a tensor with ``size`` rows.

        >>> Window(step=4, before=1, after=1).rows(1, 3, size=12)
        Rows(begin=3, end=12)
        """
        return Rows(begin * self.step - self.before, end * self.step + self.after).clipped(size)


class Placement(NamedTuple):
    """Which part of a tensor each device holds along one axis; the module lists the five kinds.

    Searches for rules compare millions of them: tuples are ten times as fast as dataclasses.
    """

    kind: Literal["R", "S", "P", "L", "H"]
    dim: int = 0
    outer: int = 1
    window: Window | None = None
    pattern: str = ""

    def __repr__(self) -> str:  # a part of the hashes of programs
        return f"Placement(kind={self.kind!r}, dim={self.dim}, outer={self.outer})"

    def __str__(self) -> str:
        if self.pattern:
            return f"H({self.dim},@{self.pattern})"
        if self.window is not None:
            return f"H({self.dim},{self.window.step},{self.window.before},{self.window.after})"
        return f"S({self.dim},{self.outer})" if self.kind == "S" else self.kind

    @property
    def is_split(self) -> bool:
        """Whether a device holds only a part of the tensor, with or without a halo."""
        return self.kind in "SH"


R = Placement("R")
P = Placement("P")
L = Placement("L")


@cache
def S(dim: int, outer: int = 1) -> Placement:
    """Split dimension ``dim``, written as ``outer x axis x inner``."""
    return Placement("S", int(dim), int(outer))


def H(dim: int, window: Window) -> Placement:
    """Split dimension ``dim``, with the rows that an op reads besides a device's own."""
    return Placement("H", dim, window=window)


def neighbours(dim: int, pattern: str) -> Placement:
    """The rows of dimension ``dim`` that a device's part of a sparse product reads.

    Args:
        dim: Dimension of the tensor that is read.
        pattern: Key of the entries; see ``SparsePattern``.
    """
    return Placement("H", dim, pattern=pattern)


def placement_of(value: object) -> Placement:
    """The placement of a text like ``R``, ``S(0,3)``, ``H(2,4,1,-1)`` or ``H(1,@key)``.

    >>> placement_of("S(0,3)")
    Placement(kind='S', dim=0, outer=3)

    Raises:
        StrategyError: it is none of them.
    """
    text = value if isinstance(value, str) else ""
    known = {str(place): place for place in (R, P, L)}
    if text in known:
        return known[text]
    halo = re.fullmatch(r"H\((\d{1,9}),(\d{1,9}),(-?\d{1,9}),(-?\d{1,9})\)", text)
    if halo is not None:
        return H(int(halo[1]), Window(int(halo[2]), int(halo[3]), int(halo[4])))
    sparse = re.fullmatch(r"H\((\d{1,9}),@([0-9a-f]{16})\)", text)
    if sparse is not None:
        return neighbours(int(sparse[1]), sparse[2])
    found = re.fullmatch(r"S\((\d{1,9}),(\d{1,9})\)", text)
    if found is None or int(found[2]) < 1:
        raise StrategyError(
            f"{shown(value)} is no placement; R, P, L or S(dim,outer) is meant, "
            "or H(dim,step,before,after) for an input, H(dim,@key) for one of a sparse product."
        )
    return S(int(found[1]), int(found[2]))


ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2,
    "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "uint64": 8, "uint16": 2,
}  # fmt: skip


def needs_no_transfer(given: Sequence[Placement], wanted: Sequence[Placement]) -> bool:
    """Whether an op can read its inputs in place: unchanged, or slices of whole tensors."""
    return all(
        have == want or (have == R and want.is_split)
        for have, want in zip(given, wanted, strict=True)
    )


def crosses(place: Placement, units: int, along: Placement, batch_size: int) -> bool:
    """Whether a split of a tensor goes across its samples.

    It does if its units do not lie inside samples (as positions do), nor samples inside its units.

    Args:
        place: The split.
        units: Number of units of its axis.
        along: Placement of the tensor along the batch.
        batch_size: Number of samples.
    """
    if place.kind != "S" or along.kind != "S" or place.dim != along.dim:
        return False
    is_inside = place.outer % (along.outer * batch_size) == 0
    return not is_inside and along.outer % (place.outer * units) != 0


_Place: TypeAlias = Annotated[Placement, MadeBy(placement_of)]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Global shape and dtype (``"float32"``, ``"int64"``, ...) of a tensor.

    >>> TensorMeta((2, 3), "float32").num_bytes
    24
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Placeholder in an argument list for the op's ``index``-th tensor input."""

    index: int


Arg = TensorRef | int | float | bool | str | None | tuple["Arg", ...]


def kinds(names: str) -> tuple[str, ...]:
    """Kinds of ops by their names, with the default overload where none is named.

    Braces list alternatives, as in a shell.

    >>> kinds("mm eq.{Tensor,Scalar}")
    ('mm.default', 'eq.Tensor', 'eq.Scalar')
    """
    found = [name if "." in name else f"{name}.default" for name in names.split()]
    while any("{" in name for name in found):
        parts = [re.split(r"\{([^{}]*)\}", name, maxsplit=1) for name in found]
        found = [f"{part[0]}{each}{''.join(part[2:])}"
                 for part in parts for each in "".join(part[1:2]).split(",")]  # fmt: skip
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpCall:
    """One call of an ATen op: all that a sharding rule or a cost formula may use.

    Compared by identity, so that results can be kept for each call; a graph has one object for
    all of its ops whose calls are alike.

    Attributes:
        kind: Op name without namespace: ``"mm.default"``, ``"native_layer_norm.default"``;
            ``"attention"`` and ``"attention_backward"`` for every fused attention kernel.
        args: All schema arguments by name, in schema order, defaults filled in. A tensor is a
            ``TensorRef`` into ``inputs``; lists are tuples; dtypes, devices, layouts and memory
            formats are strings.
        inputs: Tensor inputs, in order of first appearance in ``args`` (a tensor that is passed
            twice appears twice).
        outputs: Tensor outputs, in order.
    """

    kind: str
    args: Mapping[str, Arg]
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]

    def place_of(self, name: str) -> int:
        """Position in ``inputs`` of an argument that is a tensor."""
        reference = self.args[name]
        assert isinstance(reference, TensorRef), f"{self.kind}: {name} is no tensor"
        return reference.index

    def input(self, name: str) -> TensorMeta:
        """The tensor of an argument."""
        return self.inputs[self.place_of(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """How the members of a team cut a value as soon as it is made, along another axis.

    A part of a sum is added up in slices, by a reduce-scatter. Slices along the rule's axis become
    slices along this axis, by an all-to-all: each member sends every other member the overlap of
    its old slice with the other's new slice.

    Attributes:
        place: Placement of the value over the members of the team afterwards.
        units: Number of units of the axis that ``place`` splits, which is not the rule's axis. If
            ``place`` is the value's placement along the batch, the batch size means the batch.
    """

    __pydantic_config__: ClassVar = VALUE

    place: _Place
    units: Count


class _WithHash:
    """Slot for a hash that is computed once; not a field, so copies and pickles lack it."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule(_WithHash):
    """How one op runs on its group's devices along one axis of ``units`` units.

    The units are divided among the devices of the group's decision in proportion to its shares
    (``split_in_proportion(units, decision.shares)``; for the batch the shares themselves). The
    placements of a graph's tensors follow in program order:

    - An op with a rule needs its inputs, and leaves its outputs, as the rule says. The rule must
      be one of the sharding rules: ``propagate(call, inputs, units)`` has to give ``inputs`` and
      ``outputs`` back (every rule of ``legal_rules`` does).
    - A view never has a rule: its output follows by propagation from its source. A view that
      cannot follow (because it merges a split dimension, say) shows the gathered whole.
    - Every other op follows the batch plan. So in a region that is not split along the batch all
      ops must have rules.

    Where a reader needs another placement than the maker left, or the same one along another axis,
    the value is converted: a slice of a whole value is free, every other conversion makes the
    whole value first. A rule without any ``S`` runs on all devices with samples.

    ``scatter`` avoids the whole value. Parts of a sum are summed in slices as soon as the op is
    done, and readers find the slices: sequence parallelism (Korthikanti et al. 2022, section 4.2)
    splits activations between two matrix products along the positions in this way. Slices move to
    other owners as soon as the op is done, for readers along another axis: expert parallelism
    (Lepikhin et al. 2021, section 3.2) sends tokens in this way from the device that has the
    sample to the device that has the expert, and back.

    Attributes:
        inputs: Needed placement of each tensor input of the op.
        outputs: Placement of each output.
        units: Number of units of the axis that ``S`` splits; the batch size means the batch
            split; any number if nothing is ``S``.
        scatter: How the only output is cut again: a part of a sum is summed in slices, a split
            output is split along another axis. With ``None`` readers get parts, or the whole, as
            they need it.
    """

    __pydantic_config__: ClassVar = VALUE

    inputs: Series[_Place]
    outputs: Series[_Place]
    units: Count
    scatter: Scatter | None = None

    def __hash__(self) -> int:
        """The hash of all fields, computed once: searches look up sets of a thousand rules."""
        try:
            return self._hash
        except AttributeError:
            value = hash((self.inputs, self.outputs, self.units, self.scatter))
            object.__setattr__(self, "_hash", value)
            return value


OpRules = tuple[tuple[int, OpRule], ...]
"""Pairs of graph op index and rule, ascending."""
