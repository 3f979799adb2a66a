"""The operator graph of one training step, in columns.

Tensors come first: the inputs of the step (parameters, buffers, the batch, constants), then the
outputs of each op in program order, so the outputs of op ``i`` are the consecutive tensors
``output_start[i] : output_start[i + 1]``. Ops are in a topological order: the order in which one
device would run them.

``UpdateScope`` says what the update of one element depends on, and so which parts of a parameter
a device may update alone.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from heterog.errors import GraphError
from heterog.graph.op_costs import VIEW_KINDS
from heterog.graph.placement import ITEM_BYTES, Arg, OpCall, Placement, TensorMeta
from heterog.graph.sparse_pattern import SparsePattern
from heterog.grouped import grouped
from heterog.names import is_identifier, name_fault, shown, text_fault

ELEMENTWISE_OPTIMIZERS = frozenset(
    {
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    }
)  # fmt: skip
"""Optimizers of torch that treat each element on its own. Others look at a parameter's shape or
norm (Muon, Adafactor, LARS, LAMB) or at all parameters together (LBFGS)."""


class UpdateScope(StrEnum):
    """Values on which the update of an element depends, besides the options of its group.

    ``graph.optimizer_probe`` finds the scope by stepping the optimizer.
    """

    ELEMENT = "element"
    """Only those of the element: slices may be updated, each in a separate call."""
    PARAMETER = "parameter"
    """Those of its whole parameter, or the number of calls of the optimizer: parameters are
    updated whole, in one call per step."""
    MODEL = "model"
    """Those of all parameters: a device that updates any of them updates all, in one call per
    step."""

    @property
    def words(self) -> str:
        """Words that follow the optimizer's name in a sentence about its scope."""
        return {
            UpdateScope.ELEMENT: "treats every element on its own",
            UpdateScope.PARAMETER: "looks at whole parameters",
            UpdateScope.MODEL: "looks at all parameters together",
        }[self]

    def allows(self, wider: "UpdateScope") -> bool:
        """Whether an optimizer of this scope trains exactly on devices that respect ``wider``."""
        order = list(UpdateScope)
        return order.index(self) <= order.index(wider)


MAX_BATCH_SIZE = 2**20
MAX_BATCH_TIMES_OPS = 2**30
"""Limit because cost tables have a row for every share of the batch and a column for every op."""
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


# The device on which a graph was captured does not belong to its identity.
_DEVICE_ARGS = frozenset({"device", "layout", "pin_memory"})


class Phase(IntEnum):
    """The part of the training step that an op belongs to."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


class TensorKind(IntEnum):
    """The kind of a tensor, which decides how long it lives."""

    ACTIVATION = 0
    PARAMETER = 1
    BUFFER = 2
    BATCH = 3
    CONSTANT = 4
    GRADIENT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTensor(TensorMeta):
    """One tensor: global shape, dtype, kind, and a name if it is an input of the step."""

    kind: TensorKind = TensorKind.ACTIVATION
    name: str = ""

    @property
    def meta(self) -> TensorMeta:
        """Shape and dtype only."""
        return TensorMeta(self.shape, self.dtype)


Curve = tuple[tuple[float, float], ...]
"""Points (share of the batch, seconds), by rising shares up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOp:
    """One op.

    Attributes:
        kind: ATen op with overload, no namespace; ``"update"`` for a parameter's optimizer step
            with inputs ``(parameter, gradient)``.
        args: Arguments of the op's schema by name (see ``OpCall``); empty for imported graphs.
        inputs: Tensor ids, one per ``TensorRef`` in ``args``.
        num_outputs: Number of tensors that it makes.
        phase: Forward, backward or update.
        module: Dotted path of the module that ran it; ``""`` is the root.
        flops: Floating-point operations of the whole (global) op.
        bytes_read: Bytes that it reads at global size.
        bytes_written: Bytes that it writes at global size.
        rule: Input and output placements along the batch that the file states itself (ops of
            unknown kind in imported graphs); ``None`` if the built-in table decides.
        measured_s: Measured seconds at global size by name of device type, or points (share of
            the batch, seconds) with rising shares up to 1 (imported cost tables).
        name: Name for messages; the fx node's name in captured graphs.
    """

    kind: str
    args: Mapping[str, Arg]
    inputs: tuple[int, ...]
    num_outputs: int
    phase: Phase
    module: str
    flops: float
    bytes_read: float
    bytes_written: float
    rule: tuple[tuple[Placement, ...], tuple[Placement, ...]] | None = None
    measured_s: tuple[tuple[str, float | Curve], ...] = ()
    name: str = ""

    @property
    def is_write(self) -> bool:
        """Whether it writes a value to its first input, a parameter or a buffer."""
        return self.kind == "copy_.default"


