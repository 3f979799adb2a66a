"""Code of what a rank does between two points where it has to talk to other ranks.

The first step is interpreted, op by op, and notes how each op reads its inputs. From then on a run
of ops is a function of generated Python, straight-line code on local variables:

    v0 = batch[c0]
    v1 = addmm(parameters[c1], cut(v0, c2, 8, 0, 4), t(parameters[c3]))
    del v0
    held[c4] = Held(v1, c5, c6)

Everything else (communication, conversions, ops that need more of the step than tensors) is a turn
of its own between two segments, in the same order as before. A value is dropped after the last op
that reads it, as in the interpreter. What differs between segments that do alike (parameters,
buffers, samples) is a constant ``c``, so that they have one text, which is compiled once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from heterog.graph.placement import TensorRef
from heterog.lowering.program import TaskKind
from heterog.runtime.step.collectives import Communicator
from heterog.runtime.step.local_op import Kernel, LocalOp
from heterog.runtime.step.optimizer import StepUpdates, Updates
from heterog.runtime.step.random_stream import RandomStream
from heterog.runtime.step.rank_program import OP_KINDS, Near, RankProgram
from heterog.runtime.step.recipes import Begin, Recipe
from heterog.runtime.step.spans import Span
from heterog.runtime.step.step_order import DueTask
from heterog.runtime.step.values import Held, Reader, Values

Segment = Callable[[dict[int, Held], Mapping[int, Tensor], StepUpdates, int], None]
"""Takes what is held, the batch, the state of the step and its number."""


@dataclass(slots=True, kw_only=True)
class NotedOp:
    """What a task does that runs an op, and how it read its inputs when it last ran.

    Attributes:
        local_op: The op.
        reader: This rank, as the op reads.
        near: Buffers that the task reads.
        made: Buffers that it makes.
        micro: The micro-batch.
        units: Part of its outputs.
        draws_for: Rank whose random numbers it draws; ``None`` if every rank draws the same.
        is_special: Whether it needs more of the step than its inputs, so that it is no part of a
            segment.
        inputs: How each input was read; ``None`` where more was done than views and cuts.
        gradients: Rows of ``graph.updates`` whose gradients it made, and how they were read.
    """

    local_op: LocalOp
    reader: Reader
    near: Near
    made: range
    micro: int
    units: Span
    draws_for: int | None
    is_special: bool
    inputs: list[Recipe | None] = field(default_factory=list)
    gradients: list[tuple[int, Recipe | None]] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether all that it does is known."""
        recipes = *self.inputs, *(recipe for _, recipe in self.gradients)
        return not self.is_special and None not in recipes

    def kernel(self) -> Kernel:
        """The call of its kernel."""
        reader, op = self.reader, self.local_op
        return op.kernel(
            reader.extent or op.whole,
            is_first=reader.is_first,
            is_first_member=reader.is_first_member,
            first_unit=reader.units[0],
        )


