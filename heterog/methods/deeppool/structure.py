"""Chains and branches of a layer graph.

A *chain* is a sequence of layers in which a layer may be followed by a *block*: branches, each a
chain of its own (or nothing: a skip connection), that all start from that layer, the fork, and
all end in one layer, the join. Blocks nest. Layers that are linked crosswise are read as chains
and blocks all the same, in their order, as if links that do not fit were not there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Branches between a fork (the layer before the block in its chain) and a join.

    Attributes:
        branches: One chain for each way from fork to join, in the order of their first layers; an
            empty one for a direct link, last.
        join: Layer in which they all end.
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


def last_layer(chain: Chain, fork: int) -> int:
    """The layer in which a branch ends; the fork if the branch is empty."""
    if not chain:
        return fork
    item = chain[-1]
    return item.join if isinstance(item, Block) else item


def _chain(layers: list[int], links: list[tuple[int, int]]) -> Chain:
    """The chain of some layers and the links among them."""
    position = {layer: index for index, layer in enumerate(layers)}
    links = [link for link in links if link[0] in position and link[1] in position]
    # Number of links past each layer: at 0 everything goes through that layer.
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
    part = {layer: layer for layer in layers}

    def root(layer: int) -> int:
        while part[layer] != layer:
            layer = part[layer]
        return layer

    for before, layer in links:
        if before in part and layer in part:
            first, second = sorted((root(before), root(layer)))
            part[second] = first
    found: dict[int, list[int]] = {}
    for layer in layers:
        found.setdefault(root(layer), []).append(layer)
    return list(found.values())
