"""Which rules the ops of a team's groups have: tensor parallelism as Megatron-LM does it.

Inside a team the first weight of a feed-forward block is split by columns and the second by rows,
attention by heads (Shoeybi et al. 2019, section 3). What is between them is done by every member
on all samples of the team, or on its own positions (``positions``). Which weights these are is
found by following splits (``tensor_parallel.shardings``), not by the names of modules. The
embedding is split by the columns of its table and gathered (Megatron-LM splits rows and sums,
which a look-up has no rule for), the head by the vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from heterog.graph.grouping import CONSTANT_GROUP, alike_groups, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.op_rule import OpRule, OpRules
from heterog.graph.placement import P, R
from heterog.graph.sharding_rules import propagate
from heterog.strategy.layouts.layout import LayoutError
from heterog.strategy.layouts.positions import along_positions
from heterog.strategy.layouts.stages import NO_LAYER, layers_of
from heterog.strategy.tensor_parallel import follow_split, ops_of_groups, shardings


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamRules:
    """Rules of all ops of some groups.

    Attributes:
        op_rules: ascending.
        least_units: the smallest number of units that something is split into; 0 if nothing is.
        remarks: what could not be split as it was meant, in sentences.
    """

    op_rules: OpRules
    least_units: int
    remarks: tuple[str, ...] = ()


@lru_cache(maxsize=16)
def team_rules(
    graph: OpGraph,
    groups: tuple[int, ...],
    *,
    vocabulary_parallel: bool = True,
    sequence_parallel: bool = False,
) -> TeamRules:
    """Rules of the ops of groups whose teams have several members.

    Args:
        graph: one training step.
        groups: ascending.
        vocabulary_parallel: whether groups outside of the repeated layers are split, too.
        sequence_parallel: whether what lies between split ops is split along positions.

    Raises:
        LayoutError: nothing can be split.
    """
    split: dict[int, OpRule] = {}
    runs = [run for run in _runs(graph, groups) if vocabulary_parallel or run.is_layer]
    known: dict[tuple[tuple[int, ...], bool], tuple[tuple[int, int, OpRule], ...]] = {}
    ops = _ops_of_groups(graph)
    kinds = alike_groups(graph)
    for run in runs:
        key = tuple(int(kinds[group]) for group in run.groups), run.is_layer
        if key not in known:
            known[key] = _placed(_splits(graph, run.groups), run.groups, ops)
        for offset, position, rule in known[key]:
            split[ops[run.groups[offset]][position]] = rule
    if not split:
        raise LayoutError(
            "tp has nothing to split: no matrix product of these layers can be divided into "
            "columns, rows or heads; take tp=1."
        )
    least_units = min(rule.units for rule in split.values() if _has_split(rule))
    remarks = tuple(_gathered(graph, split))
    split |= _added_in_parts(graph, groups, split)
    if sequence_parallel:
        split = along_positions(graph, groups, split)
        if all(rule.scatter is None for rule in split.values()):
            remarks += (
                "No sum over a team follows the positions of a sequence: sequence_parallel "
                "changes nothing.",
            )
    return TeamRules(
        op_rules=tuple(sorted((split | _done_by_all(graph, groups, split)).items())),
        least_units=least_units,
        remarks=remarks,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Groups whose splits are followed together."""

    groups: tuple[int, ...]
    is_layer: bool


def _runs(graph: OpGraph, groups: Sequence[int]) -> Iterable[_Run]:
    """Each repeated layer, and what is before, between and behind them."""
    in_layer = layers_of(graph).of_group
    found: list[list[int]] = []
    for group in groups:
        last = found[-1][-1] if found else None
        if last is not None and in_layer[last] == in_layer[group] and last == group - 1:
            found[-1].append(group)
        else:
            found.append([group])
    return [_Run(tuple(run), in_layer[run[0]] != NO_LAYER) for run in found]


def _ops_of_groups(graph: OpGraph) -> list[list[int]]:
    grouping = group_ops(graph)
    ops: list[list[int]] = [[] for _ in range(grouping.num_groups)]
    for op, group in enumerate(grouping.group.tolist()):
        if group != CONSTANT_GROUP:
            ops[group].append(op)
    return ops


