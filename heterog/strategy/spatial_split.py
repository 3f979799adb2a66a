"""Rules that cut one sample, or a full-batch graph, among the devices of a team.

**Space**: each device of a team owns some rows of every activation. Hybrid parallelism of
convolutional networks (Oyama et al. 2020, arXiv 2007.12856) cuts a sample along its depth, height
or width, because one sample does not fit a device, or because there are fewer samples than
devices. Here one pass through the graph in program order gives every op the rule that keeps its
tensors cut; a convolution, pooling or upsampling reads a window of rows (see
``heterog.graph.sharding_rules.legal``). Ops that cannot be cut run whole on every member of the
team, such as linear layers after the last pooling; the gradients of their weights need no sum.

**Rows of nodes** (vertex partition, arXiv 2212.05009): each device of a team owns consecutive
nodes of a graph. Dense layers and losses run on its own rows. A sparse product reads the rows of
neighbours, which their owners send; its backward pass reads gradients in the same way, so that
sums are complete.

**Features** (NeutronTP, VLDB 2025): each device owns some features of all nodes. Sparse products
then read nothing from other devices and are balanced for any degrees; dense layers convert between
whole features and slices.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpCall, OpRule, OpRules, Placement, R, S, kinds
from heterog.graph.sharding_rules import RuleResult, halo_rule, propagate
from heterog.graph.sharding_rules.legal import CONVOLUTION
from heterog.graph.sparse_pattern import SparsePattern


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSplit:
    """A way to cut samples along space or positions, or the nodes or features of a graph.

    Attributes:
        units: Number of units: rows of the coarsest activation that is still cut, or a divisor;
            runs of positions of equal length.
        op_rules: Rules of all ops.
        dim: For space and graphs, dimension of the activations that is cut; 2 is the first after
            the channels.
        flops: For space and graphs, FLOPs of the ops that are cut, in the whole step.
        entries: Pattern of the sparse matrix whose rows are cut, if any, for the cost of rows.
    """

    units: int
    op_rules: OpRules
    dim: int = 0
    flops: float = 0.0
    entries: SparsePattern | None = None


@lru_cache(maxsize=16)
def spatial_splits(graph: OpGraph) -> tuple[UnitSplit, ...]:
    """Ways to cut a network along space, those that cut the most work first.

    Returns:
        One split for each dimension and each set of ops that can be cut, with the most units that
        cut this set. Empty for a network without a convolution on a tensor of the batch.
    """
    found: dict[tuple[int, tuple[int, ...]], UnitSplit] = {}
    ranks = [len(graph.tensors[tensor].shape) for tensor in _seeds(graph)]
    for dim in range(2, max(ranks, default=0)):
        for units in _unit_counts(graph, dim):
            rules = spatial_rules(graph, dim, units)
            cut = _cut_ops(rules)
            if cut and (dim, cut) not in found:
                flops = float(sum(graph.ops[op].flops for op in cut))
                found[dim, cut] = UnitSplit(dim=dim, units=units, op_rules=rules, flops=flops)
    return tuple(sorted(found.values(), key=lambda each: (-each.flops, -each.units, each.dim)))


def _cut_ops(rules: OpRules) -> tuple[int, ...]:
    return tuple(op for op, rule in rules if any(place.is_split for place in rule.inputs))


def _unit_counts(graph: OpGraph, dim: int) -> list[int]:
    """Numbers of rows by which activations of convolutions could be cut, large ones first."""
    sizes = {
        graph.tensors[tensor].shape[dim]
        for op in range(graph.num_ops)
        if graph.ops[op].kind == CONVOLUTION
        for tensor in graph.outputs[op]
        if len(graph.tensors[tensor].shape) > dim
    }
    counts = {
        units
        for size in sizes
        for units in range(2, min(size, MOST_UNITS) + 1)
        if size % units == 0
    }
    return sorted(counts, reverse=True)


def _seeds(graph: OpGraph) -> list[int]:
    """Tensors of the batch with as many dimensions as the first convolution's input."""
    ranks = [len(graph.tensors[op.inputs[0]].shape) for op in graph.ops if op.kind == CONVOLUTION]
    if not ranks:
        return []
    batch = graph.batch
    return [each for each in batch if len(graph.tensors[each].shape) == ranks[0]]


