"""The steps that ops become, and how ops are written as steps one after another.

A *step* is a view, a loop over the elements of its result (pointwise), a loop that reduces rows or
columns, or a kernel of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from math import prod
from typing import NamedTuple

from heterog.graph.op_costs import RESHAPES
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import ITEM_BYTES, OpCall, TensorRef
from heterog.graph.sharding_rules import claims_checked
from heterog.graph.sharding_rules.table import dimension

SAME = ""
"""Order of reading a value: the same in which a step loops over its own elements."""
ROWS = "rows"
"""Order of reading a value: one of its elements serves a whole row of the step."""
_LEAST_REDUCED = 8
"""Fewest elements of a sum that is a loop; smaller ones are written out (inductor's
``unroll_reductions_threshold``)."""


class Work(StrEnum):
    """Kind of a step for the compiler."""

    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    OWN = "own"
    """A kernel that nothing is fused with."""


class Read(NamedTuple):
    """A value that a step reads, and in which order: ``SAME``, ``ROWS``, or another by name."""

    value: int
    order: str = SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        op: Index of its op in the graph.
        work: Kind of the step.
        reads: Values that it reads, in order.
        makes: Numbers of the values that it makes.
        reduced: Number of elements that a reduction turns into one; 1 if it is none.
        order: Order in which a reduction goes through what it reads: ``ROWS``, or another by name.
        is_heavy: Whether it takes exponentials or logarithms, which a CPU does not compute twice.
        is_random: Whether it must not be computed twice, because it draws random numbers.
        is_recomputable: Whether the backward pass may compute it again.
        is_fusible: Whether it may be one kernel with what it reads and with what reads it.
        is_joined: Whether it may only be one kernel with what it reads.
        is_part: Whether its result is part of a larger tensor in memory.
        adds_up: Whether several iterations write one element, so that no reader may be fused.
    """

    op: int
    work: Work
    reads: tuple[Read, ...]
    makes: tuple[int, ...]
    reduced: int = 1
    order: str = ROWS
    is_heavy: bool = False
    is_random: bool = False
    is_recomputable: bool = True
    is_fusible: bool = True
    is_joined: bool = False
    is_part: bool = False
    adds_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor between steps: its shape and the bytes of an element."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.num_elements * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """All steps of a graph, updates left out.

    Attributes:
        steps: Steps in the order of their ops.
        values: Inputs of the graph, then the values that steps make.
        of_tensor: Number of the value of each tensor of the graph.
        maker: Number of the step that makes each value, -1 for inputs.
    """

    steps: tuple[Step, ...]
    values: tuple[Value, ...]
    of_tensor: tuple[int, ...]
    maker: tuple[int, ...]


@dataclass(slots=True)
class StepWriter:
    """Writes one op after the other as steps."""

    graph: OpGraph
    table: Mapping[str, "Write"]
    on_gpu: bool
    steps: list[Step] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    of_tensor: list[int] = field(default_factory=list)
    op: int = 0

    def run(self) -> Steps:
        """Write all ops but updates."""
        for tensor in self.graph.tensors[: self.graph.num_inputs]:
            self.of_tensor.append(self.value(tensor.shape, ITEM_BYTES[tensor.dtype], -1))
        for index, op in enumerate(self.graph.ops):
            self.op = index
            if op.phase == Phase.UPDATE:
                self.of_tensor.extend([-1] * op.num_outputs)
                continue
            call = self.graph.call(index)
            # In an imported graph an op may claim anything.
            with claims_checked(f"the args of {op.name or op.kind} do not fit those of {op.kind}"):
                made = self.view(call) if self.graph.is_view[index] else self.kernel(call)
                assert len(made) == op.num_outputs, f"it has {op.num_outputs} outputs"
            self.of_tensor.extend(made)
        return Steps(
            steps=tuple(self.steps),
            values=tuple(self.values),
            of_tensor=tuple(self.of_tensor),
            maker=tuple(self.maker),
        )

    def kernel(self, call: OpCall) -> list[int]:
        """Write an op that is no view; returns the value of each of its outputs."""
        write = self.table.get(call.kind)
        if write is None or (call.inputs and not call.args):
            return self.own(call)
        return write(self, call)

    def value(self, shape: tuple[int, ...], item_bytes: int, maker: int) -> int:
        """Add a value; returns its number."""
        self.values.append(Value(shape=shape, item_bytes=item_bytes))
        self.maker.append(maker)
        return len(self.values) - 1

    def input(self, position: int) -> int:
        """Number of the value of an input of the op."""
        return self.of_tensor[self.graph.ops[self.op].inputs[position]]

    def named(self, call: OpCall, name: str) -> int | None:
        """Number of the value of an argument, if it is a tensor."""
        given = call.args.get(name)
        return self.input(given.index) if isinstance(given, TensorRef) else None

    def all_inputs(self, call: OpCall) -> list[int]:
        """Numbers of the values of all inputs."""
        return [self.input(position) for position in range(len(call.inputs))]

    def add(
        self, work: Work, reads: Sequence[Read], made: Sequence[Value], **traits: object
    ) -> list[int]:
        """Add a step; returns the values that it makes."""
        values = [self.value(each.shape, each.item_bytes, len(self.steps)) for each in made]
        self.steps.append(
            Step(op=self.op, work=work, reads=tuple(reads), makes=tuple(values), **traits)  # type: ignore[arg-type]
        )
        return values

    def own(self, call: OpCall) -> list[int]:
        """Add a kernel of its own; returns the values that it makes."""
        made = [Value(shape=m.shape, item_bytes=ITEM_BYTES[m.dtype]) for m in call.outputs]
        reads = [Read(value) for value in self.all_inputs(call)]
        return self.add(Work.OWN, reads, made, is_recomputable=False, is_fusible=False)

    def pointwise(
        self,
        reads: Iterable[int | Read | None],
        shape: tuple[int, ...],
        item_bytes: int,
        **traits: object,
    ) -> int:
        """Add a loop over the elements of its result; returns the value that it makes."""
        found = [
            Read(each, broadcast_order(self.values[each].shape, shape))
            if isinstance(each, int)
            else each
            for each in reads
            if each is not None
        ]
        made = [Value(shape=shape, item_bytes=item_bytes)]
        return self.add(Work.POINTWISE, found, made, **traits)[0]

    def reduction(
        self,
        reads: Iterable[int | Read | None],
        over: tuple[int, ...],
        reduced: Iterable[int],
        item_bytes: int,
        *,
        shape: tuple[int, ...] | None = None,
        is_heavy: bool = False,
    ) -> int:
        """Add a loop that reduces some dimensions of the shape that it goes over.

        Args:
            reads: Values that the sum is made of, each read at every element of ``over``.
            over: Shape that it goes over.
            reduced: Dimensions of it that are reduced.
            item_bytes: Bytes of an element of the result.
            shape: Shape of the result; by default ``over`` with 1 for what is reduced.
            is_heavy: Whether it takes exponentials or logarithms, see ``Step``.
        """
        dims = frozenset(reduced)
        count = prod(size for dim, size in enumerate(over) if dim in dims)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(over))
        found = [
            Read(each, broadcast_order(self.values[each].shape, over))
            if isinstance(each, int)
            else each
            for each in reads
            if each is not None
        ]
        made = [Value(shape=kept if shape is None else shape, item_bytes=item_bytes)]
        is_written_out = count < _LEAST_REDUCED and prod(kept) > 1
        if count <= 1 or is_written_out:
            apart = [read if count == 1 else Read(read.value, "strided") for read in found]
            return self.add(Work.POINTWISE, apart, made, is_heavy=is_heavy)[0]
        order = _order(over, dims)
        return self.add(
            Work.REDUCTION, found, made, reduced=count, order=order, is_heavy=is_heavy
        )[0]

    def view(self, call: OpCall) -> list[int]:
        """Add a view: each output is the first input in another order."""
        source = self.input(0)
        made = []
        for number, output in enumerate(call.outputs):
            order = _order_of_view(call, number)
            value = Value(shape=output.shape, item_bytes=self.values[source].item_bytes)
            made.extend(self.add(Work.VIEW, [Read(source, order)], [value]))
        return made


Write = Callable[[StepWriter, OpCall], list[int]]
"""Writes an op as steps; returns the value of each of its outputs."""


def broadcast_order(shape: tuple[int, ...], to: tuple[int, ...]) -> str:
    """Order in which a loop over ``to`` reads a value of a shape that is broadcast to it.

    >>> [broadcast_order(shape, (4, 3)) for shape in ((4, 1), (3,), (12,))]
    ['rows', 'broadcast(3,)', '']
    """
    if prod(shape) == prod(to):
        return SAME
    padded = (1,) * (len(to) - len(shape)) + shape
    first = next((d for d in range(len(to)) if padded[d] != to[d]), len(to))
    if len(shape) <= len(to) and all(size == 1 for size in padded[first:]):
        return ROWS
    return f"broadcast{shape}"


def _order(over: tuple[int, ...], dims: frozenset[int]) -> str:
    """Name of the order in which a reduction goes through its elements.

    >>> _order((4, 1, 3), frozenset({2})), _order((4, 3), frozenset({0}))
    ('rows', 'r4,3')
    """
    runs = [
        (is_reduced, prod(over[dim] for dim in group))
        for is_reduced, group in groupby(
            (dim for dim in range(len(over)) if over[dim] != 1), lambda dim: dim in dims
        )
    ]
    flags = [is_reduced for is_reduced, _ in runs]
    if flags == sorted(flags):
        return ROWS
    return ",".join(f"{'r' if is_reduced else ''}{size}" for is_reduced, size in runs)


def _order_of_view(call: OpCall, number: int) -> str:
    """Order in which a view's output reads its input."""
    shape, to = call.inputs[0].shape, call.outputs[number].shape
    if call.kind in RESHAPES or call.kind.startswith("squeeze"):
        return SAME
    if call.kind == "expand.default":
        return broadcast_order(shape, to)
    if prod(shape) == prod(to) and not _moves_dimensions(call):
        return SAME
    args = ",".join(str(value) for value in call.args.values() if not isinstance(value, TensorRef))
    return f"{call.kind}({args})#{number}"


def _moves_dimensions(call: OpCall) -> bool:
    """Whether a view of all elements changes their order."""
    shape = call.inputs[0].shape
    order = list(range(len(shape)))
    if call.kind == "t.default":
        order.reverse()
    elif call.kind == "transpose.int":
        one, other = dimension(call, "dim0", len(shape)), dimension(call, "dim1", len(shape))
        order[one], order[other] = order[other], order[one]
    elif call.kind == "permute.default":
        dims = call.args["dims"]
        assert isinstance(dims, tuple)
        order = [dim % len(shape) for dim in dims if isinstance(dim, int)]
    elif call.kind in ("as_strided.default", "unfold.default"):
        return True
    long = [dim for dim in order if shape[dim] != 1]
    return long != sorted(long)
