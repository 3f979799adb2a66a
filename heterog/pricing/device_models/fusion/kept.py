"""Values of the forward pass that the backward pass keeps, and those that it computes again.

A pointwise loop that is fused with the backward loop that needs it costs nothing, so a compiler
saves less than the values that backward ops read. Which ones is a minimum cut: the graph is cut
between what the forward pass has and what the backward pass needs, where the fewest bytes pass
(``torch/_functorch/partitioners.py``, ``solve_min_cut``; He and Yu, "Transcending Runtime-Memory
Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023). Capacities and the steps that must
not be computed again are those of torch 2.13: a value that only fused loops read counts twice, one
that is further from the backward pass more, a parameter nothing.

Unlike there, norms and losses are cut at the steps of ``loops`` and not at single operators.
"""

import heapq
from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.pricing.device_models.fusion.steps import Step, Steps, Work

_FAR = 40
"""Steps from the backward pass beyond which the cost no longer grows: 1.1^40 is 45."""
_PER_STEP = 1.1
_TWICE = 2.0
_SMALLER = 4
"""Factor by which a result must be smaller than its inputs to be saved, whatever it is."""
_LONGEST_CHAIN = 100
_ENDLESS = 2**30


def kept_values(
    graph: OpGraph, lowered: Steps, follows: Sequence[bool], results: Set[int]
) -> frozenset[int]:
    """Values of the forward pass, inputs of the graph included, that the backward pass reads.

    Args:
        graph: One training step.
        lowered: Steps of the graph.
        follows: Whether each step needs the gradient of the loss; others could run in the forward
            pass.
        results: Values that the step is run for.
    """
    return _Cut(graph, lowered, follows, results).run()


def follows_loss(graph: OpGraph, lowered: Steps) -> list[bool]:
    """Whether each step needs the gradient of the loss, with which the backward pass begins.

    A mask that only the backward pass reads does not, though it is made there in the graph.
    """
    first = next(
        (index for index, op in enumerate(graph.ops) if op.phase == Phase.BACKWARD), graph.num_ops
    )
    after = [False] * len(lowered.values)
    found = []
    for step in lowered.steps:
        is_after = step.op == first or any(after[read.value] for read in step.reads)
        found.append(is_after)
        for value in step.makes:
            after[value] = is_after
    return found


