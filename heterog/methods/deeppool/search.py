"""The dynamic program over layers and branches (Park et al., MLSys 2022, section 4), exact.

A layer graph is read as a *chain*: a sequence of layers in which a *block* may follow a layer, the
fork. A block has branches that all start from the fork and all end in one layer, the join. A
branch is a chain, or empty (a skip connection); blocks nest. In a graph that is not made of chains
and blocks, links that do not fit are ignored.

A layer runs on a *place*, ``(first, width)``: devices ``first`` to ``first + width - 1`` of an
ordered list. The global batch is fixed, so a wider place means fewer samples per device. A chain
runs on places that begin at the first device of its *lane*, so a device in the places of two
consecutive layers keeps its samples. Branches of a block either take turns on the front of the
lane, or run at the same time on their own lanes behind it. The program chooses the faster of both
together with the widths.

The iteration time is the longest path. Each layer must keep the *amplification limit*: its device
time, with the transfer to it, over its time on one device,

    A(l, g) = (t(l, g) + transfer) g / t(l, 1)  <=  limit,

unless it runs on a single device or is negligible. Unlike in the authors' program, every layer,
also the last one, is checked against the limit alone. So a larger limit never gives a longer
iteration, and the result is the optimum of this model (``tests`` compare it with brute force).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Branches between a fork (the layer before the block in its chain) and a join.

    Attributes:
        branches: One chain for each path from fork to join, in the order of their first layers; a
            direct link is an empty chain and comes last.
        join: Layer in which all branches end.
    """

    branches: "tuple[Chain, ...]"
    join: int


Chain: TypeAlias = tuple[int | Block, ...]


def fork_join(previous: Sequence[Sequence[int]]) -> Chain:
    """The chain of a whole graph.

    Args:
        previous: For each layer, the earlier layers that it is linked with.

    >>> fork_join([(), (0,), (0,), (1, 2)])
    (0, Block(branches=((1,), (2,)), join=3))
    """
    links = [(before, layer) for layer, inputs in enumerate(previous) for before in inputs]
    return _chain(list(range(len(previous))), links)


def layers_of(chain: Chain) -> Iterator[int]:
    """All layers of a chain, in its order."""
    for item in chain:
        if isinstance(item, Block):
            for branch in item.branches:
                yield from layers_of(branch)
            yield item.join
        else:
            yield item


def _chain(layers: list[int], links: list[tuple[int, int]]) -> Chain:
    """The chain of some layers and the links among them."""
    position = {layer: index for index, layer in enumerate(layers)}
    links = [link for link in links if link[0] in position and link[1] in position]
    # Number of links that skip each layer: at 0, every path goes through that layer.
    over = [0] * (len(layers) + 1)
    for before, layer in links:
        over[position[before] + 1] += 1
        over[position[layer]] -= 1
    passing, narrow = 0, []
    for index, change in enumerate(over[:-1]):
        passing += change
        if passing == 0 or index in (0, len(layers) - 1):
            narrow.append(index)
    items: list[int | Block] = [layers[0]]
    for left, right in pairwise(narrow):
        inside = layers[left + 1 : right]
        branches = [_chain(part, links) for part in _parts(inside, links)]
        if (layers[left], layers[right]) in links and branches:
            branches.append(())
        if len(branches) > 1:
            items.append(Block(branches=tuple(branches), join=layers[right]))
        else:
            items.extend([*(branches[0] if branches else ()), layers[right]])
    return tuple(items)


def _parts(layers: list[int], links: list[tuple[int, int]]) -> list[list[int]]:
    """Sets of layers that are linked with one another, directly or not."""
    import networkx  # type: ignore[import-untyped]  # takes 0.1 s; few who import this need it

    graph = networkx.Graph()
    graph.add_nodes_from(layers)
    graph.add_edges_from(link for link in links if link[0] in graph and link[1] in graph)
    return [sorted(part) for part in networkx.connected_components(graph)]


Place: TypeAlias = tuple[int, int]
"""(first device, number of devices)."""
_Lane: TypeAlias = tuple[int, int]


