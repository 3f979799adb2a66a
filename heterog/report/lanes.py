"""A timeline as arrays for the report's canvas: lanes, tasks, critical path and memory.

There is one lane for every device's compute stream and one for every link in use (NICs and ports,
per direction), host by host. A transfer or collective is shown on every link that it loads.
Arrays travel as base64 of little-endian numbers.
"""

import base64
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from heterog.simulator.evaluator import MEMORY_MARGIN
from heterog.simulator.timeline import Timeline
from heterog.strategy.program import FIRST_LINK_KIND, FloatArray, IntArray

CATEGORIES: tuple[tuple[str, frozenset[str]], ...] = (
    ("forward", frozenset({"forward"})),
    ("backward", frozenset({"backward"})),
    ("recompute", frozenset({"recompute"})),
    ("update", frozenset({"update"})),
    ("copy, sum", frozenset({"accumulate", "flatten", "split", "concat", "sum"})),
    ("send", frozenset({"send"})),
    ("push, pull", frozenset({"push", "pull"})),
    ("all-reduce", frozenset({"all-reduce"})),
    ("scatter, gather", frozenset({"reduce-scatter", "all-gather"})),
    ("other", frozenset()),
)
"""What tasks are coloured by: a name, and the ``Timeline.kind`` words that it covers."""
MAX_MEMORY_POINTS = 2000
# What overlaps on one link is drawn in this many rows at most.
_MAX_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLane:
    """One row of the report's timeline.

    Attributes:
        name: ``"A:0 V100-16GB"`` or ``"A nic out"``.
        device: index of the device, -1 for a link.
        host: index of the host.
        tasks: its tasks by start.  # [num_lane_tasks]
        rows: where each is drawn, so that what overlaps lies side by side.  # [num_lane_tasks]
        busy: part of the whole time in which it does something, 0 to 1.
    """

    name: str
    device: int
    host: int
    tasks: IntArray
    rows: npt.NDArray[np.uint8]
    busy: float


def view_lanes(timeline: Timeline) -> list[ViewLane]:
    """Lanes host by host: compute streams, then links in use."""
    cluster, program = timeline.cluster, timeline.program
    order = np.lexsort((np.arange(program.num_tasks), timeline.finish, timeline.start))
    is_link = program.kind[order] >= FIRST_LINK_KIND
    on_links, on_devices = order[is_link], order[~is_link]
    uses = np.zeros((len(program.channels), len(cluster.resources)), np.bool_)
    for number in np.unique(program.channel[on_links]):
        uses[number, list(program.channels[number].traffic())] = True
    devices = program.device[on_devices]
    lanes = []
    for host in range(cluster.num_hosts):
        for device in cluster.host_devices(host):
            name = f"{cluster.devices[device].name} {cluster.devices[device].type.name}"
            lanes.append(_lane(timeline, name, device, host, on_devices[devices == device]))
        for number, resource in enumerate(cluster.resources):
            if resource.host_index == host:
                tasks = on_links[uses[program.channel[on_links], number]]
                if len(tasks):
                    lanes.append(_lane(timeline, resource.name, -1, host, tasks))
    return lanes


def view_data(timeline: Timeline) -> dict[str, Any]:
    """All that the canvas draws, as JSON values."""
    program = timeline.program
    labels, label = _labels(timeline)
    modules, module = _indexed([timeline.module(task) for task in labels.values()])
    label_module = np.array(module, np.int32)
    kinds = [_category(timeline.kind(task)) for task in labels.values()]
    names, name = _indexed([timeline.name(task) for task in labels.values()])
    path = timeline.critical_path()
    return {
        "seconds": timeline.seconds,
        "steps": program.num_steps,
        "categories": [words for words, _ in CATEGORIES],
        "names": names,
        "modules": modules,
        "start": _encoded(timeline.start, "<f8"),
        "finish": _encoded(timeline.finish, "<f8"),
        "category": _encoded(np.array(kinds)[label], "<u1"),
        "name": _encoded(np.array(name)[label], "<i4"),
        "module": _encoded(label_module[label], "<i4"),
        "bytes": _encoded(program.num_bytes, "<f8"),
        "samples": _encoded(program.samples, "<i4"),
        "micro": _encoded(program.micro, "<i4"),
        "critical": _encoded(np.array([step.task for step in path]), "<i4"),
        "lanes": [
            {
                "name": lane.name,
                "link": lane.device < 0,
                "host": lane.host,
                "busy": round(lane.busy, 4),
                "tasks": _encoded(lane.tasks, "<i4"),
                "rows": _encoded(lane.rows, "<u1"),
            }
            for lane in view_lanes(timeline)
        ],
        "memory": [_memory(timeline, device) for device in range(program.num_devices)],
    }


