"""Fits device models to measured kernels, tests them on other rows, and writes them.

    python experiments/device_models.py --data DIR --json
    python experiments/device_models.py --data DIR --write
    python experiments/device_models.py --data DIR --shipped
    python experiments/device_models.py --data DIR --left-out

DIR holds ``gemm_16bit.csv.gz`` (matrix products of an inference stack on A100, H100, H200, L40S;
ai-dynamo/aiconfigurator, Apache-2) and ``kernels_fp32.csv.gz`` (float32 kernels of torch on P4,
P100, V100, T4, A100, H100; sitar-lab/NeuSight, MIT), or files of the same columns. The fit uses
only rows whose ``split`` is ``fit``; errors are those of the other rows. Then each type is left
out in turn, and the parameters of the others predict all of its rows. ``--write`` puts the
parameters into the package.

Layers of transformers on further cards (``zorse_layers.csv`` or ``layers_*.csv``, packed or not;
``fits/layer_times.py`` has their columns) give one parameter for each type whose kernels nobody
measured alone; see ``OF_LAYERS``. ``--shipped`` fits nothing: it prints the errors of the shipped
models on the layers of every card in DIR, and on Megatron's peaks of memory
(``megatron_golden.csv`` or ``megatron_peaks_*.csv``). ``--left-out`` prices the layers of each
card as if nobody had measured it: all kernels by fits to cards with other chips, everything else
by its data sheet.

Seconds of 8-bit products are those of the stack: the activations are scaled to 8 bits first, a
kernel of its own that reads 2 bytes an element and writes 1.

Peaks are those of Megatron-LM's functional tests on 8 A100, compared with those of plans.

Their rows have the columns of NVIDIA/Megatron-LM's golden values (BSD-style),
``megatron_golden.csv``: settings of a case and ``mem_max_alloc_bytes``, which the last rank
writes. Dense GPTs are compared, each setting once; experts, context parallelism, Megatron's own
FSDP, frozen parts and runs that resume (which allocate in another order) are left out. If the head
shares the embedding's table, the last stage holds a copy, so it needs as much memory as a head
with its own table.
"""

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import yaml
from fits.kernels import (
    MeasuredProducts,
    MeasuredStreams,
    errors_of,
    fit_products,
    fit_products_of_one,
    fit_streams,
)
from fits.layer_times import MeasuredLayers, card_of, errors_by_card, measured_layers
from published.models import Model, graph_of
from published.runs import a100_nodes
from rows import asked_of, csv_rows, finish, option, progress

from heterog.cluster.catalog import device_type, listed_type
from heterog.cluster.topology import Execution
from heterog.grouped import grouped
from heterog.pricing.device_models import parameters
from heterog.pricing.device_models.laws import ProductModel, product_bytes
from heterog.pricing.device_models.parameters import ANY_TYPE, Family, chip_of, is_same_chip
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.placed import place_layout

Row = Mapping[str, str]

_DEVICES, _HEADS, _WORDS, _PADDED = 8, 8, 50257, 128
_APART = (
    "release", "memory_speed", "resume", "frozen", "cross_entropy_loss_fusion",
    "account_for_embedding", "defer_embedding",
)  # fmt: skip
_NOT_DENSE = ("num-experts", "use-megatron-fsdp", "optimizer-cpu-offload")


def _number(row: Row, name: str) -> int:
    return int(row.get(name) or 1)


def layout_of(row: Row) -> Layout | None:
    """The layout of a case, ``None`` if it is left out."""
    if row["family"] != "gpt" or not row["hidden-size"] or not row["seq-length"]:
        return None
    if any(row.get(name) for name in _NOT_DENSE) or _number(row, "context-parallel-size") > 1:
        return None
    if any(word in row["case"] for word in _APART) or not row["mem_max_alloc_bytes"]:
        return None
    tp, pp = (
        _number(row, "tensor-model-parallel-size"),
        _number(row, "pipeline-model-parallel-size"),
    )
    of_chunk = row.get("num-layers-per-virtual-pipeline-stage")
    chunks = _number(row, "num-layers") // pp // int(of_chunk) if of_chunk and pp > 1 else 0
    return Layout(
        tp=tp,
        pp=pp,
        dp=_DEVICES // tp // pp,
        micro_batch=_number(row, "micro-batch-size"),
        zero=int(row.get("use-distributed-optimizer") == "true"),
        chunks=chunks if chunks > 1 else 0,
        sequence_parallel=row.get("sequence-parallel") == "true" and tp > 1,
        recompute=Recompute.FULL if row.get("recompute-granularity") == "full" else Recompute.NONE,
    )


