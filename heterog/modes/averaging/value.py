"""Averaging: islands of devices that train alone for some steps, then average their parameters.

The teams of every decision are *islands*: gradients are summed inside an island at each step, as
the decision's synchronisation says, and never between islands. After every H steps the parameters
of all islands are averaged (local SGD, Stich 2019). With an outer optimizer the difference to the
last average is a gradient for SGD with Nesterov momentum (DiLoCo, Douillard et al. 2023,
algorithm 1).

The weights that come out are *not* those of one device, but for H = 1 with plain SGD, so a
strategy averages only where a person asked for it.
"""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.modes.codecs.value import codec_rules
from heterog.modes.islands import MOST_STEPS, check_islands, crossing_fault, island_samples
from heterog.modes.mode import EncodedMode, Mode
from heterog.names import shown
from heterog.records import Count, Int32, Record

if TYPE_CHECKING:
    from heterog.cluster.topology import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.lowering.channels import ChannelTable
    from heterog.lowering.choice import Choice
    from heterog.lowering.program import FloatArray, Program
    from heterog.lowering.tables import GraphTables
    from heterog.methods.planner import Planner
    from heterog.modes.on_ranks import RankMode, Rehearsal
    from heterog.runtime.deploy import DeployedStep
    from heterog.runtime.measure.rehearsal import Stage
    from heterog.simulator.evaluator import Evaluator
    from heterog.strategy.strategy import Strategy


class AverageWeights(StrEnum):
    """Weight of an island's parameters in the average."""

    SAMPLES = "samples"
    """In proportion to the samples that it trains on: with H = 1 and SGD, one device's step."""
    EQUAL = "equal"
    """All islands alike, as in DiLoCo."""


class AveragingRecord(Record):
    """An averaging in a file."""

    every: Count
    weights: str
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    delay: Int32 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging(Mode):
    """How and when islands average their parameters.

    With w the average of the islands' parameters and a the parameters after the averaging before,
    the outer optimizer takes d = a - w as a gradient: m = momentum * m + d, and the new parameters
    are a - rate * (d + momentum * m). With rate 1 and momentum 0 they are w.

    With a delay of D steps the average of the parameters s after step t arrives after step t + D,
    while islands train on: what they have then, x, becomes new + (x - s). Nobody waits for it
    unless it takes longer than D steps (CoCoD-SGD, Shen et al. 2019, for D = H), and what an
    island knows of the others is at most H + D steps old.

    With a codec (``CodecRule`` of parameter changes) island i sends c_i = encode(p_i (a - x_i) +
    e_i) of its parameters x_i and weight p_i, and keeps e_i, what the message left out, for the
    next one. All take d = sum_i decode(c_i), in one order, so that they stay equal bit for bit
    (Qsparse-local-SGD, Basu et al. 2019, algorithm 1).

    Attributes:
        every: Number H of training steps from one averaging to the next.
        weights: Weight of each island in the average.
        outer_rate: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        delay: Number D of steps for which an average may be under way; below H.
    """

    key = "averaging"
    word = "average"
    record = AveragingRecord
    goes_with = ("codecs",)
    trains_apart = True
    steps_differ = True
    sends_changes = True

    every: int
    weights: AverageWeights = AverageWeights.SAMPLES
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    delay: int = 0

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
        """Copies of all parameters that stay on a device: outer state, and averages under way.

        With codecs also the parameters after the last averaging, and what messages left out.

        Args:
            is_coded: Whether what averaging sends has codecs.
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
        """The method that searches for it."""
        from heterog.modes.averaging.method import AveragedReplicas, parse_averaging

        return AveragedReplicas(parse_averaging(text))

    def brief_words(self, strategy: "Strategy") -> str:
        """The averaging in a few words."""
        return f"averaged every {self.every} steps"

    def to_json(self) -> object:
        """The averaging as a JSON value."""
        return asdict(self) | {"weights": str(self.weights)}

    @classmethod
    def from_record(cls, record: AveragingRecord) -> "Averaging":
        """The averaging of a record."""
        if record.weights not in list(AverageWeights):
            raise StrategyError(
                f"strategy: field 'averaging.weights' is {shown(record.weights)}, none of "
                f"{', '.join(AverageWeights)}."
            )
        return cls(
            every=record.every,
            weights=AverageWeights(record.weights),
            outer_rate=record.outer_rate,
            outer_momentum=record.outer_momentum,
            delay=record.delay,
        )

    def check(self, strategy: "Strategy", graph: "OpGraph", cluster: "Cluster") -> None:
        """Refuse decisions whose teams are not islands that can train alone."""
        check_islands(strategy, graph.batch_size, "averaging")
        group = group_ops(graph).group
        owners = {strategy.decisions[int(group[op])].devices for op, _, _ in graph.updates}
        for rule in codec_rules(strategy):
            if rule.of_changes and tuple(sorted(rule.devices)) not in owners:
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
        """The part of an averaging that a step has; see ``step_s``."""
        from heterog.modes.averaging.pricing import averaging_seconds

        seconds = averaging_seconds(evaluator, strategy, choice)
        # What a delay hides follows from the step alone, which is simulated once for it.
        local_s = evaluator.local_s(choice) if self.delay else 0.0
        return replace(encoded, more_s=self.step_s(local_s, seconds) - local_s)

    def gradient_scale(self, graph: "OpGraph", strategy: "Strategy", rank: int) -> float:
        """Factor that makes a rank's gradients means over its own island."""
        from heterog.modes.averaging.ranks import gradient_scale

        return gradient_scale(graph, strategy, rank)

    def on_rank(self, step: "DeployedStep") -> "RankMode":
        """The averager of a rank."""
        from heterog.modes.averaging.ranks import averager_of

        return averager_of(step)

    def rehearsal(self, stage: "Stage") -> "Rehearsal":
        """Play one averaging after the steps."""
        from heterog.modes.averaging.rehearsal import RehearsedAveraging

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
    averaging, first = strategy.mode(Averaging), strategy.decisions[0]
    assert averaging is not None
    if averaging.weights == AverageWeights.EQUAL:
        return (1.0 / len(first.teams),) * len(first.teams)
    batch_size = sum(first.shares)
    return tuple(count / batch_size for count in island_samples(strategy, batch_size))
