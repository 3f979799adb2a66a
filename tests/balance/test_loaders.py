"""Several loaders of a balancer, passes that are left, states of them, and BatchNorm."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from heterog.balance import BalanceError, Balancer
from heterog.balance.sampler import BalancedLoader
from heterog.balance.shares import epoch_order, without_singles
from tests.runtime.ranks import Ranks

SHARES = (6, 2)


class Numbers(Dataset[int]):
    """Samples that are their own index."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def balancer_of(**options: Any) -> Balancer:
    return Balancer(**{"global_batch_size": 8, "interval": 0, **options})


def one_pass(loader: BalancedLoader, limit: int = 99) -> list[list[int]]:
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == limit:
            break
    return found


def epoch(number: int, size: int, batch: int = 8) -> list[list[int]]:
    order = torch.from_numpy(epoch_order(size, 0, number, shuffle=True))
    return [part.tolist() for part in torch.split(order, batch)]


def train(balancer: Balancer, model: nn.Module, batch: Tensor) -> Tensor:
    loss = balancer.weigh(model(batch[:, None].float()).mean())
    torch.autograd.backward(loss)
    return loss


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}, {"drop_last": True}],
    ids=str,
)
def test_a_pass_that_is_left_is_followed_by_the_next_epoch(options: dict[str, Any]) -> None:
    loader = balancer_of().loader(Numbers(29), **options)
    for number in range(3):
        assert one_pass(loader, limit=2) == epoch(number, 29)[:2]
    whole = epoch(3, 29)
    assert one_pass(loader) == (whole[:-1] if "drop_last" in options else whole)


def test_batches_of_tokens_go_on_after_a_break() -> None:
    balancer, lengths = balancer_of(), [1 + index % 4 for index in range(29)]
    loader = balancer.loader(Numbers(29), lengths=lengths)
    batches = balancer.global_batches(Numbers(29), lengths=lengths)
    for number in range(3):
        first = [sorted(batch) for batch in one_pass(loader, limit=2)]
        assert first == [sorted(batches.batch(number, step).tolist()) for step in range(2)]


def test_an_epoch_that_is_asked_for_is_dealt_again() -> None:
    loader = balancer_of().loader(Numbers(29))
    for number in (0, 0, 2, 2):
        loader.set_epoch(number)
        assert one_pass(loader, limit=2) == epoch(number, 29)[:2]
    iter(loader)  # frameworks make iterators that they never use
    assert one_pass(loader) == epoch(3, 29)


def test_a_state_is_of_the_loader_that_is_trained_with() -> None:
    """Validation is made first, runs inside a step, and between passes."""
    model = nn.Linear(1, 1)
    balancer = balancer_of(model=model)
    val = balancer.loader(Numbers(11), shuffle=False)
    loader = balancer.loader(Numbers(29))
    for step, batch in enumerate(loader):
        with torch.no_grad():
            for other in val:
                balancer.weigh(model(other[:, None].float()).mean())
        train(balancer, model, batch)
        done = balancer.state_dict()
        assert (done["sampler"]["epoch"], done["sampler"]["num_done"]) in [(0, step + 1), (1, 0)]
        if step == 1:
            kept = done
    one_pass(val)
    assert balancer.state_dict()["sampler"]["epoch"] == 1

    again = balancer_of()
    val, loader = again.loader(Numbers(11), shuffle=False), again.loader(Numbers(29))
    again.load_state_dict(kept)
    assert len(loader) == 4
    assert one_pass(loader) == epoch(0, 29)[2:]
    assert one_pass(loader) == epoch(1, 29)


def test_a_loss_is_weighed_by_its_own_step_although_validation_runs_inside() -> None:
    model = nn.Linear(1, 1)
    balancer = balancer_of(model=model)
    loader, val = balancer.loader(Numbers(16)), balancer.loader(Numbers(11), shuffle=False)
    for batch in loader:
        loss = train(balancer, model, batch)
        with torch.no_grad():
            left = iter(val)  # and is left open, as Lightning does
            balancer.weigh(model(next(left)[:, None].float()).mean())
        train(balancer, model, batch)
        assert balancer.mean_loss() == pytest.approx(2 * loss.item())


