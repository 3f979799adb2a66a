"""Rules that shard layers over the devices of their group, found by propagation.

Megatron-LM (Shoeybi et al. 2019, section 3) splits the first weight of a feed-forward block by
columns and the second by rows, and attention by heads: one sum over the devices forward and one
backward. This module needs no names of modules: a split of one weight is followed through the ops
of a region, forward and backward, as long as ops have a rule that keeps it. If an op then needs a
slice of another tensor (keys with queries), the split is followed back to the weights from which
that tensor is made.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product

from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import (
    OpCall,
    OpRule,
    OpRules,
    P,
    Placement,
    R,
    S,
    kinds,
    needs_no_transfer,
)
from heterog.graph.sharding_rules import RuleResult, legal_rules, propagate
from heterog.graph.sharding_rules.pointwise import FILLS
from heterog.grouped import grouped

_MOST_ROUNDS = 8
_LEAST_SUMMED = 16
"""Smallest ratio of summed bytes to a sum's bytes at which a sum over a team counts as small."""
_SUMS = frozenset(kinds("sum sum.dim_IntList"))
_CASTS = frozenset({"_to_copy.default"})
_OUTERS = (1, 2, 3)
"""A fused weight holds up to three projections (query, key, value)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A way to shard a region of ops.

    Attributes:
        parameter: Tensor id of the weight whose split was followed.
        placement: Placement of that weight.
        units: Number of units of the axis.
        op_rules: Rules of all ops that are split.
        flops: FLOPs of these ops, on all devices together.
    """

    parameter: int
    placement: Placement
    units: int
    op_rules: OpRules
    flops: float


