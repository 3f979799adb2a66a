"""Traces a step twice: as it runs, and without the ops that write in place.

Each node is annotated with its module and phase, and a constant with the line of code that makes
it (``OpenModules``, ``annotate_backward``, ``LinesOfConstants``). ``clear_errors`` turns an error
of a step that cannot be captured into one line with module, line of code and advice. Fake tensors
have a class of their own and no memory: ``type(x) is Tensor`` would be false, and all addresses
equal. ``plain_tensors`` makes them answer as tensors do in training.
"""

import linecache
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import resources
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from heterog.errors import CaptureError
from heterog.graph.capture.one_process import (
    as_one_process,
    reads_statistics,
    statistics_of_whole_batch,
)
from heterog.graph.op_graph import Phase
from heterog.graph.python_state import PythonState
from heterog.graph.repeated_calls import check_repeats
from heterog.graph.static_shapes import plain_control_flow, with_static_shapes
from heterog.graph.step import Inputs, Step
from heterog.graph.traced_constants import MADE_AT, count_by_ranges, merge_equal_constants
from heterog.graph.value_checks import answered_guards, spread_checks
from heterog.graph.value_numbers import DATA_DEPENDENT, storage_of
from heterog.graph.workload import Workload
from heterog.user_code import words_of
from heterog.workers import Terminated
from heterog.yaml_files import load_shipped

_APART = 20  # made-up addresses give each storage 2^20 bytes


@contextmanager
def plain_tensors(state: PythonState) -> Iterator[None]:
    """Give fake tensors the class that tensors have in training, and distinct addresses.

    Args:
        state: Says which functions of the user ask for classes.
    """
    address = torch.UntypedStorage.data_ptr

    def of_storage(self: torch.UntypedStorage) -> int:
        return int(self._cdata << _APART if self.device.type == "meta" else address(self))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", _address))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", of_storage))
        if state.reads_class:  # only if needed: every attribute is then read through _attribute
            stack.enter_context(mock.patch.object(FakeTensor, "__getattribute__", _attribute))
        for variables in state.naming_type:
            if "type" not in variables:
                variables["type"] = _Type
                stack.callback(variables.pop, "type")
        yield


def _class_of(tensor: Any) -> type:
    return nn.Parameter if getattr(tensor, "_is_param", False) else Tensor


def _attribute(tensor: Any, name: str) -> Any:
    return _class_of(tensor) if name == "__class__" else Tensor.__getattribute__(tensor, name)


def _address(tensor: Tensor) -> int:
    return (storage_of(tensor) << _APART) + int(tensor.storage_offset()) * tensor.element_size()


class _Kind(type):
    """Makes ``_Type`` do what ``type`` does, with another answer for a fake tensor."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        if len(args) == 1 and type(args[0]) is FakeTensor:
            return _class_of(args[0])
        return type(*args, **keywords)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)


class _Type(type, metaclass=_Kind):
    """Stands in for the builtin ``type`` in functions."""


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    path = filename.replace("\\", "/")
    return "/torch/" not in path and "/heterog/graph/" not in path and not path.startswith("<")


class LinesOfConstants(TorchFunctionMode):
    """Annotates tensors that are made from sizes alone with the lines of code that make them.

    Two ranges from different lines (of samples and of positions, say) are equal if the batch has
    as many samples as positions. They must still stay apart: see ``merge_equal_constants``.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _device_constructors():
            return function(*args, **(kwargs or {}))
        with fx_traceback.annotate({MADE_AT: _users_lines()}):
            return function(*args, **(kwargs or {}))


def _users_lines() -> str:
    """The innermost running line of the user's code, and the line that called it.

    Two lines are enough to distinguish callers of one helper. More would distinguish layers.
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 2:
        if is_users(frame.f_code.co_filename):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)


def users_line() -> str:
    """Place and text of the innermost line of the user's code that runs now."""
    path, _, line = _users_lines().split(" ")[0].rpartition(":")
    return f"{path}:{line} (`{linecache.getline(path, int(line)).strip()}`)" if path else ""


