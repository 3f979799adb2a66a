"""Placement of every tensor when the batch is shared out: propagation from the batch inputs.

One pass over the ops in program order. Each op's sharding rule turns the placements of its inputs
into the placements it needs and the placements of its outputs; where they differ, the lowering
makes a conversion (a slice is free, S to R is a gather, P to R an all-reduce). Backward ops need
no special treatment: a weight gradient comes out as P, a sum over the devices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from heterog.errors import GraphError
from heterog.graph.op_graph import FloatArray, OpGraph, Phase, TensorKind
from heterog.graph.own_rows import OwnRows
from heterog.graph.placement import L, OpCall, P, Placement, R, S, kinds
from heterog.graph.sharding_rules import RULES, RuleResult, Special, claims_checked, propagate
from heterog.graph.sharding_rules.pointwise import FILLS, PLUS_NUMBER
from heterog.graph.sharding_rules.reduction import LABEL_COUNTING_LOSSES, MEAN
from heterog.graph.sharding_rules.table import INSIDE_TEAMS
from heterog.grouped import grouped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """Placements along the batch and the work that follows from them.

    Attributes:
        placements: Placement of each tensor, as its producer leaves it.  # [num_tensors]
        needed: Placement in which each op needs each input.  # [num_ops][num_inputs]
        specials: Change that keeps each op exact on a part of the batch, if any.  # [num_ops]
        unruled: Ops without a rule, run replicated on gathered inputs.
        follows_batch: Whether the forward pass makes a tensor from the batch, buffers and
            constants alone, without parameters or random numbers: every rank can then make the
            whole tensor before the step.  # [num_tensors]
        flops_fixed: FLOPs that every device does, whatever its share.  # [num_ops]
        flops_per_sample: FLOPs per sample of the local share.  # [num_ops]
        bytes_fixed: Bytes moved whatever the share.  # [num_ops]
        bytes_per_sample: Bytes moved per sample of the local share.  # [num_ops]
    """

    placements: tuple[Placement, ...]
    needed: tuple[tuple[Placement, ...], ...]
    specials: tuple[str | None, ...]
    unruled: tuple[int, ...]
    follows_batch: tuple[bool, ...]
    flops_fixed: FloatArray
    flops_per_sample: FloatArray
    bytes_fixed: FloatArray
    bytes_per_sample: FloatArray

    def work(self, samples: int) -> tuple[FloatArray, FloatArray]:
        """FLOPs of each op on a share of the batch, and bytes that it moves.  # [num_ops] each"""
        flops = self.flops_fixed + samples * self.flops_per_sample
        return flops, self.bytes_fixed + samples * self.bytes_per_sample


@lru_cache(maxsize=64)
def batch_plan(graph: OpGraph) -> BatchPlan:
    """Propagate the batch through a graph.

    Expansions of constants (a mask or position row repeated for every sample), and tensors made
    from them, come out replicated in a first pass, because nothing marks one of their dimensions
    as the batch. Where all their readers use only the part of the local samples, a second pass
    splits them where they are made. Before, totals of partial sums are moved to where they are
    smallest. Each counts if it needs no more conversions than what was before it.
    """
    seeds: dict[int, RuleResult] = {}
    state = _propagate(graph, seeds)
    for find in (_early_totals, _split_at_birth):
        more = seeds | find(graph, *state[:2])
        if len(more) > len(seeds):
            other = _propagate(graph, more)
            if _num_conversions(graph, *other[:2]) <= _num_conversions(graph, *state[:2]):
                state, seeds = other, more
    placements, needed, specials, unruled, follows = state
    costs = [
        op_work(
            graph,
            index,
            [placements[tensor] for tensor in graph.outputs[index]],
            # Values of the whole batch are made from inputs that every device has whole.
            (R,) * len(needed[index]) if special == Special.OF_WHOLE_BATCH else needed[index],
            graph.batch_size,
        )
        for index, special in enumerate(specials)
    ]
    columns = np.array(costs, np.float64).reshape(graph.num_ops, 4)
    return BatchPlan(
        placements=tuple(placements),
        needed=tuple(needed),
        specials=tuple(specials),
        unruled=tuple(unruled),
        follows_batch=tuple(follows),
        flops_fixed=columns[:, 0],
        flops_per_sample=columns[:, 1],
        bytes_fixed=columns[:, 2],
        bytes_per_sample=columns[:, 3],
    )


