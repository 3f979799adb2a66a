"""Effect of fusing on each op of a graph: launches, and bytes to and from memory.

The loops of a pass are put together into kernels as inductor's scheduler does it.

Two kernels may become one if one reads what the other makes, in the order in which it is made, or
if both read the same buffer in the same order; if they loop over equally many elements; and if
nothing in between has to run after one and before the other. A reduction takes in pointwise loops
over what it reads and over what it makes; what reads a sum over rows at each element of its row
may follow in the same kernel. Pairs of one kind that share most bytes come first
(``Scheduler.fuse_nodes``, ``score_fusion`` and ``SIMDScheduling.can_fuse`` in ``torch/_inductor``
of torch 2.13).

On a GPU loops change their order to fit a sum over columns, and large sums over rows and over
columns of one tensor are joined (``MixOrderReduction``). On a CPU neither is so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.pricing.device_models.fusion.loops import steps_of
from heterog.pricing.device_models.fusion.passes import OF_PARTS, Access, Loop, Pass, passes_of
from heterog.pricing.device_models.fusion.steps import ROWS, SAME, Work

_LEAST_SHARED_BYTES = 10.0
_FURTHEST_APART = 64
_MOST_LOOPS = 64
_ROUNDS = 10
_LEAST_MIXED, _LEAST_MIXED_ROWS, _LONGEST_MIXED_ROW = 5 * 2**20, 4096, 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Loops that run as one kernel.

    Attributes:
        phase: Phase of the loops, forward or backward.
        loops: Loops in program order.
        reads: Bytes of each buffer that it reads from memory; what it makes itself is not there.
        writes: Bytes of each buffer that something outside reads.
    """

    phase: Phase
    loops: tuple[Loop, ...]
    reads: Mapping[int, float]
    writes: Mapping[int, float]

    @property
    def is_own(self) -> bool:
        """Whether it is a kernel of a library: a product, attention, a sort."""
        return self.loops[0].work == Work.OWN

    @property
    def num_bytes(self) -> float:
        """Bytes that the kernel moves."""
        return sum(self.reads.values()) + sum(self.writes.values())


def kernels_of(compiled: Pass) -> tuple[Kernel, ...]:
    """The kernels of a pass, in the order of their first loops."""
    return _Scheduler(compiled).run()


@dataclass(slots=True)
class _Group:
    """Loops that are one kernel so far."""

    members: list[int]
    reads: dict[Access, float]
    writes: dict[int, float]
    whole: int
    reduction: Loop | None
    """Its first reduction; the others go through the same elements alike."""
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)


