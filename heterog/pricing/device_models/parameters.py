"""The fitted parameters of GPU types, measured or not.

``fitted.yaml`` holds, for each family of kernels, parameters by GPU type and a set ``any`` that
was fitted to all measured types together. Parameters are shares of data-sheet numbers. So ``any``
carries over to a type that was not measured, whose peak, bandwidth, multiprocessors and cache are
read off its sheet. The errors of ``any`` come from leaving out each measured type in turn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple, TypeVar

from heterog.cluster.catalog import ListedType, listed_name, listed_type
from heterog.cluster.hardware import DeviceType
from heterog.pricing.device_models.laws import Chip, CollectiveModel, ProductModel, StreamModel
from heterog.pricing.intervals import PeakErrors
from heterog.yaml_files import load_shipped

_T = TypeVar("_T")

ANY_TYPE = "any"
PRODUCTS = ("float32", "16 bit", "8 bit")
"""Families of matrix products: on vector units, and on tensor cores by bits of the factors."""
STREAMS = ("elementwise", "layer norm", "softmax")

# An Ampere multiprocessor at boost clock, for types that are not in the catalogue.
_FLOPS_OF_A_MULTIPROCESSOR = 0.18e12
_CACHE_MIB = 4.0
_MIB = 2.0**20
_PROCESS_NM, _SHRINKING = 16.0, 0.8
_LARGE_FLOPS_PER_S = 5e12
"""Peak of a multiprocessor above which its tensor cores multiply large matrices."""
_AMPERE_NM, _ALL_SLOTS_FLOPS = 8.0, 0.3e12
"""Largest process in nm of Ampere and later, and least float32 peak of a multiprocessor of these
generations that has two float32 units for each scheduler."""
_AT_HALF_RATE, _ALL_SLOTS, _HALF_SLOTS = 1.095, 0.835, 1.055
"""Efficiency of products over that of any type: in 16 bits at half rate; in float32 with two units
for each scheduler; in float32 with one unit, as in Volta, Turing and the A100. They are square
roots of the ratios of an A10G (1.199 and 0.698 in ``fitted.yaml``) and of V100 and A100 (1.13 and
1.09): few cards of these kinds were measured, so half of the logarithm is taken as the kind's."""
_SAME_CHIP, _SAME_UNITS = 0.85, 0.7
"""Types count as one chip if the ratios of their multiprocessors and of the peaks of these in
float32 reach the first, and the ratio of the peaks in 16 bits reaches the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of predictions for rows that were not fitted, as shares of the measured seconds.

    Attributes:
        rows: Number of rows.
        median: Median of the absolute errors.
        p90: 90th percentile of the absolute errors.
    """

    rows: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Parameters of one family of kernels on a type, and their errors.

    Attributes:
        model: Parameters of the family.
        measured_on: Type to whose measurements they were fitted, or ``ANY_TYPE``.
        errors: Errors on test rows of that type; for ``ANY_TYPE``, on types left out of the fit.
    """

    model: ProductModel | StreamModel
    measured_on: str
    errors: Errors


@dataclass(frozen=True, slots=True, kw_only=True)
class InTraining:
    """Factors by which kernels take longer in a training run than alone.

    Kernels are measured alone, for a moment, and with the newest library. In a run, power holds
    the clock down, other kernels have filled the cache, and libraries are a year or two older.
    Fused attention was not measured alone: its factor is over the products inside it, each priced
    as fast as a large product.

    Attributes:
        products: Factor on the seconds of products on tensor cores.
        fused_attention: Factor on the seconds of fused attention.
        streams: Factor on the seconds of other kernels that make 16-bit tensors, except those of
            the optimizer.
        float32: Factor on the seconds of kernels that make wider tensors without tensor cores.
        unaligned: Further factor on products on tensor cores whose rows do not begin at multiples
            of 16 bytes. From Megatron's last layer with 50,257 words on an A100 (vTrain's rows of
            ``fit``). Types that multiply large matrices at once have measured factors instead.
        spread: Spread of log(measured / predicted) of steps on the type, beside kernels' errors.
        measured_on: Type to whose runs they were fitted, or ``ANY_TYPE``.
    """

    products: float = 1.0
    fused_attention: float = 1.0
    streams: float = 1.0
    float32: float = 1.0
    unaligned: float = 1.73
    spread: float = 0.15
    measured_on: str = ANY_TYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSeconds:
    """Seconds that the host of a device takes.

    Attributes:
        issue_s: Seconds to issue a kernel of the forward pass, from Python.
        issue_spread: Spread of log(issue_s) from one host to another.
        backward: Seconds to issue a kernel of the backward pass, from autograd's thread, over
            ``issue_s``.
        update: Seconds of the optimizer for each parameter, which it sorts into groups, over
            ``issue_s``.
        per_member: Share by which each member of a team makes issuing take longer in a pipeline
            whose stages lie on several hosts.
        graph_s: Seconds to enter a compiled graph, once in each pass.
        collective_s: Seconds to issue a collective, beyond the latency of its links.
        ramp_s: Most seconds that a collective takes longer in a step than alone.
        ramp_s_per_byte: Such seconds per byte that a member sends; the lesser of both counts.
        spread: Spread of log(measured / predicted) of steps, from other work of the program.
    """

    issue_s: float
    backward: float = 1.0
    update: float = 0.0
    issue_spread: float = 0.3
    collective_s: float = 0.0
    ramp_s: float = 0.0
    ramp_s_per_byte: float = 0.0
    spread: float = 0.0
    graph_s: float = 0.0
    per_member: float = 0.0


class _Tables(NamedTuple):
    """Contents of ``fitted.yaml``: families by name and type, factors by type, hosts by program.

    ``alone`` has the factors of types whose runs on one GPU were also measured. Collectives are by
    type, then by name. Errors of memory peaks are common to all types.
    """

    families: Mapping[str, Mapping[str, Family]]
    in_training: Mapping[str, InTraining]
    alone: Mapping[str, InTraining]
    hosts: Mapping[str, HostSeconds]
    collectives: Mapping[str, Mapping[str, CollectiveModel]]
    peaks: PeakErrors


def chip_of(device_type: DeviceType, peak_flops_per_s: float, width: float = 1.0) -> Chip:
    """Data sheet of a type, with the peak of a dtype.

    Args:
        device_type: Device type.
        peak_flops_per_s: Peak of the dtype.
        width: Bits of a factor of the product over the bits of factors of its family.
    """
    listed = listed_type(device_type.name)
    multiprocessors = 0 if listed is None else listed.chip.multiprocessors
    guess = device_type.peak_flops_per_s["float32"] / _FLOPS_OF_A_MULTIPROCESSOR
    return Chip(
        peak_flops_per_s=peak_flops_per_s,
        bandwidth_bytes_per_s=device_type.memory_bandwidth_bytes_per_s,
        multiprocessors=multiprocessors or max(round(guess), 1),
        cache_bytes=_MIB * (_CACHE_MIB if listed is None else listed.chip.cache_mib),
        board_w=math.inf if listed is None else listed.chip.board_w,
        energy=1.0 if listed is None else width * energy_of(listed, peak_flops_per_s),
    )


def energy_of(listed: ListedType, peak_flops_per_s: float) -> float:
    """Energy of a FLOP on a type over that of a FLOP at 16 nm.

    It shrinks with the process. It halves if a multiprocessor multiplies matrices so large that
    its tensor cores read them from shared memory (Hopper and Blackwell for data centres). Both
    laws were chosen by published products on boards that were short of power: 158 TFLOP/s of an
    A100 on 250 W (NVIDIA/cutlass, issue 956), 617 and 2,174 of a GB300 on 500 and 1,400 W
    (facebookexperimental/triton, pull request 2023); and a T4 and a P4 in float32.
    """
    shrunk = (listed.chip.process_nm / _PROCESS_NM) ** _SHRINKING
    return float(shrunk * (0.5 if _is_large(listed, peak_flops_per_s) else 1.0))


def multiplies_large(device_type: DeviceType) -> bool:
    """Whether tensor cores read matrices from shared memory: Hopper, Blackwell of data centres.

    >>> from heterog.cluster.catalog import device_type
    >>> [multiplies_large(device_type(name)) for name in ("H200", "A100-80GB", "RTX-5090")]
    [True, False, False]
    """
    listed = listed_type(device_type.name)
    if listed is None:
        return False
    return _is_large(listed, listed.type.peak_flops_per_s.get("bfloat16", 0.0))


def _is_large(listed: ListedType, peak_flops_per_s: float) -> bool:
    return peak_flops_per_s > _LARGE_FLOPS_PER_S * max(listed.chip.multiprocessors, 1)


@lru_cache(maxsize=256)
def families_of(type_name: str) -> Mapping[str, Family]:
    """Each family of kernels on a type, with parameters of the type, a sibling, or any type.

    Siblings have the same chip: an A100 of 40 GB is predicted from an A100 of 80 GB, a GH200 from
    an H100, but with the type's bandwidth and peaks.
    """
    found = {name: _of_type(by_type, type_name) for name, by_type in _tables().families.items()}
    listed = listed_type(type_name)
    return (
        found if listed is None else {name: _of_kin(found[name], name, listed) for name in found}
    )


def _of_kin(family: Family, name: str, listed: ListedType) -> Family:
    """A family on a type; if not measured there, its efficiency is corrected by similar cards."""
    model = family.model
    if family.measured_on != ANY_TYPE or not isinstance(model, ProductModel):
        return family
    gain = 1.0
    if name == "16 bit" and _sums_at_half_rate(listed):
        gain = _AT_HALF_RATE
    if name == "float32" and listed.vendor == "NVIDIA" and listed.has_matrix_units:
        gain = _ALL_SLOTS if _issues_all_slots(listed) else _HALF_SLOTS
    return replace(family, model=replace(model, efficiency=gain * model.efficiency))


def _sums_at_half_rate(listed: ListedType) -> bool:
    """Whether tensor cores sum in float32 at half of what they could: GeForce, A10G, L40."""
    peaks = listed.type.peak_flops_per_s
    gain = peaks.get("float16", 0.0) / peaks["float32"]
    return listed.has_matrix_units and gain < (3.0 if listed.tf32_flops_per_s else 6.0)


def _issues_all_slots(listed: ListedType) -> bool:
    """Whether each scheduler has two float32 units: Ampere and Ada, except the A100.

    At their peak, products then use every issue slot, which leaves none for loads.
    """
    of_each = listed.type.peak_flops_per_s["float32"] / max(listed.chip.multiprocessors, 1)
    return listed.chip.process_nm <= _AMPERE_NM and of_each > _ALL_SLOTS_FLOPS


def host_of(execution: str) -> HostSeconds:
    """Host's seconds in a program that executes steps; see ``cluster.topology.Execution``."""
    return _tables().hosts[execution]


