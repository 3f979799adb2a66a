"""Captures one training step of a workload as an ``OpGraph``, on fake tensors.

The recipe: trace forward and ``autograd.grad`` with ``make_fx`` over fake parameters, buffers and
batch (no weight is ever allocated), then retrace through ``functionalize(remove="mutations")``,
which drops in-place ops but keeps real views: ``mutations_and_views`` would add copies that never
run. Forward hooks annotate every node with its module; a backward node finds its forward twin by
autograd's sequence number.

- ``tracing`` traces the step twice, notes modules, phases and lines of code, and writes the errors
  of steps that cannot be captured, with advice from ``advice.yaml``. ``reading`` reads a graph
  from the trace: all attention kernels become one kind of op, and the optimizer's state is
  measured. ``one_process`` hides groups of processes, ``kernels`` tries ops whose dtypes fake
  tensors do not check.

Only this package, ``static_shapes``, ``sample_ops``, ``value_checks`` and ``traced_constants``
touch private names of torch.
"""

import itertools
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.errors import CaptureError, HeterogWarning
from heterog.garbage import without_collector
from heterog.graph.capture.kernels import check_dtypes
from heterog.graph.capture.reading import CapturedStep, Reader
from heterog.graph.capture.tracing import UnknownBuffers, clear_errors, trace
from heterog.graph.grouped_rows import has_grouped_products, index_whole_rows, leave_unsorted
from heterog.graph.op_graph import GraphTensor, OpGraph, TensorKind
from heterog.graph.optimizer_probe import group_numbers, parameter_groups
from heterog.graph.python_state import same_draws
from heterog.graph.repeated_calls import caches_without_fakes
from heterog.graph.sharding_rules.matmul import pattern_key
from heterog.graph.sparse_pattern import SparsePattern
from heterog.graph.sparse_product import SparseProduct
from heterog.graph.static_shapes import statistics_of_unread_norms
from heterog.graph.step import check_hooks
from heterog.graph.traced_constants import (
    add_ops_of_more_samples,
    make_repeated_constants_once,
    merge_equal_constants,
)
from heterog.graph.value_numbers import DATA_DEPENDENT, storage_of
from heterog.graph.workload import Workload
from heterog.user_code import script_of

logger = logging.getLogger(__name__)

