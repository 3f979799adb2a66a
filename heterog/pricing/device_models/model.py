"""The device models as a cost model: seconds of a step on GPUs without a calibration."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterog.cluster.catalog import listed_name, listed_type, product_peak
from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster, Execution, Tf32
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph
from heterog.grouped import grouped
from heterog.lowering.channels import Channel, ChannelKind
from heterog.pricing.cost_model import ChannelSeconds, seconds_between_hosts
from heterog.pricing.device_models.fusion import fused_kernels
from heterog.pricing.device_models.kernels import (
    ALIGNED_BYTES,
    Factors,
    Products,
    Use,
    local_sizes,
    products_of,
    streams_of,
)
from heterog.pricing.device_models.laws import ProductModel, StreamModel
from heterog.pricing.device_models.parameters import (
    ANY_TYPE,
    PRODUCTS,
    STREAMS,
    InTraining,
    chip_of,
    collectives_of,
    families_of,
    host_of,
    in_training_of,
    multiplies_large,
)
from heterog.pricing.device_models.torch_kernels import (
    TF32,
    UNALIGNED,
    UNALIGNED_BYTES,
    UNALIGNED_FULLY,
)
from heterog.pricing.intervals import MEDIAN_OF_NORMAL
from heterog.pricing.roofline import Roofline, attainable_flops_per_s

_TENSOR_CORE_GAIN = 1.5
"""Least ratio of a peak to the sheet's float32 peak at which it is a peak of tensor cores."""
_LEAST_GPU_FLOPS_PER_S = 1e12
_OF_16_BITS = ("bfloat16", "float16")
_KERNELS_ALIKE = 0.5
"""Share of the error of a kernel that is common to all kernels of a step; chosen, not measured."""
_OF_CONVOLUTIONS = 0.23, 0.36
"""Median errors of convolutions on tensor cores and on vector units: nine and three models on an
H200 (``experiments/gpu_predictions.py``)."""
_OF_ATTENTION = 0.27
"""Median error of fused attention, of 15 steps there."""
_QUEUED = 16
"""Kernels before and after a kernel that are in the device's queue with it: about a layer of a
transformer. With 128 the mean error of 41 measured steps is 7.1 % instead of 8.1."""


