"""Recomputation: which ops of a group run again, before which op, and which results are kept.

Recomputation (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016) trades seconds
for bytes: the results of a group's forward ops are not kept for its backward ops, but made again
from values of other groups. So of a group only the values that *other* groups read are kept: if
neighbours all recompute, these are the values at the borders between them.

Unlike the paper, an op runs again only if a backward op of the group, or another op that runs
again, reads its result. Values that arrived from other devices are kept, so no communication
happens twice.

Some results may be kept nevertheless (``Keeps``). Attention that is written out makes scores,
their softmax and dropout for all pairs of positions: 5 a s^2 b bytes a layer in 16 bits, beside
34 s b h bytes of all other activations (a heads, s positions, b samples, h hidden units;
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections
4.1 and 4.3). Scores are cheap to make again. torchtitan keeps expensive results and makes all
others again.

``Remakes`` recomputes values instead of sending them. Every device has the batch. A mask of pairs
of positions, which the first stage of a pipeline makes from a few numbers per sample, is a quarter
of the bytes sent between stages at 4,096 tokens. So the few cheap ops that make it run again on
the devices of each stage.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, EVERYWHERE, AxisPlan
from heterog.graph.grouping import CONSTANT_GROUP
from heterog.graph.op_graph import IntArray, OpGraph, Phase, TensorKind
from heterog.graph.placement import kinds
from heterog.graph.sharding_rules import Special
from heterog.graph.sharding_rules.matmul import ATTENTION_KINDS
from heterog.memo import kept


class Recomputation(NamedTuple):
    """The ops that a group reruns.

    Attributes:
        reader: Op before which they run: the first backward op of the group, or the first that
            makes one of its gradients, so that no update comes in between; -1 if there is none.
        ops: Ops that run again, in program order.
    """

    reader: int
    ops: tuple[int, ...]


def recomputations(
    group: Sequence[int],
    is_backward: Sequence[bool],
    own_reads: Sequence[Sequence[int]],
    gradient_makers: Sequence[int],
    num_groups: int,
    kept: Collection[int] = (),
) -> list[Recomputation]:
    """Find the recomputation of every group, over compute ops by row.

    Args:
        group: Group of each op, negative for constants.
        is_backward: Whether each op belongs to the backward pass.
        own_reads: For each op, the makers of inputs that it reads without conversion: ops of its
            own group, or constants.
        gradient_makers: Ops that make the gradients of parameters.
        num_groups: Number of groups.
        kept: Ops whose results are kept.
    """
    readers = [-1] * num_groups
    makes_gradient = set(gradient_makers)
    for op, of in enumerate(group):
        if of >= 0 and readers[of] < 0 and (is_backward[op] or op in makes_gradient):
            readers[of] = op
    again: list[set[int]] = [set() for _ in range(num_groups)]
    # From last to first: all readers of an op's result are visited before the op.
    for op in range(len(group) - 1, -1, -1):
        of = group[op]
        if of >= 0 and (is_backward[op] or op in again[of]):
            again[of].update(
                maker
                for maker in own_reads[op]
                if group[maker] == of
                and not is_backward[maker]
                and maker < readers[of]
                and maker not in kept
            )
    return [
        Recomputation(reader, tuple(sorted(ops)))
        for reader, ops in zip(readers, again, strict=True)
    ]


class Keeps(IntEnum):
    """The values that a group that recomputes keeps, besides those that other groups read."""

    NOTHING = 0
    """No further values: all that its backward pass reads is made again."""
    PRODUCTS = 1
    """Results of attention kernels, and of every second product with a weight: the first of a
    block, the third, and so on (torchtitan's selective checkpoints by op)."""
    ALL_BUT_SCORES = 2
    """All values but those for pairs of positions in attention that is written out: Megatron's
    selective recomputation."""

    @property
    def words(self) -> str:
        """The values that are recomputed, in words."""
        return _WORDS[self]


_WORDS = {
    Keeps.NOTHING: "activations",
    Keeps.PRODUCTS: "activations but for every other product",
    Keeps.ALL_BUT_SCORES: "scores of attention",
}


def recomputed_words(kept: Iterable[Keeps]) -> str:
    """The values that groups make again, in words.

    >>> recomputed_words([Keeps.NOTHING, Keeps.ALL_BUT_SCORES])
    'activations and scores of attention'
    """
    return " and ".join(keeps.words for keeps in sorted(set(kept)))


_SOFTMAX = frozenset(kinds("_softmax _safe_softmax"))
_PRODUCTS = frozenset(kinds("bmm baddbmm"))
_MOST_BETWEEN = 64
"""Most ops between a softmax and a product, views included; attention scales and masks there."""
_WEIGHED = frozenset(kinds("mm addmm linear"))


@lru_cache(maxsize=16)
def attention_scores(graph: OpGraph) -> tuple[tuple[int, ...], ...]:
    """The ops of each attention that is written out, from its scores to the weights of values.

    They are the first of two products of activations, a softmax between the two, and all other ops
    between them, in program order.
    """
    found = []
    for index, op in enumerate(graph.ops):
        if op.kind not in _SOFTMAX or op.phase != Phase.FORWARD:
            continue
        size = graph.tensors[op.inputs[0]].num_elements
        before, after = _Between(graph, size), _Between(graph, size)
        if before.comes_from_product(op.inputs[0]) and after.goes_to_product(
            graph.outputs[index][0]
        ):
            found.append(tuple(sorted({index, *before.ops, *after.ops})))
    return tuple(found)


class _Between:
    """Finds the ops between a softmax and a product, each as large as the softmax.

    Args:
        graph: One training step.
        size: Number of elements of the softmax.

    Attributes:
        ops: The ops found.
    """

    def __init__(self, graph: OpGraph, size: int) -> None:
        self._graph = graph
        self._size = size
        self._known: dict[int, bool] = {}
        self.ops: set[int] = set()

    def comes_from_product(self, tensor: int) -> bool:
        """Whether a tensor is made from a product of activations; notes the ops in between."""
        maker = int(self._graph.producer[tensor])
        if maker < 0 or not self._may_go_on(maker):
            return False
        if maker not in self._known:
            op = self._graph.ops[maker]
            self._known[maker] = op.kind in _PRODUCTS or any(
                [self.comes_from_product(source) for source in op.inputs]
            )
            if self._known[maker] and not self._graph.is_view[maker]:
                self.ops.add(maker)
        return self._known[maker]

    def goes_to_product(self, tensor: int) -> bool:
        """Whether a product reads a tensor, perhaps through other ops; notes these ops."""
        return any([self._leads_on(reader) for reader in self._graph.consumers[tensor]])

    def _leads_on(self, reader: int) -> bool:
        graph, op = self._graph, self._graph.ops[reader]
        if op.kind in _PRODUCTS and op.phase == Phase.FORWARD:
            return True
        if not self._may_go_on(reader):
            return False
        if reader not in self._known:
            self._known[reader] = self.goes_to_product(graph.outputs[reader][0])
            if self._known[reader] and not graph.is_view[reader]:
                self.ops.add(reader)
        return self._known[reader]

    def _may_go_on(self, index: int) -> bool:
        """Whether a forward op makes a value of the softmax's size from activations alone."""
        graph, op = self._graph, self._graph.ops[index]
        made = graph.outputs[index]
        reads = {graph.tensors[int(graph.storage[tensor])].kind for tensor in op.inputs}
        return (
            op.phase == Phase.FORWARD
            and len(made) > 0
            and graph.tensors[made[0]].num_elements == self._size
            and TensorKind.PARAMETER not in reads
            and len(self._known) < _MOST_BETWEEN
        )


def kept_products(graph: OpGraph, block: Sequence[int]) -> frozenset[int]:
    """Ops whose results are kept by ``Keeps.PRODUCTS``.

    Args:
        graph: One training step.
        block: Block of each op, negative for constants.
    """
    counts: dict[int, int] = {}
    kept = set()
    for index, op in enumerate(graph.ops):
        if op.phase != Phase.FORWARD:
            continue
        if op.kind in _WEIGHED:
            counts[block[index]] = counts.get(block[index], 0) + 1
            if counts[block[index]] % 2:
                kept.add(index)
        elif op.kind in ATTENTION_KINDS:
            kept.add(index)
    return frozenset(kept)


def scores_again(
    scores: Sequence[Sequence[int]],
    group: Sequence[int],
    is_backward: Sequence[bool],
    own_reads: Sequence[Sequence[int]],
) -> Iterator[Recomputation]:
    """The ops of each attention that run again before the first backward op that reads them.

    Args:
        scores: Ops of each attention, by row.
        group: Block of each op, negative for constants.
        is_backward: Whether each op belongs to the backward pass.
        own_reads: For each op, the makers of inputs that it reads without conversion.
    """
    readers: dict[int, list[int]] = {row: [] for rows in scores for row in rows}
    for row, makers in enumerate(own_reads):
        for maker in makers:
            if maker in readers and group[row] == group[maker]:
                readers[maker].append(row)
    for rows in scores:
        again: set[int] = set()
        late: list[int] = []
        for row in sorted(rows, reverse=True):
            read_late = [reader for reader in readers[row] if is_backward[reader]]
            late += read_late
            if read_late or not again.isdisjoint(readers[row]):
                again.add(row)
        if again:
            yield Recomputation(min(late), tuple(sorted(again)))


MOST_WORK = 8.0
"""Most bytes that the recomputing ops move, and most FLOPs, per byte that is not sent: the memory
of an H100 moves 3,350 GB/s, its NVLink 450 GB/s in each direction, and other links are slower."""
BYTES_PER_LAUNCH = 2.0**16
"""Fewest unsent bytes per recomputing op: 100 Gbit/s moves as many in the 5 microseconds that a
launch takes."""
_HARMLESS = frozenset({None, Special.OWN_ROWS, Special.AS_RESHAPE})


class Remake(NamedTuple):
    """How a value is made on the devices that read it.

    Attributes:
        ops: Graph ops, in program order; the last one makes the value.
        least_bytes: Fewest bytes that a device would otherwise receive, for this to be worth it.
    """

    ops: tuple[int, ...]
    least_bytes: float


class Remakes:
    """Finds ops by which devices make values that follow from the batch instead of receiving them.

    Args:
        graph: One training step.
        plan: Placements under the rules of a strategy.
        group: Group of each op.
        gathered: For each tensor that is a view, how much of the viewed value its views need
            (``AS_MADE``, ``IN_TEAM`` or ``EVERYTHING``).
    """

    def __init__(
        self, graph: OpGraph, plan: AxisPlan, group: IntArray, gathered: Sequence[int]
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._group = group
        self._gathered = gathered

    def of_value(self, tensor: int, moved_fraction: float) -> Remake | None:
        """The ops that make a value again; ``None`` if it is sent.

        Args:
            tensor: The value.
            moved_fraction: Fraction of it that readers on other devices use.
        """
        graph = self._graph
        if self._plan.batch_placements[tensor].kind != "S":
            return None  # all devices hold the same part of it, often a single number
        ops = self._ops(int(graph.producer[tensor]))
        if ops is None:
            return None
        size = moved_fraction * float(graph.tensor_bytes[tensor])
        work = max(float(each[list(ops)].sum()) for each in (graph.bytes_moved, graph.flops))
        if work > MOST_WORK * size:
            return None
        return Remake(tuple(sorted(ops)), len(ops) * BYTES_PER_LAUNCH)

    @kept
    def _ops(self, op: int) -> frozenset[int] | None:
        """An op and all ops that it needs; ``None`` if one does not follow from the batch."""
        graph, plan = self._graph, self._plan
        axis = int(plan.op_axis[op])
        if not self._is_cheap(op) or (axis != BATCH_AXIS and plan.axes[axis] != EVERYWHERE):
            return None
        found = {op}
        for position, tensor in enumerate(graph.ops[op].inputs):
            storage = int(graph.storage[tensor])
            maker = int(graph.producer[storage])
            if maker < 0:
                if self._changes(storage):
                    return None
                continue
            if self._group[maker] == CONSTANT_GROUP:
                continue
            whole = max(self._gathered[tensor], plan.whole_needed(op, position, tensor))
            before = self._ops(maker)
            if whole != AS_MADE or plan.tensor_axis[storage] != axis or before is None:
                return None
            found |= before
        return frozenset(found)

    def _is_cheap(self, op: int) -> bool:
        """Whether an op does the same to each sample of the batch, wherever it runs."""
        plan, outputs = self._plan, self._graph.outputs[op]
        return (
            self._graph.ops[op].phase == Phase.FORWARD
            and len(outputs) > 0
            and all(plan.batch.follows_batch[tensor] for tensor in outputs)
            and plan.specials[op] in _HARMLESS
            and plan.batch.specials[op] in _HARMLESS
            and plan.scattered.isdisjoint(outputs)
        )

    def _changes(self, tensor: int) -> bool:
        """Whether an input of the step is a buffer that may be written during it."""
        return self._graph.tensors[tensor].kind == TensorKind.BUFFER and any(
            self._graph.ops[reader].is_write
            or self._plan.batch.specials[reader] == Special.LOCAL_STATISTICS
            for reader in self._graph.readers(tensor)
        )
