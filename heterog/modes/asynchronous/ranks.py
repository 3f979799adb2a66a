"""Training with an asynchronous server on real ranks: the work of a rank around each step.

A team's rank asks for weights, which come when the server's order reaches its step. It trains on
them and sends its gradients without waiting. Ranks of different teams are in different steps at
the same time, so they must not wait for each other: a training loop with a collective over all
ranks after every step would deadlock if the plan lets a team run ahead.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.errors import HeterogError
from heterog.modes.asynchronous.value import AsynchronousServer, exchanged
from heterog.modes.asynchronous.weight_server import (
    Ask,
    Messages,
    Tag,
    WeightServer,
    flat_like,
    flat_of,
    numeric_options,
)
from heterog.modes.islands import island_of
from heterog.modes.on_ranks import RankMode, Reading, parts_of
from heterog.runtime.checkpoint.contents import Contents
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.step.collectives import group_limit


class AsynchronousTraining(RankMode):
    """Pulls and pushes of a rank, and its part of the server, if any.

    The optimizer of the rank's parameters never steps. But the server steps with its options, and
    it receives the server's state when all teams have settled.

    Args:
        step: The deployed step of this rank; its plan has an asynchronous server.

    Attributes:
        is_idle: Whether this rank is in no team.
        weights: Part of the server on this rank; ``None`` if it has none.
    """

    is_free_running = True
    ends_late = True

    def __init__(self, step: "DeployedStep") -> None:
        graph, strategy, rank = step.captured.graph, step.plan.strategy, step.rank
        self._rank, self._optimizer = rank, step.optimizer
        self._parameters = {
            row: step.part.parameters[tensor]
            for row, (_, tensor, _) in enumerate(graph.updates)
            if tensor in step.part.parameters
        }
        self._messages = Messages(rank)
        self._named = numeric_options(step.optimizer)
        self.weights: WeightServer | None = None
        if rank in strategy.own_mode(AsynchronousServer).devices:
            own = {row: value.detach() for row, value in self._parameters.items()}
            self.weights = WeightServer(
                graph, strategy, rank, own, step.make_optimizer, self._messages
            )
        team = island_of(strategy, rank)
        self.is_idle = team is None
        self._pushes, self._pulls = (
            [(server, rows) for device, server, rows in every if device == rank]
            for every in (
                () if team is None else exchanged(graph, strategy, team, is_push=is_push)
                for is_push in (True, False)
            )
        )
        self._gradients: dict[int, Tensor] = {}
        self._sending: list[Callable[[], None]] = []
        self._alike_after = 0

    def why_apart(self, num_steps: int) -> str:
        """Why teams have different models after a number of steps; empty if they are equal."""
        if num_steps == self._alike_after:
            return ""
        return (
            f"after step {num_steps} the server of this plan may miss gradients, and teams have "
            "weights of different steps; call settle() on every rank, then read or save the model."
        )

    def begin_step(self) -> None:
        """Get the weights of the next step."""
        with torch.no_grad():
            self._ask(Ask.WEIGHTS)

    def keep(self, rows: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Keep gradients until the end of the step, which pushes them.

        Args:
            rows: Rows of ``graph.updates``.
            gradients: Sums over this rank's team, in the parameters' shapes.
        """
        self._gradients |= dict(zip(rows, gradients, strict=True))

    def end_step(self, num_steps: int) -> None:
        """Push the gradients without waiting for their arrival."""
        for server, rows in self._pushes:
            flat = flat_of([self._gradients[row].to(self._parameters[row].dtype) for row in rows])
            self._sending.append(self._messages.start_send(flat, server, Tag.GRADIENTS))
        self._gradients.clear()

    def settle(self, num_steps: int) -> None:
        """Get the weights of the server once it has all gradients; every rank calls it.

        Args:
            num_steps: Number of steps since the start of training.
        """
        if num_steps == self._alike_after:
            return
        with torch.no_grad():
            self._ask(Ask.SETTLE)
        self._alike_after = num_steps
        if self.weights is not None:
            self.weights.join()
            for row, value in self.weights.values.items():
                state = self.weights.optimizer.state.get(value, {})
                self._optimizer.state[self._parameters[row]] = dict(state)

    def reading(self, step: "DeployedStep", contents: "Contents") -> Reading:
        """Continue from the weights and state of the checkpoint."""
        return Reading(take_over=partial(self.resume, contents.num_steps))

    def resume(self, num_steps: int) -> None:
        """Continue from loaded weights and optimizer state; every rank calls it.

        Args:
            num_steps: Number of steps before the checkpoint.
        """
        self._alike_after = num_steps
        served = {} if self.weights is None else self.weights.values
        for row, parameter in self._parameters.items():
            state = self._optimizer.state.pop(parameter, {})
            if row in served:
                assert self.weights is not None
                with torch.no_grad():
                    served[row].copy_(parameter)
                self.weights.optimizer.state[served[row]] = dict(state)
        dist.barrier()  # no rank asks for weights before all servers have loaded them

    def close(self) -> None:
        """End the messages' process group; every rank calls it when all have settled."""
        dist.barrier()
        self._messages.close()

    def _ask(self, ask: Ask) -> None:
        """Send a request to all servers of this rank's parameters, and copy their answers."""
        self._check_server()
        if self.weights is not None:
            self.weights.start()
        while self._sending:
            self._sending.pop()()
        options = [
            float(self._optimizer.param_groups[number][name]) for number, name in self._named
        ]
        said = torch.tensor([float(ask), *options], dtype=torch.float64)
        coming, asked = [], []
        # No limit for a team that settles: it waits for all steps of the others.
        limits = [group_limit()] if ask == Ask.WEIGHTS else []
        for server, rows in self._pulls:
            values = [self._parameters[row].detach() for row in rows]
            flat = flat_like(values)
            come = self._messages.start_receive(flat, server, Tag.NEW_WEIGHTS, *limits)
            coming.append((values, come))
            asked.append(self._messages.start_send(said, server, Tag.ASK))
        try:
            for values, come in coming:
                for value, new in zip(values, parts_of(come(), values), strict=True):
                    value.copy_(new)
        finally:
            self._check_server()
        for wait in asked:
            wait()

    def _check_server(self) -> None:
        """Raise the error that ended this rank's server, if any.

        Raises:
            HeterogError: the server has ended; the message has the reason.
        """
        if self.weights is not None and self.weights.error is not None:
            raise HeterogError(
                f"the server on rank {self._rank} has ended: {self.weights.error}"
            ) from self.weights.error