class OpenModules:
    """Tracks the running module, and annotates every node traced inside it with its path.

    Meanwhile modules are called through a function of this class instead of hooks, because the
    user's code may ask which hooks a module has.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._open: list[str] = []
        self._call: Callable[..., Any] = nn.Module._call_impl

    @property
    def innermost(self) -> str:
        """Path of the module that runs now, or has raised an error."""
        name = self._open[-1] if self._open else ""
        return f"module '{name}'" if name else "the root module"

    def __enter__(self) -> "OpenModules":
        call, names, open_ = self._call, self._names, self._open

        def called(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            name = names.get(module)
            if name is None:
                return call(module, *args, **keywords)
            open_.append(name)
            with fx_traceback.annotate({"module": name}):
                result = call(module, *args, **keywords)
            open_.pop()
            return result

        nn.Module._call_impl = called  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        nn.Module._call_impl = self._call  # type: ignore[method-assign]


def annotate_backward(graph: fx.Graph) -> None:
    """Write module and phase of every node into its annotation, which the retrace keeps.

    A forward node carries its module already. A backward node gets the module of its forward twin,
    which has the same sequence number from autograd (the retrace renumbers forward nodes, so this
    comes before it). Forward nodes that autograd does not see inherit the previous node's
    ``seq_nr``, so the first node of a number is the twin. Adds that accumulate gradients have no
    twin, and ops outside any module have no annotation: both get the module of the input that was
    made last. For a sum of a residual stream's gradients that input is this layer's gradient; the
    other is the sum of all later layers.
    """
    twins: dict[int, str] = {}
    module_of: dict[fx.Node, str] = {}
    in_backward = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        is_backward = bool(node.meta.get("autograd_backward"))
        in_backward |= is_backward
        number = node.meta.get("seq_nr", -1)
        module = (node.meta.get("custom") or {}).get("module")
        if module is None and is_backward:
            module = twins.get(number)
        if module is None:
            inputs = [value for value in node.all_input_nodes if value in module_of]
            module = module_of[max(inputs)] if inputs else ""  # nodes compare by their place
        elif not is_backward and number >= 0:
            twins.setdefault(number, module)
        module_of[node] = module
        phase = Phase.BACKWARD if in_backward else Phase.FORWARD
        made_at = (node.meta.get("custom") or {}).get(MADE_AT)
        node.meta["custom"] = {"module": module, "phase": int(phase), MADE_AT: made_at}


@contextmanager
def clear_errors(workload: Workload, modules: "OpenModules | None") -> Iterator[None]:
    """Convert errors of tracing to one line that names module, line and the way out."""
    try:
        yield
    except (CaptureError, UnknownBuffers, KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        frame = next((each for each in frames if is_users(each.filename)), None)
        where = f"{frame.filename}:{frame.lineno} (`{frame.line}`)" if frame else _place(error)
        module = modules.innermost if modules else "making the model or its batch"
        if isinstance(error, DATA_DEPENDENT):
            raise CaptureError(
                f"workload '{workload.name}': {module} depends on tensor values at {where}. "
                f"A plan needs static shapes: {_way_out(error, frame)}"
            ) from error
        text = words_of(error)
        said = (text.strip().splitlines() or ["no message"])[0]
        ways = (each["advice"] for each in _advice()["failures"] if each["says"] in text)
        if way := next(ways, ""):
            said = f"{said.rstrip('.')}. {way}"
        raise CaptureError(
            f"workload '{workload.name}': the training step fails in {module} at {where}: "
            f"{type(error).__name__}: {said}"
        ) from error


@cache
def _advice() -> dict[str, list[dict[str, str]]]:
    """Advice for steps that cannot be captured; the head of the file says how it is found."""
    found: dict[str, list[dict[str, str]]] = load_shipped(
        resources.files("heterog.graph.capture") / "advice.yaml"
    )
    return found


def _way_out(error: BaseException, frame: traceback.FrameSummary | None) -> str:
    """Advice for code whose shapes depend on values."""
    op, line = getattr(error, "func", None), (frame.line or "") if frame else ""
    places = {
        "op": op._schema.name if isinstance(op, torch._ops.OpOverload) else "",
        "files": _files(error),
        "statement": line if isinstance(error, DataDependentOutputException) else "",
        "path": frame.filename.replace("\\", "/") if frame else "",
        "line": line,
    }
    return next(
        each["advice"]
        for each in _advice()["values"]
        if any(re.search(each[where], places[where]) for where in places.keys() & each.keys())
    )


def _files(error: BaseException) -> str:
    """The files in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(each.filename for each in frames).replace("\\", "/")


def _place(error: BaseException) -> str:
    """Where an error was raised whose traceback has no line of the user's code."""
    return "its backward pass" if "/torch/autograd/" in _files(error) else "unknown line"