class DeviceModels(Roofline):
    """Cost model of kernels with parameters by GPU type.

    Types that are no GPUs, and types with given efficiencies or a given launch overhead, keep the
    roofline.

    Args:
        execution: Program that runs steps; its shipped values replace arguments not given below.
        tf32: Which float32 products use TF32 if the hardware has it.
        host_s: Seconds that the host takes to issue a kernel. The host runs ahead of the device
            during long kernels; if kernels are shorter than this on average, the device waits.
        per_member: Share that a member of a team adds to ``host_s``; see ``HostSeconds``.
        in_training: Factors of types from the user's own runs, by name.
        name: Name shown with every prediction.
    """

    def __init__(
        self,
        execution: Execution = Execution.EAGER,
        *,
        tf32: Tf32 = Tf32.CONVOLUTIONS,
        host_s: float | None = None,
        per_member: float | None = None,
        in_training: Mapping[str, InTraining] = MappingProxyType({}),
        name: str = "device models",
    ) -> None:
        self.name = name
        self.execution = execution
        self.tf32 = tf32
        self.is_alone = True
        self.host = host_of(execution)
        if host_s is not None:
            self.host = replace(self.host, issue_s=host_s)
        if per_member is not None:
            self.host = replace(self.host, per_member=per_member)
        self.own_factors = dict(in_training)  # a proxy cannot be sent to workers

    @property
    def _program(self) -> "_Program":
        return _Program(self.execution, self.tf32)

    def on(self, cluster: Cluster) -> "DeviceModels":
        """These models on a cluster, which says what uses TF32 and whether a GPU is alone."""
        found = copy(self)
        found.tf32 = cluster.tf32
        found.is_alone = cluster.num_devices == 1
        return found

    def in_training(self, type_name: str) -> InTraining:
        """Factors of a type in training runs."""
        return self._own(type_name) or in_training_of(type_name, is_alone=self.is_alone)

    def _own(self, type_name: str) -> InTraining | None:
        return self.own_factors.get(type_name) or self.own_factors.get(listed_name(type_name))

    def kernel_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """Seconds of the kernel of every op that does some work.  # [num_ops]"""
        if not _is_modelled(device_type):
            return super().kernel_seconds(graph, device_type, flops, num_bytes)
        factors, program = self.in_training(device_type.name), self._program
        seconds = _kernel_seconds(graph, device_type, factors, program, flops, num_bytes)
        return np.maximum(seconds, self.issue_seconds(graph, device_type))

    def issue_seconds(self, graph: OpGraph, device_type: DeviceType) -> FloatArray:
        """Seconds that the host needs for each op, the least that the op takes.  # [num_ops]"""
        if not _is_modelled(device_type):
            return np.zeros(graph.num_ops)
        factors, host = self.in_training(device_type.name), self.host
        of_kernels, of_graphs = _shares_of_issuing(graph, device_type, factors, self._program)
        issue_s = host.issue_s * np.array([1.0, host.backward, host.update])[graph.phases]
        return issue_s * of_kernels + host.graph_s * of_graphs

    def in_teams(self, members: int) -> "DeviceModels":
        """These models with a host that takes longer to issue; see ``HostSeconds.per_member``."""
        found = copy(self)
        longer = 1.0 + self.host.per_member * members
        found.host = replace(self.host, issue_s=self.host.issue_s * longer)
        return found

    def alone(self) -> "DeviceModels":
        """These models without what exchanges between devices cost kernels beside them."""
        found = copy(self)
        found.is_alone = True
        return self if self.is_alone else found

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
        """Alpha-beta seconds; the host issues collectives, which fill more slowly than alone."""
        found = super().channel_seconds(cluster, channel)
        if channel.kind == ChannelKind.POINT_TO_POINT:
            return found
        if all(_is_modelled(cluster.devices[device].type) for device in channel.devices):
            found = _as_measured(cluster, channel, found)
            found = seconds_between_hosts(cluster, channel, found)
        per_byte = self.host.ramp_s_per_byte * channel.sent_per_byte
        return found._replace(
            latency_s=found.latency_s + self.host.collective_s,
            fill_s=max(found.fill_s, self.host.ramp_s),
            fill_s_per_byte=max(found.fill_s_per_byte, per_byte),
        )

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        """Spread of predictions, from the errors of runs, of kernels and of the host.

        A type with own runs has only the spread of these, which contains the other two errors.
        """
        if not _is_modelled(device_type):
            return super().spread(graph, device_type)
        if (own := self._own(device_type.name)) is not None:
            return own.spread
        factors = self.in_training(device_type.name)
        work = graph.flops, graph.bytes_moved
        alone = _kernel_seconds(graph, device_type, factors, self._program, *work)
        issued = self.kernel_seconds(graph, device_type, *work)
        error = _kernel_error(graph, device_type, self.tf32, alone)
        of_kernels = _KERNELS_ALIKE * error / MEDIAN_OF_NORMAL
        of_host = self.host.issue_spread * (
            1.0 - float(alone.sum()) / max(float(issued.sum()), 1e-12)
        )
        return math.hypot(factors.spread, self.host.spread, of_kernels, of_host)

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """Launch, and seconds per byte moved through device memory."""
        if not _is_modelled(device_type):
            return super().copy_seconds(device_type)
        return launch_seconds(device_type), 1.0 / _copy_rate(device_type)


class _Program(NamedTuple):
    """Settings of the program that runs steps, which decide about its kernels."""

    execution: Execution
    tf32: Tf32

    @property
    def fuses(self) -> bool:
        """Whether a compiler fuses ops."""
        return self.execution.compiles

    @property
    def runs_torch_kernels(self) -> bool:
        """Whether ops that are not fused run PyTorch's kernels; Megatron brings its own."""
        return self.execution != Execution.MEGATRON


