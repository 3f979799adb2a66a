"""Inserts ops into a traced step."""

from contextlib import nullcontext
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


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
