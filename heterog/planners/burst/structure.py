"""Chains and branches of a layer graph.

A *chain* is a sequence of layers in which a layer may be followed by a *block*: branches, each a
chain of its own (or nothing: a skip connection), that all start from that layer, the fork, and
all end in one layer, the join. Blocks nest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from heterog.errors import HeterogError


class NotForkJoinError(HeterogError):
    """A layer graph is not made of chains and blocks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Branches between a fork (the layer before the block in its chain) and a join.

    Attributes:
        branches: one chain per way from fork to join, in the order of the join's inputs.
        join: the layer in which they all end.
    """

    branches: "tuple[Chain, ...]"
    join: int


Chain: TypeAlias = tuple[int | Block, ...]


def fork_join(previous: Sequence[Sequence[int]]) -> Chain:
    """The chain of a whole graph.

    Args:
        previous: for each layer the layers it reads from. Layer 0, and only it, reads from none.

    Raises:
        NotForkJoinError: branches of one fork end in different joins, say.

    >>> fork_join([(), (0,), (0,), (1, 2)])
    (0, Block(branches=((1,), (2,)), join=3))
    """
    for layer, inputs in enumerate(previous):
        if bool(inputs) == (layer == 0) or any(other >= layer for other in inputs):
            raise NotForkJoinError(
                f"layer {layer} reads from layers {tuple(inputs)}; each layer but the first must "
                "read from earlier ones."
            )
    chain, end = _Reader(previous).chain(0)
    if end is not None:
        raise NotForkJoinError(f"layer {end} joins branches of more than one fork.")
    return chain


def layers_of(chain: Chain) -> Iterator[int]:
    """All layers of a chain, forks before branches before joins."""
    for item in chain:
        if isinstance(item, Block):
            for branch in item.branches:
                yield from layers_of(branch)
            yield item.join
        else:
            yield item


class _Reader:
    def __init__(self, previous: Sequence[Sequence[int]]) -> None:
        self._previous = previous
        self._following: list[list[int]] = [[] for _ in previous]
        for layer, inputs in enumerate(previous):
            for other in inputs:
                self._following[other].append(layer)

    def chain(self, layer: int) -> tuple[Chain, int | None]:
        """(chain from a layer on, the enclosing block's join that follows it)."""
        items: list[int | Block] = [layer]
        while True:
            while len(self._following[layer]) > 1:
                block = self._block(layer)
                items.append(block)
                layer = block.join
            if not self._following[layer]:
                return tuple(items), None
            (following,) = self._following[layer]
            if len(self._previous[following]) > 1:
                return tuple(items), following
            layer = following
            items.append(layer)

    def _block(self, fork: int) -> Block:
        found: dict[int, Chain] = {}  # by the layer that the join reads from
        joins: set[int | None] = set()
        for first in self._following[fork]:
            branch: Chain = ()
            join: int | None = first
            last = fork
            if len(self._previous[first]) == 1:
                branch, join = self.chain(first)
                last = list(layers_of(branch))[-1]
            found[last] = branch
            joins.add(join)
        if len(joins) != 1 or None in joins:
            raise NotForkJoinError(
                f"the branches that start at layer {fork} end in layers {sorted(map(str, joins))};"
                " they must all end in one."
            )
        (end,) = joins
        assert end is not None
        if set(self._previous[end]) != set(found):
            raise NotForkJoinError(
                f"layer {end} reads from layers {tuple(self._previous[end])}, of which only "
                f"{tuple(found)} start at the fork {fork}."
            )
        return Block(branches=tuple(found[last] for last in self._previous[end]), join=end)
