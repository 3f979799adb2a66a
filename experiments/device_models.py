"""Fits device models to measured kernels, and tests them on other rows and on other types.

    python experiments/device_models.py --data DIR --json

DIR holds ``gemm_16bit.csv.gz`` (matrix products of an inference stack on A100, H100, H200, L40S;
ai-dynamo/aiconfigurator, Apache-2) and ``kernels_fp32.csv.gz`` (float32 kernels of torch on P4,
P100, V100, T4, A100, H100; sitar-lab/NeuSight, MIT), or files of the same columns. The fit uses
only rows whose ``split`` is ``fit``; errors are those of the other rows. Then each type is left
out in turn, and the parameters of the others predict all of its rows.

Seconds of 8-bit products are those of the stack: the activations are scaled to 8 bits first, a
kernel of its own that reads 2 bytes an element and writes 1.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fits.kernels import (
    MeasuredProducts,
    MeasuredStreams,
    errors_of,
    fit_products,
    fit_products_of_one,
    fit_streams,
)
from rows import asked_of, csv_rows, finish, option, progress

from heterog.cluster.catalog import device_type
from heterog.grouped import grouped
from heterog.pricing.device_models import parameters
from heterog.pricing.device_models.laws import product_bytes
from heterog.pricing.device_models.parameters import ANY_TYPE, chip_of

Row = Mapping[str, str]

TENSORS_MOVED = {
    "add": 3, "mul": 3, "div": 3, "pow": 3, "addu": 2, "mulu": 2, "divu": 2, "powu": 2, "relu": 2,
    "gelu": 2, "tanh": 2, "ln": 2, "softmax": 2,
}  # fmt: skip
"""Tensors that an op reads and writes; "u" stands for a scalar as second operand."""
STREAM_FAMILY = {"ln": "layer norm", "softmax": "softmax"}
_PEAK_OF_8_BITS = 2.0
"""Over that of 16 bits, on the sheets of all types that have both."""
HELD: dict[str, dict[str, Any]] = {
    "16 bit": {"joules_per_flop": 3.0e-12, "wide_loss": 0.0},
    "8 bit": {"joules_per_flop": 1.5e-12, "most_splits": 1.0, "least_rows": 128.0},
}
"""Known parameters of tensor cores. The energy is that at 16 nm (see ``parameters.energy_of``),
because no board of the set reaches its power limit there; the energy of vector units is fitted to
all types together, among which a T4 and a P4 reach it. Kernels of the stack for 8 bits do not cut
the depth, and have tiles of 128 features at least: on each of the three types this fits better
than others do."""


def columns(rows: Sequence[Row], *names: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers of some columns; an empty field is 1.  # [len(names), len(rows)]"""
    return np.array([[float(row[name] or 1.0) for row in rows] for name in names])


def products_16bit(rows: Sequence[Row], family: str) -> MeasuredProducts:
    """Products on tensor cores of one type."""
    kind = device_type(rows[0]["device"])
    m, n, k, milliseconds = columns(rows, "m", "n", "k", "ms")
    sizes = np.stack([np.ones_like(m), m, n, k], axis=1)
    peak = kind.peak_flops_per_s["bfloat16"]
    if family == "8 bit":  # its kernels have a row for each output feature
        sizes = sizes[:, [0, 2, 1, 3]]
        peak *= _PEAK_OF_8_BITS
        num_bytes = product_bytes(sizes, 1.0, 2.0) + 3.0 * m * k  # scaled before
    else:
        num_bytes = product_bytes(sizes, 2.0, 2.0)
    return MeasuredProducts(
        chip=chip_of(kind, peak),
        sizes=sizes,
        num_bytes=num_bytes,
        result_bytes=2.0 * m * n,
        seconds=milliseconds / 1e3,
    )


def products_float32(rows: Sequence[Row], family: str) -> MeasuredProducts:
    """Products on the vector units of one type."""
    kind = device_type(rows[0]["device"])
    sizes = columns(rows, "B", "M", "N", "K").T
    (milliseconds,) = columns(rows, "ms")
    return MeasuredProducts(
        chip=chip_of(kind, kind.peak_flops_per_s[family]),
        sizes=sizes,
        num_bytes=product_bytes(sizes, 4.0, 4.0),
        result_bytes=4.0 * sizes[:, :3].prod(axis=1),
        seconds=milliseconds / 1e3,
    )


