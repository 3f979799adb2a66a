"""Cost of one averaging: its tasks, written to a tape as lowering writes a step's.

A step costs its own seconds and the H-th part of one averaging, because the averaging begins when
the step before it has ended: T = T_local + T_average / H. Passes over memory are those of
``passes``.
"""

from collections.abc import Sequence

from heterog.lowering import Choice
from heterog.lowering.channels import ChannelTable
from heterog.lowering.program import TaskKind
from heterog.lowering.tape import Tape
from heterog.modes.averaging.buckets import AveragedBucket, averaged_buckets
from heterog.modes.averaging.passes import passes_after, passes_before, times_moved
from heterog.modes.averaging.value import Averaging
from heterog.modes.codecs.value import DECODE_BYTES, encode_bytes
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.small_tape import TapeWriter
from heterog.strategy.strategy import Strategy


def averaging_tape(
    averaging: Averaging,
    buckets: Sequence[AveragedBucket],
    channels: ChannelTable,
    *,
    num_parameters: int,
    num_devices: int,
) -> Tape:
    """The tasks of one averaging: copies into buckets, their all-reduces, copies back.

    Of a bucket with a codec the senders' differences are encoded, the messages gathered, and
    decoded and added up everywhere.

    Args:
        averaging: The averaging.
        buckets: Buckets in the order in which ranks take them up.
        channels: Table in which the channels of the all-reduces are registered.
        num_parameters: Number of parameters of the graph.
        num_devices: Number of devices of the cluster.
    """
    num_tasks = sum(4 * len(bucket.devices) + 1 for bucket in buckets)
    writer = TapeWriter(num_tasks, num_parameters, num_devices)
    made = [
        _written_messages(writer, averaging, number, bucket)
        for number, bucket in enumerate(buckets)
    ]
    tokens = [
        _written_sum(writer, channels, number, bucket, reads)
        for number, (bucket, reads) in enumerate(zip(buckets, made, strict=True))
    ]
    for number, (bucket, token) in enumerate(zip(buckets, tokens, strict=True)):
        _write_end(writer, averaging, number, bucket, token)
    writer.end()
    return writer.tape


def _written_messages(
    writer: TapeWriter, averaging: Averaging, number: int, bucket: AveragedBucket
) -> list[int]:
    """Passes that fill a bucket, encoded where it has a codec; returns what they make."""
    size, made = bucket.num_bytes, []
    for device in bucket.devices:
        sends = bucket.rule is None or device in bucket.senders
        passes = passes_before(averaging, has_codec=bucket.rule is not None, sends=sends)
        if passes:
            made.append(writer.write(TaskKind.FLATTEN, number, device, size * times_moved(passes)))
        if sends and bucket.rule is not None:
            cost = size * encode_bytes(bucket.rule)
            made[-1] = writer.write(TaskKind.ENCODE, number, device, cost, reads=[made[-1]])
    return made


def _written_sum(
    writer: TapeWriter,
    channels: ChannelTable,
    number: int,
    bucket: AveragedBucket,
    reads: Sequence[int],
) -> int:
    """The all-reduce of a bucket, or the all-gather of its messages; returns what it makes."""
    kind, channel, size = TaskKind.ALL_REDUCE, -1, bucket.num_bytes
    if bucket.rule is None:
        channel = channels.value_reduce(bucket.devices)
    else:
        kind, size = TaskKind.ALL_GATHER, bucket.message_bytes * len(bucket.senders)
        sends = tuple(int(device in bucket.senders) for device in bucket.devices)
        channel = channels.all_gather(bucket.devices, sends)
    return writer.write(kind, number, -1, size, channel=channel, reads=reads)


def _write_end(
    writer: TapeWriter, averaging: Averaging, number: int, bucket: AveragedBucket, token: int
) -> None:
    """What all replicas do with what has come: decode it, and take over the result."""
    size = bucket.num_bytes
    passes = passes_after(averaging, has_codec=bucket.rule is not None)
    cost = size * times_moved(passes)
    if bucket.rounded_bytes:
        cost += size + bucket.rounded_bytes  # masters are read, the model's values written
    for device in bucket.devices:
        read = token
        if bucket.rule is not None:
            decoded = size * len(bucket.senders) * DECODE_BYTES[bucket.rule.codec.kind]
            read = writer.write(TaskKind.DECODE_SUM, number, device, decoded, reads=[token])
        writer.write(TaskKind.FLATTEN, number, device, cost, reads=[read])


def averaging_seconds(evaluator: Evaluator, strategy: Strategy, choice: Choice) -> float:
    """Seconds of one averaging of a strategy's parameters, by the referee.

    Args:
        evaluator: Evaluator of the graph on the cluster.
        strategy: Strategy with an averaging.
        choice: The same strategy, encoded.
    """
    averaging = strategy.mode(Averaging)
    assert averaging is not None
    tape = averaging_tape(
        averaging,
        averaged_buckets(evaluator.graph, strategy),
        evaluator.channels,
        num_parameters=len(evaluator.tables.parameter_bytes),
        num_devices=evaluator.cluster.num_devices,
    )
    return evaluator.tape_s(tape, choice)
