"""Burst parallelism: how many devices each layer of a fork-join graph gets (DeepPool).

``search`` reads chains and branches out of a layer graph; it is the dynamic program.
"""

from heterog.planners.burst.search import (
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
