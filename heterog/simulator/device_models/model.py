"""The device models as a cost model: what a step takes on GPUs that nobody has calibrated."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from heterog.cluster.catalog import listed_type
from heterog.cluster.topology import DeviceType
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph
from heterog.simulator.device_models.kernels import Products, local_sizes, products_of, streams_of
from heterog.simulator.device_models.parameters import (
    ANY_TYPE,
    PRODUCTS,
    STREAMS,
    chip_of,
    families_of,
)
from heterog.simulator.device_models.products import ProductModel
from heterog.simulator.device_models.streams import StreamModel
from heterog.simulator.roofline import Roofline, attainable_flops_per_s

_TENSOR_CORE_GAIN = 1.5
"""A peak that is so much above float32's of the sheet is one of tensor cores."""
_LEAST_GPU_FLOPS_PER_S = 1e12


class DeviceModels(Roofline):
    """Cost model of kernels with parameters by GPU type.

    Types that are no GPUs, and those for which somebody has given efficiencies or a launch
    overhead, keep the roofline.

    Args:
        host_s: that the host takes to issue a kernel; no kernel takes less. The default is chosen,
            not measured: about what torch takes for an op and its gradient. Libraries that do more
            between kernels take more.
    """

    name = "device models"

    def __init__(self, host_s: float = 10e-6) -> None:
        self.host_s = host_s

    def kernel_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """Seconds of the kernel of every op that does some work.  # [num_ops]"""
        if not _is_modelled(device_type):
            return super().kernel_seconds(graph, device_type, flops, num_bytes)
        launch, per_byte, per_flop = _stream_rates(graph, device_type)
        seconds: FloatArray = launch + np.maximum(per_byte * num_bytes, per_flop * flops)
        _add_products(seconds, graph, device_type, flops, num_bytes)
        return np.where(_is_issued(graph), np.maximum(seconds, self.host_s), seconds)

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """Launch, and seconds per byte moved through device memory."""
        if not _is_modelled(device_type):
            return super().copy_seconds(device_type)
        model = families_of(device_type.name)["elementwise"].model
        assert isinstance(model, StreamModel)
        rate = device_type.memory_bandwidth_bytes_per_s * model.efficiency
        return launch_seconds(device_type), 1.0 / rate


def provenance(device_types: Sequence[DeviceType]) -> str:
    """Where the parameters of some types come from, in one sentence.

    >>> from heterog.cluster.catalog import device_type
    >>> provenance([device_type("L40S"), device_type("RTX-3090"), device_type("CPU")])
    'L40S: 16 bit, 8 bit products as measured, the rest as on other types; RTX-3090: as on other \
types; CPU: roofline'
    """
    return "; ".join(f"{each.name}: {_source_of(each)}" for each in device_types)


def _source_of(device_type: DeviceType) -> str:
    if not _is_modelled(device_type):
        return "roofline"
    measured = [
        name
        for name, family in families_of(device_type.name).items()
        if family.measured_on != ANY_TYPE
    ]
    if not measured:
        return "as on other types"
    products = [name for name in measured if name in PRODUCTS]
    words = [*products[:-1], f"{products[-1]} products"] if products else []
    words += [name for name in measured if name in STREAMS]
    rest = "" if len(measured) == len(PRODUCTS) + len(STREAMS) else ", the rest as on other types"
    return f"{', '.join(words)} as measured{rest}"


def launch_seconds(device_type: DeviceType) -> float:
    """Of a kernel that does nothing, in a queue of kernels.

    That of 16-bit products, which were timed in a captured graph; what float32 kernels were timed
    with holds the timer's own overhead, 15 to 60 us.
    """
    return families_of(device_type.name)["16 bit"].model.launch_s


@lru_cache(maxsize=256)
def _is_modelled(device_type: DeviceType) -> bool:
    plain = DeviceType(
        name=device_type.name,
        peak_flops_per_s=device_type.peak_flops_per_s,
        memory_bandwidth_bytes_per_s=device_type.memory_bandwidth_bytes_per_s,
        memory_bytes=device_type.memory_bytes,
        source=device_type.source,
    )
    return device_type == plain and (
        device_type.peak_flops_per_s["float32"] >= _LEAST_GPU_FLOPS_PER_S
    )


