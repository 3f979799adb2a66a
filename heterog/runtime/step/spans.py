"""Samples and units of each device, cutting and joining of tensors, and sets of rows.

``Spans`` has the samples and units of each device, for ranks to look up while they run.

``cut``, ``put`` and ``join`` work along an axis (mostly the batch), in any dimension: a tensor
placed as ``S(dim, outer)`` has ``outer x units x inner`` entries in dimension ``dim``.

Sets of rows, held or wanted, are consecutive rows or the rows that a sparse matrix reads.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterog.graph.axis_plan import BATCH_AXIS
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpCall, Placement
from heterog.graph.sharding_rules.matmul import pattern_key
from heterog.graph.sparse_pattern import Rows, SparsePattern
from heterog.graph.sparse_product import multiply
from heterog.strategy.division import Division, batch_shares, cut_division
from heterog.strategy.strategy import Strategy

Span = tuple[int, int]
"""The first, and the number, of consecutive samples or units."""
EVERY: Span = (0, -1)
"""A span of everything."""


def overlap(one: Span, other: Span) -> Span:
    """The intersection of two spans."""
    begin = max(one[0], other[0])
    return begin, max(min(one[0] + one[1], other[0] + other[1]) - begin, 0)


class Spans:
    """Samples of the batch and units of one axis that each device of a group has.

    Samples count from the start of their micro-batch.

    Args:
        division: Division of the group.
        axis: Number of the axis; 0 is the batch.
        units: Number of units of the axis.
        batch_size: Batch size of the step, which may differ from the division's.
        micro_batches: Micro-batches of the strategy; see ``Strategy``.
        sizes: Number of samples of each micro-batch.

    Attributes:
        devices: Devices of the group, ascending.
        axis: Number of the axis; 0 is the batch.
        units: Number of units of the whole axis.
        num_teams: Number of teams of the group.
        shares: Samples or units of each device, per micro-batch.
    """

    def __init__(
        self,
        division: Division,
        *,
        axis: int,
        units: int,
        batch_size: int,
        micro_batches: tuple[tuple[int, ...], ...],
        sizes: tuple[int, ...],
    ) -> None:
        self.devices = division.devices
        self.axis = axis
        self.units = max(units, 1)
        teams = division.all_teams
        self.num_teams = len(teams)
        samples = division._replace(shares=batch_shares(division.shares, batch_size))
        cut = cut_division(samples, max(division.devices) + 1, micro_batches, sizes)
        self._team = {device: number for number, team in enumerate(teams) for device in team}
        self._teams = teams
        self._units: dict[int, Span] = {}
        if axis != BATCH_AXIS:
            for team, counts in zip(teams, division.units(units), strict=True):
                for place, device in enumerate(team):
                    self._units[device] = sum(counts[:place]), counts[place]
        by_device = range(len(cut.own))
        self._own: list[dict[int, Span]] = [
            {d: (int(cut.own_begin[m, d]), int(cut.own[m, d])) for d in self.devices}
            for m in by_device
        ]
        self._of_team: list[dict[int, Span]] = [
            {d: (int(cut.team_begin[m, d]), int(cut.team_samples[m, d])) for d in self.devices}
            for m in by_device
        ]
        self.shares = [
            {device: self.range(micro, device)[1] for device in self.devices}
            for micro in by_device
        ]

    def range(self, micro: int, device: int) -> Span:
        """The work of a device: its own samples, or its units if its team has samples."""
        if self.axis == BATCH_AXIS:
            return self.own_samples(micro, device)
        begin, count = self._units.get(device, (0, 0))
        return begin, count if self.team_samples(micro, device)[1] else 0

    def samples(self, micro: int, device: int) -> Span:
        """Samples that an op works on: the device's own, or with a rule all of its team."""
        if self.axis == BATCH_AXIS:
            return self.own_samples(micro, device)
        return self.team_samples(micro, device)

    def own_samples(self, micro: int, device: int) -> Span:
        """A device's own samples."""
        return self._own[micro].get(device, (0, 0))

    def team_samples(self, micro: int, device: int) -> Span:
        """The samples of a device's team."""
        return self._of_team[micro].get(device, (0, 0))

    def size(self, micro: int) -> int:
        """Number of samples of a whole micro-batch."""
        return sum(count for _, count in self._own[micro].values())

    def units_of(self, device: int) -> Span:
        """A device's units of the axis, whether its team has samples or not."""
        return self._units.get(device, (0, 0))

    def first(self, micro: int) -> int:
        """First device that has work."""
        return next(device for device, count in self.shares[micro].items() if count)

    def is_in_first_team(self, micro: int, device: int) -> bool:
        """Whether a device belongs to the first team that has work."""
        first = min(self._team[each] for each, count in self.shares[micro].items() if count)
        return self._team.get(device) == first

    def speaks(self, micro: int, device: int) -> bool:
        """Whether a device is the first one in its team that has work."""
        return device in self._team and self.speaker(micro, device) == device

    def speaker(self, micro: int, device: int, among: "Spans | None" = None) -> int:
        """The first device that has work in the team of a device; -1 if none does.

        Args:
            micro: Number of the micro-batch.
            device: A device of the team.
            among: Spans in which the device must have work, too, if any of the team does.
        """
        working = [each for each in self._teams[self._team[device]] if self.shares[micro][each]]
        both = [each for each in working if among is None or among.shares[micro].get(each, 0)]
        return next(iter(both or working), -1)

    def team_of(self, device: int) -> tuple[int, ...]:
        """The team of a device, in order."""
        return self._teams[self._team[device]]

    def first_team(self) -> list[int]:
        """Members of the first team that holds values split along the axis.

        A team whose members all have weight 0, as shares allow, holds nothing.
        """
        return list(next(team for team in self._teams if any(self._units[d][1] for d in team)))


