"""Evaluations that lower devices that do the same only once; see ``lowering.folding``.

Twins that share no link do the same at the same time, so step time and memory equal those of all
devices together. Messages that meet on a link (the NIC of a host, say) are served one after the
other, which sets twins apart from then on: these are not folded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster, Sends
from heterog.lowering import Choice, lower_to_tape, make_scratch
from heterog.lowering.channels import Channel, ChannelTable
from heterog.lowering.folding import Fold, channels_named, fold_choice, folds
from heterog.lowering.program import IntArray
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import APART, Scratch, Tape, make_tape, mark_channels
from heterog.pricing.cost_model import ChannelPrices, ChannelSeconds
from heterog.pricing.price_table import ChannelPricer

_MOST_PRICES = 256  # folds whose channels stay priced
_MOST_SCRATCHES = 8
_MOST_FAILS = 256


class Folded(NamedTuple):
    """A choice that was lowered on the columns of a fold."""

    choice: Choice
    fold: Fold
    tape: Tape
    types: IntArray  # of each column's device  # [num_columns]
    channels: ChannelPrices  # in the numbering of the folded choice


class Folding:
    """Lowers choices with twins folded away where the result is the same.

    Args:
        cluster: The devices.
        pricer: Prices of the cluster's links.
        table: Table of the channels that choices use.
    """

    def __init__(self, cluster: Cluster, pricer: ChannelPricer, table: ChannelTable) -> None:
        self._cluster = cluster
        self._pricer = pricer
        self._table = table
        self._types = np.array(cluster.type_index, np.int32)
        self._tape: Tape | None = None
        self._scratch: dict[tuple[int, int], Scratch] = {}
        self._prices: dict[bytes, ChannelPrices | None] = {}
        # Folds that another choice with the same channels could not use: lowering them once more
        # to find the same would take longer than what is gained where this choice could.
        self._fails: set[bytes] = set()

    def lower(
        self, choice: Choice, tables: GraphTables, *, minds_position: bool = False
    ) -> Folded | None:
        """Lower a choice on as few columns as possible; ``None`` if that takes all devices.

        Args:
            choice: The strategy.
            tables: Tables of its graph and rules.
            minds_position: Whether members of a team with equally many units do different work.
        """
        if self._cluster.sends == Sends.BLOCKING:  # waiting is tracked by device, not by column
            return None
        for fold in folds(choice, self._cluster, minds_position=minds_position):
            same = _bytes_of(fold.columns, fold.column_of, *channels_named(choice))
            if same in self._fails:
                continue
            folded, numbers = fold_choice(choice, fold)
            tape = self._tape or make_tape(4096, len(tables.parameter_bytes), 1)
            tape = tape._replace(turn=np.zeros(len(fold.columns), np.int32))
            scratch = self._scratch_for(choice, tables, len(fold.columns))
            self._tape = tape = lower_to_tape(tables, folded, scratch, tape)
            channels = None if tape.counts[APART] else self._price(tape, fold, numbers)
            if channels is not None:
                return Folded(folded, fold, tape, self._types[fold.columns], channels)
            if len(self._fails) >= _MOST_FAILS:
                self._fails.clear()
            self._fails.add(same)
        return None

    def _scratch_for(self, choice: Choice, tables: GraphTables, num_columns: int) -> Scratch:
        key = choice.rule_set, num_columns
        if key not in self._scratch:
            if len(self._scratch) >= _MOST_SCRATCHES:
                self._scratch.clear()
            self._scratch[key] = make_scratch(tables, num_columns)
        return self._scratch[key]

    def _price(self, tape: Tape, fold: Fold, numbers: IntArray) -> ChannelPrices | None:
        """Prices of a fold's channels; ``None`` if twins differ or disturb each other."""
        is_used = np.zeros(len(numbers) + 1, np.bool_)
        mark_channels(tape, is_used)
        used = np.flatnonzero(is_used[:-1])
        key = _bytes_of(fold.columns, fold.column_of, numbers, used)
        if key not in self._prices:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            channels = [self._table[number] for number in numbers]
            is_apart = self._are_apart(fold, [channels[number] for number in used])
            self._prices[key] = self._new_prices(channels) if is_apart else None
        return self._prices[key]

    def _new_prices(self, channels: list[Channel]) -> ChannelPrices | None:
        prices = self._pricer.prices(channels)
        # Devices that a channel slows down are listed by device, not by column.
        is_free = not (prices.drag.any() or prices.overhead_s.any() or prices.loaded_s.any())
        return prices if is_free else None

    def _are_apart(self, fold: Fold, channels: Sequence[Channel]) -> bool:
        """Whether twins cost the same and no link is used by a column and another's twin.

        Collectives over several lanes are their own twins in each of them, as are those over
        several positions: they meet the traffic of all of these equally.
        """
        by_lane: dict[int, set[int]] = {}
        by_position: dict[int, set[int]] = {}
        for channel in channels:
            cost = self._pricer.seconds(channel)
            if not self._loads_alike(fold, channel, cost):
                return False
            for devices in fold.twins(channel.devices):
                there = self._pricer.seconds(self._table.alike(channel, devices))
                if not _is_alike(cost, there):
                    return False
                lane, position = fold.lane_of(devices), fold.position_of(devices)
                if lane is not None:
                    by_lane.setdefault(lane, set()).update(there.held)
                if position is not None:
                    by_position.setdefault(position, set()).update(there.held)
        return _is_apart(by_lane, fold.lane_twin) and _is_apart(by_position, fold.position_twin)

    def _loads_alike(self, fold: Fold, channel: Channel, cost: ChannelSeconds) -> bool:
        """Whether a channel holds the links of all its members in a column equally long."""
        of_column: dict[int, tuple[float, ...]] = {}
        for device in channel.devices:
            held = tuple(cost.held.get(link, 0.0) for link in self._cluster.links_of(device))
            if of_column.setdefault(int(fold.column_of[device]), held) != held:
                return False
        return True


def _bytes_of(*arrays: npt.NDArray[np.integer[Any]]) -> bytes:
    return b"".join(each.tobytes() for each in arrays)


def _is_apart(links: Mapping[int, set[int]], twin: IntArray) -> bool:
    """Whether folded places use no link of those that are kept."""
    used = {link for place, own in links.items() if twin[place] == place for link in own}
    return all(twin[place] == place or used.isdisjoint(own) for place, own in links.items())


def _is_alike(first: ChannelSeconds, second: ChannelSeconds) -> bool:
    mine, theirs = sorted(first.held.values()), sorted(second.held.values())
    one, other = (
        (each.latency_s, each.fill_s, each.fill_s_per_byte, each.seconds_per_byte)
        for each in (first, second)
    )
    return (one, mine) == (other, theirs)
