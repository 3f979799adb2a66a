"""The grid of uniform layouts: it contains what a person would write, and its best is the best."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods.megatron_grid import MegatronGrid, _Grid, _Point
from heterog.methods.planner import Budget, Problem
from heterog.search.judging import run_method
from heterog.search.request import GivenLayout
from heterog.search.rows import MethodRow
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.zoo import build
from tests.simulator.builders import by_sheets, cluster_of
from tests.strategy.test_layouts import CLUSTER, GRAPH
from tests.thorough import THOROUGH


def task_of(evaluator: Evaluator, budget: str = "1000e") -> Problem:
    return Problem(evaluator=evaluator, budget=Budget.parse(budget))


@lru_cache(maxsize=1)
def best_of_the_grid() -> MethodRow:
    return run_method(MegatronGrid(), task_of(Evaluator(GRAPH, CLUSTER)))


@pytest.mark.parametrize(
    "text",
    [
        "dp=8",
        "zero=3,dp_replicate=hosts",
        "pp=2,micro_batch=1",
        "pp=4,micro_batch=2,zero=1",
        "micro_batch=2,zero=3",
        "tp=2,sp=true",
        "tp=2,pp=2,micro_batch=1,sp=true",
    ],
)
def test_no_layout_of_the_grid_beats_its_best(text: str) -> None:
    best = best_of_the_grid()
    given = run_method(GivenLayout(parse_layout(text)), task_of(Evaluator(GRAPH, CLUSTER)))
    assert best.outcome == given.outcome == "ok"
    assert best.step_time_s is not None
    assert given.step_time_s is not None
    assert best.step_time_s <= given.step_time_s * (1 + 1e-9)
    parse_layout(best.note)  # it says which one it is, in words that can be given back


def test_memory_is_kept_where_data_parallelism_has_none() -> None:
    """GPT-2 with a large batch: whole shares do not fit, the grid finds what does."""
    graph = capture(build("gpt2", batch_size=256))
    evaluator = Evaluator(graph, Cluster.load("paper_8gpu"))
    plain = run_method(GivenLayout(parse_layout("dp=8")), task_of(evaluator))
    best = run_method(MegatronGrid(), task_of(evaluator, "30e"))
    assert plain.outcome == "out_of_memory"
    assert best.outcome == "ok"


def test_positions_are_split_where_that_is_what_makes_a_layout_fit() -> None:
    """A team whose members keep all positions has no room; one that splits them does."""
    evaluator = Evaluator(GRAPH, CLUSTER)
    grid = _Grid(task_of(evaluator))
    point = next(each for each in grid._shapes() if each.layout.tp == 2)
    manners = [each.layout for each in grid._until_it_fits(point)]
    assert [each.sequence_parallel for each in manners[:2]] == [False, True]
    assert all(each.sequence_parallel for each in manners[1:])


def test_it_hands_over_what_it_has_when_time_is_up() -> None:
    evaluator = Evaluator(GRAPH, CLUSTER)
    cut = MegatronGrid().plan(task_of(evaluator, "3e"))
    whole = MegatronGrid().plan(task_of(evaluator))
    assert 0 < cut.num_evaluations <= 3 < whole.num_evaluations
    assert cut.candidates


@THOROUGH
def test_a_batch_that_nothing_divides_is_no_error() -> None:
    graph = capture(build("gpt2", batch_size=7))
    found = MegatronGrid().plan(task_of(Evaluator(graph, CLUSTER)))
    assert not found.candidates or found.note
    if not found.candidates:
        assert "no uniform layout divides" in found.reason


def test_copies_on_hosts_are_tried_and_pay_on_a_slow_network() -> None:
    """ZeRO 3 gathers parameters over the network; copies on hosts send slices of gradients."""
    cluster = by_sheets(cluster_of((0.5, ["T4", "T4"]), (0.5, ["T4", "T4"])))
    evaluator = Evaluator(GRAPH, cluster)
    seconds = {
        text: evaluator.referee(
            place_layout(parse_layout(text), GRAPH, cluster).strategy, Order.FIFO
        ).step_time_s
        for text in ("zero=3", "zero=3,dp_replicate=hosts")
    }
    assert seconds["zero=3,dp_replicate=hosts"] < 0.9 * seconds["zero=3"]
    grid = _Grid(Problem(evaluator=evaluator, budget=Budget(evaluations=10)))
    start = next(each for each in grid._shapes() if each.layout.dp == 4)
    assert (3, 0) in grid._kept(start, [0, 3])


def test_the_estimate_adds_up_what_is_known_by_hand() -> None:
    """Gradients in rings of hosts or of teams, sums of teams, messages, and the bubble."""
    cluster = cluster_of((5.0, ["T4", "T4"]), (5.0, ["T4", "T4"]))
    evaluator = Evaluator(GRAPH, cluster)
    grid = _Grid(task_of(evaluator))
    nic, link = cluster.nic_bandwidth_bytes_per_s[0], cluster.hosts[0].intra
    gradients = float(evaluator.tables.parameter_bytes.sum())

    def point(tp: int = 1, pp: int = 1, dp: int = 1) -> _Point:
        layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=1)
        num_micro = GRAPH.batch_size // layout.dp
        return _Point(layout=layout, devices=(0, 1, 2, 3), num_micro=num_micro)

    # Two hosts in a ring: each sends 2 (2 - 1) / 2 of all gradients, or of half of them.
    assert grid._gradient_seconds(point(dp=4)) == pytest.approx(gradients / nic)
    assert grid._gradient_seconds(point(tp=2, dp=2)) == pytest.approx(gradients / nic)
    # A stage on each host: two replicas in a ring have half of the gradients.
    inside = gradients / 2 / link.bandwidth_bytes_per_s
    assert grid._gradient_seconds(point(pp=2, dp=2)) == pytest.approx(inside)

    own = grid.boundary_bytes * GRAPH.batch_size
    assert own > 0.0
    assert grid._message_seconds(point(dp=4)) == 0.0
    assert grid._message_seconds(point(pp=2, dp=2)) == pytest.approx(own / nic)
    # Stages of single devices: the second one sends outputs to the third, gradients to the first.
    inside = own / link.bandwidth_bytes_per_s
    assert grid._message_seconds(point(pp=4)) == pytest.approx(max(own / nic, 2 * inside))
    grid.is_ring = True  # a shared head: outputs come back to the first stage
    assert grid._message_seconds(point(pp=2, dp=2)) == pytest.approx(2 * own / nic)
    team = point(tp=2, dp=2)
    sums = own / 2 / 2 / link.bandwidth_bytes_per_s + team.num_micro * link.latency_s
    assert grid._team_seconds(team) == pytest.approx(8 * grid.num_layers * sums)
    assert grid._team_seconds(point(dp=4)) == 0.0

    # Kernels so short that issuing them takes all the time take as long in a team as alone.
    kernels_s = [grid._compute_seconds(0, 1, members) for members in (1, 2)]
    assert kernels_s[1] > 0.95 * kernels_s[0]
    kernels_s = [grid._compute_seconds(0, 1 << 20, members) for members in (1, 2)]
    assert kernels_s[1] == pytest.approx(kernels_s[0] / 2, rel=0.05)

    pipeline = point(pp=2, dp=2)
    assert grid.num_layers % 4 == 0
    assert grid._least_bubble(pipeline) == pytest.approx(1 / pipeline.num_micro / 6)
    assert grid._least_bubble(replace(pipeline, num_micro=2)) == 1 / 2  # too few to fill it


def test_a_part_behind_slow_links_does_not_beat_its_whole() -> None:
    whole = cluster_of(*[(0.01, ["V100-16GB"] * 2)] * 3)
    seconds = []
    for cluster in (whole, whole.part(range(2)), whole.part(range(4))):
        search = _Grid(task_of(Evaluator(GRAPH, cluster)))
        search.answer(search.problem)
        seconds.append(search.found[search.best(1)[0]].step_time_s)
    assert seconds[0] <= min(seconds) * (1.0 + 1e-9)


def test_a_search_cut_short_has_varied_the_best_shape() -> None:
    """Shapes that are likely to be good come first, and manners before all shapes are through."""
    evaluator = Evaluator(GRAPH, by_sheets(CLUSTER))
    whole = MegatronGrid().plan(task_of(evaluator))
    cut = MegatronGrid().plan(task_of(evaluator, f"{whole.num_evaluations // 3}e"))
    best, early = (
        evaluator.evaluate(each.candidates[0].strategy, Order.FIFO).step_time_s
        for each in (whole, cut)
    )
    assert early <= 1.02 * best


def test_shapes_that_may_fit_everywhere_come_before_the_rest() -> None:
    """On 512 devices 70 billion parameters on two stages came first, and time was up."""
    cluster = cluster_of((10.0, ["V100-32GB"] * 4), (10.0, ["T4"] * 4))
    evaluator = Evaluator(GRAPH, cluster)
    evaluator.group_state_bytes = np.array([100e9])
    grid = _Grid(task_of(evaluator))
    ranks = []
    for point in sorted(grid._shapes(), key=grid._order):
        least = min(map(grid._least_bytes, grid._manners(point)))
        room = [cluster.devices[device].usable_memory_bytes for device in point.devices]
        ranks.append((least > min(room)) + (least > max(room)))
    assert ranks == sorted(ranks)
    assert len(set(ranks)) > 1
