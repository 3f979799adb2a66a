"""A model that runs as in training, but without its draws and without leaving traces.

Dropout keeps everything, other draws are replaced by their means, and batch norms use their
running statistics. So the loss of some samples is a function of these samples, and losses of a
batch and of its parts can be compared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.graph.python_state import same_draws
from heterog.runtime.accelerators import default_generator

_aten = torch.ops.aten


@contextmanager
def undisturbed(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set a model's mode for the body; afterwards all is as it was before.

    Modes, buffers, what modules keep in attributes (counters, say) and generators are set back.

    Args:
        model: The model.
        training: Whether it runs as in training, with fixed draws; else in evaluation mode.
    """
    kept = [(each, dict(vars(each)), dict(each._buffers)) for each in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    draws = FixedDraws() if training else nullcontext()  # type: ignore[no-untyped-call]
    devices = {each.device for each in model.parameters()} - {torch.device("meta")}
    with same_draws(map(default_generator, devices)):
        try:
            model.train(training)
            for module, *_ in kept:
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.training = False
            with torch.no_grad(), draws:
                yield
        finally:
            for module, attributes, named_buffers in kept:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(named_buffers)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces what PyTorch's ops draw by its mean."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket in _MEANS:
            return _MEANS[func.overloadpacket](func, args, kwargs)
        for index, argument in enumerate(func._schema.arguments):
            if argument.name in (
                "dropout_p",
                "dropout",
            ):  # of fused attention and recurrent layers
                if index < len(args):
                    args = (*args[:index], 0.0, *args[index + 1 :])
                elif argument.name in kwargs:
                    kwargs[argument.name] = 0.0
        return func(*args, **kwargs)


def _keep_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


def _probability(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The mean of zeros and ones, of which ``bernoulli`` has two forms."""
    probability = args[1] if len(args) > 1 else kwargs.get("p")
    if func.overloadpacket is _aten.bernoulli:
        return args[0].clone() if probability is None else torch.full_like(args[0], probability)
    target: Tensor = args[0]
    if isinstance(probability, Tensor):
        return target.copy_(probability)
    return target.fill_(0.5 if probability is None else probability)


def _of_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    low, high = (*args[1:], *(kwargs.get(name) for name in ("from", "to")), 0.0, 1.0)[:2]
    target: Tensor = args[0]
    low, high = 0.0 if low is None else low, 1.0 if high is None else high
    return target.fill_((low + high) / 2)


def _of_rate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target: Tensor = args[0]
    return target.fill_(1.0 / (args[1] if len(args) > 1 else kwargs.get("lambd", 1.0)))


def _of_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    drawn = func(*args, **kwargs)
    return drawn.copy_(args[0]) if isinstance(args[0], Tensor) else drawn.fill_(args[0])


def _of_normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    target: Tensor = args[0]
    return target.fill_(args[1] if len(args) > 1 else kwargs.get("mean", 0.0))


def _filled(value: float) -> Callable[..., Any]:
    """What a function of shapes returns, with one value everywhere."""

    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs).fill_(value)

    return call


def _middle_integer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    numbers = [each for each in args if isinstance(each, int)]
    low, high = numbers if len(numbers) == 2 else (0, numbers[0])
    return func(*args, **kwargs).fill_((low + high) // 2)


_MEANS: dict[Any, Callable[..., Any]] = {
    _aten.native_dropout: _keep_all,
    _aten.bernoulli: _probability,
    _aten.bernoulli_: _probability,
    _aten.uniform_: _of_range,
    _aten.normal_: _of_normal,
    _aten.normal: _of_mean,
    _aten.exponential_: _of_rate,
    _aten.rand: _filled(0.5),
    _aten.rand_like: _filled(0.5),
    _aten.randn: _filled(0.0),
    _aten.randn_like: _filled(0.0),
    _aten.randint: _middle_integer,
    _aten.randint_like: _middle_integer,
}
