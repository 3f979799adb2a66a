"""Solved plans in a folder: read as if anybody had written them, bounded, never in the way.

Each plan is a file of its own, moved into its place whole, so that several programs can use one
folder. What cannot be read is passed over; what has not been used for longest goes first.

An entry of the library for a solved plan, and the distance between two cases.

A solved plan's strategy for another model or cluster: the same layout, in proportion.

Hosts are matched from the fastest to the slowest, devices in their order inside hosts; where there
are more than before, neighbours share what one did. Every device keeps its load in proportion to
its speed. Groups of ops of another model are matched by how much of the step's work comes before
them. What has no meaning there is refused: rules of single ops on other ops, teams on other
numbers of devices.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError, StrategyError
from heterog.files import write_json
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import proportional_slices
from heterog.memo import kept
from heterog.methods.data_parallel import device_speeds
from heterog.methods.planner import Candidate
from heterog.records import Count, Int32, Name, PositiveSeconds, Record, Text, read_record
from heterog.search.plan import Plan
from heterog.search.request import SeedPlanner
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.schedules import PipelineSchedule
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

SCHEMA_VERSION = 1
LIKE_UNTIL = 3.0
"""Distance up to which cases are alike, such as models of one family up to four times the size or
clusters of twice as many devices. From starts farther away, a search gains nothing."""
_SIZE_WEIGHT, _KINDS_WEIGHT, _TYPES_WEIGHT = 0.7, 3.0, 1.0
_Positive = Annotated[float, Field(gt=0.0, le=1e30, allow_inf_nan=False)]
_Part = Annotated[float, Field(ge=0.0, le=1.0 + 1e-6, allow_inf_nan=False)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class DeviceRecord(Record):
    """A device of the solved case.

    Attributes:
        host: Number of its host.
        type: Name of its type.
        samples_per_s: Throughput for the whole model.
    """

    host: Int32
    type: Name
    samples_per_s: _Positive


class EntryRecord(Record):
    """One solved plan.

    Attributes:
        schema_version: Version of the format.
        model: Name of the model, for people.
        graph: Fingerprint of the graph.
        ops: Hash of the ops without their shapes, which models that differ only in sizes share.
        cluster: Fingerprint of the cluster.
        num_parameters: Number of scalar parameters.
        flops_per_sample: FLOPs of a step for each sample.
        batch_size: Samples of a step.
        kinds: Part of the FLOPs by kind of op.
        group_work: Part of the work in each group of ops, in their order.
        devices: Devices in the order of the cluster.
        step_time_s: Predicted step time.
        order: Order of tasks.
        strategy: JSON of the strategy.
    """

    schema_version: int
    model: Text
    graph: _Hash
    ops: _Hash
    cluster: _Hash
    num_parameters: _Positive
    flops_per_sample: _Positive
    batch_size: Count
    kinds: Annotated[dict[str, _Part], Field(max_length=1000)]
    group_work: Annotated[list[_Part], Field(min_length=1, max_length=4096)]
    devices: Annotated[list[DeviceRecord], Field(min_length=1, max_length=2048)]
    step_time_s: PositiveSeconds
    order: Annotated[str, Field(pattern=r"^(fifo|rank|program)$")]
    strategy: dict[str, Any]


def ops_hash(graph: OpGraph) -> str:
    """Hash of the sequence of ops, whatever the shapes of their tensors."""
    ops = [[op.kind, op.module, int(op.phase)] for op in graph.ops]
    return hashlib.sha256(json.dumps(ops).encode()).hexdigest()[:16]


def group_work(graph: OpGraph) -> list[float]:
    """Part of the FLOPs and bytes of a step in each group."""
    group = group_ops(graph).group
    work = [0.0] * group_ops(graph).num_groups
    weights = graph.flops + graph.bytes_moved
    for op, number in enumerate(group.tolist()):
        if number >= 0:
            work[number] += float(weights[op])
    total = math.fsum(work) or 1.0
    return [each / total for each in work]


def _kinds(graph: OpGraph) -> dict[str, float]:
    found: Counter[str] = Counter()
    for op, flops in zip(graph.ops, graph.flops.tolist(), strict=True):
        if flops:
            found[op.kind] += flops
    total = math.fsum(found.values()) or 1.0
    return {kind: flops / total for kind, flops in sorted(found.items())}


def described(evaluator: Evaluator) -> dict[str, Any]:
    """The entry of a case, without its solution."""
    graph, cluster = evaluator.graph, evaluator.cluster
    return {
        "schema_version": SCHEMA_VERSION,
        "model": graph.name,
        "graph": graph.fingerprint,
        "ops": ops_hash(graph),
        "cluster": cluster.fingerprint(),
        "num_parameters": float(max(graph.num_parameters, 1)),
        "flops_per_sample": max(float(graph.flops.sum()), 1.0) / graph.batch_size,
        "batch_size": graph.batch_size,
        "kinds": _kinds(graph),
        "group_work": group_work(graph),
        "devices": [
            {"host": device.host_index, "type": device.type.name, "samples_per_s": speed}
            for device, speed in zip(cluster.devices, device_speeds(evaluator), strict=True)
        ],
    }


def entry_of(plan: Plan, evaluator: Evaluator) -> dict[str, Any] | None:
    """The entry of a plan that fits; ``None`` if it does not."""
    if plan.step_time_s is None:
        return None
    return described(evaluator) | {
        "step_time_s": plan.step_time_s,
        "order": plan.order,
        "strategy": strategy_to_dict(plan.strategy),
    }


def distance(entry: EntryRecord, case: Mapping[str, Any], cluster: Cluster) -> float:
    """Distance between a solved case and a new one; 0 if they are the same.

    Args:
        entry: The solved case.
        case: ``described`` of the new one.
        cluster: Cluster of the new one.
    """
    sizes = (
        (entry.num_parameters, case["num_parameters"]),
        (entry.flops_per_sample, case["flops_per_sample"]),
        (entry.batch_size, case["batch_size"]),
        (len(entry.group_work), len(case["group_work"])),
        (len(entry.devices), cluster.num_devices),
        (1 + max(device.host for device in entry.devices), cluster.num_hosts),
    )
    size = sum(abs(math.log2(before / now)) for before, now in sizes)
    if entry.ops == case["ops"]:
        kinds = 0.0
    else:
        kinds = _apart(entry.kinds, case["kinds"])
    own = _parts([device.type for device in entry.devices])
    types = _apart(own, _parts([device.type.name for device in cluster.devices]))
    return _SIZE_WEIGHT * size + _KINDS_WEIGHT * kinds + _TYPES_WEIGHT * types


def _parts(names: Sequence[str]) -> dict[str, float]:
    return {name: count / len(names) for name, count in Counter(names).items()}


def _apart(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Half the sum of the differences between two distributions, 0 to 1."""
    names = {*first, *second}
    return 0.5 * sum(abs(first.get(name, 0.0) - second.get(name, 0.0)) for name in names)


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

    @kept
    def _decision(self, decision: Decision) -> Decision:
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


