"""Rules of the ops of a team's groups: tensor parallelism as in Megatron-LM.

Inside a team the first weight of a feed-forward block is split by columns and the second by rows,
attention by heads (Shoeybi et al. 2019, section 3). Ops between them run on every member, on all
samples of the team, or on its own positions (below). The weights are found by following splits
(``tensor_parallel.shardings``), not by the names of modules. The embedding is split by the columns
of its table and its output is gathered or, if it is tied to the head, it is split by words and its
outputs are added up; the head, and a cross entropy after it, are split by words.

In sequence parallelism, as in Megatron-LM (Korthikanti et al. 2022, section 4.2), activations
between two split matrix products are split by position. Instead of an all-reduce, each member gets
the sum for its own positions alone (a reduce-scatter), and norms, dropouts and residuals work on
these. The next matrix product gathers them. This sends as many bytes as before, and keeps less of
all activations in between.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import alike_groups, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRule, OpRules, P, R, S, Scatter, needs_no_transfer
from heterog.graph.sharding_rules import propagate
from heterog.strategy.layouts.layout import LayoutError
from heterog.strategy.layouts.stages import NO_LAYER, layers_of
from heterog.strategy.tensor_parallel import shardings


def along_positions(
    graph: OpGraph, groups: Sequence[int], rules: dict[int, OpRule]
) -> dict[int, OpRule]:
    """Make sums over teams end in slices of positions, with rules for the ops that follow.

    Args:
        graph: One training step.
        groups: Groups whose teams do this.
        rules: Rules of the ops of these groups that are split.
    """
    found = dict(rules)
    group, chosen = group_ops(graph).group, set(groups)
    lies: dict[int, Scatter] = {}  # tensors that are split along positions
    for index, op in enumerate(graph.ops):
        if int(group[index]) not in chosen or op.phase == Phase.UPDATE:
            continue
        if index in found:
            slices = _slices_of_sum(graph, index, found)
            if slices is not None:
                found[index] = replace(found[index], scatter=slices)
                lies[graph.outputs[index][0]] = slices
            continue
        units = {lies[tensor].units for tensor in op.inputs if tensor in lies}
        if len(units) != 1:
            continue
        (size,) = units
        given = tuple(lies[tensor].place if tensor in lies else R for tensor in op.inputs)
        result = propagate(graph.calls[index], given, size)
        if result is None or not needs_no_transfer(given, result.inputs):
            continue
        made = zip(graph.outputs[index], result.outputs, strict=True)
        if any(place == P and _is_read_as("S", graph, each, rules) for each, place in made):
            continue  # the table is read in slices, and a sum would make its whole gradient
        if not graph.is_view[index]:
            found[index] = OpRule(inputs=result.inputs, outputs=result.outputs, units=size)
        for tensor, place in zip(graph.outputs[index], result.outputs, strict=True):
            if place.kind == "S":
                lies[tensor] = Scatter(place=place, units=size)
    return found


def _is_read_as(kind: str, graph: OpGraph, tensor: int, rules: dict[int, OpRule]) -> bool:
    """Whether an op with a rule reads slices (S) of a tensor, or its partial sums (P)."""
    return any(
        read.kind == kind and graph.storage[each] == graph.storage[tensor]
        for reader in graph.readers(tensor)
        if reader in rules
        for each, read in zip(graph.ops[reader].inputs, rules[reader].inputs, strict=True)
    )


def _slices_of_sum(graph: OpGraph, op: int, rules: dict[int, OpRule]) -> Scatter | None:
    """Slices of positions in which an op's partial sums can be summed, if they can."""
    if rules[op].outputs != (P,):
        return None
    (tensor,) = graph.outputs[op]
    if _is_read_as("P", graph, tensor, rules):  # a reader adds further partial sums first
        return None
    shape, along = graph.tensors[tensor].shape, batch_plan(graph).placements[tensor]
    batch = graph.batch_size
    if along.kind != "S" or len(shape) not in (2, 3):
        return None
    if len(shape) == 3 and along.outer == 1 and along.dim < 2 and shape[along.dim] == batch:
        place, units = S(1 - along.dim), shape[1 - along.dim]  # (batch, positions, ...) or turned
    elif len(shape) == 2 and along == S(0):
        place, units = S(0, batch), shape[0] // batch  # positions inside samples
    elif len(shape) == 2 and along.dim == 0 and shape[0] == along.outer * batch:
        place, units = S(0), along.outer  # samples inside positions
    else:
        return None
    return Scatter(place=place, units=units) if units > 1 else None


