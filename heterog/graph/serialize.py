"""Graphs as files: versioned JSON, compressed where the name ends in ``.gz``.

``save_graph`` writes what ``load_graph`` reads. The format is meant for other tools too; written
by hand, a step of one layer looks like this::

    {
      "schema_version": 1,
      "name": "one layer", "batch_size": 32, "loss": "y",
      "optimizer": "SGD", "optimizer_state_ratio": 0.0,
      "tensors": [
        {"name": "x", "shape": [32, 64], "dtype": "float32", "kind": "batch"},
        {"name": "w", "shape": [64, 10], "dtype": "float32", "kind": "parameter"},
        {"name": "y", "shape": [32, 10], "dtype": "float32"},
        {"name": "dw", "shape": [64, 10], "dtype": "float32", "kind": "gradient"}
      ],
      "ops": [
        {"kind": "my_layer", "inputs": ["x", "w"], "outputs": ["y"], "batch_dims": [0],
         "flops": 40960, "measured_s": {"V100-16GB": 1.5e-5}},
        {"kind": "my_layer_gradient", "inputs": ["x", "y"], "outputs": ["dw"], "phase": "backward",
         "rule": {"inputs": ["S(0)", "S(0)"], "outputs": ["P"]}, "flops": 40960},
        {"kind": "update", "inputs": ["w", "dw"]}
      ]
    }

Tensors are named by their position in ``tensors`` or by their ``name``. Those that no op makes are
the inputs of the step. Fields of a tensor:

- ``shape``, ``dtype`` (``"float32"``, ``"int64"``, ...);
- ``kind``: ``activation`` (default), ``gradient``; for step inputs ``parameter``, ``buffer``,
  ``batch`` or ``constant``;
- ``placement``, for step inputs: ``"R"``, or ``"S(dim)"`` where the batch lies along ``dim``, or
  ``"S(dim,outer)"`` where that dimension is written ``outer x batch x inner``; or simply
  ``batch_dim``. By default a ``batch`` tensor whose first dimension is the batch size is split
  there, everything else is ``"R"``.

Fields of an op, all but the first three optional:

- ``kind``: an ATen op with overload (``"mm.default"``), ``"update"`` for the optimizer step of one
  parameter with inputs (parameter, gradient), or any other word;
- ``inputs``, ``outputs``: tensors; an update may leave ``outputs`` out;
- ``phase``: ``forward`` (default), ``backward``, ``update`` (default of ``update``);
- ``module``: dotted path; ops of one module are planned together;
- ``args``: the schema's arguments by name, for ATen ops whose built-in sharding rule is to be
  used: ``{"t": 0}`` is the op's first input, ``{"f": "-inf"}`` a number that JSON has not;
- ``rule``: placements along the batch of all inputs and outputs: ``R``, ``S`` or ``P`` (a partial
  sum: the sum over all devices is the tensor); an output of local statistics is ``L``;
- ``batch_dims``: shorter than a rule: the batch dimension of each output, ``null`` where it has
  none. Inputs that are split are then used as they are, all others whole; an output without batch
  dimension is a sum over the batch (``P``) if an input is split. An op with neither a rule nor a
  built-in one runs whole on every device;
- ``flops`` (default 0), ``bytes_read`` and ``bytes_written`` (default: every input read once,
  every output written once) of the whole batch;
- ``measured_s``: by device type name the seconds of the whole batch, or points ``[share of the
  batch, seconds]`` with rising shares up to 1: ``[[0.125, 4.1e-6], [0.5, 1.6e-5], [1, 3.1e-5]]``.
  They go before the roofline. One number means that the time follows the share; between points
  it is interpolated, and below the first the line through the first two goes on;
- ``name``: for messages.

An op that costs nothing (TensorFlow's ``Identity``, a reshape) is a *view*: a kind of
``VIEW_KINDS`` in ``op_costs``, whose outputs share the memory of its first input, such as
``{"kind": "alias.default", "inputs": ["x"], "outputs": ["y"], "args": {"self": {"t": 0}}}``. The
built-in rule of ``alias`` leaves every tensor as it lies: split, whole or a partial sum. An op
without FLOPs and bytes that is no view still takes the launch of a kernel, unless ``measured_s``
says 0.

``batch_dims`` with ``null`` needs care. An op that passes the gradient of a weight on reads a
partial sum; with ``"batch_dims": [null]`` it reads it whole, after an all-reduce. Let it be a view
as above, or give it the rule ``{"inputs": ["P"], "outputs": ["P"]}``. An op that makes a shape or
an index of a split tensor makes no sum over the batch; it needs a rule with the output ``R``. Both
are warned of.

A *control edge*, where op B waits for op A without reading anything of it, is a tensor of no
bytes: one more output of A, of shape ``[0]``, that is one more input of B. Both have a ``rule`` in
which that tensor is ``R``. If A and B run on different devices, the edge takes a message's
latency.

Names (of the graph and of device types) are letters, digits, spaces and
``. _ : @ + , ( ) / # = -``; every other text is one line that can be printed.

``patterns`` lists the sparse matrices that ops (``heterog_sparse.product.default``) name by the
hash in their argument ``pattern``: ``num_columns``, ``row_entries`` with the number of entries of
each row, and ``columns`` with their columns, row by row. Only needed where rows are cut.

``master_dtype`` is the dtype of the optimizer's own copies of parameters, if it has any. What they
occupy belongs to ``optimizer_state_ratio``; they are what islands average. ``update_scope`` says
what the update of an element depends on: that ``element`` alone, its whole ``parameter`` (as in
Muon), or all parameters of the ``model`` (as in Prodigy). By default the name of ``optimizer``
decides: torch's elementwise ones are known, others look at whole parameters.

``tensors`` and ``ops`` may also be one object of equally long columns instead of a list of
records, with ``null`` for a field that is left out; ``save_graph`` writes that. There ``kind`` and
``module`` of an op may be positions in the lists ``kinds`` and ``modules`` of the file.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Strict, Tag, ValidationError

from heterog.errors import GraphError, HeterogWarning, InputFileError
from heterog.files import read_json, write_json
from heterog.graph.batch_plan import batch_plan, built_in_rule
from heterog.graph.op_costs import VIEW_KINDS, bytes_read_and_written
from heterog.graph.op_graph import (
    MAX_BATCH_SIZE,
    GraphOp,
    GraphTensor,
    OpGraph,
    Phase,
    TensorKind,
    topological_order,
)
from heterog.graph.placement import ITEM_BYTES, Arg, L, OpCall, P, Placement, R, S, TensorRef
from heterog.graph.sharding_rules import RULES, claims_checked
from heterog.graph.sparse_pattern import MOST_COLUMNS, SparsePattern
from heterog.graph.update_scope import UpdateScope
from heterog.names import shown
from heterog.records import (
    Amount,
    Identifier,
    Int32,
    Many,
    Name,
    Record,
    Seconds,
    Text,
    field_name,
    first_fault,
)
from heterog.units import format_bytes

SCHEMA_VERSION = 1

_PLACEMENT = re.compile(r"S\(\s*(\d{1,9})\s*(?:,\s*(\d{1,9})\s*)?\)")
_MOST_ARG_DEPTH = 8
_MOST_TENSOR_BYTES = 2**44  # sums over any graph stay within 64 bits
_INPUT_KINDS = (
    TensorKind.PARAMETER,
    TensorKind.BUFFER,
    TensorKind.BATCH,
    TensorKind.CONSTANT,
)


def save_graph(graph: OpGraph, path: str | Path) -> None:
    """Write a graph to a file.

    Args:
        graph: Any graph.
        path: Path of the file; compressed if it ends in ``.gz``.

    Raises:
        InputFileError: the file cannot be written.
    """
    write_json(path, graph_to_dict(graph))


def load_graph(path: str | Path) -> OpGraph:
    """Read a graph, saved by ``save_graph`` or written by another tool.

    Ops may be in any order; they are put into a topological one, keeping the given order where
    possible.

    Raises:
        InputFileError: the file cannot be read or is not a graph; says what is wrong and where.
    """
    return graph_from_dict(read_json(path, "graph file"), f"graph file {path}")


def graph_to_dict(graph: OpGraph) -> dict[str, Any]:
    """Convert a graph to JSON values; see the module docstring."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(o.kind for o in graph.ops))}
    modules = {
        path: number for number, path in enumerate(dict.fromkeys(o.module for o in graph.ops))
    }
    ops = graph.ops
    tensors = graph.tensors
    placements: list[str | None] = [str(place) for place in graph.batch_placements]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": graph.name,
        "source": graph.source,
        "batch_size": graph.batch_size,
        "optimizer": graph.optimizer,
        "optimizer_state_ratio": float(graph.optimizer_state_ratio),
        "loss": int(graph.loss),
        "kinds": list(kinds),
        "modules": list(modules),
        "tensors": {
            "shape": [[int(size) for size in tensor.shape] for tensor in tensors],
            "dtype": [tensor.dtype for tensor in tensors],
            "kind": [tensor.kind.name.lower() for tensor in tensors],
            "name": [tensor.name or None for tensor in tensors],
            "placement": placements + [None] * (len(tensors) - len(placements)),
        },
        "ops": {
            "kind": [kinds[op.kind] for op in ops],
            "inputs": [[int(tensor) for tensor in op.inputs] for op in ops],
            "outputs": [list(graph.outputs(index)) for index in range(graph.num_ops)],
            "phase": [op.phase.name.lower() for op in ops],
            "module": [modules[op.module] for op in ops],
            "args": [
                {key: _arg_to_json(value) for key, value in op.args.items()} or None for op in ops
            ],
            "flops": [float(op.flops) for op in ops],
            "bytes_read": [float(op.bytes_read) for op in ops],
            "bytes_written": [float(op.bytes_written) for op in ops],
            "rule": [_rule_to_json(op) for op in ops],
            "measured_s": [_measured_to_json(op) for op in ops],
            "name": [op.name or None for op in ops],
        },
    } | _rare_fields(graph)


