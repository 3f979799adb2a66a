"""Runs a plan on all ranks at once, on shapes instead of data, to see whether it can run at all.

Each rank's part is run by the code of real ranks (``StepExecutor`` and everything below it), on
torch's *meta* device, where tensors have shapes and dtypes but no memory. All ranks follow their
common order turn by turn. So a rank that would read a missing value, wait for a message that no
rank sends, or call a kernel with inputs that it refuses fails here, in words, and not on the
cluster. Messages and reductions are compared between ranks instead of moved.

Values, and the memory that is really needed, depend on data and are not checked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.garbage import without_collector
from heterog.graph.axis_plan import AxisPlan, axis_plan
from heterog.graph.capture import CapturedStep
from heterog.graph.op_graph import OpGraph
from heterog.graph.sharding_rules.indexing import BAGS
from heterog.lowering.program import (
    FIRST_LINK_KIND,
    OP_KINDS,
    IntArray,
    Program,
    TaskKind,
    op_row,
)
from heterog.lowering.tables import graph_tables
from heterog.methods.planner import TimeUp
from heterog.modes.mode import fault_of_modes
from heterog.runtime.step.collectives import Communicator, Pending
from heterog.runtime.step.executor import StepExecutor, device_sets
from heterog.runtime.step.local_op import LocalOp, Share, local_ops
from heterog.runtime.step.optimizer import Masters
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recipes import Step
from heterog.runtime.step.special_ops import RandomStream
from heterog.runtime.step.step_order import LOSS, NORM, DueTask, StepOrder, step_order
from heterog.runtime.step.whole_model import ModelPart
from heterog.search.issue_order import IssuedStep, Rehearse
from heterog.strategy.strategy import Strategy

_Key = tuple[int, int, tuple[int, ...] | None, int]
"""Source, destination, group and tag, by which gloo matches messages."""


class RehearsalError(Exception):
    """A failure that would happen between ranks, described by its text."""


class _Parcel(NamedTuple):
    """Size and dtype of a message."""

    num_elements: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_elements} elements of {str(self.dtype).removeprefix('torch.')}"


@dataclass(slots=True)
class _Line:
    """Messages between two ranks that gloo would match with each other, in order of issue.

    Attributes:
        src: Rank that sends them.
        dst: Rank that receives them.
        sent: Messages that were sent.
        expected: Messages that receives were issued for.
    """

    src: int
    dst: int
    sent: list[_Parcel] = field(default_factory=list)
    expected: list[_Parcel] = field(default_factory=list)

    def check_taken(self, number: int) -> None:
        """Check that the receiver of a message has issued its receive."""
        if len(self.expected) <= number:
            raise RehearsalError(f"rank {self.dst} has not begun to take what is sent to it")

    def check_sent(self, number: int) -> None:
        """Check that the sender has sent a message, with the expected size and dtype."""
        if len(self.sent) <= number:
            raise RehearsalError(f"rank {self.src} has not begun to send what is waited for")
        sent, wanted = self.sent[number], self.expected[number]
        if sent != wanted:
            raise RehearsalError(f"rank {self.src} sends {sent}, {wanted} are expected")


class Wire:
    """All sends, receives and reductions of ranks, in order of issue."""

    def __init__(self) -> None:
        self.lines: dict[_Key, _Line] = {}
        self.reduced: dict[tuple[int, ...], dict[int, list[_Parcel]]] = {}

    def line(self, src: int, dst: int, group: tuple[int, ...] | None, tag: int) -> _Line:
        """The line of a message, by everything that gloo matches."""
        return self.lines.setdefault((src, dst, group, tag), _Line(src, dst))

    def check_reduced(self, group: tuple[int, ...], rank: int, number: int) -> None:
        """Check that all members have issued a rank's all-reduce, with the same size and dtype."""
        by_rank = self.reduced[group]
        mine = by_rank[rank][number]
        for other in group:
            theirs = by_rank.get(other, [])
            if len(theirs) <= number:
                raise RehearsalError(f"rank {other} has not begun to take part in an all-reduce")
            if theirs[number] != mine:
                raise RehearsalError(f"rank {other} reduces {theirs[number]}, rank {rank} {mine}")

    def check_all_received(self) -> None:
        """Check, at the end of a run, that every message was received.

        Raises:
            RehearsalError: a message is left.
        """
        for line in self.lines.values():
            sent, expected = len(line.sent), len(line.expected)
            if sent != expected:
                raise RehearsalError(
                    f"rank {line.src} sends {sent} messages to rank {line.dst}, which receives "
                    f"{expected} of them"
                )
        for group, by_rank in self.reduced.items():
            counts = {len(by_rank.get(rank, ())) for rank in group}
            if len(counts) > 1:
                raise RehearsalError(f"ranks {group} reduce unequally often")


