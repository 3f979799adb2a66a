"""Parameters under ZeRO: the flat buckets that hold them, and this rank's slice of each.

The parameters of a bucket lie one after another in a flat tensor, which is cut at element
boundaries into one slice per device. In stages 1 and 2 every device keeps whole parameters: they
are views of the flat tensor, and so is the slice that the optimizer steps, so nothing is copied
when the new parameters are gathered. In stage 3 only the slice exists.

``buffers_of`` finds the owners of buffers: running statistics are those of the first device that
runs the module.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heterog.graph.axis_plan import BATCH_AXIS, axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.placement import Placement
from heterog.lowering.program import Program
from heterog.lowering.tables import graph_tables
from heterog.runtime.step.collectives import slice_counts
from heterog.runtime.step.spans import Spans, spans_of_groups
from heterog.strategy.division import Ring, gradient_rings
from heterog.strategy.strategy import REPLICATED, Strategy


class RowPart(NamedTuple):
    """Elements ``begin`` to ``end`` of one flattened parameter, which a slice holds."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedBucket:
    """A bucket of parameters that are updated in slices together.

    Attributes:
        number: Number of the bucket in the program.
        stage: Stage of ZeRO, 1 to 3.
        by_micro: Whether each micro-batch's gradients are reduced, instead of their sum.
        rows: Rows of ``graph.updates``, in the order in which they lie in the flat tensor.
        sizes: Number of elements of each of ``rows``.
        devices: Devices that own slices.
        counts: Number of elements of each device's slice, 0 allowed.
        ring: The devices, the ones among them with a part of the gradients' sum, and the units
            that they hold of parameters that live in slices.
        is_first: Whether this is the first bucket of its number, among all device sets, with these
            elements.
    """

    number: int
    stage: int
    by_micro: bool
    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    counts: tuple[int, ...]
    ring: Ring
    is_first: bool = True

    @property
    def num_elements(self) -> int:
        """Number of elements of all its parameters."""
        return sum(self.sizes)

    def range(self, device: int) -> tuple[int, int]:
        """First element of a device's slice, and the one after its last."""
        index = self.devices.index(device)
        begin = sum(self.counts[:index])
        return begin, begin + self.counts[index]

    def begins(self) -> dict[int, int]:
        """First element of each row."""
        begins = accumulate(self.sizes[:-1], initial=0)
        return dict(zip(self.rows, begins, strict=True))

    def pieces(self, device: int) -> Iterator[RowPart]:
        """The part of each parameter that a device's slice holds, in order."""
        low, high = self.range(device)
        for (row, begin), size in zip(self.begins().items(), self.sizes, strict=True):
            first, last = max(low - begin, 0), min(high - begin, size)
            if first < last:
                yield RowPart(row, first, last)


def sliced_buckets(
    graph: OpGraph, strategy: Strategy, program: Program, rings: Sequence[tuple[Ring, ...]]
) -> list[SlicedBucket]:
    """All buckets that are updated in slices; ``rings`` is the result of ``parameter_rings``."""
    group = group_ops(graph).group
    members: dict[int, list[int]] = {}
    for row, (op, _, _) in enumerate(graph.updates):
        decision = strategy.decisions[int(group[op])]
        if decision.sync.is_sharded and program.bucket[row] >= 0:
            members.setdefault(int(program.bucket[row]), []).append(row)
    found = []
    for number, rows in members.items():
        decision = strategy.decisions[int(group[graph.updates[number][0]])]
        tensors = [graph.tensors[graph.updates[row][1]] for row in rows]
        for place, ring in enumerate(rings[number]):
            sizes = tuple(round(each.num_elements * ring.part) for each in tensors)
            found.append(
                SlicedBucket(
                    number=number,
                    stage=int(decision.sync.sharded),
                    by_micro=decision.sync.sharded > 1 and not strategy.gathers_once,
                    rows=tuple(rows),
                    sizes=sizes,
                    devices=ring.devices,
                    counts=tuple(slice_counts(sum(sizes), ring.slice_parts)),
                    ring=ring,
                    is_first=all(
                        (each.begin, each.end) != (ring.begin, ring.end)
                        for each in rings[number][:place]
                    ),
                )
            )
    return found


def parameter_rings(graph: OpGraph, strategy: Strategy) -> list[tuple[Ring, ...]]:
    """The rings that sum the gradients of each parameter, by row of ``graph.updates``.

    There is none for a parameter that a server updates, and one for each slice group.
    """
    tables = graph_tables(graph, strategy.op_rules, strategy.blocks)
    axes = tuple(int(units) for units in tables.axis_units[1:])
    rings: list[tuple[Ring, ...]] = []
    alone = strategy.trains_apart
    domains, groups = tables.gradient_domain.tolist(), tables.parameter_group.tolist()
    for domain, group, home in zip(domains, groups, strategy.homes, strict=True):
        decision = strategy.decisions[group]
        is_summed = domain >= 0 and home == REPLICATED
        own = gradient_rings(decision.division, axes, alone)[domain] if is_summed else ()
        rings.append(tuple(part for ring in own for part in decision.slice_rings(ring)))
    return rings


class SliceRun(NamedTuple):
    """Elements ``begin`` to ``end`` of a slice, of parameters of one group of the optimizer.

    Attributes:
        value: The elements, which the optimizer steps as one tensor: a view, or the whole slice.
        begin: First element in the slice.
        end: Element after its last.
        group: Number of the parameter group.
    """

    value: nn.Parameter
    begin: int
    end: int
    group: int


