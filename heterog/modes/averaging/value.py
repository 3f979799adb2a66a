"""Averaging: islands of devices that train alone for some steps, then average their parameters.

The teams of every decision are *islands*: gradients are summed inside an island at each step, as
the decision's synchronisation says, and never between islands. After every H steps the parameters
of all islands are averaged (local SGD, Stich 2019). With an outer optimizer the difference to the
last average is a gradient for SGD with Nesterov momentum (DiLoCo, Douillard et al. 2023,
algorithm 1).

The resulting weights *differ* from those of one device unless H = 1 with plain SGD, so a strategy
averages only if a user asked for it.

One averaging moves the parameters in buckets, and all-reduces each bucket over its replicas. If a
codec applies to a bucket, the first replica of each island sends the island's changes instead, in
a message that all replicas gather.

Each replica also makes passes over memory (``MemoryPass``). ``ranks`` makes exactly these passes,
which are priced here, without encoding and decoding:

    x  parameters, in the optimizer's dtype    s  copy of the parameters as sent
    a  parameters after the last averaging     w  weight of the replica, or of its island's message
    f  the bucket                              m  momentum, c its coefficient
    d  difference a - average                  r  outer learning rate

Every tensor has the size of the bucket, so bytes moved per byte of the bucket are the number of
tensors read and written. Bytes of error feedback are part of ``encode_bytes``; masters are rounded
into the model's values afterwards.

The tasks of one averaging are written to a tape, as lowering writes those of a step. A step costs
its own seconds and one H-th of an averaging, which begins when the step before it has ended:
T = T_local + T_average / H.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import ITEM_BYTES
from heterog.lowering.program import TaskKind
from heterog.lowering.tape import Tape, TapeWriter
from heterog.modes.codecs.value import DECODE_BYTES, Codec, CodecRule, codec_rules, encode_bytes
from heterog.modes.islands import (
    MOST_STEPS,
    check_islands,
    crossing_fault,
    island_of,
    island_samples,
)
from heterog.modes.mode import EncodedMode, Mode, Traffic
from heterog.records import Count, Int32, Number
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy

if TYPE_CHECKING:
    from heterog.cluster.topology import Cluster
    from heterog.lowering.channels import ChannelTable
    from heterog.lowering.choice import Choice
    from heterog.lowering.program import FloatArray, Program
    from heterog.lowering.tables import GraphTables
    from heterog.methods.planner import Planner
    from heterog.modes.on_ranks import RankMode, Rehearsal
    from heterog.runtime.deploy import DeployedStep
    from heterog.runtime.measure.rehearsal import Stage
    from heterog.simulator.evaluator import Evaluator


class AverageWeights(StrEnum):
    """Weight of an island's parameters in the average."""

    SAMPLES = "samples"
    """In proportion to the island's samples: with H = 1 and SGD, one device's step."""
    EQUAL = "equal"
    """Equal for all islands, as in DiLoCo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging(Mode):
    """How and when islands average their parameters.

    With w the average of the islands' parameters and a the parameters after the last averaging,
    the outer optimizer takes d = a - w as a gradient: m = momentum * m + d, and the new parameters
    are a - rate * (d + momentum * m). With rate 1 and momentum 0 they are w.

    With a delay of D steps the average of the parameters s after step t arrives after step t + D,
    while islands train on: their parameters x become new + (x - s). Islands wait only if an
    averaging takes longer than D steps (CoCoD-SGD, Shen et al. 2019, for D = H), and updates of
    other islands arrive at most H + D steps late.

    With a codec (``CodecRule`` of parameter changes) island i sends c_i = encode(p_i (a - x_i) +
    e_i) of its parameters x_i and weight p_i, and keeps the error e_i of the message for the next
    one. All use d = sum_i decode(c_i), in the same order, so that they stay equal bit for bit
    (Qsparse-local-SGD, Basu et al. 2019, algorithm 1).

    Attributes:
        every: Number H of training steps from one averaging to the next.
        weights: Weight of each island in the average.
        outer_rate: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        delay: Number D of steps from the start of an averaging to its end; below H.
    """

    key = "averaging"
    word = "average"
    goes_with = ("codecs",)
    trains_apart = True
    steps_differ = True
    sends_changes = True

    every: Count
    weights: AverageWeights = AverageWeights.SAMPLES
    outer_rate: Number = 1.0
    outer_momentum: Number = 0.0
    delay: Int32 = 0

    def __post_init__(self) -> None:
        if not 1 <= self.every <= MOST_STEPS:
            raise StrategyError(
                f"averaging every {self.every} steps; give a number from 1 to {MOST_STEPS:,}."
            )
        if not 0.0 < self.outer_rate <= 10.0:
            raise StrategyError(
                f"the outer learning rate is {self.outer_rate:g}; it must be above 0 and at most "
                "10 (1 takes the average over, 0.7 is DiLoCo's)."
            )
        if not 0.0 <= self.outer_momentum < 1.0:
            raise StrategyError(
                f"the outer momentum is {self.outer_momentum:g}; it must be at least 0 and below "
                "1 (0.9 is DiLoCo's)."
            )
        if not 0 <= self.delay < self.every:
            raise StrategyError(
                f"the delay is {self.delay} steps of a window of {self.every}; it must be at "
                "least 0 and below the steps between two averagings."
            )

    @property
    def has_outer(self) -> bool:
        """Whether there is an outer optimizer, with two copies of all parameters as its state."""
        return self.outer_rate != 1.0 or self.outer_momentum != 0.0

    def num_copies(self, is_coded: bool) -> int:
        """Copies of all parameters on a device: outer state, and averages under way.

        With codecs also the parameters after the last averaging, and the errors of messages.

        Args:
            is_coded: Whether messages of the averaging have codecs.
        """
        num_anchors = 1 + (not self.has_outer) if is_coded else 0
        return 2 * self.has_outer + 2 * (self.delay > 0) + num_anchors

    def step_s(self, local_s: float, averaging_s: float) -> float:
        """Mean seconds of a step over a window.

        T = T_local + max(T_average - D T_local, 0) / H.

        >>> Averaging(every=8).step_s(1.0, 4.0), Averaging(every=8, delay=3).step_s(1.0, 4.0)
        (1.5, 1.125)

        Args:
            local_s: Seconds of a step without averaging.
            averaging_s: Seconds of one averaging.
        """
        return local_s + max(averaging_s - self.delay * local_s, 0.0) / self.every

    @property
    def words(self) -> str:
        """The averaging in a sentence.

        >>> Averaging(every=8).words
        'parameters averaged every 8 steps by samples'
        """
        steps = "step" if self.every == 1 else f"{self.every} steps"
        text = f"parameters averaged every {steps} by samples"
        if self.weights == AverageWeights.EQUAL:
            text = f"parameters averaged every {steps} with equal weights"
        if self.has_outer:
            text += f", outer SGD of rate {self.outer_rate:g}, momentum {self.outer_momentum:g}"
        if self.delay:
            text += f", arriving {self.delay} steps later"
        return text

    @classmethod
    def method(cls, text: str) -> "Planner":
        """The method that searches islands for the averaging."""
        from heterog.modes.averaging.method import AveragedReplicas, parse_averaging

        return AveragedReplicas(parse_averaging(text))

    def brief_words(self, strategy: "Strategy") -> str:
        """The averaging in a few words."""
        return f"averaged every {self.every} steps"

    def check(self, strategy: "Strategy", graph: "OpGraph", cluster: "Cluster") -> None:
        """Refuse decisions whose teams are not islands that can train alone."""
        check_islands(strategy, graph.batch_size, "averaging")
        group = group_ops(graph).group
        owners = {strategy.decisions[int(group[op])].devices for op, _, _ in graph.updates}
        for rule in codec_rules(strategy):
            if (
                rule.traffic == Traffic.PARAMETER_CHANGES
                and tuple(sorted(rule.devices)) not in owners
            ):
                raise StrategyError(
                    f"the strategy has a codec, {rule}, but averaging brings together parameters "
                    f"of devices {', '.join(map(str, sorted(owners)))}; name one of these sets."
                )

    def fault(self, program: "Program", strategy: "Strategy", tables: "GraphTables") -> str:
        """Why a program's islands cannot train alone; empty if they can."""
        return crossing_fault(program, strategy)

    def encode(
        self, strategy: "Strategy", tables: "GraphTables", channels: "ChannelTable"
    ) -> EncodedMode:
        """The copies of parameters that averaging keeps."""
        return _EncodedAveraging(num_copies=self.num_copies(bool(codec_rules(strategy))))

    def priced(
        self, encoded: EncodedMode, evaluator: "Evaluator", strategy: "Strategy", choice: "Choice"
    ) -> EncodedMode:
        """The seconds that averaging adds to a step; see ``step_s``."""
        seconds = averaging_seconds(evaluator, strategy, choice)
        # The seconds that a delay hides depend on the step alone, so that is simulated, too.
        local_s = evaluator.local_s(choice) if self.delay else 0.0
        return replace(encoded, more_s=self.step_s(local_s, seconds) - local_s)

    def gradient_scale(self, graph: "OpGraph", strategy: "Strategy", rank: int) -> float:
        """Factor that turns a rank's gradients into means over its own island.

        A step's loss is a mean over the whole batch, and an island computes its part. With masked
        labels, the factor counts the island's part of the samples, not of the labels: with H = 1
        the average is then one device's step for any mask.

        Raises:
            StrategyError: a batch of this size leaves an island without samples.
        """
        samples = island_samples(strategy, graph.batch_size)
        if not all(samples):
            raise StrategyError(
                f"of a batch of {graph.batch_size} the islands get {list(samples)} samples; with "
                "averaging each of them needs at least one: leave a smaller last batch out."
            )
        own = island_of(strategy, rank)
        return 1.0 if own is None else graph.batch_size / samples[own]

    def on_rank(self, step: "DeployedStep") -> "RankMode":
        """The averager of a rank."""
        from heterog.modes.averaging.ranks import Averager

        return Averager(
            step.captured.graph,
            step.plan.strategy,
            step.rank,
            step.part.parameters,
            step.masters,
            step.communicator,
        )

    def rehearsal(self, stage: "Stage") -> "Rehearsal":
        """Play one averaging after the steps."""
        from heterog.modes.averaging.ranks import RehearsedAveraging

        return RehearsedAveraging(stage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EncodedAveraging(EncodedMode):
    """Copies of all parameters, in the dtype in which they are averaged."""

    num_copies: int

    def resident_bytes(self, tables: "GraphTables", choice: "Choice") -> "FloatArray | float":
        """Bytes of the copies."""
        holds = choice.member[choice.division[tables.parameter_group]]
        copies: FloatArray = self.num_copies * (tables.stepped_bytes[:, None] * holds).sum(0)
        return copies


def island_parts(strategy: "Strategy") -> tuple[float, ...]:
    """Weight of each island in the average; they add up to 1."""
    averaging, first = strategy.own_mode(Averaging), strategy.decisions[0]
    if averaging.weights == AverageWeights.EQUAL:
        return (1.0 / len(first.teams),) * len(first.teams)
    batch_size = sum(first.shares)
    return tuple(count / batch_size for count in island_samples(strategy, batch_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedBucket:
    """A bucket of parameters that are averaged together.

    Attributes:
        rows: Rows of ``graph.updates``.
        devices: Devices that have the parameters, ascending.
        weights: Weight of each device's copy; they add up to 1. Replicas of one island are equal
            and share its weight.
        num_bytes: Size of all parameters in the optimizer's dtype: of masters, if there are any.
        rounded_bytes: Size of the model's own parameters, into which masters are rounded
            afterwards; 0 without masters.
        senders: First replica of each island.
        parts: Weight of each sender's message with a codec: the weight of its island.
        rule: Codec rule of the messages; without one (``None``) parameters are all-reduced.
        num_elements: Number of elements of all parameters.
    """

    rows: tuple[int, ...]
    devices: tuple[int, ...]
    weights: tuple[float, ...]
    num_bytes: float
    rounded_bytes: float
    senders: tuple[int, ...]
    parts: tuple[float, ...]
    rule: CodecRule | None
    num_elements: int

    @property
    def codec(self) -> Codec | None:
        """Codec of its messages, if any."""
        return None if self.rule is None else self.rule.codec

    @property
    def message_bytes(self) -> float:
        """Size of each sender's message; without a codec, size of the bucket."""
        if self.rule is None:
            return self.num_bytes
        value_bytes = round(self.num_bytes / self.num_elements)
        return float(self.rule.codec.message_bytes(self.num_elements, value_bytes))


def averaged_buckets(graph: OpGraph, strategy: Strategy) -> list[AveragedBucket]:
    """The buckets of an averaging, in the order in which all ranks handle them.

    Parameters of one decision and one dtype share buckets. A bucket is full when the model's own
    values in it (not the masters) reach DDP's bucket size.
    """
    group = group_ops(graph).group
    parts = island_parts(strategy)
    open_: dict[tuple[Decision, str], tuple[list[int], float]] = {}
    closed: list[tuple[Decision, list[int]]] = []
    for row, (op, parameter, _) in enumerate(graph.updates):
        decision = strategy.decisions[int(group[op])]
        key = decision, graph.tensors[parameter].dtype
        rows, size = open_.get(key, ([], 0.0))
        rows, size = [*rows, row], size + float(graph.tensor_bytes[parameter])
        if size >= DEFAULT_BUCKET_BYTES:
            closed.append((decision, rows))
            open_.pop(key, None)
        else:
            open_[key] = rows, size
    closed += [(decision, rows) for (decision, _), (rows, _) in open_.items()]
    return [_bucket(graph, strategy, parts, *each) for each in closed]


def _bucket(
    graph: OpGraph,
    strategy: Strategy,
    parts: tuple[float, ...],
    decision: Decision,
    rows: list[int],
) -> AveragedBucket:
    """A bucket of rows, without a codec if that would not shorten its messages."""
    parameters = [graph.updates[row][1] for row in rows]
    num_elements = sum(graph.tensors[each].num_elements for each in parameters)
    own_bytes = float(sum(graph.tensor_bytes[each] for each in parameters))
    stepped = graph.stepped_dtype(parameters[0])
    value_bytes = ITEM_BYTES[stepped]
    rule = next(
        (
            each
            for each in codec_rules(strategy)
            if tuple(sorted(each.devices)) == decision.devices
        ),
        None,
    )
    if rule is not None and (not num_elements or rule.codec.is_plain(num_elements, value_bytes)):
        rule = None
    weight = {
        device: part / len(team)
        for team, part in zip(decision.teams, parts, strict=True)
        for device in team
    }
    return AveragedBucket(
        rows=tuple(rows),
        devices=decision.devices,
        weights=tuple(weight[device] for device in decision.devices),
        num_bytes=float(num_elements * value_bytes),
        rounded_bytes=own_bytes if stepped != graph.tensors[parameters[0]].dtype else 0.0,
        senders=tuple(min(team) for team in decision.teams),
        parts=parts,
        rule=rule,
        num_elements=num_elements,
    )


class MemoryPass(NamedTuple):
    """One pass over memory.

    Attributes:
        formula: Its assignment, in the symbols of the module's docstring.
        reads: Number of tensors read.
        writes: Number of tensors written.
    """

    formula: str
    reads: int
    writes: int


KEEP = MemoryPass("s = x", 1, 1)
WEIGH = MemoryPass("f = w x", 1, 1)
CHANGE = MemoryPass("f = a - x", 2, 1)
WEIGH_CHANGE = MemoryPass("f = w f", 1, 1)
CLEAR = MemoryPass("d = 0", 0, 1)
DIFFER = MemoryPass("d = a - f", 2, 1)
MOMENTUM = (
    MemoryPass("m = c m", 1, 1),
    MemoryPass("m = m + d", 2, 1),
    MemoryPass("d = d + c m", 2, 1),
)
MOVE = MemoryPass("a = a - r d", 2, 1)
TAKE_OVER = MemoryPass("x = f, or x = a", 1, 1)
LEARNED_SINCE = (MemoryPass("x = x - s", 2, 1), MemoryPass("x = x + f, or x = x + a", 2, 1))


def passes_before(averaging: Averaging, *, has_codec: bool, sends: bool) -> tuple[MemoryPass, ...]:
    """Passes of a replica before a bucket is encoded or all-reduced.

    Args:
        averaging: The averaging.
        has_codec: Whether the bucket has a codec.
        sends: Whether the replica sends; with a codec only one replica of each island does.
    """
    kept = (KEEP,) if averaging.delay else ()
    if not has_codec:
        return *kept, WEIGH
    return (*kept, CHANGE, WEIGH_CHANGE) if sends else kept


def passes_after(averaging: Averaging, *, has_codec: bool) -> tuple[MemoryPass, ...]:
    """Passes of a replica around and after the decoding of messages, or after the all-reduce.

    Args:
        averaging: The averaging.
        has_codec: Whether the bucket has a codec.
    """
    found: tuple[MemoryPass, ...] = ()
    if has_codec or averaging.has_outer:
        found = (CLEAR if has_codec else DIFFER, *(MOMENTUM if averaging.has_outer else ()), MOVE)
    return (*found, *LEARNED_SINCE) if averaging.delay else (*found, TAKE_OVER)


def times_moved(passes: Iterable[MemoryPass]) -> int:
    """Bytes that passes read and write per byte of the bucket.

    >>> averaging = Averaging(every=8)
    >>> times_moved(passes_before(averaging, has_codec=False, sends=True))
    2
    >>> times_moved(passes_after(averaging, has_codec=False))
    2
    """
    return sum(each.reads + each.writes for each in passes)


def averaging_tape(
    averaging: Averaging,
    buckets: Sequence[AveragedBucket],
    channels: "ChannelTable",
    *,
    num_parameters: int,
    num_devices: int,
) -> Tape:
    """The tasks of one averaging: copies into buckets, their all-reduces, copies back.

    For a bucket with a codec, senders encode their differences, and all replicas gather the
    messages, decode them and add them up.

    Args:
        averaging: The averaging.
        buckets: Buckets in the order in which ranks handle them.
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
    """Write the passes that fill a bucket, and its encoding if any; returns their buffers."""
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
    channels: "ChannelTable",
    number: int,
    bucket: AveragedBucket,
    reads: Sequence[int],
) -> int:
    """Write the all-reduce of a bucket, or the all-gather of its messages; returns its buffer."""
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
    """Write the work of all replicas after that: decode messages, and take over the result."""
    size = bucket.num_bytes
    cost = size * times_moved(passes_after(averaging, has_codec=bucket.rule is not None))
    if bucket.rounded_bytes:
        cost += size + bucket.rounded_bytes  # masters are read, the model's values written
    for device in bucket.devices:
        read = token
        if bucket.rule is not None:
            decoded = size * len(bucket.senders) * DECODE_BYTES[bucket.rule.codec.kind]
            read = writer.write(TaskKind.DECODE_SUM, number, device, decoded, reads=[token])
        writer.write(TaskKind.FLATTEN, number, device, cost, reads=[read])


def averaging_seconds(evaluator: "Evaluator", strategy: Strategy, choice: "Choice") -> float:
    """Seconds of one averaging of a strategy's parameters, by the referee.

    Args:
        evaluator: Evaluator of the graph on the cluster.
        strategy: Strategy with an averaging.
        choice: The same strategy, encoded.
    """
    tape = averaging_tape(
        strategy.own_mode(Averaging),
        averaged_buckets(evaluator.graph, strategy),
        evaluator.channels,
        num_parameters=len(evaluator.tables.parameter_bytes),
        num_devices=evaluator.cluster.num_devices,
    )
    return evaluator.tape_s(tape, choice)
