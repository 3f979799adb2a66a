"""Rules that cut a full-batch graph network: rows of nodes with neighbours' rows, or features.

**Rows** (vertex partition, arXiv 2212.05009): each device of a team owns consecutive nodes. Dense
layers and losses run on the own rows; a sparse product reads the rows of neighbours, which their
owners send, and its backward pass reads gradients of the same kind, so that sums are complete.

**Features** (NeutronTP, VLDB 2025): each device owns some features of all nodes. Sparse products
then need nothing of others and are balanced whatever the degrees; dense layers pass between whole
features and slices.
"""

from dataclasses import replace
from functools import lru_cache

from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.op_rule import OpRules
from heterog.graph.placement import Placement, R, S
from heterog.strategy.spatial_split import SpatialSplit, rules_from

COARSE_UNITS = 256
"""Number of units in which rows of a huge graph move between devices, if it divides the rows."""
_DENSE = frozenset({"mm.default", "addmm.default", "bmm.default", "linear.default"})


@lru_cache(maxsize=16)
def row_splits(graph: OpGraph) -> tuple[SpatialSplit, ...]:
    """Find ways to cut the nodes of a graph: at every row, and at coarser units.

    Empty for a step without sparse products of what comes with the batch.
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
def feature_splits(graph: OpGraph) -> tuple[SpatialSplit, ...]:
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
    for tensor in graph.inputs_of_kind(TensorKind.BATCH):
        shape, along = graph.tensors[tensor].shape, graph.batch_placements[tensor]
        dims = [dim for dim, size in enumerate(shape) if size in nodes and S(dim) != along]
        if dims and shape[dims[0]] % units == 0:
            seeds[tensor] = S(dims[0])
    return rules_from(graph, units, seeds)


def feature_rules(graph: OpGraph, units: int) -> OpRules:
    """Rules of all ops for a team that cuts features, where dense layers have ``units`` of them.

    A layer whose input is whole gets columns of its weight, so that its output is cut; the next
    one gets rows, and makes parts of a sum.

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


def _split(graph: OpGraph, rules: OpRules, units: int) -> SpatialSplit:
    cut = [op for op, rule in rules if any(place.is_split for place in rule.inputs)]
    if not any(graph.ops[op].kind == SPARSE_PRODUCT for op in cut):
        cut = []
    (dim,) = {
        next(place.dim for place in rule.inputs if place.is_split)
        for op, rule in rules
        if op in cut and graph.ops[op].kind == SPARSE_PRODUCT
    } or {0}
    flops = float(sum(graph.ops[op].flops for op in cut))
    return SpatialSplit(dim=dim, units=units, op_rules=rules, flops=flops)


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
        # Of a weight [out, in] a product reads the transpose; a module of one's own may not.
        is_turned = graph.tensors[shown].shape != graph.tensors[weight].shape or shown != weight
        shape = graph.tensors[weight].shape
        if need.is_split:
            return {weight: S(1 - need.dim if is_turned else need.dim)}
        out = 0 if is_turned else 1
        if need == R and shape[out] % units == 0:
            biases = [s for _, s in weights if graph.tensors[s].shape == (shape[out],)]
            return {weight: S(out), **dict.fromkeys(biases, S(0))}
    return {}