def _rare_fields(graph: OpGraph) -> dict[str, Any]:
    """Masters, scope and sparse matrices as JSON values; empty for a graph without any."""
    found: dict[str, Any] = {}
    if graph.master_dtype:
        found["master_dtype"] = graph.master_dtype
    if graph.seen_scope:
        found["update_scope"] = str(graph.seen_scope)
    if graph.patterns:
        found["patterns"] = [
            {
                "num_columns": pattern.num_columns,
                "row_entries": np.diff(pattern.row_starts).tolist(),
                "columns": pattern.columns.tolist(),
            }
            for pattern in graph.patterns
        ]
    return found


def graph_from_dict(record: object, where: str) -> OpGraph:
    """The inverse of ``graph_to_dict``; also reads the handwritten form.

    Args:
        record: JSON values.
        where: Start of every message, usually the name of the file.

    Raises:
        InputFileError: the record is not a graph; says what is wrong and where.
    """
    if not isinstance(record, dict):
        raise InputFileError(f"{where}: not a graph, but a JSON {type(record).__name__}.")
    version = record.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise InputFileError(
            f"{where}: schema_version is {shown(version)}; this heterog reads {SCHEMA_VERSION}."
        )
    try:
        spec = _GraphRecord.model_validate(
            record | {key: _rows(record[key], key) for key in ("tensors", "ops") if key in record}
        )
        reader = _Reader(spec)
        graph = reader.graph()
        _check_batch_plan(graph)
    except ValidationError as error:
        raise InputFileError(f"{where}: {first_fault(error)}") from error
    except GraphError as error:
        raise InputFileError(f"{where}: {error}") from error
    if reader.doubts:
        more = len(reader.doubts) - 1
        rest = f" So do {more} more ops." if more else ""
        warnings.warn(f"{where}: {reader.doubts[0]}{rest}", HeterogWarning, stacklevel=2)
    return graph


_Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class _TensorRecord(Record):
    shape: list[Int32]
    dtype: str
    kind: Literal["activation", "parameter", "buffer", "batch", "constant", "gradient"] = (
        "activation"
    )
    name: Text = ""
    placement: str | None = None
    batch_dim: Int32 | None = None


class _RuleRecord(Record):
    inputs: list[str]
    outputs: list[str]


_Point = Annotated[tuple[_Share, Seconds], Strict(False)]  # JSON has lists only
_Curve = Annotated[list[_Point], Field(min_length=1, max_length=1000)]
_Measured = Annotated[
    Annotated[Seconds, Tag("<seconds>")] | Annotated[_Curve, Tag("<points>")],
    Discriminator(lambda value: "<points>" if isinstance(value, list) else "<seconds>"),
]


class _OpRecord(Record):
    kind: Text | int
    inputs: list[int | str]
    outputs: list[int | str] | None = None
    phase: Literal["forward", "backward", "update"] | None = None
    module: Text | int = ""
    args: dict[str, Any] = Field(default_factory=dict)
    flops: Amount = 0.0
    bytes_read: Amount | None = None
    bytes_written: Amount | None = None
    rule: _RuleRecord | None = None
    batch_dims: list[Int32 | None] | None = None
    measured_s: dict[Name, _Measured] = Field(default_factory=dict)
    name: Text = ""


