"""What a strategy means, slow and obvious: a reference to compare the lowering kernel with.

It shares no code with ``heterog.lowering``. Tasks and buffers are objects, what lies
where is a dictionary from device to buffer, and everything is looked up when it is asked for.
``reading`` says what ops read and make, and who has which samples and units. Here is what a
program is made of, and the walk through a step, with a section for each concern.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from heterog.cluster import Cluster
from heterog.graph.grouping import CONSTANT_GROUP
from heterog.graph.op_costs import REORDERS_WEIGHTS
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import FIRST_FREE_KIND, TaskKind
from heterog.strategy.layouts.stages import layers_of
from heterog.strategy.schedules import Pass, device_chunks
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.strategy.reading import (
    ANY_PASS,
    AS_MADE,
    BACKWARD_PASS,
    BATCH,
    EVERY_SAMPLE,
    FORWARD_PASS,
    IN_TEAM,
    Box,
    Layout,
    Need,
    Part,
    Reading,
    Ring,
    Shares,
    slice_weights,
)

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
    units: int = 0
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


Entry = TypeVar("Entry")


@dataclass(slots=True)
class Lane(Generic[Entry]):
    """What the gathers, or scatters, of one pass of a chunk come behind, the last one last.

    Attributes:
        turn: The turn that added to it last, -1 for none.
        entries: What they come behind.
    """

    turn: int
    entries: list[Entry]


def begun_lane(
    lanes: dict[tuple[int, int, int], Lane[Entry]], key: tuple[int, int, int], turn: int
) -> list[Entry]:
    """What a turn of a device comes behind: that of its latest turn up to then in any lane."""
    own = lanes.setdefault(key, Lane(-1, []))
    if own.turn != turn:
        mine = [
            each
            for (device, *_), each in sorted(lanes.items(), key=lambda pair: pair[0])
            if device == key[0]
        ]
        earlier = [each for each in mine if 0 <= each.turn <= turn]
        before = list(max(earlier, key=lambda each: each.turn).entries) if earlier else []
        own.turn, own.entries = turn, before
    return own.entries


class Meaning(NamedTuple):
    """A program: tasks in program order, and what else a strategy says."""

    tasks: list[Task]
    bucket: dict[int, int]  # first parameter of the bucket of each parameter that is in one
    resident_bytes: list[float]
    is_in_turn: bool


# --- the walk through the steps -----------------------------------------------------------------


BucketKey = tuple[int, int, int, int]
"""First group whose gradients may share a bucket, the axis of slices, and who makes the same."""
NO_PART = Part(0)


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
        self.reading = Reading(graph, strategy.op_rules, strategy.blocks)
        self.shares = Shares(self.reading, strategy, cluster.num_devices)
        schedule = strategy.schedule
        self.has_turns = schedule.splits_backward or (
            not schedule.is_default and self.num_micro > 1
        )
        self.tasks: list[Task] = []
        # Where the walk is.
        self.number = 0  # of the step
        self.micro = 0
        self.group = CONSTANT_GROUP
        self.work: Pass | None = None  # none: the end of the step
        # What lies where in this micro-batch.
        self.values: dict[int, Where] = {}
        self.converted: dict[Need, Where] = {}
        self.gathered_again: set[Need] = set()  # for recomputation
        self.awaits: int | None = None  # a backward op: what is gathered waits for its gradients
        self.permitted: dict[int, list[Buffer]] = {}  # what the op waits for under a cap
        self.come: Where = {}  # an input of the op that has come
        # Of each parameter in this step.
        parameters = range(len(graph.updates))
        self.arrived: list[Where] = [{} for _ in parameters]
        self.arrives_next: list[Where] = [{} for _ in parameters]
        self.gradients: list[Where] = [{} for _ in parameters]
        self.added: list[Where] = [{} for _ in parameters]  # the last addition to each is done
        self.last_read: list[Where] = [{} for _ in parameters]
        self.fresh: list[Where] = [{} for _ in parameters]  # gradients of this micro-batch
        self.open: dict[BucketKey, list[int]] = {}
        self.closed: set[BucketKey] = set()  # of which a bucket is closed in this step
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
        self.closed = set()
        self.begin_slices()
        for micro in range(self.num_micro):
            self.micro, self.values, self.converted = micro, {}, {}
            self.gathered_again = set()
            for op in self.reading.ops:
                self.run(op)
        self.work = None
        for key in sorted(self.open):
            self.close_bucket(key)

    def run(self, op: int) -> None:
        """One op of one micro-batch on all its devices, and what has to come before and after."""
        reading = self.reading
        self.group, self.work = reading.group[op], self.pass_of(op)
        self.permitted = self.permits(op)
        needs = [need for _, need in reading.reads[op] if need is not None]
        # What may be made again where it is read waits for what has come.
        for need in sorted(needs, key=lambda each: each in reading.remakes):
            if need not in self.converted:
                self.awaits = op if need.readers == BACKWARD_PASS else None
                if need in reading.remakes:
                    self.come = self.inputs_there(op)
                self.converted[need] = self.convert(need)
        gathers = self.gather_parameters(op, self.work != Pass.FORWARD)
        decision = self.strategy.decisions[self.group]
        if decision.recompute and op in reading.again[decision.keeps]:
            self.recompute(op, reading.again[decision.keeps][op])
        self.compute(op, TaskKind.COMPUTE, self.permitted)
        if gathers:
            self.note_first_reader(op, self.work != Pass.FORWARD)
        if reading.scatter_of(op):
            self.scatter_value(op)
        elif reading.is_completed(op):
            self.complete_value(op)
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
        part: Part = NO_PART,
        num_bytes: float = 0.0,
        route: Route | None = None,
    ) -> Task:
        """The next task of the program."""
        task = Task(
            kind=kind,
            subject=subject,
            device=device,
            micro=micro,
            samples=part.samples,
            units=part.units,
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
        part: Part = NO_PART,
    ) -> Task:
        """The next task, from one device to another."""
        route = Route(ChannelKind.POINT_TO_POINT, (source, device))
        return self.add(
            kind, subject, device, reads=reads, micro=micro, part=part, num_bytes=num_bytes,
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
        made: dict[int, Where] = {value: {} for value in self.reading.graph.outputs[op]}
        for device, part in self.shares.of_op(op, self.micro).items():
            reads = self.inputs(op, device)
            reads += [self.arrived[p].get(device) for p in self.reading.parameters_read[op]]
            reads += (more or {}).get(device, [])
            task = self.add(kind, op, device, reads=reads, micro=self.micro, part=part)
            for value, where in made.items():
                size = self.reading.bytes_of(value, part)
                if self.reading.scatter_of(op):  # afterwards; this is before it
                    size = self.bytes_before(op, value, part)
                where[device] = task.make(device, size)
            if kind == TaskKind.COMPUTE:
                self.make_tokens(op, task)
        self.values |= made

    def bytes_before(self, op: int, value: int, part: Part) -> float:
        """Bytes of what an op has made before its team cuts it anew."""
        graph, axis = self.reading.graph, self.reading.axis(op)
        if self.reading.is_sum(op):  # a part of the whole sum
            return self.reading.bytes_of(value, self.all_of(value, part.samples))
        size = float(graph.tensor_bytes[value]) * part.samples / graph.batch_size
        return size if axis == BATCH else size * part.units / self.reading.plan.axes[axis]

    def exchange_value(self, op: int) -> None:
        """Send each member of each team what lies in its box of the value's new axis."""
        (value,) = self.reading.graph.outputs[op]
        layout = self.shares.layouts[self.reading.group[op]]
        lies, size = self.values[value], float(self.reading.graph.tensor_bytes[value])
        batch = self.reading.graph.batch_size
        axes = self.reading.axis(op), self.reading.value_axis(value)
        boxes = [self.shares.boxes(layout, axis, self.micro) for axis in axes]
        for team, samples in self.shares.team_samples(layout, self.micro).items():
            if len(team) == 1:
                continue
            piece = size if BATCH in axes else size * len(samples) / batch
            for axis, having in zip(axes, boxes, strict=True):
                parts = [having[device].part for device in team if device in having]
                piece *= max(
                    part.samples / batch
                    if axis == BATCH
                    else part.units / self.reading.plan.axes[axis]
                    for part in parts
                )
            units = 0 if axes[1] == BATCH else self.reading.plan.axes[axes[1]]
            task = self.add(
                TaskKind.EXCHANGE_VALUE, value, reads=[lies.get(device) for device in team],
                micro=self.micro, part=Part(len(samples), units),
                num_bytes=len(team) ** 2 * piece,
                route=_collective(ChannelKind.ALL_TO_ALL, tuple(sorted(team))),
            )  # fmt: skip
            for device in team:
                box = boxes[1].get(device)
                own = self.reading.bytes_of(value, box.part) if box else 0.0
                lies[device] = task.make(device, own)

    def scatter_value(self, op: int) -> None:
        """Add up the parts that the members of each team have made, each member a slice."""
        if not self.reading.is_sum(op):
            return self.exchange_value(op)
        (value,) = self.reading.graph.outputs[op]
        layout = self.shares.layouts[self.reading.group[op]]
        lies = self.values[value]
        slices = self.shares.boxes(layout, self.reading.value_axis(value), self.micro)
        for team, samples in self.shares.team_samples(layout, self.micro).items():
            if len(team) == 1:
                continue
            parts = {device: slices[device].part for device in team if device in slices}
            sizes = {d: self.reading.bytes_of(value, part) for d, part in parts.items()}
            task = self.add(
                TaskKind.SCATTER_VALUE, value, reads=[lies.get(device) for device in team],
                micro=self.micro, part=self.all_of(value, len(samples)),
                num_bytes=len(team) * max(sizes.values()),
                route=_collective(ChannelKind.REDUCE_SCATTER, tuple(sorted(team))),
            )  # fmt: skip
            for device in team:
                lies[device] = task.make(device, sizes.get(device, 0.0))

    def complete_value(self, op: int) -> None:
        """Gather a number of each row, unless one member has all columns."""
        (value,) = self.reading.graph.outputs[op]
        layout, meta = self.shares.layouts[self.reading.group[op]], self.reading.graph.tensors
        place = self.reading.plan.placements[value]
        lies, units = self.values[value], self.reading.plan.axes[self.reading.axis(op)]
        boxes = self.shares.boxes(layout, self.reading.axis(op), self.micro)
        num_rows = meta[value].num_elements / meta[value].shape[place.dim]
        item = 8 if meta[value].dtype == "float64" else 4
        for team, samples in self.shares.team_samples(layout, self.micro).items():
            parts = {device: boxes[device].part for device in team if device in boxes}
            if len(team) == 1 or any(part.units == units for part in parts.values()):
                continue
            follows = self.reading.over_batch(value).kind == "S"
            rows = num_rows * (len(samples) / self.reading.graph.batch_size if follows else 1.0)
            task = self.add(
                TaskKind.GATHER_ROWS, value, reads=[lies.get(device) for device in team],
                micro=self.micro, part=Part(len(samples), units),
                num_bytes=len(team) * rows * item,
                route=_collective(ChannelKind.ALL_GATHER, tuple(sorted(team))),
            )  # fmt: skip
            for device in sorted(parts):
                lies[device] = task.make(device, self.reading.bytes_of(value, parts[device]))

    def recompute(self, reader: int, ops: list[int]) -> None:
        """Forward ops of a block once more, just before its first backward op, the reader.

        They read what they read the first time, but for what has been made again. The first one
        waits for the gradients that the reader waits for.
        """
        work, self.work = self.work, Pass.BACKWARD
        for op in ops:
            self.gather_again(op, reader)
            gathers = self.gather_parameters(op, True)
            awaited: dict[int, list[Buffer]] = {}
            if op == ops[0]:
                for device in self.shares.of_op(reader, self.micro):
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
                self.note_first_reader(op, True)
        self.work = work

    def gather_again(self, op: int, reader: int) -> None:
        """What teams gathered for an op and did not keep is gathered for its second run."""
        for _, need in self.reading.reads[op]:
            if need is None or need.readers != FORWARD_PASS or need in self.gathered_again:
                continue
            maker = self.reading.group[self.reading.maker[need.value]]
            if self.shares.layouts[maker] != self.shares.layouts[need.group]:
                continue  # it has come from other devices, and is kept
            for other in list(self.converted):
                if other[0] == need.value and other.readers == FORWARD_PASS:
                    if other not in self.gathered_again:
                        del self.converted[other]
            self.awaits = reader
            self.converted[need] = self.convert(need)
            self.gathered_again.add(need)

    def awaited(self, team: Sequence[int]) -> list[Buffer | None]:
        """On each device of a team, a gradient that the backward op reads for which it gathers."""
        if self.awaits is None:
            return []
        found = []
        runs = self.shares.of_op(self.awaits, self.micro)
        for device in team:
            for value, need in self.reading.reads[self.awaits] if device in runs else ():
                is_backward = self.reading.is_backward(self.reading.maker[value])
                if is_backward and (need is None or need in self.converted):
                    lies = self.values.get(value, {}) if need is None else self.converted[need]
                    found.append(lies.get(device))
                    break
        return found

    # --- conversions ----------------------------------------------------------------------------

    def convert(self, need: Need) -> Where:
        """Make a value available the way a group's ops need it."""
        maker = self.reading.maker[need.value]
        axis = self.reading.value_axis(need.value)
        over, along = self.reading.kinds(need.value)
        source = self.shares.layouts[self.reading.group[maker]]
        target = self.shares.layouts[need.group]
        lies = self.values[need.value]
        if need.window is None and source == target:
            if need.axis == axis and need.whole == AS_MADE:
                return lies
        # Pieces go where others are, and what is gathered or reduced goes to all devices,
        # whichever of them the reader runs on.
        is_for_all = (
            along == "S"
            or (over == "S" and axis == BATCH)
            or (source == target and need.whole != AS_MADE and "P" in (over, along))
        )
        # One team has every sample.
        most = IN_TEAM if len(source.teams) == len(target.teams) == 1 else EVERY_SAMPLE
        for other, where in self.converted.items():  # it may have been brought there already
            if (
                other.value == need.value
                and other.window == need.window
                and min(other.whole, most) == min(need.whole, most)
                and self.shares.layouts[other.group] == target
                and (is_for_all or other.axis == need.axis or self.serves(other, need))
                and (other.readers == need.readers or source != target)
            ):
                return where
        remade = self.remade(need, source, target) if need in self.reading.remakes else None
        if remade is not None:
            return remade
        if need.window is not None:
            return lies | self.move_rows(need, source, target, axis)
        if over == "S":
            return self.convert_split(need, lies, source, target)
        if over == "P":
            return self.convert_sum(need, lies, source, target)
        return self.convert_whole(need, lies, source, target)

    def inputs_there(self, op: int) -> Where:
        """On each device the first input of an op that is there, constants apart."""
        found: Where = {}
        for value, need in self.reading.reads[op]:
            if self.reading.group[self.reading.maker[value]] == CONSTANT_GROUP:
                continue
            if need is None or need in self.converted:
                lies = self.values.get(value, {}) if need is None else self.converted[need]
                found = lies | found
        return found

    def remade(self, need: Need, source: Layout, target: Layout) -> Where | None:
        """A value that follows from the batch, made on those who read it; none if it is sent.

        That is where they have all of it or nothing, and what they would get is large enough.
        """
        axis = self.reading.value_axis(need.value)
        ops, least = self.reading.remakes[need]
        boxes = self.shares.boxes(target, axis, self.micro)
        owned = self.shares.boxes(source, axis, self.micro)
        readers = self.shares.boxes(target, need.axis, self.micro)
        if source == target or not set(readers) <= set(boxes):
            return None
        lies = self.values[need.value]
        where = {
            d: lies[d] for d in readers if d in owned and owned[d].samples == boxes[d].samples
        }
        lacking = [device for device in readers if device not in where]
        for device in lacking:
            if device in owned and owned[device].common(boxes[device]).samples:
                return None
            if self.moved_bytes(need, boxes[device].part) < least:
                return None
        for device in lacking:
            made: dict[int, Buffer] = {}
            for op in ops:
                reads = [
                    made.get(value) or self.values[value].get(device)
                    for value, _ in self.reading.reads[op]
                ]
                if op == ops[0]:
                    reads += [self.come.get(device), *self.permitted.get(device, [])]
                part = boxes[device].part
                task = self.add(
                    TaskKind.REMAKE, op, device, reads=reads, micro=self.micro, part=part
                )
                for value in self.reading.graph.outputs[op]:
                    made[value] = task.make(device, self.reading.bytes_of(value, part))
            where[device] = made[need.value]
        return where if lacking else None

    def serves(self, other: Need, need: Need) -> bool:
        """Whether what was brought to readers along one axis is there for readers along another:
        all samples of their team."""
        _, along = self.reading.kinds(need.value)
        if BATCH in (other.axis, need.axis) or (along == "P" and need.whole == AS_MADE):
            return False
        layout = self.shares.layouts[need.group]
        have = set(self.shares.boxes(layout, other.axis, self.micro))
        return set(self.shares.boxes(layout, need.axis, self.micro)) <= have

    def convert_split(self, need: Need, lies: Where, source: Layout, target: Layout) -> Where:
        """A value that is split over the batch: between devices, or under a rule between teams."""
        axis = self.reading.value_axis(need.value)
        _, along = self.reading.kinds(need.value)
        # One team has every sample.
        whole = min(need.whole, IN_TEAM) if len(target.teams) == 1 else need.whole
        if axis == BATCH:
            if source != target:
                lies = self.move(need, source, target, axis)
            if whole == IN_TEAM:
                lies = self.gather_in_teams(need, lies, target, axis)
        elif along == "S":
            if source != target:
                lies = self.move(need, source, target, axis)
            if whole != AS_MADE:
                lies = self.gather_in_teams(need, lies, target, axis)
        else:
            readers = set(self.shares.boxes(target, need.axis, self.micro))
            is_part = along == "P" and whole == AS_MADE
            if is_part and source == target and set(lies) <= readers:
                return lies
            if along == "P":
                lies = self.reduce_in_teams(need, lies, source)
            if is_part:  # a whole value is a sum of which one member has all
                readers = set(self.shares.first_of_teams(target, readers))
            arrived = self.bring_samples(need, lies, source, target, whole, readers)
            lies = arrived if is_part else lies | arrived
        return self.gather(need, lies, target) if whole == EVERY_SAMPLE else lies

    def convert_sum(self, need: Need, lies: Where, source: Layout, target: Layout) -> Where:
        """A value of which each device, or under a rule each team, has a part of a sum.

        A reader that needs parts of a sum, too, takes the sum as such a part where it cannot have
        the parts: one device, or one team, has all of it and the others have nothing.
        """
        axis = self.reading.value_axis(need.value)
        _, along = self.reading.kinds(need.value)
        readers = set(self.shares.boxes(target, need.axis, self.micro))
        if source == target:
            reading = [readers & set(team) for team in source.teams if readers & set(team)]
            if need.whole == AS_MADE and (
                all(each & set(lies) for each in reading) if along == "R" else set(lies) <= readers
            ):
                return lies
            if along == "S":
                lies = self.gather_in_teams(need, lies, source, axis)
            elif need.whole == IN_TEAM:
                lies = self.reduce_in_teams(need, lies, source)
            if need.whole == IN_TEAM:
                return lies
        elif along == "S":
            lies = self.gather_in_teams(need, lies, source, axis)
        owners = set(self.values[need.value])
        terms = set(lies)
        if along in ("R", "S"):  # all members of a team have the same
            terms = set(self.shares.first_of_teams(source, owners))
        if along not in ("R", "S") or len(source.teams) > 1:  # one team has all of the sum
            lies = self.reduce(need, lies, terms, source)
        if need.whole == EVERY_SAMPLE:
            return lies | self.copy(need, lies, owners, readers)
        if need.whole == AS_MADE and along in ("", "P"):
            readers = {min(readers)}
        else:
            team = next(team for team in target.teams if readers & set(team))
            readers &= set(team)
        return self.copy(need, lies, owners, readers)

    def convert_whole(self, need: Need, lies: Where, source: Layout, target: Layout) -> Where:
        """A value that does not depend on who has which samples, or that one team has."""
        axis = self.reading.value_axis(need.value)
        _, along = self.reading.kinds(need.value)
        owners = set(self.shares.boxes(source, axis, self.micro))
        readers = set(self.shares.boxes(target, need.axis, self.micro))
        if along == "P":
            if need.whole == AS_MADE and source == target and owners <= readers:
                return lies
            lies = self.reduce_in_teams(need, lies, source)
            if need.whole == AS_MADE:  # a whole value is a sum of which one device has all
                readers = set(self.shares.first_of_teams(target, readers))
                readers = readers if need.axis != BATCH else {min(readers)}
                return self.copy(need, lies, owners, readers)
        elif along == "S":
            if need.whole != AS_MADE or source != target:
                lies = self.gather_in_teams(need, lies, source, axis)
        return lies | self.copy(need, lies, owners, readers)

    # Samples and units that change places.

    def moved_bytes(self, need: Need, part: Part) -> float:
        """Bytes of a part of a value as it is moved."""
        return self.reading.bytes_of(need.value, part) * self.reading.moved_fraction(need.value)

    def said(self, need: Need, box: Box) -> Part:
        """Samples and units of a piece, where the value is cut by them."""
        over, along = self.reading.kinds(need.value)
        part = box.part
        return Part(part.samples if over == "S" else 0, part.units if along == "S" else 0)

    def move(self, need: Need, source: Layout, target: Layout, axis: int) -> Where:
        """Each device gets its samples and units from the devices that have some of them."""
        arrived: Where = {}
        owned = self.shares.boxes(source, axis, self.micro)
        for device, wanted in self.shares.boxes(target, axis, self.micro).items():
            pieces: list[Buffer] = []
            for other, box in owned.items():
                piece = box.common(wanted)
                if piece.samples and (piece.units or axis == BATCH):
                    mine = self.values[need.value][other]
                    pieces.append(self.bring(need, mine, other, device, piece, box))
            arrived[device] = self.joined(need, device, wanted, pieces)
        return arrived

    def move_rows(self, need: Need, source: Layout, target: Layout, axis: int) -> Where:
        """Each device gets the rows that its ops read from the devices that own them."""
        value, rows = need.value, self.reading.rows(need.value)
        units = self.reading.plan.axes[axis]
        row_bytes = self.reading.bytes_of(value, Part(1, units)) / rows
        arrived: Where = {}
        owned = {
            device: Box(
                box.samples, range(box.units.start * rows // units, box.units.stop * rows // units)
            )
            for device, box in self.shares.boxes(source, axis, self.micro).items()
        }
        assert need.window is not None
        for device, box in self.shares.boxes(target, axis, self.micro).items():
            wanted = self.reading.rows_read(need.window, box.units, units, rows)
            pieces: list[Buffer] = []
            for other, own in owned.items():
                common = Box(box.samples, own.units).common(own).samples
                piece = Part(len(common), len(wanted.intersection(own.units)))
                if not math.prod(piece):
                    continue
                mine, size = self.values[value][other], math.prod(piece) * row_bytes
                if other != device and piece != own.part:
                    mine = self.cut_out(need, mine, other, piece, size)
                if other != device:
                    mine = self.transfer(
                        TaskKind.SEND, need, other, device, size, [mine], micro=self.micro,
                        part=piece,
                    ).make(device, size)  # fmt: skip
                pieces.append(mine)
            if len(pieces) > 1:
                whole = Part(len(box.samples), len(wanted))
                size = math.prod(whole) * row_bytes
                arrived[device] = self.as_one(need, device, whole, pieces, size)
            elif pieces:
                (arrived[device],) = pieces
        return arrived

    def bring_samples(
        self, need: Need, lies: Where, source: Layout, target: Layout, whole: int,
        readers: set[int],
    ) -> Where:  # fmt: skip
        """Each reader gets the samples that it needs from teams whose members hold all of theirs.

        From itself, or from the member of the other team at its own position, counted round, or
        the first one if that has nothing.
        """
        wanted = self.shares.samples(target, self.micro)
        if whole == IN_TEAM or (whole == AS_MADE and need.axis != BATCH):
            wanted = {device: self.team_range(target, device) for device in sorted(readers)}
        teams = self.shares.team_samples(source, self.micro)
        everything = self.reading.all_units(need.value)
        arrived: Where = {}
        for device, samples in wanted.items():
            own_team = target.team_of(device)
            pieces: list[Buffer] = []
            for team, owned in teams.items():
                piece = Box(samples, everything).common(Box(owned, everything))
                if not piece.samples:
                    continue
                holders = [member for member in team if member in lies]
                other = team[own_team.index(device) % len(team)]
                other = next(each for each in (device, other, *holders) if each in holders)
                box = Box(owned, everything)
                pieces.append(self.bring(need, lies[other], other, device, piece, box))
            arrived[device] = self.joined(need, device, Box(samples, everything), pieces)
        return arrived

    def team_range(self, layout: Layout, device: int) -> range:
        """Samples of the team of a device."""
        return self.shares.team_samples(layout, self.micro)[layout.team_of(device)]

    def bring(
        self, need: Need, mine: Buffer, other: int, device: int, piece: Box, owned: Box
    ) -> Buffer:
        """A piece of what one device has, on another; on itself it only looks at it."""
        if other == device:
            return mine
        size, part = self.moved_bytes(need, piece.part), self.said(need, piece)
        if not self.is_contiguous(need.value, piece, owned):
            mine = self.cut_out(need, mine, other, part, size)
        task = self.transfer(
            TaskKind.SEND, need, other, device, size, [mine], micro=self.micro, part=part
        )
        return task.make(device, size)

    def cut_out(self, need: Need, mine: Buffer, device: int, part: Part, size: float) -> Buffer:
        """A copy of a piece that does not lie in one."""
        task = self.add(
            TaskKind.SPLIT, need, device, reads=[mine], micro=self.micro, part=part,
            num_bytes=2.0 * size,
        )  # fmt: skip
        maker = self.reading.maker[need.value]
        # It follows what it cuts.
        task.turn = self.turn(device, self.reading.group[maker], self.pass_of(maker))
        return task.make(device, size)

    def is_contiguous(self, value: int, piece: Box, owned: Box) -> bool:
        """Whether a piece of what a device has is one piece of memory."""
        over, along = self.reading.over_batch(value), self.reading.along_axis(value)
        cuts = []
        if over.kind == "S" and len(piece.samples) < len(owned.samples):
            cuts.append(over)
        if along and along.kind == "S" and len(piece.units) < len(owned.units):
            cuts.append(along)
        return len(cuts) < 2 and all(place.dim == 0 and place.outer == 1 for place in cuts)

    def joined(self, need: Need, device: int, wanted: Box, pieces: list[Buffer]) -> Buffer:
        """Pieces from several devices as one."""
        if len(pieces) == 1:
            return pieces[0]
        size = self.moved_bytes(need, wanted.part)
        return self.as_one(need, device, self.said(need, wanted), pieces, size)

    def as_one(
        self, need: Need, device: int, part: Part, pieces: list[Buffer], size: float
    ) -> Buffer:
        """Several pieces joined."""
        task = self.add(
            TaskKind.CONCAT, need, device, reads=pieces, micro=self.micro, part=part,
            num_bytes=2.0 * size,
        )  # fmt: skip
        if self.pass_of(self.reading.maker[need.value]) != Pass.WEIGHTS:
            # The first reader may be of the weights, and others wait for it before those.
            task.turn = min(task.turn, self.turn(device, need.group, Pass.BACKWARD))
        return task.make(device, size)

    def copy(self, need: Need, lies: Where, owners: set[int], readers: set[int]) -> Where:
        """A whole value on every reader, from the first device that made it."""
        size = self.reading.bytes_of(need.value, self.all_of(need.value))
        size *= self.reading.moved_fraction(need.value)
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

    def all_of(self, value: int, samples: int = 0) -> Part:
        """Some samples with all units of the axis."""
        return Part(samples, len(self.reading.all_units(value)))

    # Collectives.

    def gather(self, need: Need, lies: Where, layout: Layout) -> Where:
        """The samples of all devices on all of them, padded to the most that one has."""
        counts = {d: len(own) for d, own in self.shares.samples(layout, self.micro).items()}
        parts = {device: self.all_of(need.value, count) for device, count in counts.items()}
        whole = self.all_of(need.value, sum(counts.values()))
        said = Part(whole.samples)
        return self.gather_parts(need, lies, layout.devices, parts, whole, said)

    def gather_in_teams(self, need: Need, lies: Where, layout: Layout, axis: int) -> Where:
        """The samples, or under a rule the units, of each team's members on all of them."""
        boxes = self.shares.boxes(layout, axis, self.micro)
        arrived = dict(lies)
        for team, samples in self.shares.team_samples(layout, self.micro).items():
            parts = {device: boxes[device].part for device in team if device in boxes}
            whole = self.all_of(need.value, len(samples))
            said = self.said(need, Box(samples, self.reading.all_units(need.value)))
            arrived |= self.gather_parts(need, lies, team, parts, whole, said)
        return arrived

    def gather_parts(
        self, need: Need, lies: Where, members: Sequence[int], parts: dict[int, Part],
        whole: Part, said: Part,
    ) -> Where:  # fmt: skip
        """All parts on all members, padded to the largest one."""
        if len(members) == 1:
            return {device: lies[device] for device in members}
        largest = max(self.reading.bytes_of(need.value, part) for part in parts.values())
        awaited = self.awaited(members) if need.readers != ANY_PASS else []
        task = self.add(
            TaskKind.GATHER_VALUE, need, reads=[*awaited, *(lies[device] for device in parts)],
            micro=self.micro, part=said, num_bytes=len(members) * largest,
            route=_collective(ChannelKind.ALL_GATHER, tuple(sorted(members))),
        )  # fmt: skip
        size = self.reading.bytes_of(need.value, whole)
        return {device: task.make(device, size) for device in members}

    def reduce(self, need: Need, lies: Where, terms: Iterable[int], layout: Layout) -> Where:
        """The sum of some devices' parts on all devices of a layout."""
        whole = self.all_of(need.value)
        return self.reduce_parts(need, lies, layout.devices, terms, whole, NO_PART)

    def reduce_in_teams(self, need: Need, lies: Where, layout: Layout) -> Where:
        """In each team the sum of its members' parts on all of them."""
        arrived = dict(lies)
        over, _ = self.reading.kinds(need.value)
        for team, samples in self.shares.team_samples(layout, self.micro).items():
            terms = [device for device in team if device in lies]
            whole = self.all_of(need.value, len(samples))
            said = Part(len(samples) if over == "S" else 0)
            arrived |= self.reduce_parts(need, lies, team, terms, whole, said)
        return arrived

    def reduce_parts(
        self, need: Need, lies: Where, members: Sequence[int], terms: Iterable[int], whole: Part,
        said: Part,
    ) -> Where:  # fmt: skip
        """The sum of some parts on all members."""
        if len(members) == 1:
            return {device: lies[device] for device in members}
        size = self.reading.bytes_of(need.value, whole)
        task = self.add(
            TaskKind.REDUCE_VALUE, need, micro=self.micro, part=said, num_bytes=size,
            reads=[] if self.reading.is_early(need.value) else [lies[each] for each in terms],
            route=self.all_reduce(tuple(sorted(members))),
        )  # fmt: skip
        return {device: task.make(device, size) for device in members}

    def all_reduce(self, devices: tuple[int, ...]) -> Route:
        """All-reduce of a value: by hosts where there are several with several devices."""
        num_hosts = len({self.cluster.devices[device].host_index for device in devices})
        if 1 < num_hosts < len(devices):
            return _collective(ChannelKind.ALL_REDUCE_HIERARCHICAL, devices)
        return _collective(ChannelKind.ALL_REDUCE_RING, devices)

    # --- gradients ------------------------------------------------------------------------------

    def decision_of(self, parameter: int) -> Decision:
        """What is decided about a parameter."""
        return self.strategy.decisions[self.reading.parameter_group(parameter)]

    def note_last_readers(self, parameter: int) -> None:
        """An update waits for ops that read the parameter after its gradient is made, and where
        none is made, for the last op there that reads it."""
        gradient = self.reading.gradient(parameter)
        for reader in self.reading.readers(parameter):
            made = self.reading.graph.outputs[reader]
            if not made:
                continue
            is_last = reader == self.reading.finisher(parameter) > self.reading.maker[gradient]
            for device, buffer in self.values.get(made[0], {}).items():
                if is_last or (self.reading.has_axes and device not in self.values[gradient]):
                    self.last_read[parameter][device] = buffer

    def finish(self, parameter: int) -> None:
        """A micro-batch's gradient is made: keep it, add it up; after the last, update."""
        made = self.values[self.reading.gradient(parameter)]
        need = self.reading.gradient_need(parameter)
        if need is not None:
            if need not in self.converted:
                self.converted[need] = self.convert(need)
            made = dict(self.converted[need])
        if self.reading.sharded_axis(parameter) is None:
            self.share_alike_gradient(parameter, made)
        terms = self.shares.contributors(parameter, made)
        self.fresh[parameter] = {device: made[device] for device in terms}
        if self.shares.is_sliced(parameter) and self.scatters_by_micro(parameter):
            self.finish_slices(parameter)
            return
        for device, buffer in self.fresh[parameter].items():
            self.accumulate(parameter, device, buffer)
        if self.micro == self.num_micro - 1:
            self.synchronise(parameter)

    def share_alike_gradient(self, parameter: int, made: Where) -> None:
        """A device that computes nothing gets the gradient that others like it have."""
        layout = self.shares.parameter_layout(parameter)
        rings = self.shares.rings(parameter)
        alike: list[Sequence[int]] = []
        if self.shares.held_alike(parameter) == "everywhere":
            alike = [layout.devices]
        elif self.shares.held_alike(parameter) == "team" and rings and layout.has_equal_teams:
            alike = [team for team in layout.teams if set(team) & set(made)]
        for devices in alike:
            owner = next(device for device in devices if device in made)
            for device in devices:
                if device not in made:
                    size = self.reading.gradient_bytes(parameter)
                    reads = [made[owner]]
                    task = self.transfer(
                        TaskKind.PUSH, parameter, owner, device, size, reads, micro=self.micro
                    )
                    made[device] = task.make(device, size)

    def accumulate(self, parameter: int, device: int, fresh: Buffer) -> None:
        """Add to the gradient of earlier micro-batches, if there is one."""
        if device not in self.gradients[parameter]:
            self.gradients[parameter][device] = fresh
            return
        part = self.shares.part_held(parameter, device)
        size = self.reading.gradient_bytes(parameter) * part
        task = self.add(
            TaskKind.ACCUMULATE, parameter, device, micro=self.micro,
            reads=[fresh, *self.gradient_on(parameter, device)], num_bytes=3.0 * size,
        )  # fmt: skip
        self.follow(task)
        self.added[parameter][device] = task.make(device)

    def gradient_on(self, parameter: int, device: int) -> list[Buffer | None]:
        """A device's gradient, and that all has been added to it."""
        return [self.gradients[parameter].get(device), self.added[parameter].get(device)]

    def held_bytes(self, parameter: int, device: int) -> float:
        """Bytes of a parameter, or of its slice by the rules of its ops, on a device."""
        return self.reading.parameter_bytes(parameter) * self.shares.part_held(parameter, device)

    # --- updates --------------------------------------------------------------------------------

    def synchronise(self, parameter: int) -> None:
        """Aggregate a finished gradient and update the parameter."""
        if self.strategy.homes[parameter] != REPLICATED:
            self.serve(parameter, self.strategy.homes[parameter])
        elif self.shares.is_sliced(parameter):
            self.finish_slices(parameter)
        elif self.shares.rings(parameter):
            self.put_into_bucket(parameter)
        else:
            for device in self.decision_of(parameter).devices:
                self.update(parameter, device, self.gradient_on(parameter, device))

    def update(
        self,
        parameter: int,
        device: int,
        reads: Iterable[Buffer | None],
        num_bytes: float = 0.0,
    ) -> None:
        """The optimizer's step of a parameter, or of the part that a device has, if it has any."""
        units = 0
        axis = self.reading.sharded_axis(parameter)
        if axis is not None:
            layout = self.shares.parameter_layout(parameter)
            units = len(self.shares.units(layout, axis).get(device, range(0)))
            num_bytes = num_bytes or self.held_bytes(parameter, device)
            if not units:
                return
        task = self.add(
            TaskKind.UPDATE, parameter, device,
            reads=[*reads, self.last_read[parameter].get(device)],
            part=Part(0, units), num_bytes=num_bytes,
        )  # fmt: skip
        self.arrives_next[parameter][device] = task.make(device)

    def serve(self, parameter: int, home: int) -> None:
        """Push every gradient to the parameter's home, add and update there, pull."""
        size = self.reading.gradient_bytes(parameter)
        gradients = self.gradients[parameter]
        is_alike = self.shares.held_alike(parameter) == "everywhere"
        senders = self.senders(parameter, home)
        received: list[Buffer] = []
        for device in senders:
            if device != home:
                reads = self.gradient_on(parameter, device)
                push = self.transfer(TaskKind.PUSH, parameter, device, home, size, reads)
                received.append(push.make(home, size))
        terms: list[Buffer | None] = list(received)
        if home in senders:
            terms += self.gradient_on(parameter, home)
        if len(senders) > 1:
            num_bytes = (len(senders) + 1.0) * size
            added = self.add(TaskKind.SUM, parameter, home, reads=terms, num_bytes=num_bytes)
            terms = [added.make(home, size)]
        self.update(parameter, home, terms)
        done = self.arrives_next[parameter][home]
        for device in self.decision_of(parameter).devices:
            if device != home:
                # Its own ops must be done with the old weights.
                reads = [done, self.last_read[parameter].get(device)]
                if is_alike and device in gradients:
                    reads += self.gradient_on(parameter, device)
                whole = self.reading.parameter_bytes(parameter)
                pull = self.transfer(TaskKind.PULL, parameter, home, device, whole, reads)
                self.arrives_next[parameter][device] = pull.make(device)

    def senders(self, parameter: int, home: int) -> list[int]:
        """Devices whose gradients make up the sum at a parameter's home."""
        gradients = self.gradients[parameter]
        alike = self.shares.held_alike(parameter)
        layout = self.shares.parameter_layout(parameter)
        if alike == "device":
            return sorted(gradients)
        if alike == "everywhere":
            return [home] if home in gradients else sorted(gradients)[:1]
        if alike == "in team":
            team = next(team for team in layout.teams if set(team) & set(gradients))
            return [device for device in sorted(team) if device in gradients]
        return sorted(self.shares.first_of_teams(layout, gradients))

    # --- buckets --------------------------------------------------------------------------------

    def bucket_key(self, parameter: int) -> BucketKey:
        """The first group whose gradients may share a bucket with those of a parameter's group,
        and how they are added up."""

        def alike(group: int) -> tuple[object, ...]:
            decision = self.strategy.decisions[group]
            own = self.first_of_layer(group) if decision.sync == Sync.ZERO3 else None
            slices = decision.slices, decision.slice_groups
            return self.shares.layouts[group], decision.sync, slices, own

        mine = alike(self.reading.parameter_group(parameter))
        first = next(g for g in range(self.reading.num_groups) if alike(g) == mine)
        axis = self.reading.sharded_axis(parameter)
        order = ("device", "team", "in team")
        alike_in = order.index(self.shares.held_alike(parameter))
        return first, axis or BATCH, alike_in, self.reading.dtypes(parameter)

    def first_of_layer(self, group: int) -> int:
        """The first of the groups that are gathered together: neighbours in a layer, or outside of
        all of them in a model that has any, that are decided alike and in one chunk."""
        layers, decisions = layers_of(self.reading.graph), self.strategy.decisions
        while group > 0:
            one, other = decisions[group - 1], decisions[group]
            if (
                not layers.names
                or layers.of_group[group - 1] != layers.of_group[group]
                or self.shares.layouts[group - 1] != self.shares.layouts[group]
                or (one.sync, one.slices) != (other.sync, other.slices)
                or one.slice_groups != other.slice_groups
                or group in self.strategy.schedule.chunk_starts
            ):
                break
            group -= 1
        return group

    def is_full(self, bucket: list[int], *, is_first: bool = False) -> bool:
        """Whether a bucket is synchronised without waiting for more."""
        full_bytes = self.strategy.bucket_bytes
        if is_first and self.strategy.first_bucket_bytes:
            full_bytes = self.strategy.first_bucket_bytes
        return sum(map(self.reading.gradient_bytes, bucket)) >= full_bytes

    def put_into_bucket(self, parameter: int) -> None:
        """Synchronise a gradient together with others."""
        key = self.bucket_key(parameter)
        self.open.setdefault(key, []).append(parameter)
        if self.is_full(self.open[key], is_first=key not in self.closed):
            self.close_bucket(key)

    def close_bucket(self, key: BucketKey) -> None:
        """All-reduce, or reduce-scatter and all-gather, a bucket; update its parameters."""
        bucket = self.open.pop(key)
        self.closed.add(key)
        self.bucket_of |= dict.fromkeys(bucket, bucket[0])
        done: dict[int, list[Buffer | None]] = {}
        for ring in self.shares.rings(bucket[0]):
            for device, summed in self.add_up(bucket, ring).items():
                done.setdefault(device, []).extend(summed)
        for parameter in bucket:
            for device in self.decision_of(parameter).devices:
                self.update(parameter, device, done.get(device, []))

    def add_up(self, bucket: list[int], ring: Ring) -> dict[int, list[Buffer | None]]:
        """Add up a bucket's gradients on the devices of a ring.

        One tensor is synchronised where it lies; several are copied together on each device, and
        so is the part of one that the ring adds up.

        Returns:
            What an update on each device waits for and reads.
        """
        first, decision = bucket[0], self.decision_of(bucket[0])
        size = self.payload(bucket, ring)
        flat: Where = {}
        for device in ring.devices:
            is_part = device in self.gradients[first] and (
                self.shares.part_held(first, device) != ring.part
            )
            if len(bucket) > 1 or is_part:
                flat[device] = self.flatten(bucket, device, size)

        def lies(device: int) -> list[Buffer | None]:
            return [flat[device]] if device in flat else self.gradient_on(first, device)

        in_two = decision.sync == Sync.REDUCE_SCATTER_ALL_GATHER
        kind = TaskKind.REDUCE_SCATTER if in_two else TaskKind.ALL_REDUCE
        route = _first_route(decision, ring)
        given = [each for device in ring.devices for each in lies(device)]
        task = self.add(kind, first, reads=given, num_bytes=size, route=route)
        for device in ring.devices:
            if lies(device)[0] is None:  # it has no gradient of its own and receives one
                self.gradients[first][device] = task.make(device, size)
        done = task.make(-1)
        if in_two:
            given = [each for device in ring.devices for each in lies(device)]
            task = self.add(
                TaskKind.ALL_GATHER, first, reads=[done, *given], num_bytes=size,
                route=_second_route(decision, ring),
            )  # fmt: skip
            done = task.make(-1)
        return {device: [done, *lies(device)] for device in ring.devices}

    def payload(self, bucket: list[int], ring: Ring) -> float:
        """Bytes of a bucket's gradients that a ring adds up."""
        return sum(map(self.reading.gradient_bytes, bucket)) * ring.part

    def parameters(self, bucket: list[int], ring: Ring) -> float:
        """Bytes of a bucket's parameters that the devices of a ring have."""
        return sum(map(self.reading.parameter_bytes, bucket)) * ring.part

    def flatten(self, bucket: list[int], device: int, size: float) -> Buffer:
        """What a ring adds up of a device's gradients of a bucket, in one piece."""
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
        open_bucket: dict[BucketKey, list[int]] = {}
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

    def scatters_by_micro(self, parameter: int) -> bool:
        """Whether each micro-batch's gradients are reduced."""
        return self.decision_of(parameter).sync != Sync.ZERO1 and not self.strategy.gathers_once

    def begin_slices(self) -> None:
        """Forget what lay where in the step before."""
        # By bucket: when it was gathered last, which gradients are there, its slices, and by ring
        # when the last reduce-scatter is done.
        self.gathered_in: dict[int, tuple[int, bool]] = {}
        self.kept_whole: dict[tuple[int, bool], Where] = {}  # for all micro-batches of a pass
        self.present: dict[int, set[int]] = {}
        self.slice_on: dict[int, Where] = {}
        self.scattered: dict[tuple[int, Ring], Buffer] = {}
        self.added_up: dict[tuple[int, int], Buffer] = {}  # between slice groups, by device
        # By device, the last one last: first readers of gathers; what the reduce-scatters that it
        # took part in were given and left there, and that they are done.
        devices = range(self.cluster.num_devices)
        self.first_readers: dict[tuple[int, bool], list[Buffer]] = {}
        self.scatters: list[list[Scatter]] = [[] for _ in devices]
        # The same under stated turns, by device and what it goes on with: a chunk, and the pass.
        self.reader_lanes: dict[tuple[int, int, int], Lane[Buffer]] = {}
        self.scatter_lanes: dict[tuple[int, int, int], Lane[Scatter]] = {}

    def gather_parameters(self, op: int, is_backward: bool) -> bool:
        """Stage 3: gather the buckets that an op is the first of its pass to read; whether any."""
        any_gathered = False
        for parameter in self.reading.parameters_read[op]:
            bucket = self.sliced_buckets.get(parameter, [])
            now = self.micro, is_backward
            once = self.strategy.gathers_once
            if once and bucket and (bucket[0], is_backward) in self.kept_whole:
                self.arrived[parameter] |= self.kept_whole[bucket[0], is_backward]
                continue
            if (
                self.decision_of(parameter).sync != Sync.ZERO3
                or not bucket
                or self.gathered_in.get(bucket[0]) == now
            ):
                continue
            any_gathered = True
            readers = {op, *(reader for each in bucket for reader in self.reading.readers(each))}
            micros = range(self.num_micro) if once else [self.micro]
            runs_on = sorted(
                {d for reader in readers for m in micros for d in self.shares.of_op(reader, m)}
            )
            for ring in self.shares.rings(parameter):
                is_first = bucket[0] not in self.gathered_in
                self.gather_ring(runs_on, bucket, ring, is_first, is_backward)
            self.gathered_in[bucket[0]] = now
            if once:
                own = {ring.devices for ring in self.shares.rings(parameter)}
                self.kept_whole[bucket[0], is_backward] = {
                    device: self.arrived[parameter][device]
                    for devices in own
                    for device in devices
                    if device in runs_on
                }
        return any_gathered

    def gather_ring(
        self,
        readers: list[int],
        bucket: list[int],
        ring: Ring,
        is_first: bool,
        is_backward: bool,
    ) -> None:
        """Slices of a bucket on those devices of a ring that run any op that reads them.

        A gather may start when the first reader of the gather before the last one is done.
        """
        runs_on = [device for device in readers if device in ring.devices]
        if not runs_on:
            return
        updated: list[Buffer | None] = []
        if is_first:  # every slice is of the step before
            updated = [self.arrived[p].get(device) for p in bucket for device in ring.devices]
        earlier = [
            reader
            for device in runs_on
            for reader in self.readers_so_far(device, is_backward)[-2:-1]
        ]
        size = self.parameters(bucket, ring)
        task = self.add(
            TaskKind.GATHER_PARAMETERS, bucket[0], reads=[*updated, *earlier], micro=self.micro,
            num_bytes=size, route=_second_route(self.decision_of(bucket[0]), ring),
        )  # fmt: skip
        for device in runs_on:
            whole = task.make(device, size)
            for member in bucket:
                self.arrived[member][device] = whole

    def note_first_reader(self, op: int, is_backward: bool) -> None:
        """An op is the first reader of the latest gather."""
        made = self.reading.graph.outputs[op]
        if made:
            for device in self.shares.of_op(op, self.micro):
                self.readers_so_far(device, is_backward).append(self.values[made[0]][device])

    def readers_so_far(self, device: int, is_backward: bool) -> list[Buffer]:
        """The first readers of gathers that the next gather of a pass comes behind.

        A device that has all groups gathers in one row. One of a pipeline has other micro-batches
        between both passes of one: its first gathers for the backward pass come behind those of
        the first forward pass, and the later ones behind each other.
        """
        if self.strategy.schedule.turns and self.has_turns:
            assert self.work is not None
            key = device, self.chunk_of(device, self.group) or 0, int(self.work)
            return begun_lane(self.reader_lanes, key, self.turn(device))
        if not is_backward or self.has_all_groups(device):
            return self.first_readers.setdefault((device, False), [])
        if (device, True) not in self.first_readers:
            before = self.first_readers.get((device, False), [])
            self.first_readers[device, True] = list(before)
        return self.first_readers[device, True]

    def has_all_groups(self, device: int) -> bool:
        """Whether a device has a part in the decision of every group."""
        return all(device in decision.devices for decision in self.strategy.decisions)

    def finish_slices(self, parameter: int) -> None:
        """A gradient is there: scatter its bucket if it was the last one, and update after all."""
        bucket = self.sliced_buckets[parameter]
        present = self.present.setdefault(bucket[0], set())
        present.add(parameter)
        if len(present) == len(bucket):
            present.clear()
            flat = self.flatten_slices(bucket)
            for ring in self.shares.rings(parameter):
                self.scatter(bucket, ring, {d: flat[d] for d in ring.devices if d in flat})
            if self.micro == self.num_micro - 1:
                for ring in self.shares.whole_rings(parameter):
                    self.add_up_copies(bucket, self.shares.copies(parameter, ring), flat)
                for ring in self.shares.rings(parameter):
                    self.update_slices(bucket, ring, flat)

    def flatten_slices(self, bucket: list[int]) -> Where:
        """A bucket's gradients in one piece, on the devices that have some.

        In stages 2 and 3 this is done for every micro-batch, and a device goes on when all but its
        last reduce-scatter are done: one that ran ahead of its links would keep all gradients.
        """
        first, decision = bucket[0], self.decision_of(bucket[0])
        by_micro = self.scatters_by_micro(first)
        made = self.fresh if by_micro else self.gradients
        flat: Where = {}
        # An op with a rule may have made one of them on devices that made no other.
        for device in sorted({device for member in bucket for device in made[member]}):
            if len(bucket) == 1:
                flat[device] = made[first][device]
                if not by_micro:
                    continue
            ring = next(ring for ring in self.shares.rings(first) if device in ring.devices)
            size = self.payload(bucket, ring)
            reads: list[Buffer | None] = []
            in_lanes = bool(self.strategy.schedule.turns) and self.has_turns
            if by_micro and not in_lanes:
                reads += [each for earlier in self.scatters[device][-2:-1] for each in earlier]
            for member in bucket:
                reads.append(made[member].get(device))
                reads.append(None if by_micro else self.added[member].get(device))
            task = self.add(
                TaskKind.FLATTEN, first, device, reads=reads, micro=self.micro,
                num_bytes=2.0 * size if len(bucket) > 1 else 0.0,
            )  # fmt: skip
            self.follow(task)
            if by_micro and in_lanes:  # now its turn is known
                before = self.scatters_so_far(first, device, task.turn)[-2:-1]
                task.reads += [each for left in before for each in left if each is not None]
            if len(bucket) > 1:
                flat[device] = task.make(device, size)
            if (
                by_micro
                and decision.sync == Sync.ZERO2
                and self.has_all_groups(device)
                and not in_lanes
            ):
                # The next micro-batch does not begin while this one waits for its scatters: it
                # would keep activations of both. Stage 3 has its gathers for that.
                going_on = task.make(device)
                for member in bucket:
                    self.arrived[member][device] = going_on
        return flat

    def scatters_so_far(self, first: int, device: int, turn: int | None = None) -> list[Scatter]:
        """The reduce-scatters of a device that the next one of a bucket comes behind.

        Args:
            first: First parameter of the bucket.
            device: The device.
            turn: Turn that begins, if one does.
        """
        if not self.strategy.schedule.turns or not self.has_turns:
            return self.scatters[device]
        group = self.reading.parameter_group(first)
        key = device, self.chunk_of(device, group) or 0, 0
        if turn is None:
            return self.scatter_lanes.setdefault(key, Lane(-1, [])).entries
        return begun_lane(self.scatter_lanes, key, turn)

    def scatter(self, bucket: list[int], ring: Ring, flat: Where) -> None:
        """Reduce-scatter a bucket's gradients from the devices of a ring that have some."""
        first, decision = bucket[0], self.decision_of(bucket[0])
        by_micro = self.scatters_by_micro(first)
        size = self.payload(bucket, ring)
        slices = self.slice_on.setdefault(first, {})
        reads: list[Buffer | None] = [self.scattered.get((first, ring)), *flat.values()]
        for device in ring.devices:
            if not by_micro:
                reads.append(self.added[first].get(device) if len(bucket) == 1 else None)
                continue
            reads.append(slices.get(device))
            if device not in flat and self.scatters_so_far(first, device):
                # It makes no gradient that could wait for what the last one left here.
                reads.append(self.scatters_so_far(first, device)[-1].received)
        task = self.add(
            TaskKind.REDUCE_SCATTER, first, reads=reads, micro=self.micro, num_bytes=size,
            route=_first_route(decision, ring),
        )  # fmt: skip
        received: Where = {}
        for device, part in self.shares.slices(first, ring).items():
            others = len(flat) - (device in flat)
            if not flat and not by_micro:
                others = 1  # zeros, to which other slice groups add theirs
            received[device] = task.make(device, others * part * size)
            if by_micro and device not in slices:
                slices[device] = task.make(device, part * size)
            elif not by_micro and device not in flat:
                # Elsewhere it is added to the own slice of the flat gradients, and let go.
                slices[device] = received[device]
        self.scattered[first, ring] = done = task.make(-1)
        if by_micro:
            for device in ring.devices:
                left = Scatter(done, received.get(device), flat.get(device))
                self.scatters_so_far(first, device).append(left)

    def add_up_copies(self, bucket: list[int], copies: list[Ring], flat: Where) -> None:
        """Add up the slices of all slice groups, each over the devices that own it."""
        if len(copies) == 1:
            return
        first = bucket[0]
        for alike in zip(*(sorted(copy.devices) for copy in copies), strict=True):
            part = self.shares.slices(first, copies[0]).get(alike[0], 0.0)
            if not part:
                continue
            reads: list[Buffer | None] = []
            for device, copy in zip(alike, copies, strict=True):
                reads += [self.scattered[first, copy], self.slice_on[first].get(device)]
                reads.append(None if self.scatters_by_micro(first) else flat.get(device))
            devices = tuple(sorted(alike))
            hosts = {self.cluster.host_of[device] for device in devices}
            task = self.add(
                TaskKind.ALL_REDUCE, first, reads=reads, micro=self.micro,
                num_bytes=part * self.payload(bucket, copies[0]),
                route=_collective(
                    ChannelKind.ALL_REDUCE_HIERARCHICAL
                    if 1 < len(hosts) < len(devices)
                    else ChannelKind.ALL_REDUCE_RING,
                    devices,
                ),
            )  # fmt: skip
            added = task.make(-1)
            self.added_up |= {(first, device): added for device in alike}

    def update_slices(self, bucket: list[int], ring: Ring, flat: Where) -> None:
        """Step the slices; in stages 1 and 2 gather the parameters."""
        first, decision = bucket[0], self.decision_of(bucket[0])
        parts = self.shares.slices(first, ring)
        for parameter in bucket:
            for device, part in parts.items():
                reads: list[Buffer | None] = [
                    self.added_up.get((first, device), self.scattered[first, ring])
                ]
                reads.append(self.slice_on[first].get(device))
                if not self.scatters_by_micro(first):
                    reads.append(flat.get(device))
                self.update(parameter, device, reads, part * self.parameters([parameter], ring))
        if decision.sync == Sync.ZERO3:
            return
        done: list[Buffer | None] = []
        for parameter in bucket:
            done += [self.arrives_next[parameter].get(device) for device in parts]
            # Its own ops must be done with the old weights.
            done += [self.last_read[parameter].get(device) for device in ring.devices]
        task = self.add(
            TaskKind.GATHER_PARAMETERS, first, reads=done, num_bytes=self.parameters(bucket, ring),
            route=_second_route(decision, ring),
        )  # fmt: skip
        whole = task.make(-1)
        for parameter in bucket:
            self.arrives_next[parameter] |= dict.fromkeys(ring.devices, whole)

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
        is_followed = any(
            other > op
            and self.reading.group[other] in self.chunks[task.device][chunk]
            and (self.pass_of(other) == Pass.WEIGHTS) == (self.work == Pass.WEIGHTS)
            and task.device in self.shares.of_op(other, self.micro)
            for other in reversed(self.reading.ops)
        )
        if not is_followed and (task.device, chunk, self.number, self.micro) in self.entered:
            self.tokens[task.device, chunk][-1].append(task.make(task.device))


def _collective(
    kind: ChannelKind, devices: tuple[int, ...], slices: tuple[int, ...] = ()
) -> Route:
    """A collective; only where each member owns a slice it matters how large."""
    if kind not in (ChannelKind.REDUCE_SCATTER, ChannelKind.ALL_GATHER):
        return Route(kind, devices)
    weights = slices or (1,) * len(devices)
    return Route(kind, devices, tuple(weight / sum(weights) for weight in weights))


def _first_route(decision: Decision, ring: Ring) -> Route:
    """How a ring aggregates gradients."""
    # Slices by rules of ops have no server: theirs would have nothing to bring together.
    if decision.sync in (Sync.RING, Sync.PARAMETER_SERVER):
        return _collective(ChannelKind.ALL_REDUCE_RING, ring.devices)
    if decision.sync == Sync.HIERARCHICAL:
        return _collective(ChannelKind.ALL_REDUCE_HIERARCHICAL, ring.devices)
    slices = slice_weights(decision, ring.devices)
    return _collective(ChannelKind.REDUCE_SCATTER, ring.devices, slices)


def _second_route(decision: Decision, ring: Ring) -> Route:
    """How a ring's slices become whole again."""
    slices = slice_weights(decision, ring.devices)
    return _collective(ChannelKind.ALL_GATHER, ring.devices, slices)


# --- what stays for the whole step --------------------------------------------------------------


def resident_bytes(reading: Reading, shares: Shares) -> list[float]:
    """Parameters, optimizer state, buffers, batch, and the largest workspace of a kernel."""
    found = []
    for device in range(shares.num_devices):
        parameters = reading.parameter.values()
        kept = sum(_kept_of(reading, shares, parameter, device) for parameter in parameters)
        beside = [_workspace(reading, shares, parameter, device) for parameter in parameters]
        found.append(kept + max(beside, default=0.0) + _inputs_kept(reading, shares, device))
    return found


def _kept_of(reading: Reading, shares: Shares, parameter: int, device: int) -> float:
    """Bytes of a parameter and of the optimizer's state of it on a device."""
    decision = shares.strategy.decisions[reading.parameter_group(parameter)]
    home = shares.strategy.homes[parameter]
    part = state = shares.part_held(parameter, device)
    if shares.is_sliced(parameter):
        state = sum(
            ring.part * shares.slices(parameter, ring).get(device, 0.0)
            for ring in shares.rings(parameter)
        )
        part = state if decision.sync == Sync.ZERO3 else part
    elif home != REPLICATED:  # the state is the server's, with a copy if it is no replica
        part, state = max(part, float(device == home)), float(device == home)
    ratio = reading.graph.optimizer_state_ratio
    return reading.parameter_bytes(parameter) * (part + ratio * state)


def _workspace(reading: Reading, shares: Shares, parameter: int, device: int) -> float:
    """Bytes that a kernel needs beside a parameter that it puts into another order."""
    kinds = {reading.graph.ops[op].kind for op in reading.readers(parameter)}
    if not kinds & REORDERS_WEIGHTS:
        return 0.0
    return reading.parameter_bytes(parameter) * shares.part_held(parameter, device)


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
    batch = graph.batch
    batch_bytes = float(sum(graph.tensor_bytes[tensor] for tensor in batch))
    if reading.reads_every_sample():
        return size + batch_bytes
    return size + batch_bytes * shares.most_samples(device) / graph.batch_size
