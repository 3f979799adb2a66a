"""Burst parallelism: how many devices each layer of a fork-join graph gets (DeepPool).

``search`` reads chains and branches out of a layer graph; it is the dynamic program.
"""

from heterog.methods.deeppool.search import (
    Block,
    BurstPlan,
    Chain,
    LayerCosts,
    Place,
    fork_join,
    last_layer,
    layers_of,
    search,
)

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