class _PatternRecord(Record):
    num_columns: Annotated[int, Field(ge=1, le=MOST_COLUMNS)]
    row_entries: Many[Annotated[int, Field(ge=0, le=MOST_COLUMNS)]]
    columns: Many[Int32]

    def pattern(self) -> SparsePattern:
        """Check the entries and make the pattern."""
        starts = np.zeros(len(self.row_entries) + 1, np.int64)
        np.cumsum(np.array(self.row_entries, np.int64), out=starts[1:])
        return SparsePattern(starts, np.array(self.columns, np.int32), self.num_columns)


class _GraphRecord(Record):
    schema_version: int
    name: Name
    source: Text = ""
    batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
    optimizer: Identifier
    optimizer_state_ratio: Annotated[float, Field(ge=0.0, le=1e3, allow_inf_nan=False)]
    loss: int | str
    kinds: Many[Text] = Field(default_factory=list)
    modules: Many[Text] = Field(default_factory=list)
    tensors: Many[_TensorRecord]
    ops: Many[_OpRecord]
    patterns: list[_PatternRecord] = Field(default_factory=list)
    master_dtype: Text = ""
    update_scope: Literal["element", "parameter", "model"] | None = None


def _rows(value: object, field: str) -> object:
    """Convert columns to a list of records; returns anything else unchanged."""
    if not isinstance(value, dict):
        return value
    lengths = {name: len(v) if isinstance(v, list) else -1 for name, v in value.items()}
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        raise GraphError(
            f"the columns of '{field}' must be lists of one length; they have "
            + ", ".join(
                f"{field_name([name])}: {n if n >= 0 else 'no list'}"
                for name, n in list(lengths.items())[:20]
            )
            + "."
        )
    return [
        {name: entry for name, entry in zip(value, row, strict=True) if entry is not None}
        for row in zip(*value.values(), strict=True)
    ]


