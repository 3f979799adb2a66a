"""Synchronisation of gradients, and the state that replicas keep in slices: one table.

A synchronisation has two sides, which only this table combines: how sums travel, and how much
of the training state each replica keeps a slice of instead of the whole. What the framework asks
about a synchronisation it asks ``TRAITS``, so a new one is a row here and, if its sums travel in a
new way, a channel (``channels``), its price (``pricing.collectives``) and the call that moves it
(``runtime.step.collectives``).
"""

from enum import IntEnum
from typing import NamedTuple


class Aggregation(IntEnum):
    """How the sum of gradients reaches all replicas."""

    RING = 0
    HIERARCHICAL = 1
    SLICES = 2
    SERVER = 3


class Sharded(IntEnum):
    """State of which each replica keeps only a slice; each level includes those before it.

    The numbers are the stages of ZeRO (Rajbhandari et al. 2020, section 5).
    """

    NOTHING = 0
    STATE = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Sync(IntEnum):
    """The synchronisation of the gradients of a group."""

    RING = 0
    """All-reduce on one ring over all devices."""
    HIERARCHICAL = 1
    """Reduce-scatter inside hosts, all-reduce between hosts, all-gather inside hosts."""
    REDUCE_SCATTER_ALL_GATHER = 2
    """Reduce-scatter, then all-gather, with slices of stated, uneven sizes."""
    PARAMETER_SERVER = 3
    """Push to the parameter's home, update there, pull."""
    ZERO1 = 4
    """Reduce-scatter of the gradients; each device updates its slice and keeps the optimizer's
    state of it alone; all-gather of the parameters (Rajbhandari et al. 2020, stage 1)."""
    ZERO2 = 5
    """Like ``ZERO1``, and each device keeps only its own slice of each micro-batch's gradient."""
    ZERO3 = 6
    """As ``ZERO2``, and the parameters live as slices too: gathered before the forward and again
    before the backward ops that read them, dropped after."""

    @property
    def aggregation(self) -> Aggregation:
        """How the sum of gradients reaches all replicas."""
        return TRAITS[self].aggregation

    @property
    def sharded(self) -> Sharded:
        """State of which each replica keeps only a slice."""
        return TRAITS[self].sharded

    @property
    def is_sharded(self) -> bool:
        """Whether each replica updates only its slice of every parameter and keeps that state."""
        return TRAITS[self].sharded > Sharded.NOTHING

    @property
    def takes_slices(self) -> bool:
        """Whether a decision may set the size of each device's slice."""
        return TRAITS[self].aggregation == Aggregation.SLICES

    @property
    def is_served(self) -> bool:
        """Whether parameters have a home, which alone updates them."""
        return TRAITS[self].aggregation == Aggregation.SERVER

    @staticmethod
    def of_stage(stage: int) -> "Sync":
        """The synchronisation of a stage of ZeRO, 1 to 3."""
        return next(sync for sync in Sync if sync.is_sharded and sync.sharded == stage)


class Traits(NamedTuple):
    """Properties of a synchronisation.

    Attributes:
        aggregation: How the sum of gradients reaches all replicas.
        sharded: State of which each replica keeps only a slice.
        words: Name in a sentence.
        short: Name in a column.
    """

    aggregation: Aggregation
    sharded: Sharded
    words: str
    short: str


TRAITS = {
    Sync.RING: Traits(Aggregation.RING, Sharded.NOTHING, "ring all-reduce", "ring"),
    Sync.HIERARCHICAL: Traits(
        Aggregation.HIERARCHICAL, Sharded.NOTHING, "hierarchical all-reduce", "hierarchical"
    ),
    Sync.REDUCE_SCATTER_ALL_GATHER: Traits(
        Aggregation.SLICES, Sharded.NOTHING, "reduce-scatter and all-gather", "scatter+gather"
    ),
    Sync.PARAMETER_SERVER: Traits(
        Aggregation.SERVER, Sharded.NOTHING, "parameter servers", "servers"
    ),
    Sync.ZERO1: Traits(
        Aggregation.SLICES, Sharded.STATE, "ZeRO-1 (optimizer state in slices)", "ZeRO-1"
    ),
    Sync.ZERO2: Traits(
        Aggregation.SLICES,
        Sharded.GRADIENTS,
        "ZeRO-2 (optimizer state and gradients in slices)",
        "ZeRO-2",
    ),
    Sync.ZERO3: Traits(
        Aggregation.SLICES,
        Sharded.PARAMETERS,
        "ZeRO-3 (optimizer state, gradients and parameters in slices)",
        "ZeRO-3",
    ),
}
