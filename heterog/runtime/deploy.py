"""Deployment: a plan and a workload become a step that trains, on every rank."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.graph.capture import capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import TensorKind
from heterog.graph.workload import Workload
from heterog.planners.plan import Plan
from heterog.runtime.collectives import Communicator
from heterog.runtime.executor import StepExecutor, batch_by_tensor, device_sets
from heterog.strategy.lowering import lower
from heterog.strategy.strategy import REPLICATED, Decision


class DeployedStep:
    """A training step on one rank: call it with the global batch, get the global loss.

    Parameters live where the plan puts them; ``state_dict`` brings them together.
    """

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self.rank = dist.get_rank()
        self.plan = plan
        _check_world(plan)
        self.captured = capture_step(workload)
        graph = self.captured.graph
        difference = plan.graph.describe_difference(graph)
        if difference is not None:
            raise StrategyError(
                f"the plan was made for another step than '{workload.name}': {difference}."
            )
        program = lower(graph, plan.cluster, plan.strategy, num_steps=1)
        if program.hash != plan.program_hash:
            raise StrategyError(
                f"the plan's strategy lowers to program {program.hash} here, not to the plan's "
                f"{plan.program_hash}: it was made by another version of heterog; plan again."
            )
        _check_same_everywhere(program.hash)
        self.model = _one_model(workload)
        self._names = {tensor: graph.tensors[tensor].name for tensor in range(graph.num_inputs)}
        named = dict(self.model.named_parameters())
        held = self._held_parameters()
        self.parameters: dict[int, nn.Parameter] = {
            parameter: named[self._names[parameter]] for parameter in held
        }
        updated = [named[self._names[parameter]] for parameter in self._updated_parameters()]
        optimizer = (
            workload.optimizer(updated, **dict(workload.optimizer_options)) if updated else None
        )
        self.optimizer = optimizer
        self._executor = StepExecutor(
            self.captured,
            plan.strategy,
            program,
            plan.task_order,
            rank=self.rank,
            communicator=Communicator(self.rank, device_sets(program)),
            parameters=self.parameters,
            buffers=self._buffers(named),
            optimizer=optimizer,
        )

    def __call__(self, batch: Any) -> Tensor:
        """One training step on the global batch; every rank passes the same one.

        Raises:
            StrategyError: the batch has other shapes than the plan was made for.
        """
        return self._executor(batch_by_tensor(self.captured, batch))

    def state_dict(self) -> dict[str, Tensor] | None:
        """All parameters and buffers on rank 0, ``None`` on the others.

        A replicated parameter comes from its first replica, BatchNorm statistics from rank 0.
        """
        graph = self.captured.graph
        named = dict(self.model.named_parameters())
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for row, (_, parameter, _) in enumerate(graph.updates):
            owner = self._owner(row)
            if owner == 0:
                continue
            name = self._names[parameter]
            value = named[name].detach()
            if self.rank == owner:
                dist.send(value.contiguous(), 0)
            elif self.rank == 0:
                received = torch.empty_like(value)
                dist.recv(received, owner)
                state[name] = received
        if self.rank != 0:
            return None
        for name, twin in _tied_names(self.model).items():
            state[name] = state[twin]
        return state

    def _owner(self, row: int) -> int:
        """Rank whose copy of a parameter counts."""
        home = self.plan.strategy.homes[row]
        if home != REPLICATED:
            return home
        return self._decision(row).devices[0]

    def _decision(self, row: int) -> Decision:
        graph = self.captured.graph
        group = int(group_ops(graph).group[graph.updates[row][0]])
        return self.plan.strategy.decisions[group]

    def _held_parameters(self) -> list[int]:
        """Parameters that this rank reads or updates."""
        graph = self.captured.graph
        return [
            parameter
            for row, (_, parameter, _) in enumerate(graph.updates)
            if self.rank in self._decision(row).devices
            or self.plan.strategy.homes[row] == self.rank
        ]

    def _updated_parameters(self) -> list[int]:
        """Parameters that this rank's optimizer steps."""
        graph = self.captured.graph
        updated = []
        for row, (_, parameter, _) in enumerate(graph.updates):
            home = self.plan.strategy.homes[row]
            if home == self.rank or (
                home == REPLICATED and self.rank in self._decision(row).devices
            ):
                updated.append(parameter)
        return updated

    def _buffers(self, named: Mapping[str, nn.Parameter]) -> dict[int, Tensor]:
        """The step's inputs that are neither batch nor trained here: buffers and constants."""
        graph = self.captured.graph
        buffers = dict(self.model.named_buffers())
        found: dict[int, Tensor] = {}
        for tensor in range(graph.num_inputs):
            kind, name = graph.tensors[tensor].kind, self._names[tensor]
            if kind == TensorKind.BUFFER:
                found[tensor] = buffers[name] if name in buffers else named[name].detach()
            elif kind == TensorKind.CONSTANT:
                found[tensor] = getattr(self.captured.module, name)
            elif kind == TensorKind.PARAMETER and tensor not in self.parameters:
                found[tensor] = named[name].detach()
        return found


def deploy(workload: Workload, plan: Plan) -> DeployedStep:
    """Set a plan up on every rank of a running process group.

    Args:
        workload: the one that the plan was made for.
        plan: its cluster's device ``i`` is rank ``i``.

    Returns:
        A callable that trains one step.

    Raises:
        StrategyError: the model, the number of ranks or the program differ from the plan's.
    """
    return DeployedStep(workload, plan)


def _check_world(plan: Plan) -> None:
    ranks = dist.get_world_size()
    if ranks != plan.cluster.num_devices:
        raise StrategyError(
            f"the plan is for {plan.cluster.num_devices} devices of '{plan.cluster.name}', but "
            f"{ranks} ranks are running; start one rank per device."
        )


def _check_same_everywhere(program_hash: str) -> None:
    """All ranks must have lowered the same program, or their messages would not match."""
    mine = torch.tensor([int(program_hash, 16) >> 1], dtype=torch.int64)
    all_hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_hashes, mine)
    differing = [rank for rank, each in enumerate(all_hashes) if not torch.equal(each, mine)]
    if differing:
        raise StrategyError(
            f"rank {dist.get_rank()} lowered another program than ranks {differing}; every rank "
            "needs the same plan, model code and versions of torch and heterog."
        )


def _one_model(workload: Workload) -> nn.Module:
    """The model with rank 0's weights everywhere."""
    model = workload.make_model()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            dist.broadcast(value, 0)
    return model


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Names of the state dict that are other names of a parameter."""
    first: dict[int, str] = {id(value): name for name, value in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in every if first[id(value)] != name}
