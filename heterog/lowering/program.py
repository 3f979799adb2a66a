"""A program: a lowered strategy, as arrays of tasks on a cluster.

Tasks are numbered in program order, which is a topological order: a task reads only buffers that
earlier tasks make. A *buffer* is a piece of memory on one device (or a token of no bytes that only
orders tasks); task ``t`` makes the buffers ``buffer_start[t] : buffer_start[t + 1]`` and reads
``read_buffer[read_start[t] : read_start[t + 1]]``. A task depends on the makers of the buffers it
reads, and a buffer lives until its last reader is done.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heterog.graph.placement import OpRules
from heterog.lowering.channels import Channel
from heterog.modes.mode import OF_VALUES, MessageCodec, MessageRule

if TYPE_CHECKING:
    from heterog.lowering.tables import GraphTables

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


class TaskKind(IntEnum):
    """The kind of a task; ``subject`` is the index of the object it works on.

    Up to ``UPDATE`` tasks run on a device's compute stream, the others on links.
    """

    COMPUTE = 0  # an op; subject: index among the compute ops
    RECOMPUTE = 1  # an op once more, before a backward op reads its result; subject as COMPUTE
    # An op once more on a device that reads its result (``keeping``); subject as COMPUTE.
    REMAKE = 2
    ACCUMULATE = 3  # adds a micro-batch's gradient; subject: parameter
    FLATTEN = 4  # copies gradients into a bucket; subject: bucket
    SPLIT = 5  # cuts out the samples that another device needs; subject: slot
    CONCAT = 6  # joins parts from several devices; subject: slot
    ENCODE = 7  # makes the message of the next transfer or collective, whose subject it has
    DECODE = 8  # makes a value from its message; subject: slot
    SUM = 9  # adds pushed gradients on a server; subject: parameter
    DECODE_SUM = 10  # makes a gradient, sum of gradients or parameter from messages; subject: same
    UPDATE = 11  # the optimizer step; subject: parameter
    SEND = 12  # moves (part of) a value; subject: slot
    PUSH = 13  # gradient to its server; subject: parameter
    PULL = 14  # new parameter from its server; subject: parameter
    REDUCE_VALUE = 15  # all-reduce of a partial value; subject: slot
    GATHER_VALUE = 16  # all-gather of a split value; subject: slot
    ALL_REDUCE = 17  # of a gradient or bucket; subject: bucket
    REDUCE_SCATTER = 18  # subject: bucket
    ALL_GATHER = 19  # of a gradient; subject: bucket
    GATHER_PARAMETERS = 20  # all-gather of the parameters of a bucket, under ZeRO
    SCATTER_VALUE = 21  # reduce-scatter of a partial value, right after its op; subject: value
    EXCHANGE_VALUE = 22  # all-to-all of a split value, right after its op; subject: value
    GATHER_ROWS = 23  # all-gather of one number per row of a split value; subject: value


FIRST_LINK_KIND = int(TaskKind.SEND)
FIRST_FREE_KIND = int(TaskKind.SUM)
"""Compute-stream tasks from here on run whenever the stream would otherwise wait; earlier kinds
keep program order on their device, as kernels on one CUDA stream do."""
LAST_OP_KIND = int(TaskKind.REMAKE)
"""Tasks up to here run an op; their subject is its index among the compute ops."""
OP_KINDS = frozenset({TaskKind.COMPUTE, TaskKind.RECOMPUTE, TaskKind.REMAKE})
"""Tasks that run an op; subject: its index among the compute ops."""
SLOT_KINDS = frozenset(
    {
        *(TaskKind.SPLIT, TaskKind.CONCAT, TaskKind.DECODE, TaskKind.SEND),
        *(TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE),
    }
)
"""Tasks that bring a value to its readers' devices, in the form that they need; subject: slot."""
BUCKET_KINDS = frozenset(
    {
        *(TaskKind.FLATTEN, TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER),
        *(TaskKind.ALL_GATHER, TaskKind.GATHER_PARAMETERS),
    }
)
"""Tasks about gradients or parameters that travel together; subject: bucket."""
RECUT_KINDS = frozenset({TaskKind.SCATTER_VALUE, TaskKind.EXCHANGE_VALUE, TaskKind.GATHER_ROWS})
"""Tasks of a team right after an op, which change the cut of its output; subject: value."""


