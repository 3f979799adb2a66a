"""What Sailor measured: seconds of layers, sizes of layers, rates of links.

The files are those of its repository, gzipped: ``profiles_tmp.json.gz`` (seconds of forward,
backward and update by card, micro-batch and tensor parallelism), ``llm_info.json.gz`` (parameters,
outputs and activations by tensor parallelism) and ``multizone_bandwidths_het.json.gz``
(polynomials of point-to-point rates by zones, cards and GPUs taking part).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import log2
from pathlib import Path
from typing import Any

from heterog.errors import InputFileError, StrategyError
from heterog.files import read_json
from heterog.units import GIB

MODEL = "OPT-350"
ZONE = "us-central1-a"
FLOAT_BYTES = 4

CAPACITY_BYTES = {
    name: size * GIB
    for name, size in {
        "V100-16": 16,
        "A100-40": 40,
        "A100-80": 80,
        "GH-96": 96,
        "Titan-RTX": 24,
        "RTX-3090": 24,
        "RTX-2080": 11,
    }.items()
}
"""Memory of a GPU as the validity check of Sailor's simulator counts it."""

Polynomial = tuple[float, float, float]
"""Factors of the square, of the first power, and the constant."""
End = tuple[str, int]
"""A card and how many of its GPUs send or receive together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one card at one micro-batch and tensor parallelism.

    Attributes:
        compute_s: forward and backward of all layers before each one.  # [num_layers + 1]
        update_s: of one optimizer step; the files have one number for all layers.
    """

    compute_s: tuple[float, ...]
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of floats of the layers on one GPU of a team.

    Attributes:
        params: of all layers before each one.  # [num_layers + 1]
        activations: kept for one sample, of all layers before each one.  # [num_layers + 1]
        outputs: that each layer hands on for one sample.  # [num_layers]
    """

    params: tuple[int, ...]
    activations: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that the rules look up, of one model in one zone.

    Attributes:
        times: by card, micro-batch and tensor parallelism.
        sizes: by tensor parallelism.
        links: polynomials of the rate, by sender and receiver.
    """

    times: Mapping[str, Mapping[int, Mapping[int, Times]]]
    sizes: Mapping[int, Sizes]
    links: Mapping[tuple[End, End], Polynomial]

    @property
    def num_layers(self) -> int:
        """Layers of the model, embedding and head included."""
        return len(self.sizes[1].outputs)

    def profiled(self, card: str, tensor: int) -> list[int]:
        """Micro-batches that were measured on a card at a tensor parallelism, ascending."""
        return sorted(size for size, found in self.times.get(card, {}).items() if tensor in found)

    def link(self, sender: End, receiver: End) -> Polynomial:
        """The polynomial between two ends.

        Raises:
            StrategyError: this link was not measured.
        """
        found = self.links.get((sender, receiver))
        if found is None:
            raise StrategyError(
                f"there is no rate from {sender[0]} x {sender[1]} to {receiver[0]} x "
                f"{receiver[1]}; use cards and numbers of GPUs whose links were measured."
            )
        return found


def seconds_of(polynomial: Polynomial, num_bytes: float) -> float:
    """Time of a message: ``x / 1e9 / (p2 l^2 + p1 l + p0)`` with ``l = log2(x / 1e6)``.

    The polynomials were fitted to large messages and become negative below some size; Sailor's
    simulator then counts negative seconds.

    Raises:
        StrategyError: the rate at this size is not positive.
    """
    if num_bytes == 0:
        return 0.0
    size = log2(num_bytes / 1e6)
    gigabytes_per_s = polynomial[0] * size**2 + polynomial[1] * size + polynomial[2]
    if gigabytes_per_s <= 0:
        raise StrategyError(
            f"the fitted rate of a message of {num_bytes:.0f} B is {gigabytes_per_s:.3g} GB/s; "
            "send larger messages: the fit does not hold there."
        )
    return num_bytes / 1e9 / gigabytes_per_s


def read_inputs(folder: Path, model: str = MODEL, zone: str = ZONE) -> Inputs:
    """The three files of a folder.

    Layers are ordered by their number. Sailor's simulator takes them as they stand in the file,
    which is the same for OPT-350.

    Raises:
        InputFileError: a file is missing, or holds neither model nor zone.
    """
    times = _section(folder, "profiles_tmp", model)
    sizes = _section(folder, "llm_info", model)
    links = _section(folder, "multizone_bandwidths_het", zone)
    return Inputs(
        times={
            card: {
                int(micro): {int(tensor): _times(layers) for tensor, layers in found.items()}
                for micro, found in of_card.items()
            }
            for card, of_card in times.items()
        },
        sizes={int(tensor): _sizes(layers) for tensor, layers in sizes.items()},
        links={
            ((card, int(count)), (other, int(others))): _polynomial(entry)
            for card, counts in links.items()
            for count, zones in counts.items()
            for other, found in zones.get(zone, {}).items()
            for others, entry in found.items()
        },
    )


def _section(folder: Path, name: str, key: str) -> dict[str, Any]:
    path = folder / f"{name}.json.gz"
    content = read_json(path, "Sailor's file")
    if not isinstance(content, dict) or key not in content:
        raise InputFileError(f"{path} has nothing about {key}; is it Sailor's file of that name?")
    section: dict[str, Any] = content[key]
    return section


def _in_order(layers: Mapping[str, Any]) -> list[Any]:
    return [layers[key] for key in sorted(layers, key=int)]


def _times(layers: Mapping[str, Any]) -> Times:
    rows = _in_order(layers)
    return Times(
        compute_s=tuple(accumulate((row[0] + row[1] for row in rows), initial=0.0)),
        update_s=rows[0][2],
    )


def _sizes(layers: Mapping[str, Any]) -> Sizes:
    rows = _in_order(layers)
    return Sizes(
        params=tuple(accumulate((row["params_floats"] for row in rows), initial=0)),
        activations=tuple(accumulate((row["act_mem_floats"] for row in rows), initial=0)),
        outputs=tuple(row["act_output_floats"] for row in rows),
    )


def _polynomial(entry: Any) -> Polynomial:
    square, first, constant = entry[0]
    return square, first, constant
