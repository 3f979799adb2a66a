"""The protocol of a mode: a way to train whose numbers differ from those of one device.

A mode is a frozen value in ``Strategy.modes``; exact training knows only this file and
``on_ranks`` of modes. Every hook has a default that does nothing, so a new mode overrides only the
hooks that it needs:

- its checks of a strategy (``Mode.check``, ``Mode.fault``), and the modes that it goes with;
- its changes of the program and of memory (``Mode.encode``, which makes an ``EncodedMode``);
- the cost of a step (``Mode.priced``);
- its part on ranks (``Mode.on_rank``, ``Mode.rehearsal`` and the facts that an executor asks for);
- its words (``words``), and its form in files unless that is field by field (``to_json``,
  ``record``, ``from_record``).

The rooms of ``heterog.modes`` import packages of higher layers in functions only.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from heterog.records import VALUE

if TYPE_CHECKING:
    from heterog.cluster.topology import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.lowering.channels import ChannelTable
    from heterog.lowering.choice import Choice
    from heterog.lowering.program import FloatArray, Program
    from heterog.lowering.tables import GraphTables
    from heterog.lowering.tape import Tape
    from heterog.methods.planner import Planner
    from heterog.modes.on_ranks import RankMode, Rehearsal
    from heterog.runtime.deploy import DeployedStep
    from heterog.runtime.measure.rehearsal import Stage
    from heterog.simulator.evaluator import Evaluator
    from heterog.strategy.schedules import PipelineSchedule
    from heterog.strategy.strategy import Strategy


class MessageCodec(Protocol):
    """An encoding of messages, as the tasks of a program use it."""

    def message_bytes(self, num_elements: int, value_bytes: int) -> int:
        """Bytes of the encoded message for a number of elements."""

    def encode(self, tensor: Any) -> Any:
        """Encode a tensor of floating-point numbers as a flat message of bytes."""

    def decode(self, message: Any, num_elements: int, dtype: Any) -> Any:
        """Decode a message into a flat tensor."""

    def add_decoded(self, total: Any, message: Any) -> None:
        """Add a decoded message to a flat tensor."""


class Traffic(IntEnum):
    """The content of a message."""

    ACTIVATIONS = 0
    """Values of the forward pass, sent between groups on different devices."""
    ACTIVATION_GRADIENTS = 1
    """Values of the backward pass, sent between stages."""
    GRADIENTS = 2
    """Gradients of parameters: in all-reduces, and pushed to parameter servers."""
    PARAMETERS = 3
    """New parameters, pulled from parameter servers."""
    PARAMETER_CHANGES = 4
    """Changes of an island's parameters since the last averaging."""

    @property
    def words(self) -> str:
        """Name of the traffic in a sentence."""
        return self.name.lower().replace("_", " ")


OF_VALUES = (Traffic.ACTIVATIONS, Traffic.ACTIVATION_GRADIENTS)
"""Traffic of values, which belong to other samples in each step, so a codec's error is lost."""


class MessageRule(Protocol):
    """A codec for one kind of messages; a program lists its rules."""

    @property
    def codec(self) -> MessageCodec:
        """Encoding of the messages."""

    @property
    def traffic(self) -> Traffic:
        """Content of the messages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedMode:
    """A mode's effects on one encoded strategy; by default none.

    Attributes:
        more_s: Seconds that the mode adds to a step, from one simulation of the step without the
            mode; below 0 if steps overlap.
        folds: Whether devices with equal work may be lowered once; not if the mode has numbers by
            device.
        has_floor: Whether the time that exact messages hold a link is a lower bound of a step.
        keeps_versions: Whether ``kept_bytes`` are older weights and the batches that use them.
    """

    folds: ClassVar[bool] = True
    has_floor: ClassVar[bool] = True
    keeps_versions: ClassVar[bool] = False

    more_s: float = 0.0

    @property
    def rules(self) -> tuple[MessageRule, ...]:
        """Codec rules of the program's messages; tasks refer to them by number from 1."""
        return ()

    def rewritten(self, tape: "Tape", tables: "GraphTables", choice: "Choice") -> "Tape":
        """The tape of a step with the mode's own tasks."""
        return tape

    def resident_bytes(self, tables: "GraphTables", choice: "Choice") -> "FloatArray | float":
        """Bytes that the mode adds to each device, independent of tasks."""
        return 0.0

    def kept_bytes(
        self, tape: "Tape", tables: "GraphTables", choice: "Choice"
    ) -> "FloatArray | float":
        """Bytes that the mode's tasks add to each device for the whole step."""
        return 0.0


