"""Makes a graph from the records of a file: resolves names, orders ops, renumbers tensors."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from heterog.errors import GraphError
from heterog.graph.batch_plan import batch_plan, built_in_rule
from heterog.graph.graph_records import GraphRecord, OpRecord, RuleRecord, arg_from_json
from heterog.graph.op_costs import VIEW_KINDS, bytes_read_and_written
from heterog.graph.op_graph import (
    GraphOp,
    GraphTensor,
    OpGraph,
    Phase,
    TensorKind,
    UpdateScope,
    topological_order,
)
from heterog.graph.placement import ITEM_BYTES, Arg, L, OpCall, P, Placement, R, S
from heterog.graph.sharding_rules import RULES, claims_checked
from heterog.names import shown
from heterog.units import format_bytes

_PLACEMENT = re.compile(r"S\(\s*(\d{1,9})\s*(?:,\s*(\d{1,9})\s*)?\)")
_MOST_TENSOR_BYTES = 2**44  # sums over any graph stay within 64 bits
_Rule = tuple[tuple[Placement, ...], tuple[Placement, ...]]  # of inputs and of outputs
_INPUT_KINDS = (TensorKind.PARAMETER, TensorKind.BUFFER, TensorKind.BATCH, TensorKind.CONSTANT)


class GraphReader:
    """Converts a record to a graph: resolves names, orders the ops, renumbers the tensors.

    Attributes:
        doubts: Sentences about ``batch_dims`` whose effects were probably not meant.
    """

    def __init__(self, spec: GraphRecord) -> None:
        self.spec = spec
        counts = Counter(tensor.name for tensor in spec.tensors)
        self.ambiguous = {name for name, count in counts.items() if count > 1}
        self.position = {tensor.name: n for n, tensor in enumerate(spec.tensors) if tensor.name}
        self.updated_by: dict[int, int] = {}
        self.doubts: list[str] = []
        self.metas = [
            GraphTensor(
                shape=tuple(tensor.shape),
                dtype=self._dtype(number, tensor.dtype),
                kind=TensorKind[tensor.kind.upper()],
                name=tensor.name,
            )
            for number, tensor in enumerate(spec.tensors)
        ]
        self.kinds = [self._from_table(op.kind, spec.kinds, "kinds") for op in spec.ops]
        self.modules = [self._from_table(op.module, spec.modules, "modules") for op in spec.ops]
        self.phases = [
            Phase[(op.phase or ("update" if kind == "update" else "forward")).upper()]
            for op, kind in zip(spec.ops, self.kinds, strict=True)
        ]
        self.inputs = [
            [self._tensor(name, f"{self._op(i)} reads") for name in op.inputs]
            for i, op in enumerate(spec.ops)
        ]
        self.outputs = [self._outputs(i, op) for i, op in enumerate(spec.ops)]
        self.made = {tensor for outputs in self.outputs for tensor in outputs}
        self.updated = {
            tensor
            for outputs, phase in zip(self.outputs, self.phases, strict=True)
            for tensor in (outputs if phase == Phase.UPDATE else ())
        }
        for index in range(len(spec.ops)):
            self._check_op(index)

    def graph(self) -> OpGraph:
        """Make the graph.

        Raises:
            GraphError: the records contradict each other.
        """
        spec = self.spec
        made_by = np.full(len(self.metas), -1, np.int32)
        for index, outputs in enumerate(self.outputs):
            for tensor in outputs:
                if made_by[tensor] >= 0:
                    raise GraphError(
                        f"{self._name(tensor)} is made by {self._op(int(made_by[tensor]))} and "
                        f"again by {self._op(index)}; every tensor is made once."
                    )
                made_by[tensor] = index
        order = topological_order(len(spec.ops), self.inputs, made_by)
        step_inputs = [tensor for tensor, op in enumerate(made_by) if op < 0]
        for tensor, meta in enumerate(self.metas):
            self._check_tensor(tensor, meta, is_input=made_by[tensor] < 0)
        placements = {tensor: self._input_placement(tensor) for tensor in step_inputs}
        rules = self._rules(order, dict(placements))
        sequence = step_inputs + [tensor for op in order for tensor in self.outputs[op]]
        number_of = {tensor: number for number, tensor in enumerate(sequence)}
        loss = self._tensor(spec.loss, "the loss is")
        if made_by[loss] < 0 or loss in self.updated:
            raise GraphError(
                f"the loss is {self._name(loss)}, which no op of the forward or backward pass "
                "makes."
            )
        return OpGraph(
            name=spec.name,
            source=spec.source,
            batch_size=spec.batch_size,
            tensors=tuple(self.metas[tensor] for tensor in sequence),
            ops=tuple(self._graph_op(op, number_of, rules[op]) for op in order),
            batch_placements=tuple(placements[tensor] for tensor in step_inputs),
            optimizer=spec.optimizer,
            optimizer_state_ratio=spec.optimizer_state_ratio,
            optimizer_step_ratios=(spec.optimizer_step_ratios[0], spec.optimizer_step_ratios[1]),
            loss=number_of[loss],
            patterns=tuple(each.pattern() for each in spec.patterns),
            master_dtype=spec.master_dtype,
            seen_scope=UpdateScope(spec.update_scope) if spec.update_scope else None,
        )

    def _graph_op(self, index: int, number_of: Mapping[int, int], rule: _Rule | None) -> GraphOp:
        op = self.spec.ops[index]
        if self.phases[index] == Phase.UPDATE:
            self._check_update(index)
            # Reads parameter, gradient and state; writes parameter and state.
            size = float(self.metas[self.inputs[index][0]].num_bytes)
            state = self.spec.optimizer_state_ratio
            read, written = size * (2.0 + state), size * (1.0 + state)
        else:
            with claims_checked(f"the args of {self._op(index)} do not fit its kind"):
                read, written = bytes_read_and_written(self._call(index))
        return GraphOp(
            kind=self.kinds[index],
            args=self._args(index),
            inputs=tuple(number_of[tensor] for tensor in self.inputs[index]),
            num_outputs=len(self.outputs[index]),
            phase=self.phases[index],
            module=self.modules[index],
            flops=op.flops,
            bytes_read=read if op.bytes_read is None else op.bytes_read,
            bytes_written=written if op.bytes_written is None else op.bytes_written,
            rule=rule,
            measured_s=tuple(
                (name, self._curve(index, found) if isinstance(found, list) else found)
                for name, found in op.measured_s.items()
            ),
            name=op.name,
        )

    def _curve(
        self, index: int, points: Sequence[tuple[float, float]]
    ) -> tuple[tuple[float, float], ...]:
        """Check measured seconds at several shares."""
        shares = [share for share, _ in points]
        if sorted(set(shares)) != shares or shares[-1] != 1.0:
            raise GraphError(
                f"measured_s of {self._op(index)} has the shares {_shown(shares)}; they "
                "must rise and end with 1, the whole batch."
            )
        return tuple((share, seconds) for share, seconds in points)

    def _rules(self, order: Sequence[int], placements: dict[int, Placement]) -> list[_Rule | None]:
        """Rules of the ops that state one or give ``batch_dims``; ``None`` for other ops."""
        ops = self.spec.ops
        rules: list[_Rule | None] = [None] * len(ops)
        # Only a rule that follows from batch_dims depends on the placements of the op's inputs.
        must_follow = any(op.batch_dims is not None for op in ops)
        for index in order:
            op = ops[index]
            given = [placements.get(tensor, R) for tensor in self.inputs[index]]
            outputs: Iterable[Placement] = [R] * len(self.outputs[index])
            if op.rule is not None:
                rules[index] = rule = self._stated_rule(index, op.rule)
                outputs = rule[1]
            elif op.batch_dims is not None:
                rules[index] = rule = self._rule_from_batch_dims(index, op.batch_dims, given)
                outputs = rule[1]
            elif self.kinds[index] in RULES:
                if given and not op.args:
                    raise GraphError(
                        f"{self._op(index)} has no args, which its built-in sharding rule reads; "
                        "give args, a rule or batch_dims."
                    )
                if must_follow:
                    found = built_in_rule(
                        self._call(index), tuple(given), self.spec.batch_size, self._op(index)
                    )
                    assert found is not None
                    outputs = found.outputs
            placements.update(zip(self.outputs[index], outputs, strict=True))
        return rules

    def _stated_rule(self, index: int, rule: RuleRecord) -> _Rule:
        sides: list[tuple[Placement, ...]] = []
        for what, texts, tensors in (
            ("inputs", rule.inputs, self.inputs[index]),
            ("outputs", rule.outputs, self.outputs[index]),
        ):
            if len(texts) != len(tensors):
                raise GraphError(
                    f"the rule of {self._op(index)} has {len(texts)} placements for "
                    f"{len(tensors)} {what}; it needs one for each."
                )
            sides.append(
                tuple(
                    self._placement(text, tensor)
                    for text, tensor in zip(texts, tensors, strict=True)
                )
            )
        return sides[0], sides[1]

    def _rule_from_batch_dims(
        self, index: int, dims: list[int | None], given: list[Placement]
    ) -> _Rule:
        if len(dims) != len(self.outputs[index]):
            raise GraphError(
                f"{self._op(index)} has {len(dims)} batch_dims for {len(self.outputs[index])} "
                "outputs; it needs one for each."
            )
        inputs = tuple(place if place.kind == "S" else R for place in given)
        without = P if any(place.kind == "S" for place in inputs) else R
        outputs = tuple(
            without if dim is None else self._placement(f"S({dim})", tensor)
            for dim, tensor in zip(dims, self.outputs[index], strict=True)
        )
        self._doubt_batch_dims(index, given, outputs)
        return inputs, outputs

    def _doubt_batch_dims(
        self, index: int, given: Sequence[Placement], outputs: Sequence[Placement]
    ) -> None:
        """Note effects of an op's ``batch_dims`` that were probably not meant."""
        for tensor, place in zip(self.inputs[index], given, strict=True):
            if place == P and not any(each.kind == "S" for each in given):
                self.doubts.append(
                    f"{self._op(index)} reads {self._name(tensor)}, a partial sum over the batch, "
                    "whole, which takes an all-reduce: if it only passes it on, write "
                    '"rule": {"inputs": ["P"], "outputs": ["P"]} instead of batch_dims, else '
                    'write "R" for both.'
                )
                return
        for tensor, place in zip(self.outputs[index], outputs, strict=True):
            if place == P and not self.metas[tensor].dtype.startswith(("float", "bfl", "compl")):
                self.doubts.append(
                    f"{self._op(index)} makes {self._name(tensor)} of {self.metas[tensor].dtype} "
                    "without a batch dimension from a split input, which is taken for a sum over "
                    'the batch: if it is a shape or an index, write a "rule" with the output '
                    '"R", else one with "P".'
                )
                return

    def _input_placement(self, tensor: int) -> Placement:
        record, meta = self.spec.tensors[tensor], self.metas[tensor]
        text = f"S({record.batch_dim})" if record.batch_dim is not None else None
        text = record.placement if record.placement is not None else text
        if text is not None:
            place = self._placement(text, tensor)
            if place.kind in "PL":
                raise GraphError(
                    f"{self._name(tensor)} is an input of the step with placement {place}; inputs "
                    "are R or S(dim)."
                )
            if place.kind == "S" and meta.kind == TensorKind.PARAMETER:
                raise GraphError(
                    f"{self._name(tensor)} is a parameter, which has no batch dimension, but has "
                    f"placement {place}; leave the placement out."
                )
            return place
        has_batch = meta.kind == TensorKind.BATCH and meta.shape[:1] == (self.spec.batch_size,)
        return S(0) if has_batch else R

    def _placement(self, text: str, tensor: int) -> Placement:
        simple = {"R": R, "P": P, "L": L}.get(text)
        if simple is not None:
            return simple
        match = _PLACEMENT.fullmatch(text)
        if match is None:
            raise GraphError(
                f"placement {shown(text)} of {self._name(tensor)} is none of R, P, L, S(dim) and "
                "S(dim,outer)."
            )
        dim, outer = int(match[1]), int(match[2] or 1)
        shape, batch = self.metas[tensor].shape, self.spec.batch_size
        if dim >= len(shape) or outer < 1 or batch < 1 or shape[dim] % (outer * batch):
            raise GraphError(
                f"placement {text} does not fit {self._name(tensor)} of shape {list(shape)}: "
                f"dimension {dim} must be a multiple of {outer} x {batch} (batch size)."
            )
        return S(dim, outer)

    def _args(self, index: int) -> dict[str, Arg]:
        num_inputs = len(self.inputs[index])
        return {
            key: arg_from_json(value, num_inputs, lambda: self._op(index))
            for key, value in self.spec.ops[index].args.items()
        }

    def _call(self, index: int) -> OpCall:
        return OpCall(
            kind=self.kinds[index],
            args=self._args(index),
            inputs=tuple(self.metas[tensor].meta for tensor in self.inputs[index]),
            outputs=tuple(self.metas[tensor].meta for tensor in self.outputs[index]),
        )

    def _outputs(self, index: int, op: OpRecord) -> list[int]:
        if op.outputs is not None:
            return [self._tensor(name, f"{self._op(index)} makes") for name in op.outputs]
        if self.phases[index] != Phase.UPDATE or not self.inputs[index]:
            raise GraphError(f"field 'ops.{index}.outputs' is missing.")
        updated = self.metas[self.inputs[index][0]]
        self.metas.append(GraphTensor(shape=updated.shape, dtype=updated.dtype, kind=updated.kind))
        return [len(self.metas) - 1]

    def _check_update(self, index: int) -> None:
        inputs = self.inputs[index]
        if (
            len(inputs) != 2
            or len(self.outputs[index]) != 1
            or self.metas[inputs[0]].kind != TensorKind.PARAMETER
            or inputs[0] in self.made
            or inputs[1] not in self.made
        ):
            raise GraphError(
                f"{self._op(index)} must read a parameter and the gradient that an op makes, and "
                f"make one tensor; it reads {', '.join(map(self._name, inputs[:8])) or 'nothing'} "
                f"and makes {len(self.outputs[index])}."
            )
        parameter, gradient = (self.metas[tensor] for tensor in inputs)
        if gradient.shape != parameter.shape:
            raise GraphError(
                f"{self._op(index)} updates {self._name(inputs[0])} of shape "
                f"{list(parameter.shape)} with a gradient of shape {list(gradient.shape)}; they "
                "must be equal."
            )
        other = self.updated_by.setdefault(inputs[0], index)
        if other != index:
            raise GraphError(
                f"{self._name(inputs[0])} is updated by {self._op(other)} and again by "
                f"{self._op(index)}; every parameter is updated once."
            )

    def _check_op(self, index: int) -> None:
        """Refuse faults that ops of any kind may have."""
        if self.kinds[index] in VIEW_KINDS and not self.inputs[index]:
            raise GraphError(f"{self._op(index)} is a view, but reads no tensor to look at.")
        if self.phases[index] == Phase.UPDATE:
            return
        for tensor in self.inputs[index]:
            if tensor in self.updated:
                raise GraphError(
                    f"{self._op(index)} reads {self._name(tensor)}, which an update makes; the "
                    "next step reads the new parameter, nothing in this one does."
                )

    def _check_tensor(self, tensor: int, meta: GraphTensor, *, is_input: bool) -> None:
        if meta.num_bytes > _MOST_TENSOR_BYTES:
            raise GraphError(
                f"{self._name(tensor)} of shape {list(meta.shape)[:8]} would have more than "
                f"{format_bytes(_MOST_TENSOR_BYTES)}."
            )
        if is_input and meta.kind not in _INPUT_KINDS:
            raise GraphError(
                f"{self._name(tensor)} of kind {meta.kind.name.lower()} is made by no op; inputs "
                "of the step are of kind parameter, buffer, batch or constant."
            )
        if not is_input and tensor < len(self.spec.tensors):
            record = self.spec.tensors[tensor]
            if record.placement is not None or record.batch_dim is not None:
                raise GraphError(
                    f"{self._name(tensor)} is made by an op, so its placement follows from there; "
                    "state it in the op's rule or batch_dims."
                )

    def _tensor(self, name: int | str, why: str) -> int:
        if isinstance(name, int):
            if not 0 <= name < len(self.spec.tensors):
                raise GraphError(
                    f"{why} tensor {shown(name)}, but there are only {len(self.spec.tensors)}."
                )
            return name
        if name not in self.position:
            raise GraphError(f"{why} tensor {shown(name)}, but no tensor has that name.")
        if name in self.ambiguous:
            raise GraphError(f"{why} tensor '{name}', but several tensors have that name.")
        return self.position[name]

    def _dtype(self, number: int, dtype: str) -> str:
        if dtype not in ITEM_BYTES:
            raise GraphError(
                f"tensor {number} has unknown dtype {shown(dtype)}; known: "
                f"{', '.join(ITEM_BYTES)}."
            )
        return dtype

    def _from_table(self, entry: str | int, table: Sequence[str], name: str) -> str:
        if isinstance(entry, str):
            return entry
        if not 0 <= entry < len(table):
            raise GraphError(
                f"an op refers to entry {shown(entry)} of '{name}', which has {len(table)}."
            )
        return table[entry]

    def _op(self, index: int) -> str:
        return f"op {index} '{self.spec.ops[index].name or self.kinds[index]}'"

    def _name(self, tensor: int) -> str:
        name = self.metas[tensor].name
        return f"tensor {tensor} '{name}'" if name else f"tensor {tensor}"