def _splits(graph: OpGraph, groups: Sequence[int]) -> dict[int, OpRule]:
    """Rules that split the most work, of ways that have no op in common.

    As many units as the batch has samples would mean the batch: then two are taken as one.
    """
    chosen: dict[int, OpRule] = {}
    for way in shardings(graph, groups):
        rules = way.op_rules
        if way.units == graph.batch_size:
            split = {way.parameter: way.placement}
            rules = follow_split(graph, ops_of_groups(graph, groups), split, way.units // 2)
            if way.units % 2 or {op for op, _ in rules} != {op for op, _ in way.op_rules}:
                continue
        if chosen.keys().isdisjoint(op for op, _ in rules):
            chosen.update(rules)
    return chosen


def _placed(
    rules: dict[int, OpRule], groups: Sequence[int], ops: Sequence[Sequence[int]]
) -> tuple[tuple[int, int, OpRule], ...]:
    """Rules by the number of their group among ``groups`` and their place in it."""
    return tuple(
        (offset, ops[group].index(op), rules[op])
        for offset, group in enumerate(groups)
        for op in ops[group]
        if op in rules
    )


def _has_split(rule: OpRule) -> bool:
    return any(place.kind == "S" for place in (*rule.inputs, *rule.outputs))


def _added_in_parts(
    graph: OpGraph, groups: Sequence[int], split: dict[int, OpRule]
) -> dict[int, OpRule]:
    """Rules of ops that add partial sums to each other: one sum over the team then suffices.

    Queries, keys and values that are projected apart each send back a part of a gradient.
    """
    chosen, group = set(groups), group_ops(graph).group
    parts = {
        tensor
        for op, rule in split.items()
        for tensor, place in zip(graph.outputs(op), rule.outputs, strict=True)
        if place == P
    }
    found: dict[int, OpRule] = {}
    for index, op in enumerate(graph.ops):
        if int(group[index]) not in chosen or index in split or op.phase == Phase.UPDATE:
            continue
        if not op.inputs or not all(tensor in parts for tensor in op.inputs):
            continue
        given = tuple(P for _ in op.inputs)
        result = propagate(graph.call(index), given, 1)
        if result is None or result.inputs != given or result.outputs != (P,):
            continue
        if not graph.is_view[index]:
            if len(op.inputs) == 1:
                continue  # as many sums as before
            found[index] = OpRule(inputs=given, outputs=(P,), units=1)
        parts.update(graph.outputs(index))
    return found


def _done_by_all(
    graph: OpGraph, groups: Sequence[int], split: dict[int, OpRule]
) -> dict[int, OpRule]:
    """Rules by which every member does the other ops of the groups."""
    chosen, group = set(groups), group_ops(graph).group
    return {
        index: OpRule(inputs=tuple(R for _ in op.inputs), outputs=(R,) * op.num_outputs, units=1)
        for index, op in enumerate(graph.ops)
        if int(group[index]) in chosen
        and index not in split
        and op.phase != Phase.UPDATE
        and not graph.is_view[index]
    }


def _gathered(graph: OpGraph, split: dict[int, OpRule]) -> Iterable[str]:
    """A sentence if the largest value that is split is read whole: logits, by their loss."""
    largest = 0.0
    for op in split:
        if graph.ops[op].phase != Phase.FORWARD:
            continue
        for tensor, place in zip(graph.outputs(op), split[op].outputs, strict=True):
            reads_whole = any(
                reader not in split and not graph.is_view[reader]
                for reader in graph.readers(tensor)
            )
            if place.kind == "S" and reads_whole:
                largest = max(largest, float(graph.tensor_bytes[tensor]))
    whole = max(
        (float(graph.tensor_bytes[t]) for op in split for t in graph.outputs(op)), default=0.0
    )
    if largest and largest == whole:
        yield (
            "The loss reads the logits whole, so teams gather them (Megatron-LM sums over the "
            "parts of the vocabulary instead)."
        )
