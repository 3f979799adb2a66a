"""Gradients, losses and replicas where updates are not those of one plain loss."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from heterog.balance import BalanceError, Balancer
from heterog.balance.shares import epoch_order
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.distributed
SHARES = (6, 4, 2)
SIZE = sum(SHARES)


class Words(nn.Module):
    """A sparse embedding, a branch that some words take, and a head that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 4)
        self.branch, self.unread = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.embed(words).mean(1))
        rare = words[:, 0] == 0
        return torch.where(rare[:, None], self.branch(out), out) if rare.any() else out


def words_and_kinds() -> TensorDataset:
    random = torch.Generator().manual_seed(7)
    words = torch.randint(1, 40, (36, 5), generator=random)
    words[::9, 0] = 0
    return TensorDataset(words, torch.randint(0, 4, (36,), generator=random))


def batches(data: TensorDataset, rank: int | None, model: nn.Module) -> Any:
    """Batches of a balancer, or whole ones in the same order; and the balancer."""
    if rank is not None:
        balancer = Balancer(model, global_batch_size=SIZE, shares=SHARES, interval=0)
        return balancer.loader(data), balancer
    order = torch.from_numpy(epoch_order(len(data), 0, 0, shuffle=True))
    return [tuple(each[part] for each in data.tensors) for part in torch.split(order, SIZE)], None


def train_words(rank: int | None) -> list[float]:
    torch.manual_seed(0)
    model = Words().double()
    rest = [each for name, each in model.named_parameters() if name != "embed.weight"]
    optimizers = [
        torch.optim.SGD([model.embed.weight], lr=0.1),
        torch.optim.SGD(rest, lr=0.1, momentum=0.9, weight_decay=0.5),
    ]
    loader, balancer = batches(words_and_kinds(), rank, model)
    for words, kinds in loader:
        loss = functional.cross_entropy(model(words), kinds)
        if balancer is None:
            torch.autograd.backward(loss)
        else:
            balancer.weigh(loss).backward()
            balancer.average_gradients()
        assert model.embed.weight.grad is not None
        assert model.embed.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_unused_and_sparse_gradients_are_those_of_one_process(ranks: Ranks) -> None:
    alone = train_words(None)
    for found in ranks.run(train_words):
        assert found == pytest.approx(alone, rel=1e-9)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def numbers() -> TensorDataset:
    random = torch.Generator().manual_seed(7)
    inputs = torch.randn(36, 8, generator=random, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 4, (36,), generator=random))


def losses_of_two_optimizers(rank: int | None) -> list[float]:
    """The second loss is read; its parts add up, which the first does not belong to."""
    first, second = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    loader, balancer = batches(numbers(), rank, nn.ModuleList([first, second]))
    found = []
    for inputs, kinds in loader:
        loss = functional.cross_entropy(first(inputs), kinds)
        torch.autograd.backward(loss if balancer is None else balancer.weigh(loss))
        if balancer is not None:
            balancer.average_gradients()
        optimizers[0].step()
        halves = [functional.cross_entropy(second(inputs), kinds) / 2 for _ in range(2)]
        for half in halves:
            torch.autograd.backward(half if balancer is None else balancer.weigh(half))
        if balancer is None:
            found.append(sum(half.item() for half in halves))
        else:
            balancer.average_gradients()
            found.append(balancer.mean_loss())
            assert balancer.mean_loss() == found[-1]
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return found


def test_losses_of_two_optimizers_are_two(ranks: Ranks) -> None:
    alone = losses_of_two_optimizers(None)
    for found in ranks.run(losses_of_two_optimizers):
        assert found == pytest.approx(alone, rel=1e-9)


def train_by_closure(rank: int | None, returns_mean: bool = True) -> list[float]:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    wrapped = model if rank is None else DistributedDataParallel(model)
    loader, balancer = batches(numbers(), rank, wrapped)
    for inputs, kinds in loader:

        def closure(inputs: Tensor = inputs, kinds: Tensor = kinds) -> float:
            optimizer.zero_grad()
            loss = functional.cross_entropy(wrapped(inputs), kinds)
            weighed = loss if balancer is None else balancer.weigh(loss)
            torch.autograd.backward(weighed)
            if balancer is None or not returns_mean:
                return weighed.item()
            return float(balancer.mean_loss())

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_an_optimizer_with_closures_decides_by_the_whole_batch(ranks: Ranks) -> None:
    alone = train_by_closure(None)
    for found in ranks.run(train_by_closure):
        assert found == pytest.approx(alone, rel=1e-6)
    with pytest.raises(AssertionError, match=r"BalanceError: .*Return balancer.mean_loss\(\)"):
        ranks.run(train_by_closure, False)


def forgets_to_average(rank: int) -> None:
    _train(rank, net())


