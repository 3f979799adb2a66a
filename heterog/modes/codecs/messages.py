"""The last step of lowering: messages with codecs get tasks that encode and decode them.

It rewrites a finished tape, so that lowering knows nothing of codecs.

    SEND, PUSH, PULL   ->  ENCODE on the source, the shorter message, DECODE on the destination
    ALL_REDUCE         ->  ENCODE on every member, an all-gather of the messages,
                           DECODE_SUM on every member: all messages decoded and added up in the
                           order of the members, so that replicas stay equal bit for bit

Encoding and decoding take a device's time, in copies of ``ENCODE_BYTES`` and ``DECODE_BYTES``
bytes per byte. Values are decoded in program order, like other conversions; gradients and
parameters whenever the device would otherwise wait.

These messages have no codec: values without a batch dimension or without floating-point numbers,
rows of neighbours, parts of sums, gradients in reduce-scatters and their sums over slice groups,
and gradients that replicas give to replicas without any.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.errors import StrategyError
from heterog.lowering.channels import ChannelTable
from heterog.lowering.choice import Choice
from heterog.lowering.kernels import records
from heterog.lowering.program import FIRST_FREE_KIND, FloatArray, IntArray, TaskKind
from heterog.lowering.tables import Domain, GraphTables
from heterog.lowering.tape import BUFFER, NUM_BUFFERS, NUM_READS, NUM_TASKS, TASK, Tape
from heterog.modes.codecs.value import DECODE_BYTES, CodecRule, CodecRules, Traffic, encode_bytes
from heterog.modes.mode import EncodedMode

_BEFORE, _SELF, _AFTER = 0, 1, 2  # places of tasks around a rewritten task


class CodedChannel(NamedTuple):
    """A codec rule with the channels that it applies to.

    Attributes:
        rule: Rule of the strategy.
        transfer: Number of the channel between two devices; -1 if there are more devices.
        reduces: Numbers of the all-reduces over the devices.
        gather: Number of the all-gather that replaces all-reduces; -1 if there are none.
    """

    rule: CodecRule
    transfer: int
    reduces: tuple[int, ...]
    gather: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedCodecs(EncodedMode):
    """Codec rules with the channels of their messages.

    Attributes:
        coded: The rules, at least one.
    """

    folds = False
    has_floor = False

    coded: tuple[CodedChannel, ...]

    @property
    def rules(self) -> tuple[CodecRule, ...]:
        """The rules that tasks refer to."""
        return tuple(each.rule for each in self.coded)

    def rewritten(self, tape: Tape, tables: GraphTables, choice: Choice) -> Tape:
        """The tape with tasks that encode and decode."""
        return encode_messages(tape, tables, choice.home, self.coded)

    def kept_bytes(self, tape: Tape, tables: GraphTables, choice: Choice) -> FloatArray:
        """Bytes of the errors that codecs leave out of gradients."""
        return feedback_bytes(tape, self.coded, choice.member.shape[1])


def coded_channels(rules: CodecRules, channels: ChannelTable) -> tuple[CodedChannel, ...]:
    """The channels of a strategy's rules; new collectives are registered."""
    found = []
    for rule in rules:
        if rule.traffic == Traffic.PARAMETER_CHANGES:  # sent by averagings, not by steps
            continue
        transfer, gather = -1, -1
        reduces: tuple[int, ...] = ()
        if len(rule.devices) == 2:
            src, dst = rule.devices
            transfer = src * channels.cluster.num_devices + dst
        if rule.traffic == Traffic.GRADIENTS:
            members = tuple(sorted(rule.devices))
            reduces = tuple(channels.all_reduce(members, hierarchical=h) for h in (False, True))
            gather = channels.all_gather(members, ())
        found.append(CodedChannel(rule, transfer, reduces, gather))
    return tuple(found)


