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
from functools import partial
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
        ways = (way for part, way in _WAYS_OUT_OF_FAILURE.items() if part in text)
        if way := next(ways, ""):
            said = f"{said.rstrip('.')}. {way}"
        raise CaptureError(
            f"workload '{workload.name}': the training step fails in {module} at {where}: "
            f"{type(error).__name__}: {said}"
        ) from error


_OF_CTC = (
    "CTC keeps a table that is as wide as the longest target, which torch reads from the values "
    "of target_lengths. Write its recursion over time with torch.logsumexp, on targets padded to "
    "one width, or train with another loss."
)


_WAYS_OUT: tuple[tuple[str, str, str], ...] = (
    ("op", "^aten::_ctc_loss$", _OF_CTC),
    (
        "op",
        "^aten::bincount$",
        "bincount is as long as the largest value says. Say how many values there are, "
        "minlength=classes.",
    ),
    (
        "op",
        "^aten::repeat_interleave$",
        "how often rows are repeated are such values. Say how many come of it: output_size=n.",
    ),
    (
        "op",
        "^aten::_unique2$",
        "how many unlike values there are is such a value. Find them where the data is loaded, "
        "and pass each sample's place among them, with a number of places that is the same for "
        "all batches.",
    ),
    (
        "op",
        "^aten::linalg_lstsq$",
        "how many residuals there are is such a value. torch.linalg.pinv(a) @ b, or solve of "
        "a.mT @ a and a.mT @ b, gives the same solution.",
    ),
    (
        "op",
        "^aten::_pack_padded_sequence$",
        "a packed sequence has as many steps as the values of lengths say. Run the layers on the "
        "padded batch; where states are read at the last step of each sample, take them from the "
        "outputs with gather, and mask what lies behind.",
    ),
    (
        "files",
        r"/torch/nn/modules/batchnorm\.py",
        "BatchNorm with momentum=None divides by the number of steps, which is such a value. "
        "Give it a momentum (0.1 is torch's own), for a moving average instead of the mean over "
        "all steps.",
    ),
    (
        "files",
        r"/torch/nn/modules/adaptive\.py",
        "an adaptive softmax computes each cluster of words for the samples that have one of "
        "them. functional.nll_loss(head.log_prob(x), labels) is the same loss, of all words.",
    ),
    (
        "statement",
        "^(if|elif|while) ",
        "values decide there which ops run, and all steps of a plan run the same. Use "
        "torch.where, or settings with which the code always goes one way (no LayerDrop, say); an "
        "`if` that does nothing but raise an error may stay.",
    ),
    (
        "statement",
        "^assert ",
        "an assert may stay if it asks tensors, and needs each answer: leave out int() and "
        "float(), and write torch.logical_or instead of `or`.",
    ),
    ("path", r"/transformers/loss/loss_ctc\.py", _OF_CTC),
    (
        "path",
        "/pytorch_metric_learning/",
        "how many pairs have equal labels is such a value. Write the loss over the matrix of all "
        "pairs of the batch, masked by labels[:, None] == labels.",
    ),
    (
        "path",
        r"/torch_geometric/utils/loop\.py",
        "how many self loops a graph has is such a value. Add or remove them in the data once "
        "(torch_geometric.transforms.AddSelfLoops); layers that add them have "
        "add_self_loops=False.",
    ),
    (
        "path",
        "/torch_geometric/",
        "pass the number of nodes or graphs where it is counted otherwise (size=labels.shape[0] "
        "of a pooling layer, dim_size, num_nodes), and drop nodes or edges from the data, not in "
        "the model.",
    ),
    *(
        (
            "path",
            f"/transformers/models/{name}/",
            "which tokens attend to all others is such a value, and no setting of this model "
            f"leaves the question out. {other} attends to neighbours as well, and can be planned.",
        )
        for name, other in (
            ("longformer", "ModernBERT (local_attention), or Mistral (sliding_window),"),
            ("led", "LongT5 (encoder_attention_type='local')"),
        )
    ),
    (
        "path",
        "/transformers/models/videomae/",
        "a mask as an index gives as many patches as it has truths. Where all samples keep as "
        "many, pass the places of these and take them with torch.gather, in a copy of the "
        "embeddings and of the loss; VideoMAEForVideoClassification masks nothing.",
    ),
    (
        "path",
        "/transformers/models/autoformer/",
        "by how many steps a series is delayed is such a value, and no setting of this model "
        "leaves the question out. TimeSeriesTransformer with encoder_layerdrop and "
        "decoder_layerdrop of 0 can be planned.",
    ),
    (
        "path",
        "/transformers/models/speecht5/",
        "its loss of spectra picks what is no padding. Train with a loss of your own on "
        "speech_decoder_postnet(speecht5(...)[0]), as sums over products with the mask, divided "
        "by the sum of the mask; layer drop needs encoder_layerdrop=0 and decoder_layerdrop=0, "
        "drawn masks apply_spec_augment=False.",
    ),
    (
        "path",
        "/transformers/",
        "choose eager attention or dense experts in the model's config, leave out what masks or "
        "drops at random (SpecAugment, LayerDrop), or take a head that does not pick elements by "
        "their values: computing with all of them and masking the result comes to the same.",
    ),
    (
        "line",
        r"one_hot\(",
        "one_hot is as wide as the largest value says. Give it the number of classes.",
    ),
    (
        "line",
        r"^(?=.*\.max\(\)).*(int\(|\+ 1)",
        "how many there are (graphs, nodes, words) is such a value. Take it from a shape "
        "(labels.shape[0], mask.shape[1]), or hand it in as a number, an entry of the batch that "
        "is no tensor.",
    ),
    (
        "line",
        r"int\(self\.\w+\)|self\.\w+\.item\(\)",
        "a number that is read is the same in all steps of a plan. Keep it a tensor: "
        "buffer.index_copy_(0, (place + torch.arange(n)) % len(buffer), rows) writes rows at a "
        "place that goes round, x[:, place] looks one up.",
    ),
    (
        "line",
        "",
        "avoid .item(), .tolist(), nonzero, masks as indices (x[mask]) and `if` on tensors there; "
        "torch.where or a product with the mask usually does the same.",
    ),
)
"""Advice for code whose shapes depend on values, each by a place and a pattern to find there: the
name of the op, the files of the error's traceback, the user's line if it converts a tensor to
bool, its file, or its text. The first match counts; the last one matches everything."""


_OF_NESTED = (
    "A nested tensor has as many elements as its lengths say, and a plan needs static shapes: pad "
    "the sequences to one length, and mask what lies behind."
)
_WAYS_OUT_OF_FAILURE = {
    "shape_env must not be None": _OF_NESTED,
    "nested_tensor": _OF_NESTED,
    ".numpy() is not supported": (
        "numpy reads values, which a plan does not have: write it with torch, or compute it where "
        "the data is loaded and pass the result as a tensor of the batch."
    ),
}
"""Advice by what an error of torch says; its first line comes before."""


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
    return next(advice for where, what, advice in _WAYS_OUT if re.search(what, places[where]))


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