__all__ = ["CapturedStep", "capture", "capture_step"]


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
        planned: The same step on another batch; the capture gets the same ops.
    """
    if not isinstance(workload, Workload):
        raise CaptureError(
            f"the workload is of type {type(workload).__name__}; give a heterog.Workload, which "
            "has a model, an example batch, a loss and an optimizer's class."
        )
    _check_folder_of_compiler()
    if planned is None:
        _warn_of_loss(workload)
    quiet = mock.patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True)
    caches, norms = caches_without_fakes(), statistics_of_unread_norms()
    script = script_of(workload.source)
    with caches, norms, without_collector(), quiet, script, _deeper_calls():
        in_memory, known = False, frozenset[str]()
        while True:
            # What draws next, a rank's own model say, draws as if nothing had been captured. A
            # search for anomalies would ask each gradient for its values.
            with same_draws(), torch.autograd.set_detect_anomaly(False):
                try:
                    return _capture_step(workload, planned, known, in_memory=in_memory)
                except _UnknownConstant:
                    in_memory = True
                except UnknownBuffers as error:
                    in_memory, known = True, known | error.names


@contextmanager
def _deeper_calls() -> Iterator[None]:
    """Let modules be nested as deeply as plain PyTorch lets them.

    A module takes three of Python's frames when it runs, and eleven when it is traced.
    """
    before = sys.getrecursionlimit()
    # 40,000 frames of nested modules have overflown a stack of 8 MiB.
    sys.setrecursionlimit(max(before, min(4 * before, 16_000)))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _check_folder_of_compiler() -> None:
    """Refuse to begin without the folder that torch makes as soon as it traces.

    Raises:
        CaptureError: the folder cannot be made.
    """
    try:
        # Imported here, because it imports torch's compiler, which makes the folder.
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        cache_dir()
    except OSError as error:
        raise CaptureError(
            f"torch cannot make the folder for what it compiles ({error}); name one that it can "
            "make in TORCHINDUCTOR_CACHE_DIR."
        ) from error


def _check_model(workload: Workload, model: nn.Module) -> None:
    """Refuse a model that no plan can train."""
    parameters = dict(model.named_parameters())
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        raise CaptureError(
            f"workload '{workload.name}': the model is compiled by torch.jit, whose ops cannot be "
            "read. Make it without torch.jit.script."
        )
    for name, value in parameters.items():
        if isinstance(value, UninitializedParameter):
            raise CaptureError(
                f"workload '{workload.name}': '{name}' has no shape yet, because its module is "
                "lazy. Call the model on a batch in the function that makes it."
            )
        if value.dtype.itemsize == 1 and value.requires_grad:
            raise CaptureError(
                f"workload '{workload.name}': '{name}' is trained in {value.dtype}, which "
                "torch cannot add, so no optimizer steps it; keep it in bfloat16 or float32 "
                "and cast it in forward."
            )
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise CaptureError(
                f"workload '{workload.name}': '{name}' is a sparse tensor, which ranks cannot "
                "share. For a product with a matrix that stays as it is, make the module "
                "heterog.graph.sparse_product.SparseProduct of its entries; or keep its indices "
                "and values in two buffers, and sum with index_select and index_add."
            )
    check_hooks(workload, parameters)


def _warn_of_loss(workload: Workload) -> None:
    """Name parameters of the loss that look as if they were trained."""
    own = workload.loss.named_parameters() if isinstance(workload.loss, nn.Module) else ()
    if untrained := [name for name, value in own if value.requires_grad]:
        warnings.warn(
            f"workload '{workload.name}': the loss has parameters ({', '.join(untrained)}) that "
            "no optimizer gets, so they stay as they are. To train them, make the loss a part of "
            "the model, which then returns it, with loss=None; otherwise freeze them "
            "(requires_grad_(False)).",
            HeterogWarning,
            stacklevel=3,
        )


def _check_optimizer(workload: Workload, model: nn.Module) -> None:
    """Refuse parameters that the optimizer's class does not take."""
    choose, options = workload.parameter_groups, dict(workload.optimizer_options)
    name, refusal = workload.optimizer.__name__, None
    try:
        workload.optimizer([nn.Parameter(torch.zeros(1, 1))], **options)
        try:
            workload.optimizer(model.parameters() if choose is None else choose(model), **options)
        except ValueError as error:
            refusal = error
    except Exception:  # options that it does not take are refused when it is probed
        logger.debug("%s cannot be made of fake tensors", name, exc_info=True)
    if refusal is not None:
        raise CaptureError(
            f"workload '{workload.name}': {name} does not take the model's parameters: {refusal}. "
            "Leave some out with parameter_groups, or give a class of your own that steps these "
            f"otherwise, and the rest as {name} does."
        ) from refusal


