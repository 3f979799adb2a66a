"""Seconds of matrix products: tiles, waves, the depth of a tile, memory, and a launch.

A kernel cuts the product into tiles of the output, and gives each multiprocessor one at a time:

    compute = waves x 2 rows columns (k / splits + ramp) / (rate of a multiprocessor x intensity)
    waves = ceil(tiles x splits / multiprocessors)
    intensity = 1 / (1 + tile_loss x (128 / rows + 128 / columns))
    compute grows by 1 + wide_loss x (1 - narrow / n) where the output has n > narrow columns
    power = FLOPs x joules of a FLOP / watts of the board
    memory = bytes / (bandwidth x memory_efficiency), less what the L2 cache holds
    seconds = launch + (max(compute, power)^3 + memory^3)^(1/3)

A library has kernels with several tiles and ways to split k; the fastest is taken. A board that
would need more power than it may draw lowers its clock: what it does in the long run follows from
the energy of a FLOP (``parameters.energy_of``). Wave and tile quantisation are those of NVIDIA's
"Matrix Multiplication Background User's Guide"; that the work of one tile is the unit, scaled by
features of the data sheet, is the idea of NeuSight (Lee et al., ASPLOS 2025, section 4).
"""

from dataclasses import dataclass

import numpy as np

from heterog.graph.op_graph import FloatArray
from heterog.pricing.device_models.chip import Chip

TILES = (
    (256, 128), (128, 256), (256, 64), (64, 256), (128, 128), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (32, 32), (128, 16), (16, 128), (64, 16), (16, 64),
)  # fmt: skip
"""(rows, columns) of the output that kernels of common libraries work on at a time."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of parts that the depth may be cut into; a multiprocessor of its own sums each."""
_SHORTEST_SPLIT = 128
_DEPTH_STEP = 32
_CACHED_SHARE = 0.15
_CACHED_RESULT_SHARE = 0.5
"""Shares of the L2 cache that hold factors already, and that take the result without writing it to
memory: of 0.15 and 0.5 the better for each on an L40S."""
_NARROW_COLUMNS = 5000.0
"""Columns of an output up to which kernels keep their rate, on all types that were measured. What
happens beyond was not looked into: tiles that run at a time may no longer span a row of tiles, so
that the factor of the columns is read anew for each."""
_SHARPNESS = 3.0
"""Overlap of compute and memory: 1 is one after the other, infinity all of it."""

_WAYS = np.array([(*tile, split) for tile in TILES for split in SPLITS], np.float64)


@dataclass(frozen=True, slots=True)
class ProductModel:
    """Parameters of one kind of matrix product on one GPU type.

    Attributes:
        launch_s: Seconds of a kernel that does nothing.
        efficiency: Share of the peak that an endless tile would reach. Above 1 where ``tile_loss``
            is large.
        tile_loss: Half of the extra time of a tile of 128 x 128 over an endless one, as a share.
        ramp: Steps of depth that a tile costs before and after its sum.
        memory_efficiency: Share of the bandwidth that a large product reaches.
        cache_speedup: Factor by which the cache is faster than the memory.
        joules_per_flop: Energy of a board of 16 nm for a FLOP.
        wide_loss: Extra time of an output with endlessly many columns, as a share.
        most_splits: Most parts that kernels of this kind cut the depth into.
        least_rows: Fewest rows of their tiles.
    """

    launch_s: float
    efficiency: float
    tile_loss: float
    ramp: float
    memory_efficiency: float
    cache_speedup: float
    joules_per_flop: float = 0.0
    wide_loss: float = 0.0
    most_splits: float = 32.0
    least_rows: float = 16.0

    def seconds(
        self,
        chip: Chip,
        sizes: FloatArray,
        num_bytes: FloatArray,
        result_bytes: FloatArray | None = None,
    ) -> FloatArray:
        """Seconds of products.

        Args:
            chip: Chip where they run.
            sizes: (batch, rows, columns, depth) of each.  # [num_products, 4]
            num_bytes: Bytes that each reads and writes.  # [num_products]
            result_bytes: Bytes of these that are written; by default as many as there are in
                matrices of one dtype.  # [num_products]

        Returns:
            Seconds of each product.  # [num_products]
        """
        batch, rows, columns, depth = sizes.T[:, :, None]
        is_known = (_WAYS[:, 2] <= self.most_splits) & (_WAYS[:, 0] >= self.least_rows)
        tile_rows, tile_columns, splits = _WAYS[is_known].T
        tiles = batch * np.ceil(rows / tile_rows) * np.ceil(columns / tile_columns) * splits
        waves = np.ceil(tiles / chip.multiprocessors)
        steps = np.ceil(depth / splits / _DEPTH_STEP) * _DEPTH_STEP + self.ramp
        loss = 1.0 + self.tile_loss * (128.0 / tile_rows + 128.0 / tile_columns)
        rate = chip.peak_flops_per_s * self.efficiency / chip.multiprocessors
        compute = waves * 2.0 * tile_rows * tile_columns * steps * loss / rate
        bandwidth = chip.bandwidth_bytes_per_s * self.memory_efficiency
        # Partial sums are written in float32 and added up by a second kernel.
        added = batch * rows * columns * 4.0 * (splits + 1.0) / bandwidth + self.launch_s
        compute += np.where(splits > 1.0, added, 0.0)
        compute *= 1.0 + self.wide_loss * np.maximum(0.0, 1.0 - _NARROW_COLUMNS / columns)
        is_too_short = (splits > 1.0) & (depth < _SHORTEST_SPLIT)
        fastest = np.where(is_too_short, np.inf, compute).min(axis=1)
        joules = 2.0 * sizes.prod(axis=1) * self.joules_per_flop * chip.energy
        fastest = np.maximum(fastest, joules / chip.board_w)
        if result_bytes is None:
            result_bytes = num_bytes * _share_of_result(sizes)
        gain = 1.0 - 1.0 / self.cache_speedup
        saved = gain * np.minimum(num_bytes - result_bytes, _CACHED_SHARE * chip.cache_bytes)
        saved += gain * np.minimum(result_bytes, _CACHED_RESULT_SHARE * chip.cache_bytes)
        memory = (num_bytes - saved) / bandwidth
        both = (fastest**_SHARPNESS + memory**_SHARPNESS) ** (1.0 / _SHARPNESS)
        return np.asarray(self.launch_s + both, np.float64)


def _share_of_result(sizes: FloatArray) -> FloatArray:
    """Elements of the result, as a share of those of all three matrices.  # [num_products]"""
    _, rows, columns, depth = sizes.T
    result = rows * columns
    return np.asarray(result / (result + rows * depth + depth * columns))


def product_bytes(sizes: FloatArray, input_bytes: float, output_bytes: float) -> FloatArray:
    """Bytes of the three matrices of products, each read or written once.

    Args:
        sizes: (batch, rows, columns, depth) of each.  # [num_products, 4]
        input_bytes: Bytes of an element of the factors.
        output_bytes: Bytes of an element of the result.
    """
    batch, rows, columns, depth = sizes.T
    factors = rows * depth + depth * columns
    return np.asarray(batch * (input_bytes * factors + output_bytes * rows * columns))
