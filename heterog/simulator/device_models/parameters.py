"""The fitted parameters: of types that were measured, and of all others.

``fitted.yaml`` holds, for each family of kernels, parameters by GPU type and a set ``any`` that
was fitted to all measured types together. They are shares of what the data sheet promises, so
``any`` carries over to a type that nobody measured: its peak, bandwidth, multiprocessors and cache
are read off its sheet. How far that is off was found by leaving out each measured type in turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from heterog.cluster.catalog import ListedType, listed_type
from heterog.cluster.topology import DeviceType
from heterog.simulator.device_models.products import Chip, ProductModel
from heterog.simulator.device_models.streams import StreamModel

ANY_TYPE = "any"
PRODUCTS = ("float32", "16 bit", "8 bit")
"""Kinds of matrix products: on vector units, and on tensor cores by the bits of the factors."""
STREAMS = ("elementwise", "layer norm", "softmax")

# An Ampere multiprocessor at boost clock; for types that the catalogue does not know.
_FLOPS_OF_A_MULTIPROCESSOR = 0.18e12
_CACHE_MIB = 4.0
_MIB = 2.0**20
_SAME_CHIP = 0.85
"""Least ratio of multiprocessors, and of their peaks, of types with one chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of predictions for rows that were not fitted, as shares of the measured seconds.

    Attributes:
        rows: how many there were.
        median: of the absolute errors.
        p90: their 90th percentile.
    """

    rows: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family of kernels behaves on a type.

    Attributes:
        model: its parameters.
        measured_on: the type that they were fitted to, or ``ANY_TYPE``.
        errors: of that type's test rows; of ``ANY_TYPE`` those of types left out.
    """

    model: ProductModel | StreamModel
    measured_on: str
    errors: Errors


def chip_of(device_type: DeviceType, peak_flops_per_s: float) -> Chip:
    """What the data sheet of a type says, with the peak of the dtype at hand."""
    listed = listed_type(device_type.name)
    multiprocessors = 0 if listed is None else listed.multiprocessors
    guess = device_type.peak_flops_per_s["float32"] / _FLOPS_OF_A_MULTIPROCESSOR
    return Chip(
        peak_flops_per_s=peak_flops_per_s,
        bandwidth_bytes_per_s=device_type.memory_bandwidth_bytes_per_s,
        multiprocessors=multiprocessors or max(round(guess), 1),
        cache_bytes=_MIB * (_CACHE_MIB if listed is None else listed.cache_mib),
    )


@lru_cache(maxsize=256)
def families_of(type_name: str) -> Mapping[str, Family]:
    """Each family of kernels on a type: its own parameters, its siblings', or those of any type.

    Siblings have the same chip: an A100 of 40 GB is predicted from one of 80 GB, a GH200 from an
    H100, on its own bandwidth and peaks.
    """
    return {
        name: by_type.get(type_name) or _of_sibling(by_type, type_name) or by_type[ANY_TYPE]
        for name, by_type in _tables().items()
    }


def _of_sibling(by_type: Mapping[str, Family], type_name: str) -> Family | None:
    listed = listed_type(type_name)
    if listed is None:
        return None
    for other, family in by_type.items():
        sibling = listed_type(other)
        if sibling is not None and _is_same_chip(listed, sibling):
            return family
    return None


def _is_same_chip(one: ListedType, other: ListedType) -> bool:
    """Whether caches are equal, and multiprocessors as fast and about as many.

    Cards have a few multiprocessors less than modules, at a lower clock.
    """
    if not one.multiprocessors or one.cache_mib != other.cache_mib:
        return False
    few, many = sorted((one.multiprocessors, other.multiprocessors))
    slow, fast = sorted(
        each.type.peak_flops_per_s["float32"] / each.multiprocessors for each in (one, other)
    )
    return few >= _SAME_CHIP * many and slow >= _SAME_CHIP * fast


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, Mapping[str, Family]]:
    text = (resources.files("heterog.simulator.device_models") / "fitted.yaml").read_text("utf-8")
    return {
        name: {type_name: _family(name, type_name, row) for type_name, row in by_type.items()}
        for name, by_type in yaml.safe_load(text)["families"].items()
    }


def _family(name: str, type_name: str, row: Mapping[str, Any]) -> Family:
    kind = ProductModel if name in PRODUCTS else StreamModel
    return Family(
        model=kind(**{field.name: float(row[field.name]) for field in fields(kind)}),
        measured_on=type_name,
        errors=Errors(**row["errors"]),
    )
