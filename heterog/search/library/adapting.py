"""A solved plan's strategy for another model or cluster: the same layout, in proportion.

Hosts are matched from the fastest to the slowest, devices in their order inside hosts; where there
are more than before, neighbours share what one did. Every device keeps its load in proportion to
its speed. Groups of ops of another model are matched by how much of the step's work comes before
them. What has no meaning there is refused: rules of single ops on other ops, teams on other
numbers of devices.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from heterog.errors import HeterogError, StrategyError
from heterog.graph.grouping import group_ops
from heterog.lowering.channels import proportional_slices
from heterog.methods.data_parallel import device_speeds
from heterog.search.library.entry import EntryRecord, group_work, ops_hash
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.pipeline_schedule import PipelineSchedule
from heterog.strategy.serialize import strategy_from_dict
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

MOST_MICRO_BATCHES = 256
"""A file with more micro-batches is refused: simulating it could outlast the search."""
_FAULTS = (HeterogError, ArithmeticError, LookupError, TypeError, ValueError)
"""Faults that a made-up file can lead to; none of them may end a search."""


def adapted(entry: EntryRecord, evaluator: Evaluator, *, step_barrier: bool) -> Strategy | None:
    """The strategy of a solved case for another one; ``None`` if it cannot be carried over.

    Args:
        entry: The solved case, which may have been made up by anybody.
        evaluator: Evaluator of the new case.
        step_barrier: Whether a step ends with all updates.
    """
    try:
        known = replace(strategy_from_dict(entry.strategy), step_barrier=step_barrier)
        is_same = known.graph == evaluator.graph.fingerprint
        if not (is_same and known.cluster == evaluator.cluster.fingerprint()):
            known = _Adapting(entry, known, evaluator).strategy()
        if known.num_micro_batches > MOST_MICRO_BATCHES:
            return None
        known.check(evaluator.graph, evaluator.cluster)
        evaluator.encode(known)
    except _FAULTS:
        return None
    return known


class _Adapting:
    def __init__(self, entry: EntryRecord, known: Strategy, evaluator: Evaluator) -> None:
        self._known = known
        self._evaluator = evaluator
        self._graph, self._cluster = evaluator.graph, evaluator.cluster
        self._has_same_ops = entry.ops == ops_hash(self._graph)
        self._old_speeds = [device.samples_per_s for device in entry.devices]
        self._speeds = device_speeds(evaluator)
        self._images = _images(
            _by_speed([device.host for device in entry.devices], self._old_speeds),
            _by_speed(self._cluster.host_of, self._speeds),
        )
        self._is_one_to_one = (
            len(self._old_speeds)
            == len(self._speeds)
            == len({image for images in self._images.values() for image in images})
        )
        self._group_of = _matched(entry.group_work, group_work(self._graph))
        self._decisions: dict[Decision, Decision] = {}

    def strategy(self) -> Strategy:
        known = self._known
        if known.op_rules and not self._has_same_ops:
            raise StrategyError("rules of single ops mean nothing on other ops.")
        old = [known.decisions[group] for group in self._group_of]
        decisions = tuple(self._decision(decision) for decision in old)
        same_groups = len(decisions) == len(known.decisions)
        return replace(
            known,
            graph=self._graph.fingerprint,
            cluster=self._cluster.fingerprint(),
            decisions=decisions,
            homes=self._homes(decisions),
            micro_batches=self._micro_batches(),
            schedule=self._schedule(decisions, keeps_chunks=same_groups),
            blocks=known.blocks if same_groups else (),
        )

    def _decision(self, decision: Decision) -> Decision:
        if decision not in self._decisions:
            self._decisions[decision] = self._on_new_devices(decision)
        return self._decisions[decision]

    def _on_new_devices(self, decision: Decision) -> Decision:
        load: dict[int, float] = {}
        for device, share in zip(decision.devices, decision.shares, strict=True):
            for image in self._images[device]:
                per_speed = share / self._old_speeds[device]
                load[image] = load.get(image, 0.0) + per_speed * self._speeds[image]
        devices = tuple(sorted(load))
        if (decision.teams or decision.parts) and not self._is_one_to_one:
            raise StrategyError("teams mean nothing on other numbers of devices.")
        weights = [load[device] for device in devices]
        sync = decision.sync
        if len(decision.devices) == 1 < len(devices):
            sync = Sync.REDUCE_SCATTER_ALL_GATHER
        part_of = dict(zip(decision.devices, decision.parts, strict=False))
        part_of = {self._images[device][0]: part for device, part in part_of.items()}
        slices: tuple[int, ...] = ()
        if sync.takes_slices and len(devices) > 1 and (decision.slices or sync != decision.sync):
            slices = proportional_slices(self._cluster, devices)
        return replace(
            decision,
            devices=devices,
            shares=split_in_proportion(self._graph.batch_size, weights),
            sync=sync,
            slices=slices,
            slice_groups=tuple(
                tuple(self._images[device][0] for device in group)
                for group in decision.slice_groups
            )
            if self._is_one_to_one
            else (),
            teams=tuple(
                tuple(self._images[device][0] for device in team) for team in decision.teams
            ),
            parts=tuple(part_of[device] for device in devices) if decision.parts else (),
        )

    def _homes(self, decisions: Sequence[Decision]) -> tuple[int, ...]:
        """Homes at the same part of the list of parameters, where parameters are served."""
        group, known = group_ops(self._graph).group, self._known.homes
        updates = self._graph.updates
        homes = []
        for number, (op, _, _) in enumerate(updates):
            decision = decisions[int(group[op])]
            old = known[number * len(known) // len(updates)] if known else REPLICATED
            home = self._images[old][0] if old in self._images else decision.devices[0]
            homes.append(home if decision.sync.is_served else REPLICATED)
        return tuple(homes)

    def _micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """As many micro-batches as before, of one size, divided in proportion to the shares."""
        count = min(self._known.num_micro_batches, self._graph.batch_size)
        if count <= 1:
            return ()
        sizes = split_evenly(self._graph.batch_size, count)
        return (sizes, *((0,) * count for _ in range(self._cluster.num_devices - 1)))

    def _schedule(self, decisions: Sequence[Decision], *, keeps_chunks: bool) -> PipelineSchedule:
        known = self._known.schedule
        if known.is_default:
            return known
        caps: list[tuple[int, ...]] = [()] * self._cluster.num_devices
        for device, cap in enumerate(known.device_caps):
            for image in self._images.get(device, ()):
                caps[image] = (cap,)
        starts = known.chunk_starts if keeps_chunks else ()
        schedule = replace(known, in_flight=tuple(caps), turns=(), chunk_starts=starts)
        return schedule.fitted([decision.devices for decision in decisions])


def _by_speed(host_of: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Devices of each host, the fastest hosts first."""
    hosts: dict[int, list[int]] = {}
    for device, host in enumerate(host_of):
        hosts.setdefault(host, []).append(device)
    return sorted(hosts.values(), key=lambda own: (-sum(speeds[d] for d in own), own))


