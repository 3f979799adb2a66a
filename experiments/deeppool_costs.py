"""Costs of DeepPool's layers from its profiles, for the burst-parallel program.

The profiles (``A100_vgg.prof`` and so on) hold the time of each layer at many batch sizes, under a
key of the layer's name, parameters and input shape. The cost formulas are those of
``parallelizationPlanner.py`` (seojinpark/DeepPool, MIT), in microseconds and bytes per
microsecond; ``faithful=False`` mends their defects:

- gradients of a convolution count every weight (published: kernel width times output *height*),
  those of a residual block count too (published: none), and an all-reduce over g devices moves
  2 (g - 1) / g of them (published: once, and also with one device);
- a layer that occurs twice keeps both its times (published: the last one for both);
- a channel count is a channel count (published: the output height of a convolution).
"""

import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deeppool_models import MODELS, Layer, chain_of_keys

from heterog.errors import InputFileError
from heterog.methods.deeppool import Place

BYTES_PER_NUMBER = 4
NO_CHANGE = 1000.0
"""Factor on transfers to a layer that must have the width of the one before it."""

_SPATIAL = ("conv2d", "maxPool2d", "avgPool2d", "adAvgPool2d", "ReLU2d", "concat")
_KEEPS_WIDTH = ("ReLU2d", "ReLU1d", "flatten")


def load_model(folder: Path, name: str) -> "tuple[list[Layer], Profile]":
    """Layers and profile of a model.

    A model that is not one of DeepPool's examples is read from its profile, as a chain.

    Raises:
        InputFileError: there is no profile of the model, or none that can be read.
    """
    stem, make = MODELS.get(name, (name, None))
    paths = sorted(folder.glob(f"*{name}.prof*")) or sorted(folder.glob(f"*{stem}.prof*"))
    if not paths:
        raise InputFileError(f"{folder} has no profile of '{name}' (A100_{stem}.prof, say).")
    profile = Profile.read(paths[0])
    return (make().layers if make else chain_of_keys(profile.keys)), profile


@dataclass(frozen=True, slots=True)
class Profile:
    """Microseconds of layers.

    Attributes:
        keys: of all lines, in the order of the file.
        microseconds: of each key, all its lines.
        forward_share: part of a key's time that the forward pass takes, all its lines.
    """

    keys: tuple[str, ...]
    microseconds: dict[str, list[float]]
    forward_share: dict[str, list[float]]

    @staticmethod
    def read(path: Path) -> "Profile":
        """Read lines of ``key  average ms  forward us  backward us``, gzipped or not.

        Raises:
            InputFileError: there is no such line.
        """
        opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
        keys: list[str] = []
        times: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        with opened as lines:
            for line in lines:
                words = line.split()
                if len(words) not in (4, 5) or words[0] == "#config":
                    continue
                keys.append(words[0])
                times.setdefault(words[0], []).append(float(words[1]) * 1000.0)
                forward, backward = float(words[2]), float(words[3])
                share = forward / max(forward + backward, 1e-9)
                shares.setdefault(words[0], []).append(share)
        if not times:
            raise InputFileError(f"{path} holds no layer times.")
        return Profile(tuple(keys), times, shares)


