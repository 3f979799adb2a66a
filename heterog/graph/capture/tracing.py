"""Traces a step twice: as it runs, and without the ops that write in place."""

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from heterog.graph.capture.places import (
    LinesOfConstants,
    OpenModules,
    annotate_backward,
    users_line,
)
from heterog.graph.capture.refusals import clear_errors
from heterog.graph.higher_order import plain_control_flow
from heterog.graph.python_state import PythonState
from heterog.graph.repeated_calls import check_repeats
from heterog.graph.static_shapes import with_static_shapes
from heterog.graph.step import Step
from heterog.graph.traced_constants import merge_equal_constants
from heterog.graph.value_checks import answered_guards, spread_checks
from heterog.graph.workload import Workload


def trace(
    workload: Workload,
    mode: FakeTensorMode,
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Any,
    *,
    checks_calls: bool,
) -> fx.GraphModule:
    """Trace the step as it runs, and if it mutates tensors a second time without that."""
    step = Step(workload, model, parameters, buffers, batch, where=users_line)
    # oneDNN's fused RNN kernel cannot be replayed from a graph; the plain one can.
    with (
        warnings.catch_warnings(action="ignore"),
        mode,
        torch.backends.mkldnn.flags(enabled=False),
        fx_traceback.preserve_node_meta(),
        with_static_shapes(model),
        plain_control_flow(),
        OpenModules(model) as modules,
        LinesOfConstants(),
        answered_guards(),
        clear_errors(workload, modules),
    ):
        kept = PythonState({"the model": model, "the loss": workload.loss})
        raw = make_fx(lambda *inputs: step.traced(*inputs))(dict(parameters), dict(buffers), batch)
        if checks_calls:
            check_repeats(workload.name, step, kept)
        flat, _ = pytree.tree_flatten((dict(parameters), dict(buffers), batch))
        flat = [value for value in flat if isinstance(value, Tensor)]
        _drop_unused_placeholders(raw)
        annotate_backward(raw.graph)
        if _mutates(raw.graph):
            # fx.Interpreter keeps the node metadata in the second trace; calling the module would
            # drop it. All gradients are in the step already: some ops have none (complex slices).
            with torch.no_grad():
                traced = make_fx(functionalize(_interpret(raw), remove="mutations"))(*flat)
        else:
            traced = raw
            raw.graph.set_codegen(CodeGen())  # inputs one by one, as those of a second trace
            raw.recompile()
    spread_checks(traced)
    merge_equal_constants(traced.graph)
    traced.graph.eliminate_dead_code()
    return traced


def _mutates(graph: fx.Graph) -> bool:
    """Whether an op of a trace writes to a tensor that it is given.

    Those of batch normalisation that keep statistics do, though their schemas do not say so.
    """
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    return any(
        target._schema.is_mutable or "batch_norm" in target._schema.name
        if isinstance(target, torch._ops.OpOverload)
        else target is not operator.getitem
        for target in targets
    )


def _drop_unused_placeholders(module: fx.GraphModule) -> None:
    """Remove placeholders of batch entries that are not tensors (``None`` masks, numbers)."""
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor):
            module.graph.erase_node(node)


def _interpret(module: fx.GraphModule) -> Callable[..., Any]:
    def run(*values: Tensor) -> Any:
        return fx.Interpreter(module).run(*values, enable_io_processing=False)

    return run