class RehearsedCommunicator(Communicator):
    """A communicator that compares messages instead of sending them."""

    def __init__(
        self, rank: int, sets: Iterable[tuple[int, ...]], wire: Wire, host_of: Sequence[int]
    ) -> None:
        self._wire = wire
        self._everyone = tuple(range(len(host_of)))
        super().__init__(rank, sets, host_of)

    def _open(self, devices: tuple[int, ...]) -> Any:
        return devices

    def _start_send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        line = self._wire.line(self.rank, dst, group, tag)
        line.sent.append(_Parcel(tensor.numel(), tensor.dtype))
        return SimpleNamespace(wait=partial(line.check_taken, len(line.sent) - 1))

    def _start_receive(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        line = self._wire.line(src, self.rank, group, tag)
        line.expected.append(_Parcel(tensor.numel(), tensor.dtype))
        return SimpleNamespace(wait=partial(line.check_sent, len(line.expected) - 1))

    def _start_all_reduce(self, tensor: Tensor, group: Any = None) -> Any:
        members = group or self._everyone
        parcels = self._wire.reduced.setdefault(members, {}).setdefault(self.rank, [])
        parcels.append(_Parcel(tensor.numel(), tensor.dtype))
        return SimpleNamespace(
            wait=partial(self._wire.check_reduced, members, self.rank, len(parcels) - 1)
        )

    def sum_over_all(self, tensor: Tensor) -> Pending:
        """Sum over all ranks.

        A rank waits for the norm of all gradients in the turn that issues it, before other ranks
        have their turn. So whether all ranks take part is checked at the end.
        """
        self._start_all_reduce(tensor)
        return Pending(None, lambda: tensor)

    def close(self) -> None:
        """Do nothing: there are no threads to end."""


META = torch.device("meta")
CHECKED_EVERY = 256
"""Number of turns between two checks of the time."""
_NUM_STEPS = 2
"""Two, because the second step finishes updates that the first one leaves open."""
BEGIN, END, AFTER = -3, -4, -5
"""Numbers in place of tasks: for the start and the end of a step on every rank, and for the
averaging of islands after some steps."""
_MOMENTS = {
    **{BEGIN: "begin of the step", END: "end of the step", AFTER: "averaging"},
    **{LOSS: "loss", NORM: "clipping"},
}


def rehearsal_of(captured: CapturedStep) -> Rehearse:
    """A function with which searches find out whether a strategy of a step can be executed."""

    def ask(strategy: Strategy, issued: IssuedStep, check: Callable[[], None]) -> str:
        return rehearse(
            captured,
            strategy,
            issued.program,
            issued.task_order,
            sent_before=issued.sent_before,
            check=check,
        )

    return ask


def rehearse(
    captured: CapturedStep,
    strategy: Strategy,
    program: Program,
    task_order: Sequence[int] | IntArray,
    *,
    sent_before: Sequence[tuple[int, int]] | IntArray = (),
    clips: bool = False,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Run a plan without data.

    Args:
        captured: The step.
        strategy: Strategy of the plan.
        program: Program lowered from both, for one step.
        task_order: Order of tasks of the plan.
        sent_before: The plan's pairs of a task and a send that it waits for.
        clips: Whether gradients are clipped.
        check: Called again and again; a ``TimeUp`` that it raises ends the rehearsal.

    Returns:
        Why the plan cannot be executed; empty if it can.
    """
    tables = graph_tables(captured.graph, strategy.op_rules, strategy.blocks)
    wrong = _wrong_order(program, task_order) or fault_of_modes(program, strategy, tables)
    if wrong:
        return wrong

    make = partial(Stage, captured, strategy, program, task_order, sent_before, clips, check)
    with torch.no_grad(), without_collector():
        return _play(make)


def _play(make: Callable[[], "Stage"]) -> str:
    """Make and play a stage; see ``rehearse``. Everything is freed when this returns."""
    try:
        stage = make()
    except StrategyError as error:
        return str(error)
    return stage.play()


def _wrong_order(program: Program, task_order: Sequence[int] | IntArray) -> str:
    """Why an order cannot be followed: it lacks tasks, or has one before its inputs."""
    num_tasks = program.num_tasks
    if not np.array_equal(np.sort(task_order), np.arange(num_tasks)):
        return f"the order lists {len(task_order)} tasks, not each of the {num_tasks} once"
    early = program.read_too_early(task_order)
    if early is None:
        return ""
    return f"task {early[0]} comes before task {early[1]}, whose result it needs"


class Stage:
    """All ranks of a plan, side by side in this process."""

    def __init__(
        self,
        captured: CapturedStep,
        strategy: Strategy,
        program: Program,
        task_order: Sequence[int] | IntArray,
        sent_before: Sequence[tuple[int, int]] | IntArray,
        clips: bool,
        check: Callable[[], None],
    ) -> None:
        graph = self.graph = captured.graph
        self.check = check
        self.strategy = strategy
        self.program = program
        self.wire = Wire()
        self.now = 0, BEGIN
        seen = RankProgram(graph, strategy, program, 0)
        self.modes = [mode.rehearsal(self) for mode in strategy.modes]
        self.order = step_order(seen, task_order, clips=clips)
        self.tables = seen.tables
        ops = _rehearsed_ops(captured, axis_plan(graph, strategy.op_rules))
        self.batch = {tensor: _empty(graph, tensor) for tensor in graph.batch}
        self.device_sets = device_sets(program, strategy)
        self.executors: list[StepExecutor] = []
        for rehearsal in self.modes:
            self.order = rehearsal.ordered(seen, self.order)
        self.every_rank = tuple(range(program.num_devices))
        of_channel = [tuple(dict.fromkeys(channel.devices)) for channel in program.channels]
        alone = [(rank,) for rank in self.every_rank]
        self.ranks_of_task = [
            alone[device] if is_local else of_channel[channel]
            for is_local, device, channel in zip(
                (program.kind < FIRST_LINK_KIND).tolist(),
                program.device.tolist(),
                program.channel.tolist(),
                strict=True,
            )
        ]
        self.orders = self._orders()
        for rank in range(program.num_devices):
            self._add_rank(seen.seen_from(rank), ops, sent_before, clips)

    def _orders(self) -> list[StepOrder]:
        """The order of each rank's own tasks."""
        turns: list[list[DueTask]] = [[] for _ in self.every_rank]
        end: list[list[int]] = [[] for _ in self.every_rank]
        for turn in self.order.turns:
            for rank in self.ranks_of(turn.task):
                turns[rank].append(turn)
        for task in self.order.end:
            for rank in self.ranks_of(task):
                end[rank].append(task)
        return [StepOrder(*own) for own in zip(turns, end, strict=True)]

    def _add_rank(
        self,
        seen: RankProgram,
        ops: Mapping[int, LocalOp],
        sent_before: Sequence[tuple[int, int]] | IntArray,
        clips: bool,
    ) -> None:
        """Make the executor of a rank, or the executors of all its batches under way."""
        self.check()
        graph = self.graph
        held = {
            tensor: nn.Parameter(_empty(graph, tensor), requires_grad=False)
            for tensor in graph.parameters
        }
        part = ModelPart(seen, held)
        buffers = {
            tensor: held[tensor].detach() if tensor in held else _empty(graph, tensor)
            for tensor in range(graph.num_inputs)
            if tensor not in part.parameters and tensor not in self.batch
        }
        updated = part.updated or [nn.Parameter(torch.empty(0, device=META))]
        communicator = RehearsedCommunicator(
            seen.rank, self.device_sets, self.wire, self.program.host_of
        )
        state = RankState(
            part=seen,
            ops=ops,
            communicator=communicator,
            parameters=part.parameters,
            buffers=buffers,
            slices=part.slices,
            optimizer=_RehearsedOptimizer(updated, {}),
            masters=Masters(None, ()),
            random=RandomStream(0, META),
            device=META,
        )

        def make_executor(read: Callable[[int], Tensor] | None) -> StepExecutor:
            return StepExecutor(
                state,
                self.orders[seen.rank],
                sent_before=sent_before if read is None else (),
                read_parameter=read,
                max_grad_norm=1.0 if clips else None,
            )

        added = [mode.add_rank(seen, part, communicator, make_executor) for mode in self.modes]
        if not any(added):
            self.executors.append(make_executor(None))

    def play(self) -> str:
        """Run the steps and their open updates; returns what went wrong, or an empty text."""
        try:
            if any([mode.play() for mode in self.modes]):
                self.wire.check_all_received()
                return ""
            for _ in range(1 if self.strategy.step_barrier else _NUM_STEPS):
                self._step()
            for mode in self.modes:
                mode.after_steps()
            if not self.strategy.step_barrier:
                for task in self.order.end:
                    for executor in self._at(task):
                        executor.take_open(task)
                for executor in self._at(END):
                    executor.end_flush()
            self.wire.check_all_received()
        except TimeUp:
            raise
        except Exception as error:  # a kernel or the runtime may raise anything
            return f"{self._where()}: {_in_a_line(error)}"
        return ""

    def _step(self) -> None:
        for executor in self._at(BEGIN):
            executor.begin(self.batch)
        for number, turn in enumerate(self.order.turns):
            if number % CHECKED_EVERY == 0:
                self.check()
            task = turn.task
            for rank in self.ranks_of(task):
                self.now = rank, task
                self.executors[rank].take(turn)
        for executor in self._at(END):
            executor.end()

    def _at(self, task: int) -> Iterator[StepExecutor]:
        """Executors of the ranks that take part in a task, one after another."""
        for rank in self.ranks_of(task):
            self.now = rank, task
            yield self.executors[rank]

    def ranks_of(self, task: int) -> tuple[int, ...]:
        """Ranks that take part in a task."""
        return self.ranks_of_task[task] if task >= 0 else self.every_rank

    def _where(self) -> str:
        """The current rank and task, in words."""
        rank, task = self.now
        if task < 0:
            return f"rank {rank}, {_MOMENTS[task]}"
        kind, subject = TaskKind(self.program.kind[task]), int(self.program.subject[task])
        what = kind.name.lower().replace("_", " ")
        tables, graph = self.tables, self.graph
        row = op_row(kind, subject, tables)
        if row is None:
            return f"rank {rank}, {what} of '{graph.tensors[graph.updates[subject][1]].name}'"
        op = graph.ops[int(tables.op_id[row])]
        words = f"'{op.kind}' in module '{op.module or '(root)'}'"
        what = f"op {words}" if kind in OP_KINDS else f"{what} of what {words} makes"
        return f"rank {rank}, {what}"


class _RehearsedOp(LocalOp):
    """An op that makes shapes; its kernel runs once for each combination of input shapes.

    Args:
        kernel: The op itself, on the meta device.
        known: Results so far, of all ops, because repeated layers have the same ones.
    """

    def __init__(self, kernel: LocalOp, known: dict[Any, dict[Any, list[Tensor]]]) -> None:
        vars(self).update(vars(kernel))
        self.is_random = False  # no numbers are drawn
        self._kernel = kernel
        rules = self.along_batch, self.along_axis, self.whole
        self._known = known.setdefault((self.call, rules), {})  # alike ops have one call

    def __call__(self, inputs: Sequence[Tensor], share: Share) -> list[Tensor]:
        """See ``LocalOp``."""
        if not self.minds_position:
            share = share._replace(first_unit=0)
        key = share, *map(Tensor.size, inputs), *map(Tensor.stride, inputs)
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = self._make(inputs, share)
        return list(made)

    def as_view(self, output: int, share: Share) -> Step:
        """See ``LocalOp``."""
        return lambda value: self([value], share)[output], ()

    def _make(self, inputs: Sequence[Tensor], share: Share) -> list[Tensor]:
        given = [(tuple(value.shape), value.dtype) for value in inputs]
        whole = [(meta.shape, getattr(torch, meta.dtype)) for meta in self.call.inputs]
        outputs = self.call.outputs
        shapes = [self.local_shape_of_output(index, share) for index in range(len(outputs))]
        is_as_captured = given == whole and shapes == [meta.shape for meta in outputs]
        if self.call.kind in BAGS or is_as_captured:
            # Its outputs are known. Some kernels of the meta device refuse inputs, or give other
            # shapes than those of devices (_grouped_mm, BAGS).
            return [
                torch.empty(shape, dtype=getattr(torch, meta.dtype), device=META)
                for shape, meta in zip(shapes, outputs, strict=True)
            ]
        made = self._kernel(inputs, share)
        for index, (value, wanted) in enumerate(zip(made, shapes, strict=False)):
            if 0 in wanted and "batch_norm" in self.call.kind:
                # In eval mode it keeps statistics on some devices, which nothing reads.
                made[index] = value.new_empty(wanted)
            elif tuple(value.shape) != wanted and not self.is_incomplete(share):
                raise RehearsalError(f"it makes {tuple(value.shape)} instead of {wanted}")
        return made


class _RehearsedOptimizer(torch.optim.Optimizer):
    """Takes the place of the user's optimizer, which is not rehearsed.

    Torch refuses gradients of another shape or dtype than their parameters'.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _rehearsed_ops(captured: CapturedStep, plan: AxisPlan) -> dict[int, LocalOp]:
    known: dict[Any, dict[Any, list[Tensor]]] = {}
    kernels = local_ops(captured, plan, META)
    return {index: _RehearsedOp(kernel, known) for index, kernel in kernels.items()}


def _empty(graph: OpGraph, tensor: int) -> Tensor:
    meta = graph.tensors[tensor]
    return torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=META)


def _in_a_line(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    if isinstance(error, RehearsalError | StrategyError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
