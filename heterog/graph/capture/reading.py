"""Reads an ``OpGraph`` from a traced fx graph.

Every kernel of fused attention becomes one kind of op, so that the graph does not depend on the
device. How much state the optimizer keeps is measured on one real step.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from heterog.errors import CaptureError
from heterog.graph.op_costs import FLOPS, bytes_read_and_written, elementwise_flops
from heterog.graph.op_graph import GraphOp, GraphTensor, OpGraph, Phase, TensorKind, UpdateScope
from heterog.graph.optimizer_probe import (
    Kind,
    LiveBytes,
    ParameterGroup,
    ProbedGroup,
    group_numbers,
    probe_options,
    update_scope,
)
from heterog.graph.placement import ITEM_BYTES, Arg, OpCall, Placement, R, S, TensorRef
from heterog.graph.python_state import same_draws
from heterog.graph.workload import Workload, named_leaves, plain_entries
from heterog.user_code import words_of
from heterog.workers import Terminated


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
    instance, parameter, _ = _stepped(optimizer, options, own)
    state = sum(
        value.nbytes
        for value in instance.state[parameter].values()
        if isinstance(value, Tensor) and value.dim()
    )
    return state / parameter.nbytes


def optimizer_step_ratios(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
) -> tuple[float, float]:
    """See ``OpGraph``; measured on the second real step of two small matrices.

    Two, because a loop over tensors keeps what it has made for one until it makes that of the
    next. Arguments are those of ``optimizer_state_ratio``.

    >>> optimizer_step_ratios(torch.optim.Adam, {}), optimizer_step_ratios(torch.optim.SGD, {})
    ((3.0, 1.0), (0.0, 0.0))
    """
    stated = {**options, **(own or {})}
    in_turn = _made_bytes(optimizer, options, own)
    can = "foreach" in signature(optimizer).parameters
    if not can or stated.get("fused") or stated.get("foreach") is False:
        return in_turn, 0.0
    return in_turn, _made_bytes(optimizer, {**options, "foreach": True}, own) / 2


def _made_bytes(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    own: Mapping[str, Any] | None,
) -> float:
    """Most bytes that a step of two matrices makes, per byte of one; 0 if it is not known."""
    with suppress(Exception), same_draws():  # whatever the user's class raises
        instance, *parameters = _stepped(optimizer, options, own)
        with LiveBytes() as live:
            instance.step()
        return min(float(live.most / parameters[0].nbytes), _MOST_RATIO)
    return 0.0


def _stepped(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    own: Mapping[str, Any] | None,
) -> tuple[torch.optim.Optimizer, nn.Parameter, nn.Parameter]:
    """An optimizer that has stepped two small matrices once, and these."""
    first, second = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    for parameter in (first, second):
        parameter.grad = torch.zeros_like(parameter)
    try:
        groups = [{**probe_options(own or {}), "params": [first, second]}]
        instance = optimizer(groups, **probe_options(options))
        instance.step()
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # whatever the user's class raises
        said = words_of(error)
        fault = f"cannot step with the options { ({**options, **(own or {})}) }: {said}"
        if "dense" in said:
            fault = (
                f"cannot step a dense gradient of a matrix ({said}); all gradients of a plan are "
                "dense. SGD, Adagrad and Adam can."
            )
        elif "closure" in said or "'NoneType' object is not callable" in said:
            fault = (
                f"needs a closure, which a plan cannot run: {said}. Adam, SGD and others step by "
                "gradients alone."
            )
        raise CaptureError(f"optimizer {optimizer.__name__} {fault}") from error
    return instance, first, second


_MOST_RATIO = 8.0
"""Most that is told of an optimizer; what does not grow with parameters counts as if it did."""
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu.default": "attention",
    "_scaled_dot_product_flash_attention.default": "attention",
    "_scaled_dot_product_efficient_attention.default": "attention",
    "_scaled_dot_product_cudnn_attention.default": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": "attention_backward",
    "_scaled_dot_product_flash_attention_backward.default": "attention_backward",
    "_scaled_dot_product_efficient_attention_backward.default": "attention_backward",
    "_scaled_dot_product_cudnn_attention_backward.default": "attention_backward",
}
"""Op in the graph for each fused attention kernel."""


ATTENTION_ARGS = {
    "attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "attn_mask", "dropout_p",
        "is_causal", "scale",
    ),
}  # fmt: skip


ATTENTION_ALIASES = {"attn_bias": "attn_mask", "grad_out_": "grad_out"}
"""Canonical names of attention arguments that some kernels name differently."""


ATTENTION_NUM_OUTPUTS = {"attention": 2, "attention_backward": 3}


def canonical_attention(
    kind: str, args: Mapping[str, Arg], inputs: list[int]
) -> tuple[dict[str, Arg], list[int]]:
    """Arguments of any attention kernel in canonical names and order."""
    by_name = {ATTENTION_ALIASES.get(name, name): value for name, value in args.items()}
    canonical: dict[str, Arg] = {}
    kept: list[int] = []
    for name in ATTENTION_ARGS[kind]:
        value = by_name.get(name)
        if isinstance(value, TensorRef):
            kept.append(inputs[value.index])
            value = TensorRef(len(kept) - 1)
        canonical[name] = value
    return canonical, kept


def attention_flops(call: OpCall) -> float:
    """Two matrix products forward (4 B H S T D), five backward (10 B H S T D)."""
    query = call.inputs[0 if call.kind == "attention" else 1].shape
    key = call.inputs[1 if call.kind == "attention" else 2].shape
    products = 2.0 if call.kind == "attention" else 5.0
    return products * 2.0 * query[0] * query[1] * query[2] * key[2] * query[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """An ``OpGraph`` and the fx graph that it was read from, node for node.

    Attributes:
        graph: The graph, independent of devices.
        module: The functional fx module; placeholders are the step inputs in ``graph``'s order,
            outputs the loss, the gradients of the used parameters in order, then the new values
            of the mutated buffers.
        node_of_op: The fx node of each op that is not an update.
        plain_entries: See ``workload.plain_entries``.
        known: Buffers whose values decide what the step computes, by name, with these values.
    """

    graph: OpGraph
    module: fx.GraphModule
    node_of_op: tuple[fx.Node, ...]
    plain_entries: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Reader:
    """Reads the columns of an ``OpGraph`` from a traced fx graph, once."""

    workload: Workload
    module: fx.GraphModule
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    batch: Any
    groups: tuple[ParameterGroup, ...]
    tensors: list[GraphTensor] = field(default_factory=list)
    tensor_ids: dict[tuple[fx.Node, int], int] = field(default_factory=dict)
    ops: list[GraphOp] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)

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
            optimizer_step_ratios=self._step_ratios(),
            loss=loss,
            master_dtype=str(self.workload.master_dtype or "").removeprefix("torch."),
            seen_scope=self._update_scope(gradients),
        )
        return CapturedStep(
            graph=graph,
            module=self.module,
            node_of_op=tuple(self.nodes),
            plain_entries=plain_entries(self.batch),
        )

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
        for node, (name, kind, _) in zip(placeholders, kinds, strict=True):
            self._add_tensor(node, 0, node.meta["val"], kind, name)
        for node in constants:
            name = str(node.target)
            self._add_tensor(node, 0, getattr(self.module, name), TensorKind.CONSTANT, name)
        dims = [*(dim for _, _, dim in kinds), *[None] * len(constants)]
        return [R if dim is None else S(dim) for dim in dims], batch_size

    def _batch_leaves(self) -> tuple[list[str], list[Tensor], list[int | None]]:
        self._check_keys()
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
            elif dim is None or (isinstance(dim, int) and 0 <= dim < value.dim()):
                dims.append(dim)
            else:
                raise CaptureError(
                    f"workload '{self.workload.name}': batch_dims says {dim!r} of a tensor of "
                    f"{tuple(value.shape)}; give one of its dimensions, from 0, or None."
                )
        return names, values, dims

    def _check_keys(self) -> None:
        """Refuse batch dimensions of entries that the batch does not have."""
        is_dict = isinstance(self.batch, dict)
        keys = list(self.batch) if is_dict else list(range(len(self.batch)))
        if unknown := [key for key in self.workload.batch_dims if key not in keys]:
            raise CaptureError(
                f"workload '{self.workload.name}': batch_dims names {unknown[0]!r}, which the "
                f"batch does not have; its entries are {', '.join(map(repr, keys))}."
            )

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
            # A node that the retrace added (a copy) gets module and phase of the node before it.
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
        if kind in ATTENTION:
            kind = ATTENTION[kind]
            args, inputs = canonical_attention(kind, args, inputs)
            outputs = outputs[: ATTENTION_NUM_OUTPUTS[kind]]
        made = [
            self._add_tensor(node, index, value, TensorKind.ACTIVATION)
            for index, value in enumerate(outputs)
            if isinstance(value, Tensor)
        ]
        call = OpCall(
            kind=kind,
            args=args,
            inputs=tuple(self.tensors[tensor].meta for tensor in inputs),
            outputs=tuple(self.tensors[tensor].meta for tensor in made),
        )
        read, written = bytes_read_and_written(call)
        self.ops.append(
            GraphOp(
                kind=kind,
                args=args,
                inputs=tuple(inputs),
                num_outputs=len(made),
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
                value = node.args[position]
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
        """Bytes of master weights and optimizer state per byte of parameter, by parameter."""
        options = dict(self.workload.optimizer_options)
        group_of = group_numbers(self.groups)
        members: dict[float, list[int]] = {}  # parameters by the ratio of their group
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

    def _step_ratios(self) -> tuple[float, float]:
        """The largest ``optimizer_step_ratios`` of a group, with copies in other dtypes."""
        load, most = self.workload, (0.0, 0.0)
        options = dict(load.optimizer_options)
        is_converted = load.master_dtype is not None or load.reduce_dtype is not None
        for group in self.groups:
            one, all_ = optimizer_step_ratios(load.optimizer, options, group.options)
            copied = float(is_converted)  # the gradient, to the dtype that is stepped
            if load.state_dtype is not None:  # its state is widened for a step
                copied += optimizer_state_ratio(load.optimizer, options, group.options)
            most = max(most[0], one + copied), max(most[1], all_ and all_ + copied)
        return most

    def _update_scope(self, trained: Iterable[int]) -> UpdateScope | None:
        """The optimizer's ``seen_scope``, probed with the kinds of parameters of each group."""
        group_of = group_numbers(self.groups)
        kinds: list[dict[Kind, None]] = [{} for _ in self.groups]
        for parameter in trained:
            meta = self.tensors[parameter]
            value = self.parameters[meta.name]
            notes = vars(value).keys() - vars(value.detach()).keys() - {"_is_param"}
            kind = Kind(len(meta.shape), meta.dtype.startswith("complex"), frozenset(notes))
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
        """Bytes of master weights and state per byte, over all trained parameters."""
        if len(set(ratios.values())) <= 1:
            return next(iter(ratios.values()), 0.0)
        sizes = {parameter: self.tensors[parameter].num_bytes for parameter in ratios}
        state = sum(ratio * sizes[parameter] for parameter, ratio in ratios.items())
        return state / sum(sizes.values())

    def _in_own_dtypes(self, ratio: float, trained: Iterable[int]) -> float:
        """Bytes of master weights and of the optimizer's state, per byte of parameter.

        Raises:
            CaptureError: the state would be kept in a wider dtype than the optimizer steps in.
        """
        master, kept = self.workload.master_dtype, self.workload.state_dtype
        metas = [self.tensors[parameter] for parameter in trained]
        whole = sum(meta.num_bytes for meta in metas)
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
            elements = meta.num_elements
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
            size = float(meta.num_bytes)
            added_up = float(self.tensors[gradient].num_bytes)
            self.ops.append(
                GraphOp(
                    kind="update",
                    args={},
                    inputs=(parameter, gradient),
                    num_outputs=1,
                    phase=Phase.UPDATE,
                    module=module_of[meta.name],
                    flops=meta.num_elements * (2.0 + 5.0 * state_ratio),
                    bytes_read=size * (1.0 + state_ratio) + added_up,
                    bytes_written=size * (1.0 + state_ratio),
                    name=f"update_{meta.name}",
                )
            )


def _flops(node: fx.Node, call: OpCall) -> float:
    if (own := FLOPS.get(call.kind)) is not None:
        return own(call)
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    counter = flop_registry.get(target.overloadpacket) or flop_registry.get(target)
    if counter is None and call.kind in ATTENTION_ARGS:
        return attention_flops(call)
    if counter is None:
        return float(elementwise_flops(call))

    def value_of(argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    args = pytree.tree_map(value_of, node.args)
    kwargs = pytree.tree_map(value_of, node.kwargs)
    return float(counter(*args, **kwargs, out_val=node.meta["val"]))