def spatial_rules(graph: OpGraph, dim: int, units: int) -> OpRules:
    """Rules of all ops for a team that cuts one dimension of space.

    Args:
        graph: One training step.
        dim: The dimension.
        units: Number of units of the axis.
    """
    seeds = {
        tensor: S(dim) for tensor in _seeds(graph) if graph.tensors[tensor].shape[dim] % units == 0
    }
    return rules_from(graph, units, seeds)


def rules_from(graph: OpGraph, units: int, seeds: Mapping[int, Placement]) -> OpRules:
    """Rules of all ops that keep tensors cut as long as nothing large has to be gathered.

    Args:
        graph: One training step.
        units: Number of units of the axis.
        seeds: Placements of the step's inputs that are cut; all others follow from them.
    """
    uncut: set[int] = set()
    while True:
        rules, unlike = _pass(graph, units, seeds, uncut)
        if not unlike:
            return rules
        uncut |= unlike


def _pass(
    graph: OpGraph, units: int, seeds: Mapping[int, Placement], uncut: Collection[int]
) -> tuple[OpRules, set[int]]:
    """One pass through a graph, in which the ops ``uncut`` run whole.

    Returns:
        The rules, and the makers of local statistics that a reader cannot use.
    """
    places = dict(seeds)
    rules: list[tuple[int, OpRule]] = []
    unlike: set[int] = set()
    for index, op in enumerate(graph.ops):
        if op.phase == Phase.UPDATE or graph.is_constant[index]:
            continue
        given = tuple(places.get(tensor, R) for tensor in op.inputs)
        call, outputs = graph.calls[index], graph.outputs[index]
        if graph.is_view[index]:
            result = propagate(call, given, units)
            if result is not None and result.inputs == given:
                places |= zip(outputs, result.outputs, strict=True)
            continue
        result = None if index in uncut else _cut(call, given, units)
        if result is None:
            unlike.update(
                int(graph.producer[tensor])
                for tensor, place in zip(op.inputs, given, strict=True)
                if place.kind == "L"
            )
            result = RuleResult((R,) * len(given), (R,) * len(outputs))
        places |= zip(outputs, result.outputs, strict=True)
        rules.append((index, OpRule(inputs=result.inputs, outputs=result.outputs, units=units)))
    return tuple(rules), unlike


def _cut(call: OpCall, given: tuple[Placement, ...], units: int) -> RuleResult | None:
    """The rule that keeps an op cut; ``None`` if it has none without gathering a tensor."""
    split = next((place for place in given if place.kind == "S"), None)
    if split is None:
        adds = bool(given) and all(place.kind == "P" for place in given)
        result = propagate(call, given, units) if adds else None
        return result if result is not None and result.inputs == given else None
    result = halo_rule(call, split.dim, units) if split == S(split.dim) else None
    result = result or propagate(call, given, units)
    if result is None or not all(map(_is_near, given, result.inputs)):
        return None
    return result if any(place.is_split for place in result.inputs) else None


def _is_near(given: Placement, wanted: Placement) -> bool:
    """Whether a device has the needed part of a tensor, up to neighbours' rows and small sums."""
    if wanted.kind == "H":
        return given in (R, S(wanted.dim))
    if given == R:
        return wanted.kind == "S" or wanted == R
    return given == wanted or (given.kind == "P" and wanted == R)


MOST_UNITS = 256
"""Most units of rows of an activation."""
COARSE_UNITS = 256
"""Number of units in which rows of a huge graph move between devices, if it divides the rows."""
_DENSE = frozenset(kinds("mm addmm bmm linear"))


@lru_cache(maxsize=16)
def row_splits(graph: OpGraph) -> tuple[UnitSplit, ...]:
    """Find ways to cut the nodes of a graph: at every row, and at coarser units.

    Empty for a step in which no sparse product can be cut.
    """
    sizes = {
        graph.tensors[graph.ops[op].inputs[0]].shape[-2]
        for op in range(graph.num_ops)
        if graph.ops[op].kind == SPARSE_PRODUCT
    }
    found = []
    for size in sorted(sizes, reverse=True):
        entries = next(each for each in graph.patterns if each.num_columns == size)
        counts = {size, next(n for n in range(min(size, COARSE_UNITS), 0, -1) if size % n == 0)}
        splits = [_split(graph, row_rules(graph, n), n) for n in sorted(counts) if n > 1]
        found += [replace(each, entries=entries) for each in splits]
    return tuple(each for each in found if each.flops)


