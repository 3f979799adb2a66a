"""The loops of the forward and of the backward pass, each compiled as a graph of its own.

Inductor writes a pointwise step into every loop that reads it. It becomes a loop, with a *buffer*
in memory, where something else has to read it: a kernel of its own, the other pass, the optimizer;
or where it is read more than once and reads so much that computing it again costs more
(``StorageBox.should_realize_on_reuse`` and ``has_exceeded_max_reads`` in
``torch/_inductor/ir.py``).

A reduction with few results is cut into parts, so that all of a GPU works. Each part is summed by
itself, and a second kernel adds up the parts. The rules are those of ``Reduction.num_splits``
(``torch/_inductor/ir.py``) and ``reduction_split_factor`` (``choices.py``) of torch 2.13, for a
GPU with as many multiprocessors as an A100: another number moves the borders between one part and
several a little. Unlike there, parts need not be equal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from heterog.graph.op_graph import OpGraph, Phase
from heterog.pricing.device_models.fusion.kept import follows_loss, kept_values
from heterog.pricing.device_models.fusion.steps import ROWS, SAME, Step, Steps, Work

_MULTIPROCESSORS = 108
_THREADS = 2048
_THREADS_OF_BLOCK = 256
_LEAST_PER_THREAD = 32
_MOST_PER_THREAD = 512
_LONGEST_ROW = 8192
_RESULTS_OF_BLOCK = 128
_ROWS_OF_THREAD = 4


def num_parts(results: int, reduced: int, *, along_rows: bool) -> int:
    """Number of parts of a reduction; 1 if it stays whole.

    Args:
        results: Number of elements that it makes.
        reduced: Number of elements that each is made of.
        along_rows: Whether these lie beside each other in memory.

    >>> num_parts(8192, 768, along_rows=True), num_parts(768, 8192, along_rows=False)
    (1, 64)
    """
    if results == 1 or along_rows:
        return _parts_of_rows(results, reduced)
    if reduced <= _LEAST_PER_THREAD or results >= _MULTIPROCESSORS * 64:
        return 1
    blocks = ceil(
        _MULTIPROCESSORS * _THREADS // _THREADS_OF_BLOCK / ceil(results / _RESULTS_OF_BLOCK)
    )
    each = ceil(reduced / (_ROWS_OF_THREAD * blocks))
    return ceil(reduced / (_ROWS_OF_THREAD * _per_thread(results * reduced, each)))


def _parts_of_rows(results: int, reduced: int) -> int:
    if results >= 2 * _MULTIPROCESSORS or reduced <= _LONGEST_ROW:
        return 1
    blocks = ceil(_MULTIPROCESSORS * _THREADS // (2 * _THREADS_OF_BLOCK) / results)
    each = ceil(reduced / (_THREADS_OF_BLOCK * blocks))
    return ceil(reduced / (_THREADS_OF_BLOCK * _per_thread(results * reduced, each)))


def _per_thread(elements: int, even: int) -> int:
    """Number of elements that a thread reduces; ``even`` is the number that fills the GPU once."""
    if elements <= _LEAST_PER_THREAD * _MULTIPROCESSORS * _THREADS:
        return _LEAST_PER_THREAD
    if elements < _MOST_PER_THREAD * _MULTIPROCESSORS * _THREADS:
        return max(even, _LEAST_PER_THREAD)
    return _MOST_PER_THREAD


_MOST_REUSED_READS = 4
_MOST_REUSED_OPS = {True: 30, False: 50}
_MOST_READS = {True: 8, False: 12}
"""Most reads of a loop without a buffer, on GPUs and on CPUs: ``realize_acc_reads_threshold``."""
_MOST_OPS = 100

OF_PARTS = "parts"
"""The order of a reduction over the parts of another."""

Access = tuple[int, str]
"""A buffer, and the order in which a loop reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop that is not written into others, or a kernel of its own.

    Attributes:
        op: Op that it is counted for.
        work: Kind of work: ``POINTWISE``, ``REDUCTION`` or ``OWN``.
        whole: Number of iterations.
        kept: Number of elements of its result; less than ``whole`` for a reduction.
        order: Order of a reduction; see ``Step``.
        parts: Number of parts of a GPU's reduction; this loop makes one result of each.
        reads: Bytes that it reads of each buffer, by the order of reading.
        writes: Bytes of each buffer that it makes.
        ops: All ops that are written into it, its own among them.
        adds_up: Whether several iterations write one element; see ``Step``.
    """

    op: int
    work: Work
    whole: int
    kept: int
    order: str
    reads: Mapping[Access, float]
    writes: Mapping[int, float]
    ops: frozenset[int]
    adds_up: bool = False
    parts: int = 1

    @property
    def reduced(self) -> int:
        """Number of elements that each result is made of."""
        return self.whole // max(self.kept, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One compiled graph.

    Attributes:
        phase: Phase of the ops, forward or backward.
        loops: Loops in program order.
        outputs: Buffers that something outside reads.
        on_gpu: Whether rules of GPUs hold, else those of CPUs.
    """

    phase: Phase
    loops: tuple[Loop, ...]
    outputs: frozenset[int]
    on_gpu: bool