def _check_batch(workload: Workload, batch: Any) -> None:
    """Refuse a batch with arrays, or with tensors in objects, where no plan finds them."""
    for path, each in pytree.tree_leaves_with_path(batch):
        if isinstance(each, np.ndarray | np.generic) and each.dtype.kind in "biufc":
            raise CaptureError(
                f"workload '{workload.name}': entry {pytree.keystr(path)} of the batch is a "
                f"{type(each).__name__} of numpy, which would be a constant of the step; make it "
                "a tensor (torch.as_tensor), or leave it out."
            )
        if not isinstance(each, Tensor) and _holds_tensors(each):
            place, kind = pytree.keystr(path), type(each).__name__
            raise CaptureError(
                f"workload '{workload.name}': {place} of the batch is a {kind} with tensors in "
                "it, which ranks cannot share out. Put them into tuples, lists or dicts "
                f"(vars(it), say), and make the {kind} of them in the model."
            )


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object has tensors among its attributes, or in what these contain."""
    if isinstance(value, Tensor) or not depth:
        return isinstance(value, Tensor)
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, tuple | list):
        inside = list(value)
    else:
        is_module = isinstance(value, type | nn.Module)
        inside = [] if is_module else [*getattr(value, "__dict__", {}).values()]
    return any(_holds_tensors(each, depth - 1) for each in inside)


class _UnknownConstant(Exception):
    """A step reads a tensor made with the model that has no values, or no shape, if it is fake."""


def _capture_step(
    workload: Workload, planned: OpGraph | None, asked: frozenset[str], *, in_memory: bool
) -> CapturedStep:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(action="ignore"), mode:
        with clear_errors(workload, None):
            model = _make_model(workload, in_memory=in_memory)
            _check_model(workload, model)
            with unset_fake_temporarily():  # options that are tensors are real
                groups = parameter_groups(workload, model)
                _check_optimizer(workload, model)
            # Nothing reads a gradient of a parameter that the optimizer does not have.
            grouped = group_numbers(groups)
            parameters: dict[str, Tensor] = {}
            frozen: dict[str, Tensor] = {}
            for name, value in model.named_parameters():
                is_trained = value.requires_grad and name in grouped
                (parameters if is_trained else frozen)[name] = _fake_parameter(
                    mode, value, is_trained=is_trained
                )
            buffers = frozen | {
                name: _fake(mode, value, by_rows=True) for name, value in model.named_buffers()
            }
            known = _values_of_buffers(model, asked)
            given = workload.make_batch()
            _check_batch(workload, given)
            batch = pytree.tree_map_only(Tensor, lambda value: _fake(mode, value), given)
        if not parameters:
            some = "parameter" if workload.parameter_groups is None else "grouped parameter"
            raise CaptureError(f"workload '{workload.name}': no {some} requires a gradient.")
    checks_calls = planned is None  # or it was checked when it was planned
    try:
        state = parameters, buffers, batch
        traced = trace(workload, mode, model, state, known, checks_calls=checks_calls)
    except CaptureError as error:
        # torch 2.13 has a class for this error; older ones say "two different devices".
        if re.search(r"two (different )?devices", str(error)) and not in_memory:
            raise _UnknownConstant from error  # on the meta device
        raise
    _check_constants(workload, traced, in_memory=in_memory)
    _leave_batch(workload, traced, len(parameters) + len(buffers))
    inputs = parameters, buffers, batch, groups
    if has_grouped_products(traced.graph):
        index_whole_rows(traced)
        step = Reader(workload, traced, *inputs).read()
        leave_unsorted(step.graph, step.module, step.node_of_op)
    if planned is not None:
        add_ops_of_more_samples(traced.graph, planned)
    step = Reader(workload, traced, *inputs).read()
    is_one_of_more = planned is not None and step.graph.batch_size == 1
    if not is_one_of_more and make_repeated_constants_once(
        step.graph, step.module, step.node_of_op
    ):
        merge_equal_constants(traced.graph)
        step = Reader(workload, traced, *inputs).read()
    _check_memory(workload, model, step)
    check_dtypes(workload, step)
    _check_observers(workload, step.graph, in_memory=in_memory)
    graph = replace(step.graph, patterns=_patterns(model, step.graph))
    return replace(step, graph=graph, known=known)


def _values_of_buffers(model: nn.Module, names: frozenset[str]) -> dict[str, Tensor]:
    """Copies of some buffers, in the order of the model."""
    with unset_fake_temporarily():
        chosen = {name: each for name, each in model.named_buffers() if name in names}
        return {name: each.detach().cpu().clone() for name, each in chosen.items()}


def _check_constants(workload: Workload, traced: fx.GraphModule, *, in_memory: bool) -> None:
    """Refuse constants without values, or raise ``_UnknownConstant`` to try a model in memory."""
    for name in {node.target for node in traced.graph.nodes if node.op == "get_attr"}:
        value = getattr(traced, str(name))
        if isinstance(value, torch.Generator):
            raise CaptureError(
                f"workload '{workload.name}': the step draws from a torch.Generator of its own, "
                "whose numbers no plan can share among ranks. Leave out generator=, to draw from "
                "the step's own, or draw outside and pass the result as a tensor of the batch."
            )
        if isinstance(value, Tensor) and (isinstance(value, FakeTensor) or value.is_meta):
            if not in_memory:
                raise _UnknownConstant
            raise CaptureError(
                f"workload '{workload.name}': the step reads a tensor of {tuple(value.shape)} "
                "that it has kept from its capture; make it a buffer, or an input of the step."
            )


def _leave_batch(workload: Workload, traced: fx.GraphModule, num_state: int) -> None:
    """Drop writes to the batch, as each rank would write to its own samples of the user's tensor.

    What the step reads after such a write is a value of its own.
    """
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    given, written = set(inputs[num_state:]), False
    for node in reversed(traced.graph.nodes):
        if (
            node.target is torch.ops.aten.copy_.default
            and node.args[0] in given
            and not node.users
        ):
            traced.graph.erase_node(node)
            written = True
    if written:
        warnings.warn(
            f"workload '{workload.name}': the step writes to a tensor of its batch, which ranks "
            "leave as it is. If batches are used again, write to a copy (x = x.clone()), so that "
            "one device does the same.",
            HeterogWarning,
            stacklevel=4,
        )
        traced.graph.eliminate_dead_code()


def _check_memory(workload: Workload, model: nn.Module, step: CapturedStep) -> None:
    """Refuse a step that reads memory which it changes under another name.

    Ranks keep each tensor in memory of its own, where the other's changes would not arrive.
    """
    graph, held = step.graph, {**dict(model.named_parameters()), **dict(model.named_buffers())}
    changed = {parameter for _, parameter, _ in graph.updates}
    changed |= {op.inputs[0] for op in graph.ops if op.is_write}
    read = {tensor for op in graph.ops for tensor in op.inputs[op.is_write :]}
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for tensor in sorted(changed | read & set(range(graph.num_inputs))):
        meta = graph.tensors[tensor]
        is_constant = meta.kind == TensorKind.CONSTANT
        value = getattr(step.module, meta.name) if is_constant else held.get(meta.name)
        if value is not None and value.layout == torch.strided and value.numel():
            spans.setdefault(storage_of(value), []).append((*_span(value), tensor))
    for same in spans.values():
        for (begin, end, one), (other_begin, other_end, other) in itertools.combinations(same, 2):
            if not {one, other} & changed or max(begin, other_begin) > min(end, other_end):
                continue
            first, second = (_in_words(graph.tensors[each]) for each in (one, other))
            raise CaptureError(
                f"workload '{workload.name}': {second} shares memory with {first}, which the step "
                "changes, and ranks keep each in memory of its own. Read the other one where it "
                "is needed (self.layer.weight.detach()), assign the same parameter to both "
                "modules to tie them, or make a copy (.clone())."
            )


def _check_observers(workload: Workload, graph: OpGraph, *, in_memory: bool) -> None:
    """Refuse buffers that torch's fake quantisation gives a shape in the first step.

    It gives none to fake tensors, so that a model in memory decides.
    """
    for op in graph.ops:
        if not op.kind.startswith("_fused_moving_avg_obs") or not op.args.get(
            "per_row_fake_quant"
        ):
            continue
        weight, least = (graph.tensors[op.inputs[place]] for place in (0, 3))
        channels = weight.shape[int(str(op.args["ch_axis"]))]
        if least.shape != (channels,):
            if not in_memory:
                raise _UnknownConstant
            raise CaptureError(
                f"workload '{workload.name}': '{least.name}' of an observer gets its shape "
                f"({channels} channels) in the first step of training. Call the model on a batch "
                "in the function that makes it."
            )


def _in_words(tensor: GraphTensor) -> str:
    is_constant = tensor.kind == TensorKind.CONSTANT
    return f"a tensor of {tensor.shape} in an attribute" if is_constant else f"'{tensor.name}'"


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its memory."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in sides)
    begin = int(tensor.storage_offset())
    return begin * tensor.element_size(), (begin + reach + 1) * tensor.element_size() - 1


def _patterns(model: nn.Module, graph: OpGraph) -> tuple[SparsePattern, ...]:
    """Entries of the sparse matrices that a step multiplies with, in the order of its ops."""
    products = (module for module in model.modules() if isinstance(module, SparseProduct))
    by_key = {pattern.key: pattern for each in products for pattern in each.patterns}
    used = dict.fromkeys(pattern_key(op.args) for op in graph.ops)
    return tuple(by_key[key] for key in used if key in by_key)


def _make_model(workload: Workload, *, in_memory: bool) -> nn.Module:
    """Make the model without memory: fake, or on the meta device where fake tensors cannot follow.

    Fake parameters are tried first. They cannot be converted (``model.double()``), nor
    initialised by code that reads values (``trunc_normal_``). Meta parameters can, but then
    attributes that are plain tensors are on the wrong device. A model whose constructor branches
    on values (an orthogonal parametrization) is made in memory, as is one whose step reads a
    tensor in a plain attribute. Each attempt makes the same random draws.
    """
    for is_meta in () if in_memory else (False, True):
        plain = unset_fake_temporarily() if is_meta else nullcontext()
        with plain, same_draws(), suppress(*_UNABLE):
            device = torch.device("meta") if is_meta else nullcontext()
            with device, _swapped_with_attributes(), _Unable() as unable:
                model = workload.make_model()
            if not unable.seen:  # the model's code may catch the error and go on without the value
                return model
    with unset_fake_temporarily():
        return workload.make_model()


@contextmanager
def _swapped_with_attributes() -> Iterator[None]:
    """Keep a parameter's attributes and hooks when its module changes dtype.

    Parameters with values keep them. ``Module.double`` and the like instead swap a parameter
    without values for another one, which has other attributes and hooks.
    """
    swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    def swapped(one: Tensor, other: Tensor) -> None:
        before, hooks = dict(vars(one)), one._backward_hooks
        swap(one, other)
        for name, value in before.items():
            vars(one).setdefault(name, value)
        one._backward_hooks = hooks  # the setter also registers them with autograd

    with mock.patch.object(torch.utils, "swap_tensors", swapped):
        yield


_UNABLE = (RuntimeError, *DATA_DEPENDENT)


class _Unable(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an op could not run, because tensors have no values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (NotImplementedError, *DATA_DEPENDENT):
            self.seen = True
            raise


def _fake_parameter(mode: FakeTensorMode, value: Tensor, *, is_trained: bool) -> Tensor:
    fake = _fake(mode, value, by_rows=True)
    if not is_trained and value.requires_grad:
        fake = fake.detach()
    fake._is_param = True  # isinstance(fake, nn.Parameter) reads this attribute
    for name, note in vars(value).items():
        vars(fake).setdefault(name, note)
    return fake


def _fake(mode: FakeTensorMode, value: Tensor, *, by_rows: bool = False) -> Tensor:
    """A fake tensor like another; row-major if ``by_rows``, as ranks keep their weights."""
    # Views of a fake tensor that ``copy.deepcopy`` made lie in other memory than it.
    is_copy = isinstance(value, FakeTensor) and storage_of(value.detach()) != storage_of(value)
    if by_rows and value.layout == torch.strided and not value.is_contiguous():
        fake = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        fake.requires_grad_(value.requires_grad)
    elif value.is_meta or is_copy:
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        fake.requires_grad_(value.requires_grad)
    elif isinstance(value, FakeTensor):
        value.constant = None  # its values are those of the first step only
        return value
    else:
        fake = mode.from_tensor(value, static_shapes=True)
    for hook in (value._backward_hooks or {}).values():
        fake.register_hook(hook)  # type: ignore[no-untyped-call]
    return fake
