"""Generates code for a rank's ops between two points of communication.

The first step is interpreted, op by op, and finds how each op reads its inputs. From then on
consecutive ops are one function of generated Python, straight-line code on local variables:

    v0 = batch[c0]
    v1 = addmm(parameters[c1], cut(v0, c2, 8, 0, 4), t(parameters[c3]))
    del v0
    held[c4] = HeldValue(v1, c5, c6)

Everything else (communication, conversions, ops that need more of the step than tensors) is a turn
of its own between two segments, in the same order as before. A value is dropped after the last op
that reads it, as in the interpreter. Equal segments differ only in constants ``c`` (parameters,
buffers, samples), so that they have one text, which Python compiles once.

If steps are compiled, the ops of a segment are a function of their own, which inductor compiles
(``compiled``). Its arguments are the tensors that it reads, its results those that other turns
read. Ops that draw random numbers or update statistics stay outside, and draw the same numbers as
ever; so do ops that inductor computes otherwise. A segment then ends where gradients of
micro-batches are added up, so that they need not all exist at once.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import groupby
from types import CodeType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_list

from heterog.graph.placement import Placement, TensorRef
from heterog.lowering.program import OP_KINDS, TaskKind
from heterog.pricing.device_models.fusion import LEAST_OF_A_LAYER, layer_of
from heterog.runtime.step.compiled import Compiler, is_computed_otherwise
from heterog.runtime.step.interpreter import NotedOp
from heterog.runtime.step.optimizer import StepUpdates, Updates
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recipes import Begin, Like, Recipe
from heterog.runtime.step.replays import Replay
from heterog.runtime.step.step_order import DueTask
from heterog.runtime.step.values import HeldValue, Values

Segment = Callable[[dict[int, HeldValue], Mapping[int, Tensor], StepUpdates, int], None]
"""Takes the held values, the batch, the state of the step and its number."""


class _Way(Enum):
    """How a turn is run: by itself, in a segment, or in one that is compiled."""

    ALONE = 0
    IN_SEGMENT = 1
    COMPILED = 2


class Piece(NamedTuple):
    """Turns that are run together.

    Attributes:
        turn: The first turn.
        segment: Runs all of them; ``None`` for a single turn that the executor runs.
    """

    turn: DueTask
    segment: Segment | None


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Makes segments of one rank's turns.

    Args:
        rank: What the rank runs the program with.
        values: Values of the step.
        read_parameter: Reads a parameter that may be under way; ``None`` if none ever is.
        updates: Gets the parameters that may be updated.
        sent_before: Transfers that ops wait for, by task.
        noted: Notes on tasks that run ops, by task.
        compiler: Compiles segments; ``None`` runs them as they are.
    """

    rank: RankState
    values: Values
    read_parameter: Callable[[int], Tensor] | None
    updates: Updates
    sent_before: Mapping[int, Sequence[int]]
    noted: Mapping[int, NotedOp]
    compiler: Compiler | None = None

    @property
    def part(self) -> RankProgram:
        """The program as this rank sees it."""
        return self.rank.part

    @cached_property
    def sent(self) -> frozenset[int]:
        """Buffers that are read outside of compiled parts, where there are other ranks.

        They may be sent, as they are or as a view.
        """
        part = self.part
        if part.program.num_devices == 1:
            return frozenset()
        mine = np.flatnonzero(part.is_mine).tolist()
        outside = (t for t in mine if self._way(DueTask(t, False)) is not _Way.COMPILED)
        return frozenset(b for task in outside for b in part.reads(task))

    @cached_property
    def likes(self) -> Mapping[int, Like]:
        """Properties of each buffer that ops read, as in the first step."""
        recipes = (recipe for noted in self.noted.values() for recipe in noted.recipes)
        simple = (each for each in recipes if each is not None and each.is_simple)
        return {each.key: each.like for each in simple if each.begin is Begin.HELD}

    def pieces(self, turns: Sequence[DueTask], *, apart: bool) -> list[Piece]:
        """Cut turns into segments and single turns between them.

        Args:
            turns: Consecutive turns.
            apart: Whether each turn is a piece of its own, so that it can be timed.
        """
        pieces: list[Piece] = []
        waiting = self._first_to_wait(turns) if self.compiler is not None else frozenset[int]()
        for way, group in groupby(turns, self._way):
            run = list(group)
            if way is _Way.ALONE:
                pieces += [Piece(turn, None) for turn in run]
                continue
            compiles = way is _Way.COMPILED and not apart
            parts = self._compiled_parts(run, waiting) if compiles else [run]
            for part in [[turn] for turn in run] if apart else parts:
                pieces.append(Piece(part[0], _Writer(self, part, compiles=compiles).segment()))
        if self.compiler is not None:
            self.compiler.compile()
        return pieces

    def _first_to_wait(self, turns: Sequence[DueTask]) -> frozenset[int]:
        """Tasks that are the first to read a value from another rank."""
        first: dict[int, int] = {}
        for task, of_step_before in turns:
            if task >= 0 and not of_step_before:
                for buffer in self.part.reads(task):
                    first.setdefault(buffer, task)
        program = self.part.program
        return frozenset(
            task
            for buffer, task in first.items()
            if program.channel[program.buffer_maker[buffer]] >= 0
        )

    def _compiled_parts(
        self, turns: Sequence[DueTask], waiting: frozenset[int]
    ) -> list[list[DueTask]]:
        """Cut turns into parts that are compiled together.

        They are cut at the ends of numbered layers, because equal layers are compiled once, and
        before an op that waits for another rank, because earlier ops need not wait. A part that is
        shorter than a layer stays with the next one, so that they can be fused. They are always
        cut before an op that comes again, because a compiler would compute it only once.
        """
        parts: list[list[DueTask]] = [[]]
        done: set[tuple[int, int]] = set()  # ops of the last part, with their micro-batches
        now = ""
        for turn in turns:
            noted = self.noted.get(turn.task)
            if noted is not None:
                op, micro = noted.local_op.index, noted.reader.micro
                name = layer_of(self.part.graph.ops[op].module)
                is_border = name != now or turn.task in waiting
                if (op, micro) in done or (is_border and len(parts[-1]) >= LEAST_OF_A_LAYER):
                    parts.append([])
                    done.clear()
                now = name
                done.add((op, micro))
            parts[-1].append(turn)
        return parts

    def _way(self, turn: DueTask) -> "_Way":
        """How a turn is run."""
        task, noted = turn.task, self.noted.get(turn.task)
        if not self._fits(turn):
            return _Way.ALONE
        if self.compiler is None or task in self.sent_before:
            return _Way.IN_SEGMENT
        if noted is None:
            return _Way.COMPILED if self.part.kinds[task] is TaskKind.UPDATE else _Way.IN_SEGMENT
        op = noted.local_op
        stays = op.is_random or op.steps_statistics or is_computed_otherwise(op.call)
        return _Way.IN_SEGMENT if stays else _Way.COMPILED

    def _fits(self, turn: DueTask) -> bool:
        """Whether a turn can be a part of a segment."""
        task, of_step_before = turn
        if task < 0 or of_step_before:
            return False
        kind = self.part.kinds[task]
        if kind in OP_KINDS:
            return task in self.noted and self.noted[task].is_plain
        return kind in (TaskKind.UPDATE, TaskKind.ACCUMULATE)


