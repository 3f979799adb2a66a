"""What a strategy means, slow and obvious: a reference to compare the lowering kernel with.

It shares no code with ``heterog.strategy.lowering``. Tasks and buffers are objects, what lies
where is a dictionary from device to buffer, and everything is looked up when it is asked for. From
top to bottom: what a program is made of; what ops read and make, which the graph alone says; who
has which samples and units; and the walk through a step, with a section for each concern.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from heterog.cluster import Cluster
from heterog.graph.axis_plan import EVERYWHERE, axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_costs import REORDERS_WEIGHTS
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.op_rule import OpRules
from heterog.graph.sharding_rules.loss import LABEL_COUNTING_LOSSES
from heterog.strategy.channels import ChannelKind
from heterog.strategy.layout import split_in_proportion
from heterog.strategy.pipeline_schedule import Pass, device_chunks
from heterog.strategy.program import FIRST_FREE_KIND, TaskKind
from heterog.strategy.recomputation import recomputations
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

# --- what a program is made of ------------------------------------------------------------------


@dataclass(eq=False, repr=False, slots=True)
class Buffer:
    """Memory on a device, or a token of no bytes that only orders tasks."""

    maker: "Task"
    device: int  # -1: on none
    num_bytes: float


class Route(NamedTuple):
    """What a link task goes over: a transfer's ends or a collective's members."""

    kind: ChannelKind
    devices: tuple[int, ...]
    slices: tuple[float, ...] = ()  # part of the payload that each owns, where that matters


class Need(NamedTuple):
    """A value as ops of a group need it that cannot take it as it was made."""

    value: int
    group: int
    whole: int  # 1: all of it on every device
    axis: int  # along which the reader runs


Subject = int | Need
"""A graph op, the number of a parameter (of a bucket: of its first one), or a need."""


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Task:
    """A unit of a program; see ``Program`` for the fields' meaning."""

    kind: TaskKind
    subject: Subject
    device: int = -1
    micro: int = 0
    samples: int = 0
    num_bytes: float = 0.0
    route: Route | None = None
    turn: int = 0  # of a task on a compute stream
    reads: list[Buffer] = field(default_factory=list)
    makes: list[Buffer] = field(default_factory=list)

    def make(self, device: int, num_bytes: float = 0.0) -> Buffer:
        """Another buffer that the task makes."""
        self.makes.append(Buffer(self, device, num_bytes))
        return self.makes[-1]


Where = dict[int, Buffer]
"""What lies on each device."""


class Scatter(NamedTuple):
    """What a reduce-scatter left on a device."""

    done: Buffer
    received: Buffer | None
    given: Buffer | None


class Meaning(NamedTuple):
    """A program: tasks in program order, and what else a strategy says."""

    tasks: list[Task]
    bucket: dict[int, int]  # first parameter of the bucket of each parameter that is in one
    resident_bytes: list[float]
    is_in_turn: bool


# --- what ops read and make ---------------------------------------------------------------------


