"""What a mode is: a way to train whose numbers are not those of one device.

A mode is a frozen value in ``Strategy.modes``, and all that exact training knows of modes is this
file and ``on_ranks``. Whatever a mode does has a default here that does nothing, so that a new one
states only what is special about it:

- what it checks on a strategy (``Mode.check``, ``Mode.fault``), and which modes it goes with;
- what it changes in the program and in memory (``Mode.encode``, which makes an ``EncodedMode``);
- what a step costs with it (``Mode.priced``);
- how ranks run it (``Mode.on_rank``, ``Mode.rehearsal`` and the facts that an executor asks for);
- how it is said (``words``), and written and read where that is not field by field (``to_json``,
  ``record``, ``from_record``).

The rooms of ``heterog.modes`` import what is above them in functions only.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
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
    from heterog.runtime.step.rank_program import RankProgram
    from heterog.simulator.evaluator import Evaluator
    from heterog.strategy.schedules import PipelineSchedule
    from heterog.strategy.strategy import Strategy


class MessageCodec(Protocol):
    """An encoding of messages, as the tasks of a program name it."""

    def message_bytes(self, num_elements: int, value_bytes: int) -> int:
        """Bytes of the encoded message of some elements."""

    def encode(self, tensor: Any) -> Any:
        """Encode a tensor of floating-point numbers as a flat message of bytes."""

    def decode(self, message: Any, num_elements: int, dtype: Any) -> Any:
        """Decode a message into a flat tensor."""

    def add_decoded(self, total: Any, message: Any) -> None:
        """Add what a message means to a flat tensor."""


class MessageRule(Protocol):
    """A codec for one kind of messages; programs list those that they follow."""

    @property
    def codec(self) -> MessageCodec:
        """Encoding of the messages."""

    @property
    def is_of_values(self) -> bool:
        """Whether the messages are values, of other samples in each step."""

    @property
    def is_of_gradients(self) -> bool:
        """Whether the messages are gradients of parameters."""

    @property
    def is_of_parameters(self) -> bool:
        """Whether the messages are new parameters."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedMode:
    """What a mode makes of one encoded strategy; by default nothing.

    Attributes:
        more_s: Seconds by which a step takes longer than the same step without the mode, found
            with one simulation of that; below 0 where steps overlap.
        folds: Whether devices that do alike may be lowered once: nothing is stated by device.
        has_floor: Whether no step is shorter than its exact messages hold a link.
        keeps_versions: Whether ``kept_bytes`` are older weights and the batches that use them.
    """

    folds: ClassVar[bool] = True
    has_floor: ClassVar[bool] = True
    keeps_versions: ClassVar[bool] = False

    more_s: float = 0.0

    @property
    def rules(self) -> tuple[MessageRule, ...]:
        """Codec rules of the program's messages, which tasks name by their number from 1."""
        return ()

    def rewritten(self, tape: "Tape", tables: "GraphTables", choice: "Choice") -> "Tape":
        """The tape of a step with the mode's own tasks."""
        return tape

    def resident_bytes(self, tables: "GraphTables", choice: "Choice") -> "FloatArray | float":
        """Bytes that the mode adds to each device, whatever its tasks are."""
        return 0.0

    def kept_bytes(
        self, tape: "Tape", tables: "GraphTables", choice: "Choice"
    ) -> "FloatArray | float":
        """Bytes that the mode's tasks add to each device for the whole step."""
        return 0.0


