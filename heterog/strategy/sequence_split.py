"""Rules that cut sequences along their positions: context parallelism with unequal shares.

Every device of a team owns a run of positions of every sample. Embeddings, norms, linear layers
and losses over tokens work on these positions alone. Attention compares each query with the keys
of other positions: a device gathers the keys and values of its team and computes the rows of its
own queries, as Llama 3 was trained (Grattafiori et al. 2024, section 3.3.2). In the backward pass
it gathers them again, and the parts of the gradients of keys and values are added up.

One pass through the graph in program order gives every op its rule. Tokens and labels, which every
rank has anyway, are whole on all members; the embeddings that are looked up for them are cut.

``balanced_runs`` finds runs that take unequal devices the same time. The work of a device on the
positions ``[u, v)`` of a sequence takes ``a + b (v - u) + c (v^2 - u^2)`` seconds: launches, work
per position, and causal attention, whose later queries see more keys. So equal devices get shorter
and shorter runs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpCall, OpRule, OpRules, P, Placement, R, S, Scatter, kinds
from heterog.graph.sharding_rules import RuleResult, propagate
from heterog.graph.sharding_rules.matmul import ATTENTION_KINDS
from heterog.strategy.spatial_split import UnitSplit

MOST_UNITS = 128
"""Most units of positions: rounding changes a share by less than one per cent of all positions."""
_PRODUCTS = frozenset(kinds("bmm baddbmm"))


def lengths(graph: OpGraph) -> tuple[int, ...]:
    """Lengths of the sequences in the batch, in positions, each once, ascending.

    Sequences are tensors of integers ``[batch, positions]`` or of numbers ``[batch, positions,
    width]``.
    """
    return tuple(sorted({size for _, _, size in _sequences(graph)}))


def _sequences(graph: OpGraph) -> Iterator[tuple[int, int, int]]:
    """Tensor, dimension of the positions, and their number, for the sequences of a batch."""
    for tensor in graph.batch:
        meta, along = graph.tensors[tensor], graph.batch_placements[tensor]
        rank = 2 if "int" in meta.dtype else 3
        if along in (S(0), S(1)) and len(meta.shape) == rank:
            dim = 1 - along.dim
            if meta.shape[dim] > 1:
                yield tensor, dim, meta.shape[dim]


def unit_counts(graph: OpGraph, most: int = MOST_UNITS) -> tuple[int, ...]:
    """Numbers of units that divide all lengths of sequences, the largest first.

    A number of units equal to the number of samples comes last, because lengths then do not tell
    the sequence axis from the batch axis.
    """
    common = gcd(*lengths(graph))
    counts = [units for units in range(2, min(common, most) + 1) if common % units == 0]
    return tuple(sorted(counts, key=lambda units: (units == graph.batch_size, -units)))


@lru_cache(maxsize=32)
def sequence_split(graph: OpGraph, units: int) -> UnitSplit | None:
    """Rules of all ops for teams that cut sequences.

    Args:
        graph: One training step.
        units: Number of units of the axis.

    Returns:
        The split; ``None`` if the units do not divide the sequences, or no op can be cut.
    """
    if units not in unit_counts(graph, max(units, 2)):
        return None
    rules = _Pass(graph, units).run()
    is_cut = any(place.is_split for _, rule in rules for place in rule.inputs)
    return UnitSplit(units=units, op_rules=rules) if is_cut else None


def finest_split(graph: OpGraph, most: int, members: int = 1) -> UnitSplit | None:
    """The cut with the most units, but rather one whose units the members of a team divide.

    Args:
        graph: One training step.
        most: Most units; finer ones gain nothing.
        members: Members of the largest team; each has a unit at least.
    """
    counts = [units for units in unit_counts(graph, most) if units >= members]
    by_evenness = sorted(counts, key=lambda units: units % members > 0)
    return next(filter(None, (sequence_split(graph, units) for units in by_evenness)), None)


class _Pass:
    """One pass through a graph.

    Args:
        graph: One training step.
        units: Number of units of the axis.

    Attributes:
        places: Placements of tensors; missing ones are whole.
        meant: For tensors that are partial sums, the placement in which the sum will be cut.
    """

    def __init__(self, graph: OpGraph, units: int) -> None:
        self.graph = graph
        self.units = units
        self.places: dict[int, Placement] = {
            tensor: S(dim)
            for tensor, dim, _ in _sequences(graph)
            if "int" not in graph.tensors[tensor].dtype
        }
        self.lengths = lengths(graph)
        self.meant: dict[int, Placement] = {}

    def run(self) -> OpRules:
        """The rules of all ops that are neither views nor constants."""
        graph = self.graph
        rules: list[tuple[int, OpRule]] = []
        for index, op in enumerate(graph.ops):
            if op.phase == Phase.UPDATE or graph.is_constant[index]:
                continue
            if graph.is_view[index]:
                self._view(index)
                continue
            rule = self._rule(index)
            made = rule.outputs if rule.scatter is None else (rule.scatter.place,)
            self.places |= zip(graph.outputs[index], made, strict=True)
            rules.append((index, rule))
        return tuple(rules)

    def _view(self, index: int) -> None:
        """Give a view the placement of its source; or make it a view of the gathered whole."""
        graph, source = self.graph, self.graph.ops[index].inputs[0]
        for known in (self.places, self.meant):
            if source in known:
                given = (known[source], *(R for _ in graph.ops[index].inputs[1:]))
                result = propagate(graph.calls[index], given, self.units)
                if result is not None and result.inputs == given:
                    known |= zip(graph.outputs[index], result.outputs, strict=True)

    def _rule(self, index: int) -> OpRule:
        graph, op = self.graph, self.graph.ops[index]
        given = tuple(self.places.get(tensor, R) for tensor in op.inputs)
        call = graph.calls[index]
        if op.kind == "embedding.default" and not any(place.is_split for place in given):
            given = self._looked_up(call, given)
        if P in given and not any(place.is_split for place in given):
            found = self._of_sums(index, call, given)
            if found is not None:
                return found
        result = propagate(call, given, self.units)
        if result is None or any(place.kind == "L" for place in result.outputs):
            result = RuleResult((R,) * len(given), (R,) * op.num_outputs)
        self._note_meant(index, call, result)
        return self._made(index, result, self._slices(index, result))

    def _made(self, index: int, result: RuleResult, slices: Placement | None) -> OpRule:
        scatter = None
        if slices is not None:
            scatter = Scatter(place=slices, units=self.units)
            self.meant.pop(self.graph.outputs[index][0], None)
        return OpRule(
            inputs=result.inputs, outputs=result.outputs, units=self.units, scatter=scatter
        )

    def _looked_up(self, call: OpCall, given: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Placements that cut an embedding by positions, although its indices are whole."""
        shape = call.inputs[1].shape
        return (given[0], S(len(shape) - 1)) if shape and shape[-1] in self.lengths else given

    def _of_sums(self, index: int, call: OpCall, given: tuple[Placement, ...]) -> OpRule | None:
        """The rule of an op that reads partial sums whose total will be cut.

        If the op is linear and no other op reads the partial sums, it works on them, and its
        result is summed in slices. Otherwise the sum is made first, and the op works on slices.
        """
        graph, op = self.graph, self.graph.ops[index]
        wanted = tuple(
            self.meant.get(tensor, place) if place == P else place
            for tensor, place in zip(op.inputs, given, strict=True)
        )
        if wanted == given:
            return None
        cut = propagate(call, wanted, self.units)
        if cut is None or not any(place.is_split for place in cut.outputs):
            return None
        parts = propagate(call, given, self.units)
        if parts is not None and parts.inputs == given and parts.outputs == (P,):
            read = [tensor for tensor, place in zip(op.inputs, given, strict=True) if place == P]
            if all(len(list(graph.readers(int(graph.storage[each])))) == 1 for each in read):
                return self._made(index, parts, cut.outputs[0])
        return self._made(index, cut, None)

    def _slices(self, index: int, result: RuleResult) -> Placement | None:
        """Placement in which a product's partial sums for every position are summed in slices.

        Such products make the gradients of keys and values, if attention is written as products.
        """
        graph = self.graph
        if result.outputs != (P,) or graph.ops[index].kind not in _PRODUCTS:
            return None
        shape = graph.tensors[graph.outputs[index][0]].shape
        dims = [dim for dim in (1, 2) if shape[dim] in self.lengths]
        return S(dims[0]) if len(dims) == 1 and shape[dims[0]] % self.units == 0 else None

    def _note_meant(self, index: int, call: OpCall, result: RuleResult) -> None:
        """Note that gradients of keys and values are sums over queries, to be cut by positions."""
        if call.kind not in ATTENTION_KINDS or result.outputs[1:] != (P, P):
            return
        for tensor in self.graph.outputs[index][1:]:
            if self.graph.tensors[tensor].shape[2] % self.units == 0:
                self.meant[tensor] = S(2)