class Reading:
    """What the ops of a graph read and make, under rules of single ops."""

    def __init__(self, graph: OpGraph, op_rules: OpRules) -> None:
        self.graph = graph
        self.plan = axis_plan(graph, op_rules)
        self.has_axes = len(self.plan.axes) > 1
        self.group = [int(group) for group in group_ops(graph).group]
        self.num_groups = group_ops(graph).num_groups
        self.ops = [
            op
            for op, each in enumerate(graph.ops)
            if not graph.is_view[op] and each.phase != Phase.UPDATE
        ]
        self.maker = {value: op for op in self.ops for value in graph.outputs(op)}
        self.parameter = {tensor: row for row, (_, tensor, _) in enumerate(graph.updates)}
        self.reads = {op: self._reads(op) for op in self.ops}
        self.parameters_read = {
            op: {
                self.parameter[storage]: None
                for storage in self._storages(op)
                if storage in self.parameter
            }
            for op in self.ops
        }

    def _storages(self, op: int) -> list[int]:
        return [int(self.graph.storage[tensor]) for tensor in self.graph.ops[op].inputs]

    def axis(self, op: int) -> int:
        """The axis that an op runs along: 0 is the batch."""
        return int(self.plan.op_axis[op])

    def kind(self, value: int) -> str:
        """How a value lies when it is made: replicated, split, partial sum, local statistics."""
        return self.plan.placements[value].kind

    def is_backward(self, op: int) -> bool:
        """Whether an op belongs to the backward pass."""
        return self.graph.ops[op].phase == Phase.BACKWARD

    def _is_seen_whole(self, tensor: int) -> bool:
        """Whether a tensor is a view that needs the whole of what it looks at."""
        view = int(self.graph.producer[tensor])
        if view < 0 or not self.graph.is_view[view]:
            return False
        source = self.graph.ops[view].inputs[0]
        needed = self.plan.needed[view][0]
        return self._is_seen_whole(source) or self.plan.is_whole_needed(
            source, needed, self.axis(view)
        )

    def _is_whole_needed(self, op: int, position: int) -> bool:
        tensor = self.graph.ops[op].inputs[position]
        needed = self.plan.needed[op][position]
        return self._is_seen_whole(tensor) or self.plan.is_whole_needed(
            tensor, needed, self.axis(op)
        )

    def _reads(self, op: int) -> dict[tuple[int, Need | None], None]:
        """Values that an op reads: as they lie in its own group, or as it needs them."""
        found: dict[tuple[int, Need | None], None] = {}
        for position, value in enumerate(self._storages(op)):
            if value not in self.maker:
                continue  # an input of the step
            maker = self.maker[value]
            whole = self._is_whole_needed(op, position)
            is_near = self.group[maker] == self.group[op] and self.axis(maker) == self.axis(op)
            if self.group[maker] == CONSTANT_GROUP or (is_near and not whole):
                found[value, None] = None
            else:
                need = Need(value, self.group[op], int(whole), self.axis(op))
                found[value, need] = None
        return found

    def reads_whole_batch(self) -> bool:
        """Whether some op needs samples that its device has no share of."""
        batch = set(self.graph.inputs_of_kind(TensorKind.BATCH))
        return any(
            storage in batch and self._is_whole_needed(op, position)
            for op in self.ops
            for position, storage in enumerate(self._storages(op))
        )

    def bytes_of(self, value: int, share: int) -> float:
        """Bytes of a value on a device with a share of what its op runs along."""
        size = float(self.graph.tensor_bytes[value])
        if self.kind(value) != "S":
            return size
        return size * share / max(self.plan.axes[self.axis(self.maker[value])], 1)

    def moved_fraction(self, value: int) -> float:
        """Part of a value that other groups look at; all of it if none does."""
        own = (self.group[self.maker[value]], CONSTANT_GROUP)
        seen = {
            tensor
            for op in self.ops
            for tensor, storage in zip(self.graph.ops[op].inputs, self._storages(op), strict=True)
            if storage == value and self.group[op] != own[0] and own[0] != CONSTANT_GROUP
        }
        num_bytes = sum(int(self.graph.tensor_bytes[tensor]) for tensor in seen)
        size = int(self.graph.tensor_bytes[value])
        return min(num_bytes / size, 1.0) if num_bytes and size else 1.0

    def is_contiguous(self, value: int) -> bool:
        """Whether a range of a split value is one piece of memory."""
        place = self.plan.placements[value]
        return place.dim == 0 and place.outer == 1

    def is_early(self, value: int) -> bool:
        """Whether a value, the number of labels that count, is known from the batch alone."""
        maker = self.maker[value]
        return (
            self.graph.ops[maker].kind in LABEL_COUNTING_LOSSES
            and value == self.graph.outputs(maker)[1]
        )

    # Parameters, by their number among the updates.

    def parameter_bytes(self, parameter: int) -> float:
        """Bytes of a whole parameter."""
        return float(self.graph.tensor_bytes[self.graph.updates[parameter][1]])

    def parameter_group(self, parameter: int) -> int:
        """Group that decides about a parameter."""
        return self.group[self.graph.updates[parameter][0]]

    def gradient(self, parameter: int) -> int:
        """The value that holds a parameter's gradient."""
        return int(self.graph.storage[self.graph.updates[parameter][2]])

    def is_partial(self, parameter: int) -> bool:
        """Whether each device makes a part of the gradient, to be summed."""
        return self.kind(self.gradient(parameter)) == "P"

    def sharded_axis(self, parameter: int) -> int | None:
        """The axis along which a parameter lives in slices by the rules of its ops."""
        tensor = self.graph.updates[parameter][1]
        return int(self.plan.tensor_axis[tensor]) if tensor in self.plan.sharded else None

    def gradient_need(self, parameter: int) -> Need | None:
        """The whole of a gradient that is made in slices, of a parameter that is whole."""
        value = self.gradient(parameter)
        if self.kind(value) != "S" or self.sharded_axis(parameter) is not None:
            return None
        maker = self.maker[value]
        return Need(value, self.group[maker], 1, self.axis(maker))

    def readers(self, parameter: int) -> list[int]:
        """Ops that read a parameter."""
        return [op for op in self.ops if parameter in self.parameters_read[op]]

    def finisher(self, parameter: int) -> int:
        """After this op the gradient is made and the parameter is read for the last time."""
        return max([self.maker[self.gradient(parameter)], *self.readers(parameter)])

    @cached_property
    def finished(self) -> dict[int, list[int]]:
        """Parameters that each op finishes."""
        found: dict[int, list[int]] = {op: [] for op in self.ops}
        for parameter in range(len(self.graph.updates)):
            found[self.finisher(parameter)].append(parameter)
        return found

    @cached_property
    def weights_ops(self) -> set[int]:
        """Backward ops whose results lead to gradients of their own group alone."""
        gradients = {self.gradient(parameter) for parameter in self.parameter.values()}
        readers: dict[int, list[int]] = {value: [] for value in self.maker}
        for op in self.ops:
            for value, _ in self.reads[op]:
                readers[value].append(op)
        found: set[int] = set()
        for op in reversed(self.ops):
            made = self.graph.outputs(op)
            leads_on = any(
                reader not in found or self.group[reader] != self.group[op]
                for value in made
                for reader in readers[value]
            )
            is_used = any(value in gradients or self.graph.consumers[value] for value in made)
            if self.is_backward(op) and is_used and not leads_on:
                found.add(op)
        return found

    @cached_property
    def again(self) -> dict[int, tuple[int, list[int]]]:
        """Of each group that recomputes: the op before which that happens, and what runs again."""
        row = {op: number for number, op in enumerate(self.ops)}
        own_reads = [
            [row[self.maker[value]] for value, need in self.reads[op] if need is None]
            for op in self.ops
        ]
        makers = [row[self.maker[self.gradient(p)]] for p in self.parameter.values()]
        found = recomputations(
            [self.group[op] for op in self.ops],
            [self.is_backward(op) for op in self.ops],
            own_reads,
            makers,
            self.num_groups,
        )
        return {
            group: (self.ops[each.reader], [self.ops[number] for number in each.ops])
            for group, each in enumerate(found)
            if each.ops
        }


# --- who has which samples and units ------------------------------------------------------------


class Layout(NamedTuple):
    """Devices and their shares. What differs here lies differently, whatever comes of it."""

    devices: tuple[int, ...]
    shares: tuple[int, ...]


def in_micro_batches(
    shares: Sequence[int], devices: Sequence[int], table: tuple[tuple[int, ...], ...]
) -> list[list[int]]:
    """Samples of each device in each micro-batch.

    The table's, where they add up to the shares; else each micro-batch is cut in proportion to
    what is left, and what exceeds a device's rest goes to the first ones that have some.
    """
    if not table:
        return [list(shares)]
    if [sum(table[device]) for device in devices] == list(shares):
        return [
            list(counts) for counts in zip(*(table[device] for device in devices), strict=True)
        ]
    left, rows = list(shares), []
    for size in map(sum, zip(*table, strict=True)):
        wanted = split_in_proportion(size, tuple(map(float, left)))
        row = [min(count, rest) for count, rest in zip(wanted, left, strict=True)]
        for position, rest in enumerate(left):
            row[position] += min(size - sum(row), rest - row[position])
        left = [rest - count for rest, count in zip(left, row, strict=True)]
        rows.append(row)
    return rows


def ranges(devices: Iterable[int], counts: Iterable[int]) -> dict[int, range]:
    """Consecutive ranges in the order of the devices, without empty ones."""
    found, begin = {}, 0
    for device, count in zip(devices, counts, strict=True):
        if count:
            found[device] = range(begin, begin + count)
        begin += count
    return found


