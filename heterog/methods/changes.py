"""Changes of a strategy's decisions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.lowering.program import FloatArray
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import REPLICATED, Decision, Strategy

_T = TypeVar("_T")


def renumbered(strategy: Strategy, place: Sequence[int], cluster: Cluster) -> Strategy:
    """The same strategy on other devices.

    Devices without teams take samples in ascending order. If renumbering changes that order, teams
    keep it: one team per device, or one team of all devices if rules split ops among them.

    Args:
        strategy: Strategy to renumber, whose modes name no devices.
        place: New number of each old device; -1 if there is none, for devices that do nothing.
        cluster: The cluster with the new numbers.
    """

    def row(devices: Iterable[int]) -> tuple[int, ...]:
        return tuple(place[device] for device in devices)

    def moved(decision: Decision) -> Decision:
        devices, teams = row(decision.devices), tuple(map(row, decision.teams))
        turns = sorted(range(len(devices)), key=devices.__getitem__)
        if not teams and list(devices) != sorted(devices):
            teams = (devices,) if strategy.op_rules else tuple((each,) for each in devices)
        own = (decision.shares, decision.slices, decision.parts)
        shares, slices, parts = (tuple(each[turn] for turn in turns if each) for each in own)
        return replace(
            decision,
            devices=tuple(sorted(devices)),
            shares=shares,
            slices=slices,
            slice_groups=tuple(map(row, decision.slice_groups)),
            parts=parts,
            teams=teams,
        )

    def scattered(rows: Sequence[tuple[_T, ...]]) -> tuple[tuple[_T, ...], ...]:
        found: list[tuple[_T, ...]] = [()] * cluster.num_devices
        for device, own in enumerate(rows):
            if place[device] >= 0:
                found[place[device]] = own
        return tuple(found) if rows else ()

    made = {decision: moved(decision) for decision in dict.fromkeys(strategy.decisions)}
    # The table of micro-batches may hold all sizes in the row of one device. Rows of removed
    # devices move to the first row, so that the sizes stay.
    micro = np.zeros((cluster.num_devices, strategy.num_micro_batches), np.int64)
    for device, own in enumerate(strategy.micro_batches):
        micro[max(place[device], 0)] += np.array(own)
    schedule = strategy.schedule
    return replace(
        strategy,
        cluster=cluster.fingerprint,
        decisions=tuple(made[decision] for decision in strategy.decisions),
        homes=tuple(home if home == REPLICATED else place[home] for home in strategy.homes),
        micro_batches=tuple(map(tuple, micro.tolist())) if strategy.micro_batches else (),
        schedule=replace(
            schedule, in_flight=scattered(schedule.in_flight), turns=scattered(schedule.turns)
        ),
    )


def with_decisions(strategy: Strategy, changes: Mapping[int, Decision]) -> Strategy:
    """A strategy with other decisions for some groups."""
    decisions = list(strategy.decisions)
    for group, decision in changes.items():
        decisions[group] = decision
    changed = strategy.with_decisions(tuple(decisions))
    if any(
        decision.devices != strategy.decisions[group].devices
        for group, decision in changes.items()
    ):
        devices = [decision.devices for decision in decisions]
        return replace(changed, schedule=strategy.schedule.fitted(devices))
    return changed


def moved_samples(
    decision: Decision, over: FloatArray, rate: FloatArray, takers: Mapping[int, float]
) -> Decision:
    """A decision whose samples have moved from devices that overflow to devices with room.

    Args:
        decision: Decision of a group.
        over: Missing bytes of each device, negative where there is room.
        rate: Bytes of a sample on each device.
        takers: Number of samples that each device with room can take.
    """
    takers = {device: takers[device] for device in decision.devices if takers.get(device, 0) >= 1}
    shares = dict(zip(decision.devices, decision.shares, strict=True))
    room = int(sum(takers.values()))
    for device, share in shares.items():
        amount = min(int(np.ceil(max(over[device], 0.0) / rate[device])), share, room)
        if amount > 0:
            shares[device] -= amount
            room -= amount
            parts = split_in_proportion(amount, tuple(takers.values()))
            for taker, part in zip(takers, parts, strict=True):
                shares[taker] += part
    return replace(decision, shares=tuple(shares.values()))


def without_devices(decision: Decision, leaving: set[int], roomiest: int) -> Decision:
    """A decision without some devices, whose samples go to the others in proportion."""
    kept = [index for index, device in enumerate(decision.devices) if device not in leaving]
    batch = sum(decision.shares)
    if not kept:
        return Decision(
            devices=(roomiest,),
            shares=(batch,),
            recompute=decision.recompute,
            keeps=decision.keeps,
        )
    weights = tuple(float(decision.shares[index]) for index in kept)
    slices = tuple(decision.slices[index] for index in kept) if decision.slices else ()
    teams = [tuple(device for device in team if device not in leaving) for team in decision.teams]
    return replace(
        decision,
        devices=tuple(decision.devices[index] for index in kept),
        shares=split_in_proportion(batch, weights if sum(weights) else (1.0,) * len(kept)),
        slices=slices if sum(slices) else (),
        slice_groups=(),
        teams=tuple(filter(None, teams)),
        parts=tuple(decision.parts[index] for index in kept) if decision.parts else (),
    )
