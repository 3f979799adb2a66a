"""Burst parallelism: how many devices each layer of a fork-join graph gets (DeepPool).

``structure`` reads chains and branches out of a layer graph, ``search`` is the dynamic program.
"""

from heterog.methods.deeppool.search import BurstPlan, LayerCosts, Place, search
from heterog.methods.deeppool.structure import Block, Chain, fork_join, last_layer, layers_of

__all__ = [
    "Block",
    "BurstPlan",
    "Chain",
    "LayerCosts",
    "Place",
    "fork_join",
    "last_layer",
    "layers_of",
    "search",
]
