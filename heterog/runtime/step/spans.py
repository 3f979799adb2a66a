"""The samples and units of each device, for ranks to look up while they run."""

from collections.abc import Sequence

from heterog.graph.axis_plan import BATCH_AXIS
from heterog.graph.halo import Rows
from heterog.graph.placement import Placement
from heterog.strategy.division import Division, batch_shares, cut_division
from heterog.strategy.strategy import Strategy

Span = tuple[int, int]
"""First one and number of consecutive samples or units."""
EVERY: Span = (0, -1)
"""A span of everything."""


def overlap(one: Span, other: Span) -> Span:
    """What is in both of two spans."""
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
        """Whether a device is the first of its team that has work."""
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

        A team whose members all have weight 0, as shares may be, holds nothing.
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
