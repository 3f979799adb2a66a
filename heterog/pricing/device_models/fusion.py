"""Which ops of a step a compiler fuses into one kernel, as ``torch.compile`` does.

Ops join kernels in the order of the step. An op joins a kernel if it reads a tensor that the
kernel makes or reads, both loop over equally many elements, and earlier kernels make all other
inputs of the op. The *level* of a kernel is one more than the highest level of the kernels whose
results it reads, so kernels never wait for each other in a circle.

Only launches, bytes and the memory of results are predicted. Unlike inductor's scheduler, this
model never undoes a fusion and ignores the order of loops; on 21 measured steps it is as near.

We compile a step in *parts* (``parts_of``), and what another part reads is written to memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterog.graph.op_costs import RESHAPES
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph, Phase
from heterog.graph.sharding_rules.table import RULES
from heterog.pricing.device_models.kernels import products_of

_OF_LIBRARIES = (
    *("sort", "topk", "kthvalue", "median", "mode.", "cumsum", "cumprod", "logcumsumexp"),
    *("conv", "max_pool", "multinomial", "searchsorted", "_fft", "linalg_", "sparse"),
)
"""Prefixes of kinds that are never fused; products and unknown kinds are not either."""
_SCATTERS = ("embedding_dense_backward", "scatter", "index_put", "_unsafe_index_put", "index_add")
"""Kinds whose iterations write to any element, so that ops that read their results cannot join."""
_OF_CHANNELS = ("native_batch_norm", "native_group_norm")
"""Kinds that read their first input twice: another kernel first finds statistics of channels."""
_DRAWS = ("bernoulli", "rand", "native_dropout")
_STEPS_STATISTICS = ("native_batch_norm", "_native_batch_norm_legit")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused:
    """The kernels of one training step whose ops a compiler fuses.

    Attributes:
        is_fused: Whether a compiler makes the kernel of an op; false for library kernels, views
            and updates.  # [num_ops]
        launches: Number of kernels that begin with each op.  # [num_ops]
        num_bytes: Bytes that each op moves: of inputs that no earlier op of its kernel reads, and
            of results that another kernel reads.  # [num_ops]
        kernel: The first op of each op's kernel; -1 for views and updates.  # [num_ops]
    """

    is_fused: NDArray[np.bool_]
    launches: FloatArray
    num_bytes: FloatArray
    kernel: IntArray


@dataclass(slots=True)
class _Kernel:
    first: int
    phase: Phase
    level: int
    elements: int
    reads: dict[int, float] = field(default_factory=dict)
    makes: set[int] = field(default_factory=set)


@lru_cache(maxsize=16)
def fused_kernels(graph: OpGraph) -> Fused:
    """The kernels of a graph's forward and backward pass."""
    rows = np.zeros((2, graph.num_ops))
    is_fused = np.array([_is_fusible(graph, op) for op in range(graph.num_ops)], np.bool_)
    is_fused[products_of(graph).op] = False
    maker: dict[int, _Kernel] = {}  # of each storage
    kernels: list[_Kernel | None] = []
    joinable: dict[int, list[_Kernel]] = {}  # kernels that read or make each storage
    for op in range(graph.num_ops):
        kernels.append(None)
        if graph.is_view[op] or graph.ops[op].phase == Phase.UPDATE:
            continue
        reads = {int(graph.storage[tensor]): tensor for tensor in graph.ops[op].inputs}
        kernel = _kernel_of(graph, op, reads, maker, joinable) if is_fused[op] else None
        if kernel is None:
            level = 1 + max((maker[each].level for each in reads if each in maker), default=-1)
            kernel = _Kernel(op, graph.ops[op].phase, level, _elements(graph, op))
            rows[0, op] = 1.0
        kernels[op] = kernel
        is_open = is_fused[op] and not graph.ops[op].kind.startswith(_SCATTERS)
        for storage, tensor in reads.items():
            if storage not in kernel.reads and storage not in kernel.makes:
                whole = float(graph.tensor_bytes[tensor])
                item = whole / max(graph.tensors[tensor].num_elements, 1)
                kernel.reads[storage] = min(whole, item * _elements(graph, op))
                rows[1, op] += kernel.reads[storage]
            if is_fused[op]:
                joinable.setdefault(storage, []).append(kernel)
        for tensor in graph.outputs[op]:
            maker[tensor] = kernel
            kernel.makes.add(tensor)
            if is_open:
                joinable.setdefault(tensor, []).append(kernel)
        rows[:, op] += _before(graph, op)
    for op, made in enumerate(kernels):
        if made is not None and is_fused[op]:
            rows[1, op] += _written_bytes(graph, op, made, kernels)
    rows[:, ~is_fused] = 0.0
    first = np.array([-1 if made is None else made.first for made in kernels], np.int32)
    return Fused(is_fused=is_fused, launches=rows[0], num_bytes=rows[1], kernel=first)