def predicted_bytes(row: Row, layout: Layout) -> float:
    """Peak of the last device, by the plan's memory model."""
    model = Model(
        family="gpt",
        hidden=_number(row, "hidden-size"),
        heads=_number(row, "num-attention-heads"),
        layers=_number(row, "num-layers"),
        sequence=_number(row, "seq-length"),
        vocabulary=-(-_WORDS // (_PADDED * layout.tp)) * _PADDED * layout.tp,
        dtype="float16" if row.get("fp16") == "true" else "bfloat16",
        is_tied=layout.pp == 1,
        is_fused=True,
        works_in_place=True,
    )
    graph = graph_of(model, layout.dp * layout.micro_batch * max(2 * layout.pp, 2))
    cluster = replace(a100_nodes(_DEVICES), execution=Execution.MEGATRON)
    strategy = place_layout(layout, graph, cluster).strategy
    return float(Evaluator(graph, cluster).evaluate(strategy, Order.FIFO).peak_memory_bytes[-1])


def peak_errors(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each case, measured and predicted."""
    seen = set()
    for row in rows:
        layout = layout_of(row)
        if layout is None or row["case"] in seen:
            continue
        seen.add(row["case"])
        measured, predicted = float(row["mem_max_alloc_bytes"]), predicted_bytes(row, layout)
        yield {"case": row["case"], "tp": layout.tp, "layout": str(layout),
               "measured_bytes": measured, "predicted_bytes": predicted,
               "error": predicted / measured - 1.0}  # fmt: skip


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

OF_LAYERS = (("16 bit", "A10G"), ("16 bit", "T4"), ("float32", "A10G"))
"""Types with measured layers only whose efficiency differs from that of ``any``: the rate that
their clock and units sustain for seconds. Other types are within 7 % without it."""
_WIDE_BESIDE_LAYERS = 0.3
"""For a P100, whose wide outputs are slow in one library's kernels (1.7) but not in another's:
with this value rows of both are within 12 %."""


def read_any(data: Path, *patterns: str) -> list[Row]:
    """Rows of all files that match a pattern, packed or not."""
    paths = {path for each in patterns for end in ("", ".gz") for path in data.glob(each + end)}
    return [row for path in sorted(paths) for row in csv_rows(path)]


LAYERS = ("zorse_layers.csv", "layers_*.csv")
PEAKS = ("megatron_golden.csv", "megatron_peaks_*.csv")


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
    beside: Mapping[str, Sequence[MeasuredLayers]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Parameters and errors of one family: on each type, and for any.

    Args:
        name: of the family.
        by_type: rows of each type.
        measured: makes what ``fit`` takes of rows.
        fit: finds parameters that several types share.
        fit_one: finds those of one type; ``fit`` if ``None``.
        beside: layers on some types, which together count as much as their kernels.
    """
    fitted = {kind: measured([r for r in rows if r["split"] == "fit"], name)
              for kind, rows in by_type.items()}  # fmt: skip
    tested = {kind: measured([r for r in rows if r["split"] == "test"], name)
              for kind, rows in by_type.items()}  # fmt: skip
    found, left_out = [], []
    for kind in by_type:
        progress(f"{name}, {kind}")
        layers = [
            replace(each, weight=math.sqrt(len(fitted[kind].seconds) / len(each.seconds)))
            for each in beside.get(kind, ())
        ]
        if layers:
            model = fit_products([fitted[kind], *layers], joules_per_flop=0.0,
                                 wide_loss=_WIDE_BESIDE_LAYERS)  # fmt: skip
        else:
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
    kernels, rows = measured_kernels(data), read_any(data, *LAYERS)
    layers = {dtype: measured_layers(rows, dtype) for dtype in ("float16", "float32") if rows}
    # What a single type reaches holds what its power allows.
    found = fit_family(
        "float32", kernels["float32"], *of_several("float32"),
        partial(fit_products_of_one, joules_per_flop=0.0),
        {"P100-16GB": [layers[dtype]["P100-16GB"][0] for dtype in layers]} if layers else {},
    )  # fmt: skip
    for name, held in HELD.items():
        found += fit_family(name, kernels[name], *of_several(name), partial(fit_products, **held))
    for name in parameters.STREAMS:
        found += fit_family(name, kernels[name], *of_several(name))
    return found + fit_layers(layers, found)


def has_chip(kind: str, chip: str) -> bool:
    """Whether a type's parameters are those of another's chip."""
    one, other = listed_type(kind), listed_type(chip)
    return kind == chip or bool(one and other and is_same_chip(one, other))


def families_without(
    kernels: Mapping[str, Mapping[str, Sequence[Row]]], known: Mapping[str, Any], chip: str
) -> dict[str, dict[str, Family]]:
    """Families of kernels by type, as if no card with a type's chip had been measured.

    Args:
        kernels: Rows of each family by type.
        known: Families by type, of all.
        chip: The type.
    """
    found = {}
    for name, by_type in known.items():
        found[name] = {kind: each for kind, each in by_type.items() if not has_chip(kind, chip)}
        rows = kernels[name]
        others = [kind for kind in rows if not has_chip(kind, chip)]
        if len(others) < len(rows):
            measured, fit = of_several(name)
            fitted = [[row for row in rows[kind] if row["split"] == "fit"] for kind in others]
            model = fit([measured(each, name) for each in fitted])
            found[name][ANY_TYPE] = replace(by_type[ANY_TYPE], model=model)
    return found


def print_left_out(arguments: argparse.Namespace) -> None:
    """Print errors on layers of each card by fits to cards with other chips."""
    rows, kernels = read_any(arguments.data, *LAYERS), measured_kernels(arguments.data)
    shipped, found = parameters._tables(), []
    for card in sorted({kind.name for row in rows if (kind := card_of(row["gpu"]))}):
        progress(f"without {card}")
        alone = {kind: each for kind, each in shipped.alone.items() if not has_chip(kind, card)}
        families = families_without(kernels, shipped.families, card)
        of_card = [row for row in rows if card_of(row["gpu"]) == device_type(card)]
        tables = shipped._replace(families=families, alone=alone)
        parameters.families_of.cache_clear()
        parameters.in_training_of.cache_clear()
        with mock.patch.object(parameters, "_tables", return_value=tables):
            found += errors_by_card(of_card)
    finish(arguments, {"rows": found})


def fit_layers(
    layers: Mapping[str, Mapping[str, tuple[MeasuredLayers, ...]]],
    found: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Parameters of types with measured layers alone, and their errors.

    Args:
        layers: Layers by dtype and type: those to fit, and those to test.
        found: What was fitted to kernels.
    """
    made = []
    for family, kind in OF_LAYERS if layers else ():
        progress(f"{family} layers, {kind}")
        fitted, tested = layers["float16" if family == "16 bit" else "float32"][kind]
        (of_any,) = [
            ProductModel(**each["model"])
            for each in found
            if (each["family"], each["type"]) == (family, ANY_TYPE)
        ]
        held = {name: value for name, value in asdict(of_any).items() if name != "efficiency"}
        held["joules_per_flop"] = 0.0  # what the type reaches holds what its power allows
        model = fit_products([fitted], **held)
        unseen = np.concatenate([each.log_errors(of_any) for each in (fitted, tested)])
        made.append({"family": family, "type": kind, "model": asdict(model),
                     "errors": asdict(errors_of(tested.log_errors(model))),
                     "left_out": asdict(errors_of(unseen))})  # fmt: skip
    return made


def rounded(value: Any) -> Any:
    """Round to four digits, more than a fit determines."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def families_document(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the package's file says of families."""
    families: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        families[row["family"]][row["type"]] = rounded({**row["model"], "errors": row["errors"]})
    return dict(families)


def write_section(name: str, section: Mapping[str, Any]) -> None:
    """Put a section into the package's file of parameters; keep its comments and the rest."""
    path = Path(parameters.__file__).parent / "fitted.yaml"
    text = path.read_text(encoding="utf-8")
    made = yaml.safe_dump({name: dict(section)}, sort_keys=False, width=99)
    found = re.search(rf"^{name}:\n(?:[ ].*\n)*", text, re.M)
    text = text + made if found is None else text[: found.start()] + made + text[found.end() :]
    path.write_text(text, encoding="utf-8")


def print_shipped(arguments: argparse.Namespace) -> None:
    """Print errors of the shipped models on layers of all cards and on Megatron's peaks."""
    layers = errors_by_card(read_any(arguments.data, *LAYERS))
    peaks = list(peak_errors(read_any(arguments.data, *PEAKS)))
    by_tp = grouped((f"tp {row['tp']}", abs(row["error"])) for row in peaks)
    means = {tp: float(np.mean(errors)) for tp, errors in by_tp.items()}
    finish(arguments, {"rows": layers, "peaks": peaks, "mean_errors_of_peaks": means})


def main() -> None:
    """Fit, print, and write if asked to."""
    arguments = asked_of(
        __doc__,
        option("--data", type=Path, required=True),
        option("--write", action="store_true"),
        option("--shipped", action="store_true", help="how far what ships is off"),
        option("--left-out", action="store_true", help="layers of cards nobody measured"),
    )
    if arguments.left_out:
        print_left_out(arguments)
    elif arguments.shipped:
        print_shipped(arguments)
    else:
        rows = fit_all(arguments.data)
        if arguments.write:
            write_section("families", families_document(rows))
        finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