class Piece(NamedTuple):
    """Turns that are run together.

    Attributes:
        turn: The first turn.
        segment: Runs all of them; ``None`` if the turn is alone, and run in another way.
    """

    turn: DueTask
    segment: Segment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Makes segments of one rank's turns.

    Args:
        part: The program as this rank sees it.
        values: Values of the step.
        parameters: Parameters of this rank, by tensor id.
        read_parameter: Reads a parameter that may be under way; ``None`` if none is in a step.
        buffers: Buffers and constants of the model, by tensor id.
        updates: Is told which parameters may be updated.
        random: Random numbers of ops.
        communicator: Communication with the other ranks.
        sent_before: Transfers that ops wait for, by task.
        noted: What is known of tasks that run ops, by task.
    """

    part: RankProgram
    values: Values
    parameters: Mapping[int, nn.Parameter]
    read_parameter: Callable[[int], Tensor] | None
    buffers: Mapping[int, Tensor]
    updates: Updates
    random: RandomStream
    communicator: Communicator
    sent_before: Mapping[int, Sequence[int]]
    noted: Mapping[int, NotedOp]

    def pieces(self, turns: Sequence[DueTask], *, apart: bool) -> list[Piece]:
        """Cut turns into segments and what is between them.

        Args:
            turns: Turns that follow one another.
            apart: Whether each turn is a piece of its own, so that it can be timed.
        """
        pieces: list[Piece] = []
        run: list[DueTask] = []
        for turn in turns:
            fits = self._fits(turn)
            if run and (apart or not fits):
                pieces.append(Piece(run[0], self._segment(run)))
                run = []
            if fits:
                run.append(turn)
            else:
                pieces.append(Piece(turn, None))
        return [*pieces, Piece(run[0], self._segment(run))] if run else pieces

    def _fits(self, turn: DueTask) -> bool:
        """Whether a turn can be a part of a segment."""
        task, of_step_before = turn
        if task < 0 or of_step_before:
            return False
        kind = self.part.kinds[task]
        if kind in OP_KINDS:
            return task in self.noted and self.noted[task].is_plain
        return kind in (TaskKind.UPDATE, TaskKind.ACCUMULATE)

    def _segment(self, turns: Sequence[DueTask]) -> Segment:
        return _Writer(self, [task for task, _ in turns]).segment()


class _Writer:
    """Writes the text of one segment."""

    def __init__(self, given: Segments, tasks: Sequence[int]) -> None:
        self._given, self._tasks = given, tasks
        self._lines: list[str] = []
        self._constants: dict[object, tuple[str, object]] = {}
        self._names: dict[int, str] = {}  # of buffers in local variables
        self._num_names = 0
        self._reads: dict[int, int] = {}  # of each buffer in this segment
        self._op_reads: dict[int, int] = {}  # by ops
        self._last: dict[int, list[int]] = {}  # buffers by the task that reads them last
        last: dict[int, int] = {}
        for task in tasks:
            counts = [self._reads] + [self._op_reads] * (given.part.kinds[task] in OP_KINDS)
            for buffer in given.part.reads(task):
                for count in counts:
                    count[buffer] = count.get(buffer, 0) + 1
                last[buffer] = task
        for buffer, task in last.items():
            self._last.setdefault(task, []).append(buffer)
        self._own: set[int] = set()  # buffers that no task outside of this segment looks for

    def segment(self) -> Segment:
        """The function."""
        given = self._given
        for task in self._tasks:
            kind, subject = given.part.kinds[task], int(given.part.program.subject[task])
            if kind is TaskKind.UPDATE:
                update = self._constant(given.updates.update)
                self._lines.append(f"{update}({self._constant(subject)}, step)")
            elif kind is TaskKind.ACCUMULATE:
                where = f"{self._constant(task)}, {self._constant(subject)}"
                self._lines.append(f"step.gradients.accumulate({where})")
            else:
                self._write_op(task, given.noted[task])
            self._drop_read_by(task)
        constants = list(self._constants.values())
        text = _TEXT.format(
            names=", ".join(name for name, _ in constants), body="\n        ".join(self._lines)
        )
        return _function(text, [value for _, value in constants])

    def _write_op(self, task: int, noted: NotedOp) -> None:
        for send in self._given.sent_before.get(task, ()):
            wait = self._constant(self._given.communicator.wait_for_send)
            self._lines.append(f"{wait}({self._constant(send)})")
        inputs = [self._read(recipe) for recipe in noted.inputs if recipe is not None]
        kernel = noted.kernel()
        given = [self._argument(each, inputs) for each in kernel.positional]
        given += [f"{name}={self._argument(v, inputs)}" for name, v in kernel.keywords.items()]
        call = f"{self._constant(kernel.function)}({', '.join(given)})"
        values = self._given.values
        of_gradients = {recipe.key for _, recipe in noted.gradients if recipe is not None}
        # A token may follow what is made, which only orders tasks.
        outputs = noted.made[: 1 if kernel.kept is None else len(kernel.kept)]
        kept = [b for b in outputs if values.is_ever_read(b) or b in of_gradients]
        indent = ""
        if noted.local_op.is_random:
            stream = self._constant(self._given.random.drawing)
            which = ", ".join(map(self._constant, (noted.local_op.index, noted.micro)))
            rank = self._constant(noted.draws_for)
            self._lines.append(f"with {stream}(number, {which}, rank={rank}):")
            indent = "    "
        if not kept:
            self._lines.append(f"{indent}{call}")
        elif kernel.kept is None:
            self._lines.append(f"{indent}{self._name(kept[0])} = {call}")
        else:
            self._lines.append(f"{indent}made = {call}")
            for buffer, place in zip(outputs, kernel.kept, strict=True):
                if buffer in kept:
                    self._lines.append(f"{self._name(buffer)} = made[{place}]")
            self._lines.append("del made")
        self._keep(noted, kept)

    def _keep(self, noted: NotedOp, kept: Sequence[int]) -> None:
        """Keep what an op has made for those who look for it."""
        values = self._given.values
        for buffer in kept:
            if values.num_value_reads(buffer) > self._op_reads.get(buffer, 0):
                share = f"{self._constant(noted.reader.samples)}, {self._constant(noted.units)}"
                value = f"Held({self._names[buffer]}, {share})"
                self._lines.append(f"held[{self._constant(buffer)}] = {value}")
            else:
                self._own.add(buffer)
        for row, recipe in noted.gradients:
            assert recipe is not None
            where = f"{self._constant(row)}, {self._constant(noted.micro)}"
            self._lines.append(f"step.gradients.keep_row({where}, {self._read(recipe)})")
        for buffer in kept:
            if buffer not in self._reads:
                self._lines.append(f"del {self._names.pop(buffer)}")

    def _drop_read_by(self, task: int) -> None:
        """Drop the buffers of which a task is the last reader here."""
        for buffer in self._last.get(task, ()):
            if buffer in self._names:
                self._lines.append(f"del {self._names.pop(buffer)}")
            if buffer not in self._own and self._given.part.value_in(buffer)[0] != -1:
                drop = self._constant(self._given.values.count_reads)
                self._lines.append(f"{drop}({self._constant(buffer)}, {self._reads[buffer]})")

    def _read(self, recipe: Recipe) -> str:
        """An expression that reads as noted."""
        begin, key, steps = recipe
        if begin is Begin.HELD:
            text = self._names.get(key, "")
            if not text:
                text = self._name(key)
                self._lines.append(f"{text} = held[{self._constant(key)}].tensor()")
        elif begin is Begin.BATCH:
            text = f"batch[{self._constant(key)}]"
        elif begin is Begin.MODEL_BUFFER:
            text = f"{self._constant(self._given.buffers)}[{self._constant(key)}]"
        elif self._given.read_parameter is not None:
            text = f"{self._constant(self._given.read_parameter)}({self._constant(key)})"
        else:
            text = f"{self._constant(self._given.parameters)}[{self._constant(key)}]"
        for function, arguments in steps:
            others = "".join(f", {self._constant(each)}" for each in arguments)
            text = f"{self._constant(function)}({text}{others})"
        return text

    def _argument(self, value: Any, inputs: Sequence[str]) -> str:
        """An argument of a kernel."""
        if isinstance(value, TensorRef):
            return inputs[value.index]
        if isinstance(value, tuple):
            return f"[{', '.join(self._argument(each, inputs) for each in value)}]"
        return repr(value) if type(value) in _LITERALS else self._constant(value)

    def _name(self, buffer: int) -> str:
        """A new local variable for a buffer."""
        name = self._names[buffer] = f"v{self._num_names}"
        self._num_names += 1
        return name

    def _constant(self, value: object) -> str:
        """The name of something that is the same in every step."""
        key = (type(value), value) if type(value) in _BY_VALUE else id(value)
        name, _ = self._constants.setdefault(key, (f"c{len(self._constants)}", value))
        return name


_LITERALS = (int, bool, type(None))
_BY_VALUE = (int, tuple, type(None), MethodType)
_TEXT = """\
def make({names}):
    def segment(held, batch, step, number):
        {body}
    return segment
"""


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<segment>", "exec")


def _function(text: str, constants: Sequence[object]) -> Segment:
    names: dict[str, Any] = {"Held": Held}
    exec(_compiled(text), names)
    segment: Segment = names["make"](*constants)
    return segment
