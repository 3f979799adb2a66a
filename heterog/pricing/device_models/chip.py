"""The numbers of a GPU's data sheet that its kernels' seconds follow from."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Numbers of a data sheet that matter to a kernel.

    Attributes:
        peak_flops_per_s: Peak of the dtype at hand.
        bandwidth_bytes_per_s: Bandwidth of the memory.
        multiprocessors: Number of units that work on tiles of their own.
        cache_bytes: Size of the last cache before the memory.
        board_w: Most power that the board may draw, in watts.
        energy: Energy of a FLOP over that of one at 16 nm.
    """

    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    multiprocessors: int
    cache_bytes: float
    board_w: float = inf
    energy: float = 1.0
