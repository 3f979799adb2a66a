"""A lower bound of a step's seconds, in microseconds and without a simulation."""

import numpy as np

from heterog.lowering import Choice
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import Domain
from heterog.pricing.price_table import PriceTable
from heterog.strategy.sync import Sharded


def floor_s(prices: PriceTable, choice: Choice) -> float:
    """Lower bound of a step's seconds, without a simulation; takes microseconds.

    The busiest device's compute; or the busiest link's share of the gradients, none of which
    is there before its members' forward passes. Constants, updates, parameter servers and
    whatever moves between groups are left out; everything is if ops run by rules, or messages
    are encoded (0).
    """
    if choice.rule_set or not all(mode.has_floor for mode in choice.modes):
        return 0.0
    prices.price_shares(choice.shares[: len(choice.member)], prices.types)
    shares = choice.shares[choice.division[:-1]]  # [num_groups, num_micro, num_devices]
    groups = np.arange(len(shares))[:, None, None]
    seconds = prices.group_seconds[:, prices.types, shares, groups].sum((1, 2))
    forward, whole = seconds  # [num_devices] each
    floor = whole.max()
    rings, everyone = choice.rings, Domain.ALL
    ring = rings.first[:, everyone]
    has_ring = ring < rings.end[:, everyone]
    reduced = np.flatnonzero(has_ring & (choice.sharded <= Sharded.STATE))
    if len(reduced):
        payload, ring = prices.reduced_bytes[reduced], ring[reduced]
        load = _load(prices, rings.first_channel[ring], payload)
        load += _load(prices, rings.second_channel[ring], payload)
        member = rings.member[ring[payload > 0.0]] > 0
        first = (member * forward).max(1).min(initial=np.inf)
        if np.isfinite(first):
            floor = max(floor, first / choice.num_steps + load.max())
    return float(floor)


def _load(prices: PriceTable, channel: IntArray, payload: FloatArray) -> FloatArray:
    """Seconds that payloads over channels occupy each link; -1 marks no channel.

    Args:
        prices: Prices of the graph on the cluster.
        channel: Channel of each payload.
        payload: Bytes of each payload.

    Returns:
        # [num_resources]
    """
    load = np.zeros(prices.num_resources)
    numbers, place = np.unique(channel, return_inverse=True)
    total = np.bincount(place, payload, len(numbers))
    for number, num_bytes in zip(numbers.tolist(), total, strict=True):
        if number >= 0:
            load += num_bytes * prices.held_by(number)
    return load