class Mode(ABC):
    """A way to train whose numbers are not those of one device.

    A mode is a frozen dataclass. Its class has a ``key`` and states what is special about it.
    """

    __slots__ = ()

    key: ClassVar[str]
    """Field of a strategy's file that has the mode."""
    record: ClassVar[Any] = None
    """Type of that field as it is read, of ``heterog.records``; ``None`` for the mode itself."""
    __pydantic_config__: ClassVar = VALUE
    word: ClassVar[str] = ""
    """Word by which a person asks for it, and name of its row; empty without a method."""
    goes_with: ClassVar[tuple[str, ...]] = ()
    """Keys of the modes that a strategy may have beside it."""
    trains_apart: ClassVar[bool] = False
    """Whether gradients are summed inside teams only."""
    overlaps_steps: ClassVar[bool] = False
    """Whether steps overlap, so that the longest chain of a step's ops is no bound."""
    steps_differ: ClassVar[bool] = False
    """Whether some steps take longer than others, so that their mean is what is predicted."""
    sends_changes: ClassVar[bool] = False
    """Whether changes of parameters travel, for which there may be codecs."""
    takes_gradients: ClassVar[bool] = False
    """Whether gradients go to ``RankMode.keep`` instead of this rank's optimizer."""
    counts_labels_alone: ClassVar[bool] = False
    """Whether each rank counts the batch's labels itself, because ranks do not meet in a step."""
    masters_fault: ClassVar[str] = ""
    """Why the mode does not go with master copies of the weights; empty if it does."""
    takes_clipping: ClassVar[bool] = False
    """Whether updates may wait for the norm of all gradients."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The mode in a sentence."""

    @classmethod
    def method(cls, text: str) -> "Planner":
        """The method that searches for what a person asked for in words, like ``average=8``.

        Raises:
            HeterogError: a word is unknown, missing or has no such value.
        """
        raise NotImplementedError

    def brief_words(self, strategy: "Strategy") -> str:
        """The mode in a few words behind a step's seconds; empty for none."""
        return ""

    def sentence(self, strategy: "Strategy") -> str:
        """A sentence of an explanation about it; empty for none."""
        return ""

    def to_json(self) -> object:
        """The mode as a JSON value, which ``record`` reads."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[call-overload]

    @classmethod
    def from_record(cls, record: Any) -> Self | None:
        """The mode of what was read as ``record``; ``None`` for one that does nothing.

        Raises:
            StrategyError: a field has a wrong value; names it.
        """
        found: Self = record
        return found

    @abstractmethod
    def check(self, strategy: "Strategy", graph: "OpGraph", cluster: "Cluster") -> None:
        """Refuse decisions that the mode does not go with.

        Raises:
            StrategyError: there are some; the message says which and why.
        """

    def fault(self, program: "Program", strategy: "Strategy", tables: "GraphTables") -> str:
        """Say why a program of one step cannot be run in this mode; empty if it can."""
        return ""

    def schedule(self, strategy: "Strategy", num_devices: int) -> "PipelineSchedule":
        """Schedule by which the step is lowered."""
        return strategy.schedule

    def encode(
        self, strategy: "Strategy", tables: "GraphTables", channels: "ChannelTable"
    ) -> EncodedMode:
        """What the mode makes of an encoded strategy."""
        return EncodedMode()

    def priced(
        self, encoded: EncodedMode, evaluator: "Evaluator", strategy: "Strategy", choice: "Choice"
    ) -> EncodedMode:
        """The same with ``more_s``.

        Args:
            encoded: What ``encode`` has returned.
            evaluator: Evaluator, for simulations.
            strategy: The strategy.
            choice: The strategy, encoded and not yet priced.
        """
        return encoded

    def gradient_scale(self, graph: "OpGraph", strategy: "Strategy", rank: int) -> float | None:
        """Factor of a rank's gradients as they are summed; ``None`` leaves them as they are.

        It has no effect on gradients that the mode takes itself (``takes_gradients``).
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
        """Device sets that talk beside those of the program's collectives."""
        return set()

    def goes_back(self, program: "Program", tables: "GraphTables") -> list[bool]:
        """Whether each task's transfer needs the lane of gradients; empty where none does."""
        return []

    def owners(self, graph: "OpGraph", strategy: "Strategy") -> tuple[int, ...]:
        """Device whose copy of each parameter counts, by row; empty where all are equal."""
        return ()

    def seen_fault(self, seen: "RankProgram") -> str:
        """Say why a program, as a rank sees it, cannot be run in this mode; empty if it can."""
        return ""

    def on_rank(self, step: "DeployedStep") -> "RankMode":
        """What this rank does around each step."""
        from heterog.modes.on_ranks import RankMode

        return RankMode()

    def rehearsal(self, stage: "Stage") -> "Rehearsal":
        """How the mode is played through on shapes."""
        from heterog.modes.on_ranks import Rehearsal

        return Rehearsal()


def fault_of_modes(program: "Program", strategy: "Strategy", tables: "GraphTables") -> str:
    """Say why a program cannot be run in its strategy's modes; empty if it can."""
    faults = (mode.fault(program, strategy, tables) for mode in strategy.modes)
    return next(filter(None, faults), "")
