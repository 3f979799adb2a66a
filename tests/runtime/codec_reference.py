"""Slow and obvious: training on one device as ranks with codecs do it.

Nothing here is shared with the runtime: elements are Python numbers, taken one by one.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.modes.codecs.value import Codec, CodecKind
from tests.runtime.cases import BATCH, STEPS, Trained, batch_of, workload_of


def meant(tensor: Tensor, codec: Codec | None) -> Tensor:
    """What is understood of a tensor of fp32 numbers that travels by a codec."""
    flat = [float(value) for value in tensor.reshape(-1)]
    if codec is None or codec.is_plain(len(flat), 4):
        return tensor.clone()
    if codec.kind == CodecKind.FP16:
        found = [struct.unpack("e", struct.pack("e", value))[0] for value in flat]
    elif codec.kind == CodecKind.INT8:
        found = []
        for begin in range(0, len(flat), 256):
            block = flat[begin : begin + 256]
            scale = max(abs(value) for value in block) / 127.0
            found += [_nearest(value / scale) * scale if scale else 0.0 for value in block]
    else:
        kept, _ = codec.kept(len(flat), 4)
        by_size = sorted(range(len(flat)), key=lambda place: (-abs(flat[place]), place))
        largest = set(by_size[:kept])
        found = [value if place in largest else 0.0 for place, value in enumerate(flat)]
    return torch.tensor(found, dtype=torch.float32).view(tensor.shape)


def _nearest(value: float) -> float:
    """Of two integers that are equally near the even one, as processors round."""
    low = math.floor(value)
    if value - low == 0.5:
        return low if low % 2 == 0 else low + 1.0
    return math.floor(value + 0.5)


class Cut(torch.autograd.Function):
    """A boundary: activations go one way by one codec, their gradients back by another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, there: Codec | None, back: Codec | None) -> Tensor:
        ctx.back = back
        return meant(value, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return meant(gradients[0], ctx.back), None, None


def pipelined(cut: int, micro: Sequence[int], there: Codec | None, back: Codec | None) -> Trained:
    """The perceptron in two stages."""
    workload = workload_of("mlp")
    model = workload.make_model()
    assert isinstance(model, nn.Sequential)
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses: list[float] = []
    gradients: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        x, y = batch_of("mlp", step)
        stepper.zero_grad()
        total = 0.0
        for rows in torch.split(torch.arange(BATCH), list(micro)):
            value = Cut.apply(model[:cut](x[rows]), there, back)  # type: ignore[no-untyped-call]
            loss = functional.mse_loss(model[cut:](value), y[rows], reduction="sum") / y.numel()
            torch.autograd.backward(loss)
            total += float(loss.detach())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(name, []).append(parameter.grad.clone())
        stepper.step()
        losses.append(total)
    return Trained(losses, gradients, model.state_dict())


def replicated(shares: Sequence[int], codec: Codec, steps: int = STEPS) -> Trained:
    """Replicas of the perceptron that add up, tensor by tensor, what is understood of gradients.

    What a message leaves out is added to the next gradient of that replica.
    """
    return _summed(shares, lambda replica, name: codec, steps)


def served(shares: Sequence[int], home: int, push: Codec, pull: Codec | None) -> Trained:
    """The same by a server on one of the replicas, from which the others get new parameters."""
    return _summed(shares, lambda r, name: None if r == home else push, STEPS, home, pull)


def _summed(
    shares: Sequence[int],
    codec_of: Callable[[int, str], Codec | None],
    steps: int,
    home: int = 0,
    pull: Codec | None = None,
) -> Trained:
    workload = workload_of("mlp")
    replicas = [workload.make_model() for _ in shares]
    master = replicas[home]
    stepper = workload.optimizer(master.parameters(), **dict(workload.optimizer_options))
    left_out: dict[tuple[int, str], Tensor] = {}
    losses: list[float] = []
    gradients: dict[str, list[Tensor]] = {}
    for step in range(steps):
        x, y = batch_of("mlp", step)
        sums = {name: torch.zeros_like(value) for name, value in master.named_parameters()}
        losses.append(0.0)
        begin = 0
        for number, (share, model) in enumerate(zip(shares, replicas, strict=True)):
            rows = slice(begin, begin + share)
            begin += share
            model.zero_grad()
            loss = functional.mse_loss(model(x[rows]), y[rows], reduction="sum") / y.numel()
            torch.autograd.backward(loss)
            losses[-1] += float(loss.detach())
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                codec = codec_of(number, name)
                whole = parameter.grad + left_out.get((number, name), torch.zeros(()))
                understood = meant(whole, codec)
                left_out[number, name] = whole - understood
                sums[name] += understood
        for name, parameter in master.named_parameters():
            parameter.grad = sums[name]
            gradients.setdefault(name, []).append(sums[name].clone())
        stepper.step()
        for model in replicas:
            for mine, theirs in zip(model.parameters(), master.parameters(), strict=True):
                if model is not master:
                    mine.data.copy_(meant(theirs.detach(), pull))
    return Trained(losses, gradients, master.state_dict())
