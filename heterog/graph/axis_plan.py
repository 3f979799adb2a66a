"""Placement of every tensor of a step when some ops run by rules of their own.

The batch plan states what each op does when only the batch is divided. Rules of a strategy
(``OpRule``) put ops on other axes: heads, columns of a weight, experts, the vocabulary. One pass
in program order finds the placement of every tensor, and where a reader needs another one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from heterog.errors import StrategyError
from heterog.graph.batch_plan import BatchPlan, batch_plan, op_work
from heterog.graph.op_costs import RESHAPES
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph, Phase
from heterog.graph.placement import OpRule, OpRules, P, Placement, R, S, Scatter, crosses
from heterog.graph.rule_checks import checked_rules, op_name
from heterog.graph.sharding_rules import RuleResult, Special, propagate

BATCH_AXIS = 0
EVERYWHERE = 0
"""Units of the axis of ops whose rule splits nothing: each device with samples runs all of the
op."""
AS_MADE, IN_TEAM, EVERYTHING = 0, 1, 2
"""How much of a value a reader needs: the part on its own device, all parts that its team holds,
or the value on all teams. If all devices are one team, the last two are equal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AxisPlan:
    """Placements along the batch and other axes, and the resulting work.

    Attributes:
        batch: Placements along the batch; for ops with rules, those between teams of devices.
        placements: Placement of each tensor, as its readers find it.  # [num_tensors]
        needed: Needed placement of each input of each op.  # [num_ops][num_inputs]
        specials: Change that keeps each op exact on a part, if it needs one.  # [num_ops]
        axes: Number of units of each axis; the batch comes first.
        op_axis: Axis whose shares divide the work of each op among devices.  # [num_ops]
        tensor_axis: Axis along which each tensor is placed.  # [num_tensors]
        viewed: Tensors that are views of others.
        reshaped: Views that have the same rows as the viewed tensor, one for one, when the batch
            has one sample.
        scattered: Tensors that an op makes as parts of a sum, and that a reduce-scatter right
            after the op turns into slices.
        exchanged: Tensors that an op makes in slices along one axis, and that an all-to-all right
            after the op turns into slices along another; with their placements before it.
        sharded: Parameters that devices hold in slices, each its own.
        flops_fixed: FLOPs that every device does, whatever its share.  # [num_ops]
        flops_per_unit: FLOPs per unit of the local share.  # [num_ops]
        bytes_fixed: Bytes moved whatever the share.  # [num_ops]
        bytes_per_unit: Bytes moved per unit of the local share.  # [num_ops]
        follows_batch: For ops with rules, fractions of the FLOPs, of the fixed bytes and of the
            bytes per unit that grow with the samples of the team.  # [num_ops, 3]
    """

    batch: BatchPlan
    placements: tuple[Placement, ...]
    needed: tuple[tuple[Placement, ...], ...]
    specials: tuple[str | None, ...]
    axes: tuple[int, ...]
    op_axis: IntArray
    tensor_axis: IntArray
    viewed: frozenset[int]
    reshaped: frozenset[int]
    scattered: frozenset[int]
    exchanged: Mapping[int, Placement]
    sharded: frozenset[int]
    flops_fixed: FloatArray
    flops_per_unit: FloatArray
    bytes_fixed: FloatArray
    bytes_per_unit: FloatArray
    follows_batch: FloatArray

    def units(self, op: int) -> int:
        """Number of units of the axis that an op runs along."""
        return self.axes[int(self.op_axis[op])]

    def made(self, tensor: int) -> Placement:
        """Placement of a tensor when its op is done, before its team cuts it in another way."""
        if tensor in self.scattered:
            return P
        return self.exchanged.get(tensor, self.placements[tensor])

    @cached_property
    def scatter_axes(self) -> frozenset[int]:
        """Axes along which sums are made in slices."""
        return frozenset(int(self.tensor_axis[tensor]) for tensor in self.scattered)

    @cached_property
    def _axis_of_op(self) -> list[int]:
        """``op_axis`` as a list: looking up a single element is faster than in an array."""
        return list(self.op_axis.tolist())

    @cached_property
    def _axis_of_tensor(self) -> list[int]:
        """``tensor_axis`` as a list."""
        return list(self.tensor_axis.tolist())

    def is_whole_needed(self, tensor: int, needed: Placement, axis: int) -> bool:
        """Whether a reader along ``axis`` needs the whole of a tensor that is not whole."""
        given = self.placements[tensor]
        if needed.kind == "H" and given.kind == "S":
            return not self._has_rows_for(tensor, needed, axis)
        if given.kind == "S" and needed.kind == "S" and self._axis_of_tensor[tensor] != axis:
            return True
        return given.kind in "SP" and given != needed

    def _has_rows_for(self, tensor: int, needed: Placement, axis: int) -> bool:
        """Whether a reader that needs a window of rows can use the rows of a team's devices.

        A view may have other rows than the viewed tensor, so views are excluded, and the samples
        must lie along another dimension than the rows. Ops that read neighbours in a graph may
        also read views in ``reshaped``, if the batch has one sample.
        """
        if self.placements[tensor] != S(needed.dim) or int(self.tensor_axis[tensor]) != axis:
            return False
        along = self.batch_placements[tensor]
        if needed.pattern and self.axes[BATCH_AXIS] == 1:
            return along.kind == "S" and (tensor not in self.viewed or tensor in self.reshaped)
        return tensor not in self.viewed and along.kind == "S" and along.dim != needed.dim

    def is_brought(self, op: int, position: int, tensor: int) -> bool:
        """Whether an op is sent only the rows of an input that its device lacks."""
        is_split = self.placements[tensor].kind == "S"
        return is_split and self.whole_needed(op, position, tensor) == AS_MADE

    @cached_property
    def batch_placements(self) -> tuple[Placement, ...]:
        """Placements of tensors along the batch: over devices, or over teams if a rule made it."""
        both = zip(self._axis_of_tensor, self.placements, self.batch.placements, strict=True)
        return tuple(own if axis == BATCH_AXIS else batch for axis, own, batch in both)

    def batch_needed(self, op: int, position: int) -> Placement:
        """Placement along the batch in which an op needs an input."""
        is_ruled = self._axis_of_op[op] != BATCH_AXIS
        return (self.batch.needed if is_ruled else self.needed)[op][position]

    def whole_needed(self, op: int, position: int, tensor: int) -> int:
        """How much of an input an op needs; see ``AS_MADE``, ``IN_TEAM`` and ``EVERYTHING``."""
        axis = self._axis_of_op[op]
        given = self.batch_placements[tensor]
        if given.kind in "SP" and given != self.batch_needed(op, position):
            return EVERYTHING
        if not self.is_whole_needed(tensor, self.needed[op][position], axis):
            return AS_MADE
        return EVERYTHING if self._axis_of_tensor[tensor] == axis == BATCH_AXIS else IN_TEAM

    @cached_property
    def crossing(self) -> int | None:
        """An op whose rule splits a dimension across its samples, if there is one.

        Its units are neither inside the samples (positions) nor are samples inside them, so it
        cannot run on a part of the batch.
        """
        batch_size = self.axes[BATCH_AXIS]
        for op in np.flatnonzero(self.op_axis != BATCH_AXIS).tolist():
            for place, along in zip(self.needed[op], self.batch.needed[op], strict=True):
                if crosses(place, max(self.units(op), 1), along, batch_size):
                    return int(op)
        return None

    @cached_property
    def causal_ops(self) -> IntArray:
        """Ops with more work for later units: causal attention by its queries."""
        found = [op for op, special in enumerate(self.specials) if special == Special.CAUSAL_ROWS]
        return np.array(found, np.int32)

    def work(
        self, units: int, samples: int, batch_size: int, first_unit: int = 0
    ) -> tuple[FloatArray, FloatArray]:
        """FLOPs and bytes moved of each op on some units of its axis and samples of the batch.

        The queries of the units ``[u, v)`` of ``N`` see the keys up to their own, which is
        ``(v^2 - u^2) / N^2`` of what all queries see.

        Args:
            units: Number of units of the op's own axis; of samples for ops without a rule.
            samples: Number of samples of the team; matters only for ops with rules.
            batch_size: Number of samples of the whole batch.
            first_unit: First unit; matters only for ``causal_ops``.
        """
        part = 1.0 + self.follows_batch * (samples / batch_size - 1.0)
        flops = (self.flops_fixed + units * self.flops_per_unit) * part[:, 0]
        for op in self.causal_ops.tolist():
            flops[op] *= (2 * first_unit + units) / self.units(op)
        fixed, split = self.bytes_fixed * part[:, 1], self.bytes_per_unit * part[:, 2]
        return flops, fixed + units * split