def _images(old: Sequence[list[int]], new: Sequence[list[int]]) -> dict[int, list[int]]:
    """New devices for each old one: hosts in their order, devices in theirs."""
    images: dict[int, list[int]] = {}
    for host, other in _pairs(len(old), len(new)):
        for device, image in _pairs(len(old[host]), len(new[other])):
            images.setdefault(old[host][device], []).append(new[other][image])
    return images


def _pairs(num_old: int, num_new: int) -> list[tuple[int, int]]:
    """Pairs of positions that belong together, with each old and each new one at least once.

    >>> _pairs(2, 4), _pairs(3, 1)
    ([(0, 0), (0, 1), (1, 2), (1, 3)], [(0, 0), (1, 0), (2, 0)])
    """
    if num_new >= num_old:
        return [(new * num_old // num_new, new) for new in range(num_new)]
    return [(old, old * num_new // num_old) for old in range(num_old)]


def _matched(old: Sequence[float], new: Sequence[float]) -> list[int]:
    """The old group for each new one: at its position, or with as much work before it."""
    if len(old) == len(new):
        return list(range(len(new)))
    ends = np.cumsum(old)
    middles = np.cumsum(new) - np.array(new) / 2.0
    found = np.searchsorted(ends, middles * ends[-1])
    return [int(number) for number in np.minimum(found, len(old) - 1)]
