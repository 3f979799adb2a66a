"""Parameters of device models from measured kernels.

Least squares of log(predicted / measured), so that a kernel of 5 us counts as much as one of
50 ms, with a loss that lets single outliers go (soft l1 beyond 10 %).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from heterog.graph.op_graph import FloatArray
from heterog.simulator.device_models.chip import Chip
from heterog.simulator.device_models.parameters import Errors
from heterog.simulator.device_models.products import ProductModel
from heterog.simulator.device_models.streams import StreamModel

_OUTLIER = 0.1
_STEP = 0.02
"""Step of the derivatives, in logarithms: waves make the seconds a staircase."""
_PRODUCT_START = ProductModel(
    launch_s=4e-6, efficiency=1.0, tile_loss=0.3, ramp=60.0, memory_efficiency=0.8,
    cache_speedup=1.5, joules_per_flop=1.5e-11,
)  # fmt: skip
_PRODUCT_LEAST = ProductModel(
    launch_s=5e-7, efficiency=0.2, tile_loss=1e-3, ramp=0.1, memory_efficiency=0.2,
    cache_speedup=1.0, joules_per_flop=1e-14,
)  # fmt: skip
_PRODUCT_MOST = ProductModel(
    launch_s=6e-5, efficiency=1.5, tile_loss=5.0, ramp=1000.0, memory_efficiency=1.1,
    cache_speedup=10.0, joules_per_flop=1e-10,
)  # fmt: skip
_STREAM_START = StreamModel(
    launch_s=5e-6, efficiency=0.7, long_row_efficiency=0.5, cached_share=0.05
)
_STREAM_LEAST = StreamModel(
    launch_s=5e-7, efficiency=0.05, long_row_efficiency=0.05, cached_share=0.001
)
_STREAM_MOST = StreamModel(
    launch_s=1e-4, efficiency=1.2, long_row_efficiency=1.2, cached_share=2.0
)
_CACHED_SHARES = (0.01, 0.03, 0.06, 0.15, 0.4)
"""Where fits begin: rows begin to fall out of the cache somewhere, and the error has a minimum at
each length that many rows have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProducts:
    """Seconds of matrix products on one GPU type.

    Attributes:
        chip: Chip of the type, with the peak of the dtype.
        sizes: (batch, rows, columns, depth) of each row.  # [num_rows, 4]
        num_bytes: Bytes read and written.  # [num_rows]
        seconds: Measured seconds.  # [num_rows]
    """

    chip: Chip
    sizes: FloatArray
    num_bytes: FloatArray
    seconds: FloatArray

    def log_errors(self, model: ProductModel) -> FloatArray:
        """log(predicted / measured) of each row.  # [num_rows]"""
        return np.log(model.seconds(self.chip, self.sizes, self.num_bytes) / self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStreams:
    """Seconds of kernels bound by memory on one GPU type.

    Attributes:
        chip: Chip of the type.
        num_bytes: Bytes read and written.  # [num_rows]
        row: Number of elements that are reduced together, 0 if none are.  # [num_rows]
        seconds: Measured seconds.  # [num_rows]
    """

    chip: Chip
    num_bytes: FloatArray
    row: FloatArray
    seconds: FloatArray

    def log_errors(self, model: StreamModel) -> FloatArray:
        """log(predicted / measured) of each row.  # [num_rows]"""
        predicted = model.seconds(self.chip, self.num_bytes, self.row)
        return np.log(predicted / self.seconds)


def fit_products(
    measured: Sequence[MeasuredProducts], joules_per_flop: float | None = None
) -> ProductModel:
    """Product parameters that fit one type, or several together.

    Args:
        measured: Products of each type.
        joules_per_flop: This parameter, where it is known: one type alone does not tell whether
            its clock or the power of its board bounds large products.
    """
    held = {} if joules_per_flop is None else {"joules_per_flop": joules_per_flop}

    def model_of(parameters: Iterable[float]) -> ProductModel:
        return replace(ProductModel(*parameters), **held)

    def log_errors(logarithms: FloatArray) -> FloatArray:
        model = model_of(np.exp(logarithms))
        return np.concatenate([each.log_errors(model) for each in measured])

    bounds = (astuple(_PRODUCT_LEAST), astuple(_PRODUCT_MOST))
    return model_of(_fit(log_errors, astuple(_PRODUCT_START), bounds).parameters)


def fit_streams(measured: Sequence[MeasuredStreams]) -> StreamModel:
    """Stream parameters that fit one type, or several together."""

    def log_errors(logarithms: FloatArray) -> FloatArray:
        model = StreamModel(*np.exp(logarithms))
        return np.concatenate([each.log_errors(model) for each in measured])

    bounds = (astuple(_STREAM_LEAST), astuple(_STREAM_MOST))
    starts = [astuple(replace(_STREAM_START, cached_share=share)) for share in _CACHED_SHARES]
    found = [_fit(log_errors, start, bounds) for start in starts]
    return StreamModel(*min(found, key=lambda fit: fit.cost).parameters)


def errors_of(log_errors: FloatArray) -> Errors:
    """Statistics of errors, as shares of the measured seconds."""
    off = np.abs(np.expm1(log_errors))
    return Errors(rows=len(off), median=float(np.median(off)), p90=float(np.quantile(off, 0.9)))


class _Fit(NamedTuple):
    """Parameters, and the sum of losses that they leave."""

    parameters: list[float]
    cost: float


def _fit(
    log_errors: Callable[[FloatArray], FloatArray],
    start: tuple[float, ...],
    bounds: tuple[tuple[float, ...], tuple[float, ...]],
) -> _Fit:
    """Fit positive parameters, in their logarithms."""
    found = least_squares(
        log_errors,
        np.log(start),
        bounds=(np.log(bounds[0]) - 1e-9, np.log(bounds[1])),
        loss="soft_l1",
        f_scale=_OUTLIER,
        diff_step=np.full(len(start), _STEP),
    )
    return _Fit([float(value) for value in np.exp(found.x)], float(found.cost))
