"""Captures one training step of a workload as an ``OpGraph``, on fake tensors.

The recipe: trace forward and ``autograd.grad`` with ``make_fx`` over fake parameters, buffers and
batch (no weight is ever allocated), then retrace through ``functionalize(remove="mutations")``,
which drops in-place ops but keeps real views: ``mutations_and_views`` would add copies that never
run. Forward hooks annotate every node with its module; a backward node finds its forward twin by
autograd's sequence number. Only this file, ``static_shapes``, ``value_checks`` and ``inserting``
touch private names of torch.
"""

import linecache
import operator
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from heterog.errors import CaptureError
from heterog.graph.collector import without_collector
from heterog.graph.function_caches import caches_without_fakes
from heterog.graph.higher_order import plain_control_flow
from heterog.graph.one_sample import add_ops_of_more_samples
from heterog.graph.op_costs import (
    bytes_read_and_written,
    convolution_flops,
    elementwise_flops,
    grouped_product_flops,
    sparse_flops,
)
from heterog.graph.op_graph import (
    GraphOp,
    GraphTensor,
    OpGraph,
    Phase,
    TensorKind,
)
from heterog.graph.optimizer_probe import Kind, ProbedGroup, probe_options, update_scope
from heterog.graph.parameter_groups import ParameterGroup, group_numbers, parameter_groups
from heterog.graph.placement import ITEM_BYTES, Arg, OpCall, Placement, R, S, TensorRef
from heterog.graph.python_state import PythonState
from heterog.graph.repeated_calls import check_repeats
from heterog.graph.sharding_rules.sparse import pattern_key
from heterog.graph.sparse_pattern import SparsePattern
from heterog.graph.sparse_product import SparseProduct
from heterog.graph.static_shapes import statistics_of_unread_norms, with_static_shapes
from heterog.graph.step import Step
from heterog.graph.traced_constants import (
    MADE_AT,
    make_repeated_constants_once,
    merge_equal_constants,
)
from heterog.graph.update_scope import UpdateScope
from heterog.graph.value_checks import answered_guards, spread_checks
from heterog.graph.workload import Workload, named_leaves

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