def shardings(
    graph: OpGraph, groups: Iterable[int], *, parameters: Collection[int] | None = None
) -> tuple[Sharding, ...]:
    """Ways to shard the ops of some groups, the one that splits the most work first.

    Args:
        graph: One training step.
        groups: Groups to shard together; they should have the same devices and shares.
        parameters: Parameters whose splits are followed; by default all that these groups read.

    Returns:
        One sharding for each different set of ops, along the axis with the most units (it can be
        divided most exactly), the most work first; empty if nothing can be split.
    """
    region = ops_of_groups(graph, groups)
    followed = Region(graph, region)
    # The number of heads is a dimension that a view of a product adds: (batch, heads, sequence,
    # width of a head). Images have four dimensions too, but their views add none.
    shapes = [
        (graph.tensors[graph.ops[op].inputs[0]].shape, graph.tensors[tensor].shape)
        for op in region
        if graph.is_view[op]
        for tensor in graph.outputs[op]
    ]
    apart = {
        size
        for before, after in shapes
        if len(after) > 3 and len(after) > len(before)
        for size in after
    }
    found: dict[tuple[int, ...], Sharding] = {}
    for parameter in _weights(graph, region):
        if parameters is not None and parameter not in parameters:
            continue
        shape = graph.tensors[parameter].shape
        # Weights are (output, input, ...) or, in some libraries, (input, output).
        for dim, outer in product(range(2), _OUTERS):
            for units in sorted({shape[dim] // outer, *apart}, reverse=True):
                if units < 2 or shape[dim] % (outer * units):
                    continue
                placement = S(dim, outer)
                rules = _Follower(followed, {parameter: placement}, units).run()
                ops = tuple(op for op, _ in rules)
                known = found.get(ops)
                if ops and (known is None or known.units < units):
                    found[ops] = Sharding(
                        parameter=parameter,
                        placement=placement,
                        units=units,
                        op_rules=rules,
                        flops=float(sum(graph.ops[op].flops for op in ops)),
                    )
    return tuple(sorted(found.values(), key=lambda each: (-each.flops, -each.units)))


def ops_of_groups(graph: OpGraph, groups: Iterable[int]) -> list[int]:
    """Ops of some groups, except constants and updates, in program order."""
    chosen = set(groups) - {CONSTANT_GROUP}
    group = group_ops(graph).group
    return [
        op
        for op in range(graph.num_ops)
        if int(group[op]) in chosen and graph.ops[op].phase != Phase.UPDATE
    ]


def follow_split(region: "Region", splits: dict[int, Placement], units: int) -> OpRules:
    """Rules of the ops of a region that a split of some parameters leads to.

    Args:
        region: Ops through which splits are followed.
        splits: Placement of the parameters that are split at first.
        units: Number of units of the axis.
    """
    return _Follower(region, splits, units).run()


class Region:
    """Ops through which splits are followed.

    Args:
        graph: One training step.
        ops: Op indices, ascending.

    Attributes:
        members: The ops.
        readers: Members that read each tensor, ascending.
        row_of: Row of ``graph.updates`` of each parameter.
    """

    def __init__(self, graph: OpGraph, ops: Sequence[int]) -> None:
        self.graph = graph
        self.members = frozenset(ops)
        self.readers = grouped(
            (tensor, op) for op in ops for tensor in dict.fromkeys(graph.ops[op].inputs)
        )
        self.row_of = {parameter: row for row, (_, parameter, _) in enumerate(graph.updates)}


class _Due:
    """A priority queue of numbers: the smallest comes first, and none comes twice."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._known: set[int] = set()

    def add(self, numbers: Iterable[int]) -> None:
        """Add numbers, unless they are known."""
        for number in numbers:
            if number not in self._known:
                self._known.add(number)
                heappush(self._heap, number)

    def __iter__(self) -> Iterator[int]:
        while self._heap:
            yield heappop(self._heap)


class _Follower:
    def __init__(self, region: Region, splits: dict[int, Placement], units: int) -> None:
        self.graph = region.graph
        self.region = region
        self.units = units
        self.splits = dict(splits)
        self.pulled: dict[int, RuleResult] = {}

    def run(self) -> OpRules:
        """Follow splits forward and pull them backward until nothing changes."""
        rules: dict[int, RuleResult] = {}
        for _ in range(_MOST_ROUNDS):
            before = dict(self.splits), dict(self.pulled)
            rules = self._forward()
            self._split_gradients(rules)
            if before == (self.splits, self.pulled):
                break
        return tuple(
            (op, OpRule(inputs=rule.inputs, outputs=rule.outputs, units=self.units))
            for op, rule in sorted(rules.items())
        )

    def _forward(self) -> dict[int, RuleResult]:
        graph = self.graph
        places: dict[int, Placement] = dict(self.splits)
        rules: dict[int, RuleResult] = {}
        # Only ops that were pulled, or that read a placed tensor, are visited.
        due = _Due()
        due.add(self.pulled)
        for tensor in places:
            due.add(self.region.readers.get(tensor, ()))
        for op in due:
            inputs = graph.ops[op].inputs
            given = tuple([places.get(tensor, R) for tensor in inputs])
            if graph.is_view[op]:
                if given[0] == R:
                    continue
                result = propagate(graph.calls[op], given, self.units)
                if result is not None and result.inputs == given:
                    self._place(op, result, places, due)
                continue
            result = self.pulled.get(op)
            if result is None:
                if P in given:
                    given = tuple(map(self._with_statistics_summed, inputs, given))
                skipped = int(graph.ops[op].is_write)  # writing a whole value keeps it whole
                result = _followed(graph.calls[op], given, self.units, skipped)
            elif not _keeps(given, result):
                continue
            if result is None:
                continue
            rules[op] = result
            self._place(op, result, places, due)
            for tensor, have, want in zip(inputs, given, result.inputs, strict=True):
                if have == R and want.kind == "S":
                    self._pull(tensor, want)
        return rules

    def _with_statistics_summed(self, tensor: int, place: Placement) -> Placement:
        """Placement of a tensor after a small partial sum is summed over the team.

        A cross entropy that is split over the words of a vocabulary sums the exponentials of each
        row over all members, and goes on with its own words and that sum.
        """
        if place != P:
            return place
        made = self.graph.ops[int(self.graph.producer[self.graph.storage[tensor]])]
        if made.kind not in _SUMS:
            return P
        summed = max(float(self.graph.tensor_bytes[each]) for each in made.inputs)
        is_statistic = self.graph.tensor_bytes[tensor] * min(self.units, _LEAST_SUMMED) <= summed
        return R if is_statistic else P

    def _place(self, op: int, result: RuleResult, places: dict[int, Placement], due: _Due) -> None:
        """Enter the placements of an op's outputs, and the ops that read them."""
        for tensor, place in zip(self.graph.outputs[op], result.outputs, strict=True):
            places[tensor] = place
            due.add(self.region.readers.get(tensor, ()))

    def _split_gradients(self, rules: dict[int, RuleResult]) -> None:
        """Make the gradients of split parameters split, so that the parameters live in slices.

        Parameters are visited in the order of updates, because a pull may split further ones.
        """
        row_of = self.region.row_of
        due = _Due()
        due.add(row_of[parameter] for parameter in self.splits if parameter in row_of)
        for row in due:
            _, parameter, gradient = self.graph.updates[row]
            maker = int(self.graph.producer[self.graph.storage[gradient]])
            if parameter in self.splits and maker not in rules:
                self._pull(gradient, self.splits[parameter], from_slices=True)
                due.add(row_of[other] for other in self.splits if row_of.get(other, -1) > row)

    def _pull(self, tensor: int, wanted: Placement, *, from_slices: bool = False) -> bool:
        """Split the maker of a tensor, if its inputs then are slices of parameters only.

        Args:
            tensor: The tensor to split.
            wanted: Its placement.
            from_slices: Whether the maker may also read slices of activations.
        """
        graph = self.graph
        if tensor in self.region.row_of:
            return self.splits.setdefault(tensor, wanted) == wanted
        maker = int(graph.producer[tensor])
        if maker not in self.region.members:
            return False
        call = graph.calls[maker]
        position = tensor - graph.outputs[maker][0]
        if graph.is_view[maker]:
            for source in _splits(call.inputs[0].shape, self.units):
                result = propagate(call, (source,), self.units)
                if (
                    result is not None
                    and result.inputs == (source,)
                    and result.outputs[position] == wanted
                ):
                    source_tensor = graph.ops[maker].inputs[0]
                    return self._pull(source_tensor, source, from_slices=from_slices)
            return False
        if maker in self.pulled:
            return self.pulled[maker].outputs[position] == wanted
        for rule in _legal_rules(call, self.units, wanted.outer):
            if rule.outputs[position] != wanted:
                continue
            sliced = [
                (read, place)
                for read, place in zip(graph.ops[maker].inputs, rule.inputs, strict=True)
                if place != R
            ]
            needs = [each for each in sliced if not self._is_filled(each[0])]
            weights = [
                (read, place)
                for read, place in needs
                if (int(self.graph.storage[read]) in self.region.row_of)
            ]
            if all(place.kind == "S" for _, place in sliced) and (
                from_slices or len(weights) == len(needs)
            ):
                before = dict(self.splits)
                if sliced and all(self._pull(read, place) for read, place in weights):
                    self.pulled[maker] = rule
                    if needs and from_slices and call.kind in _CASTS:
                        # This is a cast of a gradient: split the op before it, too.
                        self._pull(*needs[0], from_slices=True)
                    return True
                self.splits = before
        return False

    def _is_filled(self, tensor: int) -> bool:
        """Whether a tensor has one value everywhere, so that every member can make any slice."""
        maker = int(self.graph.producer[self.graph.storage[tensor]])
        return self.graph.ops[maker].kind in FILLS


@lru_cache(maxsize=1 << 15)
def _followed(
    call: OpCall, given: tuple[Placement, ...], units: int, skipped: int
) -> RuleResult | None:
    """The rule by which an op follows a split of an input, but not of the first ``skipped``.

    ``None`` if there is none that converts no input.
    """
    if all(place.kind != "S" for place in given[skipped:]):
        return None
    result = propagate(call, given, units)
    return result if result is not None and _keeps(given, result) else None


@lru_cache(maxsize=1 << 12)
def _legal_rules(call: OpCall, units: int, outer: int) -> tuple[RuleResult, ...]:
    """Rules of an op, cached: ops of repeated layers share one call."""
    return legal_rules(call, units, (outer,))


def _keeps(given: tuple[Placement, ...], result: RuleResult) -> bool:
    """Whether a rule converts only whole tensors, by taking slices."""
    split = any(place.kind == "S" for place in result.inputs)
    return split and needs_no_transfer(given, result.inputs)


def _splits(shape: tuple[int, ...], units: int) -> list[Placement]:
    return [
        S(dim, outer)
        for outer in _OUTERS
        for dim, size in enumerate(shape)
        if size and size % (outer * units) == 0
    ]


def _weights(graph: OpGraph, region: Sequence[int]) -> list[int]:
    """Parameters of two or more dimensions that ops of a region read."""
    read = {int(graph.storage[tensor]) for op in region for tensor in graph.ops[op].inputs}
    return [
        parameter
        for _, parameter, _ in graph.updates
        if parameter in read and len(graph.tensors[parameter].shape) > 1
    ]
