"""Assignment of the groups of a graph to the stages of a layout.

Megatron counts *layers*: the repeated modules of a model. All stages have the same number of
layers; modules before the first layer (the embedding) are on the first stage, modules after the
last layer (the final norm, the head, the loss) on the last stage. Here layers are the children of
numbered containers (``transformer.h.0``, ``layers.3``, ``layer1.0``), in the order in which they
run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.names import first_of, shown
from heterog.strategy.division import split_evenly
from heterog.strategy.layouts.layout import Layout, LayoutError
from heterog.strategy.schedules import PipelineSchedule, caps_of_stages

NO_LAYER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The repeated layers of a model.

    Attributes:
        names: Module path of each layer, in the order in which they run.
        of_group: Layer of each group; ``NO_LAYER`` outside of layers.  # [num_groups]
    """

    names: tuple[str, ...]
    of_group: tuple[int, ...]


@lru_cache(maxsize=64)
def layers_of(graph: OpGraph) -> Layers:
    """Find the repeated layers of a model, and the groups of each.

    A group that several layers share (one weight for all of them) belongs to the first one.
    """
    grouping = group_ops(graph)
    layer_of_group: dict[int, str] = {}
    for index, op in enumerate(graph.ops):
        group = int(grouping.group[index])
        if op.phase != Phase.FORWARD or group == CONSTANT_GROUP or group in layer_of_group:
            continue
        # Ops that are grouped with a neighbour, like a residual sum after a layer, do not count.
        if (name := layer_path(op.module)) and layer_path(grouping.names[group]) == name:
            layer_of_group[group] = name
    names = tuple(dict.fromkeys(layer_of_group[group] for group in sorted(layer_of_group)))
    number = {name: position for position, name in enumerate(names)}
    of_group = [
        number[layer_of_group[group]] if group in layer_of_group else NO_LAYER
        for group in range(grouping.num_groups)
    ]
    return Layers(names=names, of_group=tuple(of_group))


def layer_blocks(graph: OpGraph) -> tuple[int, ...]:
    """First groups of the repeated layers, and every group outside of layers.

    They serve as blocks of a strategy: a layer that recomputes keeps only what other layers read.
    """
    in_layer = layers_of(graph).of_group
    return tuple(
        group
        for group, layer in enumerate(in_layer)
        if group == 0 or layer == NO_LAYER or layer != in_layer[group - 1]
    )


def layer_runs(graph: OpGraph) -> tuple[int, ...]:
    """First group of each group's run; a run is the groups of a layer, or between two layers.

    In a model without repeated layers each group is a run of its own.  # [num_groups]
    """
    layers = layers_of(graph)
    first = list(range(len(layers.of_group)))
    for group in first[1:] if layers.names else ():
        if layers.of_group[group] == layers.of_group[group - 1]:
            first[group] = first[group - 1]
    return tuple(first)


def layer_path(module: str) -> str:
    """The outermost numbered module around a path; empty if there is none.

    >>> layer_path("transformer.h.11.mlp.c_fc"), layer_path("transformer.wte")
    ('transformer.h.11', '')
    """
    parts = module.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ""


def stage_of_groups(graph: OpGraph, layout: Layout) -> tuple[int, ...]:
    """Assign every group to a stage.  # [num_groups]

    Raises:
        LayoutError: there are too few layers, they do not divide, or a module does not exist.
    """
    if layout.num_stages == 1:
        return (0,) * group_ops(graph).num_groups
    if layout.split:
        return _by_modules(graph, layout.split)
    layers = layers_of(graph)
    counts = _layers_of_stages(len(layers.names), layout)
    return stages_by_counts(layers, counts)


def stages_by_counts(layers: Layers, counts: Sequence[int]) -> tuple[int, ...]:
    """Assign every group to a stage, given the number of layers of each.  # [num_groups]

    Groups outside of layers go with the layer before them, or to the first stage.
    """
    stage_of_layer = [stage for stage, count in enumerate(counts) for _ in range(count)]
    stages = []
    current = 0
    last_layer = max(
        (group for group, layer in enumerate(layers.of_group) if layer != NO_LAYER), default=-1
    )
    for group, layer in enumerate(layers.of_group):
        if layer != NO_LAYER:
            current = stage_of_layer[layer]
        elif group > last_layer:
            current = len(counts) - 1
        stages.append(current)
    return tuple(stages)


