"""A timeline as lanes: arrays for the report's canvas, and a trace file.

The canvas has one lane for every device's compute stream and one for every link in use (NICs and
ports, per direction), host by host. A transfer or collective is shown on every link that it loads.
Arrays travel as base64 of little-endian numbers.

Trace files are for https://ui.perfetto.dev or chrome://tracing, in the format of Chrome's trace
events (JSON object format). Every host is a process whose threads are the compute streams of its
devices; one more process, "links", has a thread for every pair of devices and every communicator.
Times are microseconds.
"""

import base64
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heterog.files import write_json
from heterog.grouped import grouped
from heterog.lowering.program import FIRST_LINK_KIND, FloatArray, IntArray
from heterog.simulator.evaluator import MEMORY_MARGIN
from heterog.simulator.timeline import Lane, Timeline

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
"""Colours of tasks: a name, and the ``Timeline.kind`` words that it covers."""
MAX_MEMORY_POINTS = 2000
"""Most points of the line of one device; fewer if there are very many devices."""
MAX_PIECES = 60_000
"""Number of tasks beyond which short ones are drawn together, so that the page stays small."""
_ALL_MEMORY_POINTS = 64_000
"""Most points of the lines of all devices together."""
# Overlapping tasks on one link are drawn in this many rows at most.
_MAX_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLane:
    """One row of the report's timeline.

    Attributes:
        name: ``"A:0 V100-16GB"`` or ``"A nic out"``.
        device: Index of the device, -1 for a link.
        host: Index of the host.
        tasks: Its tasks by start.  # [num_lane_tasks]
        rows: Row of each task, so that overlapping ones are side by side.  # [num_lane_tasks]
        busy: Part of the whole time in which it is busy, 0 to 1.
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
    for host, own in enumerate(cluster.host_devices):
        for device in own:
            name = f"{cluster.devices[device].name} ({cluster.devices[device].type.name})"
            lanes.append(_lane(timeline, name, device, host, on_devices[devices == device]))
        for number, resource in enumerate(cluster.resources):
            if resource.host_index == host:
                tasks = on_links[uses[program.channel[on_links], number]]
                if len(tasks):
                    lanes.append(_lane(timeline, resource.name, -1, host, tasks))
    return lanes


def view_data(timeline: Timeline) -> dict[str, Any]:
    """Everything that the canvas draws, as JSON values.

    In a program with very many tasks, short tasks are drawn together if they lie in one row of
    one lane, have one category and begin within the same short span.
    """
    program = timeline.program
    lanes = view_lanes(timeline)
    labels, label = _labels(timeline)
    modules, module = _indexed([timeline.module(task) for task in labels])
    names, name = _indexed([timeline.name(task) for task in labels])
    categories = task_categories(timeline)
    path = np.array([step.task for step in timeline.critical_path], np.int64)
    shown = _pieces(timeline, lanes, categories)
    first = shown.first
    named = np.array(name, np.int64)[label[first]]
    merged = np.flatnonzero(shown.counts > 1)
    words, word = _indexed([
        f"{count} short tasks, {CATEGORIES[kind][0]}"
        for count, kind in zip(shown.counts[merged], categories[first[merged]], strict=True)
    ])  # fmt: skip
    named[merged] = len(names) + np.array(word, np.int64)
    return {
        "seconds": timeline.seconds,
        "steps": program.num_steps,
        "merged": int(program.num_tasks - len(first)) if len(merged) else 0,
        "categories": [words for words, _ in CATEGORIES],
        "names": names + words,
        "modules": modules,
        "start": _encoded(shown.start, "<f8"),
        "finish": _encoded(shown.finish, "<f8"),
        "category": _encoded(categories[first], "<u1"),
        "name": _encoded(named, "<i4"),
        "module": _encoded(np.array(module, np.int32)[label[first]], "<i4"),
        "bytes": _encoded(shown.num_bytes, "<f8"),
        "samples": _encoded(program.samples[first], "<i4"),
        "micro": _encoded(program.micro[first], "<i4"),
        "critical": _encoded(shown.pieces_of(path), "<i4"),
        "lanes": [
            {
                "name": lane.name,
                "link": lane.device < 0,
                "host": lane.host,
                "busy": round(lane.busy, 4),
                "tasks": _encoded(tasks, "<i4"),
                "rows": _encoded(rows, "<u1"),
            }
            for lane, tasks, rows in zip(lanes, shown.tasks, shown.rows, strict=True)
        ],
        "memory": [_memory(timeline, device) for device in range(program.num_devices)],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """The pieces that are drawn: tasks, or several short ones together.

    Attributes:
        first: First task of each piece, which represents it.  # [num_pieces]
        counts: Number of tasks of each piece.  # [num_pieces]
        start: Start in seconds.  # [num_pieces]
        finish: End in seconds.  # [num_pieces]
        num_bytes: Bytes of all tasks of each piece.  # [num_pieces]
        tasks: Pieces of each lane, by start.
        rows: Row of each of these pieces.
        of_task: A piece that contains each task.  # [num_tasks]
    """

    first: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    start: FloatArray
    finish: FloatArray
    num_bytes: FloatArray
    tasks: tuple[npt.NDArray[np.int64], ...]
    rows: tuple[npt.NDArray[np.uint8], ...]
    of_task: npt.NDArray[np.int64]

    def pieces_of(self, tasks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The pieces that contain some tasks, each once, in their order."""
        found: npt.NDArray[np.int64] = self.of_task[tasks]
        _, places = np.unique(found, return_index=True)
        return found[np.sort(places)]