class Shares:
    """What each device does, by the decisions of a strategy."""

    def __init__(self, reading: Reading, strategy: Strategy, num_devices: int) -> None:
        self.reading = reading
        self.strategy = strategy
        self.num_devices = num_devices
        batch_size = reading.graph.batch_size
        self._samples: dict[Layout, list[list[int]]] = {}
        for decision in strategy.decisions:
            counts = decision.shares
            if sum(counts) != batch_size:  # another batch than the one that was planned for
                counts = split_in_proportion(batch_size, counts)
            rows = in_micro_batches(counts, decision.devices, strategy.micro_batches)
            self._samples[Layout(decision.devices, decision.shares)] = rows

    def layout(self, group: int) -> Layout:
        """How a group's work is shared out."""
        decision = self.strategy.decisions[group]
        return Layout(decision.devices, decision.shares)

    def samples(self, layout: Layout, micro: int) -> dict[int, range]:
        """Samples of a micro-batch on each device that has some."""
        return ranges(layout.devices, self._samples[layout][micro])

    def most_samples(self, device: int) -> int:
        """Samples of the whole batch that a device has at most in any group."""
        return max(
            (
                sum(row[layout.devices.index(device)] for row in rows)
                for layout, rows in self._samples.items()
                if device in layout.devices
            ),
            default=0,
        )

    def along(self, layout: Layout, axis: int, micro: int) -> dict[int, range]:
        """The samples of a micro-batch, or units of another axis, on each device with some."""
        if axis == 0:
            return self.samples(layout, micro)
        units = self.reading.plan.axes[axis]
        if units == EVERYWHERE:
            return {
                device: range(1)
                for device, share in zip(layout.devices, layout.shares, strict=True)
                if share
            }
        return ranges(layout.devices, split_in_proportion(units, layout.shares))

    def busy(self, micro: int) -> set[int]:
        """Devices that compute anything in a micro-batch."""
        found = {device for layout in self._samples for device in self.samples(layout, micro)}
        if self.reading.has_axes:  # a device without samples may own units of another axis
            for layout in self._samples:
                found |= {
                    d for d, share in zip(layout.devices, layout.shares, strict=True) if share
                }
        return found

    def of_op(self, op: int, micro: int) -> dict[int, int]:
        """How many samples or units of an op each device computes, where it computes any."""
        group = self.reading.group[op]
        if group == CONSTANT_GROUP:
            return dict.fromkeys(sorted(self.busy(micro)), 1)
        own = self.along(self.layout(group), self.reading.axis(op), micro)
        return {device: len(units) for device, units in own.items()}

    def slices(self, group: int) -> dict[int, float]:
        """Part of its parameters that each device of a group steps, where it steps any."""
        decision = self.strategy.decisions[group]
        weights = decision.slices or (1,) * len(decision.devices)
        parts = zip(decision.devices, weights, strict=True)
        return {device: weight / sum(weights) for device, weight in parts if weight}

    def is_sliced(self, parameter: int) -> bool:
        """Whether each device steps a slice of a parameter, as ZeRO has it."""
        decision = self.strategy.decisions[self.reading.parameter_group(parameter)]
        is_zero = decision.sync in (Sync.ZERO1, Sync.ZERO2, Sync.ZERO3)
        return is_zero and len(decision.devices) > 1 and self.reading.is_partial(parameter)


# --- the walk through the steps -----------------------------------------------------------------


def meaning(
    graph: OpGraph, cluster: Cluster, strategy: Strategy, *, num_steps: int = 1
) -> Meaning:
    """The program of a strategy; of one for another batch, too, as ``lower_resized``."""
    walk = Walk(graph, cluster, strategy)
    for step in range(num_steps):
        walk.step(step)
    return Meaning(
        tasks=walk.tasks,
        bucket=walk.bucket_of,
        resident_bytes=resident_bytes(walk.reading, walk.shares),
        is_in_turn=walk.has_turns and bool(strategy.schedule.turns),
    )


