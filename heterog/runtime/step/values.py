"""The values that a rank holds during a step, and how an op's inputs are read from them."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, EVERYTHING
from heterog.graph.op_graph import TensorKind
from heterog.graph.sharding_rules import local_shape
from heterog.graph.sparse_pattern import Rows
from heterog.lowering.program import OP_KINDS, RECUT_KINDS, SLOT_KINDS, TaskKind
from heterog.runtime.step.collectives import Pending
from heterog.runtime.step.local_op import Share
from heterog.runtime.step.rank_program import WINDOW, Near, Need, gathered, nearest
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recipes import Begin, Like, Recipe, Step, followed, shortened
from heterog.runtime.step.spans import (
    EVERY,
    RowSet,
    Span,
    Spans,
    count,
    cut,
    cut_span,
    nested,
    put,
    rows_of_neighbours,
    take,
    unit_rows,
    window_rows,
)
from heterog.runtime.step.windows import fit

_ENCODE = TaskKind.ENCODE
_READS_VALUES = SLOT_KINDS | OP_KINDS | RECUT_KINDS


@dataclass(slots=True)
class HeldValue:
    """Contents of a buffer: a tensor, perhaps still under way, and the part of the value in it.

    Attributes:
        value: The tensor.
        samples: Samples of the micro-batch, if the value is split along the batch.
        units: Units of the axis of the rule that made it, if the value is split along that axis.
        rows: Rows that it holds, if its reader needs more than the rows of its own units.
    """

    value: Tensor | Pending
    samples: Span = EVERY
    units: Span = EVERY
    rows: RowSet | None = None

    def tensor(self) -> Tensor:
        """The tensor, after a wait if it is under way."""
        return self.value.wait() if isinstance(self.value, Pending) else self.value


class Reader(NamedTuple):
    """The reader of a tensor in a micro-batch, and the samples and units that it works on.

    A reader without spans is a constant: it reads and makes whole tensors.
    """

    spans: Spans | None
    micro: int = 0
    samples: Span = (0, 0)  # of the micro-batch
    first_sample: int = 0  # of the micro-batch in the batch
    all_samples: Span = (0, 0)  # of the batch
    units: Span = (0, 1)
    all_units: int = 1
    share: Share | None = None  # for ops; ``None`` if it is the whole


class Values:
    """The values of a step on this rank.

    Args:
        rank: What the rank runs the program with.
        tasks: This rank's tasks in a step, in order; a value is dropped after its last reader.
        read_parameter: Returns a parameter by tensor id, with all pending updates done.

    Attributes:
        held: Contents of each buffer.
        batch: The batch of the step, by tensor id.
        device: Device on which this rank computes.
    """

    def __init__(
        self,
        rank: RankState,
        tasks: Iterable[int],
        read_parameter: Callable[[int], Tensor],
    ) -> None:
        part = self._part = rank.part
        self._sources, self._needs = part.sources, part.needs
        self._ops = rank.ops
        self._parameters = rank.parameters
        self._read_parameter = read_parameter
        self._buffers = rank.buffers
        self.device = rank.device
        self._last_reader: dict[int, int] = {}  # of each buffer that is ever read
        self._value_readers: dict[int, list[int]] = {}  # tasks that read it from ``held``
        self._position: dict[int, int] = {}
        kinds = part.kinds
        for position, task in enumerate(tasks):
            self._position[task] = position
            kind = kinds[task]
            reads_values = kind in _READS_VALUES or (
                kind is _ENCODE and part.program.encodes_value(task)
            )
            for buffer in part.reads(task):
                self._last_reader[buffer] = task
                if reads_values:
                    self._value_readers.setdefault(buffer, []).append(task)
        # Places of parameters in their buckets.
        self._span = {
            part.graph.updates[row][1]: slice(begin, begin + size)
            for bucket in part.sliced.values()
            for (row, begin), size in zip(bucket.begins().items(), bucket.sizes, strict=True)
        }
        self.held: dict[int, HeldValue] = {}
        self.batch: Mapping[int, Tensor] = {}
        self._from_batch: dict[int, Tensor] = {}
        self._readers: dict[tuple[Spans | None, int], Reader] = {}

    def begin(self, batch: Mapping[int, Tensor]) -> None:
        """Start a step with the global batch, by tensor id."""
        self.held = {}
        self.batch = batch
        self._from_batch = {}

    def let_go(self) -> None:
        """Drop the batch at the end of a step, and tensors that follow from it."""
        self.batch, self._from_batch = {}, {}

    def reader(self, spans: Spans | None, micro: int) -> Reader:
        """This rank, as it reads for an op with these spans; looked up once."""
        reader = self._readers.get((spans, micro))
        if reader is None:
            reader = self._readers[spans, micro] = self._make_reader(spans, micro)
        return reader

    def _make_reader(self, spans: Spans | None, micro: int) -> Reader:
        part, rank = self._part, self._part.rank
        if spans is None:
            return Reader(None, micro, all_samples=(0, part.graph.batch_size))
        is_ruled = spans.axis != BATCH_AXIS
        samples = spans.samples(micro, rank)
        units = spans.range(micro, rank) if is_ruled else (0, 1)
        is_first = spans.is_in_first_team(micro, rank) if is_ruled else spans.first(micro) == rank
        return Reader(
            spans=spans,
            micro=micro,
            samples=samples,
            first_sample=part.micro_begin[micro],
            all_samples=(0, part.graph.batch_size),
            units=units,
            all_units=spans.units if is_ruled else 1,
            share=Share(
                samples=samples[1],
                units=units[1],
                first_unit=units[0],
                # The first micro-batch only, because a sum runs over micro-batches, too.
                is_first=micro == 0 and is_first,
                is_first_member=not is_ruled or spans.speaks(micro, rank),
            ),
        )

    def is_ever_read(self, buffer: int) -> bool:
        """Whether a task on this rank reads a buffer."""
        return buffer in self._last_reader

    def value_readers(self, buffer: int) -> Sequence[int]:
        """This rank's ops and conversions that read a buffer from ``held``, in order."""
        return self._value_readers.get(buffer, ())

    def is_needed_after(self, task: int, buffer: int) -> bool:
        """Whether an op or conversion on this rank reads a buffer after a task.

        Updates do not count: they read the summed gradient.
        """
        readers = self.value_readers(buffer)
        return bool(readers) and self._position[readers[-1]] > self._position[task]

    def is_last_reader(self, task: int, buffer: int) -> bool:
        """Whether no task on this rank reads a buffer after a task that does."""
        return self._last_reader[buffer] == task

    def zeros(self, tensor: int, shape: tuple[int, ...]) -> Tensor:
        """Zeros of a tensor's dtype on this rank's device."""
        dtype = getattr(torch, self._part.graph.tensors[tensor].dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def begin_of(self, begin: Begin, key: int) -> Tensor:
        """The tensor that a recipe begins with."""
        if begin is Begin.HELD:
            return self.held[key].tensor()
        if begin is Begin.PARAMETER:
            return self._read_parameter(key)
        if begin is Begin.FOLLOWS_BATCH:
            return self.from_batch(key)
        if begin is Begin.ZERO:
            return self.zeros(key, ())
        return self.batch[key] if begin is Begin.BATCH else self._buffers[key]

    def follow(self, way: "Recipe | Seen") -> Tensor:
        """The tensor that a recipe makes in this step."""
        return followed(self.begin_of(way.begin, way.key), way.steps)

    def first_read(self, seen: "Seen") -> tuple[Tensor, Recipe]:
        """A tensor, and the recipe by which later steps read it."""
        first = self.begin_of(seen.begin, seen.key)
        value, like = followed(first, seen.steps), Like.of(first)
        is_view = value.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        steps = shortened(seen.steps, like) if is_view and seen.is_simple else seen.steps
        recipe = Recipe(seen.begin, seen.key, tuple(steps), seen.is_simple, like, is_view)
        return value, recipe

    def read(self, need: Need, near: Near, reader: Reader) -> "Seen":
        """How a tensor is read, placed as an op on this rank needs it.

        Args:
            need: The input of the op.
            near: Buffers that the task reads.
            reader: This rank, as the op reads.
        """
        if need.on_axis.kind == "H":
            return self._window(need, near, reader)
        seen = self.look(need.tensor, need.whole, near, reader)
        spans, rank, is_ruled = reader.spans, self._part.rank, need.is_ruled
        if spans is None:
            return seen
        self._cut_free(seen, need, reader, along_axis=True)
        enters = True
        if need.in_batch.kind == "P":
            # A whole value that is read as a part of a sum enters the sum once: on the first
            # device, or team. So does a value that all members of a team have alike.
            micro = reader.micro
            speaks = spans.speaker(micro, rank, among=seen.holders) == rank
            if seen.is_part_of_sum:
                enters = is_ruled or not seen.is_alike_in_team or speaks
            elif seen.is_converted:  # converted only for the devices on which it enters
                enters = True
            else:
                enters = spans.is_in_first_team(micro, rank) and (
                    is_ruled or seen.is_part_in_team or speaks
                )
        if is_ruled and need.on_axis.kind == "P" and not seen.is_part_in_team:
            enters = enters and spans.speaks(reader.micro, rank)
        if not enters:
            seen.then(torch.zeros_like)
        return seen

    def _window(self, need: Need, near: Near, reader: Reader) -> "Seen":
        """The rows of a tensor that an op on this rank reads, rows of neighbours included."""
        part, plan, graph = self._part, self._part.plan, self._part.graph
        tensor, place, samples = need.tensor, need.on_axis, reader.samples
        select: Callable[..., Tensor] = take if place.pattern else fit
        wanted: RowSet
        if place.pattern:  # rows that this rank's rows of a sparse product read, in their order
            pattern = next(each for each in graph.patterns if each.key == place.pattern)
            size = pattern.num_columns
            wanted = rows_of_neighbours(pattern, reader.units, reader.all_units)
        else:
            size = graph.tensors[tensor].shape[place.dim]
            wanted = window_rows(place, reader.units, size)
        if not plan.is_brought(need.op, need.position, tensor):
            seen = self.look(tensor, need.whole, near, reader)
            self._cut_free(seen, need, reader, along_axis=False)
            seen.then(select, place.dim, Rows(0, size), wanted)
            seen.is_simple = False
            return seen
        storage = int(graph.storage[tensor])
        value = part.value_of[storage]
        buffer = near.get((value, WINDOW), near.get((value, AS_MADE)))
        whole = graph.tensors[tensor].shape
        shape = list(local_shape(whole, need.in_batch, samples[1], reader.all_samples[1]))
        shape[place.dim] = count(wanted)
        if buffer is None:  # this device needs no rows, and has none
            return _zeros(tensor, shape)
        held = self.held[buffer]
        seen = Seen(Begin.HELD, buffer, is_simple=False)
        if samples != held.samples:
            seen.then(cut_span, plan.batch_placements[storage], held.samples, samples)
        have = rows_held(held, size, reader.all_units)
        seen.then(select, plan.placements[storage].dim, have, wanted)
        seen.then(Tensor.reshape, tuple(shape))
        return seen

    def known(self, need: Need, reader: Reader) -> Tensor:
        """A tensor that follows from the batch, cut to an op's own samples or units."""
        seen = Seen(Begin.FOLLOWS_BATCH, need.tensor)
        self._cut_free(seen, need, reader, along_axis=True)
        return self.follow(seen)

    def put_back(self, op: int, position: int, value: Tensor, reader: Reader) -> None:
        """Write units of a buffer that an op has updated to the position they were read from."""
        place = self._part.plan.needed[op][position]
        buffer = self._buffers[self._part.graph.ops[op].inputs[position]]
        put(buffer, place, reader.all_units, reader.units[0], value)

    def _cut_free(self, seen: "Seen", need: Need, reader: Reader, *, along_axis: bool) -> None:
        """Cut a whole value to an op's own samples or units, if it needs only these."""
        if reader.spans is None:
            return
        in_batch, on_axis = need.in_batch, need.on_axis
        if in_batch.kind == "S":
            if not seen.has_samples and reader.samples != reader.all_samples:
                total = reader.all_samples[1]
                begin, count = reader.samples[0] + reader.first_sample, reader.samples[1]
                seen.then(cut, in_batch, total, begin, count)
            seen.has_samples = True
        if along_axis and need.is_ruled and on_axis.kind == "S" and not seen.has_units:
            if seen.has_samples:
                on_axis = nested(on_axis, in_batch, reader.all_samples[1], reader.samples[1])
            seen.then(cut, on_axis, reader.all_units, *reader.units)
            seen.has_units = True

    def look(self, tensor: int, whole: int, near: Near, reader: Reader) -> "Seen":
        """How a tensor is read through the views between it and its value."""
        source = self._sources[tensor]
        if source.maker < 0:
            return self._step_input(tensor, whole, near, reader)
        if not source.is_view:
            return self._value(tensor, whole, near, reader)
        need, local_op = self._needs[source.maker][0], self._ops[source.maker]
        inner = max(whole, need.whole)
        seen = self.look(need.tensor, inner, near, reader)
        if inner == EVERYTHING:  # then the views after it are whole, too
            seen.steps.append(local_op.as_view(source.output, local_op.whole))
            return Seen(seen.begin, seen.key, seen.steps, seen.is_simple)
        self._cut_free(seen, need, reader, along_axis=inner == AS_MADE)
        share = Share(
            reader.samples[1] if seen.has_samples else reader.all_samples[1],
            reader.units[1] if seen.has_units else local_op.whole.units,
        )
        seen.steps.append(local_op.as_view(source.output, share))
        return seen

    def from_batch(self, tensor: int) -> Tensor:
        """The whole of a tensor that follows from the batch (``BatchPlan.follows_batch``).

        Every rank has the whole batch, so nothing needs to be sent. The result is kept until the
        step ends.
        """
        known = self._from_batch.get(tensor)
        if known is not None:
            return known
        graph = self._part.graph
        maker = int(graph.producer[tensor])
        if maker < 0:
            is_batch = graph.tensors[tensor].kind == TensorKind.BATCH
            return (self.batch if is_batch else self._buffers)[tensor]
        local_op = self._ops[maker]
        inputs = [self.from_batch(each) for each in graph.ops[maker].inputs]
        made = local_op(inputs, local_op.whole)
        self._from_batch |= dict(zip(graph.outputs[maker], made, strict=True))
        return self._from_batch[tensor]

    def _step_input(self, tensor: int, whole: int, near: Near, reader: Reader) -> "Seen":
        part, source = self._part, self._sources[tensor]
        bucket = part.sliced_of_tensor.get(tensor)
        if bucket is not None and bucket.stage == 3:
            buffer = near[gathered(bucket.number)]
            seen = Seen(Begin.HELD, buffer, has_units=source.is_ruled)
            seen.then(operator.getitem, self._span[tensor])
            seen.then(Tensor.view, self._parameters[tensor].shape)
            return seen
        if tensor in self._parameters:
            return Seen(Begin.PARAMETER, tensor, has_units=source.is_ruled)
        if tensor not in self.batch:
            return Seen(Begin.MODEL_BUFFER, tensor)
        seen = Seen(Begin.BATCH, tensor)
        if whole == EVERYTHING or source.on_axis.kind != "S" or reader.spans is None:
            return seen
        begin, count = reader.samples
        total = reader.all_samples[1]
        seen.then(cut, source.on_axis, total, begin + reader.first_sample, count)
        seen.has_samples = True
        return seen

    def _value(self, tensor: int, whole: int, near: Near, reader: Reader) -> "Seen":
        """The value in a buffer, cut to the samples and units that the reader needs."""
        part, source = self._part, self._sources[tensor]
        value = part.value_of[tensor]
        in_batch, on_axis, is_ruled = source.in_batch, source.on_axis, source.is_ruled
        buffer = nearest(near, value, whole)
        is_part = in_batch.kind == "P" or on_axis.kind == "P"
        if whole == AS_MADE and is_part:
            buffer = near.get((value, AS_MADE))  # not the whole sum, which may be here as well
        if buffer is None:
            assert is_part, f"tensor {tensor} is not here"
            # A whole value seen as a partial sum: it is on another device, and zero on this one.
            return self._nothing(tensor, reader)
        held = self.held[buffer]
        seen = Seen(Begin.HELD, buffer)
        if whole == EVERYTHING:
            return seen
        has_samples = in_batch.kind == "S" and reader.spans is not None
        if has_samples and reader.samples != held.samples:
            (low, owned), (begin, count) = held.samples, reader.samples
            seen.then(cut, in_batch, owned, begin - low, count)
        has_units = is_ruled and on_axis.kind == "S" and whole == AS_MADE
        if has_units and reader.units != held.units:
            if has_samples:
                on_axis = nested(on_axis, in_batch, reader.all_samples[1], reader.samples[1])
            low, owned = (0, reader.all_units) if held.units == EVERY else held.units
            begin, count = reader.units
            seen.then(cut, on_axis, owned, begin - low, count)
        is_converted = part.is_converted[buffer]
        spans = part.spans_of_op[source.maker]
        has_one_team = spans is not None and spans.num_teams == 1  # which has all samples
        is_part_in_team = on_axis.kind == "P" and (
            whole == AS_MADE or part.value_in(buffer)[1] == AS_MADE
        )
        seen.has_samples, seen.has_units = has_samples, has_units
        seen.is_part_of_sum = in_batch.kind == "P" and not (is_ruled and has_one_team)
        seen.is_alike_in_team = is_ruled and not is_part_in_team
        # Without a rule each device has a part of its own.
        seen.is_part_in_team = is_part_in_team
        seen.is_converted = is_converted and on_axis.kind == "P"
        seen.holders = None if is_converted else spans
        return seen

    def _nothing(self, tensor: int, reader: Reader) -> "Seen":
        """Zeros in place of a part of a sum that is on another device."""
        shape = self._part.graph.tensors[tensor].shape
        in_batch = self._sources[tensor].in_batch
        if in_batch.kind == "S":
            shape = local_shape(shape, in_batch, reader.samples[1], reader.all_samples[1])
        seen = _zeros(tensor, shape)
        seen.has_samples = in_batch.kind == "S"
        seen.is_part_of_sum = seen.is_part_in_team = True
        return seen


def _zeros(tensor: int, shape: Sequence[int]) -> "Seen":
    """Zeros of a tensor's dtype."""
    return Seen(Begin.ZERO, tensor, [(Tensor.new_zeros, (tuple(shape),))], is_simple=False)


def rows_held(held: HeldValue, size: int, all_units: int) -> RowSet:
    """Rows of a tensor that are held: those gathered, those of some units, or all."""
    if held.rows is not None:
        return held.rows
    return Rows(0, size) if held.units == EVERY else unit_rows(held.units, size, all_units)


@dataclass(slots=True)
class Seen:
    """How a reader gets a tensor; views and cuts on the way to the reader are added to it.

    Attributes:
        begin: What it begins with; see ``Recipe``.
        key: Number of the buffer, or the tensor's id.
        steps: Functions of a tensor and their further arguments, in order.
        is_simple: Whether it takes no more than views and cuts.
        has_samples: Whether it is cut to the reader's samples.
        has_units: Whether it is cut to the reader's units.
        is_part_of_sum: Whether it is a part of a sum over the batch.
        is_alike_in_team: Whether all members of a team have the same part.
        is_part_in_team: Whether it is a part of a sum over the team (or, without a team, a
            device's own part of a sum over the batch).
        is_converted: Whether it was a part of a sum, and a conversion has brought the whole.
        holders: Spans of the op that made it, if it is on the devices of that op.
    """

    begin: Begin
    key: int
    steps: list[Step] = field(default_factory=list)
    is_simple: bool = True
    has_samples: bool = False
    has_units: bool = False
    is_part_of_sum: bool = False
    is_alike_in_team: bool = False
    is_part_in_team: bool = False
    is_converted: bool = False
    holders: Spans | None = None

    def then(self, function: Callable[..., Tensor], *arguments: Any) -> None:
        """Add a step."""
        self.steps.append((function, arguments))