_State = tuple[
    list[Placement], list[tuple[Placement, ...]], list[str | None], list[int], list[bool]
]  # placements, needed, specials, unruled, follows_batch


def _propagate(graph: OpGraph, seeds: Mapping[int, RuleResult]) -> _State:
    placements = list(graph.batch_placements)
    needed: list[tuple[Placement, ...]] = []
    specials: list[str | None] = []
    unruled: list[int] = []
    follows = [tensor.kind != TensorKind.PARAMETER for tensor in graph.tensors[: graph.num_inputs]]
    rows = OwnRows(graph)
    for index, op in enumerate(graph.ops):
        given = tuple(placements[tensor] for tensor in op.inputs)
        is_known = op.phase == Phase.FORWARD and all(follows[tensor] for tensor in op.inputs)
        result: RuleResult | None
        if index in seeds:
            # A fill reads nothing but the dtype of its input.
            result = replace(seeds[index], inputs=given) if op.kind in FILLS else seeds[index]
        elif op.phase == Phase.UPDATE:
            # The gradient is synchronised before the update sees it; the lowering decides how.
            result = RuleResult(given, (R,) * op.num_outputs)
        elif op.rule is not None:  # an imported graph states how its ops split
            result = RuleResult(*op.rule)
        else:
            result = _rule_of(graph, index, given, rows, follows)
            if is_known and _asks_for_others(graph, index, given, result):
                # Every rank has the numbers of the whole batch before the step, so each computes
                # this from all of them: every micro-batch has it, and nothing is sent.
                result = RuleResult(given, (R,) * op.num_outputs, Special.OF_WHOLE_BATCH)
        if result is None:
            # Always right, never fast: every device gathers the inputs and does all of the op.
            if any(place.kind != "R" for place in given):
                unruled.append(index)
            result = RuleResult(tuple(R for _ in given), (R,) * op.num_outputs)
        needed.append(result.inputs)
        placements.extend(result.outputs)
        specials.append(result.special)
        follows.extend([is_known and result.special not in _RANDOM] * op.num_outputs)
    return placements, needed, specials, unruled, follows


def _asks_for_others(
    graph: OpGraph, index: int, given: tuple[Placement, ...], result: RuleResult | None
) -> bool:
    """Whether an op makes a sum over samples, or one value from several samples.

    Views make no values, and writes reach buffers once a step. What an op without any rule does is
    not known: it may draw numbers.
    """
    if result is not None and set(result.outputs) == {P}:
        return True
    op = graph.ops[index]
    if graph.is_view[index] or op.is_write or op.kind not in RULES or L in given:
        return False
    needed = (R,) * len(given) if result is None else result.inputs
    is_drawn = result is not None and result.special is not None
    return not is_drawn and any(
        have.kind == "S" and want == R for have, want in zip(given, needed, strict=True)
    )


_RANDOM = (Special.OWN_RANDOM_STREAM, Special.SHARED_RANDOM_STREAM)


def _rule_of(
    graph: OpGraph,
    index: int,
    given: tuple[Placement, ...],
    rows: OwnRows | None,
    follows_batch: Sequence[bool],
) -> RuleResult | None:
    """Rule of an op for given placements; ``None`` if it can only run on whole inputs."""
    op = graph.ops[index]
    name = f"op {index} '{op.name or op.kind}'"
    with claims_checked(f"the args, inputs and outputs of {name} do not fit its kind"):
        result = None if rows is None else rows.rule(index, given)
        if result is None:
            result = built_in_rule(graph.calls[index], given, graph.batch_size, name)
        if op.kind in LABEL_COUNTING_LOSSES and not counts_known_labels(
            graph, index, follows_batch
        ):
            return None
        if result is not None and op.kind in _SUMS and {given[0], given[-1]} == {P, R}:
            # For example a penalty on the weights, added to the loss of the samples.
            return RuleResult(given, (P,), Special.BIAS_ON_ONE_RANK)
        if op.kind in PLUS_NUMBER and given == (P,):
            return RuleResult(given, (P,), Special.BIAS_ON_ONE_RANK)
        if op.kind == "where.self" and given[0] == R and set(given[1:]) == {P, R}:
            # A mask over the gradient of a value that all samples share: position biases of T5.
            return RuleResult(given, (P,), Special.BIAS_ON_ONE_RANK)
    return result


_SUMS = frozenset(kinds("add.Tensor sub.Tensor"))
"""Sums of a partial and a replicated operand; the replicated one may enter only once."""