class ResultMemory(IntEnum):
    """The memory in which a compiled step keeps a result."""

    OWN = 0
    OF_INPUT = 1
    """That of an input of the same size, which nobody reads afterwards."""
    NONE = 2
    """Registers: only other ops of its kernel read it."""


class Results(NamedTuple):
    """The kernels of a step that is compiled in parts, and where its tensors are kept."""

    memory: IntArray  # ``ResultMemory`` of what ops make  # [num_tensors]
    runs: IntArray  # the op at whose place each op's kernel runs  # [num_ops]


@lru_cache(maxsize=16)
def memory_of_results(graph: OpGraph, *, accumulates: bool = False) -> Results:
    """Where the tensors of a step that is compiled in parts are kept; see ``parts_of``.

    What only a kernel reads stays in its registers. As inductor does, a kernel writes a result
    over another one of its part, if both have one element for the other and the kernel needs the
    other for nothing but that result; what another part has made belongs to the caller.
    """
    part = parts_of(graph, accumulates=accumulates)
    runs = _runs(graph, part)
    memory = np.full(len(graph.tensors), ResultMemory.OWN, np.int32)
    fused_ops = np.flatnonzero(fused_kernels(graph).is_fused).tolist()
    for op in fused_ops:
        for tensor in graph.outputs[op]:
            of_readers = {runs[each] for each in graph.readers(tensor)}
            if of_readers == {runs[op]} and tensor != graph.loss:
                memory[tensor] = ResultMemory.NONE
    part_of = [part[maker] for maker in graph.producer]
    replaced: set[int] = set()
    for op, tensor, each in _replaceable(graph, runs, memory):
        is_free = memory[tensor] == ResultMemory.OWN and each not in replaced
        if is_free and part_of[each] == part[op]:
            memory[tensor] = ResultMemory.OF_INPUT
            replaced.add(each)
    return Results(memory, runs)


def _replaceable(
    graph: OpGraph, runs: IntArray, memory: IntArray
) -> Iterator[tuple[int, int, int]]:
    """An op, its result, and what the result could be written over, in the order of the step.

    Args:
        graph: The graph.
        runs: The op at whose place the kernel of each op runs.
        memory: ``ResultMemory`` of each tensor; only ``NONE`` must be known.
    """
    fused_ops = np.flatnonzero(fused_kernels(graph).is_fused).tolist()
    # Of each op: the ops of its kernel that it needs, and what it reads element by element from
    # memory; backwards, the ops of its kernel that write what is made of its results.
    needs: dict[int, set[int]] = {}
    sources: dict[int, list[int]] = {}
    writers: dict[int, set[int]] = {}
    for op in fused_ops:
        needs[op], sources[op] = {op}, []
        for tensor in graph.ops[op].inputs:
            result = int(graph.storage[tensor])
            maker = int(graph.producer[result])
            if maker < 0:
                continue
            if runs[maker] == runs[op]:
                needs[op] |= needs[maker]
            kind = graph.ops[op].kind.partition(".")[0]
            if kind in _ONE_BY_ONE and _is_in_order(graph, tensor):
                is_inside = memory[result] == ResultMemory.NONE
                more = sources[maker] if is_inside else [result]
                sources[op] = list(dict.fromkeys(sources[op] + more))
    for op in reversed(fused_ops):
        writers[op] = set()
        for tensor in graph.outputs[op]:
            if memory[tensor] == ResultMemory.NONE:
                writers[op] |= {each for r in graph.readers(tensor) for each in writers[r]}
            else:
                writers[op].add(op)
    for op in fused_ops:
        for tensor in graph.outputs[op]:
            like = graph.tensor_bytes[tensor], graph.tensors[tensor].dtype
            for each in sources[op]:
                # Its readers are done, or only make what this op needs.
                is_last = all(
                    writers[reader] <= needs[op] if runs[reader] == runs[op] else reader < op
                    for reader in graph.readers(each)
                )
                if is_last and like == (graph.tensor_bytes[each], graph.tensors[each].dtype):
                    yield op, tensor, each


