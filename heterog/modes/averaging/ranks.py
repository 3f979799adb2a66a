"""Averaging on ranks: the islands' parameters are averaged after every H steps.

With a codec the first replica of each island sends the island's changes since the last averaging,
and keeps the error of its message; see ``Averaging``. ``passes_before`` and ``passes_after`` price
the passes over memory that this module makes: change both together.

After an averaging all islands have the same parameters, but each has its own optimizer state. A
checkpoint has the first island's state like that of any plan, and the other islands' states and
the momentum of the outer optimizer under their own names. A plan with the same islands continues
exactly, any other plan from the first island's state.

A rehearsal plays one averaging of all ranks after the steps.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heterog.errors import InputFileError
from heterog.graph.op_graph import OpGraph
from heterog.modes.averaging.value import AveragedBucket, Averaging, averaged_buckets
from heterog.modes.codecs.value import Codec
from heterog.modes.islands import island_of, islands
from heterog.modes.on_ranks import MakeExecutor, RankMode, Reading, Rehearsal, parts_of
from heterog.runtime.checkpoint.boxes import Entry
from heterog.runtime.checkpoint.contents import Contents, dtype_of
from heterog.runtime.checkpoint.held import name_and_shape, stepped_values
from heterog.runtime.checkpoint.left_out import LeftOutParts
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.measure.rehearsal import AFTER, Stage
from heterog.runtime.step.collectives import Communicator, Pending
from heterog.runtime.step.gradients import ErrorFeedback, Key, added_up
from heterog.runtime.step.optimizer import Masters
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.whole_model import ModelPart
from heterog.strategy.strategy import Strategy


@dataclass(slots=True)
class OuterState:
    """State of the averaging of one parameter.

    Attributes:
        anchor: Value of the parameter after the last averaging.
        momentum: Momentum, m of ``Averaging``; ``None`` without an outer optimizer.
    """

    anchor: Tensor
    momentum: Tensor | None


class _UnderWay(NamedTuple):
    """A bucket whose averaging is under way."""

    bucket: AveragedBucket
    sent: Tensor | None
    """Flat copy of the parameters sent; only if islands train on meanwhile."""
    total: Pending
    """Average of the parameters; with a codec, average of their differences to the anchor."""


class Averager(RankMode):
    """Averages this rank's parameters with those of the other islands.

    Args:
        graph: Graph of the step.
        strategy: Strategy with an averaging.
        rank: Number of this rank.
        parameters: Parameters of this rank, by tensor id.
        masters: The optimizer's master copies, which are averaged instead of parameters if any.
        communicator: Communicator with the other ranks; gets a process group for each device set.

    Attributes:
        averaging: Averaging of the strategy.
        outer: State of the outer optimizer and of codecs, by row of ``graph.updates``; empty
            without either.
        feedback: Errors of codecs in this island's changes so far.
        every_bucket: Buckets of all ranks.
    """

    def __init__(
        self,
        graph: OpGraph,
        strategy: Strategy,
        rank: int,
        parameters: Mapping[int, nn.Parameter],
        masters: Masters,
        communicator: Communicator,
    ) -> None:
        self.averaging: Averaging = strategy.own_mode(Averaging)
        self.every_bucket = averaged_buckets(graph, strategy)
        communicator.open({bucket.devices for bucket in self.every_bucket})
        self._rank = rank
        self._buckets = [bucket for bucket in self.every_bucket if rank in bucket.devices]
        self._communicator = communicator
        self._masters = masters
        self._values = {
            row: parameters[graph.updates[row][1]] for each in self._buckets for row in each.rows
        }
        self._under_way: list[_UnderWay] = []
        self.outer: dict[int, OuterState] = {}
        self.feedback = ErrorFeedback()
        self.begin(0)

    def begin(self, num_steps: int) -> None:
        """Start from the current parameters, which are equal on all islands.

        Args:
            num_steps: Number of steps since the start of training.
        """
        self._alike_after = num_steps
        has_outer = self.averaging.has_outer
        for bucket in self._buckets:
            for row in bucket.rows if has_outer or bucket.codec is not None else ():
                now = self._stepped(row).detach()
                self.outer[row] = OuterState(
                    now.clone(), torch.zeros_like(now) if has_outer else None
                )

    def why_apart(self, num_steps: int) -> str:
        """Why islands have different models after a number of steps; empty if they are equal."""
        if num_steps == self._alike_after:
            return ""
        return (
            f"after step {num_steps} the islands of this plan, which average every "
            f"{self.averaging.every} steps, have trained apart, and each has weights of its own; "
            "call settle() on every rank to average now, then read or save the model."
        )

    def end_step(self, num_steps: int) -> None:
        """Begin an averaging after every H-th step since the start of training.

        It ends D steps later; without a delay, at once.
        """
        due = num_steps % self.averaging.every
        with torch.no_grad():
            if due == 0:
                self.begin_average(keeps_sent=self.averaging.delay > 0)
            if due == self.averaging.delay:
                self.end_average()
                if not self.averaging.delay:
                    self._alike_after = num_steps

    def settle(self, num_steps: int) -> None:
        """End averagings under way, then average the current parameters of all islands.

        Args:
            num_steps: Number of steps since the start of training.
        """
        if num_steps == self._alike_after:
            return
        with torch.no_grad():
            self.end_average()
            self.begin_average()
            self.end_average()
        self._alike_after = num_steps

    def begin_average(self, *, keeps_sent: bool = False) -> None:
        """Issue the weighted sum of every bucket.

        Args:
            keeps_sent: Whether to keep a copy, because islands train on before the end.
        """
        for bucket in self._buckets:
            values = [self._stepped(row).detach() for row in bucket.rows]
            sent = torch.cat([value.reshape(-1) for value in values]) if keeps_sent else None
            flat = values[0].new_empty(bucket.num_elements)
            if bucket.codec is None:
                weight = bucket.weights[bucket.devices.index(self._rank)]
                for value, part in zip(values, parts_of(flat, values), strict=True):
                    torch.mul(value, weight, out=part)
                total = self._communicator.all_reduce(flat, bucket.devices)
            else:
                total = self._gather_changes(bucket, bucket.codec, values, flat)
            self._under_way.append(_UnderWay(bucket, sent, total))

    def _gather_changes(
        self, bucket: AveragedBucket, codec: Codec, values: Sequence[Tensor], flat: Tensor
    ) -> Pending:
        """Gather the messages of all islands for a bucket; their sum is the mean change.

        Args:
            bucket: The bucket.
            codec: Its codec.
            values: This rank's parameters in the bucket.
            flat: Memory of the bucket's size; overwritten.
        """
        message = flat.new_empty(0, dtype=torch.uint8)
        if self._rank in bucket.senders:
            weight = bucket.parts[bucket.senders.index(self._rank)]
            for row, value, part in zip(bucket.rows, values, parts_of(flat, values), strict=True):
                torch.sub(self.outer[row].anchor, value, out=part).mul_(weight)
            message = self.feedback.encode(changes_key(bucket), flat, codec)
        size = codec.message_bytes(flat.numel(), flat.element_size())
        counts = [size if device in bucket.senders else 0 for device in bucket.devices]
        total = added_up(codec, flat)
        return self._communicator.all_gather(message, bucket.devices, counts, total)

    def end_average(self) -> None:
        """Finish the averages that are under way, if any."""
        if not self._under_way:
            return
        while self._under_way:
            each = self._under_way.pop(0)  # frees its copies once they are read
            self._take_over(each)
        self._masters.write_back(self._values.values())

    def _take_over(self, each: _UnderWay) -> None:
        """Write an average back, or let the outer optimizer step towards it."""
        values = [self._stepped(row) for row in each.bucket.rows]
        averages = parts_of(each.total.wait(), values)
        sent = [None] * len(values) if each.sent is None else parts_of(each.sent, values)
        for row, value, new, before in zip(each.bucket.rows, values, averages, sent, strict=True):
            if each.bucket.codec is not None:
                new = outer_step(self.outer[row], new, self.averaging)
            elif self.averaging.has_outer:
                state = self.outer[row]
                new = outer_step(state, torch.sub(state.anchor, new, out=new), self.averaging)
            if before is None:
                value.copy_(new)
            else:  # plus the island's changes since it was sent
                value.sub_(before).add_(new)

    def entries(self, step: "DeployedStep") -> "list[Entry]":
        """Entries of this rank's island and of the outer optimizer."""
        found = [
            (_outer_name(step, row), state.momentum)
            for row, state in self.outer.items()
            if state.momentum is not None and step.part.owner(row) == step.rank
        ]
        if _island_of(step) > 0:
            found += _island_state(step)
        return [Entry.of_whole(name, value) for name, value in found]

    def left_out(self, step: "DeployedStep") -> "Iterator[LeftOutParts]":
        """Errors that codecs have left out of the islands' changes."""
        coded = {changes_key(each): each for each in self.every_bucket if each.codec}
        outer = self.outer
        yield LeftOutParts(
            word="left_out_changes",
            feedback=self.feedback,
            senders={key: set(bucket.senders) for key, bucket in coded.items()},
            rows={key: bucket.rows for key, bucket in coded.items()},
            dtypes={key: outer[key[0]].anchor.dtype for key in coded if key[0] in outer},
        )

    def reading(self, step: "DeployedStep", contents: "Contents") -> Reading:
        """State of this rank's island and of the outer optimizer."""
        return saved_averaging(step, self, contents)

    def _stepped(self, row: int) -> nn.Parameter:
        return self._masters.of(self._values[row])