class _Reader:
    """Converts a record to a graph: resolves names, orders the ops, renumbers the tensors."""

    def __init__(self, spec: _GraphRecord) -> None:
        self.spec = spec
        self.position: dict[str, int] = {}
        self.ambiguous: set[str] = set()
        self.updated_by: dict[int, int] = {}
        self.doubts: list[str] = []
        for number, tensor in enumerate(spec.tensors):
            if tensor.name and self.position.setdefault(tensor.name, number) != number:
                self.ambiguous.add(tensor.name)
        self.metas = [
            GraphTensor(
                shape=tuple(tensor.shape),
                dtype=self._dtype(number, tensor.dtype),
                kind=TensorKind[tensor.kind.upper()],
                name=tensor.name,
            )
            for number, tensor in enumerate(spec.tensors)
        ]
        self.kinds = [self._from_table(op.kind, spec.kinds, "kinds") for op in spec.ops]
        self.modules = [self._from_table(op.module, spec.modules, "modules") for op in spec.ops]
        self.phases = [
            Phase[(op.phase or ("update" if kind == "update" else "forward")).upper()]
            for op, kind in zip(spec.ops, self.kinds, strict=True)
        ]
        self.inputs = [
            [self._tensor(name, f"{self._op(i)} reads") for name in op.inputs]
            for i, op in enumerate(spec.ops)
        ]
        self.outputs = [self._outputs(i, op) for i, op in enumerate(spec.ops)]
        self.made = {tensor for outputs in self.outputs for tensor in outputs}
        self.updated = {
            tensor
            for outputs, phase in zip(self.outputs, self.phases, strict=True)
            for tensor in (outputs if phase == Phase.UPDATE else ())
        }
        for index in range(len(spec.ops)):
            self._check_op(index)

    def graph(self) -> OpGraph:
        spec = self.spec
        made_by = np.full(len(self.metas), -1, np.int32)
        for index, outputs in enumerate(self.outputs):
            for tensor in outputs:
                if made_by[tensor] >= 0:
                    raise GraphError(
                        f"{self._name(tensor)} is made by {self._op(int(made_by[tensor]))} and "
                        f"again by {self._op(index)}; every tensor is made once."
                    )
                made_by[tensor] = index
        order = topological_order(len(spec.ops), self.inputs, made_by)
        step_inputs = [tensor for tensor, op in enumerate(made_by) if op < 0]
        for tensor, meta in enumerate(self.metas):
            self._check_tensor(tensor, meta, is_input=made_by[tensor] < 0)
        placements = {tensor: self._input_placement(tensor) for tensor in step_inputs}
        rules = self._rules(order, dict(placements))
        sequence = step_inputs + [tensor for op in order for tensor in self.outputs[op]]
        number_of = {tensor: number for number, tensor in enumerate(sequence)}
        loss = self._tensor(spec.loss, "the loss is")
        if made_by[loss] < 0 or loss in self.updated:
            raise GraphError(
                f"the loss is {self._name(loss)}, which no op of the forward or backward pass "
                "makes."
            )
        return OpGraph(
            name=spec.name,
            source=spec.source,
            batch_size=spec.batch_size,
            tensors=tuple(self.metas[tensor] for tensor in sequence),
            ops=tuple(self._graph_op(op, number_of, rules[op]) for op in order),
            batch_placements=tuple(placements[tensor] for tensor in step_inputs),
            optimizer=spec.optimizer,
            optimizer_state_ratio=spec.optimizer_state_ratio,
            loss=number_of[loss],
            patterns=tuple(each.pattern() for each in spec.patterns),
            master_dtype=spec.master_dtype,
            seen_scope=UpdateScope(spec.update_scope) if spec.update_scope else None,
        )

    def _graph_op(
        self,
        index: int,
        number_of: Mapping[int, int],
        rule: tuple[tuple[Placement, ...], tuple[Placement, ...]] | None,
    ) -> GraphOp:
        op = self.spec.ops[index]
        if self.phases[index] == Phase.UPDATE:
            self._check_update(index)
            # Reads parameter, gradient and state; writes parameter and state.
            size = float(self.metas[self.inputs[index][0]].meta.num_bytes)
            state = self.spec.optimizer_state_ratio
            read, written = size * (2.0 + state), size * (1.0 + state)
        else:
            with claims_checked(f"the args of {self._op(index)} do not fit its kind"):
                read, written = bytes_read_and_written(self._call(index))
        return GraphOp(
            kind=self.kinds[index],
            args=self._args(index),
            inputs=tuple(number_of[tensor] for tensor in self.inputs[index]),
            num_outputs=len(self.outputs[index]),
            phase=self.phases[index],
            module=self.modules[index],
            flops=op.flops,
            bytes_read=read if op.bytes_read is None else op.bytes_read,
            bytes_written=written if op.bytes_written is None else op.bytes_written,
            rule=rule,
            measured_s=tuple(
                (name, self._curve(index, found) if isinstance(found, list) else found)
                for name, found in op.measured_s.items()
            ),
            name=op.name,
        )

    def _curve(
        self, index: int, points: Sequence[tuple[float, float]]
    ) -> tuple[tuple[float, float], ...]:
        """Check measured seconds at several shares."""
        shares = [share for share, _ in points]
        if sorted(set(shares)) != shares or shares[-1] != 1.0:
            raise GraphError(
                f"measured_s of {self._op(index)} has the shares {shown_numbers(shares)}; they "
                "must rise and end with 1, the whole batch."
            )
        return tuple((share, seconds) for share, seconds in points)

    def _rules(
        self, order: Sequence[int], placements: dict[int, Placement]
    ) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]] | None]:
        """The rule of each op that states one, or for which it follows from ``batch_dims``."""
        ops = self.spec.ops
        rules: list[tuple[tuple[Placement, ...], tuple[Placement, ...]] | None] = [None] * len(ops)
        # Only batch_dims need the layouts of their inputs.
        must_follow = any(op.batch_dims is not None for op in ops)
        for index in order:
            op = ops[index]
            given = [placements.get(tensor, R) for tensor in self.inputs[index]]
            outputs: Iterable[Placement] = [R] * len(self.outputs[index])
            if op.rule is not None:
                rules[index] = rule = self._stated_rule(index, op.rule)
                outputs = rule[1]
            elif op.batch_dims is not None:
                rules[index] = rule = self._rule_from_batch_dims(index, op.batch_dims, given)
                outputs = rule[1]
            elif self.kinds[index] in RULES:
                if given and not op.args:
                    raise GraphError(
                        f"{self._op(index)} has no args, which its built-in sharding rule reads; "
                        "give args, a rule or batch_dims."
                    )
                if must_follow:
                    outputs = self._built_in_outputs(index, given)
            placements.update(zip(self.outputs[index], outputs, strict=True))
        return rules

    def _stated_rule(
        self, index: int, rule: _RuleRecord
    ) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
        sides: list[tuple[Placement, ...]] = []
        for what, texts, tensors in (
            ("inputs", rule.inputs, self.inputs[index]),
            ("outputs", rule.outputs, self.outputs[index]),
        ):
            if len(texts) != len(tensors):
                raise GraphError(
                    f"the rule of {self._op(index)} has {len(texts)} placements for "
                    f"{len(tensors)} {what}; it needs one for each."
                )
            sides.append(
                tuple(
                    self._placement(text, tensor)
                    for text, tensor in zip(texts, tensors, strict=True)
                )
            )
        return sides[0], sides[1]

    def _rule_from_batch_dims(
        self, index: int, dims: list[int | None], given: list[Placement]
    ) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
        if len(dims) != len(self.outputs[index]):
            raise GraphError(
                f"{self._op(index)} has {len(dims)} batch_dims for {len(self.outputs[index])} "
                "outputs; it needs one for each."
            )
        inputs = tuple(place if place.kind == "S" else R for place in given)
        without = P if any(place.kind == "S" for place in inputs) else R
        outputs = tuple(
            without if dim is None else self._placement(f"S({dim})", tensor)
            for dim, tensor in zip(dims, self.outputs[index], strict=True)
        )
        self._doubt_batch_dims(index, given, outputs)
        return inputs, outputs

    def _doubt_batch_dims(
        self, index: int, given: Sequence[Placement], outputs: Sequence[Placement]
    ) -> None:
        """Note effects of an op's ``batch_dims`` that were probably not meant."""
        for tensor, place in zip(self.inputs[index], given, strict=True):
            if place == P and not any(each.kind == "S" for each in given):
                self.doubts.append(
                    f"{self._op(index)} reads {self._name(tensor)}, a partial sum over the batch, "
                    "whole, which takes an all-reduce: if it only passes it on, write "
                    '"rule": {"inputs": ["P"], "outputs": ["P"]} instead of batch_dims, else '
                    'write "R" for both.'
                )
                return
        for tensor, place in zip(self.outputs[index], outputs, strict=True):
            if place == P and not self.metas[tensor].dtype.startswith(("float", "bfl", "compl")):
                self.doubts.append(
                    f"{self._op(index)} makes {self._name(tensor)} of {self.metas[tensor].dtype} "
                    "without a batch dimension from a split input, which is taken for a sum over "
                    'the batch: if it is a shape or an index, write a "rule" with the output '
                    '"R", else one with "P".'
                )
                return

    def _built_in_outputs(self, index: int, given: list[Placement]) -> tuple[Placement, ...]:
        found = built_in_rule(
            self._call(index), tuple(given), self.spec.batch_size, self._op(index)
        )
        assert found is not None
        return found.outputs

    def _input_placement(self, tensor: int) -> Placement:
        record, meta = self.spec.tensors[tensor], self.metas[tensor]
        text = f"S({record.batch_dim})" if record.batch_dim is not None else None
        text = record.placement if record.placement is not None else text
        if text is not None:
            place = self._placement(text, tensor)
            if place.kind in "PL":
                raise GraphError(
                    f"{self._name(tensor)} is an input of the step with placement {place}; inputs "
                    "are R or S(dim)."
                )
            if place.kind == "S" and meta.kind == TensorKind.PARAMETER:
                raise GraphError(
                    f"{self._name(tensor)} is a parameter, which has no batch dimension, but has "
                    f"placement {place}; leave the placement out."
                )
            return place
        has_batch = meta.kind == TensorKind.BATCH and meta.shape[:1] == (self.spec.batch_size,)
        return S(0) if has_batch else R

    def _placement(self, text: str, tensor: int) -> Placement:
        simple = {"R": R, "P": P, "L": L}.get(text)
        if simple is not None:
            return simple
        match = _PLACEMENT.fullmatch(text)
        if match is None:
            raise GraphError(
                f"placement {shown(text)} of {self._name(tensor)} is none of R, P, L, S(dim) and "
                "S(dim,outer)."
            )
        dim, outer = int(match[1]), int(match[2] or 1)
        shape, batch = self.metas[tensor].shape, self.spec.batch_size
        if dim >= len(shape) or outer < 1 or batch < 1 or shape[dim] % (outer * batch):
            raise GraphError(
                f"placement {text} does not fit {self._name(tensor)} of shape {list(shape)}: "
                f"dimension {dim} must be a multiple of {outer} x {batch} (batch size)."
            )
        return S(dim, outer)

    def _args(self, index: int) -> dict[str, Arg]:
        num_inputs = len(self.inputs[index])
        return {
            key: _arg_from_json(value, num_inputs, lambda: self._op(index), _MOST_ARG_DEPTH)
            for key, value in self.spec.ops[index].args.items()
        }

    def _call(self, index: int) -> OpCall:
        return OpCall(
            kind=self.kinds[index],
            args=self._args(index),
            inputs=tuple(self.metas[tensor].meta for tensor in self.inputs[index]),
            outputs=tuple(self.metas[tensor].meta for tensor in self.outputs[index]),
        )

    def _outputs(self, index: int, op: _OpRecord) -> list[int]:
        if op.outputs is not None:
            return [self._tensor(name, f"{self._op(index)} makes") for name in op.outputs]
        if self.phases[index] != Phase.UPDATE or not self.inputs[index]:
            raise GraphError(f"field 'ops.{index}.outputs' is missing.")
        updated = self.metas[self.inputs[index][0]]
        self.metas.append(GraphTensor(shape=updated.shape, dtype=updated.dtype, kind=updated.kind))
        return [len(self.metas) - 1]

    def _check_update(self, index: int) -> None:
        inputs = self.inputs[index]
        if (
            len(inputs) != 2
            or len(self.outputs[index]) != 1
            or self.metas[inputs[0]].kind != TensorKind.PARAMETER
            or inputs[0] in self.made
            or inputs[1] not in self.made
        ):
            raise GraphError(
                f"{self._op(index)} must read a parameter and the gradient that an op makes, and "
                f"make one tensor; it reads {', '.join(map(self._name, inputs[:8])) or 'nothing'} "
                f"and makes {len(self.outputs[index])}."
            )
        parameter, gradient = (self.metas[tensor] for tensor in inputs)
        if gradient.shape != parameter.shape:
            raise GraphError(
                f"{self._op(index)} updates {self._name(inputs[0])} of shape "
                f"{list(parameter.shape)} with a gradient of shape {list(gradient.shape)}; they "
                "must be equal."
            )
        other = self.updated_by.setdefault(inputs[0], index)
        if other != index:
            raise GraphError(
                f"{self._name(inputs[0])} is updated by {self._op(other)} and again by "
                f"{self._op(index)}; every parameter is updated once."
            )

    def _check_op(self, index: int) -> None:
        """Refuse faults that ops of any kind may have."""
        if self.kinds[index] in VIEW_KINDS and not self.inputs[index]:
            raise GraphError(f"{self._op(index)} is a view, but reads no tensor to look at.")
        if self.phases[index] == Phase.UPDATE:
            return
        for tensor in self.inputs[index]:
            if tensor in self.updated:
                raise GraphError(
                    f"{self._op(index)} reads {self._name(tensor)}, which an update makes; the "
                    "next step reads the new parameter, nothing in this one does."
                )

    def _check_tensor(self, tensor: int, meta: GraphTensor, *, is_input: bool) -> None:
        if meta.meta.num_bytes > _MOST_TENSOR_BYTES:
            raise GraphError(
                f"{self._name(tensor)} of shape {list(meta.shape)[:8]} would have more than "
                f"{format_bytes(_MOST_TENSOR_BYTES)}."
            )
        if is_input and meta.kind not in _INPUT_KINDS:
            raise GraphError(
                f"{self._name(tensor)} of kind {meta.kind.name.lower()} is made by no op; inputs "
                "of the step are of kind parameter, buffer, batch or constant."
            )
        if not is_input and tensor < len(self.spec.tensors):
            record = self.spec.tensors[tensor]
            if record.placement is not None or record.batch_dim is not None:
                raise GraphError(
                    f"{self._name(tensor)} is made by an op, so its placement follows from there; "
                    "state it in the op's rule or batch_dims."
                )

    def _tensor(self, name: int | str, why: str) -> int:
        if isinstance(name, int):
            if not 0 <= name < len(self.spec.tensors):
                raise GraphError(
                    f"{why} tensor {shown(name)}, but there are only {len(self.spec.tensors)}."
                )
            return name
        if name not in self.position:
            raise GraphError(f"{why} tensor {shown(name)}, but no tensor has that name.")
        if name in self.ambiguous:
            raise GraphError(f"{why} tensor '{name}', but several tensors have that name.")
        return self.position[name]

    def _dtype(self, number: int, dtype: str) -> str:
        if dtype not in ITEM_BYTES:
            raise GraphError(
                f"tensor {number} has unknown dtype {shown(dtype)}; known: "
                f"{', '.join(ITEM_BYTES)}."
            )
        return dtype

    def _from_table(self, entry: str | int, table: Sequence[str], name: str) -> str:
        if isinstance(entry, str):
            return entry
        if not 0 <= entry < len(table):
            raise GraphError(
                f"an op refers to entry {shown(entry)} of '{name}', which has {len(table)}."
            )
        return table[entry]

    def _op(self, index: int) -> str:
        return f"op {index} '{self.spec.ops[index].name or self.kinds[index]}'"

    def _name(self, tensor: int) -> str:
        name = self.metas[tensor].name
        return f"tensor {tensor} '{name}'" if name else f"tensor {tensor}"


