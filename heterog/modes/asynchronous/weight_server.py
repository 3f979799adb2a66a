"""One device of an asynchronous server: a thread that takes gradients and sends weights.

In a planned order the thread follows ``AsynchronousServer.events``, one event after the other: for
a pull it waits until the team asks and begins to send weights, for a push it waits for the
gradients and steps the optimizer. It waits for the team whose turn it is, even if another team is
earlier than predicted, so the weights are the same in every run. Messages of several teams may
travel at the same time.

By arrival it has a thread for each team, and a lock around the weights. A team that asks for
weights gets them when it is at most tau steps ahead of the slowest one. Gradients of step k are
applied only once every team has the weights of its step k - tau. So no team trains on gradients
from more than tau steps ahead, and with tau = 0 all teams begin a step with the same weights.

A team's request is a message of numbers: a code, then the options of its optimizer.

- ``WEIGHTS``: the weights of its next step.
- ``SETTLE``: the team has made all its steps for now. When all teams have sent this, and the
  server has taken all their gradients, every team gets the weights and the thread ends. The next
  step starts another thread, and the order of events begins anew.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from functools import reduce
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.errors import HeterogError
from heterog.graph.op_graph import OpGraph
from heterog.modes.asynchronous.value import (
    AsynchronousServer,
    PushOrder,
    exchanged,
    server_of_rows,
)
from heterog.modes.on_ranks import parts_of
from heterog.runtime.accelerators import CPU_BACKEND
from heterog.runtime.step.collectives import open_group
from heterog.strategy.strategy import Strategy

_MOST_IDLE = timedelta(days=1)
"""Longest wait of a server for a team; the end of a rank is noticed at once. A team that waits for
the weights of its next step has the limit of any other collective."""


class Ask(IntEnum):
    """Request of a team to a server, before a step."""

    WEIGHTS = 0
    SETTLE = 1


class Tag(IntEnum):
    """Kind of a message; messages of one kind between two ranks arrive in their order."""

    ASK = 1
    GRADIENTS = 2
    NEW_WEIGHTS = 3


class Messages:
    """Messages between teams and servers, in a process group of their own.

    They go through host memory by gloo on any accelerator, because the server's thread and the
    step's thread both send, which other backends do not allow. A rank that is in a team and in the
    server passes messages to itself in memory. All ranks must make this object together.

    Args:
        rank: Number of this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._group = open_group(backend=CPU_BACKEND, limit=_MOST_IDLE)
        self._own: dict[Tag, SimpleQueue[Tensor | None]] = {tag: SimpleQueue() for tag in Tag}

    def start_send(self, tensor: Tensor, dst: int, tag: Tag) -> Callable[[], None]:
        """Begin to send a tensor; it must not change before the returned function has returned."""
        if dst == self._rank:
            self._own[tag].put(tensor.detach().clone())
            return lambda: None
        host = tensor.detach().cpu().contiguous()
        work = dist.isend(host, dst, self._group, tag=int(tag))
        assert work is not None

        def wait(held: Tensor = host) -> None:
            work.wait()
            del held

        return wait

    def start_receive(
        self, into: Tensor, src: int, tag: Tag, limit: timedelta = _MOST_IDLE
    ) -> Callable[[], Tensor]:
        """Begin to receive a tensor; the returned function waits for it.

        Args:
            into: Host memory of the tensor's shape and dtype, which may hold the result.
            src: Rank of the sender.
            tag: Kind of the message.
            limit: Longest wait.
        """
        if src == self._rank:
            return lambda: self._take_own(tag)
        work = dist.irecv(into, src, self._group, tag=int(tag))
        assert work is not None

        def wait() -> Tensor:
            work.wait(limit)
            return into

        return wait

    def fail(self) -> None:
        """Wake the thread that waits for this rank's own server, because the server has ended."""
        self._own[Tag.NEW_WEIGHTS].put(None)

    def _take_own(self, tag: Tag) -> Tensor:
        taken = self._own[tag].get()
        if taken is None:
            raise HeterogError("this rank's server has ended.")
        return taken

    def close(self) -> None:
        """End the process group; no rank may use it afterwards."""
        dist.destroy_process_group(self._group)


