"""Cost of a team's exchange with an asynchronous server: its tasks, on tapes of their own."""

from collections.abc import Sequence

from heterog.lowering.channels import ChannelTable
from heterog.lowering.program import FloatArray, TaskKind
from heterog.lowering.tape import Tape
from heterog.modes.asynchronous.value import Traffic
from heterog.simulator.small_tape import TapeWriter

_READ_AND_WRITTEN = 2.0
"""Bytes that a copy moves, as a multiple of its own."""


def push_tape(traffic: Sequence[Traffic], sizes: FloatArray, channels: ChannelTable) -> Tape:
    """The tasks of a push: copies into messages, transfers, steps of the server's optimizer.

    Args:
        traffic: Transfers of the team.
        sizes: Bytes of each row of ``graph.updates``.
        channels: Table of the cluster's channels.
    """
    num_devices = channels.cluster.num_devices
    writer = TapeWriter(sum(2 + len(each.rows) for each in traffic), len(sizes), num_devices)
    for number, (device, server, rows) in enumerate(traffic):
        size = float(sizes[list(rows)].sum())
        there = writer.write(TaskKind.FLATTEN, number, device, _READ_AND_WRITTEN * size)
        if device != server:
            channel = device * num_devices + server
            there = writer.write(
                TaskKind.PUSH, rows[0], server, size, channel=channel, reads=[there]
            )
        for row in rows:
            writer.write(TaskKind.UPDATE, row, server, 0.0, reads=[there])
    writer.end()
    return writer.tape


def pull_tape(traffic: Sequence[Traffic], sizes: FloatArray, channels: ChannelTable) -> Tape:
    """The tasks of a pull: copies into messages, transfers, copies into the parameters.

    Args:
        traffic: Transfers of the team.
        sizes: Bytes of each row of ``graph.updates``.
        channels: Table of the cluster's channels.
    """
    num_devices = channels.cluster.num_devices
    writer = TapeWriter(3 * len(traffic), len(sizes), num_devices)
    for number, (device, server, rows) in enumerate(traffic):
        size = float(sizes[list(rows)].sum())
        there = writer.write(TaskKind.FLATTEN, number, server, _READ_AND_WRITTEN * size)
        if device != server:
            channel = server * num_devices + device
            there = writer.write(
                TaskKind.PULL, rows[0], device, size, channel=channel, reads=[there]
            )
        writer.write(TaskKind.FLATTEN, number, device, _READ_AND_WRITTEN * size, reads=[there])
    writer.end()
    return writer.tape