def _as_measured(cluster: Cluster, channel: Channel, found: ChannelSeconds) -> ChannelSeconds:
    """Measured seconds of a collective on one host's switch and GPU type; else ``found``."""
    devices = [cluster.devices[device] for device in channel.devices]
    models = collectives_of(devices[0].type.name)
    model = models.get(channel.kind.name.lower())
    hosts = {device.host_index for device in devices}
    is_one_type = len({listed_name(device.type.name) for device in devices}) == 1
    link = cluster.hosts[devices[0].host_index].intra
    is_even = len(set(channel.slices)) <= 1
    if model is None or len(hosts) > 1 or not is_one_type or not is_even:
        return found
    if link.kind != "nvswitch" or found.seconds_per_byte <= 0.0:
        return found
    members = np.array(float(len(devices)))
    sent = float(model.sent_per_byte(members))
    if channel.kind == ChannelKind.ALL_TO_ALL:
        sent /= len(devices)  # the model counts bytes of a member, a channel those of all
    per_byte = sent / float(model.rate(members, link.bandwidth_bytes_per_s))
    scale = per_byte / found.seconds_per_byte
    return found._replace(
        latency_s=float(model.alone_s(members)),
        fill_s=float(model.most_fill_s(members)),
        fill_s_per_byte=sent * model.fill_s_per_byte,
        seconds_per_byte=per_byte,
        held={resource: seconds * scale for resource, seconds in found.held.items()},
    )


def provenance(device_types: Sequence[DeviceType]) -> str:
    """One sentence about where the parameters of some types come from.

    >>> from heterog.cluster.catalog import device_type
    >>> provenance([device_type("L40S"), device_type("RTX-3090"), device_type("CPU")])
    'L40S: 16 bit, 8 bit products measured, the rest inferred from other types; RTX-3090: \
float32, 16 bit products measured, the rest inferred from other types; CPU: roofline'
    """
    by_source = grouped((_source_of(each), each.name) for each in device_types)
    return "; ".join(f"{', '.join(names)}: {source}" for source, names in by_source.items())


def _source_of(device_type: DeviceType) -> str:
    if not _is_modelled(device_type):
        return "roofline"
    measured = [
        name
        for name, family in families_of(device_type.name).items()
        if family.measured_on != ANY_TYPE
    ]
    if not measured:
        return "inferred from other types"
    products = [name for name in measured if name in PRODUCTS]
    words = [*products[:-1], f"{products[-1]} products"] if products else []
    words += [name for name in measured if name in STREAMS]
    is_whole = len(measured) == len(PRODUCTS) + len(STREAMS)
    rest = "" if is_whole else ", the rest inferred from other types"
    return f"{', '.join(words)} measured{rest}"


def launch_seconds(device_type: DeviceType) -> float:
    """Seconds of a kernel that does nothing, in a queue of kernels.

    The value comes from 16-bit products, which were timed in a captured graph. Float32 kernels
    were timed otherwise: their seconds hold the timer's overhead of 15 to 60 us.
    """
    return families_of(device_type.name)["16 bit"].model.launch_s


def _copy_rate(device_type: DeviceType) -> float:
    """Bytes that large elementwise kernels move per second."""
    model = families_of(device_type.name)["elementwise"].model
    assert isinstance(model, StreamModel)
    return device_type.memory_bandwidth_bytes_per_s * model.efficiency


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


def _kernel_seconds(
    graph: OpGraph,
    device_type: DeviceType,
    factors: InTraining,
    program: _Program,
    flops: FloatArray,
    num_bytes: FloatArray,
) -> FloatArray:
    """Seconds of kernels that never wait for the host.  # [num_ops]"""
    launch, per_byte, per_flop = _stream_rates(graph, device_type, program)
    streamed = num_bytes * _share_of_bytes(graph) if program.fuses else num_bytes
    seconds: FloatArray = launch + np.maximum(per_byte * streamed, per_flop * flops)
    seconds *= np.where(_is_of_16_bits(graph), factors.streams, factors.float32)
    _add_products(seconds, graph, device_type, factors, program, flops, num_bytes)
    return seconds


