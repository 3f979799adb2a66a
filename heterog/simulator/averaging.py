"""What one averaging takes: its tasks, written to a tape as lowering writes a step's.

A step costs its own seconds and the H-th part of one averaging, because the averaging begins when
the step before it has ended: T = T_local + T_average / H.
"""

from collections.abc import Sequence

from heterog.strategy.averaged_buckets import AveragedBucket
from heterog.strategy.channels import ChannelTable
from heterog.strategy.lowering.tape import (
    NUM_BUFFERS,
    NUM_READS,
    NUM_TASKS,
    Tape,
    make_tape,
)
from heterog.strategy.program import TaskKind

_READ_AND_WRITTEN = 2.0
"""Times its bytes that a copy moves."""
_OUTER = 6.0
"""Times its bytes that the outer optimizer moves: it reads the average, the parameters of before
and the momentum, and writes parameters, their copy and the momentum."""


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
        buckets: in the order in which ranks take them up.
        channels: where the all-reduces are registered.
        num_parameters: of the graph.
        num_devices: of the cluster.
        has_outer: the copies back are steps of the outer optimizer.
    """
    num_tasks = sum(2 * len(bucket.devices) + 1 for bucket in buckets)
    # Room as ``make_tape`` shares it out: a few buffers and reads for each task.
    pen = _Pen(make_tape(num_tasks + num_devices + 64, num_parameters, num_devices))
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


class _Pen:
    """Writes tasks without the compiled helpers, which would be compiled for these few."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def write(
        self,
        kind: TaskKind,
        subject: int,
        device: int,
        num_bytes: float,
        *,
        channel: int = -1,
        reads: Sequence[int] = (),
    ) -> int:
        """Write a task that makes one token; returns the token's buffer."""
        tape, counts = self.tape, self.tape.counts
        number, buffer, read = (int(counts[each]) for each in (NUM_TASKS, NUM_BUFFERS, NUM_READS))
        values = {"kind": int(kind), "subject": subject, "device": device, "channel": channel}
        values |= dict.fromkeys(("micro", "samples", "turn", "units"), 0)
        values |= {"read_start": read, "buffer_start": buffer}
        for name, value in values.items():
            tape.tasks[name][number] = value
        tape.tasks["num_bytes"][number] = num_bytes
        tape.reads[read : read + len(reads)] = reads
        for name, value in (("maker", number), ("device", device)):
            tape.buffers[name][buffer] = value
        tape.buffers["num_bytes"][buffer] = 0.0
        for place, more in ((NUM_TASKS, 1), (NUM_BUFFERS, 1), (NUM_READS, len(reads))):
            counts[place] += more
        return buffer

    def end(self) -> None:
        """The task after the last one holds the ends of its lists."""
        number = int(self.tape.counts[NUM_TASKS])
        self.tape.tasks["read_start"][number] = self.tape.counts[NUM_READS]
        self.tape.tasks["buffer_start"][number] = self.tape.counts[NUM_BUFFERS]