class Slices:
    """This rank's slices, made from whole parameters, which become views or lose their memory.

    Args:
        buckets: All buckets of the program.
        rank: Number of this rank.
        parameters: Parameters of the model, by row of ``graph.updates``.
        group_of: Number of the parameter group of each row of ``graph.updates``.

    Attributes:
        own: Slices that this rank updates, by bucket; a slice may be empty.
        runs: Parts of them that the optimizer steps, by bucket: one for consecutive parameters of
            one group, none of an empty slice.
        whole: The flat tensor of each bucket of stages 1 and 2, by bucket.
    """

    def __init__(
        self,
        buckets: list[SlicedBucket],
        rank: int,
        parameters: Mapping[int, nn.Parameter],
        group_of: Sequence[int],
    ) -> None:
        self.rank = rank
        self.buckets = {each.number: each for each in buckets if rank in each.devices}
        self.own: dict[int, nn.Parameter] = {}
        self.runs: dict[int, list[SliceRun]] = {}
        self.whole: dict[int, Tensor] = {}
        for number, bucket in self.buckets.items():
            members = [parameters[row] for row in bucket.rows]
            flat = torch.cat([each.detach().reshape(-1) for each in members])
            own = flat[slice(*bucket.range(rank))]
            if bucket.stage == 3:
                own = own.clone()
                for each in members:
                    release(each)
            else:
                self.whole[number] = flat
                for each, part in zip(members, torch.split(flat, list(bucket.sizes)), strict=True):
                    each.data = part.view(each.shape)
            self.own[number] = nn.Parameter(own)
            self.runs[number] = _runs(bucket, rank, self.own[number], group_of)

    def stepped(self) -> list[SliceRun]:
        """All runs, for the optimizer."""
        return [run for runs in self.runs.values() for run in runs]

    def of_parameter(self, value: nn.Parameter) -> tuple[SlicedBucket, SliceRun] | None:
        """The bucket and run of one of the optimizer's tensors; ``None`` for a parameter."""
        return next(
            (
                (self.buckets[number], run)
                for number, runs in self.runs.items()
                for run in runs
                if run.value is value
            ),
            None,
        )


def _runs(
    bucket: SlicedBucket, rank: int, own: nn.Parameter, group_of: Sequence[int]
) -> list[SliceRun]:
    """The runs of a rank's slice."""
    at, spans = 0, list[tuple[int, int, int]]()  # (begin, end, group)
    for row, first, last in bucket.pieces(rank):
        begin, end, group = at, at + last - first, group_of[row]
        if spans and spans[-1][2] == group:
            begin = spans.pop()[0]
        spans.append((begin, end, group))
        at = end
    if len(spans) == 1:
        return [SliceRun(own, *spans[0])]
    flat = own.detach()
    return [
        SliceRun(nn.Parameter(flat[begin:end]), begin, end, group) for begin, end, group in spans
    ]


def release(parameter: nn.Parameter) -> None:
    """Free a parameter's memory but keep its shape; what is computed with it is NaN."""
    parameter.data = parameter.data.new_full((), math.nan).expand(parameter.shape)


class SplitBuffer(NamedTuple):
    """A buffer whose units are divided among a team; each member updates its own.

    Attributes:
        placement: Position of the units in the buffer.
        spans: Units of each device.
        members: Members of the owner's team, which together hold all units.
    """

    placement: Placement
    spans: Spans
    members: tuple[int, ...]


class Buffers(NamedTuple):
    """The owners of buffers, by name of the buffer.

    Attributes:
        owners: Rank whose copy counts.
        split: Buffers that rules split; the owner of such a buffer has only its own units.
    """

    owners: dict[str, int]
    split: dict[str, SplitBuffer]


def buffers_of(graph: OpGraph, strategy: Strategy) -> Buffers:
    """Find which rank's copy of each buffer counts.

    A module runs on the devices of its group, so statistics never change on other ranks. Constants
    made of a buffer are made on every rank; the op that writes the buffer then determines its
    owner. Buffers that depend on no sample (counters) are updated on all ranks with samples.
    """
    group = group_ops(graph).group
    plan = axis_plan(graph, strategy.op_rules)
    spans = spans_of_groups(strategy, plan.axes)
    anywhere = min(map(_first, spans[BATCH_AXIS]))
    found = Buffers({}, {})
    constant: dict[str, int] = {}
    for op, node in enumerate(graph.ops):
        own, axis = int(group[op]), int(plan.op_axis[op])
        for tensor, place in zip(node.inputs, plan.needed[op], strict=True):
            name = graph.tensors[tensor].name
            if graph.tensors[tensor].kind != TensorKind.BUFFER:
                continue
            if own == CONSTANT_GROUP:
                constant.setdefault(name, anywhere)
                continue
            found.owners.setdefault(name, _first(spans[axis][own]))
            if axis != BATCH_AXIS and place.kind == "S":
                of_group = spans[axis][own]
                owner = found.owners[name]
                found.split.setdefault(name, SplitBuffer(place, of_group, of_group.team_of(owner)))
    return Buffers(constant | found.owners, found.split)


def _first(spans: Spans) -> int:
    """The first device that has work in any micro-batch."""
    return next(d for d in spans.devices if any(shares[d] for shares in spans.shares))
