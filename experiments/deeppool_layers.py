"""The models of the DeepPool repository as layers, and their costs from its profiles.

The profiles (``A100_vgg.prof`` and so on) hold the time of each layer at many batch sizes. Layer
names, parameters and shapes make the key that a time is found under. The cost formulas are those
of ``parallelizationPlanner.py`` (seojinpark/DeepPool, MIT), in microseconds and bytes per
microsecond; ``faithful=False`` mends their defects:

- gradients of a convolution count every weight (published: kernel width times output *height*),
  those of a residual block count too (published: none), and an all-reduce over g devices moves
  2 (g - 1) / g of them (published: once, and also with one device);
- a layer that occurs twice keeps both its times (published: the last one for both);
- a channel count is a channel count (published: the output height of a convolution).
"""

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heterog.errors import InputFileError, UnknownNameError
from heterog.planners.burst import Place

BYTES_PER_NUMBER = 4
NO_CHANGE = 1000.0
"""Factor on transfers to a layer that must have the width of the one before it."""

Shape = tuple[int, ...]
_SPATIAL = ("conv2d", "maxPool2d", "avgPool2d", "adAvgPool2d", "ReLU2d", "concat")
_FLAT = ("linear", "ReLU1d")
_KEEPS_WIDTH = ("ReLU2d", "ReLU1d", "flatten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer as DeepPool names it.

    Attributes:
        name: ``conv2d``, ``ReLU2d``, ...
        params: the parameters in its key.
        previous: layers that it reads from.
        input: shape without the batch; (features,) for flat ones.
        output: likewise.
    """

    name: str
    params: dict[str, object]
    previous: tuple[int, ...]
    input: Shape
    output: Shape

    def key(self, batch: int) -> str:
        """The profile's key of the layer at a batch size."""
        params = json.dumps(self.params, sort_keys=True, separators=(",", ":"))
        shape = self.input[0] if len(self.input) == 1 else list(self.input)
        return f"{self.name}{params}[{batch}]{json.dumps(shape, separators=(',', ':'))}"

    def pair(self, name: str) -> tuple[int, int]:
        """A parameter along both sides."""
        value = self.params[name]
        if isinstance(value, tuple):
            return int(value[0]), int(value[1])
        assert isinstance(value, int)
        return value, value

    @property
    def num_parameters(self) -> int:
        """Trained numbers, normalisation left out."""
        if self.name == "conv2d":
            wide, high = self.pair("kernel_size")
            return wide * high * self.input[0] * self.output[0]
        if self.name == "linear":
            return (self.input[0] + 1) * self.output[0]
        if self.name == "ResnetBottleneck":
            planes, base = self.params["planes"], self.params["base_width"]
            assert isinstance(planes, int)
            assert isinstance(base, int)
            inside = planes * base // 64
            shortcut = self.input[0] * self.output[0] if "downsampleParams" in self.params else 0
            return inside * (self.input[0] + 9 * inside + self.output[0]) + shortcut
        return 0


class Model:
    """Layers in the order in which the original's model code makes them."""

    def __init__(self, shape: Shape) -> None:
        self.layers: list[Layer] = []
        self._shape = shape

    def add(self, name: str, params: dict[str, object], *sources: int) -> int:
        """Append a layer after the last one, or after given ones; its number."""
        previous = sources or ((len(self.layers) - 1,) if self.layers else ())
        shapes = [self.layers[source].output for source in previous] or [self._shape]
        shape = shapes[0]
        if name == "concat":
            shape = (sum(each[0] for each in shapes), *shape[1:])
        layer = Layer(name=name, params=params, previous=previous, input=shape, output=shape)
        output = _output(layer)
        self.layers.append(
            Layer(name=name, params=params, previous=previous, input=shape, output=output)
        )
        return len(self.layers) - 1

    def conv(
        self,
        filters: int,
        kernel: int | tuple[int, int],
        *sources: int,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> int:
        """Append a convolution."""
        last = sources[0] if sources else len(self.layers) - 1
        channels = self.layers[last].output[0] if self.layers else self._shape[0]
        params: dict[str, object] = {
            "in_channels": channels,
            "out_channels": filters,
            "kernel_size": kernel,
            "stride": stride,
            "padding": padding,
        }
        return self.add("conv2d", params, *sources)

    def pool(
        self, kind: str, kernel: int, *sources: int, stride: int = 1, padding: int = 0
    ) -> int:
        """Append a pooling layer."""
        params: dict[str, object] = {"kernel_size": kernel, "stride": stride, "padding": padding}
        return self.add(kind, params, *sources)

    def relu(self) -> int:
        """Append a ReLU."""
        name = "ReLU1d" if self.layers[-1].name == "linear" else "ReLU2d"
        return self.add(name, {"inplace": True, "kernel_size": 1, "stride": 1, "padding": 0})

    def linear(self, features: int) -> int:
        """Append a linear layer."""
        size = self.layers[-1].output[0]
        return self.add("linear", {"in_features": size, "out_features": features, "bias": True})

    def head(self, classes: int = 1000) -> None:
        """Append global pooling, flattening and the classifier."""
        self.add("adAvgPool2d", {"output_width": 1, "output_height": 1})
        self.add("flatten", {"kernel_size": 1})
        self.linear(classes)


def _output(layer: Layer) -> Shape:
    if layer.name in ("conv2d", "maxPool2d", "avgPool2d"):
        sides = [
            (size + 2 * padding - kernel) // stride + 1
            for size, kernel, stride, padding in zip(
                layer.input[1:],
                layer.pair("kernel_size"),
                layer.pair("stride"),
                layer.pair("padding"),
                strict=True,
            )
        ]
        channels = layer.params.get("out_channels", layer.input[0])
        assert isinstance(channels, int)
        return (channels, *sides)
    if layer.name == "adAvgPool2d":
        return (layer.input[0], 1, 1)
    if layer.name == "linear":
        features = layer.params["out_features"]
        assert isinstance(features, int)
        return (features,)
    if layer.name == "flatten":
        return (math.prod(layer.input),)
    if layer.name == "ResnetBottleneck":
        planes, stride = layer.params["planes"], layer.params.get("stride", 1)
        assert isinstance(planes, int)
        assert isinstance(stride, int)
        return (4 * planes, *(-(-side // stride) for side in layer.input[1:]))
    return layer.input


_VGG = {
    "vgg11": (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "vgg13": (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    "vgg16": (64, 64, 0, 128, 128, 0, *(256,) * 3, 0, *(512,) * 3, 0, *(512,) * 3, 0),
    "vgg19": (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0),
}


def vgg(name: str) -> Model:
    """VGG with a ReLU as a layer of its own."""
    model = Model((3, 224, 224))
    for filters in _VGG[name]:
        if filters:
            model.conv(filters, 3, padding=1)
            model.relu()
        else:
            model.pool("maxPool2d", 2, stride=2)
    model.add("flatten", {"kernel_size": 1})
    for features in (4096, 4096):
        model.linear(features)
        model.relu()
    model.linear(1000)
    return model


def wide_resnet(blocks: Sequence[int], base_width: int = 128) -> Model:
    """ResNet of bottlenecks, each one layer; WRN-101-2 has (3, 4, 23, 3) of width 128."""
    model = Model((3, 224, 224))
    model.conv(64, 7, stride=2, padding=3)
    model.relu()
    model.pool("maxPool2d", 3, stride=2, padding=1)
    channels = 64
    for stage, count in enumerate(blocks):
        planes = 64 << stage
        for block in range(count):
            params: dict[str, object] = {
                "inplanes": channels,
                "planes": planes,
                "groups": 1,
                "base_width": base_width,
                "dilation": 1,
            }
            if block == 0:
                stride = 1 if stage == 0 else 2
                params["stride"] = stride
                params["downsampleParams"] = ((channels, 4 * planes, stride), 4 * planes)
            model.add("ResnetBottleneck", params)
            channels = 4 * planes
    model.head()
    return model


def inception() -> Model:
    """Inception-v3 without the auxiliary head; five kinds of blocks of parallel branches."""
    model = Model((3, 299, 299))
    model.conv(32, 3, stride=2)
    model.conv(32, 3)
    model.conv(64, 3, padding=1)
    model.pool("maxPool2d", 3, stride=2)
    model.conv(80, 1)
    model.conv(192, 3)
    model.pool("maxPool2d", 3, stride=2)
    for features in (32, 64, 64):
        _inception_a(model, features)
    _inception_b(model)
    for channels in (128, 160, 160, 192):
        _inception_c(model, channels)
    _inception_d(model)
    for _ in range(2):
        _inception_e(model)
    model.head()
    return model


def _concat(model: Model, *ends: int) -> int:
    return model.add("concat", {"kernel_size": 1}, *ends)


def _inception_a(model: Model, features: int) -> None:
    fork = len(model.layers) - 1
    first = model.conv(64, 1, fork)
    model.conv(48, 1, fork)
    second = model.conv(64, 5, padding=2)
    model.conv(64, 1, fork)
    model.conv(96, 3, padding=1)
    third = model.conv(96, 3, padding=1)
    model.pool("avgPool2d", 3, fork, padding=1)
    _concat(model, first, second, third, model.conv(features, 1))


def _inception_b(model: Model) -> None:
    fork = len(model.layers) - 1
    first = model.conv(384, 3, fork, stride=2)
    model.conv(64, 1, fork)
    model.conv(96, 3, padding=1)
    second = model.conv(96, 3, stride=2)
    _concat(model, first, second, model.pool("maxPool2d", 3, fork, stride=2))


def _inception_c(model: Model, channels: int) -> None:
    fork = len(model.layers) - 1
    flat, tall = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    first = model.conv(192, 1, fork)
    model.conv(channels, 1, fork)
    model.conv(channels, flat[0], padding=flat[1])
    second = model.conv(192, tall[0], padding=tall[1])
    model.conv(channels, 1, fork)
    model.conv(channels, tall[0], padding=tall[1])
    model.conv(channels, flat[0], padding=flat[1])
    model.conv(channels, tall[0], padding=tall[1])
    third = model.conv(192, flat[0], padding=flat[1])
    model.pool("avgPool2d", 3, fork, padding=1)
    _concat(model, first, second, third, model.conv(192, 1))


def _inception_d(model: Model) -> None:
    fork = len(model.layers) - 1
    model.conv(192, 1, fork)
    first = model.conv(320, 3, stride=2)
    model.conv(192, 1, fork)
    model.conv(192, (1, 7), padding=(0, 3))
    model.conv(192, (7, 1), padding=(3, 0))
    second = model.conv(192, 3, stride=2)
    _concat(model, first, second, model.pool("maxPool2d", 3, fork, stride=2))


def _inception_e(model: Model) -> None:
    fork = len(model.layers) - 1
    first = model.conv(320, 1, fork)
    inner = model.conv(384, 1, fork)
    flat = model.conv(384, (1, 3), inner, padding=(0, 1))
    second = _concat(model, flat, model.conv(384, (3, 1), inner, padding=(1, 0)))
    model.conv(448, 1, fork)
    inner = model.conv(384, 3, padding=1)
    flat = model.conv(384, (1, 3), inner, padding=(0, 1))
    third = _concat(model, flat, model.conv(384, (3, 1), inner, padding=(1, 0)))
    model.pool("avgPool2d", 3, fork, padding=1)
    _concat(model, first, second, third, model.conv(192, 1))


MODELS: dict[str, Callable[[], Model]] = {
    **{name: lambda name=name: vgg(name) for name in _VGG},  # type: ignore[misc]
    "vgg": lambda: vgg("vgg16"),
    "wrn": lambda: wide_resnet((3, 4, 23, 3)),
    "wrn50": lambda: wide_resnet((3, 4, 6, 3)),
    "resnet50": lambda: wide_resnet((3, 4, 6, 3), base_width=64),
    "resnet101": lambda: wide_resnet((3, 4, 23, 3), base_width=64),
    "inception": inception,
}


def model_layers(name: str) -> list[Layer]:
    """Layers of a model by its name.

    Raises:
        UnknownNameError: there is no such model here.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    return MODELS[name]().layers


@dataclass(frozen=True, slots=True)
class Profile:
    """Microseconds of layers by key; all lines of a key, in the order of the file."""

    microseconds: dict[str, list[float]] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path, model: str) -> "Profile":
        """Read ``A100_MODEL.prof`` (or another device's, or gzipped) of a folder.

        Raises:
            InputFileError: there is no profile of the model, or none can be read.
        """
        stems = dict.fromkeys((model, "vgg" if model.startswith("vgg") else model))
        for stem in stems:
            for path in sorted(folder.glob(f"*{stem}.prof*")):
                return Profile.read(path)
        raise InputFileError(f"{folder} has no profile of '{model}' (A100_{model}.prof, say).")

    @staticmethod
    def read(path: Path) -> "Profile":
        """Read lines of ``key  average ms  forward us  backward us``."""
        opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
        times: dict[str, list[float]] = {}
        with opened as lines:
            for line in lines:
                words = line.split()
                if len(words) not in (4, 5) or words[0] == "#config":
                    continue
                times.setdefault(words[0], []).append(float(words[1]) * 1000.0)
        if not times:
            raise InputFileError(f"{path} holds no layer times.")
        return Profile(times)


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
        times = self._profile.microseconds.get(key, ())
        if not times:
            self.missing.add(key)
            return 1.0
        time = times[-1]
        if not self.faithful:
            # The file repeats a model's layers in order, once per batch size.
            number, count = self._occurrence[layer]
            time = times[number] if len(times) == count else time
        return time if time > 0 else 1.0

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