def has_a_rate_of_its_own(rank: int) -> None:
    _train(rank, DistributedDataParallel(net()), rate=0.1 + 0.01 * rank)


def unfreezes(rank: int) -> None:
    model = net()
    next(model.children()).requires_grad_(False)
    _train(rank, DistributedDataParallel(model), unfreezes=True)


def shares_layers(rank: int) -> None:
    mesh = init_device_mesh("cpu", (len(SHARES),))
    _train(rank, parallelize_module(net(), mesh, {"0": ColwiseParallel()}))


def trains_a_copy_first(rank: int) -> None:
    """As MAML does: updates of another model are not weighed."""
    model = net()
    balancer = Balancer(model, global_batch_size=SIZE, shares=SHARES, interval=0)
    for inputs, kinds in balancer.loader(numbers()):
        copy = deepcopy(model)
        torch.autograd.backward(functional.cross_entropy(copy(inputs), kinds))
        torch.optim.SGD(copy.parameters(), lr=0.1).step()
        torch.autograd.backward(balancer.weigh(functional.cross_entropy(model(inputs), kinds)))
        balancer.average_gradients()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def differs_on_purpose(rank: int) -> None:
    _train(rank, net(), check_replicas=False)


def _train(
    rank: int, model: nn.Module, *, rate: float = 0.1, unfreezes: bool = False, **options: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    balancer = Balancer(model, global_batch_size=SIZE, shares=SHARES, interval=0, **options)
    for inputs, kinds in balancer.loader(numbers()):
        torch.autograd.backward(balancer.weigh(functional.cross_entropy(model(inputs), kinds)))
        optimizer.step()
        optimizer.zero_grad()
        if unfreezes:
            model.requires_grad_(True)


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (forgets_to_average, "after step 1 .* call balancer.average_gradients"),
        (has_a_rate_of_its_own, "after step 1 .* the same learning rate"),
        (unfreezes, "after step 2 .*: module.0.weight was frozen when training began"),
        (shares_layers, "0.weight lies on a mesh of 3 of 3 ranks .* need the same samples"),
    ],
)
def test_replicas_that_differ_are_noticed(
    ranks: Ranks, loop: Callable[[int], None], text: str
) -> None:
    with pytest.raises(AssertionError, match=text):
        ranks.run(loop)


def test_other_models_and_replicas_that_shall_differ_train_freely(ranks: Ranks) -> None:
    ranks.run(differs_on_purpose)
    ranks.run(trains_a_copy_first)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda: Balancer(global_batch_size=48.0), "batch_size=48.0: give a whole number"),  # type: ignore[arg-type]
        (lambda: Balancer(global_batch_size=None), "global_batch_size=None: give a whole"),  # type: ignore[arg-type]
        (lambda: Balancer(global_batch_size=4, writer="runs"), "writer='runs' has no add_scalar"),  # type: ignore[arg-type]
        (lambda: _loader(torch.utils.data.DataLoader(numbers())), "got a DataLoader"),
        (lambda: _loader(numbers(), batch_size=4), "takes no batch_size"),
        (lambda: _loader(numbers(), sampler=range(3)), "takes no sampler"),
        (lambda: _weigh(torch.ones(3)), r"a loss of shape \(3,\)"),
        (lambda: _weigh(1.0), "weigh.. got float 1.0"),
    ],
)
def test_mistakes_of_a_first_try(mistake: Callable[[], Any], text: str) -> None:
    with pytest.raises(BalanceError, match=text):
        mistake()


def _loader(data: Any, **options: Any) -> Any:
    return Balancer(global_batch_size=4).loader(data, **options)


def _weigh(loss: Any) -> None:
    balancer = Balancer(global_batch_size=4)
    for _ in balancer.loader(numbers()):
        balancer.weigh(loss)


def prefetches(rank: int, shares: tuple[int, ...] = SHARES) -> None:
    model = net()
    balancer = Balancer(model, global_batch_size=SIZE, shares=shares, interval=0)
    batches = iter(balancer.loader(numbers()))
    for in_thread in (True, False):
        with ThreadPoolExecutor(1) as other:
            inputs, kinds = other.submit(next, batches).result() if in_thread else next(batches)
        loss = functional.cross_entropy(model(inputs), kinds)
        if in_thread and len(shares) > 1:
            with pytest.raises(BalanceError, match="taken in another thread"):
                balancer.weigh(loss)
        else:
            torch.autograd.backward(balancer.weigh(loss))


def test_batches_taken_in_another_thread_are_refused(ranks: Ranks) -> None:
    """A prefetcher of one's own would weigh losses with the steps of later batches."""
    ranks.run(prefetches)
    prefetches(0, shares=(SIZE,))  # one rank has one weight