def _shown(values: Sequence[float]) -> str:
    """The first of some numbers, for a message."""
    text = ", ".join(f"{value:g}" for value in values[:8])
    return f"[{text}{', ...' if len(values) > 8 else ''}]"


def check_batch_plan(graph: OpGraph) -> None:
    """Refuse rules that do not fit their inputs.

    Raises:
        GraphError: an op's rule expects a partial sum or local statistics where there is none, or
            the reverse, or its arguments are invalid.
    """
    plan = batch_plan(graph)
    for index, op in enumerate(graph.ops):
        if op.phase == Phase.UPDATE:
            continue
        for tensor, needed in zip(op.inputs, plan.needed[index], strict=True):
            given = plan.placements[tensor]
            if given == needed or (not {given.kind, needed.kind} & {"L"} and needed.kind != "P"):
                continue
            name = graph.tensors[tensor].name
            what = f"'{name}'" if name else str(tensor)
            raise GraphError(
                f"op '{op.name or op.kind}' reads tensor {what} as "
                f"{needed}, but it is {given} ({_MEANING[given.kind]}); write a rule that reads "
                f"it as {given}."
            )
    for _, parameter, gradient in graph.updates:
        maker = int(graph.producer[int(graph.storage[gradient])])
        if maker < 0 or graph.ops[maker].phase == Phase.UPDATE:
            raise GraphError(
                f"the gradient of '{graph.tensors[parameter].name}' is only a view of an input of "
                "the step; an op has to make it."
            )


_MEANING = {
    "R": "whole on every device",
    "S": "split along the batch",
    "P": "a partial sum over the batch",
    "L": "local statistics",
}
