"""The report's numbers and its page, without a browser."""

import base64
import json
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterog.cluster import Cluster
from heterog.errors import HeterogError, InputFileError
from heterog.explain.explanation import Explanation, GivenFacts, explain
from heterog.explain.wording import percent
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.report.html import page_style, report_html, write_report
from heterog.report.lanes import CATEGORIES, MAX_PIECES, thinned, view_data, view_lanes
from heterog.report.modules import ModuleNode, module_tree
from heterog.report.pictures import history_picture
from heterog.report.side_by_side import NamedPlan, comparison_html, write_comparison_page
from heterog.search.history import MOST_POINTS, SearchHistory
from heterog.search.plan import Plan, load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.timeline import Timeline
from heterog.strategy.strategy import Decision, Sync
from heterog.units import format_bytes, format_seconds
from tests.report.hostile import forced
from tests.search.asking import make_plan
from tests.simulator import builders


def random_plan(seed: int) -> Plan:
    rng = Random(seed)
    graph, cluster = builders.random_graph(rng), builders.random_cluster(rng)
    return builders.plan_by_hand(graph, cluster, builders.random_strategy(rng, graph, cluster))


def saying(plan: Plan, *paragraphs: str) -> Explanation:
    return replace(explain(plan, changes=False), paragraphs=paragraphs)


def served_plan(cluster: Cluster) -> Plan:
    graph = builders.linear_chain(("encoder.a", "encoder.b", "head"))
    decision = Decision(devices=(0, 1), shares=(6, 2), sync=Sync.PARAMETER_SERVER)
    strategy = builders.strategy_of(graph, cluster, decision, homes=[1, 0, 1])
    return builders.plan_by_hand(graph, cluster, strategy)


def two_devices() -> Cluster:
    return builders.cluster_of((10.0, ["V100-16GB"]), (10.0, ["P100-12GB"]))


# --- lanes and memory ----------------------------------------------------------------------------


def naive_busy_s(timeline: Timeline, tasks: list[int]) -> float:
    """Seconds in which any task runs, cut at every begin and end."""
    edges = np.unique([timeline.start[tasks], timeline.finish[tasks]]).tolist() if tasks else []
    return sum(
        float(end - begin)
        for begin, end in pairwise(edges)
        if any(timeline.start[t] <= begin and timeline.finish[t] >= end for t in tasks)
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_task_is_on_its_stream_or_on_every_link_it_loads(seed: int) -> None:
    timeline = random_plan(seed).timeline()
    cluster, program = timeline.cluster, timeline.program
    lanes = view_lanes(timeline)
    of_device = {lane.device: lane for lane in lanes if lane.device >= 0}
    of_link = {lane.name: lane for lane in lanes if lane.device < 0}
    assert list(of_device) == list(range(cluster.num_devices))
    assert [lane.host for lane in lanes] == sorted(lane.host for lane in lanes)
    expected: dict[str, set[int]] = {}
    for task in range(program.num_tasks):
        if timeline.is_compute(task):
            assert task in of_device[int(program.device[task])].tasks
        else:
            for link in program.channels[program.channel[task]].traffic():
                expected.setdefault(cluster.resources[link].name, set()).add(task)
    assert {name: set(lane.tasks.tolist()) for name, lane in of_link.items()} == expected
    for lane in lanes:
        tasks = lane.tasks.tolist()
        assert tasks == sorted(tasks, key=lambda task: timeline.start[task])
        assert lane.busy * timeline.seconds == pytest.approx(naive_busy_s(timeline, tasks))
        for row in set(lane.rows.tolist()) - {4}:  # the last row may hold what fits in no other
            mine = [task for task, place in zip(tasks, lane.rows, strict=True) if place == row]
            for before, after in pairwise(mine):
                assert timeline.start[after] >= timeline.finish[before] or lane.rows.max() == 4


@pytest.mark.parametrize("seed", range(6))
def test_the_highest_memory_shown_is_what_the_plan_predicts(seed: int) -> None:
    plan = random_plan(seed)
    shown = view_data(plan.timeline())["memory"]
    assert [each["peak"] for each in shown] == pytest.approx(plan.peak_memory_bytes, abs=1.0)
    assert [each["limit"] for each in shown] == [
        device.usable_memory_bytes for device in plan.cluster.devices
    ]


steps = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=60)


