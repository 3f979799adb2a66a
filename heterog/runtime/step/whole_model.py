"""The part of a model that one rank holds: whole parameters, slices of parameters, and buffers.

Every rank makes the same whole model first.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.graph.capture import CapturedStep
from heterog.graph.op_graph import TensorKind
from heterog.graph.workload import Workload
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.slices import Buffers, Slices, release
from heterog.runtime.step.spans import cut, put
from heterog.strategy.strategy import REPLICATED


class ModelPart:
    """The part of a model that one rank holds under a strategy.

    Making it takes the model apart: parameters that the rank does not hold lose their memory, and
    parameters that live in slices become slices.

    Args:
        seen: The program as this rank sees it.
        parameters: All parameters of the model, by tensor id, on the rank's device.
        group_of: Number of the parameter group of each row of ``graph.updates``; by default the
            optimizer has one group.

    Attributes:
        parameters: Parameters that this rank reads or updates, by tensor id.
        group_of: Number of the parameter group of each row of ``graph.updates``.
        sliced: Parameters that are updated in slices (ZeRO), on whatever ranks.
        updated: Whole parameters, and runs of slices, that this rank's optimizer updates.
        updated_groups: Number of the parameter group of each of them.
        sharded: Placement and spans of the parameters that ranks hold in slices along an axis, by
            row of ``graph.updates``.
        buckets: All buckets of the program whose parameters are updated in slices (ZeRO).
        slices: Slices of them that this rank owns.
    """

    def __init__(
        self,
        seen: RankProgram,
        parameters: Mapping[int, nn.Parameter],
        group_of: Sequence[int] | None = None,
    ) -> None:
        graph, strategy, rank = seen.graph, seen.strategy, seen.rank
        self.group_of = [0] * len(graph.updates) if group_of is None else group_of
        self._seen = seen
        owners = (mode.owners(graph, strategy) for mode in strategy.modes)
        self._owners: tuple[int, ...] = next(filter(None, owners), ())
        self.sharded = seen.sharded
        for row, (place, spans) in self.sharded.items():
            # A slice with memory of its own, so that the whole parameter can be freed.
            value = parameters[graph.updates[row][1]]
            begin, count = spans.units_of(rank)
            value.data = cut(value.data, place, spans.units, begin, count).clone(
                memory_format=torch.contiguous_format
            )
        held = {  # parameters that this rank reads or updates, in order
            parameter: None
            for row, (_, parameter, _) in enumerate(graph.updates)
            if self.holds_replica(row) or strategy.homes[row] == rank
        }
        for _, tensor, _ in graph.updates:
            if tensor not in held:
                release(parameters[tensor])
        self.buckets = seen.buckets
        self.slices = Slices(
            self.buckets,
            rank,
            {row: parameters[tensor] for row, (_, tensor, _) in enumerate(graph.updates)},
            self.group_of,
        )
        self.parameters = {tensor: parameters[tensor] for tensor in held}
        runs = self.slices.stepped()
        sliced = {row for bucket in self.buckets for row in bucket.rows}
        self.sliced = [parameters[graph.updates[row][1]] for row in sliced]
        whole = [  # rows of the parameters that this rank's optimizer updates whole
            row
            for row, home in enumerate(strategy.homes)
            if row not in sliced
            and (home == rank or (home == REPLICATED and self.holds_replica(row)))
        ]
        self.updated = [parameters[graph.updates[row][1]] for row in whole]
        self.updated += [run.value for run in runs]
        self.updated_groups = [self.group_of[row] for row in whole] + [run.group for run in runs]

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all parameters, none of them in slices only."""
        has_slices = bool(self.sharded) or any(bucket.stage == 3 for bucket in self.buckets)
        return not has_slices and len(self.parameters) == len(self._seen.graph.updates)

    def owner(self, row: int) -> int:
        """Rank whose copy of a whole parameter counts."""
        return self._owners[row] if self._owners else self._seen.owners(row)[0]

    def holds_replica(self, row: int) -> bool:
        """Whether this rank has a parameter as a device of its group, or a slice of it."""
        if row in self.sharded:
            return self.sharded[row][1].units_of(self._seen.rank)[1] > 0
        return self._seen.rank in self._seen.decision(row).devices


def join_statistics(model: nn.Module, buffers: Buffers, rank: int) -> None:
    """Gather buffers that are updated in parts on their owner; every rank calls it.

    Args:
        model: Model as this rank has it.
        buffers: Ranks that hold each buffer.
        rank: Number of this process.
    """
    if not buffers.split:
        return
    # Frozen parameters, too, as the forward pass may write them (a target network).
    named = {name: value.detach() for name, value in model.named_parameters()}
    named |= dict(model.named_buffers())
    for name, (place, spans, members) in buffers.split.items():
        owner = buffers.owners[name]
        own = named[name]
        for device in members:
            begin, count = spans.units_of(device)
            if device == owner or count == 0 or rank not in (device, owner):
                continue
            part = cut(own, place, spans.units, begin, count).contiguous()
            if rank == device:
                dist.send(part, owner)
            else:
                part = torch.empty_like(part)
                dist.recv(part, device)
                put(own, place, spans.units, begin, part)


def one_model(workload: Workload, device: torch.device) -> nn.Module:
    """The model on a device, with rank 0's weights everywhere.

    All weights become contiguous, as in a capture, whatever strides the model gave them.
    """
    model = workload.make_model().to(device)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            own = of_rank_0(value.detach())
            if value.is_contiguous():
                value.copy_(own)
            else:
                value.data = own
    return model


def refuse_call(*_: object) -> None:
    """Hook of a model of which a rank holds a part.

    Raises:
        StrategyError: always.
    """
    raise StrategyError(
        "this rank holds a part of the model, so calling it here would compute something else. "
        "Load step.state_dict(), which rank 0 gets, into a model that you make yourself, and "
        "call that."
    )


def share_constants(captured: CapturedStep, device: torch.device) -> None:
    """Give every rank the constants of rank 0, which models may have drawn at random."""
    for each in captured.graph.tensors[: captured.graph.num_inputs]:
        if each.kind == TensorKind.CONSTANT:
            value = getattr(captured.module, each.name).to(device)
            if value.layout == torch.strided:
                value = value.clone().copy_(of_rank_0(value))  # with its strides
            setattr(captured.module, each.name, value)


def other_inputs(
    captured: CapturedStep, model: nn.Module, parameters: Collection[int], device: torch.device
) -> dict[int, Tensor]:
    """Inputs of a step besides the batch and some parameters: buffers and constants."""
    graph, found = captured.graph, dict[int, Tensor]()
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for tensor in range(graph.num_inputs):
        meta = graph.tensors[tensor]
        if meta.kind == TensorKind.CONSTANT:
            found[tensor] = getattr(captured.module, meta.name).to(device)
        elif meta.kind != TensorKind.BATCH and tensor not in parameters:
            found[tensor] = held[meta.name].detach()
    return found


def of_rank_0(value: Tensor) -> Tensor:
    """A contiguous tensor with rank 0's values; every rank calls it."""
    sent = value.contiguous().reshape(-1).view(torch.uint8)  # of any dtype
    dist.broadcast(sent, 0)
    return sent.view(value.dtype).view(value.shape)
