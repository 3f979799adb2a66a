"""The timeline of a simulated step: all tasks of devices and channels, with readable names.

``Timeline`` joins a program and its simulated times with the cluster and the graph. It has a lane
for every device's compute stream and every channel, a name and a module for every task, busy
seconds, memory over time, and the critical path.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster, Sends
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import Channel, ChannelKind, communicators
from heterog.lowering.program import (
    BUCKET_KINDS,
    FIRST_LINK_KIND,
    OP_KINDS,
    RECUT_KINDS,
    SLOT_KINDS,
    FloatArray,
    IntArray,
    Program,
    TaskKind,
    op_row,
)
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.memo import kept
from heterog.simulator.memory import buffer_lives, kept_values

# Two times are the same instant if they differ by less than this share of the step: seconds are
# summed in different orders along different paths.
_SAME_INSTANT = 1e-9

_VERBS = {
    TaskKind.RECOMPUTE: "recompute",
    TaskKind.REMAKE: "make again",
    TaskKind.ACCUMULATE: "accumulate",
    TaskKind.FLATTEN: "flatten",
    TaskKind.SPLIT: "split",
    TaskKind.CONCAT: "concat",
    TaskKind.ENCODE: "encode",
    TaskKind.DECODE: "decode",
    TaskKind.SUM: "sum",
    TaskKind.DECODE_SUM: "decode",
    TaskKind.UPDATE: "update",
    TaskKind.SEND: "send",
    TaskKind.PUSH: "push",
    TaskKind.PULL: "pull",
    TaskKind.REDUCE_VALUE: "all-reduce",
    TaskKind.GATHER_VALUE: "all-gather",
    TaskKind.ALL_REDUCE: "all-reduce",
    TaskKind.REDUCE_SCATTER: "reduce-scatter",
    TaskKind.ALL_GATHER: "all-gather",
    TaskKind.GATHER_PARAMETERS: "gather parameters",
    TaskKind.SCATTER_VALUE: "reduce-scatter",
    TaskKind.EXCHANGE_VALUE: "all-to-all",
    TaskKind.GATHER_ROWS: "all-gather",
}
_COLLECTIVES = {
    ChannelKind.ALL_REDUCE_RING: "ring all-reduce",
    ChannelKind.ALL_REDUCE_HIERARCHICAL: "hierarchical all-reduce",
    ChannelKind.REDUCE_SCATTER: "reduce-scatter",
    ChannelKind.ALL_GATHER: "all-gather",
    ChannelKind.ALL_TO_ALL: "all-to-all",
}


class Cause(StrEnum):
    """The reason why a task on the critical path did not start earlier."""

    BEGIN = "begin"
    """None: it is the first task."""
    DEPENDENCY = "dependency"
    """Its last input was made just before."""
    STREAM = "stream"
    """Its device ran another task."""
    SEND = "send"
    """Its device sent a value; if sends block, a device computes nothing meanwhile."""
    LINK = "link"
    """Its links carried another message."""
    COMMUNICATOR = "communicator"
    """Its devices ran another collective; a communicator runs one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of the timeline.

    Attributes:
        name: ``"A:0 V100-16GB compute"``, ``"A:0 -> B:0"``, ``"ring all-reduce A:0 B:0"`` or,
            for a communicator that runs several kinds, ``"collectives A:0 B:0"``.
        device: Index of the device whose compute stream it is, -1 for communication.
        channel: Number of the channel in the program, the lowest one for a communicator; -1 for a
            compute stream.
        tasks: Its tasks, by start.
    """

    name: str
    device: int
    channel: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """One task on the critical path.

    Attributes:
        task: Number of the task.
        cause: Reason why it did not start earlier.
        wait_s: Seconds of the path before its start in which no task of the path runs.
        seconds: Seconds of the path in the task: to its end, or to the start of the next task
            if that is earlier (a transfer leaves its links before it arrives).
    """

    task: int
    cause: Cause
    wait_s: float
    seconds: float


class Timeline:
    """A simulated step (or several, without step barrier), ready to be shown.

    Args:
        program: The tasks.
        start: Start of each task, in seconds from the begin.  # [num_tasks]
        finish: End of each task, in seconds from the begin.  # [num_tasks]
        cluster: The cluster that the program was lowered for.
        graph: The graph that it was lowered from.
    """

    def __init__(
        self,
        program: Program,
        start: FloatArray,
        finish: FloatArray,
        cluster: Cluster,
        graph: OpGraph,
    ) -> None:
        assert len(start) == len(finish) == program.num_tasks
        assert program.num_devices == cluster.num_devices
        self.program = program
        self.start = start
        self.finish = finish
        self.cluster = cluster
        self.graph = graph
        self._tables: GraphTables = graph_tables(graph, program.op_rules, program.blocks)
        # As lists, because single elements are looked up often.
        self._kind: list[int] = program.kind.tolist()
        self._subject: list[int] = program.subject.tolist()
        self._bucket_size = np.bincount(
            program.bucket[program.bucket >= 0], minlength=len(program.bucket)
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds from the start to the last finish."""
        return float(self.finish.max(initial=0.0))

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Compute streams in device order, then used pairs and communicators in channel order."""
        order = np.lexsort((np.arange(self.program.num_tasks), self.finish, self.start))
        on_device: list[list[int]] = [[] for _ in self.cluster.devices]
        on_channel: dict[int, list[int]] = {}
        for task in order.tolist():
            if self.is_compute(task):
                on_device[self.program.device[task]].append(task)
            else:
                channel = int(self._communicator[self.program.channel[task]])
                on_channel.setdefault(channel, []).append(task)
        streams = [
            Lane(
                name=f"{device.name} {device.type.name} compute",
                device=index,
                channel=-1,
                tasks=tuple(on_device[index]),
            )
            for index, device in enumerate(self.cluster.devices)
        ]
        channels = [
            Lane(
                name=self._lane_name(on_channel[number]),
                device=-1,
                channel=number,
                tasks=tuple(on_channel[number]),
            )
            for number in sorted(on_channel)
        ]
        return (*streams, *channels)

    @cached_property
    def busy_s(self) -> FloatArray:
        """Seconds in which each device's compute stream runs a task.  # [num_devices]"""
        compute = self.program.kind < FIRST_LINK_KIND
        seconds, device = (self.finish - self.start)[compute], self.program.device[compute]
        return np.bincount(device, seconds, self.cluster.num_devices).astype(np.float64)

    def is_compute(self, task: int) -> bool:
        """Whether a task runs on a compute stream, not on links."""
        return self._kind[task] < FIRST_LINK_KIND

    def name(self, task: int) -> str:
        """Description of a task: ``"mm encoder.0.linear forward"``, ``"send ... A:0 -> B:1"``."""
        kind, subject = TaskKind(self._kind[task]), self._subject[task]
        if kind in OP_KINDS:
            return f"{self._op_name(self.op(task))} {self.kind(task)}"
        is_bucket = kind in BUCKET_KINDS or (
            kind in (TaskKind.ENCODE, TaskKind.DECODE_SUM) and self.program.bucket[subject] >= 0
        )
        if self._is_about_value(task) or kind in RECUT_KINDS:
            words = f"{_VERBS[kind]} {self._op_name(self.op(task))}"
        elif is_bucket and self._bucket_size[subject] > 1:
            words = f"{_VERBS[kind]} {self._bucket_size[subject]} tensors"
        else:
            words = f"{_VERBS[kind]} {self._parameter_name(subject)}"
        if kind in (TaskKind.SEND, TaskKind.PUSH, TaskKind.PULL):
            channel = self.program.channels[self.program.channel[task]]
            words += f" {self._channel_name(channel)}"
        return words

    def kind(self, task: int) -> str:
        """Short kind of a task: the phase of an op, else ``"send"``, ``"update"``, ..."""
        kind = TaskKind(self._kind[task])
        return self.phase(task) if kind == TaskKind.COMPUTE else _VERBS[kind]

    def module(self, task: int) -> str:
        """Path of the module of a task; for a bucket, that of its first parameter."""
        return self.graph.ops[self.op(task)].module

    def phase(self, task: int) -> str:
        """Phase of the op that a task runs or whose value it moves, else update."""
        return self.graph.ops[self.op(task)].phase.name.lower()

    def makes_gradient_whole(self, task: int) -> bool:
        """Whether a task completes a parameter's gradient that ops made in parts."""
        if not self._is_about_value(task):
            return False
        return self._subject[task] in self._gradient_slots

    def _is_about_value(self, task: int) -> bool:
        """Whether the subject of a task is a slot."""
        return TaskKind(self._kind[task]) in SLOT_KINDS or self.program.encodes_value(task)

    @cached_property
    def _gradient_slots(self) -> frozenset[int]:
        return frozenset(self._tables.gradient_slot[self._tables.gradient_slot >= 0].tolist())

    def op(self, task: int) -> int:
        """The graph op that a task runs, whose value it moves, or whose parameter it updates."""
        kind = TaskKind(self._kind[task])
        if self.program.encodes_value(task):
            kind = TaskKind.SEND
        row = op_row(kind, self._subject[task], self._tables)
        if row is None:
            return self.graph.updates[self._subject[task]][0]
        return int(self._tables.op_id[row])

    def _op_name(self, op: int) -> str:
        kind = self.graph.ops[op].kind.partition(".")[0]
        return " ".join(filter(None, (kind, self.graph.ops[op].module)))

    def _parameter_name(self, parameter: int) -> str:
        tensor = int(self._tables.parameter_tensor[parameter])
        return self.graph.tensors[tensor].name or f"tensor {tensor}"

    def _channel_name(self, channel: Channel) -> str:
        names = [self.cluster.devices[device].name for device in channel.devices]
        if channel.kind == ChannelKind.POINT_TO_POINT:
            return " -> ".join(names)
        return f"{_COLLECTIVES[channel.kind]} {' '.join(names)}"

    def _lane_name(self, tasks: list[int]) -> str:
        """Name of the lane of tasks on a channel, or on several channels of a communicator."""
        used = {int(self.program.channel[task]) for task in tasks}
        channel = self.program.channels[min(used)]
        if len(used) == 1:
            return self._channel_name(channel)
        return f"collectives {' '.join(self.cluster.devices[d].name for d in channel.devices)}"

    @cached_property
    def _lives(self) -> tuple[FloatArray, FloatArray]:
        """Start and end of each buffer's life.  # [num_buffers] each"""
        micro = int(self.program.micro.max(initial=0)) + 1
        kept = kept_values(self.graph, self._tables, self.cluster.execution, micro)
        return buffer_lives(self.program, self.start, self.finish, self._tables, kept)

    def memory(self, device: int) -> tuple[FloatArray, FloatArray]:
        """(Times, bytes in use from each time to the next) of a device; see ``buffer_lives``."""
        program, (begin, end) = self.program, self._lives
        mine = (program.buffer_device == device) & (program.buffer_bytes > 0.0)
        sizes = program.buffer_bytes[mine]
        times = np.concatenate([begin[mine], end[mine]])
        changes = np.concatenate([sizes, -sizes])
        order = np.lexsort((changes, times))
        times, changes = times[order], changes[order]
        totals = program.resident_bytes[device] + np.cumsum(changes)
        return (
            np.concatenate([[0.0], times]),
            np.concatenate([[program.resident_bytes[device]], totals]),
        )

    @cached_property
    def critical_path(self) -> tuple[PathStep, ...]:
        """The chain of tasks that determines the step's time, first task first.

        It is traced back from the last finish. The predecessor of a task is the maker of its last
        input or, if the input was ready before the task started, the task that occupied its stream
        or links until then. The waits and seconds of all tasks add up to the step.
        """
        if self.program.num_tasks == 0:
            return ()
        task = int(np.argmax(self.finish))
        chain: list[tuple[int, Cause, float]] = []
        until = self.seconds
        spent: list[float] = []
        while task >= 0:
            assert len(chain) < self.program.num_tasks, "the critical path runs in a circle"
            before, cause = self._predecessor(task)
            spent.append(until - float(self.start[task]))
            end = min(float(self.finish[before]), float(self.start[task])) if before >= 0 else 0.0
            chain.append((task, cause, float(self.start[task]) - end))
            task, until = before, end
        return tuple(
            PathStep(task=task, cause=cause, wait_s=wait_s, seconds=seconds)
            for (task, cause, wait_s), seconds in zip(
                reversed(chain), reversed(spent), strict=True
            )
        )

    def _predecessor(self, task: int) -> tuple[int, Cause]:
        """The task that the start of ``task`` waited for, -1 if none, and the reason."""
        start = float(self.start[task])
        tolerance = _SAME_INSTANT * self.seconds
        needed = self.program.dependencies(task)
        last = max(needed, key=lambda each: (self.finish[each], each), default=-1)
        if last >= 0 and self.finish[last] >= start - tolerance:
            return last, Cause.DEPENDENCY
        if self.is_compute(task):
            other, cause = self._before_on_stream[task], Cause.STREAM
            sent = self._sent_until(task, start, tolerance)
            if sent >= 0:
                return sent, Cause.SEND
        else:
            other, cause = self._before_on_links(task, start, tolerance), Cause.LINK
            channels = self._communicator[self.program.channel[[task, other]]]
            if other >= 0 and channels[0] == channels[1] and self._is_collective(task):
                cause = Cause.COMMUNICATOR
        if other >= 0 and (last < 0 or self.finish[other] >= self.finish[last]):
            return other, cause
        return last, Cause.DEPENDENCY if last >= 0 else Cause.BEGIN

    @cached_property
    def _before_on_stream(self) -> IntArray:
        """The task before each compute task on its device's stream, -1 if none."""
        before = np.full(self.program.num_tasks, -1, np.int32)
        for lane in self.lanes[: self.cluster.num_devices]:
            before[list(lane.tasks[1:])] = lane.tasks[:-1]
        return before

    def _sent_until(self, task: int, start: float, tolerance: float) -> int:
        """The task that sent a value of a task's device until the task started, -1 if none."""
        if self.cluster.sends != Sends.BLOCKING:
            return -1
        links = self._link_tasks
        is_own = self._sender[links] == self.program.device[task]
        ended = np.abs(self.finish[links] - start) <= tolerance
        found = links[is_own & ended & (self.start[links] < start)]
        return int(found[-1]) if len(found) else -1

    @cached_property
    def _sender(self) -> IntArray:
        """The device that sends a value, by task; -1 for other tasks."""
        sources = np.array([channel.devices[0] for channel in self.program.channels], np.int32)
        is_send = self.program.kind == TaskKind.SEND
        return np.where(is_send, sources[self.program.channel], -1).astype(np.int32)

    def _before_on_links(self, task: int, start: float, tolerance: float) -> int:
        """The communication that kept links or the communicator from a task, -1 if none.

        It is one that ended when the task started, else the last started one that was under way
        (its links come free before its latency has passed, at a time that the schedule does not
        contain), else the one that ended last before.
        """
        links = self._link_tasks
        channels = self.program.channel[links]
        begin, end = self.start[links], self.finish[links]
        earlier = (begin < start) | ((begin == start) & (links < task))
        candidate = earlier & self._sharing(int(self.program.channel[task]))[channels]
        touching = candidate & (np.abs(end - start) <= tolerance)
        under_way = candidate & (end > start + tolerance)
        past = candidate & (end < start - tolerance)
        if touching.any():
            return int(links[touching][-1])
        if under_way.any():
            found = links[under_way]
            return int(found[np.lexsort((found, self.start[found]))[-1]])
        if past.any():
            found = links[past]
            return int(found[np.lexsort((found, self.finish[found]))[-1]])
        return -1

    @cached_property
    def _link_tasks(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.program.kind >= FIRST_LINK_KIND)

    @kept
    def _sharing(self, channel: int) -> npt.NDArray[np.bool_]:
        """Whether each channel shares a link or its communicator with a given channel.

        It is computed for one channel at a time: a hundred devices have ten thousand channels, and
        the critical path has only a few.  # [num_channels]
        """
        uses, communicator = self._links_of_channels, self._communicator
        found = (uses[:, uses[channel]]).any(axis=1) | (communicator == communicator[channel])
        return np.asarray(found, np.bool_)

    @cached_property
    def _links_of_channels(self) -> npt.NDArray[np.bool_]:
        """Whether each channel in use loads each link.  # [num_channels, num_resources]"""
        num_channels = len(self.program.channels)
        uses = np.zeros((num_channels, len(self.cluster.resources)), np.bool_)
        for number in np.unique(self.program.channel[self._link_tasks]):
            uses[number, list(self.program.channels[number].traffic())] = True
        return uses

    @cached_property
    def _communicator(self) -> IntArray:
        """The first channel of each channel's communicator.  # [num_channels]"""
        return communicators(self.program.channels)

    def _is_collective(self, task: int) -> bool:
        kind = self.program.channels[int(self.program.channel[task])].kind
        return bool(kind != ChannelKind.POINT_TO_POINT)