def change_shares(rank: int) -> list[Any]:
    """Shares of a validation loader follow those of training, measured in training alone."""
    model = nn.Linear(1, 1)
    balancer = Balancer(
        model, global_batch_size=8, shares=SHARES, interval=2, check_replicas=False
    )
    val, loader = balancer.loader(Numbers(16), shuffle=False), balancer.loader(Numbers(80))
    found: list[Any] = []
    for step, batch in enumerate(loader):
        train(balancer, model, batch)
        balancer.average_gradients()
        if step == 3:
            loader.share_sampler.set_shares((4, 4), from_step=8)
            balancer._share_with_others(loader.share_sampler)
            found += [len(each) for each in val]
    return [*found, balancer.shares]


@pytest.mark.distributed
def test_validation_is_dealt_in_the_shares_of_training(two_ranks: Ranks) -> None:
    assert [found[:2] for found in two_ranks.run(change_shares)] == [[4, 4], [4, 4]]


def weigh_two(rank: int, sizes: tuple[int, int]) -> int:
    model = nn.Linear(1, 1)
    balancer = balancer_of(shares=SHARES)
    first, second = (balancer.loader(Numbers(size), seed=size) for size in sizes)
    count = 0
    for batch, other in zip(first, second, strict=False):
        train(balancer, model, torch.cat([batch, other]))
        count += 1
    return count


@pytest.mark.distributed
def test_loaders_beside_each_other_are_weighed_where_their_parts_are_alike(
    two_ranks: Ranks,
) -> None:
    assert two_ranks.run(weigh_two, (16, 32)) == [2, 2]
    with pytest.raises(AssertionError, match="in steps of several loaders at once"):
        two_ranks.run(weigh_two, (17, 32))


def take_ahead(balancer: Balancer, model: nn.Module) -> None:
    batches = iter(balancer.loader(Numbers(29)))
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        train(balancer, model, batch)
        batch = following


def two_passes_at_once(balancer: Balancer, model: nn.Module) -> None:
    loader = balancer.loader(Numbers(29))
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    next(first)


def other_seed(balancer: Balancer, model: nn.Module) -> None:
    one_pass(balancer.loader(Numbers(29)), limit=2)
    other = balancer_of()
    other.loader(Numbers(29), seed=1)
    other.load_state_dict(balancer.state_dict())


class Stream(IterableDataset[int]):
    """Numbers one after another, of which it counts those that are read."""

    def __init__(self, size: int, begin: int = 0) -> None:
        self.size, self.place, self.num_read = size, begin, 0

    def __iter__(self) -> Iterator[int]:
        begin, self.place = self.place, 0
        for place in range(begin, self.size):
            self.place, self.num_read = place + 1, self.num_read + 1
            yield place
        self.place = 0


class Stateful(Stream):
    """A stream that knows its position."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stream", [Stream, Stateful])
def test_a_stream_goes_on_in_its_middle(stream: type[Stream], num_workers: int) -> None:
    """Every sample once, in other shares; a stream that knows its position is not read again."""
    first = balancer_of()
    loader = first.loader(stream(27), num_workers=num_workers)
    assert one_pass(loader, 2) == [list(range(8)), list(range(8, 16))]
    state = first.state_dict()
    again, second = stream(27), balancer_of()
    loader = second.loader(again, num_workers=num_workers)
    second.load_state_dict(state)
    assert one_pass(loader) == [list(range(16, 24)), [24, 25, 26]]
    if not num_workers:
        assert again.num_read == (11 if stream is Stateful else 27)
    assert one_pass(loader, 1) == [list(range(8))]
    with pytest.raises(TypeError, match="has no length"):
        len(loader)


class Forgetful(Stateful):
    """A stream whose state is without a sample that it has read ahead."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place + 1}


def test_a_stream_that_loses_samples_is_told_of() -> None:
    first, second = balancer_of(), balancer_of()
    one_pass(first.loader(Forgetful(27)), 1)
    loader = second.loader(Forgetful(27))
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="Forgetful goes on with another sample"):
        assert one_pass(loader)[0][0] == 9


