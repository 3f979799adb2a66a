"""Rules of the ops of teams that split sequences: context parallelism of a layout."""

from heterog.graph.axis_plan import axis_plan
from heterog.graph.op_graph import OpGraph
from heterog.strategy.layouts.layout import LayoutError
from heterog.strategy.layouts.tensor import TeamRules
from heterog.strategy.sequence_split import SequenceSplit, lengths, sequence_split, unit_counts


def context_rules(graph: OpGraph, members: int) -> TeamRules:
    """Rules of all ops for teams whose members have runs of positions.

    Args:
        graph: One training step.
        members: Members of a team. Where they do not divide the sequences, runs are as equal as
            the units allow.

    Raises:
        LayoutError: there are no sequences, or they are too short.
    """
    split = _split(graph, members)
    if split is None:
        known = lengths(graph)
        why = (
            "the batch has no sequences ([batch, positions] of whole numbers)"
            if not known
            else f"sequences of {', '.join(map(str, known))} positions have no such equal units"
        )
        raise LayoutError(f"cp={members} splits sequences into {members} runs or more, but {why}.")
    remarks = []
    if split.units % members:
        remarks.append(
            f"cp={members} does not divide the {split.units} units of the sequences: their runs "
            "are unequal."
        )
    if len(axis_plan(graph, split.op_rules).causal_ops):
        remarks.append(
            "Shares are equal, but later positions see more keys and take longer; the method "
            "'sequences' finds runs that take equal times."
        )
    return TeamRules(op_rules=split.op_rules, least_units=split.units, remarks=tuple(remarks))


def _split(graph: OpGraph, members: int) -> SequenceSplit | None:
    """The split with the most units that members can share equally, or else the most units."""
    counts = [units for units in unit_counts(graph, max(128, members)) if units >= members]
    for units in sorted(counts, key=lambda units: (units % members > 0, counts.index(units))):
        found = sequence_split(graph, units)
        if found is not None:
            return found
    return None