def changes_key(bucket: AveragedBucket) -> Key:
    """Key of a codec's errors in an island's changes of a bucket."""
    return bucket.rows[0], bucket.devices


def outer_step(state: OuterState, difference: Tensor, averaging: Averaging) -> Tensor:
    """One step of the outer optimizer; returns the new parameter and updates the state in place.

    With d = anchor - average: m = momentum * m + d, anchor -= rate * (d + momentum * m), the
    Nesterov SGD of ``torch.optim.SGD`` without dampening. Without a momentum the anchor moves
    by d.

    Args:
        state: State of the parameter.
        difference: The difference d; overwritten.
        averaging: The averaging.
    """
    if state.momentum is None:
        return state.anchor.sub_(difference)
    state.momentum.mul_(averaging.outer_momentum).add_(difference)
    direction = difference.add_(state.momentum, alpha=averaging.outer_momentum)
    return state.anchor.sub_(direction, alpha=averaging.outer_rate)


def _outer_name(step: DeployedStep, row: int) -> str:
    """Name of a parameter's momentum in the outer optimizer."""
    return f"averaging.outer.{name_and_shape(step, row)[0]}"


def _island_of(step: DeployedStep) -> int:
    """Number of this rank's island; a rank without one counts to island 0.

    Island 0's state is saved like that of any plan.
    """
    return island_of(step.plan.strategy, step.rank) or 0