def streams(rows: Sequence[Row], family: str) -> MeasuredStreams:
    """Kernels bound by memory of one type."""
    kind = device_type(rows[0]["device"])
    count, row, milliseconds = columns(rows, "B", "H", "ms")
    moved = np.array([TENSORS_MOVED[each["op"]] for each in rows], np.float64)
    return MeasuredStreams(
        chip=chip_of(kind, kind.peak_flops_per_s["float32"]),
        num_bytes=4.0 * moved * count * row,
        row=row if family != "elementwise" else np.zeros_like(row),
        seconds=milliseconds / 1e3,
    )


def by_family(
    rows: Iterable[Row], family_of: Callable[[Row], str]
) -> dict[str, dict[str, list[Row]]]:
    """Rows by family and type."""
    return {
        family: grouped((device_type(row["device"]).name, row) for row in own)
        for family, own in grouped((family_of(row), row) for row in rows).items()
    }


def fit_family(
    name: str,
    by_type: Mapping[str, Sequence[Row]],
    measured: Callable[..., Any],
    fit: Callable[..., Any],
    fit_one: Callable[..., Any] | None = None,
) -> list[dict[str, Any]]:
    """Parameters and errors of one family: on each type, and for any.

    Args:
        name: of the family.
        by_type: rows of each type.
        measured: makes what ``fit`` takes of rows.
        fit: finds parameters that several types share.
        fit_one: finds those of one type; ``fit`` if ``None``.
    """
    fitted = {kind: measured([r for r in rows if r["split"] == "fit"], name)
              for kind, rows in by_type.items()}  # fmt: skip
    tested = {kind: measured([r for r in rows if r["split"] == "test"], name)
              for kind, rows in by_type.items()}  # fmt: skip
    found, left_out = [], []
    for kind in by_type:
        progress(f"{name}, {kind}")
        model = (fit_one or fit)([fitted[kind]])
        others = fit([each for other, each in fitted.items() if other != kind])
        unseen = np.concatenate([each.log_errors(others) for each in (fitted[kind], tested[kind])])
        left_out.append(unseen)
        found.append({"family": name, "type": kind, "model": asdict(model),
                      "errors": asdict(errors_of(tested[kind].log_errors(model))),
                      "left_out": asdict(errors_of(unseen))})  # fmt: skip
    found.append({"family": name, "type": ANY_TYPE, "model": asdict(fit(list(fitted.values()))),
                  "errors": asdict(errors_of(np.concatenate(left_out)))})  # fmt: skip
    return found


def measured_kernels(data: Path) -> dict[str, dict[str, list[Row]]]:
    """Rows of each family by type."""
    tensor_cores = by_family(
        csv_rows(data / "gemm_16bit.csv.gz"),
        lambda row: "8 bit" if row["dtype"] == "fp8" else "16 bit",
    )
    torch_kernels = by_family(
        csv_rows(data / "kernels_fp32.csv.gz"),
        lambda row: "float32" if row["op"] in ("bmm", "linear")
        else STREAM_FAMILY.get(row["op"], "elementwise"),
    )  # fmt: skip
    return tensor_cores | torch_kernels


def of_several(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What a family's rows measure, and the fit of parameters that several types share."""
    if name in parameters.STREAMS:
        return streams, fit_streams
    measured = products_float32 if name == "float32" else products_16bit
    # How much slower wide outputs are differs between types by a factor of thirty, so nothing is
    # said of others: that is better for all that were left out, taken together.
    return measured, partial(fit_products, **{**HELD.get(name, {}), "wide_loss": 0.0})


def fit_all(data: Path) -> list[dict[str, Any]]:
    """Every family that the files hold."""
    kernels = measured_kernels(data)
    # What a single type reaches holds what its power allows.
    found = fit_family(
        "float32", kernels["float32"], *of_several("float32"),
        partial(fit_products_of_one, joules_per_flop=0.0),
    )  # fmt: skip
    for name, held in HELD.items():
        found += fit_family(name, kernels[name], *of_several(name), partial(fit_products, **held))
    for name in parameters.STREAMS:
        found += fit_family(name, kernels[name], *of_several(name))
    return found


def main() -> None:
    """Fit, and print errors."""
    arguments = asked_of(__doc__, option("--data", type=Path, required=True))
    finish(arguments, {"rows": fit_all(arguments.data)})


if __name__ == "__main__":
    main()
