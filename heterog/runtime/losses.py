"""The loss of the whole batch: each rank's part of it, and the weight of all labels that count."""

from torch import Tensor, ne, where

from heterog.graph.placement import Placement
from heterog.runtime.collectives import Pending
from heterog.runtime.local_op import LocalOp
from heterog.runtime.rank_program import Layout, RankProgram
from heterog.runtime.values import Values


class Losses:
    """This rank's part of the loss.

    Args:
        part: the program as this rank sees it.
        values: of the step.

    Attributes:
        total: this rank's part of the loss so far, a scalar.
    """

    def __init__(self, part: RankProgram, values: Values) -> None:
        self._part = part
        self._values = values
        self._op = part.loss_op()
        self._label_weights: dict[int, Pending] = {}
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._label_weights = {}
        self.total = self._values.zeros(self._part.graph.loss, ())

    def keep(self, task: int, op: int, layout: Layout | None, micro: int) -> None:
        """Add this rank's part of the loss when the op that makes it has run."""
        if op != self._op:
            return
        part = self._part
        near = {(part.value_in(buffer)[0], False): buffer for buffer in part.made(task)}
        value, placement = self._values.tensor(part.graph.loss, False, near, layout, micro)
        first = layout.first(micro) if layout else part.rank
        if placement.kind == "P" or first == part.rank:
            self.total += value.reshape(()) / (1 if placement.kind == "P" else part.num_micro)

    def keep_label_weight(self, value: int, pending: Pending) -> None:
        """The weight of all labels is on its way."""
        self._label_weights[value] = pending

    def label_weight(self, op: int, local_op: LocalOp, layout: Layout) -> Tensor:
        """Weight of the labels that count in the whole batch, on all devices together."""
        value = self._part.value_of[self._part.graph.outputs(op)[1]]
        if value not in self._label_weights:
            assert len(layout.devices) == 1, "the program reduces the label weight first"
            local = self.local_label_weight(op, local_op, layout)
            self._label_weights[value] = Pending(None, lambda: local)
        return self._label_weights[value].wait()

    def local_label_weight(self, op: int, local_op: LocalOp, layout: Layout) -> Tensor:
        """Weight of this rank's labels over all micro-batches."""
        part = self._part
        inputs, needed = part.graph.ops[op].inputs, part.plan.needed[op]
        ignored = local_op.call.args["ignore_index"]
        assert isinstance(ignored, int)
        total = self._values.zeros(part.graph.outputs(op)[1], ())
        for micro in range(part.num_micro):
            if layout.range(micro, part.rank)[1] == 0:
                continue
            target = self._known(inputs[1], needed[1], layout, micro)
            counts = ne(target, ignored)
            if local_op.call.args.get("weight") is not None:
                weight = self._known(inputs[2], needed[2], layout, micro)
                # No mask selects elements: their number would be known to the data alone.
                total += (weight[where(counts, target, 0)] * counts).sum()
            else:
                total += counts.sum()
        return total

    def _known(self, tensor: int, needed: Placement, layout: Layout, micro: int) -> Tensor:
        """What a loss reads that follows from the batch, before the op that makes it has run."""
        return self._values.placed(self._values.from_batch(tensor), needed, layout, micro)