def _layers_of_stages(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Number of layers of each stage."""
    stages = layout.num_stages
    if layout.layers:
        if sum(layout.layers) != num_layers:
            raise LayoutError(
                f"layers {'-'.join(map(str, layout.layers))} add up to {sum(layout.layers)}, but "
                f"the model has {num_layers} repeated layers."
            )
        return layout.layers
    if num_layers < stages:
        raise LayoutError(
            f"{stages} stages need as many repeated layers, but the model has {num_layers}; take "
            "a smaller pp (or fewer chunks), or name the module at which each stage begins: "
            "split=a.b+a.c."
        )
    if num_layers % stages:
        uneven = "-".join(map(str, split_evenly(num_layers, stages)))
        raise LayoutError(
            f"{num_layers} repeated layers do not divide into {stages} stages; take another pp, "
            f"or say how many each stage has: layers={uneven}."
        )
    return (num_layers // stages,) * stages


def _by_modules(graph: OpGraph, split: Sequence[str]) -> tuple[int, ...]:
    """Assign groups to stages that begin at named modules."""
    names = group_ops(graph).names
    starts = []
    for module in split:
        inside = [
            group
            for group, name in enumerate(names)
            if name == module or name.startswith(f"{module}.")
        ]
        if not inside:
            raise LayoutError(
                f"split names the module {shown(module)}, at which no group of ops begins; "
                f"groups are {first_of([name or '(root)' for name in names], most=6)}."
            )
        starts.append(inside[0])
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise LayoutError(
            f"the modules of split ({'+'.join(split)}) must be in the order in which they run, "
            "each once, and none the very first one."
        )
    return tuple(sum(start <= group for start in starts) for group in range(len(names)))


def shared_across_stages(graph: OpGraph, stages: Sequence[int]) -> tuple[str, ...]:
    """Names of groups that read from a later stage, because two stages share a weight.

    An embedding that is also the head is one group of ops, on the first stage.

    Args:
        graph: One training step.
        stages: Stage of each group.  # [num_groups]
    """
    names = group_ops(graph).names
    found = dict.fromkeys(
        names[group] or "(root)"
        for group, maker in _forward_reads(graph)
        if stages[maker] > stages[group]
    )
    return tuple(found)


def stage_of_group(cuts: Sequence[int], num_groups: int) -> list[int]:
    """Stage of each group.  # [num_groups]

    Args:
        cuts: First group of each stage but the first, ascending.
        num_groups: Number of groups.

    >>> stage_of_group([1, 3], 4)
    [0, 1, 1, 2]
    """
    stages: list[int] = np.searchsorted(cuts, np.arange(num_groups), side="right").tolist()
    return stages


def num_returns(graph: OpGraph, stages: Sequence[int]) -> int:
    """Stages through which values go again after the last one, if an earlier one shares a weight.

    The head then runs on the first stage: a micro-batch goes from the last stage to the first and
    back before its backward pass begins. With the caps of 1F1B alone, whose last stage has one
    micro-batch in flight, micro-batches would go around one after another.

    Args:
        graph: One training step.
        stages: Stage of each group.  # [num_groups]
    """
    return 2 if shared_across_stages(graph, stages) else 0


class Caps(IntEnum):
    """Caps on the micro-batches in flight of a pipeline; see ``caps_of_stages``."""

    NONE = 0
    ONE_F_ONE_B = 1
    HIDING = 2
    """About twice as many, so that messages as long as a stage's work are hidden."""


def capped(
    graph: OpGraph,
    devices: Sequence[tuple[int, ...]],
    stages: Sequence[int],
    caps: Caps,
    num_devices: int,
    *,
    splits_backward: bool = False,
) -> PipelineSchedule:
    """Make the schedule of a pipeline with some caps.

    Args:
        graph: One training step.
        devices: Devices of each stage; with caps each device is in one of them.
        stages: Stage of each group.  # [num_groups]
        caps: The caps.
        num_devices: Number of devices of the cluster.
        splits_backward: See ``PipelineSchedule``.
    """
    in_flight: tuple[tuple[int, ...], ...] = ()
    if caps:
        returns, hidden = num_returns(graph, stages), caps - Caps.ONE_F_ONE_B
        in_flight = caps_of_stages(devices, num_devices, hidden=hidden, returns=returns).in_flight
    return PipelineSchedule(in_flight=in_flight, splits_backward=splits_backward)


@lru_cache(maxsize=16)
def _forward_reads(graph: OpGraph) -> tuple[tuple[int, int], ...]:
    """Pairs of groups, reader and maker, between which the forward pass moves values."""
    grouping = group_ops(graph)
    found: dict[tuple[int, int], None] = {}
    for index, op in enumerate(graph.ops):
        group = int(grouping.group[index])
        if op.phase != Phase.FORWARD or group == CONSTANT_GROUP:
            continue
        for tensor in op.inputs:
            maker = int(graph.producer[graph.storage[tensor]])
            if maker >= 0 and int(grouping.group[maker]) not in (CONSTANT_GROUP, group):
                found.setdefault((group, int(grouping.group[maker])))
    return tuple(found)