def _kernel_error(
    graph: OpGraph, device_type: DeviceType, tf32: Tf32, seconds: FloatArray
) -> float:
    """Mean over kernels of the median error of their families, weighted by their seconds."""
    families = families_of(device_type.name)
    streams, products = streams_of(graph), products_of(graph)
    error = np.zeros(graph.num_ops)
    for number, name in enumerate(STREAMS):
        error[streams.op[streams.family == number]] = families[name].errors.median
    for number, kind in enumerate(products.kinds):
        unit = _product_model(device_type, kind, tf32)
        family = families["16 bit" if unit.is_tensor_core else "float32"]
        of_kind = family.errors.median
        if kind.use == Use.ATTENTION:
            of_kind = max(of_kind, _OF_ATTENTION)
        elif kind.use != Use.MATRIX:
            of_kind = max(of_kind, _OF_CONVOLUTIONS[not unit.is_tensor_core])
        error[products.op[products.factors == number]] = of_kind
    return float((error * seconds).sum()) / max(float(seconds.sum()), 1e-12)


@lru_cache(maxsize=64)
def _shares_of_issuing(
    graph: OpGraph, device_type: DeviceType, factors: InTraining, program: _Program
) -> tuple[FloatArray, FloatArray]:
    """Number of kernels whose issuing bounds the seconds of each op from below: its share.

    The kernels of a queue are issued in sum(host_s) and run in sum(seconds); they take the longer
    of both. sum(host_s) is divided among the ops in proportion to their seconds at the whole
    batch. If a part of the batch shrinks all kernels alike, the sum over the ops of
    ``max(seconds, host_s x share)`` is max(sum(seconds), sum(host_s)). A share depends only on the
    graph and the type, so that the seconds of an op never grow when its work falls.

    Returns:
        (share of each op [num_ops], share over the sum of shares of the op's pass [num_ops]).
    """
    work = graph.flops, graph.bytes_moved
    seconds = _kernel_seconds(graph, device_type, factors, program, *work)
    issued = _num_issued(graph, program)
    shares, parts = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    of_phase = graph.phases
    for phase in np.unique(of_phase):
        ops = np.flatnonzero((issued > 0.0) & (of_phase == phase))
        kernels = np.concatenate([[0.0], np.cumsum(seconds[ops])])
        number = np.concatenate([[0.0], np.cumsum(issued[ops])])
        first = np.maximum(np.arange(len(ops)) - _QUEUED, 0)
        last = np.minimum(np.arange(len(ops)) + _QUEUED + 1, len(ops))
        waits = (number[last] - number[first]) / (kernels[last] - kernels[first])
        shares[ops] = seconds[ops] * waits
        parts[ops] = shares[ops] / max(float(shares[ops].sum()), 1.0)
    return shares, parts


@lru_cache(maxsize=64)
def _is_of_16_bits(graph: OpGraph) -> NDArray[np.bool_]:
    """Whether an op is a stream that makes a 16-bit tensor; false for updates.  # [num_ops]"""
    streams = streams_of(graph)
    found = np.zeros(graph.num_ops, np.bool_)
    for index in streams.op[streams.launches > 0.0].tolist():
        made = graph.tensors[graph.output_start[index]] if graph.ops[index].num_outputs else None
        found[index] = made is not None and made.dtype in _OF_16_BITS
    return found


@lru_cache(maxsize=64)
def _num_issued(graph: OpGraph, program: _Program) -> FloatArray:
    """Number of kernels of each op; an update counts its parameters instead.  # [num_ops]"""
    found = np.zeros(graph.num_ops)
    streams = streams_of(graph)
    # Megatron's host seconds were fitted with one kernel for each op.
    found[streams.op] = streams.issued if program.runs_torch_kernels else 1.0
    if program.fuses:
        fused = fused_kernels(graph)
        found = np.where(fused.is_fused, fused.launches, found)
    found[products_of(graph).op] = 1.0
    return found


@lru_cache(maxsize=64)
def _share_of_bytes(graph: OpGraph) -> FloatArray:
    """Share of each op's bytes that pass through memory if ops are fused.  # [num_ops]

    It is more than 1 if an op reads the inputs of ops that are fused into its kernel.
    """
    fused = fused_kernels(graph)
    whole = np.maximum(graph.bytes_moved, 1.0)
    return np.asarray(np.where(fused.is_fused, fused.num_bytes / whole, 1.0))


