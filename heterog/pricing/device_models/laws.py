"""Formulas of the seconds of kernels: matrix products, streams, collectives inside a host.

*Matrix products*: a kernel cuts the output into tiles; each multiprocessor works on one at a time:

    compute = waves x 2 rows columns (k / splits + ramp) / (rate of a multiprocessor x intensity)
    waves = ceil(tiles x splits / multiprocessors)
    intensity = 1 / (1 + tile_loss x (128 / rows + 128 / columns))
    compute grows by 1 + wide_loss x (1 - narrow / n) where the output has n > narrow columns
    power = FLOPs x joules of a FLOP / watts of the board
    memory = bytes / (bandwidth x memory_efficiency), less what the L2 cache holds
    seconds = launch + (max(compute, power)^3 + memory^3)^(1/3)

A library has kernels with several tiles and ways to split k; the fastest is taken. A board that
would need more power than it may draw lowers its clock, so its sustained rate follows from the
energy of a FLOP (``parameters.energy_of``). Wave and tile quantisation are those of NVIDIA's
"Matrix Multiplication Background User's Guide". NeuSight (Lee et al., ASPLOS 2025, section 4) has
the idea to take one tile as the unit of work and scale it by features of the data sheet.

*Streams* are kernels that the memory bandwidth bounds: elementwise ops, norms, softmax.

    seconds = launch + bytes / (bandwidth x efficiency)

A softmax or norm reads its rows twice. The second reading costs little while the rows of all
multiprocessors fit in the last cache; longer rows come from memory again. ``bytes`` counts one
reading, so the efficiency falls from that of short rows to that of long rows between

    first = cached_share x cache / (multiprocessors x bytes of an element)

elements and twice as many.

*Collectives* inside a host have a latency, a pipeline that fills, and a plateau.

    T(S, n) = latency + hop (n - 1) + min(fill + fill_hop (n - 1), W fill_s_per_byte) + W / rate
    W = rounds S (n - 1) / n
    rate = bandwidth of a link x efficiency x (n / 8)^growth

S is the payload in bytes (for an all-to-all, that of each member), n the number of members; rounds
is 2 for an all-reduce and 1 for other collectives. NCCL has a protocol of low latency and low
bandwidth for small payloads and the reverse for large payloads, and takes the faster (NCCL's
tuning model, ``ncclTopoTuneModel``). So T is the minimum of two lines, which the third term gives.
Rates grow with members because the switch sums (NVLS) and more channels run.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from heterog.graph.op_graph import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Numbers of a GPU's data sheet that determine the seconds of its kernels.

    Attributes:
        peak_flops_per_s: Peak of the dtype of the kernel.
        bandwidth_bytes_per_s: Bandwidth of the memory.
        multiprocessors: Number of units that each work on one tile.
        cache_bytes: Size of the last cache before the memory.
        board_w: Most power that the board may draw, in watts.
        energy: Energy of a FLOP over that of a FLOP at 16 nm.
    """

    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    multiprocessors: int
    cache_bytes: float
    board_w: float = inf
    energy: float = 1.0


TILES = (
    (256, 128), (128, 256), (256, 64), (64, 256), (128, 128), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (32, 32), (128, 16), (16, 128), (64, 16), (16, 64),
)  # fmt: skip
"""(rows, columns) of the output that kernels of common libraries work on at a time."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of parts into which the depth may be cut; different multiprocessors sum the parts."""
_SHORTEST_SPLIT = 128
_DEPTH_STEP = 32
_CACHED_SHARE = 0.15
_CACHED_RESULT_SHARE = 0.5
"""Shares of the L2 cache that hold factors beforehand, and that keep the result from memory. Each
is the better of 0.15 and 0.5 on an L40S."""
_NARROW_COLUMNS = 5000.0
"""Columns of an output up to which kernels keep their rate, on all measured types. The reason for
the loss beyond was not studied: tiles that run at a time may no longer span a row of tiles, so
that each wave reads the factor of the columns again."""
_SHARPNESS = 3.0
"""Overlap of compute and memory: at 1 they run one after the other, at infinity they overlap."""

_WAYS = np.array([(*tile, split) for tile in TILES for split in SPLITS], np.float64)


@dataclass(frozen=True, slots=True)
class ProductModel:
    """Parameters of one kind of matrix product on one GPU type.

    Attributes:
        launch_s: Seconds of a kernel that does nothing.
        efficiency: Share of the peak that an infinite tile would reach; above 1 if ``tile_loss``
            is large.
        tile_loss: Half of the extra time of a tile of 128 x 128 over an infinite tile, as a share.
        ramp: Time of a tile before and after its sum, in steps of depth.
        memory_efficiency: Share of the bandwidth that a large product reaches.
        cache_speedup: Factor by which the cache is faster than the memory.
        joules_per_flop: Energy of a FLOP on a board of 16 nm.
        wide_loss: Extra time of an output with infinitely many columns, as a share.
        most_splits: Most parts into which kernels of this kind cut the depth.
        least_rows: Fewest rows of a tile of these kernels.
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
            result_bytes: Bytes of these that each writes; by default the share that the result has
                if all matrices have one dtype.  # [num_products]

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
    """Elements of the result over the elements of all three matrices.  # [num_products]"""
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


_BYTES = 4.0
"""Bytes of an element: all measured kernels have float32."""


@dataclass(frozen=True, slots=True)
class StreamModel:
    """Parameters of one family of kernels on one GPU type.

    Attributes:
        launch_s: Seconds of a kernel that does nothing.
        efficiency: Share of the bandwidth that a large kernel reaches.
        long_row_efficiency: Share of the bandwidth if rows no longer fit in the cache.
        cached_share: Share of a multiprocessor's part of the cache that a row may take before
            rows are evicted: each multiprocessor works on many rows, one per block.
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


_MEMBERS = 8


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Parameters of one collective among GPUs of one type, as in the formula of the module."""

    rounds: float
    latency_s: float
    hop_s: float
    fill_s: float
    fill_hop_s: float
    fill_s_per_byte: float
    efficiency: float
    growth: float

    def alone_s(self, members: FloatArray) -> FloatArray:
        """Seconds of an empty payload.  # [...]"""
        return np.asarray(self.latency_s + self.hop_s * (members - 1.0))

    def most_fill_s(self, members: FloatArray) -> FloatArray:
        """Longest time that filling takes, in seconds.  # [...]"""
        return np.asarray(self.fill_s + self.fill_hop_s * (members - 1.0))

    def rate(self, members: FloatArray, bandwidth_bytes_per_s: float) -> FloatArray:
        """Bytes per second over a link on the plateau.  # [...]"""
        grown = (np.asarray(members) / _MEMBERS) ** self.growth
        return np.asarray(bandwidth_bytes_per_s * self.efficiency * grown)

    def sent_per_byte(self, members: FloatArray) -> FloatArray:
        """Bytes sent over each link per byte of payload.  # [...]"""
        return np.asarray(self.rounds * (members - 1.0) / members)

    def seconds(
        self, payload: FloatArray, members: FloatArray, bandwidth_bytes_per_s: float
    ) -> FloatArray:
        """Seconds of operations.

        Args:
            payload: Bytes of each operation.  # [num_operations]
            members: Number of members of each operation.  # [num_operations]
            bandwidth_bytes_per_s: Bandwidth of a link, one way.
        """
        sent = payload * self.sent_per_byte(members)
        fill = np.minimum(self.most_fill_s(members), sent * self.fill_s_per_byte)
        plateau = sent / self.rate(members, bandwidth_bytes_per_s)
        return np.asarray(self.alone_s(members) + fill + plateau)
