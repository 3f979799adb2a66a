"""Parameters of device models from measured kernels.

Least squares of log(predicted / measured), so that a kernel of 5 us counts as much as one of
50 ms, with a loss that is robust to single outliers (soft l1 beyond 10 %).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from heterog.graph.op_graph import FloatArray
from heterog.pricing.device_models.laws import Chip, ProductModel, StreamModel
from heterog.pricing.device_models.parameters import Errors

_OUTLIER = 0.1
_STEP = 0.02
"""Step of the derivatives, in logarithms: waves make the seconds a staircase."""
_PRODUCT_BOUNDS = {
    "launch_s": (5e-7, 4e-6, 6e-5),
    "efficiency": (0.2, 1.0, 1.5),
    "tile_loss": (1e-3, 0.3, 5.0),
    "ramp": (0.1, 60.0, 1000.0),
    "memory_efficiency": (0.2, 0.8, 1.1),
    "cache_speedup": (1.0, 1.5, 10.0),
    "joules_per_flop": (1e-14, 1.5e-11, 1e-10),
    "wide_loss": (1e-3, 0.3, 10.0),
}
"""Least value, start, and largest value of each parameter of a product."""
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
"""Starts of fits: rows fall out of the cache from some length on, and the error has a minimum at
each length that many rows have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProducts:
    """Seconds of matrix products on one GPU type.

    Attributes:
        chip: Chip of the type, with the peak of the dtype.
        sizes: (batch, rows, columns, depth) of each row.  # [num_rows, 4]
        num_bytes: Bytes read and written.  # [num_rows]
        result_bytes: Bytes of these that are written.  # [num_rows]
        seconds: Measured seconds.  # [num_rows]
    """

    chip: Chip
    sizes: FloatArray
    num_bytes: FloatArray
    result_bytes: FloatArray
    seconds: FloatArray

    def log_errors(self, model: ProductModel) -> FloatArray:
        """log(predicted / measured) of each row.  # [num_rows]"""
        told = model.seconds(self.chip, self.sizes, self.num_bytes, self.result_bytes)
        return np.log(told / self.seconds)


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
        return np.log(model.seconds(self.chip, self.num_bytes, self.row) / self.seconds)


def fit_products(measured: Sequence[MeasuredProducts], **held: float) -> ProductModel:
    """Product parameters that fit one type, or several together.

    Args:
        measured: Products of each type.
        **held: Parameters that are known. Rows of one type alone do not determine whether its
            clock or the power of its board bounds large products (``joules_per_flop``).
    """
    return _fit_products(measured, held)[0]


def fit_products_of_one(
    measured: Sequence[MeasuredProducts], least_gain: float = 0.25, **held: float
) -> ProductModel:
    """Product parameters of one type, slower with wide outputs where that explains much.

    Args:
        measured: Products of the type.
        least_gain: Share by which ``wide_loss`` has to lower the sum of losses to be kept.
        **held: Parameters that are known.
    """
    plain, cost = _fit_products(measured, {"wide_loss": 0.0, **held})
    wide, cost_of_wide = _fit_products(measured, held)
    return wide if cost_of_wide < (1.0 - least_gain) * cost else plain


def _fit_products(
    measured: Sequence[MeasuredProducts], held: Mapping[str, float]
) -> tuple[ProductModel, float]:
    """Parameters, and the sum of losses that they leave."""
    bounds = {name: each for name, each in _PRODUCT_BOUNDS.items() if name not in held}
    least, start, most = map(tuple, zip(*bounds.values(), strict=True))

    def model_of(parameters: Iterable[float]) -> ProductModel:
        return ProductModel(**dict(zip(bounds, parameters, strict=True)), **held)

    def log_errors(logarithms: FloatArray) -> FloatArray:
        model = model_of(np.exp(logarithms).tolist())
        return np.concatenate([each.log_errors(model) for each in measured])

    parameters, cost = _fit(log_errors, start, (least, most))
    return model_of(parameters), cost


def fit_streams(measured: Sequence[MeasuredStreams]) -> StreamModel:
    """Stream parameters that fit one type, or several together."""

    def log_errors(logarithms: FloatArray) -> FloatArray:
        model = StreamModel(*np.exp(logarithms))
        return np.concatenate([each.log_errors(model) for each in measured])

    bounds = (astuple(_STREAM_LEAST), astuple(_STREAM_MOST))
    starts = [astuple(replace(_STREAM_START, cached_share=share)) for share in _CACHED_SHARES]
    found = [_fit(log_errors, start, bounds) for start in starts]
    return StreamModel(*min(found, key=lambda fit: fit[1])[0])


def errors_of(log_errors: FloatArray) -> Errors:
    """Statistics of errors, as shares of the measured seconds."""
    off = np.abs(np.expm1(log_errors))
    return Errors(rows=len(off), median=float(np.median(off)), p90=float(np.quantile(off, 0.9)))


def _fit(
    log_errors: Callable[[FloatArray], FloatArray],
    start: tuple[float, ...],
    bounds: tuple[tuple[float, ...], tuple[float, ...]],
) -> tuple[list[float], float]:
    """Positive parameters, fitted in their logarithms, and the sum of losses that they leave."""
    found = least_squares(
        log_errors,
        np.log(start),
        bounds=(np.log(bounds[0]) - 1e-9, np.log(bounds[1])),
        loss="soft_l1",
        f_scale=_OUTLIER,
        diff_step=np.full(len(start), _STEP),
    )
    return np.exp(found.x).tolist(), float(found.cost)
