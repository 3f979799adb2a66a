"""Synchronisation of gradients, and the state that replicas keep in slices: one table.

A synchronisation has two properties, which only this table combines: how sums travel, and which
training state each replica keeps in slices instead of whole. Every question about a
synchronisation is an attribute of its member. So a new one is a member here and, if its sums
travel in a new way, a channel (``channels``), its price (``pricing.cost_model``) and the call that
moves it (``runtime.step.collectives``).
"""

from enum import IntEnum
from typing import Self


class Aggregation(IntEnum):
    """How the sum of gradients reaches all replicas."""

    RING = 0
    HIERARCHICAL = 1
    SLICES = 2
    SERVER = 3


class Sharded(IntEnum):
    """State that each replica keeps only a slice of; each level includes those before it.

    The numbers are the stages of ZeRO (Rajbhandari et al. 2020, section 5).
    """

    NOTHING = 0
    STATE = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Sync(IntEnum):
    """The synchronisation of the gradients of a group.

    Attributes:
        aggregation: How the sum of gradients reaches all replicas.
        sharded: State that each replica keeps only a slice of.
        words: Name in a sentence.
        short: Name in a column.
        is_sharded: Whether each replica updates only its slice of every parameter, and keeps the
            optimizer's state of that slice alone.
        takes_slices: Whether a decision may set the size of each device's slice.
        is_served: Whether each parameter has a home, the only device that updates it.
    """

    aggregation: Aggregation
    sharded: Sharded
    words: str
    short: str
    is_sharded: bool
    takes_slices: bool
    is_served: bool

    RING = 0, Aggregation.RING, Sharded.NOTHING, "ring all-reduce", "ring"
    """All-reduce on one ring over all devices."""
    HIERARCHICAL = (
        *(1, Aggregation.HIERARCHICAL, Sharded.NOTHING),
        *("hierarchical all-reduce", "hierarchical"),
    )
    """Reduce-scatter inside hosts, all-reduce between hosts, all-gather inside hosts."""
    REDUCE_SCATTER_ALL_GATHER = (
        *(2, Aggregation.SLICES, Sharded.NOTHING),
        *("reduce-scatter and all-gather", "scatter+gather"),
    )
    """Reduce-scatter, then all-gather, with slices of stated, uneven sizes."""
    PARAMETER_SERVER = 3, Aggregation.SERVER, Sharded.NOTHING, "parameter servers", "servers"
    """Push to the parameter's home, update there, pull."""
    ZERO1 = 4, Aggregation.SLICES, Sharded.STATE, "ZeRO-1 (optimizer state in slices)", "ZeRO-1"
    """Reduce-scatter of the gradients; each device updates its slice, and keeps the optimizer's
    state of that slice alone; all-gather of the parameters (Rajbhandari et al. 2020, stage 1)."""
    ZERO2 = (
        *(5, Aggregation.SLICES, Sharded.GRADIENTS),
        *("ZeRO-2 (optimizer state and gradients in slices)", "ZeRO-2"),
    )
    """Like ``ZERO1``, and each device keeps only its own slice of each micro-batch's gradient."""
    ZERO3 = (
        *(6, Aggregation.SLICES, Sharded.PARAMETERS),
        *("ZeRO-3 (optimizer state, gradients and parameters in slices)", "ZeRO-3"),
    )
    """Like ``ZERO2``, and parameters live in slices too: gathered before the forward ops that read
    them and again before the backward ops, dropped afterwards."""

    def __new__(
        cls, number: int, aggregation: Aggregation, sharded: Sharded, words: str, short: str
    ) -> Self:
        """The member of a number, with its attributes."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.aggregation, member.sharded = aggregation, sharded
        member.words, member.short = words, short
        member.is_sharded = sharded > Sharded.NOTHING
        member.takes_slices = aggregation == Aggregation.SLICES
        member.is_served = aggregation == Aggregation.SERVER
        return member

    @staticmethod
    def of_stage(stage: int) -> "Sync":
        """The synchronisation of a stage of ZeRO, 1 to 3."""
        return next(sync for sync in Sync if sync.is_sharded and sync.sharded == stage)