class Walk:
    """Every op of every micro-batch of every step, in program order."""

    def __init__(self, graph: OpGraph, cluster: Cluster, strategy: Strategy) -> None:
        self.cluster = cluster
        self.strategy = strategy
        self.num_micro = strategy.num_micro_batches
        self.reading = Reading(graph, strategy.op_rules)
        self.shares = Shares(self.reading, strategy, cluster.num_devices)
        self.has_turns = not strategy.schedule.is_default and self.num_micro > 1
        self.tasks: list[Task] = []
        # Where the walk is.
        self.number = 0  # of the step
        self.micro = 0
        self.group = CONSTANT_GROUP
        self.work: Pass | None = None  # none: the end of the step
        # What lies where in this micro-batch.
        self.values: dict[int, Where] = {}
        self.converted: dict[Need, Where] = {}
        # Of each parameter in this step.
        parameters = range(len(graph.updates))
        self.arrived: list[Where] = [{} for _ in parameters]
        self.arrives_next: list[Where] = [{} for _ in parameters]
        self.gradients: list[Where] = [{} for _ in parameters]
        self.added: list[Where] = [{} for _ in parameters]  # the last addition to each is done
        self.last_read: list[Where] = [{} for _ in parameters]
        self.open: dict[int, list[int]] = {}
        self.bucket_of: dict[int, int] = {}
        self.sliced_buckets = self._sliced_buckets()
        self.begin_slices()
        self.begin_caps()

    def step(self, number: int) -> None:
        """One training step."""
        self.number = number
        self.arrived = [dict(where) for where in self.arrives_next]
        self.gradients = [{} for _ in self.arrived]
        self.added = [{} for _ in self.arrived]
        self.last_read = [{} for _ in self.arrived]
        self.begin_slices()
        for micro in range(self.num_micro):
            self.micro, self.values, self.converted = micro, {}, {}
            for op in self.reading.ops:
                self.run(op)
        self.work = None
        for key in sorted(self.open):
            self.close_bucket(key)

    def run(self, op: int) -> None:
        """One op of one micro-batch on all its devices, and what has to come before and after."""
        reading = self.reading
        self.group, self.work = reading.group[op], self.pass_of(op)
        for _, need in reading.reads[op]:
            if need is not None and need not in self.converted:
                self.converted[need] = self.convert(need)
        gathers = self.gather_parameters(op, self.work != Pass.FORWARD)
        again = reading.again.get(self.group)
        if again and again[0] == op and self.strategy.decisions[self.group].recompute:
            self.recompute(*again)
        self.compute(op, TaskKind.COMPUTE, self.permits(op))
        if gathers:
            self.note_first_reader(op)
        for parameter in reading.finished[op]:
            self.note_last_readers(parameter)
            self.finish(parameter)

    def add(
        self,
        kind: TaskKind,
        subject: Subject,
        device: int = -1,
        *,
        reads: Iterable[Buffer | None] = (),
        micro: int = 0,
        samples: int = 0,
        num_bytes: float = 0.0,
        route: Route | None = None,
    ) -> Task:
        """The next task of the program."""
        task = Task(
            kind=kind,
            subject=subject,
            device=device,
            micro=micro,
            samples=samples,
            num_bytes=num_bytes,
            route=route,
            turn=0 if route else self.turn(device),
            reads=[buffer for buffer in reads if buffer is not None],
        )
        self.tasks.append(task)
        return task

    def transfer(
        self,
        kind: TaskKind,
        subject: Subject,
        source: int,
        device: int,
        num_bytes: float,
        reads: Iterable[Buffer | None],
        *,
        micro: int = 0,
        samples: int = 0,
    ) -> Task:
        """The next task, from one device to another."""
        route = Route(ChannelKind.POINT_TO_POINT, (source, device))
        return self.add(
            kind, subject, device, reads=reads, micro=micro, samples=samples, num_bytes=num_bytes,
            route=route,
        )  # fmt: skip

    # --- ops ------------------------------------------------------------------------------------

    def inputs(self, op: int, device: int) -> list[Buffer | None]:
        """What an op reads on a device, its parameters apart."""
        return [
            (self.values.get(value, {}) if need is None else self.converted[need]).get(device)
            for value, need in self.reading.reads[op]
        ]

    def compute(
        self, op: int, kind: TaskKind, more: dict[int, list[Buffer]] | None = None
    ) -> None:
        """A task on each device that has samples, or units of the axis of the op's rule."""
        made: dict[int, Where] = {value: {} for value in self.reading.graph.outputs(op)}
        for device, share in self.shares.of_op(op, self.micro).items():
            reads = self.inputs(op, device)
            reads += [self.arrived[p].get(device) for p in self.reading.parameters_read[op]]
            reads += (more or {}).get(device, [])
            task = self.add(kind, op, device, reads=reads, micro=self.micro, samples=share)
            for value, where in made.items():
                where[device] = task.make(device, self.reading.bytes_of(value, share))
            if kind == TaskKind.COMPUTE:
                self.make_tokens(op, task)
        self.values |= made

    def recompute(self, reader: int, ops: list[int]) -> None:
        """Forward ops of a group once more, just before its first backward op, the reader.

        They read what they read the first time, but for what has been made again. The first one
        waits for the gradients that the reader waits for.
        """
        work, self.work = self.work, Pass.BACKWARD
        for op in ops:
            gathers = self.gather_parameters(op, True)
            awaited: dict[int, list[Buffer]] = {}
            if op == ops[0]:
                for device in self.shares.of_op(op, self.micro):
                    inputs = zip(
                        self.reading.reads[reader], self.inputs(reader, device), strict=True
                    )
                    awaited[device] = [
                        buffer
                        for (value, _), buffer in inputs
                        if buffer and self.reading.is_backward(self.reading.maker[value])
                    ]
            self.compute(op, TaskKind.RECOMPUTE, awaited)
            if gathers:
                self.note_first_reader(op)
        self.work = work

    # --- conversions ----------------------------------------------------------------------------

    def convert(self, need: Need) -> Where:
        """Make a value available the way a group's ops need it."""
        maker = self.reading.maker[need.value]
        kind, axis = self.reading.kind(need.value), self.reading.axis(maker)
        source = self.shares.layout(self.reading.group[maker])
        target = self.shares.layout(need.group)
        lies = self.values[need.value]
        is_same = source == target
        if is_same and need.axis == axis and not need.whole:
            return lies
        # Wherever the reader runs, a gather or a reduction leaves the whole on all devices.
        is_for_all = kind == "S" or (kind == "P" and need.whole and is_same)
        for other, where in self.converted.items():  # it may have been brought there already
            if (
                (other.value, other.whole) == (need.value, need.whole)
                and self.shares.layout(other.group) == target
                and (is_for_all or other.axis == need.axis)
            ):
                return where
        if kind == "S":  # moves along its own axis
            if not is_same:
                lies = self.move(need, source, target, axis)
            return self.gather(need, lies, target, axis) if need.whole else lies
        owners = set(self.shares.along(source, axis, self.micro))
        readers = set(self.shares.along(target, need.axis, self.micro))
        if kind == "P":
            if not need.whole and is_same and owners <= readers:
                return lies
            lies = self.reduce(need, lies, source)
            if need.whole and is_same:
                return lies
            # A whole value is a partial sum of which one device has all.
            return self.copy(need, lies, owners, readers if need.whole else {min(readers)})
        if is_same and need.axis == axis:
            return lies
        return self.copy(need, lies, owners, readers)

    def move(self, need: Need, source: Layout, target: Layout, axis: int) -> Where:
        """Each device gets its range from the devices whose ranges overlap it."""
        arrived: Where = {}
        for device, wanted in self.shares.along(target, axis, self.micro).items():
            pieces: list[Buffer] = []
            for other, owned in self.shares.along(source, axis, self.micro).items():
                piece = range(max(wanted.start, owned.start), min(wanted.stop, owned.stop))
                if piece:
                    mine = self.values[need.value][other]
                    pieces.append(self.bring(need, mine, other, device, piece, owned))
            if len(pieces) > 1:
                pieces = [self.concat(need, device, len(wanted), pieces)]
            arrived[device] = pieces[0]
        return arrived

    def piece_bytes(self, need: Need, share: int) -> float:
        """Bytes of a part of a split value as it is moved."""
        return self.reading.bytes_of(need.value, share) * self.reading.moved_fraction(need.value)

    def bring(
        self, need: Need, mine: Buffer, other: int, device: int, piece: range, owned: range
    ) -> Buffer:
        """A piece of what one device has, on another; on itself it only looks at it."""
        if other == device:
            return mine
        size = self.piece_bytes(need, len(piece))
        if len(piece) < len(owned) and not self.reading.is_contiguous(need.value):
            task = self.add(
                TaskKind.SPLIT, need, other, reads=[mine], micro=self.micro, samples=len(piece),
                num_bytes=2.0 * size,
            )  # fmt: skip
            maker = self.reading.maker[need.value]
            # It follows what it cuts.
            task.turn = self.turn(other, self.reading.group[maker], self.pass_of(maker))
            mine = task.make(other, size)
        task = self.transfer(
            TaskKind.SEND, need, other, device, size, [mine], micro=self.micro, samples=len(piece)
        )
        return task.make(device, size)

    def concat(self, need: Need, device: int, count: int, pieces: list[Buffer]) -> Buffer:
        """Pieces from several devices as one."""
        size = self.piece_bytes(need, count)
        task = self.add(
            TaskKind.CONCAT, need, device, reads=pieces, micro=self.micro, samples=count,
            num_bytes=2.0 * size,
        )  # fmt: skip
        if self.pass_of(self.reading.maker[need.value]) != Pass.WEIGHTS:
            # The first reader may be of the weights, and others wait for it before those.
            task.turn = min(task.turn, self.turn(device, need.group, Pass.BACKWARD))
        return task.make(device, size)

    def gather(self, need: Need, lies: Where, layout: Layout, axis: int) -> Where:
        """All parts on all devices of a layout, padded to the largest one."""
        if len(layout.devices) == 1:
            return lies
        counts = {d: len(own) for d, own in self.shares.along(layout, axis, self.micro).items()}
        largest = self.reading.bytes_of(need.value, max(counts.values()))
        task = self.add(
            TaskKind.GATHER_VALUE, need, reads=[lies[device] for device in counts],
            micro=self.micro, samples=sum(counts.values()),
            num_bytes=len(layout.devices) * largest,
            route=_collective(ChannelKind.ALL_GATHER, layout.devices),
        )  # fmt: skip
        size = self.reading.bytes_of(need.value, sum(counts.values()))
        return {device: task.make(device, size) for device in layout.devices}

    def reduce(self, need: Need, lies: Where, layout: Layout) -> Where:
        """The sum of all parts on all devices of a layout."""
        if len(layout.devices) == 1:
            return lies
        size = self.reading.bytes_of(need.value, 0)
        task = self.add(
            TaskKind.REDUCE_VALUE, need, micro=self.micro, num_bytes=size,
            reads=() if self.reading.is_early(need.value) else lies.values(),
            route=self.all_reduce(layout.devices),
        )  # fmt: skip
        return {device: task.make(device, size) for device in layout.devices}

    def all_reduce(self, devices: tuple[int, ...]) -> Route:
        """All-reduce of a value: by hosts where there are several with several devices."""
        num_hosts = len({self.cluster.devices[device].host_index for device in devices})
        if 1 < num_hosts < len(devices):
            return _collective(ChannelKind.ALL_REDUCE_HIERARCHICAL, devices)
        return _collective(ChannelKind.ALL_REDUCE_RING, devices)

    def copy(self, need: Need, lies: Where, owners: set[int], readers: set[int]) -> Where:
        """A whole value on every reader, from the first device that made it."""
        size = self.reading.bytes_of(need.value, 0) * self.reading.moved_fraction(need.value)
        arrived: Where = {}
        for device in sorted(readers):
            if device in lies:
                arrived[device] = lies[device]
                continue
            source = min(owners)
            task = self.transfer(
                TaskKind.SEND, need, source, device, size, [lies[source]], micro=self.micro
            )
            arrived[device] = task.make(device, size)
        return arrived

    # --- gradients ------------------------------------------------------------------------------

    def decision_of(self, parameter: int) -> Decision:
        """What is decided about a parameter."""
        return self.strategy.decisions[self.reading.parameter_group(parameter)]

    def note_last_readers(self, parameter: int) -> None:
        """An update waits for ops that read the parameter after its gradient is made, and where
        none is made, for the last op there that reads it."""
        gradient = self.reading.gradient(parameter)
        for reader in self.reading.readers(parameter):
            made = self.reading.graph.outputs(reader)
            if not made:
                continue
            is_last = reader == self.reading.finisher(parameter) > self.reading.maker[gradient]
            for device, buffer in self.values.get(made[0], {}).items():
                if is_last or (self.reading.has_axes and device not in self.values[gradient]):
                    self.last_read[parameter][device] = buffer

    def finish(self, parameter: int) -> None:
        """A micro-batch's gradient is made: keep it, add it up; after the last, update."""
        need = self.reading.gradient_need(parameter)
        if need is not None:
            if need not in self.converted:
                self.converted[need] = self.convert(need)
            self.gradients[parameter] = dict(self.converted[need])
            self.synchronise(parameter)
            return
        fresh = self.values[self.reading.gradient(parameter)]
        is_sharded = self.reading.sharded_axis(parameter) is not None
        if not self.reading.is_partial(parameter) and not is_sharded:
            self.share_whole_gradient(parameter, fresh)
        if self.shares.is_sliced(parameter) and self.decision_of(parameter).sync != Sync.ZERO1:
            self.finish_slices(parameter)
            return
        for device, buffer in sorted(fresh.items()):
            self.accumulate(parameter, device, buffer)
        if self.micro == self.num_micro - 1:
            self.synchronise(parameter)

    def share_whole_gradient(self, parameter: int, fresh: Where) -> None:
        """A replica without samples gets the gradient that all others have whole."""
        owner = min(fresh)
        for device in self.decision_of(parameter).devices:
            if device not in fresh:
                size = self.reading.parameter_bytes(parameter)
                task = self.transfer(
                    TaskKind.PUSH, parameter, owner, device, size, [fresh[owner]], micro=self.micro
                )
                fresh[device] = task.make(device, size)

    def accumulate(self, parameter: int, device: int, fresh: Buffer) -> None:
        """Add to the gradient of earlier micro-batches, if there is one."""
        if device not in self.gradients[parameter]:
            self.gradients[parameter][device] = fresh
            return
        task = self.add(
            TaskKind.ACCUMULATE, parameter, device, micro=self.micro,
            reads=[fresh, *self.gradient_on(parameter, device)],
            num_bytes=3.0 * self.reading.parameter_bytes(parameter),
        )  # fmt: skip
        self.follow(task)
        self.added[parameter][device] = task.make(device)

    def gradient_on(self, parameter: int, device: int) -> list[Buffer | None]:
        """A device's gradient, and that all has been added to it."""
        return [self.gradients[parameter].get(device), self.added[parameter].get(device)]

    # --- updates --------------------------------------------------------------------------------

    def synchronise(self, parameter: int) -> None:
        """Aggregate a finished gradient and update the parameter."""
        decision = self.decision_of(parameter)
        axis = self.reading.sharded_axis(parameter)
        if axis is not None:
            layout = self.shares.layout(self.reading.parameter_group(parameter))
            for device, own in self.shares.along(layout, axis, 0).items():
                size = self.reading.parameter_bytes(parameter)
                part = size * len(own) / self.reading.plan.axes[axis]
                gradient = self.gradient_on(parameter, device)
                self.update(parameter, device, gradient, samples=len(own), num_bytes=part)
        elif self.strategy.homes[parameter] != REPLICATED:
            self.serve(parameter, self.strategy.homes[parameter])
        elif len(decision.devices) == 1 or not self.reading.is_partial(parameter):
            for device in decision.devices:
                self.update(parameter, device, self.gradient_on(parameter, device))
        elif self.shares.is_sliced(parameter):
            self.finish_slices(parameter)
        else:
            self.put_into_bucket(parameter)

    def update(
        self,
        parameter: int,
        device: int,
        reads: Iterable[Buffer | None],
        *,
        samples: int = 0,
        num_bytes: float = 0.0,
    ) -> Buffer:
        """The optimizer's step of a parameter, or of a part of it, on a device."""
        reads = [*reads, self.last_read[parameter].get(device)]
        task = self.add(
            TaskKind.UPDATE, parameter, device, reads=reads, samples=samples, num_bytes=num_bytes
        )
        self.arrives_next[parameter][device] = task.make(device)
        return self.arrives_next[parameter][device]

    def serve(self, parameter: int, home: int) -> None:
        """Push every gradient to the parameter's home, add and update there, pull."""
        size = self.reading.parameter_bytes(parameter)
        gradients = self.gradients[parameter]
        senders = sorted(gradients)
        if not self.reading.is_partial(parameter):  # all have the same: one is enough
            senders = [home] if home in senders else senders[:1]
        received: list[Buffer] = []
        for device in senders:
            if device != home:
                reads = self.gradient_on(parameter, device)
                push = self.transfer(TaskKind.PUSH, parameter, device, home, size, reads)
                received.append(push.make(home, size))
        terms: list[Buffer | None] = list(received)
        if home in gradients:
            terms += self.gradient_on(parameter, home)
        if len(senders) > 1:
            num_bytes = (len(senders) + 1.0) * size
            added = self.add(TaskKind.SUM, parameter, home, reads=terms, num_bytes=num_bytes)
            terms = [added.make(home, size)]
        elif received:
            terms = [received[0]]
        done = self.update(parameter, home, terms)
        for device in self.decision_of(parameter).devices:
            if device != home:
                # Its own ops must be done with the old weights.
                reads = [done, self.last_read[parameter].get(device)]
                if not self.reading.is_partial(parameter):
                    reads += self.gradient_on(parameter, device)
                pull = self.transfer(TaskKind.PULL, parameter, home, device, size, reads)
                self.arrives_next[parameter][device] = pull.make(device)

    # --- buckets --------------------------------------------------------------------------------

    def bucket_key(self, parameter: int) -> int:
        """The first group whose gradients may share a bucket with those of a parameter's."""

        def alike(group: int) -> tuple[object, ...]:
            decision = self.strategy.decisions[group]
            own = group if decision.sync == Sync.ZERO3 else None  # gathered for one group's ops
            return decision.devices, decision.shares, decision.sync, decision.slices, own

        mine = alike(self.reading.parameter_group(parameter))
        return next(g for g in range(self.reading.num_groups) if alike(g) == mine)

    def is_full(self, bucket: list[int]) -> bool:
        """Whether a bucket is synchronised without waiting for more."""
        return sum(map(self.reading.parameter_bytes, bucket)) >= self.strategy.bucket_bytes

    def put_into_bucket(self, parameter: int) -> None:
        """Synchronise a gradient together with others."""
        key = self.bucket_key(parameter)
        self.open.setdefault(key, []).append(parameter)
        if self.is_full(self.open[key]):
            self.close_bucket(key)

    def close_bucket(self, key: int) -> None:
        """All-reduce, or reduce-scatter and all-gather, a bucket; update its parameters.

        One tensor is synchronised where it lies; several are copied together on each device.
        """
        bucket = self.open.pop(key)
        first = bucket[0]
        self.bucket_of |= dict.fromkeys(bucket, first)
        decision = self.decision_of(first)
        size = sum(map(self.reading.parameter_bytes, bucket))
        flat: Where = {}
        if len(bucket) > 1:
            flat = {device: self.flatten(bucket, device, size) for device in decision.devices}

        def lies() -> list[Buffer | None]:
            if flat:
                return list(flat.values())
            return [
                each for device in decision.devices for each in self.gradient_on(first, device)
            ]

        in_two = decision.sync == Sync.REDUCE_SCATTER_ALL_GATHER
        kind = TaskKind.REDUCE_SCATTER if in_two else TaskKind.ALL_REDUCE
        task = self.add(kind, first, reads=lies(), num_bytes=size, route=_first_route(decision))
        if not flat:  # who has no gradient of its own receives one
            for device in decision.devices:
                if device not in self.gradients[first]:
                    self.gradients[first][device] = task.make(device, size)
        done = task.make(-1)
        if in_two:
            task = self.add(
                TaskKind.ALL_GATHER, first, reads=[done, *lies()], num_bytes=size,
                route=_collective(ChannelKind.ALL_GATHER, decision.devices, decision.slices),
            )  # fmt: skip
            done = task.make(-1)
        for parameter in bucket:
            for device in decision.devices:
                own = [flat[device]] if flat else self.gradient_on(parameter, device)
                self.update(parameter, device, [done, *own])

    def flatten(self, bucket: list[int], device: int, size: float) -> Buffer:
        """A device's gradients of a bucket in one piece."""
        reads = [each for parameter in bucket for each in self.gradient_on(parameter, device)]
        task = self.add(
            TaskKind.FLATTEN, bucket[0], device, reads=reads, micro=self.num_micro - 1,
            num_bytes=2.0 * size,
        )  # fmt: skip
        self.follow(task)
        return task.make(device, size)

    # --- slices: ZeRO ---------------------------------------------------------------------------

    def _sliced_buckets(self) -> dict[int, list[int]]:
        """The bucket of each sliced parameter, in the order in which gradients are finished.

        Said ahead: stage 3 gathers a bucket before any gradient of it is there.
        """
        found: dict[int, list[int]] = {}
        open_bucket: dict[int, list[int]] = {}
        for op in self.reading.ops:
            for parameter in self.reading.finished[op]:
                if self.shares.is_sliced(parameter):
                    key = self.bucket_key(parameter)
                    found[parameter] = open_bucket.setdefault(key, [])
                    found[parameter].append(parameter)
                    if self.is_full(found[parameter]):
                        del open_bucket[key]
        self.bucket_of |= {parameter: bucket[0] for parameter, bucket in found.items()}
        return found

    def begin_slices(self) -> None:
        """Forget what lay where in the step before."""
        # By bucket: when it was gathered last, which gradients are there, its slices, when the
        # last reduce-scatter is done.
        self.gathered_in: dict[int, tuple[int, bool]] = {}
        self.present: dict[int, set[int]] = {}
        self.slice_on: dict[int, Where] = {}
        self.scattered: dict[int, Buffer] = {}
        # By device, the last one last: first readers of gathers; what the reduce-scatters that it
        # took part in were given and left there, and that they are done.
        devices = range(self.cluster.num_devices)
        self.first_readers: list[list[Buffer]] = [[] for _ in devices]
        self.scatters: list[list[Scatter]] = [[] for _ in devices]

    def gather_parameters(self, op: int, is_backward: bool) -> bool:
        """Stage 3: gather the buckets that an op is the first of its pass to read; whether any.

        A gather may start when the first reader of the gather before the last one is done.
        """
        runs_on = self.shares.of_op(op, self.micro)
        any_gathered = False
        for parameter in self.reading.parameters_read[op]:
            bucket = self.sliced_buckets.get(parameter, [])
            now = self.micro, is_backward
            if (
                self.decision_of(parameter).sync != Sync.ZERO3
                or not bucket
                or self.gathered_in.get(bucket[0]) == now
            ):
                continue
            any_gathered = True
            updated: list[Buffer | None] = []
            if bucket[0] not in self.gathered_in:  # every slice is of the step before
                updated = [each for member in bucket for each in self.arrived[member].values()]
            self.gathered_in[bucket[0]] = now
            earlier = [reader for d in runs_on for reader in self.first_readers[d][-2:-1]]
            size = sum(map(self.reading.parameter_bytes, bucket))
            task = self.add(
                TaskKind.GATHER_PARAMETERS, bucket[0], reads=[*updated, *earlier],
                micro=self.micro, num_bytes=size,
                route=_second_route(self.decision_of(parameter)),
            )  # fmt: skip
            for device in runs_on:
                whole = task.make(device, size)
                for member in bucket:
                    self.arrived[member][device] = whole
        return any_gathered

    def note_first_reader(self, op: int) -> None:
        """An op is the first reader of the latest gather."""
        made = self.reading.graph.outputs(op)
        if made:
            for device in self.shares.of_op(op, self.micro):
                self.first_readers[device].append(self.values[made[0]][device])

    def finish_slices(self, parameter: int) -> None:
        """A gradient is there: scatter its bucket if it was the last one, and update after all."""
        bucket = self.sliced_buckets[parameter]
        present = self.present.setdefault(bucket[0], set())
        present.add(parameter)
        if len(present) == len(bucket):
            present.clear()
            flat = self.scatter(bucket)
            if self.micro == self.num_micro - 1:
                self.update_slices(bucket, flat)

    def scatter(self, bucket: list[int]) -> Where:
        """Reduce-scatter a bucket's gradients from the devices that have some.

        In stages 2 and 3 this is done for every micro-batch, and a device goes on when all but its
        last reduce-scatter are done: one that ran ahead of its links would keep all gradients.
        """
        first, decision = bucket[0], self.decision_of(bucket[0])
        by_micro = decision.sync != Sync.ZERO1
        size = sum(map(self.reading.parameter_bytes, bucket))

        def made(parameter: int) -> Where:
            return (
                self.values[self.reading.gradient(parameter)]
                if by_micro
                else self.gradients[parameter]
            )

        flat: Where = {}
        for device in sorted(made(first)):
            flat[device] = made(first)[device]
            if len(bucket) == 1 and not by_micro:
                continue
            reads: list[Buffer | None] = []
            if by_micro:
                reads += [each for earlier in self.scatters[device][-2:-1] for each in earlier]
            for member in bucket:
                reads.append(made(member)[device])
                reads.append(None if by_micro else self.added[member].get(device))
            task = self.add(
                TaskKind.FLATTEN, first, device, reads=reads, micro=self.micro,
                num_bytes=2.0 * size if len(bucket) > 1 else 0.0,
            )  # fmt: skip
            self.follow(task)
            if len(bucket) > 1:
                flat[device] = task.make(device, size)
            if decision.sync == Sync.ZERO2:
                # The next micro-batch does not begin while this one waits for its scatters: it
                # would keep activations of both. Stage 3 has its gathers for that.
                going_on = task.make(device)
                for member in bucket:
                    self.arrived[member][device] = going_on
        return self.reduce_scatter(bucket, flat, size, by_micro)

    def reduce_scatter(self, bucket: list[int], flat: Where, size: float, by_micro: bool) -> Where:
        """The collective itself, and what it leaves."""
        first, decision = bucket[0], self.decision_of(bucket[0])
        slices = self.slice_on.setdefault(first, {})
        reads: list[Buffer | None] = [self.scattered.get(first), *flat.values()]
        for device in decision.devices:
            if not by_micro:
                reads.append(self.added[first].get(device) if len(bucket) == 1 else None)
                continue
            reads.append(slices.get(device))
            if device not in flat and self.scatters[device]:
                # It makes no gradient that could wait for what the last one left here.
                reads.append(self.scatters[device][-1].received)
        task = self.add(
            TaskKind.REDUCE_SCATTER, first, reads=reads, micro=self.micro, num_bytes=size,
            route=_first_route(decision),
        )  # fmt: skip
        received: Where = {}
        for device, part in self.shares.slices(self.reading.parameter_group(first)).items():
            others = len(flat) - (device in flat)
            received[device] = task.make(device, others * part * size)
            if by_micro and device not in slices:
                slices[device] = task.make(device, part * size)
            elif not by_micro and device not in flat:
                # Elsewhere it is added to the own slice of the flat gradients, and let go.
                slices[device] = received[device]
        self.scattered[first] = done = task.make(-1)
        if by_micro:
            for device in decision.devices:
                left = Scatter(done, received.get(device), flat.get(device))
                self.scatters[device].append(left)
        return flat

    def update_slices(self, bucket: list[int], flat: Where) -> None:
        """Step the slices; in stages 1 and 2 gather the parameters."""
        first, decision = bucket[0], self.decision_of(bucket[0])
        parts = self.shares.slices(self.reading.parameter_group(first))
        for parameter in bucket:
            for device, part in parts.items():
                reads = [self.scattered[first], self.slice_on[first].get(device)]
                if decision.sync == Sync.ZERO1:
                    reads.append(flat.get(device))
                num_bytes = part * self.reading.parameter_bytes(parameter)
                self.update(parameter, device, reads, num_bytes=num_bytes)
        if decision.sync == Sync.ZERO3:
            return
        done: list[Buffer | None] = []
        for parameter in bucket:
            done += [self.arrives_next[parameter][device] for device in parts]
            # Its own ops must be done with the old weights.
            done += [self.last_read[parameter].get(device) for device in decision.devices]
        task = self.add(
            TaskKind.GATHER_PARAMETERS, first, reads=done, route=_second_route(decision),
            num_bytes=sum(map(self.reading.parameter_bytes, bucket)),
        )  # fmt: skip
        whole = task.make(-1)
        for parameter in bucket:
            self.arrives_next[parameter] |= dict.fromkeys(decision.devices, whole)

    # --- turns and caps -------------------------------------------------------------------------

    @cached_property
    def chunks(self) -> tuple[tuple[range, ...], ...]:
        """Runs of groups on each device."""
        devices = [decision.devices for decision in self.strategy.decisions]
        starts = self.strategy.schedule.chunk_starts
        return device_chunks(devices, self.cluster.num_devices, starts)

    def chunk_of(self, device: int, group: int) -> int | None:
        """The chunk of a device that a group belongs to."""
        own = self.chunks[device]
        return next((number for number, groups in enumerate(own) if group in groups), None)

    def pass_of(self, op: int) -> Pass:
        """The pass of a micro-batch that an op belongs to."""
        if not self.reading.is_backward(op):
            return Pass.FORWARD
        splits = self.has_turns and self.strategy.schedule.splits_backward
        return Pass.WEIGHTS if splits and op in self.reading.weights_ops else Pass.BACKWARD

    def turn(self, device: int, group: int | None = None, work: Pass | None = None) -> int:
        """The turn of a device that takes up a pass of a group; by default what is done now.

        Turns are micro-batches; or weight gradients come after all else; or they are stated, and
        the last one is for what belongs to no chunk of the device.
        """
        group = self.group if group is None else group
        is_end = work is None and self.work is None
        work = self.work if work is None else work
        schedule = self.strategy.schedule
        if not self.has_turns or not (schedule.turns or schedule.splits_backward):
            return self.micro
        if not schedule.turns:
            if is_end:
                return 2 * self.num_micro - 1
            return self.micro + (self.num_micro if work == Pass.WEIGHTS else 0)
        num_turns = max(map(len, schedule.turns)) + 1
        chunk = self.chunk_of(device, group)
        place = num_turns - 1
        stated = schedule.turns[device] if device < len(schedule.turns) else ()
        for number, turn in enumerate(stated):
            is_mine = turn.chunk == chunk and turn.work == work
            if group == CONSTANT_GROUP:  # made when the micro-batch begins
                is_mine = turn.work == Pass.FORWARD
            if turn.micro == self.micro and is_mine and not is_end:
                place = number
                break
        return self.number * num_turns + place

    def follow(self, task: Task) -> None:
        """A task that reads gradients comes in no turn before those that make them.

        The op that finishes a parameter may be of another pass than the one that makes its
        gradient.
        """
        for maker in (buffer.maker for buffer in task.reads):
            if maker.device == task.device and maker.kind < FIRST_FREE_KIND:
                task.turn = max(task.turn, maker.turn)

    def begin_caps(self) -> None:
        """No micro-batch has begun on any chunk."""
        # By device and chunk: of each micro-batch that has begun, what is made when it is done.
        self.tokens: dict[tuple[int, int], list[list[Buffer]]] = {}
        self.entered: set[tuple[int, int, int, int]] = set()

    def permits(self, op: int) -> dict[int, list[Buffer]]:
        """What the first forward op of a micro-batch on a chunk waits for under a cap."""
        found: dict[int, list[Buffer]] = {}
        if self.group == CONSTANT_GROUP or self.work != Pass.FORWARD:
            return found
        for device in self.shares.of_op(op, self.micro):
            chunk = self.chunk_of(device, self.group)
            assert chunk is not None
            if (device, chunk, self.number, self.micro) in self.entered:
                continue
            self.entered.add((device, chunk, self.number, self.micro))
            begun = self.tokens.setdefault((device, chunk), [])
            cap = min(self.cap(device, chunk), self.num_micro)
            if 0 < cap <= len(begun):
                found[device] = begun[-cap]
            begun.append([])
        return found

    def cap(self, device: int, chunk: int) -> int:
        """Micro-batches that may be under way on a chunk; 0: any number."""
        caps = self.strategy.schedule.in_flight
        if not self.has_turns or device >= len(caps) or chunk >= len(caps[device]):
            return 0
        return caps[device][chunk]

    def make_tokens(self, op: int, task: Task) -> None:
        """The last op of a micro-batch on a chunk says so, and the last one of the weights."""
        has_caps = self.has_turns and any(map(any, self.strategy.schedule.in_flight))
        if not has_caps or self.group == CONSTANT_GROUP:
            return
        chunk = self.chunk_of(task.device, self.group)
        assert chunk is not None
        later = [
            other
            for other in self.reading.ops
            if other > op
            and self.reading.group[other] in self.chunks[task.device][chunk]
            and task.device in self.shares.of_op(other, self.micro)
            and (self.pass_of(other) == Pass.WEIGHTS) == (self.work == Pass.WEIGHTS)
        ]
        if not later:
            token = task.make(task.device)
            if begun := self.tokens.get((task.device, chunk)):
                begun[-1].append(token)


