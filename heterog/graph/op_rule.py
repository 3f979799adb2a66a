"""An explicit rule for one op: how it runs on its group's devices along an axis of its own."""

from dataclasses import dataclass

from heterog.graph.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """How the members of a team cut a value as soon as it is made, along an axis of its own.

    A part of a sum is added up in slices, by a reduce-scatter. Slices along the rule's axis become
    slices along this one, by an all-to-all: each member sends each other what is in the slices of
    both.

    Attributes:
        place: Placement of the value over the members of the team afterwards.
        units: Number of units of the axis that ``place`` splits, which is not the rule's own; the
            batch size with the value's placement along the batch means the batch.
    """

    place: Placement
    units: int


class _WithHash:
    """The place of a hash that is computed once; it is no field, so copies and pickles lack it."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule(_WithHash):
    """How one op runs on its group's devices along one axis of ``units`` units.

    The units are divided among the devices of the group's decision in proportion to its shares
    (``split_in_proportion(units, decision.shares)``; for the batch the shares themselves). The
    placements of a graph's tensors follow in program order:

    - An op with a rule needs its inputs, and leaves its outputs, as the rule says. The rule must
      be one of the sharding rules: ``propagate(call, inputs, units)`` has to give ``inputs`` and
      ``outputs`` back (every rule of ``legal_rules`` does).
    - A view never has a rule: its output follows by propagation from its source. A view that
      cannot follow (it merges what is split, say) shows the gathered whole.
    - Every other op does what the batch plan says, so that all ops of a region that is not split
      along the batch have rules.

    Where a reader needs another placement than the maker left, or the same one along another axis,
    the value is converted: a slice of what is whole is free, everything else goes through the
    whole value. A rule without any ``S`` runs on all devices with samples.

    Parts of a sum need not become the whole: with ``scatter`` they are summed in slices as soon
    as the op is done, and readers find these. Sequence parallelism (Korthikanti et al. 2022,
    section 4.2) splits activations between two matrix products along the positions in this way.
    Nor need slices be gathered for readers along another axis: with ``scatter`` they change owners
    as soon as the op is done. Expert parallelism (Lepikhin et al. 2021, section 3.2) sends tokens
    from the device that has the sample to the one that has the expert in this way, and back.

    Attributes:
        inputs: Needed placement of each tensor input of the op.
        outputs: Placement of each output.
        units: Number of units of the axis that ``S`` means here; the batch size means the batch
            split; any number if nothing is ``S``.
        scatter: For an op whose only output is a part of a sum, the way to sum it in slices, or
            for one whose only output is split, the axis along which readers find it; with ``None``
            readers get parts, or the whole, as they need it.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    units: int
    scatter: Scatter | None = None

    def __hash__(self) -> int:
        """The hash of all fields, computed once: searches look up sets of a thousand rules."""
        try:
            return self._hash
        except AttributeError:
            value = hash((self.inputs, self.outputs, self.units, self.scatter))
            object.__setattr__(self, "_hash", value)
            return value


OpRules = tuple[tuple[int, OpRule], ...]
"""Pairs of graph op index and rule, ascending."""