MOST_ENTRIES = 64
"""Most files that are kept; reading all of them takes a fraction of a second."""
MOST_ENTRY_BYTES = 1024**2
"""Most bytes of a file; the zoo's largest plan takes a tenth of that."""
MOST_SEEDS = 3
"""Most plans that a search starts from, those of the most alike cases."""
LIBRARY = "library"
"""Name of the row of these plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of looking up a case in the library.

    Attributes:
        seeds: Plans of like cases; ``None`` if there are none.
        seconds: Seconds that it took to find and adapt them.
        warning: Reason why the folder could not be read; empty if it could.
    """

    seeds: SeedPlanner | None
    seconds: float
    warning: str = ""

    @property
    def num_plans(self) -> int:
        """Number of plans that a search starts from."""
        return 0 if self.seeds is None else len(self.seeds.candidates)


class PlanLibrary:
    """The plans in a folder, which need not exist.

    Args:
        folder: Folder of the files.
        most_entries: Most files that are kept.
    """

    def __init__(self, folder: Path, *, most_entries: int = MOST_ENTRIES) -> None:
        self.folder = folder
        self._most_entries = most_entries

    def look_up(self, evaluator: Evaluator, *, step_barrier: bool = True) -> Lookup:
        """The plans of the most alike cases, adapted to this one.

        Args:
            evaluator: Evaluator of the graph and cluster.
            step_barrier: Whether a step ends with all updates.
        """
        begin = time.perf_counter()
        try:
            files = self._files()
        except OSError as error:
            return Lookup(
                seeds=None,
                seconds=time.perf_counter() - begin,
                warning=f"the library {self.folder} cannot be read ({error.strerror or error}).",
            )
        near: list[tuple[float, str, Path, EntryRecord]] = []
        case = described(evaluator) if files else {}
        for path in files[: self._most_entries]:
            entry = _read(path)
            if entry is not None:
                apart = distance(entry, case, evaluator.cluster)
                if apart <= LIKE_UNTIL:
                    near.append((apart, path.name, path, entry))
        candidates: list[Candidate] = []
        for _, _, path, entry in sorted(near, key=lambda each: each[:2]):
            strategy = adapted(entry, evaluator, step_barrier=step_barrier)
            if strategy is None:
                continue
            candidates.append(Candidate(strategy=strategy, orders=(Order[entry.order.upper()],)))
            with contextlib.suppress(OSError):  # a recently used file is kept longest
                os.utime(path)
            if len(candidates) == MOST_SEEDS:
                break
        seeds = SeedPlanner(LIBRARY, candidates) if candidates else None
        return Lookup(seeds=seeds, seconds=time.perf_counter() - begin)

    def keep(self, plan: Plan, evaluator: Evaluator) -> str:
        """Keep a plan, unless a better one of the same case is there.

        Returns:
            Reason why it could not be kept; empty if nothing is wrong.
        """
        document = entry_of(plan, evaluator)
        if document is None:
            return ""
        path = self.folder / f"{document['graph']}-{document['cluster']}.json"
        before = _read(path)
        if before is not None and before.step_time_s <= document["step_time_s"]:
            return ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(path, document)
            if path.stat().st_size > MOST_ENTRY_BYTES:
                path.unlink()
            for old in self._files()[self._most_entries :]:
                old.unlink(missing_ok=True)
        except (OSError, HeterogError) as error:
            why = str(error).rstrip(".")
            return f"the plan is not kept in the library: {why}."
        return ""

    def _files(self) -> list[Path]:
        """Files of the library, those used last first."""
        found: list[tuple[float, str, Path]] = []
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as entries:
            for each in entries:
                if each.name.endswith(".json") and not each.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):  # another program removed it
                        used_s = each.stat(follow_symlinks=False).st_mtime
                        found.append((-used_s, each.name, Path(each.path)))
        return [path for _, _, path in sorted(found)]


def _read(path: Path) -> EntryRecord | None:
    """An entry; ``None`` if the file is missing or does not hold a valid one."""
    try:
        return read_record(
            path,
            "library entry",
            EntryRecord,
            versions=(SCHEMA_VERSION,),
            most_bytes=MOST_ENTRY_BYTES,
        )
    except HeterogError:
        return None