def _pieces(
    timeline: Timeline, lanes: Sequence[ViewLane], categories: npt.NDArray[np.int64]
) -> _Pieces:
    """Every task as a piece of its own, or as few pieces as are allowed."""
    program = timeline.program
    every = np.arange(program.num_tasks)
    if program.num_tasks <= MAX_PIECES:
        return _Pieces(
            first=every,
            counts=np.ones(program.num_tasks, np.int64),
            start=timeline.start,
            finish=timeline.finish,
            num_bytes=program.num_bytes,
            tasks=tuple(lane.tasks.astype(np.int64) for lane in lanes),
            rows=tuple(lane.rows for lane in lanes),
            of_task=every,
        )
    spans_s = (timeline.seconds / MAX_PIECES * 2.0**doublings for doublings in count())
    tried = (_merged(timeline, lanes, categories, span_s) for span_s in spans_s)
    return next(found for found in tried if len(found.first) <= MAX_PIECES)


def _merged(
    timeline: Timeline, lanes: Sequence[ViewLane], categories: npt.NDArray[np.int64], span_s: float
) -> _Pieces:
    """Pieces in which tasks shorter than a span are joined with others that begin in the span."""
    program = timeline.program
    parts = []
    of_task = np.zeros(program.num_tasks, np.int64)
    num_pieces = 0
    for lane in lanes:
        mine = lane.tasks.astype(np.int64)
        start, finish = timeline.start[mine], timeline.finish[mine]
        alone = np.where(finish - start >= span_s, np.arange(1, len(mine) + 1), 0)
        span = np.floor(start / span_s).astype(np.int64)
        keys = np.stack([lane.rows.astype(np.int64), span, categories[mine], alone], axis=1)
        _, first, piece = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        piece = piece.reshape(-1)
        begin, end = np.full(len(first), np.inf), np.zeros(len(first))
        np.minimum.at(begin, piece, start)
        np.maximum.at(end, piece, finish)
        order = np.argsort(begin, kind="stable")
        of_task[mine] = num_pieces + np.argsort(order)[piece]
        parts.append((
            np.arange(num_pieces, num_pieces + len(first)),
            lane.rows[first[order]],
            mine[first[order]],
            np.bincount(piece, minlength=len(first))[order],
            begin[order],
            end[order],
            np.bincount(piece, program.num_bytes[mine], len(first))[order],
        ))  # fmt: skip
        num_pieces += len(first)
    tasks, rows, *columns = zip(*parts, strict=True)
    firsts, counts, starts, finishes, sizes = map(np.concatenate, columns)
    return _Pieces(
        first=firsts,
        counts=counts,
        start=starts,
        finish=finishes,
        num_bytes=sizes,
        tasks=tasks,
        rows=rows,
        of_task=of_task,
    )