class UnknownBuffers(Exception):
    """A step asks for values of buffers.

    Attributes:
        names: Their names.
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


@contextmanager
def _asked_buffers(step: Step, model: nn.Module, known: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise ``UnknownBuffers`` if the body asks for values of buffers alone."""
    counts = "num_batches_tracked"  # for these, there is a better way out
    buffers = {name for name, _ in model.named_buffers() if not name.endswith(counts)}
    try:
        yield
    except DATA_DEPENDENT as error:
        asked = step.numbers.asked
        if asked <= buffers and not asked <= known.keys():
            raise UnknownBuffers(asked) from error
        raise


def trace(
    workload: Workload,
    mode: FakeTensorMode,
    model: nn.Module,
    inputs: Inputs,
    known: Mapping[str, Tensor],
    *,
    checks_calls: bool,
) -> fx.GraphModule:
    """Trace the step as it runs; if it mutates tensors, trace it again without mutations.

    Raises:
        UnknownBuffers: it asks for values of buffers, which are not among those known.
    """
    step, (parameters, buffers, batch) = Step(workload, model, inputs, users_line, known), inputs
    # oneDNN's fused RNN kernel cannot be replayed from a graph; the plain one can.
    with (
        warnings.catch_warnings(action="ignore"),
        mode,
        # No code of a trace runs, and ``random_(1, 4)`` would have none: ``aten.random_.from``.
        _use_lazy_graph_module(True),
        torch.backends.mkldnn.flags(enabled=False),
        fx_traceback.preserve_node_meta(),
        as_one_process(),
        with_static_shapes(model),
        plain_control_flow(),
        OpenModules(model) as modules,
        LinesOfConstants(),
        answered_guards(),
        clear_errors(workload, modules),
        _asked_buffers(step, model, known),
    ):
        kept = PythonState({"the model": model, "the loss": workload.loss})
        with plain_tensors(kept):
            given = (dict(parameters), dict(buffers), batch)
            raw = make_fx(lambda *inputs: step.traced(*inputs))(*given)
            if checks_calls:
                check_repeats(workload.name, step, kept)
        flat = [value for value in pytree.tree_leaves(given) if isinstance(value, Tensor)]
        _clean(raw.graph)
        annotate_backward(raw.graph)
        if _mutates(raw.graph):
            # fx.Interpreter keeps the node metadata in the second trace; calling the module would
            # drop it. The trace already has all gradients, so autograd is off: some ops of a trace
            # cannot be differentiated (complex slices).
            with torch.no_grad():
                run = partial(fx.Interpreter(raw).run, enable_io_processing=False)
                traced = make_fx(functionalize(run, remove="mutations"))(*flat)
        else:
            traced = raw
            raw.graph.set_codegen(CodeGen())  # takes flat inputs, as a second trace does
            raw.recompile()
    if reads_statistics(traced.graph):
        with statistics_of_whole_batch():
            return trace(workload, mode, model, inputs, known, checks_calls=False)
    spread_checks(traced)
    count_by_ranges(traced)
    merge_equal_constants(traced.graph)
    traced.graph.eliminate_dead_code()
    return traced


def _mutates(graph: fx.Graph) -> bool:
    """Whether an op of a trace writes to one of its inputs.

    Ops of batch normalisation write running statistics, though their schemas do not say so.
    """
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    return any(
        target._schema.is_mutable or "batch_norm" in target._schema.name
        if isinstance(target, torch._ops.OpOverload)
        else target is not operator.getitem
        for target in targets
    )


def _clean(graph: fx.Graph) -> None:
    """Take out of a trace, or replace, what cannot be run again.

    These are entries of the batch that are no tensors (``None`` masks, numbers), the ranges of
    ``record_function``, which compute nothing, and the zeros without memory with which forward
    derivatives (``jvp``) begin.
    """
    _conjugate_numbers(graph)
    for node in reversed(graph.nodes):  # the end of a range reads its beginning
        is_plain = node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor)
        if is_plain or getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)
        elif node.target is torch.ops.aten._efficientzerotensor.default:
            node.target = torch.ops.aten.zeros.default


def _conjugate_numbers(graph: fx.Graph) -> None:
    """Conjugate complex numbers of Python, as gradients of products do; no kernel takes them."""
    numbers = {
        node: node.args[0].conjugate()
        for node in graph.nodes
        if node.target is torch.ops.aten._conj.default and isinstance(node.args[0], complex)
    }
    for reader in {reader: None for node in numbers for reader in node.users}:
        reader.args = fx.map_arg(reader.args, lambda each: numbers.get(each, each))
    for node in numbers:
        graph.erase_node(node)