def _collective(
    kind: ChannelKind, devices: tuple[int, ...], slices: tuple[int, ...] = ()
) -> Route:
    """A collective; only where each member owns a slice it matters how large."""
    if kind in (ChannelKind.ALL_REDUCE_RING, ChannelKind.ALL_REDUCE_HIERARCHICAL):
        return Route(kind, devices)
    weights = slices or (1,) * len(devices)
    return Route(kind, devices, tuple(weight / sum(weights) for weight in weights))


def _first_route(decision: Decision) -> Route:
    """How a decision's gradients are aggregated."""
    if decision.sync == Sync.RING:
        return _collective(ChannelKind.ALL_REDUCE_RING, decision.devices)
    if decision.sync == Sync.HIERARCHICAL:
        return _collective(ChannelKind.ALL_REDUCE_HIERARCHICAL, decision.devices)
    return _collective(ChannelKind.REDUCE_SCATTER, decision.devices, decision.slices)


def _second_route(decision: Decision) -> Route:
    """How slices become whole again."""
    return _collective(ChannelKind.ALL_GATHER, decision.devices, decision.slices)


# --- what stays for the whole step --------------------------------------------------------------


def resident_bytes(reading: Reading, shares: Shares) -> list[float]:
    """Parameters, optimizer state, buffers, batch, and the largest workspace of a kernel."""
    return [
        sum(
            _kept_of(reading, shares, parameter, device)
            for parameter in reading.parameter.values()
        )
        + max(
            (
                _workspace(reading, shares, parameter, device)
                for parameter in reading.parameter.values()
            ),
            default=0.0,
        )
        + _inputs_kept(reading, shares, device)
        for device in range(shares.num_devices)
    ]


