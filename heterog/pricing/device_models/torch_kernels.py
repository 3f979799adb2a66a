"""What PyTorch's own kernels do beyond one reading and one writing of their tensors.

A kernel that is bound by memory takes its bytes over the bandwidth, if it reads and writes each of
them once and fills the GPU. Some of PyTorch's do not: optimizers update all parameters in passes
of one operation each, batch norm gives a channel to a block, pooling and depthwise convolutions
visit each element once for every window that holds it, and cuDNN's tensor cores want channels
last.

Numbers are medians over the kernels of a score of models in float32 and bfloat16 on an H200
(PyTorch 2.11), measured by ``experiments/gpu_steps.py``. The passes of optimizers are counted in
their code (``torch.optim``, the ``foreach`` variants, which are the default on GPUs). Megatron
brings kernels of its own for what it uses of these.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpCall, TensorRef
from heterog.graph.sharding_rules.table import integers

_FLOAT32_BYTES = 4.0

# Tensors as large as the parameter that a foreach optimizer reads and writes, by the number of
# tensors of state. Adam: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4; a maximum 3.
_ADAM: Mapping[int, int] = MappingProxyType({2: 18, 3: 21})
_OPTIMIZERS: Mapping[str, Mapping[int, int]] = MappingProxyType(
    {
        "Adam": _ADAM,
        # Weight decay, on by default, is one more pass over the parameters.
        "AdamW": MappingProxyType({state: passes + 2 for state, passes in _ADAM.items()}),
        "SGD": MappingProxyType({0: 3, 1: 8}),  # with momentum: mul 2, add 3, add 3
    }
)

_NORM_PASSES = 1.4
"""Batch norm, over one pass of a norm: statistics are found first."""
_NORM_16_BITS = 1.45
"""Batch norm in 16 bits over that in float32, whose kernels are cuDNN's: PyTorch's own are not."""
_GROUP_NORM, _GROUP_NORM_BACKWARD = 3.0, 2.4
_ROW_S, _ROW_BACKWARD_S = 1.1e-7, 3.0e-7
"""Seconds that a multiprocessor takes for a row of a layer norm, however short it is."""
_EMBEDDING_BACKWARD = 8.0
"""Kernels that the gradient of an embedding is made of: indices are sorted first."""
_MAX_POOL, _MAX_POOL_BACKWARD = 2.0, 3.7
_AVG_POOL, _AVG_POOL_BACKWARD = 0.65, 1.0  # for each element of a window
_DEPTHWISE, _DEPTHWISE_BACKWARD = 0.39, 1.2  # likewise
DEPTHWISE_CHANNELS_LAST = 0.22
"""Seconds of a depthwise convolution with channels last, as a compiler lays images out, over those
with channels first. Medians of windows of 3 x 3 and 7 x 7 in bfloat16 on an H200."""

ADDED_BIAS = 3.3
"""Passes over the result of a convolution that add its bias: the kernel broadcasts."""
SUMMED_BIAS = 1.0
TF32 = 1.2
"""Seconds of a product with TF32 over those of one in 16 bits, after their peaks."""
UNALIGNED, UNALIGNED_FULLY, UNALIGNED_BYTES = 3.0, 5.7, 4
"""Seconds of a product over those of one whose rows begin at multiples of 16 bytes, on Hopper:
only the latter runs on its large multiplications. ``UNALIGNED_FULLY`` is of rows at multiples of
fewer than ``UNALIGNED_BYTES``. Medians of 24 products over 30,522 and 50,257 words on an H100 and
an H200: 248 TFLOP/s in bfloat16 at four bytes, 140 at two, 125 with TF32 at four or eight."""
CONVOLUTION = 1.1
"""Seconds of a convolution on tensor cores over those of the same product and its copies."""
CONVOLUTION_IN_PLACE = 1.35
"""The same where images are matrices as they lie, and nothing is copied."""
FEWEST_CHANNELS = 4
"""Convolutions of fewer do not run on tensor cores."""
_LARGE_IMAGE = 784
"""Positions from which libraries multiply images as they lie."""


class Stream(NamedTuple):
    """How a kernel streams its bytes.

    Attributes:
        passes: Times that each of its bytes is moved, over one reading or writing.
        blocks: Number of multiprocessors that it fills; 0 if it fills any GPU.
        row_s_per_byte: Seconds of one multiprocessor for the rows of a byte.
        issued: Number of kernels that the host issues.
        spared: Part of the passes that is left where a compiler lays images out.
    """

    passes: float = 1.0
    blocks: float = 0.0
    row_s_per_byte: float = 0.0
    issued: float = 1.0
    spared: float = 1.0


def stream_of(graph: OpGraph, op: int, *, row: float = 1.0) -> Stream:
    """How the kernel of an op without a matrix product streams its bytes.

    Args:
        graph: The step.
        op: Index of the op.
        row: Number of elements that a norm reduces together.
    """
    kind = graph.ops[op].kind
    if kind == "update":
        return Stream(_update_passes(graph))
    if kind.startswith("embedding_dense_backward"):
        return Stream(issued=_EMBEDDING_BACKWARD)
    if not any(name in kind for name in ("norm", "pool", "conv")):
        return Stream()
    call = graph.call(op)
    is_backward = "backward" in kind
    if not call.inputs or not call.inputs[0].shape:
        return Stream()
    as_float32 = _as_float32(call)
    if "batch_norm" in kind:
        channels = float(call.inputs[0].shape[1]) if len(call.inputs[0].shape) > 1 else 0.0
        of_16_bits = _NORM_16_BITS if as_float32 > 1.0 else 1.0
        passes = _NORM_PASSES * of_16_bits * as_float32
        return Stream(passes, channels / 2.0 if is_backward else channels)
    if "group_norm" in kind:
        return Stream(_GROUP_NORM_BACKWARD if is_backward else _GROUP_NORM)
    if "layer_norm" in kind:
        each = _ROW_BACKWARD_S if is_backward else _ROW_S
        rows = prod(call.inputs[0].shape) / max(row, 1.0)
        return Stream(row_s_per_byte=each * rows / max(float(graph.bytes_moved[op]), 1.0))
    if "max_pool" in kind:
        return Stream((_MAX_POOL_BACKWARD if is_backward else _MAX_POOL) * as_float32)
    if kind.startswith("avg_pool"):
        each = _AVG_POOL_BACKWARD if is_backward else _AVG_POOL
        return Stream(max(1.0, each * _visits(call)) * as_float32)
    if is_depthwise(call):
        each = _DEPTHWISE_BACKWARD if is_backward else _DEPTHWISE
        passes = max(1.0, each * _taps(call)) * as_float32
        return Stream(passes, spared=max(1.0 / passes, DEPTHWISE_CHANNELS_LAST))
    return Stream()


def _as_float32(call: OpCall) -> float:
    """Bytes of an op whose numbers of 16 bits had 32, over its own: some kernels gain nothing."""
    tensors = [*call.inputs, *(each for each in call.outputs if each is not None)]
    whole = sum(each.num_bytes for each in tensors)
    wide = sum(max(each.num_bytes, _FLOAT32_BYTES * prod(each.shape)) for each in tensors)
    return wide / whole if whole else 1.0


def _update_passes(graph: OpGraph) -> float:
    """Memory passes of a foreach optimizer, as a multiple of those of a single fused kernel."""
    state = round(graph.optimizer_state_ratio)
    fused = 3 + 2 * state  # parameter and gradient read, parameter written; state read and written
    return _OPTIMIZERS.get(graph.optimizer, {}).get(state, fused) / fused


def _visits(call: OpCall) -> float:
    """Windows of a pooling that hold an element, on average."""
    windows = integers(call, "kernel_size")
    return prod(windows) / max(prod(integers(call, "stride") or windows), 1)


def _taps(call: OpCall) -> float:
    return float(prod(call.input("weight").shape[2:]))


def is_depthwise(call: OpCall) -> bool:
    """Whether a convolution is depthwise (a group per channel): PyTorch has kernels for these."""
    weight, groups = call.args.get("weight"), call.args.get("groups")
    if not isinstance(weight, TensorRef) or not isinstance(groups, int) or groups <= 1:
        return False
    shape = call.inputs[weight.index].shape
    return len(shape) == 4 and shape[1] == 1 and not call.args.get("transposed")


def lies_as_matrix(call: OpCall) -> bool:
    """Whether a convolution multiplies its image as it lies: of one position, without steps."""
    return (
        prod(call.input("weight").shape[2:]) == 1
        and all(step == 1 for step in integers(call, "stride"))
        and prod(call.input("input").shape[2:]) >= _LARGE_IMAGE
    )