def _measured_to_json(op: GraphOp) -> dict[str, Any] | None:
    return {
        name: [list(point) for point in found] if isinstance(found, tuple) else found
        for name, found in op.measured_s
    } or None


def _rule_to_json(op: GraphOp) -> dict[str, list[str]] | None:
    if op.rule is None:
        return None
    inputs, outputs = op.rule
    return {"inputs": list(map(str, inputs)), "outputs": list(map(str, outputs))}


def _arg_to_json(value: Arg) -> Any:
    if isinstance(value, TensorRef):
        return {"t": int(value.index)}
    if isinstance(value, tuple):
        return [_arg_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": str(value)}
    return value


def _arg_from_json(value: object, num_inputs: int, op: Callable[[], str], depth: int) -> Arg:
    if isinstance(value, list) and depth > 0:
        return tuple(_arg_from_json(item, num_inputs, op, depth - 1) for item in value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and _is_unicode(value):
        return value
    if isinstance(value, int) and value.bit_length() <= 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, dict) and len(value) == 1:
        reference, special = value.get("t"), value.get("f")
        if type(reference) is int and 0 <= reference < num_inputs:
            return TensorRef(reference)
        if special in ("inf", "-inf", "nan"):
            return float(special)
    text = str(value)[:60] if isinstance(value, dict) and len(value) == 1 else shown(value)
    raise GraphError(
        f'{op()} has the argument {text}; an object must be {{"t": n}} with n below its '
        f'{num_inputs} inputs, or {{"f": "inf"}}, "-inf" or "nan", and lists nest at most '
        f"{_MOST_ARG_DEPTH} deep."
    )


def _is_unicode(text: str) -> bool:
    """Whether a text can be written to a file: JSON can spell half a character."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def shown_numbers(values: Sequence[float]) -> str:
    """The first of some numbers, for a message."""
    text = ", ".join(f"{value:g}" for value in values[:8])
    return f"[{text}{', ...' if len(values) > 8 else ''}]"


def _check_batch_plan(graph: OpGraph) -> None:
    """Refuse or warn about rules that do not fit their inputs.

    Raises:
        GraphError: an op's rule expects a partial sum or local statistics where there is none, or
            the reverse, or its arguments are invalid.
    """
    plan = batch_plan(graph)
    for index, op in enumerate(graph.ops):
        if op.phase == Phase.UPDATE:
            continue
        for tensor, needed in zip(op.inputs, plan.needed[index], strict=True):
            given = plan.placements[tensor]
            if given == needed or (not {given.kind, needed.kind} & {"L"} and needed.kind != "P"):
                continue
            name = graph.tensors[tensor].name
            what = f"'{name}'" if name else str(tensor)
            raise GraphError(
                f"op '{op.name or op.kind}' reads tensor {what} as "
                f"{needed}, but it is {given} ({_MEANING[given.kind]}); write a rule that reads "
                f"it as {given}."
            )
    for _, parameter, gradient in graph.updates:
        storage = int(graph.storage[gradient])
        maker = int(graph.producer[storage])
        if maker < 0 or graph.ops[maker].phase == Phase.UPDATE:
            raise GraphError(
                f"the gradient of '{graph.tensors[parameter].name}' is only a view of an input of "
                "the step; an op has to make it."
            )


_MEANING = {
    "R": "whole on every device",
    "S": "split along the batch",
    "P": "a partial sum over the batch",
    "L": "local statistics",
}