class _Scheduler:
    """Merges groups of loops until none can be merged."""

    def __init__(self, compiled: Pass) -> None:
        self.compiled = compiled
        self.loops = compiled.loops
        self.writer = {
            buffer: number for number, loop in enumerate(self.loops) for buffer in loop.writes
        }
        self.group_of = list(range(len(self.loops)))
        self.groups = {number: _group(number, loop) for number, loop in enumerate(self.loops)}
        for number, loop in enumerate(self.loops):
            for buffer, _ in loop.reads:
                maker = self.writer.get(buffer)
                if maker is not None and maker != number:
                    self.groups[number].before.add(maker)
                    self.groups[maker].after.add(number)

    def run(self) -> tuple[Kernel, ...]:
        """Merge groups, and return a kernel for each."""
        for _ in range(_ROUNDS):
            if not self._merge_once():
                break
        readers: dict[int, set[int]] = {}
        for number, loop in enumerate(self.loops):
            for buffer, _ in loop.reads:
                readers.setdefault(buffer, set()).add(self.group_of[number])
        ordered = sorted(self.groups.items(), key=lambda item: item[1].members[0])
        return tuple(self._kernel(number, group, readers) for number, group in ordered)

    def _merge_once(self) -> bool:
        """Make one round over all pairs; returns whether any were merged."""
        scored = []
        for one, other in self._pairs():
            score = self._score(one, other)
            if score is not None:
                scored.append((score, one, other))
        scored.sort(key=lambda entry: entry[0], reverse=True)
        is_changed = False
        for _, one, other in scored:
            first, second = self.group_of[one], self.group_of[other]
            if first != second and self._score(first, second) is not None:
                self._merge(first, second)
                is_changed = True
        return is_changed

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Pairs of groups that share a buffer, each once, in program order."""
        users: dict[int, dict[int, None]] = {}
        for number, loop in enumerate(self.loops):
            if loop.work == Work.OWN:
                continue
            group = self.group_of[number]
            for buffer in (*loop.writes, *(buffer for buffer, _ in loop.reads)):
                users.setdefault(buffer, {}).setdefault(group)
        seen: set[tuple[int, int]] = set()
        for buffer, found in users.items():
            maker = self.writer.get(buffer)
            made_in = None if maker is None else self.group_of[maker]
            ordered = sorted(found, key=lambda group: self.groups[group].members[0])
            for place, one in enumerate(ordered):
                near = ordered[place + 1 : place + 1 + _FURTHEST_APART]
                for other in ordered[place + 1 :] if one == made_in else near:
                    if (one, other) not in seen:
                        seen.add((one, other))
                        yield one, other

    def _score(self, one: int, other: int) -> tuple[bool, float, int] | None:
        """Rank of a merge of two groups, (of one kind, bytes, nearness), if allowed."""
        first, second = self.groups[one], self.groups[other]
        if len(first.members) + len(second.members) > _MOST_LOOPS:
            return None
        is_mixed = self.compiled.on_gpu and _are_mixed(first, second)
        if not is_mixed and not _loops_fit(first, second):
            return None
        if self._leads_to(other, one):
            one, other, first, second = other, one, second, first
        is_vertical = other in first.after
        if self._leads_around(one, other) or (is_vertical and is_mixed):
            return None
        if is_vertical and not self._reads_as_made(first, second):
            return None
        shared = _shared_bytes(first, second)
        apart = _distance(first, second)
        if shared <= 0.0 or (
            not is_vertical and (shared < _LEAST_SHARED_BYTES or apart > _FURTHEST_APART)
        ):
            return None
        is_alike = (first.reduction is None) == (second.reduction is None)
        return is_alike, shared, -apart

    def _leads_to(self, one: int, other: int) -> bool:
        """Whether a group has to run before another."""
        return other in self.groups[one].after or self._leads_around(one, other)

    def _leads_around(self, one: int, other: int) -> bool:
        """Whether a path from one group to another, or back, passes a third."""
        return self._is_way(one, other) or self._is_way(other, one)

    def _is_way(self, begin: int, end: int) -> bool:
        last = self.groups[end].members[-1]
        stack = [group for group in self.groups[begin].after if group != end]
        seen = set(stack)
        while stack:
            for group in self.groups[stack.pop()].after:
                if group == end:
                    return True
                if group not in seen and self.groups[group].members[0] < last:
                    seen.add(group)
                    stack.append(group)
        return False

    def _reads_as_made(self, first: _Group, second: _Group) -> bool:
        """Whether each read of what the first group makes is of the element just made."""
        for number in second.members:
            reader = self.loops[number]
            for buffer, order in reader.reads:
                if buffer in first.writes and not _is_at_hand(
                    self.loops[self.writer[buffer]], reader, order, on_gpu=self.compiled.on_gpu
                ):
                    return False
        return True

    def _merge(self, one: int, other: int) -> None:
        first, second = self.groups[one], self.groups.pop(other)
        first.members = sorted(first.members + second.members)
        first.reads.update(second.reads)
        first.writes.update(second.writes)
        first.whole = max(first.whole, second.whole)
        if first.reduction is None or (
            second.reduction is not None and first.reduction.order != ROWS
        ):
            first.reduction = second.reduction or first.reduction
        first.before = (first.before | second.before) - {one, other}
        first.after = (first.after | second.after) - {one, other}
        for number in second.members:
            self.group_of[number] = one
        for group in second.before - {one}:
            self.groups[group].after.discard(other)
            self.groups[group].after.add(one)
        for group in second.after - {one}:
            self.groups[group].before.discard(other)
            self.groups[group].before.add(one)

    def _kernel(self, number: int, group: _Group, readers: Mapping[int, set[int]]) -> Kernel:
        reads: dict[int, float] = {}
        for (buffer, _), num_bytes in group.reads.items():
            if buffer not in group.writes:
                reads[buffer] = max(reads.get(buffer, 0.0), num_bytes)
        writes = {
            buffer: num_bytes
            for buffer, num_bytes in group.writes.items()
            if buffer in self.compiled.outputs or readers.get(buffer, set()) - {number}
        }
        return Kernel(
            phase=self.compiled.phase,
            loops=tuple(self.loops[member] for member in group.members),
            reads=reads,
            writes=writes,
        )


def _group(number: int, loop: Loop) -> _Group:
    return _Group(
        members=[number],
        reads=dict(loop.reads),
        writes=dict(loop.writes),
        whole=loop.whole,
        reduction=loop if loop.work == Work.REDUCTION else None,
    )


def _loops_fit(one: _Group, other: _Group) -> bool:
    """Whether two groups loop over equally many elements."""
    if one.reduction is None:
        if other.reduction is None:
            return one.whole == other.whole
        return one.whole in (other.reduction.whole, other.reduction.kept)
    if other.reduction is None:
        return other.whole in (one.reduction.whole, one.reduction.kept)
    return (one.reduction.whole, one.reduction.kept, one.reduction.order) == (
        other.reduction.whole, other.reduction.kept, other.reduction.order
    )  # fmt: skip


def _are_mixed(one: _Group, other: _Group) -> bool:
    """Whether two groups are large sums, over rows and over columns of the same elements."""
    if one.reduction is None or other.reduction is None:
        return False
    rows, columns = one.reduction, other.reduction
    if rows.order != ROWS:
        rows, columns = columns, rows
    is_rows = rows.order == ROWS and rows.parts == 1 and columns.order.count(",") == 1
    num_rows, num_columns = rows.kept, rows.reduced
    if not is_rows or columns.order != f"r{num_rows},{num_columns}":
        return False
    return (
        num_rows * num_columns >= _LEAST_MIXED
        and num_rows >= max(2 * num_columns, _LEAST_MIXED_ROWS)
        and num_columns <= _LONGEST_MIXED_ROW
    )


def _is_at_hand(maker: Loop, reader: Loop, order: str, *, on_gpu: bool) -> bool:
    """Whether a loop has what another reads at hand when both run as one."""
    if maker.adds_up or maker.parts > 1 or reader.parts > 1:
        return False
    is_whole = not on_gpu and maker.work == Work.REDUCTION and maker.kept == 1
    if is_whole:  # a C++ loop has no outer loop left that both would share
        return reader.work == Work.REDUCTION
    if order == SAME:
        is_regular = on_gpu or reader.work != Work.REDUCTION or reader.order == ROWS
        return reader.whole == maker.kept and is_regular
    is_sum = maker.work == Work.REDUCTION and reader.whole == maker.whole
    if order == ROWS:
        is_row_wise = reader.work == Work.REDUCTION and reader.order == ROWS
        return (is_sum and maker.order == ROWS) or (
            is_row_wise and maker.work == Work.POINTWISE and reader.kept == maker.whole
        )
    return on_gpu and is_sum and maker.order not in (ROWS, OF_PARTS)


def _shared_bytes(one: _Group, other: _Group) -> float:
    """Bytes that two groups read in the same order, or that one makes and the other reads."""
    read_alike = sum(num_bytes for access, num_bytes in one.reads.items() if access in other.reads)
    passed = sum(n for (buffer, _), n in other.reads.items() if buffer in one.writes)
    return (
        read_alike
        + passed
        + sum(n for (buffer, _), n in one.reads.items() if buffer in other.writes)
    )


def _distance(one: _Group, other: _Group) -> int:
    return max(abs(one.members[0] - other.members[-1]), abs(other.members[0] - one.members[-1]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused:
    """The kernels of one training step where a compiler fuses its ops.

    A kernel's bytes are those of what it reads from outside, once, and of what it makes that
    something outside reads. They are shared out over its ops: each loop pays for what it reads
    first and for what it makes, the last one for the launch.

    Attributes:
        kernels: Kernels of the forward and the backward pass, those of libraries among them.
        is_fused: Whether a compiler makes all kernels of an op; the rest are kernels of their own,
            views and updates.  # [num_ops]
        launches: Number of kernels that end with each op.  # [num_ops]
        num_bytes: Bytes that each op moves.  # [num_ops]
    """

    kernels: tuple[Kernel, ...]
    is_fused: NDArray[np.bool_]
    launches: FloatArray
    num_bytes: FloatArray

    def count(self, phase: Phase) -> int:
        """Number of kernels of a pass that the compiler writes."""
        return sum(each.phase == phase and not each.is_own for each in self.kernels)


@lru_cache(maxsize=16)
def fused_kernels(graph: OpGraph, *, on_gpu: bool = True) -> Fused:
    """The kernels of a graph's forward and backward pass.

    Args:
        graph: One training step.
        on_gpu: Whether the compiler's rules for GPUs hold, else those for CPUs.
    """
    lowered = steps_of(graph, on_gpu=on_gpu)
    compiled = passes_of(graph, lowered, on_gpu=on_gpu)
    kernels = tuple(kernel for each in compiled for kernel in kernels_of(each))
    is_fused = np.array([op.phase != Phase.UPDATE for op in graph.ops], np.bool_)
    is_fused &= ~graph.is_view
    is_fused[[step.op for step in lowered.steps if step.work == Work.OWN]] = False
    launches, num_bytes = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    for kernel in kernels:
        if not kernel.is_own:
            launches[kernel.loops[-1].op] += 1.0
            _share_out(kernel, num_bytes)
    return Fused(kernels=kernels, is_fused=is_fused, launches=launches, num_bytes=num_bytes)


def _share_out(kernel: Kernel, num_bytes: FloatArray) -> None:
    """Share a kernel's bytes out to its ops."""
    paid: set[int] = set()
    for loop in kernel.loops:
        for buffer, _ in loop.reads:
            if buffer in kernel.reads and buffer not in paid:
                paid.add(buffer)
                num_bytes[loop.op] += kernel.reads[buffer]
        num_bytes[loop.op] += sum(kernel.writes.get(buffer, 0.0) for buffer in loop.writes)