def _kept_of(reading: Reading, shares: Shares, parameter: int, device: int) -> float:
    """Bytes of a parameter and of the optimizer's state of it on a device."""
    group = reading.parameter_group(parameter)
    decision, home = shares.strategy.decisions[group], shares.strategy.homes[parameter]
    ratio = reading.graph.optimizer_state_ratio
    part, state = float(device in decision.devices), float(device in decision.devices)
    axis = reading.sharded_axis(parameter)
    if axis is not None:
        part = state = _units_of(reading, shares, parameter, device)
    elif shares.is_sliced(parameter):
        state = shares.slices(group).get(device, 0.0)
        part = state if decision.sync == Sync.ZERO3 else part
    elif home != REPLICATED:  # the state is the server's, with a copy if it is no replica
        part, state = max(part, float(device == home)), float(device == home)
    return reading.parameter_bytes(parameter) * (part + ratio * state)


def _units_of(reading: Reading, shares: Shares, parameter: int, device: int) -> float:
    """Part of a sharded parameter that a device has."""
    axis = reading.sharded_axis(parameter)
    assert axis is not None
    layout = shares.layout(reading.parameter_group(parameter))
    return len(shares.along(layout, axis, 0).get(device, ())) / reading.plan.axes[axis]


def _workspace(reading: Reading, shares: Shares, parameter: int, device: int) -> float:
    """Bytes that a kernel needs beside a parameter that it puts into another order."""
    kinds = {reading.graph.ops[op].kind for op in reading.readers(parameter)}
    if not kinds & REORDERS_WEIGHTS:
        return 0.0
    if reading.sharded_axis(parameter) is not None:
        return reading.parameter_bytes(parameter) * _units_of(reading, shares, parameter, device)
    decision = shares.strategy.decisions[reading.parameter_group(parameter)]
    return reading.parameter_bytes(parameter) if device in decision.devices else 0.0


def _inputs_kept(reading: Reading, shares: Shares, device: int) -> float:
    """Bytes of the model's buffers and of the batch on a device that computes at all."""
    graph = reading.graph
    if not any(device in shares.busy(micro) for micro in range(shares.strategy.num_micro_batches)):
        return 0.0
    kept = [
        *graph.inputs_of_kind(TensorKind.BUFFER),
        *graph.inputs_of_kind(TensorKind.CONSTANT),
        *(tensor for tensor in graph.parameters if tensor not in reading.parameter),
    ]
    size = float(sum(graph.tensor_bytes[tensor] for tensor in kept))
    batch = graph.inputs_of_kind(TensorKind.BATCH)
    batch_bytes = float(sum(graph.tensor_bytes[tensor] for tensor in batch))
    if reading.reads_whole_batch():
        return size + batch_bytes
    return size + batch_bytes * shares.most_samples(device) / graph.batch_size
