"""Seconds of kernels that the memory bandwidth bounds: elementwise ops, norms, softmax.

    seconds = launch + bytes / (bandwidth x efficiency)

A softmax or norm reads its rows again. As long as the rows that all multiprocessors work on lie in
the last cache that costs little; beyond that, all comes from memory again. Its efficiency counts
the bytes of one reading, and falls from that of short rows to that of long ones between

    first = cached_share x cache / (multiprocessors x bytes of an element)

elements and twice as many.
"""

from dataclasses import dataclass

import numpy as np

from heterog.graph.op_graph import FloatArray
from heterog.pricing.device_models.chip import Chip

_BYTES = 4.0
"""Of an element: all kernels that were measured have float32."""


@dataclass(frozen=True, slots=True)
class StreamModel:
    """Parameters of one family of kernels on one GPU type.

    Attributes:
        launch_s: Seconds of a kernel that does nothing.
        efficiency: Share of the bandwidth that a large kernel reaches.
        long_row_efficiency: Share where rows no longer lie in the cache.
        cached_share: Share of a multiprocessor's part of the cache that one row may take until
            rows begin to fall out of it: rows are many, one for each block.
    """

    launch_s: float
    efficiency: float
    long_row_efficiency: float
    cached_share: float

    def seconds_per_byte(self, chip: Chip, row: FloatArray) -> FloatArray:
        """Seconds per byte of kernels.

        Args:
            chip: Chip where they run.
            row: Number of elements that are reduced together; 0 if none are.  # [num_kernels]
        """
        first = self.cached_share * chip.cache_bytes / (chip.multiprocessors * _BYTES)
        missed = np.clip(row / max(first, 1.0) - 1.0, 0.0, 1.0)
        passes = (1.0 - missed) / self.efficiency + missed / self.long_row_efficiency
        return np.asarray(passes / chip.bandwidth_bytes_per_s, np.float64)

    def seconds(self, chip: Chip, num_bytes: FloatArray, row: FloatArray) -> FloatArray:
        """Seconds of kernels that read and write ``num_bytes`` [num_kernels] each."""
        return self.launch_s + num_bytes * self.seconds_per_byte(chip, row)
