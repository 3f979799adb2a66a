"""What the ops of a graph read and make, and who has which samples and units of an axis.

The part of the slow reference (see ``reference``) that needs no walk through the step.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from heterog.graph.axis_plan import EVERYWHERE, axis_plan
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.placement import OpRules, Placement, Window
from heterog.graph.sharding_rules import Special
from heterog.graph.sharding_rules.reduction import LABEL_COUNTING_LOSSES
from heterog.strategy import keeping
from heterog.strategy.division import split_in_proportion
from heterog.strategy.keeping import Keeps, attention_scores, kept_products, recomputations
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

BATCH = 0
"""The axis of ops that follow the batch."""
ANY_PASS, FORWARD_PASS, BACKWARD_PASS = 0, 1, 2
"""Who shares what was gathered: all readers, or those of one pass."""
AS_MADE, IN_TEAM, EVERY_SAMPLE = 0, 1, 2
"""What a reader needs of a value: the part that it would have made itself; all samples of its
team, whole along the axis; all samples of the micro-batch."""


class Need(NamedTuple):
    """A value as ops of a group need it that cannot take it as it was made."""

    value: int
    group: int
    whole: int  # AS_MADE, IN_TEAM or EVERY_SAMPLE
    axis: int  # along which the reader runs
    readers: int = 0  # ANY_PASS, FORWARD_PASS or BACKWARD_PASS
    window: Window | str | None = None  # rows that its ops read, of which others own some


class Part(NamedTuple):
    """A number of samples and of units of an axis."""

    samples: int
    units: int = 0


# --- what ops read and make ---------------------------------------------------------------------


class Reading:
    """What the ops of a graph read and make, under rules of single ops.

    A value of an op with a rule has two placements: over the batch, between teams, and along the
    axis of the rule, inside a team. Values of other ops have the first one alone, over devices.
    """

    def __init__(self, graph: OpGraph, op_rules: OpRules, blocks: tuple[int, ...] = ()) -> None:
        self.graph = graph
        self.plan = axis_plan(graph, op_rules)
        self.op_rules = dict(op_rules)
        self.batch = batch_plan(graph)
        self.has_axes = len(self.plan.axes) > 1
        self.group = [int(group) for group in group_ops(graph).group]
        self.num_groups = group_ops(graph).num_groups
        starts = blocks or range(self.num_groups)
        # First group of the block of each group; constants are of none.
        self.block = {
            group: max(start for start in starts if start <= group)
            for group in range(self.num_groups)
        }
        self.block[CONSTANT_GROUP] = CONSTANT_GROUP
        self.ops = [
            op
            for op, each in enumerate(graph.ops)
            if not graph.is_view[op] and each.phase != Phase.UPDATE
        ]
        self.maker = {value: op for op in self.ops for value in graph.outputs[op]}
        self.parameter = {tensor: row for row, (_, tensor, _) in enumerate(graph.updates)}
        self.reads = {op: self._reads(op) for op in self.ops}
        self.parameters_read = {
            op: {
                self.parameter[storage]: None
                for storage in self._storages(op)
                if storage in self.parameter
            }
            for op in self.ops
        }

    def _storages(self, op: int) -> list[int]:
        return [int(self.graph.storage[tensor]) for tensor in self.graph.ops[op].inputs]

    def axis(self, op: int) -> int:
        """The axis that an op runs along."""
        return int(self.plan.op_axis[op])

    def value_axis(self, value: int) -> int:
        """The axis that a value lies along: its op's, or the one that its sum is cut along."""
        return int(self.plan.tensor_axis[value])

    def is_cut_anew(self, value: int) -> bool:
        """Whether the members of a team change a value together as soon as it is made."""
        return self.scatter_of(self.maker[value]) or self.is_completed(self.maker[value])

    def scatter_of(self, op: int) -> bool:
        """Whether a team cuts the result of an op anew as soon as it is made."""
        rule = self.op_rules.get(op)
        return rule is not None and rule.scatter is not None

    def is_completed(self, op: int) -> bool:
        """Whether members of a team gather a number of each row to make what an op makes."""
        return self.plan.specials[op] == Special.NUMBERS_OF_ROWS

    def is_sum(self, op: int) -> bool:
        """Whether what a team cuts anew are parts of a sum; otherwise it is cut already."""
        return self.op_rules[op].outputs[0].kind == "P"

    def block_of(self, op: int) -> int:
        """The block of groups that an op belongs to."""
        return self.block[self.group[op]]

    def is_backward(self, op: int) -> bool:
        """Whether an op belongs to the backward pass."""
        return self.graph.ops[op].phase == Phase.BACKWARD

    # Placements.

    def over_batch(self, tensor: int) -> Placement:
        """How a tensor lies over the batch."""
        follows = int(self.plan.tensor_axis[tensor]) == BATCH
        return (self.plan if follows else self.batch).placements[tensor]

    def along_axis(self, tensor: int) -> Placement | None:
        """How a tensor of an op with a rule lies along its axis."""
        follows = int(self.plan.tensor_axis[tensor]) == BATCH
        return None if follows else self.plan.placements[tensor]

    def kinds(self, value: int) -> tuple[str, str]:
        """Kinds of both placements of a value, the second one empty without a rule."""
        along = self.along_axis(value)
        return self.over_batch(value).kind, along.kind if along else ""

    def _unlike_over_batch(self, op: int, position: int) -> bool:
        """Whether an op needs samples, or sums of samples, that a tensor's parts do not have."""
        plan = self.plan if self.axis(op) == BATCH else self.batch
        made = self.over_batch(self.graph.ops[op].inputs[position])
        return made.kind in "SP" and made != plan.needed[op][position]

    def _unlike_along_axis(self, op: int, position: int) -> bool:
        tensor = self.graph.ops[op].inputs[position]
        needed = self.plan.needed[op][position]
        return self.plan.is_whole_needed(tensor, needed, self.axis(op))

    def whole_needed(self, op: int, position: int) -> int:
        """How much of an input an op, or a view through which it looks at it, needs."""
        tensor = self.graph.ops[op].inputs[position]
        view = int(self.graph.producer[tensor])
        through = AS_MADE
        if view >= 0 and self.graph.is_view[view]:
            through = self.whole_needed(view, 0)
        if through == EVERY_SAMPLE or self._unlike_over_batch(op, position):
            return EVERY_SAMPLE
        return IN_TEAM if through or self._unlike_along_axis(op, position) else AS_MADE

    def _reads(self, op: int) -> dict[tuple[int, Need | None], None]:
        """Values that an op reads: as they lie in its own block, or as it needs them."""
        found: dict[tuple[int, Need | None], None] = {}
        for position, value in enumerate(self._storages(op)):
            if value not in self.maker:
                continue  # an input of the step
            maker = self.maker[value]
            whole = self.whole_needed(op, position)
            is_near = self.block_of(maker) == self.block_of(op)
            window = self.window(op, position)
            as_made = is_near and self.value_axis(value) == self.axis(op) and whole == AS_MADE
            as_made = as_made and window is None
            if self.group[maker] == CONSTANT_GROUP or as_made:
                found[value, None] = None
            else:
                readers = self._pass_of_readers(op, value, whole)
                need = Need(value, self.group[op], whole, self.axis(op), readers, window)
                found[value, need] = None
        return found

    def window(self, op: int, position: int) -> Window | str | None:
        """Rows of an input that an op reads, if some device may lack any; or a matrix's key."""
        tensor = self.graph.ops[op].inputs[position]
        place, needed = self.along_axis(tensor), self.plan.needed[op][position]
        if needed.pattern and place is not None and place.kind == "S":
            return needed.pattern if self.whole_needed(op, position) == AS_MADE else None
        if needed.window is None or place is None or self.whole_needed(op, position) != AS_MADE:
            return None
        size, units = self.rows(tensor), self.plan.axes[self.axis(op)]
        lacks = any(
            not set(range(*needed.window.rows(unit, unit + 1, size)))
            <= set(range(unit * size // units, (unit + 1) * size // units))
            for unit in range(units)
        )
        return needed.window if place.kind == "S" and lacks else None

    def rows_read(self, window: Window | str, units: range, of_units: int, rows: int) -> set[int]:
        """Rows that the ops on some units read."""
        if not isinstance(window, str):
            return set(range(*window.rows(units.start, units.stop, rows)))
        (pattern,) = (each for each in self.graph.patterns if each.key == window)
        own = {
            row for row in range(pattern.num_rows) if row * of_units // pattern.num_rows in units
        }
        entries = zip(pattern.rows.tolist(), pattern.columns.tolist(), strict=True)
        return {column for row, column in entries if row in own}

    def rows(self, value: int) -> int:
        """Rows of a tensor that is cut along a dimension by a rule."""
        place = self.along_axis(value)
        assert place is not None
        return self.graph.tensors[value].shape[place.dim]

    @cached_property
    def remakes(self) -> dict[Need, tuple[list[int], float]]:
        """Ops that make what is needed of the batch, and the bytes from which that is worth it."""
        found: dict[Need, tuple[list[int], float]] = {}
        for need in {need for op in self.ops for _, need in self.reads[op] if need is not None}:
            ops = self._made_of_batch(self.maker[need.value])
            is_split = self.over_batch(need.value).kind == "S" and need.window is None
            if ops is None or not is_split or need.whole != AS_MADE:
                continue
            chosen = sorted(ops)
            size = float(self.graph.tensor_bytes[need.value]) * self.moved_fraction(need.value)
            work = max(
                float(of[chosen].sum()) for of in (self.graph.bytes_moved, self.graph.flops)
            )
            if work <= keeping.MOST_WORK * size:
                found[need] = chosen, len(chosen) * keeping.BYTES_PER_LAUNCH
        return found

    def _made_of_batch(self, op: int) -> set[int] | None:
        """The ops by which one follows from the batch and constants, itself with them, if it does.

        Each takes what the ones before have made on the same device.
        """
        each, axis = self.graph.ops[op], self.axis(op)
        changes = {*self.plan.specials[op : op + 1], *self.batch.specials[op : op + 1]}
        if (
            self.group[op] == CONSTANT_GROUP
            or each.phase != Phase.FORWARD
            or not all(self.batch.follows_batch[value] for value in self.graph.outputs[op])
            or changes - {None, "own_rows", "as_reshape"}
            or self.scatter_of(op)
            or self.plan.axes[axis] != (self.graph.batch_size if axis == BATCH else EVERYWHERE)
        ):
            return None
        found = {op}
        for position, value in enumerate(self._storages(op)):
            if value not in self.maker:
                if self.graph.tensors[value].kind == TensorKind.BUFFER and self._is_written(value):
                    return None
            elif self.group[self.maker[value]] != CONSTANT_GROUP:
                before = self._made_of_batch(self.maker[value])
                whole = self.whole_needed(op, position)
                if before is None or whole != AS_MADE or self.value_axis(value) != axis:
                    return None
                found |= before
        return found

    def _is_written(self, buffer: int) -> bool:
        """Whether the step changes a buffer of the model."""
        return any(
            self.graph.ops[op].kind == "copy_.default"
            or self.batch.specials[op] == "local_statistics"
            for op in self.ops
            if buffer in self._storages(op)
        )

    def _pass_of_readers(self, op: int, value: int, whole: int) -> int:
        """Slices of a sum, and keys and values, are gathered by each pass: nobody keeps them."""
        scattered = {
            int(self.plan.tensor_axis[made])
            for maker, rule in self.op_rules.items()
            if rule.scatter is not None and rule.outputs[0].kind == "P"
            for made in self.graph.outputs[maker]
        }
        _, along = self.kinds(value)
        is_attention = self.graph.ops[op].kind in ("attention", "attention_backward")
        is_slices = along == "S" and (is_attention or self.value_axis(value) in scattered)
        if whole != IN_TEAM or not is_slices or self.is_backward(self.maker[value]):
            return ANY_PASS
        return BACKWARD_PASS if self.is_backward(op) else FORWARD_PASS

    # Values.

    def bytes_of(self, value: int, part: Part) -> float:
        """Bytes of a part of a value; samples and units count where it is split by them."""
        size = float(self.graph.tensor_bytes[value])
        over, along = self.kinds(value)
        if over == "S":
            size *= part.samples / self.graph.batch_size
        if along == "S":
            size *= part.units / self.plan.axes[int(self.plan.tensor_axis[value])]
        return size

    def all_units(self, value: int) -> range:
        """Units of the axis of the op that makes a value; none without a rule."""
        axis = self.value_axis(value)
        return range(0 if axis == BATCH else self.plan.axes[axis])

    def moved_fraction(self, value: int) -> float:
        """Part of a value that other blocks look at; all of it if none does."""
        own = self.block_of(self.maker[value])
        seen = {
            tensor
            for op in self.ops
            for tensor, storage in zip(self.graph.ops[op].inputs, self._storages(op), strict=True)
            if storage == value and self.block_of(op) != own and own != CONSTANT_GROUP
        }
        num_bytes = sum(int(self.graph.tensor_bytes[tensor]) for tensor in seen)
        size = int(self.graph.tensor_bytes[value])
        return min(num_bytes / size, 1.0) if num_bytes and size else 1.0

    def is_early(self, value: int) -> bool:
        """Whether a value, the number of labels that count, is known from the batch alone."""
        maker = self.maker[value]
        return (
            self.graph.ops[maker].kind in LABEL_COUNTING_LOSSES
            and value == self.graph.outputs[maker][1]
        )

    def _batch_reads(self) -> list[tuple[int, int]]:
        """Ops that read the batch, and at which position."""
        batch = set(self.graph.batch)
        return [
            (op, position)
            for op in self.ops
            for position, storage in enumerate(self._storages(op))
            if storage in batch
        ]

    def reads_every_sample(self) -> bool:
        """Whether some op needs samples of the batch that its device and team have no share of."""
        return any(self.whole_needed(*read) == EVERY_SAMPLE for read in self._batch_reads())

    def groups_reading_in_teams(self) -> set[int]:
        """Groups with an op that reads all samples of its team of the batch."""
        return {self.group[op] for op, _ in self._batch_reads() if self.axis(op) != BATCH}

    # Parameters, by their number among the updates.

    def parameter_bytes(self, parameter: int) -> float:
        """Bytes of a whole parameter."""
        return float(self.graph.tensor_bytes[self.graph.updates[parameter][1]])

    def gradient_bytes(self, parameter: int) -> float:
        """Bytes of a whole parameter's gradient."""
        return float(self.graph.tensor_bytes[self.graph.updates[parameter][2]])

    def dtypes(self, parameter: int) -> int:
        """Number of a parameter's and its gradient's dtypes, in the order in which they occur."""
        tensors = self.graph.tensors
        pairs = [(tensors[p].dtype, tensors[g].dtype) for _, p, g in self.graph.updates]
        return list(dict.fromkeys(pairs)).index(pairs[parameter])

    def parameter_group(self, parameter: int) -> int:
        """Group that decides about a parameter."""
        return self.group[self.graph.updates[parameter][0]]

    def gradient(self, parameter: int) -> int:
        """The value that holds a parameter's gradient."""
        return int(self.graph.storage[self.graph.updates[parameter][2]])

    def sharded_axis(self, parameter: int) -> int | None:
        """The axis along which a parameter lives in slices by the rules of its ops."""
        tensor = self.graph.updates[parameter][1]
        return int(self.plan.tensor_axis[tensor]) if tensor in self.plan.sharded else None

    def gradient_need(self, parameter: int) -> Need | None:
        """The whole of a gradient that is made in slices, of a parameter that is whole."""
        value = self.gradient(parameter)
        over, along = self.kinds(value)
        if "S" not in (over, along) or self.sharded_axis(parameter) is not None:
            return None
        maker = self.maker[value]
        whole = EVERY_SAMPLE if over == "S" else IN_TEAM
        return Need(value, self.group[maker], whole, self.axis(maker))

    def readers(self, parameter: int) -> list[int]:
        """Ops that read a parameter."""
        return [op for op in self.ops if parameter in self.parameters_read[op]]

    def finisher(self, parameter: int) -> int:
        """After this op the gradient is made and the parameter is read for the last time."""
        return max([self.maker[self.gradient(parameter)], *self.readers(parameter)])

    @cached_property
    def finished(self) -> dict[int, list[int]]:
        """Parameters that each op finishes."""
        found: dict[int, list[int]] = {op: [] for op in self.ops}
        for parameter in range(len(self.graph.updates)):
            found[self.finisher(parameter)].append(parameter)
        return found

    @cached_property
    def weights_ops(self) -> set[int]:
        """Backward ops whose results lead to gradients of their own group alone."""
        gradients = {self.gradient(parameter) for parameter in self.parameter.values()}
        readers: dict[int, list[int]] = {value: [] for value in self.maker}
        for op in self.ops:
            for value, _ in self.reads[op]:
                readers[value].append(op)
        found: set[int] = set()
        for op in reversed(self.ops):
            made = self.graph.outputs[op]
            leads_on = any(
                reader not in found or self.group[reader] != self.group[op]
                for value in made
                for reader in readers[value]
            )
            is_used = any(value in gradients or self.graph.consumers[value] for value in made)
            if self.is_backward(op) and is_used and not leads_on:
                found.add(op)
        return found

    @cached_property
    def again(self) -> dict[Keeps, dict[int, list[int]]]:
        """What each block runs again if it recomputes, by the op before which that happens."""
        kept = kept_products(self.graph, [self.block_of(op) for op in range(self.graph.num_ops)])
        return {
            Keeps.NOTHING: self._made_again(frozenset()),
            Keeps.PRODUCTS: self._made_again(kept),
            Keeps.ALL_BUT_SCORES: dict(map(self._scores_again, attention_scores(self.graph))),
        }

    def _made_again(self, kept: frozenset[int]) -> dict[int, list[int]]:
        row = {op: number for number, op in enumerate(self.ops)}
        makers = [row[self.maker[self.gradient(p)]] for p in self.parameter.values()]
        found = recomputations(
            [self.block_of(op) for op in self.ops],
            [self.is_backward(op) for op in self.ops],
            [[row[maker] for maker in self._own_makers(op)] for op in self.ops],
            makers,
            self.num_groups,
            [row[op] for op in kept],
        )
        return {
            self.ops[each.reader]: [self.ops[number] for number in each.ops]
            for each in found
            if each.ops
        }

    def _own_makers(self, op: int) -> list[int]:
        """Makers of what an op reads as it was made; what was added up in a team is kept."""
        return [
            self.maker[value]
            for value, need in self.reads[op]
            if need is None and not self.is_cut_anew(value)
        ]

    def _scores_again(self, scores: tuple[int, ...]) -> tuple[int, list[int]]:
        """The first backward op that reads any of an attention's scores, and what it needs."""
        readers: dict[int, list[int]] = {}
        for op in self.ops:
            for maker in self._own_makers(op):
                if maker in scores and self.block_of(maker) == self.block_of(op):
                    readers.setdefault(maker, []).append(op)
        again: list[int] = []
        for op in sorted(scores, reverse=True):
            if any(self.is_backward(by) or by in again for by in readers.get(op, [])):
                again.insert(0, op)
        late = [by for op in again for by in readers[op] if self.is_backward(by)]
        return min(late, default=-1), again


# --- who has which samples and units ------------------------------------------------------------

Team = tuple[int, ...]
"""Devices in the order in which they take samples and units."""


class Layout(NamedTuple):
    """Devices in teams, their shares and weights. What differs here lies differently."""

    devices: tuple[int, ...]
    shares: tuple[int, ...]
    teams: tuple[Team, ...]
    parts: tuple[int, ...]

    def of_team(self, team: Team, numbers: Sequence[int]) -> list[int]:
        """The numbers of a team's members among those of all devices."""
        return [numbers[self.devices.index(device)] for device in team]

    @property
    def has_equal_teams(self) -> bool:
        """Whether all teams have as many members."""
        return len(set(map(len, self.teams))) == 1

    def team_of(self, device: int) -> Team:
        """The team that a device belongs to."""
        return next(team for team in self.teams if device in team)


def layout_of(decision: Decision) -> Layout:
    """How a decision's work is shared out."""
    return Layout(
        decision.devices,
        decision.shares,
        decision.teams or (decision.devices,),
        decision.parts or decision.shares,
    )


def micro_sizes(
    layouts: Sequence[Layout], table: tuple[tuple[int, ...], ...], batch_size: int
) -> list[int]:
    """Samples of each micro-batch: those of the first group that the table is made for.

    A table may name the samples of replicas that are unlike, each with the devices of its own.
    """
    for layout in layouts:
        rows = [table[device] for device in layout.devices]
        if list(map(sum, rows)) == counts_of(layout, batch_size):
            return list(map(sum, zip(*rows, strict=True)))
    return list(map(sum, zip(*table, strict=True)))


def counts_of(layout: Layout, batch_size: int) -> list[int]:
    """Samples of each device, also of another batch than the one that was planned for."""
    if sum(layout.shares) == batch_size:
        return list(layout.shares)
    return list(split_in_proportion(batch_size, layout.shares))


def in_micro_batches(
    layout: Layout, counts: list[int], table: tuple[tuple[int, ...], ...], sizes: Sequence[int]
) -> list[list[int]]:
    """Samples of each device in each micro-batch.

    The table's, where they add up to the device's samples; else each micro-batch is cut in
    proportion to what is left: among the teams, then inside each.
    """
    if not table:
        return [counts]
    own = [table[device] for device in layout.devices]
    if list(map(sum, own)) == counts:
        return [list(row) for row in zip(*own, strict=True)]
    rows, left = [], dict(zip(layout.devices, counts, strict=True))
    for size in sizes:
        rests = [sum(left[device] for device in team) for team in layout.teams]
        taken: dict[int, int] = {}
        for team, count in zip(layout.teams, cut(size, rests), strict=True):
            of_members = cut(count, [left[device] for device in team])
            taken |= zip(team, of_members, strict=True)
        left = {device: rest - taken[device] for device, rest in left.items()}
        rows.append([taken[device] for device in layout.devices])
    return rows


def cut(total: int, left: Sequence[int]) -> list[int]:
    """A number in proportion to what is left; what exceeds a rest goes to the first with some."""
    if not total:
        return [0] * len(left)
    wanted = split_in_proportion(total, tuple(map(float, left)))
    counts = [min(count, rest) for count, rest in zip(wanted, left, strict=True)]
    for position, rest in enumerate(left):
        counts[position] += min(total - sum(counts), rest - counts[position])
    return counts


def ranges(devices: Iterable[int], counts: Iterable[int]) -> dict[int, range]:
    """Consecutive ranges in the order of the devices, without empty ones."""
    found, begin = {}, 0
    for device, count in zip(devices, counts, strict=True):
        if count:
            found[device] = range(begin, begin + count)
        begin += count
    return found


class Box(NamedTuple):
    """Samples of a micro-batch and units of an axis that a device has."""

    samples: range
    units: range

    @property
    def part(self) -> Part:
        """How many."""
        return Part(len(self.samples), len(self.units))

    def common(self, other: "Box") -> "Box":
        """What is in both."""
        return Box(_overlap(self.samples, other.samples), _overlap(self.units, other.units))


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


class Ring(NamedTuple):
    """Devices that add up their gradients, of all of a parameter or of an interval of it."""

    devices: tuple[int, ...]
    part: float = 1.0


class Shares:
    """What each device does, by the decisions of a strategy."""

    def __init__(self, reading: Reading, strategy: Strategy, num_devices: int) -> None:
        self.reading = reading
        self.strategy = strategy
        self.num_devices = num_devices
        batch, table = reading.graph.batch_size, strategy.micro_batches
        self.layouts = [layout_of(decision) for decision in strategy.decisions]
        sizes = micro_sizes(self.layouts, table, batch) if table else [batch]
        self._samples = {
            layout: in_micro_batches(layout, counts_of(layout, batch), table, sizes)
            for layout in self.layouts
        }

    def samples(self, layout: Layout, micro: int) -> dict[int, range]:
        """Samples of a micro-batch on each device that has some.

        They are numbered: teams own consecutive ranges, and in them their members.
        """
        counts = dict(zip(layout.devices, self._samples[layout][micro], strict=True))
        order = [device for team in layout.teams for device in team]
        return ranges(order, [counts[device] for device in order])

    def team_samples(self, layout: Layout, micro: int) -> dict[Team, range]:
        """Samples of a micro-batch of each team that has some."""
        own = self.samples(layout, micro)
        found = {}
        for team in layout.teams:
            if members := [own[device] for device in team if device in own]:
                found[team] = range(members[0].start, members[-1].stop)
        return found

    def units(self, layout: Layout, axis: int) -> dict[int, range]:
        """Units of an axis on each device that has some: each team has all of them."""
        units = self.reading.plan.axes[axis]
        found: dict[int, range] = {}
        for team in layout.teams:
            weights = layout.of_team(team, layout.parts)
            if units == EVERYWHERE:
                found |= {d: range(1) for d, weight in zip(team, weights, strict=True) if weight}
            elif any(weights):
                found |= ranges(team, split_in_proportion(units, tuple(weights)))
        return found

    def boxes(self, layout: Layout, axis: int, micro: int) -> dict[int, Box]:
        """What each device does of an op: where it does anything.

        Without a rule its own samples; else all samples of its team and its own units.
        """
        if axis == BATCH:
            own = self.samples(layout, micro)
            return {device: Box(samples, range(0)) for device, samples in own.items()}
        teams = self.team_samples(layout, micro)
        return {
            device: Box(teams[layout.team_of(device)], units)
            for device, units in sorted(self.units(layout, axis).items())
            if layout.team_of(device) in teams
        }

    def busy(self, micro: int) -> set[int]:
        """Devices that compute anything in a micro-batch."""
        axes = range(len(self.reading.plan.axes))
        return {
            device
            for layout in self._samples
            for axis in axes
            for device in self.boxes(layout, axis, micro)
        }

    def of_op(self, op: int, micro: int) -> dict[int, Part]:
        """How many samples and units of an op each device computes, where it computes any."""
        group = self.reading.group[op]
        if group == CONSTANT_GROUP:
            return dict.fromkeys(sorted(self.busy(micro)), Part(1))
        boxes = self.boxes(self.layouts[group], self.reading.axis(op), micro)
        return {device: box.part for device, box in sorted(boxes.items())}

    def most_samples(self, device: int) -> int:
        """Samples of the whole batch that a device needs at most in any group."""
        most = 0
        in_teams = self.reading.groups_reading_in_teams()
        for group, layout in enumerate(self.layouts):
            if device in layout.devices:
                members = layout.team_of(device) if group in in_teams else (device,)
                rows = self._samples[layout]
                most = max(most, sum(sum(layout.of_team(members, row)) for row in rows))
        return most

    # Parameters.

    def parameter_layout(self, parameter: int) -> Layout:
        """How the work of a parameter's group is shared out."""
        return self.layouts[self.reading.parameter_group(parameter)]

    def part_held(self, parameter: int, device: int) -> float:
        """Part of a parameter that lies on a device of its group, before ZeRO slices it."""
        axis = self.reading.sharded_axis(parameter)
        if axis is None:
            return float(device in self.parameter_layout(parameter).devices)
        units = self.units(self.parameter_layout(parameter), axis).get(device, range(0))
        return len(units) / self.reading.plan.axes[axis]

    def held_alike(self, parameter: int) -> str:
        """Who makes the same of a parameter's gradient: each "device" another part of a sum, each
        "team" or the devices "everywhere"; "in team" if all teams make the same in parts."""
        over, along = self.reading.kinds(self.reading.gradient(parameter))
        if over == "P" and along in ("", "P"):
            return "device"
        if over == "P":
            return "team" if len(self.parameter_layout(parameter).teams) > 1 else "everywhere"
        return "in team" if along == "P" else "everywhere"

    def rings(self, parameter: int) -> tuple[Ring, ...]:
        """Who adds up gradients of a parameter: of slice groups each for itself, at first."""
        return tuple(
            part for ring in self.whole_rings(parameter) for part in self.copies(parameter, ring)
        )

    def copies(self, parameter: int, ring: Ring) -> list[Ring]:
        """The devices of a ring in each slice group."""
        groups = self.strategy.decisions[self.reading.parameter_group(parameter)].slice_groups
        inside = [tuple(sorted(set(ring.devices) & set(group))) for group in groups]
        return [Ring(devices, ring.part) for devices in inside if devices] or [ring]

    def whole_rings(self, parameter: int) -> tuple[Ring, ...]:
        """Who adds up gradients of a parameter, and of how much of it, unless a server does."""
        if self.strategy.homes[parameter] != REPLICATED:
            return ()
        layout = self.parameter_layout(parameter)
        axis = self.reading.sharded_axis(parameter)
        alike = self.held_alike(parameter)
        found: list[Ring] = []
        if alike == "device":
            found = [Ring(layout.devices)]
        elif alike == "in team":
            found = [Ring(tuple(sorted(team))) for team in layout.teams]
        elif alike == "team" and axis is not None:
            found = self._intervals(layout, axis)
        elif alike == "team" and layout.has_equal_teams:
            found = [Ring(tuple(sorted(each))) for each in zip(*layout.teams, strict=True)]
        elif alike == "team":
            found = [Ring(layout.devices)]
        return tuple(ring for ring in found if len(ring.devices) > 1)

    def _intervals(self, layout: Layout, axis: int) -> list[Ring]:
        """An axis cut wherever a team cuts it: of each team the member that has the interval."""
        units = self.units(layout, axis)
        total = self.reading.plan.axes[axis]
        cuts = sorted({0, total, *(own.start for own in units.values())})
        return [
            Ring(
                tuple(sorted(device for device, own in units.items() if low in own)),
                (high - low) / total,
            )
            for low, high in pairwise(cuts)
        ]

    def contributors(self, parameter: int, made: Iterable[int]) -> list[int]:
        """Devices whose gradients are added up, of those that made some."""
        layout, made = self.parameter_layout(parameter), set(made)
        alike, has_rings = self.held_alike(parameter), bool(self.rings(parameter))
        is_sharded = self.reading.sharded_axis(parameter) is not None
        if alike == "team" and has_rings and not layout.has_equal_teams and not is_sharded:
            return sorted(self.first_of_teams(layout, made))
        return sorted(made)

    @staticmethod
    def first_of_teams(layout: Layout, devices: Iterable[int]) -> list[int]:
        """Of each team the first one of some devices."""
        found = []
        for team in layout.teams:
            found += [device for device in team if device in devices][:1]
        return found

    def is_sliced(self, parameter: int) -> bool:
        """Whether each device steps a slice of a parameter, as ZeRO has it."""
        decision = self.strategy.decisions[self.reading.parameter_group(parameter)]
        is_zero = decision.sync in (Sync.ZERO1, Sync.ZERO2, Sync.ZERO3)
        return is_zero and bool(self.rings(parameter))

    def slices(self, parameter: int, ring: Ring) -> dict[int, float]:
        """Part of what a ring adds up that each of its devices steps, where it steps any."""
        decision = self.strategy.decisions[self.reading.parameter_group(parameter)]
        weights = slice_weights(decision, ring.devices)
        parts = zip(ring.devices, weights, strict=True)
        return {device: weight / sum(weights) for device, weight in parts if weight}


def slice_weights(decision: Decision, devices: Sequence[int]) -> tuple[int, ...]:
    """Relative slices of some of a decision's devices; even ones where all would be 0."""
    stated = dict(zip(decision.devices, decision.slices, strict=False))
    weights = tuple(stated.get(device, 0) for device in devices)
    return weights if any(weights) else (1,) * len(devices)