@lru_cache(maxsize=256)
def in_training_of(type_name: str, *, is_alone: bool = False) -> InTraining:
    """Factors from runs on a type or a sibling, else from runs on all types together.

    Args:
        type_name: Name of the device type.
        is_alone: Whether the run uses one GPU, which then takes no longer than beside exchanges.
    """
    found = _of_type(_tables().in_training, type_name)
    if not is_alone:
        return found
    alone = _of_type(_tables().alone, type_name)
    return replace(
        alone,
        products=min(found.products, alone.products),
        fused_attention=min(found.fused_attention, alone.fused_attention),
        streams=min(found.streams, alone.streams),
    )


@lru_cache(maxsize=256)
def collectives_of(type_name: str) -> Mapping[str, CollectiveModel]:
    """Models of collectives among GPUs of a type or a sibling; empty if none were measured."""
    return _of_type({ANY_TYPE: {}, **_tables().collectives}, type_name)


def shipped_peak_errors() -> PeakErrors:
    """Errors of predicted peaks of memory, from the only type with measured peaks."""
    return _tables().peaks


def _of_type(by_type: Mapping[str, _T], type_name: str) -> _T:
    """Entry of a type, else of a type with the same chip, else of ``ANY_TYPE``."""
    type_name = listed_name(type_name)
    if type_name in by_type:
        return by_type[type_name]
    listed = listed_type(type_name)
    for other, found in by_type.items():
        sibling = listed_type(other)
        if listed is not None and sibling is not None and is_same_chip(listed, sibling):
            return found
    return by_type[ANY_TYPE]