@lru_cache(maxsize=256)
def micro_batches_refused(graph: OpGraph, num_micro: int) -> str:
    """Reason, in words, why a step cannot be cut into micro-batches; empty if it can."""
    whole = ops_of_the_whole_batch(graph) if num_micro > 1 else []
    if not whole:
        return ""
    op = graph.ops[whole[0]]
    return (
        f"{num_micro} micro-batches cannot be combined with ops that need the whole batch (they "
        f"would see a micro-batch only): {len(whole)}, the first is '{op.kind}' in module "
        f"'{op.module or '(root)'}'; plan without micro-batches, or "
        "compute it for each sample alone (the balance of a sample's own tokens, say)."
    )


@lru_cache(maxsize=64)
def norms_of_lone_values(graph: OpGraph) -> tuple[int, ...]:
    """Forward BatchNorms that have one value per channel on a device with one sample.

    One value has no variance, so torch refuses to train on it. This happens with maps of 1 x 1
    and with plain features (``nn.BatchNorm1d``).
    """
    specials = batch_plan(graph).specials
    return tuple(
        index
        for index, op in enumerate(graph.ops)
        if op.phase == Phase.FORWARD
        and specials[index] == Special.LOCAL_STATISTICS
        and values_per_channel(graph.tensors[op.inputs[0]].shape) <= graph.batch_size
    )


def values_per_channel(shape: Sequence[int]) -> int:
    """Number of values that a BatchNorm normalises together: all but the second dimension.

    >>> values_per_channel((8, 64, 7, 7))
    392
    """
    return math.prod(shape) // max(shape[1], 1)


def ops_of_the_whole_batch(graph: OpGraph) -> list[int]:
    """Ops that would compute something else if they saw one micro-batch at a time.

    There are three kinds. Some need the whole of a tensor that is split or partial along the
    batch, such as a mean over the batch as a divisor. Some make a gradient that is the same in
    every micro-batch, so that it would count several times. Some write a buffer of the model once
    a step, as spectral norm does (BatchNorm's statistics are local anyway). Reading the number of
    labels that count is allowed, because it is known before the step.
    """
    plan = batch_plan(graph)
    found = []
    for index, op in enumerate(graph.ops):
        if op.phase == Phase.UPDATE:
            if plan.placements[op.inputs[1]] == R and graph.producer[op.inputs[1]] >= 0:
                found.append(int(graph.producer[op.inputs[1]]))
            continue
        steps_buffer = op.is_write and not graph.is_constant[index]
        if steps_buffer and L not in plan.needed[index]:
            found.append(index)
    for index, tensor in reads_across_samples(graph):
        maker = int(graph.producer[tensor])
        counts_labels = maker >= 0 and plan.specials[maker] == Special.NLL_GLOBAL_WEIGHT
        if not (counts_labels and tensor == graph.outputs[maker][1]):
            found.append(index)
    return sorted(set(found))


def reads_across_samples(graph: OpGraph) -> Iterator[tuple[int, int]]:
    """(op, tensor) wherever an op reads more of a tensor than its device's own samples made.

    The tensor is split along the batch and needed whole (for a sum over earlier samples, say), or
    it is a partial sum and the op needs the total.
    """
    plan = batch_plan(graph)
    for index, op in enumerate(graph.ops):
        if op.phase == Phase.UPDATE:
            continue
        for tensor, needed in zip(op.inputs, plan.needed[index], strict=True):
            given = plan.placements[tensor]
            if given.kind in "SP" and given != needed:
                yield index, tensor


def counts_known_labels(graph: OpGraph, op: int, follows_batch: Sequence[bool]) -> bool:
    """Whether the total weight of the labels of a loss can be computed before the step.

    Each device divides its part of a mean by that weight, so it must be known when the first
    part of the loss is computed. Labels that the model itself makes come too late for that. If no
    op reads the weight, the graph does not sum it. In both cases the loss runs on gathered inputs.
    """
    labels, weight = graph.ops[op].inputs[1:], graph.outputs[op][1]
    if graph.ops[op].args.get("reduction", MEAN) != MEAN:
        return True
    return bool(graph.consumers[weight]) and all(follows_batch[tensor] for tensor in labels)


