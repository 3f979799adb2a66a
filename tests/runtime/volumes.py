"""Small networks whose samples are cut along space, and what a rank does with them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.zoo.volumes import CosmoFlow, UNet3d
from tests.runtime.cases import STEPS, Trained, captured_once

SHALLOW_UNET = ((2, 2), (2, 3))


class Waves(nn.Module):
    """A 1-D sequence model: wide, dilated and strided kernels, poolings, ways to upsample."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(2, 3, 7, padding=3)
        self.dilated = nn.Conv1d(3, 3, 3, padding=4, dilation=4)
        self.strided = nn.Conv1d(3, 4, 5, stride=2, padding=2)
        self.even = nn.ConvTranspose1d(4, 3, 4, stride=2, padding=1)
        self.odd = nn.Conv1d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dilated(torch.tanh(self.wide(x))))
        y = functional.max_pool1d(self.strided(x), 3, 2, padding=1)
        y = functional.interpolate(y, scale_factor=2.0, mode="linear")
        y = functional.interpolate(y, scale_factor=2.0, mode="nearest")
        z = functional.interpolate(self.even(self.strided(x)), scale_factor=1.0)
        out: Tensor = self.odd(z) + y[:, :2]
        return out


class Picture(nn.Module):
    """A 2-D network: kernels without padding, overlapping poolings, a mean over space."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Conv2d(2, 3, (5, 3), padding=(0, 1))
        self.strided = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bare(x))
        x = functional.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False)
        x = functional.max_pool2d(torch.relu(self.strided(x)), 3, 1, padding=1)
        x = functional.interpolate(self.grouped(x), scale_factor=2, mode="bilinear")
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class LocalBatchNorm(nn.Module):
    """What BatchNorm is on a sample cut along dimension 2: each part by its own statistics."""

    def __init__(self, norm: nn.Module, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[2] // sum(self.parts)
        return torch.cat(
            [self.norm(y) for y in torch.split(x, [rows * n for n in self.parts], 2)], 2
        )


def unet_of_whole_statistics() -> nn.Module:
    model = UNet3d(SHALLOW_UNET)
    made: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return made


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...] | None]] = {
    "cosmoflow": (partial(CosmoFlow, 32, channels=2, hidden=(8, 6)), (1, 32, 32, 32), (4,)),
    "unet": (unet_of_whole_statistics, (1, 16, 6, 6), None),
    "unet of parts": (partial(UNet3d, SHALLOW_UNET), (1, 16, 6, 6), None),
    "waves": (Waves, (2, 48), (2, 48)),
    "picture": (Picture, (2, 20, 12), (3,)),
}
"""Model, shape of a sample, and of its target; ``None``: a label for each voxel."""


def batch_of(name: str, batch_size: int, step: int) -> tuple[Tensor, Tensor]:
    _, shape, target = CASES[name]
    random = torch.Generator().manual_seed(100 + step)
    x = torch.randn(batch_size, *shape, generator=random, dtype=torch.float64)
    if target is None:
        return x, torch.randint(0, 3, (batch_size, *shape[1:]), generator=random)
    return x, torch.randn(batch_size, *target, generator=random, dtype=torch.float64)


def workload_of(name: str, batch_size: int) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return CASES[name][0]().double()

    loss = functional.cross_entropy if CASES[name][2] is None else functional.mse_loss
    return Workload(
        seeded, batch_of(name, batch_size, 0), loss, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9},
        name=name.replace(" ", "_"),
    )  # fmt: skip


def trained_alone(name: str, batch_size: int, parts: tuple[int, ...] = ()) -> Trained:
    """The same steps on one device, each part of a sample normalised alone if there are parts."""
    workload = workload_of(name, batch_size)
    model = workload.make_model()
    if parts:
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.BatchNorm3d):
                parent, _, last = path.rpartition(".")
                setattr(model.get_submodule(parent), last, LocalBatchNorm(module, parts))
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    gradients: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        stepper.zero_grad()
        loss = workload.step_loss(model, batch_of(name, batch_size, step))
        torch.autograd.backward(loss)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(key.replace(".norm.", "."), []).append(parameter.grad.clone())
        stepper.step()
        losses.append(float(loss.detach()))
    weights = {key.replace(".norm.", "."): value for key, value in model.state_dict().items()}
    return Trained(losses, gradients, weights)


def train(rank: int, name: str, batch_size: int, plan_path: str) -> Trained:
    """What every rank does; gradients of parameters that live in slices are left out."""
    with captured_once((name, batch_size)):
        workload = workload_of(name, batch_size)
        step = deploy(workload, load_plan(plan_path))
    whole = {key: each.shape for key, each in workload.make_model().named_parameters()}
    gradients: dict[str, list[Tensor]] = {}

    def keep(*_: object) -> None:
        for key, parameter in step.model.named_parameters():
            if parameter.grad is not None and parameter.shape == whole[key]:
                gradients.setdefault(key, []).append(parameter.grad.clone())

    step.optimizer.register_step_pre_hook(keep)
    losses = [float(step(batch_of(name, batch_size, number))) for number in range(STEPS)]
    return Trained(losses, gradients, step.state_dict())
