"""Tapes of a few tasks that no strategy lowers to: an averaging, an exchange with a server."""

from collections.abc import Sequence

from heterog.lowering.program import TaskKind
from heterog.lowering.tape import (
    NUM_BUFFERS,
    NUM_READS,
    NUM_TASKS,
    Tape,
    make_tape,
)


class TapeWriter:
    """Writes tasks without the compiled helpers, whose compilation these few do not repay.

    Args:
        num_tasks: Largest number of tasks that will be written.
        num_parameters: Number of parameters of the graph.
        num_devices: Number of devices of the cluster.

    Attributes:
        tape: Tape with all tasks written so far; complete after ``end``.
    """

    def __init__(self, num_tasks: int, num_parameters: int, num_devices: int) -> None:
        # Room as ``make_tape`` shares it out: a few buffers and reads for each task.
        self.tape: Tape = make_tape(num_tasks + num_devices + 64, num_parameters, num_devices)

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
        """Write where the lists of one more task would begin, which ends those of the last."""
        number = int(self.tape.counts[NUM_TASKS])
        self.tape.tasks["read_start"][number] = self.tape.counts[NUM_READS]
        self.tape.tasks["buffer_start"][number] = self.tape.counts[NUM_BUFFERS]