def passes_of(graph: OpGraph, lowered: Steps, *, on_gpu: bool = True) -> tuple[Pass, Pass]:
    """The forward and the backward pass of a graph.

    Args:
        graph: One training step.
        lowered: Steps of the graph.
        on_gpu: Whether thresholds of GPUs hold, else those of CPUs.
    """
    results = _results(graph, lowered)
    follows = follows_loss(graph, lowered)
    kept = kept_values(graph, lowered, follows, results)
    forward = [number for number, after in enumerate(follows) if not after]
    backward = [number for number, after in enumerate(follows) if after]
    saved = {value for value in kept if lowered.maker[value] >= 0}
    first = _Writer(
        lowered,
        [(number, lowered.steps[number].op) for number in forward],
        outputs=saved | (results & _made(lowered, forward)),
        given=frozenset(range(graph.num_inputs)),
        on_gpu=on_gpu,
    )
    given = kept | frozenset(range(graph.num_inputs))
    second = _Writer(
        lowered,
        list(_with_recomputed(lowered, backward, given)),
        outputs=results & _made(lowered, backward),
        given=given,
        on_gpu=on_gpu,
    )
    return first.write(Phase.FORWARD), second.write(Phase.BACKWARD)


def _made(lowered: Steps, steps: Iterable[int]) -> set[int]:
    return {value for number in steps for value in lowered.steps[number].makes}


def _results(graph: OpGraph, lowered: Steps) -> set[int]:
    """Values that a step is run for: the loss, gradients, and what nobody reads (new buffers)."""
    results = {lowered.of_tensor[graph.loss]}
    results |= {lowered.of_tensor[gradient] for _, _, gradient in graph.updates}
    for index, op in enumerate(graph.ops):
        outputs = list(graph.outputs[index])
        unread = [tensor for tensor in outputs if not graph.consumers[tensor]]
        if op.phase != Phase.UPDATE and (
            len(unread) == len(outputs)
            or op.kind.startswith("_native_batch_norm_legit_functional")
        ):
            results.update(lowered.of_tensor[tensor] for tensor in unread)
    return results


def _with_recomputed(
    lowered: Steps, backward: Sequence[int], given: frozenset[int]
) -> Iterator[tuple[int, int]]:
    """(step, op that it is counted for) of the backward pass, with what is computed again."""
    ready = set(given)

    def needed(number: int, op: int) -> Iterator[tuple[int, int]]:
        for read in lowered.steps[number].reads:
            if read.value not in ready:
                yield from needed(lowered.maker[read.value], op)
        ready.update(lowered.steps[number].makes)
        yield number, op

    for number in backward:
        yield from needed(number, lowered.steps[number].op)


@dataclass(frozen=True, slots=True)
class _Expression:
    """A value as a loop reads it: buffers, and the ops that are written into the loop."""

    reads: frozenset[Access]
    num_ops: int = 0
    is_heavy: bool = False
    ops: frozenset[int] = frozenset()

    def in_order(self, order: str) -> "_Expression":
        """The same value, read in another order."""
        if order == SAME:
            return self
        reads = frozenset((buffer, _after(given, order)) for buffer, given in self.reads)
        return _Expression(reads, self.num_ops, self.is_heavy, self.ops)


def _after(given: str, order: str) -> str:
    """Combined order of a buffer that is read in one order through another."""
    if given == SAME:
        return order
    return ROWS if given == order == ROWS else f"{given}>{order}"


