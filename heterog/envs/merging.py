"""Merging a graph's tables: groups to blocks, ops to runs, with their values and gradients.

Consecutive groups are joined into at most ``MAX_BLOCKS`` *blocks*. Ops of one block and phase that
can run consecutively become one op, a *run*. Values read outside their run are kept; values with
the same readers become one value, and gradients that are finished together one gradient. All
values that live only inside a run become one value, which is freed with the run.
"""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from heterog.graph.axis_plan import EVERYTHING
from heterog.graph.grouping import CONSTANT_GROUP, blocks_of
from heterog.graph.op_graph import OpGraph, Phase
from heterog.grouped import grouped
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.sparse_tables import starts_of
from heterog.lowering.tables import KIND_NUMBER, GraphTables, graph_tables

_Slot = tuple[int, int, int]
_Signature = tuple[int, int, int, int, frozenset[tuple[int, int, int]], int]


@dataclass(frozen=True, kw_only=True, eq=False)
class CoarseTables:
    """A graph's tables after merging, and the merged row of each original row.

    Attributes:
        tables: Tables for the kernels.
        block_of: Block of each group.  # [num_groups]
        run_of: Coarse op of each compute op.  # [num_compute_ops]
        parameter_of: Coarse parameter of each parameter.  # [num_parameters]
    """

    tables: GraphTables
    block_of: IntArray
    run_of: IntArray
    parameter_of: IntArray


@lru_cache(maxsize=64)
def merge_tables(graph: OpGraph) -> CoarseTables:
    """Merge a graph's tables; see the module docstring."""
    return _Merger(graph).merge()