@dataclass(frozen=True, kw_only=True, eq=False)
class OpGraph:
    """One training step as a graph of operators.

    Attributes:
        name: Name of the workload.
        source: Source from which the workload can be made again (zoo name or
            ``file.py:function``).
        batch_size: Number of samples in the global batch.
        tensors: All tensors; step inputs first, then op outputs in op order.
        ops: All ops in program order.
        batch_placements: Placement along the batch of each input tensor of the step.
        optimizer: Class name of the optimizer.
        optimizer_state_ratio: Bytes of optimizer state per byte of parameter.
        optimizer_step_ratios: Most bytes that the optimizer makes in a call, beside its state: per
            byte of the largest tensor, where it steps one after another (on CPUs), and per byte of
            all tensors of the call, where it steps them together; 0 if it never does.
        loss: Tensor id of the loss.
        grouped_like: A graph of the same ops on another batch; this graph takes its groups.
        patterns: Patterns of the constant sparse matrices, which ops name by their keys.
        master_dtype: Dtype of the optimizer's own copies of parameters; empty if it has none.
        seen_scope: What the optimizer was seen to look at; ``None`` if it is known by its name, as
            torch's own elementwise ones are.

    Raises:
        GraphError: an op reads a tensor that does not exist or is made later, sizes disagree, the
            graph is larger than can be planned, ``grouped_like`` has other ops, a name is invalid
            (see ``heterog.names``), or ``master_dtype`` is no float type.
    """

    name: str
    source: str
    batch_size: int
    tensors: tuple[GraphTensor, ...]
    ops: tuple[GraphOp, ...]
    batch_placements: tuple[Placement, ...]
    optimizer: str
    optimizer_state_ratio: float
    loss: int
    grouped_like: "OpGraph | None" = None
    patterns: tuple[SparsePattern, ...] = ()
    master_dtype: str = ""
    seen_scope: UpdateScope | None = None
    optimizer_step_ratios: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self._check_words()
        if self.master_dtype and not _is_floating(self.master_dtype):
            raise GraphError(
                f"graph '{self.name}': the master_dtype {shown(self.master_dtype)} is no type of "
                "floating-point numbers; give float32, or leave it out."
            )
        num_made = self.num_inputs + sum(op.num_outputs for op in self.ops)
        if num_made != len(self.tensors) or self.num_inputs < 0:
            raise GraphError(
                f"graph '{self.name}': {len(self.tensors)} tensors, but inputs and the outputs of "
                f"its ops are {num_made}."
            )
        if not 0 <= self.loss < num_made:
            raise GraphError(f"graph '{self.name}': the loss is tensor {self.loss}, missing.")
        for index, op in enumerate(self.ops):
            if op.inputs and not 0 <= min(op.inputs) <= max(op.inputs) < self.output_start[index]:
                raise GraphError(
                    f"graph '{self.name}': op {index} '{op.name or op.kind}' reads a tensor that "
                    "is missing or made only later; write the ops in the order in which they run."
                )
        like = self.grouped_like
        if like is not None and not same_ops(self, like):
            raise GraphError(f"graph '{self.name}' has other ops than the one it is grouped like.")
        if self.batch_size < 1:
            raise GraphError(f"graph '{self.name}': batch size {self.batch_size} is below 1.")
        if (
            self.batch_size > MAX_BATCH_SIZE
            or self.batch_size * len(self.ops) > MAX_BATCH_TIMES_OPS
        ):
            raise GraphError(
                f"graph '{self.name}': a batch of {shown(self.batch_size)} for {len(self.ops):,} "
                f"ops is more than heterog plans: at most {MAX_BATCH_SIZE:,} samples, and at most "
                f"{MAX_BATCH_TIMES_OPS:,} samples times ops."
            )

    def _check_words(self) -> None:
        """Check that names are valid, and that every other text is one printable line."""
        fault = name_fault(self.name)
        if fault is not None:
            raise GraphError(f"the name of the graph, {shown(self.name)}, {fault}.")
        if not is_identifier(self.optimizer):
            raise GraphError(
                f"graph '{self.name}': the optimizer {shown(self.optimizer)} is not the name of "
                "a class."
            )
        words = {self.source, *(tensor.name for tensor in self.tensors)}
        for op in self.ops:
            words.update((op.kind, op.module, op.name))
        for text in sorted(words):
            if (fault := text_fault(text)) is not None:
                raise GraphError(f"graph '{self.name}': the text {shown(text)} {fault}.")

    @cached_property
    def num_ops(self) -> int:
        """Number of ops, views and updates included."""
        return len(self.ops)

    @cached_property
    def num_inputs(self) -> int:
        """Number of step inputs (parameters, buffers, batch, constants)."""
        return len(self.batch_placements)

    @cached_property
    def output_start(self) -> IntArray:
        """First output tensor of each op.  # [num_ops + 1]"""
        counts = np.array([op.num_outputs for op in self.ops], np.int32)
        return (self.num_inputs + np.concatenate([[0], np.cumsum(counts)])).astype(np.int32)

    @cached_property
    def producer(self) -> IntArray:
        """Op that makes each tensor, -1 for step inputs.  # [num_tensors]"""
        counts = [op.num_outputs for op in self.ops]
        made = np.repeat(np.arange(self.num_ops, dtype=np.int32), counts)
        return np.concatenate([np.full(self.num_inputs, -1, np.int32), made])

    @cached_property
    def outputs(self) -> tuple[range, ...]:
        """Ids of the tensors that each op makes."""
        starts = self.output_start.tolist()
        return tuple(map(range, starts[:-1], starts[1:]))

    @cached_property
    def tensor_bytes(self) -> npt.NDArray[np.int64]:
        """Global bytes of each tensor.  # [num_tensors]"""
        return np.array([tensor.num_bytes for tensor in self.tensors], np.int64)

    @cached_property
    def is_view(self) -> npt.NDArray[np.bool_]:
        """Ops that only show memory in another way and cost nothing.  # [num_ops]"""
        return np.array([op.kind in VIEW_KINDS for op in self.ops], np.bool_)

    @cached_property
    def is_constant(self) -> npt.NDArray[np.bool_]:
        """Ops computed from buffers and constants alone.  # [num_ops]"""
        free = [
            tensor.kind in (TensorKind.BUFFER, TensorKind.CONSTANT)
            for tensor in self.tensors[: self.num_inputs]
        ]
        constant = np.zeros(self.num_ops, np.bool_)
        for index, op in enumerate(self.ops):
            constant[index] = op.phase != Phase.UPDATE and all(free[t] for t in op.inputs)
            free.extend([bool(constant[index])] * op.num_outputs)
        return constant

    @cached_property
    def storage(self) -> IntArray:
        """For each tensor, the tensor that owns its memory, through views.  # [num_tensors]"""
        storage = np.arange(len(self.tensors), dtype=np.int32)
        for index, op in enumerate(self.ops):
            if self.is_view[index]:
                storage[self.outputs[index]] = storage[op.inputs[0]]
        return storage

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Ops that read each tensor, in program order."""
        readers = grouped(
            (tensor, index)
            for index, op in enumerate(self.ops)
            for tensor in dict.fromkeys(op.inputs)
        )
        return tuple(tuple(readers.get(tensor, ())) for tensor in range(len(self.tensors)))

    def readers(self, tensor: int) -> Iterator[int]:
        """Ops other than views that read a tensor, directly or through views."""
        for reader in self.consumers[tensor]:
            if self.is_view[reader]:
                for output in self.outputs[reader]:
                    yield from self.readers(output)
            else:
                yield int(reader)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Tensor ids of the parameters, tied ones only once."""
        return self.inputs_of_kind(TensorKind.PARAMETER)

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Tensor ids of the batch."""
        return self.inputs_of_kind(TensorKind.BATCH)

    def inputs_of_kind(self, kind: TensorKind) -> tuple[int, ...]:
        """Tensor ids of the step inputs of a kind."""
        return tuple(i for i in range(self.num_inputs) if self.tensors[i].kind == kind)

    @cached_property
    def scope(self) -> UpdateScope:
        """Scope of the optimizer: as probed, or else by its name.

        If the step itself writes to a trained parameter, parameters are updated whole.
        """
        is_known = self.optimizer in ELEMENTWISE_OPTIMIZERS
        scope = self.seen_scope or (UpdateScope.ELEMENT if is_known else UpdateScope.PARAMETER)
        return UpdateScope.PARAMETER if self.written and scope == UpdateScope.ELEMENT else scope

    @cached_property
    def trained(self) -> frozenset[int]:
        """Parameters that are updated."""
        return frozenset(parameter for _, parameter, _ in self.updates)

    @cached_property
    def written(self) -> frozenset[int]:
        """Trained parameters that ops write to (``weight.data *= mask``), beside their updates."""
        return self.trained.intersection(op.inputs[0] for op in self.ops if op.is_write)

    @cached_property
    def updates_elementwise(self) -> bool:
        """Whether the optimizer is known to treat each element on its own."""
        return self.scope == UpdateScope.ELEMENT

    @property
    def is_stepped_in_pieces(self) -> bool:
        """Whether ranks step large parameters in pieces; see ``runtime.step.pieces``."""
        return self.updates_elementwise and self.seen_scope is None

    def stepped_dtype(self, parameter: int) -> str:
        """Dtype in which the optimizer steps a parameter: that of the master copy, if any."""
        dtype = self.tensors[parameter].dtype
        return self.master_dtype if self.master_dtype and _is_floating(dtype) else dtype

    @cached_property
    def updates(self) -> tuple[tuple[int, int, int], ...]:
        """Op, parameter and gradient of every optimizer step, in program order."""
        return tuple(
            (index, op.inputs[0], op.inputs[1])
            for index, op in enumerate(self.ops)
            if op.phase == Phase.UPDATE
        )

    @cached_property
    def peak_live_bytes(self) -> int:
        """Peak bytes on one device that runs the whole step: inputs, optimizer state and values.

        A value lives from its op to its last reader, views included, in program order.
        """
        last_reader = np.full(len(self.tensors), -1, np.int64)
        for index, op in enumerate(self.ops):
            last_reader[self.storage[list(op.inputs)]] = index
        live = sum(int(self.tensor_bytes[tensor]) for tensor in range(self.num_inputs))
        live += round(
            self.optimizer_state_ratio
            * sum(int(self.tensor_bytes[parameter]) for _, parameter, _ in self.updates)
        )
        made = np.flatnonzero(self.storage == np.arange(len(self.tensors)))
        made = made[self.producer[made] >= 0]
        made = made[self.phases[self.producer[made]] != Phase.UPDATE]  # updates write in place
        begin, sizes = self.producer[made], self.tensor_bytes[made]
        more = np.zeros(self.num_ops + 1, np.int64)
        np.add.at(more, begin, sizes)
        np.subtract.at(more, np.maximum(begin, last_reader[made]) + 1, sizes)
        return live + int(np.cumsum(more).max(initial=0))

    @cached_property
    def num_parameters(self) -> int:
        """Number of scalar parameters, tied ones counted once."""
        return sum(self.tensors[i].num_elements for i in self.parameters)

    @cached_property
    def phases(self) -> IntArray:
        """Phase of each op.  # [num_ops]"""
        return np.array([op.phase for op in self.ops], np.int32)

    @cached_property
    def flops(self) -> FloatArray:
        """FLOPs of each op at global size.  # [num_ops]"""
        return np.array([op.flops for op in self.ops], np.float64)

    @cached_property
    def bytes_moved(self) -> FloatArray:
        """Bytes read and written by each op at global size.  # [num_ops]"""
        return np.array([op.bytes_read + op.bytes_written for op in self.ops], np.float64)

    @cached_property
    def calls(self) -> tuple[OpCall, ...]:
        """The ops in the form that sharding rules take; one object for all that are alike."""
        metas = [tensor.meta for tensor in self.tensors]
        known: dict[tuple[object, ...], OpCall] = {}
        found = []
        for index, op in enumerate(self.ops):
            inputs = tuple(metas[tensor] for tensor in op.inputs)
            outputs = tuple(metas[tensor] for tensor in self.outputs[index])
            # Arguments as text: 1, 1.0 and True are equal numbers, but not the same argument.
            key = op.kind, str(op.args), inputs, outputs
            if key not in known:
                known[key] = OpCall(kind=op.kind, args=op.args, inputs=inputs, outputs=outputs)
            found.append(known[key])
        return tuple(found)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what strategies depend on: ops, tensors and batch, but not costs or devices."""
        digest = hashlib.sha256()
        digest.update(json.dumps([self.batch_size, self.optimizer, self.loss]).encode())
        for tensor in self.tensors:
            digest.update(f"{tensor.shape}{tensor.dtype}{int(tensor.kind)};".encode())
        for op in self.ops:
            args = {name: value for name, value in op.args.items() if name not in _DEVICE_ARGS}
            digest.update(
                f"{op.kind}{op.inputs}{op.num_outputs}{op.module}{args}{op.rule};".encode()
            )
        return digest.hexdigest()[:16]

    def describe_difference(self, other: "OpGraph") -> str | None:
        """The first difference to another graph in words, naming the module; ``None`` if equal."""
        if self.fingerprint == other.fingerprint:
            return None
        if self.batch_size != other.batch_size:
            return f"batch size {self.batch_size} against {other.batch_size}"
        for index, (mine, theirs) in enumerate(zip(self.ops, other.ops, strict=False)):
            if (mine.kind, mine.inputs, mine.module) != (
                theirs.kind,
                theirs.inputs,
                theirs.module,
            ):
                return (
                    f"op {index}: {mine.kind} in module '{mine.module or '(root)'}' against "
                    f"{theirs.kind} in '{theirs.module or '(root)'}'"
                )
        for mine_t, theirs_t in zip(self.tensors, other.tensors, strict=False):
            if (mine_t.shape, mine_t.dtype) != (theirs_t.shape, theirs_t.dtype):
                name = mine_t.name or theirs_t.name or "an activation"
                return (
                    f"{name}: {mine_t.shape} {mine_t.dtype} against "
                    f"{theirs_t.shape} {theirs_t.dtype}"
                )
        if self.optimizer != other.optimizer:
            return f"optimizer {self.optimizer} against {other.optimizer}"
        return f"{self.num_ops} ops against {other.num_ops}"


def _is_floating(dtype: str) -> bool:
    return dtype in ITEM_BYTES and dtype.startswith(("float", "bfloat"))


def same_ops(first: OpGraph, second: OpGraph) -> bool:
    """Whether two graphs run the same ops on the same tensors, whatever their shapes."""
    return first.num_inputs == second.num_inputs and [
        (op.kind, op.inputs, op.num_outputs, op.module, op.phase) for op in first.ops
    ] == [(op.kind, op.inputs, op.num_outputs, op.module, op.phase) for op in second.ops]


def topological_order(
    num_ops: int, op_inputs: Sequence[Sequence[int]], made_by: IntArray
) -> list[int]:
    """Order ops so that producers come first, keeping the given order where possible.

    Args:
        num_ops: Number of ops.
        op_inputs: Tensor ids that each op reads.
        made_by: Op that makes each tensor, -1 for step inputs.

    Raises:
        GraphError: the ops form a cycle; names one op on it.
    """
    order: list[int] = []
    state = np.zeros(num_ops, np.int8)  # 0 new, 1 open, 2 done
    for root in range(num_ops):
        stack = [root]
        while stack:
            op = stack[-1]
            if state[op] == 0:
                state[op] = 1
                producers = {int(made_by[tensor]) for tensor in op_inputs[op]} - {-1}
                pending = [p for p in sorted(producers, reverse=True) if state[p] != 2]
                if any(state[p] == 1 for p in pending):
                    raise GraphError(f"the graph has a cycle through op {op}.")
                stack.extend(pending)
                continue
            stack.pop()
            if state[op] == 1:
                state[op] = 2
                order.append(op)
    return order