# Every fused attention kernel becomes one op pair, so that the graph does not depend on the device
# it was captured on. Each entry lists the kernel's own argument names in canonical order.
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu.default": "attention",
    "_scaled_dot_product_flash_attention.default": "attention",
    "_scaled_dot_product_efficient_attention.default": "attention",
    "_scaled_dot_product_cudnn_attention.default": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": "attention_backward",
    "_scaled_dot_product_flash_attention_backward.default": "attention_backward",
    "_scaled_dot_product_efficient_attention_backward.default": "attention_backward",
    "_scaled_dot_product_cudnn_attention_backward.default": "attention_backward",
}
_ATTENTION_ARGS = {
    "attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "attn_mask", "dropout_p",
        "is_causal", "scale",
    ),
}  # fmt: skip
ATTENTION_ALIASES = {"attn_bias": "attn_mask", "grad_out_": "grad_out"}
"""Canonical names of attention arguments that some kernels name differently."""
_ATTENTION_NUM_OUTPUTS = {"attention": 2, "attention_backward": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """An ``OpGraph`` and the fx graph that it was read from, node for node.

    Attributes:
        graph: The graph, independent of devices.
        module: The functional fx module; placeholders are the step inputs in ``graph``'s order,
            outputs the loss, the gradients of the used parameters in order, then the new values
            of the mutated buffers.
        node_of_op: The fx node of each op that is not an update.
    """

    graph: OpGraph
    module: fx.GraphModule
    node_of_op: tuple[fx.Node, ...]


def capture(workload: Workload) -> OpGraph:
    """Capture one training step of a workload.

    Args:
        workload: Model, example batch, loss and optimizer class.

    Returns:
        The graph of forward, backward and update, with costs, phases and module paths.

    Raises:
        CaptureError: the code branches on tensor values (the message names module and line), the
            loss is not a scalar, the batch has no batch dimension, or the step fails.
    """
    return capture_step(workload).graph


def capture_step(workload: Workload, planned: OpGraph | None = None) -> CapturedStep:
    """Capture a workload and keep the fx graph; see ``capture``.

    Args:
        workload: Model, example batch, loss and optimizer class.
        planned: The same step on another batch, whose ops this one shall have.
    """
    with caches_without_fakes(), statistics_of_unread_norms(), without_collector():
        try:
            return _capture_step(workload, planned, in_memory=False)
        except _UnknownConstant:
            return _capture_step(workload, planned, in_memory=True)


class _UnknownConstant(Exception):
    """A step reads a tensor that was made with the model, whose values are not known."""


def _capture_step(workload: Workload, planned: OpGraph | None, *, in_memory: bool) -> CapturedStep:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(action="ignore"), mode:
        with _clear_errors(workload, None):
            model = _make_model(workload, in_memory=in_memory)
            batch = workload.make_batch()
        with unset_fake_temporarily():  # options that are tensors are real
            groups = parameter_groups(workload, model)
        # Nothing reads a gradient of a parameter that the optimizer does not have.
        grouped = group_numbers(groups)
        parameters = {
            name: _fake(mode, value)
            for name, value in model.named_parameters()
            if value.requires_grad and name in grouped
        }
        frozen = {
            name: _fake(mode, value).detach() if value.requires_grad else _fake(mode, value)
            for name, value in model.named_parameters()
            if name not in parameters
        }
        buffers = frozen | {name: _fake(mode, value) for name, value in model.named_buffers()}
        batch = pytree.tree_map_only(Tensor, lambda value: _fake(mode, value), batch)
        if not parameters:
            some = "parameter" if workload.parameter_groups is None else "grouped parameter"
            raise CaptureError(f"workload '{workload.name}': no {some} requires a gradient.")
    checks_calls = planned is None  # or it was checked when it was planned
    try:
        traced = _trace(
            workload, mode, model, parameters, buffers, batch, checks_calls=checks_calls
        )
    except CaptureError as error:
        if isinstance(error.__cause__, FakeTensorDeviceMismatchError) and not in_memory:
            raise _UnknownConstant from error  # on the meta device
        raise
    _check_constants(workload, traced, in_memory=in_memory)
    if planned is not None:
        add_ops_of_more_samples(traced.graph, planned)
    inputs = parameters, buffers, frozen, batch, groups
    step = _Reader(workload, traced, *inputs).read()
    is_one_of_more = planned is not None and step.graph.batch_size == 1
    if not is_one_of_more and make_repeated_constants_once(
        step.graph, step.module, step.node_of_op
    ):
        merge_equal_constants(traced.graph)
        step = _Reader(workload, traced, *inputs).read()
    return replace(step, graph=replace(step.graph, patterns=_patterns(model, step.graph)))


def _check_constants(workload: Workload, traced: fx.GraphModule, *, in_memory: bool) -> None:
    """Refuse a constant that has no values, or ask for a model in memory, where it has."""
    constants = {node.target for node in traced.graph.nodes if node.op == "get_attr"}
    for name in constants:
        value = getattr(traced, str(name))
        if isinstance(value, Tensor) and (isinstance(value, FakeTensor) or value.is_meta):
            if not in_memory:
                raise _UnknownConstant
            raise CaptureError(
                f"workload '{workload.name}': the step reads a tensor of {tuple(value.shape)} "
                "that it has kept from its capture; make it a buffer, or an input of the step."
            )


def _patterns(model: nn.Module, graph: OpGraph) -> tuple[SparsePattern, ...]:
    """Entries of the sparse matrices that a step multiplies with, in the order of its ops."""
    products = (module for module in model.modules() if isinstance(module, SparseProduct))
    by_key = {pattern.key: pattern for each in products for pattern in each.patterns}
    used = dict.fromkeys(pattern_key(op.args) for op in graph.ops)
    return tuple(by_key[key] for key in used if key in by_key)


def _make_model(workload: Workload, *, in_memory: bool) -> nn.Module:
    """Make the model without memory: fake, or on the meta device where fake tensors cannot follow.

    Fake parameters cannot be converted (``model.double()``) nor initialised by code that reads
    its own values (``trunc_normal_``); meta ones can, but attributes that are plain tensors would
    be on the wrong device, so fake ones are tried first. A model that decides by its values when
    it is made (an orthogonal parametrization) is made in memory, as is one whose step reads a
    tensor in a plain attribute.
    """
    if in_memory:
        with unset_fake_temporarily():
            return workload.make_model()
    try:
        return workload.make_model()
    except (RuntimeError, *_DATA_DEPENDENT):
        pass
    with unset_fake_temporarily():
        try:
            with torch.device("meta"):
                return workload.make_model()
        except RuntimeError:
            return workload.make_model()


def _fake(mode: FakeTensorMode, value: Tensor) -> Tensor:
    if value.is_meta:
        twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return twin.requires_grad_(value.requires_grad)
    if isinstance(value, FakeTensor):
        value.constant = None  # its values are those of the first step only
        return value
    return mode.from_tensor(value, static_shapes=True)


@contextmanager
def _clear_errors(workload: Workload, modules: "_OpenModules | None") -> Iterator[None]:
    """Convert errors of tracing to one line that names module, line and the way out."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        frame = _users_frame(error)
        where = f"{frame.filename}:{frame.lineno} (`{frame.line}`)" if frame else _place(error)
        module = modules.innermost if modules else "making the model or its batch"
        if isinstance(error, _DATA_DEPENDENT):
            raise CaptureError(
                f"workload '{workload.name}': {module} depends on tensor values at {where}. "
                f"A plan needs static shapes: {_way_out(error, frame)}"
            ) from error
        message = str(error).strip().splitlines()
        raise CaptureError(
            f"workload '{workload.name}': the training step fails in {module} at {where}: "
            f"{type(error).__name__}: {message[0] if message else 'no message'}"
        ) from error


_WAYS_OUT = (
    (
        "/torch_geometric/utils/loop.py",
        "how many self loops a graph has is such a value. Add or remove them in the data once "
        "(torch_geometric.transforms.AddSelfLoops); layers that add them have "
        "add_self_loops=False.",
    ),
    (
        "/torch_geometric/",
        "pass the number of nodes or graphs where it is counted otherwise (size=labels.shape[0] "
        "of a pooling layer, dim_size, num_nodes), and drop nodes or edges from the data, not in "
        "the model.",
    ),
    *(
        (
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
        "/transformers/models/videomae/",
        "a mask as an index gives as many patches as it has truths. Where all samples keep as "
        "many, pass the places of these and take them with torch.gather, in a copy of the "
        "embeddings and of the loss; VideoMAEForVideoClassification masks nothing.",
    ),
    (
        "/transformers/models/autoformer/",
        "by how many steps a series is delayed is such a value, and no setting of this model "
        "leaves the question out. TimeSeriesTransformer with encoder_layerdrop and "
        "decoder_layerdrop of 0 can be planned.",
    ),
    (
        "/transformers/models/speecht5/",
        "its loss of spectra picks what is no padding. Train with a loss of your own on "
        "speech_decoder_postnet(speecht5(...)[0]), as sums over products with the mask, divided "
        "by the sum of the mask; layer drop needs encoder_layerdrop=0 and decoder_layerdrop=0, "
        "drawn masks apply_spec_augment=False.",
    ),
    (
        "/transformers/",
        "choose eager attention or dense experts in the model's config, leave out what masks or "
        "drops at random (SpecAugment, LayerDrop), or take a head that does not pick elements by "
        "their values: computing with all of them and masking the result comes to the same.",
    ),
)
"""Advice by the library whose line cannot be captured; the first match counts."""


_WAYS_OUT_OF_OP = {
    "aten::_ctc_loss": (
        "CTC keeps a table that is as wide as the longest target, which torch reads from the "
        "values of target_lengths. Write its recursion over time with torch.logsumexp, on targets "
        "padded to one width, or train with another loss."
    ),
    "aten::bincount": (
        "bincount is as long as the largest value says. Sum functional.one_hot(labels, classes) "
        "over samples."
    ),
    "aten::repeat_interleave": (
        "how often rows are repeated are such values. Say how many come of it: output_size=n."
    ),
    "aten::_unique2": (
        "how many unlike values there are is such a value. Find them where the data is loaded, "
        "and pass each sample's place among them, with a number of places that is the same for "
        "all batches."
    ),
    "aten::_pack_padded_sequence": (
        "a packed sequence has as many steps as the values of lengths say. Run the layers on the "
        "padded batch; where states are read at the last step of each sample, take them from the "
        "outputs with gather, and mask what lies behind."
    ),
}
"""Advice for an op whose result has a shape that depends on values."""

_WAYS_OUT_OF_STATEMENT = {
    ("if ", "elif ", "while "): (
        "values decide there which ops run, and all steps of a plan run the same. Use "
        "torch.where, or settings with which the code always goes one way (no LayerDrop, say); an "
        "`if` that does nothing but raise an error may stay."
    ),
    ("assert ",): (
        "an assert may stay if it asks tensors, and needs each answer: leave out int() and "
        "float(), and write torch.logical_or instead of `or`."
    ),
}
"""Advice by the beginning of a line that asks for the truth of a tensor."""


def _way_out(error: BaseException, frame: traceback.FrameSummary | None) -> str:
    """Advice for code whose shapes depend on values."""
    op = getattr(error, "func", None)
    if isinstance(op, torch._ops.OpOverload) and op._schema.name in _WAYS_OUT_OF_OP:
        return _WAYS_OUT_OF_OP[op._schema.name]
    if _frames_in(error, "/torch/nn/modules/batchnorm.py"):
        return _OF_BATCH_NORM
    line = (frame.line or "") if frame else ""
    if isinstance(error, DataDependentOutputException):
        for words, advice in _WAYS_OUT_OF_STATEMENT.items():
            if line.startswith(words):
                return advice
    path = frame.filename.replace("\\", "/") if frame else ""
    for folder, advice in _WAYS_OUT:
        if folder in path:
            return advice
    if "one_hot(" in line:
        return "one_hot is as wide as the largest value says. Give it the number of classes."
    if ".max()" in line and ("int(" in line or ".item()" in line):
        return _OF_NUMBER_OF_ROWS
    return (
        "avoid .item(), .tolist(), nonzero, masks as indices (x[mask]) and `if` on tensors there; "
        "torch.where or a product with the mask usually does the same."
    )


_OF_NUMBER_OF_ROWS = (
    "how many there are (graphs, nodes, words) is such a value. Take it from a shape "
    "(labels.shape[0], mask.shape[1]), or hand it in as a number, an entry of the batch that is "
    "no tensor."
)

_OF_BATCH_NORM = (
    "BatchNorm with momentum=None divides by the number of steps, which is such a value. Give it "
    "a momentum (0.1 is torch's own), for a moving average instead of the mean over all steps."
)


def _frames_in(error: BaseException, folder: str) -> list[traceback.FrameSummary]:
    """The frames of a folder in which an error came up."""
    frames = traceback.extract_tb(error.__traceback__)
    return [each for each in frames if folder in each.filename.replace("\\", "/")]


def _place(error: BaseException) -> str:
    """Where an error came up that no line of the user leads to."""
    return "its backward pass" if _frames_in(error, "/torch/autograd/") else "unknown line"


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that is neither torch's nor ours: the user's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((each for each in reversed(frames) if _is_users(each.filename)), None)


def _is_users(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return "/torch/" not in path and "/heterog/graph/" not in path and not path.startswith("<")


class _LinesOfConstants(TorchFunctionMode):
    """Annotates tensors that are made from sizes alone with the lines of code that make them.

    Two ranges from different lines, of samples and of positions, say, are equal where a batch has
    as many samples as positions. They must stay two even so: see ``merge_equal_constants``.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _device_constructors():
            return function(*args, **(kwargs or {}))
        with fx_traceback.annotate({MADE_AT: _users_lines()}):
            return function(*args, **(kwargs or {}))


def _users_lines() -> str:
    """The innermost line of the user's code that runs now, and the one that called it.

    Two lines tell a helper's callers apart. More would tell layers apart.
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 2:
        if _is_users(frame.f_code.co_filename):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)


def _users_line() -> str:
    """The innermost line of the user's code that runs now, with what it says."""
    place = _users_lines().split(" ")[0]
    path, _, line = place.rpartition(":")
    return f"{path}:{line} (`{linecache.getline(path, int(line)).strip()}`)" if path else ""


class _OpenModules:
    """Tracks the running module, and annotates every node traced inside it with its path."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._open: list[tuple[str, AbstractContextManager[Any]]] = []
        self._handles: list[RemovableHandle] = []

    @property
    def innermost(self) -> str:
        """Path of the module that runs now."""
        name = self._open[-1][0] if self._open else ""
        return f"module '{name}'" if name else "the root module"

    def __enter__(self) -> "_OpenModules":
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:  # modules that an exception left
            self._end()
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, *_: Any) -> None:
        annotation = fx_traceback.annotate({"module": self._names[module]})
        annotation.__enter__()
        self._open.append((self._names[module], annotation))

    def _end(self, *_: Any) -> None:
        self._open.pop()[1].__exit__(None, None, None)


def _trace(
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
    step = Step(workload, model, parameters, buffers, batch, where=_users_line)
    # oneDNN's fused RNN kernel cannot be replayed from a graph; the plain one can.
    with (
        warnings.catch_warnings(action="ignore"),
        mode,
        torch.backends.mkldnn.flags(enabled=False),
        fx_traceback.preserve_node_meta(),
        with_static_shapes(model),
        plain_control_flow(),
        _OpenModules(model) as modules,
        _LinesOfConstants(),
        answered_guards(),
        _clear_errors(workload, modules),
    ):
        kept = PythonState({"the model": model, "the loss": workload.loss})
        raw = make_fx(lambda *inputs: step.traced(*inputs))(dict(parameters), dict(buffers), batch)
        if checks_calls:
            check_repeats(workload.name, step, kept)
        flat, _ = pytree.tree_flatten((dict(parameters), dict(buffers), batch))
        flat = [value for value in flat if isinstance(value, Tensor)]
        _drop_unused_placeholders(raw)
        _annotate_backward(raw.graph)
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


class _Reader:
    """Reads the columns of an ``OpGraph`` from a traced fx graph."""

    def __init__(
        self,
        workload: Workload,
        module: fx.GraphModule,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        batch: Any,
        groups: tuple[ParameterGroup, ...],
    ) -> None:
        self.workload = workload
        self.module = module
        self.parameters = parameters
        self.buffers = buffers
        self.frozen = frozen
        self.batch = batch
        self.groups = groups
        self.tensors: list[GraphTensor] = []
        self.tensor_ids: dict[tuple[fx.Node, int], int] = {}
        self.ops: list[GraphOp] = []
        self.nodes: list[fx.Node] = []

    def read(self) -> CapturedStep:
        """Build the graph."""
        placements, batch_size = self._read_inputs()
        self._read_ops()
        loss, gradients = self._read_outputs()
        ratios = self._state_ratios(gradients)
        self._append_updates(gradients, ratios)
        graph = OpGraph(
            name=self.workload.name,
            source=self.workload.source,
            batch_size=batch_size,
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            batch_placements=tuple(placements),
            optimizer=self.workload.optimizer.__name__,
            optimizer_state_ratio=self._mean_ratio(ratios),
            loss=loss,
            master_dtype=str(self.workload.master_dtype or "").removeprefix("torch."),
            seen_scope=self._update_scope(gradients),
        )
        return CapturedStep(graph=graph, module=self.module, node_of_op=tuple(self.nodes))

    def _read_inputs(self) -> tuple[list[Placement], int]:
        """Step inputs as tensors: parameters, buffers, batch, lifted constants."""
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        constants = [node for node in self.module.graph.nodes if node.op == "get_attr"]
        batch_names, batch_values, batch_dims = self._batch_leaves()
        batch_size = self._batch_size(batch_values, batch_dims)
        kinds = (
            [(name, TensorKind.PARAMETER, None) for name in self.parameters]
            + [(name, TensorKind.BUFFER, None) for name in self.buffers]
            + [
                (name, TensorKind.BATCH, dim)
                for name, dim in zip(batch_names, batch_dims, strict=True)
            ]
        )
        if len(kinds) != len(placeholders):
            raise CaptureError(
                f"workload '{self.workload.name}': traced {len(placeholders)} step inputs, but "
                f"the model and batch have {len(kinds)}."
            )
        placements: list[Placement] = []
        for node, (name, kind, dim) in zip(placeholders, kinds, strict=True):
            value = node.meta["val"]
            self._add_tensor(node, 0, value, kind, name)
            placements.append(R if dim is None else S(dim))
        for node in constants:
            value = getattr(self.module, str(node.target))
            self._add_tensor(node, 0, value, TensorKind.CONSTANT, str(node.target))
            placements.append(R)
        return placements, batch_size

    def _batch_leaves(self) -> tuple[list[str], list[Tensor], list[int | None]]:
        leaves = named_leaves(self.batch)
        names = [name for _, name, _ in leaves]
        values = [value for _, _, value in leaves]
        stated = [self.workload.batch_dims.get(key, "first") for key, _, _ in leaves]
        size = next(
            (v.shape[0] for v, s in zip(values, stated, strict=True) if s == "first" and v.dim()),
            None,
        )
        dims: list[int | None] = []
        for value, dim in zip(values, stated, strict=True):
            if dim == "first":
                dims.append(0 if value.dim() and value.shape[0] == size else None)
            else:
                dims.append(dim if isinstance(dim, int) else None)
        return names, values, dims

    def _batch_size(self, values: list[Tensor], dims: list[int | None]) -> int:
        sizes = {
            int(value.shape[dim])
            for value, dim in zip(values, dims, strict=True)
            if dim is not None
        }
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        if not sizes:
            raise CaptureError(
                f"workload '{self.workload.name}': no tensor of the batch ({shapes}) has a batch "
                "dimension, so there is nothing to share out. By default it is the first "
                "dimension of the first tensor; where Workload.batch_dims says None for a tensor, "
                "every device gets all of it. Leave one out of batch_dims, or give its dimension."
            )
        if len(sizes) != 1:
            raise CaptureError(
                f"workload '{self.workload.name}': the batch tensors ({shapes}) have "
                f"{len(sizes)} different batch sizes; state them with Workload.batch_dims."
            )
        return sizes.pop()

    def _add_tensor(
        self, node: fx.Node, output: int, value: Tensor, kind: TensorKind, name: str = ""
    ) -> int:
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise CaptureError(
                f"workload '{self.workload.name}': {node.name} has dtype {dtype}, which is not "
                "supported."
            )
        self.tensors.append(
            GraphTensor(shape=tuple(map(int, value.shape)), dtype=dtype, kind=kind, name=name)
        )
        self.tensor_ids[node, output] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def _read_ops(self) -> None:
        module, phase = "", Phase.FORWARD
        for node in self.module.graph.nodes:
            if node.op != "call_function":
                continue
            if not isinstance(node.target, torch._ops.OpOverload):
                self._read_getitem(node)
                continue
            # A node that the retrace itself made (a copy) belongs to the one before it.
            annotation = node.meta.get("custom") or {}
            module = annotation.get("module", module)
            phase = max(phase, Phase(annotation.get("phase", phase)))
            self._read_op(node, phase, module)

    def _read_getitem(self, node: fx.Node) -> None:
        source, index = node.args
        if not isinstance(source, fx.Node) or not isinstance(index, int):
            raise CaptureError(
                f"workload '{self.workload.name}': cannot read node {node.format_node()}."
            )
        # Canonical attention drops outputs that no step needs (random state, debug masks).
        self.tensor_ids[node, 0] = self.tensor_ids.get((source, index), -1)

    def _read_op(self, node: fx.Node, phase: Phase, module: str) -> None:
        kind = str(node.target).removeprefix("aten.")
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        args, inputs = self._read_args(node, target)
        values = node.meta.get("val")  # checks return nothing
        outputs = list(values) if isinstance(values, tuple | list) else [values]
        if kind in _ATTENTION:
            kind = _ATTENTION[kind]
            args, inputs = _canonical_attention(kind, args, inputs)
            outputs = outputs[: _ATTENTION_NUM_OUTPUTS[kind]]
        first = len(self.tensors)
        present = [value for value in outputs if isinstance(value, Tensor)]
        for index, value in enumerate(outputs):
            if isinstance(value, Tensor):
                self._add_tensor(node, index, value, TensorKind.ACTIVATION)
        call = OpCall(
            kind=kind,
            args=args,
            inputs=tuple(self.tensors[tensor].meta for tensor in inputs),
            outputs=tuple(self.tensors[first + i].meta for i in range(len(present))),
        )
        read, written = bytes_read_and_written(call)
        self.ops.append(
            GraphOp(
                kind=kind,
                args=args,
                inputs=tuple(inputs),
                num_outputs=len(present),
                phase=phase,
                module=module,
                flops=_flops(node, call),
                bytes_read=read,
                bytes_written=written,
                name=node.name,
            )
        )
        self.nodes.append(node)

    def _read_args(
        self, node: fx.Node, target: torch._ops.OpOverload
    ) -> tuple[dict[str, Arg], list[int]]:
        """Arguments by schema name with defaults, tensors as references into the input list."""
        inputs: list[int] = []
        args: dict[str, Arg] = {}
        for position, argument in enumerate(target._schema.arguments):
            if not argument.kwarg_only and position < len(node.args):
                value: Any = node.args[position]
            else:
                value = node.kwargs.get(argument.name, argument.default_value)
            args[argument.name] = self._plain(value, inputs)
        return args, inputs

    def _plain(self, value: Any, inputs: list[int]) -> Arg:
        if isinstance(value, fx.Node):
            inputs.append(self.tensor_ids[value, 0])
            return TensorRef(len(inputs) - 1)
        if isinstance(value, tuple | list):
            return tuple(self._plain(item, inputs) for item in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value).removeprefix("torch.")

    def _read_outputs(self) -> tuple[int, dict[int, int]]:
        """The loss tensor, and gradient tensor by parameter tensor."""
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        flat = pytree.tree_leaves(output.args[0], is_leaf=lambda value: value is None)
        loss = self.tensor_ids[flat[0], 0]
        gradients: dict[int, int] = {}
        for parameter, node in enumerate(flat[1 : 1 + len(self.parameters)]):
            if node is not None:
                gradient = self.tensor_ids[node, 0]
                gradients[parameter] = gradient
                self.tensors[gradient] = replace(self.tensors[gradient], kind=TensorKind.GRADIENT)
        return loss, gradients

    def _state_ratios(self, trained: Iterable[int]) -> dict[int, float]:
        """Bytes of masters and state per byte of parameter, by parameter: alike in a group."""
        options = dict(self.workload.optimizer_options)
        group_of = group_numbers(self.groups)
        members: dict[float, list[int]] = {}  # groups of one ratio together
        ratio_of: dict[int, float] = {}
        for parameter in trained:
            group = group_of[self.tensors[parameter].name]
            if group not in ratio_of:
                own = self.groups[group].options
                ratio_of[group] = optimizer_state_ratio(self.workload.optimizer, options, own)
            members.setdefault(ratio_of[group], []).append(parameter)
        found: dict[int, float] = {}
        for ratio, alike in members.items():
            found |= dict.fromkeys(alike, self._in_own_dtypes(ratio, alike))
        return found

    def _update_scope(self, trained: Iterable[int]) -> UpdateScope:
        """What the optimizer looks at, with the kinds of parameters that each group has."""
        group_of = group_numbers(self.groups)
        kinds: list[dict[Kind, None]] = [{} for _ in self.groups]
        for parameter in trained:
            meta = self.tensors[parameter]
            kind = Kind(len(meta.shape), meta.dtype.startswith("complex"))
            kinds[group_of[meta.name]].setdefault(kind)
        return update_scope(
            self.workload.optimizer,
            self.workload.optimizer_options,
            [
                ProbedGroup(group.options, tuple(own))
                for group, own in zip(self.groups, kinds, strict=True)
            ],
        )

    def _mean_ratio(self, ratios: Mapping[int, float]) -> float:
        """Bytes of masters and state per byte of all trained parameters together."""
        if len(set(ratios.values())) <= 1:
            return next(iter(ratios.values()), 0.0)
        sizes = {parameter: self.tensors[parameter].meta.num_bytes for parameter in ratios}
        state = sum(ratio * sizes[parameter] for parameter, ratio in ratios.items())
        return state / sum(sizes.values())

    def _in_own_dtypes(self, ratio: float, trained: Iterable[int]) -> float:
        """Bytes of master weights and of the optimizer's state, per byte of parameter.

        Raises:
            CaptureError: the state would be kept with more digits than it is computed with.
        """
        master, kept = self.workload.master_dtype, self.workload.state_dtype
        metas = [self.tensors[parameter] for parameter in trained]
        whole = sum(meta.meta.num_bytes for meta in metas)
        if (master is None and kept is None) or whole == 0:
            return ratio
        state = 0.0
        for meta in metas:
            dtype = getattr(torch, meta.dtype)
            is_copied = master is not None and dtype.is_floating_point and dtype != master
            stepped = master if is_copied and master is not None else dtype
            if kept is not None and torch.promote_types(kept, stepped) != stepped:
                raise CaptureError(
                    f"workload '{self.workload.name}': state_dtype is {kept}, but the optimizer "
                    f"steps '{meta.name}' in {stepped}, which holds less; give "
                    f"master_dtype={kept} as well, or leave out state_dtype."
                )
            elements = meta.meta.num_elements
            state += elements * ratio * (kept or stepped).itemsize
            state += elements * stepped.itemsize * is_copied
        return float(state / whole)

    def _append_updates(
        self, gradients: Mapping[int, int], state_ratios: Mapping[int, float]
    ) -> None:
        module_of = {name: name.rpartition(".")[0] for name in self.parameters}
        for parameter, gradient in gradients.items():
            meta, state_ratio = self.tensors[parameter], state_ratios[parameter]
            # Reads parameter, gradient and state; writes parameter and state (fused step).
            self.tensors.append(replace(meta, kind=TensorKind.PARAMETER, name=""))
            size = float(meta.meta.num_bytes)
            added_up = float(self.tensors[gradient].meta.num_bytes)
            elements = meta.meta.num_elements
            self.ops.append(
                GraphOp(
                    kind="update",
                    args={},
                    inputs=(parameter, gradient),
                    num_outputs=1,
                    phase=Phase.UPDATE,
                    module=module_of[meta.name],
                    flops=elements * (2.0 + 5.0 * state_ratio),
                    bytes_read=size * (1.0 + state_ratio) + added_up,
                    bytes_written=size * (1.0 + state_ratio),
                    name=f"update_{meta.name}",
                )
            )


def _annotate_backward(graph: fx.Graph) -> None:
    """Write module and phase of every node into its annotation, which the retrace keeps.

    A forward node carries its module already. A backward node has its forward twin's: autograd
    gives both one sequence number (the retrace renumbers forward nodes, so this comes before it).
    Forward nodes that autograd does not see inherit the previous node's ``seq_nr``, so the first
    node of a number is the twin. Adds that accumulate gradients have no twin, ops outside any
    module no annotation: both follow the input that was made last. For a residual stream's
    gradients that is the new one; the other is the sum of all layers behind.
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


def _canonical_attention(
    kind: str, args: Mapping[str, Arg], inputs: list[int]
) -> tuple[dict[str, Arg], list[int]]:
    """Arguments of any attention kernel in canonical names and order."""
    by_name = {ATTENTION_ALIASES.get(name, name): value for name, value in args.items()}
    canonical: dict[str, Arg] = {}
    kept: list[int] = []
    for name in _ATTENTION_ARGS[kind]:
        value = by_name.get(name)
        if isinstance(value, TensorRef):
            kept.append(inputs[value.index])
            value = TensorRef(len(kept) - 1)
        canonical[name] = value
    return canonical, kept


def _flops(node: fx.Node, call: OpCall) -> float:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    counter = flop_registry.get(target.overloadpacket) or flop_registry.get(target)
    for flops in (convolution_flops(call), grouped_product_flops(call), sparse_flops(call)):
        if flops is not None:
            return flops
    if counter is None and call.kind in _ATTENTION_ARGS:
        return _attention_flops(call)
    if counter is None:
        return float(elementwise_flops(call))

    def value_of(argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    args = pytree.tree_map(value_of, node.args)
    kwargs = pytree.tree_map(value_of, node.kwargs)
    return float(counter(*args, **kwargs, out_val=node.meta["val"]))


def _attention_flops(call: OpCall) -> float:
    """Two matrix products forward (4 B H S T D), five backward (10 B H S T D)."""
    query = call.inputs[0 if call.kind == "attention" else 1].shape
    key = call.inputs[1 if call.kind == "attention" else 2].shape
    products = 2.0 if call.kind == "attention" else 5.0
    return products * 2.0 * query[0] * query[1] * query[2] * key[2] * query[3]


def optimizer_state_ratio(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
) -> float:
    """Optimizer state bytes per byte of parameter, measured on one real step of a small matrix.

    Args:
        optimizer: Class of the optimizer.
        options: Its keyword arguments.
        own: Options of the parameter's group.

    >>> optimizer_state_ratio(torch.optim.Adam, {})
    2.0
    >>> optimizer_state_ratio(torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0})
    0.0
    """
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    try:
        groups = [{**probe_options(own or {}), "params": [parameter]}]
        instance = optimizer(groups, **probe_options(options))
        instance.step()
    except (TypeError, ValueError) as error:
        if "closure" in str(error):
            raise CaptureError(
                f"optimizer {optimizer.__name__} needs a closure, which a plan cannot run: {error}"
            ) from error
        given = {**options, **(own or {})}
        raise CaptureError(
            f"optimizer {optimizer.__name__} cannot step with the options {given}: {error}"
        ) from error
    except RuntimeError as error:
        raise CaptureError(
            f"optimizer {optimizer.__name__} cannot step a dense gradient of a matrix ({error}); "
            "all gradients of a plan are dense. SGD, Adagrad and Adam can."
        ) from error
    state = sum(
        value.nbytes
        for value in instance.state[parameter].values()
        if isinstance(value, Tensor) and value.dim()
    )
    return state / parameter.nbytes
