import gzip
import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterog.errors import InputFileError
from heterog.report.lanes import trace_document, write_comparison, write_trace
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.timeline import Timeline
from heterog.strategy.strategy import Decision
from tests.simulator import builders


def data_parallel() -> Timeline:
    cluster = builders.cluster_of((10.0, ["V100-16GB"]), (10.0, ["P100-12GB"]))
    graph = builders.linear_chain(("a", "b"))
    decision = Decision(devices=(0, 1), shares=(6, 2))
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(builders.strategy_of(graph, cluster, decision))
    program, start, finish = evaluator.timings(choice, Order.FIFO)
    return Timeline(program, start, finish, cluster, graph)


def events_of(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_predicted_and_measured_lanes_side_by_side(tmp_path: Path) -> None:
    predicted = data_parallel()
    start, finish = 2.0 * predicted.start, 2.0 * predicted.finish
    start[0] = np.nan  # not recorded: left out
    measured = Timeline(predicted.program, start, finish, predicted.cluster, predicted.graph)
    path = tmp_path / "trace.json"
    write_comparison(path, predicted, measured)
    document = json.loads(path.read_text())
    lanes = [event for event in events_of(document, "M") if event["name"] == "process_name"]
    assert [(event["pid"], event["args"]["name"]) for event in lanes] == [
        (1, "host A, predicted"),
        (2, "host B, predicted"),
        (3, "links, predicted"),
        (4, "host A, measured"),
        (5, "host B, measured"),
        (6, "links, measured"),
    ]
    order = [e for e in events_of(document, "M") if e["name"] == "process_sort_index"]
    assert [e["pid"] for e in sorted(order, key=lambda e: e["args"]["sort_index"])] == [
        *(1, 4, 2, 5, 3, 6)
    ]
    events = events_of(document, "X")
    first = [event for event in events if event["pid"] <= 3]
    second = {event["args"]["task"]: event for event in events if event["pid"] > 3}
    assert len(first) == predicted.program.num_tasks
    assert len(second) == predicted.program.num_tasks - 1
    for event in first:
        if event["args"]["task"] > 0:
            twin = second[event["args"]["task"]]
            assert (twin["name"], twin["pid"]) == (event["name"], event["pid"] + 3)
            assert twin["dur"] == pytest.approx(2.0 * event["dur"], abs=5e-3)


def test_trace_of_data_parallelism(tmp_path: Path) -> None:
    timeline = data_parallel()
    path = tmp_path / "trace.json"
    write_trace(path, timeline)
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["title"] == timeline.graph.name

    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in events_of(document, "M")
    }
    processes = [name for (what, _, _), name in names.items() if what == "process_name"]
    assert processes == ["host A", "host B", "links"]
    threads = {
        name: (pid, tid) for (what, pid, tid), name in names.items() if what == "thread_name"
    }
    assert threads == {
        "A:0 V100-16GB compute": (1, 1),
        "B:0 P100-12GB compute": (2, 2),
        "ring all-reduce A:0 B:0": (3, 3),
    }

    events = events_of(document, "X")
    assert len(events) == timeline.program.num_tasks
    first = next(event for event in events if event["args"]["task"] == 0)
    assert (first["pid"], first["tid"], first["name"]) == (1, 1, "mm a forward")
    assert first["ts"] == 0.0
    assert first["dur"] == pytest.approx(timeline.finish[0] * 1e6, abs=1e-3)
    assert first["args"] == {
        "task": 0,
        "module": "a",
        "phase": "forward",
        "micro_batch": 0,
        "samples": 6,
    }
    reduced = next(event for event in events if event["name"] == "all-reduce b.weight")
    assert (reduced["pid"], reduced["args"]["bytes"]) == (3, 4 * 1024**2)
    last = max(event["ts"] + event["dur"] for event in events)
    assert last == pytest.approx(timeline.seconds * 1e6, abs=2e-3)

    counters = events_of(document, "C")
    assert {event["name"] for event in counters} == {"A:0 memory", "B:0 memory"}
    most = max(event["args"]["bytes"] for event in counters if event["pid"] == 1)
    assert most == round(timeline.memory(0)[1].max())


def test_counters_can_be_given_or_left_out() -> None:
    timeline = data_parallel()
    assert not events_of(trace_document(timeline, memory={}), "C")
    given_ = {1: (np.array([0.0, 0.5, 0.5]), np.array([1.0, 2.0, 3.0]))}
    counters = events_of(trace_document(timeline, memory=given_), "C")
    values = [(event["pid"], event["ts"], event["args"]["bytes"]) for event in counters]
    assert values == [(2, 0.0, 1), (2, 0.5e6, 3)]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_events_of_one_thread_never_overlap(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = builders.random_graph(rng), builders.random_cluster(rng)
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(builders.random_strategy(rng, graph, cluster))
    program, start, finish = evaluator.referee_timings(choice, Order.FIFO)
    timeline = Timeline(program, start, finish, cluster, graph)
    document = json.loads(json.dumps(trace_document(timeline), allow_nan=False))
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events_of(document, "X"):
        begin = round(event["ts"] * 1e3)
        end = begin + round(event["dur"] * 1e3)
        threads.setdefault((event["pid"], event["tid"]), []).append((begin, end))
    assert sum(map(len, threads.values())) == program.num_tasks
    for spans in threads.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    named = {(e["pid"], e["tid"]) for e in events_of(document, "M") if e["name"] == "thread_name"}
    assert set(threads) <= named


def test_compressed_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write_trace(path, data_parallel())
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"cannot write .*trace\.json") as error:
        write_trace(tmp_path / "missing" / "trace.json", data_parallel())
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