def thinned(
    times_s: FloatArray, num_bytes: FloatArray, most: int = MAX_MEMORY_POINTS
) -> tuple[FloatArray, FloatArray]:
    """A stepped line in fewer points, nowhere below the true one and with the same maximum.

    Of several values at one instant only the last is kept; where there are still too many points,
    each run of neighbours becomes its first time and its largest value.

    >>> thinned(np.array([0.0, 1.0, 1.0, 2.0]), np.array([5.0, 9.0, 7.0, 1.0]))
    (array([0., 1., 2.]), array([5., 7., 1.]))
    """
    last = np.append(times_s[1:] != times_s[:-1], True)
    times_s, num_bytes = times_s[last], num_bytes[last]
    if len(times_s) <= most:
        return times_s, num_bytes
    first = np.arange(0, len(times_s), -(-len(times_s) // most))
    return times_s[first], np.maximum.reduceat(num_bytes, first)


def _lane(
    timeline: Timeline, name: str, device: int, host: int, tasks: npt.NDArray[np.int64]
) -> ViewLane:
    start, finish = timeline.start[tasks], timeline.finish[tasks]
    return ViewLane(
        name=name,
        device=device,
        host=host,
        tasks=tasks.astype(np.int32),
        rows=_rows(start.tolist(), finish.tolist()),
        busy=_covered(start, finish) / timeline.seconds if timeline.seconds > 0 else 0.0,
    )


def _rows(start: Sequence[float], finish: Sequence[float]) -> npt.NDArray[np.uint8]:
    """The lowest free row of each task, in order of start; if none is free, the next to be."""
    rows = np.zeros(len(start), np.uint8)
    free = list(range(_MAX_ROWS))
    taken: list[tuple[float, int]] = []
    for index, (begin, end) in enumerate(zip(start, finish, strict=True)):
        while taken and (taken[0][0] <= begin or not free):
            heapq.heappush(free, heapq.heappop(taken)[1])
        row = heapq.heappop(free)
        heapq.heappush(taken, (end, row))
        rows[index] = row
    return rows


def _covered(start: FloatArray, finish: FloatArray) -> float:
    """Seconds in which at least one task runs; tasks are sorted by start."""
    if not len(start):
        return 0.0
    until = np.maximum.accumulate(np.concatenate([[start[0]], finish[:-1]]))
    return float(np.maximum(finish - np.maximum(start, until), 0.0).sum())


def _labels(timeline: Timeline) -> tuple[dict[tuple[int, ...], int], npt.NDArray[np.int64]]:
    """A task that speaks for all of the same kind, subject and channel; and which, by task."""
    program = timeline.program
    keys = np.stack([program.kind, program.subject, program.channel], axis=1)
    found, first, label = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    rows = [tuple(row) for row in found.tolist()]
    return dict(zip(rows, first.tolist(), strict=True)), label.reshape(-1)


def _indexed(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Distinct texts, and the position of each text among them."""
    place: dict[str, int] = {}
    indices = [place.setdefault(text, len(place)) for text in texts]
    return list(place), indices


def _category(kind: str) -> int:
    covered = (number for number, (_, words) in enumerate(CATEGORIES) if kind in words)
    return next(covered, len(CATEGORIES) - 1)


def _memory(timeline: Timeline, device: int) -> dict[str, Any]:
    times_s, num_bytes = thinned(*timeline.memory(device))
    # What is compared with the limit holds the margin as well.
    num_bytes = num_bytes * (1.0 + MEMORY_MARGIN)
    place = timeline.cluster.devices[device]
    return {
        "name": f"{place.name} {place.type.name}",
        "limit": place.usable_memory_bytes,
        "peak": float(num_bytes.max()),
        "times": _encoded(times_s, "<f8"),
        "bytes": _encoded(num_bytes, "<f8"),
    }


def _encoded(values: npt.ArrayLike, kind: str) -> str:
    return base64.b64encode(np.asarray(values).astype(kind).tobytes()).decode()