@lru_cache(maxsize=64)
def _stream_rates(
    graph: OpGraph, device_type: DeviceType, program: _Program
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(launch, seconds per byte, per FLOP) of ops without products, 0 of others.  # [num_ops]

    FLOPs matter only to ops of imported graphs, which may have no bytes. Kernels of a compiler are
    priced as elementwise kernels. This includes norms and softmax, because a row stays in
    registers.
    """
    launch, per_byte, per_flop = (np.zeros(graph.num_ops) for _ in range(3))
    streams, families = streams_of(graph), families_of(device_type.name)
    chip = chip_of(device_type, device_type.peak_flops_per_s["float32"])
    launch[streams.op] = launch_seconds(device_type) * streams.launches
    per_flop[streams.op] = 1.0 / attainable_flops_per_s(graph, device_type)[streams.op]
    for number, name in enumerate(STREAMS):
        model, chosen = families[name].model, streams.family == number
        assert isinstance(model, StreamModel)
        per_byte[streams.op[chosen]] = model.seconds_per_byte(chip, streams.row[chosen])
    if program.runs_torch_kernels:
        filled = np.where(streams.blocks > 0.0, streams.blocks, chip.multiprocessors)
        passes = streams.passes * (streams.spared if program.fuses else 1.0)
        per_byte[streams.op] *= passes * np.maximum(1.0, chip.multiprocessors / filled)
        per_byte[streams.op] += streams.row_s_per_byte / chip.multiprocessors
    if program.fuses:
        fused = fused_kernels(graph)
        model = families["elementwise"].model
        assert isinstance(model, StreamModel)
        alone = model.seconds_per_byte(chip, np.zeros(1))
        launch[fused.is_fused] = launch_seconds(device_type) * fused.launches[fused.is_fused]
        per_byte[fused.is_fused] = alone
        per_flop[fused.is_fused] = 0.0
    return launch, per_byte, per_flop


def _add_products(
    seconds: FloatArray,
    graph: OpGraph,
    device_type: DeviceType,
    factors: InTraining,
    program: _Program,
    flops: FloatArray,
    num_bytes: FloatArray,
) -> None:
    """Add the seconds of every matrix product to its op's."""
    products = products_of(graph)
    if not len(products.op):
        return
    part = flops[products.op] / graph.flops[products.op]
    moved = num_bytes[products.op] * products.bytes_share
    # Layers repeat: products of equal kind and work are priced once.
    order = np.lexsort((moved, part, products.kind))
    keys = np.stack([products.kind[order], part[order], moved[order]])
    is_new = np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
    first = order[is_new]
    took = np.empty(len(order))
    took[order] = _product_seconds(
        products, device_type, factors, program, first, part[first], moved[first]
    )[np.cumsum(is_new) - 1]  # fmt: skip
    np.add.at(seconds, products.op, launch_seconds(device_type) + took)


def _product_seconds(
    products: Products,
    device_type: DeviceType,
    factors: InTraining,
    program: _Program,
    chosen: IntArray,
    part: FloatArray,
    moved: FloatArray,
) -> FloatArray:
    """Seconds of some products without their launch.

    Args:
        products: Products of a graph.
        device_type: Device type where they run.
        factors: Factors of products and attention on tensor cores.
        program: Program that runs steps.
        chosen: Numbers of products.  # [num_chosen]
        part: FLOPs of each over those of the whole op.  # [num_chosen]
        moved: Bytes of each.  # [num_chosen]
    """
    sizes = local_sizes(products, chosen, part, moved / products.num_bytes[chosen])
    copy_s = 1.0 / _copy_rate(device_type)
    took = copy_s * moved * products.added[chosen]
    for number, kind in enumerate(products.kinds):
        of_kind = (products.factors[chosen] == number) & (part > 0.0)
        if not of_kind.any():
            continue
        unit = _product_model(device_type, kind, program.tf32)
        here = chosen[of_kind]
        count = products.count[here]
        is_wide = unit.is_tensor_core and kind.dtype == "float32"
        chip = chip_of(device_type, unit.peak_flops_per_s, 2.0 if is_wide else 1.0)
        whole = unit.model.seconds(chip, sizes[of_kind], moved[of_kind] / count)
        seconds = count * (whole - unit.model.launch_s)
        if unit.is_slowed:
            if not program.fuses:  # a compiler pads unaligned matrices
                seconds *= _unaligned(device_type, factors, products.alignment[here])
            is_fused = kind.use == Use.ATTENTION
            seconds *= factors.fused_attention if is_fused else factors.products
        else:
            seconds *= factors.float32
        if unit.is_tensor_core:
            if not program.fuses:  # a compiler lays all images out with channels last
                seconds += copy_s * moved[of_kind] * products.copied[here]
            seconds *= products.slowdown[here]
        took[of_kind] += seconds
    return took


def _unaligned(device_type: DeviceType, factors: InTraining, alignment: IntArray) -> FloatArray:
    """Factor on the seconds of products by the alignment of their rows in bytes."""
    if multiplies_large(device_type):
        factor = np.where(alignment < UNALIGNED_BYTES, UNALIGNED_FULLY, UNALIGNED)
    else:
        factor = np.full(len(alignment), factors.unaligned)
    return np.where(alignment < ALIGNED_BYTES, factor, 1.0)


class _Unit(NamedTuple):
    """Unit that computes matrix products: parameters, peak, and whether it is a tensor core."""

    model: ProductModel
    peak_flops_per_s: float
    is_tensor_core: bool
    is_slowed: bool  # whether it is slower in runs and with unaligned rows


def product_unit(device_type: DeviceType, dtype: str) -> _Unit:
    """Unit that computes plain products of a dtype without TF32."""
    return _product_model(device_type, Factors(dtype, Use.MATRIX), Tf32.NONE)


@lru_cache(maxsize=256)
def _product_model(device_type: DeviceType, kind: Factors, tf32: Tf32) -> _Unit:
    """Unit that computes products of a kind of factors."""
    listed = listed_type(device_type.name)
    sheet = device_type if listed is None else listed.type
    on_vector_units = sheet.peak_flops_per_s["float32"]
    peak = _peak_flops_per_s(device_type, kind, tf32)
    # AMD's matrix units multiply float32 without TF32, at a fourth of the rate of 16 bits: power
    # does not slow them.
    matrix_peak = None if listed is None else listed.matrix_flops_per_s
    is_matrix_unit = False
    if matrix_peak and peak == on_vector_units:
        peak, is_matrix_unit = matrix_peak, True
    is_tensor_core = peak > _TENSOR_CORE_GAIN * on_vector_units and kind.dtype != "float64"
    model = families_of(device_type.name)["16 bit" if is_tensor_core else "float32"].model
    assert isinstance(model, ProductModel)
    return _Unit(model, peak, is_tensor_core, is_tensor_core and not is_matrix_unit)


def _peak_flops_per_s(device_type: DeviceType, kind: Factors, tf32: Tf32) -> float:
    """Peak of the unit that PyTorch chooses for products of a kind.

    Fused attention in float32 never uses TF32. Convolutions of too few channels use no tensor
    core. A float32 peak in a cluster file that differs from the sheet's is used as it is.
    """
    peaks, listed = device_type.peak_flops_per_s, listed_type(device_type.name)
    peak, on_sheet, of_tf32 = product_peak(device_type, kind.dtype), peaks["float32"], None
    if listed is not None:
        on_sheet, of_tf32 = listed.type.peak_flops_per_s["float32"], listed.tf32_flops_per_s
    if kind.use == Use.FEW_CHANNELS or (kind.use == Use.ATTENTION and kind.dtype == "float32"):
        return min(peak, on_sheet)
    is_meant = tf32 == Tf32.EVERYTHING or (tf32 == Tf32.CONVOLUTIONS and kind.use != Use.MATRIX)
    if kind.dtype == "float32" and is_meant and of_tf32 is not None and peak == on_sheet:
        return max(peak, of_tf32 / TF32)
    return peak
