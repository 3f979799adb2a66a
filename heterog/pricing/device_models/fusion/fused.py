"""Effect of fusing on each op of a graph: launches, and bytes to and from memory."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.pricing.device_models.fusion.loops import steps_of
from heterog.pricing.device_models.fusion.passes import passes_of
from heterog.pricing.device_models.fusion.scheduling import Kernel, kernels_of
from heterog.pricing.device_models.fusion.steps import Work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused:
    """The kernels of one training step where a compiler fuses its ops.

    A kernel's bytes are those of what it reads from outside, once, and of what it makes that
    something outside reads. They are shared out over its ops: each loop pays for what it reads
    first and for what it makes, the last one for the launch.

    Attributes:
        kernels: Kernels of the forward and the backward pass, those of libraries among them.
        is_fused: Whether a compiler makes all kernels of an op; the rest are kernels of their own,
            views and updates.  # [num_ops]
        launches: Number of kernels that end with each op.  # [num_ops]
        num_bytes: Bytes that each op moves.  # [num_ops]
    """

    kernels: tuple[Kernel, ...]
    is_fused: NDArray[np.bool_]
    launches: FloatArray
    num_bytes: FloatArray

    def count(self, phase: Phase) -> int:
        """Number of kernels of a pass that the compiler writes."""
        return sum(each.phase == phase and not each.is_own for each in self.kernels)


@lru_cache(maxsize=16)
def fused_kernels(graph: OpGraph, *, on_gpu: bool = True) -> Fused:
    """The kernels of a graph's forward and backward pass.

    Args:
        graph: One training step.
        on_gpu: Whether the compiler's rules for GPUs hold, else those for CPUs.
    """
    lowered = steps_of(graph, on_gpu=on_gpu)
    compiled = passes_of(graph, lowered, on_gpu=on_gpu)
    kernels = tuple(kernel for each in compiled for kernel in kernels_of(each))
    is_fused = np.array([op.phase != Phase.UPDATE for op in graph.ops], np.bool_)
    is_fused &= ~graph.is_view
    is_fused[[step.op for step in lowered.steps if step.work == Work.OWN]] = False
    launches, num_bytes = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    for kernel in kernels:
        if not kernel.is_own:
            launches[kernel.loops[-1].op] += 1.0
            _share_out(kernel, num_bytes)
    return Fused(kernels=kernels, is_fused=is_fused, launches=launches, num_bytes=num_bytes)


def _share_out(kernel: Kernel, num_bytes: FloatArray) -> None:
    """Share a kernel's bytes out to its ops."""
    paid: set[int] = set()
    for loop in kernel.loops:
        for buffer, _ in loop.reads:
            if buffer in kernel.reads and buffer not in paid:
                paid.add(buffer)
                num_bytes[loop.op] += kernel.reads[buffer]
        num_bytes[loop.op] += sum(kernel.writes.get(buffer, 0.0) for buffer in loop.writes)
