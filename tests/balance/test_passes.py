"""Loops that forget to weigh a loss, to update a model, or to do either on all ranks."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from heterog.balance import Balancer
from heterog.errors import HeterogWarning
from tests.balance.test_updates import SHARES, SIZE, net, numbers
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.distributed


def looped(each: Callable[..., None], *, wraps: bool = True, epochs: int = 4) -> list[str]:
    """What is warned of in a loop; ``each`` does a step after the forward pass."""
    models = [net(), net()]
    wrapped = [DistributedDataParallel(model) if wraps else model for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    balancer = Balancer(nn.ModuleList(wrapped), global_batch_size=SIZE, shares=SHARES, interval=0)
    loader, number = balancer.loader(numbers()), 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for inputs, kinds in loader:
                losses = [functional.cross_entropy(model(inputs), kinds) for model in wrapped]
                number += 1
                each(balancer, losses, optimizers, number)
                for optimizer in optimizers:
                    optimizer.zero_grad()
    return [str(each.message) for each in told if issubclass(each.category, HeterogWarning)]


def step(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def weighs_all(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    for loss in losses:
        torch.autograd.backward(balancer.weigh(loss))
    step(optimizers)


def penalizes(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    weights = [each for group in optimizers[0].param_groups for each in group["params"]]
    penalty = sum(each.square().sum() for each in weights)
    torch.autograd.backward(balancer.weigh(losses[0] + 0.1 * penalty))
    torch.autograd.backward(
        balancer.weigh(losses[1]) + 0.1 * sum(each.abs().sum() for each in weights)
    )
    step(optimizers)


def differentiates(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    for loss, optimizer in zip(losses, opts, strict=True):
        weights = optimizer.param_groups[0]["params"]
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        torch.autograd.backward(balancer.weigh(loss) + 0.0 * slopes[0].sum())
    step(opts)


def clears_attacks(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    torch.autograd.backward(losses[0], retain_graph=True)  # an adversary's, for its inputs
    for optimizer in opts:
        optimizer.zero_grad()
    never_updates(balancer, losses, opts, 0)
    balancer.average_gradients()
    step(opts)


def leaves_one(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    for loss, optimizer in zip(losses, optimizers, strict=True):
        torch.autograd.backward(balancer.weigh(loss) if optimizer is optimizers[0] else loss)
        optimizer.step()


def drops_the_result(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    for loss in losses:
        balancer.weigh(loss)
        torch.autograd.backward(loss)
    step(opts)


def weighs_twice(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    torch.autograd.backward(balancer.weigh((balancer.weigh(losses[0]) + losses[1]) / 2))
    step(optimizers)


def updates_by_hand(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    torch.autograd.backward(losses)
    with torch.no_grad():
        for optimizer in opts:
            for each in optimizer.param_groups[0]["params"]:
                each -= 0.1 * each.grad


def adds_another(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    for loss in losses:
        torch.autograd.backward(balancer.weigh(loss), retain_graph=True)
    torch.autograd.backward(0.1 * losses[0])
    balancer.average_gradients()
    step(optimizers)


def never_updates(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    weighs_all(balancer, losses, [], 0)


def updates_one(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    weighs_all(balancer, losses, optimizers[:1], 0)


def clears_too_early(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    never_updates(balancer, losses, opts, 0)
    for optimizer in opts:
        optimizer.zero_grad()
    step(opts)


def clears_by_zeros(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    torch.autograd.backward(losses[0], retain_graph=True)
    for optimizer in opts:
        optimizer.zero_grad(set_to_none=False)
    never_updates(balancer, losses, opts, 0)
    balancer.average_gradients()
    step(opts)


def looks_at_slopes(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    """Of a loss that is not weighed, between backward passes and for Hessians."""
    for loss, optimizer in zip(losses, opts, strict=True):
        weight = optimizer.param_groups[0]["params"][0]
        torch.autograd.backward(balancer.weigh(loss), retain_graph=True)
        torch.autograd.grad(loss, weight, create_graph=True)
    balancer.average_gradients()
    step(opts)


def updates_seldom(balancer: Balancer, losses: list[Tensor], opts: list[Any], number: int) -> None:
    """The second model from the second pass on."""
    weighs_all(balancer, losses, opts[: 1 + (number > 4)], 0)


def scales(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    never_updates(balancer, losses, optimizers, 0)
    assert balancer.model is not None
    for each in balancer.model.parameters():
        assert each.grad is not None
        each.grad /= 2
    balancer.average_gradients()
    step(optimizers)


def sets_data(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    never_updates(balancer, losses, optimizers, 0)
    for optimizer in optimizers:
        for each in optimizer.param_groups[0]["params"]:
            each.data = each.data - 0.1 * each.grad


def has_no_rate(balancer: Balancer, losses: list[Tensor], opts: list[Any], _: int) -> None:
    opts[1].param_groups[0]["lr"] = 0.0
    weighs_all(balancer, losses, opts, 0)


def clips_after(balancer: Balancer, losses: list[Tensor], optimizers: list[Any], _: int) -> None:
    never_updates(balancer, losses, optimizers, 0)
    assert balancer.model is not None
    for _ in range(2):
        balancer.average_gradients()
    nn.utils.clip_grad_norm_(balancer.model.parameters(), 0.05)
    step(optimizers)


def quiet(_: int, each: Callable[..., None], wraps: bool) -> list[str]:
    return looped(each, wraps=wraps)


@pytest.mark.parametrize(
    "each",
    [
        *(weighs_all, penalizes, differentiates),
        *(updates_seldom, sets_data, has_no_rate),
    ],
)
def test_loops_that_weigh_are_not_warned_of(ranks: Ranks, each: Callable[..., None]) -> None:
    assert ranks.run(quiet, each, True) == [[]] * 3


@pytest.mark.parametrize(
    "each", [clips_after, scales, clears_attacks, clears_by_zeros, looks_at_slopes]
)
def test_loops_that_average_are_not_warned_of(ranks: Ranks, each: Callable[..., None]) -> None:
    assert ranks.run(quiet, each, False) == [[]] * 3


def test_a_loss_is_not_weighed_twice(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"BalanceError: .*weighed already, or is a sum with"):
        ranks.run(quiet, weighs_twice, True)


@pytest.mark.parametrize(
    ("each", "wraps", "texts"),
    [
        (adds_another, False, ["stepped with gradients of a loss that was not weighed"]),
        (leaves_one, True, ["stepped with gradients of a loss that was not weighed"]),
        (drops_the_result, True, ["call backward() on what weigh() returns"]),
        (updates_by_hand, True, ["weights have moved by a loss that was not weighed"]),
        (never_updates, True, ["no weight of Sequential has changed in"] * 2),
        (updates_one, True, ["no weight of Sequential has changed in"]),
        (clears_too_early, True, ["no weight of Sequential has changed in"] * 2),
    ],
)
def test_forgotten_updates_and_losses_are_warned_of(
    ranks: Ranks, each: Callable[..., None], wraps: bool, texts: list[str]
) -> None:
    for told in ranks.run(quiet, each, wraps):
        assert len(told) == len(texts), told
        assert all(text in said for text, said in zip(texts, told, strict=True))


def two_balancers(_: int) -> list[str]:
    """Both made before training; then the model is loaded and gets other parameters."""
    model = nn.Sequential(net(), nn.LazyLinear(4, dtype=torch.float64))
    model.register_parameter("mask", nn.Parameter(torch.full((3,), -torch.inf)))
    sizes = [(SIZE, SHARES), (2 * SIZE, (12, 8, 4))]
    balancers = [
        Balancer(model, global_batch_size=size, shares=shares, interval=0)
        for size, shares in sizes
    ]
    torch.manual_seed(0)
    model(numbers().tensors[0])
    model.load_state_dict(
        {name: each + 1 for name, each in model.state_dict().items()}, assign=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for balancer in [*balancers, balancers[0]]:
            loader = balancer.loader(numbers())
            with torch.no_grad():
                for inputs, _ in loader:
                    model(inputs)
            for inputs, kinds in loader:
                torch.autograd.backward(functional.cross_entropy(model(inputs), kinds))
                optimizer.zero_grad()
            for inputs, kinds in loader:
                loss = functional.cross_entropy(model(inputs), kinds)
                torch.autograd.backward(balancer.weigh(loss))
                balancer.average_gradients()
                optimizer.step()
                optimizer.zero_grad()
    return [str(each.message) for each in told if issubclass(each.category, HeterogWarning)]


def test_balancers_of_one_model_know_of_each_other(ranks: Ranks) -> None:
    assert ranks.run(two_balancers) == [[]] * 3


def takes_two(_: int) -> list[str]:
    """Two batches for an update, and a pass that only looks."""
    model = net()
    balancer = Balancer(model, global_batch_size=SIZE, shares=SHARES, interval=0)
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), balancer.loader(numbers())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3):
            waiting = iter(loader)
            for inputs, kinds in waiting:
                other = next(waiting, None)
                if number != 1 and other is not None:
                    loss = functional.cross_entropy(model((inputs + other[0]) / 2), kinds)
                    torch.autograd.backward(balancer.weigh(loss))
                    balancer.average_gradients()
                    optimizer.step()
                    optimizer.zero_grad()
    return [str(each.message) for each in told]


def skips(_: int) -> list[str]:
    """A rank leaves a batch out, in which it has no gradients to average with others."""
    model = net()
    balancer = Balancer(model, global_batch_size=6, shares=(3, 2, 1), interval=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, (inputs, kinds) in enumerate(balancer.loader(numbers())):
            if number in (2, 5):  # on all ranks, so that the test ends
                continue
            torch.autograd.backward(balancer.weigh(functional.cross_entropy(model(inputs), kinds)))
            balancer.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in told]


def test_a_batch_that_is_left_out_is_told(ranks: Ranks) -> None:
    assert ranks.run(takes_two) == [[]] * 3
    for rank, (told,) in enumerate(ranks.run(skips)):
        assert told.startswith(f"rank {rank} weighed no loss in step 2 of epoch 0: other ranks")


def keeps_its_own_rate_late(rank: int) -> None:
    """Between two comparisons, and to the end of the data."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(model)
    balancer = Balancer(wrapped, global_batch_size=SIZE, shares=SHARES, interval=0)
    loader, number = balancer.loader(numbers()), 0
    for _ in range(6):
        for inputs, kinds in loader:
            number += 1
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank * (number > 16))
            torch.autograd.backward(
                balancer.weigh(functional.cross_entropy(wrapped(inputs), kinds))
            )
            optimizer.step()
            optimizer.zero_grad()


def test_the_last_steps_of_a_pass_are_compared(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"after step 18 .* the same learning rate"):
        ranks.run(keeps_its_own_rate_late)