class _Cut:
    """The flow network of one graph: two nodes for each value of the forward pass."""

    def __init__(
        self, graph: OpGraph, lowered: Steps, follows: Sequence[bool], results: Set[int]
    ) -> None:
        self.graph = graph
        self.lowered = lowered
        self.is_forward = [not each for each in follows]
        self.readers = readers_of(lowered)
        self.is_required = self._required(results)
        self.num_inputs = graph.num_inputs
        self.in_forward = [
            maker < 0 or self.is_forward[maker] for maker in lowered.maker
        ]  # of each value
        self.needs_gradient = self._on_the_way_back()

    def run(self) -> frozenset[int]:
        """Values on the cut."""
        values = [value for value, inside in enumerate(self.in_forward) if inside]
        capacity = self._capacities(values)
        banned = self._not_again()
        source, sink = 2 * len(self.lowered.values), 2 * len(self.lowered.values) + 1
        edges: list[tuple[int, int, int]] = []
        for value in values:
            edges.append((2 * value, 2 * value + 1, capacity[value]))
            maker = self.lowered.maker[value]
            if maker < 0 or maker in banned:
                edges.append((source, 2 * value, _ENDLESS))
            for reader in self.readers[value]:
                if not self.is_forward[reader]:
                    edges.append((2 * value + 1, sink, _ENDLESS))
                    continue
                for made in self.lowered.steps[reader].makes:
                    edges.append((2 * value + 1, 2 * made, _ENDLESS))
        reached = _reached(edges, source, sink, sink + 1)
        return frozenset(
            value for value in values if reached[2 * value] and not reached[2 * value + 1]
        )

    def _required(self, results: Set[int]) -> list[bool]:
        """Whether the results of the forward pass need each step."""
        needed = set(results)
        found = [False] * len(self.lowered.steps)
        for number in range(len(found) - 1, -1, -1):
            step = self.lowered.steps[number]
            if self.is_forward[number] and needed.intersection(step.makes):
                found[number] = True
                needed.update(read.value for read in step.reads)
        return found

    def _on_the_way_back(self) -> NDArray[np.int64]:
        """Least number of steps from each value to the backward pass.  # [num_values]"""
        distance = np.full(len(self.lowered.values), 10**9, np.int64)
        for value in range(len(distance) - 1, -1, -1):
            for reader in self.readers[value]:
                if not self.is_forward[reader]:
                    distance[value] = 0
                    break
                for made in self.lowered.steps[reader].makes:
                    distance[value] = min(distance[value], distance[made] + 1)
        return distance

    def _capacities(self, values: Sequence[int]) -> dict[int, int]:
        """Cost of keeping each value, as integers whose sum fits 30 bits."""
        costs = {value: self._cost(value) for value in values}
        unit = max(sum(costs.values()) / (_ENDLESS / 2), 1e-9)
        return {
            value: 0 if cost == 0.0 else max(round(cost / unit), 1)
            for value, cost in costs.items()
        }

    def _cost(self, value: int) -> float:
        """Bytes of a value, more if far from the backward pass or only passed between loops."""
        is_input = value < self.num_inputs
        if is_input and self.graph.tensors[value].kind in (
            TensorKind.PARAMETER, TensorKind.BUFFER, TensorKind.CONSTANT
        ):  # fmt: skip
            return 0.0
        away = int(min(max(self.needs_gradient[value], 1), _FAR))
        cost = float(self.lowered.values[value].num_bytes) * _PER_STEP**away
        is_written_anyway = is_input or not self._is_only_fused(value)
        return max(cost if is_written_anyway else _TWICE * cost, 1.0)

    def _is_only_fused(self, value: int) -> bool:
        """Whether all readers of a value may be one kernel with the step that makes it."""
        maker = self.lowered.steps[self.lowered.maker[value]]
        return all(_may_fuse(maker, self.lowered.steps[r]) for r in self.readers[value])

    def _not_again(self) -> set[int]:
        """Steps of the forward pass that must not be computed again."""
        steps = self.lowered.steps
        banned = {
            number
            for number, step in enumerate(steps)
            if self.is_required[number] and step.work != Work.VIEW and self._is_kept(step)
        }
        self._ban_uses_far_apart(banned)
        self._ban_long_chains(banned)
        return banned

    def _is_kept(self, step: Step) -> bool:
        if step.is_random or not step.is_recomputable:
            return True
        values = self.lowered.values
        read = sum(values[each.value].num_bytes for each in step.reads)
        made = sum(values[each].num_bytes for each in step.makes)
        return made * _SMALLER < read or any(self._is_made_for_backward(v) for v in step.makes)

    def _is_made_for_backward(self, value: int) -> bool:
        """Whether a kernel of the backward pass that fuses with nothing reads a value."""
        maker = self.lowered.steps[self.lowered.maker[value]]
        for reader in self.readers[value]:
            step = self.lowered.steps[reader]
            if not self.is_forward[reader] and not _may_fuse(maker, step):
                return True
            if step.work == Work.VIEW and any(map(self._is_made_for_backward, step.makes)):
                return True
        return False

    def _ban_uses_far_apart(self, banned: set[int]) -> None:
        """Ban uses of a value that come after a step with which its earlier uses cannot fuse."""
        for value, inside in enumerate(self.in_forward):
            uses = [reader for reader in self.readers[value] if self.is_required[reader]]
            if len(uses) < 2:
                continue
            last = max(uses)
            barrier = self._first_barrier(value, uses, last)
            maker = self.lowered.maker[value]
            for use in uses if inside and maker >= 0 else ():
                fuses = _may_fuse(self.lowered.steps[maker], self.lowered.steps[use])
                if use > barrier and fuses and self.lowered.steps[use].work != Work.VIEW:
                    banned.add(use)

    def _first_barrier(self, value: int, uses: Sequence[int], last: int) -> int:
        """First step up to ``last`` that uses of a value lead to but cannot fuse with."""
        steps = self.lowered.steps
        maker = self.lowered.maker[value]
        heap = [(use, maker < 0 or _may_fuse(steps[maker], steps[use])) for use in uses]
        heapq.heapify(heap)
        seen = set(heap)
        while heap:
            step, fuses = heapq.heappop(heap)
            if not fuses:
                return step
            for made in steps[step].makes:
                for reader in self.readers[made]:
                    if not self.is_required[reader] or reader > last:
                        continue
                    entry = (reader, _may_fuse(steps[step], steps[reader]))
                    if entry not in seen:
                        seen.add(entry)
                        heapq.heappush(heap, entry)
        return last

    def _ban_long_chains(self, banned: set[int]) -> None:
        """Cut chains of fused loops that go on over more than 100 steps."""
        steps = self.lowered.steps
        visited: set[int] = set()
        for start in range(len(steps)):
            if not self.is_required[start]:
                continue
            heap = [start]
            while heap:
                step = heapq.heappop(heap)
                if step in visited:
                    continue
                visited.add(step)
                if step > start + _LONGEST_CHAIN and not heap:
                    if steps[step].work != Work.VIEW:
                        banned.add(step)
                    break
                for made in steps[step].makes:
                    for reader in self.readers[made]:
                        fuses = _may_fuse(steps[step], steps[reader])
                        if self.is_required[reader] and fuses and reader not in banned:
                            heapq.heappush(heap, reader)


def readers_of(lowered: Steps) -> tuple[tuple[int, ...], ...]:
    """Steps that read each value.  # [num_values]"""
    readers: list[dict[int, None]] = [{} for _ in lowered.values]
    for number, step in enumerate(lowered.steps):
        for read in step.reads:
            readers[read.value].setdefault(number)
    return tuple(map(tuple, readers))


def _may_fuse(one: Step, other: Step) -> bool:
    """Whether a step may be one kernel with one that reads it."""
    return other.is_joined or (one.is_fusible and not one.is_joined and other.is_fusible)


def _reached(
    edges: Sequence[tuple[int, int, int]], source: int, sink: int, num_nodes: int
) -> NDArray[np.bool_]:
    """Nodes on the source's side of a minimum cut.  # [num_nodes]"""
    begin, end, capacity = np.array(edges, np.int64).T
    network = csr_array((capacity, (begin, end)), shape=(num_nodes, num_nodes))
    network.data = np.minimum(network.data, _ENDLESS).astype(np.int32)  # equal edges are added
    network = csr_array(
        (network.data, network.indices.astype(np.int32), network.indptr.astype(np.int32)),
        shape=network.shape,
    )
    flow = maximum_flow(network, source, sink).flow
    left = csr_array(network - flow)
    left.data = (left.data > 0).astype(np.int32)
    left.eliminate_zeros()
    found = breadth_first_order(left, source, return_predecessors=False)
    reached = np.zeros(num_nodes, np.bool_)
    reached[found] = True
    return reached