class _Body:
    """The lines of a function, and what is constant in them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._constants: dict[object, tuple[str, object]] = {}

    def add(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)

    def constant(self, value: object) -> str:
        """The name of a value that is the same in every step."""
        key = (type(value), value) if type(value) in _BY_VALUE else id(value)
        name, _ = self._constants.setdefault(key, (f"c{len(self._constants)}", value))
        return name

    def function(self, parameters: str) -> Callable[..., Any]:
        """The function."""
        names: dict[str, Any] = {"HeldValue": HeldValue}
        exec(_compiled(self._text(parameters)), names)
        made: Callable[..., Any] = names["make"](*(value for _, value in self._constants.values()))
        return made

    def key(self, parameters: str) -> tuple[Hashable, ...]:
        """Equal for functions that do the same."""
        values = (value for _, value in self._constants.values())
        alike = (repr(each) if type(each) in _SHOWN else id(each) for each in values)
        return self._text(parameters), *alike

    def _text(self, parameters: str) -> str:
        return _TEXT.format(
            names=", ".join(name for name, _ in self._constants.values()),
            parameters=parameters,
            body="\n        ".join(self.lines or ["pass"]),
        )


class _Writer:
    """Writes one segment.

    If it is compiled, its ops are in a function of their own, ``inner``. The call of ``inner``
    comes after the lines of ``outer`` that read values and before those (``after``) that keep
    results.
    """

    def __init__(self, given: Segments, turns: Sequence[DueTask], *, compiles: bool) -> None:
        self._given, self._tasks = given, [turn.task for turn in turns]
        self._all_tasks = frozenset(self._tasks)
        self._compiles = compiles
        self._outer = _Body()
        self._inner = _Body() if compiles else self._outer
        self._after: list[str] = [] if compiles else self._outer.lines
        # Of ``inner``: how each is read, and whether it is a parameter or a buffer of the model.
        self._inputs: dict[str, tuple[str, Like, bool]] = {}
        self._outputs: dict[str, bool] = {}  # and whether each is sent
        self._names: dict[int, str] = {}  # of buffers in local variables
        self._num_names = 0
        self._last_reader: dict[int, int] = {}  # in this segment
        for task in self._tasks:
            self._last_reader |= dict.fromkeys(given.part.reads(task), task)
        noted = [given.noted[task] for task in self._tasks if task in given.noted]
        self._read_again = _read_again(recipe for each in noted for recipe in each.recipes)
        self._views: dict[_View, str] = {}  # in local variables
        self._made: set[int] = set()  # buffers that are made here
        self._own: set[int] = set()  # of these, buffers that only this segment reads

    def segment(self) -> Segment:
        """The function."""
        given = self._given
        for task in self._tasks:
            kind, subject = given.part.kinds[task], int(given.part.program.subject[task])
            constant = self._outer.constant
            if kind is TaskKind.UPDATE:
                self._after.append(f"{constant(given.updates.update)}({constant(subject)}, step)")
            elif kind is TaskKind.ACCUMULATE:
                where = f"{constant(task)}, {constant(subject)}"
                self._after.append(f"step.gradients.accumulate({where})")
            else:
                self._write_op(task, given.noted[task])
            self._drop_read_by(task)
        if self._compiles:
            self._call_inner()
        return self._outer.function("held, batch, step, number")

    def _call_inner(self) -> None:
        """Have the ops compiled, and call them between the lines that read and that keep."""
        compiler, outer, inner = self._given.compiler, self._outer, self._inner
        assert compiler is not None
        if self._outputs:
            names = ", ".join(self._inputs)
            inner.lines[:0] = [f"[{names}] = given", "given.clear()"]
            inner.add(f"return [{', '.join(self._outputs)}]")
            likes = tuple(like for _, like, _ in self._inputs.values())
            num_ops = sum(task in self._given.noted for task in self._tasks)
            part = compiler.part(inner.key("given"), inner.function("given"), likes, num_ops)
            reads, outer.lines[:] = list(outer.lines), []
            outer.add(f"given = [{', '.join(read for read, *_ in self._inputs.values())}]")
            outer.lines += reads
            call = f"{outer.constant(part)}.run(given)"
            if compiler.replays is not None:
                stays = [each[2] for each in self._inputs.values()]
                is_sent = list(self._outputs.values())
                replay = Replay(lambda given: part.run(given), compiler.replays, stays, is_sent)
                call = f"{outer.constant(replay)}.run(given, number)"
            outer.add(f"[{', '.join(self._outputs)}] = {call}")
        outer.lines += self._after

    def _write_op(self, task: int, noted: NotedOp) -> None:
        outer, inner = self._outer, self._inner
        for send in self._given.sent_before.get(task, ()):
            wait = outer.constant(self._given.rank.communicator.wait_for_send)
            outer.add(f"{wait}({outer.constant(send)})")
        inputs = [self._read(recipe) for recipe in noted.inputs]
        kernel = noted.local_op.kernel(noted.share)
        given = [self._argument(each, inputs) for each in kernel.positional]
        given += [f"{name}={self._argument(v, inputs)}" for name, v in kernel.keywords.items()]
        call = f"{inner.constant(kernel.function)}({', '.join(given)})"
        values = self._given.values
        of_gradients = {recipe.key for _, recipe in noted.gradients if recipe is not None}
        # Without a token at the end, which only orders tasks.
        num_made = 1 if kernel.kept is None else len(kernel.kept)
        outputs = self._given.part.made(task)[:num_made]
        kept = [b for b in outputs if values.is_ever_read(b) or b in of_gradients]
        self._made.update(kept)
        indent = ""
        if noted.local_op.is_random:
            which = ", ".join(map(outer.constant, (noted.local_op.index, noted.reader.micro)))
            stream, rank = map(outer.constant, (self._given.rank.random.drawing, noted.draws_for))
            outer.add(f"with {stream}(number, {which}, rank={rank}):")
            indent = "    "
        if not kept:
            inner.add(f"{indent}{call}")
        elif kernel.kept is None:
            inner.add(f"{indent}{self._name(kept[0])} = {call}")
        else:
            inner.add(f"{indent}made = {call}")
            for buffer, place in zip(outputs, kernel.kept, strict=True):
                if buffer in kept:
                    inner.add(f"{self._name(buffer)} = made[{place}]")
            inner.add("del made")
        self._keep(noted, kept)

    def _keep(self, noted: NotedOp, kept: Sequence[int]) -> None:
        """Keep an op's outputs for readers outside of the segment, and its gradients."""
        values, constant = self._given.values, self._outer.constant
        for buffer in kept:
            if not self._all_tasks.issuperset(values.value_readers(buffer)):
                name = value = self._names[buffer]
                share = f"{constant(noted.reader.samples)}, {constant(noted.units)}"
                if self._compiles and buffer in self._given.likes:
                    _, stride, dtype, _ = self._given.likes[buffer]
                    value = f"{constant(lying_as)}({name}, {constant(stride)}, {constant(dtype)})"
                self._after.append(f"held[{constant(buffer)}] = HeldValue({value}, {share})")
                self._outputs[name] = buffer in self._given.sent
            else:
                self._own.add(buffer)
        for row, recipe in noted.gradients:
            assert recipe is not None
            gradient = self._read(recipe)
            if self._compiles:
                name = self._new_name()
                self._inner.add(f"{name} = {gradient}")
                self._outputs[name] = self._given.part.program.num_devices > 1
                gradient = name
            if self._given.part.is_own(row, noted.reader.micro):
                self._after.append(f"step.gradients.own[{constant(row)}] = {gradient}")
                continue
            where = f"{constant(row)}, {constant(noted.reader.micro)}"
            self._after.append(f"step.gradients.keep_row({where}, {gradient})")
        for buffer in kept:
            if buffer not in self._last_reader:
                self._drop(buffer)

    def _drop(self, buffer: int) -> None:
        """Delete a buffer's local variable and those of views of it, if there are any."""
        names = [self._names.pop(buffer, "")]
        for view in [each for each in self._views if each[:2] == (Begin.HELD, buffer)]:
            names.append(self._views.pop(view))
        gone = [name for name in names if name and name not in self._outputs]
        if gone:
            self._inner.add(f"del {', '.join(gone)}")

    def _drop_read_by(self, task: int) -> None:
        """Drop the buffers whose last reader, here or in the step, is this task."""
        part, values = self._given.part, self._given.values
        for buffer in dict.fromkeys(part.reads(task)):
            if self._last_reader[buffer] != task:
                continue
            self._drop(buffer)
            is_held = buffer not in self._own and part.value_in(buffer)[0] != -1  # no token
            if is_held and values.is_last_reader(task, buffer):
                # Before the call of compiled ops, unless these make it.
                lines = self._after if buffer in self._made else self._outer.lines
                lines.append(f"held.pop({self._outer.constant(buffer)}, None)")

    def _read(self, recipe: Recipe) -> str:
        """An expression that follows a recipe."""
        begin, key, like = recipe.begin, recipe.key, recipe.like
        constant = self._outer.constant
        if begin is Begin.HELD:
            text = self._names.get(key, "")
            if not text:
                text = self._name(key)
                value = f"held[{constant(key)}].tensor()"
                if self._compiles:
                    self._inputs[text] = value, like, False
                else:
                    self._outer.add(f"{text} = {value}")
        else:
            if begin is Begin.BATCH:
                text = f"batch[{constant(key)}]"
            elif begin is Begin.MODEL_BUFFER:
                text = f"{constant(self._given.rank.buffers)}[{constant(key)}]"
            elif self._given.read_parameter is not None:
                text = f"{constant(self._given.read_parameter)}({constant(key)})"
            else:
                text = f"{constant(self._given.rank.parameters)}[{constant(key)}]"
            if self._compiles:
                known = next((name for name, how in self._inputs.items() if how[0] == text), "")
                name = known or self._new_name()
                stays = begin is not Begin.BATCH and self._given.read_parameter is None
                self._inputs[name] = text, like, stays
                text = name
        for number, (function, arguments) in enumerate(recipe.steps, 1):
            others = "".join(f", {self._inner.constant(each)}" for each in arguments)
            text = f"{self._inner.constant(function)}({text}{others})"
            view = _part_of(recipe, number)
            if view in self._views:
                text = self._views[view]
            elif view in self._read_again:
                name = self._views[view] = self._new_name()
                self._inner.add(f"{name} = {text}")
                text = name
        return text

    def _argument(self, value: Any, inputs: Sequence[str]) -> str:
        """An argument of a kernel."""
        if isinstance(value, TensorRef):
            return inputs[value.index]
        if isinstance(value, tuple):
            return f"[{', '.join(self._argument(each, inputs) for each in value)}]"
        return repr(value) if type(value) in _LITERALS else self._inner.constant(value)

    def _name(self, buffer: int) -> str:
        """A new local variable for a buffer."""
        name = self._names[buffer] = self._new_name()
        return name

    def _new_name(self) -> str:
        self._num_names += 1
        return f"v{self._num_names - 1}"


