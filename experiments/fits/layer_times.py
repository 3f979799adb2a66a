"""Measured seconds of transformer layers on many cards, as the device models see them.

Rows have the columns of benson-guo/zorse (MIT): ``model, gpu, seq, dtype, phase, microbatch, ms``.
``split`` says which are fitted; without it, rows of ``_TESTED`` are not. A layer is what its
matrix products take, by parameters at hand, and what everything else takes.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fits.kernels import errors_of
from fits.layers import graph_of_layer, layer_of
from heterog.cluster.catalog import device_type, matching_types
from heterog.cluster.hardware import DeviceType
from heterog.errors import UnknownNameError
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.pricing.device_models.chip import Chip
from heterog.pricing.device_models.kernels import Use, local_sizes, products_of
from heterog.pricing.device_models.model import DeviceModels, product_unit
from heterog.pricing.device_models.parameters import chip_of
from heterog.pricing.device_models.products import ProductModel

Row = Mapping[str, str]

_TESTED = ("llama_7b", "llama_33b", "vit_e", "gpt_6.7b", "bert_large")
_BATCH = 16
_PASSES = 15.0
"""Forward passes that share one cast of the parameters."""
_ADDED_BYTES = 12.0
"""Of each parameter, which a backward pass adds to its gradient in float32."""
_PHASES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD}
_SPELLED = {"watgpu": "A6000", "p100": "P100-16GB", "v100": "V100-16GB"}
_LARGEST = 64


def card_of(gpu: str) -> DeviceType | None:
    """The type of a name in the rows, ``None`` if the catalogue has no such card.

    >>> [card_of(name).name for name in ("a100x40", "rtx_3090", "v100-pciex32", "h100-nvl")]
    ['A100-40GB', 'RTX-3090', 'V100-PCIe-32GB', 'H100-NVL']
    """
    name = _SPELLED.get(gpu.lower(), gpu.lower().replace("_", " "))
    name = re.sub(r"(?<=\d)x(\d\d)$", r" \1gb", name)
    name = re.sub(r"(?<=pcie)x(\d\d)$", r" \1gb", name)
    try:
        return device_type(name)
    except UnknownNameError:
        return next(iter(matching_types(name)), None)


class _Pass(NamedTuple):
    """Products of one pass of a layer, and the seconds of its other kernels."""

    sizes: FloatArray  # [num_products, 4]
    num_bytes: FloatArray  # [num_products]
    weight: FloatArray  # [num_products], number of each times any factor on their seconds
    others_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayers:
    """Seconds of layers on one GPU type, whose products are one family's.

    Attributes:
        chip: Chip of the type, with the peak of the family.
        sizes: (batch, rows, columns, depth) of each product.  # [num_products, 4]
        num_bytes: Bytes that each reads and writes.  # [num_products]
        count: Number of them, times any factor on their seconds.  # [num_products]
        layer: Layer of each.  # [num_products]
        others_s: Seconds of all other kernels.  # [num_layers]
        seconds: Measured seconds.  # [num_layers]
        weight: What a row counts for in a fit beside one of kernels measured alone.
    """

    chip: Chip
    sizes: FloatArray
    num_bytes: FloatArray
    count: FloatArray
    layer: NDArray[np.int64]
    others_s: FloatArray
    seconds: FloatArray
    weight: float = 1.0

    def log_errors(self, model: ProductModel) -> FloatArray:
        """log(predicted / measured) of each layer, weighted.  # [num_layers]"""
        alone = model.seconds(self.chip, self.sizes, self.num_bytes) - model.launch_s
        told = self.others_s + np.bincount(
            self.layer, self.count * alone, minlength=len(self.others_s)
        )
        return self.weight * np.log(told / self.seconds)


