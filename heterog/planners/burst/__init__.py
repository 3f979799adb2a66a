"""Burst parallelism: how many devices each layer of a fork-join graph gets (DeepPool).

``structure`` reads chains and branches out of a layer graph, ``search`` is the dynamic program,
``original`` the authors' program with its defects, kept for comparison with their plans.
"""

from heterog.planners.burst.original import OriginalPlan, search_as_published
from heterog.planners.burst.search import BurstPlan, LayerCosts, Place, search
from heterog.planners.burst.structure import Block, Chain, fork_join, last_layer, layers_of

__all__ = [
    "Block",
    "BurstPlan",
    "Chain",
    "LayerCosts",
    "OriginalPlan",
    "Place",
    "fork_join",
    "last_layer",
    "layers_of",
    "search",
    "search_as_published",
]