def lying_as(value: Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor with these strides and this dtype, for which its readers are compiled.

    Inductor may lay a result out otherwise than the op does in the first step, or make it of
    another dtype.
    """
    if value.dtype != dtype:
        value = value.to(dtype)
    strides = zip(value.shape, value.stride(), stride, strict=True)
    if value.stride() == stride or all(size == 1 or own == like for size, own, like in strides):
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(
        value
    )


_View = tuple[Begin, int, tuple[tuple[int, str], ...]]
"""What a recipe begins with, and its first steps."""


def _part_of(recipe: Recipe, num_steps: int) -> _View:
    """The first steps of a recipe."""
    steps = tuple((id(each), repr(arguments)) for each, arguments in recipe.steps[:num_steps])
    return recipe.begin, recipe.key, steps


def _read_again(recipes: Iterable[Recipe | None]) -> frozenset[_View]:
    """Views that are read, or viewed in turn, more than once; they take no memory."""
    counts: Counter[_View] = Counter()
    for recipe in recipes:
        if recipe is not None and recipe.is_view:
            for number in range(len(recipe.steps), 0, -1):
                view = _part_of(recipe, number)
                counts[view] += 1
                if counts[view] > 1:  # shorter beginnings are counted already
                    break
    return frozenset(view for view, count in counts.items() if count > 1)


_LITERALS = (int, bool, type(None))
_BY_VALUE = (int, tuple, type(None), MethodType)
_SHOWN = (int, float, tuple, list, immutable_list, type(None), slice, Placement, torch.dtype)
"""Types whose values are interchangeable if their texts are equal."""
_TEXT = """\
def make({names}):
    def segment({parameters}):
        {body}
    return segment
"""


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<segment>", "exec")