def _island_state(step: DeployedStep) -> list[tuple[str, Tensor]]:
    """Tensors of the optimizer's state that this rank saves for its island."""
    island, found = _island_of(step), []
    for row, stepped in _stepped_rows(step).items():
        if step.rank != min(step.rank_program.decision(row).teams[island]):
            continue
        name, _ = name_and_shape(step, row)
        for key, value in step.optimizer.state.get(stepped, {}).items():
            if isinstance(value, Tensor):
                found.append((_name(island, name, key), value.detach()))
    return found


def _name(island: int, parameter: str, key: str) -> str:
    return f"averaging.island{island}.{parameter}.{key}"


def _stepped_rows(step: DeployedStep) -> dict[int, Tensor]:
    """The optimizer's tensor of each parameter, by row of ``graph.updates``."""
    graph = step.captured.graph
    row_of = {graph.tensors[tensor].name: row for row, (_, tensor, _) in enumerate(graph.updates)}
    return {row_of[each.members[0].name]: each.stepped for each in stepped_values(step)}


def saved_averaging(step: DeployedStep, averager: Averager, contents: Contents) -> Reading:
    """Read the state of a rank's island and of the outer optimizer from a checkpoint.

    Args:
        step: A freshly deployed step.
        averager: Its averager.
        contents: Index of the checkpoint.

    Raises:
        InputFileError: the checkpoint contradicts itself.
    """
    wanted: dict[str, Tensor] = {}
    states: list[tuple[Tensor, str, str]] = []

    def want(name: str, shape: tuple[int, ...], like: Tensor) -> None:
        if contents.shape(name) != shape:
            raise InputFileError(
                f"the checkpoint's {name} has shape {contents.shape(name)}, not {shape}; it is "
                "damaged."
            )
        wanted[name] = like.detach().new_empty(shape, dtype=dtype_of(contents.dtype(name)))

    rows = _stepped_rows(step)
    names = set(contents.names)
    for row in averager.outer if averager.averaging.has_outer else ():
        name = _outer_name(step, row)
        if name in names:
            want(name, tuple(rows[row].shape), rows[row])
    island = _island_of(step)
    for row, stepped in rows.items() if _has_same_islands(step, names) else ():
        name, _ = name_and_shape(step, row)
        for key in contents.states[name].tensors:
            own = _name(island, name, key)
            if own in names:
                want(own, contents.shape(f"optimizer.{name}.{key}"), stepped)
                states.append((stepped, key, own))

    def take_over() -> None:
        averager.begin(step.num_steps)
        for row, state in averager.outer.items():
            name = _outer_name(step, row)
            if state.momentum is not None and name in wanted:
                state.momentum.copy_(wanted[name])
        for stepped, key, name in states:
            now = step.optimizer.state[stepped][key]
            now.copy_(wanted[name].to(now.dtype))

    return Reading(wanted=wanted, take_over=take_over)


def _has_same_islands(step: DeployedStep, names: set[str]) -> bool:
    """Whether the checkpoint has as many islands; otherwise their states cannot be used."""
    found = (re.match(r"averaging\.island(\d{1,9})\.", name) for name in names)
    saved = {int(each[1]) for each in found if each is not None}
    return saved == set(range(1, len(islands(step.plan.strategy))))


class RehearsedAveraging(Rehearsal):
    """The averagers of all ranks.

    Args:
        stage: All ranks of the plan.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._averagers: list[Averager] = []

    def add_rank(
        self,
        seen: RankProgram,
        part: ModelPart,
        communicator: Communicator,
        make_executor: MakeExecutor,
    ) -> bool:
        """Make the averager of a rank."""
        graph, strategy = self._stage.graph, self._stage.strategy
        masters, parameters = Masters(None, ()), part.parameters
        self._averagers.append(
            Averager(graph, strategy, seen.rank, parameters, masters, communicator)
        )
        return False

    def after_steps(self) -> None:
        """Average the islands' parameters."""
        for rank, averager in enumerate(self._averagers):
            self._stage.now = rank, AFTER
            averager.begin_average()
        for rank, averager in enumerate(self._averagers):
            self._stage.now = rank, AFTER
            averager.end_average()