def task_categories(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Number of each task's category in ``CATEGORIES``.  # [num_tasks]"""
    labels, label = _labels(timeline)
    return np.array([_category(timeline.kind(task)) for task in labels], np.int64)[label]


def thinned(
    times_s: FloatArray, num_bytes: FloatArray, most: int = MAX_MEMORY_POINTS
) -> tuple[FloatArray, FloatArray]:
    """A stepped line with fewer points, nowhere below the original and with the same maximum.

    Of several values at one instant only the last is kept; if there are still too many points,
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
        rows=np.array(_rows(start.tolist(), finish.tolist(), _MAX_ROWS), np.uint8),
        busy=_covered(start, finish) / timeline.seconds if timeline.seconds > 0 else 0.0,
    )


def _rows(start: Sequence[float], finish: Sequence[float], most: int) -> list[int]:
    """The lowest free row of each task, in order of start; or the row that is free next."""
    rows = []
    free = list(range(most))
    taken: list[tuple[float, int]] = []
    for begin, end in zip(start, finish, strict=True):
        while taken and (taken[0][0] <= begin or not free):
            heapq.heappush(free, heapq.heappop(taken)[1])
        rows.append(heapq.heappop(free))
        heapq.heappush(taken, (end, rows[-1]))
    return rows


def _covered(start: FloatArray, finish: FloatArray) -> float:
    """Seconds in which at least one task runs; tasks are sorted by start."""
    if not len(start):
        return 0.0
    until = np.maximum.accumulate(np.concatenate([[start[0]], finish[:-1]]))
    return float(np.maximum(finish - np.maximum(start, until), 0.0).sum())


def _labels(timeline: Timeline) -> tuple[list[int], npt.NDArray[np.int64]]:
    """One task for each (kind, subject, channel), and the number of these for every task."""
    program = timeline.program
    keys = np.stack([program.kind, program.subject, program.channel], axis=1)
    _, first, label = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return first.tolist(), label.reshape(-1)


def _indexed(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Distinct texts, and the position of each text among them."""
    place: dict[str, int] = {}
    indices = [place.setdefault(text, len(place)) for text in texts]
    return list(place), indices


def _category(kind: str) -> int:
    covered = (number for number, (_, words) in enumerate(CATEGORIES) if kind in words)
    return next(covered, len(CATEGORIES) - 1)


def _memory(timeline: Timeline, device: int) -> dict[str, Any]:
    most = min(MAX_MEMORY_POINTS, max(_ALL_MEMORY_POINTS // timeline.cluster.num_devices, 100))
    times_s, num_bytes = thinned(*timeline.memory(device), most)
    # The values that are compared with the limit include the margin.
    num_bytes = num_bytes * (1.0 + MEMORY_MARGIN)
    place = timeline.cluster.devices[device]
    return {
        "name": f"{place.name} ({place.type.name})",
        "limit": place.usable_memory_bytes,
        "peak": float(num_bytes.max()),
        "times": _encoded(times_s, "<f8"),
        "bytes": _encoded(num_bytes, "<f8"),
    }


def _encoded(values: npt.ArrayLike, kind: str) -> str:
    return base64.b64encode(np.asarray(values).astype(kind).tobytes()).decode()


def write_trace(path: str | Path, timeline: Timeline) -> None:
    """Write a trace; compressed if the name ends in ``.gz``, which Perfetto reads as well.

    Raises:
        InputFileError: the file cannot be written; no half of it is left behind.
    """
    write_json(path, trace_document(timeline))


def trace_document(
    timeline: Timeline,
    *,
    title: str = "",
    memory: Mapping[int, tuple[FloatArray, FloatArray]] | None = None,
) -> dict[str, Any]:
    """The trace as JSON values.

    Args:
        timeline: Timeline to show.
        title: Title kept in the metadata.
        memory: (seconds, bytes) of counters of memory by device index; the timeline's own if
            ``None``.
    """
    if memory is None:
        memory = dict(enumerate(map(timeline.memory, range(timeline.cluster.num_devices))))
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title or timeline.graph.name,
            "graph": timeline.graph.name,
            "cluster": timeline.cluster.name,
        },
        "traceEvents": [
            *_processes(timeline),
            *_threads_and_tasks(timeline),
            *_counters(timeline, memory),
        ],
    }


def write_comparison(path: str | Path, predicted: Timeline, measured: Timeline) -> None:
    """Write predicted and measured lanes of the same program into one trace.

    Args:
        path: Path of the file.
        predicted: Timeline of the simulator.
        measured: Timeline on real devices; tasks whose times are NaN are left out.

    Raises:
        InputFileError: the file cannot be written.
    """
    document = trace_document(predicted, title=f"{predicted.graph.name}: predicted and measured")
    others = trace_document(measured, memory={})["traceEvents"]
    shift = predicted.cluster.num_hosts + 1
    for events, what in ((document["traceEvents"], "predicted"), (others, "measured")):
        for event in events:
            if event["name"] == "process_name":
                event["args"] = {"name": f"{event['args']['name']}, {what}"}
            elif event["name"] == "process_sort_index":
                # Predicted and measured lanes of a host, one below the other.
                place = 2 * event["args"]["sort_index"] + (what == "measured")
                event["args"] = {"sort_index": place}
    for event in others:
        event["pid"] += shift
    document["traceEvents"] += others
    write_json(path, document)


def _processes(timeline: Timeline) -> Iterator[dict[str, Any]]:
    names = [f"host {host.name}" for host in timeline.cluster.hosts]
    for number, name in enumerate([*names, "links"]):
        for what, args in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": number}),
        ):
            yield {"ph": "M", "pid": number + 1, "tid": 0, "name": what, "args": args}


