"""Elastic batches on real ranks: the note's table, and a slow loop in one process."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from heterog.balance import BalanceError, ElasticAveraging
from heterog.balance.elastic import default_rule
from heterog.balance.shares import epoch_order
from heterog.balance.speeds import StepClock
from heterog.runtime.accelerators import CPU
from heterog.simulator.unequal_updates import MERGE_BOOST, ElasticRule, MegaBatch
from tests.runtime.ranks import Ranks

SPEEDS = (1000.0, 500.0)
BATCH, WINDOW = 512, 20_000
SWINGING = ElasticRule(dead_band=0.0)
RATE = 0.05


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Seeded points of a plane; a batch of them is one look-up."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(num_samples, 1, generator=generator, dtype=torch.float64)
        self.targets = self.inputs.sum(1, keepdim=True) + 0.1 * noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self.targets[indices]


def as_it_is(batch: Any) -> Any:
    return batch


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(functional.mse_loss(model(batch[0]), batch[1]))
    optimizer.step()


class Told:
    """A clock that is told what time it is."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> StepClock:
        return StepClock(CPU, lambda: self.now_s)


Run = tuple[list[MegaBatch], dict[str, Tensor], list[str]]


def on_ranks(
    rank: int,
    rule: ElasticRule,
    boost: float,
    num_windows: int,
    speeds: Sequence[float],
    cut: int = 0,
) -> Run:
    """Windows, the model after them, and what was told.

    Args:
        rank: Number of this rank.
        rule: Rule of batches.
        boost: Boost of weights.
        num_windows: Number of windows.
        speeds: Samples per second of each rank.
        cut: Window after which everything is saved and made anew; 0 for none.
    """
    told, lines, found = Told(), list[str](), list[MegaBatch]()
    model = make_model()
    optimizer = make_optimizer(model)

    def made() -> ElasticAveraging:
        return ElasticAveraging(
            model,
            optimizer,
            batch_size=BATCH,
            window=WINDOW,
            speeds=speeds,
            rule=rule,
            boost=boost,
            tell=lines.append,
            clock=told.clock(),
        )

    elastic, data = made(), Points(190_000)
    while len(found) < num_windows:
        for window in elastic.windows(data, collate_fn=as_it_is):
            for batch in window:
                told.now_s += len(batch[0]) / speeds[rank]
                step(model, optimizer, batch)
                assert optimizer.param_groups[0]["lr"] == RATE
            assert elastic.last is not None
            found.append(elastic.last)
            if len(found) in (cut, num_windows):
                break
        if len(found) == cut:
            saved, state, own = elastic.state_dict(), model.state_dict(), optimizer.state_dict()
            model = make_model()
            optimizer = make_optimizer(model)
            elastic = made()
            elastic.load_state_dict(saved)
            model.load_state_dict(state)
            optimizer.load_state_dict(own)
    return found, model.state_dict(), lines


def alone(rule: ElasticRule, boost: float, num_windows: int) -> dict[str, Tensor]:
    """A copy of the model for each worker, and the paper's dispatch while it happens."""
    data = Points(190_000)
    order = torch.from_numpy(epoch_order(len(data), 0, 0, shuffle=True))
    models = [make_model() for _ in SPEEDS]
    optimizers = [make_optimizer(model) for model in models]
    batches, position = [BATCH] * len(SPEEDS), 0
    for _ in range(num_windows):
        free_s, updates, end = [0.0, 0.0], [0, 0], position + WINDOW
        while position < end:
            worker = free_s.index(min(free_s))
            size = batches[worker]
            chosen = order[position : position + size]
            optimizers[worker].param_groups[0]["lr"] = RATE * size / BATCH
            step(models[worker], optimizers[worker], (data.inputs[chosen], data.targets[chosen]))
            position += size
            free_s[worker] += size / SPEEDS[worker]
            updates[worker] += 1
        weights = [number / sum(updates) for number in updates]
        most = weights.index(max(weights))
        weights[most] *= 1 + boost
        weights[1 - most] *= 1 - boost
        with torch.no_grad():
            for values in zip(*(model.parameters() for model in models), strict=True):
                merged = sum(w * v for w, v in zip(weights, values, strict=True))
                for value in values:
                    value.copy_(merged)
        if abs(updates[0] - updates[1]) > rule.dead_band:
            more = updates.index(max(updates))
            batches[more] = min(batches[more] + 32, 1024)
            batches[1 - more] = max(batches[1 - more] - 32, 32)
    return models[0].state_dict()


@pytest.mark.distributed
def test_ranks_go_through_the_table_of_adaptive_sgd(two_ranks: Ranks) -> None:
    """Batches, updates, weights and seconds are the note's; models those of the slow loop."""
    found = two_ranks.run(on_ranks, SWINGING, MERGE_BOOST, 9, SPEEDS)
    wanted = alone(SWINGING, MERGE_BOOST, 9)
    for rounds, state, lines in found:
        for number, batches, updates, weights, seconds in (
            (1, (512, 512), (26, 14), (0.715, 0.315), 14.336),
            (2, (544, 480), (25, 14), (0.7051, 0.3231), 13.6),
            (6, (672, 352), (20, 19), (0.5641, 0.4385), 13.44),
            (7, (704, 320), (19, 21), (0.4275, 0.5775), 13.44),
        ):
            own = rounds[number - 1]
            assert (own.batches, own.updates) == (batches, updates)
            assert own.weights == pytest.approx(weights, abs=1e-4)
            assert own.seconds == pytest.approx(seconds, abs=1e-3)
        assert lines[0] == (
            "window 1: 26/14 updates in 14.3 s; batches 512/512 -> 544/480 samples"
        )
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.distributed
def test_a_dead_band_ends_the_swing_also_after_a_checkpoint(two_ranks: Ranks) -> None:
    """The resumed run has the batches, measurements and weights of the uninterrupted one."""
    rule = default_rule(BATCH)
    whole = two_ranks.run(on_ranks, rule, 0.0, 8, SPEEDS)
    wanted = alone(rule, 0.0, 8)
    for (rounds, state, lines), (again, resumed, _) in zip(
        whole, two_ranks.run(on_ranks, rule, 0.0, 8, SPEEDS, 3), strict=True
    ):
        assert [each.batches for each in rounds[5:]] == [(672, 352)] * 3
        assert len(lines) == 5
        assert [(each.batches, each.updates) for each in again] == [
            (each.batches, each.updates) for each in rounds
        ]
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
            assert torch.equal(resumed[name], state[name])


