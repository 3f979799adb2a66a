"""A strategy in flat arrays, as the lowering kernel takes it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.graph.axis_plan import EVERYWHERE
from heterog.strategy.channels import ChannelTable, slice_parts
from heterog.strategy.lowering.turns import NO_SCHEDULE, Turns, encode_turns
from heterog.strategy.program import FloatArray, IntArray
from heterog.strategy.strategy import SLICED, Strategy, micro_shares, split_in_proportion
from heterog.strategy.tables import GraphTables


class Choice(NamedTuple):
    """A strategy in flat arrays.

    A *layout* is a device set with shares; groups share layouts. Layout ``l`` along axis ``a`` of
    the tables is row ``a * num_layouts + l`` of the arrays over layouts.
    """

    num_micro: int
    num_steps: int
    bucket_bytes: float
    layout: IntArray  # of each group, the last entry for constants  # [num_groups + 1]
    shares: IntArray  # [num_axes * num_layouts, num_micro, num_devices]
    member: npt.NDArray[np.bool_]  # devices that hold a layout's parameters  # [rows, num_devices]
    sync: IntArray  # of each group
    recompute: npt.NDArray[np.bool_]  # whether each group lets go what it made in the forward pass
    first_channel: IntArray  # all-reduce or reduce-scatter of each group, -1 if none
    second_channel: IntArray  # all-gather of each group, -1 if none
    reduce_channel: IntArray  # utility all-reduce of each layout
    gather_channel: IntArray  # utility all-gather of each layout
    home: IntArray  # of each parameter
    slice_part: FloatArray  # under ZeRO, that each device owns  # [num_groups, num_devices]
    rule_set: int = 0  # number of its op rules at the evaluator that encoded it
    turns: Turns = NO_SCHEDULE


def encode(
    strategy: Strategy, tables: GraphTables, channels: ChannelTable, *, num_steps: int
) -> Choice:
    """A strategy as the kernel's flat arrays."""
    num_devices = channels.cluster.num_devices
    layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    layout = np.empty(tables.num_groups + 1, np.int32)
    for group, decision in enumerate(strategy.decisions):
        key = (decision.devices, decision.shares)
        layout[group] = layouts.setdefault(key, len(layouts))
    num_layouts = len(layouts) + 1
    layout[-1] = num_layouts - 1
    num_micro = strategy.num_micro_batches
    shares = np.zeros((num_layouts, num_micro, num_devices), np.int32)
    planned = np.zeros((num_layouts, 1, num_devices), np.int32)
    member = np.zeros((num_layouts, num_devices), np.bool_)
    reduce_channel = np.full(num_layouts, -1, np.int32)
    gather_channel = np.full(num_layouts, -1, np.int32)
    for (devices, counts), number in layouts.items():
        member[number, list(devices)] = True
        samples = batch_shares(counts, tables.batch_size)
        shares[number][:, list(devices)] = micro_shares(
            samples, devices, strategy.micro_batches, num_micro
        )
        planned[number, 0, list(devices)] = counts
        if len(devices) > 1:
            reduce_channel[number] = channels.value_reduce(devices)
            gather_channel[number] = channels.all_gather(devices, ())
    # Constants are computed on every device that computes anything.
    active = shares[:-1].sum(axis=0) > 0
    if len(tables.axis_units) > 1:  # a device without samples may own units of another axis
        active |= planned[:-1].sum(axis=0) > 0
        planned[-1] = active
    shares[-1] = active
    member[-1] = active.any(axis=0)
    num_axes = len(tables.axis_units)
    if num_axes > 1:
        rows = [_axis_rows(planned, int(units)) for units in tables.axis_units[1:]]
        shares = np.concatenate([shares, *rows])
        member = np.tile(member, (num_axes, 1))
        reduce_channel = np.tile(reduce_channel, num_axes)
        gather_channel = np.tile(gather_channel, num_axes)
    pairs = [channels.for_decision(decision) for decision in strategy.decisions]
    slice_part = np.zeros((tables.num_groups, num_devices))
    for group, decision in enumerate(strategy.decisions):
        if decision.sync in SLICED:
            slice_part[group, list(decision.devices)] = slice_parts(decision)
    return Choice(
        num_micro=num_micro,
        num_steps=num_steps,
        bucket_bytes=float(strategy.bucket_bytes),
        layout=layout,
        shares=shares,
        member=member,
        sync=np.array([int(decision.sync) for decision in strategy.decisions], np.int32),
        recompute=np.array([decision.recompute for decision in strategy.decisions], np.bool_),
        first_channel=np.array([first for first, _ in pairs], np.int32),
        second_channel=np.array([second for _, second in pairs], np.int32),
        reduce_channel=reduce_channel,
        gather_channel=gather_channel,
        home=np.array(strategy.homes, np.int32),
        slice_part=slice_part,
        turns=encode_turns(
            strategy.schedule,
            tables,
            [decision.devices for decision in strategy.decisions],
            layout,
            shares,
        ),
    )


def batch_shares(shares: tuple[int, ...], batch_size: int) -> tuple[int, ...]:
    """Samples of each device of a decision, in proportion to its shares on another batch.

    >>> batch_shares((5, 2, 1), 8), batch_shares((5, 2, 1), 4)
    ((5, 2, 1), (3, 1, 0))
    """
    return shares if sum(shares) == batch_size else split_in_proportion(batch_size, shares)


def axis_shares(units: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Units of an axis for each device of a decision, in proportion to its shares.

    >>> axis_shares(16, (5, 2, 1)), axis_shares(EVERYWHERE, (5, 0, 3))
    ((10, 4, 2), (1, 0, 1))
    """
    if units == EVERYWHERE:
        return tuple(int(share > 0) for share in shares)
    return split_in_proportion(units, shares)


def _axis_rows(shares: IntArray, units: int) -> IntArray:
    """Shares of every layout along another axis than the batch."""
    assert shares.shape[1] == 1, "strategies with op rules have no micro-batches"
    return np.array([[axis_shares(units, tuple(map(int, row[0])))] for row in shares], np.int32)
