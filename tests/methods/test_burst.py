"""The burst-parallel program against brute force."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterog.methods.deeppool.search import Block, Chain, Place, fork_join, layers_of, search
from tests.thorough import one_in

CHAIN = [(), (0,), (1,), (2,)]
BRANCHES = [(), (0,), (0,), (2,), (1, 3)]
SKIP = [(), (0,), (0, 1), (2,)]
NESTED = [(), (0,), (0,), (2,), (2,), (3, 4), (1, 5)]


class Costs:
    """Random costs that depend on widths, and on whether two places overlap."""

    negligible = 0.1

    def __init__(self, seed: int, widths: Sequence[int] = (1, 2, 4)) -> None:
        self.widths = widths
        self._seed = seed

    def _random(self, *key: object) -> float:
        return random.Random(f"{self._seed} {key}").random()

    def own(self, layer: int, place: Place) -> float:
        return (0.3 + self._random(layer, place[1])) / math.sqrt(place[1])

    def weight(self, place: Place) -> float:
        return float(place[1])

    def transfer(self, source: int, at: Place, target: int, to: Place) -> float:
        if at == to:
            return 0.0
        apart = at[0] + at[1] <= to[0] or to[0] + to[1] <= at[0]
        return self._random(source, at[1], target, to[1]) * (0.4 if apart else 0.2)


def step_time(
    costs: Costs, chain: Chain, places: Sequence[Place], limit: float, num_devices: int
) -> float | None:
    """Seconds of a choice of places, slowly; ``None`` if it is not allowed."""

    def cost(layer: int, moved: float) -> float:
        place = places[layer]
        time = costs.own(layer, place) + moved
        alone = costs.own(layer, (0, 1))
        is_free = place[1] == 1 or alone <= costs.negligible
        if not is_free and time * place[1] > limit * alone:
            raise ValueError
        return time

    def walk(chain: Chain, first: int, size: int, before: int | None) -> float:
        time = 0.0
        for item in chain:
            layer = item.join if isinstance(item, Block) else item
            if places[layer][0] != first or places[layer][1] > size:
                raise ValueError
            if isinstance(item, Block):
                assert before is not None
                time += beside(item, before, first, size) + cost(layer, 0.0)
            else:
                moved = 0.0
                if before is not None:
                    moved = costs.transfer(before, places[before], layer, places[layer])
                time += cost(layer, moved)
            before = layer
        return time

    def beside(block: Block, fork: int, first: int, size: int) -> float:
        front, others = 0.0, [0.0]
        taken: list[tuple[int, int]] = []
        front_end = first
        for branch in block.branches:
            at = places[next(layers_of(branch))][0] if branch else first
            end = max((sum(places[layer]) for layer in layers_of(branch)), default=first)
            last = max(layers_of(branch), default=fork)
            time = walk(branch, at, first + size - at, fork)
            moved = costs.transfer(last, places[last], block.join, places[block.join])
            cost(block.join, moved)
            if at == first:
                front += time + moved
                front_end = max(front_end, end)
            else:
                others.append(time + moved)
                taken.append((at, end))
        taken.append((first, front_end))
        taken.sort()
        if any(one[1] > two[0] for one, two in itertools.pairwise(taken)):
            raise ValueError
        return max(front, *others)

    try:
        return walk(chain, 0, num_devices, None)
    except ValueError:
        return None


def all_places(num_layers: int, in_branch: set[int], size: int) -> Iterator[tuple[Place, ...]]:
    anywhere = [(at, width) for width in (1, 2, 4) for at in range(size - width + 1)]
    front = [place for place in anywhere if place[0] == 0]
    yield from itertools.product(
        *(anywhere if layer in in_branch else front for layer in range(num_layers))
    )


@one_in(2)
@pytest.mark.parametrize("limit", [math.inf, 1.6, 1.1])
@pytest.mark.parametrize("previous", [CHAIN, BRANCHES, SKIP], ids=["chain", "branches", "skip"])
def test_the_program_finds_what_brute_force_finds(
    previous: Sequence[Sequence[int]], limit: float
) -> None:
    chain = fork_join(previous)
    in_branch = {
        layer
        for item in chain
        # A branch alone stays in front: it has nobody to make way for.
        if isinstance(item, Block) and all(item.branches)
        for branch in item.branches
        for layer in layers_of(branch)
    }
    for seed in range(4):
        costs = Costs(seed)
        plan = search(costs, chain, limit=limit, num_devices=4)
        times = [
            step_time(costs, chain, places, limit, 4)
            for places in all_places(len(previous), in_branch, 4)
        ]
        assert plan.time == pytest.approx(min(time for time in times if time is not None))
        assert step_time(costs, chain, plan.places, limit, 4) == pytest.approx(plan.time)


def test_nested_branches_run_as_planned() -> None:
    chain = fork_join(NESTED)
    for seed in range(10):
        costs = Costs(seed)
        plan = search(costs, chain, limit=1.5, num_devices=4)
        assert step_time(costs, chain, plan.places, 1.5, 4) == pytest.approx(plan.time)
        one_by_one = search(costs, chain, limit=1.5, num_devices=4, fork=False)
        assert plan.time <= one_by_one.time
        assert {first for first, _ in one_by_one.places} == {0}


def test_a_larger_limit_never_gives_a_longer_iteration() -> None:
    for seed in range(10):
        for previous in (CHAIN, BRANCHES, NESTED):
            chain = fork_join(previous)
            times = [
                search(Costs(seed), chain, limit=limit, num_devices=4).time
                for limit in (1.0, 1.2, 1.5, 2.0, math.inf)
            ]
            assert times == sorted(times, reverse=True)


class Halves(Costs):
    """Perfect scaling for even layers, none for odd ones; moving costs 0.1."""

    def own(self, layer: int, place: Place) -> float:
        return 1.0 / place[1] if layer % 2 == 0 else 1.0

    def transfer(self, source: int, at: Place, target: int, to: Place) -> float:
        return 0.0 if at == to else 0.1


def test_layers_burst_by_hand() -> None:
    chain = fork_join(CHAIN)
    free = search(Halves(0), chain, limit=math.inf, num_devices=4)
    assert [width for _, width in free.places] == [4, 4, 4, 4]
    assert (free.time, free.device_time) == pytest.approx((2.5, 10.0))
    # On four devices an odd layer takes four times its own device time; moving costs less. To be
    # back on four, an even layer pays (0.25 + 0.1) x 4 = 1.4 times, and no more than 1.4.
    tight = search(Halves(0), chain, limit=1.5, num_devices=4)
    assert [width for _, width in tight.places] == [4, 1, 4, 1]
    assert tight.time == pytest.approx(0.25 + 1.1 + 0.35 + 1.1)
    least = search(Halves(0), chain, limit=1.3, num_devices=4)
    assert [width for _, width in least.places] == [4, 1, 2, 1]


def test_blocks_are_found() -> None:
    inner = Block(branches=((3,), (4,)), join=5)
    assert fork_join(NESTED) == (0, Block(branches=((1,), (2, inner)), join=6))
    assert fork_join(SKIP) == (0, Block(branches=((1,), ()), join=2), 3)


def test_links_that_fit_nowhere_are_passed_over() -> None:
    # Two branches that look into each other, and a second source.
    crossed = [(), (0,), (0, 1), (1,), (2, 3)]
    assert list(layers_of(fork_join(crossed))) == [0, 1, 2, 3, 4]
    assert fork_join([(), (), (0, 1)]) == (0, Block(branches=((1,), ()), join=2))


@given(
    st.lists(st.sets(st.integers(1, 9), max_size=3), min_size=1, max_size=9),
)
def test_every_layer_is_in_the_chain_once(back: list[set[int]]) -> None:
    previous = [
        tuple(layer - step for step in steps if step <= layer) for layer, steps in enumerate(back)
    ]
    chain = fork_join(previous)
    assert sorted(layers_of(chain)) == list(range(len(back)))
    assert search(Costs(0), chain, limit=2.0, num_devices=4).time > 0