class LayerCosts(Protocol):
    """The costs of layers for the program, in one unit of time."""

    @property
    def widths(self) -> Sequence[int]:
        """Numbers of devices to choose from, ascending."""

    @property
    def negligible(self) -> float:
        """Layers that take no longer than this on one device are free of the limit."""

    def own(self, layer: int, place: Place) -> float:
        """Time of a layer's compute, forward and backward, and of its synchronisation."""

    def weight(self, place: Place) -> float:
        """Devices of a place, in units of the first device."""

    def transfer(self, source: int, at: Place, target: int, to: Place) -> float:
        """Time to move one layer's output to the next layer's place and its gradient back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """The place of each layer, and the resulting times.

    Attributes:
        time: Time of one iteration, in the unit of the costs.
        device_time: Sum over layers of time (with the transfers to them) times devices.
        places: Place of each layer.
    """

    time: float
    device_time: float
    places: tuple[Place, ...]


def search(
    costs: LayerCosts,
    chain: Chain,
    *,
    limit: float,
    num_devices: int,
    fork: bool = True,
    check: Callable[[], None] = lambda: None,
) -> BurstPlan:
    """The fastest places under an amplification limit.

    Args:
        costs: Costs of layers and transfers.
        chain: The layers.
        limit: Largest amplification allowed.
        num_devices: Number of devices.
        fork: Whether branches may run at the same time on devices of their own.
        check: Called often; an exception from it ends the search.
    """
    program = _Program(costs, limit, fork, check)
    ends = program.chain(chain, (0, num_devices), None)
    best = min(ends.values(), key=lambda path: path.time)
    places = dict(best.steps())
    order = [places[layer] for layer in range(len(places))]
    return BurstPlan(time=best.time, device_time=best.device_time, places=tuple(order))


class _Path(NamedTuple):
    """The fastest way to a layer at a place."""

    time: float
    device_time: float
    layer: int
    place: Place
    before: "_Path | None"
    branches: "tuple[_Path | None, ...]" = ()

    def steps(self) -> Iterator[tuple[int, Place]]:
        """Layers and places on the way, branches included, last first."""
        path: _Path | None = self
        while path is not None:
            yield path.layer, path.place
            for branch in path.branches:
                if branch is not None:
                    yield from branch.steps()
            path = path.before


_Paths: TypeAlias = dict[Place, _Path]


class _Lanes(NamedTuple):
    """Some of a block's branches, each with its place."""

    front: float  # time of the branches that take turns on the lane's front
    beside: float  # time of the longest of the others
    device_time: float
    used: int  # devices from the front of the lane
    ends: tuple[_Path | None, ...]

    @property
    def time(self) -> float:
        return max(self.front, self.beside)