@pytest.mark.distributed
def test_equal_ranks_keep_their_batches(two_ranks: Ranks) -> None:
    for rounds, _, lines in two_ranks.run(on_ranks, SWINGING, 0.0, 3, (700.0, 700.0)):
        assert {each.batches for each in rounds} == {(BATCH, BATCH)}
        assert not lines


def test_one_rank_trains_as_without() -> None:
    """Bit for bit, over two epochs whose last batch is short and has a smaller rate."""
    data = Points(100)
    model, plain = make_model(), make_model()
    optimizer, other = make_optimizer(model), make_optimizer(plain)
    elastic = ElasticAveraging(model, optimizer, batch_size=16, window=50)
    for epoch in range(2):
        for window in elastic.windows(data, collate_fn=as_it_is):
            for batch in window:
                step(model, optimizer, batch)
        order = torch.from_numpy(epoch_order(100, 0, epoch, shuffle=True))
        for chosen in torch.split(order, 16):
            other.param_groups[0]["lr"] = RATE * len(chosen) / 16
            step(plain, other, (data.inputs[chosen], data.targets[chosen]))
    assert elastic.batches == (16,)
    for own, value in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, value)


def unlike_state(rank: int) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """A model with a frozen layer and BatchNorm, of which each rank begins with its own."""
    torch.manual_seed(rank)
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    first.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([True, False]))
    told = Told()
    optimizer = make_optimizer(model)
    elastic = ElasticAveraging(
        model, optimizer, batch_size=8, window=70, speeds=(1.0, 3.0), clock=told.clock()
    )
    frozen = first.weight.clone()
    for _ in range(2):
        for window in elastic.windows(Points(150), collate_fn=as_it_is):
            for batch in window:
                told.now_s += len(batch[0])
                if len(batch[0]) > 1:  # of which BatchNorm knows a variance
                    step(model, optimizer, batch)
    assert torch.equal(first.weight, frozen)
    assert elastic.last is not None
    return model.state_dict(), elastic.last.updates


@pytest.mark.distributed
def test_all_ranks_have_one_model_after_a_window(two_ranks: Ranks) -> None:
    (first, updates), (second, _) = two_ranks.run(unlike_state)
    assert sum(updates) > 0
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 8, "window": 7}, "a window of 7 samples has no batch of 8 for each of 1"),
        ({"batch_size": 8, "window": 80, "speeds": (1.0, 2.0)}, "positive number for each of the"),
        (
            {"batch_size": 8, "window": 80, "rule": ElasticRule()},
            "8 samples and go in steps of 32",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    model = make_model()
    with pytest.raises(BalanceError, match=text):
        ElasticAveraging(model, make_optimizer(model), **options)


def test_a_window_is_not_left_half_way() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    elastic = ElasticAveraging(model, optimizer, batch_size=8, window=80)
    with pytest.raises(BalanceError, match="80 samples is longer than the data set of 60"):
        next(elastic.windows(Points(60)))
    for window in elastic.windows(Points(100), collate_fn=as_it_is):
        step(model, optimizer, next(window))
        break
    with pytest.raises(BalanceError, match="left before its last batch"):
        elastic.state_dict()
    with pytest.raises(BalanceError, match="version 0; this is 1"):
        elastic.load_state_dict({"version": 0})


@pytest.mark.parametrize(("batch_size", "numbers"), [(512, (32, 32, 1024)), (4, (1, 1, 8))])
def test_the_rule_grows_with_the_batch(batch_size: int, numbers: tuple[int, ...]) -> None:
    rule = default_rule(batch_size)
    assert (rule.step, rule.least, rule.most) == numbers


def measured(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First updates and last batches of ranks that sleep, by the clock on the wall.

    Until the slow rank has smaller batches: on a busy machine others may seem slow, too.
    """
    model = make_model()
    optimizer = make_optimizer(model)
    elastic = ElasticAveraging(
        model, optimizer, batch_size=8, window=120, rule=ElasticRule(step=1, least=1, most=12)
    )
    updates = []
    data = Points(960)
    windows = itertools.chain.from_iterable(
        elastic.windows(data, collate_fn=as_it_is) for _ in range(20)
    )
    for window in windows:
        for batch in window:
            time.sleep(0.002 * len(batch[0]) * (4 if rank == 2 else 1))
            step(model, optimizer, batch)
        assert elastic.last is not None
        updates.append(elastic.last.updates)
        if elastic.batches[2] < 8 < max(elastic.batches):  # known to all ranks alike
            break
    return updates[0], elastic.batches


@pytest.mark.distributed
def test_batches_follow_the_clock(ranks: Ranks) -> None:
    """The rank that takes four times as long gets fewer updates at once, then smaller batches."""
    found = ranks.run(measured)
    assert all(each == found[0] for each in found), "ranks differ"
    first, batches = found[0]
    assert first == (5, 5, 5)
    assert batches[2] < 8 < max(batches)
