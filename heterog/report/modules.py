"""A strategy by module: parameters, ops, devices, shares, synchronisation.

The placement is a small table: ranges of modules by devices, in samples or units. Devices are in
columns by host, or by type if there are too many hosts. A cell tells what each device of its
column works on; ``-`` is nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from heterog.cluster.topology import Cluster
from heterog.explain.decided import IN_SLICES, MADE_WHOLE, Decided, LoweredStrategy, Range
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.lowering import lower
from heterog.search.plan import Plan
from heterog.simulator.critical_path import block_of, merge_blocks
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from heterog.strategy.sync import Sync


@dataclass(slots=True)
class ModuleNode:
    """One module with everything below it.

    Attributes:
        name: Last part of the path, or several parts if a module only contains another.
        children: Submodules in the order in which they first run.
        parameter_bytes: Bytes of parameters in the module and below it.
        num_ops: Number of ops, in and below it, that take time.
        weight: FLOPs, in and below it, by devices and shares: the weights of mixed shares.
        recomputed: Whether ops in and below it run again for the backward pass.
        syncs: Synchronisations of parameters in and below it, in words.
    """

    name: str
    children: dict[str, "ModuleNode"] = field(default_factory=dict)
    parameter_bytes: int = 0
    num_ops: int = 0
    weight: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = field(default_factory=dict)
    recomputed: set[bool] = field(default_factory=set)
    syncs: dict[str, None] = field(default_factory=dict)

    def shares(self, num_devices: int) -> list[float]:
        """Mean samples on each device, weighted by FLOPs.  # [num_devices]"""
        total = sum(self.weight.values())
        mean = [0.0] * num_devices
        for (devices, shares), weight in self.weight.items():
            for device, share in zip(devices, shares, strict=True):
                mean[device] += share * weight / total
        return mean


