"""Cost of one averaging: its tasks, written to a tape as lowering writes a step's.

A step costs its own seconds and the H-th part of one averaging, because the averaging begins when
the step before it has ended: T = T_local + T_average / H.
"""

from collections.abc import Sequence

from heterog.simulator.small_tape import Pen
from heterog.strategy.averaged_buckets import AveragedBucket
from heterog.strategy.channels import ChannelTable
from heterog.strategy.codec import DECODE_BYTES, encode_bytes
from heterog.strategy.lowering.tape import Tape
from heterog.strategy.program import TaskKind

_READ_AND_WRITTEN = 2.0
"""Bytes that a copy moves, as a multiple of its own."""
_OUTER = 6.0
"""Bytes that the outer optimizer moves, as a multiple of the bucket's: it reads the average, the
parameters of before and the momentum, and writes parameters, their copy and the momentum."""
_SUBTRACTED = 3.0
"""Bytes that a difference to the parameters of before moves, as a multiple of the bucket's."""
_TAKEN_OVER = 4.0
"""Bytes that moving parameters and their copy by a difference moves, likewise."""


def averaging_tape(
    buckets: Sequence[AveragedBucket],
    channels: ChannelTable,
    *,
    num_parameters: int,
    num_devices: int,
    has_outer: bool,
) -> Tape:
    """The tasks of one averaging: copies into buckets, their all-reduces, copies back.

    Of a bucket with a codec the senders' differences are encoded, the messages gathered, and
    decoded and added up everywhere.

    Args:
        buckets: Buckets in the order in which ranks take them up.
        channels: Table in which the channels of the all-reduces are registered.
        num_parameters: Number of parameters of the graph.
        num_devices: Number of devices of the cluster.
        has_outer: Whether the copies back are steps of the outer optimizer.
    """
    num_tasks = sum(4 * len(bucket.devices) + 1 for bucket in buckets)
    pen = Pen(num_tasks, num_parameters, num_devices)
    made = [_written_messages(pen, number, bucket) for number, bucket in enumerate(buckets)]
    tokens = [
        _written_sum(pen, channels, number, bucket, reads)
        for number, (bucket, reads) in enumerate(zip(buckets, made, strict=True))
    ]
    for number, (bucket, token) in enumerate(zip(buckets, tokens, strict=True)):
        _write_end(pen, number, bucket, token, has_outer=has_outer)
    pen.end()
    return pen.tape


def _written_messages(pen: Pen, number: int, bucket: AveragedBucket) -> list[int]:
    """Copies into a bucket, encoded where it has a codec; returns what they make."""
    size = bucket.num_bytes
    if bucket.rule is None:
        return [
            pen.write(TaskKind.FLATTEN, number, device, _READ_AND_WRITTEN * size)
            for device in bucket.devices
        ]
    made = []
    for device in bucket.senders:
        flat = pen.write(TaskKind.FLATTEN, number, device, _SUBTRACTED * size)
        cost = size * encode_bytes(bucket.rule)
        made.append(pen.write(TaskKind.ENCODE, number, device, cost, reads=[flat]))
    return made


def _written_sum(
    pen: Pen, channels: ChannelTable, number: int, bucket: AveragedBucket, reads: Sequence[int]
) -> int:
    """The all-reduce of a bucket, or the all-gather of its messages; returns what it makes."""
    kind, channel, size = TaskKind.ALL_REDUCE, -1, bucket.num_bytes
    if bucket.rule is None:
        channel = channels.value_reduce(bucket.devices)
    else:
        kind, size = TaskKind.ALL_GATHER, bucket.message_bytes * len(bucket.senders)
        sends = tuple(int(device in bucket.senders) for device in bucket.devices)
        channel = channels.all_gather(bucket.devices, sends)
    return pen.write(kind, number, -1, size, channel=channel, reads=reads)


def _write_end(
    pen: Pen, number: int, bucket: AveragedBucket, token: int, *, has_outer: bool
) -> None:
    """What all replicas do with what has come: decode it, and take over the result."""
    size = bucket.num_bytes
    times = _READ_AND_WRITTEN if bucket.rule is None else _TAKEN_OVER
    for device in bucket.devices:
        read = token
        if bucket.rule is not None:
            cost = size * len(bucket.senders) * DECODE_BYTES[bucket.rule.codec.kind]
            read = pen.write(TaskKind.DECODE_SUM, number, device, cost, reads=[token])
        cost = size * (_OUTER if has_outer else times)
        pen.write(TaskKind.FLATTEN, number, device, cost, reads=[read])
