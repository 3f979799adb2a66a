"""Constants in a traced step: equal ones are made once, repeated ones for one sample only.

Models make masks and positions from sizes alone, often one for each layer and repeated for every
sample of the batch. Constants are made whole on every device. At sequences of 4,096 tokens a mask
of 256 samples takes 8 GiB, that of one sample 32 MiB.

Inserts ops into a traced step.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import Arg, OpCall, Placement, R, S
from heterog.graph.sharding_rules import RuleResult, claims_checked, legal_rules, local_args
from heterog.graph.sharding_rules.pointwise import FILLS


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
        keywords: Keyword arguments, likewise.

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


MADE_AT = "made_at"
"""Key of a node's annotation with the lines of code that made a constant."""

_Wish = tuple[int, int]
"""A tensor, and the dimension of its samples."""


def merge_equal_constants(graph: fx.Graph) -> None:
    """Compute equal constants of several ops only once: the mask of each layer, say.

    A mask of all samples and pairs of positions is the largest tensor of many language models, and
    a mask kept for each layer is as many of them.

    Constants of different lines of code stay apart even if they are equal. Otherwise a range of
    samples and one of positions would be one tensor where there are as many of both, and the step
    on such a batch would have other ops than on any other.
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
    """Constants of which a non-constant reader takes the part of its own samples."""
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


def _rules(graph: OpGraph, wanted: Sequence[_Wish]) -> list[tuple[int, int, RuleResult | None]]:
    """Op, dimension of its samples and rule of all that must be made for one sample, in order.

    The rule is ``None`` where samples begin: at an expansion, or at a tensor of one value.
    """
    wishes: dict[int, set[int]] = {}
    for tensor, dim in wanted:
        wishes.setdefault(tensor, set()).add(dim)
    found: list[tuple[int, int, RuleResult | None]] = []
    for op in range(graph.num_ops - 1, -1, -1):
        if not graph.is_constant[op] or graph.ops[op].num_outputs != 1:
            continue
        (tensor,) = graph.outputs[op]
        for dim in sorted(wishes.get(tensor, ())):
            if _begins(graph, op, dim):
                found.append((op, dim, None))
                continue
            rule = _rule(graph, op, dim)
            if rule is None:
                continue
            found.append((op, dim, rule))
            for source, place in zip(graph.ops[op].inputs, rule.inputs, strict=True):
                if place.kind == "S":
                    wishes.setdefault(source, set()).add(place.dim)
    return found[::-1]


def _begins(graph: OpGraph, op: int, dim: int) -> bool:
    """Whether an op repeats something for every sample that its inputs do not have per sample."""
    (tensor,) = graph.outputs[op]
    shape = graph.tensors[tensor].shape
    if shape[dim] != graph.batch_size:
        return False
    if graph.ops[op].kind != "expand.default":
        return graph.ops[op].kind in FILLS
    source = graph.tensors[graph.ops[op].inputs[0]].shape
    own = dim - (len(shape) - len(source))
    return own < 0 or source[own] == 1


def _rule(graph: OpGraph, op: int, dim: int) -> RuleResult | None:
    """The rule by which an op makes one sample of its result from one of its inputs."""
    with claims_checked(f"the args of op {op} do not fit its built-in sharding rule"):
        for rule in legal_rules(graph.call(op), graph.batch_size):
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

    def make_one(self, op: int, dim: int, rule: RuleResult | None) -> None:
        """Make one sample of an op's result, if each of its inputs has one.

        Args:
            op: A constant op.
            dim: Dimension of the samples in its result.
            rule: The rule that splits it along them; ``None`` where they begin.
        """
        graph, node = self._graph, self._node_of_op[op]
        (tensor,) = graph.outputs[op]
        if not isinstance(node.meta["val"], Tensor):
            return  # a list of one, which readers take apart
        if rule is None:
            rule = RuleResult(tuple(R for _ in graph.ops[op].inputs), (S(dim),))
        instead: dict[fx.Node, fx.Node] = {}
        places: dict[int, Placement] = {}
        for position, place in enumerate(rule.inputs):
            source = graph.ops[op].inputs[position]
            if places.setdefault(source, place) != place:
                return  # whole and one sample of the same tensor
            if place.kind == "S":
                if (source, place.dim) not in self._one:
                    return
                maker = self._node_of_op[int(graph.producer[source])]
                instead[maker] = self._one[source, place.dim]
        call = graph.call(op)
        local = local_args(call, rule, 1, graph.batch_size)
        args, keywords = _resized(node, call, local)
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
