"""Cost of one averaging: its tasks, written to a tape as lowering writes a step's.

A step costs its own seconds and the H-th part of one averaging, because the averaging begins when
the step before it has ended: T = T_local + T_average / H.
"""

from collections.abc import Sequence

from heterog.simulator.small_tape import Pen
from heterog.strategy.averaged_buckets import AveragedBucket
from heterog.strategy.channels import ChannelTable
from heterog.strategy.lowering.tape import Tape
from heterog.strategy.program import TaskKind

_READ_AND_WRITTEN = 2.0
"""Bytes that a copy moves, as a multiple of its own."""
_OUTER = 6.0
"""Bytes that the outer optimizer moves, as a multiple of the bucket's: it reads the average, the
parameters of before and the momentum, and writes parameters, their copy and the momentum."""


def averaging_tape(
    buckets: Sequence[AveragedBucket],
    channels: ChannelTable,
    *,
    num_parameters: int,
    num_devices: int,
    has_outer: bool,
) -> Tape:
    """The tasks of one averaging: copies into buckets, their all-reduces, copies back.

    Args:
        buckets: Buckets in the order in which ranks take them up.
        channels: Table in which the channels of the all-reduces are registered.
        num_parameters: Number of parameters of the graph.
        num_devices: Number of devices of the cluster.
        has_outer: Whether the copies back are steps of the outer optimizer.
    """
    num_tasks = sum(2 * len(bucket.devices) + 1 for bucket in buckets)
    pen = Pen(num_tasks, num_parameters, num_devices)
    copied = [
        [
            pen.write(TaskKind.FLATTEN, number, device, _READ_AND_WRITTEN * bucket.num_bytes)
            for device in bucket.devices
        ]
        for number, bucket in enumerate(buckets)
    ]
    summed = [
        pen.write(
            TaskKind.ALL_REDUCE,
            number,
            -1,
            bucket.num_bytes,
            channel=channels.value_reduce(bucket.devices),
            reads=made,
        )
        for number, (bucket, made) in enumerate(zip(buckets, copied, strict=True))
    ]
    times = _OUTER if has_outer else _READ_AND_WRITTEN
    for number, (bucket, token) in enumerate(zip(buckets, summed, strict=True)):
        for device in bucket.devices:
            size = times * bucket.num_bytes
            pen.write(TaskKind.FLATTEN, number, device, size, reads=[token])
    pen.end()
    return pen.tape