def module_tree(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> ModuleNode:
    """The modules of a graph as a tree, each with the decisions for its ops."""
    root = ModuleNode("(root)")
    group = group_ops(graph).group.tolist()
    for index, op in enumerate(graph.ops):
        if group[index] == CONSTANT_GROUP or graph.is_view[index]:
            continue
        decision = strategy.decisions[group[index]]
        placed = (decision.devices, decision.shares)
        for node in _path(root, op.module):
            node.num_ops += 1
            node.recomputed.add(decision.recompute)
            # Plus one, because an op without FLOPs is placed as well.
            node.weight[placed] = node.weight.get(placed, 0.0) + op.flops + 1.0
    ways = LoweredStrategy(lower(graph, cluster, strategy, num_steps=1), strategy, graph).ways
    for (op_index, tensor, _), home, way in zip(graph.updates, strategy.homes, ways, strict=True):
        words = _sync(strategy.decisions[group[op_index]], home, cluster)
        words = way if way in (IN_SLICES, MADE_WHOLE) else words
        owner = graph.tensors[tensor].name.rpartition(".")[0]  # the module that has it
        for node in _path(root, owner or graph.ops[op_index].module):
            node.parameter_bytes += int(graph.tensor_bytes[tensor])
            node.syncs[words] = None
    _join_chains(root)
    return root


def _path(root: ModuleNode, module: str) -> Iterator[ModuleNode]:
    """The nodes from the root to a module, created if missing."""
    node = root
    yield node
    for part in filter(None, module.split(".")):
        node = node.children.setdefault(part, ModuleNode(part))
        yield node


def _sync(decision: Decision, home: int, cluster: Cluster) -> str:
    if len(decision.devices) == 1:
        alone = home in (REPLICATED, decision.devices[0])
        return "none needed" if alone else f"updated on {cluster.devices[home].name}"
    if decision.sync.is_served:
        return f"parameter server on {cluster.devices[home].name}"
    return decision.sync.words


def _join_chains(node: ModuleNode) -> None:
    """Join modules that only contain one other: ``encoder`` and ``layer`` become one row."""
    for key, child in list(node.children.items()):
        while len(child.children) == 1:
            only = next(iter(child.children.values()))
            if (only.num_ops, only.parameter_bytes) != (child.num_ops, child.parameter_bytes):
                break
            only.name = f"{child.name}.{only.name}"
            child = node.children[key] = only
        _join_chains(child)


SHORT_SYNCS = {sync.words: sync.short for sync in Sync}
"""Short names of aggregations of gradients, for a column."""

_MOST_IN_FULL = 4
_WIDEST_CELL = 11
_GAP = 2
_GOOD_NAME, _LEAST_NAME = 26, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceColumn:
    """Devices that share a column.

    Attributes:
        head: Name of the host, or number and type of the devices.
        host: Name of the host; empty for the devices of several.
        kind: Number and type of the devices.
        devices: Indices of the devices.
    """

    head: str
    host: str = ""
    kind: str
    devices: Sequence[int]


def columns_by_host(cluster: Cluster) -> tuple[DeviceColumn, ...]:
    """A column per host; several if a host has several types."""
    columns = []
    for index, host in enumerate(cluster.hosts):
        by_type = _by_type(cluster, cluster.host_devices[index])
        columns += [
            DeviceColumn(
                head=host.name if len(by_type) == 1 else f"{host.name} {kind}",
                host=host.name,
                kind=f"{len(devices)} {kind}",
                devices=devices,
            )
            for kind, devices in by_type.items()
        ]
    return tuple(columns)


def columns_by_type(cluster: Cluster) -> tuple[DeviceColumn, ...]:
    """A column per type, for clusters with too many hosts."""
    return tuple(
        DeviceColumn(head=f"{len(devices)} {kind}", kind=f"{len(devices)} {kind}", devices=devices)
        for kind, devices in _by_type(cluster, range(cluster.num_devices)).items()
    )


def _by_type(cluster: Cluster, devices: Iterable[int]) -> dict[str, list[int]]:
    return grouped((cluster.devices[device].type.name, device) for device in devices)


def legend(columns: Sequence[DeviceColumn]) -> str:
    """The devices of the columns by host: ``"A: 2 V100-16GB, 1 T4; B, C: 2 T4 each"``."""
    kinds = grouped((column.host, column.kind) for column in columns)
    alike = grouped((", ".join(has), host) for host, has in kinds.items())
    return "; ".join(
        f"{_hosts(hosts)}: {has}{' each' * (len(hosts) > 1)}" for has, hosts in alike.items()
    )


def _hosts(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_IN_FULL else f"{names[0]} to {names[-1]}"


def range_name(each: Range) -> str:
    """Name of a range by the blocks of modules at its ends: ``"encoder.layer.1-5"``.

    >>> range_name(Range(first_group=0, num_groups=2, first="h.1.a", last="h.5.b", devices=(0,),
    ...                  shares=(8,)))
    'h.1-5'
    """
    first, last = block_of(each.first), block_of(each.last)
    merged = merge_blocks([first, last])
    if len(merged) == 1:
        return merged[0]
    stem = first.rstrip("0123456789")
    if stem != first and last.startswith(stem) and last.removeprefix(stem).isdigit():
        return f"{first}-{last.removeprefix(stem)}"
    return f"{first} to {_without_common(first, last)}"


def _without_common(first: str, last: str) -> str:
    """The last path without the parts that it shares with the first."""
    ahead, behind = first.split("."), last.split(".")
    same = 0
    while same < min(len(ahead), len(behind)) - 1 and ahead[same] == behind[same]:
        same += 1
    return ".".join(behind[same:])


def amounts(each: Range) -> tuple[str, ...]:
    """Work of each device of a range: samples, or units or percent if rules split ops.

    >>> amounts(Range(first_group=0, num_groups=1, first="a", last="a", devices=(0, 1),
    ...               shares=(6, 2), units=(512,), by_batch=False))
    ('384', '128')
    """
    if each.by_batch or not each.units:
        return tuple("-" if share == 0 else str(share) for share in each.shares)
    weights = tuple(float(share) for share in each.shares)
    if len(each.units) == 1:
        counts = split_in_proportion(each.units[0], weights)
        return tuple("-" if count == 0 else str(count) for count in counts)
    total = sum(weights)
    return tuple("-" if share == 0 else f"{share / total:.0%}" for share in weights)


def cell(each: Range, column: DeviceColumn) -> str:
    """Work of the devices of a column: one by one, or how many and what."""
    of_device = dict(zip(each.devices, amounts(each), strict=True))
    told = [of_device.get(device, "-") for device in column.devices]
    working = [amount for amount in told if amount != "-"]
    if not working:
        return "-"
    full = " ".join(told)
    if len(told) <= _MOST_IN_FULL and len(full) <= _WIDEST_CELL:
        return full
    distinct = sorted(set(working), key=lambda text: float(text.rstrip("%")))
    span = distinct[0] if len(distinct) == 1 else f"{distinct[0]}-{distinct[-1]}"
    return f"{len(working)}x {span}" if len(told) > 1 else span


def split_name(each: Range) -> str:
    """Axes along which a range is split: the batch, units of other axes, or both."""
    if not each.units:
        return "batch" if len(each.devices) > 1 else "-"
    units = "/".join(map(str, each.units[:2])) + "/..." * (len(each.units) > 2)
    return f"{units} units" if not each.by_batch else f"batch, {units} units"


def sync_name(each: Range) -> str:
    """Short name of the aggregation of a range's gradients."""
    return ", ".join(SHORT_SYNCS[name] for name in each.syncs) or "-"


def placement_lines(plan: Plan, decided: Decided, width: int, most: int) -> list[str]:
    """The table as lines of text: devices, headings, a line per range.

    Args:
        plan: Plan, made or loaded.
        decided: Decisions of its strategy.
        width: Most columns of a line.
        most: Most lines, at least three; the last one counts ranges that are not shown.
    """
    ranges, cluster = decided.ranges, plan.cluster
    if len(ranges) == 1 and len(ranges[0].devices) == 1:
        device = cluster.devices[ranges[0].devices[0]]
        return [_cut(f"the whole model on {device.name} ({device.type.name})", width)]
    samples = f"samples of {plan.graph.batch_size}"
    columns, named = columns_by_host(cluster), True
    shown = _longest(ranges, most - 2)
    table = _cells(shown, columns, samples)
    if _width([row[1:] for row in table]) + _GAP + _GOOD_NAME > width:
        columns, named = columns_by_type(cluster), False
        shown = _longest(ranges, most - 1)
        table = _cells(shown, columns, samples)
    parts = decided.num_micro_batches
    if parts > 1:
        table[0][0] = table[0][0].replace(samples, f"{samples} in {parts} micro-batches")
    rest = len(ranges) - len(shown)
    return [
        *([_cut(legend(columns), width)] if named else []),
        *_lines(_narrowed(table, width), width),
        *([f"and {rest} shorter range{'s' * (rest > 1)}"] if rest else []),
    ]


def _longest(ranges: Sequence[Range], most: int) -> list[Range]:
    """All ranges, or the longest ones in their order, with a line left to count the others."""
    if len(ranges) <= most:
        return list(ranges)
    longest = sorted(ranges, key=lambda each: -each.num_groups)[: max(most - 1, 1)]
    return [each for each in ranges if each in longest]


def _cells(
    ranges: Sequence[Range], columns: Sequence[DeviceColumn], heading: str
) -> list[list[str]]:
    """Headings and a row per range, as texts."""
    has_units = any(each.units for each in ranges)
    words = f"{heading}, or units" if has_units else heading
    heads = [words, *(column.head for column in columns), *(["of"] * has_units), "gradients"]
    return [
        heads,
        *(
            [
                name,
                *(cell(each, column) for column in columns),
                *([split_name(each)] * has_units),
                sync_name(each),
            ]
            for name, each in zip(range_names(ranges), ranges, strict=True)
        ),
    ]


def range_names(ranges: Sequence[Range]) -> list[str]:
    """Names of all ranges of a plan, without the module that holds all others (``bert.``)."""
    paths = [path for each in ranges for path in (each.first, each.last)]
    roots = {path.partition(".")[0] for path in paths}
    if len(roots) > 1 or not all("." in path for path in paths):
        return [range_name(each) for each in ranges]
    return [
        range_name(
            replace(each, first=each.first.partition(".")[2], last=each.last.partition(".")[2])
        )
        for each in ranges
    ]


def _width(table: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + _GAP for column in zip(*table, strict=True)) - _GAP


def _narrowed(table: list[list[str]], width: int) -> list[list[str]]:
    """The table without the last devices, and with names cut, if it is wider than asked."""
    names = [row[0] for row in table]
    others = [row[1:] for row in table]
    is_cut = False
    while len(others[0]) > 2 and _LEAST_NAME + _GAP + _width(others) > width:
        others = [[*row[:-3], "...", row[-1]] if is_cut else [*row[:-2], "...", row[-1]]
                  for row in others]  # fmt: skip
        is_cut = True
    room = max(width - _GAP - _width(others), _LEAST_NAME)
    heading = names[0] if len(names[0]) <= room else names[0][: room - 3] + "..."
    return [
        [name, *row]
        for name, row in zip(
            [heading, *(_cut(name, room) for name in names[1:])], others, strict=True
        )
    ]


def _cut(text: str, room: int) -> str:
    """A text without its middle if it is too long: modules differ at the ends."""
    if len(text) <= room:
        return text
    ahead = (room - 3) // 2
    return f"{text[:ahead]}...{text[len(text) - (room - 3 - ahead) :]}"


def _lines(table: Sequence[Sequence[str]], width: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    gap = " " * _GAP
    return [
        gap.join(text.ljust(size) for text, size in zip(row, widths, strict=True)).rstrip()[:width]
        for row in table
    ]
