"""A device of an asynchronous server: a thread that takes gradients and gives weights.

The thread does what ``AsynchronousServer.events`` says, one event after the other: for a pull it
waits until the team asks and sends it weights, for a push it waits for the gradients and steps the
optimizer. So it waits for the team whose turn it is, even if another one is earlier than the plan
predicted; the weights are the same in every run.

What a team asks for is a message of numbers: a code, then the options of its optimizer.

- ``WEIGHTS``: of its next step.
- ``SETTLE``: it has made all its steps for now. When all teams have said so, and the server has
  taken all their gradients, every team gets the weights, and the order of events begins anew.
- ``CLOSE``: the thread ends; said by all teams after they have settled.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.graph.op_graph import OpGraph
from heterog.strategy.asynchronous import pulls_of, pushes_of, server_of_rows
from heterog.strategy.strategy import Strategy

_MOST_IDLE = timedelta(days=1)
"""For which a server waits for a team; a rank that ends is noticed at once."""


class Ask(IntEnum):
    """What a team says to a server before a step."""

    WEIGHTS = 0
    SETTLE = 1
    CLOSE = 2


class Tag(IntEnum):
    """What a message is; messages of one tag between two ranks arrive in their order."""

    ASK = 1
    GRADIENTS = 2
    NEW_WEIGHTS = 3


class Messages:
    """Messages between teams and servers, in a process group of their own.

    They go through host memory by gloo, whatever the ranks compute on: the server's thread and the
    step's own thread both send, which other backends do not allow. A rank that is a team's and the
    server's hands its messages over in memory. Every rank has to make one at the same time.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._group = dist.new_group(backend="gloo", timeout=_MOST_IDLE)
        self._own: dict[Tag, SimpleQueue[Tensor]] = {tag: SimpleQueue() for tag in Tag}

    def start_send(self, tensor: Tensor, dst: int, tag: Tag) -> Callable[[], None]:
        """Begin to send a tensor, which must not change before the answer has been called."""
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

    def start_receive(self, like: Tensor, src: int, tag: Tag) -> Callable[[], Tensor]:
        """Begin to receive a tensor of a shape and dtype; calling the answer waits for it."""
        if src == self._rank:
            return lambda: self._own[tag].get()
        host = torch.empty(like.shape, dtype=like.dtype)
        work = dist.irecv(host, src, self._group, tag=int(tag))
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return host

        return wait

    def close(self) -> None:
        """End the process group; no rank may use it any more."""
        dist.destroy_process_group(self._group)


class WeightServer:
    """One device's part of the server, and the thread that runs it.

    Args:
        graph: of the step.
        strategy: with an asynchronous server.
        rank: this rank, one of the server's devices.
        parameters: this rank's as they are at the start, by row of ``graph.updates``.
        make_optimizer: makes the user's optimizer of parameters.
        messages: to and from teams.

    Attributes:
        values: the server's weights, by row of ``graph.updates``.
        optimizer: of the values.
        error: why the thread has ended, if it failed.
    """

    def __init__(
        self,
        graph: OpGraph,
        strategy: Strategy,
        rank: int,
        parameters: dict[int, Tensor],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        messages: Messages,
    ) -> None:
        assert strategy.asynchronous is not None
        self._server = strategy.asynchronous
        rows = [row for row, home in enumerate(server_of_rows(graph, strategy)) if home == rank]
        self.values = {row: nn.Parameter(parameters[row].detach().clone()) for row in rows}
        self.optimizer = make_optimizer(list(self.values.values()))
        self.error: Exception | None = None
        self._messages = messages
        self._options: dict[int, list[float]] = {}  # of each team's step, by team
        self._named = numeric_options(self.optimizer)
        teams = range(len(self._server.ticks))
        self._pushes = [_with_server(pushes_of(graph, strategy, team), rank) for team in teams]
        self._pulls = [_with_server(pulls_of(graph, strategy, team), rank) for team in teams]
        self._thread = threading.Thread(target=self._run, daemon=True, name="weight server")

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, which all teams have asked for."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception as error:  # told to the rank's own thread, which raises it
            self.error = error

    def _serve(self) -> bool:
        """Serve until all teams have settled; ``False`` if they close instead."""
        asked: dict[int, Ask] = {}
        num_teams = len(self._server.ticks)
        for event in self._server.events():
            if event.team in asked:
                continue
            if event.is_push:
                self._take(event.team)
                continue
            ask = self._listen(event.team)
            if ask == Ask.WEIGHTS:
                self._give(event.team)
                continue
            asked[event.team] = ask
            if len(asked) == num_teams:
                break
        if Ask.CLOSE in asked.values():
            return False
        for team in range(num_teams):
            self._give(team)
        return True

    def _listen(self, team: int) -> Ask:
        """What all devices of a team ask for."""
        said: list[list[float]] = []
        like = torch.empty(1 + len(self._named), dtype=torch.float64)
        for device, _ in self._pulls[team]:
            said.append(self._messages.start_receive(like, device, Tag.ASK)().tolist())
        assert said, "every team has all parameters, and every server's device some"
        self._options[team] = said[0][1:]
        return Ask(round(said[0][0]))

    def _give(self, team: int) -> None:
        """Send a team the weights as they are."""
        sends = [
            self._messages.start_send(self._flat(rows), device, Tag.NEW_WEIGHTS)
            for device, rows in self._pulls[team]
        ]
        for wait in sends:
            wait()

    def _flat(self, rows: Sequence[int]) -> Tensor:
        return flat_of([self.values[row].detach() for row in rows])

    def _take(self, team: int) -> None:
        """Receive a team's gradients and step the optimizer with them."""
        for device, rows in self._pushes[team]:
            values = [self.values[row] for row in rows]
            flat = self._messages.start_receive(flat_of(values), device, Tag.GRADIENTS)()
            for value, part in zip(values, parts_of(flat, values), strict=True):
                value.grad = part.to(value.device)
        set_options(self.optimizer, self._named, self._options[team])
        self.optimizer.step()
        for value in self.values.values():
            value.grad = None


def _with_server(traffic: Sequence[tuple[int, int, tuple[int, ...]]], rank: int) -> (
    list[tuple[int, tuple[int, ...]]]
):  # fmt: skip
    """(device of the team, rows) of what this server moves."""
    return [(device, rows) for device, server, rows in traffic if server == rank]


def flat_of(values: Sequence[Tensor]) -> Tensor:
    """Tensors one after another in a flat one."""
    return torch.cat([value.detach().reshape(-1) for value in values])


def parts_of(flat: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor in the shapes of others."""
    parts = torch.split(flat, [value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


def numeric_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the options that are numbers, such as the learning rate."""
    options = optimizer.param_groups[0]
    return sorted(
        key
        for key, value in options.items()
        if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
    )


def options_now(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> list[float]:
    """The values of such options."""
    return [float(optimizer.param_groups[0][name]) for name in names]


def set_options(
    optimizer: torch.optim.Optimizer, names: Sequence[str], values: Sequence[float]
) -> None:
    """Give an optimizer the values of such options."""
    group = optimizer.param_groups[0]
    for name, value in zip(names, values, strict=True):
        now = group[name]
        group[name] = torch.full_like(now, value) if isinstance(now, Tensor) else value