def spans_of_groups(strategy: Strategy, axes: Sequence[int]) -> list[list[Spans]]:
    """Spans of each group along each axis; equal groups share one object.

    Args:
        strategy: A strategy with a decision for every group.
        axes: Number of units of each axis; the batch first.
    """
    known: dict[tuple[Division, int], Spans] = {}
    sizes = strategy.micro_sizes
    for decision in strategy.decisions:
        for axis, units in enumerate(axes):
            if (decision.division, axis) not in known:
                known[decision.division, axis] = Spans(
                    decision.division,
                    axis=axis,
                    units=units,
                    batch_size=axes[BATCH_AXIS],
                    micro_batches=strategy.micro_batches,
                    sizes=sizes,
                )
    return [
        [known[decision.division, axis] for decision in strategy.decisions]
        for axis in range(len(axes))
    ]


def window_rows(place: Placement, units: Span, size: int) -> Rows:
    """Rows that a placement with a window reads, of a tensor with ``size`` rows.

    Args:
        place: A split, with a window.
        units: Units of the axis.
        size: Number of rows of the whole tensor.
    """
    assert place.window is not None
    if units[1] == 0:
        return Rows(0, 0)
    return place.window.rows(units[0], units[0] + units[1], size)


def unit_rows(units: Span, size: int, all_units: int) -> Rows:
    """Rows of some units, of a tensor with ``size`` rows."""
    inner = size // all_units
    return Rows(units[0] * inner, (units[0] + units[1]) * inner)


def cut(tensor: Tensor, placement: Placement, total: int, begin: int, count: int) -> Tensor:
    """The part of a tensor that belongs to some consecutive samples.

    Args:
        tensor: A tensor that holds ``total`` samples.
        placement: Position of the samples in it.
        total: Number of samples in ``tensor``.
        begin: First wanted sample.
        count: Number of wanted samples.

    >>> cut(torch.arange(6), Placement("S"), total=3, begin=1, count=1)
    tensor([2, 3])
    """
    if count == total:
        return tensor
    dim, outer = placement.dim, placement.outer
    inner = tensor.shape[dim] // (outer * total)
    if outer == 1:
        part = tensor.narrow(dim, begin * inner, count * inner)
        # Some kernels (layer norm's backward) ignore strides.
        return part.contiguous() if tensor.is_contiguous() else part
    shape = tensor.shape
    apart = tensor.reshape(*shape[:dim], outer, total * inner, *shape[dim + 1 :])
    part = apart.narrow(dim + 1, begin * inner, count * inner)
    return part.reshape(*shape[:dim], outer * count * inner, *shape[dim + 1 :])


def put(tensor: Tensor, placement: Placement, total: int, begin: int, part: Tensor) -> None:
    """Write some consecutive samples, in place, to the position that ``cut`` reads.

    >>> whole = torch.zeros(6)
    >>> put(whole, Placement("S"), total=3, begin=1, part=torch.ones(2))
    >>> whole
    tensor([0., 0., 1., 1., 0., 0.])
    """
    dim, outer = placement.dim, placement.outer
    inner = tensor.shape[dim] // (outer * total)
    count = part.shape[dim] // (outer * inner)
    shape = tensor.shape
    apart = tensor.view(*shape[:dim], outer, total * inner, *shape[dim + 1 :])
    own = apart.narrow(dim + 1, begin * inner, count * inner)
    own.copy_(part.reshape(own.shape))


