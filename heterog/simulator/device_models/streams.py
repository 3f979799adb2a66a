"""Seconds of kernels that the memory bandwidth bounds: elementwise ops, norms, softmax.

    seconds = launch + bytes / (bandwidth x efficiency)

A softmax or norm over a row that no longer fits into the registers of a block reads it again: its
efficiency counts the bytes of one reading and is lower for long rows.
"""

from dataclasses import dataclass

import numpy as np

from heterog.graph.op_graph import FloatArray

LONG_ROW = 1024
"""Number of elements of a row above which torch takes another softmax kernel."""


@dataclass(frozen=True, slots=True)
class StreamModel:
    """Parameters of one family of kernels on one GPU type.

    Attributes:
        launch_s: Seconds of a kernel that does nothing.
        efficiency: Share of the bandwidth that a large kernel reaches.
        long_row_efficiency: Share for rows of more than ``LONG_ROW`` elements.
    """

    launch_s: float
    efficiency: float
    long_row_efficiency: float

    def seconds_per_byte(self, bandwidth_bytes_per_s: float, row: FloatArray) -> FloatArray:
        """Seconds per byte of kernels.

        Args:
            bandwidth_bytes_per_s: Bandwidth of the memory.
            row: Number of elements that are reduced together; 0 if none are.  # [num_kernels]
        """
        share = np.where(row > LONG_ROW, self.long_row_efficiency, self.efficiency)
        return 1.0 / (bandwidth_bytes_per_s * share)

    def seconds(
        self, bandwidth_bytes_per_s: float, num_bytes: FloatArray, row: FloatArray
    ) -> FloatArray:
        """Seconds of kernels that read and write ``num_bytes`` [num_kernels] each."""
        return self.launch_s + num_bytes * self.seconds_per_byte(bandwidth_bytes_per_s, row)
