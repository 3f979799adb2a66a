"""Rules that cut samples along space: each device of a team owns some rows of every activation.

Hybrid parallelism of convolutional networks (Oyama et al. 2020, arXiv 2007.12856) cuts a sample
along its depth, height or width, because one sample does not fit a device, or because there are
fewer samples than devices. Here one pass through the graph in program order gives every op the
rule that keeps its tensors cut; a convolution, pooling or upsampling reads a window of rows (see
``heterog.graph.sharding_rules.halo``). What cannot be cut is done whole by every member of the
team: the linear layers behind the last pooling, whose weights then need no sums of gradients.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.op_rule import OpRule, OpRules
from heterog.graph.placement import OpCall, Placement, R, S
from heterog.graph.sharding_rules import RuleResult, halo_rule, propagate
from heterog.graph.sharding_rules.halo import CONVOLUTION
from heterog.graph.sparse_pattern import SparsePattern


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialSplit:
    """A way to cut a network along space, or along the nodes or features of a graph.

    Attributes:
        dim: Dimension of the activations that is cut; 2 is the first after the channels.
        units: Number of units: rows of the coarsest activation that is still cut, or a divisor.
        op_rules: Rules of all ops.
        flops: FLOPs of the ops that are cut, in the whole step.
        entries: Pattern of the sparse matrix whose rows are cut, if any, for the cost of rows.
    """

    dim: int
    units: int
    op_rules: OpRules
    flops: float
    entries: SparsePattern | None = None


@lru_cache(maxsize=16)
def spatial_splits(graph: OpGraph, most_units: int = 256) -> tuple[SpatialSplit, ...]:
    """Ways to cut a network along space, those that cut the most work first.

    Args:
        graph: One training step.
        most_units: Largest number of units.

    Returns:
        One split for each dimension and each number of units that cuts other ops than the last; of
        those that cut the same ops the one with the most units. Empty for a network without a
        convolution on a tensor of the batch.
    """
    found: list[SpatialSplit] = []
    for dim in _dims(graph):
        known: set[tuple[int, ...]] = set()
        for units in _unit_counts(graph, dim, most_units):
            rules = spatial_rules(graph, dim, units)
            cut = tuple(op for op, rule in rules if any(p.is_split for p in rule.inputs))
            if cut and cut not in known:
                known.add(cut)
                flops = float(sum(graph.ops[op].flops for op in cut))
                found.append(SpatialSplit(dim=dim, units=units, op_rules=rules, flops=flops))
    return tuple(sorted(found, key=lambda each: (-each.flops, -each.units, each.dim)))


def _dims(graph: OpGraph) -> list[int]:
    ranks = [len(shape) for shape in _seed_shapes(graph)]
    return list(range(2, max(ranks, default=0)))


def _unit_counts(graph: OpGraph, dim: int, most: int) -> list[int]:
    """Numbers of rows by which activations of convolutions could be cut, large ones first."""
    sizes = {
        graph.tensors[tensor].shape[dim]
        for op in range(graph.num_ops)
        if graph.ops[op].kind == CONVOLUTION
        for tensor in graph.outputs[op]
        if len(graph.tensors[tensor].shape) > dim
    }
    counts = {
        units for size in sizes for units in range(2, min(size, most) + 1) if size % units == 0
    }
    return sorted(counts, reverse=True)


def _seed_shapes(graph: OpGraph) -> list[tuple[int, ...]]:
    return [graph.tensors[tensor].shape for tensor in _seeds(graph)]


def _seeds(graph: OpGraph) -> list[int]:
    """Tensors of the batch with as many dimensions as the first convolution's input."""
    ranks = [len(graph.tensors[op.inputs[0]].shape) for op in graph.ops if op.kind == CONVOLUTION]
    if not ranks:
        return []
    batch = graph.inputs_of_kind(TensorKind.BATCH)
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
        seeds: Placements of the step's inputs that are cut; they follow from nothing else.
    """
    uncut: set[int] = set()
    while True:
        rules, unlike = _Pass(graph, units, seeds, uncut).run()
        if not unlike:
            return rules
        uncut |= unlike


class _Pass:
    """One pass through a graph.

    Args:
        graph: One training step.
        units: Number of units of the axis.
        seeds: Placements of the step's inputs that are cut.
        uncut: Ops that run whole.
    """

    def __init__(
        self,
        graph: OpGraph,
        units: int,
        seeds: Mapping[int, Placement],
        uncut: Collection[int],
    ) -> None:
        self.graph = graph
        self.units = units
        self.uncut = uncut
        self.places = dict(seeds)

    def run(self) -> tuple[OpRules, set[int]]:
        """The rules, and the makers of local statistics that a reader cannot use."""
        graph = self.graph
        rules: list[tuple[int, OpRule]] = []
        unlike: set[int] = set()
        for index, op in enumerate(graph.ops):
            if op.phase == Phase.UPDATE or graph.is_constant[index]:
                continue
            given = tuple(self.places.get(tensor, R) for tensor in op.inputs)
            outputs = graph.outputs[index]
            if graph.is_view[index]:
                result = propagate(graph.call(index), given, self.units)
                if result is not None and result.inputs == given:
                    self.places |= zip(outputs, result.outputs, strict=True)
                continue
            result = None if index in self.uncut else self._cut(graph.call(index), given)
            if result is None:
                unlike.update(
                    int(graph.producer[tensor])
                    for tensor, place in zip(op.inputs, given, strict=True)
                    if place.kind == "L"
                )
                result = RuleResult((R,) * len(given), (R,) * len(outputs))
            self.places |= zip(outputs, result.outputs, strict=True)
            rule = OpRule(inputs=result.inputs, outputs=result.outputs, units=self.units)
            rules.append((index, rule))
        return tuple(rules), unlike

    def _cut(self, call: OpCall, given: tuple[Placement, ...]) -> RuleResult | None:
        """The rule that keeps an op cut; ``None`` if it has none without gathering a tensor."""
        split = next((place for place in given if place.kind == "S"), None)
        if split is None:
            result = propagate(call, given, self.units)
            adds = bool(given) and all(place.kind == "P" for place in given)
            return result if adds and result is not None and result.inputs == given else None
        result = None
        if split == S(split.dim):
            result = halo_rule(call, split.dim, self.units)
        if result is None:
            result = propagate(call, given, self.units)
        if result is None or not all(map(_is_near, given, result.inputs)):
            return None
        cuts = any(place.is_split for place in result.inputs)
        return result if cuts else None


def _is_near(given: Placement, wanted: Placement) -> bool:
    """Whether a device has all it needs of a tensor, except neighbours' rows and small sums."""
    if wanted.kind == "H":
        return given in (R, S(wanted.dim))
    if given == R:
        return wanted.kind == "S" or wanted == R
    return given == wanted or (given.kind == "P" and wanted == R)