class ProfiledCosts:
    """Costs of a model's layers for the burst-parallel program, in microseconds.

    Args:
        layers: the model.
        profile: its measured times.
        batch: samples of the global batch.
        num_devices: most devices.
        bytes_per_us: network bandwidth.
        latency_us: of one transfer.
        is_baseline: only the largest number of devices may be chosen.
        faithful: with the published defects; see the module docstring.
    """

    negligible = 300.0

    def __init__(
        self,
        layers: Sequence[Layer],
        profile: Profile,
        *,
        batch: int,
        num_devices: int,
        bytes_per_us: float,
        latency_us: float,
        is_baseline: bool = False,
        faithful: bool = True,
    ) -> None:
        self.layers = layers
        self.faithful = faithful
        self._profile = profile
        self._bytes_per_us = bytes_per_us
        self._latency_us = latency_us
        self._batch = batch
        splits = range(int(math.log2(num_devices)) + 1)
        halvings = [splits[-1]] if is_baseline else list(splits)
        local = [batch >> halving for halving in halvings if batch >> halving]
        self._local = {batch // samples: samples for samples in local} | {1: batch}
        self.widths = tuple(batch // samples for samples in local)
        self._occurrence = _occurrences(layers)
        self.missing: set[str] = set()

    def compute(self, layer: int, width: int) -> float:
        """Measured forward and backward time of a layer on one of ``width`` devices."""
        key = self.layers[layer].key(self._local[width])
        if key not in self._profile.microseconds:
            self.missing.add(key)
            return 1.0
        time = self._line(layer, self._profile.microseconds[key])
        return time if time > 0 else 1.0

    def forward_share(self, layer: int, width: int) -> float:
        """Part of ``compute`` that belongs to the forward pass."""
        shares = self._profile.forward_share.get(self.layers[layer].key(self._local[width]))
        return self._line(layer, shares) if shares else 0.5

    def _line(self, layer: int, lines: Sequence[float]) -> float:
        """The line of a layer among those with its key."""
        # The file repeats a model's layers in order, once per batch size.
        number, count = self._occurrence[layer]
        return lines[-1] if self.faithful or len(lines) != count else lines[number]

    def synchronise(self, layer: int, width: int) -> float:
        """Time of the gradients' all-reduce, not overlapped with anything."""
        its = self.layers[layer]
        if not self.faithful:
            moved = 2.0 * (width - 1) / width * its.num_parameters
            return moved * BYTES_PER_NUMBER / self._bytes_per_us
        if its.name == "linear" and width > 1:
            return its.num_parameters * BYTES_PER_NUMBER / self._bytes_per_us
        if its.name == "conv2d":
            kernel = its.params["kernel_size"]
            wide, high = its.pair("kernel_size") if isinstance(kernel, tuple) else (kernel, 1)
            assert isinstance(wide, int)
            size = wide * high * (its.output[2] + 1)
            return size * BYTES_PER_NUMBER / self._bytes_per_us
        return 0.0

    def own(self, layer: int, place: Place) -> float:
        """Compute and synchronisation of a layer."""
        return self.compute(layer, place[1]) + self.synchronise(layer, place[1])

    def alone(self, layer: int) -> float:
        """Time with the whole batch on one device."""
        return self.own(layer, (0, 1))

    def weight(self, place: Place) -> float:
        """Number of devices."""
        return float(place[1])

    def transfer(self, source: int, at: Place, target: int, to: Place) -> float:
        """Activations there and their gradients back.

        ``2 (max(E, I) / BW + latency)`` with E the bytes that a sender gives and I those that a
        receiver gets, less what both sides hold on the same device.
        """
        before, after = self.layers[source], self.layers[target]
        sent, got = self._local[at[1]], self._local[to[1]]
        overlaps = at[0] < to[0] + to[1] and to[0] < at[0] + at[1]
        size_out, size_in = self._sizes(before, after)
        common = BYTES_PER_NUMBER * min(sent, got) * min(size_out, size_in) if overlaps else 0.0
        egress = BYTES_PER_NUMBER * sent * size_out
        ingress = BYTES_PER_NUMBER * got * size_in
        spatial = before.name in _SPATIAL and after.name in (*_SPATIAL, "flatten")
        # Between spatial layers a device that only one of them uses shares nothing.
        egress -= common if not spatial or sent >= got or not self.faithful else 0.0
        ingress -= common if not spatial or sent <= got or not self.faithful else 0.0
        moved = max(egress, ingress)
        time = 2.0 * (moved / self._bytes_per_us + self._latency_us) if moved > 0 else 0.0
        return time * (NO_CHANGE if after.name in _KEEPS_WIDTH else 1.0)

    def _sizes(self, before: Layer, after: Layer) -> tuple[float, float]:
        """Numbers per sample that leave one layer and enter the next."""
        if not self.faithful:
            size = float(math.prod(before.output))
            return size, size
        if before.name in _SPATIAL and after.name in (*_SPATIAL, "flatten"):
            channels = before.output[2] if before.name == "conv2d" else before.input[0]
            sides = before.input[1] * before.output[1] // before.input[1]
            sides *= before.input[1] * before.output[2] // before.input[2]
            return float(sides * channels), float(after.input[1] ** 2 * channels)
        return float(math.prod(before.output)), float(math.prod(after.input))


def _occurrences(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """For each layer, which of the layers with its key it is, and how many there are."""
    keys = [layer.key(0) for layer in layers]
    return [(keys[:index].count(key), keys.count(key)) for index, key in enumerate(keys)]