class WeightServer:
    """One device's part of the server, and the thread that runs it.

    Args:
        graph: Graph of the step.
        strategy: Strategy with an asynchronous server.
        rank: Number of this rank, one of the server's devices.
        parameters: Initial parameters of this rank, by row of ``graph.updates``.
        make_optimizer: Function that makes the user's optimizer for parameters by row.
        messages: Messages to and from teams.

    Attributes:
        values: Weights of the server, by row of ``graph.updates``.
        optimizer: Optimizer of these weights.
        error: Exception that ended the thread, if it failed.
        most_ahead: By arrival, most steps by which a team that began a step was ahead of the
            slowest one.
    """

    def __init__(
        self,
        graph: OpGraph,
        strategy: Strategy,
        rank: int,
        parameters: dict[int, Tensor],
        make_optimizer: Callable[[dict[int, nn.Parameter]], torch.optim.Optimizer],
        messages: Messages,
    ) -> None:
        self._server = strategy.own_mode(AsynchronousServer)
        rows = [row for row, home in enumerate(server_of_rows(graph, strategy)) if home == rank]
        self.values = {row: nn.Parameter(parameters[row].detach().clone()) for row in rows}
        for row, value in self.values.items():
            vars(value).update(vars(parameters[row]))  # attributes, which optimizers may read
        self.optimizer = make_optimizer(self.values)
        self.error: Exception | None = None
        self.most_ahead = 0
        self._messages = messages
        self._sending: dict[int, list[Callable[[], None]]] = {}  # by team
        self._coming: dict[int, list[Callable[[], Tensor]]] = {}  # gradients, by team
        self._options: dict[int, list[float]] = {}  # optimizer options of its step, by team
        self._named = numeric_options(self.optimizer)
        teams = range(len(self._server.ticks))
        self._pushes, self._pulls = (
            [  # (device of the team, rows) of each exchange with this server
                [
                    (device, rows)
                    for device, server, rows in exchanged(graph, strategy, team, is_push=is_push)
                    if server == rank
                ]
                for team in teams
            ]
            for is_push in (True, False)
        )
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that serves until all teams have settled, if it is not running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="weight server")
            self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end, when all teams have settled.

        A process with threads that wait for messages cannot exit cleanly.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            if self._server.order == PushOrder.PLANNED:
                self._serve_in_order()
            else:
                self._serve_as_they_come()
            for team in range(len(self._server.ticks)):
                self._give(team)
            for team in range(len(self._server.ticks)):
                self._end_sending(team)
        except Exception as error:  # the rank's own thread raises it
            self._fail(error)

    def _serve_in_order(self) -> None:
        """Serve until all teams have settled, in the planned order."""
        settled: set[int] = set()
        num_teams = len(self._server.ticks)
        for event in self._server.events():
            if event.team in settled:
                continue
            if event.is_push:
                self._step(event.team, self._receive(event.team))
            elif self._listen(event.team) == Ask.WEIGHTS:
                self._give(event.team)
                self._expect(event.team)
            else:
                settled.add(event.team)
            if len(settled) == num_teams:
                return

    def _serve_as_they_come(self) -> None:
        """Serve until all teams have settled, with a thread for each team."""
        stretch = _Stretch(len(self._server.ticks))
        threads = [
            threading.Thread(target=self._follow, args=(team, stretch), daemon=True)
            for team in range(len(stretch.done))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if stretch.error is not None:
            raise stretch.error
        self.most_ahead = max(self.most_ahead, stretch.most_ahead)

    def _follow(self, team: int, stretch: "_Stretch") -> None:
        """Serve one team until it settles."""
        try:
            while self._listen(team) == Ask.WEIGHTS:
                with stretch.changed:
                    stretch.wait_for_turn(team, self._server.staleness)
                    messages = self._weights_for(team)
                self._send(team, messages)
                self._expect(team)
                gradients = self._receive(team)
                with stretch.changed:
                    # For every team to begin the step that is tau steps before this push.
                    stretch.wait_for(
                        lambda: (
                            stretch.done[team] + 1 - min(stretch.begun) <= self._server.staleness
                        )
                    )
                    self._step(team, gradients)
                    stretch.done[team] += 1
                    stretch.changed.notify_all()
        except Exception as error:  # raised by the thread that waits for all
            self._fail(error)
            with stretch.changed:
                stretch.error = error
                stretch.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Store the error that ends the server, and wake this rank's own thread."""
        if self.error is None:
            self.error = error
            self._messages.fail()

    def _listen(self, team: int) -> Ask:
        """Receive a team's request, which is the same from all its devices."""
        said: list[list[float]] = []
        for device, _ in self._pulls[team]:
            into = torch.empty(1 + len(self._named), dtype=torch.float64)
            said.append(self._messages.start_receive(into, device, Tag.ASK)().tolist())
        assert said, "every team has all parameters, and every server's device some"
        self._options[team] = said[0][1:]
        return Ask(round(said[0][0]))

    def _give(self, team: int) -> None:
        """Begin to send the current weights to a team."""
        self._send(team, self._weights_for(team))

    def _weights_for(self, team: int) -> list[tuple[int, Tensor]]:
        """Copies of the weights for each device of a team."""
        return [
            (device, flat_of([self.values[row] for row in rows]))
            for device, rows in self._pulls[team]
        ]

    def _send(self, team: int, messages: Sequence[tuple[int, Tensor]]) -> None:
        self._end_sending(team)
        self._sending[team] = [
            self._messages.start_send(flat, device, Tag.NEW_WEIGHTS) for device, flat in messages
        ]

    def _end_sending(self, team: int) -> None:
        """Wait until all messages to a team have been sent."""
        for wait in self._sending.pop(team, []):
            wait()

    def _expect(self, team: int) -> None:
        """Begin to receive the gradients of a team's step."""
        self._coming[team] = [
            self._messages.start_receive(
                flat_like([self.values[row] for row in rows]), device, Tag.GRADIENTS
            )
            for device, rows in self._pushes[team]
        ]

    def _receive(self, team: int) -> dict[int, Tensor]:
        """A team's gradients, by row of ``graph.updates``."""
        self._end_sending(team)  # gradients imply that the team has its weights
        found: dict[int, Tensor] = {}
        for (_, rows), come in zip(self._pushes[team], self._coming.pop(team), strict=True):
            values = [self.values[row] for row in rows]
            found |= dict(zip(rows, parts_of(come(), values), strict=True))
        return found

    def _step(self, team: int, gradients: dict[int, Tensor]) -> None:
        """Step the optimizer with a team's gradients and the options of the team's step."""
        for row, gradient in gradients.items():
            value = self.values[row]
            value.grad = gradient.to(value.device, value.dtype)
        set_options(self.optimizer, self._named, self._options[team])
        self.optimizer.step()
        for value in self.values.values():
            value.grad = None


class _Stretch:
    """Steps of all teams between two settlings, if gradients are taken in order of arrival.

    Attributes:
        begun: Number of steps for which each team has weights.
        done: Number of steps that each team has pushed.
        changed: Condition to hold while weights are read or changed; every push notifies it.
        most_ahead: Most steps that any team has been ahead of the slowest one.
        error: Exception that ended a team's thread, if any.
    """

    def __init__(self, num_teams: int) -> None:
        self.begun = [0] * num_teams
        self.done = [0] * num_teams
        self.changed = threading.Condition()
        self.most_ahead = 0
        self.error: Exception | None = None

    def wait_for_turn(self, team: int, staleness: int) -> None:
        """Wait until a team may begin its next step, and count this step as begun.

        The caller holds ``changed`` until the team's weights are copied.
        """
        self.wait_for(lambda: self.done[team] - min(self.done) <= staleness)
        self.most_ahead = max(self.most_ahead, self.done[team] - min(self.done))
        self.begun[team] += 1
        self.changed.notify_all()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so; the caller holds ``changed``."""
        self.changed.wait_for(lambda: self.error is not None or is_so())
        if self.error is not None:
            raise self.error


def flat_of(values: Sequence[Tensor]) -> Tensor:
    """Tensors joined into a flat one, in their promoted dtype."""
    return torch.cat([value.detach().reshape(-1) for value in values])


def flat_like(values: Sequence[Tensor]) -> Tensor:
    """Host memory for the result of ``flat_of`` on tensors like these."""
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    return torch.empty(sum(value.numel() for value in values), dtype=dtype)


OptionName = tuple[int, str]
"""Number of a parameter group, and name of one of its options."""


def numeric_options(optimizer: torch.optim.Optimizer) -> list[OptionName]:
    """Names of all groups' numeric options, such as the learning rate."""
    return sorted(
        (number, key)
        for number, options in enumerate(optimizer.param_groups)
        for key, value in options.items()
        if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
    )


def set_options(
    optimizer: torch.optim.Optimizer, names: Sequence[OptionName], values: Sequence[float]
) -> None:
    """Set the named options of an optimizer."""
    for (number, name), value in zip(names, values, strict=True):
        group = optimizer.param_groups[number]
        now = group[name]
        group[name] = torch.full_like(now, value) if isinstance(now, Tensor) else value