class Mode(ABC):
    """A way to train whose numbers differ from those of one device.

    A mode is a frozen dataclass. Its class has a ``key`` and overrides the defaults that differ.
    """

    __slots__ = ()

    key: ClassVar[str]
    """Name of the mode's field in a strategy's file."""
    record: ClassVar[Any] = None
    """Type of this field in a file (``heterog.records``); ``None`` for the mode's own fields."""
    __pydantic_config__: ClassVar = VALUE
    word: ClassVar[str] = ""
    """Word by which a user asks for the mode, and name of its row; empty without a method."""
    goes_with: ClassVar[tuple[str, ...]] = ()
    """Keys of the modes that a strategy may combine with this mode."""
    trains_apart: ClassVar[bool] = False
    """Whether gradients are summed inside teams only."""
    overlaps_steps: ClassVar[bool] = False
    """Whether steps overlap, so that the longest chain of a step's ops is no lower bound."""
    steps_differ: ClassVar[bool] = False
    """Whether some steps take longer than others, so that predictions are mean step times."""
    sends_changes: ClassVar[bool] = False
    """Whether ranks send changes of parameters, which may have codecs."""
    takes_gradients: ClassVar[bool] = False
    """Whether gradients go to ``RankMode.keep`` instead of this rank's optimizer."""
    counts_labels_alone: ClassVar[bool] = False
    """Whether each rank counts the batch's labels itself, because ranks do not wait for each other
    in a step."""
    masters_fault: ClassVar[str] = ""
    """Why the mode does not work with master copies of the weights; empty if it does."""
    takes_clipping: ClassVar[bool] = False
    """Whether updates may wait for the norm of all gradients."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The mode in a sentence."""

    @classmethod
    def method(cls, text: str) -> "Planner":
        """The method that searches plans with the mode, asked for in words like ``average=8``.

        Raises:
            HeterogError: a word is unknown, missing or has no such value.
        """
        raise NotImplementedError

    def brief_words(self, strategy: "Strategy") -> str:
        """The mode in a few words, shown after a step's seconds; empty for none."""
        return ""

    def sentence(self, strategy: "Strategy") -> str:
        """A sentence about the mode for the explanation of a plan; empty for none."""
        return ""

    def to_json(self) -> object:
        """The mode as a JSON value, which ``record`` reads."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def from_record(cls, record: Any) -> Self | None:
        """The mode from a value read as ``record``; ``None`` if it has no effect.

        Raises:
            StrategyError: a field has a wrong value; the message names it.
        """
        found: Self = record
        return found

    @abstractmethod
    def check(self, strategy: "Strategy", graph: "OpGraph", cluster: "Cluster") -> None:
        """Refuse decisions that the mode does not work with.

        Raises:
            StrategyError: there are some; the message names them and the reason.
        """

    def fault(self, program: "Program", strategy: "Strategy", tables: "GraphTables") -> str:
        """Why a program of one step cannot be run in this mode; empty if it can."""
        return ""

    def schedule(self, strategy: "Strategy", num_devices: int) -> "PipelineSchedule":
        """Schedule by which the step is lowered."""
        return strategy.schedule

    def encode(
        self, strategy: "Strategy", tables: "GraphTables", channels: "ChannelTable"
    ) -> EncodedMode:
        """The mode's effects on an encoded strategy."""
        return EncodedMode()

    def priced(
        self, encoded: EncodedMode, evaluator: "Evaluator", strategy: "Strategy", choice: "Choice"
    ) -> EncodedMode:
        """The encoded mode with ``more_s``.

        Args:
            encoded: Result of ``encode``.
            evaluator: Evaluator, for simulations.
            strategy: The strategy.
            choice: The strategy, encoded and not yet priced.
        """
        return encoded

    def gradient_scale(self, graph: "OpGraph", strategy: "Strategy", rank: int) -> float | None:
        """Factor of a rank's gradients in their sum; ``None`` leaves them unscaled.

        It has no effect on gradients that the mode takes (``takes_gradients``).
        """
        return None

    def loss_part(
        self, graph: "OpGraph", strategy: "Strategy", rank: int
    ) -> tuple[float, tuple[int, ...]] | None:
        """Factor of a rank's part of the loss, and the devices over which the parts are summed.

        ``None`` for the sum over all ranks.
        """
        return None

    def device_sets(self, program: "Program", strategy: "Strategy") -> set[tuple[int, ...]]:
        """Further device sets that communicate, beside those of the program's collectives."""
        return set()

    def goes_back(self, program: "Program", tables: "GraphTables") -> list[bool]:
        """Whether each task's transfer needs the lane of gradients; empty if none does."""
        return []

    def owners(self, graph: "OpGraph", strategy: "Strategy") -> tuple[int, ...]:
        """Device whose copy of each parameter counts, by row; empty if all copies are equal."""
        return ()

    def on_rank(self, step: "DeployedStep") -> "RankMode":
        """The mode's work on this rank around each step."""
        from heterog.modes.on_ranks import RankMode

        return RankMode()

    def rehearsal(self, stage: "Stage") -> "Rehearsal":
        """The mode's part in a rehearsal, which runs on shapes."""
        from heterog.modes.on_ranks import Rehearsal

        return Rehearsal()


def fault_of_modes(program: "Program", strategy: "Strategy", tables: "GraphTables") -> str:
    """Why a program cannot be run in its strategy's modes; empty if it can."""
    faults = (mode.fault(program, strategy, tables) for mode in strategy.modes)
    return next(filter(None, faults), "")