def built_in_rule(
    call: OpCall, given: tuple[Placement, ...], batch_size: int, name: str
) -> RuleResult | None:
    """Result of the built-in rule of an op; ``None`` if there is none for its kind.

    Args:
        call: The op as rules see it. In an imported graph it may claim anything.
        given: Placements of its inputs.
        batch_size: Samples of the whole batch.
        name: Name of the op, for messages.

    Raises:
        GraphError: the op has other arguments, inputs or outputs than its kind has. If an output
            had no placement, all tensors after it would get the placement of their neighbour.
    """
    try:
        found = propagate(call, given, batch_size)
    except GraphError as error:
        raise GraphError(f"{name}: {error}") from error
    if found is None or found.special in INSIDE_TEAMS:
        return None
    claimed = len(call.inputs), len(call.outputs)
    wanted = len(found.inputs), len(found.outputs)
    if claimed != wanted:
        raise GraphError(
            f"{name} has {claimed[0]} inputs and {claimed[1]} outputs, but {call.kind} with these "
            f"args has {wanted[0]} and {wanted[1]}; correct them, or give the op a rule of its "
            "own."
        )
    return found


def _early_totals(
    graph: OpGraph, placements: list[Placement], needed: list[tuple[Placement, ...]]
) -> dict[int, RuleResult]:
    """Rules of ops that read a total, because what they make of a partial sum is larger.

    A gradient of a statistic over samples goes back to all of them: one number for each class is
    summed over devices, not its expansion to every sample.
    """
    rules = {}
    for index, op in enumerate(graph.ops):
        for tensor, place in zip(op.inputs, needed[index], strict=True):
            if placements[tensor] != P or place == P or op.phase == Phase.UPDATE:
                continue
            least, first = graph.tensors[tensor].num_elements, None
            while (maker := int(graph.producer[tensor])) >= 0:
                partial = [each for each in graph.ops[maker].inputs if placements[each] == P]
                if len(partial) != 1 or not set(needed[maker]) <= {P, R} or P not in needed[maker]:
                    break
                (tensor,) = partial
                if graph.tensors[tensor].num_elements <= least:
                    least, first = graph.tensors[tensor].num_elements, maker
            if first is not None:
                read, made = len(graph.ops[first].inputs), graph.ops[first].num_outputs
                rules[first] = RuleResult((R,) * read, (R,) * made)
    return rules


def _split_at_birth(
    graph: OpGraph, placements: list[Placement], needed: list[tuple[Placement, ...]]
) -> dict[int, RuleResult]:
    """Rules by which ops make only the local samples of a value that all readers want split.

    Readers that only add samples up to a gradient take either: the bias of a head whose mean is
    the loss has a gradient that every device knows, but no micro-batch its part of it.
    """
    wanted = grouped(
        (tensor, (reader, position, place))
        for reader, (op, places) in enumerate(zip(graph.ops, needed, strict=True))
        for position, (tensor, place) in enumerate(zip(op.inputs, places, strict=True))
    )
    # The ops are visited backwards. A replicated tensor is wanted split if each reader slices it,
    # or can make from a slice what its own readers want; those readers are in ``rules``.
    rules: dict[int, RuleResult] = {}
    seeds: dict[int, RuleResult] = {}
    split: dict[int, Placement] = {}
    for index in range(graph.num_ops - 1, -1, -1):
        op = graph.ops[index]
        if op.num_outputs != 1 or op.phase == Phase.UPDATE:
            continue
        if graph.is_constant[index] and not graph.is_view[index]:
            continue  # runs whole on every device, with whole inputs and outputs
        tensor = graph.outputs[index][0]
        if placements[tensor].kind != "R":
            continue
        readers = wanted.get(tensor, [])
        totals = [reader for reader, *_ in readers if _makes_gradient(graph, reader)]
        wishes = {
            rules[reader].inputs[position] if reader in rules else place
            for reader, position, place in readers
            if reader not in totals
        }
        if len(wishes) != 1:
            continue
        (place,) = wishes
        shape = graph.tensors[tensor].shape
        if place.kind != "S" or place.dim >= len(shape):
            continue
        if shape[place.dim] % graph.batch_size:
            continue  # the dimension does not hold samples, or is split along something else
        sums = [_rule_of(graph, each, (place,), None, ()) for each in totals]
        if any(rule != RuleResult((place,), (P,)) for rule in sums):
            continue
        split[tensor] = place
        made = made_at_birth(graph, index, place)
        if made is not None:
            seeds[index] = made
            continue
        found = _of_a_slice(graph, index, place, placements)
        if found is not None:
            rules[index] = found
    for index, rule in rules.items():
        reads = zip(graph.ops[index].inputs, rule.inputs, strict=True)
        if not any(place.kind == "S" and tensor in split for tensor, place in reads):
            seeds[index] = rule  # its inputs stay whole; other rules follow from split inputs
    return seeds