def nested(place: Placement, other: Placement, total: int, count: int) -> Placement:
    """Placement of units in a tensor that holds only a part of another axis.

    Args:
        place: Placement of the units in the whole tensor.
        other: Placement of the units of the other axis.
        total: Units of the other axis in the whole tensor.
        count: Units of the other axis in the part.

    >>> from heterog.graph.placement import S
    >>> nested(S(0, 8), S(0), total=8, count=2)  # positions inside samples, in one dimension
    Placement(kind='S', dim=0, outer=2)
    """
    around = other.outer * total
    if place.kind != "S" or other.kind != "S" or place.dim != other.dim or place.outer % around:
        return place
    return Placement("S", place.dim, place.outer // total * count)


def join(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Join parts with consecutive samples: the inverse of ``cut``."""
    dim, outer = placement.dim, placement.outer
    if len(parts) == 1:
        return parts[0]
    if outer == 1:
        return torch.cat(list(parts), dim)
    apart = [part.reshape(*part.shape[:dim], outer, -1, *part.shape[dim + 1 :]) for part in parts]
    whole = torch.cat(apart, dim + 1)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])


def cut_span(tensor: Tensor, placement: Placement, have: Span, want: Span) -> Tensor:
    """Cut some samples out of a tensor that holds more of them; see ``cut``."""
    return cut(tensor, placement, have[1], want[0] - have[0], want[1])


def join_in_order(pieces: Iterable[tuple[int, Tensor]], placement: Placement) -> Tensor:
    """Join pieces in the order of their first samples."""
    return join([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], placement)


RowSet = Rows | npt.NDArray[np.int64]
"""Consecutive rows, or an ascending array of row numbers."""


@lru_cache(maxsize=512)  # for each pattern: a rank's own rows, and rows of its receivers
def needed_rows(pattern: SparsePattern, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Rows that are read by rows ``begin`` to ``end`` of a sparse product."""
    return pattern.needed(begin, end)


def rows_of_neighbours(pattern: SparsePattern, units: Span, all_units: int) -> RowSet:
    """Rows that the rows of some units read.

    Args:
        pattern: Sparse pattern of the product.
        units: Units of its result.
        all_units: Units of the whole axis.
    """
    made = unit_rows(units, pattern.num_rows, all_units)
    return needed_rows(pattern, made.begin, made.end)


def count(rows: RowSet) -> int:
    """Number of rows."""
    return rows.num if isinstance(rows, Rows) else len(rows)


def first(rows: RowSet) -> int:
    """The first row, -1 if there is none."""
    if isinstance(rows, Rows):
        return rows.begin
    return int(rows[0]) if len(rows) else -1


def common(have: RowSet, want: RowSet) -> RowSet:
    """Rows in both sets; at least one set is consecutive, or both are equal."""
    if isinstance(have, Rows) and isinstance(want, Rows):
        return have.overlap(want)
    if isinstance(have, Rows):
        have, want = want, have
    assert not isinstance(have, Rows)
    if not isinstance(want, Rows):
        return np.intersect1d(have, want, assume_unique=True)
    begin, end = np.searchsorted(have, [want.begin, want.end]).tolist()
    return have[begin:end]


def take(tensor: Tensor, dim: int, have: RowSet, want: RowSet) -> Tensor:
    """Select rows of a tensor.

    Args:
        tensor: A tensor that holds the rows ``have`` along ``dim``.
        dim: Dimension of the rows.
        have: Rows that it holds.
        want: Rows to select, a subset of ``have``.
    """
    if isinstance(want, Rows):
        assert isinstance(have, Rows)
        return tensor.narrow(dim, want.begin - have.begin, want.num).contiguous()
    places = want - have.begin if isinstance(have, Rows) else np.searchsorted(have, want)
    if len(places) == tensor.shape[dim]:
        return tensor.contiguous()  # a subset of the same size is the whole
    return tensor.index_select(dim, torch.from_numpy(places).to(tensor.device))


class _Part(NamedTuple):
    """Some rows of a sparse matrix, with columns numbered among the rows that they read."""

    row_starts: Tensor
    columns: Tensor
    entries: slice


class ProductOfRows:
    """Computes some rows of a sparse product from only the rows that they read.

    Args:
        call: The op.
        graph: Graph with the entries of the matrix.
        all_units: Units of the axis along which rows are cut.
    """

    def __init__(self, call: OpCall, graph: OpGraph, all_units: int) -> None:
        key = pattern_key(call.args)
        self._pattern = next(each for each in graph.patterns if each.key == key)
        self._all_units = all_units
        self._parts: dict[tuple[Span, torch.device], _Part] = {}

    def __call__(self, inputs: Sequence[Tensor], units: Span) -> list[Tensor]:
        """Compute the rows of some units of the result.

        Args:
            inputs: Rows of features that are read, and the whole matrix.
            units: Units of this rank.
        """
        dense, row_starts, _, weights = inputs
        if dense.is_meta:
            made = unit_rows(units, self._pattern.num_rows, self._all_units)
            return [dense.new_empty((*dense.shape[:-2], made.num, dense.shape[-1]))]
        part = self._part(units, row_starts)
        return [multiply(dense, part.row_starts, part.columns, weights[part.entries])]

    def _part(self, units: Span, row_starts: Tensor) -> _Part:
        key = units, row_starts.device
        if key not in self._parts:
            pattern = self._pattern
            made = unit_rows(units, pattern.num_rows, self._all_units)
            starts = pattern.row_starts[made.begin : made.end + 1]
            read = needed_rows(pattern, made.begin, made.end)
            places = np.searchsorted(read, pattern.columns_of(made.begin, made.end))
            arrays = (starts - starts[0], places)
            local = [torch.from_numpy(array).to(row_starts) for array in arrays]
            self._parts[key] = _Part(local[0], local[1], slice(int(starts[0]), int(starts[-1])))
        return self._parts[key]
