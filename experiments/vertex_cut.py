"""Libra's vertex cut, by which DistGNN (arXiv 2104.06700) divides a graph: edges have one owner.

A node lives as a *clone* in every part that has one of its edges, and the sums of its clones are
added to one of them (its root) and sent back. Rows of heterog's strategies have one owner instead,
so this division is here only for comparison (``graph_crossover.py``), and is never run:

    rows that travel for each product = 2 * sum over nodes of (clones - 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VertexCut:
    """Edges of each part, and the parts that have a clone of each node.

    Attributes:
        part_of_edge: Part of each edge, in the order in which the edges were given.
        clones: Parts of each node; empty for a node without edges.
        num_parts: Number of parts.
    """

    part_of_edge: tuple[int, ...]
    clones: tuple[frozenset[int], ...]
    num_parts: int

    @property
    def loads(self) -> tuple[int, ...]:
        """Number of edges of each part."""
        loads = [0] * self.num_parts
        for part in self.part_of_edge:
            loads[part] += 1
        return tuple(loads)

    @property
    def replication(self) -> float:
        """Mean number of clones of a node that has edges."""
        sizes = [len(parts) for parts in self.clones if parts]
        return sum(sizes) / max(len(sizes), 1)

    @property
    def rows_sent(self) -> int:
        """Number of rows sent for one product: to the roots, and back."""
        return 2 * sum(len(parts) - 1 for parts in self.clones if parts)


def libra(edges: Sequence[tuple[int, int]], num_nodes: int, num_parts: int) -> VertexCut:
    """Assign edges one after the other, as the released code does (dmlc/dgl at 190dc66).

    Two new nodes: to the part with the fewest edges. One known: to its part with the fewest. Both
    known: to a common part, or else to a part of the node with fewer edges in the whole graph.
    Unlike the released code, which breaks ties at random, the first part is taken.

    Shuffle the edges before: sorted by node, those of a connected graph *all* end in one part,
    because each finds a known end.

    Args:
        edges: Each edge once, in the order in which they are assigned.
        num_nodes: Number of nodes of the graph.
        num_parts: Number of parts to make.
    """
    degree = [0] * num_nodes
    for one, other in edges:
        degree[one] += 1
        degree[other] += 1
    clones: list[set[int]] = [set() for _ in range(num_nodes)]
    loads = [0] * num_parts
    parts = []
    for one, other in edges:
        have, known = clones[one], clones[other]
        if have and known:
            fewer = have if degree[one] <= degree[other] else known
            choices = have & known or fewer
        else:
            choices = have or known or set(range(num_parts))
        part = min(choices, key=lambda each: (loads[each], each))
        loads[part] += 1
        have.add(part)
        known.add(part)
        parts.append(part)
    return VertexCut(
        part_of_edge=tuple(parts), clones=tuple(map(frozenset, clones)), num_parts=num_parts
    )