class _Program:
    def __init__(
        self, costs: LayerCosts, limit: float, fork: bool, check: Callable[[], None]
    ) -> None:
        self.check = check
        self.widths = tuple(costs.widths)
        self.negligible = costs.negligible
        self.limit = limit
        self.fork = fork
        # Called again for every lane.
        self.own, self.weight = cache(costs.own), cache(costs.weight)
        self.transfer = cache(costs.transfer)

    def chain(self, chain: Chain, lane: _Lane, start: tuple[int, Place] | None) -> _Paths:
        """Fastest ways to the end of a chain inside a lane, from time 0 after a fork."""
        paths: _Paths = {}
        layer = -1
        for item in chain:
            self.check()
            if isinstance(item, Block):
                paths = self._block(item, layer, paths, lane)
                layer = item.join
                continue
            paths = (
                self._first(item, lane, start)
                if layer < 0
                else self._next(item, layer, paths, lane)
            )
            layer = item
        return paths

    def _places(self, lane: _Lane) -> list[Place]:
        return [(lane[0], width) for width in self.widths if width <= lane[1]]

    def _cost(self, layer: int, place: Place, moved: float) -> tuple[float, float] | None:
        """(time, device time) of a layer with the transfer to it; ``None`` above the limit."""
        time = self.own(layer, place) + moved
        device_time = time * self.weight(place)
        alone = self.own(layer, (0, 1))  # the first device with the whole batch
        is_free = place[1] == self.widths[0] or alone <= self.negligible
        if not is_free and device_time > self.limit * alone:
            return None
        return time, device_time

    def _first(self, layer: int, lane: _Lane, start: tuple[int, Place] | None) -> _Paths:
        def moved(place: Place) -> float:
            return 0.0 if start is None else self.transfer(*start, layer, place)

        costs = {place: self._cost(layer, place, moved(place)) for place in self._places(lane)}
        return {
            place: _Path(*cost, layer, place, None)
            for place, cost in costs.items()
            if cost is not None
        }

    def _next(self, layer: int, source: int, paths: _Paths, lane: _Lane) -> _Paths:
        found: _Paths = {}
        for place in self._places(lane):
            self.check()
            for at, path in paths.items():
                moved = self.transfer(source, at, layer, place)
                cost = self._cost(layer, place, moved)
                if cost is None:
                    continue
                time = path.time + cost[0]
                if place not in found or time < found[place].time:
                    found[place] = _Path(time, path.device_time + cost[1], layer, place, path)
        return found

    def _block(self, block: Block, fork: int, paths: _Paths, lane: _Lane) -> _Paths:
        found: _Paths = {}
        reached: dict[tuple[int, Place, _Lane], _Paths] = {}
        for at, path in paths.items():
            for place in self._places(lane):
                lanes = self._lanes(block, (fork, at), place, lane, reached)
                cost = self._cost(block.join, place, 0.0)
                if lanes is None or cost is None:
                    continue
                time = path.time + lanes.time + cost[0]
                if place not in found or time < found[place].time:
                    device_time = path.device_time + lanes.device_time + cost[1]
                    found[place] = _Path(time, device_time, block.join, place, path, lanes.ends)
        return found

    def _lanes(
        self,
        block: Block,
        start: tuple[int, Place],
        join: Place,
        lane: _Lane,
        reached: dict[tuple[int, Place, _Lane], _Paths],
    ) -> _Lanes | None:
        """The fastest arrangement of a block's branches between two places.

        For each size of the front, branches are added one by one, each to the front or to a new
        lane behind the devices in use. Dominated arrangements are dropped.
        """
        best: _Lanes | None = None
        sizes = [width for width in self.widths if width <= lane[1]]
        # A single branch (beside a skip connection) has no other branch to share devices with.
        forks = self.fork and sum(map(bool, block.branches)) > 1
        for front in sizes if forks else sizes[-1:]:
            kept = [_Lanes(0.0, 0.0, 0.0, front, ())]
            for number, branch in enumerate(block.branches):
                grown: list[_Lanes] = []
                for lanes in kept:
                    options = [(lane[0], front)]
                    if forks and branch:
                        room = lane[1] - lanes.used
                        options += [(lane[0] + lanes.used, size) for size in sizes if size <= room]
                    for own in options:
                        key = (number, start[1], own)
                        if branch and key not in reached:
                            reached[key] = self.chain(branch, own, start)
                        arrived = self._arrive(
                            block.join, join, start, reached[key] if branch else None
                        )
                        if arrived is not None:
                            grown.append(_add(lanes, *arrived, own[0] == lane[0], own[1]))
                kept = _undominated(grown)
            for lanes in kept:
                if best is None or (lanes.time, lanes.device_time) < (best.time, best.device_time):
                    best = lanes
        return best

    def _arrive(
        self, join: int, place: Place, start: tuple[int, Place], paths: _Paths | None
    ) -> tuple[float, float, _Path | None] | None:
        """(time, device time, path) of a branch's fastest way to the join, if the limit allows."""
        if paths is None:
            options: list[tuple[float, float, _Path | None]] = [
                (self.transfer(*start, join, place), 0.0, None)
            ]
        else:
            options = [
                (self.transfer(path.layer, at, join, place), path.device_time, path)
                for at, path in paths.items()
            ]
        best: tuple[float, float, _Path | None] | None = None
        for moved, device_time, way in options:
            if self._cost(join, place, moved) is None:
                continue
            time = moved + (0.0 if way is None else way.time)
            if best is None or time < best[0]:
                best = time, device_time + moved * self.weight(place), way
        return best


def _add(
    lanes: _Lanes, time: float, device_time: float, way: _Path | None, at_front: bool, size: int
) -> _Lanes:
    return _Lanes(
        front=lanes.front + (time if at_front else 0.0),
        beside=max(lanes.beside, 0.0 if at_front else time),
        device_time=lanes.device_time + device_time,
        used=lanes.used + (0 if at_front else size),
        ends=(*lanes.ends, way),
    )


def _undominated(lanes: list[_Lanes]) -> list[_Lanes]:
    """Arrangements that no other equals or beats in all of front time, other time and devices."""
    kept: list[_Lanes] = []
    for one in sorted(lanes, key=lambda each: (each.front, each.beside, each.used)):
        if not any(
            other.front <= one.front and other.beside <= one.beside and other.used <= one.used
            for other in kept
        ):
            kept.append(one)
    return kept