@dataclass(slots=True)
class _Writer:
    """Writes the steps of a pass as loops."""

    lowered: Steps
    steps: Sequence[tuple[int, int]]
    outputs: set[int]
    given: frozenset[int]
    on_gpu: bool
    loops: list[Loop] = field(default_factory=list)
    expressions: dict[int, _Expression] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def write(self, phase: Phase) -> Pass:
        """Write all loops that the outputs need."""
        self._drop_unneeded()
        for value in self.given:
            self.expressions[value] = _Expression(frozenset({(self._storage(value), SAME)}))
        for number, op in self.steps:
            self._write(self.lowered.steps[number], op)
        outputs = frozenset(
            buffer for value in self.outputs for buffer, _ in self.expressions[value].reads
        )
        return Pass(phase=phase, loops=tuple(self.loops), outputs=outputs, on_gpu=self.on_gpu)

    def _drop_unneeded(self) -> None:
        """Leave out steps that no output needs, and note the readers of each value."""
        needed = set(self.outputs)
        steps = []
        for number, op in reversed(self.steps):
            step = self.lowered.steps[number]
            if needed.intersection(step.makes):
                steps.append((number, op))
                needed.update(read.value for read in step.reads)
                for value in {read.value for read in step.reads}:
                    self.readers.setdefault(value, []).append(number)
        self.steps = steps[::-1]

    def _storage(self, value: int) -> int:
        """The value that owns the memory of a value, through views that keep the order."""
        maker = self.lowered.maker[value]
        while maker >= 0 and self.lowered.steps[maker].work == Work.VIEW:
            read = self.lowered.steps[maker].reads[0]
            if read.order != SAME:
                break
            value = read.value
            maker = self.lowered.maker[value]
        return value

    def _write(self, step: Step, op: int) -> None:
        if all(value in self.given for value in step.makes):
            return
        whole = self._joined(step, op)
        if step.work == Work.VIEW:
            self.expressions[step.makes[0]] = whole
            return
        if step.work == Work.POINTWISE and not self._needs_buffer(step, whole):
            self.expressions[step.makes[0]] = whole
            return
        self._add_loop(step, op, whole)
        for value in step.makes:
            self.expressions[value] = _Expression(frozenset({(value, SAME)}))

    def _joined(self, step: Step, op: int) -> _Expression:
        """Expression of a step with all that is written into it."""
        inputs = [self.expressions[read.value].in_order(read.order) for read in step.reads]
        own = frozenset() if step.work == Work.VIEW else frozenset({op})
        return _Expression(
            reads=frozenset(access for each in inputs for access in each.reads),
            num_ops=(step.work != Work.VIEW) + sum(each.num_ops for each in inputs),
            is_heavy=step.is_heavy or any(each.is_heavy for each in inputs),
            ops=own.union(*(each.ops for each in inputs)),
        )

    def _needs_buffer(self, step: Step, whole: _Expression) -> bool:
        (value,) = step.makes
        if step.is_random or step.is_part or step.adds_up or self._is_wanted(value):
            return True
        is_reused = len(set(self.readers.get(value, ()))) > 1
        if is_reused and (
            len(whole.reads) > _MOST_REUSED_READS
            or whole.num_ops > _MOST_REUSED_OPS[self.on_gpu]
            or (whole.is_heavy and not self.on_gpu)
        ):
            return True
        return len(whole.reads) > _MOST_READS[self.on_gpu] or whole.num_ops > _MOST_OPS

    def _is_wanted(self, value: int) -> bool:
        """Whether anything but a loop of this pass reads a value, or a view of it."""
        if value in self.outputs:
            return True
        for number in self.readers.get(value, ()):
            step = self.lowered.steps[number]
            if step.work == Work.OWN or (step.adds_up and step.reads[-1].value == value):
                return True
            if step.work == Work.VIEW and self._is_wanted(step.makes[0]):
                return True
        return False

    def _add_loop(self, step: Step, op: int, whole: _Expression) -> None:
        values = self.lowered.values
        kept = prod(values[step.makes[0]].shape)
        iterations = kept * step.reduced
        reads = {}
        for buffer, order in whole.reads:
            item, num_bytes = values[buffer].item_bytes, values[buffer].num_bytes
            is_own = step.work == Work.OWN
            reads[buffer, order] = float(
                num_bytes if is_own else min(num_bytes, iterations * item)
            )
        loop = Loop(
            op=op,
            work=step.work,
            whole=iterations,
            kept=kept,
            order=step.order,
            reads=reads,
            writes={value: float(values[value].num_bytes) for value in step.makes},
            ops=whole.ops,
            adds_up=step.adds_up,
        )
        if step.work == Work.REDUCTION and self.on_gpu:
            last = step.order.rpartition(",")[2]
            along_rows = step.order == ROWS or last.startswith("r")
            parts = num_parts(kept, step.reduced, along_rows=along_rows)
            self.loops.extend(_cut(loop, parts, -1 - len(self.loops)))
        else:
            self.loops.append(loop)


def _cut(loop: Loop, parts: int, buffer: int) -> tuple[Loop, ...]:
    """A reduction as it is, or as two loops: over each part, and over the results of parts."""
    if parts == 1:
        return (loop,)
    (num_bytes,) = loop.writes.values()
    passed = num_bytes * parts
    first = replace(loop, kept=loop.kept * parts, parts=parts, writes={buffer: passed})
    second = replace(
        loop,
        whole=loop.kept * parts,
        order=OF_PARTS,
        reads={(buffer, OF_PARTS): passed},
        ops=frozenset({loop.op}),
    )
    return first, second