_HALVINGS = 60  # bisections of the interval of the time: to the last bit of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Seconds that a device takes for a run of units ``[u, v)``.

    Attributes:
        fixed_s: Seconds for any run, ``a``.
        unit_s: Seconds for each unit, ``b``.
        rising_s: Seconds for each unit of ``v^2 - u^2``, ``c``.
    """

    fixed_s: float
    unit_s: float
    rising_s: float

    def seconds(self, begin: float, end: float) -> float:
        """Seconds of the units from ``begin`` to before ``end``."""
        return (
            self.fixed_s
            + self.unit_s * (end - begin)
            + self.rising_s * (end * end - begin * begin)
        )

    def end_within(self, begin: float, limit_s: float) -> float:
        """The end of the run from ``begin`` that takes ``limit_s`` seconds."""
        left = limit_s - self.fixed_s
        if left <= 0.0:
            return begin
        if self.rising_s <= 0.0:
            return begin + left / self.unit_s
        # rising (v^2 - u^2) + unit (v - u) = left, for v
        half = self.unit_s / (2.0 * self.rising_s)
        return math.sqrt((half + begin) ** 2 + left / self.rising_s) - half


def run_cost(units: int, first_half_s: float, second_half_s: float, whole_s: float) -> RunCost:
    """Fit a cost to the seconds for both halves of an even number of units and for all of them.

    >>> run_cost(4, 5.0, 13.0, 17.0)
    RunCost(fixed_s=1.0, unit_s=0.0, rising_s=1.0)
    """
    rising = max(2.0 * (second_half_s - first_half_s) / units**2, 0.0)
    fixed = min(max(first_half_s + second_half_s - whole_s, 0.0), first_half_s)
    unit = max((whole_s - fixed - rising * units**2) / units, 0.0)
    if unit == rising == 0.0:
        unit = max(whole_s, 1e-30) / units  # nothing takes time: any shares are equal
    return RunCost(fixed_s=fixed, unit_s=unit, rising_s=rising)


def balanced_runs(costs: Sequence[RunCost], units: int) -> tuple[int, ...]:
    """Units of each device, in the order of the sequence, so that all take the same time.

    Every device gets at least one unit.

    Args:
        costs: Cost of each device.
        units: Units of the sequence; at least as many as there are devices.

    >>> from heterog.strategy.sequence_split import RunCost
    >>> linear = [RunCost(fixed_s=0.0, unit_s=each, rising_s=0.0) for each in (1.0, 1.0, 2.0)]
    >>> balanced_runs(linear, 10)
    (4, 4, 2)
    >>> balanced_runs([RunCost(fixed_s=0.0, unit_s=0.0, rising_s=1.0)] * 4, 8)
    (4, 2, 1, 1)
    """
    low, high = 0.0, max(cost.seconds(0.0, units) for cost in costs)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if _ends(costs, middle)[-1] < units:
            low = middle
        else:
            high = middle
    ends = [0]
    for place, end in enumerate(_ends(costs, high)):
        after = len(costs) - 1 - place
        ends.append(min(max(round(end), ends[-1] + 1), units - after))
    ends[-1] = units
    return tuple(end - begin for begin, end in pairwise(ends))


def _ends(costs: Sequence[RunCost], limit_s: float) -> list[float]:
    ends = accumulate(costs, lambda begin, cost: cost.end_within(begin, limit_s), initial=0.0)
    return [*ends][1:]
