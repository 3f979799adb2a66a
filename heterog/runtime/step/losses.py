"""The loss of the whole batch: each rank's part of it, and the weight of all labels that count."""

from torch import Tensor

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS
from heterog.graph.sharding_rules.table import positions
from heterog.runtime.step.collectives import Pending
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.spans import Spans
from heterog.runtime.step.special_ops import weight_of_labels
from heterog.runtime.step.values import Reader, Values


class Losses:
    """This rank's part of the loss.

    Args:
        rank: What the rank runs the program with.
        values: Values of the step.

    Attributes:
        op: The op that makes the loss.
        total: This rank's part of the loss so far, a scalar.
    """

    def __init__(self, rank: RankState, values: Values) -> None:
        part = self._part = rank.part
        self._communicator = rank.communicator
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

    def count_labels(self, value: int, devices: tuple[int, ...]) -> Pending:
        """Find the weight of all labels: alone, or as a sum of each rank's.

        Args:
            value: The value that holds it.
            devices: Devices that sum it.
        """
        part, op = self._part, self._part.maker(value)
        if any(mode.counts_labels_alone for mode in part.strategy.modes):
            # Every rank has the whole batch.
            weight = self._values.zeros(part.graph.outputs[op][1], ()) + self._weight(op)
            pending = Pending(None, lambda: weight)
        else:
            weight = self._local_label_weight(op, part.spans_of_value(value))
            pending = self._communicator.all_reduce(weight.contiguous(), devices)
        self._label_weights[value] = pending
        return pending

    def label_weight(self, op: int, spans: Spans) -> Tensor:
        """Weight of all labels of the batch that count, on all devices together."""
        value = self._part.value_of[self._part.graph.outputs[op][1]]
        if value not in self._label_weights:
            assert self.has_all_labels(op, spans), "the program reduces the label weight first"
            local = self._local_label_weight(op, spans, speaks=True)
            self._label_weights[value] = Pending(None, lambda: local)
        return self._label_weights[value].wait()

    def has_all_labels(self, op: int, spans: Spans) -> bool:
        """Whether each device that makes a loss knows the weight of all labels by itself."""
        weight = self._part.graph.outputs[op][1]
        is_split = spans.axis == BATCH_AXIS or self._part.plan.placements[weight].kind == "P"
        return len(spans.devices) == 1 or (spans.num_teams == 1 and not is_split)

    def _local_label_weight(self, op: int, spans: Spans, *, speaks: bool = False) -> Tensor:
        """Weight of this rank's labels over all micro-batches.

        Members of a team have the same labels: one member counts them, or with ``speaks`` each.
        """
        part, weight = self._part, self._part.graph.outputs[op][1]
        total = self._values.zeros(weight, ())
        is_alike = spans.axis != BATCH_AXIS and part.plan.placements[weight].kind != "P"
        for micro in range(part.num_micro):
            if spans.range(micro, part.rank)[1] == 0:
                continue
            if speaks or not is_alike or spans.speaks(micro, part.rank):
                total += self._weight(op, self._values.reader(spans, micro))
        return total

    def _weight(self, op: int, reader: Reader | None = None) -> Tensor:
        """Weight of a reader's labels, or of all labels."""
        call, needs = self._part.graph.calls[op], self._part.needs[op]
        given = [needs[position] for position in positions(call, "target", "weight")]
        if reader is None:
            found = [self._values.from_batch(need.tensor) for need in given]
        else:
            found = [self._values.known(need, reader) for need in given]
        return weight_of_labels(call, *found)