class _Merger:
    def __init__(self, graph: OpGraph) -> None:
        fine = graph_tables(graph)
        group = np.where(fine.op_group < 0, fine.num_groups, fine.op_group)
        self.block_of = blocks_of(graph)
        in_block = np.append(self.block_of, CONSTANT_GROUP).astype(np.int32)
        self.fine = fine = fine._replace(
            num_groups=int(self.block_of[-1]) + 1,
            op_group=in_block[group],
            slot_group=self.block_of[fine.slot_group],
            parameter_group=self.block_of[fine.parameter_group],
            read_slot=_inner_reads(fine, in_block[group]),
        )
        self.phase = np.array([int(graph.ops[op].phase) for op in fine.op_id])
        self.coarse_of, self.sequence = self._runs()
        self.num_ops = int(self.coarse_of.max()) + 1
        # Readers of each value outside its own run: (run, group and whole of the slot).
        self.readers: list[set[tuple[int, int, int]]] = [set() for _ in fine.value_op]
        for op in range(len(fine.op_id)):
            for read in range(fine.read_start[op], fine.read_start[op + 1]):
                value, slot = int(fine.read_value[read]), int(fine.read_slot[read])
                run = int(self.coarse_of[op])
                if slot >= 0:
                    where = int(fine.slot_group[slot]), int(fine.slot_whole[slot])
                    self.readers[value].add((run, *where))
                elif run != self.coarse_of[fine.value_op[value]]:
                    self.readers[value].add((run, -2, -1))
        self.parameter_of, members = self._merge_parameters()
        self.leaders = np.array([rows[0] for rows in members], np.int32)
        self.done_in = self._finished_in()[self.leaders]
        self.value_of, self.made_by, self.inner_value = self._merge_values()
        starts = np.searchsorted(self.made_by, np.arange(self.num_ops + 1))
        self.value_start = starts.astype(np.int32)
        self.slots = self._slots()
        self.slot_number = {slot: number for number, slot in enumerate(self.slots)}

    def _runs(self) -> tuple[IntArray, IntArray]:
        """(run of each op, ops in the order of runs).

        A run has one block and one phase, without a conversion between two of its ops. It goes on
        while a ready op belongs to it; otherwise the first ready op in program order begins a new
        run.
        """
        fine = self.fine
        num_ops = len(fine.op_id)
        readers: list[list[int]] = [[] for _ in range(num_ops)]
        waiting = np.zeros(num_ops, np.int32)
        converts: list[set[int]] = [set() for _ in range(num_ops)]
        for op in range(num_ops):
            reads = slice(fine.read_start[op], fine.read_start[op + 1])
            makers = fine.value_op[fine.read_value[reads]]
            converts[op] = set(makers[fine.read_slot[reads] >= 0].tolist())
            for maker in set(makers.tolist()):
                readers[maker].append(op)
                waiting[op] += 1
        kind_of = (2 * fine.op_group.astype(np.int64) + self.phase).tolist()
        ready: dict[int, list[int]] = {}
        for op in np.flatnonzero(waiting == 0).tolist():
            heappush(ready.setdefault(kind_of[op], []), op)
        coarse_of = np.zeros(num_ops, np.int32)
        sequence: list[int] = []
        run, members, kind = -1, set[int](), kind_of[0]
        while len(sequence) < num_ops:
            mine = ready.get(kind)
            if run < 0 or not mine or converts[mine[0]] & members:
                # Program order: the ready op with the least number.
                kind = min((heap[0], key) for key, heap in ready.items() if heap)[1]
                run, members = run + 1, set()
            op = heappop(ready[kind])
            coarse_of[op] = run
            members.add(op)
            sequence.append(op)
            for reader in readers[op]:
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    heappush(ready.setdefault(kind_of[reader], []), reader)
        return coarse_of, np.array(sequence, np.int32)

    def merge(self) -> CoarseTables:
        tables = self.fine._replace(
            **self._op_rows(), **self._value_rows(), **self._slot_rows(), **self._parameter_rows()
        )
        return CoarseTables(
            tables=tables,
            block_of=self.block_of,
            run_of=self.coarse_of,
            parameter_of=self.parameter_of,
        )

    def _op_rows(self) -> dict[str, Any]:
        fine, num_ops = self.fine, self.num_ops
        reads: list[dict[tuple[int, int], None]] = [{} for _ in range(num_ops)]
        for value in np.flatnonzero(self.value_of >= 0):
            for run, group, needs_whole in sorted(self.readers[value]):
                slot = (int(self.value_of[value]), group, needs_whole)
                reads[run].setdefault((slot[0], self.slot_number.get(slot, -1)))
        parameter_reads: list[dict[int, None]] = [{} for _ in range(num_ops)]
        for op in range(len(fine.op_id)):
            rows = fine.parameter_read[
                fine.parameter_read_start[op] : fine.parameter_read_start[op + 1]
            ]
            for row in rows:
                parameter_reads[self.coarse_of[op]].setdefault(int(self.parameter_of[row]))
        finished: list[list[int]] = [[] for _ in range(num_ops)]
        for parameter, run in enumerate(self.done_in):
            finished[run].append(parameter)
        first_op = np.unique(self.coarse_of, return_index=True)[1]
        return {
            "op_id": fine.op_id[first_op],
            "op_group": fine.op_group[first_op],
            "op_axis": fine.op_axis[first_op],
            "op_recut": np.zeros(num_ops, np.int32),
            "value_start": self.value_start,
            "read_start": starts_of([len(entries) for entries in reads]),
            "read_value": _ints([value for entries in reads for value, _ in entries]),
            "read_slot": _ints([slot for entries in reads for _, slot in entries]),
            "parameter_read_start": starts_of([len(entries) for entries in parameter_reads]),
            "parameter_read": _ints([row for entries in parameter_reads for row in entries]),
            "finished_start": starts_of([len(entries) for entries in finished]),
            "finished_parameter": _ints([row for entries in finished for row in entries]),
            "op_is_backward": (self.phase[first_op] == int(Phase.BACKWARD)).astype(np.int32),
            # Merged ops make both kinds of gradients.
            "op_is_weights": np.zeros(num_ops, np.int32),
            # Rows of candidates never recompute, so no op is listed for recomputation.
            "op_recomputes": np.zeros(num_ops, np.int32),
            "recompute_start": np.zeros(fine.num_groups + 1, np.int32),
            "recompute_op": np.empty(0, np.int32),
            "partly_start": np.zeros(2 * num_ops + 1, np.int32),
            "partly_op": np.empty(0, np.int32),
        }

    def _value_rows(self) -> dict[str, Any]:
        fine, value_of, inner = self.fine, self.value_of, self.inner_value
        kept = np.flatnonzero(value_of >= 0)
        num_values = len(self.made_by)
        sizes = sums(value_of[kept], fine.value_bytes[kept], num_values)
        per_sample = sums(value_of[kept], fine.value_bytes_per_unit[kept], num_values)
        whole = fine.value_bytes[kept] + fine.batch_size * fine.value_bytes_per_unit[kept]
        # Moved fraction of a merged value: the mean over its values, weighted by bytes.
        moved = sums(
            value_of[kept], fine.value_moved_fraction[kept] * whole, num_values
        ) / np.maximum(sums(value_of[kept], whole, num_values), 1.0)
        sizes[inner], per_sample[inner] = self._inner_bytes(value_of >= 0)
        first = np.empty(num_values, np.int32)
        first[inner] = 0
        # The first of the merged values represents all; reversed order writes its number last.
        first[value_of[kept[::-1]]] = kept[::-1]
        kinds = fine.value_kind[first]
        outermost = fine.value_is_outermost[first]
        early = fine.value_is_early[first]
        kinds[inner], outermost[inner], early[inner] = KIND_NUMBER["S"], 1, 0
        return {
            "value_op": self.made_by,
            "value_tensor": fine.value_tensor[first],
            "value_axis": np.zeros(num_values, np.int32),
            "value_kind": kinds,
            "value_bytes": sizes,
            "value_bytes_per_unit": per_sample,
            "value_moved_fraction": np.where(moved > 0.0, moved, 1.0),
            "value_is_outermost": outermost,
            "value_batch_kind": kinds,
            "value_batch_is_outermost": outermost,
            "value_is_early": early,
        }

    def _slots(self) -> list[_Slot]:
        """(coarse value, reading group, whether it needs the whole value), in order."""
        fine, value_of = self.fine, self.value_of
        slots = {
            (int(value_of[value]), group, needs_whole)
            for value in np.flatnonzero(value_of >= 0)
            for _, group, needs_whole in self.readers[value]
            if needs_whole >= 0
        }
        # A gradient made in parts needs a slot that makes it whole, even if no op reads it.
        slots |= {
            (int(value_of[fine.slot_value[slot]]), int(fine.slot_group[slot]), 1)
            for slot in fine.gradient_slot
            if slot >= 0
        }
        return sorted(slots)

    def _slot_rows(self) -> dict[str, Any]:
        values = [value for value, _, _ in self.slots]
        starts = np.searchsorted(values, np.arange(len(self.made_by) + 1))
        return {
            "value_slot_start": starts.astype(np.int32),
            "slot_value": _ints(values),
            "slot_group": _ints([group for _, group, _ in self.slots]),
            "slot_whole": _ints([needs_whole for _, _, needs_whole in self.slots]),
            "slot_axis": np.zeros(len(self.slots), np.int32),
            "slot_pass": np.zeros(len(self.slots), np.int32),
            "slot_window": np.zeros((len(self.slots), 4), np.int32),
            # Merged values are sent, never remade by the reader.
            "remake_start": np.zeros(len(self.slots) + 1, np.int32),
            "remake_op": np.empty(0, np.int32),
            "slot_remade_from": np.zeros(len(self.slots)),
        }

    def _parameter_rows(self) -> dict[str, Any]:
        """Columns of coarse parameters; the first member of each stands for all its members."""
        fine, leaders = self.fine, self.leaders
        groups = fine.parameter_group[leaders]
        gradient = self.value_of[fine.parameter_gradient[leaders]].astype(np.int32)
        made_in = self.coarse_of[fine.value_op[fine.parameter_gradient[leaders]]]
        last = np.where(self.done_in > made_in, self.value_start[self.done_in], -1)
        slots = [
            self.slot_number.get((value, group, EVERYTHING), -1) if slot >= 0 else -1
            for value, group, slot in zip(
                gradient.tolist(), groups.tolist(), fine.gradient_slot[leaders], strict=True
            )
        ]
        return {
            "parameter_group": groups,
            "parameter_bytes": sums(self.parameter_of, fine.parameter_bytes, len(leaders)),
            "gradient_bytes": sums(self.parameter_of, fine.gradient_bytes, len(leaders)),
            "parameter_dtype": fine.parameter_dtype[leaders],
            "num_dtypes": fine.num_dtypes,
            "parameter_gradient": gradient,
            "parameter_last_value": last.astype(np.int32),
            "gradient_domain": fine.gradient_domain[leaders],
            # Rows of candidates split only the batch: no op has a rule of its own.
            "reader_start": np.zeros(len(leaders) + 1, np.int32),
            "reader_value": np.empty(0, np.int32),
            "gradient_slot": _ints(slots),
            "parameter_axis": fine.parameter_axis[leaders],
            "parameter_units": fine.parameter_units[leaders],
            "parameter_tensor": fine.parameter_tensor[leaders],
        }

    def _finished_in(self) -> IntArray:
        """Last of the runs that make each parameter's gradient or read the parameter."""
        fine = self.fine
        done = self.coarse_of[fine.value_op[fine.parameter_gradient]]
        reader = np.repeat(self.coarse_of, np.diff(fine.parameter_read_start))
        np.maximum.at(done, fine.parameter_read, reader)
        return done

    def _merge_parameters(self) -> tuple[IntArray, list[list[int]]]:
        """Coarse parameter of each parameter, and the members of each coarse parameter."""
        fine = self.fine
        done = self._finished_in()
        made = self.coarse_of[fine.value_op[fine.parameter_gradient]]
        alike = np.stack([fine.parameter_group, made, done, fine.gradient_domain], axis=1)
        members = [
            *grouped(zip(map(tuple, alike.tolist()), range(len(done)), strict=True)).values()
        ]
        parameter_of = np.empty(len(done), np.int32)
        for number, rows in enumerate(members):
            parameter_of[rows] = number
        return parameter_of, members

    def _merge_values(self) -> tuple[IntArray, IntArray, IntArray]:
        """(coarse value of each value or -1 for inner ones, maker of each, inner ones by run)."""
        fine = self.fine
        gradient_of = np.full(len(fine.value_op), -1, np.int32)
        gradient_of[fine.parameter_gradient] = self.parameter_of
        keys: list[_Signature | None] = [
            (
                int(self.coarse_of[op]),
                int(fine.value_kind[value]),
                int(fine.value_is_outermost[value]),
                int(fine.value_is_early[value]),
                frozenset(self.readers[value]),
                int(gradient_of[value]),
            )
            if self.readers[value] or gradient_of[value] >= 0
            else None
            for value, op in enumerate(fine.value_op)
        ]
        distinct = dict.fromkeys(key for key in keys if key is not None)
        order = {key: number for number, key in enumerate(distinct)}
        # Each run's inner value comes after its other values, so values are sorted by run.
        made_by = np.append([found[0] for found in order], np.arange(self.num_ops)).astype(
            np.int32
        )
        place = np.empty(len(made_by), np.int32)
        place[np.argsort(made_by, kind="stable")] = np.arange(len(made_by))
        value_of = np.array(
            [-1 if kept is None else place[order[kept]] for kept in keys], np.int32
        )
        return value_of, np.sort(made_by), place[len(order) :]

    def _inner_bytes(self, is_kept: npt.NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
        """Peak bytes inside each run beyond its outputs: (fixed, per sample)."""
        fine = self.fine
        split_bytes = fine.batch_size * fine.value_bytes_per_unit
        whole = fine.value_bytes + split_bytes
        position = np.argsort(self.sequence)  # of each op in the order of runs
        last_reader = np.repeat(position, np.diff(fine.value_start))
        np.maximum.at(last_reader, fine.read_value, np.repeat(position, np.diff(fine.read_start)))
        dying: list[list[int]] = [[] for _ in fine.op_id]
        for passing in np.flatnonzero(~is_kept).tolist():
            dying[self.sequence[last_reader[passing]]].append(passing)
        left = sums(self.coarse_of[fine.value_op], np.where(is_kept, whole, 0.0), self.num_ops)
        excess = np.zeros(self.num_ops)
        split = np.zeros(self.num_ops)
        live = inner = inner_split = 0.0
        before = -1
        for op in self.sequence.tolist():
            run = int(self.coarse_of[op])
            if run != before:
                live = inner = inner_split = 0.0
                before = run
            for value in range(fine.value_start[op], fine.value_start[op + 1]):
                live += float(whole[value])
                if not is_kept[value]:
                    inner += float(whole[value])
                    inner_split += float(split_bytes[value])
            if live - left[run] > excess[run]:
                excess[run] = live - left[run]
                split[run] = inner_split / inner if inner > 0.0 else 0.0
            for value in dying[op]:
                live -= float(whole[value])
                inner -= float(whole[value])
                inner_split -= float(split_bytes[value])
        return excess * (1.0 - split), excess * split / fine.batch_size


def _inner_reads(fine: GraphTables, block: IntArray) -> IntArray:
    """Slot of each read, -1 if maker and reader are in one block and a part suffices."""
    reader = np.repeat(block, np.diff(fine.read_start))
    maker = block[fine.value_op[fine.read_value]]
    # Reads without a slot (-1) index the appended entry, also if there are no slots.
    is_part = np.append(fine.slot_whole, -1)[fine.read_slot] == 0
    return np.where(is_part & (reader == maker), -1, fine.read_slot).astype(np.int32)


def sums(where: npt.NDArray[np.integer], what: FloatArray, count: int) -> FloatArray:
    """Sums of ``what`` by index ``where``.  # [count]"""
    return np.asarray(np.bincount(where, what, count), np.float64)


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)
