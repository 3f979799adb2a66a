"""Ops that have no effect on a single sample, added so that its step has the planned ops.

Before torch views a tensor in another shape, it copies it unless its elements are consecutive.
Those of one sample often are where those of several are not. And a value that is broadcast over
the samples has a gradient that is summed over them, unless there is only one. And constants that
are alike for all samples are made once and expanded (``traced_constants``), while in the step on
one sample any dimension of size 1 may be that of the samples. So the step on a last batch of one
sample has other ops than the planned one. To run it by the plan, the missing ops are added.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from heterog.graph.op_graph import GraphOp, OpGraph, Phase

_COPY = "clone.default"
_SUM = "sum.dim_IntList"
_EXPAND = "expand.default"
_VIEW = "view.default"
_VIEW_OF_COPY = "_unsafe_view.default"
"""Op that torch records for a view of a copy that nothing else reads."""


def add_ops_of_more_samples(traced: fx.Graph, planned: OpGraph) -> None:
    """Add the copies and sums that a planned step has to the step on one sample.

    Each added op returns its input unchanged, so the step computes the same.

    Args:
        traced: The step on one sample; it is changed.
        planned: The same step on several samples.
    """
    inputs = [node for node in traced.nodes if node.op == "placeholder"]
    inputs += [node for node in traced.nodes if node.op == "get_attr"]
    made_by = dict(enumerate(inputs))
    missing = {_COPY, _SUM, _EXPAND} if _num_samples(inputs, planned) == 1 else {_COPY, _SUM}
    instead_of: dict[int, fx.Node] = {}
    """Node that readers read instead of an added op's result, by the result's tensor."""
    first_output: dict[Any, int] = {}
    walk = _Walk(planned)
    for node in list(traced.nodes):
        if node.op == "call_function" and node.target is operator.getitem:
            maker, output = node.args
            if maker in first_output:
                made_by[first_output[maker] + int(output)] = node
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        kind = str(node.target).removeprefix("aten.")
        while walk.op is not None and walk.op.kind in missing and walk.op.kind != kind:
            source, tensor = made_by.get(walk.op.inputs[0]), walk.first_output
            added = source and _added(traced, walk.op, source, node)
            if source is None or added is None:
                return
            instead_of[tensor], made_by[tensor] = source, added
            walk.advance()
        if walk.op is None:
            return
        for tensor in walk.op.inputs:
            if tensor in instead_of:
                node.replace_input_with(instead_of[tensor], made_by[tensor])
        if (kind, walk.op.kind) == (_VIEW, _VIEW_OF_COPY):
            node.target = torch.ops.aten._unsafe_view.default
        first_output[node] = walk.first_output
        made_by[walk.first_output] = node
        walk.advance()


def _num_samples(inputs: Sequence[fx.Node], planned: OpGraph) -> int:
    """Number of samples of the traced step, by the first input that has some."""
    for tensor, (node, place) in enumerate(zip(inputs, planned.batch_placements, strict=False)):
        if place.kind == "S" and node.op == "placeholder":
            size = int(node.meta["val"].shape[place.dim])
            return size * planned.batch_size // planned.tensors[tensor].shape[place.dim]
    return 0


class _Walk:
    """Goes through a graph's ops in order.

    Attributes:
        op: The next op, ``None`` at the end.
        first_output: The first tensor that it makes.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._position = -1
        self.op: GraphOp | None = None
        self.first_output = -1
        self.advance()

    def advance(self) -> None:
        """Go on to the next op."""
        self._position += 1
        ops = self._graph.ops
        done = self._position == len(ops) or ops[self._position].phase is Phase.UPDATE
        self.op = None if done else ops[self._position]
        self.first_output = -1 if done else next(iter(self._graph.outputs[self._position]), -1)


def _added(graph: fx.Graph, op: GraphOp, source: fx.Node, before: fx.Node) -> fx.Node | None:
    """Add a copy or sum of a node's output; ``None`` where that would have another value."""
    value = source.meta["val"] if source.op != "get_attr" else None
    if not isinstance(value, Tensor):
        return None  # the steps differ in the ops before this one
    args: tuple[Any, ...] = (source,)
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    target = torch.ops.aten.clone.default
    if op.kind == _SUM:
        dims = op.args["dim"]
        if not isinstance(dims, tuple) or not op.args["keepdim"] or op.args["dtype"] is not None:
            return None
        if any(dim not in range(-value.dim(), value.dim()) for dim in dims):
            return None
        if any(value.shape[int(dim)] != 1 for dim in dims if isinstance(dim, int)):
            return None
        target, args, options = torch.ops.aten.sum.dim_IntList, (source, list(dims), True), {}
    elif op.kind == _EXPAND:
        target, args, options = torch.ops.aten.expand.default, (source, list(value.shape)), {}
    with graph.inserting_before(before):
        node = graph.call_function(target, args, options)
    place = {"module": op.module, "phase": int(op.phase)}
    node.meta = {**before.meta, "custom": place, "val": value.contiguous()}
    return node