def op_row(kind: TaskKind, subject: int, tables: "GraphTables") -> int | None:
    """Row of the compute op that a task runs or whose value it moves; ``None`` for others."""
    if kind in OP_KINDS:
        return subject
    if kind in RECUT_KINDS:
        return int(tables.value_op[subject])
    return int(tables.value_op[tables.slot_value[subject]]) if kind in SLOT_KINDS else None


_ADDED = {
    TaskKind.ENCODE: 106,
    TaskKind.DECODE: 107,
    TaskKind.DECODE_SUM: 109,
    TaskKind.REMAKE: 110,
    TaskKind.GATHER_ROWS: 111,
}
_FIRST = [kind for kind in TaskKind if kind not in _ADDED]
_IN_HASH = np.array([_ADDED.get(kind) or _FIRST.index(kind) for kind in TaskKind], np.uint8)
"""Number of each kind in hashes: older kinds keep theirs, so plans' hashes do too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Tasks of one or more training steps on a cluster, in arrays.

    Attributes:
        host_of: Host of each device of the cluster.
        num_steps: Number of unrolled training steps (1 with a step barrier).
        kind: ``TaskKind`` of each task.  # [num_tasks] uint8
        subject: Index of the object that the task works on; see ``TaskKind``.  # [num_tasks]
        device: Device whose stream runs a compute task; destination of a transfer; -1 for
            collectives.  # [num_tasks]
        micro: Number of the micro-batch.  # [num_tasks]
        turn: For a compute task, the turn of its device to which it belongs; tasks of a turn keep
            program order.  # [num_tasks]
        samples: Number of samples that an op computes on (for an op with a rule, the samples of
            its team), or of the value that a task moves.  # [num_tasks]
        units: Number of units that an op computes on along its rule's axis, or of the value that
            a task moves, or of the parameter that it updates, if these are cut along an axis;
            otherwise 0.  # [num_tasks]
        channel: Index into ``channels``; -1 for compute tasks.  # [num_tasks]
        num_bytes: Payload of communication; bytes moved by copies and sums; for an update, bytes
            of the slice of the parameter that it updates, 0 for all of it.  # [num_tasks]
        read_start: First entry of each task in ``read_buffer``.  # [num_tasks + 1]
        read_buffer: Buffers that tasks read.  # [num_reads]
        buffer_start: First buffer that each task makes.  # [num_tasks + 1]
        buffer_device: Device that holds the buffer, -1 for tokens.  # [num_buffers]
        buffer_bytes: Size of each buffer.  # [num_buffers]
        bucket: Bucket in which each parameter is synchronised, -1 if none.  # [num_parameters]
        resident_bytes: Bytes of parameters, optimizer state, buffers, workspace and batch on each
            device.  # [num_devices]
        channels: Channels that tasks refer to.
        is_in_turn: Whether a device finishes a turn before it begins the next; otherwise it takes
            the earliest turn that can go on.
        op_rules: Rules of the strategy; subjects are numbered in the graph's tables under them.
        blocks: Blocks of the strategy; the numbering of subjects depends on them, too.
        codec: 1 + index into ``codecs`` of the rule by which a task encodes, moves or decodes, 0
            for none; empty if the strategy has no codecs.  # [num_tasks]
        codecs: Codec rules of the strategy.
    """

    host_of: tuple[int, ...]
    num_steps: int
    kind: npt.NDArray[np.uint8]
    subject: IntArray
    device: IntArray
    micro: IntArray
    turn: IntArray
    samples: IntArray
    units: IntArray
    channel: IntArray
    num_bytes: FloatArray
    read_start: IntArray
    read_buffer: IntArray
    buffer_start: IntArray
    buffer_device: IntArray
    buffer_bytes: FloatArray
    bucket: IntArray
    resident_bytes: FloatArray
    channels: tuple[Channel, ...]
    is_in_turn: bool = False
    op_rules: OpRules = ()
    blocks: tuple[int, ...] = ()
    codec: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    codecs: tuple[MessageRule, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return len(self.host_of)

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.kind)

    def codec_of(self, task: int) -> MessageCodec | None:
        """Codec of the message of a task; ``None`` if it has none."""
        number = int(self.codec[task]) if len(self.codec) else 0
        return self.codecs[number - 1].codec if number else None

    def encodes_value(self, task: int) -> bool:
        """Whether a task encodes a value, not a gradient or parameter."""
        if self.kind[task] != TaskKind.ENCODE:
            return False
        return self.codecs[int(self.codec[task]) - 1].traffic in OF_VALUES

    @cached_property
    def buffer_maker(self) -> IntArray:
        """Task that makes each buffer.  # [num_buffers]"""
        counts = np.diff(self.buffer_start)
        return np.repeat(np.arange(self.num_tasks, dtype=np.int32), counts)

    @cached_property
    def edges(self) -> tuple[IntArray, IntArray]:
        """Maker of each buffer that is read, and its reader.  # [num_reads] each"""
        counts = np.diff(self.read_start)
        reader = np.repeat(np.arange(self.num_tasks, dtype=np.int32), counts)
        return self.buffer_maker[self.read_buffer], reader

    def senders(self, transfers: npt.NDArray[np.integer[Any]]) -> IntArray:
        """Device that sends each of some transfers.  # [number of transfers]"""
        first = np.array([channel.devices[0] for channel in self.channels], np.int32)
        found: IntArray = first[self.channel[transfers]]
        return found

    def dependencies(self, task: int) -> list[int]:
        """Tasks that must be done before ``task`` may start."""
        reads = self.read_buffer[self.read_start[task] : self.read_start[task + 1]]
        return sorted({int(maker) for maker in self.buffer_maker[reads]})

    def read_too_early(self, order: Sequence[int] | IntArray) -> tuple[int, int] | None:
        """The first pair (task, maker of its input) in the wrong order; ``None`` if there is none.

        Args:
            order: Order that contains each task once.
        """
        place = np.argsort(np.array(order))
        maker, reader = self.edges
        early = np.flatnonzero(place[maker] >= place[reader])
        return (int(reader[early[0]]), int(maker[early[0]])) if early.size else None

    @cached_property
    def hash(self) -> str:
        """A hash that is equal on every rank that lowered the same strategy, graph and cluster.

        Turns are left out, because ranks follow the order of tasks that was found with them.
        """
        digest = hashlib.sha256()
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "kind":
                value = _IN_HASH[value]
            if isinstance(value, np.ndarray) and each.name not in ("channel", "turn"):
                digest.update(np.ascontiguousarray(value).tobytes())
        said = [f"{each.kind}{each.devices}{each.slices}".encode() for each in self.channels]
        for number in self.channel[self.channel >= 0].tolist():
            digest.update(said[number])
        if self.op_rules:
            digest.update(repr(self.op_rules).encode())
        if self.codecs:
            digest.update(repr(self.codecs).encode())
        return digest.hexdigest()[:16]


def early_reductions(program: Program, tables: "GraphTables") -> frozenset[int]:
    """Tasks that reduce a value that follows from the batch alone."""
    tasks = np.flatnonzero(program.kind == TaskKind.REDUCE_VALUE)
    values = tables.slot_value[program.subject[tasks]]
    return frozenset(tasks[tables.value_is_early[values] == 1].tolist())