@given(steps, st.integers(1, 20))
def test_thinned_lines_stay_above_and_keep_the_maximum(
    points: list[tuple[int, int]], most: int
) -> None:
    points.sort(key=lambda point: point[0])
    times, values = (np.array(column, np.float64) for column in zip(*points, strict=True))
    few_times, few_values = thinned(times, values, most)
    last = {time: value for time, value in points}  # the last of an instant is what can be seen
    assert len(few_times) <= max(most, 1)
    assert few_values.max() == max(last.values())
    assert set(few_times) <= set(times)
    assert few_times[0] == times[0]
    for time, value in last.items():
        assert few_values[np.searchsorted(few_times, time, side="right") - 1] >= value


def test_tasks_by_hand() -> None:
    plan = served_plan(two_devices())
    timeline = plan.timeline()
    data = json.loads(json.dumps(view_data(timeline), allow_nan=False))

    def numbers(key: str, kind: str) -> Any:
        return np.frombuffer(base64.b64decode(data[key]), kind)

    names = [data["names"][index] for index in numbers("name", "<i4")]
    modules = [data["modules"][index] for index in numbers("module", "<i4")]
    words = [CATEGORIES[index][0] for index in numbers("category", "<u1")]
    tasks = range(timeline.program.num_tasks)
    assert names == [timeline.name(task) for task in tasks]
    assert modules == [timeline.module(task) for task in tasks]
    assert {word for word, name in zip(words, names, strict=True) if name.startswith("push")} == {
        "push, pull"
    }
    assert {"forward", "backward", "update"} < set(words)
    assert numbers("start", "<f8").tolist() == timeline.start.tolist()
    path = [step.task for step in timeline.critical_path]
    assert numbers("critical", "<i4").tolist() == path


# --- modules -------------------------------------------------------------------------------------


def below(node: ModuleNode) -> list[ModuleNode]:
    return [node, *(each for child in node.children.values() for each in below(child))]


@pytest.mark.parametrize("seed", range(8))
def test_modules_add_up(seed: int) -> None:
    plan = random_plan(seed)
    graph = plan.graph
    root = module_tree(graph, plan.cluster, plan.strategy)
    costly = (group_ops(graph).group != CONSTANT_GROUP) & ~graph.is_view
    assert root.num_ops == int(costly.sum())
    assert root.parameter_bytes == sum(int(graph.tensor_bytes[t]) for _, t, _ in graph.updates)
    for node in below(root):
        assert node.num_ops >= sum(child.num_ops for child in node.children.values())
        if node.weight:
            assert sum(node.shares(plan.cluster.num_devices)) == pytest.approx(graph.batch_size)


def test_modules_by_hand() -> None:
    plan = served_plan(two_devices())
    root = module_tree(plan.graph, plan.cluster, plan.strategy)
    encoder = root.children["encoder"]
    assert list(encoder.children) == ["a", "b"]
    assert list(encoder.syncs) == ["parameter server on B:0", "parameter server on A:0"]
    assert encoder.shares(2) == [6.0, 2.0]
    assert encoder.parameter_bytes == 2 * encoder.children["a"].parameter_bytes


def test_recomputation_is_told() -> None:
    cluster = two_devices()
    graph = builders.linear_chain(("a", "b"))
    again = Decision(devices=(0, 1), shares=(6, 2), recompute=True)
    strategy = builders.strategy_of(graph, cluster, [again, replace(again, recompute=False)])
    plan = builders.plan_by_hand(graph, cluster, strategy)
    root = module_tree(graph, cluster, strategy)
    assert root.recomputed == {True, False}
    assert [child.recomputed for child in root.children.values()] == [{True}, {False}]
    text = Reader(report_html(plan)).text
    assert "2 devices, 2 to 6 samples, partly recomputed" in text
    assert "2 devices, 2 to 6 samples, recomputed" in text
    used = base64.b64decode(view_data(plan.timeline())["category"])
    kinds = {plan.timeline().kind(task) for task in range(len(used))}
    assert ("recompute" in kinds) == (2 in used)