def _runs(graph: OpGraph, part: IntArray) -> IntArray:
    """The op at whose place the kernel of each op runs.  # [num_ops]

    A kernel runs as soon as all that it reads is there. An op that would delay it beyond a reader
    of its results begins a kernel of its own.
    """
    fused = fused_kernels(graph)
    gradients = {int(graph.storage[gradient]) for _, _, gradient in graph.updates}
    runs = np.arange(graph.num_ops, dtype=np.int32)
    members: dict[tuple[int, int], list[int]] = {}
    for op in np.flatnonzero(fused.is_fused).tolist():
        made = [int(graph.producer[graph.storage[tensor]]) for tensor in graph.ops[op].inputs]
        mine = members.setdefault((int(part[op]), int(fused.kernel[op])), [])
        if mine:
            now = runs[mine[0]]
            place = op if any(each > now and each not in mine for each in made) else now
            results = [tensor for each in mine for tensor in graph.outputs[each]]
            readers = {reader for tensor in results for reader in graph.readers(tensor)}
            is_late = any(reader < place for reader in readers - {*mine})
            if is_late or (place != now and gradients & {*results}):
                mine.clear()
            else:
                runs[mine] = place
        runs[op] = runs[mine[0]] if mine else op
        mine.append(op)
    for before, op in _weights_first(graph, part):
        runs[before], runs[op] = op, before
    return runs


def _weights_first(graph: OpGraph, part: IntArray) -> Iterator[tuple[int, int]]:
    """Two products after another, of which inductor runs the second, a weight's gradient, first.

    A step makes first what it passes on. The other order takes less memory if the weight's
    gradient is smaller than what only it still reads. At the end of a part it stays second: by
    inductor's count, in which all that other parts have made stays, no order takes less there.
    """
    weights = {int(graph.producer[graph.storage[gradient]]) for _, _, gradient in graph.updates}
    products = {*products_of(graph).op.tolist()}
    kernels = np.flatnonzero(part >= 0).tolist()
    for before, op, after in zip(kernels, kernels[1:], kernels[2:], strict=False):
        if not part[before] == part[op] == part[after] or not {before, op} <= products:
            continue
        first, second = (
            {int(graph.storage[tensor]) for tensor in graph.ops[each].inputs}
            for each in (before, op)
        )
        is_weights = before not in weights and op in weights
        if is_weights and not second & {*graph.outputs[before]}:
            last = [
                tensor
                for tensor in second - first
                if graph.producer[tensor] >= 0 and max(graph.readers(tensor)) == op
            ]
            made = graph.tensor_bytes[[*graph.outputs[op]]].sum()
            if made < graph.tensor_bytes[last].sum():
                yield before, op


_ONE_BY_ONE = frozenset(
    {
        *("add", "sub", "rsub", "mul", "div", "neg", "pow", "exp", "log", "sqrt", "rsqrt", "abs"),
        *("relu", "gelu", "silu", "sigmoid", "tanh", "erf", "clamp", "maximum", "minimum"),
        *("where", "masked_fill", "hardtanh", "hardswish", "leaky_relu", "elu", "softplus"),
        *("threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward"),
        *("tanh_backward", "hardtanh_backward", "hardswish_backward", "leaky_relu_backward"),
        *("elu_backward", "softplus_backward", "_softmax", "_log_softmax"),
        *("_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm"),
    }
)
"""Kinds that write each element where they have read it, so that inductor does so in place."""


@lru_cache(maxsize=16)
def parts_of(graph: OpGraph, *, accumulates: bool = False) -> IntArray:
    """Number of the part of each op if ops run in order; -1 for views and updates.  # [num_ops]

    A part ends before and after an op that is not compiled, such as the loss, and with a layer, if
    it has ``LEAST_OF_A_LAYER`` ops. With micro-batches it also ends with each gradient that
    ``accumulates``.
    """
    gradients = {int(graph.storage[gradient]) for _, _, gradient in graph.updates}
    found = np.full(graph.num_ops, -1, np.int32)
    part = num_ops = 0
    layer = ""
    loss = graph.producer[graph.storage[graph.loss]]
    for index, op in enumerate(graph.ops):
        if graph.is_view[index] or op.phase == Phase.UPDATE:
            continue
        is_alone = index == loss or op.kind.startswith(_DRAWS)
        is_alone |= op.phase == Phase.FORWARD and op.kind.startswith(_STEPS_STATISTICS)
        is_border = layer_of(op.module) != layer and num_ops >= LEAST_OF_A_LAYER
        if is_alone or is_border:
            part, num_ops = part + 1, 0
        found[index] = part
        layer, num_ops = layer_of(op.module), num_ops + 1
        if is_alone or (accumulates and gradients & {*graph.outputs[index]}):
            part, num_ops = part + 1, 0
    return found