def _makes_gradient(graph: OpGraph, index: int) -> bool:
    """Whether an op of one input makes a gradient that only updates read."""
    readers = [reader for tensor in graph.outputs[index] for reader in graph.readers(tensor)]
    return (
        len(graph.ops[index].inputs) == 1
        and not graph.is_view[index]
        and bool(readers)
        and all(graph.ops[reader].phase == Phase.UPDATE for reader in readers)
    )


def made_at_birth(graph: OpGraph, index: int, place: Placement) -> RuleResult | None:
    """Rule of an expansion or fill that makes only the local samples, however many they are."""
    op = graph.ops[index]
    shape = graph.tensors[graph.outputs[index][0]].shape
    if shape[place.dim] != graph.batch_size or place.outer != 1:
        return None
    if op.kind in FILLS:
        return RuleResult((R,) * len(op.inputs), (place,))
    if op.kind == "expand.default":
        source = graph.tensors[op.inputs[0]].shape
        added = len(shape) - len(source)
        if place.dim < added or source[place.dim - added] == 1:
            return RuleResult((R,) * len(op.inputs), (place,))
    return None


def _of_a_slice(
    graph: OpGraph, index: int, place: Placement, placements: list[Placement]
) -> RuleResult | None:
    """Rule by which an op makes its part at ``place`` from a slice of one whole input."""
    op, batch = graph.ops[index], graph.batch_size
    if op.rule is not None or any(placements[tensor] != R for tensor in op.inputs):
        return None
    for position, tensor in enumerate(op.inputs):
        if tensor < graph.num_inputs and graph.tensors[tensor].kind == TensorKind.PARAMETER:
            continue
        for dim, size in enumerate(graph.tensors[tensor].shape):
            if size == 0 or size % batch:
                continue
            for outer in _divisors(size // batch):
                given = tuple(S(dim, outer) if n == position else R for n in range(len(op.inputs)))
                with suppress(GraphError):
                    found = _rule_of(graph, index, given, None, ())
                    if (
                        found is not None
                        and found.outputs == (place,)
                        and found.special is None
                        and all(each.kind in "RS" for each in found.inputs)
                    ):
                        return found
    return None


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    """Divisors of a positive number in order, in O(sqrt(number)): dimensions may have millions."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys((*small, *(number // n for n in reversed(small)))))


def _num_conversions(
    graph: OpGraph, placements: list[Placement], needed: list[tuple[Placement, ...]]
) -> int:
    """Gathers and all-reduces that the placements ask for (slices are free)."""
    return sum(
        placements[tensor].kind in "SP" and place != placements[tensor]
        for op, places in zip(graph.ops, needed, strict=True)
        for tensor, place in zip(op.inputs, places, strict=True)
    )


def op_work(
    graph: OpGraph,
    index: int,
    outputs: Sequence[Placement],
    needed: tuple[Placement, ...],
    units: int,
) -> tuple[float, float, float, float]:
    """(FLOPs fixed, per unit, bytes fixed, per unit) of an op along an axis.

    FLOPs follow the share as soon as any operand is split; bytes do so tensor by tensor, so a
    matrix product reads its whole weight for every share.
    """
    if graph.is_view[index]:
        return 0.0, 0.0, 0.0, 0.0
    op = graph.ops[index]
    batched = any(place.is_split for place in (*needed, *outputs))
    sizes = [
        *zip(op.inputs, needed, strict=True),
        *zip(graph.outputs[index], outputs, strict=True),
    ]
    total = float(sum(graph.tensor_bytes[tensor] for tensor, _ in sizes))
    split = float(sum(graph.tensor_bytes[tensor] for tensor, place in sizes if place.is_split))
    # An op that touches only a part of an input (embedding) moves fewer bytes than its tensors.
    moved = op.bytes_read + op.bytes_written
    if batched and moved < 0.5 * total:
        split, total = moved, moved
    scale = moved / total if total else 0.0
    fixed = (total - split) * scale if total else moved
    flops = (0.0, op.flops / units) if batched else (op.flops, 0.0)
    return flops[0], flops[1], fixed, split * scale / units