def test_a_module_that_only_holds_another_is_one_row() -> None:
    cluster = two_devices()
    graph = builders.linear_chain(("model.layers.0", "model.layers.1"))
    decision = Decision(devices=(0,), shares=(8,))
    strategy = builders.strategy_of(graph, cluster, decision)
    root = module_tree(graph, cluster, strategy)
    assert next(child.name for child in root.children.values()) == "model.layers"
    assert list(root.syncs) == ["none needed"]


# --- the page ------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """All text outside scripts and styles, all attributes, and the embedded data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_the_page_says_what_the_plan_says() -> None:
    graph = builders.linear_chain(("encoder.a", "encoder.b", "head"))
    methods = ("ddp", "ev_ps", "tuned_uniform", "local_search")
    plan = make_plan(graph, two_devices(), methods=methods, budget="30e")
    assert plan.step_time_s is not None
    page = Reader(report_html(plan, explanation=saying(plan, "One & two.", "Three.")))
    times = {row.method: row.step_time_s or np.inf for row in plan.rows}
    baseline = times["tuned_uniform"]  # the methods that gains are over, where there is one
    for words in (
        f"{graph.name} on tiny",
        format_seconds(plan.step_time_s),
        format_seconds(plan.lower_bound_s),
        f"{plan.throughput_samples_per_s:,.1f}",
        f"{baseline / plan.step_time_s:.2f}x",
        f"the plan is {plan.step_time_s / plan.lower_bound_s - 1:.0%} above it",
        "One & two.",
        "Three.",
        "budget 30e",
        plan.program_hash,
        graph.fingerprint,
        plan.cluster.fingerprint,
        *methods,
    ):
        assert words in page.text
    assert json.loads(page.scripts[0])["seconds"] == plan.timeline().seconds


def test_the_page_asks_for_nothing_and_is_always_the_same() -> None:
    plan = served_plan(two_devices())
    page = report_html(plan)
    assert page == report_html(plan)
    assert not re.search(r"https?:|@import|url\(", page)
    addresses = [value for _, name, value in Reader(page).attributes if name in ("src", "href")]
    assert addresses == ["data:,"]
    assert "{{" not in page


EVIL = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"


def test_text_of_a_model_stays_text() -> None:
    graph = builders.linear_chain((f"a{EVIL}", "b&amp;{{data}}"))
    graph = forced(graph, name=EVIL, source=EVIL)
    cluster = forced(two_devices(), name=EVIL)
    strategy = builders.strategy_of(graph, cluster, Decision(devices=(0, 1), shares=(6, 2)))
    plan = builders.plan_by_hand(graph, cluster, strategy)
    row = replace(plan.rows[0], method=EVIL, shortage=EVIL)
    plan = replace(plan, method=EVIL, rows=(row,))
    text = report_html(plan, explanation=saying(plan, EVIL))
    page = Reader(text)
    assert len(page.scripts) == text.count("<script") == 2
    assert "<img" not in text
    assert text.count("&lt;script&gt;document.title") >= 6
    assert f"a{EVIL}" in json.loads(page.scripts[0])["modules"]
    assert "b&amp;{{data}}" in page.text


