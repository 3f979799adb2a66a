"""The loss of the whole batch: each rank's part of it, and the weight of all labels that count."""

from torch import Tensor

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS
from heterog.graph.sharding_rules.table import positions
from heterog.runtime.step.collectives import Pending
from heterog.runtime.step.local_op import LocalOp
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.spans import Spans
from heterog.runtime.step.special_ops import weight_of_labels
from heterog.runtime.step.values import Reader, Values


class Losses:
    """This rank's part of the loss.

    Args:
        part: The program as this rank sees it.
        values: Values of the step.

    Attributes:
        op: The op that makes the loss.
        total: This rank's part of the loss so far, a scalar.
    """

    def __init__(self, part: RankProgram, values: Values) -> None:
        self._part = part
        self._values = values
        self.op = part.loss_op()
        self._label_weights: dict[int, Pending] = {}
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._label_weights = {}
        self.total = self._values.zeros(self._part.graph.loss, ())

    def keep(self, task: int, spans: Spans | None, micro: int) -> None:
        """Add this rank's part of the loss when the op that makes it has run."""
        part = self._part
        near = {part.value_in(buffer): buffer for buffer in part.made(task)}
        seen = self._values.look(part.graph.loss, AS_MADE, near, self._values.reader(spans, micro))
        is_sum = part.plan.batch_placements[part.graph.loss].kind == "P"
        counts = True
        if spans is not None:
            is_ruled = spans.axis != BATCH_AXIS
            if is_sum:  # each device, or each team, has a part
                counts = not is_ruled or seen.is_part_in_team or spans.speaks(micro, part.rank)
            elif seen.is_part_in_team:
                counts = spans.is_in_first_team(micro, part.rank)
            else:
                counts = spans.first(micro) == part.rank
        if counts:
            self.total += self._values.follow(seen).reshape(()) / (1 if is_sum else part.num_micro)

    def keep_label_weight(self, value: int, pending: Pending) -> None:
        """Keep the weight of all labels, which is still being summed."""
        self._label_weights[value] = pending

    def label_weight(self, op: int, local_op: LocalOp, spans: Spans) -> Tensor:
        """Weight of all labels of the batch that count, on all devices together."""
        value = self._part.value_of[self._part.graph.outputs[op][1]]
        if value not in self._label_weights:
            assert self.has_all_labels(op, spans), "the program reduces the label weight first"
            local = self.local_label_weight(op, local_op, spans, speaks=True)
            self._label_weights[value] = Pending(None, lambda: local)
        return self._label_weights[value].wait()

    def has_all_labels(self, op: int, spans: Spans) -> bool:
        """Whether each device that makes a loss knows the weight of all labels by itself."""
        weight = self._part.graph.outputs[op][1]
        is_split = spans.axis == BATCH_AXIS or self._part.plan.placements[weight].kind == "P"
        return len(spans.devices) == 1 or (spans.num_teams == 1 and not is_split)

    def local_label_weight(
        self, op: int, local_op: LocalOp, spans: Spans, *, speaks: bool = False
    ) -> Tensor:
        """Weight of this rank's labels over all micro-batches.

        Members of a team have the same labels: one member counts them, or with ``speaks`` each.
        """
        part = self._part
        total = self._values.zeros(part.graph.outputs[op][1], ())
        for micro in range(part.num_micro):
            if spans.range(micro, part.rank)[1] == 0:
                continue
            is_alike = spans.axis != BATCH_AXIS and (
                part.plan.placements[part.graph.outputs[op][1]].kind != "P"
            )
            if is_alike and not speaks and not spans.speaks(micro, part.rank):
                continue
            total += self._weight(op, local_op, self._values.reader(spans, micro))
        return total

    def whole_label_weight(self, op: int, local_op: LocalOp) -> Tensor:
        """Weight of the labels of the whole batch, which every rank has and can count."""
        return self._values.zeros(self._part.graph.outputs[op][1], ()) + self._weight(op, local_op)

    def _weight(self, op: int, local_op: LocalOp, reader: Reader | None = None) -> Tensor:
        """Weight of a reader's labels, or of all labels."""
        call, inputs = local_op.call, self._part.graph.ops[op].inputs
        given, needs = positions(call, "target", "weight"), self._part.needs[op]
        if reader is None:
            found = [self._values.from_batch(inputs[each]) for each in given]
        else:
            found = [self._values.known(needs[each], reader) for each in given]
        return weight_of_labels(call, *found)