def measured_layers(rows: Sequence[Row], dtype: str) -> dict[str, tuple[MeasuredLayers, ...]]:
    """Rows of a dtype by type: those to fit, and those to test.

    Types whose products of 16 bits run on units for float32 are not among those of tensor cores.
    """
    by_type: dict[str, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for row in rows:
        kind = card_of(row["gpu"])
        name = row["model"].removeprefix("deepspeed")
        if kind is None or row["dtype"] != dtype or int(row["microbatch"]) > _LARGEST:
            continue
        if layer_of(name, 1, dtype, is_eager=False) is None:
            continue
        is_tested = row.get("split", "test" if name in _TESTED else "fit") == "test"
        by_type[kind.name][is_tested].append(row)
    return {
        name: tuple(_of_type(each, device_type(name)) for each in both)
        for name, both in by_type.items()
    }


def _of_type(rows: Sequence[Row], kind: DeviceType) -> MeasuredLayers:
    found = [_pass(row, kind) for row in rows]
    peak = kind.peak_flops_per_s["float32"]
    if rows and rows[0]["dtype"] == "float16":
        peak = product_unit(kind, "float16").peak_flops_per_s
    none = np.zeros((0, 4))
    return MeasuredLayers(
        chip=chip_of(kind, peak),
        sizes=np.concatenate([none, *(each.sizes for each in found)]),
        num_bytes=np.concatenate([none[:, 0], *(each.num_bytes for each in found)]),
        count=np.concatenate([none[:, 0], *(each.weight for each in found)]),
        layer=np.repeat(np.arange(len(found)), [len(each.weight) for each in found]),
        others_s=np.array([each.others_s for each in found]),
        seconds=np.array([float(row["ms"]) / 1e3 for row in rows]),
    )


@cache
def _captured(name: str, sequence: int, dtype: str, is_eager: bool) -> OpGraph:
    layer = layer_of(name, sequence, dtype, is_eager=is_eager)
    assert layer is not None
    return graph_of_layer(layer, _BATCH)


def _pass(row: Row, kind: DeviceType) -> _Pass:
    graph = _captured(
        row["model"].removeprefix("deepspeed"), int(row["seq"]), row["dtype"], kind.name == "P40"
    )
    return _priced(graph, kind, int(row["microbatch"]), row["phase"])


@cache
def _priced(graph: OpGraph, kind: DeviceType, samples: int, phase: str) -> _Pass:
    models = DeviceModels(host_s=0.0)
    share = _share_of_pass(graph, _PHASES[phase])
    seconds = models.op_seconds(graph, kind, samples)
    plan, products = batch_plan(graph), products_of(graph)
    chosen = np.flatnonzero(share[products.op] > 0.0).astype(np.int32)
    op = products.op[chosen]
    part = (plan.flops_fixed + samples * plan.flops_per_sample)[op] / graph.flops[op]
    moved = (plan.bytes_fixed + samples * plan.bytes_per_sample)[op] * products.bytes_share[chosen]
    sizes = local_sizes(products, chosen, part, moved / products.num_bytes[chosen])
    factors = models.in_training(kind.name)
    slower = np.ones(len(chosen))
    for number, each in enumerate(products.kinds):
        if product_unit(kind, each.dtype).is_tensor_core:
            of_use = factors.fused_attention if each.use == Use.ATTENTION else factors.products
            slower[products.factors[chosen] == number] = of_use
    launch_s, copy_s = models.copy_seconds(kind)
    others = np.where(np.isin(np.arange(graph.num_ops), op), 0.0, seconds) * share
    added = _ADDED_BYTES * graph.num_parameters * copy_s if phase == "backward" else 0.0
    return _Pass(
        sizes=sizes,
        num_bytes=moved / products.count[chosen],
        weight=products.count[chosen] * slower,
        others_s=float(others.sum() + launch_s * len(op) + added),
    )


def _share_of_pass(graph: OpGraph, phase: Phase) -> FloatArray:
    """How often each op ran in a timed pass: casts of parameters once in all, the loss never."""
    parameters = set(graph.parameters)
    is_cast = np.array(
        [op.kind.startswith("_to_copy") and op.inputs[0] in parameters for op in graph.ops]
    )
    share = np.array([float(op.phase == phase) for op in graph.ops])
    share[is_cast] /= _PASSES
    share[0] = 0.0  # makes the gradient of the input wanted
    loss = [index for index, op in enumerate(graph.ops) if op.phase == Phase.FORWARD][-2:]
    share[loss] = 0.0
    return share


def errors_by_card(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors of what ships on every card and dtype of the rows."""
    found = []
    for dtype in ("float16", "float32"):
        for name, both in measured_layers(rows, dtype).items():
            unit = product_unit(device_type(name), dtype)
            off = np.concatenate([each.log_errors(unit.model) for each in both])
            found.append({"dtype": dtype, "type": name, **asdict(errors_of(off))})
    return found
