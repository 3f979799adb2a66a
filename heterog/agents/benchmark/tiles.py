"""The suite ``placement``: graphs of tiled products on equal devices, as DOPPLER places them.

DOPPLER's six graphs (Yao et al., arXiv 2505.23131) are not available here; ours imitate them:
chains of products, a feed-forward network, an attention block and a whole layer, cut into tiles. A
tile's product takes ``t`` units, sums and elementwise operations ``t / 10,000``. As in DOPPLER's
graphs, sending a value to another device takes four times as long as making it. ``chain`` has as
many operations (76) and as much work (4800.28) as DOPPLER's, but other edges. Each operation is a
group, and the batch has one sample, so a decision is a single device.

``doppler_units`` is DOPPLER's own score, a second referee for the same placements.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from heterog.agents.benchmark.pair_lists import PairLine
from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.graph.op_graph import GraphOp, GraphTensor, OpGraph, Phase, TensorKind
from heterog.graph.placement import P, S
from heterog.strategy.strategy import Strategy

UNIT_S = 1e-6
"""Seconds of a unit of work in the simulated graph."""
TRAVEL = 4.0
"""Ratio of the time to send a value to the time to make it."""
SMALL = 1e-4
"""Ratio of the work of a sum or an elementwise operation to the product of a tile."""
_TYPE = "V100-16GB"
_BYTES_PER_S = 1e11  # of the link; sizes of tensors are chosen for it

Grid = list[list[int]]
"""Number of the operation that makes each tile of a matrix."""


class Node(NamedTuple):
    """An operation: its work in units, and the operations that it reads."""

    work: float
    reads: tuple[int, ...]


@dataclass(slots=True)
class Tiled:
    """A graph under construction; matrices are ``side`` by ``side`` tiles, ``None`` is an input.

    Attributes:
        side: Number of tiles along each side.
        unit: Work of a tile's product.
        nodes: Operations, in topological order.
    """

    side: int
    unit: float = 1.0
    nodes: list[Node] = field(default_factory=list)

    def _add(self, work: float, *reads: int) -> int:
        self.nodes.append(Node(work, reads))
        return len(self.nodes) - 1

    def product(self, left: Grid | None, right: Grid | None) -> Grid:
        """A product: ``side`` products of tiles for each tile, and their sum."""
        every = range(self.side)

        def tile(row: int, column: int) -> int:
            parts = [
                self._add(
                    self.unit,
                    *([left[row][k]] if left else ()),
                    *([right[k][column]] if right else ()),
                )
                for k in every
            ]
            return self._add(SMALL * self.unit, *parts)

        return [[tile(row, column) for column in every] for row in every]

    def each(self, *grids: Grid) -> Grid:
        """An elementwise operation on matrices."""
        every = range(self.side)
        return [
            [self._add(SMALL * self.unit, *(grid[r][c] for grid in grids)) for c in every]
            for r in every
        ]

    def by_row(self, grid: Grid) -> Grid:
        """A softmax or a norm: a sum over each row, and each tile divided by it."""
        sums = [self._add(SMALL * self.unit, *row) for row in grid]
        return [
            [self._add(SMALL * self.unit, tile, total) for tile in row]
            for row, total in zip(grid, sums, strict=True)
        ]


def _chain() -> Tiled:
    """``((A B) C + (D E) F) G H``."""
    made = Tiled(side=2, unit=100.0)
    first, second = made.product(None, None), made.product(None, None)
    left, right = made.product(first, None), made.product(second, None)
    made.product(made.product(made.each(left, right), None), None)
    return made


def _feed_forward(made: Tiled, value: Grid | None) -> Grid:
    return made.product(made.each(made.product(value, None)), None)


def _attention(made: Tiled, heads: int) -> Grid:
    """Heads of attention, whose outputs are projected and added up."""
    found = []
    for _ in range(heads):
        query, key, value = (made.product(None, None) for _ in range(3))
        weights = made.by_row(made.product(query, key))
        found.append(made.product(made.product(weights, value), None))
    return made.by_row(made.each(*found))


def _ffn() -> Tiled:
    made = Tiled(side=4)
    _feed_forward(made, None)
    return made


def _block(heads: int, *, is_layer: bool) -> Tiled:
    made = Tiled(side=2, unit=4.0)
    value = _attention(made, heads)
    if is_layer:
        made.by_row(made.each(value, _feed_forward(made, value)))
    return made


_GRAPHS = {
    "tiled_chain": (_chain, 4),
    "tiled_ffn": (_ffn, 4),
    "tiled_block": (lambda: _block(2, is_layer=False), 4),
    "tiled_layer": (lambda: _block(2, is_layer=True), 4),
    "tiled_block_8": (lambda: _block(4, is_layer=False), 8),
    "tiled_layer_8": (lambda: _block(4, is_layer=True), 8),
}


@cache
def nodes_of(name: str) -> tuple[Node, ...]:
    """Operations of a graph of the suite."""
    return tuple(_GRAPHS[name][0]().nodes)


def graph_of(name: str, nodes: Sequence[Node], travel: float = TRAVEL) -> OpGraph:
    """Operations as a graph: a forward pass only, a batch of one, and given seconds for each op.

    Args:
        name: Name of the graph.
        nodes: Its operations.
        travel: Ratio of the time to send a value to the time to make it.
    """

    def tensor(work: float, kind: TensorKind = TensorKind.ACTIVATION) -> GraphTensor:
        size = max(round(travel * work * UNIT_S * _BYTES_PER_S / 4), 1)
        name = "x" if kind == TensorKind.BATCH else ""
        return GraphTensor(shape=(1, size), dtype="float32", kind=kind, name=name)

    tensors = [tensor(0.0, TensorKind.BATCH), *(tensor(node.work) for node in nodes)]
    tensors.append(GraphTensor(shape=(), dtype="float32"))
    is_read = {each for node in nodes for each in node.reads}
    last = tuple(1 + number for number in range(len(nodes)) if number not in is_read)
    calls = [(tuple(1 + each for each in node.reads) or (0,), node.work) for node in nodes]
    ops = [
        GraphOp(
            kind="tile" if number < len(nodes) else "loss",
            args={},
            inputs=inputs,
            num_outputs=1,
            phase=Phase.FORWARD,
            module=f"tiles.{min(number, len(nodes) - 1)}",
            flops=work,
            bytes_read=0.0,
            bytes_written=0.0,
            rule=((S(0),) * len(inputs), (S(0) if number < len(nodes) else P,)),
            measured_s=((_TYPE, work * UNIT_S),),
        )
        for number, (inputs, work) in enumerate([*calls, (last, 0.0)])
    ]
    return OpGraph(
        name=name,
        source="",
        batch_size=1,
        tensors=tuple(tensors),
        ops=tuple(ops),
        batch_placements=(S(0),),
        optimizer="SGD",
        optimizer_state_ratio=0.0,
        loss=len(tensors) - 1,
    )


def equal_devices(count: int) -> Cluster:
    """One host of equal devices."""
    link = Link(kind="tiles", bandwidth_bytes_per_s=_BYTES_PER_S, latency_s=0.0)
    host = Host(name="a", nic_line_rate_bytes_per_s=_BYTES_PER_S, intra=link)
    kind = device_type(_TYPE)
    devices = tuple(
        Device(name=f"a:{number}", type=kind, host_index=0, usable_memory_bytes=2**33)
        for number in range(count)
    )
    return Cluster(name=f"equal_{count}", hosts=(host,), devices=devices, efficiency=1.0)


class PlacementPair(PairLine):
    """A graph of the suite on equal devices."""

    def load(self, graphs: object) -> tuple[OpGraph, Cluster]:
        """Graph and cluster."""
        return graph_of(self.model, nodes_of(self.model)), equal_devices(_GRAPHS[self.model][1])


def placement_pairs() -> list[PairLine]:
    """The pairs of the suite."""
    return [
        PlacementPair(name, f"equal_{count}", f"{name} equal_{count}")
        for name, (_, count) in _GRAPHS.items()
    ]


def doppler_units(nodes: Sequence[Node], device_of: Sequence[int]) -> float:
    """DOPPLER's score of a placement: the end of the last operation, in units.

    A device runs one operation at a time, in the order in which their last inputs arrive, ties by
    number. Sending a value to another device takes ``TRAVEL`` times its maker's work; links are
    never busy, and memory is not checked.
    """
    readers: list[list[int]] = [[] for _ in nodes]
    missing = [len(set(node.reads)) for node in nodes]
    for number, node in enumerate(nodes):
        for maker in dict.fromkeys(node.reads):
            readers[maker].append(number)
    arrived = [0.0] * len(nodes)
    # An event is (time, 0 for an arrival or 1 for a free device, operation or device).
    events = [(0.0, 0, number) for number, count in enumerate(missing) if not count]
    waiting: dict[int, list[tuple[float, int]]] = {device: [] for device in device_of}
    free_at = dict.fromkeys(waiting, 0.0)
    end = 0.0
    heapq.heapify(events)
    while events:
        now = events[0][0]
        woken = set()
        while events and events[0][0] <= now:
            _, is_free, number = heapq.heappop(events)
            device = number if is_free else device_of[number]
            woken.add(device)
            if not is_free:
                heapq.heappush(waiting[device], (now, number))
        for device in sorted(woken):
            if not waiting[device] or free_at[device] > now:
                continue
            _, number = heapq.heappop(waiting[device])
            done = free_at[device] = now + nodes[number].work
            end = max(end, done)
            heapq.heappush(events, (done, 1, device))
            for reader in readers[number]:
                away = device_of[reader] != device
                arrival = done + TRAVEL * nodes[number].work * away
                arrived[reader] = max(arrived[reader], arrival)
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(events, (arrived[reader], 0, reader))
    return end


def placed_s(graph: OpGraph, strategy: Strategy) -> float | None:
    """Seconds of a placement by ``doppler_units``; ``None`` for graphs of other suites."""
    if graph.name not in _GRAPHS:
        return None
    devices = [decision.devices[0] for decision in strategy.decisions]
    return UNIT_S * doppler_units(nodes_of(graph.name), devices)