def is_same_chip(one: ListedType, other: ListedType) -> bool:
    """Whether caches are equal, and the number and speed of multiprocessors are similar.

    Cards have a few multiprocessors less than modules, at a lower clock. An A6000 is not the chip
    of an A10G, whose tensor cores run at half the rate.
    """
    if not one.chip.multiprocessors or one.chip.cache_mib != other.chip.cache_mib:
        return False
    few, many = sorted((one.chip.multiprocessors, other.chip.multiprocessors))
    slow, fast = sorted((_of_each(one, "float32"), _of_each(other, "float32")))
    low, high = sorted((_of_each(one, "float16"), _of_each(other, "float16")))
    is_alike = few >= _SAME_CHIP * many and slow >= _SAME_CHIP * fast
    return is_alike and low >= _SAME_UNITS * high


def _of_each(listed: ListedType, dtype: str) -> float:
    """Peak of one multiprocessor."""
    peaks = listed.type.peak_flops_per_s
    return peaks.get(dtype, peaks["float32"]) / listed.chip.multiprocessors


@lru_cache(maxsize=1)
def _tables() -> _Tables:
    document = load_shipped(resources.files("heterog.pricing.device_models") / "fitted.yaml")
    families = {
        name: {type_name: _family(name, type_name, row) for type_name, row in by_type.items()}
        for name, by_type in document["families"].items()
    }
    in_training, alone = (
        {name: InTraining(**row, measured_on=name) for name, row in document[which].items()}
        for which in ("in_training", "alone")
    )
    hosts = {name: HostSeconds(**row) for name, row in document["hosts"].items()}
    collectives = {
        type_name: {name: CollectiveModel(**row) for name, row in by_name.items()}
        for type_name, by_name in document["collectives"].items()
    }
    peaks = PeakErrors(**document["peaks"])
    return _Tables(families, in_training, alone, hosts, collectives, peaks)


def _family(name: str, type_name: str, row: Mapping[str, Any]) -> Family:
    kind = ProductModel if name in PRODUCTS else StreamModel
    return Family(
        model=kind(**{field.name: float(row[field.name]) for field in fields(kind)}),
        measured_on=type_name,
        errors=Errors(**row["errors"]),
    )
