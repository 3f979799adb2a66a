"""Constants in a traced step: equal ones are made once, repeated ones for one sample only.

Models make masks and positions from sizes alone, often one for each layer and repeated for every
sample of the batch. Constants are made whole on every device. At sequences of 4,096 tokens a mask
of 256 samples takes 8 GiB, a mask of one sample 32 MiB.

``add_ops_of_more_samples`` is for a last batch of one sample, whose step has fewer ops than the
planned step. There are three reasons. Before torch views a tensor in another shape, it copies the
tensor unless its elements are consecutive; the elements of one sample often are when those of
several are not. A value that is broadcast over samples has a gradient that is summed over them,
unless there is only one. Constants that all samples share are made once and expanded, but with one
sample any dimension of size 1 may be the batch. The missing ops have no effect on one sample, so
they are added, and the plan can run the step.
"""

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from heterog.graph.batch_plan import batch_plan, made_at_birth
from heterog.graph.op_graph import GraphOp, OpGraph, Phase
from heterog.graph.placement import Arg, OpCall, Placement, S
from heterog.graph.sharding_rules import RuleResult, claims_checked, legal_rules, local_args


def insert_before(
    module: fx.GraphModule,
    before: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
) -> fx.Node:
    """Insert an op before another one, in the same module and phase.

    Args:
        module: Traced step.
        before: Op before which it runs.
        target: Function of the op.
        args: Arguments, with nodes for tensors.
        keywords: Keyword arguments, with nodes for tensors.

    Returns:
        The node, with the (fake) value that it makes.
    """
    keywords = keywords or {}
    with module.graph.inserting_before(before):
        node = module.graph.call_function(target, args, keywords)
    for word in ("custom", "seq_nr", "autograd_backward"):
        if word in before.meta:
            node.meta[word] = before.meta[word]

    def value_of(source: fx.Node) -> Any:
        if source.op == "get_attr":
            return getattr(module, str(source.target))
        return source.meta["val"]

    values, named = fx.map_arg((args, keywords), value_of)
    fakes = [each for each in pytree.tree_leaves(values) if isinstance(each, FakeTensor)]
    with fakes[0].fake_mode if fakes else nullcontext():
        node.meta["val"] = target(*values, **named)
    return node


def node_read(reader: fx.Node, place: int = 0) -> fx.Node:
    """An argument of a node that is a node."""
    node = reader.args[place]
    assert isinstance(node, fx.Node)
    return node


MADE_AT = "made_at"
"""Key of a node's annotation with the lines of code that made a constant."""

_Wish = tuple[int, int]
"""A tensor, and the dimension of its samples."""


