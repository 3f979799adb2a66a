"""Sending rows to neighbours whose ops read them."""

from typing import NamedTuple

from torch import Tensor

from heterog.graph.placement import S, Window
from heterog.graph.sharding_rules import local_shape
from heterog.graph.sparse_pattern import Rows, SparsePattern
from heterog.lowering.sparse_tables import matrix_of
from heterog.runtime.step.collectives import Communicator
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.spans import (
    RowSet,
    Span,
    common,
    count,
    cut_span,
    first,
    join,
    join_in_order,
    overlap,
    rows_of_neighbours,
    take,
    unit_rows,
)
from heterog.runtime.step.values import Held, Values, rows_held


class _Slot(NamedTuple):
    """Rows that a slot brings, along one dimension of a tensor."""

    tensor: int
    dim: int
    window: Window
    size: int
    pattern: SparsePattern | None = None


class Halos:
    """Runs the tasks that bring rows to the devices whose ops read them.

    Args:
        part: The program as this rank sees it.
        values: Values of the current step.
        communicator: Communication with the other ranks.
    """

    def __init__(self, part: RankProgram, values: Values, communicator: Communicator) -> None:
        self._part = part
        self._values = values
        self._communicator = communicator
        self._patterns: dict[int, SparsePattern] = {}

    def _slot(self, slot: int) -> _Slot:
        tables = self._part.tables
        step, before, after, size = map(int, tables.slot_window[slot])
        tensor = int(tables.value_tensor[tables.slot_value[slot]])
        dim = self._part.plan.placements[tensor].dim
        return _Slot(tensor, dim, Window(step, before, after), size, self._pattern(step))

    def _pattern(self, step: int) -> SparsePattern | None:
        """The sparse matrix that selects the rows; ``None`` for a window."""
        if step >= 0:
            return None
        if step not in self._patterns:
            self._patterns[step] = matrix_of(self._part.tables.sparse, -1 - step)
        return self._patterns[step]

    def _wanted(self, slot: int, micro: int, device: int) -> tuple[Span, RowSet]:
        """Samples and rows that a slot brings to a device."""
        along, _ = self._part.target_of_slot(slot)
        said = self._slot(slot)
        begin, count = along.units_of(device)
        if said.pattern is not None:
            rows = rows_of_neighbours(said.pattern, (begin, count), along.units)
            return along.team_samples(micro, device), rows
        return along.team_samples(micro, device), said.window.rows(begin, begin + count, said.size)

    def _owned(self, slot: int, micro: int, device: int) -> tuple[Span, Rows]:
        """Samples and rows that a device has made."""
        part = self._part
        maker = part.spans_of_value(int(part.tables.slot_value[slot]))
        rows = unit_rows(maker.units_of(device), self._slot(slot).size, maker.units)
        return maker.team_samples(micro, device), rows

    def send(self, task: int, slot: int, micro: int) -> None:
        """Send the rows that a device lacks, or receive them there."""
        part, said = self._part, self._slot(slot)
        src, dst = part.channel(task).devices
        samples, wanted = self._wanted(slot, micro, dst)
        owned_samples, owned = self._owned(slot, micro, src)
        samples, rows = overlap(owned_samples, samples), common(owned, wanted)
        if part.rank == src:
            held = self._values.held[part.reads(task)[0]]
            self._communicator.send(self._piece(said, held, samples, rows), dst, task)
            return
        place, batch = part.plan.batch_placement(said.tensor), part.graph.batch_size
        shape = list(local_shape(part.graph.tensors[said.tensor].shape, place, samples[1], batch))
        shape[said.dim] = count(rows)
        (made,) = part.made(task)
        like = self._values.zeros(said.tensor, tuple(shape))
        received = self._communicator.receive(like, src, task)
        self._values.held[made] = Held(received, samples, rows=rows)

    def _piece(self, said: _Slot, held: Held, samples: Span, rows: RowSet) -> Tensor:
        """Cut samples and rows out of a held value."""
        place, value = self._part.plan.batch_placement(said.tensor), held.tensor()
        value = cut_span(value, place, held.samples, samples)
        units = self._part.plan.axes[int(self._part.plan.tensor_axis[said.tensor])]
        return take(value, said.dim, rows_held(held, said.size, units), rows)

    def join(self, task: int, slot: int, micro: int) -> None:
        """Join the rows that this rank has received with its own."""
        part, said = self._part, self._slot(slot)
        samples, wanted = self._wanted(slot, micro, part.rank)
        units = part.plan.axes[int(part.plan.tensor_axis[said.tensor])]
        pieces: dict[Span, list[tuple[int, Tensor]]] = {}
        for buffer in part.reads(task):
            held = self._values.held[buffer]
            rows = common(rows_held(held, said.size, units), wanted)
            both = overlap(held.samples, samples)
            pieces.setdefault(both, []).append((first(rows), self._piece(said, held, both, rows)))
        across = [join_in_order(each, S(said.dim)) for _, each in sorted(pieces.items())]
        (made,) = part.made(task)
        whole = join(across, part.plan.batch_placement(said.tensor))
        self._values.held[made] = Held(whole, samples, rows=wanted)