def layer_of(module: str) -> str:
    """The first numbered module of a path, empty if there is none.

    >>> layer_of("encoder.layer.3.output.dense")
    'encoder.layer.3'
    """
    layer = _LAYER.match(module)
    return layer.group() if layer else ""


_LAYER = re.compile(r"[^0-9]*[0-9]+(?=\.|$)")
LEAST_OF_A_LAYER = 12
"""Least number of ops of a part: a transformer's layer has some 15 in each pass, a perceptron's
module only one, so that several are better fused."""


def _is_fusible(graph: OpGraph, op: int) -> bool:
    kind, phase = graph.ops[op].kind, graph.ops[op].phase
    is_known = kind in RULES and not kind.startswith(_OF_LIBRARIES)
    return is_known and phase != Phase.UPDATE and not graph.is_view[op]


def _before(graph: OpGraph, op: int) -> tuple[float, float]:
    """Launches and bytes of a kernel that an op needs before its own, as sums over columns do."""
    call = graph.calls[op]
    if call.kind.startswith(_OF_CHANNELS):
        return 1.0, float(call.inputs[0].num_bytes)
    dims = call.args.get("dim") if call.kind == "sum.dim_IntList" else ()
    is_of_columns = call.kind.startswith("native_layer_norm_backward") or (
        isinstance(dims, tuple) and 0 in dims and len(call.outputs[0].shape) > 0
    )
    return float(is_of_columns), 0.0


def _is_in_order(graph: OpGraph, tensor: int) -> bool:
    """Whether a tensor has all elements of its storage in the order in which they were made."""
    maker = int(graph.producer[tensor])
    if maker < 0 or not graph.is_view[maker]:
        return True
    is_reshape = graph.ops[maker].kind in RESHAPES
    return is_reshape and _is_in_order(graph, graph.ops[maker].inputs[0])


def _elements(graph: OpGraph, op: int) -> int:
    """Elements that an op loops over: its largest result's, or input's if it is no gather."""
    tensors = [*graph.outputs[op]]
    if not graph.ops[op].kind.startswith(("embedding", "index", "gather", "slice", "select")):
        tensors += graph.ops[op].inputs
    return max((graph.tensors[tensor].num_elements for tensor in tensors), default=0)


def _kernel_of(
    graph: OpGraph,
    op: int,
    reads: dict[int, int],
    maker: dict[int, _Kernel],
    joinable: dict[int, list[_Kernel]],
) -> _Kernel | None:
    """The last kernel that an op may join."""
    elements = _elements(graph, op)
    before = [maker[storage] for storage in reads if storage in maker]
    moved = {storage for storage, tensor in reads.items() if not _is_in_order(graph, tensor)}
    found = None
    for kernel in (each for storage in reads for each in joinable.get(storage, ())):
        sizes = {graph.tensors[tensor].num_elements for tensor in kernel.makes & reads.keys()}
        fits = kernel.phase == graph.ops[op].phase and elements in sizes | {kernel.elements}
        fits = fits and not kernel.makes & moved
        is_after = all(each is kernel or each.level < kernel.level for each in before)
        if fits and is_after and (found is None or kernel.level > found.level):
            found = kernel
    return found


def _written_bytes(
    graph: OpGraph, op: int, kernel: _Kernel, kernels: list[_Kernel | None]
) -> float:
    """Bytes of the results of an op that other kernels read.

    Results that only backward reads do not count if backward recomputes them: that is cheaper if
    the kernel's inputs are small.
    """
    written = 0.0
    again = sum(kernel.reads.values())
    is_drawn = graph.ops[op].kind.startswith(_DRAWS)
    for tensor in graph.outputs[op]:
        num_bytes = float(graph.tensor_bytes[tensor])
        others = {r for r in graph.readers(tensor) if kernels[r] is not kernel}
        is_kept = any(graph.ops[reader].phase == kernel.phase for reader in others)
        if is_kept or tensor == graph.loss or (others and (is_drawn or again > 2.0 * num_bytes)):
            written += num_bytes
    return written
