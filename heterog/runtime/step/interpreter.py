"""Runs ops one by one, as in a first step, and finds how each of them reads its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from heterog.graph.axis_plan import BATCH_AXIS
from heterog.graph.op_graph import TensorKind
from heterog.lowering.program import TaskKind
from heterog.runtime.step.conversions import Conversions
from heterog.runtime.step.local_op import LocalOp, Share
from heterog.runtime.step.losses import Losses
from heterog.runtime.step.optimizer import StepUpdates
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recipes import Recipe
from heterog.runtime.step.spans import Span, Spans
from heterog.runtime.step.values import HeldValue, Reader, Values


@dataclass(slots=True, kw_only=True)
class NotedOp:
    """A task that runs an op: what it does, and how it reads its inputs.

    Attributes:
        local_op: The op.
        share: This rank's share of it.
        reader: This rank as a reader, with the op's samples and units.
        units: Part of its outputs.
        draws_for: Rank whose random numbers it draws; ``None`` if every rank draws the same.
        is_again: Whether the op runs a second time in the step (recomputation).
        is_incomplete: Whether its team has to complete its output.
        is_special: Whether it needs more of the step than its inputs, so that it cannot be in a
            segment.
        inputs: Recipe of each input; empty before it has run.
        gradients: Rows of ``graph.updates`` whose gradients it made, and how they were read;
            ``None`` if they were under way.
    """

    local_op: LocalOp
    share: Share
    reader: Reader
    units: Span
    draws_for: int | None
    is_again: bool
    is_incomplete: bool
    is_special: bool
    inputs: list[Recipe] = field(default_factory=list)
    gradients: list[tuple[int, Recipe | None]] = field(default_factory=list)

    @property
    def recipes(self) -> list[Recipe | None]:
        """Recipes of its inputs and of the gradients that it made."""
        return [*self.inputs, *(recipe for _, recipe in self.gradients)]

    @property
    def is_plain(self) -> bool:
        """Whether its recipes are simple, and it is not special."""
        return not self.is_special and all(each and each.is_simple for each in self.recipes)


class Interpreter:
    """Runs the ops of a rank.

    Args:
        rank: What the rank runs the program with.
        values: Values of the step.
        losses: Parts of the loss.
        conversions: Completes outputs that a team makes together.
        begins_backward: The op whose output is scaled as the loss is; ``None`` if none is.

    Attributes:
        noted: Notes on tasks that have run, by task.
    """

    def __init__(
        self,
        rank: RankState,
        values: Values,
        losses: Losses,
        conversions: Conversions,
        begins_backward: int | None,
    ) -> None:
        self.noted: dict[int, NotedOp] = {}
        self._rank, self._part = rank, rank.part
        self._values = values
        self._losses = losses
        self._conversions = conversions
        self._begins_backward = begins_backward
        self._due: dict[int, list[Tensor]] = {}  # buffers and their new values, by op
        self._op: list[int] = rank.part.tables.op_id.tolist()

    def write_counters(self) -> None:
        """Write what a step counts in buffers, once for all of its micro-batches."""
        for into, value in self._due.values():
            into.copy_(value)
        self._due.clear()

    def run(self, task: int, row: int, micro: int, step: StepUpdates, number: int) -> None:
        """Run an op, and keep what it makes.

        Args:
            task: The task that runs it.
            row: Its row in the tables.
            micro: The micro-batch.
            step: State of the step.
            number: Number of the step.
        """
        values = self._values
        noted = self.noted.get(task)
        if noted is None:
            noted = self.noted[task] = self._first_call(task, row, micro)
        local_op, reader = noted.local_op, noted.reader
        op, spans = local_op.index, reader.spans
        inputs = self._inputs(task, noted)
        if local_op.counts_steps and spans is None:
            # Later micro-batches read the old value, and count from it.
            self._due[op] = inputs
            inputs = [inputs[0], inputs[0]]  # copies the counter onto itself
        outputs = self._outputs(noted, inputs, number)
        if op == self._begins_backward:
            outputs = [outputs[0] * step.loss_scale]
        if local_op.weighs_labels:
            assert spans is not None
            weight = self._losses.label_weight(op, spans)
            outputs[0] = outputs[0] / weight
            if self._losses.has_all_labels(op, spans):
                # No other device to reduce with, and the backward pass reads it.
                outputs[1] = weight
        made = self._part.made(task)[: len(outputs)]  # without a token, which only orders tasks
        if noted.is_incomplete:
            self._conversions.incomplete[made[0]] = inputs
        for buffer, output in zip(made, outputs, strict=True):
            values.held[buffer] = HeldValue(output, reader.samples, noted.units)
        if not noted.is_again:
            for position in local_op.steps_buffers:
                values.put_back(op, position, inputs[position], reader)
            if row in self._part.makes_gradients:
                noted.gradients = step.gradients.keep(task, spans, micro)
            if op == self._losses.op:
                self._losses.keep(task, spans, micro)
        for buffer in made:
            if not values.is_ever_read(buffer):
                del values.held[buffer]

    def _inputs(self, task: int, noted: NotedOp) -> list[Tensor]:
        """Read an op's inputs; the way is the same in every step."""
        values, graph, inputs = self._values, self._part.graph, []
        if noted.inputs:
            return [values.follow(recipe) for recipe in noted.inputs]
        for need in self._part.needs[noted.local_op.index]:
            seen = values.read(need, self._part.near(task), noted.reader)
            kind = graph.tensors[graph.storage[need.tensor]].kind
            if noted.is_again and kind == TensorKind.BUFFER:
                # A copy, because BatchNorm would update its statistics again.
                seen.then(Tensor.clone)
                seen.is_simple = False
            value, recipe = values.first_read(seen)
            inputs.append(value)
            noted.inputs.append(recipe)
        return inputs

    def _outputs(self, noted: NotedOp, inputs: Sequence[Tensor], number: int) -> list[Tensor]:
        """Outputs of an op for some inputs."""
        local_op, micro = noted.local_op, noted.reader.micro
        if local_op.is_of_whole_batch:
            outputs = self._part.graph.outputs[local_op.index]
            return [self._values.from_batch(tensor) for tensor in outputs]
        if not local_op.is_random:
            return local_op(inputs, noted.share)
        # Seeded by the op's identity, so that recomputation draws the same numbers.
        with self._rank.random.drawing(number, local_op.index, micro, rank=noted.draws_for):
            return local_op(inputs, noted.share)

    def _first_call(self, task: int, row: int, micro: int) -> NotedOp:
        """Notes on a task before its op runs for the first time."""
        part, op = self._part, self._op[row]
        spans, local_op = part.spans_of_task(task, op), self._rank.ops[op]
        reader = self._values.reader(spans, micro)
        is_again = part.kinds[task] is not TaskKind.COMPUTE
        share, units = reader.share or local_op.whole, reader.units
        if part.is_recut[row]:  # its team cuts the outputs anew: all of the axis
            units = 0, part.spans_of_value(int(part.tables.value_start[row])).units
        is_incomplete = local_op.is_incomplete(share)
        return NotedOp(
            local_op=local_op,
            share=share,
            reader=reader,
            units=units,
            draws_for=self._draws_for(local_op, spans, micro) if local_op.is_random else None,
            is_again=is_again,
            is_incomplete=is_incomplete,
            is_special=bool(
                local_op.counts_steps
                or local_op.is_of_whole_batch
                or local_op.weighs_labels
                or local_op.steps_buffers
                or is_incomplete
                or op in (self._begins_backward, self._losses.op)
            ),
        )

    def _draws_for(self, local_op: LocalOp, spans: Spans | None, micro: int) -> int | None:
        """The rank whose random numbers an op draws; ``None`` if every rank draws the same."""
        along_batch, along_axis = local_op.draws_own
        if spans is None or not (along_batch or along_axis):
            return None
        if along_axis or spans.axis == BATCH_AXIS:
            return self._part.rank
        if spans.num_teams == 1 and self._part.num_micro == 1:
            return None  # every device draws for the whole output
        return spans.speaker(micro, self._part.rank)
