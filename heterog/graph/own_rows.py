"""Indices that keep each sample within its own rows, so that no other device's rows are read.

Rules see no values, but some values follow from the ops that make an index: ``torch.arange``
counts samples, also where it is expanded, ``topk`` over n numbers is less than n, and their sum
``topk + n * arange`` (with samples in the first dimension) stays within the n rows of each sample
of a flattened tensor.
"""

from typing import NamedTuple

from heterog.graph.op_graph import GraphOp, OpGraph
from heterog.graph.placement import Placement, S, kinds
from heterog.graph.sharding_rules import RuleResult, propagate
from heterog.graph.sharding_rules.indexing import (
    BAGS,
    INDEXED,
    ROWS_BY_ONE_INDEX,
    split_by_bags,
    split_by_own_rows,
    split_by_places,
)
from heterog.graph.sharding_rules.table import dimension

_SAME_ORDER = frozenset(
    kinds(
        "alias detach expand lift_fresh lift_fresh_copy squeeze squeeze.dim squeeze.dims "
        "unsqueeze view _unsafe_view _to_copy clone"
    )
)
"""Ops that keep the order of the elements if they keep the number of elements."""
_SAME_VALUES = _SAME_ORDER | {
    *("permute.default", "transpose.int", "t.default", "select.int", "slice.Tensor")
}
"""Ops that make no other values than those of their input, if they make integers."""
_PLACES = {
    **dict.fromkeys(kinds("argmax argmin argsort argsort.stable"), 0),
    **dict.fromkeys(kinds("topk sort sort.stable max.dim min.dim"), 1),
}
"""Outputs of ops that are places along a dimension."""
_WIDE = ("int32", "int64")
"""Dtypes that hold any place."""


class _Places(NamedTuple):
    """Values of a tensor are rows of their own sample.

    Attributes:
        size: Rows of a sample.
        split: The placement of the tensor by which each device has its own samples.
    """

    size: int
    split: Placement


class OwnRows:
    """What is known of the integers of a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._steps: dict[int, int] = {}
        """Tensors that are 0, step, 2 step, ... in the order of samples: of any shape, with the
        same number of elements for each sample."""
        self._repeated: dict[int, tuple[int, int]] = {}
        """Tensors that are 0, 1, 2, ... along one dimension alone: how many, and the dimension."""
        self._below: dict[int, int] = {}
        """Tensors of values from zero to below a number."""
        self._places: dict[int, _Places] = {}
        if any(op.kind in INDEXED | BAGS | ROWS_BY_ONE_INDEX for op in graph.ops):
            for index, op in enumerate(graph.ops):
                self._count(index, op)
                self._bound(index, op)
                self._place(index, op)

    def rule(self, index: int, given: tuple[Placement, ...]) -> RuleResult | None:
        """Rule of an op that reads or writes only each sample's own rows; ``None`` of others."""
        graph, call, found = self._graph, self._graph.ops[index], None
        if call.kind not in INDEXED | BAGS | ROWS_BY_ONE_INDEX:
            return None
        for position, tensor in enumerate(call.inputs):
            step, count = self._steps.get(tensor, 0), graph.tensors[tensor].num_elements
            places = self._places.get(tensor)
            if call.kind in BAGS and step:
                found = split_by_bags(graph.calls[index], given, graph.batch_size, position, step)
            elif call.kind in INDEXED and step == 1:
                found = split_by_own_rows(graph.calls[index], given, count, position)
            elif call.kind in INDEXED and tensor in self._repeated:
                count, dim = self._repeated[tensor]
                found = split_by_own_rows(graph.calls[index], given, count, position, dim)
            elif call.kind not in BAGS and places and given[position] == places.split:
                rows = places.size * graph.batch_size
                found = split_by_places(graph.calls[index], given, rows, position)
            if found is not None:
                return found
        return None

    def _count(self, index: int, op: GraphOp) -> None:
        args, tensors = op.args, self._graph.tensors
        made, source = self._graph.outputs[index][:1], op.inputs[0] if op.inputs else -1
        if op.num_outputs != 1:
            return
        meta = tensors[made[0]]
        if (
            not meta.num_elements
            or meta.num_elements % self._graph.batch_size
            or "int" not in meta.dtype
        ):
            return
        number = args.get("other") if len(op.inputs) == 1 else None
        if op.kind.startswith("arange."):
            step = args.get("step")
            if args.get("start") in (None, 0):
                self._steps[made[0]] = step if isinstance(step, int) else 1
        elif source in self._steps and tensors[source].num_elements == meta.num_elements:
            if op.kind == "mul.Tensor" and isinstance(number, int):
                self._steps[made[0]] = self._steps[source] * number
            elif op.kind in _SAME_ORDER or (op.kind == "add.Tensor" and number == 0):
                self._steps[made[0]] = self._steps[source]  # transformers adds an offset of zero
        elif op.kind in ("expand.default", "repeat.default") and self._steps.get(source) == 1:
            count, shape = tensors[source].num_elements, tensors[source].shape
            if count > 1 and max(shape) == count:
                dim = len(meta.shape) - len(shape) + shape.index(count)
                if meta.shape[dim] == count:
                    self._repeated[made[0]] = count, dim
        elif op.kind in ("clone.default", "_to_copy.default") and source in self._repeated:
            self._repeated[made[0]] = self._repeated[source]

    def _bound(self, index: int, op: GraphOp) -> None:
        made, args = self._graph.outputs[index], op.args
        if op.kind in _PLACES:
            shape = self._graph.tensors[op.inputs[0]].shape
            along = dimension(self._graph.calls[index], "dim", len(shape), default=-1)
            if shape and not (op.kind.startswith("arg") and args.get("dim") is None):
                self._below[made[_PLACES[op.kind]]] = shape[along]
        elif op.kind == "clamp.default":
            least, most = args.get("min"), args.get("max")
            if isinstance(least, int) and isinstance(most, int) and 0 <= least <= most:
                self._below[made[0]] = most + 1
        elif self._has_same_integers(index, op) and op.inputs[0] in self._below:
            self._below[made[0]] = self._below[op.inputs[0]]

    def _has_same_integers(self, index: int, op: GraphOp) -> bool:
        (made, *_) = self._graph.outputs[index] or (-1,)
        return op.kind in _SAME_VALUES and self._graph.tensors[made].dtype in _WIDE

    def _place(self, index: int, op: GraphOp) -> None:
        graph, made = self._graph, self._graph.outputs[index]
        if op.kind == "add.Tensor" and len(op.inputs) == 2 and op.args.get("alpha", 1) == 1:
            rank = len(graph.tensors[made[0]].shape)
            for within, start in (op.inputs, op.inputs[::-1]):
                size, shape = self._below.get(within, 0), graph.tensors[start].shape
                sizes = [each for each in shape if each != 1]
                if size and self._steps.get(start) == size and sizes == [graph.batch_size]:
                    dim = rank - len(shape) + shape.index(graph.batch_size)
                    self._places[made[0]] = _Places(size, S(dim))
        elif self._has_same_integers(index, op) and op.inputs[0] in self._places:
            size, split = self._places[op.inputs[0]]
            result = propagate(graph.calls[index], (split,), graph.batch_size)
            if result and result.inputs == (split,) and result.outputs[0].kind == "S":
                self._places[made[0]] = _Places(size, result.outputs[0])