_LEAST_OF_BEST = 16.0
"""A split is worth it if it sends, per work, less than this many times as much as the best."""
_MOST_WAYS = 24
"""Most ways to split a layer that are searched together; each weight has a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamRules:
    """Rules of all ops of some groups.

    Attributes:
        op_rules: The rules, by ascending op.
        least_units: Smallest number of units that anything is split into; 0 if nothing is split.
        remarks: Sentences about parts that could not be split as meant.
    """

    op_rules: OpRules
    least_units: int
    remarks: tuple[str, ...] = ()


@lru_cache(maxsize=16)
def team_rules(
    graph: OpGraph,
    groups: tuple[int, ...],
    *,
    members: int = 2,
    vocabulary_parallel: bool = True,
    sequence_parallel: bool = False,
) -> TeamRules:
    """Find rules of the ops of groups whose teams have several members.

    Args:
        graph: One training step.
        groups: Numbers of the groups, ascending.
        members: Members of the largest team; an axis with fewer units (heads of keys, say) is not
            split.
        vocabulary_parallel: Whether groups outside of the repeated layers are split, too.
        sequence_parallel: Whether activations between split ops are split along positions.

    Raises:
        LayoutError: nothing can be split.
    """
    split: dict[int, OpRule] = {}
    of_sum = 1.0 if sequence_parallel else 2.0  # an all-reduce sends twice a reduce-scatter
    runs = [run for run in _runs(graph, groups) if vocabulary_parallel or run.is_layer]
    known: dict[tuple[tuple[int, ...], bool], tuple[tuple[int, int, OpRule], ...]] = {}
    ops = group_ops(graph).ops
    kinds = alike_groups(graph)
    for run in runs:
        key = tuple(int(kinds[group]) for group in run.groups), run.is_layer
        if key not in known:
            known[key] = _placed(_splits(graph, run, members, of_sum), run.groups, ops)
        for offset, position, rule in known[key]:
            split[ops[run.groups[offset]][position]] = rule
    if not split:
        raise LayoutError(_nothing_to_split(graph, runs))
    least_units = min(
        rule.units
        for rule in split.values()
        if any(place.kind == "S" for place in (*rule.inputs, *rule.outputs))
    )
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


def first_divided(graph: OpGraph, groups: tuple[int, ...]) -> frozenset[int]:
    """Ops of the first groups that can be divided; all of them are in ``team_rules``."""
    found = (_splits(graph, run, 2, 2.0) for run in _runs(graph, groups))
    return frozenset(next(filter(None, found), ()))


@dataclass(frozen=True, slots=True)
class _Run:
    """Groups through which a split is followed."""

    groups: tuple[int, ...]
    is_layer: bool


def _runs(graph: OpGraph, groups: Sequence[int]) -> Iterable[_Run]:
    """Each repeated layer, and the runs of groups before, between and after layers."""
    in_layer = layers_of(graph).of_group
    runs = groupby(enumerate(groups), key=lambda pair: (in_layer[pair[1]], pair[1] - pair[0]))
    return [_Run(tuple(group for _, group in run), key[0] != NO_LAYER) for key, run in runs]


def _nothing_to_split(graph: OpGraph, runs: Sequence[_Run]) -> str:
    """A sentence that says why a team cannot share any op."""
    most = max(
        (rule.units for run in runs for rule in _splits(graph, run, 2, 2.0).values()), default=0
    )
    if most > 1:
        return f"a team has more members than the {most} units there are; take tp={most} or less."
    return (
        "tp has nothing to split: no matrix product of these layers can be divided into columns, "
        "rows or heads; take tp=1."
    )


def _splits(graph: OpGraph, run: _Run, members: int, of_sum: float) -> dict[int, OpRule]:
    """Rules of ways to split that share no op, split much work and send little.

    Sending counts, because a norm that is written out as single ops lets a split of one product
    continue through the residual, and every later product becomes a sum. Outside of layers,
    remaining ways are used too, for the memory of weights (of an embedding, which does little
    work).
    """
    ways = [way for way in _ways(graph, run.groups) if way[0][1].units >= members]
    chosen = dict(pair for way in _best_together(graph, ways, of_sum) for pair in way)
    for way in () if run.is_layer else ways:
        if chosen.keys().isdisjoint(op for op, _ in way):
            chosen.update(way)
    return chosen


@lru_cache(maxsize=64)
def _ways(graph: OpGraph, groups: tuple[int, ...]) -> tuple[OpRules, ...]:
    """Ways to split some groups, the one that splits the most work first."""
    return tuple(way.op_rules for way in shardings(graph, groups))


def _best_together(graph: OpGraph, ways: Sequence[OpRules], of_sum: float) -> list[OpRules]:
    """Ways without a common op that together split most work, minus the cost of messages.

    A byte costs ``1 / _LEAST_OF_BEST`` of the work that the best way splits per byte that it
    sends. So a way that is that much worse than the best is left out, for any sizes and devices.
    """
    work = [float(sum(graph.ops[op].flops for op, _ in way)) for way in ways]
    sent = [_sent_bytes(graph, way, of_sum) for way in ways]
    best = max((w / s for w, s in zip(work, sent, strict=True) if s > 0.0), default=0.0)
    worth = [w - s * best / _LEAST_OF_BEST for w, s in zip(work, sent, strict=True)]
    gainful = [number for number, gain in enumerate(worth) if gain > 0.0]
    order = sorted(gainful, key=lambda number: -worth[number])[:_MOST_WAYS]
    ops = [frozenset(op for op, _ in way) for way in ways]
    rest = [sum(worth[number] for number in order[place:]) for place in range(len(order) + 1)]
    found: tuple[float, list[int]] = (0.0, [])

    def choose(place: int, taken: list[int], gain: float) -> None:
        nonlocal found
        if gain > found[0]:
            found = gain, list(taken)
        if place == len(order) or gain + rest[place] <= found[0]:
            return
        number = order[place]
        if all(ops[number].isdisjoint(ops[other]) for other in taken):
            choose(place + 1, [*taken, number], gain + worth[number])
        choose(place + 1, taken, gain)

    choose(0, [], 0.0)
    return [ways[number] for number in found[1]]


def _sent_bytes(graph: OpGraph, way: OpRules, of_sum: float) -> float:
    """Bytes sent over links because members sum or gather values of a way to split.

    Values that follow the batch count; gradients of parameters do not, because they are summed
    anyway. Sliced parameters count if an unsplit op reads them whole (the table of a tied head):
    once for each micro-batch, which has one sample at worst.

    Args:
        graph: One training step.
        way: Rules of the ops that are split.
        of_sum: Bytes sent for each byte of a sum; a gathered byte sends 1.
    """
    rules = dict(way)
    follows = batch_plan(graph).placements
    total = graph.batch_size * sum(
        float(graph.tensor_bytes[parameter])
        for parameter in _split_parameters(graph, way)
        for reader in graph.readers(parameter)
        if reader not in rules
        and not graph.is_view[reader]
        and graph.ops[reader].phase != Phase.UPDATE
    )
    for op, rule in way:
        for tensor, place in zip(graph.outputs[op], rule.outputs, strict=True):
            if follows[tensor].kind != "S":
                continue
            if place == P:
                total += of_sum * float(graph.tensor_bytes[tensor])
            elif place.kind == "S" and any(
                reader not in rules for reader in graph.readers(tensor)
            ):
                total += float(graph.tensor_bytes[tensor])
    return total


def _split_parameters(graph: OpGraph, way: OpRules) -> set[int]:
    """Parameters that a way to split leaves in slices."""
    read = {
        int(graph.storage[tensor])
        for op, rule in way
        for tensor, place in zip(graph.ops[op].inputs, rule.inputs, strict=True)
        if place.kind == "S"
    }
    return read & graph.trained


def _placed(
    rules: dict[int, OpRule], groups: Sequence[int], ops: Sequence[Sequence[int]]
) -> tuple[tuple[int, int, OpRule], ...]:
    """Rules with the position of their group in ``groups`` and their own position in it."""
    return tuple(
        (offset, ops[group].index(op), rules[op])
        for offset, group in enumerate(groups)
        for op in ops[group]
        if op in rules
    )


def _added_in_parts(
    graph: OpGraph, groups: Sequence[int], split: dict[int, OpRule]
) -> dict[int, OpRule]:
    """Rules of ops that add partial sums to each other, so that one sum over the team suffices.

    Separate projections of queries, keys and values each make a partial sum of one gradient.
    """
    chosen, group = set(groups), group_ops(graph).group
    parts = {
        tensor
        for op, rule in split.items()
        for tensor, place in zip(graph.outputs[op], rule.outputs, strict=True)
        if place == P
    }
    found: dict[int, OpRule] = {}
    for index, op in enumerate(graph.ops):
        if int(group[index]) not in chosen or index in split or op.phase == Phase.UPDATE:
            continue
        if not op.inputs or not all(tensor in parts for tensor in op.inputs):
            continue
        if len(op.inputs) > 1 and any(len(set(graph.readers(each))) > 1 for each in op.inputs):
            continue  # one of the inputs is summed anyway, for another reader
        given = tuple(P for _ in op.inputs)
        result = propagate(graph.calls[index], given, 1)
        if result is None or result.inputs != given or result.outputs != (P,):
            continue
        if not graph.is_view[index]:
            if len(op.inputs) == 1:
                continue  # it would not save a sum
            found[index] = OpRule(inputs=given, outputs=(P,), units=1)
        parts.update(graph.outputs[index])
    return found


def _done_by_all(
    graph: OpGraph, groups: Sequence[int], split: dict[int, OpRule]
) -> dict[int, OpRule]:
    """Rules that let every member of a team run all other ops of the groups."""
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
    """A sentence if the largest split value (the logits) is made whole for its reader (the loss).

    Either its slices are gathered, or it is a partial sum over features.
    """
    largest, weights = 0.0, set(graph.parameters)
    in_layer, group = layers_of(graph).of_group, group_ops(graph).group
    for op in split:
        if graph.ops[op].phase != Phase.FORWARD or in_layer[group[op]] != NO_LAYER:
            continue
        for tensor, place in zip(graph.outputs[op], split[op].outputs, strict=True):
            reads_whole = any(
                reader not in split and not graph.is_view[reader]
                for reader in graph.readers(tensor)
            )
            given = (each for each in graph.ops[op].inputs if graph.storage[each] not in weights)
            read = max((graph.tensor_bytes[each] for each in given), default=0)
            is_sum = place == P and graph.tensor_bytes[tensor] > read
            if is_sum or (place.kind == "S" and reads_whole):
                largest = max(largest, float(graph.tensor_bytes[tensor]))
    whole = max(
        (float(graph.tensor_bytes[t]) for op in split for t in graph.outputs[op]), default=0.0
    )
    if largest and largest == whole:
        yield (
            "The loss reads the logits whole, so teams gather them or add them up (Megatron-LM "
            "sums over the parts of the vocabulary instead)."
        )