@lru_cache(maxsize=64)
def _is_issued(graph: OpGraph) -> NDArray[np.bool_]:
    """Ops that are kernels of their own; the optimizer updates many parameters in one."""
    found = np.zeros(graph.num_ops, np.bool_)
    streams = streams_of(graph)
    found[streams.op[streams.launches > 0.0]] = True
    found[products_of(graph).op] = True
    return found


@lru_cache(maxsize=64)
def _stream_rates(
    graph: OpGraph, device_type: DeviceType
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(launch, seconds per byte, per FLOP) of ops without products, 0 of others.  # [num_ops]

    FLOPs matter to ops of imported graphs alone, of which nothing else may be known.
    """
    launch, per_byte, per_flop = (np.zeros(graph.num_ops) for _ in range(3))
    streams, families = streams_of(graph), families_of(device_type.name)
    launch[streams.op] = launch_seconds(device_type) * streams.launches
    per_flop[streams.op] = 1.0 / attainable_flops_per_s(graph, device_type)[streams.op]
    for number, name in enumerate(STREAMS):
        model, chosen = families[name].model, streams.family == number
        assert isinstance(model, StreamModel)
        per_byte[streams.op[chosen]] = model.seconds_per_byte(
            device_type.memory_bandwidth_bytes_per_s, streams.row[chosen]
        )
    return launch, per_byte, per_flop


def _add_products(
    seconds: FloatArray,
    graph: OpGraph,
    device_type: DeviceType,
    flops: FloatArray,
    num_bytes: FloatArray,
) -> None:
    """Add the seconds of every matrix product to its op's."""
    products = products_of(graph)
    if not len(products.op):
        return
    part = flops[products.op] / graph.flops[products.op]
    moved = num_bytes[products.op] * products.bytes_share
    # Layers repeat: each part of each kind of product is priced once.
    order = np.lexsort((moved, part, products.kind))
    keys = np.stack([products.kind[order], part[order], moved[order]])
    is_new = np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
    first = order[is_new]
    took = np.empty(len(order))
    took[order] = _product_seconds(
        products, device_type, first, part[first], moved[first]
    )[np.cumsum(is_new) - 1]  # fmt: skip
    np.add.at(seconds, products.op, launch_seconds(device_type) + took)


def _product_seconds(
    products: Products,
    device_type: DeviceType,
    chosen: IntArray,
    part: FloatArray,
    moved: FloatArray,
) -> FloatArray:
    """Seconds of some products without their launch.

    Args:
        products: of a graph.
        device_type: where they run.
        chosen: numbers of products.  # [num_chosen]
        part: FLOPs of each over those of the whole op.  # [num_chosen]
        moved: bytes of each.  # [num_chosen]
    """
    sizes = local_sizes(products, chosen, part, moved / products.num_bytes[chosen])
    took = np.zeros(len(chosen))
    for number, dtype in enumerate(products.dtypes):
        of_dtype = (products.dtype[chosen] == number) & (part > 0.0)
        if not of_dtype.any():
            continue
        model, peak = _product_model(device_type, dtype)
        count = products.count[chosen][of_dtype]
        whole = model.seconds(chip_of(device_type, peak), sizes[of_dtype], moved[of_dtype] / count)
        took[of_dtype] = count * (whole - model.launch_s)
    return took


@lru_cache(maxsize=256)
def _product_model(device_type: DeviceType, dtype: str) -> tuple[ProductModel, float]:
    """Parameters and peak of the products of a dtype."""
    peaks, listed = device_type.peak_flops_per_s, listed_type(device_type.name)
    sheet = device_type if listed is None else listed.type
    on_vector_units = sheet.peak_flops_per_s["float32"]
    peak = peaks.get(dtype, peaks["float32"])
    if listed is not None and listed.matrix_flops_per_s and peak == on_vector_units:
        peak = listed.matrix_flops_per_s
    is_tensor_core = peak > _TENSOR_CORE_GAIN * on_vector_units and dtype != "float64"
    model = families_of(device_type.name)["16 bit" if is_tensor_core else "float32"].model
    assert isinstance(model, ProductModel)
    return model, peak
