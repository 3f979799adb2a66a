"""The models of the DeepPool repository as layers, in the order in which its code makes them."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from heterog.errors import InputFileError

Shape = tuple[int, ...]


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
        if isinstance(value, tuple | list):
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


MODELS: dict[str, tuple[str, Callable[[], Model]]] = {
    "vgg": ("vgg", partial(vgg, "vgg16")),
    **{name: ("vgg", partial(vgg, name)) for name in _VGG},
    "wrn": ("wrn", partial(wide_resnet, (3, 4, 23, 3))),
    "wrn101": ("wrn", partial(wide_resnet, (3, 4, 23, 3))),
    "wide_resnet101_2": ("wrn", partial(wide_resnet, (3, 4, 23, 3))),
    "inception": ("inception", inception),
    "inception_v3": ("inception", inception),
    "inceptionV3": ("inception", inception),
}
"""Part of a profile's file name, and the maker of the layers, by the model's name."""


def chain_of_keys(keys: Sequence[str]) -> list[Layer]:
    """A model without branches from its profile's keys, which come in the order of its layers.

    A layer's output is what the next one reads.

    Raises:
        InputFileError: a key cannot be read.
    """
    parsed = [_KEY.fullmatch(key) for key in keys]
    first = next((match["batch"] for match in parsed if match is not None), "")
    layers: list[Layer] = []
    for key, match in zip(keys, parsed, strict=True):
        if match is None:
            raise InputFileError(f"cannot read a layer's name, parameters and shape from '{key}'.")
        if match["batch"] != first:
            break
        shape = json.loads(match["shape"])
        layers.append(
            Layer(
                name=match["name"],
                params=json.loads(match["params"]),
                previous=(len(layers) - 1,) if layers else (),
                input=tuple(shape) if isinstance(shape, list) else (shape,),
                output=(),
            )
        )
    ends = [layer.input for layer in layers[1:]]
    last = replace(layers[-1], output=layers[-1].input)
    return [
        replace(layer, output=output)
        for layer, output in zip(layers, [*ends, _output(last)], strict=True)
    ]


_KEY = re.compile(r"(?P<name>[^{]+)(?P<params>\{.*\})\[(?P<batch>\d+)\](?P<shape>\[.*\]|\d+)")