def encode_messages(
    tape: Tape, tables: GraphTables, home: IntArray, coded: Sequence[CodedChannel]
) -> Tape:
    """Add the tasks that encode and decode messages; returns a tape with its own memory.

    Args:
        tape: The kernel's output.
        tables: Tables of the graph.
        home: Home of each parameter.
        coded: The rules; the first that applies to a message counts.

    Raises:
        StrategyError: a rule applies to no message.
    """
    tasks = tape.tasks[: tape.counts[NUM_TASKS]]
    tasks["codec"] = 0
    item_bytes = _item_bytes(tasks, tables)
    traffic = _coded_traffic(tasks, tables, home)
    rule_of = np.full(len(tasks), -1, np.int32)
    for number, each in enumerate(coded):
        is_there = np.isin(tasks["channel"], (each.transfer, *each.reduces))
        mine = is_there & (traffic == each.rule.traffic)
        if not mine.any():
            raise StrategyError(
                f"the strategy has a codec, {each.rule}, but no such message travels there; "
                "codecs are for values sent from device to device, for all-reduces, and for "
                "pushes and pulls of parameter servers. Remove it."
            )
        rule_of[mine & (rule_of < 0) & (item_bytes > 0)] = number
    splice = _Splice(tape)
    for task in np.flatnonzero(rule_of >= 0).tolist():
        each, value_bytes = coded[rule_of[task]], int(item_bytes[task])
        codec, num_elements = each.rule.codec, round(float(tasks[task]["num_bytes"]) / value_bytes)
        if num_elements == 0 or codec.is_plain(num_elements, value_bytes):
            continue
        message = float(codec.message_bytes(num_elements, value_bytes))
        if tasks[task]["kind"] == TaskKind.ALL_REDUCE:
            splice.gathered(task, int(rule_of[task]), message, each)
        else:
            splice.sent(task, int(rule_of[task]), message, each)
    return splice.tape()


def _item_bytes(tasks: npt.NDArray[np.void], tables: GraphTables) -> IntArray:
    """Bytes per element that each task moves, 0 if these are no floating-point numbers."""
    found = np.zeros(len(tasks), np.int32)
    kind, subject = tasks["kind"], tasks["subject"]
    sends = kind == TaskKind.SEND
    found[sends] = tables.value_item_bytes[tables.slot_value[subject[sends]]]
    gradients = (kind == TaskKind.ALL_REDUCE) | (kind == TaskKind.PUSH)
    found[gradients] = tables.gradient_item_bytes[subject[gradients]]
    pulls = kind == TaskKind.PULL
    found[pulls] = tables.parameter_item_bytes[subject[pulls]]
    return found


def traffic_of(kind: npt.NDArray[Any], subject: IntArray, tables: GraphTables) -> IntArray:
    """Traffic that each task moves; -1 if it moves none that may have a codec.

    Args:
        kind: ``TaskKind`` of each task.  # [num_tasks]
        subject: Subject of each task.  # [num_tasks]
        tables: Tables of the graph.

    Returns:
        # [num_tasks]
    """
    found = np.full(len(kind), -1, np.int32)
    sends = kind == TaskKind.SEND
    is_backward = tables.op_is_backward[tables.value_op[tables.slot_value[subject[sends]]]] == 1
    found[sends] = np.where(is_backward, Traffic.ACTIVATION_GRADIENTS, Traffic.ACTIVATIONS)
    is_of_group = np.isin(subject, subject[kind == TaskKind.REDUCE_SCATTER])
    found[(kind == TaskKind.ALL_REDUCE) & ~is_of_group] = Traffic.GRADIENTS
    found[kind == TaskKind.PUSH] = Traffic.GRADIENTS
    found[kind == TaskKind.PULL] = Traffic.PARAMETERS
    return found


def _coded_traffic(tasks: npt.NDArray[np.void], tables: GraphTables, home: IntArray) -> IntArray:
    """Like ``traffic_of``, without messages that have no codec where they travel or end."""
    kind, subject = tasks["kind"], tasks["subject"]
    found = traffic_of(kind, subject, tables)
    sends, pushes = np.flatnonzero(kind == TaskKind.SEND), np.flatnonzero(kind == TaskKind.PUSH)
    has_window = tables.slot_window[subject[sends], 3] != 0
    found[sends[has_window | (tasks["samples"][sends] <= 0)]] = -1
    row = subject[pushes]
    is_added = tables.gradient_domain[row] == Domain.ALL
    found[pushes[~is_added | (home[row] != tasks["device"][pushes])]] = -1
    return found