def test_facts_are_tables_with_the_explanations_numbers() -> None:
    plan = served_plan(two_devices())
    explanation = explain(plan)
    page = Reader(report_html(plan, explanation=explanation))
    (only,) = explanation.decided.ranges
    assert "encoder.a to head A:0 (V100-16GB); B:0 (P100-12GB) 6, 2 parameter servers" in page.text
    assert only.num_groups == 3
    for device in explanation.fit.devices:
        assert (
            f"{device.device} ({device.device_type}) {format_bytes(device.peak_bytes)}"
            in page.text
        )
    for change in explanation.changes:
        assert change.what in page.text
    by_limit: dict[str, float] = {}
    for piece in explanation.pieces:
        by_limit[piece.limit] = by_limit.get(piece.limit, 0.0) + piece.seconds
    assert sum(by_limit.values()) == pytest.approx(explanation.step_time_s)
    compute = by_limit["compute"] / explanation.step_time_s
    assert f"compute {percent(compute)}" in page.text
    assert explanation.quality.data_parallel_s is not None
    assert format_seconds(explanation.quality.data_parallel_s) in page.text
    told = [
        value or "" for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")
    ]
    assert {"devices A:0", "devices B:0"} <= set(told), "the cluster is drawn host by host"


def test_alike_hosts_are_one_card_and_the_own_layout_a_row() -> None:
    cluster = builders.cluster_of(*[(10.0, ["L4", "L4"])] * 3, (10.0, ["T4"]))
    graph = builders.linear_chain(("a", "b"))
    shares = Decision(devices=(0, 1, 2, 3, 4, 5), shares=(2, 2, 1, 1, 1, 1))
    plan = builders.plan_by_hand(graph, cluster, builders.strategy_of(graph, cluster, shares))
    given = GivenFacts(
        said="", outcome="ok", step_time_s=0.25, shortage="", gain=None, differences=()
    )
    explanation = explain(plan, changes=False)
    page = Reader(report_html(plan, explanation=replace(explanation, given=given)))
    names = [host.name for host in cluster.hosts]
    assert f"2 hosts: {names[1]} and {names[2]} L4" in page.text
    assert sum(value == "host" for _, name, value in page.attributes if name == "class") == 3
    assert f"your layout {format_seconds(0.25)}" in page.text
    large = replace(given, outcome="out_of_memory", step_time_s=None)
    page = Reader(report_html(plan, explanation=replace(explanation, given=large)))
    assert "your layout (out of memory) - -" in page.text


def test_colours_of_neighbours_differ() -> None:
    """At least 30 apart in CIELAB (CIE 1976), where 2 is just noticeable."""
    style = page_style()
    for name, count in (("r", 8), ("c", 10)):  # of the light scheme, which comes first
        colours = [re.findall(rf"--{name}{i}: (#\w+)", style)[0] for i in range(count)]
        assert min(apart(*pair) for pair in combinations(colours, 2)) >= 30


def apart(one: str, other: str) -> float:
    """Distance of two colours in CIELAB, by the sRGB and CIE formulas."""

    def lab(colour: str) -> list[float]:
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
        )
        x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
        y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
        fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
        return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)]

    return float(np.linalg.norm(np.subtract(lab(one), lab(other))))


def test_a_plan_of_another_version_says_that_its_prediction_is_old() -> None:
    plan = served_plan(two_devices())
    assert plan.step_time_s is not None
    assert "was made with a prediction" not in report_html(plan)
    page = Reader(report_html(replace(plan, step_time_s=plan.step_time_s / 2)))
    assert f"was made with a prediction of {format_seconds(plan.step_time_s / 2)}" in page.text
    assert f"predicts {format_seconds(plan.step_time_s)}. Plan again." in page.text


# --- the search ----------------------------------------------------------------------------------


def test_the_history_of_a_search_falls_and_is_kept_in_the_file(tmp_path: Path) -> None:
    graph = builders.linear_chain([f"layers.{i}" for i in range(8)], width=512)
    methods = ("ddp", "tuned_uniform", "local_search")
    plan = make_plan(graph, two_devices(), methods=methods, budget="300e")
    assert {each.method for each in plan.history} == set(methods)
    for each in plan.history:
        steps = [step_s for _, _, step_s in each.points]
        assert steps == sorted(set(steps), reverse=True), "only improvements"
        counts = [count for _, count, _ in each.points]
        assert counts == sorted(counts)
        assert each.start_s <= each.points[0][0] <= each.points[-1][0] <= each.finish_s
    row = next(row for row in plan.rows if row.method == "local_search")
    found = next(each for each in plan.history if each.method == "local_search")
    assert row.step_time_s == pytest.approx(found.points[-1][2], rel=0.01)
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.history == plan.history
    assert "How the search went" in Reader(report_html(loaded)).text
    assert "How the search went" not in Reader(report_html(replace(plan, history=()))).text


