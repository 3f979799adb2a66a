"""Costs of PyTorch's kernels beyond one read and one write of their tensors.

A memory-bound kernel takes its bytes over the bandwidth if it moves each byte once and fills the
GPU. Some of PyTorch's kernels do not. Optimizers update all parameters in one pass per operation.
Batch norm gives each channel to a block. Pooling and depthwise convolutions visit each element
once for every window that holds it. cuDNN's kernels on tensor cores need images with channels
last.

Numbers are medians over the kernels of a score of models in float32 and bfloat16 on an H200
(PyTorch 2.11), measured by ``experiments/gpu_steps.py``. The passes of optimizers are counted in
their code (``torch.optim``, the ``foreach`` variants, which are the default on GPUs). Megatron
replaces the kernels among these that it uses.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpCall, TensorRef
from heterog.graph.sharding_rules.table import integers

_FLOAT32_BYTES = 4.0

# Number of parameter-sized tensors that a foreach optimizer reads and writes, by its number of
# state tensors. Adam: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4; a maximum 3.
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
"""Passes of a batch norm, which first finds statistics, over those of other norms."""
_NORM_16_BITS = 1.45
"""Batch norm in 16 bits, by PyTorch's kernels, over batch norm in float32, by those of cuDNN."""
_GROUP_NORM, _GROUP_NORM_BACKWARD = 3.0, 2.4
_ROW_S, _ROW_BACKWARD_S = 1.1e-7, 3.0e-7
"""Seconds that a multiprocessor takes for a row of a layer norm, however short it is."""
_EMBEDDING_BACKWARD = 8.0
"""Number of kernels of the gradient of an embedding: indices are sorted first."""
_MAX_POOL, _MAX_POOL_BACKWARD = 2.0, 3.7
_AVG_POOL, _AVG_POOL_BACKWARD = 0.65, 1.0  # for each element of a window
_DEPTHWISE, _DEPTHWISE_BACKWARD = 0.39, 1.2  # for each element of a window
DEPTHWISE_CHANNELS_LAST = 0.22
"""Seconds of a depthwise convolution with channels last, the layout that a compiler chooses, over
those with channels first. Medians of windows of 3 x 3 and 7 x 7 in bfloat16 on an H200."""

ADDED_BIAS = 3.3
"""Passes over the result of a convolution that add its bias: the kernel broadcasts."""
SUMMED_BIAS = 1.0
TF32 = 1.2
"""Seconds of a TF32 product over those of a 16-bit product, beyond the ratio of their peaks."""
UNALIGNED, UNALIGNED_FULLY, UNALIGNED_BYTES = 3.0, 5.7, 4
"""Seconds of an unaligned product over those of a product whose rows begin at multiples of 16
bytes, on Hopper, whose large multiplications need aligned rows. ``UNALIGNED_FULLY`` is for rows at
multiples of fewer than ``UNALIGNED_BYTES``. Medians of 24 products over 30,522 and 50,257 words on
an H100 and an H200: 248 TFLOP/s in bfloat16 at 4 bytes, 140 at 2, 125 with TF32 at 4 or 8."""
CONVOLUTION = 1.1
"""Seconds of a convolution on tensor cores over those of the equal product and its copies."""
CONVOLUTION_IN_PLACE = 1.35
"""Such a ratio for convolutions that multiply images without copies; see ``lies_as_matrix``."""
FEWEST_CHANNELS = 4
"""Convolutions with fewer channels do not run on tensor cores."""
_LARGE_IMAGE = 784
"""Number of positions from which libraries multiply images without copies."""


class Stream(NamedTuple):
    """How a kernel streams its bytes.

    Attributes:
        passes: Times that each byte is moved, over one read or write.
        blocks: Number of multiprocessors that it fills; 0 if it fills all.
        row_s_per_byte: Seconds of one multiprocessor for its rows, per byte.
        issued: Number of kernels that the host issues.
        spared: Share of the passes that is left if a compiler chooses the layout of images.
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
    call = graph.calls[op]
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
        passes = max(1.0, each * float(prod(call.input("weight").shape[2:]))) * as_float32
        return Stream(passes, spared=max(1.0 / passes, DEPTHWISE_CHANNELS_LAST))
    return Stream()


def _as_float32(call: OpCall) -> float:
    """Bytes of an op in float32 over its bytes: some kernels gain nothing from 16 bits."""
    tensors = [*call.inputs, *(each for each in call.outputs if each is not None)]
    whole = sum(each.num_bytes for each in tensors)
    wide = sum(max(each.num_bytes, _FLOAT32_BYTES * prod(each.shape)) for each in tensors)
    return wide / whole if whole else 1.0


def _update_passes(graph: OpGraph) -> float:
    """Memory passes of a foreach optimizer over those of a single fused kernel."""
    state = round(graph.optimizer_state_ratio)
    fused = 3 + 2 * state  # parameter and gradient read, parameter written; state read and written
    return _OPTIMIZERS.get(graph.optimizer, {}).get(state, fused) / fused


def _visits(call: OpCall) -> float:
    """Mean number of windows of a pooling that hold an element."""
    windows = integers(call, "kernel_size")
    return prod(windows) / max(prod(integers(call, "stride") or windows), 1)


def is_depthwise(call: OpCall) -> bool:
    """Whether a convolution is depthwise (a group per channel); PyTorch has kernels for it."""
    weight, groups = call.args.get("weight"), call.args.get("groups")
    if not isinstance(weight, TensorRef) or not isinstance(groups, int) or groups <= 1:
        return False
    shape = call.inputs[weight.index].shape
    return len(shape) == 4 and shape[1] == 1 and not call.args.get("transposed")


def lies_as_matrix(call: OpCall) -> bool:
    """Whether a convolution multiplies its image without a copy: 1 x 1, stride 1, large image."""
    return (
        prod(call.input("weight").shape[2:]) == 1
        and all(step == 1 for step in integers(call, "stride"))
        and prod(call.input("input").shape[2:]) >= _LARGE_IMAGE
    )
