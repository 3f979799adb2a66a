"""Refuses steps with dtypes that fake tensors take and no kernel does.

Fake tensors run no kernel, and many ops check dtypes only there: a cross entropy of labels in
int32, a product of float64 and float32. So each op of torch that gets unlike dtypes, or integers,
is tried on zeros of its dtypes, two along each axis if its other arguments allow that.
"""

import re
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from heterog.errors import CaptureError
from heterog.graph.capture.reading import CapturedStep
from heterog.graph.op_graph import Phase
from heterog.graph.workload import Workload

_MOST_ELEMENTS = 1 << 24
"""Most elements of an op's results, and of its inputs where all of them are made."""
_FEW, _ALL = 2, _MOST_ELEMENTS
"""Most elements along an axis."""
_MOST_NUMBER = 1 << 20
"""Largest number among the arguments of an op that is tried; it may be the size of a result."""
_SAYS_DTYPES = re.compile(
    r"\bd?types?\b|not implemented for '(Int|Long|Short|Char|Byte|Bool)'", re.IGNORECASE
)
"""Errors about dtypes. Others come of sizes, or of kernels for half precision that CPUs lack."""
_PRODUCTS = {each.__name__ for each in flop_registry if not each.__name__.startswith("_")}


def check_dtypes(workload: Workload, step: CapturedStep) -> None:
    """Refuse ops that get tensors of dtypes which torch does not take.

    Raises:
        CaptureError: names the op, its module and the dtypes, and has what torch says.
    """
    graph, tried = step.graph, set[str]()
    for op, node in zip(graph.ops, step.node_of_op, strict=False):  # updates have no node
        dtypes = list(dict.fromkeys(graph.tensors[each].dtype for each in op.inputs))
        fault = ""
        if len(dtypes) > 1 and op.kind.partition(".")[0] in _PRODUCTS:
            fault = "torch multiplies only tensors of one dtype"
        # Fake statistics, which backward ops read, may have other dtypes than those of kernels.
        elif op.phase == Phase.FORWARD and _is_unusual(dtypes) and _is_of_torch(node):
            fault = _refusal(node, tried)
        if fault:
            place = f"module '{op.module}'" if op.module else "the root module"
            raise CaptureError(
                f"workload '{workload.name}': {op.kind} in {place} gets {' and '.join(dtypes)}, "
                f"and {fault}. Convert one of them in forward, or make the batch of another dtype "
                "(.float() where weights are float32, .long() for labels)."
            )


def _refusal(node: fx.Node, tried: set[str]) -> str:
    """What torch says of the dtypes that an op gets; empty if it takes them, or was tried before.

    Args:
        node: Call of the op.
        tried: Calls that were tried, alike but for sizes; this one is added.
    """
    given = node.args, node.kwargs
    key = f"{node.target} {fx.map_arg(given, lambda each: _likeness(each.meta['val']))}"
    numbers = (each for each in pytree.tree_leaves(given) if isinstance(each, int))
    if key in tried or any(abs(number) > _MOST_NUMBER for number in numbers):
        return ""
    tried.add(key)
    elements = sum(each.meta["val"].numel() for each in node.all_input_nodes)
    for most in (_FEW, *([_ALL] if elements <= _MOST_ELEMENTS else [])):
        try:
            # Where a size among the arguments is that of a tensor, a kernel could read beyond it.
            with FakeTensorMode():
                made = pytree.tree_leaves(_call_on_zeros(node, most))
        except Exception:
            continue
        if sum(each.numel() for each in made if isinstance(each, Tensor)) > _MOST_ELEMENTS:
            return ""
        try:
            with unset_fake_temporarily():
                _call_on_zeros(node, most)
        except Exception as error:
            said = str(error).strip().partition("\n")[0].rstrip(".")
            return f"torch says: {said}" if _SAYS_DTYPES.search(said) else ""
        return ""
    return ""


def _is_of_torch(node: fx.Node) -> bool:
    """Whether a call has no effects that are not known; a custom op may do anything."""
    return getattr(node.target, "namespace", "") == "aten"


def _is_unusual(dtypes: list[str]) -> bool:
    return len(dtypes) > 1 or any(not getattr(torch, each).is_floating_point for each in dtypes)


def _likeness(value: Any) -> str:
    return f"{value.dtype} {value.dim()}" if isinstance(value, Tensor) else ""


def _call_on_zeros(node: fx.Node, most: int) -> Any:
    def zeros(each: fx.Node) -> Any:
        value = each.meta["val"]
        return torch.zeros([min(size, most) for size in value.shape], dtype=value.dtype)

    args, keywords = fx.map_arg((node.args, node.kwargs), zeros)
    with torch.no_grad():
        return node.target(*args, **keywords)  # type: ignore[operator]
