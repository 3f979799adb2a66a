"""Pieces of the critical path by hand, then against a slow reference on random programs."""

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.pricing.device_models.model import DeviceModels
from heterog.simulator.critical_path import (
    Limit,
    Purpose,
    critical_pieces,
    link_name,
    slowest_links,
    totals,
)
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.timeline import Timeline
from heterog.strategy.strategy import Decision, Strategy
from tests.simulator import builders
from tests.simulator.test_timeline import two_layers

CLUSTER = builders.cluster_of((10.0, ["V100-16GB"]), (25.0, ["P100-12GB"]))
BYTES = 8 * 1024 * 4  # an activation of two_layers
WEIGHT = 1024 * 1024 * 4


def pieces_of(
    strategy: Strategy, host_s: float = 0.0
) -> tuple[list[tuple[str, str, str, str, float]], float]:
    graph = two_layers()
    evaluator = Evaluator(graph, CLUSTER, DeviceModels(host_s=host_s))
    program, start, finish = evaluator.referee_timings(evaluator.encode(strategy), Order.FIFO)
    timeline = Timeline(program, start, finish, CLUSTER, graph)
    pieces = critical_pieces(timeline, evaluator.cost_model)
    rows = [(str(p.limit), p.place, str(p.purpose), p.block, p.seconds) for p in pieces]
    return rows, timeline.seconds


def test_a_pipeline_by_hand() -> None:
    graph = two_layers()
    first, second = (Decision(devices=(d,), shares=(8,)) for d in (0, 1))
    rows, seconds = pieces_of(builders.strategy_of(graph, CLUSTER, [first, second]))
    nic = "10 Gbit/s NIC of A"
    wire_s = BYTES / 1.25e9
    assert [row[:4] for row in rows] == [
        ("compute", "A:0", "forward", "a"),
        ("latency", nic, "activations", "a"),
        ("link", nic, "activations", "a"),
        ("compute", "B:0", "forward", "b"),
        ("compute", "B:0", "backward", "b"),
        ("latency", nic, "activations", "b"),
        ("link", nic, "activations", "b"),
        ("compute", "A:0", "backward", "a"),
        ("compute", "A:0", "update", "a"),
    ]
    assert [rows[i][4] for i in (1, 2, 5, 6)] == pytest.approx([20e-6, wire_s, 20e-6, wire_s])
    assert sum(row[4] for row in rows) == pytest.approx(seconds, rel=1e-12)


def test_an_all_reduce_by_hand() -> None:
    graph = two_layers()
    both = Decision(devices=(0, 1), shares=(4, 4))
    rows, _ = pieces_of(builders.strategy_of(graph, CLUSTER, both))
    exchanged = [row for row in rows if row[2] == "gradients"]
    # A ring of two moves the tensor once each way through the slower NIC, in two steps.
    assert [row[:2] for row in exchanged] == [
        ("latency", "10 Gbit/s NIC of A"),
        ("link", "10 Gbit/s NIC of A"),
    ] * 2
    for latency, link in zip(exchanged[::2], exchanged[1::2], strict=True):
        assert latency[4] == pytest.approx(2 * 20e-6)
        assert link[4] == pytest.approx(WEIGHT / 1.25e9)


@pytest.mark.parametrize("shares", [(8, 0), (4, 4)])
def test_kernels_shorter_than_their_issue_wait_for_the_host(shares: tuple[int, ...]) -> None:
    devices = tuple(device for device, share in enumerate(shares) if share)
    decision = Decision(devices=devices, shares=tuple(filter(None, shares)))
    strategy = builders.strategy_of(two_layers(), CLUSTER, decision)
    fast, slow = (pieces_of(strategy, host_s)[0] for host_s in (1e-9, 1.0))
    assert "host" not in {row[0] for row in fast}
    of_ops = [row for row in slow if row[2] in ("forward", "backward", "update")]
    assert {row[0] for row in of_ops} == {"host"}
    assert sum(row[4] for row in of_ops) > 1.0  # a second for each kernel


def test_links_in_words() -> None:
    cluster = builders.cluster_of((50.0, ["T4", "T4"]), (50.0, ["T4"]), (100.0, ["T4"]))
    assert link_name(cluster, [0, 1]) == "50 Gbit/s NIC of A"
    assert link_name(cluster, [2, 1]) == "50 Gbit/s NICs of A and B"
    assert link_name(cluster, [0, 4]) == "50 and 100 Gbit/s NICs of A and C"
    assert link_name(cluster, cluster.route(0, 1)) == "nvlink inside A"


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_pieces_equal_the_slow_reference(seed: int) -> None:
    rng = Random(seed)
    evaluator, choice = builders.random_case(rng)
    cluster, model = evaluator.cluster, evaluator.cost_model
    order = rng.choice(list(Order))
    schedule = rng.choice([evaluator.timings, evaluator.referee_timings])
    program, start, finish = schedule(choice, order)
    timeline = Timeline(program, start, finish, cluster, evaluator.graph)
    pieces = critical_pieces(timeline, model)
    assert min(piece.seconds for piece in pieces) >= 0.0
    assert sum(piece.seconds for piece in pieces) == pytest.approx(timeline.seconds, rel=1e-9)

    # Second by second: what the task of the path does that is under way then.
    expected: dict[tuple[str, str], float] = defaultdict(float)
    path = timeline.critical_path
    for step, following in zip(path, [*path[1:], None], strict=True):
        begin = float(start[step.task])
        end = float(finish[step.task])
        if following is not None:
            end = min(end, float(start[following.task]))
        if timeline.is_compute(step.task):
            device = cluster.devices[int(program.device[step.task])].name
            expected["compute", device] += end - begin
        else:
            channel = program.channels[int(program.channel[step.task])]
            held = model.channel_seconds(cluster, channel).held
            longest = max(held.values(), default=0.0)
            slow = [link for link in held if held[link] >= 0.99 * longest and longest > 0]
            assert slow == list(slowest_links(cluster, channel, model))
            expected["links", link_name(cluster, slow)] += end - begin
        expected["wait", ""] += step.wait_s
    found: dict[tuple[str, str], float] = defaultdict(float)
    for piece in pieces:
        is_link = piece.limit in (Limit.LINK, Limit.LATENCY)
        limit = "compute" if piece.limit == Limit.HOST else str(piece.limit)
        found["links" if is_link else limit, piece.place] += piece.seconds
    for key in expected.keys() | found.keys():
        tolerance = 1e-9 * timeline.seconds
        assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=tolerance)

    summed = totals(pieces)
    assert sum(p.seconds for p in summed) == pytest.approx(timeline.seconds, rel=1e-9)
    assert [p.seconds for p in summed] == sorted((p.seconds for p in summed), reverse=True)
    assert len({(p.limit, p.place, p.purpose, p.block) for p in summed}) == len(summed)
    assert all((p.purpose == Purpose.NOTHING) == (p.limit == Limit.WAIT) for p in summed)