class Divided(Stream):
    """Each worker reads a part of its own."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(range(number, self.size, count))


def test_two_workers_read_every_sample_once_or_are_refused() -> None:
    first, second = balancer_of(), balancer_of()
    begun = one_pass(first.loader(Divided(21), num_workers=2), 1)
    loader = second.loader(Divided(21), num_workers=2)
    second.load_state_dict(first.state_dict())
    dealt = [sample for batch in begun + one_pass(loader) for sample in batch]
    assert sorted(dealt) == list(range(21))
    with pytest.raises(BalanceError, match="each of 2 workers reads all of the Stream"):
        next(iter(second.loader(Stream(21), num_workers=2)))


@pytest.mark.parametrize("size", [23, 24])
def test_the_last_batch_of_a_stream_is_known_or_dropped(size: int) -> None:
    balancer = balancer_of()
    loader = balancer.loader(Stream(size), drop_last=True)
    sampler = loader.share_sampler
    known = [(sampler.num_done, sampler.num_steps == sampler.num_done) for _ in loader]
    assert known == [(1, False), (2, size < 24), (3, True)][: size // 8]
    assert list(balancer.loader(Stream(0))) == []


def read_other_streams(rank: int) -> None:
    next(iter(balancer_of().loader(Stream(9, begin=rank))))


@pytest.mark.distributed
def test_ranks_with_other_streams_are_refused(two_ranks: Ranks) -> None:
    with pytest.raises(Exception, match="Stream gives rank 1 another first sample than rank 0"):
        two_ranks.run(read_other_streams)


def stream_for_a_position(balancer: Balancer, _: nn.Module) -> None:
    source = balancer_of()
    one_pass(source.loader(Stateful(27)), 1)
    balancer.loader(Stream(27))
    balancer.load_state_dict(source.state_dict())


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (take_ahead, "a loss was weighed after the last step"),
        (two_passes_at_once, "another pass of its loader has begun since"),
        (other_seed, "the data, seed, shuffle or drop_last differ"),
        (lambda balancer, _: balancer.loader(Stream(3), shuffle=True), "a stream, whose order"),
        (lambda balancer, _: balancer.loader(Stream(3), lengths=[1]), "have no lengths before"),
        (lambda balancer, _: balancer.loader(object()), "object has no length"),
        (stream_for_a_position, "a Stream has no load_state_dict"),
    ],
    ids=["takes ahead", "two passes", "other seed", "order", "lengths", "object", "position"],
)
def test_what_would_train_with_other_data_is_refused(
    mistake: Callable[[Balancer, nn.Module], Any], text: str
) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(BalanceError, match=text):
        mistake(balancer_of(model=model), model)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(lambda counts: sum(counts) > 1))
def test_no_rank_has_a_single_sample(counts: list[int]) -> None:
    found = without_singles(counts)
    assert sum(found) == sum(counts)
    assert 1 not in found
    assert all(abs(a - b) <= len(counts) for a, b in zip(counts, found, strict=True))


def norms_at_the_end(rank: int, size: int) -> tuple[list[int], bool, bool]:
    """Samples run in each step, and what the last step changed of BatchNorm."""
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    balancer = balancer_of(model=model, shares=SHARES)
    found = []
    for batch in balancer.loader(Numbers(size)):
        before = norm.running_mean.clone()
        found.append(len(batch))
        train(balancer, model, batch)
    return found, bool((before != norm.running_mean).any()), norm.momentum == 0.1


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "last", "changed"),
    [(18, (2, 2), (True, False)), (19, (3, 2), (True, False)), (20, (2, 2), (True, True))],
)
def test_batch_norm_never_runs_one_sample_and_keeps_statistics_without_any(
    two_ranks: Ranks, size: int, last: tuple[int, int], changed: tuple[bool, bool]
) -> None:
    found = two_ranks.run(norms_at_the_end, size)
    assert tuple(sizes[-1] for sizes, _, _ in found) == last
    assert tuple(has_changed for _, has_changed, _ in found) == changed
    assert all(is_restored for _, _, is_restored in found)


def shares_with_one(rank: int) -> tuple[list[str], int]:
    """What is said about a share of one sample, and how many this rank is dealt."""
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    with warnings.catch_warnings(record=True) as caught:
        balancer = balancer_of(model=model, shares=(7, 1))
        loader = balancer.loader(Numbers(8))
    return [str(each.message) for each in caught], len(next(iter(loader)))


@pytest.mark.distributed
def test_a_share_of_one_that_batch_norm_refuses_is_named(two_ranks: Ranks) -> None:
    (told, own), (nothing, other) = two_ranks.run(shares_with_one)
    assert told == [
        "shares (7, 1) give a rank one sample, which BatchNorm refuses in training: dealt as "
        "(6, 2)."
    ]
    assert (own, other, nothing) == (6, 2, [])