def test_a_long_search_keeps_few_points() -> None:
    evaluator = Evaluator(builders.linear_chain(("a",)), two_devices())
    history = SearchHistory(evaluator, lambda method, fraction, best: None)
    history.tell("m", 0.0, np.inf)
    for step in range(5000):
        history.tell("m", step / 5000, 5000.0 - step)
        history.tell("m", step / 5000, 6000.0)  # no improvement
    (found,) = history.of(["m", "other"])
    assert 10 < len(found.points) <= MOST_POINTS
    assert (found.points[0][2], found.points[-1][2]) == (5000.0, 1.0)
    assert len(history_picture([found], "m")) < 10_000


# --- large plans ---------------------------------------------------------------------------------


def test_short_tasks_of_large_plans_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is drawn stays on its lane and in its time; nothing gets lost."""
    plan = random_plan(3)
    timeline = plan.timeline()
    whole = view_data(timeline)
    monkeypatch.setattr("heterog.report.lanes.MAX_PIECES", timeline.program.num_tasks // 3)
    few = view_data(timeline)
    start, finish = (
        np.frombuffer(base64.b64decode(few[key]), "<f8") for key in ("start", "finish")
    )
    assert len(start) <= timeline.program.num_tasks // 3
    assert few["merged"] > 0
    assert any("short tasks, " in name for name in few["names"])
    assert (finish >= start).all()
    for lane, before, after in zip(
        view_lanes(timeline), whole["lanes"], few["lanes"], strict=True
    ):
        pieces = np.frombuffer(base64.b64decode(after["tasks"]), "<i4")
        assert (np.diff(start[pieces]) >= 0).all(), "the canvas looks tasks up by start"
        assert start[pieces].min() == timeline.start[lane.tasks].min()
        assert finish[pieces].max() == timeline.finish[lane.tasks].max()
        assert before["busy"] == after["busy"]
    path = np.frombuffer(base64.b64decode(few["critical"]), "<i4")
    assert len(path) == len(set(path.tolist())) > 0
    assert "short tasks are drawn together" in Reader(report_html(plan)).text


def test_what_is_drawn_of_a_very_large_plan_is_bounded() -> None:
    """64 devices with 16 micro-batches each: far more tasks than anybody can see."""
    graph = builders.linear_chain([f"stage.{i // 8}.{i % 8}" for i in range(16)], batch_size=1024)
    cluster = Cluster.load("hap_v100_p100")
    everywhere = Decision(devices=tuple(range(64)), shares=(16,) * 64)
    strategy = replace(
        builders.strategy_of(graph, cluster, everywhere), micro_batches=((1,) * 16,) * 64
    )
    evaluator = Evaluator(graph, cluster)
    program, start, finish = evaluator.timings(evaluator.encode(strategy), Order.FIFO)
    assert program.num_tasks > MAX_PIECES
    data = view_data(Timeline(program, start, finish, cluster, graph))
    assert len(base64.b64decode(data["start"])) <= 8 * MAX_PIECES
    assert len(json.dumps(data)) < 8e6


# --- several plans -------------------------------------------------------------------------------


def test_several_plans_side_by_side(tmp_path: Path) -> None:
    cluster = two_devices()
    graph = builders.linear_chain(("encoder.a", "encoder.b", "head"))
    front, back = Decision(devices=(0,), shares=(8,)), Decision(devices=(1,), shares=(8,))
    pipeline = builders.plan_by_hand(
        graph, cluster, builders.strategy_of(graph, cluster, [front, back, back])
    )
    plans = [
        NamedPlan(name="served", plan=served_plan(cluster)),
        NamedPlan(name="<b>", plan=pipeline),
    ]
    text = comparison_html(plans)
    page = Reader(text)
    assert "2 plans: served, <b>" in page.text
    assert "<b></" not in text
    for each in plans:
        assert each.plan.step_time_s is not None
        assert format_seconds(each.plan.step_time_s) in page.text
    assert "encoder.b to head" in page.text
    assert page.text.count("chance to fit over 99 %") == 2
    assert page.scripts == [], "static: no script at all"
    assert not re.search(r"https?:|@import|url\(", text)
    assert "differ" not in page.text
    larger = builders.linear_chain(("encoder.a",), batch_size=16)
    other = builders.plan_by_hand(
        larger,
        cluster,
        builders.strategy_of(larger, cluster, Decision(devices=(0, 1), shares=(8, 8))),
    )
    mixed = Reader(comparison_html([*plans, NamedPlan(name="large", plan=other)])).text
    assert "The batches differ: compare samples per second, not step times." in mixed
    with pytest.raises(HeterogError, match="9 plans are too many for one page; give at most 8"):
        comparison_html(plans[:1] * 9)
    write_comparison_page(tmp_path / "page.html", plans)
    assert (tmp_path / "page.html").read_text("utf-8") == text


def test_texts_of_several_plans_stay_text() -> None:
    graph = builders.linear_chain((f"a{EVIL}", "b"))
    graph = forced(graph, name=EVIL, source=EVIL)
    cluster = two_devices()
    hosts = (forced(cluster.hosts[0], name=EVIL), cluster.hosts[1])
    cluster = forced(cluster, name=EVIL, hosts=hosts)
    front, back = Decision(devices=(0,), shares=(8,)), Decision(devices=(1,), shares=(8,))
    plan = builders.plan_by_hand(
        graph, cluster, builders.strategy_of(graph, cluster, [front, back])
    )
    row = replace(plan.rows[0], method=EVIL, shortage=EVIL)
    plan = replace(plan, method=EVIL, rows=(row,), shortage=EVIL)
    for text, scripts in (
        (comparison_html([NamedPlan(name=EVIL, plan=plan)] * 2), 0),
        (report_html(plan), 2),
    ):
        assert text.count("<script") == scripts
        assert "<img" not in text
        assert "&lt;script&gt;" in text


def test_a_plan_that_does_not_fit_says_what_is_missing() -> None:
    cluster = two_devices()
    devices = tuple(replace(device, usable_memory_bytes=2**20) for device in cluster.devices)
    graph = builders.linear_chain(("a", "b"))
    plan = make_plan(graph, replace(cluster, devices=devices), methods=("ddp",), budget="1e")
    assert plan.step_time_s is None
    page = Reader(report_html(plan))
    assert f"This plan cannot run (out of memory): {plan.shortage}" in page.text
    assert "more than its 1.0 MiB" in plan.shortage
    assert all(peak > 2**20 for peak in plan.peak_memory_bytes)
    assert "was not tried, or does not fit" in page.text


def test_without_step_barrier_several_steps_are_shown_and_no_gap() -> None:
    cluster = two_devices()
    graph = builders.linear_chain(("a", "b"))
    decision = Decision(devices=(0, 1), shares=(6, 2))
    strategy = builders.strategy_of(graph, cluster, decision, step_barrier=False)
    page = Reader(report_html(builders.plan_by_hand(graph, cluster, strategy)))
    assert "8 steps follow one another" in page.text
    assert "above it" not in page.text


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    plan = served_plan(two_devices())
    plan.report(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text("utf-8")
    assert text == report_html(plan)
    explanation = explain(plan, changes=False)
    for words in (explanation.recommendation, *explanation.paragraphs):
        assert escape(words) in text
    with pytest.raises(InputFileError, match="does not exist"):
        write_report(tmp_path / "no" / "plan.html", plan)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