@lru_cache(maxsize=16)
def feature_splits(graph: OpGraph) -> tuple[UnitSplit, ...]:
    """Ways to cut features: into as many units as a hidden layer has features.

    Empty for a step without sparse products.
    """
    sizes = {
        graph.tensors[graph.ops[op].inputs[0]].shape[-1]
        for op in range(graph.num_ops)
        if graph.ops[op].kind == SPARSE_PRODUCT
    }
    found = [_split(graph, feature_rules(graph, n), n) for n in sorted(sizes, reverse=True)]
    return tuple(each for each in found if each.flops)


def row_rules(graph: OpGraph, units: int) -> OpRules:
    """Rules of all ops for a team that cuts the nodes of a graph.

    Args:
        graph: One training step.
        units: Units of the axis; they must divide the number of nodes.
    """
    nodes = {pattern.num_columns for pattern in graph.patterns}
    seeds: dict[int, Placement] = {}
    for tensor in graph.batch:
        shape, along = graph.tensors[tensor].shape, graph.batch_placements[tensor]
        dims = [dim for dim, size in enumerate(shape) if size in nodes and S(dim) != along]
        if dims and shape[dims[0]] % units == 0:
            seeds[tensor] = S(dims[0])
    return rules_from(graph, units, seeds)


def feature_rules(graph: OpGraph, units: int) -> OpRules:
    """Rules of all ops for a team that cuts features into ``units`` units.

    A dense layer whose input is whole is split by the columns of its weight, so that its output is
    cut; the next layer is split by rows and makes parts of a sum.

    Args:
        graph: One training step.
        units: Units of the axis; they must divide the number of features of some layer.
    """
    seeds: dict[int, Placement] = {}
    while True:
        rules = rules_from(graph, units, seeds)
        new = _next_weight(graph, rules, seeds, units)
        if not new:
            return rules
        seeds |= new


def _split(graph: OpGraph, rules: OpRules, units: int) -> UnitSplit:
    """The split by some rules; of no FLOPs if they cut no sparse product."""
    cut = _cut_ops(rules)
    dims = {
        next(place.dim for place in rule.inputs if place.is_split)
        for op, rule in rules
        if op in cut and graph.ops[op].kind == SPARSE_PRODUCT
    }
    (dim,) = dims or {0}
    flops = float(sum(graph.ops[op].flops for op in cut)) if dims else 0.0
    return UnitSplit(dim=dim, units=units, op_rules=rules, flops=flops)


def _next_weight(
    graph: OpGraph, rules: OpRules, seeds: dict[int, Placement], units: int
) -> dict[int, Placement]:
    """The placements of the first weight whose layer is not cut yet, and of its bias."""
    parameters = set(graph.parameters)
    for op, rule in rules:
        if graph.ops[op].phase != Phase.FORWARD or graph.ops[op].kind not in _DENSE:
            continue
        inputs = graph.ops[op].inputs
        weights = [
            (tensor, int(graph.storage[tensor]))
            for tensor in inputs
            if int(graph.storage[tensor]) in parameters
        ]
        matrix = [(t, s) for t, s in weights if len(graph.tensors[s].shape) == 2]
        if not matrix or matrix[0][1] in seeds:
            continue
        (shown, weight), position = matrix[0], inputs.index(matrix[0][0])
        need = rule.inputs[position]
        # A product reads the transpose of a weight [out, in]; a user's module may not transpose.
        is_turned = graph.tensors[shown].shape != graph.tensors[weight].shape or shown != weight
        shape = graph.tensors[weight].shape
        if need.is_split:
            return {weight: S(1 - need.dim if is_turned else need.dim)}
        out = 0 if is_turned else 1
        if need == R and shape[out] % units == 0:
            biases = [s for _, s in weights if graph.tensors[s].shape == (shape[out],)]
            return {weight: S(out), **dict.fromkeys(biases, S(0))}
    return {}