def merge_equal_constants(graph: fx.Graph) -> None:
    """Compute equal constants of several ops only once (for example the mask of each layer).

    A mask of all samples and pairs of positions is the largest tensor of many language models, and
    each layer would keep its own.

    Constants of different lines of code stay apart even if they are equal. Otherwise a range of
    samples and a range of positions would be one tensor if a batch has as many samples as
    positions, and its step would have other ops than the step on any other batch.
    """
    constant: set[fx.Node] = set()
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        is_random = torch.Tag.nondeterministic_seeded in node.target.tags
        if is_random or not all(source in constant for source in node.all_input_nodes):
            continue
        constant.add(node)
        line = (node.meta.get("custom") or {}).get(MADE_AT)
        same = known.setdefault(repr((line, node.target, node.args, node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            constant.discard(node)
            graph.erase_node(node)


def count_by_ranges(module: fx.GraphModule) -> None:
    """Make constants that count from zero by ``arange``, of which rules know the values.

    ``x[range(len(x)), labels]`` has such a constant: it takes from each sample its own element.
    """
    for node in list(module.graph.nodes):
        value = getattr(module, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or not node.users:
            continue
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        if value.dtype != torch.int64 or value.ndim != 1 or len(value) < 2 or not is_plain:
            continue
        reader = min(node.users)
        with _disable_current_modes():
            counts = torch.equal(value, torch.arange(len(value)))
        if counts and isinstance(reader.meta.get("val"), FakeTensor):
            with reader.meta["val"].fake_mode:
                made = insert_before(module, reader, torch.ops.aten.arange.default, (len(value),))
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)


def make_repeated_constants_once(
    graph: OpGraph, module: fx.GraphModule, node_of_op: Sequence[fx.Node]
) -> bool:
    """Make constants that are equal for all samples for one sample, and expand them for readers.

    An op that splits along the batch computes some samples of its result from the same samples of
    its inputs. If these are equal, so are the samples of the result, and one of them is enough.
    Where readers take the part of their own samples, the expansion is split when it is made (see
    ``batch_plan``), and no device makes more than it needs.

    Args:
        graph: The step as it was read.
        module: The traced step; it is changed.
        node_of_op: Its node of each op that is no update.

    Returns:
        Whether anything was changed; the step must then be read again.
    """
    wanted = _wanted(graph)
    samples = _Samples(graph, module, node_of_op)
    for op, dim, rule in _rules(graph, wanted):
        samples.make_one(op, dim, rule)
    changed = [samples.expand(tensor, dim) for tensor, dim in wanted]
    module.graph.eliminate_dead_code()
    return any(changed)


def _wanted(graph: OpGraph) -> list[_Wish]:
    """Constants from which a non-constant reader takes the part of its own samples."""
    plan = batch_plan(graph)
    found: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        if graph.is_constant[index]:
            continue
        for tensor, place in zip(op.inputs, plan.needed[index], strict=True):
            maker = int(graph.producer[tensor])
            is_made = maker >= 0 and graph.is_constant[maker] and graph.ops[maker].num_outputs == 1
            if not is_made or place.kind != "S" or place.outer != 1:
                continue
            # If a sample has several rows, an expansion of one of them is no view.
            if graph.tensors[tensor].shape[place.dim] == graph.batch_size:
                found.setdefault(tensor, place.dim)
    return list(found.items())


def _rules(graph: OpGraph, wanted: Sequence[_Wish]) -> list[tuple[int, int, RuleResult]]:
    """Ops that must be made for one sample, in order, each with its samples' dimension and rule.

    The inputs of the op that first repeats for samples, an expansion or a fill, are whole.
    """
    wishes = {tensor: {dim} for tensor, dim in wanted}
    found: list[tuple[int, int, RuleResult]] = []
    for op in range(graph.num_ops - 1, -1, -1):
        if not graph.is_constant[op] or graph.ops[op].num_outputs != 1:
            continue
        (tensor,) = graph.outputs[op]
        for dim in sorted(wishes.get(tensor, ())):
            rule = made_at_birth(graph, op, S(dim)) or _rule(graph, op, dim)
            if rule is None:
                continue
            found.append((op, dim, rule))
            for source, place in zip(graph.ops[op].inputs, rule.inputs, strict=True):
                if place.kind == "S":
                    wishes.setdefault(source, set()).add(place.dim)
    return found[::-1]


def _rule(graph: OpGraph, op: int, dim: int) -> RuleResult | None:
    """The rule by which an op makes one sample of its result from one of its inputs."""
    with claims_checked(f"the args of op {op} do not fit its built-in sharding rule"):
        for rule in legal_rules(graph.calls[op], graph.batch_size):
            split = any(place.kind == "S" for place in rule.inputs)
            if split and rule.outputs == (S(dim),) and rule.special is None:
                return rule
    return None


class _Samples:
    """One sample of each constant with equal samples, as nodes of the traced step."""

    def __init__(
        self, graph: OpGraph, module: fx.GraphModule, node_of_op: Sequence[fx.Node]
    ) -> None:
        self._graph = graph
        self._module = module
        self._node_of_op = node_of_op
        self._one: dict[_Wish, fx.Node] = {}

    def make_one(self, op: int, dim: int, rule: RuleResult) -> None:
        """Make one sample of an op's result, if each of its inputs has one.

        Args:
            op: A constant op.
            dim: Dimension of the samples in its result.
            rule: The rule that splits it along them.
        """
        graph, node = self._graph, self._node_of_op[op]
        (tensor,) = graph.outputs[op]
        if not isinstance(node.meta["val"], Tensor):
            return  # a list of one tensor
        instead: dict[fx.Node, fx.Node] = {}
        places: dict[int, Placement] = {}
        for source, place in zip(graph.ops[op].inputs, rule.inputs, strict=True):
            if places.setdefault(source, place) != place:
                return  # the op needs a tensor both whole and for one sample
            if place.kind == "S":
                if (source, place.dim) not in self._one:
                    return
                maker = self._node_of_op[int(graph.producer[source])]
                instead[maker] = self._one[source, place.dim]
        call = graph.calls[op]
        args, keywords = _resized(node, call, local_args(call, rule, 1, graph.batch_size))
        args, keywords = fx.map_arg((args, keywords), lambda given: instead.get(given, given))
        self._one[tensor, dim] = insert_before(self._module, node, node.target, args, keywords)

    def expand(self, tensor: int, dim: int) -> bool:
        """Make all readers of a constant read an expansion of one sample, if there is one."""
        maker = int(self._graph.producer[tensor])
        one, node = self._one.get((tensor, dim)), self._node_of_op[maker]
        if one is None or self._graph.ops[maker].kind == "expand.default":
            return False
        size = list(self._graph.tensors[tensor].shape)
        node.replace_all_uses_with(
            insert_before(self._module, node, torch.ops.aten.expand.default, (one, size))
        )
        return True


def _resized(
    node: fx.Node, call: OpCall, local: Mapping[str, Arg]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a node, with other sizes where they differ on a part of the batch."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    args, keywords = list(node.args), dict(node.kwargs)
    for position, argument in enumerate(target._schema.arguments):
        value = local.get(argument.name)
        if value == call.args.get(argument.name):
            continue
        size: Any = list(value) if isinstance(value, tuple) else value
        if not argument.kwarg_only and position < len(args):
            args[position] = size
        else:
            keywords[argument.name] = size
    return tuple(args), keywords


_COPY = "clone.default"
_SUM = "sum.dim_IntList"
_EXPAND = "expand.default"
_VIEW = "view.default"
_VIEW_OF_COPY = "_unsafe_view.default"
"""Op that torch records for a view of a copy that no other op reads."""
_NO_OP: tuple[GraphOp | None, range] = (None, range(0))
"""Behind the last op of a step and its outputs."""


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
    of_step = zip(planned.ops, planned.outputs, strict=True)
    ops = takewhile(lambda each: each[0].phase is not Phase.UPDATE, of_step)
    op, outputs = next(ops, _NO_OP)
    for node in list(traced.nodes):
        if node.op == "call_function" and node.target is operator.getitem:
            maker, output = node.args
            if maker in first_output:
                made_by[first_output[maker] + int(output)] = node
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        kind = str(node.target).removeprefix("aten.")
        while op is not None and op.kind in missing and op.kind != kind:
            source, (tensor,) = made_by.get(op.inputs[0]), outputs
            added = source and _added(traced, op, source, node)
            if source is None or added is None:
                return
            instead_of[tensor], made_by[tensor] = source, added
            op, outputs = next(ops, _NO_OP)
        if op is None:
            return
        for tensor in op.inputs:
            if tensor in instead_of:
                node.replace_input_with(instead_of[tensor], made_by[tensor])
        if (kind, op.kind) == (_VIEW, _VIEW_OF_COPY):
            node.target = torch.ops.aten._unsafe_view.default
        first_output[node] = next(iter(outputs), -1)
        made_by[first_output[node]] = node
        op, outputs = next(ops, _NO_OP)


def _num_samples(inputs: Sequence[fx.Node], planned: OpGraph) -> int:
    """Number of samples of the traced step, by the first input that has some."""
    for tensor, (node, place) in enumerate(zip(inputs, planned.batch_placements, strict=False)):
        if place.kind == "S" and node.op == "placeholder":
            size = int(node.meta["val"].shape[place.dim])
            return size * planned.batch_size // planned.tensors[tensor].shape[place.dim]
    return 0


def _added(graph: fx.Graph, op: GraphOp, source: fx.Node, before: fx.Node) -> fx.Node | None:
    """Add a copy, sum or expansion of a node's output; ``None`` if it would change the value."""
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
        ranks = range(-value.dim(), value.dim())
        if not all(isinstance(d, int) and d in ranks and value.shape[d] == 1 for d in dims):
            return None
        target, args, options = torch.ops.aten.sum.dim_IntList, (source, list(dims), True), {}
    elif op.kind == _EXPAND:
        target, args, options = torch.ops.aten.expand.default, (source, list(value.shape)), {}
    with graph.inserting_before(before):
        node = graph.call_function(target, args, options)
    place = {"module": op.module, "phase": int(op.phase)}
    node.meta = {**before.meta, "custom": place, "val": value.contiguous()}
    return node