def feedback_bytes(tape: Tape, coded: Sequence[CodedChannel], num_devices: int) -> FloatArray:
    """Bytes of the errors that each device keeps from coded gradients.  # [num_devices]

    Args:
        tape: A tape with the encoding tasks, of one or more steps.
        coded: The rules.
        num_devices: Number of devices of the cluster.
    """
    kept = np.zeros(num_devices)
    tasks = tape.tasks[: tape.counts[NUM_TASKS]]
    largest: dict[tuple[int, int, int], float] = {}  # each step reuses the same memory
    for task in np.flatnonzero((tasks["kind"] == TaskKind.ENCODE) & (tasks["codec"] > 0)).tolist():
        rule = int(tasks[task]["codec"]) - 1
        if coded[rule].rule.traffic == Traffic.GRADIENTS:
            device, subject = int(tasks[task]["device"]), int(tasks[task]["subject"])
            payload = tasks[task]["num_bytes"] / encode_bytes(coded[rule].rule)
            largest[rule, device, subject] = float(payload)
    for (_, device, _), payload in largest.items():
        kept[device] += payload
    return kept


class _Splice:
    """Inserts tasks, buffers and reads into a tape, and renumbers everything at the end.

    New tasks, buffers and reads first get the next free numbers; ``tape`` sorts them.
    """

    def __init__(self, tape: Tape) -> None:
        self._old = tape
        num_tasks, num_buffers = (int(tape.counts[each]) for each in (NUM_TASKS, NUM_BUFFERS))
        self._tasks = tape.tasks[: num_tasks + 1].copy()
        self._num_tasks, self._num_buffers = num_tasks, num_buffers
        self._maker = tape.buffers["maker"][:num_buffers].copy()
        self._buffer_device = tape.buffers["device"]
        starts = self._tasks["read_start"]
        self._reader = np.repeat(np.arange(num_tasks, dtype=np.int32), np.diff(starts))
        self._read = tape.reads[: tape.counts[NUM_READS]].copy()
        self._is_kept = np.ones(len(self._read), np.bool_)
        self._new_tasks: list[npt.NDArray[np.void]] = []
        self._keys: list[int] = []
        self._new_buffers: list[tuple[float, int, int]] = []
        self._new_reads: list[tuple[int, int]] = []

    def sent(self, task: int, rule: int, message: float, each: CodedChannel) -> None:
        """Encode the message of a transfer."""
        record = self._tasks[task]
        size = float(record["num_bytes"])
        (made,) = self._made(task)
        # The sender is where the read buffer is; a pull reads tokens of the server.
        read = self._take_reads(task)
        src = int(self._old.buffers["device"][read[0]])
        encode = self._encoded(task, src, read, size * encode_bytes(each.rule), message)
        dst = int(record["device"])
        kind = TaskKind.DECODE if record["kind"] == TaskKind.SEND else TaskKind.DECODE_SUM
        decode = self._add(task, _AFTER, kind, dst, size * DECODE_BYTES[each.rule.codec.kind])
        self._new_reads.append((decode, self._buffer(message, task, dst)))
        self._maker[made] = decode
        self._mark(rule, message, task, encode, decode)

    def gathered(self, task: int, rule: int, message: float, each: CodedChannel) -> None:
        """Gather the messages of all members of an all-reduce, and sum them on each."""
        size = float(self._tasks[task]["num_bytes"])
        members = sorted(each.rule.devices)
        token = self._made(task)[-1]
        reads = self._take_reads(task)
        devices = self._buffer_device[reads].tolist()
        later = np.flatnonzero(self._read == token)
        sums = {}
        for member in members:
            own = [b for b, device in zip(reads, devices, strict=True) if device == member]
            encode = self._encoded(task, member, own, size * encode_bytes(each.rule), message)
            cost = size * len(members) * DECODE_BYTES[each.rule.codec.kind]
            decode = self._add(task, _AFTER, TaskKind.DECODE_SUM, member, cost)
            received = self._buffer(message * (len(members) - 1), task, member)
            self._new_reads += [(decode, token), (decode, received)]
            self._new_reads += [(decode, buffer) for buffer in own]
            sums[member] = self._buffer(0.0, decode, -1)
            self._mark(rule, message, encode, decode)
        others = [b for b, device in zip(reads, devices, strict=True) if device < 0]
        self._new_reads += [(task, buffer) for buffer in others]
        for read in later.tolist():
            self._read[read] = sums[int(self._tasks[self._reader[read]]["device"])]
        self._tasks[task]["channel"] = each.gather
        self._mark(rule, message * len(members), task)

    def _take_reads(self, task: int) -> list[int]:
        """The buffers that a task reads, and will no longer read."""
        begin, end = self._old.tasks["read_start"][task : task + 2].tolist()
        self._is_kept[begin:end] = False
        read: list[int] = self._read[begin:end].tolist()
        return read

    def _made(self, task: int) -> range:
        return range(*self._old.tasks["buffer_start"][task : task + 2].tolist())

    def _add(self, task: int, side: int, kind: TaskKind, device: int, num_bytes: float) -> int:
        """Add a task on a device, before or after another one."""
        record = self._tasks[task : task + 1].copy()
        record["kind"], record["device"], record["channel"] = int(kind), device, -1
        record["num_bytes"] = num_bytes
        self._new_tasks.append(record)
        self._keys.append(3 * task + side)
        return self._num_tasks + len(self._new_tasks) - 1

    def _encoded(
        self, task: int, device: int, read: Sequence[int], cost: float, message: float
    ) -> int:
        """Add a task that encodes what it reads for another one; returns it.

        It has the turn of the latest task on its device that it reads from.
        """
        encode = self._add(task, _BEFORE, TaskKind.ENCODE, device, cost)
        self._new_reads += [(encode, buffer) for buffer in read]
        self._new_reads.append((task, self._buffer(message, encode, device)))
        record, turn = self._new_tasks[-1], 0
        for buffer in read:
            number = int(self._maker[buffer])
            is_new = number >= self._num_tasks
            maker = self._new_tasks[number - self._num_tasks][0] if is_new else self._tasks[number]
            if maker["device"] == record["device"][0] and maker["kind"] < FIRST_FREE_KIND:
                turn = max(turn, int(maker["turn"]))
        record["turn"] = turn
        return encode

    def _buffer(self, num_bytes: float, maker: int, device: int) -> int:
        self._new_buffers.append((num_bytes, maker, device))
        return self._num_buffers + len(self._new_buffers) - 1

    def _mark(self, rule: int, message: float, *tasks: int) -> None:
        """Assign tasks to a rule, and set communication tasks to the length of the message."""
        for task in tasks:
            if task < self._num_tasks:
                self._tasks[task]["codec"] = rule + 1
                self._tasks[task]["num_bytes"] = message
            else:
                self._new_tasks[task - self._num_tasks]["codec"] = rule + 1

    def tape(self) -> Tape:
        """The new tape, with everything in order."""
        if not self._new_tasks:
            return self._old
        tasks = np.concatenate([self._tasks[: self._num_tasks], *self._new_tasks])
        keys = np.concatenate([3 * np.arange(self._num_tasks) + _SELF, np.array(self._keys)])
        order = np.argsort(keys, kind="stable")
        place = np.argsort(order).astype(np.int32)  # new number of each task
        old, extra = self._old.buffers[: self._num_buffers], np.array(self._new_buffers)
        maker = place[np.concatenate([self._maker, extra[:, 1].astype(np.int32)])]
        by_maker = np.argsort(maker, kind="stable")
        buffer_place = np.argsort(by_maker).astype(np.int32)
        pairs = np.array(self._new_reads, np.int32)
        reader = place[np.concatenate([self._reader[self._is_kept], pairs[:, 0]])]
        read = buffer_place[np.concatenate([self._read[self._is_kept], pairs[:, 1]])]
        by_reader = np.argsort(reader, kind="stable")
        counts = self._old.counts.copy()
        counts[NUM_TASKS], counts[NUM_BUFFERS], counts[NUM_READS] = map(len, (tasks, maker, read))
        all_tasks, all_buffers = records(len(tasks) + 3, TASK), records(len(maker) + 1, BUFFER)
        all_tasks[: len(tasks)] = tasks[order]
        numbers = np.arange(len(tasks) + 1)
        all_tasks["read_start"][: len(tasks) + 1] = np.searchsorted(reader[by_reader], numbers)
        all_tasks["buffer_start"][: len(tasks) + 1] = np.searchsorted(maker[by_maker], numbers)
        all_buffers["maker"][:-1] = maker[by_maker]
        for column, name in ((0, "num_bytes"), (2, "device")):
            values = np.concatenate([old[name], extra[:, column]])
            all_buffers[name][:-1] = values[by_maker]
        return self._old._replace(
            tasks=all_tasks, buffers=all_buffers, reads=read[by_reader], counts=counts
        )
