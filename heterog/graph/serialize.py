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
  They take precedence over the roofline. One number means that the time is proportional to the
  share; between points it is interpolated, and below the first by the line through the first two;
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

A *control edge*, where op B waits for op A without reading its outputs, is a tensor of no bytes:
one more output of A, of shape ``[0]``, which is one more input of B. Both ops have a ``rule`` in
which that tensor is ``R``. If A and B run on different devices, the edge takes a message's
latency.

Names (of the graph and of device types) are letters, digits, spaces and
``. _ : @ + , ( ) / # = -``; every other text is one line that can be printed.

``patterns`` lists the sparse matrices that ops (``heterog_sparse.product.default``) name by the
hash in their argument ``pattern``: ``num_columns``, ``row_entries`` with the number of entries of
each row, and ``columns`` with their columns, row by row. Only needed where rows are cut.

``optimizer_step_ratios`` are the most bytes that the optimizer makes in a call, beside its state:
for each byte of the largest tensor, if it steps one after another (Adam: 3), and for each byte of
all tensors of the call, if it steps them together (Adam: 1); by default none.

``master_dtype`` is the dtype of the optimizer's own copies of parameters, if it has any. Their
bytes count in ``optimizer_state_ratio``; islands average these copies. ``update_scope`` says
what the update of an element depends on: that ``element`` alone, its whole ``parameter`` (as in
Muon), or all parameters of the ``model`` (as in Prodigy). By default the name of ``optimizer``
decides: torch's elementwise optimizers are known, others look at whole parameters.

``tensors`` and ``ops`` may also be one object of equally long columns instead of a list of
records, with ``null`` for a field that is left out; ``save_graph`` writes that. There ``kind`` and
``module`` of an op may be positions in the lists ``kinds`` and ``modules`` of the file.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from heterog.errors import GraphError, HeterogWarning, InputFileError
from heterog.files import read_json, write_json
from heterog.graph.graph_reader import GraphReader, check_batch_plan
from heterog.graph.graph_records import GraphRecord, arg_to_json
from heterog.graph.op_graph import OpGraph
from heterog.records import parse_record, stated

SCHEMA_VERSION = 1


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
            "outputs": [list(graph.outputs[index]) for index in range(graph.num_ops)],
            "phase": [op.phase.name.lower() for op in ops],
            "module": [modules[op.module] for op in ops],
            "args": [
                {key: arg_to_json(value) for key, value in op.args.items()} or None for op in ops
            ],
            "flops": [float(op.flops) for op in ops],
            "bytes_read": [float(op.bytes_read) for op in ops],
            "bytes_written": [float(op.bytes_written) for op in ops],
            "rule": [
                op.rule
                and {"inputs": list(map(str, op.rule[0])), "outputs": list(map(str, op.rule[1]))}
                for op in ops
            ],
            "measured_s": [
                {
                    name: [*map(list, found)] if isinstance(found, tuple) else found
                    for name, found in op.measured_s
                }
                or None
                for op in ops
            ],
            "name": [op.name or None for op in ops],
        },
    } | _rare_fields(graph)


def _rare_fields(graph: OpGraph) -> dict[str, Any]:
    """What most graphs do not have, as JSON values: master dtype, sparse matrices and the like."""
    ratios = graph.optimizer_step_ratios
    patterns = [
        {
            "num_columns": pattern.num_columns,
            "row_entries": np.diff(pattern.row_starts).tolist(),
            "columns": pattern.columns.tolist(),
        }
        for pattern in graph.patterns
    ]
    return stated(
        {
            "master_dtype": graph.master_dtype or None,
            "optimizer_step_ratios": list(map(float, ratios)) if any(ratios) else None,
            "update_scope": graph.seen_scope and str(graph.seen_scope),
            "patterns": patterns or None,
        }
    )


def graph_from_dict(record: object, where: str) -> OpGraph:
    """The inverse of ``graph_to_dict``; also reads the handwritten form.

    Args:
        record: JSON values.
        where: Start of every message, usually the name of the file.

    Raises:
        InputFileError: the record is not a graph; says what is wrong and where.
    """
    try:
        reader = GraphReader(parse_record(record, GraphRecord, where, versions=(SCHEMA_VERSION,)))
        graph = reader.graph()
        check_batch_plan(graph)
    except GraphError as error:
        raise InputFileError(f"{where}: {error}") from error
    if reader.doubts:
        more = len(reader.doubts) - 1
        rest = f" So do {more} more ops." if more else ""
        warnings.warn(f"{where}: {reader.doubts[0]}{rest}", HeterogWarning, stacklevel=2)
    return graph
