"""A timeline as a trace file for https://ui.perfetto.dev or chrome://tracing.

The format is Chrome's trace events (JSON object format): every host is a process whose threads are
the compute streams of its devices, and one more process, "links", has a thread for every pair of
devices and every communicator. Times are microseconds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heterog.files import write_json
from heterog.lowering.program import FloatArray
from heterog.simulator.timeline import Lane, Timeline


def write_trace(
    path: str | Path,
    timeline: Timeline,
    *,
    title: str = "",
    memory: bool | Mapping[int, tuple[FloatArray, FloatArray]] = True,
) -> None:
    """Write a trace; compressed if the name ends in ``.gz``, which Perfetto reads as well.

    Args:
        path: Path of the file.
        timeline: Timeline to show.
        title: Title kept in the file's metadata.
        memory: Counters of memory: ``True`` for the timeline's own, or (seconds, bytes) by device
            index, or ``False`` for none.

    Raises:
        InputFileError: the file cannot be written; no half of it is left behind.
    """
    write_json(path, trace_document(timeline, title=title, memory=memory))


def trace_document(
    timeline: Timeline,
    *,
    title: str = "",
    memory: bool | Mapping[int, tuple[FloatArray, FloatArray]] = True,
) -> dict[str, Any]:
    """The trace as JSON values; see ``write_trace``."""
    if memory is True:
        memory = {
            device: timeline.memory(device) for device in range(timeline.cluster.num_devices)
        }
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
            *_counters(timeline, memory or {}),
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
    others = trace_document(measured, memory=False)["traceEvents"]
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
    """A lane's tasks on as many rows as necessary: events of one thread must not overlap.

    Transfers of one pair do overlap, by their latency.
    """
    rows: list[list[int]] = [[]]
    free_from = [0]
    for task in lane.tasks:
        if math.isnan(timeline.start[task] + timeline.finish[task]):
            continue
        begin, end = _nanoseconds(timeline, task)
        row = next((row for row, free in enumerate(free_from) if free <= begin), len(rows))
        if row == len(rows):
            rows.append([])
            free_from.append(0)
        rows[row].append(task)
        free_from[row] = end
    return rows


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
        points = list(zip(times_s.tolist(), num_bytes.tolist(), strict=True))
        for index, (time_s, amount) in enumerate(points):
            # Of several changes at one instant only the last is visible.
            if index + 1 < len(points) and points[index + 1][0] == time_s:
                continue
            yield {
                "ph": "C",
                "pid": timeline.cluster.host_of[device] + 1,
                "tid": 0,
                "ts": round(time_s * 1e9) / 1e3,
                "name": f"{timeline.cluster.devices[device].name} memory",
                "args": {"bytes": round(amount)},
            }
