"""The part of a model that one rank holds: whole parameters, slices of them, buffers."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering.program import Program
from heterog.runtime.step.placed import cut
from heterog.runtime.step.rank_program import sharded_parameters
from heterog.runtime.step.slices import Slices, release, sliced_buckets
from heterog.strategy.strategy import REPLICATED, Decision, Strategy


class ModelPart:
    """The part of a model that one rank holds under a strategy.

    Making it takes the model apart: parameters that the rank does not hold give their memory back,
    and those that live in slices become slices.

    Args:
        graph: Graph of the step.
        strategy: Strategy of the plan.
        program: Program lowered from both.
        rank: Number of this rank; ranks are device indices.
        parameters: All parameters of the model, by tensor id, on the rank's device.
        group_of: Number of the parameter group of each row of ``graph.updates``; by default the
            optimizer has one group.

    Attributes:
        parameters: Parameters that this rank reads or updates, by tensor id.
        group_of: Number of the parameter group of each row of ``graph.updates``.
        updated: Whole parameters, and runs of slices, that this rank's optimizer updates.
        updated_groups: Number of the parameter group of each of them.
        sharded: Placement and spans of the parameters of which each rank holds its own slice, by
            row of ``graph.updates``.
        buckets: All buckets of the program whose parameters are updated in slices (ZeRO).
        slices: Slices of them that this rank owns.
    """

    def __init__(
        self,
        graph: OpGraph,
        strategy: Strategy,
        program: Program,
        rank: int,
        parameters: Mapping[int, nn.Parameter],
        group_of: Sequence[int] | None = None,
    ) -> None:
        self.group_of = [0] * len(graph.updates) if group_of is None else group_of
        self._graph = graph
        self._strategy = strategy
        self._rank = rank
        owners = (mode.owners(graph, strategy) for mode in strategy.modes)
        self._owners: tuple[int, ...] = next(filter(None, owners), ())
        self.sharded = sharded_parameters(graph, strategy)
        for row, (place, spans) in self.sharded.items():
            # A slice of its own memory, so that the whole is given back.
            value = parameters[graph.updates[row][1]]
            begin, count = spans.units_of(rank)
            value.data = cut(value.data, place, spans.units, begin, count).clone(
                memory_format=torch.contiguous_format
            )
        held = self._held()
        for _, tensor, _ in graph.updates:
            if tensor not in held:
                release(parameters[tensor])
        self.buckets = sliced_buckets(graph, strategy, program)
        self.slices = Slices(
            self.buckets,
            rank,
            {row: parameters[tensor] for row, (_, tensor, _) in enumerate(graph.updates)},
            self.group_of,
        )
        self.parameters = {tensor: parameters[tensor] for tensor in held}
        whole, runs = self._updated(), self.slices.stepped()
        self.updated = [parameters[graph.updates[row][1]] for row in whole]
        self.updated += [run.value for run in runs]
        self.updated_groups = [self.group_of[row] for row in whole] + [run.group for run in runs]

    def decision(self, row: int) -> Decision:
        """The decision of a parameter's group."""
        group = int(group_ops(self._graph).group[self._graph.updates[row][0]])
        return self._strategy.decisions[group]

    def owner(self, row: int) -> int:
        """Rank whose copy of a whole parameter counts."""
        if self._owners:
            return self._owners[row]
        home = self._strategy.homes[row]
        return home if home != REPLICATED else self.decision(row).devices[0]

    def holds_replica(self, row: int) -> bool:
        """Whether this rank has a parameter as a device of its group, or a slice of it."""
        if row in self.sharded:
            return self.sharded[row][1].units_of(self._rank)[1] > 0
        return self._rank in self.decision(row).devices

    def _held(self) -> dict[int, None]:
        """Parameters that this rank reads or updates, in order."""
        return {
            parameter: None
            for row, (_, parameter, _) in enumerate(self._graph.updates)
            if self.holds_replica(row) or self._strategy.homes[row] == self._rank
        }

    def _updated(self) -> list[int]:
        """Rows of the parameters that this rank's optimizer updates whole."""
        sliced = {row for bucket in self.buckets for row in bucket.rows}
        return [
            row
            for row in range(len(self._graph.updates))
            if row not in sliced and self._is_updated_here(row)
        ]

    def _is_updated_here(self, row: int) -> bool:
        home = self._strategy.homes[row]
        return home == self._rank or (home == REPLICATED and self.holds_replica(row))