@lru_cache(maxsize=64)
def axis_plan(graph: OpGraph, op_rules: OpRules = ()) -> AxisPlan:
    """Propagate the batch and the rules of a strategy through a graph.

    A parameter is sharded if all its readers need the same split of it along one axis, its
    gradient comes out split in that way, and the optimizer treats each element on its own.

    Raises:
        StrategyError: a rule is not one of the op's sharding rules, or the op cannot have a rule;
            names the op.
    """
    return _Propagation(graph, batch_plan(graph), op_rules).run()


class _Propagation:
    def __init__(self, graph: OpGraph, batch: BatchPlan, op_rules: OpRules) -> None:
        self.graph = graph
        self.batch = batch
        self.rules = checked_rules(graph, self.batch, op_rules)
        # Axes are told apart by their units alone: rules over 12 heads anywhere in the model share
        # one axis, so that a value split by heads by one op suits the next one as it is.
        # An axis with as many units as the batch has samples is still another axis.
        units = {  # of the axis that a rule runs along
            op: rule.units
            if any(place.is_split for place in (*rule.inputs, *rule.outputs))
            else EVERYWHERE
            for op, (rule, _) in self.rules.items()
        }
        self.own_axis = {
            op: (size, size == graph.batch_size and self._is_along_batch(op))
            for op, size in units.items()
        }
        slices = [
            self._axis_after(op, rule.scatter)
            for op, (rule, _) in self.rules.items()
            if rule.scatter is not None
        ]
        axes = dict.fromkeys([(graph.batch_size, True), *self.own_axis.values(), *slices])
        self.axes = tuple(size for size, _ in axes)
        self.axis_of = {key: axis for axis, key in enumerate(axes)}
        self.placements = list(graph.batch_placements)
        self.tensor_axis = [BATCH_AXIS] * graph.num_inputs
        self.scattered: set[int] = set()
        self.exchanged: dict[int, Placement] = {}
        self.needed: list[tuple[Placement, ...]] = []
        self.specials: list[str | None] = []
        self.op_axis: list[int] = []

    def run(self) -> AxisPlan:
        graph = self.graph
        sharded = self._sharded_parameters()
        self._check_writes(sharded)
        for parameter, (place, axis) in sharded.items():
            self.placements[parameter] = place
            self.tensor_axis[parameter] = axis
        for index, op in enumerate(graph.ops):
            given = tuple(self.placements[tensor] for tensor in op.inputs)
            if op.phase == Phase.UPDATE:
                self._add(given, (R,), None, self.tensor_axis[op.inputs[0]])
            elif graph.is_view[index]:
                self._add_view(index, given)
            elif index in self.rules:
                rule, result = self.rules[index]
                axis = self.axis_of[self.own_axis[index]]
                self._add(rule.inputs, rule.outputs, result.special, axis)
                if rule.scatter is not None:
                    self._cut_again(index, rule, rule.scatter)
            else:
                self._add_as_in_batch(index)
            self._check_local_statistics(index, given)
        made = [
            P if tensor in self.scattered else self.exchanged.get(tensor, place)
            for tensor, place in enumerate(self.placements)
        ]
        plan, follows_batch = self.batch, np.zeros((graph.num_ops, 3))
        work = np.column_stack(
            [plan.flops_fixed, plan.flops_per_sample, plan.bytes_fixed, plan.bytes_per_sample]
        )
        for index, needed in enumerate(self.needed):
            if needed is not plan.needed[index]:  # it does not run as in the batch
                outputs = [made[tensor] for tensor in graph.outputs[index]]
                units = max(self.axes[self.op_axis[index]], 1)  # 1 for ops that run everywhere
                work[index] = op_work(graph, index, outputs, needed, units)
                follows_batch[index] = self._follows_batch(index, made)
        return AxisPlan(
            batch=plan,
            placements=tuple(self.placements),
            needed=tuple(self.needed),
            specials=tuple(self.specials),
            axes=self.axes,
            op_axis=np.array(self.op_axis, np.int32),
            tensor_axis=np.array(self.tensor_axis, np.int32),
            viewed=frozenset(np.flatnonzero(graph.storage != np.arange(len(graph.tensors)))),
            reshaped=self._reshaped(),
            scattered=frozenset(self.scattered),
            exchanged=self.exchanged,
            sharded=frozenset(sharded),
            flops_fixed=work[:, 0],
            flops_per_unit=work[:, 1],
            bytes_fixed=work[:, 2],
            bytes_per_unit=work[:, 3],
            follows_batch=follows_batch,
        )

    def _check_writes(self, sharded: Mapping[int, tuple[Placement, int]]) -> None:
        """Refuse writing slices of a trained parameter that every device keeps whole.

        Raises:
            StrategyError: a rule does that.
        """
        whole = self.graph.written - sharded.keys()
        for op, (rule, _) in self.rules.items():
            written = self.graph.ops[op].inputs[:1]
            is_write = self.graph.ops[op].is_write and whole.issuperset(written)
            if is_write and any(place.kind == "S" for place in rule.outputs):
                raise StrategyError(
                    f"{op_name(self.graph, op)} would write a slice of "
                    f"{self.graph.tensors[written[0]].name}, which devices keep whole; leave it "
                    "without a rule."
                )

    def _axis_after(self, op: int, scatter: Scatter) -> tuple[int, bool]:
        """Units of the axis along which a value is cut again, and whether that is the batch."""
        (tensor,) = self.graph.outputs[op]
        in_batch = scatter == Scatter(
            place=self.batch.placements[tensor], units=self.graph.batch_size
        )
        return scatter.units, in_batch

    def _cut_again(self, op: int, rule: OpRule, scatter: Scatter) -> None:
        """Note that the value made last changes from the axis of its rule to another."""
        (tensor,), (made,) = self.graph.outputs[op], rule.outputs
        axis = self.axis_of[self._axis_after(op, scatter)]
        if made == P:
            self.scattered.add(tensor)
        else:
            self.exchanged[tensor] = made
        self.placements[-1] = scatter.place
        self.tensor_axis[-1] = axis

    def _reshaped(self) -> frozenset[int]:
        """Views that have the rows of their values, in the same order, along their axis."""
        graph, places, found = self.graph, self.placements, set[int]()
        for op in np.flatnonzero(graph.is_view).tolist():
            source, *others = graph.ops[op].inputs
            storage, outputs = int(graph.storage[source]), graph.outputs[op]
            is_kept = graph.ops[op].kind in RESHAPES and not others and len(outputs) == 1
            if is_kept and (source == storage or source in found):
                (shown,) = outputs
                if places[shown].kind == places[storage].kind == "S" and (
                    places[shown].outer == places[storage].outer == 1
                    and graph.tensors[shown].shape[places[shown].dim]
                    == graph.tensors[storage].shape[places[storage].dim]
                ):
                    found.add(shown)
        return frozenset(found)

    def _follows_batch(self, op: int, made: Sequence[Placement]) -> tuple[float, float, float]:
        """Fractions of an op's work that grow with the samples of the batch, if it has a rule.

        Args:
            op: Index of the op.
            made: Placement of each tensor when its op is done.
        """
        graph = self.graph
        if self.op_axis[op] == BATCH_AXIS or graph.is_view[op]:
            return 0.0, 0.0, 0.0
        tensors = (*graph.ops[op].inputs, *graph.outputs[op])
        places = (*self.needed[op], *(made[tensor] for tensor in graph.outputs[op]))
        in_batch = (
            *self.batch.needed[op],
            *(self.batch.placements[tensor] for tensor in graph.outputs[op]),
        )
        total, grown = [0.0, 0.0], [0.0, 0.0]  # bytes that are fixed, that follow the axis
        for tensor, place, along in zip(tensors, places, in_batch, strict=True):
            size = float(graph.tensor_bytes[tensor])
            total[place.is_split] += size
            grown[place.is_split] += size * (along.kind == "S")
        follows = any(along.kind == "S" for along in in_batch)
        moved = graph.ops[op].bytes_read + graph.ops[op].bytes_written
        if follows and moved < 0.5 * sum(total):  # it touches a part of an input only (embedding)
            return 1.0, 1.0, 1.0
        fixed, split = (have / of if of else 0.0 for have, of in zip(grown, total, strict=True))
        return float(follows), fixed, split

    def _is_along_batch(self, op: int) -> bool:
        """Whether a rule over as many units as there are samples is one over the samples.

        It is if it splits a tensor as the batch does, or if all readers of its result take the
        part of their own samples (encodings of positions, repeated for every sample). A sum of
        gradients by columns is not: the batch splits none of its tensors, and no reader takes
        samples of it.
        """
        graph, batch = self.graph, self.batch
        rule, _ = self.rules[op]
        outputs = graph.outputs[op]
        splits = [
            (int(graph.storage[tensor]), place, along)
            for tensor, place, along in (
                *zip(graph.ops[op].inputs, rule.inputs, batch.needed[op], strict=True),
                *zip(outputs, rule.outputs, (batch.placements[t] for t in outputs), strict=True),
            )
            if place.kind == "S"
        ]
        if any(
            storage in graph.trained or (along.kind == "S" and along != place)
            for storage, place, along in splits
        ):
            return False
        return any(place == along for _, place, along in splits) or self._is_read_by_sample(op)

    def _is_read_by_sample(self, op: int) -> bool:
        """Whether all readers of a rule's result take only the part of their own samples."""
        rule, size = self.rules[op][0], self.graph.batch_size
        readers = [
            (reader, tensor, wanted, {output: place})
            for output, place in zip(self.graph.outputs[op], rule.outputs, strict=True)
            if place.kind == "S"
            for reader, tensor, wanted in self._readers(output)
        ]
        return bool(readers) and all(
            placed_view(self.graph, tensor, through, size) == wanted
            and (
                reader not in self.rules
                or (self.rules[reader][0].units == size and self._is_along_batch(reader))
            )
            for reader, tensor, wanted, through in readers
        )

    def _add(
        self,
        needed: tuple[Placement, ...],
        outputs: tuple[Placement, ...],
        special: str | None,
        axis: int,
    ) -> None:
        self.needed.append(needed)
        self.placements.extend(outputs)
        self.specials.append(special)
        self.op_axis.append(axis)
        self.tensor_axis.extend(axis for _ in outputs)

    def _add_as_in_batch(self, op: int) -> None:
        outputs = tuple(self.batch.placements[tensor] for tensor in self.graph.outputs[op])
        self._add(self.batch.needed[op], outputs, self.batch.specials[op], BATCH_AXIS)

    def _add_view(self, op: int, given: tuple[Placement, ...]) -> None:
        """Give a view a placement that follows from its source's."""
        inputs = self.graph.ops[op].inputs
        axis = self.tensor_axis[inputs[0]]
        if axis == BATCH_AXIS and all(
            place == self.batch.placements[tensor]
            for place, tensor in zip(given, inputs, strict=True)
        ):
            self._add_as_in_batch(op)
            return
        result = propagate(self.graph.calls[op], given, max(self.axes[axis], 1))
        if result is None:
            result = RuleResult((R,) * len(given), (R,) * len(self.graph.outputs[op]))
        self._add(result.inputs, result.outputs, result.special, axis)

    def _check_local_statistics(self, op: int, given: tuple[Placement, ...]) -> None:
        for have, want in zip(given, self.needed[op], strict=True):
            if (have.kind == "L") != (want.kind == "L"):
                raise StrategyError(
                    f"{op_name(self.graph, op)} and the op that makes its statistics must either "
                    "both have a rule or both follow the batch."
                )

    def _sharded_parameters(self) -> dict[int, tuple[Placement, int]]:
        """Placement and axis of the parameters that live in slices.

        Empty where the optimizer treats a parameter as a whole: each device then keeps all of it,
        and gradients that come out in slices are gathered before the update.
        """
        found: dict[int, tuple[Placement, int]] = {}
        if not self.graph.updates_elementwise:
            return found
        for _, parameter, gradient in self.graph.updates:
            readers = list(self._readers(parameter))
            units = {self.rules[op][0].units if op in self.rules else None for op, _, _ in readers}
            if len(units) != 1 or None in units:
                continue  # a reader follows the batch and needs the whole, or two axes are wanted
            (size,) = units
            assert size is not None
            shape = self.graph.tensors[parameter].shape
            outers = {place.outer for _, _, place in readers if place.kind == "S"}
            options = [
                S(dim, outer)
                for dim in range(len(shape))
                for outer in sorted(outers)
                if size * outer and shape[dim] % (size * outer) == 0
            ]
            for place in options:
                # Through all views it must be what the readers need, and a slice whose gradient
                # came out whole or as a sum could not be updated alone.
                through = {parameter: place}
                if self._gradient(gradient, size) == place and all(
                    placed_view(self.graph, tensor, through, size) == wanted
                    for _, tensor, wanted in self._readers(parameter)
                ):
                    found[parameter] = place, self.axis_of[size, False]
                    break
        return found

    def _readers(self, tensor: int) -> Iterator[tuple[int, int, Placement]]:
        """Op, tensor read and its needed placement, for all compute ops that read a tensor."""
        for reader in self.graph.consumers[tensor]:
            op = self.graph.ops[reader]
            if op.phase == Phase.UPDATE:
                continue
            if self.graph.is_view[reader]:
                for output in self.graph.outputs[reader]:
                    yield from self._readers(output)
                continue
            needed = self.rules[reader][0].inputs if reader in self.rules else ()
            for read, place in zip(op.inputs, needed or self.batch.needed[reader], strict=True):
                if read == tensor:
                    yield reader, tensor, place

    def _gradient(self, gradient: int, units: int) -> Placement | None:
        """Placement of a gradient if it comes out split along an axis of its own."""
        storage = int(self.graph.storage[gradient])
        maker = int(self.graph.producer[storage])
        if maker not in self.rules or self.rules[maker][0].units != units:
            return None
        made = self.rules[maker][0].outputs[storage - self.graph.outputs[maker][0]]
        return placed_view(self.graph, gradient, {storage: made}, units)


def placed_view(
    graph: OpGraph, tensor: int, known: dict[int, Placement], units: int
) -> Placement | None:
    """Placement of a tensor, through views, from that of a viewed tensor in ``known``.

    ``None`` if a view does not keep the split. What is found on the way is added to ``known``.
    """
    if tensor not in known:
        view = int(graph.producer[tensor])
        source = placed_view(graph, graph.ops[view].inputs[0], known, units)
        result = None if source is None else propagate(graph.calls[view], (source,), units)
        if result is None or result.inputs != (source,):
            return None
        known.update(zip(graph.outputs[view], result.outputs, strict=True))
    return known[tensor]
