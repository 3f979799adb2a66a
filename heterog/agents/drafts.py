"""Drafts: whole plans in a few words, one stage after another.

For each stage, a draft gives its devices, its groups, and how the devices share these: the
synchronisation (also ZeRO), the rule for shares, the size of teams. For the whole step it gives
micro-batches, order, caps, split backward passes, recomputation, buckets, and kinds of layers that
are sharded. Stages on disjoint devices are a pipeline. If some devices have several stages, these
are segments of one pass over the model. A single stage is data parallelism. ``drafter`` draws
drafts.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from heterog.lowering.program import FloatArray
from heterog.simulator.engine import Order
from heterog.strategy.layouts.stages import Caps
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Keeps, Sync

_HALVINGS = 24  # bisections of the limit on a stage's seconds
Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Devices that share a run of groups.

    Attributes:
        devices: Indices of the devices, ascending.
        sync: Synchronisation of gradients; unused on a single device.
        team: Most devices of a team; teams lie inside hosts.
        is_even: Whether all devices have equal shares; otherwise in proportion to speed.
    """

    devices: Devices
    sync: Sync = Sync.REDUCE_SCATTER_ALL_GATHER
    team: int = 1
    is_even: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers of a kind that are sharded.

    Attributes:
        way: Number of the way to shard them, of ``GroupRules.layers``.
        devices: Devices that share them; empty for those of their stages.
    """

    way: int
    devices: Devices = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A whole plan in a few words.

    Attributes:
        stages: Stages in the order of the model.
        starts: First group of each stage.
        num_micro: Number of micro-batches.
        order: Order of waiting tasks.
        keeps: What recomputing groups keep; ``None`` if no group recomputes.
        caps: Caps on micro-batches in flight.
        splits_backward: Whether weight gradients wait until a device has nothing else to do.
        bucket_bytes: Bytes of a bucket of gradients.
        shards: Layers that are sharded, if there are no teams.
    """

    stages: tuple[Stage, ...]
    starts: tuple[int, ...]
    num_micro: int = 1
    order: Order = Order.RANK
    keeps: Keeps | None = None
    caps: Caps = Caps.NONE
    splits_backward: bool = False
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    shards: tuple[Shard, ...] = ()

    @property
    def shape(self) -> tuple[tuple[Devices, int], ...]:
        """Devices and teams of its stages; drafts of one shape differ in settings only."""
        return tuple((stage.devices, stage.team) for stage in self.stages)

    @property
    def has_teams(self) -> bool:
        """Whether teams share layers."""
        return any(stage.team > 1 for stage in self.stages)

    @property
    def is_disjoint(self) -> bool:
        """Whether no device has two stages."""
        used = [device for stage in self.stages for device in stage.devices]
        return len(used) == len(set(used))


def canonical(draft: Draft) -> Draft:
    """The draft without words that have no effect."""
    stages = tuple(
        Stage(stage.devices) if len(stage.devices) == 1 else stage for stage in draft.stages
    )
    made = replace(draft, stages=stages, caps=draft.caps if draft.num_micro > 1 else Caps.NONE)
    if not any(len(stage.devices) > 1 for stage in stages):  # there are no gradients to sum
        made = replace(made, bucket_bytes=DEFAULT_BUCKET_BYTES)
        if len(stages) == 1 and made.num_micro == 1:
            made = replace(made, order=Order.RANK)
    return replace(made, shards=() if made.has_teams else tuple(dict.fromkeys(made.shards)))


def before(values: npt.NDArray[np.number]) -> FloatArray:
    """Sum of the values before each value, then of all values.  # [n + 1]"""
    return np.concatenate([[0.0], np.cumsum(values)]).astype(np.float64)


def balanced_starts(seconds: FloatArray) -> tuple[int, ...]:
    """First group of each stage so that the slowest is about as fast as possible.

    By bisection on the seconds T of the slowest: each stage in turn takes groups up to T.

    Args:
        seconds: Seconds of all groups before each, by stage.  # [num_stages, num_groups + 1]

    >>> balanced_starts(np.array([[0.0, 1, 2, 3, 4], [0.0, 3, 6, 9, 12]]))
    (0, 3)
    """
    num_groups = seconds.shape[1] - 1
    low, high = 0.0, float(seconds[:, -1].max())
    places, rows = np.zeros(len(seconds) - 1, np.int64), seconds.tolist()
    for _ in range(_HALVINGS):
        limit = 0.5 * (low + high)
        at, found = 0, []
        for own in rows:
            found.append(at)
            at = bisect_right(own, own[at] + limit) - 1
        if at >= num_groups:
            high, places = limit, np.array(found[1:])
        else:
            low = limit
    return spread_starts(places, num_groups)


def spread_starts(places: npt.NDArray[np.integer], num_groups: int) -> tuple[int, ...]:
    """Starts of stages near some places, so that every stage has a group.

    >>> spread_starts(np.array([0, 0, 4]), 4)
    (0, 1, 2, 3)
    """
    lowest = np.arange(1, len(places) + 1)
    starts = np.maximum.accumulate(np.maximum(places, lowest) - lowest) + lowest
    starts = np.minimum(starts, num_groups - lowest[::-1])
    return (0, *starts.tolist())