def _threads_and_tasks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    links = timeline.cluster.num_hosts + 1
    thread = 0
    for lane in timeline.lanes:
        process = links if lane.device < 0 else timeline.cluster.host_of[lane.device] + 1
        for number, tasks in enumerate(_without_overlap(timeline, lane)):
            thread += 1
            name = lane.name if number == 0 else f"{lane.name} ({number + 1})"
            for what, args in (
                ("thread_name", {"name": name}),
                ("thread_sort_index", {"sort_index": thread}),
            ):
                yield {"ph": "M", "pid": process, "tid": thread, "name": what, "args": args}
            for task in tasks:
                yield _event(timeline, task, process, thread)


def _without_overlap(timeline: Timeline, lane: Lane) -> Sequence[Sequence[int]]:
    """A lane's tasks on as many rows as necessary, because events of a thread must not overlap.

    Transfers between two devices do overlap, by their latency.
    """
    times_s = timeline.start + timeline.finish
    tasks = [task for task in lane.tasks if not math.isnan(times_s[task])]
    begins = [_nanoseconds(timeline, task)[0] for task in tasks]
    ends = [_nanoseconds(timeline, task)[1] for task in tasks]
    rows = _rows(begins, ends, len(tasks))
    return list(grouped(zip(rows, tasks, strict=True)).values()) or [[]]


def _nanoseconds(timeline: Timeline, task: int) -> tuple[int, int]:
    """Start and end in whole nanoseconds, Perfetto's resolution: neighbours then touch exactly."""
    return round(float(timeline.start[task]) * 1e9), round(float(timeline.finish[task]) * 1e9)


def _event(timeline: Timeline, task: int, process: int, thread: int) -> dict[str, Any]:
    program = timeline.program
    begin, end = _nanoseconds(timeline, task)
    args: dict[str, Any] = {
        "task": task,
        "module": timeline.module(task) or "(root)",
        "phase": timeline.phase(task),
        "micro_batch": int(program.micro[task]),
    }
    if program.samples[task] > 0:
        args["samples"] = int(program.samples[task])
    if program.units[task] > 0:
        args["units"] = int(program.units[task])
    if program.num_bytes[task] > 0:
        args["bytes"] = round(float(program.num_bytes[task]))
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "name": timeline.name(task),
        "cat": timeline.kind(task),
        "args": args,
    }


def _counters(
    timeline: Timeline, memory: Mapping[int, tuple[FloatArray, FloatArray]]
) -> Iterator[dict[str, Any]]:
    for device, (times_s, num_bytes) in memory.items():
        shown = thinned(times_s, num_bytes, len(times_s))
        for time_s, amount in zip(*(each.tolist() for each in shown), strict=True):
            yield {
                "ph": "C",
                "pid": timeline.cluster.host_of[device] + 1,
                "tid": 0,
                "ts": round(time_s * 1e9) / 1e3,
                "name": f"{timeline.cluster.devices[device].name} memory",
                "args": {"bytes": round(amount)},
            }
